"""Optimizers: AdamW, or Muon for the blocks' matrices beside AdamW for the rest. Decay falls on matrices alone."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from gptworks.config import TrainConfig
from gptworks.model import GPT
from gptworks.tensors import Expected
from gptworks.train.optim.muon import Muon


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share an optimizer, a peak learning rate and a weight decay."""

    name: str
    names: tuple[str, ...]
    optimizer: str
    learning_rate: float
    weight_decay: float


def parameter_groups(model: GPT, train: TrainConfig) -> list[ParameterGroup]:
    """How the trained parameters are divided: blocks' matrices, embeddings and head, vectors (norms and biases)."""
    members: dict[tuple[str, object], list[str]] = {(kind, None): [] for kind in ("matrices", "embeddings", "vectors")}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "vectors" if parameter.ndim < 2 else "matrices" if name.startswith("blocks.") else "embeddings"
        mesh = getattr(parameter, "device_mesh", None)  # fused updates take tensors that are divided alike
        members.setdefault((kind, mesh), []).append(name)
    muon = train.optimizer == "muon"
    groups = [
        ParameterGroup(
            name=kind,
            names=tuple(names),
            optimizer="muon" if muon and kind == "matrices" else "adamw",
            learning_rate=train.muon_learning_rate if muon and kind == "matrices" else train.learning_rate,
            weight_decay=0.0 if kind == "vectors" else train.weight_decay,
        )
        for (kind, _), names in members.items()
    ]
    return [group for group in groups if group.names]


class Optimizer:
    """One or two of torch's optimizers, driven as one. State is kept by parameter name."""

    def __init__(self, model: GPT, train: TrainConfig, replicas: distributed.ProcessGroup | None = None) -> None:
        """
        Args:
            replicas: the ranks that hold the same whole model and divide what need not be computed by each.
        """
        self.groups = parameter_groups(model, train)
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizers: list[tuple[torch.optim.Optimizer, list[ParameterGroup]]] = []
        for kind in ("adamw", "muon"):
            groups = [group for group in self.groups if group.optimizer == kind]
            if not groups:
                continue
            settings = [
                {
                    "params": [self.parameters[name] for name in group.names],
                    "lr": group.learning_rate,
                    "weight_decay": group.weight_decay,
                }
                for group in groups
            ]
            optimizer: torch.optim.Optimizer
            if kind == "adamw":
                fused = all(parameter.device.type in ("cpu", "cuda", "mps") for parameter in self.parameters.values())
                optimizer = torch.optim.AdamW(settings, betas=train.betas, eps=train.eps, fused=fused)
            else:
                optimizer = Muon(settings, momentum=train.muon_momentum, replicas=replicas)
            self._optimizers.append((optimizer, groups))

    def set_rate(self, factor: float) -> None:
        """Set every group's learning rate to `factor` times its peak."""
        for optimizer, groups in self._optimizers:
            for torch_group, group in zip(optimizer.param_groups, groups, strict=True):
                torch_group["lr"] = factor * group.learning_rate

    def step(self, scaler: torch.amp.GradScaler) -> None:
        """Update the parameters from their gradients."""
        for optimizer, _ in self._optimizers:
            scaler.step(optimizer)
        scaler.update()

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the gradients by the scaler's factor."""
        if scaler.is_enabled():
            for optimizer, _ in self._optimizers:
                scaler.unscale_(optimizer)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _named(self, groups: list[ParameterGroup]) -> Iterator[tuple[int, str]]:
        yield from enumerate(name for group in groups for name in group.names)

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state as `parameter/key` → tensor."""
        tensors = {}
        for optimizer, groups in self._optimizers:
            for _, name in self._named(groups):
                for key, value in optimizer.state[self.parameters[name]].items():
                    tensors[f"{name}/{key}"] = value
        return tensors

    def expected_tensors(self, stored: Collection[str], own: Collection[str] = ()) -> dict[str, Expected]:
        """The state that a checkpoint may hold: all of a parameter's tensors, or none before its first step.

        Args:
            stored: names of the stored tensors, `parameter/key`. own: tensors kept beside the state, `parameter/own`,
                of their parameter's shape.
        """
        begun = {name.rpartition("/")[0] for name in stored if name not in own}
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        expected = {key: Expected(shapes[key.rpartition("/")[0]]) for key in own}
        for optimizer, groups in self._optimizers:
            for _, name in self._named(groups):
                if name not in begun:
                    continue
                if isinstance(optimizer, Muon):
                    expected[f"{name}/momentum_buffer"] = Expected(shapes[name])
                else:
                    expected[f"{name}/step"] = Expected((), least=0)
                    expected[f"{name}/exp_avg"] = Expected(shapes[name])
                    expected[f"{name}/exp_avg_sq"] = Expected(shapes[name], least=0)
        return expected

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` gave."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, slot = key.rpartition("/")
            by_name.setdefault(name, {})[slot] = value
        for optimizer, groups in self._optimizers:
            state = {index: by_name[name] for index, name in self._named(groups) if name in by_name}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
