"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from gptworks.errors import RunError, UserError
from gptworks.infer.engine import EngineFailed
from gptworks.infer.fitting import ContextExceeded
from gptworks.infer.loop import EngineStopped, SlowReader
from gptworks.infer.scheduler import QueueFull

RETRY_AFTER_SECONDS = 1
ENGINE_FAILED = "the engine of a model has failed: the server ends; its log has the error."

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          429: "rate_limit_error"}  # fmt: skip


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


class APIError(Exception):
    """An error that becomes the server's answer, with HTTP status, message, request field (`param`) and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", str(RETRY_AFTER_SECONDS))

    def tree(self) -> dict[str, Any]:
        """Return the error as a JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def event(self) -> bytes:
        """Return the error as a server-sent event, for a stream that has begun."""
        return b"data: " + json.dumps(self.tree()).encode() + b"\n\n"

    def response(self) -> JSONResponse:
        return JSONResponse(self.tree(), self.status, self.headers)


def invalid(param: str, message: str, code: str | None = None) -> APIError:
    """Return a 400 error about the field `param` of a request."""
    return APIError(400, f"{param}: {message}", param=param, code=code)


@contextmanager
def blaming(param: str, advice: str = "") -> Iterator[None]:
    """Turn a UserError in this context into a 400 error about the field `param` of the request.

    advice: text to append to the message about a conversation that is too long.
    """
    try:
        yield
    except ContextExceeded as error:
        raise invalid(param, f"{error}{advice}", "context_length_exceeded") from None
    except UserError as error:
        raise invalid(param, _shortened(str(error))) from None


_FORESEEN: tuple[tuple[type[Exception], int, str | None], ...] = (
    (UserError, 400, None),
    (QueueFull, 429, "queue_full"),
    (SlowReader, 408, "slow_reader"),
    (EngineStopped, 503, "stopped"),
    (RunError, 500, None),
)


def log_unforeseen(error: Exception) -> None:
    """Log an error that is answered with 500, unless it was logged already."""
    if as_api_error(error).status == 500 and not getattr(error, "is_logged", False):
        logging.getLogger("gptworks").error("a request failed", exc_info=error)


def as_api_error(error: Exception) -> APIError:
    """Return the APIError that answers an exception. The answer leaves out the message of an unforeseen exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineFailed):  # the exception's message is only for the log
        return APIError(503, ENGINE_FAILED, code="engine_failed")
    for kind, status, code in _FORESEEN:
        if isinstance(error, kind):
            return APIError(status, _shortened(str(error)), code=code)
    return APIError(
        500, "the server failed; its log has the error.", headers={"connection": "close"}
    )  # uvicorn then closes the connection


def _shortened(message: str) -> str:
    """Cut the middle out of a long message, which may repeat the request."""
    return message if len(message) <= 600 else f"{message[:250]} … {message[-250:]}"


def from_validation(error: ValidationError) -> APIError:
    """Return the answer for an invalid body. The answer states the most deeply nested error, which in a union belongs
    to the type that fits best."""
    first = max(error.errors(include_url=False, include_input=False), key=lambda one: len(one["loc"]))
    place = ".".join(str(part) for part in first["loc"] if not _is_type_name(part)) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {message}", code="invalid_json")
    if first["type"] == "unknown_field":
        name = str(first["ctx"]["name"])
        place = name if place is None else f"{place}.{name}"
        return APIError(400, message, param=place, code="unknown_parameter")
    return invalid(place, message, "invalid_value") if place else APIError(400, message, code="invalid_value")


def _is_type_name(part: int | str) -> bool:
    """Return whether a part of an error's location is a type that pydantic adds for a union, such as `list[str]`."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "function-plain", "constrained-str"))


def _nearest(app: FastAPI, path: str) -> str:
    """Return a hint for a path that does not exist. Most often, a client's base URL lacks /v1 or has too many parts."""
    wanted = re.sub("/+", "/", path).rstrip("/")
    meant = [one for one in app.openapi()["paths"] if one != "/" and wanted and (one.endswith(wanted) or one in wanted)]
    if not meant:
        return "/openapi.json lists the paths."
    nearest = max(meant, key=len)
    rule = " The base URL of a client of OpenAI's API ends in /v1." if nearest.startswith("/v1/") else ""
    return f"did you mean {nearest}?{rule}"


def install(app: FastAPI) -> None:
    """Answer all errors of the app in OpenAI's format."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def answer_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status = error.status_code
        if status == 404:
            message = f"there is nothing at {request.url.path}; {_nearest(app, request.url.path)}"
        elif status == 405:
            message = f"{request.url.path} does not accept {request.method}."
        else:
            message = str(error.detail or HTTPStatus(status).phrase)
        return APIError(status, message, headers=error.headers).response()

    async def answer_query(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return invalid(str(first["loc"][-1]), first["msg"], "invalid_value").response()

    app.add_exception_handler(RequestValidationError, answer_query)
    for kind in (APIError, UserError, RunError, QueueFull, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_http)
