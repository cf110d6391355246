"""`gptworks sweep`: train a recipe with settings that Optuna chooses, each trial as an ordinary run in its own process.

A sweep's folder holds `sweep.yaml` (the recipe), `trials/000.yaml` (the recipe of a trial), `trials/000.log` (its
output), `trials/000/` (its run folder), `journal.log` (Optuna's), `sweep.html` and `best.yaml`. Trial n depends only
on the seed, on n and on the trials before it, so a sweep that was killed continues as if it had never stopped.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.config import Recipe, SweepConfig, SweepRange
from gptworks.errors import RunError, UserError, not_installed
from gptworks.files import check_links, check_regular, url_of
from gptworks.overrides import as_typed
from gptworks.recipe import load_recipe, save_recipe
from gptworks.runs.comparable import check_same
from gptworks.runs.trials import Report, check_comparable, evaluations, last_line, open_folder, train_trial
from gptworks.training.record.metrics import read_metrics

if TYPE_CHECKING:
    import optuna

MOST_FAILURES = 3
"""Number of failures in a row after which the sweep ends, since the settings are then unlikely to be the cause."""


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial; for a running trial, the result so far."""

    number: int
    state: str
    """`complete`, `pruned`, `failed` or `running`."""
    values: dict[str, Any]
    """The settings that the trial tests, by path."""
    loss: float | None
    """The lowest validation loss so far; None before the first evaluation."""
    folder: Path
    reason: str = ""
    """The reason why the trial was pruned or failed; else empty."""


@dataclass(frozen=True)
class Sweep:
    """A sweep's recipe and the results of its trials, in the order of their numbers."""

    recipe: Recipe
    trials: tuple[TrialResult, ...]

    @property
    def settings(self) -> SweepConfig:
        assert self.recipe.sweep is not None
        return self.recipe.sweep

    @property
    def loss_unit(self) -> str:
        return self.recipe.objective.loss_unit

    @property
    def best(self) -> TrialResult | None:
        """The complete trial with the lowest loss; None if no trial is complete."""
        complete = [trial for trial in self.trials if trial.state == "complete" and trial.loss is not None]
        return min(complete, key=lambda trial: trial.loss or 0.0, default=None)

    def count(self, state: str) -> int:
        return sum(trial.state == state for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.recipe.run_dir),
            "best": None if self.best is None else self.best.number,
            "trials": [{**vars(trial), "folder": str(trial.folder)} for trial in self.trials],
        }


def load_sweep(path: str | Path, overrides: Sequence[str] = (), resume: bool = False) -> Recipe:
    """Load the recipe of a sweep, and check its ranges and its folder. Raise a UserError if the recipe has no `sweep`
    section or rejects a value of a range, Optuna is missing, or the folder cannot be used: it holds other files, or a
    sweep that is not resumed or has another recipe."""
    recipe = load_recipe(path, overrides)
    if recipe.sweep is None:
        raise UserError(f"{path} has no `sweep` section: name there what to try, as in docs/topics/evaluating.md.")
    if find_spec("optuna") is None:
        raise not_installed("optuna", "sweep", "a sweep")
    for key, values in recipe.sweep.ranges.items():
        check_comparable(recipe, key, f"sweep.ranges.{key}")
        for value in _probes(values):
            try:
                load_recipe(path, [*overrides, f"{key}={as_typed(value)}"])
            except UserError as error:
                raise UserError(f"sweep.ranges.{key} reaches {value}, which the recipe refuses: {error}") from None
    _check_folder(recipe, resume)
    return recipe


def _probes(values: SweepRange) -> Sequence[Any]:
    """Return the values of a range to check: all choices, the ends of a range of whole numbers, or the ends of another
    range and a value between."""
    if values.choices is not None:
        return values.choices
    assert values.low is not None and values.high is not None
    between = values.low + (values.step or 0.37 * (values.high - values.low))
    return (values.low, values.high) if values.whole else (values.low, between, values.high)


def _check_folder(recipe: Recipe, resume: bool) -> None:
    folder = recipe.run_dir
    if (url := url_of(folder)) is not None:
        raise UserError(f"run_dir={url}: a sweep needs a folder on this machine; give another run_dir=.")
    if (folder / "recipe.yaml").exists():
        raise UserError(f"{folder} holds a run, and a sweep needs a folder of its own: give another run_dir=.")
    if (folder / "sweep.yaml").exists():
        if not resume:
            raise UserError(
                f"{folder} already holds a sweep: add --resume to continue it, give another run_dir=, or delete it."
            )
        advice = "Resume with the same settings, or start again with another run_dir=."
        may_differ = {"run_dir": True, "sweep": {"n_trials"}}
        check_same(folder, load_recipe(folder / "sweep.yaml"), recipe, advice, exclude=may_differ)
    elif folder.exists() and (not folder.is_dir() or any(path.name != ".lock" for path in folder.iterdir())):
        raise UserError(f"run_dir={folder} exists and holds no sweep: give another run_dir=.")


def run_sweep(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    report: Report = lambda _: None,
    after_trial: Callable[[Sweep], None] = lambda _: None,
) -> Sweep:
    """Run trials until `n_trials` have ended or a signal requests a stop. Report each trial in a line and return the
    sweep.

    `after_trial` is called with the sweep after each trial, for example to write its page.

    Raises:
        UserError: see `load_sweep`; or another process uses the folder.
        RunError: several trials in a row failed.
    """
    recipe = load_sweep(path, overrides, resume)
    folder = recipe.run_dir
    check_links(folder / "trials")
    with open_folder(folder, "sweep", "run_dir=") as stop_asked:
        (folder / "trials").mkdir(exist_ok=True)
        save_recipe(recipe, folder / "sweep.yaml")
        _Sweeper(recipe, path, overrides, stop_asked, report, after_trial).run()
    return read_sweep(folder)


def read_sweep(folder: Path) -> Sweep:
    """Read the sweep in a folder, even while it runs."""
    recipe = load_recipe(folder / "sweep.yaml").model_copy(update={"run_dir": folder})
    states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    trials = []
    for trial in _study(recipe).get_trials(deepcopy=False):
        loss = min(trial.intermediate_values.values(), default=None)
        state, reason = states.get(trial.state.name, "running"), trial.user_attrs.get("reason", "")
        place = _place(folder, trial.number)
        trials.append(TrialResult(trial.number, state, dict(trial.params), loss, place, reason))
    return Sweep(recipe, tuple(trials))


def _place(folder: Path, number: int) -> Path:
    """Return the run folder of a trial. The trial's recipe and log have this path plus `.yaml` and `.log`."""
    return folder / "trials" / f"{number:03d}"


_MOST_JOURNAL_BYTES = 1 << 28


def _study(recipe: Recipe) -> "optuna.Study":
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    assert recipe.sweep is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if recipe.sweep.pruner == "median":
        pruner = optuna.pruners.MedianPruner(n_startup_trials=recipe.sweep.startup_trials)
    journal = recipe.run_dir / "journal.log"
    with contextlib.suppress(FileNotFoundError):
        check_regular(journal, _MOST_JOURNAL_BYTES, inside=recipe.run_dir)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    return optuna.create_study(storage=storage, study_name="sweep", pruner=pruner, load_if_exists=True)


@dataclass
class _Sweeper:
    recipe: Recipe
    path: str | Path
    overrides: Sequence[str]
    stop_asked: Callable[[], Any]
    report: Report
    after_trial: Callable[[Sweep], None]
    failures: int = 0
    """Number of consecutive trials that failed for other reasons than a diverging loss."""

    def __post_init__(self) -> None:
        assert self.recipe.sweep is not None
        self.settings, self.folder, self.study = self.recipe.sweep, self.recipe.run_dir, _study(self.recipe)

    def run(self) -> None:
        from optuna.trial import TrialState

        ended = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        while not self.stop_asked() and len(self.study.get_trials(False, ended)) < self.settings.n_trials:
            trial = self._next_trial()
            self._run_trial(trial)
            sweep = read_sweep(self.folder)
            self._describe(sweep, trial.number)
            if self.failures >= MOST_FAILURES:
                raise RunError(
                    f"{self.failures} trials in a row failed, the last because {sweep.trials[trial.number].reason}. "
                    f"Its log is {_place(self.folder, trial.number).with_suffix('.log')}."
                )

    def _next_trial(self) -> "optuna.Trial":
        """Return the trial that an earlier session left unfinished, or a new trial. Set the sampler, seeded with the
        trial's number."""
        import numpy as np
        from optuna.samplers import TPESampler
        from optuna.trial import Trial, TrialState

        left = self.study.get_trials(False, (TrialState.RUNNING,))
        number = left[0].number if left else len(self.study.get_trials(False))
        seed = int(np.random.SeedSequence((self.settings.seed, number)).generate_state(1)[0])
        self.study.sampler = TPESampler(seed=seed, n_startup_trials=self.settings.startup_trials)
        return Trial(self.study, left[0]._trial_id) if left else self.study.ask()

    def _run_trial(self, trial: "optuna.Trial") -> None:
        """Train with the settings of a trial, and report the result to Optuna unless a stop was requested."""
        from optuna.trial import TrialState

        values = {key: _suggest(trial, key, values) for key, values in self.settings.ranges.items()}
        place = _place(self.folder, trial.number)
        try:
            tried = [f"{key}={as_typed(value)}" for key, value in values.items()]
            recipe = load_recipe(self.path, [*self.overrides, *tried])
        except UserError as error:  # each value is allowed, but not this combination
            trial.set_user_attr("reason", str(error))
            self.study.tell(trial, state=TrialState.FAIL)
            return
        save_recipe(recipe.model_copy(update={"run_dir": place, "sweep": None}), place.with_suffix(".yaml"))
        ended = self._train(trial, place)
        if ended is None:
            return
        losses = [record["loss"] for record in evaluations(place)]
        diverged = (list(read_metrics(place / "metrics.jsonl")) or [{"kind": ""}])[-1]["kind"] == "skipped"
        self.failures = self.failures + 1 if ended == "failed" and not diverged else 0
        if ended == "pruned" or (ended == "failed" and diverged):
            trial.set_user_attr("reason", "above the median" if ended == "pruned" else "it diverged")
            self.study.tell(trial, state=TrialState.PRUNED)
        elif ended == "failed" or not losses:
            trial.set_user_attr("reason", last_line(place))
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, min(losses))

    def _train(self, trial: "optuna.Trial", place: Path) -> str | None:
        """Train a trial. Return `done`, `pruned` or `failed`; or None if a stop was requested."""
        reported = set(trial.storage.get_trial(trial._trial_id).intermediate_values)

        def report_evaluations() -> str | None:
            for record in evaluations(place):
                if record["step"] not in reported:
                    reported.add(record["step"])
                    trial.report(record["loss"], record["step"])
                    if trial.should_prune():  # decides by this evaluation, even if later evaluations exist
                        return "pruned"
            return None

        return train_trial(place, self.stop_asked, self.report, report_evaluations)

    def _describe(self, sweep: Sweep, number: int) -> None:
        """Call `after_trial`, write the recipe of the best trial to `best.yaml`, and report trial `number`."""
        trial, best = sweep.trials[number], sweep.best
        self.after_trial(sweep)
        if best is not None:
            recipe = load_recipe(best.folder.with_suffix(".yaml"))
            save_recipe(recipe.model_copy(update={"run_dir": self.folder / "best"}), self.folder / "best.yaml")
        values = " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                          for key, value in trial.values.items())  # fmt: skip
        loss = "" if trial.loss is None else f" {trial.loss:.4f}"
        mark = " (best)" if trial == best else f": {trial.reason}" if trial.reason else ""
        self.report(f"trial {number:03d}  {values}  {trial.state}{loss}{mark}")


def _suggest(trial: "optuna.Trial", key: str, values: SweepRange) -> Any:
    if values.choices is not None:
        return trial.suggest_categorical(key, values.choices)
    assert values.low is not None and values.high is not None
    if values.whole:
        return trial.suggest_int(key, int(values.low), int(values.high), step=int(values.step or 1), log=values.log)
    return trial.suggest_float(key, values.low, values.high, step=values.step, log=values.log)
