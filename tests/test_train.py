"""The effects of a training run, seen in its run folder."""

import itertools
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import gptworks
import tiny
from gptworks.checkpoint import checkpoints, load_run
from gptworks.data.batches import evaluation_windows
from gptworks.data.prepare import find_prepared
from gptworks.data.samples import Batch
from gptworks.data.shards import TokenShards
from gptworks.evaluation.loss import evaluate_loss
from gptworks.model.gpt import GPT
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training import loop
from gptworks.training.loop import Outcome, train
from gptworks.training.objectives.next_token import Losses, next_token
from gptworks.training.record.metrics import read_metrics

PLAIN = {"precision": "fp32", "optimizer": "adamw"}


def run(folder: Path, model: dict[str, Any] | None = None, **settings: Any) -> Outcome:
    tree = tiny.recipe_tree(folder, **settings)
    tree["model"] |= model or {}
    return train(parse_recipe(tree))


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == kind]


NO_DROPOUT = {"dropout_residual": 0.0, "dropout_attention": 0.0}


@pytest.mark.learning
def test_a_run_learns_and_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    outcome = run(tmp_path, max_steps=60, evaluate_every=20, sample_every=30, sample_prompts=["line "], warmup_steps=5)
    validation = records(tmp_path, "validation")
    assert [record["step"] for record in validation] == [20, 40, 60]
    assert validation[-1]["loss"] < math.log(43) - 1.1  # half of how far below a uniform guess fp32 and bf16 came
    names = {path.name for path in (tmp_path / "run").iterdir()} - {".lock"}
    assert names == {
        "recipe.yaml", "tokenizer", "checkpoints", "metrics.jsonl", "curves.svg", "samples.md", "model-card.md",
        "outcome.json",
    }  # fmt: skip
    assert "line " in (tmp_path / "run" / "samples.md").read_text(encoding="utf-8")
    card = (tmp_path / "run" / "model-card.md").read_text(encoding="utf-8")
    assert f"{outcome.best_validation_loss:.4f}" in card
    assert "26,176" in card
    assert ElementTree.parse(tmp_path / "run" / "curves.svg").getroot().tag.endswith("svg")


def test_the_saved_recipe_is_resolved_and_repeats_the_run(tmp_path: Path) -> None:
    run(tmp_path, max_steps=3)
    saved = load_recipe(tmp_path / "run")
    assert saved.model.vocab_size == 43
    again = saved.model_copy(update={"run_dir": tmp_path / "again"})
    train(again)
    first, second = (checkpoints(tmp_path / name)[0].folder / "model.safetensors" for name in ("run", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_accumulation_changes_nothing(tmp_path: Path, micro_batch_size: int) -> None:
    losses = {}
    for name, size in (("whole", 8), ("cut", micro_batch_size)):
        (tmp_path / name).mkdir()
        run(tmp_path / name, NO_DROPOUT, max_steps=6, micro_batch_size=size, **PLAIN)
        losses[name] = [record["loss"] for record in records(tmp_path / name, "train")]
    assert losses["cut"] == pytest.approx(losses["whole"], rel=1e-5)


def test_accumulation_weighs_micro_batches_by_their_tokens(tmp_path: Path) -> None:
    def masked(model: GPT, batch: Batch) -> Losses:  # each sequence keeps another number of targets
        inputs, targets = batch
        return next_token(model, (inputs, hide(targets)))

    def hide(targets: Tensor) -> Tensor:
        kept = 1 + targets.sum(1, keepdim=True) % (targets.size(1) - 1)
        return targets.where(torch.arange(targets.size(1)) < kept, -100)

    from gptworks.training.objectives import base as task

    count = task.count_targets
    losses = {}
    for name, size in (("whole", 8), ("cut", 2)):
        (tmp_path / name).mkdir()
        tree = tiny.recipe_tree(tmp_path / name, max_steps=4, micro_batch_size=size, **PLAIN)
        tree["model"] |= NO_DROPOUT
        task.count_targets = lambda batch: count((batch[0], hide(batch[1])))
        try:
            train(parse_recipe(tree), objective=masked)
        finally:
            task.count_targets = count
        losses[name] = [record["loss"] for record in records(tmp_path / name, "train")]
    assert losses["cut"] == pytest.approx(losses["whole"], rel=1e-5)


def test_the_first_loss_and_gradient_equal_plain_torch(tmp_path: Path) -> None:
    from gptworks.data.batches import Batches

    run(tmp_path, NO_DROPOUT, max_steps=1, warmup_steps=0, **PLAIN)
    [first] = records(tmp_path, "train")
    recipe = load_recipe(tmp_path / "run")
    prepared = find_prepared(recipe)
    assert prepared is not None
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.model)
    inputs, targets = Batches(TokenShards(prepared.folder, "train"), 32, recipe.seed).batch(0, 8)
    loss = torch.nn.functional.cross_entropy(model.eval()(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()  # type: ignore[union-attr]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_validation_figures_are_those_of_an_evaluation_of_the_saved_weights(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4, evaluate_every=4, evaluate_sequences=0, precision="fp32")
    [record] = records(tmp_path, "validation")
    loaded = load_run(tmp_path / "run", "last")
    prepared = find_prepared(loaded.recipe)
    assert prepared is not None
    shards = TokenShards(prepared.folder, "validation")
    report = evaluate_loss(loaded.model, evaluation_windows(shards, 32), text_bytes=shards.text_bytes)
    assert record["loss"] == pytest.approx(report.loss, rel=1e-6)
    assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert record["bits_per_byte"] == pytest.approx(report.bits_per_byte, rel=1e-6)
    # a character is a byte here, and all but the first are predicted
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / math.log(2), rel=1e-3)


def test_epochs_set_the_number_of_steps(tmp_path: Path) -> None:
    outcome = run(tmp_path, max_steps=None, epochs=0.1, warmup_steps=0)
    prepared = find_prepared(load_recipe(tmp_path / "run"))
    assert prepared is not None
    tokens = prepared.manifest.splits["train"].tokens
    assert outcome.tokens == pytest.approx(0.1 * tokens, abs=8 * 32)


@pytest.fixture
def steps_of_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step, which reads the clock twice, take 0.125 seconds."""
    clock = itertools.count()
    monkeypatch.setattr(
        loop, "time", SimpleNamespace(perf_counter=lambda: 0.125 * next(clock), monotonic=time.monotonic)
    )


@pytest.mark.usefixtures("steps_of_an_eighth")
def test_a_time_budget_ends_the_run_and_its_schedule(tmp_path: Path) -> None:
    outcome = run(tmp_path, max_steps=None, max_minutes=3 / 60, warmup_steps=0, evaluate_every=1000, schedule="wsd",
                  final_rate_fraction=0.0)  # fmt: skip
    assert (outcome.reason, outcome.step, outcome.seconds) == ("finished", 24, 3.0)
    rows = records(tmp_path, "train")
    rates = [row["learning_rate"] for row in rows]
    assert rates[0] == pytest.approx(0.003)
    assert rates[-1] < 0.003 * 0.5


def test_early_stopping(tmp_path: Path) -> None:
    outcome = run(
        tmp_path, max_steps=500, learning_rate=1e-12, optimizer="adamw", evaluate_every=1, early_stopping_patience=3
    )
    assert "no better validation loss in 3 evaluations" in outcome.reason
    assert outcome.step < 100


def test_checkpoint_every_means_what_it_says(tmp_path: Path) -> None:
    run(tmp_path, max_steps=10, checkpoint_every=3, keep_checkpoints=9, evaluate_every=100)
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path / "run")] == [10, 9, 6, 3]


def test_the_best_checkpoint_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    run(tmp_path, max_steps=30, evaluate_every=5, learning_rate=0.5, optimizer="adamw", grad_clip=0.0, warmup_steps=0)
    validation = records(tmp_path, "validation")
    best = min(validation, key=lambda record: record["loss"])
    assert load_run(tmp_path / "run", "best").checkpoint.step == best["step"]
    assert load_run(tmp_path / "run", "last").checkpoint.step == 30


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_means_what_it_says(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    seen = []

    def watch(model: GPT, batch: Batch) -> Losses:
        seen.append(model.features(batch[0]).dtype)
        return next_token(model, batch)

    tree = tiny.recipe_tree(tmp_path, max_steps=1, warmup_steps=0, precision=precision)
    train(parse_recipe(tree), objective=watch)
    assert set(seen) == {dtype}
    assert {tensor.dtype for tensor in checkpoints(tmp_path / "run")[0].model_tensors().values()} == {torch.float32}


@pytest.mark.usefixtures("steps_of_an_eighth")
def test_tokens_per_second_is_tokens_over_seconds(tmp_path: Path) -> None:
    outcome = run(tmp_path, max_steps=12, log_every=4)
    rows = records(tmp_path, "train")
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert [row["tokens"] for row in rows] == [4 * 256, 8 * 256, 12 * 256]
    assert [row["seconds"] for row in rows] == [0.5, 1.0, 1.5]
    assert [row["tokens_per_second"] for row in rows] == [256 / 0.125] * 3
    assert (outcome.tokens, outcome.seconds) == (12 * 256, 1.5)


def test_the_seed_decides_weights_and_order(tmp_path: Path) -> None:
    losses = {}
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        train(parse_recipe(tiny.recipe_tree(tmp_path / name, max_steps=2, warmup_steps=0) | {"seed": seed}))
        losses[name] = [record["loss"] for record in records(tmp_path / name, "train")]
    assert losses["one"] == losses["same"]
    assert losses["one"] != losses["other"]


REFERENCES = ["custom-300m", "gpt3-125m-banded", "gpt2-small-untied", "vaani-427m", "llm-200m", "gpt2"]


@pytest.mark.learning
@pytest.mark.parametrize("name", REFERENCES)
def test_each_reference_architecture_trains_and_generates(tmp_path: Path, name: str) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=12, evaluate_every=6, warmup_steps=2, learning_rate=0.01)
    small = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "context_length": 32, "vocab_size": 0}
    band = {"window": 8} if "banded" in name else {}
    tree["model"] = {"preset": name, **small, **band}
    train(parse_recipe(tree))
    first, last = records(tmp_path, "validation")
    assert last["loss"] < first["loss"] - 0.08  # half of the least fall of three seeds in fp32 and bf16
    assert first["loss"] < math.log(43) + 0.5
    engine = gptworks.load(tmp_path / "run")
    assert len(engine.complete("line ", max_tokens=5, temperature=0)[0].token_ids) == 5


def test_bits_per_byte_are_left_out_where_the_tokenizer_loses_text(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=2, warmup_steps=0, evaluate_every=2, evaluate_sequences=0)
    tree["tokenizer"] = {"type": "word", "vocab_size": 100}
    train(parse_recipe(tree))
    [record] = records(tmp_path, "validation")
    assert record["bits_per_byte"] is None
    assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
