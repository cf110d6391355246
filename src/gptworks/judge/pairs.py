"""The pairs of each try as the ledger has them: a signature of each, entered before `try.json` has the pair."""

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from gptworks.errors import UserError
from gptworks.judge.ledger import Entry, Ledger
from gptworks.runs.try_results import TRY_FILE, Pair, Try, read_try

Entered = dict[int, dict[str, float]]
"""For each pair, by number: its signatures, each with the seconds of training. A third run gives a pair another one."""


def signature(pair: Pair, key: bytes) -> str:
    return hmac.new(key, json.dumps(asdict(pair), sort_keys=True).encode("utf-8"), hashlib.sha256).hexdigest()


def entered_pairs(ledger: Ledger) -> dict[int, Entered]:
    """Return the pairs of each try, by its number; 0 is the final comparison."""
    found: dict[int, Entered] = {entry["tried"]: {} for entry in ledger.of_kind("begun")}
    for entry in ledger.of_kind("pair", "lost"):
        pairs = found.setdefault(entry["tried"], {})
        if entry["kind"] == "lost":
            del pairs[entry["pair"]]
        else:
            pairs.setdefault(entry["pair"], {})[entry["signature"]] = entry["trained"]
    return found


def new_pairs(so_far: Try, entered: Mapping[int, Mapping[str, float]], key: bytes) -> Iterator[tuple[Pair, float]]:
    """Yield the pairs that are not entered yet, each with the seconds that its new runs trained."""
    for pair in so_far.pairs:
        known = entered.get(pair.number, {})
        if signature(pair, key) not in known:
            yield pair, sum(pair.seconds.values()) - max(known.values(), default=0.0)


def check_pairs(folder: Path, entered: Entered, newest: Entry, key: bytes) -> bool:
    """Check that the pairs in a try's `try.json` are those that were entered in the ledger. Return whether only the
    newest entry's pair is missing there, because of a crash before `try.json` was written.

    Args:
        newest: the ledger's newest entry if it is of this try, else empty.

    Raises:
        UserError: a pair was changed, added or removed.
    """
    found = read_try(folder).pairs if (folder / TRY_FILE).is_file() else ()
    missing = entered.keys() - {pair.number for pair in found}
    changed = {pair.number for pair in found if signature(pair, key) not in entered.get(pair.number, ())}
    is_lost = not changed and newest.get("kind") == "pair" and missing == {newest["pair"]}
    if (wrong := sorted(missing | changed)) and not is_lost:
        raise UserError(
            f"{folder / TRY_FILE}: pair {wrong[0]} is not as the judge entered it. Restore the file from a copy."
        )
    return is_lost
