"""Mixture of experts: for each token, a router chooses a few of a layer's MLPs and weights their outputs.

Dropless: an expert computes every token sent to it, so that a token's result never depends on other tokens (Gale et
al., 2022). In training, one loss on the router's logits keeps the experts evenly used, and another keeps the logits
small.

Shapes: N tokens, E experts, K experts per token, C width.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from gptworks.config import ModelConfig
from gptworks.kernels import dispatch
from gptworks.model.cost import MLP_INNER, RESIDUAL, Shapes, Stage
from gptworks.model.layers import MLP, Dropout, Layer, Linear, without_autocast


def expert_rows(n_tokens: int) -> int:
    """Number of rows that a CPU computes for an expert in training: `n_tokens`, rounded up by at most 1/16, to a number
    with five significant binary digits.

    oneDNN compiles a kernel for each number of rows, so few different numbers need few kernels.
    """
    unit = 1 << max(0, n_tokens.bit_length() - 5)
    return -(-n_tokens // unit) * unit


class MoE(nn.Module):
    """A router and E experts, each an MLP; optionally one shared expert that reads every token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_per_token = config.n_experts_per_token
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.experts = nn.ModuleList(MLP(config, config.d_ff) for _ in range(config.n_experts))
        self.shared = MLP(config, config.d_ff_shared) if config.d_ff_shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' result [B, T, C] for x [B, T, C], and the router's logits, float32 [B, T, E]."""
        tokens = x.flatten(0, -2)  # [N, C]
        with without_autocast(x.device):  # rounding would change the choice of experts
            logits = F.linear(tokens.float(), self.router.weight.float())  # [N, E]
        weights, chosen = route(logits, self.n_per_token)  # [N, K], [N, K]
        given, places = (self._in_groups if self.takes_groups(tokens) else self._by_expert)(tokens, chosen)
        given = collect(given, places).view(*chosen.shape, -1)  # [N, K, C]
        out = (given * weights.to(given.dtype).unsqueeze(-1)).sum(1)  # [N, C]
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x), logits.view(*x.shape[:-1], -1)

    def _by_expert(self, tokens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one expert after the other; the host must know each expert's number of tokens. Return the rows'
        results [P, C], and the row of each (token, expert) pair [N·K]; see `arrange`."""
        sent = tokens_per_expert(chosen, len(self.experts))
        rows, places, sizes = arrange(chosen, sent, even=dispatch.trains(tokens))
        parts = torch.split(send(tokens, rows, places), sizes)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)]), places

    def takes_groups(self, tokens: Tensor) -> bool:
        """Whether grouped products, which need no counts on the host, compute the experts.

        Grouped products do this on CUDA in bf16, unless experts have adapters, packed matrices, widths that are not
        multiples of 8, or too few tokens to be worth stacking their matrices.
        """
        first: Any = self.experts[0]
        return (
            tokens.device.type == "cuda"
            and tokens.dtype == torch.bfloat16
            and tokens.size(0) * self.n_per_token >= GROUPED_ROWS * len(self.experts)
            and all(type(layer) in (Linear, Dropout) for expert in self.experts for layer in expert.children())
            and all(n % 8 == 0 for n in first.up.weight.shape)  # rows must have a multiple of 16 bytes
        )

    def _in_groups(self, tokens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all experts together, by one grouped product per linear layer. Return the same as `_by_expert`."""
        expert, order = chosen.flatten().sort(stable=True)  # the (token, expert) pairs, by expert
        rows = torch.arange(order.numel(), device=order.device)
        places = torch.empty_like(order).index_copy_(0, order, rows)
        experts = torch.arange(len(self.experts), device=order.device)
        ends = torch.searchsorted(expert, experts, right=True, out_int32=True)  # [E], the row after an expert's last

        first: Any = self.experts[0]
        biased = first.up.bias is not None
        own = F.one_hot(expert, len(self.experts)).to(tokens.dtype) if biased else None  # [N·K, E]

        def layer(name: str) -> Layer:
            layers = [getattr(mlp, name) for mlp in self.experts]

            def product(x: Tensor) -> Tensor:
                x = x.to(tokens.dtype)  # relu2 gives float32 under autocast
                y: Tensor = _GroupedProduct.apply(x, ends, *(one.weight for one in layers))  # type: ignore[no-untyped-call]
                if own is None:
                    return y
                return y + own @ torch.stack([one.bias.to(x.dtype) for one in layers])  # sums biases' gradients in fp32

            return product

        gate = None if first.gate is None else layer("gate")
        x = send(tokens, order // chosen.size(1), places)
        return first.through(x, layer("up"), gate, layer("down")), places

    @staticmethod
    def cost(s: Shapes, arrives: int) -> Iterator[Stage]:
        """Yield the memory of router, gathering, experts (each with equally many tokens) and weighted sum, in order."""
        c = s.config
        width = s.products(c.d_model)
        share = s.n_tokens * c.n_experts_per_token / c.n_experts
        if s.on_cpu:
            share = expert_rows(math.ceil(share))
        gathered = round(width * c.n_experts * share / s.n_tokens)
        routing = s.n_tokens * (8 * c.n_experts + 40 * c.n_experts_per_token)
        wide = s.floats(c.d_model) if s.autocast else 0
        yield Stage(
            "router",
            {RESIDUAL: width, MLP_INNER: routing + wide},
            arrives=routing // 2,
            leaves=width,
            merges=True,
            scratch=s.floats(c.d_model),
            vectors=c.d_model * c.n_experts,
            for_own={RESIDUAL: width, MLP_INNER: wide},
        )
        scratch = max(width, gathered - width)
        yield Stage(
            "gather",
            {MLP_INNER: gathered},
            gathered,
            leaves=width,
            merges=c.d_ff_shared > 0,
            scratch=scratch,
            readers=("gate", "up"),
        )
        enough = s.n_tokens * c.n_experts_per_token >= GROUPED_ROWS * c.n_experts
        grouped = s.has_flash and s.autocast and enough and c.d_model % 8 == c.d_ff % 8 == 0
        if grouped:  # see `takes_groups`; these GPUs train in bf16
            parts = [MLP.cost(s, c.d_ff, 0, s.n_tokens * c.n_experts_per_token, expert=True, n_grouped=c.n_experts)]
        else:
            parts = [MLP.cost(s, c.d_ff, 0, share, expert=True) for _ in range(c.n_experts)]
        for e, part in enumerate(parts):
            stages = list(part)
            if e == 0:  # its backward pass comes last and frees the gradients of all experts' results
                stages[-1] = replace(stages[-1], arrives=gathered)
            yield from stages
        yield Stage("reorder", arrives=gathered, leaves=gathered, scratch=gathered, unsaved=2 * gathered)
        summed = gathered + width if s.saves_result or c.d_ff_shared else gathered
        kept = {MLP_INNER: gathered}
        yield Stage("weighted sum", kept, arrives=arrives, leaves=gathered, scratch=gathered, unsaved=summed)
        if c.d_ff_shared:
            yield from MLP.cost(s, c.d_ff_shared, 0, s.n_tokens, expert=True)

    def reference(self, x: Tensor) -> Tensor:
        """Reference for the first result of `forward`: computes one token at a time. For tests."""
        out = []
        for token in x.flatten(0, -2):
            weights, chosen = route(self.router(token), self.n_per_token)
            given = sum(w * self.experts[int(e)](token) for w, e in zip(weights, chosen, strict=True))
            out.append(given if self.shared is None else given + self.shared(token))
        return torch.stack(out).view_as(x)


GROUPED_ROWS = 16
"""Least mean number of rows per expert for grouped products: with fewer, copying all experts' matrices into one
tensor would take longer than the products."""


def route(logits: Tensor, n_per_token: int) -> tuple[Tensor, Tensor]:
    """Return weights (their sum is 1) and indices of the K experts with the largest logits [..., E]; [..., K] each."""
    weights, chosen = logits.softmax(-1).topk(n_per_token, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def arrange(chosen: Tensor, sent: list[int], even: bool) -> tuple[Tensor, Tensor, list[int]]:
    """Sort tokens by expert into P rows, one for each (token, expert) pair and perhaps padding. Return each row's token
    index [P], each pair's row [N·K], and each expert's number of rows.

    Args:
        chosen: indices of each token's experts, [N, K].
        sent: number of tokens of each expert.
        even: pad each expert's rows to `expert_rows`. Padding rows hold the first token; their results are unused.
    """
    sizes = [expert_rows(n) for n in sent] if even else sent
    order = chosen.flatten().argsort(stable=True)  # indices of the (token, expert) pairs, sorted by expert
    sorted_rows = torch.arange(order.numel(), device=order.device)
    if sizes != sent:
        ends = torch.tensor([sizes, sent], device=order.device).cumsum(1)
        shift = F.pad(ends[0] - ends[1], (1, 0))[:-1]
        sorted_rows += shift.repeat_interleave(torch.tensor(sent, device=order.device), output_size=order.numel())
    places = torch.empty_like(order).index_copy_(0, order, sorted_rows)
    rows = torch.zeros(sum(sizes), dtype=order.dtype, device=order.device)
    return rows.index_copy_(0, sorted_rows, order // chosen.size(1)), places, sizes


def send(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows of x [N, C] at the indices `rows` [P]. The backward pass reads only the gradients at the
    indices `places` [N·K] of the result."""
    out: Tensor = _Send.apply(x, rows, places)  # type: ignore[no-untyped-call]
    return out


def collect(given: Tensor, places: Tensor) -> Tensor:
    """Return the rows of given [P, C] at the indices `places` [N·K]; no index may occur twice."""
    out: Tensor = _Collect.apply(given, places)  # type: ignore[no-untyped-call]
    return out


class _GroupedProduct(torch.autograd.Function):
    """Products of groups of rows with one matrix each.

    torch's own function would keep its copy of all matrices until the backward pass. Here, the backward pass copies the
    matrices again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """Return [P, O]: the rows of x [P, I] in group e, which ends before row `ends[e]`, times weights[e]ᵀ [I, O]."""
        ctx.save_for_backward(x, ends, *weights)
        return torch._grouped_mm(x, _stacked(weights, x.dtype).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_y,), (x, ends, *weights) = gradients, ctx.saved_tensors
        d_y = d_y.contiguous()
        d_x = torch._grouped_mm(d_y, _stacked(weights, x.dtype), offs=ends)
        if not ctx.needs_input_grad[2]:  # frozen experts
            return d_x, None, *(None for _ in weights)
        d_weights = torch._grouped_mm(d_y.mT, x, offs=ends)  # [E, O, I]
        return d_x, None, *(d.to(w.dtype) for d, w in zip(d_weights.unbind(), weights, strict=True))


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack([matrix.to(dtype) for matrix in matrices])


class _Send(torch.autograd.Function):
    """Row indexing with a faster gradient: torch's gradient adds rows one by one, because indices may repeat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.n_rows = x.size(0)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        copies = gradients[0].index_select(0, places)
        n_copies = copies.size(0) // ctx.n_rows
        return copies if n_copies == 1 else copies.view(ctx.n_rows, n_copies, -1).sum(1), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.n_rows = given.size(0)
        return given.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        d_out = gradients[0]
        return d_out.new_zeros(ctx.n_rows, d_out.size(1)).index_copy_(0, places, d_out), None


def tokens_per_expert(chosen: Tensor, n_experts: int) -> list[int]:
    """Count the tokens sent to each expert, given the chosen experts [N, K]; fake and meta tensors get equal counts."""
    if chosen.is_meta or isinstance(chosen, FakeTensor):
        share, rest = divmod(chosen.numel(), n_experts)
        return [share + (e < rest) for e in range(n_experts)]
    counts: list[int] = chosen.flatten().bincount(minlength=n_experts).tolist()
    return counts


def expert_tokens(router_logits: Tensor, n_per_token: int) -> Tensor:
    """Count the tokens that each expert gets, int64 [E], from a layer's router logits [..., E]."""
    chosen = route(router_logits, n_per_token)[1].flatten()  # not `bincount`, which waits for CUDA
    return chosen.new_zeros(router_logits.size(-1)).scatter_add_(0, chosen, torch.ones_like(chosen))


def busiest_load(expert_tokens: Tensor) -> float:
    """Largest ratio, over the layers, of the busiest expert's tokens to the mean, from counts [L, E]; 1 if even."""
    return float((expert_tokens.amax(-1) / expert_tokens.float().mean(-1)).max())


def balance_loss(router_logits: Tensor, n_per_token: int) -> Tensor:
    """Return E · Σ (share of tokens · mean probability) over the experts; 1 if even (Fedus et al., 2021, eq. 4)."""
    share = expert_tokens(router_logits, n_per_token) / router_logits[..., 0].numel() / n_per_token
    probability = router_logits.softmax(-1).flatten(0, -2).mean(0)
    return router_logits.size(-1) * (share * probability).sum()


def z_loss(router_logits: Tensor) -> Tensor:
    """Return the mean squared log-sum-exp of the logits, a penalty on large logits (Zoph et al., 2022, eq. 5)."""
    return router_logits.logsumexp(-1).square().mean()
