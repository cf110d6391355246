"""Settings given as Python values, as the overrides that a command line has."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gptworks.config import Recipe


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """`max_steps=20` as `train.max_steps=20`, `model={"n_layers": 2}` as `model.n_layers=2`.

    A name that is no key of a recipe is a setting of its section `train`.
    """
    return [
        override
        for name, value in settings.items()
        for override in _written(name if name in Recipe.model_fields else f"train.{name}", value)
    ]


def _written(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _written(f"{path}.{name}", inner)
    else:
        yield f"{path}={value if isinstance(value, str | Path) else json.dumps(value, default=str)}"
