"""Tasks from JSONL files: their questions, the judging of answers, and the sandbox for programs."""

import copy
import functools
import json
import math
import operator
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import hf
from gptworks.chat_template import BUILT_IN, ChatTemplate
from gptworks.confined import Confined, expressions, jail
from gptworks.confined.sandbox import Sandbox
from gptworks.errors import UserError
from gptworks.evaluation.metrics import figure_of, interval, means, paired_difference, pass_at_k, text_statistics
from gptworks.evaluation.results import (
    HEADING,
    Evaluation,
    Measured,
    read_evaluations,
    save_evaluations,
    write_card_section,
)
from gptworks.evaluation.run_task import Asked, run_task
from gptworks.evaluation.scoring import encode_pair, score_pairs
from gptworks.evaluation.task import MultipleChoice, Task, load_task
from gptworks.infer.engine import Engine
from gptworks.runs.compare_evaluations import compare_evaluations, evaluations_section
from gptworks.tokenizer import encode_text
from tiny import plain_model

ITEMS = [
    {"question": f"{a} + {b}?", "options": [str(a + b), str(a - b), "many"], "answer": 0, "sum": str(a + b)}
    for a, b in ((3, 1), (5, 2), (9, 4), (8, 8), (7, 6), (1, 0))
]
CHOICE = {
    "type": "multiple_choice", "data": "items.jsonl", "prompt": "Q: {{question}}\nA:", "choices": "options", "shots": 2
}  # fmt: skip

PAIRS = {
    "type": "multiple_choice", "data": "items.jsonl", "prompt": "", "delimiter": "",
    "choices": ["{{sentence_good}}", "{{sentence_bad}}"], "answer": "sentence_good",
}  # fmt: skip


def write(folder: Path, settings: dict[str, Any], items: list[dict[str, Any]] | None = None) -> Path:
    lines = "\n".join(map(json.dumps, ITEMS if items is None else items))
    (folder / "items.jsonl").write_text(lines + "\n", encoding="utf-8")
    (folder / "sums.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder / "sums.yaml"


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = plain_model(vocab_size=257, context_length=128, n_layers=2, d_model=32, n_heads=2)
    return Engine(hf.random_model(config), hf.byte_tokenizer("<|endoftext|>"), n_slots=16)


# ------------------------------------------------------------------------------------------------------- scoring


@torch.no_grad()
def test_continuations_are_scored_as_the_model_alone_would(engine: Engine) -> None:
    """With contexts that are shared, that fill the context or exceed it; the last token is one position beyond."""
    chance = random.Random(0)
    pairs = []
    for length in (1, 40, 126, 127, 150):
        context = chance.choices(range(257), k=length)
        pairs += [(context, chance.choices(range(257), k=n)) for n in (1, 2, 2, 5)]
    for (context, continuation), scored in zip(pairs, score_pairs(engine, pairs), strict=True):
        ids = (context + continuation)[-129:]
        rows = engine.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)[-len(continuation) :]
        expected = rows.gather(1, torch.tensor(continuation)[:, None]).sum().item()
        assert scored.logprob == pytest.approx(expected, rel=1e-5)
        assert scored.greedy == (rows.argmax(-1).tolist() == continuation)
        assert scored.n_tokens == len(continuation)


def test_a_context_is_computed_once_for_all_its_continuations(engine: Engine) -> None:
    if type(engine._room.backend).__name__ == "TorchBackend":
        pytest.skip("torch's backend shares whole prefill chunks alone")
    before = engine.statistics().reused_tokens
    contexts = [[i] * 100 for i in range(20)]
    score_pairs(engine, [(context, [7 + n]) for context in contexts for n in range(4)])
    assert engine.statistics().reused_tokens - before > 0.8 * 20 * 3 * 99


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [("ab", " cd", ("ab", " cd")), ("ab  ", "cd", ("ab", "  cd")), ("", "cd", (None, "cd"))],
)
def test_a_border_is_drawn_before_spaces(engine: Engine, context: str, continuation: str, expected: Any) -> None:
    before, after = encode_pair(engine.encode_prompt, context, continuation, partial(encode_text, engine.tokenizer))
    decode = engine.tokenizer.decode
    assert before == [0] if expected[0] is None else decode(before) == expected[0]
    assert decode(after) == expected[1]


def test_a_continuation_that_becomes_part_of_the_contexts_last_token_is_scored_by_itself(engine: Engine) -> None:
    encode = {"Ans": [0, 2], "Answer": [0, 1]}.__getitem__
    assert encode_pair(encode, "Ans", "wer", {"wer": [3]}.__getitem__) == ([0, 2], [3])
    with pytest.raises(UserError, match="item 2 has no tokens of its own"):
        score_pairs(engine, [([1], [2]), ([1], [])])


# --------------------------------------------------------------------------------------------------------- tasks


@torch.no_grad()
def test_a_model_that_knows_nothing_has_half_of_the_minimal_pairs_right(tmp_path: Path) -> None:
    """Its sentences are whole texts: each begins after the token that separates documents."""
    config = plain_model(vocab_size=257, context_length=64, n_layers=1, d_model=32, n_heads=2, tie_embeddings=False)
    model = hf.random_model(config)
    items = [{"sentence_good": f"The {n} sleeps.", "sentence_bad": f"The {n} sleep!."} for n in ("cat", "dog", "child")]
    path = write(tmp_path, PAIRS, items)
    assert {one.value for one in _figures(model, path)} != {0.5}
    assert model.untied_head is not None
    torch.nn.init.zeros_(model.untied_head.weight)
    assert [one.value for one in _figures(model, path)] == [0.5, 0.5, 0.5]


def _figures(model: Any, path: Path) -> list[Measured]:
    engine = Engine(model, hf.byte_tokenizer("<|endoftext|>"), n_slots=4)
    task = load_task(path)
    asked = Asked(engine, task, chat=False)
    (context, sentence), _ = asked.pairs(task.items[0], task.choices(task.items[0]))
    assert context == engine.encode_prompt("") and engine.tokenizer.decode(sentence) == task.items[0]["sentence_good"]
    return list(run_task(engine, task).metrics.values())


@torch.no_grad()
def test_multiple_choice_by_its_definition(engine: Engine, tmp_path: Path) -> None:
    task = load_task(write(tmp_path, CHOICE))
    found = run_task(engine, task)
    hits = {"accuracy": 0.0, "accuracy by token": 0.0, "accuracy by byte": 0.0}
    for item in ITEMS:  # the last one has an option twice
        shots = [one for one in task._pool if one != item][:2]
        shown = "".join(f"Q: {one['question']}\nA: {one['options'][0]}\n\n" for one in shots)
        context = engine.tokenizer.encode(shown + f"Q: {item['question']}\nA:").ids
        scores = []
        for option in item["options"]:
            ids = context + engine.tokenizer.encode(" " + option).ids
            rows = engine.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
            nats = sum(rows[i - 1, ids[i]].item() for i in range(len(context), len(ids)))
            scores.append((nats, nats / (len(ids) - len(context)), nats / len(option)))
        for name, column in zip(hits, zip(*scores, strict=True), strict=True):
            hits[name] += (column[item["answer"]] == max(column)) / column.count(max(column))
    assert {name: measured.value for name, measured in found.metrics.items()} == {
        name: pytest.approx(n / len(ITEMS)) for name, n in hits.items()
    }
    assert found.name == "sums-2-shot" and found.n_items == len(ITEMS)


def test_shots_depend_on_the_seed_alone_and_never_hold_the_item_itself(tmp_path: Path) -> None:
    tasks = [load_task(write(tmp_path, {**CHOICE, "seed": seed})) for seed in (0, 0, 1, 2, 3)]
    for task in tasks:
        for item in ITEMS:
            assert len(task.shots_for(item)) == 2 and item not in task.shots_for(item)
    assert tasks[0].shots_for(ITEMS[0]) == tasks[1].shots_for(ITEMS[0])
    assert any(task.shots_for(ITEMS[0]) != tasks[0].shots_for(ITEMS[0]) for task in tasks[2:])
    assert tasks[0].fingerprint == tasks[1].fingerprint != tasks[2].fingerprint


def test_shots_that_do_not_fit_are_left_out_and_told_of(engine: Engine, tmp_path: Path) -> None:
    long = [{**item, "question": item["question"] * (12 if i == 0 else 5)} for i, item in enumerate(ITEMS)]
    found = run_task(engine, load_task(write(tmp_path, {**CHOICE, "shots": 4}, long)))
    assert "6 of 6 items had fewer than 4 shots" in found.notes[0]
    with pytest.raises(UserError, match=r"item 1 has \d+ tokens without shots"):
        run_task(engine, load_task(write(tmp_path, CHOICE, [{**ITEMS[0], "question": "x" * 130}] * 3)))


def test_equal_items_leave_fewer_shots_and_a_note_says_so(engine: Engine, tmp_path: Path) -> None:
    """Items that equal the one asked are no shots for it, since they have its answer."""
    items = [ITEMS[0]] * 3 + [ITEMS[1]] * 2
    task = load_task(write(tmp_path, {**CHOICE, "shots": 3}, items))
    assert [len(task.shots_for(item)) for item in items] == [2, 2, 2, 3, 3]
    assert [len(task.turns(item, 3)) for item in items] == [3, 3, 3, 4, 4]
    assert [len(task.turns(ITEMS[0], n)) for n in range(4)] == [1, 2, 3, 3]
    notes = " ".join(run_task(engine, task).notes)
    assert "3 of 5 items had fewer than 3 shots, because the other items equal them" in notes and "context" not in notes


@pytest.mark.parametrize("separate", [True, False])
def test_every_shot_that_is_shown_changes_the_fingerprint(separate: bool) -> None:
    """Items that equal the one asked are passed over, so shots come from further back in the pool."""
    for seed in range(20):
        settings = MultipleChoice(**{**CHOICE, "name": "sums", "shots": 2, "limit": 1, "seed": seed})
        items = [ITEMS[0]] * 4 + ITEMS[1:]

        def task(items: list[Any], settings: MultipleChoice = settings) -> Task:
            return Task(settings, items[:1] if separate else items, items if separate else None, "task")

        for shot in task(items).shots_for(items[0]):
            changed = [{**one, "answer": 1} if one == shot else one for one in items]
            assert task(changed).fingerprint != task(items).fingerprint


@pytest.mark.parametrize("literal", ["{a}", "{", "a } b", "{'a': 1}"])
def test_a_choice_with_a_brace_is_itself(tmp_path: Path, literal: str) -> None:
    task = load_task(write(tmp_path, {**CHOICE, "choices": [literal, "{{sum}}", "no"], "shots": 0}))
    assert task.choices(ITEMS[0]) == [literal, "4", "no"]


def test_exact_match_reads_what_is_written(engine: Engine, tmp_path: Path) -> None:
    settings = {
        "type": "exact_match", "data": "items.jsonl", "prompt": "{{question}} =", "answer": "sum",
        "generation": {"max_tokens": 6, "stop": ["\n"]},
    }  # fmt: skip
    written = [one["written"] for one in run_task(engine, load_task(write(tmp_path, settings))).items]
    assert written == [
        engine.generate(f"{item['question']} =", temperature=0, max_tokens=6, stop=("\n",)) for item in ITEMS
    ]
    items = [{**ITEMS[0], "sum": [f" {written[0].upper()}!", "x"]}, {**ITEMS[1], "sum": written[1] + "?"}]
    for changes, value in (({}, 0.0), ({"ignore_case": True, "ignore_punctuation": True}, 1.0)):
        found = run_task(engine, load_task(write(tmp_path, {**settings, **changes}, items)))
        assert found.metrics["exact match"].value == value
    taken = {**settings, "extract": "^(.)", "shots": 0}
    first = run_task(engine, load_task(write(tmp_path, taken, [{**ITEMS[0], "sum": written[0][0]}])))
    assert first.metrics["exact match"].value == 1.0


def test_generation_is_scored_as_the_libraries_score_it(engine: Engine, tmp_path: Path) -> None:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU, CHRF

    settings = {
        "type": "generation", "data": "items.jsonl", "prompt": "{{question}}", "references": "texts",
        "generation": {"max_tokens": 12, "stop": []},
    }  # fmt: skip
    references = [["a b", "the sum"], ["one two three"], ["x"], ["7"], ["long text of words", "a"], ["b"]]
    items = [{**item, "texts": refs} for item, refs in zip(ITEMS, references, strict=True)]
    found = run_task(engine, load_task(write(tmp_path, settings, items)))
    written = [one["written"] for one in found.items]
    columns = [[refs[i] if i < len(refs) else None for refs in references] for i in range(2)]
    assert found.metrics["bleu"].value == BLEU().corpus_score(written, columns).score
    assert found.metrics["chrf"].value == CHRF().corpus_score(written, columns).score
    rouge = RougeScorer(["rougeL"])
    expected = [
        max(rouge.score(ref, text)["rougeL"].fmeasure for ref in refs)
        for text, refs in zip(written, references, strict=True)
    ]
    assert found.metrics["rougeL"].value == pytest.approx(sum(expected) / 6)


def test_bleu_and_chrf_of_summed_statistics_are_sacrebleus() -> None:
    from sacrebleu.metrics import BLEU, CHRF

    chance = random.Random(1)
    words = ["the", "cat", "sat", "on", "a", "mat", "today", ","]
    texts = [" ".join(chance.choices(words, k=chance.randint(4, 12))) for _ in range(60)]
    references = [[" ".join(chance.choices(words, k=chance.randint(4, 12))) for _ in range(2)] for _ in texts]
    columns = [list(column) for column in zip(*references, strict=True)]
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        kind, statistics = text_statistics(name, texts, references)
        expected = metric.corpus_score(texts, columns).score
        assert expected > 5
        assert figure_of(kind)(statistics.sum(0, keepdims=True))[0] == expected
        measured = interval(statistics, figure_of(kind))
        assert measured.low < expected < measured.high


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "multiple_choise"}, "did you mean `multiple_choice`"), ({"shot": 1}, "did you mean `shots`"),
        ({"choices": "optoins"}, "did you mean `options`"), ({"shots": 6}, "shots=6, and there are 6 items"),
        ({"answer": "question"}, "item 1 has the answer '3 \\+ 1"), ({"prompt": "{{quest}}"}, "'quest' is undefined"),
        ({"prompt": "{{question"}, "not a template"), ({"data": "none.jsonl"}, "none.jsonl: no such file"),
        ({"name": "a/b"}, "name"), ({"limit": 0}, "limit"), ({"choices": ["yes"]}, "give two or more"),
    ],
)  # fmt: skip
def test_mistakes_in_task_files_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_task(write(tmp_path, {**CHOICE, **changes}))


@pytest.mark.parametrize("changes", [{"answer": None}, {"options": ["1", None]}])
def test_null_is_no_text_of_an_item(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path, CHOICE)
    data = path.parent / "items.jsonl"
    first, *rest = data.read_text().splitlines()
    data.write_text("\n".join([json.dumps(json.loads(first) | changes), *rest]))
    with pytest.raises(UserError, match="item 1 is null, or holds null"):
        load_task(path)


def test_templates_cannot_reach_python(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unsafe|undefined"):
        load_task(write(tmp_path, {**CHOICE, "prompt": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}))


def test_a_template_of_all_items_is_one_question_and_items_are_numbered_for_errors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    ask = Confined.ask
    monkeypatch.setattr(Confined, "ask", lambda self, question: asked.append(question) or ask(self, question))
    monkeypatch.setattr(Task, "_number", None)
    settings = {**CHOICE, "choices": ["{{sum}}", "none"], "answer": "answer", "shots": 0}
    task = load_task(write(tmp_path, settings))
    task.check()
    assert sorted(source for _, source, _ in asked) == ["Q: {{question}}\nA:", "{{sum}}"]
    assert [len(items) for _, _, items in asked] == [len(ITEMS)] * 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.3 seconds of processor"),
        ("{{ 'a' * 10**10 }}", "256 MiB of memory"), ("{{ 'a' * 2**21 }}", "line 1: it writes|it writes 2,097,152"),
        ("a\n{{ 1 / 0 }}", "line 2: division by zero"), ("{{ 10.0 ** 999 }}", "item 3: line 1: .*out of range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "line 1: maximum recursion"),
        ("{{ 'x'.center(10**20) }}", "line 1"), ("{{ question.__class__.__base__ }}", "unsafe"),
        ("{{ '%0999999999d' % 3 }}", "256 MiB|seconds"), ("a\n\n{% if %}", "not a template: line 3"),
        ("{% include 'x' %}", "no loader"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "item 3: line 1: maximum recursion"),
    ],
)  # fmt: skip
def test_what_a_template_does_is_bounded_and_named(
    template: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 0.3)
    with pytest.raises(UserError, match=message) as raised:
        load_task(write(tmp_path, {**CHOICE, "prompt": template + "{{ '' }}"}))
    assert "sums.yaml: `prompt" in str(raised.value), "the file and the field"


def test_an_expression_that_takes_forever_is_named(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 0.3)
    settings = {
        "type": "exact_match", "data": "items.jsonl", "prompt": "{{question}} =", "answer": "sum",
        "generation": {"max_tokens": 60, "stop": []}, "extract": "^((.|.)*)*\ud7ff$",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"sums.yaml: `extract`: the expression .* 0.3 seconds of processor time"):
        run_task(engine, load_task(write(tmp_path, settings)))
    with pytest.raises(UserError, match="not a regular expression"):
        load_task(write(tmp_path, {**settings, "extract": "(a{99999999999999999999})"}))


def test_a_chat_model_is_asked_by_its_template(tmp_path: Path) -> None:
    """Description and shots become turns, and an answer ends with the turn's end token."""
    tokenizer = hf.byte_tokenizer("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    config = plain_model(vocab_size=259, context_length=256, n_layers=2, d_model=32, n_heads=2)
    model = hf.random_model(config)
    template = ChatTemplate(BUILT_IN["chatml"], tokenizer)
    chat = Engine(model, tokenizer, chat_template=template)
    settings = {
        "type": "exact_match", "data": "items.jsonl", "prompt": "{{question}}", "answer": "sum", "shots": 1,
        "description": "Add.", "generation": {"max_tokens": 5, "stop": []},
    }  # fmt: skip
    task = load_task(write(tmp_path, settings))
    (shot,) = task.shots_for(ITEMS[0])
    turns = [("system", "Add."), ("user", shot["question"]), ("assistant", shot["sum"]), ("user", ITEMS[0]["question"])]
    ids = template.encode([{"role": role, "content": text} for role, text in turns], add_generation_prompt=True)
    written = chat.generate(ids, temperature=0, max_tokens=5, stop_token_ids=template.end_token_ids)
    assert run_task(chat, task, chat=True).items[0]["written"] == written
    pairs = Asked(chat, load_task(write(tmp_path, {**CHOICE, "shots": 0})), chat=True).pairs(ITEMS[0], ["4", "many"])
    assert [tokenizer.decode(answer) for _, answer in pairs] == ["4", "many"]
    with pytest.raises(UserError, match="no chat template"):
        run_task(Engine(model, tokenizer), task, chat=True)


# --------------------------------------------------------------------------------------------------------- code


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    from itertools import combinations

    for n, c, k in ((5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 2), (7, 3, 7)):
        draws = list(combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(min(draw) < c for draw in draws) / len(draws))


def test_programs_pass_fail_and_are_stopped() -> None:
    programs = {
        "def f(x): return x + 1\nassert f(1) == 2": "passed",
        "def f(x): return x\nassert f(1) == 2": "failed: AssertionError",
        "while True: pass": "timeout",
        "x = bytearray(10**9)": "failed: MemoryError",
        "import sys; sys.exit(0)": "failed: SystemExit",
        "import os; os._exit(0)": "failed: it ended early",
        "print('passed')\nraise ValueError": "failed: ValueError",
        "def": "failed: SyntaxError",
        "with open('big', 'wb') as f: f.write(bytes(1 << 22))": "failed: OSError",
        "import os; assert not any('SECRET' in k for k in os.environ)": "passed",
        "assert input() == ''": "failed: EOFError",
    }
    outcomes = Sandbox().run_all(list(programs), 5.0, 256)
    assert dict(zip(programs, outcomes, strict=True)) == programs


@pytest.mark.parametrize(
    "program",
    [
        "import socket\nassert [name for _, name in socket.if_nameindex()] in ([], ['lo'])",
        "import os\nassert os.getuid() != 0 and os.geteuid() != 0",
        "import os\nassert not os.path.exists('/etc/passwd') and not os.path.exists('/proc/self') and os.getpid() < 10",
        "import os\nassert os.listdir('.') == ['program.py'] and not os.path.exists({own!r})",
        "try: open('/usr/here', 'w')\nexcept OSError: pass\nelse: raise AssertionError",
        "try: open('/here', 'w')\nexcept OSError: pass\nelse: raise AssertionError",
        "import os\ntry: os.remove({own!r})\nexcept OSError: pass\nelse: raise AssertionError",
        "import os\ntry: os.fork()\nexcept OSError: pass\nelse: raise AssertionError",
        "import threading\ntry: threading.Thread(target=print).start()\nexcept RuntimeError: pass",
        "import ctypes, os\nassert ctypes.CDLL(None).unshare(0x20000000) != 0",
        "open('own', 'w').write('x')\nassert open('own').read() == 'x'",
    ],
)
def test_a_program_is_closed_off_from_the_machine(program: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("of the user")
    own.chmod(0o666)
    assert Sandbox().run(program.replace("{own!r}", repr(str(own))), 20.0, 256) == "passed"
    assert own.read_text() == "of the user"


_CALL = """import ctypes
def call(*arguments):
    found = libc.syscall(*arguments)
    return found if found >= 0 else -ctypes.get_errno()
libc = ctypes.CDLL(None, use_errno=True)
"""
_SYSTEM_CALLS = {"x86_64": 0, "aarch64": 1}
_KEPT_BY_THE_KERNEL = [
    # the call's numbers on x86_64 and aarch64, from the kernel's headers; its arguments; what refuses it
    ("shmget", (29, 194), "0, 1 << 20, 0o1600", "EPERM"), ("semget", (64, 190), "0, 100, 0o1600", "EPERM"),
    ("msgget", (68, 186), "0, 0o1600", "EPERM"), ("mq_open", (240, 180), "b'q', 66, 0o600, 0", "EPERM"),
    ("memfd_create", (319, 279), "b'm', 0", "EPERM"), ("keyctl", (250, 219), "0, -3, 0", "EPERM"),
    ("request_key", (249, 218), "b'user', b'secret', 0, 0", "EPERM"),
    ("add_key", (248, 217), "b'user', b'k', b'v', 1, -2", "EPERM"), ("ptrace", (101, 117), "16, 1, 0, 0", "EPERM"),
    ("process_vm_readv", (310, 270), "1, 0, 0, 0, 0, 0", "EPERM"), ("bpf", (321, 280), "0, 0, 0", "EPERM"),
    ("userfaultfd", (323, 282), "0", "EPERM"), ("perf_event_open", (298, 241), "0, 0, -1, -1, 0", "EPERM"),
    ("syslog", (103, 116), "10, 0, 0", "EPERM"), ("unshare", (272, 97), "0x10000000", "EPERM"),
    ("io_uring_setup", (425, 425), "8, 0", "ENOSYS"), ("pidfd_open", (434, 434), "1, 0", "ENOSYS"),
    ("memfd_secret", (447, 447), "0", "ENOSYS"), ("AF_VSOCK", (41, 198), "40, 1, 0", "EAFNOSUPPORT"),
    ("AF_ALG", (41, 198), "38, 5, 0", "EAFNOSUPPORT"), ("AF_PACKET", (41, 198), "17, 3, 0", "EAFNOSUPPORT"),
]  # fmt: skip


def _closed_off_programs() -> list[str]:
    machine = _SYSTEM_CALLS.get(os.uname().machine, 1)
    refused = [
        f"assert call({numbers[machine]}, {arguments}) == -errno.{error}, {name!r}"
        for name, numbers, arguments, error in _KEPT_BY_THE_KERNEL
    ]
    return [
        "\n".join(["import errno", _CALL, *refused]),
        "import asyncio\nasyncio.run(asyncio.sleep(0))",  # a socket pair
        "import socket\nassert [name for _, name in socket.if_nameindex()] in ([], ['lo'])",
        "import os\nassert os.getuid() == 65534 and not os.path.exists('/home') and not os.path.exists('/proc/1')",
        "import os, sys\nassert sys.base_prefix.startswith('/usr')"
        " or {*os.listdir(sys.base_prefix)} <= {'bin', 'lib', 'lib64'}",
        "import os\ntry: os.setuid(0)\nexcept OSError: pass\nassert os.getuid() == os.geteuid() == 65534",
        "import os, signal\nos.kill(1, signal.SIGKILL)\nimport time\ntime.sleep(0.05)"
        if os.getuid()
        else "import os\ntry: os.kill(1, 9)\nexcept PermissionError: pass",
        "import os\nassert all(not os.access(f'{at}/{name}', os.W_OK) for at, _, names in os.walk('/usr/bin')"
        " for name in names)",
        "import tempfile, random, multiprocessing, subprocess, decimal\ntempfile.TemporaryFile().write(b'x')",
    ]


def test_what_the_kernel_keeps_for_all_is_refused_to_a_program() -> None:
    programs = _closed_off_programs()
    outcomes = Sandbox().run_all(programs, 30.0, 256)
    assert dict(zip(programs, outcomes, strict=True)) == dict.fromkeys(programs, "passed")


def test_an_ordinary_users_programs_are_closed_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("not root: the other tests run as an ordinary user")
    user = {"user": 12345, "group": 12345, "extra_groups": []}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        copied = Path(folder) / "jail.py"
        copied.write_bytes(Path(jail.__file__).read_bytes())
        for path in (copied.parent, copied):
            path.chmod(0o755)
        python = next(
            (one for one in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3") if _runs(one, user)), None
        )
        if python is None:
            pytest.skip("no interpreter that another user may run")
        monkeypatch.setattr(jail, "__file__", str(copied))
        monkeypatch.setattr(sys, "executable", python)
        monkeypatch.setattr("gptworks.confined.sandbox.subprocess.Popen", partial(subprocess.Popen, **user))
        own = Path(folder) / "own"
        own.write_text("of the user")
        os.chown(own, 12345, 12345)
        programs = [
            *_closed_off_programs(),
            f"import os\nassert os.listdir('.') == ['program.py'] and not os.path.exists({str(own)!r})",
            "import os\ntry: os.fork()\nexcept OSError: pass\nelse: raise AssertionError",
        ]
        outcomes = Sandbox().run_all(programs, 30.0, 256)
    assert dict(zip(programs, outcomes, strict=True)) == dict.fromkeys(programs, "passed")


def _runs(python: str, user: dict[str, Any]) -> bool:
    try:
        return subprocess.run([python, "-I", "-S", "-c", ""], check=False, cwd="/", **user).returncode == 0
    except OSError:
        return False


def test_a_program_fills_no_disk() -> None:
    program = "for i in range(300):\n    with open(f'{i}', 'wb') as f: f.write(bytes(1 << 20))"
    assert Sandbox().run(program, 20.0, 256) == "failed: OSError"


def test_what_a_program_starts_does_not_outlive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"outlives-{secrets.token_hex(8)}"  # on the command line of the program and of all that it forks, alone
    marked = Path(jail.__file__).read_text(encoding="utf-8").replace('CHILD = """', f'CHILD = """# {mark}', 1)
    (tmp_path / "jail.py").write_text(marked, encoding="utf-8")
    monkeypatch.setattr(jail, "__file__", str(tmp_path / "jail.py"))

    def alive() -> set[str]:
        lines = Path("/proc").glob("[0-9]*/cmdline")
        return {path.parent.name for path in lines if mark.encode() in _read_if_there(path)}

    sandbox = Sandbox()
    forks = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\ntime.sleep(60)"
    assert sandbox.run(forks, 30.0, 256) == "failed: BlockingIOError", "it may start nothing"
    assert not alive()
    seen: set[str] = set()
    with ThreadPoolExecutor(1) as pool:
        for seconds in (2.0, 30.0):  # a busy machine may take longer than two to start it
            running = pool.submit(sandbox.run, "import time\ntime.sleep(60)", seconds, 256)
            while not running.done():
                seen |= alive()
            assert running.result() == "timeout"
            if seen:
                break
    assert seen, "the program is seen while it runs"
    assert not alive()


def _read_if_there(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


@pytest.mark.parametrize(
    "place",
    [
        "import __main__\nfound = repr(vars(__main__))",
        "import sys\nfound = repr(sys.argv) + repr(sys.orig_argv)",
        "import os\nfound = repr(dict(os.environ))",
        "import gc\nfound = repr([one for one in gc.get_objects() if isinstance(one, (str, bytes, dict, list))])",
        "import sys\nframe, found = sys._getframe(), ''\nwhile frame: found += repr(frame.f_locals.get('token'));"
        " frame = frame.f_back",
    ],
)
def test_a_program_finds_no_proof_of_passing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that proves it is created after the program has ended, so that the program cannot find it."""
    monkeypatch.setattr("gptworks.confined.sandbox.secrets.token_hex", lambda n: "f00d" * 8)
    program = f"{place}\nassert 'f00d' * 8 not in found"
    assert Sandbox().run(program, 20.0, 256) == "passed"
    stolen = (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'f00d' * 8)\n    except OSError: pass\nos._exit(0)"
    )
    assert Sandbox().run(stolen, 20.0, 256) == "failed: it ended early"


def test_programs_are_not_run_where_they_cannot_be_closed_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptworks.confined.sandbox.sys.platform", "darwin")
    with pytest.raises(UserError, match="only on Linux, whose namespaces"):
        Sandbox()
    monkeypatch.undo()
    monkeypatch.setattr(Sandbox, "run", lambda *_: "refused: unshare: Operation not permitted")
    with pytest.raises(UserError, match=r"unshare: Operation not permitted.*kernel\.unprivileged_userns_clone"):
        Sandbox()


def test_what_a_model_writes_is_run_only_when_that_is_asked_for(engine: Engine, tmp_path: Path) -> None:
    settings = {
        "type": "code", "data": "items.jsonl", "prompt": "prompt", "tests": "{{test}}", "samples": 3, "k": [1, 3],
        "generation": {"max_tokens": 4, "stop": []},
    }  # fmt: skip
    items = [{"prompt": "x = 1  #", "test": "assert x == 1"}, {"prompt": "x = 2  #", "test": "assert x == 1"}]
    task = load_task(write(tmp_path, settings, items))
    with pytest.raises(UserError, match="--run-generated-code"):
        run_task(engine, task)
    found = run_task(engine, task, sandbox=Sandbox())
    right = [one["passed"] for one in found.items]
    assert right[1] == 0
    assert found.metrics["pass@3"].value == pytest.approx((pass_at_k(3, right[0], 3) + 0) / 2)
    with pytest.raises(UserError, match="k=5 needs as many samples"):
        load_task(write(tmp_path, {**settings, "k": [5]}, items))


# ------------------------------------------------------------------------------------------------------- results


def test_intervals_are_those_of_resampled_items() -> None:
    """The mean's interval is near the normal one; that of a paired difference ignores variation common to both."""
    random_numbers = np.random.default_rng(3)
    shared = random_numbers.normal(0, 10, 400)
    first = shared + random_numbers.normal(0, 1, 400)
    second = shared + 0.5 + random_numbers.normal(0, 1, 400)
    mean = figure_of("mean")
    found = interval(means(first.tolist()), mean)
    error = first.std(ddof=1) / math.sqrt(400)
    assert found.value == pytest.approx(first.mean())
    assert [found.low, found.high] == pytest.approx([first.mean() - 1.96 * error, first.mean() + 1.96 * error], abs=0.1)
    difference = paired_difference(means(first.tolist()), means(second.tolist()), mean)
    error = (second - first).std(ddof=1) / math.sqrt(400)
    assert difference.value == pytest.approx((second - first).mean())
    assert [difference.low, difference.high] == pytest.approx(
        [difference.value - 1.96 * error, difference.value + 1.96 * error], abs=0.02
    )


def test_results_are_kept_and_told_in_the_card_once(tmp_path: Path) -> None:
    (tmp_path / "model-card.md").write_text("# run\n\n## Results\n\n| a | b |\n", encoding="utf-8")
    for value in (0.0, 1.0):
        metrics = {"accuracy": Measured.of("mean", means([value, 1.0]))}
        save_evaluations(
            tmp_path, [Evaluation("sums", "multiple_choice", "run", 7, 2, metrics, shots=3, notes=("so",))]
        )
    card = (tmp_path / "model-card.md").read_text(encoding="utf-8")
    assert card.count(HEADING) == 1 and card.startswith("# run\n\n## Results\n\n| a | b |\n\n## Evaluations")
    assert "| sums | 3 | 2 | accuracy | 1.0000 | 1.0000 to 1.0000 | 7 |" in card and "* sums: so" in card
    kept = read_evaluations(tmp_path)["sums"]
    assert kept.metrics["accuracy"].statistics.tolist() == [[1, 1], [1, 1]] and kept.notes == ("so",)
    (tmp_path / "evaluations" / "sums.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is not an evaluation"):
        read_evaluations(tmp_path)


FOREIGN: list[Any] = ["x", None, [], {}, -1, 10**30, True, [[1, [2]]], [[], []], {"a": {"b": 1}}, "<b>a|b\n## c"]


def test_whatever_an_evaluation_of_someone_else_holds_is_shown_or_named(tmp_path: Path) -> None:
    metrics = {"accuracy": Measured.of("mean", means([1.0, 0.0]))}
    save_evaluations(tmp_path, [Evaluation("sums", "text", "run", 7, 2, metrics, details={"positions": []})])
    file = tmp_path / "evaluations" / "sums.json"
    good = json.loads(file.read_text(encoding="utf-8"))
    shutil.copytree(tmp_path / "evaluations", tmp_path / "other" / "evaluations")
    of_metric = [("metrics", "accuracy", key) for key in good["metrics"]["accuracy"]]
    n_named = 0
    for keys in [*((key,) for key in good), *of_metric, ("details", "positions")]:
        for value in FOREIGN:
            tree = copy.deepcopy(good)
            functools.reduce(operator.getitem, keys[:-1], tree)[keys[-1]] = value
            file.write_text(json.dumps(tree), encoding="utf-8")
            try:
                write_card_section(tmp_path)
                assert "<b>" not in evaluations_section(tmp_path)
                compare_evaluations([tmp_path, tmp_path / "other"])
            except UserError as error:
                n_named += "is not an evaluation" in str(error)
            card = (tmp_path / "model-card.md").read_text(encoding="utf-8")
            assert "<b>" not in card and "\n## c" not in card
    assert n_named > 100
