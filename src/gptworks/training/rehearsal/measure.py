"""Measures memory and speed of real training steps, of a run or of a new model.

A new process measures the memory of a new model:

python -m gptworks.training.rehearsal.measure keep|return < rehearsal.json
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch

from gptworks.config import ModelConfig
from gptworks.device import keep_freed_memory, peak_growth_bytes, reset_peak, return_freed_memory, synchronize
from gptworks.errors import RunError
from gptworks.planning.run import Measured
from gptworks.training.record.card import MemoryPeaks
from gptworks.training.rehearsal.new_process import ProcessFailed, answer, ask
from gptworks.training.rehearsal.trace import LiveBytes, Rehearsal, take
from gptworks.training.setup import PreparedRun

SPEED_SECONDS, SPEED_STEPS = 2.0, 9
"""Maximum seconds and maximum number of steps of `measure_speed`, which measures at least one step."""


def measure_step(rehearsal: Rehearsal) -> Measured:
    """Measure a step's memory and speed in a new process, so that no other memory is counted.

    On a CPU, there are two processes. One measures memory and returns freed memory immediately, so that all resident
    memory is in use. The other measures speed and keeps freed memory, as `gptworks train` does.

    Raises:
        RunError: a process failed, perhaps for lack of memory.
    """
    as_trained = _in_new_process(rehearsal, "keep")
    if rehearsal.device != "cpu":
        return as_trained
    return replace(as_trained, peak_bytes=_in_new_process(rehearsal, "return").peak_bytes)


def measure_speed(rehearsal: Rehearsal) -> Measured:
    """Measure only the speed, in this process: the median over at most `SPEED_STEPS` steps within `SPEED_SECONDS`.
    From then on, this process keeps freed memory.

    Raises:
        RunError: a step failed.
    """
    keep_freed_memory()
    [seconds] = median_of_turns(zip(step_times(rehearsal), strict=True), 1, SPEED_STEPS, SPEED_SECONDS)
    return Measured(None, None, rehearsal.tokens_per_step / seconds)


def median_of_turns(turns: Iterable[tuple[float, ...]], least: int, most: int, seconds: float) -> list[float]:
    """Return the median of each column of `turns`, whose rows hold seconds. Read at least `least` rows and at most
    `most`, and stop before another row like the last row would raise the sum above `seconds`.

    Raises:
        RunError: a step failed.
    """
    taken = list[tuple[float, ...]]()
    try:
        for turn in turns:
            taken.append(turn)
            if len(taken) == most or (len(taken) >= least and sum(map(sum, taken)) + sum(turn) > seconds):
                break
    except RuntimeError as error:
        raise RunError(f"the measured step failed: {error}. Perhaps memory did not suffice.") from error
    return [median(column) for column in zip(*taken, strict=True)]


def _in_new_process(rehearsal: Rehearsal, freed_memory: str) -> Measured:
    try:
        return ask("measure", freed_memory, given=rehearsal, returns=Measured)
    except ProcessFailed as failed:
        raise RunError(f"the measured step failed: {failed}. Perhaps memory did not suffice.") from None


def _measure(rehearsal: Rehearsal) -> Measured:
    model, device = rehearsal.model, torch.device(rehearsal.device)
    plain = Rehearsal(_small(model), rehearsal.train, rehearsal.device, rehearsal.precision)
    next(step_times(plain))  # load torch's code before memory is measured
    before = reset_peak(device)
    seconds = next(step_times(rehearsal))
    peak = peak_growth_bytes(device, before) or 0
    kept = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak
    return Measured(peak, kept, rehearsal.tokens_per_step / seconds)


WARM_FIELDS = (
    "norm", "norm_bias", "norm_placement", "mlp", "mlp_bias", "position", "qk_norm", "attention_bias",
    "attention_softcap", "logit_softcap", "tie_embeddings", "n_future_tokens", "n_experts", "n_experts_per_token",
    "dropout_embedding", "dropout_attention", "dropout_residual", "dropout_mlp",
)  # fmt: skip
"""Model settings that determine which kernels run and that are valid at any model size."""


def _small(model: ModelConfig) -> ModelConfig:
    """Return a model of one narrow layer that loads the same code as `model`. It has defaults for settings outside
    `WARM_FIELDS`, because some, such as gates, would need more layers or channels."""
    kept = {name: getattr(model, name) for name in WARM_FIELDS}
    shared = {"d_ff_shared": 64} if model.d_ff_shared else {}
    return ModelConfig(vocab_size=64, context_length=64, n_layers=1, d_model=64, n_heads=2, d_ff=64, **kept, **shared)


def step_times(rehearsal: Rehearsal, clock: Callable[[], float] = time.perf_counter) -> Iterator[float]:
    """Run training steps; yield the seconds of each, except the first, which creates the optimizer's state."""
    model, train, device = rehearsal.model, rehearsal.train, torch.device(rehearsal.device)
    step = rehearsal.new_step()
    tokens = torch.randint(model.vocab_size, (train.batch_size, rehearsal.row_length), device=device)
    batch = rehearsal.batch(tokens)
    take(step, train, batch)
    synchronize(device)
    while True:
        started = clock()
        take(step, train, batch)
        synchronize(device)
        yield clock() - started


class StepMemory:
    """Counts the memory of tensors during one step of a run.

    Counting takes some hundredths of a second and changes no result.
    """

    def __init__(self, setup: PreparedRun) -> None:
        """Start to measure the growth of the process's memory. The model must not be built yet."""
        self._setup, self._n_whole = setup, 0
        self._counts = setup.device.type == "cpu" and setup.ranks.size == 1 and setup.recipe.train.compile != "block"
        self._before_bytes = reset_peak(setup.device)
        self.peak_bytes: int | None = None
        """Peak memory of tensors in the counted step. None before that step, and always on GPUs, on several ranks, or
        with compiled blocks."""

    @contextmanager
    def counted(self, is_whole: bool) -> Iterator[None]:
        """Return a context in which to run a step. It counts memory if this is the second whole step, when the
        optimizer has its state.

        Args:
            is_whole: whether the step's batch and rows have the sizes that the plan assumes.
        """
        self._n_whole += is_whole
        if not (self._counts and is_whole and self._n_whole == 2):
            yield
            return
        with LiveBytes() as held:
            yield
        self.peak_bytes = held.found_bytes + held.peak_bytes

    def peaks(self, copied_bytes: int) -> MemoryPeaks:
        """Return the run's planned and measured peak memory.

        `copied_bytes` is the size of the largest copy that was made for a checkpoint.
        """
        setup, step_bytes = self._setup, self.peak_bytes
        grown_bytes = peak_growth_bytes(setup.device, self._before_bytes) or None
        if setup.device.type == "cuda":  # only tensors increase GPU memory
            step_bytes, grown_bytes = grown_bytes, None
        elif step_bytes is not None:
            step_bytes += copied_bytes
        assert setup.need is not None, "a run that ends was planned"
        return MemoryPeaks(setup.need.peak.total_bytes, step_bytes, grown_bytes)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep_freed_memory()
    else:
        return_freed_memory()
    answer(Rehearsal, _measure)
