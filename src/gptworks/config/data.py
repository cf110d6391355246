"""Where text and examples come from, and how they are split."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Free, Measured, PositiveInt, Repeat, Section, ShortPath


class PythonStdlibSource(Section):
    """The standard library's own sources of the interpreter that runs, tests left out."""

    type: Measured[Literal["python-stdlib"]]


class FileSource(Section):
    """Local files, or a download."""

    path: Free[str | None] = Field(
        None, description="A file, a folder or a glob. With url: a local copy, used instead."
    )
    url: Measured[str | None] = Field(None, description="Downloaded once into the cache; needs sha256.")
    sha256: Measured[str | None] = Field(None, pattern="^[0-9a-f]{64}$")

    def _check_place(self) -> None:
        if not self.path and not self.url:
            raise ValueError("neither path nor url is set: say where the text is")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_place()
        if self.url and not self.sha256:
            raise ValueError(f"url={self.url} has no sha256: add it, so that the same bytes are used every time")
        return self


class TextSource(FileSource):
    """UTF-8 text; each file is one document."""

    type: Measured[Literal["text"]]
    extensions: Measured[tuple[str, ...]] = Field((".txt", ".md", ".text"), description="Files taken from a folder.")


class JSONLSource(FileSource):
    """One JSON object a line, plain or .gz; each is one document."""

    type: Measured[Literal["jsonl"]]
    field: Measured[str] = "text"


class CSVSource(FileSource):
    """Tables of delimited text, whose first line names the columns: .csv or .tsv, plain or .gz. Each row is one
    document."""

    type: Measured[Literal["csv"]]
    field: Measured[str] = Field("text", description="The column that holds the text.")
    delimiter: Measured[str | None] = Field(
        None, pattern=r'^[^"\r\n\x00]$', description="One character. None: a tab for .tsv, else a comma."
    )
    quotes: Measured[bool] = Field(
        True, description="false: quotation marks are text, and no field holds the delimiter or a line break."
    )


class ParquetSource(FileSource):
    """Parquet files; each row is one document. Needs the `data` extra."""

    type: Measured[Literal["parquet"]]
    field: Measured[str] = "text"


class HuggingFaceSource(Section):
    """A dataset of the Hugging Face hub, or a local dataset folder, streamed. Needs the `data` extra."""

    type: Measured[Literal["huggingface"]]
    dataset: Measured[str]
    name: Measured[str | None] = None
    split: Measured[str] = "train"
    field: Measured[str] = "text"


class _RecordsSource(FileSource):
    """Records from files or a dataset."""

    dataset: Measured[str | None] = Field(None, description="Of the Hugging Face hub, or a local dataset folder.")
    name: Measured[str | None] = None
    split: Measured[str] = "train"

    def _check_place(self) -> None:
        if bool(self.path or self.url) == bool(self.dataset):
            raise ValueError("give either path (or url) or dataset: it says where the records are")


class ConversationsSource(_RecordsSource):
    """Conversations, or instructions with their answers. Each record is one example.

    Files of .jsonl, .jsonl.gz, .json (one list) or .parquet, or a Hugging Face dataset. Of each file the shape is
    recognized: alpaca (instruction, input, output), sharegpt (conversations of from and value) or messages (messages of
    role and content).
    """

    type: Measured[Literal["conversations"]]
    shape: Measured[Literal["auto", "alpaca", "sharegpt", "messages"]] = "auto"


class PreferencesSource(_RecordsSource):
    """Prompts with two answers, of which one is preferred. Each record is one pair.

    Files as for conversations. A record has `chosen` and `rejected`, each an answer or a list of messages, and the
    prompt as `prompt` (text or messages), as `instruction` and `input`, or as the beginning of both lists.
    """

    type: Measured[Literal["preferences"]]


SourceConfig = Annotated[
    PythonStdlibSource
    | TextSource
    | JSONLSource
    | CSVSource
    | ParquetSource
    | HuggingFaceSource
    | ConversationsSource
    | PreferencesSource,
    Field(discriminator="type"),
]


class ValidationSplit(Section):
    """What is held out. Deterministic: it depends on the text alone."""

    fraction: Measured[float] = Field(0.05, gt=0, lt=1)
    by: Measured[Literal["auto", "document", "tail"]] = Field(
        "auto",
        description="document: whole documents, chosen by a hash of their text. tail: the end of each document. "
        "auto: document where there are at least 20 and one is chosen, else tail.",
    )


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    validation: ValidationSplit = ValidationSplit()
    cache_dir: Free[ShortPath] = Field(
        Path("data"), description="Prepared shards go to a folder of their own below this one."
    )
    shard_tokens: Repeat[PositiveInt] = Field(
        100_000_000, description="A shard is closed when it holds this many tokens."
    )
    processes: Free[int] = Field(0, ge=0, le=1024, description="Worker processes for preparing. 0: one for each core.")

    @property
    def conversations(self) -> tuple[ConversationsSource, ...]:
        """The sources where they are conversations; empty where they are text."""
        return tuple(source for source in self.sources if isinstance(source, ConversationsSource))

    @property
    def texts(self) -> tuple[SourceConfig, ...]:
        """The sources where they are text; empty where they are conversations."""
        return tuple(source for source in self.sources if not isinstance(source, _RecordsSource))

    @property
    def preferences(self) -> tuple[PreferencesSource, ...]:
        """The sources where they are pairs of answers; else empty."""
        return tuple(source for source in self.sources if isinstance(source, PreferencesSource))

    @property
    def records(self) -> tuple[ConversationsSource | PreferencesSource, ...]:
        """The sources that hold turns, which a chat template writes."""
        return (*self.conversations, *self.preferences)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(map(bool, (self.conversations, self.preferences, self.texts))) > 1:
            raise ValueError(
                "sources mix text, conversations or preferences: train on the one first, then start from that run"
            )
        if self.records and self.validation.by == "tail":
            raise ValueError("validation.by=tail and sources of conversations: whole ones are held out; leave it out")
        return self
