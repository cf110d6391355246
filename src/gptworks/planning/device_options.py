"""A user's description of a device and its node: the options of `plan` and `rehearse`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from gptworks.errors import UserError
from gptworks.planning.device_table import find_device
from gptworks.planning.devices import Device, custom_device, this_cpu

MEASURED = ("this", "cpu")
"""Names of this machine's devices, whose memory and speed are measured."""


@dataclass(frozen=True)
class DeviceOptions:
    """A user's description of a device, by name or by figures, and of its node. Options that are not given are None."""

    device: str | None = None
    """A name such as h100, or a GPU's memory such as `8 GB`. `this` or `cpu` means this machine's device or CPU,
    measured. None, if `memory_gib` is None too, means this machine's CPU, not measured."""
    memory_gib: float | None = None
    """Memory in GiB of a device described by figures."""
    flops: float | None = None
    bandwidth: float | None = None
    """`flops` and `bandwidth`: FLOP/s in every precision, and memory bytes/s. Both replace a named device's figures."""
    utilization: float | None = None
    """Share of the device's FLOP/s that training reaches while it computes; by default, `UTILIZATION`."""
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
        if self.memory_gib is None and self.device is None and (self.flops is not None or self.bandwidth is not None):
            raise UserError("--flops or --bandwidth of which device? Give --device or --memory-gib too.")

    def found(self, measured: Callable[[str], Device]) -> Device:
        """Return the described device, without the options about its node; see `in_node`.

        Args:
            measured: measures and returns a device of this machine; called with `this` or `cpu`.

        Raises:
            UserError: `device` names no known device, or several.
        """
        if self.memory_gib is not None:
            return custom_device(self.memory_gib, self.flops, self.bandwidth)
        if self.device is None:
            return this_cpu()
        name = self.device.strip().lower()
        device = measured(name) if name in MEASURED else find_device(self.device)
        if self.flops is None and self.bandwidth is None:
            return device
        return replace(
            device,
            half_flops=self.flops or device.half_flops,
            float_flops=self.flops or device.float_flops,
            bandwidth=self.bandwidth or device.bandwidth,
            source=f"some figures given; {device.source}",
        )

    def in_node(self, device: Device, n_ranks: int) -> Device:
        """Return `device` with the node that these options describe. By default, all ranks are on one node unless the
        device is a CUDA GPU. Ranks on a CPU divide its memory."""
        node = (self.intra_node_gb_s, self.inter_node_gb_s, self.gpus_per_node, self.host_memory_gib)
        intra, inter, per_node, host = node
        memory = device.memory_bytes
        if device.on_cpu:  # the ranks share the CPU's memory, as in `gptworks.device.rank_memory_bytes`
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
