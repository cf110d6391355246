"""Split text into training and validation."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from gptworks.config import ValidationSplit
from gptworks.data.permutation import hashed
from gptworks.data.shards import Split
from gptworks.data.sources.base import Piece


def split_documents(
    pieces: Iterable[Piece], validation: ValidationSplit, opening: Callable[[], Piece] | None = None
) -> Iterator[tuple[Split, Piece]]:
    """Yield each piece with its split. The split depends only on a document's text, not on its position or neighbours.

    `validation.by` is "document" or "tail". With "document", the hash of a document's first piece decides. With "tail",
    the end of each document becomes a validation document, and the rest is a training document without a mark for its
    end. The piece in which the tail begins is yielded as two pieces.

    Args:
        opening: returns the first piece of the document inside which `pieces` begin. `opening` is called only with
            "document", and only if the first of `pieces` does not begin a document. None: `pieces` begin a document.
    """
    if validation.by == "tail":
        yield from _split_tails(pieces, validation.fraction)
        return
    split: Split | None = None
    for piece in pieces:
        if piece.starts_document:
            split = _split_of(piece, validation.fraction)
        elif split is None:
            assert opening is not None
            split = _split_of(opening(), validation.fraction)
        yield split, piece


def _split_of(opening: Piece, fraction: float) -> Split:
    return "validation" if hashed(opening.text.encode("utf-8")) < fraction * 2**64 else "train"


def _split_tails(pieces: Iterable[Piece], fraction: float) -> Iterator[tuple[Split, Piece]]:
    start_bytes, cut_bytes = 0, -1
    in_tail = False
    for piece in pieces:
        if piece.starts_document or cut_bytes < 0:
            start_bytes, cut_bytes = piece.before_bytes, int(piece.document_bytes * (1 - fraction))
            in_tail = start_bytes > cut_bytes
        text = piece.text.encode("utf-8")
        cut = max(cut_bytes - start_bytes, 0)
        while cut < len(text) and text[cut] & 0xC0 == 0x80:  # the cut is within a character: move the cut to its end
            cut += 1
        head, tail = text[:cut].decode("utf-8"), text[cut:].decode("utf-8")
        if head:
            yield "train", replace(piece, text=head, ends_document=piece.ends_document and not tail)
        if tail:
            yield "validation", replace(piece, text=tail, starts_document=not in_tail)
            in_tail = True
        start_bytes += len(text)
