"""From text to assistant: train the miniature's phases, then ask each for answers to held-out instructions.

The phases are the base model, instruction tuning, and DPO on pairs whose rejected answer is about another function. An
answer follows its instruction if it ends with the end token and has the form of the dataset's answers. An answer is
equal if it is the dataset's answer to the letter. Many docstrings would be right answers, so the share of equal answers
is printed for all questions, and for the questions from which the answer follows.
All phases have the same tokens: the template needs no token that the base lacks. The script fails if a tuned model
follows fewer than 95% of the instructions, the base follows 20% or more, or DPO does not raise the reward margin of
held-out pairs.

    python bench/pipeline.py [--share 0.1] [--answers 200] [--json]
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import stdlib_instructions
from gptworks.chat_template import BUILT_IN, ChatTemplate
from gptworks.config import Recipe
from gptworks.data.conversations.reading import Conversation, is_held_out, iter_conversations
from gptworks.infer import SamplingSettings, load
from gptworks.recipe import load_recipe
from gptworks.training.record.metrics import read_metrics

PHASES = {"base": "miniature/pretrain", "tuned": "miniature/finetune", "preferred": "miniature/preference"}
"""Recipe of each phase, in order of training; each starts from the model of the one before."""

LEAST_TUNED, MOST_BASE = 0.95, 0.20
MAX_TOKENS = 80
N_PAIRS = 2000
"""Approximate number of pairs, evenly spaced over all; training reads half of them."""


def train(recipe: str, share: float) -> float:
    """Train a phase, or this share of it, in a new process; return the seconds."""
    started = time.perf_counter()
    steps = max(20, round(share * (load_recipe(recipe).train.max_steps or 0)))
    command = [sys.executable, "-m", "gptworks", "train", recipe, f"train.max_steps={steps}", "--resume"]
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def questions(recipe: Recipe, n: int) -> list[Conversation]:
    """Return held-out instructions, evenly spaced over all of them."""
    fraction = recipe.data.validation.fraction
    held_out = [one for one in iter_conversations(recipe.data.conversations) if is_held_out(one.prompt, fraction)]
    return [held_out[i * len(held_out) // n] for i in range(min(n, len(held_out)))]


def answers_in_form(run_dir: Path, asked: list[Conversation]) -> dict[str, float]:
    """Return the shares of answers that end, that have the right form, that do both, and that equal the dataset's
    answer; and, as `decided`, the share of equal answers to questions from which the answer follows."""
    engine = load(run_dir)
    template = engine.chat_template or ChatTemplate(BUILT_IN["alpaca"], engine.tokenizer)
    settings = SamplingSettings(temperature=0, max_tokens=MAX_TOKENS, stop_token_ids=template.end_token_ids)
    count: Counter[str] = Counter()
    n_decided = 0
    for one in asked:
        *before, answer = one.messages
        [completion] = engine.complete(template.encode(before, add_generation_prompt=True), settings)
        ended = completion.finish_reason == "stop"
        in_form = stdlib_instructions.has_form(before[-1]["content"], completion.text)
        count.update({"ends": ended, "form": in_form, "follows": ended and in_form})
        equal = ended and completion.text.strip() == answer["content"]
        decided = not before[-1]["content"].startswith(stdlib_instructions.OPEN)
        n_decided += decided
        count.update({"equal": equal, "decided": equal and decided})
    shares = {name: count[name] / len(asked) for name in ("ends", "form", "follows", "equal")}
    return shares | {"decided": count["decided"] / max(1, n_decided)}


def reward_margins(run_dir: Path) -> list[float]:
    """Return the reward margins on the held-out pairs, from the first evaluation to the last."""
    records = read_metrics(run_dir / "metrics.jsonl")
    return [record["reward_margin"] for record in records if record["kind"] == "validation"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of each phase's steps")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    started = time.perf_counter()
    rows = list(stdlib_instructions.records())
    pairs = list(stdlib_instructions.pairs(rows))
    records = {"tuned": rows, "preferred": pairs[:: max(1, len(pairs) // N_PAIRS)]}
    recipes: dict[str, Recipe] = {}
    seconds: dict[str, float] = {}
    for name, path in PHASES.items():
        recipes[name] = load_recipe(path)
        for source in recipes[name].data.records:
            assert source.path is not None
            n_written = stdlib_instructions.write(Path(source.path), records[name])
            print(f"{n_written:,} records in {source.path}", file=sys.stderr)
        seconds[name] = train(path, options.share)
    asked = questions(recipes["tuned"], options.answers)
    results = {name: answers_in_form(recipe.run_dir, asked) for name, recipe in recipes.items()}
    margins = reward_margins(recipes["preferred"].run_dir)
    total = time.perf_counter() - started
    if options.json:
        figures = {"answers": len(asked), "results": results, "margins": margins}
        print(json.dumps(figures | {"seconds": seconds, "total_seconds": total}))
    else:
        print(f"\n{len(asked)} held-out instructions, likeliest answers of at most {MAX_TOKENS} tokens; {total:.0f} s")
        print(f"{'':10}{'ends':>8}{'form':>8}{'both':>8}{'equal':>8}{'decided':>9}{'trained':>10}")
        for name, shares in results.items():
            *four, decided = shares.values()
            cells = "".join(f"{share:8.1%}" for share in four)
            print(f"{name:10}{cells}{decided:9.1%}{seconds[name]:8.0f} s")
        print(f"reward margins on held-out pairs: 0 at first, {', '.join(f'{margin:.2f}' for margin in margins)}")
    follows = {name: shares["follows"] for name, shares in results.items()}
    if min(follows["tuned"], follows["preferred"]) < LEAST_TUNED or follows["base"] >= MOST_BASE:
        sys.exit(f"tuned below {LEAST_TUNED:.0%}, or base not below {MOST_BASE:.0%}")
    if margins[-1] <= 0:
        sys.exit("the margin of rewards did not rise")


if __name__ == "__main__":
    main()
