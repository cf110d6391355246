"""Evaluation during a run: the part of the held-out text that it reads, its reaction to a stop, and agreement of
ranks."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gptworks.evaluation.loss as evaluation
import tiny
from gptworks.config import IGNORED
from gptworks.config.train import EVALUATED_TOKENS
from gptworks.model.gpt import GPT
from gptworks.recipe import parse_recipe
from gptworks.training.distributed.ranks import Ranks
from gptworks.training.loop import train
from gptworks.training.objectives.pairs import answer_logprobs
from gptworks.training.record.metrics import MEASURED, read_metrics
from gptworks.training.state import TrainingState


def records(folder: Path) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


def test_an_evaluation_is_bounded_unless_the_recipe_says_otherwise() -> None:
    """A million of 500M held-out tokens; every window of a small split, or with the setting 0."""
    context, n_large = 1024, 500_000_000 // 1024
    free = tiny.plain_training(max_steps=1)
    assert free.n_evaluated(n_large, context) * context == EVALUATED_TOKENS
    assert free.n_evaluated(50, context) == 0
    assert free.n_evaluated(3, 2 * EVALUATED_TOKENS) == 1
    assert tiny.plain_training(max_steps=1, evaluate_sequences=0).n_evaluated(n_large, context) == 0
    assert tiny.plain_training(max_steps=1, evaluate_sequences=7).n_evaluated(n_large, context) == 7


def test_an_evaluation_says_what_part_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=4, evaluate_every=4)
    del tree["train"]["evaluate_sequences"]
    found = {}
    for n_tokens in (EVALUATED_TOKENS, 20 * 32):
        monkeypatch.setattr("gptworks.config.train.EVALUATED_TOKENS", n_tokens)
        name = str(n_tokens)
        train(parse_recipe(tree | {"run_dir": str(tmp_path / name)}))
        found[n_tokens] = records(tmp_path / name)[-1]
        card = (tmp_path / name / "model-card.md").read_text()
        assert ("over 20 of" in card) == (n_tokens < EVALUATED_TOKENS)
    whole, part = found[EVALUATED_TOKENS], found[20 * 32]
    assert whole["sequences"] == whole["sequences_held_out"] > 20 and whole["bits_per_byte"] is not None
    assert (part["sequences"], part["sequences_held_out"]) == (20, whole["sequences"])
    assert part["bits_per_byte"] is None


@pytest.mark.parametrize("max_steps", [6, 4])
def test_a_stop_is_heard_within_an_evaluation_which_a_resumed_run_makes_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_steps: int
) -> None:
    """The run stops between two batches of the evaluation of step 4, which may be the last."""
    monkeypatch.setattr(evaluation, "BATCH_TOKENS", 64)
    tree = tiny.recipe_tree(tmp_path, max_steps=max_steps, evaluate_every=2, checkpoint_every=3, sample_every=4,
                            sample_prompts=["line "], sample_tokens=4)  # fmt: skip
    whole, parts = (tree | {"run_dir": str(tmp_path / name)} for name in ("whole", "parts"))
    train(parse_recipe(whole))
    batches_of, n_read = evaluation.batches_of, []

    def stopped(windows: Any) -> Iterator[tuple[Tensor, ...]]:
        for i, batch in enumerate(batches_of(windows)):
            if len(n_read) == 5:  # four of step 2, one of step 4
                os.kill(os.getpid(), signal.SIGTERM)
            n_read.append(i)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "batches_of", stopped)
        outcome = train(parse_recipe(parts))
    assert (outcome.reason, outcome.step) == ("stopped by SIGTERM", 4)
    assert len(n_read) == 6, "no batch is computed after the stop"
    assert [row["step"] for row in records(tmp_path / "parts") if row["kind"] == "validation"] == [2]
    assert train(parse_recipe(parts), resume=True).reason == "finished"
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


def test_rank_0s_figures_decide_for_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with other figures follows rank 0 in its patience and in its log."""

    class Second(Ranks):
        def broadcast(self, numbers: list[float]) -> list[float]:
            return [2.5 * numbers[1], *numbers[1:]] if len(numbers) == 2 and numbers[1] > 32 else numbers

    monkeypatch.setattr(TrainingState, "save", lambda state, **_: None)
    tree = tiny.recipe_tree(tmp_path, max_steps=20, evaluate_every=2, early_stopping_patience=2)
    outcome = train(parse_recipe(tree), ranks=Second())
    assert outcome.step == 6 and outcome.reason == "no better validation loss in 2 evaluations"
    assert outcome.best_validation_loss == 2.5


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_checkpointing_saves_memory_wherever_there_are_gradients(kind: str) -> None:
    """In evaluation mode too: references are computed with gradients, to use the kernels of training."""
    config = tiny.plain_model(vocab_size=31, context_length=64, n_layers=4, d_model=32, n_heads=4)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, -2:] = 1
    held: dict[str, int] = {}
    for checkpointing in ("none", kind):
        torch.manual_seed(0)
        model = GPT(config).eval()
        model.activation_checkpointing = checkpointing
        parameters = {p.data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}

        def keep(x: Tensor, sizes: dict[int, int] = sizes, parameters: set[int] = parameters) -> Tensor:
            if x.data_ptr() not in parameters:
                sizes[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logprobs = answer_logprobs(model, tokens, targets)
        held[checkpointing] = sum(sizes.values())
        assert logprobs.requires_grad
    assert held[kind] < (0.3 if kind == "block" else 0.7) * held["none"]
