"""Export a run as a page: its weights, tokenizer, chat template, sampling settings, card and recipe in one file, or in
a folder for a static host."""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from gptworks.chat_template import load_chat_template
from gptworks.checkpoint import Report, choose_checkpoint, load_run
from gptworks.choices import HTMLWeights
from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.files import fetched_path, new_folder, open_new, replacing_by_name, write_whole
from gptworks.interop.html_file.blocks import blocks
from gptworks.interop.html_file.checking import Check, accepted, check_file
from gptworks.interop.html_file.image import Image, make_image
from gptworks.interop.html_file.page import model_page
from gptworks.interop.html_file.shown import public, shown
from gptworks.interop.html_file.words import words_of
from gptworks.interop.steps import leave_out_heads
from gptworks.kernels.step import refused_architecture
from gptworks.kernels.wasm import module
from gptworks.model.gpt import GPT
from gptworks.planning.params import count_parameters
from gptworks.quantize.convert import check_known
from gptworks.quantize.linear import weights_of
from gptworks.recipe import load_recipe
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import load_tokenizer
from gptworks.units import readable

MOST_PARAMETERS = 600_000_000
MOST_CACHE_BYTES = 1 << 28
"""Maximum size of the cached keys and values; the context is cut to fit."""
FP32_CACHE_BYTES = 1 << 26
"""Keys and values are cached in fp32 if they then take at most this size, or if the weights are in fp32; otherwise in
bf16."""
BYTES_PER_SECOND = {"fp32": 5e9, "bf16": 3e9, "int8": 6e9, "int4": 5e9}
"""Bytes of weights that one core reads per second in Chromium: 60 % of the best speed measured with 430M parameters on
a busy server (2026)."""
TOKEN_SECONDS = 1e-4
"""Seconds per token for other work: sampling, scores and drawing."""

HEADERS = """/*
  Cross-Origin-Opener-Policy: same-origin
  Cross-Origin-Embedder-Policy: require-corp
"""
"""Content of the file _headers for Netlify and Cloudflare Pages. Browsers let a page with these headers use threads."""


@dataclass(frozen=True)
class Export:
    """The result of exporting a run to a page."""

    file: Path
    weights: str
    bytes: int
    weight_bytes: int
    """Bytes of the weights; as text in the page, they take 16 to 18 % more."""
    parameters: int
    step: int
    context: int
    check: Check | None
    """The result of the comparison with the engine; None: the file is unchecked."""
    unchecked: str | None
    """The reason why the file is unchecked; None if it was checked."""
    notes: tuple[str, ...]


def export_html(
    run: str | Path,
    out: str | Path,
    *,
    weights: HTMLWeights | None = None,
    checkpoint: str = "best",
    verify: bool = True,
    split: bool = False,
    report: Report = lambda _: None,
) -> Export:
    """Write a run as one HTML file, in which the model runs in a browser, without a network.

    The file is written piece by piece, and has a temporary path until it is checked.

    Args:
        weights: number format of the matrices. None: a quantized run's own format, otherwise int8.
        verify: compare the file with the engine, in a browser or else in Node; a file that differs is deleted. On a
            machine that cannot compare them, the file stays unchecked.
        split: make `out` a folder for a static host: index.html, and the kernels and weights in files next to it.

    Raises:
        UserError: the run does not exist, or is quantized in another format than `weights`; `out` exists; `split` is
            false, and `out` does not end in .html or .htm; the page does not support the architecture or the
            tokenizer; or the model is too large.
        RunError: the disk is full or fails, or the file differs from the engine.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists: choose another path, or delete it.")
    if not split and out.suffix not in (".html", ".htm"):
        raise UserError(f"{out}: give it a name that ends in .html, without which browsers show a page as plain text.")
    if weights is not None:
        check_known(weights, get_args(HTMLWeights))
    folder = fetched_path(run)
    chosen = choose_checkpoint(folder, checkpoint, report)
    _check_computable(load_recipe(folder))
    tokenizer = load_tokenizer(folder / "tokenizer")
    words = words_of(tokenizer)
    template = load_chat_template(folder / "tokenizer", tokenizer)
    taken = weights or ("auto" if chosen.is_quantized else "int8")
    loaded = load_run(folder, checkpoint, weights=taken, report=report)
    model = loaded.model
    notes = leave_out_heads(model)
    if template is not None and not accepted(template):
        notes.append("the page has no conversations: the run's chat template refuses short ones, or takes too long")
        template = None
    kind = weights_of(model)
    capacity, cache = _cache_of(model, notes)
    image = make_image(model, capacity, cache)
    parameters = count_parameters(model.config).total
    rate = 1 / (image.n_bytes / BYTES_PER_SECOND[min(kind.split(", "))] + TOKEN_SECONDS)
    size, memory = readable(image.n_bytes, "B"), readable(image.n_room, "B")
    text = "" if split else f", as text some {readable(image.n_bytes * 1.17, 'B')}"
    report(
        f"{parameters:,} parameters in {kind}: {size}{text}; the page takes {memory} of memory and "
        f"writes some {rate:,.0f} tokens a second on one core"
    )
    about = {
        "name": public(loaded.recipe.name), "step": loaded.checkpoint.step, "context": capacity,
        "module_bytes": len(module()), "words": words,
        "chat": template and {
            "source": template.source, "names": dict(special_tokens(tokenizer).names), "ends": template.end_token_ids,
        },
        "model": {
            "vocabulary": model.config.vocab_size, "capacity": capacity, "model": image.model,
            "pointers": image.pointers, "n_bytes": image.n_bytes, "n_room": image.n_room, "shape": shape_of(model),
        },
    }  # fmt: skip
    page = shown(loaded, image, kind, capacity, template is not None)
    found: Check | str = "--no-verify"
    with new_folder(out, image.n_bytes) if split else replacing_by_name(out) as aside:
        file = aside / "index.html" if split else aside
        n_bytes = _write(file, page["page"]["facts"]["name"], page, about, _blocks(image), split)
        if verify:
            found = check_file(file, split, model, min(kind.split(", ")), capacity, cache, tokenizer, template)
    check, reason = (found, None) if isinstance(found, Check) else (None, found)
    return Export(
        out, kind, n_bytes, image.n_bytes, parameters, loaded.checkpoint.step, capacity, check, reason, tuple(notes)
    )


def _blocks(image: Image) -> Iterator[tuple[str, bytes]]:
    yield "kernels", module()
    for i, block in enumerate(blocks(image.content())):
        yield f"weights-{i}", block


def _write(
    file: Path, title: str, page: Any, about: dict[str, Any], blocks: Iterable[tuple[str, bytes]], split: bool
) -> int:
    """Write the page and, if it is split, the blocks next to it; return their size in bytes."""
    n_bytes = 0
    if split:
        about["files"] = {}
        for name, content in blocks:
            digest = hashlib.sha256(content).digest()
            about["files"][name] = f"{name}-{digest.hex()[:8]}.bin", base64.b64encode(digest).decode("ascii")
            write_whole(file.with_name(about["files"][name][0]), content, new=True)
            n_bytes += len(content)
        write_whole(file.with_name("_headers"), HEADERS, new=True)
        blocks = ()
    with open_new(file) as opened:
        for piece in model_page(title, page, about, blocks):
            n_bytes += opened.write(piece.encode())
    return n_bytes


def _check_computable(recipe: Recipe) -> None:
    """Raise a UserError, before the model is loaded, if a page cannot hold or compute the model."""
    if reason := refused_architecture(recipe.model):
        raise UserError(
            f"--format html computes with the C++ engine, and {reason.rstrip('.')}. Export the run with --format hf."
        )
    if (n := count_parameters(recipe.model).total) > MOST_PARAMETERS:
        raise UserError(
            f"--format html: the model has {n:,} parameters and a page holds {MOST_PARAMETERS:,}. Export the run with "
            f"--format hf or gguf."
        )


def _cache_of(model: GPT, notes: list[str]) -> tuple[int, torch.dtype]:
    """Return the number of positions and the dtype of the page's cache; add a note if the context is cut."""
    config = model.config
    of_position = 2 * config.n_layers * config.n_kv_heads * config.d_head  # numbers cached per position
    is_small = model.token_embedding.weight.dtype == torch.float32 or (
        4 * of_position * config.context_length <= FP32_CACHE_BYTES
    )
    cache = torch.float32 if is_small else torch.bfloat16
    most = MOST_CACHE_BYTES // (of_position * cache.itemsize) // 16 * 16
    if most < config.context_length:
        taken = readable(MOST_CACHE_BYTES, "B")
        notes.append(
            f"the context here is {most:,} tokens of the model's {config.context_length:,}, whose keys and values take "
            f"{taken}"
        )
    return min(most, config.context_length), cache


def shape_of(model: GPT) -> dict[str, int]:
    """Return the sizes of the values that a trace records (js/trace.js)."""
    return {name: getattr(model.config, name) for name in ("n_layers", "n_heads", "d_head", "d_model", "d_ff")}
