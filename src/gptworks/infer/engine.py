"""The inference engine: a prompt goes in, text comes out as it is made.

    prompt ─► ids ─► prefill (in chunks) ─► cache × samples ─► sample a token ─┬─► decode ─► hold back stops ─► text
                                                ▲                              │
                                                └────────── feed it ◄──────────┘

The prompt and its continuation together may fill the context. When it is full, a request ends (`overflow="error"`), or
its window restarts (`overflow="slide"`): the last half of the context is computed anew, from position 0, into an empty
cache. Learned positions so stay those the model was trained with, and each token is computed about twice.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.checkpoint import Report, load_run
from gptworks.device import choose_device
from gptworks.errors import UserError
from gptworks.infer.sampling import SamplingSettings, sample
from gptworks.model import GPT, KVCache
from gptworks.tokenizer import StreamDecoder, load_tokenizer, prompt_ids, special_tokens, vocabulary_size

FinishReason = Literal["stop", "length", "context"]
"""stop: the end-of-text token or a stop string. length: max_tokens. context: the context is full."""

Overflow = Literal["error", "slide"]

PREFILL_TOKENS = 512
"""Prompt tokens computed at once: bounds the memory of a long prompt's activations."""

_DECODER_CONTEXT_TOKENS = 16
"""Prompt tokens the decoder sees: what a token reads as may depend on the one before it (a joining space)."""


@dataclass(frozen=True)
class Piece:
    """One step of one sample. The last piece of a sample, and no other, has a `finish_reason`."""

    sample: int
    """Index of the sample within its request."""
    text: str
    """Text that is now certain; often empty: an unfinished character, or what may become a stop string."""
    token_id: int | None
    """The token generated; None where the step ends the sample without one (end-of-text, a full context)."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """One finished sample."""

    text: str
    """What follows the prompt, up to and without the stop string."""
    token_ids: list[int]
    """Every token generated, those of a stop string too, the end-of-text token not."""
    finish_reason: FinishReason
    prompt_tokens: int


class Engine:
    """Generates text with one model and its tokenizer. Computes on the model's device, in the model's dtype."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        """
        Raises:
            UserError: the tokenizer makes ids that the model does not have.
        """
        n_ids, n_rows = vocabulary_size(tokenizer), model.config.vocab_size
        if n_ids > n_rows:
            raise UserError(
                f"the tokenizer has {n_ids} tokens and the model's vocabulary {n_rows}: they do not belong together. "
                f"Give the tokenizer that the model was trained with."
            )
        self.model, self.tokenizer = model, tokenizer
        self.n_ids = n_ids  # a padded vocabulary's last rows stand for no token
        self.end_of_text = special_tokens(tokenizer).eos

    # ------------------------------------------------------------------------------------------- what callers use

    def generate(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> str:
        """The text that follows the prompt: `engine.generate("def ", max_tokens=50, temperature=0.8, seed=1)`.

        Arguments and errors are those of `pieces`.
        """
        return "".join(self.stream(prompt, settings, overflow=overflow, **changes))

    def stream(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> Iterator[str]:
        """The text that follows the prompt, in parts, as they come. Arguments and errors are those of `pieces`."""
        pieces = self.pieces(prompt, settings, overflow=overflow, **changes)
        return (piece.text for piece in pieces if piece.text)

    def complete(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        n_samples: int = 1,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> list[Completion]:
        """Several finished continuations, with their tokens and why they ended. See `pieces`."""
        ids = self.encode_prompt(prompt)
        made: list[list[Piece]] = [[] for _ in range(n_samples)]
        for piece in self.pieces(ids, settings, n_samples=n_samples, overflow=overflow, **changes):
            made[piece.sample].append(piece)
        completions = []
        for pieces in made:
            text = "".join(piece.text for piece in pieces)
            token_ids = [piece.token_id for piece in pieces if piece.token_id is not None]
            reason = pieces[-1].finish_reason
            assert reason is not None, "a sample's last piece says why it ended"
            completions.append(Completion(text, token_ids, reason, len(ids)))
        return completions

    def pieces(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        n_samples: int = 1,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> Iterator[Piece]:
        """Generate step by step; `generate`, `stream` and `complete` are views of it.

        A request is checked when it is made, before the first piece is asked for.

        Args:
            prompt: text, or token ids. Empty text starts a new document, where the tokenizer has a token for that.
            settings: how to sample; default: SamplingSettings().
            n_samples: continuations of the one prompt, which is computed once. With a seed, sample i draws the same
                random numbers whatever n_samples is.
            overflow: when the context is full. error: a longer prompt is refused, and a sample ends with the reason
                "context". slide: the window restarts from the last context_length / 2 tokens, recomputed; of a prompt
                longer than the context, the last context_length / 2 tokens are read.
            changes: settings by name, such as temperature=0.8.

        Raises:
            UserError: an unknown or impossible setting, a prompt with no tokens, or one longer than the context.
        """
        settings = SamplingSettings.of(settings, **changes)
        ids, context = self.encode_prompt(prompt), self.model.config.context_length
        if n_samples < 1:
            raise UserError(f"n_samples={n_samples}: it must be 1 or more.")
        if overflow not in ("error", "slide"):
            raise UserError(f'overflow="{overflow}": it must be "error" or "slide".')
        if len(ids) > context and overflow == "error":
            raise UserError(
                f"the prompt has {len(ids)} tokens and the model's context {context}: "
                f'shorten it, or use --slide (overflow="slide" in Python), which reads its last {self.restart_tokens}.'
            )
        samples = [_Sample(index, ids, settings, self.tokenizer) for index in range(n_samples)]
        return self._run(samples, settings, overflow)

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt, after the token that begins a document where the tokenizer has one for it.

        Warns (UserWarning) of characters or words that the tokenizer does not know.

        Raises:
            UserError: no tokens come of it, or ids outside the vocabulary.
        """
        if not isinstance(prompt, str):
            ids = list(prompt)
            if wrong := [token for token in ids if not 0 <= token < self.n_ids]:
                raise UserError(f"token id {wrong[0]} is not in the vocabulary: ids go from 0 to {self.n_ids - 1}.")
            if not ids:
                raise UserError("the prompt has no tokens: give at least one.")
            return ids
        ids = prompt_ids(self.tokenizer, prompt)
        if prompt and ids == prompt_ids(self.tokenizer, ""):
            raise UserError(f"the prompt {prompt!r} has no token this tokenizer knows: give other text.")
        if not ids:
            raise UserError("the prompt is empty and this tokenizer has no token to begin a document: give some text.")
        self._warn_of_unknown(prompt, ids)
        return ids

    @property
    def restart_tokens(self) -> int:
        """Tokens that a window restarts from when the context is full: the last half of the context."""
        return max(1, self.model.config.context_length // 2)

    # ------------------------------------------------------------------------------------------------- how it works

    def _run(self, samples: list["_Sample"], settings: SamplingSettings, overflow: Overflow) -> Iterator[Piece]:
        context = self.model.config.context_length
        ids = samples[0].ids
        window = ids if len(ids) <= context else ids[-self.restart_tokens :]
        cache, logits = self._prefill([window], settings.max_tokens)
        if len(samples) > 1:
            cache, logits = cache.repeat(len(samples)), logits.expand(len(samples), -1)
        while True:
            tokens = sample(logits, [s.ids for s in samples], settings, [s.chance for s in samples])
            for one, token in zip(samples, tokens.tolist(), strict=True):
                if one.finish_reason is None:
                    yield one.push(token, self.end_of_text)
            live = [one for one in samples if one.finish_reason is None]
            if not live:
                return
            if cache.length < context:  # a finished sample stays in its row of the cache, and is ignored
                logits = self._logits(tokens[:, None], cache)
            elif overflow == "slide":
                samples = live
                n_left = settings.max_tokens - live[0].n_generated
                cache, logits = self._prefill([one.ids[-self.restart_tokens :] for one in live], n_left)
            else:
                yield from (one.finish("context") for one in live)
                return

    def _prefill(self, windows: list[list[int]], n_more: int) -> tuple[KVCache, Tensor]:
        """Compute windows of equal length; a cache with room for `n_more` tokens, and the logits [B, V] that follow."""
        tokens = torch.tensor(windows)
        cache = KVCache(
            self.model.config, len(windows), tokens.size(1) + n_more, dtype=self.model.dtype, device=self.model.device
        )
        for start in range(0, tokens.size(1), PREFILL_TOKENS):
            logits = self._logits(tokens[:, start : start + PREFILL_TOKENS], cache)
        return cache, logits

    def _logits(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Feed tokens [B, T]; the logits [B, V] of the token that follows."""
        with eval_mode(self.model), torch.inference_mode():
            features = self.model.features(tokens.to(self.model.device), cache)  # B T C
            return self.model.logits(features[:, -1])[:, : self.n_ids]

    def _warn_of_unknown(self, prompt: str, ids: list[int]) -> None:
        unknown = special_tokens(self.tokenizer).unk
        if unknown is None or unknown not in ids:
            return
        encoding = self.tokenizer.encode(prompt, add_special_tokens=False)
        spans = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token == unknown]
        known_by_name = ", ".join(dict.fromkeys(repr(prompt[start:end]) for start, end in spans))
        warnings.warn(f"the tokenizer does not know {known_by_name}: the model reads <unk> there.", stacklevel=4)


def load(
    run_dir: str | Path,
    checkpoint: str | int = "best",
    *,
    overrides: Sequence[str] = (),
    device: str = "auto",
    report: Report = lambda _: None,
) -> Engine:
    """The engine of a run folder: its tokenizer, and the model as it was at a checkpoint.

    Args:
        checkpoint: best, last, or a step.
        overrides: settings that win over the run's, such as `model.context_length=1024` for a longer context.
        device: auto, cpu, cuda or mps.
        report: told of what was fallen back from, such as a damaged checkpoint.

    Raises:
        UserError: no such run, checkpoint or device, or damaged files.
    """
    run = load_run(run_dir, str(checkpoint), overrides=overrides, device=choose_device(device), report=report)
    return Engine(run.model, load_tokenizer(run.tokenizer_folder))


class _Sample:
    """One continuation in the making: its tokens, its source of chance, and the text not yet certain."""

    def __init__(self, index: int, prompt: list[int], settings: SamplingSettings, tokenizer: Tokenizer) -> None:
        self.index, self.settings = index, settings
        self.ids, self.n_generated = list(prompt), 0
        self.chance = settings.chance(index)
        self.finish_reason: FinishReason | None = None
        self.stops = StopStrings(settings.stop)
        self.decoder = StreamDecoder(tokenizer)
        for token_id in prompt[-_DECODER_CONTEXT_TOKENS:]:
            self.decoder.push(token_id)  # not shown

    def push(self, token_id: int, end_of_text: int | None) -> Piece:
        """Take the next token."""
        if token_id == end_of_text:
            return self.finish("stop")
        self.ids.append(token_id)
        self.n_generated += 1
        text = self.stops.push(self.decoder.push(token_id))
        if self.stops.found:
            return self.finish("stop", token_id, text)
        if self.n_generated == self.settings.max_tokens:
            return self.finish("length", token_id, text)
        return Piece(self.index, text, token_id)

    def finish(self, reason: FinishReason, token_id: int | None = None, text: str = "") -> Piece:
        """End here, with all the text held back, unless it holds a stop string after all."""
        if not self.stops.found:
            text += self.stops.push(self.decoder.flush())
        text += self.stops.flush()
        self.finish_reason = "stop" if self.stops.found else reason
        return Piece(self.index, text, token_id, self.finish_reason)


@dataclass
class StopStrings:
    """Passes text on up to the stop string that is completed first, holding back what may be the beginning of one.

    The result does not depend on how the text is cut into parts. Of strings completed by the same character, the
    longest counts.
    """

    strings: tuple[str, ...]
    found: bool = field(default=False, init=False)
    held: str = field(default="", init=False)

    def push(self, text: str) -> str:
        """The text that is now certain."""
        text, self.held = self.held + text, ""
        matches = [(start + len(stop), start) for stop in self.strings if (start := text.find(stop)) >= 0]
        if matches:
            self.found = True
            return text[: min(matches)[1]]
        n_held = max((self._n_begun(text, stop) for stop in self.strings), default=0)
        self.held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """What is held back, when no more text will come."""
        text, self.held = self.held, ""
        return text

    @staticmethod
    def _n_begun(text: str, stop: str) -> int:
        """Length of the longest beginning of `stop` with which the text ends."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@contextmanager
def eval_mode(model: GPT) -> Iterator[None]:
    """Switch dropout off, and afterwards on again wherever it was on."""
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
