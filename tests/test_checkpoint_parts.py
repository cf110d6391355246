"""Checkpoints that several ranks write together: equal to the file that one process writes, or absent."""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed

from gptworks.checkpoint import checkpoints
from gptworks.errors import RunError, UserError
from gptworks.training.checkpoint_files import CheckpointWriter, TensorPart, save_checkpoint
from gptworks.training.distributed import writers as writers_module
from gptworks.training.distributed.writers import RankWriters

TENSORS = {
    "a scalar": torch.tensor(3.0),
    "a vector": torch.arange(11, dtype=torch.float32),
    "codes": torch.arange(-60, 59, dtype=torch.int8).view(7, 17),
    'bf16 "quoted"': torch.arange(96).view(8, 12).bfloat16(),
    "experts": torch.arange(3 * 5 * 6, dtype=torch.float32).view(3, 5, 6),
    "empty": torch.empty(0, 4),
    "counts": torch.arange(6, dtype=torch.int64).view(2, 3),
}

GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (1, 5)]
"""Numbers of parts of the last two dimensions of a matrix."""


def parts_of(tensors: dict[str, Tensor], rows: int, columns: int) -> list[dict[str, TensorPart]]:
    """Return the tensors in rows × columns parts, some empty; the first rank has the tensors of fewer than two
    dimensions."""
    ranks: list[dict[str, TensorPart]] = [{} for _ in range(rows * columns)]
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            ranks[0][name] = TensorPart.whole(tensor)
            continue
        shape = tuple(tensor.shape)
        for number, (row, column) in enumerate(product(range(rows), range(columns))):
            height, width = -(-shape[-2] // rows), -(-shape[-1] // columns)
            ends = [
                slice(min(at * size, n), min((at + 1) * size, n))
                for at, size, n in ((row, height, shape[-2]), (column, width, shape[-1]))
            ]
            place = (*(slice(0, n) for n in shape[:-2]), *ends)
            ranks[number][name] = TensorPart(shape, place, tensor[place])
    return ranks


def on_ranks(work: Callable[[int, RankWriters], object], n_ranks: int) -> list[object]:
    """Return what `work` returns or raises on each rank, each in a thread."""
    store = distributed.HashStore()

    def caught(rank: int) -> object:
        try:
            return work(rank, RankWriters(store, rank, n_ranks))
        except RunError as error:
            return error

    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(caught, range(n_ranks)))


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_ranks_write_the_file_that_one_process_writes(tmp_path: Path, rows: int, columns: int) -> None:
    alone = save_checkpoint(tmp_path / "alone", 5, TENSORS, {"w/step": torch.tensor(5.0)}, {"step": 5})
    parts = parts_of(TENSORS, rows, columns)

    def save(rank: int, writers: RankWriters) -> object:
        optimizer = {"w/step": TensorPart.whole(torch.tensor(5.0))} if rank == 0 else {}
        for step in (4, 5):  # one after the other, as in a run
            save_checkpoint(tmp_path / "shared", step, parts[rank], optimizer, {"step": 5}, writers)
        return None

    assert on_ranks(save, rows * columns) == [None] * (rows * columns)
    shared, before = checkpoints(tmp_path / "shared")
    shared.verify()
    before.verify()
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        assert (shared.folder / name).read_bytes() == (alone.folder / name).read_bytes(), name
    loaded = load_file(shared.folder / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_leaves_no_part_of_a_checkpoint(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, TENSORS, {}, {"step": 1})
    parts, write, mine = parts_of(TENSORS, 2, 1), os.pwrite, threading.local()

    def full(descriptor: int, data: memoryview, at: int) -> int:
        if mine.rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    def save(rank: int, writers: RankWriters) -> object:
        mine.rank = rank
        return save_checkpoint(tmp_path, 2, parts[rank], {}, {"step": 2}, writers) and None

    monkeypatch.setattr(os, "pwrite", full)
    error, other = on_ranks(save, 2)
    assert isinstance(error, RunError) and other is None
    assert "No space left on device" in str(error) and "step-000001" in str(error)
    assert ("rank 1: " in str(error)) == (failing == 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize("error", [MemoryError(), KeyError("a vector"), RunError("the folder is gone")])
def test_rank_0_reports_any_error_of_another_rank(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, write, mine = parts_of(TENSORS, 2, 1), os.pwrite, threading.local()

    def failing(descriptor: int, data: memoryview, at: int) -> int:
        if mine.rank == 1:
            raise error
        return write(descriptor, data, at)

    def save(rank: int, writers: RankWriters) -> object:
        mine.rank = rank
        try:
            return save_checkpoint(tmp_path, 2, parts[rank], {}, {"step": 2}, writers) and None
        except type(error) as own:
            return own

    monkeypatch.setattr(os, "pwrite", failing)
    reported, own = on_ranks(save, 2)
    assert isinstance(reported, RunError) and "rank 1: " in str(reported) and own is error
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_element_that_no_rank_writes_is_noticed(tmp_path: Path) -> None:
    parts = parts_of(TENSORS, 2, 1)
    del parts[1]["experts"]
    error, _ = on_ranks(lambda rank, w: save_checkpoint(tmp_path, 2, parts[rank], {}, {}, w) and None, 2)
    assert isinstance(error, RunError) and "bytes of tensors, which have" in str(error)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_no_rank_waits_for_rank_0_if_a_link_leads_out_of_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    parts = parts_of(TENSORS, 2, 1)

    def save(rank: int, writers: RankWriters) -> object:
        try:
            return save_checkpoint(tmp_path / "run", 2, parts[rank], {}, {}, writers) and None
        except UserError as error:
            return error

    error, other = on_ranks(save, 2)
    assert isinstance(error, UserError) and other is None


def test_no_rank_waits_for_rank_0_if_it_cannot_make_the_checkpoint(tmp_path: Path) -> None:
    parts = parts_of(TENSORS, 3, 1)
    (tmp_path / "checkpoints").touch()
    error, *others = on_ranks(
        lambda rank, writers: save_checkpoint(tmp_path, 2, parts[rank], {}, {"step": 2}, writers) and None, 3
    )
    assert isinstance(error, RunError) and "checkpoint at step 2 could not be written" in str(error)
    assert others == [None, None]


def test_a_failed_run_does_not_wait_for_ranks_that_have_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(TENSORS, 2, 1)[0]
    writers = RankWriters(distributed.HashStore(), 0, 2)
    monkeypatch.setattr(writers_module, "_GRACE_SECONDS", 0.5)
    with pytest.raises(ConnectionError), CheckpointWriter(tmp_path, 1, writers=writers) as writer:
        writer.save(3, {"model": parts.items(), "optimizer": iter(())}, {"step": 3})
        raise ConnectionError
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_run_may_fail_while_the_last_checkpoint_is_written(tmp_path: Path) -> None:
    """The ranks that are alive complete the checkpoint."""
    parts, begun = parts_of(TENSORS, 2, 1), threading.Barrier(2)

    def fail(rank: int, writers: RankWriters) -> None:
        with pytest.raises(ConnectionError), CheckpointWriter(tmp_path, 1, writers=writers) as writer:
            writer.save(3, {"model": parts[rank].items(), "optimizer": iter(())}, {"step": 3})
            begun.wait()
            raise ConnectionError

    assert on_ranks(fail, 2) == [None, None]
    (saved,) = checkpoints(tmp_path)
    saved.verify()
