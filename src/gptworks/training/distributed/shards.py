"""The parts of a tensor that ranks hold."""

from collections.abc import Mapping
from functools import cache
from math import prod

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

DIMENSIONS = ("data", "tensor")
"""The dimensions of the mesh, the inner one last."""

Part = tuple[slice, ...]
"""The elements of a tensor that a rank holds: a slice of each of its dimensions."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided_over(tensor: Tensor) -> tuple[str, ...]:
    """The dimensions of the mesh over which a tensor is divided."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, way in zip(names, tensor.placements, strict=True) if not way.is_replicate())


@cache
def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """The size of each dimension of the mesh; cached, because slicing a mesh takes a tenth of a millisecond."""
    return {name: mesh[name].size() for name in DIMENSIONS}


def places_of(mesh: DeviceMesh) -> dict[str, int]:
    """This rank's index in each dimension of the mesh."""
    return dict(zip(DIMENSIONS, divmod(mesh.get_rank(), sizes_of(mesh)["tensor"]), strict=True))


def part_of(tensor: Tensor, mesh: DeviceMesh | None, places: Mapping[str, int] | None = None) -> Part:
    """The part of a tensor that a rank holds.

    Tensor parallelism divides a dimension first, and FSDP what is left, each as `torch.chunk` does.

    Args:
        mesh: all ranks, by the dimensions data and tensor; None: one rank.
        places: the rank's index in each dimension of the mesh; None: this rank's.
    """
    held = [range(n) for n in tensor.shape]
    if isinstance(tensor, DTensor) and mesh is not None:
        sizes, places = sizes_of(mesh), places or places_of(mesh)
        ways = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
        for name in sorted(ways, reverse=True):  # tensor, data
            if not ways[name].is_replicate():
                dimension = ways[name].dim  # type: ignore[attr-defined]
                held[dimension] = _chunk(held[dimension], sizes[name], places[name])
    return tuple(slice(one.start, one.stop) for one in held)


def shape_of(part: Part) -> tuple[int, ...]:
    """Numbers of elements of a part, by dimension."""
    return tuple(one.stop - one.start for one in part)


def numel_of(part: Part) -> int:
    """Number of elements of a part."""
    return prod(shape_of(part))


def _chunk(numbers: range, n_chunks: int, index: int) -> range:
    """One of the chunks that `torch.chunk` makes; empty beyond the last."""
    size = -(-len(numbers) // n_chunks)
    return numbers[index * size : (index + 1) * size]
