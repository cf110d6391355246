"""The routes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError

from gptworks import __version__
from gptworks.infer.engine import Engine
from gptworks.serve import chat, completions, documents, errors, openai
from gptworks.serve.caller import caller_of
from gptworks.serve.chat import conversation_ids
from gptworks.serve.documents import takes
from gptworks.serve.embeddings import embeddings
from gptworks.serve.errors import APIError
from gptworks.serve.events import EventStream
from gptworks.serve.guard import Guard
from gptworks.serve.service import Service
from gptworks.serve.settings import ServerSettings

_Wire = TypeVar("_Wire", bound=openai.Wire)
_Result = TypeVar("_Result")

router = APIRouter(responses=documents.ERRORS)


def create_app(engines: Mapping[str, Engine], settings: ServerSettings | None = None) -> FastAPI:
    """The server's ASGI app; `app.state.service` is its state.

    Args:
        engines: the models by name; the first is meant where a request may leave the name out, and does.

    Raises:
        UserError: no engines, or a name that no model can have.
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
    app.state.service = service
    app.include_router(router)
    errors.install(app)
    documents.install(app)
    app.add_middleware(Guard, service=service)
    if origins := list(service.settings.cors_origins):
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _body(request: Request, kind: type[_Wire]) -> _Wire:
    """The request's JSON.

    Raises:
        APIError: it is something else, or says something else.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise APIError(415, "the body must be JSON: send `content-type: application/json`.", code="not_json")
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise errors.from_validation(error) from None


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")


@router.post(
    "/v1/completions",
    response_model=openai.Completion,
    responses=documents.STREAMED,
    openapi_extra=takes(openai.CompletionRequest),
)
async def create_completion(request: Request) -> Response:
    """Continue texts."""
    body = await _body(request, openai.CompletionRequest)
    generation = await completions.begin_completions(_service(request), body, caller_of(request.scope))
    if body.stream:
        return EventStream(completions.stream(generation, body), generation.cancel)
    return _json(await completions.complete(generation, body))


@router.post(
    "/v1/chat/completions",
    response_model=openai.ChatCompletion,
    responses=documents.STREAMED,
    openapi_extra=takes(openai.ChatRequest),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer in a conversation."""
    body = await _body(request, openai.ChatRequest)
    generation = await chat.begin_chat(_service(request), body, caller_of(request.scope))
    if body.stream:
        return EventStream(chat.stream(generation, body), generation.cancel)
    return _json(await chat.complete(generation, body))


@router.post("/v1/embeddings", response_model=openai.EmbeddingResponse, openapi_extra=takes(openai.EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """The mean of the last hidden states of each text."""
    return _json(
        await embeddings(_service(request), await _body(request, openai.EmbeddingRequest), caller_of(request.scope))
    )


@router.get("/v1/models", response_model=openai.ModelList)
async def list_models(request: Request) -> Response:
    """The models there are."""
    return _json(openai.ModelList(object="list", data=[model.describe() for model in _service(request).models]))


@router.get("/v1/models/{model_id}", response_model=openai.Model)
async def get_model(request: Request, model_id: str) -> Response:
    """One of them."""
    return _json(_service(request).models.get(model_id).describe())


@router.post("/tokenize", response_model=openai.TokenizeResponse, openapi_extra=takes(openai.TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    body = await _body(request, openai.TokenizeRequest)
    model = _service(request).models.get(body.model)

    task = caller_of(request.scope).task()

    def read() -> list[int]:
        if body.messages is not None:
            return conversation_ids(model, body.messages, add_generation_prompt=body.add_generation_prompt, task=task)
        return model.tokens.encode(body.prompt or "", "prompt")

    ids = await _in_thread(request, read)
    more: dict[str, Any] = {"token_strs": [model.tokens.spell(i)[0] for i in ids]} if body.return_token_strs else {}
    return _json(openai.TokenizeResponse(count=len(ids), max_model_len=model.engine.context, tokens=ids, **more))


@router.post("/detokenize", response_model=openai.DetokenizeResponse, openapi_extra=takes(openai.DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, without special tokens."""
    body = await _body(request, openai.DetokenizeRequest)
    tokens = _service(request).models.get(body.model).tokens
    text = await _in_thread(request, lambda: tokens.decode(tokens.check(body.tokens, "tokens")))
    return _json(openai.DetokenizeResponse(prompt=text))


@router.get("/", response_model=documents.About)
async def about(request: Request) -> Response:
    """What this server is, and where its interface begins."""
    base = str(request.base_url)
    return JSONResponse(
        {
            "name": "gptworks", "version": __version__,
            "about": "language models behind an OpenAI-compatible interface",
            "base_url": f"{base}v1", "models": f"{base}v1/models", "interface": f"{base}openapi.json",
            "health": f"{base}health",
        }
    )  # fmt: skip


@router.get("/health", response_model=documents.Health)
async def health(request: Request) -> Response:
    """Whether the server takes requests: 200, or 503 where it is about to stop or an engine has stopped."""
    service = _service(request)
    status = "draining" if service.draining else "ok" if service.healthy else "failed"
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus' text format; what vLLM calls vllm:NAME is gptworks:NAME here."""
    return Response(_service(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _in_thread(request: Request, work: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(_service(request).threads, work)
