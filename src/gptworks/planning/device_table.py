"""Memory and speed of known devices, from vendors' datasheets. `find_device` returns a device by its name.

Rates are for dense matrices (datasheets also print doubled rates, for structured sparsity) with sums in float32. Memory
is the printed number of gigabytes of 10⁹ bytes, except for Apple's chips (see `_apple`). A GPU has up to 7% more
memory, which its driver's context takes.
"""

import difflib
import re
from typing import Any

from gptworks.errors import UserError, shortened
from gptworks.planning.devices import Device, custom_device


def _node(intra: float, inter: float, per_node: int, host: int | None, source: str) -> dict[str, Any]:
    """Return a node's fields of `Device`. `intra` and `inter` are one device's GB/s in one direction, within the node
    and to other nodes; `host` is in GB."""
    return {
        "intra_node": intra * 1e9, "inter_node": inter * 1e9, "per_node": per_node,
        "host_bytes": None if host is None else host * 10**9, "network_source": source,
    }  # fmt: skip


_DGX_V100 = _node(150, 6.25, 8, 512, "DGX-1: NVLink 2, 4 × 100 Gb/s for 8 GPUs, 512 GB of host memory")
_DGX_A100 = _node(300, 25, 8, 1000, "DGX A100: NVLink 3, 200 Gb/s HDR each, 1 TB of host memory")
_DGX_A100_80 = _node(300, 25, 8, 2000, "DGX A100: NVLink 3, 200 Gb/s HDR each, 2 TB of host memory")
_DGX_H100 = _node(450, 50, 8, 2000, "DGX H100: NVLink 4, 400 Gb/s NDR each, 2 TB of host memory")
_DGX_B200 = _node(900, 50, 8, 2000, "DGX B200: NVLink 5, 400 Gb/s each, 2 TB of host memory")
_MI300X = _node(448, 50, 8, 2000, "MI300X platform: Infinity Fabric; 400 Gb/s each and 2 TB of host memory assumed")
_MI355X = _node(537, 50, 8, 2000, "MI355X platform: Infinity Fabric; 400 Gb/s each and 2 TB of host memory assumed")
_FRONTIER = _node(200, 25, 4, 512, "Frontier: Infinity Fabric, 4 × 200 Gb/s, 512 GB of host memory")
_PCIE5 = _node(64, 25, 8, 1000, "PCIe 5.0 ×16; 200 Gb/s each and 1 TB of host memory assumed")
_SERVER = _node(32, 3.125, 4, 192, "PCIe 4.0 ×16; 4 to a node with 100 Gb/s and 192 GB of host memory assumed")
_OLD_SERVER = _node(16, 3.125, 4, 192, "PCIe 3.0 ×16; 4 to a node with 100 Gb/s and 192 GB of host memory assumed")
_DESKTOP = _node(32, 0.625, 2, 64, "PCIe 4.0 ×16; 2 to a node with 10 Gb/s and 64 GB of host memory assumed")
_OLD_DESKTOP = _node(16, 0.625, 2, 64, "PCIe 3.0 ×16; 2 to a node with 10 Gb/s and 64 GB of host memory assumed")
_NEW_DESKTOP = _node(64, 0.625, 2, 64, "PCIe 5.0 ×16; 2 to a node with 10 Gb/s and 64 GB of host memory assumed")
_LAPTOP = _node(16, 0.125, 1, None, "a laptop; 1 Gb/s Ethernet assumed") | {"is_laptop": True}
"""The nodes above state the rates of NVLink and PCIe for one direction; vendors print the sum of both directions."""

DEVICES: dict[str, Device] = {}
"""Known devices by name. If several differ only in memory, a name without memory means the first one."""

Figures = tuple[str, int, float, float]
"""A device's name, its memory in GB, its TFLOP/s in float32, and the bandwidth of its memory in GB/s."""


def _gpu(
    name: str,
    gigabytes: int,
    half: float,
    single: float,
    bandwidth: float,
    source: str,
    node: dict[str, Any],
    has_bf16: bool = True,
    kind: str = "cuda",
) -> None:
    """Add a GPU. `half` and `single` are the TFLOP/s in half and single precision; `bandwidth` is in GB/s."""
    _add(
        Device(
            name, kind, gigabytes * 10**9, half * 1e12, single * 1e12, bandwidth * 1e9, source, has_bf16, **node
        )
    )  # fmt: skip


def _add(device: Device) -> None:
    words = re.sub(r"NVIDIA|GeForce|AMD|Instinct|Radeon|Intel|Apple|Generation", "", device.name)
    DEVICES["-".join(words.lower().split())] = device


def _geforce(series: list[Figures], tensor: int, source: str, node: dict[str, Any], has_bf16: bool = True) -> None:
    """Add GeForce GPUs. With sums in float32, tensor cores reach `tensor` times the float32 rate of the CUDA cores."""
    for name, gigabytes, single, bandwidth in series:
        _gpu(f"NVIDIA GeForce RTX {name}", gigabytes, tensor * single, single, bandwidth, source, node, has_bf16)


def _apple(chip: str, gibibytes: tuple[int, ...], single: float, bandwidth: float, source: str) -> None:
    """Add an Apple chip in each size of memory. The GPU has one rate in all precisions, and shares memory with the CPU.

    The GPU gets the part that Metal recommends, two thirds of the memory, or three quarters from 36 GB on: the property
    `recommendedMaxWorkingSetSize` is 10,922.67 MiB of 16 GiB, 21,845.34 of 32, 49,152 of 64 and 73,728 of 96.
    """
    rate = single * 1e12
    for size in gibibytes:
        memory, share = (
            (size * 2**30 * 2 // 3, "two thirds") if size < 36 else (size * 2**30 * 3 // 4, "three quarters")
        )
        _add(
            Device(
                f"Apple {chip} {size}GB", "mps", memory, rate, rate, bandwidth * 1e9,
                f"{source}; {share} of the memory, as Metal recommends", has_bf16=False,
                host_bytes=size * 2**30 - memory, network_source="1 Gb/s Ethernet assumed", inter_node=0.125e9,
            )
        )  # fmt: skip


# ---------------------------------------------------------------------------------------- datacenters and workstations

_gpu("NVIDIA A100 80GB", 80, 312, 19.5, 2039, "NVIDIA A100 datasheet", _DGX_A100_80)
_gpu("NVIDIA A100 40GB", 40, 312, 19.5, 1555, "NVIDIA A100 datasheet", _DGX_A100)
_gpu("NVIDIA A100 PCIe 80GB", 80, 312, 19.5, 1935, "NVIDIA A100 datasheet", _SERVER)
_gpu("NVIDIA A100 PCIe 40GB", 40, 312, 19.5, 1555, "NVIDIA A100 datasheet", _SERVER)
_gpu("NVIDIA H100 SXM", 80, 989, 67, 3350, "NVIDIA H100 datasheet", _DGX_H100)
_gpu("NVIDIA H100 PCIe", 80, 756, 51, 2000, "NVIDIA H100 datasheet", _PCIE5)
_gpu("NVIDIA H100 NVL", 94, 835, 60, 3900, "NVIDIA H100 NVL datasheet", _PCIE5)
_gpu("NVIDIA H200", 141, 989, 67, 4800, "NVIDIA H200 datasheet", _DGX_H100)
_gpu("NVIDIA H200 NVL", 141, 835, 60, 4800, "NVIDIA H200 datasheet", _PCIE5)
_gpu("NVIDIA B200", 180, 2250, 75, 7700, "NVIDIA HGX B200 datasheet", _DGX_B200)
_gpu("NVIDIA A2", 16, 18, 4.5, 200, "NVIDIA A2 datasheet", _SERVER)
_gpu("NVIDIA A10", 24, 125, 31.2, 600, "NVIDIA A10 datasheet", _SERVER)
_gpu("NVIDIA A10G", 24, 70, 35, 600, "NVIDIA A10G datasheet", _SERVER)
_gpu("NVIDIA A30", 24, 165, 10.3, 933, "NVIDIA A30 datasheet", _SERVER)
_gpu("NVIDIA A40", 48, 149.7, 37.4, 696, "NVIDIA A40 datasheet", _SERVER)
_gpu("NVIDIA L4", 24, 121, 30.3, 300, "NVIDIA L4 datasheet", _SERVER)
_gpu("NVIDIA L40", 48, 181, 90.5, 864, "NVIDIA L40 datasheet", _SERVER)
_gpu("NVIDIA L40S", 48, 362, 91.6, 864, "NVIDIA L40S datasheet", _SERVER)
_gpu("NVIDIA T4", 16, 65, 8.1, 300, "NVIDIA T4 datasheet", _OLD_SERVER, has_bf16=False)

_VOLTA = "needs torch built for CUDA 12.6"
_gpu("NVIDIA V100 16GB", 16, 125, 15.7, 900, f"NVIDIA V100 datasheet; {_VOLTA}", _DGX_V100, has_bf16=False)
_gpu("NVIDIA V100 32GB", 32, 125, 15.7, 900, f"NVIDIA V100 datasheet; {_VOLTA}", _DGX_V100, has_bf16=False)
_gpu("NVIDIA V100 PCIe 16GB", 16, 112, 14, 900, f"NVIDIA V100 datasheet; {_VOLTA}", _OLD_SERVER, has_bf16=False)
_gpu("NVIDIA V100 PCIe 32GB", 32, 112, 14, 900, f"NVIDIA V100 datasheet; {_VOLTA}", _OLD_SERVER, has_bf16=False)
_gpu("NVIDIA P100 PCIe", 16, 18.7, 9.3, 732, f"NVIDIA P100 datasheet; {_VOLTA}", _OLD_SERVER, has_bf16=False)

for _name, _gb, _half, _single, _bandwidth in (
    ("RTX A2000 12GB", 12, 31.9, 8, 288),
    ("RTX A2000 6GB", 6, 31.9, 8, 288),
    ("RTX A4000", 16, 76.7, 19.2, 448),
    ("RTX A4500", 20, 94.6, 23.7, 640),
    ("RTX A5000", 24, 111.1, 27.8, 768),
    ("RTX A5500", 24, 136.4, 34.1, 768),
    ("RTX A6000", 48, 154.8, 38.7, 768),
    ("RTX 2000 Ada Generation", 16, 48, 12, 224),
    ("RTX 4000 SFF Ada Generation", 20, 76.7, 19.2, 280),
    ("RTX 4000 Ada Generation", 20, 106.9, 26.7, 360),
    ("RTX 4500 Ada Generation", 24, 158.5, 39.6, 432),
    ("RTX 5000 Ada Generation", 32, 261.1, 65.3, 576),
    ("RTX 6000 Ada Generation", 48, 364.2, 91.1, 960),
):
    _gpu(f"NVIDIA {_name}", _gb, _half, _single, _bandwidth, f"NVIDIA {_name} datasheet", _DESKTOP)
_gpu("NVIDIA RTX PRO 6000", 96, 500, 125, 1792, "NVIDIA RTX PRO 6000 datasheet", _NEW_DESKTOP)
_gpu("Quadro RTX 6000", 24, 130.5, 16.3, 672, "NVIDIA Turing whitepaper", _OLD_DESKTOP, has_bf16=False)
_gpu("Quadro RTX 8000", 48, 130.5, 16.3, 672, "NVIDIA Turing whitepaper", _OLD_DESKTOP, has_bf16=False)

_gpu("AMD Instinct MI210", 64, 181, 22.6, 1638, "AMD MI210 data sheet", _SERVER)
_gpu("AMD Instinct MI250X", 128, 383, 47.9, 3277, "AMD MI250X data sheet", _FRONTIER)
_gpu("AMD Instinct MI300X", 192, 1307, 163.4, 5300, "AMD MI300X data sheet", _MI300X)
_gpu("AMD Instinct MI325X", 256, 1307, 163.4, 6000, "AMD MI325X data sheet", _MI300X)
_gpu("AMD Instinct MI350X", 288, 2306.9, 144.2, 8000, "AMD MI350X data sheet", _MI355X)
_gpu("AMD Instinct MI355X", 288, 2516.6, 157.3, 8000, "AMD MI355X data sheet", _MI355X)

# ------------------------------------------------------------------------------------------------ desktops and laptops

_geforce(
    [
        ("2060 6GB", 6, 6.5, 336), ("2060 12GB", 12, 7.2, 336), ("2060 Super", 8, 7.2, 448), ("2070", 8, 7.5, 448),
        ("2070 Super", 8, 9.1, 448), ("2080", 8, 10.1, 448), ("2080 Super", 8, 11.2, 496), ("2080 Ti", 11, 13.4, 616),
    ], 4, "NVIDIA GeForce 20 specifications; Turing whitepaper", _OLD_DESKTOP, has_bf16=False,
)  # fmt: skip
_gpu("NVIDIA TITAN RTX", 24, 130.5, 16.3, 672, "NVIDIA Turing whitepaper", _OLD_DESKTOP, has_bf16=False)
_geforce(
    [
        ("3050 8GB", 8, 9.1, 224), ("3060 12GB", 12, 12.7, 360), ("3060 8GB", 8, 12.7, 240), ("3060 Ti", 8, 16.2, 448),
        ("3070", 8, 20.3, 448), ("3070 Ti", 8, 21.7, 608), ("3080 10GB", 10, 29.8, 760), ("3080 12GB", 12, 30.6, 912),
        ("3080 Ti", 12, 34.1, 912), ("3090", 24, 35.6, 936), ("3090 Ti", 24, 40, 1008),
    ], 2, "NVIDIA GeForce 30 specifications; GA102 whitepaper", _DESKTOP,
)  # fmt: skip
_geforce(
    [
        ("4060", 8, 15.1, 272), ("4060 Ti 8GB", 8, 22.1, 288), ("4060 Ti 16GB", 16, 22.1, 288), ("4070", 12, 29.1, 504),
        ("4070 Super", 12, 35.5, 504), ("4070 Ti", 12, 40.1, 504), ("4070 Ti Super", 16, 44.1, 672),
        ("4080", 16, 48.7, 717), ("4080 Super", 16, 52.2, 736), ("4090", 24, 82.6, 1008),
    ], 2, "NVIDIA GeForce 40 specifications; Ada whitepaper", _DESKTOP,
)  # fmt: skip
_geforce(
    [
        ("5050", 8, 13.2, 320), ("5060", 8, 19.2, 448), ("5060 Ti 8GB", 8, 23.7, 448), ("5060 Ti 16GB", 16, 23.7, 448),
        ("5070", 12, 30.9, 672), ("5070 Ti", 16, 43.9, 896), ("5080", 16, 56.3, 960), ("5090", 32, 104.8, 1792),
    ], 2, "NVIDIA GeForce 50 specifications; RTX Blackwell whitepaper", _NEW_DESKTOP,
)  # fmt: skip
_geforce(
    [
        (f"{name} Laptop{size}", gb, 2 * cores * clock / 1e6, bandwidth)
        for name, size, gb, cores, clock, bandwidth in (
            ("3050", "", 4, 2048, 1740, 192), ("3060", "", 6, 3840, 1703, 336), ("3070", "", 8, 5120, 1620, 448),
            ("3070 Ti", "", 8, 5888, 1485, 448), ("3080", " 8GB", 8, 6144, 1710, 448),
            ("3080", " 16GB", 16, 6144, 1710, 448), ("3080 Ti", "", 16, 7424, 1590, 512),
            ("4050", "", 6, 2560, 2370, 192), ("4060", "", 8, 3072, 2370, 256), ("4070", "", 8, 4608, 2175, 256),
            ("4080", "", 12, 7424, 2280, 432), ("4090", "", 16, 9728, 2040, 576), ("5060", "", 8, 3328, 2497, 384),
            ("5070", "", 8, 4608, 2347, 384), ("5070 Ti", "", 12, 5888, 2220, 672), ("5080", "", 16, 7680, 2287, 896),
            ("5090", "", 24, 10496, 2160, 896),
        )
    ], 2, "NVIDIA laptop specifications: cores at the highest boost clock", _LAPTOP,
)  # fmt: skip

_gpu("AMD Radeon RX 7900 XT", 20, 103, 51.5, 800, "AMD specifications", _DESKTOP)
_gpu("AMD Radeon RX 7900 XTX", 24, 122.8, 61.4, 960, "AMD specifications", _DESKTOP)
_gpu("AMD Radeon RX 9070", 16, 145, 36.1, 640, "AMD specifications", _NEW_DESKTOP)
_gpu("AMD Radeon RX 9070 XT", 16, 195, 48.7, 640, "AMD specifications", _NEW_DESKTOP)
_gpu("AMD Radeon PRO W7900", 48, 122.6, 61.3, 864, "AMD specifications", _DESKTOP)

for _name, _gb, _tops, _bandwidth in (
    ("A750", 8, 229, 512), ("A770 16GB", 16, 262, 560), ("A770 8GB", 8, 262, 512), ("B570", 10, 203, 380),
    ("B580", 12, 233, 456), ("Pro B50", 16, 170, 224), ("Pro B60", 24, 197, 456),
):  # fmt: skip
    _gpu(
        f"Intel Arc {_name}", _gb, _tops / 2, _tops / 16, _bandwidth,
        "Intel, peak INT8 rate: a half in fp16, a sixteenth in fp32; gptworks does not run on Intel's GPUs",
        _DESKTOP, kind="xpu",
    )  # fmt: skip

_PRINTED = "Apple, press release"
_apple("M1", (8, 16), 2.6, 68, _PRINTED)
_apple("M1 Pro", (16, 32), 5.2, 200, _PRINTED)
_apple("M1 Max", (32, 64), 10.4, 400, _PRINTED)
_apple("M1 Ultra", (64, 128), 21, 800, _PRINTED)
_apple("M2", (8, 16, 24), 3.6, 100, _PRINTED)
_apple("M2 Pro", (16, 32), 6.8, 200, _PRINTED)
_apple("M2 Max", (32, 64, 96), 13.6, 400, _PRINTED)
_apple("M2 Ultra", (64, 128, 192), 27.2, 800, _PRINTED)
for _chip, _sizes, _cores, _bandwidth in (
    ("M3", (8, 16, 24), 10, 100), ("M3 Pro", (18, 36), 18, 150), ("M3 Max", (36, 96), 30, 300),
    ("M3 Max", (48, 64, 128), 40, 400), ("M3 Ultra", (96,), 60, 819), ("M3 Ultra", (256, 512), 80, 819),
    ("M4", (16, 24, 32), 10, 120), ("M4 Pro", (24, 48, 64), 20, 273), ("M4 Max", (36,), 32, 410),
    ("M4 Max", (48, 64, 128), 40, 546),
):  # fmt: skip
    _clock = 1.398 if _chip.startswith("M3") else 1.47
    _apple(
        _chip, _sizes, _cores * 256 * _clock / 1e3, _bandwidth,
        f"Apple specifications; {_cores} GPU cores × 256 FLOP × {_clock:g} GHz, a clock that Apple does not print",
    )  # fmt: skip

# --------------------------------------------------------------------------------------------------------------- names

_SYNONYMS = {"mobile": "laptop", "notebook": "laptop", "maxq": "laptop"}
_IGNORED = frozenset({
    "nvidia", "geforce", "rtx", "gtx", "tesla", "tensor", "core", "blackwell", "generation", "workstation", "edition",
    "amd", "radeon", "rx", "instinct", "intel", "arc", "apple", "silicon", "macbook", "air", "mac", "mini", "studio",
    "imac", "graphics", "gpu", "card", "chip", "memory", "vram", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "hbm2", "hbm2e",
    "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7",
})  # fmt: skip
"""Words of names that distinguish no device from another."""

_SIZE = re.compile(r"(?<![a-z\d.])(\d{1,6}(?:\.\d{1,3})?)\s*-?(gb|gib|g)\b", re.ASCII)
_GLUED = re.compile(
    r"^(rtx|rx|gtx)?(\d{3,4})(ti|super|xtx|xt|laptop|mobile)?(super)?(laptop|mobile)?$|^(m\d)(pro|max|ultra)$"
)
"""Matches names written as one word, such as `rtx4070tisuper` and `m2max`, with a group for each part."""

LEAST_GIGABYTES = 0.1
"""Minimum memory, in GB, of a GPU that is given only by its memory, such as `8 GB`."""

_CUTOFF = 0.75
"""Minimum similarity to a known name at which an unknown name is taken for a misspelling."""


def find_device(name: str) -> Device:
    """Return the device called `name`, in any usual spelling, such as `h100`, `RTX 4090`, `4090 laptop`, `m2 max 64`,
    or the name that its driver reports. If `name` is only a size, such as `8 GB`, return a GPU with this memory and
    without rates.

    Raises:
        UserError: no device or more than one has this name, or no device of this name has this memory. The message
            names similar devices.
    """
    sizes, words = _read(name)
    if len(sizes) == 1 and not words and sizes[0] >= LEAST_GIGABYTES and "-" not in name:
        return custom_device(sizes[0] if "gib" in name.lower() else sizes[0] * 1e9 / 2**30, None, None)
    found = _with_words(words)
    numbers = [word for word in words if word.isdecimal() and word.isascii() and len(word) < 4]
    if not found and len(numbers) == 1 and not sizes:  # `m2 max 64`: no name has this number, so it is the memory
        sizes, found = [float(numbers[0])], _with_words(words - {numbers[0]})
    if sizes:
        of_size = [key for key in found if _sold_gigabytes(key) in sizes]
        if found and not of_size:
            sold = " or ".join(dict.fromkeys(f"{_sold_gigabytes(key):g}" for key in found))
            raise UserError(
                f"no `{shortened(name)}` is sold: {_models(found)} has {sold} GB. Give one of these sizes, or none."
            )
        found = of_size
    if found and len({_words(key) for key in found}) == 1:
        return DEVICES[found[0]]
    raise UserError(
        f"no device is called `{shortened(name)}`{_hint(name, words, found)} `gptworks devices` lists the known ones; "
        f"or give the memory: --device '8 GB', or --memory-gib, --flops and --bandwidth."
    )


def _read(name: str) -> tuple[list[float], frozenset[str]]:
    """Return the memory sizes in GB that a name states, and its other words, without those in `_IGNORED`."""
    text = re.sub(r"\((r|tm)\)", "", name.strip().lower().replace("max-q", "maxq"))
    sizes = [float(size) for size, _ in _SIZE.findall(text)]
    words: set[str] = set()
    for word in re.split(r"[^a-z\d.]+", _SIZE.sub(" ", text)):
        glued = _GLUED.match(word)
        words.update(filter(None, glued.groups()) if glued else [word] if word else [])
    return sizes, frozenset(_SYNONYMS.get(word, word) for word in words) - _IGNORED


def _words(key: str) -> frozenset[str]:
    return _read(key)[1]


def _sold_gigabytes(key: str) -> float:
    sizes = _read(key)[0]
    return sizes[0] if sizes else DEVICES[key].memory_bytes / 1e9


def _with_words(words: frozenset[str]) -> list[str]:
    """Return the keys of `DEVICES` that have exactly these words; if no key has, the keys that also have other
    words."""
    exactly = [key for key in DEVICES if _words(key) == words]
    return exactly or [key for key in DEVICES if words and words < _words(key)]


def _models(keys: list[str]) -> str:
    """Return the names of devices without their memory, joined by commas."""
    return ", ".join(dict.fromkeys(re.sub(r"-\d+gb$", "", key) for key in keys))


def _hint(name: str, words: frozenset[str], found: list[str]) -> str:
    """Return the part of an error's message that names the devices that may be meant, or ends the sentence."""
    numbers = {word for word in words if re.search(r"\d", word)}
    near = found or [key for key in DEVICES if _words(key) & numbers]
    typed = re.sub(r"[^a-z\d]", "", name.lower().removeprefix("nvidia"))
    if not near and len(typed) > 2:
        squeezed = {
            re.sub(r"[^a-z\d]", "", known): known for key in DEVICES for known in (key, "-".join(sorted(_words(key))))
        }
        squeezed |= {known: known for known in ("this", "cpu")}
        near = [squeezed[one] for one in difflib.get_close_matches(typed, squeezed, n=1, cutoff=_CUTOFF)]
    if not near:
        return "."
    names = [f"`{each}`" for each in _models(near).split(", ")]
    return f"; did you mean {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}?"
