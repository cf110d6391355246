"""The ledger of a campaign: JSON lines that cannot be edited, reordered or cut unnoticed.

Each entry has the sha256 of the line before it (a hash chain) and an HMAC-SHA256 with the campaign's key. The last line
is the head: it has the number of entries, the sha256 of the last one, and an HMAC. Each append replaces the whole file
at once, so a crash leaves the old ledger or the new one. A second file holds the number of entries, so an old copy of
the ledger is noticed. Whoever can read the key can forge entries.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptworks.errors import UserError
from gptworks.files import read_regular, write_whole

MOST_BYTES = 1 << 26
_FIRST = "0" * 64

Entry = dict[str, Any]


class Ledger:
    """The entries of a ledger, checked when it is read."""

    def __init__(self, path: Path, key: bytes, count: Path) -> None:
        """Read the ledger; a missing file is an empty ledger.

        Args:
            count: file with the number of entries.

        Raises:
            UserError: the file is damaged, was changed, or is an old copy; the message names the line.
        """
        self.path, self._key, self._count = path, key, count
        self._lines: list[str] = []
        self.entries: list[Entry] = []
        if path.exists():
            self._read()
            self._check_number()

    def append(self, kind: str, **facts: Any) -> Entry:
        """Add an entry and return it; the file is on the disk when this returns."""
        previous = _sha256(self._lines[-1]) if self._lines else _FIRST
        entry = {"number": len(self.entries) + 1, "kind": kind, "time": round(time.time(), 3), **facts}
        line = self._signed({**entry, "previous": previous})
        self._lines.append(line)
        self.entries.append(json.loads(line))
        write_whole(self.path, "\n".join([*self._lines, self._head()]) + "\n", inside=self.path.parent)
        write_whole(self._count, str(len(self.entries)), private=True, inside=self._count.parent)
        return self.entries[-1]

    def of_kind(self, *kinds: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry["kind"] in kinds)

    def _head(self) -> str:
        return self._signed({"kind": "head", "entries": len(self._lines), "last": _sha256(self._lines[-1])})

    def _signed(self, tree: dict[str, Any]) -> str:
        text = json.dumps(tree, sort_keys=True, allow_nan=False)
        mac = hmac.new(self._key, text.encode("utf-8"), hashlib.sha256).hexdigest()
        return f'{text[:-1]}, "mac": "{mac}"}}'

    def _read(self) -> None:
        lines = read_regular(self.path, MOST_BYTES, inside=self.path.parent).decode("utf-8", "replace").splitlines()
        previous = _FIRST
        for number, line in enumerate(lines, 1):
            try:
                tree = json.loads(line)
                mac = tree.pop("mac")
                if not hmac.compare_digest(self._signed(tree), line):
                    raise ValueError(f"its signature {str(mac)[:8]}… does not fit")
            except (ValueError, KeyError, AttributeError, RecursionError, TypeError) as error:
                raise self._changed(number, f"it was changed ({error})") from None
            if tree.get("kind") == "head":
                if number != len(lines) or tree != json.loads(self._unsigned_head()):
                    raise self._changed(number, "the head is not that of the entries above it")
                return
            if tree.get("previous") != previous or tree.get("number") != number:
                raise self._changed(number, "the entry before it was removed, added or moved")
            self._lines.append(line)
            self.entries.append(json.loads(line))
            previous = _sha256(line)
        raise self._changed(len(lines) + 1, "the head is missing, so entries may have been cut off")

    def _check_number(self) -> None:
        """Refuse fewer entries than the second file counts. After a crash, the file may count one entry too few."""
        try:
            wrote = int(read_regular(self._count, 20, inside=self._count.parent))
        except (FileNotFoundError, ValueError):
            raise UserError(f"{self._count}, the number of entries, is missing or damaged: restore it.") from None
        if len(self.entries) < wrote:
            what = f"it has {len(self.entries):,} entries, and this judge wrote {wrote:,}"
            raise self._changed(len(self.entries) + 1, what)

    def _unsigned_head(self) -> str:
        tree = json.loads(self._head()) if self._lines else {}
        tree.pop("mac", None)
        return json.dumps(tree)

    def _changed(self, number: int, why: str) -> UserError:
        return UserError(
            f"{self.path}, line {number}: {why}. The results of this campaign cannot be trusted: restore the file from "
            f"a copy, or start a new campaign in another --folder."
        )


def _sha256(line: str) -> str:
    return hashlib.sha256(line.encode("utf-8")).hexdigest()
