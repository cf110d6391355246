"""Reader of untrusted JSON settings: mappings of limited size without repeated keys."""

import codecs
import json
from collections import Counter
from pathlib import Path
from typing import Any

from gptworks.errors import UserError
from gptworks.files import read_regular

MAX_JSON_BYTES = 1 << 26
"""Size limit of a file of settings. The largest published files, with 6,000 added tokens, have 1.2 MB."""


def read_json(path: Path, fix: str = "") -> dict[str, Any]:
    """Read the mapping in a JSON file, which may not be a link out of its folder.

    Args:
        fix: advice for the message if the file does not exist.

    Raises:
        UserError: the file does not exist, cannot be opened, is not regular or too large, or does not contain a
            mapping.
    """
    try:
        return mapping_of(read_regular(path, MAX_JSON_BYTES, inside=path.parent))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file. {fix}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"{path} is not readable JSON: {error}.") from None


def mapping_of(data: bytes) -> dict[str, Any]:
    """Return the mapping in a JSON text.

    Raises:
        ValueError: the text is not UTF-8, not JSON, nested too deep, has a repeated key, or is not a mapping.
    """
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it begins with a byte order mark, which JSON does not allow; save it without one")
    try:
        values = json.loads(data.decode("utf-8"), object_pairs_hook=without_repeats)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(values, dict):
        raise ValueError(f"it holds {type(values).__name__}, not a mapping (no JSON object)")
    return values


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the key-value pairs as a mapping.

    Raises:
        ValueError: a key is given twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:100]!r} is given twice; keep the right one")
    return values
