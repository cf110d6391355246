"""Which device a model runs on, and in which precision it multiplies."""

import contextlib
import ctypes
import platform
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from gptworks.errors import UserError


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; auto takes CUDA, then MPS, then the CPU.

    Raises:
        UserError: the device asked for is not on this machine.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, there in available.items() if there))
    if not available.get(name.partition(":")[0], False):
        there = ", ".join(device for device, there in available.items() if there)
        raise UserError(f"device {name} is not available here: use one of {there}, or auto.")
    return torch.device(name)


@dataclass(frozen=True)
class Precision:
    """The dtype of matrix products. Weights, their gradients and the optimizer stay float32."""

    name: str
    device_type: str
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which the forward pass runs."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients would underflow without loss scaling (Micikevicius et al., 2018)."""
        return self.dtype == torch.float16


def choose_precision(name: str, device: torch.device) -> Precision:
    """The precision called `name` on this device; auto takes bf16 where it is native, fp16 on older GPUs, else fp32.

    Raises:
        UserError: fp16 away from CUDA, where no loss scaling exists.
    """
    if name == "auto":
        slower = "fp16" if device.type == "cuda" else "fp32"
        name = "bf16" if multiplies_bf16_natively(device) else slower
    if name == "fp16" and device.type != "cuda":
        raise UserError(f"precision fp16 needs a CUDA device and this is {device.type}: use auto, bf16 or fp32.")
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return Precision(name, device.type, dtypes[name])


def multiplies_bf16_natively(device: torch.device) -> bool:
    """Whether bf16 products are faster than fp32 here rather than emulated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})
    return False


def cpu_flags() -> set[str]:
    """The processor's feature names as Linux gives them; empty elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.lower().startswith(("flags", "features")):
            return set(line.partition(":")[2].split())
    return set()


def device_name(device: torch.device) -> str:
    """The device as a person would name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = ""
    if device.type == "cpu" and cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def keep_freed_memory() -> None:
    """Ask the allocator to keep large freed blocks instead of giving them back to the system.

    A training step on the CPU frees and takes the same hundreds of megabytes again and again; with glibc's defaults
    every one of those pages is handed back, faulted in and zeroed anew. No effect where there is no glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    libc = ctypes.CDLL(None)
    if not libc.mallopt(mmap_threshold, 2**30):
        libc.mallopt(mmap_threshold, 2**25)  # the most that older releases accept
    libc.mallopt(trim_threshold, 2**31 - 1)
