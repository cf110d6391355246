"""A new objective needs only its settings and its class; no other package knows it."""

from pathlib import Path
from typing import Literal

import pytest
from torch import Tensor

import tiny
from gptworks.config import Recipe
from gptworks.config.base import Measured
from gptworks.config.objective import NextTokenObjective, ObjectiveSettings
from gptworks.data.samples import Batch
from gptworks.describe.plan_tables import plan_json, tables
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.model.loss import target_logprobs
from gptworks.planning.run import plan as plan_run
from gptworks.planning.steps import DataSize
from gptworks.recipe import parse_recipe
from gptworks.training.changes import check_changes
from gptworks.training.loop import train
from gptworks.training.objectives.base import Objective
from gptworks.training.objectives.next_token import Losses, counted, with_routing
from gptworks.training.record.metrics import read_metrics
from gptworks.training.rehearsal.trace import Rehearsal, trace_step
from gptworks.training.setup import check_train


class EverySecond(ObjectiveSettings):
    """An objective that learns every second token."""

    sources = ("text",)
    scores_targets = True
    scores_start = True
    fixed_settings = {"train.learning_rate": "a test says so"}  # noqa: RUF012

    type: Measured[Literal["every_second"]] = "every_second"
    weight: Measured[float] = 2.0


class EverySecondObjective(Objective):
    settings: EverySecond

    def check(self, recipe: Recipe) -> None:
        if self.settings.weight <= 0:
            raise UserError(f"objective.weight={self.settings.weight}: give one above 0.")

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        inputs, targets = super().batch(position, micro_step, size)
        targets[:, ::2] = -100
        return inputs, targets

    def loss(self, model: GPT, batch: Batch) -> Losses:
        router_logits: list[Tensor] = []
        features = model.features(batch[0], None, router_logits)
        nats = -target_logprobs(features, model.head_weight, batch[1]).sum()
        weight = self.settings.weight
        figures = {"weighted": weight * nats}
        return with_routing(weight * nats, nats, router_logits, model, counted(batch), self._routing, figures)


class OwnRecipe(Recipe):
    objective: EverySecond = EverySecond()


def own_recipe(folder: Path, **train_settings: object) -> Recipe:
    settings = parse_recipe(tiny.recipe_tree(folder, max_steps=4, log_every=1, evaluate_every=2, **train_settings))
    return OwnRecipe.model_validate(settings.model_dump(exclude={"objective"}))


def test_an_objective_from_outside_is_planned_checked_and_trained(
    tmp_path: Path,
) -> None:
    recipe = own_recipe(tmp_path)
    check_train(recipe)
    outcome = train(recipe)
    assert (outcome.reason, outcome.step) == ("finished", 4)
    rows = list(read_metrics(recipe.run_dir / "metrics.jsonl"))
    steps = [row for row in rows if row["kind"] == "train"]
    assert len(steps) == 4 and all(row["weighted"] == pytest.approx(2 * row["loss"], rel=1e-4) for row in steps)
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [2, 4]

    known = recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": 64})})
    planned = plan_run(known, DataSize(10_000, samples_per_epoch=300))
    assert planned.flops_before_first_step > 0
    rehearsal = Rehearsal(known.model, planned.one_step, "cpu", planned.setting.precision, objective=known.objective)
    traced = trace_step(rehearsal).peak_bytes
    assert planned.step_bytes == pytest.approx(traced, rel=0.02)
    usual = plan_run(known.model_copy(update={"objective": NextTokenObjective()}))
    assert usual.flops_before_first_step == 0
    assert plan_json(planned)["objective"] == "every_second"
    page = next(tables(planned)).markdown()
    assert "every_second: the figures count what the start gives each row once" in page and "sequences" in page
    with pytest.raises(UserError, match=r"train\.learning_rate=.* a test says so, so a run cannot change it"):
        check_changes(recipe, own_recipe(tmp_path, learning_rate=0.5))
    with pytest.raises(UserError, match=r"objective\.weight=0\.0: give one above 0"):
        check_train(recipe.model_copy(update={"objective": EverySecond(weight=0.0), "run_dir": tmp_path / "other"}))
