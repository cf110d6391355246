"""Serve a campaign to an agent as tools of the Model Context Protocol, over standard input and output.

Input from the client is untrusted. Sizes are bounded, a change may set only allowed settings, and one training runs at
a time. No answer contains a seed, sealed text or the key.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import IO, Annotated, Any, BinaryIO, TypeVar, cast

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from pydantic import Field

from gptworks.errors import RunError, UserError
from gptworks.judge import answers
from gptworks.judge.campaign import USUAL_PAIRS, Campaign
from gptworks.judge.changes import MOST_CHANGES, MOST_PATCH_CHARACTERS
from gptworks.judge.records import Tried
from gptworks.runs.statistics import FEWEST_PAIRS, MOST_PAIRS

MOST_LINE_BYTES = 1 << 20
"""Maximum bytes of a request."""

MOST_WAIT_SECONDS = 600.0

INSTRUCTIONS = """\
You look for changes to a recipe that lower a language model's validation loss; the judge decides which are gains.
1. `init` shows the champion's settings (those that you may change) and the rules. 2. `plan` checks a change for free.
3. `try` trains pairs of runs with and without the change, with secret seeds. If it is still running when the wait is
over, call `status` with wait_seconds. An accepted change becomes the champion that later tries change. 4. `finish`
compares the champion with the base recipe on sealed text and ends the campaign.
Repeating, stopping early or choosing the number of pairs gains nothing: the evidence holds at any stopping time, the
same change again continues its try, and each further change needs more evidence. So try what you believe in."""

Changes = Annotated[
    dict[str, Any] | None,
    Field(description='Values by path, such as {"train.optimizer": "adamw"}.', max_length=MOST_CHANGES),
]
Patch = Annotated[
    str | None,
    Field(
        description="YAML merged into the recipe, in place of changes: `model: {n_layers: 6}`.",
        max_length=MOST_PATCH_CHARACTERS,
    ),
]
Pairs = Annotated[
    int, Field(ge=FEWEST_PAIRS, le=MOST_PAIRS, description="Stop after this many pairs if nothing is decided.")
]
Wait = Annotated[
    float, Field(ge=0, le=MOST_WAIT_SECONDS, description="Seconds to wait for the end; training goes on afterwards.")
]
Number = Annotated[int, Field(ge=1, le=10**6, description="The number of a try.")]

Answer = TypeVar("Answer")


class Judge:
    """State of the tools: the campaign, once it is open, and its last training, which runs in its own thread."""

    def __init__(self, campaign: Campaign | None = None) -> None:
        self.opened = campaign
        self.job: Future[Tried | None] | None = None

    async def campaign(self) -> Campaign:
        """Wait until the campaign is open, and return it. Tools wait here, because clients wait longer for an answer
        than for the start of a server."""
        while self.opened is None:
            await anyio.sleep(0.05)
        return self.opened

    async def ask(self, about: Callable[[Campaign], Answer]) -> Answer:
        """Return what `about` returns for the campaign; raise a ToolError if it raises a UserError or a
        RunError."""
        campaign = await self.campaign()
        with _answered():
            return about(campaign)

    async def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the training, if any."""
        job = self.job  # another job may begin as soon as this job has ended
        with anyio.move_on_after(seconds):
            while job is not None and not job.done():
                await anyio.sleep(0.05)

    async def train(self, work: Callable[[Campaign], Tried | None], wait_seconds: float) -> answers.Status:
        """Start a training, wait at most `wait_seconds` for its end, and return the status, with the try if it ended.
        Raise a ToolError if another training is running, or this training failed during the wait."""
        campaign = await self.campaign()
        if self.job is not None and not self.job.done():
            raise ToolError(str(campaign.busy()))
        job: Future[Tried | None] = Future()
        self.job = job
        threading.Thread(target=_work, args=(job, lambda: work(campaign))).start()
        await self.wait(wait_seconds)
        with _answered():
            return answers.status(campaign, job.result() if job.done() else None)


def _work(job: "Future[Tried | None]", work: Callable[[], Tried | None]) -> None:
    """Run `work` and store its result or error in the job. Log errors other than UserError and RunError, which are
    bugs."""
    try:
        job.set_result(work())
    except BaseException as error:
        if not isinstance(error, UserError | RunError):
            traceback.print_exc()
        job.set_exception(error)


@contextmanager
def _answered() -> Iterator[None]:
    """Turn a UserError or RunError in the `with` block into a ToolError, whose text the agent sees. The agent does not
    see the text of other errors."""
    try:
        yield
    except (UserError, RunError) as error:
        raise ToolError(str(error)) from None


def _known(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError | RunError) else "the judge failed; its log says why"


def server_of(judge: Judge) -> MCPServer:
    """Return a server whose tools are the campaign's methods."""
    server = MCPServer("gptworks-judge", instructions=INSTRUCTIONS, log_level="ERROR")

    @server.tool()
    async def init() -> answers.Start:
        """Show the rules, the champion's changes, and the settings that may be changed, with their values."""
        return await judge.ask(answers.start)

    @server.tool()
    async def plan(changes: Changes = None, patch: Patch = None) -> answers.Planned:
        """Check a change and estimate what it costs. Trains nothing and costs no budget."""
        return await judge.ask(lambda one: answers.planned(one, changes, patch))

    @server.tool(name="try")
    async def try_(
        changes: Changes = None, patch: Patch = None, pairs: Pairs = USUAL_PAIRS, wait_seconds: Wait = 45
    ) -> answers.Status:
        """Train pairs of runs with and without a change, until it is judged whether the change improves the champion.

        Returns the status with the try. If `running` is not empty, training continues: call `status` with wait_seconds.
        """
        return await judge.train(lambda one: one.try_change(changes, patch, pairs=pairs), wait_seconds)

    @server.tool()
    async def fork(
        number: Number,
        changes: Changes = None,
        patch: Patch = None,
        pairs: Pairs = USUAL_PAIRS,
        wait_seconds: Wait = 45,
    ) -> answers.Status:
        """Try the change of an earlier try together with further changes, against the champion."""
        return await judge.train(lambda one: one.try_change(changes, patch, pairs=pairs, of_try=number), wait_seconds)

    @server.tool()
    async def evaluate(number: Number) -> answers.Evaluated:
        """Show what a try's runs measured: losses, perplexity, the gain of each pair, the time of the same tokens."""
        return await judge.ask(lambda one: answers.evaluated(one, one.tried(number)))

    @server.tool()
    async def compare(first: Number, second: Number) -> answers.Compared:
        """Show two tries next to each other. The difference between them is not tested."""
        return await judge.ask(lambda one: answers.compared(one, one.tried(first), one.tried(second)))

    @server.tool()
    async def league() -> answers.League:
        """Rank all tries: accepted changes first, then by mean gain."""
        return await judge.ask(answers.league)

    @server.tool()
    async def status(wait_seconds: Wait = 0) -> answers.Status:
        """Show the budget, the evidence that the next try needs, and what is running; optionally wait for its end."""
        await judge.wait(wait_seconds)
        error = None if judge.job is None or not judge.job.done() else judge.job.exception()
        return await judge.ask(lambda one: answers.status(one, last_error="" if error is None else _known(error)))

    @server.tool()
    async def finish(wait_seconds: Wait = 45) -> answers.Status:
        """End the campaign: compare the champion with the base recipe, with fresh seeds, on sealed text."""

        def end(campaign: Campaign) -> None:
            campaign.finish()

        return await judge.train(end, wait_seconds)

    return server


class _Lines:
    """Requests, one per line. A line that is too long is replaced by an invalid request."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def readline(self) -> str:
        line = self._file.readline(MOST_LINE_BYTES)
        if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := self._file.readline(MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            return "too long\n"
        return line.decode("utf-8", "replace")


def _innermost(errors: BaseExceptionGroup) -> BaseException:
    """Return the first UserError or RunError of nested groups, or the first error if there is no such error."""
    ours, _ = errors.split((UserError, RunError))
    error: BaseException = ours or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def serve(open_campaign: Callable[[], Campaign]) -> None:
    """Serve a campaign to the client at standard input and output until the client leaves, then stop any training.
    `open_campaign` is called in a thread, since opening a new campaign takes longer than a client waits for a
    server."""
    requests = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # processes that train must not read requests
    os.close(nothing)

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignore further signals: stopping has begun
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    judge = Judge()
    low = server_of(judge)._lowlevel_server

    async def run() -> None:
        lines = anyio.wrap_file(cast(IO[str], _Lines(requests)))
        async with stdio_server(stdin=lines) as (incoming, outgoing), anyio.create_task_group() as group:
            group.start_soon(low.run, incoming, outgoing, low.create_initialization_options())
            judge.opened = await anyio.to_thread.run_sync(open_campaign)

    try:
        anyio.run(run)
    except BaseExceptionGroup as errors:
        raise _innermost(errors) from None
    finally:
        if judge.opened is not None:
            judge.opened.close()
