"""`outcome.json`: how a run last ended, for programs and for the report."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gptworks.errors import UserError
from gptworks.files import read_regular

FILE = "outcome.json"
_MOST_BYTES = 1 << 20


class RunOutcome(BaseModel):
    """The end of a run, as `outcome.json` records it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: str
    """Reason for the end: "finished", "stopped by SIGTERM", …"""
    step: int = Field(ge=0)
    tokens: int = Field(ge=0)
    """Tokens read in training, as `Progress.tokens`."""
    seconds: float = Field(ge=0, lt=2**63)
    """Training time of all sessions."""
    skipped_steps: int = Field(ge=0)
    best_step: int = Field(ge=0)
    best_validation_loss: float | None
    """Lowest validation loss; null: no evaluation had a finite loss."""
    predicted_memory_bytes: int | None
    measured_memory_bytes: int | None
    """Measured peak of tensors, for comparison with the prediction."""
    grown_memory_bytes: int | None = None
    """Growth of resident memory on a CPU: tensors, code, files, and freed memory that the allocator keeps."""
    training: dict[str, str]
    """The model card's section on training: facts by name."""


def read_outcome(run_dir: Path) -> RunOutcome | str:
    """The last outcome of the run in a folder, or the reason why it is unknown."""
    path = run_dir / FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            return f"{FILE} is larger than {_MOST_BYTES:,} bytes: it is not the outcome of a run."
        return RunOutcome.model_validate_json(read_regular(path, _MOST_BYTES, inside=run_dir))
    except FileNotFoundError:
        return f"The run folder has no {FILE}: the run has not ended yet, or an older version of gptworks trained it."
    except (OSError, UserError, ValidationError):
        return f"{FILE} is damaged."
