"""Continue the prompts of a file and write the texts to another file. A second call resumes an interrupted batch.

Input: one JSON object per line, with `prompt`, a text; optionally `id`, a string or whole number (default: the line
number, from 1), and `settings`, which override the call's settings (`{"max_tokens": 20}`). Other keys are ignored.

Output: one line per prompt, written when the prompt's texts are finished, with `id`, `prompt_tokens` and `completions`.
Each completion has `text`, `finish_reason` and `tokens`, the number of its tokens. A prompt that fails gets a line with
only `id` and `error`, which the next call replaces.
"""

import itertools
import json
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gptworks.errors import UserError
from gptworks.files import open_given, open_regular, open_to_append, replacing
from gptworks.infer.engine import Engine
from gptworks.infer.request import Overflow, Prompt, Request
from gptworks.infer.sampling import SamplingSettings

J = TypeVar("J", bound=Hashable)

_IN_FLIGHT = 64
"""Maximum number of requests in the engine at a time: twice the slots of an engine whose `n_slots` is not set."""
_MOST_BYTES = 1 << 38
"""Maximum size of the input file."""

_BEGINNING = b'{"id": '


@dataclass
class BatchReport:
    """The progress of a batch, and finally its outcome."""

    total: int
    """Number of prompts in the input."""
    skipped: int = 0
    """Number of prompts that earlier calls have completed. Prompts that ended in an error are tried again."""
    done: int = 0
    failed: int = 0
    """Number of prompts that ended in an error in this call."""
    generated_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    """Error messages of the first three failed prompts, each prefixed with the prompt's id."""


@dataclass(frozen=True, eq=False)
class _Task:
    id: str | int
    prompt: str
    settings: SamplingSettings


def run_many(
    engine: Engine, next_jobs: Callable[[int], Iterable[J]], submit: Callable[[J], Request], most: int
) -> Generator[tuple[J, Request | Exception]]:
    """Submit jobs and take the engine's steps; yield each job when it ends, with its finished request or its error.

    Args:
        next_jobs: called with a number before each step; returns at most that many new jobs.
        submit: submits a job's request to the engine. A UserError ends only this job.
        most: maximum number of requests in the engine at a time; choose enough that no slot is idle.
    """
    running: dict[J, Request] = {}
    try:
        while (new := list(next_jobs(most - len(running)))) or running:
            for job in new:
                try:
                    running[job] = submit(job)
                except UserError as error:
                    yield job, error
            engine.step()
            for job, request in [(job, request) for job, request in running.items() if request.done]:
                del running[job]
                yield job, request.error or request
    finally:
        for request in running.values():
            engine.cancel(request)


def generate_file(
    engine: Engine,
    source: str | Path,
    target: str | Path,
    settings: SamplingSettings | None = None,
    *,
    n_samples: int = 1,
    overflow: Overflow = "error",
    encode: Callable[[str], Prompt] = lambda text: text,
    ends: Sequence[int] = (),
    report: Callable[[BatchReport], None] = lambda _: None,
) -> BatchReport:
    """Continue each prompt of `source` that has no completions in `target` yet; append a line for each finished prompt.

    Args:
        source, target: the input and output files, in the formats that this module's docstring describes.
        settings, n_samples, overflow: as in `Engine.complete`, for all prompts.
        encode: turns a line's text into a prompt for the engine; default: the text itself.
        ends: further token ids that end a text, unless the settings of its line have `ignore_eos`.
        report: called with the progress after each prompt.

    Raises:
        UserError: an input line is invalid, two lines have the same id, or `target` is not the output of a batch.
        OSError: a file cannot be opened or written.
    """
    source, target, defaults = Path(source), Path(target), settings or engine.defaults

    def submit(task: _Task) -> Request:
        sampling = task.settings.ending_at(ends)
        return engine.submit(encode(task.prompt), sampling, n_samples=n_samples, overflow=overflow)

    with open_given(source, _MOST_BYTES) as lines:
        ids: set[str | int] = set()
        for task in _tasks(lines, source, defaults):
            if task.id in ids:
                raise UserError(f"{source}: two prompts have the id {task.id!r}. Give each its own, to resume by.")
            ids.add(task.id)
        finished = _finished(target, ids)
        progress = BatchReport(total=len(ids), skipped=len(ids & finished))
        left = (task for task in _tasks(lines, source, defaults) if task.id not in finished)
        with open_to_append(target) as out:
            for task, ended in run_many(engine, lambda n: itertools.islice(left, n), submit, _IN_FLIGHT):
                outcome = _outcome(ended)
                out.write((json.dumps({"id": task.id, **outcome}, ensure_ascii=False) + "\n").encode("utf-8"))
                out.flush()
                if "error" in outcome:
                    progress.failed += 1
                    if len(progress.errors) < 3:
                        progress.errors.append(f"{task.id}: {outcome['error']}")
                else:
                    progress.done += 1
                    progress.generated_tokens += sum(one["tokens"] for one in outcome["completions"])
                report(progress)
    return progress


def _outcome(request: Request | Exception) -> dict[str, Any]:
    """Return the content of an output line, without the id."""
    if isinstance(request, Exception):
        return {"error": str(request)}
    return {
        "completions": [
            {"text": one.text, "finish_reason": one.finish_reason, "tokens": len(one.token_ids)}
            for one in request.completions()
        ],
        "prompt_tokens": len(request.prompt_ids),
    }


def _tasks(lines: BinaryIO, source: Path, settings: SamplingSettings) -> Iterator[_Task]:
    lines.seek(0)
    for number, line in enumerate(lines, 1):
        place = f"{source}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 text: {error.reason}. Save the file as UTF-8.") from None
        if text.strip():
            yield _task(text, number, place, settings)


def _task(line: str, number: int, place: str, settings: SamplingSettings) -> _Task:
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON: {error}.") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("prompt"), str):
        raise UserError(f'{place}: it must be an object with a text, such as {{"prompt": "Once"}}.')
    own, name = tree.get("settings", {}), tree.get("id", number)
    if not isinstance(own, dict):
        raise UserError(f"{place}: settings={own!r}: it must be an object.")
    if not isinstance(name, str | int):
        raise UserError(f"{place}: id={name!r}: it must be a string or a whole number.")
    try:
        return _Task(name, tree["prompt"], SamplingSettings.of(settings, **own))
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def _finished(target: Path, ids: set[str | int]) -> set[str | int]:
    """Return the ids of the prompts that have completions in an output file.

    Remove from the file an incomplete last line, and the error lines of prompts in `ids`, which are tried again.
    """
    if not target.exists():
        return set()
    finished: set[str | int] = set()
    complete_bytes, retries = 0, False
    with open_regular(target) as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.endswith(b"\n"):
                    name, failed = _ended(line)
                    retries |= failed and name in ids
                    if not failed:
                        finished.add(name)
                    complete_bytes += len(line)
                elif line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
                    raise ValueError("not the beginning of an output line")
            except (ValueError, TypeError, RecursionError):
                raise UserError(
                    f"{target}, line {number}: not an output of this command. Give another --output."
                ) from None
    with open_to_append(target) as file:
        file.truncate(complete_bytes)
    if retries:
        with open_regular(target) as lines, replacing(target.resolve()) as kept:
            for line in lines:
                name, failed = _ended(line)
                if not failed or name not in ids:
                    kept.write(line)
    return finished


def _ended(line: bytes) -> tuple[str | int, bool]:
    """Return an output line's id, and whether its prompt failed. Raises ValueError or TypeError for other lines."""
    outcome = json.loads(line)
    failed = set(outcome) == {"id", "error"}
    if not failed and not {"id", "completions"} <= set(outcome):
        raise ValueError("not an output line")
    return outcome["id"], failed
