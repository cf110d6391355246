"""The system call numbers in confined/jail.py, against the Linux kernel headers that come with compilers.

x86_64 has a table of system calls of its own. AArch64 and RISC-V have the generic one, which the cross compiler for
AArch64 brings (Debian: g++-aarch64-linux-gnu). There a wrong number would refuse a harmless call, or let one pass.
"""

import platform
import re
import shutil
import socket
import struct
import subprocess
import sys

import pytest

from gptworks.confined import jail

if sys.platform != "linux":
    pytest.skip("the sandbox is Linux's", allow_module_level=True)

HOST = ("gcc", "g++", "cc") if platform.machine() == "x86_64" else ()
CROSS = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc")
HEADERS = {
    "x86_64": (HOST, "asm/unistd.h"),
    "aarch64": (CROSS, "asm/unistd.h"),
    "riscv64": (CROSS, "asm-generic/unistd.h"),
}
"""Of each kind of processor: compilers that have its headers, and the one with its table of system calls."""


def macros(machine: str) -> dict[str, str]:
    """Return the macros that the kernel headers define for a machine."""
    compilers, table = HEADERS[machine]
    program = next(filter(None, map(shutil.which, compilers)), None)
    if program is None:
        pytest.skip(f"no compiler with the headers for {machine} here: apt-get install g++-aarch64-linux-gnu")
    headers = "".join(f"#include <{name}>\n" for name in (table, "linux/audit.h", "linux/keyctl.h"))
    command = [program, "-E", "-dM", "-xc", "-"]
    done = subprocess.run(command, input=headers, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{program} has no headers of the kernel: {done.stderr[-300:]}")
    return dict(re.findall(r"^#define (\w+) (.+)$", done.stdout, re.MULTILINE))


def value(name: str, known: dict[str, str]) -> int | None:
    """Return the value of a macro that is a number, another macro, or several joined by |; None: it is undefined."""
    if name in known:
        parts = [value(part, known) for part in known[name].strip("()").split("|")]
        return None if None in parts else sum({part for part in parts if part is not None})  # each has its own bits
    return int(name, 0) if re.fullmatch(r"\d+|0x[0-9a-fA-F]+", name) else None


@pytest.mark.parametrize("machine", HEADERS)
def test_every_number_is_the_kernels(machine: str) -> None:
    known, other = macros(machine), machine != "x86_64"
    ours = {name: both[other] for name, both in jail._REFUSED_CALLS.items()} | ({} if other else jail._X86_ONLY)
    if other:  # the generic table has no calls that a newer one replaces: the number is its successor's
        assert "__NR_inotify_init" not in known
        assert ours.pop("inotify_init") == ours["inotify_init1"]
    ours |= dict(zip(("socket", "socketpair"), (both[other] for both in jail._SOCKET_CALLS), strict=True))
    ours |= {"mount_setattr": jail._MOUNT_SETATTR, "pidfd_send_signal": jail._FIRST_NEW_CALL}
    assert ours == {name: value(f"__NR_{name}", known) for name in ours}
    assert jail._KEYCTL[other] == ours["keyctl"] and jail._PIVOT_ROOT[machine] == ours["pivot_root"]
    assert value("KEYCTL_JOIN_SESSION_KEYRING", known) == jail._JOIN_SESSION_KEYRING


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_begins_with_the_architecture_that_the_kernel_reports(machine: str) -> None:
    reported = value(f"AUDIT_ARCH_{machine.upper()}", macros(machine))
    compared = struct.unpack_from("=HBBI", jail._filter(machine), 8)
    assert compared[0] == jail._EQUAL and compared[3] == reported


def test_the_families_of_sockets_are_the_systems() -> None:
    assert jail._FAMILIES == (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
