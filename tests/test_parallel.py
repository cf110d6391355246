"""One recipe on many devices: the same gradients, samples and loss for any number of ranks."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import distributed
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import chats
import commands
import rank_worker
import tiny
from commands import Process
from gptworks.checkpoint import checkpoints, choose_checkpoint
from gptworks.errors import RunError, UserError
from gptworks.model.gpt import GPT
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.distributed import agreed
from gptworks.training.distributed.agreed import agreed_checkpoint
from gptworks.training.distributed.deferred import Deferred
from gptworks.training.distributed.ranks import ALONE, Ranks
from gptworks.training.distributed.shards import Owners
from gptworks.training.loop import train
from gptworks.training.optim.muon import Muon
from gptworks.training.record.metrics import read_metrics
from gptworks.training.setup import check_parallel
from test_resume import assert_same_run

WORKER = Path(__file__).with_name("rank_worker.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
NO_DROPOUT = ["model.dropout_attention=0", "model.dropout_residual=0"]


def torchrun(n_ranks: int, *arguments: str | Path, fails: bool = False) -> str:
    """Run the worker in n processes; return their standard error."""
    command = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}", WORKER, *arguments)
    result = commands.run(*command)
    assert (result.returncode != 0) == fails, result.stderr[-6000:]
    return result.stderr


def ranks_of(
    n_ranks: int, *arguments: str | Path, fails: bool = False, program: Path = WORKER, new: bool = False
) -> str:
    """The worker, or another program, in so many processes, started as torchrun starts them; what they say on stderr.
    new: each in a new Python."""
    with started_ranks(n_ranks, program, *arguments, new=new, stdout=subprocess.DEVNULL) as started:
        with ThreadPoolExecutor(n_ranks) as pool:
            said = "".join(pool.map(lambda process: process.communicate(timeout=240)[1], started))
        codes = [process.returncode for process in started]
    assert any(codes) == fails, f"exit codes {codes}; {said[:3000]} … {said[-3000:]}"
    return said


@contextmanager
def started_ranks(n_ranks: int, *arguments: str | Path, **options: Any) -> Iterator[list[Process]]:
    """`python ARGUMENTS` in a process for each rank, and the store that a launcher hosts; killed at the end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    options = {"stderr": subprocess.PIPE} | options
    started = [
        commands.start(*arguments, env=common | {"RANK": rank, "LOCAL_RANK": rank}, **options)
        for rank in map(str, range(n_ranks))
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()


def launch(n_ranks: int, recipe: Path, *arguments: str) -> Process:
    command = ("-m", "gptworks", "launch", f"--nproc={n_ranks}", recipe, *arguments)
    return commands.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def process_of(launcher: Process, rank: int) -> int:
    """Return the id of a rank's process."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="ascii").split()
    for child in map(int, children):
        if f"RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text().replace("LOCAL_RANK", "LOCAL"):
            return child
    raise AssertionError(f"no process has rank {rank}")


def wait_for_step(launcher: Process, run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while max((record["step"] for record in read_metrics(run_dir / "metrics.jsonl")), default=0) < step:
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < deadline, "the run does not move"
        time.sleep(0.01)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks' processes in /proc")


BUILDS_ON_NODES = """
import os, sys
os.makedirs(node := f"node-{0 if os.environ['RANK'] == '0' else 1}", exist_ok=True)
os.chdir(node)

from gptworks.cli import main
from gptworks.data import prepare

write_dataset = prepare.write_dataset

def counted(*arguments):
    with open("builds", "a") as file:
        file.write(os.environ["RANK"])
    write_dataset(*arguments)

prepare.write_dataset = counted
main()
"""
"""Trains on one of two nodes, each with a disk of its own for prepared data; writes which rank built the data."""


@pytest.mark.ranks
def test_data_on_the_nodes_own_disks_are_built_once_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has the first node, ranks 1 and 2 the second."""
    monkeypatch.chdir(tmp_path)
    Path("rank.py").write_text(BUILDS_ON_NODES)
    recipe = tiny.write_recipe(
        tmp_path, optimizer="adamw", max_steps=1, warmup_steps=0, batch_size=6, micro_batch_size=2
    )
    ranks_of(3, "train", recipe, "data.cache_dir=data", program=tmp_path / "rank.py")
    assert Path("node-0/builds").read_text() == "0"
    assert Path("node-1/builds").read_text() in ("1", "2")
    built = [[one.name for one in Path(f"node-{n}/data").glob("shards-*")] for n in (0, 1)]
    assert len(built[0]) == 1 and built[0] == built[1]


# ------------------------------------------------------------------------------------------------- gradients

MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 2, "qk_norm": True, "position": "rope"},
    "biased": {"norm": "layernorm", "mlp": "gelu", "attention_bias": True, "mlp_bias": True, "tie_embeddings": False},
    "experts": {"mlp": "swiglu", "n_experts": 3, "n_experts_per_token": 2},
    "laboratory": {
        "n_kv_heads": 2, "unet_skips": True, "value_residual": True, "smear": True,
        "value_embeddings": ("table", "projected"), "attention_gate": True, "gate_channels": 7, "bigram_vocab_size": 61,
        "n_future_tokens": 3,
    },
    "laboratory, own head, experts": {
        "n_experts": 3, "n_kv_heads": 1, "tie_embeddings": False, "norm_placement": "both", "logit_softcap": 9.0,
        "value_embeddings": ("projected", "table"), "unet_skips": True, "bigram_vocab_size": 31,
        "n_future_tokens": 2,
    },
    "repeated": {"layer_repeats": (1, 2), "smear": True, "bigram_vocab_size": 61},
}  # fmt: skip


INITIAL: dict[str, dict[str, Any]] = {
    "gpt2": {"init": "gpt2", "norm": "layernorm", "mlp": "gelu", "position": "learned", "qk_norm": False},
    "xavier": {"init": "xavier"},
    "induction": {"init": "induction"},
    "induction, own head": {"init": "induction", "tie_embeddings": False, "n_future_tokens": 2},
}


def case(
    model: str,
    layout: tuple[str, int, int],
    checkpoint_blocks: bool = False,
    lacks_gradients: bool = False,
    **train: Any,
) -> dict[str, Any]:
    sharding, data, tensor = layout
    gathers = train.get("precision", "fp32") if sharding != "none" else "fp32"
    fields = {"vocab_size": 43, "context_length": 16, "n_layers": 2, "d_model": 32, "n_heads": 4}
    return {
        "recipe": {
            "model": fields | (MODELS | INITIAL)[model],
            "tokenizer": {"type": "char"},
            "data": {"sources": [{"type": "python-stdlib"}]},
            "train": {"max_steps": 1, "batch_size": 8, "micro_batch_size": 2, "precision": "fp32"} | train,
        },
        "layout": {"sharding": sharding, "data_parallel": data, "tensor_parallel": tensor, "gathers": gathers},
        "checkpoint_blocks": checkpoint_blocks,
        "lacks_gradients": lacks_gradients,
    }


GRADIENT_CASES = {
    2: {
        "ddp": case("grouped", ("none", 2, 1)),
        "ddp, own head, checkpointed": case("biased", ("none", 2, 1), checkpoint_blocks=True),
        "ddp, gradients on some ranks alone": case("grouped", ("none", 2, 1), lacks_gradients=True),
        "fsdp": case("grouped", ("fsdp", 2, 1)),
        "fsdp, own head": case("biased", ("fsdp", 2, 1)),
        "fsdp, checkpointed": case("grouped", ("fsdp", 2, 1), checkpoint_blocks=True),
        "fsdp without resharding": case("grouped", ("zero2", 2, 1)),
        "fsdp gathering bf16": case("grouped", ("fsdp", 2, 1), precision="bf16"),
        "fsdp gathering bf16, biased": case("biased", ("fsdp", 2, 1), precision="bf16", micro_batch_size=4),
        "fsdp gathering bf16, experts": case("experts", ("fsdp", 2, 1), precision="bf16"),
        "fsdp gathering bf16, checkpointed": case("grouped", ("fsdp", 2, 1), checkpoint_blocks=True, precision="bf16"),
        "ddp, laboratory": case("laboratory", ("none", 2, 1)),
        "ddp, repeated": case("repeated", ("none", 2, 1)),
        "fsdp, laboratory": case("laboratory", ("fsdp", 2, 1)),
        "fsdp, laboratory, own head, experts": case("laboratory, own head, experts", ("fsdp", 2, 1)),
        "fsdp without resharding, laboratory": case("laboratory", ("zero2", 2, 1)),
        "fsdp gathering bf16, laboratory": case("laboratory", ("fsdp", 2, 1), precision="bf16"),
        "fsdp gathering bf16, laboratory, checkpointed": case(
            "laboratory", ("fsdp", 2, 1), checkpoint_blocks=True, precision="bf16"
        ),
        "tensor": case("grouped", ("none", 1, 2)),
        "tensor, biased": case("biased", ("none", 1, 2)),
        "tensor, checkpointed": case("grouped", ("none", 1, 2), checkpoint_blocks=True),
    },
    4: {
        "ddp": case("grouped", ("none", 4, 1)),
        "fsdp": case("biased", ("fsdp", 4, 1)),
        "ddp × tensor": case("grouped", ("none", 2, 2)),
        "fsdp × tensor": case("grouped", ("fsdp", 2, 2)),
        "fsdp × tensor, biased": case("biased", ("fsdp", 2, 2)),
        "fsdp gathering bf16": case("biased", ("zero2", 4, 1), precision="bf16"),
        "fsdp × tensor, checkpointed": case("grouped", ("fsdp", 2, 2), checkpoint_blocks=True),
    },
}


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_gradients_are_those_of_one_process(n_ranks: int, tmp_path: Path) -> None:
    """In bf16 too: a gathered matrix is rounded as by autocast, and all else is float32."""
    cases = GRADIENT_CASES[n_ranks]
    (tmp_path / "cases").write_text(json.dumps(list(cases.values())), encoding="utf-8")
    ranks_of(n_ranks, "gradients", tmp_path / "cases")
    results = json.loads((tmp_path / "cases.results").read_text(encoding="utf-8"))
    print(f"{n_ranks} ranks: largest relative difference {max(result['worst'] for result in results):.1e}")
    for name, result in zip(cases, results, strict=True):
        assert result["worst"] < 1e-5, name
        assert result["norm"] == pytest.approx(1, rel=1e-5), name
        if "begun" in result:
            assert result["differing"] == 0, name
            on_first, on_second, *_ = result["begun"]
            assert min(on_first, on_second) > 1, f"{name}: gradients are added up while the backward pass goes on"
            assert (on_first > on_second) == ("some ranks" in name), name


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.ranks)])
def test_ranks_divide_updates_of_whole_matrices_and_any_number_goes_on_with_the_same_bits(
    n_ranks: int, tmp_path: Path
) -> None:
    """In every layout, with the same gradients, whether several ranks start and one continues or one starts and several
    continue."""
    layouts = {2: [("none", 2, 1), ("fsdp", 2, 1), ("none", 1, 2)], 4: [("fsdp", 4, 1), ("none", 2, 2), ("fsdp", 2, 2)]}
    kinds = (
        ("grouped", "muon"), ("grouped", "normuon"), ("experts", "normuon"), ("grouped", "soap"), ("experts", "soap")
    )  # fmt: skip
    cases = [
        case(model, layout, optimizer=kind, soap_frequency=2, cautious_weight_decay=kind == "soap")
        for model, kind in kinds
        for layout in layouts[n_ranks]
        if model == "grouped" or layout[2] == 1  # tensor parallelism does not divide experts
    ]
    (tmp_path / "cases").write_text(json.dumps(cases), encoding="utf-8")
    torchrun(n_ranks, "owners", tmp_path / "cases")
    for one, result in zip(cases, json.loads((tmp_path / "cases.results").read_text(encoding="utf-8")), strict=True):
        assert result["differing"] == 0, one["layout"]
        kind = one["recipe"]["train"]["optimizer"]
        print(f"{n_ranks} ranks, {kind}, {one['layout']}: {max(result['work']):.3f} of the work, {result['state']}")
        assert max(result["work"]) < 1.1 / n_ranks + 0.05, one["layout"]
        if kind == "soap":
            assert max(result["state"]) < 1.2 / n_ranks + 0.05, one["layout"]


def test_a_step_of_muon_does_not_slice_the_mesh_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice takes a tenth of a millisecond: with 64 ranks, a step would wait longer for the CPU than it computes."""
    distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    try:
        mesh = init_device_mesh("cpu", (64, 1), mesh_dim_names=("data", "tensor"))
        shards = [distribute_tensor(torch.ones(128, 8), mesh["data"], [Shard(0)], src_data_rank=None) for _ in range(4)]
        parameters = [torch.nn.Parameter(shard) for shard in shards]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        optimizer, sliced, slice_of = Muon(parameters, row_beta=0.9, mesh=mesh), [], DeviceMesh.__getitem__
        monkeypatch.setattr(DeviceMesh, "__getitem__", lambda self, name: sliced.append(name) or slice_of(self, name))
        optimizer.step()
        assert len(sliced) <= 2
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("dimensions", [(), ("data",), ("tensor",), ("data", "tensor")])
def test_each_rank_has_one_number_among_the_owners_in_every_layout(dimensions: tuple[str, ...]) -> None:
    for rank in range(6):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "tensor"))
            owners = Owners(mesh, dimensions)
            assert owners.ranks[owners.number] == rank and sorted(owners.ranks) == list(range(6))
        finally:
            distributed.destroy_process_group()


def test_a_tensor_whose_values_were_not_recorded_is_not_left_as_its_memory_is() -> None:
    config = parse_recipe(case("grouped", ("fsdp", 2, 1))["recipe"]).model
    with Deferred() as deferred:
        model = GPT(config)
        model.norm.weight = torch.nn.Parameter(torch.arange(32.0))
    deferred.name(model)
    here = {name: torch.empty(parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(AssertionError, match=r"no recorded operation fills norm\.weight"):
        deferred.fill(here, config, mesh=None)


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.ranks)])
def test_a_model_that_ranks_divide_begins_with_the_bits_of_one_device_and_is_never_whole(
    n_ranks: int, tmp_path: Path
) -> None:
    layouts = {2: [("fsdp", 2, 1), ("none", 1, 2)], 4: [("fsdp", 4, 1), ("none", 2, 2), ("fsdp", 2, 2)]}[n_ranks]
    divisible = ("grouped", "biased", *INITIAL)
    cases = {
        f"{model}, {layout}": case(model, layout)
        for model in MODELS | INITIAL
        for layout in layouts
        if model != "repeated" and (layout[2] == 1 or model in divisible[:-1])
    }
    for model in ("grouped", "induction"):
        cases[f"an adapter of {model}"] = case(model, layouts[0])
        cases[f"an adapter of {model}"]["recipe"] |= {"adapter": {"rank": 8}, "initialize_from": "base"}
    (tmp_path / "cases").write_text(json.dumps(list(cases.values())), encoding="utf-8")
    ranks_of(n_ranks, "built", tmp_path / "cases")
    results = json.loads((tmp_path / "cases.results").read_text(encoding="utf-8"))
    for name, result in zip(cases, results, strict=True):
        print(f"{n_ranks} ranks, {name}: {result['held']:.2f} of two tensors")
        assert result["differing"] == [], name
        assert result["held"] < (1.5 if "induction" in name else 0.6), name


# ------------------------------------------------------------------------------------------------------ runs

LAYOUTS = {
    2: {
        "ddp": ["train.parallel.strategy=ddp"],
        "fsdp": ["train.parallel.strategy=fsdp"],
        "zero2": ["train.parallel.strategy=fsdp", "train.parallel.reshard_after_forward=false"],
        "tensor": ["train.parallel.tensor_parallel=2"],
    },
    4: {"fsdp-tensor": ["train.parallel.strategy=fsdp", "train.parallel.tensor_parallel=2"]},
}


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.ranks)])
def test_the_loss_is_that_of_one_process(n_ranks: int, tmp_path: Path) -> None:
    common = {
        "max_steps": 50,
        "evaluate_every": 25,
        "sample_every": 25,
        "sample_tokens": 8,
        "ema_decay": 0.9,
        "cautious_weight_decay": True,
        "smaller_batches": [[10, 4]],
        "checkpoint_every": 50,
        "keep_every": 50,
    }
    path = tiny.write_recipe(tmp_path, optimizer="adamw", precision="fp32", **common)
    train(load_recipe(path, [f"run_dir={tmp_path / 'alone'}", *NO_DROPOUT]))
    cases = [
        {
            "path": str(path),
            "overrides": [f"run_dir={tmp_path / name}", *NO_DROPOUT, *overrides],
            "gathered": str(tmp_path / f"{name}.gathered"),
        }
        for name, overrides in LAYOUTS[n_ranks].items()
    ]
    (tmp_path / "cases").write_text(json.dumps(cases), encoding="utf-8")
    ranks_of(n_ranks, "train", tmp_path / "cases")
    alone = list(read_metrics(tmp_path / "alone" / "metrics.jsonl"))
    assert {record["kind"] for record in alone} == {"train", "validation", "sample"}
    for name in LAYOUTS[n_ranks]:
        shared = list(read_metrics(tmp_path / name / "metrics.jsonl"))
        for one, other in zip(alone, shared, strict=True):
            assert [other[key] for key in ("kind", "step")] == [one[key] for key in ("kind", "step")]
            if one["kind"] == "sample":
                assert other["text"] == one["text"], name
            else:
                assert other["loss"] == pytest.approx(one["loss"], abs=1e-4), f"{name}, step {one['step']}"
                assert other["tokens"] == one["tokens"]
        assert f"{n_ranks}: " in (tmp_path / name / "model-card.md").read_text(encoding="utf-8")
        for rank in range(n_ranks):  # at 0 and 25 (a best) without optimizer state; at 50 all
            noted = (tmp_path / f"{name}.gathered.{rank}").read_text(encoding="utf-8").split()
            assert noted == ["weights", "weights", "weights", "moments"], name


IN_BF16: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("fsdp", {}, {"optimizer": "adamw"}),
    "laboratory": ("fsdp", MODELS["laboratory"], {
        "optimizer": "adamw", "ema_decay": 0.5, "rate_factors": {"embeddings": 0.5, "vectors": 2.0},
    }),
    "repeated, untied": ("ddp", MODELS["repeated"] | {"tie_embeddings": False}, {
        "optimizer": "normuon", "shorter_contexts": [[4, 8]],
    }),
}  # fmt: skip
"""Strategy, settings of the model and of training."""


def test_in_bf16_the_loss_is_that_of_one_process_too(tmp_path: Path) -> None:
    """Gathered matrices are rounded as by autocast, in evaluations and samples too."""
    common = {"max_steps": 12, "evaluate_every": 6, "sample_every": 6, "sample_tokens": 8, "checkpoint_every": 12}
    cases = []
    for name, (strategy, model, settings) in IN_BF16.items():
        tree = tiny.recipe_tree(tmp_path, precision="bf16", **common, **settings)
        tree["model"] |= model | {"dropout_attention": 0.0, "dropout_residual": 0.0}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(json.loads(json.dumps(tree))), encoding="utf-8")
        train(load_recipe(path, [f"run_dir={tmp_path / f'{name} alone'}"]))
        overrides = [f"run_dir={tmp_path / name}", f"train.parallel.strategy={strategy}"]
        cases.append({"path": str(path), "overrides": overrides})
    (tmp_path / "cases").write_text(json.dumps(cases), encoding="utf-8")
    ranks_of(2, "train", tmp_path / "cases")
    for name in IN_BF16:
        alone, shared = (list(read_metrics(tmp_path / run / "metrics.jsonl")) for run in (f"{name} alone", name))
        assert [record["kind"] for record in shared] == [record["kind"] for record in alone]
        losses = [[record["loss"] for record in run if "loss" in record] for run in (alone, shared)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-3), name


TUNED: dict[str, dict[str, Any]] = {
    "packed, frozen, fsdp": {"freeze": {"first_blocks": 1}},
    "adapter over int4, ddp": {"adapter": {"rank": 4, "base": "int4"}},
    "moments in 8 bits, ddp": {},
    "preference, fsdp": {"objective": {"type": "preference"}},
    "distillation, fsdp": {"objective": {"type": "distillation"}},
    "reward, fsdp": {"objective": {"type": "reward", "group_size": 4, "max_tokens": 4, "beta": 0,
                                   "allow": ["little-learned"]}},
}  # fmt: skip


def test_other_objectives_lose_as_in_one_process(tmp_path: Path) -> None:
    base = chats.base_tree(tmp_path, max_steps=20, optimizer="adamw", precision="fp32", checkpoint_every=20)
    train(parse_recipe(base))
    pairs = [row | {"chosen": row["output"], "rejected": row["output"][::-1]} for row in chats.records()]
    chats.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    cases = []
    for name, changes in TUNED.items():
        tree = chats.tune_tree(tmp_path, max_steps=10, optimizer="adamw", precision="fp32", evaluate_every=10) | changes
        tree["tokenizer"] |= {"added_tokens": [], "chat_template": "plain"}
        if "8 bits" in name:
            tree["train"]["optimizer_state"] = "int8"
        if "preference" in name:
            tree["data"] |= {"sources": [{"type": "preferences", "path": str(tmp_path / "pairs.jsonl")}]}
        if "distillation" in name:
            tree["objective"] |= {"teacher": str(tmp_path / "base")}
        if "reward" in name:
            (tmp_path / "share.py").write_text(
                "def of_e(completion, prompt, answer):\n    return completion.count('e') / (1 + len(completion))\n"
            )
            tree["objective"] |= {"reward": f"{tmp_path / 'share.py'}:of_e"}
            tree["train"] |= {"batch_size": 16, "micro_batch_size": 8, "learning_rate": 1e-4}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        train(load_recipe(path, [f"run_dir={tmp_path / f'{name} alone'}"]))
        strategy = f"train.parallel.strategy={name.split(', ')[-1]}"
        cases.append({"path": str(path), "overrides": [f"run_dir={tmp_path / name}", strategy]})
    (tmp_path / "cases").write_text(json.dumps(cases), encoding="utf-8")
    ranks_of(2, "train", tmp_path / "cases")
    for name in TUNED:
        alone, shared = (list(read_metrics(tmp_path / run / "metrics.jsonl")) for run in (f"{name} alone", name))
        assert len(alone) == 11
        for one, other in zip(alone, shared, strict=True):
            assert (other["kind"], other["step"]) == (one["kind"], one["step"])
            assert other["loss"] == pytest.approx(one["loss"], abs=1e-4), f"{name}, step {one['step']}"
            assert other.get("reward") == pytest.approx(one.get("reward"), abs=1e-4), f"{name}, step {one['step']}"
        assert alone[-2]["grad_norm"] != alone[0]["grad_norm"], name


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
def test_one_two_and_one_ranks_see_the_same_samples_and_go_on_with_the_same_loss(
    optimizer: str, tmp_path: Path
) -> None:
    """With dropout, whose masks depend on the micro-batch, and with sharding in between, also of the optimizer's state.
    SOAP divides tiny moments by their root: on one device, other micro-batches change its losses by up to 0.01."""
    path = tiny.write_recipe(tmp_path, optimizer=optimizer, precision="fp32", schedule="constant", max_steps=30)
    whole = {"path": str(path), "overrides": [f"run_dir={tmp_path / 'whole'}"], "seen": str(tmp_path / "whole.seen")}
    parts = [
        {
            "path": str(path),
            "overrides": [f"run_dir={tmp_path / 'parts'}", f"train.max_steps={steps}", "train.parallel.strategy=fsdp"],
            "resume": True,
            "seen": str(tmp_path / f"{steps}.seen"),
        }
        for steps in (10, 20, 30)
    ]
    rank_worker.runs([whole, parts[0]], ALONE)
    (tmp_path / "cases").write_text(json.dumps([parts[1]]), encoding="utf-8")
    ranks_of(2, "train", tmp_path / "cases")
    rank_worker.runs([parts[2]], ALONE)

    def seen(name: str) -> list[str]:
        files = sorted(tmp_path.glob(f"{name}.[0-9]"))
        columns = [file.read_text(encoding="utf-8").split() for file in files]
        return [digest for row in zip(*columns, strict=True) for digest in row]

    assert len(list(tmp_path.glob("20.[0-9]"))) == 2
    assert seen("10") + seen("20") + seen("30") == seen("whole")
    curves = [
        [(r["step"], r["loss"]) for r in read_metrics(tmp_path / run / "metrics.jsonl") if r["kind"] == "train"]
        for run in ("whole", "parts")
    ]
    assert [step for step, _ in curves[1]] == list(range(1, 31))
    noise = 1e-4 if optimizer == "adamw" else 0.03
    assert [loss for _, loss in curves[1]] == pytest.approx([loss for _, loss in curves[0]], abs=noise)


# ------------------------------------------------------------------------------------- ends, good and bad


@needs_proc
def test_sigterm_to_one_rank_saves_one_step_for_both(tmp_path: Path) -> None:
    recipe, run_dir = (
        tiny.write_recipe(tmp_path, optimizer="adamw", max_steps=5000, checkpoint_every=5000),
        tmp_path / "run",
    )
    launcher = launch(2, recipe)
    wait_for_step(launcher, run_dir, 3)
    os.kill(process_of(launcher, rank=1), signal.SIGTERM)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 75, output
    assert "stopped by SIGTERM" in output
    assert "Traceback" not in output
    saved = checkpoints(run_dir)[0]
    saved.verify()
    assert saved.step == max(record["step"] for record in read_metrics(run_dir / "metrics.jsonl"))


@needs_proc
@pytest.mark.ranks
def test_a_stopped_rank_is_named_and_the_run_ends(tmp_path: Path) -> None:
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw", max_steps=5000, parallel={"timeout_seconds": 4})
    launcher = launch(2, recipe)
    wait_for_step(launcher, tmp_path / "run", 3)
    stopped = process_of(launcher, rank=1)
    os.kill(stopped, signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1, output
    assert f"error: rank 1 (process {stopped} on " in output
    assert "does not answer" in output
    assert "Traceback" not in output
    assert not Path(f"/proc/{stopped}").exists(), "the stopped rank is still there"


@pytest.mark.ranks
def test_a_rank_that_sleeps_while_others_wait_is_named(tmp_path: Path) -> None:
    """Its heartbeats continue; with sharded models, the others wait within a step that the rank has not begun."""
    path = tiny.write_recipe(tmp_path, optimizer="adamw", parallel={"strategy": "fsdp"})
    cases = [{"path": str(path), "overrides": [], "sleeps": 1}]
    (tmp_path / "cases").write_text(json.dumps(cases), encoding="utf-8")
    said = ranks_of(2, "train", tmp_path / "cases", "3", fails=True)
    assert "error: rank 1 (process " in said
    assert "rank 0 (process " not in said


@needs_proc
@pytest.mark.ranks
def test_a_killed_rank_ends_the_run_which_resumes_bit_for_bit(tmp_path: Path) -> None:
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw", max_steps=40)
    whole = launch(2, recipe, f"run_dir={tmp_path / 'whole'}")
    output, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, output
    killed = launch(2, recipe, f"run_dir={tmp_path / 'killed'}")
    wait_for_step(killed, tmp_path / "killed", 14)
    os.kill(process_of(killed, rank=1), signal.SIGKILL)
    output, _ = killed.communicate(timeout=60)
    assert killed.returncode == 128 + signal.SIGKILL, output
    assert "rank 1 was ended by SIGKILL" in output
    assert "Traceback" not in output
    resumed = launch(2, recipe, f"run_dir={tmp_path / 'killed'}", "--resume")
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.fixture
def two_nodes() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a pair of virtual interfaces; yields the prefix of commands that run in each."""
    names = [f"gptworks{os.getpid()}{side}" for side in "ab"]
    ends = [f"gw{os.getpid() % 100000}{side}" for side in "ab"]
    setup = [["ip", "netns", "add", name] for name in names]
    setup.append(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]])
    for i, (name, end) in enumerate(zip(names, ends, strict=True)):
        setup += [
            ["ip", "link", "set", end, "netns", name],
            ["ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", end],
            ["ip", "-n", name, "link", "set", end, "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    try:
        for command in setup:
            if shutil.which("ip") is None or subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip(f"no network namespaces here: `{' '.join(command)}` fails")
        yield [
            ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}"]
            for name, end in zip(names, ends, strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.ranks
def test_two_nodes_train_as_one_does(two_nodes: list[list[str]], tmp_path: Path) -> None:
    """Two simulated machines with two ranks each, on separate networks, with a torchrun on each."""
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw", precision="fp32", micro_batch_size=2)
    train(load_recipe(recipe, [f"run_dir={tmp_path / 'alone'}"]))
    nodes = [
        subprocess.Popen(
            [
                *node, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
                f"--node-rank={rank}", "--master-addr=10.77.0.1", "--master-port=29517", "-m", "gptworks", "train",
                str(recipe), "train.parallel.strategy=fsdp",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
        )
        for rank, node in enumerate(two_nodes)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    alone, shared = (
        [r["loss"] for r in read_metrics(tmp_path / run / "metrics.jsonl") if r["kind"] == "train"]
        for run in ("alone", "run")
    )
    assert shared == pytest.approx(alone, abs=1e-4)


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("n_ranks", "changes", "message"),
    [
        (3, {}, "train.batch_size=8 is not a multiple of 3 ranks × micro_batch_size=2"),
        (16, {}, "train.batch_size=8 is not a multiple of 16 ranks × micro_batch_size=1"),
        (3, {"train.parallel.tensor_parallel": 2}, "3 ranks are not a multiple of train.parallel.tensor_parallel=2"),
        (4, {"train.parallel.tensor_parallel": 4}, "model.n_heads=2 is not a multiple of"),
        (2, {"train.parallel.tensor_parallel": 2, "model.n_kv_heads": 1}, "model.n_kv_heads=1 is not a multiple of"),
        (2, {"train.parallel.tensor_parallel": 2, "model.d_ff": 33}, "model.d_ff=33 is not a multiple of"),
        (2, {"train.parallel.tensor_parallel": 2, "model.n_experts": 2, "model.n_experts_per_token": 1}, "experts"),
        (2, {"train.parallel.tensor_parallel": 2}, "dropout_attention to 0"),
        (2, {"train.parallel.strategy": "fsdp", "train.precision": "fp16"}, "use bf16 or fp32"),
    ],
)
def test_what_cannot_be_shared_is_refused(n_ranks: int, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path, optimizer="adamw")
    recipe = load_recipe(path, [f"{key}={value}" for key, value in changes.items()])
    with pytest.raises(UserError) as raised:
        check_parallel(recipe, n_ranks)
    assert message in str(raised.value)


def test_launch_refuses_at_once_and_says_it_once(tmp_path: Path) -> None:
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw")
    result = tiny.gptworks("launch", "--nproc", "3", recipe)
    assert result.returncode == 2
    assert result.stderr.count("error:") == 1
    assert not (tmp_path / "data").exists()


def test_what_stops_the_first_rank_stops_all_and_is_said_once(tmp_path: Path) -> None:
    """Only rank 0, which prepares the text, knows the tokenizer's vocabulary at that point."""
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw")
    launcher = launch(2, recipe, "model.vocab_size=7")
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 2, output
    assert output.count("error:") == 1
    assert "Traceback" not in output


def test_a_rank_that_does_not_see_the_run_folder_is_named_and_none_starts_afresh(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path, optimizer="adamw", max_steps=4, schedule="constant")
    train(load_recipe(path))
    case = {"path": str(path), "overrides": ["train.max_steps=8"], "resume": True, "blind": 1}
    (tmp_path / "cases").write_text(json.dumps([case]), encoding="utf-8")
    said = ranks_of(2, "train", tmp_path / "cases", fails=True)
    assert "rank 1 of 2 does not see" in said
    assert f"the run folder {tmp_path / 'run'} as rank 0 does" in said
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path / "run")] == [4]


def test_a_run_folder_that_a_rank_does_not_see_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    case = {"path": str(tiny.write_recipe(tmp_path, max_steps=3)), "overrides": [], "blind": 1}
    other = tmp_path / "run" / "on another disk"
    (tmp_path / "cases").write_text(json.dumps([case]), encoding="utf-8")
    said = ranks_of(2, "train", tmp_path / "cases", fails=True)
    assert f"rank 1 of 2 does not see the run folder {tmp_path / 'run'}" in said
    assert said.count("does not see") == 1
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left <= {".lock"} and not other.exists()


def test_a_run_folder_that_all_see_is_left_as_it_was_and_other_characters_are_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreed, "SHARED_SECONDS", 0.3)
    folders = [tmp_path / "a", tmp_path / "a"], [tmp_path / "a", tmp_path / "b"]
    for folder in {*folders[0], *folders[1]}:
        folder.mkdir()
    (tmp_path / "b" / agreed.SHARED).write_text("0" * 32, encoding="ascii")
    for pair, found in zip(folders, ("", "rank 1 of 2"), strict=True):
        meeting, board = threading.Barrier(2), dict[str, Any]()
        with ThreadPoolExecutor(2) as pool:
            looked = [
                pool.submit(agreed.check_shared, InThreads(rank, meeting, board), folder)
                for rank, folder in enumerate(pair)
            ]
            errors = [each.exception(60) for each in looked]
        assert [isinstance(error, UserError) for error in errors] == [bool(found)] * 2
        assert all(found in str(error) for error in errors if error)
        assert not (tmp_path / "a" / agreed.SHARED).exists()


def test_a_rank_that_may_not_write_to_the_run_folder_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreed, "SHARED_SECONDS", 0.3)
    opened, real, meeting = threading.local(), agreed.open_to_change, threading.Barrier(2)

    def of_rank(rank: int) -> BaseException | None:
        opened.rank = rank
        with pytest.raises(RunError) as raised:
            agreed.check_shared(InThreads(rank, meeting, board), tmp_path)
        return raised.value

    def refused(path: Path, **named: Any) -> Any:
        if opened.rank == 1:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **named)

    monkeypatch.setattr(agreed, "open_to_change", refused)
    board = dict[str, Any]()
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(of_rank, range(2)))
    assert "rank 1: Permission denied" in str(errors[1])
    assert not list(tmp_path.iterdir())


class InThreads(Ranks):
    """One of two ranks that are threads of this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, board: dict[str, Any]) -> None:
        self.rank, self.size, self._meeting, self._board = rank, 2, meeting, board

    def _meet(self, key: str, value: Any) -> list[Any]:
        self._board[f"{key}/{self.rank}"] = value
        self._meeting.wait(60)
        values = [self._board[f"{key}/{rank}"] for rank in range(2)]
        self._meeting.wait(60)
        return values

    def from_rank_zero(self, work: Callable[[], Any]) -> Any:
        value: Any = None
        try:
            value = work() if self.is_rank_zero else None
        except UserError as error:
            value = error
        value = self._meet("first", value)[0]
        if isinstance(value, UserError):
            raise value
        return value

    def all_reduce(self, numbers: list[float]) -> list[float]:
        return [sum(each) for each in zip(*self._meet("sum", numbers), strict=True)]


@pytest.mark.parametrize("other", ["the same", "gone", "of other weights"])
def test_ranks_use_the_checkpoint_that_rank_0_chooses_or_none_does(other: str, tmp_path: Path) -> None:
    """Rank 1 looks later, when the source run has saved and deleted checkpoints again."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, step, weight in ((0, 1, 1.0), (0, 2, 1.0), (1, 1, 3.0 if other == "of other weights" else 1.0)):
        if (folder, other) != (1, "gone"):
            save_checkpoint(folders[folder], step, {"w": torch.full((2,), weight)}, {}, {"best_step": 1})
    (folders[0] / "recipe.yaml").touch()
    meeting, board = threading.Barrier(2), dict[str, Any]()
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(
                agreed_checkpoint, InThreads(rank, meeting, board), folder, lambda: choose_checkpoint(folders[0])
            )
            for rank, folder in enumerate(folders)
        ]
        for each in found:
            if other == "the same":
                assert each.result().step == 1
            else:
                with pytest.raises(UserError, match=r"rank 1 of 2 does not see .*step-000001 as rank 0 does"):
                    each.result()
