"""Devices: their memory and speed, and the nodes that they are in. `device_table` lists known devices; `this_cpu`
describes this machine's CPU as a device."""

from dataclasses import dataclass
from typing import Any

from gptworks.machine import NATIVE_BF16, available_memory_bytes, cpu_flags, cpu_name

UTILIZATION = 0.4
"""Share of a device's FLOP/s that training is assumed to reach by default. PaLM's 46% was among the highest
published (Chowdhery et al., 2022); small models on one device reach less."""


@dataclass(frozen=True)
class Device:
    """A device's memory and speed, and its node. Rates are in FLOP/s and bytes/s; None if unknown."""

    name: str
    kind: str
    """Device type in torch: cpu, cuda (also AMD's GPUs), mps, or xpu (Intel's GPUs, on which gptworks does not run)."""
    memory_bytes: int
    half_flops: float | None
    """FLOP/s in bf16, or in fp16 on a device without bf16."""
    float_flops: float | None
    """FLOP/s in float32, without TF32."""
    bandwidth: float | None
    source: str
    has_bf16: bool = True
    intra_node: float = 32e9
    """Bandwidth within a node, in bytes/s and per direction."""
    inter_node: float = 12.5e9
    """Bytes/s that one device sends to other nodes: the node's network bandwidth, divided by its number of devices."""
    per_node: int = 8
    """Devices in a node."""
    host_bytes: int | None = None
    """Host memory of a node; None if unknown. Plans do not check unknown host memory."""
    network_source: str = "assumed: PCIe 4.0 ×16, 100 Gb/s Ethernet for each device"
    is_laptop: bool = False
    """Whether the device is built into a laptop, so that no second device can be added."""

    @property
    def on_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def has_flash(self) -> bool:
        """Whether torch has flash attention for the device. NVIDIA GPUs with bf16 (compute capability 8.0 or higher)
        have it. `gptworks.kernels.dispatch.has_flash` asks torch."""
        return self.kind == "cuda" and self.has_bf16 and not self.name.startswith("AMD")

    @property
    def has_fused(self) -> bool:
        """Whether torch has fused attention for training on the device; see `gptworks.model.cost.Shapes`."""
        return self.kind != "mps"

    @property
    def fuses_groups(self) -> bool:
        """Whether torch has fused attention for grouped queries on the device; see `gptworks.model.cost.Shapes`."""
        return self.kind != "cuda" or self.has_bf16

    def flops(self, precision: str) -> float | None:
        """Return the FLOP/s of matrix products in fp32, bf16 or fp16; None if unknown."""
        return self.float_flops if precision == "fp32" else self.half_flops


def custom_device(memory_gib: float, flops: float | None, bandwidth: float | None) -> Device:
    """Return a device with this memory, FLOP/s in every precision, and memory bandwidth in bytes/s; None if unknown."""
    return Device("GPU", "cuda", round(memory_gib * 2**30), flops, flops, bandwidth, "given")


LOOPBACK: dict[str, Any] = {
    "intra_node": 1.5e9, "inter_node": 0.125e9, "network_source": "assumed: gloo over loopback, 1 Gb/s Ethernet",
}  # fmt: skip
"""Network fields of `Device` for ranks on CPUs."""


def this_cpu() -> Device:
    """Return this machine's CPU with the memory available now; its rates are None, because they are not measured."""
    return Device(
        cpu_name() or "this machine", "cpu", available_memory_bytes(), None, None, None,
        "this machine", has_bf16=bool(cpu_flags() & NATIVE_BF16), **LOOPBACK,
    )  # fmt: skip
