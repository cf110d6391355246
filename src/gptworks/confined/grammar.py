"""Compile grammars for constrained text in a child first. The parent compiles only grammars that were cheap there."""

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

from gptworks.confined.child import Answer, resident_bytes, serve
from gptworks.errors import shortened

Encode = Callable[[str], list[int]]

MAX_LEXER_STATES = 20_000
"""Maximum number of lexer states for one text. Each state takes 1 to 2 kB."""
MAX_REASON = 300
"""Maximum number of characters shown of llguidance's error, which may repeat a whole pattern."""


class Vocabulary:
    """A tokenizer for llguidance: it has the bytes of each token, and a call returns the token ids of a text."""

    def __init__(self, setup: dict[str, Any], encode: Encode | None) -> None:
        self.tokens = [token.encode("latin-1") for token in setup["tokens"]]
        self.bos_token_id, self.eos_token_id = setup["bos"], setup["eos"]
        self.special_token_ids = setup["special"]
        self._encode = encode or self._longest_first
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance tries bytes first, then text
            raise TypeError("not a text")
        return self._encode(text)

    def _longest_first(self, text: str) -> list[int]:
        """Return a text's ids by greedy longest match. These ids are inexact, but suffice to try out a grammar."""
        data, at, ids = text.encode(), 0, []
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                if (token := self._ids.get(data[at:end])) is not None:
                    ids.append(token)
                    break
            else:
                end = at + 1
            at = end
        return ids


def read_tokenizer(setup: dict[str, Any], encode: Encode | None = None) -> Any:
    """Make llguidance's tokenizer from the tokens' bytes (as latin-1) or from a SentencePiece tokenizer's JSON.
    `encode` returns the ids of a text; None: approximate them by greedy longest match."""
    library = importlib.import_module("llguidance")
    if "json" in setup:
        return library.LLTokenizer(setup["json"], n_vocab=setup["n_tokens"], eos_token=setup["eos"])
    return library.LLTokenizer(library.TokenizerWrapper(Vocabulary(setup, encode)))


def compile_grammar(tokenizer: Any, grammar: str) -> Any:
    """Return a matcher at the start of a text. To find errors, a copy of the matcher computes its first mask. Raises
    ValueError if llguidance does not accept the grammar."""
    library = importlib.import_module("llguidance")
    limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    probe = matcher
    if not matcher.is_error():
        probe = matcher.deep_copy()
        probe.compute_bitmask()
    if probe.is_error():
        raise ValueError(reason_of(probe.get_error()))
    return matcher


def reason_of(error: str) -> str:
    """Return llguidance's error as one short line."""
    if "NoExtensionBias" in error:
        return "no text satisfies it"
    if "Unable to determine if regex is empty" in error:
        return "too many patterns must hold at once. Write fewer of them, or one that says the same"
    return shortened(" ".join(error.replace("<non-verbose/>", "").split()), MAX_REASON)


def _prepare(setup: Any) -> Answer:
    with contextlib.suppress(OSError, AttributeError):  # Windows has no priorities of this kind
        os.nice(5)  # give generation, in other processes, priority
    tokenizer = read_tokenizer(setup)

    def answer(grammar: Any) -> int:
        """Return the resident bytes that the compiled grammar takes."""
        before = resident_bytes()
        matcher = compile_grammar(tokenizer, grammar)
        n_bytes = max(0, resident_bytes() - before)
        del matcher
        return n_bytes

    return answer


def main() -> None:
    serve(_prepare)
