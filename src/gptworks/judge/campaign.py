"""A campaign: changes to a recipe, tried one after another in a fixed time and judged with one bound on all errors.

Its folder holds `ledger.jsonl`, `base.yaml` and a `champion-NNN.yaml` for each accepted change, `texts/` (the text of
all tries) and its tokens in `data/`, `tries/NNN/` (folders of `gptworks try`), `final/`, the page `judge.html`, and
`secret/`, which only its owner may read: the key of seeds and signatures, and the sealed text.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from gptworks.config import Recipe
from gptworks.data.prepare import prepare
from gptworks.errors import RunError, UserError
from gptworks.files import check_links, read_regular, sha256_file, write_whole
from gptworks.judge.begin import BASE, COUNT, FINAL_PAIRS, KEY, LEDGER, SECRET, TRIES, begin
from gptworks.judge.changes import changed_recipe, check_work, overrides_from, together, work_of_token
from gptworks.judge.evidence import Control, level, spread_floor
from gptworks.judge.final import FINAL, final_facts, final_gains
from gptworks.judge.ledger import Ledger, check_pairs, entered_pairs, is_lost, keyed, new_pairs, signature
from gptworks.judge.page import write_judge_page
from gptworks.judge.records import Records, Tried, facts_of, read_records
from gptworks.overrides import apply_overrides
from gptworks.planning.params import count_parameters
from gptworks.recipe import load_recipe, read_recipe, with_vocab_size
from gptworks.runs.statistics import FEWEST_PAIRS, MOST_PAIRS
from gptworks.runs.trials import Report, locked
from gptworks.runs.try_page import write_try_page
from gptworks.runs.try_results import TRY_FILE, Try, read_try
from gptworks.runs.try_run import RUN_SECONDS, Rules, plan_try, run_try

USUAL_PAIRS = 12
"""Default number of pairs after which an undecided try stops."""

Changes = Mapping[str, Any] | None


class Campaign:
    """A campaign of tries in a folder. Only one process may use it, and it trains one try at a time."""

    def __init__(self, folder: str | Path, report: Report = lambda _: None) -> None:
        """Open the campaign in a folder, and check its ledger, recipes and texts.

        Raises:
            UserError: the folder holds no campaign, another process uses it, or its files were changed.
        """
        self.folder, self._report = Path(folder).absolute(), report
        key = self.folder / SECRET / KEY
        if not key.is_file():
            raise UserError(f"{folder} holds no campaign: give a recipe to begin one, or another --folder.")
        check_links(self.folder)
        self._lock = locked(self.folder, "judge", "--folder")
        self._training, self._stop = threading.Lock(), threading.Event()
        self.running: tuple[int, int] | None = None
        """The try that trains now (0: the final comparison) and its number of pairs so far; None if nothing trains."""
        self._since = time.monotonic()
        try:
            self._key = read_regular(key, 1 << 10, inside=key.parent)
            self._ledger = self._read_ledger()
            self._note_lost_pair()
            self.verify()
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def create(
        cls, recipe: str | Path, folder: str | Path, *, budget_seconds: float, error: float = 0.05,
        control: Control = "family", worth: float = 0.005, steps: int | None = None, overrides: Sequence[str] = (),
        report: Report = lambda _: None,
    ) -> "Campaign":  # fmt: skip
        """Begin a campaign in a new folder: seal a part of the recipe's text, and measure a step.

        Args:
            budget_seconds: machine time for all tries and the final comparison.
            error: bound on errors of the whole campaign.
            control: the quantity that `error` bounds. `family`: the probability of any false gain. `discoveries`: the
                expected share of false gains among the accepted gains.
            worth: the minimum worthwhile gain, in the unit of the loss.
            steps: steps of each run. Default: the recipe's number, or fewer so that about 80 runs fit in the budget.
            overrides: changes `key.path=value` to the recipe, made before the campaign begins.

        Raises:
            UserError: the recipe has no text of its own, a value is out of its range, the budget is too short, or the
                folder is not empty.
        """
        begin(
            recipe, Path(folder), budget_seconds=budget_seconds, error=error, control=control, worth=worth,
            steps=steps, overrides=overrides, report=report,
        )  # fmt: skip
        made = cls(folder, report)
        write_judge_page(made.folder, made.records)
        return made

    def close(self) -> None:
        """Stop the current training, if any, with a checkpoint, and let other processes use the folder."""
        self._stop.set()
        with self._training:
            self._lock.release()

    def _read_ledger(self) -> Ledger:
        return Ledger(self.folder / LEDGER, self._key, self.folder / SECRET / COUNT)

    def verify(self) -> int:
        """Return the number of entries of the ledger. Raise a UserError if the ledger, a recipe, a text, a folder of a
        try or a pair of runs was changed, added or removed."""
        ledger = self._read_ledger()
        if not ledger.entries or ledger.entries != self._ledger.entries:
            raise UserError(f"{ledger.path} is not what this judge has written: restore it from a copy.")
        for entry in ledger.entries:
            for name, sha256 in entry.get("files", {}).items():
                path = self.folder / name
                if not path.is_file() or sha256_file(path, inside=self.folder) != sha256:
                    raise UserError(f"{path} is not the file that the campaign wrote: restore it from a copy.")
        folders = {f"{entry['tried']:03d}" for entry in ledger.of_kind("begun")}
        if unknown := sorted({one.name for one in (self.folder / TRIES).iterdir()} - folders):
            raise UserError(
                f"{self.folder / TRIES / unknown[0]} has no entry in {ledger.path}: it was added. Remove the folder."
            )
        if (self.folder / FINAL).exists() and not any(ledger.of_kind("closing")):
            raise UserError(f"{self.folder / FINAL} has no entry in {ledger.path}: it was added. Remove the folder.")
        for number, pairs in entered_pairs(ledger).items():
            check_pairs(self._folder(number), pairs, self._key)
        return len(ledger.entries)

    def _note_lost_pair(self) -> None:
        """Enter a pair as lost if it is the newest entry and `try.json` lacks it, because the file could not be
        written."""
        for newest in self._ledger.entries[-1:]:
            if newest["kind"] == "pair" and is_lost(self._folder(newest["tried"]), newest["signature"], self._key):
                self._ledger.append("lost", **{name: newest[name] for name in ("tried", "pair", "signature")})

    def _folder(self, number: int) -> Path:
        """Return the folder of a try; 0: the folder of the final comparison."""
        return self.folder / TRIES / f"{number:03d}" if number else self.folder / FINAL

    def _enter_pairs(self, number: int, so_far: Try) -> None:
        """Enter a try's new pairs into the ledger, each with the time since the last entry.

        Runs that a killed judge left running may have trained for longer than that time. Then their training time
        counts, without the time that was entered when the try was stopped.
        """
        counted = 0.0
        for entry in self._ledger.of_kind("pair", "ended", "stopped"):
            if entry.get("tried", 0) == number:
                counted = 0.0 if entry["kind"] == "pair" else counted + entry["seconds"]
        for pair, trained in new_pairs(so_far, entered_pairs(self._ledger).get(number, {}), self._key):
            self._ledger.append(
                "pair", tried=number, pair=pair.number, signature=signature(pair, self._key),
                trained=sum(pair.seconds.values()), seconds=max(self._spent(), trained - counted),
            )  # fmt: skip

    def _spent(self) -> float:
        """Return the seconds since the last call, or since the present work began."""
        since, self._since = self._since, time.monotonic()
        return self._since - since

    # -------------------------------------------------------------------------------------------- state

    @property
    def records(self) -> Records:
        """The rules and all tries so far. A try is `abandoned` if it is not training and the ledger has no end of it;
        its pairs count."""
        found = read_records(self._ledger)
        for one in found.tries:
            if not one.is_open:
                continue
            if one.state == "running" and (self.running is None or self.running[0] != one.number):
                one.state = "abandoned"
            if ((folder := self._folder(one.number)) / TRY_FILE).is_file():
                one.take(facts_of(read_try(folder)))
        return found

    @property
    def champion_path(self) -> Path:
        """Path of the recipe with all accepted changes."""
        number = read_records(self._ledger).champion
        return self.folder / (f"champion-{number:03d}.yaml" if number else BASE)

    def pair_seconds(self, found: Records) -> float:
        """Return the estimated time of a pair of runs."""
        pairs = sum(len(one.gains) for one in found.tries)
        if pairs >= FEWEST_PAIRS:
            return sum(one.seconds for one in found.tries) / pairs
        return 2 * (found.rules.steps * found.rules.step_seconds + RUN_SECONDS)

    def left_seconds(self, found: Records) -> float:
        """Return the time that tries may still use, without the time set aside for the final comparison."""
        return max(0.0, found.rules.budget_seconds - found.used_seconds - FINAL_PAIRS * self.pair_seconds(found))

    def next_level(self, found: Records) -> float:
        """Return the level that the next new change gets; see `evidence.level`."""
        rules = found.rules
        return level(rules.error, rules.control, len(found.tries) + 1, len(found.accepted))

    def tried(self, number: int) -> Tried:
        """Return a try by its number; raise a UserError if there is no such try."""
        tries = self.records.tries
        if not 1 <= number <= len(tries):
            known = f"there are tries 1 to {len(tries)}" if tries else "there are no tries yet"
            raise UserError(f"there is no try {number}: {known}.")
        return tries[number - 1]

    def champion(self) -> Recipe:
        """Return the recipe with all accepted changes, with the size of its vocabulary."""
        recipe = load_recipe(self.champion_path)
        return with_vocab_size(recipe, prepare(recipe).manifest.vocab_size)

    # -------------------------------------------------------------------------------------------- tries

    def plan(self, overrides: list[str]) -> tuple[Recipe, Recipe, float]:
        """Return the champion's recipe, the changed recipe, and the FLOPs of a token with the change, divided by the
        FLOPs without it. Nothing is trained or written to the ledger. Raise a UserError if the change is not allowed or
        invalid, changes nothing, or is too large."""
        recipe = self.champion()
        changed = changed_recipe(self.champion_path, recipe, overrides)
        changed = with_vocab_size(changed, recipe.model.vocab_size)
        if changed == recipe:
            raise UserError(f"{' '.join(overrides)}: the champion says that already. Give a value that differs.")
        check_work(with_vocab_size(load_recipe(self.folder / BASE), recipe.model.vocab_size), changed)
        return recipe, changed, work_of_token(changed) / work_of_token(recipe)

    def try_change(
        self, changes: Changes = None, patch: str | None = None, *, pairs: int = USUAL_PAIRS, of_try: int | None = None
    ) -> Tried:
        """Train pairs of runs with and without a change to the champion until the change is judged, `pairs` pairs exist
        or the time is over; return the try.

        The same change to the same champion continues its earlier try. An accepted change becomes the champion.

        Args:
            changes, patch: values by path, or YAML that is merged into the recipe.
            of_try: number of a try whose change is also made, before this change.

        Raises:
            UserError: see `plan`; or `pairs` is out of its range, there is no try `of_try`, the campaign is finished, a
                try is running, or the time is over.
            RunError: a run failed.
        """
        earlier = () if of_try is None else self.tried(of_try).changes
        overrides = together(earlier, overrides_from(changes, patch))
        if not FEWEST_PAIRS <= pairs <= MOST_PAIRS:
            raise UserError(f"pairs={pairs}: give {FEWEST_PAIRS} to {MOST_PAIRS}.")
        with self._alone():
            found = self.records
            if found.closing:
                raise UserError(
                    "the campaign has ended, since its sealed text was opened: begin one in a new --folder."
                )
            _, changed, _ = self.plan(overrides)
            identity = _identity(found.champion, changed)
            known = next((one for one in found.tries if one.identity == identity), None)
            if known is not None and known.state != "abandoned" and (not known.is_open or len(known.gains) >= pairs):
                return known
            return self._try(overrides, pairs, found, known, identity, count_parameters(changed.model).total)

    def _try(
        self, overrides: list[str], pairs: int, found: Records, known: Tried | None, identity: str, parameters: int
    ) -> Tried:
        started, left, worth = self._since, self.left_seconds(found), found.rules.worth
        per_pair = self.pair_seconds(found)
        if left < FEWEST_PAIRS * per_pair:
            raise UserError(
                f"{left:.0f} s of the budget are left for tries, and {FEWEST_PAIRS} pairs of runs take about "
                f"{FEWEST_PAIRS * per_pair:.0f} s. `finish` compares the champion with the base recipe."
            )
        number = len(found.tries) + 1 if known is None else known.number
        folder, path = self._folder(number), self.champion_path
        try:
            begun = plan_try(
                path, overrides, folder, left / 60, worth, found.rules.steps, resume=(folder / TRY_FILE).is_file(),
                report=self._report,
            )  # fmt: skip
        except (UserError, RunError) as error:
            if (spent := self._spent()) > 1:  # planning has measured steps
                self._ledger.append("refused", changes=overrides, why=str(error)[:500], seconds=spent)
            raise
        if known is None:
            self._ledger.append(
                "begun", tried=number, changes=overrides, champion=found.champion, identity=identity,
                level=self.next_level(found), parameters=parameters,
            )  # fmt: skip
        self.running = number, len(begun.pairs)
        ended, one = begun, self.tried(number)
        one.least_deviation = spread_floor(other.judgement(worth) for other in found.tries if other.number != number)

        def is_ended(so_far: Try) -> bool:
            one.take(facts_of(so_far))
            return (
                one.decided(worth)
                or len(so_far.pairs) >= pairs
                or time.monotonic() - started + max(per_pair, one.seconds / max(1, len(one.gains))) > left
            )

        def note(so_far: Try) -> None:
            nonlocal ended
            ended, self.running = so_far, (number, len(so_far.pairs))
            self._enter_pairs(number, so_far)

        rules = Rules(
            self._seeds(f"try {number}"), is_ended, lambda: self._stop.is_set() or time.monotonic() - started > left
        )
        problem, files = "", dict[str, str]()
        try:
            run_try(begun, path, self._report, note, rules)
        except (RunError, UserError) as error:
            problem = str(error)
        self._note_lost_pair()
        if known is not None and known.state == "judged" and ended.pairs == begun.pairs and not problem:
            self.running = None
            return self.tried(number)  # no run was trained
        if ended.pairs:
            write_try_page(ended)
        one.take(facts := facts_of(ended))
        answer = one.judgement(worth).answer if one.decided(worth) and not problem else "open"
        if answer == "gain":
            name = f"champion-{number:03d}.yaml"
            tree = apply_overrides(read_recipe(path)[1], overrides)
            write_whole(self.folder / name, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
            files[name] = sha256_file(self.folder / name)
        self._ledger.append(
            "ended", tried=number, answer=answer, problem=problem[:500], files=files,
            is_open=answer == "open" and ended.due(ended=False) is not None,
            seconds=self._spent(), least_deviation=one.least_deviation, **facts,
        )  # fmt: skip
        self.running = None
        write_judge_page(self.folder, self.records)
        if problem:
            raise RunError(problem)
        return self.tried(number)

    def finish(self) -> dict[str, Any]:
        """Compare the champion with the base recipe, over fresh seeds and on the sealed text, and end the campaign.

        Return the facts of the comparison; `line` states them in words. Without an accepted change, nothing is
        compared, and the text stays sealed.

        Raises:
            UserError: a try is running.
            RunError: a run failed or was stopped; another call continues the comparison.
        """
        with self._alone():
            found = self.records
            if found.final is not None:
                return found.final
            if not found.closing:
                self._ledger.append("closing", champion=found.champion)
            self.running = 0, 0

            def note(so_far: Try) -> None:
                self.running = 0, len(so_far.pairs)
                self._enter_pairs(0, so_far)

            gains, place = list[float](), ""
            if found.champion:
                rules = Rules(self._seeds("final"), lambda _: False, self._stop.is_set)
                try:
                    gains, place = final_gains(self.folder, found, rules, self._report, note)
                except (RunError, UserError):
                    self._note_lost_pair()
                    self._ledger.append("stopped", seconds=self._spent())
                    raise
            final = final_facts(gains, place, found)
            self._ledger.append("finished", final=final, seconds=self._spent())
            self.running = None
            write_judge_page(self.folder, self.records)
            return final

    def busy(self) -> UserError:
        """Return a UserError that names the running try or comparison."""
        number, pairs = self.running or (-1, 0)
        what = "a try" if number < 0 else f"try {number}" if number else "the final comparison"
        return UserError(f"{what} is running, with {pairs} pairs so far: one training at a time, wait for its end.")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._training.acquire(blocking=False):
            raise self.busy()
        self._since = time.monotonic()
        try:
            self._note_lost_pair()
            yield
        finally:
            self.running = None
            self._training.release()

    def _seeds(self, label: str) -> Callable[[int], int]:
        """Return a function from a pair's number to its seed, which only the holder of the key can compute."""
        return lambda pair: int.from_bytes(keyed(self._key, f"seed of {label}, pair {pair}")[:4], "big")


def _identity(champion: int, changed: Recipe) -> str:
    tree = changed.model_dump(mode="json", exclude={"name", "run_dir", "sweep", "seed"})
    return hashlib.sha256(json.dumps([champion, tree], sort_keys=True).encode()).hexdigest()
