"""Settings of model/lab: each against its definition in float64, and properties that hold with any of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.describe.diagram import diagram
from gptworks.describe.page import to_html
from gptworks.describe.sheet import describe
from gptworks.errors import UserError
from gptworks.infer.backends.native import refusal
from gptworks.interop.gguf.architectures import choose_architecture
from gptworks.interop.huggingface.architectures import FAMILIES
from gptworks.model.gpt import GPT
from gptworks.planning.arrange import refusal as arrangement_refusal
from gptworks.planning.inference import weights_bytes
from gptworks.planning.params import count_parameters
from gptworks.quantize.convert import matrix_kinds, quantize_model, unpack_all
from gptworks.recipe import parse_recipe
from gptworks.training.optim.optimizer import parameter_groups
from test_equivalence import CONTEXT, Cached, assert_same, random_model, random_tokens
from tiny import plain_model, plain_training

SHAPE: dict[str, Any] = {
    "vocab_size": 29, "context_length": CONTEXT, "n_layers": 4, "d_model": 16, "n_heads": 4, "n_kv_heads": 2,
    "norm": "rmsnorm", "mlp": "swiglu", "d_ff": 24, "qk_norm": True,
}  # fmt: skip
ON: dict[str, dict[str, Any]] = {
    "unet_skips": {"unet_skips": True},
    "value_residual": {"value_residual": True},
    "value_embeddings": {"value_embeddings": ("none", "table"), "gate_channels": 6},
    "value_embeddings, projected": {"value_embeddings": ("projected", "none", "table")},
    "attention_gate": {"attention_gate": True},
    "smear": {"smear": True},
    "smear, some channels": {"smear": True, "gate_channels": 3},
    "attention_gate, some channels": {"attention_gate": True, "gate_channels": 5},
}
"""Each setting of the laboratory in the forms that it has; a key begins with its name."""
WHOLE: dict[str, Any] = {name: value for settings in ON.values() for name, value in settings.items()}
"""All of them at once."""


def double(settings: dict[str, Any], **more: Any) -> GPT:
    """Return a model in float64 with random parameters."""
    return random_model(plain_model(**SHAPE | settings | more)).double()


# ------------------------------------------------------------------------------------------- by their definitions


@torch.no_grad()
@pytest.mark.parametrize("n_layers", [4, 5])
@pytest.mark.parametrize("name", [*ON, "all"])
def test_the_model_is_its_definition(name: str, n_layers: int) -> None:
    config = plain_model(**SHAPE | (WHOLE if name == "all" else ON[name]) | {"n_layers": n_layers, "position": "none"})
    model = random_model(config).double()
    tokens = random_tokens(2, CONTEXT)
    torch.testing.assert_close(model(tokens), by_definition(model, tokens), rtol=0, atol=1e-11)


def by_definition(model: GPT, tokens: Tensor) -> Tensor:
    """Return the logits of a model with RMSNorm before each part, SwiGLU, QK-norm and no positions, computed from its
    weights by name."""
    c, w = model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}
    embedding = w["token_embedding.weight"][tokens]
    if c.smear:
        read = embedding[:, 1:, : len(w["smear.weight"])]
        gate = w["smear.scale"] / (1 + (-(read @ w["smear.weight"])).exp())
        embedding = torch.cat((embedding[:, :1], embedding[:, 1:] + gate[..., None] * embedding[:, :-1]), dim=1)
    x = embedding
    outputs: list[Tensor] = []
    first_values = None
    for layer in range(c.n_layers):
        here = {name.removeprefix(f"blocks.{layer}."): tensor for name, tensor in w.items()}
        if c.unet_skips and layer >= (c.n_layers + 1) // 2:
            x = x + here["skip.weight"].item() * outputs[c.n_layers - 1 - layer]
        inner = rms(x, here["norm1.weight"])
        q, k, v = (inner @ here[f"attention.{name}.weight"].T for name in ("query", "key", "value"))
        if c.value_residual:
            first_values = v if first_values is None else first_values
            if layer:
                own, first = here["values.scalars.weight"].tolist()
                v = own * v + first * first_values
        kind = c.value_embeddings[layer % len(c.value_embeddings)]
        if kind != "none":
            table = w.get(f"value_embeddings.{layer}.weight")
            added = embedding @ here["values.projection.weight"].T if table is None else table[tokens]
            gate = here["values.gating.weight"]
            opened = 2 / (1 + (-(inner[..., : gate.size(1)] @ gate.T)).exp())  # B T G
            v = v + opened.repeat_interleave(c.d_head, dim=-1) * added
        heads = []
        for head in range(c.n_heads):
            group = head * c.n_kv_heads // c.n_heads
            mine, shared = (slice(i * c.d_head, (i + 1) * c.d_head) for i in (head, group))
            query = rms(q[..., mine], here["attention.query_norm.weight"])
            key = rms(k[..., shared], here["attention.key_norm.weight"])
            scores = query @ key.transpose(1, 2) / c.d_head**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            y = scores.softmax(-1) @ v[..., shared]
            if c.attention_gate:
                gate = here["attention.gating.weight"][head]
                y = y / (1 + (-(inner[..., : len(gate)] @ gate)).exp())[..., None]
            heads.append(y)
        x = x + torch.cat(heads, -1) @ here["attention.out.weight"].T
        inner = rms(x, here["norm2.weight"])
        gate, up = (inner @ here[f"mlp.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ here["mlp.down.weight"].T
        outputs.append(x)
    return rms(x, w["norm.weight"]) @ w["token_embedding.weight"].T


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


# --------------------------------------------------------------------------------------------- whatever is on


def test_what_they_start_from() -> None:
    """Scalars start without effect, values as means, and gates half open or open."""
    torch.manual_seed(0)
    start = {name: tensor.tolist() for name, tensor in GPT(plain_model(**SHAPE | WHOLE)).named_parameters()}
    assert start["blocks.3.skip.weight"] == [1]
    assert set(start["smear.weight"]) == {0} and start["smear.scale"] == [0]
    assert start["blocks.1.values.scalars.weight"] == [0.5, 0.5] and "blocks.0.values.scalars.weight" not in start
    assert {x for row in start["blocks.0.attention.gating.weight"] for x in row} == {0}
    assert {x for row in start["blocks.0.values.gating.weight"] for x in row} == {0}


def test_tables_are_embeddings_and_not_what_a_token_is_multiplied_by() -> None:
    count, without = (count_parameters(plain_model(**SHAPE | on)) for on in (ON["value_embeddings"], {}))
    tables, gates = 2 * 29 * 2 * 4, 2 * 2 * 6
    assert count.embedding - without.embedding == tables and count.non_embedding - without.non_embedding == gates


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(CONTEXT,), (7, 1, 1, 6, 1, 8), (1,) * CONTEXT], ids=str)
@pytest.mark.parametrize("name", [*ON, "all"])
def test_cached_equals_uncached(name: str, chunks: tuple[int, ...]) -> None:
    model, tokens = double(WHOLE if name == "all" else ON[name], window=5), random_tokens(3, CONTEXT)
    cached = Cached(model, 3)
    cached.cache = type(cached.cache)(model.config, 3, CONTEXT, dtype=torch.float64)
    assert_same(torch.cat([cached(part) for part in tokens.split(chunks, dim=1)], dim=1), model(tokens))


@torch.no_grad()
@pytest.mark.parametrize("name", [*ON, "all"])
def test_rows_of_several_texts_are_the_texts_alone(name: str) -> None:
    model = double(WHOLE if name == "all" else ON[name])
    lengths = [9, 1, 14]
    row = random_tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model.logits(model.features(row, text_positions=positions))
    for part, text in zip(packed.split(lengths, dim=1), row.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(part, model(text), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["before", "after", "both"])
@pytest.mark.parametrize("again", ["block", "selective"])
def test_blocks_computed_again_give_the_same_gradients(again: str, kind: str) -> None:
    gradients = []
    for setting in ("none", again):
        model = random_model(plain_model(**SHAPE | WHOLE | {"norm_placement": kind})).train()
        model.activation_checkpointing = setting
        model(random_tokens(2, CONTEXT)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None and other is not None and one.abs().sum() > 0
        assert torch.equal(one, other)


def test_vectors_have_no_decay_and_muon_has_the_blocks_matrices_alone() -> None:
    model = GPT(plain_model(**SHAPE | WHOLE))
    groups = parameter_groups(dict(model.named_parameters()), plain_training(max_steps=1, optimizer="muon"))
    kind_of = {
        name: (kind, group["weight_decay"] > 0) for kind in groups for group in groups[kind] for name in group["names"]
    }
    assert kind_of["blocks.1.values.scalars.weight"] == ("adamw", False)


# ------------------------------------------------------------------------------------------- where it cannot be had


@pytest.mark.parametrize("name", ON)
def test_the_native_engine_and_tensor_parallelism_refuse_it_by_name(name: str) -> None:
    config = plain_model(**SHAPE | {"d_head": 16, "d_ff": 32} | ON[name])
    setting = name.partition(",")[0]
    assert refusal(GPT(config)) == f"it has no {setting}."
    tree: dict[str, Any] = {
        "model": config.model_dump(mode="json"), "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1, "batch_size": 2, "optimizer": "adamw", "parallel": {"tensor_parallel": 2}},
    }  # fmt: skip
    assert f"model.{setting}" in str(arrangement_refusal(parse_recipe(tree), 2))


def test_the_sheet_and_its_page_show_all_of_it() -> None:
    sheet = describe(plain_model(**SHAPE | WHOLE))
    assert sum(group.total for group in sheet.groups) == sheet.parameters.total
    page, drawing = to_html(sheet), "\n".join(diagram(sheet.config))
    words = ("its mirror", "first layer", "gate · token", "gate · projection", "gate of each head",
             "the token before")  # fmt: skip
    for one in words:
        assert one in drawing and one in page


@pytest.mark.parametrize("name", ON)
def test_no_format_of_others_holds_it(name: str) -> None:
    config: ModelConfig = plain_model(**SHAPE | ON[name])
    setting = name.partition(",")[0]
    assert all(setting in family.obstacles(config) for family in FAMILIES.values())
    with pytest.raises(UserError, match=f"model.{setting}="):
        choose_architecture(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unet_skips": True, "n_layers": 1}, "unet_skips=true and n_layers=1"),
        ({"value_residual": True, "n_layers": 1}, "value_residual=true and n_layers=1"),
        ({"value_embeddings": ("none", "table"), "n_layers": 1}, "all layers get `none`"),
        ({"gate_channels": 4}, "the model has no gate"),
        ({"attention_gate": True, "gate_channels": 17}, "more than d_model=16"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plain_model(**SHAPE | changes)


@torch.no_grad()
@pytest.mark.parametrize("settings", [WHOLE | {"bigram_vocab_size": 61}, {"layer_repeats": (1, 2, 1, 3)}])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_it_is_the_model_of_its_unpacked_weights_and_takes_the_planned_bytes(
    weights: Any, settings: dict[str, Any]
) -> None:
    model = random_model(plain_model(**SHAPE | settings | {"d_model": 64, "d_ff": 64}))
    tokens = random_tokens(4, CONTEXT)
    for calibration in ([], [tokens]):
        if calibration and weights == "int4" and "layer_repeats" in settings:
            continue  # is refused: tests/test_layer_repeats.py
        quantized = quantize_model(model, weights, calibration)
        held = quantized.state_dict()
        assert {tensor.dtype for name, tensor in held.items() if name.endswith("gating.weight")} <= {torch.float32}
        assert sum(tensor.nbytes for tensor in held.values()) == weights_bytes(count_parameters(model.config), weights)
        unpacked = GPT(model.config).eval()
        unpacked.load_state_dict(unpack_all(held, matrix_kinds(model, weights)))
        torch.testing.assert_close(quantized(tokens), unpacked(tokens), rtol=1e-4, atol=1e-4)
