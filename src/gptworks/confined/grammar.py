"""Grammars of constrained text: the same compilation here and, once it has proved cheap, in the parent."""

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

from gptworks.confined.child import Answer, resident_bytes, serve

Encode = Callable[[str], list[int]]

MAX_LEXER_STATES = 20_000
"""Of one text, 1 to 2 kB each."""


class Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of each token, and a text's tokens (for what it forces)."""

    def __init__(self, setup: dict[str, Any], encode: Encode | None) -> None:
        self.tokens = [token.encode("latin-1") for token in setup["tokens"]]
        self.bos_token_id, self.eos_token_id = setup["bos"], setup["eos"]
        self.special_token_ids = setup["special"]
        self._encode = encode or self._longest_first
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance tries, and then gives text
            raise TypeError("text is wanted")
        return self._encode(text)

    def _longest_first(self, text: str) -> list[int]:
        """As good as the tokenizer's own where the masks are only for a trial."""
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
    """llguidance's tokenizer, of tokens that spell text (latin-1), or of a SentencePiece tokenizer's JSON.

    Args:
        encode: the ids of a text; None: about right.
    """
    library = importlib.import_module("llguidance")
    if "json" in setup:
        return library.LLTokenizer(setup["json"], n_vocab=setup["n_tokens"], eos_token=setup["eos"])
    return library.LLTokenizer(library.TokenizerWrapper(Vocabulary(setup, encode)))


def compile_grammar(tokenizer: Any, grammar: str) -> Any:
    """A matcher at the beginning of a text. A copy of it has computed which tokens may come first.

    Raises:
        ValueError: llguidance cannot follow the grammar.
    """
    library = importlib.import_module("llguidance")
    limits = library.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    probe = matcher
    if not matcher.is_error():
        probe = matcher.deep_copy()
        probe.compute_bitmask()
    if probe.is_error():
        raise ValueError(_reason(probe.get_error()))
    return matcher


def _reason(error: str) -> str:
    """llguidance's word for what is wrong, in a line."""
    if "NoExtensionBias" in error:
        return "no text satisfies it"
    return " ".join(error.replace("<non-verbose/>", "").split())


def _prepare(setup: Any) -> Answer:
    with contextlib.suppress(OSError):
        os.nice(5)  # who generates text comes first
    tokenizer = read_tokenizer(setup)

    def answer(grammar: Any) -> int:
        """The resident bytes that the grammar takes."""
        before = resident_bytes()
        matcher = compile_grammar(tokenizer, grammar)
        n_bytes = max(0, resident_bytes() - before)
        del matcher
        return n_bytes

    return answer


def main() -> None:
    serve(_prepare)
