"""One set of rules: training accepts what a plan arranges, a plan refuses what training refuses, and advice, applied
literally, is accepted and fits."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drawn import drawn_recipe, teacher_in
from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.overrides import apply_overrides
from gptworks.planning.advice import Change, changes_that_fit, recipe_with
from gptworks.planning.arrange import Refusal, arrange, device_setting, planned_precision, rank_setting
from gptworks.planning.device_table import DEVICES, find_device
from gptworks.planning.devices import Device, custom_device
from gptworks.planning.fit import largest_micro_batch
from gptworks.planning.layout import Layout
from gptworks.planning.memory import training_peak
from gptworks.recipe import parse_recipe
from gptworks.training.setup import check_parallel


def drawn_parallel(draw: random.Random) -> dict[str, Any]:
    """Return random settings of the training section that an arrangement depends on."""
    return {
        "precision": draw.choice(["auto", "fp32", "bf16", "fp16"]),
        "parallel": {
            "strategy": draw.choice(["auto", "ddp", "fsdp"]), "tensor_parallel": draw.choice([1, 1, 1, 2, 3, 4]),
            "reshard_after_forward": draw.random() < 0.7,
        },
    }  # fmt: skip


def drawn(seed: int, teacher: Path) -> tuple[Recipe, int, Device]:
    """Return a random recipe, a number of devices, and a device with between a fifth and twice the memory that a step
    needs."""
    draw = random.Random(seed)
    recipe = drawn_recipe(draw, teacher, (96, 192), (64, 256, 3000), (1, 2, 4, 6, 8, 12, 16, 24, 64), drawn_parallel)
    kind, has_bf16 = draw.choice([("cpu", False), ("cpu", True), ("cuda", True), ("cuda", False), ("mps", False)])
    device = Device("drawn", kind, 10**12, 1e12, 1e12, 1e11, "drawn", has_bf16)
    n_ranks = draw.choice([1, 1, 2, 3, 4, 6, 8, 12])
    layout = arrange(recipe, n_ranks, device)
    setting = rank_setting(
        recipe, "fp32" if isinstance(layout, Refusal) else planned_precision(recipe.train.precision, device),
        device.on_cpu, Layout() if isinstance(layout, Refusal) else layout,
    )  # fmt: skip
    share = draw.choice([0.2, 0.4, 0.6, 0.9, 2.0])
    return recipe, n_ranks, replace(device, memory_bytes=int(share * training_peak(setting).total_bytes))


def accepted(recipe: Recipe, n_ranks: int, device: Device) -> bool:
    """Whether training accepts the recipe, by its own check and in the precision that it would use."""
    train = recipe.train.model_copy(update={"precision": planned_precision(recipe.train.precision, device)})
    try:
        check_parallel(recipe.model_copy(update={"train": train}), n_ranks)
    except UserError:
        return False
    return not (recipe.train.precision == "fp16" and device.kind != "cuda")  # `choose_precision` refuses it


def peak_bytes(recipe: Recipe, layout: Layout, device: Device) -> int:
    return training_peak(device_setting(recipe, device, layout)).total_bytes


def check(seed: int, teacher: Path) -> tuple[bool, list[Change]]:
    """Check one random arrangement; return whether it was accepted, and the advice given."""
    recipe, n_ranks, device = drawn(seed, teacher)
    layout = arrange(recipe, n_ranks, device)
    assert isinstance(layout, Layout) == accepted(recipe, n_ranks, device), (seed, layout)
    if isinstance(layout, Refusal):
        assert ": " in layout and layout.endswith(".")
        return False, []
    assert layout.world_size == n_ranks
    assert layout.tensor_parallel == recipe.train.parallel.tensor_parallel
    if recipe.train.parallel.strategy != "auto" and layout.data_parallel > 1:
        assert (layout.sharding == "none") == (recipe.train.parallel.strategy == "ddp")
    if peak_bytes(recipe, layout, device) <= device.memory_bytes:
        return True, []
    changes = changes_that_fit(recipe, n_ranks, device)
    for change in changes:
        applied = recipe_with(recipe)(change.overrides, change.n_ranks)
        there = arrange(applied, change.n_ranks, device)
        assert isinstance(there, Layout), (seed, change, there)
        assert accepted(applied, change.n_ranks, device), (seed, change)
        assert peak_bytes(applied, there, device) == change.peak_bytes, (seed, change)
        assert change.fits == (change.peak_bytes <= device.memory_bytes)
        assert change.fits or len(changes) == 1, (seed, changes)
    return True, changes


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_in(tmp_path_factory.mktemp("teacher"))


def hold(seeds: range, teacher: Path) -> None:
    results = [check(seed, teacher) for seed in seeds]
    advised = [changes for _, changes in results if any(change.fits for change in changes)]
    shares = [sum(taken for taken, _ in results) / len(seeds), len(advised) / len(seeds)]
    assert 0.2 < shares[0] < 0.8, "nearly all drawn arrangements are accepted, or nearly none"
    assert shares[1] > 0.05, "hardly any has advice"
    print(f"{len(seeds)} arrangements: {shares[0]:.0%} accepted, {len(advised)} with advice that fits")


def test_what_a_plan_arranges_and_advises_training_accepts(teacher: Path) -> None:
    hold(range(100), teacher)


@pytest.mark.arrangements
def test_five_hundred_arrangements(teacher: Path) -> None:
    hold(range(500), teacher)


# known cases ------------------------------------------------------------------------------------------------


def recipe_of(**train: Any) -> Recipe:
    return parse_recipe({
        "name": "known",
        "model": {"preset": "gpt2"} | train.pop("model", {}),
        "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 10, "precision": "bf16"} | train,
    })  # fmt: skip


@pytest.mark.parametrize(
    "train",
    [
        {"batch_size": 6, "micro_batch_size": 1},
        {"batch_size": 8, "micro_batch_size": 1, "optimizer": "muon"},
        {"batch_size": 8, "micro_batch_size": 1, "model": {"n_experts": 4, "n_experts_per_token": 2}},
        {"batch_size": 1},
    ],
)
def test_more_devices_are_advised_only_as_training_takes_them(train: dict[str, Any]) -> None:
    recipe = recipe_of(**train)
    device = custom_device(1.2, 1e12, 1e11)
    changes = changes_that_fit(recipe, 1, device)
    for change in changes:
        check_parallel(recipe_with(recipe)(change.overrides, change.n_ranks), change.n_ranks)
    many = [change for change in changes if change.n_ranks > 1]
    assert all(train["batch_size"] % change.n_ranks == 0 for change in many)


def test_one_processor_is_never_advised_to_be_many() -> None:
    device = Device("one", "cpu", 10**8, None, None, None, "this machine", True)
    changes = changes_that_fit(recipe_of(batch_size=64), 1, device)
    assert changes and all(change.n_ranks == 1 for change in changes)


def test_advice_for_one_gpu_tries_all_that_it_can_do_itself_before_more_of_them() -> None:
    recipe = recipe_of(model={"preset": "gpt2-xl"}, optimizer="adamw", batch_size=64, micro_batch_size=64)
    changes = changes_that_fit(recipe, 1, find_device("rtx-4090"))
    words = [change.words for change in changes]
    for setting in (
        "train.micro_batch_size=", "activation_checkpointing=", "optimizer_state=int8", "optimizer=muon",
        "adapter.rank=8",
    ):  # fmt: skip
        assert any(setting in each for each in words[:-1]), setting
    assert "--world-size" in words[-1] and not any("--world-size" in each for each in words[:-1])
    assert all(change.fits for change in changes)


@pytest.mark.parametrize(
    ("preset", "gib", "needed"),
    [
        ("gpt2-xl", 24, "optimizer_state=int8"),
        ("llama-2-7b", 24, "adapter.base=int8"),
        ("llama-2-7b", 8, "adapter.base=int4"),
    ],
)
def test_small_memories_are_advised_where_they_are_what_fits(preset: str, gib: float, needed: str) -> None:
    """With the same number of devices: the cheapest change that fits uses such a setting, and no milder change alone
    fits."""
    recipe = recipe_of(
        model={"preset": preset, "context_length": 512}, batch_size=4, micro_batch_size=1, optimizer="adamw"
    )
    changes = [c for c in changes_that_fit(recipe, 1, custom_device(gib, 1e12, 1e11)) if c.n_ranks == 1]
    assert changes and all(change.fits for change in changes)
    assert needed in changes[0].words, [change.words for change in changes]


def test_plan_follows_the_recipes_own_parallel_settings() -> None:
    recipe = recipe_of(
        batch_size=8, parallel={"strategy": "fsdp", "tensor_parallel": 2}, model={"dropout_attention": 0}
    )
    assert arrange(recipe, 8, DEVICES["h100-sxm"]) == Layout("fsdp", 4, 2, "bf16")
    changed = parse_recipe(
        apply_overrides(
            recipe.model_dump(mode="json"), ["train.precision=fp32", "train.parallel.reshard_after_forward=false"]
        )
    )
    assert arrange(changed, 8, DEVICES["h100-sxm"]) == Layout("zero2", 4, 2, "fp32")


def test_the_largest_micro_batch_accumulates_only_where_the_step_has_several() -> None:
    """Gradients are in memory during a forward pass unless the micro-batch is the whole step."""
    recipe = recipe_of(batch_size=16, micro_batch_size=4)
    setting = rank_setting(recipe, "bf16", on_cpu=False)
    for capacity in (3e9, 6e9, 9e9, 12e9):
        largest = largest_micro_batch(setting, int(capacity), 16)
        fits = [
            size for size in range(1, 60)
            if training_peak(replace(setting, micro_batch_size=size, accumulates=size < 16)).total_bytes <= capacity
        ]  # fmt: skip
        assert largest == max(fits, default=0)
