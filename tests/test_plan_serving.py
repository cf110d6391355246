"""The planned memory of serving, compared with what the engine holds and with tensors counted while they exist."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import gptworks
import hf
import test_native
import test_stream
import tiny
from gptworks.choices import LoadedWeights
from gptworks.errors import UserError
from gptworks.infer.backends import native
from gptworks.infer.backends.backend import Chunk, TorchBackend
from gptworks.infer.engine import load
from gptworks.model import scores
from gptworks.model.gpt import GPT
from gptworks.model.shapes import ShapesOnly
from gptworks.planning import serving as planning_serving
from gptworks.planning.device_table import find_device
from gptworks.planning.devices import this_cpu
from gptworks.planning.inference import kv_cache_bytes
from gptworks.planning.memory import generation_peak
from gptworks.planning.serving import serving, step_bytes
from gptworks.planning.setting import Setting
from gptworks.quantize.convert import quantize_model
from gptworks.training.rehearsal.trace import LiveBytes
from test_engine import byte_tokenizer

SIZES = {"vocab_size": 256, "context_length": 200, "n_layers": 3, "d_model": 64, "n_heads": 4, "n_kv_heads": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = GPT(tiny.plain_model(**SIZES, tie_embeddings=False))
    return hf.make_run(tmp_path_factory.mktemp("runs") / "served", model, byte_tokenizer())


@pytest.mark.parametrize("weights", get_args(LoadedWeights))
@pytest.mark.parametrize("cache", [None, torch.int8])
def test_weights_keys_and_values_are_those_that_the_engine_holds(run: Path, weights: Any, cache: Any) -> None:
    engine = load(run, n_slots=5, slot_tokens=150, weights=weights, cache_dtype=cache, device="cpu")
    names = {"cache": "int8"} if cache is not None else {}
    sheet = gptworks.plan_serving(run, requests=5, context=150, weights=weights, **names)
    if engine.warm_up() == sheet.cache_bytes:
        assert engine.held_bytes == sheet.weights_bytes + sheet.tables_bytes + sheet.cache_bytes
    else:  # where the C++ engine cannot be built, torch keeps other formats
        assert "torch" in str(engine.backend_description)


REFUSED: dict[str, dict[str, Any]] = {
    "experts": {"n_experts": 4, "mlp": "swiglu"},
    "norms after": {"norm_placement": "after"},
    "attention softcap": {"attention_softcap": 30.0},
    "logit softcap": {"logit_softcap": 30.0},
    "whole qk_norm": {"qk_norm": "whole"},
    "by length": {"rope_scaling": {"type": "dynamic", "factor": 4}},
    "d_head": {"d_model": 96, "n_heads": 4},
    "d_model": {"d_model": 56, "d_head": 16},
    "d_ff": {"d_ff": 72},
}
ARCHITECTURES = {"plain": {}, **test_native.VARIANTS, **test_stream.ON, **REFUSED}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_engine_is_planned_that_computes_the_model(name: str) -> None:
    config = tiny.plain_model(**test_native.BASE | ARCHITECTURES[name])
    in_cpp = native.refusal(GPT(config)) is None
    assert not (in_cpp and name in REFUSED)
    planned = serving(config, this_cpu(), 1, 30, weights="bf16")
    assert planned.cache == ("bf16" if in_cpp else "fp32")
    vectors = kv_cache_bytes(config, 32 if in_cpp else 30, 2 if in_cpp else 4)
    assert planned.cache_bytes == vectors  # C++'s cache has blocks of 16 tokens
    assert serving(config, find_device("t4"), 1, weights="bf16").cache == "fp32"


@pytest.mark.parametrize("name", ["experts", "norms after", "attention softcap"])
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_torch_on_a_cpu_needs_no_more_than_is_planned(name: str, weights: Any) -> None:
    config = tiny.plain_model(**SIZES | REFUSED[name] | {"context_length": 2048, "d_model": 256})
    model = GPT(config).eval()
    backend = TorchBackend(model if weights == "fp32" else quantize_model(model, weights), 8, 2048)
    with torch.inference_mode(), LiveBytes() as live:
        peaks = []
        for chunks in ([Chunk(0, 1536, [1] * 512)], [Chunk(slot, 2047, [1]) for slot in range(8)]):
            before, live.peak_bytes = live.now_bytes, 0
            backend.compute(chunks)
            peaks.append(live.peak_bytes - before)
    assert max(peaks) <= serving(config, this_cpu(), 8, weights=weights).workspace_bytes < 3 * max(peaks)


def test_a_quantized_run_is_planned_as_it_is_stored(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 300, encoding="ascii")
    options = ("--weights", "int8", "--text", tmp_path / "text.txt")
    assert tiny.gptworks("quantize", run, tmp_path / "small", *options).returncode == 0
    sheet = gptworks.plan_serving(tmp_path / "small", requests=1)
    assert sheet.weights == "int8" and gptworks.plan_serving(run, requests=1).weights == "fp32"


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("cache", [torch.float32, torch.int8])
def test_attention_on_accelerators_copies_what_is_planned(
    n_kv_heads: int, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 24 texts on the meta device, whose tensors are counted as an accelerator's: keys and values outweigh
    all else."""
    monkeypatch.setattr(scores, "takes_groups", lambda device, masked: False)  # as on CUDA with a mask
    monkeypatch.setattr(scores.F, "scaled_dot_product_attention", lambda q, *_, **__: torch.empty_like(q))  # fused
    config = tiny.plain_model(**SIZES | {"n_kv_heads": n_kv_heads, "context_length": 600})
    parts = [(slot, 599, 1) for slot in range(24)]
    with torch.inference_mode(), LiveBytes(counts_meta=True) as live:
        with ShapesOnly():
            backend = TorchBackend(GPT(config).eval(), 24, 600, dtype=cache)
        held_bytes = live.now_bytes
        tokens = torch.zeros(1, 24, dtype=torch.int64, device="meta")
        backend.model.logits(backend.model.features(tokens, backend.cache.rows(parts))[0])
    planned = step_bytes(config, 24, 600, 4, cache.itemsize)
    assert planned == pytest.approx(live.peak_bytes - held_bytes, rel=0.03)


def test_texts_generated_in_training_on_an_accelerator_count_attentions_copies() -> None:
    config = tiny.plain_model(**SIZES)
    setting = Setting(config, 1, "bf16", on_cpu=False, n_texts=8, text_tokens=100)
    with_copies, cpu = generation_peak(setting), generation_peak(Setting(config, 1, n_texts=8, text_tokens=100))
    copies = 2 * 8 * 100 * 16 * (2 + 4) * 2  # keys and values, texts, tokens, head width, heads and repeated ones, bf16
    assert with_copies.parts["temporary"] == pytest.approx(copies + 4 * 8 * 256, rel=0.01)
    assert "temporary" not in cpu.parts


def test_the_figures_of_a_large_model_by_hand() -> None:
    """Llama 2 7B: 6,738,415,616 parameters; 32 layers, 32 heads of 128, 4,096 tokens."""
    sheet = gptworks.plan_serving("llama-2-7b", requests=4, device="a100 40")
    assert sheet.weights_bytes == 4 * 6_738_415_616
    assert sheet.cache_bytes == 4 * (2 * 32 * 32 * 128 * 4096 * 4)
    # 26.95 GB and 3 × 4.295 GB are 39.84 GB, and a part of a prompt takes 135 MB
    assert not sheet.fits and sheet.most_requests == 3
    reads = 4 * (6_738_415_616 - 32_000 * 4096)  # the embedding is looked up, not multiplied
    assert sheet.most_tokens_per_second == pytest.approx(4 * 1.555e12 / reads)
    assert "DOES NOT FIT" in repr(sheet)


@pytest.mark.parametrize("most", [1, 7, 8, 9])
def test_the_search_for_requests_ends_at_its_bound(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_serving, "MOST_REQUESTS", most)
    assert serving(tiny.plain_model(**SIZES), find_device("h100"), 1).most_requests == most


def test_as_many_requests_fit_as_it_says() -> None:
    config = tiny.plain_model(**SIZES)
    for name in ("8 GB", "m1", "t4"):
        device = find_device(name)
        most = serving(config, device, 1).most_requests
        assert serving(config, device, most).fits and not serving(config, device, most + 1).fits


@pytest.mark.parametrize(
    ("options", "words"),
    [({"requests": 0}, "--requests 0 is below 1"), ({"context": 5000}, "give 1 to 1024"), ({"context": 0}, "give 1")],
)
def test_mistakes_are_explained(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        gptworks.plan_serving("gpt2", **options)


def test_the_command_prints_it_and_ends_with_3_if_it_does_not_fit() -> None:
    shown = tiny.gptworks("plan", "gpt2", "--serve", "--requests", "16", "--device", "rtx 4060")
    assert shown.returncode == 0 and "1.208 GB in fp32" in shown.stdout and "requests that fit" in shown.stdout
    assert tiny.gptworks("plan", "llama-2-7b", "--serve", "--device", "8 GB").returncode == 3
    for options, words in ((("--requests", "3"), "is for --serve"), (("--serve", "--hours", "3"), "is about training")):
        refused = tiny.gptworks("plan", "gpt2", *options)
        assert refused.returncode == 2 and words in refused.stderr


def test_this_machine_is_the_device_by_default() -> None:
    assert gptworks.plan_serving("gpt2-tiny").device.name == this_cpu().name
