"""The contents of a dataset, for a terminal and as a page."""

from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup
from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from gptworks.data.cleaning.counts import FilterCounts, Tally
from gptworks.data.info import Info, Lengths
from gptworks.pages import parts as html
from gptworks.pages.page import page
from gptworks.pages.tables import Table
from gptworks.units import counted

Row = tuple[str, ...]
AMOUNTS = ("", "documents", "tokens", "bytes", "tokens a byte")


def printed(info: Info) -> RenderableType:
    """Tables for a terminal."""
    parts: list[RenderableType] = [Text(info.folder, "bold"), *(Text(line) for line in _lines(info))]
    parts.append(Table(AMOUNTS, "lrrrr", _amounts(info)).rich())
    parts.append(Table(("tokens of a document", *info.lengths), "l" + "r" * len(info.lengths),
                       _percentiles(info)).rich())  # fmt: skip
    for split, lengths in info.lengths.items():
        rows = [(at, f"{n:,}", "█" * round(30 * share)) for at, n, share in _histogram(lengths)]
        parts.append(Table((f"{split}, tokens", "documents", ""), "lrl", rows).rich())
    if copied := list(_copied(info)):
        parts.append(Table(("most copied", "copies", "tokens"), "lrr", copied).rich())
    if info.languages is not None:
        parts.append(Table((f"language, of {counted(info.languages.sample, 'document')}", "documents"), "lr",
                           [(html.printable(name), f"{n:,}") for name, n in info.languages.counts]).rich())  # fmt: skip
    if cleaned := list(_cleaning(info)):
        parts.append(Table(("cleaning", "documents", "bytes"), "lrr", cleaned).rich())
    return Group(*parts)


def to_html(info: Info) -> str:
    """The page. Numbers stand in <data> elements with their exact values."""
    train = next((one for one in info.amounts if one.split == "train" and one.name is None), None)
    tiles: list[tuple[str, Markup, str]] = []
    if train is not None:
        copies = info.duplicates["train"].documents if "train" in info.duplicates else 0
        per_byte = f"{train.tokens / max(1, train.text_bytes):.3f} tokens a byte"
        tiles += [
            ("training tokens", html.large(train.tokens), f"of a vocabulary of {info.vocab_size:,}"),
            ("training documents", html.large(train.documents), f"{copies:,} exact copies among them"),
            ("training text", html.large(train.text_bytes, "B"), per_byte),
        ]
    header = ("tokens of a document", *info.lengths)
    histograms = [
        html.section(f"Lengths: {split}", html.table(("tokens", "documents", ""), "lrt", _bars(lengths)))
        for split, lengths in info.lengths.items()
    ]
    languages: Markup | str = ""
    if info.languages is not None:
        rows = [(name, html.number(n), html.bar(n / info.languages.sample, "memory"))
                for name, n in info.languages.counts]  # fmt: skip
        languages = html.table(("language", f"of {counted(info.languages.sample, 'document')}", ""), "lrt", rows)
    copied, cleaned = list(_copied(info)), list(_cleaning(info))
    sections = (
        html.key_figures(tiles),
        html.section("Amounts", html.table(AMOUNTS, "lrrrr", _amounts(info))),
        html.section("Lengths", html.table(header, "l" + "r" * len(info.lengths), _percentiles(info))),
        html.columns(*histograms),
        html.section("Duplicates", *map(html.paragraph, _lines(info)[1:]),
                     html.table(("document", "copies", "tokens"), "lrr", copied) if copied else ""),
        html.section("Languages", languages),
        html.section("Cleaning", html.table(("filter", "documents", "bytes"), "lrr", cleaned) if cleaned else ""),
    )  # fmt: skip
    return page(
        Path(info.folder).name or info.folder,
        (info.folder, *_lines(info)[:1]),
        sections,
        f"Fingerprint {info.fingerprint}",
    )


def _lines(info: Info) -> list[str]:
    lines = [f"made by {info.created_by}, vocabulary {info.vocab_size:,}"]
    for split, one in info.duplicates.items():
        lines.append(f"{split}: {counted(one.documents, 'exact duplicate')}, {counted(one.tokens, 'token')}")
    if info.held_out_in_training:
        lines.append(f"{info.held_out_in_training:,} of the validation documents also in the training text")
    return lines


def _amounts(info: Info) -> list[Row]:
    return [
        (
            "  " * ((one.name is not None) + (one.source is not None))
            + html.printable(one.source or one.name or one.split), f"{one.documents:,}",
            f"{one.tokens:,}", f"{one.text_bytes:,}", f"{one.tokens / one.text_bytes:.4f}" if one.text_bytes else "",
        )
        for one in info.amounts
    ]  # fmt: skip


def _percentiles(info: Info) -> list[Row]:
    splits = list(info.lengths.values())
    rows: list[Row] = [("shortest", *(f"{one.shortest:,}" for one in splits))]
    shares = splits[0].percentiles if splits else ()
    rows += [(f"{share}%", *(f"{one.percentiles[share]:,}" for one in splits)) for share in shares]
    rows.append(("longest", *(f"{one.longest:,}" for one in splits)))
    rows.append(("mean", *(f"{one.mean:,.1f}" for one in splits)))
    return rows


def _histogram(lengths: Lengths) -> Iterator[tuple[str, int, float]]:
    most = max(n for _, n in lengths.histogram)
    for at, n in lengths.histogram:
        yield f"{at:,} to {2 * at - 1:,}", n, n / most


def _bars(lengths: Lengths) -> list[tuple[str | Markup, ...]]:
    return [(at, html.number(n), html.bar(share, "memory") if n else "") for at, n, share in _histogram(lengths)]


def _copied(info: Info) -> Iterator[Row]:
    for split, one in info.duplicates.items():
        for document, copies, tokens in one.most_copied:
            yield f"{split} document {document:,}", f"{copies:,}", f"{tokens:,}"


def _cleaning(info: Info) -> Iterator[Row]:
    """The documents that each filter read, changed, and dropped by reason."""
    for name, counts in info.cleaning:
        try:
            filters = [FilterCounts.model_validate(one) for one in counts.get("filters", ())]
        except (ValidationError, TypeError):
            yield f"{html.printable(name or info.folder)}: its counts cannot be read", "", ""
            continue
        for one in filters:
            yield _tally(f"{'' if name is None else name + ', '}{one.type}: read", one.seen)
            if one.changed.documents:
                yield _tally("  changed", one.changed)
            for reason, dropped in one.dropped.items():
                yield _tally(f"  dropped: {reason}", dropped)


def _tally(name: str, tally: Tally) -> Row:
    return html.printable(name), f"{tally.documents:,}", f"{tally.bytes:,}"
