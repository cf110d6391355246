"""Pairs of answers, of which one is preferred: read from files and datasets, and from shards.

In the shards, each pair is two documents: the conversation that ends with the chosen answer, then the one that ends
with the rejected one. The last answer alone is marked as learned.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gptworks.chat_template import Message
from gptworks.config import PreferencesSource
from gptworks.data.conversations.reading import (
    Fields,
    Record,
    origins,
    read_question,
    read_system,
    read_text,
    read_turns,
)
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError

SHAPE = "preferences"
"""What the manifest calls such files."""

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pair(Record):
    """A prompt with two answers."""

    prompt: list[Message]
    chosen: Message
    rejected: Message

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, self.chosen, self.rejected]

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
                    yield Pair(origin, number, SHAPE, *_read(record))
                except ValueError as error:
                    raise UserError(f"{origin}, record {number}: {error}. {_RULE}") from None


_RULE = (
    "A record has `chosen` and `rejected`, each an answer or a list of {role, content}, and the prompt as `prompt`, "
    "as `instruction` (and `input`), or as the beginning of both lists."
)


def _read(record: Fields) -> tuple[list[Message], Message, Message]:
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


def _side(record: Fields, name: str) -> list[Message]:
    if isinstance(record.get(name), str):
        return [{"role": "assistant", "content": read_text(record, name)}]
    return read_turns(record, name)


def _prompt(record: Fields) -> list[Message]:
    if isinstance(record.get("prompt"), list):
        return [*read_system(record), *read_turns(record, "prompt")]
    name = next((name for name in ("prompt", "instruction", "question") if name in record), None)
    return read_system(record) if name is None else [*read_system(record), read_question(record, name)]


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
