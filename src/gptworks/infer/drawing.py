"""Use the logits of a step: score prompts, draw the next tokens of all texts together, and end finished texts.

A prompt is computed once; all samples of it begin from the same logits. In speculative decoding, a step computes a
text's last token together with draft tokens. A draft token is accepted if the model draws the same token, so a step
draws tokens of a text until one differs from the draft.
"""

from dataclasses import replace

from torch import Tensor

from gptworks.errors import RunError, UserError
from gptworks.infer.logprobs import TokenLogprob, token_logprobs
from gptworks.infer.request import Draw, OpenRequests
from gptworks.infer.sampling import sample
from gptworks.infer.scheduler import Job, Work
from gptworks.infer.text import Piece


def use_logits(work: Work, logits: Tensor, requests: OpenRequests) -> list[Draw]:
    """Score prompt tokens with the logits [n_logits, V] of `work`; return a `Draw` per sample that can now draw."""
    job, request = work.job, work.job.request
    request.scores.read(work, logits)
    if not work.n_draft:
        requests.room.scheduler.commit(work)
    if not work.is_last:
        return []
    if not request.samples:
        requests.deliver(request, Piece(0, "", None, "length"))
        if not request.done:
            requests.finish(request)
        return []
    draft = work.tokens[len(work.tokens) - work.n_draft :]
    last = logits if work.n_logits == 1 else logits[-1 - work.n_draft :]
    draws = [Draw(job, last, draft, work)]
    if request.first_logits is None and len(request.samples) > 1:
        request.first_logits = logits[-1:].clone()
        others = [Job(list(job.tokens), knows_logits=True, request=request, sample=one) for one in request.samples[1:]]
        requests.add(*others, first=True)  # the other samples reuse the prompt computed for the first
        draws += requests.admit()
    return draws


def draft_tokens(requests: OpenRequests) -> None:
    """Let the drafter, if there is one, propose draft tokens for each text in generation."""
    room = requests.room
    if room.drafter is None:
        return
    for job in room.scheduler.running:
        job.n_wanted = _n_wanted(job, requests)
    jobs = [job for job in room.scheduler.running if job.n_wanted > 0]
    for job, draft in zip(jobs, room.drafter.draft(jobs) if jobs else (), strict=True):
        constraint = job.sample.constraint
        job.draft = draft if constraint is None else draft[: constraint.accepts(draft)]


def _n_wanted(job: Job, requests: OpenRequests) -> int:
    """Return the maximum number of draft tokens for a running job; 0 if it is not generating or is about to end."""
    one, room, length = job.sample, requests.room, len(job.tokens)
    if one is None or not one.sampler.n_generated or length != job.n_computed + 1:
        return 0
    assert room.backend is not None
    capacity = room.backend.capacity
    if room.turns_at is not None and length <= room.turns_at:
        capacity = min(capacity, room.turns_at)  # LongRoPE uses other factors for longer texts
    n_left: int = one.settings.max_tokens - one.sampler.n_generated - 1
    return min(n_left, capacity - length)


def draw_tokens(draws: list[Draw], requests: OpenRequests) -> None:
    """Draw the next token of each sample, and further tokens as long as each drawn token equals its draft token."""
    live = draws
    while live:
        tokens = _sample(live, requests)
        # `_sample` returns no tokens for requests that it has failed.
        drawn = list(zip([draw for draw in live if not draw.request.done], tokens, strict=True))
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
                _end_step(draw, requests)
            except UserError as error:
                requests.fail(draw.request, error)


def _end_step(draw: Draw, requests: OpenRequests) -> None:
    """Record a draw's accepted draft tokens as cached. Then end the text if it is finished or its context is full.

    A text with a sliding window restarts instead of ending. A text also restarts if LongRoPE now needs long factors.
    """
    request, job, one, room = draw.request, draw.job, draw.sample, requests.room
    if draw.work is not None and draw.draft:
        n_accepted = draw.n_drawn - 1
        requests.statistics.draft_tokens += len(draw.draft)
        requests.statistics.accepted_tokens += n_accepted
        room.scheduler.commit(draw.work, len(draw.work.tokens) - len(draw.draft) + n_accepted)
    if one.finish_reason is None and len(job.tokens) > room.context:
        if request.overflow == "slide":
            room.scheduler.restart(job, one.ids[-room.restart_tokens :])
        else:
            requests.deliver(request, one.finish("context"))
    elif one.finish_reason is None and 0 < job.n_computed <= (room.turns_at or 0) < len(job.tokens):
        room.scheduler.restart(job, job.tokens)
    if one.finish_reason is not None and not request.done:
        requests.drop(job)
        if all(other.finish_reason is not None for other in request.samples):
            requests.finish(request)


def _sample(draws: list[Draw], requests: OpenRequests) -> list[tuple[int, TokenLogprob | None]]:
    """Return a token for each draw, with its processed log-probabilities if the settings ask for them. A request that
    fails here, for example because a logit is NaN, gets no tokens."""
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
    """Return a mask of the tokens that a draw's constraint allows; None: all. An error ends the request."""
    if draw.sample.constraint is None or draw.request.done:
        return None
    try:
        return draw.sample.constraint.allowed()
    except UserError as error:
        requests.fail(draw.request, error)
        return None


def _push(draw: Draw, token: int, processed: TokenLogprob | None, requests: OpenRequests) -> None:
    """Append a token to the sample's text, and deliver the resulting piece."""
    if draw.request.done:  # another sample of the request has failed
        return
    one, row = draw.sample, draw.row
    draw.n_drawn += 1
    try:
        piece = one.push(token)
    except UserError as error:  # the text's constraint failed, or its tokens cannot be decoded
        requests.fail(draw.request, error)
        return
    if piece.token_id is not None:
        wanted = one.settings.logprobs
        logprob = None if wanted is None else token_logprobs(row, [token], wanted)[0]
        piece = replace(piece, logprob=logprob, processed=processed, worked=requests.clock.seconds)
        draw.job.tokens.append(token)
        requests.statistics.generated_tokens += 1
    requests.deliver(draw.request, piece)
