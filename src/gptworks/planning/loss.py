"""What the loss takes beside features and their gradient, from the configuration alone."""

from gptworks.model.cost import Shapes
from gptworks.planning.stages import is_native

CPU_CHUNK_TOKENS, CPU_CHUNK_LOGITS, CPU_CACHE_BYTES, CHUNK_TOKENS = 2048, 2 * 2**20, 8 * 2**20, 8192
CPU_HEAD_ROWS = 8192
"""Of `gptworks.model.loss`, which importing would import torch."""


def chunk_tokens(shapes: Shapes, vocab_size: int) -> int:
    """`gptworks.model.loss.chunk_tokens`."""
    return max(CPU_CHUNK_TOKENS, CPU_CHUNK_LOGITS // vocab_size) if shapes.on_cpu else CHUNK_TOKENS


def softmax_tokens(shapes: Shapes, vocab_size: int) -> int:
    """`gptworks.model.loss.softmax_tokens`."""
    return max(1, CPU_CACHE_BYTES // (4 * vocab_size)) if shapes.on_cpu else CHUNK_TOKENS


def head_rows(shapes: Shapes, vocab_size: int) -> int:
    """`gptworks.model.loss.head_rows`."""
    return min(vocab_size, CPU_HEAD_ROWS) if shapes.on_cpu else vocab_size


def scoring_bytes(shapes: Shapes, vocab_size: int) -> int:
    """What `gptworks.model.loss.token_nats` holds at its worst: a chunk's logits, and where torch makes them some rows'
    in float32 and their logarithms."""
    logits = min(chunk_tokens(shapes, vocab_size), shapes.n_tokens) * vocab_size
    rows = 0 if is_native(shapes) else 4 * (1 + shapes.autocast)
    return shapes.product_bytes * logits + rows * min(softmax_tokens(shapes, vocab_size) * vocab_size, logits)


def loss_chunk_bytes(shapes: Shapes, vocab_size: int, head: int, taught: bool) -> int:
    """What the loss holds at its worst beside features and their gradient: a chunk's logits, some rows' probabilities
    (and those logits in float32) where torch makes them, and the gradient of the head's matrix of so many elements, 0
    where it is frozen, in float32, and some rows of it as the product gives them.

    A loss that is taught by another model has the teacher's logits besides, and its rows' logits and probabilities,
    softened or not.
    """
    chunk, product = chunk_tokens(shapes, vocab_size), shapes.product_bytes
    first, second = (max(0, min(chunk, n)) * vocab_size for n in (shapes.n_tokens, shapes.n_tokens - chunk))
    copied = shapes.autocast and shapes.on_cpu
    row_bytes = 4 * (6 + 2 * shapes.autocast if taught else 0 if is_native(shapes) else 1 + copied)
    row_bytes += product if shapes.config.logit_softcap is not None else 0  # what tanh gave
    softmax = row_bytes * min(softmax_tokens(shapes, vocab_size) * vocab_size, first) + taught * product * first
    rows = product * head * head_rows(shapes, vocab_size) // vocab_size
    return max(
        product * first + max(softmax, 4 * head + rows),
        product * second + 4 * head + max(softmax, rows) if second else 0,
    )
