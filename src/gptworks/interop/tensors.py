"""Convert tensors between gptworks (ours) and other programs' files (theirs), whose tensors may join several of ours.

Shapes: C width, D head width, H heads, G key/value heads, E experts, F inner width of an MLP or expert.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.model.gpt import GPT
from gptworks.model.shapes import ShapesOnly


@dataclass(frozen=True)
class Layout:
    """A pair of functions: `join` makes one tensor of the other program from ours, and `split` is its inverse."""

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    split: Callable[[Tensor, ModelConfig], Sequence[Tensor]]
    transposed: bool = False
    """Whether the other program stores the matrix as [in, out]; in gptworks it is [out, in]."""
    stacked: bool = False
    """Whether the tensor holds all experts of a layer."""


def _swapped(x: Tensor) -> Tensor:
    """Transpose a matrix between [out, in] and [in, out]; leave a bias unchanged."""
    return x.T if x.dim() == 2 else x


def _rows(x: Tensor, n: int) -> Tensor:
    """Reshape [n·m, ...] to [n, m, ...]."""
    return x.reshape(n, -1, *x.shape[1:])


PLAIN = Layout(lambda parts, _: parts[0], lambda whole, _: [whole])
LESS_ONE = Layout(lambda parts, _: parts[0] - 1, lambda whole, _: [whole + 1])
"""The weight w of Gemma's norms, which multiply by 1 + w; ours multiply by the weight itself. `split` adds 1 in fp32,
exactly as transformers does."""
TRANSPOSED = Layout(lambda parts, _: _swapped(parts[0]), lambda whole, _: [_swapped(whole)], transposed=True)
"""A matrix as in GPT-2's files, [in, out]."""
TRANSPOSED_THIRDS = Layout(
    lambda parts, _: _swapped(torch.cat(list(parts))), lambda whole, _: _swapped(whole).chunk(3), transposed=True
)
"""One matrix with query, key and value side by side, [C, 3·C]."""
QUERY_KEY_VALUE = Layout(
    lambda parts, _: torch.cat(list(parts)),
    lambda whole, config: torch.split(whole, [n * config.d_head for n in (config.n_heads, *[config.n_kv_heads] * 2)]),
)
"""One matrix with all queries, then all keys, then all values, [(H + 2·G)·D, C]."""
HEAD_BY_HEAD = Layout(
    lambda parts, config: torch.stack([_rows(part, config.n_heads) for part in parts], dim=1).flatten(0, 2),
    lambda whole, config: [x.flatten(0, 1) for x in _rows(_rows(whole, 3 * config.n_heads), config.n_heads).unbind(1)],
)
"""One matrix with query, key and value of head 0, then of head 1, and so on, [H·3·D, C]."""
HALVES = Layout(lambda parts, _: torch.cat(list(parts)), lambda whole, _: whole.chunk(2))
"""One matrix with the MLP's gate, then its up projection, [2·F, C]."""
STACKED = Layout(lambda parts, _: torch.stack(list(parts)), lambda whole, _: whole.unbind(), stacked=True)
"""One tensor that stacks the same matrix of all experts, [E, out, in]."""
STACKED_HALVES = Layout(
    lambda parts, config: _rows(torch.cat(list(parts)), config.n_experts),
    lambda whole, config: whole.flatten(0, 1).chunk(2 * config.n_experts),
    stacked=True,
)
"""One tensor that stacks the joined gate and up projections of all experts, [E, 2·F, C]."""


def interleaved(x: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of each head in `x` [n_heads·D, ...] so that rows i and i + D/2 become 2i and 2i + 1."""
    return x.reshape(n_heads, 2, -1, *x.shape[1:]).transpose(1, 2).flatten(0, 2)


def _halved(x: Tensor, n_heads: int) -> Tensor:
    """Undo `interleaved`: move the even rows of each head before the odd ones."""
    return x.reshape(n_heads, -1, 2, *x.shape[1:]).transpose(1, 2).flatten(0, 2)


QUERY_IN_PAIRS = Layout(
    lambda parts, config: interleaved(parts[0], config.n_heads),
    lambda whole, config: [_halved(whole, config.n_heads)],
)
"""Query projection whose rotary pairs are rows 2i and 2i + 1 of a head; in gptworks they are rows i and i + D/2."""
KEY_IN_PAIRS = Layout(
    lambda parts, config: interleaved(parts[0], config.n_kv_heads),
    lambda whole, config: [_halved(whole, config.n_kv_heads)],
)


@dataclass(frozen=True)
class Place:
    """The name of a module or tensor of the other program, and the names of our modules or tensors that it contains.

    `{layer}` and `{expert}` in names are placeholders.
    """

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = PLAIN


def places(names: Mapping[str, str], norms: Layout = PLAIN) -> tuple[Place, ...]:
    """Return a `Place` for each pair in `names` (module of the other program → ours). Norms get the layout `norms`."""
    return tuple(Place(theirs, (ours,), norms if "norm" in ours else PLAIN) for theirs, ours in names.items())


def tensor_places(rules: Collection[Place], config: ModelConfig, names: Collection[str]) -> Iterator[Place]:
    """Yield the `Place` of every tensor, block by block: apply the rules to each layer, expert, weight and bias.
    `names`: names of the model's tensors, as in `expected_tensors`; a rule for other tensors yields nothing."""
    for in_blocks, group in itertools.groupby(rules, lambda rule: "{layer}" in rule.theirs):
        for layer, rule in itertools.product(range(config.n_layers if in_blocks else 1), [*group]):
            per_expert = "{expert}" in rule.theirs
            for expert in range(config.n_experts if per_expert else 1):
                together = [expert] if per_expert else range(max(config.n_experts, 1))
                modules = [name.format(layer=layer, expert=e) for e in together for name in rule.ours]
                for kind in ("weight", "bias"):
                    ours = tuple(f"{module}.{kind}" for module in dict.fromkeys(modules))
                    if all(name in names for name in ours):
                        yield Place(f"{rule.theirs.format(layer=layer, expert=expert)}.{kind}", ours, rule.layout)


def expected_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a model by name, on the meta device."""
    with ShapesOnly():
        return GPT(config).state_dict()


def each_tensor(
    rules: Collection[Place], config: ModelConfig, ours: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Convert our tensors to the other program's, one at a time; yield the name and the data of each."""
    there = list(tensor_places(rules, config, ours))
    assert {name for place in there for name in place.ours} == set(ours), "every tensor has a place"
    for place in there:
        yield place.theirs, place.layout.join([ours[name] for name in place.ours], config)


def our_tensors(
    rules: Collection[Place], config: ModelConfig, read: Callable[[str, torch.Size], Tensor]
) -> dict[str, Tensor]:
    """Convert the other program's tensors to ours, in fp32, by our names: the inverse of `each_tensor`. `read(name,
    shape)` returns the other program's tensor of a name; `shape` is the shape that our model expects."""
    expected, ours = expected_tensors(config), dict[str, Tensor]()
    for place in tensor_places(rules, config, expected):
        shape = place.layout.join([expected[name] for name in place.ours], config).shape
        parts = place.layout.split(read(place.theirs, shape).float(), config)
        ours |= {name: part.contiguous() for name, part in zip(place.ours, parts, strict=True)}
    return {name: ours[name] for name in expected}
