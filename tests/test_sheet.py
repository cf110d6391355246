"""`describe` and `plan`: figures against the built objects and arithmetic by hand, text output, and the page."""

import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from safetensors.torch import save_file

import reference_page
from gptworks.cli import design
from gptworks.config import ModelConfig
from gptworks.data.batches import Batches
from gptworks.data.shards import TokenShards
from gptworks.describe.demonstration import demonstrate
from gptworks.describe.diagram import diagram
from gptworks.describe.plan_sheet import PlanSheet
from gptworks.describe.plan_tables import plan_json
from gptworks.describe.published import published_figures
from gptworks.describe.sheet import describe
from gptworks.errors import UserError
from gptworks.infer.backends.cache import SlotCache
from gptworks.model.gpt import GPT
from gptworks.planning.run import Plan, plan
from gptworks.planning.steps import DataSize
from gptworks.presets import PRESETS, preset
from gptworks.recipe import parse_model, parse_recipe
from gptworks.units import readable
from test_memory import cache_bytes
from tiny import plain_model


def planned(n_train_tokens: int | None = None, model: dict[str, Any] | None = None, **train: Any) -> Plan:
    recipe = parse_recipe(
        {
            "model": {"preset": "gpt2-mini", **(model or {})},
            "tokenizer": {"type": "bpe", "vocab_size": (model or {}).get("vocab_size", 512)},
            "data": {"sources": [{"type": "python-stdlib"}]},
            "train": {"batch_size": 32, **train},
        }
    )
    return plan(recipe, DataSize(n_train_tokens))


def printed(thing: Any, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(thing)
    return console.export_text()


# describe ---------------------------------------------------------------------------------------------------


def test_json_of_document_000() -> None:
    sheet = json.loads(json.dumps(describe(preset("custom-300m"), "custom-300m").to_json()))
    assert sheet["name"] == "custom-300m"
    assert sheet["model"]["d_model"] == 1024
    assert sheet["parameters"]["total"] == 355_871_744
    assert sheet["parameters"]["embedding"] + sheet["parameters"]["non_embedding"] == 355_871_744
    assert sheet["parameters"]["groups"]["mlp_weights"] == {
        "per_layer": 8_388_608,
        "total": 201_326_592,
        "tensors": {"mlp.up.weight": [4096, 1024], "mlp.down.weight": [1024, 4096]},
    }
    assert sum(group["total"] for group in sheet["parameters"]["groups"].values()) == 355_871_744
    assert sheet["memory"]["weights_fp32_bytes"] == 1_423_486_976
    assert sheet["memory"]["weights_bf16_bytes"] == 711_743_488
    assert sheet["memory"]["kv_cache_fp16_bytes"] == 201_326_592
    assert sheet["memory"]["kv_cache_fp16_bytes_per_token"] == 24 * 2 * 1024 * 2
    assert sheet["flops"]["forward_per_token"] / 1e9 == pytest.approx(0.908, abs=5e-4)
    assert sheet["flops"]["training_per_token"] == 3 * sheet["flops"]["forward_per_token"]
    assert sum(sheet["flops"]["parts_per_token"].values()) == sheet["flops"]["forward_per_token"]


@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 2}, {"window": 16, "window_pattern": ("full", "window")}])
def test_cache_bytes_are_the_caches(changes: dict[str, Any]) -> None:
    config = preset("gpt2-tiny").model_copy(update=changes)
    sheet = describe(config)
    for n_bytes, length in ((sheet.kv_cache_bytes, config.context_length), (sheet.kv_cache_bytes_per_token, 1)):
        assert n_bytes == cache_bytes(SlotCache(config, 1, length, dtype=torch.float16, device="meta"))


def test_published_figures_stand_on_a_preset_and_on_nothing_else() -> None:
    config = preset("llm-200m")
    assert {figure["published"] for figure in describe(config, "any name").to_json()["published"]} >= {200e6, 251e6}
    assert "published" not in describe(config.model_copy(update={"n_layers": 23}), "llm-200m").to_json()


def test_an_unknown_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"Set model\.vocab_size"):
        describe(plain_model(context_length=8, n_layers=1, d_model=8, n_heads=1))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_terminal_sheet_fits_and_says_the_total(name: str, width: int) -> None:
    text = printed(describe(preset(name), name), width)
    assert max(map(cell_len, text.splitlines())) <= min(width, 100)
    assert f"{describe(preset(name)).parameters.total:,}" in text
    assert name in text
    assert "…" not in text


def variant(name: str, **changes: Any) -> ModelConfig:
    return parse_model({"preset": name, **changes}, name)


LABORATORY_ON: dict[str, Any] = {
    "unet_skips": True, "value_residual": True, "attention_gate": True, "smear": True,
    "n_future_tokens": 3,
    "value_embeddings": ("none", "projected", "table"),
}  # fmt: skip
RECTANGLES = {name: preset(name) for name in PRESETS} | {
    "parallel experts": variant("gpt3-175b", n_experts=8, d_ff_shared=49_152, parallel_residual=True, mlp="swiglu"),
    "long words": variant("gpt3-175b", position="rope", rope_theta=123_456_789, rope_fraction=0.5, qk_norm=True,
                          rope_scaling={"type": "dynamic", "factor": 4}, parallel_residual=True),
    "laboratory": variant("gpt3-175b", **LABORATORY_ON),
}  # fmt: skip


@pytest.mark.parametrize("name", RECTANGLES)
def test_the_diagram_is_a_rectangle(name: str) -> None:
    lines = [line for line in diagram(RECTANGLES[name], 80) if line.startswith(("╭", "╰", "│", "║", "╔", "╚"))]
    assert len(lines) > 20
    assert {max(line.rfind(edge) for edge in "╮╯│║╗╝") for line in lines} == {59}


def test_the_diagram_shows_what_the_model_has() -> None:
    grouped = preset("llm-200m").model_copy(
        update={"n_kv_heads": 4, "qk_norm": True, "norm": "rmsnorm", "norm_bias": False}
    )
    text = "\n".join(diagram(grouped))
    assert "24 × block" in text
    assert "2 of 256 × 768" in text
    assert "B × 4 × T × 64" in text
    assert "rotate queries and keys" in text
    assert "SiLU(gate) × up" in text
    assert "head (tied)" in text
    assert "LayerNorm" not in text
    assert "position embedding" not in text
    assert "48 of 96 see 256" in "\n".join(diagram(preset("gpt3-175b-banded")))


def test_the_diagram_shows_experts_biases_and_scaled_positions() -> None:
    text = "\n".join(diagram(preset("moe-115m")))
    assert "router" in text
    assert "8 × 512" in text
    assert "8 experts, 2 for each token:" in text
    assert "B × T × 2 × 1,024" in text
    assert "sum, weighted by the router" in text
    assert "shared" not in text
    changed = variant("moe-115m", d_ff_shared=256, mlp_bias=True, attention_bias="out", rope_fraction=0.5,
                      rope_pattern=("rope", "none"), rope_scaling={"type": "yarn", "factor": 4}, attention_scale=0.2,
                      embedding_scale=12.0, residual_scale=0.22, logit_divisor=8.0, norm_placement="after",
                      qk_norm="whole", window=64, window_pattern=("full", "window"),
                      window_rope_theta=500.0)  # fmt: skip
    text = "\n".join(diagram(changed))
    assert "+ a shared expert for every token" in text
    assert "2 of 256 × 512 + bias" in text
    assert re.search(r"output projection +512 × 512 \+ bias", text)
    assert re.search(r"query +512 × 512 │", text)
    assert f"{changed.n_layers // 2} of {changed.n_layers} layers, first 32 of 64, θ = 10,000" in text
    assert re.search(r"RMSNorm of queries and keys +512 \+ \d+", text)
    assert text.index("output projection") < text.index("RMSNorm  ") < text.index("router")
    assert all(text.count(words) == n for words, n in (("× 12 ", 1), ("× 0.22 ", 2), ("/ 8 ", 1)))
    assert "θ = 10,000, 500 in windows" in text
    assert "yarn, × 4 from 256, not in windows" in text
    assert "softmax(q·kᵀ × 0.2)" in text


def test_parallel_parts_hang_on_one_fork() -> None:
    serial, parallel = (diagram(variant("gpt2", parallel_residual=choice)) for choice in (False, True))
    assert sum("├────" in line for line in serial) == 2
    assert sum("├────" in line for line in parallel) == 1
    assert sum("+◄───╯" in line for line in serial) == sum("+◄───╯" in line for line in parallel) == 2


def test_experts_are_listed_once() -> None:
    text = printed(describe(variant("moe-115m", mlp_bias=True, n_experts=16, d_ff_shared=256)), 100)
    assert "16 × (gate up [1,024 × 512] · down [512 × 1,024])" in text
    assert "16 × (gate up [1,024] · down [512])" in text
    assert "experts.1" not in text


def test_active_parameters_and_the_operations_of_experts() -> None:
    sheet = describe(preset("mixtral-8x7b")).to_json()
    assert sheet["parameters"]["total"] == 46_702_792_704
    assert sheet["parameters"]["active"] == 12_879_925_248
    assert len(sheet["parameters"]["groups"]["mlp_weights"]["tensors"]) == 24
    assert describe(preset("gpt2")).to_json()["parameters"]["active"] == 124_439_808
    text = printed(describe(preset("mixtral-8x7b")), 100)
    assert re.search(r"for a token +394,305,536 +12,879,925,248", text)
    parts = describe(variant("mixtral-8x7b", d_ff_shared=1024)).to_json()["flops"]["parts_per_token"]
    assert parts["router"] == 2 * 32 * 4096 * 8
    assert parts["experts"] == 2 * 32 * 3 * 4096 * 14_336 * 2
    assert parts["shared_expert"] == 2 * 32 * 3 * 4096 * 1024


def test_markdown_has_the_diagram_and_well_formed_tables() -> None:
    text = describe(preset("custom-300m"), "custom-300m").to_markdown()
    assert text.startswith("# custom-300m\n")
    assert "```text\n   token ids" in text
    assert "| total |  | 12,596,224 | 355,871,744 |" in text
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.strip().splitlines()}) == 1


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"), (999, "B", "999 B"), (1000, "B", "1 kB"), (1_423_486_976, "B", "1.423 GB"),
        (9.524e14, "FLOP", "952.4 TFLOP"), (999_999, "B", "1000 kB"), (1234567, "tokens", "1,234,567"),
    ],
)  # fmt: skip
def test_readable(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text


# published beside exact: figures typed in by hand -----------------------------------------------------------

FIGURES = [
    ("custom-300m", "parameters", 300_124_416, 355_871_744, 0),
    ("custom-300m", "feed-forward weights", 96_534_784, 201_326_592, 0),
    ("custom-300m", "forward, a token", 37.8e9, 0.908e9, 5e5),
    ("custom-300m", "forward, a step of 512 × 2048", 39.7e12, 952e12, 5e11),
    ("custom-300m", "training, a step of 512 × 2048", 119.1e12, 2857e12, 5e11),
    ("custom-300m", "fp32 weights", 1.14e9, 1.42e9, 5e6),
    ("custom-300m", "AdamW moments, fp32", 2.28e9, 2.85e9, 5e6),
    ("custom-300m", "KV cache, fp16, 2048 tokens", 256e6, 201e6, 5e5),
    ("custom-300m", "fp32 logits of 128 × 2048", "in 8 GB", 52.7e9, 5e7),
    ("custom-300m", "attention weights", 100_663_296, 24 * 4 * 1024 * 1024, 0),
    ("custom-300m", "token embedding, share", 17.15, 100 * 50257 * 1024 / 355_871_744, 1e-9),
    ("custom-300m", "position embedding, share", 0.70, 100 * 2048 * 1024 / 355_871_744, 1e-9),
    ("custom-300m", "attention, share", 33.54, 100 * 100_663_296 / 355_871_744, 1e-9),
    ("custom-300m", "feed-forward, share", 32.17, 100 * 201_326_592 / 355_871_744, 1e-9),
    ("custom-300m", "layer norms, share", 0.03, 100 * 98_304 / 355_871_744, 1e-9),
    ("custom-300m", "output layer, share", 17.15, 0, 0),
    ("custom-300m", "saved by the tied head", 51e6, 50257 * 1024, 0),
    ("custom-300m", "tied head saves, share", 17.0, 100 * 51_463_168 / (355_871_744 + 51_463_168), 1e-9),
    ("custom-300m", "attention, a token", 12.6e9, 0.201e9 + 0.201e9, 1e6),
    ("custom-300m", "feed-forward, a token", 25.2e9, 0.403e9, 5e5),
    ("custom-300m", "fp32 gradients", 1.14e9, 1.42e9, 5e6),
    ("custom-300m", "backward, a step of 512 × 2048", 79.4e12, 2 * 952e12, 1e12),
    ("custom-300m", "training in fp32, 128 × 2048", 12.5e9, 1.42e9 + 1.42e9 + 2.85e9 + 52.7e9, 5e7),
    ("custom-300m", "mixed precision, 128 × 2048", 7.4e9, 1.42e9 + 1.42e9 + 2.85e9 + 52.7e9 / 2, 5e7),
    ("custom-300m", "fp16 weights and KV cache", 830e6, 711.7e6 + 201.3e6, 1e5),
    ("custom-300m", "smaller in fp16", 2.0, 2, 0),
    ("custom-300m", "faster in int8", "2–3 ×", None, 0),
    ("custom-300m", "faster in fp16", "1.5–2 ×", None, 0),
    ("custom-300m", "faster with a KV cache", "~10 ×", None, 0),
    ("custom-300m", "generation, 32 to 64 texts", "~1,200 tokens/s", None, 0),
    ("custom-300m", "GPT-2 Small", 117e6, 124_439_808, 0),
    ("custom-300m", "GPT-2 Medium", 345e6, 354_823_168, 0),
    ("custom-300m", "GPT-2 Large", 774e6, 774_030_080, 0),
    ("gpt2-mini", "a block", 788_480, 789_760, 0),
    ("gpt2-mini", "attention, a block", 263_168, 4 * 256 * 256 + 4 * 256, 0),
    ("gpt2-mini", "feed-forward, a block", 525_312, 2 * 256 * 1024 + 1024 + 256, 0),
    ("gpt2-mini", "fp32 weights", 14e6, 4 * 3_487_232, 0),
    ("gpt2-tiny", "forward, 1 × 16 tokens", 0.008234, None, 0),
    ("gpt2-small-untied", "with a vocabulary of 512", 87e6, 86_628_864, 0),
    ("gpt2-small-untied", "fp32 weights", 650e6, 652.1e6, 1e5),
    ("gpt2-small-untied", "forward, 1 × 128 tokens", "2–3 s", None, 0),
    ("vaani-427m", "training steps", 56, 450, 0),
    ("vaani-427m", "attention over 1024 tokens", 94.3e9, 4 * 1024**2 * 1408 * 16, 0),
    ("vaani-427m", "feed-forward over 1024 tokens", 1039.6e9, 2 * 2 * 1024 * 1408 * 5632 * 16, 0),
    ("vaani-427m", "fp32 gradients", 1.63e9, 1.613e9, 5e5),
    ("vaani-427m", "AdamW moments, fp32", "3.26–4.89 GB", 2 * 1.613e9, 1e6),
    ("vaani-427m", "int8 weights", 400e6, 403_254_016, 0),
    ("vaani-427m", "saved by the tied head", 22.5e6, 16000 * 1408, 0),
    ("vaani-427m", "fall of the training loss", 68.0, 68.046, 1e-3),
    ("vaani-427m", "training loss, epoch 3", "0.3113", None, 0),
    ("vaani-427m", "GPT-2 Small, size", 0.5e9, 4 * 124_439_808, 0),
    ("vaani-427m", "LLaMA-7B, size", 13e9, 2 * 6_738_415_616, 0),
    ("llm-200m", "flash attention, faster", "2–4 ×", None, 0),
    ("gpt2-tiny", "parameters", 847_872, 742_528, 0),
    ("gpt2-mini", "parameters", 3_473_408, 3_487_232, 0),
    ("gpt2-mini", "parameters", 3_482_112, 3_487_232, 0),
    ("gpt2-midi", "parameters", "20–40M", 11_139_072, 0),
    ("gpt2-small-untied", "parameters", 163_037_184, 163_037_184, 0),
    ("vaani-427m", "parameters, as stated", 427_442_560, 403_254_016, 0),
    ("vaani-427m", "parameters, as added up", 403_778_304, 403_254_016, 0),
    ("vaani-427m", "forward over 1024 tokens", 1133.9e9, 920.2e9, 5e7),
    ("vaani-427m", "fp32 weights", 1.63e9, 1.613e9, 5e5),
    ("llm-200m", "parameters, by name", 200e6, 265_165_056, 0),
    ("llm-200m", "parameters, as stated", 251e6, 265_165_056, 0),
    ("gpt3-6.7b", "parameters", 6.7e9, 6_658_404_352, 0),
    ("smollm2-135m", "parameters", 134_515_008, 134_515_008, 0),
    ("tinyllama-1.1b", "parameters", 1_100_048_384, 1_100_048_384, 0),
    ("llama-2-7b", "parameters", 6_738_415_616, 6_738_415_616, 0),
    ("qwen3-0.6b", "parameters", 0.6e9, 0.596e9, 5e5),
    ("qwen3-0.6b", "outside the embeddings", 0.44e9, 0.44e9, 5e6),
    ("mixtral-8x7b", "parameters", 46.7e9, 46.7e9, 5e7),
    ("mixtral-8x7b", "active for a token", 12.9e9, 12.9e9, 5e7),
]


@pytest.mark.parametrize(("name", "quantity", "published", "exact", "tolerance"), FIGURES)
def test_published_beside_exact(
    name: str, quantity: str, published: float | str, exact: float | None, tolerance: float
) -> None:
    found = [f for f in published_figures(preset(name)) if (f.quantity, f.published) == (quantity, published)]
    assert len(found) == 1
    assert found[0].exact == (None if exact is None else pytest.approx(exact, rel=0, abs=tolerance))
    if exact is None:  # then a command is named that measures it here
        assert found[0].cells[2] == "to measure" and re.search(r"`(gptworks \w+|python bench/\w+\.py)", found[0].note)


def test_every_reference_preset_has_published_figures() -> None:
    without = {name for name in PRESETS if not published_figures(preset(name))}
    ours = {name for name in PRESETS if name.startswith(("modern-", "moe-"))}
    assert without == {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"} | ours


def test_the_reference_page_has_every_preset() -> None:
    page = reference_page.PAGE.read_text(encoding="utf-8")
    for name in PRESETS:
        assert f"| `{name.removesuffix('-banded')}` |" in page
    assert re.search(r"\| `mixtral-8x7b` .* \| 32 / 8 \| 8 × 14336, 2 for a token .* \| none \| untied ", page)
    assert re.search(r"\| `qwen3-0.6b` .* \| 16 / 8 of 128 .* \| rmsnorm, QK-norm ", page)


def test_the_reference_page_is_current() -> None:
    page = reference_page.PAGE.read_text(encoding="utf-8")
    assert page == reference_page.current(page), "run `python tests/reference_page.py`"


# plan -------------------------------------------------------------------------------------------------------


def test_plan_of_a_run_with_max_steps() -> None:
    sheet = json.loads(json.dumps(plan_json(planned(max_steps=200))))
    per_token = describe(preset("gpt2-mini")).to_json()["flops"]["training_per_token"]
    assert sheet["parameters"]["total"] == 3_487_232
    assert sheet["tokens_per_step"] == 32 * 256
    assert sheet["steps"] == 200
    assert sheet["tokens"] == 200 * 32 * 256
    assert sheet["tokens_per_parameter"] == pytest.approx(1_638_400 / 3_487_232)
    assert sheet["compute_optimal_tokens"] == 69_744_640
    assert sheet["flops"] == {
        "per_token": per_token,
        "per_step": per_token * 8192,
        "before_first_step": 0.0,
        "total": per_token * 8192 * 200,
    }
    assert sheet["disk"]["shards_bytes"] is None


@pytest.mark.parametrize(
    ("train", "n_train_tokens", "steps", "words"),
    [
        ({"max_steps": 9}, None, 9, "max_steps=9"),
        ({"epochs": 2}, 256 * 321, 20, "epochs=2"),  # one window is spent on the random first position
        ({"epochs": 0.001}, 257, 1, "epochs=0.001"),
        ({"epochs": 2, "max_steps": 9}, 256 * 321, 9, "max_steps=9"),
        ({"epochs": 2, "max_steps": 90}, 256 * 321, 20, "epochs=2"),
        ({"epochs": 2}, None, None, "needs the number of training tokens"),
        ({"max_minutes": 5}, 81_920, None, "depends on the machine"),
        ({"max_minutes": 5, "max_steps": 9}, None, 9, "at most, by max_steps=9; max_minutes=5 depends"),
        ({"epochs": 2, "max_steps": 9}, None, 9, "at most, by max_steps=9; epochs=2 needs"),
    ],
)
def test_steps_are_the_first_bound_reached(
    train: dict[str, Any], n_train_tokens: int | None, steps: int | None, words: str
) -> None:
    found = planned(n_train_tokens, **train)
    assert found.steps == steps
    assert words in found.steps_reason
    assert (
        (found.tokens is None) == (found.total_flops is None) == (found.tokens_per_parameter is None) == (steps is None)
    )


@pytest.mark.parametrize("n_train_tokens", [257, 511, 512, 768, 81_919, 81_920, 1_000_000])
def test_an_epoch_is_the_batches(n_train_tokens: int) -> None:
    batches = Batches(cast(TokenShards, SimpleNamespace(n_tokens=n_train_tokens, split="train")), 256, seed=0)
    for epochs in (0.5, 1, 3):
        assert planned(n_train_tokens, epochs=epochs).steps == max(1, round(epochs * batches.windows_per_epoch / 32))


def test_a_split_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(UserError, match="n_train_tokens=256 is shorter than one window"):
        planned(256, epochs=1)


def test_bytes_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(preset("gpt2-mini"))
    save_file(dict(model.named_parameters()), tmp_path / "weights.safetensors")
    header_bytes = (tmp_path / "weights.safetensors").stat().st_size - planned(max_steps=1).weights_bytes
    assert 0 < header_bytes < 10_000

    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    moment_bytes = sum(4 * moment.numel() for moment in moments)
    assert planned(max_steps=1, optimizer="adamw").optimizer_state_bytes == moment_bytes
    assert planned(max_steps=1, optimizer="adamw").checkpoint_bytes == 4 * 3_487_232 + moment_bytes


def test_muon_keeps_one_buffer_for_the_blocks_matrices() -> None:
    matrices = 4 * (4 * 256 * 256 + 2 * 256 * 1024)
    rest = 3_487_232 - matrices
    assert planned(max_steps=1, optimizer="muon").optimizer_state_bytes == 4 * matrices + 8 * rest


@pytest.mark.parametrize(("vocab_size", "n_bytes"), [(65_536, 2), (65_537, 4)])
def test_bytes_of_the_shards(vocab_size: int, n_bytes: int) -> None:
    found = planned(1000, model={"vocab_size": vocab_size}, max_steps=1)
    assert plan_json(found)["disk"]["shards_bytes"] == 1000 * n_bytes


def test_a_plan_prints_and_says_what_is_unknown() -> None:
    text = printed(PlanSheet(**vars(planned(epochs=2))), 100)
    assert "3,487,232" in text
    assert "unknown (epochs=2 needs the number of training tokens)" in text


def test_a_plan_needs_the_vocabulary() -> None:
    recipe = parse_recipe(
        {
            "model": {"context_length": 8, "n_layers": 1, "d_model": 8, "n_heads": 1},
            "tokenizer": {"type": "char"},
            "data": {"sources": [{"type": "python-stdlib"}]},
            "train": {"max_steps": 1},
        }
    )
    with pytest.raises(UserError, match="prepare the data"):
        plan(recipe)


# a forward pass ---------------------------------------------------------------------------------------------


def test_the_demonstration_of_document_002_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    design.describe("gpt2-tiny", run=True)
    printed = capsys.readouterr().out
    assert "1 × 16 token ids" in printed and "1 × 16 × 512 logits" in printed and "742,528 parameters" in printed
    assert re.search(r"time +\d+\.\d{3} ms \(measured here", printed)
    shown = demonstrate(preset("gpt2-tiny"), 128)
    assert shown.output_shape == (1, 128, 512) and abs(shown.loss - math.log(512)) < 0.1
    with pytest.raises(UserError, match="--length 129: the model reads 1 to 128 tokens"):
        design.describe("gpt2-tiny", run=True, length=129)
    monkeypatch.setattr("gptworks.describe.demonstration.available_memory_bytes", lambda: 64 << 30)
    with pytest.raises(UserError, match=r"--run needs 698\.4 GB .* 68\.72 GB of memory are free: take a smaller model"):
        design.describe("gpt3-175b", run=True)
    with pytest.raises(UserError, match="--length is for --run"):
        design.describe("gpt2-tiny", length=3)
