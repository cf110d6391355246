"""Routes of the Data tab: the documents that a run was trained on, the rows its model sees, and each step's batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from tokenizers import Tokenizer

from gptworks.data.rows import Row
from gptworks.data.spelling import MAX_PHRASE_BYTES, Speller
from gptworks.errors import UserError
from gptworks.interpret.hooks import Check, stoppable
from gptworks.interpret.text import TokenizedText, check_ids
from gptworks.model.gpt import GPT, eval_mode
from gptworks.model.loss import token_nats
from gptworks.runs.data import RunData
from gptworks.serve.app import body_of, caller_of
from gptworks.serve.wire import Wire
from gptworks.studio.answers import as_json
from gptworks.studio.library import printable
from gptworks.studio.play import Chosen, RunName
from gptworks.studio.read import MOST_CHARACTERS
from gptworks.studio.state import studio_of
from gptworks.tokenizer import load_tokenizer

router = APIRouter(prefix="/studio/data", include_in_schema=False)
Tree = dict[str, Any]

MOST_SHOWN = 4096
"""Maximum number of tokens that an answer shows, over all its rows."""
MOST_ROWS = 32
MOST_HELD = 1 << 22
"""Maximum number of tokens in the samples of an answer, shown or not. Each sample counts as a full context. One
sample is always allowed."""
MOST_HITS = 100
MOST_INDEXED = 1 << 25
"""Maximum bytes of text that a request indexes. This takes a few seconds."""
MOST_COUNTED = 1 << 29
"""Maximum number of tokens that a request counts."""
MOST_READ = 1 << 15
"""Maximum number of tokens of a row that a model reads to colour the row by loss."""

Place = Annotated[int, Field(ge=0, lt=2**53)]


class Page(Chosen):
    """A request for a part of a document or of each row: up to `n` tokens, starting at token `first`."""

    first: Place = 0
    n: Annotated[int, Field(ge=1, le=MOST_SHOWN)] = 1024


class DocumentRequest(Page):
    split: Literal["train", "validation"] = "train"
    document: Place = 0


class RowsRequest(Page):
    loss: bool = False
    """Whether to compute the checkpoint's loss on each token, by which the page colours the rows."""


class WindowRequest(RowsRequest):
    window: Place = 0
    epoch: Annotated[int, Field(ge=0, lt=2**31)] = 0


class StepRequest(RowsRequest):
    step: Annotated[int, Field(ge=1, lt=2**53)]
    sample: Place = 0
    """Index, in the step's batch, of the first sample to show."""
    n_samples: Annotated[int, Field(ge=1, le=MOST_ROWS)] = 8
    """Number of samples to show. Fewer are shown if samples are very long."""


class SearchRequest(Chosen):
    phrase: Annotated[str, Field(min_length=1, max_length=MAX_PHRASE_BYTES)]
    split: Literal["train", "validation"] = "train"
    most: Annotated[int, Field(ge=0, le=MOST_HITS)] = 20


class TokenizeRequest(Wire):
    models: Annotated[list[RunName], Field(min_length=1, max_length=2)]
    text: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]


_Body = TypeVar("_Body", bound=Chosen)
_Work = Callable[["Opened", _Body], Tree]


@dataclass(frozen=True)
class Opened:
    """The data and the model with which a request is answered."""

    data: RunData
    model: GPT | None
    """The checkpoint's model; None if the request does not ask for losses."""
    read_only: bool
    """Whether writing files is forbidden."""
    check: Check


def _answers(path: str, kind: type[_Body]) -> Callable[[_Work[_Body]], _Work[_Body]]:
    """Return a decorator that answers requests to `path` with the function's result and the checkpoint's step."""

    def add(work: _Work[_Body]) -> _Work[_Body]:
        @router.post(path)
        async def answer(request: Request) -> Response:
            studio, body = studio_of(request), await body_of(request, kind)
            wanted = await studio.engines.find(body.model, body.checkpoint)
            reads = isinstance(body, RowsRequest) and body.loss
            model = (await studio.engines.take(wanted, caller_of(request))).engine.model if reads else None

            def compute(check: Check) -> Tree:
                opened = Opened(studio.data.of(wanted), model, studio.read_only, check)
                return work(opened, body) | {"checkpoint": wanted.checkpoint.step}

            return as_json(await studio.reader.compute(compute))

        return work

    return add


@_answers("/about", Chosen)
def about(of: Opened, body: Chosen) -> Tree:
    """Return facts about a run's data, and the number of steps that the run has trained."""
    with of.data.checked():
        samples, splits = of.data.samples, of.data.prepared.manifest.splits
        return {
            "folder": printable(str(of.data.prepared.folder)),
            "splits": {
                name: {"n_documents": one.documents, "n_tokens": one.tokens, "text_bytes": one.text_bytes}
                for name, one in splits.items()
            },
            "objective": samples.recipe.objective.type, "context": samples.context_length,
            "n_windows": samples.n_items, "n_steps": of.data.steps_done,
        }  # fmt: skip


@_answers("/document", DocumentRequest)
def document(of: Opened, body: DocumentRequest) -> Tree:
    """Return a document's size, and up to `n` of its tokens from token `first` on; see `RunData.document`."""
    return {"first": body.first, **of.data.document(body.split, body.document, body.first, body.n, of.check)}


@_answers("/window", WindowRequest)
def window(of: Opened, body: WindowRequest) -> Tree:
    """Return a sample of the training data as rows that the model reads: a window, a row of conversations, a pair (two
    rows) or a prompt."""
    return _of_rows(of, body, of.data.rows(body.window, body.epoch))


@_answers("/step", StepRequest)
def step(of: Opened, body: StepRequest) -> Tree:
    """Return some or all samples of a step's batch."""
    n_samples = min(body.n_samples, max(1, MOST_HELD // of.data.samples.context_length))
    samples, shown = of.data.rows_of_step(body.step, body.sample, n_samples, of.check)
    about = [{"sample": one["sample"], "window": one["number"], "epoch": one["epoch"]} for one, _ in shown]
    found = _of_rows(of, body, [row for _, row in shown])
    found["rows"] = [row | where for row, where in zip(found["rows"], about, strict=True)]
    return found | {
        "step": body.step, "n_samples": samples.n_samples, "n_shown": about[-1]["sample"] + 1 - body.sample,
        "skipped": samples.skipped,
    }  # fmt: skip


@_answers("/search", SearchRequest)
def search(of: Opened, body: SearchRequest) -> Tree:
    """Find a phrase in a split. A small split is indexed first if needed, unless the studio is read-only; a large split
    must have an index already."""
    with of.data.checked():
        index, size = of.data.index(body.split), of.data.prepared.manifest.splits[body.split].text_bytes
        index.spelling.of_phrase(body.phrase)
        if index.missing:
            if of.read_only or size > MOST_INDEXED:
                raise UserError(
                    f"the {body.split} text of {of.data.id}, {size:,} bytes, has no index yet, which the studio makes "
                    f"of up to {MOST_INDEXED:,} bytes, unless it is read-only. Search it once with `gptworks data "
                    f"search`."
                )
            index.build(report=lambda done, total: of.check())
        found = index.find(body.phrase, body.most)
        return {"n": found.n, "n_tokens": index.n_tokens, "by_text": index.spelling.by_text, "hits": found.hits}


@_answers("/info", Chosen)
def info(of: Opened, body: Chosen) -> Tree:
    """Return figures about the data, as in `gptworks data info`."""
    n_tokens = sum(files.tokens for files in of.data.prepared.manifest.splits.values())
    if n_tokens > MOST_COUNTED:
        raise UserError(
            f"the data of {of.data.id} has {n_tokens:,} tokens, and the studio reads up to {MOST_COUNTED:,} for this. "
            f"Use `gptworks data info`."
        )
    found = of.data.info(lambda done, total: of.check())
    shown = ("amounts", "lengths", "duplicates", "held_out_in_training", "languages")
    return {name: getattr(found, name) for name in shown}


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Split a text into tokens with the tokenizer of each of the given runs."""
    studio, body = studio_of(request), await body_of(request, TokenizeRequest)

    def read(_: Check) -> Tree:
        folders = [studio.library.get(name).folder for name in body.models]
        return {"found": [_tokenized(load_tokenizer(folder / "tokenizer"), body.text) for folder in folders]}

    return as_json(await studio.reader.compute(read))


def _tokenized(tokenizer: Tokenizer, text: str) -> Tree:
    read, speller = TokenizedText.of_text(tokenizer, text), Speller(tokenizer)
    begun = int(read.framed)  # skip the first token if it is not from the text
    ids, n_bytes = read.ids[begun:].tolist(), len(text.encode("utf-8"))
    tokens = [
        {"id": token, "text": piece, "spelling": speller.spell(token)[0]}
        for token, piece in zip(ids, read.pieces[begun:], strict=True)
    ]
    return {"tokens": tokens, "n_tokens": len(ids), "n_bytes": n_bytes, "bytes_per_token": n_bytes / len(ids),
            "vocab_size": tokenizer.get_vocab_size(), "round_trips": read.predicted_bytes is not None}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- rows


def _of_rows(of: Opened, body: RowsRequest, rows: Sequence[Row]) -> Tree:
    """Return a part of each row as JSON, from token `first` on. If there is a model, add the tokens' losses."""
    n = min(body.n, MOST_SHOWN // len(rows))
    if body.first and all(body.first >= len(row.ids) for row in rows):
        raise UserError(
            f"token {body.first} is in no row: the longest has {max(len(row.ids) for row in rows)}, from 0."
        )
    costs = [None] * len(rows) if of.model is None else _nats(of.model, rows, body.first + n, of.check)
    shown = [of.data.shown(row, body.first, n, nats) for row, nats in zip(rows, costs, strict=True)]
    total = [nats for row in shown for token in row["tokens"] if (nats := token["nats"]) is not None]
    return {"first": body.first, "n": n, "rows": shown, "loss": sum(total) / len(total) if total else None}


def _nats(model: GPT, rows: Sequence[Row], end: int, check: Check) -> list[list[float | None]]:
    """Return each row's losses in nats, up to token `end`; None for later tokens and for tokens without a loss.

    Raises:
        UserError: a row is too long to read, or has a token that the model lacks.
    """
    n = [int(row.target_of[:end].max(initial=0)) + 1 for row in rows]
    if max(n) > MOST_READ:
        raise UserError(f"a row can be coloured up to its token {MOST_READ}: the model has to read all that is before.")
    for row in rows:
        check_ids(model, row.ids)
    found = []
    with stoppable(model, check), eval_mode(model), torch.inference_mode():
        for row, length in zip(rows, n, strict=True):
            inputs, targets, *positions = (
                x[None, :length].to(model.device) for x in (row.inputs, row.targets, row.positions) if x is not None
            )
            features = model.features(inputs, None, None, *positions)
            nats = token_nats(features, model.head_weight, targets, model.config.logit_softcap).double().cpu().numpy()
            costs = np.full(len(row.ids), math.nan)
            there = (row.target_of >= 0) & (row.target_of < length)
            costs[there] = nats[0][row.target_of[there]]
            found.append([one if math.isfinite(one) else None for one in costs.tolist()])
    return found
