"""Draft a recipe for a folder as `gptworks init` does, in a process that reports its findings.

python -m gptworks.studio.drafting FOLDER MINUTES NAME prints a line of JSON for each finding.
"""

import json
import os
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from gptworks.data.sources.report import Kind, reasons
from gptworks.draft.pretraining import Draft, Search
from gptworks.draft.texts import Texts, look_at
from gptworks.errors import RunError, UserError, shortened
from gptworks.files.fetch import REACH

MOST_KINDS, MOST_REASONS, N_PASSAGES = 200, 8, 6
"""An answer has at most MOST_KINDS kinds of files, MOST_REASONS notes and MOST_REASONS reasons for each kind, and
N_PASSAGES passages."""
MOST_LEFT_OUT, MOST_WORDS = 1_000, 300
"""Maximum number of left-out files in an answer, and maximum length of the line about each of these files."""
MOST_TEXT = 100_000
"""Maximum number of characters in a recipe's text."""
_PAUSE_SECONDS = 0.2
"""Minimum seconds between two reports of progress."""

Tree = dict[str, Any]


@dataclass
class Drafting:
    """A process that drafts a recipe, with its findings so far."""

    folder: str
    minutes: float
    name: str
    process: "Popen[str]"
    found: Tree = field(default_factory=dict)
    asked: bool = False
    """Whether the process was asked to stop."""

    def __post_init__(self) -> None:
        weakref.finalize(self, self.process.kill)  # at exit too, since nobody can read the draft then
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_working(self) -> bool:
        return self._reader.is_alive()

    def describe(self) -> Tree:
        """Return the request's values, the state (working, ready, failed or cancelled) and the findings."""
        state = "working" if self.is_working else "cancelled" if self.asked else "failed"
        if "draft" in self.found:
            state = "ready"
        about = {"folder": self.folder, "minutes": self.minutes, "name": self.name, "state": state}
        return {"progress": None, "step": None, "texts": None, "draft": None, "problem": None, **self.found, **about}

    def cancel(self) -> None:
        self.asked = True
        self.process.kill()
        self._reader.join(5)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # otherwise the process was killed while it wrote the line
                    self.found |= json.loads(line)
        code = self.process.wait()
        if code and not self.asked:
            self.found |= {
                "problem": f"the process that read the folder ended with exit code {code}, perhaps for lack of "
                "memory: `gptworks init` with this folder, in a terminal, shows more."
            }


class Drafts:
    """Drafts one recipe at a time. Thread-safe."""

    def __init__(self) -> None:
        self.last: Drafting | None = None
        """The newest draft; None before the first."""
        self._lock = threading.Lock()

    def begin(self, folder: str, minutes: float, name: str) -> Drafting:
        """Start a process that drafts a recipe for a folder.

        Raises:
            UserError: another draft is being made.
        """
        with self._lock:
            if self.last is not None and self.last.is_working:
                raise UserError(f"{self.last.folder} is being looked at: wait until that ends, or cancel it.")
            process = Popen(
                [sys.executable, "-m", "gptworks.studio.drafting", folder, repr(minutes), name], stdin=DEVNULL,
                stdout=PIPE, stderr=DEVNULL, encoding="utf-8", start_new_session=True,
                env=os.environ | {REACH: "guarded"},
            )  # fmt: skip
            self.last = Drafting(folder, minutes, name, process)
            return self.last

    def cancel(self) -> None:
        """End the process of the newest draft, if it runs."""
        with self._lock:
            if self.last is not None and self.last.is_working:
                self.last.cancel()


# ----------------------------------------------------------------------------------------------------- in the process


def main() -> None:
    """Look at the folder, draft the recipe, and print each finding."""
    folder, minutes, name = sys.argv[1:]
    out, sys.stdout = sys.stdout, sys.stderr  # keep output of libraries out of the lines of JSON
    reported = 0.0

    def send(**found: Any) -> None:
        out.write(json.dumps(found) + "\n")
        out.flush()

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > _PAUSE_SECONDS:
            reported = time.monotonic()
            send(progress=[done, total])

    try:
        texts = look_at(Path(folder), progress)
        send(texts=_texts(texts))
        draft = Search(texts, float(minutes), Path(f"{name}.yaml"), lambda words: send(step=words)).run()
        send(draft=_draft(draft))
    except (UserError, RunError) as error:
        send(problem=str(error))


def _texts(texts: Texts) -> Tree:
    """Return, for JSON, counts, the kinds of files, a line for each file left out in whole or in part, and passages."""
    kinds, left_out = texts.table(), reasons(texts.items)
    return {
        "n_read": texts.read.total(), "n_files": texts.n_files, "n_bytes": texts.n_bytes,
        "kinds": [_kind(kind) for kind in kinds[:MOST_KINDS]], "n_kinds": len(kinds),
        "left_out": [shortened(line, MOST_WORDS) for line in left_out[:MOST_LEFT_OUT]], "n_left_out": len(left_out),
        "passages": [asdict(one) for one in texts.passages(N_PASSAGES)],
    }  # fmt: skip


def _kind(kind: Kind) -> Tree:
    notes, reasons = kind.notes[:MOST_REASONS], kind.reasons[:MOST_REASONS]
    n_more = len(kind.notes) + len(kind.reasons) - len(notes) - len(reasons)
    return asdict(kind) | {"notes": notes, "reasons": reasons, "n_more": n_more}


def _draft(draft: Draft) -> Tree:
    """Return the recipe's text and the costs of its run, as JSON."""
    plan, text = draft.plan, draft.text()
    if len(text) > MOST_TEXT:  # leave the table of files out of the comments
        text = draft.file(draft.lines())
    disk_bytes = None
    if plan.checkpoints_bytes is not None and plan.shards_bytes is not None:
        disk_bytes = plan.checkpoints_bytes + plan.shards_bytes
    return {
        "text": text, "parameters": plan.parameters.total, "weights_bytes": plan.weights_bytes, "tokens": plan.tokens,
        "epochs": draft.epochs, "n_train_tokens": draft.n_train_tokens, "minutes": draft.minutes, "rate": draft.rate,
        "memory_bytes": plan.peak.total_bytes, "free_bytes": plan.device.memory_bytes, "disk_bytes": disk_bytes,
        "device": plan.device.name,
    }  # fmt: skip


if __name__ == "__main__":
    main()
