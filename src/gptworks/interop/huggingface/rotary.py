"""The clause (see settings.py) for rotary positions and their scaling."""

from collections.abc import Mapping
from typing import Any

from gptworks.config import ModelConfig, RopeScaling
from gptworks.errors import UserError
from gptworks.interop.huggingface.settings import Clause, Settings, Values, refusal

_NEUTRAL = {"mscale": None, "mscale_all_dim": None, "truncate": True}
_FULL, _WINDOWED = "full_attention", "sliding_attention"


def rope(
    theta: str = "rope_theta",
    *,
    theta_absent: float = 10_000.0,
    fraction: str | None = None,
    fraction_absent: float = 1.0,
    kinds: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "llama3"),
    window_theta: str | None = None,
    window_theta_absent: float | None = None,
    original_absent: int | None = None,
    absent: Mapping[str, Any] | None = None,
) -> Clause:
    """Return a clause for rotary positions, their scaling and the context length.

    transformers 5 reads `rope_parameters`; earlier versions and other tools read `rope_theta` and `rope_scaling`. With
    dynamic scaling, `max_position_embeddings` is the original context.

    Args:
        theta: name of the setting for the base, whose default is `theta_absent`.
        fraction: name of the setting for the rotated share of a head (default `fraction_absent`); None: all is rotated.
        kinds: kinds of scaling that gptworks supports in this architecture.
        window_theta: name of the setting for the windowed layers' base in earlier versions of transformers.
        window_theta_absent: default base of windowed layers; None: they rotate like other layers.
        absent: default of `rope_parameters`.
        original_absent: default of a separate `original_max_position_embeddings`, which has precedence; None: the
            architecture has no such setting.
    """

    def write(config: ModelConfig) -> Values:
        scaling = config.rope_scaling if config.rope_scaling and config.rope_scaling.type in kinds else None
        context = config.context_length
        parameters: Values = {"rope_type": "default", "rope_theta": config.rope_theta}
        if scaling is not None:
            parameters |= _written(scaling, config.original_context_length)
            if scaling.type == "dynamic":
                context = config.original_context_length
        values: Values = {"max_position_embeddings": context, theta: config.rope_theta, "rope_parameters": parameters}
        if fraction:
            parameters["partial_rotary_factor"] = values[fraction] = config.rope_fraction
        if window_theta_absent is not None:
            own = config.window_rope_theta
            windowed = parameters if own is None else {"rope_type": "default", "rope_theta": own}
            values["rope_parameters"] = {_FULL: parameters, _WINDOWED: windowed}
            values |= {window_theta: windowed["rope_theta"]} if window_theta else {}
        if scaling is None:
            return values
        if original_absent:
            values["original_max_position_embeddings"] = config.original_context_length
        return values | {"rope_scaling": _older(parameters, context)}

    def read(theirs: Settings, ours: Values) -> Values:
        given, context = theirs.take("rope_parameters") or {}, theirs.need("max_position_embeddings")
        scaled, base = theirs.take("rope_scaling") or {}, theirs.take(theta, theta_absent)
        if not given and not scaled:
            given = dict(absent or {})
        plain: Values = {"rope_theta": base, "rope_fraction": theirs.take(fraction, fraction_absent) if fraction else 1}
        if original_absent:
            plain["original"] = theirs.take("original_max_position_embeddings", original_absent)

        def rotation(parameters: Values) -> Values:
            fields = {"context_length": context, "rope_scaling": None} | _read(parameters, plain, context, kinds)
            if not fraction and fields["rope_fraction"] != 1:
                rule = "this model type rotates all of a head"
                raise refusal("partial_rotary_factor", fields["rope_fraction"], rule)
            return fields

        if window_theta_absent is None:
            return rotation(scaled or given)
        by_layer = Settings(given)
        everywhere, windowed = {**(by_layer.take(_FULL) or {}), **scaled}, {**(by_layer.take(_WINDOWED) or {})}
        for name in by_layer.left():
            raise UserError(f"config.json has rope_parameters.{name}: only {_FULL} and {_WINDOWED} are known.")
        own_base = theirs.take(window_theta, window_theta_absent) if window_theta else window_theta_absent
        if "rope_theta" not in windowed and not window_theta and base != own_base:
            raise refusal(theta, base, f"windowed layers need rope_parameters.{_WINDOWED}.rope_theta too")
        fields, own = rotation(everywhere), rotation({"rope_theta": own_base} | windowed)
        if own == fields:
            return fields
        if own["rope_scaling"] is not None:
            rule = "windowed layers are scaled like the others or not at all"
            raise refusal(f"rope_parameters.{_WINDOWED}.rope_type", own["rope_scaling"].type, rule)
        return fields | {"window_rope_theta": own["rope_theta"]}

    return Clause(write, read)


def _written(scaling: RopeScaling, original: int) -> Values:
    """Return the entries of `rope_parameters` for a scaling. `original`: the context length before scaling."""
    values: Values = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.short_factors and scaling.long_factors:
        values |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        values |= scaling.model_dump(include={"attention_factor"}, exclude_none=True)
    if scaling.type == "yarn":
        values |= scaling.model_dump(include={"beta_fast", "beta_slow", "attention_factor"}, exclude_none=True)
    if scaling.type == "llama3":
        values |= {"low_freq_factor": scaling.beta_slow, "high_freq_factor": scaling.beta_fast}
    if scaling.type in ("yarn", "llama3", "longrope"):
        values["original_max_position_embeddings"] = original
    return values


def _older(parameters: Values, context: int) -> Values:
    """Return `rope_scaling` for earlier versions of transformers. For LongRoPE, leave out the keys that they refuse,
    if they compute the same values themselves."""
    factors = {name: parameters[name] for name in ("short_factor", "long_factor") if name in parameters}
    if not factors or "attention_factor" in parameters:
        return dict(parameters)
    if parameters["factor"] != context / parameters["original_max_position_embeddings"]:
        return dict(parameters)
    return {"type": parameters["rope_type"]} | factors


def _read(given: Any, plain: Values, context: int, kinds: tuple[str, ...]) -> Values:
    """Convert one set of `rope_parameters`, `given`, to fields of ModelConfig. `plain` has defaults for the base and
    the rotated share; an original context in `plain` has precedence over one in `given`."""
    parameters = Settings(given)
    fields: Values = {
        "rope_theta": parameters.take("rope_theta", plain["rope_theta"]),
        "rope_fraction": parameters.take("partial_rotary_factor", plain["rope_fraction"]),
    }
    kind = parameters.take("rope_type", parameters.take("type", "default"))
    kind = "longrope" if kind == "su" else kind  # LongRoPE's former name
    if kind not in kinds:
        raise refusal("rope_type", kind, f"gptworks supports {', '.join(kinds)} for this model type")
    for name, neutral in _NEUTRAL.items():
        if (value := parameters.take(name)) not in (None, neutral):
            raise refusal(f"rope_parameters.{name}", value, f"gptworks supports only {neutral!r}")
    original = parameters.take("original_max_position_embeddings", context)
    original = plain.get("original", original)
    if kind == "longrope":
        scaling: Values = {
            "factor": parameters.take("factor") or context / original,
            "original_context_length": original,
            "short_factors": parameters.need("short_factor"),
            "long_factors": parameters.need("long_factor"),
            "attention_factor": parameters.take("attention_factor"),
        }
        fields["rope_scaling"] = RopeScaling(type=kind, **scaling)
    elif kind != "default":
        scaling = {"factor": parameters.need("factor")}
        if kind == "yarn":
            scaling |= {
                "original_context_length": original,
                "beta_fast": parameters.take("beta_fast") or 32.0,
                "beta_slow": parameters.take("beta_slow") or 1.0,
                "attention_factor": parameters.take("attention_factor"),
            }
        if kind == "llama3":
            scaling |= {
                "original_context_length": original,
                "beta_fast": parameters.need("high_freq_factor"),
                "beta_slow": parameters.need("low_freq_factor"),
            }
        if kind == "dynamic":
            scaling["original_context_length"] = context
            fields["context_length"] = round(context * scaling["factor"])
        fields["rope_scaling"] = RopeScaling(type=kind, **scaling)
    for name in parameters.left():
        raise UserError(f"config.json has rope_parameters.{name}, which gptworks does not support.")
    return fields
