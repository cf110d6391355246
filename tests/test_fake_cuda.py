"""Training steps, generation and evaluation on fake CUDA tensors: what a GPU would refuse or wait for.

Nothing runs on a GPU. `make test-fake-cuda` runs all; `make test` only what needs no fake CUDA.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

import tiny
from gptworks.kernels import build
from gptworks.kernels.build import Unavailable
from gptworks.training.rehearsal.fake_cuda import FakeStep, guard_library, preloading, step_on_fake_cuda
from gptworks.training.rehearsal.trace import Rehearsal

STEP = TypeAdapter(FakeStep)
MODEL = tiny.plain_model(vocab_size=16, context_length=8, n_layers=1, d_model=16, n_heads=2)
WORKER = Path(__file__).with_name("fake_cuda_worker.py")


def found(what: str, folder: Path) -> dict[str, Any]:
    """What the worker found in each case, by the case's name."""
    try:
        guard = guard_library()
    except Unavailable as error:
        pytest.skip(str(error))
    command = [sys.executable, str(WORKER), what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=preloading(guard), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FakeStep]:
    return {name: STEP.validate_python(one) for name, one in found("steps", tmp_path_factory.mktemp("steps")).items()}


@pytest.mark.fake_cuda
def test_no_step_has_a_fault_and_each_waits_once(steps: dict[str, FakeStep]) -> None:
    assert len(steps) > 40
    faults = {name: step.faults for name, step in steps.items() if step.faults or step.not_checked}
    assert not faults
    for name, step in steps.items():
        assert step.n_operations > 100, name
        reads = [one for one in step.findings if one.kind == "host read" and one.count]
        assert sum(one.count for one in reads) == 1, (name, reads)


@pytest.mark.fake_cuda
def test_a_steps_products_have_the_dtype_of_its_precision(steps: dict[str, FakeStep]) -> None:
    for name, dtype in (("bf16", "bfloat16"), ("fp32", "float32"), ("fp16", "float16"), ("dropout", "bfloat16")):
        assert [kind for kind, _ in steps[name].products] == [dtype], name


@pytest.mark.fake_cuda
def test_each_block_is_one_graph(steps: dict[str, FakeStep]) -> None:
    packed = {"lora over int8", "lora over int4"}  # `train.compile=auto` leaves them uncompiled
    assert {name: step.n_graphs for name, step in steps.items() if step.n_graphs != 2} == dict.fromkeys(packed)


@pytest.mark.fake_cuda
def test_only_tokens_travel_while_a_text_is_generated(tmp_path: Path) -> None:
    of_parts = found("generation", tmp_path)
    for name, findings in of_parts.items():
        # experts: the router computes in float32; few tokens are sent by counts on the host
        found_here = [(kind, count) for kind, _, where, count in findings if not where.startswith("model/moe.py")]
        assert found_here == ([("host read", 1)] if "sample" in name or "evaluate" in name else []), (name, findings)


@pytest.mark.fake_cuda
def test_the_memory_of_a_step_is_as_planned(tmp_path: Path) -> None:
    """Models with LayerNorm: torch's RMSNorm for fake tensors saves a tensor more than its kernel for CUDA."""
    for settings, (traced_bytes, planned_bytes) in found("memory", tmp_path).items():
        # experts: the plan counts copies of their matrices that grouped products do not keep
        assert planned_bytes == pytest.approx(traced_bytes, rel=0.03 if "experts" in settings else 0.002), settings


@pytest.mark.fake_cuda
def test_planted_faults_are_found(tmp_path: Path) -> None:
    from fake_cuda_worker import FAULTS

    assert len(FAULTS) >= 20
    of_faults = {name: STEP.validate_python(one) for name, one in found("planted", tmp_path).items()}
    missed = {
        name: of_faults[name]
        for name, fault in FAULTS.items()
        if not any(
            one.kind == fault.kind and one.where.partition(":")[0] == fault.file for one in of_faults[name].faults
        )
    }
    assert not missed


def not_built(*_: Any, **__: Any) -> bytes:
    raise Unavailable("g++ could not compile it (no header).")


@pytest.mark.parametrize(
    ("place", "name", "value", "reason"),
    [
        (torch.version, "cuda", "13.0", "needs a CPU build of torch"),
        (sys, "platform", "darwin", "this system is darwin"),
        (build, "find_compiler", lambda: None, "needs a C++ compiler"),
        (build, "build", not_built, "could not compile it"),
    ],
    ids=["a torch for GPUs", "not Linux", "no compiler", "not compiled"],
)
def test_where_nothing_can_be_checked_the_reason_is_given(
    place: Any, name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)  # also where torch is built for GPUs
    monkeypatch.setattr(place, name, value)
    step = step_on_fake_cuda(Rehearsal(MODEL, tiny.plain_training(max_steps=1), "cuda"))
    assert step.not_checked is not None and reason in step.not_checked
    assert not step.findings and not step.n_operations


def test_a_process_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "other.so"  # no fake CUDA: the loader refuses it and goes on
    library.write_bytes(b"")
    monkeypatch.setattr("gptworks.training.rehearsal.fake_cuda.guard_library", lambda: library)
    step = step_on_fake_cuda(Rehearsal(MODEL, tiny.plain_training(max_steps=1), "cuda"))
    assert step.not_checked is not None and "was not loaded" in step.not_checked
