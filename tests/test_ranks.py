"""Ranks: their agreement, and the watch, which names the rank that others wait for and tolerates announced long
work."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import chats
from gptworks.recipe import parse_recipe
from gptworks.training.distributed import ranks
from gptworks.training.distributed.ranks import _Watch
from gptworks.training.loop import train
from test_parallel import ranks_of

TIMEOUT = 600.0


class Store:
    """A fake of the launcher's store, with the methods that a watch uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set_timeout(self, _: Any) -> None: ...

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def add(self, key: str, number: int) -> int:
        return number


class World:
    """Two ranks' watches on one store, and a clock that the test advances."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.issued = {0: 0, 1: 0}
        patch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: None))
        self.beating = 0
        patch.setattr(ranks, "_collectives_issued", lambda: self.issued[self.beating])
        store = Store()
        self.watches = [_Watch(store, rank, 2, TIMEOUT) for rank in range(2)]
        self.pass_time(1)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock; heartbeats continue."""
        self.now += seconds
        for rank, watch in enumerate(self.watches):
            self.beating = rank
            watch._beat()
        for watch in self.watches:
            watch._listen()

    def verdicts(self) -> list[str | None]:
        return [watch.verdict() for watch in self.watches]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield World(monkeypatch)


def test_a_rank_that_computes_keeps_all_from_being_taken_for_hung(world: World) -> None:
    """Rank 1 answers prompts for an hour while rank 0 waits for it in a collective."""
    world.issued[0] = 1
    for _ in range(60):
        world.watches[1].count_work()
        world.pass_time(60)
        assert world.verdicts() == [None, None]


def test_the_rank_that_others_wait_for_is_named_where_calls_return_at_once(world: World) -> None:
    """As under NCCL: no thread waits in a collective, and rank 0 has only begun one more of them."""
    world.issued[0] = 1
    world.pass_time(1)
    world.pass_time(TIMEOUT - 1)
    assert world.verdicts() == [None, None]
    world.pass_time(2)
    for verdict in world.verdicts():
        assert verdict is not None and verdict.startswith("rank 1 (process ") and "rank 0" not in verdict


def test_where_all_stand_at_the_same_point_that_is_said(world: World) -> None:
    world.pass_time(TIMEOUT + 1)
    assert all("no rank comes on" in str(verdict) for verdict in world.verdicts())


def test_long_work_that_is_announced_is_waited_for_and_a_hang_after_it_is_not(world: World) -> None:
    """Rank 0 saves to a slow disk, and then never returns to the others."""
    world.issued[1] = 1
    with world.watches[0].patience(busy=True):
        for _ in range(5):
            world.pass_time(TIMEOUT)
            assert world.verdicts() == [None, None]
    world.pass_time(1)
    world.pass_time(TIMEOUT + 1)
    assert all(str(verdict).startswith("rank 0 (process ") for verdict in world.verdicts())


def test_a_rank_that_is_waiting_for_another_does_not_hide_a_hang_from_that_one(world: World) -> None:
    with world.watches[1].patience(busy=False):
        world.pass_time(TIMEOUT + 1)
        assert world.verdicts()[0] is not None


def test_a_rank_whose_beats_stop_is_named(world: World) -> None:
    for _ in range(int(TIMEOUT) // 5 + 1):  # rank 0 goes on alone
        world.now += 5
        world.beating = 0
        world.watches[0].count_point()
        world.watches[0]._beat()
        world.watches[0]._listen()
    assert str(world.watches[0].verdict()).startswith("rank 1 (process ")


def test_a_store_that_does_not_answer_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a network is cut: a call to the store waits for ever, so that the watch sees no error."""

    class Cut(Store):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            released.wait(60)
            raise RuntimeError("released")

        add = multi_get  # type: ignore[assignment]

    released, ended = threading.Event(), list[str]()
    watch = _Watch(Cut(), 0, 2, TIMEOUT)
    watch._interval, watch._timeout = 0.01, 0.05
    watch._answered_at -= 10

    def end(code: int) -> None:
        ended.append(f"exit code {code}")
        watch._left.set()
        watch._over.set()

    monkeypatch.setattr(os, "_exit", end)
    watch.start()
    assert watch._left.wait(10) and ended == ["exit code 1"]
    released.set()
    watch.join(10)


def test_collectives_are_counted_in_every_group(tmp_path: Path) -> None:
    """The process group counts them, so that those that torch issues for sharded weights are included."""
    from torch import distributed

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        before = ranks._collectives_issued()
        distributed.all_reduce(torch.ones(2))
        distributed.broadcast(torch.ones(2), src=0)
        after = ranks._collectives_issued()
        distributed.all_reduce(torch.ones(2), group=distributed.new_group([0]))
        assert before < after < ranks._collectives_issued()
    finally:
        distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------- runs of two ranks


@pytest.mark.ranks
def test_a_reward_by_chance_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """Each rank measures another reward; patience uses the one that all agree on."""
    train(parse_recipe(chats.base_tree(tmp_path, max_steps=20, optimizer="adamw", checkpoint_every=20)))
    (tmp_path / "chance.py").write_text(
        "import random\n\ndef reward(completion, prompt, answer):\n    return random.random()\n"
    )
    tree = chats.tune_tree(tmp_path, max_steps=60, optimizer="adamw", evaluate_every=1, early_stopping_patience=2,
                           batch_size=8, micro_batch_size=4, learning_rate=1e-5)  # fmt: skip
    tree["tokenizer"] |= {"added_tokens": [], "chat_template": "plain"}
    tree["objective"] = {"type": "reward", "reward": f"{tmp_path / 'chance.py'}:reward", "group_size": 4,
                         "max_tokens": 4, "allow": ["little-learned"]}  # fmt: skip
    path = tmp_path / "chance.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    (tmp_path / "cases").write_text(json.dumps([{"path": str(path), "overrides": []}]), encoding="utf-8")
    assert "no better validation loss in 2 evaluations" in ranks_of(2, "train", tmp_path / "cases")


@pytest.mark.ranks
def test_a_reference_that_takes_longer_than_the_timeout_is_no_hang(tmp_path: Path) -> None:
    """Forty pairs, two at a time on two ranks, take 0.6 s per pass: 6 s without a step, and 3 s are allowed."""
    train(parse_recipe(chats.base_tree(tmp_path, max_steps=2, optimizer="adamw", checkpoint_every=2, warmup_steps=0)))
    pairs = [row | {"chosen": row["output"], "rejected": row["output"][::-1]} for row in chats.records(40)]
    chats.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    tree = chats.tune_tree(tmp_path, max_steps=1, micro_batch_size=2, optimizer="adamw")
    tree["tokenizer"] |= {"added_tokens": [], "chat_template": "plain"}
    tree["objective"] = {"type": "preference"}
    tree["data"] |= {"sources": [{"type": "preferences", "path": str(tmp_path / "pairs.jsonl")}]}
    path = tmp_path / "pairs.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    cases = [{"path": str(path), "overrides": [], "pause": 0.6}]
    (tmp_path / "cases").write_text(json.dumps(cases), encoding="utf-8")
    assert "finished at step 1" in ranks_of(2, "train", tmp_path / "cases", "3")
