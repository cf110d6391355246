"""Draws a model's data flow with text characters, from the operations of its parts (parts.py).

HTML pages draw the same flow with boxes (page.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gptworks.config import ModelConfig
from gptworks.describe.parts import Row, parts
from gptworks.describe.words import on_the_way, stack

Line = tuple[str, str]
"""A line of the drawing, and the tensor shape to print to its right."""

MIN_WIDTH = 80
"""Smallest width of a drawing, in columns; the longest rows need it."""

_SHAPE_WIDTH = 20


@dataclass(frozen=True)
class Flow:
    """The operations of a model from token ids to logits, in the order of the data flow."""

    embedding: list[Row]
    entry: list[Row]
    """Operations on the residual stream when it enters a block: the skip connection, if there is one."""
    attention: list[Row]
    """Operations of a block's attention, whose output is added to the residual stream."""
    mlp: list[Row]
    output: list[Row]


def flow(c: ModelConfig) -> Flow:
    """Return the operations of the model, with one block as an example for all blocks."""
    stream = f"B × T × {c.d_model:,}"
    described = parts(c, None)
    dropped, residual = (
        [(words, "", stream) for words in on_the_way(factor, dropout)]
        for factor, dropout in ((1, c.dropout_embedding), (c.residual_scale, c.dropout_residual))
    )

    def rows(place: str) -> list[Row]:
        return [row for part in described if part.place == place and part.key != "skip" for row in part.rows]

    return Flow(
        embedding=[*rows("input"), *dropped],
        entry=[row for part in described if part.key == "skip" for row in part.rows],
        attention=[*rows("attention"), *residual],
        mlp=[*rows("mlp"), *residual],
        output=rows("output"),
    )


def diagram(config: ModelConfig, width: int = MIN_WIDTH) -> list[str]:
    """Return the lines of the drawing, which is `width` columns wide, but at least `MIN_WIDTH`."""
    frame_width = max(width, MIN_WIDTH) - _SHAPE_WIDTH
    lines = _lines(config, frame_width)
    return [f"{line:<{frame_width}}{shape:>{_SHAPE_WIDTH}}".rstrip() for line, shape in lines]


def _lines(c: ModelConfig, width: int) -> Iterator[Line]:
    drawn = flow(c)
    yield "   token ids", "B × T"
    yield "      │", ""
    yield from _box(drawn.embedding, width)
    yield "      │", ""
    yield f"╔═════▼{f' {stack(c)} '.ljust(width - 8, '═')}╗", ""
    for words, weights, stream in drawn.entry:
        yield f"║     ● {words}{weights:>{width - 11 - len(words)}}  ║", stream
    yield from (_parallel if c.parallel_residual else _serial)(drawn.attention, drawn.mlp, width)
    yield f"╚═════╪{'═' * (width - 8)}╝", ""
    yield "      │", ""
    yield from _box(drawn.output, width)
    yield "      ▼", ""
    yield "   logits of the next token", f"B × T × {c.vocab_size:,}"


def _box(rows: list[Row], width: int) -> Iterator[Line]:
    """Yield the lines of a box outside the blocks, which the residual stream passes through."""
    yield f"╭─────▼{'─' * (width - 8)}╮", ""
    for text, shape in _fitted(rows, width - 6):
        yield f"│  {text}  │", shape
    yield f"╰─────┬{'─' * (width - 8)}╯", ""


def _serial(attention: list[Row], mlp: list[Row], width: int) -> Iterator[Line]:
    """Yield the lines of two boxes inside the block, each of which reads the residual stream and adds to it."""
    for rows in (attention, mlp):
        yield f"║     ├────╮{' ' * (width - 13)}║", ""
        yield from _branch(rows, width - 14, "║")


def _parallel(attention: list[Row], mlp: list[Row], width: int) -> Iterator[Line]:
    """Yield the lines of two boxes that both read the block's input. The line to the second box runs to the right of
    the first box."""
    yield f"║     ├────┬{'─' * (width - 15)}╮ ║", ""
    yield from _branch(attention, width - 16, "│ ║")
    yield f"║     │    ╭{'─' * (width - 15)}╯ ║", ""
    yield from _branch(mlp, width - 14, "║")


def _branch(rows: list[Row], width: int, right: str) -> Iterator[Line]:
    """Yield the lines of a box inside the block whose rows have `width` columns; `right` is printed after each line."""
    yield f"║     │ ╭──▼{'─' * (width - 1)}╮ {right}", ""
    for text, shape in _fitted(rows, width):
        yield f"║     │ │ {text} │ {right}", shape
    yield f"║     │ ╰──┬{'─' * (width - 1)}╯ {right}", ""
    yield f"║     +◄───╯{' ' * (width + 1)}{right}", ""


def _fitted(rows: list[Row], width: int) -> Iterator[Line]:
    """Yield each row as one line, or, if one line is too short, as two lines, with the weights on the second line."""
    for operation, weights, shape in rows:
        if len(operation) + 1 + len(weights) <= width:
            yield f"{operation}{weights:>{width - len(operation)}}", shape
        else:
            yield f"{operation:<{width}}", shape
            yield f"{weights:>{width}}", ""
