"""A run that prints its figures, and shows its curves and samples in a notebook."""

from gptworks.pages import parts as html
from gptworks.pages.page import Figure, cell
from gptworks.runs.history import History
from gptworks.runs.report import key_figures_of
from gptworks.training.record.curves import curves_picture
from gptworks.training.record.display import clock
from gptworks.training.record.metrics import Record
from gptworks.training.record.outcome import read_outcome


class TrainedRun(History):
    """A run read from its folder. A notebook displays its figures, curves and samples.

    Functions that take a run folder also take this object, such as `gptworks.load(run)`, `gptworks.evaluate(run)` and
    `gptworks.train(run, resume=True)`.
    """

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def samples(self) -> list[Record]:
        """Texts that the model wrote during training: records with `step`, `prompt` and `text`."""
        return self.kind("sample")

    @property
    def ended(self) -> str:
        """Text that says how and at which step training last ended, or why this is unknown."""
        outcome = read_outcome(self.folder)
        if isinstance(outcome, str):
            return outcome
        return f"{outcome.reason} at step {outcome.step:,} after {clock(outcome.seconds)}, {outcome.tokens:,} tokens"

    def curves(self) -> Figure:
        """Return a figure of the loss and the learning rate by tokens."""
        return Figure(curves_picture(self.train, self.validation, self.name), f"Curves of {self.name}")

    def __repr__(self) -> str:
        best = self.best
        loss = "" if best is None else (
            f"\nbest validation loss {best['loss']:.4f} {self.loss_unit} at step {best['step']:,}"
        )  # fmt: skip
        return f"{self.folder}: {self.parameters:,} parameters\n{self.ended}{loss}"

    def _repr_html_(self) -> str:
        last = max((record["step"] for record in self.samples), default=0)
        texts = [(html.number(r["step"]), r["prompt"], r["text"]) for r in self.samples if r["step"] == last]
        return cell(
            html.paragraph(f"{self.folder}: {self.ended}"),
            key_figures_of(self),
            self.curves().markup(),
            *([html.samples(texts)] if texts else []),
        )
