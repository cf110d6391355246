"""Write the studio's answers as JSON or as a stream of server-sent events."""

import json
import math
from collections.abc import Callable
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
        return to_json(plain(tree, not_finite=lambda _: None)).decode()


def plain(tree: Any, not_finite: Callable[[float], Any] = repr) -> Any:
    """Return the tree in a form that JSON can hold: its texts can be encoded, and other objects become texts.

    Args:
        not_finite: returns the value of a non-finite number; by default a string, as in metrics.jsonl.
    """
    if is_dataclass(tree):
        tree = vars(tree)
    if isinstance(tree, dict):
        return {printable(str(key)): plain(value, not_finite) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value, not_finite) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return not_finite(tree)
    return tree if tree is None or isinstance(tree, int | float) else printable(str(tree))
