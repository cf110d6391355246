"""GPT: a decoder-only transformer. One class builds every architecture that ModelConfig describes.

    tokens ─► embedding (+ position) ─► dropout ─► L × block ─► norm ─► head ─► logits

    block.py has a diagram of a block; lab/ has the parts that laboratory settings add.

Shapes: B batch, T time, C width, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from gptworks.config import ModelConfig, computes_again
from gptworks.kernels import dispatch
from gptworks.model.attention import Attention, AttentionInputs
from gptworks.model.block import Block
from gptworks.model.cache import SlotRows
from gptworks.model.cost import DROPOUT, LayerCost, Shapes, Stage
from gptworks.model.lab.embeddings import BigramEmbedding, Smear, previous_tokens
from gptworks.model.lab.future import build_future_heads, future_cost
from gptworks.model.lab.induction import begin_with_induction
from gptworks.model.lab.stream import Carried, build_tables
from gptworks.model.layers import MLP, Dropout, Linear, Norm, build_norm, build_scale, cap, product_dtype
from gptworks.model.rotary import Rotary
from gptworks.model.scores import TOKENS_PER_START, takes_bounds, text_bounds, texts_bias


class GPT(nn.Module):
    """A decoder-only transformer over `config.vocab_size` tokens."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the model and initialize it from torch's global random state.

        Raises:
            ValueError: config.vocab_size is 0, because no tokenizer has set it yet.
        """
        super().__init__()
        if not config.vocab_size:
            raise ValueError("model.vocab_size is not known: set it, or prepare the data, whose tokenizer sets it")
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding_scale, self.feature_scale = map(build_scale, (config.embedding_scale, 1 / config.logit_divisor))
        learned, pairs = config.position == "learned", config.bigram_vocab_size
        self.position_embedding = nn.Embedding(config.context_length, config.d_model) if learned else None
        self.smear = Smear(config.d_gate) if config.smear else None
        self.bigram_embedding = BigramEmbedding(pairs, config.d_model) if pairs else None
        self.rotary = Rotary(config) if config.position == "rope" else None
        self.window_rotary = Rotary(windows) if (windows := config.rotating_windows) else None
        """Rotary embedding of layers with a window; None if these layers use `rotary`."""
        self.dropout = Dropout(config.dropout_embedding)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.value_embeddings = build_tables(config)
        self.norm = build_norm(config)
        self.untied_head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, bias=False)
        self.activation_checkpointing = "none"
        """Blocks that the backward pass recomputes from their input: none, every second (selective) or all (block)."""
        self.watched: list[Tensor] | None = None
        """If a list, the forward pass appends the root mean square of each block's output, a scalar, to it."""
        initialize(self)
        self.future_heads = build_future_heads(config)  # last, to leave the other weights' random values unchanged

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, C]: the token embedding's if the two are tied."""
        return (self.untied_head or self.token_embedding).weight

    def features(
        self,
        tokens: Tensor,
        cache: SlotRows | None = None,
        router_logits: list[Tensor] | None = None,
        text_positions: Tensor | None = None,
        text_starts: Tensor | None = None,
    ) -> Tensor:
        """Return the last norm's output [B, T, C], divided by `config.logit_divisor`, for token ids [B, T]; the head
        computes logits from it.

        With `cache` (from `SlotCache.rows`), `tokens` are a flat batch [1, N] of several texts' next tokens. Each text
        continues the tokens in its slot of the cache, which also stores the new ones.
        If `router_logits` is a list, the router's logits [B, T, E] of each layer with experts are appended to it.
        If rows hold several texts one after the other, `text_positions`, int64 [B, T], has each token's position in its
        text, from 0: no text sees another, as if each had its own row. `cache` must then be None. `text_starts`, int32
        [B, K], has the index in the row of each text's first token, and T in the remaining places. With these
        indices, attention on recent GPUs computes nothing between texts, unless K is large (`TOKENS_PER_START`).

        Raises:
            ValueError: a row has more tokens than the context.
        """
        length, context = tokens.size(1), self.config.context_length
        positions: slice | Tensor = slice(0, length)
        if cache is not None:
            assert text_positions is None
            positions = cache.positions
        elif length > context:
            raise ValueError(f"{length} tokens do not fit in a context of {context}")
        elif text_positions is not None:
            positions = text_positions
        previous = None
        if self.config.reads_previous_token:
            previous = previous_tokens(tokens, text_positions) if cache is None else cache.previous_tokens(tokens)
        x: Tensor = self.embed(tokens, previous, in_order=cache is None)  # [B, T, C]
        if self.bigram_embedding is not None:
            x = x + self.bigram_embedding(tokens, previous)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[positions]
        x = self.dropout(x)
        text_length = cache.capacity if cache is not None else length

        def tables(rotary: Rotary | None) -> tuple[Tensor, Tensor] | None:
            if rotary is None:
                return None
            cos, sin = rotary.at(positions, text_length, product_dtype(x))
            # for rows of several texts: [B, 1, T, R/2]
            return (cos, sin) if text_positions is None else (cos.unsqueeze(1), sin.unsqueeze(1))

        everywhere = tables(self.rotary)
        in_windows = everywhere if self.window_rotary is None else tables(self.window_rotary)
        biases: dict[int | None, Tensor] = {}  # these and the bounds are computed once for all layers
        bounds, dtype = None, product_dtype(x)
        has_bounds = takes_bounds(self.config, dtype.itemsize == 2, dispatch.has_flash(x.device))
        fuses_groups = dispatch.fuses_groups(x.device)
        if text_starts is not None and TOKENS_PER_START * text_starts.size(1) <= length and has_bounds:
            bounds = text_bounds(text_starts, length)
        elif text_positions is not None:
            windows = set(self.config.layer_windows)
            biases = {window: texts_bias(text_positions, window, dtype) for window in windows}
        carried = Carried(self.config, tokens, x, self.value_embeddings)
        # Recompute in evaluation mode too: DPO and GRPO run reference models in this mode with gradients enabled.
        keeps_graph = cache is None and torch.is_grad_enabled()
        for use, i in enumerate(self.config.layer_uses):
            block, window = self.blocks[i], self.config.layer_window(i)
            again = keeps_graph and computes_again(self.activation_checkpointing, use)
            rotary = everywhere if window is None else in_windows
            inputs = AttentionInputs(
                rotary if self.config.layer_rotates(i) else None,
                cache.layer(use) if cache is not None else None,
                biases.get(window),
                bounds,
                fuses_groups,
            )
            given = (x, inputs, carried.inputs(i))
            x, routed, own = checkpoint(block, *given, use_reentrant=False) if again else block(*given)
            carried.after(i, x, own)
            if self.watched is not None:
                self.watched.append(torch.linalg.vector_norm(x.detach(), dtype=torch.float32) / math.sqrt(x.numel()))
            if router_logits is not None and routed is not None:
                router_logits.append(routed)
        x = self.feature_scale(self.norm(x))
        return x

    def embed(self, tokens: Tensor, previous: Tensor | None, *, in_order: bool = True) -> Tensor:
        """Return the scaled embeddings [B, T, C] of token ids [B, T].

        Smearing, if set, adds part of the previous token's embedding to each. With `in_order`, each token's
        predecessor, if any, is the element before it in `tokens`.
        """
        x: Tensor = self.embedding_scale(self.token_embedding(tokens))
        if self.smear is not None and previous is not None:
            looked_up = None if in_order else self.embedding_scale(self.token_embedding(previous.clamp(min=0)))
            before = F.pad(x[:, :-1], (0, 0, 1, 0)) if looked_up is None else looked_up
            x = self.smear(x, before, previous)
        return x

    @staticmethod
    def entry_cost(s: Shapes) -> list[Stage]:
        """Return the memory of each operation before the first block, in order. A lookup saves only token ids. A tied
        table also gets the head's gradient, and the sum of both gradients is a third tensor."""
        c, stream, table = s.config, s.floats(s.config.d_model), s.config.vocab_size * s.config.d_model
        kept = (stream if s.on_cpu else s.n_tokens * c.d_model) if c.dropout_embedding else 0
        tied = 4 * table * c.tie_embeddings
        gradient = stream if kept else 0
        positions = c.context_length * c.d_model if c.position == "learned" else 0
        shared = GPT.shared_gradients_bytes(s, trains_embedding=True)
        return [
            Stage("token embedding", arrives=tied, scratch=tied, table=table, module="token_embedding"),
            Stage("token lookup", arrives=gradient + shared, scratch=4 * table, module="token_embedding"),
            *Smear.cost(s),
            *BigramEmbedding.cost(s),
            *([Stage("position embedding", table=positions, module="position_embedding")] if positions else []),
            Stage("embedding dropout", {DROPOUT: kept}, arrives=stream, leaves=gradient),
        ]

    @staticmethod
    def layer_cost(s: Shapes, layer: int) -> LayerCost:
        """Return the memory of a layer: its block, and the tensors that `Carried` keeps for it."""
        return LayerCost(
            Block.cost(s, layer),
            Carried.lookup_cost(s, layer),
            Block.passing_bytes(s, layer),
            Carried.kept_bytes(s, layer),
        )

    @staticmethod
    def exit_cost(s: Shapes, n_future: int) -> list[Stage]:
        """Return the memory of the last norm, and of the heads for `n_future` tokens beyond the next."""
        return [replace(Norm.cost(s, "final norm"), merges=False), *future_cost(s, n_future)]

    shared_gradients_bytes = staticmethod(Carried.gradients_bytes)  # gradients of tensors that all blocks read

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits [..., V] of features [..., C]."""
        return cap(dispatch.linear(features, self.head_weight), self.config.logit_softcap)

    def forward(self, tokens: Tensor, cache: SlotRows | None = None) -> Tensor:
        """Return logits [B, T, V] for token ids [B, T]: at each position, the scores of the next token."""
        return self.logits(self.features(tokens, cache))

    def drop_future_heads(self) -> int:
        """Remove the heads for tokens beyond the next, and return the number of them. The logits stay the same."""
        n_heads = len(self.future_heads)
        self.config, self.future_heads = self.config.model_copy(update={"n_future_tokens": 1}), nn.ModuleList()
        return n_heads

    def assign(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Make `tensors` the weights of a model on the meta device, without copies, and compute its tables."""
        self.load_state_dict(tensors, assign=True)
        self.reset_tables(device)

    def reset_tables(self, device: torch.device | None = None) -> None:
        """Compute the rotary tables, which checkpoints leave out."""
        for module in self.modules():
            if isinstance(module, Rotary):
                module.reset(device)

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.weight.dtype


@torch.no_grad()
def initialize(model: GPT) -> None:
    """Initialize matrices by `config.init`; with `config.zero_init_projections`, set residual projections to 0.

    Biases and the table of bigrams begin at 0; norms already have weight 1 and bias 0.
    """
    config = model.config
    if model.head_weight.is_meta and not is_in_torch_dispatch_mode():
        return  # meta tensors have no values, and no dispatch mode records the calls, which take 0.2 ms each
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            if config.init == "xavier":
                nn.init.xavier_uniform_(module.weight)
            else:
                nn.init.normal_(module.weight, std=config.init_std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if model.bigram_embedding is not None:
        nn.init.zeros_(model.bigram_embedding.table.weight)
    for projection in residual_projections(model):
        if config.zero_init_projections:
            nn.init.zeros_(projection.weight)
        elif config.init == "gpt2":  # Radford et al., 2019, section 2.3
            nn.init.normal_(projection.weight, std=config.init_std / math.sqrt(2 * len(config.layer_uses)))
    if config.init == "induction" and not model.head_weight.is_meta:
        first, second = [module for module in model.modules() if isinstance(module, Attention)][:2]
        begin_with_induction(config, model.token_embedding.weight, model.head_weight, first, second)


def residual_projections(model: GPT) -> list[nn.Linear]:
    """Return the linear layers that write to the residual stream: attention's `out` and each MLP's `down`."""
    return [
        module.out if isinstance(module, Attention) else module.down
        for module in model.modules()
        if isinstance(module, Attention | MLP)
    ]


@contextmanager
def eval_mode(model: GPT) -> Iterator[None]:
    """Run the `with` block with the model in evaluation mode, without dropout; then restore each module's mode."""
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
