"""The two kinds of errors that commands report to the user."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """The user's input is invalid. The message states the value, the rule and the fix. A command exits with code 2."""

    exit_code = 2


def not_installed(package: str, extra: str, what: str, advice: str = "") -> UserError:
    """Return the error for a missing package; its message has the command that installs the package.

    Args:
        extra: the extra of gptworks that installs the package.
        what: the feature that needs the package, such as "a sweep".
        advice: a sentence with an alternative.
    """
    command = f"pip install 'gptworks[{extra}]', or in a clone of gptworks pip install '.[{extra}]'"
    return UserError(f"{what} needs {package}, which is not installed: {command}.{advice and ' ' + advice}")


@contextmanager
def importing(package: str, extra: str, what: str) -> Iterator[None]:
    """Raise the error of `not_installed` if an import in the `with` block fails."""
    try:
        yield
    except ImportError:
        raise not_installed(package, extra, what) from None


def reason_of(error: Exception, most: int = 300) -> str:
    """Return the message of a library's error on one line, `shortened`; the error's type if the message is empty."""
    return shortened(" ".join(str(error).split()), most) or type(error).__name__


class RunError(RuntimeError):
    """The input was valid but the work failed (a full disk, a diverging run). A command exits with code 1."""

    exit_code = 1


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, else one whose words have its letters as initials, else None."""
    names = list(known)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    matches += [one for one in names if name == "".join(word[:1] for word in one.split("_"))]
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = ".") -> str:
    """Return the end of a message about an unknown name: the nearest known name, or `otherwise` if none is close."""
    near = nearest(name, known)
    return f"; did you mean `{near}`?" if near else otherwise


def shortened(text: str, most: int = 100) -> str:
    """Return the text with "…" in place of everything after its first `most` characters."""
    return text if len(text) <= most else f"{text[:most]}…"


def refuse_unused(because: str, **options: Any) -> None:
    """Refuse options that were given but would have no effect.

    Args:
        because: text that follows the option's name: `does nothing with --input`, `is for text: give --text FILE, or`.
        options: the options' values by parameter name; False or None for an option that was not given.

    Raises:
        UserError: an option was given; the message names it.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            end = "" if because.endswith(" or") else ":"
            raise UserError(f"--{name.replace('_', '-')} {because}{end} leave it out.")
