"""Do work in several processes, yield the results in a fixed order, and report progress."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Any, TypeVar

from gptworks.errors import RunError
from gptworks.machine import usable_cpus

_TICK_SECONDS = 0.5

Item = TypeVar("Item")
Result = TypeVar("Result")

Advance = Callable[[int], None]
"""Function to call with the number of bytes of text done since the last call."""

Report = Callable[[str, int, int | None], None]
"""Function to call with the stage ("waiting", "cleaning", "sample", "tokenizer", "merging", "shards"), the bytes of
text done, and the total if known. Any other text in place of the stage is a line to print once, such as the encoding
library and the reason for its choice."""

Progress = Callable[[int, int], None]
"""Function to call with the number of tokens done, and the total number of tokens."""


def adding_up(report: Report, stage: str, total_bytes: int | None) -> Advance:
    """Return a function that adds up the bytes done, and reports the sum at each call."""
    done_bytes = 0

    def advance(n_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += n_bytes
        report(stage, done_bytes, total_bytes)

    return advance


def in_order(
    items: Iterable[Item],
    make: Callable[..., Callable[[Item], Result]],
    arguments: tuple[Any, ...],
    processes: int,
    report: Advance = lambda n_bytes: None,
    least: int = 2,
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with its result, in order. Start no processes for fewer than `least` items.
    Raises RunError if a process died.

    Args:
        make: a module-level function, called once in each process with `arguments` and an `Advance`; returns the
            function that works on an item.
        processes: number of processes; 0: one per core. 1: this process works, and no other starts.
    """
    left = iter(items)
    first = list(islice(left, least))
    left = chain(first, left)
    processes = processes or usable_cpus()
    if processes == 1 or len(first) < least:
        work = make(*arguments, report)
        yield from ((item, work(item)) for item in left)
        return
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        processes,
        context,
        initializer=_start_worker,
        initargs=(make, arguments, max(1, usable_cpus() // processes), done, stop),
    )

    def report_done() -> None:
        with done.get_lock():
            n_bytes, done.value = done.value, 0
        report(n_bytes)

    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        while True:
            for item in islice(left, max(0, 3 * processes - len(waiting))):
                waiting.append((item, pool.submit(_work_in_worker, item)))
            if not waiting:
                return
            item, future = waiting.popleft()
            while not future.done():
                wait_for([future], timeout=_TICK_SECONDS)
                report_done()
            result = future.result()
            report_done()
            yield item, result
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process died, most often for lack of memory. Set data.processes=1. In your own "
            "script, call `prepare` below `if __name__ == '__main__':`."
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def batches_of(items: Iterator[Item], size: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Yield lists of neighbouring items whose sizes add up to at least `least`; the last list may be smaller."""
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


_work: Callable[[Any], Any]


def _start_worker(
    make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...], threads: int, done: Any, stop: Any
) -> None:
    global _work  # noqa: PLW0603 (the process does only this work)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def advance(n_bytes: int) -> None:
        if stop.is_set():
            raise RunError("the process that started this one has stopped")
        with done.get_lock():
            done.value += n_bytes

    _work = make(*arguments, advance)


def _work_in_worker(item: Any) -> Any:
    return _work(item)


def _end_with_parent() -> None:
    """Exit when the parent process dies, since a killed parent cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
