"""The command that referees a campaign of experiments: judge."""

import re
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from gptworks.cli import options
from gptworks.cli.printing import notice, say
from gptworks.errors import UserError, not_installed

_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def judge(
    recipe: Annotated[
        Path | None,
        Argument(metavar="RECIPE", autocompletion=options.recipe_names, help="The base recipe of a new campaign."),
    ] = None,
    overrides: options.Overrides = None,
    folder: Annotated[Path, Option(metavar="FOLDER", help="The campaign's folder; out of the agent's reach.")] = Path(
        "runs/judge"
    ),
    budget: Annotated[str, Option(metavar="TIME", help="Machine time for everything: 90min, 1h, 2d.")] = "1h",
    error: Annotated[str, Option(metavar="SHARE", help="Bound on errors of the whole campaign.")] = "5%",
    control: Annotated[
        Literal["family", "discoveries"],
        Option(help="family: bounds the probability of any false gain. discoveries: the share of false gains."),
    ] = "family",
    worth: options.Worth = 0.005,
    steps: options.Steps = None,
    verify: Annotated[
        bool, Option("--verify", help="Only check that the campaign's records were not changed.")
    ] = False,
    finish: Annotated[bool, Option("--finish", help="Only end the campaign, with the final comparison.")] = False,
) -> None:
    """Judge an agent's experiments, with Model Context Protocol tools.

    Serves on standard input and output. A campaign that the folder holds is continued with its original rules.
    """
    from gptworks.judge.begin import KEY, SECRET
    from gptworks.judge.campaign import Campaign

    serves = not (verify or finish)
    if serves:
        try:
            from gptworks.judge.tools import serve
        except ModuleNotFoundError as missing:
            raise not_installed((missing.name or "mcp").partition(".")[0], "judge", "the judge's server") from None
    seconds, share = _seconds(budget), _share(error)

    def opened() -> Campaign:
        if recipe is None or (folder / SECRET / KEY).exists():
            campaign = Campaign(folder, notice)
        else:
            campaign = Campaign.create(
                recipe, folder, budget_seconds=seconds, error=share, control=control, worth=worth, steps=steps,
                overrides=overrides or (), report=notice,
            )  # fmt: skip
        notice(f"judging the campaign in {folder}; its page is {folder / 'judge.html'}")
        return campaign

    if serves:
        serve(opened)
        return
    campaign = Campaign(folder, notice)
    try:
        found = campaign.records
        if finish:
            say(campaign.finish()["line"])
        else:
            say(f"nothing was changed: entries {campaign.verify()}, tries {len(found.tries)}")
    finally:
        campaign.close()


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)?", text.strip())
    if found is None:
        raise UserError(f"--budget {text} is not a time: give one such as 90min, 1h or 2d.")
    return float(found[1]) * _UNITS[found[2] or ""]


def _share(text: str) -> float:
    found = re.fullmatch(r"(\d*\.?\d+) ?(%)?", text.strip())
    if found is None:
        raise UserError(f"--error {text} is not a share: give one such as 5% or 0.05.")
    return float(found[1]) / (100 if found[2] else 1)
