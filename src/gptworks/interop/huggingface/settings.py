"""Clauses: each writes some of a model's settings to `config.json` and reads them back.

If an architecture does not support a value, the clause writes the nearest supported one. Reading the settings back then
gives another model, and the differences are the obstacles to an export (family.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gptworks.config import ModelConfig
from gptworks.errors import UserError

Values = dict[str, Any]


class Settings:
    """The settings in a `config.json`, with a record of those taken, so that an import can refuse the others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._taken: set[str] = set()

    def take(self, name: str, absent: Any = None) -> Any:
        """Return the value of a setting, which may be null, or `absent` if the file does not have the setting."""
        self._taken.add(name)
        return self._values.get(name, absent)

    def need(self, name: str) -> Any:
        """Return the value of a required setting. Raises a UserError if the setting is missing or null."""
        if (value := self.take(name)) is None:
            raise UserError(f"config.json has no `{name}`, which this model type needs: the file is incomplete.")
        return value

    def left(self) -> Values:
        """Return the settings that were never taken, without null and empty values."""
        left = {name: value for name, value in self._values.items() if name not in self._taken}
        return {name: value for name, value in left.items() if value not in (None, [], {})}


@dataclass(frozen=True)
class Clause:
    """A pair of functions that write and read a part of a model's settings."""

    write: Callable[[ModelConfig], Values]
    """Returns this clause's part of `config.json` for a model."""
    read: Callable[[Settings, Values], Values]
    """Returns this clause's part as fields of ModelConfig, given the fields that earlier clauses read."""


def refusal(name: str, value: Any, rule: str) -> UserError:
    """Return the error for a setting with an unsupported value."""
    return UserError(f"config.json has `{name}`={value!r}: {rule}.")


# ------------------------------------------------------------------------------------------- general clauses


def fixed(**fields: Any) -> Clause:
    """Return a clause for fields that are constant in an architecture and not part of its `config.json`."""
    return Clause(lambda config: {}, lambda theirs, ours: dict(fields))


def only(name: str, value: Any, absent: Any) -> Clause:
    """Return a clause for a setting with only one supported value. `absent`: the value if the setting is missing."""

    def read(theirs: Settings, ours: Values) -> Values:
        given = theirs.take(name, absent)
        if given != value and not (given is None and absent == value):
            raise refusal(name, given, f"gptworks supports only {value!r}")
        return {}

    return Clause(lambda config: {} if absent == value else {name: value}, read)


def own_code(name: str) -> Clause:
    """Return a clause that accepts `auto_map` only if it names the class `name`. A folder's code is never run."""

    def read(theirs: Settings, ours: Values) -> Values:
        code = (theirs.take("auto_map") or {}).get("AutoModelForCausalLM", name)
        if code.rpartition("--")[2] != name:
            raise refusal("auto_map", code, f"code in a model's folder is not run; only `{name}` is known")
        return {}

    return Clause(lambda config: {}, read)


def needed(**names: str) -> Clause:
    """Return a clause for required settings, given as name in `config.json` = our field."""
    return Clause(
        lambda config: {theirs: getattr(config, ours) for theirs, ours in names.items()},
        lambda theirs, ours: {our_name: theirs.need(name) for name, our_name in names.items()},
    )


def optional(names: Mapping[str, tuple[str, Any]], *, nullable: bool = False) -> Clause:
    """Return a clause for optional settings.

    Args:
        names: name in `config.json` → our field and its default. A function as default computes the value from the
            fields of earlier clauses.
        nullable: whether null switches a setting off; if not, null means the default.
    """

    def read(theirs: Settings, ours: Values) -> Values:
        fields: Values = {}
        for name, (our_name, default) in names.items():
            value = theirs.take(name, default)
            value = default if value is None and not nullable else value
            fields[our_name] = value(ours) if callable(value) else value
        return fields

    return Clause(lambda config: {theirs: getattr(config, ours) for theirs, (ours, _) in names.items()}, read)


# ------------------------------------------------------------------------- clauses for attention and MLP


def heads(
    heads: str = "num_attention_heads",
    kv_heads: str | None = "num_key_value_heads",
    width: str | None = "head_dim",
    *,
    kv_absent: int | None = None,
    width_absent: int | None = None,
    whole: bool = False,
) -> Clause:
    """Return a clause for the numbers of query heads and of key/value heads, and for the width of a head.

    Args:
        heads, kv_heads, width: names of the settings; None: no such setting.
        kv_absent, width_absent: values if the file lacks the setting. None: `n_heads`, and `d_model / n_heads`.
        whole: whether the number of heads must divide the model's width, even with the setting `width`.
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
"""The clause for GPT-2's flag that divides q·k by the square root of the head width."""


def _read_scale_factor(theirs: Settings, ours: Values) -> Values:
    scale = theirs.take("attention_multiplier", 1.0)
    return {"attention_scale": None if scale == ours["d_head"] ** -0.5 else scale}


SCALE_FACTOR = Clause(lambda config: {"attention_multiplier": config.score_scale}, _read_scale_factor)
"""The clause for the factor by which Granite multiplies q·k."""


def _read_query_scalar(theirs: Settings, ours: Values) -> Values:
    scalar = theirs.take("query_pre_attn_scalar", 256)
    return {"attention_scale": None if scalar == ours["d_head"] else scalar**-0.5}


QUERY_SCALAR = Clause(
    lambda config: {"query_pre_attn_scalar": max(1, round(config.score_scale**-2))}, _read_query_scalar
)
"""The clause for Gemma's integer `query_pre_attn_scalar`; q·k is divided by its square root."""

EMBEDDING_ROOT = Clause(lambda config: {}, lambda theirs, ours: {"embedding_scale": ours["d_model"] ** 0.5})
"""The clause for Gemma's embedding, multiplied by √C (C: width). transformers rounds √C to the weights' dtype."""

_ACTIVATION_ALIASES = {
    "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh", "gelu_python": "gelu", "swish": "silu",
}  # fmt: skip
"""Names of activations in transformers → one name for each function, so that names can be compared."""


def activation(
    name: str, choices: Mapping[str, str], absent: str, other_names: Mapping[str, str] = MappingProxyType({})
) -> Clause:
    """Return a clause for the MLP's activation.

    Args:
        choices: our name → theirs. An activation without an entry is written as the first one.
        other_names: name in `config.json` → name of the activation that this architecture uses instead.
    """

    def read(theirs: Settings, ours: Values) -> Values:
        given = theirs.take(name, absent)
        given = other_names.get(given, given)
        for our_name, their_name in choices.items():
            if _ACTIVATION_ALIASES.get(given, given) == _ACTIVATION_ALIASES.get(their_name, their_name):
                return {"mlp": our_name}
        raise refusal(name, given, f"gptworks supports {', '.join(choices.values())} for this model type")

    return Clause(lambda config: {name: choices.get(config.mlp, next(iter(choices.values())))}, read)


def bias_flags(*always: str, **flags: tuple[bool, str]) -> Clause:
    """Return a clause for the flags that give linear layers biases.

    Args:
        always: those of the biases qkv, out and mlp that the architecture has without a flag.
        flags: a flag's name = its default, and the biases that it switches on.
    """

    def write(config: ModelConfig) -> Values:
        return {name: not biases(config).isdisjoint(kinds.split()) for name, (_, kinds) in flags.items()}

    def read(theirs: Settings, ours: Values) -> Values:
        given = {name: theirs.take(name, absent) for name, (absent, _) in flags.items()}
        if not all(on in (False, True) for on in given.values()):
            shown = ", ".join(f"`{name}`={value!r}" for name, value in given.items())
            raise UserError(f"config.json has {shown}: true or false is expected.")
        there = {*always, *(kind for name, on in given.items() if on for kind in flags[name][1].split())}
        attention = there & {"qkv", "out"}
        one = next(iter(attention)) if len(attention) == 1 else bool(attention)  # both: True; none: False
        return {"attention_bias": one, "mlp_bias": "mlp" in there}

    return Clause(write, read)


def biases(config: ModelConfig) -> set[str]:
    """Return which of the biases qkv, out, mlp and norm a model has."""
    kinds = {"qkv": config.qkv_bias, "out": config.out_bias, "mlp": config.mlp_bias, "norm": config.norm_bias}
    return {kind for kind, there in kinds.items() if there}


def experts(*count: str, count_absent: int, per_token_absent: int, shared: str | None = None) -> Clause:
    """Return a clause for the numbers of experts and of experts per token, and for the shared expert's width. A dense
    model is written with one expert. Read back, it is a model with experts, so it is not exported in this architecture.

    Args:
        count: names of the setting for the number of experts; exports write the first one.
        count_absent, per_token_absent: the numbers of experts and of experts per token if a file states none.
        shared: name of the setting for the shared expert's width; None: there is none.
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
