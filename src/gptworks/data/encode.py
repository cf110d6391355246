"""From text to tokens, in worker processes where there is enough of it; the order, and so the result, is the same."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer

from gptworks.data.shards import Ids, Split
from gptworks.data.sources.base import Piece
from gptworks.errors import RunError
from gptworks.tokenizer import encode_text, encodings, special_tokens, tokenizer_from_json

_BATCH_BYTES = 1 << 20
_BATCHES_WORTH_A_POOL = 16  # below this the tokenizer's own threads are done before processes have started


class Encoded(NamedTuple):
    """The tokens of one piece, and what is counted of it."""

    ids: Ids  # [n] uint32
    text_bytes: int
    unknown_tokens: int
    round_trips: bool


Part = tuple[Split, Piece]
Item = TypeVar("Item")
Result = TypeVar("Result")


def _text_encoder(tokenizer_json: str) -> Callable[[list[Part]], list[Encoded]]:
    return partial(_encode, tokenizer_from_json(tokenizer_json))


def _encode(tokenizer: Tokenizer, batch: list[Part]) -> list[Encoded]:
    unknown = special_tokens(tokenizer).unk
    encoded = []
    for (split, piece), encoding in zip(batch, encodings(tokenizer, [p.text for _, p in batch]), strict=True):
        ids = encoding.ids
        unknown_tokens = 0 if unknown is None else ids.count(unknown)
        round_trips = split == "train" or _round_trips(tokenizer, piece, ids)
        text_bytes = len(piece.text.encode("utf-8"))
        encoded.append(Encoded(np.array(ids, dtype=np.uint32), text_bytes, unknown_tokens, round_trips))
    return encoded


def _round_trips(tokenizer: Tokenizer, piece: Piece, ids: list[int]) -> bool:
    """Whether the tokens give the text back, also where they go on after others."""
    if piece.starts_document:
        return bool(tokenizer.decode(ids) == piece.text)
    before = piece.text[:1]
    return bool(tokenizer.decode(encode_text(tokenizer, before) + ids) == before + piece.text)


def encode_all(tokenizer: Tokenizer, parts: Iterator[Part], processes: int) -> Iterator[tuple[Part, Encoded]]:
    """Each part with its tokens, in order."""
    batches = batches_of(parts, lambda part: len(part[1].text), _BATCH_BYTES)
    return encode_in_order(batches, _text_encoder, (tokenizer.to_str(),), processes)


def encode_in_order(
    batches: Iterator[list[Item]],
    make: Callable[..., Callable[[list[Item]], list[Result]]],
    arguments: tuple[str, ...],
    processes: int,
) -> Iterator[tuple[Item, Result]]:
    """Each item with its encoding, in order. A small text is encoded in this process.

    Args:
        make: a module-level function, called once in each process; returns the function that encodes a batch.
        processes: how many; 0: one for each core.

    Raises:
        RunError: a process died.
    """
    first = list(islice(batches, _BATCHES_WORTH_A_POOL))
    processes = processes or _cores()
    if processes == 1 or len(first) < _BATCHES_WORTH_A_POOL:
        encode = make(*arguments)
        for batch in chain(first, batches):
            yield from zip(batch, encode(batch), strict=True)
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(make, arguments)
    )
    try:
        waiting = deque((batch, pool.submit(_encode_in_worker, batch)) for batch in first)
        while waiting:
            batch, future = waiting.popleft()
            encoded = future.result()
            for following in islice(batches, max(0, 3 * processes - len(waiting))):
                waiting.append((following, pool.submit(_encode_in_worker, following)))
            yield from zip(batch, encoded, strict=True)
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process died while encoding, most often for want of memory. Set data.processes=1. In a script of "
            "your own, call `prepare` below `if __name__ == '__main__':`."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def batches_of(items: Iterator[Item], size: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Items in lists whose sizes add up to at least `least`."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_worker_encode: Callable[[list[Any]], list[Any]]


def _start_worker(make: Callable[..., Callable[[list[Any]], list[Any]]], arguments: tuple[str, ...]) -> None:
    global _worker_encode  # noqa: PLW0603 (a process of its own, started for this)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encode = make(*arguments)


def _encode_in_worker(batch: list[Any]) -> list[Any]:
    return _worker_encode(batch)


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
