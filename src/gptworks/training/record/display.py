"""Shows the progress of a run: as a live line on a terminal, as plain lines elsewhere."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from gptworks.terminal import Console

PLAIN_LINE_SECONDS = 10.0
SLOW_SECONDS = 2.0
"""Seconds after which the progress line shows the current activity and its duration."""
LOSS_MEMORY = 0.95
"""Decay of the progress line's running mean of losses, which covers about 20 steps."""


class _Figures(ProgressColumn):
    """The column of the progress line with loss, speed and time left; updated between steps too."""

    max_refresh = None

    def __init__(self, display: "Display") -> None:
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(self._display.figures())


class Display:
    """Shows a run's progress and, above it, messages."""

    every_seconds = PLAIN_LINE_SECONDS
    """Seconds between progress lines, if the output is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._last_plain = 0.0
        self._validation = self._speed = ""
        self._loss, self._loss_weight = 0.0, 0.0
        self._end: float | None = None  # expected end of the run, as `time.monotonic()`
        self._doing, self._since = "first step", time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = (TextColumn("{task.fields[where]}"), BarColumn(bar_width=24), _Figures(self))
            self._progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=2)
            self._progress.add_task("train", total=1.0, where="step 0")
            self._progress.start()
        self._since = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def message(self, text: str) -> None:
        """Print a message, on a terminal above the progress line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """Print a progress line. Called only if the output is not a terminal."""
        self.message(text)

    def validation(self, step: int, loss: float, note: str) -> None:
        """Show the result of an evaluation."""
        self._validation = f"  val {loss:.4f}"
        self.message(f"step {step:>6,}  validation loss {loss:.4f}{note}")

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show a prompt and its continuation, with ▸ between them."""
        line = Text(f"step {step:>6,}  ")
        line.append(prompt, style="dim")
        line.append("▸", style="bold")
        line.append(text)
        self.console.print(line, highlight=False, soft_wrap=True)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Return a context in which the progress line shows the activity `what` after `SLOW_SECONDS`."""
        self._doing, self._since = what, time.monotonic()
        try:
            yield
        finally:
            self._doing, self._since = "this step", time.monotonic()

    def step(self, where: str, share_done: float, loss: float, eta: float) -> None:
        """Show the progress after a step.

        Args:
            where: the progress as text: "step 40/500", or "step 40  1:05 of 3:30" if time limits the run.
            share_done: the fraction of the run that is done, from 0 to 1.
            loss: this step's loss; the progress line shows a running mean.
            eta: seconds until the end of the run.
        """
        if math.isfinite(loss):
            self._loss = LOSS_MEMORY * self._loss + (1 - LOSS_MEMORY) * loss
            self._loss_weight = LOSS_MEMORY * self._loss_weight + 1 - LOSS_MEMORY
        now = time.monotonic()
        self._end, self._doing, self._since = now + eta, "this step", now
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=share_done, where=where)
        elif now - self._last_plain >= self.every_seconds or share_done >= 1:
            self._last_plain = now
            self.line(f"{where}  {self.figures()}")

    def speed(self, tokens_per_second: float, utilization: float | None, note: str = "") -> None:
        """Set the speed to show, measured over several steps; `note` is shown before it."""
        used = "" if utilization is None else f", {utilization:.0%} MFU"
        self._speed = f"{note}  {tokens_per_second:,.0f} tokens/s{used}"

    def figures(self) -> str:
        """Return the right part of the progress line: loss, speed and the time left."""
        now = time.monotonic()
        waiting = f"{self._doing} {clock(now - self._since)}" if now - self._since >= SLOW_SECONDS else ""
        if self._end is None:
            return waiting or self._doing
        loss = f"loss {self._loss / self._loss_weight:.4f}" if self._loss_weight else "loss not finite"
        left = f"{clock(self._end - now)} left" + (f"  {waiting}" if waiting else "")
        return f"{loss}{self._validation}{self._speed}  {left}"


def clock(seconds: float) -> str:
    """Format a duration as 4:05 or 2:03:11."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
