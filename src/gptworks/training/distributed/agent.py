"""Starts a run's ranks on this machine and watches over them, as torchrun's agent does.

Unlike torchrun, the agent passes each signal to its ranks and lets them save. Its exit code says whether the run is
unfinished. It prints only lines on restarts and killed ranks; the ranks print their own messages. In a run on several
machines, each machine has an agent.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from gptworks.errors import UserError
from gptworks.machine import usable_cpus
from gptworks.training.distributed.rendezvous import Round, ThisMachine
from gptworks.training.signals import NOTICE, STOPS, UNFINISHED, exit_code_of

GRACE_SECONDS = 5.0
"""Seconds that other ranks have to exit on their own after a rank has failed."""

SAVE_SECONDS = 120.0
"""Seconds that ranks have to save and exit when another machine waits to take part."""

_POLL_SECONDS, _OTHERS_SECONDS = 0.05, 1.0


class Agent:
    """Runs `gptworks` with the same arguments in several processes of this machine, the ranks."""

    def __init__(self, n_ranks: int, arguments: Sequence[str], rendezvous: ThisMachine, restarts: int = 0) -> None:
        """
        Args:
            restarts: number of times that the ranks are started again after a rank has failed.

        Raises:
            UserError: the system is Windows.
        """
        if NOTICE is None:
            raise UserError(
                "several processes train together on Linux and macOS only: use gptworks train, or Linux in WSL 2."
            )
        self._notice = NOTICE
        """The signal that makes a rank save and stop; sending it again does not end the rank early."""
        self._n_ranks, self._arguments, self._rendezvous, self._restarts = n_ranks, arguments, rendezvous, restarts
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._stop: str | None = None
        """The first signal that asked this agent to stop."""
        self._asked: int | None = None
        """The first SIGINT or SIGTERM; after a second one, the ranks end at once."""
        self._ends_at_once = False
        self._meets = False

    def run(self) -> int:
        """Run the ranks, and restart them after a failure or when machines come or leave; return the exit code.

        The code is 0 if the run has ended or SIGINT has stopped it, and `UNFINISHED` if another signal has stopped it.
        Otherwise, it is the code of the first rank that failed, or 128 + n if signal number n has ended that rank.

        Raises:
            RunError: the other machines do not arrive, or the run has ended on one of them.
        """
        before = {number: signal.signal(number, self._pass_on) for number in STOPS}
        over = False
        try:
            while True:
                self._start(self._next_round())
                code, changed = self._wait()
                self._rendezvous.end_round()
                if self._stop is not None:
                    return code
                if over := self._is_last(code, changed):
                    return code
        except _Stopped:
            return exit_code_of(self._stop)
        finally:
            self._meets = False
            self._kill()
            self._rendezvous.leave(over)
            for each, handler in before.items():
                signal.signal(each, handler)

    def _next_round(self) -> Round:
        self._meets = True
        if self._stop is not None:
            raise _Stopped
        found = self._rendezvous.next_round()
        self._meets = False
        return found

    def _is_last(self, code: int, changed: bool) -> bool:
        """Return whether the round that ended with this exit code is the last.

        If it is not, print why the ranks start again, and use up a restart if a rank failed.

        Args:
            changed: whether the ranks were stopped because other machines wait to join.
        """
        if code == 0:
            return True
        if changed or (code == UNFINISHED and self._rendezvous.is_shared):
            why = "machines have come or left"
        elif code in (UNFINISHED, UserError.exit_code) or not self._restarts:
            return True
        else:
            self._restarts -= 1
            why = f"restarts left: {self._restarts}"
        sys.stderr.write(f"The ranks start again from the last checkpoint ({why}).\n")
        return False

    def _start(self, found: Round) -> None:
        common = {
            "WORLD_SIZE": str(found.n_nodes * self._n_ranks),
            "LOCAL_WORLD_SIZE": str(self._n_ranks),
            "MASTER_ADDR": found.host,
            "MASTER_PORT": str(found.port),
            "TORCHELASTIC_RUN_ID": "gptworks",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank hosts the store, so that it outlives any rank
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cpus() // self._n_ranks))),
        }
        if self._rendezvous.interface is not None:
            common["GLOO_SOCKET_IFNAME"] = self._rendezvous.interface
        self._ranks = []  # a signal that comes meanwhile is passed to the ranks started so far
        for i in range(self._n_ranks):
            environment = os.environ | common | {"RANK": str(found.node * self._n_ranks + i), "LOCAL_RANK": str(i)}
            command = [sys.executable, "-m", "gptworks", *self._arguments]
            self._ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
        if self._stop is not None:  # a signal came while the ranks were being started
            self._signal(signal.Signals[self._stop])

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._stop = self._stop or signal.Signals(number).name
        if self._meets:
            raise _Stopped
        self._ends_at_once |= number != NOTICE and self._asked == signal.SIGTERM
        if number != NOTICE:
            self._asked = self._asked or number
        self._signal(signal.SIGKILL if self._ends_at_once else number)

    def _signal(self, number: int) -> None:
        """Send the ranks a signal. The first SIGTERM becomes SIGUSR1: a scheduler may send the ranks SIGTERM too."""
        if number == signal.SIGTERM and self._asked != signal.SIGINT:
            number = self._notice
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def _wait(self) -> tuple[int, bool]:
        """Wait for all ranks; return the exit code, and whether they were stopped because other machines wait.

        Once a rank has failed, the others have `GRACE_SECONDS` to exit. Once other machines wait, all ranks have
        `SAVE_SECONDS` to save and exit. Ranks that still run then are killed.
        """
        code, changed, reported, deadline, look_at = 0, False, False, float("inf"), time.monotonic()
        while True:
            codes = [rank.poll() for rank in self._ranks]  # of all: a rank may die while the ranks before it run
            running = None in codes
            ended = [(i, code) for i, code in enumerate(codes) if code]
            failed = [each for each in ended if each[1] != UNFINISHED]
            if failed and not reported:
                code, reported = self._code_of(*failed[0]), True
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            elif ended and not code:
                code = UNFINISHED
            if not running or time.monotonic() > deadline:
                code = code or (UNFINISHED if running else 0)  # ranks that still run are killed below
                break
            if not changed and time.monotonic() > look_at:
                changed, look_at = self._rendezvous.others_wait(), time.monotonic() + _OTHERS_SECONDS
                if changed:
                    self._signal(self._notice)
                    deadline = min(deadline, time.monotonic() + SAVE_SECONDS)
            time.sleep(_POLL_SECONDS)
        self._kill()
        return code, changed

    def _code_of(self, number: int, ended: int) -> int:
        """Return the agent's exit code for a rank that failed; print an error if a signal has ended the rank."""
        if ended > 0:
            return ended
        name = signal.Signals(-ended).name
        sys.stderr.write(f"error: rank {number} was ended by {name}.\n")
        by_signal = self._stop is not None and name in ("SIGTERM", "SIGUSR1")
        return UNFINISHED if by_signal or self._ends_at_once else 128 - ended

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


class _Stopped(Exception):
    """A signal came while no ranks ran."""
