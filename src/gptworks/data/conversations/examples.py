"""Write conversations and pairs as examples in shards: tokens, flags of the learned ones, hashes of the text."""

import hashlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from gptworks.chat_template import ChatTemplate, Message
from gptworks.data.conversations.masking import Example, encode_records
from gptworks.data.conversations.preferences import Pair
from gptworks.data.conversations.reading import Conversation, is_held_out
from gptworks.data.shard_writer import ShardWriter
from gptworks.data.shards import ALTERED, EMPTY, NO_END, SWAPPED, UNANSWERED, Origin, Split
from gptworks.special_tokens import special_tokens


def write_examples(
    writers: Mapping[Split, ShardWriter],
    template: ChatTemplate,
    records: Iterable[Conversation | Pair],
    held_out_fraction: float,
    processes: int,
    report: Callable[[str, int, int | None], None],
) -> tuple[Origin, ...]:
    """Encode each record's conversations and write them to its split. Returns the records' files or datasets.

    Raises:
        UserError: the template refuses a conversation; the message names the record.
    """
    origins: list[Origin] = []
    unknown = special_tokens(template.tokenizer).unk
    done_bytes = 0
    for n_before, (record, examples) in enumerate(encode_records(template, records, processes)):
        if not origins or origins[-1].name != record.origin or record.record == 1:
            origins.append(Origin(name=record.origin, shape=record.shape, records=0))
        counts = dict(origins[-1].unread)
        for name in record.unread:
            n_records, first = counts.get(name, (0, record.record))
            counts[name] = (n_records + 1, first)
        origins[-1] = origins[-1].model_copy(update={"records": record.record, "unread": counts})
        writer = writers["validation" if is_held_out(record.prompt, held_out_fraction) else "train"]
        for example in examples:
            if isinstance(record, Pair):
                learned, hashes, flags = _last_run(example.learned), (0, 0, 0), NO_END * (not example.all_end)
            else:
                learned, hashes, flags = example.learned, _hashes(record.messages), _flags(record, example)
            writer.add(
                example.ids,
                example.text_bytes,
                starts_document=True,
                unknown_tokens=0 if unknown is None else int((example.ids == unknown).sum()),
                learned=learned,
                example=(n_before, *hashes, flags),
            )
            done_bytes += example.text_bytes
        report("shards", done_bytes, None)
    return tuple(origins)


def _last_run(learned: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """`learned` with only its last unbroken run of trues: earlier answers of a pair are part of the prompt."""
    places = np.flatnonzero(learned)
    last = learned.copy()
    if len(gaps := np.flatnonzero(np.diff(places) > 1)):
        last[: places[gaps[-1]] + 1] = False
    return last


def _flags(record: Conversation, example: Example) -> int:
    turns = [turn for i, turn in enumerate(record.messages) if i not in record.unlearned]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    roles = [turn["role"] for turn in record.messages if turn["role"] != "system"]
    flags = NO_END * (not example.all_end) + ALTERED * (not example.as_given)
    flags += EMPTY * any(not answer.strip() for answer in answers) + UNANSWERED * (not answers)
    return flags + SWAPPED * (roles[:1] == ["assistant"] and roles[-1:] == ["user"])


def _hashes(messages: list[Message]) -> tuple[int, int, int]:
    """Hashes of all turns, of the turns before the last answer, and of that answer, ignoring case and white space."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    return _hash(messages), _hash(messages[:last]), _hash(messages[last : last + 1])


def _hash(messages: list[Message]) -> int:
    text = "\0".join(f"{message['role']}:{' '.join(message['content'].split()).casefold()}" for message in messages)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")
