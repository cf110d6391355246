"""Where text and examples come from: the settings of each kind of source."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gptworks.config.base import Free, Measured, Place, PositiveInt, Section

LANGUAGES: dict[str, tuple[str, ...]] = {
    "python": (".py", ".pyi"), "c": (".c", ".h"), "c++": (".cc", ".cpp", ".cxx", ".hpp", ".hh"), "c#": (".cs",),
    "java": (".java",), "kotlin": (".kt", ".kts"), "scala": (".scala",), "javascript": (".js", ".jsx", ".mjs"),
    "typescript": (".ts", ".tsx"), "go": (".go",), "rust": (".rs",), "ruby": (".rb",), "php": (".php",),
    "swift": (".swift",), "shell": (".sh",), "lua": (".lua",), "perl": (".pl", ".pm"), "r": (".r", ".R"),
    "julia": (".jl",), "haskell": (".hs",), "ocaml": (".ml", ".mli"), "sql": (".sql",), "zig": (".zig",),
    "dart": (".dart",), "elixir": (".ex", ".exs"), "clojure": (".clj",), "cuda": (".cu", ".cuh"),
}  # fmt: skip
"""The endings of their files."""


class PythonStdlibSource(Section):
    """The standard library's own sources of the interpreter that runs, tests left out."""

    type: Measured[Literal["python-stdlib"]]


Sum = Annotated[str, Field(pattern="^[0-9a-f]{64}$", max_length=64)]


def _several(one: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if one is None else (one,) if isinstance(one, str) else one


class FileSource(Section):
    """Local files, or a download; also compressed: .gz, .xz, .bz2, and with the `data` extra .zst."""

    path: Free[Annotated[str | None, Place.PATH]] = Field(
        None, description="A file, a folder or a glob. With url: a local copy, used instead."
    )
    url: Measured[Annotated[str | tuple[str, ...] | None, Place.URL]] = Field(
        None,
        description="An https address, downloaded once into the cache; needs sha256. Or several, each with its sha256.",
    )
    sha256: Measured[Sum | tuple[Sum, ...] | None] = Field(None, description="Of each url, in hexadecimal digits.")

    def _check_place(self) -> None:
        if not self.path and not self.url:
            raise ValueError("neither path nor url is set: say where the text is")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_place()
        if self.url:
            from gptworks.files.fetch import check_url

            for url in _several(self.url):
                check_url(url)
        if self.url and not self.sha256:
            raise ValueError(f"url={self.url} has no sha256: add it, so that the same bytes are used every time")
        several = isinstance(self.url, tuple) or isinstance(self.sha256, tuple)
        n_urls, n_sums = len(_several(self.url)), len(self.sums)
        if several and n_urls != n_sums:
            raise ValueError(f"{n_urls} of url and {n_sums} of sha256: give as many of the one as of the other")
        if several and self.path:
            raise ValueError("path beside several of url: give the one or the other")
        return self

    @property
    def sums(self) -> tuple[str, ...]:
        """The sha256 of each file, where they are stated."""
        return _several(self.sha256)

    @property
    def downloads(self) -> tuple[tuple[str, str], ...]:
        """Each url with its sha256."""
        return tuple(zip(_several(self.url), self.sums, strict=False))


class TextSource(FileSource):
    """UTF-8 text; each file is one document."""

    type: Measured[Literal["text"]]
    extensions: Measured[tuple[str, ...]] = Field((".txt", ".md", ".text"), description="Files taken from a folder.")


class JSONLSource(FileSource):
    """One JSON object a line, each of which is one document."""

    type: Measured[Literal["jsonl"]]
    field: Measured[str] = "text"


class JSONSource(FileSource):
    """JSON files that hold one list of objects, each of which is one document. They are streamed."""

    type: Measured[Literal["json"]]
    field: Measured[str] = "text"
    records: Measured[str | None] = Field(
        None, description="The key of the list, where the file holds an object. None: the file is the list."
    )


class CSVSource(FileSource):
    """Tables of delimited text, whose first line names the columns: .csv or .tsv. Each row is one document."""

    type: Measured[Literal["csv"]]
    field: Measured[str] = Field("text", description="The column that holds the text.")
    delimiter: Measured[str | None] = Field(
        None, pattern=r'^[^"\r\n\x00]$', description="One character. None: a tab for .tsv, else a comma."
    )
    quotes: Measured[bool] = Field(
        True, description="false: quotation marks are text, and no field holds the delimiter or a line break."
    )


class ArchiveSource(FileSource):
    """ZIP and tar archives (.zip, .tar, .tar.gz, .tgz …), read as streams: nothing is unpacked to the disk."""

    type: Measured[Literal["archive"]]
    format: Measured[Literal["text", "jsonl", "csv"]] = Field(
        "text", description="text: each member is one document. jsonl, csv: members hold records."
    )
    members: Measured[tuple[str, ...]] = Field(
        (), description="Patterns such as *.py or docs/*; * also stands for slashes. Empty: those usual for the format."
    )
    field: Measured[str] = Field("text", description="Of records.")


class ParquetSource(FileSource):
    """Parquet files; each row is one document. Needs the `data` extra."""

    type: Measured[Literal["parquet"]]
    field: Measured[str] = "text"


class HTMLSource(FileSource):
    """Pages of HTML, of which the main text is taken. Each file is one document. Needs the `sources` extra."""

    type: Measured[Literal["html"]]


class WARCSource(FileSource):
    """Crawls: the main text of the HTML pages in WARC files, and the texts in WET files. Needs the `sources` extra."""

    type: Measured[Literal["warc"]]


class PDFSource(FileSource):
    """The text of PDF files, each of which is one document. Needs the `sources` extra."""

    type: Measured[Literal["pdf"]]
    broken: Measured[Literal["refuse", "skip"]] = Field(
        "refuse", description="skip: a file that cannot be read is left out, with a warning."
    )


class CodeSource(Section):
    """The code in a folder; each file is one document. Files that are not UTF-8 text are left out, and so is what
    `.gitignore` files name, which needs the `sources` extra."""

    type: Measured[Literal["code"]]
    path: Free[Annotated[str, Place.PATH]] = Field(description="A folder.")
    languages: Measured[tuple[str, ...]] = Field(
        (), description=f"Of {', '.join(LANGUAGES)}. Empty: all of them, unless `extensions` are given."
    )
    extensions: Measured[tuple[str, ...]] = Field((), description="More endings of files, or names such as Makefile.")
    gitignore: Measured[bool] = Field(True, description="Leave out what `.gitignore` files name.")
    vendored: Measured[bool] = Field(
        False, description="Also what others wrote: node_modules, vendor, third_party and the like."
    )
    largest_file_bytes: Measured[PositiveInt] = Field(1 << 20, description="Larger files are left out.")

    @field_validator("languages")
    @classmethod
    def _check_languages(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        for one in languages:
            if one not in LANGUAGES:
                raise ValueError(f"no language `{one}` is known: list the endings of its files as `extensions`")
        return languages


class HuggingFaceSource(Section):
    """A dataset of the Hugging Face hub, or a local dataset folder, streamed. Needs the `data` extra."""

    type: Measured[Literal["huggingface"]]
    dataset: Measured[Annotated[str, Place.DATASET]]
    name: Measured[str | None] = None
    revision: Measured[str | None] = Field(
        None, description="A commit, branch or tag of the hub. Name a commit, so that the same text is used every time."
    )
    split: Measured[str] = "train"
    field: Measured[str] = "text"


class RecordsSource(FileSource):
    """Records from files or a dataset."""

    dataset: Measured[Annotated[str | None, Place.DATASET]] = Field(
        None, description="Of the Hugging Face hub, or a local dataset folder."
    )
    name: Measured[str | None] = None
    revision: Measured[str | None] = Field(None, description="A commit, branch or tag of the hub.")
    split: Measured[str] = "train"

    def _check_place(self) -> None:
        if bool(self.path or self.url) == bool(self.dataset):
            raise ValueError("give either path (or url) or dataset: it says where the records are")


class ConversationsSource(RecordsSource):
    """Conversations, or instructions with their answers. Each record is one example.

    Files of .jsonl, .json (one list) or .parquet, or a Hugging Face dataset. Of each file the shape is
    recognized: alpaca (instruction, input, output), sharegpt (conversations of from and value) or messages (messages of
    role and content).
    """

    type: Measured[Literal["conversations"]]
    shape: Measured[Literal["auto", "alpaca", "sharegpt", "messages"]] = "auto"


class PreferencesSource(RecordsSource):
    """Prompts with two answers, of which one is preferred. Each record is one pair.

    Files as for conversations. A record has `chosen` and `rejected`, each an answer or a list of messages, and the
    prompt as `prompt` (text or messages), as `instruction` and `input`, or as the beginning of both lists.
    """

    type: Measured[Literal["preferences"]]


SourceConfig = Annotated[
    PythonStdlibSource
    | TextSource
    | JSONLSource
    | JSONSource
    | CSVSource
    | ParquetSource
    | ArchiveSource
    | HTMLSource
    | WARCSource
    | PDFSource
    | CodeSource
    | HuggingFaceSource
    | ConversationsSource
    | PreferencesSource,
    Field(discriminator="type"),
]
