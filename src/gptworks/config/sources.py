"""Settings of the sources of text, conversations and preference pairs."""

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
"""Extensions of source files by programming language."""


class PythonStdlibSource(Section):
    """The source files of the running interpreter's standard library, without its tests."""

    type: Measured[Literal["python-stdlib"]]


TEXT_FIELD = Field("text", description="The field that holds the text.")
CONFIGURATION = Field(None, description="The dataset's configuration on the hub, where it has several.")
SPLIT = Field("train", description="The dataset's split.")
Sum = Annotated[str, Field(pattern="^[0-9a-f]{64}$", max_length=64)]


def _several(one: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if one is None else (one,) if isinstance(one, str) else one


class FileSource(Section):
    """Local files or downloads, which may be compressed: .gz, .xz, .bz2, and .zst with the `data` extra."""

    path: Free[Annotated[str | None, Place.PATH]] = Field(
        None, description="A file, a folder or a glob. With url: a local copy to use instead."
    )
    url: Measured[Annotated[str | tuple[str, ...] | None, Place.URL]] = Field(
        None, description="One or more https addresses, downloaded once into the cache; each needs its sha256."
    )
    sha256: Measured[Sum | tuple[Sum, ...] | None] = Field(
        None, description="The checksum of each url, or of the one file at path, in hexadecimal."
    )

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
            raise ValueError(f"url lists {n_urls} and sha256 lists {n_sums}: give one sha256 for each url")
        if several and self.path:
            raise ValueError(f"path={self.path} with {n_urls} addresses in url: give path or url, not both")
        return self

    @property
    def sums(self) -> tuple[str, ...]:
        """The sha256 of each URL's file, or of the file at `path`; empty if the recipe gives none."""
        return _several(self.sha256)

    @property
    def downloads(self) -> tuple[tuple[str, str], ...]:
        """(URL, sha256) of each file to download."""
        return tuple(zip(_several(self.url), self.sums, strict=False))


class FilesSource(FileSource):
    """Files of any kind: plain text in any encoding, code, tables, records, archives, web pages, documents, subtitles.

    The extension of a file decides how it is read; a file that cannot be read is left out with a warning. If the folder
    has a `.git` or a `.gitignore`, links, folders of third-party code such as node_modules, and files that `.gitignore`
    names are left out too. `.gitignore`, web pages (.html), web crawls (.warc) and documents (.pdf .docx .odt .epub
    .rtf .eml .ipynb .pptx .odp .xlsx .ods) need the `sources` extra.
    """

    type: Measured[Literal["files"]]
    extensions: Measured[tuple[str, ...]] = Field((), description="More file extensions to read as text, such as .xml.")
    exclude: Measured[tuple[str, ...]] = Field(
        (), description="Patterns of files to leave out, such as *.log or drafts/*; * also matches slashes."
    )


class TextSource(FileSource):
    """Files of UTF-8 text. Each file is one document."""

    type: Measured[Literal["text"]]
    extensions: Measured[tuple[str, ...]] = Field((".txt", ".md", ".text"), description="Files to read from a folder.")


class LinesSource(FileSource):
    """Files of UTF-8 text. Every `lines` lines are one document."""

    type: Measured[Literal["lines"]]
    extensions: Measured[tuple[str, ...]] = Field((".txt", ".md", ".text"), description="Files to read from a folder.")
    lines: Measured[PositiveInt] = Field(1, description="Lines of a document; the last one of a file may have fewer.")


class JSONLSource(FileSource):
    """Files with a JSON object on each line. Each object is one document."""

    type: Measured[Literal["jsonl"]]
    field: Measured[str] = TEXT_FIELD


class JSONSource(FileSource):
    """JSON files with one list of objects, read as streams. Each object is one document."""

    type: Measured[Literal["json"]]
    field: Measured[str] = TEXT_FIELD
    records: Measured[str | None] = Field(
        None, description="The key of the list if the file holds an object. None: the file is the list."
    )


class CSVSource(FileSource):
    """Tables of delimited text (.csv, .tsv) whose first line names the columns. Each row is one document."""

    type: Measured[Literal["csv"]]
    field: Measured[str] = Field("text", description="The column that holds the text.")
    delimiter: Measured[str | None] = Field(
        None,
        pattern=r'^[^"\r\n\x00]$',
        description="One character. None: the one that a first line such as `sep=;` states, else a tab for .tsv, else "
        "the one of , ; tab | that fits the first lines.",
    )
    quotes: Measured[bool] = Field(
        True, description="false: quotation marks are text, and fields contain no delimiters or line breaks."
    )


class ArchiveSource(FileSource):
    """ZIP and tar archives (.zip, .tar, .tar.gz, .tgz …), read as streams without unpacking them to disk."""

    type: Measured[Literal["archive"]]
    format: Measured[Literal["text", "jsonl", "csv"]] = Field(
        "text", description="text: each member is one document. jsonl, csv: each record of a member is one."
    )
    members: Measured[tuple[str, ...]] = Field(
        (), description="Patterns such as *.py or docs/*; * also matches slashes. Empty: the format's usual extensions."
    )
    field: Measured[str] = Field("text", description="The field of a record that holds the text.")


class ParquetSource(FileSource):
    """Parquet files. Each row is one document. Needs the `data` extra."""

    type: Measured[Literal["parquet"]]
    field: Measured[str] = TEXT_FIELD


class HTMLSource(FileSource):
    """The main text of HTML pages. Each file is one document. Needs the `sources` extra."""

    type: Measured[Literal["html"]]


class WARCSource(FileSource):
    """Crawls: the main text of the HTML pages in WARC files, and the texts in WET files. Needs the `sources` extra."""

    type: Measured[Literal["warc"]]


class PDFSource(FileSource):
    """The text of PDF files. Each file is one document. Needs the `sources` extra."""

    type: Measured[Literal["pdf"]]
    broken: Measured[Literal["refuse", "skip"]] = Field(
        "refuse", description="What happens to a file that cannot be read. skip: it is left out with a warning."
    )


class CodeSource(Section):
    """The code in a folder. Each file is one document. Files are left out if they are not UTF-8 text, or if
    `.gitignore` names them (this needs the `sources` extra)."""

    type: Measured[Literal["code"]]
    path: Free[Annotated[str, Place.PATH]] = Field(description="A folder.")
    languages: Measured[tuple[str, ...]] = Field(
        (), description=f"Some of {', '.join(LANGUAGES)}. Empty: all, unless `extensions` are given."
    )
    extensions: Measured[tuple[str, ...]] = Field((), description="More file extensions, or names such as Makefile.")
    gitignore: Measured[bool] = Field(True, description="Leave out files that `.gitignore` names.")
    vendored: Measured[bool] = Field(
        False, description="Also read third-party code: node_modules, vendor, third_party and similar folders."
    )
    largest_file_bytes: Measured[PositiveInt] = Field(1 << 20, description="Larger files are left out.")

    @field_validator("languages")
    @classmethod
    def _check_languages(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        for one in languages:
            if one not in LANGUAGES:
                raise ValueError(f"unknown language `{one}`: list its file extensions in `extensions`")
        return languages


class HuggingFaceSource(Section):
    """A dataset of the Hugging Face hub, or a local dataset folder, streamed. Needs the `data` extra."""

    type: Measured[Literal["huggingface"]]
    dataset: Measured[Annotated[str, Place.DATASET]] = Field(description="Its name on the hub, or a local folder.")
    name: Measured[str | None] = CONFIGURATION
    revision: Measured[str | None] = Field(
        None, description="A commit, branch or tag of the hub. Only a commit gives the same text every time."
    )
    split: Measured[str] = SPLIT
    field: Measured[str] = TEXT_FIELD


class RecordsSource(FileSource):
    """Conversations or preference pairs from files, or from a Hugging Face dataset."""

    dataset: Measured[Annotated[str | None, Place.DATASET]] = Field(
        None, description="A dataset of the Hugging Face hub, or a local dataset folder."
    )
    name: Measured[str | None] = CONFIGURATION
    revision: Measured[str | None] = Field(None, description="A commit, branch or tag of the hub.")
    split: Measured[str] = SPLIT

    def _check_place(self) -> None:
        if bool(self.path or self.url) == bool(self.dataset):
            raise ValueError("give either path (or url) or dataset: it says where the records are")


class ConversationsSource(RecordsSource):
    """Conversations, or instructions with answers. Each record is one example.

    Records come from .jsonl, .ndjson, .json (one list), .csv, .tsv or .parquet files, or from a Hugging Face dataset.
    Each file's shape is recognized by the keys of its records: alpaca (`instruction`, `input`, `output`), sharegpt
    (`conversations` of `from` and `value`) or messages (`messages` of `role` and `content`).
    """

    type: Measured[Literal["conversations"]]
    shape: Measured[Literal["auto", "alpaca", "sharegpt", "messages"]] = Field(
        "auto", description="The fields of a record. auto: recognized in each file."
    )


class PreferencesSource(RecordsSource):
    """Prompts with a chosen and a rejected answer. Each record is one pair.

    Records come from the same kinds of files as conversations. A record has `chosen` and `rejected`, each an answer or
    a list of messages, and the prompt as `prompt` (text or messages), as `instruction` and `input`, or as the beginning
    of both lists.
    """

    type: Measured[Literal["preferences"]]


SourceConfig = Annotated[
    PythonStdlibSource
    | FilesSource
    | TextSource
    | LinesSource
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
