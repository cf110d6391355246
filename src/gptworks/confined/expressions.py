"""Render untrusted task templates and search with untrusted regular expressions, in a child process.

Items are short and numerous, so a question has up to PER_QUESTION items, and a child answers many questions. If a
question exceeds a limit, its items are sent one by one, to find the item that exceeds the limit.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

from jinja2 import StrictUndefined, Template, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gptworks.confined import Confined, Exceeded, Limits
from gptworks.confined.child import Answer, serve
from gptworks.errors import UserError, shortened

SECONDS, _BYTES = 2.0, 1 << 28
"""Limits of CPU seconds and of memory for a question, whether it has one item or many. `find` may set other seconds."""
MAX_RENDERED_CHARACTERS = 1 << 20
"""Maximum length of the text that a template renders for one item."""
MAX_EXPRESSION_CHARACTERS = 2000
PER_QUESTION = 128

How = Literal["search", "match", "fullmatch"]


class Fault(Exception):
    """A template could not be rendered for an item; the message has the reason."""

    def __init__(self, reason: str, syntax: bool = False) -> None:
        super().__init__(reason)
        self.syntax = syntax
        """Whether the template has a syntax error, so that every item fails."""


def render(source: str, items: Sequence[dict[str, Any]]) -> "list[str | Fault]":
    """Return, for each item, the text that the template renders, or a `Fault` if rendering fails. If an item exceeds a
    limit, all later items get the same `Fault` and are not rendered."""
    replies = _ask_all("render", source, items)
    return [reply if isinstance(reply, str) else Fault(reply["fault"], reply.get("syntax", False)) for reply in replies]


def find(
    pattern: str, texts: Sequence[str], how: How = "search", seconds: float | None = None
) -> list[tuple[str, str] | None]:
    """Return, for each text, the matched part and its first group ("" without one), or None if nothing matches. `how`
    names the function of `re`; `seconds` limits the CPU time of a question (None: SECONDS). Raises Refused if the
    pattern does not compile; UserError if searching a text exceeds a limit."""
    found: list[tuple[str, str] | None] = []
    for text, reply in zip(texts, _ask_all(how, pattern, texts, seconds), strict=True):
        if isinstance(reply, dict):
            raise UserError(
                f"the expression {shortened(pattern)!r} cannot be searched in {shortened(text)!r}: {reply['fault']}"
            )
        found.append(None if reply is None else (reply[0], reply[1]))
    return found


def _ask_all(kind: str, source: str, items: Sequence[Any], seconds: float | None = None) -> list[Any]:
    children = _children(seconds or SECONDS)
    replies: list[Any] = []
    for at in range(0, len(items), PER_QUESTION):
        part = list(items[at : at + PER_QUESTION])
        try:
            replies += children.ask([kind, source, part])
        except Exceeded:
            for i, item in enumerate(part):
                try:
                    replies += children.ask([kind, source, [item]])
                except Exceeded as error:  # callers stop at the first fault, so skip the rest
                    return [*replies, *[{"fault": str(error)}] * (len(items) - at - i)]
        except RecursionError:
            return [*replies, *[{"fault": "an item is nested too deeply."}] * (len(items) - at)]
    return replies


@lru_cache
def _children(seconds: float) -> Confined:
    limits = Limits(seconds=seconds, n_bytes=_BYTES)
    return Confined("gptworks.confined.expressions", None, limits, setup_limits=Limits(seconds=10, n_bytes=_BYTES))


# --------------------------------------------------------------------------------------------- in the child process

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    return _ENVIRONMENT.from_string(source)


def _render(source: str, item: Any) -> Any:
    try:
        text = _compiled(source).render(item)
    except TemplateSyntaxError as error:
        return {"fault": f"line {error.lineno}: {error.message}", "syntax": True}
    except MemoryError:
        raise
    except Exception as error:
        return {"fault": f"line {_line(error)}: {str(error) or type(error).__name__}"[:2000]}
    if len(text) > MAX_RENDERED_CHARACTERS:
        return {"fault": f"it writes {len(text):,} characters; at most {MAX_RENDERED_CHARACTERS:,} are allowed"}
    return text


def _line(error: Exception) -> int:
    """Return the number of the template's line that raised an error."""
    line, trace = 1, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _find(how: How) -> Callable[[str, str], Any]:
    def answer(pattern: str, text: str) -> Any:
        found = getattr(re, how)(pattern, text)
        return None if found is None else [found[0], (found[1] or "") if found.re.groups else ""]

    return answer


_ANSWERS: dict[str, Callable[[str, Any], Any]] = {
    "render": _render, "search": _find("search"), "match": _find("match"), "fullmatch": _find("fullmatch")
}  # fmt: skip


def _prepare(setup: Any) -> Answer:
    return lambda question: [_ANSWERS[question[0]](question[1], item) for item in question[2]]


def main() -> None:
    """Answer the parent's questions. Each question has a kind (render or a `How`), a template or pattern, and items."""
    serve(_prepare)
