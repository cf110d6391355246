"""Mixtures: their settings in a recipe, the folder of several datasets, and a run on it."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gptworks import evaluate, plan
from gptworks.cli import app
from gptworks.config import CharTokenizer, Recipe, Role, role_of
from gptworks.data.mixture import mix_folders
from gptworks.data.opened import Prepared, held_out_text, open_prepared
from gptworks.data.prepare import find_prepared, prepare
from gptworks.data.shards import SPLITS, TokenShards
from gptworks.describe.plan_tables import plan_json
from gptworks.errors import UserError
from gptworks.files import sealed_json, unsealed_json
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.tokenizer import save_tokenizer, train_tokenizer
from gptworks.training.changes import check_changes
from gptworks.training.fork import fork
from gptworks.training.loop import train
from gptworks.training.objectives.base import choose_objective
from gptworks.training.record.metrics import read_metrics
from gptworks.units import epochs_words
from tiny import recipe_tree

SOURCES = [{"type": "text", "path": "x"}]


def tree(folder: Path, *members: dict[str, Any], **data: Any) -> dict[str, Any]:
    """Return a recipe of a mixture; `anneal` and other settings of data as given."""
    whole = recipe_tree(folder)
    del whole["data"]["sources"]
    whole["data"] |= {"mixture": list(members), **data}
    if any("dataset" in member for member in members):
        whole["tokenizer"] = {"type": "dataset"}
    return whole


def web(**settings: Any) -> dict[str, Any]:
    return {"name": "web", "weight": 0.7, "dataset": "datasets/web"} | settings


def code(**settings: Any) -> dict[str, Any]:
    return {"name": "code", "weight": 0.3, "dataset": "datasets/code"} | settings


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("members", "data", "words"),
    [
        ([web()], {"sources": SOURCES}, "`data.sources` and `data.mixture` are both given"),
        ([], {}, "`data.sources` and `data.mixture` are both empty"),
        ([web(), web()], {}, "two datasets with the name web"),
        ([web(weight=-1), code()], {}, "`data.mixture.0.weight`=-1: should be greater than or equal to 0"),
        ([web(weight=float("nan")), code()], {}, "`data.mixture.0.weight`=NaN: should be a finite number"),
        ([web(weight=float("inf")), code()], {}, "`data.mixture.0.weight`=Infinity: should be a finite number"),
        ([web(weight=0), code()], {}, "web has weight=0 and no weight in anneal.weights, so it is never read"),
        ([web(weight=0)], {}, "the weights of mixture are all 0"),
        ([web(name="../web")], {}, "`data.mixture.0.name`"),
        ([web(sources=SOURCES)], {}, "web: give either dataset (a built folder) or sources"),
        ([{"name": "web"}], {}, "web: give either dataset (a built folder) or sources"),
        ([{"name": "web", "sources": [{"type": "conversations", "path": "x"}]}], {}, "a mixture is of text"),
        ([web(wieght=1)], {}, "unknown key `data.mixture.0.wieght`; did you mean `weight`?"),
        ([web(), code()], {"anneal": {"share": 0.1, "weights": {"cod": 1}}}, "anneal.weights has cod, and mixture has"),
        ([web(), code()], {"anneal": {"share": 0.1, "weights": {"code": 0}}}, "anneal.weights are all 0"),
        (
            [web(), code()],
            {"anneal": {"weights": {"code": 1}}},
            "set either share or from_sample",
        ),
        ([web(), code()], {"anneal": {"share": 1, "weights": {"code": 1}}}, "less than 1"),
        ([web(), code()], {"anneal": {"share": 0.99, "weights": {"code": 1}}}, "is the entire run"),
    ],
)
def test_impossible_mixtures_are_refused(
    tmp_path: Path, members: list[dict[str, Any]], data: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as error:
        parse_recipe(tree(tmp_path, *members, **data))
    assert words in str(error.value)


def test_anneal_needs_a_mixture_and_a_share_needs_max_steps(tmp_path: Path) -> None:
    whole = recipe_tree(tmp_path)
    whole["data"]["anneal"] = {"share": 0.1, "weights": {"web": 1}}
    with pytest.raises(UserError, match=r"anneal.weights has web, and mixture has no datasets"):
        parse_recipe(whole)
    whole = tree(tmp_path, web(), code(), anneal={"share": 0.1, "weights": {"code": 1}})
    for length in ({"max_steps": None, "epochs": 1}, {"max_minutes": 1}):
        with pytest.raises(UserError, match=r"share=0.1 is a share of train.max_steps, which must be"):
            parse_recipe(whole | {"train": whole["train"] | length})


def test_the_place_of_the_anneal_is_counted_in_samples(tmp_path: Path) -> None:
    def place(**anneal: Any) -> int | None:
        return parse_recipe(tree(tmp_path, web(), code(), anneal={"weights": {"code": 1}} | anneal)).anneal_from

    assert place(share=0.25) == 15 * 8  # of 20 steps of 8 samples
    assert place(share=0.001) == 19 * 8
    assert place(from_sample=99) == 99
    assert parse_recipe(tree(tmp_path, web(), code())).anneal_from is None


def test_the_tokenizer_must_be_that_of_the_datasets(tmp_path: Path) -> None:
    for type_ in ("char", "bpe", "word"):
        with pytest.raises(UserError, match=rf"tokenizer.type={type_} would be trained, but the dataset web is"):
            parse_recipe(tree(tmp_path, web()) | {"tokenizer": {"type": type_}})
    sources = {"name": "web", "sources": SOURCES}
    with pytest.raises(UserError, match=r"tokenizer.type=dataset needs a built dataset"):
        parse_recipe(tree(tmp_path, sources) | {"tokenizer": {"type": "dataset"}})
    with pytest.raises(UserError, match="type=dataset with added_tokens or chat_template"):
        parse_recipe(tree(tmp_path, web()) | {"tokenizer": {"type": "dataset", "added_tokens": ["<a>"]}})
    parse_recipe(tree(tmp_path, web(), sources | {"name": "new"}))  # the sources are encoded with web's tokenizer


def test_the_settings_of_a_mixture_that_a_run_may_change(tmp_path: Path) -> None:
    recipe = parse_recipe(tree(tmp_path, web(), code(), anneal={"share": 0.1, "weights": {"code": 1}}))
    roles = {"mixture.0.weight": Role.FIXED, "mixture.0.dataset": Role.FREE, "mixture.0.name": Role.FREE,
             "anneal.share": Role.STEERING, "anneal.weights": Role.STEERING}  # fmt: skip
    assert {path: role_of(recipe, f"data.{path}") for path in roles} == roles
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


# --------------------------------------------------------------------------------------------------------- folder


TEXTS = {
    "web": "".join(f"line {i}: the quick brown fox jumps over the lazy dog.\n" for i in range(90)),
    "code": "".join(f"def f{i}(x): return x * {i} + (the, lazy, dog)\n" for i in range(40)),
}


def built(folder: Path, name: str, tokenizer: dict[str, Any] | None = None) -> Prepared:
    """Build a dataset of one text alone."""
    (folder / f"{name}.txt").write_text(TEXTS.get(name, TEXTS["web"] + name), encoding="utf-8")
    whole = recipe_tree(folder)
    whole["data"]["sources"][0]["path"] = str(folder / f"{name}.txt")
    return prepare(parse_recipe(whole | {"tokenizer": tokenizer or letters(folder)}))


def letters(folder: Path) -> dict[str, Any]:
    """Return the settings of a tokenizer with all characters of the texts."""
    if not (folder / "letters").exists():
        save_tokenizer(train_tokenizer(CharTokenizer(type="char"), TEXTS.values()), folder / "letters")
    return {"type": "file", "path": str(folder / "letters")}


@pytest.fixture
def two(tmp_path: Path) -> dict[str, Prepared]:
    return {name: built(tmp_path, name) for name in TEXTS}


def of(two: dict[str, Prepared], folder: Path, **data: Any) -> Recipe:
    members = [{"name": name, "dataset": str(one.folder)} for name, one in two.items()]
    return parse_recipe(tree(folder, *members, **data))


def test_a_mixture_is_one_sequence_of_its_datasets_in_links(tmp_path: Path, two: dict[str, Prepared]) -> None:
    prepared = prepare(of(two, tmp_path))
    for split in SPLITS:
        whole = TokenShards(prepared.folder, split)
        parts = [TokenShards(one.folder, split) for one in two.values()]
        assert whole.read(0, whole.n_tokens).tolist() == [
            t for one in parts for t in one.read(0, one.n_tokens).tolist()
        ]
        assert [s.name for s in whole.stretches] == ["web", "code"]
        assert [s.n_tokens for s in whole.stretches] == [one.n_tokens for one in parts]
        assert [s.text_bytes for s in whole.stretches] == [one.text_bytes for one in parts]
        assert (whole.n_documents, whole.text_bytes) == (2, sum(one.text_bytes for one in parts))
    assert (prepared.folder / "train-00001.tokens").samefile(two["code"].folder / "train-00000.tokens")
    assert b"".join(held_out_text(prepared)) == b"".join(b"".join(held_out_text(one)) for one in two.values())
    again = prepare(of(two, tmp_path))
    assert again.reused and again.folder == prepared.folder
    for one in two.values():  # it is complete in itself
        shutil.rmtree(one.folder)
    assert open_prepared(prepared.folder).manifest == prepared.manifest


def test_across_file_systems_it_is_a_copy(
    tmp_path: Path, two: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, to: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    prepared = prepare(of(two, tmp_path))
    TokenShards(prepared.folder, "train").verify()
    assert not (prepared.folder / "train-00001.tokens").samefile(two["code"].folder / "train-00000.tokens")


def test_one_dataset_is_used_as_it_is(tmp_path: Path, two: dict[str, Prepared]) -> None:
    assert prepare(of({"mine": two["web"]}, tmp_path)).folder == two["web"].folder


def test_a_mixture_in_a_mixture_is_its_part_of_that_name(tmp_path: Path, two: dict[str, Prepared]) -> None:
    whole = prepare(of(two, tmp_path))
    assert prepare(of({"web": whole, "code": whole}, tmp_path)).folder == whole.folder
    other = prepare(of({"code": whole, "web": two["web"]}, tmp_path))
    assert (
        other.manifest.fingerprint
        == prepare(of({"code": two["code"], "web": two["web"]}, tmp_path)).manifest.fingerprint
    )
    assert [part.name for part in other.manifest.parts] == ["code", "web"]
    with pytest.raises(UserError, match=r"is a mixture itself, of web, code, and none of them is all"):
        prepare(of({"all": whole}, tmp_path))


def test_datasets_of_different_tokenizers_are_refused_by_name(tmp_path: Path, two: dict[str, Prepared]) -> None:
    other = built(tmp_path, "prose", {"type": "bpe", "vocab_size": 280})
    with pytest.raises(UserError, match=r"web \(.*\) and prose \(.*, 280\) have different tokenizers.*tokenizer.path="):
        prepare(of({"web": two["web"], "prose": other}, tmp_path))
    whole = tree(tmp_path, web(dataset=str(two["web"].folder))) | {
        "tokenizer": {"type": "file", "path": str(other.folder / "tokenizer")}
    }
    with pytest.raises(UserError, match=r"tokenizer.type=file is not the tokenizer of web .*type=dataset"):
        prepare(parse_recipe(whole))


def test_a_folder_that_is_not_a_dataset_is_refused(tmp_path: Path, two: dict[str, Prepared]) -> None:
    with pytest.raises(UserError, match=r"nothing holds no prepared text"):
        prepare(parse_recipe(tree(tmp_path, web(dataset=str(tmp_path / "nothing")))))
    prepared = prepare(of(two, tmp_path))
    manifest = unsealed_json((prepared.folder / "manifest.json").read_bytes())
    for shards, why in (({"train": 2, "validation": 1}, "ValidationError"), ({"train": -1, "validation": 1}, "Valid")):
        manifest["parts"][0]["shards"] = shards
        (prepared.folder / "manifest.json").write_text(sealed_json(manifest))
        with pytest.raises(UserError, match=rf"is broken \({why}"):
            open_prepared(prepared.folder)


def test_sources_are_encoded_with_the_tokenizer_of_the_datasets(tmp_path: Path, two: dict[str, Prepared]) -> None:
    (tmp_path / "code.txt").write_text(TEXTS["code"], encoding="utf-8")
    sources = {"name": "code", "sources": [{"type": "text", "path": str(tmp_path / "code.txt")}]}
    prepared = prepare(parse_recipe(tree(tmp_path, web(dataset=str(two["web"].folder)), sources)))
    assert prepared.manifest.fingerprint == prepare(of(two, tmp_path)).manifest.fingerprint


def test_one_tokenizer_is_trained_on_all_members_text(tmp_path: Path) -> None:
    members = []
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        members.append({"name": name, "sources": [{"type": "text", "path": str(tmp_path / f"{name}.txt")}]})
    recipe = parse_recipe(tree(tmp_path, *members))
    assert find_prepared(recipe) is None
    prepared = prepare(recipe)
    assert (found := find_prepared(recipe)) is not None and found.folder == prepared.folder
    assert set(prepared.tokenizer.get_vocab()) >= set("".join(TEXTS.values()))
    assert not any(files.unknown_tokens for files in prepared.manifest.splits.values())


# ------------------------------------------------------------------------------------------------------------ run


ANNEAL = {"share": 0.5, "weights": {"web": 0.1, "code": 0.9}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run of 4 steps of 8 samples over two datasets, whose weights change at sample 16."""
    folder = tmp_path_factory.mktemp("run")
    recipe = of_steps(folder, {name: built(folder, name) for name in TEXTS}, anneal=ANNEAL)
    train(recipe)
    return recipe


def of_steps(folder: Path, datasets: dict[str, Prepared], **data: Any) -> Recipe:
    whole = of(datasets, folder, **data).model_dump(mode="json")
    short = {"max_steps": 4, "warmup_steps": 1, "evaluate_every": 4, "checkpoint_every": 2}
    whole["train"] |= short | {"keep_checkpoints": 3, "schedule": "constant"}
    return parse_recipe(whole)


def losses(recipe: Recipe) -> list[float]:
    return [record["loss"] for record in read_metrics(recipe.run_dir / "metrics.jsonl") if "loss" in record]


def test_a_run_over_one_dataset_is_the_run_over_its_sources_bit_for_bit(tmp_path: Path) -> None:
    web = built(tmp_path, "web")
    mixed = of_steps(tmp_path, {"web": web})
    train(mixed)
    tree = mixed.model_dump(mode="json") | {"run_dir": str(tmp_path / "plain"), "tokenizer": letters(tmp_path)}
    tree["data"] |= {"mixture": [], "sources": [{"type": "text", "path": str(tmp_path / "web.txt")}]}
    plain = parse_recipe(tree)
    train(plain)
    assert losses(plain) == losses(mixed)


def test_the_run_says_how_often_it_reads_each_dataset(run: Recipe) -> None:
    objective = choose_objective(run, prepare(run).folder)
    epochs = objective.samples.epochs(32)
    windows = [(n - 32) // 32 for n in (s.n_tokens for s in objective.samples.train_shards.stretches)]
    read = [epochs[name] * n for name, n in zip(("web", "code"), windows, strict=True)]
    assert sum(read) == pytest.approx(32) and read[1] > 16  # of equal weights, then 1 to 9
    card = (run.run_dir / "model-card.md").read_text(encoding="utf-8")
    assert epochs_words(epochs) in card and "from sample 16 on web 0.1, code 0.9" in card
    found = plan(str(run.run_dir))
    assert found.epochs_by_dataset == pytest.approx(epochs)
    assert plan_json(found)["epochs_by_dataset"] == found.epochs_by_dataset


def test_each_dataset_is_evaluated_too(run: Recipe) -> None:
    found = evaluate(run.run_dir).validation
    assert found is not None
    web, code = found["datasets"]
    assert (web["name"], code["name"]) == ("web", "code")
    assert web["tokens"] + code["tokens"] == found["tokens"] - 1  # the first token of the second predicts from none
    assert web["bits_per_byte"] != code["bits_per_byte"]
    assert min(web["loss"], code["loss"]) < found["loss"] < max(web["loss"], code["loss"])


def test_a_resumed_run_cannot_change_the_weights_of_samples_already_read(run: Recipe) -> None:
    def changes(*overrides: str) -> Any:
        return check_changes(load_recipe(run.run_dir), load_recipe(run.run_dir, overrides))

    for refused in ("data.anneal.weights.web=0.2", "data.anneal.share=0.25", "train.max_steps=8", "data.anneal=null"):
        with pytest.raises(UserError, match=r"has read 32 samples.*data.anneal.share=null data.anneal.from_sample=16"):
            changes(refused)
    with pytest.raises(UserError, match=r"data.mixture.0.weight=1.0, and it is now 2.0: the weights, the optimizer's"):
        changes("data.mixture.0.weight=2")
    with pytest.raises(UserError, match=r"train.batch_size=16 .* by which data.anneal.share=0.5 is counted"):
        changes("train.batch_size=16")
    kept = ("data.anneal.share=null", "data.anneal.from_sample=16", "train.max_steps=8")
    assert set(changes(*kept)) == {"data.anneal.share", "data.anneal.from_sample", "train.max_steps"}


def test_without_readable_checkpoints_the_samples_read_follow_from_the_steps(run: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.run_dir, folder)
    for path in folder.glob("checkpoints/*/state.json"):
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"samples": "many"}), encoding="utf-8")
    with pytest.raises(UserError, match=r"has read 32 samples"):
        check_changes(load_recipe(folder), load_recipe(folder, ["data.anneal.share=0.25"]))


def test_before_the_anneal_is_reached_it_moves_with_the_length(run: Recipe, tmp_path: Path) -> None:
    fork(run.run_dir, 2, tmp_path / "fork", ["train.max_steps=8"])
    forked = load_recipe(tmp_path / "fork")
    assert forked.anneal_from == 32
    train(forked, resume=True)
    assert losses(forked)[:2] == losses(run)[:2]


def test_the_command_mixes_folders(tmp_path: Path, two: dict[str, Prepared]) -> None:
    out = tmp_path / "out"
    given = [f"web={two['web'].folder}:0.7", f"code={two['code'].folder}:0.3"]
    done = CliRunner().invoke(app, ["data", "mix", str(out), *given])
    assert done.exit_code == 0, done.output
    whole = recipe_tree(tmp_path) | yaml.safe_load(done.output)
    whole["data"]["cache_dir"] = str(tmp_path / "elsewhere")
    recipe = parse_recipe(whole)
    assert [member.weight for member in recipe.data.mixture] == [0.7, 0.3]
    for one in two.values():
        shutil.rmtree(one.folder)
    assert prepare(recipe).folder == out and not (tmp_path / "elsewhere").exists()
    assert [part.name for part in prepare(recipe).manifest.parts] == ["web", "code"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["web={0}:nan"], "weight Input should be a finite number. Give NAME=FOLDER"),
        (["web={0}:-1"], "greater than or equal to 0"),
        (["{0}"], "Give NAME=FOLDER"),
        (["web={0}", "web={1}"], "two datasets with the name web"),
        (["web={0}:0", "code={1}"], "web has weight=0"),
        (["web=nothing"], "nothing holds no prepared text"),
    ],
)
def test_the_command_refuses_datasets_that_cannot_be_mixed(
    tmp_path: Path, two: dict[str, Prepared], given: list[str], words: str
) -> None:
    folders = [one.folder for one in two.values()]
    with pytest.raises(UserError) as error:
        mix_folders(tmp_path / "out", [text.format(*folders) for text in given])
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()
