"""Known keys of records and turns: their meaning in training programs, and which of them gptworks reads.

Sources: OpenAI's fine-tuning format, mistral-finetune and axolotl (per-turn training), LLaMA-Factory's Alpaca and
ShareGPT formats, ms-swift, TRL's dataset formats. A known key that is not read is reported as the finding
`keys-not-read`. Other keys, such as id or source, are ignored unless they look like a misspelled known key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gptworks.chat_template import Message
from gptworks.data.sources.records import whole_text
from gptworks.errors import shortened

Fields = Mapping[str, Any]
Shape = Literal["alpaca", "sharegpt", "messages", "preferences"]

QUESTIONS = ("instruction", "prompt", "question", "query")
"""Fields that hold a question; if a record has none of them, `input` holds the question."""
ANSWERS = ("output", "response", "completion", "answer")
_ALL: tuple[Shape, ...] = ("alpaca", "sharegpt", "messages", "preferences")
_INSTRUCTIONS: tuple[Shape, ...] = ("alpaca", "preferences")


@dataclass(frozen=True, slots=True)
class Key:
    """A known key of records or of turns."""

    meaning: str
    """The key's meaning in the programs that write it."""
    read_in: tuple[Shape, ...] = ()
    """The shapes of records in which the key is read. In other shapes, the key is reported as `keys-not-read`. A
    record's key is also reported if its text is not in the messages that were read."""
    asks_nothing: tuple[object, ...] = ()
    """Values that mean the default behaviour, as if the key were missing."""
    matters: tuple[object, ...] = ()
    """The only values that change the behaviour; empty: all values except those in `asks_nothing` change it."""


LEARNING_SWITCHES = ("weight", "train", "training", "loss")
"""Keys of a turn that exclude its answer from the loss if they are 0 or false."""

_SWITCH = "whether the text is learned"
_BAD = (False, 0, "false", "0")

_BOTH: Mapping[str, Key] = {
    **dict.fromkeys(("tools", "functions"), Key("tools that the model may call")),
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), Key("media that belong to the text")),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), Key("the model's reasoning before its answer")),
    **dict.fromkeys(("label", "kto_tag"), Key("whether the answer is a good one (KTO)", matters=_BAD)),
    "score": Key("how good the answer is"),
    "loss_mask": Key("which text is learned"),
    "loss_scale": Key("how much text counts in the loss"),
}
"""Keys with the same meaning in records and in turns."""

RECORD_KEYS: Mapping[str, Key] = {
    "messages": Key("the turns", ("messages",)),
    "conversations": Key("the turns", ("sharegpt",)),
    **dict.fromkeys(QUESTIONS, Key("the question", _INSTRUCTIONS)),
    **dict.fromkeys(("input", "context"), Key("text that belongs to the question", _INSTRUCTIONS)),
    **dict.fromkeys(("system", "system_prompt"), Key("the system message", _ALL)),
    "history": Key("earlier turns", _INSTRUCTIONS),
    **dict.fromkeys(ANSWERS, Key("an answer", ("alpaca",))),
    "chosen": Key("the preferred answer: use a source of type preferences", ("preferences",)),
    "rejected": Key("an answer to avoid: use a source of type preferences", ("preferences",)),
    "documents": Key("texts that the chat template writes"),
    "chat_template_kwargs": Key("settings of the chat template"),
    "margin": Key("by how much the chosen answer is better"),
    "weight": Key("how much the record counts", asks_nothing=(True, 1)),
    **dict.fromkeys(("train", "training", "loss"), Key(_SWITCH, asks_nothing=(True, 1))),
    "mask": Key("which text is learned"),
    **_BOTH,
}

TURN_KEYS: Mapping[str, Key] = {
    "role": Key("who speaks", ("messages", "preferences")),
    "content": Key("the text", ("messages", "preferences")),
    "from": Key("who speaks", ("sharegpt",)),
    "value": Key("the text", ("sharegpt",)),
    **dict.fromkeys(LEARNING_SWITCHES, Key(_SWITCH, _ALL)),
    **dict.fromkeys(("train_detail", "training_detail"), Key("which characters are learned")),
    "mask": Key("whether the text is kept out of the loss", asks_nothing=(False, 0)),
    "name": Key("which participant speaks"),
    "tool_calls": Key("calls of tools, which are part of the answer"),
    "function_call": Key("a call of a tool, which is the answer"),
    "tool_call_id": Key("which call of a tool this answers"),
    "refusal": Key("the answer, a refusal"),
    "prefix": Key("whether the text is the beginning of an answer", asks_nothing=(False, 0)),
    "chosen": Key("the preferred answer"),
    "rejected": Key("an answer to avoid"),
    **_BOTH,
}

_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"))
_ALWAYS_READ: Mapping[Shape, tuple[str, ...]] = {
    "messages": ("messages",), "sharegpt": ("conversations",), "preferences": ("chosen", "rejected"),
}  # fmt: skip
_DEEPEST = 5
"""Maximum depth of lists and objects to search for text in a value, such as turns whose content is a list of parts."""
_SIDES = re.compile(r"(chosen|rejected)[_-]|[_-](chosen|rejected)$")
_ABOUT_SIDES = re.compile(r"[_-](model|source|id|name|rank|length|len|tokens)$|^(model|source|id)[_-]")


def is_stated(fields: Fields, name: str) -> bool:
    """Return whether a key has a value. Null and empty texts, lists and objects do not count, since tables fill missing
    cells with such values."""
    value = fields.get(name)
    return value is not None and not (isinstance(value, str | list | tuple | Mapping) and not value)


def unread_in_record(record: Fields, shape: Shape, messages: Sequence[Message]) -> Iterator[str]:
    """Yield the keys of a record that other programs honour and gptworks does not read in this shape. A key that only
    repeats the text of the messages read from the record is left out."""
    read = {_plain(message["content"]) for message in messages}
    for name in record:
        if not is_stated(record, name) or not isinstance(name, str):
            continue
        if (key := RECORD_KEYS.get(name)) is not None:
            if name in _ALWAYS_READ.get(shape, ()) or _repeats(record[name], read, within=shape in key.read_in):
                continue
            if not _asks_nothing(key, record[name]):
                yield name
        elif _SIDES.search(name):
            if not _about_sides(record, name, shape):
                yield name
        elif misspelt(name, RECORD_KEYS):
            yield name


def unread_in_turn(turn: Fields, shape: Shape, answers: bool) -> Iterator[str]:
    """Yield the keys of a turn that other programs honour and gptworks does not read. `answers`: whether the turn is
    the assistant's. In other turns, a learning switch is yielded if it is on."""
    for name in turn:
        if not is_stated(turn, name) or not isinstance(name, str):
            continue
        if (key := TURN_KEYS.get(name)) is not None:
            if name in LEARNING_SWITCHES and not answers:
                if _switch(turn[name]):  # asks to learn a question, which is never learned
                    yield name
            elif shape not in key.read_in and not _asks_nothing(key, turn[name]):
                yield name
        elif misspelt(name, TURN_KEYS):
            yield name


def meaning(name: str, of_turn: bool) -> str:
    """Return the meaning of a key that is not read, for a message."""
    keys = TURN_KEYS if of_turn else RECORD_KEYS
    if name in keys:
        return keys[name].meaning
    if not of_turn and _SIDES.search(name):
        return "about two answers, of which one is preferred"
    return f"perhaps `{misspelt(name, keys)}`"


def learns(turn: Fields, number: int) -> bool:
    """Return whether an answer is learned, according to its `LEARNING_SWITCHES`. Raises ValueError if a switch is not
    0, 1, false or true, or two switches contradict each other."""
    switches: dict[str, bool] = {}
    for name in LEARNING_SWITCHES:
        if not is_stated(turn, name):
            continue
        value = _switch(turn[name])
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f"`{name}` of turn {number} is {short(turn[name])}; it is 1 or true (the answer is learned) or 0 or "
                f"false (it is not)"
            )
        switches[name] = bool(value)
    if len(set(switches.values())) > 1:
        said = " and ".join(f"`{name}` {turn[name]!r}" for name in switches)
        raise ValueError(f"turn {number} states {said}, which contradict each other: leave one out")
    return all(switches.values())


def _switch(value: Any) -> Any:
    """Return a switch's value. The texts 0, false, 1 and true become numbers or bools; other values stay unchanged."""
    if isinstance(value, str):
        return {"0": 0, "false": 0, "1": 1, "true": 1}.get(value.strip().lower(), value)
    return value


def short(value: Any) -> str:
    """Return a value's representation, cut to 40 characters."""
    return shortened(repr(value), 39)


def _asks_nothing(key: Key, value: Any) -> bool:
    if isinstance(value, str):
        value = value.strip().lower()
    if not isinstance(value, str | bool | int | float):
        return False
    return value not in key.matters if key.matters else value in key.asks_nothing


def _repeats(value: Any, read: set[str], within: bool, depth: int = 0) -> bool:
    """Return whether all text of a value is in `read`, as whole messages or, if `within`, as parts of messages."""
    if isinstance(value, str):
        text = _plain(value)
        return text in read or (within and any(text in one for one in read))
    if isinstance(value, list | tuple):
        return depth < _DEEPEST and all(_repeats(item, read, within, depth + 1) for item in value)
    if isinstance(value, Mapping):
        texts = [value[name] for name in ("content", "value", "text") if name in value]
        return depth < _DEEPEST and bool(texts) and all(_repeats(text, read, True, depth + 1) for text in texts)
    return False


def _about_sides(record: Fields, name: str, shape: Shape) -> bool:
    """Return whether to ignore a pair's key, such as an answer's author or a score that agrees with the preference."""
    if shape != "preferences":
        return False
    for better, worse in _SCORES:
        if name.replace("-", "_") in (better, worse):
            one, other = (
                next((record[k] for k in (side, side.replace("_", "-")) if k in record), None)
                for side in (better, worse)
            )
            return isinstance(one, int | float) and isinstance(other, int | float) and one >= other
    return _ABOUT_SIDES.search(name) is not None


def misspelt(name: str, keys: Iterable[str]) -> str | None:
    """Return the key that a name misspells; None if there is none. A misspelling differs from the key in case or
    separators. In names of at least five letters, one letter may also be wrong, missing, added or swapped."""
    plain = _joined(name)
    for key in keys:
        if name != key and plain == _joined(key):
            return key
    return next((key for key in keys if len(key) >= 5 and len(plain) >= 5 and _one_edit(plain, _joined(key))), None)


def _joined(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


def _one_edit(a: str, b: str) -> bool:
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest, other = a[at:], b[at:]
    swapped = rest[1:2] + rest[:1] + rest[2:]
    return rest[1:] in (other, other[1:]) or rest == other[1:] or swapped == other


def _plain(text: str) -> str:
    return " ".join(whole_text(text).split())
