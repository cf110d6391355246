"""Fixtures shared by the tests, and their random seeds.

`make test` draws nothing: hypothesis derives its examples from the tests, and every generator has the same seed before
each fixture and each test, so that neither the order of tests nor the worker changes what a test sees.
`make test-random` draws: it sets GPTWORKS_DRAWN_SEED.
"""

import gc
import os
import random
from pathlib import Path

import hypothesis
import pytest

from browser import chromium, new_page, page, studio
from in_process import command
from stores import any_store, s3

__all__ = ["any_store", "chromium", "command", "new_page", "page", "s3", "studio"]

os.fsync = lambda descriptor: None  # a disk's waits; test_crash_consistency.py holds what is flushed, unpatched

DRAWN_SEED = os.environ.get("GPTWORKS_DRAWN_SEED")

hypothesis.settings.register_profile("fixed", max_examples=60, derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("drawn", max_examples=1000, database=None, deadline=None, print_blob=True)
hypothesis.settings.load_profile("fixed" if DRAWN_SEED is None else "drawn")


gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the millions of imported objects, which stay, from garbage collection from now on."""
    import torch  # only where tests run: xdist's first process needs none

    torch.set_num_threads(1)  # at the sizes of tests, threads wait for one another more than they work
    gc.freeze()
    gc.enable()


def seed_generators() -> None:
    import numpy as np
    import torch

    seed = int(DRAWN_SEED or 0)
    random.seed(seed)
    np.random.seed(seed)  # libraries draw from it
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    seed_generators()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_generators()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder with TinyShakespeare, GPT-2's ranks and similar files, set by GPTWORKS_SHARED_DATA."""
    folder = os.environ.get("GPTWORKS_SHARED_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GPTWORKS_SHARED_DATA does not name a folder: this test needs its files")
    return Path(folder)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has learned to write the lines of `tiny.TEXT`. Tests must not change it."""
    import tiny

    return tiny.trained(tmp_path_factory.mktemp("trained"))
