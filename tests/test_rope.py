"""The rotary embedding and its scalings for longer contexts, against transformers and their definitions."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from gptworks.config import ModelConfig, RopeScaling
from gptworks.model import rotary as rotary_module
from gptworks.model.gpt import GPT
from gptworks.model.rotary import frequencies
from test_equivalence import Cached
from tiny import plain_model

ORIGINAL = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0, "original_context_length": ORIGINAL},
    "yarn": {"type": "yarn", "factor": 4.0},
    "yarn-set": {"type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "llama3": {"type": "llama3", "factor": 4.0, "beta_slow": 0.5},
    "longrope": {
        "type": "longrope",
        "factor": 4.0,
        "original_context_length": ORIGINAL,
        "short_factors": [1 + i / 8 for i in range(8)],
        "long_factors": [2 + i for i in range(8)],
    },
}


def config(scaling: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "vocab_size": 31, "context_length": 4 * ORIGINAL, "n_layers": 2, "d_model": 64, "n_heads": 4, "mlp": "swiglu",
        "norm": "rmsnorm", "rope_theta": 500.0, "rope_scaling": scaling and RopeScaling(**scaling),
    }  # fmt: skip
    return plain_model(**base | changes)


def random_model(settings: ModelConfig) -> GPT:
    torch.manual_seed(0)
    model = GPT(settings).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("length", [16, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str, length: int, fraction: float) -> None:
    utils, llama = pytest.importorskip("transformers.modeling_rope_utils"), pytest.importorskip("transformers")
    n_pairs = int(8 * fraction)
    scaling = {key: value[:n_pairs] if isinstance(value, list) else value for key, value in SCALINGS[name].items()}
    ours = config(scaling, rope_fraction=fraction)
    parameters = {"rope_type": scaling.pop("type"), "rope_theta": 500.0, "partial_rotary_factor": fraction, **scaling}
    parameters.pop("original_context_length", None)
    if parameters["rope_type"] == "longrope":
        parameters |= {f"{kind}_factor": parameters.pop(f"{kind}_factors") for kind in ("short", "long")}
    if parameters["rope_type"] in ("yarn", "llama3", "longrope"):
        parameters["original_max_position_embeddings"] = ORIGINAL
    if parameters["rope_type"] == "llama3":
        parameters |= {"low_freq_factor": parameters.pop("beta_slow"), "high_freq_factor": 4.0}
    theirs = llama.LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=parameters,
        max_position_embeddings=ORIGINAL if name == "dynamic" else 4 * ORIGINAL,
    )  # fmt: skip
    expected, factor = utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, "cpu", seq_len=length)
    frequency, our_factor = frequencies(ours, length)
    torch.testing.assert_close(frequency.float(), expected, rtol=1e-5, atol=0)
    assert our_factor == pytest.approx(factor)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", SCALINGS)
@torch.no_grad()
def test_cached_generation_equals_uncached_far_beyond_the_original_context(name: str, window: int | None) -> None:
    """Dynamic scaling depends on the cache's capacity, so it is exact for a text that fills the cache."""
    model = random_model(config(SCALINGS[name], window=window))
    tokens = torch.randint(31, (2, 3 * ORIGINAL), generator=torch.Generator().manual_seed(0))
    parts = list(map(Cached(model, 2, 3 * ORIGINAL), tokens.split((40, 20, 3, 1, 1, 1, 1, 60, 1, 64), dim=1)))
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_up_to_the_original_context_dynamic_scaling_changes_nothing() -> None:
    plain, scaled = config(), config(SCALINGS["dynamic"])
    tokens = torch.randint(31, (1, ORIGINAL + 8), generator=torch.Generator().manual_seed(0))
    models = random_model(plain), random_model(scaled)
    within, beyond = tokens[:, :ORIGINAL], tokens
    assert torch.equal(models[0](within), models[1](within))
    assert not torch.allclose(models[0](beyond), models[1](beyond))


@torch.no_grad()
def test_linear_scaling_puts_a_text_spaced_out_where_it_was() -> None:
    """At factor 4, position 4i equals position i without scaling."""
    frequency, scaled = frequencies(config(), 8)[0], frequencies(config(SCALINGS["linear"]), 8)[0]
    torch.testing.assert_close(4 * scaled, frequency, rtol=1e-15, atol=0)


def test_yarn_keeps_the_fast_and_interpolates_the_slow() -> None:
    plain, yarn = frequencies(config(), 8)[0], frequencies(config(SCALINGS["yarn"]), 8)[0]
    assert yarn[0] == plain[0]
    assert yarn[-1] == plain[-1] / 4
    assert (yarn <= plain).all() and (yarn >= plain / 4).all()


@pytest.mark.parametrize("fraction", [0.25, 0.5])
@torch.no_grad()
def test_a_fraction_turns_the_first_part_of_a_head_alone(fraction: float) -> None:
    from gptworks.model.rotary import Rotary, rotate

    settings = config(rope_fraction=fraction)
    x = torch.randn(1, 1, 5, 16)
    turned = rotate(x, Rotary(settings).at(slice(3, 8), 8, torch.float32))
    n_turned = int(16 * fraction)
    assert torch.equal(turned[..., n_turned:], x[..., n_turned:])
    assert not torch.allclose(turned[..., :n_turned], x[..., :n_turned])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_dynamic_tables_made_in_inference_serve_training() -> None:
    model = random_model(config(SCALINGS["dynamic"]))
    tokens = torch.randint(31, (1, 2 * ORIGINAL), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model(tokens)
    model(tokens).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_thread_that_reads_another_length_changes_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread reads while the first is computing, at the worst moment."""
    rotary = random_model(config(SCALINGS["dynamic"])).rotary
    lengths = 2 * ORIGINAL, 3 * ORIGINAL
    expected = [
        random_model(config(SCALINGS["dynamic"])).rotary.at(slice(0, 8), length, torch.float32) for length in lengths
    ]
    found: list[Any] = []
    compute = rotary_module.frequencies

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(rotary_module, "frequencies", compute)
        other = threading.Thread(target=lambda: found.append(rotary.at(slice(0, 8), lengths[1], torch.float32)))
        other.start()
        other.join()
        return compute(*arguments)

    monkeypatch.setattr(rotary_module, "frequencies", interrupted)
    one = rotary.at(slice(0, 8), lengths[0], torch.float32)
    again = [rotary.at(slice(0, 8), length, torch.float32) for length in lengths[::-1]]
    for tables, length in ((one, 0), (found[0], 1), (again[0], 1), (again[1], 0)):
        assert all(torch.equal(a, b) for a, b in zip(tables, expected[length], strict=True))


def test_dynamic_tables_of_places_in_any_order_are_those_of_the_whole() -> None:
    rotary = random_model(config(SCALINGS["dynamic"])).rotary
    whole = rotary.at(slice(0, 2 * ORIGINAL), 2 * ORIGINAL, torch.float32)
    places = torch.tensor([[3, 2 * ORIGINAL - 1], [0, 3]])
    for part, table in zip(rotary.at(places, 2 * ORIGINAL, torch.float32), whole, strict=True):
        assert torch.equal(part, table[places])


def test_tables_of_a_long_context_are_computed_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for scaling in (None, SCALINGS["yarn"], SCALINGS["llama3"], SCALINGS["longrope"]):
        whole = rotary_module.Rotary(config(scaling))
        monkeypatch.setattr(rotary_module, "_POSITIONS_AT_ONCE", 37)  # the last part is shorter
        parts = rotary_module.Rotary(config(scaling))
        monkeypatch.undo()
        assert torch.equal(parts.cos, whole.cos) and torch.equal(parts.sin, whole.sin)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the process's high-water mark")
def test_a_context_of_four_million_takes_little_more_memory_than_its_tables() -> None:
    """2 tables x 4,194,304 positions x 32 pairs x 4 bytes are 1.07 GB; float64 at once took four times as much."""
    program = (
        "import resource\n"
        "from gptworks.config import ModelConfig\n"
        "from gptworks.model.rotary import Rotary\n"
        "peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "size = dict(vocab_size=31, n_layers=1, d_model=64, n_heads=1, position='rope')\n"
        "Rotary(ModelConfig(context_length=2**17, **size)); before = peak()\n"
        "Rotary(ModelConfig(context_length=2**22, **size)); print(peak() - before)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 1.2 * 2 * 2**22 * 32 * 4
