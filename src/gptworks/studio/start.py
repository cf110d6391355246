"""Start: a form made from the recipe's schema, with the plan; runs are started, stopped, resumed and forked.

A recipe from the page is checked in a process with limits before anything else reads it.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from gptworks.confined import Abandoned, Confined, Exceeded, Limits, Refused, Task
from gptworks.errors import RunError, UserError
from gptworks.files import write_whole
from gptworks.planning.devices import DEVICES
from gptworks.recipes import shipped_paths, shipped_recipes
from gptworks.serve import openai
from gptworks.serve.app import body_of
from gptworks.serve.errors import APIError
from gptworks.studio.form import form
from gptworks.studio.library import Library, RunFolder
from gptworks.studio.processes import Processes, console_lines
from gptworks.studio.resuming import allowed_changes, resumption
from gptworks.studio.state import studio_of, uncached
from gptworks.training.fork import fork

MOST_TEXT = 100_000
"""Characters of a recipe."""
MOST_EDITS = 64
MOST_ASKED = 32
_LIMITS = Limits(seconds=8.0, n_bytes=3 << 30)
_WAIT_SECONDS = 30.0
_GRACE_SECONDS = 1.0
"""Time that an abandoned question gets to finish, so that its process can answer the next one."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_Result = TypeVar("_Result")


@dataclass
class Starting:
    """Objects that the routes share."""

    processes: Processes
    children: Confined = field(
        default_factory=lambda: Confined(
            "gptworks.studio.checking",
            None,
            _LIMITS,
            setup_limits=Limits(seconds=60, n_bytes=3 << 30),
            keep_bytes=1 << 30,
        )
    )
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "gptworks start"))

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer of `gptworks.studio.checking`.

        Raises:
            UserError: it refuses, or a limit is reached.
        """
        task, loop = Task(), asyncio.get_running_loop()
        work = loop.run_in_executor(self.threads, lambda: self.children.ask(question, task))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved even if no one waits
        try:
            answer: dict[str, Any] = await asyncio.wait_for(asyncio.shield(work), _WAIT_SECONDS)
            return answer
        except Refused as error:
            raise UserError(str(error)) from None
        except Exceeded as error:
            raise UserError(f"the recipe cannot be looked at here: {error} gptworks plan has no such limit.") from None
        except (TimeoutError, Abandoned):
            task.abandon()
            raise UserError(
                f"the recipe cannot be looked at here: it takes more than {_WAIT_SECONDS:g} seconds. gptworks plan has "
                "no such limit."
            ) from None
        except asyncio.CancelledError:
            loop.call_later(_GRACE_SECONDS, task.abandon)
            raise

    async def in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


# ------------------------------------------------------------------------------------------------------------ requests


class Origin(openai.Wire):
    """The origin of a recipe: a shipped recipe, or a run's."""

    recipe: str | None = None
    run: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.recipe is None) == (self.run is None):
            raise ValueError("give recipe or run")
        return self


Text = Annotated[str, Field(max_length=MOST_TEXT)]
Edit = Annotated[list[str | None], Field(min_length=2, max_length=2)]
"""A setting's path and its value as typed; None removes it."""
Name = Annotated[str, Field(min_length=1, max_length=4096)]


class _Recipe(openai.Wire):
    text: Text
    origin: Origin | None = None


class CheckRequest(openai.Wire):
    text: Text | None = None
    origin: Origin | None = None
    edits: list[Edit] = Field(default_factory=list, max_length=MOST_EDITS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.text is None and self.origin is None:
            raise ValueError("give text or origin")
        if any(path is None for path, _ in self.edits):
            raise ValueError("an edit is a setting's path and its value")
        return self


class PlanRequest(_Recipe):
    name: Name = "run"
    device: Literal[tuple(DEVICES)] | None = None  # type: ignore[valid-type]


class NewRequest(_Recipe):
    name: Name


class ResumeRequest(openai.Wire):
    run: Name
    text: Text


class ChangesRequest(ResumeRequest):
    step: Annotated[int, Field(ge=0)] | None = None
    """Step of the checkpoint to fork from; None: resume the run itself."""


class ForkRequest(ChangesRequest):
    name: Name
    step: Annotated[int, Field(ge=0)]


class StopRequest(openai.Wire):
    run: Name


# -------------------------------------------------------------------------------------------------------------- routes


def starting_of(request: Request) -> Starting:
    """Objects that the routes share, created at their first use."""
    state, studio = request.app.state, studio_of(request)
    if not hasattr(state, "starting"):
        state.starting = Starting(Processes(studio.runs_at_once))
    starting: Starting = state.starting
    return starting


def _writable(request: Request) -> None:
    if studio_of(request).read_only:
        raise APIError(403, "this studio was started with --read-only: it starts, stops and writes nothing.",
                       code="read_only")  # fmt: skip


router = APIRouter(include_in_schema=False)
actions = APIRouter(include_in_schema=False, dependencies=[Depends(_writable)])
"""The routes that write, start or stop."""


def _library(request: Request) -> Library:
    library = studio_of(request).library
    assert library is not None  # these routes are a studio's
    return library


async def _question(request: Request, body: CheckRequest | _Recipe, ask: str, **more: Any) -> dict[str, Any]:
    library, origin = _library(request), body.origin
    found = None
    if origin is not None and origin.recipe is not None:
        if origin.recipe not in shipped_paths():
            raise APIError(404, f"gptworks has no recipe {origin.recipe[:128]!r}.", param="origin")
        found = str(shipped_paths()[origin.recipe])
    elif origin is not None and origin.run is not None:
        name = origin.run
        found = str((await starting_of(request).in_thread(lambda: library.get(name))).folder)
    allowed = list(dict.fromkeys(str(one.absolute()) for one in (Path.cwd(), *library.roots)))
    return {"ask": ask, "text": body.text, "origin": found, "allowed": allowed, **more}


async def _checked(request: Request, body: _Recipe, *edits: tuple[str, str | None]) -> str:
    """The text of a valid recipe, with edits made.

    Raises:
        UserError: it is invalid.
    """
    found = await starting_of(request).ask(await _question(request, body, "check", edits=edits))
    if found["problems"]:
        raise UserError("\n".join(one["message"] for one in found["problems"]))
    text: str = found["text"]
    return text


@router.get("/studio/start")
async def begin(request: Request) -> Response:
    """The recipes to begin from, and the form."""
    studio = studio_of(request)
    recipes = [{"name": one.name, "summary": one.summary, "time": one.time} for one in shipped_recipes()]
    return uncached({"read_only": studio.read_only, "folder": str(_library(request).roots[0]), "recipes": recipes,
                  "devices": {name: one.name for name, one in DEVICES.items()}, "form": form()})  # fmt: skip


@router.post("/studio/start/check")
async def check(request: Request) -> Response:
    """A recipe's text with edits made, its settings, and its problems."""
    body = await body_of(request, CheckRequest)
    return uncached(await starting_of(request).ask(await _question(request, body, "check", edits=body.edits)))


@router.post("/studio/start/plan")
async def plan(request: Request) -> Response:
    """The answer of `gptworks plan`."""
    body = await body_of(request, PlanRequest)
    return uncached(
        await starting_of(request).ask(await _question(request, body, "plan", name=body.name, device=body.device))
    )


@router.get("/studio/start/processes")
async def processes(
    request: Request, run: Annotated[list[str], Query(max_length=MOST_ASKED, default_factory=list)]
) -> Response:
    """The last lines of the runs that were started here, and of requested others."""
    starting, library = starting_of(request), _library(request)

    def look() -> list[dict[str, Any]]:
        known = {one.name: one for one in [*starting.processes.started.values()]}
        found = [
            {"run": name, "running": one.goes_on, "stopping": one.asked and one.goes_on,
             "code": one.process.poll(), "lines": console_lines(one.folder)}
            for name, one in known.items()
        ]  # fmt: skip
        for name in dict.fromkeys(run):
            if name not in known:
                folder = library.find(name).folder
                lines = console_lines(folder)
                stopping = starting.processes.is_stopping(name, folder)
                found.append({"run": name, "running": None, "stopping": stopping, "code": None, "lines": lines})
        return found

    return uncached({"processes": await starting.in_thread(look)})


@actions.post("/studio/start/new")
async def start_new(request: Request) -> Response:
    """Write the recipe as NAME.yaml, and train it in the folder NAME next to it."""
    body = await body_of(request, NewRequest)
    root = _library(request).roots[0]
    folder = _new_folder(root, body.name)
    starting = starting_of(request)
    text = await _checked(request, body, ("name", body.name), ("run_dir", str(folder)))
    await starting.in_thread(lambda: _start_new(starting.processes, body.name, folder, text))
    return uncached({"run": body.name})


@actions.post("/studio/start/resume")
async def resume(request: Request) -> Response:
    """Resume a run, with changed settings."""
    body = await body_of(request, ResumeRequest)
    starting, run, text = await _changed_text(request, body)

    def resume_run() -> None:
        changes = allowed_changes(run, text)
        arguments = [f"--change={one['path']}={one['new']}" for one in changes if one["recorded"]]
        settings = [f"{one['path']}={one['new']}" for one in changes if not one["recorded"]]
        arguments = ["--resume", *arguments, "--", str(run.folder), *settings]
        starting.processes.start(run.id, run.folder, arguments)

    await starting.in_thread(resume_run)
    return uncached({"run": run.id})


@actions.post("/studio/start/fork")
async def fork_run(request: Request) -> Response:
    """Fork a run at a checkpoint into a new folder, with changed settings."""
    body = await body_of(request, ForkRequest)
    folder = _new_folder(_library(request).roots[0], body.name)
    starting, run, text = await _changed_text(request, body)

    def begin_fork() -> None:
        starting.processes.check_room()
        changes = allowed_changes(run, text, body.step)
        fork(run.folder, body.step, folder, [f"{one['path']}={one['new']}" for one in changes])
        starting.processes.start(body.name, folder, ["--resume", "--", str(folder)])

    await starting.in_thread(begin_fork)
    return uncached({"run": body.name})


@router.post("/studio/start/changes")
async def changes(request: Request) -> Response:
    """The changes if a run, or its fork, resumes with a recipe, and why it cannot; see `Resumption`."""
    body = await body_of(request, ChangesRequest)
    starting, run, text = await _changed_text(request, body)
    return uncached(asdict(await starting.in_thread(lambda: resumption(run, text, body.step))))


@actions.post("/studio/start/stop")
async def stop(request: Request) -> Response:
    """Ask a run to stop after its step, and to save a checkpoint."""
    body = await body_of(request, StopRequest)
    starting, found = starting_of(request), _library(request).runs().get(body.run)
    folder = None if found is None else found.folder
    await starting.in_thread(lambda: starting.processes.stop(body.run, folder))
    return uncached({"run": body.run})


async def _changed_text(request: Request, body: ResumeRequest) -> tuple[Starting, RunFolder, str]:
    origin = Origin(run=body.run)
    text = await _checked(request, _Recipe(text=body.text, origin=origin))
    starting, library = starting_of(request), _library(request)
    return starting, await starting.in_thread(lambda: library.get(body.run)), text


# ------------------------------------------------------------------------------------------------------------ the work


def _new_folder(root: Path, name: str) -> Path:
    """The folder of a new run.

    Raises:
        APIError: the name is not valid for a folder, or is taken.
    """
    if not _NAME.fullmatch(name) or name == "recipe":
        raise APIError(400, f"name={name[:128]!r}: letters, digits, '.', '_' and '-', at most 100, a letter or digit "
                       "first, and not recipe.", param="name")  # fmt: skip
    if (root / "recipe.yaml").exists():
        raise APIError(400, f"{root} is a run: start the studio with a folder of runs, as gptworks studio runs.")
    folder = root / name
    for taken in (folder, folder.with_name(f"{name}.yaml")):
        if taken.exists() or taken.is_symlink():
            raise APIError(409, f"{taken} exists, and nothing is overwritten: choose another name.", param="name")
    return folder


def _start_new(processes: Processes, name: str, folder: Path, text: str) -> None:
    processes.check_room()
    file = folder.with_name(f"{name}.yaml")
    try:
        folder.mkdir()
        write_whole(file, text, new=True)
    except (FileExistsError, UserError) as error:
        taken = error.filename if isinstance(error, OSError) else file
        raise APIError(409, f"{taken} exists, and nothing is overwritten: choose another name.") from None
    except OSError as error:
        raise RunError(f"{error.filename or file} could not be written: {error.strerror}.") from None
    processes.start(name, folder, ["--", str(file)])
