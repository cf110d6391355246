"""The C++ library of this folder: taken from the wheel or compiled on this machine, verified and loaded.

A wheel has a library for each instruction level; the best for this processor is loaded without a compiler. Without such
a library, or if GPTWORKS_NATIVE_MARCH names a processor, build.py compiles a library, and cache.py keeps it.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptworks.kernels import build, cache
from gptworks.kernels.build import LEVELS, MARCH, Level, Unavailable
from gptworks.kernels.entries import Mismatch, declare
from gptworks.machine import cpu_flags

BUILT = Path(__file__).with_name("built")
"""Folder in which a wheel has its libraries; each file is named kernels-LEVEL-CHECKSUM.so."""

AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
"""Processor features that AMX needs; the operating system must also permit AMX."""

_WITH_AMX = {None, "", "native", "sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d"}
"""Values of GPTWORKS_NATIVE_MARCH that allow AMX: processors with AMX, and values for this machine's processor."""

_NARROW = {"x86-64", "x86-64-v2", "core2", "nehalem", "westmere", "sandybridge", "ivybridge"}
"""Values of GPTWORKS_NATIVE_MARCH that name a processor without AVX2."""

_lock = threading.Lock()
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """The loaded C++ library."""

    functions: ctypes.CDLL
    origin: str
    """Where the library comes from: `compiled here` or `from the package`."""
    has_amx: bool
    """Whether the library multiplies bf16 and int8 weights with AMX."""

    @property
    def has_wide_vectors(self) -> bool:
        """Whether the library computes with vectors of 32 bytes or more."""
        return bool(self._built_with & 6)

    @property
    def has_integer_products(self) -> bool:
        """Whether AVX512_VNNI or ARM's dot products multiply int8 and int4 weights by activations of two bytes."""
        return bool(self._built_with & 8)

    @property
    def has_bf16_products(self) -> bool:
        """Whether bf16 weights are multiplied by activations rounded to bf16; if not, by float32 activations."""
        return bool(self._built_with & 16)

    @property
    def instructions(self) -> str:
        """Common name of the best instructions that the library uses, such as `AVX-512 with VNNI`."""
        built = self._built_with
        if not self.has_wide_vectors:
            if platform.machine() not in ("aarch64", "arm64"):
                return "16-byte vectors"
            return "NEON with dot products" if self.has_integer_products else "NEON"
        more = ["VNNI"] * self.has_integer_products + ["BF16"] * self.has_bf16_products + ["AMX"] * self.has_amx
        names = " and ".join(filter(None, (", ".join(more[:-1]), *more[-1:])))
        return ("AVX-512" if built & 2 else "AVX2") + (f" with {names}" if names else "")

    @functools.cached_property
    def _built_with(self) -> int:
        return int(self.functions.gptworks_built_with())


def library() -> Library:
    """Return the library for this processor: from the package, from a cache folder, or compiled now.

    Later calls return the same library, or raise the same error.

    Raises:
        Unavailable: GPTWORKS_NATIVE is 0 or invalid; the system is Windows; no library exists and no compiler works; or
            no folder can hold code to load.
    """
    with _lock:
        found = _library()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@functools.cache
def _library() -> Library | str:
    """Return the library, or the reason why it is unavailable."""
    if (wish := os.environ.get("GPTWORKS_NATIVE", "")) not in ("", "0", "1"):
        return f"GPTWORKS_NATIVE={wish!r} means nothing: set 0 to do without the C++, or leave it out."
    if wish == "0":
        return "GPTWORKS_NATIVE=0 is set."
    if sys.platform == "win32":
        return "the C++ kernels do not run on Windows; Linux in WSL 2 has them."
    missing = "there is no C++ compiler (g++ or clang++), and the package brings no library for this processor."
    try:
        if (content := _from_package()) is not None:
            try:
                return _load(hashlib.sha256(content).hexdigest()[:16], lambda: content, "from the package")
            except Mismatch as error:
                _LOG.warning("the package's library is not of this version: %s. Install gptworks again.", error)
            except Unavailable as error:  # it was built for a newer C library, or no folder can keep it
                _LOG.info("the package's library cannot be loaded: %s", missing := str(error))
        compiler = build.find_compiler()
        if compiler is None:
            return missing

        def compiled() -> bytes:
            _LOG.info("compiling the C++ kernels for this processor: this happens once and takes some ten seconds")
            return build.build(compiler)

        return _load(build.key(compiler), compiled, "compiled here")
    except Unavailable as error:
        return str(error)
    except Mismatch as error:
        return f"the library does not fit this version of gptworks: {error}."
    except OSError as error:
        return f"{error.filename or 'the library'}: {error.strerror or error}."


@functools.cache
def training_library() -> Library | None:
    """Return the library for training and evaluation, or None if torch must compute both.

    None: the library is unavailable (see `torch_trains_because`), or its vectors have only 16 bytes.
    """
    try:
        found = library()
    except Unavailable:
        return None
    return found if found.has_wide_vectors else None


def trains_in_cpp() -> bool:
    """Whether training on this CPU will use the C++, predicted for plans without compiling or loading the library.

    After a call of `library`, the answer is certain. Before, the answer is true for a processor with wide vectors if
    there is a compiler or a built library. This answer is wrong if the compiler later fails.
    """
    if _library.cache_info().currsize:
        return training_library() is not None
    if os.environ.get("GPTWORKS_NATIVE", "") not in ("", "1"):
        return False
    if (march := os.environ.get(MARCH)) is None:
        level = _level()
        is_built = level is not None and any(BUILT.glob(f"kernels-{level.name}-*.so"))
        is_wide = level is not None and "avx2" in level.flags
    else:
        is_built, is_wide = False, platform.machine() == "x86_64" and march not in _NARROW
    return is_wide and (is_built or build.find_compiler() is not None)


def torch_trains_because() -> str | None:
    """Return the reason why the library is unavailable; None if it is available, even if its vectors are too short."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


def forget() -> None:
    """Forget the library, so that the next call of `library` loads it again; for tests."""
    _library.cache_clear()
    training_library.cache_clear()


def _from_package() -> bytes | None:
    """Return the package's library for this processor, or None if it is missing or damaged, or `MARCH` is set."""
    if os.environ.get(MARCH):
        return None
    level = _level()
    for file in BUILT.glob(f"kernels-{level.name}-*.so") if level else ():
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() == cache.digest_in(file):
            return content
        _LOG.warning("%s is damaged: its checksum differs. Install gptworks again.", file)
    return None


def _level() -> Level | None:
    """Return the best instruction level in `LEVELS` that this processor supports; None if it supports no level."""
    return next((level for level in LEVELS.get(platform.machine(), ()) if level.flags <= cpu_flags()), None)


def _load(key: str, make: Callable[[], bytes], origin: str) -> Library:
    made: Callable[[], bytes] = functools.cache(make)
    reasons: list[str] = []
    for folder in cache.folders():
        try:
            file = cache.keep(folder, key, made)
            made = file.read_bytes  # for the next folder, if libraries cannot be loaded from this one
            functions = ctypes.CDLL(str(file))
            declare(functions)
            for reason in reasons:
                _LOG.warning("the kernels are kept in %s: %s", file.parent, reason)
            may_have_amx = cpu_flags() >= AMX and os.environ.get(MARCH) in _WITH_AMX
            return Library(functions, origin, has_amx=may_have_amx and bool(functions.gptworks_take_amx()))
        except OSError as error:  # disk full, no permission, or a file system mounted noexec
            reasons.append(f"{folder}: {error.strerror or error}")
    raise Unavailable(f"no folder can keep the kernels ({'; '.join(reasons)}).")
