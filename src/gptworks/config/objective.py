"""Settings of the objectives."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from gptworks.config.base import Fixed, Free, Measured, Place, PositiveInt, RemotePath, Section, Start

DataFault = Literal[
    "nothing-learned", "little-learned", "prompts-learned", "unanswered", "empty-answers", "swapped-roles",
    "answers-altered", "answers-cut-away", "answers-cut-short", "no-end-token", "tokens-not-special",
    "template-changed", "no-base-run", "duplicates", "validation-overlap", "one-answer", "unknown-tokens",
    "answers-alike", "keys-not-read",
]  # fmt: skip
"""Faults of conversations or preference pairs that stop a run before its first step, unless `allow` names them."""


class Rollouts(NamedTuple):
    """Settings for generating the answers that an objective learns from."""

    max_tokens: int
    """Maximum number of tokens in an answer."""
    group_size: int
    """Number of answers to each prompt."""
    steps: int
    """Number of optimizer steps that use the same answers."""


class ObjectiveSettings(Section):
    """Settings of an objective, and its properties, which other packages read instead of checking its type."""

    sources: ClassVar[tuple[str, ...]] = ("text", "conversations")
    """Kinds of sources that the objective can learn from."""
    rows_per_sample: ClassVar[int] = 1
    """Number of rows in a batch for each sample of `train.batch_size`."""
    varying_widths: ClassVar[bool] = False
    """Whether rows of a batch are padded to the longest row (rounded up), instead of to the maximum length of a row."""
    several_texts: ClassVar[bool] = False
    """Whether a row may hold several conversations. Positions restart at 0 in each, unless conversations are
    joined."""
    learns_prompts: ClassVar[bool] = False
    """Whether the loss covers every token of a conversation, not only the answers."""
    trains_future_heads: ClassVar[bool] = False
    """Whether the loss can cover tokens beyond the next (model.n_future_tokens)."""
    scores_targets: ClassVar[bool] = False
    """Whether the loss needs the log-probability of each target (`target_logprobs`), not only the sum."""
    scores_start: ClassVar[bool] = False
    """Whether the starting model scores every sample before the first step."""
    fixed_settings: ClassVar[dict[str, str]] = {}
    """Reasons why a resumed run may not change settings outside this section, by the setting's path."""

    allow: Free[tuple[DataFault, ...]] = Field((), description="Faults of the data, by name, that do not stop the run.")

    @property
    def loss_unit(self) -> str:
        """Unit of the validation loss."""
        return "nats per token"

    @property
    def packs(self) -> bool:
        """Whether several conversations are packed into a row: `several_texts`, unless a setting turns packing off."""
        return self.several_texts

    @property
    def joins(self) -> bool:
        """Whether the conversations of a training row become turns of one conversation."""
        return False

    @property
    def teacher_run(self) -> Path | None:
        """Run folder of the teacher, a second model that reads each batch; None if the objective has no teacher."""
        return None

    @property
    def keeps_start(self) -> bool:
        """Whether the starting weights stay in memory during training, as a reference."""
        return False

    @property
    def rollouts(self) -> Rollouts | None:
        """Settings for generating answers; None if the objective does not generate any."""
        return None

    @property
    def micro_batch_multiple(self) -> int:
        """Number that must divide the micro-batch size."""
        return self.rollouts.group_size if self.rollouts else 1


class NextTokenObjective(ObjectiveSettings):
    """Predict every token of the text from the tokens before it."""

    learns_prompts = True
    trains_future_heads = True

    type: Measured[Literal["next_token"]] = "next_token"


NEXT_TOKEN = NextTokenObjective()


class InstructionObjective(ObjectiveSettings):
    """Learn the answers of conversations; other turns have no loss. Needs sources of type conversations."""

    sources = ("conversations",)
    several_texts = True
    trains_future_heads = True

    type: Measured[Literal["instruction"]]
    packing: Fixed[bool | Literal["turns"]] = Field(
        True,
        description="true: put several examples into a row; none attends to another, and positions restart with each. "
        "turns: join them as turns of one conversation, others in each epoch, so that the model learns to answer later "
        "in a chat too. false: one example per row, padded to the context.",
    )

    @property
    def packs(self) -> bool:
        return bool(self.packing)

    @property
    def joins(self) -> bool:
        return self.packing == "turns"


class _PairsObjective(ObjectiveSettings):
    sources = ("preferences",)
    rows_per_sample = 2
    varying_widths = True
    scores_targets = True


class PreferenceObjective(_PairsObjective):
    """Raise the chosen answer's probability over the rejected one's; beta limits the drift from the starting model.
    `train.batch_size` counts pairs. Needs sources of type preferences."""

    scores_start = True

    type: Measured[Literal["preference"]]
    loss: Measured[Literal["dpo", "ipo"]] = Field(
        "dpo",
        description="dpo: Rafailov et al., 2023; with label_smoothing, cDPO. ipo: Azar et al., 2023, with mean "
        "log-probabilities of the answers' tokens.",
    )
    beta: Measured[float] = Field(0.1, gt=0, description="Larger values keep the model closer to its start (ipo: τ).")
    label_smoothing: Measured[float] = Field(
        0.0, ge=0, lt=0.5, description="dpo: assumed share of pairs with swapped labels."
    )

    @property
    def loss_unit(self) -> str:
        return "IPO loss per pair" if self.loss == "ipo" else "nats per pair"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing={self.label_smoothing:g} and loss=ipo, which has none: leave it out")
        return self


class OddsRatioObjective(_PairsObjective):
    """Learn the chosen answers and raise their odds over the rejected ones, without a reference model: ORPO (Hong et
    al., 2024). `train.batch_size` counts pairs. Needs sources of type preferences."""

    type: Measured[Literal["odds_ratio"]]
    weight: Measured[float] = Field(0.1, gt=0, description="Weight of the odds ratio, added to the answer's loss (λ).")

    @property
    def loss_unit(self) -> str:
        return "ORPO loss per pair"


class DistillationObjective(ObjectiveSettings):
    """Learn a teacher's distribution and the text (Hinton et al., 2015). The loss is ce_weight · cross-entropy +
    kl_weight · temperature² · KL(teacher ‖ student), with logits divided by the temperature in the KL term."""

    several_texts = True

    type: Measured[Literal["distillation"]]
    teacher: Start[Annotated[RemotePath, Place.PATH]] = Field(
        description="The run folder of a trained or imported model with the same tokenizer."
    )
    temperature: Fixed[float] = Field(2.0, gt=0, description="Divides the logits of both models in the KL term.")
    kl_weight: Fixed[float] = Field(0.5, gt=0, description="Weight of the KL divergence from the teacher.")
    ce_weight: Fixed[float] = Field(0.5, ge=0, description="Weight of the cross-entropy on the text.")

    @property
    def teacher_run(self) -> Path:
        return self.teacher


class RewardObjective(ObjectiveSettings):
    """Raise the probability of answers that a function rewards: GRPO (Shao et al., 2024). The model samples a group of
    answers to each prompt; an answer's advantage is its reward minus the group's mean, divided by the group's standard
    deviation if `scale_by_deviation`. `train.batch_size` counts answers. The prompts are conversations without their
    last answer."""

    sources = ("conversations",)
    varying_widths = True
    scores_targets = True
    fixed_settings: ClassVar[dict[str, str]] = {"train.batch_size": "its prompts are counted in steps of equal size"}

    type: Measured[Literal["reward"]]
    reward: Measured[Annotated[str, Place.CODE]] = Field(
        pattern=r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$",
        description="`path/to/file.py:function`, called as function(completion, prompt=..., answer=...) with texts; it "
        "returns a number. The file is executed without a sandbox.",
    )
    group_size: Fixed[int] = Field(8, ge=2, le=1 << 16, description="Answers to each prompt.")
    max_tokens: Measured[PositiveInt] = Field(128, le=1 << 22, description="Most tokens of an answer.")
    temperature: Measured[float] = Field(1.0, gt=0, description="Temperature at which answers are sampled.")
    clip: Fixed[float] = Field(0.2, gt=0, lt=1, description="Clipping range of the probability ratio (ε).")
    beta: Fixed[float] = Field(
        0.0, ge=0, description="Weight of the KL divergence from the starting model. 0: no reference model."
    )
    steps_per_rollout: Fixed[PositiveInt] = Field(1, description="Optimizer steps per set of answers (μ).")
    scale_by_deviation: Fixed[bool] = Field(
        True, description="Divide advantages by the group's standard deviation. false: do not (Liu et al., 2025)."
    )

    @property
    def loss_unit(self) -> str:
        return "negative reward"

    @property
    def keeps_start(self) -> bool:
        return self.beta > 0

    @property
    def rollouts(self) -> Rollouts:
        return Rollouts(self.max_tokens, self.group_size, self.steps_per_rollout)


ObjectiveConfig = Annotated[
    NextTokenObjective
    | InstructionObjective
    | PreferenceObjective
    | OddsRatioObjective
    | DistillationObjective
    | RewardObjective,
    Field(discriminator="type"),
]

OBJECTIVE_SETTINGS: dict[str, type[ObjectiveSettings]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ObjectiveConfig)[0])
}
"""Settings classes of the objectives by `objective.type`."""
