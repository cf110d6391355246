"""Prompts that begin documents (tokenizer.begin_prompts): the run's, and every export's."""

from pathlib import Path

import gguf
import pytest
import transformers as t

import tiny
from gptworks.infer.engine import load
from gptworks.interop.gguf import export_gguf
from gptworks.interop.html_file import export_html
from gptworks.interop.huggingface import export_huggingface, import_huggingface
from gptworks.recipe import parse_recipe
from gptworks.tokenizer import prompt_ids
from gptworks.training.loop import train
from test_html_file import needs_node


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with prompts that begin documents; each of its lines is one."""
    folder = tmp_path_factory.mktemp("begun")
    tree = tiny.recipe_tree(folder, max_steps=4, evaluate_every=4, checkpoint_every=4, optimizer="adamw")
    tree["model"] |= {"mlp": "swiglu", "qk_norm": False}
    tree["tokenizer"] = {"type": "bpe", "vocab_size": 320, "begin_prompts": True}
    train(parse_recipe(tree))
    return folder / "run"


def test_a_prompt_begins_with_the_separator_that_begins_documents(run: Path) -> None:
    engine = load(run)
    ids = engine.encode_prompt("the quick")
    assert ids[0] == engine.tokenizer.token_to_id("<|endoftext|>") and engine.encode_prompt("") == ids[:1]
    assert engine.tokenizer.decode(ids) == "the quick"
    settings = {"max_tokens": 8, "seed": 1, "temperature": 0.5}
    assert engine.generate("the quick", **settings) == engine.generate(ids, **settings)
    assert engine.generate("the quick", heal=True, max_tokens=8, seed=1), "the separator is not drawn again"


def test_the_same_holds_for_hugging_face_and_gguf(run: Path, tmp_path: Path) -> None:
    ids = load(run).encode_prompt("the quick")
    folder = export_huggingface(run, tmp_path / "hf").folder
    assert t.AutoTokenizer.from_pretrained(folder)("the quick")["input_ids"] == ids
    import_huggingface(folder, tmp_path / "back")
    assert load(tmp_path / "back").encode_prompt("the quick") == ids
    fields = gguf.GGUFReader(export_gguf(run, tmp_path / "run.gguf").file).fields
    said = {name.rpartition(".")[2]: field.contents() for name, field in fields.items() if "tokenizer" in name}
    assert said["add_bos_token"] is True and said["bos_token_id"] == ids[0]


@needs_node
def test_the_page_begins_its_prompts_too(run: Path, tmp_path: Path) -> None:
    checked = export_html(run, tmp_path / "model.html").check
    assert checked is not None and checked.greedy_tokens > 0


def test_the_data_is_the_same_without_it(run: Path) -> None:
    tree = tiny.recipe_tree(run.parent, max_steps=4, evaluate_every=4, checkpoint_every=4)
    plain = parse_recipe(tree | {"tokenizer": {"type": "bpe", "vocab_size": 320}, "run_dir": str(run.parent / "plain")})
    train(plain)
    begun, without = (prompt_ids(load(folder).tokenizer, "the quick") for folder in (run, plain.run_dir))
    assert begun[1:] == without
    shards = [sorted(folder.glob("*.tokens")) for folder in (run.parent / "data").glob("shards-*")]
    assert len(shards) == 2 and [one.read_bytes() for one in shards[0]] == [one.read_bytes() for one in shards[1]]
