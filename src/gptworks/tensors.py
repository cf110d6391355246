"""Reader of safetensors files, which checks each tensor's shape, dtype and values before anything uses the tensor.

A file may come from anyone, and checksums only prove that it is unchanged. Code that computes addresses would read
beyond the end of a tensor of another shape or dtype, and one NaN makes every logit NaN.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptworks.errors import UserError
from gptworks.files import open_regular

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes that gptworks writes or reads, by their names in safetensors."""

_MOST_HEADER_BYTES = 100_000_000
"""Size limit of a file's header, the same as in safetensors."""

_ELEMENTS_AT_ONCE = 2**20
"""Number of elements that `check_finite` reads at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True)
class Expected:
    """Shape, dtype and minimum that a reader expects of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    least: float = -math.inf
    """Minimum of the tensor's elements."""

    @classmethod
    def like(cls, tensor: Tensor) -> "Expected":
        """Return an expectation with the shape and dtype of `tensor`, which may be on the meta device."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return _describe(self.dtype, self.shape)


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor according to its file's header."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """The tensor's dtype, or the dtype's name in safetensors if gptworks does not know it."""

    def __str__(self) -> str:
        return _describe(self.dtype, self.shape)


Wanted = Mapping[str, Expected] | Callable[[Mapping[str, Stored]], Mapping[str, Expected]]
"""The expected tensors by name, or a function that returns them for a file's header."""


def stored_tensors(path: Path, *, inside: Path | None = None) -> dict[str, Stored]:
    """Read shape and dtype of each tensor, by name, from the header of a safetensors file.

    Args:
        inside: a folder out of which links may not lead; see `gptworks.files.open_regular`.

    Raises:
        UserError: the file is missing, not regular or not `inside`, or its header is damaged or contradicts its size.
    """
    try:
        with open_regular(path, inside=inside) as held:
            _check_names(held)
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Stored(tuple(part.get_shape()), DTYPES.get(part.get_dtype(), part.get_dtype()))
                for name, part in slices.items()
            }
    except FileNotFoundError:
        raise UserError(f"{path} is missing: restore it from a copy.") from None
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged or no safetensors file: {error}. Restore it from a copy.") from None


class TensorFile:
    """A safetensors file whose header has the tensors that its reader expects. Tensors are read to the CPU."""

    def __init__(
        self,
        path: Path,
        wanted: Wanted | None,
        *,
        inside: Path | None = None,
        owner: str = "the recipe's model",
        fix: str = "Restore the file from a copy, or use another checkpoint.",
    ) -> None:
        """Read the file's header, and check its tensors against `wanted`.

        Args:
            wanted: tensors that the file must contain, and no others; None: any finite tensors of known dtypes.
            inside: see `stored_tensors`.
            owner: the reader that expects the tensors, for messages. fix: advice for messages about wrong tensors.

        Raises:
            UserError: the file is missing or damaged, or a tensor is missing, unexpected, or of another shape or dtype.
                The message names the tensor, and its stored and expected shape and dtype.
        """
        self.path, self.stored, self._fix = path, stored_tensors(path, inside=inside), fix
        self._expected = wanted(self.stored) if callable(wanted) else wanted
        for name in sorted({*self.stored, *(self._expected or {})}):
            found = self.stored.get(name)
            due = None if self._expected is None else self._expected.get(name)
            if self._expected is None and found is not None and isinstance(found.dtype, torch.dtype):
                continue
            if found is None or due is None or (found.shape, found.dtype) != (due.shape, due.dtype):
                absent = "of a dtype that gptworks does not read" if self._expected is None else "absent"
                raise UserError(
                    f"{path} does not hold {owner}: `{name}` is {found or 'missing'} there and {due or absent} in "
                    f"{owner}. {fix}"
                )

    def read(self, *names: str) -> dict[str, Tensor]:
        """Read the tensors of these names, or all tensors, and check that floating-point ones are finite (125 ms per GB
        on one core of an EPYC, Zen 4).

        The tensors map the file's pages, without copying. All tensors of a call must be freed to free the memory.

        Raises:
            UserError: the file is damaged, or an element is not finite or below its minimum.
        """
        tensors = {}
        try:
            with safe_open(self.path, "pt") as file:
                for name in names or self.stored:
                    tensors[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path} is damaged: {error}. {self._fix}") from None
        for name, tensor in tensors.items():
            least = self._expected[name].least if self._expected else -math.inf
            check_finite(name, tensor, self.path, least=least, fix=self._fix)
        return tensors


def read_tensors(
    path: Path, wanted: Wanted | None, *, inside: Path | None = None, **messages: str
) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file; for arguments and errors see `TensorFile`."""
    return TensorFile(path, wanted, inside=inside, **messages).read()


@contextmanager
def open_tensors(path: Path) -> Iterator[Callable[[str], Any]]:
    """Open a safetensors file for reading parts of tensors: with `as part`, `part(name)[10:20, 32:64]` is a tensor.

    Check shapes and dtypes with `stored_tensors` first.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            yield file.get_slice
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged: {error}. Restore it from a copy.") from None


def check_finite(name: str, tensor: Tensor, path: Path, *, least: float = -math.inf, fix: str = "") -> None:
    """Refuse a floating-point tensor with NaN, an infinity, or an element below `least`.

    Raises:
        UserError: the tensor has such an element; the message has the tensor's name and the element.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    for part in torch.split(tensor.reshape(-1), _ELEMENTS_AT_ONCE):
        low, high = (float(end) for end in part.aminmax())  # both are NaN if an element is NaN
        if not (math.isfinite(low) and math.isfinite(high)):
            worst = low if not math.isfinite(low) else high
            raise UserError(f"{path}: `{name}` holds {worst}, and every element must be a finite number. {fix}")
        if low < least:
            raise UserError(f"{path}: `{name}` holds {low:g}, and no element may be below {least:g}. {fix}")


def _check_names(file: BinaryIO) -> None:
    """Refuse a header in which a name occurs twice; safetensors would read only one of the two tensors."""
    n_bytes = int.from_bytes(file.read(8), "little")
    if n_bytes > min(_MOST_HEADER_BYTES, max(0, os.fstat(file.fileno()).st_size - 8)):
        raise ValueError(f"its header is said to be of {n_bytes:,} bytes")
    header = file.read(n_bytes)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        known: set[str] = set()
        for name, _ in pairs:
            if name in known:
                raise ValueError(f"its header names `{name}` twice")
            known.add(name)
        return dict(pairs)

    json.loads(header, object_pairs_hook=unique)


def _describe(dtype: torch.dtype | str, shape: Collection[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
