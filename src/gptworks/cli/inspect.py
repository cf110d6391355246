"""The command that shows what training learns from conversations or preference pairs: inspect."""

from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from gptworks.cli import options
from gptworks.cli.printing import console_of, prepare_with_progress, print_json, say, working
from gptworks.errors import UserError

if TYPE_CHECKING:
    from gptworks.data.conversations.packing import Examples
    from gptworks.data.opened import Prepared

Part = dict[str, Any]


def inspect(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    examples: Annotated[int, Option(min=0, help="Number of examples to show.")] = 3,
    first: Annotated[int, Option(min=1, help="The first example to show, from 1.")] = 1,
    validation: Annotated[bool, Option("--validation", help="Show held-out examples.")] = False,
    as_json: options.AsJSON = False,
) -> None:
    """Show what conversations or preference pairs teach.

    Prints figures, faults, and examples with the learned text coloured.
    """
    from gptworks.data.conversations.inspection import inspect_records
    from gptworks.data.conversations.packing import Examples
    from gptworks.data.shards import TokenShards
    from gptworks.recipe import load_recipe

    settings = load_recipe(recipe, overrides or [])
    if not settings.data.records:
        raise UserError(f"{recipe}: its sources are text, all learned. `gptworks data build` prints its size.")
    prepared = prepare_with_progress(settings)
    sides = ("chosen", "rejected") if settings.data.preferences else ("",)
    with working(f"inspecting {recipe}"):
        inspection = inspect_records(settings, prepared)
    context = settings.model.context_length
    shards = TokenShards(prepared.folder, "validation" if validation else "train")
    rows = Examples(shards, context, packing=False)
    documents = range(len(sides) * (first - 1), min(len(sides) * (first - 1 + examples), shards.n_documents))
    records = shards.examples()["record"]
    shown = []
    for i in documents:
        where, side = prepared.manifest.where(int(records[i])), sides[i % len(sides)]
        answer = {"answer": side} if side else {}
        shown.append({"where": where, **answer, "parts": parts_of(rows, i, prepared, context)})
    allowed = settings.objective.allow
    if as_json:
        findings = [{"name": f.name, "text": f.text, "allowed": f.name in allowed} for f in inspection.findings]
        print_json({**inspection.figures, "findings": findings, "examples": shown})
        return
    for line in inspection.lines:
        say(line)
    for finding in inspection.findings:
        say(f"{'allowed' if finding.name in allowed else 'stops training'}: {finding.name}: {finding.text}")
    _show(shown)


def parts_of(examples: "Examples", example: int, prepared: "Prepared", context: int) -> list[Part]:
    """Return an example's parts, each with its text, its number of tokens, and whether it is learned or cut off."""
    ids, learned = examples.tokens(example)
    kinds = [(bool(learned[i]), i > context) for i in range(len(ids))]
    return [
        {
            "text": prepared.tokenizer.decode(ids[run].tolist(), skip_special_tokens=False),
            "tokens": len(run),
            "learned": is_learned,
            "cut": is_cut,
        }
        for (is_learned, is_cut), group in groupby(range(len(ids)), key=kinds.__getitem__)
        for run in [list(group)]
    ]


def _show(examples: list[dict[str, Any]]) -> None:
    """Print learned text in green, and text beyond the context in red; without colours, mark them by ⟦⟧ and ✂."""
    from rich.text import Text

    console = console_of()
    coloured = console.color_system is not None
    console.print(
        Text("learned ", "bold green") + Text("read ") + Text("cut off", "red") if coloured else "⟦learned⟧ ✂cut off✂"
    )
    for example in examples:
        tokens = sum(part["tokens"] for part in example["parts"])
        answer = f", {example['answer']}" if "answer" in example else ""
        console.print(Text(f"\n{example['where']}{answer}: {tokens:,} tokens", "dim"))
        text = Text()
        for part in example["parts"]:
            if coloured:
                text.append(part["text"], "red" if part["cut"] else "bold green" if part["learned"] else "")
            else:
                shown = f"⟦{part['text']}⟧" if part["learned"] else part["text"]
                text.append(f"✂{shown}✂" if part["cut"] else shown)
        console.print(text)
