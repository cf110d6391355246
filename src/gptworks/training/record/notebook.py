"""Shows a run in a notebook, as one output below the cell, which the run updates."""

import io
from collections import deque
from typing import Any

from gptworks.errors import shortened
from gptworks.pages.parts import printable
from gptworks.terminal import Console
from gptworks.training.record.display import Display

MOST_LINES = 30
"""Number of newest message lines shown; all figures are in the run folder."""


def in_notebook() -> bool:
    """Whether this process prints to a notebook."""
    return Console().is_jupyter


class NotebookDisplay(Display):
    """Shows the newest messages and, below them, the progress, in one output."""

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
