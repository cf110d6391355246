"""Explain: the walk through a model in eight steps, in the page of a model."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import chats
from browser import AXE, HOSTILE, axe, screenshot
from gptworks.checkpoint import load_run
from gptworks.cli import app
from gptworks.interop.html_file import export_html
from gptworks.interpret.record import record
from gptworks.recipe import parse_recipe
from gptworks.tokenizer import load_tokenizer
from gptworks.training.loop import train
from test_browser_html_file import opened  # noqa: F401 (fixture)
from test_html_file import hostile, make_run, run  # noqa: F401 (fixtures)

pytestmark = pytest.mark.browser

TEXT = "line 12: the quick brown fox, the quick"
TITLES = [
    "A text becomes tokens", "Each token becomes a list of numbers", "Tokens look back at each other",
    "Each token is worked on alone", "Every possible next token gets a score", "One token is drawn",
    "How the model learned", "What the model has read",
]  # fmt: skip


@pytest.fixture(scope="module")
def file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    made = tmp_path_factory.mktemp("explain") / "model.html"
    export_html(run, made, verify=False)
    return made


def walk(page: Any, step: int, text: str | None = None) -> None:
    """Open a step of the walk, on a text, and wait until the text is read."""
    page.evaluate("(step) => { location.hash = `#/explain/${step}`; }", step)
    page.wait_for_selector(".ex-picture")
    if text is not None:
        write(page, text)
    page.wait_for_function("(n) => document.querySelector('.ex-number').textContent === n", arg=str(step))


def write(page: Any, text: str) -> None:
    page.get_by_label("Your text, up to").fill(text)
    page.wait_for_selector(".ex-step[aria-busy=true]")
    page.wait_for_selector(".ex-step[aria-busy=false]")


def numbers(page: Any, selector: str) -> list[float]:
    """Return the numbers that elements show."""
    found = [re.sub(r"[ %>]", "", text).replace("−", "-") for text in page.locator(selector).all_inner_texts()]
    return [float(text) for text in found if text and text != "–"]


# ------------------------------------------------------------------------------------------------- by keyboard


def test_one_walks_through_all_steps_with_the_arrow_keys(file: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    page, faults = opened(file)
    page.click("nav >> text=Explain")
    page.wait_for_selector(".ex-picture")
    seen = [page.inner_text("#ex-title")]
    for _ in TITLES[1:]:
        page.keyboard.press("ArrowRight")
        page.wait_for_function("(was) => !document.querySelector('#ex-title').innerText.includes(was)", arg=seen[-1])
        page.wait_for_selector(".ex-picture")
        seen.append(page.inner_text("#ex-title"))
    assert [title.split("\n")[-1] for title in seen] == TITLES
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("#/explain/8"), "the last step is the last"
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("text=Step 7 of 8")
    page.go_back()
    page.wait_for_selector("text=Step 8 of 8")
    assert (faults, page.evaluate("violations")) == ([], [])


@pytest.mark.parametrize("step", range(1, 9))
def test_tab_reaches_everything_that_reacts(file: Path, opened: Callable[..., Any], step: int) -> None:  # noqa: F811
    page, _ = opened(file, reduced_motion="reduce")
    walk(page, step)
    page.get_by_label("Your text, up to").focus()
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        at = page.evaluate("""() => {
            const element = document.activeElement;
            const seen = getComputedStyle(element).opacity === "0" ? element.closest("label") : element;
            return [element.name || element.textContent || element.parentElement.textContent,
                    getComputedStyle(seen).outlineStyle];
        }""")
        reached.append(at[0].split(":")[0].strip())
        assert at[1] != "none", f"the focus on {at[0]} cannot be seen"
        if reached[-1] == "Next →":
            break
    wanted = {
        1: ["ex-token"], 2: ["ex-token"], 3: ["Layer", "ex-token", "Head"], 4: ["Layer", "ex-token", "Neuron"],
        5: ["ex-token", "Next token"], 6: ["Temperature", "Top-k", "Draw one", "Draw 50", "Add it to the text"],
        7: ["ex-token", "Step"],
        8: ["The model's card, which its maker may have completed"],
    }  # fmt: skip
    assert reached == [*wanted[step], "← Back", "Next →"]


def test_arrow_keys_choose_a_token_where_tokens_have_the_focus(file: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    page, _ = opened(file)
    walk(page, 7, "line 12")
    page.locator(".ex-token input").last.focus()
    page.keyboard.press("ArrowLeft")
    chosen = page.locator(".ex-token.chosen .spelling")
    assert chosen.inner_text() == page.locator(".ex-token .spelling").nth(-2).inner_text()
    assert page.inner_text(".ex-answer").startswith(f"The model gave {chosen.inner_text()} a chance of")
    assert page.inner_text(".ex-turn span").startswith("Step 7")


# --------------------------------------------------------------------------------------------------- the numbers


SHAPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "like-gpt2": (
        {"position": "learned", "norm": "layernorm", "norm_bias": True, "attention_bias": True, "mlp_bias": True,
         "mlp": "gelu", "qk_norm": False},
        ["A second list, for the token's place in the text, is added", "(GELU)", "(LayerNorm)", "The scores come from"
         " the table of step 2"],
    ),
    "groups-and-windows": (
        {"n_heads": 4, "n_kv_heads": 2, "d_head": 16, "window": 16, "window_pattern": ["window", "full"],
         "tie_embeddings": False, "mlp": "swiglu"},
        ["every 2 heads of a layer share", "1 layer of 2 sees only the last 16 tokens, and this is one of them",
         "(RoPE)", "has a gate", "a second table"],
    ),
    "token-pairs": (
        {"bigram_vocab_size": 512, "position": "rope"},
        ["A list for the pair of this token and the one before it is added.", "table of pairs has 512 lists"],
    ),
    "parallel": (
        {"parallel_residual": True, "mlp": "relu2", "position": "none", "n_heads": 2, "n_kv_heads": 1},
        ["Nothing tells this model the place of a token", "all heads of a layer share", "work at the same time",
         "squares a positive one", "are silent: exactly 0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_are_the_engine_s(tmp_path: Path, opened: Callable[..., Any], name: str) -> None:  # noqa: F811
    settings, said = SHAPES[name]
    folder = make_run(tmp_path, **settings)
    export_html(folder, tmp_path / "model.html", weights="fp32", verify=False)
    model = load_run(folder, weights="fp32").model
    ids = np.array(load_tokenizer(folder / "tokenizer").encode(TEXT, add_special_tokens=False).ids)
    found = record(model, ids, range(len(ids)))
    with torch.inference_mode():
        logits = model.logits(found.features).double()
    chances = logits.softmax(-1)
    page, faults = opened(tmp_path / "model.html")
    page.click("nav >> text=Explain")
    seen = []
    for step in range(1, 9):
        walk(page, step, TEXT if step == 1 else None)
        seen.append(page.inner_text(".ex-step"))
    for one in said:
        assert one in " ".join(seen), one
    n = len(ids)
    walk(page, 1)
    assert numbers(page, ".ex-token .number") == ids.tolist()
    walk(page, 3)
    page.get_by_role("slider", name="Layer:").fill("2")
    page.locator(".ex-heads input").last.check()
    page.locator(".ex-lines label input").nth(n - 3).check()
    weights = 100 * found.weights[1, -1, n - 3, : n - 2]
    np.testing.assert_allclose(numbers(page, ".ex-lines li .number"), weights, atol=0.06)
    walk(page, 5)
    page.locator(".ex-token input").last.check()
    best = chances[-1].topk(8)
    np.testing.assert_allclose(numbers(page, ".ex-list b.number"), 100 * best.values, atol=0.06)
    np.testing.assert_allclose(numbers(page, ".ex-list .number.quiet"), logits[-1, best.indices], atol=0.006)
    together = float(re.findall(r"Together: ([+−][0-9.]+)", page.inner_text(".ex-step"))[0].replace("−", "-"))
    assert together == pytest.approx(float(logits[-1].max()), abs=0.006)
    walk(page, 7)
    losses = [-float(chances[t - 1, ids[t]].log()) for t in range(1, n)]
    np.testing.assert_allclose(numbers(page, ".ex-token .number"), losses, atol=0.006)
    assert f"Average loss of your text: {np.mean(losses):.2f}" in page.inner_text(".ex-step")
    page.locator(".ex-token input").nth(5).check()
    np.testing.assert_allclose(numbers(page, ".ex-answer .number"), [100 * np.exp(-losses[4]), losses[4]], atol=0.06)
    assert (faults, page.evaluate("violations")) == ([], [])


# ------------------------------------------------------------------------------------------------- what reacts


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ({"type": "char"}, "Here each token is one character"),
        ({"type": "word", "vocab_size": 200}, "Here each token is a word or a sign"),
        ({"type": "bpe", "vocab_size": 300}, "a rare word is several"),
    ],
    ids=["char", "word", "bpe"],
)
def test_each_kind_of_tokenizer_is_described(
    tmp_path: Path,
    opened: Callable[..., Any],  # noqa: F811
    tokenizer: dict[str, Any],
    said: str,
) -> None:
    export_html(make_run(tmp_path, tokenizer), tmp_path / "model.html", verify=False)
    page, faults = opened(tmp_path / "model.html")
    page.click("nav >> text=Explain")
    page.wait_for_selector(".ex-picture")
    assert page.get_by_label("Your text, up to").input_value(), "the model brings a text of its own"
    assert said in page.inner_text(".ex-step")
    walk(page, 8)
    page.wait_for_selector(".ex-homes[aria-busy=false]")
    assert ("It has no tokens for some of this." in page.inner_text(".ex-homes")) == (tokenizer["type"] != "bpe")
    assert faults == []


def test_the_training_and_the_data_are_those_of_the_run(
    run: Path,  # noqa: F811
    file: Path,
    opened: Callable[..., Any],  # noqa: F811
) -> None:
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    held = [record["loss"] for record in log if record["kind"] == "validation"][-1]
    tokens = json.loads((run / "outcome.json").read_text(encoding="utf-8"))["tokens"]
    page, faults = opened(file)
    walk(page, 7)
    said = page.inner_text(".ex-step")
    assert f"It read {tokens:,} tokens in 4 steps" in said
    assert f"On text that was kept from it, its loss is {held:.4g}:" in said
    page.get_by_role("slider", name="Step:").fill("0")
    assert "At step 1: loss" in page.inner_text(".ex-curve")
    walk(page, 8)
    assert "1 document · " in page.inner_text(".ex-source")
    assert "licence: not stated by the run" in page.inner_text(".ex-source")
    page.click("text=The model's card")
    assert "Every figure here was counted or measured." in page.inner_text(".ex-card")
    assert faults == []


def test_a_tuned_model_tells_what_it_began_from(hostile: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    export_html(hostile, tmp_path / "model.html", verify=False)
    page, _ = opened(tmp_path / "model.html")
    page.click("nav >> text=Explain")
    walk(page, 7)
    for one in ("It did not begin at random", "only the answers counted", "It is made for conversations"):
        assert one in page.inner_text(".ex-step")
    walk(page, 8)
    assert "These are the texts of its last training." in page.inner_text(".ex-step")


def test_windows_in_all_layers_limit_how_far_it_looks_back(tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    export_html(make_run(tmp_path, window=8, window_pattern=["window"]), tmp_path / "model.html", verify=False)
    page, _ = opened(tmp_path / "model.html")
    walk(page, 3)
    said = page.inner_text(".ex-facts")
    assert "Every layer sees only the last 8 tokens." in said
    assert "It can look back over at most 15 tokens." in said, "7 before the 7 before it"


def test_of_an_adapter_it_says_that_most_numbers_were_kept(tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    few = {"max_steps": 4, "evaluate_every": 4, "checkpoint_every": 4}
    train(parse_recipe(chats.base_tree(tmp_path, **few)))
    train(
        parse_recipe(chats.tune_tree(tmp_path, **few, optimizer="adamw") | {"adapter": {"rank": 4, "embeddings": True}})
    )
    export_html(tmp_path / "tuned", tmp_path / "model.html", verify=False)
    page, faults = opened(tmp_path / "model.html")
    walk(page, 7)
    assert "Most of its own numbers were kept: a small addition to them was trained (LoRA)." in page.inner_text(
        ".ex-facts"
    )
    assert (faults, page.evaluate("violations")) == ([], [])


def test_of_an_imported_model_nothing_is_made_up(tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    trained = make_run(tmp_path, mlp="swiglu")
    folder, imported = tmp_path / "folder", tmp_path / "imported"
    for command in (["export", trained, folder, "--no-verify"], ["import", folder, imported]):
        done = CliRunner().invoke(app, [str(one) for one in command])
        assert done.exit_code == 0, done.output
    export_html(imported, tmp_path / "model.html", verify=False)
    page, faults = opened(tmp_path / "model.html")
    page.click("nav >> text=Explain")
    walk(page, 7)
    assert "It was trained elsewhere; this page does not know how." in page.inner_text(".ex-facts")
    assert page.locator(".ex-facts li").count() == 1
    walk(page, 8)
    assert "This page does not say what the model has read." in page.inner_text(".ex-step")
    assert page.locator(".ex-source").count() == 0
    assert faults == []


def test_a_changed_text_changes_what_is_shown(file: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    page, faults = opened(file)
    walk(page, 3, "the quick fox")
    before = numbers(page, ".ex-lines li .number")
    write(page, "the quick lazy fox jumps")
    assert len(numbers(page, ".ex-lines li .number")) > len(before)
    page.locator(".ex-heads input").nth(1).check()
    assert "head 2" in page.inner_text(".ex-answer")
    write(page, "")
    page.wait_for_selector("text=The model knows no token of this text. Write another one.")
    write(page, "a " * 200)
    walk(page, 1)
    assert page.locator(".ex-token").count() == 64
    assert "the pictures show the first 64" in page.inner_text(".ex-step")
    assert faults == []


def test_a_token_is_drawn_and_added(file: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    page, faults = opened(file, reduced_motion="reduce")
    walk(page, 6, "line 12: the")
    assert page.locator(".ex-drawn").evaluate("(one) => getComputedStyle(one).animationName") == "none"
    assert page.get_by_text("Add it to the text").get_attribute("aria-disabled") == "true"
    page.get_by_role("slider", name="Temperature:").fill("0")
    assert numbers(page, ".ex-draws b.number") == [100.0], "the likeliest alone"
    page.click("text=Draw 50")
    assert "50 ×" in page.inner_text(".ex-draws")
    page.get_by_role("slider", name="Temperature:").fill("1")
    page.get_by_role("slider", name="Top-k:").fill("3")
    kept = numbers(page, ".ex-draws b.number")
    assert len(kept) == 3
    assert sum(kept) == pytest.approx(100, abs=0.2)
    page.click("text=Draw one")
    drawn = page.inner_text(".ex-drawn").replace("␣", " ").replace("⏎", "\n")
    page.click("text=Add it to the text")
    page.wait_for_selector(".ex-step[aria-busy=true]")
    page.wait_for_selector(".ex-step[aria-busy=false]")
    assert page.get_by_label("Your text, up to").input_value() == f"line 12: the{drawn}"
    assert faults == []


def test_nothing_of_a_hostile_run_is_executed(hostile: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    export_html(hostile, tmp_path / "model.html", verify=False)
    page, faults = opened(tmp_path / "model.html")
    page.click("nav >> text=Explain")
    for step in range(1, 9):
        walk(page, step, f"{HOSTILE}</script><script>alert(1)</script>" if step == 1 else None)
    page.wait_for_selector(".ex-homes[aria-busy=false]")
    assert HOSTILE in page.inner_text(".ex-homes")
    assert page.locator("main img, main script").count() == 0
    assert (faults, page.evaluate("violations")) == ([], [])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_each_step_fits_its_screen_and_is_accessible(
    file: Path,
    opened: Callable[..., Any],  # noqa: F811
    width: int,
    theme: str,
) -> None:
    page, faults = opened(file, viewport={"width": width, "height": 800}, color_scheme=theme)
    page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
    page.click("nav >> text=Explain")
    for step in range(1, 9):
        walk(page, step, "line 12: the quick brown" if step == 1 else None)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        screenshot(page, f"explain-{step}-{width}-{theme}", full_page=True)
        if AXE is not None:
            assert axe(page) == [], step
    assert faults == []
