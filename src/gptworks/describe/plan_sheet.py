"""A plan that shows itself: as text, and as tables in a notebook."""

from dataclasses import dataclass

from rich.console import Console

from gptworks.describe.plan_tables import printed, tables
from gptworks.planning.run import Plan


@dataclass(frozen=True, repr=False)
class PlanSheet(Plan):
    """A plan that shows itself: as text, and as tables in a notebook."""

    details: bool = False
    """Whether it shows FLOPs by part, other precisions and layouts, and inference too."""
    missing: str | None = None
    """Which source of the data is not there, and what to do: what depends on its tokens is unknown."""

    def __repr__(self) -> str:
        console = Console(width=100, color_system=None, force_jupyter=False)
        with console.capture() as shown:
            console.print(printed(self, self.details))
        lines = [line.rstrip() for line in shown.get().splitlines()]
        return "\n".join([*lines, *([self.missing] if self.missing else [])]).strip("\n")

    def _repr_html_(self) -> str:
        from gptworks.pages.cell import cell
        from gptworks.pages.parts import paragraph, table

        shown = [table(one.header, one.align, one.rows) for one in tables(self, self.details)]
        return cell(*shown, *([paragraph(self.missing)] if self.missing else []))
