"""Streamed answers: server-sent events in OpenAI's format, which end with `data: [DONE]`, or with an error."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from gptworks.serve.errors import APIError, as_api_error, log_unforeseen


class EventStream(StreamingResponse):
    """Sends chunks as they come, all ready chunks in one write. Calls `cancel` at the end, also after an error.

    While no chunk comes, for example because the prompt is long or the request waits for a slot, the stream sends
    comments. Proxies and clients may close a silent connection; nginx does so after 60 seconds.
    """

    last: ClassVar[bytes] = b"data: [DONE]\n\n"
    silent_seconds: ClassVar[float] = 15.0
    """Seconds without a chunk after which a comment is sent, and seconds between two comments."""

    def __init__(self, chunks: AsyncGenerator[Sequence[Any]], cancel: Callable[[], None]) -> None:
        super().__init__(
            self._events(chunks),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["error_event"] = self.error_event  # the guard sends it if the request takes too long
        loop = asyncio.get_running_loop()
        sent_at = [loop.time()]

        async def sending(message: Message) -> None:
            sent_at[:] = [loop.time()]
            await send(message)

        async def ping() -> None:
            while True:
                left = sent_at[0] + self.silent_seconds - loop.time()
                if left > 0:
                    await asyncio.sleep(left)
                else:
                    await sending({"type": "http.response.body", "body": b": \n\n", "more_body": True})

        pings = asyncio.create_task(ping())
        try:
            await self.stream_response(sending)
        finally:
            pings.cancel()
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
