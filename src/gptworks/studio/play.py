"""Routes of the Play tab: generated tokens, with their alternatives before and after the sampling settings apply."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from gptworks.chat_template import MAX_TEMPLATE_BYTES, TEMPLATE_FILE
from gptworks.config import SamplingConfig
from gptworks.files import read_text
from gptworks.infer.logprobs import TokenLogprob
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Pace
from gptworks.serve import openai
from gptworks.serve.app import body_of, caller_of, in_thread, service_of
from gptworks.serve.completions import fitted_prompt
from gptworks.serve.errors import APIError
from gptworks.serve.generate import LEAST_LOGPROB, Generation, Order, Prompt, begin
from gptworks.serve.models import ServedModel
from gptworks.serve.service import Caller, Service
from gptworks.serve.wire import Wire
from gptworks.studio.answers import MessageEvents, as_json
from gptworks.studio.loaded import Engines
from gptworks.tokenizer import StreamDecoder

router = APIRouter(include_in_schema=False)
Event = dict[str, Any]

_SEEDS = 2**31
"""A request without a seed gets a random seed below this limit, which JavaScript represents exactly."""
_Tokens = Annotated[int, Field(ge=0, le=openai.MAX_TOKENS)]


class PlaySettings(Wire, SamplingConfig):
    """Sampling settings of a request: the settings that a recipe also has, and settings for a single text."""

    max_tokens: _Tokens | None = None
    min_tokens: _Tokens | None = None
    stop: openai.Stops = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None
    logit_bias: openai.Biases | None = None

    def sampling(self, defaults: SamplingSettings, n_top: int) -> SamplingSettings:
        """Return the given settings, the model's `defaults` for all others, and a random seed if none is given.

        Raises:
            UserError: the settings are invalid.
        """
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        given = {"seed": secrets.randbelow(_SEEDS)} | given
        return SamplingSettings.of(defaults, **given, logprobs=n_top, processed_logprobs=n_top)


RunName = Annotated[str, Field(min_length=1, max_length=4096)]
Which = Literal["best", "last"] | Annotated[int, Field(ge=0)] | None
"""The checkpoint to use: its step, "best" or "last"; None for the best."""


class Chosen(Wire):
    """A request that names a model and one of its checkpoints."""

    model: RunName
    checkpoint: Which = None


class GenerateRequest(Chosen):
    prompt: str | None = None
    tokens: Annotated[list[int], Field(min_length=1, max_length=openai.MAX_TOKENS)] | None = None
    messages: openai.Messages | None = None
    answers: bool = False
    template_of: RunName | None = None
    """The run whose chat template writes the conversation, if the model has none."""
    settings: PlaySettings = PlaySettings()
    n_top: openai.Alternatives = 10
    score_prompt: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if sum(given is not None for given in (self.prompt, self.tokens, self.messages)) != 1:
            raise ValueError("give one of prompt, tokens and messages")
        return self


def _engines_of(request: Request) -> Engines | None:
    """Return the engines of the studio's runs; None if the page shows the models of `gptworks serve`."""
    engines: Engines | None = request.app.state.studio.engines
    return engines


@router.get("/studio/state")
async def state(request: Request) -> Response:
    """Return the page's tabs and the models."""
    return as_json(await in_thread(request, request.app.state.studio.describe))


@router.post("/studio/load")
async def load(request: Request) -> Response:
    """Load a model before a text is requested, if the memory limit allows this. Return whether the model is loaded."""
    body, engines = await body_of(request, Chosen), _engines_of(request)
    if engines is None:
        service_of(request).get(body.model)
        return JSONResponse({"loaded": True})
    wanted = await engines.find(body.model, body.checkpoint)
    return JSONResponse({"loaded": await engines.load_ahead(wanted, caller_of(request))})


@router.post("/studio/generate")
async def generate(request: Request) -> Response:
    """Generate a text and send it token by token, as events."""
    body, caller = await body_of(request, GenerateRequest), caller_of(request)
    service, engines = service_of(request), _engines_of(request)
    body.settings.sampling(SamplingSettings(), body.n_top)  # refuse invalid settings before a model is loaded
    source = await _source(request, body.template_of)
    begun: list[Generation] = []

    async def start(model: ServedModel) -> Generation:
        begun.append(await _begin(service, model, body, caller, source))
        return begun[0]

    def cancel() -> None:
        for generation in begun:
            generation.cancel()

    if engines is None:
        if body.checkpoint is not None:
            raise APIError(400, "checkpoint: a served model has one; leave it out.", param="checkpoint")
        generation = await start(service.get(body.model))
        return MessageEvents(_events(generation, body, None), cancel)
    wanted = await engines.find(body.model, body.checkpoint)
    step = wanted.checkpoint.step
    if engines.is_ready(wanted):
        generation = await start(await engines.take(wanted, caller))
        return MessageEvents(_events(generation, body, step), cancel)

    async def load() -> AsyncGenerator[list[Event]]:
        yield [{"type": "loading", "model": body.model, "checkpoint": step}]
        generation = await start(await engines.take(wanted, caller))
        async for events in _events(generation, body, step):
            yield events

    return MessageEvents(load(), cancel)


async def _source(request: Request, run: str | None) -> str | None:
    """Return the source of a run's chat template; None without a run."""
    if run is None:
        return None
    if _engines_of(request) is None:
        return service_of(request).get(run).chat_template.source
    tokenizer = (await in_thread(request, lambda: request.app.state.studio.library.get(run))).folder / "tokenizer"
    return await in_thread(request, lambda: read_text(tokenizer / TEMPLATE_FILE, MAX_TEMPLATE_BYTES, inside=tokenizer))


async def _begin(
    service: Service, model: ServedModel, body: GenerateRequest, caller: Caller, source: str | None
) -> Generation:
    """Submit a request's prompt to the engine and return the generation.

    Args:
        source: the chat template to use if the model has none.

    Raises:
        APIError, UserError, QueueFull: the request is rejected.
    """
    task, settings = caller.task(), body.settings.sampling(model.engine.defaults, body.n_top)
    if body.messages is not None or body.answers:
        template = await asyncio.get_running_loop().run_in_executor(service.threads, model.template, source)
        settings = settings.ending_at(template.end_token_ids)

    def read(_: None) -> Prompt:
        if body.messages is not None:
            return fitted_prompt(model, body.messages, settings.max_tokens, task, model.template(source))
        if body.tokens is not None:
            return Prompt(model.tokens.check(body.tokens, "tokens"))
        return Prompt(model.tokens.encode(body.prompt or "", "prompt"))

    order = Order(settings, prompt_logprobs=body.n_top if body.score_prompt else None, streams=True)
    return await begin(service, model, order, [None], read, caller)


async def _events(generation: Generation, body: GenerateRequest, step: int | None) -> AsyncGenerator[list[Event]]:
    model, (prompt,), request = generation.model, generation.prompts, generation.stream.requests[0]

    def start() -> Event:
        decoder = StreamDecoder(model.tokens.tokenizer)
        scores = request.prompt_logprobs or [None] * len(prompt.ids)
        tokens = [_token(model, i, decoder.push(i), score) for i, score in zip(prompt.ids, scores, strict=True)]
        seed, n_dropped = generation.order.settings.seed, prompt.n_dropped
        return {"type": "start", "seed": seed, "step": step, "dropped": n_dropped, "tokens": tokens}

    started = not body.score_prompt  # the prompt's scores come with the first generated token
    if started:
        yield [start()]
    pace = Pace()
    async for deltas in generation.deltas():
        events = [] if started else [start()]
        started = True
        for piece in (delta.piece for delta in deltas):
            pace.push(piece)
            if piece.token_id is not None:
                after = piece.processed and _scores(model, piece.processed)
                events.append(
                    {"type": "token", **_token(model, piece.token_id, piece.text, piece.logprob), "after": after}
                )
            if piece.finish_reason is not None:
                mean = max(generation.choices[0].mean_logprob, LEAST_LOGPROB) if pace.n_tokens else None
                events.append({
                    "type": "end", "reason": piece.finish_reason, "text": piece.text if piece.token_id is None else "",
                    "generated": pace.n_tokens, "seconds": time.monotonic() - generation.began,
                    "tokens_per_second": pace.tokens_per_second, "mean_logprob": mean,
                })  # fmt: skip
        yield events


def _token(model: ServedModel, token: int, text: str, score: TokenLogprob | None) -> Event:
    """Return a token as JSON for the page."""
    scores = {"logprob": None, "top": []} if score is None else _scores(model, score)
    rank = None if score is None else score.rank
    return {"id": token, "text": text, "spelling": model.tokens.spell(token)[0], "rank": rank, **scores}


def _scores(model: ServedModel, score: TokenLogprob) -> Event:
    """Return a token's log-probability and the most likely tokens, with finite numbers: JSON has no infinity."""
    top = [
        {"id": other, "spelling": model.tokens.spell(other)[0], "logprob": max(logprob, LEAST_LOGPROB)}
        for other, logprob in score.top
    ]
    return {"logprob": max(score.logprob, LEAST_LOGPROB), "top": top}
