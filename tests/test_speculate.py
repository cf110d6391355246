"""Draft tokens change only how fast a text is generated, not its tokens or their probabilities."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gptworks.errors import UserError
from gptworks.infer import Engine, SamplingSettings
from gptworks.infer.sampling import Sampler
from gptworks.infer.scheduler import Job
from gptworks.infer.speculate import Drafter, DraftModel, HeadsDraft, PromptLookup
from gptworks.infer.text import Sample
from gptworks.model.gpt import GPT
from gptworks.quantize.convert import quantize_model
from test_engine import CONTEXT, byte_tokenizer, chain_model, char_tokenizer, random_model, writing
from test_sampling import assert_drawn_from

TOKENIZER = char_tokenizer()


def engine(model: Any, **options: Any) -> Engine:
    return Engine(model, TOKENIZER, backend="torch", **options)


def noisy_twin(model: Any, noise: float) -> Any:
    """Return a model that mostly agrees with another."""
    twin = random_model(TOKENIZER, seed=0).double().eval()
    twin.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return twin


MODEL = random_model(TOKENIZER, init_std=0.2).double().eval()
"""In float64: what is computed beside a text, or in other parts, changes no draw on any processor."""


@torch.no_grad()
def model_with_heads(**settings: Any) -> GPT:
    """Return the model with random heads for two tokens beyond the next."""
    model = random_model(TOKENIZER, init_std=0.2, n_future_tokens=3, **settings).eval()
    for head in model.future_heads:
        head.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    return model


@pytest.mark.parametrize(
    ("model", "drafter"),
    [
        (MODEL, lambda: PromptLookup(4, 2)),
        (MODEL, lambda: DraftModel(noisy_twin(MODEL, 0.02), 3, backend="torch")),
        (model_with_heads().double(), HeadsDraft),
    ],
    ids=["lookup", "model", "heads"],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0, "repetition_penalty": 1.3}, {"seed": 1},
        {"seed": 2, "top_p": 0.8, "top_k": 6, "repetition_penalty": 1.1},
        {"seed": 3, "frequency_penalty": 0.5, "stop": "ab", "logprobs": 1, "processed_logprobs": 2},
        {"seed": 4, "temperature": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_texts_are_those_without_drafts(model: GPT, drafter: Any, settings: dict[str, Any]) -> None:
    """Over several windows and several samples at once, with partly right drafts."""
    sampling = SamplingSettings(**settings, max_tokens=3 * CONTEXT)
    one = engine(model, drafter=drafter())
    for prompt in ("abcabcabc", "j", "hhhh"):
        made = one.complete(prompt, sampling, n_samples=3, overflow="slide")
        expected = engine(model).complete(prompt, sampling, n_samples=3, overflow="slide")
        assert [(c.text, c.token_ids, c.finish_reason) for c in made] == [
            (c.text, c.token_ids, c.finish_reason) for c in expected
        ]
        for ours, theirs in zip(made, expected, strict=True):
            for told, expected_of in (
                (ours.logprobs, theirs.logprobs), (ours.processed_logprobs, theirs.processed_logprobs)
            ):  # fmt: skip
                assert [p.token_id for p in told or []] == [p.token_id for p in expected_of or []]
                assert [p.logprob for p in told or []] == pytest.approx(
                    [p.logprob for p in expected_of or []], abs=1e-4
                )
    statistics = one.statistics()
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens
    assert statistics.generated_tokens > 0


class OneDraft(Drafter):
    """Always drafts the same tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def draft(self, texts: list[Job]) -> list[list[int]]:
        return [self.tokens[: text.n_wanted] for text in texts]


def test_sampled_texts_have_the_probabilities_of_the_model() -> None:
    """3,000 texts of three tokens from a vocabulary of five, the last two drafted, by Pearson's chi-square."""
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, vocab_size=256, init_std=0.1).eval()
    only = {token: -float("inf") for token in range(256) if token not in (65, 66, 67)}
    settings = SamplingSettings(temperature=1.0, max_tokens=3, logit_bias=only, seed=1)
    with torch.no_grad():
        keep = torch.tensor([65, 66, 67])

        def following(*tokens: int) -> torch.Tensor:
            return model(torch.tensor([[1, 2, *tokens]]))[0, -1, keep].softmax(-1)

        exact = torch.stack(
            [
                following()[a] * following(65 + a)[b] * following(65 + a, 65 + b)[c]
                for a in range(3) for b in range(3) for c in range(3)
            ]
        )  # fmt: skip
    one = Engine(model, tokenizer, backend="torch", drafter=OneDraft([66, 65]))
    drawn = []
    for completion in one.complete([1, 2], settings, n_samples=3000):
        a, b, c = (token - 65 for token in completion.token_ids)
        drawn.append(9 * a + 3 * b + c)
    assert_drawn_from(exact, drawn)
    assert 0.1 < (one.statistics().acceptance_rate or 0) < 0.9


def test_what_repeats_comes_in_fewer_steps() -> None:
    slow, fast = writing("abcde"), writing("abcde")
    fast._room.drafter = PromptLookup(4, 3)
    for one in (slow, fast):
        assert one.generate("abcdeabc", temperature=0, max_tokens=8) == "deabcdea"
    assert (slow.statistics().steps, fast.statistics().steps) == (8, 3)  # one reads, each other gives up to 5
    assert fast.statistics().acceptance_rate == 1


def test_the_model_as_its_own_draft_model_is_always_right() -> None:
    one = engine(MODEL, drafter=DraftModel(MODEL, 4, backend="torch"))
    for settings in ({"temperature": 0}, {"seed": 5}, {"seed": 6, "top_p": 0.9}):
        one.generate("abc", max_tokens=11, **settings)
    assert one.statistics().acceptance_rate == 1
    assert one.statistics().steps == 3 * 3


def test_a_draft_model_with_a_shorter_context_leaves_the_rest_to_the_model() -> None:
    small = random_model(TOKENIZER, context_length=6, init_std=0.2).eval()
    one = engine(MODEL, drafter=DraftModel(small, 3, backend="torch"))
    assert one.generate("abc", temperature=0, max_tokens=12) == engine(MODEL).generate(
        "abc", temperature=0, max_tokens=12
    )


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1]), ([1, 2, 3, 9, 2, 3], [9, 2]), ([5, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3], [7, 1]),
        ([1, 2, 3], []), ([1], []), ([4, 4, 4, 4], [4]), ([1, 9, 2, 9], []),
    ],
)  # fmt: skip
def test_lookup_finds_what_followed_last_time(tokens: list[int], expected: list[int]) -> None:
    sample = Sample(0, tokens, SamplingSettings(), TOKENIZER, ())
    assert PromptLookup(2, 3).draft([Job(tokens, sample=sample, n_wanted=5)]) == [expected]
    assert PromptLookup(2, 3).draft([Job(tokens, sample=sample, n_wanted=1)]) == [expected[:1]]


def test_looking_ahead_at_random_numbers_does_not_use_them_up() -> None:
    one, other = (Sampler(SamplingSettings(seed=1)) for _ in range(2))
    ahead = [one.share(i) for i in (2, 0, 1)]
    assert [one.next_share() for _ in range(3)] == [ahead[1], ahead[2], ahead[0]]
    assert one.next_share() == [other.next_share() for _ in range(4)][-1]


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    stranger = chain_model(char_tokenizer("abc"), [2, 3])
    with pytest.raises(UserError, match="same tokenizer"):
        engine(MODEL, drafter=DraftModel(stranger, 3, backend="torch"))
    for make in (lambda: PromptLookup(0), lambda: PromptLookup(3, 1), lambda: DraftModel(MODEL, 0)):
        with pytest.raises(UserError):
            make()


class Noted(HeadsDraft):
    """Records the texts and their drafts."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(n_tokens)
        self.noted: list[tuple[list[int], list[int]]] = []

    def draft(self, texts: Sequence[Job]) -> list[list[int]]:
        drafts = super().draft(texts)
        self.noted += [(list(text.tokens), draft) for text, draft in zip(texts, drafts, strict=True)]
        return drafts


@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_heads_draft_what_they_find_likeliest_after_the_last_token_computed(backend: Any, weights: Any) -> None:
    """With either backend; the text equals the one without drafts."""
    model = model_with_heads(logit_divisor=0.5, norm="rmsnorm", d_model=32)
    model = model if weights == "fp32" else quantize_model(model, weights)
    drafter = Noted(2)
    prompts, settings = ["abcab", "jihg", "a"], SamplingSettings(temperature=0, max_tokens=8)
    one = Engine(model, TOKENIZER, backend=backend, drafter=drafter)
    plain = Engine(model, TOKENIZER, backend=backend)
    for prompt in prompts:
        assert one.generate(prompt, settings) == plain.generate(prompt, settings)
    drafted = [(tokens, draft) for tokens, draft in drafter.noted if draft]
    assert len(drafted) == len(drafter.noted) > 10
    for tokens, draft in drafted:
        with torch.no_grad():
            features = model.features(torch.tensor([tokens[:-1]]))[0, -1]
            for head, token in zip(model.future_heads, draft, strict=False):
                y = head(features)
                logits = model.logits(features + y * torch.sigmoid(y))
                assert logits[token] >= logits.max() - 1e-3
    assert {len(draft) for _, draft in drafted} == {1, 2}, "at a text's end one is wanted"


def test_a_model_without_heads_is_refused_as_its_own_drafter() -> None:
    with pytest.raises(UserError, match=r"n_future_tokens=1"):
        engine(MODEL, drafter=HeadsDraft(2))
    with pytest.raises(UserError, match="n_tokens=0"):
        HeadsDraft(0)
