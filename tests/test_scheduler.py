"""The scheduler: its invariants on random arrivals, and its decisions in simple cases."""

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gptworks.infer.scheduler import Copy, Job, Reuse, Scheduler, n_common_tokens

PREFILL = 8


@dataclass
class Backend:
    """A fake backend that records each slot's tokens, and the position at which each token's chunk began."""

    n_slots: int
    slots: list[list[tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [[] for _ in range(self.n_slots)]

    def copy(self, copies: list[Copy]) -> None:
        for copy in copies:
            assert copy.source != copy.target
            assert copy.n_tokens <= len(self.slots[copy.source])
            self.slots[copy.target] = self.slots[copy.source][: copy.n_tokens]

    def compute(self, slot: int, start: int, tokens: list[int]) -> None:
        assert start <= len(self.slots[slot]), "a token before these was never computed"
        self.slots[slot][start:] = [(token, start) for token in tokens]

    def texts(self, slot: int) -> list[int]:
        return [token for token, _ in self.slots[slot]]


@dataclass
class Text:
    """A job, and the text that it would produce alone."""

    job: Job
    n_prompt: int
    n_generate: int
    seed: int

    def following(self) -> int:
        """The next token, as a function of the text alone."""
        return hash((self.seed, tuple(self.job.tokens))) % 5

    @property
    def done(self) -> bool:
        return len(self.job.tokens) == self.n_prompt + self.n_generate


def run(
    scheduler: Scheduler, backend: Backend, arrivals: list[list[Text]], cancels: random.Random | None = None
) -> list[Text]:
    """Step until nothing is left, and check each step; return the texts that ended by themselves, in order."""
    alive: list[Text] = []
    ended, admitted_order, arrived = [], [], []
    for _ in range(10_000):
        for text in arrivals.pop(0) if arrivals else []:
            scheduler.add(text.job)
            alive.append(text)
            arrived.append(text.job)
        if cancels is not None and alive and cancels.random() < 0.2:
            victim = alive.pop(cancels.randrange(len(alive)))
            if victim.job in scheduler.waiting:
                arrived.remove(victim.job)
            scheduler.finish(victim.job)
        admitted, copies = scheduler.admit()
        admitted_order += admitted
        backend.copy(copies)
        for job in admitted:
            assert job.slot is not None
            assert backend.texts(job.slot)[: job.n_computed] == job.tokens[: job.n_computed], "reused another text"
        plan = scheduler.plan()
        check_step(scheduler, plan)
        assert all(job.n_computed < len(job.tokens) for job in scheduler.running)
        for work in plan:
            backend.compute(work.slot, work.start, work.tokens)
        for work in plan:
            scheduler.commit(work)
            text = next(t for t in alive if t.job is work.job)
            assert backend.texts(work.slot) == work.job.tokens[: work.job.n_computed]
            if work.job.n_computed == len(work.job.tokens):
                assert work.n_logits == 1
                work.job.tokens.append(text.following())
                if text.done:
                    scheduler.finish(work.job)
                    alive.remove(text)
                    ended.append(text)
            else:
                assert work.n_logits == 0
        if not alive and not any(arrivals):
            break
    assert not alive, "some texts never end"
    assert admitted_order == [job for job in arrived if job in admitted_order], "first come, first served"
    return ended


def check_step(scheduler: Scheduler, work: list) -> None:
    slots = [one.slot for one in work]
    assert len(set(slots)) == len(slots) <= scheduler.n_slots
    read = [one for one in work if len(one.tokens) > 1]
    assert sum(len(one.tokens) for one in read) <= PREFILL
    generating = [job for job in scheduler.running if len(job.tokens) - job.n_computed == 1]
    assert {id(one.job) for one in work} >= {id(job) for job in generating}, "a long prompt holds up nobody"
    assert work or not scheduler.running, "there is always progress"
    for one in work:
        assert one.start == one.job.n_computed
        assert one.start // PREFILL == (one.start + len(one.tokens) - 1) // PREFILL, "cut at multiples"


texts = st.builds(
    lambda base, n, own, n_generate, seed: Text(
        Job(([base] * n + own) or [9]), len(([base] * n + own) or [9]), n_generate, seed
    ),
    st.integers(0, 1),
    st.integers(0, 30),
    st.lists(st.integers(0, 4), max_size=12),
    st.integers(1, 12),
    st.integers(0, 3),
)


@given(
    arrivals=st.lists(st.lists(texts, max_size=4), max_size=8),
    n_slots=st.integers(1, 5),
    reuse=st.sampled_from(["exact", "all", "off"]),
    seed=st.none() | st.integers(0, 100),
)
def test_texts_come_and_go_and_each_is_computed_as_by_itself(
    arrivals: list[list[Text]], n_slots: int, reuse: Reuse, seed: int | None
) -> None:
    scheduler, backend = Scheduler(n_slots, prefill_tokens=PREFILL, reuse=reuse), Backend(n_slots)
    for text in run(scheduler, backend, arrivals, None if seed is None else random.Random(seed)):
        alone = Text(Job(text.job.tokens[: text.n_prompt]), text.n_prompt, text.n_generate, text.seed)
        (expected,) = run(Scheduler(1, prefill_tokens=PREFILL), Backend(1), [[alone]])
        assert text.job.tokens == expected.job.tokens
    assert scheduler.n_slots_used == 0 and not scheduler.running and not scheduler.waiting


@given(arrivals=st.lists(st.lists(texts, max_size=3), max_size=8), n_slots=st.integers(1, 4))
def test_exact_reuse_shares_only_what_would_be_computed_in_the_same_chunks(
    arrivals: list[list[Text]], n_slots: int
) -> None:
    scheduler, backend = Scheduler(n_slots, prefill_tokens=PREFILL), Backend(n_slots)
    admit = scheduler.admit

    def checked() -> tuple[list[Job], list[Copy]]:
        admitted, copies = admit()
        for job in admitted:
            assert job.n_computed % PREFILL == 0
        return admitted, copies

    scheduler.admit = checked  # type: ignore[method-assign]
    for text in run(scheduler, backend, arrivals):
        assert text.done
    for slot, held in zip(scheduler._slots, backend.slots, strict=True):
        starts = [start for _, start in held[: slot.n_whole]]
        assert starts == [i - i % PREFILL for i in range(slot.n_whole)]


# ------------------------------------------------------------------------------------------------------ plain cases


def step(scheduler: Scheduler, *, grow: bool = True) -> list[tuple[int, int]]:
    """Do one step in which every text that has been read continues with token 0; return (start, tokens) of each
    chunk."""
    scheduler.admit()
    work = scheduler.plan()
    for one in work:
        scheduler.commit(one)
        if grow and one.n_logits:
            one.job.tokens.append(0)
    return [(one.start, len(one.tokens)) for one in work]


def test_a_long_prompt_is_read_while_others_generate() -> None:
    scheduler = Scheduler(3, prefill_tokens=PREFILL)
    scheduler.add(Job([1, 2, 3]))
    assert step(scheduler) == [(0, 3)]
    scheduler.add(Job([5] * 20))
    scheduler.add(Job([6, 6, 6]))
    assert step(scheduler) == [(3, 1), (0, 8)]
    assert step(scheduler) == [(4, 1), (8, 8)]
    assert step(scheduler) == [(5, 1), (16, 4), (0, 3)], "what is left of the step goes to the next prompt"
    assert step(scheduler) == [(6, 1), (20, 1), (3, 1)]


def test_a_conversation_continues_in_its_slot() -> None:
    scheduler = Scheduler(2, prefill_tokens=PREFILL, reuse="all")
    first = Job([1, 2, 3, 4])
    scheduler.add(first)
    step(scheduler)
    step(scheduler)
    slot = first.slot
    scheduler.finish(first)
    turn = Job([1, 2, 3, 4, 0, 7, 7])
    scheduler.add(turn)
    assert scheduler.admit() == ([turn], [])
    assert (turn.slot, turn.n_reused) == (slot, 5)
    assert step(scheduler) == [(5, 2)]


def test_a_shared_beginning_is_copied_from_a_text_that_runs() -> None:
    scheduler = Scheduler(3, prefill_tokens=PREFILL)
    first = Job([1] * 20)
    scheduler.add(first)
    step(scheduler), step(scheduler), step(scheduler)
    second = Job([1] * 17 + [2] * 5)
    scheduler.add(second)
    admitted, copies = scheduler.admit()
    assert first.slot is not None and second.slot is not None
    assert (admitted, copies) == ([second], [Copy(first.slot, second.slot, 16)])


def test_a_prompt_that_was_read_already_is_read_to_its_last_token_again_for_its_logits() -> None:
    for reuse, n_reused in (("exact", 8), ("all", 15), ("off", 0)):
        scheduler = Scheduler(1, prefill_tokens=PREFILL, reuse=reuse)
        first, again = Job([3] * 16), Job([3] * 16)
        scheduler.add(first)
        step(scheduler), step(scheduler)
        scheduler.finish(first)
        scheduler.add(again)
        scheduler.admit()
        assert again.n_reused == n_reused


def test_a_second_sample_reuses_the_complete_prompt() -> None:
    scheduler = Scheduler(2, prefill_tokens=PREFILL)
    first = Job([3] * 11)
    scheduler.add(first)
    step(scheduler, grow=False), step(scheduler, grow=False)
    twin = Job([3] * 11, knows_logits=True)
    scheduler.add(twin, first=True)
    _, copies = scheduler.admit()
    assert [copy.n_tokens for copy in copies] == [11]
    assert scheduler.plan() == [] and twin.n_computed == 11


def test_draft_tokens_that_are_not_accepted_are_forgotten() -> None:
    scheduler = Scheduler(1, prefill_tokens=PREFILL)
    job = Job([1, 2, 3])
    scheduler.add(job)
    step(scheduler)
    job.draft = [5, 6, 7]
    (work,) = scheduler.plan()
    assert (work.start, work.tokens, work.n_logits, work.n_draft) == (3, [0, 5, 6, 7], 4, 3)
    job.tokens += [5, 9]
    scheduler.commit(work, 2)  # 0 and 5 belong to the text, 6 and 7 do not
    assert job.n_computed == 5
    (work,) = scheduler.plan()
    assert (work.start, work.tokens) == (5, [9])


def test_the_text_used_longest_ago_is_forgotten_first() -> None:
    scheduler = Scheduler(2, prefill_tokens=PREFILL, reuse="all")
    for text in ([1] * 9, [2] * 9):
        job = Job(list(text))
        scheduler.add(job)
        step(scheduler), step(scheduler)
        scheduler.finish(job)
    again = Job([1] * 9 + [5])
    scheduler.add(again)
    scheduler.admit()
    assert again.n_reused == 9
    scheduler.finish(again)
    scheduler.add(Job([3] * 9))
    scheduler.admit()
    probe = Job([1] * 9 + [5])
    scheduler.add(probe)
    scheduler.admit()
    assert probe.n_reused == 9, "the new text took the slot of the twos"


def test_more_slots_start_waiting_jobs_and_keep_running_ones() -> None:
    scheduler = Scheduler(1, prefill_tokens=PREFILL)
    running, waiting = Job([1, 2]), Job([3])
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    scheduler.grow(4)
    assert scheduler.admit()[0] == [waiting]
    assert [(work.start, work.tokens) for work in scheduler.plan()] == [(2, [0]), (0, [3])]


def test_what_will_be_overwritten_is_not_reused_from_the_moment_it_is_planned() -> None:
    scheduler = Scheduler(3, prefill_tokens=PREFILL, reuse="all")
    old = Job([1] * 20)
    scheduler.add(old)
    step(scheduler), step(scheduler), step(scheduler)
    scheduler.finish(old)
    turn = Job([1] * 15 + [2] * 5)
    scheduler.add(turn)
    scheduler.admit()
    assert turn.slot == 0 and turn.n_reused == 15
    (work,) = scheduler.plan()
    late = Job([1] * 20)
    scheduler.add(late)
    assert scheduler.admit() == ([late], [Copy(0, 1, 15)]), "the last five of the old text's are gone"
    scheduler.commit(work)
    scheduler.finish(turn)
    assert scheduler.held == [16, 15, 0], "cut at a multiple of 8"


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_common_beginning(one: list[int], other: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert n_common_tokens(one, other) == expected
