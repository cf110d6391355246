"""Read preference pairs (a prompt with a chosen and a rejected answer) from files and datasets."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from gptworks.chat_template import Message
from gptworks.config import PreferencesSource
from gptworks.data.conversations.keys import QUESTIONS, Fields, is_stated, short, unread_in_record
from gptworks.data.conversations.reading import (
    Record,
    Turns,
    origins,
    read_history,
    read_question,
    read_text,
    read_turns,
    with_system,
)
from gptworks.errors import UserError

SHAPE: Literal["preferences"] = "preferences"
"""The shape that a manifest states for files of preference pairs."""


@dataclass(frozen=True, slots=True)
class Pair(Record):
    """A prompt with a chosen and a rejected answer."""

    prompt: list[Message]
    chosen: Message
    rejected: Message
    unlearned: ClassVar[frozenset[int]] = frozenset()

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, self.chosen, self.rejected]

    @property
    def conversations(self) -> list[list[Message]]:
        return [[*self.prompt, answer] for answer in (self.chosen, self.rejected)]


def iter_pairs(sources: Iterable[PreferencesSource]) -> Iterator[Pair]:
    """Yield all pairs of the sources in order, with local files sorted by path. Raises UserError, which names file and
    record, if a file is missing or broken, or a record has another shape."""
    for source in sources:
        for origin, records in origins(source):
            for number, record in enumerate(records, 1):
                try:
                    yield _read(origin, number, record)
                except ValueError as error:
                    raise UserError(f"{origin}, record {number}: {error}. {_RULE}") from None


_RULE = (
    "A record has `chosen` and `rejected`, each an answer or a list of {role, content}, and the prompt as `prompt`, "
    "as `instruction` (and `input`), or as the beginning of both lists or texts (`Human: ... Assistant: ...`)."
)


def _read(origin: str, number: int, record: Fields) -> Pair:
    sides = {name: _side(record, name) for name in ("chosen", "rejected")}
    for name, side in sides.items():
        if not side.messages or side.messages[-1]["role"] != "assistant":
            raise ValueError(f"`{name}` does not end with an answer of the assistant")
        if len(side.messages) - 1 in side.unlearned:
            raise ValueError(f"the answer of `{name}` is kept out of the loss, so the pair teaches nothing")
    stated = _prompt(record)
    prompt = with_system(record, Turns(_shared_prompt(stated.messages, {n: s.messages[:-1] for n, s in sides.items()})))
    if not prompt.messages:
        raise ValueError(f"no prompt; its fields are {', '.join(map(str, record))}")
    chosen, rejected = (side.messages[-1] for side in sides.values())
    of_turns = dict.fromkeys((*stated.unread, *sides["chosen"].unread, *sides["rejected"].unread))
    unread = unread_in_record(record, SHAPE, [*prompt.messages, chosen, rejected])
    return Pair(origin, number, SHAPE, (*unread, *of_turns), prompt.messages, chosen, rejected)


def _shared_prompt(stated: list[Message], sides: Mapping[str, list[Message]]) -> list[Message]:
    """Return a record's prompt. The record may state the prompt up to three times: separately, and before each answer.
    Raises ValueError if two copies contradict each other.

    The copies may differ in white space, the system message may be in only one copy, and a copy may hold only some of
    another copy's turns. Turns before the answers that begin with the assistant continue the separate prompt.
    """
    places = {"the prompt": stated} | {f"`{name}`": turns for name, turns in sides.items()}
    systems = [(where, turns[0]) for where, turns in places.items() if turns and turns[0]["role"] == "system"]
    for (where, one), (other_where, other) in pairwise(systems):
        if not _same(one, other):
            raise ValueError(_contradiction(where, [one], other_where, [other]))
    asked, chosen, rejected = (turns[1:] if turns[:1] and turns[0]["role"] == "system" else turns
                               for turns in places.values())  # fmt: skip
    if chosen and rejected and not (len(chosen) == len(rejected) and _holds(chosen, rejected)):
        raise ValueError(_contradiction("`chosen`", chosen, "`rejected`", rejected))
    before = chosen or rejected
    if not asked or not before:
        turns = asked or before
    elif _holds(before, asked):
        turns = before
    elif _holds(asked[-len(before) :], before):
        turns = asked
    elif before[0]["role"] == "assistant":
        turns = [*asked, *before]
    else:
        raise ValueError(_contradiction("the prompt", asked, "`chosen`" if chosen else "`rejected`", before))
    return [*(system for _, system in systems[:1]), *turns]


def _contradiction(where: str, turns: list[Message], other_where: str, others: list[Message]) -> str:
    a, b = next(((a, b) for a, b in zip(turns, others, strict=False) if not _same(a, b)), (turns[-1], others[-1]))
    return (
        f"{where} and {other_where} state prompts that differ before the answers ({a['role']}: {short(a['content'])} "
        f"against {b['role']}: {short(b['content'])}), so they have no prompt in common"
    )


def _holds(turns: list[Message], part: list[Message]) -> bool:
    """Return whether `turns` contain all turns of `part` in a row."""
    return any(all(map(_same, turns[i:], part)) for i in range(len(turns) - len(part) + 1))


def _same(a: Message, b: Message) -> bool:
    return (a["role"], a["content"].split()) == (b["role"], b["content"].split())


_TRANSCRIPT = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
"""Pattern for the beginning of a turn in Anthropic's hh-rlhf, where one text holds the whole conversation."""


def _side(record: Fields, name: str) -> Turns:
    if isinstance(record.get(name), str):
        text = read_text(record, name)
        _, *turns = _TRANSCRIPT.split(text.lstrip()) if text.lstrip().startswith("Human:") else [text]
        roles = [{"Human": "user", "Assistant": "assistant"}[speaker] for speaker in turns[::2]]
        messages = [{"role": role, "content": said.strip()} for role, said in zip(roles, turns[1::2], strict=True)]
        return Turns(messages if "assistant" in roles else [{"role": "assistant", "content": text}])
    if isinstance(record.get(name), Mapping):  # in ShareGPT's ranking format, an answer is one turn
        return read_turns({name: [record[name]]}, name)
    return read_turns(record, name)


def _prompt(record: Fields) -> Turns:
    """Read the prompt that a record states outside its answers, without the record's field `system`."""
    for field in ("prompt", "messages", "conversations"):
        if isinstance(record.get(field), list) and record[field]:
            turns = read_turns(record, field)
            if field == "prompt" or turns.messages[-1]["role"] != "assistant":
                return turns
    name = next((name for name in ("prompt", *QUESTIONS) if is_stated(record, name)), None)
    return Turns(read_history(record) if name is None else [*read_history(record), read_question(record, name)])
