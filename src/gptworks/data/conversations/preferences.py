"""Pairs of answers, of which one is preferred: read from files and datasets, and written into shards.

In the shards, each pair is two documents: the conversation that ends with the chosen answer, then the one that ends
with the rejected one. The last answer alone is marked as learned.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gptworks.chat_template import ChatTemplate, Message
from gptworks.config import PreferencesSource
from gptworks.data.conversations.masking import encode_records
from gptworks.data.conversations.reading import Record, is_held_out, origins, read_messages, read_text
from gptworks.data.shards import NO_END, Origin, ShardWriter, Split, TokenShards
from gptworks.errors import UserError
from gptworks.tokenizer import special_tokens

SHAPE = "preferences"
"""What the manifest calls such files."""

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with two answers, and the place it came from."""

    prompt: list[Message]
    chosen: Message
    rejected: Message
    origin: str
    record: int

    @property
    def where(self) -> str:
        return f"{self.origin}, record {self.record}"

    @property
    def conversations(self) -> list[list[Message]]:
        return [[*self.prompt, answer] for answer in (self.chosen, self.rejected)]


def iter_pairs(sources: Iterable[PreferencesSource]) -> Iterator[Pair]:
    """All pairs of the sources, in order, files sorted by path.

    Raises:
        UserError: a missing or broken file, a record of another shape; the message names the file and the record.
    """
    for source in sources:
        for origin, records in origins(source):
            for number, record in enumerate(records, 1):
                try:
                    if not isinstance(record, Mapping):
                        raise ValueError(f"it is a {type(record).__name__}, not an object with fields")
                    yield Pair(*_read(record), origin, number)
                except ValueError as error:
                    raise UserError(f"{origin}, record {number}: {error}. {_RULE}") from None


_RULE = (
    "A record has `chosen` and `rejected`, each an answer or a list of {role, content}, and the prompt as `prompt`, "
    "as `instruction` (and `input`), or as the beginning of both lists."
)


def _read(record: Record) -> tuple[list[Message], Message, Message]:
    """Prompt, chosen and rejected answer."""
    sides = [_side(record, name) for name in ("chosen", "rejected")]
    if any(not side or side[-1]["role"] != "assistant" for side in sides):
        raise ValueError("`chosen` or `rejected` does not end with an answer of the assistant")
    (*before, chosen), (*other, rejected) = sides
    if before != other:
        raise ValueError("`chosen` and `rejected` differ before their last answers, so they have no prompt in common")
    prompt = _prompt(record)
    if before[: len(prompt)] != prompt:  # else the lists repeat it
        before = [*prompt, *before]
    if not before:
        raise ValueError(f"no prompt; its fields are {', '.join(map(str, record))}")
    return before, chosen, rejected


def _side(record: Record, name: str) -> list[Message]:
    if isinstance(record.get(name), str):
        return [{"role": "assistant", "content": read_text(record, name)}]
    return read_messages(record, name)


def _prompt(record: Record) -> list[Message]:
    system = [{"role": "system", "content": read_text(record, "system")}] if record.get("system") else []
    if isinstance(record.get("prompt"), list):
        return [*system, *read_messages(record, "prompt")]
    name = next((name for name in ("prompt", "instruction", "question") if name in record), None)
    if name is None:
        return system
    given = read_text(record, "input") if record.get("input") else ""
    asked = read_text(record, name)
    return [*system, {"role": "user", "content": f"{asked}\n\n{given}" if given else asked}]


def write_pairs(
    writers: Mapping[Split, ShardWriter],
    template: ChatTemplate,
    pairs: Iterable[Pair],
    held_out_fraction: float,
    processes: int,
    report: Callable[[str, int, int | None], None],
) -> tuple[Origin, ...]:
    """Encode both conversations of each pair into its split; returns the files they came from.

    Raises:
        UserError: the template refuses a conversation; the message names the record.
    """
    files: list[Origin] = []
    unknown = special_tokens(template.tokenizer).unk
    done_bytes = 0
    for i, (pair, examples) in enumerate(encode_records(template, pairs, processes)):
        if not files or files[-1].name != pair.origin or pair.record == 1:
            files.append(Origin(name=pair.origin, shape=SHAPE, records=0))
        files[-1] = files[-1].model_copy(update={"records": pair.record})
        writer = writers["validation" if is_held_out(pair.prompt, held_out_fraction) else "train"]
        for example in examples:
            writer.add(
                example.ids,
                example.text_bytes,
                starts_document=True,
                unknown_tokens=0 if unknown is None else int((example.ids == unknown).sum()),
                learned=_last_run(example.learned),
                example=(i, 0, 0, 0, NO_END * (not example.all_end)),
            )
            done_bytes += example.text_bytes
        report("shards", done_bytes, None)
    return tuple(files)


def _last_run(learned: Bools) -> Bools:
    """The last unbroken run of trues alone: earlier answers are part of the prompt."""
    places = np.flatnonzero(learned)
    last = np.zeros_like(learned)
    if len(places):
        gaps = np.flatnonzero(np.diff(places) > 1)
        last[places[gaps[-1] + 1 if len(gaps) else 0] :] = True
        last &= learned
    return last


class Pairs:
    """The pairs of a split.

    Raises:
        UserError: the split was not made of preferences.
    """

    def __init__(self, shards: TokenShards, context_length: int) -> None:
        if not shards.manifest.origins or any(origin.shape != SHAPE for origin in shards.manifest.origins):
            raise UserError(f"{shards.folder} holds no pairs of answers: give sources of type preferences.")
        self._shards, self._context_length = shards, context_length
        self._bounds = np.append(shards.document_starts(), shards.n_tokens)

    def __len__(self) -> int:
        return (len(self._bounds) - 1) // 2

    def answer(self, pair: int, side: int) -> tuple[Int64s, Bools]:
        """Tokens [n] and which are learned [n], with the chosen (0) or the rejected (1) answer, as far as the context
        reaches: at most context_length inputs, and one target more."""
        start, end = self._bounds[2 * pair + side : 2 * pair + side + 2].tolist()
        length = min(end - start, self._context_length + 1)
        return self._shards.read(start, length), self._shards.read_learned(start, length)

    def place(self, pair: int) -> str:
        """The record that a pair came from."""
        return self._shards.manifest.where(int(self._shards.examples()[2 * pair, 0]))

    def says_nothing(self, pair: int) -> bool:
        """Whether both sides are the same as far as the context reaches, or one has no answer there."""
        (chosen, learned), (rejected, other) = self.answer(pair, 0), self.answer(pair, 1)
        same = len(chosen) == len(rejected) and bool((chosen == rejected).all())
        return same or not learned[1:].any() or not other[1:].any()
