"""Routes of the Runs tab: curves as in `gptworks report`, comparisons as in `gptworks compare`, and results of
`gptworks try`. Runs' files may be hostile. These routes write no files.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from gptworks.errors import UserError, shortened
from gptworks.files import check_regular
from gptworks.runs.bands import Band
from gptworks.runs.compare import compare
from gptworks.runs.series import FEWEST_POINTS, MOST_POINTS, View, drawn
from gptworks.runs.try_page import TRY_PAGE, try_lines
from gptworks.runs.try_results import TRY_FILE, read_try
from gptworks.runs.watch import Watch, Watched
from gptworks.serve.app import caller_of
from gptworks.serve.errors import APIError, invalid
from gptworks.studio.answers import Events, as_json, json_text, plain
from gptworks.studio.feed import Changes, Feed
from gptworks.studio.library import printable
from gptworks.studio.state import Studio, studio_of

router = APIRouter(include_in_schema=False)

MOST_RUNS = 256
MOST_KEYS = 64
MOST_COMPARED = 64
MOST_DRAWN = 600_000
"""Maximum number of points in an answer."""
MOST_SAMPLES = 100
MOST_CHARACTERS = 20_000
"""Maximum number of characters of a sample's prompt, and of its text, in an answer; the rest is cut off."""
MOST_BEGUN = 32
"""Number of curves in an answer for which the first records of an unread log are always read. If the time for
reading (`MOMENT_SECONDS`) is over, further curves of unread logs are empty in this answer."""
_AT_ONCE = 8
"""Number of curves that are computed before other requests may use the feed's thread."""
_LIVE_SECONDS = 0.5
"""Minimum seconds between two events of the live feed."""
MOST_TRIES = 100
MOST_TRY_BYTES = 1 << 20
"""Maximum size of a file that `gptworks try` has written, in bytes."""

Names = Annotated[list[str], Query(alias="run", min_length=1, max_length=MOST_RUNS)]
Axis = Literal["step", "tokens", "seconds"]
Number = Annotated[float | None, Query(allow_inf_nan=False)]


def _used(watch: Watch, names: list[str], asked_at: float | None = None, *, begins: bool = True) -> list[Watched]:
    if (missing := next((name for name in names if name not in watch.runs), None)) is not None:
        raise APIError(404, f"there is no run {missing[:128]!r} here.", param="run", code="run_not_found")
    return watch.use(list(dict.fromkeys(names)), asked_at, begins=begins)


async def _rows(feed: Feed, names: set[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of the list of runs: of the runs in `names`, or of all runs if `names` is None."""

    def made(watch: Watch) -> list[dict[str, Any]]:
        started = {name: run.started for name, run in feed.library.runs().items()}
        named = defaultdict[str, dict[Path, str]](dict)
        for name, one in watch.runs.items():
            named[one.series.folder.name][one.series.folder] = name
        return [
            {"id": name, "state": feed.states.get(name, "stopped"), "started": started.get(name, 0.0),
             **plain(one.row()), "origin": _origin(one, named)}
            for name, one in watch.runs.items()
            if names is None or name in names
        ]  # fmt: skip

    return await feed.ask(made)


def _origin(one: Watched, named: Mapping[str, Mapping[Path, str]]) -> dict[str, Any] | None:
    """Return the origin of a fork: the name of the `run`, the `step`, and the run's `id`. None if `one` is not a fork.
    If several listed runs have this name, `id` names the run in the fork's parent folder. `id` is None if no run fits.

    Args:
        named: ids of runs by their folder's name, then by their folder.
    """
    if one.origin is None:
        return None
    found = {folder: name for folder, name in named.get(one.origin.run, {}).items() if folder != one.series.folder}
    only = next(iter(found.values())) if len(found) == 1 else None
    parent = found.get(one.series.folder.parent / one.origin.run, only)
    return {"run": one.origin.run, "step": one.origin.step, "id": parent}


@router.get("/studio/runs")
async def list_runs(request: Request) -> Response:
    """Return the list of runs, each with its state, its step, and its last and best evaluation."""
    feed = studio_of(request).feed
    return as_json({"runs": await _rows(feed), "left_out": feed.left_out})


@router.get("/studio/runs/curves")
async def curves(
    request: Request,
    run: Names,
    key: Annotated[list[str], Query(min_length=1, max_length=MOST_KEYS)],
    x: Axis = "step",
    low: Annotated[Number, Query(alias="from")] = None,
    high: Annotated[Number, Query(alias="to")] = None,
    points: Annotated[int, Query(ge=FEWEST_POINTS, le=MOST_POINTS)] = 1000,
    smooth: Annotated[float, Query(ge=0, lt=1)] = 0.0,
    log: bool = False,
    raw: bool = False,
) -> Response:
    """Return curves of runs' figures between `from` and `to` on the axis `x`, and the bands of `validation.loss`. A
    curve has at most `points` points, which show all spikes. With `raw`, also return unsmoothed curves if `smooth` is
    above 0."""
    infinite = float("inf")
    view = View(x, -infinite if low is None else low, infinite if high is None else high, points, smooth, log)
    names, keys = list(dict.fromkeys(run)), list(dict.fromkeys(key))
    has_raw = raw and smooth > 0
    if len(names) * len(keys) * points * (1 + has_raw) > MOST_DRAWN:
        raise invalid(
            "points", f"{len(names)} runs × {len(keys)} figures × {points} points are more than {MOST_DRAWN:,}"
        )
    feed, asked_at = studio_of(request).feed, time.monotonic()
    wanted = [(name, one) for name in names for one in keys]
    views = {"raw": replace(view, smoothing=0.0), "smooth": view} if has_raw else {"smooth": view}
    parts_of = (
        _curves_of(wanted[i : i + _AT_ONCE], views, asked_at, begins=i < MOST_BEGUN)
        for i in range(0, len(wanted), _AT_ONCE)
    )
    answers = [await feed.ask(part) for part in parts_of]
    bands = await feed.ask(lambda watch: _bands(watch, names, view, asked_at)) if "validation.loss" in keys else []
    parts = ", ".join(part for answer in answers for part in answer)
    head = json_text({"x": x, "bands": bands})
    return Response(f'{head[:-1]}, "curves": [{parts}]}}', media_type="application/json")


def _curves_of(
    wanted: list[tuple[str, str]], views: dict[str, View], asked_at: float, *, begins: bool
) -> Callable[[Watch], list[str]]:
    """Return a function for `Feed.ask` that returns curves as JSON text. The feed's thread does the slow encoding."""

    def made(watch: Watch) -> list[str]:
        found = []
        for name, key in wanted:
            (one,) = _used(watch, [name], asked_at, begins=begins)
            lines = {kind: drawn(one.series, key, view) for kind, view in views.items()}
            curve = {"run": name, "key": key, "whole": one.series.at_end or one.problem is not None}
            if one.origin is not None:
                curve["forked_at"] = one.series.place_of(one.origin.step, views["smooth"].axis)
            for kind, (along, values) in lines.items():
                line = {"x": along.tolist(), "y": values.tolist()}
                curve |= {"raw": line} if kind == "raw" else line
            found.append(json_text(curve))
        return found

    return made


def _bands(watch: Watch, names: list[str], view: View, asked_at: float) -> list[dict[str, Any]]:
    """Return each recipe's band: the interval in which a further run's validation loss lies with 95% probability. On
    the axis `seconds`, there are no bands."""
    found: dict[str, tuple[Band, list[str]]] = {}
    for name, one in zip(names, _used(watch, names, asked_at, begins=False), strict=True):
        if one.band is not None and view.axis != "seconds":
            found.setdefault(one.band.fingerprint, (one.band, []))[1].append(name)
    return [_drawn_band(band, runs, view.axis) for band, runs in found.values()]


def _drawn_band(band: Band, runs: list[str], axis: str) -> dict[str, Any]:
    margins = [(point, band.margin(point)) for point in band.points]
    return {
        "name": band.name,
        "runs": runs,
        "x": [getattr(point, axis) for point, _ in margins],
        "low": [point.mean - margin for point, margin in margins],
        "high": [point.mean + margin for point, margin in margins],
    }


@router.get("/studio/runs/step")
async def step_of(request: Request, run: str, at: Annotated[float, Query(ge=0)], x: Axis = "step") -> Response:
    """Return a run's last training record and last evaluation up to the point `at` of the axis `x`."""

    def look(watch: Watch) -> dict[str, Any]:
        (one,) = _used(watch, [run])
        return {"run": run, "records": plain(one.series.at(x, at))}

    return as_json(await studio_of(request).feed.ask(look))


@router.get("/studio/runs/compare")
async def comparison(
    request: Request, run: Annotated[list[str], Query(min_length=1, max_length=MOST_COMPARED)]
) -> Response:
    """Return the conclusions of `gptworks compare`, and the settings in which the runs differ."""
    feed = studio_of(request).feed

    def conclude(watch: Watch) -> dict[str, Any]:
        runs = _used(watch, run)
        for name in run:  # check that no link leads out of the folder, since the comparison reads a checkpoint
            feed.library.get(name)
        broken = [one for one in runs if one.problem is not None]
        if broken:
            raise UserError(f"{broken[0].series.folder.name} cannot be compared: {broken[0].problem}")
        found = compare([one.series.history() for one in runs], [one.band for one in runs])
        whole = all(one.series.at_end for one in runs)
        return {**plain(found.to_json()), "ids": list(dict.fromkeys(run)), "whole": whole}

    return as_json(await feed.ask(conclude))


@router.get("/studio/runs/samples")
async def samples(request: Request, run: Names, most: Annotated[int, Query(ge=1, le=MOST_SAMPLES)] = 20) -> Response:
    """Return the texts that runs generated during training, from the latest step to the earliest."""

    def look(watch: Watch) -> list[dict[str, Any]]:
        runs = dict(zip(dict.fromkeys(run), _used(watch, run), strict=True))
        found = [(name, text) for name, one in runs.items() for text in one.series.samples(most)]
        found.sort(key=lambda pair: -pair[1]["step"])
        return [
            {"run": name, "step": text["step"]}
            | {key: shortened(text[key], MOST_CHARACTERS) for key in ("prompt", "text")}
            for name, text in found[:most]
        ]

    return as_json({"samples": await studio_of(request).feed.ask(look)})


@router.get("/studio/runs/live")
async def live(request: Request) -> Response:
    """Send rows of the list of runs as events: first all rows, then changed rows."""
    studio = studio_of(request)
    await studio.feed.ask(lambda watch: None)
    studio.service.watch(caller_of(request))
    changes = studio.feed.changes()
    return Events(_live(studio, changes), changes.close)


async def _live(studio: Studio, changes: Changes) -> AsyncGenerator[list[dict[str, Any]]]:
    feed = studio.feed
    rows = await _rows(feed)
    left_out = feed.left_out
    yield [{"type": "runs", "runs": rows, "gone": [], "all": True, "left_out": left_out}]
    known = {row["id"] for row in rows}
    while not studio.service.draining:
        if changed := await changes.take(2.0):
            rows = await _rows(feed, changed)
            gone, known = sorted(known - feed.states.keys()), set(feed.states)
            more = {} if left_out == feed.left_out else {"left_out": feed.left_out}
            left_out = feed.left_out
            yield [{"type": "runs", "runs": rows, "gone": gone, "all": False, **more}]
        await asyncio.sleep(_LIVE_SECONDS)


# ------------------------------------------------------------------------------------------------------------ tries


@router.get("/studio/tries")
async def list_tries(request: Request) -> Response:
    """Return the results of `gptworks try` for listed runs, each with its change, its verdict and its runs' ids."""
    tries: Tries = request.app.state.tries
    return as_json(await studio_of(request).feed.ask(tries.rows))


class Tries:
    """Reads the results of `gptworks try`, cached until a file changes. Call its methods in the feed's thread."""

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
            check_regular(file, MOST_TRY_BYTES, inside=root)
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
