"""/openapi.json: FastAPI's description of the routes, plus the schemas of request bodies.

The routes parse the bodies themselves, so FastAPI does not know these schemas.
"""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gptworks.serve.errors import ErrorResponse

_STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "No valid API key.",
    403: "The Host or the Origin is not allowed.",
    404: "No such model or path.",
    405: "The path does not accept this method.",
    408: "The body came, or the answer was read, too slowly.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The server is busy; retry after `retry-after` seconds.",
    431: "The headers are too long.",
    500: "The server failed.",
    501: "The request's transfer coding is not supported.",
    503: "The server is about to stop, a model's engine failed, or there are too many connections.",
    504: "The request took too long.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text} for status, text in _STATUSES.items()
}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
"""The `responses` of a route that answers with server-sent events, one for each chunk, if `stream` is true."""

_bodies: list[type[BaseModel]] = []
"""Types of the request bodies; each call of `takes` adds one."""


class Health(BaseModel):
    status: Literal["ok", "draining", "failed"]
    reason: str | None = None
    """The model whose engine failed, and the type of the error; missing if no engine reported one."""


class About(BaseModel):
    name: str
    version: str
    about: str
    base_url: str
    """The base URL for OpenAI's clients."""
    models: str
    interface: str
    health: str


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose JSON body has this type."""
    _bodies.append(kind)
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    """Make the app's /openapi.json describe the request bodies too."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI) -> dict[str, Any]:
    tree = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, requests = models_json_schema(
        [(kind, "validation") for kind in _bodies], ref_template="#/components/schemas/{model}"
    )
    components = tree["components"]
    components["schemas"] |= requests["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    tree["security"] = [{}, {"key": []}]
    for operations in tree["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return tree
