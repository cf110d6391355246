"""Data: the documents that a run was trained on, what the model sees of them, and what each step took."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from tokenizers import Tokenizer

from gptworks.data.rows import Row
from gptworks.errors import UserError
from gptworks.evaluate.loss import BATCH_TOKENS
from gptworks.interpret.hooks import Check, stoppable
from gptworks.interpret.text import Costs, TokenizedText, check_ids
from gptworks.model import GPT
from gptworks.model.backend import eval_mode
from gptworks.model.loss import token_nats
from gptworks.serve import openai
from gptworks.serve.app import body_of, caller_of
from gptworks.studio.play import Chosen
from gptworks.studio.read import MOST_CHARACTERS, finite
from gptworks.studio.run_data import BEFORE, RunData, speller
from gptworks.studio.state import studio_of, uncached
from gptworks.tokenizer import StreamDecoder, load_tokenizer

router = APIRouter(prefix="/studio/data", include_in_schema=False)
Tree = dict[str, Any]

MOST_SHOWN = 4096
"""Tokens of a page, over all its rows."""
MOST_ROWS = 32
MOST_HELD = 1 << 22
"""Tokens of all rows of a page, also of the parts that it does not show."""
MOST_READ = 1 << 15
"""Tokens of a row that a model reads to colour it."""

Place = Annotated[int, Field(ge=0, lt=2**53)]


class Page(Chosen):
    """A part of what is long: the tokens of each row from `first` on."""

    first: Place = 0
    n: Annotated[int, Field(ge=1, le=MOST_SHOWN)] = 1024


class DocumentRequest(Page):
    split: Literal["train", "validation"] = "train"
    document: Place = 0


class RowsRequest(Page):
    loss: bool = False
    """Whether the checkpoint reads the rows, so that they can be coloured by what their tokens cost it."""


class WindowRequest(RowsRequest):
    window: Place = 0
    epoch: Annotated[int, Field(ge=0, lt=2**31)] = 0


class StepRequest(RowsRequest):
    step: Annotated[int, Field(ge=1, lt=2**53)]
    sample: Place = 0
    """Of the step's samples, the first that is shown."""
    n_samples: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 8
    """Fewer are shown where they are very long."""


class TokenizeRequest(openai.Wire):
    models: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=2)]
    text: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]


@router.post("/about")
async def about(request: Request) -> Response:
    """What there is of a run's data, and how far the run has come."""
    body = await body_of(request, Chosen)

    def describe(data: RunData, _: GPT | None, check: Check) -> Tree:
        with data.checked():
            objective, splits = data.objective, data.prepared.manifest.splits
            return {
                "folder": str(data.prepared.folder).encode("utf-8", "backslashreplace").decode(),
                "splits": {
                    name: {"n_documents": one.documents, "n_tokens": one.tokens, "text_bytes": one.text_bytes}
                    for name, one in splits.items()
                },
                "objective": data.recipe.objective.type, "context": objective.context_length,
                "n_windows": objective.n_items, "n_steps": data.steps_done,
            }  # fmt: skip

    return await _answer(request, body, describe)


@router.post("/document")
async def document(request: Request) -> Response:
    """A part of a document."""
    body = await body_of(request, DocumentRequest)

    def read(data: RunData, model: GPT | None, check: Check) -> Tree:
        found = data.document(body.split, body.document, body.first, body.n, check)
        pieces = _pieces(data.prepared.tokenizer, found.before.tolist(), found.ids.tolist())
        learned = itertools.repeat(None) if found.learned is None else found.learned.tolist()
        tokens = [
            {"id": token, "text": piece, "spelling": data.spell(token), "learned": counts}
            for token, piece, counts in zip(found.ids.tolist(), pieces, learned, strict=False)
        ]
        return {"first": body.first, "tokens": tokens, "n_tokens": found.n_tokens, "n_bytes": found.n_bytes}

    return await _answer(request, body, read)


@router.post("/window")
async def window(request: Request) -> Response:
    """A window of the training data: what the model sees at once."""
    body = await body_of(request, WindowRequest)

    def read(data: RunData, model: GPT | None, check: Check) -> Tree:
        return _of_rows(data, body, data.rows(body.window, body.epoch), model, check)

    return await _answer(request, body, read, body.loss)


@router.post("/step")
async def step(request: Request) -> Response:
    """The batch that a step trained on, or some samples of it."""
    body = await body_of(request, StepRequest)

    def read(data: RunData, model: GPT | None, check: Check) -> Tree:
        samples = data.step(body.step)
        if body.sample >= samples.n_samples:
            raise UserError(f"sample {body.sample} is not in the batch, which has {samples.n_samples}, from 0.")
        rows: list[Row] = []
        about: list[Tree] = []
        n_samples = min(body.n_samples, max(1, MOST_HELD // data.objective.context_length))
        for sample in range(body.sample, min(body.sample + n_samples, samples.n_samples)):
            check()
            epoch, number = data.objective.item(samples.position + sample)
            here = data.rows(number, epoch)
            rows += here
            about += [{"sample": sample, "window": number, "epoch": epoch}] * len(here)
        found = _of_rows(data, body, rows, model, check)
        found["rows"] = [row | where for row, where in zip(found["rows"], about, strict=True)]
        return found | {
            "step": body.step, "n_samples": samples.n_samples, "n_shown": about[-1]["sample"] + 1 - body.sample,
            "skipped": samples.skipped,
        }  # fmt: skip

    return await _answer(request, body, read, body.loss)


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """A text as the tokenizers of runs cut it."""
    studio, body = studio_of(request), await body_of(request, TokenizeRequest)

    def read(_: Check) -> Tree:
        assert studio.library is not None
        folders = [studio.library.get(name).folder for name in body.models]
        return {"found": [_tokenized(load_tokenizer(folder / "tokenizer"), body.text) for folder in folders]}

    return uncached(await studio.reader.compute(read))


def _tokenized(tokenizer: Tokenizer, text: str) -> Tree:
    read, spell = TokenizedText.of_text(tokenizer, text), speller(tokenizer)
    begun = int(read.framed)  # by a token that is not of the text
    ids, n_bytes = read.ids[begun:].tolist(), len(text.encode("utf-8"))
    tokens = [
        {"id": token, "text": piece, "spelling": spell(token)}
        for token, piece in zip(ids, read.pieces[begun:], strict=True)
    ]
    return {"tokens": tokens, "n_tokens": len(ids), "n_bytes": n_bytes, "bytes_per_token": n_bytes / len(ids),
            "vocab_size": tokenizer.get_vocab_size(), "round_trips": read.predicted_bytes is not None}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- rows


def _of_rows(data: RunData, body: RowsRequest, rows: Sequence[Row], model: GPT | None, check: Check) -> Tree:
    """The rows, each from its token `first` on; with a model, what the tokens cost it."""
    n = min(body.n, MOST_SHOWN // len(rows))
    if body.first and all(body.first >= len(row.ids) for row in rows):
        raise UserError(
            f"token {body.first} is in no row: the longest has {max(len(row.ids) for row in rows)}, from 0."
        )
    costs = [None] * len(rows) if model is None else _nats(model, rows, body.first + n, check)
    shown = [_of_row(data, row, body.first, n, nats) for row, nats in zip(rows, costs, strict=True)]
    total = [nats for row in shown for token in row["tokens"] if (nats := token["nats"]) is not None]
    return {"first": body.first, "n": n, "rows": shown, "loss": sum(total) / len(total) if total else None}


def _of_row(data: RunData, row: Row, first: int, n: int, nats: Costs | None) -> Tree:
    ids = row.ids[first : first + n].tolist()
    pieces = _pieces(data.prepared.tokenizer, row.ids[max(0, first - BEFORE) : first].tolist(), ids)
    begins = {one.at: {"document": one.document, "first": one.first, "alone": one.begins_text} for one in row.pieces}
    learned = row.learned
    tokens = [
        {"id": token, "text": piece, "spelling": data.spell(token), "learned": bool(learned[i]),
         "nats": finite(float(nats[i])) if nats is not None and learned[i] else None, "begins": begins.get(i)}
        for i, (token, piece) in enumerate(zip(ids, pieces, strict=True), first)
    ]  # fmt: skip
    return {"answer": row.answer, "n_tokens": len(row.ids), "n_learned": int(learned.sum()), "padding": row.padding,
            "documents": len(row.pieces), "tokens": tokens}  # fmt: skip


def _nats(model: GPT, rows: Sequence[Row], end: int, check: Check) -> list[Costs]:
    """What each token of the rows costs, as far as the page shows it; those before it are read too.

    Raises:
        UserError: the model cannot read them.
    """
    n = [int(row.target_of[:end].max(initial=0)) + 1 for row in rows]
    if max(n) > MOST_READ:
        raise UserError(f"a row can be coloured up to its token {MOST_READ}: the model has to read all that is before.")
    for row in rows:
        check_ids(model, row.ids)
    found: list[Costs] = []
    with stoppable(model, check), eval_mode(model), torch.inference_mode():
        for lot in _lots(rows, n):
            check()
            length = max(n[i] for i in lot)
            parts = ([rows[i].inputs, rows[i].targets, rows[i].positions] for i in lot)
            inputs, targets, *positions = (
                torch.stack([x[:length] for x in of]).to(model.device)
                for of in zip(*parts, strict=True)
                if of[0] is not None
            )
            features = model.features(inputs, None, None, *positions)
            nats = token_nats(features, model.head_weight, targets, model.config.logit_softcap).double().cpu().numpy()
            for i, of_row in zip(lot, nats, strict=True):
                costs = np.full(len(rows[i].ids), math.nan)
                there = (rows[i].target_of >= 0) & (rows[i].target_of < length)
                costs[there] = of_row[rows[i].target_of[there]]
                found.append(costs)
    return found


def _lots(rows: Sequence[Row], n: Sequence[int]) -> list[list[int]]:
    """Neighbouring rows that are read together."""
    lots: list[list[int]] = []
    for i in range(len(rows)):
        alike = bool(lots) and len(rows[lots[-1][0]].inputs) == len(rows[i].inputs)
        if alike and (len(lots[-1]) + 1) * max(n[i], *(n[k] for k in lots[-1])) <= BATCH_TOKENS:
            lots[-1].append(i)
        else:
            lots.append([i])
    return lots


# ----------------------------------------------------------------------------------------------------- answers


async def _answer(
    request: Request, body: Chosen, work: Callable[[RunData, GPT | None, Check], Tree], loss: bool = False
) -> Response:
    """What work makes of the run's data, and of the checkpoint's model where `loss` asks for it."""
    studio = studio_of(request)
    assert studio.engines is not None
    wanted = await studio.engines.find(body.model, body.checkpoint)
    model = (await studio.engines.take(wanted, caller_of(request))).engine.model if loss else None

    def compute(check: Check) -> Tree:
        return work(studio.data.of(wanted), model, check) | {"checkpoint": wanted.checkpoint.step}

    return uncached(await studio.reader.compute(compute))


def _pieces(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> list[str]:
    """What each token adds to the text; empty within a character."""
    stream = StreamDecoder(tokenizer)
    for token in before:
        stream.push(token)
    return [stream.push(token) for token in ids]
