"""Sampling: continuations of a prompt, a token a step, or several where draft tokens are accepted.

A prompt is read once; its other samples begin from the same logits. All texts' next tokens are drawn together. With a
drafter, draft tokens are computed beside a text's last token (speculative decoding). A draft token is accepted where
the model draws the same token itself, so that the draws of a step go on as long as they equal the draft.
"""

from dataclasses import replace

from torch import Tensor

from gptworks.errors import RunError, UserError
from gptworks.infer.logprobs import PromptScores, TokenLogprob, token_logprobs
from gptworks.infer.request import Draw, Listener, ListenerFailed, OpenRequests, Overflow, Request
from gptworks.infer.sampling import sample
from gptworks.infer.scheduler import Job, Work
from gptworks.infer.speculate import Draftable
from gptworks.infer.text import Sample


class SamplingTask(Request):
    """Samples of one prompt, and the log-probabilities of the prompt's tokens where asked for."""

    def __init__(
        self,
        number: int,
        prompt_ids: list[int],
        samples: list[Sample],
        overflow: Overflow,
        scores: PromptScores,
        listener: Listener | None,
    ) -> None:
        super().__init__(number, prompt_ids, len(samples), listener, scores)
        self.samples, self.overflow = samples, overflow
        self._first_logits: Tensor | None = None  # [1, V] after the prompt, for the samples still to come

    @property
    def n_to_come(self) -> int:
        return sum(one.finish_reason is None for one in self.samples) - len(self.jobs)

    def most_tokens(self, job: Job) -> int:
        one = self.samples[self.jobs[job]]
        return len(job.tokens) + one.settings.max_tokens - one.n_generated

    def close(self) -> None:
        super().close()
        self._first_logits = None

    def on_logits(self, work: Work, logits: Tensor, requests: OpenRequests) -> list[Draw]:
        job = work.job
        self.scores.read(work, logits)
        if not work.n_draft:
            requests.room.scheduler.commit(work)
        if not work.is_last:
            return []
        draft = work.tokens[len(work.tokens) - work.n_draft :]
        last = logits if work.n_logits == 1 else logits[-1 - work.n_draft :]
        draws = [Draw(self, self.samples[self.jobs[job]], job, last, draft, work)]
        if self._first_logits is None and len(self.samples) > 1:
            self._first_logits = logits[-1:].clone()
            twins = {Job(list(job.tokens), knows_logits=True): i for i in range(1, len(self.samples))}
            requests.add(self, twins, first=True)  # the other samples go on from the prompt that the first has read
            draws += requests.admit()
        return draws

    def on_ready(self, job: Job) -> Draw:
        assert self._first_logits is not None
        return Draw(self, self.samples[self.jobs[job]], job, self._first_logits)

    def on_drawn(self, draw: Draw, requests: OpenRequests) -> None:
        """Keep what was computed of accepted draft tokens; end what has ended."""
        job, one, room = draw.job, draw.sample, requests.room
        if draw.work is not None and draw.draft:
            n_accepted = draw.n_drawn - 1
            requests.statistics.draft_tokens += len(draw.draft)
            requests.statistics.accepted_tokens += n_accepted
            room.scheduler.commit(draw.work, len(draw.work.tokens) - len(draw.draft) + n_accepted)
        if one.finish_reason is None and len(job.tokens) > room.context:
            if self.overflow == "slide":
                room.scheduler.restart(job, one.ids[-room.restart_tokens :])
            else:
                self.deliver(one.finish("context"))
        elif one.finish_reason is None and 0 < job.n_computed <= (room.turns_at or 0) < len(job.tokens):
            room.scheduler.restart(job, job.tokens)
        if one.finish_reason is not None:
            requests.drop(job)
            if all(other.finish_reason is not None for other in self.samples):
                requests.finish(self)

    def draftable(self, job: Job, capacity: int, turns_at: int | None) -> Draftable | None:
        """What a drafter needs to know of a running job; None: it is not generating, or about to end.

        Args:
            turns_at: as `Room.turns_at`.
        """
        one, length = self.samples[self.jobs[job]], len(job.tokens)
        if turns_at is not None and length <= turns_at:
            capacity = min(capacity, turns_at)  # what is longer is computed with other factors
        n_wanted = min(one.settings.max_tokens - one.n_generated - 1, capacity - length)
        if not one.n_generated or n_wanted <= 0 or len(job.tokens) != job.n_computed + 1:
            return None
        assert job.slot is not None
        return Draftable(one, job.slot, job.tokens, n_wanted)


def draft_tokens(requests: OpenRequests) -> None:
    """Let the drafter propose what may follow the texts that are being generated."""
    room = requests.room
    if room.drafter is None:
        return
    assert room.backend is not None
    texts: list[tuple[Job, Draftable]] = []
    for job in room.scheduler.running:
        task = requests.of(job)
        text = task.draftable(job, room.backend.capacity, room.turns_at) if isinstance(task, SamplingTask) else None
        if text is not None:
            texts.append((job, text))
    if not texts:
        return
    for (job, text), draft in zip(texts, room.drafter.draft([text for _, text in texts]), strict=True):
        constraint = text.sample.constraint
        job.draft = draft if constraint is None else draft[: constraint.accepts(draft)]


def draw_tokens(draws: list[Draw], requests: OpenRequests) -> None:
    """Draw the next token of each sample, and go on with those whose token is the draft's."""
    live = draws
    while live:
        tokens = _sample(live, requests)
        drawn = list(zip([draw for draw in live if not draw.request.done], tokens, strict=True))  # some may have failed
        for draw, (token, processed) in drawn:
            _push(draw, token, processed, requests)
        live = [
            draw
            for draw, (token, _) in drawn
            if not draw.request.done
            and draw.n_drawn <= len(draw.draft)
            and draw.draft[draw.n_drawn - 1] == token
            and draw.sample.finish_reason is None
        ]
    for draw in draws:
        if not draw.request.done:
            try:
                draw.request.on_drawn(draw, requests)
            except (UserError, ListenerFailed) as error:
                requests.fail(draw.request, error)


def _sample(draws: list[Draw], requests: OpenRequests) -> list[tuple[int, TokenLogprob | None]]:
    """A token for each draw, and where asked for what it was drawn from, except for requests that fail, because a score
    is not a number for instance."""
    masks = [_allowed(draw, requests) for draw in draws]
    live = [(draw, mask) for draw, mask in zip(draws, masks, strict=True) if not draw.request.done]
    if not live:
        return []
    rows = [draw.row for draw, _ in live]
    allowed = [mask for _, mask in live] if any(mask is not None for mask in masks) else None
    wanted = any(draw.sample.settings.processed_logprobs is not None for draw, _ in live)
    processed: dict[int, TokenLogprob] | None = {} if wanted else None
    try:
        tokens = sample(rows, [draw.sample.sampler for draw, _ in live], allowed, processed)
        return [(token, processed.get(row) if processed else None) for row, token in enumerate(tokens)]
    except RunError as error:
        for (draw, _), row in zip(live, rows, strict=True):
            if row.isnan().any() and not draw.request.done:
                requests.fail(draw.request, error)
        return _sample([draw for draw, _ in live], requests)


def _allowed(draw: Draw, requests: OpenRequests) -> Tensor | None:
    """The tokens that a draw's constraint allows; its request fails where the constraint cannot say."""
    if draw.sample.constraint is None or draw.request.done:
        return None
    try:
        return draw.sample.constraint.allowed()
    except UserError as error:
        requests.fail(draw.request, error)
        return None


def _push(draw: Draw, token: int, processed: TokenLogprob | None, requests: OpenRequests) -> None:
    """Append a token to its text, and deliver the piece that comes of it."""
    if draw.request.done:  # another of its samples has failed
        return
    one, row = draw.sample, draw.row
    draw.n_drawn += 1
    try:
        piece = one.push(token)
    except UserError as error:  # its constraint cannot go on, or its tokens cannot be decoded
        requests.fail(draw.request, error)
        return
    if piece.token_id is not None:
        wanted = one.settings.logprobs
        logprob = None if wanted is None else token_logprobs(row, [token], wanted)[0]
        piece = replace(piece, logprob=logprob, processed=processed, worked=requests.clock.seconds)
        draw.job.tokens.append(token)
        requests.statistics.generated_tokens += 1
    try:
        draw.request.deliver(piece)
    except ListenerFailed as error:
        requests.fail(draw.request, error)
