"""Ask a tuned model ten questions in each of ten conversations, and count exact answers by turn.

    python bench/conversation.py runs/miniature-pretrain instructions.json [--seeds 3] [--epochs 20] [--json]

`gptworks tune` drafts a recipe for the instructions. One model is trained with this recipe. Another has the settings
that earlier versions drafted: a context as short as the examples, examples that do not attend to each other, and as
many tokens in a step. Both train for --epochs at --rate, so that a small model learns its examples by heart. The
questions are examples that the model has learned.

The script prints for each turn: the number of exact answers (greedy, in one conversation, as `gptworks chat` answers);
the number of answers that end; and the negative log-likelihood of the right answers in nats per token, after the right
answers to the earlier questions, for learned and for held-out questions. The exit code is 1 if the drafted models gave
fewer exact answers than the others at some turn, summed over the seeds.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gptworks.config import ConversationsSource
from gptworks.data.conversations.packing import Examples
from gptworks.data.conversations.reading import Conversation, is_held_out, iter_conversations
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.infer import Engine, TurnSession, load
from gptworks.infer.fitting import fit_conversation
from gptworks.recipe import load_recipe

MAX_TOKENS = 48
MEASURES = ("exact", "ends", "nats", "nats of held-out")


def gptworks(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "gptworks", *map(str, arguments)], check=True, stdout=sys.stderr)


def arms(recipe: Path) -> dict[str, list[str]]:
    """Return the overrides of each way to train: as drafted, and with a context as short as the examples."""
    drafted = load_recipe(recipe)
    row, batch = drafted.row_length, drafted.train.batch_size
    short = _context(recipe)
    before = [f"model.context_length={short}", "train.row_tokens=null", "objective.packing=true"]
    return {"short context": [*before, f"train.batch_size={batch * row // short}"], "drafted": []}


def _context(recipe: Path) -> int:
    """Return the context that earlier versions of tune chose: the 99th percentile of examples' lengths, rounded up to a
    multiple of 64."""
    lengths = Examples(TokenShards(prepare(load_recipe(recipe)).folder, "train"), 1, packing=False).n_tokens
    return -(-(int(np.quantile(lengths, 0.99)) - 1) // 64) * 64


def by_turn(engine: Engine, conversations: list[list[Conversation]]) -> dict[str, list[float]]:
    """Return the measures `exact`, `ends` and `nats`, each by turn."""
    template = engine.chat_template
    assert template is not None
    exact, ends, nats = (np.zeros(len(conversations[0])) for _ in range(3))
    n_tokens = np.zeros_like(nats)
    for records in conversations:
        session, said = TurnSession(engine, temperature=0, max_tokens=MAX_TOKENS), list[dict[str, Any]]()
        for turn, record in enumerate(records):
            question, answer = record.messages[-2:]
            written = "".join(session.send(question["content"]))
            exact[turn] += session.finish_reason == "stop" and written.strip() == answer["content"].strip()
            ends[turn] += session.finish_reason == "stop"
            said.append(question)
            ids, n_dropped = fit_conversation(template, said, engine.context, MAX_TOKENS)
            said.append(answer)
            whole = template.encode(said[n_dropped:])[: engine.context]
            end = next((i for i in range(len(ids), len(whole)) if whole[i] in template.end_token_ids), len(whole) - 1)
            scores = engine.score(whole)[len(ids) : end + 1]
            nats[turn] -= sum(score.logprob for score in scores if score is not None)
            n_tokens[turn] += len(scores)
    return {"exact": exact.tolist(), "ends": ends.tolist(), "nats": (nats / n_tokens).tolist()}


def questions(records: list[Conversation], n_turns: int, most: int) -> list[list[Conversation]]:
    """Return up to `most` conversations of `n_turns` records each, in a random order that is always the same."""
    mixed = random.Random(0).sample(records, len(records))
    return [mixed[i * n_turns : (i + 1) * n_turns] for i in range(min(most, len(mixed) // n_turns))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="a run")
    parser.add_argument("data", type=Path, help="instructions with answers")
    parser.add_argument("--folder", type=Path, default=Path("runs/conversation"), help="of the tuned runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    recipe = options.folder / "tune.yaml"
    options.folder.mkdir(parents=True, exist_ok=True)
    if not recipe.exists():
        gptworks("tune", options.base, options.data, "-o", recipe)
    fraction = load_recipe(recipe).data.validation.fraction
    records = list(iter_conversations([ConversationsSource(type="conversations", path=str(options.data))]))
    learned = [one for one in records if not is_held_out(one.prompt, fraction)]
    held_out = [one for one in records if is_held_out(one.prompt, fraction)]
    if (fewest := min(len(learned), len(held_out))) < options.turns:
        raise SystemExit(f"--turns {options.turns}: {options.data} has {fewest} learned or held-out records.")
    found: dict[str, dict[str, list[list[float]]]] = {}
    for seed in range(options.seeds):
        for name, overrides in arms(recipe).items():
            run = options.folder / f"{name.replace(' ', '-')}-{seed}"
            lengths = [f"train.epochs={options.epochs}", f"train.learning_rate={options.rate}"]
            rare = ["train.evaluate_every=1000000", "train.checkpoint_every=1000000"]
            gptworks("train", recipe, f"run_dir={run}", f"seed={seed}", *lengths, *rare, *overrides, "--resume")
            engine = load(run)
            one = by_turn(engine, questions(learned, options.turns, options.conversations))
            one["nats of held-out"] = by_turn(engine, questions(held_out, options.turns, options.conversations))["nats"]
            for measure in MEASURES:
                found.setdefault(name, {}).setdefault(measure, []).append(one[measure])
                print(f"{name}, seed {seed}, {measure}: " + " ".join(f"{x:.4g}" for x in one[measure]), file=sys.stderr)
    if options.json:
        print(json.dumps(found))
    else:
        for measure in MEASURES:
            print(f"\n{measure} by turn, mean of {options.seeds} seeds")
            for name, figures in found.items():
                means = np.mean(figures[measure], axis=0)
                print(f"{name:14}" + "".join(f"{x:7.2f}" for x in means) + f"{means.mean():9.3f}")
    before, after = (np.sum(found[name]["exact"], axis=0) for name in ("short context", "drafted"))
    if (after < before).any():
        sys.exit("at some turn, the drafted models gave fewer exact answers")


if __name__ == "__main__":
    main()
