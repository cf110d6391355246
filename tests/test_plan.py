"""The plan of a run: its memory, changes that make it fit, its time; and the check before the first step."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tiny
from gptworks.cli import app
from gptworks.config import Recipe
from gptworks.describe import plan_tables
from gptworks.describe.plan_sheet import PlanSheet
from gptworks.device import choose_allocation, choose_precision
from gptworks.errors import UserError
from gptworks.planning.advice import changes_that_fit
from gptworks.planning.arrange import Refusal, arrange, rank_setting
from gptworks.planning.assumed import preset_recipe
from gptworks.planning.device_table import find_device
from gptworks.planning.devices import Device, custom_device
from gptworks.planning.fit import alternatives, divisors, largest_micro_batch
from gptworks.planning.flops import forward_flops
from gptworks.planning.layout import Layout, parallel_overrides
from gptworks.planning.memory import training_peak
from gptworks.planning.run import Plan, plan
from gptworks.planning.setting import Setting
from gptworks.presets import preset
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.display import Display
from gptworks.training.record.outcome import RunOutcome, read_outcome
from gptworks.training.setup import check_memory

H100 = find_device("h100")


def planned(name: str = "gpt2", *overrides: str, device: Device = H100, ranks: int = 1, sharding: str = "auto") -> Plan:
    recipe, reason = preset_recipe(name, [*parallel_overrides(sharding, None), *overrides], device, ranks)
    return plan(recipe, device=device, n_ranks=ranks, steps_reason=reason)


def gptworks_plan(*arguments: str) -> dict[str, Any]:
    result = tiny.gptworks("plan", *arguments, "--json")
    sheet: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == (0 if sheet["fit"]["fits"] else 3), result.stderr
    return sheet


# the command ------------------------------------------------------------------------------------------------


def test_the_largest_preset_is_planned_without_torchs_compiler() -> None:
    """Importing the compiler takes as long as importing torch."""
    code = (
        "import sys, gptworks.cli as cli\nsys.argv = ['gptworks', *sys.argv[1:]]\n"
        "try: cli.main()\nexcept SystemExit: pass\nprint('torch._dynamo' in sys.modules)"
    )
    arguments = ["plan", "gpt3-175b", "--device", "h100", "--world-size", "1024"]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")
    assert "174,604,259,328" in result.stdout


def test_what_does_not_fit_ends_with_exit_code_3_and_three_tables() -> None:
    result = CliRunner().invoke(app, ["plan", "gpt3-1.3b", "--device", "rtx-4090"])
    assert result.exit_code == 3
    assert "DOES NOT FIT" in result.stdout and "adapter.rank=8" in result.stdout
    assert len(re.findall(r"^ ─+ $", result.stdout, re.MULTILINE)) == 3, "a line below the head of each table"


def test_a_preset_as_json() -> None:
    sheet = gptworks_plan("gpt2", "--device", "rtx-4090")
    assert sheet["parameters"]["total"] == 124_439_808
    assert sheet["tokens_per_step"] == 2**19
    assert sheet["tokens"] == pytest.approx(20 * 124_439_808, rel=1e-3)
    assert sheet["step"]["precision"] == "bf16"
    assert sheet["fit"]["fits"]
    assert sheet["memory"]["peak_bytes"] == sum(sheet["memory"]["parts"].values()) <= 24e9
    assert sheet["device"]["memory_bytes"] == 24 * 10**9
    parts = sheet["flops_by_part"].values()
    assert sum(part["forward"] + part["backward"] for part in parts) == pytest.approx(sheet["flops"]["per_token"])
    assert {row["weights"] for row in sheet["inference"]} == {"fp32", "bf16", "int8", "int4"}


def test_a_recipe_is_planned_on_this_machine(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    sheet = gptworks_plan(str(path), "model.vocab_size=64", "--trace")
    assert sheet["device"]["kind"] == "cpu"
    assert sheet["step"] | {"micro_batch_size": 4, "optimizer": "muon"} == sheet["step"]
    assert sheet["time"] == {"seconds": None, "tokens_per_second": None, "utilization": 0.4}
    assert sheet["step_bytes"] == pytest.approx(sheet["traced_bytes"], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("gpt3-17b", "did you mean `gpt3-175b`"),
        ("gpt2 --device h101", "did you mean `h100`"),
        ("gpt2 --memory-gib 0", "--memory-gib 0 is not above 0"),
        ("gpt2 --utilization 1.5", "--utilization 1.5 is above 1"),
        ("gpt2 --flops 1e12", "Give --device or --memory-gib"),
        ("gpt2 --device h100 --memory-gib 8", "give one"),
        ("gpt2 --sharding fdsp", "'fdsp' is not one of 'auto', 'none', 'zero2', 'fsdp'"),
        ("gpt2 --world-size 6 --tensor-parallel 4", "6 ranks are not a multiple of train.parallel.tensor_parallel=4"),
        ("gpt2 --world-size 5 --tensor-parallel 5", "model.n_heads=12 is not a multiple of"),
        ("gpt2 train.batch_size=12 --world-size 8", "train.batch_size=12 is not a multiple of 8 ranks"),
        ("gpt2 train.batch_size=x", "train.batch_size"),
        ("gpt2 train.precision=fp16", "needs a CUDA device"),
        ("gpt2 --world-size 2 --trace", "leave --world-size out"),
    ],
)
def test_mistakes_are_explained(arguments: str, words: str) -> None:
    result = tiny.gptworks("plan", *arguments.split())
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_the_sheet_prints_within_100_columns() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    for each in (planned("gpt3-175b", ranks=1024), planned("moe-115m"), planned("gpt3-13b")):
        console.print(PlanSheet(**vars(each)))
        console.print(PlanSheet(**vars(each), details=True))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "DOES NOT FIT" in text and "cheapest first" in text


# what fits --------------------------------------------------------------------------------------------------


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    setting = Setting(preset("gpt2"), 1, "bf16", on_cpu=False)
    for capacity in (5e9, 12e9, 80e9):
        largest = largest_micro_batch(setting, int(capacity), 1)
        assert training_peak(replace(setting, micro_batch_size=largest)).total_bytes <= capacity
        assert training_peak(replace(setting, micro_batch_size=largest + 1)).total_bytes > capacity
    assert largest_micro_batch(setting, 10**9, 1) == 0


@pytest.mark.parametrize(
    ("name", "gib", "overrides"),
    [
        ("gpt2", 8, ("train.batch_size=64", "train.micro_batch_size=64", "train.precision=fp32")),
        ("gpt2-large", 20, ("train.batch_size=8", "train.micro_batch_size=8")),
        ("gpt3-13b", 80, ("train.batch_size=512", "train.micro_batch_size=4")),
    ],
)
def test_each_change_makes_it_fit_with_the_peak_that_is_said(name: str, gib: int, overrides: tuple[str, ...]) -> None:
    given = (*overrides, "--memory-gib", str(gib), "--sharding", "none")
    before = gptworks_plan(name, *given)
    assert not before["fit"]["fits"]
    assert before["fit"]["changes"]
    for change in before["fit"]["changes"]:
        after = gptworks_plan(name, *given, *shlex.split(change["words"]))
        assert change["fits"] and after["fit"]["fits"], change
        assert after["memory"]["peak_bytes"] == change["peak_bytes"]


def a_recipe(name: str, *overrides: str) -> Recipe:
    return preset_recipe(name, overrides, H100)[0]


def test_changes_are_ordered_by_cost_and_devices_come_last() -> None:
    recipe = a_recipe("gpt2", "train.batch_size=128", "train.micro_batch_size=64", "train.precision=fp32")
    changes = changes_that_fit(recipe, 1, replace(H100, memory_bytes=7_500 * 10**6))
    words = [change.words for change in changes]
    assert words[0].startswith("train.micro_batch_size=")
    order = ["precision=bf16", "checkpointing=selective", "checkpointing=block", "optimizer=muon", "adapter.rank"]
    firsts = [next((i for i, each in enumerate(words) if setting in each), None) for setting in order]
    there = [first for first in firsts if first is not None]
    assert len(there) > 2 and there == sorted(there)
    assert "--world-size" in words[-1] and all("--world-size" not in each for each in words[:-1])
    assert all(change.fits and change.costs for change in changes)


def test_where_nothing_helps_the_furthest_try_is_told() -> None:
    found = changes_that_fit(a_recipe("gpt3-175b"), 1, replace(H100, memory_bytes=10**9))
    assert len(found) == 1 and not found[0].fits


def test_alternatives_are_peaks_of_layouts_that_may_be() -> None:
    found = alternatives(a_recipe("gpt2", "train.micro_batch_size=4"), 1, H100)
    assert {each.setting.micro_batch_size for each in found} == {4}
    for each in found:
        assert each.peak_bytes == training_peak(each.setting).total_bytes
    ways = {(each.setting.checkpointing, each.setting.layout.sharding) for each in found}
    assert len(ways) == 2 * 3  # 12 heads do not divide among 8 tensor-parallel ranks
    muon, soap = (alternatives(a_recipe("gpt2", f"train.optimizer={name}"), 1, H100) for name in ("muon", "soap"))
    layouts = {each.setting.layout for each in found}
    assert {each.setting.layout for each in muon} == {each.setting.layout for each in soap} == layouts


# devices and batches ----------------------------------------------------------------------------------------


def test_a_layout_is_as_little_as_fits() -> None:
    recipe = planned("gpt2").setting
    assert recipe.layout == Layout()
    assert planned("gpt2", ranks=8).setting.layout == Layout("none", 8)
    assert planned("gpt3-13b", ranks=16).setting.layout.sharding == "fsdp"
    assert planned("gpt2", ranks=8, sharding="zero2").setting.layout == Layout("zero2", 8, gathers="bf16")


def test_ranks_share_the_batch() -> None:
    recipe = a_recipe("gpt2", "train.batch_size=96", "train.micro_batch_size=32")
    setting = rank_setting(recipe, "bf16", on_cpu=False, layout=Layout("none", 8))
    assert (setting.micro_batch_size, setting.accumulates) == (12, False)
    assert isinstance(arrange(recipe, 2, H100), Refusal)  # 48 sequences are no whole number of micro-batches
    assert divisors(12) == [12, 6, 4, 3, 2, 1]


def test_a_presets_micro_batch_is_as_large_as_fits() -> None:
    found = planned("gpt2", device=find_device("rtx-4090"))
    double = replace(found.setting, micro_batch_size=2 * found.setting.micro_batch_size)
    assert found.fits and found.train.batch_size % found.setting.micro_batch_size == 0
    assert training_peak(double).total_bytes > 24e9


def test_a_device_without_bf16_multiplies_in_fp16() -> None:
    assert planned("gpt2", device=find_device("t4")).setting.precision == "fp16"
    assert planned("gpt2", device=find_device("m2")).setting.precision == "fp32"


# time -------------------------------------------------------------------------------------------------------


def test_time_is_flops_over_rate_where_the_network_takes_none() -> None:
    fast = replace(H100, intra_node=1e30)
    recipe, _ = preset_recipe("gpt2", ["train.max_steps=100"], H100, 4)
    found = plan(recipe, device=fast, n_ranks=4, utilization=0.5)
    assert found.seconds == pytest.approx(found.total_flops / (4 * 0.5 * 989e12))  # type: ignore[operator]
    train_again = recipe.train.model_copy(update={"activation_checkpointing": "block"})
    again = plan(recipe.model_copy(update={"train": train_again}), device=fast, n_ranks=4, utilization=0.5)
    forward = forward_flops(recipe.model)
    blocks = forward.total_dense - forward.head
    assert again.seconds / found.seconds == pytest.approx(1 + blocks / (3 * forward.total_dense))  # type: ignore[operator]
    assert plan(recipe, device=custom_device(80, None, None)).seconds is None


# before the first step --------------------------------------------------------------------------------------


class Said(Display):
    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def recipe(folder: Path, **settings: Any) -> Recipe:
    return parse_recipe(tiny.recipe_tree(folder, max_steps=4, precision="fp32", **settings))


@pytest.mark.parametrize(
    "settings", [{"ema_decay": 0.5}, {"optimizer": "adamw", "shorter_contexts": [[1, 64]]}], ids=str
)
def test_a_run_says_its_memory_and_the_card_has_what_its_tensors_held(settings: dict[str, Any], tmp_path: Path) -> None:
    """In a step with full contexts, including the copy for a checkpoint; growth of the process is another figure."""
    tree, said = tiny.recipe_tree(tmp_path, max_steps=4, precision="fp32", **settings), Said()
    tree["model"] |= {"context_length": 128, "d_model": 128, "n_experts": 3}
    train(parse_recipe(tree), display=said)
    assert any(message.startswith("memory: ") and "at the peak" in message for message in said.messages)
    outcome = read_outcome(tmp_path / "run")
    assert isinstance(outcome, RunOutcome) and outcome.predicted_memory_bytes is not None
    assert outcome.measured_memory_bytes == pytest.approx(outcome.predicted_memory_bytes, rel=0.05)
    card = (tmp_path / "run" / "model-card.md").read_text(encoding="utf-8")
    row = next(line for line in card.splitlines() if line.startswith("| memory at the peak |"))
    assert re.search(r"[\d.]+ MB of tensors planned, [\d.]+ MB measured( \||; the process grew by )", row)


def test_a_run_that_cannot_fit_is_refused_unless_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptworks.device.memory_bytes", lambda device: 1_000_000)
    with pytest.raises(UserError, match=r"does not fit: it holds .* MB at its peak, and 1 MB .*--force"):
        train(recipe(tmp_path))
    assert not (tmp_path / "run").exists()
    assert train(recipe(tmp_path), force=True, display=Said()).reason == "finished"


def test_a_run_is_refused_before_its_data_is_prepared(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    result = tiny.gptworks("train", path, "model.d_model=65536", "model.n_layers=64")
    assert result.returncode == 2
    assert "this run does not fit" in result.stderr
    assert not (tmp_path / "data").exists()


def test_the_check_names_a_change_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = recipe(tmp_path)
    cpu, fp32 = torch.device("cpu"), choose_precision("fp32", torch.device("cpu"))
    there = check_memory(given, cpu, fp32).peak.total_bytes - 1
    monkeypatch.setattr("gptworks.device.memory_bytes", lambda device: there)
    with pytest.raises(UserError, match=r"train\.micro_batch_size=2 would hold"):
        check_memory(given, cpu, fp32)


def test_freed_memory_is_kept_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr("gptworks.device.keep_freed_memory", lambda: called.append("keep"))
    monkeypatch.setattr("gptworks.device.return_freed_memory", lambda: called.append("return"))
    peak = training_peak(Setting(preset("gpt2-tiny"), 1))
    for share in (2.0, 1.1):
        monkeypatch.setattr("gptworks.device.memory_bytes", lambda device, share=share: share * peak.total_bytes)
        choose_allocation(peak.total_bytes, torch.device("cpu"))
    monkeypatch.setattr("gptworks.device.memory_bytes", lambda device: 100 * peak.total_bytes)
    choose_allocation(peak.total_bytes, torch.device("cpu"), n_local_ranks=4, gathers=True)
    assert called == ["keep", "return", "return"]


def test_an_auto_layout_needs_only_what_the_recipe_says() -> None:
    given = a_recipe("gpt2", "train.batch_size=12", "train.micro_batch_size=1")
    assert arrange(given, 4, H100) == Layout("none", 4)
    assert isinstance(refused := arrange(given, 5, H100), Refusal)
    assert "not a multiple of 5 ranks" in refused and "multiple of 5" in refused


def test_the_readmes_example_is_right() -> None:
    """It does not fit the devices; it fits the hosts, since no rank holds the whole model; the advised change fits."""
    example = planned("gpt3-175b", ranks=1024)
    assert not example.fits
    assert example.host is not None and example.host.fits
    assert example.host.total_bytes / 1e9 == pytest.approx(28, abs=0.5)
    assert example.changes and all(change.fits for change in example.changes)
    selective = planned("gpt3-175b", "train.activation_checkpointing=selective", ranks=1024)
    assert selective.peak.total_bytes <= selective.device.memory_bytes and selective.fits
    text = " ".join(" ".join(cells) for table in plan_tables.tables(example) for cells in table.rows)
    assert text.count("DOES NOT FIT") == 1
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    command = "`gptworks plan gpt3-175b --device h100 --world-size 1024`"
    assert f"{command} allocates nothing and answers: it does not fit" in readme


def test_a_plan_compiles_nothing_and_one_for_another_device_does_not_ask_about_this_machines_compiler(
    tmp_path: Path,
) -> None:
    """A plan for another device is the same with a failing compiler, without one, and with native kernels off. For this
    machine, the last two are equal, since both plan torch's attention."""
    folder, cache = tmp_path / "bin", tmp_path / "cache"
    folder.mkdir()
    called = tmp_path / "called"
    for name in ("g++", "clang++", "c++"):
        (folder / name).write_text(f"#!/bin/sh\necho $0 >> {called}\nexit 1\n", encoding="ascii")
        (folder / name).chmod(0o755)
    empty = tmp_path / "empty"
    empty.mkdir()
    recipe = tiny.write_recipe(tmp_path)
    for where in (["--device", "h100"], ["model.vocab_size=64"]):
        found = []
        for environment in ({"PATH": str(folder)}, {"PATH": str(empty)}, {"GPTWORKS_NATIVE": "0"}):
            own = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
            target = "gpt2" if where[0] == "--device" else str(recipe)
            result = tiny.gptworks("plan", target, *where, "--json", env=own)
            found.append(json.loads(result.stdout)["memory"]["parts"])
        assert found[1] == found[2]
        if where[0] == "--device":
            assert found[0] == found[1]
    assert not called.exists() and not cache.exists()
