"""A build that is killed again and again gives the same bytes as an uninterrupted one: `make test-kills`."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptworks.config import DatasetRecipe
from gptworks.data.jobs import finished
from test_build import TEXTS
from test_sources import jsonl

pytestmark = pytest.mark.kills

KILLS, PROCESSES, UNIT_BYTES = 20, 2, 1_000_000
SCRIPT = f"""
import sys
from pathlib import Path
from gptworks.config import DatasetRecipe
from gptworks.data.prepare import prepare
from gptworks.data.sources import base, records

if __name__ == "__main__":
    base.UNIT_BYTES = records.UNIT_BYTES = {UNIT_BYTES}
    recipe = DatasetRecipe.model_validate_json(Path(sys.argv[1]).read_text())
    prepare(recipe)
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.timeout(1200)
def test_a_build_killed_twenty_times_has_the_bytes_of_one_that_was_not(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    random.seed(seed)
    print(f"seed {seed}")
    with (tmp_path / "a.jsonl").open("w", encoding="utf-8") as file:
        for i in range(30_000):
            file.write(json.dumps({"text": f"{i}: " + " ".join(random.choices(TEXTS, k=3))}) + "\n")
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(cache: Path) -> subprocess.Popen[bytes]:
        source = jsonl(tmp_path / "a.jsonl").model_dump()
        data = {"sources": [source], "cache_dir": cache, "processes": PROCESSES}
        recipe = DatasetRecipe(tokenizer={"type": "bpe", "vocab_size": 500}, data=data)
        (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "recipe.json")]
        return subprocess.Popen(command)

    began = time.monotonic()
    process = start(tmp_path / "one")
    assert process.wait() == 0
    seconds = time.monotonic() - began
    (whole,) = (tmp_path / "one").glob("shards-*")
    wanted, kills, most_lost = files_of(whole), 0, 0
    while kills < KILLS:
        process = start(tmp_path / "many")
        try:
            process.wait(timeout=random.uniform(0.1, 0.9) * seconds)
            assert process.returncode == 0
            assert files_of(tmp_path / "many" / whole.name) == wanted
            shutil.rmtree(tmp_path / "many")
            continue
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kills += 1
        work = tmp_path / "many" / f".partial-{whole.name}"
        kept, lost = len(finished(work)), len(list(work.glob("jobs/.writing-*")))
        most_lost = max(most_lost, lost)
        print(f"kill {kills}: {kept} jobs are kept, {lost} in flight are lost")
    process = start(tmp_path / "many")
    assert process.wait() == 0
    assert files_of(tmp_path / "many" / whole.name) == wanted
    print(f"{kills} kills; at most {most_lost} jobs of 1 MB were lost by one, in {PROCESSES} processes")
    assert most_lost <= PROCESSES
