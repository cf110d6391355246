"""Arrays of a run's figures, which grow with the run's log. The studio draws the curves of many long runs from them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.files import Stamp, stamp
from gptworks.recipe import load_recipe
from gptworks.runs.history import History
from gptworks.training.record.curves import moving_average
from gptworks.training.record.metrics import MetricsReader, Record, Skipped, read_record, skim_metrics

Floats = NDArray[np.float64]
Places = NDArray[np.intp]

AXES = ("step", "tokens", "seconds")
KINDS = ("train", "validation", "sample", "skipped", "rollback")

MOST_BYTES = 64 << 20
"""Maximum bytes in memory for one run. Beyond this size, every second record of the kind that uses the most memory is
dropped, except the best and the last."""

MOST_COLUMNS = 1024
"""Maximum number of different figures in the records of one kind; further figures are ignored."""

MOST_DETAILS, MOST_PARTS = 32, 256
"""Maximum number of figures in `details`, which have a value for each layer or each part of a step, and maximum number
of values of such a figure. A figure with more values is ignored."""

_MOST_NAME = 64
_FIRST = ("step", "offset", "tokens", "seconds", "loss")
"""Figures that are kept even if the records of a kind have more than MOST_COLUMNS figures."""
_NO_FIGURES = ("step", "offset", *AXES, "sequences", "sequences_held_out")

SKIMMED_BYTES = 1 << 22
"""Size of a log in bytes above which some records are sampled first, so that the whole curve is visible at once."""

N_SKIMMED = 200
"""Number of records sampled from a long log."""

FEWEST_POINTS, MOST_POINTS = 8, 10_000
"""Minimum and maximum number of points of a decimated curve."""


class Columns:
    """The figures of all records of one kind: an array for each figure, ordered by step.

    A missing value is NaN. A column is float32 as long as float32 holds all its values exactly, else float64.
    """

    def __init__(self) -> None:
        self.n = 0
        self._arrays: dict[str, NDArray[Any]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._arrays

    def __getitem__(self, key: str) -> Floats:
        return self._arrays[key][: self.n].astype(np.float64)

    @property
    def keys(self) -> list[str]:
        return list(self._arrays)

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def extend(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Add records. Sort all records by step if the new records are not in order."""
        if not rows:
            return
        found, last = dict.fromkeys(self._arrays), None
        for row in rows:
            if row.keys() != last:  # most records have the same keys as the one before
                last = row.keys()
                found |= dict.fromkeys((*(key for key in _FIRST if key in row), *row))
        for key in [key for key in found if len(key) <= _MOST_NAME][:MOST_COLUMNS]:
            values = np.array([row.get(key, math.nan) for row in rows], np.float64)
            array = self._arrays.get(key, np.empty(0, np.float32))
            with np.errstate(over="ignore"):
                exact = np.array_equal(values.astype(np.float32), values, equal_nan=True)
            if not exact and array.dtype == np.float32:
                array = array.astype(np.float64)
            if len(array) < self.n + len(rows):
                room = np.full(max(self.n + len(rows), self.n * 5 // 4), np.nan, array.dtype)
                room[: min(self.n, len(array))] = array[: self.n]
                array = room
            array[self.n : self.n + len(rows)] = values
            self._arrays[key] = array
        ordered = self.n == 0 or self._arrays["step"][self.n - 1] <= rows[0]["step"]
        self.n += len(rows)
        if not ordered or np.any(np.diff(self._arrays["step"][self.n - len(rows) : self.n]) < 0):
            self._take(np.argsort(self._arrays["step"][: self.n], kind="stable"))

    def best(self) -> int | None:
        """Return the index of the record with the lowest loss; None if no loss is finite."""
        loss = self["loss"] if "loss" in self else np.empty(0)
        return int(np.nanargmin(np.where(np.isfinite(loss), loss, np.nan))) if np.isfinite(loss).any() else None

    def row(self, place: int) -> dict[str, float]:
        """Return the figures of the record at index `place`, without missing values. Only `loss` may be NaN."""
        values = {key: float(array[place]) for key, array in self._arrays.items()}
        return {key: value for key, value in values.items() if key == "loss" or not math.isnan(value)}

    def thin(self) -> None:
        """Drop every second record, but keep the best and the last."""
        stays = np.arange(self.n) % 2 == 0
        stays[[self.n - 1, *([best] if (best := self.best()) is not None else [])]] = True
        self._take(np.flatnonzero(stays))

    def _take(self, places: Places) -> None:
        self._arrays = {key: array[: self.n][places] for key, array in self._arrays.items()}
        self.n = len(places)


class Series:
    """The figures of a run, as far as its log has been read.

    Figures by layer and by part of a step make up most of a log. They are kept only after the first request for such a
    figure.
    """

    def __init__(self, folder: Path, recipe_of: Callable[[Path], Recipe] = load_recipe) -> None:
        self.folder, self._recipe_of = folder, recipe_of
        self._is_detailed = False
        self.begin()

    def begin(self) -> None:
        """Start reading the log again from its beginning."""
        self._stamp: Stamp | None = None
        self._reader = MetricsReader(self.folder / "metrics.jsonl")
        self.columns = {kind: Columns() for kind in KINDS}
        self.details: dict[str, list[str]] = {}
        """Names of the layers or parts, by figure, such as `train.gradient_norm_by_layer`."""
        self._ahead = {kind: Columns() for kind in KINDS}
        """Records sampled from a long log, which stand for the records that have not been read yet."""
        self.n_records = 0
        self.is_thinned = False
        """Whether records were dropped to save memory."""

    def thin(self) -> None:
        """Drop every second record of the kind that uses the most memory."""
        self.is_thinned = True
        max(self.columns.values(), key=lambda columns: columns.n_bytes).thin()

    @cached_property
    def recipe(self) -> Recipe:
        """The run's recipe. Raises UserError if the recipe is missing or not readable."""
        return self._recipe_of(self.folder)

    @property
    def skipped(self) -> Skipped:
        """Lines of the log that could not be read as records."""
        return self._reader.skipped

    @property
    def is_begun(self) -> bool:
        """Whether any of the log has been read."""
        return self._stamp is not None

    @property
    def at_end(self) -> bool:
        return self._reader.at_end

    @property
    def n_bytes(self) -> int:
        return sum(columns.n_bytes for columns in self.columns.values())

    def read(self) -> bool:
        """Read up to 256 KiB more of the log; start again from its beginning if the log was replaced. Return whether
        records were read or the log was replaced."""
        now = stamp(self._reader.path)
        if self.at_end and now == self._stamp:
            return False
        restarted = not self._reader.continues()
        if restarted:  # the run may have been resumed with other settings
            self.begin()
            vars(self).pop("recipe", None)
        if self._stamp is None and now is not None and now[1] > SKIMMED_BYTES:
            self._extend(self._ahead, skim_metrics(self._reader.path, N_SKIMMED))
        self._stamp = now
        records = self._reader.read()
        self._extend(self.columns, records)
        self.n_records += len(records)
        while self.n_bytes > MOST_BYTES:
            self.thin()
        if self.at_end:
            self._ahead = {kind: Columns() for kind in KINDS}
        return restarted or bool(records)

    def _extend(self, columns: dict[str, Columns], records: Iterable[tuple[int, Record]]) -> None:
        """Append records, given with their offsets in the log, to the columns of their kind."""
        rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for offset, record in records:
            if record["kind"] in rows:
                rows[record["kind"]].append(self._figures(record, offset))
        for kind, found in rows.items():
            columns[kind].extend(found)

    @property
    def step(self) -> int:
        """The last recorded step."""
        return int(max((columns["step"][-1] for columns in self.columns.values() if columns.n), default=0))

    @property
    def keys(self) -> list[str]:
        """Names of the figures that have curves, without figures by layer and by part, which are in `details`."""
        return [
            f"{kind}.{key}"
            for kind in ("train", "validation")
            for key in self.columns[kind].keys
            if "." not in key and key not in _NO_FIGURES
        ]

    def summary(self) -> dict[str, Any]:
        """Return the run's progress, training loss, and last and best evaluation. Before the first record, a loss or an
        evaluation is None, and a count or a time is 0."""
        train, validation = self.columns["train"], self.columns["validation"]
        now = train.row(train.n - 1) if train.n else {}
        places = {"last": validation.n - 1 if validation.n else None, "best": validation.best()}
        rows = {name: None if place is None else validation.row(place) for name, place in places.items()}
        return {
            "step": self.step,
            "tokens": int(max((c["tokens"].max() for c in (train, validation) if c.n), default=0)),
            "seconds": now.get("seconds", 0.0),
            "train_loss": now.get("loss"),
            "tokens_per_second": now["tokens"] / now["seconds"] if now.get("seconds") else 0.0,
            **{
                name: row and {"step": int(row["step"]), "loss": row["loss"], "bits_per_byte": row.get("bits_per_byte")}
                for name, row in rows.items()
            },
        }

    def curve(self, key: str, axis: str) -> tuple[Floats, Floats]:
        """Return x and y of a figure's curve, such as `validation.loss`: positions on `axis`, and finite values.

        Until a long log is read to its end, records sampled from it stand for the unread part. The first request for a
        figure by layer or part returns an empty curve, and starts to read the log again.
        """
        kind, _, name = key.partition(".")
        if "." in name and not self._is_detailed and f"{kind}.{name.partition('.')[0]}" in self.details:
            self._is_detailed = True
            self.begin()
        columns, ahead = self.columns.get(kind, Columns()), self._ahead.get(kind, Columns())
        x, y = (self._along(columns, axis), columns[name]) if name in columns else (np.empty(0), np.empty(0))
        if name in ahead and axis in ahead:
            later = ahead["offset"] >= self._reader.offset
            x, y = np.concatenate([x, ahead[axis][later]]), np.concatenate([y, ahead[name][later]])
        stays = np.isfinite(x) & np.isfinite(y)
        x, y = x[stays], y[stays]
        if np.any(np.diff(x) < 0):
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        return x, y

    def place_of(self, step: int, axis: str) -> float | None:
        """Return the position of a step on an axis; None if no training record has a value on this axis yet."""
        place = float(step) if axis == "step" else float(self._places(np.array([float(step)]), axis)[0])
        return place if math.isfinite(place) else None

    def _along(self, columns: Columns, axis: str) -> Floats:
        return columns[axis] if axis in columns else self._places(columns["step"], axis)

    def _places(self, of_steps: Floats, axis: str) -> Floats:
        """Return the positions of steps on an axis, interpolated between training records."""
        train = self.columns["train"]
        if axis not in train or not train.n:
            return np.full(len(of_steps), np.nan)
        steps, places = (np.concatenate([[0.0], train[key]]) for key in ("step", axis))
        found: Floats = np.interp(of_steps, steps, places)
        return found

    def history(self) -> History:
        """Return the run for `compare`, with all evaluations, the last training record, and the training record with
        the most tokens."""
        empty = {"train": {}, "validation": {"perplexity": None, "bits_per_byte": None}}
        records: list[Record] = []
        for kind, columns in self.columns.items():
            furthest = {columns.n - 1, int(columns["tokens"].argmax())} if kind == "train" and columns.n else ()
            for place in range(columns.n) if kind == "validation" else sorted(furthest):
                row = columns.row(place)
                records.append(
                    {"kind": kind, **empty[kind], **row, "step": int(row["step"]), "tokens": int(row["tokens"])}
                )
        records.append({"kind": "end", "step": self.step})
        records.sort(key=lambda record: record["step"])
        return History(self.folder, self.recipe, tuple(records), self.skipped, self.n_records)

    def _figures(self, record: Record, offset: int) -> dict[str, float]:
        """Return a record's numbers and its offset in the log, by name. The name of a number of a layer or a part is
        `key.name`."""
        found: dict[str, float] = {}
        for key, value in record.items():
            if type(value) is float or type(value) is int:
                found[key] = value
            elif isinstance(value, dict | list) and 0 < len(value) <= MOST_PARTS:
                parts = value if isinstance(value, dict) else dict(enumerate(value))
                names = [str(name)[:_MOST_NAME] for name in parts]
                if len(self.details) < MOST_DETAILS and len(key) <= _MOST_NAME:
                    self.details[f"{record['kind']}.{key}"] = names
                if self._is_detailed:
                    found.update(
                        (f"{key}.{name}", float(part)) for name, part in zip(names, parts.values(), strict=True)
                    )
        found["offset"] = offset
        return found

    def record(self, kind: str, place: int) -> Record | None:
        """Read the whole record at index `place` of a kind from the log; None if the log no longer has it."""
        offset, step = (int(self.columns[kind][key][place]) for key in ("offset", "step"))
        try:
            record = read_record(self._reader.path, offset)
        except OSError:
            return None
        return record if record is not None and (record["kind"], record["step"]) == (kind, step) else None

    def at(self, axis: str, value: float) -> dict[str, Record]:
        """Return, by kind, the last training record and the last evaluation up to the position `value` on an axis."""
        found: dict[str, Record] = {}
        for kind in ("train", "validation"):
            columns = self.columns[kind]
            before = np.flatnonzero(self._along(columns, axis) <= value) if columns.n else np.empty(0)
            if len(before) and (record := self.record(kind, int(before[-1]))) is not None:
                found[kind] = record
        return found

    def samples(self, most: int) -> list[Record]:
        """Return the newest samples, at most `most`, newest first."""
        n = self.columns["sample"].n
        found = (self.record("sample", place) for place in range(n - 1, max(-1, n - 1 - most), -1))
        return [record for record in found if record is not None]


@dataclass(frozen=True)
class View:
    """The window of a curve to draw, its axis, and how to smooth and thin its points."""

    axis: str = "step"
    low: float = -math.inf
    high: float = math.inf
    points: int = 1000
    smoothing: float = 0.0
    """Decay of the moving average that smooths all points before they are decimated."""
    log: bool = False
    """Whether the x axis is logarithmic."""

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise UserError(f"from={self.low}, to={self.high}: the window must not end before it begins.")


def drawn(series: Series, key: str, view: View) -> tuple[Floats, Floats]:
    """Return the points (x, y) with which to draw a figure's curve in a window. The points show every spike."""
    x, y = series.curve(key, view.axis)
    if view.smoothing:
        y = moving_average(y, view.smoothing)
    places = decimate(x, y, view)
    return x[places], y[places]


def decimate(x: Floats, y: Floats, view: View) -> Places:
    """Return the indices of the points to draw, at most `view.points`. x is sorted.

    These are the lowest and the highest point in each equal part of the window, the first and the last point in the
    window, and one point outside on each side, so that lines reach the edges. If the window and the two points outside
    have at most `view.points` points, all of them are drawn.
    """
    start = max(0, int(np.searchsorted(x, view.low)) - 1)
    stop = min(len(x), int(np.searchsorted(x, view.high, "right")) + 1)
    if stop - start <= view.points:
        return np.arange(start, stop)
    inside = x[start:stop]
    n_parts = (view.points - 4) // 2
    if view.log and (positive := inside[inside > 0]).size:
        borders = np.geomspace(positive[0], inside[-1], n_parts + 1)[1:-1]
    else:
        borders = np.linspace(inside[0], inside[-1], n_parts + 1)[1:-1]
    starts = np.unique(np.concatenate([[0], np.searchsorted(inside, borders)]))
    starts = starts[starts < len(inside)]
    part = np.repeat(np.arange(len(starts)), np.diff([*starts, len(inside)]))
    values = y[start:stop]
    found = [np.array([0, 1, len(inside) - 2, len(inside) - 1])]
    for extreme in (np.minimum, np.maximum):
        at = np.flatnonzero(values == extreme.reduceat(values, starts)[part])
        found.append(at[np.unique(part[at], return_index=True)[1]])
    return start + np.unique(np.concatenate(found))
