"""Runs the commands of the README, the guide and the topics, in order, in an empty folder (`make test-guide`).

A YAML or Python block that names its file in its first line is written there; `# B.yaml: A.yaml with these sections`
is A.yaml with its sections replaced. Bash blocks and other Python blocks are run. A block after
`<!-- not run: reason -->` needs what a test does not have.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from gptworks.recipe import load_recipe

ROOT = Path(__file__).parents[1]
FLAGS = re.MULTILINE | re.DOTALL
PAGES = [
    "README.md",
    "docs/guide.md",
    *(
        f"docs/topics/{topic}.md"
        for topic in ("models", "planning", "data", "training", "launching", "stores", "export")
    ),
    *(f"docs/topics/{topic}.md" for topic in ("tuning", "generating", "serving", "studio", "evaluating", "judge")),
    "docs/python.md",
]
"""In the order in which they run: later pages use the runs of earlier ones."""
BLOCK = re.compile(r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", FLAGS)
NAMED = re.compile(r"# (?P<name>[\w-]+\.(?:yaml|py))(?:: (?P<base>[\w-]+\.yaml) with these sections)?\n")

SHORT = "train.max_steps=6 train.warmup_steps=1 train.batch_size=8 train.evaluate_sequences=8 train.sample_tokens=8"
SUBSTITUTIONS = {
    r"(gptworks (?:train|launch)(?! [^#\n]*--dry-run) [^#\n]*?)(?= *(?:#|$))": rf"\1 {SHORT}",
    r"(gptworks fork [^#\n]*?)(?= *(?:#|$))": r"\1 train.max_steps=6",
    r"(gptworks sweep [^#\n]*?)(?= *(?:#|$))": rf"\1 {SHORT} sweep.n_trials=2",
    r"gptworks try mine.yaml ([^#\n]*?) --minutes 30(?= *(?:#|$))": r"gptworks try demo.yaml \1 --minutes 5 --steps 20",
    r"(--weights int4(?: --head int4)?)(?= *(?:#|$))": r"\1 --calibrate 2048",
    r"(gptworks plan gpt[^#\n]*?)(?= *(?:#|$))": r"\1 || test $? -eq 3",  # 3: it does not fit there
    r"(gptworks plan [^#\n]*--measure)(?= *(?:#|$))": r"\1 train.batch_size=2",
    r"gptworks serve ([^#\n]*?)(?= *(?:#|$))": r"gptworks serve \1 --port PORT",
    r"127\.0\.0\.1:8000": "127.0.0.1:PORT",
}
"""What the test changes in the printed commands: short runs, a smaller recipe, small measurements, a free port."""


@dataclass(frozen=True)
class Block:
    """A fenced block, and its position in a page."""

    place: str
    language: str
    text: str
    reason: str | None


def blocks() -> Iterator[Block]:
    """Yield the blocks of all pages, in order."""
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        for match in BLOCK.finditer(page):
            line = page.count("\n", 0, match.start()) + 1
            yield Block(f"{name}:{line}", match["language"], match["text"], match["reason"])


def write_data(folder: Path) -> None:
    """Write the texts and records that the guide assumes the reader has."""
    (folder / "my-texts").mkdir()
    library = Path(os.__file__).parent
    for path in sorted(library.glob("[a-c]*.py")):
        (folder / "my-texts" / f"{path.stem}.txt").write_bytes(path.read_bytes())
    (folder / "book.txt").write_bytes((library / "textwrap.py").read_bytes())
    questions = [f"Which number follows {n}?" for n in range(200)]
    records = {
        "instructions.jsonl": [
            {"instruction": question, "input": "", "output": f"{n + 1} follows {n}."}
            for n, question in enumerate(questions)
        ],
        "questions.jsonl": [
            {"instruction": question, "input": "", "output": str(n + 1)} for n, question in enumerate(questions)
        ],
        "sums.jsonl": [{"question": f"{n} + 2?", "options": [str(n + 2), str(n + 3)], "answer": 0} for n in range(8)],
        "prompts.jsonl": [{"prompt": "Once"}, {"prompt": "import "}],
    }
    for name, items in records.items():
        (folder / name).write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    pairs = [
        {"prompt": question, "chosen": f"{n + 1} follows {n}.", "rejected": f"{n} follows {n + 1}."}
        for n, question in enumerate(questions)
    ]
    (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")


def write_named(block: Block, folder: Path) -> bool:
    """Write a block that names its file; False if it names none."""
    named = NAMED.match(block.text)
    if named is None:
        return False
    path = folder / named["name"]
    text = block.text
    if named["base"]:
        base = yaml.safe_load((folder / named["base"]).read_text(encoding="utf-8"))
        text = yaml.safe_dump(base | yaml.safe_load(text), sort_keys=False)
    path.write_text(text, encoding="utf-8")
    if path.suffix == ".yaml" and "model" in yaml.safe_load(text):
        load_recipe(path)
    return True


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def as_run(block: Block, port: int) -> str:
    """Return the block's text with its substitutions."""
    text = block.text.replace("\\\n", " ")
    for pattern, replacement in SUBSTITUTIONS.items():
        text = re.sub(pattern, replacement, text, flags=re.M)
    return text.replace("PORT", str(port))


def run_block(command: list[str], block: Block, folder: Path, environment: dict[str, str]) -> None:
    """Run a block, with a line for `chat` on its standard input; on failure, show its output."""
    done = subprocess.run(
        command, cwd=folder, env=environment, input="Hello\n/quit\n", capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (
        f"{block.place} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )


def await_server(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(240):
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server did not start within two minutes")


def test_every_topic_is_run() -> None:
    assert {name for name in PAGES if "topics" in name} == {
        f"docs/topics/{path.name}" for path in (ROOT / "docs" / "topics").glob("*.md")
    }


def test_the_guide_is_short() -> None:
    assert (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").count("\n") <= 350


def test_blocks_that_are_not_run_say_why() -> None:
    for block in blocks():
        assert block.language in ("bash", "yaml", "python", "json", "text"), block.place
        assert block.reason is None or block.language == "bash", block.place
        assert block.language != "yaml" or NAMED.match(block.text), f"{block.place} does not name its file"


@pytest.mark.guide
@pytest.mark.timeout(3600)  # on a busy machine; each block has its own limit
def test_the_guide_runs_in_an_empty_folder(tmp_path: Path) -> None:
    write_data(tmp_path)
    port = free_port()
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs}
    server: subprocess.Popen[bytes] | None = None
    try:
        for block in blocks():
            if block.reason or block.language in ("json", "text") or write_named(block, tmp_path):
                continue
            started = time.perf_counter()
            text = as_run(block, port)
            if text.startswith("gptworks serve"):
                server = subprocess.Popen(["bash", "-c", f"exec {text}"], cwd=tmp_path, env=environment)
                await_server(server, port)
            else:
                command = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
                run_block([*command, text], block, tmp_path, environment)
            print(f"{time.perf_counter() - started:6.1f} s  {block.place}")
            if server is not None and block.language == "python":
                server.send_signal(signal.SIGTERM)
                assert server.wait(60) == 0, "the server ended with an error"
                server = None
    finally:
        if server is not None:
            server.kill()
            server.wait()
