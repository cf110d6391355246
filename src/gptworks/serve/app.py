"""The HTTP routes, their description in /openapi.json, and the ASGI app that serves them."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from gptworks import __version__
from gptworks.infer.engine import Engine
from gptworks.serve import errors, openai
from gptworks.serve.completions import Answer, begin_chat, begin_completions, fitted_prompt
from gptworks.serve.embeddings import embeddings
from gptworks.serve.errors import APIError, ErrorResponse
from gptworks.serve.events import EventStream
from gptworks.serve.guard import Guard
from gptworks.serve.service import Caller, Service
from gptworks.serve.settings import ServerSettings
from gptworks.serve.wire import Wire

_Wire = TypeVar("_Wire", bound=Wire)
_Result = TypeVar("_Result")

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
    """The model whose engine failed, and the type of the error; missing if no engine reported an error."""


class About(BaseModel):
    name: str
    version: str
    about: str
    base_url: str
    """The base URL for OpenAI's clients."""
    models: str
    interface: str
    health: str


router = APIRouter(responses=ERRORS)


def create_app(
    engines: Mapping[str, Engine],
    settings: ServerSettings | None = None,
    *,
    routers: Iterable[APIRouter] = (),
    home: Callable[[Request], Awaitable[Response]] | None = None,
) -> FastAPI:
    """Return the server's ASGI app; `app.state.service` is its state.

    Args:
        engines: engines by model name; the first answers requests whose optional model name is missing.
        routers: further routes, for pages in a browser.
        home: answers requests of browsers for `/`.
    """
    service = Service(engines, settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    app = FastAPI(
        title="gptworks", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service, app.state.home = service, home
    app.include_router(router)
    for one in routers:
        app.include_router(one, dependencies=[Depends(_for_a_page)])
    errors.install(app)
    app.openapi = functools.cache(lambda: _description(app))  # type: ignore[method-assign]
    app.add_middleware(Guard, service=service)
    if origins := list(service.settings.cors_origins):
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


def _description(app: FastAPI) -> dict[str, Any]:
    """Return /openapi.json: FastAPI's description of the routes, plus the schemas of request bodies, which the routes
    parse themselves."""
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


async def _for_a_page(request: Request) -> None:
    request.state.caller.is_page = True


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose JSON body has this type, and add the type to the API's schemas."""
    _bodies.append(kind)
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def service_of(request: Request) -> Service:
    """Return the state of the server that received a request."""
    service: Service = request.app.state.service
    return service


async def body_of(request: Request, kind: type[_Wire]) -> _Wire:
    """Return a request's JSON body, validated as `kind`; raises an APIError if it is invalid."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise APIError(415, "the body must be JSON: send `content-type: application/json`.", code="not_json")
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise errors.from_validation(error) from None


def caller_of(request: Request) -> Caller:
    """Return the sender of a request."""
    caller: Caller = request.state.caller
    return caller


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


async def _generated(
    request: Request, kind: type[_Wire], begin: Callable[[Service, _Wire, Caller], Awaitable[Answer[Any]]]
) -> Response:
    answer = await begin(service_of(request), await body_of(request, kind), caller_of(request))
    if answer.body.stream:
        return EventStream(answer.chunks(), answer.generation.cancel)
    return _json(await answer.whole())


@router.post(
    "/v1/completions",
    response_model=openai.Completion,
    responses=STREAMED,
    openapi_extra=takes(openai.CompletionRequest),
)
async def create_completion(request: Request) -> Response:
    """Continue texts."""
    return await _generated(request, openai.CompletionRequest, begin_completions)


@router.post(
    "/v1/chat/completions",
    response_model=openai.ChatCompletion,
    responses=STREAMED,
    openapi_extra=takes(openai.ChatRequest),
)
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation."""
    return await _generated(request, openai.ChatRequest, begin_chat)


@router.post("/v1/embeddings", response_model=openai.EmbeddingResponse, openapi_extra=takes(openai.EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Return the mean of the last hidden states of each text, scaled to length 1."""
    body = await body_of(request, openai.EmbeddingRequest)
    return _json(await embeddings(service_of(request), body, caller_of(request)))


@router.get("/v1/models", response_model=openai.ModelList)
async def list_models(request: Request) -> Response:
    """List the served models."""
    return _json(openai.ModelList(object="list", data=[model.describe() for model in service_of(request).models]))


@router.get("/v1/models/{model_id}", response_model=openai.Model)
async def get_model(request: Request, model_id: str) -> Response:
    """Return the served model with this name."""
    return _json(service_of(request).get(model_id).describe())


@router.post("/tokenize", response_model=openai.TokenizeResponse, openapi_extra=takes(openai.TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    body = await body_of(request, openai.TokenizeRequest)
    model = await service_of(request).model(body.model, caller_of(request))
    task = caller_of(request).task()

    def read() -> list[int]:
        if body.messages is not None:
            asks, template = body.add_generation_prompt, model.chat_template
            return fitted_prompt(model, body.messages, None, task, template, add_generation_prompt=asks).ids
        return model.tokens.encode(body.prompt or "", "prompt")

    ids = await in_thread(request, read)
    more: dict[str, Any] = {"token_strs": [model.tokens.spell(i)[0] for i in ids]} if body.return_token_strs else {}
    return _json(openai.TokenizeResponse(count=len(ids), max_model_len=model.engine.context, tokens=ids, **more))


@router.post("/detokenize", response_model=openai.DetokenizeResponse, openapi_extra=takes(openai.DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, without special tokens."""
    body = await body_of(request, openai.DetokenizeRequest)
    tokens = (await service_of(request).model(body.model, caller_of(request))).tokens
    text = await in_thread(request, lambda: tokens.decode(tokens.check(body.tokens, "tokens")))
    return _json(openai.DetokenizeResponse(prompt=text))


@router.get("/", response_model=About)
async def about(request: Request) -> Response:
    """Return the server's name and the addresses of its API. A browser gets a page instead, if the server has one."""
    home: Callable[[Request], Awaitable[Response]] | None = request.app.state.home
    if home is not None and "text/html" in request.headers.get("accept", ""):
        return await home(request)
    base = str(request.base_url)
    return JSONResponse(
        {
            "name": "gptworks", "version": __version__,
            "about": "language models behind an OpenAI-compatible API",
            "base_url": f"{base}v1", "models": f"{base}v1/models", "interface": f"{base}openapi.json",
            "health": f"{base}health",
        }
    )  # fmt: skip


@router.get("/health", response_model=Health, responses={503: {"model": Health}})
async def health(request: Request) -> Response:
    """Answer 200 if the server accepts requests, and 503 if it is about to stop or an engine has stopped."""
    service = service_of(request)
    if (failure := service.failure) is not None:
        return JSONResponse({"status": "failed", "reason": failure}, 503)
    status = "draining" if service.draining else "ok" if service.healthy else "failed"
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format; vLLM's vllm:NAME is gptworks:NAME here."""
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def in_thread(request: Request, work: Callable[[], _Result]) -> _Result:
    """Run slow work in one of the service's threads, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(service_of(request).threads, work)
