"""A file of prompts: each one is continued exactly once, even if the work is interrupted."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gptworks.errors import UserError
from gptworks.infer import Engine, SamplingSettings
from gptworks.infer.batch import generate_file
from test_engine import char_tokenizer, random_model

SETTINGS = SamplingSettings(seed=1, max_tokens=8)


def engine() -> Engine:
    tokenizer = char_tokenizer()
    return Engine(random_model(tokenizer, init_std=0.2).double().eval(), tokenizer, backend="torch", n_slots=4)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> dict[Any, Any]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


PROMPTS = [{"id": f"p{i}", "prompt": "abcdefghij"[i % 10 :: 2], "extra": i} for i in range(30)]


def test_each_prompt_receives_the_text_of_a_separate_call(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *PROMPTS)
    report = generate_file(engine(), source, tmp_path / "out.jsonl", SETTINGS, n_samples=2)
    lines = read(tmp_path / "out.jsonl")
    assert (report.total, report.done, report.skipped, report.failed) == (30, 30, 0, 0)
    for prompt in PROMPTS:
        expected = engine().complete(prompt["prompt"], SETTINGS, n_samples=2)
        assert lines[prompt["id"]]["completions"] == [
            {"text": one.text, "finish_reason": one.finish_reason, "tokens": len(one.token_ids)} for one in expected
        ]
        assert lines[prompt["id"]]["prompt_tokens"] == expected[0].prompt_tokens
    assert report.generated_tokens == sum(c["tokens"] for line in lines.values() for c in line["completions"])


@pytest.mark.parametrize("cut_bytes", [0, 1, 30])
def test_interrupted_work_continues(tmp_path: Path, cut_bytes: int) -> None:
    """The work stops after ten prompts, and a crash truncates the last line: the final file is as without
    interruption."""
    source, target, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    write(source, *PROMPTS)

    def stop(report: Any) -> None:
        if report.done == 10:
            raise KeyboardInterrupt

    one = engine()
    with pytest.raises(KeyboardInterrupt):
        generate_file(one, source, target, SETTINGS, report=stop)
    assert one.statistics().slots_used == 0
    if cut_bytes:
        target.write_bytes(target.read_bytes()[:-cut_bytes])
    report = generate_file(engine(), source, target, SETTINGS)
    assert (report.skipped, report.done) == (10 - bool(cut_bytes), 20 + bool(cut_bytes))
    generate_file(engine(), source, whole, SETTINGS)
    assert read(target) == read(whole)
    again = generate_file(engine(), source, target, SETTINGS)
    assert (again.skipped, again.done) == (30, 0)


def test_a_line_has_its_own_settings_and_its_number_as_id(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "abc", "settings": {"max_tokens": 3}}, {"prompt": "abc"})
    generate_file(engine(), source, tmp_path / "out.jsonl", SamplingSettings(seed=1, max_tokens=5, ignore_eos=True))
    lines = read(tmp_path / "out.jsonl")
    assert [lines[i]["completions"][0]["tokens"] for i in (1, 2)] == [3, 5]


def test_a_line_may_add_to_the_ends_of_answers_or_go_past_them(tmp_path: Path) -> None:
    end = 5
    lines: list[dict[str, Any]] = [{}, {"stop_token_ids": [1]}, {"ignore_eos": True}]
    source = write(tmp_path / "in.jsonl", *({"prompt": "abc", "settings": line} for line in lines))
    settings = SamplingSettings(max_tokens=4, logit_bias={end: 1000})
    generate_file(engine(), source, tmp_path / "out.jsonl", settings, ends=(end,))
    found = [line["completions"][0]["finish_reason"] for line in read(tmp_path / "out.jsonl").values()]
    assert found == ["stop", "stop", "length"]


def test_a_prompt_that_cannot_be_continued_says_so_in_its_line(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "abc" * 20}, {"prompt": "abc"})
    report = generate_file(engine(), source, tmp_path / "out.jsonl", SETTINGS)
    assert (report.done, report.failed) == (1, 1)
    assert "60 tokens" in read(tmp_path / "out.jsonl")[1]["error"] and "60 tokens" in report.errors[0]


def test_prompts_that_failed_are_tried_again_and_those_that_finished_are_kept(tmp_path: Path) -> None:
    prompts = [{"id": i, "prompt": "abc" * (20 if i % 3 == 1 else 1)} for i in range(6)]
    source, kept = write(tmp_path / "in.jsonl", *prompts), tmp_path / "kept.jsonl"
    target = tmp_path / "out.jsonl"
    target.symlink_to(kept)
    generate_file(engine(), source, target, SETTINGS)
    first = read(kept)
    again = generate_file(engine(), source, target, SETTINGS)
    assert (again.total, again.skipped, again.done, again.failed) == (6, 4, 0, 2)
    assert read(kept) == first, "an error that is raised again is written again"

    write(source, *({"id": i, "prompt": "abc"} for i in range(5)))  # shortened, and the last one, id 5, left out
    kept.write_bytes(kept.read_bytes() + json.dumps({"id": 9, "error": "of another input"}).encode() + b'\n{"id": 4, ')
    mended = generate_file(engine(), source, target, SETTINGS)
    lines = read(kept)
    assert (mended.total, mended.skipped, mended.done, mended.failed) == (5, 3, 2, 0)
    assert [name for name, line in lines.items() if "error" in line] == [9]
    assert [lines[i] for i in (0, 2, 3, 5)] == [first[i] for i in (0, 2, 3, 5)]
    assert lines[1]["completions"] and lines[4]["completions"] and target.is_symlink()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{", "line 1: not JSON"), ('{"text": "a"}', "line 1: it must be an object"), ("[1]", "line 1"),
        ('{"prompt": "a"}\n{"prompt": "b", "id": 1}', "two prompts have the id 1"),
        ('{"prompt": "a", "settings": {"temprature": 1}}', "line 1: .*did you mean `temperature`"),
        ('{"prompt": "a", "settings": 3}', "settings=3"), ('{"prompt": "a", "id": 1.5}', "id=1.5"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_prompts_is_refused_before_work(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        generate_file(engine(), tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "text", ["my notes\nof today", "my notes", '{"prompt": "abc"}', '{"id": 1, "prompt": "abc"}\n']
)
def test_a_file_that_is_not_an_output_is_not_changed(tmp_path: Path, text: str) -> None:
    source, target = write(tmp_path / "in.jsonl", {"prompt": "abc"}), tmp_path / "notes.txt"
    target.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="not an output"):
        generate_file(engine(), source, target)
    assert target.read_text(encoding="utf-8") == text


def test_prompts_from_a_pipe_are_read_once_and_all_answered(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "\ufeff" + "".join(json.dumps(line) + "\n" for line in PROMPTS[:3])  # some editors write such a mark
    writer = threading.Thread(target=pipe.write_text, args=(text,), kwargs={"encoding": "utf-8"}, daemon=True)
    writer.start()
    report = generate_file(engine(), pipe, tmp_path / "out.jsonl", SETTINGS)
    assert (report.total, report.done, report.failed) == (3, 3, 0)
    assert read(tmp_path / "out.jsonl").keys() == {"p0", "p1", "p2"}


def test_ids_are_compared_with_a_set(tmp_path: Path) -> None:
    """Among a hundred thousand ids, the two equal ones at the end are found fast; a quadratic search would not end."""
    source = tmp_path / "in.jsonl"
    ids = [*range(100_000), 99_999]
    source.write_text("".join(f'{{"id": {i}, "prompt": "a"}}\n' for i in ids))
    with pytest.raises(UserError, match="two prompts have the id 99999"):
        generate_file(engine(), source, tmp_path / "out.jsonl", SETTINGS)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"in\.jsonl, line 2: not UTF-8"):
        generate_file(engine(), tmp_path / "in.jsonl", tmp_path / "out.jsonl", SETTINGS)
