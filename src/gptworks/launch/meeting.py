"""Prints an address and port at which the machines of a job can meet: this machine's address, and a free port.

A job's script runs this file on the job's first machine: `python -m gptworks.launch.meeting LAST_MACHINE`.
"""

import socket
import sys


def meeting_point(machine: str) -> str:
    """Return `ADDRESS:PORT`: this machine's address in the network that leads to `machine`, and a free port.

    This machine's name would not do: it may mean the loopback device, as on Debian, which others cannot reach.

    Raises:
        OSError: the other machine's name has no address.
    """
    family, kind, _, _, there = socket.getaddrinfo(machine, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards, socket.socket(family) as free:
        towards.connect(there)  # sends nothing
        free.bind(("", 0))
        address, port = towards.getsockname()[0], free.getsockname()[1]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


if __name__ == "__main__":
    print(meeting_point(sys.argv[1]))
