"""Training, generation and runs on a real CUDA device, next to the CPU. `make test-cuda` runs them where a GPU is."""

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from fake_cuda_worker import BASE, steps
from gptworks.checkpoint import checkpoints, remove_checkpoint
from gptworks.config import ModelConfig, TrainConfig
from gptworks.data.samples import Batch
from gptworks.evaluation.loss import evaluate_loss
from gptworks.infer.backends.backend import Chunk, TorchBackend
from gptworks.infer.sampling import Sampler, SamplingSettings, sample
from gptworks.model.gpt import GPT
from gptworks.quantize.convert import quantize_model
from gptworks.recipe import parse_recipe
from gptworks.terminal import Console
from gptworks.training import loop
from gptworks.training.distributed.parallel import compile_blocks, compiles_blocks
from gptworks.training.objectives.next_token import count_targets
from gptworks.training.record.display import Display
from gptworks.training.record.metrics import read_metrics
from gptworks.training.rehearsal.trace import Rehearsal
from gptworks.training.step import TrainStep

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

CUDA, CPU = torch.device("cuda"), torch.device("cpu")

TOLERANCE = {"fp32": (1e-4, 1e-3), "fp16": (3e-3, 2e-2), "bf16": (1e-2, 5e-2)}
"""By precision: relative differences of losses, and of gradient norms, from those of the CPU in float32."""

with tempfile.TemporaryDirectory() as folder:
    KINDS = {name: kind for name, kind in steps(Path(folder)) if name != "distillation"}  # its teacher is in the folder
"""The kinds of step that `make test-fake-cuda` checks."""


def batch_of(rehearsal: Rehearsal, device: torch.device) -> Batch:
    """Return random tokens and their successors; if a row has several texts, also the positions in their texts."""
    shape = (rehearsal.train.batch_size, rehearsal.model.context_length + 1)
    tokens = torch.randint(rehearsal.model.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    if rehearsal.several_texts:
        batch = (*batch, torch.arange(shape[1] - 1).remainder(24).expand_as(batch[0]).contiguous())
    return tuple(x.to(device) for x in batch)


def new_steps(rehearsal: Rehearsal) -> tuple[TrainStep, TrainStep]:
    """Return the step on CUDA, and on the CPU in float32 with the same weights."""
    if rehearsal.model.init != "induction":  # zeros would hide what comes before them
        model = rehearsal.model.model_copy(update={"zero_init_projections": False})
        rehearsal = replace(rehearsal, model=model)
    torch.manual_seed(0)
    other = replace(rehearsal, device="cpu", precision="fp32").new_step()
    for (
        name,
        parameter,
    ) in other.model.named_parameters():  # with packed matrices, all are zeros before a base is loaded
        if "lora" not in name and not parameter.any():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.02)
    for name, buffer in other.model.named_buffers():
        if buffer.dtype in (torch.int8, torch.uint8):
            buffer.random_()
        elif name.endswith(".scale"):
            buffer.fill_(3e-4 if other.model.get_buffer(f"{name[:-5]}weight").dtype == torch.int8 else 3e-3)
    step = rehearsal.new_step()
    step.model.load_state_dict(other.model.state_dict())
    return step, other


def take(step: TrainStep, rehearsal: Rehearsal, batch: Batch) -> tuple[float, float]:
    """Do a step; return its loss and gradient norm."""
    size = rehearsal.train.micro_batch_size
    losses = step.accumulate(list(zip(*(x.split(size) for x in batch), strict=True)), count_targets(batch))
    norm = step.gradient_norm()
    step.apply(norm)
    return losses.loss, norm


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dropout"])  # it draws other numbers
def test_a_step_has_the_cpus_loss_and_gradients(kind: str) -> None:
    rehearsal = KINDS[kind]
    step, other = new_steps(rehearsal)
    off_losses, off_norms = TOLERANCE[rehearsal.precision]
    for _ in range(2):
        loss, norm = take(step, rehearsal, batch_of(rehearsal, CUDA))
        wanted, wanted_norm = take(other, rehearsal, batch_of(rehearsal, CPU))
        print(f"\n{kind}: loss {loss} {loss - wanted:+.1e}, norm {norm} {norm - wanted_norm:+.1e}")
        assert loss == pytest.approx(wanted, rel=off_losses, abs=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=off_norms, abs=1e-6)


@pytest.mark.parametrize("compiled", ["none", "block"])
@pytest.mark.parametrize("several_texts", [False, True])
def test_a_step_has_the_same_bits_each_time(several_texts: bool, compiled: str) -> None:
    """At this size, flash attention's backward pass adds in another order each time unless it is told not to."""
    model = ModelConfig(vocab_size=512, context_length=1024, n_layers=2, d_model=768, n_heads=12)
    settings = TrainConfig(max_steps=1, batch_size=16, micro_batch_size=16)
    rehearsal = Rehearsal(model, settings, "cuda", "bf16", several_texts=several_texts)
    step = new_steps(rehearsal)[0]
    compile_blocks(step.model, compiled, CUDA)
    batch, found = batch_of(rehearsal, CUDA), []
    for _ in range(2):
        step.optimizer.zero_grad()
        step.accumulate([batch], count_targets(batch))
        found.append([parameter.grad for parameter in step.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_once(kind: str) -> None:
    rehearsal = KINDS[kind]
    step, batch = rehearsal.new_step(), batch_of(rehearsal, CUDA)
    for _ in range(2):
        take(step, rehearsal, batch)
    targets = count_targets(batch)
    micro_batches = list(zip(*(x.split(rehearsal.train.micro_batch_size) for x in batch), strict=True))
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step.accumulate(micro_batches, targets)
            step.apply(step.gradient_norm())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{wait.filename}:{wait.lineno}" for wait in waits if "torch/cuda/__init__" not in wait.filename]
    expected = any(getattr(one, "expected_on_cuda", None) for one in step.optimizer.parts)
    assert len(places) == 1 or expected, places


COMPILED = ["bf16", "experts", "packed documents in windows", "gpt2", "laboratory", "grouped queries in windows"]


@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_step_has_the_loss_of_an_uncompiled_one(kind: str) -> None:
    rehearsal = KINDS[kind]
    torch._dynamo.reset()
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        step = rehearsal.new_step()
        assert compiles_blocks(step.model, rehearsal.train.compile, CUDA)
        for block in step.model.blocks if compiled else ():
            block.compile(fullgraph=True)
        found.append([take(step, rehearsal, batch_of(rehearsal, CUDA)) for _ in range(2)])
    for (loss, norm), (wanted, wanted_norm) in zip(*found, strict=True):
        print(f"\n{kind}: loss {loss / wanted - 1:+.1e}, norm {norm / wanted_norm - 1:+.1e}")
        assert loss == pytest.approx(wanted, rel=TOLERANCE["bf16"][0])
        assert norm == pytest.approx(wanted_norm, rel=TOLERANCE["bf16"][1])


# ----------------------------------------------------------------------------------------------- generation

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped queries in windows": {"n_kv_heads": 2, "window": 16},
    "learned positions": {"position": "learned", "smear": True},
    "softcaps": {"attention_softcap": 5.0, "logit_softcap": 5.0},
    "experts": {"n_experts": 4},
    "dynamic rope": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
}


def model(settings: dict[str, Any]) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(**(BASE | {"zero_init_projections": False} | settings))).eval()


def logits_of(weights: GPT, n_texts: int = 4, n_new: int = 12) -> torch.Tensor:
    """Return logits [n_new, n_texts, V] after prompts of 20 tokens and fixed continuations."""
    backend, given = TorchBackend(weights, n_texts, 64), torch.Generator().manual_seed(3)
    prompts = torch.randint(512, (n_texts, 20 + n_new), generator=given).tolist()
    found = []
    with torch.inference_mode():
        for slot in range(n_texts):
            backend.compute([Chunk(slot, 0, prompts[slot][:20])], True)
        for i in range(n_new):
            chunks = [Chunk(slot, 20 + i, [prompts[slot][20 + i]]) for slot in range(n_texts)]
            found.append(torch.stack([one.float().cpu() for one in backend.compute(chunks, True)]))
    return torch.stack(found)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_the_cpu(kind: str) -> None:
    weights = model(MODELS[kind])
    wanted = logits_of(weights)
    torch.testing.assert_close(logits_of(weights.to(CUDA)), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("experts", "dynamic rope")])
def test_graphs_decode_as_single_kernels_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model(MODELS[kind]).to(CUDA)
    backend = TorchBackend(weights, 5, 64)
    assert backend._graphs is not None
    monkeypatch.setattr("gptworks.infer.backends.backend.captures_graphs", lambda _: False)
    other = TorchBackend(weights, 5, 64)
    assert other._graphs is None
    given = torch.randint(512, (5, 40), generator=torch.Generator().manual_seed(2)).tolist()
    for slot in range(5):
        for one in (backend, other):
            one.compute([Chunk(slot, 0, given[slot][: 10 + slot])], True)
    for step in range(12):
        slots = [slot for slot in range(5) if (step + slot) % 4]  # three or four texts
        if step == 6:
            with torch.inference_mode():
                weights.norm.weight.data = 2 * weights.norm.weight  # other weights
        if step == 8:
            backend.grow(6, 64, [30] * 5)
        chunks = [Chunk(slot, 10 + slot + step, [given[slot][10 + slot + step]]) for slot in slots]
        skipped = [Chunk(slot, 10 + slot + step, [given[slot][10 + slot + step]]) for slot in {*range(5)} - {*slots}]
        found, wanted = (torch.cat(one.compute(chunks, True)) for one in (backend, other))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for one in (backend, other):
            one.compute(skipped, True)
    assert {*backend._graphs._graphs} <= {1, 2, 4}


@pytest.mark.parametrize("packed", ["bf16", "int8", "int4"])
def test_packed_weights_give_the_cpus_logits(packed: str) -> None:
    wanted = logits_of(quantize_model(model({}), packed))
    found = logits_of(quantize_model(model({}), packed).to(CUDA))
    off = (found - wanted).norm() / wanted.norm()
    print(f"\n{packed}: {off:.1e}")
    assert off < 2e-2


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}, {}])
def test_the_same_seeds_draw_the_same_tokens(settings: dict[str, Any]) -> None:
    logits = 3 * torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    drawn = []
    for device in (CUDA, CPU):
        texts = [Sampler(SamplingSettings(seed=seed, **settings), [1, 2]) for seed in range(1000)]
        drawn.append(sample(logits.to(device).expand(len(texts), -1), texts))
    assert sum(a != b for a, b in zip(*drawn, strict=True)) <= 2  # sums are rounded differently


def test_an_evaluation_has_the_cpus_loss() -> None:
    weights = model({})
    windows = [(torch.randint(512, (64,)), torch.randint(512, (64,))) for _ in range(6)]
    wanted = evaluate_loss(weights, windows)
    assert evaluate_loss(weights.to(CUDA), windows).loss == pytest.approx(wanted.loss, rel=1e-4)


# ----------------------------------------------------------------------------------------------------- runs


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("compiled", ["none", "block"])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(compiled: str, tmp_path: Path) -> None:
    recipe = parse_recipe(tiny.recipe_tree(tmp_path, device="cuda", compile=compiled))
    display = Display(Console(quiet=True))
    loop.train(recipe, display=display)
    wanted, weights = losses(recipe.run_dir), checkpoints(recipe.run_dir)[0].model_tensors()
    assert len(wanted) == 20
    remove_checkpoint(checkpoints(recipe.run_dir)[0])
    loop.train(recipe, resume=True, display=display)
    assert losses(recipe.run_dir) == wanted
    for name, tensor in checkpoints(recipe.run_dir)[0].model_tensors().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_has_the_losses_of_no_ranks(strategy: str, tmp_path: Path) -> None:
    """NCCL, FSDP's hooks and its checkpoints on a GPU: on one GPU, there is nothing to share but all of it runs."""
    found = []
    for name, parallel in (("none", {}), (strategy, {"strategy": strategy})):
        folder = tmp_path / name
        folder.mkdir()
        recipe = tiny.write_recipe(folder, device="cuda", precision="fp32", parallel=parallel)
        done = tiny.gptworks("launch", "--nproc=1", recipe)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(losses(folder / "run"))
    assert len(found[0]) == 20
    assert found[1] == pytest.approx(found[0], rel=1e-3)
