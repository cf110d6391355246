"""What settings are made of."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen group of settings that accepts only the keys it knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def derived(name: str, function: Callable[[Any], Any] = lambda value: value) -> Any:
    """A default computed from a field declared earlier."""
    return lambda data: function(data[name])
