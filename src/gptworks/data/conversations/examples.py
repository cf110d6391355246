"""Conversations written as examples into shards: tokens, which of them are learned, and what tells them apart."""

import hashlib
from collections.abc import Callable, Iterable, Mapping

from gptworks.chat_template import ChatTemplate, Message
from gptworks.data.conversations.masking import encode_records
from gptworks.data.conversations.reading import Conversation, is_held_out
from gptworks.data.shards import ALTERED, EMPTY, NO_END, SWAPPED, UNANSWERED, Origin, ShardWriter, Split
from gptworks.tokenizer import special_tokens


def write_examples(
    writers: Mapping[Split, ShardWriter],
    template: ChatTemplate,
    conversations: Iterable[Conversation],
    held_out_fraction: float,
    processes: int,
    report: Callable[[str, int, int | None], None],
) -> tuple[Origin, ...]:
    """Encode each conversation into its split; returns the files they came from.

    Raises:
        UserError: the template refuses a conversation; the message names the record.
    """
    origins: list[Origin] = []
    unknown = special_tokens(template.tokenizer).unk
    done_bytes = 0
    encoded = encode_records(template, conversations, processes)
    for n_before, (conversation, [example]) in enumerate(encoded):
        if not origins or origins[-1].name != conversation.origin or conversation.record == 1:
            origins.append(Origin(name=conversation.origin, shape=conversation.shape, records=0))
        origins[-1] = origins[-1].model_copy(update={"records": conversation.record})
        answers = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
        flags = NO_END * (not example.all_end) + ALTERED * (not example.as_given)
        flags += EMPTY * any(not answer.strip() for answer in answers) + UNANSWERED * (not answers)
        roles = [message["role"] for message in conversation.messages if message["role"] != "system"]
        flags += SWAPPED * (roles[:1] == ["assistant"] and roles[-1:] == ["user"])
        writers["validation" if is_held_out(conversation.prompt, held_out_fraction) else "train"].add(
            example.ids,
            example.text_bytes,
            starts_document=True,
            unknown_tokens=0 if unknown is None else int((example.ids == unknown).sum()),
            learned=example.learned,
            example=(n_before, *_hashes(conversation.messages), flags),
        )
        done_bytes += example.text_bytes
        report("shards", done_bytes, None)
    return tuple(origins)


def _hashes(messages: list[Message]) -> tuple[int, int, int]:
    """Of the whole, of what comes before the last answer, and of that answer; the same whatever case and spaces."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    return _hash(messages), _hash(messages[:last]), _hash(messages[last : last + 1])


def _hash(messages: list[Message]) -> int:
    text = "\0".join(f"{message['role']}:{' '.join(message['content'].split()).casefold()}" for message in messages)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")
