"""Snippets: training documents of statements from inside Python files."""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptworks.config import Recipe
from gptworks.data.opened import Prepared, held_out_text
from gptworks.data.prepare import build_part, prepare
from gptworks.data.shards import TokenShards
from gptworks.data.snippets import MOST_CHARACTERS, MOST_DEPTH, MOST_LINES, snippets
from gptworks.data.sources.code import stdlib_files
from gptworks.errors import UserError
from gptworks.training.rehearsal.estimate import data_size
from tiny import plain_model

TEXTS = [file.read_text(encoding="utf-8") for file in stdlib_files()[:120:2]]
FILES = [text for text in TEXTS if 100 < len(text) <= MOST_CHARACTERS]


def test_snippets_are_statements_of_their_file_without_its_indentation() -> None:
    n = 0
    for text in FILES:
        lines = [line.strip() for line in text.split("\n")]
        for snippet in snippets(text, 0.2):
            said = snippet.split("\n")
            assert said.pop() == "" and 0 < len(said) <= MOST_LINES
            assert snippet == textwrap.dedent(snippet) and not snippet[0].isspace()
            assert ast.parse(snippet).body
            stripped = [line.strip() for line in said]
            assert any(lines[i : i + len(said)] == stripped for i in range(len(lines)))
            n += 1
    assert n > 100


def test_snippets_have_their_share_of_the_text() -> None:
    n_characters = sum(map(len, FILES))
    for share in (0.02, 0.2):
        made = sum(len(snippet) for text in FILES for snippet in snippets(text, share))
        assert made == pytest.approx(share * n_characters, rel=0.2)
    assert not any(snippets(text, 0) for text in FILES)
    assert [snippets(text, 0.1) for text in FILES] == [snippets(text, 0.1) for text in FILES]


def test_rare_kinds_of_statements_are_as_likely_as_common_ones() -> None:
    found = []
    for number in range(200):
        assignments = "".join(f"name_{i} = {i + number}\n\n\n" for i in range(100))
        found += snippets(f"{assignments}while name_{number % 7}:\n    name_1 -= 1\n", 0.01)
    first = [snippet.split(maxsplit=1)[0] for snippet in found]
    assert 0.3 < first.count("while") / len(first) < 0.7


def test_a_snippet_starts_with_the_comment_or_decorator_before_it() -> None:
    source = "class A:\n    # Twice\n    # as much.\n    @cached\n    def double(self, x):\n        return 2 * x\n"
    made = {one for n in range(40) for one in snippets(f"{source}#{n}", 1.0)}
    (found,) = (one for one in made if "double" in one and "class" not in one)
    assert found == textwrap.dedent(source.partition("\n")[2])


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time there was a model.\n", "hello\n", "x = 1\ny = 2\n", '{"a": [1, 2]}\n', "def f(:\n    pass\n",
        "for x in y:\n" + "\n".join(f"{' ' * i}if x:" for i in range(1, 300)) + "\n" + " " * 300 + "pass\n",
        "if x:\n    y = " + "-" * 100_000 + "1\n", "if x:\n    y = " + "(" * 5000 + ")" * 5000 + "\n",
        "if x:\n    y = '\0'\n",
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_other_texts_have_no_snippets(text: str) -> None:
    assert snippets(text, 1.0) == []


def test_a_block_of_30_000_statements_gives_its_share() -> None:
    text = "if x:\n    pass\n" + "x = 1\n" * 30_000
    assert sum(map(len, snippets(text, 0.1))) == pytest.approx(0.1 * len(text), rel=0.1)


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_of_other_systems_are_read_as_python_does(end: str) -> None:
    source = "def f(x):\n    for y in x:\n        print(y)\n    return x\n"
    found = {one for n in range(20) for one in snippets(f"{source}#{n}\n".replace("\n", end), 1.0)}
    assert "for y in x:\n    print(y)\n" in found and "\r" not in "".join(found)


def test_the_choice_is_the_same_in_every_process() -> None:
    text = "import a\n\n\ndef f(x):\n    while x:\n        x -= 1\n    with x:\n        pass\n    return x\n"
    assert snippets(text, 1.0) == ["import a\n", text.partition("\n\n\n")[2]]


def test_parts_of_lines_and_strings_are_no_snippets() -> None:
    source = "if x: y = 1\nelif z:\n    a = 2\nelse: b = 3\n\ndef f():\n    c = '''\nleft\n'''\n    d = 4; e = 5\n"
    found = {one for n in range(100) for one in snippets(f"{source}#{n}\n", 1.0)}
    assert {one.split(maxsplit=1)[0] for one in found} == {"if", "def", "a", "d"}
    for broken in (
        "a = 1; b = '''\nc\n'''", "import a; b(\n1)", "a = 1 \\\n\nb = 2", "'''a\n# b'''\nfor c in d: pass",
    ):  # fmt: skip
        for n in range(20):
            assert all(ast.parse(one) for one in snippets(f"if x: pass\n{broken}\n#{n}\n", 1.0))


def test_the_depth_of_the_call_does_not_decide_what_is_parsed() -> None:
    def deeper(n: int, text: str) -> list[str]:
        return deeper(n - 1, text) if n else snippets(text, 1.0)

    for depth in (100, 400, 2900):
        text = f"for x in y:\n    pass\nz = {'-' * depth}1\n"
        assert deeper(0, text) == deeper(80, text)
        assert bool(deeper(0, text)) == (depth < MOST_DEPTH)


def recipe(folder: Path, **data: Any) -> Recipe:
    return Recipe(
        name="test",
        model=plain_model(context_length=8, n_layers=1, d_model=8, n_heads=1),
        tokenizer={"type": "bpe", "vocab_size": 300},
        data={
            "sources": [{"type": "code", "path": str(folder / "code")}], "cache_dir": folder / "data",
            "validation": {"fraction": 0.3, "by": "document"}, **data,
        },
        train={"max_steps": 1},
    )  # fmt: skip


def documents(prepared: Prepared) -> list[str]:
    shards = TokenShards(prepared.folder, "train")
    parts = np.split(shards.read(0, shards.n_tokens), shards.document_starts()[1:])
    return [prepared.tokenizer.decode(part.tolist()) for part in parts]


def test_only_training_files_give_snippets_and_held_out_text_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for number in range(40):
        body = f"def function_{number}(x):\n    while x > {number}:\n        x -= {number}\n    return x\n"
        (tmp_path / "code" / f"{number}.py").write_text(f'"""Module {number}."""\n\n\n{body}')
    plain, made = (prepare(recipe(tmp_path, snippets=share)) for share in (0.0, 0.5))
    assert plain.folder != made.folder and [*held_out_text(plain)] == [*held_out_text(made)]
    files, more = documents(plain), documents(made)
    added = more[len(files) :]
    assert more[: len(files)] == files
    assert len(added) > 5 and not any(one.startswith('"""') for one in added)
    own = {number for one in files for number in re.findall(r"Module (\d+)", one)}
    held_out = {str(number) for number in range(40)} - own
    assert held_out
    numbers = [set(re.findall(r"function_(\d+)|> (\d+)", one)) for one in added]
    assert all({a or b for a, b in found} <= own for found in numbers)
    assert 0.25 < sum(map(len, added)) / sum(map(len, files)) < 0.75


def test_snippets_need_whole_documents_of_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`data.snippets` needs whole documents.*by=tail cuts them: set by=document"):
        recipe(tmp_path, snippets=0.1, validation={"by": "tail"})
    with pytest.raises(ValueError, match="these sources are records"):
        recipe(tmp_path, snippets=0.1, sources=[{"type": "conversations", "path": "chats.jsonl"}], validation={})
    with pytest.raises(ValueError, match=r"all of `data.mixture` are built already"):
        recipe(tmp_path, snippets=0.1, sources=(), mixture=[{"name": "code", "dataset": "built"}], validation={})
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("def f(x):\n    return x\n" * 50)
    with pytest.raises(UserError, match="so few that the end of each is held out"):
        prepare(recipe(tmp_path, snippets=0.1, validation={}))
    assert not list((tmp_path / "data").glob("shards-*"))
    stages = set[str]()
    with pytest.raises(UserError, match="so few that the end of each is held out"):
        build_part(recipe(tmp_path, snippets=0.1, validation={}), 1, 2, report=lambda stage, *_: stages.add(stage))
    assert not {stage for stage in stages if "tokenizer" in stage}
    assert not list((tmp_path / "data").rglob("tokenizer.json"))


def test_a_plan_counts_snippets(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n" * 10_000)
    few, many = (data_size(recipe(tmp_path, snippets=share)).train_tokens for share in (0.0, 0.5))
    assert few and many == pytest.approx(1.5 * few, rel=0.001)
