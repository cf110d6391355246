"""The device table, and what this machine reports and measures of itself."""

import re
from pathlib import Path

import pytest
import torch

from gptworks.device import measured_device, memory_bytes
from gptworks.errors import UserError
from gptworks.machine import available_memory_bytes
from gptworks.planning.arrange import planned_precision
from gptworks.planning.device_options import DeviceOptions
from gptworks.planning.device_table import DEVICES, find_device
from gptworks.planning.devices import custom_device, this_cpu

SPELLED = {
    # as people write them
    "h100": "h100-sxm", "H100 SXM": "h100-sxm", "NVIDIA_H100-PCIe": "h100-pcie", "RTX 4090": "rtx-4090",
    "rtx4090": "rtx-4090", "4090": "rtx-4090", "4090 laptop": "rtx-4090-laptop", "RTX 4090 Mobile": "rtx-4090-laptop",
    "2080 max-q": None, "geforce 3060 12gb": "rtx-3060-12gb", "3060 8 GB": "rtx-3060-8gb", "rtx 3060": "rtx-3060-12gb",
    "4070ti": "rtx-4070-ti", "rtx 4070ti super": "rtx-4070-ti-super", "4060 ti 16": "rtx-4060-ti-16gb",
    "3080 laptop 16gb": "rtx-3080-laptop-16gb", "m2 max 64": "m2-max-64gb", "M2 Ultra": "m2-ultra-64gb",
    "m2max 96gb": "m2-max-96gb", "macbook air m2 16gb": "m2-16gb", "Apple M4 Pro 48 GB": "m4-pro-48gb", "m1": "m1-8gb",
    "a100": "a100-80gb", "a100 40": "a100-40gb", "v100": "v100-16gb", "v100 32": "v100-32gb", "p100": "p100-pcie",
    "mi300x": "mi300x", "7900xtx": "rx-7900-xtx", "b580": "arc-b580", "a770 8gb": "arc-a770-8gb", "b60": "arc-pro-b60",
    # as their drivers call them
    "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb", "Tesla T4": "t4",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb", "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA GeForce RTX 3080 Ti Laptop GPU": "rtx-3080-ti-laptop", "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb", "NVIDIA RTX A6000": "rtx-a6000", "NVIDIA L40S": "l40s",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada", "Quadro RTX 8000": "quadro-rtx-8000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000", "AMD Instinct MI300X": "mi300x",
    "Intel(R) Arc(TM) A770 Graphics": "arc-a770-16gb", "Apple M3 Pro": "m3-pro-18gb",
}  # fmt: skip


def test_names_are_read_as_people_and_drivers_write_them() -> None:
    for spelled, key in SPELLED.items():
        if key is None:
            with pytest.raises(UserError, match="no device is called"):
                find_device(spelled)
        else:
            assert find_device(spelled) is DEVICES[key], spelled


def test_each_device_is_found_by_its_key_and_by_its_name() -> None:
    for key, device in DEVICES.items():
        assert find_device(key) is device, key
        assert find_device(device.name).name == device.name, key


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("h1000", "`h100`"), ("h101", "`h100`"), ("tis", "`this`"), ("rtx-4009", "`rtx-4090`"), ("mi400x", "`mi300x`"),
     ("rtx 4080 ti", "`rtx-4080`, `rtx-4080-super` or `rtx-4080-laptop`"), ("7900", "`rx-7900-xt` or `rx-7900-xtx`"),
     ("rtx 6000", "`rtx-6000-ada`, `rtx-pro-6000` or `quadro-rtx-6000`")],
)  # fmt: skip
def test_the_nearest_names_are_suggested_for_an_unknown_one(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=f"`{wrong}`; did you mean {near}\\?") as caught:
        find_device(wrong)
    assert "--device '8 GB'" in str(caught.value)


@pytest.mark.parametrize(
    "unknown",
    [
        "banana",
        "gtx 1080",
        "",
        "40",
        "gpu",
        "999 999",
        "0 GB",
        "9" * 5000,
        "9" * 400 + " GB",
        "²gb",
        "\u0663gb",
    ],
)
def test_nothing_is_suggested_for_a_name_that_resembles_none(unknown: str) -> None:
    with pytest.raises(UserError, match=r"`gptworks devices` lists") as caught:
        find_device(unknown)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [("rtx 3060 24gb", "rtx-3060 has 12 or 8 GB"), ("m2 max 48", "m2-max has 32 or 64 or 96 GB"), ("h200 80gb", "141")],
)
def test_a_memory_that_is_not_sold_is_refused(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_device(name)


def test_a_memory_without_a_name_is_a_gpu_whose_rates_are_unknown() -> None:
    for written in ("8 GB", "8gb", "8 GB gpu", "nvidia 8g"):
        device = find_device(written)
        assert (device.kind, device.memory_bytes, device.flops("bf16"), device.bandwidth) == (
            "cuda",
            8 * 10**9,
            *2 * [None],
        )
    assert find_device("24 GiB").memory_bytes == 24 * 2**30
    with pytest.raises(UserError, match="no device is called `-8 GB`"):
        find_device("-8 GB")


def test_figures_given_replace_those_of_a_named_device() -> None:
    device = DeviceOptions("8 GB", flops=20e12, bandwidth=200e9).found(lambda _: this_cpu())
    assert (device.memory_bytes, device.flops("bf16"), device.bandwidth) == (8 * 10**9, 20e12, 200e9)
    device = DeviceOptions("m4", flops=3e12).found(lambda _: this_cpu())
    assert (device.flops("fp32"), device.bandwidth) == (3e12, 120e9) and "given" in device.source


@pytest.mark.parametrize("written", ["cpu", "CPU", " this "])
def test_this_machines_devices_are_measured(written: str) -> None:
    names = []
    DeviceOptions(written).found(lambda name: names.append(name) or this_cpu())  # type: ignore[func-returns-value]
    assert names == [written.strip().lower()]


def test_half_precision_is_bf16_only_where_the_hardware_has_it() -> None:
    """Turing, Volta and Pascal have fp16 only; training on MPS is in fp32."""
    found = {name: planned_precision("auto", device) for name, device in DEVICES.items()}
    old = ("t4", "v100", "p100", "rtx-206", "rtx-207", "rtx-208", "titan-rtx", "quadro-rtx")
    for name, precision in found.items():
        apple = re.match(r"m\d-", name)
        assert precision == ("fp32" if apple else "fp16" if name.startswith(old) else "bf16"), name


def test_half_rates_are_those_with_sums_in_float32() -> None:
    """GeForce's tensor cores reach half of their fp16 rate then: twice the float32 rate since Ampere; other cards' four
    times."""
    for name, device in DEVICES.items():
        if device.name.startswith("NVIDIA GeForce RTX"):
            ratio = 4 if "GeForce RTX 20" in device.name else 2
        elif device.name.startswith("NVIDIA RTX"):
            ratio = 4
        else:
            continue
        assert device.half_flops is not None and device.float_flops is not None
        assert device.half_flops / device.float_flops == pytest.approx(ratio, rel=0.01), name


PRINTED = [
    # GB, TFLOP/s (half of what is printed with sparsity), TFLOP/s, GB/s
    ("a100-80gb", 80, 624 / 2, 19.5, 2039), ("h100-sxm", 80, 1979 / 2, 67, 3350), ("h100-pcie", 80, 1513 / 2, 51, 2000),
    ("h200", 141, 1979 / 2, 67, 4800), ("b200", 180, 4500 / 2, 75, 7700), ("l4", 24, 242 / 2, 30.3, 300),
    ("l40s", 48, 362.05, 91.6, 864), ("a10", 24, 250 / 2, 31.2, 600), ("mi300x", 192, 2614.9 / 2, 163.4, 5300),
    ("rtx-4090", 24, 330.4 / 2, 82.6, 1008), ("rtx-5090", 32, 419 / 2, 104.8, 1792),
    ("rtx-3090", 24, 142.3 / 2, 35.6, 936), ("rtx-5080", 16, 225.1 / 2, 56.3, 960),
    ("rtx-5070", 12, 123.5 / 2, 30.9, 672), ("l40", 48, 362.1 / 2, 90.5, 864),
    ("rtx-6000-ada", 48, 1457 / 4, 91.1, 960), ("rtx-a6000", 48, 309.7 / 2, 38.7, 768),
    ("a40", 48, 299.4 / 2, 37.4, 696), ("a30", 24, 330 / 2, 10.3, 933), ("h100-nvl", 94, 1671 / 2, 60, 3900),
    ("mi325x", 256, 2614.9 / 2, 163.4, 6000), ("mi355x", 288, 5033.2 / 2, 157.3, 8000), ("t4", 16, 65, 8.1, 300),
    ("v100-pcie-16gb", 16, 112, 14, 900), ("arc-b580", 12, 233 / 2, 14.6, 456),
]  # fmt: skip


@pytest.mark.parametrize(("key", "gigabytes", "half", "single", "bandwidth"), PRINTED)
def test_figures_are_those_printed(key: str, gigabytes: int, half: float, single: float, bandwidth: float) -> None:
    device = DEVICES[key]
    assert device.memory_bytes == gigabytes * 10**9
    assert device.flops("bf16") == pytest.approx(half * 1e12, rel=2e-3)
    assert device.flops("fp32") == pytest.approx(single * 1e12, rel=3e-3)
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
