"""The two kinds of errors that a command reports to the user."""

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """The user's input cannot work. The message states the value, the rule and the fix. Exit code 2."""

    exit_code = 2


def not_installed(package: str, extra: str, what: str, advice: str = "") -> UserError:
    """The error of a package that is missing, with the command that installs it.

    Args:
        extra: gptworks' extra that installs it.
        what: the feature that needs it, such as "a sweep".
        advice: an alternative, as a sentence.
    """
    command = f"pip install 'gptworks[{extra}]', or in a clone of gptworks pip install '.[{extra}]'"
    return UserError(f"{what} needs {package}, which is not installed: {command}.{advice and ' ' + advice}")


class RunError(RuntimeError):
    """The input was valid but the work failed (a full disk, a diverging run). Exit code 1."""

    exit_code = 1


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or with these initials (`lr`: `learning_rate`); None if none is close."""
    names = list(known)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    matches += [one for one in names if name == "".join(word[:1] for word in one.split("_"))]
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = ".") -> str:
    """The end of a message on an unknown name: the nearest known name, or `otherwise` if none is close."""
    near = nearest(name, known)
    return f"; did you mean `{near}`?" if near else otherwise


def refuse_unused(because: str, **options: Any) -> None:
    """Refuse given options that would have no effect.

    Args:
        because: the reason, as it follows the option: `does nothing with --input`, `is for text: give --text FILE, or`.
        options: the values by parameter name; false or None means not given.

    Raises:
        UserError: an option was given; the message names it.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            end = "" if because.endswith(" or") else ":"
            raise UserError(f"--{name.replace('_', '-')} {because}{end} leave it out.")
