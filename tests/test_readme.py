"""The claims of the README and the shipped recipes are true."""

import ast
import contextlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from gptworks.cli import app
from gptworks.config import Recipe
from gptworks.planning.params import count_parameters
from gptworks.presets import preset
from gptworks.recipe import load_recipe, parse_recipe, save_recipe
from gptworks.recipes import shipped_paths
from gptworks.training.record.writers import WRITERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "topics").glob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
PATH = GUIDE + "".join(text for page, text in TEXTS.items() if page.parent.name == "topics" or page.stem == "python")
"""The guide and the pages that it leads to."""


def packages_of(extra: str) -> set[str]:
    """The packages that an extra installs, those of extras that it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = set[str]()
    for one in project["optional-dependencies"][extra]:
        if own := re.fullmatch(r"gptworks\[([\w,-]+)\]", one):
            found.update(*(packages_of(name) for name in own[1].split(",")))
        else:
            found.add(re.split(r"[\[><=;~! ]", one)[0])
    return found


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    """The shipped recipes, each read in a folder where the run that it starts from is."""
    found: dict[str, Recipe] = {}
    with contextlib.chdir(tmp_path_factory.mktemp("recipes")):
        while missing := shipped_paths().keys() - found.keys():
            for name in missing:
                source = yaml.safe_load(shipped_paths()[name].read_text(encoding="utf-8")).get("initialize_from")
                if source is None or Path(source).exists():
                    found[name] = load_recipe(name)
                    found[name].run_dir.mkdir(parents=True)
                    save_recipe(found[name], found[name].run_dir / "recipe.yaml")
    return found


def test_every_command_shown_exists() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {group.name for group in app.registered_groups if group.name}
    shown = set(re.findall(r"gptworks (\w+)", " ".join(re.findall(r"`[^`]*`|```.*?```", README + PATH, re.DOTALL))))
    assert shown - {"import", "is"} <= commands
    assert commands <= set(re.findall(r"gptworks (\w+)", README)), "a command is missing in the README"


def test_the_readme_shows_each_command_with_its_own_arguments_and_options() -> None:
    commands = typer.main.get_command(app).commands
    rows = re.findall(r"^\| `gptworks ([\w-]+)((?:\\\||[^`|])*)` \|", README, re.MULTILINE)
    assert {name for name, _ in rows} == commands.keys()
    for name, shown in rows:
        command = commands[name]
        if hasattr(command, "commands"):
            continue
        options = {spelled for one in command.params for spelled in one.opts}
        assert set(re.findall(r"--[a-z-]+", shown)) <= options, name
        words = re.sub(r"\[?--[a-z-]+(?: (?!\[)[^ \]]+)?\]?", "", shown.replace("\\|", "|")).split()
        given, known = (
            [re.sub(r"[\[\]]|\.\.\.|…", "", word) for word in each]
            for each in (words, (one.metavar or "" for one in command.params if one.param_type_name == "argument"))
        )
        assert given == [word for word in known if word in given], name


def test_options_shown_with_a_command_are_its_own() -> None:
    """In documents, messages and pages; a line of code shows one command up to `&&`, `|`, `;` or a comment."""
    commands = typer.main.get_command(app).commands
    files = [file for file in (ROOT / "src").rglob("*") if file.suffix in (".py", ".js", ".json", ".md", ".yaml")]
    n_seen = 0
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *files]:
        text = file.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, rest in re.findall(r"gptworks ([a-z]+)((?: +[^\s`|;&#]+)+)", text):
            command, words = commands.get(name), rest.split()
            if hasattr(command, "commands"):
                command = command.commands.get(words[0])
            if command is not None:
                shown = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
                known = {spelled for one in command.params for spelled in (*one.opts, *one.secondary_opts)}
                n_seen += len(shown)
                assert {re.sub(r"[^a-z0-9-].*", "", word) for word in shown} <= known | {"--help"}, (file, name, rest)
    assert n_seen > 150


def test_every_make_target_shown_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_tree_shown_is_the_tree() -> None:
    tree = re.search(r"```text\n(src/gptworks/.*?)```", README, re.DOTALL)
    assert tree
    shown = {line.split()[0].rstrip("/") for line in tree[1].splitlines()[1:] if line.strip()}
    package = ROOT / "src" / "gptworks"
    there = {
        path.name for path in package.iterdir() if not path.name.startswith(("__", "py.")) and path.suffix != ".pyc"
    }
    assert shown == there


def test_the_tree_shown_is_in_the_order_of_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [layers] = [one["layers"] for one in project["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    level = {name.strip(): -number for number, layer in enumerate(layers) for name in layer.split("|")}
    tree = re.search(r"```text\nsrc/gptworks/\n(.*?)```", README, re.DOTALL)
    assert tree
    shown = [f"gptworks.{line.split()[0].rstrip('/').removesuffix('.py')}" for line in tree[1].splitlines()]
    assert [level[name] for name in shown] == sorted(level[name] for name in shown)


def test_links_lead_somewhere() -> None:
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("name", shipped_paths())
def test_every_shipped_recipe_is_valid(name: str, recipes: dict[str, Recipe]) -> None:
    assert recipes[name].run_dir == Path("runs") / recipes[name].name
    assert shipped_paths()[name].read_text(encoding="utf-8").startswith("#"), "a recipe says first what it is"


def test_each_reference_architecture_has_a_recipe(recipes: dict[str, Recipe]) -> None:
    used = {recipe.model.model_copy(update={"context_length": 0}) for recipe in recipes.values()}
    for name in ("custom-300m", "gpt3-125m", "gpt2-tiny", "gpt2-mini", "gpt2-midi", "gpt2-small-untied", "vaani-427m",
                 "llm-200m"):  # fmt: skip
        assert preset(name).model_copy(update={"context_length": 0}) in used, name


def test_parameter_counts_in_the_readme_are_exact() -> None:
    table = re.search(r"tested parameter counts:\n\n((?: *\|.*\n)+)", README)
    assert table, "the table of parameter counts does not follow what announces it"
    rows = re.findall(r"^ *\| `([\w.-]+)` \| ([\d,]+) \|$", table[1], re.MULTILINE)
    assert len(rows) == table[1].count("\n") - 2 > 3
    for name, shown in rows:
        assert f"{count_parameters(preset(name)).total:,}" == shown, name


def test_what_the_benchmarks_import_is_installed_by_make_bench() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"^bench:.*\n\t.*-e \"\.\[([\w,-]+)\]\"", makefile, re.MULTILINE)
    assert extras
    packages = {package for name in [*extras[1].split(","), "dev"] for package in packages_of(name)}
    packages |= {re.split(r"[\[><=;~! ]", one)[0] for one in project["dependencies"]}
    installed = {package.replace("-", "_").lower() for package in packages}
    optional = {"llama_cpp", "litgpt", "litdata", "datatrove"}  # peers that a script leaves out where they are missing
    own = {path.stem for path in (ROOT / "bench").glob("*.py")} | {"gptworks"} | optional
    for path in sorted((ROOT / "bench").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [])  # fmt: skip
            for name in {name.split(".")[0] for name in names} - own - set(sys.stdlib_module_names):
                assert name in installed, f"bench/{path.name} imports {name}, which no extra of `make bench` names"


def test_what_is_installed_by_default_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = re.search(r"^pip install \. +# (.*)$", README, re.MULTILINE)
    assert listed and listed[1].split(", ") == [re.split(r"[\[><=;~! ]", one)[0] for one in project["dependencies"]]


def test_each_extra_that_an_error_names_exists_and_holds_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: packages_of(name) for name in project["optional-dependencies"]}
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")}
    installing = {path.name for path, text in sources.items() if "pip install" in text}
    assert installing == {"errors.py", "skypilot.py"}  # a message, and what a job does on its machines
    calls = [
        node
        for text in sources.values()
        if "not_installed(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "not_installed"
    ]
    named = [
        [ast.literal_eval(arg) if isinstance(arg, ast.Constant) else "" for arg in call.args[:2]] for call in calls
    ]
    named += [[name, name] for name in WRITERS]  # of train.loggers
    assert len(named) >= 11
    for package, extra in named:
        assert extra in extras or not extra, extra
        assert not package or package in extras[extra], package


def test_pictures_are_there_and_small_and_carry_no_script() -> None:
    for page, text in TEXTS.items():
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)|<img src=\"([^\"]+)\"", text):
            picture = page.parent / "".join(name)
            assert 1_000 < picture.stat().st_size < 300_000, picture
            assert picture.suffix != ".svg" or "<script" not in picture.read_text(encoding="utf-8")


def test_the_recording_shows_commands_that_exist() -> None:
    drawing = (ROOT / "docs" / "images" / "demo.svg").read_text(encoding="utf-8")
    shown = [re.sub("<.*?>", "", line) for line in drawing.splitlines() if line.startswith("<text")]
    for command in ("gptworks train demo", "gptworks generate runs/demo", "gptworks evaluate runs/demo --compressors"):
        assert any(line.startswith(f"$ {command}") for line in shown), command
        assert command.split()[1] in {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}


def test_the_first_recipe_of_the_guide_is_the_demo() -> None:
    block = re.search(r"```yaml\n# demo.yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert block
    assert yaml.safe_load(block[1]) == yaml.safe_load(shipped_paths()["demo"].read_text(encoding="utf-8"))


def test_the_recipe_for_own_texts_in_the_guide_warms_up_evaluates_and_shows_samples() -> None:
    block = re.search(r"```yaml\n# mine.yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert block
    settings = parse_recipe(yaml.safe_load(block[1]) | {"name": "mine", "run_dir": "runs/mine"}).train
    assert settings.warmup_steps
    assert 0 < settings.evaluate_every <= 100
    assert settings.sample_every
    assert settings.sample_held_out


def test_nothing_is_loaded_from_a_pickle() -> None:
    pickles = subprocess.run(
        ["grep", "-rnE", r"\bpickle\b|torch\.load\(|allow_pickle", str(ROOT / "src"), "--include=*.py"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    assert pickles == ""


def test_the_python_shown_in_the_guide_runs() -> None:
    blocks = [
        block
        for block in re.findall(r"```python\n(.*?)```", PATH, re.DOTALL)
        if not re.search("runs/demo|demo.yaml|127.0.0.1", block)
    ]
    assert blocks
    for block in blocks:
        exec(compile(block, "guide.md", "exec"), {})


SPEEDS = {"char, 64 × 256": 1, "GPT-2 124M, 4 × 512": 2, "batch 1": 3, "8": 4, "1": 5}
"""Column of docs/benchmarks.md, and the column of the README's table of speeds that repeats it."""
PROGRAMS = {
    "**gptworks**": {"**gptworks**", "gptworks int8", "page, int8"},
    "textbook loop": {"textbook, bf16", "textbook, bf16, compiled"},
    "litGPT": {"litGPT 0.5.13, bf16, compiled"},
    "transformers, bf16": {
        "Trainer, fp32", "Trainer, bf16", "Trainer, bf16, compiled", "transformers bf16", "`transformers serve`, bf16",
    },
    "transformers.js": {"transformers.js, fp32"},
    "llama.cpp": {"llama.cpp bf16", "llama.cpp q8_0"},
}  # fmt: skip
"""Beginning of a row there, and the rows of docs/benchmarks.md of which it repeats the fastest."""


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_speeds_in_the_readme_are_those_of_the_benchmarks() -> None:
    table = re.search(r"has the conditions:\n\n((?:\|.*\n)+)", README)
    assert table, "the table of speeds does not follow what announces it"
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    tables = [_rows(found) for found in re.findall(r"(?:^\|.*\n)+", benchmarks, re.MULTILINE)]
    checked = 0
    for name, *speeds in _rows(table[1])[2:]:
        (programs,) = (rows for start, rows in PROGRAMS.items() if name.startswith(start))
        for title, column in SPEEDS.items():
            if not (speed := speeds[column - 1].strip("*")):
                continue
            fastest = set()
            for heading, _, *rows in tables:
                if title in heading:
                    of = [row[heading.index(title)].strip("*").split(" ")[0] for row in rows if row[0] in programs]
                    fastest |= {max(of, key=lambda one: float(one.replace(",", "") or 0))} if of else set()
            assert speed in fastest, (name, title, speed, fastest)
            checked += 1
    assert checked > 10
