"""Adding an optimizer or an objective changes two files, besides documents and tests: the names of the present ones
occur in two files only."""

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "gptworks"


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["soap", "SOAP", "soap_frequency"], {"config/optimizers.py", "training/optim/soap.py"}),
        (["odds_ratio", "OddsRatio"], {"config/objective.py", "training/objectives/odds_ratio.py"}),
    ],
)
def test_all_that_names_an_optimizer_or_an_objective_lies_in_two_files(names: list[str], files: set[str]) -> None:
    words = re.compile("|".join(rf"\b{name}" for name in names))
    found = {path for path in SOURCE.rglob("*.py") if words.search(path.read_text(encoding="utf-8"))}
    assert {str(path.relative_to(SOURCE)) for path in found} == files
