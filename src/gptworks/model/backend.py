"""What computes a model for the engine: tokens of many texts in, logits out. Each text has a slot that keeps its cache.

    chunks ─┬─► long ones (prefill), each by itself ────────────────────┬─► logits wanted
            └─► short ones (decode, speculation), as one flat batch ────┘

`TorchBackend` runs the model itself, on any device and also while it is being trained. The native backend
(gptworks.native.backend) computes the same in C++ on a CPU; `choose_backend` takes it where it can be had.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from gptworks.errors import UserError
from gptworks.model import GPT, SlotCache

SHORT_TOKENS = 16
"""Chunks of up to so many tokens are computed together: they decode, or check what was guessed."""

BackendName = Literal["auto", "torch", "native"]


@dataclass(frozen=True)
class Chunk:
    """Tokens of one text to compute: positions start … start + len(tokens) of its slot."""

    slot: int
    start: int
    """Tokens already in the slot before these; what lies beyond is forgotten (a rollback)."""
    tokens: Sequence[int]
    n_logits: int = 1
    """Logits wanted for the last n tokens; 0: none."""
    room: int | None = None
    """Tokens that the text may come to. It matters to dynamic rotary scaling alone; None: the slot's capacity."""


class Backend(Protocol):
    """A model, and room for the caches of `n_slots` texts.

    A slot appears at most once in a call. What is computed for a token depends on its own text alone.
    """

    description: str
    """What computes, and with what, for people to read."""
    n_slots: int
    capacity: int
    """Tokens that a slot holds."""
    invariant: bool
    """Whether a token's numbers are the same, bit for bit, however its text was cut into chunks and whatever was
    computed beside it. Then any common beginning of two texts can be shared; else whole prefill chunks alone."""

    def compute(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Compute the chunks and extend their slots; for each, float32 logits [n_logits, V], on the CPU."""
        ...

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first n tokens' keys and values into another slot, where texts begin alike."""
        ...

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        """Have more and longer slots. The first `held[i]` tokens of each slot i that there is stay.

        Where it fails, the backend is of no use any more.
        """
        ...

    def cache_bytes(self, n_slots: int, capacity: int) -> int:
        """Bytes that the caches of so many slots of so many tokens take."""
        ...


class Unavailable(Exception):
    """Why a backend cannot serve here. A user sees it where another is taken instead."""


class TorchBackend:
    """The model's own forward pass, on its device and in its dtype. Reads the weights as they are at each call."""

    invariant = False

    def __init__(self, model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Room for `n_slots` texts of `capacity` tokens, kept in `dtype` (default: the model's)."""
        self.model = model
        self.description = f"torch on {model.device}"
        self.cache = SlotCache(model.config, n_slots, capacity, dtype=dtype or model.dtype, device=model.device)
        self.n_slots, self.capacity = n_slots, self.cache.capacity
        scaling = model.config.rope_scaling
        self._by_room = scaling is not None and scaling.type == "dynamic"

    def compute(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for together in self._batches(chunks):
            results |= zip((chunk.slot for chunk in together), self._compute(together), strict=True)
        return [results[chunk.slot] for chunk in chunks]

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        with torch.inference_mode():
            self.cache.copy(source, target, n_tokens)

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        with torch.inference_mode():
            self.cache.grow(n_slots, capacity, held)
        self.n_slots, self.capacity = self.cache.n_slots, self.cache.capacity

    def cache_bytes(self, n_slots: int, capacity: int) -> int:
        return self.cache.bytes_of(n_slots, capacity)

    def _batches(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Chunks that are computed together: short ones, of equal room where rotary tables depend on it."""
        together: dict[int | None, list[Chunk]] = {}
        alone = []
        for chunk in chunks:
            if len(chunk.tokens) > SHORT_TOKENS:
                alone.append([chunk])
            else:
                together.setdefault(chunk.room if self._by_room else None, []).append(chunk)
        return [*together.values(), *alone]

    def _compute(self, chunks: list[Chunk]) -> list[Tensor]:
        tokens = torch.tensor([[token for chunk in chunks for token in chunk.tokens]], device=self.model.device)  # 1 N
        parts = [(chunk.slot, chunk.start, len(chunk.tokens)) for chunk in chunks]
        wanted: list[int] = []
        end = 0
        for chunk in chunks:
            end += len(chunk.tokens)
            wanted += range(end - chunk.n_logits, end)
        with eval_mode(self.model), torch.inference_mode():
            features = self.model.features(tokens, self.cache.rows(parts, chunks[0].room if self._by_room else None))
            rows = features[0] if len(wanted) == end else features[0, wanted]
            logits = self.model.logits(rows).float().cpu()
        return list(torch.split(logits, [chunk.n_logits for chunk in chunks]))


def choose_backend(
    model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None, name: BackendName = "auto"
) -> Backend:
    """The fastest backend for a model where it is: on a CPU the native one, unless torch is measured to be faster.

    A model that is being trained is computed by torch. Warns (UserWarning), once, where the native one cannot be had,
    is slower, or has one thread of several. `description` of what is returned says what computes and why.

    Args:
        n_slots, capacity: texts at once, and the tokens of each.
        dtype: of the caches; None: as the backend likes it.
        name: native: it, or an error. torch: the model's own forward pass.

    Raises:
        UserError: name="native" and it cannot be had.
    """
    if name == "torch" or (name == "auto" and (model.device.type != "cpu" or model.training)):
        return TorchBackend(model, n_slots, capacity, dtype=dtype)
    try:
        backend, slower = _native_backend(model, n_slots, capacity, dtype, name == "native")
    except Unavailable as error:
        if name == "native":
            raise UserError(f"backend=native cannot compute this model here: {error} Take auto or torch.") from None
        _say_once(f"the native engine is not used: {error} torch computes instead, slower.")
        return TorchBackend(model, n_slots, capacity, dtype=dtype)
    if isinstance(backend, TorchBackend):
        _say_once(f"the native engine is not used: it is slower here ({slower}). --backend native takes it.")
        backend.description += f", because it is faster here ({slower})"
    elif "one thread" in backend.description and torch.get_num_threads() > 1:
        _say_once(f"{backend.description}: the C++ compiler has no OpenMP, so one core computes. Install g++ for all.")
    return backend


def _native_backend(
    model: GPT, n_slots: int, capacity: int, dtype: torch.dtype | None, asked: bool
) -> tuple[Backend, str]:
    """The native backend, or where it was not asked for and is slower than torch, torch's; and their times in words.

    Raises:
        Unavailable: the native one cannot serve.
    """
    from gptworks.infer import choice as native_choice
    from gptworks.native import backend as native

    if reason := native.refusal(model):
        raise Unavailable(reason)
    if asked or native_choice.is_forced():
        return native.try_backend(model, n_slots, capacity, dtype=dtype), ""
    ours, theirs = native_choice.seconds_of_both(next(native.matrices(model)).weight.dtype)
    figures = f"a request takes {1e3 * ours:.0f} ms natively and {1e3 * theirs:.0f} ms with torch"
    if ours > native_choice.MARGIN * theirs:
        return TorchBackend(model, n_slots, capacity, dtype=dtype), figures
    backend = native.try_backend(model, n_slots, capacity, dtype=dtype)
    backend.description += f", because {figures}"
    return backend, figures


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=3)


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
