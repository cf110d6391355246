"""Quantized matrices, models and runs: storage, values, accuracy, and refused inputs."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf
import tiny
from gptworks.checkpoint import checkpoints, load_run
from gptworks.choices import Rounding
from gptworks.cli import main
from gptworks.config import ModelConfig, Recipe
from gptworks.data.batches import evaluation_windows
from gptworks.data.opened import Prepared
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.errors import RunError, UserError
from gptworks.evaluation.divergence import measure_divergence
from gptworks.evaluation.loss import evaluate_by_position, evaluate_loss
from gptworks.infer.engine import Engine
from gptworks.interop.gguf import export_gguf
from gptworks.interop.huggingface import export_huggingface
from gptworks.model.gpt import GPT
from gptworks.quantize.convert import head_name, matrix_kinds, quantize_model
from gptworks.quantize.formats import (
    Weights,
    dequantize,
    gptq,
    pack,
    pack_int4,
    round_int4,
    round_int8,
    unpack_int4,
)
from gptworks.quantize.linear import QuantizedGPT, QuantizedLinear, packed_matrices
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.runs import quantized as quantize_module
from gptworks.runs.quantized import quantize_run
from gptworks.tokenizer import load_tokenizer
from gptworks.training.loop import train

KINDS: tuple[Weights, ...] = ("bf16", "fp16", "int8", "int4")

BASE = {"vocab_size": 70, "context_length": 16, "n_layers": 2, "d_model": 64, "n_heads": 2}
MODELS = {
    "gpt2": tiny.plain_model(**BASE, position="learned", mlp="gelu", attention_bias=True, mlp_bias=True),
    "llama": tiny.plain_model(**BASE, norm="rmsnorm", mlp="swiglu", n_kv_heads=1, d_ff=96, tie_embeddings=False),
    "experts": tiny.plain_model(**BASE, mlp="swiglu", d_ff=32, n_experts=3, d_ff_shared=32),
}


def random_model(config: ModelConfig) -> GPT:
    """Return a model with weights of size 0.1 and random biases and norms, so that every part has an effect."""
    torch.manual_seed(3)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def quantized_tensors(model: QuantizedGPT) -> dict[str, Tensor]:
    """Return `weight` and `scale` of each packed matrix, by their names on disk."""
    return {f"{name}.{part}": x for name, matrix in packed_matrices(model) for part, x in matrix.named_buffers()}


def unpacked(model: QuantizedGPT) -> GPT:
    """Return a plain GPT with the values that the packed matrices represent."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(".scale")}
    for name, matrix in packed_matrices(model):
        tensors[f"{name}.weight"] = slow_values(matrix.weight, matrix.scale)
    plain = GPT(model.config).eval()
    plain.load_state_dict(tensors)
    return plain


def slow_values(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values of a packed matrix, computed element by element from the formats' description."""
    if scale is None:
        return weight.float()
    if weight.dtype == torch.int8:
        return torch.stack([row.float() * s for row, s in zip(weight, scale, strict=True)])
    values = []
    for packed, scales in zip(weight.tolist(), scale.tolist(), strict=True):
        for column in range(2 * len(packed)):
            group, place = divmod(column, 32)
            byte = packed[16 * group + place % 16]
            nibble = byte % 16 if place < 16 else byte // 16
            values.append((nibble - 8) * scales[group])
    return torch.tensor(values, dtype=torch.float32).view(weight.size(0), -1)


def tokens(config: ModelConfig, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (batch, config.context_length), generator=generator)


# ------------------------------------------------------------------------------------------------------- matrices


def test_int8_is_within_half_a_step_of_every_weight() -> None:
    matrix = torch.randn(50, 33) * torch.logspace(-6, 3, 50)[:, None]
    rounded = round_int8(matrix)
    error = (matrix.double() - rounded.levels.double() * rounded.scale.double()[:, None]).abs()
    assert (error <= rounded.scale[:, None] * (0.5 + 1e-5)).all()
    assert rounded.levels.abs().amax(1).tolist() == [127] * 50


def test_int4_is_within_half_a_step_of_every_weight_in_range() -> None:
    matrix = torch.randn(40, 96) * torch.logspace(-3, 2, 40)[:, None]
    rounded = round_int4(matrix)
    scale = rounded.scale.double().repeat_interleave(32, dim=1)
    error = (matrix.double() - rounded.levels * scale).abs()
    inside = (matrix / scale).clamp(-8, 7) == matrix / scale
    assert inside.double().mean() > 0.95
    assert (error[inside] <= scale.abs()[inside] * (0.5 + 1e-5)).all()
    assert (error <= scale.abs() * 1.5).all(), "what is clipped is clipped little"


def test_the_scales_searched_for_beat_the_largest_magnitude_over_7_and_over_minus_8() -> None:
    matrix = torch.randn(64, 320)
    groups = matrix.view(64, 10, 32)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    found = (matrix - dequantize(*pack(matrix, "int4"), torch.float32)).square().sum()
    for scale in (extreme.abs() / 7, extreme / -8):
        plain = (groups / scale).round().clamp(-8, 7) * scale
        assert found < 0.97 * (groups - plain).square().sum()


def test_zeros_stay_zeros() -> None:
    for kind in KINDS:
        weight, scale = pack(torch.zeros(4, 64), kind)
        assert not dequantize(weight, scale, torch.float32).any(), kind


def test_nibbles_have_the_order_of_the_format() -> None:
    levels = torch.randint(-8, 8, (5, 96), dtype=torch.int8)
    packed, scale = pack_int4(levels), torch.rand(5, 3).half()
    assert packed.shape == (5, 48)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_int4(packed).flatten(1), levels)
    assert torch.equal(dequantize(packed, scale, torch.float32), slow_values(packed, scale))
    one = torch.full((1, 32), -8, dtype=torch.int8)
    one[0, 3], one[0, 19] = -3, 7  # both in byte 3: 5 low, 15 high
    assert pack_int4(one)[0].tolist() == [0, 0, 0, 15 << 4 | 5] + [0] * 12


def test_rows_that_are_not_a_multiple_of_a_group_stay_int8_in_a_model() -> None:
    kinds = matrix_kinds(random_model(tiny.plain_model(**BASE | {"d_head": 24})), "int4")
    assert kinds["blocks.0.attention.out"] == "int8"
    assert kinds["blocks.0.attention.query"] == "int4"
    with pytest.raises(UserError, match=r"head=int4 with model\.d_model=48: a row .* a multiple of 32"):
        matrix_kinds(GPT(tiny.plain_model(**BASE | {"d_model": 48})), "int4", "int4")


# ----------------------------------------------------------------------------------------------------------- GPTQ


def correlated(n_tokens: int, width: int) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(n_tokens, 6) @ torch.randn(6, width) + 0.3 * torch.randn(n_tokens, width)


def gptq_reference(matrix: Tensor, hessian: Tensor, scale: Tensor, damping: float = 0.01) -> Tensor:
    """Return the levels by the definition: after each column, solve again for the others, so that the outputs stay
    close."""
    matrix, h = matrix.double(), hessian.double()
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.double)
    order = hessian.diagonal().argsort(descending=True).tolist()
    steps = scale.double().repeat_interleave(32, dim=1)
    best, rounded, levels = matrix.clone(), torch.zeros_like(matrix), torch.zeros_like(matrix)
    for n_done, column in enumerate(order):
        levels[:, column] = (best[:, column] / steps[:, column]).round().clamp(-8, 7)
        rounded[:, column] = levels[:, column] * steps[:, column]
        done, left = order[: n_done + 1], order[n_done + 1 :]
        spoilt = (matrix[:, done] - rounded[:, done]) @ h[done][:, left]
        best[:, left] = matrix[:, left] + torch.linalg.solve(h[left][:, left], spoilt.T).T
    return levels.to(torch.int8)


def test_gptq_is_what_its_definition_says() -> None:
    x, matrix = correlated(400, 160), torch.randn(7, 160)  # more columns than are done at once
    rounded = gptq(matrix, x.T @ x)
    assert torch.equal(rounded.levels, gptq_reference(matrix, x.T @ x, rounded.scale))


def test_gptq_keeps_the_outputs_better_than_the_nearest_values() -> None:
    x, matrix = correlated(600, 256), torch.randn(32, 256)

    def output_error(rounded: Any) -> float:
        values = dequantize(pack_int4(rounded.levels), rounded.scale, torch.float32)
        return float((x @ (matrix - values).T).square().sum())

    assert output_error(gptq(matrix, x.T @ x)) < 0.3 * output_error(round_int4(matrix))


def test_gptq_without_inputs_takes_the_nearest_values() -> None:
    matrix = torch.randn(8, 64)
    without, nearest = gptq(matrix, torch.zeros(64, 64)), round_int4(matrix)
    assert torch.equal(without.levels, nearest.levels)
    assert torch.equal(without.scale, nearest.scale)


def test_gptq_takes_inputs_some_of_which_never_occur() -> None:
    x, matrix = correlated(50, 64), torch.randn(8, 64)
    x[:, :40] = 0
    rounded = gptq(matrix, x.T @ x)
    values = dequantize(pack_int4(rounded.levels), rounded.scale, torch.float32)
    assert (matrix - values).abs().amax() < 1


# --------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantized_model_computes_what_its_values_say(name: str, kind: Weights) -> None:
    model = random_model(MODELS[name])
    quantized = quantize_model(model, kind)
    plain = unpacked(quantized)
    x = tokens(model.config)
    with torch.no_grad():
        assert torch.allclose(quantized(x), plain(x), atol=1e-5)
        assert not torch.allclose(quantized(x), model(x), atol=1e-5)
    windows = [(row[:-1], row[1:]) for row in x]
    assert evaluate_loss(quantized, windows).loss == pytest.approx(evaluate_loss(plain, windows).loss, abs=1e-5)
    whole = [(row, row.roll(-1)) for row in x]
    for part, expected in zip(evaluate_by_position(quantized, whole), evaluate_by_position(plain, whole), strict=True):
        assert part.report.loss == pytest.approx(expected.report.loss, abs=1e-5)


def test_every_matrix_is_packed_but_routers_and_positions() -> None:
    for config in MODELS.values():
        model = random_model(config)
        quantized = quantize_model(model, "int4")
        packed = {name for name, _ in packed_matrices(quantized)}
        matrices = {
            name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)
        }  # fmt: skip
        assert {name.split(".")[-1] for name in matrices - packed} <= {"router", "position_embedding"}
        kept = {name: matrix.kind for name, matrix in packed_matrices(quantized)}
        outside = {name for name in packed if not name.startswith("blocks.")}
        assert {kept[name] for name in outside} == {"int8"}
        assert {kept[name] for name in packed - outside} == {"int4"}
        assert set(quantized_tensors(quantized)) == {
            f"{name}.{part}" for name in packed for part in ("weight", "scale")
        }
        for name, parameter in quantized.named_parameters():
            assert torch.equal(parameter, model.state_dict()[name]), name


@pytest.mark.parametrize(("name", "head"), [("gpt2", "token_embedding"), ("llama", "untied_head")])
def test_a_head_in_int4_is_the_only_other_difference(name: str, head: str) -> None:
    model = random_model(MODELS[name])
    batches = [tokens(model.config), tokens(model.config)]
    for calibration in ([], batches):
        usual, smaller = (
            quantized_tensors(quantize_model(model, "int4", calibration, head=kind)) for kind in ("int8", "int4")
        )
        changed = {key for key in usual if usual[key].dtype != smaller[key].dtype}
        assert changed == {f"{head}.weight", f"{head}.scale"}
        assert smaller[f"{head}.weight"].dtype == torch.uint8
        # where the embedding is the head, the blocks' inputs are those of the run still: GPTQ rounds them alike
        assert all(torch.equal(usual[key], smaller[key]) for key in usual.keys() - changed)


def test_a_calibrated_head_gives_nearer_logits_than_the_nearest_values() -> None:
    for config in MODELS.values():
        model = random_model(config)
        batches = [tokens(config, batch=8)]
        quantized = quantize_model(model, "int4", batches, head="int4")
        found: Any = quantized.get_submodule(head_name(model))
        whole: Any = model.get_submodule(head_name(model))
        features = quantized.features(batches[0]).flatten(0, 1)
        nearest = dequantize(*pack(whole.weight.detach(), "int4"), torch.float32)
        errors = [((matrix - whole.weight) @ features.T).square().sum() for matrix in (found.dequantized(), nearest)]
        assert errors[0] < 0.9 * errors[1]


def test_quantizing_does_not_change_the_model() -> None:
    model = random_model(MODELS["experts"]).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize_model(model, "int4", [tokens(model.config)])
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_cast_changes_the_dtype_of_computations_but_not_packed_matrices(kind: Weights) -> None:
    model = random_model(MODELS["gpt2"])
    quantized = quantize_model(model, kind)
    x = tokens(model.config)
    packed = {name: tensor.clone() for name, tensor in quantized_tensors(quantized).items()}
    with torch.no_grad():
        wide = quantized(x)
        narrow = quantized.bfloat16()(x)
    assert quantized.dtype == narrow.dtype == torch.bfloat16
    assert 0 < (wide - narrow.float()).abs().amax() < 0.05 * wide.abs().amax()
    for name, tensor in quantized_tensors(quantized).items():
        assert tensor.dtype == packed[name].dtype
        assert torch.equal(tensor, packed[name]), name


def test_under_autocast_products_are_done_in_bf16() -> None:
    layer = QuantizedLinear("int8", 8, 64, bias=True)
    layer.weight.random_(-127, 127)
    layer.scale = torch.rand(8)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), x @ slow_values(layer.weight, layer.scale).T, rtol=0.02, atol=10)


def test_an_expert_without_calibration_tokens_is_rounded_to_the_nearest() -> None:
    config = tiny.plain_model(**BASE, mlp="gelu", n_experts=3, n_experts_per_token=1)
    model = random_model(config)
    with torch.no_grad():
        model.blocks[0].norm2.weight.zero_()
        model.blocks[0].norm2.bias.fill_(1.0)
        model.blocks[0].mlp.router.weight.copy_(torch.tensor([[1.0], [0.0], [0.0]]).expand(3, 64))  # always the first
    calibrated = quantized_tensors(quantize_model(model, "int4", [tokens(config)]))
    nearest = quantized_tensors(quantize_model(model, "int4"))
    first, second = (f"blocks.0.mlp.experts.{i}.up.weight" for i in (0, 1))
    assert torch.equal(calibrated[second], nearest[second])
    assert not torch.equal(calibrated[first], nearest[first])


def test_the_divergence_is_its_definition() -> None:
    model = random_model(MODELS["gpt2"])
    other = quantize_model(model, "int4")
    x = tokens(model.config)
    p, q = (m(x).detach().double().softmax(-1) for m in (model, other))
    found = measure_divergence(other, model, [(row, row.roll(-1)) for row in x])
    assert found.kl_nats == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert found.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found.reference.loss == pytest.approx(-float(p.gather(-1, x.roll(-1, 1)[..., None]).log().mean()), rel=1e-5)
    same = measure_divergence(model, model, [(x, x.roll(-1, 1))])
    assert (same.kl_nats, same.agreement) == (pytest.approx(0, abs=1e-9), 1)


# ----------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a hundred steps, which has learned something. Tests must not change it."""
    folder = tmp_path_factory.mktemp("quantize")
    train(parse_recipe(tiny.recipe_tree(folder, max_steps=100, evaluate_every=50, learning_rate=0.01)))
    return folder / "run"


def refuse(_: Recipe) -> Prepared:
    """Replaces `prepare`, which must not be called, since the run's shards exist."""
    raise UserError("they are prepared too")


@pytest.fixture(scope="module")
def quantized(trained: Path) -> Path:
    """The trained run in int4."""
    quantize_run(trained, trained.parent / "int4", "int4", calibration_tokens=2048, prepare=refuse)
    return trained.parent / "int4"


def perplexity(run: Path) -> float:
    loaded = load_run(run)
    shards = TokenShards(prepare(loaded.recipe).folder, "validation")
    return evaluate_loss(loaded.model, evaluation_windows(shards, loaded.recipe.model.context_length)).perplexity


def test_perplexity_is_kept(trained: Path, quantized: Path, tmp_path: Path) -> None:
    before = perplexity(trained)
    assert before < 10, "the model has learned nothing that could be lost"
    assert perplexity(quantized) == pytest.approx(before, rel=0.03)
    measured = quantize_run(trained, tmp_path / "int8", "int8")
    assert perplexity(tmp_path / "int8") == pytest.approx(before, rel=0.001)
    assert measured.perplexities == (pytest.approx(before), pytest.approx(perplexity(tmp_path / "int8")))


def test_the_rounding_is_calibrated_by_default(quantized: Path) -> None:
    report = json.loads((quantized / "quantization.json").read_text())
    assert (report["rounding"], report["calibration_tokens"]) == ("gptq", 2048)


@pytest.mark.learning
def test_calibration_brings_predictions_nearer(tmp_path: Path) -> None:
    # for one such run 0.21 to 0.55 of the divergence, as measured for ten seeds: three are nearer their mean of 0.37
    divergence: dict[Rounding, float] = {"nearest": 0.0, "gptq": 0.0}
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        tree = tiny.recipe_tree(folder, max_steps=100, evaluate_every=50, learning_rate=0.01)
        train(parse_recipe(tree | {"seed": 10 * number + tree.get("seed", 0)}))
        for rounding in divergence:
            report = quantize_run(
                folder / "run",
                folder / rounding,
                "int4",
                rounding=rounding,
                calibration_tokens=2048 if rounding == "gptq" else None,
            )
            divergence[rounding] += report.divergence.kl_nats
    assert divergence["gptq"] < 0.6 * divergence["nearest"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_holds_the_model_bit_for_bit(trained: Path, tmp_path: Path, kind: Weights) -> None:
    shutil.copytree(trained, tmp_path / "run")
    quantize_run(tmp_path / "run", tmp_path / "out", kind, **({"rounding": "nearest"} if kind == "int4" else {}))
    shutil.rmtree(tmp_path / "run")  # it needs nothing of the run that it was made from
    loaded = load_run(tmp_path / "out")
    loaded.checkpoint.verify()
    expected = quantize_model(load_run(trained).model, kind)
    for (name, a), (other, b) in zip(loaded.model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert name == other
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    x = tokens(loaded.model.config)
    assert torch.equal(loaded.model(x), expected(x))
    assert loaded.recipe == load_recipe(trained).model_copy(update={"run_dir": tmp_path / "out"})
    tokenizers = (load_tokenizer(folder / "tokenizer") for folder in (trained, tmp_path / "out"))
    assert len({tokenizer.to_str() for tokenizer in tokenizers}) == 1


def test_it_is_used_like_any_run(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("evaluate", quantized, "--json", "--precision", "fp32")
    evaluated = json.loads(capsys.readouterr().out)
    report = json.loads((quantized / "quantization.json").read_text())
    assert evaluated["perplexity"] == pytest.approx(report["perplexity"]["quantized"])
    command("evaluate", quantized, "--json", "--precision", "bf16")
    assert json.loads(capsys.readouterr().out)["perplexity"] == pytest.approx(evaluated["perplexity"], rel=0.01)
    command("generate", quantized, "line 1", "--temperature", "0", "--max-tokens", "12")
    text = capsys.readouterr().out
    loaded = load_run(quantized)
    plain = Engine(unpacked(loaded.model), load_tokenizer(loaded.tokenizer_folder), backend="torch")
    assert text == "line 1" + plain.generate("line 1", temperature=0, max_tokens=12) + "\n"


def test_the_report_says_what_it_is(trained: Path, quantized: Path) -> None:
    report = json.loads((quantized / "quantization.json").read_text())
    weights = load_run(quantized).checkpoint.folder / "model.safetensors"
    assert report["bytes"]["quantized"] == pytest.approx(weights.stat().st_size, rel=0.2)  # and a header
    assert sum(report["parameters"].values()) == report["bytes"]["fp32"] / 4
    assert report["decode_tokens_per_second"]["quantized"] > 0
    assert report["made_from"] == {"run": "tiny", "folder": "run", "step": checkpoints(quantized)[0].step}
    card = (quantized / "model-card.md").read_text()
    assert card.startswith((trained / "model-card.md").read_text().rstrip())
    [row] = [line for line in card.splitlines() if line.startswith("| perplexity |")]
    shown = re.fullmatch(r"\| perplexity \| ([\d.,]+) \| ([\d.,]+) \(([+-][\d.]+)%\) \|", row)
    assert shown, row
    before, after, change = (float(text.replace(",", "")) for text in shown.groups())
    measured = report["perplexity"]
    assert before == pytest.approx(measured["fp32"], rel=5e-4), "four significant digits"
    assert after == pytest.approx(measured["quantized"], rel=5e-4), "four significant digits"
    assert change == pytest.approx(100 * (measured["quantized"] / measured["fp32"] - 1), abs=5.1e-4), "in percent"


def command(*arguments: str | Path) -> int:
    """Run the command line in this process; return the exit code."""
    before, sys.argv = sys.argv, ["gptworks", *map(str, arguments)]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def test_an_imported_run_asks_for_a_text_and_is_measured_on_it(tmp_path: Path) -> None:
    model = hf.random_model(MODELS["llama"].model_copy(update={"vocab_size": hf.VOCABULARY}))
    imported = hf.make_run(tmp_path / "imported", model)
    with pytest.raises(UserError, match=r"imported and has no text .* Give --text FILE"):
        quantize_run(imported, tmp_path / "int4", "int4", prepare=refuse)
    text = tmp_path / "words.txt"
    text.write_text(tiny.TEXT, encoding="utf-8")
    measured = quantize_run(imported, tmp_path / "int4", "int4", calibration_tokens=64, texts=[text])
    [prepared] = (tmp_path / "data").glob("shards-*")
    shards = TokenShards(prepared, "validation")
    windows = list(evaluation_windows(shards, model.config.context_length, 65_536 // model.config.context_length))
    assert measured.perplexities[0] == pytest.approx(evaluate_loss(load_run(imported).model, windows).perplexity)


def test_the_command_writes_what_the_function_does(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("quantize", trained, tmp_path / "out", "--weights", "int4", "--calibrate", "100")
    assert command(*arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["calibration_tokens"] == 128, "whole windows of 32"
    assert report.items() <= json.loads((tmp_path / "out" / "quantization.json").read_text()).items()
    assert command(*arguments) == 2
    assert "not an empty folder" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_quantized_run_is_not_quantized_trained_or_exported(
    quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ("quantize", quantized, tmp_path / "again", "--weights", "int8"),
        ("train", quantized, "--resume"),
        ("train", quantized, f"initialize_from={quantized}", f"run_dir={tmp_path / 'further'}"),
        ("export", quantized, tmp_path / "hf", "--no-verify"),
        ("export", quantized, tmp_path / "x.gguf", "--format", "gguf"),
    ):
        assert command(*arguments) == 2, arguments
        said = capsys.readouterr().err
        assert f"{quantized} is quantized" in said
        assert "Take the run that it was made from" in said
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="quantized to int4, int8 already"):
        quantize_model(load_run(quantized).model, "int8")
    for refused in (export_huggingface, export_gguf):
        with pytest.raises(UserError, match="is quantized"):
            refused(quantized, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights": "int5"}, "weights=int5: .*did you mean `int"),
        ({"weights": "q"}, "one of bf16, fp16, int8, int4"),
        ({"weights": "int4", "rounding": "up"}, "rounding=up: it must be nearest or gptq"),
        ({"weights": "int8", "rounding": "gptq"}, "it is for int4"),
        ({"weights": "int4", "rounding": "nearest", "calibration_tokens": 9}, "only gptq uses it"),
        ({"weights": "int8", "calibration_tokens": 9}, "only gptq uses it"),
        ({"weights": "int4", "calibration_tokens": 0}, "1 token or more"),
        ({"weights": "int8", "checkpoint": "77"}, "checkpoint `77`"),
        ({"weights": "int8", "head": "int4"}, "head=int4 with weights=int8: it is for int4"),
        ({"weights": "int4", "head": "int6"}, "head=int6: .*did you mean `int"),
    ],
)
def test_settings_that_cannot_be_are_refused(trained: Path, tmp_path: Path, settings: Any, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", "\\(")):
        quantize_run(trained, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_a_kind_cannot_hold_are_named() -> None:
    model = random_model(MODELS["gpt2"])
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[3, 4] = 1e5
    quantize_model(model, "int8")
    with pytest.raises(UserError, match=r"`blocks\.1\.mlp\.up` holds a weight of magnitude 100000, which fp16"):
        quantize_model(model, "fp16")
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[3, 4] = torch.nan
    for kind in KINDS:
        with pytest.raises(UserError, match=r"`blocks\.1\.mlp\.up` holds NaN, which cannot be rounded: give"):
            quantize_model(model, kind)


@pytest.mark.parametrize("step", ["save_recipe", "save_checkpoint", "write_whole", "_card"])
def test_a_failure_leaves_nothing(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(quantize_module, step, fail)
        with pytest.raises(RunError, match="No space left on device"):
            quantize_run(trained, tmp_path / "out", "int8")
    assert list(tmp_path.iterdir()) == []
    quantize_run(trained, tmp_path / "out", "int8")
    assert perplexity(tmp_path / "out") > 1


def test_a_damaged_folder_is_noticed(trained: Path, tmp_path: Path) -> None:
    quantize_run(trained, tmp_path / "out", "int8")
    weights = checkpoints(tmp_path / "out")[0].folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-7] ^= 4
    weights.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        load_run(tmp_path / "out")
