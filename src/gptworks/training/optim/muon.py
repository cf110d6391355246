"""Muon (Jordan et al., 2024), which orthogonalizes matrices of one shape in batches.

torch's Muon orthogonalizes one matrix at a time, which is up to twice as slow for many small matrices, as in a small
model or in experts (bench/passes.py). The arithmetic is the same (tests/test_optim.py); on most CPUs it runs in C++
(`gptworks.kernels.optimizer`).

Several ranks divide the matrices: a matrix's owner (`gptworks.training.distributed.shards`) orthogonalizes its update.

Each iteration of the orthogonalization maps every singular value x to a polynomial a x + b x³ + c x⁵.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gptworks.config import TrainConfig
from gptworks.config.optimizers import BY_MUON, MUON_TOGETHER
from gptworks.kernels.optimizer import muon_library, muon_updates
from gptworks.training.distributed.shards import Matrices, Owners, local, shape_of
from gptworks.training.optim.base import ByOwners, Group, Mesh, Update, decay, gradient_of

ROW_EPS = 1e-10
"""Lower bound of the divisors in NorMuon's row factors."""

Polynomial = tuple[float, float, float]
"""The coefficients a, b and c of a x + b x³ + c x⁵."""

JORDAN: Polynomial = (3.4445, -4.7750, 2.0315)
"""The polynomial of every iteration with `jordan`, chosen for its steep slope at zero: five iterations map [0.01, 1] to
[0.68, 1.13] (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks")."""

POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The polynomials of the iterations with `polar_express`; the last is also used in all later iterations. Each is the
closest to 1 on the interval to which the earlier ones map [0.001, 1] (Amsel et al., 2025, "The Polar Express", arXiv
2505.16932, implementation 1)."""

SAFETY = 1.01
"""Divisor of the argument of each polynomial in `POLAR_EXPRESS` except the last; the first polynomial's argument is
divided twice. Without this divisor, a singular value that rounding moves above the interval would grow (the same paper,
on finite precision)."""


def build(groups: list[Group], train: TrainConfig, mesh: Mesh, row_beta: float | None = None) -> torch.optim.Optimizer:
    """Make a Muon; with `row_beta`, make a NorMuon."""
    return Muon(
        groups,
        momentum=train.muon_momentum,
        orthogonalizing=polynomials(train.muon_coefficients, train.muon_iterations),
        cautious=train.cautious_weight_decay,
        row_beta=row_beta,
        mesh=mesh,
    )


def polynomials(kind: Literal["jordan", "polar_express"], n_iterations: int) -> tuple[Polynomial, ...]:
    """Return the polynomial of each of `n_iterations` iterations."""
    if kind == "jordan":
        return (JORDAN,) * n_iterations
    *varied, limit = POLAR_EXPRESS
    safe = [_of_divided(polynomial, SAFETY) for polynomial in varied]
    safe[0] = _of_divided(safe[0], SAFETY)  # a rounded Frobenius norm may be below the largest singular value
    return tuple(safe[:n_iterations]) + (limit,) * (n_iterations - len(safe))


def _of_divided(polynomial: Polynomial, divisor: float) -> Polynomial:
    """Return the coefficients of p(x / divisor) as a polynomial of x."""
    a, b, c = polynomial
    return a / divisor, b / divisor**3, c / divisor**5


class Muon(ByOwners, torch.optim.Muon):  # type: ignore[misc]  # `step` takes no closure
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
            row_beta: NorMuon's decay of the rows' second moments; None for plain Muon.
        """
        super().__init__(*arguments, **settings)
        self._polynomials, self._cautious, self._row_beta = orthogonalizing, cautious, row_beta
        self.mesh = mesh

    @staticmethod
    def batches(matrices: Matrices) -> Iterator[Matrices]:
        """Yield lists of matrices of one shape and sharding, each of at most `MUON_TOGETHER` elements or one matrix."""
        by_shape: dict[Any, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault((matrix.shape, getattr(matrix, "placements", None)), []).append(matrix)
        for alike in by_shape.values():
            n = max(1, MUON_TOGETHER // alike[0].numel())
            yield from (alike[i : i + n] for i in range(0, len(alike), n))

    def _turn(self, turn: Sequence[Matrices], owners: Owners, group: Group) -> None:
        for parameter in chain(*turn):  # all ranks keep averages of their parts: a run resumes on any number of ranks
            self._average(parameter).lerp_(gradient_of(parameter), 1 - group["momentum"])
        super()._turn(turn, owners, group)

    def _updates(self, owned: Sequence[Matrices], owners: Owners, group: Group) -> list[Update]:
        mine = owned[owners.part]
        if owners.n_parts == 1:
            whole = self._orthogonalized([gradient_of(p) for p in mine], [self._average(p) for p in mine], group)
        else:
            whole = owners.gather(owned, lambda p: gradient_of(p).lerp(self._average(p), group["momentum"]).bfloat16())
            if mine:
                # `matrices` serve as gradients and as averages: the lerp of two equal tensors returns the same values.
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
