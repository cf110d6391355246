"""Measure a run, and what a notebook shows of the figures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console

from gptworks.choices import LoadedWeights, PrecisionName
from gptworks.config import Recipe
from gptworks.data.opened import Prepared
from gptworks.data.prepare import prepare as prepare_data
from gptworks.errors import UserError, refuse_unused
from gptworks.evaluation.results import Evaluation, save_evaluations, table
from gptworks.evaluation.task import load_task
from gptworks.files import read_text
from gptworks.pages.cell import cell
from gptworks.pages.parts import paragraph
from gptworks.pages.parts import table as html_table
from gptworks.pages.tables import Table
from gptworks.units import significant

Row = tuple[str, str]


@dataclass(frozen=True, repr=False)
class Measurements:
    """What was measured: the validation split, or texts, tasks and the like."""

    validation: dict[str, Any] | None
    """Loss, perplexity and bits per byte of the validation split, where nothing else was asked for."""
    evaluations: tuple[Evaluation, ...] = ()
    without_bits: str = ""
    """Why the validation split has no bits per byte."""
    rounded_to: str | None = None
    """How the weights were rounded as they were loaded; None: those of the validation split are the run's own."""

    def to_json(self) -> Any:
        """Stable keys; of several evaluations a list."""
        return self.validation if self.validation is not None else [one.summary() for one in self.evaluations]

    @property
    def table(self) -> Table | None:
        """A row for each figure of the evaluations."""
        return table(self.evaluations) if self.evaluations else None

    @cached_property
    def lines(self) -> list[str]:
        """The figures of the validation split, and the parts of others, as lines of text."""
        return [f"{name:<15}  {value}" for name, value in self._rows()]

    @property
    def notes(self) -> list[str]:
        """What is to be known of the evaluations."""
        return [f"{one.name}: {note}." for one in self.evaluations for note in one.notes]

    def __repr__(self) -> str:
        console = Console(width=100, color_system=None, force_jupyter=False)
        with console.capture() as shown:
            if self.table is not None:
                console.print(self.table.rich())
        lines = [line.rstrip() for line in shown.get().splitlines()]
        return "\n".join([*lines, *self.lines, *self.notes]).strip("\n")

    def _repr_html_(self) -> str:
        own, rows = self.table, list(self._rows())
        return cell(
            *([] if own is None else [html_table(own.header, own.align, own.rows)]),
            *([html_table(("", ""), "ll", rows)] if rows else []),
            *(paragraph(note, "note") for note in self.notes),
        )

    def _rows(self) -> Iterator[Row]:
        if (found := self.validation) is not None:
            yield (
                "validation loss",
                f"{found['loss']:.4f} nats per token, {found['tokens']:,} tokens, step {found['step']:,}",
            )
            if self.rounded_to is not None:
                yield "weights", f"rounded to {self.rounded_to} as they were loaded; the run's own are in fp32"
            yield "perplexity", significant(found["perplexity"])
            bits, n_bytes = found["bits_per_byte"], found["text_bytes"]
            undefined = f"undefined: {self.without_bits}"
            yield "bits per byte", undefined if bits is None else f"{bits:.4f} over {n_bytes:,} bytes"
            for part in found.get("datasets", []):
                if part["loss"] is not None:
                    bits = part["bits_per_byte"]
                    note = "" if bits is None else f"  {bits:.4f} bits per byte"
                    yield f"of {part['name']}", f"{part['loss']:.4f} nats per token{note}"
            yield from _positions(found.get("positions", []))
            for name, value in found.get("compressors", {}).items():
                yield name.replace("_", " -"), f"{value:.4f}"
        for one in self.evaluations:
            yield from _positions(one.details.get("positions", []))
            for part in one.details.get("bins", []):
                if part["n_tokens"]:
                    yield (
                        f"given {part['low']:.2f} to {part['high']:.2f}",
                        f"{part['n_tokens']:>11,} tokens, mean {part['confidence']:.3f}, right {part['accuracy']:.3f}",
                    )


def _positions(positions: list[dict[str, Any]]) -> Iterator[Row]:
    for part in positions:
        bits = part["bits_per_byte"]
        note = "" if bits is None else f"  {bits:.4f} bits per byte"
        yield f"tokens {part['first']:>6,} to {part['last']:>6,}", f"{part['loss']:.4f} nats per token{note}"


Files = str | PathLike[str] | Sequence[str | PathLike[str]]


def evaluate(
    run: str | PathLike[str],
    *overrides: str,
    checkpoint: str = "best",
    text: Files = (),
    task: Files = (),
    shots: Sequence[int] = (),
    limit: int | None = None,
    chat: bool = False,
    run_generated_code: bool = False,
    harness: Sequence[str] = (),
    calibration: bool = False,
    memorization: bool = False,
    stride: int | None = None,
    by_position: bool = False,
    compressors: bool = False,
    precision: PrecisionName | None = None,
    weights: LoadedWeights = "auto",
    device: str = "auto",
    save: bool = True,
    report: Callable[[str], None] = print,
    prepare: Callable[[Recipe], Prepared] = prepare_data,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measurements:
    """Measure a run: `gptworks.evaluate("runs/demo", text="book.txt")`; by default on its whole validation split.

    Args:
        run: a run folder, or what `gptworks.train` returned.
        overrides: settings that win over the run's, such as `"model.context_length=1024"`.
        checkpoint: best, last, or a step.
        text: files of which it is measured how well the model predicts them.
        task: files of tasks whose items it is asked.
        shots: with a task: solved items shown before each.
        limit: with a task or the harness: ask only so many items.
        chat: with a task: ask by the run's chat template.
        run_generated_code: let tasks run programs that the model wrote; see gptworks/confined/sandbox.py.
        harness: tasks of lm-evaluation-harness.
        calibration: whether its probabilities are as often right as they say.
        memorization: how much of what it writes is copied from the training text.
        stride: tokens between windows; None: the context.
        by_position: also in each eighth of the context.
        compressors: also gzip and xz on the same text.
        precision: of matrix products; None: the run's own.
        weights: how the weights are kept that are measured; see `gptworks.load`. Figures of weights that are rounded
            as they are loaded are kept under a name of their own, such as text-book-int8.
        save: keep what texts, tasks and the like give, in the run folder and its card.
        report: called with each fallback, as text.
        prepare: makes, or finds, the run's own text as shards.
        progress: called with the items or tokens done, and all.

    Raises:
        UserError: no such run, checkpoint, text or task; or an option that would do nothing.
    """
    paths, tasks_given = _listed(text), _listed(task)
    others = bool(paths or tasks_given or harness or calibration or memorization)
    if others:
        only = "is for the validation split: it does nothing with --text, --task or another measurement"
        refuse_unused(only, by_position=by_position, compressors=compressors)
        if not paths:
            refuse_unused("is for text: give --text FILE, or", stride=stride)
        if not (paths or calibration or memorization):
            refuse_unused("does nothing with tasks, which are computed as texts are generated", precision=precision)
    tasks = [load_task(path, shots=n, limit=limit) for path in tasks_given for n in shots or (None,)]
    texts = {path: _read_text(path) for path in paths}
    if tasks and all(each.settings.type != "code" for each in tasks):
        refuse_unused("is for tasks of the type code", run_generated_code=run_generated_code)
    if not tasks:
        refuse_unused("is for tasks: give --task FILE, or", shots=shots or None, run_generated_code=run_generated_code)
        if not harness:
            refuse_unused("is for tasks: give --task FILE or --harness TASK, or", chat=chat, limit=limit)
    if not others:
        refuse_unused("does nothing: what is measured on the validation split is not saved", no_save=not save)
    if harness:
        from gptworks.interop.lm_eval import run_harness
    from gptworks.evaluation.run import EvaluatedRun  # with torch: what is refused is refused before

    one = EvaluatedRun(
        run, checkpoint, overrides=overrides, device=device, precision=precision, weights=weights, report=report,
        prepare=prepare, progress=progress,
    )  # fmt: skip
    if not others:
        validation = one.validation(stride, by_position, compressors)
        why = "this tokenizer does not keep the whole text"
        if one.prepared.manifest.holds_examples:
            why = "the text is conversations, of which not every byte is predicted"
        return Measurements(validation, without_bits=why, rounded_to=one.rounded_to)
    found = [one.text(path, contents, stride) for path, contents in texts.items()]
    found += [one.task(each, chat=chat, run_programs=run_generated_code) for each in tasks]
    if harness:
        found += run_harness(one.engine, harness, run=one.name, step=one.step, limit=limit, chat=chat)
    found += [one.calibration()] if calibration else []
    found += [one.memorization()] if memorization else []
    found = [one.of_these_weights(each) for each in found]
    if save:
        save_evaluations(Path(run), found)
    return Measurements(None, tuple(found))


def _listed(files: Files) -> list[Path]:
    return [Path(files)] if isinstance(files, str | PathLike) else [Path(one) for one in files]


_MOST_TEXT_BYTES = 1 << 32


def _read_text(path: Path) -> str:
    try:
        return read_text(path, _MOST_TEXT_BYTES)
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}. Give a text file.") from None
