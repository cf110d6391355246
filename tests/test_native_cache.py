"""The cache of compiled kernels: one compilation for all processes, never another user's folder, and old files
removed."""

import hashlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import commands
from commands import Process
from gptworks import machine
from gptworks.kernels import build as kernel_build
from gptworks.kernels import cache as kernel_cache
from gptworks.kernels import entries
from gptworks.kernels import library as native_library
from gptworks.kernels.build import Unavailable
from gptworks.kernels.library import library
from serving import until
from test_native_library import builds, built, fresh, loaded_file, temporary, works

assert built and builds and fresh and temporary  # fixtures

COMPILER = """#!{python}
import os, pathlib, shutil, sys, time
if "--version" in sys.argv:
    print("g++ (as if) 1.0")
    sys.exit()
out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
if "-shared" in sys.argv:
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}}\\n")
    time.sleep({seconds})
    shutil.copy({library!r}, out)
else:
    out.write_bytes(b"")
"""
"""A compiler that notes what it links, and gives what was linked before."""

LOADS = "from gptworks.kernels.library import library; print(library().functions._name)"


@pytest.fixture
def compiler(built: bytes, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only compiler on the path; yields the file in which it logs its calls."""
    yield fake_compiler(built, tmp_path_factory.mktemp("compiler"), monkeypatch, 0.5)


def fake_compiler(built: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Path:
    log, ready = folder / "log", folder / "ready.so"
    ready.write_bytes(built)
    program = folder / "g++"
    code = COMPILER.format(python=sys.executable, log=str(log), library=str(ready), seconds=seconds)
    program.write_text(code, encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("GPTWORKS_NATIVE_MARCH", raising=False)
    return log


def started(n: int, **environment: str) -> list[Process]:
    """Start n processes that load the kernels at the same time."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [commands.start("-c", LOADS, env=environment, **streams) for _ in range(n)]


def folders(processes: list[Process]) -> set[Path]:
    """Return the folders from which processes have loaded the kernels."""
    found = set()
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        found.add(Path(out.strip()).parent)
    return found


def n_compiled(log: Path) -> int:
    return len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else 0


# ------------------------------------------------------------------------------------------------- once for all


def test_processes_that_start_together_compile_once(fresh: Path, compiler: Path) -> None:
    assert folders(started(4)) == {fresh}
    assert n_compiled(compiler) == 1
    assert len(list(fresh.glob("kernels-*.so"))) == 1 and not list(fresh.glob(".writing-*"))


@pytest.mark.parametrize("runtime", [True, False])
def test_without_a_cache_the_processes_of_a_run_still_compile_once(
    fresh: Path, temporary: Path, compiler: Path, runtime: bool
) -> None:
    fresh.write_text("a file in its place", encoding="utf-8")
    environment = {"TMPDIR": str(temporary)} | ({"XDG_RUNTIME_DIR": str(temporary / "run")} if runtime else {})
    (temporary / "run").mkdir(mode=0o700)
    expected = temporary / "run" / "gptworks" if runtime else temporary / f"gptworks-{os.geteuid()}"
    assert folders(started(2, **environment)) == {expected} == folders(started(1, **environment))
    assert n_compiled(compiler) == 1
    assert expected.stat().st_mode & 0o777 == 0o700


def test_a_process_killed_while_compiling_blocks_no_other(
    built: bytes, fresh: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_compiler(built, tmp_path_factory.mktemp("slow"), monkeypatch, 600)
    [first] = started(1)
    until(lambda: n_compiled(log) == 1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    os.kill(int(log.read_text(encoding="utf-8")), signal.SIGKILL)
    assert not list(fresh.glob("kernels-*.so"))
    fake_compiler(built, log.parent, monkeypatch, 0)
    assert folders(started(1)) == {fresh} and n_compiled(log) == 2


def test_a_compiler_that_never_ends_is_given_up(
    built: bytes, fresh: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(built, tmp_path_factory.mktemp("slow"), monkeypatch, 600)
    monkeypatch.setattr(kernel_build, "COMPILE_SECONDS", 2)
    with pytest.raises(Unavailable, match=r"g\+\+ did not end within 2 seconds\."):
        library()


def test_a_compiler_that_is_killed_says_so(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\ncase $1 in --version) ;; *) kill -9 $$;; esac\n", encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")
    with pytest.raises(Unavailable, match=r"g\+\+ could not compile it \(ended by signal 9\)\."):
        library()


# --------------------------------------------------------------------------------------------------- other users


def test_nothing_is_left_in_another_users_home(
    builds: list[str], fresh: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under sudo, where HOME remains the calling user's."""
    home, stat = fresh.parent / "home", Path.stat
    home.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))

    def of_another(self: Path, **options: bool) -> os.stat_result:
        found = stat(self, **options)
        other = os.geteuid() + 1
        return os.stat_result([*found[:4], other, *found[5:]]) if self == home or home in self.parents else found

    monkeypatch.setattr(Path, "stat", of_another)
    assert works() and loaded_file().parent == temporary / f"gptworks-{os.geteuid()}"
    assert list(home.iterdir()) == []
    assert any(f"another user owns {home}" in line for line in caplog.messages)


def test_a_shared_folder_that_another_user_has_made_first_is_not_used(
    builds: list[str], fresh: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.write_text("a file in its place", encoding="utf-8")
    planted, stat = temporary / f"gptworks-{os.geteuid()}", Path.stat
    planted.mkdir(mode=0o777)

    def of_another(self: Path, **options: bool) -> os.stat_result:
        found = stat(self, **options)
        return os.stat_result([*found[:4], os.geteuid() + 1, *found[5:]]) if self == planted else found

    monkeypatch.setattr(Path, "stat", of_another)
    assert works() and loaded_file().parent.name.startswith("gptworks-kernels-")
    assert list(planted.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_home_for_real(fresh: Path, temporary: Path, tmp_path: Path, compiler: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    os.chown(home, 12345, 12345)
    temporary.chmod(0o1777)
    environment = {"HOME": str(home), "XDG_CACHE_HOME": "", "TMPDIR": str(temporary)}
    assert folders(started(1, **environment)) == {temporary / "gptworks-0"}
    assert list(home.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ pruning


def kept(folder: Path, days: float, name: str) -> Path:
    file = folder / name
    file.write_bytes(name.encode())
    os.utime(file, (time.time() - 86_400 * days,) * 2)
    return file


def test_what_was_not_used_for_long_or_is_too_much_is_removed(builds: list[str], fresh: Path) -> None:
    fresh.mkdir(mode=0o700)
    old = kept(fresh, 61, "kernels-a-b.so")
    recent = [kept(fresh, 2 + i, f"kernels-{i}-b.so") for i in range(20)]
    writing, torn = kept(fresh, 0, ".writing-now"), kept(fresh, 1, ".writing-torn")
    others = [kept(fresh, 400, "choice.json"), kept(fresh, 400, "kernels-notes.txt")]
    assert works()
    assert not old.exists() and not torn.exists() and writing.exists() and all(file.exists() for file in others)
    assert [file.exists() for file in recent] == [i < kernel_cache.MOST_KEPT - 1 for i in range(20)]
    assert len(list(fresh.glob("kernels-*.so"))) == kernel_cache.MOST_KEPT


def test_used_libraries_stay(builds: list[str], fresh: Path) -> None:
    """Loading counts as use; libraries that others used within the hour stay, whatever their total size."""
    assert works()
    [mine] = fresh.glob("kernels-*.so")
    os.utime(mine, (0, 0))
    native_library.forget()
    assert works() and time.time() - mine.stat().st_mtime < 3600 and len(builds) == 1
    loading = [kept(fresh, 0.01, f"kernels-{i}-b.so") for i in range(30)]
    kernel_cache._prune(fresh)
    assert mine.exists() and all(file.exists() for file in loading)


# ------------------------------------------------------------------------------------------------ what fits here


def test_a_library_of_another_version_is_refused(
    builds: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entries.layout() == library().functions.gptworks_layout().decode()
    native_library.forget()
    monkeypatch.setattr(entries, "FUNCTIONS", entries.FUNCTIONS[::-1])
    with pytest.raises(Unavailable, match=r"does not fit this version of gptworks: it has .*gelu gelu_tanh relu2 silu"):
        library()


def test_a_library_of_the_package_of_another_version_is_passed_over(
    builds: list[str], built: bytes, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """As after an update that left old files behind."""
    monkeypatch.delenv("GPTWORKS_NATIVE_MARCH", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native_library, "BUILT", tmp_path / "built")
    (tmp_path / "built").mkdir()
    old = built.replace(b"gelu_tanh\0", b"gelu_sinh\0")
    assert old != built
    for level in native_library.LEVELS["x86_64"]:
        (tmp_path / "built" / f"kernels-{level.name}-{hashlib.sha256(old).hexdigest()}.so").write_bytes(old)
    monkeypatch.setattr(native_library, "cpu_flags", lambda: native_library.LEVELS["x86_64"][0].flags)
    assert works() and library().origin == "compiled here" and len(builds) == 1
    assert any("the package's library is not of this version" in line for line in caplog.messages)


def test_the_key_follows_the_processor_on_a_mac(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac has no /proc that lists features, and several machines may share a folder."""
    sysctl = subprocess.run
    said = ["machdep.cpu.brand_string: Apple M1\nhw.optional.arm.FEAT_BF16: 0\n"]

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[0] == "/usr/sbin/sysctl":
            return subprocess.CompletedProcess(command, 0, said[0], "")
        return sysctl(command, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "run", run)
    assert machine.cpu_identity() == ""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(kernel_build, "cpu_flags", frozenset[str])
    first = kernel_build.key("c++")
    said[0] = said[0].replace("M1", "M2").replace(": 0", ": 1")
    assert kernel_build.key("c++") != first


@pytest.mark.parametrize("value", ["yes", "off", "2", " 1", "\n"])
def test_a_value_that_means_nothing_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GPTWORKS_NATIVE", value)
    with pytest.raises(Unavailable, match=r"GPTWORKS_NATIVE=.* means nothing: set 0"):
        library()
