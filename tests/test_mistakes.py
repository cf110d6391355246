"""Mistakes that people make: each answer names the line of a file, the value, the rule and what to type."""

from pathlib import Path

import pytest

import tiny
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.display import Display
from in_process import Command

GOOD = """\
model:
  context_length: 32
  n_layers: 2
  d_model: 32
  n_heads: 2
tokenizer: {type: char}
data:
  sources:
    - {type: text, path: text.txt}
train:
  max_steps: 4
  batch_size: 4
"""

LINES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a tab": ("  context_length", "\tcontext_length", ("line 2,", "indent with spaces, not with tabs")),
    "a line indented further": ("  d_model", "   d_model", ("line 4,", "`d_model: 32`", "indented by 3", "above by 2")),
    "a line indented less": ("  d_model", " d_model", ("line 4,", "indented by 1", "indent all lines")),
    "no-break spaces": ("  d_model", "\u00a0\u00a0d_model", ("line 5,", "no-break spaces")),
    "an open quote": ("path: text.txt", 'path: "text.txt', ("line 9, column 26", "quotation mark is not closed")),
    "an open brace": ("{type: char}", "{type: char", ("line 6,", "`{` is not closed")),
    "a list that is left open": ("- {type: text, path: text.txt}", "[{type: text}", ("line 9,", "`[` is not closed")),
    "no space after the colon": ("n_layers: 2", "n_layers:2", ("line 3,", "`n_layers:2`", "a colon and a space")),
    "an equals sign": ("n_layers: 2", "n_layers = 2", ("line 3,", "write `key: value`")),
    "a star": ("path: text.txt", "path: *.txt", ("line 9,", "single quotation marks")),
    "a Windows path in double quotes": ("path: text.txt", 'path: "C:\\Users"', ("line 9,", "single quotation marks")),
    "a colon in a value": ("type: char", "type: a: b", ("line 6,", "needs quotation marks")),
    "a word for a number": ("n_layers: 2", "n_layers: six", ("line 3:", '`model.n_layers`="six"', "a whole number")),
    "half a layer": ("n_layers: 2", "n_layers: 2.5", ("line 3:", "=2.5", "a whole number")),
    "no value": ("n_layers: 2", "n_layers:", ("line 3:", "`model.n_layers` has no value", "a whole number")),
    "a comma in a number": ("max_steps: 4", "max_steps: 1,000", ("line 11:", '"1,000"', "write 1000")),
    "an exponent": ("max_steps: 4", "max_steps: 1e6", ("line 11:", '"1e6"', "write 1000000")),
    "a unit": ("max_steps: 4", "max_steps: 1.5M", ("line 11:", '"1.5M"', "write 1500000")),
    "minutes with their unit": ("max_steps: 4", "max_minutes: 5 min", ("line 11:", '"5 min"', "write 5")),
    "a leading zero": ("max_steps: 4", "max_steps: 010", ("line 11,", "010", "without leading zeros")),
    "a time of day": ("max_steps: 4", "max_steps: 1:30", ("line 11,", "1:30", "in quotation marks")),
    "a negative number": ("n_layers: 2", "n_layers: -2", ("line 3:", "=-2", "greater than 0")),
    "a huge number": ("n_layers: 2", "n_layers: 2000000000", ("line 3:", "=2000000000", "less than or equal to")),
    "neither yes nor no": ("n_heads: 2", "n_heads: 2\n  qk_norm: maybe", ("line 6:", '"maybe"', "true or false")),
    "a choice spelled wrong": ("max_steps: 4", "optimizer: adam", ("line 11:", '"adam"', "did you mean `adamw`")),
    "a list for a section": ("tokenizer: {type: char}", "tokenizer: [char]", ("line 6:", "`tokenizer`", "section")),
    "a section for a list": ("    - {type: text, path: text.txt}", "    type: text", ("line 8:", "a list", "`- `")),
    "a key twice": ("n_heads: 2", "n_heads: 2\n  n_layers: 3", ("line 6,", "`n_layers` occurs twice", "in line 3")),
    "a section twice": ("batch_size: 4", "batch_size: 4\nmodel: {n_layers: 3}", ("line 13,", "`model` occurs twice")),
    "a section misspelled": ("tokenizer:", "tokeniser:", ("line 6:", "`tokeniser`", "did you mean `tokenizer`")),
    "a section by another name": ("train:", "training:", ("line 10:", "did you mean `train`")),
    "no section tokenizer": ("tokenizer: {type: char}\n", "", ("`tokenizer` is missing", "tokenizer: {type: bpe")),
    "an empty section": ("tokenizer: {type: char}", "tokenizer:", ("line 6:", "has no value", "tokenizer: {type: bpe")),
    "a setting outside its section": ("model:\n", "batch_size: 4\nmodel:\n", ("line 1:", "`train.batch_size`")),
    "a setting in another section": ("d_model: 32", "d_model: 32\n  batch_size: 4", ("line 5:", "`train.batch_size`")),
    "a misspelled setting elsewhere": ("model:\n", "learning_rat: 1\nmodel:\n", ("line 1:", "`train.learning_rate`")),
    "a source without a type": ("{type: text, path: text.txt}", "{path: text.txt}", ("line 9:", "needs a `type`")),
}  # fmt: skip


def assert_answers(found: tuple[int, str], *expected: str) -> None:
    code, error = found
    assert code == 2, error
    assert "Traceback" not in error and "pydantic" not in error.lower()
    assert [line.startswith("error: ") for line in error.splitlines()].count(True) == 1, error
    for text in expected:
        assert text in error


@pytest.mark.parametrize("case", LINES)
def test_a_mistake_in_a_recipe_is_answered_with_its_line(case: str, tmp_path: Path, command: Command) -> None:
    old, new, expected = LINES[case]
    assert GOOD.count(old) == 1
    (tmp_path / "mine.yaml").write_text(GOOD.replace(old, new), encoding="utf-8")
    assert_answers(command("train", tmp_path / "mine.yaml", f"run_dir={tmp_path / 'run'}"), "mine.yaml", *expected)
    assert not (tmp_path / "run").exists()


FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "UTF-16": (GOOD.encode("utf-16"), ("is not UTF-8 but UTF-16", "Save it as UTF-8")),
    "an old encoding": (b"# Gr\xfc\xdfe\n" + GOOD.encode(), ("is not UTF-8: byte 4", "Save it as UTF-8")),
    "an empty file": (b"", ("holds nothing", "sections model, tokenizer, data and train", "gptworks init")),
    "plain words": (b"train a model on my texts", ("holds only 'train a model", "`model:`")),
    "a list": (b"- model\n- data\n", ("holds a list", "`model:`")),
    "two recipes in one": (GOOD.encode() + b"---\n" + GOOD.encode(), ("line 13,",)),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_recipe(case: str, tmp_path: Path, command: Command) -> None:
    data, expected = FILES[case]
    (tmp_path / "mine.yaml").write_bytes(data)
    assert_answers(command("train", tmp_path / "mine.yaml"), "mine.yaml", *expected)


@pytest.mark.parametrize("data", [GOOD.replace("\n", "\r\n").encode(), b"\xef\xbb\xbf" + GOOD.encode()])
def test_line_ends_of_windows_and_a_mark_of_utf_8_are_read(data: bytes, tmp_path: Path, command: Command) -> None:
    (tmp_path / "mine.yaml").write_bytes(data)
    code, error = command("train", tmp_path / "mine.yaml", "train.max_steps=0")
    assert code == 2 and "`train.max_steps`=0" in error, "its settings were read"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, a text, the run runs/english, an empty folder and one with other files."""
    folder = tmp_path_factory.mktemp("folder")
    tree = tiny.recipe_tree(folder, max_steps=2, warmup_steps=0) | {"run_dir": str(folder / "runs" / "english")}
    train(parse_recipe(tree), display=Display())
    (folder / "mine.yaml").write_text(GOOD, encoding="utf-8")
    (folder / "empty").mkdir()
    (folder / "other").mkdir()
    (folder / "other" / "thesis.tex").touch()
    return folder


COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a run misspelled": ("generate runs/englsh line", ("no such run folder", "did you mean runs/english?")),
    "a run without its folder": ("generate english line", ("no such run folder", "did you mean runs/english?")),
    "the folder of the runs": ("generate runs line", ("not a run folder", "such as runs/english")),
    "a folder inside a run": ("evaluate runs/english/tokenizer", ("not a run folder", "did you mean runs/english?")),
    "a recipe as a run": ("chat mine.yaml", ("mine.yaml is a file, not a run folder", "runs/mine")),
    "a run of another folder": ("report runs/englsh", ("no such run folder", "did you mean runs/english?")),
    "compared with what is not there": ("compare runs/english runs/englis", ("did you mean runs/english?",)),
    "forked from a misspelled run": ("fork runs/englsh runs/new", ("did you mean runs/english?",)),
    "resumed under another name": ("train runs/englsh --resume", ("did you mean runs/english?",)),
    "resumed in an empty folder": ("train empty --resume", ("empty is not a run folder: it has no recipe.yaml",)),
    "resumed in the wrong folder": ("train other --resume", ("other is not a run folder", "gptworks train RECIPE")),
    "trained twice": ("train runs/english", ("already holds a run", "--resume", "run_dir=")),
    "a run folder for a new recipe": ("train mine.yaml run_dir=other", ("holds other files", "another run_dir=")),
    "a recipe misspelled": ("train mien.yaml", ("no such recipe file", "did you mean mine.yaml?")),
    "a shipped recipe misspelled": ("train dmo", ("no such recipe file", "did you mean `demo`")),
    "a preset misspelled": ("plan gpt2-meduim", ("no preset is called", "did you mean `gpt2-medium`")),
    "a text misspelled": ("train mine.yaml data.sources.0.path=txet.txt", ("txet.txt: no such file", "text.txt?")),
    "a folder of texts misspelled": (
        "init txet.txt -o new.yaml",
        ("txet.txt: no such file or folder", "did you mean text.txt?"),
    ),
    "an empty folder of texts": ("init empty -o new.yaml", ("empty holds no text", "it has no files")),
    "a base misspelled": ("tune runs/englsh mine.yaml", ("no such run folder", "did you mean runs/english?")),
    "a base that is nowhere": ("tune nobase mine.yaml", ("nobase: no such folder", "with its owner")),
    "examples that are not there": ("tune runs/english chats.jsonl", ("chats.jsonl: no such file",)),
    "spaces around the equals sign": ("train mine.yaml train.max_steps = 4", ("`train.max_steps`", "without spaces")),
    "a setting without its section": ("train mine.yaml max_steps=4", ("`max_steps`", "did you mean `train.max_steps`")),
    "a setting misspelled": (
        "train mine.yaml train.max_step=4",
        ("override `train.max_step=4`", "did you mean `max_steps`"),
    ),
    "a comma in an override": ("train mine.yaml train.max_steps=1,000", ("override", '"1,000"', "write 1000")),
    "a unit in an override": ("train mine.yaml train.max_steps=1M", ("override", '"1M"', "write 1000000")),
    "a precision misspelled": ("train mine.yaml train.precision=bf61", ('"bf61"', "did you mean `bf16`")),
    "an item that the list lacks": ("train mine.yaml data.sources.1.path=x", ("`data.sources.1.path=x`", "list of 1")),
    "a checkpoint that is not there": ("generate runs/english line --checkpoint 7", ("`7`", "best, last or one of")),
    "a system message for a base model": ("generate runs/english line --chat", ("no chat template",)),
    "a recipe for the studio": ("studio runs/englsh", ("englsh: no such folder",)),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_mistake_on_the_command_line_is_answered(
    case: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, expected = COMMANDS[case]
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert_answers(command(*arguments.split()), *expected)
    assert sorted(one for one in folder.iterdir() if one.name != "data") == [
        one for one in before if one.name != "data"
    ]


def test_a_dataset_of_another_version_says_what_to_do(folder: Path, command: Command) -> None:
    [manifest] = (folder / "data").glob("*/manifest.json")
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text.replace('"format_version": ', '"format_version": 9'), encoding="utf-8")
    try:
        assert_answers(command("data", "info", manifest.parent), "has format 9", "gptworks data build")
    finally:
        manifest.write_text(text, encoding="utf-8")
