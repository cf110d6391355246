"""Stores the generated answers that several steps use, so that a resumed run finds them in the run folder."""

import contextlib
from pathlib import Path

import torch
from safetensors.torch import save

from gptworks.data.samples import Batch
from gptworks.errors import UserError
from gptworks.files import replacing
from gptworks.tensors import read_tensors

ROLLOUTS = "rollouts"


class RolloutStore:
    """The folder `rollouts/` of a run: one file for each micro-step of each round of answers."""

    def __init__(self, run_dir: Path, n_kept: int) -> None:
        """`n_kept` is the number of earlier rounds to keep."""
        self._folder, self._n_kept = run_dir / ROLLOUTS, n_kept

    def _path(self, number: int, micro_step: int) -> Path:
        return self._folder / f"round-{number:06d}-{micro_step}.safetensors"

    def write(self, number: int, made: dict[int, Batch], prompts: dict[int, list[int]]) -> None:
        """Write the batches of round `number` and the numbers of their prompts, by micro-step; delete old rounds."""
        self._folder.mkdir(exist_ok=True)
        for micro_step, batch in made.items():
            named = {str(i): x.contiguous() for i, x in enumerate(batch)}
            with replacing(self._path(number, micro_step), inside=self._folder.parent) as file:
                file.write(save(named | {"prompts": torch.tensor(prompts[micro_step])}))
            oldest = self._path(max(0, number - self._n_kept), micro_step)
            for old in self._folder.glob(f"round-*-{micro_step}.safetensors"):
                if old.name < oldest.name:
                    old.unlink()

    def read(self, number: int, prompts: dict[int, list[int]]) -> dict[int, Batch] | None:
        """Read round `number`'s batches, by micro-step; None if a batch is missing, damaged or for other prompts."""
        made = {}
        for micro_step, chosen in prompts.items():
            with contextlib.suppress(UserError, KeyError):
                tensors = read_tensors(self._path(number, micro_step), None, inside=self._folder.parent)
                if tensors.pop("prompts").tolist() == chosen:
                    made[micro_step] = tuple(tensors[str(i)] for i in range(len(tensors)))
        return made if len(made) == len(prompts) else None
