"""The work of tests with several processes: `torchrun … rank_worker.py gradients|memory|traffic|texts|owners|train
JSON [TIME]`."""

import hashlib
import json
import shutil
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptworks.config import CharTokenizer, ModelConfig
from gptworks.config.optimizers import OPTIMIZERS
from gptworks.data.samples import Batch
from gptworks.device import choose_precision
from gptworks.evaluation.loss import evaluate_loss
from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.model.gpt import GPT
from gptworks.planning.layout import Layout
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.tokenizer import train_tokenizer
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.distributed import sums
from gptworks.training.distributed.parallel import NO_HOLDERS, ManyDevices, Parallel, choose_parallel
from gptworks.training.distributed.ranks import Ranks, _collectives_issued, join
from gptworks.training.distributed.shards import local
from gptworks.training.loop import train
from gptworks.training.objectives.base import generating
from gptworks.training.objectives.next_token import Losses, next_token
from gptworks.training.optim.muon import Muon
from gptworks.training.optim.optimizer import Optimizer
from gptworks.training.optim.soap import SOAP
from gptworks.training.optim.trainable import trainable_model
from gptworks.training.rehearsal.fake_ranks import Traffic
from gptworks.training.step import TrainStep

CPU = torch.device("cpu")


def batch(config: ModelConfig, n_sequences: int) -> Batch:
    tokens = torch.randint(
        config.vocab_size, (n_sequences, config.context_length + 1), generator=torch.Generator().manual_seed(2)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def model_of(config: ModelConfig, checkpoint_blocks: bool, lacks_gradients: bool = False) -> GPT:
    """Return a model without all-zero parameters, which would leave other parameters without a gradient."""
    torch.manual_seed(1)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    if lacks_gradients:
        model.blocks[1].attention.key.weight.requires_grad_(False)
        for module, name in ((model.blocks[1], "of_even"), (model.blocks[0], "of_first"), (model, "of_none")):
            module.register_parameter(name, torch.nn.Parameter(torch.ones(5)))
    model.activation_checkpointing = "block" if checkpoint_blocks else "none"
    return model.train()


def gradients(cases: list[dict], ranks: Ranks) -> list[dict]:
    """Return, for each case, the largest difference from one process's gradients relative to the largest gradient. If
    whole gradients are summed during the backward pass, also return the number of sums begun, and whether they equal,
    bit for bit, sums made after it and those of all ranks."""
    results: list[dict] = []
    sums.BUCKET_BYTES = 4096
    for case in cases:
        recipe = parse_recipe(case["recipe"])
        layout, train_settings = Layout(**case["layout"]), recipe.train
        inputs, targets = batch(recipe.model, train_settings.batch_size)
        parallel = choose_parallel(recipe, ranks, CPU, layout)
        size = parallel.micro_batch_size

        def accumulate(model: GPT, micro_step: int, recipe=recipe, inputs=inputs, targets=targets, size=size) -> None:
            part = slice(micro_step * size, (micro_step + 1) * size)
            with choose_precision(recipe.train.precision, CPU).autocast():
                rows, weights = (inputs[part], targets[part]), recipe.train.future_weights
                loss = next_token(model, rows, future_weights=weights).objective / targets.numel()
            if micro_step % 2 == 0 and (of_even := getattr(model.blocks[1], "of_even", None)) is not None:
                loss = loss + of_even.sum() / 7  # of two ranks, the first has these
            if micro_step < 2 and (of_first := getattr(model.blocks[0], "of_first", None)) is not None:
                loss = loss + of_first.sum() / 7  # the first micro-batch of each
            loss.backward()

        alone = model_of(recipe.model, False, case["lacks_gradients"])
        for i in range(train_settings.batch_size // size):
            accumulate(alone, i)
        model = parallel.place(model_of(recipe.model, case["checkpoint_blocks"], case["lacks_gradients"]), CPU)
        passes = []
        for early in (False, True) if layout.sums_in_backward else (True,):
            model.zero_grad()
            numbers = parallel.micro_steps(train_settings.batch_size)
            for i in numbers:
                before = _collectives_issued()
                if early and i == numbers[-1]:
                    parallel.begin_all_reduce(nullcontext)
                accumulate(model, i)
                n_begun = _collectives_issued() - before
            parallel.finish_gradients()
            passes.append({name: p.grad for name, p in parallel.parameters.items()})
        results.append({})
        if layout.sums_in_backward:
            differing = sum(g is not None and not torch.equal(g, passes[0][name]) for name, g in passes[1].items())
            digests = [float(g.double().sum()) for g in passes[1].values() if g is not None]
            apart = ranks.broadcast(digests) != digests
            (differing,) = ranks.all_reduce([differing + apart])
            begun = ranks.all_reduce([n_begun if rank == ranks.rank else 0 for rank in range(ranks.size)])
            results[-1] = {"differing": differing, "begun": begun}
        worst, wanted = 0.0, {name: p.grad for name, p in alone.named_parameters()}
        norm = torch.nn.utils.get_total_norm([g for g in wanted.values() if g is not None]).item()
        for name, parameter in parallel.parameters.items():
            if wanted[name] is None:
                assert parameter.grad is None, name
                continue
            assert wanted[name].any(), f"{name} has a gradient of zeros"
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            difference = (gradient - wanted[name]).abs().max() / wanted[name].abs().max()
            worst = max(worst, difference.item())
        results[-1] |= {"worst": worst, "norm": parallel.gradient_norm() / norm}
        read = saved(parallel.parameters, parallel)
        assert all(torch.equal(read[name], p.detach()) for name, p in alone.named_parameters())
        shares = parallel.shard_tensors(read)
        for name, parameter in parallel.parameters.items():
            mine, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (shares[name], parameter.detach()))
            assert torch.equal(mine, theirs), name
    return results


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of this process's live storages, including those resized: FSDP frees gathered tensors by
    resizing their storage."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> "HeldBytes":
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, n_bytes: int) -> Any:
            result = resize(storage, n_bytes)
            self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does to this rank's part comes here again
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            self._sizes[storage] = size = [0]
            weakref.finalize(storage, self._change, size, 0)
        self._change(self._sizes[storage], storage.nbytes())

    def _change(self, size: list[int], n_bytes: int) -> None:
        self.now_bytes += n_bytes - size[0]
        size[0] = n_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def memory(cases: list[dict], ranks: Ranks) -> list[int]:
    """Return, for each case, the maximum bytes of this rank's tensors in a step after the first."""
    peaks = []
    for case in cases:
        recipe, layout = parse_recipe(case["recipe"]), Layout(**case["layout"])
        precision, config = choose_precision(recipe.train.precision, CPU), recipe.model
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with HeldBytes() as held:
            parallel = choose_parallel(recipe, ranks, CPU, layout)
            model = parallel.place(GPT(config).train(), CPU)
            model.activation_checkpointing = recipe.train.activation_checkpointing
            optimizer = Optimizer(model, recipe.train, parallel.mesh)
            for _ in range(2):
                held.peak_bytes = 0
                numbers = parallel.micro_steps(recipe.train.batch_size)
                for i in numbers:
                    inputs, targets = batch(config, parallel.micro_batch_size)
                    with precision.autocast():
                        losses = next_token(model, (inputs, targets), future_weights=recipe.train.future_weights)
                    if i == numbers[-1]:
                        parallel.begin_all_reduce(nullcontext)
                    (losses.objective / targets.numel()).backward()
                parallel.finish_gradients()
                parallel.clip_gradients(1.0, parallel.gradient_norm())
                optimizer.step(scaler)
                optimizer.zero_grad()
            peaks.append(held.peak_bytes)
        del model, optimizer, parallel, losses, inputs, targets
    return peaks


def traffic(cases: list[dict], ranks: Ranks) -> list[dict[str, int]]:
    """Return the bytes of the collectives of a step after the first, by kind."""
    found = []
    for case in cases:
        recipe, layout = parse_recipe(case["recipe"]), Layout(**case["layout"])
        precision, config, settings = choose_precision(recipe.train.precision, CPU), recipe.model, recipe.train
        parallel = choose_parallel(recipe, ranks, CPU, layout)
        model = parallel.place(trainable_model(config, recipe.adapter, recipe.freeze), CPU)
        model.activation_checkpointing = settings.activation_checkpointing
        loss = partial(next_token, future_weights=settings.future_weights)
        step = TrainStep(model, settings, loss, precision, parallel)
        for _ in range(2):
            with Traffic(parallel.mesh) as sent:
                batches = [batch(config, parallel.micro_batch_size) for _ in parallel.micro_steps(settings.batch_size)]
                step.accumulate(batches, settings.batch_size * config.context_length)
                step.apply(step.gradient_norm())
        n_bytes: Counter[str] = Counter()
        for one in sent.sent:
            if one.n_bytes:
                n_bytes[one.kind] += one.n_bytes
        if "all_to_all" in n_bytes:  # a rank sends more where it owns more
            n_bytes["all_to_all"] = int(ranks.all_reduce([n_bytes["all_to_all"]])[0]) // ranks.size
        found.append(n_bytes)
        del model, step, parallel
    return found


class Gathers(Traffic):
    """Context that counts the all-gathers of tensors in any process group."""

    def _dimension(self, args: Any) -> str:
        return "any"

    @property
    def n(self) -> int:
        return sum(sent.kind == "all_gather" and sent.n_bytes > 0 for sent in self.sent)


def texts(cases: list[dict], ranks: Ranks) -> list[dict]:
    """Generate samples with a model after a step. Return how many texts the ranks generated, and how many differ from
    those of one device; the number of all-gathers, also of an evaluation of three batches a rank; and the peak bytes of
    this rank's tensors."""
    results = []
    for case in cases:
        recipe, layout, once = parse_recipe(case["recipe"]), Layout(**case["layout"]), case["once"]
        precision, config, settings = choose_precision(recipe.train.precision, CPU), recipe.model, recipe.train
        tokenizer = train_tokenizer(CharTokenizer(type="char"), ["".join(map(chr, range(97, 77 + config.vocab_size)))])
        sampling = SamplingSettings(max_tokens=settings.sample_tokens, temperature=0.8, top_k=50, seed=recipe.seed)

        def made(parallel: Parallel, model: GPT, settings=settings, sampling=sampling, tokenizer=tokenizer,
                 precision=precision) -> list[str]:  # fmt: skip
            engine = Engine(model, tokenizer, cache_dtype=precision.dtype)
            with parallel.inference_mode(generates=True), generating(precision):
                if not parallel.samples:
                    return []
                requests = [engine.submit(prompt, sampling, overflow="slide") for prompt in settings.sample_prompts]
                return [completion.text for (completion,) in engine.finish(requests)]

        with HeldBytes() as held:
            parallel = choose_parallel(recipe, ranks, CPU, layout)
            parallel.gathers_once = once
            model = parallel.place(model_of(config, checkpoint_blocks=False), CPU)
            optimizer = Optimizer(model, settings, parallel.mesh)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step(torch.amp.GradScaler("cpu", enabled=False))
            optimizer.zero_grad()
            held.peak_bytes = 0
            with Gathers(parallel.mesh) as sent:
                found = made(parallel, model)
            peak_bytes = held.peak_bytes
        windows = [(torch.ones(1, n).long(),) * 2 for n in range(1, 1 + 3 * layout.data_parallel)]  # each is a batch
        with Gathers(parallel.mesh) as in_evaluation, parallel.inference_mode():
            evaluate_loss(model, windows, workers=parallel)
        whole = saved(parallel.parameters, parallel)
        del parallel, optimizer
        one = Parallel(settings)
        alone = one.place(GPT(config), CPU).train()
        alone.load_state_dict(whole)
        expected = made(one, alone)
        wrong = [text for text in found if text not in expected] + ["too few"] * (0 < len(found) < len(expected))
        (n_wrong,) = ranks.all_reduce([len(wrong)])
        (n_found,) = ranks.all_reduce([len(found)])
        results.append({
            "wrong": n_wrong, "found": n_found, "peak": peak_bytes, "texts": len(set(expected)),
            "gathers": sent.n, "in_evaluation": in_evaluation.n,
        })  # fmt: skip
    return results


def owner_steps(cases: list[dict], ranks: Ranks) -> list[dict]:
    """Four steps of an optimizer of whole matrices by one rank; two by all ranks in a layout, then two by one that
    resumes them; and two by one, then two by all. Whether the weights and states are the same bits on this rank, and
    each rank's share of the work, and of the bytes of the matrices' state, in the four steps of all."""
    results, made = [], {Muon: Muon._orthogonalized, SOAP: SOAP._direction}
    for case in cases:
        recipe, layout = parse_recipe(case["recipe"]), Layout(**case["layout"])
        kind = SOAP if recipe.train.optimizer == "soap" else Muon
        ownership, work, kept = OPTIMIZERS[recipe.train.optimizer].ownership, 0.0, 0

        def counted(self, gradients: Any, *others: Any, kind=kind, ownership=ownership) -> Tensor:
            nonlocal work
            work += sum(ownership.work(matrix.shape) for matrix in (gradients if kind is Muon else [gradients]))
            return made[kind](self, gradients, *others)

        def run(steps: range, together: bool, before: dict[str, Tensor] = {}, recipe=recipe, layout=layout) -> dict:  # noqa: B006
            """Return the weights and optimizer state after these steps, starting from those given."""
            nonlocal kept
            parallel = choose_parallel(recipe, ranks, CPU, layout) if together else Parallel(recipe.train)
            model = parallel.place(model_of(recipe.model, checkpoint_blocks=False), CPU)
            optimizer = Optimizer(model, recipe.train, parallel.mesh)
            state = parallel.shard_tensors(before, optimizer.holders)
            weights = {name: state.pop(name) for name in parallel.parameters if name in state}
            optimizer.load_state_tensors(state)
            with torch.no_grad():
                for name, tensor in weights.items():
                    parallel.parameters[name].copy_(tensor)
            for step in steps:
                generator = torch.Generator().manual_seed(step)
                gradients = {n: torch.randn(p.shape, generator=generator) for n, p in parallel.parameters.items()}
                del gradients["blocks.1.attention.key.weight"]
                for name, gradient in parallel.shard_tensors(gradients).items():
                    parallel.parameters[name].grad = gradient
                optimizer.step(torch.amp.GradScaler("cpu", enabled=False))
            state = optimizer.state_tensors()
            if together:
                own = optimizer._optimizers[recipe.train.optimizer][1]
                tensors = (local(state[key]) for key in state if key.rpartition("/")[0] in own)
                kept = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)
            return saved({**parallel.parameters, **state}, parallel, optimizer.holders)

        alone = run(range(4), together=False)
        name = made[kind].__name__
        setattr(kind, name, counted)
        first = run(range(2), together=True)
        last = run(range(2, 4), True, run(range(2), False))
        setattr(kind, name, made[kind])
        ends = [run(range(2, 4), False, first), last]
        assert ends[0].keys() == ends[1].keys() == alone.keys() and any("/" in key for key in alone)
        differing = sum(not torch.equal(one[key], tensor) for one in ends for key, tensor in alone.items())
        (differing_anywhere,) = ranks.all_reduce([differing])
        result = {"differing": differing_anywhere}
        for what, own_share in (("work", work), ("state", kept)):
            shares = ranks.all_reduce([own_share if rank == ranks.rank else 0 for rank in range(ranks.size)])
            result[what] = [share / sum(shares) for share in shares]
        results.append(result)
    return results


def built(cases: list[dict], ranks: Ranks) -> list[dict]:
    """Models of which each rank builds only its parts: the names of tensors that differ from those of the same model
    built by one process, and the most bytes held in addition to the parts, as a share of the two largest tensors' or,
    with `init: induction`, of those that it changes."""
    results = []
    for case in cases:
        recipe, layout = parse_recipe(case["recipe"]), Layout(**case["layout"])
        make = partial(trainable_model, recipe.model, recipe.adapter, recipe.freeze)
        parallel = choose_parallel(recipe, ranks, CPU, layout)
        torch.manual_seed(3)
        peaks: list[int] = []
        with HeldBytes() as held:
            ready = parallel._placed

            def noted(model: GPT, held=held, peaks=peaks, ready=ready) -> GPT:
                peaks.append(held.peak_bytes)
                return ready(model)

            parallel._placed = noted
            model = parallel.build(make, CPU)
        after = torch.rand(())
        torch.manual_seed(3)
        whole = make()
        named, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
        found = saved(parallel.parameters, parallel)
        differing = [name for name, tensor in found.items() if not torch.equal(tensor, named[name])]
        differing += [name for name, tensor in buffers.items() if not torch.equal(tensor, model.get_buffer(name))]
        differing += [n for n, p in named.items() if p.requires_grad != parallel.parameters[n].requires_grad]
        differing += ["the random state"] * (not torch.equal(after, torch.rand(())))
        own = sum(local(p).nbytes for p in parallel.parameters.values()) + sum(b.nbytes for b in buffers.values())
        kept = "token_embedding", "untied_head", "blocks.0.attention", "blocks.1.attention"
        two = sorted(p.nbytes for n, p in named.items() if recipe.model.init != "induction" or n.startswith(kept))
        allowed = sum(two if recipe.model.init == "induction" else two[-2:])
        results.append({"differing": differing, "held": (peaks[0] - own) / allowed})
    return results


def saved(tensors: Mapping[str, Tensor], parallel: Parallel, holders: Mapping[str, int] = NO_HOLDERS) -> dict:
    """Return the complete tensors on every rank, from a checkpoint that all ranks write."""
    folder = Path(parallel.ranks.from_rank_zero(tempfile.mkdtemp))
    parts = dict(parallel.parts({name: tensor.detach() for name, tensor in tensors.items()}, holders))
    checkpoint = save_checkpoint(folder, 1, parts, None, {}, parallel.ranks.writers)
    read = parallel.ranks.rank_zero_first(lambda: {n: t.clone() for n, t in checkpoint.model_tensors().items()})
    parallel.ranks.all_reduce([0.0])  # all have read
    shutil.rmtree(folder, ignore_errors=True)
    return read


def note_saved(path: Path, parts: Any = ManyDevices.parts) -> None:
    """Log, from now on, each kind of tensors that this rank saves: weights or optimizer moments."""

    def noted(parallel: ManyDevices, tensors: dict[str, Tensor], *holders: Mapping[str, int]) -> Any:
        with path.open("a", encoding="utf-8") as file:
            file.write("moments\n" if any("/" in name for name in tensors) else "weights\n")
        return parts(parallel, tensors, *holders)

    ManyDevices.parts = noted  # type: ignore[method-assign]


def runs(recipes: list[dict], ranks: Ranks) -> None:
    """Train each recipe; write what each rank saw to a file if one is given; one rank sleeps if one is given."""
    for case in recipes:
        if "pause" in case:  # each pass of a model takes so long
            features = GPT.features

            def slow(
                model: GPT, *arguments: Any, features: Any = features, seconds: float = case["pause"], **options: Any
            ) -> Tensor:
                time.sleep(seconds)
                return features(model, *arguments, **options)

            GPT.features = slow  # type: ignore[method-assign]
        seen = Path(case["seen"]) if "seen" in case else None

        def objective(model: GPT, batch: Batch, seen: Path | None = seen, case: dict = case) -> Losses:
            if seen is not None and model.training:
                with seen.with_suffix(f".{ranks.rank}").open("a", encoding="utf-8") as file:
                    file.write(hashlib.sha256(batch[0].numpy().tobytes()).hexdigest() + "\n")
            if case.get("sleeps") == ranks.rank:
                time.sleep(60)
            return next_token(model, batch)

        recipe = load_recipe(case["path"], case["overrides"])
        if "gathered" in case:
            note_saved(Path(f"{case['gathered']}.{ranks.rank}"))
        if case.get("blind") == ranks.rank:
            recipe = recipe.model_copy(update={"run_dir": recipe.run_dir / "on another disk"})
        train(
            recipe,
            resume=case.get("resume", False),
            objective=objective if case.keys() & {"seen", "sleeps"} else None,
            ranks=ranks,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, path = sys.argv[1], Path(sys.argv[2])
    with join(float(sys.argv[3]) if len(sys.argv) > 3 else 60, CPU) as ranks:
        cases = json.loads(path.read_text(encoding="utf-8"))
        if what != "train":
            results = {
                "gradients": gradients,
                "memory": memory,
                "traffic": traffic,
                "texts": texts,
                "owners": owner_steps,
                "built": built,
            }[what](cases, ranks)
            if ranks.is_rank_zero:
                path.with_suffix(".results").write_text(json.dumps(results), encoding="utf-8")
        else:
            runs(cases, ranks)
