"""Every setting: typed, validated, frozen. Knows nothing of torch, nor of files (see recipe.py)."""

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

IGNORED = -100
"""A target that carries no loss, as `torch.nn.functional.cross_entropy` has it."""


def computes_again(activation_checkpointing: str, layer: int) -> bool:
    """Whether training keeps of a block its input alone: of each, or with `selective` of every second one."""
    return activation_checkpointing == "block" or (activation_checkpointing == "selective" and layer % 2 == 0)


PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen group of settings that accepts only the keys it knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def _from(name: str, function: Callable[[Any], Any] = lambda value: value) -> Any:
    """A default computed from a field declared earlier."""
    return lambda data: function(data[name])


class RopeScaling(Section):
    """Rotary frequencies changed so that a model reaches beyond the context it was trained with."""

    type: Literal["linear", "dynamic", "yarn"] = Field(
        description="linear: positions divided by the factor (Chen et al., 2023). dynamic: a base that grows with the "
        "text's length, or with the room that its cache has (NTK-aware). yarn: slow frequencies interpolated, fast "
        "ones kept (Peng et al., 2023)."
    )
    factor: float = Field(ge=1, description="New context over original context.")
    original_context_length: PositiveInt | None = Field(
        None, description="Tokens the frequencies were made for. None: context_length / factor."
    )
    beta_fast: float = Field(32.0, gt=0, description="yarn: pairs that turn more often than this are kept.")
    beta_slow: float = Field(1.0, gt=0, description="yarn: pairs that turn less often than this are interpolated.")
    attention_factor: float | None = Field(
        None, gt=0, description="yarn: scale of the rotated queries and keys. None: 0.1 ln(factor) + 1."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        yarn_alone = (self.beta_fast, self.beta_slow, self.attention_factor)
        if self.type != "yarn" and yarn_alone != (32.0, 1.0, None):
            raise ValueError(
                f"beta_fast, beta_slow or attention_factor is set and type={self.type}: "
                f"only yarn has them; leave them out"
            )
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow:g} is not below beta_fast={self.beta_fast:g}: exchange them")
        return self


class ModelConfig(Section):
    """A decoder-only transformer. Names follow the GPT-3 paper (Brown et al., 2020, table 2.1)."""

    vocab_size: int = Field(0, ge=0, description="Number of token ids. 0: taken from the tokenizer.")
    context_length: PositiveInt = Field(description="Longest sequence in tokens (T).")
    n_layers: PositiveInt = Field(description="Number of blocks (L).")
    d_model: PositiveInt = Field(description="Width of the residual stream (C).")
    n_heads: PositiveInt = Field(description="Query heads per layer (H).")
    n_kv_heads: PositiveInt = Field(
        default_factory=_from("n_heads"), description="Key/value heads; fewer than n_heads is grouped-query attention."
    )
    d_head: PositiveInt = Field(
        default_factory=lambda data: data["d_model"] // data["n_heads"] or 1,
        description="Width of one head (D). Default: d_model / n_heads, which must then divide.",
    )
    d_ff: PositiveInt = Field(
        default_factory=_from("d_model", lambda width: 4 * width),
        description="Inner width of the MLP. Default: 4 × d_model.",
    )

    position: Literal["learned", "rope", "none"] = Field("rope", description="How positions enter the model.")
    rope_theta: float = Field(10_000.0, gt=1, description="Base of the rotary frequencies (Su et al., 2021).")
    rope_fraction: float = Field(1.0, gt=0, le=1, description="Share of each head that is rotated, its first part.")
    rope_scaling: RopeScaling | None = Field(None, description="For a context longer than the one trained with.")
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = Field(1e-5, gt=0)
    norm_bias: bool = Field(
        default_factory=_from("norm", lambda norm: norm == "layernorm"),
        description="Shift term of LayerNorm. Default: true for layernorm; rmsnorm has none.",
    )
    mlp: Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu"] = Field(
        "gelu", description="Activation; swiglu and geglu add a gate matrix (Shazeer, 2020)."
    )
    attention_bias: bool | Literal["qkv", "out"] = Field(
        False, description="Biases on the query, key, value and output projections; qkv or out: on those alone."
    )
    attention_scale: float | None = Field(None, gt=0, description="Factor of q·k. None: 1 / sqrt(d_head).")
    mlp_bias: bool = Field(False, description="Biases on the MLP's linear layers.")
    qk_norm: bool = Field(False, description="RMSNorm over each head of queries and keys (Henry et al., 2020).")
    tie_embeddings: bool = Field(True, description="The head shares the token embedding's matrix.")

    window: PositiveInt | None = Field(
        None, description="Tokens a windowed layer sees, the token itself included. None: every layer sees all."
    )
    window_pattern: tuple[Literal["full", "window"], ...] = Field(
        default_factory=lambda data: ("window",) if data["window"] else ("full",),
        min_length=1,
        description="Repeated over the layers: which are windowed.",
    )

    parallel_residual: bool = Field(
        False, description="Attention and MLP both read the block's input, each through its norm (GPT-NeoX)."
    )

    n_experts: int = Field(
        0, ge=0, description="MLPs a layer, of which a router chooses for each token. 0: one, dense."
    )
    n_experts_per_token: PositiveInt = Field(2, description="Experts that a token is sent to (top-k).")
    d_ff_shared: int = Field(0, ge=0, description="Inner width of one more expert that sees every token. 0: none.")

    dropout_embedding: Fraction = 0.0
    dropout_attention: Fraction = 0.0
    dropout_residual: Fraction = 0.0

    init: Literal["normal", "gpt2", "xavier"] = Field(
        "normal",
        description="normal: N(0, init_std). gpt2: the same, residual projections scaled by 1/sqrt(2L). "
        "xavier: uniform (Glorot & Bengio, 2010), each matrix by its own fan.",
    )
    init_std: float = Field(0.02, gt=0)
    zero_init_projections: bool = Field(
        False, description="Residual projections start at zero: blocks begin as identity."
    )

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies by a gate (three matrices instead of two)."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return self.attention_bias in (True, "qkv")

    @property
    def out_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.attention_bias in (True, "out")

    @property
    def d_rotary(self) -> int:
        """Elements of each head that the rotary embedding turns."""
        return int(self.d_head * self.rope_fraction)

    @property
    def original_context_length(self) -> int:
        """Tokens that the rotary frequencies were made for: the context, or less where they are scaled."""
        if self.rope_scaling is None:
            return self.context_length
        return self.rope_scaling.original_context_length or max(
            1, round(self.context_length / self.rope_scaling.factor)
        )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """For each layer, the tokens it sees, or None for all of them."""
        pattern = self.window_pattern
        return tuple(self.window if pattern[i % len(pattern)] == "window" else None for i in range(self.n_layers))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "d_head" not in self.model_fields_set and self.d_model % self.n_heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}: "
                f"choose n_heads that divides d_model, or set d_head"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}: "
                f"each key/value head serves a whole number of query heads"
            )
        if self.position == "rope" and self.rope_fraction == 1 and self.d_head % 2:
            raise ValueError(
                f"d_head={self.d_head} is odd, and position=rope rotates pairs: "
                f"choose n_heads so that d_model / n_heads is even, or set d_head"
            )
        if self.position == "rope" and (self.d_rotary % 2 or not self.d_rotary):
            raise ValueError(
                f"rope_fraction={self.rope_fraction:g} of d_head={self.d_head} is {self.d_rotary} elements, and "
                f"position=rope rotates pairs: choose a fraction that gives an even number"
            )
        self._check_scaling()
        if self.n_experts and self.n_experts_per_token > self.n_experts:
            raise ValueError(
                f"n_experts_per_token={self.n_experts_per_token} is more than n_experts={self.n_experts}: "
                f"a token goes to at most all of them"
            )
        if self.d_ff_shared and not self.n_experts:
            raise ValueError(f"d_ff_shared={self.d_ff_shared} is set and n_experts is 0: set n_experts, or drop it")
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ValueError("norm_bias=true with norm=rmsnorm: RMSNorm has no shift; leave norm_bias out")
        if "window" in self.window_pattern and self.window is None:
            raise ValueError("window_pattern names windowed layers and window is not set: set window to a token count")
        if self.window is not None and "window" not in self.window_pattern:
            raise ValueError(f"window={self.window} is set and window_pattern has no `window` entry: drop one of them")
        if self.window is not None and self.window > self.context_length:
            raise ValueError(
                f"window={self.window} is longer than context_length={self.context_length}: "
                f"a window holds at most the context"
            )
        return self

    def _check_scaling(self) -> None:
        for name in ("rope_scaling", "rope_fraction"):
            if self.position != "rope" and getattr(self, name) not in (None, 1.0):
                raise ValueError(f"{name} is set and position={self.position}: only position=rope rotates; drop it")
        if self.rope_scaling is None:
            return
        if self.original_context_length > self.context_length:
            raise ValueError(
                f"rope_scaling.original_context_length={self.original_context_length} is longer than "
                f"context_length={self.context_length}: scaling reaches beyond the original context"
            )
        if self.rope_scaling.type == "dynamic" and self.d_rotary < 4:
            raise ValueError(f"rope_scaling.type=dynamic needs at least 4 rotated elements a head, not {self.d_rotary}")


# ------------------------------------------------------------------------------------------------ tokenizer


class _Tokenizer(Section):
    added_tokens: tuple[str, ...] = Field(
        (),
        description="Special tokens added to it, such as <|im_start|> and <|im_end|>, which chatml writes. A run that "
        "starts from one without them gets embeddings for them, each the mean of the others.",
    )
    chat_template: str | None = Field(
        None,
        description="chatml, alpaca, plain, or a Jinja file. None: the one that lies beside a tokenizer read from a "
        "folder, if any.",
    )

    @model_validator(mode="after")
    def _check_added(self) -> Self:
        if len(set(self.added_tokens)) != len(self.added_tokens) or not all(self.added_tokens):
            raise ValueError(f"added_tokens={list(self.added_tokens)}: give each name once, and none empty")
        return self


class BPETokenizer(_Tokenizer):
    """Byte-level byte-pair encoding trained on the recipe's own training text. Every byte sequence round-trips."""

    type: Literal["bpe"]
    vocab_size: int = Field(4096, ge=257, description="256 bytes, one document separator, the rest merges.")
    pattern: Literal["llama3", "gpt2", "code"] = Field(
        "llama3",
        description="What one token may span. llama3 and gpt2: as those models have it, which llama.cpp knows (export "
        "to GGUF). code: indentation joins the line break before it; the fewest tokens for code.",
    )


class CharTokenizer(_Tokenizer):
    """One token for each character of the training text."""

    type: Literal["char"]


class WordTokenizer(_Tokenizer):
    """Lower-cased words and punctuation, the most frequent first; <pad> <unk> <bos> <eos> are 0 to 3."""

    type: Literal["word"]
    vocab_size: int = Field(16_000, ge=5, description="At most this many tokens, the four special ones included.")


class GPT2Tokenizer(_Tokenizer):
    """GPT-2's 50,257 tokens."""

    type: Literal["gpt2"]
    path: Path | None = Field(
        None, description="The published ranks file (r50k_base.tiktoken) or a Hugging Face folder. None: the hub."
    )


class FileTokenizer(_Tokenizer):
    """Any `tokenizer.json`, or a folder that holds one."""

    type: Literal["file"]
    path: Path


TokenizerConfig = Annotated[
    BPETokenizer | CharTokenizer | WordTokenizer | GPT2Tokenizer | FileTokenizer, Field(discriminator="type")
]

# ----------------------------------------------------------------------------------------------------- data


class PythonStdlibSource(Section):
    """The standard library's own sources of the interpreter that runs, tests left out."""

    type: Literal["python-stdlib"]


class _FileSource(Section):
    path: str | None = Field(None, description="A file, a folder or a glob. With url: a local copy, used instead.")
    url: str | None = Field(None, description="Downloaded once into the cache; needs sha256.")
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.path and not self.url:
            raise ValueError("neither path nor url is set: say where the text is")
        if self.url and not self.sha256:
            raise ValueError(f"url={self.url} has no sha256: add it, so that the same bytes are used every time")
        return self


class TextSource(_FileSource):
    """UTF-8 text; each file is one document."""

    type: Literal["text"]
    extensions: tuple[str, ...] = Field((".txt", ".md", ".text"), description="Files taken from a folder.")


class JSONLSource(_FileSource):
    """One JSON object a line, plain or .gz; each is one document."""

    type: Literal["jsonl"]
    field: str = "text"


class ParquetSource(_FileSource):
    """Parquet files; each row is one document. Needs the `data` extra."""

    type: Literal["parquet"]
    field: str = "text"


class HuggingFaceSource(Section):
    """A dataset of the Hugging Face hub, or a local dataset folder, streamed. Needs the `data` extra."""

    type: Literal["huggingface"]
    dataset: str
    name: str | None = None
    split: str = "train"
    field: str = "text"


class _RecordsSource(Section):
    """Records from files or a dataset."""

    path: str | None = Field(None, description="A file, a folder or a glob. With url: a local copy, used instead.")
    url: str | None = Field(None, description="Downloaded once into the cache; needs sha256.")
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    dataset: str | None = Field(None, description="Of the Hugging Face hub, or a local dataset folder.")
    name: str | None = None
    split: str = "train"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.path or self.url) == bool(self.dataset):
            raise ValueError("give either path (or url) or dataset: it says where the records are")
        if self.url and not self.sha256:
            raise ValueError(f"url={self.url} has no sha256: add it, so that the same bytes are used every time")
        return self


class ConversationsSource(_RecordsSource):
    """Conversations, or instructions with their answers. Each record is one example.

    Files of .jsonl, .jsonl.gz, .json (one list) or .parquet, or a Hugging Face dataset. Of each file the shape is
    recognized: alpaca (instruction, input, output), sharegpt (conversations of from and value) or messages (messages of
    role and content).
    """

    type: Literal["conversations"]
    shape: Literal["auto", "alpaca", "sharegpt", "messages"] = "auto"


class PreferencesSource(_RecordsSource):
    """Prompts with two answers, of which one is preferred. Each record is one pair.

    Files as for conversations. A record has `chosen` and `rejected`, each an answer or a list of messages, and the
    prompt as `prompt` (text or messages), as `instruction` and `input`, or as the beginning of both lists.
    """

    type: Literal["preferences"]


SourceConfig = Annotated[
    PythonStdlibSource
    | TextSource
    | JSONLSource
    | ParquetSource
    | HuggingFaceSource
    | ConversationsSource
    | PreferencesSource,
    Field(discriminator="type"),
]


class ValidationSplit(Section):
    """What is held out. Deterministic: it depends on the text alone."""

    fraction: float = Field(0.05, gt=0, lt=1)
    by: Literal["auto", "document", "tail"] = Field(
        "auto",
        description="document: whole documents, chosen by a hash of their text. tail: the end of each document. "
        "auto: document where there are at least 20, else tail.",
    )


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    validation: ValidationSplit = ValidationSplit()
    cache_dir: Path = Field(Path("data"), description="Prepared shards go to a folder of their own below this one.")
    shard_tokens: PositiveInt = Field(100_000_000, description="A shard is closed when it holds this many tokens.")
    processes: int = Field(0, ge=0, description="Worker processes for preparing. 0: one for each core.")

    @property
    def conversations(self) -> tuple[ConversationsSource, ...]:
        """The sources where they are conversations; empty where they are text."""
        return tuple(source for source in self.sources if isinstance(source, ConversationsSource))

    @property
    def texts(self) -> tuple[PythonStdlibSource | TextSource | JSONLSource | ParquetSource | HuggingFaceSource, ...]:
        """The sources where they are text; empty where they are conversations."""
        return tuple(source for source in self.sources if not isinstance(source, _RecordsSource))

    @property
    def preferences(self) -> tuple[PreferencesSource, ...]:
        """The sources where they are pairs of answers; else empty."""
        return tuple(source for source in self.sources if isinstance(source, PreferencesSource))

    @property
    def records(self) -> tuple[ConversationsSource | PreferencesSource, ...]:
        """The sources that hold turns, which a chat template writes."""
        return (*self.conversations, *self.preferences)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(map(bool, (self.conversations, self.preferences, self.texts))) > 1:
            raise ValueError(
                "sources mix text, conversations or preferences: train on the one first, then start from that run"
            )
        if self.records and self.validation.by == "tail":
            raise ValueError("validation.by=tail and sources of conversations: whole ones are held out; leave it out")
        return self


# ---------------------------------------------------------------------------------------------------- train


class ParallelConfig(Section):
    """How many processes share a run. How many there are, the launcher says."""

    strategy: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description="ddp: the whole model on each device, gradients added up. fsdp: weights, gradients and optimizer "
        "state in equal shares (Zhao et al., 2023). auto: fsdp where a step of the whole model does not fit.",
    )
    tensor_parallel: PositiveInt = Field(
        1, description="Devices that share each block's matrices: heads and inner width (Shoeybi et al., 2019)."
    )
    reshard_after_forward: bool = Field(
        True, description="fsdp: free a block's gathered weights after its forward pass and gather them again."
    )
    timeout_seconds: float = Field(
        600, gt=0, description="A rank that is silent, or makes all others wait, for so long ends the run."
    )


class TrainConfig(Section):
    """One training run. The length is the first reached of max_steps, epochs and max_minutes."""

    max_steps: PositiveInt | None = None
    epochs: float | None = Field(None, gt=0)
    max_minutes: float | None = Field(None, gt=0)

    batch_size: PositiveInt = Field(32, description="Sequences in one optimizer step.")
    micro_batch_size: PositiveInt = Field(
        default_factory=_from("batch_size"),
        description="Sequences in one forward and backward pass; divides batch_size. Gradients are accumulated. Where "
        "several devices train, each takes so many, or its whole part of the batch where that is less.",
    )
    parallel: ParallelConfig = ParallelConfig()
    activation_checkpointing: Literal["none", "selective", "block"] = Field(
        "none",
        description="block: keep each block's input alone and compute the block again in the backward pass. "
        "selective: so with every second block.",
    )
    compile: Literal["auto", "none", "block"] = Field(
        "auto", description="block: compile each block with torch.compile; auto: on CUDA, where it pays."
    )
    router_balance_weight: float = Field(
        0.01, ge=0, description="Weight of the experts' load-balancing loss (Fedus et al., 2021)."
    )
    router_z_weight: float = Field(0.001, ge=0, description="Weight of the routers' z-loss (Zoph et al., 2022).")

    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon for the blocks' matrices (Jordan et al., 2024), AdamW for the rest."
    )
    learning_rate: float = Field(3e-4, gt=0, description="Peak rate of AdamW.")
    muon_learning_rate: float = Field(0.02, gt=0, description="Peak rate of Muon's matrices.")
    muon_momentum: Fraction = 0.95
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="Decoupled, on matrices only.")
    grad_clip: float = Field(1.0, ge=0, description="Largest global gradient norm. 0: no clipping.")

    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="After warmup: cosine to the end; or constant, then linear decay (WSD); or constant."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warmup.")
    decay_fraction: float = Field(0.2, gt=0, le=1, description="wsd: share of the run that decays, at its end.")
    decay_shape: Literal["linear", "1-sqrt"] = Field(
        "linear", description="wsd: how it decays; 1-sqrt falls faster at first (Hägele et al., 2024)."
    )
    final_rate_fraction: float = Field(0.1, ge=0, le=1, description="Last rate as a fraction of the peak.")

    ema_decay: Fraction = Field(
        0.0, description="Decay of the weights' moving average, which is then evaluated and published. 0: none."
    )

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 autocast where the hardware multiplies bf16 natively, else fp32."
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"

    log_every: PositiveInt = 10
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        (), description="What is given the records of metrics.jsonl besides; each needs the extra of its name."
    )
    evaluate_every: PositiveInt = 250
    evaluate_sequences: int = Field(0, ge=0, description="Validation windows per evaluation, evenly spaced. 0: all.")
    checkpoint_every: PositiveInt = 250
    keep_checkpoints: PositiveInt = Field(2, description="Newest checkpoints kept; the best is kept besides.")
    keep_every: int = Field(0, ge=0, description="Checkpoints at multiples of this are kept too. 0: none.")
    sample_every: int = Field(0, ge=0, description="Steps between samples. 0: none.")
    sample_prompts: tuple[str, ...] = ("",)
    sample_tokens: PositiveInt = 100

    early_stopping_patience: PositiveInt | None = Field(None, description="Evaluations without improvement.")
    spike_deviations: float = Field(
        0.0, ge=0, description="Skip a step whose gradient norm is so many deviations above the run's. 0: never."
    )
    max_skipped_steps: PositiveInt = Field(10, description="Skipped steps in a row that end the run, or take it back.")
    max_rollbacks: int = Field(
        0,
        ge=0,
        description="How often a run may go back to its last checkpoint and on, past the batches that broke it.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_steps is None and self.epochs is None and self.max_minutes is None:
            raise ValueError("the run has no end: set one of max_steps, epochs, max_minutes")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={self.micro_batch_size}: "
                f"a step is a whole number of micro-batches"
            )
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} leaves nothing of max_steps={self.max_steps}: warm up for less"
            )
        return self

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches in one optimizer step."""
        return self.batch_size // self.micro_batch_size

    def rank_micro_batch_size(self, n_ranks: int) -> int:
        """Sequences in one pass of one of `n_ranks` devices that divide the batch."""
        return max(1, min(self.micro_batch_size, self.batch_size // n_ranks))


# ------------------------------------------------------------------------------------------------ objective


DataFault = Literal[
    "nothing-learned", "little-learned", "prompts-learned", "unanswered", "empty-answers", "swapped-roles",
    "answers-altered", "answers-cut-away", "answers-cut-short", "no-end-token", "tokens-not-special",
    "template-changed", "no-base-run", "duplicates", "validation-overlap", "one-answer", "unknown-tokens",
    "answers-alike",
]  # fmt: skip
"""What conversations and pairs of answers are checked for before the first step."""


class _Objective(Section):
    allow: tuple[DataFault, ...] = Field(
        (), description="Faults found in the examples, which are to be trained on nevertheless."
    )


class NextTokenObjective(_Objective):
    """Every token of the text is predicted from those before it."""

    type: Literal["next_token"] = "next_token"


class InstructionObjective(_Objective):
    """The answers of conversations are learned, the rest is only read. Needs sources of type conversations."""

    type: Literal["instruction"]
    packing: bool = Field(
        True,
        description="Several examples a row; none sees another, and positions begin anew with each. "
        "false: one example a row, padded to the context.",
    )


class PreferenceObjective(_Objective):
    """Make preferred answers likelier than the others, by no more than the distance from the start allows. The step's
    batch_size counts pairs. Needs sources of type preferences."""

    type: Literal["preference"]
    loss: Literal["dpo", "ipo"] = Field(
        "dpo",
        description="dpo: Rafailov et al., 2023; with label_smoothing, cDPO. ipo: Azar et al., 2023, with the "
        "answers' log-probabilities a token.",
    )
    beta: float = Field(0.1, gt=0, description="How much going away from the start costs (ipo: τ).")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo: the share of pairs that are taken to be labelled the wrong way round."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing={self.label_smoothing:g} with loss=ipo: only dpo has it; leave it out")
        return self


class DistillationObjective(_Objective):
    """Learn a teacher's whole distribution beside the text itself (Hinton et al., 2015):
    ce_weight · cross-entropy + kl_weight · temperature² · KL(teacher ‖ student), both softened by the temperature."""

    type: Literal["distillation"]
    teacher: Path = Field(description="A run folder, trained or imported, with the same tokenizer.")
    temperature: float = Field(2.0, gt=0)
    kl_weight: float = Field(0.5, gt=0)
    ce_weight: float = Field(0.5, ge=0)


class RewardObjective(_Objective):
    """Make answers likelier that a function rewards: GRPO (Shao et al., 2024). For each prompt a group of answers is
    sampled, and each is judged by how far it is above the group's mean. The step's batch_size counts answers. The
    prompts are those of conversations, up to the last answer."""

    type: Literal["reward"]
    reward: str = Field(
        pattern=r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$",
        description="`path/to/file.py:function`, which is called as function(completion, prompt=..., answer=...), "
        "all text, and returns a number. It is run as it is.",
    )
    group_size: int = Field(8, ge=2, description="Answers to each prompt.")
    max_tokens: PositiveInt = Field(128, description="Of an answer.")
    temperature: float = Field(1.0, gt=0)
    clip: float = Field(0.2, gt=0, lt=1, description="How far an answer's tokens may become likelier at once (ε).")
    beta: float = Field(0.0, ge=0, description="Weight of the KL divergence from the start. 0: none, and no reference.")
    steps_per_rollout: PositiveInt = Field(1, description="Optimizer steps that use the same answers (μ).")
    scale_by_deviation: bool = Field(
        True, description="Divide by the group's standard deviation. false: subtract the mean alone (Liu et al., 2025)."
    )


ObjectiveConfig = Annotated[
    NextTokenObjective | InstructionObjective | PreferenceObjective | DistillationObjective | RewardObjective,
    Field(discriminator="type"),
]

_SOURCES_OF = {
    "next_token": ("text", "conversations"),
    "instruction": ("conversations",),
    "preference": ("preferences",),
    "distillation": ("text", "conversations"),
    "reward": ("conversations",),
}
"""What each objective can learn from."""


# ------------------------------------------------------------------------------------------- what is trained

ADAPTED_MODULES = {"attention": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")}
"""Linear layers of a block that an adapter can stand beside, by family. `mlp` is that of experts too."""


class LoRAConfig(Section):
    """Low-rank adaptation (Hu et al., 2021): W + alpha/rank · B·A, of which A and B alone are trained."""

    type: Literal["lora"] = "lora"
    rank: PositiveInt = Field(8, description="Rows of A and columns of B (r).")
    alpha: float = Field(
        default_factory=_from("rank", lambda rank: 2.0 * rank),
        gt=0,
        description="B·A is multiplied by alpha / rank. Default: 2 × rank.",
    )
    dropout: Fraction = Field(0.0, description="Of what goes into A, in training.")
    targets: tuple[Literal["all", "attention", "mlp", "query", "key", "value", "out", "gate", "up", "down"], ...] = (
        Field(("all",), min_length=1, description="Linear layers of the blocks: by name, by family, or all.")
    )
    embeddings: bool = Field(
        False, description="Train the token embedding and the head too, as tokens that are new to the model need it."
    )

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.alpha / self.rank

    def trains(self, parameter: str) -> bool:
        """Whether a parameter of the model itself is trained, by its name."""
        return self.embeddings and parameter in ("token_embedding.weight", "untied_head.weight")

    def adapts(self, module: str) -> bool:
        """Whether the adapter stands beside a module, by its name in the model, such as `blocks.0.mlp.up`."""
        part = module.rpartition(".")[2]
        family = next((family for family, parts in ADAPTED_MODULES.items() if part in parts), None)
        return family is not None and not {"all", family, part}.isdisjoint(self.targets)


class FreezeConfig(Section):
    """Parameters that training leaves as they are."""

    embeddings: bool = Field(False, description="Token and position embeddings; with them a tied head.")
    first_blocks: int = Field(0, ge=0, description="So many blocks, from the first on.")
    patterns: tuple[str, ...] = Field((), description="Names of parameters, such as `blocks.*.mlp.*` or `norm.weight`.")

    def freezes(self, parameter: str) -> bool:
        """Whether a parameter is left as it is, by its name in the model, such as `blocks.0.mlp.up.weight`."""
        first, _, rest = parameter.partition(".")
        if first == "blocks" and int(rest.partition(".")[0]) < self.first_blocks:
            return True
        if first in ("token_embedding", "position_embedding") and self.embeddings:
            return True
        return any(fnmatch.fnmatchcase(parameter, pattern) for pattern in self.patterns)


# ---------------------------------------------------------------------------------------------------- sweep


class SweepRange(Section):
    """What a setting may be in a sweep: a number from low to high, or one of some choices."""

    low: int | float | None = Field(
        None, description="Whole numbers alone are tried where low, high and step are whole."
    )
    high: int | float | None = None
    log: bool = Field(False, description="Orders of magnitude are equally likely.")
    step: int | float | None = Field(None, description="Only low plus multiples of this are tried.")
    choices: tuple[bool | int | float | str | None, ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        return all(isinstance(value, int) for value in (self.low, self.high, 1 if self.step is None else self.step))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.choices is not None:
            if self.log or (self.low, self.high, self.step) != (None, None, None):
                raise ValueError("choices stands with low, high, log or step: give choices alone, or a range")
            if len(set(map(repr, self.choices))) != len(self.choices) or len(self.choices) < 2:
                raise ValueError(f"choices={list(self.choices)}: give at least two, each once")
            return self
        if self.low is None or self.high is None:
            raise ValueError("neither choices nor both of low and high: say what to try")
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}: exchange them, or leave the key out")
        if self.log and self.low <= 0:
            raise ValueError(f"low={self.low:g} with log=true: a logarithm needs a low above 0")
        if self.step is not None:
            if self.log:
                raise ValueError(
                    f"step={self.step:g} with log=true: steps of a logarithm are not equal; drop one of them"
                )
            if self.step <= 0:
                raise ValueError(f"step={self.step:g}: it must be above 0")
            n_steps = (self.high - self.low) / self.step
            if abs(n_steps - round(n_steps)) > 1e-9 * n_steps:
                raise ValueError(
                    f"step={self.step:g} does not lead from low={self.low:g} to high={self.high:g}: change one"
                )
        return self


class SweepConfig(Section):
    """A search for better settings: trials of the recipe, each judged by its best validation loss."""

    ranges: dict[str, SweepRange] = Field(
        min_length=1, description="By the setting's path, such as train.learning_rate."
    )
    n_trials: PositiveInt = Field(20, description="In all, however often the sweep goes on.")
    startup_trials: PositiveInt = Field(
        5, description="Drawn at random and trained to the end; the sampler and the pruner learn from them."
    )
    pruner: Literal["median", "none"] = Field(
        "median",
        description="median: stop a trial whose best loss is above the median of the earlier ones at its step.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Of the sampler.")


# --------------------------------------------------------------------------------------------------- recipe


class Recipe(Section):
    """A model, its tokenizer, its data and its training: everything a command needs to know."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Default: the file's name.")
    run_dir: Path = Field(default_factory=lambda data: Path("runs") / data["name"])
    seed: int = Field(1337, ge=0, lt=2**32)
    initialize_from: Path | None = Field(
        None, description="A run folder whose best weights this run starts from. None: random ones, as model.init says."
    )
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    objective: ObjectiveConfig = Field(NextTokenObjective(), description="What is learned.")
    train: TrainConfig
    adapter: LoRAConfig | None = Field(None, description="Train a small addition to the weights instead of them.")
    freeze: FreezeConfig | None = Field(None, description="Train the rest alone.")
    sweep: SweepConfig | None = Field(None, description="What gptworks sweep tries; training ignores it.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = "conversations" if self.data.conversations else "preferences" if self.data.preferences else "text"
        if kind not in _SOURCES_OF[self.objective.type]:
            raise ValueError(
                f"objective.type={self.objective.type} and data.sources are {kind}: "
                f"give sources of type {' or '.join(_SOURCES_OF[self.objective.type])}"
            )
        known = known_vocab_size(self.tokenizer)
        if known is not None and self.model.vocab_size not in (0, known):
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} and the tokenizer has {known} tokens: "
                f"they must be equal; set tokenizer.vocab_size or leave model.vocab_size out"
            )
        if isinstance(self.objective, RewardObjective):
            self._check_groups(self.objective.group_size)
        self._check_adapter()
        self._check_packing()
        if self.freeze is not None and self.freeze.first_blocks > self.model.n_layers:
            raise ValueError(
                f"freeze.first_blocks={self.freeze.first_blocks} and model.n_layers={self.model.n_layers}: "
                f"there are not so many blocks"
            )
        return self

    def _check_groups(self, group_size: int) -> None:
        for name in ("batch_size", "micro_batch_size"):
            if getattr(self.train, name) % group_size:
                raise ValueError(
                    f"train.{name}={getattr(self.train, name)} is not a multiple of objective.group_size={group_size}: "
                    f"all answers to a prompt are judged together"
                )

    def _check_packing(self) -> None:
        scaling, objective = self.model.rope_scaling, self.objective
        packs = objective.type == "distillation" or (isinstance(objective, InstructionObjective) and objective.packing)
        if scaling is not None and scaling.type == "dynamic" and packs and self.data.conversations:
            raise ValueError(
                "model.rope_scaling.type=dynamic and conversations packed into rows: each would be read as if it were "
                "as long as its row; set rope_scaling.type=yarn, or objective.packing=false where there is one"
            )

    def _check_adapter(self) -> None:
        if self.adapter is None:
            return
        if self.freeze is not None:
            raise ValueError("adapter and freeze are both set: an adapter trains nothing else; drop one of them")
        if self.train.optimizer == "muon":
            raise ValueError(
                "train.optimizer=muon with an adapter: an orthogonal step of A or of B alone is none of their product; "
                "set train.optimizer=adamw"
            )
        if self.train.parallel.tensor_parallel > 1:
            raise ValueError(
                f"train.parallel.tensor_parallel={self.train.parallel.tensor_parallel} with an adapter: A and B are "
                f"not divided among devices; set tensor_parallel=1"
            )
        if set(self.adapter.targets) == {"gate"} and not self.model.gated:
            raise ValueError(f"adapter.targets=gate and model.mlp={self.model.mlp} has no gate: name other targets")


def known_vocab_size(tokenizer: TokenizerConfig) -> int | None:
    """The vocabulary a tokenizer will have, where its settings alone fix it; None where its text decides."""
    n_added = len(set(tokenizer.added_tokens) - {"<|endoftext|>"})  # which both of these have
    if isinstance(tokenizer, GPT2Tokenizer):
        return 50_257 + n_added
    return tokenizer.vocab_size + n_added if isinstance(tokenizer, BPETokenizer) else None
