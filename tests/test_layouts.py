"""Tokenizer layouts of released families: an import, and an export of it, reads, ends and chats as the folder
specifies."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from gguf import GGUFReader

import layouts
from gptworks.chat_template import load_chat_template
from gptworks.errors import UserError
from gptworks.infer.engine import load
from gptworks.interop.gguf import export_gguf
from gptworks.interop.huggingface import export_huggingface, import_huggingface
from gptworks.interop.huggingface.verify import quiet
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import document_frame, load_tokenizer, prompt_ids
from layouts import FORGETFUL, LAYOUTS, PROMPT, Layout

TEXTS = (
    "The quick brown fox", "a <tool> b", "2 kilos of singles: kilo single", " leading and trailing  ",
    "x\n\n\ty = 12345\r\n", "Zoe\u0308 東京 🗼", "we'll  DON'T  'tis",
)  # fmt: skip
CHATS = (
    [{"role": "user", "content": " Hi  there\n"}],
    [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Why?"}],
)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def their_tokenizer(folder: Path, layout: Layout) -> Any:
    """Return the folder's tokenizer in stock transformers; in its generic class if the specific one ignores parts of
    tokenizer.json."""
    return (t.PreTrainedTokenizerFast if layout.reads_otherwise else t.AutoTokenizer).from_pretrained(folder)


def ends_of(config: t.GenerationConfig) -> list[int]:
    return config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]


def rendered(tokenizer: Any, chat: list[dict[str, str]]) -> str | None:
    if tokenizer.chat_template is None:
        return None
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("name", [*LAYOUTS, *FORGETFUL])
@torch.no_grad()
def test_a_released_layout_goes_in_and_out_as_it_is(name: str, tmp_path: Path) -> None:
    layout, folder, run = (LAYOUTS | FORGETFUL)[name], tmp_path / "theirs", tmp_path / "run"
    model = layouts.write(folder, layout)
    original = their_tokenizer(folder, layout)
    generation = t.AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert ends_of(generation) == [layout.tokenizer.token_to_id(end) for end in layout.ends], "the layout is as stated"
    import_huggingface(folder, run)

    engine = load(run, backend="torch")
    tokenizer = engine.tokenizer
    for text in TEXTS:
        assert prompt_ids(tokenizer, text) == original(text)["input_ids"], text
    ids = torch.tensor([original(PROMPT)["input_ids"]])
    theirs = model.generate(ids, generation_config=generation, do_sample=False, max_new_tokens=8, pad_token_id=0)
    assert theirs[0, ids.size(1) :].tolist() == [ends_of(generation)[-1]], "transformers stops after one token"
    ours = engine.complete(PROMPT, temperature=0, max_tokens=8)[0]
    assert (ours.text, ours.finish_reason) == ("", "stop")
    _, after = document_frame(tokenizer)
    eos = special_tokens(tokenizer).eos
    assert eos == original.eos_token_id
    assert (after or document_frame(tokenizer)[0]) == [eos], "documents end with eos, or it separates them"
    template = load_chat_template(run / "tokenizer", tokenizer)
    if template is not None and name != "a-template-in-json":
        for chat in CHATS:
            assert template.render(chat, add_generation_prompt=True) == rendered(original, chat)
    else:
        assert template is not None or original.chat_template is None
    assert template is None or set(template.end_token_ids) >= set(ends_of(generation))

    export_huggingface(run, tmp_path / "back")
    back = t.AutoTokenizer.from_pretrained(tmp_path / "back")
    again = t.GenerationConfig.from_pretrained(tmp_path / "back")
    for text in (*TEXTS, *(f"a{token}b" for token in original.all_special_tokens)):
        assert back(text)["input_ids"] == original(text)["input_ids"], text
    assert (ends_of(again), again.bos_token_id) == (ends_of(generation), generation.bos_token_id)
    assert again.temperature == generation.temperature, "what the folder says of sampling comes back"
    for role in ("bos_token", "eos_token", "pad_token"):
        assert getattr(back, role) == getattr(original, role), role
    if name != "a-template-in-json":
        assert back.chat_template == original.chat_template
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (again.eos_token_id, again.bos_token_id)

    assert special_tokens(load_tokenizer(tmp_path / "back")) == special_tokens(tokenizer)
    _in_gguf(run, layout, original, generation)


def _in_gguf(run: Path, layout: Layout, original: Any, generation: Any) -> None:
    try:
        export_gguf(run, run.parent / "model.gguf")
    except UserError as error:
        assert "no architecture of llama.cpp" in str(error) or "no tokenizer like this" in str(error)
        return
    fields = {name: field.contents() for name, field in GGUFReader(run.parent / "model.gguf").fields.items()}
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    names = fields["tokenizer.ggml.tokens"]
    by_name = {names.index(name) for name in ("<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>") if name in names}
    assert ids["eos"] == original.eos_token_id
    assert set(ends_of(generation)) <= {ids["eos"], ids["eot"], ids["eom"]} | by_name
    assert ids["padding"] == original.pad_token_id
    before = original("A")["input_ids"][:-1]
    assert fields["tokenizer.ggml.add_bos_token"] == bool(before)
    assert not before or [ids["bos"]] == before
    assert not fields["tokenizer.ggml.add_eos_token"]
