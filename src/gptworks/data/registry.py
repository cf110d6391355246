"""Tables that map each settings class to the class that these settings configure, so that a new source or filter needs
only its settings and one file."""

from importlib import import_module
from inspect import get_annotations
from pkgutil import iter_modules
from typing import Any, TypeVar, get_args

Kind = TypeVar("Kind")


def by_settings(package: str, base: type[Kind]) -> dict[type[Any], type[Kind]]:
    """Return a dict from each settings class to the subclass of `base` whose `settings` has this class as annotation.
    All modules of `package` are imported first."""
    for module in iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")
    found: dict[type[Any], type[Kind]] = {}
    left = base.__subclasses__()
    while left:
        one = left.pop()
        left += one.__subclasses__()
        settings = get_annotations(one).get("settings")
        found |= dict.fromkeys(get_args(settings) or [settings], one) if settings else {}
    return found
