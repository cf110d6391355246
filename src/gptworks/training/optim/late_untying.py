"""A head that is tied to the token embedding at first, and later trains as a copy of it (modded-nanogpt, pull request
178).

The head's matrix exists from the start, so that every checkpoint is of one model: until the head is untied, it is
saved equal to the embedding, without optimizer state.
"""

import torch

from gptworks.model.gpt import GPT
from gptworks.training.optim.average import WeightAverage
from gptworks.training.optim.optimizer import Optimizer

EMBEDDING, HEAD = "token_embedding.weight", "untied_head.weight"


class LateUntying:
    """Unties the head at a step given by number, so that a resumed run unties it at the same step."""

    def __init__(self, model: GPT, optimizer: Optimizer, untie_after_steps: int) -> None:
        """
        Args:
            untie_after_steps: steps before the head is untied; 0: the head never changes from tied to untied.
        """
        self._model, self._optimizer, self._steps = model, optimizer, untie_after_steps

    def begin(self, step: int, average: WeightAverage) -> None:
        """Called before optimizer step number `step`, from 0."""
        if not self._steps:
            return
        if step == self._steps:
            self._copy(average)
            self._optimizer.copy_state(EMBEDDING, HEAD)
        self._model.head_is_embedding = step < self._steps

    def before_saving(self, average: WeightAverage) -> None:
        """Make the head's matrix equal to the one that the model computes with."""
        if self._model.head_is_embedding:
            self._copy(average)

    @torch.no_grad()
    def _copy(self, average: WeightAverage) -> None:
        for tensors in (average.parameters, average.tensors):
            if HEAD in tensors:
                tensors[HEAD].copy_(tensors[EMBEDDING])
