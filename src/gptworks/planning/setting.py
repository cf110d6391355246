"""The properties of a training step that decide its memory."""

from dataclasses import dataclass

from gptworks.config import ModelConfig, TrainConfig
from gptworks.config.objective import NEXT_TOKEN, ObjectiveSettings
from gptworks.planning.layout import ONE_DEVICE, Layout
from gptworks.planning.trained import Trained

ANSWERS_AT_ONCE = 32
"""Number of texts generated at once if none is given."""

UNPACKED_ON_CPU, UNPACKED_ELSEWHERE = 2**18, 2**22
"""Number of weights that are unpacked at once: on a CPU, they are used while they are in its cache."""


@dataclass(frozen=True)
class Setting:
    """The properties of a training step that decide its memory on one device."""

    model: ModelConfig
    micro_batch_size: int
    """Sequences on one device at a time."""
    precision: str = "fp32"
    """fp32, bf16 or fp16."""
    on_cpu: bool = True
    checkpointing: str = "none"
    accumulates: bool = False
    """Whether a step has several micro-batches, so that gradients are held during the forward pass."""
    optimizer: str = "adamw"
    optimizer_state: str = "fp32"
    decays_cautiously: bool = False
    shorter_lengths: tuple[int, ...] = ()
    """Lengths of rows into which some steps cut the context's windows."""
    n_future: int = 0
    """Number of tokens beyond the next that the loss has terms for."""
    averages: bool = False
    """Whether a moving average of the weights is kept."""
    saves: bool = False
    """Whether checkpoints are written during training, from a copy in the host's memory; then the plan includes the
    start of the run."""
    starts_from: bool = False
    """Whether the run starts from another run's weights."""
    layout: Layout = ONE_DEVICE
    trained: Trained | None = None
    """The part of the model that is trained; None: all."""
    objective: ObjectiveSettings = NEXT_TOKEN
    several_texts: bool = False
    """Whether rows hold texts one after the other, which a bias on the scores keeps apart."""
    other_models_bytes: int = 0
    """Weights and tables of other models that the objective reads: a teacher, or the starting model."""
    teacher_width: int = 0
    """Width of the teacher's features; 0: the model's width."""

    @staticmethod
    def of(
        model: ModelConfig, train: TrainConfig, precision: str, on_cpu: bool, trained: Trained | None = None
    ) -> "Setting":
        """The step that a recipe's training section asks for, on one device, with no checkpoint being written."""
        return Setting(
            model=model,
            micro_batch_size=train.micro_batch_size,
            precision=precision,
            on_cpu=on_cpu,
            checkpointing=train.activation_checkpointing,
            accumulates=train.accumulation_steps > 1,
            optimizer=train.optimizer,
            optimizer_state=train.optimizer_state,
            shorter_lengths=tuple(length for _, length in train.shorter_contexts),
            decays_cautiously=train.cautious_weight_decay and train.weight_decay > 0,
            n_future=len(train.future_weights),
            averages=train.averages,
            trained=trained,
        )
