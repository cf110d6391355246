"""Checks a run before it starts: `prepare_run` raises an error, or returns everything that the run needs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

import torch

from gptworks.config import Recipe
from gptworks.data.conversations.inspection import check_records
from gptworks.data.opened import Prepared
from gptworks.data.prepare import prepare as prepare_data
from gptworks.device import (
    BusyCores,
    Precision,
    choose_allocation,
    choose_device,
    choose_precision,
    free_threads,
    this_device,
)
from gptworks.errors import UserError
from gptworks.kernels.library import torch_trains_because
from gptworks.planning.advice import Change, changes_that_fit
from gptworks.planning.arrange import device_setting, layout_of, refusal
from gptworks.planning.fit import Need, layout_words, need
from gptworks.planning.layout import ONE_DEVICE, Layout
from gptworks.recipe import with_vocab_size
from gptworks.tokenizer import vocabulary_size
from gptworks.training.distributed.ranks import ALONE, Ranks
from gptworks.training.objectives.base import objective_of
from gptworks.training.optim.trainable import check_trained
from gptworks.training.record.display import Display
from gptworks.training.record.writers import check_writers
from gptworks.training.run_folder import check_run_folder
from gptworks.training.start import check_start
from gptworks.units import readable


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked and can start."""

    recipe: Recipe
    """The recipe with the vocabulary size of its tokenizer. If a new run of one process starts on a CPU whose cores
    other programs keep busy, the recipe also has a number of threads."""
    prepared: Prepared
    device: torch.device
    precision: Precision
    ranks: Ranks = ALONE
    layout: Layout = ONE_DEVICE
    need: Need | None = None
    """The memory that the run needs; None if not planned."""
    resume: bool = False
    overrides: Sequence[str] = ()
    """The command line's `key.path=value` settings and a chosen number of threads, stored in the run folder for a
    resumed run."""


def prepare_run(
    recipe: Recipe,
    display: Display,
    *,
    resume: bool,
    change: Collection[str],
    force: bool,
    overrides: Sequence[str],
    ranks: Ranks,
    prepare: Callable[[Recipe], Prepared],
) -> PreparedRun:
    """Check a run, prepare its data and complete its recipe. All ranks call it together. Arguments: see `loop.train`.

    Memory is checked before the data is prepared, and again afterwards if the vocabulary's size was unknown.

    Raises:
        UserError: the recipe, its data or the run folder cannot be used, or the run does not fit in memory.
    """
    cores, is_new = BusyCores(), not (recipe.run_dir / "recipe.yaml").exists()
    device = choose_device(recipe.train.device)
    precision = choose_precision(recipe.train.precision, device)

    def fitted(recipe: Recipe) -> tuple[Layout, Need]:
        here = this_device(device, ranks.local_size)
        layout = Layout(**ranks.from_rank_zero(lambda: asdict(layout_of(recipe, ranks.size, here))))
        forced = force or not ranks.is_rank_zero
        return layout, check_memory(recipe, device, precision, forced, layout, ranks.local_size)

    ranks.from_rank_zero(lambda: check_train(recipe, resume, ranks.size, change))
    layout, needed = fitted(recipe)
    if device.type == "cpu" and ranks.is_rank_zero and (why := torch_trains_because()):
        display.message(f"training's C++ is not used: {why} torch computes instead, slower.")
    prepared = ranks.rank_zero_first(lambda: (prepare if ranks.is_rank_zero else prepare_data)(recipe))
    ranks.from_rank_zero(lambda: check_records(recipe, prepared, display.message))
    resolved = with_vocab_size(recipe, vocabulary_size(prepared.tokenizer))
    if resolved.model.vocab_size != recipe.model.vocab_size:
        layout, needed = fitted(resolved)
    if ranks.size > 1:
        display.message(f"{ranks.size} ranks: {layout_words(layout)}")
    peak = needed.peak
    display.message(f"memory: {readable(peak.total_bytes, 'B')} planned at the peak, reached during: {peak.moment}")
    choose_allocation(peak.total_bytes, device, ranks.local_size, gathers=layout.sharding != "none")
    if is_new and ranks.size == 1 and recipe.train.threads is None and (free := free_threads(cores, device)):
        threads, words = free
        display.message(words)
        resolved = resolved.model_copy(update={"train": recipe.train.model_copy(update={"threads": threads})})
        overrides = [*overrides, f"train.threads={threads}"]  # a resumed run is bit-identical only with the same number
    return PreparedRun(resolved, prepared, device, precision, ranks, layout, needed, resume, overrides)


def check_train(recipe: Recipe, resume: bool = False, n_ranks: int = 1, change: Collection[str] = ()) -> None:
    """Raise UserError if the run folder, an input of the run, a logger or the number of ranks cannot be used. Called
    before any work is done; a launcher calls it before it starts processes."""
    for _, check in start_checks(recipe, resume, n_ranks, change):
        check()


def start_checks(
    recipe: Recipe, resume: bool = False, n_ranks: int = 1, change: Collection[str] = ()
) -> list[tuple[str, Callable[[], None]]]:
    """Return the checks of `check_train`, each as (name of the checked item, function that raises UserError)."""
    return [
        ("run folder", lambda: check_run_folder(recipe, resume, change)),
        ("weights to start from", lambda: check_start(recipe, resume)),
        ("trained parameters", lambda: check_trained(recipe)),
        ("inputs of the objective", lambda: objective_of(recipe.objective, recipe.train).check(recipe)),
        ("loggers", lambda: check_writers(recipe.train.loggers)),
        ("division among ranks", lambda: check_parallel(recipe, n_ranks)),
    ]


def check_parallel(recipe: Recipe, n_ranks: int) -> None:
    """Raise UserError, with the reason, if `n_ranks` ranks cannot train the recipe (`gptworks.planning.arrange`)."""
    if (refused := refusal(recipe, n_ranks, recipe.train.precision)) is not None:
        raise UserError(str(refused))


def check_memory(
    recipe: Recipe,
    device: torch.device,
    precision: Precision,
    force: bool = False,
    layout: Layout = ONE_DEVICE,
    n_local_ranks: int = 1,
) -> Need:
    """Return the planned memory of a run, a lower bound while the vocabulary's size is unknown.

    Args:
        n_local_ranks: number of ranks on this machine; if they train on the CPU, they share its memory.

    Raises:
        UserError: device or host memory is too small and `force` is false; the message suggests the first of
            `changes_that_fit`, if any.
    """
    place = this_device(device, n_local_ranks, layout.world_size)
    needed = need(device_setting(recipe, place, layout, precision.name), place)
    if force or needed.fits:
        return needed
    advice = "".join(f" {_advised(change)}." for change in changes_that_fit(recipe, layout.world_size, place)[:1])
    raise UserError(
        f"this run does not fit: {needed.missing}.{advice} `gptworks plan` shows more, and --force starts it anyway."
    )


def _advised(change: Change) -> str:
    """Return, as text, the command-line arguments of a change and the memory that the changed run would need."""
    what = list(change.overrides)
    if change.n_ranks != change.n_ranks_before:
        what += [f"on {change.n_ranks} devices (`gptworks launch --nproc`)"]
    if change.ranks_per_node is not None:
        what += [f"with {change.ranks_per_node} of {change.n_ranks} ranks on each machine (`gptworks launch --nodes`)"]
    host = change.need.host
    and_host = "" if host is None or host.limit_bytes is None else f", and a host {readable(host.total_bytes, 'B')}"
    would = "would hold" if change.fits else "would still hold"
    return f"{' '.join(what)} {would} {readable(change.peak_bytes, 'B')}{and_host}"
