"""Sampling settings that a recipe recommends for its model."""

from typing import Annotated, Any

from pydantic import Field

from gptworks.choices import SAMPLING_RULES
from gptworks.config.base import Free, Section


def sampling(name: str) -> Any:
    """Return the bounds and the description of a sampling setting as a pydantic field, to annotate its type."""
    rule = SAMPLING_RULES[name]
    return Field(description=rule.help, **rule.bounds)


class SamplingConfig(Section):
    """Default sampling settings of the model in commands, servers, the studio and exports. An option or a request
    overrides them. If a setting is None, the program's own default applies."""

    temperature: Free[Annotated[float | None, sampling("temperature")]] = None
    top_k: Free[Annotated[int | None, sampling("top_k")]] = None
    top_p: Free[Annotated[float | None, sampling("top_p")]] = None
    min_p: Free[Annotated[float | None, sampling("min_p")]] = None
    repetition_penalty: Free[Annotated[float | None, sampling("repetition_penalty")]] = None
    frequency_penalty: Free[Annotated[float | None, sampling("frequency_penalty")]] = None
    presence_penalty: Free[Annotated[float | None, sampling("presence_penalty")]] = None
    dry_multiplier: Free[Annotated[float | None, sampling("dry_multiplier")]] = None
    dry_base: Free[Annotated[float | None, sampling("dry_base")]] = None
    dry_allowed_length: Free[Annotated[int | None, sampling("dry_allowed_length")]] = None

    def stated(self) -> dict[str, Any]:
        """Return the settings that are not None, as a generation_config.json states them; empty if all are None."""
        given = self.model_dump(exclude_none=True)
        return {"do_sample": self.temperature != 0, **given} if given else {}
