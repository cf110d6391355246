"""Sampling: the filters against Hugging Face's, draws against their distribution, and invalid settings."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from gptworks.errors import RunError, UserError
from gptworks.infer import sampling
from gptworks.infer.logprobs import TokenLogprob, token_logprobs
from gptworks.infer.sampling import (
    CANDIDATES,
    Sampler,
    SamplingSettings,
    adjust,
    filter_whole,
    pick,
    sample,
    weigh,
)
from gptworks.infer.sampling import (
    draw as draw_from,
)

NO_HISTORY = torch.empty(0, 0, dtype=torch.int64)


def random_logits(seed: int, rows: int = 4, vocabulary: int = 300, scale: float = 4.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: Tensor, settings: SamplingSettings, history: list[list[int]] | None = None) -> list[int]:
    """Draw a token for each row; with a seed, row i is sample i."""
    rows = logits.size(0)
    return sample(logits, [Sampler(settings, text, i) for i, text in enumerate(history or [[]] * rows)])


def adjusted(logits: Tensor, settings: SamplingSettings, prompt: list[int], generated: list[int], eos: int) -> Tensor:
    """Return one row of logits after bias, penalties and bans."""
    sampler = Sampler(settings, prompt, ends=(eos,))
    for token in generated:
        sampler.push(token)
    return adjust(logits, [sampler])


def survivors(scores: Tensor) -> Tensor:
    return scores > -math.inf


# ---------------------------------------------------------------------------------------- against Hugging Face


@pytest.mark.parametrize("k", [1, 2, 40, 299, 300, 10_000])
def test_top_k_keeps_what_hugging_face_keeps(k: int) -> None:
    logits = random_logits(k)
    assert torch.equal(filter_whole(logits, SamplingSettings(top_k=k)), hf.TopKLogitsWarper(k)(NO_HISTORY, logits))


def test_top_k_keeps_ties_with_the_last() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    assert survivors(filter_whole(logits, SamplingSettings(top_k=2))).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_top_p_keeps_what_hugging_face_keeps(p: float, scale: float) -> None:
    logits = random_logits(1, rows=20, scale=scale)
    assert torch.equal(filter_whole(logits, SamplingSettings(top_p=p)), hf.TopPLogitsWarper(p)(NO_HISTORY, logits))


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.4]]).log()
    for p, kept in ((0.45, [1]), (0.55, [1, 2]), (0.85, [1, 2]), (0.95, [0, 1, 2])):
        assert survivors(filter_whole(logits, SamplingSettings(top_p=p)))[0].nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("p", [1e-6, 0.01, 0.1, 0.5, 0.99])
def test_min_p_keeps_what_hugging_face_keeps(p: float) -> None:
    logits = random_logits(2, rows=20)
    assert torch.equal(filter_whole(logits, SamplingSettings(min_p=p)), hf.MinPLogitsWarper(p)(NO_HISTORY, logits))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_is_hugging_faces(penalty: float) -> None:
    logits = random_logits(3)
    history = torch.randint(300, (4, 50), generator=torch.Generator().manual_seed(3))
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
    settings = SamplingSettings(repetition_penalty=penalty)
    assert torch.equal(adjust(logits, [Sampler(settings, text) for text in history.tolist()]), expected)


def test_repetition_penalty_lowers_negative_logits_and_counts_a_token_once() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    sampler = Sampler(SamplingSettings(repetition_penalty=2.0), [0, 1, 1, 1])
    assert adjust(logits, [sampler]).tolist() == [[1.0, -4.0, 1.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0]], "the caller's logits stay as they were"


@pytest.mark.parametrize("generated", [[], [5], [5, 9, 5, 5, 7]])
def test_frequency_and_presence_penalties_are_as_openai_defines_them(generated: list[int]) -> None:
    """logit − count · frequency − [count > 0] · presence, where only generated tokens count, not the prompt."""
    logits = random_logits(4, rows=1)
    settings = SamplingSettings(frequency_penalty=0.7, presence_penalty=-0.4)
    expected = logits.clone()
    for token in range(logits.size(1)):
        n = generated.count(token)
        expected[0, token] -= n * 0.7 + (n > 0) * -0.4
    torch.testing.assert_close(adjusted(logits, settings, [3, 9, 9], generated, 0), expected)


def test_logit_bias_is_hugging_faces_sequence_bias() -> None:
    logits, bias = random_logits(4, rows=1), {3: 2.5, 299: -4.0, 7: -math.inf}
    expected = hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(
        torch.zeros(1, 1, dtype=torch.int64), logits
    )
    assert torch.equal(adjusted(logits, SamplingSettings(logit_bias=bias), [1], [], 0), expected)


@pytest.mark.parametrize("n_generated", [0, 2, 3, 9])
def test_min_tokens_is_hugging_faces(n_generated: int) -> None:
    logits, eos = random_logits(4, rows=1), 11
    ids = torch.tensor([[1, 2, *[3] * n_generated]])
    expected = hf.MinNewTokensLengthLogitsProcessor(2, 3, eos)(ids, logits)
    settings = SamplingSettings(min_tokens=3, logit_bias={0: 0.0})
    assert torch.equal(adjusted(logits, settings, [1, 2], [3] * n_generated, eos), expected)


def test_bias_comes_before_the_repetition_penalty_as_in_hugging_face() -> None:
    logits, ids = random_logits(4, rows=1), torch.tensor([[3, 7]])
    expected = hf.SequenceBiasLogitsProcessor({(3,): 5.0})(ids, logits)
    expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, expected)
    settings = SamplingSettings(logit_bias={3: 5.0}, repetition_penalty=1.7)
    assert torch.equal(adjusted(logits, settings, [3, 7], [], 0), expected)


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
    """Check that Pearson's chi-square is within 4 standard deviations of its mean, and nothing impossible is drawn."""
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


# --------------------------------------------------------------------------------------------- many texts at once

MIXED = [
    SamplingSettings(temperature=0), SamplingSettings(seed=1), SamplingSettings(seed=2, top_k=5),
    SamplingSettings(seed=3, top_p=0.6), SamplingSettings(seed=4, min_p=0.1, temperature=1.3),
    SamplingSettings(seed=5, top_k=280, top_p=0.97, temperature=1.5), SamplingSettings(seed=6, top_p=0.99999),
    SamplingSettings(seed=7, repetition_penalty=1.5, frequency_penalty=0.3, top_k=50, top_p=0.9, min_p=0.01),
    SamplingSettings(temperature=0, presence_penalty=2.0, logit_bias={4: 3.0}), SamplingSettings(seed=8, min_tokens=9),
    SamplingSettings(seed=9, dry_multiplier=1, dry_allowed_length=1),
]  # fmt: skip


@pytest.mark.parametrize("scale", [0.2, 4.0])
def test_a_text_does_not_depend_on_other_texts(scale: float) -> None:
    """The tokens of ten draws each, from 1,000 tokens, are equal alone, together, and in another order."""
    rows = torch.stack([random_logits(i, rows=len(MIXED), vocabulary=1000, scale=scale) for i in range(10)])

    def texts(order: list[int]) -> dict[int, list[int]]:
        samplers = {i: Sampler(MIXED[i], [1, 2, 3], ends=(0,)) for i in order}
        made: dict[int, list[int]] = {i: [] for i in order}
        for step in rows:
            for i, token in zip(order, sample(step[order], [samplers[i] for i in order]), strict=True):
                samplers[i].push(token)
                made[i].append(token)
        return made

    together = texts(list(range(len(MIXED))))
    assert texts(list(reversed(range(len(MIXED))))) == together
    for i in range(len(MIXED)):
        assert texts([i]) == {i: together[i]}


@pytest.mark.parametrize("scale", [0.05, 1.0, 5.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1}, {"top_k": CANDIDATES - 1}, {"top_k": CANDIDATES}, {"top_k": CANDIDATES + 1}, {"top_p": 0.01},
        {"top_p": 0.5}, {"top_p": 0.999}, {"min_p": 0.3}, {"min_p": 1e-6}, {"top_k": 100, "top_p": 0.8},
        {"top_k": 100, "min_p": 0.05}, {"top_k": 900, "top_p": 0.2, "min_p": 0.02}, {"top_p": 0.7, "min_p": 0.2},
    ],
    ids=str,
)  # fmt: skip
def test_looking_among_candidates_first_changes_no_draw(settings: dict[str, float], scale: float) -> None:
    """Compared with filters over all tokens, with many tied logits: 40 rows, and shares from 0 to 1."""
    wanted = SamplingSettings(**settings, temperature=0.9)
    logits = (random_logits(11, rows=40, vocabulary=2000, scale=scale) * 8).round() / 8
    shares = torch.linspace(0.01, 1, 40, dtype=torch.float64)
    expected = draw_from(weigh(filter_whole(logits / 0.9, wanted)), shares).tolist()
    assert pick(logits, [wanted] * 40, shares.tolist()) == expected


def test_all_tokens_are_sorted_only_if_the_filter_keeps_more_than_the_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    monkeypatch.setattr(sampling, "filter_whole", lambda scores, s: rows.append(len(scores)) or filter_whole(scores, s))
    logits = torch.cat([random_logits(1, rows=3, vocabulary=5000, scale=5.0), torch.zeros(1, 5000)])
    pick(logits, [SamplingSettings(top_p=0.9, temperature=1.0)] * 4, [0.5] * 4)
    assert rows == [1]


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 257, 1000])
def test_a_draw_by_blocks_finds_the_token_at_each_share(vocabulary: int) -> None:
    logits = random_logits(2, rows=1, vocabulary=vocabulary, scale=2.0)
    if vocabulary > 3:
        logits[:, [0, vocabulary // 2, -1]] = -math.inf
    shares = torch.linspace(1e-9, 1, 501, dtype=torch.float64)
    cumulative = (logits[0] - logits.max()).exp().double().cumsum(0)
    drawn = draw_from(weigh(logits.expand(501, -1)), shares)
    reached = cumulative[drawn] / cumulative[-1]
    before = torch.where(drawn > 0, cumulative[drawn - 1], 0) / cumulative[-1]
    assert (reached >= shares - 1e-12).all() and (before <= shares + 1e-12).all()
    assert (logits[0, drawn] > -math.inf).all()


def test_a_mask_allows_what_it_says() -> None:
    logits = random_logits(3, rows=3, vocabulary=10)
    only = torch.zeros(10, dtype=torch.bool)
    only[logits[0].argmin()] = True
    settings = [SamplingSettings(temperature=0), SamplingSettings(temperature=0), SamplingSettings(seed=1)]
    tokens = sample(logits, [Sampler(s) for s in settings], [only, None, only])
    assert tokens == [int(logits[0].argmin()), int(logits[1].argmax()), int(logits[0].argmin())]


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits(3, rows=2, vocabulary=10)
    expected = logits.log_softmax(-1)
    for row, told in enumerate(token_logprobs(logits, [4, 7], 3)):
        assert told.token_id == [4, 7][row]
        assert told.logprob == pytest.approx(expected[row, told.token_id].item(), abs=1e-5)
        best = expected[row].topk(3)
        assert [token for token, _ in told.top] == best.indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert token_logprobs(logits, [4, 7], 0)[0].top == ()


def test_the_rank_of_a_token_counts_those_that_are_likelier() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 3.0]] * 4)
    assert [told.rank for told in token_logprobs(logits, [0, 1, 2, 3], 0)] == [4, 1, 3, 1]


def processed(
    logits: Tensor, samplers: list[Sampler], allowed: list[Tensor | None] | None = None
) -> list[TokenLogprob]:
    """Return the distribution from which each row's next token is drawn."""
    told: dict[int, TokenLogprob] = {}
    tokens = sample(logits, samplers, allowed, told)
    assert [told[row].token_id for row in range(len(logits))] == tokens
    return [told[row] for row in range(len(logits))]


def in_float64(
    logits: Tensor, settings: SamplingSettings, prompt: list[int], generated: list[int], allowed: Tensor, eos: int
) -> list[float]:
    """Return a row's probabilities after all filters, computed token by token from the definitions."""
    scores = {i: float(x) + settings.logit_bias.get(i, 0.0) for i, x in enumerate(logits.tolist()) if allowed[i]}
    for i in {*prompt, *generated} & scores.keys():
        penalty = settings.repetition_penalty
        scores[i] *= penalty if scores[i] < 0 else 1 / penalty
    for i in set(generated) & scores.keys():
        scores[i] -= generated.count(i) * settings.frequency_penalty + settings.presence_penalty
    if len(generated) < settings.min_tokens:
        scores.pop(eos, None)
    weights = {i: math.exp(x / settings.temperature) for i, x in scores.items()}
    order = sorted(weights, key=lambda i: -weights[i])
    order = order[: settings.top_k or None]
    total, before, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if kept and (before >= settings.top_p * total or weights[i] < settings.min_p * weights[order[0]]):
            break
        kept.append(i)
        before += weights[i]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


PROCESSED: list[dict[str, Any]] = [
    {}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.6}, {"min_p": 0.05, "temperature": 1.5},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"logit_bias": {3: 4.0, 7: -math.inf}, "min_tokens": 5},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3, "top_p": 0.95},
]  # fmt: skip


@pytest.mark.parametrize("scale", [0.2, 4.0], ids=["beyond the candidates", "among them"])
def test_processed_log_probabilities_are_those_of_the_draw(scale: float) -> None:
    """All settings in one batch and each alone give equal bits, and equal a float64 computation within rounding."""
    logits, eos, prompt, generated = random_logits(11, len(PROCESSED), 400, scale), 5, [1, 2, 2, 9], [2, 8, 8]
    allowed = torch.ones(400, dtype=torch.bool)
    allowed[logits[0].topk(3).indices] = False
    masks: list[Tensor | None] = [allowed, *[None] * (len(PROCESSED) - 1)]
    wanted = [SamplingSettings(**{"temperature": 0.9, "seed": 4} | one, processed_logprobs=400) for one in PROCESSED]

    def samplers() -> list[Sampler]:
        made = [Sampler(settings, prompt, i, (eos,)) for i, settings in enumerate(wanted)]
        for sampler in made:
            for token in generated:
                sampler.push(token)
        return made

    together = processed(logits, samplers(), masks)
    for row, told in enumerate(together):
        assert [told] == processed(logits[row : row + 1], samplers()[row : row + 1], masks[row : row + 1])
        mask = masks[row] if masks[row] is not None else torch.ones(400, dtype=torch.bool)
        expected = in_float64(logits[row], wanted[row], prompt, generated, mask, eos)
        assert dict(told.top).keys() == {i for i, p in enumerate(expected) if p}
        assert all(value == pytest.approx(math.log(expected[i]), abs=1e-5) for i, value in told.top)
        assert told.logprob == dict(told.top)[told.token_id]
        assert [value for _, value in told.top] == sorted((value for _, value in told.top), reverse=True)


def test_draws_follow_the_processed_log_probabilities() -> None:
    settings = SamplingSettings(temperature=1.3, top_k=6, top_p=0.97, seed=3, processed_logprobs=6)
    logits = random_logits(6, rows=1, vocabulary=12, scale=1.0)
    (told,) = processed(logits, [Sampler(settings)])
    probabilities = torch.zeros(12)
    for token, value in told.top:
        probabilities[token] = math.exp(value)
    assert_drawn_from(probabilities, draw(logits.expand(5000, -1), settings))


def test_a_greedy_choice_is_drawn_from_one_token() -> None:
    logits = random_logits(8, rows=2, vocabulary=20)
    greedy, drawn = SamplingSettings(temperature=0, processed_logprobs=3), SamplingSettings(processed_logprobs=3)
    best = int(logits[0].argmax())
    for told in processed(logits, [Sampler(greedy), Sampler(drawn)])[0], processed(logits[:1], [Sampler(greedy)])[0]:
        assert told == TokenLogprob(best, 0.0, ((best, 0.0),))


def test_nothing_is_reported_unless_requested() -> None:
    told: dict[int, TokenLogprob] = {}
    settings = SamplingSettings(logprobs=3), SamplingSettings(processed_logprobs=0), SamplingSettings(temperature=0)
    sample(random_logits(8, rows=3), [Sampler(one) for one in settings], None, told)
    assert told.keys() == {1} and told[1].top == ()


# ------------------------------------------------------------------------------------------------ the settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_p", 0.0),
        ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.0), ("repetition_penalty", 0.0), ("max_tokens", 0),
        ("stop", ("",)), ("frequency_penalty", math.inf), ("presence_penalty", math.nan), ("logprobs", -1),
        ("min_tokens", 201), ("logit_bias", {3: math.inf}), ("dry_multiplier", -1), ("dry_multiplier", math.nan),
        ("dry_base", 0.5), ("dry_allowed_length", 0), ("dry_allowed_length", 51), ("frequency_penalty", -100.5),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        SamplingSettings.of(**{name: value})
    assert f"{name}={value}" in str(error.value)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean `temperature`"):
        SamplingSettings.of(temprature=1.0)


def test_settings_by_name_change_given_settings() -> None:
    settings = SamplingSettings.of(SamplingSettings(seed=1, top_k=5), top_k=6, stop="\n")
    assert (settings.seed, settings.top_k, settings.stop) == (1, 6, ("\n",))
