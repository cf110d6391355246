"""Enumerates the states that a crash may leave on a disk, from file operations recorded with strace.

The recorder sees the system calls, so that libraries which write from Rust are seen too. The disk is the strictest that
POSIX allows: data is there after an fsync of its file, a name after an fsync of its folder, and what was not synced may
be there, be missing, or (data) be there in part, each independently of the others.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("crash_worker.py")
CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,mkdir,"
    "mkdirat,rmdir,truncate,ftruncate,fallocate,link,linkat,symlink,symlinkat,lseek,sendfile,copy_file_range"
)
MARK = "/MARK/"
"""Opening a file below this, which does not exist, leaves a mark in the trace."""

_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)(<[^>]*>)?(.*)")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"(\w+)<((?:\\x[0-9a-f]{2})*)>")


def available() -> bool:
    """Whether strace is installed and may trace."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Operation:
    """A change to the disk, or a mark in the record."""

    kind: str
    """create, write, truncate, sync, rename, link, unlink, mkdir or mark."""
    path: str
    to: str = ""
    data: bytes = b""
    at: int = 0
    call: str = ""
    number: int = 0
    """The how-manieth call of this name in its thread it was, from 1: what strace's `inject` counts."""


def run(scenario: str, root: Path, trace: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a scenario of crash_worker.py under strace."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", "10000000", "-o", str(trace), "-e", f"trace={CALLS}"]
    return subprocess.run(
        [*command, *options, sys.executable, str(WORKER), scenario, str(root)],
        capture_output=True, text=True, timeout=280, env=environment, check=False,
    )  # fmt: skip


def record(scenario: str, root: Path, trace: Path) -> list[Operation]:
    """Return the operations of a scenario below `root`, in order."""
    result = run(scenario, root, trace)
    assert result.returncode == 0, result.stderr[-4000:]
    return list(parse(trace.read_text(encoding="ascii").splitlines(), str(root)))


def parse(lines: Iterable[str], root: str) -> Iterator[Operation]:
    """Yield the operations below `root` in a trace."""
    offsets: dict[str, int] = {}
    appends: set[str] = set()
    sizes: dict[str, int] = {}
    numbers: dict[tuple[str, str], Iterator[int]] = {}
    for line in _joined(lines):
        match = _LINE.match(line)
        if match is None:
            continue
        thread, call, arguments, result, opened, _ = match.groups()
        number = next(numbers.setdefault((thread, call), count(1)))
        said = [_bytes(text) for text in _STRING.findall(arguments)]
        folders = {name: _bytes(path).decode() for name, path in _DESCRIPTOR.findall(arguments)}
        paths = [_absolute(text, folders) for text in _paths(call, said)]
        if paths and paths[0].startswith(MARK):
            yield Operation("mark", paths[0].removeprefix(MARK))
        if int(result) < 0:
            continue
        descriptor = arguments.partition("<")[0]
        held = folders.get(descriptor, "")
        if not any(_below(path, root) for path in (*paths, held)):
            continue
        known: dict[str, Any] = {"call": call, "number": number}
        if call in ("openat", "open", "creat"):
            assert opened is not None
            offsets[result] = 0
            appends.discard(result)
            if "O_APPEND" in arguments:
                appends.add(result)
            if "O_CREAT" in arguments or call == "creat":
                yield Operation("create", paths[0], **known)
                sizes.setdefault(paths[0], 0)
            if "O_TRUNC" in arguments or call == "creat":
                sizes[paths[0]] = 0
                yield Operation("truncate", paths[0], **known)
        elif call == "write":
            at = sizes.get(held, 0) if descriptor in appends else offsets.get(descriptor, 0)
            data = said[0][: int(result)]
            offsets[descriptor] = at + len(data)
            sizes[held] = max(sizes.get(held, 0), at + len(data))
            yield Operation("write", held, data=data, at=at, **known)
        elif call == "pwrite64":
            data, at = said[0][: int(result)], int(arguments.rpartition(",")[2])
            sizes[held] = max(sizes.get(held, 0), at + len(data))
            yield Operation("write", held, data=data, at=at, **known)
        elif call == "lseek":
            offsets[descriptor] = int(result)
        elif call == "ftruncate":
            size = int(arguments.rpartition(",")[2])
            sizes[held] = size
            yield Operation("truncate", held, at=size, **known)
        elif call in ("fsync", "fdatasync"):
            yield Operation("sync", held, **known)
        elif call.startswith("rename"):
            sizes[paths[1]] = sizes.pop(paths[0], 0)
            yield Operation("rename", paths[0], to=paths[1], **known)
        elif call.startswith("link"):
            sizes[paths[1]] = sizes.get(paths[0], 0)
            yield Operation("link", paths[0], to=paths[1], **known)
        elif call in ("unlink", "unlinkat", "rmdir"):
            yield Operation("unlink", paths[0], **known)
        elif call.startswith("mkdir"):
            yield Operation("mkdir", paths[0], **known)
        else:
            raise AssertionError(f"{call} is not modelled: {line[:200]}")


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a trace; joins a call whose line was interrupted by another thread's."""
    cut: dict[str, str] = {}
    for line in lines:
        thread = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            cut[thread] = line.removesuffix("<unfinished ...>").rstrip()
        elif " resumed>" in line:
            yield cut.pop(thread) + line.partition(" resumed>")[2]
        else:
            yield line


def _paths(call: str, said: list[bytes]) -> list[str]:
    return [] if call in ("write", "pwrite64") else [text.decode() for text in said]


def _absolute(path: str, folders: dict[str, str]) -> str:
    folder = next(iter(folders.values()), "/")
    return os.path.normpath(os.path.join(folder, path))  # noqa: PTH118 (it need not exist)


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


# ------------------------------------------------------------------------------------------------------ the disk


@dataclass
class File:
    data: bytes = b""
    synced: bytes = b""


@dataclass
class Folder:
    names: dict[str, "File | Folder"] = field(default_factory=dict)
    synced: dict[str, "File | Folder"] = field(default_factory=dict)


@dataclass
class Edit:
    """A change of names that reaches the disk completely or not at all."""

    folders: list[Folder]
    names: list[tuple[Folder, str, "File | Folder | None"]]


Tree = dict[str, "bytes | Tree"]


class Disk:
    """A folder on a simulated disk, to which operations are applied."""

    def __init__(self, root: str) -> None:
        self.root, self.top, self.pending = root, Folder(), list[Edit]()

    def apply(self, operation: Operation) -> None:
        """Apply an operation."""
        if operation.kind == "mark" or (operation.path == self.root and operation.kind == "mkdir"):
            return
        if operation.kind == "sync":
            node = self._find(operation.path)
            if isinstance(node, File):
                node.synced = node.data
            else:
                self._sync(node)
            return
        folder, name = self._place(operation.path)
        if operation.kind in ("create", "mkdir"):
            if name not in folder.names:
                self._edit((folder, name, File() if operation.kind == "create" else Folder()))
        elif operation.kind == "unlink":
            self._edit((folder, name, None))
        elif operation.kind == "rename":
            other, new = self._place(operation.to)
            self._edit((folder, name, None), (other, new, folder.names[name]))
        elif operation.kind == "link":
            other, new = self._place(operation.to)
            self._edit((other, new, folder.names[name]))
        else:
            node = folder.names[name]
            assert isinstance(node, File)
            if operation.kind == "truncate":
                node.data = node.data[: operation.at].ljust(operation.at, b"\0")
            else:
                data = node.data.ljust(operation.at, b"\0")
                node.data = data[: operation.at] + operation.data + data[operation.at + len(operation.data) :]

    def now(self) -> Tree:
        """Return the state that a running process sees."""
        return self._now(self.top)

    def _now(self, folder: Folder) -> Tree:
        return {k: self._now(node) if isinstance(node, Folder) else node.data for k, node in folder.names.items()}

    def states(self) -> Iterator[Tree]:
        """Yield every state that a crash at this moment may leave."""
        for chosen, data in product(self._choices(), ("kept", "dropped", "torn", "torn at its end")):
            names: dict[int, dict[str, File | Folder]] = {}
            for edit in chosen:
                for folder, name, node in edit.names:
                    here = names.setdefault(id(folder), dict(folder.synced))
                    if node is None:
                        here.pop(name, None)
                    else:
                        here[name] = node
            yield self._tree(self.top, names, data)

    def _choices(self) -> Iterator[list[Edit]]:
        """Yield sets of edits that reached the disk: all, none, all up to one, all but one, only one."""
        edits, n = self.pending, len(self.pending)
        chosen = {tuple(range(k)) for k in range(n + 1)}
        chosen |= {tuple(i for i in range(n) if i != k) for k in range(n)} | {(k,) for k in range(n)}
        yield from ([edits[i] for i in each] for each in sorted(chosen))

    def _tree(self, folder: Folder, names: dict[int, dict[str, File | Folder]], data: str) -> Tree:
        here = names.get(id(folder), folder.synced)
        return {
            name: self._tree(node, names, data) if isinstance(node, Folder) else _left(node, data)
            for name, node in here.items()
        }

    def _edit(self, *names: tuple[Folder, str, "File | Folder | None"]) -> None:
        for folder, name, node in names:
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        self.pending.append(Edit([folder for folder, _, _ in names], list(names)))

    def _sync(self, folder: Folder) -> None:
        done = [edit for edit in self.pending if all(each is folder for each in edit.folders)]
        for edit in done:
            for _, name, node in edit.names:
                if node is None:
                    folder.synced.pop(name, None)
                else:
                    folder.synced[name] = node
        self.pending = [edit for edit in self.pending if edit not in done]

    def _place(self, path: str) -> tuple[Folder, str]:
        parent, name = os.path.split(path)
        folder = self._find(parent)
        assert isinstance(folder, Folder)
        return folder, name

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self.top
        for part in Path(path).relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.names[part]
        return node


def _left(file: File, data: str) -> bytes:
    if data == "kept" or file.data == file.synced:
        return file.data
    if data == "dropped":
        return file.synced
    return file.data[: len(file.data) // 2 if data == "torn" else -1]


def every_state(operations: list[Operation], root: Path) -> Iterator[tuple[list[str], Tree]]:
    """Yield each state that a crash after any operation may leave, with the marks passed until then."""
    disk, marks, seen = Disk(str(root)), list[str](), set[str]()
    for operation in [Operation("mark", ""), *operations]:
        disk.apply(operation)
        if operation.kind == "mark" and operation.path:
            marks.append(operation.path)
        for tree in disk.states():
            key = f"{marks}{_key(tree)}"
            if key not in seen:
                seen.add(key)
                yield list(marks), tree


def _key(tree: Tree) -> int:
    return hash(tuple(sorted((k, v if isinstance(v, bytes) else _key(v)) for k, v in tree.items())))


def write_tree(tree: Tree, folder: Path) -> Path:
    """Write a state as files in a new folder."""
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            write_tree(node, folder / name)
    return folder


def read_tree(folder: Path) -> Tree:
    """Return the files of a folder as a state."""
    return {path.name: read_tree(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}
