"""Runs on real interfaces of stores; on S3's one that fails, is slow, lies and disappears. test_kills.py kills more."""

import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import commands
import tiny
from gptworks.checkpoint import checkpoints
from gptworks.errors import UserError
from gptworks.files import fetch_missing, fetched_path, mirror_of
from gptworks.files.remote import Remote
from stores import ALL_FAULTS, URL, FaultyProxy
from test_resume import assert_same_run

pytestmark = [pytest.mark.places, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("fault", [*ALL_FAULTS, "flip-up"])
def test_each_fault_is_survived_or_reported(
    fault: str, s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of three blocks goes up and down while each second request has the fault, or for bytes that differ the
    first one."""
    monkeypatch.setenv("GPTWORKS_CACHE", str(tmp_path / "cache"))
    data, counts = random.Random(37).randbytes(70 << 20), Counter[str]()
    (tmp_path / "file").write_bytes(data)
    path = mirror_of(URL) / "file"
    path.parent.mkdir(parents=True)

    def choose(method: str, path: str) -> str:
        counts[method] += 1
        if fault.startswith("flip"):
            return fault if counts["PUT" if fault == "flip-up" else "GET"] == 1 else ""
        return fault if counts.total() % 2 else ""

    Remote(URL).entries()
    s3.choose = choose
    Remote(URL).upload("file", tmp_path / "file", tries=6)
    counts["GET"] = 0 if fault != "flip" else -1  # the first is a listing
    sha256 = hashlib.sha256(data).hexdigest()
    if fault == "flip-up":  # moto stores bytes that differ from their checksum
        with pytest.raises(UserError, match="damaged"):
            fetch_missing(path, len(data), sha256)
        assert not path.exists()
    else:
        fetch_missing(path, len(data), sha256)
        assert path.read_bytes() == data
    assert s3.faults[fault] > 0


def test_one_of_two_that_claim_a_folder_gets_it(any_store: str) -> None:
    first, second = Remote(any_store), Remote(any_store)
    first.put("session", b"1", new=True)
    with pytest.raises(FileExistsError):
        second.put("session", b"2", new=True)
    assert second.read("session", 10) == b"1"
    time.sleep(1.1)  # S3 gives times in seconds
    assert 1 <= second.age_seconds("session", ".probe") <= 10


def test_an_empty_object_is_read(any_store: str) -> None:
    """A store refuses a range of bytes of one."""
    remote = Remote(any_store)
    remote.put("empty", b"")
    assert remote.read("empty", 10) == b""
    assert remote.entries()["empty"].n_bytes == 0
    remote.remove("empty")
    remote.remove("empty")
    with pytest.raises(FileNotFoundError):
        remote.read("empty", 10)


def test_a_killed_run_continues_on_an_empty_machine(any_store: str, tmp_path: Path) -> None:
    recipe, steps = tiny.write_recipe(tmp_path, max_steps=300, checkpoint_every=5, evaluate_every=20), 300
    arguments = ["-m", "gptworks", "train", recipe, "--resume", "train.threads=1", "model.n_layers=3"]

    def start(run_dir: Path | str) -> commands.Process:
        return commands.start(*arguments, f"run_dir={run_dir}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def end(process: commands.Process) -> str:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        return output or ""

    end(start(tmp_path / "whole"))
    process, remote = start(any_store), Remote(any_store)
    while not any(name.startswith("checkpoints/step-") and name.endswith("manifest.json") for name in remote.entries()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=60)
    shutil.rmtree(tmp_path / "cache")
    assert f"resuming {any_store} from step" in end(start(any_store))
    shutil.rmtree(tmp_path / "cache")
    checkpoints(fetched_path(any_store))[0].verify()
    assert_same_run(fetched_path(any_store), tmp_path / "whole", steps)


def test_ranks_of_one_machine_train_in_a_store(
    s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTWORKS_CACHE", str(tmp_path / "cache"))
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw", max_steps=6, checkpoint_every=2)
    launch = ["launch", "--nproc", "2", str(recipe), "train.parallel.strategy=fsdp", "--resume"]
    read = ["generate", URL, "line", "--max-tokens", "5", "--checkpoint", "last"]
    for arguments in ([*launch, f"run_dir={tmp_path / 'whole'}"], [*launch, f"run_dir={URL}"], read):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        command = [sys.executable, "-m", "gptworks", *arguments]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    checkpoints(fetched_path(URL))[0].verify()
    assert_same_run(fetched_path(URL), tmp_path / "whole", 6)
