"""Fifty questions of people about what they own, each answered by one command; ten answers by hand arithmetic."""

import json
import shlex
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from gptworks.cli import app
from gptworks.planning.device_table import find_device

TRAINING: list[tuple[str, bool, float | None]] = [
    # command (a preset with 20 tokens per parameter); whether it fits; the device's dense TFLOP/s, from its datasheet
    ("gpt2 --device 'rtx 3060'", True, 25.5),
    ("gpt2 --device '8 GB'", True, None),
    ("gpt2 --device '4 GB gpu'", True, None),
    ("gpt2 --device '3050 laptop'", True, 14.3),
    ("gpt2-medium --device '4060 laptop'", True, 29.1),
    ("gpt2-medium --device 'rtx 4070'", True, 58.3),
    ("gpt2-large --device 'rtx 4060 ti 16gb'", False, 44.1),
    ("gpt2-xl --device 4090", False, 165.2),
    ("gpt2-xl --device 5090", True, 209.5),
    ("gpt3-1.3b --device 'a100 40'", True, 312),
    ("gpt3-2.7b --device h100", True, 989),
    ("gpt3-2.7b --device h200", True, 989),
    ("gpt3-6.7b --device b200", True, 2250),
    ("gpt3-6.7b --device mi300x", True, 1307),
    ("tinyllama-1.1b --device 'rtx a6000'", True, 154.8),
    ("tinyllama-1.1b --device 'm2 max 64'", True, 13.6),
    ("tinyllama-1.1b --device 'm2 max 32'", False, 13.6),
    ("modern-110m --device m1", False, 2.6),  # 8 GB, and MPS keeps the attention weights of all pairs
    ("modern-110m --device 'macbook air m2 16gb'", True, 3.6),
    ("modern-336m --device 'm4 pro 48'", True, 7.5),
    ("modern-24m --device 'm3 8'", True, 3.6),
    ("modern-336m --device v100", True, 125),
    ("modern-336m --device t4", True, 65),
    ("modern-336m --device 'NVIDIA RTX A6000'", True, 154.8),
    ("modern-336m --device l4", True, 121),
    ("modern-336m --device a10g", True, 70),
    ("gpt3-350m --device 7900xtx", True, 122.8),
    ("gpt3-350m --device b580", True, 116.5),
    ("gpt3-760m --device 'rtx 4060'", False, 30.2),
    ("gpt3-760m --device '4090 laptop'", False, 79.4),
]
MONEY_AND_TIME = [
    # command; the thousandths of a trillion tokens that this model reads, and the millions of parameters of the largest
    ("gpt3-125m --device a100 --hours 24", 11.1, 255),
    ("gpt3-125m --device 4090 --hours 8", 1.97, 102),
    ("gpt3-125m --device h100 --price 2.49 --budget 50", 29.6, 401),
    ("gpt3-350m --device h100 --world-size 8 --price 2.49 --budget 500", 104.8, 1384),
    ("modern-110m --device 'rtx 3060' --hours 24", 0.99, 70.5),
    ("gpt3-125m --device m4 --flops 3.5e12 --hours 100", 0.52, 53),
]
SERVING = [
    # command; the requests that fit
    ("llama-2-7b --requests 1 --device 'rtx 4090'", 0),
    ("llama-2-7b --requests 1 --context 2048 --weights int4 --cache int8 --device '8 GB'", 6),
    ("llama-2-7b --requests 16 --weights int8 --device a100", 17),
    ("gpt2 --requests 16 --device 'rtx 4060'", 98),
    ("tinyllama-1.1b --requests 8 --device m1", 10),
    ("qwen3-0.6b --requests 4 --context 4096 --device t4", 13),
    ("mixtral-8x7b --requests 1 --context 4096 --weights int4 --device h100", 49),
]
REMEDIES = [
    # command; a change that it names for the same device
    ("gpt2-xl --device 4090", "train.optimizer_state=int8"),
    ("gpt3-760m --device 'rtx 4060'", "adapter.rank=8"),
    ("gpt2-large --device 'rtx 4060 ti 16gb'", "train.activation_checkpointing=block"),
    ("gpt2 train.micro_batch_size=32 --device '8 GB'", "train.micro_batch_size=8"),
]
PRICES = [
    ("gpt2 --device 4090 --price 0.4", 1),
    ("gpt2 --device h100 --price 2.49", 1),
    ("gpt3-1.3b --device h100 --world-size 8 --price 2.49", 8),
]


@cache
def ask(command: str) -> dict[str, Any]:
    shown = CliRunner().invoke(app, ["plan", *shlex.split(command), "--json"])
    assert shown.exit_code in (0, 3), shown.output
    found: dict[str, Any] = json.loads(shown.stdout)
    return found | {"exit": shown.exit_code}


def test_there_are_fifty() -> None:
    assert len(TRAINING) + len(MONEY_AND_TIME) + len(SERVING) + len(REMEDIES) + len(PRICES) == 50


@pytest.mark.parametrize(("command", "fits", "teraflops"), TRAINING)
def test_will_it_fit_and_how_long_will_it_take(command: str, fits: bool, teraflops: float | None) -> None:
    """AdamW in mixed precision keeps 16 bytes a parameter. Training takes about 6 FLOPs for each parameter and token
    (Kaplan et al., 2020), and attention's products more."""
    plan = ask(command)
    parameters = plan["parameters"]["total"]
    assert plan["fit"]["fits"] == fits == (plan["exit"] == 0)
    assert plan["memory"]["peak_bytes"] > 16 * parameters
    assert (plan["memory"]["peak_bytes"] <= plan["device"]["memory_bytes"]) == fits
    if teraflops is None:
        assert plan["time"]["seconds"] is None
        return
    textbook = 6 * parameters * 20 * parameters / (0.4 * teraflops * 1e12)
    assert 0.85 * textbook < plan["time"]["seconds"] < 1.35 * textbook


@pytest.mark.parametrize(("command", "billions", "millions"), MONEY_AND_TIME)
def test_what_can_i_train_in_this_time_or_for_this_money(command: str, billions: float, millions: float) -> None:
    found = ask(command)["affordable"]
    assert found["tokens"] / 1e9 == pytest.approx(billions, rel=0.02)
    assert found["largest"]["parameters"] / 1e6 == pytest.approx(millions, rel=0.02)
    assert (
        found["largest"]["seconds"] <= found["seconds"]
        and found["largest"]["tokens"] == 20 * found["largest"]["parameters"]
    )


@pytest.mark.parametrize(("command", "requests"), SERVING)
def test_how_many_requests_can_i_serve(command: str, requests: int) -> None:
    found = ask(f"{command} --serve")
    assert found["most_requests"] == requests and found["fits"] == (found["requests"] <= requests)


@pytest.mark.parametrize(("command", "change"), REMEDIES)
def test_what_makes_it_fit_on_what_i_have(command: str, change: str) -> None:
    changes = ask(command)["fit"]["changes"]
    assert changes[0]["world_size"] == 1 and all(each["fits"] for each in changes)
    assert change in " ".join(each["words"] for each in changes if each["world_size"] == 1)
    numbers = [each["world_size"] for each in changes]
    assert numbers == sorted(numbers), "more devices come last"
    other = find_device(ask(command)["fit"]["smallest_device"])
    assert other.memory_bytes >= ask(command)["memory"]["peak_bytes"] > ask(command)["device"]["memory_bytes"]


@pytest.mark.parametrize(("command", "devices"), PRICES)
def test_what_does_it_cost(command: str, devices: int) -> None:
    found = ask(command)
    hours = found["time"]["seconds"] / 3600 * devices
    assert found["cost"]["cost"] == pytest.approx(hours * found["cost"]["price"])


# ten answers by hand ----------------------------------------------------------------------------------------

GPT2 = 124_439_808
"""Parameters of GPT-2 small (Radford et al., 2019): 12 layers of width 768, 50,257 tokens, a context of 1,024."""

GPT2_FLOPS = 3 * (2 * 12 * 12 * 768**2 + 2 * 50_257 * 768 + 4 * 12 * 768 * 1024)
"""FLOPs per token in training: three times those of the products with the blocks' matrices, the head and attention."""


def test_1_the_time_of_gpt2_on_a_4090() -> None:
    steps = -(-20 * GPT2 // 2**19)  # of 524,288 tokens
    seconds = steps * 2**19 * GPT2_FLOPS / (0.4 * 165.2e12)
    assert ask("gpt2 --device 4090")["time"]["seconds"] == pytest.approx(seconds, rel=1e-4)  # 8.94 h


def test_2_its_cost_at_40_cents_an_hour() -> None:
    assert ask("gpt2 --device 4090 --price 0.4")["cost"]["cost"] == pytest.approx(3.576, rel=1e-3)


def test_3_weights_gradients_and_moments_on_8_gb() -> None:
    parts = ask("gpt2 --device '8 GB'")["memory"]["parts"]
    assert (parts["weights"], parts["gradients"], parts["optimizer_state"]) == (4 * GPT2, 4 * GPT2, 8 * GPT2)


def test_4_a_checkpoint_on_disk() -> None:
    assert ask("gpt2 --device t4")["disk"]["checkpoint_bytes"] == 12 * GPT2  # weights and two moments


def test_5_tokens_in_a_day_on_a_3060() -> None:
    tokens = 86_400 * 0.4 * 2 * 12.7e12 / GPT2_FLOPS
    assert ask("gpt2 --device 'rtx 3060' --hours 24")["affordable"]["tokens"] == pytest.approx(tokens, rel=1e-4)


def test_6_hours_for_50_dollars_on_8_gpus() -> None:
    seconds = ask("gpt3-125m --device h100 --world-size 8 --price 2.49 --budget 50")["affordable"]["seconds"]
    assert seconds / 3600 == pytest.approx(50 / (2.49 * 8))  # 2.51 h


def test_7_the_largest_model_of_a_day_on_a_3060() -> None:
    """The size that the plan names is compute-optimal, by its own parameters and FLOPs, in less than 24 h."""
    found = ask("gpt2 --device 'rtx 3060' --hours 24")["affordable"]["largest"]
    size = {key.removeprefix("model."): int(value) for key, value in (one.split("=") for one in found["overrides"])}
    n, width = size["n_layers"], size["d_model"]
    block = 12 * width**2 + 13 * width  # matrices; their biases and two norms
    assert found["parameters"] == 50_257 * width + 1024 * width + n * block + 2 * width
    flops = 3 * (2 * n * 12 * width**2 + 2 * 50_257 * width + 4 * n * width * 1024)
    seconds = 20 * found["parameters"] * flops / (0.4 * 25.4e12)
    assert found["seconds"] == pytest.approx(seconds, rel=0.01) and seconds < 86_400


def test_8_what_ddp_sends_on_8_gpus() -> None:
    """A ring moves each gradient 2 × 7/8 times; GPT-3 125M has 125,226,240 of 4 bytes."""
    sent = ask("gpt3-125m --device h100 --world-size 8")["network"]["sent_bytes_per_step"]
    assert sum(sent.values()) == pytest.approx(125_226_240 * 4 * 2 * 7 / 8, rel=1e-3)


def test_9_keys_and_values_of_16_chats() -> None:
    found = ask("gpt2 --serve --requests 16 --device 'rtx 4060'")
    assert found["cache_bytes"] == 16 * 2 * 12 * 768 * 1024 * 4  # keys and values, layers, width, tokens, bytes
    assert found["weights_bytes"] == 4 * GPT2


def test_10_the_memory_of_a_mac() -> None:
    """Metal recommends two thirds of 16 GiB, 10,922.67 MiB."""
    device = ask("gpt2-tiny --device 'm1 16'")["device"]
    assert device["memory_bytes"] / 2**20 == pytest.approx(10_922.67, abs=0.01)
