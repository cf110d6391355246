"""Settings that differ from layer to layer: windows, and which layers are rotated. See settings.py for clauses."""

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.interop.huggingface.settings import Clause, Settings, Values, refusal

MOST_LAYERS = 10_000
"""What ModelConfig allows."""


def shortest_period(layers: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern that gives these layers when it is repeated."""
    lengths = range(1, len(layers) + 1)
    return next(layers[:n] for n in lengths if all(kind == layers[i % n] for i, kind in enumerate(layers)))


def _n_layers(ours: Values) -> int:
    """The number of layers, before a list of so many is made."""
    n_layers = ours["n_layers"]
    if not isinstance(n_layers, int) or n_layers > MOST_LAYERS:
        raise refusal("num_hidden_layers", n_layers, f"a number up to {MOST_LAYERS:,} is expected")
    return n_layers


def _windowed(window: int | None, layers: list[bool], ours: Values) -> Values:
    """Fields for layers that are windowed or not; a window as long as the context changes nothing, unless windowed
    layers turn by another base."""
    context = ours["context_length"]
    if ours["window_rope_theta"] is not None and any(layers):
        window = context if window is None else min(window, context)
    elif window is None or window >= context or not any(layers):
        return {"window": None, "window_pattern": ("full",), "window_rope_theta": None}
    kinds = tuple("window" if windowed else "full" for windowed in layers)
    return {"window": window, "window_pattern": shortest_period(kinds)}


def window_everywhere(absent: int | None = None, switch: str | None = None) -> Clause:
    """A window that every layer has, or none.

    Args:
        switch: the flag without which the window does not count; a missing one is false.
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
    """Refuse kinds of layers that gptworks does not have, or that are not one for each layer."""
    if unknown := kinds.difference(known):
        raise UserError(f"config.json has `{name}` with {min(unknown)!r}: gptworks has {' and '.join(known)}.")
    if n_kinds != n_layers:
        raise UserError(f"config.json has `{name}` of {n_kinds} layers and {n_layers} layers.")


_LAYER_TYPES = ("sliding_attention", "full_attention")


def window_by_layer(
    *,
    switched: bool = True,
    full_every: int | None = None,
    full_is: int = -1,
    pattern: str | None = None,
    window_absent: int = 4096,
) -> Clause:
    """A type for each layer.

    Args:
        switched: there is a switch besides, and a layer from which on all are windowed.
        full_every: where no types are given, one of this many layers is not windowed.
        full_is: which of them: 0 the first, -1 the last.
        pattern: their name of that number.
    """
    known = _LAYER_TYPES

    def write(config: ModelConfig) -> Values:
        layers = [window is not None for window in config.layer_windows]
        types = [known[0] if windowed else known[1] for windowed in layers]
        window = config.window or (config.context_length if full_every else None)  # some classes ask for one always
        values: Values = {"sliding_window": window, "layer_types": types}
        first = layers.index(True) if any(layers) else config.n_layers
        return values | ({"use_sliding_window": any(layers), "max_window_layers": first} if switched else {})

    def read(theirs: Settings, ours: Values) -> Values:
        n_layers, on, first = _n_layers(ours), True, 0
        if switched:
            on, first = theirs.take("use_sliding_window", False), theirs.take("max_window_layers", 28)
        window, types = theirs.take("sliding_window", window_absent), theirs.take("layer_types")
        every = theirs.take(pattern, full_every) if pattern else full_every
        if not types and every is not None:
            types = [known[i % every == full_is % every] for i in range(n_layers)]
        types = types or [known[i < first] for i in range(n_layers)]
        _check_layers("layer_types", len(types), n_layers, set(types), known)
        return _windowed(window if on else None, [kind == known[0] for kind in types], ours)

    return Clause(write, read)


def _write_some_rotate(config: ModelConfig) -> Values:
    layers, pattern = range(config.n_layers), config.rope_pattern
    windowed = [window is not None for window in config.layer_windows]
    return {
        "no_rope_layers": [int(pattern[layer % len(pattern)] == "rope") for layer in layers],
        "use_sliding_window": any(windowed),
        "sliding_window": config.window,
        "layer_types": [_LAYER_TYPES[not one] for one in windowed],
    }


def _read_some_rotate(theirs: Settings, ours: Values) -> Values:
    n_layers, interval = _n_layers(ours), theirs.take("no_rope_layer_interval", 4)
    rotates = theirs.take("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(n_layers)]
    if len(rotates) < n_layers or not any(rotates[:n_layers]):
        raise refusal(
            "no_rope_layers", rotates, f"one 0 or 1 for each of {n_layers} layers, and not all 0, is expected"
        )
    window = theirs.take("sliding_window") if theirs.take("use_sliding_window", False) else None
    types = theirs.take("layer_types") or [_LAYER_TYPES[bool(rotated)] for rotated in rotates[:n_layers]]
    _check_layers("layer_types", len(types), n_layers, set(types), _LAYER_TYPES)
    pattern = shortest_period(tuple("rope" if rotated else "none" for rotated in rotates[:n_layers]))
    return {"rope_pattern": pattern} | _windowed(window, [kind == _LAYER_TYPES[0] for kind in types], ours)


SOME_ROTATE = Clause(_write_some_rotate, _read_some_rotate)
"""SmolLM3's layers without rotation, which are those with a window where nothing else is said."""


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
            f"config.json has `attention_layers`={layers} and `attention_types` that make {kinds}: they contradict "
            f"one another. Delete the one that is wrong."
        )
    return _windowed(theirs.take("window_size", 256), [kind == "local" for kind in kinds], ours)


WINDOW_BY_PATTERN = Clause(_write_pattern, _read_pattern)
"""GPT-Neo's global and local layers: [[pattern, repeats], ...]. Its window counts the token itself, as ours."""
