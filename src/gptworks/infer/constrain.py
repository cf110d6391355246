"""Text that follows a JSON schema or a regular expression: which tokens may come next, by llguidance.

The extra `constrain` holds the library: `pip install gptworks[constrain]`.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from torch import Tensor

from gptworks.errors import UserError
from gptworks.infer.sampling import SamplingSettings
from gptworks.tokenizer import BYTE_CHARACTERS, special_tokens, vocabulary_size

_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes it. Where any white space may stand, a small model may write nothing else."""

_MAX_LEXER_STATES = 50_000
"""Of one text, 1 to 2 kB each; other bounds are llguidance's own, some 20 ms for a token at most."""


class Constraint:
    """What one text may go on with. Tokens are those of the tokenizer, V of them."""

    def __init__(self, matcher: Any, n_tokens: int, end_of_text: int | None) -> None:
        self._matcher, self._n_tokens, self._end_of_text = matcher, n_tokens, end_of_text

    def allowed(self) -> Tensor:
        """Which tokens may come next, bool [V]; the end-of-text token where the text may end here.

        Raises:
            UserError: none may, or telling takes more work than llguidance grants.
        """
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        mask = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: self._n_tokens].bool()
        if self._matcher.is_error() or not mask.any():
            reason = " ".join(self._matcher.get_error().split()) or "no token of this tokenizer may come next."
            raise UserError(f"the constraint cannot go on: {reason}")
        return mask

    def push(self, token: int) -> bool:
        """Take a token; whether the text is complete, so that nothing can follow."""
        if not self._matcher.consume_token(token):
            raise UserError(f"the constraint cannot go on: {self._matcher.get_error()}")
        return bool(self._matcher.is_stopped())

    def accepts(self, tokens: list[int]) -> int:
        """How many of these tokens may follow, one after another."""
        n: int = self._matcher.validate_tokens(tokens)
        return n


class Constraints:
    """Makes constraints for one tokenizer, whose tokens it reads once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            UserError: llguidance is not installed, or the tokens do not spell text by themselves.
        """
        try:
            import llguidance
        except ImportError:
            raise UserError(
                "json_schema and regex need the library llguidance: pip install 'gptworks[constrain]'."
            ) from None
        self._library = llguidance
        self._end_of_text = special_tokens(tokenizer).eos
        self._n_tokens = vocabulary_size(tokenizer)
        self._tokenizer = self._read(tokenizer)

    def _read(self, tokenizer: Tokenizer) -> Any:
        spellings = token_spellings(tokenizer)
        if spellings is not None:
            wrapper = self._library.TokenizerWrapper(_Vocabulary(tokenizer, spellings))
            return self._library.LLTokenizer(wrapper)
        if isinstance(tokenizer.decoder, decoders.Sequence) and self._end_of_text is not None:  # SentencePiece
            return self._library.LLTokenizer(tokenizer.to_str(), n_vocab=self._n_tokens, eos_token=self._end_of_text)
        raise UserError(
            "json_schema and regex need a tokenizer whose tokens spell text by themselves (bpe, char, gpt2), "
            "not words that are joined by spaces."
        )

    def of(self, settings: SamplingSettings) -> Constraint:
        """The constraint that the settings ask for.

        Raises:
            UserError: no such schema or expression.
        """
        limits = self._library.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = self._library.LLMatcher(self._tokenizer, self._grammar(settings), log_level=0, limits=limits)
        name = "regex" if settings.regex is not None else "json_schema"
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise UserError(f"{name}={getattr(settings, name)!r} cannot be followed: {reason}")
        return Constraint(matcher, self._n_tokens, self._end_of_text)

    def _grammar(self, settings: SamplingSettings) -> str:
        matcher = self._library.LLMatcher
        if settings.regex is not None:
            grammar: str = matcher.grammar_from_regex(settings.regex)
            return grammar
        schema = settings.json_schema
        try:
            tree = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(tree, Mapping | bool):
                raise ValueError("a schema is an object")
            grammar = matcher.grammar_from_json_schema(json.dumps(tree), defaults=_SPACING)
        except ValueError as error:
            raise UserError(f"json_schema={schema!r} is no JSON schema: {error}.") from None
        return grammar


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of each token. Without an end-of-text token, one is made up."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        special, n_tokens = special_tokens(tokenizer), len(tokens)
        self.tokens = tokens if special.eos is not None else [*tokens, b"<end>"]
        self.bos_token_id = special.bos
        self.eos_token_id = n_tokens if special.eos is None else special.eos
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = [self.eos_token_id, *(index for index, token in added.items() if token.special)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def token_spellings(tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes of each token; None where they depend on the token's neighbours."""
    names = {index: name for name, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    in_order = [names.get(index, "") for index in range(vocabulary_size(tokenizer))]
    if isinstance(tokenizer.decoder, decoders.Fuse):
        return [name.encode() for name in in_order]
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    added = tokenizer.get_added_tokens_decoder()
    byte_of = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    return [
        name.encode() if index in added else bytes(byte_of[character] for character in name)
        for index, name in enumerate(in_order)
    ]
