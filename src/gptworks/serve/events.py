"""Streamed answers: server-sent events in OpenAI's format, which end with `data: [DONE]`."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gptworks.serve.errors import APIError, as_api_error, log_unforeseen


class EventStream(StreamingResponse):
    """Sends chunks as they come, all ready ones in one write. Calls `cancel` at the end, also after an error."""

    last: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, chunks: AsyncGenerator[Sequence[Any]], cancel: Callable[[], None]) -> None:
        super().__init__(
            self._events(chunks),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["error_event"] = self.error_event  # the guard sends it if the request takes too long
        try:
            await self.stream_response(send)
        finally:
            self._cancel()

    @staticmethod
    def json_of(chunk: Any) -> str:
        """Return a chunk as JSON in one line."""
        return str(chunk)

    @staticmethod
    def error_event(error: APIError) -> bytes:
        """Return the event that ends the stream after an error."""
        return error.event()

    async def _events(self, chunks: AsyncGenerator[Sequence[Any]]) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(chunks):
                async for several in chunks:
                    if several:
                        yield b"".join(b"data: " + self.json_of(chunk).encode() + b"\n\n" for chunk in several)
        except Exception as error:
            log_unforeseen(error)
            yield self.error_event(as_api_error(error))
            return
        if self.last:
            yield self.last
