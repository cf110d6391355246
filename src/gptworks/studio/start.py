"""Routes of the Start tab: a recipe's form, check and plan, and starting, stopping, resuming and forking runs.

A process with limits checks a recipe from the page before anything else reads the recipe.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from gptworks.errors import RunError, UserError
from gptworks.files import write_whole
from gptworks.planning.device_table import DEVICES
from gptworks.recipes import shipped_paths, shipped_recipes
from gptworks.serve.app import body_of
from gptworks.serve.errors import APIError
from gptworks.serve.wire import Wire
from gptworks.studio.answers import as_json
from gptworks.studio.drafting import MOST_TEXT
from gptworks.studio.folders import own_recipes
from gptworks.studio.form import form
from gptworks.studio.library import RunFolder
from gptworks.studio.play import RunName
from gptworks.studio.processes import Processes, console_lines
from gptworks.studio.resuming import allowed_changes, extension, resumption
from gptworks.studio.state import Studio, studio_of
from gptworks.training.fork import fork

MOST_EDITS = 64
MOST_ASKED = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


# ------------------------------------------------------------------------------------------------------------ requests


class Origin(Wire):
    """The recipe that a new recipe is based on: a shipped recipe, a person's own file, or the recipe of a run."""

    recipe: str | None = None
    file: str | None = None
    run: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if [self.recipe, self.file, self.run].count(None) != 2:
            raise ValueError("give recipe, file or run")
        return self


Text = Annotated[str, Field(max_length=MOST_TEXT)]
Edit = Annotated[list[str | None], Field(min_length=2, max_length=2)]
"""A setting's path, and its new value as typed. The value None removes the setting."""


class _Recipe(Wire):
    text: Text
    origin: Origin | None = None


class CheckRequest(Wire):
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
    name: RunName = "run"
    device: Literal[tuple(DEVICES)] | None = None  # type: ignore[valid-type]


class NewRequest(_Recipe):
    name: RunName


class ResumeRequest(Wire):
    run: RunName
    text: Text


class ChangesRequest(ResumeRequest):
    step: Annotated[int, Field(ge=0)] | None = None
    """Step of the checkpoint to fork from; None if the run itself resumes."""


class ForkRequest(ChangesRequest):
    name: RunName
    step: Annotated[int, Field(ge=0)]


class StopRequest(Wire):
    run: RunName


# -------------------------------------------------------------------------------------------------------------- routes


def _writable(request: Request) -> None:
    if studio_of(request).read_only:
        raise APIError(403, "this studio was started with --read-only: it starts, stops and writes nothing.",
                       code="read_only")  # fmt: skip


router = APIRouter(include_in_schema=False)
writable = Depends(_writable)
actions = APIRouter(include_in_schema=False, dependencies=[writable])
"""Routes that write files, or start or stop runs. A read-only studio rejects requests to these routes."""


async def _ask(studio: Studio, body: CheckRequest | _Recipe, ask: str, **more: Any) -> dict[str, Any]:
    """Send the question `ask` (check or plan) about a recipe to the process of `Checks`, and return the answer."""
    library, origin = studio.library, body.origin
    found = None
    if origin is not None and origin.recipe is not None:
        if origin.recipe not in shipped_paths():
            raise APIError(404, f"gptworks has no recipe {origin.recipe[:128]!r}.", param="origin")
        found = str(shipped_paths()[origin.recipe])
    elif origin is not None and origin.file is not None:
        own = await studio.checks.in_thread(lambda: own_recipes(library.roots))
        if origin.file not in own:
            raise APIError(404, f"there is no recipe {origin.file[:128]!r} here.", param="origin")
        found = str(own[origin.file])
    elif origin is not None and origin.run is not None:
        name = origin.run
        found = str((await studio.checks.in_thread(lambda: library.get(name))).folder)
    return await studio.checks.ask({"ask": ask, "text": body.text, "origin": found, "allowed": studio.allowed, **more})


async def _checked(studio: Studio, body: _Recipe, *edits: tuple[str, str | None]) -> str:
    """Return a recipe's text after edits.

    Raises:
        UserError: the edited recipe is invalid.
        APIError: the recipe's origin does not exist.
    """
    found = await _ask(studio, body, "check", edits=edits)
    if found["problems"]:
        raise UserError("\n".join(one["message"] for one in found["problems"]))
    text: str = found["text"]
    return text


@router.get("/studio/start")
async def begin(request: Request) -> Response:
    """Return the recipes that a new recipe can be based on, the devices that a plan can use, and the form."""
    studio = studio_of(request)
    root = studio.library.roots[0]
    files = await studio.checks.in_thread(lambda: own_recipes(studio.library.roots))
    own = [
        {"file": name, "name": path.stem, "taken": path.parent == Path(os.path.realpath(root))}
        for name, path in files.items()
    ]
    recipes = [{"name": one.name, "summary": one.summary, "time": one.time} for one in shipped_recipes()]
    return as_json({"read_only": studio.read_only, "folder": str(root), "recipes": recipes, "own": own,
                  "devices": {name: one.name for name, one in DEVICES.items()}, "form": form()})  # fmt: skip


@router.post("/studio/start/check")
async def check(request: Request) -> Response:
    """Apply edits to a recipe's text; return the text, its settings and its problems."""
    body = await body_of(request, CheckRequest)
    return as_json(await _ask(studio_of(request), body, "check", edits=body.edits))


@router.post("/studio/start/plan")
async def plan(request: Request) -> Response:
    """Return the answer of `gptworks plan` to a recipe."""
    body = await body_of(request, PlanRequest)
    return as_json(await _ask(studio_of(request), body, "plan", name=body.name, device=body.device))


@router.get("/studio/start/processes")
async def processes(
    request: Request, run: Annotated[list[str], Query(max_length=MOST_ASKED, default_factory=list)]
) -> Response:
    """Return the state and the last output lines of each run that this studio started, and of the runs in `run`."""
    studio = studio_of(request)

    def look() -> list[dict[str, Any]]:
        known = {one.name: one for one in [*studio.processes.started.values()]}
        found = [
            {"run": name, "running": one.is_running, "stopping": one.asked and one.is_running,
             "code": one.exit_code, "lines": console_lines(one.folder)}
            for name, one in known.items()
        ]  # fmt: skip
        for name in dict.fromkeys(run):
            if name not in known:
                folder = studio.library.find(name).folder
                lines, stopping = console_lines(folder), studio.processes.is_stopping(name, folder)
                found.append({"run": name, "running": None, "stopping": stopping, "code": None, "lines": lines})
        return found

    return as_json({"processes": await studio.checks.in_thread(look)})


@actions.post("/studio/start/new")
async def start_new(request: Request) -> Response:
    """Write a recipe as NAME.yaml, and train it in the folder NAME next to this file."""
    studio, body = studio_of(request), await body_of(request, NewRequest)
    folder = new_folder(studio.library.roots[0], body.name)
    text = await _checked(studio, body, ("name", body.name), ("run_dir", str(folder)))
    await studio.checks.in_thread(lambda: _start_new(studio.processes, body.name, folder, text))
    return as_json({"run": body.name})


@actions.post("/studio/start/resume")
async def resume(request: Request) -> Response:
    """Resume a run with the settings of the given recipe."""
    studio, body = studio_of(request), await body_of(request, ResumeRequest)
    run, text = await _changed_text(studio, body)

    def resume_run() -> None:
        changes = allowed_changes(run, text)
        arguments = [f"--change={one['path']}={one['new']}" for one in changes if one["recorded"]]
        settings = [f"{one['path']}={one['new']}" for one in changes if not one["recorded"]]
        arguments = ["--resume", *arguments, "--", str(run.folder), *settings]
        studio.processes.start(run.id, run.folder, arguments)

    await studio.checks.in_thread(resume_run)
    return as_json({"run": run.id})


@actions.post("/studio/start/fork")
async def fork_run(request: Request) -> Response:
    """Fork a run at a checkpoint into a new folder, and train the fork with the settings of the given recipe."""
    studio, body = studio_of(request), await body_of(request, ForkRequest)
    folder = new_folder(studio.library.roots[0], body.name)
    run, text = await _changed_text(studio, body)

    def begin_fork() -> None:
        studio.processes.check_room()
        changes = allowed_changes(run, text, body.step)
        fork(run.folder, body.step, folder, [f"{one['path']}={one['new']}" for one in changes])
        studio.processes.start(body.name, folder, ["--resume", "--", str(folder)])

    await studio.checks.in_thread(begin_fork)
    return as_json({"run": body.name})


@router.post("/studio/start/changes")
async def changes(request: Request) -> Response:
    """Return the settings that change if a run, or a fork of it, resumes with a recipe; see `Resumption`."""
    studio, body = studio_of(request), await body_of(request, ChangesRequest)
    run, text = await _changed_text(studio, body)
    return as_json(await studio.checks.in_thread(lambda: resumption(run, text, body.step)))


@router.get("/studio/start/extension")
async def extend(request: Request, run: RunName, step: Annotated[int | None, Query(ge=0)] = None) -> Response:
    """Return the length that a run, or its fork from `step`, needs in order to train further; see `Extension`."""
    studio = studio_of(request)
    return as_json(await studio.checks.in_thread(lambda: extension(studio.library.get(run), step)))


@actions.post("/studio/start/stop")
async def stop(request: Request) -> Response:
    """Ask a run to stop after its current step, and to save a checkpoint."""
    studio, body = studio_of(request), await body_of(request, StopRequest)
    found = studio.library.runs().get(body.run)
    folder = None if found is None else found.folder
    await studio.checks.in_thread(lambda: studio.processes.stop(body.run, folder))
    return as_json({"run": body.run})


async def _changed_text(studio: Studio, body: ResumeRequest) -> tuple[RunFolder, str]:
    text = await _checked(studio, _Recipe(text=body.text, origin=Origin(run=body.run)))
    return await studio.checks.in_thread(lambda: studio.library.get(body.run)), text


# ------------------------------------------------------------------------------------------------ a new run's folder


def new_folder(root: Path, name: str) -> Path:
    """Return the folder for a new run, which does not exist yet.

    Raises:
        APIError: the name is invalid or already used in `root`, or `root` is itself a run.
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
        folder.parent.mkdir(exist_ok=True)  # the default folder `runs` may not exist yet
        folder.mkdir()
        write_whole(file, text, new=True)
    except (FileExistsError, UserError) as error:
        taken = error.filename if isinstance(error, OSError) else file
        raise APIError(409, f"{taken} exists, and nothing is overwritten: choose another name.") from None
    except OSError as error:
        raise RunError(f"{error.filename or file} could not be written: {error.strerror}.") from None
    processes.start(name, folder, ["--", str(file)])
