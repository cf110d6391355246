"""Runs and data in object stores, on fsspec's memory: what is fetched, what is uploaded, and what is refused."""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

import gptworks
import tiny
from gptworks.checkpoint import checkpoints, choose_checkpoint, load_run
from gptworks.cli import app
from gptworks.config.sources import TextSource
from gptworks.data.prepare import prepare
from gptworks.data.sources.files import local_files
from gptworks.errors import RunError, UserError
from gptworks.files import check_free, fetched_path, file_lock, local_path, mirror_of, shown, url_of
from gptworks.files import mirror as mirrors
from gptworks.files.remote import Remote
from gptworks.interop.html_file.exporting import export_html
from gptworks.judge import Campaign
from gptworks.recipe import load_recipe, parse_recipe, save_recipe
from gptworks.runs.data import data_of
from gptworks.runs.quantized import quantize_run
from gptworks.runs.trials import open_folder
from gptworks.training import remote_run, uploads
from gptworks.training.distributed.ranks import ALONE
from gptworks.training.loop import Run
from gptworks.training.remote_run import Session
from gptworks.training.uploads import Uploads
from test_resume import assert_same_run

URL = "memory://bucket/team/exp"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GPTWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("gptworks.files.remote._FIRST_WAIT_SECONDS", 0.001)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield memory
    memory.store.clear()


def another_machine(tmp_path: Path) -> None:
    """As if the next call were made where nothing was fetched yet."""
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    mirrors._fetched_at.clear()


def there(store: Any) -> set[str]:
    return {path.removeprefix("/bucket/team/exp/") for path in store.find("/bucket/team/exp") if "/." not in path}


@pytest.mark.parametrize("url", [URL, "s3://bucket/exp", "gs://bucket/a/b/c", "az://container/exp"])
def test_a_url_and_its_mirror_lead_to_each_other(url: str) -> None:
    folder = mirror_of(url)
    assert folder.name == url.rpartition("/")[2]
    assert url_of(folder) == url
    assert url_of(folder / "checkpoints" / "step-000004") == f"{url}/checkpoints/step-000004"
    assert local_path(Path(url)) == folder, "a Path has lost the second slash"
    assert shown(folder) == url
    assert mirror_of(f"{url}/below").parent != folder, "a run below another is no part of it"


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/../x", "s3://bucket/a//b", "s3://bucket/.a", "s3://b/a b", "s3://b/a?b",
                                 "s3://bucket/" + "a" * 201, "s3://" + "b" * 100 + "/c" * 100])  # fmt: skip
def test_urls_that_name_no_folder_are_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"give s3://BUCKET/NAME|too long"):
        mirror_of(url)


def test_settings_hold_urls_only_where_they_are_used(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path) | {"run_dir": "s3://bucket/exp"}
    recipe = parse_recipe(tree)
    assert recipe.run_dir == mirror_of("s3://bucket/exp")
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert "run_dir: s3://bucket/exp\n" in (tmp_path / "recipe.yaml").read_text()
    with pytest.raises(UserError, match=r"data.cache_dir.*is a URL"):
        parse_recipe(tree | {"data": tree["data"] | {"cache_dir": "s3://bucket/cache"}})


def test_commands_do_not_make_folders_named_like_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="URL"):
        gptworks.files.make_folder(Path("s3://bucket/out"))
    with pytest.raises(UserError, match="URL"):
        check_free(Path("s3://bucket/out"))
    with pytest.raises(UserError, match="URL"), open_folder(Path("s3://bucket/out"), "try", "--folder"):
        pass
    with pytest.raises(UserError, match="URL"):
        Campaign.create(tiny.write_recipe(tmp_path), Path("s3://bucket/out"), budget_seconds=60)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "text.txt"}


# ------------------------------------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("whole")
    tree = tiny.recipe_tree(folder, max_steps=10, checkpoint_every=2, threads=1)
    gptworks.train(tree)
    return tree, folder / "run"


def interrupted(_: Run) -> bool:
    raise KeyboardInterrupt


def test_a_run_continues_on_another_machine(
    whole: tuple[dict[str, Any], Path], tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, local = whole
    tree = tree | {"run_dir": URL}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "evaluate", interrupted)  # in step 5
        gptworks.train(tree)
    assert {"recipe.yaml", "metrics.jsonl", "tokenizer/tokenizer.json"} <= there(store)
    another_machine(tmp_path)
    gptworks.train(tree, resume=True)
    names = {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file() and path.name != ".lock"}
    assert there(store) == names
    another_machine(tmp_path)
    mirror = fetched_path(URL)
    assert not list(mirror.rglob("*.safetensors")), "tensors are fetched when they are read"
    with pytest.raises(UserError, match=f"{URL} already holds a run"):
        gptworks.train(tree)
    assert load_run(URL, "last").checkpoint.step == 10
    assert sorted(path.parent.name for path in mirror.rglob("*.safetensors")) == ["step-000010"] * 2
    assert gptworks.read_run(URL).records[-1]["step"] == 10
    choose_checkpoint(mirror, "last").verify()
    assert (mirror / "checkpoints/step-000010/model.safetensors").read_bytes() == (
        local / "checkpoints/step-000010/model.safetensors"
    ).read_bytes()


def uploaded(tree: dict[str, Any], local: Path) -> None:
    """Put a run into the store, file by file."""
    memory = fsspec.filesystem("memory")
    for path in sorted(local.rglob("*")):
        if path.is_file() and path.name != ".lock":
            memory.pipe_file(f"{URL}/{path.relative_to(local).as_posix()}", path.read_bytes())


def test_a_machine_that_has_just_started_asks_the_store(
    whole: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded(*whole)
    monkeypatch.setattr(mirrors.time, "monotonic", lambda: 3.0)
    assert (fetched_path(URL) / "recipe.yaml").exists()


def test_a_checkpoint_without_manifest_is_not_there(whole: tuple[dict[str, Any], Path], store: Any) -> None:
    uploaded(*whole)
    store.rm("/bucket/team/exp/checkpoints/step-000010/manifest.json")
    assert [each.step for each in checkpoints(fetched_path(URL))] == [8]


def test_damaged_tensors_are_found_and_another_checkpoint_is_used(
    whole: tuple[dict[str, Any], Path], store: Any
) -> None:
    uploaded(*whole)
    name = "/bucket/team/exp/checkpoints/step-000010/model.safetensors"
    data = bytearray(store.cat_file(name))
    data[-1] ^= 1
    store.pipe_file(name, bytes(data))
    said: list[str] = []
    assert load_run(URL, "last", report=said.append).checkpoint.step == 8
    assert "step-000010/model.safetensors is damaged" in said[0]
    assert not (mirror_of(URL) / "checkpoints/step-000010/model.safetensors").exists()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "checkpoints/./x", "a\nb", "a\\b", " ", "a/" * 20 + "b"])
def test_names_that_lead_elsewhere_are_refused(name: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"size": 1, "created": 0}
    monkeypatch.setattr(type(store), "find", lambda *_, **__: {f"/bucket/team/exp/{name}": info})
    with pytest.raises(UserError, match="an object named"):
        fetched_path(URL)


def test_an_object_below_an_object_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {f"/bucket/team/exp/{name}": {"size": 1, "created": 0} for name in ("a", "a/b")}
    monkeypatch.setattr(type(store), "find", lambda *_, **__: found)
    with pytest.raises(UserError, match="below another object"):
        fetched_path(URL)


@pytest.mark.parametrize(
    ("limit", "error", "words"),
    [(50, UserError, "has 120 bytes of files other .* a run may have 50.* such as notes.txt with 100 bytes"),
     (500, RunError, "120 bytes are to be fetched, and 119 are free")],
)  # fmt: skip
def test_more_bytes_than_a_run_may_have_or_the_disk_has_are_not_fetched(
    limit: int, error: type[Exception], words: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors and checkpoints without a manifest do not count: they are fetched when they are read, or never."""
    for name, n_bytes in {"notes.txt": 100, "metrics.jsonl": 20, "checkpoints/step-000001/state.json": 999,
                          "checkpoints/weights-000001/model.safetensors": 999}.items():  # fmt: skip
        store.pipe_file(f"{URL}/{name}", b"x" * n_bytes)
    monkeypatch.setattr(mirrors, "_MOST_SMALL_BYTES", limit)
    monkeypatch.setattr(mirrors.shutil, "disk_usage", lambda _: SimpleNamespace(free=119))
    with pytest.raises(error, match=words):
        fetched_path(URL)
    assert not list(mirror_of(URL).rglob("[a-z]*.*"))


def test_an_object_that_is_longer_than_stated_is_not_read_on(store: Any) -> None:
    store.pipe_file(f"{URL}/metrics.jsonl", b"x" * 100)
    with pytest.raises(UserError, match="more than 50 bytes"):
        Remote(URL).read("metrics.jsonl", 50)


# ------------------------------------------------------------------------------------------ two runs, and failures


def session(host: str, report: Callable[[str], None] = lambda _: None) -> Session:
    """A session as of a process on another machine."""
    made = Session(Remote(URL), report)
    made._own |= {"host": host, "machine": host}
    return made


def dies(session: Session) -> None:
    """Leave the store as a killed process does."""
    session._over.set()
    session._beats.join()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_run, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(remote_run, "BEAT_SECONDS", 0.1)


def test_two_runs_cannot_train_in_one_place(store: Any, quick: None) -> None:
    said: list[str] = []
    first, second, third = session("here"), session("there", said.append), session("yonder")
    first.claim(mirror_of(URL))
    with pytest.raises(UserError, match=r"is in use by process '\d+' on 'here\'"):
        second.claim(mirror_of(URL))
    dies(first)
    second.claim(mirror_of(URL))  # it waits until the beats of the first are stale
    assert "waiting up to" in said[-1]
    first._over.clear()
    first._beat()  # it was only slow
    assert first.taken_by is not None and "on 'there'" in first.taken_by
    assert not first.may_write(True)
    second.end(mirror_of(URL), True)
    began = time.monotonic()
    third.claim(mirror_of(URL))
    assert time.monotonic() - began < 0.9, "a session that has ended is not waited for"
    third.end(mirror_of(URL), True)


@pytest.mark.parametrize("writes", [False, True])
def test_only_a_session_that_wrote_overtakes_another_machine(
    writes: bool, store: Any, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine has a checkpoint that the store lacks. Another claims the store and is killed: before it
    writes, the first continues with its own files; afterwards, they are out of date."""
    first, second = session("here"), session("there")
    first.claim(mirror_of(URL))
    first.may_write(True)
    dies(first)
    (mirror_of(URL) / "checkpoints/step-000002").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setenv("GPTWORKS_CACHE", str(tmp_path / "there"))
        second.claim(mirror_of(URL))
        if writes:
            Uploads(second.remote, mirror_of(URL), lambda _: None, second.may_write)._writing()
        dies(second)
    mirrors._fetched_at.clear()
    with pytest.warns(UserWarning, match="kept in") if writes else contextlib.nullcontext():
        fetched_path(URL)
    assert (mirror_of(URL) / "checkpoints/step-000002").exists() != writes


def test_the_end_of_a_session_is_its_last_write(store: Any, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign of life that is on its way when the session ends arrives before the end is written, not after."""
    one, on_its_way, real = session("here"), threading.Event(), Remote.put

    def slow(remote: Remote, name: str, data: bytes, **named: Any) -> None:
        if threading.current_thread() is one._beats:
            on_its_way.set()
            time.sleep(0.5)
        real(remote, name, data, **named)

    monkeypatch.setattr(Remote, "put", slow)
    one.claim(mirror_of(URL))
    assert on_its_way.wait(10)
    one.end(mirror_of(URL), True)
    assert not one._beats.is_alive()
    last = mirrors.last_session(one.remote, one.remote.entries())
    assert last is not None and last["ended"] is True


@pytest.mark.parametrize("ignores", [False, True])
def test_a_store_that_does_not_keep_two_runs_apart_is_reported(
    ignores: bool, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ignores:
        real = type(store).pipe_file
        monkeypatch.setattr(
            type(store), "pipe_file", lambda store, path, value, mode="overwrite": real(store, path, value)
        )
    said: list[str] = []
    one = session("here", said.append)
    one.claim(mirror_of(URL))
    one.end(mirror_of(URL), True)
    assert ("does not keep apart two runs" in "".join(said)) == ignores


def test_a_claim_that_fails_later_frees_the_store(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(RunError, match="the disk is full"):
        patch.setattr(remote_run, "refresh", lambda *_: (_ for _ in ()).throw(RunError("the disk is full")))
        session("here").claim(mirror_of(URL))
    began = time.monotonic()
    other = session("there")
    other.claim(mirror_of(URL))
    other.end(mirror_of(URL), True)
    assert time.monotonic() - began < 10


def test_what_was_not_uploaded_is_said_and_uploaded_later(
    whole: tuple[dict[str, Any], Path], store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = whole[0] | {"run_dir": URL}
    monkeypatch.setattr(uploads, "END_SECONDS", 0.0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("503 Slow Down")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put_file", full)
        with pytest.raises(
            RunError, match=r"files of the run are not in memory://.*step-000010.*503 Slow Down.*--resume"
        ):
            gptworks.train(tree)
    assert not any(name.endswith("manifest.json") for name in there(store))
    assert_same_run(mirror_of(URL), whole[1], 10)
    gptworks.train(tree, resume=True)
    assert "checkpoints/step-000010/manifest.json" in there(store)
    another_machine(tmp_path)
    choose_checkpoint(fetched_path(URL), "last").verify()
    assert_same_run(fetched_path(URL), whole[1], 10)


def test_files_that_another_machine_overtook_are_kept_aside(
    whole: tuple[dict[str, Any], Path], store: Any, tmp_path: Path
) -> None:
    uploaded(*whole)
    mirror = fetched_path(URL)
    own = {"token": "mine", "uploaded": False}
    (mirror / mirrors.OWN_SESSION).write_text(json.dumps(own))
    (mirror / "only-here.txt").write_text("kept")
    store.pipe_file(f"{URL}/.sessions/00000007", json.dumps({"token": "theirs", "ended": True}).encode())
    mirrors._fetched_at.clear()
    with pytest.warns(UserWarning, match="kept in"):
        fetched_path(URL)
    assert not (mirror / "only-here.txt").exists()
    assert (mirror.with_name(".exp.mine") / "only-here.txt").read_text() == "kept"


def test_the_store_never_has_half_a_checkpoint(
    whole: tuple[dict[str, Any], Path], store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each write to the store, what it holds is a run that another machine can read."""
    mirror = mirror_of(URL)
    shutil.copytree(whole[1], mirror, ignore=shutil.ignore_patterns(".lock"))
    uploads = Uploads(Remote(URL), mirror, lambda _: None)
    seen, check = [], threading.Lock()

    def looked() -> None:
        found = {name.rpartition("/")[0] for name in there(store) if name.endswith("manifest.json")}
        for folder in found:
            manifest = json.loads(store.cat_file(f"{URL}/{folder}/manifest.json"))
            for name, entry in manifest["files"].items():
                assert store.size(f"{URL}/{folder}/{name}") == entry["bytes"]
            assert "metrics.jsonl" in there(store)
        small = {name for name in there(store) if not name.startswith("checkpoints/")}
        assert "recipe.yaml" in small or not small, "without it, the folder is not a run's"
        if "tokenizer/sums.json" in small:
            sums = json.loads(store.cat_file(f"{URL}/tokenizer/sums.json"))
            assert {f"tokenizer/{name}" for name in sums["files"]} <= small
        assert found or not seen or not seen[-1], "the last checkpoint was deleted before the next was there"
        seen.append(found)

    for name in ("put_file", "pipe_file", "rm_file"):
        real = getattr(type(store), name)

        def watched(*arguments: Any, real: Any = real, **named: Any) -> Any:
            result = real(*arguments, **named)
            if not check.locked():
                with check:
                    looked()
            return result

        monkeypatch.setattr(type(store), name, watched)
    uploads._upload(True)
    shutil.move(mirror / "checkpoints/step-000010", mirror / "checkpoints/step-000012")
    shutil.rmtree(mirror / "checkpoints/step-000008")
    uploads._upload(True)
    assert {one.rpartition("/")[2] for one in seen[-1]} >= {"step-000012"}
    assert not {one.rpartition("/")[2] for one in seen[-1]} & {"step-000008", "step-000010"}


def test_a_local_run_needs_no_store() -> None:
    with remote_run.remote_run(Path("runs/demo"), ALONE, lambda _: None):
        pass


# ------------------------------------------------------------------------------------------------------ the cache


def test_copies_are_listed_and_removed_unless_the_store_lacks_files_of_them(
    store: Any, whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    def cache(*arguments: str) -> set[tuple[str, str]]:
        """Return each copy's URL, and why it is kept."""
        result = CliRunner().invoke(app, ["data", "cache", "--json", *arguments], catch_exceptions=False)
        tree = json.loads(result.stdout)
        assert tree["bytes"] == sum(each["n_bytes"] for each in tree["copies"])
        return {(each["url"], each["kept_because"]) for each in tree["copies"]}

    text, other = "memory://bucket/texts/a.txt", "memory://bucket/team/other"
    uploaded(*whole)
    store.pipe_file(text, b"one")
    local_files(TextSource(type="text", path=text), (".txt",))
    fetched_path(URL)
    gptworks.train(whole[0] | {"run_dir": other})
    own = mirror_of(other) / mirrors.OWN_SESSION
    ended = own.read_text()
    own.write_text(json.dumps(json.loads(ended) | {"uploaded": False}))
    (mirror_of(URL).with_name(".exp.0123") / "checkpoints").mkdir(parents=True)
    kept = {(URL, "kept aside, not in the store"), (other, "not all in the store")}
    assert cache() == {(URL, ""), (text, ""), *kept}
    with pytest.raises(UserError, match=r"not all in the store.*--resume uploads"):
        mirrors.remove_copy(other)
    assert cache("--remove", URL, "--remove", text) == kept
    with pytest.raises(UserError, match="no copy of it"):
        mirrors.remove_copy(text)
    assert not mirror_of(URL).exists() and not mirror_of(text).exists() and mirror_of(other).exists()
    own.write_text(ended)
    with file_lock(mirror_of(other) / ".lock"), pytest.raises(UserError, match="in use"):
        mirrors.remove_copy(other)
    mirrors.remove_copy(other)
    assert fetched_path(URL).exists()
    assert local_files(TextSource(type="text", path=text), (".txt",))[0].read_text() == "one"


# ------------------------------------------------------------------------------------------------------ data


def test_sources_are_read_from_a_store(store: Any, tmp_path: Path) -> None:
    store.pipe_file("memory://bucket/texts/a.txt", b"one")
    store.pipe_file("memory://bucket/texts/more/b.txt", b"two")
    source = TextSource(type="text", path="memory://bucket/texts")
    assert [path.read_text() for path in local_files(source, (".txt",))] == ["one", "two"]
    store.pipe_file("memory://bucket/texts/a.txt", b"three")
    store.rm("memory://bucket/texts/more/b.txt")
    assert [path.read_text() for path in local_files(source, (".txt",))] == ["three"]
    one = TextSource(type="text", path="memory://bucket/texts/a.txt")
    assert [path.read_text() for path in local_files(one, (".txt",))] == ["three"]
    with pytest.raises(UserError, match="no such file or folder in the store"):
        local_files(TextSource(type="text", path="memory://bucket/none"), (".txt",))


def test_a_built_dataset_is_read_from_a_store(store: Any, tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path)
    built = prepare(parse_recipe(tree))
    for path in built.folder.rglob("*"):
        if path.is_file():
            store.pipe_file(f"memory://bucket/data/one/{path.relative_to(built.folder).as_posix()}", path.read_bytes())
    mixture = [{"name": "one", "weight": 1, "dataset": "memory://bucket/data/one"}]
    remote = tree | {"tokenizer": {"type": "dataset"}, "data": {"mixture": mixture, "cache_dir": str(tmp_path / "new")}}
    mixed = prepare(parse_recipe(remote))
    assert mixed.manifest.splits == built.manifest.splits
    shard = next(path for path in store.find("/bucket/data/one") if "train" in path)
    store.pipe_file(shard, store.cat_file(shard)[:-2])
    with pytest.raises(UserError):
        prepare(parse_recipe(remote))


def test_a_quantized_run_in_a_store_is_planned_as_it_is_stored(
    whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    quantize_run(whole[1], tmp_path / "small", "int8")
    uploaded(whole[0], tmp_path / "small")
    assert gptworks.plan_serving(URL, requests=1).weights == "int8"
    assert gptworks.plan(URL).parameters.total == gptworks.plan(whole[0]).parameters.total


def test_a_run_starts_from_one_in_a_store(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    uploaded(*whole)
    tree = whole[0]
    recipe = load_recipe({key: tree[key] for key in ("name", "data", "train")} | {"initialize_from": URL})
    assert recipe.model.d_model == 32
    assert recipe.initialize_from == mirror_of(URL)


def test_the_data_of_a_run_in_a_store_is_found_by_its_fingerprint(
    whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    uploaded(*whole)
    another_machine(tmp_path)
    assert data_of(URL).rows_of_step(1, 0, 1)[0].n_samples == 8


def test_a_run_in_a_store_is_exported_as_a_page(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    uploaded(*whole)
    another_machine(tmp_path)
    assert export_html(URL, tmp_path / "model.html", verify=False).bytes > 100_000


def test_the_store_keeps_a_checkpoint_to_continue_from_until_a_newer_one_is_there(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints with weights only cannot be continued, and a folder without checkpoints deletes none."""
    mirror, remote = mirror_of(URL), Remote(URL)
    for folder in ("step-000100", "weights-000000"):
        (mirror / "checkpoints" / folder).mkdir(parents=True)
        (mirror / "checkpoints" / folder / "manifest.json").write_text("{}")
    uploads = Uploads(remote, mirror, lambda _: None)
    uploads._upload(True)
    kept = "checkpoints/step-000100/manifest.json"
    (mirror / "checkpoints" / "step-000100").rename(mirror / "checkpoints" / "step-000200")
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "upload", lambda *_: (_ for _ in ()).throw(RunError("the store failed")))
        with pytest.raises(RunError, match="the store failed"):
            uploads._upload(True)
    assert kept in there(store)
    uploads._upload_checkpoint("step-000100")  # listed before training deleted it
    assert kept in there(store)
    shutil.move(mirror / "checkpoints", mirror.parent / "away")
    uploads._upload(True)
    assert kept in there(store)
    shutil.move(mirror.parent / "away", mirror / "checkpoints")
    uploads._upload(True)
    assert kept not in there(store) and "checkpoints/step-000200/manifest.json" in there(store)
