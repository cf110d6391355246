"""The C++ of this folder as one library: from the wheel or compiled by the machine's compiler, kept, verified, loaded.

A wheel carries a library for each instruction level that the C++ distinguishes; the best for this processor is taken
without a compiler. Elsewhere, and where GPTWORKS_NATIVE_MARCH names a processor, the compiler builds one.

What is kept is code that this process will run. So it is read only from a folder that belongs to this user and that
nobody else may write, and only if its bytes are those that were built. Where the user's cache cannot be used, the
library lives in a temporary folder of this process.
"""

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gptworks.machine import cpu_flags
from gptworks.native.levels import LEVELS

SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cpp") for name in ("step", "optimizer", "attention", "passes", "gemm")
)
"""What is compiled; the headers beside them are part of it."""

BUILT = Path(__file__).with_name("built")
"""What a wheel carries: kernels-LEVEL-CHECKSUM.so."""

FLAGS = ("-O3", "-std=c++17", "-fno-schedule-insns", "-fPIC", "-pthread", "-w")
"""On ARM GCC would load so far ahead that sums no longer fit in registers; on x86 it does not."""

ATTEMPTS: tuple[tuple[str, ...], ...] = (
    ("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), (),
)  # fmt: skip
"""Tried in this order: older compilers for ARM have another name for this processor, and Apple's has no OpenMP.

With GCC's OpenMP the kernels share torch's threads. Without it they have threads of their own (threads.h), as they
always do from clang: its OpenMP would stand beside torch's, which on a Mac ends the process.
"""

MARCH = "GPTWORKS_NATIVE_MARCH"
"""Environment variable: build for this processor, such as haswell, instead of for the one that is here."""

AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
"""The features of a processor with which it is taken, if the system grants it."""

_WITH_AMX = {None, "", "native", "sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d"}
"""Values of GPTWORKS_NATIVE_MARCH: another one stands for a processor without."""

_OLDER_NAMES = {"znver4": ("cooperlake",), "sapphirerapids": ("cooperlake",)}
"""For compilers that do not know a processor yet: one with the instructions that the kernels use."""


_NARROW = {"x86-64", "x86-64-v2", "core2", "nehalem", "westmere", "sandybridge", "ivybridge"}
"""Values of GPTWORKS_NATIVE_MARCH without AVX2."""


class Unavailable(Exception):
    """Why a backend cannot serve here. A user sees it where another is taken instead."""


_lock = threading.Lock()
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """The loaded kernels."""

    functions: ctypes.CDLL
    sha256: str
    """Of the file."""
    origin: str
    """`compiled here` or `from the package`."""
    has_amx: bool
    """Whether it multiplies weights in bf16 and int8 with AMX."""

    @property
    def has_wide_vectors(self) -> bool:
        """Whether it computes with vectors of 32 bytes or more."""
        return bool(self._built_with & 6)

    @property
    def has_integer_products(self) -> bool:
        """Whether weights of 8 and 4 bits are multiplied as bytes, by which activations have two: AVX512_VNNI, or ARM's
        dot products."""
        return bool(self._built_with & 8)

    @property
    def has_bf16_products(self) -> bool:
        """Whether weights in bf16 are multiplied with activations rounded to bf16; else in float32."""
        return bool(self._built_with & 16)

    @property
    def instructions(self) -> str:
        """The widest instructions that it uses, as a person would name them."""
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
        built: int = self.functions.gptworks_built_with()
        return built


def library() -> Library:
    """The kernels for this processor: from the package, the user's cache, or compiled now. A failure is remembered by
    this process.

    Raises:
        Unavailable: GPTWORKS_NATIVE=0; nothing built, and no compiler or one that fails; or no folder from which code
            can be loaded.
    """
    with _lock:
        found = _library()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@functools.cache
def _library() -> Library | str:
    """The library, or why there is none."""
    if os.environ.get("GPTWORKS_NATIVE") == "0":
        return "GPTWORKS_NATIVE=0 is set."
    try:
        if (content := _from_package()) is not None:
            return _load(hashlib.sha256(content).hexdigest()[:16], lambda: content, "from the package")
        compiler = _compiler()
        if compiler is None:
            return "there is no C++ compiler (g++ or clang++), and the package brings no library for this processor."
        return _load(_key(compiler), lambda: _compiled(compiler), "compiled here")
    except Unavailable as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or 'the library'}: {error.strerror or error}."


@functools.cache
def training_library() -> Library | None:
    """The library for what the model computes in training and evaluation; None: torch computes it, because there is no
    library (see `torch_trains_because`), or the processor's vectors have 16 bytes."""
    try:
        found = library()
    except Unavailable:
        return None
    return found if found.has_wide_vectors else None


def trains_in_cpp() -> bool:
    """Whether training on this CPU will compute in C++, as far as that is known without compiling or loading anything:
    a plan asks. After `library` has been called, what it found; before, whether there is a compiler or a built library,
    and whether the processor has wide vectors. A compiler that fails later makes the difference."""
    if _library.cache_info().currsize:
        return training_library() is not None
    if os.environ.get("GPTWORKS_NATIVE") == "0":
        return False
    if (march := os.environ.get(MARCH)) is None:
        level = next((level for level in LEVELS.get(platform.machine(), ()) if level.flags <= cpu_flags()), None)
        is_built = level is not None and any(BUILT.glob(f"kernels-{level.name}-*.so"))
        is_wide = level is not None and "avx2" in level.flags
    else:
        is_built, is_wide = False, platform.machine() == "x86_64" and march not in _NARROW
    return is_wide and (is_built or _compiler() is not None)


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def torch_trains_because() -> str | None:
    """Why torch alone computes a training step on this CPU; None: the C++ does, or would be no faster."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


def forget() -> None:
    """Look for the library anew at the next call: for tests."""
    _library.cache_clear()
    training_library.cache_clear()


def attempts(compiler: str) -> tuple[tuple[str, ...], ...]:
    """The options that are tried with this compiler, in this order."""
    wanted = ATTEMPTS
    if march := os.environ.get(MARCH):
        names = (march, *_OLDER_NAMES.get(march, ()))
        wanted = tuple((f"-march={name}", *threads) for threads in (("-fopenmp",), ()) for name in names)
    if b"clang" in _version(compiler):
        wanted = tuple(options for options in wanted if "-fopenmp" not in options)
    return wanted


def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout


def _from_package() -> bytes | None:
    """The library that the package brings for this processor; None: it brings none, or another is asked for."""
    if os.environ.get(MARCH):
        return None
    known, flags = LEVELS.get(platform.machine(), ()), cpu_flags()
    level = next((level for level in known if level.flags <= flags), None)
    for file in BUILT.glob(f"kernels-{level.name}-*.so") if level else ():
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() == _digest_in(file):
            return content
        _LOG.warning("%s is damaged: its checksum differs. Install gptworks again.", file)
    return None


def _load(key: str, make: Callable[[], bytes], origin: str) -> Library:
    content: bytes | None = None
    reasons: list[str] = []
    for there in _folders():
        try:
            folder = _make_private(there)
            content = content or _kept(folder, key) or make()
            digest = hashlib.sha256(content).hexdigest()
            file = folder / f"kernels-{key}-{digest}.so"
            if _trusted_bytes(file, digest) is None:
                _write(file, content)
            functions = ctypes.CDLL(str(file))
            _declare(functions)
            for reason in reasons:
                _LOG.warning("the kernels are kept for this process alone: %s", reason)
            has_amx = _may_have_amx() and bool(functions.gptworks_take_amx())
            return Library(functions, digest, origin, has_amx)
        except OSError as error:  # no room, no permission, or a file system from which no code is run
            reasons.append(f"{there}: {error.strerror or error}")
    raise Unavailable(f"no folder can keep the kernels ({'; '.join(reasons)}).")


def _may_have_amx() -> bool:
    return cpu_flags() >= AMX and os.environ.get(MARCH) in _WITH_AMX


def _key(compiler: str) -> str:
    """What a build depends on: source, options, compiler and processor."""
    machine = " ".join([platform.platform(), platform.processor(), *sorted(cpu_flags())])
    texts = (file.read_bytes() for source in SOURCES for file in (source, *sorted(source.parent.glob("*.h"))))
    parts = (*texts, _version(compiler), machine.encode(), repr((FLAGS, attempts(compiler))).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compiled(compiler: str) -> bytes:
    names = ", ".join(source.name for source in SOURCES)
    _LOG.info("compiling %s for this processor, which is done once and takes some seconds", names)
    return build(compiler)


def build(compiler: str, options: tuple[tuple[str, ...], ...] | None = None) -> bytes:
    """Compile the sources, all at once as far as there are cores, and link them; the library's bytes.

    Args:
        options: the compiler's options to try, in this order; None: `attempts`.

    Raises:
        Unavailable: no attempt succeeds. OSError: there is no temporary folder that no other user may write, or the
            compiler cannot be run.
    """
    failed = ""
    with (
        tempfile.TemporaryDirectory(prefix="gptworks-building-") as temporary,
        ThreadPoolExecutor(os.cpu_count()) as at_once,
    ):
        folder = _make_private(Path(temporary))
        made = folder / "kernels.so"
        objects = [folder / f"{source.name}.o" for source in SOURCES]
        for attempt in attempts(compiler) if options is None else options:

            def run(*arguments: str | Path, options: tuple[str, ...] = attempt) -> str | None:
                return _error_of([compiler, *FLAGS, *options, *arguments])

            errors = at_once.map(lambda source, to: run("-c", source, "-o", to), SOURCES, objects)
            error = next(filter(None, list(errors)), None) or run("-shared", *objects, "-o", made)
            if error is None:
                return made.read_bytes()
            failed = error
    raise Unavailable(f"{Path(compiler).name} could not compile it ({failed}).")


def _error_of(command: Sequence[str | Path]) -> str | None:
    """Run a compiler; the first error that it prints, or None where it succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return next((line for line in done.stderr.splitlines() if "error" in line), "no message")


def _declare(functions: ctypes.CDLL) -> None:
    functions.gptworks_widest_panel.argtypes = [ctypes.c_int64]
    functions.gptworks_widest_panel.restype = ctypes.c_int64
    functions.gptworks_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    functions.gptworks_step.restype = None
    functions.gptworks_logits.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    functions.gptworks_logits.restype = None
    functions.gptworks_muon_updates.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
    functions.gptworks_muon_updates.restype = None
    for attention in (functions.gptworks_attention, functions.gptworks_attention_backward):
        attention.argtypes, attention.restype = [ctypes.c_void_p, ctypes.c_int], None
    number, pointer, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
    for name, arguments in (
        ("activate", [number] * 4 + [pointer] * 3),
        ("activate_backward", [number] * 4 + [pointer] * 5),
        ("norm", [number] * 7 + [real] * 2 + [pointer] * 8),
        ("norm_backward", [number] * 7 + [real] + [pointer] * 10),
        ("add", [number] * 4 + [real] + [pointer] * 3),
        ("rotate", [number] * 8 + [real] + [pointer] * 4),
        ("cross_entropy", [number] * 5 + [pointer] * 4),
        ("gemm", [number] * 4 + ([pointer] + [number] * 2) * 2 + [pointer] * 2 + [number]),
    ):
        function = getattr(functions, f"gptworks_{name}")
        function.argtypes, function.restype = arguments, None
    for name in ("built_with", "take_amx"):
        function = getattr(functions, f"gptworks_{name}")
        function.argtypes, function.restype = [], ctypes.c_int


# ------------------------------------------------------------------------------------------------------- where it is


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: gptworks/ below $XDG_CACHE_HOME or ~/.cache; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():  # so the specification
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base) / "gptworks"


def _folders() -> Iterator[Path]:
    if (folder := cache_folder()) is not None:
        yield folder
    temporary = Path(tempfile.mkdtemp(prefix="gptworks-kernels-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    yield temporary


def _make_private(folder: Path) -> Path:
    """Have a folder of this user's, in which nobody else may write; its path, in which nobody else may put another.

    Raises:
        OSError: it cannot be made, belongs to another user, or lies where others may replace it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return folder
    is_link, folder = folder.is_symlink(), folder.resolve()
    status = folder.stat(follow_symlinks=False)
    if is_link or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(None, "it is no folder of this user's")
    if status.st_mode & 0o022:
        folder.chmod(0o700)
    trusted = {os.geteuid(), 0, Path("/").stat().st_uid}  # in a container, root may have another number
    for parent in folder.parents:
        status = parent.stat()
        if status.st_uid not in trusted:
            raise OSError(None, f"another user owns {parent}")
        by_group = status.st_mode & 0o020 and not _is_own_group(status.st_gid)
        if (by_group or status.st_mode & 0o002) and not status.st_mode & stat.S_ISVTX:
            raise OSError(None, f"other users may write to {parent}")
    return folder


def _is_own_group(number: int) -> bool:
    """Whether a group is this user's alone: many systems give each user one of the same name."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _kept(folder: Path, key: str) -> bytes | None:
    """A library that was built for this key before and is as it was."""
    for file in folder.glob(f"kernels-{key}-*.so"):
        if (content := _trusted_bytes(file, _digest_in(file))) is not None:
            return content
    return None


def _digest_in(file: Path) -> str:
    """The checksum that a library's name ends with."""
    return file.stem.rpartition("-")[2]


def _trusted_bytes(file: Path, digest: str) -> bytes | None:
    """The file's bytes, if it is this user's alone to write and they have this sha256."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            mine = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
            if not stat.S_ISREG(status.st_mode) or file.is_symlink() or not mine:
                return None
            content = opened.read()
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == digest else None


def _write(file: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, in place of any that is there."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".writing-", delete=False) as aside:
        try:
            aside.write(content)
            aside.flush()
            Path(aside.name).chmod(0o700)
            Path(aside.name).replace(file)
        except BaseException:
            Path(aside.name).unlink(missing_ok=True)
            raise
