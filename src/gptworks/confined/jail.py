"""A separate program that sandbox.py starts: it isolates itself from the machine, then runs a generated program.

    python -I -S jail.py SECONDS MEMORY_BYTES DISK_BYTES < length and source of the program, then a token

It needs only the standard library. Linux namespaces give the program its own users, processes, network (none) and file
system: the interpreter and the system's libraries, read-only, and a folder in memory that holds only the program.

Namespaces and limits do not cover all of the kernel. RLIMIT_AS does not count System V shared memory, semaphores and
message queues. A process inherits the caller's session keyring. AF_VSOCK reaches a virtual machine's host. A seccomp
filter therefore refuses the system calls for these features. The filter also refuses calls that a program does not
need, such as ptrace and mount, and all calls that are newer than Linux 5.0.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import sys

NOBODY = 65534
FILE_BYTES = 1 << 20
REFUSED = 3
"""Exit code if the system does not allow the isolation. The reason is on stderr."""

_USER, _MOUNT, _PID, _NET, _IPC, _UTS = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000
_NAMESPACES = _USER | _MOUNT | _PID | _NET | _IPC | _UTS
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV, _DETACH = 4096, 16384, 1 << 18, 2, 4, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # mount_setattr is 442 on every architecture
_RDONLY, _NOSUID = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3}
"""The AUDIT_ARCH_* constants of linux/audit.h, by the machine's name in `os.uname`."""
_REFUSED_CALLS = {
    # name: (number on x86_64, number on the other architectures), from the kernel's tables of system calls
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "memfd_create": (319, 279), "io_setup": (206, 0),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "fanotify_init": (300, 262),
    "inotify_init": (253, 26), "inotify_init1": (294, 26), "syslog": (103, 116), "quotactl": (179, 60),
    "personality": (135, 92),
}  # fmt: skip
_X86_ONLY = {"modify_ldt": 154, "iopl": 172, "ioperm": 173, "uselib": 134, "_sysctl": 156, "ustat": 136}
_SOCKET_CALLS = ((41, 198), (53, 199))
"""Numbers of the calls socket and socketpair, allowed only for _FAMILIES, which the network namespace confines."""
_FAMILIES = (1, 2, 10, 16)
"""The address families AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK."""
_FIRST_NEW_CALL = 424
"""Number of the first system call that is refused as too new. From here on, numbers are equal on every architecture,
and the C library has fallbacks. On x86_64, the highest numbers belong to another ABI (x32), which is refused too."""
_KEYCTL, _JOIN_SESSION_KEYRING = (250, 219), 1
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""BPF instructions: load a word of the system call; jump if it equals, or is at least, a value; return a verdict."""
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_libc = ctypes.CDLL(None, use_errno=True)

# Runs the program with /dev/null as its standard streams, and copies the parent's token after the program has ended.
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
    """Enter new namespaces, in which this process may mount file systems and the program will run as nobody.

    Root maps two users, itself and nobody, with a helper process outside. Any other user maps only itself, to nobody.
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
    """Make a root file system of the interpreter and libraries (read-only), four devices, and a folder in memory."""
    root = "/tmp" if os.path.isdir("/tmp") else "/mnt"
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    own = [f"{sys.base_prefix}/{name}" for name in ("bin", "lib", "lib64")]  # the prefix itself may be a user's home
    shown = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", *own]
    shown = [path for i, path in enumerate(shown) if os.path.exists(path) and path not in shown[:i]]
    held = {path: os.open(path, os.O_PATH) for path in shown if not os.path.islink(path)}  # open before /tmp is covered
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
    with contextlib.suppress(OSError):  # forbid more namespaces, in which the program could mount
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
    """Drop all rights, set the limits, and replace this process by a new interpreter that runs the program."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    limits = {
        resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: 0, resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64, resource.RLIMIT_MEMLOCK: 0,
    }  # fmt: skip
    for kind, value in limits.items():
        most = resource.getrlimit(kind)[1]
        allowed = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (allowed, allowed))
    environment = {"HOME": "/work", "TMPDIR": "/work", "PYTHONHASHSEED": "0"}
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", CHILD], environment)


def _leave_session_keyring() -> None:
    """Replace the caller's session keyring with an empty one, because some system calls that the filter allows can use
    a keyring."""
    if _libc.syscall(_KEYCTL[os.uname().machine != "x86_64"], _JOIN_SESSION_KEYRING, None) < 0:
        error = ctypes.get_errno()
        if error not in (errno.ENOSYS, errno.EPERM):  # the kernel has no keyrings, or refuses keyctl
            raise OSError(error, f"keyctl: {os.strerror(error)}")


def _filter(machine: str) -> bytes:
    """Return the seccomp filter as BPF code. Refused calls fail; a call of another architecture kills the process."""
    other = machine != "x86_64"
    refused = sorted({numbers[other] for numbers in _REFUSED_CALLS.values()} | set(() if other else _X86_ONLY.values()))

    def step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, operand)

    program = step(_LOAD, 4) + step(_EQUAL, _ARCHITECTURES[machine], 1) + step(_RETURN, _KILL)
    program += step(_LOAD, 0) + step(_AT_LEAST, _FIRST_NEW_CALL, 0, 1) + step(_RETURN, _FAIL | errno.ENOSYS)
    for number in refused:
        program += step(_EQUAL, number, 0, 1) + step(_RETURN, _FAIL | errno.EPERM)
    for numbers in _SOCKET_CALLS:
        program += step(_EQUAL, numbers[other], 0, len(_FAMILIES) + 3) + step(_LOAD, 16)  # load the socket family
        program += b"".join(step(_EQUAL, one, len(_FAMILIES) - i) for i, one in enumerate(_FAMILIES))
        program += step(_RETURN, _FAIL | errno.EAFNOSUPPORT) + step(_RETURN, _ALLOW)
    return program + step(_RETURN, _ALLOW)


def _install_filter() -> None:
    """Install the seccomp filter for this process and its children, permanently."""
    program = _filter(os.uname().machine)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    wanted = Program(len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(wanted), 0, 0), "seccomp filter")


def _guarded(seconds: int, memory_bytes: int) -> None:
    """Run the program as a child of this process. When this process ends, the kernel kills all others in its pid
    namespace."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _leave_session_keyring()
    _install_filter()
    program = os.fork()
    if program == 0:
        _become_program(seconds, memory_bytes)
    while os.wait()[0] != program:
        pass


def main() -> None:
    """Read a program from stdin and run it. The top of this file describes the arguments."""
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
        _, status = os.waitpid(first, 0)  # returns when all processes of the namespace have ended
        os._exit(os.waitstatus_to_exitcode(status) and REFUSED)
    except (OSError, KeyError) as error:
        os.write(2, f"{error}".encode())
        os._exit(REFUSED)


if __name__ == "__main__":
    main()
