"""Muon (Jordan et al., 2024), which orthogonalizes matrices of one shape in batches.

torch's Muon orthogonalizes one matrix at a time, which is up to twice as slow for many small matrices, as in a small
model or in experts (bench/passes.py). The arithmetic is the same (tests/test_optim.py); on most CPUs it runs in C++
(`gptworks.kernels.optimizer`).

Several ranks divide the matrices: a matrix's owner (`gptworks.training.distributed.shards`) orthogonalizes its update.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gptworks.config import TrainConfig
from gptworks.config.optimizers import BY_MUON
from gptworks.config.optimizers import MUON_TOGETHER as TOGETHER
from gptworks.kernels.optimizer import muon_library, muon_updates
from gptworks.training.distributed.shards import Matrices, Owners, local, shape_of
from gptworks.training.optim.base import ByOwners, Group, Mesh, Update, decay, gradient_of
from gptworks.training.optim.polynomials import Polynomial, polynomials

ROW_EPS = 1e-10
"""Lower bound of the divisors in NorMuon's row factors."""


def build(groups: list[Group], train: TrainConfig, mesh: Mesh, row_beta: float | None = None) -> torch.optim.Optimizer:
    """Make a Muon, or, with `row_beta`, a NorMuon."""
    return Muon(
        groups,
        momentum=train.muon_momentum,
        orthogonalizing=polynomials(train.muon_coefficients, train.muon_iterations),
        cautious=train.cautious_weight_decay,
        row_beta=row_beta,
        mesh=mesh,
    )


class Muon(ByOwners, torch.optim.Muon):
    """`torch.optim.Muon` with its default settings, Nesterov's momentum included.

    An update is this rank's parts of orthogonal matrices, [N, rows, columns] in bfloat16; for NorMuon also the norms of
    all rows of the whole matrices, [N, rows] in float32.
    """

    ownership = BY_MUON

    def __init__(
        self,
        *arguments: Any,
        orthogonalizing: tuple[Polynomial, ...] = polynomials("jordan", 5),
        cautious: bool = False,
        row_beta: float | None = None,
        mesh: Mesh = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            orthogonalizing: the polynomials of the iterations, in order.
            cautious: whether weight decay is cautious (see `gptworks.training.optim.base`).
            row_beta: NorMuon's decay of the rows' second moments; None: plain Muon.
            mesh: the ranks that hold the parameters, whole or in parts; None: only this rank.
        """
        super().__init__(*arguments, **settings)
        self._polynomials, self._cautious, self._row_beta = orthogonalizing, cautious, row_beta
        self.mesh = mesh

    def _batches(self, matrices: Matrices) -> Iterator[Matrices]:
        return batches(matrices)

    def _turn(self, turn: Sequence[Matrices], owners: Owners, group: Group) -> None:
        for parameter in chain(*turn):
            self._add_to_average(parameter, group["momentum"])
        super()._turn(turn, owners, group)

    def _updates(self, owned: Sequence[Matrices], owners: Owners, group: Group) -> list[Update]:
        mine = owned[owners.part]
        if owners.n_parts == 1:
            whole = self._orthogonalized([gradient_of(p) for p in mine], [self._average(p) for p in mine], group)
        else:
            whole = owners.gather(owned, lambda p: gradient_of(p).lerp(self._average(p), group["momentum"]).bfloat16())
            if mine:
                # These serve as gradients and as averages: the lerp of two equal tensors returns the same values.
                matrices = list(whole.float())
                del whole
                whole = self._orthogonalized(matrices, matrices, group)
                del matrices
        parts = owners.send(owned, whole)
        if self._row_beta is None:
            return [(part,) for part in parts]
        norms = torch.linalg.vector_norm(whole, dim=2, dtype=torch.float32)
        return list(zip(parts, owners.send_rows(owned, norms), strict=True))

    def _no_update(self, matrices: Matrices, owners: Owners) -> Update:
        n, like = len(matrices), local(matrices[0])
        part = like.new_empty(n, *shape_of(owners.part_of(matrices[0])), dtype=torch.bfloat16)
        return (part,) if self._row_beta is None else (part, like.new_empty(n, matrices[0].size(0)))

    def _orthogonalized(self, gradients: list[Tensor], averages: list[Tensor], group: Group) -> Tensor:
        """Return orthogonalized Nesterov directions of N matrices, bfloat16 [N, rows, columns]. May empty the lists."""
        if (library := muon_library([*gradients, *averages])) is not None:
            return muon_updates(library, gradients, averages, group["momentum"], self._polynomials, group["eps"])
        made = [directions(gradients, averages, group["momentum"])]  # in a list: `pop` below leaves no reference
        gradients.clear()  # frees gathered matrices before the products
        averages.clear()
        return orthogonalized(made.pop(), self._polynomials, group["eps"])

    def _apply(self, matrices: Matrices, update: Update, owners: Owners, group: Group) -> None:
        rows, columns = matrices[0].shape
        rate = group["lr"] * max(1, rows / columns) ** 0.5
        for parameter, *values in zip(matrices, *update, strict=True):
            weights, orthogonal = local(parameter), values[0]
            decay(weights, orthogonal, group["lr"] * group["weight_decay"], self._cautious)
            if self._row_beta is not None:
                here, _ = owners.part_of(parameter)
                orthogonal = orthogonal * self._row_factors(parameter, values[1], self._row_beta)[here, None]
            weights.add_(orthogonal, alpha=-rate)

    def _row_factors(self, parameter: nn.Parameter, norms: Tensor, beta: float) -> Tensor:
        """Add an orthogonal update to the running averages of its rows' mean squares; return each row's factor, float32
        [rows] (Li et al., 2025, "NorMuon", arXiv 2510.05491, algorithm 1): one over the average's root. The factors are
        scaled to keep the update's norm, as in the authors' code, so that Muon's learning rates apply.

        Args:
            norms: the norm of each row of the update, float32 [rows].
        """
        state = self.state[parameter]
        if "row_second_moment" not in state:
            state["row_second_moment"] = torch.zeros_like(norms)
        average: Tensor = state["row_second_moment"].lerp_(norms.square() / parameter.size(1), 1 - beta)
        factors: Tensor = 1 / (average.sqrt() + ROW_EPS)
        return factors.mul_(norms.norm() / (norms * factors).norm().clamp(min=ROW_EPS))

    def _average(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of the running average of the parameter's gradients, which starts at zero."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return local(state["momentum_buffer"])

    def _add_to_average(self, parameter: nn.Parameter, momentum: float) -> None:
        """Add this step's gradient to the running average. Every rank keeps the average of its part of every matrix,
        so a run can resume on any number of ranks."""
        self._average(parameter).lerp_(gradient_of(parameter), 1 - momentum)


def directions(gradients: list[Tensor], momenta: list[Tensor], momentum: float) -> Tensor:
    """Return the directions of Nesterov's momentum, bfloat16 [N, rows, columns]."""
    made = torch.empty(len(gradients), *gradients[0].shape, dtype=torch.bfloat16, device=gradients[0].device)
    for gradient, average, direction in zip(gradients, momenta, made, strict=True):
        direction.copy_(gradient.lerp(average, momentum))
    return made


def orthogonalized(x: Tensor, quintics: tuple[Polynomial, ...], eps: float) -> Tensor:
    """Return approximations of U Vᵀ for matrices x = U S Vᵀ, bfloat16 [N, rows, columns], by Newton–Schulz iterations:
    divide x by the Frobenius norm, then apply one polynomial after another to S. Overwrites x.
    """
    x.div_(x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None])
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    for a, b, c in quintics:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def batches(matrices: Matrices) -> Iterator[Matrices]:
    """Yield lists of matrices with the same shape and shards: at most `TOGETHER` elements, or one larger matrix."""
    by_shape: dict[Any, list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault((matrix.shape, getattr(matrix, "placements", None)), []).append(matrix)
    for alike in by_shape.values():
        n = max(1, TOGETHER // alike[0].numel())
        yield from (alike[i : i + n] for i in range(0, len(alike), n))
