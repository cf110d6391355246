"""The native backend: a GPT's step in C++ (kernels.cpp), built by the machine's own compiler when it is first wanted.

Decoding, checking guesses and prefill are the same call, over all rows of all texts; a long chunk takes several. What a
row gets depends neither on the rows beside it nor on how its text was cut into chunks, bit for bit.

Activations are float32, and are rounded where the processor multiplies narrower numbers: to bf16 for weights in bf16
(AVX512_BF16), as torch does; for weights of 8 and 4 bits to 16 bits with one scale a row, which is finer (AVX512_VNNI).
"""

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.infer.backend import Chunk, Unavailable
from gptworks.model import GPT, SlotCache
from gptworks.plan.devices import cpu_flags

STEP_TOKENS = 128
"""Tokens of one chunk in a step: enough that reading the weights again for the next ones costs little."""

SOURCE = Path(__file__).with_name("kernels.cpp")


# ------------------------------------------------------------------------------------------------------ the library


@functools.cache
def library() -> ctypes.CDLL:
    """kernels.cpp, compiled for this processor; kept in the user's cache, so that it is compiled once.

    Raises:
        Unavailable: GPTWORKS_NATIVE=0, no compiler, or one that fails.
    """
    if os.environ.get("GPTWORKS_NATIVE") == "0":
        raise Unavailable("GPTWORKS_NATIVE=0 is set.")
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if compiler is None:
        raise Unavailable("there is no C++ compiler (g++ or clang++).")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    machine = " ".join([platform.platform(), platform.processor(), *sorted(cpu_flags())])
    parts = (SOURCE.read_bytes(), version, machine.encode(), repr((FLAGS, ATTEMPTS)).encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    file = cache_folder() / f"kernels-{key}.so"
    if not file.exists():
        build(compiler, file)
    loaded = ctypes.CDLL(str(file))
    loaded.gptworks_step.argtypes = [ctypes.POINTER(_Model), ctypes.POINTER(_Batch), ctypes.c_int]
    loaded.gptworks_step.restype = None
    loaded.gptworks_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    loaded.gptworks_read.restype = ctypes.c_float
    return loaded


FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-w")

ATTEMPTS = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
"""Tried in this order: Apple's compiler has no OpenMP, and older ones for ARM another name for this processor."""


def build(compiler: str, file: Path) -> None:
    """Compile kernels.cpp to `file`, which appears whole or not at all.

    Raises:
        Unavailable: no attempt succeeds, or the folder cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".building-") as folder:
            made = Path(folder) / file.name
            for attempt in ATTEMPTS:
                command = [compiler, *FLAGS, *attempt, str(SOURCE), "-o", str(made)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    made.replace(file)
                    return
    except OSError as error:
        raise Unavailable(f"{file.parent} cannot be written ({error.strerror or error}).") from error
    said = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
    raise Unavailable(f"{Path(compiler).name} could not compile it ({said}).")


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gptworks"


def read_memory(tensor: Tensor) -> None:
    """Read a float32 tensor once with all threads: what bounds a step."""
    library().gptworks_read(tensor.data_ptr(), tensor.numel(), torch.get_num_threads())


# ------------------------------------------------------------------------- the structures of kernels.cpp, in its order

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", _POINTER), ("scale", _POINTER), ("bias", _POINTER),
        ("n", _INTEGER), ("k", _INTEGER), ("kind", _INTEGER),
    )  # fmt: skip


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("norm1", "norm2", "query_norm", "key_norm")),
        *((name, _Matrix) for name in ("query", "key", "value", "out", "gate", "up", "down")),
        *((name, _POINTER) for name in ("keys", "key_scales", "values", "value_scales")), ("window", _INTEGER),
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _INTEGER) for name in (
            "d_model", "n_heads", "n_groups", "d_head", "d_ff", "d_rotary", "capacity", "n_layers",
            "activation", "layer_norm", "parallel", "cache_kind",
        )),
        ("eps", _FLOAT), ("scale", _FLOAT), ("embedding", _Matrix), ("head", _Matrix),
        ("position", _POINTER), ("cos", _POINTER), ("sin", _POINTER), ("norm", _Norm), ("layers", _POINTER),
    )  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_rows", _INTEGER), ("n_texts", _INTEGER), ("n_wanted", _INTEGER), ("tokens", _POINTER),
        ("slots", _POINTER), ("positions", _POINTER), ("wanted", _POINTER), ("logits", _POINTER),
    )  # fmt: skip


_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
_ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu")
_AT_ONCE_BYTES = 64
"""Bytes of a row that a product takes at once: rows are padded to a multiple."""


# ------------------------------------------------------------------------------------------------------ the backend


def try_backend(model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> "NativeBackend":
    """The native backend of a model.

    Raises:
        Unavailable: it cannot serve this model, or not here.
    """
    return NativeBackend(model, n_slots, capacity, dtype=dtype)


def refusal(model: GPT) -> str | None:
    """Why the kernels cannot compute a model; None: they can."""
    config = model.config
    if model.device.type != "cpu":
        return f"the model is on {model.device}."
    if config.n_experts:
        return "it has no mixture of experts."
    if config.rope_scaling is not None and config.rope_scaling.type == "dynamic":
        return "it has no dynamic rotary scaling."
    for name in ("d_head", "d_model", "d_ff"):
        if (width := getattr(config, name)) % 16:
            return f"{name}={width} is no multiple of 16."
    strange = {module.weight.dtype for module in model.modules() if hasattr(module, "weight")} - set(_KINDS)
    return f"it has no weights in {strange.pop()}." if strange else None


class NativeBackend:
    """Decodes in C++ on the CPU. Takes the weights where they are: they may change in place, not be replaced."""

    invariant = True

    def __init__(self, model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Room for `n_slots` texts of `capacity` tokens.

        Args:
            model: fp32, or with its matrices in bf16, fp16, int8 or int4 (gptworks.quantize).
            dtype: of the cache, fp32, bf16 or int8; None: fp32 for a model in fp32, else bf16.

        Raises:
            Unavailable: see `refusal` and `library`.
        """
        if reason := refusal(model):
            raise Unavailable(reason)
        self._step = library().gptworks_step
        kind = model.token_embedding.weight.dtype
        dtype = dtype or (torch.float32 if kind == torch.float32 else torch.bfloat16)
        self.cache = SlotCache(model.config, n_slots, capacity, dtype=dtype)
        self.n_slots, self.capacity = n_slots, self.cache.capacity
        self.vocab_size = model.config.vocab_size
        self._kept: list[Tensor] = []
        matrices = [module.weight for module in _matrices(model)]
        if len({matrix.untyped_storage().data_ptr() for matrix in matrices}) > 1:  # not moved before
            move_to_large_pages(matrices)
        self.model = model
        self._model = self._structure(model)

    def compute(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """See Backend."""
        logits: list[list[Tensor]] = [[] for _ in chunks]
        for first in range(0, max(len(chunk.tokens) for chunk in chunks), STEP_TOKENS):
            here = [(i, chunk) for i, chunk in enumerate(chunks) if len(chunk.tokens) > first]
            parts = [_part(chunk, first) for _, chunk in here]
            for (i, _), part in zip(here, self._compute(parts), strict=True):
                logits[i].append(part)
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in logits]

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """See Backend."""
        self.cache.copy(source, target, n_tokens)

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        """See Backend."""
        self.cache.grow(n_slots, capacity, held)
        self.n_slots, self.capacity = self.cache.n_slots, self.cache.capacity
        self._kept = []
        self._model = self._structure(self.model)

    def cache_bytes(self, n_slots: int, capacity: int) -> int:
        """See Backend."""
        return self.cache.bytes_of(n_slots, capacity)

    def _compute(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """One step over all rows of the chunks; the logits that each wants, fp32 [n, V]."""
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for chunk in chunks:
            n = len(chunk.tokens)
            assert chunk.start + n <= self.capacity, f"{chunk.start + n} tokens in a slot of {self.capacity}"
            tokens += chunk.tokens
            slots += [chunk.slot] * n
            positions += range(chunk.start, chunk.start + n)
            wanted += range(len(tokens) - chunk.n_logits, len(tokens))
        logits = torch.empty(len(wanted), self.vocab_size)
        numbers = [_integers(values) for values in (tokens, slots, positions, wanted)]
        addresses = [ctypes.addressof(array) for array in numbers]
        batch = _Batch(len(tokens), len(chunks), len(wanted), *addresses, logits.data_ptr())
        self._step(ctypes.byref(self._model), ctypes.byref(batch), torch.get_num_threads())
        return list(torch.split(logits, [chunk.n_logits for chunk in chunks]))

    # -------------------------------------------------------------------------------- the model as kernels.cpp sees it

    def _structure(self, model: GPT) -> _Model:
        config = model.config
        layers = (_Layer * config.n_layers)(*(self._layer(model, i) for i in range(config.n_layers)))
        cos, sin = (
            model.rotary.at(slice(0, self.capacity), self.capacity, torch.float32) if model.rotary else (None,) * 2
        )
        head = model.token_embedding if model.untied_head is None else model.untied_head
        position = None if model.position_embedding is None else model.position_embedding.weight
        structure = _Model(
            config.d_model, config.n_heads, config.n_kv_heads, config.d_head, config.d_ff,
            config.d_rotary, self.capacity, config.n_layers,
            _ACTIVATIONS.index(config.mlp), config.norm == "layernorm", config.parallel_residual,
            _KINDS[self.cache.dtype],
            config.norm_eps, config.d_head**-0.5 if config.attention_scale is None else config.attention_scale,
            self._matrix(model.token_embedding), self._matrix(head),
            self._vector(position), self._vector(cos), self._vector(sin), self._norm(model.norm),
            ctypes.addressof(layers),
        )  # fmt: skip
        structure.kept = layers
        return structure

    def _layer(self, model: GPT, i: int) -> _Layer:
        block: Any = model.blocks[i]
        attention, mlp = block.attention, block.mlp
        norms = (block.norm1, block.norm2, attention.query_norm, attention.key_norm)
        cached = (self.cache.keys[i], self.cache.values[i])
        matrices = (attention.query, attention.key, attention.value, attention.out, mlp.gate, mlp.up, mlp.down)
        return _Layer(
            *map(self._norm, norms),
            *map(self._matrix, matrices),
            *(self._address(part) for vectors in cached for part in (vectors.data, vectors.scale)),
            attention.window or self.capacity,
        )

    def _norm(self, norm: Any) -> _Norm:
        if isinstance(norm, nn.Identity):
            return _Norm()
        return _Norm(self._vector(norm.weight), self._vector(getattr(norm, "bias", None)))

    def _matrix(self, module: Any) -> _Matrix:
        if module is None:
            return _Matrix()
        weight, scale = module.weight.detach(), getattr(module, "scale", None)
        n_missing = -(weight.size(1) * weight.element_size()) % _AT_ONCE_BYTES
        if n_missing:
            weight = F.pad(
                weight, (0, n_missing // weight.element_size()), value=0x88 if weight.dtype == torch.uint8 else 0
            )
        n_columns = weight.size(1) * (2 if weight.dtype == torch.uint8 else 1)
        if weight.dtype == torch.uint8 and scale is not None:
            scale = F.pad(scale, (0, n_columns // 32 - scale.size(1)))
        return _Matrix(
            self._address(weight), self._address(scale), self._vector(getattr(module, "bias", None)),
            weight.size(0), n_columns, _KINDS[weight.dtype],
        )  # fmt: skip

    def _vector(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._address(tensor.detach().float())

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()


def _matrices(model: GPT) -> Iterator[Any]:
    """The modules with the matrices that a step reads, in the order in which it does."""
    for module in model.blocks.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2:
            yield module
    yield model.token_embedding
    if model.untied_head is not None:
        yield model.untied_head


def move_to_large_pages(tensors: Sequence[Tensor]) -> None:
    """Give tensors other memory, with the same contents: one block in pages of 2 MiB, where the system has them.

    A step reads every weight once. With pages of 4 KiB, looking up where they lie took half of the time (Zen 4: 16
    instead of 31 GB/s a core).
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    sizes = [-(-tensor.numel() * tensor.element_size() // 64) * 64 for tensor in tensors]
    block = mmap.mmap(-1, sum(sizes))
    with contextlib.suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    for tensor, part in zip(tensors, torch.split(torch.frombuffer(block, dtype=torch.uint8), sizes), strict=True):
        n_bytes = tensor.numel() * tensor.element_size()
        moved = part[:n_bytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = moved.copy_(tensor.detach())


def _part(chunk: Chunk, first: int) -> Chunk:
    """The chunk's tokens from `first` on that one step computes, wanting those of its logits."""
    tokens = chunk.tokens[first : first + STEP_TOKENS]
    after = len(chunk.tokens) - first - len(tokens)
    n_logits = min(len(tokens), max(0, chunk.n_logits - after))
    return Chunk(chunk.slot, chunk.start + first, tokens, n_logits, chunk.room)


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)
