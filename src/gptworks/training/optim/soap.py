"""SOAP (Vyas et al., 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321, algorithms 3 and 4):
Adam in the basis of the eigenvectors of Shampoo's two preconditioners, for a matrix with gradient G [rows, columns]:

    left, right               running averages of G Gᵀ and Gᵀ G, decay β2
    left_basis, right_basis   eigenvectors of left and right, in columns, refreshed every few steps
    exp_avg                   running average of G, as in Adam, decay β1
    exp_avg_sq                running average of (left_basisᵀ G right_basis)², by element, decay β2

As in the authors' code, a matrix's first step only initializes its state and leaves the matrix unchanged.

A matrix's owner keeps all of its state; on other ranks, the same tensors are on the meta device, without memory.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from gptworks.config import TrainConfig
from gptworks.config.optimizers import BY_SOAP, OPTIMIZERS
from gptworks.kernels.dispatch import product
from gptworks.training.distributed.shards import Matrices, Owners, local, shape_of
from gptworks.training.optim.base import ByOwners, Group, Mesh, Update, decay, gradient_of, restore_state

SIDES = ("left", "right")

_IN_FULL = "SOAP computes its bases and preconditioners in the gradients' dtype"


def build(groups: list[Group], train: TrainConfig, mesh: Mesh) -> torch.optim.Optimizer:
    """Make a SOAP."""
    return SOAP(groups, train.betas, train.eps, train.soap_frequency, train.cautious_weight_decay, mesh)


class SOAP(ByOwners):
    """SOAP for matrices, computed in their dtype, with decoupled weight decay."""

    ownership = BY_SOAP
    expected_on_cuda: ClassVar = {
        ("host read", "begun"): "eigenvectors, in a matrix's first step",
        ("float32 product", "_direction"): _IN_FULL,
        ("float32 product", "begun"): _IN_FULL,
        ("float32 product", "refresh"): _IN_FULL,
    }

    def __init__(
        self, groups: list[Group], betas: tuple[float, float], eps: float, frequency: int, cautious: bool, mesh: Mesh
    ) -> None:
        """`frequency`: steps from one refresh of the bases to the next."""
        super().__init__(groups, {"betas": betas, "eps": eps})
        self._frequency, self._cautious, self.mesh = frequency, cautious, mesh

    def _turn(self, turn: Sequence[Matrices], owners: Owners, group: Group) -> None:
        new = [[matrix for matrix in matrices if not self.state[matrix]] for matrices in turn]
        self._begin(new, owners, group["betas"][1])
        old = [[] if first else matrices for first, matrices in zip(new, turn, strict=True)]
        super()._turn(old, owners, group)
        for matrix in old[owners.number]:  # refresh only now, when the buffers of the exchange are freed
            state = self.state[matrix]
            if int(state["step"].item()) % self._frequency == 0:
                for axis, side in enumerate(SIDES):
                    refresh(state[side], state[f"{side}_basis"], state["exp_avg_sq"], axis)

    def _begin(self, turn: Sequence[Matrices], owners: Owners, beta: float) -> None:
        """Initialize the state of matrices from their first gradient; `turn` has at most one matrix per owner."""
        for matrix in chain(*turn):
            self.state[matrix] = absent(matrix)
        owned = turn[owners.copy * owners.n_parts :][: owners.n_parts]
        if any(owned):
            gradients = owners.gather(owned, gradient_of)
            for matrix in owned[owners.part]:
                self.state[matrix] = begun(gradients[0], beta)

    def _updates(self, owned: Sequence[Matrices], owners: Owners, group: Group) -> list[Update]:
        whole = owners.gather(owned, gradient_of)
        for matrix in owned[owners.part]:
            whole = self._direction(whole[0], self.state[matrix], group)[None]
        return [(part,) for part in owners.send(owned, whole)]

    def _direction(self, gradient: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        """Add a gradient [rows, columns] to a matrix's state; return the matrix's update [rows, columns], to which
        `_apply` applies the learning rate."""
        beta1, beta2 = group["betas"]
        left, right = (state[f"{side}_basis"] for side in SIDES)
        state["step"] += 1
        n_steps = int(state["step"].item())

        turned = product(left.mT, gradient)
        turned = product(turned, right)
        state["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        del turned
        update = product(left.mT, state["exp_avg"].lerp_(gradient, 1 - beta1))
        update = product(update, right)
        root = (1 - beta2**n_steps) ** 0.5
        update.div_(state["exp_avg_sq"].sqrt().div_(root).add_(group["eps"])).div_(1 - beta1**n_steps)
        update = product(left, update)
        update = product(update, right.mT)

        state["left"].lerp_(product(gradient, gradient.mT), 1 - beta2)
        state["right"].lerp_(product(gradient.mT, gradient), 1 - beta2)
        return update

    def _no_update(self, matrices: Matrices, owners: Owners) -> Update:
        return (local(matrices[0]).new_empty(len(matrices), *shape_of(owners.part_of(matrices[0]))),)

    def _apply(self, matrices: Matrices, update: Update, owners: Owners, group: Group) -> None:
        for parameter, part in zip(matrices, *update, strict=True):
            weights = local(parameter)
            decay(weights, part, group["lr"] * group["weight_decay"], self._cautious)
            weights.add_(part, alpha=-group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        restore_state(self, state_dict["state"])


def begun(gradient: Tensor, beta: float) -> dict[str, Tensor]:
    """Return the state of a matrix after its first gradient [rows, columns]; `beta` is the preconditioners' decay."""
    state = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
    grams = product(gradient, gradient.mT), product(gradient.mT, gradient)
    for side, gram in zip(SIDES, grams, strict=True):
        state[side] = gram.mul_(1 - beta)
        state[f"{side}_basis"] = torch.linalg.eigh(gram).eigenvectors.flip(1).contiguous()  # by descending eigenvalue
    return state


def absent(matrix: Tensor) -> dict[str, Tensor]:
    """Return the state of a matrix [rows, columns] that another rank owns: tensors on the meta device."""
    kept = OPTIMIZERS["soap"].state(tuple(matrix.shape))
    return {key: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta") for key, one in kept.items()}


def refresh(average: Tensor, basis: Tensor, squares: Tensor, axis: int) -> None:
    """Refresh a basis by one power iteration towards the eigenvectors of `average` [n, n], then QR (algorithm 4).

    Args:
        basis: the basis of the last refresh, in columns [n, n]; overwritten.
        squares: the second moments in that basis [rows, columns]; reordered along `axis` like the basis vectors, by
            descending eigenvalue.
    """
    turned = product(average, basis)
    order = (basis * turned).sum(dim=0).argsort(descending=True, stable=True)
    squares.copy_(squares.index_select(axis, order))
    basis.copy_(torch.linalg.qr(turned.index_select(1, order)).Q)
