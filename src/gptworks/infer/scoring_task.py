"""Scoring: the log-probabilities that the model gives a prompt's tokens, with or without a continuation."""

from torch import Tensor

from gptworks.infer.request import Draw, Listener, OpenRequests, Request
from gptworks.infer.room import Room
from gptworks.infer.sampling import TokenLogprob, token_logprobs
from gptworks.infer.scheduler import Job, Work
from gptworks.infer.text import Piece


class PromptScores:
    """Reads the log-probabilities of a prompt's tokens from the logits, as they are computed."""

    def __init__(self, prompt_ids: list[int], first: int, n_top: int) -> None:
        """
        Args:
            first: index of the first token to score, from 1; what stands before may be reused from other texts.
            n_top: how many of the likeliest tokens to report beside each.
        """
        self.prompt_ids, self.first, self.n_top = prompt_ids, first, n_top
        self.logprobs: list[TokenLogprob | None] = [None] * min(first, len(prompt_ids))

    def read(self, work: Work, logits: Tensor) -> None:
        """Score the tokens that the logits [n_logits, V] of a work predict."""
        if work.job.score_from is None:
            return
        first = work.start + len(work.tokens) - len(logits) + 1  # the token that the first row predicts
        tokens = self.prompt_ids[first : first + len(logits)]
        if tokens:
            self.logprobs[first:] = token_logprobs(logits[: len(tokens)], tokens, self.n_top)
        if work.is_last:
            work.job.score_from = None


class ScoringTask(Request):
    """A prompt that is read for its log-probabilities alone; one piece reports that it is done.

    The prompt's last token is not read, so that the prompt may be one token longer than the context.
    """

    def __init__(
        self, number: int, prompt_ids: list[int], scores: PromptScores | None, listener: Listener | None
    ) -> None:
        super().__init__(number, prompt_ids, 1, listener)
        self._scores = scores
        self.prompt_logprobs = None if scores is None else scores.logprobs

    def first_job(self, room: Room) -> Job:
        read = room.window(self.prompt_ids[:-1] or self.prompt_ids)
        return Job(read, score_from=None if self._scores is None else self._scores.first - 1)

    def most_tokens(self, job: Job) -> int:
        return len(job.tokens)

    def on_logits(self, work: Work, logits: Tensor, requests: OpenRequests) -> list[Draw]:
        if self._scores is not None:
            self._scores.read(work, logits)
        requests.room.scheduler.commit(work)
        if work.is_last:
            self.deliver(Piece(0, "", None, "length"))
            requests.finish(self)
        return []
