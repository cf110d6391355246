"""The Jinja environment for chat templates, and the child process that renders untrusted templates."""

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gptworks.confined.child import Answer, serve

MAX_RENDERED_CHARACTERS = 1 << 24
"""Maximum length of the text that a template renders."""


class _Generation(Extension):
    """Ignores the tag `{% generation %}`, with which some templates mark the assistant's text, but keeps the text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own type)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Make a Jinja environment with the settings, filters and functions that `transformers` documents for templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as plain JSON. Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _prepare(source: Any) -> Answer:
    try:
        template = environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None

    def answer(variables: Any) -> str:
        text = template.render(variables)
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise ValueError(f"it writes {len(text)} characters; at most {MAX_RENDERED_CHARACTERS} are allowed")
        return text

    return answer


def main() -> None:
    serve(_prepare)
