"""Settings as overrides, the text that a user types after a command: `train.max_steps=20`."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import to_jsonable_python


def as_typed(value: Any) -> str:
    """Return a setting's value as a user would type it in an override."""
    plain = to_jsonable_python(value, fallback=str)
    if isinstance(plain, str):
        return plain
    text = json.dumps(plain, ensure_ascii=False)
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)  # YAML needs escapes for these


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as overrides: `max_steps=20` as `train.max_steps=20`, `model={"n_layers": 2}` as
    `model.n_layers=2`.

    A name that is not a key of a recipe names a setting of its section `train`.
    """
    from gptworks.config import Recipe  # imports pydantic

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
        yield f"{path}={as_typed(value)}"
