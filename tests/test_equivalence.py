"""The cache changes nothing: results with and without it are equal, and so are a prompt in chunks and a whole one."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.infer.backends.cache import SlotCache
from gptworks.model.gpt import GPT
from tiny import plain_model

CONTEXT, WINDOW, VOCABULARY = 24, 5, 29
TOLERANCE = 1e-5
"""float32 logits of size ~1 to 10, summed in another order by the paths that are compared."""

POSITIONS = ("learned", "rope", "none")
NORMS = ("layernorm", "layernorm without bias", "rmsnorm")
MLPS = ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu")
PATTERNS = (("full",), ("window",), ("full", "window"), ("window", "window", "full"))


def configurations() -> list[ModelConfig]:
    """Return every position × norm × MLP × pattern, 180 in all; other settings are random, so that each pair of choices
    occurs."""
    draw = random.Random(0).choice
    return [
        plain_model(
            vocab_size=VOCABULARY, context_length=CONTEXT, n_layers=3, d_model=16, n_heads=4,
            n_kv_heads=draw((4, 2, 1)), d_head=draw((4, 6)), d_ff=draw((64, 24)), position=position,
            norm=norm.split()[0], norm_bias=norm == "layernorm", mlp=mlp, qk_norm=draw((False, True)),
            window=WINDOW if "window" in pattern else None, window_pattern=pattern,
            attention_bias=draw((False, True)), mlp_bias=draw((False, True)), tie_embeddings=draw((False, True)),
        )
        for position, norm, mlp, pattern in itertools.product(POSITIONS, NORMS, MLPS, PATTERNS)
    ]  # fmt: skip


BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "context_length": CONTEXT, "n_layers": 3, "d_model": 16, "n_heads": 4, "norm": "rmsnorm",
    "window": WINDOW, "window_pattern": ("window", "full"), "n_kv_heads": 2, "qk_norm": False,
}  # fmt: skip
OTHERS = {
    "OLMo 3": {"norm_placement": "after", "qk_norm": "whole", "mlp": "swiglu", "window_rope_theta": 90.0,
               "rope_scaling": {"type": "yarn", "factor": 2}},
    "Gemma 2": {"norm_placement": "both", "mlp": "geglu_tanh", "attention_softcap": 2.0, "logit_softcap": 5.0},
    "repeated": {"layer_repeats": (2, 1, 2)},
    "token pairs": {"bigram_vocab_size": 40},
    "Gemma 3": {"norm_placement": "both", "mlp": "geglu_tanh", "qk_norm": True, "window_rope_theta": 90.0},
}  # fmt: skip


def describe(config: ModelConfig) -> str:
    pattern = "".join(kind[0] for kind in config.window_pattern)
    return f"{config.position}-{config.norm}{int(config.norm_bias)}-{config.mlp}-{pattern}-kv{config.n_kv_heads}"


def random_model(config: ModelConfig, seed: int = 0) -> GPT:
    """Return a model with random parameters, including norms and biases, large enough for clear next tokens."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    return model


class Cached:
    """A model that computes texts of equal length through a cache, each in its own slot."""

    def __init__(self, model: GPT, n_texts: int, capacity: int | None = None) -> None:
        self.model, self.length = model, 0
        self.cache = SlotCache(model.config, n_texts, capacity or model.config.context_length)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, T, V] of the texts' next tokens [B, T]."""
        rows = self.cache.rows([(slot, self.length, tokens.size(1)) for slot in range(len(tokens))])
        self.length += tokens.size(1)
        return self.model(tokens.reshape(1, -1), rows).view(*tokens.shape, -1)


@pytest.fixture(autouse=True)
def _no_gradients_and_one_thread() -> Iterator[None]:
    """For products this small, threads that wait for each other on a busy machine take ten times as long."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(n_threads)


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize(
    "config",
    [*configurations(), *(plain_model(**BASE | settings) for settings in OTHERS.values())],
    ids=[*map(describe, configurations()), *OTHERS],
)
def test_cached_generation_equals_uncached_up_to_the_full_context(config: ModelConfig) -> None:
    model = random_model(config)
    cached, tokens = Cached(model, 2), random_tokens(2, 3)
    steps = [cached(tokens)]  # the prompt, then one token at a time
    while cached.length < CONTEXT:
        tokens = torch.cat((tokens, steps[-1][:, -1:].argmax(-1)), dim=1)
        steps.append(cached(tokens[:, -1:]))
    uncached = model(tokens)
    assert_same(torch.cat(steps, dim=1), uncached)
    assert torch.equal(tokens[:, 3:], uncached[:, 2:-1].argmax(-1)), "greedy tokens"


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 7, 23])
@pytest.mark.parametrize("config", configurations()[::17], ids=describe)
def test_a_prompt_in_chunks_equals_the_prompt_whole(config: ModelConfig, chunk: int) -> None:
    model, tokens = random_model(config), random_tokens(2, CONTEXT)
    parts = list(map(Cached(model, 2), tokens.split(chunk, dim=1)))
    assert_same(torch.cat(parts, dim=1), model(tokens))


@pytest.mark.parametrize("chunks", [(6, 1, 1, 6, 1, 9), (1, 5, 4, 1, 13), (2, 3, 1, 1, 1, 12, 4)])
@pytest.mark.parametrize("config", configurations()[1:4], ids=describe)
def test_chunks_and_single_tokens_mix(config: ModelConfig, chunks: tuple[int, ...]) -> None:
    model, tokens = random_model(config), random_tokens(2, CONTEXT)
    parts = list(map(Cached(model, 2), tokens.split(chunks, dim=1)))
    assert_same(torch.cat(parts, dim=1), model(tokens))


@pytest.mark.parametrize("config", configurations()[:4], ids=describe)
def test_a_copied_slot_continues_each_copy_on_its_own(config: ModelConfig) -> None:
    model, prompt, continuations = random_model(config), random_tokens(1, 9), random_tokens(3, 8, seed=1)
    three = Cached(model, 3)
    three(prompt)
    for slot in (1, 2):
        three.cache.copy(0, slot, 9)
    steps = list(map(three, continuations.split(1, dim=1)))
    whole = model(torch.cat((prompt.expand(3, -1), continuations), dim=1))
    assert_same(torch.cat(steps, dim=1), whole[:, 9:])


@pytest.mark.parametrize("length", [4, 5, 6, 12])
@pytest.mark.parametrize("config", configurations()[:4], ids=describe)
def test_a_shorter_cache_holds_what_it_says_and_refuses_more(config: ModelConfig, length: int) -> None:
    model, tokens = random_model(config), random_tokens(1, length)
    cached = Cached(model, 1, length)
    steps = list(map(cached, tokens.split(1, dim=1)))
    assert_same(torch.cat(steps, dim=1), model(tokens))
    with pytest.raises(ValueError, match=f"{length + 1} tokens do not fit in a slot of {length}"):
        cached(tokens[:, :1])
