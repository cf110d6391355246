"""Clauses (see settings.py) for settings that differ between layers: attention windows and rotary positions."""

from gptworks.config import ModelConfig
from gptworks.config.architecture import MOST_LAYERS
from gptworks.errors import UserError
from gptworks.interop.huggingface.settings import Clause, Settings, Values, refusal


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
    """Return ModelConfig's window fields; `layers` says whether each layer has the window. A window as long as the
    context is dropped, unless windowed layers have a rotary base of their own."""
    context = ours["context_length"]
    if ours["window_rope_theta"] is not None and any(layers):
        window = context if window is None else min(window, context)
    elif window is None or window >= context or not any(layers):
        return {"window": None, "window_pattern": ("full",), "window_rope_theta": None}
    kinds = tuple("window" if windowed else "full" for windowed in layers)
    return {"window": window, "window_pattern": shortest_period(kinds)}


def window_everywhere(absent: int | None = None, switch: str | None = None) -> Clause:
    """Return a clause for a window in every layer, or in none.

    Args:
        switch: name of the flag that turns the window on; a missing flag means false.
    """

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


_LAYER_TYPES = ("sliding_attention", "full_attention")


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
        full_every: without `layer_types`, one layer in this many is not windowed.
        full_is: index of that layer among `full_every` layers: 0 first, -1 last.
        pattern: name of the setting that replaces `full_every`; None: there is no such setting.
    """
    known = _LAYER_TYPES

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
