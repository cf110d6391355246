"""The fast parts of bench/first_hour.py: its folders and its recipes."""

import gzip
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

import tiny
from gptworks.draft.texts import look_at
from gptworks.recipe import parse_recipe

BENCH = Path(__file__).parents[1] / "bench"
PROSE = "It is the rule of this house that the door is to be shut in the night, and that the key is for the cook.\n"


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_init_reads_of_a_mixed_folder_what_is_text_and_lists_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import first_hour_texts as texts

    monkeypatch.setitem(sys.modules, "pypdf", None)  # as in the default installation

    english = [f"Note {n}. " + PROSE * 10 for n in range(40)]
    n_bytes = texts.write_mixed(tmp_path, english, ["x = 1\n" * 40] * 3)
    found = look_at(tmp_path)
    assert found.read == {".txt": 10, ".md": 10, ".py": 3, ".jsonl": 1, ".csv": 1}
    assert found.skipped == {".pdf": 1, ".png": 1, ".gif": 1, ".csv": 1}
    assert found.n_bytes == n_bytes
    paper = (tmp_path / "paper.pdf").read_bytes()
    start = int(re.search(rb"startxref\n(\d+)", paper)[1])  # type: ignore[index]
    places = [int(place) for place in re.findall(rb"(\d{10}) 00000 n", paper[start:])]
    assert [paper[place:].startswith(b"%d 0 obj" % n) for n, place in enumerate(places, 1)] == [True] * 5
    image = (tmp_path / "dot.png").read_bytes()
    assert image[8:16] == b"\0\0\0\rIHDR" and zlib.crc32(image[12:29]) == int.from_bytes(image[29:33], "big")


def test_documentation_is_english_and_no_paragraph_comes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import first_hour_texts as texts

    (tmp_path / "share" / "doc" / "tool").mkdir(parents=True)
    (tmp_path / "share" / "man" / "man1").mkdir(parents=True)
    licence = "\n".join(f"{n} {PROSE}" for n in range(5))
    (tmp_path / "share" / "doc" / "tool" / "README").write_text(f"{licence}\n\nOf the first tool. {PROSE * 5}")
    (tmp_path / "share" / "doc" / "tool" / "copyright").write_text(f"{licence}\n\nOf the second. {PROSE * 5}")
    (tmp_path / "share" / "doc" / "tool" / "german.txt").write_text("Die Tür ist in der Nacht zu schließen.\n" * 30)
    page = f'.TH TOOL 1\n.SH "NAME"\ntool \\- \\fBto be\\fR used\n.\\" not shown\n.BR tool (1)\n.PP\n{PROSE * 6}'
    (tmp_path / "share" / "man" / "man1" / "tool.1.gz").write_bytes(gzip.compress(page.encode()))
    monkeypatch.setattr(texts, "_PREFIXES", (str(tmp_path),))
    monkeypatch.setattr(texts, "_packages", list)
    monkeypatch.setattr(texts, "_docstrings", lambda: iter(()))
    found = "".join(texts.documentation())
    assert found.count("4 It is") == 1 and "Of the second." in found and "Tür" not in found
    assert "NAME\n\ntool - to be used\ntool(1)\n" in found and "shown" not in found


def test_the_other_recipes_train_the_same_shape_on_the_same_text_with_the_settings_that_are_stated(
    tmp_path: Path,
) -> None:
    import first_hour

    drafted = tiny.recipe_tree(tmp_path)
    ours = parse_recipe(drafted)
    for settings in first_hour.OTHERS.values():
        theirs = parse_recipe(first_hour.other_recipe(drafted, settings, "other", 1.5))
        assert (theirs.tokenizer, theirs.data, theirs.train.max_minutes) == (ours.tokenizer, ours.data, 1.5)
        for section, name in [("model", name) for name in first_hour.SHAPE] + [("train", "batch_size")]:
            assert getattr(getattr(theirs, section), name) == getattr(getattr(ours, section), name)
        for section, values in settings.items():
            for name, value in values.items():
                set_to: Any = getattr(getattr(theirs, section), name)
                assert set_to == (tuple(value) if isinstance(value, list) else value)
    options = first_hour.options_of(["--minutes", "1", "--folder", "code", "--folder", "mixed"])
    assert (options.minutes, options.folder) == (1.0, ["code", "mixed"])
