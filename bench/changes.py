"""The changes that bench/experiments.py tries, each compared with the defaults of gptworks."""

from dataclasses import dataclass

BASELINE, SHORTER, LONGER = "baseline", "half-as-long", "twice-as-long"

WITHDRAWN = ("residual-scalars", "decay-1-sqrt", "even-average")
"""Changes on record whose settings gptworks no longer has."""


@dataclass(frozen=True)
class Change:
    """A change: the settings that differ from the baseline's."""

    name: str
    settings: tuple[str, ...]
    """`key.path=value` settings, which together make the change."""
    source: str
    """The publication that proposed the change, or the model whose recipe has it."""
    length: float = 1.0
    """Number of tokens, relative to the baseline's."""

    @property
    def words(self) -> list[str]:
        """The settings, and the length if it differs, as they are recorded."""
        return [*self.settings, *([f"{self.length:g} × train.max_steps"] if self.length != 1 else [])]


def _change(name: str, settings: str, source: str) -> Change:
    return Change(name, tuple(settings.split()), source)


CHANGES = (
    # baselines of other lengths, by which changes are compared in equal time
    Change(SHORTER, (), "the baseline for half the time", 0.5),
    Change(LONGER, (), "the baseline for twice the time", 2.0),
    # schedules, batches, shape
    _change("growing-batch", "train.smaller_batches=[[120,8]]", "Smith et al., 2018"),
    _change("two-tokens-ahead", "model.n_future_tokens=2", "Gloeckle et al., 2024"),
    _change("cosine", "train.schedule=cosine", "Loshchilov & Hutter, 2017"),
    _change("geglu", "model.mlp=geglu", "Shazeer, 2020"),
    _change("windows", "model.window=64 model.window_pattern=[window,full]", "Gemma 2, 2024"),
    _change("soap", "train.optimizer=soap", "Vyas et al., 2024"),
    _change("batch-halved", "train.batch_size=8", "McCandlish et al., 2018"),
    _change(
        "three-tokens-ahead-falling",
        "model.n_future_tokens=3 train.future_weights_fall=true",
        "modded-nanogpt, 2025, here with heads",
    ),
    _change(
        "experts", "model.n_experts=8 model.n_experts_per_token=2 model.d_ff=192", "Shazeer et al., 2017"
    ),
    _change("deeper", "model.n_layers=8", "Kaplan et al., 2020"),
    # attention
    _change("no-qk-norm", "model.qk_norm=false", "Vaswani et al., 2017"),
    _change("qk-norm-whole", "model.qk_norm=whole", "OLMo 2, 2025"),
    _change("one-kv-head", "model.n_kv_heads=1", "Shazeer, 2019"),
    _change("two-kv-heads", "model.n_kv_heads=2", "Ainslie et al., 2023"),
    _change("two-heads", "model.n_heads=2", "Vaswani et al., 2017, table 3"),
    _change("eight-heads", "model.n_heads=8", "Vaswani et al., 2017, table 3"),
    _change("attention-bias", "model.attention_bias=qkv", "Qwen 2, 2024"),
    _change("attention-softcap-50", "model.attention_softcap=50", "Gemma 2, 2024"),
    _change("attention-gate", "model.attention_gate=true", "Qiu et al., 2025"),
    _change("value-residual", "model.value_residual=true", "Zhou et al., 2024"),
    _change("value-embeddings", "model.value_embeddings=[none,table]", "modded-nanogpt, 2024"),
    _change("projected-value-embeddings", "model.value_embeddings=[none,projected]", "the same without a table"),
    # positions
    _change("learned-positions", "model.position=learned", "GPT-2, 2019"),
    _change("no-positions", "model.position=none", "Kazemnejad et al., 2023"),
    _change("half-rope", "model.rope_fraction=0.5", "GPT-J, 2021"),
    _change("quarter-rope", "model.rope_fraction=0.25", "GPT-NeoX, 2022"),
    _change("rope-in-every-second-layer", "model.rope_pattern=[rope,none]", "Yang et al., 2025"),
    _change("rope-theta-1000", "model.rope_theta=1000", "Su et al., 2021, other base"),
    _change("rope-theta-500000", "model.rope_theta=500000", "Llama 3, 2024"),
    # norms and the residual stream
    _change("layernorm", "model.norm=layernorm", "Ba et al., 2016"),
    _change("norms-after", "model.norm_placement=after", "OLMo 2, 2025"),
    _change("norms-before-and-after", "model.norm_placement=both", "Gemma 2, 2024"),
    _change("parallel-blocks", "model.parallel_residual=true", "GPT-J, 2021"),
    _change("embedding-times-root-of-width", "model.embedding_scale=11.3", "Vaswani et al., 2017"),
    _change("unet-skips", "model.unet_skips=true", "modded-nanogpt, 2024"),
    _change("residual-scale-half", "model.residual_scale=0.5", "Granite 3, 2024"),
    # the MLP
    _change("gelu", "model.mlp=gelu", "GPT-2, 2019"),
    _change("relu2", "model.mlp=relu2", "So et al., 2021"),
    _change("narrow-mlp", "model.d_ff=192", "half the default"),
    _change("wide-mlp", "model.d_ff=768", "twice the default"),
    _change("mlp-bias", "model.mlp_bias=true", "GPT-2, 2019"),
    _change(
        "experts-and-a-shared-one",
        "model.n_experts=8 model.n_experts_per_token=2 model.d_ff=128 model.d_ff_shared=128",
        "DeepSeekMoE, 2024",
    ),
    # embedding and head
    _change("untied-head", "model.tie_embeddings=false", "Press & Wolf, 2017, without it"),
    _change("smear", "model.smear=true", "modded-nanogpt, 2025"),
    _change("bigram-embeddings", "model.bigram_vocab_size=4096", "Huang et al., 2025"),
    _change("logit-softcap-30", "model.logit_softcap=30", "Gemma 2, 2024"),
    # shape
    _change("two-layers-twice", "model.n_layers=2 model.layer_repeats=2", "Dehghani et al., 2018"),
    _change("each-layer-twice", "model.layer_repeats=[2,2,2,2] model.n_layers=4", "Liu et al., 2024"),
    _change("shallower", "model.n_layers=2", "Kaplan et al., 2020"),
    # initialization
    _change("no-zero-init", "model.zero_init_projections=false", "Radford et al., 2019, without their scale"),
    _change("gpt2-init", "model.init=gpt2", "GPT-2, 2019"),
    _change("xavier-init", "model.init=xavier", "Glorot & Bengio, 2010"),
    _change("induction-init", "model.init=induction", "Olsson et al., 2022, as weights to begin with"),
    _change("init-std-0-006", "model.init_std=0.006", "DeepSeek-V2, 2024"),
    # optimizer
    _change("adamw", "train.optimizer=adamw", "Loshchilov & Hutter, 2019"),
    _change("normuon", "train.optimizer=normuon", "Li et al., 2025"),
    _change("muon-rate-halved", "train.muon_learning_rate=0.01", "half the default"),
    _change("muon-rate-doubled", "train.muon_learning_rate=0.04", "twice the default"),
    _change("adamw-rate-halved", "train.learning_rate=0.01", "half the default, of embeddings, head and vectors"),
    _change("adamw-rate-doubled", "train.learning_rate=0.04", "twice the default, of embeddings, head and vectors"),
    _change("momentum-0-9", "train.muon_momentum=0.9", "Jordan et al., 2024, other momentum"),
    _change("polar-express", "train.muon_coefficients=polar_express", "Amsel et al., 2025"),
    _change("muon-3-iterations", "train.muon_iterations=3", "Jordan et al., 2024, fewer iterations"),
    _change("betas-0-9-0-99", "train.betas=[0.9,0.99]", "nanoGPT, 2022"),
    _change("no-weight-decay", "train.weight_decay=0", "Loshchilov & Hutter, 2019, without it"),
    _change("weight-decay-0-1", "train.weight_decay=0.1", "GPT-3, 2020"),
    _change("cautious-weight-decay", "train.cautious_weight_decay=true train.weight_decay=0.1", "Chen et al., 2025"),
    _change("no-clipping", "train.grad_clip=0", "Pascanu et al., 2013, without it"),
    _change("weight-average", "train.ema_decay=0.98", "Polyak & Juditsky, 1992"),
    # schedule and batch
    _change("constant-rate", "train.schedule=constant", "Hägele et al., 2024, without decay"),
    _change("decay-of-a-fifth", "train.decay_fraction=0.2", "Hägele et al., 2024"),
    _change("decay-of-all", "train.decay_fraction=1.0", "Bergsma et al., 2025"),
    _change("decay-to-a-tenth", "train.final_rate_fraction=0.1", "GPT-3, 2020"),
    _change("no-warmup", "train.warmup_steps=0", "Goyal et al., 2017, without it"),
    _change("growing-texts", "train.shorter_contexts=[[120,64]]", "Li et al., 2022"),
    _change("batch-doubled", "train.batch_size=32", "McCandlish et al., 2018"),
    # regularization
    _change("dropout", "model.dropout_residual=0.1", "Srivastava et al., 2014"),
)  # fmt: skip
"""All changes, in the order in which they are trained: an unfinished seed lacks the last ones."""
