"""The page's part Play in a real browser: every feature is clicked, on a real server with real runs."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from browser import (
    HOSTILE,
    LONG,
    Studio,
    answer,
    choose,
    finish,
    generate,
    say,
    screenshot,
    setting,
    shown_prompt,
    tokens,
)
from gptworks.infer.sampling import SamplingSettings
from serving import paused_after, until

pytestmark = pytest.mark.browser


def events_of(studio: Studio, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of the server's answer to a request."""
    with studio.http() as http:
        answer = http.post("/studio/generate", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: ")]


def percent(logprob: float) -> float:
    return 100 * 2.718281828459045**logprob


# ------------------------------------------------------------------------------------------------- texts and tokens


def test_the_model_and_sample_prompts_are_at_the_prompt_and_help_is_asked_for(page: Any, studio: Studio) -> None:
    choose(page, "base")
    head = page.locator(".composer .head")
    assert head.text_content() == "Promptto base"
    page.get_by_label("Checkpoint of column 1").select_option("40")
    assert head.text_content() == "Promptto base, step 40"
    with studio.http() as http:
        models = {model["id"]: model for model in http.get("/studio/state").json()["models"]}
    chips = page.get_by_role("group", name="Sample prompts").get_by_role("button")
    assert chips.all_text_contents() == models["base"]["prompts"] and chips.count()
    chips.first.click()
    assert page.get_by_label("Prompt", exact=True).input_value() == models["base"]["prompts"][0]
    about = page.locator("#setting-temperature-about")
    assert not about.is_visible()
    page.get_by_role("button", name="Explain").click()
    assert about.is_visible() and "lower is safer" in about.inner_text()
    page.get_by_role("button", name="Explain").click()
    setting(page, "temperature", "9")
    assert "0 to 2" in about.inner_text() and about.is_visible(), "a mistake is always explained"


def test_branches_are_named_by_what_differs(page: Any) -> None:
    choose(page, "base")
    names = page.locator(".branch .words")
    for step, seed in ((20, 3), (60, 3), (60, 4)):
        page.get_by_label("Checkpoint of column 1").select_option(str(step))
        generate(page, "line 7:", seed=seed, max_tokens=5)
    assert names.all_inner_texts() == [
        f"step {step} · seed {seed} · line 7:" for step, seed in ((20, 3), (60, 3), (60, 4))
    ]
    page.get_by_role("button", name="Edit text").click()
    whole = page.get_by_label("Prompt", exact=True).input_value()
    generate(page, f"{whole} fox")
    assert names.last.inner_text() == "… fox"


def test_a_text_is_written_and_its_tokens_are_shaded(page: Any, studio: Studio) -> None:
    choose(page, "base")
    generate(page, "line 7: the", seed=3, max_tokens=12)
    body = {"model": "base", "prompt": "line 7: the", "settings": {"seed": 3, "max_tokens": 12}}
    events = events_of(studio, body)
    written = [event for event in events if event["type"] == "token"]
    assert answer(page) == "".join(token["text"] for token in written) and shown_prompt(page) == "line 7: the"
    assert "12 tokens" in page.locator(".facts").first.inner_text()
    assert re.search(r"[\d,]+ tokens/s", page.locator("p.facts").first.inner_text())
    mean = sum(token["logprob"] for token in written) / len(written)
    assert f"12 tokens · {-mean:.4g} nats per token" in page.locator(".branch .facts").inner_text()
    bounds = [0.5, 0.2, 0.05, 0.01, 0.001, 0]
    for i, token in enumerate(written):
        step = next(n for n, bound in enumerate(bounds) if percent(token["logprob"]) / 100 >= bound)
        assert f"s{step}" in tokens(page).nth(i).get_attribute("class").split()
    assert page.get_by_role("img", name="Shades by probability").is_visible()
    page.get_by_role("button", name="Rank").click()
    assert page.get_by_role("img", name="Shades by rank").is_visible()
    ranks = [1, 2, 5, 20, 100]
    for i, token in enumerate(written):
        step = next((n for n, bound in enumerate(ranks) if token["rank"] <= bound), 5)
        assert f"s{step}" in tokens(page).nth(i).get_attribute("class").split()
    page.get_by_role("button", name="Off").click()
    assert page.locator(".text .t:not(.s0)").count() == 0


def test_a_line_end_breaks_the_line(page: Any, studio: Studio) -> None:
    choose(page, "base")
    generate(page, "line 7\n\nline 8:", max_tokens=2)
    ends = page.locator(".text .t.break")
    assert ends.count() and {one.evaluate("(e) => getComputedStyle(e).display") for one in ends.all()} == {"inline"}


def test_the_card_shows_the_servers_alternatives_before_and_after_sampling(page: Any, studio: Studio) -> None:
    choose(page, "base")
    generate(page, "line 7:", seed=5, max_tokens=8, temperature=0.5, top_k=4)
    settings = {"seed": 5, "max_tokens": 8, "temperature": 0.5, "top_k": 4}
    token = [e for e in events_of(studio, {"model": "base", "prompt": "line 7:", "settings": settings})
             if e["type"] == "token"][3]  # fmt: skip
    tokens(page).nth(3).hover()
    card = page.get_by_role("dialog", name="Token")
    card.wait_for()
    rows = card.locator(".row")
    assert rows.count() >= len(token["top"]) == 10
    for i, one in enumerate(token["top"]):
        said = rows.nth(i).text_content().replace("–", "")
        before, after = re.match(r"(?s).*: (.*) by the model, (.*) after sampling", said).groups()
        assert _near(before, one["logprob"])
        sampled = {other["id"]: other["logprob"] for other in token["after"]["top"]}.get(one["id"])
        assert after == "not listed" if sampled is None else _near(after, sampled), (said, sampled)
        assert one["spelling"].replace(" ", "␣").replace("\n", "⏎") in said
    page.mouse.move(5, 5)
    card.wait_for(state="detached")


def _near(shown: str, logprob: float) -> bool:
    """Whether a shown percentage equals exp(logprob), within its digits."""
    if shown.startswith("<"):
        return percent(logprob) < 0.01
    if shown.startswith(">"):
        return percent(logprob) > 99.9
    return abs(float(shown.removesuffix(" %")) - percent(logprob)) <= 0.051


def test_another_token_can_be_taken_and_every_branch_is_kept(page: Any) -> None:
    choose(page, "base")
    generate(page, "line 7:", seed=5, max_tokens=10)
    first = answer(page)
    kept = tokens(page).evaluate_all("(all) => all.slice(0, 4).map((one) => one.textContent).join('')")
    tokens(page).nth(4).click()
    with page.expect_request("**/studio/generate") as sent:
        page.locator(".token-card .row:not(:disabled)").first.click()
    finish(page)
    body = sent.value.post_data_json
    assert body["tokens"] and "prompt" not in body
    second = answer(page)
    assert second != first and second.startswith(kept)
    assert page.locator(".text .t.chosen").count() == 1
    branches = page.get_by_role("navigation", name="Branches").locator(".branch")
    assert branches.count() == 2
    branches.first.locator(".open").click()
    assert answer(page) == first
    branches.nth(1).locator(".open").click()
    assert answer(page) == second
    page.reload()
    page.wait_for_selector(".text")
    assert answer(page) == second and page.locator(".branch").count() == 2
    page.get_by_role("button", name=re.compile("^Rename")).click()
    page.get_by_label("Name", exact=True).fill(HOSTILE)
    page.keyboard.press("Enter")
    assert page.locator(".branch.current .words").inner_text() == HOSTILE
    page.get_by_role("button", name=re.compile("^Delete")).click()
    assert branches.count() == 1 and answer(page) == first


def test_the_keyboard_suffices(page: Any) -> None:
    choose(page, "base")
    setting(page, "max_tokens", 10)
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.type("line 7:")
    page.keyboard.press("Control+Enter")
    finish(page)
    first = answer(page)
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.classList.contains('text')"):
            break
    page.keyboard.press("End")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert page.locator(".text .t.at").get_attribute("data-i") == "4"
    page.keyboard.press("Enter")
    page.locator(".token-card .row:focus").wait_for()
    page.keyboard.press("Escape")
    page.locator(".token-card").wait_for(state="detached")
    assert page.evaluate("() => document.activeElement.classList.contains('text')")
    page.keyboard.press("Enter")
    page.locator(".token-card .row:focus").wait_for()
    for _ in range(2):  # past the first button, to the last
        page.keyboard.press("ArrowUp")
    assert page.evaluate("() => document.activeElement.textContent") == "Why this token?"
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    finish(page)
    page.wait_for_function("() => document.querySelectorAll('.branch').length === 2")
    assert answer(page) != first


def test_any_place_can_be_edited_and_continued(page: Any) -> None:
    choose(page, "base")
    generate(page, "line 7:", seed=5, max_tokens=6)
    text = shown_prompt(page) + answer(page)
    page.get_by_role("button", name="Continue").click()
    page.wait_for_function("() => document.querySelectorAll('.branch').length === 2")
    finish(page)
    longer = shown_prompt(page) + answer(page)
    assert longer.startswith(text) and tokens(page).count() == 12
    tokens(page).nth(3).click()
    # A busy browser draws late; the text and the place in it come together even so.
    page.evaluate("() => { window.requestAnimationFrame = (draw) => setTimeout(draw, 2000); }")
    page.get_by_role("button", name="Edit from here").click()
    box = page.get_by_label("Prompt", exact=True)
    assert box.input_value() == longer
    at = box.evaluate("(box) => box.selectionStart")
    page.keyboard.type("fox")
    assert box.input_value() == longer[:at] + "fox" + longer[at:]
    page.keyboard.press("Control+Enter")
    page.wait_for_function("() => document.querySelectorAll('.branch').length === 3")
    finish(page)
    assert shown_prompt(page) == longer[:at] + "fox" + longer[at:] and tokens(page).count() == 6
    assert page.locator(".branches ul ul .branch").count() == 1, "another way is indented; what continues is not"
    assert page.locator(".branches > ul > li > .branch").count() == 2
    page.get_by_role("button", name="Edit text").click()
    assert box.input_value() == shown_prompt(page) + answer(page)


def test_a_text_that_fills_the_context_cannot_be_continued(page: Any) -> None:
    choose(page, "base")
    page.get_by_label("ignore_eos").check()
    generate(page, "line 7:", max_tokens=500)
    assert "the context is full" in page.locator("p.facts").inner_text()
    button = page.get_by_role("button", name="Continue")
    assert button.is_disabled()
    why = page.locator(f"#{button.get_attribute('aria-describedby')}").inner_text()
    assert "fills the model's context of 128 tokens" in why
    generate(page, "line 7:", max_tokens=5)
    assert button.is_enabled() and button.get_attribute("aria-describedby") is None


def test_regenerate_draws_another_seed_and_a_kept_seed_repeats_the_text(page: Any) -> None:
    choose(page, "base")
    generate(page, "line 7:", max_tokens=20)
    first = answer(page)
    page.get_by_role("button", name="Keep this seed").click()
    seed = page.locator("#setting-seed").input_value()
    assert seed.isdigit()
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_function("() => document.querySelectorAll('.branch').length === 2")
    finish(page)
    assert answer(page) == first
    page.get_by_role("button", name="Draw a seed").click()
    assert page.locator("#setting-seed").input_value() != seed
    page.get_by_role("button", name="Clear", exact=True).click()
    assert page.locator("#setting-seed").input_value() == ""
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_function("() => document.querySelectorAll('.branch').length === 3")
    finish(page)
    assert answer(page) != first


def test_a_long_text_is_appended_to_and_can_be_stopped(page: Any, studio: Studio) -> None:
    choose(page, LONG)
    page.get_by_role("button", name="Text", exact=True).click()
    setting(page, "max_tokens", 2500)
    page.locator("#setting-ignore_eos, .check input").first.check()
    page.get_by_label("Prompt", exact=True).fill("a")
    page.evaluate("""() => {
      window.gaps = []; let last = performance.now();
      const frame = (now) => { gaps.push(now - last); last = now; requestAnimationFrame(frame); };
      requestAnimationFrame(frame);
    }""")
    with paused_after(1500):
        page.get_by_role("button", name="Generate", exact=True).click()
        page.wait_for_function("() => document.querySelectorAll('.t[data-part=answer]').length > 100")
        page.evaluate("() => { document.querySelectorAll('.t[data-part=answer]')[3].mine = true }")
        page.wait_for_function("() => document.querySelectorAll('.t[data-part=answer]').length > 1200")
        gaps = page.evaluate("() => gaps.sort((a, b) => a - b)")
        print(f"frames while 1,200 tokens came: median {gaps[len(gaps) // 2]:.0f} ms, longest {gaps[-1]:.0f} ms")
        assert page.evaluate("() => document.querySelectorAll('.t[data-part=answer]')[3].mine"), "it was drawn anew"
        page.get_by_role("button", name="Stop").first.click()
        page.wait_for_selector("p.facts:has-text('stopped')")
        service = studio.app.state.service
        until(lambda: service.in_flight == 0)  # the server knows
    assert 1200 < tokens(page).count() <= 1500
    statistics = service.get(f"{LONG}@1").engine.statistics
    until(lambda: statistics().running == statistics().slots_used == 0)
    assert statistics().cancelled == 1
    with studio.http() as http:  # and tells so
        assert "gptworks:num_requests_running" in (metrics := http.get("/metrics").text)
        assert all(
            line.endswith(" 0.0") for line in metrics.splitlines() if line.startswith("gptworks:num_requests_running")
        )


# --------------------------------------------------------------------------------------------------------- settings


def test_settings_have_the_engines_defaults_and_are_sent(page: Any) -> None:
    choose(page, "base")
    given = SamplingSettings()
    names = (
        "temperature top_k top_p min_p repetition_penalty frequency_penalty presence_penalty dry_multiplier dry_base "
        "dry_allowed_length max_tokens min_tokens"
    )
    for name in names.split():
        assert float(page.locator(f"#setting-{name}").input_value()) == getattr(given, name), name
        assert page.locator(f"#setting-{name}-about").inner_text().strip()
    changed = dict(zip(names.split(), (0.3, 7, 0.9, 0.02, 1.1, 0.2, -0.1, 0.8, 2, 4, 9, 2), strict=True)) | {"seed": 42}
    for name, value in changed.items():
        setting(page, name, value)
    setting(page, "stop", "\\n\nzzz")
    setting(page, "logit_bias", "5: -100")
    page.get_by_label("ignore_eos").check()
    page.get_by_label("score the prompt").check()
    setting(page, "alternatives", 3)
    page.get_by_label("Prompt", exact=True).fill("line 7:")
    with page.expect_request("**/studio/generate") as sent:
        page.get_by_role("button", name="Generate", exact=True).click()
    finish(page)
    body = sent.value.post_data_json
    assert body["settings"] == changed | {"stop": ["\n", "zzz"], "logit_bias": {"5": -100}, "ignore_eos": True}
    assert body["n_top"] == 3 and body["score_prompt"] is True
    assert page.locator(".text .t[data-part=prompt]:not(.s0)").count() > 0
    setting(page, "top_p", "7")
    assert page.locator("#setting-top_p").get_attribute("aria-invalid") == "true"
    assert "0.01 to 1." in page.locator("#setting-top_p-about").inner_text()
    page.get_by_role("button", name="Greedy").click()
    assert page.locator("#setting-temperature").input_value() == "0"
    assert page.locator("#setting-top_k").input_value() == "0" and page.locator("#setting-seed").input_value() == "42"
    page.get_by_role("button", name="Default", exact=True).click()
    assert page.locator("#setting-temperature").input_value() == "0.8"


def test_settings_that_were_not_changed_become_those_that_the_chosen_model_states(page: Any) -> None:
    def stating(route: Any) -> None:
        answer = route.fetch()
        tree = answer.json()
        for model in tree["models"]:
            if model["id"] == "group/tuned":
                model["sampling"] |= {"temperature": 0.5, "top_k": 20, "top_p": 0.9}
        route.fulfill(response=answer, json=tree)

    def shown() -> list[str]:
        return [page.locator(f"#setting-{name}").input_value() for name in ("temperature", "top_k", "top_p")]

    page.route("**/studio/state", stating)
    page.reload()
    choose(page, "base")
    assert shown() == ["0.8", "0", "1"]
    setting(page, "top_p", 0.7)
    choose(page, "group/tuned")
    assert shown() == ["0.5", "20", "0.7"]
    page.reload()
    page.wait_for_function("() => document.getElementById('setting-top_k')?.value === '20'")
    assert shown() == ["0.5", "20", "0.7"]
    page.get_by_role("button", name="Default", exact=True).click()
    assert shown() == ["0.5", "20", "0.9"]
    choose(page, "base")
    assert shown() == ["0.8", "0", "1"]


def test_an_input_methods_enter_sends_nothing(page: Any) -> None:
    """omi#12090, chat-ai#167: Enter that chooses a word sent the message, in Safari even with `isComposing` asked."""
    choose(page, "group/tuned")
    box = page.get_by_label("Message", exact=True)
    box.fill("東京")
    for composing in ("true", "false"):
        keys = f"{{key: 'Enter', keyCode: 229, isComposing: {composing}, bubbles: true}}"
        box.evaluate(f"(box) => box.dispatchEvent(new KeyboardEvent('keydown', {keys}))")
    assert box.input_value() == "東京"
    box.press("Enter")
    page.wait_for_function("() => document.querySelector('#message').value === ''")
    finish(page)


def test_a_prompt_that_was_scored_can_be_changed_at_a_token(page: Any) -> None:
    choose(page, "base")
    generate(page, "line 7: the quick", seed=1, max_tokens=5)
    page.locator(".text .t[data-part=prompt]").nth(3).click()
    assert "“score the prompt” in the settings" in page.locator(".token-card .figures").inner_text()
    page.keyboard.press("Escape")
    page.get_by_label("score the prompt").check()
    generate(page, "line 7: the quick", seed=1, max_tokens=5)
    page.locator(".text .t[data-part=prompt]").nth(3).click()
    row = page.locator(".token-card .row:not(:disabled)").first
    row.click()
    page.wait_for_function("() => document.querySelectorAll('.branch').length === 3")
    finish(page)
    assert page.locator(".text .t[data-part=prompt]").count() == 4


def test_code_is_shown_in_characters_of_one_width(page: Any) -> None:
    choose(page, "base")
    generate(page, "def f(x):\n\tif x:\n        return 1\n", max_tokens=4)
    widths = "() => [...document.querySelectorAll('.text .t')].map((t) => getComputedStyle(t).fontFamily)"
    assert "monospace" not in str(page.evaluate(widths))
    page.get_by_role("button", name="Monospaced").click()
    assert all("monospace" in family for family in page.evaluate(widths))
    text = page.locator(".column .text")
    assert text.evaluate("(e) => getComputedStyle(e).whiteSpace") == "pre"
    assert shown_prompt(page) == "def f(x):\n\tif x:\n        return 1\n"
    screenshot(page, "play-code")
    page.reload()
    assert page.get_by_role("button", name="Monospaced").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Monospaced").click()
    assert text.evaluate("(e) => getComputedStyle(e).whiteSpace") == "pre-wrap"


def test_a_refusal_is_shown(page: Any) -> None:
    choose(page, "base")
    page.get_by_label("Prompt", exact=True).fill("line 7: " * 400)
    page.get_by_role("button", name="Generate", exact=True).click()
    page.locator(".column .problem").wait_for()
    assert "128" in page.locator(".column .problem").inner_text()


# -------------------------------------------------------------------------------------------- copying, side by side


@pytest.mark.parametrize("kind", ["Text", "Branch", "Conversation"])
def test_copied_commands_give_the_same_text(kind: str, studio: Studio, page: Any, tmp_path: Path) -> None:
    if kind == "Conversation":
        choose(page, "group/tuned")
        setting(page, "max_tokens", 12)
        setting(page, "seed", 11)
        page.get_by_label("Message", exact=True).fill("what's 'of' brown?\n$HOME")
        page.get_by_role("button", name="Send").click()
        finish(page)
    else:
        choose(page, "base")
        page.get_by_label("Checkpoint of column 1").select_option("40")
        generate(page, 'it\'s $HOME "quoted" \\n\nline', seed=11, max_tokens=12, top_k=50)
    if kind == "Branch":
        tokens(page).nth(4).click()
        page.locator(".token-card .row:not(:disabled)").first.click()
        page.wait_for_function("() => document.querySelectorAll('.branch').length === 2")
        finish(page)
    whole = answer(page)
    page.get_by_role("button", name="Copy as curl").click()
    command = page.get_by_label("As curl").inner_text()
    run = partial(subprocess.run, check=False, capture_output=True, text=True, timeout=120,
                  env=os.environ | {"GPTWORKS_API_KEY": studio.key})  # fmt: skip
    made = run(["bash", "-c", command])
    choice = json.loads(made.stdout)["choices"][0]
    text = choice["message"]["content"] if kind == "Conversation" else choice["text"]
    assert text and whole.endswith(text) and (kind == "Branch" or whole == text)
    page.get_by_role("button", name="Copy as Python").click()
    program = tmp_path / "program.py"
    program.write_text(page.get_by_label("As Python").inner_text(), encoding="utf-8")
    made = run([sys.executable, str(program)])
    assert made.stdout.removesuffix("\n") == text, made.stderr


def test_two_checkpoints_and_two_models_side_by_side_from_one_seed(page: Any, studio: Studio) -> None:
    choose(page, "base")
    page.get_by_role("button", name="Side by side").click()
    page.get_by_label("Checkpoint of column 1").select_option("20")
    page.get_by_label("Checkpoint of column 2").select_option("60")
    generate(page, "line 7:", max_tokens=10)
    seeds = {re.search(r"seed (\d+)", text)[1] for text in page.locator("p.facts").all_inner_texts()}
    assert len(seeds) == 1
    for column, step in enumerate((20, 60)):
        body = {"model": "base", "checkpoint": step, "prompt": "line 7:",
                "settings": {"seed": int(*seeds), "max_tokens": 10}}  # fmt: skip
        text = "".join(e["text"] for e in events_of(studio, body) if e["type"] == "token")
        assert answer(page, column) == text
        assert f"step {step}" in page.locator("p.facts").nth(column).inner_text()
    choose(page, HOSTILE, column=2)
    generate(page, "line 8:", max_tokens=10)
    assert page.locator(".branch").count() == 4
    (seed,) = {re.search(r"seed (\d+)", text)[1] for text in page.locator("p.facts").all_inner_texts()}
    for column, model in enumerate(({"model": "base", "checkpoint": 20}, {"model": HOSTILE})):
        body = model | {"prompt": "line 8:", "settings": {"seed": int(seed), "max_tokens": 10}}
        assert answer(page, column) == "".join(e["text"] for e in events_of(studio, body) if e["type"] == "token")
    page.get_by_role("button", name="Close column 2").click()
    assert page.locator(".column").count() == 1


def test_a_model_without_a_chat_template_takes_that_of_the_one_next_to_it(page: Any, studio: Studio) -> None:
    choose(page, "group/tuned")
    page.get_by_role("button", name="Side by side").click()
    choose(page, "base", column=2)
    assert "that of group/tuned" in page.locator(".column").nth(1).inner_text()
    with page.expect_request(lambda sent: "generate" in sent.url and '"base"' in sent.post_data) as sent:
        for name, value in {"max_tokens": 8, "seed": 2}.items():
            setting(page, name, value)
        say(page, "what of brown 1?")
    assert sent.value.post_data_json["template_of"] == "group/tuned"
    assert not page.locator(".problem").count() and page.locator(".turn").count() == 4
    events = events_of(studio, sent.value.post_data_json)
    rendered = "".join(token["text"] for token in events[0]["tokens"])
    assert rendered == "<|im_start|>user\nwhat of brown 1?<|im_end|>\n<|im_start|>assistant\n", "as the tuned one's"
    assert answer(page, 1) == "".join(event["text"] for event in events if event["type"] == "token")
    page.get_by_role("button", name="Close column 2").click()
    choose(page, "base")
    assert page.get_by_label("Prompt", exact=True).is_visible()


# ----------------------------------------------------------------------------------------------------- conversations


def test_enter_sends_and_a_conversation_outgrows_the_context(page: Any, studio: Studio) -> None:
    choose(page, "group/tuned")
    setting(page, "max_tokens", 8)
    box = page.get_by_label("Message", exact=True)
    box.press_sequentially("first line")
    box.press("Shift+Enter")
    box.press_sequentially("second line")
    box.press("Enter")
    finish(page)
    assert page.locator(".turn.user .text").first.inner_text() == "first line\nsecond line"
    assert box.input_value() == "" and not page.get_by_text("did not read").count()
    dropped = 0
    for number in range(40):
        with page.expect_response("**/studio/generate") as sent:
            box.fill(f"what of number {number}, and of the one before it?")
            box.press("Enter")
            finish(page)
        start = sent.value.text().split("\n\n")[0].removeprefix("data: ")
        dropped = json.loads(start)["dropped"]
        if dropped >= 4:
            break
    assert dropped >= 4 and not page.locator(".problem").count()
    places = page.locator(".turns > li:not(:has(button.plain:text-is('Add a system message')))")
    assert "did not read the turns above" in places.nth(dropped).inner_text()
    assert page.get_by_text("did not read").count() == 1


def test_a_conversation(page: Any, studio: Studio) -> None:
    choose(page, "group/tuned")
    setting(page, "max_tokens", 10)
    setting(page, "seed", 2)
    page.get_by_label("System message").fill("Be brief.")
    say(page, "what of brown 1?")
    first = answer(page)
    say(page, "what of lazy 2?")
    with studio.http() as http:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "what of brown 1?"}]
        ask = {"model": "group/tuned", "seed": 2, "max_tokens": 10}
        given = http.post("/v1/chat/completions", json=ask | {"messages": messages}).json()["choices"][0]["message"][
            "content"
        ]
        assert first == given
        messages += [{"role": "assistant", "content": given}, {"role": "user", "content": "what of lazy 2?"}]
        given = http.post("/v1/chat/completions", json=ask | {"messages": messages}).json()["choices"][0]["message"][
            "content"
        ]
        assert answer(page) == given
    turns = page.locator(".turn")
    assert turns.count() == 5
    page.get_by_role("button", name="Edit: You, turn 2").click()
    page.get_by_label("You", exact=True).fill("what of over 3?")
    page.get_by_role("button", name="Save").click()
    finish(page)
    assert turns.count() == 3 and "over 3" in turns.nth(1).inner_text()
    page.get_by_role("button", name="Edit: Model, turn 3").click()
    page.get_by_label("Model", exact=True).fill(f"It is {HOSTILE}.")
    page.get_by_role("button", name="Save").click()
    assert HOSTILE in turns.nth(2).inner_text()
    with page.expect_request("**/studio/generate") as sent:
        say(page, "and then?")
    assert [one["content"] for one in sent.value.post_data_json["messages"]] == [
        "Be brief.", "what of over 3?", f"It is {HOSTILE}.", "and then?"]  # fmt: skip
    page.get_by_role("button", name="Clear", exact=True).click()
    n = page.locator(".branch").count()
    for n_before in range(n, n + 30):  # an answer may end before its first token
        page.get_by_role("button", name="Regenerate").click()
        page.wait_for_function(f"() => document.querySelectorAll('.branch').length === {n_before + 1}")
        finish(page)
        if tokens(page).count():
            break
    tokens(page).first.click()
    with page.expect_request("**/studio/generate") as sent:
        page.locator(".token-card .row:not(:disabled)").first.click()
    finish(page)
    assert sent.value.post_data_json["answers"] is True and "messages" not in sent.value.post_data_json
    page.get_by_role("button", name="New conversation").click()
    assert turns.count() == 0


def test_a_system_message_can_be_added_later_and_a_tuned_model_can_write_plain_text(page: Any) -> None:
    choose(page, "group/tuned")
    setting(page, "max_tokens", 5)
    say(page, "hello")
    page.get_by_role("button", name="Add a system message").click()
    page.get_by_label("System message").fill("Be kind.")
    with page.expect_request("**/studio/generate") as sent:
        page.get_by_role("button", name="Save").click()
    finish(page)
    assert [one["role"] for one in sent.value.post_data_json["messages"]] == ["system", "user"]
    page.get_by_role("button", name="Text", exact=True).click()
    generate(page, "line 7:")
    assert shown_prompt(page) == "line 7:"
