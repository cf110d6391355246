"""A GPT and its training step as textbooks write them: explicit attention, and torch's AdamW.

With torch's fused attention, it is a rewrite of nanoGPT's model and step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A model's size and the batch it trains on, the same for every loop."""

    n_layers: int
    n_heads: int
    width: int
    vocab_size: int
    context: int
    batch: int
    bias: bool


class Attention(nn.Module):
    """Attention with all heads in one batch: full scores, or torch's fused attention."""

    def __init__(self, shape: Shape, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.n_heads = shape.n_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.register_buffer("mask", torch.ones(shape.context, shape.context, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.n_heads, -1).transpose(1, 2) for t in (q, k, v))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.n_heads)
        weights = torch.softmax(scores.masked_fill(~self.mask, float("-inf")), dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: Shape, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape, fused)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class TextbookGPT(nn.Module):
    """A GPT with learned positions and a tied head; the loss is the mean cross-entropy of all logits at once."""

    def __init__(self, shape: Shape, fused: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*[Block(shape, fused) for _ in range(shape.n_layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def textbook_step(
    shape: Shape,
    data: Tensor,
    *,
    autocast: bool,
    compiled: bool,
    fused: bool,
    device: str = "cpu",
    blocks: bool = False,
) -> Callable[[], None]:
    """Return a function that does one step of the textbook loop on random windows of the tokens [N].

    Args:
        blocks: compile each block instead of the whole model; a deep model then compiles faster.
    """
    textbook = TextbookGPT(shape, fused).to(device)
    parameters = list(textbook.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=True if device == "cuda" else None)
    model: Callable[[Tensor, Tensor], Tensor] = textbook
    if compiled and blocks:
        for block in textbook.blocks:
            block.compile()
    elif compiled:
        model = torch.compile(textbook)

    def step() -> None:
        starts = torch.randint(len(data) - shape.context - 1, (shape.batch,)).tolist()
        x = torch.stack([data[i : i + shape.context] for i in starts]).to(device)
        y = torch.stack([data[i + 1 : i + shape.context + 1] for i in starts]).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step
