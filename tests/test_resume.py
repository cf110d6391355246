"""A run that is killed at any moment and resumed ends bit for bit like an uninterrupted one."""

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

import commands
import tiny
from commands import Process
from gptworks.checkpoint import checkpoints
from gptworks.config import TrainConfig
from gptworks.data.samples import Batch
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.planning.flops import forward_flops
from gptworks.planning.run import plan
from gptworks.recipe import load_recipe, parse_recipe, with_vocab_size
from gptworks.runs.data import data_of
from gptworks.training import prefetch
from gptworks.training.loop import train
from gptworks.training.objectives.next_token import Losses, next_token
from gptworks.training.record.metrics import MEASURED, read_metrics
from gptworks.training.samples import samples_of_step
from halves import assert_resumes_exactly

STEPS = 40
KILLS = 5


def start(recipe: Path, run_dir: Path, *arguments: str, new: bool = False) -> Process:
    command = ("-m", "gptworks", "train", recipe, f"run_dir={run_dir}", "--resume", *arguments)
    return commands.start(*command, new=new, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def last_step(run_dir: Path) -> int:
    return max((record["step"] for record in read_metrics(run_dir / "metrics.jsonl")), default=0)


def wait_for_step(process: Process, run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while last_step(run_dir) < step and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not move"
        time.sleep(0.01)


def without_timings(run_dir: Path) -> list[dict[str, Any]]:
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def assert_same_run(one: Path, other: Path, steps: int = STEPS) -> None:
    first, second = (checkpoints(run)[0] for run in (one, other))
    assert first.step == second.step == steps
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (first.folder / file).read_bytes() == (second.folder / file).read_bytes(), file
    states = [{key: value for key, value in c.state().items() if key != "seconds"} for c in (first, second)]
    assert states[0] == states[1]
    assert without_timings(one) == without_timings(other)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("resume")
    recipe = tiny.write_recipe(folder, max_steps=STEPS, sample_every=10, sample_tokens=20)
    process = start(recipe, folder / "whole", new=True)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return recipe, folder / "whole"


def test_five_kills_change_nothing(uninterrupted: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, whole = uninterrupted
    run_dir, chance = tmp_path / "killed", random.Random(20)
    for at in sorted(chance.sample(range(2, STEPS - 1), KILLS)):
        process = start(recipe, run_dir)
        wait_for_step(process, run_dir, at)
        time.sleep(chance.random() * 0.05)  # somewhere in a step, an evaluation or a save
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, "the run was over before it was killed"
    process = start(recipe, run_dir)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "resuming" in output
    assert_same_run(whole, run_dir)
    assert not list((run_dir / "checkpoints").glob(".writing-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 0)])
def test_a_stop_signal_saves_and_the_resumed_run_is_the_same(
    uninterrupted: tuple[Path, Path], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    recipe, whole = uninterrupted
    run_dir = tmp_path / "stopped"
    process = start(recipe, run_dir)
    wait_for_step(process, run_dir, 6)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert f"stopped by {number.name}" in output
    assert "Traceback" not in output
    stopped_at = checkpoints(run_dir)[0].step
    assert stopped_at == last_step(run_dir) < STEPS
    process = start(recipe, run_dir)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"from step {stopped_at}" in output
    assert_same_run(whole, run_dir)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe, whole = uninterrupted
    run_dir = tmp_path / "damaged"
    process = start(recipe, run_dir)
    wait_for_step(process, run_dir, 22)
    process.kill()
    process.communicate(timeout=60)
    newest = checkpoints(run_dir)[0].folder / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    process = start(recipe, run_dir)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"{newest} is damaged" in output
    assert_same_run(whole, run_dir)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "normuon", "muon_coefficients": "polar_express"},
        {"optimizer": "soap", "soap_frequency": 3, "cautious_weight_decay": True, "ema_decay": 0.5},
    ],
    ids=lambda settings: settings["optimizer"],
)
def test_whatever_an_optimizer_keeps_is_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes_exactly(tiny.recipe_tree(tmp_path, max_steps=8, **settings), at_step=6)


def test_batches_that_grow_are_a_run_whose_batch_size_is_changed(tmp_path: Path) -> None:
    """Bit for bit, although it is interrupted; with the plan's number of tokens, and the samples of each step known."""
    tree = tiny.recipe_tree(tmp_path, max_steps=8, schedule="constant", micro_batch_size=2)
    sizes = {"smaller_batches": [[3, 2], [5, 4]]}
    growing = tree | {"train": tree["train"] | sizes}
    whole = assert_resumes_exactly(growing, at_step=4)
    for steps, size in ((3, 2), (5, 4), (8, 8)):
        changed = tree["train"] | {"batch_size": size, "max_steps": steps, "checkpoint_every": steps}
        train(parse_recipe(tree | {"train": changed}), resume=True, change=["train.batch_size", "train.max_steps"])
    first, second = (checkpoints(run)[0] for run in (whole, Path(tree["run_dir"])))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (first.folder / file).read_bytes() == (second.folder / file).read_bytes(), file
    states = [one.state() for one in (first, second)]
    assert states[0]["samples"] == states[1]["samples"] == 3 * 2 + 2 * 4 + 3 * 8
    recipe, by_hand = parse_recipe(growing | {"run_dir": str(whole)}), load_recipe(tree["run_dir"])
    planned = plan(with_vocab_size(recipe, 50))
    assert planned.tokens == states[0]["tokens"] == 38 * 32
    assert planned.total_flops == pytest.approx(38 * 32 * planned.flops_per_token)
    assert [recipe.train.steps_with(n) for n in (0, 1, 6, 7, 14, 15, 22, 23, 38)] == [0, 1, 3, 4, 5, 6, 6, 7, 8]
    for step in range(1, 9):
        assert samples_of_step(recipe, whole, step) == samples_of_step(by_hand, by_hand.run_dir, step)


def test_contexts_that_grow_read_rows_of_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All first rows of a block of windows, then all second ones. It resumes bit for bit, and its plan has less
    work."""
    monkeypatch.setattr(prefetch, "BLOCK", 16)
    tree = tiny.recipe_tree(tmp_path, max_steps=8, log_every=1)
    growing = tree | {"train": tree["train"] | {"shorter_contexts": [[3, 8], [6, 16]]}}
    seen: dict[str, list[torch.Tensor]] = {}
    for name, one in (("whole", tree), ("growing", growing)):
        read = seen[name] = []

        def noting(model: GPT, batch: Batch, read: list[torch.Tensor] = read) -> Losses:
            read.append(torch.stack(batch))
            return next_token(model, batch)

        train(parse_recipe(one | {"run_dir": str(tmp_path / name)}), objective=noting)
    lengths = [rows.size(-1) for rows in seen["growing"]]
    assert lengths == [8] * 6 + [16] * 6 + [32] * 4  # two micro-batches a step
    windows, steps = torch.cat(seen["whole"], 1), [torch.cat(seen["growing"][i : i + 2], 1) for i in range(0, 16, 2)]
    assert windows.shape == (2, 64, 32)
    for length, first, last in ((8, 0, 3), (16, 3, 6), (32, 6, 8)):
        n = 32 // length
        blocks = [windows[:, at : at + 16].unflatten(2, (n, length)) for at in range(0, 64, 16)]
        rows = torch.cat([block[:, :, number] for block in blocks for number in range(n)], 1)
        read = steps[first:last]
        assert [len(step[0]) for step in read] == [8 * n] * len(read)
        assert torch.equal(torch.cat(read, 1), rows[:, first * 8 * n : last * 8 * n])
    opened = data_of(tmp_path / "growing")
    for step in (1, 3, 4, 7):
        samples, shown = opened.rows_of_step(step, 0, 1000)
        assert samples.n_samples == len(shown) == len(steps[step - 1][0])
        assert torch.equal(torch.stack([row.inputs for _, row in shown]), steps[step - 1][0])
        assert all(row.ids.tolist() == [*row.inputs.tolist(), int(row.targets[-1])] for _, row in shown)
    ended = assert_resumes_exactly(growing, at_step=4)
    vocab_size = load_recipe(ended).model.vocab_size
    plans = [plan(with_vocab_size(parse_recipe(one), vocab_size)) for one in (tree, growing)]
    assert plans[0].tokens == plans[1].tokens == checkpoints(ended)[0].state()["tokens"] == 64 * 32
    assert plans[0].peak.total_bytes == plans[1].peak.total_bytes
    work = [forward_flops(plans[0].setting.model, length).training_per_token_dense for length in (8, 16, 32)]
    expected = 8 * 32 * (3 * work[0] + 3 * work[1] + 2 * work[2])
    assert plans[1].total_flops == pytest.approx(expected)
    for one in plans:
        assert one.seconds is None or one.seconds == pytest.approx(one.total_flops / one._rate)
    records = [record for record in read_metrics(ended / "metrics.jsonl") if record["kind"] == "train"]
    for record, flops in zip(records, [work[0]] * 3 + [work[1]] * 3 + [work[2]] * 2, strict=True):
        assert record["flops_per_second"] == pytest.approx(record["tokens_per_second"] * flops, rel=1e-3)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([[3, 16], [6, 8]], r"\[6, 8\] after \[3, 16\]"),
        ([[3, 12]], "must divide model.context_length=32"),
    ],
)
def test_contexts_that_cannot_grow_are_refused(lengths: list[list[int]], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        parse_recipe(tiny.recipe_tree(tmp_path, shorter_contexts=lengths))


def test_shares_of_the_run_and_of_the_context_follow_their_lengths(tmp_path: Path) -> None:
    shares: dict[str, object] = {"shorter_contexts": [[0.25, 0.25], [0.5, 0.5]], "smaller_batches": [[0.29, 2]]}
    shares |= {"batch_size": 4, "micro_batch_size": 1}
    for steps, context, contexts, batches in (
        (100, 32, ((25, 8), (50, 16)), ((29, 2),)),
        (1000, 64, ((250, 16), (500, 32)), ((290, 2),)),
        (2, 32, ((1, 16),), ()),  # a share of less than a step is dropped
    ):
        tree = tiny.recipe_tree(tmp_path, **(shares | {"max_steps": steps, "warmup_steps": 0}))
        tree["model"]["context_length"] = context
        train = parse_recipe(tree).train
        assert (train.shorter_contexts, train.smaller_batches) == (contexts, batches)


@pytest.mark.parametrize("steps", [-5, "none"])
def test_a_wrong_length_of_the_run_is_the_only_fault_of_its_shares(steps: object, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        parse_recipe(tiny.recipe_tree(tmp_path, shorter_contexts=[[0.5, 0.5]], max_steps=steps))
    assert "max_steps" in str(refused.value) and "shorter_contexts" not in str(refused.value)


def test_lengths_that_are_not_below_the_context_cut_nothing(tmp_path: Path) -> None:
    """A run is evaluated at a shorter context than it was trained with."""
    train = parse_recipe(tiny.recipe_tree(tmp_path, shorter_contexts=[[3, 16], [6, 32], [8, 64]])).train
    assert train.shorter_contexts == ((3, 16),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shorter_contexts": [[0.5, 0.3]]}, "0.3 of model.context_length=32, which is 9.6 tokens"),
        ({"shorter_contexts": [[0.5, 8]], "max_steps": None, "epochs": 1}, "0.5, a share of max_steps: set max_steps"),
        ({"shorter_contexts": [[0.5, 16], [0.4, 8]]}, "must ascend"),
        ({"shorter_contexts": [[1.5, 8]]}, "shorter_contexts"),
        ({"smaller_batches": [[0.5, 0.5]]}, "smaller_batches"),
    ],
)
def test_wrong_shares_are_refused(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_recipe(tiny.recipe_tree(tmp_path, **settings))


def test_rows_that_are_not_windows_of_text_are_not_cut(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, shorter_contexts=[[3, 8]], optimizer="adamw")
    tree["data"] = {"sources": [{"type": "conversations", "path": "chats.jsonl"}]}
    with pytest.raises(UserError, match=r"shorter_contexts cuts windows of text.*objective\.type=instruction"):
        parse_recipe(
            tree | {"objective": {"type": "instruction"}, "tokenizer": {"type": "gpt2", "chat_template": "alpaca"}}
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"smaller_batches": [[3, 4], [2, 6]]}, r"\[2, 6\] after \[3, 4\]"),
        ({"smaller_batches": [[3, 8]]}, "batch_size is the largest"),
        ({"smaller_batches": [[3, 3]]}, "3, which is not a multiple of micro_batch_size=2"),
        ({"smaller_batches": [[3, 4]], "epochs": 2}, "set max_steps, not epochs"),
    ],
)
def test_batches_that_cannot_grow_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig(max_steps=9, batch_size=8, micro_batch_size=2, **settings)


def test_metrics_are_json_without_gaps_or_repeats(uninterrupted: tuple[Path, Path]) -> None:
    _, whole = uninterrupted
    lines = (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))


def test_a_moved_run_folder_resumes_where_it_lies_and_can_be_prolonged(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    _, whole = uninterrupted
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    result = tiny.gptworks("train", moved, "--resume", "--change", f"train.max_steps={STEPS + 4}")
    assert result.returncode == 0, result.stderr
    assert checkpoints(moved)[0].step == STEPS + 4
    assert checkpoints(whole)[0].step == STEPS
    assert load_file(checkpoints(moved)[0].folder / "model.safetensors")
