"""Conversations from files and datasets: three shapes of record, each turned into messages."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.chat_template import Message
from gptworks.config import ConversationsSource, PreferencesSource
from gptworks.data.sources import file_signature, local_files, read_jsonl, read_parquet, require_datasets
from gptworks.errors import UserError

EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".parquet")

Record = Mapping[str, Any]
RecordsSource = ConversationsSource | PreferencesSource

_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_ANSWERS = ("output", "response", "completion", "answer")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of one example, and the place it came from."""

    messages: list[Message]
    origin: str
    """The file or dataset."""
    record: int
    """From 1 within its origin."""
    shape: str
    """alpaca, sharegpt or messages."""

    @property
    def where(self) -> str:
        return f"{self.origin}, record {self.record}"

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
            read: Callable[[Record], list[Message]] | None = None
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
                    told = "" if read is None else f" (its file is read as {shape})"
                    raise UserError(f"{origin}, record {number}: {error}{told}. {_RULE}") from None
                yield Conversation(messages, origin, number, shape)


_RULE = (
    "A record has `instruction` and `output` (alpaca), `conversations` of {from, value} (sharegpt), or `messages` of "
    "{role, content} (messages)."
)


def recognized(record: Record) -> str:
    """The shape of a record, by its fields.

    Raises:
        ValueError: it has none of them.
    """
    for shape, fields in (("messages", ["messages"]), ("sharegpt", ["conversations"]), ("alpaca", ["instruction"])):
        if all(field in record for field in fields):
            return shape
    if "prompt" in record and any(field in record for field in _ANSWERS):
        return "alpaca"
    raise ValueError(f"its fields are {', '.join(map(str, record)) or 'none'}")


# ---------------------------------------------------------------------------------------------------- shapes


def _alpaca(record: Record) -> list[Message]:
    instruction = read_text(record, "prompt" if "prompt" in record and "instruction" not in record else "instruction")
    answer = next((name for name in _ANSWERS if name in record), None)
    if answer is None:
        raise ValueError(f"no answer: none of the fields {', '.join(_ANSWERS)}")
    given = read_text(record, "input") if record.get("input") else ""
    system = [{"role": "system", "content": read_text(record, "system")}] if record.get("system") else []
    question = f"{instruction}\n\n{given}" if given else instruction
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": read_text(record, answer)}]


def _sharegpt(record: Record) -> list[Message]:
    system = [{"role": "system", "content": read_text(record, "system")}] if record.get("system") else []
    return [*system, *_turns(record, "conversations", "from", "value")]


def _messages(record: Record) -> list[Message]:
    return _turns(record, "messages", "role", "content")


_SHAPES = {"alpaca": _alpaca, "sharegpt": _sharegpt, "messages": _messages}


def read_messages(record: Record, field: str) -> list[Message]:
    """The messages of a field, in OpenAI's shape.

    Raises:
        ValueError: it has another.
    """
    return _turns(record, field, "role", "content")


def _turns(record: Record, field: str, role_field: str, text_field: str) -> list[Message]:
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


def _content(turn: Record, field: str, number: int) -> str:
    """The text of a turn; OpenAI's messages may have it in parts."""
    content = turn[field]
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return whole_text("".join(part["text"] for part in content))
    if not isinstance(content, str):
        raise ValueError(f"`{field}` of turn {number} is {_kind(content)}, not text")
    return whole_text(content)


def read_text(record: Record, field: str) -> str:
    if field not in record:
        raise ValueError(f"no field `{field}`; its fields are {', '.join(map(str, record))}")
    if not isinstance(record[field], str):
        raise ValueError(f"`{field}` is {_kind(record[field])}, not text")
    return whole_text(record[field])


def whole_text(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no encoding holds: it becomes U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


# ----------------------------------------------------------------------------------------------------- files


def conversations_signature(source: RecordsSource) -> list[list[Any]]:
    """What tells, without reading them, whether the conversations have changed; as `sources.source_signature`."""
    if source.dataset:
        folder = Path(source.dataset)
        files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
        return [["huggingface", source.dataset, source.name, source.split], *map(file_signature, files)]
    if source.sha256:
        return [["sha256", source.sha256]]
    return [file_signature(file) for file in local_files(source, EXTENSIONS)]


def origins(source: RecordsSource) -> Iterator[tuple[str, Iterator[Any]]]:
    if source.dataset:
        yield f"dataset {source.dataset}", _dataset(source)
        return
    for file in local_files(source, EXTENSIONS):
        yield str(file), _records(file)


def _records(file: Path) -> Iterator[Any]:
    if file.name.endswith((".jsonl", ".jsonl.gz")):
        return (record for _, record in read_jsonl(file))
    if file.suffix == ".parquet":
        return (record for _, record in read_parquet(file))
    return _json_list(file)


def _json_list(file: Path) -> Iterator[Any]:
    try:
        records = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        hint = " If each line is a record of its own, name the file .jsonl." if "Extra data" in str(error) else ""
        raise UserError(f"{file}: not JSON ({error}).{hint}") from None
    if not isinstance(records, list):
        raise UserError(f"{file} holds {_kind(records)}, not a list of records.")
    return iter(records)


def _dataset(source: RecordsSource) -> Iterator[Any]:
    assert source.dataset is not None
    where = f"dataset {source.dataset}"
    datasets = require_datasets(where)
    try:
        if (Path(source.dataset) / "dataset_dict.json").exists() or (Path(source.dataset) / "state.json").exists():
            saved = datasets.load_from_disk(source.dataset)
            rows = saved[source.split] if isinstance(saved, dict) else saved
        else:
            rows = datasets.load_dataset(source.dataset, name=source.name, split=source.split, streaming=True)
    except Exception as error:  # the library raises many types
        reason = " ".join(str(error).split())
        raise UserError(f"{where} could not be opened: {reason}. Check its name and split, and the network.") from None
    return iter(rows)
