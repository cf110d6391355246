"""Initialization of a sharded model on ranks that never hold the whole model.

On one device, building a model draws random numbers tensor by tensor. Here the same code builds the model on the meta
device, and `Deferred` records the operations. Once the model is sharded, `Deferred.fill` repeats the operations: each
rank draws each whole tensor, in the same order and from the same generator, and keeps its part. The weights are bit for
bit the same as on one device. A rank holds its parts and one whole tensor at a time. With `init: induction`, a rank
also holds the whole embedding, the head, and the attention matrices of the first two blocks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from gptworks.config import ModelConfig
from gptworks.model.attention import Attention
from gptworks.model.gpt import GPT
from gptworks.model.lab.future import FUTURE_HEADS
from gptworks.model.lab.induction import begin_with_induction
from gptworks.model.lora import is_adapter
from gptworks.model.shapes import OnMeta
from gptworks.training.distributed.shards import local, part_of

aten = torch.ops.aten
DRAWS = frozenset((aten.normal_.default, aten.uniform_.default))
"""Random operations. `fill` repeats them even if a later operation overwrites the tensor, so that the generator's state
stays the same as on one device."""

_INDUCTION = ("token_embedding.", "untied_head.", "blocks.0.attention.", "blocks.1.attention.")
"""Prefixes of the names of tensors that `begin_with_induction` reads or changes."""

CONSTANTS = frozenset((aten.zero_.default, aten.fill_.Scalar))
_CREATED_WITH = {aten.zeros.default: 0.0, aten.ones.default: 1.0, aten.full.default: None}


class Deferred(OnMeta, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which a model is built on the meta device and the operations that fill its tensors are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._record: list[tuple[Tensor, Any, tuple[Any, ...]]] = []
        self._names: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _CREATED_WITH:
            value = _CREATED_WITH[func]
            self._record.append((made, aten.fill_.Scalar, (args[1] if value is None else value,)))
        elif func._schema.is_mutable:
            self._record.append((args[0], func, args[1:]))
        return made

    def name(self, model: GPT) -> None:
        """Record the parameters' names. Call it before the model is sharded."""
        self._names = {_storage(parameter): name for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, Tensor], config: ModelConfig, mesh: DeviceMesh) -> None:
        """Initialize this rank's parts of the parameters, with random numbers from torch's global generator.

        Args:
            parameters: all parameters of the model, by name, on their device.
            config: the settings of the whole model.
            mesh: all ranks, in dimensions data and tensor.
        """
        last = {_storage(tensor): number for number, (tensor, *_) in enumerate(self._record)}
        begins = _INDUCTION if config.init == "induction" else ()
        whole: dict[str, Tensor] = {}
        left = set(parameters)

        def keep(name: str, value: Tensor) -> None:
            left.remove(name)
            local(parameters[name]).copy_(value[part_of(parameters[name], mesh)])

        def begin() -> None:
            if whole:
                _begin_with_induction(config, whole)
            for name in list(whole):
                keep(name, whole.pop(name))

        for number, (tensor, func, args) in enumerate(self._record):
            name = self._names.get(_storage(tensor))
            is_last = last[_storage(tensor)] == number
            if name is None or not (is_last or func in DRAWS):
                continue
            assert func in DRAWS or func in CONSTANTS, f"{func} changes {name}, and cannot be repeated"
            if is_later := name.startswith(FUTURE_HEADS) or is_adapter(name):
                begin()
            value = func(torch.empty(tensor.shape, dtype=tensor.dtype), *args)
            if is_last and name.startswith(begins) and not is_later:
                whole[name] = value
            elif is_last:
                keep(name, value)
            del value  # frees its memory before the next tensor is made
        begin()
        assert not left, f"no recorded operation fills {min(left)}"


def _begin_with_induction(config: ModelConfig, whole: dict[str, Tensor]) -> None:
    """Write the attention heads of `init: induction` into `whole`, the whole tensors by name."""
    embedding = whole["token_embedding.weight"]
    with torch.device("meta"):
        first, second = (Attention(config, layer) for layer in (0, 1))
    for layer, attention in enumerate((first, second)):
        prefix = f"blocks.{layer}.attention."
        own = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
        attention.load_state_dict(own, assign=True)
    begin_with_induction(config, embedding, whole.get("untied_head.weight", embedding), first, second)


def _storage(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's storage while the storage exists."""
    return int(tensor.untyped_storage()._cdata)
