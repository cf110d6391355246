"""Sampling settings that a recipe recommends for its model."""

from typing import Annotated, Any

from pydantic import Field

from gptworks.choices import DRY_RANGES
from gptworks.config.base import Free, Section


def dry_range(name: str) -> Any:
    """Return the bounds of a setting of the DRY penalty as a pydantic field, to annotate its type."""
    low, high = DRY_RANGES[name]
    return Field(ge=low, le=high)


class SamplingConfig(Section):
    """Default sampling settings of the model in commands, servers, the studio and exports. An option or a request
    overrides them. None: the program's own default."""

    temperature: Free[Annotated[float, Field(ge=0, le=1e6)] | None] = Field(None, description="0: greedy.")
    top_k: Free[Annotated[int, Field(ge=0, lt=2**31)] | None] = Field(
        None, description="Keep the k likeliest tokens. 0: all."
    )
    top_p: Free[Annotated[float, Field(gt=0, le=1)] | None] = Field(
        None, description="Keep the likeliest tokens that hold this much probability."
    )
    min_p: Free[Annotated[float, Field(ge=0, lt=1)] | None] = Field(
        None, description="Drop tokens below this share of the likeliest one's probability."
    )
    repetition_penalty: Free[Annotated[float, Field(ge=1e-3, le=1e3)] | None] = Field(
        None, description="Above 1: tokens that occurred become less likely."
    )
    frequency_penalty: Free[Annotated[float, Field(ge=0, le=100)] | None] = Field(
        None, description="Subtracted from a token's logit each time it was generated."
    )
    presence_penalty: Free[Annotated[float, Field(ge=0, le=100)] | None] = Field(
        None, description="Subtracted once from the logit of a generated token."
    )
    dry_multiplier: Free[Annotated[float, dry_range("dry_multiplier")] | None] = Field(
        None, description="Above 0: tokens that would go on repeating earlier text become less likely (DRY). 0: off."
    )
    dry_base: Free[Annotated[float, dry_range("dry_base")] | None] = Field(
        None, description="DRY: factor by which the penalty grows with each repeated token."
    )
    dry_allowed_length: Free[Annotated[int, dry_range("dry_allowed_length")] | None] = Field(
        None, description="DRY: tokens that may be repeated without a penalty."
    )

    def stated(self) -> dict[str, Any]:
        """Return the settings that are not None, as a generation_config.json states them; empty if all are None."""
        given = self.model_dump(exclude_none=True)
        return {"do_sample": self.temperature != 0, **given} if given else {}
