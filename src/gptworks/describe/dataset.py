"""Shows the contents of a dataset on a terminal and as an HTML page."""

from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup
from pydantic import ValidationError
from rich.console import Group
from rich.text import Text

from gptworks.data.cleaning.counts import FilterCounts, Tally
from gptworks.data.info import Info, Lengths
from gptworks.pages import parts as html
from gptworks.pages.page import page
from gptworks.pages.tables import Table
from gptworks.units import counted

Row = tuple[html.Cell, ...]


def printed(info: Info) -> Group:
    """Return the contents of a dataset as tables for a terminal."""
    copied, languages, cleaned = _copied(info), _languages(info), _cleaning(info)
    tables = [_amounts(info), _percentiles(info), *_histograms(info).values(), copied, languages, cleaned]
    lines = (Text(info.folder, "bold"), *(Text(line) for line in _lines(info)))
    return Group(*lines, *(table.rich() for table in tables if table.rows))


def to_html(info: Info) -> str:
    """Return the contents of a dataset as an HTML page, in which <data> elements hold the exact values of the key
    figures and of the numbers next to bars."""
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
    histograms = [html.section(f"Lengths: {split}", table.html()) for split, table in _histograms(info).items()]
    sections = (
        html.key_figures(tiles),
        html.section("Amounts", _amounts(info).html()),
        html.section("Lengths", _percentiles(info).html()),
        html.columns(*histograms),
        html.section("Duplicates", *map(html.paragraph, _lines(info)[1:]), _copied(info).html()),
        html.section("Languages", _languages(info).html()),
        html.section("Cleaning", _cleaning(info).html()),
    )
    lines = (info.folder, *_lines(info)[:1])
    return page(Path(info.folder).name or info.folder, lines, sections, f"Fingerprint {info.fingerprint}")


def _lines(info: Info) -> list[str]:
    lines = [f"made by {info.created_by}, vocabulary {info.vocab_size:,}"]
    for split, one in info.duplicates.items():
        lines.append(f"{split}: {counted(one.documents, 'exact duplicate')}, {counted(one.tokens, 'token')}")
    if info.held_out_in_training:
        lines.append(f"{info.held_out_in_training:,} of the validation documents also in the training text")
    return lines


def _amounts(info: Info) -> Table:
    rows = [
        (
            "  " * ((one.name is not None) + (one.source is not None))
            + html.printable(one.source or one.name or one.split), f"{one.documents:,}",
            f"{one.tokens:,}", f"{one.text_bytes:,}",
            "" if one.tokens_per_byte is None else f"{one.tokens_per_byte:.4f}",
        )
        for one in info.amounts
    ]  # fmt: skip
    return Table(("", "documents", "tokens", "bytes", "tokens a byte"), "lrrrr", rows)


def _percentiles(info: Info) -> Table:
    splits = list(info.lengths.values())
    rows: list[Row] = [("shortest", *(f"{one.shortest:,}" for one in splits))]
    shares = splits[0].percentiles if splits else ()
    rows += [(f"{share[1:]}%", *(f"{one.percentiles[share]:,}" for one in splits)) for share in shares]
    rows.append(("longest", *(f"{one.longest:,}" for one in splits)))
    rows.append(("mean", *(f"{one.mean:,.1f}" for one in splits)))
    return Table(("tokens of a document", *info.lengths), "l" + "r" * len(splits), rows)


def _histograms(info: Info) -> dict[str, Table]:
    """Return a histogram for each split, as a table: the number of documents by length in tokens."""
    return {
        split: Table((f"{split}, tokens", "documents", ""), "lrt", list(_bars(lengths)))
        for split, lengths in info.lengths.items()
    }


def _bars(lengths: Lengths) -> Iterator[Row]:
    most = max(one.documents for one in lengths.histogram)
    for one in lengths.histogram:
        at, n = one.at_least, one.documents
        yield f"{at:,} to {2 * at - 1:,}", html.number(n), html.Bar(n / most) if n else ""


def _copied(info: Info) -> Table:
    rows = [
        (f"{split} document {copied.document:,}", f"{copied.copies:,}", f"{copied.n_tokens:,}")
        for split, one in info.duplicates.items()
        for copied in one.most_copied
    ]
    return Table(("most copied", "copies", "tokens"), "lrr", rows)


def _languages(info: Info) -> Table:
    found, rows = info.languages, list[Row]()
    if found is not None:
        rows = [(html.printable(name), html.number(n), html.Bar(n / found.sample)) for name, n in found.counts.items()]
    return Table(("language", f"of {counted(found.sample if found else 0, 'document')}", ""), "lrt", rows)


def _cleaning(info: Info) -> Table:
    """Return a table of the documents that each filter read, changed, and dropped for each reason."""
    rows: list[Row] = []
    for cleaned in info.cleaning:
        name = cleaned.dataset
        try:
            filters = [FilterCounts.model_validate(one) for one in cleaned.counts.get("filters", ())]
        except (ValidationError, TypeError):
            rows.append((f"{html.printable(name or info.folder)}: its counts cannot be read", "", ""))
            continue
        for one in filters:
            rows.append(_tally(f"{'' if name is None else name + ', '}{one.type}: read", one.seen))
            if one.changed.documents:
                rows.append(_tally("  changed", one.changed))
            rows += [_tally(f"  dropped: {reason}", dropped) for reason, dropped in one.dropped.items()]
    return Table(("filter", "documents", "bytes"), "lrr", rows)


def _tally(name: str, tally: Tally) -> Row:
    return html.printable(name), f"{tally.documents:,}", f"{tally.bytes:,}"
