"""The entries of the league and its size classes, read from a file of results that may come from someone else."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gptworks.errors import UserError
from gptworks.files import read_regular
from gptworks.json_files import MAX_JSON_BYTES, mapping_of

SIZES = {"1M": 1_000_000, "3M": 3_000_000, "10M": 10_000_000}
"""Maximum number of parameters in each class, as `gptworks plan` counts them: with embeddings, other tables and all
experts; a tied head counts once."""

Minutes = Literal[5, 60]
NAME = r"^[a-z0-9][a-z0-9-]{0,39}$"
Name = Annotated[str, Field(pattern=NAME)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,:()@+_/-]{0,99}$")]
"""Text that needs no quoting in Markdown."""
Count = Annotated[int, Field(ge=1, lt=2**53)]
Figure = Annotated[float, Field(gt=0, lt=1e9)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """A contender's run: its score, its time, and all that a replay needs."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    contender: Name
    minutes: Minutes
    """The time allowed."""
    seed: int = Field(ge=0, lt=2**32)
    parameters: Count
    steps: Count
    tokens: Count
    loss: Figure
    """Nats per token of the held-out text."""
    bits_per_byte: Figure
    seconds: Figure
    """Time of all steps."""
    data: Sha256
    """Fingerprint of the token files."""
    held_out: Sha256
    """Fingerprint of the held-out text."""
    processor: Label
    precision: Label
    torch: Label
    gptworks: Label
    commit: str = Field(pattern=r"^[0-9a-f]{7,40}$")
    """The commit of the source. A state of the source without a commit could not be trained again."""
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    recipe: dict[str, Any]
    """All settings of model, tokenizer and training."""

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> "Entry":
        size_class(self.contender, self.parameters)
        if self.seconds > 60 * self.minutes:
            raise ValueError(f"the run took {self.seconds:g} s of {60 * self.minutes} s, so it is no entry")
        return self

    @property
    def size(self) -> str:
        return size_class(self.contender, self.parameters)


def size_class(name: str, parameters: int) -> str:
    """Return the smallest class that holds a model.

    Raises:
        UserError: no class holds it.
    """
    for size, most in SIZES.items():
        if parameters <= most:
            return size
    raise UserError(
        f"{name} has {parameters:,} parameters, and the largest class of the league holds {max(SIZES.values()):,}, "
        f"embeddings and all experts included: make the model smaller."
    )


def read_entries(file: Path) -> list[Entry]:
    """Read the entries, a line each, oldest first; none if the file does not exist.

    Raises:
        UserError: a line is no entry, or the file is no regular file of the allowed size.
    """
    try:
        lines = read_regular(file, MAX_JSON_BYTES).splitlines()
    except FileNotFoundError:
        return []
    return [_entry(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _entry(line: bytes, place: str) -> Entry:
    try:
        return Entry.model_validate(mapping_of(line))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        problem = f"`{key[:40]}`={first['input']!r:.80}: {first['msg']}" if key else first["msg"]
    except (UserError, ValueError) as error:
        problem = str(error)
    raise UserError(f"{place} is no entry of the league: {problem}. Correct the line, or remove it.")
