"""The optimizer of a run: one interface to the recipe's optimizer, for the blocks' matrices, and to AdamW, for other
parameters. Vectors do not decay. Each optimizer has a file in this folder and an entry in
`gptworks.config.optimizers.OPTIMIZERS`."""

import math
from collections.abc import Collection
from importlib import import_module

import torch
from torch import Tensor, nn

from gptworks.config import RateFactors, TrainConfig
from gptworks.config.optimizers import LEAST_IN_8_BITS, OPTIMIZERS
from gptworks.model.gpt import GPT
from gptworks.tensors import Expected
from gptworks.training.optim.base import Build, ByOwners, Group, Mesh


def parameter_groups(parameters: dict[str, nn.Parameter], train: TrainConfig) -> dict[str, list[Group]]:
    """Return parameter groups by optimizer. A group has parameters of one mesh and one kind: blocks' matrices, blocks'
    matrices with 8-bit moments, an untied head, other matrices outside the blocks (`embeddings`), or vectors and
    scalars."""
    members: dict[tuple[str, object], list[str]] = {(kind, None): [] for kind in RateFactors.model_fields}
    for name, parameter in parameters.items():
        kind = "head" if name.startswith("untied_head.") else "embeddings"
        kind = "vectors" if parameter.ndim < 2 else "matrices" if name.startswith("blocks.") else kind
        if train.optimizer_state == "int8" and kind == "matrices" and parameter.numel() >= LEAST_IN_8_BITS:
            kind = "in 8 bits"
        mesh = getattr(parameter, "device_mesh", None)  # a fused update needs tensors of one mesh
        members.setdefault((kind, mesh), []).append(name)
    groups: dict[str, list[Group]] = {}
    for (kind, _), names in members.items():
        if not names:
            continue
        by_muon = train.orthogonalizes and kind == "matrices"
        rate = train.muon_learning_rate if by_muon else train.learning_rate
        rate *= getattr(train.rate_factors, "matrices" if kind == "in 8 bits" else kind)
        updater = train.optimizer if kind == "matrices" else "adamw_int8" if kind == "in 8 bits" else "adamw"
        groups.setdefault(updater, []).append(
            {
                "names": names,
                "params": [parameters[name] for name in names],
                "lr": rate,
                "peak_lr": rate,
                "weight_decay": 0.0 if kind == "vectors" else train.weight_decay,
            }
        )
    return dict(sorted(groups.items()))  # alphabetical, so adamw comes first


class Optimizer:
    """Several torch optimizers behind one interface, which saves their state by parameter name."""

    def __init__(self, model: GPT, train: TrainConfig, mesh: Mesh = None) -> None:
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizers: dict[str, tuple[torch.optim.Optimizer, list[str]]] = {}  # with parameter names, by kind
        for kind, groups in parameter_groups(self.parameters, train).items():
            build: Build = import_module(f"gptworks.training.optim.{kind}").build
            names = [name for group in groups for name in group["names"]]
            self._optimizers[kind] = build(groups, train, mesh), names

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers, in alphabetical order of their names in `OPTIMIZERS`."""
        return [optimizer for optimizer, _ in self._optimizers.values()]

    def set_rate(self, factor: float) -> None:
        """Set every group's learning rate to `factor` times its peak."""
        for optimizer, _ in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = factor * group["peak_lr"]

    def step(self, scaler: torch.amp.GradScaler) -> None:
        """Update the parameters from their gradients, which are unscaled and finite, and then the scaler's factor."""
        for optimizer, _ in self._optimizers.values():
            optimizer.step()  # not `scaler.step`, which would check again that gradients are finite
        scaler.update()

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the gradients by the scaler's factor, if it is enabled."""
        if scaler.is_enabled():
            for optimizer, _ in self._optimizers.values():
                scaler.unscale_(optimizer)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state's tensors, named `parameter/key`."""
        return {
            f"{name}/{key}": value
            for optimizer, names in self._optimizers.values()
            for name in names
            for key, value in optimizer.state[self.parameters[name]].items()
        }

    @property
    def holders(self) -> dict[str, int]:
        """The only rank that keeps a tensor of the state, by the tensor's name; on other ranks, the tensor is on
        the meta device. Tensors that are not listed are sharded or replicated like their parameter."""
        return {
            f"{name}/{key}": ranks[self.parameters[name]]
            for kind, (optimizer, names) in self._optimizers.items()
            if isinstance(optimizer, ByOwners) and (ranks := optimizer.holders)
            for name in names
            for key in OPTIMIZERS[kind].state(tuple(self.parameters[name].shape))
        }

    def expected_tensors(self, stored: Collection[str], own: Collection[str] = ()) -> dict[str, Expected]:
        """Return the tensors that a checkpoint must hold: all of a parameter's state, or none before its first step.

        Args:
            stored: names of the stored tensors, `parameter/key`.
            own: names of other tensors stored with the state, `parameter/own`, each of its parameter's shape.
        """
        begun = {name.rpartition("/")[0] for name in stored if name not in own}
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        expected = {key: Expected(shapes[key.rpartition("/")[0]]) for key in own}
        for kind, (_, names) in self._optimizers.items():
            for name in filter(begun.__contains__, names):
                for key, kept in OPTIMIZERS[kind].state(shapes[name]).items():
                    least = -math.inf if kept.signed else 0
                    expected[f"{name}/{key}"] = Expected(kept.shape, getattr(torch, kept.dtype), least)
        return expected

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore tensors that `state_tensors` returned."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, slot = key.rpartition("/")
            by_name.setdefault(name, {})[slot] = value
        for optimizer, names in self._optimizers.values():
            state = {index: by_name[name] for index, name in enumerate(names) if name in by_name}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
