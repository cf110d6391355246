"""Divide a recipe's text before a campaign: one part for all tries, and one that stays sealed until the end."""

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gptworks.config import Recipe, ValidationSplit
from gptworks.data.sources.base import Piece
from gptworks.data.sources.choose import check_sources, count_documents, iter_documents
from gptworks.data.split import split_documents
from gptworks.errors import UserError
from gptworks.evaluation.evaluated_run import EvaluatedRun
from gptworks.evaluation.text import evaluate_text
from gptworks.files import open_new, open_regular

TEXTS, SEALED = "texts", "sealed.jsonl"

_DOCUMENTS_WORTH_A_CHOICE = 20
MOST_SEALED_CHARACTERS = 1 << 20
"""Maximum number of sealed characters on which `sealed_loss` evaluates a run."""


def seal(recipe: Recipe, folder: Path, secret: Path, key: bytes) -> dict[str, Any]:
    """Write one part of the text of a recipe's sources to `texts/` in `folder`, and the sealed part to `secret`. Return
    the settings of the source that replaces the recipe's sources.

    The sealed share is `data.validation.fraction`. With 20 documents or more, whole documents are sealed, chosen by a
    keyed hash of their text. With fewer, the end of each document is sealed.

    Raises:
        UserError: the recipe does not train on text of its own sources, or there is too little text.
    """
    sources = recipe.data.texts
    if recipe.objective.type != "next_token" or not sources or recipe.data.mixture:
        raise UserError(
            f"the judge needs a recipe that predicts text of data.sources, since it seals a part of that text: this "
            f"one has objective.type={recipe.objective.type} and "
            + ("a data.mixture." if recipe.data.mixture else "other sources.")
        )
    check_sources(sources)
    texts, fraction = folder / TEXTS, recipe.data.validation.fraction
    texts.mkdir()
    with open_new(secret / SEALED, inside=secret, private=True) as sealed:

        def keep(text: str) -> int:
            return sealed.write(json.dumps({"text": text}).encode("ascii") + b"\n")

        if count_documents(sources, _DOCUMENTS_WORTH_A_CHOICE) == _DOCUMENTS_WORTH_A_CHOICE:
            n_kept = _seal_documents(lambda: _documents(iter_documents(sources)), texts, keep, fraction, key)
            source = {"type": "jsonl", "path": str(texts)}
        else:
            n_kept = _seal_ends(iter_documents(sources), texts, keep, fraction)
            source = {"type": "text", "path": str(texts)}
    if not n_kept:
        raise UserError("there is too little text to seal a part of it: give the recipe more text.")
    return source


def _seal_documents(documents: Any, texts: Path, keep: Any, fraction: float, key: bytes) -> int:
    hashes = sorted(_keyed(key, text) for text in documents())
    last = hashes[max(1, round(fraction * len(hashes))) - 1]
    n_kept = 0
    with open_new(texts / "texts.jsonl", inside=texts) as file:
        for text in documents():
            if _keyed(key, text) <= last:
                n_kept += keep(text)
            else:
                file.write(json.dumps({"text": text}).encode("ascii") + b"\n")
    return n_kept


def _seal_ends(pieces: Iterable[Piece], texts: Path, keep: Any, fraction: float) -> int:
    number, n_kept, file = -1, 0, None
    try:
        for split, piece in split_documents(pieces, ValidationSplit(fraction=fraction, by="tail")):
            if split == "validation":
                n_kept += keep(piece.text)
                continue
            if piece.starts_document or file is None:
                number += 1
                if file is not None:
                    file.close()
                file = open_new(texts / f"{number:04d}.txt", inside=texts)
            file.write(piece.text.encode("utf-8"))
    finally:
        if file is not None:
            file.close()
    return n_kept


def _keyed(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode("utf-8"), hashlib.sha256).digest()


def _documents(pieces: Iterable[Piece]) -> Iterator[str]:
    held: list[str] = []
    for piece in pieces:
        if piece.starts_document and held:
            yield "".join(held)
            held = []
        held.append(piece.text)
    if held:
        yield "".join(held)


def sealed_loss(run_dir: Path, secret: Path) -> float:
    """Return the loss of a run's last checkpoint on at most the first `MOST_SEALED_CHARACTERS` of the sealed text, in
    nats per token."""
    run, nats, n_tokens, left = EvaluatedRun(run_dir, "last"), 0.0, 0, MOST_SEALED_CHARACTERS
    with open_regular(secret / SEALED, inside=secret) as file:
        for line in file:
            text = str(json.loads(line)["text"])[:left]
            left -= len(text)
            if text:
                with run.precision.autocast():
                    report = evaluate_text(run.model, run.tokenizer, text).report
                nats, n_tokens = nats + report.loss * report.n_tokens, n_tokens + report.n_tokens
    return nats / n_tokens
