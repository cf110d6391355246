"""The page of a run: its numbers equal those of metrics.jsonl, for complete and incomplete runs."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tiny
from gptworks.pages.chart import Chart, Series
from gptworks.recipe import parse_recipe
from gptworks.runs.history import read_history
from gptworks.runs.report import has_ended, to_html, watch_report
from gptworks.training.loop import train
from gptworks.training.record.curves import smoothed
from gptworks.training.run_folder import open_run_folder
from histories import training, validation, write_run
from test_html import Reader


def drawing(page: str, name: str) -> ElementTree.Element:
    """Return the drawing whose title has this id."""
    svg = next(svg for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if f'id="{name}-title"' in svg)
    return ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", svg))


def values_by_height(svg: ElementTree.Element) -> dict[float, float]:
    """Return the number at each horizontal line, by the line's height."""
    ticks = [text for text in svg.iter("text") if text.get("text-anchor") == "end" and text.get("class") == "shape"]
    heights = {float(path.get("d", "").split()[1]) for path in svg.iter("path") if path.get("class") == "grid"}
    return {
        float(text.get("y", "")) - 4: float(text.text or "")
        for text in ticks
        if float(text.get("y", "")) - 4 in heights
    }


def test_numbers_are_those_of_the_metrics(tmp_path: Path) -> None:
    losses = [3.123456789, 2.5, 2.000123, 2.25]
    records = [training(step, 3.3 / step) for step in range(1, 21)]
    records += [validation(5 * (i + 1), loss, bits_per_byte=loss / 2) for i, loss in enumerate(losses)]
    run = write_run(tmp_path / "run", records)
    reader = Reader(to_html(run))
    exact = {value for value, _ in reader.data}
    assert {*losses, *(loss / 2 for loss in losses), 20 * 256, 10.0, 20 * 256 / 10.0, run.parameters} <= exact
    assert dict(reader.data)[2.000123] == "2.0001"
    evaluations = next(table for table in reader.tables if table[0][:2] == ["step", "tokens"])
    assert [row[:4] for row in evaluations[1:]] == [
        ["5", "1,280", "0:02", "3.1235"],
        ["10", "2,560", "0:05", "2.5000"],
        ["15", "3,840", "0:08", "2.0001"],
        ["20", "5,120", "0:10", "2.2500"],
    ]
    assert [row[0] for row in evaluations if row[-1] == "best"] == ["15"]


def test_dots_lie_where_the_axis_says(tmp_path: Path) -> None:
    losses = [3.9, 2.71828, 2.0, 1.618]
    run = write_run(tmp_path / "run", [validation(5 * (i + 1), loss) for i, loss in enumerate(losses)])
    svg = drawing(to_html(run), "loss")
    (y0, v0), *_, (y1, v1) = values_by_height(svg).items()
    dots = [float(dot.get("cy", "")) for dot in svg.iter("circle")]
    assert [v0 + (y - y0) * (v1 - v0) / (y1 - y0) for y in dots] == pytest.approx(losses, abs=1e-3)
    assert [title.text for title in svg.iter("title")][1] == "step 5, 1,280 tokens: 3.9000"


def test_the_page_stands_alone(tmp_path: Path) -> None:
    sample = {"kind": "sample", "step": 3, "prompt": "<b>", "text": "<script>alert(1)</script> & more"}
    run = write_run(tmp_path / "run", [training(1, 3.0), validation(1, 3.0), sample])
    page = to_html(run)
    Reader(page)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert not re.findall(r"(?:src|href)=|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", page)


def test_a_watched_page_follows_the_run_until_it_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [training(1, 3.0)])
    log, page, seen = run.folder / "metrics.jsonl", tmp_path / "page.html", []

    def goes_on(seconds: float) -> None:
        seen.append(page.read_text(encoding="utf-8") if page.exists() else "")
        page.unlink(missing_ok=True)
        if len(seen) == 1:  # a step more; then nothing for a while; then its end
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(training(2, 2.5)) + "\n")
            os.utime(log, ns=(1, 2**40))
        if len(seen) == 3:
            (run.folder / "outcome.json").write_text("{}", encoding="utf-8")

    os.utime(log, ns=(1, 2**39))
    watch_report(run.folder, page, wait=goes_on)
    refreshes = '<meta http-equiv="refresh" content="5">'
    assert [refreshes in text for text in seen] == [True, True, False]
    assert "step\xa01\xa0of" in seen[0] and "step\xa02\xa0of" in seen[1] and not seen[2]
    assert "step\xa02\xa0of" in page.read_text(encoding="utf-8") and refreshes not in page.read_text(encoding="utf-8")

    (run.folder / "outcome.json").unlink()
    os.utime(log, ns=(1, 2**41))

    def ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    watch_report(run.folder, page, wait=ctrl_c)
    assert refreshes not in page.read_text(encoding="utf-8")


RECORDS = {
    "nothing": [],
    "one line": [training(1, 3.0)],
    "an evaluation alone": [validation(1, 3.0)],
    "nan": [training(1, math.nan), validation(1, math.nan), training(2, 2.0), validation(2, math.inf)],
    "skipped": [{"kind": "skipped", "step": 1, "loss": math.inf, "grad_norm": math.nan}],
    "rolled back": [{"kind": "rollback", "step": 4, "from_step": 9}],
    "of a later version": [{"kind": "surprise", "step": 1, "anything": [1, 2]}],
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_run_with_little_to_show_has_a_page(tmp_path: Path, case: str) -> None:
    run = write_run(tmp_path / "run", RECORDS[case])
    with (run.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')  # as a crash leaves it
    page = to_html(read_history(run.folder))
    reader = Reader(page)
    assert f"{run.parameters:,}" in reader.text
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
        assert "nan" not in re.sub(r"<(title|desc)[^>]*>.*?</\1>", "", svg)


def test_skips_experts_time_and_memory_are_shown_where_the_records_have_them(tmp_path: Path) -> None:
    more = {"busiest_expert_load": 1.5, "seconds_by_part": {"forward": 1.5, "backward": 3.0}, "peak_bytes": 123_456_789}
    records = [training(1, 3.0, **more), training(2, 2.9, **more)]
    records.append({"kind": "skipped", "step": 3, "loss": 1e9, "grad_norm": math.inf})
    page = to_html(write_run(tmp_path / "run", records))
    exact = {value for value, _ in Reader(page).data}
    assert {3.0, 6.0, 9.0, 123_456_789, 1e9} <= exact
    assert drawing(page, "expert") is not None
    plain = to_html(write_run(tmp_path / "plain", [training(1, 3.0)]))
    for heading in ("Where the time went", "Memory", "Steps skipped", "Samples", "Evaluations"):
        assert f"<h2>{heading}</h2>" not in plain


def test_a_long_run_keeps_its_peaks_and_its_page_small() -> None:
    points = [(float(i), math.sin(i)) for i in range(100_000)]
    points[54_321] = (54_321.0, 3.0)
    svg = Chart("long", "long", [Series(points)], "x", "y").svg()
    assert len(svg) < 60_000
    root = ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", svg))
    (y0, v0), *_, (y1, v1) = values_by_height(root).items()
    path = next(path for path in root.iter("path") if "curve" in path.get("class", ""))
    heights = [float(pair.split()[1]) for pair in path.get("d", "")[1:].split(" L")]
    assert max(v0 + (y - y0) * (v1 - v0) / (y1 - y0) for y in heights) == pytest.approx(3.0, abs=0.01)


def test_values_far_above_the_rest_leave_room_for_these() -> None:
    points = [(float(i), 1.0 + i / 100) for i in range(100)]
    points[3] = (3.0, 1e6)
    svg = Chart("spike", "spike", [Series(points)], "x", "y").svg()
    root = ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", svg))
    assert max(values_by_height(root).values()) < 5
    assert "1 higher" in svg


def test_the_smoothed_curve_does_not_lag() -> None:
    line = [(float(x), 5 - 0.01 * x) for x in range(200)]
    assert [y for _, y in smoothed(line)[30:170]] == pytest.approx([y for _, y in line[30:170]], abs=1e-3)


def test_a_run_that_was_trained(tmp_path: Path) -> None:
    outcome = train(parse_recipe(tiny.recipe_tree(tmp_path, sample_every=10, sample_tokens=5)))
    result = tiny.gptworks("report", outcome.run_dir)
    assert result.returncode == 0, result.stderr
    page = (outcome.run_dir / "report.html").read_text(encoding="utf-8")
    exact = {value for value, _ in Reader(page).data}
    lines = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert {line["loss"] for line in lines if line["kind"] == "validation"} <= exact
    assert outcome.best_validation_loss in exact
    assert "step\xa020\xa0of\xa020" in page
    ended = json.loads((outcome.run_dir / "outcome.json").read_text("utf-8"))
    assert (ended["reason"], ended["step"], ended["tokens"]) == ("finished", 20, outcome.tokens)
    assert ended["best_validation_loss"] == outcome.best_validation_loss
    assert ended["measured_memory_bytes"] is None or ended["measured_memory_bytes"] > 0  # this process may reuse memory
    for fact in ("ended", "finished, step 20", "memory at the peak", "steps skipped as non-finite or spikes"):
        assert fact in page


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep" / "trials").mkdir(parents=True)
    result = tiny.gptworks("report", tmp_path / "sweep")
    assert result.returncode == 2
    assert "has no recipe.yaml; a sweep's runs are below" in result.stderr
    run = write_run(tmp_path / "run", [])
    result = tiny.gptworks("report", run.folder, "--html", tmp_path / "nowhere" / "page.html")
    assert result.returncode == 2
    assert "there is no folder" in result.stderr


def test_garbage_in_the_log_is_named_on_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [training(1, 3.0), validation(1, 3.0)])
    with (run.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('not json\n{"kind": "train", "step": 2}\n{"kind": "train", "step": 3}\n')
    text = Reader(to_html(read_history(run.folder))).text
    assert "1 not whole JSON (line 3), 2 without tokens (the first is line 4)" in text


def test_a_log_of_many_records_keeps_its_sums_its_best_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptworks.runs.history.THINNED_RECORDS", 50)
    records = [
        training(step, 3.0, seconds_by_part={"forward": 0.25}, resident_bytes=2000 - abs(step - 500))
        for step in range(1, 1001)
    ]
    records += [validation(step, 1.0 if step == 333 else 2.0) for step in range(1, 1001)]
    run = write_run(tmp_path / "run", records)
    assert 100 <= len(run.records) <= 220 and run.n_records == 2000
    assert run.seconds_by_part == {"forward": 250.0} and run.memory_bytes == {"resident_bytes": 2000}
    assert run.best is not None and run.best["step"] == 333
    assert (run.step, run.tokens, run.seconds) == (1000, 256_000, 500.0)
    assert "<dt>tokens read</dt>" in to_html(run) and "all tokens of the batches, with padding" in to_html(run)
    assert [record["step"] for record in run.records] == sorted(record["step"] for record in run.records)
    assert "metrics.jsonl holds 2,000 records" in Reader(to_html(run)).text


UNITS = {
    "next_token": ({}, "nats per token"),
    "preference": ({"type": "preference"}, "nats per pair"),
    "ipo": ({"type": "preference", "loss": "ipo"}, "IPO loss per pair"),
    "reward": ({"type": "reward", "reward": "r.py:f", "group_size": 4}, "mean reward of an answer"),
}


@pytest.mark.parametrize("case", UNITS)
def test_the_axis_names_what_the_objective_counts(tmp_path: Path, case: str) -> None:
    objective, unit = UNITS[case]
    kinds = {"preference": "preferences", "reward": "conversations"}
    run = write_run(tmp_path / "run", [training(1, 0.5, reward=0.25), validation(1, 0.5) | {"reward": 0.75}])
    if objective:
        tree = run.recipe.model_dump(mode="json", exclude_defaults=True) | {"objective": objective}
        tree["data"] = {"sources": [{"type": kinds[str(objective["type"])], "path": "x.jsonl"}]}
        run = replace(run, recipe=parse_recipe(tree))
    svg = drawing(to_html(run), "loss")
    labels = [text.text for text in svg.iter("text")]
    assert unit in labels
    assert (unit == "nats per token") == ("nats per token" in labels)
    if case == "reward":  # the curve is the reward's
        assert [title.text for title in svg.iter("title")][1] == "step 1, 256 tokens: 0.7500"


def test_a_run_in_use_has_not_ended_though_its_outcome_is_damaged_and_newer_than_its_log(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [training(1, 3.0)])
    (run.folder / "outcome.json").write_text("{}", encoding="utf-8")
    os.utime(run.folder / "metrics.jsonl", ns=(1, 2**39))
    assert has_ended(run.folder)
    with open_run_folder(run.recipe, resume=True):
        assert not has_ended(run.folder)


def test_a_run_without_an_outcome_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [training(1, 3.0)])
    (run.folder / "model-card.md").write_text("## Training\n\n| ended | finished |\n", encoding="utf-8")
    assert "The run folder has no outcome.json" in Reader(to_html(run)).text
    (run.folder / "outcome.json").write_text('{"reason": 7}', encoding="utf-8")
    assert "outcome.json is damaged" in Reader(to_html(run)).text
