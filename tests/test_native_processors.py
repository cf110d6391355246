"""The native kernels on other processors: each library is built for one of them; AArch64 runs in an emulator.

Python writes models, tokens and the logits of the model's own forward pass in float64; native_cases.cpp computes them
with step.cpp and compares. Debian's packages for AArch64: g++-aarch64-linux-gnu, qemu-user.
"""

import ctypes
import functools
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.infer.backends import native
from gptworks.infer.backends.backend import Chunk, TorchBackend
from gptworks.kernels import entries
from gptworks.kernels.build import FLAGS, LEVELS, SOURCES, Level, Unavailable
from gptworks.kernels.call import NUMBERS
from gptworks.kernels.library import library
from gptworks.machine import cpu_flags
from gptworks.model.gpt import GPT
from test_native import KINDS, VARIANTS, copy_of, expected, pack, text, variant

pytestmark = pytest.mark.processors

Cases = Callable[[tuple[int, ...]], Path]

LENGTHS = (30, 1, 3)
"""Tokens of the texts that are computed in one step: queries come in fours and alone."""

AVX2 = {"avx2", "fma", "f16c", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
X86 = {
    "x86-64": set[str](),
    "haswell": AVX2,
    "skylake-avx512": AVX512,
    "cascadelake": AVX512 | {"avx512_vnni"},
    "cooperlake": AVX512 | {"avx512_bf16", "avx512_vnni"},
    "znver4": AVX512 | {"avx512_bf16", "avx512_vnni", "avx512_vbmi2", "gfni", "avx512_vpopcntdq"},
    "sapphirerapids": AVX512 | {"avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile"},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """A function that writes all cases to a file, given the maximum rows of a panel for each dtype number."""
    try:
        library()
    except Unavailable as error:
        pytest.skip(f"the cases are laid out by the native backend, which is not here: {error}")
    folder = tmp_path_factory.mktemp("cases")

    @functools.cache
    def file_of(rows: tuple[int, ...]) -> Path:
        widest = {dtype: rows[NUMBERS[dtype]] for dtype in native.WEIGHTS if rows[NUMBERS[dtype]]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "widest_panels", lambda kernels: widest)
            written = [case_bytes(*case) for case in all_cases()]
        file = folder / "-".join(map(str, rows))
        file.write_bytes(struct.pack("<q", len(written)) + b"".join(written))
        return file

    return file_of


def all_cases() -> Iterator[tuple[str, GPT, GPT, str, torch.dtype, float, float]]:
    """Yield name, model, model with the same values in float32, kind of weights, dtype of the cache, and allowed
    differences relative to the largest logit."""
    for name in VARIANTS:
        model = variant(name)
        yield name, model, copy_of(model), "fp32", torch.float32, 3e-6, 3e-6
    for name in ("qwen3", "gpt2", "narrow"):
        for kind in KINDS[1:]:
            model = variant(name)
            twin = pack(model, kind)
            rounded = {"bf16": 0.03, "fp16": 3e-6, "int8": 3e-4, "int4": 3e-4}[kind]
            yield f"{name}, {kind}", twin, model, kind, torch.float32, 3e-6, rounded
    for cache, near in ((torch.bfloat16, 0.02), (torch.int8, 0.01)):
        model = variant("llama")
        yield f"cache in {cache}", model, copy_of(model), "fp32", cache, near, near
    for kind in KINDS:
        model = variant("qwen3")
        twin = model if kind == "fp32" else pack(model, kind)
        twin.blocks[1].norm1.weight.data[17] = float("nan")  # type: ignore[union-attr]
        yield f"NaN, {kind}", twin, twin, kind, torch.float32, 0, 0


def case_bytes(
    name: str, model: GPT, plain: GPT, kind: str, cache: torch.dtype, near: float, near_rounded: float
) -> bytes:
    """Return a case as native_cases.cpp reads it: a memory image in which pointers are positions, and the list of these
    pointers."""
    texts = [text(length, seed=length) for length in LENGTHS]
    if name.startswith("NaN"):
        wanted = torch.full((sum(LENGTHS), plain.config.vocab_size), float("nan"))
    elif cache == torch.int8:  # torch's own, which rounds keys and values to the same levels, but for a few
        theirs = TorchBackend(plain, len(LENGTHS), 64, dtype=cache)
        wanted = torch.cat(theirs.compute([Chunk(i, 0, ids, len(ids)) for i, ids in enumerate(texts)]))
    else:
        double = copy_of(plain)
        wanted = torch.cat([expected(double, ids, len(ids)) for ids in texts])
    backend = native.NativeBackend(model, len(LENGTHS), 64, dtype=cache)
    for vectors in (*backend.cache.keys, *backend.cache.values):
        vectors.data.zero_()
    image = Image()
    for tensor in backend._structure.kept:
        image.add(tensor.data_ptr(), tensor)
    layers = backend._structure.layers
    image.add_structure(ctypes.addressof(layers), layers)
    at_model = image.add_structure(0, backend._structure.root)
    rows = [(token, slot, i) for slot, ids in enumerate(texts) for i, token in enumerate(ids)]
    numbers = [torch.tensor(column) for column in (*zip(*rows, strict=True), range(len(rows)))]
    logits = torch.zeros_like(wanted)
    for tensor in (*numbers, logits):
        image.add(tensor.data_ptr(), tensor)
    at_tensors = image.add_structure(0, (entries.Tensor * 5)(*map(described, (*numbers, logits))))
    at_wanted = image.add(0, wanted)
    largest = float(wanted.abs().max()) if wanted.isfinite().all() else 0.0
    bounds = (near * largest, near_rounded * largest)
    places = (len(image.data), len(image.relocations), at_model, at_tensors, at_wanted, wanted.numel())
    header = struct.pack("<6q2dq64s", *places, *bounds, KINDS.index(kind), name.encode()[:63])
    return header + bytes(image.data) + struct.pack(f"<{len(image.relocations)}q", *image.relocations)


def described(x: torch.Tensor) -> entries.Tensor:
    padded = [(*values, *[0] * (entries.MOST_DIMENSIONS - x.dim())) for values in (x.shape, x.stride())]
    return entries.Tensor(x.data_ptr(), NUMBERS[x.dtype], x.dim(), *padded)


class Image:
    """A memory image that can be loaded on another machine."""

    def __init__(self) -> None:
        self.data = bytearray(64)  # no pointer is 0 but the null pointer
        self.relocations: list[int] = []
        self._positions: dict[int, int] = {}

    def add(self, address: int, tensor: torch.Tensor) -> int:
        """Add a tensor's bytes; return their position."""
        return self._add(address, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def add_structure(self, address: int, structure: Any) -> int:
        """Add a structure or an array of them, whose pointers point to parts added before; return its position."""
        content = bytearray(bytes(structure))
        pointers = list(_pointers(type(structure), 0))
        for at in pointers:
            pointer = int.from_bytes(content[at : at + 8], "little")
            content[at : at + 8] = (self._positions[pointer] if pointer else 0).to_bytes(8, "little")
        position = self._add(address, bytes(content))
        filled = [at for at in pointers if any(content[at : at + 8])]
        self.relocations += [position + at for at in filled]
        return position

    def _add(self, address: int, content: bytes) -> int:
        position = len(self.data)
        self.data += content + bytes(-len(content) % 64)
        self._positions[address] = position
        return position


def _pointers(kind: Any, start: int) -> Iterator[int]:
    """Yield the positions of pointers in a structure or an array of structures."""
    if issubclass(kind, ctypes.Array):
        for i in range(kind._length_):
            yield from _pointers(kind._type_, start + i * ctypes.sizeof(kind._type_))
    elif issubclass(kind, ctypes.Structure):
        for name, field in kind._fields_:  # type: ignore[misc]
            yield from _pointers(field, start + getattr(kind, name).offset)
    elif kind is ctypes.c_void_p:
        yield start


def compiled(compiler: str, options: list[str], folder: Path) -> Path:
    program = folder / "native_cases"
    folder_of_kernels = SOURCES[0].parent
    sources = [Path(__file__).with_name("native_cases.cpp")]
    sources += [folder_of_kernels / f"{name}.cpp" for name in ("products", "cached_attention", "threads", "entry")]
    command = [compiler, *FLAGS, "-fopenmp", *options, f"-I{folder_of_kernels}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def panel_rows(command: list[str | Path]) -> tuple[int, ...]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return tuple(map(int, done.stdout.split()))


def run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}exit code {done.returncode}"


@pytest.mark.parametrize("name", X86)
def test_kernels_built_for_a_processor_compute_what_the_model_does(name: str, cases: Cases, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no g++ here, or another kind of processor")
    if missing := X86[name] - cpu_flags():
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    known = subprocess.run([compiler, f"-march={name}", "-E", "-xc++", "/dev/null"], capture_output=True, check=False)
    if known.returncode:
        pytest.skip(f"this g++ does not know {name}")
    program = compiled(compiler, [f"-march={name}"], tmp_path)
    run([program, cases(panel_rows([program]))])


@pytest.mark.parametrize("level", LEVELS["aarch64"], ids=lambda level: level.name)
def test_kernels_built_for_aarch64_compute_what_the_model_does(level: Level, cases: Cases, tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("no cross compiler or no emulator here: apt-get install g++-aarch64-linux-gnu qemu-user")
    program = compiled(compiler, [*level.options, "-static"], tmp_path)
    run([emulator, program, cases(panel_rows([emulator, program]))])
