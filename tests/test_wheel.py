"""The wheel in dist/ with compiled C++ (make wheel): installed alone, on a machine without a compiler."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import setup

from gptworks.kernels.build import LEVELS
from gptworks.machine import cpu_flags

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[1]

PROBE = """
import json, platform
from gptworks import GPT, ModelConfig
from gptworks.infer.backends.backend import Chunk, TorchBackend
from gptworks.infer.backends import native as backend
from gptworks.kernels import build, library

model = GPT(ModelConfig(vocab_size=64, context_length=32, n_layers=1, d_model=64, n_heads=4)).eval()
chunk = Chunk(0, 0, list(range(9)), 9)
expected = TorchBackend(model, 1, 32).compute([chunk])[0]
found = {"file": library.__file__}
for level in build.LEVELS[platform.machine()]:
    if level.flags <= (flags := library.cpu_flags()):
        library.forget()
        library.cpu_flags = lambda: level.flags
        native = backend.NativeBackend(model, 1, 32)
        difference = (native.compute([chunk])[0] - expected).abs().max()
        found[level.name] = [native.description, float(difference)]
        library.cpu_flags = lambda: flags
found["libgomp"] = sorted({line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    wheels = list(ROOT.glob("dist/*.whl"))
    assert len(wheels) == 1, "make wheel leaves one in dist/"
    return wheels[0]


def test_it_carries_a_library_for_each_level_and_is_named_by_its_platform(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"] and wheel.stem.endswith(platform.machine())
    libraries = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                folder, _, file = name.rpartition("/")
                _, level, digest = Path(file).stem.split("-")
                assert folder == "gptworks/kernels/built" and hashlib.sha256(archive.read(name)).hexdigest() == digest
                libraries[level] = digest
    assert list(libraries) and set(libraries) == {level.name for level in LEVELS[platform.machine()]}


def test_it_holds_each_file_of_the_package_and_no_other(wheel: Path) -> None:
    done = subprocess.run(["git", "ls-files", "src/gptworks"], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith(".so")}
        licence = [archive.read(name) for name in names if name.endswith("/licenses/LICENSE")]
    assert {name for name in names if ".dist-info/" not in name} == {
        line.removeprefix("src/") for line in done.stdout.splitlines()
    }
    assert licence == [(ROOT / "LICENSE").read_bytes()]


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that runs Python where the wheel is installed, in a folder of its own without a compiler."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    packages = next(folder.glob("venv/lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")  # behind what it holds
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (folder / "empty").mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("GPTWORKS_", "PYTHON"))}
    environment = {**clean, "PATH": str(folder / "empty"), "XDG_CACHE_HOME": str(folder / "cache")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [folder / "venv/bin/python", *arguments],
            env=environment, cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_it_computes_without_a_compiler_and_shares_the_threads_of_torch(fresh: Callable[..., str]) -> None:
    found = json.loads(fresh("-c", PROBE))
    assert "fresh" in found.pop("file")
    assert len(found.pop("libgomp")) == 1, "torch's own"
    assert set(found) == {level.name for level in LEVELS[platform.machine()] if level.flags <= cpu_flags()}
    for description, difference in found.values():
        assert ", from the package, " in description and difference < 1e-5


def test_a_user_of_the_wheel_trains_and_uses_a_model(fresh: Callable[..., str]) -> None:
    assert "gpt2" in fresh("-m", "gptworks", "presets")
    assert "demo" in fresh("-m", "gptworks", "recipes")
    few = ["train.max_steps=2", "train.evaluate_every=2", "train.evaluate_sequences=2", "train.sample_every=0"]
    fresh("-m", "gptworks", "train", "demo", *few)
    assert fresh("-m", "gptworks", "generate", "runs/demo", "def", "--max-tokens", "3").startswith("def")
    fresh("-m", "gptworks", "report", "runs/demo")


def test_the_libraries_for_aarch64_load(tmp_path: Path) -> None:
    """Cross-compiled as for an AArch64 wheel, and run in an emulator."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("no cross compiler or no emulator here: apt-get install g++-aarch64-linux-gnu qemu-user")
    setup.build(tmp_path, compiler, "aarch64")
    (tmp_path / "main.cpp").write_text(
        "#include <dlfcn.h>\n#include <cstdio>\nint main(int, char **a) { void *l = dlopen(a[1], RTLD_NOW);\n"
        'if (!l) return puts(dlerror()); printf("%d", ((int (*)())dlsym(l, "gptworks_built_with"))()); }',
        encoding="utf-8",
    )
    subprocess.run([compiler, tmp_path / "main.cpp", "-o", tmp_path / "main", "-ldl"], check=True)
    for level, built_with in {"neondot": "8", "neon": "0"}.items():
        [file] = tmp_path.glob(f"kernels-{level}-*.so")
        command = [emulator, "-L", "/usr/aarch64-linux-gnu", tmp_path / "main", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, built_with), "with products of bytes, or without"
