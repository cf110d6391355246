"""Runs on a real S3 interface that fails, is slow, lies and disappears; runs that are killed there: test_kills.py."""

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


def test_one_of_two_that_claim_a_folder_gets_it(s3: FaultyProxy) -> None:
    first, second = Remote(URL), Remote(URL)
    first.put("session", b"1", new=True)
    with pytest.raises(FileExistsError):
        second.put("session", b"2", new=True)
    assert second.read("session", 10) == b"1"
    time.sleep(1.1)  # S3 gives times in seconds
    assert 1 <= second.age_seconds("session", ".probe") <= 10


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
