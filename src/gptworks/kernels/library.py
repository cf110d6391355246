"""The library of this folder's C++: taken from the wheel or compiled on this machine, kept, verified and loaded.

A wheel has a library for each instruction level; the best for this processor is loaded without a compiler. Without such
a library, or if GPTWORKS_NATIVE_MARCH names a processor, the compiler builds one.

A kept library is code that this process will run. It is therefore read only from a folder that belongs to this user and
that nobody else may write, and only if its checksum matches. If the user's cache cannot be used, the library is kept
until the machine restarts in this user's folder in $XDG_RUNTIME_DIR or the folder for temporary files; if neither can
be used, in a temporary folder of this process. One process compiles under a lock while others wait; it also removes
libraries unused for a long time.
"""

import atexit
import contextlib
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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gptworks.kernels.entries import Mismatch, declare
from gptworks.kernels.levels import LEVELS
from gptworks.machine import cpu_flags, cpu_identity, usable_cpus

_NAMES = ("products", "attention", "passes", "cached_attention", "step", "gemm", "optimizer")
SOURCES = tuple(Path(__file__).with_name(f"{name}.cpp") for name in _NAMES)
"""The C++ sources, the slowest to compile first; they include the headers of this folder."""

BUILT = Path(__file__).with_name("built")
"""The folder of a wheel's libraries: kernels-LEVEL-CHECKSUM.so."""

FLAGS = ("-O3", "-std=c++17", "-fno-schedule-insns", "-fPIC", "-pthread")
"""Compiler options. GCC on ARM needs `-fno-schedule-insns`: it otherwise loads so early that registers spill."""

ATTEMPTS: tuple[tuple[str, ...], ...] = (
    ("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), (),
)  # fmt: skip
"""Options tried in this order: older ARM compilers name this processor differently, and Apple's compiler lacks OpenMP.

With GCC's OpenMP the kernels share torch's threads. Without it, and always with clang, they start their own threads
(threads.h): clang's OpenMP next to torch's would crash the process on a Mac.
"""

MARCH = "GPTWORKS_NATIVE_MARCH"
"""Environment variable: build for this processor, such as haswell, instead of this machine's."""

AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
"""Processor features that AMX needs; the operating system must also permit AMX."""

_WITH_AMX = {None, "", "native", "sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d"}
"""Values of GPTWORKS_NATIVE_MARCH with AMX; other values mean a processor without it."""

_OLDER_NAMES = {"znver4": ("cooperlake",), "sapphirerapids": ("cooperlake",)}
"""Older processors with the same instructions for the kernels, for compilers that do not know the newer one."""


_NARROW = {"x86-64", "x86-64-v2", "core2", "nehalem", "westmere", "sandybridge", "ivybridge"}
"""Values of GPTWORKS_NATIVE_MARCH without AVX2."""


class Unavailable(Exception):
    """A backend cannot be used here. The message explains why; users see it if another backend is used instead."""


_lock = threading.Lock()
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """The loaded kernels."""

    functions: ctypes.CDLL
    sha256: str
    """The sha256 of the library's file."""
    origin: str
    """The library's source: `compiled here` or `from the package`."""
    folder: Path
    """The folder that holds the library; it belongs to this user."""
    has_amx: bool
    """Whether the library multiplies bf16 and int8 weights with AMX."""

    @property
    def has_wide_vectors(self) -> bool:
        """Whether the library computes with vectors of 32 bytes or more."""
        return bool(self._built_with & 6)

    @property
    def has_integer_products(self) -> bool:
        """Whether weights of 8 and 4 bits are multiplied as bytes, with two bytes per activation: AVX512_VNNI, or ARM's
        dot products."""
        return bool(self._built_with & 8)

    @property
    def has_bf16_products(self) -> bool:
        """Whether weights in bf16 are multiplied with activations rounded to bf16; else in float32."""
        return bool(self._built_with & 16)

    @property
    def instructions(self) -> str:
        """The common name of the widest instructions that the library uses."""
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
    """The kernels for this processor: from the package, the user's cache, or compiled now. Remembers failures.

    Raises:
        Unavailable: GPTWORKS_NATIVE is 0 or invalid; no library exists and no compiler works; or no folder can hold
            code to load.
    """
    with _lock:
        found = _library()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@functools.cache
def _library() -> Library | str:
    """The library, or the reason why it is unavailable."""
    if (wish := os.environ.get("GPTWORKS_NATIVE", "")) not in ("", "0", "1"):
        return f"GPTWORKS_NATIVE={wish!r} means nothing: set 0 to do without the C++, or leave it out."
    if wish == "0":
        return "GPTWORKS_NATIVE=0 is set."
    try:
        if (content := _from_package()) is not None:
            try:
                return _load(hashlib.sha256(content).hexdigest()[:16], lambda: content, "from the package")
            except Mismatch as error:
                _LOG.warning("the package's library is not of this version: %s. Install gptworks again.", error)
        compiler = _compiler()
        if compiler is None:
            return "there is no C++ compiler (g++ or clang++), and the package brings no library for this processor."
        return _load(_key(compiler), lambda: _compiled(compiler), "compiled here")
    except Unavailable as error:
        return str(error)
    except Mismatch as error:
        return f"the library does not fit this version of gptworks: {error}."
    except OSError as error:
        return f"{error.filename or 'the library'}: {error.strerror or error}."


@functools.cache
def training_library() -> Library | None:
    """The library for training and evaluation; None: torch computes both, because the library is unavailable (see
    `torch_trains_because`) or the processor's vectors have only 16 bytes."""
    try:
        found = library()
    except Unavailable:
        return None
    return found if found.has_wide_vectors else None


def trains_in_cpp() -> bool:
    """Whether training on this CPU will compute in C++: a forecast for plans that compiles and loads nothing.

    After a call of `library`, the answer is certain. Before, it is true with wide vectors and a compiler or built
    library, which is wrong if the compiler fails later.
    """
    if _library.cache_info().currsize:
        return training_library() is not None
    if os.environ.get("GPTWORKS_NATIVE", "") not in ("", "1"):
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
    """The reason why the C++ cannot be used for training; None: it is used, or torch is as fast here."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


def forget() -> None:
    """Forget the library, so that the next call searches again; for tests."""
    _library.cache_clear()
    training_library.cache_clear()


def attempts(compiler: str) -> tuple[tuple[str, ...], ...]:
    """The options to try with this compiler, in this order."""
    wanted = ATTEMPTS
    if march := os.environ.get(MARCH):
        names = (march, *_OLDER_NAMES.get(march, ()))
        wanted = tuple((f"-march={name}", *threads) for threads in (("-fopenmp",), ()) for name in names)
    if b"clang" in _version(compiler):
        wanted = tuple(options for options in wanted if "-fopenmp" not in options)
    return wanted


VERSION_SECONDS, COMPILE_SECONDS = 60, 1800
"""Time limits for a compiler to print its version, and to compile one source: minutes on slow processors."""


def _version(compiler: str) -> bytes:
    return _run([compiler, "--version"], VERSION_SECONDS).stdout


def _run(command: Sequence[str | Path], seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Run a compiler without standard input.

    Raises:
        Unavailable: the compiler exceeds the time limit.
    """
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{Path(command[0]).name} did not end within {seconds:g} seconds.") from None


def _from_package() -> bytes | None:
    """The package's library for this processor; None if missing or damaged, or if GPTWORKS_NATIVE_MARCH is set."""
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
            content = content or _kept(folder, key)
            if content is None:
                with _alone(folder):  # another process may have built the library meanwhile
                    content = _kept(folder, key) or make()
                    _keep(folder, key, content)
                    _prune(folder)
            file = _keep(folder, key, content)
            functions = ctypes.CDLL(str(file))
            declare(functions)
            for reason in reasons:
                _LOG.warning("the kernels are kept in %s: %s", folder, reason)
            has_amx = _may_have_amx() and bool(functions.gptworks_take_amx())
            return Library(functions, hashlib.sha256(content).hexdigest(), origin, folder, has_amx)
        except OSError as error:  # disk full, no permission, or a file system mounted noexec
            reasons.append(f"{there}: {error.strerror or error}")
    raise Unavailable(f"no folder can keep the kernels ({'; '.join(reasons)}).")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context that holds a folder's lock, for which other processes wait.

    Raises:
        OSError: the folder cannot be written to.
    """
    import filelock  # imported here: a wheel is built without filelock

    lock = filelock.FileLock(folder / "lock", mode=0o600)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _LOG.info("another process compiles the kernels: waiting for it")
        lock.acquire()
    except NotImplementedError:  # no locks on this file system: several may compile, and each writes whole files
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _may_have_amx() -> bool:
    return cpu_flags() >= AMX and os.environ.get(MARCH) in _WITH_AMX


def _key(compiler: str) -> str:
    """A build's key: a hash of source, options, compiler and processor."""
    machine = " ".join([platform.platform(), platform.processor(), cpu_identity(), *sorted(cpu_flags())])
    texts = (file.read_bytes() for source in SOURCES for file in (source, *sorted(source.parent.glob("*.h"))))
    parts = (*texts, _version(compiler), machine.encode(), repr((FLAGS, attempts(compiler))).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compiled(compiler: str) -> bytes:
    _LOG.info("compiling the C++ kernels for this processor: this happens once and takes some ten seconds")
    return build(compiler)


def build(compiler: str, options: tuple[tuple[str, ...], ...] | None = None) -> bytes:
    """The bytes of a newly built library. Sources compile in parallel, one per core.

    Args:
        options: compiler options to try, in this order; None: those of `attempts`.

    Raises:
        Unavailable: no attempt succeeds. OSError: every temporary folder may be written by other users, or the compiler
            cannot be run.
    """
    failed = ""
    with (
        tempfile.TemporaryDirectory(prefix="gptworks-building-") as temporary,
        ThreadPoolExecutor(usable_cpus()) as at_once,
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
    """The first error that a compiler prints, or None if it succeeds."""
    done = _run(command, COMPILE_SECONDS)
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").splitlines()
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    return next((line for line in lines if "error" in line), "no message")


# ------------------------------------------------------------------------------------------------------- where it is


def cache_folder() -> Path | None:
    """The cache folder for compiled kernels: gptworks/ in $XDG_CACHE_HOME or ~/.cache; None without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():  # the XDG specification requires absolute paths
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base) / "gptworks"


def _folders() -> Iterator[Path]:
    if (folder := cache_folder()) is not None:
        yield folder
    yield from runtime_folders()
    temporary = Path(tempfile.mkdtemp(prefix="gptworks-kernels-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    yield temporary


def runtime_folders() -> Iterator[Path]:
    """Folders in which this user's processes share kernels until a reboot; empty on systems without user ids."""
    if hasattr(os, "geteuid"):
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        if Path(base).is_absolute():
            yield Path(base) / "gptworks"
        yield Path(tempfile.gettempdir(), f"gptworks-{os.geteuid()}")


def _make_private(folder: Path) -> Path:
    """Make or check a folder that only this user may write; returns its resolved path, which no other user can replace.

    Raises:
        OSError: the folder cannot be made, belongs to another user, or has a parent that others may write.
    """
    if not hasattr(os, "geteuid"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    trusted = {os.geteuid(), 0, Path("/").stat().st_uid}  # in a container, root may have another user id
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.stat().st_uid not in trusted:  # root with another user's HOME must leave no files there
        raise OSError(None, f"another user owns {there}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_link, folder = folder.is_symlink(), folder.resolve()
    status = folder.stat(follow_symlinks=False)
    if is_link or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(None, "it is no folder of this user's")
    if status.st_mode & 0o022:
        folder.chmod(0o700)
    for parent in folder.parents:
        status = parent.stat()
        if status.st_uid not in trusted:
            raise OSError(None, f"another user owns {parent}")
        by_group = status.st_mode & 0o020 and not _is_own_group(status.st_gid)
        if (by_group or status.st_mode & 0o002) and not status.st_mode & stat.S_ISVTX:
            raise OSError(None, f"other users may write to {parent}")
    return folder


def _is_own_group(number: int) -> bool:
    """Whether only this user is in a group: many systems give each user a group of the same name."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _kept(folder: Path, key: str) -> bytes | None:
    """The bytes of a library built earlier for this key; None if missing or changed."""
    for file in folder.glob(f"kernels-{key}-*.so"):
        if (content := _trusted_bytes(file, _digest_in(file))) is not None:
            return content
    return None


def _digest_in(file: Path) -> str:
    """The checksum that a library's name ends with."""
    return file.stem.rpartition("-")[2]


def _trusted_bytes(file: Path, digest: str) -> bytes | None:
    """The file's bytes, or None unless only this user may write the file and its sha256 matches."""
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


def _keep(folder: Path, key: str, content: bytes) -> Path:
    """Write a library's file if missing or damaged, set its time of last use to now, and return its path."""
    digest = hashlib.sha256(content).hexdigest()
    file = folder / f"kernels-{key}-{digest}.so"
    if _trusted_bytes(file, digest) is None:
        _write(file, content)
    with contextlib.suppress(OSError):  # a read-only file system
        os.utime(file)
    return file


MOST_KEPT, UNUSED_DAYS = 12, 60
"""Largest number of libraries kept in a folder, and days after which an unused one is removed."""


def _prune(folder: Path) -> None:
    """Remove old libraries, those above the limit, and the temporary files of killed processes.

    Libraries used within the last hour stay: another process may be about to load one.
    """
    now = time.time()

    def age(file: Path) -> float:
        with contextlib.suppress(OSError):
            return now - file.stat(follow_symlinks=False).st_mtime
        return 0.0

    by_age = sorted((age(file), file) for file in folder.glob("kernels-*.so"))
    old = [(seconds, file) for seconds, file in by_age if seconds > UNUSED_DAYS * 86_400]
    torn = [(age(file), file) for file in folder.glob(".writing-*")]
    for seconds, file in (*old, *by_age[MOST_KEPT:], *torn):
        if seconds > 3_600:
            with contextlib.suppress(OSError):
                file.unlink()


def _write(file: Path, content: bytes) -> None:
    """Write or replace a file, which appears whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".writing-", delete=False) as aside:
        try:
            aside.write(content)
            aside.flush()
            Path(aside.name).chmod(0o700)
            Path(aside.name).replace(file)
        except BaseException:
            Path(aside.name).unlink(missing_ok=True)
            raise
