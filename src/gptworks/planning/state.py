"""Bytes of weights and of the optimizer's state, held throughout a run, and of the scratch memory of an update."""

from collections import Counter
from math import prod

from gptworks.config.optimizers import AT_ONCE, CPU_AT_ONCE, OPTIMIZERS
from gptworks.planning.inference import weights_bytes
from gptworks.planning.params import ParameterCount, Shape
from gptworks.planning.trained import Trained, everything


def held_weights_bytes(parameters: ParameterCount, trained: Trained) -> int:
    """Bytes of all weights, an adapter's included: fp32, except for an adapter's packed base."""
    base = 4 * parameters.total if trained.base == "full" else weights_bytes(parameters, trained.base, outside=False)
    return base + 4 * trained.added


def trained_state_bytes(parameters: ParameterCount, optimizer: str, trained: Trained, moments: str = "fp32") -> int:
    """Bytes of the optimizer's state, for the parameters that are trained and an adapter's: AdamW's two moments, or,
    for the blocks' matrices, the state of another optimizer."""
    n_small, n_scales = trained.in_8_bits if moments == "int8" else (0, 0)
    by_adamw = 8 * trained.added + round(8 * trained.share * parameters.total) - 6 * n_small + 4 * n_scales
    if optimizer == "adamw":
        return by_adamw
    return by_adamw + sum(matrix_state_bytes(optimizer, shape) - 8 * prod(shape) for shape in trained.matrices)


def matrix_state_bytes(optimizer: str, shape: Shape) -> int:
    """Bytes of the optimizer's state, in fp32, for one matrix of a block, without its step count."""
    kept = OPTIMIZERS[optimizer if len(shape) == 2 else "adamw"].state(shape).values()
    return sum(4 * prod(tensor.shape) for tensor in kept if tensor.shape)


def optimizer_scratch_bytes(
    parameters: ParameterCount,
    optimizer: str,
    moments: str,
    trained: Trained,
    on_cpu: bool,
    cautious: bool = False,
    n_shares: int = 1,
) -> int:
    """Peak memory of an update, beyond weights, gradients and state. Fused AdamW needs none; with 8-bit moments
    it holds both moments and a third tensor in fp32 for a piece of a matrix. Cautious decay holds the signs of a piece
    of a matrix, after an optimizer other than AdamW in fp32 has freed its buffers.

    Args:
        cautious: whether the matrices are decayed cautiously.
        n_shares: number of ranks that each hold a part of every tensor.
    """
    by_adamw = {
        prod(shape)
        for group in parameters.groups.values()
        for shape in group.tensors.values()
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
