"""Choice of the parameters that a run trains: an adapter's, or all that are not frozen."""

import fnmatch

import torch

from gptworks.config import FreezeConfig, LoRAConfig, ModelConfig, Recipe
from gptworks.errors import UserError, did_you_mean
from gptworks.model.gpt import GPT
from gptworks.model.lora import add_lora
from gptworks.model.shapes import ShapesOnly
from gptworks.planning.params import count_parameters
from gptworks.quantize.convert import base_kinds
from gptworks.quantize.linear import hold_packed, weight_tensors


def trainable_model(config: ModelConfig, adapter: LoRAConfig | None, freeze: FreezeConfig | None) -> GPT:
    """Make a model in which only trained parameters require gradients. With an adapter over a quantized base, the
    blocks' matrices are quantized from the start, so that no unquantized model is ever in memory; all base weights are
    zeros until the base is loaded."""
    if adapter is None or adapter.base == "full":
        model = GPT(config)
    else:
        here = torch.get_default_device()
        with ShapesOnly():
            model = GPT(config)
            model = hold_packed(model, base_kinds(model, adapter.base))
        zeros = {name: torch.zeros_like(tensor, device=here) for name, tensor in weight_tensors(model).items()}
        model.assign(zeros, here)
    if adapter is not None:
        return add_lora(model, adapter)
    if freeze is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not freeze.freezes(name))
    return model


def check_trained(recipe: Recipe) -> None:
    """Raise UserError if a pattern of `freeze` matches no parameter, `freeze` leaves no parameter to train, or no
    target of `adapter` matches a layer."""
    model = recipe.model.model_copy(update={"vocab_size": recipe.model.vocab_size or 1})
    names = list(count_parameters(model).shapes)
    if recipe.freeze is not None:
        for pattern in recipe.freeze.patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                hint = did_you_mean(pattern, names, f": they are called like `{names[-1]}`.")
                raise UserError(f"freeze.patterns has `{pattern}`, which names no parameter of this model{hint}")
        if all(map(recipe.freeze.freezes, names)):
            raise UserError("freeze leaves nothing to train: freeze less.")
    if recipe.adapter is not None and not any(recipe.adapter.adapts(name.removesuffix(".weight")) for name in names):
        raise UserError(f"adapter.targets={', '.join(recipe.adapter.targets)} names no layer of this model.")
