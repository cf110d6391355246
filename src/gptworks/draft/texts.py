"""What a file or a folder of texts holds: what can be read, how much text that is, and a sample of it."""

import codecs
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gptworks.data.sources.records import read_jsonl, whole_text
from gptworks.errors import UserError

PROSE = (".txt", ".md", ".text", ".rst", ".tex", ".org", ".adoc")
CODE = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx",
    ".go", ".rs", ".rb", ".php", ".swift", ".sh", ".lua", ".pl", ".r", ".jl", ".hs", ".ml", ".sql",
)  # fmt: skip
RECORDS = (".jsonl", ".jsonl.gz")
"""Endings of the files that are read, in lower case."""

FIELDS = ("text", "content", "body", "document", "article", "story")
"""Names under which records have their text, the commonest first."""

LEAST_BYTES = 1 << 15
"""Of text: from less, no model of language can be trained."""

SAMPLE_BYTES, SAMPLE_PARTS = 1 << 21, 64
"""Of text that is looked at, in parts from all over it."""

GZIP_RATIO = 3
"""About so many bytes of text become one in a .gz file."""

_LOOKED_AT_BYTES, _LOOKED_AT_RECORDS, _LISTED = 1 << 16, 20, 5


@dataclass(frozen=True)
class Texts:
    """What can be trained on."""

    sources: list[dict[str, Any]]
    """As a recipe names them."""
    endings: Counter[str]
    """Files that are read, by ending."""
    skipped: Counter[str]
    """Files that are not."""
    n_bytes: int
    """Of text; an estimate where it is in records."""
    code_share: float
    """Of the bytes, those of programs."""
    sample: list[str]

    @property
    def n_files(self) -> int:
        return sum(self.endings.values())

    @property
    def n_documents(self) -> int | None:
        """Each file is one; None where files hold records."""
        return None if any(source["type"] != "text" for source in self.sources) else self.n_files


def look_at(path: Path) -> Texts:
    """What a folder holds, all folders inside it included; or a file.

    Raises:
        UserError: there is nothing to read, too little of it, or a file that is no UTF-8 text.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder. Give a folder of texts, or one file.")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    by_ending: dict[str, list[Path]] = {}
    for file in files:
        by_ending.setdefault(_ending(file), []).append(file)
    plain = {ending: those for ending, those in by_ending.items() if ending.lower() in (*PROSE, *CODE)}
    if path.is_file() and not plain and _ending(path) not in RECORDS:
        plain = {_ending(path): [path]}  # the user says that it is text
    plain = _readable(plain)
    texts = [file for those in plain.values() for file in those]
    sources: list[dict[str, Any]] = []
    if texts:
        extensions = {"extensions": sorted(plain)} if path.is_dir() else {}
        sources.append({"type": "text", "path": str(path), **extensions})
    n_bytes = sum(file.stat().st_size for file in texts)
    n_code = sum(file.stat().st_size for ending, those in plain.items() if ending.lower() in CODE for file in those)
    records = [file for ending in RECORDS for file in by_ending.get(ending, [])]
    found = _look_at_records(records)
    read = {ending: len(those) for ending, those in plain.items()}
    sample = _sample(texts)
    if found is not None:
        sources.append({"type": "jsonl", "path": str(path), "field": found.field})
        read |= {ending: len(by_ending[ending]) for ending in RECORDS if ending in by_ending}
        n_bytes += found.n_bytes
        sample += found.sample
    skipped = Counter({ending: len(those) for ending, those in by_ending.items() if ending not in read})
    if not sources:
        raise UserError(f"{path} holds no text that can be read: it has {listed(skipped)}. {_KINDS}")
    if n_bytes < LEAST_BYTES:
        raise UserError(
            f"{path} holds {n_bytes:,} bytes of text ({listed(Counter(read))}), and a model needs {LEAST_BYTES:,} or "
            f"more: give more text, or fine-tune a model that is there with `gptworks tune`."
        )
    return Texts(sources, Counter(read), skipped, n_bytes, n_code / n_bytes, sample)


_KINDS = f"Read are {' '.join(PROSE)} {' '.join(RECORDS)} and the files of common programming languages."


def listed(endings: Counter[str]) -> str:
    """`214 .txt, 3 .md`."""
    words = [f"{n:,} {ending or 'without an ending'}" for ending, n in endings.most_common(_LISTED)]
    more = len(endings) - _LISTED
    return ", ".join(words) + (f" and {more} kinds more" if more > 0 else "") or "no files"


def _ending(file: Path) -> str:
    return ".jsonl.gz" if file.name.endswith(".jsonl.gz") else file.suffix


def _readable(by_ending: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Those kinds of files that are UTF-8 text. A kind of which no file is text is left out.

    Raises:
        UserError: some files of a kind are no text: training would stop at them.
    """
    kept = {}
    for ending, files in by_ending.items():
        wrong = [file for file in files if not _is_text(file)]
        if len(wrong) < len(files):
            kept[ending] = files
        if 0 < len(wrong) < len(files):
            some = ", ".join(map(str, wrong[:_LISTED])) + (" …" if len(wrong) > _LISTED else "")
            raise UserError(
                f"{some}: {len(wrong):,} of {len(files):,} files {ending} are not UTF-8 text. Convert them to UTF-8 or "
                f"move them away."
            )
    return kept


def _is_text(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(_LOOKED_AT_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _sample(files: list[Path]) -> list[str]:
    """All of the text where it is little; else parts from all over it, from the beginning of a line on."""
    sizes = [file.stat().st_size for file in files]
    if sum(sizes) <= SAMPLE_BYTES:
        return [file.read_text(encoding="utf-8", errors="replace") for file in files]
    part, step = SAMPLE_BYTES // SAMPLE_PARTS, sum(sizes) // SAMPLE_PARTS
    parts, before = [], 0
    position = 0
    for file, size in zip(files, sizes, strict=True):
        with file.open("rb") as stream:
            while position < before + size:
                stream.seek(position - before)
                text = stream.read(part).decode("utf-8", errors="ignore")
                parts.append(text if position == before else text.partition("\n")[2] or text)
                position += step
        before += size
    return [text for text in parts if text]


# ---------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class _Records:
    field: str
    n_bytes: int
    sample: list[str]


def _look_at_records(files: list[Path]) -> _Records | None:
    """The field that has the text of all files' records; None: there is none, or no file."""
    field, sample, text_bytes, line_bytes = None, [], 0, 0
    for file in files:
        for where, record in islice(read_jsonl(file), _LOOKED_AT_RECORDS):
            field = field or next((name for name in FIELDS if isinstance(record.get(name), str)), None)
            text = record.get(field or "")
            if not isinstance(text, str):
                raise UserError(
                    f"{where}: no text in {field or ' or '.join(FIELDS)}; its fields are {', '.join(record)}. Records "
                    f"of one kind each to a folder; conversations are for `gptworks tune`."
                )
            sample.append(whole_text(text))
            text_bytes += len(sample[-1].encode("utf-8"))
            line_bytes += sum(len(str(key)) + len(str(value)) + 6 for key, value in record.items())
    if field is None:
        return None
    sizes = (file.stat().st_size * (GZIP_RATIO if file.suffix == ".gz" else 1) for file in files)
    return _Records(field, round(sum(sizes) * min(1.0, text_bytes / max(1, line_bytes))), sample)
