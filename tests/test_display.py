"""The output that a person sees during a run."""

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

import tiny
from gptworks.data.prepare import prepare
from gptworks.errors import UserError
from gptworks.recipe import parse_recipe
from gptworks.training.loop import Run, train
from gptworks.training.record import display as display_module
from gptworks.training.record import reporter as reporter_module
from gptworks.training.record.display import Display
from halves import BrokenOff


class Clock:
    """A monotonic clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(display_module, "time", clock)
    return clock


def quiet_display() -> Display:
    return Display(Console(file=io.StringIO(), width=200))


def test_the_time_left_goes_down_during_a_long_step(clock: Clock) -> None:
    display = quiet_display()
    display.step("step 1/10", 0.1, 3.0, eta=190.0)
    assert "3:10 left" in display.line_of(80)
    clock.now += 60
    assert "2:10 left" in display.line_of(80)


def test_the_loss_shown_is_a_mean_over_steps(clock: Clock) -> None:
    display = quiet_display()
    for step in range(400):
        display.step(f"step {step}", step / 400, 2.0 if step % 2 else 4.0, eta=1.0)
    assert re.search(r"loss (2\.97|3\.0)", display.line_of(80))
    display.step("step 400", 1.0, math.nan, eta=0.0)
    assert "nan" not in display.line_of(80)


def test_the_line_moves_in_whatever_takes_long(clock: Clock) -> None:
    display = quiet_display()
    assert display.line_of(80) == "step 0  first step"
    clock.now += 7
    assert display.line_of(80) == "step 0  first step 0:07"
    display.step("step 1/10", 0.1, 3.0, eta=3.0)
    assert "this step" not in display.line_of(80)
    clock.now += 9
    assert display.line_of(80).endswith("0:00 left  this step 0:09")
    with display.during("evaluation"):
        clock.now += 12
        assert display.line_of(80).endswith("evaluation 0:12")
    assert "evaluation" not in display.line_of(80)


def test_the_first_step_shows_its_own_loss(clock: Clock) -> None:
    display = quiet_display()
    display.step("step 1", 0.0, 5.25, eta=1.0)
    assert "loss 5.250" in display.line_of(80)


SIZES = {
    "a short run": ("step 151/1,040", 3.864, 3.7692, 24_206, 0.68, "", 182),
    "millions of steps, for days": ("step 12,345,678/100,000,000", 2.0, 2.1, 1_234_567_890, 1.0, "", 1e6),
    "by the clock, with experts": ("step 123,456  10:01:05 of 48:00:00", 11.25, 12.5, 987_654, 0.05, "1.25×", 136_800),
    "before its speed is known": ("step 1/1,040", 7.8, None, None, None, "", 500),
    "a large loss": ("step 9,999/10,000", 123_456.789, 123_456.789, 0.5, None, "64.00×", 5),
}


def sized(case: str, console: Console) -> Display:
    where, loss, held_out, speed, share, load, eta = SIZES[case]
    display = Display(console)
    display.step(where, 0.5, loss, eta)
    if held_out is not None:
        display.validation(151, held_out, "")
    if speed is not None:
        display.speed(speed, share, load)
    return display


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("case", SIZES)
def test_the_line_fits_its_terminal_at_every_size_of_numbers(case: str, width: int, clock: Clock) -> None:
    out = io.StringIO()
    display = sized(case, Console(file=out, width=width, force_terminal=True))
    for waited in (0, 3600):
        clock.now += waited
        shown = Console(file=io.StringIO(), width=width)
        shown.print(display)
        lines = [*shown.file.getvalue().splitlines(), display.line_of(width)]  # type: ignore[attr-defined]
        assert len(lines) <= 3, lines
        assert all(len(line) <= width for line in lines), lines
        assert "loss" in "".join(lines[:-1]) and "left" in "".join(lines[:-1]), lines
        assert "loss" in lines[-1] and "left" in lines[-1], lines


def test_the_line_says_in_words_what_its_figures_are(clock: Clock) -> None:
    display = sized("a short run", Console(file=io.StringIO(), width=80))
    shown = Console(file=io.StringIO(), width=80)
    shown.print(display)
    assert shown.file.getvalue().splitlines()[1] == (  # type: ignore[attr-defined]
        "loss 3.864, held out 3.769  24,206 tokens a second, 68% of full speed"
    )
    assert display.line_of(100) == (
        "step 151/1,040  loss 3.864, held out 3.769  24,206 tokens a second, 68% of full speed  3:02 left"
    )
    assert display.line_of(80) == "step 151/1,040  loss 3.864, held out 3.769  24,206 tokens a second  3:02 left"
    assert display.line_of(40) == "step 151/1,040  loss 3.864  3:02 left"


def test_the_lines_of_a_run_fit_80_columns_of_a_terminal_and_are_plain_elsewhere(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=6, evaluate_every=3, micro_batch_size=4, evaluate_sequences=2)
    plain, screen = io.StringIO(), io.StringIO()
    train(parse_recipe(tree), display=Display(Console(file=plain, width=80)))
    assert "\x1b" not in plain.getvalue() and "\r" not in plain.getvalue()
    tree["run_dir"] = str(tmp_path / "again")
    train(parse_recipe(tree), display=Display(Console(file=screen, width=80, force_terminal=True)))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    long = [line for line in re.split(r"[\r\n]+", shown) if len(line) > 80 and str(tmp_path) not in line]
    assert not long
    assert "loss: how badly" in plain.getvalue() and "full speed: " in plain.getvalue() and "MFU" in plain.getvalue()
    assert re.search(r"held out: .* 2 of \d+ sequences$", plain.getvalue(), re.MULTILINE)


def test_a_run_whose_context_grows_says_until_when_its_evaluations_read_farther(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=6, shorter_contexts=[[2, 8], [4, 16], [5, 32]])
    out = io.StringIO()
    train(parse_recipe(tree), display=Display(Console(file=out, width=200)))
    assert "sequences of 32 tokens: longer than the rows to learn from until step 4\n" in out.getvalue()


def test_a_sample_that_cannot_begin_names_its_setting(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, precision="fp32", max_steps=3, sample_every=1)
    prepared = prepare(parse_recipe(tree))
    plain = json.loads((prepared.folder / "tokenizer/tokenizer.json").read_text())
    plain["added_tokens"] = []
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    tree["tokenizer"] = {"type": "file", "path": str(tmp_path / "plain.json")}
    with pytest.raises(UserError, match=r"train\.sample_prompts has '': the prompt is empty .* train\.sample_every=0"):
        train(parse_recipe(tree))


def test_a_run_says_at_its_start_what_it_trains_and_where(tmp_path: Path) -> None:
    out = io.StringIO()
    tree = tiny.recipe_tree(tmp_path, precision="fp32", max_steps=3, sample_every=1, sample_prompts=["line "])
    done = train(parse_recipe(tree), display=Display(Console(file=out, width=200)))
    said = out.getvalue()
    assert "26,176 parameters" in said
    assert str(tmp_path / "run") in said
    assert "fp32 on" in said
    assert done.tokens == 3 * 8 * 32
    length = r"; \d\d,\d\d\d training tokens, and the run ends after 3 steps, 768 tokens or 0\.0\d+ epochs\n"
    assert re.search(length, said)
    assert "step      1  line ▸" in said  # a sample, as soon as it is made
    folder = tmp_path / "run"
    samples = (folder / "samples.md").read_text(encoding="utf-8")
    assert samples.count("Prompt:\n\n```text\nline \n```\n\nContinuation:\n\n```text\n") == 3
    assert f"Next: gptworks generate {folder} PROMPT\n      gptworks evaluate {folder}\n" in said
    assert f"\n      gptworks export {folder} run.html --format html\n" in said


def test_a_run_describes_itself_from_the_first_evaluation_on_and_says_when_it_will_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "PACE_KNOWN_SECONDS", 0.0)
    out, step = io.StringIO(), Run.training_step

    def until_the_third(run: Run) -> None:
        if run.progress.step == 2:
            raise BrokenOff
        step(run)

    monkeypatch.setattr(Run, "training_step", until_the_third)
    tree = tiny.recipe_tree(tmp_path, max_steps=9, evaluate_every=2, sample_every=2, sample_tokens=3)
    with pytest.raises(BrokenOff):
        train(parse_recipe(tree), display=Display(Console(file=out, width=200)))
    folder = tmp_path / "run"
    assert {"model-card.md", "curves.svg", "samples.md"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "outcome.json").exists(), "it has not ended"
    assert "| in training | so far, step 2 |" in (folder / "model-card.md").read_text(encoding="utf-8")
    assert len(re.findall(r"at this pace the run ends in \d+:\d\d, at about \d\d:\d\d\n", out.getvalue())) == 1


def test_a_run_by_the_clock_shows_the_clock(tmp_path: Path) -> None:
    out = io.StringIO()
    tree = tiny.recipe_tree(tmp_path, max_steps=None, max_minutes=0.02, warmup_steps=0)
    train(parse_recipe(tree), display=Display(Console(file=out, width=200)))
    assert " of 0:01" in out.getvalue()


def test_an_adapter_says_its_share(tmp_path: Path) -> None:
    train(parse_recipe(tiny.recipe_tree(tmp_path, max_steps=3)), display=quiet_display())
    out = io.StringIO()
    tree = tiny.recipe_tree(tmp_path, max_steps=3, optimizer="adamw") | {
        "adapter": {"rank": 2}, "initialize_from": str(tmp_path / "run"), "run_dir": str(tmp_path / "adapted"),
    }  # fmt: skip
    train(parse_recipe(tree), display=Display(Console(file=out, width=200)))
    assert re.search(
        r"26,176 parameters and an adapter of [\d,]+, the only part trained \(\d+\.\d\d%\)", out.getvalue()
    )
