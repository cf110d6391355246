"""Norms of each block's outputs and gradients at logged steps, which show where a deep model diverges."""

from typing import Any

import torch

from gptworks.model.gpt import GPT
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.events import Listener, Step
from gptworks.training.progress import Progress


class LayerNorms(Listener):
    """Records the norms of each block of a model in training, every `every` steps."""

    def __init__(self, model: GPT, parallel: Parallel, every: int) -> None:
        self._model, self._parallel, self._every = model, parallel, every

    def begin_step(self, progress: Progress) -> None:
        """Make the model record the root mean square of its blocks' outputs if this step is a multiple of `every`."""
        self._model.watched = [] if (progress.step + 1) % self._every == 0 else None

    def gradients(self, step: Step) -> None:
        step.by_layer = self.finish()

    def finish(self) -> dict[str, Any]:
        """Return figures for metrics.jsonl: the root mean square of each block's output (at the block's last use) in
        the rank's first micro-batch, and the norm of the block's gradients; empty at steps not divisible by `every`.
        """
        outputs, self._model.watched = self._model.watched, None
        if not outputs:
            return {}
        n_layers, uses = len(self._model.blocks), self._model.config.layer_uses
        last = dict(zip(uses, torch.stack(outputs[: len(uses)]).tolist(), strict=True))
        return {
            "activation_rms_by_layer": _rounded([last[layer] for layer in range(n_layers)]),
            "gradient_norm_by_layer": _rounded(
                [self._parallel.gradient_norm(f"blocks.{layer}.") for layer in range(n_layers)]
            ),
        }


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
