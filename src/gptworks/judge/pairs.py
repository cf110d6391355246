"""The pairs of each try as the ledger has them: a signature of each, entered before `try.json` has the pair."""

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from gptworks.errors import UserError
from gptworks.judge.ledger import Ledger
from gptworks.runs.try_results import TRY_FILE, Pair, Try, read_try

Entered = dict[int, dict[str, float]]
"""For each pair, by number: its signatures, each with the seconds of training. A third run gives a pair another
signature. A lost pair has an empty signature: the seconds of its runs count, but `try.json` lacks the pair."""


def signature(pair: Pair, key: bytes) -> str:
    return hmac.new(key, json.dumps(asdict(pair), sort_keys=True).encode("utf-8"), hashlib.sha256).hexdigest()


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
    """Check that the pairs in a try's `try.json` are those that were entered in the ledger.

    Raises:
        UserError: a pair was changed, added or removed.
    """
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
