"""The character model and its training step as textbooks write them: the peer of bench/train.py."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
