"""Measure how much of a model's output occurs verbatim in its training text, compared with held-out text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from gptworks.config import IGNORED
from gptworks.data.batches import Tokens, evaluation_windows
from gptworks.data.cleaning.ngrams import Hashes, HashSet
from gptworks.data.permutation import Int64s
from gptworks.errors import UserError
from gptworks.evaluation.loss import each_nats
from gptworks.evaluation.metrics import Floats
from gptworks.evaluation.results import Measured
from gptworks.evaluation.scoring import Progress, complete_all
from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.model.gpt import GPT

SIZES = (8, 16, 32, 64)
"""Lengths of the n-grams, in tokens: powers of two."""

_WINDOWS = 64
"""Maximum number of windows of each split on which to measure the loss."""
_PIECE_TOKENS = 1 << 22
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
Copied = dict[int, list[npt.NDArray[np.bool_]]]
"""Length n → one array of flags for each text: whether each of the text's n-grams was found."""


def measure_memorization(
    engine: Engine,
    training: Tokens,
    held_out: Tokens,
    *,
    n_texts: int = 64,
    prompt_tokens: int = 16,
    text_tokens: int = 128,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    progress: Progress = lambda done, total: None,
) -> dict[str, Measured]:
    """Continue held-out text at temperature 1, look up the continuations' n-grams in the training text, and compute the
    losses of both splits.

    The real continuations are looked up as well, because similar texts share n-grams without copying. Return the shares
    of copied n-grams and the losses, with intervals over texts and windows.

    Args:
        n_texts: maximum number of texts; a short held-out text has room for fewer.
        prompt_tokens: tokens of each prompt.
        text_tokens: tokens of each continuation; fewer if the prompt leaves less room in the context.
        autocast: function that returns the context manager in which to compute the losses.

    Raises:
        UserError: the held-out text is shorter than one prompt and its continuation, or the context is too short.
        RunError: the model's scores are not numbers.
    """
    text_tokens = min(text_tokens, engine.context - prompt_tokens)
    length = prompt_tokens + text_tokens
    if held_out.n_tokens < length or text_tokens < SIZES[0]:
        raise UserError(
            f"the held-out text has {held_out.n_tokens} tokens, and {prompt_tokens} + {text_tokens} are read at a time "
            f"(at least {prompt_tokens} + {SIZES[0]}): use more text, or a longer context."
        )
    n_texts = min(n_texts, held_out.n_tokens // length)
    places = [i * (held_out.n_tokens - length) // max(1, n_texts - 1) for i in range(n_texts)]
    windows = [held_out.read(place, length) for place in places]
    settings = [
        SamplingSettings(temperature=1.0, max_tokens=text_tokens, ignore_eos=True, seed=i) for i in range(n_texts)
    ]
    made = complete_all(engine, [window[:prompt_tokens].tolist() for window in windows], settings, progress=progress)
    written = [np.array(one[0].token_ids, dtype=np.int64) for one in made]
    real = [window[prompt_tokens:] for window in windows]
    sizes = tuple(n for n in SIZES if n <= text_tokens)
    found, measured = find_copied(training, [*written, *real], sizes), dict[str, Measured]()
    for n in sizes:
        counts = np.array([[hits.sum(), len(hits)] for hits in found[n]], dtype=np.float64)
        measured[f"generated {n}-grams copied"] = Measured.of("mean", counts[:n_texts])
        measured[f"held-out {n}-grams copied"] = Measured.of("mean", counts[n_texts:])
    with autocast():
        for name, tokens in (("training loss", training), ("held-out loss", held_out)):
            measured[name] = Measured.of("mean", _window_losses(engine.model, tokens))
    return measured


def _window_losses(model: GPT, tokens: Tokens) -> Floats:
    """Return the nats and the number of tokens of each of W ≤ _WINDOWS evenly spaced windows, [W, 2]."""
    windows = evaluation_windows(tokens, model.config.context_length, _WINDOWS)
    parts = [np.stack([c.sum(1), (t != IGNORED).sum(1)], axis=1) for c, t in each_nats(model, windows)]
    return np.concatenate(parts).astype(np.float64)


def find_copied(training: Tokens, texts: Sequence[Int64s], sizes: Sequence[int] = SIZES) -> Copied:
    """Find which n-grams occur in the training tokens. Return flags [T − n + 1] for each length n and each text [T].

    This reads the training text once. The hash of an n-gram combines the hashes of its halves. n-grams with equal
    hashes are compared token by token, so the flags are exact. `sizes` are ascending powers of two.
    """
    longest = max(sizes)
    missing: dict[int, dict[bytes, int]] = {n: {} for n in sizes}  # n → n-gram not yet found → hash
    for text in texts:
        for n, hashes in _hashes(text, longest):
            if n in missing:
                missing[n] |= {text[i : i + n].tobytes(): one for i, one in enumerate(hashes.tolist())}
    for start in range(0, training.n_tokens, _PIECE_TOKENS):
        piece = training.read(start, min(_PIECE_TOKENS + longest - 1, training.n_tokens - start))
        for n, hashes in _hashes(piece, longest):
            if grams := missing.get(n):
                for place in HashSet(np.array([*grams.values()], dtype=np.uint64)).places(hashes).tolist():
                    grams.pop(piece[place : place + n].tobytes(), None)
    return {
        n: [
            np.array([text[i : i + n].tobytes() not in grams for i in range(len(text) - n + 1)], dtype=bool)
            for text in texts
        ]
        for n, grams in missing.items()
    }


def _hashes(tokens: Int64s, longest: int) -> Iterator[tuple[int, Hashes]]:
    """Yield n and the hashes [T − n + 1] of all n-grams, for n = 1, 2, 4 … up to `longest` and T."""
    hashes = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIERS[0])
    n = 1
    yield n, hashes
    while n < longest and len(hashes) > n:
        mixed = hashes ^ (hashes >> np.uint64(29))
        hashes = mixed[:-n] * np.uint64(_MULTIPLIERS[n.bit_length() % len(_MULTIPLIERS)]) + mixed[n:]
        n *= 2
        yield n, hashes
