"""The ledger of a campaign: JSON lines that cannot be edited, reordered or cut unnoticed.

Each entry has the sha256 of the line before it (a hash chain) and an HMAC-SHA256 with the campaign's key. The last line
is the head, which has the number of entries, the sha256 of the last entry, and an HMAC. Each append replaces the whole
file at once, so a crash leaves the old ledger or the new ledger. A second file holds the number of entries, so an old
copy of the ledger is noticed. Whoever can read the key can forge entries.

The entry of a pair of runs has the pair's signature. It is written before `try.json` has the pair.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gptworks.errors import UserError
from gptworks.files import read_regular, write_whole
from gptworks.runs.try_results import TRY_FILE, Pair, Try, read_try

MOST_BYTES = 1 << 26
_FIRST = "0" * 64

Entry = dict[str, Any]
Entered = dict[int, dict[str, float]]
"""Number of a pair → signature → seconds of training. A pair gets another signature when a third run is added to it.
The signature of a lost pair is empty: the seconds of its runs count, but `try.json` lacks the pair."""


class Ledger:
    """The entries of a ledger, which are checked when the file is read."""

    def __init__(self, path: Path, key: bytes, count: Path) -> None:
        """Read the ledger; a missing file is an empty ledger. The file `count` has the number of entries. Raise a
        UserError, which names the line, if the file is damaged, was changed, or is an old copy."""
        self.path, self._key, self._count = path, key, count
        self._lines: list[str] = []
        self.entries: list[Entry] = []
        if path.exists():
            self._read()
            self._check_number()

    def append(self, kind: str, **facts: Any) -> None:
        """Add an entry. The file is on the disk when the method returns."""
        previous = _sha256(self._lines[-1]) if self._lines else _FIRST
        entry = {"number": len(self.entries) + 1, "kind": kind, "time": round(time.time(), 3), **facts}
        line = self._signed({**entry, "previous": previous})
        self._lines.append(line)
        self.entries.append(json.loads(line))
        write_whole(self.path, "\n".join([*self._lines, self._head()]) + "\n", inside=self.path.parent)
        write_whole(self._count, str(len(self.entries)), private=True, inside=self._count.parent)

    def of_kind(self, *kinds: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry["kind"] in kinds)

    def _head(self) -> str:
        return self._signed({"kind": "head", "entries": len(self._lines), "last": _sha256(self._lines[-1])})

    def _signed(self, tree: dict[str, Any]) -> str:
        text = json.dumps(tree, sort_keys=True, allow_nan=False)
        return f'{text[:-1]}, "mac": "{keyed(self._key, text).hex()}"}}'

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
                if number != len(lines) or not self._lines or line != self._head():
                    raise self._changed(number, "the head is not that of the entries above it")
                return
            if tree.get("previous") != previous or tree.get("number") != number:
                raise self._changed(number, "the entry before it was removed, added or moved")
            self._lines.append(line)
            self.entries.append(json.loads(line))
            previous = _sha256(line)
        raise self._changed(len(lines) + 1, "the head is missing, so entries may have been cut off")

    def _check_number(self) -> None:
        """Raise a UserError if the ledger has fewer entries than the file `count` says. After a crash, this number may
        be too small by one."""
        try:
            wrote = int(read_regular(self._count, 20, inside=self._count.parent))
        except (FileNotFoundError, ValueError):
            raise UserError(f"{self._count}, the number of entries, is missing or damaged: restore it.") from None
        if len(self.entries) < wrote:
            what = f"it has {len(self.entries):,} entries, and this judge wrote {wrote:,}"
            raise self._changed(len(self.entries) + 1, what)

    def _changed(self, number: int, why: str) -> UserError:
        return UserError(
            f"{self.path}, line {number}: {why}. The results of this campaign cannot be trusted: restore the file from "
            f"a copy, or start a new campaign in another --folder."
        )


def _sha256(line: str) -> str:
    return hashlib.sha256(line.encode("utf-8")).hexdigest()


def keyed(key: bytes, text: str) -> bytes:
    """Return the HMAC-SHA256 of a text, which only the holder of the key can compute."""
    return hmac.new(key, text.encode("utf-8"), hashlib.sha256).digest()


# -------------------------------------------------------------------------------------------- pairs of runs


def signature(pair: Pair, key: bytes) -> str:
    return keyed(key, json.dumps(asdict(pair), sort_keys=True)).hex()


def entered_pairs(ledger: Ledger) -> dict[int, Entered]:
    """Return the pairs of each try, by its number; 0 is the final comparison."""
    found: dict[int, Entered] = {entry["tried"]: {} for entry in ledger.of_kind("begun")}
    for entry in ledger.of_kind("pair", "lost"):
        signatures = found.setdefault(entry["tried"], {}).setdefault(entry["pair"], {})
        if entry["kind"] == "lost":
            signatures[""] = signatures.pop(entry["signature"])
        else:
            signatures[entry["signature"]] = entry["trained"]
    return found


def new_pairs(so_far: Try, entered: Mapping[int, Mapping[str, float]], key: bytes) -> Iterator[tuple[Pair, float]]:
    """Yield the pairs that are not entered yet, each with the seconds that its new runs trained."""
    for pair in so_far.pairs:
        known = entered.get(pair.number, {})
        if signature(pair, key) not in known:
            yield pair, sum(pair.seconds.values()) - max(known.values(), default=0.0)


def check_pairs(folder: Path, entered: Entered, key: bytes) -> None:
    """Raise a UserError if the pairs in a try's `try.json` are not those that were entered into the ledger."""
    found = {pair.number: signature(pair, key) for pair in _pairs_in(folder)}
    there = {number for number, signatures in entered.items() if any(signatures)}
    changed = {number for number, one in found.items() if one not in entered.get(number, ())}
    if wrong := sorted(there - found.keys() | changed):
        raise UserError(
            f"{folder / TRY_FILE}: pair {wrong[0]} is not as the judge entered it. Restore the file from a copy."
        )


def is_lost(folder: Path, entered: str, key: bytes) -> bool:
    """Return whether a try's `try.json` lacks the pair with this signature, because writing it failed."""
    return entered not in (signature(one, key) for one in _pairs_in(folder))


def _pairs_in(folder: Path) -> tuple[Pair, ...]:
    return read_try(folder).pairs if (folder / TRY_FILE).is_file() else ()
