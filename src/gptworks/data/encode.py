"""Encodes text to tokens, in worker processes if there is enough text. The order of the results does not depend
on the processes."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer, decoders

from gptworks.data.encoders import Encoder
from gptworks.data.shards import Ids, Split
from gptworks.data.sources.base import Piece
from gptworks.errors import RunError
from gptworks.machine import usable_cpus
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import encode_text, token_spellings

_BATCH_BYTES = 1 << 20
_MOST_THREADS = 8
_TICK_SECONDS = 0.5
_BATCHES_WORTH_A_POOL = 16  # with fewer, the tokenizer's threads finish before processes have started


class Encoded(NamedTuple):
    """The tokens of one piece, with figures about it."""

    ids: Ids  # [n] uint32
    text_bytes: int
    unknown_tokens: int
    round_trips: bool


Part = tuple[Split, Piece]
Advance = Callable[[int], None]
"""A function called with the bytes of text done since the last call."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class PartEncoder:
    """Encodes parts and counts their bytes and unknown tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._unknown = special_tokens(tokenizer).unk
        # The bytes of each token, if decoding only joins them.
        self._spellings: list[bytes] | None = None
        if isinstance(tokenizer.decoder, decoders.ByteLevel) and (spellings := token_spellings(tokenizer)) is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._spellings = [b"" if i in added and added[i].special else one for i, one in enumerate(spellings)]

    def __call__(self, batch: list[Part], encoder: Encoder) -> list[Encoded]:
        encoded = []
        for (split, piece), ids in zip(batch, encoder.encode([piece.text for _, piece in batch]), strict=True):
            unknown_tokens = 0 if self._unknown is None else int(np.count_nonzero(ids == self._unknown))
            text = piece.text.encode("utf-8")
            round_trips = split == "train" or self._round_trips(piece, text, ids.tolist())
            encoded.append(Encoded(ids, len(text), unknown_tokens, round_trips))
        return encoded

    def _round_trips(self, piece: Piece, text: bytes, ids: list[int]) -> bool:
        """Whether decoding the tokens, also after preceding ones, restores the text."""
        if self._spellings is not None:
            return b"".join(map(self._spellings.__getitem__, ids)) == text
        if piece.starts_document:
            return bool(self._tokenizer.decode(ids) == piece.text)
        before = piece.text[:1]
        return bool(self._tokenizer.decode(encode_text(self._tokenizer, before) + ids) == before + piece.text)


def encode_in_order(
    batches: Iterator[list[Item]],
    make: Callable[..., Callable[[list[Item]], list[Result]]],
    arguments: tuple[Any, ...],
    processes: int,
    least: int = _BATCHES_WORTH_A_POOL,
    report: Advance = lambda n_bytes: None,
) -> Iterator[tuple[Item, Result]]:
    """Each item with its encoding, in order. Fewer than `least` batches are encoded in this process.

    Args:
        make: a module-level function that returns the function to encode a batch; called once in each process with the
            arguments and an `Advance`.
        processes: number of processes; 0: one for each core.
        least: smallest number of batches for which processes are started.

    Raises:
        RunError: a process died.
    """
    first = list(islice(batches, least))
    processes = processes or usable_cpus()
    if processes == 1 or len(first) < least:
        encode = make(*arguments, report)
        for batch in chain(first, batches):
            yield from zip(batch, encode(batch), strict=True)
        return
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        processes,
        context,
        initializer=_start_worker,
        initargs=(make, arguments, max(1, usable_cpus() // processes), done, stop),
    )
    reported = 0

    def report_done() -> None:
        nonlocal reported
        now = done.value
        report(now - reported)
        reported = now

    waiting: deque[tuple[list[Item], Future[list[Result]]]] = deque()
    batches = chain(first, batches)
    try:
        while True:
            for batch in islice(batches, max(0, 3 * processes - len(waiting))):
                waiting.append((batch, pool.submit(_encode_in_worker, batch)))
            if not waiting:
                return
            batch, future = waiting.popleft()
            while not future.done():
                wait_for([future], timeout=_TICK_SECONDS)
                report_done()
            encoded = future.result()
            report_done()
            yield from zip(batch, encoded, strict=True)
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process died while encoding, most often for lack of memory. Set data.processes=1. In your own "
            "script, call `prepare` below `if __name__ == '__main__':`."
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def batches_of(items: Iterator[Item], size: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Lists of items whose sizes add up to at least `least`; the last may be smaller."""
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


def batch_bytes() -> int:
    """Size of the text that is encoded at once: enough for this process's threads."""
    threads = int(os.environ.get("RAYON_NUM_THREADS") or usable_cpus())
    return _BATCH_BYTES * min(threads, _MOST_THREADS)


_worker_encode: Callable[[list[Any]], list[Any]]


def _start_worker(
    make: Callable[..., Callable[[list[Any]], list[Any]]],
    arguments: tuple[Any, ...],
    threads: int,
    done: Any,
    stop: Any,
) -> None:
    global _worker_encode  # noqa: PLW0603 (this process is started for it)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def advance(n_bytes: int) -> None:
        if stop.is_set():
            raise RunError("the process that started this one has stopped")
        with done.get_lock():
            done.value += n_bytes

    _worker_encode = make(*arguments, advance)


def _encode_in_worker(batch: list[Any]) -> list[Any]:
    return _worker_encode(batch)


def _end_with_parent() -> None:
    """Exit when the parent dies: a killed parent cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
