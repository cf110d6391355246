"""Choose beginnings of held-out text for a model to continue, by a rule that does not depend on the model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.tokenizer import encode_text
from gptworks.units import counted

_ENDS = r"\n[ \t]*\n+", r"\n", r"[.!?]\s", r"\s"
"""Patterns for the ends of a paragraph, a line, a sentence and a word, in the order in which they are tried."""


@dataclass(frozen=True)
class Beginning:
    """A text to continue."""

    text: str
    token_ids: tuple[int, ...] | None
    """The tokens of a conversation up to an answer; None: the text is encoded like any prompt."""
    follows: str | None
    """The text that follows in the held-out data; None: the beginning is a prompt of the recipe."""

    @property
    def prompt(self) -> str | Sequence[int]:
        """The prompt for an engine."""
        return self.text if self.token_ids is None else self.token_ids


def rule(shards: TokenShards, n: int, most_tokens: int) -> str:
    """Return a description of the rule by which `beginnings` chooses."""
    if shards.manifest.holds_examples:
        return f"{counted(n, 'held-out conversation')} of {shards.n_documents:,}, evenly spaced, each up to an answer"
    if (long := _long_documents(shards, n, most_tokens)) is None:
        where = f"{counted(n, 'evenly spaced place')} in the held-out text, each from the next paragraph"
    else:
        documents = f"held-out documents of over {2 * most_tokens} tokens"
        where = f"{n} of {len(long):,} {documents}, evenly spaced, each from its start"
    return f"{where} to the last end of a paragraph (else line, sentence or word) within {most_tokens} tokens"


def beginnings(
    shards: TokenShards, tokenizer: Tokenizer, n: int, most_tokens: int, n_following: int = 0
) -> list[Beginning]:
    """Return at most `n` beginnings in the validation split, chosen as `rule` states. Equal data gives equal
    beginnings.

    Args:
        most_tokens: maximum number of tokens in a text's beginning; a conversation's beginning goes up to an answer.
        n_following: number of tokens in `Beginning.follows`; fewer where the document ends. For a text, `follows` may
            be longer.

    Raises:
        UserError: the split has too little text.
    """
    if shards.manifest.holds_examples:
        return _of_conversations(shards, tokenizer, n, n_following)
    long, found = _long_documents(shards, n, most_tokens), []
    inside = long is None
    for first in _middles(shards.n_tokens, n) if long is None else [long[i] for i in _middles(len(long), n)]:
        end = shards.document(shards.document_at(first))[1]
        window = shards.read(first, min((1 + inside) * most_tokens + n_following, end - first)).tolist()
        text = tokenizer.decode(window).rstrip("\ufffd")
        if inside:
            text = text[_next_start(text, len(tokenizer.decode(window[:most_tokens]))) :]
        text = text.lstrip("\n")
        head = tokenizer.decode(encode_text(tokenizer, text)[:most_tokens])
        cut = _last_end(head.rstrip("\ufffd"))
        found.append(Beginning(text[:cut], None, text[cut:]))
    if not any(one.text for one in found):
        raise UserError("the held-out text is too short for train.sample_held_out: set it to 0.")
    return list(dict.fromkeys(one for one in found if one.text))


def _long_documents(shards: TokenShards, n: int, most_tokens: int) -> list[int] | None:
    """Return the starts of the documents of more than 2 × `most_tokens` tokens. Return None if beginnings must lie
    inside documents: fewer than `n` documents are long, or the manifest does not state that the split holds whole
    documents."""
    made_from = shards.manifest.made_from
    settings = made_from.get("validation")
    stated = settings.get("by") if isinstance(settings, dict) else None
    long: list[int] = shards.document_starts()[np.diff(shards.document_bounds) > 2 * most_tokens].tolist()
    return None if len(long) < n or made_from.get("split_by", stated) != "document" else long


def _middles(total: int, n: int) -> list[int]:
    """Return the middle of each of n equal parts of the numbers from 0 to `total` - 1."""
    return [(2 * k + 1) * total // (2 * n) for k in range(n)]


def _next_start(text: str, most: int) -> int:
    """Return the index at which the next paragraph (else line, sentence or word) begins in the first `most` characters;
    0 if none begins there."""
    for end in _ENDS:
        if (match := re.compile(end).search(text, 0, most)) is not None:
            return match.end()
    return 0


def _last_end(text: str) -> int:
    """Return the index at which the last paragraph (else line, sentence or word) ends in the text's second half; the
    text's length if none ends there."""
    for end in _ENDS:
        ends = [match.end() for match in re.finditer(end, text) if match.end() > len(text) // 2]
        if ends:
            return ends[-1] if text[ends[-1] - 1] == "\n" else ends[-1] - 1  # the next token begins with the space
    return len(text)


def _of_conversations(shards: TokenShards, tokenizer: Tokenizer, n: int, n_following: int) -> list[Beginning]:
    found = []
    for place in _middles(shards.n_documents, min(n, shards.n_documents)):
        first, end = shards.document(place)
        learned = shards.read_learned(first, end - first)
        asked = int(learned.argmax()) if learned.any() else end - first
        ids = shards.read(first, end - first).tolist()
        follows = tokenizer.decode(ids[asked : asked + n_following])
        found.append(Beginning(tokenizer.decode(ids[:asked]), tuple(ids[:asked]), follows))
    return [one for one in found if one.token_ids]
