"""Statistics of a checkpoint's weights, which are read one part of one tensor at a time.

The weights are those that the model computes with: quantized tensors are dequantized, and adapters merged.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptworks.checkpoint import Checkpoint
from gptworks.config import LoRAConfig, Recipe
from gptworks.errors import UserError
from gptworks.interpret.hooks import Check, never
from gptworks.planning.params import ParameterCount, Shape, count_parameters
from gptworks.quantize.formats import GROUP, dequantize, empty, kind_of
from gptworks.tensors import Expected, Stored, open_tensors, stored_tensors

AT_ONCE = 2**18
"""Approximate number of weights to read at once."""

BINS = 100

MOST_TENSORS = 200_000
"""Limit on the number of tensors of a model whose weights can be shown."""

MOST_SIDE = 4096
"""Limit on the shorter side of a matrix for computing singular values, which takes 20 s at the limit on one core."""

MOST_PRODUCTS = 2**38
"""Limit on the multiplications for a matrix times its transpose; one core takes a minute at the limit."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StoredWeights:
    """A tensor of a checkpoint. Its header has been checked; its elements have not been read."""

    path: Path
    name: str
    shape: Shape
    kind: str
    """The storage format: fp32, or in a quantized run bf16, fp16, int8 or int4."""
    stored_bytes: int
    """Bytes of the tensor in the file, including its scales but not its adapter."""
    adapter: LoRAConfig | None
    """Settings of the LoRA matrices that are added to the tensor; None without an adapter."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def parts(self, check: Check = never) -> Iterator[Tensor]:
        """Yield the whole tensor in float32, part by part: whole rows of a tall matrix, whole columns of a wide one."""
        with open_tensors(self.path) as opened:
            for rows, columns in _cuts(*self.shape):
                check()
                yield self._values(opened, rows, columns)

    def _values(self, opened: Callable[[str], Any], rows: slice, columns: slice) -> Tensor:
        scale: Tensor | None = None
        if self.kind == "int4":
            halves = slice(columns.start // 2, columns.stop // 2)
            weight = opened(self.name)[rows, halves]
            scale = opened(_scale(self.name))[rows, columns.start // GROUP : columns.stop // GROUP]
        else:
            weight = opened(self.name)[(rows, columns)[: len(self.shape)]]
            scale = opened(_scale(self.name))[rows] if self.kind == "int8" else None
        values = dequantize(weight, scale, torch.float32)
        if self.adapter is None:
            return values
        a, b = (opened(name) for name in _adapter_names(self.name))
        product: Tensor = b[rows].double() @ a[:, columns].double()
        return (values.double() + self.adapter.scale * product).float()


def _cuts(n_rows: int, n_columns: int = 1) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and columns that cut a matrix along its longer side, never inside an int4 group. A vector is
    cut like a matrix with one column."""
    if n_rows >= n_columns:
        step = max(1, AT_ONCE // n_columns)
        for first in range(0, n_rows, step):
            yield slice(first, min(n_rows, first + step)), slice(0, n_columns)
        return
    step = max(1, AT_ONCE // n_rows // GROUP) * GROUP
    for first in range(0, n_columns, step):
        yield slice(0, n_rows), slice(first, min(n_columns, first + step))


def count_tensors(recipe: Recipe) -> ParameterCount:
    """Return the parameter count of a run's model. Raises a UserError if the model has too many tensors to be shown, or
    its vocabulary is not known."""
    count = count_parameters(recipe.model)
    n_tensors = sum(group.repeats * len(group.tensors) for group in count.groups.values())
    if n_tensors > MOST_TENSORS:
        raise UserError(
            f"the model has {n_tensors:,} tensors, and at most {MOST_TENSORS:,} can be shown: lower "
            f"n_layers={recipe.model.n_layers} or n_experts={recipe.model.n_experts}."
        )
    return count


def stored_weights(checkpoint: Checkpoint, recipe: Recipe, names: Sequence[str]) -> list[StoredWeights]:
    """Return the tensors `names` of a run's model in one of its checkpoints. Raises a UserError if the model lacks a
    tensor, or if the file is missing or damaged, or does not match the recipe."""
    shapes, path = count_tensors(recipe).shapes, checkpoint.folder / "model.safetensors"
    for name in names:
        if name not in shapes:
            raise UserError(f"the model has no tensor `{name[:128]}`: `blocks.0.attention.query.weight` is one, say.")
    stored = stored_tensors(path)
    return [_stored(path, stored, recipe, name, shapes[name]) for name in names]


def _stored(path: Path, stored: dict[str, Stored], recipe: Recipe, name: str, shape: Shape) -> StoredWeights:
    kind = kind_of(stored[name].dtype, shape[1]) if name in stored and len(shape) == 2 else None
    expected = {name: Expected(shape)}
    if kind is not None:
        with torch.device("meta"):
            weight, scale = empty(kind, *shape)
        expected = {name: Expected.like(weight)} | ({} if scale is None else {_scale(name): Expected.like(scale)})
    own = list(expected)
    a, b = _adapter_names(name)
    adapter = recipe.adapter if a in stored else None
    if adapter is not None:
        expected |= {a: Expected((adapter.rank, shape[1])), b: Expected((shape[0], adapter.rank))}
    for one, due in expected.items():
        found = stored.get(one)
        if not due.fits(found):
            raise UserError(
                f"{path} does not hold the recipe's model: `{one}` is {found or 'missing'} there and {due} in the "
                f"recipe's model. Restore the file from a copy, or use another checkpoint."
            )
    n_bytes = sum(math.prod(expected[one].shape) * expected[one].dtype.itemsize for one in own)
    return StoredWeights(path, name, shape, kind or "fp32", n_bytes, adapter)


def _scale(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def _adapter_names(name: str) -> tuple[str, str]:
    module = name.rpartition(".")[0]
    return f"{module}.lora_a", f"{module}.lora_b"


@dataclass(frozen=True)
class Moments:
    """Numbers of weights, and moments of the finite weights. Moments are None if no weight is finite."""

    size: int
    n_zero: int
    n_not_finite: int
    mean: float | None
    std: float | None
    """Population standard deviation of the finite weights: the sum of squares is divided by their number."""
    least: float | None
    most: float | None


def moments(weights: StoredWeights, check: Check = never) -> Moments:
    """Compute the moments of a tensor in one pass in float64, merging sums of squares as Chan et al. (1983) do."""
    n, n_zero, n_finite, mean, squares = 0, 0, 0, 0.0, 0.0
    least, most = math.inf, -math.inf
    for part in weights.parts(check):
        values = part.double().numpy().ravel()
        n, n_zero = n + values.size, n_zero + int((values == 0).sum())
        values = values[np.isfinite(values)]
        if not values.size:
            continue
        own = float(values.mean())
        squares += float(np.square(values - own).sum()) + (own - mean) ** 2 * n_finite * values.size / (
            n_finite + values.size
        )
        n_finite += values.size
        mean += (own - mean) * values.size / n_finite
        least, most = min(least, float(values.min())), max(most, float(values.max()))
    if not n_finite:
        return Moments(n, n_zero, n, None, None, None, None)
    return Moments(n, n_zero, n - n_finite, mean, math.sqrt(squares / n_finite), least, most)


def bin_edges(of: Sequence[Moments]) -> Floats:
    """Return edges of equally wide bins over the finite weights of all tensors; empty without finite weights."""
    ends = [(one.least, one.most) for one in of if one.least is not None and one.most is not None]
    if not ends:
        return np.empty(0)
    span = min(least for least, _ in ends), max(most for _, most in ends)
    return np.histogram_bin_edges(np.empty(0), BINS, span)


def histogram(weights: StoredWeights, edges: Floats, check: Check = never) -> NDArray[np.int64]:
    """Count the finite weights in each bin; the last bin includes its upper edge."""
    counts = np.zeros(max(0, len(edges) - 1), np.int64)
    for part in weights.parts(check):
        values = part.double().numpy().ravel()
        if len(counts):
            counts += np.histogram(values[np.isfinite(values)], len(counts), (edges[0], edges[-1]))[0]
    return counts


def relative_change(before: StoredWeights, after: StoredWeights, check: Check = never) -> float | None:
    """Return ‖after − before‖ / ‖before‖; None if ‖before‖ is zero or a weight is not finite."""
    changed, whole = 0.0, 0.0
    for old, new in zip(before.parts(check), after.parts(check), strict=True):
        changed += float((new.double() - old.double()).square().sum())
        whole += float(old.double().square().sum())
    ratio = changed / whole if whole else math.nan
    return math.sqrt(ratio) if math.isfinite(ratio) else None


@dataclass(frozen=True)
class Spectrum:
    """A matrix's singular values, the largest first.

    They are the square roots of the eigenvalues of the matrix times its transpose, in float64. Values below the
    rounding error (at most a millionth of the largest value) are zero.
    """

    values: Floats

    @property
    def stable_rank(self) -> float:
        """Sum of squared values divided by the largest square (Rudelson & Vershynin, 2007); 0 for a zero matrix."""
        return float(np.square(self.values / self.values[0]).sum()) if self.values[0] else 0.0

    @property
    def effective_rank(self) -> float:
        """Exponential of the entropy of the values, scaled to sum 1 (Roy & Vetterli, 2007); 0 for a zero matrix."""
        if not self.values[0]:
            return 0.0
        shares = self.values[self.values > 0] / self.values.sum()
        return float(np.exp(-(shares * np.log(shares)).sum()))


def spectrum(weights: StoredWeights, check: Check = never) -> Spectrum:
    """Compute the singular values of a matrix of bounded size. Raises a UserError if the tensor is not a matrix, is too
    large, or holds weights that are not finite."""
    if len(weights.shape) != 2:
        raise UserError(f"`{weights.name}` is a vector: only matrices have singular values.")
    rows, columns = weights.shape
    side = min(rows, columns)
    if side > MOST_SIDE or weights.size * side > MOST_PRODUCTS:
        raise UserError(
            f"`{weights.name}` is {rows:,} × {columns:,}: singular values are computed of matrices whose shorter side "
            f"is at most {MOST_SIDE:,} and takes at most {MOST_PRODUCTS / 1e9:,.0f} billion multiplications with the "
            f"rest; this one takes {weights.size * side / 1e9:,.0f} billion."
        )
    product = torch.zeros(side, side, dtype=torch.float64)
    for part in weights.parts(check):
        wide = part.double() if rows < columns else part.double().T  # [side, n]
        product.addmm_(wide, wide.T)
    if not bool(product.isfinite().all()):
        raise UserError(f"`{weights.name}` holds weights that are not finite: it has no singular values.")
    check()
    squares = torch.linalg.eigvalsh(product).flip(0)
    squares[squares < side * torch.finfo(torch.float64).eps * squares[0]] = 0
    return Spectrum(squares.clamp_(min=0).sqrt().numpy())
