"""Allocate tensors in large memory pages, and move a model's matrices there, in panels if the kernels multiply panels.

A step reads every weight once. Pages of 4 KiB instead of 2 MiB would need 512 times as many address translations.
"""

import contextlib
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gptworks.kernels.call import NUMBERS
from gptworks.kernels.library import Library
from gptworks.model.gpt import GPT
from gptworks.quantize.linear import PackedMatrix
from gptworks.quantize.panels import panel_of, size_in_panels, to_panels, whole_lines

_PLACING = threading.Lock()
"""A lock held while matrices move, because several threads may make backends of one model."""


def rooms_in_large_pages(wanted: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """Return zeroed one-dimensional tensors of these dtypes and sizes, in one `large_block`."""
    sizes = [-(-size * dtype.itemsize // 64) * 64 for dtype, size in wanted]
    parts = torch.split(large_block(sum(sizes)), sizes)
    return [part[: size * dtype.itemsize].view(dtype) for part, (dtype, size) in zip(parts, wanted, strict=True)]


def large_block(n_bytes: int) -> Tensor:
    """Return zeroed memory, uint8 [n_bytes], with pages of 2 MiB if the system accepts requests for them.

    The memory is private because a separate switch (`shmem_enabled`) nearly always turns large pages off for shared
    memory. Linux uses large pages only for complete aligned ranges of 2 MiB, and does not report whether it did.
    """
    if not n_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(n_bytes, dtype=torch.uint8)
    try:
        block = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return torch.zeros(n_bytes, dtype=torch.uint8)  # raises torch's usual error if memory is short
    with contextlib.suppress(OSError):  # the system's kernel may lack huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


def widest_panels(kernels: Library) -> dict[torch.dtype, int]:
    """Return the maximum number of rows in a panel, for each dtype whose matrices the kernels multiply in panels."""
    widest = {dtype: kernels.functions.gptworks_widest_panel(kind) for dtype, kind in NUMBERS.items()}
    return {dtype: rows for dtype, rows in widest.items() if rows}


def matrices(model: GPT) -> Iterator[Any]:
    """Yield the modules whose matrices a step reads: those in the blocks, the token embedding and an untied head."""
    for module in model.blocks.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, PackedMatrix) or (weight is not None and weight.dim() == 2):
            yield module
    yield model.token_embedding
    if model.untied_head is not None:
        yield model.untied_head


def settle(modules: Sequence[Any], widest: Mapping[torch.dtype, int]) -> None:
    """Move the modules' matrices into one block of large pages, packed matrices in panels of up to `widest` rows."""
    with _PLACING:
        panels = []
        for module in modules:
            most = widest.get(module.weight.dtype, 0) if isinstance(module, PackedMatrix) else 0
            panels.append(panel_of(module.rows, torch.get_num_threads(), most) if most else 0)
        storages = {module.weight.untyped_storage().data_ptr() for module in modules}
        placed = [(module.weight.dim() == 1) == (panel > 0) for module, panel in zip(modules, panels, strict=True)]
        if len(storages) == 1 and all(placed):
            return
        wanted = [
            (part.dtype, (size_in_panels(len(part)) if panel else len(part)) * part.size(1))
            for module, panel in zip(modules, panels, strict=True)
            for part in _parts(module, panel > 0).values()
        ]
        rooms = iter(rooms_in_large_pages(wanted))
        for module, panel in zip(modules, panels, strict=True):
            _place(module, panel, rooms)


def _place(module: Any, panel: int, rooms: Iterator[Tensor]) -> None:
    """Move a module's tensors into the next tensors of `rooms`; the old memory is then free."""
    parts = _parts(module, panel > 0)
    if isinstance(module, PackedMatrix):
        module.panel = panel
    for name, part in parts.items():
        room = next(rooms)
        there = to_panels(part, panel, room) if panel else room.view(part.shape).copy_(part)
        if isinstance(module, PackedMatrix):
            setattr(module, name, there)
        else:
            module.weight.data = there


def _parts(module: Any, in_panels: bool) -> dict[str, Tensor]:
    """Return the module's tensors to move, by name, in row order: its matrix, and the scales of an int4 matrix."""
    if not isinstance(module, PackedMatrix):
        return {"weight": module.weight.detach()}
    weight, scale = module.row_by_row
    weight = whole_lines(weight) if in_panels else weight
    return {"weight": weight} | ({"scale": scale} if scale is not None and scale.dim() == 2 else {})
