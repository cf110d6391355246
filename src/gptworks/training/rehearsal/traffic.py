"""Records the collectives that a rank takes part in: kind, mesh dimension and bytes, in order."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce", "broadcast": "broadcast",
    "alltoall": "all_to_all",
}  # fmt: skip
"""Kind of collective by a part of the name of torch's operation, without `_`."""

MOST_FIGURES = 8
"""Collectives of at most this many elements exchange only counts or losses. Plans leave them out."""


@dataclass(frozen=True)
class Sent:
    """A collective."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, broadcast or all_to_all."""
    dimension: str
    """Mesh dimension along which the ranks communicate: data, tensor or all."""
    n_bytes: int
    """Bytes of the tensors as `gptworks.planning.network.Collective` counts them: the unsharded tensors; for
    all_to_all, those that this rank sends, its own part included. 0: only counts or losses."""


class Traffic(TorchDispatchMode):
    """Context that records this process's collectives and changes none."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """
        Args:
            mesh: all ranks, in dimensions data and tensor.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        data, tensor = (mesh.get_group(name) for name in ("data", "tensor"))
        everyone = "data" if tensor.size() == 1 else "tensor" if data.size() == 1 else "all"
        world = distributed.group.WORLD
        assert world is not None, "a mesh has a process group"
        self._dimensions = {
            world.group_name: everyone, data.group_name: "data", tensor.group_name: "tensor"
        }  # fmt: skip
        self.sent: list[Sent] = []

    @property
    def n_bytes(self) -> dict[str, int]:
        """Bytes of the recorded collectives by kind, without counts and losses."""
        found: Counter[str] = Counter()
        for one in self.sent:
            found[one.kind] += one.n_bytes
        return {kind: n for kind, n in found.items() if n}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operation on this rank's part is dispatched here next
        out = function(*args, **(kwargs or {}))
        name = function.name()
        if "c10d" in name and "wait" not in name:
            operation = name.replace("_", "")
            kind = next((kind for part, kind in KINDS.items() if part in operation), None)
            if kind is not None:
                self.sent.append(Sent(kind, self._dimension(args), _n_bytes(kind, args, kwargs)))
        return out

    def _dimension(self, args: Any) -> str:
        """Return the mesh dimension of the process group that an operation's arguments include, as object or name."""
        for argument in args:
            group: Any = argument if isinstance(argument, str) else None
            if isinstance(argument, torch.ScriptObject):
                try:
                    group = ProcessGroup.unbox(argument).group_name
                except RuntimeError:  # another object, such as the kind of reduction
                    continue
            if group in self._dimensions:
                return self._dimensions[group]
        raise AssertionError("a collective of a group outside the mesh")


def _n_bytes(kind: str, args: Any, kwargs: Any) -> int:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if max(tensor.numel() for tensor in tensors) <= MOST_FIGURES:
        return 0
    counted = tensors[1] if kind == "all_to_all" else max(tensors, key=lambda tensor: tensor.nbytes)
    return counted.nbytes
