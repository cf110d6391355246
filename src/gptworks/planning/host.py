"""Host memory that training needs to build the model, to read starting weights and to write checkpoints.

Each rank builds the model in float32 on the host and moves it to its device. If ranks divide the model, each rank makes
one whole tensor at a time on the host and keeps its part on its device. Each rank reads all starting weights. For a
checkpoint, each rank copies its parts and writes them while training continues; only rank 0 copies and writes
replicated tensors. A CPU is both device and host, so its peak includes these bytes.
"""

from dataclasses import dataclass
from math import prod

from gptworks.planning.devices import Device
from gptworks.planning.layout import shards_of
from gptworks.planning.params import ParameterCount, Trained
from gptworks.planning.setting import Setting
from gptworks.planning.state import held_weights_bytes, owned_state_bytes, state_in_parts_bytes, trained_state_bytes
from gptworks.units import readable

PROCESS_BYTES, CUDA_PROCESS_BYTES = 400 * 10**6, 10**9
"""Approximate memory of a training process without a model, on a CPU and with CUDA: Python, torch and their libraries.
Measured on Linux with torch 2.13 for CPUs: 320 MB after the imports, 400 MB in a run (docs/benchmarks.md). 1 GB with
CUDA's libraries is an assumption."""


@dataclass(frozen=True)
class HostMemory:
    """Peak host memory of the ranks on the fullest node, which is the node of rank 0."""

    moment: str
    """When the peak occurs: `building the model`, `starting weights` or `checkpoint`."""
    n_ranks: int
    rank_bytes: int
    """Bytes of each rank at the peak, including its process."""
    copied_bytes: int
    """Additional bytes at the peak: the copies of a checkpoint's parts that the node's ranks write."""
    limit_bytes: int | None
    """The host's memory; None if unknown, in which case `fits` is true."""
    one_rank_bytes: int
    """Peak bytes of a node that runs only rank 0: the smallest host memory that suffices."""

    @property
    def total_bytes(self) -> int:
        return self.n_ranks * self.rank_bytes + self.copied_bytes

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.total_bytes <= self.limit_bytes

    @property
    def words(self) -> str:
        """Text that compares a node's need with its host's memory, for the plan and the check before training."""
        copied = f" and {readable(self.copied_bytes, 'B')} copied" if self.copied_bytes else ""
        parts = f"{self.n_ranks} × {readable(self.rank_bytes, 'B')}{copied}, {self.moment}"
        if self.limit_bytes is None:
            verdict = "of a host whose memory is unknown"
        elif self.fits:
            verdict = f"{self.total_bytes / self.limit_bytes:.0%} of {readable(self.limit_bytes, 'B')}"
        else:
            times = self.total_bytes / max(self.limit_bytes, 1)
            verdict = f"DOES NOT FIT: {times:.3g} times the {readable(self.limit_bytes, 'B')} there are"
            verdict += f"; with one rank a node, {readable(self.one_rank_bytes, 'B')}" if self.n_ranks > 1 else ""
        return f"about {readable(self.total_bytes, 'B')} a node ({parts}), {verdict}"


def host_memory(setting: Setting, device: Device) -> HostMemory | None:
    """Return the memory that training needs on the host; None on a CPU, which is both device and host."""
    if device.on_cpu:
        return None
    n = min(device.per_node, setting.layout.world_size)
    building, starting = building_bytes(setting), starting_bytes(setting)
    own, copied = (copied_bytes(setting, n_ranks) if setting.saves else 0 for n_ranks in (1, n))
    moments = {"building the model": (building, 0), "starting weights": (starting, 0), "checkpoint": (0, copied)}
    moment, (each, there) = max(moments.items(), key=lambda item: n * item[1][0] + item[1][1])
    one = CUDA_PROCESS_BYTES + max(building, starting, own)
    return HostMemory(moment, n, CUDA_PROCESS_BYTES + each, there, device.host_bytes, one)


def building_bytes(setting: Setting) -> int:
    """Return the host bytes of a rank that builds the model, in float32 except for an adapter's quantized base. If
    ranks divide the model, these are the bytes of the largest tensor and, on a CPU, of the rank's part."""
    layout, (parameters, trained) = setting.layout, setting.whole
    if layout.n_parts == 1:
        return held_weights_bytes(parameters, trained)
    on_device = placed_bytes(setting) if setting.on_cpu else 0
    return on_device + 4 * max(prod(shape) for shape in parameters.shapes.values())


def starting_bytes(setting: Setting) -> int:
    """Return the bytes of the starting weights in float32; 0 if the run does not start from another run's weights.

    If an adapter's base is quantized, add the weights in training, because both exist at the same time.
    """
    if not setting.starts_from:
        return 0
    parameters, trained = setting.whole
    return 4 * parameters.total + (held_weights_bytes(parameters, trained) if trained.base != "full" else 0)


def checkpoint_bytes(setting: Setting) -> int:
    """Return the bytes of a checkpoint: weights, their average if the run keeps one, and the optimizer's state."""
    parameters, trained = setting.whole
    state = trained_state_bytes(parameters, setting.optimizer, trained, setting.optimizer_state)
    return _weights_bytes(setting, parameters, trained) + state


def copied_bytes(setting: Setting, n_ranks: int) -> int:
    """Return the bytes of the parts of a checkpoint that the first `n_ranks` ranks copy and write."""
    layout, optimizer, n_tensor = setting.layout, setting.optimizer, setting.layout.tensor_parallel
    whole, of_rank = (
        _weights_bytes(setting, *part) + state_in_parts_bytes(part[0], optimizer, part[1], setting.optimizer_state)
        for part in (setting.whole, setting.of_rank)
    )
    copied = of_rank  # the first rank writes all replicated parts
    if n_tensor > 1:
        copied += (min(n_ranks, n_tensor) - 1) * (whole - of_rank) // (n_tensor - 1)
    if layout.sharding != "none":
        copied = max(1, n_ranks // n_tensor) * (copied // layout.data_parallel)
    copied += n_ranks * owned_state_bytes(optimizer, setting.whole[1].matrices, layout.world_size)
    return min(copied, checkpoint_bytes(setting))


def _weights_bytes(setting: Setting, parameters: ParameterCount, trained: Trained) -> int:
    """Return the bytes of the weights and, if the run keeps one, of their average."""
    return held_weights_bytes(parameters, trained) + (4 * trained.parameters if setting.averages else 0)


def placed_bytes(setting: Setting) -> int:
    """Return the bytes of a rank's weights once the model is divided among the ranks."""
    parameters, trained = setting.of_rank
    shards = shards_of(parameters, setting.rank_model, trained, setting.layout.n_shards)
    return shards.rank_bytes(held_weights_bytes(parameters, trained), 4 * shards.whole)


ONEDNN_KERNEL_BYTES, ONEDNN_KEEPS = 555_000, 1024
"""Bytes of a compiled kernel for a bf16 product, measured on AVX-512, and the number of kernels that oneDNN keeps."""


def expert_kernels_bytes(setting: Setting) -> int:
    """Return the largest memory of the kernels that oneDNN compiles for experts in bf16 on a CPU.

    For each number of rows, there are two products in the forward pass and four in the backward pass. The result is 0
    if the model has no experts or does not run in bf16 on a CPU.
    """
    if not (setting.on_cpu and setting.precision == "bf16" and setting.model.n_experts):
        return 0
    n_tokens = setting.micro_batch_size * setting.objective.rows_per_sample * setting.row_length
    n_rows = min(n_tokens, 31 + 16 * max(0, n_tokens.bit_length() - 5))  # distinct values of `expert_rows`
    return ONEDNN_KERNEL_BYTES * min(6 * n_rows, ONEDNN_KEEPS)
