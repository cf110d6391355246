"""Count what a newcomer sees of a model of Python: functions that parse, completions that loop or begin with garbage.

    python bench/completions.py runs/demo

* 50 functions: the model continues `def NAME(ARGUMENT` after two imports, by at most 160 tokens. A function ends before
  the first line that is not indented. One that has not ended is cut after its last complete line, and gets a `pass` for
  an empty block and a `finally` for each open `try`; an open bracket or string makes it invalid. `ast.parse` of the
  Python that runs this script then parses each function.
* 20 prompts as a newcomer types them, continued by at most 160 tokens: see `loops` and `begins_with_garbage`.

Each text is sampled once, with its own seed and with the model's own settings unless options give others. The counts
suit any model, since they read text, not tokens. Of 3,333 passages of 640 characters from the standard library of
Python 3.11, 19 (0.6%) loop according to `loops`.
"""

import argparse
import ast
import codeop
import re
import warnings
from pathlib import Path

from gptworks.infer.engine import Engine, load

BEFORE = "import os\nimport sys\n\n\n"
"""Text before each function, since few files begin with a function."""

FUNCTIONS = """
read_lines(path write_text(path get_value(key set_name(self find_all(pattern is_valid(name add_handler(self
remove_item(self parse_args(args format_date(date open_file(filename close_all(self send_message(self make_path(name
split_words(text join_parts(parts count_items(items sort_keys(keys update_state(self check_type(value
convert_size(size load_config(path save_data(data test_empty(self test_copy(self main(args run(self encode(text
decode(data walk(path filter_names(names match_pattern(self replace_all(string build_index(lines create_socket(address
read_header(self next_token(self push_back(self flush_buffer(self get_default(self normalize(text compare_versions(a
to_string(value from_bytes(data iter_items(self wait_for(self is_absolute(path get_encoding(name print_help(self
register(cls
"""

PROMPTS = (
    "def ", "def add(a, b):", "def fibonacci(n):\n", "def read_lines(path", "names = [",
    "import ", "import os\n", "from ", "class Stack:", "class Dog(",
    '"""', '"""Return the ', "for i in range(", "while True:", "if __name__ ==",
    "try:\n", "with open(", "print(", "# Read a file and count its words", "# Sort a list of numbers\ndef sort(",
)  # fmt: skip

LEAST_LOOP_WORDS = 12
"""Minimum number of words and marks in a loop, all copies of the phrase together: `0, 0, 0, 0` is too short."""

MOST_REPEATED = 0.5
"""Share of 4-grams that may repeat an earlier one. 99.9% of passages of the standard library have less."""

_WORD = re.compile(r"[^\W_]+|([^\w\s]|_)\1*")


def first_function(text: str, finished: bool) -> str:
    """Return the function that a text starts with.

    Args:
        finished: whether the text ended by itself; else its last line may be cut off.
    """
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines[1:], 1):
        if line.strip() and not line[0].isspace() and line[0] not in ")]}#":
            return "".join(lines[:number])
    if finished:
        return text
    return with_blocks_ended("".join(lines if lines[-1].endswith("\n") else lines[:-1]))


def with_blocks_ended(source: str) -> str:
    """Return a function, cut after a line, with a `pass` for an empty block and a `finally` for each open `try`. A
    function of one line is unchanged."""
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    indent, tries = "", []
    for line in lines:
        code = line.lstrip()
        indent = line[: len(line) - len(code)]
        handles = code.startswith(("except", "finally"))
        tries = [one for one in tries if len(one) < len(indent) or (one == indent and not handles)]
        if code.startswith("try:"):
            tries.append(indent)
    is_empty = len(lines) > 1 and lines[-1].split(" #")[0].rstrip().endswith(":")
    ends = [f"{indent} pass\n"] if is_empty else []
    return "".join([source, *ends, *(f"{one}finally:\n{one} pass\n" for one in reversed(tries))])


def parses(source: str) -> bool:
    """Whether Python parses the source as one function."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return [type(one) for one in ast.parse(source).body] == [ast.FunctionDef]
    except (SyntaxError, ValueError):
        return False


def words(text: str) -> list[str]:
    """Return a text's words and marks. `_` separates words; equal marks in a row count as one."""
    return [match[0] if match[1] is None else match[1] for match in _WORD.finditer(text)]


def loops(text: str) -> bool:
    """Whether a text repeats itself: three or more copies of a phrase follow each other and have LEAST_LOOP_WORDS words
    and marks together (Holtzman et al., 2020, count this at a text's end), or over MOST_REPEATED of its 4-grams
    occurred before (seq-rep-4; Welleck et al., 2020, section 6.1)."""
    said = words(text)
    for length in range(1, len(said) // 3 + 1):
        n_same = 0
        for one, later in zip(said, said[length:], strict=False):
            n_same = n_same + 1 if one == later else 0
            if n_same >= max(2 * length, LEAST_LOOP_WORDS - length):
                return True
    grams = list(zip(said, said[1:], said[2:], said[3:], strict=False))
    return len(grams) - len(set(grams)) > MOST_REPEATED * len(grams)


def begins_with_garbage(prompt: str, made: str) -> bool:
    """Whether a completion is empty, or begins with text that does not continue its prompt as Python.

    Such text continues the prompt's last word, or breaks a rule. The rules apply to the prompt with the completion, up
    to the completion's first line that is not blank or a comment: all characters are printable, the text can begin a
    Python file (`codeop`), and from the prompt's last line on, at most two thirds of its characters are marks.
    """
    lines = made.splitlines(keepends=True)
    number = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines))
    begun = prompt + "".join(lines[: number + 1])
    shown = "".join(begun[prompt.rfind("\n", 0, -1) + 1 :].split())
    try:
        with warnings.catch_warnings(action="ignore"):
            codeop.compile_command(begun, symbol="exec")
    except (SyntaxError, ValueError, OverflowError):
        return True
    return (
        not made.strip()
        or (prompt[-1].isalnum() and made[0].isalnum())
        or not begun.replace("\n", "").replace("\t", "").isprintable()
        or "\N{REPLACEMENT CHARACTER}" in begun
        or sum(map(str.isalnum, shown)) * 3 < len(shown)
    )


def functions(engine: Engine, first_seed: int, sampling: dict[str, float]) -> list[str]:
    """Return the 50 functions that a model writes."""
    found = []
    for seed, beginning in enumerate(FUNCTIONS.split(), first_seed):
        (made,) = engine.complete(f"{BEFORE}def {beginning}", max_tokens=160, seed=seed, heal=True, **sampling)
        found.append(first_function(f"def {beginning}{made.text}", finished=made.finish_reason == "stop"))
    return found


def completions(engine: Engine, first_seed: int, sampling: dict[str, float]) -> list[tuple[str, str]]:
    """Return the 20 prompts, each with the text that `gptworks generate` continues it with."""
    seeds = enumerate(PROMPTS, first_seed)
    return [
        (prompt, engine.generate(prompt, max_tokens=160, seed=seed, heal=True, **sampling)) for seed, prompt in seeds
    ]


def main() -> None:
    """Print the counts, and with --show the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    for name in ("temperature", "top-p", "min-p", "repetition-penalty", "frequency-penalty", "presence-penalty",
                 "dry-multiplier", "dry-base"):  # fmt: skip
        parser.add_argument(f"--{name}", type=float, help="default: the model's own")
    parser.add_argument("--dry-allowed-length", type=int, help="default: the model's own")
    parser.add_argument("--first-seed", type=int, default=1, help="of the first text; each next has the next")
    parser.add_argument("--show", action="store_true", help="print the texts, too")
    given = vars(parser.parse_args())
    run, first_seed, show = (given.pop(name) for name in ("run", "first_seed", "show"))
    engine = load(run)
    sampling = {name: value for name, value in given.items() if value is not None}
    sources = functions(engine, first_seed, sampling)
    continued = completions(engine, first_seed, sampling)
    looping = [loops(prompt + made) for prompt, made in continued]
    garbage = [begins_with_garbage(prompt, made) for prompt, made in continued]
    if show:
        for source in sources:
            print(f"# {'parses' if parses(source) else 'a syntax error'}\n{source.rstrip()}\n")
        for (prompt, made), *broken in zip(continued, looping, garbage, strict=True):
            faults = [name for name, found in zip(("loops", "begins with garbage"), broken, strict=True) if found]
            print(f"# {prompt!r}: {' and '.join(faults) or 'good'}\n{prompt}{made}\n")
    used = {name: sampling.get(name, getattr(engine.defaults, name)) for name in given}
    print(", ".join(f"{name} {value:g}" for name, value in used.items()))
    print(f"{sum(map(parses, sources))} of {len(sources)} functions parse")
    print(f"{sum(looping)} of {len(continued)} completions loop, {sum(garbage)} begin with garbage, "
          f"{sum(a or b for a, b in zip(looping, garbage, strict=True))} do either")  # fmt: skip


if __name__ == "__main__":
    main()
