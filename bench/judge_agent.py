"""A scripted agent that looks for a better demo, with `gptworks judge` as its referee.

    python bench/judge_agent.py --folder runs/campaign --page docs/tries/campaign.html    # an hour on two cores

The agent uses the Model Context Protocol, as a language model would, and sees nothing but the judge's answers. It plans
each proposal, and drops proposals that cost too much. For every other proposal it asks for three pairs of runs, and for
three more as long as the change looks like a gain; the judge's evidence is valid whenever the agent stops. If a change
to a decimal number is accepted, the agent proposes half the number next. After the last proposal it ends the campaign.
Two of the proposals change nothing that matters, so that the page shows the result of such changes. The folder must be
new; `gptworks judge --folder F --finish` ends an interrupted campaign.
"""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from gptworks.judge.page import PAGE

MOST_WORK = 1.6
"""Maximum FLOPs per token of a proposal, relative to the champion's; more expensive proposals are dropped."""
LOOK, MOST_PAIRS = 3, 15
"""Pairs of runs between two looks at a try, and maximum number of pairs of a try."""
WAIT_SECONDS = 600

Changes = Mapping[str, Any]

PROPOSALS: tuple[tuple[str, Changes], ...] = (
    ("token pairs", {"model.bigram_vocab_size": 4096}),
    ("an epsilon that nothing depends on", {"train.eps": 1e-9}),
    ("value embeddings", {"model.value_embeddings": ["none", "table"]}),
    ("the rate of the embeddings", {"train.learning_rate": 0.01}),
    ("attention's gate", {"model.attention_gate": True}),
    ("twice the depth", {"model.n_layers": 6}),
    ("weights averaged along the run", {"train.ema_decay": 0.99}),
    ("smear", {"model.smear": True}),
    ("squared ReLU", {"model.mlp": "relu2"}),
    ("a clip that is never reached", {"train.grad_clip": 50.0}),
    ("a longer decay", {"train.decay_fraction": 0.8}),
    ("small batches first", {"train.smaller_batches": [[0.3, 1]]}),
)
"""The changes that the agent proposes, in this order."""


class Agent:
    """A client of the judge."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return a tool's answer.

        Raises:
            RuntimeError: the judge refused; the text says why.
        """
        result = await self._client.call_tool(tool, arguments, read_timeout_seconds=WAIT_SECONDS + 60)
        if result.is_error:
            raise RuntimeError(result.content[0].text)  # type: ignore[union-attr]
        return result.structured_content or {}

    async def trained(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool that trains, and wait for its end."""
        status = await self.call(tool, wait_seconds=WAIT_SECONDS, **arguments)
        while status["running"]:
            status = await self.call("status", wait_seconds=WAIT_SECONDS)
        return status

    async def propose(self, name: str, changes: Changes) -> dict[str, Any] | None:
        """Plan a change and try it; return the judge's answer about it, or None if the judge refused the plan or the
        change was dropped."""
        try:
            planned = await self.call("plan", changes=dict(changes))
        except RuntimeError as error:
            say(f"{name}: {error}")
            return None
        if planned["work"] > MOST_WORK or not planned["affordable_pairs"]:
            say(f"{name}: dropped, a token takes {planned['work']:.2f} times the FLOPs")
            return None
        answer: dict[str, Any] = {"pairs": 0, "gain": 1.0, "may_continue": True}
        while answer["may_continue"] and answer["gain"] > 0 and answer["pairs"] < MOST_PAIRS:
            answer = (await self.trained("try", changes=dict(changes), pairs=answer["pairs"] + LOOK))["last"]
        say(f"{name}: {answer['verdict']} after {answer['pairs']} pairs, {answer['words']}")
        return answer

    async def campaign(self) -> str:
        """Try all proposals while the budget lasts, and end the campaign; return its final result as text."""
        say((await self.call("init"))["rules"])
        for name, changes in PROPOSALS:
            try:
                further: Changes | None = changes
                while further is not None:
                    answer = await self.propose(name, further)
                    further = one_further(further) if answer and answer["accepted"] else None
            except RuntimeError as error:  # the budget is used up
                say(str(error))
                break
        return str((await self.trained("finish"))["final"])


def one_further(changes: Changes) -> Changes | None:
    """Return a change of one float with the float halved; None if the change is of another kind."""
    ((key, value),) = changes.items()
    return {key: value / 2} if isinstance(value, float) else None


def say(text: str) -> None:
    print(text, flush=True)


async def main(options: argparse.Namespace) -> None:
    command = ["-m", "gptworks", "judge", options.recipe, "--folder", str(options.folder), "--budget", options.budget]
    server = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
    async with Client(server) as client:
        say(await Agent(client).campaign())
    if options.page:
        shutil.copyfile(options.folder / PAGE, options.page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--folder", type=Path, default=Path("runs/campaign"), help="of the campaign; new")
    parser.add_argument("--budget", default="1h")
    parser.add_argument("--page", type=Path, help="copy the judge's page there")
    asyncio.run(main(parser.parse_args()))
