"""Hostile or mistaken recipes, data folders and prompts: each gives its error message quickly."""

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from gptworks import json_files
from gptworks.checkpoint import checkpoints, choose_checkpoint
from gptworks.data.cleaned import _read_counts
from gptworks.data.opened import open_prepared
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards, read_manifest
from gptworks.errors import UserError
from gptworks.evaluation.results import Evaluation, read_evaluations, save_evaluations
from gptworks.files import check_sums, remove_tree, sealed_json, unsealed_json
from gptworks.infer.batch import _tasks
from gptworks.infer.sampling import SamplingSettings
from gptworks.interop.huggingface.exporting import export_huggingface
from gptworks.interop.huggingface.importing import import_huggingface
from gptworks.interop.huggingface.verify import load_theirs
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.runs.history import read_history
from gptworks.runs.report import write_report
from gptworks.training import changes as record_of_changes
from gptworks.training.loop import train
from gptworks.training.objectives.distillation import _teacher_of_the_start

LETTERS = "bcdefghij"
BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{letter}: &{letter} [{','.join([f'*{before}'] * 10)}]\n"
    for before, letter in zip("a" + LETTERS, LETTERS, strict=False)
)

RECIPES = {
    "aliases that stand for a billion values": (BOMB, "more than 100,000 keys and values"),
    "a section that contains itself": ("model: &m\n  x: *m\n", "contains itself"),
    "a list that contains itself": ("&a [*a]", "contains itself"),
    "a key that occurs twice": ("seed: 1\nseed: 2\n", "the key `seed` occurs twice"),
    "brackets without end": ("[" * 5000, "nested more than 64 deep"),
    "braces without end": ("{a: " * 5000, "nested more than 64 deep"),
    "tabs": ("model:\n\tx: 1\n", "not readable YAML"),
    "a number of 6,000 digits": ("seed: " + "9" * 6000, "not readable YAML"),
    "a list": ("- 1\n", "holds a list, and a recipe"),
    "nothing": ("", "holds nothing, and a recipe"),
    "a number for a key": ("1: 2\n", "has the key 1"),
    "code": ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "a zero byte": ('run_dir: "a\\0b"\n', "zero byte"),
    "half a character": ('name: "\\ud800"\n', "line 1, column 10: "),
    "a day that is none": ("name: 2020-13-45\n", "not readable YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "not readable YAML"),
    "a key that is a list": ("? [1, 2]\n: 3\n", "unhashable key"),
    "a wrong type with a long value": (f"model: [{'1, ' * 9000}1]\n", "needs a section"),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_hostile_recipe_has_a_short_message(kind: str, tmp_path: Path) -> None:
    text, words = RECIPES[kind]
    path = tmp_path / "hostile.yaml"
    path.write_text(text, encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=words) as refused:
        load_recipe(path)
    assert len(str(refused.value)) < 3000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB"


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "bytes", "large", "below a file"])
def test_what_is_no_recipe_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    if kind == "folder":
        path.mkdir()
        (path / "recipe.yaml").mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00a")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 34)
    else:
        path.write_text("x")
        path /= "inside"
    with pytest.raises(UserError, match=r"recipe\.yaml"):
        load_recipe(path)


@pytest.mark.parametrize(
    "run_dir", ["runs/exp #2", "runs/a: b", "yes", "007", "null", "[x]", "runs/{a}", " runs/x", '"q"']
)
def test_a_path_of_an_override_is_taken_as_it_is_typed(run_dir: str, tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), [f"run_dir={run_dir}", "train.sample_prompts=[a, b]"])
    assert str(recipe.run_dir) == run_dir
    assert recipe.train.sample_prompts == ("a", "b")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "learning_rate=1",
            "^override `learning_rate=1`: unknown key `learning_rate`; did you mean `train.learning_rate`",
        ),
        ("train.lr=1", "^override `train.lr=1`: unknown key `train.lr`; did you mean `learning_rate`"),
        ("train.max_steps=1:30", "^override `train.max_steps=1:30`: `train.max_steps`"),
        ("train.learning_rate=inf", "^override .*finite"),
        ("run_dir=a\0b", "is not of the form"),
        (f"seed={'9' * 5000}", "`seed`"),
    ],
)
def test_a_wrong_override_is_blamed_itself_and_names_the_nearest_key(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        load_recipe(tiny.write_recipe(tmp_path), [override])


def test_a_misspelled_recipe_names_the_file_beside_it(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    with pytest.raises(UserError, match=r"did you mean .*tiny\.yaml"):
        load_recipe(tmp_path / "tny.yaml")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return prepare(parse_recipe(tiny.recipe_tree(tmp_path))).folder


def resealed(folder: Path, **changes: Any) -> None:
    """Change a manifest and update its own checksum, as an attacker would."""
    tree = json.loads((folder / "manifest.json").read_text()) | changes
    tree.pop("sha256", None)
    (folder / "manifest.json").write_text(sealed_json(tree))


NESTED = b'{"sha256": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("manifest.json", read_manifest),
        ("sums.json", lambda folder: check_sums(folder, 1000)),
        ("changes.json", record_of_changes.read_history),
        ("counts.json", lambda folder: _read_counts(folder / "counts.json")),
        ("tasks.jsonl", lambda folder: list(_tasks((folder / "tasks.jsonl").open("rb"), "tasks", SamplingSettings()))),
        ("teacher.json", lambda folder: _teacher_of_the_start(folder, folder / "teacher.json")),
    ],
)
def test_json_that_is_nested_too_deeply_is_damaged(name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        unsealed_json(NESTED)
    (tmp_path / name).write_bytes(NESTED)
    with pytest.raises(UserError, match=r"(broken|damaged|not JSON)"):
        read(tmp_path)


def test_settings_that_may_not_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(json_files, "read_regular", refuse)
    with pytest.raises(UserError, match=r"config\.json cannot be read: Permission denied"):
        json_files.read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 3}, "holds the token"),
        ({"splits": {}}, "has no train split"),
        ({"dtype": "float64"}, "is broken"),
        ({"format_version": 99}, "format 99"),
        ({"tokenizer_files": {"../../text.txt": "0"}}, "not as it was written"),
    ],
)
def test_a_manifest_that_lies_is_refused(changes: dict[str, Any], words: str, shards: Path) -> None:
    resealed(shards, **changes)
    with pytest.raises(UserError, match=words):
        open_prepared(shards)
        TokenShards(shards, "train")


def test_a_file_of_shards_outside_the_folder_is_refused(shards: Path, tmp_path: Path) -> None:
    splits = json.loads((shards / "manifest.json").read_text())["splits"]
    splits["train"]["shards"][0]["file"] = "../../text.txt"
    resealed(shards, splits=splits)
    with pytest.raises(UserError):
        TokenShards(shards, "train")


def test_a_task_or_text_that_is_a_folder_is_refused(trained_run: Path, tmp_path: Path) -> None:
    refused = tiny.gptworks("evaluate", trained_run, "--text", tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {tmp_path}") and "Traceback" not in refused.stderr


def test_a_recipe_where_a_run_belongs_is_told_so(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    refused = tiny.gptworks("generate", path, "text")
    assert refused.returncode == 2
    assert f"{path} is a file, not a run folder" in refused.stderr
    assert yaml.safe_load(path.read_text())["run_dir"] in refused.stderr


# ------------------------------------------------------------------------------------------------- received run folders


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("received")
    settings = {"max_steps": 4, "sample_every": 2, "sample_prompts": ["line"], "sample_tokens": 4}
    train(parse_recipe(tiny.recipe_tree(folder, **settings)))
    return folder / "run"


@pytest.fixture
def received(made_run: Path, tmp_path: Path) -> Iterator[Path]:
    """A run folder as someone else may send it. Files outside it must stay unchanged."""
    shutil.copytree(made_run, tmp_path / "run")
    outside = tmp_path / "outside"
    (outside / "checkpoints" / "step-000004").mkdir(parents=True)
    (outside / "authorized_keys").write_text("precious")
    (outside / "checkpoints" / "step-000004" / "model.safetensors").write_text("precious")
    before = _described(outside)
    yield tmp_path / "run"
    assert _described(outside) == before


def _described(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {
        str(path): (one.st_mode, one.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path, one in found.items()
    }


WRITTEN = (
    "recipe.yaml", "changes.json", "outcome.json", "samples.md", "curves.svg", "model-card.md", "metrics.jsonl",
    "report.html",
)  # fmt: skip


def test_no_planted_temporary_name_in_a_received_run_is_followed(received: Path) -> None:
    """Names that used to be predictable are planted before a report is written and before a run is resumed."""
    for name in WRITTEN:
        for planted in (f".{name}.writing", f".writing-{name}"):
            (received / planted).symlink_to(received.parent / "outside" / "authorized_keys")
    for planted in (".writing-step-000006", ".removing-step-000004"):
        (received / "checkpoints" / planted).symlink_to(received.parent / "outside" / "checkpoints")
    write_report(read_history(received), received / "report.html")
    train(load_recipe(received, ["train.max_steps=6"]), resume=True, change=["train.max_steps"])
    assert next(iter(checkpoints(received))).step == 6
    assert {name for name in WRITTEN if (received / name).stat().st_size} == set(WRITTEN)


@pytest.mark.parametrize("name", [*WRITTEN[:7], "checkpoints", "tokenizer", "tensorboard", "evaluations", ".lock"])
def test_a_run_with_a_link_to_elsewhere_is_not_resumed(name: str, received: Path) -> None:
    path, outside = received / name, received.parent / "outside"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(outside / "checkpoints" if "." not in name else outside / "authorized_keys")
    with pytest.raises(UserError, match=f"{re.escape(name)} leads out of .*run, to .*outside"):
        train(load_recipe(received, ["train.max_steps=6"]), resume=True, change=["train.max_steps"])


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "sparse", "folder", "outside"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_file_of_another_kind_is_named_at_once(name: str, kind: str, received: Path) -> None:
    newest = checkpoints(received)[0]
    _plant(newest.folder / name, kind, received)
    with pytest.raises(UserError, match=rf"{name}.*(is a FIFO|leads out of|bytes|is a folder|is missing)"):
        choose_checkpoint(received, "4")
    assert newest.manifest_sha256 is None or name != "manifest.json"
    assert not newest.is_whole


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "sparse", "folder", "outside"])
def test_evaluations_and_the_card_are_read_as_files_alone(kind: str, received: Path) -> None:
    (received / "evaluations").mkdir()
    _plant(received / "evaluations" / "a.json", kind, received)
    with pytest.raises(UserError, match=r"a\.json (is a FIFO|leads out of|has \d+ bytes|is a folder|is not an eval)"):
        read_evaluations(received)
    remove_tree(received / "evaluations" / "a.json")
    _plant(received / "model-card.md", kind, received)
    [found] = [Evaluation("b", "text", "run", 4, 1, {})]
    with pytest.raises(UserError, match=r"model-card\.md (is a FIFO|leads out of|has \d+ bytes|is a folder)"):
        save_evaluations(received, [found])


def _plant(path: Path, kind: str, run: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to(kind if kind.startswith("/") else run.parent / "outside" / "authorized_keys")


def test_an_import_copies_nothing_that_a_link_leads_to(trained_run: Path, tmp_path: Path) -> None:
    export_huggingface(trained_run, tmp_path / "hf", verify=False)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "hf" / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"chat_template\.jinja leads out of .*hf"):
        import_huggingface(tmp_path / "hf", tmp_path / "imported", verify=False)
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("name", ["added_tokens.json", "additional_chat_templates/a.jinja", "merges.txt"])
@pytest.mark.parametrize("kind", ["fifo", "outside"])
def test_what_only_transformers_would_read_is_looked_at_before(
    name: str, kind: str, trained_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "authorized_keys").write_text("{}")
    export_huggingface(trained_run, tmp_path / "hf", verify=False)
    (tmp_path / "hf" / name).parent.mkdir(exist_ok=True)
    _plant(tmp_path / "hf" / name, kind, tmp_path / "run")
    with pytest.raises(UserError, match=f"{name} (is a FIFO|leads out of)"):
        import_huggingface(tmp_path / "hf", tmp_path / "imported")
    with pytest.raises(UserError, match=f"{name} (is a FIFO|leads out of)"):
        load_theirs(tmp_path / "hf")  # as an export of an adapter does, of a base that the user names


def test_a_folder_of_texts_with_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(tiny.TEXT)
    (tmp_path / "secret.txt").write_text("secret " * 1000)
    (tmp_path / "texts" / "b.txt").symlink_to(tmp_path / "secret.txt")
    tree = tiny.recipe_tree(tmp_path)
    tree["data"]["sources"] = [{"type": "text", "path": str(tmp_path / "texts")}]
    with pytest.raises(UserError, match=r"b\.txt leads out of .*texts"):
        prepare(parse_recipe(tree))
    (tmp_path / "texts" / "b.txt").unlink()
    (tmp_path / "texts" / "b.txt").symlink_to("a.txt")
    assert prepare(parse_recipe(tree)).manifest.splits["train"].documents == 2


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "sparse", "folder", "outside"])
def test_the_files_of_a_dataset_are_files_inside_it(kind: str, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "authorized_keys").write_text("precious")
    for name in ("train-00000.tokens", "train-00000.offsets", "tokenizer/tokenizer.json", "manifest.json"):
        folder = tmp_path / "copy"
        shutil.copytree(shards, folder)
        _plant(folder / name, kind, tmp_path / "run")
        with pytest.raises(UserError, match=Path(name).name):
            open_prepared(folder)
        shutil.rmtree(folder)
