"""Hooks on a model's modules that act only in the thread that sets them; other threads may use the model meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from gptworks.model.gpt import GPT

Check = Callable[[], None]
"""A function to call before each block and each part of long work; it raises an exception to stop the work."""


def never() -> None:
    """A `Check` that never stops the work."""


@contextmanager
def stoppable(model: GPT, check: Check) -> Iterator[None]:
    """Within the context, call `check` before each block that this thread computes."""
    with ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(before(block, lambda *_: check()))
        yield


def before(module: nn.Module, call: Callable[[Any, tuple[Any, ...]], None]) -> AbstractContextManager[None]:
    """Return a context in which `call(module, inputs)` runs each time before `module` is computed."""
    return _hooked(module.register_forward_pre_hook, call)


def after(module: nn.Module, call: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Return a context in which `call(output)` runs each time after `module` is computed."""
    return _hooked(module.register_forward_hook, lambda of, inputs, output: call(output))


@contextmanager
def _hooked(register: Callable[..., Any], call: Callable[..., None]) -> Iterator[None]:
    thread = threading.get_ident()

    def hook(*arguments: Any) -> None:
        if threading.get_ident() == thread:
            call(*arguments)

    with register(hook):
        yield
