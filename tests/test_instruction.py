"""Instruction tuning end to end: its loss computed otherwise, its data, tokens and template, and exact resume."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import chats
import commands
import gptworks
from gptworks.chat_template import BUILT_IN
from gptworks.checkpoint import checkpoints, load_run
from gptworks.cli import app
from gptworks.cli.evaluate import evaluate
from gptworks.config import IGNORED
from gptworks.data.conversations.packing import Examples, evaluation_rows, stack
from gptworks.data.opened import open_prepared
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.describe.plan_tables import tables
from gptworks.errors import UserError
from gptworks.infer import TurnSession, load
from gptworks.planning.run import plan
from gptworks.planning.steps import DataSize
from gptworks.recipe import load_recipe, parse_recipe, with_vocab_size
from gptworks.tokenizer import load_tokenizer
from gptworks.training.loop import train
from gptworks.training.objectives.next_token import next_token
from gptworks.training.rehearsal.trace import Rehearsal, trace_step


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base run, and with one whose head is untied."""
    folder = tmp_path_factory.mktemp("bases")
    for name, tied in (("base", True), ("untied", False)):
        tree = chats.base_tree(folder, max_steps=4, precision="fp32", optimizer="adamw")
        tree["model"]["tie_embeddings"] = tied
        train(parse_recipe(tree | {"run_dir": str(folder / name)}))
    return folder


@pytest.fixture
def folder(bases: Path, tmp_path: Path) -> Path:
    for name in ("base", "untied"):
        shutil.copytree(bases / name, tmp_path / name)
    return tmp_path


def tuned(folder: Path, rows: list[Any] | None = None, **train_settings: Any) -> Path:
    tree = chats.tune_tree(folder, rows, **{"max_steps": 4, "precision": "fp32", "optimizer": "adamw"} | train_settings)
    train(parse_recipe(tree))
    return folder / "tuned"


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in lines if record["kind"] == "train"]


def test_the_loss_equals_that_of_transformers(folder: Path, shared_data: Path) -> None:
    """For fifty real instructions, one by one, answers only: our rows against transformers on the exported model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gptworks.interop.huggingface import export_huggingface

    rows = json.loads((shared_data / "instructions-1100.json").read_text())[:60]
    tree = chats.tune_tree(folder, rows, max_steps=2, precision="fp32", learning_rate=0.01)
    tree["model"]["context_length"] = 512
    del tree["initialize_from"]
    tree["objective"]["allow"] = ["no-base-run"]
    train(parse_recipe(tree))
    export_huggingface(folder / "tuned", folder / "exported")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    words = AutoTokenizer.from_pretrained(folder / "exported")

    recipe = load_recipe(folder / "tuned")
    shards = TokenShards(prepare(recipe).folder, "train")
    assert shards.n_documents >= 50
    records = shards.examples()["record"][:50].tolist()
    examples = Examples(shards, 512)
    examples.rows = [[i for i in row if i < 50] for row in examples.rows]
    batch = stack([row for row, members in zip(evaluation_rows(examples), examples.rows, strict=True) if members])
    with torch.no_grad():
        ours = next_token(load_run(folder / "tuned", "last").model, batch).loss / (batch[1] != IGNORED).sum()

    total, count = 0.0, 0
    for record in (rows[i] for i in records):
        question = record["instruction"] + (f"\n\n{record['input']}" if record["input"] else "")
        chat = [{"role": "user", "content": question}]
        before = words.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answer = words(record["output"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = theirs(torch.tensor([before + answer])).logits[0, len(before) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
    assert ours.item() == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("base", ["base", "untied"])
def test_new_tokens_get_the_mean_embedding(folder: Path, base: str) -> None:
    tree = chats.tune_tree(folder, max_steps=1, learning_rate=1e-12, optimizer="adamw", weight_decay=0)
    tree["model"]["tie_embeddings"] = base == "base"
    tree["initialize_from"] = str(folder / base)
    train(parse_recipe(tree))
    before, after = load_run(folder / base).model, load_run(folder / "tuned").model
    assert (before.config.vocab_size, after.config.vocab_size) == (300, 302)
    names = ["token_embedding.weight"] + ["untied_head.weight"] * (base == "untied")
    for name in names:
        old, new = before.state_dict()[name], after.state_dict()[name]
        torch.testing.assert_close(new[:300], old)
        torch.testing.assert_close(new[300:], old.mean(0).expand(2, -1))
    assert load_tokenizer(folder / "tuned" / "tokenizer").token_to_id("<|im_end|>") == 301


def test_another_tokenizer_is_refused(folder: Path) -> None:
    tree = chats.tune_tree(folder)
    tree["tokenizer"] = {"type": "bpe", "vocab_size": 280, "chat_template": "plain"}
    with pytest.raises(UserError, match=r"tokenizer differs from that of initialize_from.*added_tokens may add to it"):
        train(parse_recipe(tree))


@pytest.mark.learning
def test_it_learns_the_answers_and_chats_in_turns(folder: Path) -> None:
    """With three seeds in fp32 and bf16, the loss fell to at most 0.12 of its first value."""
    run = tuned(folder, max_steps=80, learning_rate=0.02, evaluate_every=80)
    assert losses(run)[-1] < 0.5 * losses(run)[0]
    engine = load(run, backend="torch")
    assert engine.chat_template is not None and engine.chat_template.source == BUILT_IN["chatml"]
    chat = TurnSession(engine, temperature=0, max_tokens=30)
    answer = "".join(chat.send("what of lazy 1?"))
    assert answer.startswith("the ") and answer.endswith(".") and "<|" not in answer
    "".join(chat.send("what of line 3?"))
    assert [message["role"] for message in chat.messages][-2:] == ["user", "assistant"]
    assert engine.chat_template.encode(chat.messages[:-1], add_generation_prompt=True) == chat.token_ids
    for _ in range(4):
        "".join(chat.send("what of brown 5?"))
    assert chat.n_forgotten and len(chat.token_ids) <= engine.context
    with pytest.raises(UserError, match="the newest question alone has 518 tokens"):
        chat.send("what " * 100)
    assert chat.messages[-1]["role"] == "assistant"


def test_generate_asks_by_the_template_or_says_that_it_does_not(folder: Path) -> None:
    run, question, source, target = tuned(folder), "what of lazy 1?", folder / "in.jsonl", folder / "out.jsonl"

    def generate(run: Path, *arguments: str | Path) -> Any:
        greedy = ("--temperature", "0", "--max-tokens", "12", "--backend", "torch")
        return CliRunner().invoke(app, ["generate", *map(str, (run, *arguments)), *greedy], catch_exceptions=False)

    expected = "".join(TurnSession(load(run, backend="torch"), temperature=0, max_tokens=12).send(question))
    asked = generate(run, question, "--chat")
    assert asked.stdout == expected + "\n" and not asked.stderr
    chats.write_jsonl(source, [{"prompt": question}])
    assert "--chat" not in generate(run, "--input", source, "--output", target, "--chat").stderr
    assert json.loads(target.read_text())["completions"][0]["text"] == expected
    plain = generate(run, question)
    assert plain.stdout.startswith(question) and "--chat" in plain.stderr and plain.stderr.count("\n") == 1
    assert not generate(folder / "base", question).stderr
    with pytest.raises(UserError, match="no chat template"):
        generate(folder / "base", question, "--chat")


def test_a_base_model_has_no_turns(folder: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        TurnSession(load(folder / "base", backend="torch"))


def test_the_template_goes_along(folder: Path) -> None:
    from gptworks.interop.huggingface import export_huggingface, import_huggingface

    run = tuned(folder)
    export_huggingface(run, folder / "exported")
    import_huggingface(folder / "exported", folder / "again")
    files = [
        where / "chat_template.jinja" for where in (run / "tokenizer", folder / "exported", folder / "again/tokenizer")
    ]
    assert {file.read_text() for file in files} == {BUILT_IN["chatml"]}
    assert json.loads((folder / "exported" / "generation_config.json").read_text())["eos_token_id"] == [301, 0]
    gguf = pytest.importorskip("gguf")
    from gptworks.interop.gguf import export_gguf

    export_gguf(run, folder / "run.gguf")
    fields = gguf.GGUFReader(folder / "run.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == BUILT_IN["chatml"]
    assert fields["tokenizer.ggml.eot_token_id"].contents() == 301
    kept = parse_recipe(chats.base_tree(folder) | {
        "initialize_from": str(run), "run_dir": str(folder / "on"),
        "tokenizer": {"type": "file", "path": str(run / "tokenizer")},
    })  # fmt: skip
    train(kept.model_copy(update={"train": kept.train.model_copy(update={"max_steps": 2})}))
    assert (folder / "on" / "tokenizer" / "chat_template.jinja").read_text() == BUILT_IN["chatml"]


def test_edited_conversations_are_noticed(folder: Path) -> None:
    tree = chats.tune_tree(folder)
    first = prepare(parse_recipe(tree))
    assert prepare(parse_recipe(tree)).reused
    rows = chats.records()
    rows[3]["output"] = "something else"
    chats.write_jsonl(folder / "chats.jsonl", rows)
    second = prepare(parse_recipe(tree))
    assert second.folder != first.folder and second.manifest.fingerprint != first.manifest.fingerprint
    tree["tokenizer"]["chat_template"] = "alpaca"
    assert prepare(parse_recipe(tree)).folder not in (first.folder, second.folder)


def test_damaged_masks_and_templates_are_noticed(folder: Path) -> None:
    made = prepare(parse_recipe(chats.tune_tree(folder))).folder
    learned = made / "train-00000.learned"
    damaged = bytearray(learned.read_bytes())
    damaged[5] ^= 1
    learned.write_bytes(damaged)
    with pytest.raises(UserError, match=r"train-00000\.learned is corrupt"):
        TokenShards(made, "train", verify=True)
    learned.write_bytes(damaged[:-1])
    with pytest.raises(UserError, match=r"train-00000\.learned has \d+ bytes"):
        open_prepared(made)
    learned.write_bytes(damaged)
    (made / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match=r"chat_template\.jinja is missing or not as it was written"):
        open_prepared(made)


def test_epochs_and_accumulation(folder: Path) -> None:
    run = tuned(folder, max_steps=None, epochs=2, micro_batch_size=8)
    recipe = load_recipe(run)
    rows = len(Examples(TokenShards(prepare(recipe).folder, "train"), 128).rows)
    whole = losses(run)
    assert len(whole) == max(1, round(2 * rows / 8))
    shutil.rmtree(run)
    assert losses(tuned(folder, max_steps=None, epochs=2, micro_batch_size=2)) == pytest.approx(whole, rel=1e-5)


def test_killed_and_resumed_it_is_the_same_bit_for_bit(folder: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "checkpoint_every": 2, "evaluate_every": 6, "optimizer": "muon"}
    whole = tuned(folder, **settings)
    file = folder / "again.yaml"
    file.write_text(
        yaml.safe_dump(chats.tune_tree(folder, **settings, precision="fp32") | {"run_dir": str(folder / "cut")})
    )
    code = f"""
import os, signal, sys
from gptworks.recipe import load_recipe
from gptworks.training import loop
step = loop.Run.training_step
def dying(run):
    step(run)
    if run.progress.step == 3:
        run.state.writer.wait()
        os.kill(os.getpid(), signal.SIGKILL)
loop.Run.training_step = dying
loop.train(load_recipe({str(file)!r}))
"""
    killed = commands.run("-c", code)  # with one thread, as this process has: sums depend on it
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoints(folder / "cut")[0].step == 2
    train(load_recipe(file), resume=True)
    a, b = (checkpoints(run)[0].folder / "model.safetensors" for run in (whole, folder / "cut"))
    assert a.read_bytes() == b.read_bytes()


def test_inspect_shows_what_is_learned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gptworks.cli.inspect import inspect

    file = folder / "tune.yaml"
    file.write_text(yaml.safe_dump(chats.tune_tree(folder)))
    inspect(file, as_json=True, examples=2)
    tree = json.loads(capsys.readouterr().out)
    assert tree["findings"] == [] and tree["files"][0]["shape"] == "alpaca" and tree["n_cut"] == 0
    parts = tree["examples"][0]["parts"]
    assert [part["learned"] for part in parts] == [False, True, False]
    assert parts[1]["text"].endswith("<|im_end|>") and not parts[0]["cut"]
    inspect(file)
    plain = capsys.readouterr().out
    assert f"⟦{parts[1]['text']}⟧" in plain and "chats.jsonl (alpaca, 60 records)" in plain
    inspect(file, ["model.context_length=40"], examples=1)
    cut = capsys.readouterr().out
    assert "✂" in cut.replace("✂cut off✂", "") and "stops training: answers-cut-short: " in cut
    file.write_text(yaml.safe_dump(chats.base_tree(folder)))
    with pytest.raises(UserError, match="its sources are text"):
        inspect(file)


def test_evaluate_counts_answers_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gptworks.cli.evaluate import evaluate

    run = tuned(folder, evaluate_every=4, evaluate_sequences=0)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    [during] = [record["loss"] for record in lines if record["kind"] == "validation"]
    evaluate(run, as_json=True)
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(during, rel=1e-6)


def test_evaluate_of_conversations_does_not_blame_the_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tuned(folder)
    assert load_tokenizer(run / "tokenizer").decode(load_tokenizer(run / "tokenizer").encode("a ü\n").ids) == "a ü\n"
    evaluate(run)
    said = capsys.readouterr().out
    assert "bits per byte    undefined: the text is conversations, of which not every byte is predicted" in said
    with pytest.raises(UserError, match=r"holds conversations or preference pairs, not text") as refused:
        evaluate(run, compressors=True)
    assert "tokenizer" not in str(refused.value)


# --------------------------------------------------------------------------------------------- rows and the context


@pytest.mark.parametrize("kind", ["instruction", "preference"])
def test_short_rows_train_as_a_short_context_does_and_keep_the_long_one(folder: Path, kind: str) -> None:
    """Same batches, losses and weights, bit for bit; only the context that the run states differs."""
    tree = chats.tune_tree(folder, max_steps=3, precision="fp32", optimizer="adamw", warmup_steps=0, batch_size=4)
    if kind == "preference":
        pairs = [{"prompt": f"what of {n}?", "chosen": f"it is {n}.", "rejected": "it was not " * n} for n in range(40)]
        chats.write_jsonl(folder / "pairs.jsonl", pairs)
        tree["data"]["sources"] = [{"type": "preferences", "path": str(folder / "pairs.jsonl")}]
        tree["objective"] = {"type": "preference", "allow": ["answers-cut-short"]}

    def run(name: str, context: int, row: int | None) -> Path:
        model, settings = tree["model"] | {"context_length": context}, tree["train"] | {"row_tokens": row}
        train(parse_recipe(tree | {"model": model, "train": settings, "run_dir": str(folder / name)}))
        return folder / name

    short, long, whole = run("short", 64, None), run("long", 128, 64), run("whole", 128, None)
    assert losses(long) == losses(short) != losses(whole)
    ours, theirs = (load_run(one) for one in (long, short))
    assert (ours.model.config.context_length, theirs.model.config.context_length) == (128, 64)
    theirs_by_name = dict(theirs.model.named_parameters())
    assert all(torch.equal(p, theirs_by_name[name]) for name, p in ours.model.named_parameters())
    assert "4 × 64 tokens" in (long / "model-card.md").read_text()
    if kind == "instruction":
        assert gptworks.evaluate(long).to_json()["loss"] == gptworks.evaluate(short).to_json()["loss"]
    with pytest.raises(UserError, match=r"train\.row_tokens"):
        train(load_recipe(long, ["train.row_tokens=32", "train.max_steps=9"]), resume=True)


def test_a_plan_counts_short_rows_as_a_short_context_but_for_the_rotary_tables(folder: Path) -> None:
    tree = chats.tune_tree(folder, max_steps=3, precision="fp32", batch_size=4) | {"initialize_from": None}
    plans = []
    for context, row in ((64, None), (256, 64)):
        model, settings = tree["model"] | {"context_length": context}, tree["train"] | {"row_tokens": row}
        recipe = with_vocab_size(parse_recipe(tree | {"model": model, "train": settings}), 300)
        plans.append(plan(recipe, DataSize(10_000, 157)))
    short, long = plans
    for name in ("steps", "tokens_per_step", "tokens", "flops_per_step", "total_flops"):
        assert getattr(long, name) == getattr(short, name), name
    assert any("4 × 64;" in cell for table in tables(long) for row in table.rows for cell in row)
    more_bytes = 4 * long.recipe.model.d_rotary * (256 - 64)
    assert long.peak.total_bytes - short.peak.total_bytes == more_bytes > 0
    traced = [trace_step(Rehearsal.of(one, "cpu")).peak_bytes for one in plans]
    assert traced[1] - traced[0] == more_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"row_tokens": 129}}, r"row_tokens=129 is not between .* and model\.context_length=128"),
        ({"train": {"row_tokens": 2}, "model": {"n_future_tokens": 3}}, r"row_tokens=2 is not between .*tokens=3"),
        ({"train": {"row_tokens": 64}, "objective": {"type": "next_token"}, "data": None}, "leave it out"),
        ({"train": {"row_tokens": 0}}, "row_tokens"),
    ],
)
def test_rows_that_cannot_be_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    tree = chats.tune_tree(folder, max_steps=3)
    base = chats.base_tree(folder)
    for name, given in changes.items():
        tree[name] = base[name] if given is None else {**tree.get(name, {}), **given}
    with pytest.raises(UserError, match=words):
        parse_recipe(tree)
