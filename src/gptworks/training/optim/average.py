"""An average of the weights over the steps, often better than the last step's weights. It does not change training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gptworks.config import TrainConfig
from gptworks.quantize.linear import weight_tensors

_OWN = "own"


class WeightAverage:
    """The average of a model's weights over its steps, float32, by parameter name (Polyak & Juditsky, 1992).

    With `ema_decay` it is exponential; the decay of step n is at most (1 + n) / (10 + n), so that the initial weights
    fade soon. With `average_last` it is the mean over the last steps (Izmailov et al., 2018); before these it equals
    the weights.
    """

    def __init__(self, model: nn.Module, train: TrainConfig) -> None:
        self.train = train
        self.parameters = weight_tensors(model)
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.tensors = {name: p.detach().float().clone() for name, p in trained.items()} if train.averages else {}

    @torch.no_grad()
    def update(self, step: int, total_steps: int | None = None) -> None:
        """Add the weights after optimizer step number `step`, from 0, to the average.

        Args:
            total_steps: steps of the run; None: unknown.
        """
        decay = min(self.train.ema_decay, (1 + step) / (10 + step))
        if self.train.average_last:
            assert total_steps is not None, "the run has a length in steps"
            n_averaged = max(1, round(self.train.average_last * total_steps))
            n_before = max(0, step - (total_steps - n_averaged))  # averaged steps before this one
            decay = n_before / (1 + n_before)
        for name, average in self.tensors.items():
            average.lerp_(self.parameters[name].detach().float(), 1 - decay)

    @property
    def model_tensors(self) -> dict[str, Tensor]:
        """The tensors to publish: averages, and the weights without an average."""
        return {name: p.detach() for name, p in self.parameters.items()} | self.tensors

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """The current weights of averaged parameters, as `parameter/own`, for a resumed run."""
        return {f"{name}/{_OWN}": self.parameters[name].detach() for name in self.tensors}

    def restore(self, model_tensors: dict[str, Tensor], optimizer_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Restore weights and averages; returns the optimizer's tensors."""
        own = {key.removesuffix(f"/{_OWN}"): t for key, t in optimizer_tensors.items() if key.endswith(f"/{_OWN}")}
        self._set(model_tensors | own)
        self.tensors = {name: model_tensors[name].to(tensor.device).clone() for name, tensor in self.tensors.items()}
        return {key: tensor for key, tensor in optimizer_tensors.items() if not key.endswith(f"/{_OWN}")}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the averaged weights; without an average, its own."""
        own = {name: self.parameters[name].detach().clone() for name in self.tensors}
        self._set(self.tensors)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)
