"""Run by sandbox.py as a program of its own: closes itself off from the machine, then runs another program.

    python -I -S jail.py SECONDS MEMORY_BYTES DISK_BYTES < the program, then an answer

It needs nothing but the standard library. By Linux's namespaces the program gets its own users, processes, network
(none) and file system: the interpreter and the system's libraries, read-only, and an empty folder in memory.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys

NOBODY = 65534
FILE_BYTES = 1 << 20
REFUSED = 3
"""Exit code: the system does not allow the namespaces. The reason is on stderr."""

_USER, _MOUNT, _PID, _NET, _IPC, _UTS = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000
_NAMESPACES = _USER | _MOUNT | _PID | _NET | _IPC | _UTS
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV, _DETACH = 4096, 16384, 1 << 18, 2, 4, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # the same number on every architecture
_RDONLY, _NOSUID = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True)

# Keeps its channels out of sight of the program; the answer is sent only after the program has ended.
CHILD = """
def run():
    import os, sys
    out, door = os.dup(1), os.dup(0)
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    sys.argv = ["program.py"]
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        os.write(out, ("failed: " + type(error).__name__).encode("ascii", "replace"))
        os._exit(1)
    os.write(out, b"?")
    os.write(out, os.read(door, 64))
    os._exit(0)
run()
"""


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), data), f"mount {target}")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _enter_namespaces() -> None:
    """New namespaces in which this process may mount, and the program is nobody.

    Root maps two users, itself and nobody, and so needs someone outside to write the map; all others map themselves.
    """
    user, group = os.getuid(), os.getgid()
    if user != 0:
        _check(_libc.unshare(_NAMESPACES), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
        _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
        return
    parent, (ready, entered) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(entered)
        status = 1
        try:
            if os.read(ready, 1):
                for name in ("uid_map", "gid_map"):
                    _write(f"/proc/{parent}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
                status = 0
        finally:
            os._exit(status)
    os.close(ready)
    _check(_libc.unshare(_NAMESPACES), "unshare")
    os.write(entered, b".")
    os.close(entered)
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError("root cannot map another user to run the program as")


def _build_root(program: bytes, disk_bytes: int) -> None:
    """Make a root of the interpreter and the libraries, read-only, and a small folder; nothing else stays in reach."""
    root = "/tmp" if os.path.isdir("/tmp") else "/mnt"
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    shown = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix]
    shown = [path for i, path in enumerate(shown) if os.path.exists(path) and path not in shown[:i]]
    held = {path: os.open(path, os.O_PATH) for path in shown if not os.path.islink(path)}  # /tmp is about to be covered
    links = {path: os.readlink(path) for path in shown if os.path.islink(path)}
    _mount("none", root, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_bytes},nr_inodes=4096,mode=755")
    for path, descriptor in held.items():
        if any(path.startswith(f"{other}/") for other in held):
            continue
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(f"{root}{path}")
        else:
            os.makedirs(os.path.dirname(f"{root}{path}"), exist_ok=True)
            os.close(os.open(f"{root}{path}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{descriptor}", f"{root}{path}", None, _MS_BIND | _MS_REC)
        _make_read_only(f"{root}{path}")
    for descriptor in held.values():
        os.close(descriptor)
    for path, target in links.items():
        os.symlink(target, f"{root}{path}")
    os.mkdir(f"{root}/dev")
    for name in ("null", "zero", "urandom", "random"):
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _MS_BIND)
    os.mkdir(f"{root}/work")
    with open(f"{root}/work/program.py", "wb") as file:
        file.write(program)
    os.chown(f"{root}/work", NOBODY, NOBODY)
    with contextlib.suppress(OSError):  # no namespaces of its own, in which the program might mount what it likes
        _write("/proc/sys/user/max_user_namespaces", "0")
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/work")


def _make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(32)
    )
    _check(result, f"make {path} read-only")


def _become_program(seconds: int, memory_bytes: int) -> None:
    """Give up every right, set the limits, and start the interpreter again."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    limits = {
        resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: 0,
    }  # fmt: skip
    for kind, value in limits.items():
        most = resource.getrlimit(kind)[1]
        allowed = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (allowed, allowed))
    environment = {"HOME": "/work", "TMPDIR": "/work", "PYTHONHASHSEED": "0"}
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", CHILD], environment)


def _guarded(seconds: int, memory_bytes: int) -> None:
    """Be the first process of the new pid namespace: when it ends, all others there are killed."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    program = os.fork()
    if program == 0:
        _become_program(seconds, memory_bytes)
    while os.wait()[0] != program:
        pass


def main() -> None:
    """See the top of the file."""
    seconds, memory_bytes, disk_bytes = map(int, sys.argv[1:4])
    n_bytes = int.from_bytes(os.read(0, 8), "big")
    program = b""
    while len(program) < n_bytes:
        part = os.read(0, n_bytes - len(program))
        if not part:
            sys.exit(1)
        program += part
    sys.executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    try:
        _enter_namespaces()
        first = os.fork()
        if first == 0:
            _build_root(program, disk_bytes)
            _guarded(seconds, memory_bytes)
            os._exit(0)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
        _, status = os.waitpid(first, 0)  # returns when every process of the namespace is gone
        os._exit(os.waitstatus_to_exitcode(status) and REFUSED)
    except (OSError, KeyError) as error:
        os.write(2, f"{error}".encode())
        os._exit(REFUSED)


if __name__ == "__main__":
    main()
