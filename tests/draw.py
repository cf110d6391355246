"""Runs the tests in random order, with other examples and another seed for every generator: `make test-random`.

    python tests/draw.py [--seed N] [--minutes M]

Each pass prints its seed first; `--seed` repeats it. Passes follow, each with the next seed, until M minutes are over
or one fails.
"""

import argparse
import os
import random
import subprocess
import sys
import time


def one_pass(seed: int) -> int:
    print(f"make test-random SEED={seed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "randomly"]
    seeds = ["-p", "no:cacheprovider", f"--randomly-seed={seed}", f"--hypothesis-seed={seed}"]
    drawn = {"GPTWORKS_DRAWN_SEED": str(seed), "PYTHONHASHSEED": str(seed)}
    return subprocess.run([*command, *seeds], env=os.environ | drawn, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--minutes", type=float, default=0)
    given = parser.parse_args()
    ends, seed, failed = time.monotonic() + 60 * given.minutes, given.seed, one_pass(given.seed)
    while not failed and time.monotonic() < ends:
        seed = (seed + 1) % 2**32
        failed = one_pass(seed)
    return failed


if __name__ == "__main__":
    sys.exit(main())
