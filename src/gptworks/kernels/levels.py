"""Instruction levels of processors. A wheel has a library for each level of its architecture."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """An instruction level for which a library is built."""

    name: str
    options: tuple[str, ...]
    """Compiler options that produce code for this level."""
    flags: frozenset[str]
    """Features that a processor must have, by their names in Linux."""


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = ("-march=x86-64-v4", "-mavx512vnni")

LEVELS = {
    "x86_64": (
        Level("avx512bf16", (*_VNNI, "-mavx512bf16"), _V4 | {"avx512_vnni", "avx512_bf16"}),
        Level("avx512vnni", _VNNI, _V4 | {"avx512_vnni"}),
        Level("avx512", ("-march=x86-64-v4",), _V4),
        Level("avx2", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (
        Level("neondot", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
        Level("neon", ("-march=armv8-a",), frozenset({"asimd"})),
    ),
}
"""Instruction levels by `platform.machine()`, the best first. x86 has none below AVX2, since torch is faster there."""
