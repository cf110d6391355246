"""How a run looks while it goes: a live line on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from gptworks.train.throughput import Pace

PLAIN_LINE_SECONDS = 10.0


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("figures", "")))


class Display:
    """Shows progress, and messages above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._last_plain = 0.0
        self._validation = ""

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = (TextColumn("step {task.fields[step]}"), BarColumn(bar_width=24), _Figures())
            self._progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
            self._progress.add_task("train", total=1.0, step="0", figures="")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def message(self, text: str) -> None:
        """Say something that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def validation(self, step: int, loss: float, note: str) -> None:
        """Say the result of an evaluation."""
        self._validation = f"  val {loss:.4f}"
        self.message(f"step {step:>6,}  validation loss {loss:.4f}{note}")

    def step(
        self,
        step: int,
        total_steps: int | None,
        progress: float,
        loss: float,
        pace: Pace,
        eta: float,
        note: str = "",
    ) -> None:
        """Show where the run is; `eta` is in seconds."""
        steps = f"{step:,}" + (f"/{total_steps:,}" if total_steps else "")
        used = "" if pace.utilization is None else f", {pace.utilization:.0%} of the matrix rate"
        speed = f"{pace.tokens_per_second:,.0f} tok/s{used}"
        figures = f"loss {loss:.4f}{self._validation}{note}  {speed}  {clock(eta)} left"
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=progress, step=steps, figures=figures)
        elif time.monotonic() - self._last_plain >= PLAIN_LINE_SECONDS or progress >= 1:
            self._last_plain = time.monotonic()
            self.message(f"step {steps}  {figures}")


def clock(seconds: float) -> str:
    """A duration as 4:05 or 2:03:11."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
