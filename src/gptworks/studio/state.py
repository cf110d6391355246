"""Objects that the studio's routes share."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from gptworks import __version__
from gptworks.planning.params import count_parameters
from gptworks.serve.events import EventStream
from gptworks.serve.service import Service
from gptworks.studio.library import Library
from gptworks.studio.loaded import Engines
from gptworks.studio.reading import Reader
from gptworks.studio.run_data import OpenData


@dataclass(frozen=True)
class Studio:
    """The runs and their engines; for `gptworks serve`, the served models."""

    service: Service
    library: Library | None = None
    engines: Engines | None = None
    served_runs: Mapping[str, Path] | None = None
    """The run folders of the served models."""
    parts: tuple[str, ...] = ("play",)
    read_only: bool = True
    """Whether nothing may be started or written."""
    runs_at_once: int = 1
    """Runs that the page may train at once."""
    reader: Reader = field(default_factory=Reader)
    data: OpenData = field(default_factory=OpenData)

    def describe(self) -> dict[str, Any]:
        """The answer of /studio/state, which is slow."""
        if self.library is not None:
            models = self.library.describe_all()
        else:
            models = [self._served(model.name) for model in self.service.models]
        return {"version": __version__, "parts": self.parts, "read_only": self.read_only, "models": models,
                "notice": None if self.library is None else self.library.notice}  # fmt: skip

    def _served(self, name: str) -> dict[str, Any]:
        engine, folder = self.service.models.get(name).engine, (self.served_runs or {}).get(name)
        config = engine.model.config
        return {
            "id": name, "run": None if folder is None else str(folder), "chat": engine.chat_template is not None,
            "context": engine.context, "parameters": count_parameters(config).total, "vocab_size": config.vocab_size,
            "state": "served", "checkpoints": [], "problem": None,
        }  # fmt: skip


def studio_of(request: Request) -> Studio:
    """The studio that a request came to."""
    studio: Studio = request.app.state.studio
    return studio


class Events(EventStream):
    """Dictionaries as events."""

    last = b""

    @staticmethod
    def json_of(chunk: Any) -> str:
        return json_text(chunk)


def uncached(tree: Any) -> Response:
    """An answer that must not be cached."""
    return Response(json_text(tree), media_type="application/json", headers={"cache-control": "no-store"})


def json_text(tree: Any) -> str:
    """A tree as JSON, with null for non-finite numbers."""
    try:
        return json.dumps(tree, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(tree), allow_nan=False)


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
