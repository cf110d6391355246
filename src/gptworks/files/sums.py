"""sha256 sums of a file, of a folder's files, and of a JSON text's own contents."""

import hashlib
import json
from pathlib import Path
from typing import Any

from gptworks.errors import UserError
from gptworks.files.read import open_regular, read_regular
from gptworks.files.write import write_whole


def sha256_file(path: Path, *, inside: Path | None = None, max_bytes: int | None = None) -> str:
    """Return the sha256 of a regular file's bytes, in hex; arguments and errors: see `open_regular`."""
    with open_regular(path, inside=inside, max_bytes=max_bytes) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed_json(tree: dict[str, Any]) -> str:
    """Return a mapping as JSON text, with the sha256 of the mapping added."""
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode("ascii")).hexdigest()
    return json.dumps({**tree, "sha256": digest}, indent=2, ensure_ascii=False) + "\n"


def unsealed_json(data: bytes) -> dict[str, Any]:
    """Return the mapping of a `sealed_json` text. Raises ValueError if `data` is not such a text, or was changed."""
    try:
        tree = json.loads(data)
        if not isinstance(tree, dict) or "sha256" not in tree:
            raise ValueError("it does not contain its sha256")
        contents = {key: value for key, value in tree.items() if key != "sha256"}
        if sealed_json(contents).encode("utf-8") != data:
            raise ValueError("its contents have another sha256")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return contents


SUMS_FILE = "sums.json"


def write_sums(folder: Path) -> None:
    """Write the sha256 of each file in a folder to the folder's `sums.json`, for `check_sums`."""
    sums = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.name != SUMS_FILE}
    write_whole(folder / SUMS_FILE, sealed_json({"files": sums}))


def check_sums(folder: Path, max_bytes: int) -> None:
    """Compare a folder's files with its `sums.json`, if it exists. Files not named there are not checked. Raises
    UserError if a named file is missing, changed, not regular or above `max_bytes`, or `sums.json` is damaged."""
    path = folder / SUMS_FILE
    try:
        sums = unsealed_json(read_regular(path, 1 << 20, inside=folder)).get("files")
        if not isinstance(sums, dict) or any(Path(name).name != name for name in sums):
            raise ValueError("it does not list the files next to it")
    except (FileNotFoundError, NotADirectoryError):
        return
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it from a copy, or delete it. {_ACCEPT}") from None
    for name, expected in sums.items():
        file = folder / name
        try:
            sha256 = sha256_file(file, inside=folder, max_bytes=max_bytes)
            state = None if sha256 == expected else "is not the file that was written"
        except FileNotFoundError:
            state = "is missing"
        if state is not None:
            raise UserError(
                f"{file} {state}: {path} has the sha256 of each file next to it. Restore the file from a copy. If you "
                f"changed it on purpose, delete {path}. {_ACCEPT}"
            )


_ACCEPT = "Without it, the files next to it are not checked."
