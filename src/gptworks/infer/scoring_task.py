"""Scoring: the log-probabilities of a prompt's tokens, without a continuation."""

from torch import Tensor

from gptworks.infer.request import Draw, ListenerFailed, OpenRequests, Request
from gptworks.infer.scheduler import Work
from gptworks.infer.text import Piece


class ScoringTask(Request):
    """A prompt that is read for its log-probabilities alone; one piece reports that it is done.

    The prompt's last token is not read, so that the prompt may be one token longer than the context.
    """

    @property
    def ids_to_read(self) -> list[int]:
        return self.prompt_ids[:-1] or self.prompt_ids

    def on_logits(self, work: Work, logits: Tensor, requests: OpenRequests) -> list[Draw]:
        self.scores.read(work, logits)
        requests.room.scheduler.commit(work)
        if work.is_last:
            try:
                self.deliver(Piece(0, "", None, "length"))
            except ListenerFailed as error:
                requests.fail(self, error)
            else:
                requests.finish(self)
        return []
