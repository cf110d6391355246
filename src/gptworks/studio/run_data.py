"""The data of the studio's runs, opened once and kept open."""

from collections import OrderedDict
from pathlib import Path

from gptworks.data.shards import MANIFEST_FILE
from gptworks.errors import UserError
from gptworks.runs.data import RunData, data_of_run
from gptworks.studio.loaded import Wanted

MOST_OPEN = 4
"""Most runs whose data is kept open."""


class OpenData:
    """The data of the runs that were used last. For one thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[object, ...], tuple[RunData, int | None]] = OrderedDict()

    def of(self, wanted: Wanted) -> RunData:
        """The data of a run.

        Raises:
            UserError: the data is missing, or belongs to another run.
        """
        folder = wanted.run.folder
        try:
            trained_on = str(wanted.checkpoint.state().get("data_fingerprint") or "")
        except OSError:
            raise UserError(f"{wanted.name} was deleted just now: choose another checkpoint.") from None
        recipe_changed = (folder / "recipe.yaml").stat().st_mtime_ns
        key = (folder, trained_on, recipe_changed)
        if key not in self._open or _changed(self._open[key][0].prepared.folder) != self._open[key][1]:
            opened = data_of_run(wanted.run.id, folder, trained_on)
            self._open[key] = opened, _changed(opened.prepared.folder)
        self._open.move_to_end(key)
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        return self._open[key][0]


def _changed(folder: Path) -> int | None:
    """When a folder's manifest was written; None: it was deleted."""
    try:
        return (folder / MANIFEST_FILE).stat().st_mtime_ns
    except OSError:
        return None
