"""Formats numbers for people to read."""

import math
from collections.abc import Mapping

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def readable(value: float, unit: str) -> str:
    """The value with four significant digits and a prefix, as in 1.423 GB; parameters and tokens are written out."""
    if unit in ("parameters", "tokens"):
        return f"{value:,.0f}"
    power = min((len(f"{value:.0f}") - 1) // 3, len(PREFIXES) - 1)
    return f"{value / 1000**power:.4g} {PREFIXES[power]}{unit}"


def significant(value: float, digits: int = 4) -> str:
    """A number with this many significant digits and separated thousands; with an exponent below 1e-5 and from 1e9."""
    if not math.isfinite(value):
        return f"{value}"
    size = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if not -5 <= size < 9:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def counted(n: int, noun: str) -> str:
    """The number with its noun, in the plural if necessary: 1 thread, 2 threads."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def epochs_words(epochs: Mapping[str, float]) -> str:
    """The number of times that each dataset is read: `web 0.72, code 3.1`."""
    return ", ".join(f"{name} {significant(n, 3)}" for name, n in epochs.items())
