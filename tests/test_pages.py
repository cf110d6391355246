"""Pages show text from files and never run it: hostile strings in every field that a page reads stay text."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import tiny
from gptworks.config import ModelConfig, Recipe, SweepConfig, SweepRange
from gptworks.describe.page import to_html as sheet_page
from gptworks.describe.sheet import describe
from gptworks.errors import UserError
from gptworks.pages.chart import Chart, Series
from gptworks.pages.page import page
from gptworks.pages.parts import MOST_CHARACTERS, key_figures, number, paragraph, samples, section, settings, table
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.runs import compare, report, sweep_page
from gptworks.runs.history import History, read_history
from gptworks.runs.sweep import Sweep, TrialResult
from histories import training, validation, write_run

MARK = "zq7"
"""In every payload: how often it is read from the page says how many fields the page showed."""

PAYLOADS = {
    "script": f"{MARK}<script>alert(1)</script>",
    "attribute": f'{MARK}"><img src=x onerror=alert(1)>',
    "single quotes": f"{MARK}'/><svg onload=alert(1)>",
    "end of style": f"{MARK}</style></title></textarea><script>alert(1)</script>",
    "end of drawing": f"{MARK}</text></svg><iframe srcdoc='<script>alert(1)</script>'>",
    "address": f"{MARK}javascript:alert(1)",
    "template": MARK + "{{ 7 * 7 }}{% raw %}{# #}",
    "entity": f"{MARK}&lt;script&gt;&#60;script>",
    "comment": f"{MARK}<!--<![CDATA[]]>-->",
    "nul": f"{MARK}\0<scr\0ipt>",
    "controls": f"{MARK}\x01\x08\x0b\x1b[31m\x7f\x85\ufffe",
    "direction": f"{MARK}\u202egnirts desrever\u2066",
    "long": MARK + "<b>" * 20_000,
}


class Structure(HTMLParser):
    """A page's elements with the names of their attributes, in order, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.values: list[tuple[str, str]] = []
        self.text = self.style = ""
        self._in_style = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attributes)))
        self.values += [(name, value or "") for name, value in attributes]
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, text: str) -> None:
        if self._in_style:
            self.style += text
        else:
            self.text += text


# Everything that a page reads, with a payload in each of its strings ---------------------------------------------


def poisoned(value: Any, payload: str) -> Any:
    """Return a JSON value with the payload at the end of every string and every key."""
    if isinstance(value, dict):
        return {f"{key}{payload}": poisoned(item, payload) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, payload) for item in value]
    return f"{value}{payload}" if isinstance(value, str) else value


def string_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from string_paths(item, (*path, key))
    if isinstance(value, str):
        yield path


def with_payload(tree: dict[str, Any], payload: str, accepts: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return a tree with the payload in every string for which the result is still accepted."""
    for path in list(string_paths(tree)):
        changed = json.loads(json.dumps(tree))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] += payload
        try:
            accepts(changed)
        except (UserError, ValueError):
            continue
        tree = changed
    return tree


def hostile_recipe(folder: Path, payload: str) -> Recipe:
    folder.parent.mkdir(parents=True, exist_ok=True)
    tree = tiny.recipe_tree(folder.parent) | {"run_dir": str(folder)}
    tree["model"] |= {"vocab_size": 43}
    tree["train"] |= {"sample_prompts": ["prompt"]}
    short = payload[:2000].replace("\0", "")  # no recipe is read with one
    return parse_recipe(with_payload(tree, short, parse_recipe))


def hostile_run(folder: Path, payload: str) -> History:
    """Write a run folder in which every string is hostile, as in one copied from an unknown source."""
    folder.mkdir(parents=True)
    save_recipe(hostile_recipe(folder, payload), folder / "recipe.yaml")
    parts = {"seconds_by_part": {f"forward{payload}": 1.0, f"b{payload}": 2.0}, f"x{payload}_bytes": 123}
    records = [
        *(training(step, 3.0 / step, gradient_norm_by_layer=[1.0, 2.0], **parts) for step in range(1, 8)),
        *(validation(step, 3.0 / step, 2.0) | {"unit": f"nats{payload}", f"more{payload}": payload} for step in (2, 4)),
        {"kind": "sample", "step": 4, "prompt": f"prompt{payload}", "text": f"text{payload}"},
        {"kind": "skipped", "step": 5, "loss": f"nan{payload}", "grad_norm": payload},
        {"kind": "rollback", "step": 5, "from_step": 7, "why": payload},
        {"kind": f"surprise{payload}", "step": 6, "anything": [payload, {payload: payload}]},
    ]
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            file.write(json.dumps(poisoned(record, payload)) + "\n")  # no kind, no step: no record
    outcome = {
        "reason": payload, "step": 7, "tokens": 9, "seconds": 1.0, "skipped_steps": 0, "best_step": 4,
        "best_validation_loss": 1.0, "predicted_memory_bytes": 1, "measured_memory_bytes": None,
        "training": {f"ended{payload}": f"finished{payload}", "sources": payload},
    }  # fmt: skip
    (folder / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
    (folder / "model-card.md").write_text(f"# {payload}\n## Training\n\n| | |\n|---|---|\n| {payload} | {payload} |\n")
    evaluation = {
        "name": f"task{payload}", "kind": f"text{payload}", "run": payload, "step": 3, "n_items": 3, "shots": 1,
        "fingerprint": payload, "settings": {payload: payload}, "notes": [payload], "items": [{"answer": payload}],
        "metrics": {f"loss{payload}": {"kind": "mean", "statistics": [[1.0, 1.0]], "value": 1.0, "low": None,
                                       "high": None}},
        "details": {"positions": [{"first": 1, "last": 8, "loss": 2.0}, {"first": 9, "last": 16, "loss": 1.5}]},
    }  # fmt: skip
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "one.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return read_history(folder)


def report_of(folder: Path, payload: str) -> str:
    return report.to_html(hostile_run(folder / "run", payload))


def comparison_of(folder: Path, payload: str) -> str:
    first, second = hostile_run(folder / "one", payload), write_run(folder / "two", [training(1, 2.0)])
    return compare.to_html(compare.compare([first, second], [None, None]))


def sweep_of(folder: Path, payload: str) -> str:
    recipe = hostile_recipe(folder / "run", payload)
    choices = (f"a{payload}", f"b{payload}")
    ranges = {
        f"train.schedule{payload}": SweepRange(choices=choices),
        f"train.learning_rate{payload}": SweepRange(low=0.1, high=1.0),
    }
    recipe = recipe.model_copy(update={"sweep": SweepConfig(ranges=ranges)})
    hostile_run(folder / "trials" / "000", payload)
    trials = [
        TrialResult(i, state, dict(zip(ranges, (choices[i % 2], 0.2), strict=True)), 1.0 + i,
                    folder / "trials" / f"{i:03d}", f"because{payload}")
        for i, state in enumerate(("complete", "complete", "pruned", f"failed{payload}"))
    ]  # fmt: skip
    return sweep_page.to_html(Sweep(recipe, tuple(trials)))


def sheet_of(folder: Path, payload: str) -> str:
    config: ModelConfig = hostile_recipe(folder / "run", payload).model
    return sheet_page(describe(config, f"model{payload}"))


PAGES = {"report": report_of, "compare": comparison_of, "sweep": sweep_of, "sheet": sheet_of}


@pytest.fixture(scope="module")
def plain_pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Structure]:
    return cache(
        lambda name: Structure(PAGES[name](tmp_path_factory.mktemp(name), f"{MARK}~"))
    )  # ~: in no recipe's name


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("name", PAGES)
def test_no_element_and_no_attribute_of_a_page_comes_from_data(
    name: str, payload: str, tmp_path: Path, plain_pages: Callable[[str], Structure]
) -> None:
    plain = plain_pages(name)
    text = PAGES[name](tmp_path / "hostile", f"{PAYLOADS[payload]}{MARK}")  # where a text is cut, one mark stays
    hostile = Structure(text)
    assert hostile.elements == plain.elements
    assert not any(tag in ("script", "iframe", "img", "object", "embed", "a", "link") for tag, _ in hostile.elements)
    assert not any(attribute.startswith(("on", "style", "href", "src")) for attribute, _ in hostile.values)
    assert not any(MARK in value or "javascript:" in value for _, value in hostile.values)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    if payload != "long":  # of which a page shows a part
        assert hostile.text.count(MARK) >= plain.text.count(MARK) > 0
    assert len(text.partition("</style>")[2]) < 40 * MOST_CHARACTERS


@pytest.mark.parametrize("name", PAGES)
def test_a_page_allows_its_own_style_and_nothing_else(name: str, tmp_path: Path) -> None:
    structure = Structure(PAGES[name](tmp_path, MARK))
    policy = next(v for n, v in structure.values if "default-src" in v)
    digest = base64.b64encode(hashlib.sha256(structure.style.encode("utf-8")).digest()).decode("ascii")
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert "unsafe" not in policy and "script-src" not in policy
    tags = [tag for tag, _ in structure.elements]
    assert tags.index("meta") < tags.index("style") and tags.count("style") == 1


def test_every_part_escapes_what_it_is_given() -> None:
    bad = "<i>"
    parts = [
        section(bad, bad), paragraph(bad, bad), key_figures([(bad, bad, bad)]), number(1, bad, bad),
        table([bad, bad], "lr", [[bad, bad]], [[bad, bad]]), settings({bad: bad}), samples([(number(1), bad, bad)]),
        Chart("c", bad, [Series([(0, 1), (1, 2)], bad, titles=[bad, bad], style="both")], bad, bad,
              x_names=[bad, bad]).svg(),
    ]  # fmt: skip
    text = page(bad, [bad], parts, bad)
    assert "<i" not in text and text.count("&lt;i&gt;") > 20


@pytest.mark.parametrize(
    "values",
    [
        [1e308, -1e308],
        [float("inf"), float("nan")],
        [1e16, 1e16 + 2],
        [5e-324, 1.0],
        [0.0, 0.0],
        [1e-300, 2e-300],
        [-1.0, 1e308, 1.0],
    ],
)
def test_a_chart_stands_whatever_the_values(values: list[float]) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    for place in (points, [(y, x) for x, y in points]):
        for log_x in (False, True):
            svg = Chart("c", "c", [Series(place, style="both")], "x", "y", log_x=log_x).svg()
            assert not re.search(r"\b(nan|inf)\b", svg)
