"""Settings of a model's architecture. model.py adds the experimental settings."""

from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from gptworks.config.base import Fixed, Fraction, PositiveInt, Repeat, Section, derived

MOST_LAYERS = 1000
"""Maximum number of layers that a forward pass may run, repeated ones included."""

T = TypeVar("T")
LayerPattern = Annotated[tuple[T, ...], Field(min_length=1, max_length=MOST_LAYERS)]
"""Values of the layers, from the first layer on. A pattern with fewer values than layers is repeated."""

GATED = ("swiglu", "geglu", "geglu_tanh")
"""Values of `mlp` with a gate matrix."""

EARLIER_DEFAULTS = {"norm": "layernorm", "mlp": "gelu", "qk_norm": False, "zero_init_projections": False}
"""Values of older architectures. Presets and imported models have them as defaults, instead of the defaults below."""


def _inner_width(width: int, mlp: str) -> int:
    return -(-8 * width // (3 * 64)) * 64 if mlp in GATED else 4 * width


Factors = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(max_length=1 << 16)]


class RopeScaling(Section):
    """Rescaling of the rotary frequencies, for a context longer than in training."""

    type: Fixed[Literal["linear", "dynamic", "yarn", "llama3", "longrope"]] = Field(
        description="linear: positions divided by the factor (Chen et al., 2023). dynamic: a base that grows with the "
        "length of the text or of its cache (NTK-aware). yarn: slow frequencies interpolated, fast ones kept (Peng et "
        "al., 2023). llama3: Llama 3.1's form of yarn (Grattafiori et al., 2024). longrope: one factor per frequency, "
        "with a second set for texts beyond the original context (Ding et al., 2024)."
    )
    factor: Fixed[float] = Field(ge=1, description="New context / original context.")
    original_context_length: Fixed[PositiveInt | None] = Field(
        None, description="Context that the frequencies were made for. None: context_length / factor."
    )
    beta_fast: Fixed[float] = Field(
        default_factory=derived("type", lambda kind: 4.0 if kind == "llama3" else 32.0),
        gt=0,
        description="yarn, llama3: keep pairs that turn more often than this within the original context. Default: 32; "
        "llama3: 4.",
    )
    beta_slow: Fixed[float] = Field(
        1.0, gt=0, description="yarn, llama3: interpolate pairs that turn less often than this."
    )
    attention_factor: Fixed[float | None] = Field(
        None,
        gt=0,
        description="yarn, longrope: factor of the rotated queries and keys. None: 0.1 ln(factor) + 1; longrope: "
        "sqrt(1 + ln(factor) / ln(original context)).",
    )
    short_factors: Fixed[Factors | None] = Field(
        None, description="longrope: divisor of each pair's frequency in texts up to the original context."
    )
    long_factors: Fixed[Factors | None] = Field(None, description="longrope: the divisors in longer texts.")

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return self.type in ("dynamic", "longrope")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type not in ("yarn", "llama3") and (self.beta_fast, self.beta_slow) != (32.0, 1.0):
            raise ValueError(
                f"beta_fast or beta_slow is set and type={self.type}: only yarn and llama3 have them; leave them out"
            )
        if self.type not in ("yarn", "longrope") and self.attention_factor is not None:
            raise ValueError(f"attention_factor with type={self.type}: only yarn and longrope have it; leave it out")
        for name in ("short_factors", "long_factors"):
            if (getattr(self, name) is None) == (self.type == "longrope"):
                raise ValueError(f"{name} belongs to type=longrope, and type={self.type}: set both or neither")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow:g} is not below beta_fast={self.beta_fast:g}: exchange them")
        return self


class Architecture(Section):
    """A decoder-only transformer. Names follow the GPT-3 paper (Brown et al., 2020, table 2.1)."""

    vocab_size: Repeat[int] = Field(
        0, ge=0, le=10_000_000, description="Number of token ids. 0: taken from the tokenizer."
    )
    context_length: Fixed[PositiveInt] = Field(le=1 << 22, description="Longest sequence in tokens (T).")
    n_layers: Fixed[PositiveInt] = Field(le=MOST_LAYERS, description="Number of blocks (L).")
    d_model: Fixed[PositiveInt] = Field(le=1_000_000, description="Width of the residual stream (C).")
    n_heads: Fixed[PositiveInt] = Field(le=1_000_000, description="Query heads per layer (H).")
    n_kv_heads: Fixed[PositiveInt] = Field(
        default_factory=derived("n_heads"),
        le=1_000_000,
        description="Key/value heads (G). Fewer than n_heads: grouped-query attention.",
    )
    d_head: Fixed[PositiveInt] = Field(
        default_factory=lambda data: data["d_model"] // data["n_heads"] or 1,
        le=1_000_000,
        description="Width of one head (D). Default: d_model / n_heads, which must be an integer.",
    )
    mlp: Fixed[Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"]] = Field(
        "swiglu",
        description="Activation. relu2: squared ReLU (So et al., 2021). swiglu, geglu: with a gate (Shazeer, 2020).",
    )
    d_ff: Fixed[PositiveInt] = Field(
        default_factory=lambda data: _inner_width(data["d_model"], data["mlp"]),
        le=10_000_000,
        description="Inner width of the MLP. Default: 4 × d_model; with a gate 8/3 × d_model, rounded up to a multiple "
        "of 64.",
    )

    position: Fixed[Literal["learned", "rope", "none"]] = Field(
        "rope", description="Positional encoding. rope: rotary."
    )
    rope_theta: Fixed[float] = Field(10_000.0, gt=1, description="Base of the rotary frequencies (Su et al., 2021).")
    rope_fraction: Fixed[float] = Field(1.0, gt=0, le=1, description="First share of each head to rotate (GPT-NeoX).")
    rope_pattern: Fixed[LayerPattern[Literal["rope", "none"]]] = Field(
        ("rope",), description="Pattern over the layers: which are rotated (SmolLM3)."
    )
    rope_scaling: Fixed[RopeScaling | None] = Field(None, description="Extends the trained context.")
    window_rope_theta: Fixed[float | None] = Field(
        None, gt=1, description="Base in windowed layers, without scaling (OLMo 3). None: as in the other layers."
    )
    norm: Fixed[Literal["layernorm", "rmsnorm"]] = Field("rmsnorm", description="Kind of norm.")
    norm_eps: Fixed[float] = Field(1e-5, gt=0, description="Added to the mean square or variance.")
    norm_bias: Fixed[bool] = Field(
        default_factory=derived("norm", lambda norm: norm == "layernorm"),
        description="Shift of LayerNorm. Default: true for layernorm; rmsnorm has none.",
    )
    norm_placement: Fixed[Literal["before", "after", "both"]] = Field(
        "before", description="Norms of the inputs of attention and MLP, of their outputs (OLMo 2), or both (Gemma 2)."
    )
    attention_bias: Fixed[bool | Literal["qkv", "out"]] = Field(
        False, description="Biases of the query, key, value and output projections. qkv, out: only of those."
    )
    attention_scale: Fixed[float | None] = Field(None, gt=0, description="Factor of q·k. None: 1 / sqrt(d_head).")
    mlp_bias: Fixed[bool] = Field(False, description="Biases of the MLP's linear layers.")
    qk_norm: Fixed[bool | Literal["whole"]] = Field(
        True, description="RMSNorm of queries and keys in each head (Henry et al., 2020). whole: over all heads."
    )
    embedding_scale: Fixed[float] = Field(1.0, gt=0, description="Factor of the token embedding (Granite).")
    residual_scale: Fixed[float] = Field(1.0, gt=0, description="Factor of the outputs of attention and MLP (Granite).")
    logit_divisor: Fixed[float] = Field(1.0, gt=0, description="Divisor of the logits (Granite).")
    attention_softcap: Fixed[float | None] = Field(
        None, gt=0, description="Scores s become softcap · tanh(s / softcap) (Gemma 2). None: no cap."
    )
    logit_softcap: Fixed[float | None] = Field(None, gt=0, description="The same for logits (Gemma 2).")
    tie_embeddings: Fixed[bool] = Field(True, description="Use the embedding as the head (Press & Wolf, 2017).")
    window: Fixed[PositiveInt | None] = Field(
        None, description="Tokens that a windowed layer attends to, including the current one. None: all."
    )
    window_pattern: Fixed[LayerPattern[Literal["full", "window"]]] = Field(
        default_factory=lambda data: ("window",) if data["window"] else ("full",),
        description="Pattern over the layers: which are windowed.",
    )

    parallel_residual: Fixed[bool] = Field(
        False, description="Attention and MLP both read the block's input, each with its norm (GPT-NeoX)."
    )

    n_experts: Fixed[int] = Field(
        0, ge=0, le=4096, description="Experts (MLPs) per layer, chosen by a router. 0: one dense MLP."
    )
    n_experts_per_token: Fixed[PositiveInt] = Field(2, le=4096, description="Experts per token (top-k).")
    d_ff_shared: Fixed[int] = Field(
        0, ge=0, le=10_000_000, description="Inner width of a shared expert for every token. 0: none."
    )

    dropout_embedding: Fixed[Fraction] = Field(0.0, description="Dropout rate of the embeddings.")
    dropout_attention: Fixed[Fraction] = Field(0.0, description="Dropout rate of the attention weights.")
    dropout_residual: Fixed[Fraction] = Field(0.0, description="Dropout rate of the outputs of attention and MLP.")
    dropout_mlp: Fixed[Fraction] = Field(0.0, description="Dropout rate of the MLP's inner channels.")

    init: Fixed[Literal["normal", "gpt2", "xavier", "induction"]] = Field(
        "normal",
        description="normal: N(0, init_std). gpt2: normal with residual projections scaled by 1/sqrt(2L). xavier: "
        "uniform by each matrix's fan (Glorot & Bengio, 2010). induction: normal, except for one head in each of the "
        "first two layers; together they copy what followed the same token before (Olsson et al., 2022). It needs "
        "rotary positions in those layers and norm_placement=before.",
    )
    init_std: Fixed[float] = Field(0.02, gt=0, description="Standard deviation of init=normal and gpt2.")
    zero_init_projections: Fixed[bool] = Field(
        default_factory=derived("init", lambda init: init in ("normal", "induction")),
        description="Residual projections start at zero, so blocks start as the identity. Default: true with "
        "init=normal and with init=induction except for its two heads.",
    )

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: three matrices instead of two."""
        return self.mlp in GATED

    @property
    def norms_behind(self) -> tuple[str, str] | None:
        """Names of the norms after attention and after the MLP; None if the block has no such norms."""
        names = {"before": None, "after": ("norm1", "norm2"), "both": ("norm1_after", "norm2_after")}
        return names[self.norm_placement]

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return self.attention_bias in (True, "qkv")

    @property
    def out_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.attention_bias in (True, "out")

    @property
    def score_scale(self) -> float:
        """Factor by which attention multiplies q·k."""
        return self.d_head**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def d_rotary(self) -> int:
        """Number of elements of each head that the rotary embedding rotates."""
        return int(self.d_head * self.rope_fraction)

    def layer_rotates(self, layer: int) -> bool:
        """Return whether a layer uses the rotary embedding."""
        return self.position == "rope" and self.rope_pattern[layer % len(self.rope_pattern)] == "rope"

    @property
    def rotating_windows(self) -> Self | None:
        """Copy of the settings with the unscaled rotary base of windowed layers; None if all layers rotate alike."""
        if self.window_rope_theta is None:
            return None
        return self.model_copy(
            update={"rope_theta": self.window_rope_theta, "rope_scaling": None, "window_rope_theta": None}
        )

    @property
    def original_context_length(self) -> int:
        """Context length of the unscaled rotary frequencies, which `rope_scaling` extends."""
        context, scaling = self.context_length, self.rope_scaling
        if scaling is None:
            return context
        return scaling.original_context_length or max(1, round(context / scaling.factor))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Number of tokens that each layer attends to; None if it attends to all."""
        return tuple(map(self.layer_window, range(self.n_layers)))

    def layer_window(self, layer: int) -> int | None:
        """Return the number of tokens that a layer attends to; None if it attends to all."""
        return self.window if self.window_pattern[layer % len(self.window_pattern)] == "window" else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "d_head" not in self.model_fields_set:
            self._multiple("d_model", "n_heads", "choose n_heads that divides d_model, or set d_head")
        self._multiple("n_heads", "n_kv_heads", "choose n_kv_heads that divides n_heads")
        if self.position == "rope" and (self.d_rotary % 2 or not self.d_rotary):
            raise ValueError(
                f"rope_fraction={self.rope_fraction:g} of d_head={self.d_head} is {self.d_rotary} elements, and "
                f"position=rope rotates pairs: choose a fraction, n_heads or d_head that gives an even number"
            )
        self._check_scaling()
        if self.n_experts:
            self._at_most("n_experts_per_token", "n_experts", "lower it")
        if self.d_ff_shared and not self.n_experts:
            raise ValueError(f"d_ff_shared={self.d_ff_shared} is set and n_experts is 0: set n_experts, or drop it")
        if self.norm_placement != "before" and self.parallel_residual:
            raise ValueError(
                f"norm_placement={self.norm_placement} with parallel_residual=true: no architecture has both; "
                f"drop one of them"
            )
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ValueError("norm_bias=true with norm=rmsnorm: RMSNorm has no shift; leave norm_bias out")
        if "window" in self.window_pattern and self.window is None:
            raise ValueError("window_pattern has a `window` entry and window is not set: set window to a token count")
        if self.window is not None and "window" not in self.window_pattern:
            raise ValueError(f"window={self.window} is set and window_pattern has no `window` entry: drop one of them")
        if self.window is None and self.window_rope_theta is not None:
            raise ValueError(
                f"window_rope_theta={self.window_rope_theta:g} is set and window is not: it is the base of windowed "
                f"layers; set window, or drop it"
            )
        self._at_most("window", "context_length", "choose at most the context")
        return self

    def _check_scaling(self) -> None:
        if "rope" not in self.rope_pattern:
            raise ValueError("rope_pattern has no `rope` entry, so no layer is rotated: set position=none instead")
        for name in ("rope_scaling", "rope_fraction", "rope_pattern", "window_rope_theta"):
            if self.position != "rope" and getattr(self, name) not in (None, 1.0, ("rope",)):
                raise ValueError(f"{name} is set and position={self.position}: it needs position=rope; drop it")
        if self.rope_scaling is None:
            return
        if self.original_context_length > self.context_length:
            raise ValueError(
                f"rope_scaling.original_context_length={self.original_context_length} is longer than "
                f"context_length={self.context_length}: choose at most context_length"
            )
        for name in ("short_factors", "long_factors"):
            factors = getattr(self.rope_scaling, name)
            if factors is not None and len(factors) != self.d_rotary // 2:
                raise ValueError(
                    f"rope_scaling.{name} has {len(factors)} numbers, and each head has {self.d_rotary // 2} rotated "
                    f"pairs: give one number per pair"
                )
        if self.rope_scaling.type == "longrope" and self.original_context_length < 2:
            raise ValueError("rope_scaling.type=longrope needs an original context of at least 2 tokens")
        if self.rope_scaling.type == "dynamic" and self.d_rotary < 4:
            raise ValueError(f"rope_scaling.type=dynamic needs at least 4 rotated elements a head, not {self.d_rotary}")
