"""Answers that are streamed: server-sent events, as OpenAI writes them, `data: [DONE]` last."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from gptworks.serve.errors import as_api_error, log_unforeseen


class EventStream(StreamingResponse):
    """Sends chunks as they come, several in one write where several have come. However it ends, `cancel` is called."""

    def __init__(self, chunks: AsyncGenerator[Sequence[BaseModel]], cancel: Callable[[], None]) -> None:
        super().__init__(
            _events(chunks),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        finally:
            self._cancel()


async def _events(chunks: AsyncGenerator[Sequence[BaseModel]]) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(chunks):
            async for several in chunks:
                if several:
                    yield b"".join(
                        b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n" for chunk in several
                    )
    except Exception as error:
        log_unforeseen(error)
        yield as_api_error(error).event()
        return
    yield b"data: [DONE]\n\n"
