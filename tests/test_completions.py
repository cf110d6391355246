"""The counts of bench/completions.py: functions that parse, and completions that loop or begin with garbage."""

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, as a module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    return importlib.import_module("completions")


@pytest.mark.parametrize(
    ("text", "finished", "source", "right"),
    [
        ("def a(x):\n    return x\n\n\ndef b(", False, "def a(x):\n    return x\n\n\n", True),
        (
            "def a(\n    x,\n) -> int:\n\n    return x\nx = 1\n",
            False,
            "def a(\n    x,\n) -> int:\n\n    return x\n",
            True,
        ),
        ("def a(x):\n    y = x\n    return [y", False, "def a(x):\n    y = x\n", True),
        ("def a(x):\n    return [y", True, "def a(x):\n    return [y", False),
        ("def a(x):\n", False, "def a(x):\n", False),
        (
            "def a(x):\n    if x:\n        y = 1\n    else:  # none\n        re",
            False,
            "def a(x):\n    if x:\n        y = 1\n    else:  # none\n     pass\n",
            True,
        ),
        (
            "def a(x):\n    try:\n        b()\n    except E:\n        try:\n            c()\n            d",
            False,
            None,
            True,
        ),
        ("def a(x):\n    try:\n        b()\n    c()\n    d", False, None, False),
        ("def a(x):\n    try:\n        b(\n    c", False, None, False),
        ("def a(x): return x; b = 1\n", True, "def a(x): return x; b = 1\n", True),
        ("def a\n    return x\n", True, "def a\n    return x\n", False),
        ("def a(x):\n    return '\0'\n", True, "def a(x):\n    return '\0'\n", False),
    ],
)
def test_a_function_is_cut_out_of_a_text_and_parsed(
    text: str, finished: bool, source: str | None, right: bool, counts: Any
) -> None:
    found = counts.first_function(text, finished)
    assert source is None or found == source
    assert counts.parses(found) is right


ASSIGNMENTS = """\
class Account:
    def __init__(self, owner, number, limit, log):
        self.owner = owner
        self.number = number
        self.limit = limit
        self.log = log
        self.balance = None
        self.closed = None
"""
BRANCHES = """\
if kind == 'int':
    return int
elif kind == 'float':
    return float
elif kind == 'bool':
    return bool
elif kind == 'str':
    return str
else:
    return None
"""
RULES = """\
# --------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------
"""
GETTERS = """\
def width(self):
    return self._width

def height(self):
    return self._height

def depth(self):
    return self._depth
"""


@pytest.mark.parametrize(
    "text",
    [
        ASSIGNMENTS,
        BRANCHES,
        RULES,
        GETTERS,
        "import os\nimport re\nimport sys\nimport time\nfrom pathlib import Path\nfrom typing import Any\n",
        "grid = [0, 0, 0, 0]\ncounts = {'a': 0, 'b': 0, 'c': 0, 'd': 0, 'e': 0, 'f': 0}\n",
        "def test_add():\n    assert add(1, 2) == 3\n    assert add(0, 0) == 0\n    assert add(-1, 5) == 4\n",
        "",
    ],
)
def test_code_that_has_reason_to_repeat_itself_does_not_loop(text: str, counts: Any) -> None:
    assert not counts.loops(text)


SAME_LINE = """\
import os

def close(self):
    self.force = self.open()
    self.force = self.open()
    self.force = self.open()
"""
SAME_METHOD = """\
class A:
    def get(self):
        return self.a

    def get(self):
      return self.a
    def get(self):

        return self.a
"""
NEARLY_SAME_METHODS = """\
def add(self, x):
    '''Add an element to the list.'''
    return self.get(x)

def put(self, x):
    '''Add an element to the list.'''
    return self.get(x)

def insert(self, y):
    '''Add an element to the list.'''
    return self.get(x)
"""


@pytest.mark.parametrize(
    "text",
    [
        SAME_LINE,
        SAME_METHOD,
        NEARLY_SAME_METHODS,
        "return '%s' % (self.__class__.__name__, self.__class__.__name__, self.__class__.__name__, self.__",
        '"""Return the default value of the default value of the default value of the default value.',
        "def _get_get_get_get_get_get_get(self):\n    pass\n",
        "x = 'a' or 'b'\nif x == 'a' or 'a' or 'a' or 'a' or 'a':\n",
        "x = 1\nx = 1\nx = 1\nx = 1\n",
    ],
)
def test_a_text_that_says_the_same_again_and_again_loops(text: str, counts: Any) -> None:
    assert counts.loops(text)


@pytest.mark.parametrize(
    ("prompt", "made"),
    [
        ("def ", "add(a, b):\n    return a + b\n"),
        ("class Stack:", "\n    # Last in, first out.\n    def __init__(self"),
        ("class Stack:", "\n\n    def __init__(self, items=(), *,\n                 limit=None):"),
        ("for i in range(", "10):\n    print(i)\n"),
        ("if __name__ ==", " '__main__':\n    main()\n"),
        ("names = [", "\n    'a',\n"),
        ("names = [", "]\n"),
        ('"""Return the ', "sum of two numbers.\n\nIt's a float.\n"),
        ('"""', "\nTools for text.\n"),
        ("# Read a file and count its words", "\n\nimport sys\n"),
        ("# Read a file and count its words", " (as `wc` does).\n# It reads\n"),
        ("try:\n", "    import json\nexcept ImportError:\n"),
        ("import ", "os, sys"),
        ("print(", "'größer', x)"),
    ],
)
def test_code_that_goes_on_with_the_prompt_begins_well(prompt: str, made: str, counts: Any) -> None:
    assert not counts.begins_with_garbage(prompt, made)


@pytest.mark.parametrize(
    ("prompt", "made"),
    [
        ("def ", ""),
        ("def ", "\n\n  "),
        ("def ", "3.0, 4.0):\n    return a\n"),
        ("import ", "0\n        if x:\n"),
        ("import os\n", "        if os.path.isdir(path):\n            return\n"),
        ("class Stack:", " Stack: Stack: Stack:\n"),
        ("class Stack:", "\ndef push(self):\n"),
        ("for i in range(", "0.0.0.1)\n"),
        ("names = [", "] for i in range(1, 2)]\n"),
        ("while True:", "      0, 1, 2, 2)\n"),
        ("print(", "'\x07')\n"),
        ("print(", "'\N{REPLACEMENT CHARACTER}')\n"),
        ('"""', " '*' '*' ''' \\\\ a '\"'\"\n"),
        ("# Read a file and count its words", "mith of the file\n"),
        ("# Read a file and count its words", "\n        # of the file\n        if x:\n"),
    ],
)
def test_text_that_does_not_go_on_with_the_prompt_is_garbage(prompt: str, made: str, counts: Any) -> None:
    assert counts.begins_with_garbage(prompt, made)
