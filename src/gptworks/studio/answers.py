"""Write the studio's answers as JSON or as a stream of server-sent events."""

import json
import math
from dataclasses import is_dataclass
from typing import Any

from fastapi.responses import Response
from pydantic_core import to_json

from gptworks.serve.errors import APIError
from gptworks.serve.events import EventStream
from gptworks.studio.library import printable


class Events(EventStream):
    """A stream of server-sent events, each a dictionary as JSON, without `[DONE]` at the end."""

    last = b""

    @staticmethod
    def json_of(chunk: Any) -> str:
        return json_text(chunk)


class MessageEvents(Events):
    """Like `Events`, but an error is sent as an event of the type `error` with the error's message."""

    @staticmethod
    def error_event(error: APIError) -> bytes:
        return b"data: " + json.dumps({"type": "error", "message": error.message}).encode() + b"\n\n"


def as_json(tree: Any) -> Response:
    return Response(json_text(tree), media_type="application/json")


def json_text(tree: Any) -> str:
    """Return a tree as JSON text, with null for non-finite numbers."""
    try:
        return to_json(tree, inf_nan_mode="null").decode()
    except ValueError:  # an unpaired surrogate, from a file's name or a hostile file
        return to_json(_printable(tree), inf_nan_mode="null").decode()


def _printable(tree: Any) -> Any:
    """Return the tree with every text changed to one that UTF-8 can encode."""
    if is_dataclass(tree):
        tree = vars(tree)
    if isinstance(tree, dict):
        return {_printable(key): _printable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_printable(value) for value in tree]
    return printable(tree) if isinstance(tree, str) else tree


def plain(tree: Any) -> Any:
    """Return the tree in a form that JSON can hold. Non-finite numbers become strings, as in metrics.jsonl, and so do
    objects of other types."""
    if isinstance(tree, dict):
        return {printable(str(key)): plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return repr(tree)
    return tree if tree is None or isinstance(tree, int | float) else printable(str(tree))
