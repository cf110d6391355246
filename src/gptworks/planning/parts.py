"""Parameters, FLOPs and bytes of each module of a model, which add up to the totals in the plan."""

from dataclasses import dataclass, fields
from math import prod
from typing import Self

from gptworks.config import Recipe
from gptworks.model.outline import stays_whole
from gptworks.planning.flops import training_products
from gptworks.planning.inference import kept_ids_bytes, kv_cache_bytes, tensor_bytes
from gptworks.planning.params import Shape, count_parameters, moments_in_8_bits, trains
from gptworks.planning.state import matrix_state_bytes


@dataclass(frozen=True)
class Figures:
    """Parameters, memory and FLOPs of a part of a model. A tied head has only FLOPs: the embedding has the weights."""

    parameters: int = 0
    adapter_parameters: int = 0
    """Number of parameters of the part's adapter."""
    forward: float = 0.0
    """FLOPs per token of the forward pass in training, with rows of full length and dense attention."""
    backward: float = 0.0
    """FLOPs per token of the backward pass; fewer if parameters are frozen."""
    weights_bytes: int = 0
    """Bytes of the weights in training, including the adapter's."""
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    kv_cache_bytes_per_token: int = 0
    """Bytes that each token adds to a KV cache with two bytes per number."""

    def __add__(self, other: Self) -> Self:
        both = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return type(self)(**both)


def module_figures(recipe: Recipe) -> dict[str, Figures]:
    """Return the figures of each module by name, such as `blocks.0.attention.query`. `blocks.0.attention` itself has
    only the FLOPs of the scores and weighted sums.

    Raises:
        UserError: the vocabulary size is unknown.
    """
    model, cached = recipe.model, ("attention.key", "attention.value")
    ids = kept_ids_bytes(model, length=1)
    cache = (kv_cache_bytes(model, length=1) - ids) // (len(cached) * len(model.layer_uses))
    made: dict[str, Figures] = {}
    for name, shape in count_parameters(model).shapes.items():
        module = name.rpartition(".")[0]
        made[module] = made.get(module, Figures()) + _of_tensor(recipe, name, shape)
    products = training_products(recipe, by_expert=True)
    n = recipe.row_length * products.parts
    for module, (forward, backward) in products.modules.items():
        name = "untied_head" if module == "head" and not model.tie_embeddings else module
        made[name] = made.get(name, Figures()) + Figures(forward=forward / n, backward=backward / n)
    for module in [module for module in made if module.endswith(cached)]:
        made[module] += Figures(kv_cache_bytes_per_token=cache * model.layer_uses.count(int(module.split(".")[1])))
    if ids:
        made["smear" if model.smear else "bigram_embedding"] += Figures(kv_cache_bytes_per_token=ids)
    return made


def _of_tensor(recipe: Recipe, name: str, shape: Shape) -> Figures:
    """Return the parameters and bytes of a tensor and its adapter, without FLOPs."""
    adapter, size = recipe.adapter, prod(shape)
    is_matrix = len(shape) == 2 and name.startswith("blocks.")
    packs = adapter is not None and adapter.base != "full" and is_matrix and not stays_whole(name)
    added: list[int] = []
    if adapter is not None and len(shape) == 2 and adapter.adapts(name.removesuffix(".weight")):
        added = [adapter.rank * width for width in shape]
    whole = trains(name, adapter, recipe.freeze)
    in_8_bits = added if adapter is not None else [size] if whole and is_matrix else []
    n_small, n_scales = moments_in_8_bits(in_8_bits) if recipe.train.optimizer_state == "int8" else (0, 0)
    trained = sum(added) + whole * size
    own_state = matrix_state_bytes(recipe.train.optimizer, shape) if is_matrix else 8 * size
    precision = adapter.base if adapter is not None and packs else "fp32"
    return Figures(
        parameters=size,
        adapter_parameters=sum(added),
        weights_bytes=tensor_bytes(shape, precision, in_block=is_matrix) + 4 * sum(added),
        gradients_bytes=4 * trained,
        optimizer_bytes=8 * sum(added) + whole * own_state - 6 * n_small + 4 * n_scales,
    )
