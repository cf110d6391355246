"""Memory that training holds on the host, in addition to its steps.

Each rank builds the model in float32 on the host and moves it to its device. Of a model that ranks divide, it makes one
whole tensor after the other on the host, and keeps its part on its device. It reads the starting weights whole. Rank 0
gathers and copies a whole checkpoint, and writes the copy while training continues. On a CPU, device and host share one
memory, so that these moments are part of a device's peak.
"""

from dataclasses import dataclass
from math import prod

from gptworks.planning.devices import Device
from gptworks.planning.layout import rank_config
from gptworks.planning.params import ParameterCount, count_parameters
from gptworks.planning.setting import Setting
from gptworks.planning.state import held_weights_bytes, trained_state_bytes
from gptworks.planning.trained import Trained, everything
from gptworks.units import readable

PROCESS_BYTES, CUDA_PROCESS_BYTES = 400 * 10**6, 10**9
"""Approximate memory of a training process without a model: Python, torch and their libraries. 320 MB with the imports
and 400 MB in a run, as measured on Linux with torch 2.13 for CPUs (docs/benchmarks.md); with CUDA's libraries about 1
GB, an assumption."""


@dataclass(frozen=True)
class HostMemory:
    """Host memory used by the ranks of the fullest node, which is the node of rank 0."""

    moment: str
    """`building the model`, `starting weights` or `checkpoint`."""
    n_ranks: int
    rank_bytes: int
    """Bytes of each rank at that moment, with its process."""
    first_rank_bytes: int
    """Additional bytes of rank 0."""
    limit_bytes: int | None
    """The host's memory; None: unknown, and not checked."""
    one_rank_bytes: int
    """Peak `total_bytes` of a node with rank 0 only: the least memory that a host must have."""

    @property
    def total_bytes(self) -> int:
        return self.n_ranks * self.rank_bytes + self.first_rank_bytes

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.total_bytes <= self.limit_bytes

    @property
    def words(self) -> str:
        """A sentence with a node's needs and its host's memory, for the plan and the check before training."""
        first = f" and {readable(self.first_rank_bytes, 'B')} of rank 0" if self.first_rank_bytes else ""
        parts = f"{self.n_ranks} × {readable(self.rank_bytes, 'B')}{first}, {self.moment}"
        if self.limit_bytes is None:
            verdict = "what there is is not known"
        elif self.fits:
            verdict = f"{self.total_bytes / self.limit_bytes:.0%} of {readable(self.limit_bytes, 'B')}"
        else:
            times = self.total_bytes / max(self.limit_bytes, 1)
            verdict = f"DOES NOT FIT: {times:.3g} times the {readable(self.limit_bytes, 'B')} there are"
            verdict += f"; with one rank a node, {readable(self.one_rank_bytes, 'B')}" if self.n_ranks > 1 else ""
        return f"about {readable(self.total_bytes, 'B')} a node ({parts}), {verdict}"


def host_memory(setting: Setting, device: Device) -> HostMemory | None:
    """Memory that training needs on the host; None on a CPU, which is both device and host."""
    if device.on_cpu:
        return None
    n = min(device.per_node, setting.layout.world_size)
    building, starting = building_bytes(setting), starting_bytes(setting)
    copy = checkpoint_copy_bytes(setting) if setting.saves else 0
    moments = {"building the model": (building, 0), "starting weights": (starting, 0), "checkpoint": (0, copy)}
    moment, (each, first) = max(moments.items(), key=lambda item: n * item[1][0] + item[1][1])
    one = CUDA_PROCESS_BYTES + max(each + first for each, first in moments.values())
    return HostMemory(moment, n, CUDA_PROCESS_BYTES + each, first, device.host_bytes, one)


def whole_model(setting: Setting) -> tuple[ParameterCount, Trained]:
    """The parameters of the model of all tensor-parallel ranks together, and the trained part."""
    parameters = count_parameters(setting.model)
    return parameters, setting.trained or everything(parameters)


def building_bytes(setting: Setting) -> int:
    """Bytes on the host while a new model is built, in float32 except for the packed base of an adapter."""
    layout, (parameters, trained) = setting.layout, whole_model(setting)
    if layout.n_parts == 1:
        return held_weights_bytes(parameters, trained)
    on_device = placed_bytes(setting) if setting.on_cpu else 0
    return on_device + 4 * max(prod(shape) for shape in parameters.shapes.values())


def starting_bytes(setting: Setting) -> int:
    """Bytes of the weights of the run that this run starts from, in float32 and packed; 0 without such a run."""
    if not setting.starts_from:
        return 0
    parameters, trained = whole_model(setting)
    return 4 * parameters.total + (held_weights_bytes(parameters, trained) if trained.base != "full" else 0)


def checkpoint_copy_bytes(setting: Setting) -> int:
    """Bytes of rank 0's copy of a whole checkpoint: all ranks' weights, their average and the optimizer's state."""
    parameters, trained = whole_model(setting)
    average = 4 * trained.parameters if setting.averages else 0
    state = trained_state_bytes(parameters, setting.optimizer, trained, setting.optimizer_state)
    return held_weights_bytes(parameters, trained) + average + state


def placed_bytes(setting: Setting) -> int:
    """Bytes of a rank's weights after the model is placed."""
    layout = setting.layout
    parameters = count_parameters(rank_config(setting.model, layout.tensor_parallel))
    held = held_weights_bytes(parameters, setting.trained or everything(parameters))
    return held // layout.data_parallel if layout.sharding != "none" else held


ONEDNN_KERNEL_BYTES, ONEDNN_KEEPS = 555_000, 1024
"""Bytes of a compiled bfloat16 product, measured on AVX-512; and the number of kernels that oneDNN keeps."""


def expert_kernels_bytes(setting: Setting) -> int:
    """Most bytes of the kernels that oneDNN compiles on a CPU for each number of rows of a bf16 expert: two products
    forward, and four backward. 0: the model needs no such kernels."""
    if not (setting.on_cpu and setting.precision == "bf16" and setting.model.n_experts):
        return 0
    n_tokens = setting.micro_batch_size * setting.objective.rows_per_sample * setting.model.context_length
    n_rows = min(n_tokens, 31 + 16 * max(0, n_tokens.bit_length() - 5))  # `expert_rows` rounds to five binary digits
    return ONEDNN_KERNEL_BYTES * min(6 * n_rows, ONEDNN_KEEPS)
