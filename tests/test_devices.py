"""The device table, and what this machine reports and measures of itself."""

from pathlib import Path

import pytest
import torch

from gptworks.device import measured_device, memory_bytes
from gptworks.errors import UserError
from gptworks.machine import available_memory_bytes
from gptworks.planning.devices import ALIASES, DEVICES, custom_device, find_device, this_cpu


@pytest.mark.parametrize(
    ("spelled", "key"),
    [("h100", "h100-sxm"), ("H100 SXM", "h100-sxm"), ("NVIDIA_H100-PCIe", "h100-pcie"), ("RTX 4090", "rtx-4090"),
     ("rtx4090", "rtx-4090"), ("a100", "a100-80gb"), ("M2 Ultra", "m2-ultra"), ("mi300x", "mi300x")],
)  # fmt: skip
def test_names_are_read_loosely(spelled: str, key: str) -> None:
    assert find_device(spelled) is DEVICES[key]


@pytest.mark.parametrize(("wrong", "near"), [("h1000", "h100"), ("rtx-4080", "rtx-4090"), ("tis", "this")])
def test_the_nearest_name_is_suggested_for_an_unknown_one(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=f"`{wrong}`; did you mean `{near}`") as caught:
        find_device(wrong)
    assert "--memory-gib" in str(caught.value)


def test_aliases_are_in_the_table() -> None:
    assert set(ALIASES.values()) <= set(DEVICES)


PRINTED = [
    # GB, TFLOP/s (half of what is printed with sparsity), TFLOP/s, GB/s
    ("a100-80gb", 80, 624 / 2, 19.5, 2039), ("h100-sxm", 80, 1979 / 2, 67, 3350), ("h100-pcie", 80, 1513 / 2, 51, 2000),
    ("h200", 141, 1979 / 2, 67, 4800), ("b200", 180, 4500 / 2, 75, 7700), ("l4", 24, 242 / 2, 30.3, 300),
    ("l40s", 48, 362.05, 91.6, 864), ("a10", 24, 250 / 2, 31.2, 600), ("mi300x", 192, 2614.9 / 2, 163.4, 5300),
    ("rtx-4090", 24, 330.4 / 2, 82.6, 1008), ("rtx-5090", 32, 419 / 2, 104.8, 1792),
    ("rtx-3090", 24, 142 / 2, 35.6, 936),
]  # fmt: skip


@pytest.mark.parametrize(("key", "gigabytes", "half", "single", "bandwidth"), PRINTED)
def test_figures_are_those_printed(key: str, gigabytes: int, half: float, single: float, bandwidth: float) -> None:
    device = DEVICES[key]
    assert device.memory_bytes == gigabytes * 10**9
    assert device.flops("bf16") == pytest.approx(half * 1e12, rel=2e-3)
    assert device.flops("fp32") == pytest.approx(single * 1e12, rel=1e-3)
    assert device.bandwidth == bandwidth * 1e9


def test_every_device_is_possible() -> None:
    for key, device in DEVICES.items():
        assert device.source, key
        assert device.half_flops is not None and device.float_flops is not None and device.bandwidth is not None
        assert device.half_flops >= device.float_flops, key
        assert 1 < device.half_flops / device.bandwidth < 1000, key  # operations a byte


def test_a_custom_device() -> None:
    device = custom_device(16, 100e12, None)
    assert (device.memory_bytes, device.flops("fp32"), device.flops("bf16")) == (16 * 2**30, 100e12, 100e12)
    assert device.bandwidth is None


# this machine -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_available_memory_is_at_most_all_memory() -> None:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < available_memory_bytes() < total
    assert this_cpu().memory_bytes < total
    assert memory_bytes(torch.device("cpu")) < total


def test_this_machine_is_measured() -> None:
    device = measured_device(torch.device("cpu"))
    assert device.kind == "cpu"
    assert device.float_flops is not None and device.half_flops is not None and device.bandwidth is not None
    assert 1e8 < device.float_flops < 1e14
    assert 1e7 < device.half_flops < 1e15
    assert 1e7 < device.bandwidth < 1e12
