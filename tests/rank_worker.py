"""What tests/test_parallel.py has several processes do: `torchrun … rank_worker.py gradients|train JSON [TIMEOUT]`."""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from gptworks.config import ModelConfig
from gptworks.device import choose_precision
from gptworks.model import GPT
from gptworks.plan.memory import Layout
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.train.loop import train
from gptworks.train.objectives import Batch, Losses, next_token
from gptworks.train.parallel import choose_parallel
from gptworks.train.ranks import Ranks, join

CPU = torch.device("cpu")


def batch(config: ModelConfig, n_sequences: int) -> Batch:
    tokens = torch.randint(
        config.vocab_size, (n_sequences, config.context_length + 1), generator=torch.Generator().manual_seed(2)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def model_of(config: ModelConfig, checkpoint_blocks: bool) -> GPT:
    torch.manual_seed(1)
    model = GPT(config)
    model.activation_checkpointing = "block" if checkpoint_blocks else "none"
    return model.train()


def gradients(cases: list[dict], ranks: Ranks) -> list[dict]:
    """The largest difference from one process's gradients relative to the largest gradient, in each case."""
    results = []
    for case in cases:
        recipe = parse_recipe(case["recipe"])
        layout, train_settings = Layout(**case["layout"]), recipe.train
        inputs, targets = batch(recipe.model, train_settings.batch_size)
        alone = model_of(recipe.model, checkpoint_blocks=False)
        with choose_precision(train_settings.precision, CPU).autocast():
            (next_token(alone, (inputs, targets)).objective / targets.numel()).backward()

        parallel = choose_parallel(recipe, ranks, CPU, layout)
        model = parallel.place(model_of(recipe.model, case["checkpoint_blocks"]), CPU)
        size = parallel.micro_batch_size
        for i in parallel.micro_steps:
            part = slice(i * size, (i + 1) * size)
            with choose_precision(train_settings.precision, CPU).autocast():
                losses = next_token(model, (inputs[part], targets[part]))
            (losses.objective / targets.numel()).backward()
        parallel.finish_gradients()
        worst, wanted = 0.0, {name: p.grad for name, p in alone.named_parameters()}
        norm = torch.nn.utils.get_total_norm(wanted.values()).item()
        for name, parameter in parallel.parameters.items():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            difference = (gradient - wanted[name]).abs().max() / wanted[name].abs().max()
            worst = max(worst, difference.item())
        results.append({"worst": worst, "norm": parallel.gradient_norm() / norm})
        saved = dict(parallel.whole({name: p.detach() for name, p in parallel.parameters.items()}))
        assert all(torch.equal(saved[name], p.detach()) for name, p in alone.named_parameters())
        shares = parallel.shares(saved)
        for name, parameter in parallel.parameters.items():
            mine, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (shares[name], parameter.detach()))
            assert torch.equal(mine, theirs), name
    return results


def runs(recipes: list[dict], ranks: Ranks) -> None:
    """Train each recipe, noting what each rank has seen where a file is named, while one sleeps where one is named."""
    for case in recipes:
        seen = Path(case["seen"]) if "seen" in case else None

        def objective(model: GPT, batch: Batch, seen: Path | None = seen, case: dict = case) -> Losses:
            if seen is not None and model.training:
                with seen.with_suffix(f".{ranks.rank}").open("a", encoding="utf-8") as file:
                    file.write(hashlib.sha256(batch[0].numpy().tobytes()).hexdigest() + "\n")
            if case.get("sleeps") == ranks.rank:
                time.sleep(60)
            return next_token(model, batch)

        recipe = load_recipe(case["path"], case["overrides"])
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
        if what == "gradients":
            results = gradients(cases, ranks)
            if ranks.is_first:
                path.with_suffix(".results").write_text(json.dumps(results), encoding="utf-8")
        else:
            runs(cases, ranks)
