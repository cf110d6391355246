"""Check recipes that the page sends, in a process with limits, since their text and paths may be hostile.
The recipe parser and `gptworks plan` check the settings; `read_within` checks paths and addresses.
"""

import asyncio
import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from gptworks.chat_template import BUILT_IN
from gptworks.config import FileTokenizer, Recipe, settings
from gptworks.config.base import Place
from gptworks.config.explain import faults, sections_at
from gptworks.confined import Abandoned, Confined, Exceeded, Limits, Refused, Task
from gptworks.confined.child import Answer, serve
from gptworks.describe.plan_tables import plan_json, tables
from gptworks.errors import UserError
from gptworks.files import read_text as read_file
from gptworks.files import shown
from gptworks.files.fetch import check_public
from gptworks.overrides import apply_overrides
from gptworks.planning.device_table import find_device
from gptworks.planning.devices import this_cpu
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.studio.form import GIVEN_BY_THE_START, form, text_of
from gptworks.training.rehearsal.estimate import estimate
from gptworks.yaml_files import MAX_BYTES, compose_yaml, parse_yaml

Tree = dict[str, Any]
_UNMEASURED = "the run shows this machine's speed once it trains"
_LIMITS = Limits(seconds=8.0, n_bytes=3 << 30)
_WAIT_SECONDS = 30.0
_GRACE_SECONDS = 1.0
"""Seconds for answering a question after its client has left. Then the process is killed if it still works."""
_Result = TypeVar("_Result")


class Checks:
    """Sends questions about recipes to the process that checks them."""

    def __init__(self) -> None:
        setup_limits = Limits(seconds=60, n_bytes=3 << 30)
        self.children = Confined(
            "gptworks.studio.checking", None, _LIMITS, setup_limits=setup_limits, keep_bytes=1 << 30
        )
        self._threads = ThreadPoolExecutor(4, "gptworks start")

    async def ask(self, question: Tree) -> Tree:
        """Return the answer of `check` or `plan` to a question.

        Raises:
            UserError: the child process rejects the question, or answering exceeds a limit.
        """
        task, loop = Task(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                answer: Tree = await loop.run_in_executor(self._threads, lambda: self.children.ask(question, task))
            return answer
        except Refused as error:
            raise UserError(str(error)) from None
        except Exceeded as error:
            reason = str(error)
        except (TimeoutError, Abandoned):
            task.abandon()
            reason = f"it takes more than {_WAIT_SECONDS:g} seconds."
        except asyncio.CancelledError:
            loop.call_later(_GRACE_SECONDS, task.abandon)
            raise
        raise UserError(f"the recipe cannot be checked here: {reason} gptworks plan has no such limit.")

    async def in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def main() -> None:
    """Answer the parent process's questions: dictionaries whose `ask` is `check` or `plan`."""
    serve(lambda setup: _answer)


def _answer(question: Tree) -> Any:
    asked: Answer = {"check": check, "plan": plan}[question["ask"]]
    return asked(question)


def check(question: Tree) -> Tree:
    """Apply edits to a recipe's text and check it.

    The question has `text` (None: the text of `origin`), `origin` (a recipe's file or a run folder, or None), `allowed`
    (folders) and `edits` (pairs of a setting's path and its value as typed, or None to remove the setting).

    Returns:
        `text` after the edits, or unchanged if an edit fails; `given`, the settings in the text, as typed; `problems`,
        each with a `path` (None: the whole recipe) and a `message`; and for a valid recipe `defaults`, the values of
        all its settings, and `fixed`, the settings that a resumed run cannot change.

    Raises:
        UserError: `text` is None, and the origin cannot be read.
    """
    text = question["text"]
    if text is None:
        text = beginning(question["origin"])
    made: Tree = {"text": text, "given": {}, "defaults": None, "fixed": None, "problems": []}
    try:
        tree = read_text(text)
        for path, value in question["edits"]:
            text, tree = edited(text, tree, path, value)
        made |= {"text": text, "given": _given(tree)}
        recipe = read_within(tree, question)
        made["defaults"] = {one.path: text_of(to_jsonable_python(one.value)) for one in settings(recipe)}
        kept = recipe.objective.fixed_settings
        made["fixed"] = [one.path for one in settings(recipe) if one.role.on_resume == "refused" or one.path in kept]
    except UserError as error:
        cause = error.__cause__
        found = faults(cause, Recipe) if isinstance(cause, ValidationError) else [("", _plain(str(error)))]
        made["problems"] = [{"path": path or None, "message": message} for path, message in dict.fromkeys(found)]
    return made


def plan(question: Tree) -> Tree:
    """Return the answer of `gptworks plan` to a recipe's text, as JSON and as tables, for the question's `device` (if
    None, for this machine's CPU). `missing` is a sentence about missing data, or None.

    Raises:
        UserError: as for the command.
    """
    tree = read_text(question["text"]) | {"name": question["name"]}
    recipe = read_within(tree, question)
    device = this_cpu() if question["device"] is None else find_device(question["device"])
    found = estimate(recipe, lambda more: read(apply_overrides(tree, more)), device)
    return {
        "plan": plan_json(found),
        "tables": [asdict(table) for table in tables(found, unmeasured=_UNMEASURED)],
        "missing": found.data.missing,
    }


def read_text(text: str) -> Tree:
    """Parse a recipe's text into a tree.

    Raises:
        UserError: the text is not YAML, or not a mapping.
    """
    tree = parse_yaml(text, "recipe")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError("the recipe is not a mapping with the sections model, tokenizer, data, train.")
    return tree


def read(tree: Tree) -> Recipe:
    """Make a recipe from a tree; see `parse_recipe`."""
    return parse_recipe({"name": "run"} | tree)


def _plain(message: str) -> str:
    return message.removeprefix("recipe: ").removeprefix("recipe ")


# ----------------------------------------------------------------------------------- the text a new recipe starts with


def beginning(origin: str) -> str:
    """Return a recipe file's text, or the shortest text of a run's recipe, without settings in GIVEN_BY_THE_START."""
    if Path(origin).is_file():
        return _without_given(read_file(Path(origin), MAX_BYTES))
    recipe = load_recipe(origin)
    tree = recipe.model_dump(mode="json", exclude=set(GIVEN_BY_THE_START))
    for name in ("sources", "mixture"):
        given = getattr(recipe.data, name)
        tree["data"][name] = [one.model_dump(mode="json", exclude_defaults=True) for one in given]
    if not isinstance(recipe.tokenizer, FileTokenizer):
        del tree["model"]["vocab_size"]
    return _dumped(_shortest(tree, "", read(tree)))


def _without_given(text: str) -> str:
    try:
        tree = read_text(text)
    except UserError:  # a file with faults, which the page shows
        return text
    for name in GIVEN_BY_THE_START:
        if name in tree:
            text, tree = edited(text, tree, name, None)
    return text


def _shortest(tree: Tree, section: str, whole: Recipe) -> Tree:
    """Return the tree without those settings of a section whose removal leaves the recipe `whole` unchanged."""
    for name, value in (_at(tree, section) if section else tree).items():
        path = f"{section}.{name}" if section else name
        with contextlib.suppress(UserError):
            shorter = _removed(tree, path)
            if read(shorter) == whole:
                tree = shorter
                continue
        if isinstance(value, dict):
            tree = _shortest(tree, path, whole)
    return tree


# ------------------------------------------------------------------------------------------ edits of a recipe's text


def edited(text: str, tree: Tree, path: str, value: str | None) -> tuple[str, Tree]:
    """Return the text and the tree after setting `path` to `value`, or after removing the setting if `value` is None.
    The text keeps its comments if it suffices to change this setting's lines. Otherwise, the text is rewritten without
    comments.

    Raises:
        UserError: the path leads into a plain value or past a list's end, or is not a path.
    """
    after = _removed(tree, path) if value is None else apply_overrides(tree, [f"{path}={value}"])
    after = _of_its_kind(after, path)
    if after == tree:
        return text, tree
    for made in _changed_lines(text, path, _at(after, path) if value is not None else None):
        with contextlib.suppress(UserError):
            if read_text(made) == after:
                return made, after
    return _dumped(after), after


def _removed(tree: Tree, path: str) -> Tree:
    name, _, rest = path.partition(".")
    if not rest:
        return {key: value for key, value in tree.items() if key != name}
    return tree | {name: _removed(tree[name], rest)} if isinstance(tree.get(name), dict) else tree


def _of_its_kind(tree: Tree, path: str) -> Tree:
    """Return the tree. If `path` is a section's `type`, remove the section's settings that the new type lacks."""
    section, _, name = path.rpartition(".")
    kinds = next((group["kinds"] for group in form() if group["path"] == section), None)
    if name != "type" or kinds is None or "type" not in tree.get(section, {}):
        return tree
    members = sections_at((section, str(tree[section]["type"])), Recipe)
    known = {key for member in members for key in member.model_fields}
    kept = {key: value for key, value in tree[section].items() if key in known}
    return tree | {section: kept} if len(members) == 1 else tree


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _changed_lines(text: str, path: str, value: Any) -> Iterable[str]:
    """Yield candidate texts, which the caller checks, with a setting changed in its place or added after the last line
    of its section. A value of None removes the setting."""
    try:
        node = compose_yaml(text, "recipe")
    except UserError:
        return
    *sections, name = path.split(".")
    for section in sections:
        node = next((below for key, below in _items(node) if key.value == section), None)
    flow = (
        yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True).removesuffix("\n...\n").strip()
    )
    lines = text.splitlines(keepends=True)
    for key, old in _items(node):
        if key.value == name:
            if value is None:
                yield "".join(lines[: key.start_mark.line] + lines[max(old.end_mark.line, key.start_mark.line + 1) :])
            else:
                yield text[: old.start_mark.index] + flow + text[old.end_mark.index :]
    if (items := _items(node)) and value is not None:
        last, after = items[-1]
        end = after.end_mark.line + (after.end_mark.column > 0)
        yield "".join([*lines[:end], f"{' ' * last.start_mark.column}{name}: {flow}\n", *lines[end:]])


def _items(node: Any) -> list[tuple[Any, Any]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _dumped(tree: Tree) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def _given(tree: Tree, section: str = "") -> dict[str, str]:
    """Return the settings in a tree as typed, by path. A section has the value "", followed by its own settings."""
    found = {}
    groups = {group["path"] for group in form()}
    for name, value in tree.items():
        path = f"{section}.{name}" if section else name
        found[path] = "" if path in groups and isinstance(value, dict) else text_of(value)
        if isinstance(value, dict):
            found |= _given(value, path)
    return found


# ------------------------------------------------------------------------------------- allowed paths and addresses


def read_within(tree: Tree, question: Tree) -> Recipe:
    """Make a recipe from a tree, and check that it reads only allowed files and addresses.

    Users of the page may have fewer rights than the studio's owner. Paths must lie in the question's `allowed` folders
    or occur in the recipe `origin`, and must not be Python files. Addresses must be public https.

    Raises:
        UserError: a path or address is not allowed, or the recipe is invalid.
    """
    origin = question["origin"]
    known = set[str]()
    if origin is not None:
        with contextlib.suppress(UserError):  # a file with faults, which the user corrects on the page
            known = {value for _, _, value in places(load_recipe(origin))}

    def check(named: Iterable[tuple[str, Place, str]]) -> None:
        for path, place, value in named:
            if place is Place.CODE:
                raise UserError(
                    f"{path}={value} runs a file of Python, which the page does not do: gptworks train can."
                )
            if place is Place.URL:
                check_public(value)
            elif place is Place.DATASET and _is_of_the_hub(value):
                continue
            elif not (place is Place.TEMPLATE and value in BUILT_IN) and value not in known:
                _check_below(path, value, question["allowed"])

    if isinstance(source := tree.get("initialize_from"), str):  # check first: making the recipe reads that run
        check([("initialize_from", Place.PATH, source)])
    recipe = read(tree)
    check(places(recipe))
    return recipe


def places(recipe: Recipe) -> Iterable[tuple[str, Place, str]]:
    """Yield the setting, the kind and the value of each path or address in a recipe and in its sweep's choices, except
    settings in GIVEN_BY_THE_START."""
    ranges = {} if recipe.sweep is None else recipe.sweep.ranges
    for one in settings(recipe):
        if one.place is None or one.path in GIVEN_BY_THE_START:
            continue
        for value in one.value if isinstance(one.value, tuple) else (one.value,):
            if value is not None:
                yield one.path, one.place, shown(value) if isinstance(value, Path) else str(value)
        for value in getattr(ranges.get(one.path), "choices", None) or ():
            yield f"sweep.ranges.{one.path}", one.place, str(value)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?")


def _is_of_the_hub(dataset: str) -> bool:
    """Return whether `dataset` names a dataset of the Hugging Face hub and not a folder."""
    return _HUB_NAME.fullmatch(dataset) is not None and not Path(dataset).exists()


def _check_below(path: str, file: str, folders: Sequence[str]) -> None:
    """Raise a UserError if a path, or a file that its pattern matches, is outside of the folders."""
    given = Path(os.path.expanduser(file))  # noqa: PTH111 (Path.expanduser raises an error for an unknown user)
    matches = glob.iglob(str(given), recursive=True) if glob.has_magic(file) else ()  # noqa: PTH207 (as sources do)
    paths = (given, *map(Path, matches))
    check_within(path, file, paths, folders, "write the recipe to a file and use gptworks train")


def check_within(name: str, file: str, paths: Iterable[Path], folders: Sequence[str], instead: str) -> None:
    """Raise a UserError if one of the paths is outside of the folders, once links are resolved, or contains `..`, or if
    `file` is an address.

    Args:
        name, file: a setting and its value, which the error names.
        instead: the alternative that the error suggests.
    """
    roots = list(map(os.path.realpath, folders))
    for path in paths:
        real = Path(os.path.realpath(path))
        if "://" in file or ".." in path.parts or not any(real.is_relative_to(root) for root in roots):
            raise UserError(
                f"{name}={file} lies outside of {' and '.join(folders)}: start the studio in a folder around it, or "
                f"{instead}."
            )
