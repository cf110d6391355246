"""Write docs/reference/ from the settings of recipes and tasks and from the help of every command.

python docs/generate_reference.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer

from gptworks.cli import app
from gptworks.cli.help import shown_name
from gptworks.config import Recipe, TrainConfig
from gptworks.config.base import Role, Section
from gptworks.config.defaults import train_defaults
from gptworks.config.objective import NextTokenObjective
from gptworks.evaluation.task import AnyTask, TaskFile
from gptworks.presets import preset

FOLDER = Path(__file__).parent / "reference"

PAGES = {
    "recipe": ("The recipe", "", ["Recipe", "FreezeConfig", "SamplingConfig", "SweepConfig", "SweepRange"]),
    "model": ("`model`", "model", ["ModelConfig", "RopeScaling"]),
    "tokenizer": ("`tokenizer`", "tokenizer", []),
    "data": ("`data`", "data", ["DataConfig", "ValidationSplit", "MixtureMember", "Anneal"]),
    "sources": ("`data.sources`", "data.sources", []),
    "cleaning": ("`data.clean`", "data.clean", []),
    "train": ("`train`", "train", ["TrainConfig", "ParallelConfig", "RateFactors"]),
    "objective": ("`objective`", "objective", []),
    "adapter": ("`adapter`", "adapter", ["LoRAConfig"]),
}
"""Title, place in a recipe, and sections in order, for each page of settings. `KINDS` finds the sections with a
`type`."""
KINDS = {
    "tokenizer": "Tokenizer",
    "sources": "Source",
    "objective": "Objective",
    "cleaning": "Rules|Quality|Repetition|Filter|Decontaminate|Mask|Code|Headers|Duplicates|Unicode|Encoding|Tables",
}
GENERATED = "<!-- Written by docs/generate_reference.py; edit the descriptions in the source instead. -->"
MOST = 10**9
"""Larger bounds only catch typing mistakes, so the pages leave them out."""
_MODEL = preset("gpt2").model_copy(update={"n_future_tokens": 2})
DERIVED: dict[type[Section], set[str]] = {
    TrainConfig: {*train_defaults({}, _MODEL, NextTokenObjective(), True, False)}, Recipe: {"name"}, TaskFile: {"name"},
}  # fmt: skip
"""Settings whose defaults follow from the rest of a recipe, by section."""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
ON_RESUME = {"refused": "no", "recorded": "recorded", "allowed": "yes"}


def pages() -> dict[str, str]:
    """Return the text of every page by its file's name."""
    schema = Recipe.model_json_schema()
    sections = {**schema["$defs"], "Recipe": schema}
    settings = {name: "\n".join(settings_page(name, sections)) for name in PAGES}
    index = "\n".join(index_page())
    tasks, commands = "\n".join(tasks_page()), "\n".join(commands_page())
    made = {"index": index, **settings, "tasks": tasks, "commands": commands}
    return {f"{name}.md": f"{GENERATED}\n\n{text.strip()}\n" for name, text in made.items()}


def index_page() -> Iterator[str]:
    """Yield the list of pages."""
    yield "# Reference\n"
    yield "Generated from the settings and the commands; the [guide](../guide.md) shows how they work together.\n"
    yield "* [Commands](commands.md): every command with its arguments and options"
    yield "* [Python](../python.md): the functions and classes for programs and notebooks"
    for name, (title, place, _) in PAGES.items():
        yield f"* [{title}]({name}.md): settings of {f'the section `{place}`' if place else 'the top level'}"
    yield "* [Evaluation tasks](tasks.md): settings of the files that `gptworks evaluate --task` reads\n"
    yield "`gptworks schema` prints the same settings as a JSON schema, with which editors complete and check recipes."


def settings_page(name: str, sections: dict[str, Any]) -> Iterator[str]:
    """Yield the settings of a part of a recipe."""
    title, _, listed = PAGES[name]
    yield f"# {title}\n"
    yield (
        "*On resume* says whether `gptworks train --resume` accepts another value: yes; no; or *recorded*, which means "
        "that `--change` must name the setting and that the run records the step of the change. A *derived* default "
        "follows from other settings.\n"
    )
    kinds = [one for one in sections if name in KINDS and re.search(rf"({KINDS[name]})\w*$", one) and one not in listed]
    other = "Source" if name == "cleaning" else "?"
    kinds = [one for one in kinds if "type" in sections[one]["properties"] and not one.endswith(other)]
    for section in [*listed, *kinds]:
        yield from section_lines(sections[section], class_named(section), section not in listed)


def tasks_page() -> Iterator[str]:
    """Yield the settings of evaluation tasks."""
    yield "# Evaluation tasks\n"
    yield "A task is a YAML file with the settings of its `type`; [Evaluating](../topics/evaluating.md) shows one.\n"
    for kind in get_args(AnyTask):
        schema = kind.model_json_schema()
        yield from section_lines(schema, kind, True)
    yield from section_lines(schema["$defs"]["Sampled"], class_named("Sampled"), False)


def section_lines(schema: dict[str, Any], kind: type[Section], by_type: bool) -> Iterator[str]:
    """Yield a section's heading, its description, and a table of its settings."""
    fields: dict[str, Any] = dict(schema["properties"])
    heading = f"`type: {fields.pop('type')['const']}`" if by_type else kind.__name__
    yield f"## {heading}\n"
    if (kind.__doc__ or "").strip() and kind.__doc__ != Section.__doc__:
        yield f"{text_of(' '.join((kind.__doc__ or '').split()))}\n"
    resumes = any(isinstance(one, Role) for field in kind.model_fields.values() for one in field.metadata)
    if not fields:
        return
    yield "| setting | value | default | meaning |" + (" on resume |" if resumes else "")
    yield "|---|---|---|---|" + ("---|" if resumes else "")
    for name, one in fields.items():
        default = "*required*" if name in schema.get("required", ()) else default_of(one)
        if any(name in names for section, names in DERIVED.items() if issubclass(kind, section)):
            default = "*derived*"
        cells = [f"`{name}`", value_of(one), default, text_of(escaped(one.get("description", "")))]
        roles = [item for item in kind.model_fields[name].metadata if isinstance(item, Role)]
        cells += [ON_RESUME[roles[0].on_resume] if roles else ""] if resumes else []
        yield f"| {' | '.join(cells)} |"
    yield ""


def class_named(name: str) -> type[Section]:
    """Return the class of the section with this name."""
    found: list[type[Section]] = [Section]
    for one in found:
        found += one.__subclasses__()
    return next(one for one in found if one.__name__ == name)


def default_of(schema: dict[str, Any]) -> str:
    """Return a setting's default as YAML writes it, or a word for it."""
    if "default" not in schema:
        return "*derived*"
    default = schema["default"]
    if isinstance(default, dict):
        return "as below"
    if isinstance(default, float) and default.is_integer() and abs(default) < 1e15:
        default = int(default)
    return "none" if default is None else f"`{escaped(json.dumps(default, ensure_ascii=False))}`"


def value_of(schema: dict[str, Any]) -> str:
    """Return a description of a setting's values, with their bounds."""
    if "$ref" in schema:
        return linked(schema["$ref"].rpartition("/")[2])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        if "discriminator" in schema:
            return "a section with a `type`: " + ", ".join(f"`{one}`" for one in schema["discriminator"]["mapping"])
        return " or ".join(value_of(one) for one in options if one.get("type") != "null")
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(value_of(one) for one in schema['prefixItems'])}]"
        return f"list of: {value_of(schema['items'])}"
    if kind == "object":
        return f"mapping of names to: {value_of(schema['additionalProperties'])}"
    if kind == "string":
        return "path" if schema.get("format") == "path" else "text"
    if kind == "null":
        return "none"
    stated = {name: schema[name] for name in BOUNDS if abs(schema.get(name, MOST)) < MOST}
    bounds = [f"{BOUNDS[name]} {bound:,}" for name, bound in stated.items()]
    return " ".join(["yes or no" if kind == "boolean" else str(kind), ", ".join(bounds)]).strip()


def linked(section: str) -> str:
    """Return a link to the section's table."""
    for page, (_, _, listed) in PAGES.items():
        if section in listed:
            return f"[{section}]({page}.md#{section.lower()})"
    return f"[{section}](#{section.lower()})"


def escaped(text: str) -> str:
    """Return the text with pipes and line breaks escaped, for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", "\\n")


def text_of(text: str) -> str:
    """Return prose for a page: names with an underscore become code, and `<` and `*` are escaped."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"(?<![`\w./-])([\w.]*\w_\w[\w.]*\w)(?![`\w])", r"`\1`", text))
    return "".join(re.sub(r"([<*])", r"\\\1", part) if index % 2 == 0 else part for index, part in enumerate(parts))


def commands_page() -> Iterator[str]:
    """Yield every command's help."""
    yield "# Commands\n"
    yield "`gptworks COMMAND --help` prints the same. Commands that print results accept `--json`.\n"
    root = typer.main.get_command(app)
    yield from command_lines(root, typer.Context(root, info_name="gptworks"))


def command_lines(command: Any, context: Any) -> Iterator[str]:
    """Yield the help of a command and of its subcommands."""
    inner: dict[str, Any] = getattr(command, "commands", {})
    if context.parent is not None and not inner:
        yield f"## {context.command_path}\n"
        yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        yield f"{text_of(command.help or '')}\n"
        rows = [*parameter_rows(command.params, context)]
        if rows:
            yield "| name | meaning |\n|---|---|"
            yield from rows
            yield ""
    for name, one in inner.items():
        yield from command_lines(one, typer.Context(one, parent=context, info_name=name))


def parameter_rows(parameters: list[Any], context: Any) -> Iterator[str]:
    """Yield a row of a table for each argument and option."""
    for one in parameters:
        if (record := one.get_help_record(context)) is not None:
            name = record[0] if one.param_type_name == "option" else record[0].partition(" <")[0]
            yield f"| `{escaped(shown_name(name))}` | {text_of(escaped(record[1]))} |"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for file, page in pages().items():
        (FOLDER / file).write_text(page, encoding="utf-8")
