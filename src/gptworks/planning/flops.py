"""Floating-point operations of a forward pass, from the configuration alone.

A multiply-add is two operations. Counted are matrix products; norms, activations, softmax, the rotary turn and the
embedding lookup are not: together they are a few thousandths of the work.
"""

from dataclasses import dataclass

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.planning.params import laboratory_matrices, require_vocab_size

BACKWARD_PER_FORWARD = 2
"""Each product's gradient is two products of its size (Kaplan et al., 2020, section 2.1)."""

TRAINING_PER_FORWARD = 1 + BACKWARD_PER_FORWARD


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one forward pass over one sequence of `length` tokens, all layers together.

    The two attention figures count scores and weighted sum. `attention_dense` takes all pairs that plain products
    form, as `torch.utils.flop_counter` does: T × T, or in a layer whose window is at most half the text the pairs of
    blocks of `window` tokens with themselves and the block before. `attention_causal` takes each pair that a token may
    see once: what a kernel that skips the rest has to do.
    """

    length: int
    query_key_value: int
    out: int
    attention_dense: int
    attention_causal: int
    mlp: int
    """With experts: those that a token is sent to, the shared one and the router."""
    head: int
    laboratory: int = 0
    """Gates, and projections of value embeddings."""
    future: int = 0
    """Heads of tokens beyond the next with the unembedding of each, which training alone computes: no part of the
    totals."""

    @property
    def projections(self) -> int:
        """Query, key, value and output projections."""
        return self.query_key_value + self.out

    @property
    def total_dense(self) -> int:
        """All parts, attention dense."""
        return self.projections + self.attention_dense + self.mlp + self.head + self.laboratory

    @property
    def total_causal(self) -> int:
        """All parts, attention counted once a visible pair."""
        return self.projections + self.attention_causal + self.mlp + self.head + self.laboratory

    @property
    def per_token_dense(self) -> float:
        return self.total_dense / self.length

    @property
    def per_token_causal(self) -> float:
        return self.total_causal / self.length

    @property
    def training_per_token_dense(self) -> float:
        """Forward and backward: three times forward, with the heads of tokens beyond the next."""
        return TRAINING_PER_FORWARD * (self.per_token_dense + self.future / self.length)


def visible_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs under a causal mask: Σ min(i, window) for i from 1 to length."""
    band = length if window is None else min(window, length)
    return band * (band + 1) // 2 + (length - band) * band


def formed_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs that plain products form, masked ones included; see `gptworks.model.scores.attend`."""
    if window is None or length < 2 * window:
        return length**2
    return -(-length // window) * window * 2 * window


def forward_flops(config: ModelConfig, length: int | None = None) -> ForwardFlops:
    """Operations of one forward pass over `length` tokens (default: the full context), logits at every position.

    Raises:
        UserError: the vocabulary is not known yet, or `length` is not between 1 and the context.
    """
    vocab_size = require_vocab_size(config)
    length = config.context_length if length is None else length
    if not 1 <= length <= config.context_length:
        raise UserError(f"length={length} is not between 1 and context_length={config.context_length}")
    layer_tokens = len(config.layer_uses) * length
    windows = [config.layer_window(layer) for layer in config.layer_uses]
    query_width, key_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    inner_width = config.d_ff * (config.n_experts_per_token if config.n_experts else 1) + config.d_ff_shared
    per_pair = 2 * 2 * query_width  # a score and a weighted value, in every head
    return ForwardFlops(
        length=length,
        query_key_value=2 * layer_tokens * config.d_model * (query_width + 2 * key_width),
        out=2 * layer_tokens * config.d_model * query_width,
        attention_dense=per_pair * sum(formed_pairs(length, window) for window in windows),
        attention_causal=per_pair * sum(visible_pairs(length, window) for window in windows),
        mlp=2 * layer_tokens * config.d_model * (inner_width * (3 if config.gated else 2) + config.n_experts),
        head=2 * length * config.d_model * vocab_size,
        laboratory=2 * length * sum(laboratory_matrices(config)),
        future=2 * length * config.d_model * (config.d_model + vocab_size) * (config.n_future_tokens - 1),
    )
