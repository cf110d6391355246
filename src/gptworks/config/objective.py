"""What is learned."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Fixed, Free, Measured, PositiveInt, Section, ShortPath, Start

DataFault = Literal[
    "nothing-learned", "little-learned", "prompts-learned", "unanswered", "empty-answers", "swapped-roles",
    "answers-altered", "answers-cut-away", "answers-cut-short", "no-end-token", "tokens-not-special",
    "template-changed", "no-base-run", "duplicates", "validation-overlap", "one-answer", "unknown-tokens",
    "answers-alike",
]  # fmt: skip
"""What conversations and pairs of answers are checked for before the first step."""


class _Objective(Section):
    allow: Free[tuple[DataFault, ...]] = Field(
        (), description="Faults found in the examples, which are to be trained on nevertheless."
    )


class NextTokenObjective(_Objective):
    """Every token of the text is predicted from those before it."""

    type: Measured[Literal["next_token"]] = "next_token"


class InstructionObjective(_Objective):
    """The answers of conversations are learned, the rest is only read. Needs sources of type conversations."""

    type: Measured[Literal["instruction"]]
    packing: Fixed[bool] = Field(
        True,
        description="Several examples a row; none sees another, and positions begin anew with each. "
        "false: one example a row, padded to the context.",
    )


class PreferenceObjective(_Objective):
    """Make preferred answers likelier than the others, by no more than the distance from the start allows. The step's
    batch_size counts pairs. Needs sources of type preferences."""

    type: Measured[Literal["preference"]]
    loss: Measured[Literal["dpo", "ipo"]] = Field(
        "dpo",
        description="dpo: Rafailov et al., 2023; with label_smoothing, cDPO. ipo: Azar et al., 2023, with the "
        "answers' log-probabilities a token.",
    )
    beta: Measured[float] = Field(0.1, gt=0, description="How much going away from the start costs (ipo: τ).")
    label_smoothing: Measured[float] = Field(
        0.0, ge=0, lt=0.5, description="dpo: the share of pairs that are taken to be labelled the wrong way round."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing={self.label_smoothing:g} with loss=ipo: only dpo has it; leave it out")
        return self


class DistillationObjective(_Objective):
    """Learn a teacher's whole distribution beside the text itself (Hinton et al., 2015):
    ce_weight · cross-entropy + kl_weight · temperature² · KL(teacher ‖ student), both softened by the temperature."""

    type: Measured[Literal["distillation"]]
    teacher: Start[ShortPath] = Field(description="A run folder, trained or imported, with the same tokenizer.")
    temperature: Fixed[float] = Field(2.0, gt=0)
    kl_weight: Fixed[float] = Field(0.5, gt=0)
    ce_weight: Fixed[float] = Field(0.5, ge=0)


class RewardObjective(_Objective):
    """Make answers likelier that a function rewards: GRPO (Shao et al., 2024). For each prompt a group of answers is
    sampled, and each is judged by how far it is above the group's mean. The step's batch_size counts answers. The
    prompts are those of conversations, up to the last answer."""

    type: Measured[Literal["reward"]]
    reward: Measured[str] = Field(
        pattern=r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$",
        description="`path/to/file.py:function`, which is called as function(completion, prompt=..., answer=...), "
        "all text, and returns a number. It is run as it is.",
    )
    group_size: Fixed[int] = Field(8, ge=2, le=1_000_000_000, description="Answers to each prompt.")
    max_tokens: Measured[PositiveInt] = Field(128, description="Of an answer.")
    temperature: Measured[float] = Field(1.0, gt=0)
    clip: Fixed[float] = Field(
        0.2, gt=0, lt=1, description="How far an answer's tokens may become likelier at once (ε)."
    )
    beta: Fixed[float] = Field(
        0.0, ge=0, description="Weight of the KL divergence from the start. 0: none, and no reference."
    )
    steps_per_rollout: Fixed[PositiveInt] = Field(1, description="Optimizer steps that use the same answers (μ).")
    scale_by_deviation: Fixed[bool] = Field(
        True, description="Divide by the group's standard deviation. false: subtract the mean alone (Liu et al., 2025)."
    )


ObjectiveConfig = Annotated[
    NextTokenObjective | InstructionObjective | PreferenceObjective | DistillationObjective | RewardObjective,
    Field(discriminator="type"),
]

SOURCES_OF = {
    "next_token": ("text", "conversations"),
    "instruction": ("conversations",),
    "preference": ("preferences",),
    "distillation": ("text", "conversations"),
    "reward": ("conversations",),
}
"""What each objective can learn from."""
