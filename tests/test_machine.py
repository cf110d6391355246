"""The resources that a container grants: memory and processors by control groups of both versions, in fake file
trees."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks import device, machine
from gptworks.training.distributed import agent
from gptworks.training.distributed.rendezvous import ThisMachine

MIB = 2**20
V2 = "30 24 0:26 {root} {folder} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 24 0:27 {root} {folder} rw,nosuid - cgroup cgroup rw,{controller}"


class Tree:
    """A file system with /proc and /sys as a process sees them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("proc/meminfo", "MemTotal:  99999999 kB\nMemAvailable:  8388608 kB\n")

    def put(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="ascii")

    def process(self, groups: str, *mounts: str) -> None:
        self.put("proc/self/cgroup", groups + "\n")
        self.put("proc/self/mountinfo", "\n".join(["22 27 0:21 / /proc rw - proc proc rw", *mounts]) + "\n")

    def memory(self, folder: str, limit: str, used_mib: int, inactive_mib: int) -> None:
        """Set the memory files of a control group of version 2."""
        self.put(f"{folder}/memory.max", limit + "\n")
        self.put(f"{folder}/memory.current", f"{used_mib * MIB}\n")
        self.put(f"{folder}/memory.stat", f"anon 1\nfile 9\ninactive_file {inactive_mib * MIB}\nactive_file 3\n")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    return Tree(tmp_path)


def cpus(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: n)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n)), raising=False)


def free_mib() -> float:
    return machine.available_memory_bytes() / MIB


def test_a_processor_has_the_name_that_linux_gives(tree: Tree) -> None:
    assert machine.cpu_name() == ""
    tree.put("proc/cpuinfo", "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n")
    assert machine.cpu_name() == "AMD EPYC"


# --------------------------------------------------------------------------------------------------------- memory


def test_without_control_groups_available_memory_counts(tree: Tree) -> None:
    assert free_mib() == 8192 and machine.cpu_quota() is None


@pytest.mark.parametrize(
    ("limit_mib", "used", "inactive", "free"), [(1000, 900, 0, 100), (1000, 900, 700, 800), (1000, 1200, 0, 0)]
)
def test_the_page_cache_of_a_container_is_free(tree: Tree, limit_mib: int, used: int, inactive: int, free: int) -> None:
    tree.process("0::/", V2.format(root="/", folder="/sys/fs/cgroup"))
    tree.memory("sys/fs/cgroup", str(limit_mib * MIB), used, inactive)
    assert free_mib() == free


def test_the_tightest_of_all_groups_counts(tree: Tree) -> None:
    tree.process("0::/user.slice/run.scope", V2.format(root="/", folder="/sys/fs/cgroup"))
    tree.memory("sys/fs/cgroup/user.slice/run.scope", "max", 100, 0)
    tree.memory("sys/fs/cgroup/user.slice", str(600 * MIB), 400, 150)
    assert free_mib() == 350
    tree.memory("sys/fs/cgroup/user.slice/run.scope", str(300 * MIB), 100, 50)
    assert free_mib() == 250


def test_version_1(tree: Tree) -> None:
    tree.process(
        "4:memory:/docker/ab\n1:cpu,cpuacct:/docker/ab", V1.format(root="/", folder="/cg/memory", controller="memory")
    )
    tree.put("cg/memory/memory.limit_in_bytes", "9223372036854771712\n")
    tree.put("cg/memory/memory.usage_in_bytes", "5\n")
    tree.put("cg/memory/docker/ab/memory.limit_in_bytes", f"{500 * MIB}\n")
    tree.put("cg/memory/docker/ab/memory.usage_in_bytes", f"{450 * MIB}\n")
    tree.put("cg/memory/docker/ab/memory.stat", f"inactive_file 1\ntotal_inactive_file {400 * MIB}\n")
    assert free_mib() == 450


def test_a_container_that_sees_the_hosts_path_and_mounts_a_part_of_it(tree: Tree) -> None:
    tree.process("0::/docker/ab/inner", V2.format(root="/docker/ab", folder="/sys/fs/cgroup"))
    tree.memory("sys/fs/cgroup/inner", "max", 1, 0)
    tree.memory("sys/fs/cgroup", str(200 * MIB), 50, 0)
    assert free_mib() == 150


@pytest.mark.parametrize("groups", ["", "0", "0::", "0::/../..", "nonsense", "0::/gone"])
def test_groups_that_cannot_be_read_leave_the_mounts_own(tree: Tree, groups: str) -> None:
    tree.process(groups, V2.format(root="/", folder="/sys/fs/cgroup"), "short - cgroup2", "x -", "- cgroup2 a b")
    tree.memory("sys/fs/cgroup", str(200 * MIB), 50, 0)
    assert free_mib() in (150, 8192)


@pytest.mark.parametrize("stat", ["", "inactive_file\n", "inactive_file many\n", "\x00\n", "inactive_file -5\n"])
def test_figures_that_are_none_count_as_nothing(tree: Tree, stat: str) -> None:
    tree.process("0::/", V2.format(root="/", folder="/sys/fs/cgroup"))
    tree.memory("sys/fs/cgroup", str(200 * MIB), 50, 0)
    tree.put("sys/fs/cgroup/memory.stat", stat)
    assert free_mib() == 150
    tree.put("sys/fs/cgroup/memory.max", stat)
    assert free_mib() == 8192


# ----------------------------------------------------------------------------------------------------- processors


@pytest.mark.parametrize(
    ("quota", "cores", "usable"),
    [
        ("200000 100000", 64, 2), ("max 100000", 64, 64), ("50000 100000", 64, 1), ("250000 100000", 64, 2),
        ("9900000 100000", 64, 64), ("", 64, 64), ("100 0", 64, 64), ("-1 100000", 8, 8), ("100000", 8, 8),
    ],
)  # fmt: skip
def test_a_quota_bounds_the_processors(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int, usable: int
) -> None:
    cpus(monkeypatch, cores)
    tree.process("0::/a/b", V2.format(root="/", folder="/sys/fs/cgroup"))
    tree.put("sys/fs/cgroup/a/cpu.max", quota + "\n")
    tree.put("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    assert machine.usable_cpus() == usable


def test_a_quota_of_version_1_and_of_a_group_above(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus(monkeypatch, 64)
    tree.process("3:cpuacct,cpu:/pod/one", V1.format(root="/", folder="/cg/cpu", controller="cpu,cpuacct"))
    for folder, quota in (("cg/cpu/pod/one", -1), ("cg/cpu/pod", 300_000), ("cg/cpu", -1)):
        tree.put(f"{folder}/cpu.cfs_quota_us", f"{quota}\n")
        tree.put(f"{folder}/cpu.cfs_period_us", "100000\n")
    assert (machine.cpu_quota(), machine.usable_cpus()) == (3.0, 3)


def test_the_cores_a_process_may_run_on_count_without_a_quota(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus(monkeypatch, 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert machine.usable_cpus() == 3


@pytest.mark.parametrize(
    ("quota", "given", "threads"), [(2.0, None, 2), (0.5, None, 1), (None, None, 8), (2.0, "8", 8), (16.0, None, 8)]
)
def test_torch_computes_with_the_threads_that_the_quota_grants(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, given: str | None, threads: int
) -> None:
    """The number is set once, when a device is chosen; the caller may change it afterwards."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(device, "cpu_quota", lambda: quota)
    device.follow_quota.cache_clear()
    try:
        torch.set_num_threads(8)
        device.choose_device("cpu")
        assert torch.get_num_threads() == threads
        torch.set_num_threads(5)
        device.choose_device("cpu")
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
        device.follow_quota.cache_clear()


def test_ranks_divide_the_processors_of_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    class Ended:
        returncode = 0

        def __init__(self, _: Any, *, env: dict[str, str], **__: Any) -> None:
            started.append(env)

        def poll(self) -> int:
            return 0

        def kill(self) -> None: ...

        def wait(self) -> int:
            return 0

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(agent, "usable_cpus", lambda: 4)
    monkeypatch.setattr(agent.subprocess, "Popen", Ended)
    assert agent.Agent(2, ["train", "demo"], ThisMachine()).run() == 0
    assert [env["OMP_NUM_THREADS"] for env in started] == ["2", "2"]
