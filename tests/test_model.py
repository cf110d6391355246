"""The model against Hugging Face's with the same weights, and against typical mistakes in such models."""

import math
import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from gptworks.model.attention import AttentionInputs
from gptworks.model.block import Block
from gptworks.model.gpt import GPT, residual_projections
from gptworks.model.lab.stream import LabInputs
from gptworks.model.layers import MLP
from tiny import plain_model

SMALL: dict[str, Any] = {"vocab_size": 64, "context_length": 16, "n_layers": 2, "d_model": 32, "n_heads": 4}


def build(seed: int = 0, **settings: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(plain_model(**SMALL | settings))


def shake(model: torch.nn.Module) -> None:
    """Change every parameter randomly, so that norms are not 1, biases not 0, and logits of size 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def tokens(batch: int = 2, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------- against Hugging Face

RENAMED = (
    (r"^(model|transformer)\.", ""), (r"^embed_tokens|^wte", "token_embedding"), (r"^wpe", "position_embedding"),
    (r"^(layers|h)\.", "blocks."), (r"^ln_f", "norm"), (r"^lm_head", "untied_head"),
    (r"\binput_layernorm|\bln_1", "norm1"), (r"\bpost_attention_layernorm|\bln_2", "norm2"),
    (r"\bself_attn|\battn\b", "attention"), (r"\bq_norm", "query_norm"), (r"\bk_norm", "key_norm"),
    (r"\bq_proj", "query"), (r"\bk_proj", "key"), (r"\bv_proj", "value"), (r"\bo_proj|(?<=attention\.)c_proj", "out"),
    (r"\bgate_proj", "gate"), (r"\bup_proj|\bc_fc", "up"), (r"\bdown_proj|(?<=mlp\.)c_proj", "down"),
)  # fmt: skip


def weights_by_our_names(theirs: torch.nn.Module, tied: bool) -> dict[str, Tensor]:
    weights = {rename(name): value for name, value in theirs.state_dict().items()}
    if tied:
        del weights["untied_head.weight"]
    if isinstance(theirs, transformers.GPT2LMHeadModel):
        for name in [name for name in weights if ".attention." in name or ".mlp." in name]:
            value = weights.pop(name).T if name.endswith("weight") else weights.pop(name)  # Conv1D keeps [in, out]
            parts = ("query", "key", "value") if "c_attn" in name else ("",)
            weights |= {
                name.replace("c_attn", part): chunk for part, chunk in zip(parts, value.chunk(len(parts)), strict=True)
            }
    return weights


def rename(name: str) -> str:
    for theirs, ours in RENAMED:
        name = re.sub(theirs, ours, name)
    return name


LLAMA: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 16, "attn_implementation": "eager",
}  # fmt: skip
OURS: dict[str, Any] = {"n_layers": 3, "n_kv_heads": 2, "d_ff": 48, "position": "rope"}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
ROPE_500: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=16),
        {"n_layers": 3, "position": "learned", "mlp": "gelu_tanh"} | BIASES,
    ),
    "llama": (
        transformers.LlamaConfig(**LLAMA, **ROPE_500, rms_norm_eps=1e-6),
        OURS | {"norm": "rmsnorm", "norm_eps": 1e-6, "mlp": "swiglu", "tie_embeddings": False, "rope_theta": 500.0},
    ),
    "llama with geglu, biases and wide heads": (
        transformers.LlamaConfig(
            **LLAMA, hidden_act="gelu", attention_bias=True, mlp_bias=True, head_dim=12, tie_word_embeddings=True
        ),
        OURS | {"norm": "rmsnorm", "norm_eps": 1e-6, "mlp": "geglu", "d_head": 12} | BIASES,
    ),
    "qwen3": (
        transformers.Qwen3Config(**LLAMA, head_dim=10, rms_norm_eps=1e-5),
        OURS | {"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "d_head": 10, "tie_embeddings": False},
    ),
    "mistral with a window": (
        transformers.MistralConfig(**LLAMA, sliding_window=5, rms_norm_eps=1e-5),
        OURS | {"norm": "rmsnorm", "mlp": "swiglu", "window": 5, "tie_embeddings": False},
    ),
    **{
        f"starcoder2 with {mlp}": (
            transformers.Starcoder2Config(**LLAMA, hidden_act=hidden_act, use_bias=True, sliding_window=None),
            OURS | {"norm": "layernorm", "mlp": mlp} | BIASES,
        )
        for mlp, hidden_act in (("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu"), ("relu2", "relu2"))
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_hugging_face_with_the_same_weights(family: str) -> None:
    their_config, our_settings = FAMILIES[family]
    theirs, ours = transformers.AutoModelForCausalLM.from_config(their_config).eval(), build(**our_settings).eval()
    shake(theirs)
    ours.load_state_dict(weights_by_our_names(theirs, ours.config.tie_embeddings), strict=True)
    with torch.no_grad():
        expected = theirs(tokens()).logits
        torch.testing.assert_close(ours(tokens()), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1, "logits large enough for the tolerance to mean something"


# ------------------------------------------------------------------------------------- causality and positions


@pytest.mark.parametrize("position", ["learned", "rope", "none"])
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_a_token_changes_no_logits_before_it_and_changes_those_after(position: str, window: int | None) -> None:
    model = build(position=position, window=window).eval()
    shake(model)
    before, changed = tokens(1), tokens(1)
    changed[0, 7] = (changed[0, 7] + 1) % 64
    difference = (model(before) - model(changed)).abs().amax(-1)[0]
    assert not difference[:7].any()
    assert (difference[7:10] > 1e-4).all()


@torch.no_grad()
def test_a_window_ends_where_it_says() -> None:
    """Over L layers of window w, a token reaches the next L·(w − 1) positions and not one more."""
    model = build(window=3, position="learned").eval()
    shake(model)
    before, changed = tokens(1), tokens(1)
    changed[0, 2] = (changed[0, 2] + 1) % 64
    difference = (model(before) - model(changed)).abs().amax(-1)[0]
    assert (difference[2:7] > 0).all()
    assert not difference[7:].any()


@pytest.mark.parametrize(("position", "used"), [("learned", True), ("rope", True), ("none", False)])
@torch.no_grad()
def test_the_order_of_earlier_tokens_counts_where_positions_do(position: str, used: bool) -> None:
    """In one layer without positions, the last token sees the earlier ones as a set."""
    model = build(position=position, n_layers=1).eval()
    shake(model)
    swapped = tokens(1)
    swapped[0, [2, 9]] = swapped[0, [9, 2]]
    assert swapped[0, 2] != swapped[0, 9]
    difference = (model(tokens(1)) - model(swapped))[0, -1].abs().max().item()
    assert difference > 1e-4 if used else difference < 1e-5


@torch.no_grad()
def test_a_batch_is_its_rows() -> None:
    model = build().eval()
    rows = torch.cat([model(row[None]) for row in tokens(3)])
    torch.testing.assert_close(model(tokens(3)), rows, rtol=0, atol=1e-6)


def test_a_model_on_the_meta_device_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw would take a fifth of a millisecond, and a model with experts has thousands of matrices."""
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, *_, **__: drawn.append(tensor))
    with torch.device("meta"):
        model = GPT(plain_model(**SMALL))
    assert len(drawn) <= sum(isinstance(module, torch.nn.Embedding) for module in model.modules())


def test_heads_attend_separately() -> None:
    """With an identity after attention, changing one head's queries changes only that head's columns."""
    attention = build(attention_bias=False).blocks[0].attention
    x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attention.out.weight.copy_(torch.eye(32))
        before = attention(x, AttentionInputs())
        attention.query.weight[8:16] += 1.0  # head 1 of 4
        moved = (attention(x, AttentionInputs()) - before).abs().amax((0, 1)) > 0
    assert moved.tolist() == [False] * 8 + [True] * 8 + [False] * 16


def test_attention_mixes_positions_and_not_heads() -> None:
    """The first position sees only itself, so its attention output is its own value, projected."""
    attention = build().blocks[0].attention
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(attention(x, AttentionInputs())[:, 0], attention.out(attention.value(x[:, 0])))


def test_too_many_tokens_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit in a context of 16"):
        build()(tokens(1, 17))


def test_an_unknown_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        build(vocab_size=0)


# ------------------------------------------------------------------------------------------------ the tied head


def test_a_tied_head_is_the_embedding_and_collects_both_gradients() -> None:
    tied, untied = build(tie_embeddings=True), build(tie_embeddings=False)
    weights = tied.state_dict()
    assert not any("head" in name for name in weights), "one matrix, stored once"
    assert tied.head_weight is tied.token_embedding.weight
    untied.load_state_dict(weights | {"untied_head.weight": tied.token_embedding.weight.detach().clone()})
    for model in (tied, untied):
        model(tokens()).square().sum().backward()
    assert untied.untied_head is not None
    from_embedding, from_head = untied.token_embedding.weight.grad, untied.untied_head.weight.grad
    assert from_embedding is not None and from_head is not None
    assert from_embedding.any() and from_head.any()
    torch.testing.assert_close(tied.token_embedding.weight.grad, from_embedding + from_head)


def test_an_untied_head_is_a_matrix_of_its_own() -> None:
    model = build(tie_embeddings=False)
    assert model.head_weight.data_ptr() != model.token_embedding.weight.data_ptr()
    assert not torch.equal(model.head_weight, model.token_embedding.weight)


# ----------------------------------------------------------------------------------------------- initialization

WIDE: dict[str, Any] = {"vocab_size": 512, "d_model": 128, "n_layers": 3, "position": "learned", "context_length": 128}


def matrices(model: GPT) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.ndim == 2}


@pytest.mark.parametrize("init", ["normal", "gpt2", "xavier"])
def test_norms_start_at_one_and_every_shift_at_zero(init: str) -> None:
    model = build(init=init, attention_bias=True, mlp_bias=True, qk_norm=True)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            expected = 0.0 if name.endswith("bias") else 1.0
            assert (parameter == expected).all(), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_normal_draws_every_matrix_from_n_0_002(tied: bool, mlp: str) -> None:
    """For 16,384 numbers or more, the deviation's standard error is 0.6% and the mean's 0.8% of the deviation; 4 of
    these are allowed."""
    for name, weight in matrices(build(**WIDE, init="normal", tie_embeddings=tied, mlp=mlp)).items():
        assert weight.std().item() == pytest.approx(0.02, rel=0.024), name
        assert abs(weight.mean().item()) < 0.02 * 0.032, name
        assert weight.abs().max() > 0.02 * 3, f"{name} is not cut off"


def test_gpt2_scales_what_writes_to_the_residual_stream() -> None:
    model = build(**WIDE, init="gpt2")
    scaled = {id(projection.weight) for projection in residual_projections(model)}
    assert len(scaled) == 2 * 3
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            expected = 0.02 / math.sqrt(2 * 3) if id(parameter) in scaled else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.024), name
    assert all(name.endswith(("attention.out.weight", "mlp.down.weight")) for name, p in model.named_parameters()
               if id(p) in scaled)  # fmt: skip


def test_xavier_fills_each_matrix_to_its_own_bound() -> None:
    for name, weight in matrices(build(**WIDE, init="xavier", tie_embeddings=False)).items():
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.99 * bound < weight.abs().max() <= bound, name
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.024), name


@torch.no_grad()
def test_zero_initialized_projections_make_blocks_the_identity() -> None:
    model = build(zero_init_projections=True, position="learned", init="gpt2").eval()
    assert model.position_embedding is not None
    embedded = model.token_embedding(tokens()) + model.position_embedding.weight
    assert torch.equal(model(tokens()), model.logits(model.norm(embedded)))


@torch.no_grad()
def test_an_untrained_model_is_near_the_uniform_guess() -> None:
    """A loss at the start far from ln V is the first sign of a wrong initialization."""
    model = build(**WIDE, init="gpt2").eval()
    ids = torch.randint(512, (8, 128), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(512), abs=0.15)


# ------------------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("place", ["dropout_embedding", "dropout_attention", "dropout_residual", "dropout_mlp"])
@torch.no_grad()
def test_each_dropout_acts_in_training_and_nowhere_else(place: str) -> None:
    model, plain = build(**{place: 0.5}), build()
    plain.eval()
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), plain(tokens()))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu2", "swiglu"])
@torch.no_grad()
def test_mlp_dropout_acts_between_the_activation_and_the_down_projection(kind: str) -> None:
    """A down projection that copies the first channels shows whether they are dropped or doubled."""
    block = build(dropout_mlp=0.5, mlp=kind, d_ff=64, mlp_bias=False).blocks[0]
    mlp = block.mlp
    assert isinstance(mlp, MLP)
    mlp.down.weight.copy_(torch.eye(32, 64))
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    dropped, kept = mlp(x), mlp.eval()(x)
    assert (kept.abs() > 0).float().mean() > 0.4
    assert ((dropped == 0) | ((dropped - 2 * kept).abs() <= 1e-6)).all()
    assert 0.4 < (dropped == 0)[kept != 0].float().mean() < 0.6


@torch.no_grad()
def test_without_dropout_training_and_evaluation_agree() -> None:
    model = build()
    in_training = model(tokens())
    assert torch.equal(in_training, model.eval()(tokens()))


@torch.no_grad()
def test_embedding_dropout_acts_on_tokens_and_positions_together() -> None:
    """Blocks without effect leave the sum of both embeddings, with elements dropped or doubled."""
    model = build(dropout_embedding=0.5, zero_init_projections=True, position="learned")
    model.norm = torch.nn.Identity()
    assert model.position_embedding is not None
    embedded = model.token_embedding(tokens()) + model.position_embedding.weight
    out = model.features(tokens())
    assert ((out == 0) | (out == 2 * embedded)).all()
    assert 0.4 < (out == 0).float().mean() < 0.6


@pytest.mark.parametrize("silent", ["attention", "mlp"])
@torch.no_grad()
def test_residual_dropout_acts_on_what_each_branch_adds(silent: str) -> None:
    block = build(dropout_residual=0.5).blocks[0]
    assert isinstance(block, Block)
    (block.attention.out if silent == "attention" else block.mlp.down).weight.zero_()
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    branch = block.mlp(block.norm2(x)) if silent == "attention" else block.attention(block.norm1(x), AttentionInputs())
    added = block(x, AttentionInputs(), LabInputs())[0] - x
    kept = added.abs() > 1e-7
    torch.testing.assert_close(added[kept], 2 * branch[kept], rtol=1e-3, atol=1e-6)  # (x + a) − x rounds
    assert 0.4 < kept.float().mean() < 0.6


# ----------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@torch.no_grad()
def test_a_model_cast_to_bf16_stays_near_itself(norm: str) -> None:
    """bf16 has 8 bits: each of a few dozen roundings is at most 2⁻⁹, and they add up like noise."""
    model = build(norm=norm, qk_norm=True, mlp="swiglu").eval()
    exact = model(tokens())
    half = model.to(torch.bfloat16)(tokens())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() / exact.norm() < 0.02


def test_autocast_keeps_the_residual_stream_in_float32() -> None:
    model = build(norm="rmsnorm")
    seen: list[torch.dtype] = []
    hook = model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = model.features(tokens())
    hook.remove()
    assert (seen, features.dtype) == ([torch.float32], torch.bfloat16)


# ------------------------------------------------------------------------------- parallel residual, recomputation


@torch.no_grad()
def test_a_parallel_residual_reads_the_blocks_input_twice() -> None:
    block, x = build(parallel_residual=True).eval().blocks[0], torch.randn(2, 16, 32)
    assert isinstance(block, Block)
    expected = x + block.attention(block.norm1(x), AttentionInputs()) + block.mlp(block.norm2(x))
    torch.testing.assert_close(block(x, AttentionInputs(), LabInputs())[0], expected)


@pytest.mark.parametrize("n_experts", [0, 4])
@pytest.mark.parametrize("bf16", [False, True])
def test_recomputed_blocks_give_the_same_gradients_bit_for_bit(n_experts: int, bf16: bool) -> None:
    """With dropout: the random state of the first pass is restored for the second."""
    gradients = []
    for again in ("none", "selective", "block"):
        model = build(dropout_residual=0.2, dropout_attention=0.2, norm="rmsnorm", n_experts=n_experts)
        model.activation_checkpointing = again
        torch.manual_seed(3)
        routed: list[Tensor] = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model.logits(model.features(tokens(), router_logits=routed)).float().square().mean()
        assert len(routed) == (model.config.n_layers if n_experts else 0)
        (loss + sum(logits.square().mean() for logits in routed)).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert all(torch.equal(gradient, other[name]) for other in gradients[1:]), name


def test_recomputation_keeps_less() -> None:
    """With recomputation, autograd saves only each block's input."""
    kept = []
    for again in ("none", "selective", "block"):
        model = build(n_layers=6)
        model.activation_checkpointing = again
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.features(tokens())
        kept.append(sum(sizes))
    none, selective, block = kept
    assert block < none / 4
    assert selective == pytest.approx((none + block) / 2, rel=0.02)
