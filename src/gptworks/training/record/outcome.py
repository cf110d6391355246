"""`outcome.json`: records how a run last ended, for programs and for the report."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gptworks.errors import UserError
from gptworks.files import read_regular

FILE = "outcome.json"
_MOST_BYTES = 1 << 20


class RunOutcome(BaseModel):
    """The contents of `outcome.json`: how a run ended."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: str
    """Why the run ended, such as "finished" or "stopped by SIGTERM"."""
    step: int = Field(ge=0)
    tokens: int = Field(ge=0)
    """Number of tokens that the model has read in training, including padding."""
    seconds: float = Field(ge=0, lt=2**63)
    """Training time over all sessions."""
    skipped_steps: int = Field(ge=0)
    best_step: int = Field(ge=0)
    best_validation_loss: float | None
    """Lowest validation loss; None if no evaluation had a finite loss."""
    predicted_memory_bytes: int | None = None
    """Planned peak memory of tensors. For this field and the next two, see `card.MemoryPeaks`."""
    measured_memory_bytes: int | None = None
    grown_memory_bytes: int | None = None
    training: dict[str, str]
    """The rows of the model card's table on training: text by label."""


def read_outcome(run_dir: Path) -> RunOutcome | str:
    """Return the outcome of the run in a folder or, if the outcome is unknown, the reason as text."""
    path = run_dir / FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            return f"{FILE} is larger than {_MOST_BYTES:,} bytes: it is not the outcome of a run."
        return RunOutcome.model_validate_json(read_regular(path, _MOST_BYTES, inside=run_dir))
    except FileNotFoundError:
        return f"The run folder has no {FILE}: the run has not ended yet, or an older version of gptworks trained it."
    except (OSError, UserError, ValidationError):
        return f"{FILE} is damaged."
