"""Building, caching, verifying and choosing the kernels: on broken machines, next to hostile users, on slow processors.

Without a C++ compiler these tests are skipped; what is said then, is tested nonetheless.
"""

import concurrent.futures
import ctypes
import grp
import hashlib
import io
import os
import platform
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from gptworks.choices import Weights
from gptworks.errors import UserError
from gptworks.infer.backends import native
from gptworks.infer.backends.backend import Chunk, TorchBackend
from gptworks.infer.backends.native import choose_backend
from gptworks.infer.engine import load
from gptworks.kernels import build as kernel_build
from gptworks.kernels import cache as kernel_cache
from gptworks.kernels import dispatch
from gptworks.kernels import library as native_library
from gptworks.kernels.build import LEVELS, Level, Unavailable
from gptworks.kernels.library import library
from gptworks.model.gpt import GPT
from gptworks.quantize.convert import quantize_model
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.display import Display
from serving import until
from test_native import CONTEXT, VARIANTS, check, check_packed, pack, text, variant
from tiny import plain_model, recipe_tree

assert VARIANTS


@pytest.fixture(scope="module")
def built() -> bytes:
    """A library for this processor, compiled once for all tests in this file."""
    try:
        library()
    except Unavailable as error:
        pytest.skip(f"no native kernels here: {error}")
    return loaded_file().read_bytes()


def loaded_file() -> Path:
    return Path(library().functions._name)


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder


@pytest.fixture
def fresh(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "BUILT", tmp_path / "nothing built")
    native_library.forget()
    yield tmp_path / "gptworks"
    native_library.forget()


@pytest.fixture
def builds(built: bytes, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the builds requested; each returns at once the library compiled before."""
    asked: list[str] = []

    def build(compiler: str) -> bytes:
        asked.append(compiler)
        return built

    monkeypatch.setattr(kernel_build, "build", build)
    return asked


def works() -> bool:
    """Whether the loaded library computes."""
    return bool(library().functions.gptworks_built_with() >= 0)


# ----------------------------------------------------------------------------------------------------- where none is


def test_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTWORKS_NATIVE", "0")
    with pytest.raises(Unavailable, match="GPTWORKS_NATIVE=0"):
        library()


def test_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        library()


def test_a_library_of_the_package_that_does_not_load_here_is_compiled(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a system whose C library is older than the one that the wheel was built for."""
    content, folder = b"no library", tmp_path / "of the wheel"
    folder.mkdir()
    for level in LEVELS[platform.machine()]:
        (folder / f"kernels-{level.name}-{hashlib.sha256(content).hexdigest()}.so").write_bytes(content)
    monkeypatch.setattr(native_library, "BUILT", folder)
    assert works() and library().origin == "compiled here" and len(builds) == 1
    native_library.forget()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(Unavailable, match=r"file too short|invalid ELF header"):
        library()


def test_a_compiler_that_fails_leaves_nothing_and_is_not_asked_again(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("this is no C++", encoding="utf-8")
    monkeypatch.setattr(kernel_build, "SOURCES", (wrong,))
    with pytest.raises(Unavailable, match=r"could not compile it .*error"):
        library()
    assert [file.name for file in fresh.iterdir() if file.name != "lock"] == []
    monkeypatch.setattr(subprocess, "run", None)  # is not called
    model = GPT(plain_model(vocab_size=9, context_length=8, n_layers=1, d_model=16, n_heads=1)).eval()
    monkeypatch.setattr(native, "_warned", set())
    with pytest.warns(UserWarning, match=r"native engine is not used: .* torch computes instead"):
        assert isinstance(choose_backend(model, 1, 8), TorchBackend)
    with pytest.raises(UserError, match="backend=native cannot compute this model here"):
        choose_backend(model, 1, 8, name="native")


def test_training_says_once_that_torch_computes_it_and_evaluation_says_nothing(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert dispatch.linear(torch.ones(256, 256), torch.ones(256, 256)).sum() == 256**3
    assert not caplog.messages
    out = io.StringIO()
    recipe = parse_recipe(recipe_tree(tmp_path, max_steps=3, device="cpu"))
    train(recipe, display=Display(Console(file=out, width=200)))
    [said] = [line for line in out.getvalue().splitlines() if "C++" in line]
    assert re.fullmatch(
        r"training's C\+\+ is not used: there is no C\+\+ compiler .* torch computes instead, slower\.", said
    )


def test_a_processor_of_another_name_is_built_for(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTWORKS_NATIVE_MARCH", "no-such-processor")
    with pytest.raises(Unavailable, match="no-such-processor"):
        library()


# -------------------------------------------------------------------------------------------------- built already


@pytest.fixture
def carried(builds: list[str], built: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The package's libraries for each level, made different by bytes after their end, which change only the
    checksum."""
    monkeypatch.delenv("GPTWORKS_NATIVE_MARCH", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native_library, "BUILT", tmp_path / "built")
    (tmp_path / "built").mkdir()
    contents = {level.name: built + level.name.encode() for level in LEVELS["x86_64"]}
    for name, content in contents.items():
        file = f"kernels-{name}-{hashlib.sha256(content).hexdigest()}.so"
        (tmp_path / "built" / file).write_bytes(content)
    return contents


@pytest.mark.parametrize("level", LEVELS["x86_64"], ids=lambda level: level.name)
def test_the_packages_library_for_this_processor_is_taken_without_a_compiler(
    carried: dict[str, bytes], builds: list[str], fresh: Path, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "cpu_flags", lambda: {*level.flags, "sse2", "vaes"})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert loaded_file().read_bytes() == carried[level.name] and builds == []
    assert works() and library().origin == "from the package"
    [copy] = fresh.glob("kernels-*.so")
    assert copy.stat().st_mode & 0o777 == 0o700, "loaded from this user's own folder, wherever the package lies"


@pytest.mark.parametrize("why", ["an older processor", "damaged", "another processor is asked for", "another machine"])
def test_the_compiler_is_used_if_the_packages_library_does_not_fit(
    carried: dict[str, bytes], builds: list[str], tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    flags = LEVELS["x86_64"][-1].flags
    monkeypatch.setattr(native_library, "cpu_flags", lambda: flags - {"fma"} if why == "an older processor" else flags)
    if why == "damaged":
        [file] = (tmp_path / "built").glob("kernels-avx2-*.so")
        file.write_bytes(file.read_bytes()[:-1])
    elif why == "another processor is asked for":
        monkeypatch.setenv("GPTWORKS_NATIVE_MARCH", "haswell")
    elif why == "another machine":
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert works() and len(builds) == 1 and library().origin == "compiled here"
    assert (why == "damaged") == any("is damaged: its checksum differs" in line for line in caplog.messages)


# -------------------------------------------------------------------------------------------------- broken machines


def test_without_a_home_the_library_lives_in_a_temporary_folder(
    builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert works() and len(builds) == 1


def test_a_cache_from_which_no_code_is_run_is_passed_over(
    builds: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ctypes.CDLL

    def cdll(name: str) -> ctypes.CDLL:
        if name.startswith(str(fresh)):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", cdll)
    assert works() and len(builds) == 1


def test_a_cache_that_cannot_be_made_is_passed_over(builds: list[str], fresh: Path) -> None:
    fresh.write_text("a file in its place", encoding="utf-8")
    assert works() and len(builds) == 1


def test_without_a_usable_folder_the_reason_is_reported_once(
    builds: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("no code here")))
    for _ in range(3):
        with pytest.raises(Unavailable, match=r"no folder can keep the kernels \(.*no code here"):
            library()
    assert len(builds) == 1


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data + b"x"])
def test_a_damaged_library_is_built_again(builds: list[str], fresh: Path, damage: Any) -> None:
    assert works()
    [file] = fresh.glob("kernels-*.so")
    whole = file.read_bytes()
    file.unlink()  # a process may have it loaded
    file.write_bytes(damage(whole))
    native_library.forget()
    assert works() and len(builds) == 2
    assert [other.read_bytes() for other in fresh.glob("kernels-*.so")] == [whole]


def test_a_library_is_built_once_for_all_processes(builds: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gptworks.kernels")
    for _ in range(3):
        assert works()
        native_library.forget()
    assert len(builds) == 1
    [line] = caplog.messages
    assert line.startswith("compiling the C++") and "for this processor" in line


def test_sources_are_compiled_separately_and_linked_to_one_library(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "a.cpp": 'namespace { int n() { return 40; } } int two(); extern "C" int answer() { return n() + two(); }',
        "b.cpp": "namespace { int n() { return 2; } } int two() { return n(); }",
    }
    for name, content in sources.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler here")
    monkeypatch.setattr(kernel_build, "SOURCES", tuple(tmp_path / name for name in sources))
    linked = tmp_path / "linked.so"
    linked.write_bytes(kernel_build.build(compiler))
    assert ctypes.CDLL(str(linked)).answer() == 42
    (tmp_path / "b.cpp").write_text("int two() { return nothing; }", encoding="utf-8")
    with pytest.raises(Unavailable, match=r"could not compile it .*b\.cpp.*error"):
        kernel_build.build(compiler)


# ------------------------------------------------------------------------------------------------------ other users


def test_kept_libraries_belong_to_this_user_only(builds: list[str], fresh: Path) -> None:
    old = os.umask(0)
    try:
        assert works()
    finally:
        os.umask(old)
    [file] = fresh.glob("kernels-*.so")
    assert fresh.stat().st_mode & 0o777 == file.stat().st_mode & 0o777 == 0o700


def planted(fresh: Path, builds: list[str], mode: int = 0o700) -> Path:
    """Plant a library with the right name and checksum that was not built here."""
    assert works()
    [file] = fresh.glob("kernels-*.so")
    key, content = file.stem.split("-")[1], file.read_bytes() + b"planted"
    file.unlink()
    native_library.forget()
    builds.clear()
    theirs = fresh / f"kernels-{key}-{hashlib.sha256(content).hexdigest()}.so"
    theirs.write_bytes(content)
    theirs.chmod(mode)
    return theirs


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_library_that_others_may_write_is_not_loaded(builds: list[str], fresh: Path, mode: int) -> None:
    planted(fresh, builds, mode)
    assert works() and len(builds) == 1


def test_a_folder_of_another_user_is_not_used(builds: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = planted(fresh, builds)
    user = os.geteuid()
    stat = Path.stat
    fstat = os.fstat

    def of_another(status: os.stat_result) -> os.stat_result:
        return os.stat_result([*status[:4], user + 1, *status[5:]])

    monkeypatch.setattr(
        Path, "stat", lambda self, **options: (of_another if self == fresh else lambda x: x)(stat(self, **options))
    )
    assert works() and len(builds) == 1
    native_library.forget()
    monkeypatch.setattr(Path, "stat", stat)  # the folder is this user's again, and the files in it another's
    monkeypatch.setattr(os, "fstat", lambda file: of_another(fstat(file)))
    assert works() and len(builds) == 2
    assert theirs.exists()


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770])
def test_a_folder_below_one_that_others_may_write_is_not_used(
    builds: list[str],
    fresh: Path,
    temporary: Path,
    mode: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planted(fresh, builds)
    monkeypatch.setattr(kernel_cache, "_is_own_group", lambda _: False)
    fresh.parent.chmod(mode)
    assert works() and len(builds) == 1
    shared = temporary / f"gptworks-{os.geteuid()}"
    said = f"the kernels are kept in {shared}: {fresh}: other users may write to {fresh.parent}"
    assert said in caplog.messages


def test_a_folder_below_one_that_the_users_own_group_may_write_is_used(
    builds: list[str], fresh: Path, temporary: Path
) -> None:
    """Many systems give each user a group of the same name, and umask 002."""
    assert works()
    fresh.parent.chmod(0o770)
    native_library.forget()
    for members, kept_in in (
        ([], fresh),
        (["anna"], fresh),
        (["anna", "mallory"], temporary / f"gptworks-{os.geteuid()}"),
    ):
        group = SimpleNamespace(gr_name="anna", gr_mem=members)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grp, "getgrgid", lambda _, group=group: group)
            patch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="anna"))
            assert works() and loaded_file().parent == kept_in
        native_library.forget()
    assert len(builds) == 2


def test_a_folder_below_one_of_another_user_is_not_used(
    builds: list[str], fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(fresh, builds)
    stat, user = Path.stat, max(1, os.geteuid() + 1)

    def of_another(self: Path, **options: Any) -> os.stat_result:
        found = stat(self, **options)
        return os.stat_result([*found[:4], user, *found[5:]]) if self == fresh.parent else found

    monkeypatch.setattr(Path, "stat", of_another)
    assert works() and len(builds) == 1


def test_the_library_is_loaded_by_a_path_without_links(
    builds: list[str], fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link could be redirected between the check and the loading."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    load, loaded = ctypes.CDLL, []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (loaded.append(Path(name)), load(name))[1])
    assert works()
    assert loaded[-1].parent == (tmp_path / "elsewhere" / "gptworks").resolve()


def test_a_library_is_not_compiled_in_a_folder_that_others_may_write(
    built: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match=f"other users may write to {tmp_path}"):
        kernel_build.build("c++")


def test_a_link_to_a_folder_is_not_used(builds: list[str], fresh: Path, tmp_path: Path) -> None:
    planted(fresh, builds)
    fresh.rename(tmp_path / "elsewhere")
    fresh.symlink_to(tmp_path / "elsewhere")
    assert works() and len(builds) == 1


# ------------------------------------------------------------------------------------------- which of the two computes


def small(**settings: Any) -> GPT:
    shape = {"vocab_size": 20, "context_length": 16, "n_layers": 1, "d_model": 32, "n_heads": 2}
    return GPT(plain_model(**shape | settings)).eval()


@pytest.mark.parametrize(("weights", "takes_native"), [("fp16", False), ("bf16", True), ("int8", True), ("int4", True)])
def test_without_wide_vectors_torch_computes_weights_in_fp16(
    built: bytes, monkeypatch: pytest.MonkeyPatch, weights: Weights, takes_native: bool
) -> None:
    model = quantize_model(small(), weights)
    assert isinstance(choose_backend(model, 1, 16), native.NativeBackend)
    monkeypatch.setattr(native_library.Library, "has_wide_vectors", False)
    monkeypatch.setattr(native, "_warned", set())
    if takes_native:
        assert isinstance(choose_backend(model, 1, 16), native.NativeBackend)
    else:
        with pytest.warns(UserWarning, match="the native engine is not used: without AVX2"):
            assert isinstance(choose_backend(model, 1, 16), TorchBackend)
    chosen = choose_backend(model, 1, 16, name="native")
    assert chosen.description.startswith(f"native ({library().instructions}, ")


# --------------------------------------------------------------------------------------------------- plain processors


@pytest.mark.processors
def test_a_processor_without_vector_instructions_computes_the_same(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain C++ alternative to intrinsics, without OpenMP, as other processors or compilers get it."""
    monkeypatch.delenv("GPTWORKS_NATIVE_MARCH", raising=False)
    monkeypatch.setattr(kernel_build, "ATTEMPTS", ((),))
    for kind in ("bf16", "fp16", "int8", "int4"):
        model = variant("qwen3")
        twin = pack(model, kind)
        check(model, native.NativeBackend(twin, 3, CONTEXT, dtype=torch.float32), near=3e-6)
        twin.blocks[0].norm1.weight.data[3] = float("nan")  # type: ignore[union-attr]
        logits = native.NativeBackend(twin, 1, CONTEXT).compute([Chunk(0, 0, text(5), 5)])[0]
        assert logits.isnan().all()
    assert len(list(fresh.glob("kernels-*.so"))) == 1
    check_threads(monkeypatch)


@pytest.mark.processors
def test_clang_builds_it_with_its_own_threads(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two OpenMP libraries in a process compete for its cores; on a Mac they end the process."""
    compiler = shutil.which("clang++")
    if compiler is None:
        pytest.skip("no clang++ here")
    monkeypatch.setattr(shutil, "which", lambda name: compiler if name == "clang++" else None)
    for kind in ("bf16", "int8", "int4"):
        check_packed(variant("qwen3"), kind)
    [file] = fresh.glob("kernels-*.so")
    assert b"libomp" not in file.read_bytes()
    check_threads(monkeypatch)


def check_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the library's own threads: as many as requested, the same numbers with any count, and none left behind."""
    backend, tasks = native.NativeBackend(variant("qwen3"), 1, CONTEXT), Path("/proc/self/task")
    found: list[tuple[torch.Tensor, int]] = []

    def n_more() -> int:
        return len(list(tasks.iterdir())) - before

    def compute() -> None:
        for n in (1, 4, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
            found.append((backend.compute([Chunk(0, 0, text(9), 9)])[0], n_more()))

    before = 0
    before = n_more()
    with concurrent.futures.ThreadPoolExecutor(1) as caller:
        caller.submit(compute).result()
    assert [n for _, n in found] == [1, 4, 4]
    assert all(torch.equal(logits, found[0][0]) for logits, _ in found)
    until(lambda: n_more() == 0)  # a thread ends a little later than Python says


def test_an_engine_says_what_computes(built: bytes, trained_run: Path) -> None:
    engine = load(trained_run, backend="native")
    assert engine.backend_description is None
    engine.generate("line", max_tokens=1)
    assert str(engine.backend_description).startswith(f"native ({library().instructions}, ")
    other = load(trained_run, backend="torch")
    other.generate("line", max_tokens=1)
    assert other.backend_description == "torch on cpu"
