"""Reading through `gptworks.files`: the objects that a received folder may contain instead of a file."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import gptworks.files.read as door
from gptworks.errors import UserError
from gptworks.files import (
    check_inside,
    check_regular,
    check_tree,
    copy_file,
    copy_folder,
    open_new,
    open_regular,
    open_to_append,
    read_regular,
    read_text,
    write_whole,
)

SECRET = "secret of the reader"


@pytest.fixture
def place(tmp_path: Path) -> SimpleNamespace:
    """A received folder, and a secret next to it."""
    (tmp_path / "run" / "below").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "file.json").write_text("inside")
    for folder in ("elsewhere", "."):
        (tmp_path / folder / "file.json").write_text(SECRET)
    return SimpleNamespace(run=tmp_path / "run", outside=tmp_path / "elsewhere")


def link_absolute(at: Path, outside: Path) -> None:
    at.symlink_to(outside / "file.json")


def link_relative(at: Path, outside: Path) -> None:
    at.symlink_to("../elsewhere/file.json")


def link_doubled(at: Path, outside: Path) -> None:
    at.symlink_to(f"/{outside / 'file.json'}")


def link_through_another(at: Path, outside: Path) -> None:
    (at.parent / "other").symlink_to(outside)
    at.symlink_to("other/file.json")


def link_up_and_down(at: Path, outside: Path) -> None:
    at.symlink_to(f"below/../../{outside.name}/file.json")


def link_of_the_process(at: Path, outside: Path) -> None:
    at.symlink_to(f"/proc/self/root{outside / 'file.json'}")


LINKS = [link_absolute, link_relative, link_doubled, link_through_another, link_up_and_down, link_of_the_process]


@pytest.mark.parametrize("link", LINKS)
def test_no_link_leads_out_of_the_folder(link: Callable[[Path, Path], None], place: SimpleNamespace) -> None:
    path = place.run / "planted.json"
    link(path, place.outside)
    for reading in (
        lambda: read_regular(path, 1000, inside=place.run),
        lambda: check_regular(path, inside=place.run),
        lambda: check_inside(path, place.run),
        lambda: copy_file(path, place.run / "copy", inside=place.run),
    ):
        with pytest.raises(
            UserError, match=r"planted\.json leads out of .*run, to .*put it there in place of the link"
        ):
            reading()
    assert SECRET not in "".join(each.read_text() for each in place.run.iterdir() if each.is_file() and each != path)
    assert read_text(path, 1000) == SECRET, "a file that the user names may be a link"


def test_no_folder_on_the_way_leads_outside(place: SimpleNamespace) -> None:
    (place.run / "checkpoints").symlink_to(place.outside)
    path = place.run / "checkpoints" / "file.json"
    for touching in (
        lambda: read_regular(path, 1000, inside=place.run),
        lambda: write_whole(path, "overwritten", inside=place.run),
        lambda: write_whole(place.run / "checkpoints" / "new", "planted", inside=place.run, new=True),
        lambda: open_to_append(path, inside=place.run),
        lambda: open_new(place.run / "checkpoints" / "new", inside=place.run),
        lambda: copy_folder(place.run / "checkpoints", place.run / "copy", inside=place.run),
    ):
        with pytest.raises(UserError, match="leads out of"):
            touching()
    assert {each.name: each.read_text() for each in place.outside.iterdir()} == {"file.json": SECRET}
    with pytest.raises(UserError, match="leads out of"):
        read_regular(place.run / ".." / "elsewhere" / "file.json", 1000, inside=place.run)


def test_links_within_the_folder_are_followed(place: SimpleNamespace) -> None:
    (place.run / "a").symlink_to("b")
    (place.run / "b").symlink_to("below/../file.json")
    (place.run / "absolute").symlink_to(place.run / "file.json")
    (place.run / "folder").symlink_to("below/..")
    for name in ("a", "b", "absolute", "folder/file.json", "folder/folder/a", "below/../file.json"):
        assert read_text(place.run / name, 1000, inside=place.run) == "inside", name
    (place.run.parent / "linked").symlink_to(place.run)
    linked = place.run.parent / "linked"
    assert read_text(linked / "a", 1000, inside=linked) == "inside", "the folder itself may be a link"


def test_links_in_a_circle_are_named(place: SimpleNamespace) -> None:
    (place.run / "a").symlink_to("b")
    (place.run / "b").symlink_to("a")
    (place.run / "self").symlink_to("self/self")
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(place.run / "a" / "file", 1000, inside=place.run / "a")
    for name in ("a", "self"):
        with pytest.raises(UserError, match=f"{name} is a link in a circle of links"):
            read_regular(place.run / name, 1000, inside=place.run)


def test_the_cache_of_hugging_face_is_read_and_nothing_else_beyond_a_snapshot(place: SimpleNamespace) -> None:
    model = place.run / "models--org--name"
    snapshot = model / "snapshots" / "abc"
    (snapshot / "deep").mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "123").write_text("blob")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    (snapshot / "deep" / "config.json").symlink_to("../../../blobs/123")
    assert read_text(snapshot / "config.json", 1000, inside=snapshot) == "blob"
    assert read_text(snapshot / "deep" / "config.json", 1000, inside=snapshot) == "blob"
    (model / "blobs" / "456").symlink_to(place.outside / "file.json")
    (snapshot.parent / "other").mkdir()
    (snapshot.parent / "other" / "file.json").write_text(SECRET)
    for target in ("../../blobs/456", "../other/file.json", "../../file.json", "../../blobs/../../file.json"):
        (snapshot / "planted.json").unlink(missing_ok=True)
        (snapshot / "planted.json").symlink_to(target)
        with pytest.raises((UserError, FileNotFoundError)):
            read_text(snapshot / "planted.json", 1000, inside=snapshot)


def plant(kind: str, path: Path) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to(kind)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "sparse", "/dev/zero", "/dev/full", "/dev/tty"])
def test_what_is_no_file_is_refused_at_once(kind: str, inside: bool, place: SimpleNamespace) -> None:
    path = place.run / "manifest.json"
    plant(kind, path)
    root = place.run if inside else None
    words = r"manifest\.json (is a folder|is a FIFO|has 1099511627776 bytes; such a file may have|leads out of)"
    for reading in (
        lambda: read_regular(path, 1 << 20, inside=root),
        lambda: read_text(path, 1 << 20, inside=root),
        lambda: open_regular(path, max_bytes=1 << 20, inside=root),
        lambda: copy_file(path, place.run / "copy", 1 << 20, inside=root),
    ):
        with pytest.raises((UserError, OSError), match=f"{words}|No such device"):
            reading()
    if kind != "sparse":
        with pytest.raises((UserError, OSError)):
            open_to_append(path, inside=root)


def test_a_file_that_becomes_a_link_between_the_check_and_the_opening_is_not_read(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look, swapped = place.run / "file.json", os.stat, []

    def swapping(name: str, **options: object) -> os.stat_result:
        found = look(name, **options)  # type: ignore[arg-type]
        if name == "file.json":
            path.unlink()
            path.symlink_to(place.outside / "file.json")
            swapped.append(name)
        return found

    monkeypatch.setattr(door.os, "stat", swapping)
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(path, 1000, inside=place.run)
    assert swapped


def test_a_file_that_becomes_a_fifo_or_grows_is_not_waited_for(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look = place.run / "file.json", os.stat

    def swapping(name: str, **options: object) -> os.stat_result:
        found = look(name, **options)  # type: ignore[arg-type]
        if name == "file.json":
            path.unlink()
            os.mkfifo(path)
        return found

    monkeypatch.setattr(door.os, "stat", swapping)
    with pytest.raises(UserError, match="FIFO"):
        read_regular(path, 1000, inside=place.run)
    monkeypatch.undo()
    path.unlink()
    path.write_bytes(b"x" * 10)
    status = os.fstat

    def growing(descriptor: int) -> os.stat_result:
        found = status(descriptor)
        with path.open("ab") as file:
            file.write(b"x" * 2000)
        return found

    monkeypatch.setattr(door.os, "fstat", growing)
    with pytest.raises(UserError, match="more than 1000 bytes"):
        read_regular(path, 1000, inside=place.run)


def test_a_swarm_of_swaps_never_shows_the_secret(place: SimpleNamespace) -> None:
    """While a file is read, a folder on its path is swapped for a link to outside and back."""
    inner, stop = place.run / "below", threading.Event()
    (inner / "file.json").write_text("inside")
    (place.run / "link").symlink_to(place.outside)

    def swap() -> None:
        while not stop.is_set():
            inner.rename(place.run / "aside")
            (place.run / "link").rename(inner)
            inner.rename(place.run / "link")
            (place.run / "aside").rename(inner)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(500):
            try:
                assert read_text(inner / "file.json", 1000, inside=place.run) == "inside"
            except (UserError, OSError):
                continue
    finally:
        stop.set()
        swapper.join()


def test_appending_follows_no_link_in_a_received_folder(place: SimpleNamespace) -> None:
    path = place.run / "metrics.jsonl"
    path.symlink_to(place.outside / "file.json")
    with pytest.raises(UserError, match=r"metrics\.jsonl is a link, and links are not written through"):
        open_to_append(path, inside=place.run)
    path.unlink()
    path.hardlink_to(place.outside / "file.json")
    with pytest.raises(UserError, match=r"metrics\.jsonl has another name elsewhere"):
        open_to_append(path, inside=place.run)
    path.unlink()
    for line in (b"a\n", b"b\n"):
        with open_to_append(path, inside=place.run) as file:
            file.write(line)
    assert path.read_bytes() == b"a\nb\n"


@pytest.mark.parametrize("name", ["a\0b", "\ud800.json", "below\0/file.json"])
def test_a_name_that_no_file_can_have_is_named(name: str, place: SimpleNamespace) -> None:
    """Such a name may be in a JSON list of files."""
    for inside in (None, place.run):
        with pytest.raises(UserError, match="which no file has"):
            read_regular(place.run / name, 100, inside=inside)
    with pytest.raises(UserError, match="which no file has"):
        check_inside(place.run / name, place.run)


@pytest.mark.parametrize("kind", ["fifo", "socket", "/dev/zero", "/etc"])
def test_a_tree_is_looked_at_whole(kind: str, place: SimpleNamespace) -> None:
    (place.run / "inner").symlink_to("below")
    (place.run / "below" / ".hidden").symlink_to("/dev/zero")
    check_tree(place.run)
    plant(kind, place.run / "below" / "file")
    with pytest.raises(UserError, match=r"below/file (is a FIFO, socket or device|leads out of)"):
        check_tree(place.run)


def test_names_with_line_ends_and_escapes_are_read_and_written_as_they_are(place: SimpleNamespace) -> None:
    for name in ("a\nb", "\x1b]52;c;YQ==\x07", "-rf", "é", "a b", "%s", "\udcff"):
        write_whole(place.run / name, "first", inside=place.run)
        write_whole(place.run / name, "second", inside=place.run)
        assert read_text(place.run / name, 100, inside=place.run) == "second"
    assert not list(place.run.glob(".writing-*"))
