"""Muon (Jordan et al., 2024) with the matrices of one shape orthogonalized together.

torch's Muon takes one matrix at a time, which is up to twice as slow for many small ones, as in a small model or in
experts (bench/passes.py). The arithmetic is the same (tests/test_optim.py); on most CPUs it is in C++
(`gptworks.kernels.optimizer`).

Ranks with the same model divide the matrices: each orthogonalizes its part, and all receive every update.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gptworks.config import TrainConfig
from gptworks.config.optimizers import MUON_TOGETHER as TOGETHER
from gptworks.kernels.optimizer import muon_library, muon_updates
from gptworks.training.optim.base import Group, Replicas, decay
from gptworks.training.optim.polynomials import Polynomial, polynomials

ROW_EPS = 1e-10
"""Smallest divisor in NorMuon's row factors."""


def build(
    groups: list[Group], train: TrainConfig, replicas: Replicas, row_beta: float | None = None
) -> torch.optim.Optimizer:
    """A new Muon; with `row_beta`, a new NorMuon."""
    return Muon(
        groups,
        momentum=train.muon_momentum,
        orthogonalizing=polynomials(train.muon_coefficients, train.muon_iterations),
        cautious=train.cautious_weight_decay,
        row_beta=row_beta,
        replicas=replicas,
    )


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with its default settings, Nesterov's momentum included."""

    def __init__(
        self,
        *arguments: Any,
        orthogonalizing: tuple[Polynomial, ...] = polynomials("jordan", 5),
        cautious: bool = False,
        row_beta: float | None = None,
        replicas: distributed.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            orthogonalizing: the polynomial of each iteration.
            cautious: decay as in `gptworks.training.optim.base`.
            row_beta: decay of the second moments of NorMuon's rows; None: plain Muon.
            replicas: the ranks with the same parameters and gradients, which step together; None: only this rank.
        """
        super().__init__(*arguments, **settings)
        self._polynomials, self._cautious, self._row_beta = orthogonalizing, cautious, row_beta
        self._replicas = replicas
        self._rank, self._n_ranks = (0, 1) if replicas is None else (replicas.rank(), replicas.size())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients; the same bits on all ranks, since one computes each update."""
        assert closure is None, "no closure is used here"
        for group in self.param_groups:
            shares = divided([p for p in group["params"] if p.grad is not None], self._n_ranks)
            for turn in zip_longest(*map(batches, shares)):
                self._turn(turn, group)

    def _turn(self, turn: tuple[list[nn.Parameter] | None, ...], group: dict[str, Any]) -> None:
        """Update one batch of matrices per rank (None: no more). Holds this rank's updates and one other rank's."""
        mine = turn[self._rank]
        updates = None if mine is None else self._updates(mine, group)
        for rank, matrices in enumerate(turn):
            if matrices is None:
                continue
            if rank == self._rank:
                assert updates is not None
                self._send(updates, rank)
                self._apply(matrices, updates, group)
            else:
                for parameter in matrices:
                    self._momentum(parameter, group["momentum"])
                theirs = torch.empty(len(matrices), *matrices[0].shape, dtype=torch.bfloat16, device=matrices[0].device)
                self._send(theirs, rank)
                self._apply(matrices, theirs, group)
                del theirs  # free it before the next rank's

    def _send(self, updates: Tensor, rank: int) -> None:
        """Broadcast a rank's updates."""
        if self._replicas is not None:
            distributed.broadcast(updates.view(torch.uint8), group=self._replicas, group_src=rank)

    def _updates(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> Tensor:
        """Orthogonalized Nesterov direction of each matrix, [N, rows, columns] in bfloat16."""
        gradients = [parameter.grad for parameter in matrices if parameter.grad is not None]
        momenta = [self._momentum(parameter, group["momentum"]) for parameter in matrices]
        if (library := muon_library([*gradients, *momenta])) is not None:
            return muon_updates(library, gradients, momenta, group["momentum"], self._polynomials, group["eps"])
        updates = orthogonalized(directions(gradients, momenta, group["momentum"]), self._polynomials, group["eps"])
        return updates if self._replicas is None else updates.contiguous()  # collectives need contiguous tensors

    def _apply(self, matrices: list[nn.Parameter], updates: Tensor, group: dict[str, Any]) -> None:
        rows, columns = matrices[0].shape
        rate = group["lr"] * max(1, rows / columns) ** 0.5
        for parameter, update in zip(matrices, updates, strict=True):
            decay(parameter, update, group["lr"] * group["weight_decay"], self._cautious)
            if self._row_beta is None:
                parameter.add_(update, alpha=-rate)
            else:
                parameter.add_(update * self._row_factors(parameter, update, self._row_beta)[:, None], alpha=-rate)

    def _row_factors(self, parameter: nn.Parameter, update: Tensor, beta: float) -> Tensor:
        """The factor of each row of an orthogonal update [rows, columns], [rows] in float32: the inverse root of the
        running average of its mean square, scaled to keep the update's norm (Li et al., 2025, "NorMuon", arXiv
        2510.05491, algorithm 1; the norm as in the authors' code, so that Muon's rates hold).
        """
        norms = torch.linalg.vector_norm(update, dim=1, dtype=torch.float32)
        state = self.state[parameter]
        if "row_second_moment" not in state:
            state["row_second_moment"] = torch.zeros_like(norms)
        average: Tensor = state["row_second_moment"].lerp_(norms.square() / update.size(1), 1 - beta)
        factors: Tensor = 1 / (average.sqrt() + ROW_EPS)
        return factors.mul_(norms.norm() / (norms * factors).norm().clamp(min=ROW_EPS))

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """The parameter's momentum, updated with this step's gradient. Every rank keeps it for every matrix, so that
        any rank can save it and any number of ranks can resume with it."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer.lerp_(parameter.grad, 1 - momentum)


def directions(gradients: list[Tensor], momenta: list[Tensor], momentum: float) -> Tensor:
    """The directions of Nesterov's momentum, [N, rows, columns] in bfloat16."""
    made = torch.empty(len(gradients), *gradients[0].shape, dtype=torch.bfloat16, device=gradients[0].device)
    for gradient, average, direction in zip(gradients, momenta, made, strict=True):
        direction.copy_(gradient.lerp(average, momentum))
    return made


def orthogonalized(x: Tensor, quintics: tuple[Polynomial, ...], eps: float) -> Tensor:
    """Approximate U Vᵀ of each matrix U S Vᵀ by Newton–Schulz iterations: divide by the Frobenius norm, then apply one
    polynomial after the other to S.

    x [N, rows, columns], bfloat16, is overwritten. Returns the same shape.
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


def batches(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Lists of matrices of one shape: at most `TOGETHER` elements in all, or a single larger matrix."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for shape, alike in by_shape.items():
        n = max(1, TOGETHER // shape.numel())
        yield from (alike[i : i + n] for i in range(0, len(alike), n))


def divided(matrices: list[nn.Parameter], n_ranks: int) -> list[list[nn.Parameter]]:
    """The matrices of each rank, about equal in work: the costliest first, each to the rank with the least work.

    All ranks divide alike, since only shapes and order matter. A single rank gets all matrices, in the given order.
    """
    if n_ranks == 1:
        return [matrices]
    shares: list[list[nn.Parameter]] = [[] for _ in range(n_ranks)]
    work = [0] * n_ranks
    for matrix in sorted(matrices, key=products, reverse=True):  # ties keep their order
        least = work.index(min(work))
        shares[least].append(matrix)
        work[least] += products(matrix)
    return shares


def products(matrix: Tensor) -> int:
    """Multiplications of one iteration of `orthogonalized` on a matrix [rows, columns]: X Xᵀ, its square, times X."""
    short, long = sorted(matrix.shape)
    return short * short * (2 * long + short)
