"""Start several processes of one command on this machine, as `torchrun --standalone` does.

Unlike torchrun, `launch` passes signals to every rank, exits with the code of the first failure, and prints only the
ranks' own messages. For several machines, use torchrun.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gptworks.machine import usable_cpus

GRACE_SECONDS = 5.0
"""Seconds that other ranks have to exit on their own after one has failed."""

_POLL_SECONDS = 0.05


def launch(n_ranks: int, arguments: Sequence[str]) -> int:
    """Run `gptworks` with these arguments in `n_ranks` processes; return the exit code of the first to fail, or 0."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = str(max(1, usable_cpus() // n_ranks))
    common = {
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher hosts the store, so that it outlives any rank
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in map(str, range(n_ranks)):
            environment = os.environ | common | {"RANK": number, "LOCAL_RANK": number}
            command = [sys.executable, "-m", "gptworks", *arguments]
            ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return _wait(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for each, handler in before.items():
            signal.signal(each, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks, or for `GRACE_SECONDS` after one failed; return the first failure's exit code, or 0."""
    code, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        failed = [(i, rank.returncode) for i, rank in enumerate(ranks) if rank.poll()]
        if failed and not code:
            number, ended = failed[0]
            deadline = time.monotonic() + GRACE_SECONDS
            code = ended if ended > 0 else 128 - ended
            if ended < 0:
                sys.stderr.write(f"error: rank {number} was ended by {signal.Signals(-ended).name}.\n")
    return code
