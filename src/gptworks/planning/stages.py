"""What each operation of the model keeps for its backward pass, and what that pass takes for itself.

One `Stage` an operation, in the order of the forward pass. Sizes follow what autograd saves: an operation's inputs or
its results, whichever its derivative is written in; a view costs nothing, a tensor that two operations save counts
once, at the one whose backward pass is later. The model keeps different tensors on a CPU (`gptworks.model.cpu`) and on
an accelerator, where attention is a fused kernel.

Under autocast the residual stream stays float32, products and what lies between them are of two bytes, and each matrix
has a two-byte copy that lives until its gradient is made.

Letters: N tokens of a micro-batch, C width, Q query heads × their width, K key/value heads × theirs, F MLP width.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from gptworks.config import expert_rows
from gptworks.model.cost import ATTENTION, DROPOUT, MLP, RESIDUAL, WEIGHTS_KEPT, Shapes, Stage
from gptworks.native.library import trains_in_cpp
from gptworks.planning.laboratory import entry_stages, gate_stage, handed_on_stages, value_stages

BLOCK_QUERIES, LONGEST_BLOCKED = 128, 2048
"""`gptworks.model.cpu`'s BLOCK and LONGEST, which importing would import torch."""


def block_stages(s: Shapes, layer: int) -> list[Stage]:
    """A whole block, first operation first."""
    attention = list(attention_stages(s, layer))
    mlp = list(moe_stages(s) if s.config.n_experts else mlp_stages(s, s.config.d_ff, s.n_tokens))
    entries = [norm_stage(s, "norm1"), norm_stage(s, "norm2", saves_input=not s.config.parallel_residual)]
    if s.config.norm_placement == "after":
        entries = [_entry(s), _entry(s)]
    behind = [_norm_of_result(s)] if s.config.norms_behind else []
    parts = ([entry, *part, *behind, _branch(s)] for entry, part in zip(entries, (attention, mlp), strict=True))
    return [*entry_stages(s, layer), *(stage for part in parts for stage in part), *handed_on_stages(s, layer)]


def passing_bytes(s: Shapes, layer: int) -> int:
    """What a block holds at its worst moment where it saves nothing, since nothing trained stands before or in it:
    attention is the fused kernel then, or torch's products of all queries and keys."""
    c, stream, width = s.config, s.floats(s.config.d_model), s.products(s.config.d_model)
    window = s.config.layer_window(layer)
    q, k = s.products(c.n_heads * c.d_head), s.products(c.n_kv_heads * c.d_head)
    attention = 2 * q + 2 * k
    in_blocks = window is not None and s.length >= 2 * window
    if c.attention_softcap is not None or c.dropout_attention:
        pairs = s.length * (2 * window if window is not None and in_blocks else s.length)
        wide = 3 * s.floats(c.n_heads * c.d_head) if s.autocast and c.dropout_attention else 0
        causal = q + 4 * pairs if c.attention_softcap is None else 0  # torch's mask, and its scaled queries
        attention = q + wide + causal + 3 * 4 * s.batch_size * c.n_heads * pairs
    if in_blocks:
        attention += 8 * k  # each block of keys and values is there twice
    mlp = (4 if c.gated else 3 if c.mlp == "relu2" else 2) * s.products(c.d_ff)
    if c.n_experts:  # what they are given and give, by expert and by token
        mlp = (3 * c.n_experts_per_token + 1) * width
    kept = c.unet_skips * (c.n_layers // 2) + 2 * c.residual_scalars + ("projected" in c.value_embeddings)
    return (2 + kept) * stream + 2 * width + max(attention, mlp)


def embedding_stage(s: Shapes) -> Stage:
    """The lookup saves the tokens alone; the timeline counts the table's gradient."""
    width = s.config.d_model
    kept = (s.floats(width) if s.on_cpu else s.n_tokens * width) if s.config.dropout_embedding else 0
    return Stage("embedding dropout", {DROPOUT: kept}, arrives=s.floats(width), leaves=s.floats(width) if kept else 0)


def bigram_stage(s: Shapes) -> Stage:
    """The lookup of token pairs saves their rows, and its result for the scale's gradient."""
    width = s.config.d_model
    saved = s.floats(width) + 8 * s.n_tokens if s.config.bigram_vocab_size else 0
    return Stage("bigram embedding", {RESIDUAL: saved}, scratch=2 * s.floats(width) if saved else 0)


def rotary_tables_bytes(s: Shapes) -> int:
    """Cosines and sines of every position, and what autocast makes of those in use, or rows of several texts."""
    elements = s.config.d_rotary if s.config.position == "rope" else 0  # half for each of the two
    elements *= 1 if s.config.window_rope_theta is None else 2
    looked_up = s.n_tokens if s.several_texts else s.length if s.autocast else 0
    return elements * (4 * s.config.context_length + s.product_bytes * looked_up)


def norm_stage(s: Shapes, name: str, saves_input: bool = True) -> Stage:
    """The residual stream is saved here, as the input of the norm; the result is saved by the product that follows.

    The gradient arrives in the products' precision, is made float32, and joins the stream's.
    """
    c = s.config
    statistics = s.floats(1) * (2 if c.norm == "layernorm" else 1)
    return Stage(
        name,
        {RESIDUAL: statistics + (s.floats(c.d_model) if saves_input else 0)},
        arrives=s.products(c.d_model),
        leaves=s.floats(c.d_model),
        merges=True,
        scratch=s.floats(c.d_model) - s.products(c.d_model),
        vectors=c.d_model * (2 if c.norm_bias else 1),
    )


def _entry(s: Shapes) -> Stage:
    """Where the stream itself enters attention or MLP, rounded under autocast; the product that follows saves it."""
    arrives, stream = s.products(s.config.d_model), s.floats(s.config.d_model)
    if not s.autocast:  # what arrives is added to the stream's gradient as it is
        return Stage("entry", arrives=arrives)
    return Stage("entry", arrives=arrives, leaves=stream, merges=True, scratch=stream - arrives)


def _norm_of_result(s: Shapes) -> Stage:
    """The norm of what attention or MLP gives, which it saves."""
    c = s.config
    statistics = s.floats(1) * (2 if c.norm == "layernorm" else 1)
    given = s.products(c.d_model)
    saved = given if s.on_cpu else s.floats(c.d_model)
    return Stage(
        "norm of the result",
        {RESIDUAL: statistics + saved},
        arrives=_branch(s).leaves,
        leaves=given,
        scratch=s.floats(c.d_model) if s.autocast else 0,
        vectors=c.d_model * (2 if c.norm_bias else 1),
    )


def _branch(s: Shapes) -> Stage:
    """Where a branch's result joins the stream; backward, where its gradient leaves it, rounded and masked: nothing
    leaves where it is the stream's own gradient."""
    width, dropout = s.config.d_model, s.config.dropout_residual > 0
    scaled = s.config.residual_scale != 1
    return Stage(
        "branch",
        {DROPOUT: s.mask(width) if dropout else 0},
        leaves=s.products(width) if dropout or scaled or s.autocast else 0,
        scratch=s.products(width) if dropout and s.autocast else 0,
    )


def _result_gradient(s: Shapes) -> int:
    """Bytes of the gradient of what attention or the MLP gives."""
    return s.products(s.config.d_model) if s.config.norms_behind else _branch(s).leaves


# ------------------------------------------------------------------------------------------------ attention


def attention_stages(s: Shapes, layer: int) -> Iterator[Stage]:
    """Projections, QK-norm, rotation, attention itself, the output projection."""
    c, window = s.config, s.config.layer_window(layer)
    q_width, k_width = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    q, k, normalized = s.products(q_width), s.products(k_width), s.products(c.d_model)
    projections = [("query", q_width, q), ("key", k_width, k), ("value", k_width, k)]
    if changed := list(value_stages(s, layer)):  # values come first
        projections = [projections[2], *projections[:2]]
    for name, width, output in projections:
        first, last = name == projections[0][0], name == projections[-1][0]  # backward runs from the last to the first
        yield Stage(
            name,
            ({RESIDUAL: normalized} if first else {}) | s.copies(c.d_model * width),
            arrives=output,
            leaves=normalized,
            merges=not last,
            matrices=c.d_model * width,
            vectors=width if c.qkv_bias else 0,
        )
        if first:
            yield from changed
            yield from [gate_stage(s, c.n_heads)] * c.attention_gate
    if c.qk_norm:
        statistics = 4 * s.n_tokens * (2 if c.qk_norm == "whole" else c.n_heads + c.n_kv_heads)
        saved = q + k if s.on_cpu else s.floats(q_width + k_width)
        wide = s.floats(q_width)
        yield Stage(
            "QK-norm",
            {ATTENTION: saved + statistics},
            arrives=q + k,
            leaves=q + k,
            scratch=(3 if s.on_cpu else 2) * wide - 2 * q - k if s.autocast else 0,
            vectors=q_width + k_width if c.qk_norm == "whole" else 2 * c.d_head,
        )
    if c.position == "rope":
        yield Stage("rotation", arrives=q + k, leaves=q + k, scratch=q)
    yield attention_core(s, window)
    if c.attention_gate:
        kept = 0 if saves_output(s, window) else q
        yield Stage("gated heads", {ATTENTION: kept}, arrives=q, leaves=q, scratch=q)
    shared = output_is_shared(s, window) and not c.attention_gate
    yield Stage(
        "attention out",
        {ATTENTION: 0 if shared else q} | s.copies(c.d_model * q_width),
        arrives=_result_gradient(s),
        leaves=q,
        matrices=c.d_model * q_width,
        vectors=c.d_model if c.out_bias else 0,
    )


def bias_bytes(s: Shapes) -> int:
    """What keeps several texts of a row apart: a bias on the scores for each kind of window, shared by the layers."""
    return len(set(s.config.layer_windows)) * s.products(s.length) if s.several_texts else 0


def is_native(s: Shapes) -> bool:
    """Whether a layer trains on `gptworks.native.attention`, which keeps no weights."""
    return s.on_cpu and trains_in_cpp()


def is_blocked(s: Shapes) -> bool:
    """Whether a layer trains on `gptworks.model.cpu.attention`, which keeps the weights of blocks of queries."""
    return s.on_cpu and not is_native(s) and s.length <= LONGEST_BLOCKED


def is_masked(s: Shapes, window: int | None) -> bool:
    """Whether attention takes a mask, where its kernel does not know by itself what a query may see."""
    return s.several_texts or (window is not None and window < s.length)


def is_grouped(s: Shapes) -> bool:
    """Whether a key/value head serves several query heads."""
    return s.config.n_kv_heads != s.config.n_heads


def is_plain(s: Shapes, window: int | None) -> bool:
    """Whether torch does attention as plain products with all weights, in float32, for want of a fused kernel.

    So it does with grouped queries in float32 on an accelerator, unless a mask has their keys repeated, and with
    dropout on a CPU.
    """
    if s.on_cpu:
        return s.config.dropout_attention > 0
    return is_grouped(s) and not s.autocast and not is_masked(s, window)


def saves_output(s: Shapes, window: int | None) -> bool:
    """Whether attention saves its result."""
    return is_native(s) or not (is_blocked(s) or is_plain(s, window) or s.config.attention_softcap is not None)


def output_is_shared(s: Shapes, window: int | None) -> bool:
    """Whether attention's result, which it saves, has the layout that the output projection needs.

    The native kernel lays it out so; a fused one as the queries are, which rotation changes, and on an accelerator
    QK-norm. torch's float32 kernel for GPUs lays it out right in any case.
    """
    if is_native(s):
        return True
    if is_blocked(s) or is_plain(s, window):
        return False
    as_projected = s.config.position != "rope" and (s.on_cpu or not s.config.qk_norm)
    return as_projected or (not s.on_cpu and not s.autocast)


def attention_core(s: Shapes, window: int | None) -> Stage:
    """softmax(q·kᵀ)·v, in one of the ways of `gptworks.model.scores.attend`."""
    c = s.config
    q, k = s.products(c.n_heads * c.d_head), s.products(c.n_kv_heads * c.d_head)
    leaves = q + 2 * k
    repeated = not s.on_cpu and is_grouped(s) and is_masked(s, window)  # `gptworks.model.scores.takes_groups`
    heads = s.batch_size * c.n_heads
    if is_native(s):
        return Stage("attention", {ATTENTION: 2 * q + 2 * k + 4 * heads * s.length}, arrives=q, leaves=leaves)
    if is_blocked(s):  # keys and values are repeated for each query head
        blocks = [heads * rows * keys for rows, keys in score_blocks(s.length, window)]
        kept = sum(blocks) if c.dropout_attention else 0
        last, before = blocks[-1] * s.product_bytes, (blocks[-2] if len(blocks) > 1 else 0) * s.product_bytes
        loop = 2 * before + 3 * last if kept else max(before + 2 * last, 2 * last + q)
        capped = c.attention_softcap is not None  # what tanh gave is kept beside the weights
        loop = max(loop, 3 * last) if capped else loop
        return Stage(
            "attention",
            {ATTENTION: 3 * q, WEIGHTS_KEPT: (1 + capped) * sum(blocks) * s.product_bytes, DROPOUT: kept},
            arrives=q,
            leaves=leaves,
            scratch=q + 2 * (q - k) + loop,
        )
    if s.several_texts:
        window = None  # the bias holds it
    if repeated:
        k = q
    padded, keys_seen, scratch = 1.0, s.length, 0
    if window is not None and s.length >= 2 * window:  # banded: each block of keys and values stands twice
        padded, keys_seen = -(-s.length // window) * window / s.length, 2 * window
        q, k = round(q * padded), round(2 * k * padded)
        scratch = q + 3 * k
    if repeated:
        scratch = q + 2 * k - leaves  # gradients of the repeated keys and values, before they are added up
    pairs = round(s.length * padded) * keys_seen
    if c.attention_softcap is not None:  # plain products: what tanh gave, and the weights in float32 and as they enter
        one = heads * pairs * s.product_bytes
        weights = 4 * heads * pairs + (one if s.autocast else 0)
        dropped = one + (heads * pairs * 4 if s.on_cpu else heads * pairs) if c.dropout_attention else 0
        return Stage(
            "attention",
            {ATTENTION: 3 * q, WEIGHTS_KEPT: one + weights, DROPOUT: dropped},
            arrives=q,
            leaves=leaves,
            scratch=4 * heads * pairs + one,
        )
    if is_plain(s, window):
        weights = 4 * heads * pairs
        dropped = heads * pairs * 4 + weights if c.dropout_attention else 0  # the factors, and the weights under them
        return Stage(
            "attention",
            {ATTENTION: 3 * round(s.floats(c.n_heads * c.d_head) * padded), WEIGHTS_KEPT: weights, DROPOUT: dropped},
            arrives=q,
            leaves=leaves,
            scratch=(1 if dropped else 2) * weights - leaves,  # before those stand
        )
    masked = window is not None and window < s.length
    mask = (s.batch_size if keys_seen < s.length else 1) * pairs * s.product_bytes if masked else 0
    saved = 2 * q + 2 * k + 4 * heads * s.length + mask
    return Stage("attention", {ATTENTION: saved}, arrives=q, leaves=leaves, scratch=scratch)


def score_blocks(length: int, window: int | None) -> list[tuple[int, int]]:
    """Queries and keys of each block of `gptworks.model.cpu.attention`."""
    blocks = []
    for first in range(0, length, BLOCK_QUERIES):
        last = min(first + BLOCK_QUERIES, length)
        first_key = 0 if window is None else max(0, first - window + 1)
        blocks.append((last - first, last - first_key))
    return blocks


# ------------------------------------------------------------------------------------------------------ MLP


def mlp_stages(s: Shapes, d_ff: int, n_tokens: float, expert: bool = False) -> Iterator[Stage]:
    """One MLP over `n_tokens` tokens. An expert's input and gradient are slices of tensors counted elsewhere."""
    c, p = s.config, s.product_bytes
    inner, outer = round(n_tokens * d_ff * p), round(n_tokens * c.d_model * p)
    matrix, biases = c.d_model * d_ff, c.mlp_bias
    source = {} if expert else {RESIDUAL: outer}
    copy = s.copies(matrix)
    arrives = 0 if expert else _result_gradient(s)
    if c.gated:
        yield Stage("gate", source | copy, inner, outer, merges=True, matrices=matrix, vectors=biases * d_ff)
        if not s.on_cpu:
            yield Stage("activation", {MLP: inner}, inner, inner)
        yield Stage("up", copy, inner, outer, matrices=matrix, vectors=biases * d_ff)
        yield Stage("gate × up", {MLP: 2 * inner}, inner, 2 * inner)
    else:
        yield Stage("up", source | copy, inner, outer, matrices=matrix, vectors=biases * d_ff)
        wide = round(n_tokens * d_ff * 4) if c.mlp == "relu2" and not s.on_cpu else 0  # autocast squares in float32
        yield Stage("activation", {MLP: inner + (wide if s.autocast else 0)}, inner, inner, scratch=2 * wide)
    if c.dropout_mlp:
        yield Stage("MLP dropout", {DROPOUT: inner if s.on_cpu else inner // p}, inner, inner)
    yield Stage("down", {MLP: inner} | copy, arrives, inner, matrices=matrix, vectors=biases * c.d_model)


def moe_stages(s: Shapes) -> Iterator[Stage]:
    """Router, tokens gathered by expert, the experts with an even share each, their results weighed and added."""
    c = s.config
    width = s.products(c.d_model)
    share = s.n_tokens * c.n_experts_per_token / c.n_experts
    if s.on_cpu:
        share = expert_rows(math.ceil(share))
    gathered = round(width * c.n_experts * share / s.n_tokens)
    routing = s.n_tokens * (8 * c.n_experts + 40 * c.n_experts_per_token)
    wide = s.floats(c.d_model) if s.autocast else 0
    yield Stage(
        "router",
        {RESIDUAL: width, MLP: routing + wide},
        arrives=routing // 2,
        leaves=width,
        merges=True,
        scratch=s.floats(c.d_model),
        vectors=c.d_model * c.n_experts,
        for_own={RESIDUAL: width, MLP: wide},
    )
    scratch = max(width, gathered - width)
    yield Stage("gather", {MLP: gathered}, gathered, leaves=width, merges=c.d_ff_shared > 0, scratch=scratch)
    for e in range(c.n_experts):
        stages = list(mlp_stages(s, c.d_ff, share, expert=True))
        if e == 0:  # the last that the backward pass comes to: the gradient of all results goes
            stages[-1] = replace(stages[-1], arrives=gathered)
        yield from stages
    yield Stage("reorder", arrives=gathered, leaves=gathered, scratch=gathered)
    yield Stage("weighted sum", {MLP: gathered}, arrives=_result_gradient(s), leaves=gathered, scratch=gathered)
    if c.d_ff_shared:
        yield from mlp_stages(s, c.d_ff_shared, s.n_tokens, expert=True)
