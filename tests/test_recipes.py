"""The recipes that come with the package, and how commands find them by name."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

import commands
import tiny
from gptworks.errors import UserError
from gptworks.recipe import load_recipe, save_recipe
from gptworks.recipes import shipped_recipes

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel installs it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src" / "gptworks", source / "src" / "gptworks", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    done = commands.run("-c", build, cwd=source, new=True)
    assert done.returncode == 0, done.stderr
    [wheel] = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(target)
    return target


def test_an_installed_package_has_the_studios_page_with_its_licences(installed: Path) -> None:
    source = ROOT / "src" / "gptworks" / "studio" / "static"
    there = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    found = installed / "gptworks" / "studio" / "static"
    assert there == {path.relative_to(found) for path in found.rglob("*") if path.is_file()} >= {Path("index.html")}


def test_an_installed_package_has_its_recipes_and_plans_one_by_name_in_any_folder(
    installed: Path, tmp_path: Path
) -> None:
    before = sorted(installed.rglob("*"))
    environment = {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}

    def gptworks(*arguments: str) -> list[dict] | dict:
        done = commands.run("-m", "gptworks", *arguments, "--json", cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    listed = {row["name"]: row for row in gptworks("recipes")}
    assert listed.keys() == {one.name for one in shipped_recipes()}
    assert listed["demo"]["file"].startswith(str(installed))
    assert (listed["demo"]["parameters"], listed["demo"]["time"]) == (2_264_640, "2 to 5 minutes on two CPU cores")
    assert gptworks("plan", "demo", "train.max_steps=7")["steps"] == 7
    assert sorted(installed.rglob("*")) == before and not [*tmp_path.iterdir()], "nothing is written"


def test_a_shipped_recipe_reads_and_writes_in_the_folder_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("demo", ["train.max_steps=7"])
    assert (recipe.name, recipe.run_dir, recipe.data.cache_dir) == ("demo", Path("runs/demo"), Path("data"))
    assert recipe.train.max_steps == 7


def test_a_file_or_a_run_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_recipe(load_recipe(tiny.write_recipe(tmp_path)), tmp_path / "demo")
    assert load_recipe("demo").name == "tiny"


@pytest.mark.parametrize("given", ["demoo", "demo.yaml", "dmeo.yaml"])
def test_a_misspelled_name_suggests_the_nearest(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="did you mean `demo`, which comes with gptworks"):
        load_recipe(given)
    (tmp_path / "demo2.yaml").touch()
    with pytest.raises(UserError, match=r"did you mean demo2\.yaml"):
        load_recipe(given)


def test_every_recipe_says_in_a_line_what_it_makes() -> None:
    for one in shipped_recipes():
        assert one.summary.endswith("."), one.name
        assert len(one.summary) <= 100, one.name
