"""Measure decoding and prefill, compared with transformers, llama.cpp and the limits of the machine.

    python bench/infer.py

The model is GPT-2 124M with random weights. The script times 128 tokens after a prompt of 64, for 1, 8 and 32 texts,
and a prompt of 512 tokens. Each engine runs in its own process, decodes greedily through its lowest public interface
and uses all threads; the engines alternate, and figures are medians. The limits are measured in the same rounds:
decoding must read every weight once per step, and prefill must multiply by each.

llama.cpp is in the `peers` extra; build it for this processor: CMAKE_ARGS="-DGGML_NATIVE=ON" pip install …
To emulate a processor that has only AVX2, build llama.cpp for it (GGML_NATIVE=OFF) and set
`ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 GPTWORKS_NATIVE_MARCH=haswell`. If torch emulates bf16 products,
transformers is left out, and the limit is measured in fp32.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptworks.device import choose_precision, device_name
from gptworks.infer.backends.backend import Backend, Chunk, TorchBackend
from gptworks.infer.backends.native import choose_backend
from gptworks.infer.backends.placement import rooms_in_large_pages
from gptworks.interop.gguf import export_gguf
from gptworks.model.gpt import GPT
from gptworks.planning.flops import forward_flops
from gptworks.presets import preset
from gptworks.quantize.convert import quantize_model
from gptworks.quantize.linear import packed_matrices
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.progress import Progress

PROMPT, NEW, LONG_PROMPT, BATCHES = 64, 128, 512, (1, 8, 32)
MOST_TOKENS = max(LONG_PROMPT, PROMPT * max(BATCHES))
"""Maximum number of tokens in one call."""
PRESET = "gpt2"

SMALLEST = "gptworks int4 head"
"""Name of the engine whose head is in int4 too."""
OURS = ("gptworks bf16", "gptworks int8", "gptworks int4", SMALLEST)
THEIRS = ("llama.cpp bf16", "llama.cpp q8_0", "llama.cpp q4_0")
TRANSFORMERS = "transformers bf16"
GOALS = (
    ("gptworks bf16", "llama.cpp bf16", 1, 1.5),
    ("gptworks int8", "llama.cpp q8_0", 1, 2.5),
    ("gptworks int4", "llama.cpp q4_0", 1, 2.5),
    ("gptworks bf16", "llama.cpp bf16", 8, 2.2),
    ("gptworks int8", "llama.cpp q8_0", 8, 2.2),
    ("gptworks bf16", "llama.cpp bf16", 32, 2.2),
    ("gptworks int8", "llama.cpp q8_0", 32, 2.2),
    ("gptworks bf16", TRANSFORMERS, 8, 2.0),
    ("gptworks bf16", TRANSFORMERS, LONG_PROMPT, 1.3),
    ("gptworks bf16", "llama.cpp bf16", LONG_PROMPT, 4.0),
)
"""Our engine, the other one, the batch size (or LONG_PROMPT), and the speed ratio to reach."""


class Engine(ABC):
    """An inference engine that decodes several texts together, one token of each per step."""

    @abstractmethod
    def start(self, prompts: list[list[int]]) -> list[int]:
        """Drop all earlier texts and read the prompts; return the most likely next token of each."""

    @abstractmethod
    def step(self, tokens: list[int]) -> list[int]:
        """Append one token to each text; return the most likely next tokens."""


class Ours(Engine):
    def __init__(self, model: GPT) -> None:
        self.backend: Backend = choose_backend(model, max(BATCHES), LONG_PROMPT + NEW)
        if isinstance(self.backend, TorchBackend):
            raise SystemExit("the native backend cannot be had here, and this measures it")

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.lengths = [0] * len(prompts)
        return self._compute(prompts)

    def step(self, tokens: list[int]) -> list[int]:
        return self._compute([[token] for token in tokens])

    def _compute(self, parts: list[list[int]]) -> list[int]:
        chunks = [Chunk(slot, self.lengths[slot], part) for slot, part in enumerate(parts)]
        self.lengths = [length + len(part) for length, part in zip(self.lengths, parts, strict=True)]
        return [int(logits[0].numpy().argmax()) for logits in self.backend.compute(chunks)]


class Transformers(Engine):
    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = preset(PRESET)
        theirs = GPT2Config(n_layer=config.n_layers, n_embd=config.d_model, n_head=config.n_heads)
        self.model = GPT2LMHeadModel(theirs).to(torch.bfloat16).eval()

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.cache: Any = None
        return self._compute(torch.tensor(prompts))

    def step(self, tokens: list[int]) -> list[int]:
        return self._compute(torch.tensor(tokens)[:, None])

    @torch.inference_mode()
    def _compute(self, tokens: Tensor) -> list[int]:
        out = self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return [int(logits.argmax()) for logits in out.logits[:, -1].float().numpy()]


class LlamaCpp(Engine):
    def __init__(self, file: Path) -> None:
        import llama_cpp

        self.api, n_texts = llama_cpp, max(BATCHES)
        llama_cpp.llama_log_set(_silent(llama_cpp), None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = n_texts * (PROMPT + NEW) + LONG_PROMPT, n_texts
        settings.n_batch, settings.n_ubatch = MOST_TOKENS, LONG_PROMPT
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        settings.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(MOST_TOKENS, 0, n_texts)
        self.n_vocabulary = preset(PRESET).vocab_size

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.lengths = [0] * len(prompts)
        return self._compute(prompts)

    def step(self, tokens: list[int]) -> list[int]:
        return self._compute([[token] for token in tokens])

    def _compute(self, parts: list[list[int]]) -> list[int]:
        batch, n, last = self.batch, 0, []
        for slot, part in enumerate(parts):
            for token in part:
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, self.lengths[slot], 1
                batch.seq_id[n][0], batch.logits[n] = slot, 0
                self.lengths[slot] += 1
                n += 1
            batch.logits[n - 1] = 1
            last.append(n - 1)
        batch.n_tokens = n
        if self.api.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not decode")
        rows = (self.api.llama_get_logits_ith(self.context, i) for i in last)
        return [int(np.ctypeslib.as_array(row, (self.n_vocabulary,)).argmax()) for row in rows]


def _silent(llama_cpp: Any) -> Any:
    callback = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.kept_callback = callback
    return callback


def build(name: str, folder: Path) -> Engine:
    torch.manual_seed(0)
    if name == TRANSFORMERS:
        return Transformers()
    if name in THEIRS:
        return LlamaCpp(folder / f"{name.split()[1]}.gguf")
    return Ours(rounded(name))


def rounded(name: str) -> GPT:
    """Return the model with the weights that one of our engines uses."""
    kind: Any = name.split()[1]
    return quantize_model(GPT(preset(PRESET)).eval(), kind, head="int4" if name == SMALLEST else "int8")


def work(name: str, folder: Path, orders: Connection) -> None:
    """Answer each order (a batch size or LONG_PROMPT) with the seconds of a step or of the prompt; 0 ends the
    process."""
    engine = build(name, folder)
    orders.send(0.0)
    while order := orders.recv():
        orders.send(prefill_seconds(engine) if order == LONG_PROMPT else step_seconds(engine, order))


def step_seconds(engine: Engine, n_texts: int) -> float:
    """Return the median time of a step over the new tokens."""
    tokens = engine.start([prompt(PROMPT, seed) for seed in range(n_texts)])
    times = []
    for _ in range(NEW):
        started = time.perf_counter()
        tokens = engine.step(tokens)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def prefill_seconds(engine: Engine) -> float:
    return min(seconds(lambda: engine.start([prompt(LONG_PROMPT)])) for _ in range(2))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(preset(PRESET).vocab_size, (length,), generator=generator).tolist()
    return tokens


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Limits:
    """The machine's limits: bytes read per second, and FLOP/s of a large product in its fastest precision."""

    def __init__(self) -> None:
        (self.block,) = rooms_in_large_pages([(torch.float32, 2**26)])
        self.block.fill_(1)
        self.precision = choose_precision("auto", torch.device("cpu"))
        self.square = torch.randn(2048, 2048).to(self.precision.dtype)
        self.bandwidths: list[float] = []
        self.rates: list[float] = []

    def measure(self) -> None:
        n_bytes, n_flops = 4 * self.block.numel(), 2 * 2048**3
        self.bandwidths.append(n_bytes / min(seconds(self.block.sum) for _ in range(5)))
        self.rates.append(n_flops / min(seconds(lambda: self.square @ self.square) for _ in range(5)))


def weight_bytes() -> dict[str, int]:
    """Return the bytes of the matrices that a step reads, by engine name. llama.cpp's formats are assumed to have the
    same sizes as ours, which is true within 6%."""
    sizes = {}
    for name in OURS:
        tensors = [tensor for _, matrix in packed_matrices(rounded(name)) for tensor in matrix.buffers(recurse=False)]
        sizes[name] = sum(tensor.nbytes for tensor in tensors)
    return sizes | dict(zip(THEIRS, sizes.values(), strict=False)) | {TRANSFORMERS: sizes[OURS[0]]}


def write_gguf(folder: Path) -> None:
    """Write a run of the model, and its GGUF files."""
    torch.manual_seed(0)
    model = GPT(preset(PRESET))
    tree = {
        "name": "bench",
        "run_dir": str(folder / "run"),
        "model": model.config.model_dump(mode="json"),
        "tokenizer": {"type": "gpt2"},
        "data": {"sources": [{"type": "python-stdlib"}], "cache_dir": str(folder)},
        "train": {"max_steps": 1},
    }
    (folder / "run").mkdir()
    save_recipe(parse_recipe(tree), folder / "run" / "recipe.yaml")
    save_checkpoint(folder / "run", 1, model.state_dict(), {}, asdict(Progress(step=1, best_step=1)))
    for name in THEIRS:
        kind: Any = name.split()[1]
        export_gguf(folder / "run", folder / f"{kind}.gguf", quantization=kind, tokenizer=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    limits = Limits()
    peers = [TRANSFORMERS] if importlib.util.find_spec("transformers") and limits.precision.name == "bf16" else []
    peers += THEIRS if importlib.util.find_spec("llama_cpp") else []
    names = [*OURS, *peers]
    spawn = get_context("spawn")
    times: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if THEIRS[0] in names:
            write_gguf(folder)
        orders = {}
        for name in names:
            orders[name], theirs = spawn.Pipe()
            spawn.Process(target=work, args=(name, folder, theirs), daemon=True).start()
            orders[name].recv()
        for turn in range(arguments.rounds + 1):
            limits.measure()
            for order in (*BATCHES, LONG_PROMPT):
                for name in names:
                    orders[name].send(order)
                    taken = orders[name].recv()
                    if turn:  # the first round is a warm-up
                        times.setdefault((name, order), []).append(taken)
        for connection in orders.values():
            connection.send(0)
    report({key: statistics.median(values) for key, values in times.items()}, names, limits)


def report(time_of: dict[tuple[str, int], float], names: list[str], limits: Limits) -> None:
    bandwidth, rate = max(limits.bandwidths), max(limits.rates)
    counted = forward_flops(preset(PRESET), LONG_PROMPT)
    flops = counted.total_causal - counted.head  # logits only for the last token
    sizes = weight_bytes()
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}; GPT-2 124M")
    print(
        f"limits: {bandwidth / 1e9:.1f} GB/s read (median {statistics.median(limits.bandwidths) / 1e9:.1f}), "
        f"{rate / 1e9:,.0f} GFLOP/s in {limits.precision.name} (median {statistics.median(limits.rates) / 1e9:,.0f})"
    )
    print(
        f"{'tokens/s':<18}{'batch 1':>9}{'of limit':>10}{'batch 8':>10}{'batch 32':>10}"
        f"{f'prefill {LONG_PROMPT}':>13}{'of limit':>10}"
    )
    for name in names:
        one, eight, most, prefill = (time_of[name, order] for order in (*BATCHES, LONG_PROMPT))
        print(
            f"{name:<18}{1 / one:>9,.0f}{sizes[name] / bandwidth / one:>10.0%}{8 / eight:>10,.0f}{32 / most:>10,.0f}"
            f"{LONG_PROMPT / prefill:>13,.0f}{flops / rate / prefill:>10.0%}"
        )
    for ours, theirs, order, goal in GOALS:
        if theirs in names:
            what = "prefill" if order == LONG_PROMPT else f"batch {order}"
            ratio = time_of[theirs, order] / time_of[ours, order]
            print(f"{ours} / {theirs}, {what}: {ratio:.2f} (goal {goal})")


if __name__ == "__main__":
    main()
