"""Runs the numeric tests as if on other processors.

    python tests/as_processors.py [NAME]... [-- PYTEST ARGUMENT...]

oneDNN, torch and the native kernels are limited to the instructions of each processor in turn, so that one machine
stands for several. A processor whose instructions this machine lacks is skipped by name; but AMX, which few machines
have, is emulated for the native kernels (amx_emulator.cpp). Exits with 1 if a test failed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
# fmt: off
NUMERIC = [
    "attention", "backend", "batch_generate", "concurrency", "cpu", "distillation", "engine", "engine_machine",
    "equivalence", "gemm", "instruction", "lora", "loss", "model", "moe", "native", "native_attention",
    "native_optimizer", "optim", "packing", "passes", "preference", "quantize", "resume", "reuse", "reward", "rope",
    "sampling", "speculate", "train", "training_evaluation",
]
# fmt: on
"""The tests whose results depend on arithmetic: the model, the training step, losses, learning, the engine, quantized
weights, the native kernels."""

AMX_EMULATOR = TESTS / "amx_emulator.cpp"


@dataclass(frozen=True)
class Processor:
    """A kind of processor: what it needs from this one, and what libraries may use."""

    flags: frozenset[str]
    """Of /proc/cpuinfo."""
    onednn: str | None
    """The limit for oneDNN (ONEDNN_MAX_CPU_ISA); None: no limit."""
    aten: str
    """The limit for torch's own loops (ATEN_CPU_CAPABILITY)."""
    emulates_amx: bool = False
    """The native kernels are built for this machine's processor and run with AMX emulated."""

    def environment(self, name: str, folder: Path) -> dict[str, str]:
        """Return variables that limit the libraries to this processor. folder: where to build what they need."""
        limits = {"ATEN_CPU_CAPABILITY": self.aten}
        limits |= {"LD_PRELOAD": str(built_emulator(folder))} if self.emulates_amx else {"GPTWORKS_NATIVE_MARCH": name}
        return limits if self.onednn is None else limits | {"ONEDNN_MAX_CPU_ISA": self.onednn}


AVX2 = frozenset({"avx2", "fma", "bmi2", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
ZEN4 = AVX512 | {"avx512_bf16", "avx512_vnni", "avx512_vbmi2", "gfni"}
PROCESSORS = {
    "haswell": Processor(AVX2, "AVX2", "avx2"),
    "skylake-avx512": Processor(AVX512, "AVX512_CORE", "avx512"),
    "znver4": Processor(ZEN4, "AVX512_CORE_BF16", "avx512"),
    "sapphirerapids": Processor(ZEN4 | {"amx_tile", "amx_bf16", "amx_int8", "avx512_fp16"}, None, "avx512"),
    "amx": Processor(ZEN4, "AVX512_CORE_BF16", "avx512", emulates_amx=True),
}


def flags_here() -> frozenset[str]:
    """Return this processor's feature flags; empty if it does not list them as x86 does on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def built_emulator(folder: Path) -> Path:
    """Build the library that emulates AMX when preloaded (LD_PRELOAD) into a folder; return its path."""
    library = folder / "amx_emulator.so"
    compiler = shutil.which("g++") or "g++"
    options = ("-O3", "-march=native", "-shared", "-fPIC", str(AMX_EMULATOR), "-o", str(library), "-ldl")
    subprocess.run([compiler, *options], check=True)
    return library


def main() -> int:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    names, pytest_arguments = arguments[:cut] or list(PROCESSORS), arguments[cut + 1 :]
    if unknown := sorted(set(names) - set(PROCESSORS)):
        print(f"unknown processor {', '.join(unknown)}: choose among {', '.join(PROCESSORS)}")
        return 2
    files = [str(TESTS / f"test_{name}.py") for name in NUMERIC if (TESTS / f"test_{name}.py").exists()]
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *pytest_arguments, *files]
    here, outcomes = flags_here(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            processor = PROCESSORS[name]
            if missing := sorted(processor.flags - here):
                outcomes[name] = f"skipped: this processor lacks {', '.join(missing)}"
                continue
            if processor.emulates_amx and PROCESSORS["sapphirerapids"].flags <= here:
                outcomes[name] = "skipped: this processor has it"
                continue
            environment = processor.environment(name, Path(folder))
            print(f"\nas {name}: {' '.join(f'{k}={v}' for k, v in environment.items())}", flush=True)
            started = time.monotonic()
            code = subprocess.run(command, env=os.environ | environment, check=False).returncode
            outcomes[name] = f"{'passed' if code == 0 else 'FAILED'} in {time.monotonic() - started:.0f} s"
    print()
    for name, outcome in outcomes.items():
        print(f"{name:16}{outcome}")
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
