"""Settings of rotary scaling."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Fixed, PositiveInt, Section, derived

Factors = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(max_length=1 << 16)]


class RopeScaling(Section):
    """Rescaling of the rotary frequencies, for a context longer than in training."""

    type: Fixed[Literal["linear", "dynamic", "yarn", "llama3", "longrope"]] = Field(
        description="linear: positions divided by the factor (Chen et al., 2023). dynamic: a base that grows with the "
        "length of the text or of its cache (NTK-aware). yarn: slow frequencies interpolated, fast ones kept (Peng et "
        "al., 2023). llama3: Llama 3.1's form of yarn (Grattafiori et al., 2024). longrope: one factor per frequency, "
        "with a second set for texts beyond the original context (Ding et al., 2024)."
    )
    factor: Fixed[float] = Field(ge=1, description="New context / original context.")
    original_context_length: Fixed[PositiveInt | None] = Field(
        None, description="Context that the frequencies were made for. None: context_length / factor."
    )
    beta_fast: Fixed[float] = Field(
        default_factory=derived("type", lambda kind: 4.0 if kind == "llama3" else 32.0),
        gt=0,
        description="yarn, llama3: keep pairs that turn more often than this within the original context. Default: 32; "
        "llama3: 4.",
    )
    beta_slow: Fixed[float] = Field(
        1.0, gt=0, description="yarn, llama3: interpolate pairs that turn less often than this."
    )
    attention_factor: Fixed[float | None] = Field(
        None,
        gt=0,
        description="yarn, longrope: factor of the rotated queries and keys. None: 0.1 ln(factor) + 1; longrope: "
        "sqrt(1 + ln(factor) / ln(original context)).",
    )
    short_factors: Fixed[Factors | None] = Field(
        None, description="longrope: divisor of each pair's frequency in texts up to the original context."
    )
    long_factors: Fixed[Factors | None] = Field(None, description="longrope: the divisors in longer texts.")

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return self.type in ("dynamic", "longrope")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type not in ("yarn", "llama3") and (self.beta_fast, self.beta_slow) != (32.0, 1.0):
            raise ValueError(
                f"beta_fast or beta_slow is set and type={self.type}: only yarn and llama3 have them; leave them out"
            )
        if self.type not in ("yarn", "longrope") and self.attention_factor is not None:
            raise ValueError(f"attention_factor with type={self.type}: only yarn and longrope have it; leave it out")
        for name in ("short_factors", "long_factors"):
            if (getattr(self, name) is None) == (self.type == "longrope"):
                raise ValueError(f"{name} belongs to type=longrope, and type={self.type}: set both or neither")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow:g} is not below beta_fast={self.beta_fast:g}: exchange them")
        return self
