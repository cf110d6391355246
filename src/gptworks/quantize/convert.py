"""Quantize a model in memory, or pack a run's weights while loading them. Loading rounds to the nearest values: GPTQ
needs a text, so only `gptworks quantize` offers it.

Matrices of linear layers and embeddings get the requested kind. Norms, biases, position embeddings, the routers of
experts and gates other than the MLP's stay fp32. With int4, some matrices are stored in int8: matrices whose row
length is not a multiple of 32, and matrices outside the blocks, except a head for which int4 is requested.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gptworks.choices import HeadWeights, LoadedWeights, Weights
from gptworks.config import LoRAConfig
from gptworks.errors import UserError, did_you_mean
from gptworks.kernels.dispatch import product
from gptworks.model.gpt import GPT, eval_mode
from gptworks.model.lora import is_adapter, merged_weight
from gptworks.model.shapes import ShapesOnly
from gptworks.quantize.formats import GROUP, Packed, dequantize, gptq, kind_of, pack, pack_rounded, unpacked
from gptworks.quantize.linear import QuantizedGPT, packed_matrices
from gptworks.tensors import TensorFile


@torch.no_grad()
def quantize_model(
    model: GPT,
    weights: Weights,
    calibration: Sequence[Tensor] = (),
    step: Callable[[str], None] = lambda _: None,
    *,
    head: HeadWeights = "int8",
) -> QuantizedGPT:
    """Return a quantized copy of the model, on its device, in eval mode. Both share the unpacked tensors.

    Args:
        calibration: batches of token ids, int64 [B, T], on which GPTQ calibrates the rounding to int4. Empty: each
            weight is rounded to the nearest value.
        step: called with the name of each part before GPTQ rounds the part.
        head: the kind of the head, and of an embedding tied to it, if `weights` is int4.

    Raises:
        UserError: `weights` or `head` is unknown, or does not fit the model; GPTQ does not support the model; the model
            is quantized already; or a weight is too large for its kind.
    """
    kinds = matrix_kinds(model, weights, head)
    if calibration and weights == "int4" and model.config.repeats_layers:
        raise UserError(
            "GPTQ rounds a block for the inputs that it gets, and model.layer_repeats runs blocks on several: take "
            "rounding=nearest."
        )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name in kinds:
        _check_holds(name, tensors[f"{name}.weight"], weights)
    packed = _calibrated(model, kinds, calibration, step) if calibration and weights == "int4" else {}
    for name, kind in kinds.items():
        weight, scale = packed[name] if name in packed else pack(tensors[f"{name}.weight"], kind)
        tensors[f"{name}.weight"] = weight
        if scale is not None:
            tensors[f"{name}.scale"] = scale
    with ShapesOnly():
        quantized = QuantizedGPT(model.config, kinds)
    quantized.assign(tensors)
    quantized = quantized.to(model.device).eval()
    if packed and head == "int4":
        step("the head")
        name = head_name(model)
        _calibrate_head(quantized.get_submodule(name), model.get_submodule(name), quantized, calibration)
    return quantized


def matrix_kinds(model: GPT, weights: Weights, head: HeadWeights = "int8") -> dict[str, Weights]:
    """Return the kind to which each matrix of the model is quantized, by module name. Raises a UserError if `weights`
    or `head` is unknown, the head cannot be int4, or the model is quantized already."""
    check_known(weights, get_args(Weights))
    check_known(head, get_args(HeadWeights), of="head")
    if head == "int4":
        if weights != "int4":
            raise UserError(f"head=int4 with weights={weights}: it is for int4. Leave it out.")
        if model.config.d_model % GROUP:
            raise UserError(
                f"head=int4 with model.d_model={model.config.d_model}: a row of the head must be a multiple of {GROUP} "
                "long. Leave it out."
            )
    if isinstance(model, QuantizedGPT):
        raise UserError(f"the model is quantized to {model.weights} already: quantize the one that it was made from.")

    def kind(name: str, columns: int) -> Weights:
        if weights != "int4":
            return weights
        if name == head_name(model):
            return head
        return "int4" if name.startswith("blocks.") and columns % GROUP == 0 else "int8"

    return {name: kind(name, module.weight.size(1)) for name, module in _packable(model).items()}


def head_name(model: GPT) -> str:
    """Return the name of the module that holds the head's matrix: the token embedding, if the head is tied to it."""
    return "token_embedding" if model.untied_head is None else "untied_head"


def check_known(weights: str, known: Sequence[str], of: str = "weights") -> None:
    """Refuse a value of the setting `of` that is not one of the `known` ones; the message suggests the most similar."""
    if weights not in known:
        raise UserError(f"{of}={weights}: it must be one of {', '.join(known)}{did_you_mean(weights, known)}")


def base_kinds(model: GPT, weights: Weights) -> dict[str, Weights]:
    """Return the kinds of the matrices to pack if an adapter is trained, by module name: only the blocks' matrices."""
    return {name: kind for name, kind in matrix_kinds(model, weights).items() if name.startswith("blocks.")}


def pack_for(model: GPT, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the fp32 `tensors`, packed where `model` has a packed matrix, with rounding to the nearest values.
    Raises a UserError if a weight is too large for its kind."""
    held = dict(tensors)
    for name, matrix in packed_matrices(model):
        held |= packed_parts(name, held[f"{name}.weight"].to(matrix.weight.device), matrix.kind)
    return held


def packed_parts(name: str, matrix: Tensor, kind: Weights) -> dict[str, Tensor]:
    """Pack the matrix of module `name`, rounding to the nearest values; return weight and scale by checkpoint name.
    Raises a UserError if a weight is too large for the kind."""
    _check_holds(name, matrix, kind)
    weight, scale = pack(matrix, kind)
    return {f"{name}.weight": weight} | ({} if scale is None else {f"{name}.scale": scale})


def unpack_all(tensors: Mapping[str, Tensor], kinds: Mapping[str, Weights]) -> dict[str, Tensor]:
    """Return the tensors, with the packed matrices of the modules named in `kinds` unpacked to fp32."""
    whole = dict(tensors)
    for name in kinds:
        whole[f"{name}.weight"] = unpacked(whole[f"{name}.weight"], whole.pop(f"{name}.scale", None), torch.float32)
    return whole


def packed_kinds(model: GPT, dtypes: Mapping[str, object]) -> dict[str, Weights]:
    """Return the kind of each packed matrix in a checkpoint whose tensors have these `dtypes`, by module name; empty if
    all matrices are fp32. `model`: the unpacked model, on any device."""
    kinds = {
        name: kind_of(dtypes.get(f"{name}.weight"), module.weight.size(1)) for name, module in _packable(model).items()
    }
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _packable(model: GPT) -> dict[str, nn.Linear | nn.Embedding]:
    """Return the modules whose matrices can be packed, by name. Position embeddings and routers are left out, since
    rounding would change the routers' choices."""
    matrices = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    return {name: m for name, m in matrices.items() if not name.endswith(("position_embedding", "mlp.router"))}


def _check_holds(name: str, matrix: Tensor, weights: Weights) -> None:
    largest = max(abs(float(end)) for end in matrix.aminmax())  # both ends are NaN if an element is NaN
    if math.isnan(largest):
        raise UserError(
            f"`{name}` holds NaN, which cannot be rounded: give a checkpoint from before training diverged."
        )
    limit = torch.finfo(torch.float16).max if weights in ("fp16", "int4") else torch.finfo(torch.float32).max
    if largest > limit:
        raise UserError(f"`{name}` holds a weight of magnitude {largest:g}, which {weights} cannot hold.")


# ------------------------------------------------------------------------------------------------ while loading


def kinds_to_pack(model: GPT, weights: LoadedWeights, stored: Mapping[str, Weights], run: str) -> dict[str, Weights]:
    """Return the kinds of the matrices to pack while loading, by module name; empty if all stay as stored.

    Args:
        model: the unpacked model, on any device.
        stored: the kinds of the run's packed matrices, by module name; empty if the run has an adapter.
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
        under_adapter: the kinds of the file's packed matrices, by module name; empty if the file has no adapter.
        adapter: the settings of the file's adapter, which is merged into the weights; None: the file has none.

    Raises:
        UserError: the file cannot be read (see `TensorFile.read`), or a weight exceeds its kind's range.
    """
    tensors: dict[str, Tensor] = {}
    for name in file.stored:
        module, _, part = name.rpartition(".")
        if is_adapter(name) or (part == "scale" and module in under_adapter):
            continue
        # a function: a variable would keep the tensor in memory
        read = partial(_read_merged, file, name, module in under_adapter, adapter)
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


# -------------------------------------------------------------------------------------------------- calibration


def _calibrated(
    model: GPT, kinds: dict[str, Weights], batches: Sequence[Tensor], step: Callable[[str], None]
) -> dict[str, Packed]:
    """Return the packed int4 matrices by module name. Each block is rounded for inputs from the rounded blocks
    before it."""
    packed: dict[str, Packed] = {}
    inputs = _inputs_of_block(model, batches, 0)
    rounding = copy.deepcopy(model) if model.config.laboratory else None  # blocks may read several blocks' outputs
    for i, block in enumerate(model.blocks):
        step(f"block {i + 1} of {len(model.blocks)}")
        rounded = copy.deepcopy(block).eval()
        matrices = {
            name: module
            for name, module in rounded.named_modules()
            if isinstance(module, nn.Linear) and kinds.get(f"blocks.{i}.{name}") == "int4"
        }
        for name, hessian in _hessians(rounded, matrices, inputs).items():
            matrix = matrices[name].weight
            found = pack_rounded(gptq(matrix, hessian))
            matrix.copy_(dequantize(*found, matrix.dtype))
            packed[f"blocks.{i}.{name}"] = found
        if rounding is None:
            inputs = [(rounded(*given)[0], *given[1:]) for given in inputs]
        elif i + 1 < len(model.blocks):
            rounding.blocks[i] = rounded
            inputs = _inputs_of_block(rounding, batches, i + 1)
    return packed


def _calibrate_head(packed: Any, whole: Any, model: QuantizedGPT, batches: Iterable[Tensor]) -> None:
    """Round the fp32 head `whole` to int4 by GPTQ, for the features of the quantized `model`; store it in `packed`."""
    hessian = whole.weight.new_zeros(packed.columns, packed.columns)
    for tokens in batches:
        features = model.features(tokens.to(model.device)).flatten(0, -2).float()
        hessian += product(features.T, features)
    packed.weight, packed.scale = pack_rounded(gptq(whole.weight, hessian))


def _inputs_of_block(model: GPT, batches: Iterable[Tensor], layer: int) -> list[tuple[Any, ...]]:
    """Run the model on each batch; return the arguments that block number `layer` was called with."""
    calls: list[tuple[Any, ...]] = []
    with eval_mode(model), model.blocks[layer].register_forward_pre_hook(lambda _, given: calls.append(given)):
        for tokens in batches:
            model.features(tokens.to(model.device))
    return calls


def _hessians(block: nn.Module, matrices: dict[str, nn.Linear], inputs: list[tuple[Any, ...]]) -> dict[str, Tensor]:
    """Run the block on `inputs`; return the sum of x·xᵀ over the inputs x [K] of each matrix, [K, K], by name."""
    sums = {}
    with ExitStack() as hooks:
        for name, module in matrices.items():
            columns = module.weight.size(1)
            sums[name] = total = torch.zeros(columns, columns, device=module.weight.device)

            def add(_: nn.Module, given: tuple[Tensor], total: Tensor = total) -> None:
                x = given[0].flatten(0, -2).float()
                total += product(x.T, x)

            hooks.enter_context(module.register_forward_pre_hook(add))
        for given in inputs:
            block(*given)
    return sums
