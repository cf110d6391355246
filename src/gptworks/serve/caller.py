"""Who sent a request, and what it has cost so far: for fair shares and for the log."""

from dataclasses import dataclass, field

from starlette.types import Scope

from gptworks.confined import Task

_IN_SCOPE = "gptworks.caller"


@dataclass(eq=False)
class Caller:
    """One request's sender."""

    client: str
    """An API key's digest, or an address."""
    n_prompts: int = 0
    """Prompts of this request that hold places."""
    n_tokens: int = 0
    """Tokens read and written for it."""
    tasks: set[Task] = field(default_factory=set)
    """What works on it in processes of their own; abandoned with the request."""

    def task(self) -> Task:
        """A task that is abandoned where the request ends early."""
        task = Task()
        self.tasks.add(task)
        return task

    def abandon(self) -> None:
        for task in self.tasks:
            task.abandon()


def introduce(scope: Scope, caller: Caller) -> None:
    """Let the routes know who calls."""
    scope[_IN_SCOPE] = caller


def caller_of(scope: Scope) -> Caller:
    caller: Caller = scope[_IN_SCOPE]
    return caller
