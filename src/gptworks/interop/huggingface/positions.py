"""Clauses (see settings.py) for rotary positions and their scaling, and for settings that differ between layers:
attention windows, and layers without rotary positions."""

from collections.abc import Mapping
from typing import Any

from gptworks.config import ModelConfig, RopeScaling
from gptworks.config.architecture import MOST_LAYERS
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
        original_absent: default of `original_max_position_embeddings` outside `rope_parameters`, which has precedence
            over the same setting inside; None: the architecture has no such setting.
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
    """Return `rope_scaling` for earlier versions of transformers. For LongRoPE, leave out the keys that these versions
    refuse, if they compute the same values themselves."""
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


# -------------------------------------------------------------------------------------------- layers that differ


def shortest_period(layers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the shortest pattern that gives `layers` when repeated; the last repeat may be cut off."""
    lengths = range(1, len(layers) + 1)
    return next(layers[:n] for n in lengths if all(kind == layers[i % n] for i, kind in enumerate(layers)))


def _rotates(pattern: tuple[str, ...], layer: int) -> bool:
    return pattern[layer % len(pattern)] == "rope"


def _n_layers(ours: Values) -> int:
    """Return the number of layers; refuse a huge number, since a list of that length would fill the memory."""
    n_layers = ours["n_layers"]
    if not isinstance(n_layers, int) or n_layers > MOST_LAYERS:
        raise refusal("num_hidden_layers", n_layers, f"a number up to {MOST_LAYERS:,} is expected")
    return n_layers


def _windowed(window: int | None, layers: list[bool], ours: Values) -> Values:
    """Return ModelConfig's window fields; `layers` says whether each layer has the window. A window at least
    as long as the context is dropped, unless windowed layers have a rotary base of their own."""
    context = ours["context_length"]
    if ours["window_rope_theta"] is not None and any(layers):
        window = context if window is None else min(window, context)
    elif window is None or window >= context or not any(layers):
        return {"window": None, "window_pattern": ("full",), "window_rope_theta": None}
    kinds = tuple("window" if windowed else "full" for windowed in layers)
    return {"window": window, "window_pattern": shortest_period(kinds)}


def window_everywhere(absent: int | None = None, switch: str | None = None) -> Clause:
    """Return a clause for a window in every layer, or in none. `switch`: name of the flag that turns the window on; a
    missing flag means false. Without `switch`, the window is on."""

    def write(config: ModelConfig) -> Values:
        window = config.window if all(config.layer_windows) else None
        return {"sliding_window": window} | ({switch: window is not None} if switch else {})

    def read(theirs: Settings, ours: Values) -> Values:
        window = theirs.take("sliding_window", absent)
        on = theirs.take(switch, False) if switch else True
        return _windowed(window if on else None, [True] * _n_layers(ours), ours)

    return Clause(write, read)


def _check_layers(name: str, n_kinds: int, n_layers: int, kinds: set[str], known: tuple[str, str]) -> None:
    """Refuse a list with unknown kinds of layers, or without exactly one entry per layer."""
    if unknown := kinds.difference(known):
        raise UserError(f"config.json has `{name}` with {min(unknown)!r}: gptworks supports {' and '.join(known)}.")
    if n_kinds != n_layers:
        raise UserError(f"config.json has `{name}` for {n_kinds} layers and num_hidden_layers={n_layers}: correct one.")


def window_by_layer(
    *,
    switched: bool = True,
    by_rotation: bool = False,
    full_every: int | None = None,
    full_is: int = -1,
    pattern: str | None = None,
    window_absent: int | None = 4096,
) -> Clause:
    """Return a clause for a window in some layers, which `layer_types` lists (one type per layer).

    Args:
        switched: whether `use_sliding_window` turns windows on. Without `layer_types`, windows then begin at layer
            `max_window_layers`.
        by_rotation: whether, without `layer_types`, the layers without rotary positions are windowed.
        full_every: without `layer_types`, one of every `full_every` layers is not windowed.
        full_is: index of the layer without a window among `full_every` layers: 0 is the first, -1 the last.
        pattern: name of the setting that replaces `full_every`; None: there is no such setting.
    """
    known = _WINDOWED, _FULL

    def write(config: ModelConfig) -> Values:
        layers = [window is not None for window in config.layer_windows]
        types = [known[0] if windowed else known[1] for windowed in layers]
        window = config.window or (config.context_length if full_every else None)  # some model classes require a number
        values: Values = {"sliding_window": window, "layer_types": types}
        first = layers.index(True) if any(layers) else config.n_layers
        values |= {"use_sliding_window": any(layers)} if switched else {}
        return values | ({"max_window_layers": first} if switched and not by_rotation else {})

    def read(theirs: Settings, ours: Values) -> Values:
        n_layers, on, first = _n_layers(ours), True, 0
        if switched:
            on, first = theirs.take("use_sliding_window", False), theirs.take("max_window_layers", 28)
        window, types = theirs.take("sliding_window", window_absent), theirs.take("layer_types")
        every = theirs.take(pattern, full_every) if pattern else full_every
        if not types and every is not None:
            types = [known[i % every == full_is % every] for i in range(n_layers)]
        if not types and by_rotation:
            types = [known[_rotates(ours["rope_pattern"], i)] for i in range(n_layers)]
        types = types or [known[i < first] for i in range(n_layers)]
        _check_layers("layer_types", len(types), n_layers, set(types), known)
        return _windowed(window if on else None, [kind == known[0] for kind in types], ours)

    return Clause(write, read)


def _write_rotated(config: ModelConfig) -> Values:
    return {"no_rope_layers": [int(_rotates(config.rope_pattern, layer)) for layer in range(config.n_layers)]}


def _read_rotated(theirs: Settings, ours: Values) -> Values:
    n_layers, interval = _n_layers(ours), theirs.take("no_rope_layer_interval", 4)
    rotates = theirs.take("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(n_layers)]
    if len(rotates) < n_layers or not any(rotates[:n_layers]):
        rule = f"one 0 or 1 for each of {n_layers} layers, and not all 0, is expected"
        raise refusal("no_rope_layers", rotates, rule)
    return {"rope_pattern": shortest_period(tuple("rope" if one else "none" for one in rotates[:n_layers]))}


ROTATED_LAYERS = Clause(_write_rotated, _read_rotated)
"""The clause for SmolLM3, some of whose layers have no rotary positions."""


def _write_pattern(config: ModelConfig) -> Values:
    kinds = tuple("global" if window is None else "local" for window in config.layer_windows)
    pattern = shortest_period(kinds)
    repeats, rest = divmod(config.n_layers, len(pattern))
    types = [[list(kinds), 1]] if rest else [[list(pattern), repeats]]
    return {"attention_types": types, "window_size": config.window or 256}


def _read_pattern(theirs: Settings, ours: Values) -> Values:
    layers = theirs.take("attention_layers")
    types = theirs.take("attention_types") or [[["global", "local"], 12]]
    n_kinds = sum(len(pattern) * repeats for pattern, repeats in types)
    named = {kind for pattern, _ in types for kind in pattern}
    _check_layers("attention_types", n_kinds, ours["n_layers"], named, ("global", "local"))
    kinds = [kind for pattern, repeats in types for kind in pattern * repeats]
    if layers is not None and layers != kinds:
        raise UserError(
            f"config.json has `attention_layers`={layers}, and `attention_types` gives {kinds}: they contradict "
            f"each other. Delete the wrong one."
        )
    return _windowed(theirs.take("window_size", 256), [kind == "local" for kind in kinds], ours)


WINDOW_BY_PATTERN = Clause(_write_pattern, _read_pattern)
"""The clause for GPT-Neo's windows, [[pattern, repeats], ...]. A window includes the current token, as in gptworks."""
