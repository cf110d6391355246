"""Collect the content that a model's page shows at once: figures, the model card, the recipe, the run's records of the
training, and the architecture. Paths of the machine and passwords are removed."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import yaml

from gptworks import __version__
from gptworks.checkpoint import LoadedRun
from gptworks.choices import SAMPLING
from gptworks.data.opened import find_of_run
from gptworks.describe.model_sheet import ModelSheet, tensor_facts
from gptworks.errors import UserError
from gptworks.files import read_text
from gptworks.infer.defaults import sampling_of
from gptworks.interop.html_file.image import Image
from gptworks.pages.parts import printable
from gptworks.planning.params import count_parameters
from gptworks.quantize.formats import KINDS
from gptworks.training.changes import read_history
from gptworks.training.record.card import source_name
from gptworks.training.record.metrics import LOG, read_metrics
from gptworks.training.record.outcome import read_outcome

MOST_CARD_BYTES = 1 << 20

MOST_LOSSES = 200
_PATH = re.compile(r"""(?<![^\s"'`|(=\[,])(?:file://|~|[A-Za-z]:)?(?:[\\/]+[^\\/\s"'`|()\[\],;<>]+){2,}[\\/]?""")
"""Matches an absolute path, but not the path of a URL, where other characters precede the slashes."""
_OF_PERSONS = re.compile(r"""(?:file://|[A-Za-z]:)?[\\/]+(?:home|Users)[\\/]+[^\\/]+[\\/]?""")
_SIGNED_IN = re.compile(r"://[^/\s@]+@")


def shown(loaded: LoadedRun, image: Image, kind: str, capacity: int, chats: bool) -> dict[str, Any]:
    """Return the JSON tree that main.js reads: `state`, in the form that the studio's server sends, and `page`, the
    content of the page. `public` makes all texts fit to publish.

    Args:
        kind: formats of the weights, such as int8.
        capacity: maximum length of a text in tokens.
        chats: whether the page offers conversations.
    """
    recipe, config = loaded.recipe, loaded.model.config
    parameters = count_parameters(config).total
    card = loaded.checkpoint.run_dir / "model-card.md"
    heads = f"{config.n_heads} of width {config.d_head}" + (
        f", {config.n_kv_heads} of keys and values" if config.n_kv_heads < config.n_heads else ""
    )
    sections = recipe.model_dump(mode="json", include={"model", "train"})  # other sections may name paths
    model: dict[str, Any] = {
        "id": recipe.name, "run": None, "chat": chats, "context": capacity, "parameters": parameters,
        "vocab_size": config.vocab_size, "state": "served", "checkpoints": [], "problem": None,
        "prompts": recipe.train.offered_prompts,
        "sampling": sampling_of(loaded.checkpoint.run_dir / "tokenizer")._asdict(),
    }  # fmt: skip
    tree = {
        "state": {
            "version": __version__, "parts": ["play", "read", "explain", "model", "about"], "read_only": True,
            "models": [model], "notice": None, "sampling": SAMPLING._asdict(), "place": "In this page",
            "title": recipe.name,
        },
        "page": {
            "facts": {
                "name": recipe.name, "parameters": parameters, "weights": kind, "bytes": image.n_bytes,
                "layers": config.n_layers, "width": config.d_model, "heads": heads, "vocabulary": config.vocab_size,
                "context": capacity, "step": loaded.checkpoint.step,
            },
            "card": read_text(card, MOST_CARD_BYTES, inside=card.parent) if card.exists() else None,
            "recipe": yaml.safe_dump(sections, sort_keys=False), "how": how_made(loaded), "sheets": _sheets(loaded),
        },
    }  # fmt: skip
    shown: dict[str, Any] = public(tree)
    return shown


def _sheets(loaded: LoadedRun) -> dict[str, Any]:
    """Return `made`, the distinct data sheets of the layers (see `ModelSheet`), and `of`, the index in `made` of each
    layer's sheet. Sheets that differ only in the layer's number and in tensor names count as one."""
    recipe = loaded.recipe.model_copy(update={"model": loaded.model.config})  # without the heads that exports drop
    tensors, shapes = loaded.model.state_dict(), count_parameters(recipe.model).shapes

    def stored(names: Sequence[str]) -> list[dict[str, Any]]:
        facts = []
        for name in names:
            held = [tensors[one] for one in (name, f"{name.removesuffix('.weight')}.scale") if one in tensors]
            kind = KINDS.get(held[0].dtype, "fp32")
            facts.append(tensor_facts(name, shapes[name], kind, sum(one.nbytes for one in held)))
        return facts

    sheet = ModelSheet(recipe, shapes)
    place = {"model": recipe.name, "step": loaded.checkpoint.step}
    made: dict[str, dict[str, Any]] = {}
    of = []
    for layer in range(recipe.model.n_layers):
        tree = place | sheet.at(layer, stored)
        key = json.dumps(tree | {"layer": 0}).replace(f'"blocks.{layer}.', '"blocks.')
        made.setdefault(key, tree)
        of.append(list(made).index(key))
    return {"made": list(made.values()), "of": of}


# ------------------------------------------------------------------------------------------------- what is public


def public(tree: Any) -> Any:
    """Return a JSON tree with texts that may be published: absolute paths are cut to their last part (home folders to
    ~), URLs lose user names and passwords, and U+FFFD replaces characters that cannot be shown or change the direction
    of text."""
    if isinstance(tree, dict):
        return {name: public(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [public(value) for value in tree]
    return _PATH.sub(_last_name, _SIGNED_IN.sub("://", printable(tree))) if isinstance(tree, str) else tree


def _last_name(found: re.Match[str]) -> str:
    path = found[0]
    return "~" if _OF_PERSONS.fullmatch(path) else re.split(r"[\\/]+", path.rstrip("\\/"))[-1]


# ------------------------------------------------------------------------------------------------ how it was made


def how_made(loaded: LoadedRun) -> dict[str, Any]:
    """Return the run's records of how its model was made. A figure that is not recorded is None or missing."""
    recipe, checkpoint = loaded.recipe, loaded.checkpoint
    run_dir, state, outcome = checkpoint.run_dir, _state(loaded), read_outcome(checkpoint.run_dir)
    losses = _losses(loaded)
    imported = checkpoint.step == 0 and not (run_dir / LOG).exists()
    rows = {} if isinstance(outcome, str) else outcome.training
    forked = False
    with suppress(UserError, OSError):
        forked = bool(read_history(run_dir).origins)
    return {
        "model": recipe.model.model_dump(mode="json"), "parameters": count_parameters(recipe.model).total,
        "step": checkpoint.step,
        "steps": max((row[0] for row in losses), default=None), "tokens": state.get("tokens"),
        "seconds": state.get("seconds"), "device": rows.get("device"), "rows": rows,
        "loss": next((row[2] for row in losses if row[0] == checkpoint.step and row[2] is not None), None),
        "losses": _thinned(losses), "objective": recipe.objective.type, "imported": imported,
        "began": recipe.initialize_from.name if recipe.initialize_from else None,
        "kept": next((name for name in ("adapter", "freeze") if getattr(recipe, name) is not None), None),
        "random": recipe.initialize_from is None and not imported and not forked,
        "data": None if imported else _data(loaded, state.get("data_fingerprint")),
    }  # fmt: skip


def _state(loaded: LoadedRun) -> dict[str, Any]:
    with suppress(UserError, OSError):
        return loaded.checkpoint.state()
    return {}


def _losses(loaded: LoadedRun) -> list[tuple[int, float | None, float | None]]:
    """Return (step, training loss, held-out loss) for each step with a loss, in nats per token. A missing loss
    is None."""
    rows: dict[int, list[float | None]] = {}
    with suppress(UserError, OSError):
        for record in read_metrics(loaded.checkpoint.run_dir / LOG, kinds=("train", "validation")):
            loss = record.get("loss")
            if isinstance(loss, int | float) and math.isfinite(loss):
                rows.setdefault(record["step"], [None, None])[record["kind"] == "validation"] = round(loss, 5)
    return [(step, *rows[step]) for step in sorted(rows)]  # type: ignore[misc]


def _thinned(rows: list[Any]) -> list[Any]:
    """Return at most `MOST_LOSSES` rows, by step: all if they fit, else the last row and evenly spaced others. Up to
    half of the places go to rows with a held-out loss, and more if there are few other rows."""
    held = [row for row in rows[:-1] if row[2] is not None]
    others = [row for row in rows[:-1] if row[2] is None]
    room = MOST_LOSSES - 1
    held = _every_so_many(held, max(room // 2, room - len(others)))
    others = _every_so_many(others, room - len(held))
    return sorted(held + others, key=lambda row: row[0]) + rows[-1:]


def _every_so_many(rows: list[Any], most: int) -> list[Any]:
    """Return every n-th row, with the smallest n that leaves at most `most` rows."""
    return rows[:: math.ceil(len(rows) / most)] if rows else rows


def _data(loaded: LoadedRun, fingerprint: object) -> dict[str, Any] | None:
    """Return the name and the sizes of the run's training text. Return only the name if the run's dataset is not found,
    and None if the recipe names no text."""
    recipe = loaded.recipe
    names = [*map(source_name, recipe.data.sources), *(one.name for one in recipe.data.mixture)]
    if not names:
        return None
    sizes: dict[str, Any] = {}
    with suppress(UserError, OSError):
        found = find_of_run(recipe, loaded.checkpoint.run_dir, fingerprint) if isinstance(fingerprint, str) else None
        if found is not None and (files := found.manifest.splits.get("train")) is not None:
            sizes = {"documents": files.documents, "tokens": files.tokens, "bytes": files.text_bytes}
    return {"name": ", ".join(names), **sizes}
