"""Skipped steps and rollbacks, averages of the weights, and the time of each part of a step."""

import math
import resource
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tiny
from gptworks.checkpoint import Checkpoint, all_checkpoints, checkpoints, load_run
from gptworks.config import TrainConfig
from gptworks.data.samples import Batch
from gptworks.errors import RunError
from gptworks.evaluation.loss import LossReport
from gptworks.model.gpt import GPT
from gptworks.recipe import parse_recipe
from gptworks.training import checkpoint_files, state
from gptworks.training.loop import train
from gptworks.training.objectives.base import Objective
from gptworks.training.objectives.next_token import Losses, next_token
from gptworks.training.progress import MEMORY_STEPS, WARMUP_STEPS, GradientEstimate, anomaly
from gptworks.training.record.metrics import MEASURED, read_metrics
from gptworks.training.state import TrainingState, WeightAverage


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == kind]


# ------------------------------------------------------------------------------------------------------- spikes


def test_the_estimate_is_mean_and_deviation_of_the_logarithm() -> None:
    norms = [math.exp(0.3 * math.sin(i)) for i in range(MEMORY_STEPS)]
    estimate = GradientEstimate()
    for norm in norms:
        estimate.take(norm)
    logs = [math.log(norm) for norm in norms]
    assert estimate.mean == pytest.approx(statistics.fmean(logs))
    assert estimate.variance == pytest.approx(statistics.pvariance(logs))
    expected = (math.log(10.0) - statistics.fmean(logs)) / statistics.pstdev(logs)
    assert estimate.deviations(10.0) == pytest.approx(expected)


def test_nobody_is_judged_before_enough_is_known() -> None:
    estimate = GradientEstimate()
    for _ in range(WARMUP_STEPS - 1):
        estimate.take(1.0)
    assert estimate.deviations(1e6) == 0
    estimate.take(1.0)
    assert estimate.deviations(1e6) > 100


def test_what_is_an_anomaly() -> None:
    estimate = GradientEstimate(n_steps=50, mean=0.0, variance=0.04)
    plain, strict = tiny.plain_training(max_steps=1), tiny.plain_training(max_steps=1, spike_deviations=6)
    assert anomaly(plain, estimate, 2.0, 1e9) is None
    assert anomaly(plain, estimate, math.nan, 1.0) == "its loss is not finite"
    assert anomaly(plain, estimate, 2.0, math.inf) == "its gradient is not finite"
    assert anomaly(strict, estimate, 2.0, math.exp(1.1)) is None
    assert "6.5 deviations" in str(anomaly(strict, estimate, 2.0, math.exp(1.3)))


def exploding(at: range, factor: float) -> Any:
    """Return an objective whose gradient is multiplied by `factor` on the batches of some steps."""
    seen: dict[int, int] = {}

    def objective(model: GPT, batch: Batch) -> Losses:
        key = int((batch[0] * torch.arange(1, batch[0].numel() + 1).view_as(batch[0])).sum())
        step = seen.setdefault(key, len(seen))
        losses = next_token(model, batch)
        return Losses(losses.objective * (factor if step in at else 1.0), losses.loss)

    return objective


def run(folder: Path, objective: Any, resume: bool = False, change: Sequence[str] = (), **settings: Any) -> None:
    plain: dict[str, Any] = {"micro_batch_size": 8, "optimizer": "adamw", "learning_rate": 1e-3, "grad_clip": 0.0}
    train(parse_recipe(tiny.recipe_tree(folder, **plain | settings)), objective=objective, resume=resume, change=change)


def test_a_spike_is_skipped_and_leaves_the_estimate_alone(tmp_path: Path) -> None:
    run(tmp_path, exploding(range(25, 26), 1e4), max_steps=30, spike_deviations=8.0)
    [skipped] = records(tmp_path, "skipped")
    assert skipped["step"] == 26
    state = checkpoints(tmp_path / "run")[0].state()
    assert (state["skipped"], state["gradient"]["n_steps"]) == (1, 29)
    assert math.exp(state["gradient"]["mean"]) < 100


def test_without_the_setting_a_spike_is_taken(tmp_path: Path) -> None:
    run(tmp_path, exploding(range(25, 26), 1e4), max_steps=30)
    assert not records(tmp_path, "skipped")


def test_after_many_skipped_steps_the_run_goes_back_and_on_past_their_batches(tmp_path: Path) -> None:
    settings = {"max_steps": 24, "max_skipped_steps": 3, "checkpoint_every": 4, "evaluate_every": 100}
    run(tmp_path, exploding(range(10, 13), math.inf), max_rollbacks=1, **settings)
    state = checkpoints(tmp_path / "run")[0].state()
    assert (state["step"], state["rollbacks"], state["samples_passed"], state["skipped"]) == (24, 1, 5 * 8, 3)
    [back] = records(tmp_path, "rollback")
    assert (back["step"], back["from_step"]) == (8, 13)
    steps = [record["step"] for record in records(tmp_path, "train")]
    assert steps == list(range(1, 25))
    assert all(math.isfinite(record["loss"]) for record in records(tmp_path, "train"))


def test_a_run_that_breaks_again_ends_with_the_last_good_checkpoint_named(tmp_path: Path) -> None:
    settings = {"max_steps": 24, "max_skipped_steps": 3, "checkpoint_every": 4, "evaluate_every": 100}
    with pytest.raises(RunError, match=r"3 steps in a row were skipped.*last good checkpoint is .*step-000008"):
        run(tmp_path, exploding(range(10, 99), math.nan), max_rollbacks=1, **settings)


class Killed(BaseException):
    """Raised to end a run at any point."""


def rolled_back(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return settings of a run that skips steps 11 to 15, saves meanwhile, and rolls back to step 8."""
    return {"max_steps": 24, "max_skipped_steps": 5, "max_rollbacks": 1, "checkpoint_every": 2, "evaluate_every": 4,
            "evaluate_sequences": 0} | settings  # fmt: skip


BROKEN_STEPS = range(10, 15)


def test_a_rollback_leaves_no_checkpoint_of_the_steps_that_it_takes_back(tmp_path: Path) -> None:
    """When the run continues, it has no checkpoint newer than the rollback's, and it has the best of the kept steps."""
    seen = []
    restore = TrainingState.restore

    def watch(self: TrainingState, checkpoint: Checkpoint) -> None:
        restore(self, checkpoint)
        seen.append((checkpoint.step, [c.step for c in checkpoints(tmp_path / "run")], self.progress.best_step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingState, "restore", watch)
        run(tmp_path, exploding(BROKEN_STEPS, math.inf), **rolled_back(tmp_path))
    [(restored, left, best)] = seen
    assert restored == 10
    assert max(left) == 10
    assert best in left
    assert load_run(tmp_path / "run").checkpoint.step == checkpoints(tmp_path / "run")[0].state()["best_step"]


def told_losses() -> Any:
    """Return an evaluation with given losses: the best at one step of the kept trajectory, and a better one on weights
    that are rolled back."""
    evaluate = Objective.evaluate

    def evaluated(self: Objective, *arguments: Any) -> Any:
        report, figures = evaluate(self, *arguments)
        return LossReport(report.n_tokens * next(losses), report.n_tokens), figures

    losses = iter([3.0, 4.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0])
    return evaluated


@pytest.mark.parametrize("checkpoint_every", [2, 5])  # the bests are saved whole, or weights only
def test_the_best_of_the_kept_steps_outlives_a_better_one_that_is_taken_back(
    checkpoint_every: int, tmp_path: Path
) -> None:
    settings = rolled_back(tmp_path, keep_checkpoints=1, checkpoint_every=checkpoint_every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "evaluate", told_losses())
        run(tmp_path, exploding(BROKEN_STEPS, math.inf), **settings)
    state = checkpoints(tmp_path / "run")[0].state()
    assert (state["step"], state["best_step"], state["best_loss"], state["rollbacks"]) == (24, 4, 3.0, 1)
    assert max(checkpoint.step for checkpoint in all_checkpoints(tmp_path / "run")) == 24
    best = load_run(tmp_path / "run").checkpoint
    assert (best.step, best.weights_only) == (4, checkpoint_every == 5)
    best.verify()


@pytest.mark.parametrize("removed", [0, 1])
def test_a_run_killed_in_a_rollback_does_the_same_again(tmp_path: Path, removed: int) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run(tmp_path / "whole", exploding(BROKEN_STEPS, math.inf), **rolled_back(tmp_path))
    remove, count = checkpoint_files.remove_checkpoint, 0

    def remove_some(checkpoint: Checkpoint) -> None:
        nonlocal count
        if rolling_back and count == removed:
            raise Killed
        count += rolling_back
        remove(checkpoint)

    newer, rolling_back = state.remove_newer, False

    def remove_newer(run_dir: Path, step: int) -> None:
        nonlocal rolling_back
        rolling_back = True
        newer(run_dir, step)
        raise Killed

    objective = exploding(BROKEN_STEPS, math.inf)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint_files, "remove_checkpoint", remove_some)
        patch.setattr(state, "remove_newer", remove_newer)
        run(tmp_path / "killed", objective, **rolled_back(tmp_path))
    run(tmp_path / "killed", objective, resume=True, **rolled_back(tmp_path))
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (checkpoints(tmp_path / n / "run")[0].folder / file for n in ("whole", "killed"))
        assert one.read_bytes() == other.read_bytes(), file
    for kind in ("train", "validation", "rollback", "skipped"):
        rows = [
            [{k: v for k, v in r.items() if k not in MEASURED} for r in records(tmp_path / n, kind)]
            for n in ("whole", "killed")
        ]
        assert rows[0] == rows[1], kind


# ------------------------------------------------------------------------------------------------------ average


def test_the_average_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average, expected = WeightAverage(model, TrainConfig(max_steps=4, ema_decay=0.5)), 1.0
    for step, value in enumerate((2.0, 4.0, 8.0, 16.0)):
        nn.init.constant_(model.weight, value)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert average.tensors["weight"].item() == pytest.approx(expected)
    with average.applied():
        assert model.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 16.0


def test_the_average_is_what_is_evaluated_and_published_and_training_goes_on_without_it(tmp_path: Path) -> None:
    for name, average in (("plain", {}), ("averaged", {"ema_decay": 0.9})):
        (tmp_path / name).mkdir()
        run(tmp_path / name, None, max_steps=12, **average, checkpoint_every=12)
    plain, averaged = ([r["loss"] for r in records(tmp_path / n, "train")] for n in ("plain", "averaged"))
    assert plain == averaged, "training does not see the average"
    folders = [checkpoints(tmp_path / name / "run")[0].folder for name in ("plain", "averaged")]
    own = load_file(folders[1] / "optimizer.safetensors")
    weights: dict[str, Tensor] = load_file(folders[0] / "model.safetensors")
    published = load_file(folders[1] / "model.safetensors")
    for name, weight in weights.items():
        assert torch.equal(own[f"{name}/own"], weight)
        assert not torch.equal(published[name], weight)
    from gptworks.data.batches import evaluation_windows
    from gptworks.data.prepare import find_prepared
    from gptworks.data.shards import TokenShards
    from gptworks.device import choose_precision
    from gptworks.evaluation.loss import evaluate_loss

    loaded = load_run(tmp_path / "averaged" / "run", "last")
    prepared = find_prepared(loaded.recipe)
    assert prepared is not None
    windows = evaluation_windows(TokenShards(prepared.folder, "validation"), 32, 8)
    last = records(tmp_path / "averaged", "validation")[-1]
    precision = choose_precision(loaded.recipe.train.precision, loaded.model.device)
    with precision.autocast():
        report = evaluate_loss(loaded.model, windows)
    assert report.loss == pytest.approx(last["loss"], rel=1e-6)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_a_resumed_run_gives_up_its_average_or_begins_one(before: float, after: float, tmp_path: Path) -> None:
    settings = {"schedule": "constant", "checkpoint_every": 5, "evaluate_every": 5}
    for name, decays in (("plain", (0.0, 0.0)), ("changed", (before, after))):
        (tmp_path / name).mkdir()
        run(tmp_path / name, None, max_steps=5, ema_decay=decays[0], **settings)
        run(
            tmp_path / name, None, resume=True, change=["train.ema_decay"], max_steps=10, ema_decay=decays[1],
            **settings,
        )  # fmt: skip
    plain, changed = (checkpoints(tmp_path / name / "run")[0].folder for name in ("plain", "changed"))
    weights = load_file(plain / "model.safetensors")
    own, published = load_file(changed / "optimizer.safetensors"), load_file(changed / "model.safetensors")
    assert all(torch.equal(own.get(f"{name}/own", published[name]), weight) for name, weight in weights.items())
    assert any(name.endswith("/own") for name in own) == bool(after)
    assert all(torch.equal(published[name], weight) for name, weight in weights.items()) == (not after)


def test_an_averaged_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    settings = {"ema_decay": 0.9, "schedule": "constant", "checkpoint_every": 5, "evaluate_every": 5}
    run(tmp_path / "whole", None, max_steps=15, **settings)
    run(tmp_path / "stopped", None, max_steps=10, **settings)
    run(tmp_path / "stopped", None, resume=True, max_steps=15, **settings)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (
            (checkpoints(tmp_path / name / "run")[0].folder / file).read_bytes() for name in ("whole", "stopped")
        )
        assert one == other, file


# --------------------------------------------------------------------------------------------------------- time


def test_the_parts_of_the_time_add_up_and_the_memory_is_recorded(tmp_path: Path) -> None:
    run(tmp_path, None, max_steps=12, log_every=4, evaluate_every=4, checkpoint_every=4)
    rows = records(tmp_path, "train")
    for row in rows:
        assert {"data", "forward", "backward", "optimizer"} <= set(row["seconds_by_part"])
        if sys.platform == "linux":  # torch alone takes more than the least
            assert 1e8 < row["resident_bytes"] <= 1.05 * 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert {"evaluation", "checkpoint"} <= set(rows[1]["seconds_by_part"])
    steps = ("data", "forward", "backward", "optimizer")
    counted = sum(row["seconds_by_part"][part] for row in rows for part in steps)
    assert 0 < counted <= rows[-1]["seconds"] + 0.01, "no time is counted twice"
