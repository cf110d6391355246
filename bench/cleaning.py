"""Measure the filters' speed on one core, compared with datatrove's filters that implement the same rules.

    python bench/cleaning.py [FILES]        # default: the sources of Python's library

The text is cut into documents of about 5 kB. MB/s are per CPU time of one thread, the best of three passes. Both
libraries split words at white space, so that rules are compared and not tokenizers. Without datatrove, only our filters
are measured.
"""

import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gptworks.config.cleaning import FilterConfig
from gptworks.data.cleaning.choose import FILTERS, choose_filters
from gptworks.data.cleaning.duplicates import Duplicates

PEERS = {
    "gopher-quality": ("gopher_quality_filter", "GopherQualityFilter"),
    "gopher-repetition": ("gopher_repetition_filter", "GopherRepetitionFilter"),
    "c4": ("c4_filters", "C4QualityFilter"),
    "fineweb": ("fineweb_quality_filter", "FineWebQualityFilter"),
}


def documents(files: list[Path], most_bytes: int = 4_000_000) -> list[str]:
    """Return the first 60,000 characters of each file, cut at line ends into parts of about 5 kB, until they have more
    than `most_bytes` characters together."""
    found: list[str] = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")[:60_000]
        while text:
            cut = text.find("\n", 5000) + 1 or len(text)
            found.append(text[:cut])
            text = text[cut:]
        if sum(map(len, found)) > most_bytes:
            break
    return found


def speed(function: Callable[[str], Any], texts: list[str]) -> float:
    """Return MB/s of the best of three passes."""
    best = float("inf")
    for _ in range(3):
        started = time.thread_time()
        for text in texts:
            function(text)
        best = min(best, time.thread_time() - started)
    return sum(len(text.encode("utf-8")) for text in texts) / best / 1e6


def peer(module: str, name: str) -> Callable[[str], Any] | None:
    try:
        from datatrove.data import Document
        from datatrove.pipeline.filters import c4_filters  # noqa: F401
    except ImportError:
        return None
    place = sys.modules[f"datatrove.pipeline.filters.{module}"]
    for split, parts in (("split_into_words", str.split), ("split_into_sentences", lambda text: text.split(". "))):
        if hasattr(place, split):
            setattr(place, split, lambda text, language, parts=parts: parts(text))
    one = getattr(place, name)()
    return lambda text: one.filter(Document(text=text, id=""))


def main() -> None:
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = documents([Path(name) for name in sys.argv[1:]] or library)
    adapter: TypeAdapter[FilterConfig] = TypeAdapter(FilterConfig)
    with tempfile.TemporaryDirectory() as folder:
        items = Path(folder) / "items.jsonl"
        lines = (json.dumps({"question": " ".join(f"word{n}x{at}" for at in range(20))}) for n in range(1000))
        items.write_text("\n".join(lines))
        values: dict[str, dict[str, Any]] = {"language": {"languages": ["en"]}, "decontaminate": {"tasks": [items]}}
        print(f"{len(texts):,} documents, {sum(map(len, texts)):,} characters")
        for settings in FILTERS:
            name = settings.model_fields["type"].annotation.__args__[0]
            [one] = choose_filters((adapter.validate_python({"type": name, **values.get(name, {})}),))
            other = peer(*PEERS[name]) if name in PEERS else None
            mine, its = speed(one.apply, texts), other and speed(other, texts)
            print(f"{name:<22} {mine:8.1f} MB/s" + (f"   {mine / its:5.1f} × datatrove" if its else ""))
        for name in ("exact-duplicates", "near-duplicates"):
            duplicates = Duplicates((adapter.validate_python({"type": name}),))
            print(f"{name:<22} {speed(duplicates.signature, texts):8.1f} MB/s   (signatures)")


if __name__ == "__main__":
    main()
