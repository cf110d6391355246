"""Figures of evaluations, each computed from sums of the items' statistics, and their 95% bootstrap intervals (Efron,
1979) over items. sacrebleu computes BLEU and chrF; rouge-score computes ROUGE.
"""

import importlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gptworks.errors import not_installed

Floats = npt.NDArray[np.float64]
Figure = Callable[[Floats], Floats]
"""A function that takes R sums of the items' S statistics, float64 [R, S], and returns R figures, float64 [R]."""

RESAMPLES = 2000
_COUNTS_AT_ONCE = 1 << 22


def means(values: Sequence[float]) -> Floats:
    """Return the statistics [N, 2] of a figure that is the mean of the items' values."""
    return np.stack([np.asarray(values, dtype=np.float64), np.ones(len(values))], axis=1)


def share_of_best(scores: Sequence[float], right: Collection[int]) -> float:
    """Return an item's accuracy: the share of right choices among those with the highest score. A tie between a
    right and a wrong choice counts 1/2. A model that scores all choices equally has the accuracy of guessing. `right`
    has the indices of the right choices."""
    best = [i for i, score in enumerate(scores) if score == max(scores)]
    return sum(i in right for i in best) / len(best)


def figure_of(kind: str) -> Figure:
    """Return the function that computes a figure from sums of statistics.

    Args:
        kind: `mean` from [total, items]; `perplexity` from [nats, tokens]; `bits` per byte from [nats, bytes];
            `calibration` from [tokens, confidences, hits] in bins; `bleu` and `chrf` from sacrebleu's statistics.

    Raises:
        UserError: the kind is `bleu` or `chrf`, and sacrebleu is not installed.
    """
    if kind == "mean":
        return _ratio
    if kind == "perplexity":
        return lambda sums: np.exp(_ratio(sums))
    if kind == "bits":
        return lambda sums: _ratio(sums) / math.log(2)
    if kind == "calibration":
        return calibration_error
    metric = _scorer(kind)
    return lambda sums: np.array(
        [metric._compute_score_from_stats(row).score for row in sums.round().astype(int).tolist()]
    )


def calibration_error(sums: Floats) -> Floats:
    """Compute errors [R] from sums [R, 3·B]: Σ over bins |hits − confidences| / Σ tokens (Guo et al., 2017, eq. 3)."""
    tokens, confidences, hits = np.split(sums, 3, axis=1)
    error: Floats = np.abs(hits - confidences).sum(1) / tokens.sum(1)
    return error


def _ratio(sums: Floats) -> Floats:
    ratio: Floats = sums[:, 0] / sums[:, 1]
    return ratio


def text_statistics(metric: str, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[str, Floats]:
    """Return a metric's kind for `figure_of`, and the statistics [N, S] of texts with one or more references each.
    Raise a UserError if the library that computes the metric is not installed."""
    if metric in ("bleu", "chrf"):
        most = max(map(len, references))
        columns = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
        statistics = _scorer(metric)._extract_corpus_statistics(list(hypotheses), columns)
        return metric, np.array(statistics, dtype=np.float64)
    scorer = _scorer(metric)
    best = [
        max(scorer.score(reference, text)[metric].fmeasure for reference in refs)
        for text, refs in zip(hypotheses, references, strict=True)
    ]
    return "mean", means(best)


def check_libraries(metrics: Sequence[str]) -> None:
    """Raise a UserError if a library that one of the metrics needs is not installed."""
    for metric in metrics:
        _scorer(metric)


def _scorer(metric: str) -> Any:
    """Return the scorer of a metric from sacrebleu or rouge-score."""
    in_sacrebleu = {"bleu": "BLEU", "chrf": "CHRF"}.get(metric)
    try:
        if in_sacrebleu:
            return getattr(importlib.import_module("sacrebleu.metrics"), in_sacrebleu)()
        return importlib.import_module("rouge_score.rouge_scorer").RougeScorer([metric])
    except ImportError:
        raise not_installed("sacrebleu" if in_sacrebleu else "rouge-score", "evaluate", "this metric") from None


def pass_at_k(n_samples: int, n_right: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is right: 1 − C(n_samples − n_right, k) / C(n_samples, k)
    (Chen et al., 2021)."""
    return 1 - math.comb(n_samples - n_right, k) / math.comb(n_samples, k)


@dataclass(frozen=True)
class Interval:
    """A figure, or the difference of two figures, with the 95% bootstrap interval over resampled items."""

    value: float
    low: float
    high: float


def interval(statistics: Floats, figure: Figure) -> Interval:
    """Return the figure for the statistics [N, S] of N items, and its percentile interval over resampled items."""
    value = figure(statistics.sum(0, keepdims=True))
    low, high = np.nanquantile(np.concatenate([figure(sums) for sums in _sums(statistics)]), [0.025, 0.975])
    return Interval(float(value[0]), float(low), float(high))


def paired_difference(first: Floats, second: Floats, figure: Figure) -> Interval:
    """Return the figure of `second` minus the figure of `first`, with its interval. Both arrays are statistics [N, S]
    of the same N items, which are resampled together."""
    assert first.shape == second.shape
    width = first.shape[1]

    def difference(sums: Floats) -> Floats:
        return figure(sums[:, width:]) - figure(sums[:, :width])

    return interval(np.concatenate([first, second], axis=1), difference)


def _sums(statistics: Floats) -> Iterator[Floats]:
    """Yield sums over N items drawn with replacement, in chunks [rows, S]. The draws depend only on N."""
    n = len(statistics)
    random = np.random.default_rng(0)
    at_once = max(1, _COUNTS_AT_ONCE // n)
    for start in range(0, RESAMPLES, at_once):
        counts = random.multinomial(n, np.full(n, 1 / n), size=min(at_once, RESAMPLES - start))
        yield counts @ statistics
