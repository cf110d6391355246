"""Fit a conversation into a model's context, for `gptworks chat`, the server and the studio."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from gptworks.chat_template import ChatTemplate, Message
from gptworks.confined import Task
from gptworks.errors import UserError


class ContextExceeded(UserError):
    """A conversation is too long for the model even without its older turns."""


class Fitted(NamedTuple):
    """A conversation as a prompt."""

    ids: list[int]
    """Token ids of the prompt; no more than fit in the context."""
    n_dropped: int
    """Number of oldest messages left out, system messages not counted."""


def fit_conversation(
    template: ChatTemplate,
    messages: Sequence[Message],
    context: int,
    answer_tokens: int | None,
    *,
    add_generation_prompt: bool = True,
    continues: bool = False,
    most_bytes: int | None = None,
    task: Task | None = None,
) -> Fitted:
    """Return a conversation as a prompt that leaves room for an answer, without the oldest turns if necessary.

    System messages stay, and so does the newest question. A question is dropped together with its answer. The prompt
    depends only on the arguments, so it is the same whether a session keeps the messages or a client sends them again.

    Args:
        context: the model's context in tokens.
        answer_tokens: number of tokens to reserve for the answer. At most half the context is reserved, and less if the
            newest question is long. None: reserve no tokens, and omit no turn.
        add_generation_prompt, continues: see `ChatTemplate.encode`.
        most_bytes: maximum bytes of the messages' text; more text is too long and is not encoded. None: no limit.
        task: allows another thread to abandon the rendering.

    Raises:
        ContextExceeded: the system messages and the newest question together exceed the context or `most_bytes`. If
            `answer_tokens` is None, the same holds for all messages.
        UserError: the template refuses these turns.
        Abandoned: the task was abandoned.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] != "system"]
    starts = turns[:1] + [i for i in turns[1:] if messages[i]["role"] == "user"] or [0]
    starts = starts[:1] if answer_tokens is None else starts
    room = context - min(answer_tokens or 0, context // 2)

    def kept(start: int) -> list[Message]:
        return [message for i, message in enumerate(messages) if i >= start or message["role"] == "system"]

    @cache
    def encoded(start: int) -> list[int]:
        return template.encode(kept(start), add_generation_prompt=add_generation_prompt, continues=continues, task=task)

    def n_bytes(start: int) -> int:
        return sum(len(message["content"].encode()) for message in kept(start))

    def fits(start: int) -> bool:
        return (most_bytes is None or n_bytes(start) <= most_bytes) and len(encoded(start)) <= room

    first = 0 if fits(starts[0]) else bisect_left(starts, True, lo=1, key=fits)
    start = starts[min(first, len(starts) - 1)]
    size = ""
    if most_bytes is not None and n_bytes(start) > most_bytes:
        size = f"{n_bytes(start):,} bytes of text, of at most {most_bytes:,}"
    elif len(encoded(start)) > context:
        size = f"{len(encoded(start)):,} tokens"
    if size:
        rest = "with the system messages" if len(turns) < len(messages) else "alone"
        what = "the conversation" if len(starts) == 1 else f"the newest question {rest}"
        raise ContextExceeded(f"{what} has {size}; this model's context is {context:,} tokens. Shorten it.")
    return Fitted(encoded(start), sum(i < start for i in turns))
