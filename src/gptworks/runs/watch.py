"""Follow the logs of many runs while they train, with bounded memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptworks.config import Recipe
from gptworks.recipe import load_recipe
from gptworks.runs.bands import Band, find_band
from gptworks.runs.history import origins_of
from gptworks.runs.series import Series
from gptworks.training.changes import Origin

MOST_BYTES = 1 << 30
"""Maximum bytes in memory for all runs together. Beyond this size, records are dropped, first of runs that were not
requested lately."""

IN_USE_SECONDS = 60.0
"""Seconds for which a requested run counts as in use. Runs in use are the last to lose records."""

MOMENT_SECONDS = 0.25
_FEW_BYTES = 1 << 16


class Watched:
    """A run with the figures that were read from its log, and its row in a list of runs."""

    def __init__(self, folder: Path, recipe_of: Callable[[Path], Recipe] = load_recipe) -> None:
        self.series = Series(folder, recipe_of)
        self.used_at = float("-inf")
        self.is_released = False
        """Whether records were dropped to make room for other runs."""
        self.band: Band | None = None
        self.problem: str | None = None
        """The reason why the run's log or recipe cannot be read; None if there is no problem."""
        self._recipe: Recipe | None = None
        self.origin: Origin | None = None
        """The checkpoint from which the run was forked; None if the run is not a fork."""
        self._summary: dict[str, Any] | None = None
        self._is_whole = False

    def read(self) -> bool:
        """Read the next part of the log; return whether anything changed."""
        try:
            changed = self.series.read()
            if changed or self.problem is not None or self._recipe is None:
                recipe = self.series.recipe
                changed, self.problem = changed or self._recipe is not recipe, None
                if recipe is not self._recipe:
                    self._recipe, self.band = recipe, find_band(recipe)
                    self.origin = next(iter(origins_of(self.series.folder)), None)
        except Exception as error:  # the run's files may hold anything
            before, self.problem = self.problem, str(error)[:600] or type(error).__name__
            changed = self.problem != before
        self._is_whole = self._is_whole and not changed
        return changed

    def row(self) -> dict[str, Any]:
        """Return the run's row in a list of runs. While a log is read again from its start, the row keeps its old
        figures."""
        series, recipe = self.series, self._recipe
        if self._summary is None or (not self._is_whole and (series.at_end or not self._summary["whole"])):
            self._summary = {
                **series.summary(),
                "recipe": recipe and recipe.name,
                "seed": recipe and recipe.seed,
                "loss_unit": recipe and recipe.objective.loss_unit,
                "keys": series.keys,
                "details": dict(series.details),
                "band": self.band and self.band.name,
                "records": series.n_records,
                "skipped": str(series.skipped) if series.skipped else None,
                "problem": self.problem,
                "whole": series.at_end,
            }
            self._is_whole = series.at_end
        return self._summary | {"whole": series.at_end or self.problem is not None, "thinned": series.is_thinned}


class Watch:
    """Watches runs by name; for use in one thread."""

    def __init__(self, most_bytes: int = MOST_BYTES, recipe_of: Callable[[Path], Recipe] = load_recipe) -> None:
        self.runs: dict[str, Watched] = {}
        self._recipe_of = recipe_of
        self._most_bytes = most_bytes
        self._changed: set[str] = set()

    def follow(self, folders: Mapping[str, Path]) -> None:
        """Watch exactly the runs in `folders`, by name."""
        same = {name: one for name, one in self.runs.items() if folders.get(name) == one.series.folder}
        self.runs = {name: same.get(name) or Watched(folder, self._recipe_of) for name, folder in folders.items()}

    def use(self, names: Sequence[str], asked_at: float | None = None, *, begins: bool = True) -> list[Watched]:
        """Read the logs of the requested runs for `MOMENT_SECONDS`, and return the runs.

        A log is read again from its start if records were dropped and the run was not requested in the last
        `IN_USE_SECONDS`.

        Args:
            asked_at: the start of `MOMENT_SECONDS`, on the monotonic clock. Default: now. All runs of a request share
                this time, so that a request for many long runs is answered soon.
            begins: whether to read the first records of an unread run even after `MOMENT_SECONDS`.

        Raises:
            KeyError: a name belongs to no watched run.
        """
        now, found = time.monotonic() if asked_at is None else asked_at, [self.runs[name] for name in names]
        for name, one in zip(names, found, strict=True):
            if one.is_released and now - one.used_at > IN_USE_SECONDS:
                one.series.begin()
                one.is_released = False
            one.used_at = now
            while (time.monotonic() < now + MOMENT_SECONDS or (begins and not one.series.is_begun)) and one.read():
                self._changed.add(name)
        return found

    def advance(self, seconds: float) -> tuple[set[str], bool]:
        """Read logs for about `seconds`, the beginning of each log first. Return the names of the runs that changed
        since the last call, and whether there is more to read."""
        deadline, changed = time.monotonic() + seconds, self._changed
        self._changed = set()
        runs = sorted(self.runs.items(), key=lambda item: -item[1].used_at)
        first = [(name, one, True) for name, one in runs if not one.series.is_begun]
        for name, one, only_begins in (*first, *((name, one, False) for name, one in runs)):
            while True:
                if one.read():
                    changed.add(name)
                if time.monotonic() > deadline:
                    self._release()
                    return changed, True
                if only_begins or one.series.at_end or one.problem is not None:
                    break
        self._release()
        return changed, False

    def _release(self) -> None:
        sizes = {name: one.series.n_bytes for name, one in self.runs.items()}
        in_use = time.monotonic() - IN_USE_SECONDS
        while sum(sizes.values()) > self._most_bytes:
            big = [name for name in sizes if sizes[name] > _FEW_BYTES]
            if not big:
                return
            name = min(big, key=lambda name: (max(self.runs[name].used_at, in_use), -sizes[name]))
            one = self.runs[name]
            one.series.thin()
            one.is_released = True
            sizes[name] = one.series.n_bytes
