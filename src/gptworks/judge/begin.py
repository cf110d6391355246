"""Begin a campaign: seal a part of the recipe's text, fix the length of runs, and write the ledger's first entry."""

import contextlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import yaml

from gptworks.config import Recipe, ValidationSplit
from gptworks.data.prepare import prepare
from gptworks.data.sources.base import Piece
from gptworks.data.sources.choose import AnySource, check_sources, count_documents, iter_documents
from gptworks.data.split import split_documents
from gptworks.errors import UserError
from gptworks.files import check_free, check_links, open_new, remove_tree, sha256_file, write_whole
from gptworks.judge.evidence import Control
from gptworks.judge.ledger import Ledger, keyed
from gptworks.judge.records import CampaignRules
from gptworks.overrides import apply_overrides
from gptworks.recipe import load_recipe, read_recipe
from gptworks.runs import try_run
from gptworks.runs.statistics import FEWEST_PAIRS
from gptworks.runs.trials import Report
from gptworks.runs.try_run import LEAST_STEPS, RUN_SECONDS

USUAL_RUNS = 80
"""Number of runs that should fit in the budget. Runs are shortened for this."""

FINAL_PAIRS = 5
"""Number of pairs of runs in the final comparison, each with a fresh seed. Time for these runs is set aside."""

LEDGER, BASE, SECRET, KEY, COUNT, TRIES = "ledger.jsonl", "base.yaml", "secret", "key", "entries", "tries"
TEXTS, SEALED = "texts", "sealed.jsonl"

_DOCUMENTS_WORTH_A_CHOICE = 20


def begin(
    recipe: str | Path, folder: Path, *, budget_seconds: float, error: float, control: Control, worth: float,
    steps: int | None, overrides: Sequence[str], report: Report,
) -> None:  # fmt: skip
    """Write the folder of a new campaign; if this fails, remove the folder. See `Campaign.create`."""
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
    with contextlib.ExitStack() as undo:
        undo.callback(remove_tree, folder)
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
                f"steps, take about {least:.0f} s here. Give more time, or fewer --steps."
            )
        unit = loaded.objective.loss_unit
        rules = CampaignRules(loaded.name, budget_seconds, error, control, worth, wanted, seconds, unit)
        (folder / TRIES).mkdir()
        files = [folder / BASE, secret / SEALED, *sorted((folder / TEXTS).iterdir())]
        sums = {one.relative_to(folder).as_posix(): sha256_file(one, inside=folder) for one in files}
        ledger = Ledger(folder / LEDGER, key, secret / COUNT)
        ledger.append("created", rules=asdict(rules), files=sums, seconds=time.monotonic() - started)
        write_whole(secret / KEY, key, private=True, new=True)  # last: a folder with a key is complete
        undo.pop_all()


def seal(recipe: Recipe, folder: Path, secret: Path, key: bytes) -> dict[str, Any]:
    """Divide the text of a recipe's sources: write a sealed part to `secret`, and the rest to `texts/` in `folder`.
    Return the settings of the source that replaces the recipe's sources.

    The sealed share is `data.validation.fraction`. With 20 documents or more, whole documents are sealed, chosen by a
    keyed hash of their text. With fewer documents, the end of each document is sealed.

    Raises:
        UserError: the recipe does not train on text of its own sources, or there is too little text.
    """
    sources = recipe.data.texts
    if recipe.objective.type != "next_token" or not sources or recipe.data.mixture:
        raise UserError(
            f"the judge needs a recipe that predicts text of data.sources, since it seals a part of that text: this "
            f"one has objective.type={recipe.objective.type} and "
            + ("a data.mixture." if recipe.data.mixture else "other sources.")
        )
    check_sources(sources)
    texts, fraction = folder / TEXTS, recipe.data.validation.fraction
    texts.mkdir()
    with open_new(secret / SEALED, inside=secret, private=True) as sealed:
        if many := count_documents(sources, _DOCUMENTS_WORTH_A_CHOICE) == _DOCUMENTS_WORTH_A_CHOICE:
            _seal_documents(sources, texts, sealed, fraction, key)
        else:
            _seal_ends(sources, texts, sealed, fraction)
        if not sealed.tell():
            raise UserError("there is too little text to seal a part of it: give the recipe more text.")
    return {"type": "jsonl" if many else "text", "path": str(texts)}


def _seal_documents(sources: Iterable[AnySource], texts: Path, sealed: IO[bytes], fraction: float, key: bytes) -> None:
    hashes = sorted(keyed(key, text) for text in _documents(iter_documents(sources)))
    last = hashes[max(1, round(fraction * len(hashes))) - 1]
    with open_new(texts / "texts.jsonl", inside=texts) as kept:
        for text in _documents(iter_documents(sources)):
            (sealed if keyed(key, text) <= last else kept).write(_line(text))


def _seal_ends(sources: Iterable[AnySource], texts: Path, sealed: IO[bytes], fraction: float) -> None:
    number, file = -1, None
    with contextlib.ExitStack() as opened:
        for split, piece in split_documents(iter_documents(sources), ValidationSplit(fraction=fraction, by="tail")):
            if split == "validation":
                sealed.write(_line(piece.text))
                continue
            if piece.starts_document or file is None:
                opened.close()
                number += 1
                file = opened.enter_context(open_new(texts / f"{number:04d}.txt", inside=texts))
            file.write(piece.text.encode("utf-8"))


def _line(text: str) -> bytes:
    return json.dumps({"text": text}).encode("ascii") + b"\n"


def _documents(pieces: Iterable[Piece]) -> Iterator[str]:
    held: list[str] = []
    for piece in pieces:
        if piece.starts_document and held:
            yield "".join(held)
            held = []
        held.append(piece.text)
    if held:
        yield "".join(held)
