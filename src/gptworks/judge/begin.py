"""Begin a campaign: seal a part of the recipe's text, fix the length of runs, and write the ledger's first entry."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from gptworks.data.prepare import prepare
from gptworks.errors import UserError
from gptworks.files import check_free, check_links, sha256_file, write_whole
from gptworks.judge.evidence import Control
from gptworks.judge.ledger import Ledger
from gptworks.judge.records import CampaignRules
from gptworks.judge.texts import SEALED, TEXTS, seal
from gptworks.overrides import apply_overrides
from gptworks.recipe import load_recipe, read_recipe
from gptworks.runs import try_run
from gptworks.runs.statistics import FEWEST_PAIRS
from gptworks.runs.trials import Report
from gptworks.runs.try_run import LEAST_STEPS, RUN_SECONDS

USUAL_RUNS = 80
"""Runs are shortened so that about this many fit in the budget."""

FINAL_PAIRS = 5
"""Number of fresh seeds of the final comparison. Time for it is set aside."""

LEDGER, BASE, SECRET, KEY, COUNT, TRIES = "ledger.jsonl", "base.yaml", "secret", "key", "entries", "tries"


def begin(
    recipe: str | Path, folder: Path, *, budget_seconds: float, error: float, control: Control, worth: float,
    steps: int | None, overrides: Sequence[str], report: Report,
) -> None:  # fmt: skip
    """Write the folder of a new campaign; see `Campaign.create`."""
    started = time.monotonic()
    for name, value, fits, rule in (
        ("budget", budget_seconds, 0 < budget_seconds < 1e8, "a number of seconds above 0, at most 3 years"),
        ("error", error, 0 < error <= 0.5, "a probability above 0 and at most 0.5, such as 5%"),
        ("worth", worth, 0 <= worth < 1e6, "0 or more"),
    ):
        if not fits:
            raise UserError(f"--{name} {value:g} is not {rule}.")
    check_free(folder)
    loaded = load_recipe(recipe, overrides)
    wanted = try_run.length_of_runs(loaded, recipe, steps)
    check_links(folder)
    folder = folder.absolute()
    secret, key = folder / SECRET, secrets.token_bytes(32)
    secret.mkdir(parents=True, mode=0o700)
    source = seal(loaded, folder, secret, key)
    tree = apply_overrides(read_recipe(recipe)[1], overrides)
    tree.pop("sweep", None)
    tree |= {"name": loaded.name, "run_dir": str(folder / "run")}
    tree["data"] = {**tree["data"], "sources": [source], "cache_dir": str(folder / "data")}
    write_whole(folder / BASE, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), new=True)
    base = load_recipe(folder / BASE)
    report("preparing the text of the tries")
    prepare(base)
    report("measuring a step")
    seconds = try_run.measured_step_seconds(base)
    if steps is None:
        wanted = min(wanted, max(LEAST_STEPS, int((budget_seconds / USUAL_RUNS - RUN_SECONDS) / seconds)))
    least = 2 * (FINAL_PAIRS + FEWEST_PAIRS) * (wanted * seconds + RUN_SECONDS)
    if least > budget_seconds:
        raise UserError(
            f"--budget {budget_seconds:g} s is too short: one try and the final comparison, with runs of {wanted} "
            f"steps, take about {least:.0f} s here. Give more time, or fewer --steps, in another --folder."
        )
    unit = loaded.objective.loss_unit
    rules = CampaignRules(loaded.name, budget_seconds, error, control, worth, wanted, seconds, unit)
    (folder / TRIES).mkdir()
    files = [folder / BASE, secret / SEALED, *sorted((folder / TEXTS).iterdir())]
    sums = {one.relative_to(folder).as_posix(): sha256_file(one, inside=folder) for one in files}
    ledger = Ledger(folder / LEDGER, key, secret / COUNT)
    ledger.append("created", rules=asdict(rules), files=sums, seconds=time.monotonic() - started)
    write_whole(secret / KEY, key, private=True, new=True)  # last: now the campaign is complete
