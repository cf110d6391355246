"""Datasets built in parts, by several machines, and from a sample of the text: the same bytes as in one build."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from gptworks.cli import app
from gptworks.config import DatasetRecipe, ValidationSplit
from gptworks.data import learn
from gptworks.data.identity import made_from
from gptworks.data.jobs import plan_jobs
from gptworks.data.learn import sample_texts
from gptworks.data.opened import Prepared
from gptworks.data.prepare import build_part, merge_parts, prepare
from gptworks.data.sources import base
from gptworks.data.split import split_documents
from gptworks.errors import UserError
from gptworks.recipe import load_dataset_recipe, parse_recipe
from gptworks.training.loop import train

TEXTS = [f"Report {i}.\n" + f"{i * 7919 % 1000} bees — naïvely — fly by {i}.\n" * (1 + i % 5) for i in range(400)]
Make = Callable[..., DatasetRecipe]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes a dataset's recipe on JSONL files; keywords go to its data section."""
    monkeypatch.setattr(base, "UNIT_BYTES", 8_000)

    def make(tokenizer: dict[str, Any] | None = None, **data: Any) -> DatasetRecipe:
        sources = [{"type": "jsonl", "path": str(file)} for file in sorted(tmp_path.glob("*.jsonl"))]
        tree = {"sources": sources, "cache_dir": tmp_path / "data", "processes": 1, **data}
        return DatasetRecipe(tokenizer=tokenizer or {"type": "bpe", "vocab_size": 300}, data=tree)

    for i in range(8):
        lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[i * 50 : i * 50 + 50]]
        (tmp_path / f"{i}.jsonl").write_text("".join(lines), encoding="utf-8")
    return make


def contents(prepared: Prepared) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(prepared.folder.rglob("*")) if f.is_file()}


def test_parts_of_several_machines_merge_into_the_bytes_of_one(make: Make, tmp_path: Path) -> None:
    wanted = prepare(make(cache_dir=tmp_path / "one"))
    recipe = make()
    with pytest.raises(UserError, match=r"jobs lacks (\d+) jobs, the first of them 00000\. Do each part with --part"):
        merge_parts(recipe)
    work = build_part(recipe, 2, 3)
    build_part(recipe, 3, 3)
    other = build_part(make(cache_dir=tmp_path / "other"), 1, 3)
    prepare(make({"type": "char"}))  # another dataset in the same folder does not touch the parts
    with pytest.raises(UserError, match=r"jobs lacks \d jobs, the first of them 00000"):
        merge_parts(recipe)
    shutil.copytree(other / "jobs", work / "jobs", dirs_exist_ok=True)
    merged = merge_parts(recipe)
    assert contents(merged) == contents(wanted) and merged.folder.name == wanted.folder.name
    assert len(wanted.manifest.splits["train"].shards) == len(plan_jobs(recipe.data.texts)) > 6
    assert not list((tmp_path / "data").glob(".partial-*"))
    assert prepare(recipe).reused and merge_parts(recipe).reused


@pytest.mark.parametrize(("k", "n"), [(0, 2), (3, 2), (1, 0)])
def test_an_impossible_part_is_refused(k: int, n: int, make: Make) -> None:
    with pytest.raises(UserError, match=rf"part {k}/{n}: K goes from 1 to N"):
        build_part(make(), k, n)


def test_a_recipe_without_a_model_has_the_same_dataset(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    whole = load_dataset_recipe(path)
    text = "tokenizer: " + whole.tokenizer.model_dump_json() + "\ndata: " + whole.data.model_dump_json() + "\n"
    (tmp_path / "dataset.yaml").write_text(text)
    only_data = str(tmp_path / "dataset.yaml")
    result = CliRunner().invoke(app, ["data", "build", only_data, "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["folder"] == str(prepare(whole).folder)
    for arguments, message in (
        (["data", "build", only_data, "--part", "2"], "--part 2 is not of the form K/N, such as 1/8."),
        (["data", "build", only_data, "--part", "1/2", "--merge"], "--merge does nothing with --part"),
        (["data", "build", only_data, "data.sorces=1"], "sorces"),
        (["train", only_data], "model"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, UserError) and message in str(result.exception), arguments


# ------------------------------------------------------------------------------------------------------- sample


class _Large(base.Source):
    """A source of a terabyte that must not be read."""

    def units(self) -> list[base.Unit]:
        return [base.Unit(Path("text"), base.UNIT_BYTES, i, i + 1) for i in range((1 << 40) // base.UNIT_BYTES)]


def test_a_source_of_any_size_has_a_bounded_number_of_jobs() -> None:
    jobs = plan_jobs([_Large(None), _Large(None)])
    sizes = {sum(unit.size_bytes for _, unit in job.units) for job in jobs}
    assert len(jobs) == 2 * 4096 and sizes == {(1 << 40) // 4096}


def sampled(recipe: DatasetRecipe, folder: Path, limit_bytes: int, processes: int = 1) -> list[str]:
    jobs, validation = plan_jobs(recipe.data.sources), ValidationSplit(by="document", fraction=0.2)
    return list(sample_texts(folder, jobs, validation, limit_bytes, processes, lambda n_bytes: None))


@pytest.mark.parametrize("limit_bytes", [5_000, 20_000])
def test_a_sample_is_of_all_the_training_text_and_within_its_limit(
    limit_bytes: int, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sampled(make(), tmp_path / "sample", limit_bytes)
    size = sum(len(text.encode()) for text in found)
    assert 0.9 * limit_bytes < size <= limit_bytes
    places = [TEXTS.index(text) for text in found]
    assert places == sorted(places)
    assert {place // 50 for place in places} == set(range(8)), "of every file"
    by_document = ValidationSplit(by="document", fraction=0.2)
    pieces = (base.Piece(text, True, True, len(text.encode())) for text in TEXTS)
    training = [piece.text for split, piece in split_documents(pieces, by_document) if split == "train"]
    assert set(found) < set(training)

    monkeypatch.setattr(base, "UNIT_BYTES", 30_000)
    assert sampled(make(), tmp_path / "fewer", limit_bytes, processes=2) == found, "whatever the jobs"
    turned = make(sources=make().data.model_dump()["sources"][::-1])
    assert set(sampled(turned, tmp_path / "turned", limit_bytes)) == set(found), "in whatever order"


def test_a_job_that_has_too_much_of_the_sample_keeps_the_same_texts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = sampled(make(), tmp_path / "sample", 5_000)
    monkeypatch.setattr("gptworks.data.learn._LEAST_KEPT_BYTES", 1)
    found = sampled(make(), tmp_path / "few", 5_000)
    assert set(found) <= set(wanted) and found


def test_a_tokenizer_learns_from_all_sources_where_there_is_more_than_it_reads(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(8):
        text = "zebra " if i == 7 else "giraffe "
        lines = [json.dumps({"text": f"{n} {i}: " + text * 9}) + "\n" for n in range(60)]
        (tmp_path / f"{i}.jsonl").write_text("".join(lines), encoding="utf-8")
    kind = {"type": "bpe", "vocab_size": 275}
    whole = prepare(make(kind)).tokenizer
    monkeypatch.setattr(learn, "_BPE_TRAINING_BYTES", 8_000)
    read: list[tuple[str, int]] = []
    sampled = prepare(
        make(kind, cache_dir=tmp_path / "sampled"), report=lambda stage, done, _: read.append((stage, done))
    )
    assert max(done for stage, done in read if stage == "tokenizer") <= 8_000
    for tokenizer in (whole, sampled.tokenizer):
        assert {"Ġzebra", "Ġgiraffe"} <= tokenizer.get_vocab().keys()
    monkeypatch.setattr(learn, "_BPE_TRAINING_BYTES", 10**6)
    assert contents(prepare(make(kind, cache_dir=tmp_path / "all"))) == contents(prepare(make(kind)))


def test_a_large_file_is_held_out_whole_whatever_source_reads_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 256)
    monkeypatch.setattr(base, "UNIT_BYTES", 1024)
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(TEXTS[i : i + 30]), encoding="utf-8", newline="")
    made, samples = [], []
    for kind in ("text", "files"):
        sources = [{"type": kind, "path": str(tmp_path / "texts")}]
        recipe = make(sources=sources, validation={"by": "document", "fraction": 0.3})
        made.append(prepare(recipe).manifest)
        samples.append(sampled(recipe, tmp_path / kind, 20_000))
    assert made[0].fingerprint == made[1].fingerprint and samples[0] == samples[1]
    assert made[0].splits["validation"].documents > 3
    assert len(plan_jobs(make(sources=sources).data.texts)) > 60
    assert made[1].made_from["held_out_whole"] and "held_out_whole" not in made[0].made_from
    for data in ({"validation": {"by": "tail"}}, {"clean": [{"type": "length"}]}):
        assert "held_out_whole" not in made_from(make(sources=sources, **data)), "built right before"
    monkeypatch.setattr(base, "UNIT_BYTES", 1 << 20)
    assert "held_out_whole" not in made_from(make(sources=sources))


# ---------------------------------------------------------------------------------------------------- datatrove


def test_datatrove_builds_the_bytes_of_one_machine(make: Make, tmp_path: Path) -> None:
    local = pytest.importorskip("datatrove.executor.local")
    from gptworks.data.datatrove import merge_pipeline, pipeline

    recipe = json.loads(make().model_dump_json())
    options = {"workers": 2, "start_method": "fork"}  # which have this process's size of a unit
    built = local.LocalPipelineExecutor(pipeline(recipe), tasks=3, logging_dir=str(tmp_path / "logs"), **options)
    merge = local.LocalPipelineExecutor(merge_pipeline(recipe), logging_dir=str(tmp_path / "merged"), depends=built)
    merge.run()
    (merged,) = (tmp_path / "data").glob("[!.]*")
    wanted = prepare(make(cache_dir=tmp_path / "one"))
    assert len(wanted.manifest.splits["train"].shards) > 6
    assert {f.name: f.read_bytes() for f in sorted(merged.rglob("*")) if f.is_file()} == contents(wanted)


# ------------------------------------------------------------------------------------------------------- copied


def test_a_copied_dataset_trains_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    tree = tiny.recipe_tree(tmp_path / "here", max_steps=4, evaluate_sequences=0)
    tree["data"] |= {"sources": [{"type": "text", "path": "text.txt"}], "cache_dir": "data"}
    tree["run_dir"] = "run"
    monkeypatch.chdir(tmp_path / "here")
    made = prepare(parse_recipe(tree))
    shutil.copytree(tmp_path / "here" / "data", tmp_path / "there" / "data", copy_function=shutil.copyfile)
    monkeypatch.chdir(tmp_path / "there")
    monkeypatch.setattr("gptworks.data.prepare.work_on", lambda *_: pytest.fail("text is read"))
    with pytest.warns(UserWarning, match=rf"{made.folder.name}, made by these settings, is used"):
        train(parse_recipe(tree))
    assert (tmp_path / "there" / "run" / "checkpoints" / "step-000004").is_dir()
