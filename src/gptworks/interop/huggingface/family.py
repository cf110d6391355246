"""Data about one architecture of transformers: rules for its `config.json`, and places of our tensors in its files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gptworks.config import EARLIER_DEFAULTS, LABORATORY, ModelConfig
from gptworks.interop.huggingface.settings import Clause, Settings, Values, biases
from gptworks.interop.tensors import Place

PLAIN_FIELDS: Values = EARLIER_DEFAULTS | {
    "parallel_residual": False, "norm_placement": "before", "n_experts": 0, "d_ff_shared": 0,
    "attention_scale": None, "attention_softcap": None, "logit_softcap": None,
    "embedding_scale": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0,
    "rope_fraction": 1.0, "rope_pattern": ("rope",), "rope_scaling": None, "window_rope_theta": None,
    "window": None, "window_pattern": ("full",),
    "init": "normal", "dropout_embedding": 0.0, "dropout_attention": 0.0, "dropout_residual": 0.0,
    "dropout_mlp": 0.0,
} | {name: ModelConfig.model_fields[name].default for name in LABORATORY}  # fmt: skip
"""Values of ModelConfig's fields, except the fields that a clause of the architecture sets."""


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face's transformers, and how its folders write our models: the keys of `config.json`,
    and the names of the tensors."""

    model_type: str
    architecture: str
    prefix: str
    """Prefix of all tensor names except the head's. Files saved from a model without a head lack the prefix."""
    clauses: tuple[Clause, ...]
    places: tuple[Place, ...]
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Module names in other versions of transformers → names in `places`."""
    harmless: frozenset[str] = frozenset()
    """Settings of `config.json` that do not change logits."""
    moves_value_bias: bool = False
    """Whether attention has a bias only in its output projection, so that an export moves the value's bias there."""
    written: Values = field(default_factory=dict)
    """Fixed settings that exports add to `config.json`; none describes the model."""
    own_split: str | None = None
    """Splitting pattern that AutoTokenizer uses for this architecture instead of the pattern in the folder."""
    exported: bool = True
    """Whether exports use this architecture. False if an architecture that more programs read fits too."""
    advice: str = ""
    """Advice in README.md for the users of an exported folder."""

    def write(self, config: ModelConfig) -> Values:
        """Return the `config.json` of a model."""
        values = {"model_type": self.model_type, "architectures": [self.architecture], **self.written}
        for clause in self.clauses:
            values |= clause.write(config)
        return values

    def read(self, theirs: Settings) -> Values:
        """Return the fields of ModelConfig that a `config.json` describes. Raises a UserError if a setting is missing,
        or has an unsupported value."""
        ours = dict(PLAIN_FIELDS)
        for clause in self.clauses:
            ours |= clause.read(theirs, ours)
        return ours

    def adapted(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration, not validated, of the nearest model that this architecture can hold."""
        return config.model_copy(update=self.read(Settings(self.write(config))))

    def obstacles(self, config: ModelConfig) -> list[str]:
        """Return the names of a model's settings that this architecture cannot hold."""
        adapted = self.adapted(config)
        ours, theirs = what_decides(config), what_decides(adapted)
        missing = [name for name in ours if ours[name] != theirs.get(name)]
        lost = biases(config) - biases(adapted)
        if "out" in lost or ("qkv" in lost and not self.moves_value_bias):
            missing.append("attention_bias")
        return missing + [f"{kind}_bias" for kind in ("mlp", "norm") if kind in lost]


def what_decides(config: ModelConfig) -> Values:
    """Return the settings that decide a model's outputs, in a form that is equal for models with equal outputs. Biases
    and the attention scale are left out, since fitting.py can adapt the weights to other values."""
    always = ("vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "position", "norm",
              "norm_eps", "norm_placement", "mlp", "qk_norm", "tie_embeddings", "parallel_residual", "n_experts",
              "embedding_scale", "residual_scale", "logit_divisor", "attention_softcap", "logit_softcap",
              *LABORATORY)  # fmt: skip
    values: Values = {name: getattr(config, name) for name in always}
    if config.n_experts:
        values |= {"n_experts_per_token": config.n_experts_per_token, "d_ff_shared": config.d_ff_shared}
    if config.position == "rope":
        scaling = config.rope_scaling
        values |= {"rope_theta": config.rope_theta, "rope_fraction": config.rope_fraction, "rope_scaling": scaling}
        values["rope_pattern"] = [config.layer_rotates(layer) for layer in range(config.n_layers)]
        if scaling is not None:  # linear scaling does not use the original context
            original = config.original_context_length if scaling.type != "linear" else None
            values["rope_scaling"] = scaling.model_copy(update={"original_context_length": original})
        own = config.window_rope_theta if config.window else None
        values["window_rope_theta"] = own if scaling is not None or own != config.rope_theta else None
    else:
        values["context_length"] = config.context_length
    context = config.context_length
    return values | {"window": [window if window and window < context else None for window in config.layer_windows]}
