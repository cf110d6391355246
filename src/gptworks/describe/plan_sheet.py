"""A plan that a terminal prints as text and a notebook shows as tables."""

from dataclasses import dataclass

from gptworks.describe.plan_tables import printed, tables
from gptworks.pages import parts as html
from gptworks.pages.cell import cell
from gptworks.planning.budget import Affordable
from gptworks.planning.run import Plan
from gptworks.terminal import lines_of


@dataclass(frozen=True, repr=False)
class PlanSheet(Plan):
    """A plan that a terminal prints as text and a notebook shows as tables."""

    details: bool = False
    """Whether to also show more figures, the FLOPs by part, other precisions and layouts, and the memory of
    inference."""
    affordable: Affordable | None = None
    """The training that a given time or budget suffices for; None if neither was given."""

    def __repr__(self) -> str:
        lines = lines_of(printed(self, self.details, self.affordable))
        return "\n".join([*lines, self.data.missing or ""]).strip("\n")

    def _repr_html_(self) -> str:
        shown = [
            html.table(one.header, one.align, one.rows)
            for one in tables(self, self.details, affordable=self.affordable)
        ]
        return cell(*shown, *([html.paragraph(self.data.missing)] if self.data.missing else []))
