"""Numbers for people: formatted, and read from what they type."""

import math
from collections.abc import Mapping

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def readable(value: float, unit: str) -> str:
    """Format a value with four significant digits and a prefix (1.423 GB); parameters and tokens get all digits."""
    if unit in ("parameters", "tokens"):
        return f"{value:,.0f}"
    power = min((len(f"{value:.0f}") - 1) // 3, len(PREFIXES) - 1)
    return f"{value / 1000**power:.4g} {PREFIXES[power]}{unit}"


def significant(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits. Magnitudes below 1e-5 or from 1e9 have an exponent, others have
    thousands separators."""
    if not math.isfinite(value):
        return f"{value}"
    size = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if not -5 <= size < 9:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def whole_number(text: str) -> int | None:
    """Return the whole number that a text of at most 18 ASCII digits states; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def counted(n: int, noun: str) -> str:
    """Format a number with its noun, in the plural if necessary: 1 thread, 2 threads."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def epochs_words(epochs: Mapping[str, float]) -> str:
    """Format the number of epochs of each dataset: `web 0.72, code 3.1`."""
    return ", ".join(f"{name} {significant(n, 3)}" for name, n in epochs.items())


def duration(seconds: float) -> str:
    """Format a duration, such as `45 s`, `12 min`, `3.4 h`, `12 days`, `1.5 years`."""
    year = 365.25 * 86_400
    for unit, size, least in (("years", year, 1), ("days", 86_400, 2), ("h", 3600, 2), ("min", 60, 2)):
        if seconds >= least * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"
