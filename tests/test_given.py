"""Files named by a user: a shell's pipe is read like a file, to its end and with a limit."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gptworks.files.read as door
import tiny
from gptworks.cli import app
from gptworks.errors import UserError
from gptworks.files import open_given, read_given
from gptworks.runs.bands import read_band, shipped_bands


@contextlib.contextmanager
def piped(data: bytes) -> Iterator[Path]:
    """Make a pipe as a shell does; yield its name below /dev/fd."""
    reading, writing = os.pipe()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as file:
            file.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield Path(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        writer.join()


def test_a_pipe_is_read_to_its_end_and_more_than_once() -> None:
    text = "é" * 100_000  # more than a pipe holds at once
    with piped(text.encode("utf-8")) as path:
        assert read_given(path, 200_000) == text
    with piped(b"one\ntwo\n") as path, open_given(path, 100) as file:
        assert file.readlines() == [b"one\n", b"two\n"]
        file.seek(0)
        assert file.read() == b"one\ntwo\n"


def test_a_pipe_that_gives_too_much_is_left_at_the_bound() -> None:
    with piped(b"y\n" * 1_000_000) as path, pytest.raises(UserError, match=r"/dev/fd/\d+ has more than 1000 bytes"):
        read_given(path, 1000)


def test_a_slow_writer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first byte arrives only after the pipe was found empty."""
    monkeypatch.setattr(door, "PIPE_SECONDS", 0.0)
    reading, writing = os.pipe()
    begin_to_wait = os.set_blocking

    def write(descriptor: int, blocking: bool) -> None:
        begin_to_wait(descriptor, blocking)
        os.write(writing, b"late")
        os.close(writing)
        monkeypatch.undo()

    monkeypatch.setattr(door.os, "set_blocking", write)
    assert read_given(Path(f"/dev/fd/{reading}"), 100) == "late"
    os.close(reading)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PIPE_SECONDS", 0.01)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="fifo is a pipe that nobody writes to"):
        read_given(tmp_path / "fifo", 100)


@pytest.mark.parametrize("kind", ["folder", "/dev/zero", "/dev/tty"])
def test_what_has_no_end_or_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path if kind == "folder" else kind)
    with pytest.raises(UserError, match=r"is a (folder|FIFO, socket or device): give a regular file"):
        read_given(tmp_path / "link", 100)


def _recipe(folder: Path) -> str:
    tree = tiny.recipe_tree(folder)
    tree["model"]["vocab_size"] = 256  # what only the data would show
    return json.dumps(tree, default=str)


def _task(folder: Path) -> str:
    (folder / "items.jsonl").write_text('{"q": "line", "a": "x"}\n', encoding="utf-8")
    return f"type: exact_match\ndata: {folder}/items.jsonl\nprompt: '{{{{ q }}}}'\nanswer: a\n"


OPTIONS: dict[str, tuple[list[str], Callable[[Path], str]]] = {
    "--json-schema": (["generate", "RUN", "line", "--max-tokens=40", "--json-schema"], lambda _: '{"const": 1}'),
    "--text": (["evaluate", "RUN", "--no-save", "--text"], lambda _: "line 1\nline 2\n"),
    "--task": (["evaluate", "RUN", "--no-save", "--task"], _task),
    "RECIPE": (["plan"], _recipe),
    "--like": (["init", "-o", "OUT", "--like"], _recipe),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_that_names_a_file_takes_a_pipe(option: str, trained_run: Path, tmp_path: Path) -> None:
    arguments, text = OPTIONS[option]
    named = {"RUN": str(trained_run), "OUT": str(tmp_path / "new.yaml")}
    with piped(text(tmp_path).encode("utf-8")) as path:
        result = CliRunner().invoke(app, [*(named.get(one, one) for one in arguments), str(path)])
    assert result.exit_code == 0, (result.output, result.exception)


def test_a_band_may_come_from_a_pipe() -> None:
    band = shipped_bands()[0]
    with piped(band.model_dump_json().encode("utf-8")) as path:
        assert read_band(path) == band


def test_a_shells_process_substitution_is_a_file(tmp_path: Path) -> None:
    recipe, out = tiny.write_recipe(tmp_path), tmp_path / "new.yaml"
    command = (
        f"{shlex.quote(sys.executable)} -m gptworks init -o {shlex.quote(str(out))} --like <(sleep 0.1; cat {recipe})"
    )
    subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    assert out.read_bytes() == recipe.read_bytes()


def test_the_door_can_be_imported_where_a_system_lacks_flags_and_locks() -> None:
    code = """
import os, sys
for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_PATH", "O_CLOEXEC"):
    delattr(os, name)
for name in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[name] = None
import gptworks.files, gptworks.files.fetch, gptworks.recipe
print(gptworks.recipe.load_recipe("demo").name)
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "demo"
