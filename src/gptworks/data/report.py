"""The callbacks that report the progress of a build."""

from collections.abc import Callable

from gptworks.data.encode import Advance

Report = Callable[[str, int, int | None], None]
"""Called with the stage ("waiting", "cleaning", "sample", "tokenizer", "merging", "shards"), the bytes of text done,
and their total if known. Any other text is a line to print once: which library encodes and why, or that a tokenizer
learned from pieces of long words."""

Progress = Callable[[int, int], None]
"""Called with the number of tokens done, and the number of all tokens."""


def adding_up(report: Report, stage: str, total_bytes: int | None) -> Advance:
    """A function that adds up the bytes done since its last call, and reports the sum."""
    done_bytes = 0

    def advance(n_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += n_bytes
        report(stage, done_bytes, total_bytes)

    return advance
