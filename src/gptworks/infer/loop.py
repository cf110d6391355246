"""Run an engine in its own thread, so that asyncio programs can wait for many texts.

with EngineLoop(engine) as loop:
    stream = loop.open(max_unread=1000)         # for the requests of one reader
    stream.submit(prompt, settings)             # from any thread, since tokenizing a long prompt takes time
    async for batch in stream.batches(): ...    # lists of (request number, piece, time); `break` cancels the requests
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from functools import partial
from types import TracebackType
from typing import Any, Self

from gptworks.errors import RunError
from gptworks.infer.engine import Engine, EngineFailed
from gptworks.infer.request import Prompt, Request
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Piece

Batch = list[tuple[int, Piece, float]]
"""Pieces, each as (its request's number in the stream, the piece, its arrival time by `time.monotonic`)."""

_LOG = logging.getLogger("gptworks.engine")


class EngineStopped(RunError):
    """The engine's loop is closed: it accepts no more requests, or has ended its requests."""


class SlowReader(RunError):
    """A reader left too many pieces unread; its requests were cancelled."""


class StreamCancelled(RunError):
    """A stream was cancelled while its reader expected more pieces."""


class EngineLoop:
    """Runs an engine's steps in a thread while the engine has requests; otherwise the thread sleeps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake, self._ending = threading.Event(), False
        self._accepting = threading.Lock()  # held to queue a request or to set `_ending`
        self._streams: set[Stream] = set()
        self._to_wake: deque[Stream] = deque()
        self._left: deque[Stream] = deque()  # streams to cancel: their readers have left
        self._thread = threading.Thread(target=self._run, name="gptworks engine", daemon=True)

    def start(self) -> Self:
        """Start the engine's thread; return this loop."""
        self._thread.start()
        return self

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests, finish or end the current requests, and wait until the engine's thread has stopped.

        Args:
            drain: True: let requests finish, unless their reader has left or the thread was never started. False: end
                all requests with an EngineStopped. If this call blocks an asyncio loop, readers in this loop cannot
                read meanwhile. Their streams end with a SlowReader after more new pieces than `Engine.context` per
                unfinished text.
        """
        self.check()
        with self._accepting:
            self._ending = True
        blocked = asyncio._get_running_loop()
        for stream in list(self._streams):
            if not drain or self._thread.ident is None:
                stream.cancel(EngineStopped("the engine was stopped."))
            elif stream._asyncio is blocked:
                stream.bound(self.engine.context)
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and accepts requests."""
        return self._thread.is_alive() and not self._ending and self.engine.failure is None

    def check(self) -> EngineFailed | None:
        """Return the error that ended the engine, or None. First end the engine if its thread has died silently."""
        has_begun = self._thread.ident is not None
        if has_begun and not self._thread.is_alive() and not self._ending and self.engine.failure is None:
            self._fail(RuntimeError("its thread has ended"))
        return self.engine.failure

    def open(self, *, max_unread: int | None = None, patience: int = 1) -> "Stream":
        """Return a new stream without requests. Call this inside a running asyncio loop.

        Args:
            max_unread: maximum number of unread pieces; with more, the stream is cancelled (SlowReader).
            patience: wake the reader when this many pieces are unread or a text ends. Waking takes as much CPU time as
                a step; use a larger number if only complete texts matter.

        Raises:
            EngineStopped: the loop is closed.
            EngineFailed: the engine has failed.
        """
        self._check_accepting()
        return Stream(self, max_unread, patience)

    def enqueue(self, request: Request) -> None:
        """Queue a request with `Engine.enqueue`, and wake the engine's thread. Thread-safe.

        Raises:
            EngineStopped: the loop is closed.
            QueueFull, EngineFailed: see `Engine.enqueue`.
        """
        with self._accepting:
            self._check_accepting()
            self.engine.enqueue(request)
        self._wake.set()

    def _check_accepting(self) -> None:
        if (failure := self.check()) is not None:
            raise EngineFailed(failure.error)
        if self._ending:
            raise EngineStopped("the engine is stopping: no more requests are accepted.")

    def _run(self) -> None:
        try:
            self._steps()
        except BaseException as error:  # whatever the error, every request needs an answer
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.engine.failure is None:
            _log_failure(error)
            self.engine.fail(error)
        self._wake_readers()

    def _steps(self) -> None:
        while True:
            while self._left:
                self._left.popleft().cancel()
            is_last = self._ending  # read before the step, so that the last step receives every accepted request
            try:
                busy = self.engine.step(on_failure=_log_failure)
            except EngineFailed:
                raise
            except Exception:  # every request has received the error; later requests may succeed
                busy = True
            self._wake_readers()
            if busy:
                continue
            if is_last:
                return
            self._wake.wait()
            self._wake.clear()

    def _wake_readers(self) -> None:
        """Wake the readers of new pieces with one call per asyncio loop, since such a call takes as long as a step."""
        together: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        while self._to_wake:
            stream = self._to_wake.popleft()
            together.setdefault(stream._asyncio, []).append(stream)
        for loop, streams in together.items():
            try:
                loop.call_soon_threadsafe(_wake_all, streams)
            except RuntimeError:  # the readers' loop is closed
                for stream in streams:
                    stream.cancel()


def _log_failure(error: BaseException) -> None:
    _LOG.error("a step failed, and with it its requests", exc_info=error)
    with contextlib.suppress(AttributeError):  # exception types defined in C may not accept attributes
        error.is_logged = True  # type: ignore[attr-defined]


def _wake_all(streams: list["Stream"]) -> None:
    for stream in streams:
        stream._woken = False
        if stream._waiter is not None and not stream._waiter.done():
            stream._waiter.set_result(None)


class Stream:
    """One reader's requests and their pieces. Leaving the iteration over `batches` early cancels all the requests."""

    def __init__(self, loop: EngineLoop, max_unread: int | None = None, patience: int = 1) -> None:
        self._loop, self._max_unread, self._patience = loop, max_unread, patience
        self._asyncio = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None  # a waiting reader awaits this future
        self._woken = False
        self._unread: deque[tuple[int, Piece | Exception, float]] = deque()
        self._n_unfinished = 0
        self.cancelled = False
        self.requests: list[Request] = []
        loop._streams.add(self)

    def submit(self, prompt: Prompt, settings: SamplingSettings | None = None, **arguments: Any) -> Request:
        """Submit a request and return it. Any thread may call this, but only one thread at a time.

        For the arguments and errors, see `Engine.submit`. Raises EngineStopped if the loop is closed.
        """
        listener = partial(self.hand, len(self.requests))
        request = self._loop.engine.admission.request(prompt, settings, listener=listener, **arguments)
        self._loop.enqueue(request)
        self.requests.append(request)
        self._n_unfinished += arguments.get("n_samples", 1)
        if self.cancelled:  # cancelled while the prompt was encoded
            self._loop.engine.cancel(request)
        return request

    def hand(self, number: int, piece: Piece | Exception) -> None:
        """Queue a piece or an error for the request's reader. Thread-safe.

        After the step, the loop wakes the reader if `patience` pieces are unread or a text has ended. A piece beyond
        `max_unread` cancels the stream; the reader then gets a SlowReader after the unread pieces.
        """
        full = self._max_unread is not None and len(self._unread) >= self._max_unread
        if full and isinstance(piece, Piece):
            self.cancel(SlowReader(f"the reader left {self._max_unread} pieces unread: the request was cancelled."))
            return
        self._unread.append((number, piece, time.monotonic()))
        ended = isinstance(piece, Exception) or piece.finish_reason is not None
        if not self._woken and (ended or len(self._unread) >= self._patience):
            self._woken = True
            self._loop._to_wake.append(self)

    def bound(self, n_pieces: int) -> None:
        """Limit the unread pieces to their current number plus `n_pieces` per unfinished text."""
        most = len(self._unread) + n_pieces * max(1, self._n_unfinished)
        self._max_unread = most if self._max_unread is None else min(most, self._max_unread)

    def cancel(self, error: Exception | None = None) -> None:
        """Cancel the unfinished requests; may be called repeatedly. Thread-safe.

        Args:
            error: a reader that expects more pieces gets this error after the unread pieces. Default: StreamCancelled.
        """
        if not self.cancelled:
            self.cancelled = True
            self._unread.append((0, error or StreamCancelled("the requests were cancelled."), time.monotonic()))
            with contextlib.suppress(RuntimeError):  # the reader's asyncio loop is closed
                self._asyncio.call_soon_threadsafe(_wake_all, [self])
        self._loop._streams.discard(self)
        for request in list(self.requests):
            if not request.done:
                self._loop.engine.cancel(request)
        self._loop._wake.set()

    def leave(self) -> None:
        """Have the engine cancel the requests before its next step. Takes no lock, so a finalizer may call this."""
        if self._n_unfinished and not self.cancelled:
            self._loop._left.append(self)

    def batches(self) -> "_Reading":
        """Return an asynchronous iterator of batches, each with the new pieces, until all requests have ended.

        If a request ends with an error, the iterator yields the earlier pieces, cancels the other requests and raises
        the error.
        """
        return _Reading(self, self._batches())

    async def _batches(self) -> AsyncGenerator[Batch]:
        try:
            while self._n_unfinished:
                if not self._unread:
                    self._waiter = self._asyncio.create_future()
                    await self._waiter
                batch: Batch = []
                error: Exception | None = None
                while self._unread and error is None:
                    number, piece, came_at = self._unread.popleft()
                    if isinstance(piece, Exception):
                        error = piece
                        continue
                    self._n_unfinished -= piece.finish_reason is not None
                    batch.append((number, piece, came_at))
                if batch:
                    yield batch
                if error is not None and self._n_unfinished:
                    raise error
        finally:
            if self._n_unfinished:
                self.cancel()
            self._loop._streams.discard(self)


class _Reading(AsyncIterator[Batch]):
    """The iterator that `Stream.batches` returns. Its deletion, which follows a `break`, calls `Stream.leave`.

    An asyncio loop would finalize a bare generator later, and never while `EngineLoop.close` blocks that loop.
    """

    def __init__(self, stream: Stream, generator: AsyncGenerator[Batch]) -> None:
        self._stream, self._generator = stream, generator

    def __anext__(self) -> Awaitable[Batch]:
        return anext(self._generator)

    async def aclose(self) -> None:
        """End the iteration, and cancel unfinished requests."""
        await self._generator.aclose()

    def __del__(self) -> None:
        self._stream.leave()
