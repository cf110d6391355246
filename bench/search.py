"""Measure searching tokens: time and size of the index, and the time of a search compared with two scans.

    python bench/search.py --gigabytes 1 --folder /tmp/search-bench

The text is made of random real lines of Python's standard library and of every installed package, 60 per document. A
tokenizer of 4,096 tokens, trained on a tenth of these lines, encodes them until the tokens (two bytes each) reach
--gigabytes. Phrases are 1 to 64 characters from random positions, some short common words, and some that may not occur.
Each is searched for twice in the index. Every `--scanned`-th phrase is also searched for by two linear scans: through
the decoded text in memory (a search in C, as in `grep -F`), and through the tokens, decoded chunk by chunk. The counts
must agree.
"""

import argparse
import random
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gptworks.config import BPETokenizer
from gptworks.data.opened import Prepared, open_prepared
from gptworks.data.search import SearchIndex
from gptworks.data.shard_writer import ShardWriter, write_manifest
from gptworks.data.shards import FORMAT_VERSION, Manifest, TokenShards
from gptworks.files import sha256_file
from gptworks.machine import cpu_name
from gptworks.tokenizer import encodings, fingerprint, save_tokenizer, train_tokenizer, vocabulary_size

SHARD_TOKENS, LINES, PIECE = 100_000_000, 60, 1 << 20


def lines_of_packages(most_bytes: int) -> list[str]:
    """Return distinct lines of installed Python files, each below 500 characters, about `most_bytes` in all."""
    lines: dict[str, None] = {}
    size = 0
    for name in ("stdlib", "purelib"):
        for file in sorted(Path(sysconfig.get_path(name)).rglob("*.py")):
            for line in file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True):
                if line not in lines and len(line) < 500:
                    lines[line] = None
                    size += len(line)
            if size > most_bytes:
                return list(lines)
    return list(lines)


def make(folder: Path, tokens: int) -> Prepared:
    """Return the dataset, built now or by an earlier call."""
    if (folder / "manifest.json").exists():
        return open_prepared(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = lines_of_packages(20_000_000)
    tokenizer = train_tokenizer(BPETokenizer(type="bpe", vocab_size=4096), lines[::10])
    save_tokenizer(tokenizer, folder / "tokenizer")
    encoded = [np.array(one.ids, dtype=np.uint16) for one in encodings(tokenizer, lines)]
    sizes = np.array([len(line.encode()) for line in lines])
    separator, drawn = np.array([tokenizer.token_to_id("<|endoftext|>")], dtype=np.uint16), np.random.default_rng(0)
    splits = {}
    for split, n in (("train", tokens), ("validation", 10_000)):
        writer, done = ShardWriter(folder, split, "uint16", SHARD_TOKENS), 0
        while done < n:
            chosen = drawn.integers(0, len(lines), LINES)
            ids = np.concatenate([separator, *(encoded[i] for i in chosen.tolist())])
            writer.add(ids, int(sizes[chosen].sum()), starts_document=True)
            done += len(ids)
        splits[split] = writer.finish()
    files = {path.name: sha256_file(path) for path in sorted((folder / "tokenizer").iterdir())}
    write_manifest(Manifest(
        format_version=FORMAT_VERSION, created_by="bench/search.py", dtype="uint16",
        vocab_size=vocabulary_size(tokenizer), tokenizer_sha256=fingerprint(tokenizer), tokenizer_files=files,
        made_from={"chat_template": None}, round_trips=True, splits=splits,
    ), folder)  # fmt: skip
    return open_prepared(folder)


def phrases_of(shards: TokenShards, prepared: Prepared, n: int) -> list[str]:
    """Return phrases of the text, of all lengths, and others that may not occur in it."""
    drawn = random.Random(0)
    found = ["e", " ", "\n", "s ", "e t", "self", "import", "return None", "=", "not here: " + "z" * 40, "é", "()\n"]
    known = set(found)
    while len(found) < n:
        ids = shards.read(drawn.randrange(shards.n_tokens - 40), 40).tolist()
        text, size = prepared.tokenizer.decode(ids), drawn.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
        at = drawn.randrange(max(1, len(text) - size))
        phrase = text[at : at + size].replace("\N{REPLACEMENT CHARACTER}", "")
        if phrase and phrase not in known:
            known.add(phrase)
            found.append(phrase)
    return found[:n]


def count(text: bytes, phrase: bytes) -> int:
    """Count the occurrences in a text, including overlapping ones."""
    n, at = 0, text.find(phrase)
    while at >= 0:
        n, at = n + 1, text.find(phrase, at + 1)
    return n


def texts(shards: TokenShards, index: SearchIndex) -> Iterator[bytes]:
    """Yield the decoded text of the tokens, chunk by chunk."""
    for at in range(0, shards.n_tokens, PIECE):
        yield index.spelling.spell(shards.read(at, min(PIECE, shards.n_tokens - at)).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.02, help="of tokens")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--phrases", type=int, default=200)
    parser.add_argument("--scanned", type=int, default=1, help="one phrase in so many is also scanned for")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    prepared = make(arguments.folder, int(arguments.gigabytes * 5e8))
    shards, index = TokenShards(prepared.folder, "train"), SearchIndex(prepared)
    n_bytes = shards.text_bytes
    print(f"{cpu_name()}: {shards.n_tokens:,} tokens, {n_bytes:,} bytes of text")
    if index.missing:
        started, used = time.perf_counter(), time.process_time()
        index.build(arguments.threads)
        seconds, cpu = time.perf_counter() - started, time.process_time() - used
        print(f"index: {seconds:.1f} s, {cpu:.1f} CPU s, {n_bytes / 1e6 / cpu:.1f} MB of text a CPU second")
    size = sum(file.stat().st_size for file in index.folder.glob("*.index"))
    print(f"index: {size:,} bytes, {size / n_bytes:.2f} a byte of text, {size / shards.n_tokens:.1f} a token")
    phrases = phrases_of(shards, prepared, arguments.phrases)
    index = SearchIndex(prepared)
    found, cold, warm = {}, [], []
    for times in (cold, warm):
        for phrase in phrases:
            started = time.perf_counter()
            found[phrase] = index.find(phrase).n
            times.append(1000 * (time.perf_counter() - started))
    for name, times in (("first", cold), ("warm", warm)):
        at = max(range(len(times)), key=times.__getitem__)
        print(f"search, {name}: median {statistics.median(times):.2f} ms, most {times[at]:.2f} ms ({phrases[at]!r})")
    scanned = phrases[:: arguments.scanned]
    totals, seconds, decoding = dict.fromkeys(scanned, 0), 0.0, 0.0
    longest = max(len(phrase.encode()) for phrase in scanned)
    tail, pieces = b"", texts(shards, index)
    while True:
        started = time.perf_counter()
        piece = next(pieces, None)
        decoding += time.perf_counter() - started
        if piece is None:
            break
        started = time.perf_counter()
        for phrase in scanned:
            wanted = phrase.encode()
            kept = tail[len(tail) - len(wanted) + 1 :] if len(wanted) > 1 else b""
            totals[phrase] += count(kept + piece, wanted)
        seconds += time.perf_counter() - started
        tail = (tail + piece)[-longest:]
    wrong = [phrase for phrase in scanned if totals[phrase] != found[phrase]]
    each = seconds / len(scanned)
    print(
        f"scan of the text in memory: {1000 * each:.0f} ms a phrase; of the tokens: {1000 * (each + decoding):.0f} ms"
    )
    print(f"{len(scanned)} phrases scanned, {len(wrong)} differ{': ' + repr(wrong[:5]) if wrong else ''}")


if __name__ == "__main__":
    main()
