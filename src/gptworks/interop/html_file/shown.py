"""Collect what a model's page shows at once: figures, the card, the recipe, how it was made, and the architecture."""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from gptworks import __version__
from gptworks.checkpoint import LoadedRun
from gptworks.choices import SAMPLING
from gptworks.config import Recipe
from gptworks.describe.model_sheet import ModelSheet, tensor_facts
from gptworks.files import read_text
from gptworks.infer.defaults import sampling_of
from gptworks.interop.html_file.how import how_made, public
from gptworks.interop.html_file.image import Image
from gptworks.planning.params import count_parameters
from gptworks.quantize.formats import KINDS

MOST_CARD_BYTES = 1 << 20


def shown(loaded: LoadedRun, image: Image, kind: str, capacity: int, chats: bool) -> dict[str, Any]:
    """Return the JSON tree that main.js reads: `state`, in the form in which the studio's server sends it, and `page`,
    the content of the page. All texts are fit to publish, see `public`.

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
            "recipe": _shown_recipe(recipe), "how": how_made(loaded), "sheets": _sheets(loaded),
        },
    }  # fmt: skip
    shown: dict[str, Any] = public(tree)
    return shown


def _sheets(loaded: LoadedRun) -> dict[str, Any]:
    """Return `made`, the distinct sheets of the layers, and `of`, the index in `made` of each layer's sheet. Sheets
    that differ only in the layer's number and in tensor names count as one."""
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


def _shown_recipe(recipe: Recipe) -> str:
    """Return the recipe's sections on the model and its training, as YAML; the other sections may name paths."""
    tree = recipe.model_dump(mode="json")
    return yaml.safe_dump({name: tree[name] for name in ("model", "train") if name in tree}, sort_keys=False)
