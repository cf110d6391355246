"""A page of an imported folder computes what transformers computes: texts, logits, losses, token ids, conversations."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from tokenizers import AddedToken, Tokenizer, processors

import hf
from gptworks.errors import UserError
from gptworks.interop.html_file import browser, export_html
from gptworks.interop.huggingface import import_huggingface
from gptworks.interop.huggingface.verify import quiet
from gptworks.tokenizer import save_tokenizer, vocabulary_size
from test_html_words import in_bytes, like_gemma, like_llama

N_PROMPT, N_GREEDY = 32, 64
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
WINDOWS: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
TURNS = (
    "{{ bos_token }}{% for one in messages %}<turn>{{ one['role'] }}\n{{ one['content'] | trim }}<end>\n{% endfor %}"
)


def framed(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a token before each text, as Llama and Gemma have."""
    tokenizer.add_special_tokens([AddedToken("<turn>"), AddedToken("<end>", rstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[], Tokenizer]]] = {
    "llama": (t.LlamaConfig, {"rms_norm_eps": 1e-5}, lambda: framed(like_llama())),
    "qwen3": (t.Qwen3Config, {"attention_bias": True, "use_sliding_window": True, **WINDOWS}, in_bytes),
    "gemma": (t.GemmaConfig, {}, lambda: framed(like_gemma())),
    "gemma3": (t.Gemma3TextConfig, {"query_pre_attn_scalar": 24, **WINDOWS}, lambda: framed(like_gemma())),
}


@pytest.fixture(autouse=True)
def _node_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(browser.BROWSER, "")


def imported(folder: Path, config: Any, tokenizer: Tokenizer) -> tuple[Any, Path]:
    """Return transformers' model with random weights, and its folder as a run."""
    with quiet():
        model = hf.save_theirs(folder / "theirs", config)
        save_tokenizer(tokenizer, folder / "theirs")
        (folder / "theirs" / "chat_template.jinja").write_text(TURNS, encoding="utf-8")
        import_huggingface(folder / "theirs", folder / "run", verify=False)
    return model, folder / "run"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
@pytest.mark.parametrize("name", CASES)
def test_a_page_of_an_imported_folder_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    config, settings, make = CASES[name]
    tokenizer = make()
    n_vocab = vocabulary_size(tokenizer) + 3  # more rows than tokens, as published models have
    model, run = imported(tmp_path, config(**SHAPE | {"vocab_size": n_vocab} | settings), tokenizer)
    found = export_html(run, tmp_path / "model.html", weights="fp32").check
    assert found is not None
    assert (found.greedy_tokens, found.chats) == (N_GREEDY, 3)
    ids = torch.tensor([[(7919 * i + 13) % n_vocab for i in range(N_PROMPT)]])
    with torch.inference_mode():
        for _ in range(N_GREEDY):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
        loss = float(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]))
    assert found.loss == pytest.approx(loss, abs=1e-4)
    assert found.loss_difference < 1e-4


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (t.Gemma2Config(**SHAPE, vocab_size=420, **WINDOWS), "no attention_softcap"),
        (t.MixtralConfig(**SHAPE, vocab_size=420, num_local_experts=2), "mixture of experts"),
    ],
    ids=["gemma2", "mixtral"],
)
def test_what_the_engine_does_not_compute_is_refused_by_name(tmp_path: Path, config: Any, named: str) -> None:
    _, run = imported(tmp_path, config, like_llama())
    with pytest.raises(UserError, match=named):
        export_html(run, tmp_path / "model.html")
