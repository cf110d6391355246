"""Settings in both directions: each clause writes a part of a model's settings as `config.json` has it, and reads it.

A clause writes what its architecture can hold. What it cannot hold is written as the nearest thing that it can, so that
reading it back gives another model: comparing the two shows what stands in the way (family.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from gptworks.config import ModelConfig
from gptworks.errors import UserError

Values = dict[str, Any]


class Settings:
    """A `config.json` being read. Each setting is taken by its name, so that those left over can be refused."""

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
        if (value := self.take(name)) is None:
            raise UserError(f"config.json has no `{name}`: it is not a whole configuration of this model type.")
        return value

    def left(self) -> Values:
        """What was set and never taken; null and empty values set nothing."""
        left = {name: value for name, value in self._values.items() if name not in self._taken}
        return {name: value for name, value in left.items() if value not in (None, [], {})}


@dataclass(frozen=True)
class Clause:
    """A part of the settings."""

    write: Callable[[ModelConfig], Values]
    """The part as `config.json` has it."""
    read: Callable[[Settings, Values], Values]
    """The part as fields of ModelConfig; the second argument holds those read by the clauses before."""


def refusal(name: str, value: Any, rule: str) -> UserError:
    """The error for a setting whose value no model of ours has."""
    return UserError(f"config.json has `{name}`={value!r}: {rule}.")


# --------------------------------------------------------------------------------------------- any settings


def fixed(**fields: Any) -> Clause:
    """Fields that the architecture has in one way only, and `config.json` does not mention."""
    return Clause(lambda config: {}, lambda theirs, ours: dict(fields))


def only(name: str, value: Any, absent: Any) -> Clause:
    """A setting of theirs of which we have one value. `absent`: what a missing one means."""

    def read(theirs: Settings, ours: Values) -> Values:
        given = theirs.take(name, absent)
        if given != value and not (given is None and absent == value):
            raise refusal(name, given, f"gptworks computes {value!r} alone")
        return {}

    return Clause(lambda config: {} if absent == value else {name: value}, read)


def own_code(name: str) -> Clause:
    """The code that a folder may bring for its model, and that transformers has become since: it is not run."""

    def read(theirs: Settings, ours: Values) -> Values:
        code = (theirs.take("auto_map") or {}).get("AutoModelForCausalLM", name)
        if code.rpartition("--")[2] != name:
            raise refusal("auto_map", code, f"code that comes with a model is not run; `{name}` alone is known")
        return {}

    return Clause(lambda config: {}, read)


def needed(**names: str) -> Clause:
    """Settings that both sides have and that `config.json` must give: their name → ours."""
    return Clause(
        lambda config: {theirs: getattr(config, ours) for theirs, ours in names.items()},
        lambda theirs, ours: {our_name: theirs.need(name) for name, our_name in names.items()},
    )


def optional(**names: tuple[str, Any]) -> Clause:
    """Settings that both sides have: their name → ours and the value of a missing one, or a function that makes it from
    the fields read before.
    """

    def read(theirs: Settings, ours: Values) -> Values:
        fields: Values = {}
        for name, (our_name, default) in names.items():
            if (value := theirs.take(name)) is None:
                value = default(ours) if callable(default) else default
            fields[our_name] = value
        return fields

    return Clause(lambda config: {theirs: getattr(config, ours) for theirs, (ours, _) in names.items()}, read)


def nullable(**names: tuple[str, Any]) -> Clause:
    """Settings that both sides have and that null switches off: their name → ours and the value of a missing one."""
    return Clause(
        lambda config: {theirs: getattr(config, ours) for theirs, (ours, _) in names.items()},
        lambda theirs, ours: {our_name: theirs.take(name, absent) for name, (our_name, absent) in names.items()},
    )


# --------------------------------------------------------------------------------------- attention and MLP


def heads(
    heads: str = "num_attention_heads",
    kv_heads: str | None = "num_key_value_heads",
    width: str | None = "head_dim",
    *,
    kv_absent: int | None = None,
    width_absent: int | None = None,
    whole: bool = False,
) -> Clause:
    """Query heads, key/value heads and the width of one; where a name is None, the architecture has no choice.

    Args:
        whole: the number of heads must divide the width of the model even where `width` is given.
    """

    def write(config: ModelConfig) -> Values:
        values: Values = {heads: config.n_heads}
        if kv_heads:
            values[kv_heads] = config.n_kv_heads
        if width and not (whole and config.d_model % config.n_heads):
            values[width] = config.d_head
        return values

    def read(theirs: Settings, ours: Values) -> Values:
        n_heads, d_model = theirs.need(heads), ours["d_model"]
        n_kv_heads = theirs.take(kv_heads, kv_absent) if kv_heads else None
        d_head = theirs.take(width, width_absent) if width else None
        even = d_model // n_heads if d_model % n_heads == 0 else 0  # ModelConfig refuses 0
        return {"n_heads": n_heads, "n_kv_heads": n_kv_heads or n_heads, "d_head": d_head or even}

    return Clause(write, read)


SCALE_SWITCH = Clause(
    lambda config: {"scale_attn_weights": config.attention_scale != 1.0},
    lambda theirs, ours: {"attention_scale": None if theirs.take("scale_attn_weights", True) else 1.0},
)
"""GPT-2's flag: q·k is divided by √D, or left as it is."""


def _read_scale_factor(theirs: Settings, ours: Values) -> Values:
    scale = theirs.take("attention_multiplier", 1.0)
    return {"attention_scale": None if scale == ours["d_head"] ** -0.5 else scale}


SCALE_FACTOR = Clause(lambda config: {"attention_multiplier": config.score_scale}, _read_scale_factor)
"""Granite's factor of q·k."""


def _read_query_scalar(theirs: Settings, ours: Values) -> Values:
    scalar = theirs.take("query_pre_attn_scalar", 256)
    return {"attention_scale": None if scalar == ours["d_head"] else scalar**-0.5}


QUERY_SCALAR = Clause(
    lambda config: {"query_pre_attn_scalar": max(1, round(config.score_scale**-2))}, _read_query_scalar
)
"""Gemma's: q·k is divided by the root of a whole number."""

EMBEDDING_ROOT = Clause(lambda config: {}, lambda theirs, ours: {"embedding_scale": ours["d_model"] ** 0.5})
"""Gemma multiplies the embedding by √C. transformers rounds the root to the weights' dtype: in fp32, as here."""

_ACTIVATION_ALIASES = {
    "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh", "gelu_python": "gelu", "swish": "silu",
}  # fmt: skip
"""Names of transformers for one and the same function."""


def activation(
    name: str, choices: Mapping[str, str], absent: str, other_names: Mapping[str, str] = MappingProxyType({})
) -> Clause:
    """The MLP's activation: ours → their name. One that they do not have is written as the first.

    Args:
        other_names: a name that this architecture takes for another → that one.
    """

    def read(theirs: Settings, ours: Values) -> Values:
        given = theirs.take(name, absent)
        given = other_names.get(given, given)
        for our_name, their_name in choices.items():
            if _ACTIVATION_ALIASES.get(given, given) == _ACTIVATION_ALIASES.get(their_name, their_name):
                return {"mlp": our_name}
        raise refusal(name, given, f"gptworks has {', '.join(choices.values())} for this model type")

    return Clause(lambda config: {name: choices.get(config.mlp, next(iter(choices.values())))}, read)


Flags = tuple[bool, ...]
AttentionBias = bool | Literal["qkv", "out"]


def bias_flags(absent: Mapping[str, bool], choices: Mapping[Flags, tuple[AttentionBias, bool]]) -> Clause:
    """Which linear layers have biases.

    Args:
        absent: the names of the flags, with what a missing one means.
        choices: values of the flags → our biases of attention and of the MLP.
    """

    def fields(flags: Flags) -> Values:
        return dict(zip(("attention_bias", "mlp_bias"), choices[flags], strict=True))

    def write(config: ModelConfig) -> Values:
        def lacks_and_adds(flags: Flags) -> tuple[int, int]:
            ours, theirs = biases(config), biases(config.model_copy(update=fields(flags)))
            return len(ours - theirs), len(theirs - ours)

        nearest: Flags = min(list(choices), key=lacks_and_adds)
        return dict(zip(absent, nearest, strict=True))

    def read(theirs: Settings, ours: Values) -> Values:
        flags = {name: theirs.take(name, missing) for name, missing in absent.items()}
        if tuple(flags.values()) not in choices:
            given = ", ".join(f"`{name}`={value!r}" for name, value in flags.items())
            raise UserError(f"config.json has {given}: true or false is expected.")
        return fields(tuple(flags.values()))

    return Clause(write, read)


def biases(config: ModelConfig) -> set[str]:
    """The kinds of bias that a model has."""
    kinds = {"qkv": config.qkv_bias, "out": config.out_bias, "mlp": config.mlp_bias, "norm": config.norm_bias}
    return {kind for kind, there in kinds.items() if there}


def experts(*count: str, count_absent: int, per_token_absent: int, shared: str | None = None) -> Clause:
    """How many experts, how many a token, and how wide. At least one: a dense model is of another architecture.

    Args:
        count: their names of the number, the first of which is written.
    """

    def write(config: ModelConfig) -> Values:
        values = {count[0]: max(config.n_experts, 1), "num_experts_per_tok": config.n_experts_per_token}
        return values | ({shared: config.d_ff_shared} if shared else {})

    def read(theirs: Settings, ours: Values) -> Values:
        given = [n for name in count if (n := theirs.take(name)) is not None]
        return {
            "n_experts": given[0] if given else count_absent,
            "n_experts_per_token": theirs.take("num_experts_per_tok", per_token_absent),
            "d_ff_shared": theirs.take(shared, 0) if shared else 0,
        }

    return Clause(write, read)
