"""Sampling: the filters against Hugging Face's, the draw against its distribution, the settings against nonsense."""

import math

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from gptworks.errors import RunError, UserError
from gptworks.infer.sampling import (
    SamplingSettings,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    sample,
)

NO_HISTORY = torch.empty(0, 0, dtype=torch.int64)


def random_logits(seed: int, rows: int = 4, vocabulary: int = 300, scale: float = 4.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: Tensor, settings: SamplingSettings, history: list[list[int]] | None = None) -> list[int]:
    rows = logits.size(0)
    return sample(logits, history or [[]] * rows, settings, [settings.chance(i) for i in range(rows)]).tolist()


def survivors(scores: Tensor) -> Tensor:
    return scores > -math.inf


# ---------------------------------------------------------------------------------------- against Hugging Face


@pytest.mark.parametrize("k", [1, 2, 40, 299, 300, 10_000])
def test_top_k_keeps_what_hugging_face_keeps(k: int) -> None:
    logits = random_logits(k)
    assert torch.equal(keep_top_k(logits, k), hf.TopKLogitsWarper(k)(NO_HISTORY, logits))


def test_top_k_keeps_ties_with_the_last() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    assert survivors(keep_top_k(logits, 2)).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_top_p_keeps_what_hugging_face_keeps(p: float, scale: float) -> None:
    logits = random_logits(1, rows=20, scale=scale)
    assert torch.equal(keep_top_p(logits, p), hf.TopPLogitsWarper(p)(NO_HISTORY, logits))


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.4]]).log()
    for p, kept in ((0.45, [1]), (0.55, [1, 2]), (0.85, [1, 2]), (0.95, [0, 1, 2])):
        assert survivors(keep_top_p(logits, p))[0].nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("p", [1e-6, 0.01, 0.1, 0.5, 0.99])
def test_min_p_keeps_what_hugging_face_keeps(p: float) -> None:
    logits = random_logits(2, rows=20)
    assert torch.equal(keep_min_p(logits, p), hf.MinPLogitsWarper(p)(NO_HISTORY, logits))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_is_hugging_faces(penalty: float) -> None:
    logits = random_logits(3)
    history = torch.randint(300, (4, 50), generator=torch.Generator().manual_seed(3))
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
    assert torch.equal(penalize_repetition(logits, history.tolist(), penalty), expected)


def test_repetition_penalty_lowers_negative_logits_and_counts_a_token_once() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    assert penalize_repetition(logits, [[0, 1, 1, 1]], 2.0).tolist() == [[1.0, -4.0, 1.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0]], "the caller's logits stay as they were"


def test_the_order_of_the_filters_is_hugging_faces() -> None:
    """4,000 draws reach exactly the tokens that Hugging Face's chain leaves, with its frequencies."""
    logits, history = random_logits(5, rows=1, vocabulary=30, scale=2.0), [[3, 3, 7, 11]]
    settings = SamplingSettings(temperature=0.7, top_k=12, top_p=0.9, min_p=0.03, repetition_penalty=1.5, seed=1)
    scores = logits
    for processor in (
        hf.RepetitionPenaltyLogitsProcessor(1.5), hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(12),
        hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.03),
    ):  # fmt: skip
        scores = processor(torch.tensor(history), scores)
    drawn = draw(logits.expand(4000, -1), settings, history * 4000)
    assert_drawn_from(scores.softmax(-1)[0], drawn)


# ---------------------------------------------------------------------------------------------------- the draw


def assert_drawn_from(probabilities: Tensor, drawn: list[int]) -> None:
    """Pearson's chi-square stays within 4 standard deviations of its mean, and nothing impossible is drawn."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities)).double()
    assert not counts[probabilities == 0].any()
    possible = probabilities > 0
    expected = probabilities[possible].double() * len(drawn)
    assert expected.min() > 5, "too few draws for the test to mean anything"
    freedom = int(possible.sum()) - 1
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = random_logits(6, rows=1, vocabulary=12, scale=1.0)
    drawn = draw(logits.expand(20_000, -1), SamplingSettings(temperature=temperature, seed=2))
    assert_drawn_from((logits[0] / temperature).softmax(-1), drawn)


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_temperature_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(7, rows=50)
    assert draw(logits, SamplingSettings(temperature=temperature)) == logits.argmax(-1).tolist()


def test_greedy_heeds_the_repetition_penalty() -> None:
    assert draw(torch.tensor([[1.0, 0.9]]), SamplingSettings(temperature=0, repetition_penalty=2.0), [[0]]) == [1]


def test_a_filter_that_leaves_one_token_always_gives_it() -> None:
    logits = random_logits(8, rows=500)
    best = logits.argmax(-1).tolist()
    for settings in (SamplingSettings(top_k=1), SamplingSettings(top_p=1e-6), SamplingSettings(min_p=0.999999)):
        assert draw(logits, settings) == best


def test_seeds_repeat_and_differ_by_sample_and_by_seed() -> None:
    logits = torch.zeros(8, 1000)
    one, again = draw(logits, SamplingSettings(seed=1)), draw(logits, SamplingSettings(seed=1))
    assert one == again
    assert one[:3] == draw(logits[:3], SamplingSettings(seed=1)), "sample i does not depend on how many there are"
    assert len(set(one)) > 4
    assert one != draw(logits, SamplingSettings(seed=2))
    assert draw(logits, SamplingSettings()) != draw(logits, SamplingSettings())


def test_half_precision_logits_are_computed_in_float32() -> None:
    half = random_logits(9, rows=500).bfloat16()
    settings = SamplingSettings(temperature=0.7, top_p=0.9, seed=3)
    assert draw(half, settings) == draw(half.float(), settings)


def test_scores_that_are_not_numbers_are_reported() -> None:
    with pytest.raises(RunError, match="NaN"):
        draw(torch.tensor([[0.0, math.nan]]), SamplingSettings())


# ------------------------------------------------------------------------------------------------ the settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_p", 0.0),
        ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.0), ("repetition_penalty", 0.0), ("max_tokens", 0),
        ("stop", ("",)),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        SamplingSettings.of(**{name: value})
    assert f"{name}={value}" in str(error.value)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean `temperature`"):
        SamplingSettings.of(temprature=1.0)


def test_settings_given_by_name_change_those_given_whole() -> None:
    settings = SamplingSettings.of(SamplingSettings(seed=1, top_k=5), top_k=6, stop="\n")
    assert (settings.seed, settings.top_k, settings.stop) == (1, 6, ("\n",))
