"""Show the results of `gptworks try` with the curves of its runs. The files may be hostile, and are only read."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gptworks.errors import UserError
from gptworks.files import check_regular
from gptworks.runs.try_page import TRY_PAGE, try_lines
from gptworks.runs.try_results import TRY_FILE, read_try
from gptworks.runs.watch import Watch
from gptworks.studio.answers import as_json
from gptworks.studio.feed import Feed
from gptworks.studio.library import printable
from gptworks.studio.state import studio_of

router = APIRouter(include_in_schema=False)

MOST_TRIES = 100
MOST_BYTES = 1 << 20
"""Maximum size of a try's file, in bytes."""
MOST_RUNS = 256
"""Maximum number of a try's runs that the page draws."""


@router.get("/studio/tries")
async def list_tries(request: Request) -> Response:
    """Return the tries whose runs are listed, each with its change, its verdict in words, and the ids of its runs."""
    tries: Tries = request.app.state.tries
    return as_json(await studio_of(request).feed.ask(tries.rows))


class Tries:
    """Reads tries, and caches each until one of its files changes. Call its methods in the feed's thread."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._known: dict[Path, tuple[list[int], dict[str, Any]]] = {}

    def rows(self, watch: Watch) -> dict[str, Any]:
        """Return the answer of /studio/tries."""
        runs, found = self._feed.library.runs(), defaultdict[tuple[Path, Path], dict[str, str]](dict)
        for name, one in watch.runs.items():
            place = one.series.folder
            if name in runs and place.parent.name == "pairs" and place.parents[1].is_relative_to(runs[name].root):
                found[place.parents[1], runs[name].root][place.name] = name
        tries = {key: ids for key, ids in found.items() if (key[0] / TRY_FILE).is_file()}
        listed = [self._row(folder, root, ids) for (folder, root), ids in list(tries.items())[:MOST_TRIES]]
        return {"tries": listed, "left_out": len(tries) - len(listed)}

    def _row(self, folder: Path, root: Path, ids: Mapping[str, str]) -> dict[str, Any]:
        """Return the page's row for one try. `ids` maps the folder names of the try's runs to the runs' ids."""
        below = folder.relative_to(root).as_posix()
        name = root.resolve().name if below == "." else below
        row = {"id": printable(name), "runs": [ids[one] for one in sorted(ids)][:MOST_RUNS], "page": None}
        try:
            row |= self._read(folder, root, ids)
        except (UserError, OSError, ValueError, RecursionError) as error:  # the files may be hostile
            return row | {"problem": printable(str(error))[:600] or type(error).__name__}
        running = any(self._feed.states.get(one) == "running" for one in ids.values())
        return row | {"problem": None, "state": "running" if running else row["state"]}

    def _read(self, folder: Path, root: Path, ids: Mapping[str, str]) -> dict[str, Any]:
        files = [folder / name for name in (TRY_FILE, "before.yaml", "after.yaml")]
        for file in files:
            check_regular(file, MOST_BYTES, inside=root)
        changed = [file.stat().st_mtime_ns for file in files]
        if self._known.get(folder, (None,))[0] != changed:
            found = read_try(folder, self._feed.library.recipes.of)
            design = found.design
            made = {
                "changes": [printable(change) for change in design.changes],
                "state": "decided" if found.decided else "open",
                "lines": list(try_lines(found)),
                "pairs": len(found.pairs),
                "most_pairs": design.most_pairs,
                "steps": design.steps,
            }
            if len(self._known) >= 2 * MOST_TRIES:
                self._known.clear()
            self._known[folder] = changed, made
        row, page = self._known[folder][1], folder / TRY_PAGE
        if row["pairs"] and not {"00-before", "00-after"} <= ids.keys():
            raise UserError("the runs of its first pair are not there, or cannot be read.")
        return row | {"page": printable(str(page)) if page.is_file() else None}
