"""The native step against the model's own forward pass: every variant, every kind of weights, texts in one batch.

Without a C++ compiler these tests are skipped; what is said then, is tested nonetheless.
"""

import itertools
import math
import mmap
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gptworks.choices import HeadWeights
from gptworks.errors import UserError
from gptworks.infer.backends import native
from gptworks.infer.backends.backend import Chunk, TorchBackend
from gptworks.infer.backends.placement import settle
from gptworks.kernels.build import Unavailable
from gptworks.kernels.library import library
from gptworks.model.gpt import GPT
from gptworks.quantize.convert import quantize_model
from hf import random_model
from test_stream import ON
from tiny import plain_model

CONTEXT, VOCABULARY = 64, 77  # no multiple of what a product takes at once

BASE: dict[str, Any] = {"vocab_size": VOCABULARY, "context_length": CONTEXT, "n_layers": 2, "d_model": 64, "n_heads": 4}

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {"position": "learned", "mlp": "gelu_tanh", "attention_bias": True, "mlp_bias": True},
    "gpt3, windowed": {"position": "learned", "mlp": "gelu", "window": 5, "window_pattern": ["full", "window"]},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 2, "tie_embeddings": False},
    "one key head, multipliers": {
        "norm": "rmsnorm",
        "mlp": "geglu",
        "n_kv_heads": 1,
        "mlp_bias": True,
        "d_ff": 80,
        "attention_bias": True,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "logit_divisor": 1.5,
    },
    "gemma3": {
        "norm": "rmsnorm",
        "mlp": "geglu_tanh",
        "qk_norm": True,
        "norm_placement": "both",
        "embedding_scale": 8.0,
        "residual_scale": 0.7,
        "window": 7,
        "window_pattern": ["window", "full"],
        "window_rope_theta": 500.0,
    },
    "pairs": {"bigram_vocab_size": 101, "embedding_scale": 2.0, "position": "learned"},
    "qwen3": {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 2, "qk_norm": True, "d_head": 32},
    "neox": {"mlp": "gelu", "parallel_residual": True, "rope_fraction": 0.25, "attention_bias": "out"},
    "modern": {"norm": "rmsnorm", "mlp": "relu2", "qk_norm": True, "norm_eps": 1e-6, "window": 9},
    "no positions": {"position": "none", "norm_bias": False, "attention_scale": 0.1, "attention_bias": "qkv"},
    "yarn, a layer not rotated": {
        "rope_scaling": {"type": "yarn", "factor": 4},
        "d_model": 128,
        "n_heads": 2,
        "rope_pattern": ["none", "rope"],
    },
    "narrow": {"d_model": 48, "n_heads": 3, "d_ff": 112, "mlp": "gelu"},
}


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    try:
        library()
    except Unavailable as error:
        pytest.skip(f"no native kernels here: {error}")


def variant(name: str, **changes: Any) -> GPT:
    return random_model(plain_model(**{**BASE, **VARIANTS[name], **changes}))


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def expected(model: GPT, ids: Sequence[int], n_logits: int) -> Tensor:
    """Return the logits of the model's forward pass without a cache, in float64."""
    return model.double()(torch.tensor([list(ids)]))[0, len(ids) - n_logits :].float()


def check(model: GPT, backend: native.NativeBackend, near: float, rounded: bool = False) -> None:
    """Check three texts of different lengths: started together, continued by one token, and by several.

    rounded: what is multiplied by a matrix is rounded to bf16. A number on the border of two may come out as the other
    one, and changes what follows: texts are near then, half of the rows to a thousandth, and one has met none.
    """
    differences = []
    texts = [text(1, 1), text(9, 2), text(30, 3)]
    double = copy_of(model)
    if rounded:
        for module in double.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, given: given[0].bfloat16().double())
        double.norm.register_forward_hook(lambda *given: given[-1].bfloat16().double())
    parts: list[tuple[int, int]] = [(0, len(ids)) for ids in texts]
    for n_new, n_logits in ((0, 1), (1, 1), (4, 3)):
        for i in range(3):
            if n_new:
                parts[i] = (len(texts[i]), n_new)
                texts[i] = texts[i] + text(n_new, 10 + n_new)
        chunks = [Chunk(i, parts[i][0], texts[i][parts[i][0] :], n_logits) for i in (2, 0, 1)]
        for chunk, logits in zip(chunks, backend.compute(chunks), strict=True):
            wanted = expected(double, texts[chunk.slot], n_logits)
            assert logits.shape == wanted.shape and logits.dtype == torch.float32
            largest = float(wanted.abs().max())
            torch.testing.assert_close(logits, wanted, rtol=0, atol=near * largest)
            differences += ((logits - wanted).abs().amax(-1) / largest).tolist()
    if rounded:
        assert median(differences) < 1e-3 and min(differences) < 1e-6


def copy_of(model: GPT) -> GPT:
    twin = GPT(model.config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


# ------------------------------------------------------------------------------------------------------ the same model


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_in_float32(name: str) -> None:
    model = variant(name)
    check(model, native.NativeBackend(model, 3, CONTEXT), near=3e-6)


@pytest.mark.parametrize("name", ["gpt3, windowed", "llama", "qwen3", "one key head, multipliers"])
def test_a_cache_in_int8_is_torchs(name: str) -> None:
    """Both round each vector to 255 levels; a few levels differ by one because the vectors' last bits do."""
    model, ids = variant(name), text(40)
    native_logits, torch_logits = (
        torch.cat(
            [backend.compute([Chunk(2, start, ids[start:end], end - start)])[0] for start, end in ((0, 33), (33, 40))]
        )
        for backend in (
            native.NativeBackend(model, 3, CONTEXT, dtype=torch.int8),
            TorchBackend(model, 3, CONTEXT, dtype=torch.int8),
        )
    )
    exact = expected(copy_of(model), ids, 40)
    error = float((torch_logits - exact).abs().mean())
    assert 0 < error < 0.01 * float(exact.abs().max())
    assert float((native_logits - torch_logits).abs().mean()) < 0.2 * error


class Packed(nn.Module):
    """A matrix in fewer bits, as in gptworks.quantize."""

    def __init__(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.scale, self.bias = weight, scale, bias


def packed(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return weight, scale, and the values that they represent by the definition of the format."""
    if kind in ("bf16", "fp16"):
        weight = matrix.to(torch.bfloat16 if kind == "bf16" else torch.float16)
        return weight, None, weight.float()
    if kind == "int8" or matrix.size(1) % 32:
        row_scale = matrix.abs().amax(1) / 127
        levels = (matrix / row_scale[:, None]).round()
        return levels.to(torch.int8), row_scale, levels * row_scale[:, None]
    groups = matrix.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(2) / 7.5).half()
    nibbles = ((groups / scale.float()[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8)
    weight = nibbles[..., :16] | nibbles[..., 16:] << 4
    return weight.flatten(1), scale, ((nibbles.float() - 8) * scale.float()[..., None]).flatten(1)


def pack(model: GPT, kind: str) -> GPT:
    """Return the model with packed matrices; `model` itself gets the values that they represent."""
    twin = copy_of(model)
    with torch.no_grad():
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear | nn.Embedding) and name != "position_embedding":
                weight, scale, value = packed(module.weight, kind)
                twin.set_submodule(name, Packed(weight, scale, getattr(twin.get_submodule(name), "bias", None)))
                module.weight.copy_(value)
    return twin


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "narrow"])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8", "int4"])
def test_packed_weights_compute_with_their_values(kind: str, name: str) -> None:
    check_packed(variant(name), kind)


def check_packed(model: GPT, kind: str) -> None:
    """Check a model with packed weights: 8-bit and 4-bit weights are multiplied by 16-bit activations (error about
    2⁻¹⁶), bf16 weights by bf16."""
    twin = pack(model, kind)
    rounded = kind == "bf16" and library().has_bf16_products
    near = {"bf16": 0.03 if rounded else 3e-6, "fp16": 3e-6, "int8": 3e-4, "int4": 3e-4}[kind]
    check(model, native.NativeBackend(twin, 3, CONTEXT, dtype=torch.float32), near, rounded)


def test_a_cache_in_bfloat16() -> None:
    model = variant("qwen3")
    check(model, native.NativeBackend(model, 3, CONTEXT, dtype=torch.bfloat16), near=0.02)


# ------------------------------------------------------------------------------------------------- what it promises


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    """Its bits are the same alone, among other rows, and in other chunks."""
    model = variant("llama")
    if kind != "fp32":
        model = pack(model, kind)
    backend = native.NativeBackend(model, 9, CONTEXT, dtype=torch.float32)
    ids = text(13)
    whole = backend.compute([Chunk(0, 0, ids, n_logits=13)])[0]
    single = torch.cat([backend.compute([Chunk(1, i, [token])])[0] for i, token in enumerate(ids)])
    assert torch.equal(single, whole)
    for i, token in enumerate(ids):
        others = [Chunk(slot, i, text(1 + (slot + i) % 3, seed=slot)) for slot in range(2, 9)]
        among = backend.compute([*others[: i % 7], Chunk(0, i, [token]), *others[i % 7 :]])[i % 7]
        assert torch.equal(among[0], whole[i])


def test_the_same_with_any_number_of_threads() -> None:
    model = pack(variant("gpt2"), "int8")
    backend = native.NativeBackend(model, 1, CONTEXT)
    ids = text(20)
    one = backend.compute([Chunk(0, 0, ids, 20)])[0]
    torch.set_num_threads(3)
    try:
        three = backend.compute([Chunk(0, 0, ids, 20)])[0]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, three)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_how_a_text_is_cut_changes_no_bit(kind: str) -> None:
    """Nor do other rows in the step; a long chunk takes several steps."""
    model = variant("gpt3, windowed", context_length=200, d_ff=592)
    if kind != "fp32":
        model = pack(model, kind)
    backend = native.NativeBackend(model, 3, 200)
    ids = text(150)
    whole = backend.compute([Chunk(0, 0, ids, 150)])[0]
    parts = []
    for i, (first, end) in enumerate(itertools.pairwise([0, 70, 71, 142, 145, 149, 150])):
        beside = [] if i % 2 else [Chunk(2, 0, text(90))]
        parts.append(backend.compute([*beside, Chunk(1, first, ids[first:end], end - first)])[-1])
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", ["gpt2", "one key head, multipliers"])
def test_features_of_a_text_are_the_models(name: str) -> None:
    """As for embeddings: a long text takes several steps, and no logits are computed."""
    model, ids = variant(name, context_length=200), text(150)
    backend = native.NativeBackend(model, 2, 200)
    with torch.inference_mode():
        wanted = copy_of(model).double().features(torch.tensor([ids]))[0].float()
    for n in (150, 1, 40):
        found = backend.read(ids[:n])
        torch.testing.assert_close(found, wanted[:n], rtol=0, atol=3e-6 * float(wanted.abs().max()))
    assert torch.equal(backend.read(ids[:40]), backend.read(ids)[:40])


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_few_rows_and_many_give_the_same_bits(kind: str) -> None:
    """Many rows are multiplied in panels of weights, the last of which may be narrower; few rows with the plain
    layout."""
    model = variant("llama", d_ff=112)
    if kind != "fp32":
        model = pack(model, kind)
    backend = native.NativeBackend(model, 2, CONTEXT, dtype=torch.float32)
    ids = text(57)
    single = torch.cat([backend.compute([Chunk(1, i, [token])])[0] for i, token in enumerate(ids)])
    for n in range(30, len(ids) + 1):  # the native code calls 32 many
        assert torch.equal(backend.compute([Chunk(0, 0, ids[:n], n)])[0], single[:n]), n


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("d_head", [48, 80])
def test_a_cache_in_bfloat16_however_a_text_is_cut(d_head: int, window: int | None) -> None:
    """The bits are the same for any chunks, although products may take pairs of positions or of elements; logits are
    near the model's."""
    model = random_model(plain_model(**{**BASE, "d_head": d_head, "n_kv_heads": 2, "n_layers": 1, "window": window}))
    ids, backend = text(60), native.NativeBackend(model, 2, 61, dtype=torch.bfloat16)
    whole = backend.compute([Chunk(0, 0, ids, 60)])[0]
    cuts = itertools.pairwise([0, 1, 2, 5, 9, 16, 17, 29, 32, 59, 60])
    parts = [backend.compute([Chunk(1, i, ids[i:j], j - i)])[0] for i, j in cuts]
    assert torch.equal(torch.cat(parts), whole)
    wanted = expected(copy_of(model), ids, 60)
    torch.testing.assert_close(whole, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.parametrize("n_logits", [0, 1, 64, 100])
def test_logits_of_a_long_chunk(n_logits: int) -> None:
    model = variant("qwen3", context_length=200)
    double, backend = copy_of(model), native.NativeBackend(model, 2, 200)
    ids = text(130)
    long, short = backend.compute([Chunk(1, 0, ids, n_logits), Chunk(0, 0, ids[:3])])
    wanted = expected(double, ids, n_logits)
    near = 3e-6 * float(expected(double, ids, 1).abs().max())
    torch.testing.assert_close(long, wanted, rtol=0, atol=near)
    torch.testing.assert_close(short, expected(double, ids[:3], 1), rtol=0, atol=near)


@pytest.mark.parametrize("head", ["int8", "int4"])
def test_a_quantized_model(head: HeadWeights) -> None:
    """The modules of gptworks.quantize, which torch runs with float32 activations."""
    model = quantize_model(variant("qwen3"), "int4", head=head)
    ids = text(50)
    logits = native.NativeBackend(model, 2, CONTEXT, dtype=torch.float32).compute([Chunk(1, 0, ids, 50)])[0]
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]))[0]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=3e-4 * float(wanted.abs().max()))


def test_rollback_and_copy() -> None:
    model = variant("modern")
    backend = native.NativeBackend(model, 2, CONTEXT)
    ids, other = text(20, 1), text(8, 2)
    plain = backend.compute([Chunk(0, 0, ids, 8)])[0]
    backend.compute([Chunk(0, 12, other)])  # drafts that are not accepted
    assert torch.equal(backend.compute([Chunk(0, 12, ids[12:], 8)])[0], plain)
    backend.copy(0, 1, 12)
    backend.compute([Chunk(0, 0, other)])
    assert torch.equal(backend.compute([Chunk(1, 12, ids[12:], 8)])[0], plain)


def test_capacity_bounds_a_slot() -> None:
    backend = native.NativeBackend(variant("gpt2"), 1, 16)
    assert backend.capacity == 16
    backend.compute([Chunk(0, 0, text(16))])
    with pytest.raises(AssertionError, match="17 tokens in a slot of 16"):
        backend.compute([Chunk(0, 16, [1])])


def test_large_numbers_keep_their_ratio() -> None:
    """An activation a thousand times the others leaves them 5 of 16 bits, which is still accurate enough."""
    model = variant("gpt2")
    twin = pack(model, "int8")
    for gpt in (model, twin):
        gpt.blocks[0].norm1.weight.data[3] = 1000.0  # type: ignore[union-attr]
    check(model, native.NativeBackend(twin, 3, CONTEXT, dtype=torch.float32), near=0.01)


# ------------------------------------------------------------------------------------------- what is no number


KINDS = ["fp32", "bf16", "fp16", "int8", "int4"]


def kept_as(kind: str, name: str = "qwen3") -> GPT:
    model = variant(name)
    return model if kind == "fp32" else pack(model, kind)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_with_nan_is_nan(kind: str, value: float) -> None:
    """One activation of each row is NaN or infinite: the first, one in the middle, or the last."""
    for place in (0, 17, 63):
        model = kept_as(kind)
        model.norm.weight.data[place] = value
        logits = native.NativeBackend(model, 1, CONTEXT).compute([Chunk(0, 0, text(5), 5)])[0]
        assert not logits.isfinite().any() if kind in ("int8", "int4") else not logits.isfinite().all()
        if math.isnan(value):
            assert logits.isnan().all()


@pytest.mark.parametrize("mlp", ["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8])
def test_nan_passes_through_activations_and_every_cache(cache: torch.dtype, mlp: str) -> None:
    """A NaN key of one text reaches all its later tokens, and no other text."""
    model = variant("qwen3", mlp=mlp)
    model.token_embedding.weight.data[3, 5] = float("nan")
    for block in model.blocks:
        block.attention.out.weight.data.mul_(0.1)  # type: ignore[union-attr]
    backend = native.NativeBackend(model, 2, CONTEXT, dtype=cache)
    clean = [token for token in text(20) if token != 3][:9]
    with_nan, without = backend.compute([Chunk(0, 0, [3, *clean], 10), Chunk(1, 0, clean, 9)])
    assert with_nan.isnan().all()
    assert without[:, [i for i in range(VOCABULARY) if i != 3]].isfinite().all()  # the head is the embedding


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 5])
def test_nan_reaches_no_token_that_does_not_see_it(window: int | None, value: float, cache: torch.dtype) -> None:
    """Neither earlier tokens nor those past its window, although they are computed together with it."""
    model = variant("llama", n_layers=1, window=window)
    model.token_embedding.weight.data[3, 5] = value
    ids = [token for token in text(45) if token != 3][:30]
    backend = native.NativeBackend(model, 2, CONTEXT, dtype=cache)
    for place in (9, 10, 11):
        others = [*range(place), *(range(place + 5, 30) if window else ())]
        clean, spoiled = (
            backend.compute([Chunk(0, 0, [*ids[:place], token, *ids[place + 1 :]], 30)])[0] for token in (ids[place], 3)
        )
        assert torch.equal(spoiled[others], clean[others])
        assert spoiled[[i for i in range(30) if i not in others]].isnan().all()


# ------------------------------------------------------------------------------------------------- what it is given


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("int8", lambda module: setattr(module, "scale", module.scale.to(torch.uint8))),
        ("int8", lambda module: setattr(module, "scale", module.scale.half())),
        ("int8", lambda module: setattr(module, "scale", module.scale[:-1])),
        ("int8", lambda module: setattr(module, "scale", None)),
        ("int4", lambda module: setattr(module, "scale", module.scale.float())),
        ("int4", lambda module: setattr(module, "scale", module.scale[:, :0])),
        ("int4", lambda module: setattr(module, "weight", module.weight[:, :-1])),
        ("bf16", lambda module: setattr(module, "weight", module.weight[:-1])),
        ("bf16", lambda module: setattr(module, "weight", module.weight.T)),
    ],
)
def test_tensors_that_would_be_read_beyond_their_end_are_refused(kind: str, change: Callable[[Any], None]) -> None:
    model = kept_as(kind)
    change(model.blocks[1].mlp.up)  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="the native kernels need"):
        native.NativeBackend(model, 1, CONTEXT)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(0, 0, [VOCABULARY]), Chunk(0, 0, [-1]), Chunk(1, 0, [1]), Chunk(-1, 0, [1]), Chunk(0, -1, [1]),
    ],
)  # fmt: skip
def test_tokens_and_slots_that_do_not_exist_are_refused(chunk: Chunk) -> None:
    with pytest.raises(IndexError, match="must be from 0 to"):
        native.NativeBackend(variant("gpt2"), 1, CONTEXT).compute([chunk])


def test_weights_are_in_large_pages_if_the_kernel_grants_them() -> None:
    """According to the operating system, 16 MiB contain at least 7 whole pages of 2 MiB."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text(encoding="ascii"):
        pytest.skip("this system grants no transparent huge pages (/sys/kernel/mm/transparent_hugepage/enabled)")
    free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    if free is None or int(free[1]) < 2**20:
        pytest.skip("too little memory is free for large pages")
    modules = [nn.Embedding(2**21, 1), nn.Embedding(2**20, 2)]
    before = [module.weight.detach().clone() for module in modules]
    settle(modules, {})
    assert all(torch.equal(module.weight, weight) for module, weight in zip(modules, before, strict=True))
    if not (large := large_page_bytes(modules[0].weight.data_ptr() + 8 * 2**20)):
        block = mmap.mmap(-1, 16 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(mmap.MADV_HUGEPAGE)
        block.write(bytes(16 * 2**20))
        start = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
        if not large_page_bytes(start + 8 * 2**20):
            pytest.skip("this system gives no large pages to anyone now: its memory is in pieces")
    assert large >= 7 * 2 * 2**20


def large_page_bytes(address: int) -> int:
    """Return AnonHugePages of the mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


# ------------------------------------------------------------------------------------------------- where it is not had


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"n_experts": 4}, "mixture of experts"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic rotary scaling"),
        ({"norm_placement": "after"}, "no norms after attention and MLP alone"),
        ({"logit_softcap": 30.0}, "no logit_softcap"),
        ({"attention_softcap": 30.0}, "no attention_softcap"),
        ({"layer_repeats": 2}, "no layer_repeats"),
        ({"qk_norm": "whole"}, "no norm over all heads together"),
        ({"d_head": 24}, "d_head=24 is not a multiple of 16"),
        ({"d_ff": 100}, "d_ff=100 is not a multiple of 16"),
        *((settings, f"no {name.partition(',')[0]}") for name, settings in ON.items()),
    ],
)
def test_models_that_are_refused_are_computed_by_torch(
    settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = random_model(plain_model(**{**BASE, **settings})), text(30)
    monkeypatch.setattr(native, "_warned", set())
    with pytest.raises(UserError, match=f"backend=native cannot compute this model here: .*{reason}"):
        native.choose_backend(model, 1, CONTEXT, name="native")
    with pytest.warns(UserWarning, match=f"the native engine is not used: .*{reason}.* torch computes instead"):
        backend = native.choose_backend(model, 1, 30)
    logits = [backend.compute([Chunk(0, i, [token])])[0] for i, token in enumerate(ids)]
    if "rope_scaling" not in settings:  # by the room, tests/test_backend.py
        torch.testing.assert_close(torch.cat(logits), expected(model, ids, 30), rtol=1e-4, atol=1e-4)
