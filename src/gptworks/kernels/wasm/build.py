"""Compile step.wasm with clang and wasm-ld: `python -m gptworks.kernels.wasm.build`.

std.h replaces the standard library, and system.cpp the operating system. step.sums has the checksum of the sources: a
test compares it and, if there is a compiler, builds the module again.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from gptworks.kernels.build import Unavailable
from gptworks.kernels.wasm import MODULE, SUMS

_HERE = MODULE.parent
_SOURCES = (
    *(_HERE.with_name(f"{name}.cpp") for name in ("step", "products", "cached_attention", "entry")),
    _HERE / "trace.cpp",
    _HERE / "system.cpp",
)
_FLAGS = (
    "--target=wasm32", "-msimd128", "-O3", "-std=c++17", "-nostdlib", "-nostdlibinc", "-fno-exceptions", "-fno-rtti",
    "-fno-threadsafe-statics", "-fvisibility=hidden", "-Wall", "-Werror", "-matomics", "-mbulk-memory",
    "-mmutable-globals", "-ftls-model=local-exec",
)  # fmt: skip
EXPORTS = tuple(f"gptworks_{name}" for name in ("step", "watch", "lens", "parts", "room", "error", "widest_panel"))
OF_THREADS = ("gptworks_help", "gptworks_lost", "gptworks_threads", "__stack_pointer", "__tls_size", "__wasm_init_tls")
_MEMORY = ("--import-memory", "--shared-memory", "--max-memory=4294967296")
STACK_BYTES = 1 << 18


def sources() -> list[Path]:
    """Return the sources and the headers that they include."""
    found = list(_SOURCES)
    for file in found:
        included = re.findall(r'^#include "([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE)
        found += [there for name in included if (there := (file.parent / name).resolve()) not in found]
    return sorted({*found, _HERE / "std.h"})


def sum_of_sources() -> str:
    """Return the SHA-256, in hex, of the sources and the compiler's options."""
    total = hashlib.sha256(repr((_FLAGS, EXPORTS, OF_THREADS, _MEMORY, STACK_BYTES)).encode())
    for file in sources():
        total.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return total.hexdigest()


def build() -> bytes:
    """Compile the module and return it; raises Unavailable if clang or wasm-ld is missing or fails."""
    for program in ("clang", "wasm-ld"):
        if shutil.which(program) is None:
            raise Unavailable(f"there is no {program} here: the packages clang and lld have it.")
    with tempfile.TemporaryDirectory(prefix="gptworks-wasm-") as temporary:
        folder = Path(temporary)
        texts = "".join(file.read_text(encoding="utf-8") for file in sources())
        for header in set(re.findall(r"^#include <([a-z_]+)>", texts, re.MULTILINE)):
            (folder / header).write_text(f'#include "{_HERE / "std.h"}"\n', encoding="utf-8")
        objects = [folder / f"{source.stem}.o" for source in _SOURCES]
        for source, to in zip(_SOURCES, objects, strict=True):
            _run("clang", *_FLAGS, "-isystem", folder, "-c", source, "-o", to)
        exports = [f"--export={name}" for name in (*EXPORTS, *OF_THREADS)]
        linked = folder / "step.wasm"
        stack = f"stack-size={STACK_BYTES}"
        _run("wasm-ld", "--no-entry", *_MEMORY, *exports, "--strip-all", "-z", stack, *objects, "-o", linked)
        return linked.read_bytes()


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, text=True, timeout=600)
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[:2000]}")


if __name__ == "__main__":
    MODULE.write_bytes(build())
    SUMS.write_text(sum_of_sources() + "\n", encoding="utf-8")
