"""What the page of a model looks into, in Node: what `gptworks.interpret` finds in the same model."""

from typing import Any

import numpy as np
import pytest
import torch

import tiny
from gptworks.interop.html_file.exporting import shape_of
from gptworks.interop.html_file.image import make_image
from gptworks.interpret.attribution import attribute
from gptworks.interpret.record import blocks_of, record
from gptworks.kernels import wasm
from gptworks.model.gpt import GPT
from test_html_file import JS, in_node, needs_node

T = 37  # more than two steps of the kernels
IDS = np.arange(T) ** 2 * 7 % 61
ROWS, OF = [0, 20, T - 1], 11
NEAR = {"rtol": 2e-4, "atol": 2e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "like-gpt2": {
        "position": "learned", "norm": "layernorm", "norm_bias": True, "attention_bias": True, "mlp_bias": True,
        "mlp": "gelu", "tie_embeddings": True,
    },
    "like-llama": {
        "position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "n_heads": 4, "n_kv_heads": 2, "d_head": 16,
        "qk_norm": True, "window": 16, "window_pattern": ["window", "full"], "tie_embeddings": False,
    },
    "token-pairs": {"bigram_vocab_size": 64, "position": "learned", "n_heads": 2},
    "parallel": {
        "position": "rope", "norm": "layernorm", "mlp": "relu2", "parallel_residual": True, "embedding_scale": 3.0,
        "residual_scale": 0.5, "logit_divisor": 2.0, "n_heads": 2,
    },
    "gemma3-and-pairs": {
        "position": "rope", "norm": "rmsnorm", "mlp": "geglu_tanh", "norm_placement": "both", "attention_bias": True,
        "residual_scale": 0.5, "bigram_vocab_size": 40, "qk_norm": True, "window": 16,
        "window_pattern": ["window", "full"], "window_rope_theta": 500.0,
    },
    "norms-after": {"norm": "layernorm", "norm_bias": True, "norm_placement": "both", "position": "learned"},
}  # fmt: skip
TRACE = f"""
import {{ writeFileSync }} from "node:fs";
import {{ Engine }} from "{JS / "engine.js"}";
import {{ Trace }} from "{JS / "trace.js"}";
const T = given.ids.length;
const found = {{}};
for (const {{ name, model, module, image }} of given.models) {{
  const engine = await Engine.load(readFileSync(module), model, (memory, at) =>
    new Uint8Array(memory.buffer).set(readFileSync(image), at));
  const trace = await Trace.read(engine, given.ids, () => {{}});
  const layers = [...Array(model.shape.n_layers).keys()];
  const put = (what, arrays) => writeFileSync(`${{image}}-${{what}}`, Buffer.concat(arrays.map((one) =>
    Buffer.from(one.buffer, one.byteOffset, one.byteLength))));
  put("stream", [...layers.flatMap((l) => [2 * l, 2 * l + 1]), 2 * layers.length].map((i) => trace.stream(i)));
  put("attention", layers.map((l) => trace.attention(l)));
  put("neurons", layers.map((l) => trace.neurons(l)));
  put("lens", layers.flatMap((l) => given.rows.map((t) => trace.lens(2 * l + 2, t))));
  const logits = trace.logits(T - 1);
  const again = await engine.read(given.ids);
  const tail = await Trace.read(engine, given.ids, () => {{}}, 20);
  const equal = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);
  found[name] = {{
    tail: equal(tail.stream(3), trace.stream(3).subarray(20 * model.shape.d_model))
      && layers.every((l) => equal(tail.weightsOf(l, 1, 30), trace.weightsOf(l, 1, 30)))
      && equal(tail.logits(25), trace.logits(25)),
    same: logits.every((x, i) => x === again[i]), logit: logits[given.of],
    byHead: trace.byHead(T - 1, given.of), parts: trace.parts(T - 1, given.of),
  }};
}}
console.log(JSON.stringify(found));
"""


def model_of(settings: dict[str, Any]) -> GPT:
    """Return a model with random weights, biases too, in evaluation mode."""
    torch.manual_seed(5)
    model = GPT(
        tiny.plain_model(vocab_size=61, context_length=64, n_layers=2, d_model=32, **({"n_heads": 2} | settings))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[GPT, Any, dict[str, Any]]]:
    """Each model, what Node says of it, and the arrays of its trace."""
    folder = tmp_path_factory.mktemp("trace")
    (folder / "module").write_bytes(wasm.module())
    models, given = {name: model_of(settings) for name, settings in SHAPES.items()}, []
    for name, model in models.items():
        image = make_image(model, 64, torch.float32)
        (folder / name).write_bytes(b"".join(image.content()))
        about = {
            "vocabulary": 61, "capacity": 64, "model": image.model, "pointers": image.pointers,
            "n_room": image.n_room, "shape": shape_of(model),
        }  # fmt: skip
        given.append({"name": name, "model": about, "module": str(folder / "module"), "image": str(folder / name)})
    answers = in_node(folder, TRACE, {"models": given, "ids": IDS.tolist(), "rows": ROWS, "of": OF})
    names = ("stream", "attention", "neurons", "lens")
    return {
        name: (model, answers[name], {one: np.fromfile(f"{folder / name}-{one}", np.float32) for one in names})
        for name, model in models.items()
    }


@needs_node
@pytest.mark.parametrize("name", SHAPES)
def test_a_trace_has_what_the_model_computes(traced: Any, name: str) -> None:
    model, answer, found = traced[name]
    said = record(model, IDS, range(T))
    config, n_layers = model.config, model.config.n_layers
    stream = found["stream"].reshape(2 * n_layers + 1, T, config.d_model)
    np.testing.assert_allclose(stream[::2], said.residual.numpy(), **NEAR)
    norms = [getattr(block, "norm1_after", torch.nn.Identity()) for block in blocks_of(model)]
    with torch.inference_mode():
        added = torch.stack([norm(one) for norm, one in zip(norms, said.attention, strict=True)])
    after_attention = said.residual[:-1] + config.residual_scale * added
    np.testing.assert_allclose(stream[1::2], after_attention.numpy(), **NEAR)
    np.testing.assert_allclose(found["attention"].reshape(said.weights.shape), said.weights.numpy(), **NEAR)
    for layer, block in enumerate(blocks_of(model)):
        neurons = torch.from_numpy(found["neurons"].reshape(n_layers, T, config.d_ff)[layer])
        np.testing.assert_allclose(block.mlp.down(neurons).detach().numpy(), said.mlp[layer].numpy(), **NEAR)
    with torch.inference_mode():
        logits = model.logits(model.feature_scale(model.norm(said.residual[1:, ROWS])))
    np.testing.assert_allclose(found["lens"].reshape(logits.shape), logits.numpy(), **NEAR)
    assert answer["same"], "the logits of a text that is read without a trace"
    assert answer["tail"], "the last tokens alone are traced the same"


@needs_node
@pytest.mark.parametrize("name", SHAPES)
def test_parts_add_up_to_the_logit(traced: Any, name: str) -> None:
    model, answer, _ = traced[name]
    made = attribute(model, record(model, IDS, [T - 1]), 0, OF)
    wanted = [(one.kind, one.layer, one.head) for one in made.parts]
    assert [(one["kind"], one["layer"], one["head"]) for one in answer["byHead"]] == wanted
    np.testing.assert_allclose([one["value"] for one in answer["byHead"]], [one.value for one in made.parts], **NEAR)
    assert sum(one["value"] for one in answer["parts"]) == pytest.approx(answer["logit"], abs=1e-4)
    named = [(one["name"], one["layer"]) for one in answer["parts"]]
    assert named[:5] == [("embeddings", None), ("attention", 0), ("MLP", 0), ("attention", 1), ("MLP", 1)]
