"""Routes of the Read tab: a checkpoint's loss on each token of a text, and one token's causes, history and n-grams."""

import base64
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, Self

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from gptworks.checkpoint import load_run
from gptworks.data.shards import TokenShards
from gptworks.evaluation.loss import LossReport
from gptworks.interpret.attribution import attribute
from gptworks.interpret.checkpoints import chosen_steps, learned_at
from gptworks.interpret.hooks import Check
from gptworks.interpret.lens import Guess, logit_lens
from gptworks.interpret.ngrams import LONGEST, NGrams, find_ngrams
from gptworks.interpret.record import record
from gptworks.interpret.text import MOST_TOKENS, Costs, TokenizedText, along, segments
from gptworks.serve.app import body_of, caller_of
from gptworks.studio.answers import MessageEvents, as_json
from gptworks.studio.play import Chosen
from gptworks.studio.reading import Reading
from gptworks.studio.state import Studio, studio_of
from gptworks.tokenizer import StreamDecoder

router = APIRouter(prefix="/studio/read", include_in_schema=False)
Tree = dict[str, Any]

MOST_CHARACTERS = 100_000
NEIGHBOURS = 3
"""Number of tokens on each side of the chosen token that the logit lens shows."""
_SNIPPET_TOKENS = 24
"""Number of tokens shown on each side of an n-gram."""


class ReadRequest(Chosen):
    text: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)] | None = None
    document: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    """Index of a document in the validation split."""
    tokens: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=2, max_length=MOST_TOKENS)] | None
    ) = None
    """Token ids that a model generated, in place of their text, which a tokenizer might split in another way."""

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if sum(given is not None for given in (self.text, self.document, self.tokens)) != 1:
            raise ValueError("give one of text, document and tokens")
        return self


class TextRequest(ReadRequest):
    against: Chosen | None = None


class TokenRequest(ReadRequest):
    index: Annotated[int, Field(ge=1)]
    """Index of the chosen token in the text."""
    token: Annotated[int, Field(ge=0)] | None = None
    """Id of the token whose logit at `index` is attributed to the model's parts; null: the token in the text."""
    against: Annotated[int, Field(ge=0)] | None = None
    """Id of a token whose logit is subtracted from the logit of `token`, or null."""


class StepsRequest(ReadRequest):
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A token counts as learned at the first checkpoint from which on its probability stays at or above this value."""


async def reading_of(studio: Studio, request: Request, chosen: Chosen) -> Reading:
    """Load the checkpoint that a request names, and return it as a `Reading`."""
    wanted = await studio.engines.find(chosen.model, chosen.checkpoint)
    return Reading(wanted, await studio.engines.take(wanted, caller_of(request)), studio.data)


async def _answer(request: Request, chosen: Chosen, work: Callable[[Reading, Check], Tree]) -> Response:
    studio = studio_of(request)
    reading = await reading_of(studio, request, chosen)
    return as_json(await studio.reader.compute(lambda check: work(reading, check)))


@router.post("/documents")
async def documents(request: Request) -> Response:
    """Return the numbers of documents and tokens in a run's validation split."""

    def count(reading: Reading, _: Check) -> Tree:
        shards = reading.shards("validation")
        return {"n_documents": shards.n_documents, "n_tokens": shards.n_tokens}

    return await _answer(request, await body_of(request, Chosen), count)


@router.post("/text")
async def read_text(request: Request) -> Response:
    """Return a text's tokens and losses under one or two checkpoints. Two are also compared by segments of the text."""
    studio, body = studio_of(request), await body_of(request, TextRequest)
    reading = await reading_of(studio, request, body)
    other = None if body.against is None else await reading_of(studio, request, body.against)

    def read(check: Check) -> Tree:
        text = reading.text(body.text, body.document, body.tokens)
        nats = studio.reader.nats(reading, text, check)
        found = _of_text(reading, text, nats)
        if other is None:
            return found | {"other": None, "segments": None}
        same = other.same_text(text, reading)
        other_nats = studio.reader.nats(other, same, check)
        parts = segments(text, nats, same, other_nats)
        return found | {"other": _of_text(other, same, other_nats), "segments": [vars(part) for part in parts]}

    return as_json(await studio.reader.compute(read))


def _of_text(reading: Reading, text: TokenizedText, nats: Costs) -> Tree:
    report = LossReport(float(nats[1:].sum()), text.n_tokens - 1, text.predicted_bytes)
    tokens = [
        reading.spelled(token) | {"text": piece, "nats": cost}
        for token, piece, cost in zip(text.ids.tolist(), text.pieces, nats.tolist(), strict=True)
    ]
    parts = [
        {"first_token": one.first_token, "end_token": one.end_token, "bits_per_byte": one.bits_per_byte}
        for one in along(text, nats)
    ]
    return {
        "model": reading.wanted.run.id, "step": reading.wanted.checkpoint.step, "tokens": tokens, "along": parts,
        "loss": report.loss, "perplexity": report.perplexity, "bits_per_byte": report.bits_per_byte,
        "text_bytes": report.text_bytes, "n_tokens": report.n_tokens,
    }  # fmt: skip


@router.post("/token")
async def read_token(request: Request) -> Response:
    """Explain one token: return the attention, the logit lens, and the contribution of each model part to its logit."""
    body = await body_of(request, TokenRequest)

    def read(reading: Reading, check: Check) -> Tree:
        text, model = reading.text(body.text, body.document, body.tokens), reading.model.engine.model
        start, end = text.window(model.config.context_length, body.index)
        around = range(max(start + 1, body.index - NEIGHBOURS), min(end, body.index + NEIGHBOURS) + 1)
        found = record(model, text.ids[start:end], [i - 1 - start for i in around], check)
        row = body.index - around.start
        guesses = logit_lens(model, found, text.ids[around.start : around.stop].tolist())
        token = int(text.ids[body.index]) if body.token is None else body.token
        made = attribute(model, found, row, token, body.against)
        against = None if body.against is None else reading.spelled(body.against)
        return {
            "index": body.index, "first_read": start,
            "attention": _numbers(found.weights[:, :, row, : body.index - start]),
            "lens": {"tokens": list(around), "layers": [[_guess(reading, one) for one in layer] for layer in guesses]},
            "attribution": {
                "token": reading.spelled(token), "against": against, "parts": [vars(part) for part in made.parts],
                "logit": made.logit, "capped_logit": made.capped_logit,
            },
        }  # fmt: skip

    return await _answer(request, body, read)


def _guess(reading: Reading, guess: Guess) -> Tree:
    top = [reading.spelled(i) | {"probability": probability} for i, probability in guess.top]
    return {"top": top, "probability": guess.probability, "rank": guess.rank}


@router.post("/ngrams")
async def read_ngrams(request: Request) -> Response:
    """Count, in the training data, the n-grams that end in the chosen token; see `find_ngrams`. Return the counts, the
    most frequent tokens after the same context, and the first places of the longest n-gram found."""
    body = await body_of(request, TokenRequest)

    def read(reading: Reading, check: Check) -> Tree:
        text = reading.text(body.text, body.document, body.tokens)
        text.window(reading.model.engine.context, body.index)  # raises an error for an index outside of the text
        training = reading.shards("train")
        ids = text.ids[max(0, body.index + 1 - LONGEST) : body.index + 1].tolist()
        return _of_ngrams(reading, training, find_ngrams(training, ids, check=check))

    return await _answer(request, body, read)


def _of_ngrams(reading: Reading, training: TokenShards, found: NGrams) -> Tree:
    def decoded(first: int, end: int) -> str:
        decoder = StreamDecoder(reading.model.engine.tokenizer)
        return "".join([*map(decoder.push, training.read(first, end - first).tolist()), decoder.flush()])

    places = []
    for place in found.places:
        number = training.document_at(place)
        first, end = training.document(number)
        stop = place + found.longest
        places.append({
            "document": number, "token": place - first,
            "before": decoded(max(first, place - _SNIPPET_TOKENS), place), "found": decoded(place, stop),
            "after": decoded(stop, max(stop, min(end, stop + _SNIPPET_TOKENS))),
        })  # fmt: skip
    grams = [
        {"n": one.n, "contexts": one.n_contexts, "followed": one.n_followed,
         "next": [reading.spelled(i) | {"count": count} for i, count in one.next_tokens]}
        for one in found.by_length
    ]  # fmt: skip
    return {"by_length": grams, "longest": found.longest, "places": places, "searched_tokens": found.searched_tokens,
            "n_tokens": training.n_tokens}  # fmt: skip


@router.post("/checkpoints")
async def read_checkpoints(request: Request) -> Response:
    """Send a text's loss at a run's checkpoints (see `chosen_steps`), as events, and then the step at which each token
    was learned."""
    studio, body = studio_of(request), await body_of(request, StepsRequest)
    reading = await reading_of(studio, request, body)
    run = reading.wanted.run

    async def events() -> AsyncGenerator[Sequence[Tree]]:
        def choose(_: Check) -> tuple[TokenizedText, list[int]]:
            return reading.text(body.text, body.document, body.tokens), chosen_steps(run.folder)

        text, steps = await studio.reader.compute(choose)
        yield [{"type": "start", "steps": steps}]
        device, found = reading.model.engine.model.device, []
        for step in steps:

            def one(check: Check, step: int = step) -> Costs:
                run.choose(step)  # raises an error if the checkpoint was deleted
                run.check_inside()
                check()
                return text.token_nats(load_run(run.folder, str(step), device=device).model, check)

            found.append(await studio.reader.compute(one))
            loss = float(found[-1][1:].mean())
            yield [{"type": "checkpoint", "step": step, "nats": found[-1].tolist(), "loss": loss}]
        probabilities = np.exp(-np.stack(found)).T
        learned = [learned_at(steps, of_token.tolist(), body.threshold) for of_token in probabilities]
        yield [{"type": "end", "threshold": body.threshold, "learned": learned}]

    return MessageEvents(events(), lambda: None)


def _numbers(values: torch.Tensor) -> Tree:
    """Return a tensor's shape, and its numbers as little-endian float32 in base64."""
    data = values.float().cpu().contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(values.shape), "data": base64.b64encode(data).decode()}
