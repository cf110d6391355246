"""Constrain text to a JSON schema or a regular expression: llguidance finds the tokens that may come next.

The extra `constrain` installs llguidance, which can neither limit the time and memory of a compilation nor stop it.
Each grammar is therefore first compiled in a child process with limits (`gptworks.confined`), which dies if it exceeds
a limit. A grammar within the limits is compiled again in the engine's process, and kept for later requests while there
is room.
"""

import hashlib
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from torch import Tensor

from gptworks.confined import Confined, Exceeded, Limits, Refused, Task
from gptworks.confined.grammar import compile_grammar, read_tokenizer, reason_of
from gptworks.errors import UserError, importing, shortened
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.scheduler import QueueFull
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import encode_text, token_spellings, vocabulary_size

_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space in JSON, as in `json.dumps`. If any amount were allowed, a small model might write nothing else."""

COMPILE_LIMITS = Limits(seconds=2, n_bytes=1 << 27)
"""Limits for compiling one grammar."""
_START_LIMITS = Limits(seconds=60, n_bytes=1 << 31)
"""Limits for reading the tokenizer's vocabulary in the compiling process."""
MAX_LIVE_BYTES = 1 << 29
"""Memory limit of all grammars in use; a new grammar that would exceed it is refused with QueueFull."""
_MAX_KEPT_BYTES = 1 << 26
_MAX_KEPT = 64
"""Limits, in bytes and in number, of the grammars kept for later requests."""
_MAX_REFUSALS = 256
"""Maximum number of refused grammars that are remembered."""
_MASK_SECONDS = 1.0
_MASK_SECONDS_PER_TOKEN = 0.02
"""CPU seconds allowed for a text's masks: at its start, and added per token. All texts wait for each mask."""


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, for any number of texts."""

    matcher: Any
    n_tokens: int
    n_bytes: int


class Constraint:
    """Follows one text and finds the tokens that may continue it. V: size of the tokenizer's vocabulary."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar  # kept alive, so that `Constraints` counts its memory while the text uses it
        self._matcher, self._seconds_left = grammar.matcher.deep_copy(), _MASK_SECONDS

    def allowed(self) -> Tensor:
        """Return a mask of the tokens that may come next, bool [V], with end-of-text if the text may end here.

        Raises:
            UserError: no token may follow, or the computation exceeds a limit of llguidance or of this module.
        """
        began = time.thread_time()
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        mask = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: self._grammar.n_tokens].bool()
        if self._matcher.is_error() or not mask.any():
            reason = reason_of(self._matcher.get_error()) or "no token of this tokenizer may come next"
            raise UserError(f"the constraint failed: {reason.removesuffix('.')}. Use a simpler one.")
        self._seconds_left += _MASK_SECONDS_PER_TOKEN - (time.thread_time() - began)
        if self._seconds_left < 0:
            raise UserError("the constraint failed: finding the next tokens takes too long. Use a simpler one.")
        self._seconds_left = min(self._seconds_left, _MASK_SECONDS)
        return mask

    def push(self, token: int) -> bool:
        """Add a token; return whether the text is complete. Raises a UserError if the token is not allowed."""
        if not self._matcher.consume_token(token):
            raise UserError(f"the constraint failed: {reason_of(self._matcher.get_error())}")
        return bool(self._matcher.is_stopped())

    def accepts(self, tokens: list[int]) -> int:
        """Return the length of the longest prefix of `tokens` that the constraint allows next."""
        return int(self._matcher.validate_tokens(tokens))


class Constraints:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises a UserError without llguidance, or if a token's text depends on its neighbors in this tokenizer."""
        with importing("llguidance", "constrain", "a text with json_schema or regex"):
            import llguidance
        self._library: Any = llguidance
        self._n_tokens = vocabulary_size(tokenizer)
        setup = _setup(tokenizer, self._n_tokens)
        self._tokenizer = read_tokenizer(setup, lambda text: encode_text(tokenizer, text))
        self._children = Confined(
            "gptworks.confined.grammar", setup, COMPILE_LIMITS, setup_limits=_START_LIMITS, keep_bytes=1 << 22
        )
        self._lock = threading.Lock()
        self._live: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._refusals: OrderedDict[str, str] = OrderedDict()

    def grammar(self, settings: SamplingSettings, task: Task | None = None) -> Grammar:
        """Return the grammar for `json_schema` or `regex` in the settings; compile it if it is new.

        Args:
            task: lets another thread abandon the compilation.

        Raises:
            UserError: the schema or expression is invalid, or takes too much time or memory.
            QueueFull: the grammars in use have reached their memory limit.
            Abandoned: the task was abandoned.
        """
        source = self._source(settings)
        if (known := self.find(settings, source)) is not None:
            return known
        try:
            return self._compile(source, task)
        except (Refused, ValueError) as error:
            refusal = str(error)
        except Exceeded as error:
            refusal = f"{error} Use a simpler one."
        with self._lock:
            self._refusals[_key(source)] = refusal
            if len(self._refusals) > _MAX_REFUSALS:
                self._refusals.popitem(last=False)
        raise _unfollowable(settings, refusal)

    def find(self, settings: SamplingSettings, source: str | None = None) -> Grammar | None:
        """Return the settings' grammar if it is compiled already, else None. Raises a UserError if it was refused."""
        key = _key(self._source(settings) if source is None else source)
        with self._lock:
            grammar, refusal = self._live.get(key), self._refusals.get(key)
        if refusal is not None:
            raise _unfollowable(settings, refusal)
        return grammar

    def close(self) -> None:
        """End the processes that compile grammars."""
        self._children.close()

    def _compile(self, source: str, task: Task | None) -> Grammar:
        n_bytes: int = self._children.ask(source, task)
        with self._lock:
            if sum(grammar.n_bytes for grammar in self._live.values()) + n_bytes > MAX_LIVE_BYTES:
                raise QueueFull("the schemas in use take all the memory that they may: try again later.")
        grammar = Grammar(compile_grammar(self._tokenizer, source), self._n_tokens, n_bytes)
        with self._lock:
            self._live[_key(source)] = self._kept[_key(source)] = grammar
            while len(self._kept) > _MAX_KEPT or sum(one.n_bytes for one in self._kept.values()) > _MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return grammar

    def _source(self, settings: SamplingSettings) -> str:
        """Return the settings' schema or expression in llguidance's format."""
        matcher = self._library.LLMatcher
        if settings.regex is not None:
            source: str = matcher.grammar_from_regex(settings.regex)
            return source
        schema = settings.json_schema
        try:
            tree = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(tree, Mapping | bool):
                raise ValueError("a schema is an object")
            source = matcher.grammar_from_json_schema(json.dumps(tree), defaults=_SPACING)
        except RecursionError:
            raise UserError(f"json_schema={shortened(repr(schema), 200)} is nested too deeply.") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"json_schema={shortened(repr(schema), 200)} is not a JSON schema: {error}.") from None
        return source


def _setup(tokenizer: Tokenizer, n_tokens: int) -> dict[str, Any]:
    """Return the tokenizer in the form that `read_tokenizer` takes, with an added end-of-text token if it has none.

    Raises:
        UserError: a token's text depends on its neighbors in this tokenizer.
    """
    special, spellings = special_tokens(tokenizer), token_spellings(tokenizer)
    if spellings is not None:
        added = tokenizer.get_added_tokens_decoder()
        tokens = [token.decode("latin-1") for token in spellings]
        eos = n_tokens if special.end is None else special.end
        return {
            "tokens": tokens if special.end is not None else [*tokens, "<end>"],
            "bos": special.bos,
            "eos": eos,
            "special": [eos, *(index for index, token in added.items() if token.special)],
        }
    if isinstance(tokenizer.decoder, decoders.Sequence) and special.end is not None:  # made by SentencePiece
        return {"json": tokenizer.to_str(), "n_tokens": n_tokens, "eos": special.end}
    raise UserError(
        "json_schema and regex need a tokenizer whose tokens spell text by themselves (bpe, char, gpt2), "
        "not words that are joined by spaces."
    )


def _key(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _unfollowable(settings: SamplingSettings, reason: str) -> UserError:
    name = "json_schema" if settings.regex is None else "regex"
    return UserError(f"{name}={shortened(repr(getattr(settings, name)), 200)} cannot be followed: {reason}")
