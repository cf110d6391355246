"""Common code of optimizers: types, updates of matrices that ranks divide among them, and decoupled weight decay.

Cautious decay affects only the elements that the update moves towards zero (Chen et al., 2025, "Cautious Weight Decay",
arXiv 2510.12402, algorithm 1):

    weight -= rate · (update + decay · weight where update · weight ≥ 0)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gptworks.config import TrainConfig
from gptworks.config.optimizers import AT_ONCE, CPU_AT_ONCE, Ownership
from gptworks.training.distributed.shards import Matrices, Owners, divided_among_owners, local

Group = dict[str, Any]
"""A parameter group of torch's optimizers: parameters that share a peak learning rate and a weight decay."""

Mesh = DeviceMesh | None
"""The ranks that hold the model, in a mesh with dimensions data and tensor; None if only this rank holds it."""

Build = Callable[[list[Group], TrainConfig, Mesh], torch.optim.Optimizer]
"""Type of each optimizer file's function `build`, which makes the optimizer from parameter groups and settings."""

Update = tuple[Tensor, ...]
"""This rank's parts of the updates of N matrices of one owner, [N, rows, columns]; optionally followed by tensors that
each rank gets whole."""


class ByOwners(torch.optim.Optimizer):
    """An optimizer of whole matrices, which ranks divide: each matrix has an owner, which computes its update (see
    `gptworks.training.distributed.shards`). Ranks with copies of a parameter get the same bits."""

    ownership: Ownership
    """How the ranks divide the matrices."""
    expected_on_cuda: ClassVar[Mapping[tuple[str, str], str]] = {}
    """Intended findings of `gptworks.training.rehearsal.watched`: (kind of finding, function) → reason."""
    mesh: Mesh

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group, divided in zip(self.param_groups, self._divided, strict=True):
            for owners, shares in divided:
                learning = ([matrix for matrix in share if matrix.grad is not None] for share in shares)
                for turn in zip_longest(*map(self.batches, learning), fillvalue=()):
                    self._turn(turn, owners, group)

    @property
    def holders(self) -> dict[nn.Parameter, int]:
        """The only rank that keeps a matrix's state, by matrix; empty if each rank keeps the state of its parts."""
        return {
            matrix: owners.ranks[number]
            for owners, shares in chain(*self._divided)
            for number, share in enumerate(shares)
            for matrix in share
            if self.ownership.keeps_state
        }

    @cached_property
    def _divided(self) -> list[list[tuple[Owners, list[list[nn.Parameter]]]]]:
        """For each group, the matrices of each owner. The division is fixed, because an owner may keep state."""
        return [
            list(divided_among_owners(group["params"], self.mesh, self.ownership.work)) for group in self.param_groups
        ]

    @staticmethod
    def batches(matrices: Matrices) -> Iterator[Matrices]:
        """Split one owner's matrices into lists whose updates the owner computes together."""
        return ([matrix] for matrix in matrices)

    def _turn(self, turn: Sequence[Matrices], owners: Owners, group: Group) -> None:
        """Update one batch of matrices, which may be empty, per owner. Memory holds this rank's updates and
        one other update."""
        copies = [turn[i : i + owners.n_parts] for i in range(0, len(turn), owners.n_parts)]
        owned = copies[owners.copy]
        mine = self._updates(owned, owners, group) if any(owned) else []
        for copy, owned in enumerate(copies):
            for number, matrices in enumerate(owned):
                if matrices:
                    update = mine[number] if copy == owners.copy else self._no_update(matrices, owners)
                    for tensor in update:
                        owners.broadcast(tensor, copy)
                    self._apply(matrices, update, owners, group)

    def _updates(self, owned: Sequence[Matrices], owners: Owners, group: Group) -> list[Update]:
        """Return this rank's parts of the updates of `owned`, the matrices of each owner in this rank's copy of the
        model. At least one owner has matrices."""
        raise NotImplementedError

    def _no_update(self, matrices: Matrices, owners: Owners) -> Update:
        """Return empty tensors in which to receive an update whose owner is in another copy."""
        raise NotImplementedError

    def _apply(self, matrices: Matrices, update: Update, owners: Owners, group: Group) -> None:
        """Apply an update to this rank's parts of the matrices."""
        raise NotImplementedError


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of the parameter's gradient."""
    assert parameter.grad is not None
    return local(parameter.grad)


def restore_state(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Tensor]]) -> None:
    """Restore state by parameter index. Tensors keep their dtypes; torch's `load_state_dict` would cast them.

    Tensors are copied to the parameter's device, except step counts and meta tensors. Other ranks keep the state of
    meta tensors.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()  # also drops state that the checkpoint lacks
    for index, tensors in state.items():
        device = parameters[index].device
        optimizer.state[parameters[index]] = {
            key: value.clone() if key == "step" or value.is_meta else value.to(device, copy=True)
            for key, value in tensors.items()
        }


def slices(parameter: Tensor) -> Iterator[slice]:
    """Return the slices of a flattened parameter to update one after another, which saves scratch memory."""
    n, at_once = parameter.numel(), CPU_AT_ONCE if parameter.device.type == "cpu" else AT_ONCE
    return (slice(start, min(start + at_once, n)) for start in range(0, n, at_once))


def decay(weights: Tensor, update: Tensor, amount: float, cautious: bool) -> None:
    """Multiply weights by 1 - `amount` before an update; if `cautious`, only those that the update moves towards zero.

    Args:
        update: the tensor, of the weights' shape, that is multiplied by the learning rate and then subtracted.
        amount: learning rate times weight decay.
    """
    if cautious:
        decay_where_agreed(weights, update.to(weights.dtype, copy=True), amount)
    else:
        weights.mul_(1 - amount)


def decay_where_agreed(weights: Tensor, update: Tensor, amount: float) -> None:
    """Multiply by 1 - `amount` the weights whose product with their update is not negative. Overwrites `update`."""
    weights.mul_(update.sign_().mul_(weights).ge_(0).mul_(-amount).add_(1))
