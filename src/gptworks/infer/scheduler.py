"""Decide which tokens the next step computes, and in which slots: plain Python, without a model or tensors.

    add ─► waiting (first come, first served) ─► running, each in its slot ─► finish: the slot is free

Texts join and leave between steps. A step computes one token of each text in generation, plus its draft tokens, and
up to `prefill_tokens` tokens of prompts, so that a long prompt does not delay the other texts. Prompts are cut at
multiples of `prefill_tokens`, whatever else the step computes.

A slot keeps its tokens when its text ends, and a new text with the same beginning reuses these tokens (prefix reuse).
The scheduler's record of a slot lists only tokens that the slot really has: `plan` removes tokens that a `Work` will
overwrite, and `commit` adds computed tokens. Texts may therefore be admitted, and slots copied, at any time.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gptworks.planning.setting import PREFILL_TOKENS

Reuse = Literal["exact", "all", "off"]
"""The cached prefixes that a new text reuses. exact: prefixes that would have the same bits if computed again. all:
all common prefixes; if the backend is not invariant, results may then differ in their last digits. off: no prefixes."""


class QueueFull(RuntimeError):
    """A request is refused for now: the queue is full, or the grammars in use have reached their memory limit."""


@dataclass(eq=False)
class Job:
    """One text to compute: a prompt, or a prompt with its continuation."""

    tokens: list[int]
    """The tokens of the text; the engine appends generated tokens."""
    score_from: int | None = None
    """Index of the first token whose logits are needed; earlier tokens may be reused. None: only the last token's
    logits are needed."""
    knows_logits: bool = False
    """Whether the engine already has the logits after `tokens`. If so, even the last token may be reused."""
    draft: list[int] = field(default_factory=list)
    """Draft tokens, which the next step computes together with the last token."""
    n_wanted: int = 0
    """Maximum number of draft tokens for the next step."""
    slot: int | None = None
    n_computed: int = 0
    """Number of tokens whose keys and values are in the slot."""
    n_reused: int = 0
    """Number of the job's tokens that were reused from the cache when the job was admitted."""
    request: Any = None
    sample: Any = None
    """For the engine: the sample of `request` that the job computes; None: the job only scores the prompt."""


@dataclass(frozen=True)
class Work:
    """The tokens of a job that one step computes."""

    job: Job
    slot: int
    start: int
    tokens: list[int]
    n_logits: int
    n_draft: int = 0
    """Number of draft tokens, which the model may reject, at the end of `tokens`."""

    @property
    def is_last(self) -> bool:
        """Whether all tokens of the job are computed after this work."""
        return self.start + len(self.tokens) - self.n_draft >= len(self.job.tokens)


@dataclass(frozen=True)
class Copy:
    """A copy to make: the first `n_tokens` of slot `source` into slot `target`."""

    source: int
    target: int
    n_tokens: int


@dataclass
class _Slot:
    tokens: list[int] = field(default_factory=list)  # tokens whose keys and values the slot holds
    n_whole: int = 0  # number of first tokens that were computed in complete prefill chunks
    end: int = 0  # number of first tokens computed as a prompt; an equal prompt would give the same bits
    job: Job | None = None
    used: int = 0  # time of the slot's last assignment or release, as a count of such events

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens`."""
        assert n_tokens <= len(self.tokens), f"{n_tokens} tokens of the {len(self.tokens)} in a slot"
        del self.tokens[n_tokens:]
        self.n_whole = min(self.n_whole, n_tokens)
        self.end = self.end if self.end <= n_tokens else 0


class Scheduler:
    """Assigns a backend's slots to jobs, and plans the work of each step. Not thread-safe."""

    def __init__(self, n_slots: int, *, prefill_tokens: int = PREFILL_TOKENS, reuse: Reuse = "exact") -> None:
        self.prefill_tokens, self.reuse = prefill_tokens, reuse
        self.invariant = False  # see `Backend.invariant`
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._slots = [_Slot() for _ in range(n_slots)]
        self._clock = itertools.count(1)

    # ---------------------------------------------------------------------------------- adding and removing jobs

    def add(self, *jobs: Job, first: bool = False) -> None:
        """Queue jobs in this order. first: ahead of the waiting jobs."""
        assert all(job.tokens for job in jobs), "a job has at least one token"
        if first:
            self.waiting.extendleft(reversed(jobs))
        else:
            self.waiting.extend(jobs)

    def finish(self, job: Job) -> None:
        """Remove a waiting or running job. Its slot becomes free and keeps its tokens for reuse."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self.running:
            self.running.remove(job)
        if job.slot is not None:
            self._slots[job.slot].job = None
            self._slots[job.slot].used = next(self._clock)
        job.slot = None

    def restart(self, job: Job, tokens: list[int]) -> None:
        """Replace a job's tokens by `tokens`, to be computed from the beginning of its slot."""
        job.tokens, job.n_computed, job.draft = tokens, 0, []

    def forget(self) -> None:
        """Forget the contents of all slots: running jobs start again, and no prefix is reused."""
        for slot in self._slots:
            slot.truncate(0)
        for job in self.running:
            job.n_computed = 0

    def grow(self, n_slots: int) -> None:
        """Add empty slots until there are `n_slots`."""
        self._slots += [_Slot() for _ in range(n_slots - self.n_slots)]

    # -------------------------------------------------------------------------------------------------- a step

    def admit(self) -> tuple[list[Job], list[Copy]]:
        """Assign free slots to waiting jobs; return these jobs, and the slot copies to make for them, in order."""
        admitted, copies = [], []
        while self.waiting and self.n_slots_used < self.n_slots:
            admitted.append(self.waiting.popleft())
            copies += self._admit(admitted[-1])
        return admitted, copies

    def plan(self) -> list[Work]:
        """Return the next step's `Work` items; forget the cached tokens that these items overwrite.

        Call `commit` for each item after it is computed.
        """
        plan, budget = [], self.prefill_tokens
        for job in self.running:
            n_left = len(job.tokens) - job.n_computed
            if not n_left:
                continue
            work = self._next(job)
            if n_left > 1:
                if len(work.tokens) > budget:
                    continue
                budget -= len(work.tokens)
            plan.append(work)
        for work in plan:
            self._slots[work.slot].truncate(work.start)
        return plan

    def commit(self, work: Work, n_kept: int | None = None) -> None:
        """Record that `work` is computed; keep its first `n_kept` tokens (default: all) as part of the text."""
        job, slot = work.job, self._slots[work.slot]
        if job.slot != work.slot:  # the job has ended
            return
        n_kept = len(work.tokens) if n_kept is None else n_kept
        assert len(slot.tokens) == work.start, f"a work from {work.start} in a slot that holds {len(slot.tokens)}"
        slot.tokens += work.tokens[:n_kept]
        job.n_computed, job.draft = work.start + n_kept, []
        if slot.n_whole == work.start and work.start % self.prefill_tokens == 0 and not work.n_draft:
            slot.end = job.n_computed
            if n_kept == self.prefill_tokens:
                slot.n_whole = job.n_computed

    @property
    def held(self) -> list[int]:
        """Number of cached tokens in each slot."""
        return [len(slot.tokens) for slot in self._slots]

    @property
    def n_slots(self) -> int:
        return len(self._slots)

    @property
    def n_slots_used(self) -> int:
        """Number of slots in use."""
        return sum(slot.job is not None for slot in self._slots)

    def _next(self, job: Job) -> Work:
        assert job.slot is not None
        start, end = job.n_computed, len(job.tokens)
        if end - start == 1:
            return Work(job, job.slot, start, job.tokens[start:] + job.draft, 1 + len(job.draft), len(job.draft))
        stop = min((start // self.prefill_tokens + 1) * self.prefill_tokens, end)
        n_logits = int(stop == end)
        if job.score_from is not None:
            n_logits = max(n_logits, min(stop - start, stop - job.score_from))
        return Work(job, job.slot, start, job.tokens[start:stop], n_logits)

    # ---------------------------------------------------------------------------------------------- prefix reuse

    def _admit(self, job: Job) -> list[Copy]:
        free = [i for i, slot in enumerate(self._slots) if slot.job is None]
        source, n_shared = self._longest_prefix(job)
        target, copies = min(free, key=self._eviction_key), []
        if n_shared and self._slots[source].job is None:
            n_lost = len(self._slots[source].tokens) - n_shared
            if n_lost < self.prefill_tokens or target == source:
                target = source  # reuse the slot in place
        if n_shared and target != source:
            copies.append(self._copy(source, target, n_shared))
        job.slot, self._slots[target].job = target, job
        self._slots[target].used = next(self._clock)
        job.n_computed = job.n_reused = n_shared
        self.running.append(job)
        return copies

    def _eviction_key(self, index: int) -> tuple[bool, int]:
        """Return a sort key for eviction: empty slots first, then the least recently used."""
        return bool(self._slots[index].tokens), self._slots[index].used

    def _longest_prefix(self, job: Job) -> tuple[int, int]:
        """Return the slot with the longest prefix that the job can reuse (a free slot if tied), and its length."""
        best, n_best = 0, 0
        if self.reuse == "off":
            return best, n_best
        for index, slot in enumerate(self._slots):
            n = self._reusable(slot, job)
            if n > n_best or (n == n_best > 0 and slot.job is None and self._slots[best].job is not None):
                best, n_best = index, n
        return best, n_best

    def _reusable(self, slot: _Slot, job: Job) -> int:
        n_needed = len(job.tokens) - (not job.knows_logits)  # unknown logits require computing the last token
        if job.score_from is not None:
            n_needed = min(n_needed, job.score_from)
        n_common = n_common_tokens(slot.tokens, job.tokens)
        if self.reuse == "all" or self.invariant:
            return min(n_common, n_needed)
        if job.knows_logits and n_common == slot.end == len(job.tokens):
            return n_common
        n = min(n_common, slot.n_whole, n_needed)
        return n - n % self.prefill_tokens

    def _copy(self, source: int, target: int, n_tokens: int) -> Copy:
        here, there = self._slots[source], self._slots[target]
        there.tokens, there.used = here.tokens[:n_tokens], next(self._clock)
        there.n_whole = min(here.n_whole, n_tokens)
        there.end = here.end if here.end <= n_tokens else 0
        return Copy(source, target, n_tokens)


def n_common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # bisect, because comparing slices is fast
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
