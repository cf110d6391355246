"""Judge one change after another from paired gains, with one bound on the errors of the whole campaign.

Within a try, the evidence is an e-process for "the mean gain is 0 or less" with unknown variance: the likelihood ratio
of the scale-invariant statistic, with a half-normal prior of scale g on the effect size gain / deviation. This is the
right-Haar t-test of Pérez-Ortiz, Lardy, de Heide and Grünwald, "E-statistics, group invariance and anytime-valid
testing" (Annals of Statistics, 2024), with the Gaussian mixture of Wang and Ramdas, "Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance" (Sequential Analysis, 2024), here one-sided. With t the
one-sample t statistic of n gains:

    e = 2 (1 + n g²)^(-1/2) w^(-n/2) T_n(q),    w = (n − 1 + t² / (1 + n g²)) / (n − 1 + t²),    q = s √(n v / w),
    s = t √(n / (n − 1 + t²)),    v = g² / (1 + n g²),    T_n: the distribution function of Student's t, n degrees

For normal gains with mean 0, e is a martingale that starts at 1. By Ville's inequality, e ever reaches 1/a with
probability at most a, whatever rule stops the try. A negative mean only makes e smaller, because t grows when a
constant is added to all gains. The bound holds for each try given all earlier tries, since a try's seeds are fresh.

Over tries, try k spends the share γ_k = 10 / ((k + 9) (k + 10)) of the error: 9% for the first, 0.3% for the 50th. The
shares of any number of tries add up to less than 1. A gain is accepted at e ≥ 1 / level. `family`: the level is
error · γ_k, so the probability of any false gain is at most `error`. `discoveries`: the level of e-LOND (Xu and Ramdas,
"Online multiple testing with e-values", AISTATS 2024) is error · γ_k · (1 + the number of gains accepted before). The
expected share of false gains among the accepted gains is then at most `error`, whatever the dependence between tries.
For e-LOND, the e-value of a try is 1 / level if its e-process ever reaches 1 / level, else 0. The rule that stops a try
may therefore depend on anything.

These bounds need normal gains. To protect against other noise, the deviation of a try is replaced by a minimum if it is
smaller. The minimum follows from the largest deviations of the other tries, see `spread_floor`. A typical deviation,
such as the median, would not protect, because changes with almost no effect deviate little and may be in the majority.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

from gptworks.runs.statistics import FEWEST_PAIRS, end_of, t_two_sided

Control = Literal["family", "discoveries"]
Answer = Literal["gain", "tie", "harm", "open"]

EFFECT_SCALE = 3.0
"""Scale g of the prior on the effect size. With 2 to 4, the tries that decide most campaigns (effects of 2 to 6
deviations) need the fewest pairs."""

LEAST_SPREAD = 0.7
"""Minimum deviation of a try, as a share of a large deviation among the other tries, see `spread_floor`.

This floor only lowers the evidence, so the bounds above still hold. Without the floor, noise that is skewed or has two
peaks makes small numbers of gains agree by chance far more often than normal noise does. Up to half of simulated
campaigns then err. With the floor, normal gains need about one pair more, or several pairs more if some changes make
training unstable."""

FLATNESS = 10
"""The number 10 in the shares γ_k. With a larger number, levels fall more slowly. 10 suits campaigns of 10 to 100
tries."""


@dataclass(frozen=True)
class Judgement:
    """The conclusion from the gains so far."""

    answer: Answer
    """`gain`: the change is accepted. `tie`: any gain is below the minimum worthwhile gain. `harm`: the mean gain is
    below 0. `open`: not decided."""
    pairs: int
    gain: float
    """Mean gain. A gain is the loss without the change minus the loss with the change."""
    low: float
    high: float
    """Confidence sequence: `low` to `high` holds the true mean gain after every pair, with probability 95%."""
    log_e: float
    """Natural logarithm of the e-value."""
    deviation: float
    """Standard deviation of the gains; 0 for fewer than three gains."""


def level(error: float, control: Control, number: int, accepted: int) -> float:
    """Return the level of try `number` (from 1) after `accepted` accepted changes: a gain needs e ≥ 1 / level."""
    share = FLATNESS / ((number + FLATNESS - 1) * (number + FLATNESS))
    return error * share * (1 if control == "family" else 1 + accepted)


def judged(gains: Sequence[float], at_level: float, worth: float, least_deviation: float = 0.0) -> Judgement:
    """Return the conclusion from the gains of a try, one for each pair. The answer `gain` needs e ≥ 1 / `at_level` and
    a mean of at least `worth`. For `least_deviation`, see `spread_floor`."""
    n = len(gains)
    mean = fmean(gains) if gains else 0.0
    if n < FEWEST_PAIRS:
        return Judgement("open", n, mean, -math.inf, math.inf, 0.0, 0.0)
    deviation = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (n - 1))
    scale = max(deviation, least_deviation) / math.sqrt(n)
    log_e = log_e_value(math.copysign(math.inf, mean) if scale == 0 and mean else mean / (scale or 1.0), n)
    margin = critical_t(n, SHOWN_ERROR / 2) * scale if scale else 0.0
    low, high = mean - margin, mean + margin
    answer: Answer = "open"
    if log_e >= -math.log(at_level) and mean >= worth:
        answer = "gain"
    elif high < 0:
        answer = "harm"
    elif high < worth:
        answer = "tie"
    return Judgement(answer, n, mean, low, high, log_e, deviation)


SHOWN_ERROR = 0.05
"""Error probability of each confidence sequence that is shown."""


def spread_floor(others: Iterable[Judgement | None]) -> float:
    """Return the minimum to assume for the deviation of a try's gains, from the judgements of the other tries.

    The result is `LEAST_SPREAD` times the k-th largest of the n deviations above 0, with k = ⌊√n⌋: the largest of up to
    3, the 2nd of up to 8, the 7th of 50. It is 0 if no other try has a deviation above 0.

    If k tries deviate as much as the noise does, the result is at least `LEAST_SPREAD` times the noise, however little
    the other tries deviate. Fewer than k unstable tries do not raise the result above `LEAST_SPREAD` times the largest
    stable deviation.
    """
    deviations = sorted(one.deviation for one in others if one is not None and one.deviation > 0)
    return LEAST_SPREAD * deviations[-math.isqrt(len(deviations))] if deviations else 0.0


def log_e_value(t: float, n: int) -> float:
    """Return the logarithm of the e-value of two or more gains with the one-sample t statistic `t` (may be ±inf)."""
    ratio = 1.0 if math.isinf(t) else t * t / (n - 1 + t * t)  # s² / n
    room = 1 + n * EFFECT_SCALE**2
    w = 1 - ratio + ratio / room
    q = math.copysign(math.sqrt(ratio * n * n * EFFECT_SCALE**2 / room / w), t)
    upper = t_two_sided(q, n) / 2
    below = 1 - upper if q >= 0 else upper
    return math.log(2) - math.log(room) / 2 - n / 2 * math.log(w) + math.log(max(below, 1e-300))


@cache
def critical_t(n: int, at_level: float) -> float:
    """Return the t statistic at which n gains have the e-value 1 / at_level; infinity if no t statistic is enough."""
    wanted = -math.log(at_level)
    if log_e_value(math.inf, n) <= wanted:
        return math.inf
    return end_of(lambda t: log_e_value(t, n) < wanted)
