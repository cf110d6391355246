"""Conversations from files and datasets: three shapes of record, each turned into messages."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.chat_template import Message
from gptworks.config import ConversationsSource
from gptworks.data.sources.opening import open_file, plain_name
from gptworks.data.sources.records import Records, RecordsSource, open_dataset, read_jsonl, read_parquet, whole_text
from gptworks.errors import UserError

Fields = Mapping[str, Any]

_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_ANSWERS = ("output", "response", "completion", "answer")


@dataclass(frozen=True, slots=True)
class Record:
    """What conversations and pairs of answers have in common."""

    origin: str
    """The file or dataset."""
    record: int
    """From 1 within its origin."""
    shape: str
    """alpaca, sharegpt, messages or preferences."""

    @property
    def where(self) -> str:
        return f"{self.origin}, record {self.record}"


@dataclass(frozen=True, slots=True)
class Conversation(Record):
    """The turns of one example."""

    messages: list[Message]

    @property
    def conversations(self) -> list[list[Message]]:
        return [self.messages]

    @property
    def prompt(self) -> list[Message]:
        """The turns before the last answer; all turns, where there are none before it."""
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        return self.messages[: answers[-1] if answers else None] or self.messages


def is_held_out(prompt: list[Message], fraction: float) -> bool:
    """Whether examples of this prompt are for validation: a function of the prompt alone, so that it is on one side in
    instruction tuning and in preference tuning, whatever its answers."""
    digest = hashlib.blake2b(json.dumps(prompt).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def iter_conversations(sources: Iterable[ConversationsSource]) -> Iterator[Conversation]:
    """All conversations of the sources, in order, files sorted by path.

    Raises:
        UserError: a missing or broken file, a record of another shape; the message names the file and the record.
    """
    for source in sources:
        for origin, records in origins(source):
            read: Callable[[Fields], list[Message]] | None = None
            shape: str = source.shape
            for number, record in enumerate(records, 1):
                try:
                    if not isinstance(record, Mapping):
                        raise ValueError(f"it is {_kind(record)}, not an object with fields")
                    if read is None:
                        shape = recognized(record) if shape == "auto" else shape
                        read = _SHAPES[shape]
                    messages = read(record)
                except ValueError as error:
                    read_as = "" if read is None else f" (its file is read as {shape})"
                    raise UserError(f"{origin}, record {number}: {error}{read_as}. {_RULE}") from None
                yield Conversation(origin, number, shape, messages)


_RULE = (
    "A record has `instruction` and `output` (alpaca), `conversations` of {from, value} (sharegpt), or `messages` of "
    "{role, content} (messages)."
)


def recognized(record: Fields) -> str:
    """The shape of a record, by its fields.

    Raises:
        ValueError: it has none of them.
    """
    for shape, field in (("messages", "messages"), ("sharegpt", "conversations"), ("alpaca", "instruction")):
        if field in record:
            return shape
    if "prompt" in record and any(field in record for field in _ANSWERS):
        return "alpaca"
    raise ValueError(f"its fields are {', '.join(map(str, record)) or 'none'}")


# ---------------------------------------------------------------------------------------------------- shapes


def _alpaca(record: Fields) -> list[Message]:
    question = read_question(record, "prompt" if "prompt" in record and "instruction" not in record else "instruction")
    answer = next((name for name in _ANSWERS if name in record), None)
    if answer is None:
        raise ValueError(f"no answer: none of the fields {', '.join(_ANSWERS)}")
    return [*read_system(record), question, {"role": "assistant", "content": read_text(record, answer)}]


def _sharegpt(record: Fields) -> list[Message]:
    return [*read_system(record), *read_turns(record, "conversations", "from", "value")]


def _messages(record: Fields) -> list[Message]:
    return read_turns(record, "messages")


_SHAPES = {"alpaca": _alpaca, "sharegpt": _sharegpt, "messages": _messages}


def read_system(record: Fields) -> list[Message]:
    """The system message of a record; empty where it has none."""
    return [{"role": "system", "content": read_text(record, "system")}] if record.get("system") else []


def read_question(record: Fields, field: str) -> Message:
    """The user's message: a field's text, and below it that of `input`, where there is one."""
    asked = read_text(record, field)
    given = read_text(record, "input") if record.get("input") else ""
    return {"role": "user", "content": f"{asked}\n\n{given}" if given else asked}


def read_turns(record: Fields, field: str, role_field: str = "role", text_field: str = "content") -> list[Message]:
    """The messages of a field; by default in OpenAI's shape.

    Raises:
        ValueError: it has another.
    """
    if field not in record:
        raise ValueError(f"no field `{field}`; its fields are {', '.join(map(str, record)) or 'none'}")
    turns = record[field]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"`{field}` is {_kind(turns) if turns else 'empty'}, not a list of turns")
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or role_field not in turn or text_field not in turn:
            raise ValueError(f"turn {number} of `{field}` is not an object with `{role_field}` and `{text_field}`")
        role = turn[role_field]
        if role not in _ROLES:
            raise ValueError(f"turn {number} is of {role!r}; known are {', '.join(_ROLES)}")
        messages.append({"role": _ROLES[role], "content": _content(turn, text_field, number)})
    return messages


def _content(turn: Fields, field: str, number: int) -> str:
    """The text of a turn; OpenAI's messages may have it in parts."""
    content = turn[field]
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return whole_text("".join(part["text"] for part in content))
    if not isinstance(content, str):
        raise ValueError(f"`{field}` of turn {number} is {_kind(content)}, not text")
    return whole_text(content)


def read_text(record: Fields, field: str) -> str:
    if field not in record:
        raise ValueError(f"no field `{field}`; its fields are {', '.join(map(str, record))}")
    if not isinstance(record[field], str):
        raise ValueError(f"`{field}` is {_kind(record[field])}, not text")
    return whole_text(record[field])


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


# ----------------------------------------------------------------------------------------------------- files


def origins(source: RecordsSource) -> Iterator[tuple[str, Iterable[Any]]]:
    """The name of each file or dataset of a source, and its records."""
    if source.dataset:
        yield open_dataset(source)
        return
    for file in Records(source).files():
        if plain_name(file.name).endswith(".jsonl"):
            yield str(file), (record for _, record in read_jsonl(file))
        elif file.suffix == ".parquet":
            yield str(file), (record for _, record in read_parquet(file))
        else:
            yield str(file), _json_list(file)


def _json_list(file: Path) -> list[Any]:
    try:
        with open_file(file) as stream:
            records = json.loads(stream.read())
    except (ValueError, RecursionError) as error:
        hint = " If each line is a record of its own, name the file .jsonl." if "Extra data" in str(error) else ""
        raise UserError(f"{file}: not JSON ({error}).{hint}") from None
    if not isinstance(records, list):
        raise UserError(f"{file} holds {_kind(records)}, not a list of records.")
    return records
