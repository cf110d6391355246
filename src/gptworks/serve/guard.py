"""The checks before the routes: the key, the body's size and time, the number of requests, and clients that are gone.

Each request is read whole before a route sees it. While a route works, the guard watches the connection: if the client
goes away or the time is over, the guard cancels the work, and with it the texts that the engine generates.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterable
from hashlib import sha256
from ipaddress import ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptworks.serve import sign_in
from gptworks.serve.caller import Caller
from gptworks.serve.errors import ENGINE_FAILED, APIError
from gptworks.serve.log import log_request
from gptworks.serve.service import Service

OPEN_PATHS = ("/", "/health", "/openapi.json")
STATIC = "/static/"
"""These, and what is below it, need no key, and every page may ask for them."""


class _Gone(Exception):
    """The client has closed its connection."""


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [sha256(key.encode()).digest() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._service.metrics.answered)
        caller = Caller(self._client(scope))
        scope.setdefault("state", {})["caller"] = caller
        if scope["path"] == "/health":
            await self._app(scope, receive, answer)
            return
        service = self._service
        began = time.monotonic()
        service.in_flight += 1
        service.metrics.in_flight.inc()
        service.callers.add(caller)
        try:
            await self._serve(scope, receive, answer)
        except APIError as error:
            await error.response()(scope, receive, answer)
        except _Gone:
            pass
        except Exception:
            if not answer.started:
                service.metrics.answered(500)
                answer.status = 500
            raise  # to be answered and logged outside
        finally:
            service.in_flight -= 1
            service.n_answered += 1
            service.metrics.in_flight.dec()
            service.leave(caller)
            log_request(scope, answer.status, time.monotonic() - began, caller.n_tokens)

    def _client(self, scope: Scope) -> str:
        """The client to whose share a request counts: its key, where keys are needed, or its address."""
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        if self._keys and authorization:
            return sha256(authorization.partition(b" ")[2].strip()).hexdigest()
        return str((scope.get("client") or ("",))[0])

    async def _serve(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        headers, incoming = dict(scope["headers"]), _Body(receive)
        try:
            self._admit(scope, headers)
            body = await self._read(incoming)
            if self._service.n_working >= self._service.max_in_flight:
                raise APIError(
                    429, "the server has as much to do as it may: try again later.", code="too_many_requests"
                )
        except APIError as error:
            await self._discard(headers, incoming, answer)
            raise error
        caller: Caller = scope["state"]["caller"]
        caller.works = True
        self._service.n_working += 1
        try:
            await self._work(scope, receive, answer, body)
        finally:
            self._service.n_working -= caller.works
            caller.works = False

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Whether the request may be read at all.

        Raises:
            APIError: it may not.
        """
        settings = self._service.settings
        if settings.local_names_only and not _is_local(headers.get(b"host", b"").decode("latin-1")):
            raise APIError(403, "this server answers to this machine's own names; --api-key opens it to others.",
                           code="host_not_allowed")  # fmt: skip
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(STATIC)
        if not is_open and not self._is_same_site(headers):
            raise APIError(403, "a web page of another origin asks: --cors-origin lets pages of an origin call this "
                           "server.", code="origin_not_allowed")  # fmt: skip
        needs_key = not is_open and scope["path"] != sign_in.PATH
        if needs_key and not self._has_key(scope, headers):
            how = "" if self._service.sign_in is None else "open the link that `gptworks studio` printed, or "
            raise APIError(401, f"no valid API key: {how}send `Authorization: Bearer KEY`.", code="invalid_api_key",
                           headers={"www-authenticate": "Bearer"})  # fmt: skip
        if self._service.failure is not None:
            raise APIError(503, ENGINE_FAILED, code="engine_failed")
        if self._service.draining:
            raise APIError(503, "the server is about to stop: try another, or again later.", code="draining")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > settings.max_body_bytes:
            raise self._too_large()

    def _is_same_site(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request comes from a page of this server or of an origin that may call it, or from no page."""
        origin, allowed = headers.get(b"origin", b"").decode("latin-1"), self._service.settings.cors_origins
        if origin and (origin in allowed or "*" in allowed):
            return True
        same_host = origin.partition("://")[2].encode("latin-1") == headers.get(b"host")
        return (same_host or not origin) and headers.get(b"sec-fetch-site") not in (b"cross-site", b"same-site")

    def _has_key(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Whether a request has an API key, or the two halves of a session, or needs none. Takes the same time for
        every key, valid or not."""
        service = self._service
        if not self._keys and service.sign_in is None:
            return True
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = sha256(key.strip()).digest()
        fits = [hmac.compare_digest(digest, known) for known in self._keys]
        if service.sign_in is not None:
            cookies, given = sign_in.cookies_of(scope, sign_in.cookie_name(scope)), key.strip().decode("latin-1")
            fits += [service.sign_in.knows(cookie, given) for cookie in cookies]
        return any(fits) and kind.lower() == b"bearer"

    def _too_large(self) -> APIError:
        return APIError(413, f"the body has more than {self._service.settings.max_body_bytes} bytes.",
                        code="body_too_large")  # fmt: skip

    async def _read(self, incoming: "_Body") -> bytes:
        """The whole body.

        Raises:
            APIError: it is too large, or comes too slowly.
        """
        service, settings = self._service, self._service.settings
        body = bytearray()
        try:
            async with asyncio.timeout(settings.body_seconds):
                async for part in incoming.parts():
                    body += part
                    service.bodies_bytes += len(part)
                    if len(body) > settings.max_body_bytes:
                        raise self._too_large()
                    if service.bodies_bytes > settings.max_bodies_bytes:
                        raise APIError(429, "too many large requests at once: try again later.", code="too_many_bytes")
        except TimeoutError:
            raise APIError(
                408, f"the body did not come within {settings.body_seconds:g} seconds.", code="body_timeout"
            ) from None
        finally:
            service.bodies_bytes -= len(body)
        return bytes(body)

    async def _discard(self, headers: dict[bytes, bytes], incoming: "_Body", answer: "_Answer") -> None:
        """Read the rest of a refused body, so that the client gets to read the answer; or close after the answer."""
        settings = self._service.settings
        left = settings.max_discarded_bytes
        answer.closes = True
        if b"expect" in headers and not incoming.begun:  # it waits for a 100 before it sends
            return
        try:
            async with asyncio.timeout(min(settings.body_seconds, 5.0)):
                async for part in incoming.parts():
                    left -= len(part)
                    if left < 0:
                        return
        except TimeoutError:
            return
        answer.closes = False

    async def _work(self, scope: Scope, receive: Receive, answer: "_Answer", body: bytes) -> None:
        """Let the app answer, until the client is gone or the time is over."""
        seconds = self._service.settings.request_seconds
        work: asyncio.Task[None] = asyncio.create_task(self._app(scope, _replay(body), answer))  # type: ignore[arg-type]
        watch = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            in_time = work.done() or watch.done()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        finally:
            for task in (work, watch):
                task.cancel()
        if not in_time:
            error = APIError(504, f"the request took more than {seconds:g} seconds.", code="timeout")
            await answer.end(error, scope["state"].get("error_event", APIError.event))
        elif not work.cancelled():
            _raise_error(work)


_KEPT_CLOSE = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
"""Of an answer that says nothing else: no cache keeps it, and no browser takes it for another type."""


def _has(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bool:
    return any(found.lower() == name for found, _ in headers)


class _Answer:
    """`send`, with the state of the answer."""

    def __init__(self, send: Send, answered: Callable[[int], None]) -> None:
        self._send, self._answered = send, answered
        self.started = self.is_stream = self.closes = False
        self.status: int | None = None
        """None: the client went away before there was an answer."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            self._answered(message["status"])
            headers = message.setdefault("headers", [])
            self.is_stream = any(value.startswith(b"text/event-stream") for _, value in headers)
            message["headers"] = headers = [*headers, *(pair for pair in _KEPT_CLOSE if not _has(headers, pair[0]))]
            if self.closes:
                message["headers"] = [*headers, (b"connection", b"close")]
        await self._send(message)

    async def end(self, error: APIError, event: Callable[[APIError], bytes]) -> None:
        """Answer with an error; as an event where a stream has begun."""
        if not self.started:
            raise error
        if self.is_stream:
            await self._send({"type": "http.response.body", "body": event(error), "more_body": False})


class _Body:
    """A request's body, as it comes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.begun = self.complete = False

    async def parts(self) -> AsyncIterator[bytes]:
        """What is still to come of it.

        Raises:
            _Gone: the client closes the connection before all of it has come.
        """
        while not self.complete:
            self.begun = True
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            self.complete = not message.get("more_body", False)
            yield message.get("body", b"")


def _raise_error(work: "asyncio.Task[None]") -> None:
    """Raise the task's error, if any, as an `Exception`: a Rust library's panic is none, and has no handler."""
    error = work.exception()
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    work.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes) -> Receive:
    """A `receive` that gives a body that was read, and then nothing more."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _is_local(host: str) -> bool:
    name, colon, port = (host, "", "") if host.endswith("]") or ":" not in host else host.rpartition(":")
    if colon and not (port.isascii() and port.isdecimal()):
        return False
    name = name.lower()
    name = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
