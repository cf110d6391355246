"""The watch over ranks: it ends a run in which nothing moves, names who is waited for, and leaves long work alone."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptworks.train import ranks
from gptworks.train.ranks import _Watch

TIMEOUT = 600.0


class Store:
    """The launcher's, as far as a watch uses it."""

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
    """Two ranks' watches on one store, and a clock that the test moves."""

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
        """Beats go on meanwhile."""
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
        world.watches[1].moved()
        world.pass_time(60)
        assert world.verdicts() == [None, None]


def test_the_rank_that_others_wait_for_is_named_where_calls_return_at_once(world: World) -> None:
    """As under NCCL: no thread stands in a collective, and rank 0 has only begun one more of them."""
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
    """A save to a slow disk on rank 0, after which it does not come back to the others."""
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
        world.watches[0].mark()
        world.watches[0]._beat()
        world.watches[0]._listen()
    assert str(world.watches[0].verdict()).startswith("rank 1 (process ")


def test_collectives_are_counted_in_every_group(tmp_path: Any) -> None:
    """By the process group itself, so that those that torch issues for sharded weights count too."""
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
