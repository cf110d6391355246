"""Routes of the Home tab: choosing a folder of texts, drafting a recipe for it, and a run's progress. The page
starts a run by the routes of the Start tab.
"""

import os
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from gptworks.errors import shortened
from gptworks.runs.watch import Watched
from gptworks.serve.app import body_of
from gptworks.serve.wire import Wire
from gptworks.studio.answers import as_json
from gptworks.studio.checking import check_within
from gptworks.studio.folders import entries, outermost
from gptworks.studio.play import RunName
from gptworks.studio.start import new_folder, writable
from gptworks.studio.state import Studio, studio_of

router = APIRouter(include_in_schema=False)
actions = APIRouter(include_in_schema=False, dependencies=[writable])
"""Routes for choosing a folder and for drafting a recipe in a process. A read-only studio rejects requests to
these routes."""
MOST_SAMPLES, MOST_CHARACTERS = 4, 4_000
"""Maximum number of a run's samples in a response; of characters shown of a sample's prompt or continuation."""
_PATH = r"^[^\x00]+$"


class LookRequest(Wire):
    folder: Annotated[str, Field(min_length=1, max_length=4096, pattern=_PATH)]
    minutes: Annotated[float, Field(ge=0.1, le=100_000)]
    """Minutes that training may take."""
    name: str
    """The new run's name."""


@router.get("/studio/home")
async def home(request: Request) -> Response:
    """Return the folders that the page may read, and the newest draft."""
    return _answer(studio_of(request))


@actions.post("/studio/home/look")
async def look(request: Request) -> Response:
    """Start a process that reads a folder of texts and drafts a recipe for it."""
    studio, body = studio_of(request), await body_of(request, LookRequest)
    folder = Path(os.path.expanduser(body.folder))  # noqa: PTH111 (Path.expanduser raises an error for an unknown user)

    def begin() -> None:
        check_within("folder", body.folder, [folder], studio.allowed, "use gptworks init")
        new_folder(studio.library.roots[0], body.name)
        studio.processes.check_room()
        is_inside = (
            folder.is_relative_to(here := Path.cwd()) and folder != here
        )  # a relative path stays valid if the recipe and the texts are moved together
        studio.drafts.begin(str(folder.relative_to(here) if is_inside else folder), body.minutes, body.name)

    await studio.checks.in_thread(begin)
    return _answer(studio)


@actions.get("/studio/home/folders")
async def folders(
    request: Request,
    folder: Annotated[str | None, Query(max_length=4096, pattern=_PATH)] = None,
    words: Annotated[str, Query(max_length=256)] = "",
) -> Response:
    """Return the folders and files in a folder whose names contain `words`; see `entries`."""
    studio = studio_of(request)
    return as_json(await studio.checks.in_thread(lambda: entries(folder, words, studio.allowed)))


@actions.post("/studio/home/cancel")
async def cancel(request: Request) -> Response:
    """End the process that drafts a recipe."""
    studio = studio_of(request)
    await studio.checks.in_thread(studio.drafts.cancel)
    return _answer(studio)


@router.get("/studio/home/run")
async def progress(request: Request, run: RunName) -> Response:
    """Return a run's progress in training; see `_progress`."""
    feed = studio_of(request).feed
    return as_json(await feed.ask(lambda watch: _progress(watch.use([run])[0] if run in watch.runs else None)))


def _progress(one: Watched | None) -> dict[str, Any]:
    """Return a run's last `step`, its `steps` (`train.max_steps`, if set), the `share` done, the `seconds_left` at the
    average speed so far, the first and newest training losses `first_loss` and `loss`, their `unit`, and the `samples`
    of the newest step with samples.

    `share` and `seconds_left` are None if neither `train.max_steps` nor `train.max_minutes` is set. Until the log is
    read to its end, `step` is 0, and all values except `steps` are empty.
    """
    found: dict[str, Any] = dict.fromkeys(("steps", "share", "seconds_left", "first_loss", "loss", "unit"))
    found |= {"step": 0, "samples": []}
    if one is None or one.problem is not None:
        return found
    series, recipe = one.series, one.series.recipe
    found["steps"] = recipe.train.max_steps
    if not series.at_end or not series.step:
        return found
    step, seconds, minutes = series.step, one.row()["seconds"], recipe.train.max_minutes
    shares = [step / recipe.train.max_steps] if recipe.train.max_steps else []
    shares += [seconds / (60 * minutes)] if minutes else []
    share = min(1.0, max(shares)) if shares else None
    _, losses = series.curve("train.loss", "step")
    newest = series.samples(MOST_SAMPLES)
    return found | {
        "step": step, "share": share, "seconds_left": seconds / share * (1 - share) if share else None,
        "first_loss": losses[0].item() if len(losses) else None, "loss": losses[-1].item() if len(losses) else None,
        "unit": recipe.objective.loss_unit,
        "samples": [
            {"step": text["step"]} | {key: shortened(text[key], MOST_CHARACTERS) for key in ("prompt", "text")}
            for text in reversed(newest) if text["step"] == newest[0]["step"]
        ],
    }  # fmt: skip


def _answer(studio: Studio) -> Response:
    last, missing = studio.drafts.last, studio.library.missing
    return as_json({
        "read_only": studio.read_only, "folders": outermost(studio.allowed), "makes": missing and str(missing),
        "drafting": None if last is None else last.describe(),
    })  # fmt: skip
