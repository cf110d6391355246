"""Memory and speed of known devices, from vendors' datasheets, and of this machine's CPU, without torch.

Rates are for dense matrices and sums in float32; datasheets also print doubled rates, for structured sparsity. Memory
is the printed number of gigabytes of 10⁹ bytes; a GPU has up to 7% more, which its driver's context takes.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from gptworks.errors import UserError, did_you_mean
from gptworks.machine import NATIVE_BF16, available_memory_bytes, cpu_flags, cpu_name

UTILIZATION = 0.4
"""Share of a device's FLOP/s that training is assumed to reach by default. PaLM's 46% was among the highest
published (Chowdhery et al., 2022); small models on one device reach less."""


@dataclass(frozen=True)
class Device:
    """A device's memory and speed, and its node. Rates are in FLOP/s and bytes/s; None: the vendor publishes none."""

    name: str
    kind: str
    """Device type in torch: cpu, cuda (also for AMD's GPUs) or mps."""
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
    """Host memory of a node; None: unknown, so plans do not check it."""
    network_source: str = "assumed: PCIe 4.0 ×16, 100 Gb/s Ethernet for each device"

    @property
    def on_cpu(self) -> bool:
        return self.kind == "cpu"

    def flops(self, precision: str) -> float | None:
        """Return the FLOP/s of matrix products in fp32, bf16 or fp16; None if unknown."""
        return self.float_flops if precision == "fp32" else self.half_flops


def _node(intra: float, inter: float, per_node: int, host: int, source: str) -> dict[str, Any]:
    """Return a node's fields of `Device`. `intra` and `inter` are one device's GB/s in one direction, within the node
    and to other nodes; `host` is in GB."""
    return {
        "intra_node": intra * 1e9, "inter_node": inter * 1e9, "per_node": per_node, "host_bytes": host * 10**9,
        "network_source": source,
    }  # fmt: skip


_DGX_V100 = _node(150, 6.25, 8, 512, "DGX-1: NVLink 2, 4 × 100 Gb/s for 8 GPUs, 512 GB of host memory")
_DGX_A100 = _node(300, 25, 8, 1000, "DGX A100: NVLink 3, 200 Gb/s HDR each, 1 TB of host memory")
_DGX_A100_80 = _node(300, 25, 8, 2000, "DGX A100: NVLink 3, 200 Gb/s HDR each, 2 TB of host memory")
_DGX_H100 = _node(450, 50, 8, 2000, "DGX H100: NVLink 4, 400 Gb/s NDR each, 2 TB of host memory")
_DGX_B200 = _node(900, 50, 8, 2000, "DGX B200: NVLink 5, 400 Gb/s each, 2 TB of host memory")
_MI300X = _node(448, 50, 8, 2000, "MI300X platform: Infinity Fabric; 400 Gb/s each and 2 TB of host memory assumed")
_FRONTIER = _node(200, 25, 4, 512, "Frontier: Infinity Fabric, 4 × 200 Gb/s, 512 GB of host memory")
_PCIE5 = _node(64, 25, 8, 1000, "PCIe 5.0 ×16; 200 Gb/s each and 1 TB of host memory assumed")
_SERVER = _node(32, 3.125, 4, 192, "PCIe 4.0 ×16; 4 to a node with 100 Gb/s and 192 GB of host memory assumed")
_OLD_SERVER = _node(16, 3.125, 4, 192, "PCIe 3.0 ×16; 4 to a node with 100 Gb/s and 192 GB of host memory assumed")
_DESKTOP = _node(32, 0.625, 2, 64, "PCIe 4.0 ×16; 2 to a node with 10 Gb/s and 64 GB of host memory assumed")
_NEW_DESKTOP = _node(64, 0.625, 2, 64, "PCIe 5.0 ×16; 2 to a node with 10 Gb/s and 64 GB of host memory assumed")
"""The nodes above state the rates of NVLink and PCIe for one direction; vendors print the sum of both directions."""


def _gpu(
    name: str,
    gigabytes: int,
    half: float,
    single: float,
    bandwidth: float,
    source: str,
    node: dict[str, Any],
    has_bf16: bool = True,
) -> Device:
    """Return a GPU. `half` and `single` are the TFLOP/s in half and single precision; `bandwidth` is in GB/s."""
    return Device(
        name, "cuda", gigabytes * 10**9, half * 1e12, single * 1e12, bandwidth * 1e9, source, has_bf16, **node
    )  # fmt: skip


def _apple(name: str, gigabytes: int, single: float, bandwidth: float) -> Device:
    """Return an Apple chip with the largest memory sold; its CPU shares the memory. Apple states only float32 rates."""
    rate = single * 1e12
    return Device(name, "mps", gigabytes * 10**9, rate, rate, bandwidth * 1e9, "Apple, press release", has_bf16=False)


DEVICES: dict[str, Device] = {
    "a100-40gb": _gpu("NVIDIA A100 40GB", 40, 312, 19.5, 1555, "NVIDIA A100 datasheet", _DGX_A100),
    "a100-80gb": _gpu("NVIDIA A100 80GB SXM", 80, 312, 19.5, 2039, "NVIDIA A100 datasheet", _DGX_A100_80),
    "h100-sxm": _gpu("NVIDIA H100 SXM", 80, 989, 67, 3350, "NVIDIA H100 datasheet", _DGX_H100),
    "h100-pcie": _gpu("NVIDIA H100 PCIe", 80, 756, 51, 2000, "NVIDIA H100 datasheet", _PCIE5),
    "h200": _gpu("NVIDIA H200 SXM", 141, 989, 67, 4800, "NVIDIA H200 datasheet", _DGX_H100),
    "b200": _gpu("NVIDIA B200, HGX", 180, 2250, 75, 7700, "NVIDIA HGX B200 datasheet", _DGX_B200),
    "l4": _gpu("NVIDIA L4", 24, 121, 30.3, 300, "NVIDIA L4 datasheet", _SERVER),
    "l40s": _gpu("NVIDIA L40S", 48, 362, 91.6, 864, "NVIDIA L40S datasheet", _SERVER),
    "a10": _gpu("NVIDIA A10", 24, 125, 31.2, 600, "NVIDIA A10 datasheet", _SERVER),
    "t4": _gpu("NVIDIA T4", 16, 65, 8.1, 300, "NVIDIA T4 datasheet", _OLD_SERVER, has_bf16=False),
    "v100-16gb": _gpu("NVIDIA V100 16GB SXM2", 16, 125, 15.7, 900, "NVIDIA V100 datasheet", _DGX_V100, has_bf16=False),
    "v100-32gb": _gpu("NVIDIA V100 32GB SXM2", 32, 125, 15.7, 900, "NVIDIA V100 datasheet", _DGX_V100, has_bf16=False),
    "rtx-3090": _gpu("NVIDIA GeForce RTX 3090", 24, 71, 35.6, 936, "NVIDIA GA102 whitepaper", _DESKTOP),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", 24, 165.2, 82.6, 1008, "NVIDIA Ada whitepaper", _DESKTOP),
    "rtx-5090": _gpu(
        "NVIDIA GeForce RTX 5090", 32, 209.5, 104.8, 1792, "NVIDIA RTX Blackwell whitepaper", _NEW_DESKTOP
    ),
    "mi250x": _gpu("AMD Instinct MI250X", 128, 383, 47.9, 3277, "AMD MI250X data sheet", _FRONTIER),
    "mi300x": _gpu("AMD Instinct MI300X", 192, 1307, 163.4, 5300, "AMD MI300X data sheet", _MI300X),
    "m1": _apple("Apple M1", 16, 2.6, 68),
    "m1-pro": _apple("Apple M1 Pro", 32, 5.2, 200),
    "m1-max": _apple("Apple M1 Max", 64, 10.4, 400),
    "m1-ultra": _apple("Apple M1 Ultra", 128, 21, 800),
    "m2": _apple("Apple M2", 24, 3.6, 100),
    "m2-ultra": _apple("Apple M2 Ultra", 192, 27.2, 800),
}
"""Known devices by the names that `--device` accepts."""

ALIASES = {"a100": "a100-80gb", "h100": "h100-sxm", "v100": "v100-16gb"}


def find_device(name: str) -> Device:
    """Return the device called `name`, in any usual spelling: h100, H100-SXM, rtx 4090.

    Raises:
        UserError: no device has this name; the nearest one is suggested.
    """
    key = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-")
    key = ALIASES.get(key, key)
    if key in DEVICES:
        return DEVICES[key]
    squeezed = {known.replace("-", ""): known for known in (*DEVICES, *ALIASES)}
    if key.replace("-", "") in squeezed:
        return find_device(squeezed[key.replace("-", "")])
    hint = did_you_mean(key, (*DEVICES, *ALIASES, "this"))
    raise UserError(
        f"no device is called `{name}`{hint} Known: this, {', '.join(DEVICES)}; or give --memory-gib, --flops and "
        f"--bandwidth."
    )


def custom_device(memory_gib: float, flops: float | None, bandwidth: float | None) -> Device:
    """Return a device with this memory, FLOP/s in every precision, and memory bandwidth in bytes/s; None: unknown."""
    return Device("custom", "cuda", round(memory_gib * 2**30), flops, flops, bandwidth, "given")


@dataclass(frozen=True)
class DeviceOptions:
    """A user's description of a device, by name or by figures, and of its node. None: the option is not given."""

    device: str | None = None
    """A name such as h100; `this`: this machine's device, measured. None (without `memory_gib`): this machine's CPU."""
    memory_gib: float | None = None
    """Memory in GiB of a device described by figures."""
    flops: float | None = None
    bandwidth: float | None = None
    """`flops` and `bandwidth`: FLOP/s of a device described by figures, and bytes/s of its memory."""
    utilization: float | None = None
    """Share of the device's FLOP/s that training reaches while it computes; None: `UTILIZATION`."""
    intra_node_gb_s: float | None = None
    inter_node_gb_s: float | None = None
    """`intra_node_gb_s` and `inter_node_gb_s`: GB/s that a device sends within its node, and to other nodes."""
    gpus_per_node: int | None = None
    """Number of devices in a node, each with one rank."""
    host_memory_gib: float | None = None
    """Host memory of a node in GiB."""

    def __post_init__(self) -> None:
        """Raise a UserError if a figure is not above 0, or if the options contradict each other."""
        for name, figure in asdict(self).items():
            if name != "device" and figure is not None and not figure > 0:
                raise UserError(f"--{name.replace('_', '-')} {figure:g} is not above 0.")
        if self.utilization is not None and self.utilization > 1:
            raise UserError(
                f"--utilization {self.utilization:g} is above 1: it is a share of the device's rate, such as 0.4."
            )
        if self.memory_gib is not None and self.device is not None:
            raise UserError(
                f"--device {self.device} and --memory-gib {self.memory_gib:g} both describe the device: give one."
            )
        if self.memory_gib is None and (self.flops is not None or self.bandwidth is not None):
            raise UserError("--flops or --bandwidth without --memory-gib: give the device's memory too, or its name.")

    def found(self, measured: Callable[[], Device]) -> Device:
        """Return the described device, without the options about its node; see `in_node`.

        Args:
            measured: measures and returns this machine's device; called for the name `this`.
        """
        if self.memory_gib is not None:
            return custom_device(self.memory_gib, self.flops, self.bandwidth)
        if self.device is None:
            return this_cpu()
        return measured() if self.device == "this" else find_device(self.device)

    def in_node(self, device: Device, n_ranks: int) -> Device:
        """Return `device` with the node that these options describe. By default, ranks on CPUs share one machine."""
        node = (self.intra_node_gb_s, self.inter_node_gb_s, self.gpus_per_node, self.host_memory_gib)
        intra, inter, per_node, host = node
        memory = device.memory_bytes
        if device.on_cpu:  # the ranks share its memory, as in `gptworks.device.rank_memory_bytes`
            memory //= min(per_node or n_ranks, n_ranks)
        source = device.network_source
        if any(node):
            source = "given" if None not in node else f"some given; {source}"
        return replace(
            device,
            memory_bytes=memory,
            intra_node=device.intra_node if intra is None else intra * 1e9,
            inter_node=device.inter_node if inter is None else inter * 1e9,
            per_node=per_node or (n_ranks if device.kind != "cuda" else device.per_node),
            host_bytes=device.host_bytes if host is None else round(host * 2**30),
            network_source=source,
        )


# --------------------------------------------------------------------------------------------- this machine


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
