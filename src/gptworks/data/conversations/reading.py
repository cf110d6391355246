"""Read conversations from files and datasets, and convert three shapes of records to messages."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gptworks.chat_template import Message
from gptworks.config import ConversationsSource
from gptworks.data.conversations.keys import (
    ANSWERS,
    QUESTIONS,
    RECORD_KEYS,
    Fields,
    Shape,
    is_stated,
    learns,
    misspelt,
    short,
    unread_in_record,
    unread_in_turn,
)
from gptworks.data.permutation import hashed
from gptworks.data.sources.delimited import CSV, read_table
from gptworks.data.sources.json_lists import read_json
from gptworks.data.sources.opening import has_ending
from gptworks.data.sources.records import (
    JSONL,
    AnyRecords,
    Parquet,
    Records,
    iter_rows,
    open_dataset,
    read_jsonl,
    read_parquet,
    whole_text,
)
from gptworks.errors import UserError

READING_VERSION = 3
"""Part of a dataset's identity; increase it when records are read differently."""

_ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "model": "assistant", "developer": "system",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation or a preference pair, with the place and shape of its record."""

    origin: str
    """Name of the file or dataset."""
    record: int
    """Number of the record in its file or dataset, from 1."""
    shape: str
    """Shape of the record: alpaca, sharegpt, messages or preferences."""
    unread: tuple[str, ...]
    """Keys that other programs honour and gptworks does not read; a key of a turn looks like `turn.tool_calls`."""

    @property
    def where(self) -> str:
        return f"{self.origin}, record {self.record}"


@dataclass(frozen=True, slots=True)
class Conversation(Record):
    """The turns of one conversation, and which answers are learned."""

    messages: list[Message]
    unlearned: frozenset[int] = frozenset()
    """Indices of the answers that the record excludes from the loss."""

    @property
    def conversations(self) -> list[list[Message]]:
        return [self.messages]

    @property
    def prompt(self) -> list[Message]:
        """The turns before the last answer; all turns if the last answer is the first turn, or there is no answer."""
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        return self.messages[: answers[-1] if answers else None] or self.messages


def is_held_out(prompt: list[Message], fraction: float) -> bool:
    """Return whether examples of this prompt are for validation. Only the prompt decides, so a prompt is in the same
    split for instruction tuning as for preference tuning."""
    return _place(prompt) < fraction


def fraction_held_out(prompts: Iterable[list[Message]], fraction: float) -> float:
    """Return a fraction with which `is_held_out` holds out at least one of these prompts: `fraction` if it is large
    enough, else the smallest fraction that is. If all prompts are equal, return `fraction`. Reading stops at the first
    prompt that `fraction` holds out."""
    nearest, farthest = 1.0, 0.0
    for prompt in prompts:
        place = _place(prompt)
        if place < fraction:
            return fraction
        nearest, farthest = min(nearest, place), max(farthest, place)
    return math.nextafter(nearest, 1.0) if nearest < farthest else fraction


def _place(prompt: list[Message]) -> float:
    """Return a number from 0 to 1 that depends only on the prompt."""
    return hashed(json.dumps(prompt).encode("utf-8")) / 2**64


def iter_conversations(sources: Iterable[ConversationsSource]) -> Iterator[Conversation]:
    """Yield all conversations of the sources in order, with local files sorted by path. Raises UserError, which names
    file and record, if a file is missing or broken, or a record has another shape."""
    for source in sources:
        for origin, records in origins(source):
            shape: Shape | None = None if source.shape == "auto" else source.shape
            for number, record in enumerate(records, 1):
                try:
                    shape = shape or recognized(record)
                    turns = _SHAPES[shape](record)
                    unread = tuple(dict.fromkeys((*unread_in_record(record, shape, turns.messages), *turns.unread)))
                except ValueError as error:
                    read_as = f" (its file is read as {shape})" if shape else ""
                    raise UserError(f"{origin}, record {number}: {error}{read_as}. {_RULE}") from None
                yield Conversation(origin, number, shape, unread, turns.messages, turns.unlearned)


_RULE = (
    "A record has `instruction` and `output` (alpaca), `conversations` of {from, value} (sharegpt), or `messages` of "
    "{role, content} (messages). Rename the fields, or write records of one of these shapes."
)


def recognized(record: Fields) -> Shape:
    """Return the shape of a record, recognized by its fields. Raises ValueError if they match no known shape."""
    shapes: tuple[tuple[Shape, str], ...] = (
        ("messages", "messages"), ("sharegpt", "conversations"), ("alpaca", "instruction"),
    )  # fmt: skip
    for shape, field in shapes:
        if is_stated(record, field):
            return shape
    for shape, field in shapes:  # the field is empty: the shape's reader raises the error
        if field in record:
            return shape
    if any(name in record for name in (*QUESTIONS, "input")) and any(name in record for name in ANSWERS):
        return "alpaca"
    known = (*QUESTIONS, *ANSWERS, "messages", "conversations")
    others = [name for name in map(str, record) if name not in RECORD_KEYS]
    meant = [f"`{name}` is perhaps `{key}`" for name in others if (key := misspelt(name, known))]
    meant += [f"`{name}` is {RECORD_KEYS[name].meaning}" for name in ("chosen",) if name in record]
    raise ValueError("; ".join([f"its fields are {', '.join(map(str, record)) or 'none'}", *meant]))


# ----------------------------------------------------------------------------------------- shapes of records


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns read from a record or from a list in it."""

    messages: list[Message]
    unlearned: frozenset[int] = frozenset()
    """Indices in `messages` of the answers that are not learned."""
    unread: tuple[str, ...] = ()
    """Keys of turns that other programs honour and gptworks does not read, each written as `turn.NAME`. For an Alpaca
    record, the names of fields with further answers."""

    def __add__(self, other: "Turns") -> "Turns":
        after = frozenset(len(self.messages) + i for i in other.unlearned)
        unread = tuple(dict.fromkeys((*self.unread, *other.unread)))
        return Turns([*self.messages, *other.messages], self.unlearned | after, unread)


def _alpaca(record: Fields) -> Turns:
    if isinstance(record.get("prompt"), list) and "instruction" not in record:
        return _prompt_and_completion(record)
    asks = next((name for name in (*QUESTIONS, "input") if name in record), "instruction")
    question = read_question(record, asks)
    present = [name for name in ANSWERS if name in record]
    answer = next((name for name in present if is_stated(record, name)), next(iter(present), None))
    if answer is None:
        raise ValueError(f"no answer: none of the fields {', '.join(ANSWERS)}")
    messages = [*read_history(record), question, {"role": "assistant", "content": read_text(record, answer)}]
    others = [
        name for name in present if name != answer and is_stated(record, name) and not _same(record, name, answer)
    ]
    return with_system(record, Turns(messages, unread=tuple(others)))


def _same(record: Fields, name: str, other: str) -> bool:
    return isinstance(record[name], str) and record[name].split() == record[other].split()


def _prompt_and_completion(record: Fields) -> Turns:
    """Read TRL's conversational prompt and completion; only the answers in the completion are learned."""
    prompt, completion = read_turns(record, "prompt"), read_turns(record, "completion")
    answers = frozenset(i for i, message in enumerate(prompt.messages) if message["role"] == "assistant")
    return with_system(record, Turns(prompt.messages, answers, prompt.unread) + completion)


_SHAPES: dict[str, Callable[[Fields], Turns]] = {
    "alpaca": _alpaca,
    "sharegpt": lambda record: with_system(record, read_turns(record, "conversations", "sharegpt")),
    "messages": lambda record: with_system(record, read_turns(record, "messages", "messages")),
}


def with_system(record: Fields, turns: Turns) -> Turns:
    """Return the turns, preceded by the record's system message unless the turns already begin with it. Raises
    ValueError if the turns begin with a different system message, or the record states two different ones."""
    stated = [(name, read_text(record, name)) for name in ("system", "system_prompt") if is_stated(record, name)]
    if turns.messages and turns.messages[0]["role"] == "system":
        stated.append(("the first turn", turns.messages[0]["content"]))
    for (name, text), (other, also) in pairwise(stated):
        if text.split() != also.split():
            raise ValueError(
                f"`{name}` and {other if ' ' in other else f'`{other}`'} are two system messages that differ "
                f"({short(text)} and {short(also)}): leave one out"
            )
    if not stated or " " in stated[-1][0]:
        return turns
    return Turns([{"role": "system", "content": stated[0][1]}]) + turns


def read_question(record: Fields, field: str) -> Message:
    """Return the user's message: the text of `field`, followed by the text of `input` or `context`, if any."""
    asked = read_text(record, field)
    given = next((read_text(record, name) for name in ("input", "context") if name != field and record.get(name)), "")
    return {"role": "user", "content": "\n\n".join(text for text in (asked, given) if text)}


def read_history(record: Fields) -> list[Message]:
    """Return the earlier questions and answers of an Alpaca record. These answers are learned too, as in LLaMA-Factory.
    Raises ValueError if `history` is not a list of [question, answer]."""
    if not is_stated(record, "history"):
        return []
    history = record["history"]
    if not isinstance(history, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history
    ):
        raise ValueError("`history` is not a list of [question, answer], two texts each")
    return [
        {"role": role, "content": whole_text(text)}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def read_turns(record: Fields, field: str, shape: Shape = "messages") -> Turns:
    """Read the list of turns in a field: objects {role, content}, or {from, value} as in ShareGPT. If the keys of the
    first turn do not show which of the two, `shape` decides. Raises ValueError if the field is not such a list, or a
    role or a learning switch has an unknown value."""
    if field not in record:
        raise ValueError(f"no field `{field}`; its fields are {', '.join(map(str, record)) or 'none'}")
    turns = record[field]
    if isinstance(turns, str) and turns.lstrip().startswith("["):  # JSON, as in the cell of a table
        with contextlib.suppress(ValueError, RecursionError):
            turns = json.loads(turns)
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"`{field}` is {_kind(turns) if turns else 'empty'}, not a list of turns")
    if isinstance(turns[0], Mapping) and ("from" in turns[0]) != ("role" in turns[0]):
        shape = "sharegpt" if "from" in turns[0] else "messages"
    role_field, text_field = ("from", "value") if shape == "sharegpt" else ("role", "content")
    messages: list[Message] = []
    unlearned, unread = set[int](), dict[str, None]()
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or role_field not in turn or text_field not in turn:
            raise ValueError(f"turn {number} of `{field}` is not an object with `{role_field}` and `{text_field}`")
        role = _ROLES.get(str(turn[role_field]).strip().lower())
        if role is None:
            raise ValueError(f"turn {number} has the role {turn[role_field]!r}; known are {', '.join(_ROLES)}")
        messages.append({"role": role, "content": _content(turn, text_field, number)})
        answers = role == "assistant"
        if answers and not learns(turn, number):
            unlearned.add(number - 1)
        unread |= dict.fromkeys(f"turn.{name}" for name in unread_in_turn(turn, shape, answers))
    return Turns(messages, frozenset(unlearned), tuple(unread))


_TEXT_PARTS = (None, "text", "input_text", "output_text")


def _content(turn: Fields, field: str, number: int) -> str:
    """Return the text of a turn, which may be a list of parts in OpenAI's format."""
    content = turn[field]
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(part, Mapping) or kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
                what = f"of type {kind!r}" if isinstance(kind, str) else _kind(part)
                raise ValueError(f"`{field}` of turn {number} has a part {what}; parts are of type text")
            texts.append(part["text"])
        return whole_text("".join(texts))
    if not isinstance(content, str):
        calls = [name for name in ("tool_calls", "function_call", "refusal", "audio") if is_stated(turn, name)]
        instead = f", and its `{calls[0]}` is not read" if calls else ""
        raise ValueError(f"`{field}` of turn {number} is {_kind(content)}, not text{instead}")
    return whole_text(content)


def read_text(record: Fields, field: str) -> str:
    """Return the text of a field. Raises ValueError if the field is missing or not text."""
    if field not in record:
        raise ValueError(f"no field `{field}`; its fields are {', '.join(map(str, record))}")
    if not isinstance(record[field], str):
        raise ValueError(f"`{field}` is {_kind(record[field])}, not text")
    return whole_text(record[field])


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


# ---------------------------------------------------------------------------------------- files and datasets


def origins(source: AnyRecords) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield the name and the records of each file or dataset of a source."""
    if source.dataset:
        name, rows = open_dataset(source)
        yield name, iter_rows(name, rows)
        return
    for file in Records(source).files():
        read = next((read for endings, read in _READ.items() if has_ending(file.name, endings)), read_json)
        yield str(file), (record for _, record in read(file))


_READ: dict[tuple[str, ...], Callable[[Path], Iterator[tuple[object, Mapping[str, Any]]]]] = {
    JSONL.endings: read_jsonl,
    CSV.endings: read_table,
    Parquet.endings: read_parquet,
}
