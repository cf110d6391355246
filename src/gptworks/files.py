"""Files that a crash cannot spoil: summed, flushed to the disk, replaced at once."""

import contextlib
import hashlib
import os
from pathlib import Path


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder, where the system lets a folder be opened."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Replace a small file at once: a reader sees the old text or the new, never a part."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    aside.replace(path)
