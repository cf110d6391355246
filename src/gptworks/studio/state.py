"""The state that the studio's routes share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from gptworks import __version__
from gptworks.choices import SAMPLING
from gptworks.planning.params import count_parameters
from gptworks.serve.service import Service
from gptworks.studio.checking import Checks
from gptworks.studio.drafting import Drafts
from gptworks.studio.feed import Feed
from gptworks.studio.library import Library
from gptworks.studio.loaded import Engines
from gptworks.studio.processes import Processes
from gptworks.studio.reading import OpenData, Reader

PARTS = ("home", "play", "runs", "read", "time", "data", "model", "start")
"""The tabs of the studio's page, in order. The tab `time` uses the routes of Play and Read."""


@dataclass(frozen=True)
class Served:
    """The state of the page in `gptworks serve`, which has only the tab Play."""

    service: Service
    runs: Mapping[str, Path]
    """Run folders by model name."""
    engines: None = None

    def describe(self) -> dict[str, Any]:
        """Return what /studio/state answers: the version, the page's tabs, and the models."""
        models = [self._model(model.name) for model in self.service.models]
        return {"version": __version__, "parts": ("play",), "read_only": True, "models": models, "notice": None,
                "sampling": SAMPLING._asdict()}  # fmt: skip

    def _model(self, name: str) -> dict[str, Any]:
        engine, folder = self.service.get(name).engine, self.runs.get(name)
        config = engine.model.config
        return {
            "id": name, "run": None if folder is None else str(folder), "chat": engine.chat_template is not None,
            "context": engine.context, "parameters": count_parameters(config).total, "vocab_size": config.vocab_size,
            "sampling": {setting: getattr(engine.defaults, setting) for setting in SAMPLING._fields},
            "state": "served", "checkpoints": [], "prompts": [], "problem": None,
        }  # fmt: skip


@dataclass(frozen=True)
class Studio:
    """The state of `gptworks studio`: its runs, their engines and data, and its processes."""

    service: Service
    library: Library
    engines: Engines
    feed: Feed
    processes: Processes
    read_only: bool
    """Whether starting and stopping runs and writing files is forbidden."""
    checks: Checks = field(default_factory=Checks)
    reader: Reader = field(default_factory=Reader)
    data: OpenData = field(default_factory=OpenData)
    drafts: Drafts = field(default_factory=Drafts)

    @property
    def allowed(self) -> list[str]:
        """The folders below which a request may name files: the working folder and the folders given to the studio."""
        return list(dict.fromkeys(str(one.absolute()) for one in (Path.cwd(), *self.library.roots)))

    def describe(self) -> dict[str, Any]:
        """Return what /studio/state answers: the runs too. Slow: call it in a thread."""
        models = self.library.describe_all()
        return {"version": __version__, "parts": PARTS, "read_only": self.read_only, "models": models,
                "notice": self.library.notice, "sampling": SAMPLING._asdict()}  # fmt: skip


def studio_of(request: Request) -> Studio:
    """Return the state of the studio that received a request. Routes of Play must not call this function, because their
    state may be `Served`."""
    studio: Studio = request.app.state.studio
    return studio
