"""The cache changes nothing: cached equals uncached, and a prompt in chunks equals the prompt whole."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.model import GPT, KVCache

CONTEXT, WINDOW, VOCABULARY = 24, 5, 29
TOLERANCE = 1e-5
"""float32 logits of size ~1 to 10, summed in another order by the paths that are compared."""

POSITIONS = ("learned", "rope", "none")
NORMS = ("layernorm", "layernorm without bias", "rmsnorm")
MLPS = ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu")
PATTERNS = (("full",), ("window",), ("full", "window"), ("window", "window", "full"))


def configurations() -> list[ModelConfig]:
    """Every position × norm × MLP × pattern, 180 in all; the rest is drawn, so that each pair of choices meets."""
    draw = random.Random(0).choice
    return [
        ModelConfig(
            vocab_size=VOCABULARY, context_length=CONTEXT, n_layers=3, d_model=16, n_heads=4,
            n_kv_heads=draw((4, 2, 1)), d_head=draw((4, 6)), d_ff=draw((64, 24)), position=position,
            norm=norm.split()[0], norm_bias=norm == "layernorm", mlp=mlp, qk_norm=draw((False, True)),
            window=WINDOW if "window" in pattern else None, window_pattern=pattern,
            attention_bias=draw((False, True)), mlp_bias=draw((False, True)), tie_embeddings=draw((False, True)),
        )
        for position, norm, mlp, pattern in itertools.product(POSITIONS, NORMS, MLPS, PATTERNS)
    ]  # fmt: skip


def describe(config: ModelConfig) -> str:
    pattern = "".join(kind[0] for kind in config.window_pattern)
    return f"{config.position}-{config.norm}{int(config.norm_bias)}-{config.mlp}-{pattern}-kv{config.n_kv_heads}"


def random_model(config: ModelConfig, seed: int = 0) -> GPT:
    """Every parameter random, norms and biases too, and large enough that the next token is rarely in doubt."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    return model


@pytest.fixture(autouse=True)
def _no_gradients_and_one_thread() -> Iterator[None]:
    """On products this small, threads that wait for one another on a busy machine cost ten times the work."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(n_threads)


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("config", configurations(), ids=describe)
def test_cached_generation_equals_uncached_up_to_the_full_context(config: ModelConfig) -> None:
    model, cache = random_model(config), KVCache(config, batch_size=2)
    tokens = random_tokens(2, 3)
    steps = [model(tokens, cache)]  # the prompt, then one token at a time
    while cache.length < CONTEXT:
        tokens = torch.cat((tokens, steps[-1][:, -1:].argmax(-1)), dim=1)
        steps.append(model(tokens[:, -1:], cache))
    uncached = model(tokens)
    assert_same(torch.cat(steps, dim=1), uncached)
    assert torch.equal(tokens[:, 3:], uncached[:, 2:-1].argmax(-1)), "greedy tokens"


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 7, 23])
@pytest.mark.parametrize("config", configurations()[::17], ids=describe)
def test_a_prompt_in_chunks_equals_the_prompt_whole(config: ModelConfig, chunk: int) -> None:
    model, cache, tokens = random_model(config), KVCache(config, batch_size=2), random_tokens(2, CONTEXT)
    parts = [model(tokens[:, start : start + chunk], cache) for start in range(0, CONTEXT, chunk)]
    assert_same(torch.cat(parts, dim=1), model(tokens))


@pytest.mark.parametrize("chunks", [(6, 1, 1, 6, 1, 9), (1, 5, 4, 1, 13), (2, 3, 1, 1, 1, 12, 4)])
@pytest.mark.parametrize("config", configurations()[1:4], ids=describe)
def test_chunks_and_single_tokens_mix(config: ModelConfig, chunks: tuple[int, ...]) -> None:
    model, cache, tokens = random_model(config), KVCache(config, batch_size=2), random_tokens(2, CONTEXT)
    parts = [model(part, cache) for part in tokens.split(chunks, dim=1)]
    assert_same(torch.cat(parts, dim=1), model(tokens))


@pytest.mark.parametrize("config", configurations()[:4], ids=describe)
def test_a_repeated_cache_continues_each_copy_on_its_own(config: ModelConfig) -> None:
    model, one, prompt = random_model(config), KVCache(config), random_tokens(1, 9)
    model(prompt, one)
    three, continuations = one.repeat(3), random_tokens(3, 8, seed=1)
    steps = [model(continuations[:, i : i + 1], three) for i in range(8)]
    whole = model(torch.cat((prompt.expand(3, -1), continuations), dim=1))
    assert_same(torch.cat(steps, dim=1), whole[:, 9:])
    assert one.length == 9, "the original stays where it was"


@pytest.mark.parametrize("length", [4, 5, 6, 12])
@pytest.mark.parametrize("config", configurations()[:4], ids=describe)
def test_a_shorter_cache_holds_what_it_says_and_refuses_more(config: ModelConfig, length: int) -> None:
    model, cache, tokens = random_model(config), KVCache(config, length=length), random_tokens(1, length)
    steps = [model(tokens[:, i : i + 1], cache) for i in range(length)]
    assert_same(torch.cat(steps, dim=1), model(tokens))
    with pytest.raises(ValueError, match=f"{length + 1} tokens do not fit in a context of {length}"):
        model(tokens[:, :1], cache)


def test_a_windowed_layer_keeps_its_window_and_no_more() -> None:
    base = {"vocab_size": VOCABULARY, "context_length": CONTEXT, "n_layers": 2, "d_model": 16, "n_heads": 4}
    full, windowed = KVCache(ModelConfig(**base)), KVCache(ModelConfig(**base, window=WINDOW))
    assert full.n_bytes == 2 * 2 * CONTEXT * 16 * 4  # layers, keys and values, tokens, width, bytes
    assert windowed.n_bytes == 2 * 2 * WINDOW * 16 * 4
