"""Which part of a sharded tensor a rank holds."""

from functools import cache
from math import prod

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

DIMENSIONS = ("data", "tensor")
"""Names of the mesh's dimensions, outer first."""

Part = tuple[slice, ...]
"""The elements of a tensor that a rank holds: a slice of each dimension."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided_over(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh dimensions over which a tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, way in zip(names, tensor.placements, strict=True) if not way.is_replicate())


@cache
def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each dimension of the mesh; cached, because slicing a mesh takes 0.1 ms."""
    return {name: mesh[name].size() for name in DIMENSIONS}


def places_of(mesh: DeviceMesh, rank: int | None = None) -> dict[str, int]:
    """Return a global rank's index in each dimension of the mesh; None: this rank's."""
    rank = mesh.get_rank() if rank is None else rank
    return dict(zip(DIMENSIONS, divmod(rank, sizes_of(mesh)["tensor"]), strict=True))


def part_of(tensor: Tensor, mesh: DeviceMesh | None, rank: int | None = None) -> Part:
    """Return the part of a tensor that a rank holds.

    Tensor parallelism splits a dimension first, then FSDP splits the result; both split as `torch.chunk` does.

    Args:
        mesh: all ranks, in dimensions data and tensor; None: a single rank.
        rank: the global rank; None: this rank.
    """
    held = [range(n) for n in tensor.shape]
    if isinstance(tensor, DTensor) and mesh is not None:
        sizes, places = sizes_of(mesh), places_of(mesh, rank)
        ways = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
        for name in sorted(ways, reverse=True):  # tensor first, then data
            if not ways[name].is_replicate():
                dimension = ways[name].dim  # type: ignore[attr-defined]
                held[dimension] = _chunk(held[dimension], sizes[name], places[name])
    return tuple(slice(one.start, one.stop) for one in held)


def shape_of(part: Part) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(one.stop - one.start for one in part)


def numel_of(part: Part) -> int:
    """Return the number of elements of a part."""
    return prod(shape_of(part))


def _chunk(numbers: range, n_chunks: int, index: int) -> range:
    """Return the chunk with this index, as `torch.chunk` splits; empty if `torch.chunk` makes fewer chunks."""
    size = -(-len(numbers) // n_chunks)
    return numbers[index * size : (index + 1) * size]
