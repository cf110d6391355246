"""Bytes of the weights, of the optimizer's state, of an update's scratch memory, and of an objective's second model."""

from collections import Counter
from collections.abc import Sequence
from math import prod

from gptworks.config import ModelConfig, Recipe
from gptworks.config.optimizers import AT_ONCE, CPU_AT_ONCE, OPTIMIZERS
from gptworks.errors import UserError
from gptworks.planning.inference import weights_bytes
from gptworks.planning.layout import divided
from gptworks.planning.params import ParameterCount, Shape, Trained, count_parameters, everything, trained
from gptworks.recipe import load_recipe


def held_weights_bytes(parameters: ParameterCount, trained: Trained) -> int:
    """Return the bytes of all weights in training, including an adapter's. Weights are fp32, except for an
    adapter's quantized base."""
    base = 4 * parameters.total if trained.base == "full" else weights_bytes(parameters, trained.base, outside=False)
    return base + 4 * trained.added


def trained_state_bytes(parameters: ParameterCount, optimizer: str, trained: Trained, moments: str = "fp32") -> int:
    """Return the bytes of the optimizer's state for all trained parameters, including an adapter's.

    Args:
        optimizer: the optimizer of the blocks' matrices. AdamW updates all other parameters.
        moments: the format of AdamW's moments, fp32 or int8.
    """
    n_small, n_scales = trained.in_8_bits if moments == "int8" else (0, 0)
    by_adamw = 8 * trained.added + round(8 * trained.share * parameters.total) - 6 * n_small + 4 * n_scales
    if optimizer == "adamw":
        return by_adamw
    return by_adamw + sum(matrix_state_bytes(optimizer, shape) - 8 * prod(shape) for shape in trained.matrices)


def matrix_state_bytes(optimizer: str, shape: Shape) -> int:
    """Return the bytes of the optimizer's fp32 state for one parameter of a block, without its step count."""
    kept = OPTIMIZERS[optimizer if len(shape) == 2 else "adamw"].state(shape).values()
    return sum(4 * prod(tensor.shape) for tensor in kept if tensor.shape)


def state_in_parts_bytes(parameters: ParameterCount, optimizer: str, trained: Trained, moments: str) -> int:
    """Return the bytes of `trained_state_bytes` without the state that only the owners of matrices keep."""
    ownership = OPTIMIZERS[optimizer].ownership
    if ownership is None or not ownership.keeps_state:
        return trained_state_bytes(parameters, optimizer, trained, moments)
    return trained_state_bytes(parameters, "adamw", trained) - 8 * sum(map(prod, trained.matrices))


def owned_state_bytes(optimizer: str, matrices: Sequence[Shape], n_owners: int) -> int:
    """Return the bytes of optimizer state that the fullest of `n_owners` ranks keeps only for the matrices it owns."""
    ownership = OPTIMIZERS[optimizer].ownership
    if ownership is None or not ownership.keeps_state:
        return 0
    kept = [matrix_state_bytes(optimizer, shape) for shape in matrices]
    return max(sum(kept[i] for i in share) for share in divided([*map(ownership.work, matrices)], n_owners))


def optimizer_scratch_bytes(
    parameters: ParameterCount,
    optimizer: str,
    moments: str,
    trained: Trained,
    on_cpu: bool,
    cautious: bool = False,
    n_shares: int = 1,
) -> int:
    """Return the peak memory of an update, in bytes beyond weights, gradients and state.

    Fused AdamW needs no such memory. With 8-bit moments, AdamW needs both moments and a third tensor in fp32, for one
    part of a matrix at a time. Cautious decay needs the signs of such a part; other optimizers have freed their buffers
    by then.

    Args:
        cautious: whether weight decay of the matrices is cautious.
        n_shares: number of ranks that shard every tensor; 1 if not sharded.
    """
    by_adamw = {
        prod(shape)
        for group, _, shape in parameters.tensors()
        if len(shape) == 2 and not group.in_block and (trained.embedding or trained.head)
    }
    shapes = Counter(trained.matrices if not trained.rank else everything(parameters).matrices)
    largest = max(map(prod, shapes), default=0) if not trained.rank else trained.rank * max(map(max, shapes))
    if optimizer == "adamw" and moments == "fp32":
        by_adamw.add(largest)
    decayed = -(-max(by_adamw, default=0) // n_shares) if cautious else 0
    least = 4 * min(decayed, CPU_AT_ONCE if on_cpu else AT_ONCE)
    if moments == "int8":
        return max(least, 12 * min(largest, CPU_AT_ONCE if on_cpu else AT_ONCE))
    return max(least, OPTIMIZERS[optimizer].scratch_bytes(shapes))


def teacher_config(recipe: Recipe) -> ModelConfig | None:
    """Return the configuration of the run's teacher; None if the objective has no teacher.

    Raises:
        UserError: the teacher's run folder has no recipe, or its recipe cannot be read.
    """
    folder = recipe.objective.teacher_run
    if folder is None:
        return None
    if not (folder / "recipe.yaml").exists():
        raise UserError(f"objective.teacher={folder} is not a run folder: it has no recipe.yaml.")
    return load_recipe(folder).model


def other_models_bytes(recipe: Recipe) -> int:
    """Return the bytes of weights and rotary tables of the objective's second model; 0 if the objective has none, or if
    its second model is the trained model without the adapter."""
    if (model := teacher_config(recipe)) is not None:
        return 4 * count_parameters(model).total + tables_bytes(model)
    if not copies_start(recipe):
        return 0
    count = count_parameters(recipe.model)
    part = trained(recipe.model, recipe.adapter, recipe.freeze)
    return held_weights_bytes(count, part) + tables_bytes(recipe.model)


def copies_start(recipe: Recipe) -> bool:
    """Return whether the objective keeps a copy of the starting model, which it does not need if only an adapter is
    trained."""
    return recipe.objective.keeps_start and (recipe.adapter is None or recipe.adapter.embeddings)


def tables_bytes(model: ModelConfig) -> int:
    """Return the bytes of the rotary tables: the cosines and sines of every position."""
    from gptworks.model.cost import Shapes  # loads torch, which `gptworks presets` does not need
    from gptworks.model.rotary import rotary_tables_bytes

    return rotary_tables_bytes(Shapes(model, batch_size=0, length=0, product_bytes=4, on_cpu=True))
