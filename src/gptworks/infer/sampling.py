"""Sample the next tokens of many texts from their logits, each text with its own settings and random numbers.

    logits ─► bias, penalties, bans ─► greedy: the most likely token
                                    └► temperature ─► top-k ─► top-p ─► min-p ─► draw

The steps follow Hugging Face's order. Rows are computed independently, so a text's tokens do not depend on other texts.

Shapes: B texts, V vocabulary, K candidates.
"""

import dataclasses
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.choices import SAMPLING, SAMPLING_RULES
from gptworks.errors import RunError, UserError, did_you_mean
from gptworks.infer.logprobs import TokenLogprob
from gptworks.infer.penalties import Repeats, adjust
from gptworks.model.cache import on_device

_GREEDY_BELOW = 1e-5
"""Temperatures below this value count as 0 (greedy), because a division by them might overflow float32."""

CANDIDATES = 256
"""Number of most likely tokens that the filters search first. All tokens are sorted only if a filter keeps more."""

_BLOCK = 256
"""Number of weights in a block. `draw` first finds a block, by the sums of the blocks, then a token in the block."""

_LOGITS_AT_ONCE = 2**18
"""Maximum number of logits in one pass on a CPU, so that they stay in its cache. For 32 × 50,257 logits, sampling takes
7 ms instead of 27."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings that decide how tokens are chosen and when a text ends.

    Raises:
        UserError: a value is outside its range.
    """

    temperature: float = SAMPLING.temperature
    """Divides the logits. 0 (or below 1e-5): greedy, always the most likely token."""
    top_k: int = SAMPLING.top_k
    """Keep the k most likely tokens, and tokens tied with the k-th. 0: keep all."""
    top_p: float = SAMPLING.top_p
    """Keep the smallest set of most likely tokens with a total probability ≥ top_p (Holtzman et al., 2020). 1: all."""
    min_p: float = SAMPLING.min_p
    """Keep tokens at least min_p times as likely as the most likely one (Nguyen et al., 2024). 0: keep all."""
    repetition_penalty: float = SAMPLING.repetition_penalty
    """Above 1: tokens of the prompt and of the generated text become less likely (Keskar et al., 2019). 1: off."""
    frequency_penalty: float = SAMPLING.frequency_penalty
    """Number subtracted from a token's logit for each time it was generated (OpenAI's definition). 0: off."""
    presence_penalty: float = SAMPLING.presence_penalty
    """Number subtracted once from the logit of each token that was already generated (OpenAI's definition). 0: off."""
    dry_multiplier: float = SAMPLING.dry_multiplier
    """Above 0: subtract multiplier · base^(n − allowed) from the logit of a token that would continue a repetition of
    earlier text, where n ≥ allowed is the number of tokens repeated so far (see `Repeats`). 0: off."""
    dry_base: float = SAMPLING.dry_base
    """Factor by which the penalty of `dry_multiplier` grows with each repeated token."""
    dry_allowed_length: int = SAMPLING.dry_allowed_length
    """Number of tokens that may repeat earlier text before `dry_multiplier` has an effect."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Number to add to a token's logit, by token id. −inf: the token is never chosen; a large number: nearly always."""
    seed: int | None = None
    """The same seed gives the same text. None: a random seed."""
    max_tokens: int = SAMPLING.max_tokens
    """Maximum number of generated tokens."""
    min_tokens: int = SAMPLING.min_tokens
    """Tokens that end the text are banned until this many tokens are generated. Stop strings still end the text."""
    ignore_eos: bool = False
    """Treat the end-of-text token like any other."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings that appears in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the text like the end-of-text token, such as the token that ends a chat turn."""
    logprobs: int | None = None
    """Report the model's log-probability of each generated token, and of this many most likely tokens at its position,
    before penalties, temperature and filters. None: report nothing."""
    processed_logprobs: int | None = None
    """Like `logprobs`, but in the distribution that the token was drawn from: after bias, penalties, bans, grammar,
    temperature and filters. Tokens that these steps drop are left out; greedy sampling keeps one token. None: report
    nothing."""
    heal: bool = False
    """Draw the end of a text prompt again, so that the continuation does not depend on where the prompt's last token
    ends (`gptworks.infer.healing`). The generated tokens repeat the end of the prompt; the generated text does not.
    This has no effect if the prompt consists of token ids, if json_schema, regex or prompt log-probabilities are given,
    or if the tokenizer's tokens do not spell text by themselves."""
    json_schema: str | Mapping[str, Any] | None = None
    """The text is JSON that satisfies this schema ({}: any JSON). Needs the `constrain` extra."""
    regex: str | None = None
    """The complete text matches this regular expression. Needs the `constrain` extra."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", {int(token): float(bias) for token, bias in self.logit_bias.items()})
        for name, holds, rule in (
            *(
                (name, rule.allows(getattr(self, name)), f"{rule}; the default is {getattr(SAMPLING, name):g}")
                for name, rule in SAMPLING_RULES.items()
            ),
            ("logit_bias", all(bias < math.inf for bias in self.logit_bias.values()), "numbers, or -inf for never"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens={self.max_tokens}"),
            ("stop", all(self.stop), "strings that are not empty; leave it out for none"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more, or None (off)"),
            ("processed_logprobs", (self.processed_logprobs or 0) >= 0, "0 or more, or None (off)"),
            ("regex", self.regex is None or self.json_schema is None, "left out where json_schema is given"),
        ):
            if not holds:
                raise UserError(f"{name}={getattr(self, name)}: it must be {rule}.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < _GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @classmethod
    def of(cls, settings: Self | None = None, **changes: Any) -> Self:
        """Return a copy of `settings` (default: SamplingSettings()) with the changes given as keywords.

        Raises:
            UserError: a keyword is unknown, or a value is outside its range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in changes:
            if name not in known:
                hint = did_you_mean(name, known, f"; known: {', '.join(known)}.")
                raise UserError(f"unknown sampling setting `{name}`{hint}")
        return dataclasses.replace(settings or cls(), **changes)

    def ending_at(self, tokens: Sequence[int]) -> Self:
        """Return the settings with `tokens` added to `stop_token_ids`, unless `ignore_eos` is set."""
        ends = () if self.ignore_eos else tokens
        return dataclasses.replace(self, stop_token_ids=tuple(dict.fromkeys((*self.stop_token_ids, *ends))))


class Sampler:
    """The sampling state of one text: its settings, its random numbers, and the token counts for penalties."""

    def __init__(
        self, settings: SamplingSettings, prompt: Sequence[int] = (), index: int = 0, ends: tuple[int, ...] = ()
    ) -> None:
        """
        Args:
            prompt: the tokens that the text continues.
            index: the sample's index within its request; each sample has its own random numbers.
            ends: the tokenizer's tokens that end a text.
        """
        self.settings = settings
        self.n_generated = 0
        self.ends = (() if settings.ignore_eos else ends) + settings.stop_token_ids
        """Tokens that end the text."""
        self._chance = random.Random() if settings.seed is None else random.Random(f"{settings.seed}/{index}")
        self._drawn: deque[float] = deque()
        self.seen = Counter(prompt) if settings.repetition_penalty != 1 else None
        self.generated = Counter[int]() if settings.frequency_penalty or settings.presence_penalty else None
        self.repeats = Repeats(prompt) if settings.dry_multiplier else None

    def push(self, token: int) -> None:
        """Record the text's next token, for limits and penalties."""
        self.n_generated += 1
        for counts in (self.seen, self.generated):
            if counts is not None:
                counts[token] += 1
        if self.repeats is not None:
            self.repeats.push(token)

    def share(self, ahead: int = 0) -> float:
        """Return the random number, in (0, 1], of a future draw. ahead: 0 for the next draw, 1 for the one after it."""
        while len(self._drawn) <= ahead:
            self._drawn.append(1 - self._chance.random())
        return self._drawn[ahead]

    def next_share(self) -> float:
        """Remove and return the random number of the next draw, in (0, 1]."""
        share = self.share()
        self._drawn.popleft()
        return share

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that may not come next: `ends` until `min_tokens` tokens are generated, then no token."""
        return self.ends if self.n_generated < self.settings.min_tokens else ()

    @property
    def adjusts(self) -> bool:
        """Whether a bias, a penalty or a ban changes the next logits."""
        return bool(self.seen or self.generated or self.repeats or self.settings.logit_bias or self.banned)


def sample(
    logits: Tensor | Sequence[Tensor],
    samplers: Sequence[Sampler],
    allowed: Sequence[Tensor | None] | None = None,
    processed: dict[int, TokenLogprob] | None = None,
) -> list[int]:
    """Return the next token of each text. The caller then pushes it into the text's sampler.

    Each draw, unless greedy, uses one random number, made on the CPU, so that a seed gives the same draws on every
    device.

    Args:
        logits: [B, V], or its rows, each [1, V], in any float dtype. They are converted to float32.
        allowed: for each text, a mask of the tokens that may come next, bool [V]; None: all.
        processed: receives the log-probabilities of the texts that set `processed_logprobs`, by row number.

    Raises:
        RunError: a logit is NaN.
    """
    rows = torch.split(logits, 1) if isinstance(logits, Tensor) else logits
    if len({row.device for row in rows}) > 1:
        rows = [row.cpu() for row in rows]
    on_cuda = rows[0].device.type == "cuda"
    adjusts = allowed is not None or any(sampler.adjusts for sampler in samplers)
    if not on_cuda and not adjusts and processed is None and all(sampler.settings.greedy for sampler in samplers):
        found = [_likeliest(row[0]) for row in rows]
        _refuse_nan(any(math.isnan(score) for _, score in found))
        return [token for token, _ in found]
    logits = (logits if isinstance(logits, Tensor) else torch.cat([*rows])).float()
    has_nan = logits.amax(-1).isnan().any()
    if not on_cuda:
        _refuse_nan(bool(has_nan))
    if adjusts:
        logits = adjust(logits, samplers, allowed)
    shares = [1.0 if sampler.settings.greedy else sampler.share() for sampler in samplers]
    tokens = pick(logits, [sampler.settings for sampler in samplers], shares, processed, has_nan if on_cuda else None)
    for sampler in samplers:
        if not sampler.settings.greedy:
            sampler.next_share()
    return tokens


def pick(
    logits: Tensor,
    settings: Sequence[SamplingSettings],
    shares: Sequence[float],
    processed: dict[int, TokenLogprob] | None = None,
    has_nan: Tensor | None = None,
) -> list[int]:
    """Choose a token for each row of logits [B, V] by the row's random number in `shares`, each in (0, 1].

    The token is the first id at which the cumulative probability, after temperature and filters, reaches the random
    number; greedy rows take the most likely token. On CUDA, the host reads all tokens at once. It waits for the device
    again only for `processed`, and for rows that the `CANDIDATES` most likely tokens do not decide.

    Args:
        processed: see `sample`.
        has_nan: a bool tensor, whether a logit is NaN, which the host reads with the tokens. None: no logit is NaN.

    Raises:
        RunError: `has_nan` is true.
    """
    device, n = logits.device, len(settings)
    tokens, share = torch.empty(n, dtype=torch.int64, device=device), on_device(shares, device, torch.float64)
    doubtful = torch.zeros_like(tokens)
    pools: dict[int, tuple[Tensor, Tensor]] = {}
    for rows, choose in (
        ([i for i, s in enumerate(settings) if s.greedy], _pick_likeliest),
        ([i for i, s in enumerate(settings) if not s.greedy and not s.filtered], _pick_of_all),
        ([i for i, s in enumerate(settings) if not s.greedy and s.filtered], _pick_of_candidates),
    ):
        n_at_once = max(1, _LOGITS_AT_ONCE // logits.size(-1)) if device.type == "cpu" else n
        for first in range(0, len(rows), n_at_once):
            some = rows[first : first + n_at_once]
            adjacent = some[-1] - some[0] + 1 == len(some)
            place = slice(some[0], some[-1] + 1) if adjacent else on_device(some, device)
            picked = choose(logits[place], [settings[i] for i in some], share[place])
            tokens[place] = picked.tokens
            if picked.certain is not None:
                doubtful[place] = (~picked.certain).long()
            if processed is not None:
                pools |= {row: picked.pool(i) for i, row in enumerate(some)}
    read = torch.cat((tokens, doubtful, *(() if has_nan is None else (has_nan.long()[None],)))).tolist()
    _refuse_nan(any(read[2 * n :]))
    chosen: list[int] = read[:n]
    for row in (row for row in range(n) if read[n + row]):
        scores = logits[row : row + 1] / _column([settings[row].temperature], logits)
        weights = weigh(filter_whole(scores, settings[row]))
        chosen[row] = int(draw(weights, share[row : row + 1]))
        pools[row] = torch.arange(weights.size(-1), device=device), weights[0]
    if processed is not None:
        for row, pool in pools.items():
            if (n_top := settings[row].processed_logprobs) is not None:
                processed[row] = _processed(chosen[row], *pool, n_top)
    return chosen


class _Picked(NamedTuple):
    tokens: Tensor
    """The token of each row, int64 [B]."""
    certain: Tensor | None
    """Whether each row's token is final, bool [B]. The other rows choose again from all tokens. None: all are final."""
    pool: Callable[[int], tuple[Tensor, Tensor]]
    """Returns, for a row number, the distribution that the row's token was drawn from: ids [K], weights [K]."""


def _pick_likeliest(logits: Tensor, settings: Sequence[SamplingSettings], share: Tensor) -> _Picked:
    on_cpu = logits.device.type == "cpu"
    tokens = torch.tensor([_likeliest(row)[0] for row in logits]) if on_cpu else logits.argmax(-1)
    return _Picked(tokens, None, lambda row: (tokens[row : row + 1], torch.ones(1, device=logits.device)))


def _likeliest(logits: Tensor) -> tuple[int, float]:
    """Return the most likely token of logits [V], the lowest id if tied, and its logit, NaN if any logit is NaN.

    numpy's argmax is ten times as fast as torch's.
    """
    scores = logits.float().cpu().numpy()
    token = int(scores.argmax())
    return token, float(scores[token])


def _refuse_nan(found: bool) -> None:
    if found:
        raise RunError("the model's scores are not numbers (NaN): its training diverged, or its checkpoint is damaged.")


def _pick_of_all(logits: Tensor, settings: Sequence[SamplingSettings], share: Tensor) -> _Picked:
    weights = weigh(logits / _column([s.temperature for s in settings], logits))
    ids = torch.arange(weights.size(-1), device=weights.device)
    return _Picked(draw(weights, share), None, lambda row: (ids, weights[row]))


def _pick_of_candidates(logits: Tensor, settings: Sequence[SamplingSettings], share: Tensor) -> _Picked:
    """Filter and draw among the `CANDIDATES` most likely tokens; `_filter` decides which rows are certain."""
    scores = logits / _column([s.temperature for s in settings], logits)
    values, ids = scores.topk(min(CANDIDATES, scores.size(-1)))  # B K
    kept, certain = _filter(scores, values, settings)
    ids, order = ids.sort(-1)
    weights = (values - values[:, :1]).exp().masked_fill(~kept, 0.0).gather(1, order).double()
    cumulative = weights.cumsum(-1)
    place = torch.searchsorted(cumulative, share[:, None] * cumulative[:, -1:])
    tokens = ids.gather(1, place.clamp(max=ids.size(-1) - 1))[:, 0]  # NaN: place is past the end
    return _Picked(tokens, certain, lambda row: (ids[row], weights[row]))


def _processed(token: int, ids: Tensor, weights: Tensor, n_top: int) -> TokenLogprob:
    """Return the log-probability of a token drawn from `ids` [K] by `weights` [K], and of the `n_top` most likely."""
    logprobs = (weights.double() / weights.sum(dtype=torch.float64)).log()
    best = logprobs.topk(min(n_top, int((weights > 0).sum())))
    top = tuple(zip(ids[best.indices].tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[ids == token]), top)


def _filter(scores: Tensor, values: Tensor, settings: Sequence[SamplingSettings]) -> tuple[Tensor, Tensor]:
    """Filter the K best scores of each row: `values` [B, K], in descending order, from `scores` [B, V].

    Returns which values to keep, bool [B, K], and which rows are certain, bool [B]. A row is certain if no score
    outside the K best would be kept, and top-p does not separate tied values.
    """
    size, n = scores.size(-1), values.size(-1)
    rank = torch.arange(n, device=values.device)
    top_k = _column([s.top_k or size for s in settings], values, torch.int64).clamp(max=size)
    top_p, min_p = _column([s.top_p for s in settings], values), _column([s.min_p for s in settings], values)
    all_seen = torch.full_like(top_k, n == size, dtype=torch.bool)  # B 1

    kth_best = values.gather(1, (top_k - 1).clamp(max=n - 1))
    by_k = (values >= kth_best) | (top_k >= size)
    ends_by_k = all_seen | ((top_k < n) & (values[:, -1:] < kth_best))

    inside = values.masked_fill(~by_k, -math.inf).logsumexp(-1, keepdim=True)
    normalizer = torch.where(top_k < size, inside, scores.logsumexp(-1, keepdim=True))
    probabilities = (values - normalizer).exp().masked_fill(~by_k, 0.0)
    mass_before = probabilities.cumsum(-1) - probabilities
    by_p = (mass_before < top_p) | (rank == 0) | (top_p == 1)
    ends_by_p = all_seen | ~by_p[:, -1:]
    n_by_p = by_p.sum(-1, keepdim=True)  # by_p is true on a prefix, so its sum is the size of the nucleus
    last, following = values.gather(1, n_by_p - 1), values.gather(1, n_by_p.clamp(max=n - 1))
    tied = (n_by_p < n) & (last == following) & by_k.gather(1, n_by_p.clamp(max=n - 1))

    by_min_p = values >= values[:, :1] + min_p.log()
    ends = ends_by_k | (top_k >= size) & (ends_by_p | ~by_min_p[:, -1:])
    return by_k & by_p & by_min_p, (ends & ~tied)[:, 0]


def filter_whole(scores: Tensor, settings: SamplingSettings) -> Tensor:
    """Return the scores [B, V] with −inf for each token that the filters drop."""
    values, order = scores.sort(descending=True, stable=True)
    kept, _ = _filter(scores, values, [settings] * len(scores))
    return scores.masked_fill(torch.zeros_like(kept).scatter(1, order, ~kept), -math.inf)


def weigh(scores: Tensor) -> Tensor:
    """Return unnormalized probabilities of scores [B, V]; the largest of each row is 1."""
    return (scores - scores.amax(-1, keepdim=True)).exp()


def draw(weights: Tensor, share: Tensor) -> Tensor:
    """Return the first token of each row of weights [B, V] at which the cumulative weight reaches `share` of the sum.

    `share` is [B], in (0, 1]. Only the blocks' sums and one block of weights are accumulated in double precision.
    """
    blocks = F.pad(weights, (0, -weights.size(-1) % _BLOCK)).view(len(weights), -1, _BLOCK)  # B, n blocks, _BLOCK
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # B, n blocks
    target = share[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target).clamp(max=ends.size(-1) - 1)  # B, 1; NaN gives an index past the end
    before = F.pad(ends, (1, 0)).gather(1, block)
    inner = blocks[torch.arange(len(block), device=block.device), block[:, 0]].double().cumsum(-1)  # B, _BLOCK
    place = torch.searchsorted(inner, torch.minimum(target - before, inner[:, -1:]))
    return (block * _BLOCK + place)[:, 0]


def _column(numbers: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the numbers as a tensor [B, 1] with the device of `like`, and with its dtype unless `dtype` is given."""
    return on_device(numbers, like.device, dtype or like.dtype)[:, None]
