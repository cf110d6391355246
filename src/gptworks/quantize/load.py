"""Weights that are packed as a run is loaded: read, merged with their adapter and rounded, one matrix at a time.

In memory it is what `gptworks quantize --rounding nearest` writes. GPTQ needs a text, and stays with that command.
"""

from collections.abc import Mapping
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from gptworks.choices import LoadedWeights, Weights
from gptworks.config import LoRAConfig
from gptworks.errors import UserError
from gptworks.model import GPT
from gptworks.model.lora import is_adapter, merged_weight
from gptworks.quantize.convert import check_known, head_name, matrix_kinds, packed_parts
from gptworks.quantize.formats import unpacked
from gptworks.tensors import TensorFile


def kinds_to_pack(model: GPT, weights: LoadedWeights, stored: Mapping[str, Weights], run: str) -> dict[str, Weights]:
    """The matrices that are to be packed as they are read, by module's name; empty: they stay as they are stored.

    Args:
        model: the unpacked model, on any device.
        stored: how the run's packed matrices are kept, by module's name; not those beneath an adapter.
        run: its name, for the message.

    Raises:
        UserError: weights that are not known, or that a quantized run does not have.
    """
    check_known(weights, get_args(LoadedWeights))
    if weights == "auto":
        return {}
    asked = {} if weights == "fp32" else matrix_kinds(model, weights)
    beside = head_name(model)  # it may be smaller than what int4 gives it
    if stored and {**stored, beside: None} != {**asked, beside: None}:
        raise UserError(
            f"weights={weights}: {run} is quantized already, to {', '.join(sorted(set(stored.values())))}. Leave "
            f"--weights out, or take the run that it was made from; its model-card.md names it."
        )
    return {} if stored else asked


@torch.no_grad()
def read_packed(
    file: TensorFile,
    kinds: Mapping[str, Weights],
    beneath: Mapping[str, Weights],
    adapter: LoRAConfig | None,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """A run's weights, packed on the device. Of those in fp32 one matrix is in memory at a time.

    Args:
        kinds: how each matrix is to be kept, by its module's name.
        beneath: how those beneath an adapter are kept in the file, by module's name.
        adapter: what the file's adapter is, which is added to the weights.

    Raises:
        UserError: as `TensorFile.read`; or a weight that its kind cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    for name in file.stored:
        module, _, part = name.rpartition(".")
        if is_adapter(name) or (part == "scale" and module in beneath):
            continue
        whole = partial(_whole, file, name, module in beneath, adapter)  # kept by no variable here
        if part == "weight" and module in kinds:
            tensors |= packed_parts(module, whole().to(device), kinds[module])
        else:
            tensors[name] = whole().clone()
    return tensors


def _whole(file: TensorFile, name: str, is_packed: bool, adapter: LoRAConfig | None) -> Tensor:
    """A tensor in fp32, with what an adapter adds to it."""
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
