"""The log of a run and everything made from it, for any values of its figures."""

import errno
import json
import math
import os
import random
import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import tiny
from gptworks.device import choose_precision
from gptworks.errors import RunError
from gptworks.files import naming_disk_errors, replacing, write_whole
from gptworks.recipe import parse_recipe, with_vocab_size
from gptworks.training.progress import Progress
from gptworks.training.record import metrics
from gptworks.training.record.card import write_model_card
from gptworks.training.record.curves import draw_curves
from gptworks.training.record.metrics import MetricsLog, Record, Skipped, last_step, read_metrics, write_samples


def validation(step: int, loss: float) -> Record:
    return {
        "kind": "validation", "step": step, "tokens": step * 256, "loss": loss, "perplexity": math.exp(min(loss, 700)),
        "bits_per_byte": None,
    }  # fmt: skip


def training(step: int, loss: float) -> Record:
    return {"kind": "train", "step": step, "tokens": step * 256, "loss": loss, "learning_rate": 0.1, "seconds": 1.0}


def write(path: Path, records: list[Record], resume_step: int = 0) -> None:
    log = MetricsLog(path, resume_step)
    for record in records:
        log.write(record)
    log.close()


def test_figures_that_are_not_finite_come_back_and_the_file_is_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [training(1, math.nan), training(2, math.inf), training(3, 1.5)])
    losses = [record["loss"] for record in read_metrics(path)]
    assert math.isnan(losses[0])
    assert losses[1:] == [math.inf, 1.5]
    for line in path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_records_of_some_kinds_are_found_without_parsing_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    jump = {"kind": "rollback", "step": 4, "from_step": 9}
    write(path, [training(1, 1.0), jump, training(2, 1.0), {**training(3, 1.0), "note": "a rollback"}])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "rollback"}\nnot json\n' + json.dumps({**jump, "step": 5}))
    parsed: list[bytes] = []
    parse = metrics._parsed
    monkeypatch.setattr(metrics, "_parsed", lambda line: parsed.append(line) or parse(line))
    skipped = Skipped()
    assert list(read_metrics(path, skipped, kinds=("rollback",))) == [jump, {**jump, "step": 5}]
    assert skipped.reasons == {"without a step": (1, 5)}
    assert len(parsed) == 4


def test_resuming_drops_later_records_and_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [training(step, 1.0) for step in range(1, 6)])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')
    write(path, [training(4, 2.0)], resume_step=3)
    assert [(record["step"], record["loss"]) for record in read_metrics(path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
    ]


@pytest.mark.parametrize("losses", [[], [math.nan, math.inf], [2.0, math.nan]])
def test_curves_and_card_stand_whatever_the_figures(tmp_path: Path, losses: list[float]) -> None:
    recipe = with_vocab_size(parse_recipe(tiny.recipe_tree(tmp_path)), 43)
    recipe.run_dir.mkdir()
    path = recipe.run_dir / "metrics.jsonl"
    records = [record for i, loss in enumerate(losses, 1) for record in (training(i, loss), validation(i, loss))]
    write(path, records)
    draw_curves(path, recipe.run_dir / "curves.svg", "test")
    assert (recipe.run_dir / "curves.svg").exists() == bool(losses)
    if 2.0 in losses:
        drawn = ElementTree.parse(recipe.run_dir / "curves.svg").getroot()
        assert "validation, best 2.0000" in [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    write_model_card(recipe, Progress(), "finished", 1000, choose_precision("fp32", torch.device("cpu")))
    card = (recipe.run_dir / "model-card.md").read_text(encoding="utf-8")
    assert "| parameters | 26,176 |" in card
    if 2.0 in losses:
        assert "| best validation loss | 2.0000 nats per token, perplexity 7.389, at step 1" in card


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ({"path": "texts/a.txt"}, "text a.txt"),
        ({"url": "https://a.org/a.txt", "sha256": "0" * 64}, "text https://a.org/a.txt"),
        ({"url": ["https://a.org/a.txt"], "sha256": ["0" * 64]}, "text https://a.org/a.txt"),
        (
            {"url": ["https://a.org/a.txt", "https://a.org/b.txt", "https://a.org/c.txt"], "sha256": ["0" * 64] * 3},
            "text https://a.org/a.txt and 2 more",
        ),
    ],
)
def test_the_card_names_a_source_by_its_place(place: dict[str, Any], name: str, tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path)
    tree["data"]["sources"] = [{"type": "text", **place}]
    recipe = with_vocab_size(parse_recipe(tree), 43)
    recipe.run_dir.mkdir()
    write_model_card(recipe, Progress(), None, 1000, choose_precision("fp32", torch.device("cpu")))
    assert f"| sources | {name} |" in (recipe.run_dir / "model-card.md").read_text(encoding="utf-8")


def test_samples_are_shown_oldest_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"kind": "sample", "step": step, "prompt": "a ", "text": f"b{step}"} for step in (1, 2)])
    write_samples(path, tmp_path / "samples.md")
    text = (tmp_path / "samples.md").read_text(encoding="utf-8")
    assert text.index("b1") < text.index("b2")


def test_a_sample_cannot_leave_its_block(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"kind": "sample", "step": 1, "prompt": "a ```", "text": "```\n# not a heading\n````"}])
    write_samples(path, tmp_path / "samples.md")
    blocks = re.findall(r"^(`{3,})text\n(.*?)\n\1$", (tmp_path / "samples.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [text for _, text in blocks] == ["a ```", "```\n# not a heading\n````"]


GARBAGE = {
    "torn": '{"kind": "train", "st',
    "not an object": "[1, 2, 3]",
    "a number": "17",
    "no kind": '{"step": 1}',
    "a kind that is no text": '{"kind": 7, "step": 1}',
    "no step": '{"kind": "train", "tokens": 1, "loss": 1.0, "seconds": 1.0}',
    "a step that is text": '{"kind": "train", "step": "1", "tokens": 1, "loss": 1.0, "seconds": 1.0}',
    "a step that is a truth": '{"kind": "train", "step": true, "tokens": 1, "loss": 1.0, "seconds": 1.0}',
    "a negative step": '{"kind": "train", "step": -1, "tokens": 1, "loss": 1.0, "seconds": 1.0}',
    "an enormous step": '{"kind": "train", "step": 1%s, "tokens": 1, "loss": 1.0, "seconds": 1.0}' % ("0" * 400),
    "a number of 5,000 digits": '{"kind": "train", "step": 1, "tokens": %s}' % ("9" * 5000),
    "a loss that is text": '{"kind": "train", "step": 1, "tokens": 1, "loss": "low", "seconds": 1.0}',
    "a loss that is a list": '{"kind": "train", "step": 1, "tokens": 1, "loss": [1.0], "seconds": 1.0}',
    **{
        f"seconds of {seconds}": f'{{"kind": "train", "step": 1, "tokens": 1, "loss": 1.0, "seconds": {seconds}}}'
        for seconds in ('"nan"', "NaN", '"inf"', "Infinity", "1e400", "-1.0", "null", "1e308")
    },
    "no loss": '{"kind": "validation", "step": 1, "tokens": 1}',
    "a sample without text": '{"kind": "sample", "step": 1, "prompt": "a"}',
    "deep": '{"kind": "sample", "step": 1, "prompt": %s' % ("[" * 100_000),
    "long": '{"kind": "sample", "step": 1, "prompt": "%s"}' % ("x" * (5 << 20)),
    "bytes": "\x00\xff\xfe",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_line_that_is_no_record_is_left_out_and_counted(tmp_path: Path, name: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [training(1, 3.0), validation(1, 3.0)])
    before = list(read_metrics(path))
    with path.open("ab") as file:
        file.write(GARBAGE[name].encode("latin-1") + b"\n")
    skipped = Skipped()
    assert list(read_metrics(path, skipped)) == before
    ((count, line),) = skipped.reasons.values()
    assert (count, line) == (1, 3) and "line 3" in str(skipped)
    write(path, [training(2, 2.0)], resume_step=1)
    assert len(list(read_metrics(path))) == 3
    draw_curves(path, tmp_path / "curves.svg", "</title><script>\x00")
    drawn = ElementTree.parse(tmp_path / "curves.svg").getroot()
    assert not [element for element in drawn.iter() if element.tag.endswith("script")]


def test_figures_come_back_bit_for_bit_and_so_does_what_only_json_reads(tmp_path: Path) -> None:
    draw = random.Random(0)
    bits = (struct.unpack("<d", draw.randbytes(8))[0] for _ in range(4000))
    losses = [loss for loss in bits if math.isfinite(loss)]
    lines = [json.dumps({"kind": "train", "step": i, "tokens": 2**62 + i, "loss": loss, "seconds": 0.1 * i})
             for i, loss in enumerate(losses)]  # fmt: skip
    lines.append('{"kind": "sample", "step": 1, "prompt": "\\ud83d", "text": "\\ud83d\\ude00"}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    *found, sample = read_metrics(tmp_path / "metrics.jsonl")
    assert found == [json.loads(line) for line in lines[:-1]]
    assert (sample["prompt"], sample["text"]) == ("?", "\N{GRINNING FACE}")


def test_values_that_are_no_figures_are_left_out_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = {
        "kind": "train", "step": 1, "tokens": 256, "loss": "nan", "seconds": 1.0, "grad_norm": "inf", "a": "text",
        "b": {"x": "text"}, "c": [1, "text"], "d": {"x": 1.5}, "e": [1, 2.5], "f": None,
        "tokens_per_second": "nan", "flops_per_second": math.inf, "utilization": "-inf",
    }  # fmt: skip
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    (record,) = read_metrics(path)
    assert math.isnan(record.pop("loss"))
    assert record == {
        "kind": "train", "step": 1, "tokens": 256, "seconds": 1.0, "grad_norm": math.inf, "d": {"x": 1.5},
        "e": [1, 2.5], "f": None,
    }  # fmt: skip
    sample = {"kind": "sample", "step": 1, "prompt": "nan", "text": "inf\ud800"}
    path.write_text(json.dumps(sample) + "\n", encoding="utf-8")
    assert list(read_metrics(path)) == [{"kind": "sample", "step": 1, "prompt": "nan", "text": "inf?"}]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_full_failing_or_refusing_disk_leaves_the_old_file_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "old")

    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(RunError, match=rf"report\.html could not be written: {os.strerror(number)} \(.*report.html"):
        write_whole(path, "new")
    whole = naming_disk_errors("the whole", tmp_path, "Do it again.")
    with pytest.raises(RunError, match=rf"^the whole: {os.strerror(number)}.*\. Do it again\.$"), whole:
        write_whole(path, "new")
    monkeypatch.undo()
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"report.html": "old"}
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        1 / 0  # noqa: B018
    with pytest.raises(FileNotFoundError), replacing(path):  # of something else than what is written
        (tmp_path / "other").read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_the_last_step_is_that_of_the_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0
    path.write_text(json.dumps(validation(3, 2.0)) + "\n", encoding="utf-8")
    assert last_step(path) == 3
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "sample", "step": 4, "prompt": "", "text": "a" * 200_000}) + '\n{"kind": "tr')
    assert last_step(path) == 4, "its line is long, and the one after it is cut"
