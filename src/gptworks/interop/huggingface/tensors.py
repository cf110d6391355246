"""Tensors in both directions: what each is called in their files, and how several of ours lie in one of theirs.

Shapes: C width, D head width, H heads, G key/value heads, E experts, F inner width of an expert.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.model import GPT


@dataclass(frozen=True)
class Layout:
    """How tensors of ours make up one of theirs, and back. `split` undoes `join` exactly."""

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    split: Callable[[Tensor, ModelConfig], Sequence[Tensor]]


def _swapped(x: Tensor) -> Tensor:
    """[out, in] ↔ [in, out]; a bias as it is."""
    return x.T if x.dim() == 2 else x


def _rows(x: Tensor, n: int) -> Tensor:
    """[n·m, ...] → [n, m, ...]."""
    return x.reshape(n, -1, *x.shape[1:])


def _join_heads(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Three of [H·D, ...] → [H·3·D, ...]: for each head its query, key and value."""
    return torch.stack([_rows(part, config.n_heads) for part in parts], dim=1).flatten(0, 2)


def _split_heads(whole: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    return [part.flatten(0, 1) for part in _rows(_rows(whole, 3 * config.n_heads), config.n_heads).unbind(1)]


PLAIN = Layout(lambda parts, _: parts[0], lambda whole, _: [whole])
LESS_ONE = Layout(lambda parts, _: parts[0] - 1, lambda whole, _: [whole + 1])
"""Gemma's norms multiply by 1 + w. In fp32 the sum is the one that transformers forms, bit for bit."""
TRANSPOSED = Layout(lambda parts, _: _swapped(parts[0]), lambda whole, _: [_swapped(whole)])
"""GPT-2 keeps its matrices as [in, out]."""
TRANSPOSED_THIRDS = Layout(lambda parts, _: _swapped(torch.cat(list(parts))), lambda whole, _: _swapped(whole).chunk(3))
"""Query, key and value beside one another, [C, 3·C]."""
QUERY_KEY_VALUE = Layout(
    lambda parts, _: torch.cat(list(parts)),
    lambda whole, config: torch.split(whole, [n * config.d_head for n in (config.n_heads, *[config.n_kv_heads] * 2)]),
)
"""All queries, all keys and all values after one another, [(H + 2·G)·D, C]."""
HEAD_BY_HEAD = Layout(_join_heads, _split_heads)
"""Query, key and value of each head after one another, [H·3·D, C]."""
HALVES = Layout(lambda parts, _: torch.cat(list(parts)), lambda whole, _: whole.chunk(2))
"""Gate and up, [2·F, C]."""
STACKED = Layout(lambda parts, _: torch.stack(list(parts)), lambda whole, _: whole.unbind())
"""One matrix for each expert, [E, C, F]."""
STACKED_HALVES = Layout(
    lambda parts, config: _rows(torch.cat(list(parts)), config.n_experts),
    lambda whole, config: whole.flatten(0, 1).chunk(2 * config.n_experts),
)
"""Gate and up of each expert, [E, 2·F, C]."""


def _in_pairs(x: Tensor, n_heads: int) -> Tensor:
    """Rows of each head, [n·D, ...], from elements i and i + D/2 apart to next to one another."""
    return x.reshape(n_heads, 2, -1, *x.shape[1:]).transpose(1, 2).flatten(0, 2)


def _apart(x: Tensor, n_heads: int) -> Tensor:
    """`_in_pairs` undone."""
    return x.reshape(n_heads, -1, 2, *x.shape[1:]).transpose(1, 2).flatten(0, 2)


QUERY_IN_PAIRS = Layout(
    lambda parts, config: _in_pairs(parts[0], config.n_heads), lambda whole, config: [_apart(whole, config.n_heads)]
)
"""Elements 2i and 2i + 1 of a head are rotated together there, i and i + D/2 here."""
KEY_IN_PAIRS = Layout(
    lambda parts, config: _in_pairs(parts[0], config.n_kv_heads),
    lambda whole, config: [_apart(whole, config.n_kv_heads)],
)


@dataclass(frozen=True)
class Place:
    """Where modules of ours are in their files. `{layer}` and `{expert}` stand for every layer and every expert."""

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = PLAIN


def places(names: Mapping[str, str], norms: Layout = PLAIN) -> tuple[Place, ...]:
    """Modules kept alone, and as they are but for the norms: their name → ours."""
    return tuple(Place(theirs, (ours,), norms if "norm" in ours else PLAIN) for theirs, ours in names.items())


def tensor_places(rules: Collection[Place], config: ModelConfig, names: Collection[str]) -> Iterator[Place]:
    """Where each tensor of a model is: the rules written out for its layers and experts, its weights and biases.

    Args:
        names: the tensors that the model has (`expected_tensors`).
    """
    for rule in rules:
        per_expert = "{expert}" in rule.theirs
        for layer in range(config.n_layers if "{layer}" in rule.theirs else 1):
            for expert in range(config.n_experts if per_expert else 1):
                together = [expert] if per_expert else range(max(config.n_experts, 1))
                modules = [name.format(layer=layer, expert=e) for e in together for name in rule.ours]
                for kind in ("weight", "bias"):
                    ours = tuple(f"{module}.{kind}" for module in dict.fromkeys(modules))
                    if all(name in names for name in ours):
                        yield Place(f"{rule.theirs.format(layer=layer, expert=expert)}.{kind}", ours, rule.layout)


def expected_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a model by name, without memory (meta)."""
    with torch.device("meta"):
        return GPT(config).state_dict()


def their_tensors(rules: Collection[Place], config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors as they lie in their file, by their names there."""
    there = list(tensor_places(rules, config, ours))
    assert {name for place in there for name in place.ours} == set(ours), "every tensor has a place"
    return {place.theirs: place.layout.join([ours[name] for name in place.ours], config) for place in there}


def our_tensors(rules: Collection[Place], config: ModelConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the tensors of a file stand for, in fp32: `their_tensors` undone."""
    ours: dict[str, Tensor] = {}
    for place in tensor_places(rules, config, expected_tensors(config)):
        parts = place.layout.split(theirs[place.theirs].float(), config)
        ours |= {name: part.contiguous() for name, part in zip(place.ours, parts, strict=True)}
    return ours


def their_shape(place: Place, config: ModelConfig, expected: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape that a tensor has in their file."""
    return tuple(place.layout.join([expected[name] for name in place.ours], config).shape)
