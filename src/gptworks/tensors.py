"""Reader of safetensors files, which checks each tensor's shape, dtype and values before anything uses the tensor.

A file may come from anyone, and checksums only prove that it is unchanged. Code that computes addresses would read
beyond the end of a tensor of another shape or dtype, and one NaN makes every logit NaN.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptworks.errors import UserError
from gptworks.files import open_regular
from gptworks.json_files import mapping_of

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes that gptworks writes or reads, by their names in safetensors."""

_MOST_HEADER_BYTES = 100_000_000
"""Size limit of a file's header, the same as in safetensors."""

_ELEMENTS_AT_ONCE = 2**20
"""Number of elements checked at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor according to its file's header."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """The tensor's dtype, or the dtype's name in safetensors if gptworks does not know it."""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Expected(Stored):
    """Shape, dtype and minimum that a reader expects of a tensor."""

    dtype: torch.dtype = torch.float32
    least: float = -math.inf
    """Smallest accepted element."""

    @classmethod
    def like(cls, tensor: Tensor) -> "Expected":
        """Return an expectation with the shape and dtype of `tensor`, which may be on the meta device."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def fits(self, found: Stored | None) -> bool:
        return found is not None and (found.shape, found.dtype) == (self.shape, self.dtype)


Wanted = Mapping[str, Expected] | Callable[[Mapping[str, Stored]], Mapping[str, Expected]]
"""The expected tensors by name, or a function that returns them for a file's header."""


def stored_tensors(path: Path, *, inside: Path | None = None) -> dict[str, Stored]:
    """Read shape and dtype of each tensor, by name, from the header of a safetensors file. `inside`: a folder out of
    which links may not lead; see `gptworks.files.open_regular`. Raises a UserError if the file is missing, not regular
    or not `inside`, or its header is damaged or contradicts its size."""
    try:
        with open_regular(path, inside=inside) as held:
            n_bytes = int.from_bytes(held.read(8), "little")
            if n_bytes > min(_MOST_HEADER_BYTES, max(0, os.fstat(held.fileno()).st_size - 8)):
                raise ValueError(f"its header is said to be of {n_bytes:,} bytes")
            mapping_of(held.read(n_bytes))  # refuses two tensors of the same name, of which safetensors would read one
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Stored(tuple(part.get_shape()), DTYPES.get(part.get_dtype(), part.get_dtype()))
                for name, part in slices.items()
            }
    except FileNotFoundError:
        raise UserError(f"{path} is missing: restore it from a copy.") from None
    except (OSError, SafetensorError, ValueError) as error:
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
        absent = "absent" if wanted is not None else "of a dtype that gptworks does not read"
        if wanted is None:
            known = {name: x.dtype for name, x in self.stored.items() if isinstance(x.dtype, torch.dtype)}
            wanted = {name: Expected(self.stored[name].shape, dtype) for name, dtype in known.items()}
        self._expected = wanted(self.stored) if callable(wanted) else wanted
        for name in sorted({*self.stored, *self._expected}):
            found, due = self.stored.get(name), self._expected.get(name)
            if due is None or not due.fits(found):
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
            self._check_elements(name, tensor)
        return tensors

    def _check_elements(self, name: str, tensor: Tensor) -> None:
        """Refuse a floating-point tensor with NaN, an infinity, or an element below its minimum."""
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return
        least = self._expected[name].least
        for part in torch.split(tensor.reshape(-1), _ELEMENTS_AT_ONCE):
            low, high = (float(end) for end in part.aminmax())  # both are NaN if an element is NaN
            if not (math.isfinite(low) and math.isfinite(high)):
                wrong, rule = low if not math.isfinite(low) else high, "every element must be a finite number"
            elif low < least:
                wrong, rule = low, f"no element may be below {least:g}"
            else:
                continue
            raise UserError(f"{self.path}: `{name}` holds {wrong:g}, and {rule}. {self._fix}")


def read_tensors(
    path: Path, wanted: Wanted | None, *, inside: Path | None = None, **messages: str
) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file; for arguments and errors see `TensorFile`."""
    return TensorFile(path, wanted, inside=inside, **messages).read()


@contextmanager
def open_tensors(path: Path) -> Iterator[Callable[[str], Any]]:
    """Open a safetensors file for reading parts of tensors: with `as part`, `part(name)[10:20, 32:64]` is a tensor.
    Check shapes and dtypes with `stored_tensors` first. Raises a UserError if the file cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            yield file.get_slice
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged: {error}. Restore it from a copy.") from None
