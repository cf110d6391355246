"""Build gptworks' packages. With GPTWORKS_BUILD_NATIVE=1, a wheel contains C++ libraries for one kind of processor."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))

from gptworks.kernels import build as kernels
from gptworks.kernels import library

BUILDS = os.environ.get("GPTWORKS_BUILD_NATIVE") == "1"


class BuildPy(build_py):
    """Puts a library for each instruction level next to the C++ sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "gptworks", "kernels", library.BUILT.name)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        if BUILDS:
            folder.mkdir()
            build(folder, os.environ.get("CXX", "g++"), os.uname().machine)


class Content(Distribution):
    """The package's contents, which depend on the platform if they include libraries."""

    def has_ext_modules(self) -> bool:
        return BUILDS


class Wheel(bdist_wheel):
    """A wheel for every Python 3, because ctypes calls the libraries; with libraries, for one kind of processor."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def build(folder: Path, compiler: str, machine: str) -> None:
    """Write the library for each level of a kind of processor."""
    for level in kernels.LEVELS[machine]:
        content = kernels.build(compiler, ((*level.options, "-fopenmp"),))
        (folder / f"kernels-{level.name}-{hashlib.sha256(content).hexdigest()}.so").write_bytes(content)


if __name__ == "__main__":
    setup(distclass=Content, cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
