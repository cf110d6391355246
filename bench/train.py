"""Training throughput beside the same model in a textbook loop, from one run.

    python bench/train.py --text tinyshakespeare.txt

The model is nanoGPT's character model: 6 layers, 6 heads, width 384, context 256, batch 16, no dropout. The textbook
loops are eager, attention written out, AdamW as it comes: with a module for each head, as first chapters have it; with
the heads as one batch, in fp32 and under bf16 autocast. gptworks runs its own training step, its own batches, in the
precision it chooses. They take turns, and the ratios are of medians. How far a ratio to fp32 can go is set by the
processor: beside it stand the rates of large matrix products in both precisions.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.data.prepare import prepare
from gptworks.device import choose_device, choose_precision, device_name, keep_freed_memory
from gptworks.plan.flops import forward_flops
from gptworks.recipe import parse_recipe, with_vocab_size
from gptworks.tokenizer import vocabulary_size
from gptworks.train.display import Display
from gptworks.train.loop import Run
from gptworks.train.metrics import MetricsLog
from gptworks.train.objectives import next_token

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 6, 6, 384, 256, 16


class OneHead(nn.Module):
    """One head of attention, as a module of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, width, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        return torch.softmax(scores.masked_fill(~self.mask, float("-inf")), dim=-1) @ v


class HeadByHead(nn.Module):
    """Attention with a module for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(OneHead(WIDTH // HEADS) for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


class BatchedHeads(nn.Module):
    """Attention with the heads as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // HEADS)
        weights = torch.softmax(scores.masked_fill(~self.mask, float("-inf")), dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class TextbookBlock(nn.Module):
    """Pre-norm attention and MLP, as any tutorial has them."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TextbookGPT(nn.Module):
    """Learned positions, tied head."""

    def __init__(self, vocab_size: int, attention: type[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[TextbookBlock(attention) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def textbook_step(
    vocab_size: int, data: Tensor, attention: type[nn.Module], autocast: bool = False
) -> Callable[[], None]:
    """One step of the textbook loop."""
    model = TextbookGPT(vocab_size, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,)).tolist()
        x = torch.stack([data[i : i + CONTEXT] for i in starts])
        y = torch.stack([data[i + 1 : i + CONTEXT + 1] for i in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product here, the best of several."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    a @ b
    return 2 * 2048**3 / min(seconds(lambda: a @ b) for _ in range(5))


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file; default: the standard library's sources")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each loop in a round")
    arguments = parser.parse_args()

    source = {"type": "text", "path": str(arguments.text)} if arguments.text else {"type": "python-stdlib"}
    with tempfile.TemporaryDirectory() as folder:
        recipe = parse_recipe(
            {
                "name": "bench",
                "run_dir": f"{folder}/run",
                "model": {"context_length": CONTEXT, "n_layers": LAYERS, "d_model": WIDTH, "n_heads": HEADS,
                          "position": "learned", "norm": "layernorm", "mlp": "gelu"},
                "tokenizer": {"type": "char"},
                "data": {"sources": [source], "cache_dir": folder, "validation": {"fraction": 0.1, "by": "tail"}},
                "train": {"max_steps": 10_000, "batch_size": BATCH, "log_every": 10_000},
            }
        )  # fmt: skip
        prepared = prepare(recipe)
        recipe = with_vocab_size(recipe, vocabulary_size(prepared.tokenizer))
        device = choose_device("cpu")
        precision = choose_precision("auto", device)
        run = Run(recipe, prepared.folder, prepared.tokenizer, device, precision, next_token, Display())
        data = torch.from_numpy(run.train_shards.read(0, min(run.train_shards.n_tokens, 10**6)))
        run.log = MetricsLog(Path(folder) / "metrics.jsonl", 0)

        keep_freed_memory()
        vocab_size, ours = recipe.model.vocab_size, f"gptworks, {precision.name}"
        loops = {
            "textbook, head by head, fp32": textbook_step(vocab_size, data, HeadByHead),
            "textbook, fp32": textbook_step(vocab_size, data, BatchedHeads),
            "textbook, bf16 autocast": textbook_step(vocab_size, data, BatchedHeads, autocast=True),
            ours: run.training_step,
        }
        times: dict[str, list[float]] = {name: [] for name in loops}
        for step in loops.values():
            step()
        rates: dict[str, list[float]] = {"fp32": [], "bf16": []}
        for _ in range(arguments.rounds):
            rates["fp32"].append(product_rate(torch.float32))
            rates["bf16"].append(product_rate(torch.bfloat16))
            for name, step in loops.items():
                times[name] += [seconds(step) for _ in range(arguments.steps)]

    rate = {name: statistics.median(values) for name, values in rates.items()}
    flops_per_token = forward_flops(recipe.model, CONTEXT).training_per_token_dense
    speed = {name: BATCH * CONTEXT / statistics.median(values) for name, values in times.items()}
    print(f"{device_name(device)}, torch {torch.__version__}")
    print(f"matrix products: fp32 {rate['fp32'] / 1e9:,.0f} GFLOP/s, bf16 {rate['bf16'] / 1e9:,.0f} GFLOP/s, "
          f"ratio {rate['bf16'] / rate['fp32']:.2f}")  # fmt: skip
    for name, value in speed.items():
        used, limit = value * flops_per_token, rate["fp32" if name.endswith("fp32") else "bf16"]
        print(
            f"{name:<30} {value:>7,.0f} tokens/s {used / 1e9:>5,.0f} GFLOP/s, {used / limit:>4.0%} of its product rate;"
            f" gptworks is {speed[ours] / value:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
