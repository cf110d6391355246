"""Score or continue many texts; the engine batches them and computes common prefixes once."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from gptworks.errors import UserError
from gptworks.infer.batch import run_many
from gptworks.infer.engine import Engine
from gptworks.infer.request import Completion, Request
from gptworks.infer.sampling import SamplingSettings

SLOTS = 16
"""Number of slots of the engine, and maximum number of requests submitted at a time."""

_CONTEXTS = SLOTS // 2
"""Number of contexts scored at a time. Spare slots let a context stay cached until all its continuations are scored."""

Progress = Callable[[int, int], None]
"""A function called with the number of items done and the total; measurements on text count tokens."""


@dataclass(frozen=True)
class Scored:
    """The score of a continuation."""

    logprob: float
    """Sum of the log-probabilities of the continuation's tokens, in nats."""
    n_tokens: int
    greedy: bool
    """Whether each token of the continuation was the most probable one."""


def encode_pair(
    encode: Callable[[str], list[int]], context: str, continuation: str, encode_rest: Callable[[str], list[int]]
) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of its continuation, split as lm-evaluation-harness splits them.

    White space at the end of the context moves to the continuation. Context and continuation are encoded together, and
    split after as many tokens as the context has by itself. If a token crosses the border, the split is near the
    border. If no token would remain for the continuation, the continuation is encoded by itself.

    Args:
        encode: encodes a text from its beginning.
        encode_rest: encodes a text that continues another text, without tokens that begin a text.

    Raises:
        UserError: the continuation has no tokens.
    """
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    before, whole = encode(context), encode(context + continuation)
    if not context and whole[: len(before)] != before:  # `encode` returns the separator only for an empty text
        whole = before + whole
    after = whole[len(before) :] or encode_rest(continuation)
    if not after:
        raise UserError(f"the continuation {continuation!r} of {context[-40:]!r} adds no token to it.")
    return before, after


def score_pairs(
    engine: Engine,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    progress: Progress = lambda done, total: None,
) -> list[Scored]:
    """Compute the log-probability of each continuation after its context.

    If a pair is longer than the model's context plus one token, its first tokens are dropped.

    Args:
        pairs: token ids of context and continuation, at least one each.

    Raises:
        UserError: a continuation is empty or longer than the model's context, or ids are outside the vocabulary.
        RunError: the model's scores are not numbers.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (context, continuation) in enumerate(pairs):
        if not continuation:
            raise UserError(f"the continuation of item {i + 1} has no tokens of its own.")
        if len(continuation) > engine.context:
            raise UserError(f"a continuation has {len(continuation)} tokens and the model's context {engine.context}.")
        groups.setdefault(tuple(context), []).append(i)
    others = iter(groups.values())
    waiting = deque(group[0] for group in itertools.islice(others, _CONTEXTS))
    unfinished = {context: len(group) for context, group in groups.items()}
    found: dict[int, Scored] = {}

    def submit(i: int) -> Request:
        context, continuation = pairs[i]
        ids = [*context, *continuation][-engine.context - 1 :]
        return engine.submit(ids, prompt_logprobs=1, score_from=len(ids) - len(continuation), generates=False)

    def next_pairs(n: int) -> list[int]:
        return [waiting.popleft() for _ in range(min(n, len(waiting)))]

    for i, request in finished(engine, next_pairs, submit):
        found[i] = _scored(request, len(pairs[i][1]))
        progress(len(found), len(pairs))
        context = tuple(pairs[i][0])
        unfinished[context] -= 1
        group = groups[context]
        if not unfinished[context]:
            waiting.extendleft(next_group[0] for next_group in itertools.islice(others, 1))
        elif i == group[0]:  # the rest of the group waited for this pair to compute the common context
            waiting.extendleft(group[1:])
    return [found[i] for i in range(len(pairs))]


def _scored(request: Request, n_tokens: int) -> Scored:
    assert request.prompt_logprobs is not None
    scored = [one for one in request.prompt_logprobs[-n_tokens:] if one is not None]
    assert len(scored) == n_tokens
    return Scored(sum(one.logprob for one in scored), n_tokens, all(one.top[0][0] == one.token_id for one in scored))


def complete_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[SamplingSettings],
    n_samples: int = 1,
    progress: Progress = lambda done, total: None,
) -> list[list[Completion]]:
    """Generate `n_samples` continuations of each prompt (token ids), with the settings at the prompt's index.

    Raises:
        UserError: a prompt is empty or longer than the context, or a setting is impossible.
        RunError: the model's scores are not numbers.
    """
    made: dict[int, list[Completion]] = {}
    numbers = iter(range(len(prompts)))

    def submit(i: int) -> Request:
        return engine.submit(prompts[i], settings[i], n_samples=n_samples)

    for i, request in finished(engine, lambda n: itertools.islice(numbers, n), submit):
        made[i] = request.completions()
        progress(len(made), len(prompts))
    return [made[i] for i in range(len(prompts))]


def finished(
    engine: Engine, next_jobs: Callable[[int], Iterable[int]], submit: Callable[[int], Request]
) -> Iterator[tuple[int, Request]]:
    """Yield finished requests with their job numbers, as `run_many` does, but raise the first error."""
    with closing(run_many(engine, next_jobs, submit, SLOTS)) as ended:
        for i, request in ended:
            if isinstance(request, Exception):
                raise request
            yield i, request
