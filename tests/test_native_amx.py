"""AMX in the native kernels; on a processor without AMX, an emulator computes its instructions.

`make test-processors` runs the numeric tests with it.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import commands
from as_processors import built_emulator
from gptworks.kernels.build import MARCH, Unavailable
from gptworks.kernels.library import AMX, library
from gptworks.machine import cpu_flags

NEEDED = {"avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"}

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or not cpu_flags() >= NEEDED or shutil.which("g++") is None,
    reason="AMX is taken under Linux, by kernels built with AVX-512 VNNI and BF16; and g++ builds its emulator",
)

Runs = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A function that runs Python lines in a process with AMX, and returns the values that they put into `found`."""
    if os.environ.get(MARCH):
        pytest.skip("the kernels stand for another processor")
    try:
        if not library().has_bf16_products:
            pytest.skip("the compiler knows no bf16")
    except Unavailable as error:
        pytest.skip(f"no native kernels here: {error}")
    emulator = None if cpu_flags() >= AMX else built_emulator(tmp_path_factory.mktemp("emulator"))

    loading = {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).parent)}
    if emulator is not None:
        loading["LD_PRELOAD"] = str(emulator)

    def run(lines: str, **environment: str) -> dict[str, Any]:
        script = f"import json\nfound = {{}}\n{SETUP}\n{lines}\nprint(json.dumps(found))"
        done = commands.run("-c", script, env=environment, loading=loading, imported=("test_native",))
        assert done.returncode == 0, done.stderr[-2000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    return run


SETUP = """
import ctypes, torch
from gptworks.infer.backends.backend import Chunk
from gptworks.infer.backends.native import NativeBackend
from gptworks.kernels.library import library
from test_native import pack, text, variant

def products():
    count = getattr(ctypes.CDLL(None), "amx_emulator_products", None)
    if count is None:
        return None
    count.restype = ctypes.c_int64
    return count()
"""


def test_amx_is_used_if_the_processor_has_it_and_the_system_grants_it(run: Runs) -> None:
    found = run("found['has'], found['instructions'] = library().has_amx, library().instructions")
    assert found == {"has": True, "instructions": "AVX-512 with VNNI, BF16 and AMX"}
    assert library().has_amx == (cpu_flags() >= AMX)


@pytest.mark.skipif(cpu_flags() >= AMX, reason="the processor's own AMX is right")
@pytest.mark.parametrize("fault", ["REFUSES", "WRONG"])
def test_vectors_compute_if_amx_is_refused_or_wrong(run: Runs, fault: str) -> None:
    lines = """
found['has'], before = library().has_amx, products()
backend = NativeBackend(pack(variant('llama'), 'bf16'), 1, 64)
found['finite'] = backend.compute([Chunk(0, 0, text(40), 40)])[0].isfinite().all().item()
found['more'] = products() - before
"""
    assert run(lines, **{f"AMX_EMULATOR_{fault}": "1"}) == {"has": False, "finite": True, "more": 0}


@pytest.mark.parametrize("march", ["cooperlake", "haswell"])
def test_kernels_for_another_processor_do_not_use_amx(run: Runs, march: str) -> None:
    assert run("found['has'] = library().has_amx", **{MARCH: march}) == {"has": False}


@pytest.mark.parametrize("kind", ["bf16", "int8", "a cache in bf16"])
def test_a_row_is_the_same_in_any_company(run: Runs, kind: str) -> None:
    """One row, a few (int8: by vector instructions), a tile, more, and enough for several threads give the same
    bits."""
    model = f"pack(variant('qwen3', context_length=128), '{kind}')"
    if kind == "a cache in bf16":
        model = "variant('gpt3, windowed', context_length=128, window=40, d_head=64)"
    lines = f"""
backend = NativeBackend({model}, 2, 128, dtype=torch.bfloat16)
ids = text(100)
whole = backend.compute([Chunk(0, 0, ids, 100)])[0]
found['used'] = products()
found['different'] = []
for sizes in ([1] * 100, [2] * 50, [3, 4, 5, 16, 17, 15, 32, 8], [31, 33, 36], [64, 36]):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        parts, at = [], 0
        for size in sizes:
            parts.append(backend.compute([Chunk(1, at, ids[at:at + size], size)])[0])
            at += size
        if not torch.equal(torch.cat(parts), whole):
            found['different'].append([sizes[0], threads])
"""
    found = run(lines)
    assert found["used"] != 0
    assert found["different"] == []


@pytest.mark.parametrize(
    "model",
    ["'qwen3'", "'qwen3', n_heads=8, n_kv_heads=1", "'gpt3, windowed', d_head=64", "'modern', d_head=96, window=40"],
)
def test_attention_over_a_cache_in_bf16_is_near_the_models_own(run: Runs, model: str) -> None:
    lines = f"""
from test_native import CONTEXT, check, expected
model = variant({model}, context_length=1200)
check(model, NativeBackend(model, 3, CONTEXT, dtype=torch.bfloat16), near=0.02)
found['used'] = products() != 0
ids = text(1100)
wanted = expected(model, ids, 3)
backend = NativeBackend(model.float(), 1, 1200, dtype=torch.bfloat16)
backend.compute([Chunk(0, 0, ids[:1090])])
found['error'] = float((backend.compute([Chunk(0, 1090, ids[1090:], 3)])[0] - wanted).abs().max() / wanted.abs().max())
"""
    found = run(lines)
    assert found["used"] and found["error"] < 0.02


def test_nan_stays_with_the_tokens_that_see_it(run: Runs) -> None:
    lines = """
found['wrong'] = []
windowed = {'window': 20, 'window_pattern': ['window'], 'd_head': 64}
for name, changes, end in (('qwen3', {}, 100), ('gpt3, windowed', windowed, 60)):
    model = variant(name, context_length=128, n_layers=1, **changes)
    head = [id for id in range(model.config.vocab_size) if id != 5]  # its row is the embedding's
    ids = [id + (id == 5) for id in text(100)]
    compute = lambda: NativeBackend(model, 1, 128, dtype=torch.bfloat16).compute([Chunk(0, 0, ids, 100)])[0][:, head]
    ids[40] = 6
    clean = compute()
    ids[40] = 5
    for value in (float('nan'), float('inf')):
        model.token_embedding.weight.data[5] = value
        logits = compute()
        if not torch.equal(logits[:40], clean[:40]) or not torch.equal(logits[end:], clean[end:]):
            found['wrong'].append([name, value, 'it reached another token'])
        if logits[40:end].isfinite().any():
            found['wrong'].append([name, value, 'it vanished'])
found['used'] = products() != 0
"""
    assert run(lines) == {"wrong": [], "used": True}


def test_with_int8_it_computes_the_bits_of_vectors(run: Runs) -> None:
    """Integer sums are exact in any order."""
    lines = """
backend = NativeBackend(pack(variant('gpt2', context_length=128), 'int8'), 1, 128, dtype=torch.float32)
logits = backend.compute([Chunk(0, 0, text(70), 70)])[0]
found['has'], found['logits'] = library().has_amx, logits.double().tolist()
"""
    tiles, vectors = run(lines), run(lines, **{MARCH: "cooperlake"})
    assert (tiles["has"], vectors["has"]) == (True, False)
    assert tiles["logits"] == vectors["logits"]


def test_attention_uses_it_and_gives_the_same_bits_with_any_number_of_threads(run: Runs) -> None:
    lines = """
from gptworks.model.scores import attend
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, 3, 150, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3))
results = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    before, out = products(), attend(q, k, v)
    results.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
    found['used'] = products() != before or products() is None
found['same'] = all(torch.equal(a, b) for a, b in zip(*results))
"""
    assert run(lines) == {"used": True, "same": True}
