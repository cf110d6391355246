"""The properties of a training step that decide its memory."""

from dataclasses import dataclass

from gptworks.config import FreezeConfig, LoRAConfig, ModelConfig, TrainConfig
from gptworks.config.objective import NEXT_TOKEN, ObjectiveSettings
from gptworks.planning.layout import ONE_DEVICE, Layout, rank_config
from gptworks.planning.params import ParameterCount, Trained, count_parameters, trained

ANSWERS_AT_ONCE = 32
"""Largest number of texts that an engine generates in one batch if its number of slots is not set."""

PREFILL_TOKENS = 512
"""Default maximum of an engine's prompt tokens per step. It limits the memory of a long prompt, and the delay of other
texts."""

LEAST_CAPACITY = 256
LEAST_CAPACITY_CPU = 2048
"""Minimum capacity of an engine's slot, in tokens, if no capacity is set. Capacities are powers of two, so that slots
seldom grow. The minimum on a CPU may be large, because memory is committed only for pages in use."""


def slots_for(n_texts: int, longest_tokens: int, on_cpu: bool) -> tuple[int, int]:
    """Return the number of slots that an engine makes for texts of up to `longest_tokens` tokens, and the capacity of
    each in tokens, before the model's context limits it."""
    least = LEAST_CAPACITY_CPU if on_cpu else LEAST_CAPACITY
    return _power_of_two(min(n_texts, ANSWERS_AT_ONCE)), _power_of_two(max(least, longest_tokens))


def _power_of_two(n: int) -> int:
    """Return the smallest power of two ≥ n."""
    return 1 << max(0, n - 1).bit_length()


UNPACKED_ON_CPU, UNPACKED_ELSEWHERE = 2**18, 2**22
"""Number of weights to unpack at a time from a packed matrix, on a CPU (whose cache holds them) and elsewhere."""


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
    row_tokens: int | None = None
    """`train.row_tokens`; None if rows fill the context."""
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
    adapter: LoRAConfig | None = None
    freeze: FreezeConfig | None = None
    n_texts: int = 0
    """Number of texts that a rank generates together during the run."""
    text_tokens: int = 0
    """Maximum tokens of such a text with its prompt."""
    objective: ObjectiveSettings = NEXT_TOKEN
    several_texts: bool = False
    """Whether a row may hold several texts, which flash attention or a bias on the attention scores separates."""
    has_flash: bool = False
    """Whether torch has flash attention for the device."""
    has_fused: bool = True
    fuses_groups: bool = True
    """`has_fused`, `fuses_groups`: whether torch has fused attention for training on an accelerator, and for grouped
    queries; see `gptworks.model.cost.Shapes`."""
    other_models_bytes: int = 0
    """Bytes of the objective's second model, a teacher or the starting model: its weights and rotary tables."""
    teacher_width: int = 0
    """Width of the teacher's features; if 0, there is no teacher, or its width equals the trained model's."""

    @staticmethod
    def of(
        model: ModelConfig,
        train: TrainConfig,
        precision: str,
        on_cpu: bool,
        adapter: LoRAConfig | None = None,
        freeze: FreezeConfig | None = None,
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
            row_tokens=train.row_tokens,
            shorter_lengths=tuple(length for _, length in train.shorter_contexts),
            decays_cautiously=train.cautious_weight_decay and train.weight_decay > 0,
            n_future=len(train.future_weights),
            averages=train.averages,
            adapter=adapter,
            freeze=freeze,
        )

    @property
    def row_length(self) -> int:
        """Length of a training row in tokens, apart from `shorter_lengths`."""
        return min(self.row_tokens or self.model.context_length, self.model.context_length)

    @property
    def whole(self) -> tuple[ParameterCount, Trained]:
        """The parameters of the whole model, and its trained part."""
        return self._part(self.model)

    @property
    def of_rank(self) -> tuple[ParameterCount, Trained]:
        """The parameters of a tensor-parallel rank before FSDP shards them, and their trained part."""
        return self._part(self.rank_model)

    @property
    def rank_model(self) -> ModelConfig:
        """The configuration of a tensor-parallel rank's model."""
        return rank_config(self.model, self.layout.tensor_parallel)

    def _part(self, model: ModelConfig) -> tuple[ParameterCount, Trained]:
        return count_parameters(model), trained(model, self.adapter, self.freeze)
