"""The page of a model: well-formed, self-contained, with the sheet's numbers, and with texts that fit their boxes."""

import html
import json
import re
from functools import cache
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import tiny
from gptworks.describe.diagram import flow
from gptworks.describe.page import to_html
from gptworks.describe.sheet import Sheet, describe, label
from gptworks.errors import UserError
from gptworks.pages.drawing import text_width
from gptworks.pages.page import write_page
from gptworks.presets import PRESETS
from gptworks.recipe import parse_model
from test_sheet import LABORATORY_ON

VARIANTS: dict[str, dict[str, Any]] = {
    "parallel": {
        "preset": "gpt2-medium", "parallel_residual": True, "position": "rope", "rope_fraction": 0.25, "qk_norm": True,
        "attention_bias": "qkv", "tie_embeddings": False,
    },
    "shared": {
        "preset": "moe-115m", "n_experts": 64, "n_experts_per_token": 6, "d_ff": 256, "d_ff_shared": 512,
        "window": 128, "window_pattern": ["window", "window", "full"], "window_rope_theta": 500,
        "rope_scaling": {"type": "yarn", "factor": 4}, "rope_fraction": 0.5, "rope_pattern": ["rope", "rope", "none"],
    },
    "shared-biased": {"preset": "gpt3-13b", "n_experts": 4, "d_ff_shared": 5120, "parallel_residual": True},
    "plain": {
        "preset": "gpt2-tiny", "n_layers": 1, "position": "none", "attention_scale": 0.3, "attention_bias": "out",
        "embedding_scale": 12.0, "residual_scale": 0.22, "logit_divisor": 8.0,
        "norm_placement": "after", "qk_norm": "whole", "bigram_vocab_size": 2048,
    },
    "all-banded": {"preset": "modern-9m", "window": 1, "mlp": "relu2", "n_kv_heads": 1, "dropout_residual": 0.125,
                   "norm_placement": "both", "attention_softcap": 50.0, "logit_softcap": 30.0},
    "vast": {
        "preset": "gpt3-175b", "vocab_size": 1_000_000, "context_length": 4_000_000, "n_layers": 1000,
        "position": "rope", "rope_theta": 123_456_789, "rope_fraction": 0.5,
        "rope_scaling": {"type": "dynamic", "factor": 4}, "attention_scale": 0.123456, "qk_norm": True,
        "n_experts": 512, "d_ff_shared": 131_072, "mlp": "swiglu",
        "window": 1_234_567, "window_pattern": ["window", "full"],
    },
}  # fmt: skip
"""Every variant that the figure draws, and one that is too large for it."""

MODELS = [*PRESETS, *VARIANTS]


@cache
def sheet(name: str) -> Sheet:
    return describe(parse_model(VARIANTS.get(name, {"preset": name}), name), name)


@cache
def page(name: str) -> str:
    return to_html(sheet(name))


def drawings(name: str) -> list[ElementTree.Element]:
    """Return the page's SVGs, which show the shares."""
    found = re.findall(r"<svg [^>]*role=.*?</svg>", page(name), re.DOTALL)
    return [ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", svg)) for svg in found]


class Reader(HTMLParser):
    """Checks that elements nest, and collects the exact values, the tables and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.data: list[tuple[float, str]] = []
        self.tables: list[list[list[str]]] = []
        self.headers: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "data":
            self.data.append((float(dict(attributes)["value"] or "nan"), ""))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "th":
            self.headers.append(dict(attributes))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> outside of a drawing"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if "style" in self.open:
            return
        self.text += text
        if "data" in self.open:
            self.data[-1] = (self.data[-1][0], self.data[-1][1] + text)
        if self.open and ("td" in self.open or "th" in self.open):
            self.tables[-1][-1][-1] += text


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


def numbers(text: str) -> set[float]:
    return {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)}


def quantity(text: str) -> float:
    """Parse `530.3 MB` or `265.2 million` as a number."""
    number, _, unit = text.partition(" ")
    powers = {
        "k": 1e3,
        "M": 1e6,
        "G": 1e9,
        "T": 1e12,
        "P": 1e15,
        "thousand": 1e3,
        "million": 1e6,
        "billion": 1e9,
        "trillion": 1e12,
    }
    return float(number.replace(",", "")) * powers.get(unit, powers.get(unit[:1], 1))


# The page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_page_is_well_formed(name: str) -> None:
    reader = Reader(page(name))
    assert all(header.get("scope") in ("row", "col") for header in reader.headers)
    for table in reader.tables:
        assert len({len(row) for row in table}) == 1
    for svg in drawings(name):
        assert svg.attrib["role"] == "img"
        identified = {element.attrib["id"] for element in svg if element.tag in ("title", "desc") and element.text}
        assert set(svg.attrib["aria-labelledby"].split()) == identified


@pytest.mark.parametrize("name", MODELS)
def test_the_page_refers_to_nothing_outside(name: str) -> None:
    text = page(name).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//[a-z]|<script|<link|<img|<iframe|\bsrc=|href=|url\(|@import|@font-face", text)


@pytest.mark.parametrize("name", MODELS)
def test_exact_values_are_those_of_the_json_and_of_what_is_read(name: str) -> None:
    model = sheet(name).to_json()
    count = model["parameters"]
    per_layer = sum(group["per_layer"] or 0 for group in count["groups"].values())
    idle_per_layer = (count["total"] - count["active"]) / model["model"]["n_layers"]
    known = {float(leaf) for leaf in leaves(model) if isinstance(leaf, int | float)} | {per_layer}
    known |= {per_layer - idle_per_layer} if model["model"]["n_experts"] else set()
    data = Reader(page(name)).data
    assert len(data) > 20
    for value, text in data:
        assert value in known
        assert quantity(text) == pytest.approx(value, rel=5.1e-4, abs=0.5)


@pytest.mark.parametrize("name", MODELS)
def test_the_tables_are_the_json(name: str) -> None:
    model = sheet(name).to_json()
    parameters, memory, operations, *rest = Reader(page(name)).tables
    assert bool(rest) == ("published" in model)

    groups, total = model["parameters"]["groups"], model["parameters"]["total"]
    named = {row[0].replace(" ", "_").replace("query/key", "qk").lower(): row for row in parameters[1:]}
    assert set(named) - {"total", "for_a_token"} == {g for g, group in groups.items() if group["total"]} | {"head"}
    for key, group in groups.items():
        if key in named:
            _, tensors, a_layer, all_layers, share, _ = named[key]
            assert all_layers == f"{group['total']:,}"
            assert a_layer == ("" if group["per_layer"] is None else f"{group['per_layer']:,}")
            shapes = {float(size) for shape in group["tensors"].values() for size in shape}
            assert shapes <= numbers(tensors)
            if share and not share.startswith("<"):
                assert float(share[:-1]) == pytest.approx(100 * group["total"] / total, abs=0.0501)
    assert named["total"][3] == f"{total:,}"
    if model["model"]["n_experts"]:
        assert named["for_a_token"][3] == f"{model['parameters']['active']:,}"

    for row, key in zip(
        memory[1:],
        ("weights_fp32_bytes", "weights_bf16_bytes", "kv_cache_fp16_bytes_per_token", "kv_cache_fp16_bytes"),
        strict=True,
    ):
        assert quantity(row[1]) == pytest.approx(model["memory"][key], rel=5.1e-4)

    flops = model["flops"]
    parts = {sheet(name).words_of(part): n for part, n in flops["parts_per_token"].items()}
    assert {row[0] for row in operations[1:]} == {*parts, "forward", "forward, only causal pairs", "training"}
    for part, cost, share, _ in operations[1:]:
        if part in parts:
            assert quantity(cost) == pytest.approx(parts[part], rel=5.1e-4)
            percent = 0.0 if share.startswith("<") else float(share[:-1])
            assert percent == pytest.approx(100 * parts[part] / flops["forward_per_token"], abs=0.0501)


@pytest.mark.parametrize("name", MODELS)
def test_every_setting_stands_on_the_page(name: str) -> None:
    pairs = dict(re.findall(r"<div><dt>([\w.]+)</dt><dd>([^<]*)</dd></div>", page(name)))
    settings = sheet(name).to_json()["model"]
    if settings["rope_scaling"]:
        settings |= {f"rope_scaling.{key}": value for key, value in settings.pop("rope_scaling").items()}
    assert set(pairs) == set(settings)
    for key, value in settings.items():
        written = (
            ", ".join(value) if isinstance(value, list) else value if isinstance(value, str) else json.dumps(value)
        )
        assert pairs[key] == written


def test_published_figures_stand_beside_exact_ones() -> None:
    for name in ("custom-300m", "gpt3-125m", "gpt2-mini", "vaani-427m", "llm-200m"):
        table = Reader(page(name)).tables[3]
        figures = sheet(name).to_json()["published"]
        assert [(row[0], row[4]) for row in table[1:]] == [(figure["quantity"], figure["note"]) for figure in figures]
    assert ["parameters, as stated", "251,000,000", "265,165,056", "-5.3 %"] in [row[:4] for row in table]


def test_text_is_escaped() -> None:
    name = "<b>\"Tom\" & 'Jerry'</b>"
    text = to_html(describe(sheet("gpt2-tiny").config, name))
    assert "<b>" not in text
    reader = Reader(text)
    assert name in reader.text


def test_the_page_is_written_whole_or_not(tmp_path: Path) -> None:
    path = tmp_path / "sheet.html"
    path.write_text("old")
    write_page(page("gpt2-tiny"), path, "--html")
    assert path.read_text(encoding="utf-8") == page("gpt2-tiny")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="is a folder"):
        write_page(page("gpt2-tiny"), tmp_path, "--html")
    with pytest.raises(UserError, match="there is no folder"):
        write_page(page("gpt2-tiny"), tmp_path / "missing" / "sheet.html", "--html")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    result = tiny.gptworks("describe", "gpt2-tiny", "--html", tmp_path / "sheet.html", "--json")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "sheet.html").read_text(encoding="utf-8") == page("gpt2-tiny")
    assert json.loads(result.stdout) == json.loads(json.dumps(sheet("gpt2-tiny").to_json()))
    assert "sheet.html" in result.stderr
    assert tiny.gptworks("describe", "gpt2-tiny", "--html", tmp_path).returncode == 2


def test_a_model_of_the_laboratory_has_a_page_with_each_group() -> None:
    about = describe(parse_model({"preset": "modern-9m", **LABORATORY_ON, "bigram_vocab_size": 512}, "laboratory"))
    written = to_html(about)
    for group in about.groups:
        assert label(group) in written and f"{group.total:,}" in written
    repeated = to_html(describe(parse_model({"preset": "modern-9m", "layer_repeats": 2}, "repeated")))
    assert "× block, 2 times over" in repeated


# The architecture -----------------------------------------------------------------------------------------------


def operations(name: str) -> str:
    """Return the text of the architecture's drawing, a line for each operation."""
    [drawn] = re.findall(r'<div class="flow">.*?</section>', page(name), re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", drawn))


@pytest.mark.parametrize("name", MODELS)
def test_numbers_in_the_drawing_are_dimensions_and_counts(name: str) -> None:
    c = sheet(name).config
    n_banded = sum(window is not None for window in c.layer_windows)
    dimensions = {
        c.vocab_size, c.context_length, c.n_layers, c.d_model, c.n_heads, c.n_kv_heads, c.d_head, c.d_ff, c.d_ff_shared,
        c.n_heads * c.d_head, c.n_kv_heads * c.d_head, c.n_experts, c.n_experts_per_token, c.window, n_banded,
        c.d_rotary, c.rope_theta, c.window_rope_theta, c.original_context_length, c.attention_scale, c.dropout_mlp,
        c.dropout_embedding, c.dropout_attention, c.dropout_residual, c.embedding_scale, c.residual_scale,
        c.logit_divisor, c.attention_softcap, c.logit_softcap, c.bigram_vocab_size,
        2, 3,  # of a kind: query, key and value, gate and up
        *([c.rope_scaling.factor] if c.rope_scaling else []),
    }  # fmt: skip
    shown = numbers(operations(name))
    assert shown <= {float(number) for number in dimensions if number is not None}
    assert shown >= {c.vocab_size, c.d_model, c.n_layers, c.n_heads, c.d_head, c.d_ff, c.n_kv_heads * c.d_head}


@pytest.mark.parametrize("name", MODELS)
def test_the_drawing_has_the_operations_of_the_terminal(name: str) -> None:
    drawn = " ".join(operations(name).split())
    boxes = flow(sheet(name).config)
    rows = [*boxes.embedding, *boxes.entry, *boxes.attention, *boxes.mlp, *boxes.output]
    assert all(" ".join(" ".join(row).split()) in drawn for row in rows)


def test_the_drawing_shows_what_the_model_has() -> None:
    def has(name: str, *words: str) -> None:
        assert all(word in operations(name) for word in words), operations(name)

    def lacks(name: str, *words: str) -> None:
        assert not any(word in operations(name) for word in words), operations(name)

    has("llm-200m", "24 × block", "3,072 × 768", "B × 12 × T × 64", "rotate queries", "SiLU(gate) × up", "tied")
    lacks("llm-200m", "position embedding", "RMSNorm", "expert", "read the same input")
    has("gpt3-175b-banded", "+ position embedding", "48 of 96 see 256", "+ bias")
    has("parallel", "first 16 of 64", "RMSNorm of queries and keys", "1,024 × 1,024 + bias", "read the same input")
    lacks("parallel", "tied")
    has("moe-115m", "router", "8 experts, 2 for each token", "B × T × 2 × 1,024")
    has("shared", "a shared expert for every token", "yarn, × 4 from 256", "64 × 512")
    has("plain", "softmax(q·kᵀ × 0.3)", "1 × block")
    lacks("plain", "rotate", "position")
    has("all-banded", "ReLU²", "8 of 8 see 1", "dropout 0.125")


# Text and its room ----------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]


@cache
def advances(bold: bool) -> dict[int, float]:
    """Return each letter's width relative to the font size, in DejaVu Sans, the widest of the usual fonts."""
    ttfont, matplotlib = pytest.importorskip("fontTools.ttLib"), pytest.importorskip("matplotlib")
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ttfont.TTFont(fonts / f"DejaVuSans{'-Bold' * bold}.ttf")
    widths, unit = font["hmtx"], font["head"].unitsPerEm
    return {code: widths[glyph][0] / unit for code, glyph in font.getBestCmap().items()}


def set_width(text: str, size: float, bold: bool) -> float:
    return sum(advances(bold)[ord(letter)] for letter in text) * size


def place(element: ElementTree.Element) -> Box:
    """Return the left, top, right and bottom of a rendered text."""
    at, text = element.attrib, element.text or ""
    x, y, size = (float(at[key]) for key in ("x", "y", "font-size"))
    width = set_width(text, size, bold=at["class"] == "name")
    before = {"start": 0.0, "middle": width / 2, "end": width}[at["text-anchor"]]
    if "transform" in at:
        return x - 0.75 * size, y + before - width, x + 0.2 * size, y + before
    return x - before, y - 0.75 * size, x - before + width, y + 0.2 * size


def boxes(svg: ElementTree.Element) -> list[Box]:
    rects = [[float(rect.attrib[key]) for key in ("x", "y", "width", "height")] for rect in svg.iter("rect")]
    return [(x, y, x + width, y + height) for x, y, width, height in rects]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def within(a: Box, b: Box) -> bool:
    return b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]


def spilled(svg: ElementTree.Element) -> list[str]:
    """Return the texts that leave the drawing, cross a box's edge, or overlap each other."""
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    placed = [(element.text or "", place(element)) for element in svg.iter("text")]
    faults = [text for text, at in placed if not within(at, (0, 0, width, height))]
    faults += [text for text, at in placed for box in boxes(svg) if overlap(at, box) and not within(at, box)]
    return faults + [f"{a} / {b}" for (a, at), (b, bt) in combinations(placed, 2) if overlap(at, bt)]


@pytest.mark.parametrize("name", MODELS)
def test_text_stays_within_its_boxes(name: str) -> None:
    for svg in drawings(name):
        assert spilled(svg) == []


def test_a_text_that_is_too_long_is_noticed() -> None:
    [shares] = drawings("llm-200m")
    for element in shares.iter("text"):
        if element.text == "Operations for a token":
            element.text *= 6
    assert any("Operations" in fault for fault in spilled(shares))


def test_no_letter_is_wider_than_estimated() -> None:
    for bold in (False, True):
        for letter in [*map(chr, range(32, 127)), *"×·√ᵀθ²…–"]:
            assert text_width(letter, 1, bold) >= set_width(letter, 1, bold), letter
