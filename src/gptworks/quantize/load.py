"""Packs a run's weights while loading them: reads each matrix, merges its adapter into it, and rounds the result.

The result equals that of `gptworks quantize --rounding nearest`. GPTQ needs a text, so only that command offers it.
"""

from collections.abc import Mapping
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from gptworks.choices import LoadedWeights, Weights
from gptworks.config import LoRAConfig
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.model.lora import is_adapter, merged_weight
from gptworks.quantize.convert import check_known, head_name, matrix_kinds, packed_parts
from gptworks.quantize.formats import unpacked
from gptworks.tensors import TensorFile


def kinds_to_pack(model: GPT, weights: LoadedWeights, stored: Mapping[str, Weights], run: str) -> dict[str, Weights]:
    """Return the kinds of the matrices to pack while loading, by module name; empty if all stay as stored.

    Args:
        model: the unpacked model, on any device.
        stored: the kinds of the run's packed matrices, by module name, except matrices with an adapter.
        run: the run's name, for the error message.

    Raises:
        UserError: `weights` is unknown, or the run is quantized already, to other kinds.
    """
    check_known(weights, get_args(LoadedWeights))
    if weights == "auto":
        return {}
    asked = {} if weights == "fp32" else matrix_kinds(model, weights)
    head = head_name(model)  # not compared: int4 runs store the head in int8 or int4
    if stored and {**stored, head: None} != {**asked, head: None}:
        raise UserError(
            f"weights={weights}: {run} is quantized already, to {', '.join(sorted(set(stored.values())))}. Leave "
            f"--weights out, or take the run that it was made from; its model-card.md names it."
        )
    return {} if stored else asked


@torch.no_grad()
def read_packed(
    file: TensorFile,
    kinds: Mapping[str, Weights],
    under_adapter: Mapping[str, Weights],
    adapter: LoRAConfig | None,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Read a run's weights and pack them on the device, with one fp32 matrix in memory at a time.

    Args:
        kinds: the kinds of the matrices to pack, by module name.
        under_adapter: the kinds of the file's packed matrices that have an adapter, by module name.
        adapter: the settings of the file's adapter, which is merged into the weights; None: the file has none.

    Raises:
        UserError: the file cannot be read (see `TensorFile.read`), or a weight exceeds its kind's range.
    """
    tensors: dict[str, Tensor] = {}
    for name in file.stored:
        module, _, part = name.rpartition(".")
        if is_adapter(name) or (part == "scale" and module in under_adapter):
            continue
        read = partial(
            _read_merged, file, name, module in under_adapter, adapter
        )  # a function, because a variable with the tensor would keep it in memory
        if part == "weight" and module in kinds:
            tensors |= packed_parts(module, read().to(device), kinds[module])
        else:
            tensors[name] = read().clone()
    return tensors


def _read_merged(file: TensorFile, name: str, is_packed: bool, adapter: LoRAConfig | None) -> Tensor:
    """Read a tensor; unpack it to fp32 if it `is_packed`, and merge its adapter into it."""
    module, _, part = name.rpartition(".")
    tensor = file.read(name)[name]
    if part != "weight":
        return tensor
    if is_packed:
        scale = f"{module}.scale"
        tensor = unpacked(tensor, file.read(scale)[scale] if scale in file.stored else None, torch.float32)
    if adapter is not None and f"{module}.lora_a" in file.stored:
        lora_a, lora_b = file.read(f"{module}.lora_a", f"{module}.lora_b").values()
        tensor = merged_weight(tensor, lora_a, lora_b, adapter.scale)
    return tensor
