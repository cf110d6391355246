"""Measure building a dataset, from text to shards, compared with nanochat's and litGPT's ways: `python bench/data.py`.

The text is the same in each call. Half of it is real (the standard library and the documentation of installed
packages, repeated with some words changed), half is random but like the web's (words by Zipf's law, long words, links,
numbers, quotes and CJK). Half of the files are JSONL, half Parquet. The tokenizer, BPE of 16,384 tokens with Llama 3's
pattern, is trained beforehand on the first 10 MB. Each way runs as its own process tree:

    gptworks       gptworks data build, with checks, hashes, a validation split and finished shards
    nanochat's     encodes batches of 128 documents with tiktoken, and cuts the ids into tensors of 32 × 2,048
    litGPT's       encodes each worker's files with `tokenizers`, a document at a time, and appends tensors to chunks;
                   `litdata.optimize`, which does the same, is measured too if it is installed

The others read only the first `--peer-megabytes`. MB/s are UTF-8 text per wall time, and per CPU time of all processes,
which depends less on other programs. Memory is the peak of all processes together, measured every second; shared pages
count once.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from gptworks.config import BPETokenizer
from gptworks.device import device_name
from gptworks.tokenizer import BPE_PATTERNS, BYTE_CHARACTERS, load_tokenizer, save_tokenizer, train_tokenizer

FILE_BYTES, TOKENIZER_BYTES, VOCABULARY = 32_000_000, 10_000_000, 16_384
ROWS, CONTEXT = 32, 2048  # the shape of nanochat's batches
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
SECONDS_BETWEEN_LOOKS = 1.0  # measuring memory takes 14 ms of a core


# ------------------------------------------------------------------------------------------------------- the text


def real_texts() -> list[bytes]:
    """Return the sources of the standard library and the documentation of installed packages."""
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    sources = (file for file in library.rglob("*.py") if not {"site-packages", "test"} & set(file.parts))
    files = chain(sources, packages.rglob("*.md"), packages.rglob("*.rst"), packages.rglob("METADATA"))
    found = []
    for file in sorted(files):
        data = file.read_bytes()
        if 500 < len(data) < 300_000 and b"\0" not in data:
            try:
                data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            found.append(data)
    return found


def real_documents() -> Iterator[str]:
    """Yield the `real_texts` again and again; in each copy after the first, every fourth word is changed."""
    texts = real_texts()
    yield from (text.decode("utf-8") for text in texts)
    for seed in range(1 << 30):
        letters = list(LETTERS)
        random.Random(seed).shuffle(letters)
        change = bytes.maketrans(LETTERS, bytes(letters))
        for text in texts:
            words = text.split(b" ")
            words[seed % 4 :: 4] = b" ".join(words[seed % 4 :: 4]).translate(change).split(b" ")
            yield b" ".join(words).decode("utf-8")


def web_documents() -> Iterator[str]:
    """Yield random documents of about 2 KB, without end."""
    draw = np.random.default_rng(0)
    parts = re.findall("..?.?", "kaloterminstringpreconversationalesquonbraphtheoughneyanunnessablely")
    words = np.array(
        ["".join(parts[part] for part in draw.integers(len(parts), size=draw.integers(1, 6))) for _ in range(300_000)],
        dtype=object,
    )
    words[::29] += ","
    words[7::31] += "."
    words[11::97] = [word.capitalize() + "’s" for word in words[11::97]]
    words[13::501] = ["".join(map(chr, draw.integers(0x4E00, 0x5200, size=12))) + "。" for _ in words[13::501]]
    for at in range(17, len(words), 401):
        words[at] = f"https://www.{words[at]}.org/{draw.integers(1 << 62):x}?id={draw.integers(10**6)}"
    words[19::211] = [str(number) for number in draw.integers(10**9, size=len(words[19::211]))]
    odds = 1 / (np.arange(len(words)) + 3.0)
    steps = np.cumsum(odds / odds.sum())
    while True:
        chosen = words[np.searchsorted(steps, draw.random(300 * 1000))]
        for start in range(0, len(chosen), 300):
            yield " ".join(chosen[start : start + 300])


def write_texts(folder: Path, megabytes: int) -> None:
    """Write JSONL and Parquet files alternately, a tokenizer, and `texts.json`: each file's path and bytes of text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = [real_documents(), web_documents()]
    files: list[tuple[str, int]] = []
    tokenizer_texts: list[str] = []
    while sum(size for _, size in files) < megabytes * 1_000_000:
        documents, size = [], 0
        while size < min(FILE_BYTES, megabytes * 500_000):
            for kind in kinds:
                mine = 0
                while mine < 100_000:
                    documents.append(next(kind))
                    mine += len(documents[-1].encode("utf-8"))
                size += mine
        if not files:
            taken = 0
            for document in documents:
                tokenizer_texts.append(document)
                if (taken := taken + len(document)) > TOKENIZER_BYTES:
                    break
        ending = ("jsonl", "parquet")[len(files) % 2]
        file = folder / ending / f"{len(files):04d}.{ending}"
        file.parent.mkdir(exist_ok=True)
        if ending == "jsonl":
            with file.open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        else:
            pq.write_table(pa.table({"text": documents}), file, row_group_size=1000, compression="zstd")
        files.append((str(file), size))
    (folder / "texts.json").write_text(json.dumps(files))
    config = BPETokenizer(type="bpe", vocab_size=VOCABULARY, pattern="llama3")
    save_tokenizer(train_tokenizer(config, tokenizer_texts), folder / "tokenizer")


def read_file(file: str) -> Iterator[str]:
    """Yield a file's documents."""
    if file.endswith(".jsonl"):
        with open(file, encoding="utf-8") as stream:  # noqa: PTH123
            yield from (json.loads(line)["text"] for line in stream)
    else:
        import pyarrow.parquet as pq

        table = pq.ParquetFile(file)
        for group in range(table.num_row_groups):
            yield from table.read_row_group(group, columns=["text"]).column("text").to_pylist()


# ------------------------------------------------------------------------------------------------------- the ways


def gptworks(folder: Path, processes: int) -> list[str]:
    """Write the recipe, and return the `gptworks` command that builds its dataset."""
    sources = [{"type": kind, "path": str(folder / kind)} for kind in ("jsonl", "parquet") if (folder / kind).exists()]
    recipe = {
        "model": {"context_length": 256, "n_layers": 1, "d_model": 64, "n_heads": 1},
        "train": {"max_steps": 1},
        "tokenizer": {"type": "file", "path": str(folder / "tokenizer")},
        "data": {"sources": sources, "cache_dir": str(folder / f"built-{processes}"), "processes": processes},
    }
    file = folder / f"build-{processes}.yaml"
    file.write_text(json.dumps(recipe))
    return [sys.executable, "-m", "gptworks", "data", "build", str(file)]


def nanochats(folder: Path, files: list[str], processes: int) -> None:
    import tiktoken

    model = json.loads((folder / "tokenizer" / "tokenizer.json").read_text("utf-8"))["model"]
    names = [*BYTE_CHARACTERS, *("".join(pair) for pair in model["merges"])]
    byte_of = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    ranks = {bytes(map(byte_of.__getitem__, name)): rank for rank, name in enumerate(names)}
    begin = len(ranks)
    encoding = tiktoken.Encoding(
        "bench", pat_str=BPE_PATTERNS["llama3"], mergeable_ranks=ranks, special_tokens={"<|bos|>": begin}
    )
    buffer: deque[int] = deque()
    documents = chain.from_iterable(map(read_file, files))
    while batch := list(islice(documents, 128)):
        for ids in encoding.encode_ordinary_batch(batch, num_threads=processes):
            buffer.append(begin)
            buffer.extend(ids)
        while len(buffer) > ROWS * CONTEXT:
            tokens = torch.tensor([buffer.popleft() for _ in range(ROWS * CONTEXT)] + [buffer[0]])
            tokens[:-1].view(ROWS, CONTEXT), tokens[1:].view(ROWS, CONTEXT)


def _documents_as_tensors(tokenizer: Tokenizer, file: str) -> Iterator[torch.Tensor]:
    for text in read_file(file):
        yield torch.tensor(tokenizer.encode(text).ids, dtype=torch.int)


def _write_chunks(folder: Path, file: str) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer")
    with (folder / "chunks" / f"{Path(file).name}.bin").open("wb") as chunk:
        for tensor in _documents_as_tensors(tokenizer, file):
            chunk.write(tensor.numpy().tobytes())


def litgpts(folder: Path, files: list[str], processes: int) -> None:
    (folder / "chunks").mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(partial(_write_chunks, folder), files, chunksize=1)


def _for_litdata(file: str, folder: Path) -> Iterator[torch.Tensor]:
    yield from _documents_as_tensors(load_tokenizer(folder / "tokenizer"), file)


def litdatas(folder: Path, files: list[str], processes: int) -> None:
    from litdata import optimize
    from litdata.streaming.item_loader import TokensLoader

    with tempfile.TemporaryDirectory(dir=folder) as out:
        optimize(
            partial(_for_litdata, folder=folder), files, out, num_workers=processes, chunk_bytes="64MB",
            item_loader=TokensLoader(block_size=CONTEXT), start_method="spawn",
        )  # fmt: skip


WAYS = {"nanochat's": nanochats, "litGPT's": litgpts, "litdata": litdatas}


# ------------------------------------------------------------------------------------------------------ measuring


def measure(command: list[str]) -> tuple[float, float, int]:
    """Run a command; return its wall time, and the CPU time and the peak memory in bytes of all its processes."""
    started, peak, ended = time.perf_counter(), 0, threading.Event()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )

    def watch() -> None:
        nonlocal peak
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            peak = max(peak, held_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return seconds, usage.ru_utime + usage.ru_stime, peak


def held_bytes(process_id: int) -> int:
    """Return the memory of a process and its descendants; a page that several processes share is counted once
    (Linux)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(entry.name))
    total, left = 0, [process_id]
    while left:
        one = left.pop()
        left += parents.get(one, [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except OSError:
            continue
    return total


def run(way: str, folder: Path, processes: int, megabytes: int) -> dict[str, Any]:
    files = json.loads((folder / "texts.json").read_text())
    text_bytes = sum(size for _, size in files)
    if way != "gptworks":
        n = next((i for i in range(len(files)) if sum(size for _, size in files[:i]) >= megabytes * 1e6), len(files))
        text_bytes = sum(size for _, size in files[:n])
        arguments = json.dumps([name for name, _ in files[:n]])
    else:
        arguments = json.dumps([name for name, _ in files])
    if way == "gptworks":
        seconds, cpu_seconds, peak_bytes = measure(gptworks(folder, processes))
        shutil.rmtree(folder / f"built-{processes}")
    else:
        command = [sys.executable, __file__, "--way", way, "--folder", str(folder), "--processes", str(processes)]
        seconds, cpu_seconds, peak_bytes = measure([*command, "--files", arguments])
    return {"way": way, "processes": processes, "text_bytes": text_bytes, "seconds": seconds,
            "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000, help="of text")
    parser.add_argument("--peer-megabytes", type=int, default=100, help="of it, for the other ways")
    parser.add_argument("--folder", type=Path, help="for text and shards, kept; default: a temporary one")
    for name in ("way", "files"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1, help="of gptworks, in turns; the median counts")
    options = parser.parse_args()
    if options.way:
        WAYS[options.way](options.folder, json.loads(options.files), options.processes[0])
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        if not (folder / "tokenizer").exists():
            write_texts(folder, options.megabytes)
        ways = ["gptworks", *WAYS]
        ways = [way for way in ways if way != "litdata" or importlib.util.find_spec("litdata")]
        print(f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores")
        print(f"{'way':<12}{'processes':>10}{'MB':>8}{'MB/s':>9}{'MB/CPU s':>10}{'memory':>11}{'scaling':>9}")
        for way in ways:
            first, rounds = 0.0, options.rounds if way == "gptworks" else 1
            found_by = [
                [run(way, folder, processes, options.peer_megabytes) for processes in options.processes]
                for _ in range(rounds)
            ]
            for number, processes in enumerate(options.processes):
                found = sorted((one[number] for one in found_by), key=lambda one: one["seconds"])[rounds // 2]
                megabytes = found["text_bytes"] / 1e6
                first = first or found["seconds"]
                print(
                    f"{way:<12}{processes:>10}{megabytes:>8.0f}{megabytes / found['seconds']:>9.1f}"
                    f"{megabytes / found['cpu_seconds']:>10.1f}{found['peak_bytes'] / 2**20:>7.0f} MiB"
                    f"{first / found['seconds']:>8.2f}×",
                    flush=True,
                )


if __name__ == "__main__":
    main()
