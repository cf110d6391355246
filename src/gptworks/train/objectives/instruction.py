"""Instruction tuning: the loss is on the answers of conversations."""

from gptworks.config import InstructionObjective
from gptworks.data.conversations.packing import ExampleBatches, Examples, evaluation_rows
from gptworks.device import Precision
from gptworks.evaluate.loss import LossReport, Shares, evaluate_loss
from gptworks.model import GPT
from gptworks.train.objectives.base import Task
from gptworks.train.objectives.next_token import Batch


class Instruction(Task):
    """Learning the answers of conversations. The rest of them is read, and carries no loss."""

    def _open(self) -> None:
        recipe = self.recipe
        assert isinstance(recipe.objective, InstructionObjective)
        packing = recipe.objective.packing
        self._rows = ExampleBatches(Examples(self.train_shards, self.context_length, packing), recipe.seed)
        self._held_out = Examples(self.validation_shards, self.context_length, packing)

    @property
    def samples_per_epoch(self) -> int:
        return self._rows.rows_per_epoch

    @property
    def n_validation(self) -> int:
        return len(self._held_out.rows)

    @property
    def tokens_per_epoch(self) -> int:
        return self._rows.rows_per_epoch * self.context_length

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        return self._rows.batch(position + micro_step * size, size)

    def evaluate(self, model: GPT, shares: Shares, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        rows = evaluation_rows(self._held_out, self.n_evaluated)
        return evaluate_loss(model, rows, shares=shares, autocast=precision.autocast), {}
