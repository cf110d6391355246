"""An engine that steps in a thread of its own, for programs that wait for many texts at once (asyncio).

with EngineLoop(engine) as loop:
    stream = loop.stream(prompt, settings)      # checked here: UserError, QueueFull
    async for piece in stream: ...              # leaving the loop cancels the request

completions = await loop.complete(prompt, settings, n_samples=2)
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from gptworks.errors import RunError
from gptworks.infer.engine import Engine, completions
from gptworks.infer.request import Completion, Request, Statistics
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Piece


class EngineLoop:
    """Runs an engine's steps while there are requests, and sleeps while there are none."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake, self._ending = threading.Event(), False
        self._streams: set[Stream] = set()
        self._thread = threading.Thread(target=self._run, name="gptworks engine", daemon=True)

    def start(self) -> Self:
        """Begin to step."""
        self._thread.start()
        return self

    def close(self, *, drain: bool = True) -> None:
        """Stop, and wait until no step runs. drain: finish the requests there are; else they end with a RunError."""
        if not drain:
            for stream in list(self._streams):
                stream.cancel()
                stream.hand(RunError("the engine was stopped."))
        self._ending = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def stream(
        self, prompt: str | Sequence[int], settings: SamplingSettings | None = None, **arguments: Any
    ) -> "Stream":
        """Submit a request, with the arguments of `Engine.submit`, and iterate over its pieces as they come.

        To be called where an asyncio loop runs.

        Raises:
            UserError, QueueFull: as `Engine.submit`.
            RunError: the loop is closed.
        """
        if self._ending:
            raise RunError("the engine is stopping: no more requests are taken.")
        stream = Stream(self, prompt, settings, arguments)
        self._wake.set()
        return stream

    async def complete(
        self, prompt: str | Sequence[int], settings: SamplingSettings | None = None, **arguments: Any
    ) -> list[Completion]:
        """The finished samples of a request; arguments and errors as `stream`."""
        stream = self.stream(prompt, settings, **arguments)
        pieces = [piece async for piece in stream]
        return completions(pieces, len(stream.request.samples), len(stream.request.prompt_ids))

    def statistics(self) -> Statistics:
        """See `Engine.statistics`."""
        return self.engine.statistics()

    def _run(self) -> None:
        while True:
            try:
                busy = self.engine.step()
            except Exception:  # every request was told, and later ones may fare better
                busy = True
            if busy:
                continue
            if self._ending:
                return
            self._wake.wait()
            self._wake.clear()


class Stream:
    """The pieces of one request, for one reader. Going away cancels it; a reader that never begins calls `cancel`."""

    def __init__(
        self,
        loop: EngineLoop,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None,
        arguments: dict[str, Any],
    ) -> None:
        self._loop = loop
        self._asyncio = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._n_unfinished = arguments.get("n_samples", 1)
        loop._streams.add(self)
        try:
            self.request: Request = loop.engine.submit(prompt, settings, listener=self.hand, **arguments)
        except BaseException:
            loop._streams.discard(self)
            raise

    def hand(self, piece: Piece | Exception) -> None:
        """For the engine: hand a piece over to the reader. From any thread."""
        try:
            self._asyncio.call_soon_threadsafe(self._queue.put_nowait, piece)
        except RuntimeError:  # the reader's loop is closed
            self.cancel()

    def cancel(self) -> None:
        """End the request where it is. From any thread, any number of times."""
        self._loop._streams.discard(self)
        self._loop.engine.cancel(self.request)
        self._loop._wake.set()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while self._n_unfinished:
                piece = await self._queue.get()
                if isinstance(piece, Exception):
                    raise piece
                self._n_unfinished -= piece.finish_reason is not None
                yield piece
        finally:
            if self._n_unfinished:
                self.cancel()
            self._loop._streams.discard(self)
