"""Numbers in words: as many digits as they are good for, whatever their size."""

import math

import pytest

from gptworks.units import counted, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.500"), (3.12345, "3.123"), (23.4567, "23.46"), (999.96, "1,000"), (1234.5678, "1,235"),
        (65536.123, "65,536"), (1e12, "1e+12"), (0.00012345, "0.0001234"), (0.0, "0.000"), (-12.345, "-12.35"),
        (math.inf, "inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_significant_digits_do_not_depend_on_the_size(value: float, text: str) -> None:
    assert significant(value) == text


def test_one_is_not_plural() -> None:
    assert [counted(n, "thread") for n in (0, 1, 2, 1024)] == ["0 threads", "1 thread", "2 threads", "1,024 threads"]
