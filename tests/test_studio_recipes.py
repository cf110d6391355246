"""Recipes of the listed runs are read in a process with limits: a bad one is reported and does not delay others."""

import os
from pathlib import Path
from typing import Any

import pytest

from browser import open_studio
from gptworks.confined import Confined, Limits
from gptworks.errors import UserError
from gptworks.recipe import load_recipe
from gptworks.studio import recipes as module
from gptworks.studio.library import Library
from gptworks.studio.recipes import Recipes
from histories import curve, write_run

BAD = ("hungry", "kills", "slow", "wrong")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", *BAD, "z"):
        write_run(tmp_path / "runs" / name, curve([3.0, 2.5]))
    (tmp_path / "runs" / "wrong" / "recipe.yaml").write_text("model: [", encoding="utf-8")
    return tmp_path / "runs"


@pytest.fixture
def process() -> Confined:
    limits = Limits(seconds=1, n_bytes=1 << 28)
    return Confined("hostile_recipes", None, limits, setup_limits=Limits(seconds=60, n_bytes=1 << 30))


def faults(folder: Path, known: Recipes) -> dict[str, str]:
    found = {}
    for one in (folder / name for name in ("a", *BAD, "z")):
        try:
            known.of(one)
        except UserError as error:
            found[one.name] = str(error)
    return found


def test_what_ends_the_process_refuses_its_own_recipe_alone(folder: Path, process: Confined) -> None:
    known = Recipes(process)
    found = faults(folder, known)
    assert found.keys() == set(BAD)
    assert "1 seconds of processor time" in found["slow"] and "256 MiB of memory" in found["hungry"]
    assert "not readable YAML" in found["wrong"] and "ended the process that worked on it (SIGSEGV)" in found["kills"]
    first, last = (known.of(folder / name).seed for name in ("a", "z"))  # the process that read it
    assert first != last and os.getpid() not in (first, last)
    assert known.of(folder / "a").model_copy(update={"seed": 1}) == load_recipe(folder / "a")


def test_one_process_reads_all_and_each_recipe_once(folder: Path, process: Confined) -> None:
    known, asked = Recipes(process), []
    ask = process.ask
    process.ask = lambda *given: (asked.append(given[0]["path"]), ask(*given))[1]  # type: ignore[method-assign]
    good = [folder / "a", folder / "z"]
    assert len({known.of(one).seed for one in good * 3}) == 1 and asked == [str(one) for one in good]
    for _ in range(2):
        with pytest.raises(UserError, match="not readable YAML"):
            known.of(folder / "wrong")
    assert asked == [str(one) for one in (*good, folder / "wrong")]
    (folder / "wrong" / "recipe.yaml").write_text((folder / "a" / "recipe.yaml").read_text())
    assert known.of(folder / "wrong").model == known.of(folder / "a").model
    assert known.knows(folder / "a") and not known.knows(folder / "slow")
    (folder / "a" / "recipe.yaml").unlink()
    with pytest.raises(UserError, match="no recipe to read"):
        known.of(folder / "a")


def test_a_disk_that_does_not_answer_is_waited_for_only_so_long(
    folder: Path, process: Confined, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(folder / "sleeps", [])
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.5)
    known = Recipes(process)
    with pytest.raises(UserError, match="not read within"):
        known.of(folder / "sleeps")
    assert not known.knows(folder / "sleeps")  # the disk may answer the next time


def test_hostile_recipes_are_listed_with_the_reason_beside_the_others(
    folder: Path, process: Confined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHARED", process)
    monkeypatch.setattr("gptworks.studio.library._READ_SECONDS", 600.0)
    with open_studio(folder) as studio, studio.http() as http:
        models = {one["id"]: one for one in http.get("/studio/state").json()["models"]}
        rows = {one["id"]: one for one in http.get("/studio/runs").json()["runs"]}
        http.get("/studio/runs/curves", params={"run": [*rows], "key": "validation.loss"})
        rows = {one["id"]: one for one in http.get("/studio/runs").json()["runs"]}
        used = {name: http.post("/studio/load", json={"model": name}) for name in BAD}
    assert models.keys() == rows.keys() == {"a", *BAD, "z"}
    for name in ("a", "z"):
        assert models[name]["parameters"] and rows[name]["problem"] is None and rows[name]["recipe"] == "tiny"
    for name in BAD:
        assert models[name]["problem"] == rows[name]["problem"] and models[name]["parameters"] is None
        assert used[name].status_code == 400 and models[name]["problem"] in used[name].json()["error"]["message"]


@pytest.mark.parametrize("text", ["\n".join(f"k{i}: 1" for i in range(5000)), f"data: {{sources: [{'{},' * 5000}]}}"])
def test_a_recipe_of_nothing_but_faults_is_refused_in_few_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"and 4,95\d more like these\.$") as refused:
        load_recipe(tmp_path)
    assert str(refused.value).count("\n") == 50 and len(str(refused.value)) < 20_000


def test_recipes_that_take_long_wait_for_the_next_look(
    folder: Path, process: Confined, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(seconds: float) -> list[dict[str, Any]]:
        monkeypatch.setattr("gptworks.studio.library._READ_SECONDS", seconds)
        return library.describe_all()

    library = Library([folder])
    library.recipes = Recipes(process)
    first: dict[str, Any] = {one["id"]: one for one in described(-1.0)}
    assert all("is not read yet" in one["problem"] for one in first.values())
    then = {one["id"]: one for one in described(600.0)}
    assert then["a"]["parameters"] and described(-1.0) == [*then.values()]
