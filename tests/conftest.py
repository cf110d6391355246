"""Fixtures shared by the tests."""

import os
from pathlib import Path

import pytest
import torch

import tiny
from browser import chromium, new_page, page, studio

__all__ = ["chromium", "new_page", "page", "studio"]

os.environ.setdefault("GPTWORKS_NATIVE", "1")  # where both can compute, no measurement decides which does
os.fsync = lambda descriptor: None  # a disk's waits; test_crash_consistency.py holds what is flushed, unpatched
torch.set_num_threads(1)  # at the sizes of tests, threads wait for one another more than they work


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with TinyShakespeare, GPT-2's ranks and the like, named by GPTWORKS_SHARED_DATA."""
    folder = os.environ.get("GPTWORKS_SHARED_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GPTWORKS_SHARED_DATA does not name a folder: this test needs its files")
    return Path(folder)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned to write the lines of `tiny.TEXT`. Tests leave it as it is."""
    return tiny.trained(tmp_path_factory.mktemp("trained"))
