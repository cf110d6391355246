"""Encode conversations and preference pairs as examples, and write them to shards: tokens, loss masks and hashes.

The learned tokens are the assistant's answers, each with its end token, except answers that a record excludes; of a
pair, the last answers. Rendering finds the answers with any template:
the turns before an answer are rendered with the generation prompt, which gives exactly the text that a model reads
before it answers. In the whole conversation, the answer follows this text and includes the end token. If a token would
span the border of an answer, the answers and the text between them are encoded separately, because the model reads one
side of the border and writes the other.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gptworks.chat_template import ChatTemplate, Message
from gptworks.data.conversations.preferences import Pair
from gptworks.data.conversations.reading import Conversation, is_held_out
from gptworks.data.permutation import hashed
from gptworks.data.shard_writer import ShardWriter
from gptworks.data.shards import ALTERED, EMPTY, NO_END, SWAPPED, UNANSWERED, Origin, Split
from gptworks.data.workers import Advance, Report, adding_up, batches_of, in_order
from gptworks.errors import UserError
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import pack_tokenizer, unpack_tokenizer

_BATCHES_WORTH_A_POOL = 16  # fewer batches are encoded before new processes would have started
_BATCH_CHARACTERS = 1 << 17  # less than for plain text: rendering takes ten times as long as encoding


@dataclass(frozen=True, slots=True)
class Example:
    """An encoded conversation with its loss mask."""

    ids: npt.NDArray[np.uint32]
    """Token ids, [n]."""
    learned: npt.NDArray[np.bool_]
    """Whether each token is learned, that is, counts in the loss, [n]."""
    text_bytes: int
    all_end: bool
    """Whether every learned answer has an end token."""
    as_given: bool
    """Whether the template leaves every learned answer unchanged, apart from white space."""


def write_examples(
    writers: Mapping[Split, ShardWriter],
    template: ChatTemplate,
    records: Iterable[Conversation | Pair],
    held_out_fraction: float,
    processes: int,
    report: Report,
) -> tuple[Origin, ...]:
    """Encode each record's conversations and write them to the record's split. Return the files or datasets read.
    Raises UserError, which names the record, if the template refuses a conversation."""
    origins: list[Origin] = []
    unknown = special_tokens(template.tokenizer).unk
    advance = adding_up(report, "shards", None)
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
                learned, hashes, flags = example.learned.copy(), (0, 0, 0), NO_END * (not example.all_end)
                learned[: last_answer(learned)] = False  # earlier answers belong to the pair's prompt
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
        advance(sum(example.text_bytes for example in examples))
    return tuple(origins)


def last_answer(learned: npt.NDArray[np.bool_]) -> int:
    """Return the index at which the last run of learned tokens begins; the number of tokens if none is learned."""
    places = np.flatnonzero(learned)
    gaps = np.flatnonzero(np.diff(places) > 1)
    return int(places[gaps[-1] + 1 if len(gaps) else 0]) if len(places) else len(learned)


def _flags(record: Conversation, example: Example) -> int:
    turns = [turn for i, turn in enumerate(record.messages) if i not in record.unlearned]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    roles = [turn["role"] for turn in record.messages if turn["role"] != "system"]
    flags = NO_END * (not example.all_end) + ALTERED * (not example.as_given)
    flags += EMPTY * any(not answer.strip() for answer in answers) + UNANSWERED * (not answers)
    return flags + SWAPPED * (roles[:1] == ["assistant"] and roles[-1:] == ["user"])


def _hashes(messages: list[Message]) -> tuple[int, int, int]:
    """Return hashes of all turns, the turns before the last answer, and the last answer. Case and the amount of white
    space do not matter."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    return _hash(messages), _hash(messages[:last]), _hash(messages[last : last + 1])


def _hash(messages: list[Message]) -> int:
    text = "\0".join(f"{message['role']}:{' '.join(message['content'].split()).casefold()}" for message in messages)
    return hashed(text.encode("utf-8"))


# --------------------------------------------------------------------------------------- encoding conversations

AnyRecord = Conversation | Pair


def encode_records(
    template: ChatTemplate, records: Iterable[AnyRecord], processes: int
) -> Iterator[tuple[AnyRecord, list[Example]]]:
    """Yield each record with the examples of its conversations, in order. Other processes start only if there is enough
    to encode. Raises UserError, which names the record, if the template refuses a conversation."""
    batches = batches_of(iter(records), _characters, _BATCH_CHARACTERS)
    packed = pack_tokenizer(template.tokenizer), template.source
    for batch, encoded in in_order(batches, _examples_encoder, packed, processes, least=_BATCHES_WORTH_A_POOL):
        yield from zip(batch, encoded, strict=True)


def _characters(record: AnyRecord) -> int:
    return sum(len(message["content"]) for conversation in record.conversations for message in conversation)


def _examples_encoder(tokenizer: str, source: str, _: Advance) -> Callable[[list[AnyRecord]], list[list[Example]]]:
    template = ChatTemplate(source, unpack_tokenizer(tokenizer))
    return lambda records: [_encode_record(template, record) for record in records]


def _encode_record(template: ChatTemplate, record: AnyRecord) -> list[Example]:
    try:
        return [encode_conversation(template, messages, record.unlearned) for messages in record.conversations]
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from None


def encode_conversation(
    template: ChatTemplate, messages: Sequence[Message], unlearned: Collection[int] = ()
) -> Example:
    """Encode a conversation and mark the tokens of the assistant's messages as learned, except the messages with the
    indices in `unlearned`. Raises UserError if the template refuses these turns, or writes a turn differently when
    other turns follow. In the second case, the text that a model reads before an answer cannot be found."""
    guarded, guard = template.guarded(messages)
    whole = template.render(guarded)
    answering = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in unlearned]
    places = [_place(template, guarded, i, whole) for i in answering]
    cuts = [0, *(cut for place in places for cut in place), len(whole)]
    answers = [messages[i]["content"] for i in answering]
    written = [template.before_special(whole[a:b]).replace(guard, "") for a, b in places]
    as_given = all(a.split() == b.split() for a, b in zip(answers, written, strict=True))
    parts = _encode_parts(template, whole, cuts, guard)
    ids = [token_id for part in parts for token_id in part]
    learned = np.zeros(len(ids), dtype=np.bool_)
    at, all_end = 0, True
    for i, part in enumerate(parts):
        if i % 2:  # parts alternate: text that the model reads, then an answer
            length, ends = _answer_length(part, template)
            learned[at : at + length] = True
            all_end &= ends
        at += len(part)
    text_bytes = len(whole.replace(guard, "").encode("utf-8"))
    return Example(np.array(ids, dtype=np.uint32), learned, text_bytes, all_end, as_given)


def _place(template: ChatTemplate, messages: Sequence[Message], i: int, whole: str) -> tuple[int, int]:
    """Return the start and the end of answer i in the rendered conversation, in characters."""
    before = template.render(messages[:i], add_generation_prompt=True)
    until = template.render(messages[: i + 1])
    for text, what in ((before, "before it, with the generation prompt,"), (until, "up to it")):
        if not whole.startswith(text):
            at = next(k for k, (a, b) in enumerate(zip([*text, ""], [*whole, ""], strict=False)) if a != b)
            raise UserError(
                f"the chat template writes the turns {what} differently than in the complete conversation: "
                f"{text[max(0, at - 20) : at + 20]!r} against {whole[max(0, at - 20) : at + 20]!r} (turn {i + 1}). "
                f"So a model would read other text than in training. Use a template that writes a turn independently "
                f"of later turns, or conversations with one answer"
            )
    return len(before), len(until)


def _encode_parts(template: ChatTemplate, whole: str, cuts: Sequence[int], guard: str) -> list[list[int]]:
    """Return the token ids of each part of `whole` between the cuts. If a token of the whole text would cross a cut,
    encode each part separately."""
    ids = template.encode_text(whole, guard)
    ends = [0]
    for cut in cuts[1:-1]:
        before = template.encode_text(whole[:cut], guard)
        if ids[: len(before)] != before:
            return [template.encode_text(whole[a:b], guard, continues=a > 0) for a, b in pairwise(cuts)]
        ends.append(len(before))
    return [ids[a:b] for a, b in pairwise([*ends, len(ids)])]


def _answer_length(ids: Sequence[int], template: ChatTemplate) -> tuple[int, bool]:
    """Return the number of tokens of an answer including its end token, and whether it has an end token."""
    ends = template.end_token_ids
    first = next((i for i, token_id in enumerate(ids) if token_id in ends), None)
    return (len(ids), False) if first is None else (first + 1, True)
