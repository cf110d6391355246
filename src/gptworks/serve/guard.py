"""Check requests before their routes: the key, the body's size and time, and the number of requests.

A route gets a request only when its body is complete. While the route works, the guard watches the connection: if the
client leaves or the time is over, the guard cancels the route, and with it the texts that the engine generates.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptworks.serve import sign_in
from gptworks.serve.errors import ENGINE_FAILED, APIError
from gptworks.serve.log import log_request
from gptworks.serve.service import Caller, Service

OPEN_PATHS = ("/", "/health", "/openapi.json")
STATIC = "/static/"
"""OPEN_PATHS, and paths below STATIC, need no key and are open to pages of every origin."""


class _Gone(Exception):
    """The client closed its connection."""


class Guard:
    """ASGI middleware that checks requests, and cancels a route if its client leaves or the time is over."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [sha256(key.encode()).digest() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the routes answer GET, and uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        answer = _Answer(send, self._service.metrics.answered)
        caller = Caller(self._client(scope))
        scope.setdefault("state", {})["caller"] = caller
        if scope["path"] == "/health":
            await self._app(scope, receive, answer)
            return
        service = self._service
        began = time.monotonic()
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
            raise  # an outer handler answers and logs the error
        finally:
            service.n_answered += 1
            service.leave(caller)
            log_request(scope, answer.status, time.monotonic() - began, caller.n_tokens)

    def _client(self, scope: Scope) -> str:
        """Return the name of a request's client.

        If keys are required and the request has a key, the name is the key's digest. Otherwise, it is the client's
        address.
        """
        authorization = Headers(scope=scope).get("authorization")
        if self._keys and authorization:
            return _digest(authorization.partition(" ")[2]).hex()
        return str((scope.get("client") or ("",))[0])

    async def _serve(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        headers, incoming = Headers(scope=scope), _Body(receive)
        try:
            self._admit(scope, headers)
            body = await self._read(incoming)
            if self._service.n_working >= self._service.max_in_flight:
                raise APIError(429, "the server is at its limit of requests: try again later.",
                               code="too_many_requests")  # fmt: skip
        except APIError:
            await self._discard(headers, incoming, answer)
            raise
        caller: Caller = scope["state"]["caller"]
        caller.works = True
        try:
            await self._work(scope, receive, answer, body)
        finally:
            caller.works = False

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Raise an APIError if the request must be refused before its body is read."""
        settings = self._service.settings
        if settings.local_names_only and not _is_local(headers.get("host", "")):
            raise APIError(403, "this server answers only to names of this machine; --api-key opens it to others.",
                           code="host_not_allowed")  # fmt: skip
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(STATIC)
        if not is_open and not self._is_same_site(headers):
            raise APIError(403, "pages of other origins may not call this server; --cors-origin allows an origin.",
                           code="origin_not_allowed")  # fmt: skip
        needs_key = not is_open and scope["path"] != sign_in.PATH
        if needs_key and not self._has_key(scope, headers):
            how = "" if self._service.sign_in is None else "open the link that `gptworks studio` printed, or "
            raise APIError(401, f"no valid API key: {how}send `Authorization: Bearer KEY`.", code="invalid_api_key",
                           headers={"www-authenticate": "Bearer"})  # fmt: skip
        if self._service.failure is not None:
            raise APIError(503, ENGINE_FAILED, code="engine_failed")
        if self._service.draining:
            raise APIError(503, "the server is about to stop: try another, or again later.", code="draining")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > settings.max_body_bytes:
            raise self._too_large()

    def _is_same_site(self, headers: Headers) -> bool:
        """Return whether a request comes from a page of this server, a page of an allowed origin, or no page."""
        origin, allowed = headers.get("origin", ""), self._service.settings.cors_origins
        if origin and (origin in allowed or "*" in allowed):
            return True
        same_host = origin.partition("://")[2] == headers.get("host")
        return (same_host or not origin) and headers.get("sec-fetch-site") not in ("cross-site", "same-site")

    def _has_key(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a request has a valid API key or both values of a session, or the server needs neither. The
        check takes the same time for every key."""
        service = self._service
        if not self._keys and service.sign_in is None:
            return True
        kind, _, key = headers.get("authorization", "").partition(" ")
        fits = [hmac.compare_digest(_digest(key), known) for known in self._keys]
        if service.sign_in is not None:
            cookies = sign_in.cookies_of(scope, sign_in.cookie_name(scope))
            fits += [service.sign_in.knows(cookie, key.strip()) for cookie in cookies]
        return any(fits) and kind.lower() == "bearer"

    def _too_large(self) -> APIError:
        return APIError(413, f"the body has more than {self._service.settings.max_body_bytes} bytes.",
                        code="body_too_large")  # fmt: skip

    async def _read(self, incoming: "_Body") -> bytes:
        """Read the complete body of a request.

        Raises:
            APIError: the body is too large or arrives too slowly, or all bodies being read are too large together.
            _Gone: the client closed the connection before the end of the body.
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

    async def _discard(self, headers: Headers, incoming: "_Body", answer: "_Answer") -> None:
        """Read and drop a refused request's body, so that its client reads the answer. The answer ends the connection
        if the body is too long or too slow, or the client waits for `100 Continue`."""
        settings = self._service.settings
        left = settings.max_discarded_bytes
        answer.closes = True
        if "expect" in headers and not incoming.begun:  # the client waits for `100 Continue`
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
        """Run the app on a request until it has answered, the client leaves or the time is over."""
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


def _digest(key: str) -> bytes:
    return sha256(key.strip().encode("latin-1")).digest()


class _Answer:
    """An ASGI `send` that records the answer's state and adds headers."""

    def __init__(self, send: Send, answered: Callable[[int], None]) -> None:
        self._send, self._answered = send, answered
        self.started = self.is_stream = self.closes = False
        self.status: int | None = None
        """The answer's status; None: the client left before the answer."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            self._answered(message["status"])
            headers = MutableHeaders(scope=message)
            self.is_stream = headers.get("content-type", "").startswith("text/event-stream")
            headers.setdefault("cache-control", "no-store")
            headers.setdefault("x-content-type-options", "nosniff")
            if self.closes:
                headers["connection"] = "close"
        await self._send(message)

    async def end(self, error: APIError, event: Callable[[APIError], bytes]) -> None:
        """Raise the error if no answer has begun; send it as an event if a stream has begun."""
        if not self.started:
            raise error
        if self.is_stream:
            await self._send({"type": "http.response.body", "body": event(error), "more_body": False})


class _Body:
    """A request's body, received in parts."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.begun = self.complete = False

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the unread parts of the body as they arrive; raises _Gone if the client leaves before the end."""
        while not self.complete:
            self.begun = True
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            self.complete = not message.get("more_body", False)
            yield message.get("body", b"")


def _raise_error(work: "asyncio.Task[None]") -> None:
    """Raise a task's error, if any. A Rust panic, a `BaseException` that no handler answers, becomes a RuntimeError."""
    error = work.exception()
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    work.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes) -> Receive:
    """Return an ASGI `receive` that returns `body` once and then waits forever."""
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
