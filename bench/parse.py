"""Measure the share of functions that a model of Python writes without a syntax error.

    python bench/parse.py runs/demo

The model continues the beginnings of 50 functions, `def NAME(ARGUMENT` after two imports, by at most 160 tokens, one
sample each with its own seed. It samples like `make demo`: at a low temperature and with a frequency penalty, without
which so small a model repeats itself. A function ends before the first line that is not indented. One that has not
ended is cut after its last complete line, so an open bracket or string makes it invalid. `ast.parse` of the Python that
runs this script then parses each function.
"""

import argparse
import ast
import warnings
from pathlib import Path

from gptworks.infer.engine import load

BEFORE = "import os\nimport sys\n\n\n"
"""Text before each function, since few files begin with one."""

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


def first_function(text: str, finished: bool) -> str:
    """Return the function that a text starts with.

    Args:
        finished: whether the text ended by itself; else its last line may be cut off.
    """
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines[1:], 1):
        if line.strip() and not line[0].isspace() and line[0] not in ")]}#":
            return "".join(lines[:number])
    return "".join(lines if finished or lines[-1].endswith("\n") else lines[:-1])


def parses(source: str) -> bool:
    """Whether Python parses the source as one function."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return [type(one) for one in ast.parse(source).body] == [ast.FunctionDef]
    except (SyntaxError, ValueError):
        return False


def main() -> None:
    """Print the share, and with --show the functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--frequency-penalty", type=float, default=0.5)
    parser.add_argument("--first-seed", type=int, default=1, help="of the first function; each next has the next")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--show", action="store_true", help="print the functions, too")
    arguments = parser.parse_args()
    engine = load(arguments.run)
    beginnings, n_parsed = FUNCTIONS.split(), 0
    sampling = {"temperature": arguments.temperature, "frequency_penalty": arguments.frequency_penalty}
    for seed, beginning in enumerate(beginnings, arguments.first_seed):
        (made,) = engine.complete(f"{BEFORE}def {beginning}", max_tokens=arguments.max_tokens, seed=seed, **sampling)
        source = first_function(f"def {beginning}{made.text}", finished=made.finish_reason == "stop")
        n_parsed += parses(source)
        if arguments.show:
            print(f"# {'parses' if parses(source) else 'a syntax error'}\n{source.rstrip()}\n")
    settings = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in sampling.items())
    print(f"{n_parsed} of {len(beginnings)} functions parse, sampled at {settings}")


if __name__ == "__main__":
    main()
