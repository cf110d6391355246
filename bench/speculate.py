"""Measure speculative decoding of code: tokens per second with and without it.

    python bench/speculate.py runs/demo

Prompts are 128 tokens of the run's held-out documents, evenly spaced. Each is continued greedily by 100 tokens, one
text at a time, in turns without drafts and with prompt lookup of 4, 8 and 16 tokens. The texts must be equal.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from gptworks.data.prepare import find_prepared
from gptworks.data.shards import TokenShards
from gptworks.device import device_name
from gptworks.infer.engine import Engine, load
from gptworks.infer.speculate import PromptLookup
from gptworks.recipe import load_recipe

PROMPT, NEW, N_PROMPTS = 128, 100, 12
DRAFT_TOKENS = (0, 4, 8, 16)


def prompts_of(run: Path) -> list[list[int]]:
    """Return token ids from the run's validation split."""
    prepared = find_prepared(load_recipe(run))
    if prepared is None:
        raise SystemExit(f"the data of {run} is not prepared here: gptworks data build {run}")
    shards = TokenShards(prepared.folder, "validation")
    step = (shards.n_tokens - PROMPT) // N_PROMPTS
    return [shards.read(i * step, PROMPT).tolist() for i in range(N_PROMPTS)]


def seconds(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the time of one continuation, and its tokens."""
    started = time.perf_counter()
    pieces = list(engine.pieces(prompt, max_tokens=NEW, temperature=0, ignore_eos=True))
    return time.perf_counter() - started, [piece.token_id for piece in pieces if piece.token_id is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    prompts = prompts_of(arguments.run)
    engines = {n: load(arguments.run, drafter=PromptLookup(n) if n else None) for n in DRAFT_TOKENS}
    times: dict[int, list[float]] = {n: [] for n in DRAFT_TOKENS}
    for turn in range(arguments.rounds + 1):
        for prompt in prompts:
            texts = []
            for n, engine in engines.items():
                taken, text = seconds(engine, prompt)
                texts.append(text)
                if turn:  # the first round is a warm-up
                    times[n].append(taken)
            if any(text != texts[0] for text in texts):
                raise SystemExit("a draft has changed a text")
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}; {arguments.run}, {N_PROMPTS} prompts")
    plain = statistics.mean(times[0])
    for n, taken in times.items():
        rate = engines[n].statistics().acceptance_rate
        told = f", {rate:.0%} of the draft tokens accepted" if rate is not None else ""
        mean = statistics.mean(taken)
        print(f"{f'{n} draft tokens' if n else 'without':<16} {NEW / mean:>7,.0f} tokens/s, {plain / mean:.2f} ×{told}")


if __name__ == "__main__":
    main()
