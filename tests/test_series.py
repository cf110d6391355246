"""Figures of runs as arrays: they continue as the log grows, accept any contents, and keep spikes when thinned."""

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptworks.runs import series as module
from gptworks.runs import watch as watching
from gptworks.runs.bands import find_band
from gptworks.runs.compare import compare
from gptworks.runs.history import read_history
from gptworks.runs.series import Series, View, decimate, drawn
from gptworks.runs.watch import Watch
from gptworks.training.record import metrics
from gptworks.training.record.curves import moving_average
from gptworks.training.record.metrics import MetricsReader, Record, Skipped, read_metrics
from histories import curve, training, validation, write_run


def read(series: Series) -> Series:
    """Read the whole log."""
    series.read()
    while not series.at_end:
        series.read()
    return series


# ---------------------------------------------------------------------------------------------------- reading

LOG = b"\n".join(
    [
        json.dumps(training(1, 3.0, seconds_by_part={"data": 0.5}, gradient_norm_by_layer=[1.0, 2.0])).encode(),
        b'{"kind": "train", "st',
        json.dumps(validation(1, 2.5, 1.5)).encode(),
        b"",
        '{"kind": "sample", "step": 1, "prompt": "é", "text": "€}"}'.encode(),
        b"[1, 2]",
        b'{"kind": "train", "step": -1}',
        b'{"kind": "skipped", "step": 2, "loss": "nan"} \r',
        b'{"kind": "sample", "step": 2, "prompt": "' + b"x" * 90 + b'"}',
        json.dumps(training(2, 2.0)).encode(),
    ]
)


def records_of(log: bytes, longest: int) -> list[str]:
    """Return the lines that a naive reader accepts: every complete line, and a last line that is complete without a
    newline."""
    found = []
    for line in log.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        right = (
            isinstance(record, dict)
            and record.get("step", -1) >= 0
            and (record["kind"] != "sample" or "text" in record)
        )
        if right and len(line) < longest:
            found.append(f"{record['kind']} {record['step']}")
    return found


@pytest.mark.parametrize("block", [7, 1 << 18])
def test_a_log_that_grows_is_read_as_a_whole_one_at_any_cut(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_BLOCK_BYTES", block)
    monkeypatch.setattr(metrics, "_MOST_LINE_BYTES", 400)
    path = tmp_path / "metrics.jsonl"

    def names(reader: MetricsReader) -> list[str]:
        found = [record for _, record in reader.read()]
        while not reader.at_end:
            found += [record for _, record in reader.read()]
        return [f"{record['kind']} {record['step']}" for record in found]

    path.write_bytes(LOG)
    whole = Skipped()
    assert len(list(read_metrics(path, whole))) == len(records_of(LOG, 400)) == 5
    for cut in range(0, len(LOG) + 1, 1 if block > 7 else 5):
        path.write_bytes(LOG[:cut])
        reader = MetricsReader(path)
        first = names(reader)
        assert first == records_of(LOG[:cut], 400), cut
        with path.open("ab") as file:
            file.write(LOG[cut:])
        assert reader.continues()
        assert first + names(reader) == records_of(LOG, 400), cut
        assert reader.skipped == whole, cut


def test_a_line_too_long_is_left_out_wherever_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(metrics, "_MOST_LINE_BYTES", 200)
    path = tmp_path / "metrics.jsonl"
    good = b'{"kind": "rollback", "step": 1, "from_step": 2}'
    log = good + b"\n" + b"x" * 1000 + b"\n" + good + b"\n"
    for cut in range(0, len(log), 37):
        path.write_bytes(log[:cut])
        series = read(Series(tmp_path))
        path.write_bytes(log)
        assert read(series).columns["rollback"].n == 2
        assert dict(series.skipped.reasons) == {"longer than 4 MiB": (1, 2)}


@pytest.mark.parametrize("how", ["shorter", "replaced", "as long", "longer", "gone", "went on"])
def test_a_log_that_was_rewritten_is_read_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(training(step, 3.0)) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(lines), encoding="utf-8")
    series = read(Series(tmp_path))
    other = [line.replace("3.0", "2.0") for line in lines]
    if how == "shorter":
        path.write_text(other[0], encoding="utf-8")
    elif how == "replaced":
        (tmp_path / "aside").write_text("".join([*lines[:2], *other[2:]]), encoding="utf-8")
        (tmp_path / "aside").replace(path)
    elif how == "as long":
        path.write_text("".join(other), encoding="utf-8")
    elif how == "longer":
        path.write_text("".join([*other, *other]), encoding="utf-8")
    elif how == "gone":
        path.unlink()
    else:  # its last line was whole, and is no longer
        path.write_text("".join(lines)[:-1], encoding="utf-8")
        series = read(Series(tmp_path))
        with path.open("a", encoding="utf-8") as file:
            file.write(" and more\n")
        read(series)
    os.utime(path.parent / path.name, (1, 1)) if path.exists() else None
    for _ in range(3):
        read(series)
    expected = list(read_metrics(path))
    assert series.columns["train"].n == len(expected)
    assert expected == [] or series.columns["train"]["loss"].tolist() == [record["loss"] for record in expected]


def test_nothing_is_read_from_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read(Series(tmp_path)).n_records == 0


# ---------------------------------------------------------------------------------------------------- figures


def varied(n: int, seed: int) -> list[Record]:
    draw = random.Random(seed)
    found: list[Record] = []
    for step in range(1, n + 1):
        found.append(training(step, 4.0 / step + draw.random(), grad_norm=math.exp(draw.gauss(0, 1))))
        if step % 7 == 0:
            found.append(validation(step, 3.0 / step + draw.random(), draw.random()))
    return found


def test_figures_are_those_of_report_and_compare(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c", "d")]
    for i, folder in enumerate(folders):
        write_run(folder, varied(40 + 7 * i, i), seed=1 + i % 2, **({"train": {"max_steps": 99}} if i > 1 else {}))
    write_run(tmp_path / "none", [])
    for folder in (*folders, tmp_path / "none"):
        history, series = read_history(folder), read(Series(folder))
        found = series.summary()
        for name in ("step", "tokens", "seconds", "tokens_per_second"):
            assert found[name] == getattr(history, name), name
        for name, record in (("last", history.last), ("best", history.best)):
            kept = ("step", "loss", "bits_per_byte")
            assert found[name] == (None if record is None else {key: record[key] for key in kept})
        along, losses = series.curve("validation.loss", "seconds")
        assert losses.tolist() == [record["loss"] for record in history.validation]
        assert along == pytest.approx([history.seconds_at(record["step"]) for record in history.validation])
        tokens, norms = series.curve("train.grad_norm", "tokens")
        assert tokens.tolist() == [record["tokens"] for record in history.train]
        assert norms.tolist() == [record["grad_norm"] for record in history.train]
    pairs = [(read_history(folder), read(Series(folder)).history()) for folder in folders]
    bands = [find_band(history.recipe) for history, _ in pairs]
    ours, theirs = (compare([pair[i] for pair in pairs], bands).to_json() for i in (1, 0))
    assert ours == theirs and ours["findings"]


def test_one_record_comes_from_the_log_whole(tmp_path: Path) -> None:
    records = [training(1, 3.0, seconds_by_part={"data": 0.5}), training(2, math.nan), validation(2, 2.5)]
    write_run(tmp_path / "run", [*records, {"kind": "sample", "step": 2, "prompt": "a", "text": "b"}])
    series = read(Series(tmp_path / "run"))
    assert series.at("step", 1) == {"train": records[0]}
    assert series.at("tokens", 600)["validation"] == validation(2, 2.5)
    assert math.isnan(series.at("seconds", 1.0)["train"]["loss"])
    assert series.samples(5) == [{"kind": "sample", "step": 2, "prompt": "a", "text": "b"}]
    (tmp_path / "run" / "metrics.jsonl").write_text("gone\n")
    assert series.at("step", 1) == {} and series.samples(5) == []


def test_layers_and_parts_are_held_once_one_is_asked_for(tmp_path: Path) -> None:
    more = {"seconds_by_part": {"data": 0.5, "forward": 1.5}, "gradient_norm_by_layer": [1.0, 2.0, 3.0]}
    write_run(tmp_path / "run", [training(step, 3.0, **more) for step in (1, 2)])
    series = read(Series(tmp_path / "run"))
    assert series.details == {
        "train.seconds_by_part": ["data", "forward"], "train.gradient_norm_by_layer": ["0", "1", "2"],
    }  # fmt: skip
    assert "train.loss" in series.keys and not any("norm_by" in key or "offset" in key for key in series.keys)
    series.curve("train.gradient_norm_by_layer.1", "step")
    assert read(series).curve("train.gradient_norm_by_layer.1", "step")[1].tolist() == [2.0, 2.0]
    assert series.curve("train.seconds_by_part.forward", "step")[1].tolist() == [1.5, 1.5]
    assert series.curve("train.nothing.x", "step")[0].size == series.curve("other.loss", "step")[0].size == 0


# ---------------------------------------------------------------------------------------------------- points


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_decimation_keeps_the_lowest_and_the_highest_of_every_part(seed: int, log: bool) -> None:
    draw = np.random.default_rng(seed)
    x = np.cumsum(draw.exponential(1, 2000)) + 0.5
    y = draw.normal(size=2000).cumsum()
    y[draw.integers(0, 2000, 20)] += draw.normal(0, 500, 20)
    low, high = sorted(draw.choice(x, 2, replace=False))
    for view in (
        View(points=100, log=log),
        View(low=low, high=high, points=30, log=log),
        View(low=low, points=8, log=log),
    ):
        places = decimate(x, y, view).tolist()
        inside = [i for i in range(len(x)) if view.low <= x[i] <= view.high]
        around = list(range(max(0, inside[0] - 1), min(len(x), inside[-1] + 2)))
        assert len(places) <= view.points and places == sorted(set(places)) and set(places) <= set(around)
        assert {inside[0], inside[-1], around[0], around[-1]} <= set(places)
        for extreme in (min, max):
            assert extreme(around, key=lambda i: y[i]) in places
        n_parts = (view.points - 4) // 2
        of = np.log if log else np.asarray
        first, size = of(x[around[0]]), (of(x[around[-1]]) - of(x[around[0]])) / n_parts
        parts: dict[int, list[int]] = {}
        for i in around:
            parts.setdefault(min(n_parts - 1, int((of(x[i]) - first) / size)), []).append(i)
        for members in parts.values():
            for extreme in (min, max):
                assert extreme(members, key=lambda i: y[i]) in places


def test_few_points_stay_as_they_are() -> None:
    x = np.arange(10.0)
    assert decimate(x, x, View(points=10)).tolist() == list(range(10))
    assert decimate(x, x, View(low=3.5, high=5.5)).tolist() == [3, 4, 5, 6]
    assert decimate(x[:0], x[:0], View()).tolist() == []
    assert decimate(x, x, View(low=50.0, high=60.0)).tolist() == [9]
    same = decimate(np.ones(100), np.arange(100.0), View(points=8, log=True)).tolist()
    assert {0, 99} <= set(same) and len(same) <= 8


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_smoothing_is_the_moving_average_of_all_points(decay: float, tmp_path: Path) -> None:
    draw = random.Random(1)
    losses = [draw.random() for _ in range(300)]
    expected, average = [], 0.0
    for i, loss in enumerate(losses):
        average = decay * average + (1 - decay) * loss
        expected.append(average / (1 - decay ** (i + 1)))
    write_run(tmp_path / "run", [training(i + 1, loss) for i, loss in enumerate(losses)])
    series = read(Series(tmp_path / "run"))
    x, y = drawn(series, "train.loss", View(smoothing=decay, points=20))
    assert y == pytest.approx([expected[int(step) - 1] for step in x]) and len(y) <= 20
    gaps = np.array([math.nan, 1.0, math.inf, 3.0])
    assert moving_average(gaps, 0.5)[1:] == pytest.approx([1.0, 1.0, (0.25 + 1.5) / 0.75])


# ---------------------------------------------------------------------------------------------------- hostile logs


def test_hostile_records_take_little_and_change_no_other_figure(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    odd: list[dict[str, Any]] = [
        training(3, 3.0),
        training(1, 1.0, **{f"key{i}": 1.0 for i in range(3000)}),
        training(2, 2.0, **{"k" * 5000: 1.0, "list": [1.0] * 5000, "offset": 7, "flag": True}),
        training(2, 2.5) | {"tokens": 2**62, "seconds": 2.0**62},
        training(4, 0.5) | {"loss": "nan", "parts": {"p" * 5000: 1.0}},
    ]
    log.write_text("".join(json.dumps(record) + "\n" for record in odd), encoding="utf-8")
    series = read(Series(tmp_path))
    columns = series.columns["train"]
    assert columns["step"].tolist() == [1, 2, 2, 3, 4]
    assert series.curve("train.loss", "step")[1].tolist() == [1.0, 2.0, 2.5, 3.0]
    assert series.curve("train.loss", "tokens")[0].tolist() == [256, 512, 768, 2**62]
    assert len(columns.keys) <= module.MOST_COLUMNS and max(map(len, columns.keys)) < 100
    assert columns.best() == 0 and series.summary()["step"] == 4
    assert series.at("step", 3)["train"]["loss"] == 3.0
    assert all(len(name) < 100 for names in series.details.values() for name in names)


def test_a_run_too_long_is_thinned_and_keeps_its_best_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 8_000)
    monkeypatch.setattr(metrics, "_BLOCK_BYTES", 4000)
    records = [validation(step, 3.0 - (step == 77)) for step in range(1, 600)]
    write_run(tmp_path / "run", records)
    series, history = read(Series(tmp_path / "run")), read_history(tmp_path / "run")
    assert series.is_thinned and series.n_bytes <= 8_000 and series.columns["validation"].n < 599
    assert series.summary()["best"]["step"] == history.best["step"] == 77
    assert series.summary()["last"]["step"] == 599 and series.n_records == 599


def test_runs_nobody_asks_for_become_coarser_and_are_read_anew_when_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: tmp_path / name for name in ("a", "b", "c")}
    for folder in folders.values():
        write_run(folder, curve([3.0 + 1 / i for i in range(1, 1500)]))
    monkeypatch.setattr(watching, "MOMENT_SECONDS", 0.0)
    watch = Watch(most_bytes=250_000)
    watch.follow(folders)
    (used,) = watch.use(["b"])
    goes_on, changed = True, set[str]()
    while goes_on:
        more, goes_on = watch.advance(0.01)
        changed |= more
    assert changed == set(folders) and sum(one.series.n_bytes for one in watch.runs.values()) <= 250_000
    assert not used.series.is_thinned and watch.runs["a"].series.is_thinned
    row = watch.runs["a"].row()
    assert (row["thinned"], row["whole"], row["best"]["loss"]) == (True, True, 3.0 + 1 / 1499)
    used.used_at = -math.inf
    (anew,) = watch.use(["a"])
    assert not anew.row()["whole"] and anew.row()["best"]["loss"] == 3.0 + 1 / 1499  # the figures that it had
    while goes_on := watch.advance(0.01)[1]:
        pass
    assert not anew.series.is_thinned and anew.series.columns["train"].n == 1499
    with (folders["c"] / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(validation(9000, 1.0)) + "\n")
    assert watch.advance(1.0) == ({"c"}, False) and watch.runs["c"].row()["last"]["step"] == 9000
    watch.follow({"a": folders["a"]})
    assert list(watch.runs) == ["a"] and watch.runs["a"] is anew


def test_a_long_log_is_skimmed_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SKIMMED_BYTES", 1 << 20)
    records = [training(step, 5 / step, grad_norm=0.5) for step in range(1, 20_000)]
    records[::1000] = [validation(record["step"], 2.5) for record in records[::1000]]
    one = Series(write_run(tmp_path / "run", records).folder)
    one.read()
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    x, y = one.curve("train.loss", "step")
    assert not one.at_end and one.n_records < 5_000 and x[-1] > 19_000
    assert np.all(np.diff(x) > 0) and [losses[int(step)] for step in x] == y.tolist()
    assert one.n_records - 5 <= np.sum(x <= one.step) <= one.n_records
    distances = np.diff(x[x > one.step])
    assert len(distances) > 100 and max(distances) < 300
    assert one.summary()["step"] == one.step < 5_000, "figures are of what was read"
    read(one)
    x, y = one.curve("train.loss", "step")
    assert x.tolist() == list(losses) and y.tolist() == list(losses.values())


def test_an_answer_on_many_long_runs_waits_for_none_of_them(tmp_path: Path) -> None:
    blocks = 3 * metrics._BLOCK_BYTES
    lines = [json.dumps(training(step, 2.0)) + "\n" for step in range(1, 20_000)]
    names = [f"run-{i}" for i in range(4)]
    for name in names:
        write_run(tmp_path / name, [])
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        assert (tmp_path / name / "metrics.jsonl").stat().st_size > blocks
    watch = Watch()
    watch.follow({name: tmp_path / name for name in names})
    long_ago = time.monotonic() - 60
    assert all(watch.use([name], long_ago, begins=False)[0].series.n_records == 0 for name in names)
    for _ in range(2):  # the time of the request is over: the first block of each is there, and no more
        found = [watch.use([name], long_ago)[0].series for name in names]
        assert [0 < one.n_records < 19_999 and not one.at_end for one in found] == [True] * 4
    first = found[0].n_records
    others = Watch()
    others.follow({name: tmp_path / name for name in names})
    assert others.advance(1e-9)[1] and others.advance(1e-9)[1], "each run is begun before any is read on"
    assert [one.series.n_records > 0 for one in others.runs.values()] == [True, True, False, False]
    assert watch.use(names[:1])[0].series.n_records > first
    while watch.advance(1.0)[1]:
        pass
    assert all(one.n_records == 19_999 and one.at_end for one in found)


def test_a_run_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    write_run(tmp_path / "run", curve([3.0]))
    recipe = (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8")
    (tmp_path / "run" / "recipe.yaml").write_text("model: [", encoding="utf-8")
    watch = Watch()
    watch.follow({"run": tmp_path / "run", "gone": tmp_path / "gone"})
    watch.advance(1.0)
    assert watch.runs["run"].row()["problem"] and watch.runs["gone"].row()["problem"]
    assert watch.advance(1.0) == (set(), False)
    (tmp_path / "run" / "recipe.yaml").write_text(recipe, encoding="utf-8")
    assert watch.advance(1.0) == ({"run"}, False)
    row = watch.runs["run"].row()
    assert row["problem"] is None and row["best"]["loss"] == 3.0 and row["recipe"] == "tiny"
