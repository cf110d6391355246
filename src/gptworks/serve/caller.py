"""The sender of a request and its costs so far, for fair shares and for the log."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gptworks.confined import Task


@dataclass(eq=False)
class Caller:
    """The sender of one request; `request.state.caller`."""

    client: str
    """An API key's digest, or an address."""
    n_texts: int = 0
    """Texts of this request that hold places: a choice of a prompt, or a text to embed."""
    works: bool = False
    """Whether it counts as work: its body is complete, and it is not a stream that only watches."""
    watches: bool = False
    is_page: bool = False
    """Whether a page sent it. A browser that closes a connection reads no more; its requests may be silent for long."""
    n_numbers: int = 0
    """Numbers of log-probabilities that its answer may have."""
    n_tokens: int = 0
    """Tokens read and written for it."""
    tasks: set[Task] = field(default_factory=set)
    """Its work in other processes; abandoned with the request."""
    on_leave: list[Callable[[], None]] = field(default_factory=list)
    """Called when the request is answered or its client has gone."""

    def task(self) -> Task:
        """A new task, abandoned if the request ends early."""
        task = Task()
        self.tasks.add(task)
        return task

    def abandon(self) -> None:
        for task in self.tasks:
            task.abandon()
