"""Finds changes of a recipe with which the run fits in memory. Each change is applied to the recipe and planned before
it is recommended."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.overrides import apply_overrides
from gptworks.planning.arrange import Refusal, arrange, device_setting, planned_precision
from gptworks.planning.devices import Device
from gptworks.planning.fit import Need, divisors, need
from gptworks.planning.layout import Layout
from gptworks.recipe import parse_recipe

Apply = Callable[[Sequence[str], int], Recipe]
"""A function that takes overrides and a number of devices and returns the changed recipe."""

MOST_DEVICES = 4096

LORA_RANK = 8


@dataclass(frozen=True)
class Change:
    """A change of settings and devices, and the memory that the changed run needs."""

    overrides: tuple[str, ...]
    """Overrides such as `train.precision=bf16`."""
    n_ranks: int
    n_ranks_before: int
    ranks_per_node: int | None
    """New number of ranks on each node, if the change reduces it; None if unchanged."""
    costs: str
    """The disadvantage of the change."""
    need: Need

    @property
    def peak_bytes(self) -> int:
        """Peak memory of each device."""
        return self.need.peak.total_bytes

    @property
    def fits(self) -> bool:
        return self.need.fits

    @property
    def words(self) -> str:
        """The change as arguments of `gptworks plan`."""
        ranks = [f"--world-size {self.n_ranks}"] if self.n_ranks != self.n_ranks_before else []
        node = [f"--gpus-per-node {self.ranks_per_node}"] if self.ranks_per_node is not None else []
        return " ".join((*self.overrides, *ranks, *node))


@dataclass(frozen=True)
class _Remedy:
    """Overrides that reduce memory, with their disadvantage."""

    overrides: tuple[str, ...]
    costs: str
    beyond: tuple["_Remedy", ...] = ()
    """Remedies that save less of the same memory, such as 8-bit weights if this remedy is 4-bit weights."""


def recipe_with(recipe: Recipe) -> Apply:
    """Return a function that applies overrides to `recipe` and ignores the number of devices."""
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    return lambda overrides, n_ranks: parse_recipe(apply_overrides(tree, overrides))


def changes_that_fit(recipe: Recipe, n_ranks: int, device: Device, apply: Apply | None = None) -> list[Change]:
    """Return changes with which the run fits: the cheapest first, changes to more devices last.

    If a run fits the devices but not the hosts, changes to fewer ranks per host come first. If no change suffices,
    return only the last change that was tried and can start. If no change can start, return an empty list.

    Args:
        apply: returns the recipe with overrides applied; by default, `recipe_with(recipe)`.
    """
    search = _Search(n_ranks, device, apply or recipe_with(recipe))
    found: list[tuple[frozenset[_Remedy], Change]] = []
    fewer: list[Change] = []
    furthest: Change | None = None
    for remedies in _on_the_same_devices(recipe, device):
        chosen = frozenset(each for remedy in remedies for each in (remedy, *remedy.beyond))
        if any(given < chosen and _micro(change) == inf for given, change in found):
            continue  # a subset of these remedies suffices without a smaller micro-batch
        change = search.tried(remedies, n_ranks)
        if change is None:
            continue
        if not change.fits:
            furthest = change
            fewer = fewer or search.on_fewer_ranks_a_host(remedies, change)
        elif not any(given < chosen and _micro(other) >= _micro(change) for given, other in found):
            found.append((chosen, change))
    changes = [*fewer, *(change for _, change in found)]
    for each in _more_devices(recipe, n_ranks, device):
        for ways, n in each:
            change = search.tried(ways, n)
            if change is not None and not changes:
                [change, *_] = search.on_fewer_ranks_a_host(ways, change) or [change]
            if change is not None and change.fits:
                return [*changes, change]
            furthest = change or furthest
    return changes or ([furthest] if furthest is not None else [])


class _Search:
    """Applies changes to the recipe and estimates the memory that the result needs."""

    def __init__(self, n_ranks: int, device: Device, apply: Apply) -> None:
        self.n_ranks, self.device, self.apply = n_ranks, device, apply

    def tried(self, remedies: Sequence[_Remedy], n_ranks: int) -> Change | None:
        """Return the remedies as a change; None if the recipe cannot run with them.

        If the recipe's micro-batch does not fit on the device, the change sets the largest micro-batch that fits, or
        the smallest if none fits.
        """
        overrides = tuple(override for remedy in remedies for override in remedy.overrides)
        costs = [remedy.costs for remedy in remedies]
        found = self._changed(overrides, n_ranks, costs)
        if found is None or found[0].need.fits_device:  # a smaller micro-batch saves no host memory
            return None if found is None else found[0]
        last, recipe, layout = found
        group = recipe.objective.micro_batch_multiple
        micro = recipe.train.rank_micro_batch_size(layout.data_parallel)
        sizes = divisors(recipe.train.common_batch_size // layout.data_parallel)
        for size in [size for size in sizes if size < micro and size % group == 0]:
            also = (*overrides, f"train.micro_batch_size={size}")
            smaller = self._changed(also, n_ranks, ["more, smaller passes a step", *costs])
            if smaller is not None:
                last = smaller[0]
                if last.need.fits_device:
                    break
        return last

    def on_fewer_ranks_a_host(self, remedies: Sequence[_Remedy], change: Change) -> list[Change]:
        """Return variants of a change that fit, if the change fits its devices but not its hosts; else an empty list.

        The first variant has fewer ranks on the same host, if there is only one host. The second variant has the same
        number of ranks on more hosts.
        """
        if change.fits or not change.need.fits_device:
            return []
        n_hosts = -(-change.n_ranks // self.device.per_node)
        counts = [n for n in divisors(change.n_ranks) if n < min(change.n_ranks, self.device.per_node)]
        on_one_host = (self.tried(remedies, n) for n in counts if n_hosts == 1)
        cost = "; ".join(filter(None, (change.costs, "more hosts, and more is sent between them")))
        on_more = (
            self._changed(change.overrides, change.n_ranks, [cost], n)
            for n in counts
            if n % self.apply(change.overrides, change.n_ranks).train.parallel.tensor_parallel == 0
        )
        one = next((found for found in on_one_host if found is not None and found.fits), None)
        more = next((found[0] for found in on_more if found is not None and found[0].fits), None)
        slower = "; ".join(filter(None, (one.costs if one is not None else "", "fewer devices at work")))
        return [*([replace(one, costs=slower)] if one is not None else []), *([more] if more is not None else [])]

    def _changed(
        self, overrides: tuple[str, ...], n_ranks: int, costs: Sequence[str], ranks_per_node: int | None = None
    ) -> tuple[Change, Recipe, Layout] | None:
        try:
            recipe = self.apply(overrides, n_ranks)
        except UserError:
            return None
        device = self.device if ranks_per_node is None else replace(self.device, per_node=ranks_per_node)
        layout = arrange(recipe, n_ranks, device)
        if isinstance(layout, Refusal):
            return None
        needed = need(device_setting(recipe, device, layout), device)
        return Change(overrides, n_ranks, self.n_ranks, ranks_per_node, "; ".join(costs), needed), recipe, layout


def _micro(change: Change) -> float:
    """Return the micro-batch size that the change sets; infinity if it sets none."""
    sizes = [each.partition("=")[2] for each in change.overrides if each.startswith("train.micro_batch_size=")]
    return int(sizes[-1]) if sizes else inf


def _on_the_same_devices(recipe: Recipe, device: Device) -> Iterator[tuple[_Remedy, ...]]:
    """Yield combinations of remedies to try on the same devices, the cheapest first.

    The first combination is empty, because a smaller micro-batch may suffice. No remedy concerns logits, because few
    logits are in memory at once.
    """
    train = recipe.train
    yield ()
    mild: list[_Remedy] = []
    if planned_precision(train.precision, device) == "fp32" and (device.has_bf16 or device.kind == "cuda"):
        half = "bf16" if device.has_bf16 else "fp16"
        mild.append(_Remedy((f"train.precision={half}",), "products are rounded"))
        yield (mild[0],)
    if train.averages:
        mild.append(_Remedy(("train.ema_decay=0",), "no average of the weights"))
        yield (mild[-1],)
    further = {"none": ("selective", "block"), "selective": ("block",), "block": ()}[train.activation_checkpointing]
    again = {"selective": "an eighth to a sixth more work", "block": "a quarter to a third more work"}
    blocks = [_Remedy((f"train.activation_checkpointing={kind}",), again[kind]) for kind in further]
    for block in blocks:
        yield (block,)
        if mild:
            yield (*mild, block)
    furthest = (*mild, *blocks[-1:])
    int8 = _Remedy(("train.optimizer_state=int8",), "the optimizer's moments are rounded")
    muon = _Remedy(("train.optimizer=muon",), "another optimizer, with half the state")
    adamw_only = _Remedy(("train.optimizer=adamw",), "another optimizer, with only two moments")
    others = () if train.orthogonalizes else (int8 if train.optimizer == "adamw" else adamw_only, muon)
    for smaller in others if train.optimizer_state == "fp32" else ():
        if recipe.adapter is None:
            yield (smaller,)
            if furthest:
                yield (*furthest, smaller)
    lora: tuple[_Remedy, ...] = ()
    if recipe.adapter is None and recipe.freeze is None:
        source = "" if recipe.initialize_from else ", of a run that initialize_from names"
        adamw = () if train.optimizer == "adamw" else ("train.optimizer=adamw",)
        lora = (_Remedy((f"adapter.rank={LORA_RANK}", *adamw), f"trains only an adapter{source}"),)
        yield lora
        if furthest:
            yield (*furthest, *lora)
    eager = ("train.compile=none",) if train.compile == "block" else ()
    base8 = _Remedy(("adapter.base=int8", *eager), "the base's matrices are rounded to 8 bits")
    base4 = _Remedy(("adapter.base=int4", *eager), "the base's matrices are rounded to 4 bits", (base8,))
    held = "full" if lora else recipe.adapter.base if recipe.adapter is not None else "int4"
    for way in (lora, (*furthest, *lora)) if furthest else (lora,):
        for base in {"full": (base8, base4), "int8": (base4,), "int4": ()}[held]:
            yield (*way, base)


def _more_devices(recipe: Recipe, n_ranks: int, device: Device) -> Iterator[list[tuple[list[_Remedy], int]]]:
    """Yield lists of (remedies, number of devices) to try, one list per set of remedies, in ascending numbers of
    devices. Yield nothing for laptops and for devices other than CUDA GPUs; ranks on one CPU share its memory."""
    train, tensor = recipe.train, recipe.train.parallel.tensor_parallel
    if device.kind != "cuda" or device.is_laptop:
        return
    strategy = {
        "train.parallel.strategy=fsdp": True,
        "train.parallel.reshard_after_forward=true": not train.parallel.reshard_after_forward,
        "train.optimizer=adamw": train.optimizer != "adamw",
        "train.optimizer_state=fp32": train.optimizer_state == "int8",
        "adapter.base=full": recipe.adapter is not None and recipe.adapter.base != "full",
        "train.precision=fp32": planned_precision(train.precision, device) == "fp16",
    }
    needed = tuple(override for override, is_needed in strategy.items() if is_needed)
    shares = _Remedy(needed, "weights and state in shares, over a network")
    same = _Remedy(("train.activation_checkpointing=block",), "a quarter to a third more work")
    now = arrange(recipe, n_ranks, device)
    in_shares = isinstance(now, Layout) and now.sharding == "fsdp"
    counts = [n * tensor for n in reversed(divisors(_whole_batch(recipe))) if n * tensor <= MOST_DEVICES]
    counts = [n for n in counts if n > n_ranks or (n == n_ranks > 1 and not in_shares)]
    yield [([shares], n) for n in counts]
    yield [([shares, same], n) for n in counts]
    for parts in (2, 4, 8):
        if parts > tensor:
            split = _Remedy((f"train.parallel.tensor_parallel={parts}",), "matrices in shares, over a fast network")
            sets = [n * parts for n in reversed(divisors(_whole_batch(recipe))) if n * parts <= MOST_DEVICES]
            yield [([shares, same, split], n) for n in sets if n > n_ranks]


def _whole_batch(recipe: Recipe) -> int:
    """Return the number of units into which ranks can divide the batch of every step: samples, or groups of answers."""
    group = recipe.objective.micro_batch_multiple
    return recipe.train.common_batch_size // gcd(recipe.train.common_batch_size, group)
