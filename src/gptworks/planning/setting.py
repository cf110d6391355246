"""The properties of a training step that decide its memory."""

from dataclasses import dataclass

from gptworks.config import ModelConfig, TrainConfig
from gptworks.config.objective import NEXT_TOKEN, ObjectiveSettings
from gptworks.planning.layout import ONE_DEVICE, Layout
from gptworks.planning.trained import Trained

ANSWERS_AT_ONCE = 32
"""Largest number of texts that an engine generates in one batch if its number of slots is not set."""

UNPACKED_ON_CPU, UNPACKED_ELSEWHERE = 2**18, 2**22
"""Number of weights to unpack at a time from a packed matrix: on a CPU, whose cache they fit into, and elsewhere."""


@dataclass(frozen=True)
class Setting:
    """The properties of a training step that decide its memory on one device."""

    model: ModelConfig
    micro_batch_size: int
    """Samples in one forward and backward pass on a device."""
    precision: str = "fp32"
    """Precision of matrix products: fp32, bf16 or fp16."""
    on_cpu: bool = True
    checkpointing: str = "none"
    accumulates: bool = False
    """Whether a step has several micro-batches, so that gradients are in memory during the forward pass."""
    optimizer: str = "adamw"
    optimizer_state: str = "fp32"
    decays_cautiously: bool = False
    shorter_lengths: tuple[int, ...] = ()
    """Row lengths in `train.shorter_contexts`; early steps cut each window into rows of these lengths."""
    n_future: int = 0
    """Number of tokens beyond the next that the loss covers."""
    averages: bool = False
    """Whether the run keeps an average of the weights."""
    saves: bool = False
    """Whether the run writes checkpoints, from a copy in host memory. If so, estimates cover the whole run with its
    start; if not, only a step."""
    starts_from: bool = False
    """Whether the run starts from another run's weights."""
    layout: Layout = ONE_DEVICE
    trained: Trained | None = None
    """The part of the model that is trained; None: the whole model."""
    objective: ObjectiveSettings = NEXT_TOKEN
    several_texts: bool = False
    """Whether a row may hold several texts, which a bias on the attention scores separates."""
    other_models_bytes: int = 0
    """Bytes of the objective's second model, a teacher or the starting model: its weights and rotary tables."""
    teacher_width: int = 0
    """Width of the teacher's features; 0: the same as the trained model's."""

    @staticmethod
    def of(
        model: ModelConfig, train: TrainConfig, precision: str, on_cpu: bool, trained: Trained | None = None
    ) -> "Setting":
        """Return the step on one device that a recipe's training settings describe, without checkpoints."""
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
