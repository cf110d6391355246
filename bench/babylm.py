"""Writes a stand-in for the data of BabyLM's strict-small track (recipe `babylm`), and pairs of sentences like BLiMP's.

    python bench/babylm.py data/babylm                        # train_10M/ (54 MB), pairs.jsonl, pairs.yaml
    gptworks train babylm data.sources.0.path=data/babylm/train_10M
    gptworks evaluate runs/babylm --task data/babylm/pairs.yaml

The six files have the names and sizes of the corpus of 2024, and the same bytes on every machine. The text is in an
invented language: made-up words, with frequencies by Zipf's law, in a few English sentence patterns with agreement in
number. A run on this text takes as long as a run on the corpus. The losses and the pairs show that training works; they
say nothing about English or BLiMP.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Kind(NamedTuple):
    """The size and the form of a file of the corpus."""

    n_bytes: int
    sentences: int
    """Maximum number of sentences in a line."""
    speakers: tuple[str, ...] = ("",)
    """Possible beginnings of a line."""


FILES = {
    "bnc_spoken": Kind(4_884_146, 2),
    "childes": Kind(15_485_295, 1, ("*MOT:\t", "*CHI:\t", "*FAT:\t")),
    "gutenberg": Kind(14_001_510, 9),
    "open_subtitles": Kind(10_828_244, 1),
    "simple_wiki": Kind(8_432_882, 5),
    "switchboard": Kind(719_322, 2, ("A:\t", "B:\t")),
}
"""The files of train_10M in the corpus of 2024, 54,351,399 bytes."""

_DETERMINERS = (("this", "that", "a", "every", "one"), ("these", "those", "some", "many", "two"))
_PREPOSITIONS = ("near", "behind", "with", "under", "of")
_TASK = """\
# The sentence with agreement is to be the likelier one, as in BLiMP; a tie counts as half.
type: multiple_choice
data: pairs.jsonl
prompt: ""
delimiter: ""
choices: ["{{sentence_good}}", "{{sentence_bad}}"]
answer: sentence_good
"""


class Language:
    """Sentences of an invented language."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        syllables = ["".join(parts) for parts in itertools.product("bdfgklmnprst", "aeiou", ["", "n", "l", "r"])]
        words = self._words(syllables, 30_000)
        self._nouns, self._verbs, self._adjectives = (self._drawn(words[i::3], zipf=True) for i in range(3))
        self._determiners = [self._drawn(words) for words in _DETERMINERS]
        self._prepositions, self._chances = self._drawn(_PREPOSITIONS), self._uniform()

    def _words(self, syllables: Sequence[str], n: int) -> list[str]:
        """Return different words of two to four syllables, short ones first, since frequent English words are short."""
        found: dict[str, None] = {}
        while len(found) < n:
            found["".join(self._random.choices(syllables, k=self._random.choice((2, 3, 3, 4, 4))))] = None
        return sorted(found, key=len)

    def _drawn(self, items: Sequence[T], zipf: bool = False) -> Iterator[T]:
        weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(items)))) if zipf else None
        while True:
            yield from self._random.choices(items, cum_weights=weights, k=1024)

    def _uniform(self) -> Iterator[float]:
        while True:
            yield self._random.random()

    def _chance(self, probability: float) -> bool:
        return next(self._chances) < probability

    def _phrase(self, plural: bool) -> str:
        """Return a determiner and a noun that agree, perhaps with an adjective."""
        adjective = next(self._adjectives) + " " if self._chance(0.3) else ""
        return f"{next(self._determiners[plural])} {adjective}{next(self._nouns)}{'s' * plural}"

    def _after(self, subject: str, right: str) -> str:
        """Return a sentence: the subject, perhaps a prepositional phrase, the verb, perhaps an object."""
        between = f" {next(self._prepositions)} {self._phrase(self._chance(0.4))}" if self._chance(0.4) else ""
        rest = f" {self._phrase(self._chance(0.4))}" if self._chance(0.6) else ""
        return f"{subject[0].upper()}{subject[1:]}{between} {right}{rest} ."

    def sentence(self) -> str:
        plural = self._chance(0.4)
        return self._after(self._phrase(plural), next(self._verbs) + "s" * (not plural))

    def line(self, kind: Kind) -> str:
        n = 1 + int(next(self._chances) * kind.sentences)
        speaker = kind.speakers[int(next(self._chances) * len(kind.speakers))]
        return speaker + " ".join(self.sentence() for _ in range(n)) + "\n"

    def pair(self, number: int) -> dict[str, str]:
        """Return a sentence with agreement and one without, under the names of BLiMP's fields."""
        plural, verb = bool(number % 2), next(self._verbs)
        right, wrong = (verb + "s" * singular for singular in (not plural, plural))
        sentence = self._after(self._phrase(plural), "{}")
        good, bad = sentence.format(right), sentence.format(wrong)
        if number % 4 < 2:
            return {"sentence_good": good, "sentence_bad": bad, "UID": "subject_verb_agreement"}
        bad = f"{next(self._determiners[not plural]).capitalize()} {good.split(' ', 1)[1]}"
        return {"sentence_good": good, "sentence_bad": bad, "UID": "determiner_noun_agreement"}


def write(folder: Path, share: float = 1.0, n_pairs: int = 1000) -> None:
    """Write the texts and the pairs.

    Args:
        share: fraction of the corpus's bytes to write.
    """
    texts, language = folder / "train_10M", Language(seed=1)
    texts.mkdir(parents=True, exist_ok=True)
    for name, kind in FILES.items():
        left = int(kind.n_bytes * share)
        with (texts / f"{name}.train").open("w", encoding="utf-8", newline="") as file:
            while left > 0:
                left -= file.write(language.line(kind)[:left])
    pairs = [json.dumps(language.pair(i)) + "\n" for i in range(n_pairs)]
    (folder / "pairs.jsonl").write_text("".join(pairs), encoding="utf-8")
    (folder / "pairs.yaml").write_text(_TASK, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="of the corpus's bytes")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.share)
