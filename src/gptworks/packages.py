"""Sub-packages that are functions too: `gptworks.train(recipe)` beside `from gptworks.train.loop import Run`.

Importing `gptworks.train.loop` sets `gptworks.train` to the sub-package, over any function of that name, so the
sub-package itself must be what is called.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that, when called, calls a function of `gptworks.interface`, which is imported by then."""

    _home: str

    @property
    def __wrapped__(self) -> Any:
        """The function; `inspect.signature`, and so help in a notebook, follows it."""
        return getattr(import_module(self._home), self.__name__.rpartition(".")[2])

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.__wrapped__(*arguments, **options)


def make_callable(package: str, home: str) -> None:
    """Let a call of the package be one of the function with its last name, in the module `home`."""
    module = sys.modules[package]
    module.__class__ = _CallablePackage
    module._home = home  # type: ignore[attr-defined]
