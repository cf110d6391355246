"""Routes of the Home tab: draft a recipe for a folder of texts. The route of Start that starts a new run trains it."""

import os
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from gptworks.serve import openai
from gptworks.serve.app import body_of
from gptworks.studio.answers import as_json
from gptworks.studio.checking import check_within
from gptworks.studio.folders import entries, outermost
from gptworks.studio.start import new_folder, writable
from gptworks.studio.state import Studio, studio_of

router = APIRouter(include_in_schema=False)
actions = APIRouter(include_in_schema=False, dependencies=[writable])
"""Routes that start or end processes, or serve those. A read-only studio rejects requests to these routes."""
_PATH = r"^[^\x00]+$"


class LookRequest(openai.Wire):
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
    """Begin to look at a folder of texts, and to draft a recipe for it, in a process."""
    studio, body = studio_of(request), await body_of(request, LookRequest)
    folder = Path(os.path.expanduser(body.folder))  # noqa: PTH111 (which leaves an unknown user's folder as it is)

    def begin() -> None:
        check_within("folder", body.folder, [folder], studio.allowed, "use gptworks init")
        new_folder(studio.library.roots[0], body.name)
        studio.processes.check_room()
        studio.drafts.begin(str(folder), body.minutes, body.name)

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
    """End the process that looks at a folder."""
    studio = studio_of(request)
    await studio.checks.in_thread(studio.drafts.cancel)
    return _answer(studio)


def _answer(studio: Studio) -> Response:
    last, missing = studio.drafts.last, studio.library.missing
    return as_json({
        "read_only": studio.read_only, "folders": outermost(studio.allowed), "makes": missing and str(missing),
        "drafting": None if last is None else last.describe(),
    })  # fmt: skip
