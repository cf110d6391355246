"""The filter that drops documents which contain text of evaluation tasks."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gptworks.config.cleaning import Decontaminate
from gptworks.data.cleaning.base import RuleFilter
from gptworks.data.cleaning.ngrams import Hashes, HashSet, hash_ngrams, hash_words, words_of
from gptworks.data.sources.records import read_jsonl
from gptworks.errors import UserError
from gptworks.yaml_files import read_yaml


class DecontaminationFilter(RuleFilter):
    """Drops documents that share a sequence of `ngram` words with a text of an evaluation task, ignoring case and
    punctuation. The default is 13 words, as for GPT-3 (Brown et al. 2020, appendix C).

    GPT-3's data lost 200 characters around each match; this filter drops the document. A task text of fewer than
    `ngram` words, but at least `min_words`, must match completely. Shorter texts are too common to look for.
    """

    settings: Decontaminate

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        texts = [words for file in self.settings.tasks for text in task_texts(file) if (words := words_of(text))]
        found: dict[int, list[Hashes]] = {}
        for words in texts:
            n = min(self.settings.ngram, len(words))
            if n >= self.settings.min_words:
                found.setdefault(n, []).append(hash_ngrams(hash_words(words), n))
        if not found:
            names = ", ".join(map(str, self.settings.tasks))
            raise UserError(
                f"{names}: no text of the items has {self.settings.min_words} words, so there is nothing to look for. "
                f"Lower min_words of the filter decontaminate, or leave it out."
            )
        self._wanted = {n: HashSet(np.concatenate(hashes)) for n, hashes in sorted(found.items())}

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        words = hash_words(words_of(text))
        yield "in a task", any(len(wanted.places(hash_ngrams(words, n))) for n, wanted in self._wanted.items())

    def signature(self) -> str:
        """Return the sha256 of all word sequences that the filter looks for."""
        joined = b"".join(n.to_bytes(8, "little") + wanted.hashes.tobytes() for n, wanted in self._wanted.items())
        return hashlib.sha256(joined).hexdigest()


def task_texts(file: Path) -> Iterator[str]:
    """Yield the texts of all items of an evaluation task, given its task file or a JSONL file of items. Raises
    UserError if a file is missing or broken, or `file` is neither a task file nor JSONL."""
    path = file.expanduser()
    try:
        if path.suffix in (".yaml", ".yml"):
            task = read_yaml(path)
            data = task.get("data") if isinstance(task, dict) else None
            if not isinstance(data, str):
                raise UserError(f"{path} is not a task file: it has no `data` that names a JSONL file of items.")
            names = [data, *(name for name in [task.get("shots_data")] if isinstance(name, str))]
            items = [path.parent / Path(name).expanduser() for name in names]
        else:
            items = [path]
        for one in items:
            for _, item in read_jsonl(one):
                yield from _texts(item)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file; the filter decontaminate names {file}.") from None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)
