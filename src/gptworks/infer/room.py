"""The slots of an engine: the backend that computes and caches texts in them, and the scheduler that assigns them.

The number and capacity of slots grow with the texts. The slots are released when the weights change.
"""

import torch

from gptworks.choices import BackendName
from gptworks.device import memory_bytes
from gptworks.errors import UserError
from gptworks.infer.backends.backend import Backend
from gptworks.infer.backends.native import choose_backend
from gptworks.infer.scheduler import Reuse, Scheduler
from gptworks.infer.speculate import Drafter
from gptworks.model.gpt import GPT
from gptworks.planning.setting import ANSWERS_AT_ONCE, PREFILL_TOKENS, slots_for
from gptworks.units import readable


class Room:
    """A backend and its scheduler. Their slots grow as the current texts need: in number unless `n_slots` is given, and
    in length unless `slot_tokens` is given."""

    def __init__(
        self,
        model: GPT,
        *,
        n_slots: int | None = None,
        slot_tokens: int | None = None,
        reuse: Reuse = "exact",
        prefill_tokens: int = PREFILL_TOKENS,
        drafter: Drafter | None = None,
        backend: BackendName = "auto",
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Make a room without slots: they are allocated when the first text needs one.

        Args:
            n_slots: maximum number of texts generated together. None: as many as requested, up to 32.
            slot_tokens: maximum tokens of a text with its prompt; None: as needed, up to the model's context.
            reuse: which keys and values of an earlier text with the same beginning a prompt reuses: exact, all or off;
                see `scheduler.Reuse`. Always off if the model has rotary scaling by length.
            prefill_tokens: maximum prompt tokens per step. Exact reuse shares complete chunks of this length.
            drafter: proposes draft tokens (speculate.py); it does not change the texts.
            backend, cache_dtype: see `choose_backend`.

        Raises:
            UserError: a number is below 1.
        """
        for name, number in (("n_slots", n_slots), ("slot_tokens", slot_tokens), ("prefill_tokens", prefill_tokens)):
            if number is not None and number < 1:
                raise UserError(f"{name}={number}: it must be 1 or more.")
        self.model, self.drafter = model, drafter
        self.context = min(slot_tokens or model.config.context_length, model.config.context_length)
        """Maximum number of tokens of a text."""
        self.restart_tokens = max(1, self.context // 2)
        """Number of last tokens that a full sliding window keeps: half the context."""
        self.most_texts = n_slots or ANSWERS_AT_ONCE
        """Maximum number of texts generated together."""
        self._n_slots, self._slot_tokens = n_slots, slot_tokens
        self._backend_name: BackendName = backend
        self._cache_dtype, self._prefill_tokens = cache_dtype, prefill_tokens
        scaling = model.config.rope_scaling
        by_length = scaling is not None and scaling.by_length  # a token's keys depend on the text's length
        self._reuse: Reuse = "off" if by_length else reuse
        self.turns_at = model.config.original_context_length if scaling is not None and scaling.long_factors else None
        """A text that outgrows this length is computed again, with LongRoPE's long factors. None: no LongRoPE."""
        self._weights: object = None
        self.release()

    def reader(self) -> Backend:
        """Return a separate backend with one slot, for `Backend.read`."""
        on_cpu = self.model.device.type == "cpu"  # CPU memory is committed only for pages in use
        return choose_backend(self.model, 1, self.context if on_cpu else 1, name=self._backend_name)

    def window(self, ids: list[int]) -> list[int]:
        """Return the prompt tokens to compute: all, or the last `restart_tokens` if the prompt exceeds the context."""
        return list(ids if len(ids) <= self.context else ids[-self.restart_tokens :])

    def release(self) -> None:
        """Free the slots and their contents."""
        self.backend: Backend | None = None
        self.scheduler = Scheduler(0, prefill_tokens=self._prefill_tokens, reuse=self._reuse)

    def release_stale(self) -> None:
        """Release the slots if the weights have changed since they were filled, or the model is in training."""
        if self.backend is not None and (self.model.training or self._weights != _versions(self.model)):
            self.release()

    def forget(self) -> None:
        """Discard the caches after a failed step, and also the backend if it failed to grow."""
        self.scheduler.forget()
        if self.backend is None:
            self.release()

    def fit(self, n_texts: int, longest_tokens: int) -> None:
        """Grow, if necessary, to slots for `n_texts` texts of up to `longest_tokens` tokens.

        If the room was made with `n_slots` or `slot_tokens`, these numbers replace the arguments.
        """
        n_slots, capacity = slots_for(n_texts, longest_tokens, self.model.device.type == "cpu")
        self._grow(self._n_slots or n_slots, min(self._slot_tokens or capacity, self.context))

    def fill(self, *, promised_bytes: int = 0) -> int:
        """Allocate all slots at full length. For the argument, the result and errors, see `Engine.warm_up`."""
        n_slots = self.most_texts
        self._grow(1, 1)
        assert self.backend is not None
        needed_bytes = self.backend.cache.bytes_of(n_slots, self.context)
        there_bytes = max(0, memory_bytes(self.model.device) - promised_bytes)
        refusal = (
            f"the keys and values of {n_slots} slots of {self.context:,} tokens take "
            f"{readable(needed_bytes, 'B')}, and {readable(there_bytes, 'B')} are available, enough for "
            f"{n_slots * there_bytes // needed_bytes} slots: give --slots or --context (n_slots, slot_tokens in "
            f"Python) a smaller number."
        )
        if needed_bytes > there_bytes:
            raise UserError(refusal)
        try:
            self._grow(n_slots, self.context)
        except RuntimeError as error:  # torch could not allocate the slots
            self.release()
            raise UserError(refusal) from error
        return needed_bytes

    def _grow(self, n_slots: int, capacity: int) -> None:
        """Make the backend, or grow it to at least `n_slots` slots of `capacity` tokens; slots keep their contents."""
        backend = self.backend
        if backend is None:
            backend = choose_backend(self.model, n_slots, capacity, dtype=self._cache_dtype, name=self._backend_name)
            # Read after choose_backend, because the native backend moves the weights.
            self._weights = None if self.model.training else _versions(self.model)
            self.scheduler.invariant = backend.invariant
            if self.drafter is not None:
                self.drafter.reset(backend)
        elif n_slots > backend.n_slots or capacity > backend.capacity:
            n_slots, capacity = max(n_slots, backend.n_slots), max(capacity, backend.capacity)
            self.backend = None  # a backend that fails to grow is unusable
            backend.grow(n_slots, capacity, self.scheduler.held)
            if self.drafter is not None:
                self.drafter.grow(n_slots, capacity)
        self.backend = backend
        self.scheduler.grow(n_slots)


def _versions(model: GPT) -> tuple[tuple[int, int], ...]:
    """Return the address and version of each parameter; the result differs after any parameter has changed."""
    return tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters())
