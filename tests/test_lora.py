"""LoRA and frozen layers: the trained parameters, the saved files, and that such a run can be used like any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import tiny
from gptworks.checkpoint import checkpoints, load_run
from gptworks.config import FreezeConfig, LoRAConfig
from gptworks.describe.plan_tables import tables
from gptworks.errors import UserError
from gptworks.infer.engine import load
from gptworks.model.gpt import GPT
from gptworks.model.lora import LoRALinear, add_lora, is_adapter, remove_lora
from gptworks.model.loss import linear_cross_entropy
from gptworks.planning.memory import training_peak
from gptworks.planning.run import plan
from gptworks.planning.setting import Setting
from gptworks.presets import preset
from gptworks.quantize.convert import pack_for, unpack_all
from gptworks.quantize.linear import packed_matrices
from gptworks.recipe import load_recipe, parse_recipe, with_vocab_size
from gptworks.training.loop import train
from gptworks.training.optim.trainable import trainable_model
from gptworks.training.rehearsal.trace import Rehearsal, trace_step
from gptworks.training.setup import check_parallel, check_train
from halves import assert_resumes_exactly

SMALL: dict[str, Any] = {"vocab_size": 40, "context_length": 24, "n_layers": 2, "d_model": 32, "n_heads": 4}


def shaken(model: GPT, seed: int = 0) -> GPT:
    """Change B from zero to random values, so that the adapter has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(n_rows: int = 3) -> torch.Tensor:
    return torch.randint(40, (n_rows, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("settings", "adapter"),
    [
        ({}, {}),
        ({"mlp": "swiglu", "attention_bias": True, "mlp_bias": True}, {"rank": 3, "alpha": 5, "dropout": 0.3}),
        ({"n_kv_heads": 2, "qk_norm": True, "tie_embeddings": False}, {"targets": ["query", "value"], "rank": 40}),
        ({"n_experts": 4, "d_ff_shared": 16}, {"targets": ["mlp"]}),
    ],
)
def test_merged_logits_equal_unmerged_and_the_definition(settings: dict[str, Any], adapter: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config, lora = tiny.plain_model(**SMALL, **settings), LoRAConfig.model_validate(adapter)
    model = GPT(config).eval()
    plain = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = model(tokens())
    shaken(add_lora(model, lora))
    after = model(tokens())
    assert (after - before).abs().max() > 0.01, "the adapter does nothing"

    by_hand = dict(plain)
    for name, tensor in model.state_dict().items():
        if name.endswith(".lora_a"):
            module = name.removesuffix(".lora_a")
            b = model.state_dict()[f"{module}.lora_b"]
            by_hand[f"{module}.weight"] = plain[f"{module}.weight"] + lora.alpha / lora.rank * b @ tensor
    defined = GPT(config).eval()
    defined.load_state_dict(by_hand)
    merged = remove_lora(model, merge=True)
    assert not any(isinstance(module, LoRALinear) for module in merged.modules())
    assert (merged(tokens()) - after).abs().max() <= 1e-5
    assert (defined(tokens()) - after).abs().max() <= 1e-5


def test_targets_are_names_or_families() -> None:
    def adapted(*targets: str) -> set[str]:
        model = add_lora(
            GPT(tiny.plain_model(**SMALL, mlp="swiglu")), LoRAConfig.model_validate({"targets": list(targets)})
        )
        return {name.removeprefix("blocks.0.") for name, m in model.named_modules() if isinstance(m, LoRALinear)} - {
            name for name, _ in model.named_modules() if name.startswith("blocks.1.")
        }

    attention = {f"attention.{part}" for part in ("query", "key", "value", "out")}
    mlp = {f"mlp.{part}" for part in ("gate", "up", "down")}
    assert adapted("attention") == attention
    assert adapted("mlp") == mlp
    assert adapted("all") == attention | mlp
    assert adapted("query", "mlp") == {"attention.query"} | mlp


def test_only_a_and_b_have_gradients_and_they_are_right() -> None:
    torch.manual_seed(0)
    model = shaken(add_lora(GPT(tiny.plain_model(**SMALL)).double(), LoRAConfig(rank=2)))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name), name

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens()[:, :-1]).flatten(0, 1), tokens()[:, 1:].flatten())

    loss().backward()
    for name in ("blocks.0.attention.query.lora_a", "blocks.1.mlp.down.lora_b"):
        parameter = dict(model.named_parameters())[name]
        assert parameter.grad is not None
        step, index = 1e-5, (1, 1)
        with torch.no_grad():
            parameter[index] += step
            above = loss()
            parameter[index] -= 2 * step
            below = loss()
            parameter[index] += step
        assert parameter.grad[index].item() == pytest.approx(((above - below) / (2 * step)).item(), rel=1e-5), name


def learning(model: GPT, precision: str, checkpointing: str) -> dict[str, torch.Tensor]:
    """Return loss and gradients of two micro-batches."""
    model.activation_checkpointing = checkpointing
    model.train()
    total = torch.zeros(())
    for seed in range(2):
        rows = tokens() + seed
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = linear_cross_entropy(model.features(rows[:, :-1] % 40), model.head_weight, rows[:, 1:] % 40)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return {"loss": total} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("base", "settings", "adapter", "precision", "checkpointing"),
    [
        ("int8", {"mlp": "swiglu", "n_kv_heads": 2}, {}, "fp32", "none"),
        ("int4", {"mlp": "swiglu", "attention_bias": True, "mlp_bias": True}, {"targets": ["mlp"]}, "fp32", "block"),
        ("int4", {"mlp": "relu2", "norm": "rmsnorm"}, {"dropout": 0.2, "embeddings": True}, "bf16", "selective"),
        ("int4", {"n_experts": 4, "d_ff": 48}, {"targets": ["attention", "up"]}, "fp32", "none"),
    ],
)
def test_over_a_packed_base_loss_and_gradients_are_those_over_the_same_base_unpacked(
    base: str, settings: dict[str, Any], adapter: dict[str, Any], precision: str, checkpointing: str
) -> None:
    config = tiny.plain_model(**SMALL | {"d_model": 64}, **settings)
    lora = LoRAConfig.model_validate({"rank": 4, "base": base, **adapter})
    torch.manual_seed(2)
    weights = GPT(config).state_dict()
    packed = trainable_model(config, lora, None)
    packed.load_state_dict(pack_for(packed, weights), strict=False)
    shaken(packed)
    kinds = {name: matrix.kind for name, matrix in packed_matrices(packed)}
    assert set(kinds) == {n.removesuffix(".weight") for n, w in weights.items()
                          if n.startswith("blocks.") and w.dim() == 2 and "router" not in n}  # fmt: skip
    assert kinds["blocks.0.attention.query"] == base
    assert kinds["blocks.0.mlp.experts.0.down" if "n_experts" in settings else "blocks.0.mlp.up"] == (
        "int8" if settings.get("d_ff") == 48 else base
    ), "48 columns are no whole number of groups"
    plain = add_lora(GPT(config), lora)
    plain.load_state_dict(unpack_all(packed.state_dict(), kinds))
    found = []
    for model in (packed, plain):
        torch.manual_seed(5)
        found.append(learning(model, precision, checkpointing))
    assert found[0].keys() == found[1].keys()
    assert {name for name in found[0] if not is_adapter(name)} == (
        {"loss", "token_embedding.weight"} if lora.embeddings else {"loss"}
    )
    for name, value in found[0].items():
        tolerance = 0.01 if precision == "bf16" else 1e-5  # bias and product are added in one rounding, or in two
        torch.testing.assert_close(value, found[1][name], rtol=tolerance, atol=tolerance * found[1][name].abs().max())
    assert (found[0]["loss"] - found[1]["loss"]).abs() <= 1e-6 * found[1]["loss"].abs()


# ---------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text and a base run."""
    folder = tmp_path_factory.mktemp("lora")
    tree = tiny.recipe_tree(folder, max_steps=8, optimizer="adamw", checkpoint_every=8)
    train(parse_recipe(tree | {"run_dir": str(folder / "base")}))
    return folder


def tuned_tree(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    train_settings = {"max_steps": 8, "optimizer": "adamw", "learning_rate": 0.01} | settings.pop("train", {})
    tree = tiny.recipe_tree(folder, **train_settings)
    return tree | {"run_dir": str(folder / name), "initialize_from": str(folder / "base")} | settings


def test_a_run_trains_the_adapter_alone_and_is_used_like_any_other(base: Path) -> None:
    run = base / "lora"
    outcome = train(parse_recipe(tuned_tree(base, "lora", adapter={"rank": 4, "dropout": 0.1})))
    assert outcome.reason == "finished"
    before = load_file(checkpoints(base / "base")[0].folder / "model.safetensors")
    after = load_file(checkpoints(run)[0].folder / "model.safetensors")
    assert {name for name in after if not is_adapter(name)} == set(before)
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
    assert all(after[name].abs().max() > 0 for name in after if name.endswith(".lora_b"))
    optimizer = load_file(checkpoints(run)[0].folder / "optimizer.safetensors")
    assert optimizer and all(is_adapter(key.rpartition("/")[0]) for key in optimizer), "state of frozen weights is kept"

    (base / "base").rename(base / "elsewhere")  # the run is all that it needs
    try:
        merged = load_run(run).model
        beside = load_run(run, merge=False).model
        assert not any(isinstance(module, LoRALinear) for module in merged.modules())
        ids = tokens() % merged.config.vocab_size
        assert (merged(ids) - beside(ids)).abs().max() <= 1e-5
        assert load(run).generate("line 1", max_tokens=5, temperature=0)
    finally:
        (base / "elsewhere").rename(base / "base")


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter": {"rank": 4, "dropout": 0.2, "base": "int4"}, "train": {"ema_decay": 0.9}},
        {"freeze": {"embeddings": True, "first_blocks": 1}, "train": {"optimizer": "muon"}},
    ],
)
def test_a_resumed_run_ends_bit_for_bit_the_same(base: Path, settings: dict[str, Any]) -> None:
    kind = next(iter(settings))
    tree = tuned_tree(base, kind, **settings)
    run = assert_resumes_exactly(tree, at_step=6)
    if kind == "freeze":
        before = load_file(checkpoints(base / "base")[0].folder / "model.safetensors")
        after = load_file(checkpoints(run)[0].folder / "model.safetensors")
        same = {name for name in before if torch.equal(before[name], after[name])}
        assert same == {name for name in before if name.startswith(("token_embedding", "blocks.0."))}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adapter": {}, "initialize_from": None}, "adapter is set and initialize_from is not"),
        ({"adapter": {}, "freeze": {"first_blocks": 1}}, "adapter and freeze are both set"),
        ({"adapter": {}, "train": {"optimizer": "muon"}}, "set train.optimizer=adamw"),
        ({"adapter": {"targets": ["gate"]}}, "has no gate"),
        ({"adapter": {"targets": ["qurey"]}}, "adapter.targets"),
        ({"adapter": {"ranks": 4}}, "did you mean `adapter.rank`|did you mean `rank`"),
        ({"freeze": {"first_blocks": 3}}, "freeze.first_blocks=3 is more than model.n_layers=2"),
        ({"freeze": {"patterns": ["block.*"]}}, "names no parameter"),
        ({"freeze": {"patterns": ["*"]}}, "freeze leaves nothing to train"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(base: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_train(parse_recipe(tuned_tree(base, "refused", **settings)))
    assert not (base / "refused").exists()


def test_a_run_over_a_packed_base_is_used_as_it_was_evaluated(base: Path) -> None:
    """The files hold the packed base; loading unpacks it and adds the adapter."""
    settings = {"adapter": {"rank": 4, "base": "int4"}}
    recipe = parse_recipe(tuned_tree(base, "packed", **settings))
    train(recipe)
    checkpoint = checkpoints(base / "packed")[0]
    stored = load_file(checkpoint.folder / "model.safetensors")
    assert {str(x.dtype) for n, x in stored.items() if n.startswith("blocks.") and n.endswith("p.weight")} == {
        "torch.uint8"
    }
    sheet = plan(with_vocab_size(recipe, stored["token_embedding.weight"].size(0)))
    assert sheet.weights_bytes == sum(x.nbytes for x in stored.values())

    run = load_run(base / "packed", "last")
    assert {x.dtype for x in run.model.state_dict().values()} == {torch.float32}
    trained_model = trainable_model(run.recipe.model, run.recipe.adapter, None).eval()
    trained_model.load_state_dict(stored)
    ids = tokens() % run.recipe.model.vocab_size
    torch.testing.assert_close(run.model(ids), trained_model(ids), rtol=1e-5, atol=1e-5)
    again = tuned_tree(base, "on", initialize_from=str(base / "packed"), train={"max_steps": 8})
    check_train(parse_recipe(again))  # its weights can be had, unlike a quantized run's


@pytest.mark.parametrize(
    ("settings", "n_ranks", "words"),
    [
        ({"compile": "block"}, 1, "adapter.base=int4 and train.compile=block.*set train.compile=none"),
        ({"parallel": {"strategy": "fsdp"}}, 2, "adapter.base=int4 keeps packed matrices whole.*use strategy=ddp"),
        ({"parallel": {"tensor_parallel": 2}}, 2, "A and B are not sharded"),
    ],
)
def test_where_a_packed_base_cannot_be_is_refused(
    base: Path, settings: dict[str, Any], n_ranks: int, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check_parallel(parse_recipe(tuned_tree(base, "no", adapter={"base": "int4"}, train=settings)), n_ranks)


def test_a_run_goes_on_with_its_own_adapter_alone(base: Path) -> None:
    train(parse_recipe(tuned_tree(base, "fixed", adapter={"rank": 2}, train={"max_steps": 3})))
    with pytest.raises(UserError, match=r"started with adapter\.rank=2, and it is now 3"):
        check_train(load_recipe(base / "fixed", ["adapter.rank=3"]), resume=True)


def test_a_run_that_starts_from_an_adapted_one_has_its_adapter_merged(base: Path) -> None:
    train(parse_recipe(tuned_tree(base, "first", adapter={"rank": 2}, train={"max_steps": 3})))
    second = tuned_tree(base, "second", adapter={"rank": 2}, train={"max_steps": 3, "learning_rate": 1e-9})
    train(parse_recipe(second | {"initialize_from": str(base / "first")}))
    start, merged = load_run(base / "second", merge=False).model, load_run(base / "first").model
    name = "blocks.0.attention.query.weight"
    assert torch.equal(start.state_dict()[name], merged.state_dict()[name])


# ---------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("adapter", "freeze"),
    [
        (LoRAConfig(), None),
        (LoRAConfig(base="int8", targets=("mlp",), embeddings=True), None),
        (LoRAConfig(rank=16, dropout=0.1, targets=("attention",)), None),
        (None, FreezeConfig(embeddings=True, first_blocks=1)),
        (None, FreezeConfig(patterns=("*.mlp.*",))),
    ],
)
def test_the_planned_memory_is_enough_and_not_far_from_the_traced(
    adapter: LoRAConfig | None, freeze: FreezeConfig | None, precision: str
) -> None:
    """The plan includes activations that frozen layers do not save: it may be too high, never too low."""
    model = preset("gpt2-mini").model_copy(update={"n_layers": 2})
    config = tiny.plain_training(max_steps=1, batch_size=2, micro_batch_size=1)
    planned = training_peak(Setting.of(model, config, precision, True, adapter, freeze)).total_bytes
    traced = trace_step(Rehearsal(model, config, "cpu", precision, adapter, freeze)).peak_bytes
    assert 0.98 < planned / traced < (1.06 if adapter else 1.25)
    assert planned < 0.9 * training_peak(Setting.of(model, config, precision, True)).total_bytes


def test_the_plan_counts_what_is_trained(base: Path) -> None:
    recipe = parse_recipe(tuned_tree(base, "planned", adapter={"rank": 4}))
    recipe = with_vocab_size(recipe, 40)
    model = add_lora(GPT(recipe.model), LoRAConfig(rank=4))
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sheet = plan(recipe)
    assert sheet.trained.parameters == n_trained
    assert sheet.optimizer_state_bytes == 8 * n_trained
    assert sheet.weights_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert f"| trained of them | {n_trained:,} |" in "\n".join(table.markdown() for table in tables(sheet))
