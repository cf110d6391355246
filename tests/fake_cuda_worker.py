"""Steps and generation on fake CUDA tensors, in a process with the library of fake_cuda.cpp preloaded:

python fake_cuda_worker.py steps|generation|planted   prints a line of JSON for each case: its name and what was found
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy  # noqa: F401
import pydantic  # noqa: F401 before the forks
import torch
import torch._dynamo
import torch._inductor

BASE = {"vocab_size": 512, "context_length": 64, "n_layers": 2, "d_model": 64, "n_heads": 4}


def steps(folder: Path) -> Iterator[tuple[str, Any]]:
    """The name and the settings of each kind of step."""
    from gptworks.config import LoRAConfig, ModelConfig, TrainConfig
    from gptworks.config.objective import (
        DistillationObjective,
        InstructionObjective,
        OddsRatioObjective,
        PreferenceObjective,
        RewardObjective,
    )
    from gptworks.training.rehearsal.trace import Rehearsal

    def case(
        name: str, model: Any = (), train: Any = (), precision: str = "bf16", **more: Any
    ) -> tuple[str, Rehearsal]:
        settings = {"max_steps": 5, "batch_size": 4, "micro_batch_size": 2, "optimizer": "adamw", "learning_rate": 1e-3}
        model, train = ModelConfig(**(BASE | dict(model))), TrainConfig(**(settings | dict(train)))
        return name, Rehearsal(model, train, "cuda", precision, **more)

    yield case("bf16")
    yield case("fp32", precision="fp32")
    yield case("fp16", precision="fp16")
    for optimizer in ("muon", "normuon", "soap"):
        yield case(optimizer, train={"optimizer": optimizer})
        yield case(f"{optimizer} fp16", train={"optimizer": optimizer}, precision="fp16")
    yield case("cautious", train={"cautious_weight_decay": True, "optimizer": "muon"})
    yield case("int8 state", train={"optimizer_state": "int8"})
    yield case("no clipping", train={"grad_clip": 0.0})
    yield case("recomputed", train={"activation_checkpointing": "block"})
    yield case("windows", {"window": 16, "window_pattern": ("full", "window")})
    yield case("grouped queries", {"n_kv_heads": 2})
    yield case("grouped queries in windows", {"n_kv_heads": 2, "window": 16})
    yield case("gpt2", {"position": "learned", "norm": "layernorm", "mlp": "gelu", "attention_bias": True,
                        "mlp_bias": True, "norm_bias": True})  # fmt: skip
    yield case("dropout", {f"dropout_{place}": 0.1 for place in ("attention", "residual", "embedding", "mlp")})
    yield case("experts", {"n_experts": 4})
    yield case("experts with biases", {"n_experts": 4, "mlp": "gelu", "mlp_bias": True, "d_ff_shared": 32})
    yield case("experts recomputed", {"n_experts": 4}, {"activation_checkpointing": "block", "optimizer": "muon"})
    yield case("softcaps", {"attention_softcap": 5.0, "logit_softcap": 5.0})
    yield case("norms after", {"norm_placement": "after", "qk_norm": "whole"})
    yield case("norms around", {"norm_placement": "both", "qk_norm": True})
    yield case("parallel residual", {"parallel_residual": True})
    yield case("future tokens", {"n_future_tokens": 3}, {"future_weights": (0.5, 0.2)})
    yield case("laboratory", {"unet_skips": True, "value_residual": True, "value_embeddings": ("table", "none"),
                              "attention_gate": True, "smear": True, "bigram_vocab_size": 1000})  # fmt: skip
    yield case("repeated layers", {"layer_repeats": 2})
    yield case("packed documents", several_texts=True)
    yield case("packed documents in windows", {"window": 16, "smear": True}, several_texts=True)
    yield case("packed documents with a softcap", {"attention_softcap": 5.0}, several_texts=True)
    yield case("packed documents of grouped queries", {"n_kv_heads": 2, "qk_norm": True, "value_residual": True},
               {"activation_checkpointing": "block"}, several_texts=True)  # fmt: skip
    yield case("induction", {"init": "induction"})
    yield case("untied", {"tie_embeddings": False})
    for kind in ("linear", "dynamic", "yarn", "llama3"):
        yield case(f"rope {kind}", {"rope_scaling": {"type": kind, "factor": 2.0}})
    factors = {"short_factors": (1.0,) * 8, "long_factors": (2.0,) * 8}
    yield case("rope longrope", {"rope_scaling": {"type": "longrope", "factor": 2.0} | factors}, several_texts=True)
    for base in ("full", "int8", "int4"):
        yield case(f"lora over {base}", adapter=LoRAConfig(rank=4, base=base))
    yield case("instruction", objective=InstructionObjective(type="instruction"))
    yield case("preference", objective=PreferenceObjective(type="preference"))
    yield case("preference with lora", adapter=LoRAConfig(rank=4), objective=PreferenceObjective(type="preference"))
    yield case("odds ratio", objective=OddsRatioObjective(type="odds_ratio"))
    yield case("reward", train={"batch_size": 8, "micro_batch_size": 4},
               objective=RewardObjective(type="reward", reward="reward.py:score", group_size=4))  # fmt: skip
    teacher = {
        "name": "teacher", "model": BASE, "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]}, "train": {"max_steps": 1},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(teacher), encoding="utf-8")
    yield case("distillation", objective=DistillationObjective(type="distillation", teacher=folder))


class Fault(NamedTuple):
    """A text of gptworks' source, the faulty text that replaces it, and what must be found in that file."""

    file: str
    old: str
    new: str
    kind: str
    step: str = "bf16"


STEP = "training/step.py"
FAULTS = {
    "a buffer on the CPU": Fault(
        "model/rotary.py", "cos.to(there), sin.to(there)", 'cos.to("cpu"), sin', "wrong device"
    ),
    "a parameter on the CPU": Fault(
        "model/layers.py", "nn.Parameter(torch.ones(width))",
        'nn.Parameter(torch.ones(width, device="cpu"))', "wrong device",
    ),
    "optimizer state on the CPU": Fault(
        "training/optim/adamw_int8.py", "torch.zeros_like(parameter, dtype=dtype,",
        'torch.zeros_like(parameter, dtype=dtype, device="cpu",', "wrong device", "int8 state",
    ),
    "item in the step": Fault(STEP, "total += losses.loss", "total += losses.loss.item()", "host read"),
    "float of a tensor": Fault(STEP, "total += losses.loss", "total += float(losses.loss)", "host read"),
    "a condition on a tensor": Fault(
        STEP, "            total += losses.loss",
        "            if losses.loss > 0:\n                total += losses.loss", "host read",
    ),
    "a result moved to the CPU": Fault(
        "model/block.py", "return add(x, y, self.scale), router", "return add(x, y.cpu(), self.scale), router",
        "host read",
    ),
    "a result on the CPU, used": Fault(
        "model/block.py", "return add(x, y, self.scale), router", "return add(x, y.cpu(), self.scale), router",
        "wrong device",
    ),
    "a float32 product under autocast": Fault(
        "model/layers.py", "        return down(self.dropout(inner))",
        "        with without_autocast(x.device):\n            return inner.float() @ down.weight.T", "float32 product",
    ),
    "a boolean index": Fault(
        "training/objectives/next_token.py", "    head, softcap = model.head_weight",
        "    features, targets = features[targets != IGNORED], targets[targets != IGNORED]\n"
        "    head, softcap = model.head_weight", "host read",
    ),
    "nonzero": Fault(
        "training/objectives/next_token.py", "return (batch[1] != IGNORED).sum()",
        "return (batch[1] != IGNORED).nonzero()[:, 0].sum()", "host read", "experts",
    ),
    "masked_select": Fault(
        "training/objectives/next_token.py", "return (batch[1] != IGNORED).sum()",
        "return batch[1].masked_select(batch[1] != IGNORED).sum()", "host read", "experts",
    ),
    "unique": Fault(
        "training/objectives/next_token.py", "return (batch[1] != IGNORED).sum()", "return batch[1].unique().sum()",
        "host read", "experts",
    ),
    "bincount": Fault(
        "model/moe.py", "return chosen.new_zeros(router_logits.size(-1)).scatter_add_(0, chosen, ",
        "return chosen.bincount(minlength=router_logits.size(-1)) * (0 * ", "host read", "experts",
    ),
    "experts counted on the host": Fault(
        "model/moe.py", 'tokens.device.type == "cuda"', 'tokens.device.type == "xpu"', "host read", "experts"
    ),
    "a graph break": Fault(
        "model/moe.py", 'tokens.device.type == "cuda"', 'tokens.device.type == "xpu"', "graph break", "experts"
    ),
    "a graph break on purpose": Fault(
        "model/block.py", "        y, own = self.attend",
        "        import torch\n        torch._dynamo.graph_break()\n        y, own = self.attend", "graph break",
    ),
    "a tensor made without device=": Fault(
        "model/scores.py", "key = torch.arange(n_keys, device=device)[None, :]", "key = torch.arange(n_keys)[None, :]",
        "wrong device", "windows",
    ),
    "a blocking copy to the device": Fault(
        "training/distributed/parallel.py", "torch.full((), norm, device=device)", "torch.tensor(norm, device=device)",
        "blocking copy",
    ),
    "an index from the host": Fault(
        "model/gpt.py", "x = x + self.position_embedding.weight[positions]",
        "x = x + self.position_embedding.weight[list(range(length))]", "blocking copy", "gpt2",
    ),
    "rows repeated without a size": Fault(
        "training/objectives/next_token.py", "return (batch[1] != IGNORED).sum()",
        "return batch[1].flatten().repeat_interleave((batch[1] != IGNORED).flatten().long()).sum()", "host read",
        "experts",
    ),
    "a wait for the device": Fault(
        STEP, "            total += losses.loss",
        "            torch.cuda.synchronize()\n            total += losses.loss", "host read",
    ),
    "a list of a tensor": Fault(STEP, "total += losses.loss", "total += losses.loss[None].tolist()[0]", "host read"),
    "a step that fails": Fault(
        "model/block.py", "        y, own = self.attend", "        inner.view(7)\n        y, own = self.attend",
        "failed",
    ),
}  # fmt: skip


class Planting(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module of gptworks with a fault in its source."""

    def __init__(self, fault: Fault, package: Path) -> None:
        self._fault, self._file = fault, package / fault.file
        super().__init__("gptworks." + fault.file.removesuffix(".py").replace("/", "."), str(self._file))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self, origin=self.path) if name == self.name else None

    def path_stats(self, path: Any) -> Any:
        raise OSError("no compiled module is read")

    def get_data(self, path: Any) -> bytes:
        source = self._file.read_text(encoding="utf-8")
        assert source.count(self._fault.old) == 1, f"{self._fault.file} has not one {self._fault.old!r}"
        return source.replace(self._fault.old, self._fault.new).encode()


def generation() -> Iterator[tuple[str, Any]]:
    """What is found in prefill, decoding with several settings, and an evaluation, of several models."""
    from gptworks.config import ModelConfig
    from gptworks.evaluation.loss import evaluate_loss
    from gptworks.infer.backends.backend import Chunk, TorchBackend
    from gptworks.infer.sampling import Sampler, SamplingSettings, sample
    from gptworks.model.gpt import GPT
    from gptworks.training.rehearsal.watched import Watch, fake_cuda

    factors = {"short_factors": (1.0,) * 8, "long_factors": (2.0,) * 8}
    models = {
        "plain": {},
        "grouped queries in windows": {"n_kv_heads": 2, "window": 16},
        "learned positions": {"position": "learned", "smear": True},
        "softcaps": {"attention_softcap": 5.0, "logit_softcap": 5.0},
        "experts": {"n_experts": 4},
        "rope dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope longrope": {"rope_scaling": {"type": "longrope", "factor": 2.0} | factors},
    }
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9}, {"frequency_penalty": 0.5, "logit_bias": {3: 1.0}},
    ]  # fmt: skip

    def found(watch: Watch) -> list[Any]:
        findings, watch.found = [f for f in watch.findings() if f.count], type(watch.found)()
        return [[f.kind, f.operation, f.where, f.count] for f in findings]

    for name, settings in models.items():
        watch = Watch("bf16")
        with fake_cuda(watch):
            with torch.device("cuda"):
                model = GPT(ModelConfig(**(BASE | settings)))
            backend = TorchBackend(model, 4, 64)
            texts = [Sampler(SamplingSettings(seed=1, **kind), [1, 2]) for kind in kinds]
            with watch, torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
                for slot in range(4):
                    backend.compute([Chunk(slot, 0, list(range(20)))], True)
                yield f"{name}: prefill", found(watch)
                for text in texts:
                    text.push(5)
                logits = backend.compute([Chunk(slot, 20, [7]) for slot in range(4)], True)
                yield f"{name}: decode", found(watch)
                for kind, some in (("greedy", texts[:1]), ("drawn", texts[1:2]), ("all", texts)):
                    sample(logits[: len(some)], some)
                    yield f"{name}: sample {kind}", found(watch)
                windows = [(torch.zeros(64, dtype=torch.int64, device="cpu"),) * 2] * 3
                evaluate_loss(model, windows)
                yield f"{name}: evaluate", found(watch)


def memory() -> Iterator[tuple[str, Any]]:
    """Peak bytes of a training step on fake CUDA tensors: traced, and planned."""
    import gptworks
    from gptworks.planning.memory import training_peak
    from gptworks.training.rehearsal.trace import Rehearsal, trace_step
    from gptworks.training.rehearsal.watched import Watch, install

    install(Watch("bf16"))
    shape = ("model.n_layers=2", "train.batch_size=48", "train.micro_batch_size=24")
    for settings in ((), ("train.precision=fp32",), ("model.n_experts=4",), ("model.vocab_size=90000",)):
        plan = gptworks.plan("gpt2-mini", *shape, *settings, device="h100")
        yield " ".join(settings), [trace_step(Rehearsal.of(plan, "cuda")).peak_bytes, plan.peak.total_bytes]
    for settings in ((), ("model.position=rope", "model.n_kv_heads=2"), ("train.precision=fp32",)):
        plan = gptworks.plan("gpt2-mini", *shape, *settings, device="h100")
        traced = trace_step(replace(Rehearsal.of(plan, "cuda"), several_texts=True))
        planned = training_peak(replace(plan.setting, several_texts=True, saves=False))
        yield " ".join(("several texts", *settings)), [traced.peak_bytes, planned.total_bytes]


def main(what: str, folder: Path) -> None:
    from gptworks.training.rehearsal.watched import watched_step

    if what in ("generation", "memory"):
        for name, found in generation() if what == "generation" else memory():
            print(json.dumps([name, found]), flush=True)
        return
    for name, rehearsal in steps(folder):
        print(json.dumps([name, asdict(watched_step(rehearsal))]), flush=True)


def planted(package: Path, folder: Path) -> None:
    for name, fault in FAULTS.items():
        if not (child := os.fork()):
            try:
                sys.meta_path.insert(0, Planting(fault, package))
                from gptworks.training.rehearsal.watched import watched_step

                found = watched_step(dict(steps(folder))[fault.step])
                print(json.dumps([name, asdict(found)]), flush=True)
            except BaseException:
                print(json.dumps([name, {"not_checked": traceback.format_exc()}]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "planted":
        planted(Path(importlib.util.find_spec("gptworks").submodule_search_locations[0]), folder)
    else:
        main(what, folder)
