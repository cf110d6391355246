"""Settings of training."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gptworks.choices import DeviceName, PrecisionName
from gptworks.config.base import Count, Fraction, Free, Measured, PositiveInt, Steering, derived
from gptworks.config.optimizers import OptimizerSettings

EVALUATED_TOKENS = 2**17
"""Maximum number of tokens that an evaluation reads by default."""

HELD_OUT_TOKENS = 96
"""Maximum length in tokens of the prompt from a held-out text; see `TrainConfig.held_out_tokens`."""


class TrainConfig(OptimizerSettings):
    """Settings of one training run.

    Defaults of the optimizer, learning rate, weight decay, future weights, length and warmup, and of the intervals
    between evaluations, samples and checkpoints, depend on the rest of the recipe (`gptworks.config.defaults`).
    """

    removed: ClassVar[Mapping[str, Any]] = {
        "average_last": 0.0, "decay_shape": "linear", "untie_after_steps": 0,
    }  # fmt: skip

    schedule: Steering[Literal["cosine", "wsd", "constant"]] = Field(
        "wsd",
        description="Learning rate after warmup. cosine: to the end of the run (Loshchilov & Hutter, 2017). wsd: "
        "constant, then decay (Hu et al., 2024).",
    )
    warmup_steps: Steering[Count] = Field(
        0, description="Optimizer steps of linear warmup. Default: a fiftieth of max_steps, at most 1,000."
    )
    decay_fraction: Steering[float] = Field(0.6, gt=0, le=1, description="wsd: last share of the run, which decays.")
    final_rate_fraction: Steering[float] = Field(0.0, ge=0, le=1, description="Last rate as a fraction of the peak.")

    ema_decay: Steering[Fraction] = Field(
        0.0, description="Decay of the moving average of the weights, which is evaluated and published. 0: none."
    )

    precision: Free[PrecisionName] = Field(
        "auto",
        description="auto: bf16 autocast if the hardware multiplies bf16 natively, else fp16 autocast on a CUDA GPU, "
        "and fp32 elsewhere.",
    )
    device: Free[DeviceName] = Field("auto", description="auto: CUDA, else MPS, else the CPU.")
    threads: Free[PositiveInt | None] = Field(
        None,
        le=1024,
        description="CPU threads of each process. null: OMP_NUM_THREADS, else one per core; for one process, less the "
        "cores that other programs keep busy when the run starts, since all threads wait for the slowest.",
    )

    log_every: Free[PositiveInt] = Field(10, description="Steps between training records in metrics.jsonl.")
    loggers: Free[tuple[Literal["tensorboard", "wandb"], ...]] = Field(
        (), description="Programs that also get the records of metrics.jsonl; each needs the extra of its name."
    )
    evaluate_every: Free[PositiveInt] = Field(
        250, description="Steps between evaluations. Default: a fifth of `max_steps`, at most 250."
    )
    evaluate_sequences: Measured[Count | None] = Field(
        None,
        description="Validation samples per evaluation, evenly spaced: windows of text, rows of conversations, pairs "
        f"or prompts. 0: all. null: as many as hold {EVALUATED_TOKENS:,} tokens at the full context, or all if there "
        "are fewer.",
    )
    checkpoint_every: Free[PositiveInt] = Field(
        250,
        description="Steps between checkpoints with optimizer state. A best one in between has only weights. Default: "
        "a quarter of `max_steps`, at most 250.",
    )
    keep_checkpoints: Free[PositiveInt] = Field(2, description="Newest checkpoints to keep; the best is kept too.")
    keep_every: Free[Count] = Field(
        0,
        description="Also keep checkpoints with optimizer state every this many steps, and weights of step 0. 0: none.",
    )
    sample_every: Free[Count] = Field(
        0,
        description="Steps between samples. 0: none. Default: a quarter of `max_steps`, at most 1,000; none for "
        "conversations.",
    )
    sample_held_out: Free[int] = Field(
        0,
        ge=0,
        le=100,
        description="Samples that continue this many held-out texts, chosen evenly spaced before training: beginnings "
        "of documents, places inside them if too few are long, or conversations up to an answer. They come before "
        "those of sample_prompts.",
    )
    sample_prompts: Free[tuple[str, ...]] = Field(
        default_factory=derived("sample_held_out", lambda n: () if n else ("",)),
        max_length=1000,
        description="Prompts of samples. Default: an empty one, or none with sample_held_out.",
    )
    sample_tokens: Free[PositiveInt] = Field(100, le=1 << 22, description="Length of a sample in tokens.")

    early_stopping_patience: Free[PositiveInt | None] = Field(
        None, description="Evaluations without improvement after which the run ends. None: it does not."
    )
    spike_deviations: Steering[float] = Field(
        0.0,
        ge=0,
        description="Skip a step if its gradient norm's logarithm is this many standard deviations above the run's "
        "mean. 0: never.",
    )
    max_skipped_steps: Free[PositiveInt] = Field(
        10, description="Skipped steps in a row after which the run ends or goes back."
    )
    max_rollbacks: Steering[Count] = Field(
        0,
        description="How often a run may go back to its last checkpoint and continue after the batches that broke it.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is not less than max_steps={self.max_steps}: reduce it")
        return self

    def is_whole_step(self, step: int) -> bool:
        """Return whether step `step`, counted from 0, has the same batch shape and cost as the run's last steps."""
        last_change = max((until for until, _ in (*self.smaller_batches, *self.shorter_contexts)), default=0)
        return step >= last_change

    def n_evaluated(self, n_there: int, context_length: int) -> int:
        """Return how many of `n_there` validation sequences an evaluation reads; 0 if it reads all."""
        wanted = self.evaluate_sequences
        if wanted is None:
            wanted = max(1, EVALUATED_TOKENS // context_length)
        return 0 if wanted >= n_there else wanted

    def held_out_tokens(self, context_length: int) -> int:
        """Return the maximum length in tokens of a held-out text's prompt: 96, or a quarter of the context if that is
        less."""
        return max(1, min(HELD_OUT_TOKENS, context_length // 4))

    @property
    def offered_prompts(self) -> list[str]:
        """The first six of `sample_prompts` with 1 to 400 characters, to suggest on web pages.

        Beginnings of held-out documents are not suggested: readers of a page may not be allowed to read the data.
        """
        return [prompt for prompt in self.sample_prompts if 0 < len(prompt) <= 400][:6]

    @property
    def averages(self) -> bool:
        """Whether the run evaluates and publishes an average of the weights."""
        return self.ema_decay > 0
