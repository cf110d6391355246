import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from gptworks.data.shard_writer import ShardWriter, write_manifest
from gptworks.data.shards import FORMAT_VERSION, Dtype, Manifest, TokenShards, dtype_for
from gptworks.errors import UserError
from gptworks.files import sealed_json, sha256_file

DOCUMENTS = [np.arange(start, start + length) for start, length in ((0, 7), (100, 3), (200, 25), (300, 1), (400, 14))]
TOKENS = np.concatenate(DOCUMENTS)


def write(folder: Path, shard_tokens: int = 10, dtype: Dtype = "uint16", shift: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    writers = {split: ShardWriter(folder, split, dtype, shard_tokens) for split in ("train", "validation")}
    for document in DOCUMENTS:
        writers["train"].add(document + shift, 2 * len(document), starts_document=True, unknown_tokens=1)
    writers["validation"].add(np.array([5, 6]), 2, starts_document=True)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        created_by="test",
        dtype=dtype,
        vocab_size=shift + 414,
        tokenizer_sha256="",
        made_from={},
        round_trips=True,
        splits={split: writer.finish() for split, writer in writers.items()},
    )
    write_manifest(manifest, folder)
    return folder


@pytest.mark.parametrize("shard_tokens", [1, 10, 1000])
@pytest.mark.parametrize(("dtype", "shift"), [("uint16", 60_000), ("uint32", 4_000_000_000)])
def test_written_tokens_are_read_across_any_shards(tmp_path: Path, shard_tokens: int, dtype: Dtype, shift: int) -> None:
    shards = TokenShards(write(tmp_path, shard_tokens, dtype, shift), "train")
    assert (shards.n_tokens, shards.n_documents, shards.text_bytes) == (50, 5, 100)
    for start in range(51):
        for length in range(51 - start):
            assert shards.read(start, length).tolist() == (TOKENS[start : start + length] + shift).tolist()
    assert shards.read(0, 1).dtype == np.int64
    assert shards.document_starts().tolist() == [0, 7, 10, 35, 36]


def test_a_document_continues_in_the_next_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", "uint16", shard_tokens=4)
    for index in range(3):
        writer.add(np.arange(4), 4, starts_document=index == 0)
    files = writer.finish()
    assert [shard.documents for shard in files.shards] == [1, 0, 0]
    assert (files.documents, files.tokens) == (1, 12)


def test_files_are_flat_little_endian(tmp_path: Path) -> None:
    write(tmp_path, shard_tokens=1000)
    assert (tmp_path / "train-00000.tokens").read_bytes() == TOKENS.astype("<u2").tobytes()
    assert (tmp_path / "train-00000.offsets").read_bytes() == np.array([0, 7, 10, 35, 36], dtype="<u8").tobytes()
    assert json.loads((tmp_path / "manifest.json").read_text())["splits"]["train"]["unknown_tokens"] == 5


def test_dtype_is_the_narrowest_that_holds_the_vocabulary() -> None:
    assert [dtype_for(size) for size in (256, 50_257, 65_536, 65_537, 128_256)] == ["uint16"] * 3 + ["uint32"] * 2


def test_reading_outside_the_split_is_an_error(tmp_path: Path) -> None:
    shards = TokenShards(write(tmp_path), "train")
    for start, length in ((-1, 2), (49, 2), (51, 0), (0, 51)):
        with pytest.raises(IndexError):
            shards.read(start, length)


@pytest.mark.parametrize("name", ["train-00001.tokens", "train-00001.offsets"])
def test_missing_truncated_and_corrupt_files_are_named(tmp_path: Path, name: str) -> None:
    good = write(tmp_path / "good")
    folder = tmp_path / "bad"
    fix = f"Delete {folder} and run `gptworks data build` again"

    shutil.copytree(good, folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing\. {fix}"):
        TokenShards(folder, "train")

    content = (good / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"{name} has {len(content) - 1} bytes and the manifest states {len(content)}"):
        TokenShards(folder, "train")

    (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    TokenShards(folder, "train", verify=False)  # for who reads no tokens
    with pytest.raises(UserError, match=rf"{name} is corrupt.*{fix}"):
        TokenShards(folder, "train")


def test_a_file_that_changes_after_it_was_verified_is_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, hashed = write(tmp_path, shard_tokens=1000), []
    real = sha256_file
    monkeypatch.setattr("gptworks.data.shards.sha256_file", lambda file, **_: hashed.append(file.name) or real(file))
    for _ in range(3):
        TokenShards(folder, "train")
    assert hashed == ["train-00000.tokens", "train-00000.offsets"], "each once"
    file = folder / "train-00000.tokens"
    content = bytearray(file.read_bytes())
    content[9] ^= 4
    file.write_bytes(content)
    os.utime(file, ns=(0, 0))
    with pytest.raises(UserError, match=r"train-00000\.tokens is corrupt"):
        TokenShards(folder, "train")


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """The checksums are right, since whoever wrote the ids wrote them too."""
    folder = write(tmp_path)
    tree = json.loads((folder / "manifest.json").read_text()) | {"vocab_size": 413}
    del tree["sha256"]
    (folder / "manifest.json").write_text(sealed_json(tree))
    with pytest.raises(UserError, match="holds the token 413 and the vocabulary of its manifest has 413"):
        TokenShards(folder, "train")


def test_a_missing_broken_or_newer_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prepared text"):
        TokenShards(tmp_path / "none", "train")
    file = write(tmp_path) / "manifest.json"
    whole = file.read_text()
    for broken in (whole[: len(whole) // 2], "[]", whole.replace('"dtype": "uint16"', '"dtype": "int8"')):
        file.write_text(broken)
        with pytest.raises(UserError, match=r"manifest\.json is broken"):
            TokenShards(tmp_path, "train")
    file.write_text(whole.replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99'))
    with pytest.raises(UserError, match=f"has format 99 and this gptworks reads {FORMAT_VERSION}"):
        TokenShards(tmp_path, "train")
