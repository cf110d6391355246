"""Where a model's matrices lie: in one block of large pages, and in panels where the kernels multiply them so."""

import contextlib
import mmap
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gptworks.model import GPT
from gptworks.native.library import Library
from gptworks.quantize.linear import PackedMatrix
from gptworks.quantize.panels import panel_of, size_in_panels, to_panels


def kinds_in_panels(kernels: Library) -> tuple[torch.dtype, ...]:
    """The kinds of matrices that are multiplied in panels. AMX reads rows of bf16 and int8 as they lie."""
    kinds = {
        torch.bfloat16: kernels.has_bf16_products and not kernels.has_amx,
        torch.int8: kernels.has_integer_products and not kernels.has_amx,
        torch.uint8: kernels.has_integer_products,
    }
    return tuple(kind for kind, in_panels in kinds.items() if in_panels)


def panel_rows(kind: torch.dtype, rows: int) -> int:
    """The rows of the panels of a matrix: those whose sums, and those of some activation rows, fill the registers."""
    return panel_of(rows, torch.get_num_threads(), 32 if kind == torch.uint8 else 48)


def matrices(model: GPT) -> Iterator[Any]:
    """The modules with the matrices that a step reads, in the order in which it does."""
    for module in model.blocks.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, PackedMatrix) or (weight is not None and weight.dim() == 2):
            yield module
    yield model.token_embedding
    if model.untied_head is not None:
        yield model.untied_head


def settle(modules: Sequence[Any], in_panels: Container[torch.dtype]) -> None:
    """Put the matrices of modules into one block in large pages; packed ones of some kinds in panels.

    A step reads every weight once. With pages of 4 KiB the processor looks up 512 times as many addresses.
    """
    wants_panels = [isinstance(module, PackedMatrix) and module.weight.dtype in in_panels for module in modules]
    storages = {module.weight.untyped_storage().data_ptr() for module in modules}
    placed = [(module.weight.dim() == 1) == wants for module, wants in zip(modules, wants_panels, strict=True)]
    if len(storages) == 1 and all(placed):
        return
    rooms = rooms_in_large_pages([_size(module, wants) for module, wants in zip(modules, wants_panels, strict=True)])
    for module, wants, room in zip(modules, wants_panels, rooms, strict=True):
        weight = module.row_by_row if isinstance(module, PackedMatrix) else module.weight.detach()
        if wants:
            module.panel = panel_rows(weight.dtype, len(weight))
            module.weight = to_panels(weight, module.panel, room)
        elif isinstance(module, PackedMatrix):
            module.weight = room.view(weight.shape).copy_(weight)
        else:
            module.weight.data = room.view(weight.shape).copy_(weight)


def _size(module: Any, in_panels: bool) -> tuple[torch.dtype, int]:
    """The elements of a module's matrix."""
    weight: Tensor = module.weight
    if weight.dim() == 1:
        rows, columns = module.rows, len(weight) // size_in_panels(module.rows)
    else:
        rows, columns = weight.shape
    return weight.dtype, (size_in_panels(rows) if in_panels else rows) * columns


def rooms_in_large_pages(wanted: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """Zeroed tensors [n] of these dtypes and sizes, one after the other in a `large_block`."""
    sizes = [-(-size * dtype.itemsize // 64) * 64 for dtype, size in wanted]
    parts = torch.split(large_block(sum(sizes)), sizes)
    return [part[: size * dtype.itemsize].view(dtype) for part, (dtype, size) in zip(parts, wanted, strict=True)]


def large_block(n_bytes: int) -> Tensor:
    """Zeroed memory, uint8 [n_bytes], for which pages of 2 MiB are asked where the system has such a request.

    It is private: memory shared between processes has another switch (`shmem_enabled`), which is off nearly everywhere.
    The kernel gives large pages to whole aligned stretches of 2 MiB, and grants or refuses them without a word.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(n_bytes, dtype=torch.uint8)
    block = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)
