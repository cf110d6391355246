"""Records what gptworks computes and prints, and compares two records, to check changes that must not change results.

    python tests/golden.py record FILE       # some two minutes
    python tests/golden.py compare OLD NEW   # exit code 1 if a value differs

A value keeps the name that it was first recorded under, though the command has changed since.

A record holds the losses of a short run of each objective, the texts of the engine on both backends, every value that
a command prints as JSON, and every number on every page. Values hold for one machine; figures of time are left out.
"""

import argparse
import inspect
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}

OF_TIME = re.compile(
    "second|time|speed|tokens_per|rate_of|eta|date|started|ended|duration|memory_bytes|mfu|utilization|sha256|when"
    "|available|at the peak|version|host|hours|measured"
)
"""Names of values that differ from run to run."""


def write_data(folder: Path) -> None:
    """Write source code, conversations and preference pairs."""
    (folder / "text.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    items = [(f"{n} and {7 * n % 50} make", str(n + 7 * n % 50)) for n in range(120)]
    chats = [{"instruction": question, "output": answer} for question, answer in items]
    pairs = [{"prompt": question, "chosen": answer, "rejected": "many"} for question, answer in items]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "task.jsonl").write_text(
        "\n".join(json.dumps({"question": q, "answer": a}) for q, a in items[:20]), encoding="utf-8"
    )


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return a recipe for each objective, and recipes for other settings that change the step."""
    model = {
        "context_length": 64,
        "n_layers": 2,
        "d_model": 64,
        "n_heads": 4,
        "vocab_size": 512,
        "norm": "layernorm",
        "mlp": "gelu",
        "qk_norm": False,
        "zero_init_projections": False,
    }
    modern = model | {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "d_ff": 128}
    train = {
        "max_steps": 8, "batch_size": 4, "optimizer": "adamw", "learning_rate": 0.003, "weight_decay": 0.1,
        "schedule": "cosine", "final_rate_fraction": 0.1, "warmup_steps": 2, "sample_every": 0, "checkpoint_every": 4,
        "evaluate_every": 4, "evaluate_sequences": 8, "precision": "fp32",
    }  # fmt: skip
    text = {"sources": [{"type": "text", "path": "text.txt"}], "validation": {"fraction": 0.1}}
    tokenizer = {"type": "bpe", "vocab_size": 512}
    tuned = {"type": "file", "path": "runs/next/tokenizer", "chat_template": "alpaca"}

    def data(type: str, name: str) -> dict[str, Any]:
        return {"sources": [{"type": type, "path": f"{name}.jsonl"}], "validation": {"fraction": 0.1}}

    def tune(objective: dict[str, Any], type: str, name: str, **more: Any) -> dict[str, Any]:
        base = {"initialize_from": "runs/next", "model": modern, "tokenizer": tuned, "train": train}
        return base | {"objective": objective, "data": data(type, name)} | more

    (folder / "rewards.py").write_text(
        "def score(completion, prompt, answer):\n    return completion.count('e') / (1 + len(completion))\n",
        encoding="utf-8",
    )
    lora = {"rank": 4, "alpha": 8}
    reward = {"type": "reward", "reward": "rewards.py:score", "group_size": 2, "max_tokens": 8, "beta": 0.1}
    pretrain = {"tokenizer": tokenizer, "data": text, "train": train, "model": modern}
    return {
        "next": pretrain,
        "gpt2": pretrain | {"model": model | {"dropout_residual": 0.1, "dropout_attention": 0.1}},
        "moe": pretrain | {"model": modern | {"n_experts": 4, "n_experts_per_token": 2}},
        "muon": pretrain
        | {"train": train | {"optimizer": "muon", "precision": "bf16", "max_steps": 6, "micro_batch_size": 2}},
        "instruction": tune({"type": "instruction"}, "conversations", "chats"),
        "lora": tune({"type": "instruction"}, "conversations", "chats", adapter=lora),
        "preference": tune({"type": "preference"}, "preferences", "pairs"),
        "odds_ratio": tune({"type": "odds_ratio"}, "preferences", "pairs"),
        "distillation": pretrain | {"objective": {"type": "distillation", "teacher": "runs/next"}, "tokenizer": tuned},
        "reward": tune(reward, "conversations", "chats"),
    }


class Recorder:
    """Runs commands in a folder, and records their output."""

    def __init__(self) -> None:
        from typer.testing import CliRunner

        from gptworks.cli import app

        self._app, self._runner = app, CliRunner()
        self.values: dict[str, Any] = {}

    def command(self, line: str, *, name: str | None = None) -> str:
        result = self._runner.invoke(self._app, shlex.split(line))
        if result.exit_code not in (0, 3):
            print(
                f"gptworks {line}: exit code {result.exit_code}\n{result.output}\n{result.exception!r}", file=sys.stderr
            )
            self.values[f"$ {line}"] = f"exit code {result.exit_code}"
            return ""
        name = name or line
        if "--json" in line:
            self.values |= flat(f"$ {name}", json.loads(result.stdout.replace(str(Path.cwd()), "FOLDER")))
        return result.stdout

    def page(self, path: Path, name: str) -> None:
        text = re.sub(r"<style.*?</style>|<script.*?</script>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r"<[^>]*>", " ", text)
        self.values[f"page {name}"] = sorted(re.findall(r"\d+(?:[,.]\d+)*", text))


def still(run: Path) -> None:
    """Replace the times in a run's files, so that its pages are the same each time."""

    def stopped(value: Any, step: float, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: stopped(one, value.get("step", step), f"{name}.{key}") for key, one in value.items()}
        is_time = isinstance(value, int | float | str) and OF_TIME.search(name)
        return type(value)(step) if is_time else value

    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    metrics.write_text("".join(json.dumps(stopped(line, 1)) + "\n" for line in lines), encoding="utf-8")
    outcome = run / "outcome.json"
    outcome.write_text(json.dumps(stopped(json.loads(outcome.read_text(encoding="utf-8")), 1)), encoding="utf-8")


def flat(name: str, value: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, without times and file paths."""
    if OF_TIME.search(name.rsplit(".", maxsplit=1)[-1]):
        return {}
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in flat(f"{name}.{key}", one).items()}
    if isinstance(value, list):
        return {k: v for i, one in enumerate(value) for k, v in flat(f"{name}[{i}]", one).items()}
    return {name: value}


def record() -> dict[str, Any]:
    import yaml

    recorder = Recorder()
    folder = Path(tempfile.mkdtemp(prefix="gptworks-golden-"))
    os.chdir(folder)
    write_data(folder)
    for name, recipe in recipes(folder).items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump({"name": name} | recipe), encoding="utf-8")
        recorder.command(f"train {name}.yaml")
        for i, line in enumerate(Path(f"runs/{name}/metrics.jsonl").read_text(encoding="utf-8").splitlines()):
            recorder.values |= flat(f"losses {name}[{i}]", json.loads(line))
        still(Path(f"runs/{name}"))
        on = "--device h100 --world-size 2"
        recorder.command(f"plan {name}.yaml --json {on}", name=f"plan {name}.yaml --json --details {on}")
        recorder.command(f"report runs/{name}")
        recorder.page(Path(f"runs/{name}/report.html"), f"report {name}")
    presets = json.loads(recorder.command("presets --json"))
    for preset in presets:
        recorder.command(f"describe {preset} --json")
        on = "--device h100 --world-size 8"
        recorder.command(f"plan {preset} --json {on}", name=f"plan {preset} --json --details {on}")
        recorder.command(f"describe {preset} --html page.html")
        recorder.page(Path("page.html"), f"describe {preset}")
    recorder.command("plan next.yaml --json --trace")
    recorder.command("inspect instruction.yaml --json")
    recorder.command("inspect preference.yaml --json")
    task = {
        "type": "exact_match",
        "data": "task.jsonl",
        "prompt": "{{question}}",
        "answer": "answer",
        "generation": {"max_tokens": 4},
    }
    Path("task.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    recorder.command("evaluate runs/next --json --by-position --compressors --stride 32")
    recorder.command("evaluate runs/next --json --text text.txt --task task.yaml --calibration --memorization")
    recorder.command(
        "compare runs/next runs/gpt2 runs/moe --json --html compare.html",
        name="compare runs/next runs/gpt2 runs/moe --json --out compare.html",
    )
    recorder.page(Path("compare.html"), "compare")
    recorder.command("evaluate runs/gpt2 --json --text text.txt")
    recorder.command("compare runs/next runs/gpt2 --evaluations --json")
    for backend in ("torch", "native"):
        os.environ["GPTWORKS_NATIVE"] = "1" if backend == "native" else "0"
        engine_texts(recorder, backend)
    recorder.command("export runs/next hf --json --no-verify")
    recorder.command("export runs/next next.gguf --format gguf --type q8_0 --json")
    recorder.command("export runs/lora adapter --adapter --json --no-verify")
    recorder.command("import hf runs/imported --json --no-verify")
    for weights in ("int8", "int4"):
        recorder.command(f"quantize runs/next runs/{weights} --weights {weights} --json")
    os.chdir(tempfile.gettempdir())
    shutil.rmtree(folder)
    return recorder.values


def engine_texts(recorder: Recorder, backend: str) -> None:
    """Record greedy and sampled texts, with several samples, stop strings, drafts and a sliding window."""
    for options in (
        "--temperature 0", "--seed 1 --samples 3", "--seed 2 --top-k 20 --top-p 0.9 --min-p 0.01 --stop and",
        "--seed 3 --repetition-penalty 1.2 --frequency-penalty 0.1 --presence-penalty 0.1",
        "--temperature 0 --speculative 4",
        "--seed 4 --slide --max-tokens 120 --ignore-eos", "--seed 5 --logprobs 3", "--seed 6 --cache int8",
    ):  # fmt: skip
        line = f"generate runs/next 'one and two' --json --max-tokens 40 {options}"
        recorder.command(line, name=f"{backend}: {line}".replace("speculative", "guess"))
    recorder.command("generate runs/moe 'one and' --json --seed 1", name=f"{backend}: moe")


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Return how many of the values in both records differ; list values that only one has."""
    differing = [name for name in old if name in new and old[name] != new[name]]
    for name in differing:
        before, after = old[name], new[name]
        if name.startswith("page"):
            before, after = Counter(before) - Counter(after), Counter(after) - Counter(before)
        print(f"differs: {name}\n    {str(before)[:300]}\n    {str(after)[:300]}")
    for title, names in (("only before", old.keys() - new.keys()), ("only after", new.keys() - old.keys())):
        for name in sorted(names):
            print(f"{title}: {name} = {str((old | new)[name])[:100]}")
    print(f"{len(old)} values before, {len(new)} after, {len(differing)} differ")
    return len(differing)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", file]:
            target = Path(file).absolute()
            target.write_text(json.dumps(record(), indent=1, default=str), encoding="utf-8")
        case ["compare", old, new]:
            sys.exit(compare(*(json.loads(Path(one).read_text(encoding="utf-8")) for one in (old, new))) > 0)
        case _:
            sys.exit(__doc__)
