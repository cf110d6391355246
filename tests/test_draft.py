"""Recipes drafted for texts and a machine: they load, fit, and take the requested time."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gptworks.cli import app
from gptworks.config.defaults import EPOCHS
from gptworks.data.sources import base
from gptworks.data.sources.choose import check_sources, iter_documents
from gptworks.draft import like, pretraining
from gptworks.draft import texts as look
from gptworks.draft.pretraining import TEXT_TOKENS_PER_PARAMETER, TOKENS_PER_PARAMETER, TRAINING_SHARE, Draft, Search
from gptworks.draft.texts import Texts, look_at
from gptworks.errors import UserError
from gptworks.planning.params import count_parameters
from gptworks.planning.run import Measured
from gptworks.recipe import load_recipe, read_recipe
from gptworks.recipes import shipped_paths
from gptworks.training.rehearsal.trace import Rehearsal

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "l", "r", "st", "")]


def prose(n_bytes: int, seed: int = 1) -> str:
    """Return sentences of invented words without repetitions."""
    text, state = [], seed
    while sum(map(len, text)) < n_bytes:
        words = []
        for _ in range(9):
            state = (state * 1_103_515_245 + 12_345) % 2**31
            words.append(WORDS[state // 65_536 % len(WORDS)])
        text.append(" ".join(words) + ".\n")
    return "".join(text)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("texts")
    for n in range(3):
        (folder / f"{n}.txt").write_text(prose(100_000, n + 1), encoding="utf-8")
    return look_at(folder)


def machine(flops_per_second: float) -> Any:
    """Return a function that measures a step as on a machine of this speed."""

    def measure(step: Rehearsal) -> Measured:
        return Measured(0, 0, flops_per_second / (6 * count_parameters(step.model).total))

    return measure


def drafted(texts: Texts, minutes: float, flops_per_second: float, out: Path = Path("mine.yaml")) -> Draft:
    return Search(texts, minutes, out, measure=machine(flops_per_second)).run()


def test_a_draft_is_an_ordinary_recipe_that_fits_and_takes_the_time_that_its_measured_step_says(
    texts: Texts, tmp_path: Path
) -> None:
    draft = drafted(texts, 2, 2e9)
    (tmp_path / "mine.yaml").write_text(draft.text(), encoding="utf-8")
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe == draft.plan.recipe
    assert draft.plan.fits
    assert draft.plan.measured is not None
    seconds = recipe.train.max_steps * draft.plan.tokens_per_step / draft.plan.measured.tokens_per_second
    assert seconds == pytest.approx(120 * TRAINING_SHARE, rel=0.05)
    assert draft.minutes == pytest.approx(2, rel=0.05)
    assert recipe.train.warmup_steps and recipe.train.evaluate_every < recipe.train.max_steps
    assert recipe.train.keep_every == recipe.train.checkpoint_every, "what was learned when can be seen later"
    for line in draft.lines():
        assert f"# {line}" in draft.text()
    comments = [line for line in draft.text().splitlines() if " # " in line]
    assert len(comments) > 9, "each choice has its reason"


def test_more_speed_and_time_make_a_larger_model_and_little_text_bounds_it(texts: Texts) -> None:
    sizes = []
    for flops_per_second in (1e8, 1e10, 1e14):
        draft = drafted(texts, 1, flops_per_second)
        tokens, parameters = draft.plan.tokens or 0, draft.plan.parameters.total
        assert draft.epochs <= EPOCHS
        least = TEXT_TOKENS_PER_PARAMETER if draft.epochs > 0.95 * EPOCHS else TOKENS_PER_PARAMETER
        assert tokens >= 0.95 * least * parameters or draft.plan.recipe.model.d_model == 64
        sizes.append(parameters)
        assert f"{tokens / parameters:.2g} tokens of training for each of {parameters:,}" in draft.text()
    assert sizes[0] <= sizes[1] <= sizes[2]
    assert draft.epochs == pytest.approx(EPOCHS, rel=0.05)
    assert draft.minutes < 1
    assert "epochs; reading a text more often teaches little" in draft.text()


@pytest.mark.parametrize("flops_per_second", [1e9, 1e11, 1e13])
def test_a_run_grows_to_a_context_that_suits_its_width(texts: Texts, flops_per_second: float) -> None:
    much = replace(texts, items=tuple(replace(item, n_bytes=200_000_000) for item in texts.items))
    recipe = drafted(much, 10, flops_per_second).plan.recipe
    width, context = recipe.model.d_model, recipe.model.context_length
    assert context == 1024 or 2 * width < context <= 4 * width, "attention costs about as much as the matrices"
    assert recipe.train.batch_size * context % 1024 == 0, "a step is of as many tokens as were planned"
    assert [length for _, length in recipe.train.shorter_contexts] == [context // 4, context // 2]
    shares = [step / recipe.train.max_steps for step, _ in recipe.train.shorter_contexts]
    assert shares == pytest.approx([0.35, 0.7], abs=1 / recipe.train.max_steps)


@pytest.mark.parametrize(("n_bytes", "decay"), [(100_000, 0.5), (10_000_000, 0.01)])
def test_weights_decay_in_a_run_that_reads_its_text_often(texts: Texts, n_bytes: int, decay: float) -> None:
    some = replace(texts, items=tuple(replace(item, n_bytes=n_bytes) for item in texts.items))
    draft = drafted(some, 1, 1e11)
    assert (draft.epochs > 3.5) is (decay == 0.5)
    assert draft.plan.recipe.train.weight_decay == decay


def test_a_text_that_repeats_itself_gets_the_vocabulary_that_it_has_pairs_for(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("The keeper of the lighthouse counted the ships and wrote them down.\n" * 2000)
    recipe = drafted(look_at(tmp_path), 1, 1e9).plan.recipe
    assert recipe.tokenizer.type == "bpe" and 256 < recipe.tokenizer.vocab_size < 512


def test_its_tokens_are_about_those_of_the_text(texts: Texts, tmp_path: Path) -> None:
    from gptworks.data.prepare import prepare

    draft = drafted(texts, 1, 1e9)
    recipe = draft.plan.recipe
    data = recipe.data.model_copy(update={"cache_dir": tmp_path / "data"})
    prepared = prepare(recipe.model_copy(update={"data": data}))
    assert draft.plan.data.train_tokens == pytest.approx(prepared.manifest.splits["train"].tokens, rel=0.03)


def test_samples_continue_held_out_text(texts: Texts) -> None:
    draft = drafted(texts, 1, 1e9)
    assert draft.plan.recipe.train.sample_held_out == 2 and draft.plan.recipe.train.sample_prompts == ()
    assert "sample_held_out: 2" in draft.text() and "chosen before training" in draft.text()


def test_what_a_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text(prose(40_000), encoding="utf-8")
    (tmp_path / "deep" / "b.PY").write_text("x = 1\n" * 1000, encoding="utf-8")
    (tmp_path / "c.pdf").write_bytes(b"%PDF\0\1")
    (tmp_path / "README").write_text("no ending", encoding="utf-8")
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": 1, "text": "a record"}) + "\n", encoding="utf-8")
    found = look_at(tmp_path)
    assert found.read == {".txt": 1, ".PY": 1, ".jsonl": 1, "": 1}
    assert found.skipped == {".pdf": 1}
    assert found.sources == [{"type": "files", "path": str(tmp_path)}]
    assert "a record" in found.sample
    (tmp_path / "bad.txt").write_bytes(prose(300_000).encode() + b"\0")
    (tmp_path / "old.txt").write_bytes("Grüße aus der Küche".encode("latin-1"))
    found = look_at(tmp_path)
    assert found.read == {".txt": 2, ".PY": 1, ".jsonl": 1, "": 1}
    assert found.skipped == {".pdf": 1, ".txt": 1}
    assert "Grüße aus der Küche" in found.sample


def write_tables(folder: Path) -> None:
    """Write records whose text is in a field with a usual name, in the only field with words, or in no clear field."""
    rows = [prose(400, n).strip().replace("\n", " ") for n in range(100)]
    (folder / "a.csv").write_text("id,lang,Body\n" + "".join(f'{n},en,"{row}"\n' for n, row in enumerate(rows)))
    (folder / "b.tsv").write_text(
        "id\tday\tremark\n" + "".join(f"{n}\t2024-01-02\t{row}\n" for n, row in enumerate(rows))
    )
    (folder / "prices.csv").write_text("day,price\n2024-01-02,17.5\n")
    (folder / "names.jsonl").write_text(json.dumps({"first": "Ada", "last": "Lovelace"}) + "\n")
    (folder / "broken.csv").write_text('text\n"never closed\n')


def test_the_column_of_a_table_that_is_surely_text_is_taken_and_all_else_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(look, "MOST_BYTES", 1 << 14)
    monkeypatch.setattr(base, "UNIT_BYTES", 1 << 14)
    write_tables(tmp_path)
    rows = [prose(400, n) for n in range(200)]
    for name, column in (("c.parquet", "content"), ("d.parquet", "content")):
        pq.write_table(pa.table({"id": list(range(len(rows))), column: rows}), tmp_path / name, row_group_size=20)
    found = look_at(tmp_path)
    items = {item.file: item for item in found.items}
    assert [items[name].notes[-1] for name in ("a.csv", "b.tsv", "c.parquet", "names.jsonl")] == [
        "takes `Body`", "takes `remark`", "takes `content`", "takes all fields"
    ]  # fmt: skip
    assert "bytes looked at" in items["c.parquet"].notes[0]
    assert "no field holds words: it has `day`, `price`" in items["prices.csv"].why
    assert "line 2" in items["broken.csv"].why
    assert found.skipped == {".csv": 2}
    draft = drafted(found, 1, 1e8)
    with pytest.warns(UserWarning, match="2 of 7 files are left out"):
        check_sources(draft.plan.recipe.data.sources)
    texts = [piece.text for piece in iter_documents(draft.plan.recipe.data.sources)]
    assert len(texts) == 200 + 2 * len(rows) + 1
    assert found.n_bytes == pytest.approx(sum(map(len, texts)), rel=0.05), "of large files an estimate"


def another_recipe(folder: Path, training: str = "") -> Path:
    path = folder / "other.yaml"
    path.write_text(
        "model: {context_length: 64, n_layers: 2, d_model: 64, n_heads: 2}\ntokenizer: {type: bpe, vocab_size: 512}\n"
        f"data: {{sources: [{{type: python-stdlib}}]}}\n{training}",
        encoding="utf-8",
    )
    return path


def test_like_takes_a_recipe_that_says_nothing_of_its_training(texts: Texts, tmp_path: Path) -> None:
    other = another_recipe(tmp_path)
    draft = like.Like(texts, 1, tmp_path / "like.yaml", measure=machine(1e11), like=other).run()
    assert draft.plan.recipe.train.max_steps
    assert draft.plan.recipe.model.d_model == 64


def test_like_replaces_a_micro_batch_that_does_not_fit(texts: Texts, tmp_path: Path) -> None:
    other = another_recipe(tmp_path, "train: {batch_size: 64, micro_batch_size: 32, max_steps: 9}\n")
    search = like.Like(texts, 1, tmp_path / "like.yaml", measure=machine(1e11), like=other)
    peak_bytes = search.run().plan.peak.total_bytes
    search.place, search.measured = replace(search.place, memory_bytes=peak_bytes - 1), {}
    draft = search.run()
    (tmp_path / "like.yaml").write_text(draft.text(), encoding="utf-8")
    assert load_recipe(tmp_path / "like.yaml").train.micro_batch_size == 16
    assert draft.text().count("micro_batch_size") == 1 and draft.plan.fits


def test_parquet_without_its_library_is_skipped_with_the_extra_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.txt").write_text(prose(40_000), encoding="utf-8")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    assert "gptworks[data]" in look_at(tmp_path).items[1].why


def test_a_little_text_is_measured_with_a_small_model_at_first(texts: Texts) -> None:
    measured = []

    def measure(step: Rehearsal) -> Measured:
        measured.append(step.model.d_model)
        return machine(1e14)(step)

    draft = Search(texts, 1, Path("mine.yaml"), measure=measure).run()
    assert measured == [draft.plan.recipe.model.d_model], "the text alone decides"
    assert draft.plan.recipe.model.d_model < pretraining.FIRST_SHAPE[0]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no files"),
        ({"a.pdf": b"%PDF"}, r"holds no text that can be read: it has 1 \.pdf"),
        ({"a.txt": b"short"}, "a model needs 32,768"),
        ({"a.jsonl": b'{"messages": []}\n'}, "gptworks tune"),
    ],
)
def test_a_folder_without_enough_text_says_what_it_has(files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        look_at(tmp_path)


def test_a_sample_of_much_text_is_from_all_over_it(tmp_path: Path) -> None:
    lines = "".join(f"line {n} of many\n" for n in range(400_000))
    (tmp_path / "long.txt").write_text(lines, encoding="utf-8")
    sample = look_at(tmp_path).sample
    assert sum(map(len, sample)) < 2.2e6
    numbers = [int(part.split()[1]) for part in sample]
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] > 380_000


def init(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def test_the_command_writes_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(prose(100_000), encoding="utf-8")
    monkeypatch.setattr(pretraining, "measure_speed", machine(1e9))
    result = init("mine.txt", "--minutes", 1)
    assert result.exit_code == 0, result.output
    assert "gptworks train mine.yaml" in result.stdout
    assert load_recipe("mine.yaml").run_dir == Path("runs/mine")
    assert init("mine.txt", "--minutes", 1, "-o", "Über my recipe!.yaml").exit_code == 0
    assert load_recipe("Über my recipe!.yaml").run_dir == Path("runs/Uber-my-recipe")
    before = Path("mine.yaml").read_bytes()
    again = init("mine.txt")
    assert "mine.yaml exists" in str(again.exception)
    assert Path("mine.yaml").read_bytes() == before
    assert "--like" in str(init("-o", "other.yaml").exception)


def test_like_copies_a_shipped_recipe_or_takes_its_model_for_other_texts(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init("--like", "demo").exit_code == 0
    assert Path("mine.yaml").read_bytes() == shipped_paths()["demo"].read_bytes()
    other = load_recipe("gpt2-from-scratch/tiny")
    with pytest.MonkeyPatch.context() as patch:
        read: list[str] = []
        patch.setattr(like, "read_recipe", lambda path: read.append(path) or read_recipe(path))
        draft = like.Like(texts, 1, Path("like.yaml"), measure=machine(1e11), like="gpt2-from-scratch/tiny").run()
    assert read == ["gpt2-from-scratch/tiny"], "once"
    Path("like.yaml").write_text(draft.text(), encoding="utf-8")
    recipe = load_recipe("like.yaml")
    assert recipe.model == other.model
    by_length = ("max_steps", "warmup_steps", "evaluate_every", "checkpoint_every")
    kept = {name: getattr(other.train, name) for name in by_length}
    assert recipe.train.model_copy(update=kept) == other.train
    assert recipe.data.sources[0].path == texts.sources[0]["path"]  # type: ignore[union-attr]
    assert draft.epochs <= EPOCHS
