"""Inspecting a model, against transformers' own attentions and hidden states, float64 sums, and plain Python."""

import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import hf
import tiny
from gptworks.checkpoint import load_run
from gptworks.config import CharTokenizer, ModelConfig
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.evaluation.evaluated_run import EvaluatedRun
from gptworks.evaluation.text import evaluate_text
from gptworks.infer.engine import Engine
from gptworks.interop.huggingface import import_huggingface
from gptworks.interpret import ngrams
from gptworks.interpret import record as recording_module
from gptworks.interpret.attribution import attribute
from gptworks.interpret.checkpoints import chosen_steps, learned_at
from gptworks.interpret.lens import logit_lens
from gptworks.interpret.ngrams import find_ngrams
from gptworks.interpret.record import Recording, record
from gptworks.interpret.text import TokenizedText, along, segments
from gptworks.model.gpt import GPT
from gptworks.tokenizer import load_tokenizer, train_tokenizer
from gptworks.training.checkpoint_files import save_checkpoint

BYTES = hf.byte_tokenizer("<|endoftext|>")
TEXT = "The naïve café, née 1899 — “quoted”; 日本語 and more.\n\n" * 3

SHAPE: dict[str, Any] = {"vocab_size": hf.VOCABULARY, "context_length": 64, "n_layers": 3, "d_model": 32, "n_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"position": "learned", "norm": "layernorm", "attention_bias": True, "mlp_bias": True, "mlp": "gelu",
             "qk_norm": False},
    "grouped, windows, rotated in part": {"n_kv_heads": 2, "window": 7, "window_pattern": ("window", "full"),
                                          "rope_fraction": 0.5, "window_rope_theta": 100.0},
    "capped between two norms": {"norm_placement": "both", "attention_softcap": 5.0, "logit_softcap": 4.0,
                                 "n_kv_heads": 2, "embedding_scale": 3.0},
    "norms behind, with shifts": {"norm_placement": "after", "norm": "layernorm", "qk_norm": "whole"},
    "parallel, scaled": {"parallel_residual": True, "residual_scale": 0.4, "logit_divisor": 3.0, "norm": "layernorm",
                         "attention_scale": 0.3, "tie_embeddings": False},
    "experts": {"n_experts": 4, "n_experts_per_token": 2, "d_ff": 24, "d_ff_shared": 16, "position": "none"},
    "skips, gates": {"unet_skips": True, "attention_gate": True, "smear": True, "position": "learned"},
    "token pairs": {"bigram_vocab_size": 30, "position": "learned"},
    "long": {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "d_head": 12},
}  # fmt: skip


def model_of(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> GPT:
    return hf.random_model(ModelConfig(**SHAPE | KINDS[kind] | more)).to(dtype)


def ids_of(length: int = 40, seed: int = 0) -> np.ndarray:
    return hf.tokens(1, length, seed)[0].numpy()


# ------------------------------------------------------------------------------- attention, lens and attribution


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_parts_make_what_the_model_computes(kind: str) -> None:
    """In float64: weights times values equal attention's output, the lens of the last layer equals the prediction, and
    the parts add up to the logit."""
    model, ids = model_of(kind, torch.float64), ids_of()
    rows = [0, 5, 39]
    found = record(model, ids, rows)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None])[0, rows]
        torch.testing.assert_close(model.logits(found.features), logits, rtol=0, atol=1e-12)
    check_attention(model, found)
    targets = [3, 7, 11]
    guesses = logit_lens(model, found, targets, n_top=4)
    assert len(guesses) == model.config.n_layers + 1
    for guess, row, target in zip(guesses[-1], logits.float().softmax(-1), targets, strict=True):
        best = row.topk(4)
        assert guess.probability == pytest.approx(row[target].item(), rel=1e-6)
        assert [i for i, _ in guess.top] == best.indices.tolist() and guess.rank == int((row > row[target]).sum()) + 1
    for i, row in enumerate(logits):
        for token, against in ((17, None), (17, 200)):
            one = attribute(model, found, i, token, against)
            whole = row[token] if against is None else row[token] - row[against]
            assert one.capped_logit == pytest.approx(whole.item(), abs=1e-9)
            assert sum(part.value for part in one.parts) == pytest.approx(one.logit, abs=1e-9)
            if model.config.logit_softcap is None:
                assert one.logit == pytest.approx(one.capped_logit, abs=1e-9)
            heads = [part for part in one.parts if part.kind == "head"]
            assert len({(part.layer, part.head) for part in heads}) == len(heads) == 12


def check_attention(model: GPT, found: Recording) -> None:
    """Check that attention weights times the model's own values, projected, equal the output of its attention."""
    config = model.config
    torch.testing.assert_close(found.weights.sum(-1), torch.ones_like(found.weights[..., 0]))
    everything = record(model, found.ids, range(len(found.ids)))
    for i, block in enumerate(recording_module.blocks_of(model)):
        stream = everything.residual[i][None]
        if block.skip is not None:
            stream = stream + block.skip.weight * everything.residual[config.n_layers - i]
        read = stream if config.norm_placement == "after" else block.norm1(stream)
        v = block.attention.value(read).unflatten(-1, (-1, config.d_head)).transpose(1, 2)
        v = v.repeat_interleave(config.n_heads // config.n_kv_heads, dim=1)[0]  # H S D
        gates = None if block.attention.gating is None else block.attention.gating(read)[0].unsqueeze(-1)  # S H 1
        heads = (everything.weights[i] @ v).transpose(0, 1)  # S H D
        mixed = (heads if gates is None else heads * gates).flatten(1)
        torch.testing.assert_close(mixed, everything.mixed[i], rtol=0, atol=1e-12)
        torch.testing.assert_close(block.attention.out(mixed), everything.attention[i], rtol=0, atol=1e-12)
        torch.testing.assert_close(found.weights[i], everything.weights[i][:, list(found.rows)], rtol=0, atol=1e-12)
        if (window := config.layer_window(i)) is not None:
            assert everything.weights[i][:, 39, : 40 - window].abs().max() == 0
            assert everything.weights[i][:, 39, 40 - window].min() > 0


@pytest.mark.parametrize(
    "theirs",
    [
        t.GPT2Config(vocab_size=hf.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None,
                     eos_token_id=None),
        t.LlamaConfig(vocab_size=hf.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64, bos_token_id=None,
                      eos_token_id=None),
    ],
    ids=["gpt2", "llama"],
)  # fmt: skip
def test_attention_and_hidden_states_are_those_of_transformers(theirs: Any, tmp_path: Path) -> None:
    model = hf.save_theirs(tmp_path / "theirs", theirs)
    import_huggingface(tmp_path / "theirs", tmp_path / "run")
    ours, ids = load_run(tmp_path / "run").model, ids_of()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.from_numpy(ids)[None], output_attentions=True, output_hidden_states=True)
    found = record(ours, ids, range(len(ids)))
    torch.testing.assert_close(found.weights, torch.cat(out.attentions), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.residual[:-1], torch.cat(out.hidden_states[:-1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.features, out.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        last = model.base_model.ln_f if hasattr(model.base_model, "ln_f") else model.base_model.norm
        expected = model.lm_head(last(out.hidden_states[1][0])).softmax(-1)  # after the first block
    guesses = logit_lens(ours, found, ids.tolist())[1]
    assert [guess.top[0][0] for guess in guesses] == expected.argmax(-1).tolist()
    assert [guess.probability for guess in guesses] == pytest.approx(
        expected[range(len(ids)), ids].tolist(), rel=1e-3, abs=1e-7
    )


def test_what_is_too_much_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("gpt2"), ids_of()
    monkeypatch.setattr(recording_module, "MOST_NUMBERS", 20_000)
    with pytest.raises(UserError, match=r"40 positions of 40 tokens .* choose 23 positions"):
        record(model, ids, range(40))
    record(model, ids, range(23))
    with pytest.raises(UserError, match="ids go from 0 to 259"):
        attribute(model, record(model, ids, [1]), 0, hf.VOCABULARY)
    with pytest.raises(UserError, match="token id 260"):
        record(model, np.array([1, 260]), [0])


def test_work_ends_between_blocks_and_leaves_the_model_as_it_was() -> None:
    model, ids, calls = model_of("gpt2"), ids_of(), []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        record(model, ids, [3], stop)
    assert len(calls) == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_another_thread_that_computes_the_model_is_not_recorded() -> None:
    model, ids, others = model_of("gpt2"), ids_of(), hf.tokens(1, 30, seed=9)
    alone, guesses = record(model, ids, [3]), []

    def generates() -> None:
        with torch.no_grad():
            guesses.append(model(others))

    def check() -> None:
        thread = threading.Thread(target=generates)
        thread.start()
        thread.join()

    found = record(model, ids, [3], check)
    assert len(guesses) == 3 and torch.equal(found.residual, alone.residual) and found.weights.shape == (3, 4, 1, 40)


# ------------------------------------------------------------------------------------------------------- texts


def test_tokens_cost_what_evaluate_and_score_say() -> None:
    model = model_of("gpt2", context_length=32, vocab_size=257, d_model=64)  # the native engine computes it too
    text = TokenizedText.of_text(BYTES, TEXT)
    nats = text.token_nats(model)
    whole = evaluate_text(model, BYTES, TEXT).report
    assert math.isnan(nats[0]) and nats[1:].sum() == pytest.approx(whole.total_nats, rel=1e-9)
    assert text.predicted_bytes == whole.text_bytes and "".join(text.pieces) == TEXT
    short = TokenizedText.of_text(BYTES, TEXT[:20])
    scored = Engine(model, BYTES).score(short.ids.tolist())
    assert short.token_nats(model)[1:] == pytest.approx([-one.logprob for one in scored[1:]], rel=1e-4, abs=1e-5)
    for index in (1, 31, 32, 33, 48, 49, 100, text.n_tokens - 1):  # in the window that its cost was counted in
        start, end = text.window(32, index)
        assert start < index <= end and end - start <= 32 and (start == 0 or index - start > 16)
        found = record(model, text.ids[start:end], [index - 1 - start])
        probability = logit_lens(model, found, [int(text.ids[index])])[-1][0].probability
        assert -math.log(probability) == pytest.approx(nats[index], rel=1e-4)
    parts = along(text, nats, 7)
    assert sum(part.nats for part in parts) == pytest.approx(whole.total_nats, rel=1e-9)
    assert sum(part.text_bytes for part in parts) == whole.text_bytes and len(parts) == 7
    with pytest.raises(UserError, match="token 0 is not predicted"):
        text.window(32, 0)
    with pytest.raises(UserError, match="empty"):
        TokenizedText.of_text(BYTES, "")


@pytest.mark.parametrize("framed", [True, False])
def test_two_tokenizers_share_the_smallest_parts_of_a_text(framed: bool) -> None:
    """Bytes against words of several characters: each part has the sum of its tokens' nats, and none is lost."""
    ours = BYTES if framed else hf.byte_tokenizer()
    characters = train_tokenizer(CharTokenizer(type="char"), iter([TEXT]))
    mine, theirs = TokenizedText.of_text(ours, TEXT), TokenizedText.of_text(characters, TEXT)
    chance = np.random.default_rng(0)
    nats, other = (np.array([math.nan, *chance.random(one.n_tokens - 1)]) for one in (mine, theirs))
    parts = segments(mine, nats, theirs, other)
    assert [part.text for part in parts] == list(TEXT)
    assert (parts[0].nats is None) == (not framed)
    total = sum(part.nats for part in parts[not framed :])
    assert total == pytest.approx(np.nansum(nats), rel=1e-9)
    assert sum(part.other_nats or 0 for part in parts) == pytest.approx(np.nansum(other), rel=1e-9)
    for part in parts:
        assert (
            "".join(mine.pieces[slice(*part.tokens)]) == part.text == "".join(theirs.pieces[slice(*part.other_tokens)])
        )
    same = segments(mine, nats, mine, nats)
    assert [part.tokens for part in same] == [(i, i + 1) for i in range(mine.n_tokens)]
    with pytest.raises(UserError, match="different texts"):
        segments(mine, nats, TokenizedText.of_text(ours, TEXT[1:]), nats)


def test_documents_of_the_validation_split_cost_what_their_text_costs(trained_run: Path) -> None:
    run = EvaluatedRun(trained_run, precision="fp32")
    shards = TokenShards(run.prepared.folder, "validation")
    document = TokenizedText.of_document(run.tokenizer, shards, 0)
    context = run.model.config.context_length
    scored = run.engine.score(document.ids[: context + 1].tolist())
    found = document.token_nats(run.model)[1 : context + 1]
    assert found == pytest.approx([-one.logprob for one in scored[1:]], rel=1e-3, abs=1e-4)
    assert "".join(document.pieces) == run.tokenizer.decode(document.ids.tolist())
    assert document.n_tokens == shards.n_tokens and not document.framed  # the end of a text that training began
    with pytest.raises(UserError, match=rf"which has {shards.n_documents}, numbered from 0"):
        TokenizedText.of_document(run.tokenizer, shards, shards.n_documents)
    with pytest.raises(UserError, match="no tokens to read"):
        TokenizedText.of_tokens(run.tokenizer, [])


# ------------------------------------------------------------------------------- training data and checkpoints


class Given:
    """Tokens in memory."""

    split = "train"

    def __init__(self, tokens: Any) -> None:
        self.tokens, self.n_tokens = np.asarray(tokens, dtype=np.int64), len(tokens)

    def read(self, start: int, length: int) -> Any:
        assert 0 <= start <= start + length <= self.n_tokens
        return self.tokens[start : start + length]


@pytest.mark.parametrize("seed", range(4))
def test_ngrams_are_counted_as_plain_python_counts_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "_PIECE_TOKENS", 37)
    chance = np.random.default_rng(seed)
    data, text = chance.integers(0, 3, 500).tolist(), chance.integers(0, 3, 20).tolist()
    if seed == 3:
        text = data[30:50]  # over the border of two pieces
    found = find_ngrams(Given(data), text, n_next=3, most_places=4, most_tokens=450)
    assert found.searched_tokens == 450
    for gram in found.by_length:
        before = text[len(text) - gram.n : -1]
        ends = [i for i in range(gram.n - 1, 450) if data[i - gram.n + 1 : i] == before]
        after = Counter(data[i] for i in ends)
        assert gram.n_contexts == len(ends) and gram.n_followed == after[text[-1]]
        assert sorted(gram.next_tokens) == sorted(after.items())
    last = found.longest
    assert last == (16 if seed == 3 else last) and found.by_length[last - 1].n_followed
    wanted = text[-last:]
    assert list(found.places) == [i for i in range(450 - last + 1) if data[i : i + last] == wanted][:4]
    assert find_ngrams(Given(data), [*text, 9]).longest == 0 and not find_ngrams(Given(data), [9]).places


def test_a_text_through_the_checkpoints_of_a_run(trained_run: Path, tmp_path: Path) -> None:
    made = load_run(trained_run)
    tokenizer = load_tokenizer(trained_run / "tokenizer")
    run = hf.make_run(tmp_path / "run", hf.random_model(made.model.config), tokenizer)  # its step 7
    save_checkpoint(run, 20, made.model.state_dict(), {}, {})
    text = TokenizedText.of_text(tokenizer, tiny.TEXT[:200])
    steps = chosen_steps(run)
    assert steps == [7, 20]
    found = [text.token_nats(load_run(run, str(step)).model) for step in steps]
    assert found[1][1:] == pytest.approx(text.token_nats(made.model)[1:], rel=1e-6)
    assert np.nansum(found[1]) < np.nansum(found[0])
    assert chosen_steps(run, most=2) == [7, 20]


def test_a_token_is_learned_when_its_probability_stays() -> None:
    steps = [0, 10, 20, 30, 40]
    assert learned_at(steps, [0.9, 0.1, 0.6, 0.5, 0.9]) == 20
    assert learned_at(steps, [0.9, 0.9, 0.9, 0.9, 0.4]) is None
    assert learned_at(steps, [0.2, 0.3, 0.3, 0.3, 0.3], threshold=0.3) == 10
    assert learned_at(steps, [math.nan] * 5) is None, "a token that is not predicted, as the first of a text"
