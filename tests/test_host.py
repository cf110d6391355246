"""The memory of hosts: complete models and checkpoints, as planned and as measured in processes."""

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gptworks
import gptworks.device
import tiny
from gptworks.config import Recipe
from gptworks.device import choose_precision
from gptworks.errors import UserError
from gptworks.planning.arrange import layout_of, rank_setting
from gptworks.planning.assumed import preset_recipe
from gptworks.planning.device_options import DeviceOptions
from gptworks.planning.device_table import find_device
from gptworks.planning.host import HostMemory, checkpoint_bytes, copied_bytes, host_memory
from gptworks.planning.layout import Layout
from gptworks.planning.memory import training_peak
from gptworks.planning.params import count_parameters
from gptworks.planning.run import plan
from gptworks.presets import preset
from gptworks.recipe import parse_recipe
from gptworks.training.setup import check_memory
from test_parallel import ranks_of

H100 = find_device("h100")
MEMORY_OF_RANKS = Path(__file__).parent.parent / "bench" / "memory_of_ranks.py"


def host_of(name: str, ranks: int, *overrides: str, **node: Any) -> HostMemory:
    device = DeviceOptions(**node).in_node(H100, ranks)
    found = host_memory(
        plan(preset_recipe(name, overrides, device, ranks)[0], device=device, n_ranks=ranks).setting, device
    )
    assert found is not None
    return found


def test_each_rank_of_a_node_makes_the_whole_model_unless_ranks_divide_it() -> None:
    total = count_parameters(preset("gpt3-350m")).total
    divided = host_of("gpt3-350m", 8, "train.parallel.strategy=fsdp")
    assert (divided.moment, divided.rank_bytes, divided.copied_bytes) == ("checkpoint", 10**9, 12 * total // 8 * 8)
    found = host_of("gpt3-350m", 8)
    assert (found.moment, found.n_ranks) == ("building the model", 8)
    assert found.rank_bytes - 10**9 == 4 * total == pytest.approx(1.42e9, rel=0.01)
    assert host_of("gpt3-350m", 64, gpus_per_node=4).n_ranks == 4
    assert host_of("gpt3-350m", 2).n_ranks == 2


def test_the_ranks_of_a_node_copy_their_parts_of_a_checkpoint() -> None:
    total = count_parameters(preset("gpt3-350m")).total
    found = host_of("gpt3-350m", 2, "train.parallel.strategy=fsdp", "train.ema_decay=0.9")
    assert (found.moment, found.copied_bytes) == ("checkpoint", 16 * total)
    assert found.total_bytes == 2 * 10**9 + 16 * total
    assert found.one_rank_bytes == 10**9 + 8 * total
    two_nodes = host_of("gpt3-350m", 2, "train.parallel.strategy=fsdp", "train.ema_decay=0.9", gpus_per_node=1)
    assert (two_nodes.moment, two_nodes.total_bytes) == ("checkpoint", 10**9 + 8 * total)
    replicated = host_of("gpt3-350m", 2, "train.ema_decay=0.9")
    assert (replicated.moment, replicated.copied_bytes) == ("checkpoint", 16 * total), "of rank 0"


def test_copies_count_each_part_once() -> None:
    """Each tensor-parallel rank has the whole embedding; SOAP's state of a matrix is on its owner only, also with
    DDP."""

    def copied(n_ranks: int, layout: Layout, optimizer: str) -> tuple[int, int]:
        train = {"batch_size": 32, "micro_batch_size": 1, "max_steps": 5, "optimizer": optimizer}
        model = {"preset": "gpt2", "dropout_attention": 0, "vocab_size": 128_000}
        tree = {"model": model, "tokenizer": {"type": "char"}, "data": {"sources": [{"type": "python-stdlib"}]}}
        setting = rank_setting(parse_recipe(tree | {"train": train}), "fp32", on_cpu=False, layout=layout)
        return copied_bytes(setting, n_ranks), checkpoint_bytes(setting)

    node, whole = copied(8, Layout("fsdp", 4, 8), "adamw")
    assert node == pytest.approx(whole / 4, rel=0.01)
    assert copied(32, Layout("fsdp", 4, 8), "adamw") == pytest.approx((whole, whole), rel=0.01)
    first, whole = copied(1, Layout("none", 16), "soap")
    parameters = count_parameters(preset("gpt2").model_copy(update={"vocab_size": 128_000}))
    matrices = [
        prod(shape) for name, shape in parameters.shapes.items() if name.startswith("blocks.") and len(shape) == 2
    ]
    replicated = 4 * parameters.total + 8 * (parameters.total - sum(matrices))
    assert replicated + (whole - replicated) / 16 <= first <= replicated + (whole - replicated) / 6
    assert copied(16, Layout("none", 16), "soap") == (whole, whole)


def test_what_a_host_does_not_hold_does_not_fit() -> None:
    fits = {gib: host_of("gpt3-13b", 8, host_memory_gib=gib).fits for gib in (150, 152)}
    assert fits == {150: False, 152: True}  # 8 × 1 GB and 154.2 GB of the checkpoint
    result = tiny.gptworks("plan", "gpt3-13b", "--device", "h100", "--world-size", "16", "--host-memory-gib", "75")
    assert result.returncode == 3
    shown = " ".join(result.stdout.split())
    assert "memory of the host" in shown and "DOES NOT FIT: 1.06 times" in shown and "97% of what there is" in shown
    assert json.loads(tiny.gptworks("plan", "gpt2", "--json").stdout)["host_memory"] is None, "a CPU's is the device's"


@pytest.mark.parametrize("layout", [Layout("fsdp", 4), Layout("zero2", 2), Layout("none", 1, 2), Layout("fsdp", 2, 2)])
def test_on_a_cpu_a_rank_copies_its_parts_of_a_checkpoint(layout: Layout) -> None:
    train = {"batch_size": 8, "micro_batch_size": 1, "max_steps": 5, "optimizer": "adamw"}
    model = {"preset": "gpt2", "dropout_attention": 0}
    tree = {"model": model, "tokenizer": {"type": "char"}, "data": {"sources": [{"type": "python-stdlib"}]}}
    setting = rank_setting(parse_recipe(tree | {"train": train}), "fp32", on_cpu=True, layout=layout)
    assert checkpoint_bytes(setting) == 12 * count_parameters(setting.model).total
    peak = training_peak(setting)
    copied = peak.parts["checkpoint_being_written"]
    assert (
        copied
        == peak.parts["weights"] + peak.parts["optimizer_state"]
        == pytest.approx(copied_bytes(setting, 1), rel=0.01)
    )
    assert peak.total_bytes - training_peak(replace(setting, saves=False)).total_bytes == copied


@pytest.mark.parametrize(
    ("name", "ranks", "node", "advised"),
    [
        ("gpt3-13b", 16, {"host_memory_gib": 75}, ["--gpus-per-node 4", "train.optimizer=muon"]),
        ("gpt3-13b", 8, {"host_memory_gib": 150}, ["--world-size 4", "--gpus-per-node 4", "train.optimizer=muon"]),
        ("gpt3-13b", 8, {"host_memory_gib": 100}, ["--gpus-per-node 4", "adapter.rank=8"]),
        ("gpt3-2.7b", 8, {"host_memory_gib": 40}, ["--world-size 2", "--gpus-per-node 2", "adapter.rank=8"]),
        ("gpt3-1.3b", 1, {"host_memory_gib": 8}, ["adapter.rank=8"]),
    ],
)
def test_what_hosts_do_not_hold_is_advised_to_have_fewer_ranks_a_host(
    name: str, ranks: int, node: dict[str, Any], advised: list[str]
) -> None:
    """The advised change fits when it is planned as written."""
    found = gptworks.plan(name, device="h100", world_size=ranks, **node)
    assert not found.fits and found.need.fits_device
    for words, change in zip(advised, found.changes, strict=False):
        assert words in change.words and change.fits and change.costs
    for change in found.changes:
        there = node | ({} if change.ranks_per_node is None else {"gpus_per_node": change.ranks_per_node})
        again = gptworks.plan(name, *change.overrides, device="h100", world_size=change.n_ranks, **there)
        assert again.fits and again.peak.total_bytes == change.peak_bytes and again.host == change.need.host


# the check before training ----------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A machine that reports 8 GPUs of 80 GB."""
    answers = {
        "is_available": True, "device_count": 8, "get_device_name": "a GPU", "is_bf16_supported": True,
        "get_device_properties": SimpleNamespace(total_memory=80 * 10**9),
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    return torch.device("cuda")


def host_has(monkeypatch: pytest.MonkeyPatch, free_bytes: int, process_bytes: int = 4 * 10**8) -> None:
    monkeypatch.setattr(gptworks.device, "available_memory_bytes", lambda: free_bytes)
    monkeypatch.setattr(gptworks.device, "_resident", lambda field: process_bytes)


def large(n_ranks: int) -> Recipe:
    """Return a recipe whose model the GPUs shard."""
    return preset_recipe("gpt3-1.3b", ["train.parallel.strategy=fsdp"], H100, n_ranks)[0]


def test_training_refuses_what_the_host_does_not_hold_before_any_work(
    gpus: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host_has(monkeypatch, 5 * 10**8)
    tree = tiny.recipe_tree(tmp_path, device="cuda", precision="fp32")
    with pytest.raises(UserError, match=r"does not fit: memory of the host: about 1 GB a node .*--force"):
        gptworks.train(tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize("n_ranks", [1, 4, 8, 16])
def test_training_refuses_what_plan_says_the_host_does_not_hold_in_its_words(
    n_ranks: int, gpus: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, local = large(n_ranks), min(n_ranks, 8)
    precision = choose_precision("bf16", gpus)

    def planned_and_checked() -> tuple[Any, str]:
        place = gptworks.device.this_device(gpus, local, n_ranks)
        layout = layout_of(recipe, n_ranks, place)
        try:
            check_memory(recipe, gpus, precision, layout=layout, n_local_ranks=local)
            said = ""
        except UserError as error:
            said = str(error)
        return plan(recipe, device=place, n_ranks=n_ranks), said

    host_has(monkeypatch, 10**12)
    found, said = planned_and_checked()
    assert found.fits and not said and found.host is not None and found.host.n_ranks == local
    processes = local * 4 * 10**8  # are there already
    host_has(monkeypatch, found.host.total_bytes - processes)
    assert planned_and_checked()[1] == ""
    host_has(monkeypatch, found.host.total_bytes - processes - 1)
    found, said = planned_and_checked()
    assert not found.fits and found.need.fits_device
    assert f"memory of the host: {found.host.words}." in said
    assert "DOES NOT FIT" in found.host.words
    if n_ranks == 16:
        assert "with 4 of 16 ranks on each machine" in said
    if n_ranks in (4, 8):
        assert f"on {n_ranks // 2} devices" in said


def test_the_host_of_a_gpu_has_what_is_free_and_what_this_process_holds(
    gpus: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_has(monkeypatch, 10**10)
    assert gptworks.device.host_memory_bytes(gpus) == 10**10 + 4 * 10**8
    assert gptworks.device.host_memory_bytes(torch.device("cpu")) is None


# real processes ---------------------------------------------------------------------------------------------


def grown(folder: Path, n_ranks: int, recipe: dict[str, Any]) -> list[int]:
    """By how many bytes each rank's process grows, from before it makes its model."""
    (folder / "r.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    narrow = ("model.d_model=64", f"run_dir={folder / 'narrow'}")
    ranks_of(n_ranks, "rank", folder / "grown", folder / "r.yaml", *narrow, program=MEMORY_OF_RANKS, new=True)
    return [int((folder / f"grown.{rank}").read_text()) for rank in range(n_ranks)]


def watched(folder: Path, n_ranks: int, d_model: int, **train: Any) -> tuple[list[int], list[int]]:
    """Return the growth of each rank's process, and the planned memory."""
    tree = tiny.recipe_tree(folder, max_steps=3, batch_size=2 * n_ranks, micro_batch_size=1, optimizer="adamw",
                            precision="fp32", evaluate_every=3, evaluate_sequences=2, checkpoint_every=2,
                            parallel={"strategy": "fsdp"}, **train)  # fmt: skip
    tree["model"] |= {
        "d_model": d_model, "n_layers": 6, "n_heads": 8, "dropout_residual": 0, "dropout_attention": 0,
        "context_length": 64, "vocab_size": 43,
    }  # fmt: skip
    recipe = parse_recipe(tree)
    setting = rank_setting(recipe, "fp32", on_cpu=True, layout=Layout("fsdp", n_ranks))
    return grown(folder, n_ranks, tree), [training_peak(setting).total_bytes] * n_ranks


@pytest.mark.skipif(sys.platform != "linux", reason="reads high-water marks from /proc")
@pytest.mark.parametrize(
    ("n_ranks", "d_model"),
    [pytest.param(n, d, marks=pytest.mark.ranks) for n, d in ((2, 512), (2, 768), (2, 1024), (4, 768), (4, 1024))],
)
def test_high_water_marks_of_fsdp_ranks_are_the_planned_ones(n_ranks: int, d_model: int, tmp_path: Path) -> None:
    real, expected = watched(tmp_path, n_ranks, d_model)
    for rank, (found, due) in enumerate(zip(real, expected, strict=True)):
        print(f"{n_ranks} ranks, d_model {d_model}, rank {rank}: {found / 1e6:.0f} MB, planned {due / 1e6:.0f} MB")
    for found, due in zip(real, expected, strict=True):
        assert due == pytest.approx(found, rel=0.1)
