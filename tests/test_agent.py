"""The agent, which starts a machine's ranks: when it starts them again, its exit codes, and how it passes signals on.

The ranks are shell scripts here; test_parallel.py, test_machines.py and test_slurm.py have real ones.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import commands
import tiny
from gptworks.errors import RunError
from gptworks.training.distributed import agent
from gptworks.training.distributed.agent import Agent
from gptworks.training.distributed.rendezvous import Machines, Round, ThisMachine


class Meeting(ThisMachine):
    """A rendezvous of two machines of which this is the second, and what is asked of it."""

    is_shared = True

    def __init__(self, rounds: int = 9, others_wait_in: int | None = None) -> None:
        self.rounds, self.said = rounds, list[str]()
        self._others_wait_in = others_wait_in

    def next_round(self) -> Round:
        if not self.rounds:
            raise RunError("fewer than 2 machines have met")
        self.rounds -= 1
        self.said.append("meet")
        return Round(1, 2, "10.0.0.1", 29400)

    def others_wait(self) -> bool:
        ready = Path("first-1").exists()  # the rank catches signals
        return ready and self.said.count("meet") == self._others_wait_in

    def end_round(self) -> None:
        self.said.append("end")

    def leave(self, over: bool) -> None:
        self.said.append("over" if over else "leave")


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of a rank, which a test writes. It runs in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent.sys, "executable", str(tmp_path / "rank"))
    return tmp_path / "rank"


def script(rank: Path, text: str) -> None:
    rank.write_text(f"#!/bin/sh\necho $RANK >> started\n{text}\n")
    rank.chmod(0o755)


def started(rank: Path) -> list[str]:
    return sorted(rank.with_name("started").read_text().split())


ONE_FAILS_ONCE = "mkdir failed 2>/dev/null && exit 1; exit 0"


@pytest.mark.parametrize(
    ("text", "restarts", "code", "starts"),
    [
        ("exit 0", 3, 0, 1),
        (ONE_FAILS_ONCE, 0, 1, 1),
        (ONE_FAILS_ONCE, 1, 0, 2),
        ("exit 1", 2, 1, 3),
        ("exit 2", 2, 2, 1),  # the user's mistake
        ("exit 75", 2, 75, 1),  # a signal came to a rank itself
        ("kill -KILL $$", 0, 137, 1),
        ('[ "$RANK" = 0 ] && exit 75; sleep 0.2; exit 1', 0, 1, 1),
        ('[ "$RANK" = 1 ] && exit 3; sleep 0.5; exit 1', 0, 3, 1),  # the code of the rank that failed first
    ],
)
def test_ranks_start_again_after_a_failure_as_often_as_allowed(
    text: str, restarts: int, code: int, starts: int, rank: Path
) -> None:
    script(rank, text)
    assert Agent(2, ["train"], ThisMachine(), restarts).run() == code
    assert started(rank) == sorted(["0", "1"] * starts)


def wait_for_files(rank: Path, pattern: str, n: int) -> None:
    deadline = time.monotonic() + 20
    while len(list(rank.parent.glob(pattern))) < n and time.monotonic() < deadline:
        time.sleep(0.01)


def stop(number: signal.Signals, rank: Path, n_ranks: int) -> None:
    """Send this process a signal, once the ranks are ready."""

    def send() -> None:
        wait_for_files(rank, "ready-*", n_ranks)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize(
    ("number", "trap", "code"),
    [
        (signal.SIGTERM, "trap 'exit 75' USR1", 75),  # the ranks may have got SIGTERM themselves
        (signal.SIGUSR1, "trap 'exit 75' USR1", 75),
        (signal.SIGINT, "trap 'exit 0' INT", 0),
        (signal.SIGTERM, "", 75),  # before a rank's first step, the signal ends it
        (signal.SIGUSR1, "", 75),
        (signal.SIGTERM, "trap 'exit 1' USR1", 1),  # the last save failed
    ],
)
def test_a_signal_reaches_all_ranks_and_the_exit_code_says_whether_the_run_is_unfinished(
    number: signal.Signals, trap: str, code: int, rank: Path
) -> None:
    script(rank, f"{trap}\n: > ready-$RANK\nwhile true; do sleep 0.02; done")
    before = signal.getsignal(number)
    stop(number, rank, 2)
    assert Agent(2, ["train"], ThisMachine(), restarts=3).run() == code
    assert started(rank) == ["0", "1"] and signal.getsignal(number) is before


AS_TRAINING = """
trap 'asked=1' USR1
trap 'asked=1; trap - TERM; : > asked-$RANK' TERM
echo $$ > new-$RANK
mv new-$RANK ready-$RANK
while [ -z "$asked" ]; do sleep 0.02; done
sleep 0.3
: > saved-$RANK
exit 75
"""
"""Saves after SIGUSR1 and after the first SIGTERM, and ends at the second; see `stop_signals`."""


def test_ranks_that_a_scheduler_signals_too_save(rank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm, when it preempts a job, sends SIGTERM to the agent and to its ranks."""
    script(rank, AS_TRAINING)

    def send() -> None:
        wait_for_files(rank, "ready-*", 2)
        for file in rank.parent.glob("ready-*"):
            os.kill(int(file.read_text()), signal.SIGTERM)
        wait_for_files(rank, "asked-*", 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    assert Agent(2, ["train"], ThisMachine(), restarts=3).run() == 75
    assert {file.name for file in rank.parent.glob("saved-*")} == {"saved-0", "saved-1"}
    assert not capsys.readouterr().err


def test_a_second_sigterm_ends_ranks_at_once_and_is_reported_once(
    rank: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "GRACE_SECONDS", 1.0)
    script(rank, "trap ': > asked-$RANK' USR1\ntrap '' TERM\n: > ready-$RANK\nwhile true; do sleep 0.02; done")
    stop(signal.SIGTERM, rank, 2)

    def again() -> None:
        wait_for_files(rank, "asked-*", 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=again, daemon=True).start()
    assert Agent(2, ["train"], ThisMachine(), restarts=3).run() == 75
    assert capsys.readouterr().err.count("was ended by SIGKILL") == 1


def test_ranks_of_a_second_machine_have_the_next_numbers_and_the_first_machine_s_store(rank: Path) -> None:
    script(rank, 'echo "$LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT" >> seen')
    meeting = Meeting()
    assert Agent(2, ["train"], meeting).run() == 0
    assert started(rank) == ["2", "3"] and meeting.said == ["meet", "end", "over"]
    assert sorted((rank.parent / "seen").read_text().splitlines()) == [
        f"{i} of 4 at 10.0.0.1:29400" for i in (0, 1)
    ]  # fmt: skip


def test_ranks_start_again_with_other_machines_without_counting_it_as_a_failure(rank: Path) -> None:
    script(rank, "trap 'exit 75' USR1\nmkdir first-$RANK 2>/dev/null || exit 0\nwhile true; do sleep 0.02; done")
    meeting = Meeting(others_wait_in=1)
    assert Agent(1, ["train"], meeting, restarts=0).run() == 0
    assert meeting.said == ["meet", "end", "meet", "end", "over"]


def test_a_machine_whose_ranks_another_one_s_signal_stopped_meets_again_and_a_signalled_one_leaves(rank: Path) -> None:
    script(
        rank,
        "mkdir first 2>/dev/null && exit 75; trap 'exit 75' USR1; : > ready-$RANK; while true; do sleep 0.02; done",
    )
    meeting = Meeting()
    stop(signal.SIGTERM, rank, 1)
    assert Agent(1, ["train"], meeting, restarts=0).run() == 75
    assert meeting.said == ["meet", "end", "meet", "end", "leave"]


def test_a_run_that_no_machine_joins_ends_with_that_error_and_stays_open_to_others(rank: Path) -> None:
    script(rank, "exit 75")
    meeting = Meeting(rounds=1)
    with pytest.raises(RunError, match="fewer than 2 machines"):
        Agent(1, ["train"], meeting).run()
    assert meeting.said == ["meet", "end", "leave"]


def test_ranks_that_do_not_stop_for_other_machines_are_killed_and_the_run_is_not_over(
    rank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SAVE_SECONDS", 0.2)
    script(rank, "trap '' USR1\nmkdir first-$RANK 2>/dev/null || exit 0\nwhile true; do sleep 0.02; done")
    meeting = Meeting(others_wait_in=1)
    assert Agent(1, ["train"], meeting, restarts=0).run() == 0
    assert meeting.said == ["meet", "end", "meet", "end", "over"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_agent_is_ready_leaves_the_run_unfinished(number: signal.Signals, tmp_path: Path) -> None:
    """The process reads its recipe from a pipe, which stays open, when the signal comes."""
    pipe = tmp_path / "recipe.yaml"
    os.mkfifo(pipe)
    process = commands.start("-m", "gptworks", "launch", pipe, new=True, stderr=subprocess.PIPE)
    with pipe.open("w"):  # waits for the reader
        process.send_signal(number)
        assert process.wait(60) == 75


def test_a_signal_between_two_programs_of_an_agent_leaves_the_run_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that has lost the first machine starts itself again. The signal that comes while it has no handlers is
    there when it has them."""
    waits, recipe = Machines("10.0.0.1", 29400, 2, 2, "run"), tiny.write_recipe(tmp_path)
    command = [sys.executable, "-m", "gptworks", "launch", str(recipe)]
    started: list[subprocess.Popen[bytes]] = []

    def instead(*_: object) -> None:
        started.append(subprocess.Popen(command))  # has this process's mask of signals, as `execv` keeps it
        started[0].send_signal(signal.SIGTERM)
        raise RunError("replaced")

    monkeypatch.setattr("os.execv", instead)
    monkeypatch.setattr(waits, "_handler", object())
    try:
        with pytest.raises(RunError, match="replaced"):
            waits.next_round()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    assert started[0].wait(60) == 75
