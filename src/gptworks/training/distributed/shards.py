"""The part of a sharded tensor that a rank holds, and the division of computations on whole matrices among ranks.

Each matrix has an owner: the rank that gathers the matrix's parts, computes with the whole matrix, and sends each rank
its part of the result, as in the distributed Muon of torchtitan and Megatron. There are `n_copies` groups of ranks. In
each group, `n_parts` ranks hold the parts of every matrix. The owner gathers and sends within its group. Then each rank
of the group broadcasts its part of the result to the ranks that hold the same part. A rank's number as an owner is
copy · n_parts + part.

    replicated (DDP)             n_copies = ranks, n_parts = 1
    sharded (FSDP)               n_copies = 1,     n_parts = ranks
    tensor parallelism           n_copies = data,  n_parts = tensor
    tensor parallelism and FSDP  n_copies = 1,     n_parts = ranks
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from math import prod

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gptworks.planning.layout import divided

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
    """Return the index of a global rank, by default this rank, in each dimension of the mesh."""
    rank = mesh.get_rank() if rank is None else rank
    return dict(zip(DIMENSIONS, divmod(rank, sizes_of(mesh)["tensor"]), strict=True))


def part_of(tensor: Tensor, mesh: DeviceMesh | None, rank: int | None = None) -> Part:
    """Return the part of a tensor that a rank holds.

    Tensor parallelism splits a dimension first, then FSDP splits the result; both split as `torch.chunk` does.

    Args:
        mesh: all ranks, in dimensions data and tensor; None for a single rank.
        rank: the global rank; None for this rank.
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


def _chunk(numbers: range, n_chunks: int, index: int) -> range:
    """Return the chunk with this index, as `torch.chunk` splits; empty if `torch.chunk` makes fewer chunks."""
    size = -(-len(numbers) // n_chunks)
    return numbers[index * size : (index + 1) * size]


Matrices = Sequence[nn.Parameter]
"""Matrices of one shape and one kind of sharding, which one rank processes together."""

NOTHING: Part = (slice(0, 0), slice(0, 0))


class Owners:
    """The ranks that hold certain matrices, and the collectives with which they exchange parts.

    The methods' argument `owned` is the matrices that each rank of this copy owns, by part number.
    """

    def __init__(self, mesh: DeviceMesh | None = None, divided_over: Sequence[str] = ()) -> None:
        """
        Args:
            mesh: all ranks, in dimensions data and tensor; None for a single rank.
            divided_over: names of the mesh dimensions over which the matrices are sharded.
        """
        self._mesh, self._divided_over = mesh, divided_over
        self.ranks = [0]
        """Global ranks of the owners, by number."""
        self.number, self.n_parts = 0, 1
        if mesh is not None:
            outer_first = sorted(DIMENSIONS, key=divided_over.__contains__)  # copies, then parts
            self.ranks = sorted(range(mesh.size()), key=lambda rank: [places_of(mesh, rank)[n] for n in outer_first])
            self.number = self.ranks.index(mesh.get_rank())
            self.n_parts = prod(sizes_of(mesh)[name] for name in divided_over)
        self.n_copies = len(self.ranks) // self.n_parts
        self.copy, self.part = divmod(self.number, self.n_parts)

    def _group(self, of_parts: bool) -> distributed.ProcessGroup | None:
        """Return a process group; None if it has all ranks.

        With `of_parts`, the group's ranks hold the parts of this rank's copy. Otherwise, they hold the same part of
        each copy.
        """
        names = [name for name in DIMENSIONS if (name in self._divided_over) == of_parts]
        return self._mesh.get_group(names[0]) if self._mesh is not None and len(names) == 1 else None

    def part_of(self, matrix: Tensor, number: int | None = None) -> Part:
        """Return the part of a matrix that the owner with this number, by default this rank, holds."""
        return part_of(matrix, self._mesh, None if number is None else self.ranks[number])

    def gather(self, owned: Sequence[Matrices], made: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Return a whole tensor for each matrix that this rank owns, [N, rows, columns].

        The parts come from all ranks of this copy. If this rank owns no matrix, the shape is [0, 0, 0]. At least one
        rank of this copy must own a matrix.

        Args:
            made: returns this rank's part of a matrix's tensor. The tensor has the matrix's shape; all tensors have one
                dtype.
        """
        mine = owned[self.part]
        if self.n_parts == 1:
            return torch.stack([made(matrix) for matrix in mine]) if len(mine) > 1 else made(mine[0])[None]
        sent = [[made(matrix).flatten() for matrix in matrices] for matrices in owned]
        like = next(part for parts in sent for part in parts)
        received = self._exchange(sent, [prod(shape_of(part)) * len(mine) for part in self._parts_of(mine)], like)
        if not mine:
            return like.new_empty(0, 0, 0)
        whole = like.new_empty(len(mine), *mine[0].shape)
        for part, values in zip(self._parts_of(mine), received, strict=True):
            whole[:, *part] = values.view(len(mine), *shape_of(part))
        return whole

    def send(self, owned: Sequence[Matrices], whole: Tensor) -> list[Tensor]:
        """Send each rank of this copy its part of `whole`; return the parts that this rank receives from each owner.

        `whole` has a tensor for each matrix that this rank owns, [N, rows, columns]. The results have the same form.
        """
        if self.n_parts == 1:
            return [whole]
        here = [self.part_of(matrices[0]) if matrices else NOTHING for matrices in owned]
        received = self._exchange(
            [[whole[:, *part].flatten()] for part in self._parts_of(owned[self.part])],
            [prod(shape_of(part)) * len(matrices) for part, matrices in zip(here, owned, strict=True)],
            whole,
        )
        return [v.view(len(m), *shape_of(part)) for v, m, part in zip(received, owned, here, strict=True)]

    def send_rows(self, owned: Sequence[Matrices], values: Tensor) -> list[Tensor]:
        """Send `values` to each rank of this copy; return the values that this rank receives from each owner.

        `values` has a number for each row of the matrices that this rank owns, [N, rows]. The results have the same
        form.
        """
        if self.n_parts == 1:
            return [values]
        shapes = [(len(matrices), matrices[0].size(0) if matrices else 0) for matrices in owned]
        received = self._exchange([[values.flatten()]] * self.n_parts, [n * rows for n, rows in shapes], values)
        return [each.view(shape) for each, shape in zip(received, shapes, strict=True)]

    def broadcast(self, tensor: Tensor, copy: int) -> None:
        """Broadcast a tensor from copy number `copy` to the ranks that hold the same part in other copies, in place."""
        if self.n_copies > 1:
            sent = tensor.contiguous()  # receivers pass a tensor that is contiguous already
            distributed.broadcast(sent.view(torch.uint8), group=self._group(of_parts=False), group_src=copy)

    def _parts_of(self, matrices: Matrices) -> list[Part]:
        """Return the part of each of these matrices that each rank of a copy holds. All are divided alike."""
        return [self.part_of(matrices[0], number) if matrices else NOTHING for number in range(self.n_parts)]

    def _exchange(self, sent: list[list[Tensor]], sizes: list[int], like: Tensor) -> list[Tensor]:
        """Send each rank of this copy a list of flat tensors; return a tensor of `sizes` elements from each rank."""
        received, bytes_each = like.new_empty(sum(sizes)), like.element_size()
        distributed.all_to_all_single(  # as bytes, because gloo does not send bf16
            received.view(torch.uint8),
            torch.cat([like.new_empty(0), *chain(*sent)]).view(torch.uint8),
            [bytes_each * size for size in sizes],
            [bytes_each * sum(tensor.numel() for tensor in tensors) for tensors in sent],
            group=self._group(of_parts=True),
        )
        return list(torch.split(received, sizes))


def divided_among_owners(
    matrices: Matrices, mesh: DeviceMesh | None, work: Callable[[tuple[int, ...]], int]
) -> Iterator[tuple[Owners, list[list[nn.Parameter]]]]:
    """Yield, for all matrices sharded over the same mesh dimensions, the owners and the matrices of each owner.

    Owners get about equal work. All ranks compute the same division, which depends only on shapes and order.

    Args:
        work: returns the cost of the computation for a matrix of a given shape.
    """
    alike: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        alike.setdefault(divided_over(matrix), []).append(matrix)
    for dimensions, those in alike.items():
        owners = Owners(mesh, dimensions)
        shares = divided([work(tuple(matrix.shape)) for matrix in those], len(owners.ranks))
        yield owners, [[those[index] for index in share] for share in shares]
