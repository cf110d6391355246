"""What is learned."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from gptworks.config.base import Fixed, Free, Measured, Place, PositiveInt, Section, ShortPath, Start

DataFault = Literal[
    "nothing-learned", "little-learned", "prompts-learned", "unanswered", "empty-answers", "swapped-roles",
    "answers-altered", "answers-cut-away", "answers-cut-short", "no-end-token", "tokens-not-special",
    "template-changed", "no-base-run", "duplicates", "validation-overlap", "one-answer", "unknown-tokens",
    "answers-alike", "keys-not-read",
]  # fmt: skip
"""What conversations and pairs of answers are checked for before the first step."""


class Rollouts(NamedTuple):
    """How an objective generates the answers that it learns from."""

    max_tokens: int
    """Of an answer."""
    group_size: int
    """Answers to each prompt."""
    steps: int
    """Optimizer steps that use the same answers."""


class ObjectiveSettings(Section):
    """An objective's settings, and what other rooms need to know of it: they read these properties, never its type."""

    code: ClassVar[str] = "gptworks.training.objectives.base:Objective"
    """The class that computes it."""
    sources: ClassVar[tuple[str, ...]] = ("text", "conversations")
    """Kinds of sources that it learns from."""
    rows_per_sample: ClassVar[int] = 1
    """Rows of a batch for each sample that `train.batch_size` counts."""
    varying_widths: ClassVar[bool] = False
    """Whether a batch is as long as its longest row; else as the context."""
    several_texts: ClassVar[bool] = False
    """Whether a row of conversations may hold several, each with positions of its own."""
    learns_prompts: ClassVar[bool] = False
    """Whether every token of a conversation is learned, not the answers alone."""
    trains_future_heads: ClassVar[bool] = False
    """Whether the loss may have terms of tokens beyond the next (model.n_future_tokens)."""
    scores_targets: ClassVar[bool] = False
    """Whether the loss needs each target's log-probability (`target_logprobs`), not only their sum."""
    scores_start: ClassVar[bool] = False
    """Whether the model at the start reads every sample once, before the first step."""
    fixed_settings: ClassVar[dict[str, str]] = {}
    """Settings outside this section that a resumed run may not change: path → why."""

    allow: Free[tuple[DataFault, ...]] = Field((), description="Faults of the data to train on all the same, by name.")

    @property
    def loss_unit(self) -> str:
        """The unit of the validation loss."""
        return "nats per token"

    @property
    def packs(self) -> bool:
        """Whether conversations are packed, several a row."""
        return self.several_texts

    @property
    def teacher_run(self) -> Path | None:
        """The run folder of a second model, which reads each batch too."""
        return None

    @property
    def keeps_start(self) -> bool:
        """Whether the weights at the start stay in memory beside those in training."""
        return False

    @property
    def rollouts(self) -> Rollouts | None:
        """How it generates answers; None: it only reads data."""
        return None

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of samples in a micro-batch must be a multiple of."""
        return self.rollouts.group_size if self.rollouts else 1


class NextTokenObjective(ObjectiveSettings):
    """Every token of the text is predicted from those before it."""

    learns_prompts = True
    trains_future_heads = True

    type: Measured[Literal["next_token"]] = "next_token"


NEXT_TOKEN = NextTokenObjective()


class InstructionObjective(ObjectiveSettings):
    """The answers of conversations are learned, the rest is only read. Needs sources of type conversations."""

    sources = ("conversations",)
    several_texts = True
    trains_future_heads = True

    type: Measured[Literal["instruction"]]
    packing: Fixed[bool] = Field(
        True,
        description="Several examples a row; none sees another, and positions restart with each. "
        "false: one example a row, padded to the context.",
    )

    @property
    def packs(self) -> bool:
        return self.packing


class _PairsObjective(ObjectiveSettings):
    sources = ("preferences",)
    rows_per_sample = 2
    varying_widths = True
    scores_targets = True


class PreferenceObjective(_PairsObjective):
    """Raise the chosen answer's probability over the rejected one's; beta limits the drift from the starting model. The
    step's batch_size counts pairs. Needs sources of type preferences."""

    code = "gptworks.training.objectives.preference:Preference"
    scores_start = True

    type: Measured[Literal["preference"]]
    loss: Measured[Literal["dpo", "ipo"]] = Field(
        "dpo",
        description="dpo: Rafailov et al., 2023; with label_smoothing, cDPO. ipo: Azar et al., 2023, with the "
        "answers' log-probabilities a token.",
    )
    beta: Measured[float] = Field(0.1, gt=0, description="Larger values keep the model nearer to its start (ipo: τ).")
    label_smoothing: Measured[float] = Field(
        0.0, ge=0, lt=0.5, description="dpo: the share of pairs that are taken to be labelled the wrong way round."
    )

    @property
    def loss_unit(self) -> str:
        return "IPO loss per pair" if self.loss == "ipo" else "nats per pair"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing={self.label_smoothing:g} with loss=ipo: only dpo has it; leave it out")
        return self


class OddsRatioObjective(_PairsObjective):
    """Learn the chosen answers and raise their odds over the rejected ones' at once, without a reference: ORPO (Hong et
    al., 2024). The step's batch_size counts pairs. Needs sources of type preferences."""

    code = "gptworks.training.objectives.odds_ratio:OddsRatio"

    type: Measured[Literal["odds_ratio"]]
    weight: Measured[float] = Field(0.1, gt=0, description="Weight of the odds ratio, added to the answer's loss (λ).")

    @property
    def loss_unit(self) -> str:
        return "ORPO loss per pair"


class DistillationObjective(ObjectiveSettings):
    """Learn a teacher's whole distribution as well as the text itself (Hinton et al., 2015):
    ce_weight · cross-entropy + kl_weight · temperature² · KL(teacher ‖ student), both softened by the temperature."""

    code = "gptworks.training.objectives.distillation:Distillation"
    several_texts = True

    type: Measured[Literal["distillation"]]
    teacher: Start[Annotated[ShortPath, Place.PATH]] = Field(
        description="A run folder, trained or imported, with the same tokenizer."
    )
    temperature: Fixed[float] = Field(2.0, gt=0, description="Softens both distributions.")
    kl_weight: Fixed[float] = Field(0.5, gt=0, description="Weight of the KL divergence from the teacher.")
    ce_weight: Fixed[float] = Field(0.5, ge=0, description="Weight of the cross-entropy on the text.")

    @property
    def teacher_run(self) -> Path:
        return self.teacher


class RewardObjective(ObjectiveSettings):
    """Raise the probability of answers that a function rewards: GRPO (Shao et al., 2024). For each prompt a group of
    answers is sampled, and each is judged by how far it is above the group's mean. The step's batch_size counts
    answers. The prompts are those of conversations, up to the last answer."""

    code = "gptworks.training.objectives.reward:Reward"
    sources = ("conversations",)
    varying_widths = True
    scores_targets = True
    fixed_settings: ClassVar[dict[str, str]] = {"train.batch_size": "its prompts are counted in steps of one size"}

    type: Measured[Literal["reward"]]
    reward: Measured[Annotated[str, Place.CODE]] = Field(
        pattern=r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$",
        description="`path/to/file.py:function`, which is called as function(completion, prompt=..., answer=...), "
        "all text, and returns a number. It is run as it is.",
    )
    group_size: Fixed[int] = Field(8, ge=2, le=1 << 16, description="Answers to each prompt.")
    max_tokens: Measured[PositiveInt] = Field(128, le=1 << 22, description="Of an answer.")
    temperature: Measured[float] = Field(1.0, gt=0, description="At which answers are sampled.")
    clip: Fixed[float] = Field(
        0.2, gt=0, lt=1, description="How far an answer's tokens may become likelier at once (ε)."
    )
    beta: Fixed[float] = Field(
        0.0, ge=0, description="Weight of the KL divergence from the start. 0: none, and no reference."
    )
    steps_per_rollout: Fixed[PositiveInt] = Field(1, description="Optimizer steps that use the same answers (μ).")
    scale_by_deviation: Fixed[bool] = Field(
        True, description="Divide by the group's standard deviation. false: only subtract the mean (Liu et al., 2025)."
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
"""By `objective.type`."""
