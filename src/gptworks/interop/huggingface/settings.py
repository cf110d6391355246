"""Settings in both directions: each class writes a part of a model's settings as `config.json` has it, and reads it.

A clause writes what its architecture can hold. What cannot be held is written as the nearest thing that can, so that
reading it back gives another model: comparing the two tells what stands in the way (family.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gptworks.config import ModelConfig, RopeScaling
from gptworks.errors import UserError

Values = dict[str, Any]


class Settings:
    """A `config.json` being read. Each setting is taken by its name, so that those nobody took can be refused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._taken: set[str] = set()

    def take(self, name: str, absent: Any = None) -> Any:
        """The value of a setting, null included; `absent` where the file does not have it."""
        self._taken.add(name)
        return self._values.get(name, absent)

    def need(self, name: str) -> Any:
        """The value of a setting that has no default.

        Raises:
            UserError: it is missing or null.
        """
        value = self.take(name)
        if value is None:
            raise UserError(f"config.json has no `{name}`: it is not a whole configuration of this model type.")
        return value

    def left(self) -> Values:
        """What was set and never taken; null and empty values set nothing."""
        return {
            name: value
            for name, value in self._values.items()
            if name not in self._taken and value not in (None, [], {})
        }


class Clause(Protocol):
    """A part of the settings."""

    def write(self, config: ModelConfig) -> Values:
        """The part as `config.json` has it."""
        ...

    def read(self, theirs: Settings, ours: Values) -> Values:
        """The part as fields of ModelConfig; `ours` holds those read by the clauses before."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Fields that the architecture has in one way only, and `config.json` does not mention."""

    fields: Values

    def write(self, config: ModelConfig) -> Values:
        return {}

    def read(self, theirs: Settings, ours: Values) -> Values:
        return dict(self.fields)


@dataclass(frozen=True)
class Only:
    """A setting of theirs of which we have one value; any other is refused by its name."""

    name: str
    value: Any
    absent: Any
    """What a missing setting means."""

    def write(self, config: ModelConfig) -> Values:
        return {} if self.absent == self.value else {self.name: self.value}

    def read(self, theirs: Settings, ours: Values) -> Values:
        given = theirs.take(self.name, self.absent)
        if given != self.value and not (given is None and self.absent == self.value):
            raise UserError(f"config.json has `{self.name}`={given!r}: gptworks computes {self.value!r} alone.")
        return {}


@dataclass(frozen=True)
class Same:
    """Settings that both sides have: their name → ours. With a default, `config.json` may leave one out."""

    names: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their name → the value of a missing one, or a function that makes it from the fields read before."""

    def write(self, config: ModelConfig) -> Values:
        return {theirs: getattr(config, ours) for theirs, ours in self.names.items()}

    def read(self, theirs: Settings, ours: Values) -> Values:
        read: Values = {}
        for name, our_name in self.names.items():
            value = theirs.take(name) if name in self.defaults else theirs.need(name)
            if value is None:
                default = self.defaults[name]
                value = default(ours | read) if isinstance(default, Callable) else default  # type: ignore[arg-type]
            read[our_name] = value
        return read


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and the width of one; where a name is None, the architecture has no choice."""

    heads: str = "num_attention_heads"
    kv_heads: str | None = None
    kv_absent: int | None = None
    width: str | None = None
    width_absent: int | None = None
    whole: bool = False
    """Whether the number of heads must divide the width of the model even where `width` is given."""

    def write(self, config: ModelConfig) -> Values:
        values: Values = {self.heads: config.n_heads}
        if self.kv_heads:
            values[self.kv_heads] = config.n_kv_heads
        if self.width and not (self.whole and config.d_model % config.n_heads):
            values[self.width] = config.d_head
        return values

    def read(self, theirs: Settings, ours: Values) -> Values:
        heads = theirs.need(self.heads)
        kv_heads = theirs.take(self.kv_heads, self.kv_absent) if self.kv_heads else None
        width = theirs.take(self.width, self.width_absent) if self.width else None
        d_model = ours["d_model"]
        share = d_model // heads if d_model % heads == 0 else 0  # 0: no width there is
        return {"n_heads": heads, "n_kv_heads": kv_heads or heads, "d_head": width or share}


_ACTIVATION_ALIASES = {
    "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh", "gelu_python": "gelu", "swish": "silu",
}  # fmt: skip
"""Names of transformers for one and the same function."""


@dataclass(frozen=True)
class Activation:
    """The MLP's activation: ours → their name."""

    name: str
    choices: Mapping[str, str]
    absent: str

    def write(self, config: ModelConfig) -> Values:
        return {self.name: self.choices.get(config.mlp, next(iter(self.choices.values())))}

    def read(self, theirs: Settings, ours: Values) -> Values:
        given = theirs.take(self.name, self.absent)
        for our_name, their_name in self.choices.items():
            if _ACTIVATION_ALIASES.get(given, given) == _ACTIVATION_ALIASES.get(their_name, their_name):
                return {"mlp": our_name}
        known = ", ".join(self.choices.values())
        raise UserError(f"config.json has `{self.name}`={given!r}: gptworks has {known} for this model type.")


AttentionBias = bool | Literal["qkv", "out"]


@dataclass(frozen=True)
class Biases:
    """Which linear layers have biases: for each value of the flags, ours of attention and of the MLP."""

    flags: Mapping[str, bool]
    """Names of `config.json`, with what a missing one means."""
    choices: Mapping[tuple[bool, ...], tuple[AttentionBias, bool]]

    def write(self, config: ModelConfig) -> Values:
        def lacks_and_adds(flags: tuple[bool, ...]) -> tuple[int, int]:
            ours, theirs = biases(config), biases(config.model_copy(update=self._fields(flags)))
            return len(ours - theirs), len(theirs - ours)

        nearest: tuple[bool, ...] = min(list(self.choices), key=lacks_and_adds)
        return dict(zip(self.flags, nearest, strict=True))

    def read(self, theirs: Settings, ours: Values) -> Values:
        flags = {name: theirs.take(name, absent) for name, absent in self.flags.items()}
        if tuple(flags.values()) not in self.choices:
            given = ", ".join(f"`{name}`={value!r}" for name, value in flags.items())
            raise UserError(f"config.json has {given}: true or false is expected.")
        return self._fields(tuple(flags.values()))

    def _fields(self, flags: tuple[bool, ...]) -> Values:
        attention, mlp = self.choices[flags]
        return {"attention_bias": attention, "mlp_bias": mlp}


def biases(config: ModelConfig) -> set[str]:
    """The kinds of bias that a model has."""
    kinds = {"qkv": config.qkv_bias, "out": config.out_bias, "mlp": config.mlp_bias, "norm": config.norm_bias}
    return {kind for kind, there in kinds.items() if there}


_ROPE_NEUTRAL = {"mscale": None, "mscale_all_dim": None, "truncate": True}
_ROPE_NEEDED = {"default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",)}


@dataclass(frozen=True)
class Rope:
    """Rotary positions and their scaling, and with them the context.

    transformers 5 has `rope_parameters`; `rope_theta` beside it, and `rope_scaling`, are what earlier ones and other
    tools read. Its dynamic scaling has `max_position_embeddings` for the original context.
    """

    theta: str = "rope_theta"
    theta_absent: float = 10_000.0
    fraction: str | None = None
    """Their name of the share of a head that is rotated; None: the whole head is."""
    fraction_absent: float = 1.0

    def write(self, config: ModelConfig) -> Values:
        scaling = config.rope_scaling
        scaled: Values = {} if scaling is None else {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling is not None and scaling.type == "yarn":
            scaled |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            scaled["original_max_position_embeddings"] = config.original_context_length
            if scaling.attention_factor is not None:
                scaled["attention_factor"] = scaling.attention_factor
        parameters = {"rope_type": "default", "rope_theta": config.rope_theta} | scaled
        dynamic = scaling is not None and scaling.type == "dynamic"
        values = {
            "max_position_embeddings": config.original_context_length if dynamic else config.context_length,
            self.theta: config.rope_theta,
            "rope_parameters": parameters,
        }
        if self.fraction:
            parameters["partial_rotary_factor"] = values[self.fraction] = config.rope_fraction
        return values | ({"rope_scaling": dict(parameters)} if scaled else {})

    def read(self, theirs: Settings, ours: Values) -> Values:
        given, context = theirs.take("rope_parameters"), theirs.need("max_position_embeddings")
        parameters = Settings(theirs.take("rope_scaling") or given or {})
        theta = parameters.take("rope_theta", theirs.take(self.theta, self.theta_absent))
        fraction = theirs.take(self.fraction, self.fraction_absent) if self.fraction else 1.0
        fraction = parameters.take("partial_rotary_factor", fraction)
        kind = parameters.take("type", "default")
        kind = parameters.take("rope_type", kind)
        if kind not in _ROPE_NEEDED:
            raise UserError(f"config.json has rope_type={kind!r}: gptworks has {', '.join(_ROPE_NEEDED)}.")
        if not self.fraction and fraction != 1:
            raise UserError(
                f"config.json has partial_rotary_factor={fraction}: this model type rotates the whole head."
            )
        for name, neutral in _ROPE_NEUTRAL.items():
            if (value := parameters.take(name)) not in (None, neutral):
                raise UserError(
                    f"config.json has rope_parameters.{name}={value!r}: gptworks computes {neutral!r} alone."
                )
        read: Values = {"context_length": context, "rope_theta": theta, "rope_fraction": fraction, "rope_scaling": None}
        scaled = {name: parameters.need(name) for name in _ROPE_NEEDED[kind]}
        original = parameters.take("original_max_position_embeddings", context)
        if kind == "yarn":
            scaled |= {
                "original_context_length": original,
                "beta_fast": parameters.take("beta_fast") or 32.0,
                "beta_slow": parameters.take("beta_slow") or 1.0,
                "attention_factor": parameters.take("attention_factor"),
            }
        if kind == "dynamic":
            scaled["original_context_length"] = context
            read["context_length"] = round(context * scaled["factor"])
        if left := parameters.left():
            raise UserError(f"config.json has rope_parameters.{next(iter(left))}, which gptworks does not know.")
        return read | ({"rope_scaling": RopeScaling(type=kind, **scaled)} if kind != "default" else {})


def shortest_period(layers: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern that gives these layers when it is repeated."""
    lengths = range(1, len(layers) + 1)
    return next(layers[:n] for n in lengths if all(kind == layers[i % n] for i, kind in enumerate(layers)))


def _windowed(window: int | None, layers: list[bool], ours: Values) -> Values:
    """Fields for layers that are windowed or not; a window as long as the context changes nothing."""
    if window is None or window >= ours["context_length"] or not any(layers):
        return {"window": None, "window_pattern": ("full",)}
    kinds = tuple("window" if windowed else "full" for windowed in layers)
    return {"window": window, "window_pattern": shortest_period(kinds)}


@dataclass(frozen=True)
class WindowEverywhere:
    """A window that every layer has, or none."""

    absent: int | None = None
    switch: str | None = None
    """The flag without which the window does not count; a missing one is false."""

    def write(self, config: ModelConfig) -> Values:
        window = config.window if all(config.layer_windows) else None
        return {"sliding_window": window} | ({self.switch: window is not None} if self.switch else {})

    def read(self, theirs: Settings, ours: Values) -> Values:
        window = theirs.take("sliding_window", self.absent)
        on = theirs.take(self.switch, False) if self.switch else True
        return _windowed(window if on else None, [True] * ours["n_layers"], ours)


@dataclass(frozen=True)
class WindowByLayer:
    """A type for each layer; Qwen has a switch besides, and a layer from which on all are windowed."""

    switched: bool = True

    def write(self, config: ModelConfig) -> Values:
        layers = [window is not None for window in config.layer_windows]
        types = ["sliding_attention" if windowed else "full_attention" for windowed in layers]
        values: Values = {"sliding_window": config.window, "layer_types": types}
        first = layers.index(True) if any(layers) else config.n_layers
        return values | ({"use_sliding_window": any(layers), "max_window_layers": first} if self.switched else {})

    def read(self, theirs: Settings, ours: Values) -> Values:
        on, first = True, 0
        if self.switched:
            on, first = theirs.take("use_sliding_window", False), theirs.take("max_window_layers", 28)
        window, types = theirs.take("sliding_window", 4096), theirs.take("layer_types")
        types = types or ["sliding_attention" if i >= first else "full_attention" for i in range(ours["n_layers"])]
        if unknown := set(types) - {"sliding_attention", "full_attention"}:
            raise UserError(
                f"config.json has `layer_types` with {unknown.pop()!r}: gptworks has full and sliding ones."
            )
        if len(types) != ours["n_layers"]:
            raise UserError(f"config.json has `layer_types` of {len(types)} layers and {ours['n_layers']} layers.")
        return _windowed(window if on else None, [kind == "sliding_attention" for kind in types], ours)


@dataclass(frozen=True)
class WindowByPattern:
    """GPT-Neo's global and local layers: [[pattern, repeats], ...]. Its window counts the token itself, as ours."""

    def write(self, config: ModelConfig) -> Values:
        kinds = tuple("global" if window is None else "local" for window in config.layer_windows)
        pattern = shortest_period(kinds)
        repeats, rest = divmod(config.n_layers, len(pattern))
        types = [[list(kinds), 1]] if rest else [[list(pattern), repeats]]
        return {"attention_types": types, "window_size": config.window or 256}

    def read(self, theirs: Settings, ours: Values) -> Values:
        layers = theirs.take("attention_layers")
        types = theirs.take("attention_types") or [[["global", "local"], 12]]
        if (n_kinds := sum(len(pattern) * repeats for pattern, repeats in types)) != ours["n_layers"]:
            raise UserError(f"config.json has `attention_types` of {n_kinds} layers and {ours['n_layers']} layers.")
        kinds = [kind for pattern, repeats in types for kind in pattern * repeats]
        if unknown := set(kinds) - {"global", "local"}:
            raise UserError(f"config.json has `attention_types` with {unknown.pop()!r}: gptworks has global and local.")
        if layers is not None and layers != kinds:
            raise UserError(
                f"config.json has `attention_layers`={layers} and `attention_types` that make {kinds}: they contradict "
                f"one another. Delete the one that is wrong."
            )
        return _windowed(theirs.take("window_size", 256), [kind == "local" for kind in kinds], ours)


@dataclass(frozen=True)
class ScaleSwitch:
    """GPT-2's flag: q·k is divided by √D, or left as it is."""

    def write(self, config: ModelConfig) -> Values:
        return {"scale_attn_weights": config.attention_scale != 1.0}

    def read(self, theirs: Settings, ours: Values) -> Values:
        return {"attention_scale": None if theirs.take("scale_attn_weights", True) else 1.0}


@dataclass(frozen=True)
class ScaleFactor:
    """Granite's factor of q·k."""

    def write(self, config: ModelConfig) -> Values:
        return {"attention_multiplier": attention_scale(config)}

    def read(self, theirs: Settings, ours: Values) -> Values:
        scale = theirs.take("attention_multiplier", 1.0)
        return {"attention_scale": None if scale == ours["d_head"] ** -0.5 else scale}


def attention_scale(config: ModelConfig) -> float:
    """The factor of q·k, as a number."""
    return config.d_head**-0.5 if config.attention_scale is None else config.attention_scale


@dataclass(frozen=True)
class Experts:
    """How many experts, how many a token, and how wide. At least one: a dense model is of another architecture."""

    count: tuple[str, ...]
    """Their names of it; the first is written."""
    count_absent: int
    per_token_absent: int
    shared: str | None = None

    def write(self, config: ModelConfig) -> Values:
        values = {self.count[0]: max(config.n_experts, 1), "num_experts_per_tok": config.n_experts_per_token}
        return values | ({self.shared: config.d_ff_shared} if self.shared else {})

    def read(self, theirs: Settings, ours: Values) -> Values:
        counts = [theirs.take(name) for name in self.count]
        return {
            "n_experts": next((count for count in counts if count is not None), self.count_absent),
            "n_experts_per_token": theirs.take("num_experts_per_tok", self.per_token_absent),
            "d_ff_shared": theirs.take(self.shared, 0) if self.shared else 0,
        }
