"""What the operations of the laboratory's settings keep for their backward pass; see stages.py."""

from collections.abc import Iterator

from gptworks.model.cost import ATTENTION, RESIDUAL, Shapes, Stage


def entry_stages(s: Shapes, layer: int) -> Iterator[Stage]:
    """What is done to the stream as it enters a block (`gptworks.model.lab.stream`).

    The gradient of a scalar is the sum of a product of the stream's size.
    """
    stream = s.floats(s.config.d_model)
    if s.config.layer_skips(layer):  # what is added has a gradient that waits for the layer that gave it
        yield Stage("skip", arrives=stream, leaves=2 * stream, scratch=stream, vectors=1, own_scratch=stream)
    if s.config.residual_scalars:
        kept = {RESIDUAL: stream}
        yield Stage("scalars", kept, stream, stream, scratch=stream, vectors=2, for_own=kept, own_scratch=stream)


def handed_on_stages(s: Shapes, layer: int) -> list[Stage]:
    """Where the gradient of what a later layer added has waited. What it added is saved as the next block's input,
    unless that enters attention rounded."""
    stream = s.floats(s.config.d_model)
    alone = s.autocast and s.config.norm_placement == "after" and not s.config.residual_scalars
    there = s.config.layer_is_skipped_to(layer)
    return [Stage("handed on", {RESIDUAL: stream if alone else 0}, arrives=stream)] if there else []


def smear_stage(s: Shapes) -> Stage:
    """The token before is added to each, and saved beside the channels that its gate reads."""
    c = s.config
    if not c.smear:
        return Stage("smear")
    stream, read = s.floats(c.d_model), s.products(c.d_gate) if s.autocast else s.floats(c.d_model)
    return Stage("smear", {RESIDUAL: stream + read}, stream, stream, scratch=2 * stream, vectors=c.d_gate + 1)


def carried_gradients(s: Shapes, trains_embedding: bool) -> int:
    """Bytes of the gradients of what all blocks read: they wait from the last block on."""
    c = s.config
    reads_embedding = c.residual_scalars or "projected" in c.value_embeddings
    embedding = s.floats(c.d_model) if reads_embedding and trains_embedding else 0
    return embedding + (s.products(c.n_kv_heads * c.d_head) if c.value_residual else 0)


def value_table(s: Shapes, layer: int) -> int:
    """Elements of the layer's table of value embeddings; 0: it has none."""
    c = s.config
    return c.vocab_size * c.n_kv_heads * c.d_head if c.layer_value_embedding(layer) == "table" else 0


def kept_beside(s: Shapes, layer: int) -> int:
    """Bytes that stand beside the stream for a block that is computed again: its tokens' vectors of a table, and of the
    first block the values that it hands on."""
    c, width = s.config, s.config.n_kv_heads * s.config.d_head
    hands_on = c.value_residual and layer == 0
    return (s.floats(width) if value_table(s, layer) else 0) + (s.products(width) if hands_on else 0)


def value_stages(s: Shapes, layer: int) -> Iterator[Stage]:
    """What a layer makes of its values (`gptworks.model.lab.stream.Values`)."""
    c, kind = s.config, s.config.layer_value_embedding(layer)
    width = c.n_kv_heads * c.d_head
    k = s.products(width)
    if c.value_residual and layer:
        kept = {ATTENTION: k}
        yield Stage("value residual", kept, arrives=k, leaves=k, scratch=k, vectors=2, for_own=kept, own_scratch=k)
    if kind == "projected":
        matrix, rounded = width * c.d_model, s.products(c.d_model) if s.autocast else 0
        stream = s.floats(c.d_model)
        kept = {RESIDUAL: rounded}
        yield Stage("projection", kept | s.copies(matrix), k, stream, merges=True, matrices=matrix, for_own=kept)
    if kind != "none":
        yield gate_stage(s, c.n_kv_heads)
        wide = s.floats(width) if s.autocast and kind == "table" else 0
        yield Stage(
            "gated values", {ATTENTION: k}, arrives=k, leaves=2 * k if kind == "projected" else k, scratch=2 * k + wide
        )


def gate_stage(s: Shapes, n_gates: int) -> Stage:
    """A gate for each head. A part of the channels has a gradient as wide as all."""
    given, width = s.products(n_gates), s.products(s.config.d_model)
    matrix = n_gates * s.config.d_gate
    return Stage("gate of heads", {ATTENTION: 2 * given} | s.copies(matrix), given, width, merges=True, matrices=matrix)


def future_stages(s: Shapes, n: int) -> list[Stage]:
    """The heads of `n` tokens beyond the next (`gptworks.model.lab.future`). What arrives are views of the gradient
    of all that the loss read; what leaves is added to the gradient of the features."""
    c, width = s.config, s.products(s.config.d_model)
    matrix = c.d_model**2
    return [
        Stage(
            f"head of token {i + 2}",
            {RESIDUAL: width + (0 if i else width)} | s.copies(matrix),
            leaves=width,
            merges=i < n - 1,
            scratch=width,
            matrices=matrix,
        )
        for i in range(n)
    ]
