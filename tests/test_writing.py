"""Writing through `gptworks.files`: no planted link, FIFO, device or leftover causes damage outside or inside the
folder."""

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import numpy as np
import pytest
from typer.testing import CliRunner

from gptworks.cli import app
from gptworks.errors import RunError, UserError
from gptworks.files import (
    file_lock,
    map_array,
    new_folder,
    read_array,
    replacing,
    replacing_by_name,
    write_whole,
)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file outside the target folder, which must stay unchanged."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "authorized_keys"
    path.write_text("precious")
    before = path.stat()
    yield path
    now = path.stat()
    assert path.read_text() == "precious"
    assert (now.st_ino, now.st_mode, now.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)


def by_name(path: Path, text: str) -> None:
    with replacing_by_name(path) as aside:
        aside.write_text(text)


WRITERS: list[Callable[[Path, str], None]] = [write_whole, by_name]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", [".report.html.writing", ".writing-report.html", ".writing-report.html.0123456789ab"])
def test_a_planted_temporary_is_not_followed(write: Callable[[Path, str], None], name: str, precious: Path) -> None:
    path = precious.parent / "run" / "report.html"
    path.with_name(name).symlink_to(precious)
    write(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_is_replaced_and_not_followed(write: Callable[[Path, str], None], precious: Path) -> None:
    path = precious.parent / "run" / "report.html"
    path.symlink_to(precious)
    write(path, "new")
    assert path.read_text() == "new" and not path.is_symlink()
    path.unlink()
    path.hardlink_to(precious)
    write(path, "newer")
    assert path.read_text() == "newer"


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_becoming_a_link_while_a_file_is_written_moves_nothing(
    write: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is opened once, so later changes of its path do not matter."""
    run, elsewhere, flush = tmp_path / "run", tmp_path / "elsewhere", os.fsync
    run.mkdir()
    elsewhere.mkdir()
    (elsewhere / "report.html").write_text("precious")

    def swap(descriptor: int) -> None:
        if run.is_dir() and not run.is_symlink():
            run.rename(tmp_path / "moved")
            run.symlink_to(elsewhere)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", swap)
    write(run / "report.html", "new")
    assert (elsewhere / "report.html").read_text() == "precious"
    assert {each.name: each.read_text() for each in (tmp_path / "moved").iterdir()} == {"report.html": "new"}


@pytest.mark.parametrize("write", WRITERS)
def test_a_fifo_is_not_replaced_and_a_folder_neither(write: Callable[[Path, str], None], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match=r"fifo is a FIFO, socket or device: give a name for a regular file"):
        write(tmp_path / "fifo", "new")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match=r"folder could not be written: Is a directory"):
        write(tmp_path / "folder", "new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fifo", "folder"]


@pytest.mark.parametrize("write", WRITERS)
def test_the_mode_is_that_of_the_old_file_or_the_umasks(write: Callable[[Path, str], None], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    write(path, "new")
    made = tmp_path / "made"
    made.touch()
    assert path.stat().st_mode == made.stat().st_mode
    for mode in (0o600, 0o640, 0o664):
        path.chmod(mode)
        write(path, "newer")
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_what_is_private_is_so_from_the_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text("old")
    path.chmod(0o644)
    with replacing(path, private=True) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with new_folder(tmp_path / "made") as aside:
        assert stat.S_IMODE(aside.stat().st_mode) == 0o700
    (tmp_path / "other").mkdir()
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_name_as_long_as_a_file_system_takes_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    write_whole(path, "a")
    write_whole(path, "b")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(path.name, "b")]


KILLED = """
import os, signal, sys
from pathlib import Path
from gptworks.files import new_folder, replacing
with new_folder(Path(sys.argv[1]) / "out") as aside, replacing(Path(sys.argv[1]) / "report.html") as file:
    (aside / "half").write_text("half")
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_removed_by_the_next_and_nothing_else(precious: Path) -> None:
    run = precious.parent / "run"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(run)], check=False)
    assert ended.returncode == -signal.SIGKILL
    left = sorted(each.name for each in run.iterdir())
    assert [each.rpartition(".")[0] for each in left] == [".writing-out", ".writing-report.html"]
    (run / left[0] / "link").symlink_to(precious)
    (run / left[0] / "folder").symlink_to(precious.parent)
    (run / ".writing-report.html.aaaaaaaaaaaa").symlink_to(precious)
    kept = [".writing-report.html", ".writing-report.html.draft", ".writing-report.html.aaaaaaaaaaaa"]
    for name in kept[:2]:
        (run / name).write_text("someone's")
    write_whole(run / "report.html", "new")
    with new_folder(run / "out"):
        pass
    assert sorted(each.name for each in run.iterdir()) == sorted([*kept, "out", "report.html"])


def test_two_writers_of_one_file_do_not_remove_each_others_work(tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    with replacing(path) as first, replacing(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first", "that of the writer which ended last"
    with new_folder(tmp_path / "a") as one, new_folder(tmp_path / "b") as other:
        (one / "file").touch()
        (other / "file").touch()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b", "choice.json"]


def test_a_recipe_that_a_full_disk_refuses_leaves_nothing_and_can_be_written_again(tmp_path: Path) -> None:
    """`gptworks init` and `gptworks tune`: an empty file would prevent a second attempt."""
    out, limits = tmp_path / "recipe.yaml", resource.getrlimit(resource.RLIMIT_FSIZE)
    command = ["init", "--like", "demo", "-o", str(out)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        refused = CliRunner().invoke(app, command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(refused.exception, RunError) and "recipe.yaml could not be written: File too large" in str(
        refused.exception
    )
    assert not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, command).exit_code == 0
    assert out.stat().st_size > 100
    assert "exists, and it is not overwritten" in str(CliRunner().invoke(app, command).exception)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "another name"])
def test_a_lock_is_a_file_that_holds_nothing_of_others(kind: str, tmp_path: Path) -> None:
    """Some releases of filelock truncate the file that they lock, and some wait for a FIFO."""
    lock, precious = tmp_path / ".lock", tmp_path / "precious"
    precious.write_text("precious")
    if kind == "link":
        lock.symlink_to(precious)
    elif kind == "fifo":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.hardlink_to(precious)
    with pytest.raises(UserError, match=r"\.lock (is a link|is a FIFO|is a folder|has another name)"):
        file_lock(lock)
    assert precious.read_text() == "precious"


def test_a_lock_that_is_there_is_locked_again(tmp_path: Path) -> None:
    for _ in range(2):
        with file_lock(tmp_path / ".lock", timeout=0), pytest.raises(filelock.Timeout):
            file_lock(tmp_path / ".lock", timeout=0).acquire()


def test_numbers_are_read_from_inside_only(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    np.arange(5, dtype="<u8").tofile(tmp_path / "secret")
    np.arange(3, dtype="<u8").tofile(tmp_path / "run" / "numbers")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "secret")
    for read in (read_array, map_array):
        assert read(tmp_path / "run" / "numbers", "<u8", inside=tmp_path / "run").tolist() == [0, 1, 2]
        with pytest.raises(UserError, match="leads out of"):
            read(tmp_path / "run" / "link", "<u8", inside=tmp_path / "run")
