"""Shows the progress of a run: as a live line on a terminal, as one output in a notebook, as plain lines elsewhere."""

import io
import math
import re
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gptworks.errors import shortened
from gptworks.pages.parts import printable
from gptworks.terminal import Console
from gptworks.units import readable

PLAIN_LINE_SECONDS, PLAIN_COLUMNS = 10.0, 100
SLOW_SECONDS = 2.0
"""Seconds after which the progress line shows the current activity and its duration."""
LOSS_MEMORY = 0.95
"""Decay of the progress line's running mean of losses, which covers about 20 steps."""
FORMS = range(8)
"""Forms of the progress line, from the longest, with all figures, to the shortest: step, loss and time left."""
SAMPLE_LINES = 6
"""Number of lines that are shown of a sample's prompt: the last ones."""
LEAST_BAR, MOST_BAR = 8, 40
"""Least and most columns of the bar on a terminal; the bar is left out if there is room for fewer."""
MOST_LINES = 30
"""Number of newest message lines shown in a notebook; all figures are in the run folder."""


class Display:
    """Shows a run's progress and, above it, messages.

    On a terminal, the progress has two lines, no wider than the terminal: first step, bar and time left, then the
    losses and the speed. Elsewhere, the progress is one plain line, printed again after `every_seconds`.
    """

    every_seconds = PLAIN_LINE_SECONDS
    """Seconds between progress lines, if the output is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._live: Live | None = None
        self._last_plain = 0.0
        self._where, self._share_done = "step 0", 0.0
        self._held_out: float | None = None
        self._speed: tuple[float, float | None, str] | None = None
        self._loss, self._loss_weight = 0.0, 0.0
        self._end: float | None = None  # expected end of the run, as `time.monotonic()`
        self._doing, self._since = "first step", time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, transient=True, refresh_per_second=2)
            self._live.start()
        self._since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def message(self, text: str) -> None:
        """Print a message. On a terminal, print it above the progress and break lines between words."""
        if self.console.is_terminal:
            text = _broken(text, self.console.width)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """Print a progress line. Called only if the output is not a terminal."""
        self.message(text)

    def validation(self, step: int, loss: float, note: str) -> None:
        """Show the result of an evaluation."""
        self._held_out = loss
        self.message(f"step {step:>6,}  validation loss {loss:.4f}{note}")

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show a prompt's last lines and its continuation, with ▸ between them."""
        line = Text(f"step {step:>6,}  ")
        end = "".join(prompt.splitlines(keepends=True)[-SAMPLE_LINES:])
        line.append(f"…\n{end}" if len(end) < len(prompt) else prompt, style="dim")
        line.append("▸", style="bold")
        line.append(text)
        self.console.print(line, highlight=False, soft_wrap=True)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Return a context in which the progress line shows the activity `what` after `SLOW_SECONDS`; before the first
        step, at once."""
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
        self._where, self._share_done = where, share_done
        if self._live is None and (now - self._last_plain >= self.every_seconds or share_done >= 1):
            self._last_plain = now
            self.line(self.line_of(PLAIN_COLUMNS))

    def speed(self, tokens_per_second: float, utilization: float | None, busiest_expert: str = "") -> None:
        """Set the speed to show, measured over several steps, and the busiest expert's load, such as 1.25×."""
        self._speed = tokens_per_second, utilization, busiest_expert

    def line_of(self, width: int) -> str:
        """Return the progress as one line: the first of `FORMS` that is at most `width` columns wide, or else the
        last, cut to `width`."""
        found = ""
        for form in FORMS:
            parts = [self._reached(form), *self._figures(form), self._left(), "" if form > 4 else self._waiting()]
            found = "  ".join(filter(None, parts))
            if len(found) <= width:
                return found
        return found[:width]

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the progress as two lines for a terminal."""
        width = options.max_width
        for form in FORMS:
            ends = [self._reached(form), "  ".join(filter(None, [self._left(), "" if form > 4 else self._waiting()]))]
            room = width - sum(map(len, ends)) - 2
            if room >= 0:
                break
        row = Table.grid(padding=(0, 1))
        bar = [ProgressBar(total=1.0, completed=self._share_done, width=min(room - 1, MOST_BAR))]
        row.add_row(ends[0], *(bar if room > LEAST_BAR else []), ends[1][: width - len(ends[0]) - 1])
        yield row
        figures = ("  ".join(filter(None, self._figures(form))) for form in FORMS)
        yield Text(next((one for one in figures if len(one) <= width), ""), no_wrap=True)

    def _reached(self, form: int) -> str:
        if form < 6:
            return self._where
        short = re.sub(r"\d+(,\d{3})+", lambda number: _brief(float(number[0].replace(",", ""))), self._where)
        return short if form == 6 else re.split("/|  ", short)[0]

    def _figures(self, form: int) -> tuple[str, ...]:
        """Return the losses and the speed."""
        if self._end is None:
            return ()
        loss = "loss not finite"
        if self._loss_weight:
            loss = f"loss {_loss(self._loss / self._loss_weight)}"
        if self._held_out is not None and form < 4:
            loss += f", held out {_loss(self._held_out)}"
        if self._speed is None or form > 4:
            return (loss,)
        rate, share, busiest = self._speed
        speed = f"{rate:,.{0 if rate >= 10 else 2}f} tokens a second" if form < 3 else f"{_brief(rate)} tokens/s"
        speed += f", {share:.0%} of full speed" if share is not None and form < 2 else ""
        return loss, f"busiest expert {busiest}" if busiest and form == 0 else "", speed

    def _left(self) -> str:
        return "" if self._end is None else f"{clock(self._end - time.monotonic())} left"

    def _waiting(self) -> str:
        """Return the current activity and its duration once it has taken `SLOW_SECONDS`. Until then, return the
        activity without its duration if the first step has not ended yet; otherwise, return an empty text."""
        waited = time.monotonic() - self._since
        if waited >= SLOW_SECONDS:
            return f"{self._doing} {clock(waited)}"
        return self._doing if self._end is None else ""


def in_notebook() -> bool:
    """Whether this process prints to a notebook."""
    return Console().is_jupyter


class NotebookDisplay(Display):
    """Shows the newest messages and, below them, the progress, in one output of a notebook's cell."""

    every_seconds = 1.0

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), force_jupyter=False))
        self._messages: deque[str] = deque(maxlen=MOST_LINES)
        self._output: Any = None

    def message(self, text: str) -> None:
        self._messages += text.splitlines()
        self.line("")

    def sample(self, step: int, prompt: str, text: str) -> None:
        line = f"step {step:>6,}  {prompt}▸{text}".replace("\n", "⏎")
        self.message(shortened(line))

    def line(self, text: str) -> None:
        from IPython.display import display

        shown = {"text/plain": printable("\n".join([*self._messages, text]).rstrip())}
        if self._output is None:
            self._output = display(shown, raw=True, display_id=True)
        else:
            self._output.update(shown, raw=True)

    def preparing(self, stage: str, done_bytes: int, total_bytes: int | None) -> None:
        """Show the progress of a stage of the data's preparation; without a total size, only the stage."""
        self.line(f"{stage}: {done_bytes / total_bytes:.0%}" if total_bytes else stage)


def _loss(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def _brief(number: float) -> str:
    return readable(number, "").replace(" ", "")


def _broken(text: str, width: int) -> str:
    """Return the text with lines of at most `width` columns, broken between words; a longer word is not broken."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]  # fmt: skip
    return "\n".join(lines)


def clock(seconds: float) -> str:
    """Format a duration as 4:05 or 2:03:11."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
