"""The engine with events in any order, against a naive loop that computes each text alone, without a cache.

A machine submits requests that begin alike, steps, cancels, fills the queue, and lets everything end. Each text must be
the naive loop's, each cancelled one a beginning of it. No text is compared within a tolerance. Instead, a request is
only submitted if none of the naive loop's draws comes near the border between two tokens, where another rounding could
decide: with the next seed the same prompt serves as well.

GPTWORKS_MACHINE_STEPS=5000 sets the number of the machine's steps (`make test-engine`); a plain run takes 300.
"""

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from gptworks.infer import Engine, SamplingSettings
from gptworks.infer.backends import native
from gptworks.infer.backends.backend import Chunk
from gptworks.infer.backends.cache import Vectors
from gptworks.infer.backends.native import choose_backend
from gptworks.infer.request import Request
from gptworks.infer.sampling import Sampler, adjust, sample
from gptworks.infer.scheduler import QueueFull
from gptworks.infer.speculate import DraftModel, HeadsDraft, PromptLookup
from gptworks.kernels.build import Unavailable
from gptworks.model.gpt import GPT
from gptworks.planning import setting
from gptworks.quantize.panels import UNIT, from_panels
from gptworks.special_tokens import special_tokens
from test_engine import char_tokenizer, random_model

CONTEXT, PREFILL = 40, 8
TOKENIZER = char_tokenizer()
EOS = special_tokens(TOKENIZER).eos
FIRST, LAST = (TOKENIZER.token_to_id(letter) for letter in "aj")

STEPS_EACH = 30
"""Steps of the machine before everything ends and it begins anew."""

NEAR_PROBABILITY, NEAR_LOGIT = 1e-4, 1e-3
"""How near to a border a draw may not come: a hundred times what float32 rounds away."""

BEGINNINGS = [random.Random(i).choices(range(FIRST, LAST + 1), k=CONTEXT) for i in range(8)]
"""What prompts begin with: some that slots hold already, and some that are new."""

CUTS = [1, PREFILL - 1, PREFILL, PREFILL + 1, 15, 2 * PREFILL, 17, 3 * PREFILL, 30, CONTEXT - 4]
"""Lengths of prompts that are seen often: at and beside the borders of prefill chunks."""

ARRIVALS = st.tuples(
    st.none() | st.sampled_from(CUTS),  # what it has of the beginning; None: its prompt is that of the others
    st.lists(st.integers(FIRST, LAST), max_size=4),  # and what comes after that
    st.sampled_from([(1, 1), (1, 1), (2, 9), (3, 12), (2, 1), (2, 24)]),  # samples, and tokens of each at most
    st.integers(0, 1),  # steps of the engine before the next one comes
)


@cache
def model_of(kind: str) -> GPT:
    shape: dict[str, Any] = {"context_length": CONTEXT, "d_model": 32, "init_std": 0.25, "n_future_tokens": 3}
    kinds: dict[str, dict[str, Any]] = {
        "windowed": {"window": 6, "window_pattern": ["full", "window"]},
        "learned": {"position": "learned"},
        "draft": {"n_layers": 1, "seed": 1},
    }
    return random_model(TOKENIZER, **shape | kinds[kind]).eval()


@cache
def double(kind: str) -> GPT:
    model = model_of(kind)
    twin = GPT(model.config).double().eval()
    twin.load_state_dict(model.state_dict())
    return twin


@dataclass(frozen=True)
class Way:
    """A way in which an engine computes."""

    backend: str
    reuse: str = "exact"
    int8: bool = False

    def next_logits(self, kind: str) -> Callable[[list[int]], Tensor]:
        """Return a function that computes the logits [V] after a text, from its first token on."""
        if self.int8:  # the rounding of the cache is part of the model: its kernels, over one empty slot
            backend = native.NativeBackend(model_of(kind), 1, CONTEXT, dtype=torch.int8)
            return lambda ids: backend.compute([Chunk(0, 0, ids)])[0][-1]
        return lambda ids: double(kind)(torch.tensor([ids]))[0, -1]


def ways() -> list[Way]:
    found = [Way("torch"), Way("torch", "all"), Way("torch", "off")]
    try:
        native.library()
    except Unavailable:
        return found
    return [*found, Way("native"), Way("native", int8=True)]


@dataclass(frozen=True)
class Text:
    tokens: tuple[int, ...]
    text: str
    reason: str


def alone(way: Way, kind: str, prompt: list[int], sampling: SamplingSettings, index: int, overflow: str) -> Text | None:
    """Return the text after a prompt by the naive loop; None: a draw is near the border between two tokens."""
    next_logits, sampler = way.next_logits(kind), Sampler(sampling, prompt, index, (EOS,))
    window, tokens, text = list(prompt), [], ""
    while True:
        if len(window) > CONTEXT:
            if overflow == "error":
                return Text(tuple(tokens), text, "context")
            window = window[-(CONTEXT // 2) :]
        with torch.inference_mode():
            logits = next_logits(window)[None].float()
        if near_a_border(adjust(logits, [sampler])[0].double(), sampler):
            return None
        (token,) = sample(logits, [sampler])
        if token == EOS:
            return Text(tuple(tokens), text, "stop")
        sampler.push(token)
        window.append(token)
        tokens.append(token)
        text += TOKENIZER.decode([token])
        if ends := [text.index(stop) for stop in sampling.stop if stop in text]:
            return Text(tuple(tokens), text[: min(ends)], "stop")
        if len(tokens) == sampling.max_tokens:
            return Text(tuple(tokens), text, "length")


def near_a_border(logits: Tensor, sampler: Sampler) -> bool:
    if sampler.settings.greedy:
        first, second = logits.topk(2).values.tolist()
        return first - second < NEAR_LOGIT
    borders = (logits / sampler.settings.temperature).softmax(-1).cumsum(-1)
    return bool((borders - sampler.share()).abs().min() < NEAR_PROBABILITY)


def vectors_of(backend: Any, slot: int, tokens: list[int]) -> list[Tensor]:
    """Return the keys and values of the given tokens in a slot, by layer."""
    cache = backend.cache
    keys, values = [keys_in(x, slot) for x in cache.keys], [values_in(x, slot) for x in cache.values]
    return [vectors[:, : len(tokens)] for vectors in (*keys, *values)]


def keys_in(layer: Any, slot: int) -> Tensor:
    if layer.unit == 1:
        return layer[slot]  # type: ignore[no-any-return]
    data = layer.data[slot]  # G S D
    return scaled(torch.stack([from_panels(head.flatten(), len(head), UNIT) for head in data]), layer, slot)


def values_in(layer: Any, slot: int) -> Tensor:
    if layer.unit == 1:
        return layer[slot]  # type: ignore[no-any-return]
    data = layer.data[slot]  # G S D
    words = data.view(len(data), -1, data.size(-1), 4 // data.element_size())
    return scaled(words.transpose(2, 3).reshape(data.shape), layer, slot)


def scaled(vectors: Tensor, blocks: Vectors, slot: int) -> Tensor:
    return vectors if blocks.scale is None else vectors * blocks.scale[slot, ..., None]


@lru_cache(10_000)
def vectors_alone(way: Way, kind: str, tokens: tuple[int, ...]) -> list[Tensor]:
    """Return the keys and values of a text computed alone, in an empty slot."""
    dtype = torch.int8 if way.int8 else None
    fresh = choose_backend(model_of(kind), 1, CONTEXT, dtype=dtype, name=way.backend)
    fresh.compute([Chunk(0, 0, list(tokens))])
    return vectors_of(fresh, 0, list(tokens))


@dataclass
class Asked:
    request: Request
    expected: list[Text]
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    cancelled: bool = False


counts = Counter[str]()
"""Steps that all machines took together."""


class EngineMachine(RuleBasedStateMachine):
    """Requests come, are cut short and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self.least_capacity = setting.LEAST_CAPACITY_CPU
        setting.LEAST_CAPACITY_CPU = PREFILL  # so that room grows often

    @initialize(
        way=st.sampled_from(ways()), kind=st.sampled_from(["windowed", "learned"]),
        n_slots=st.sampled_from([4, 3, 6, None, 2, 1]), max_waiting=st.sampled_from([None, None, 3]),
        drafter=st.sampled_from([None, None, "lookup", "model", "heads"]),
        prefill_tokens=st.sampled_from([PREFILL, 2 * PREFILL, CONTEXT]),
    )  # fmt: skip
    def begin(
        self,
        way: Way,
        kind: str,
        n_slots: int | None,
        drafter: str | None,
        max_waiting: int | None,
        prefill_tokens: int,
    ) -> None:
        self.way, self.kind, self.max_waiting = way, kind, max_waiting
        drafters = {
            None: lambda: None, "lookup": lambda: PromptLookup(3, 2),
            "model": lambda: DraftModel(model_of("draft"), 2, backend="torch"), "heads": lambda: HeadsDraft(2),
        }  # fmt: skip
        self.engine = Engine(
            model_of(kind), TOKENIZER, backend=way.backend, reuse=way.reuse, n_slots=n_slots, max_waiting=max_waiting,
            prefill_tokens=prefill_tokens, drafter=drafters[drafter](), cache_dtype=torch.int8 if way.int8 else None,
        )  # fmt: skip
        self.check_admissions()

    def check_admissions(self) -> None:
        """Before each admission, in the middle of a step too: what may be taken over is what the slots hold."""
        admit = self.engine._requests.admit

        def checked() -> Any:
            if self.engine._room.scheduler.waiting:
                self.slots_hold_what_is_said()
            return admit()

        self.engine._requests.admit = checked  # type: ignore[method-assign]

    @rule(
        beginning=st.sampled_from(BEGINNINGS), first=st.sampled_from(CUTS),
        arrivals=st.lists(ARRIVALS, min_size=3, max_size=6),
        temperature=st.sampled_from([0.0, 1.0]), stop=st.sampled_from([(), (), ("a",), ("bc", "d")]),
        penalty=st.sampled_from([1.0, 1.3]), overflow=st.sampled_from(["error", "slide"]),
    )  # fmt: skip
    def submit(
        self, beginning: list[int], first: int, arrivals: list[tuple[int | None, list[int], tuple[int, int], int]],
        temperature: float, stop: tuple[str, ...], penalty: float, overflow: str,
    ) -> None:  # fmt: skip
        """Some requests shortly after one another, whose prompts begin alike."""
        for cut, end, (n_samples, max_tokens), n_steps in arrivals:
            self.count()
            prompt = beginning[:first] if cut is None else [*beginning[:cut], *end]
            for sampling in self.settings(temperature, max_tokens=max_tokens, stop=stop, repetition_penalty=penalty):
                expected = [alone(self.way, self.kind, prompt, sampling, i, overflow) for i in range(n_samples)]
                if None not in expected:
                    self.submit_one(prompt, sampling, expected, overflow)
                    break
            for _ in range(n_steps):
                self.step_once()

    def submit_one(self, prompt: list[int], sampling: SamplingSettings, expected: list[Any], overflow: str) -> None:
        n = len(expected)
        full = self.max_waiting is not None and self.engine.statistics().waiting >= self.max_waiting
        try:
            request = self.engine.submit(prompt, sampling, n_samples=n, overflow=overflow)
        except QueueFull:
            assert full, "there was room to wait"
            return
        assert not full, "more wait than may"
        self.asked.append(Asked(request, expected, [[] for _ in range(n)], [""] * n, [None] * n))

    @staticmethod
    def settings(temperature: float, **others: Any) -> Iterator[SamplingSettings]:
        unknown = {TOKENIZER.token_to_id("<unk>"): -math.inf}
        yield SamplingSettings(temperature=temperature, seed=0, logit_bias=unknown, **others)
        for seed in range(1, 1000):
            yield SamplingSettings(temperature=1.0, seed=seed, logit_bias=unknown, **others)

    @rule(n=st.sampled_from([1, 1, 2, 5]))
    def step(self, n: int) -> None:
        self.count()
        for _ in range(n):
            self.step_once()

    @precondition(lambda self: any(not one.request.done for one in self.asked))
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        self.count()
        running = [one for one in self.asked if not one.request.done]
        one = running[which % len(running)]
        self.engine.cancel(one.request)
        one.cancelled = True
        assert one.request.done

    @rule()
    def let_all_end(self) -> None:
        self.count()
        statistics = self.engine.statistics()
        for _ in range(1000 + CONTEXT * (statistics.running + statistics.waiting)):  # one after another, a token a step
            if not self.step_once():
                break
        statistics = self.engine.statistics()
        assert (statistics.running, statistics.waiting, statistics.slots_used) == (0, 0, 0)
        assert all(one.request.done for one in self.asked)
        self.slots_hold_what_is_said()

    def slots_hold_what_is_said(self) -> None:
        """The keys and values that later texts would start from are those of the tokens that the scheduler names."""
        scheduler, backend = self.engine._room.scheduler, self.engine._room.backend
        for index, slot in enumerate(scheduler._slots):
            if not slot.tokens:
                continue
            held = vectors_of(backend, index, slot.tokens)
            for one, expected in zip(held, vectors_alone(self.way, self.kind, tuple(slot.tokens)), strict=True):
                # A wrong token's differ by some tenths.
                torch.testing.assert_close(one, expected, rtol=0, atol=1e-4)

    def step_once(self) -> bool:
        counts["engine"] += 1
        busy = self.engine.step()
        self.compare()
        return busy

    def count(self) -> None:
        counts["machine"] += 1

    def compare(self) -> None:
        for one in self.asked:
            assert one.request.error is None
            for piece in one.request.take():
                i = piece.sample
                assert one.reasons[i] is None, "a piece after the last"
                if piece.token_id is not None:
                    one.tokens[i].append(piece.token_id)
                one.texts[i] += piece.text
                one.reasons[i] = piece.finish_reason
            for tokens, text, reason, expected in zip(one.tokens, one.texts, one.reasons, one.expected, strict=True):
                if reason is None:
                    assert tuple(tokens) == expected.tokens[: len(tokens)]
                    assert expected.text.startswith(text)
                else:
                    assert Text(tuple(tokens), text, reason) == expected
            if one.request.done and not one.cancelled:
                assert None not in one.reasons
        self.asked = [one for one in self.asked if not one.request.done]

    @invariant()
    def the_statistics_agree(self) -> None:
        statistics = self.engine.statistics()
        assert statistics.slots_used == statistics.running <= statistics.slots
        assert statistics.failed == 0

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.let_all_end()
        finally:
            setting.LEAST_CAPACITY_CPU = self.least_capacity


def run_machine(n_wanted: int) -> None:
    counts.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=-(-n_wanted // STEPS_EACH), stateful_step_count=STEPS_EACH,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        ),
    )  # fmt: skip
    print(f"{counts['machine']:,} steps of the machine, {counts['engine']:,} of the engine")
    assert counts["machine"] >= n_wanted


def test_texts_are_those_of_the_naive_loop_in_any_order_of_events() -> None:
    run_machine(300)


@pytest.mark.engine_machine
@pytest.mark.timeout(3600)
def test_texts_are_those_of_the_naive_loop_in_thousands_of_events() -> None:
    run_machine(int(os.environ.get("GPTWORKS_MACHINE_STEPS", "5000")))
