"""Runs on a real S3 interface that fails, is slow, lies and disappears; and runs that are killed there."""

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import commands
import stores
import tiny
from gptworks.checkpoint import checkpoints
from gptworks.errors import UserError
from gptworks.files import fetch_missing, mirror_of
from gptworks.files.remote import Remote
from test_resume import assert_same_run

pytestmark = [pytest.mark.places, pytest.mark.timeout(1800)]

URL = f"s3://{stores.BUCKET}/exp"
KILLS, STEPS = int(os.environ.get("GPTWORKS_TEST_KILLS", "22")), 1200
SEED = int(os.environ.get("GPTWORKS_TEST_SEED", "37"))
ALL_FAULTS = ("slow", "503", "cut-up", "cut-down", "flip")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.FaultyProxy]:
    with stores.s3() as proxy:
        for name, value in stores.environment(proxy).items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # another server had another address
        yield proxy


def train(recipe: Path, cache: Path, run_dir: str, *arguments: str) -> commands.Process:
    return commands.start(
        "-m", "gptworks", "train", recipe, f"run_dir={run_dir}", "--resume", "train.threads=1", *arguments,
        env=os.environ | {"GPTWORKS_CACHE": str(cache)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finished(process: commands.Process) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "Traceback" not in output, output
    return output


def fetched(cache: Path) -> Path:
    return cache / "remote" / f"s3%3A%2F%2F{stores.BUCKET}" / "exp"


@pytest.mark.parametrize("fault", [*ALL_FAULTS, "flip-up"])
def test_each_fault_is_survived_or_reported(
    fault: str, s3: stores.FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of three blocks goes up and down while each second request has the fault, or for bytes that differ the
    first one."""
    monkeypatch.setenv("GPTWORKS_CACHE", str(tmp_path / "cache"))
    data, counts = random.Random(SEED).randbytes(70 << 20), Counter[str]()
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


def test_one_of_two_that_claim_a_folder_gets_it(s3: stores.FaultyProxy) -> None:
    first, second = Remote(URL), Remote(URL)
    first.put("session", b"1", new=True)
    with pytest.raises(FileExistsError):
        second.put("session", b"2", new=True)
    assert second.read("session", 10) == b"1"
    time.sleep(1.1)  # S3 gives times in seconds
    assert 1 <= second.age_seconds("session", ".probe") <= 10


def test_kills_change_nothing(s3: stores.FaultyProxy, tmp_path: Path) -> None:
    """A run that is killed at random moments, each time continued on an empty machine, while one request of ten fails,
    is the run that nothing disturbed, bit for bit."""
    recipe = tiny.write_recipe(tmp_path, max_steps=STEPS, checkpoint_every=5, evaluate_every=20)
    model = ("model.n_layers=2", "model.d_model=64")
    finished(train(recipe, tmp_path / "none", str(tmp_path / "whole"), *model))
    chance, reached, said = random.Random(SEED), 0, Counter[str]()
    s3.choose = stores.random_faults(SEED, 0.1, ALL_FAULTS)
    for n in range(KILLS):
        cache = tmp_path / f"cache-{n}"
        process = train(recipe, cache, URL, *model)
        log, wait, deadline = fetched(cache) / "metrics.jsonl", chance.uniform(0.0, 2.0), time.monotonic() + 300
        while process.poll() is None and not (newest(s3) > reached if n % 2 else log.exists()):
            assert time.monotonic() < deadline, "the run does not move"
            time.sleep(0.02)
        time.sleep(wait)
        assert process.poll() is None, f"kill {n}: it has ended: {process.communicate()[0]}"
        os.kill(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert "Traceback" not in output, f"kill {n}: {output}"
        assert newest(s3) >= reached, f"kill {n}: the store lost step {reached}"
        reached = newest(s3)
        said["resumed" if "resuming" in output else "started"] += 1
        print(f"kill {n} (seed {SEED}) after {wait:.2f} s of steps: step {reached} is in the store")
        shutil.rmtree(cache)
    finished(train(recipe, tmp_path / "last", URL, *model))
    assert_same_run(fetched(tmp_path / "last"), tmp_path / "whole", STEPS)
    s3.choose = lambda method, path: ""
    cache = tmp_path / "reader"
    read = subprocess.run(
        [sys.executable, "-m", "gptworks", "generate", URL, "line", "--max-tokens", "5", "--checkpoint", "last"],
        env=os.environ | {"GPTWORKS_CACHE": str(cache)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert read.returncode == 0, read.stderr
    last = checkpoints(fetched(cache))[0]
    last.verify()
    assert last.step == STEPS
    print(f"{dict(said)}; faults: {dict(s3.faults)}")
    assert said["resumed"] >= KILLS // 2


def newest(s3: stores.FaultyProxy) -> int:
    return max((int(name.rpartition("-")[2]) for name in stored(s3)), default=0)


def stored(s3: stores.FaultyProxy) -> list[str]:
    """The complete checkpoints in the store, asked without the proxy, which may flip a digit of a listing."""
    address = f"http://127.0.0.1:{s3.to}/{stores.BUCKET}?list-type=2&prefix=exp/checkpoints/"
    with urllib.request.urlopen(address, timeout=60) as response:
        return re.findall("exp/checkpoints/(step-[0-9]+)/manifest.json<", response.read().decode())


def test_ranks_of_one_machine_train_in_a_store(s3: stores.FaultyProxy, tmp_path: Path) -> None:
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw", max_steps=6, checkpoint_every=2)
    arguments = ["launch", "--nproc", "2", str(recipe), "train.parallel.strategy=fsdp", "--resume"]
    for run_dir in (str(tmp_path / "whole"), URL):
        environment = os.environ | {"GPTWORKS_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-m", "gptworks", *arguments, f"run_dir={run_dir}"],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert_same_run(fetched(tmp_path / "cache"), tmp_path / "whole", 6)
    assert "step-000006" in stored(s3)
