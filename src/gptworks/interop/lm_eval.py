"""A gptworks run as a model for lm-evaluation-harness (EleutherAI), computed by our engine.

    gptworks evaluate runs/mine --harness lambada_openai                                       # or a task's YAML file
    python -m gptworks.interop.lm_eval --model gptworks --model_args run=runs/mine --tasks …   # the harness's command

Texts are encoded and truncated as in the harness's `hf` model, so a run gets the scores of its exported folder. One
difference remains: `hf` gives probability to rows of the embedding without a token, and the engine does not. A text
without a context, such as a sentence of BLiMP, follows the begin-of-text token, or the end-of-text token if the
tokenizer has no begin-of-text token. All tokens of the text count.

The harness takes the first of tied choices. A model that scores all choices equally therefore gets 100% if the right
choice always comes first. So a multiple choice with `acc` also gets `acc, ties shared`, in which the right one of n
tied choices counts 1/n.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gptworks.chat_template import ChatTemplate
from gptworks.errors import UserError, not_installed
from gptworks.evaluation.metrics import Floats, means, share_of_best
from gptworks.evaluation.results import Evaluation, Measured
from gptworks.evaluation.scoring import SLOTS, complete_all, score_pairs
from gptworks.files import read_text
from gptworks.infer.engine import Engine, load
from gptworks.infer.sampling import SamplingSettings
from gptworks.special_tokens import THEIR_SAMPLING, special_tokens
from gptworks.tokenizer import document_frame, encode_text, pack_tokenizer, unpack_tokenizer
from gptworks.yaml_files import MAX_BYTES, compose_yaml

try:
    from lm_eval import evaluator
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise not_installed("lm_eval", "harness", "lm-evaluation-harness") from None

TIES_SHARED = "acc, ties shared"
"""Name of the accuracy of a multiple choice in which the right one of n tied choices counts 1/n."""


@register_model("gptworks")
class GptworksLM(TemplateLM):  # type: ignore[misc]
    """A run as a model for lm-evaluation-harness."""

    def __init__(
        self,
        run: str | Engine,
        checkpoint: str = "best",
        device: str = "auto",
        backend: str = "auto",
        max_gen_toks: int = 256,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        """`batch_size` and `max_batch_size` are ignored: the engine chooses its own batches."""
        super().__init__()
        options: Any = {"backend": backend, "n_slots": SLOTS}
        self.engine = run if isinstance(run, Engine) else load(run, checkpoint, device=device, **options)
        self.max_gen_toks = int(max_gen_toks)
        self._tokenizer = unpack_tokenizer(pack_tokenizer(self.engine.tokenizer))
        self._tokenizer.encode_special_tokens = False  # a token's name in a text becomes the token, as in transformers
        self._special = special_tokens(self._tokenizer)
        self._begin = [] if self._special.separator else document_frame(self._tokenizer)[0]

    @property
    def eot_token_id(self) -> int | None:
        return self._special.end

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that precedes a text without a context."""
        found = self._special.eos if self._special.bos is None else self._special.bos
        if found is None:
            raise UserError("this tokenizer has no token that begins a text: choose tasks without empty contexts.")
        return found

    @property
    def max_length(self) -> int:
        return self.engine.context

    @property
    def tokenizer_name(self) -> str:
        return "gptworks"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        ids = encode_text(self._tokenizer, string)
        begins = bool(self._begin) and ids[:1] == self._begin
        return ids if add_special_tokens is False or begins else self._begin + ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        scored = score_pairs(self.engine, [(context, continuation) for _, context, continuation in requests])
        answers = [(one.logprob, one.greedy) for one in scored]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
                )
            ]
            for request in requests
        ]
        scored = iter(score_pairs(self.engine, [window for of_one in windows for window in of_one]))
        totals = [float(sum(next(scored).logprob for _ in of_one)) for of_one in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, settings, stops = [], [], []
        end = None if self.eot_token_id is None else self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        for request in requests:
            context, given = request.args
            options = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            until = [one for one in handle_stop_sequences(options.pop("until"), eos=end) if one]
            max_tokens = int(options.pop("max_gen_toks"))
            if max_tokens >= self.max_length:
                raise UserError(f"max_gen_toks={max_tokens}: it must leave room in a context of {self.max_length}.")
            ids = self.tok_encode(context)[-(self.max_length - max_tokens) :]
            prompts.append(ids or [self.prefix_token_id])
            settings.append(_sampling(options, max_tokens, until, seed=len(prompts)))
            stops.append(until)
        made = complete_all(self.engine, prompts, settings)
        texts: list[str] = [
            postprocess_generated_text(self.tok_decode(one[0].token_ids), until, None)
            for one, until in zip(made, stops, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise UserError("a task with `gen_prefix` starts the answer, which gptworks does not support.")
        return self._template.render(chat_history, add_generation_prompt=True)

    @property
    def _template(self) -> ChatTemplate:
        return self.engine.require_chat_template("Leave out --apply_chat_template.")


def _sampling(options: dict[str, Any], max_tokens: int, until: list[str], seed: int) -> SamplingSettings:
    sampled = options.pop("do_sample", False)
    given = {name: options.pop(name) for name in THEIR_SAMPLING if name in options}
    if options:
        raise UserError(f"generation_kwargs has {', '.join(options)}: known are until, max_gen_toks, do_sample, "
                        f"{', '.join(THEIR_SAMPLING)}.")  # fmt: skip
    if not sampled:
        given["temperature"] = 0.0
    return SamplingSettings(**given, max_tokens=max_tokens, stop=tuple(until), seed=seed)


def run_harness(
    engine: Engine, tasks: Sequence[str], *, run: str, step: int, limit: int | None = None, chat: bool = False
) -> list[Evaluation]:
    """Evaluate a run on tasks of the harness; return an evaluation for each group, such as `blimp`, then for each task.

    Args:
        tasks: names of the harness's tasks, or YAML files of tasks.
        limit: evaluate only the first `limit` items of each task; None: all items.

    Raises:
        UserError: the harness does not have one of the tasks, a task's file is missing, or the run cannot answer a
            task, for example because `chat` is set and the run has no chat template.
        RunError: the model's scores are not numbers.
    """
    files = {task: Path(task) for task in tasks if Path(task).suffix in (".yaml", ".yml")}
    names = [_name_in(files[task]) if task in files else task for task in tasks]
    folders = list(dict.fromkeys(str(path.parent) for path in files.values()))
    manager = TaskManager(include_path=folders or None, include_defaults=not files.keys() >= set(tasks))
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise UserError(
            f"lm-evaluation-harness has no task {unknown[0]!r}: name one of its tasks, or a task's YAML file."
        )
    found = evaluator.simple_evaluate(
        GptworksLM(engine), tasks=names, task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=True,
        apply_chat_template=chat,
    )  # fmt: skip
    of_tasks = {name: _evaluation(name, found, run, step) for name in found["samples"]}
    groups = found.get("groups", {})
    of_groups = [_of_group(name, [of_tasks[task] for task in _tasks_of(name, found)], found) for name in groups]
    return [*of_groups, *of_tasks.values()]


def _name_in(path: Path) -> str:
    try:
        node = compose_yaml(read_text(path, MAX_BYTES), str(path))  # parse, do not load: YAML tags could run functions
    except FileNotFoundError:
        raise UserError(f"--harness {path}: no such file.") from None
    settings = {key.value: value for key, value in (node.value if isinstance(node, yaml.MappingNode) else [])}
    named = settings.get("group", settings.get("task"))  # in a group's file, `task` lists the tasks
    return str(named.value) if isinstance(named, yaml.ScalarNode) else path.stem


def _evaluation(name: str, found: dict[str, Any], run: str, step: int) -> Evaluation:
    """Return the result of one task, with a confidence interval for each metric that is a mean over items."""
    samples, metrics = found["samples"][name], {}
    for key, value in found["results"][name].items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        of_items = [one.get(metric) for one in samples if one.get("filter", "none") == filtered]
        label = metric if filtered == "none" else f"{metric}, {filtered}"
        numeric = of_items and all(isinstance(one, int | float) for one in of_items)
        if numeric and abs(float(np.mean(of_items)) - value) < 1e-9:
            metrics[label] = Measured.of("mean", means([float(one) for one in of_items]))
            if label == "acc" and (shares := _shares(samples)):
                metrics[TIES_SHARED] = Measured.of("mean", means(shares))
        else:
            metrics[label] = Measured("mean", np.empty((0, 2)), float(value), None, None)
    questions = sorted(one["doc_hash"] + one["prompt_hash"] for one in samples)
    return _result(name, found, run, step, len({one["doc_id"] for one in samples}), metrics, questions)


def _result(
    name: str, found: dict[str, Any], run: str, step: int, n_items: int, metrics: dict[str, Measured],
    parts: Sequence[str],
) -> Evaluation:  # fmt: skip
    """Return the result of a task or a group of tasks, with the hash of its `parts` as fingerprint."""
    return Evaluation(
        name=f"harness-{name}", kind="harness", run=run, step=step, n_items=n_items, metrics=metrics,
        shots=found["n-shot"].get(name), fingerprint=hashlib.sha256(" ".join(parts).encode("ascii")).hexdigest(),
        settings={"task_version": found["versions"].get(name), "lm_eval": found.get("lm_eval_version")},
    )  # fmt: skip


def _shares(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Return the accuracy of each item of a multiple choice, with ties shared. Return an empty list if the items are
    not multiple choices, or do not name the right choice."""
    shares = []
    for one in samples:
        scores, right = [score for score, *_ in one["filtered_resps"]], one["target"]
        texts = [text.strip() for _, text in one["arguments"]]
        known = [texts.index(right.strip())] if isinstance(right, str) and right.strip() in texts else right
        indices = known if isinstance(known, list) else [known]
        is_choice = len(scores) > 1 and len(set(texts)) > 1  # else each choice is a context of the same continuation
        if not is_choice or "acc_mutual_info" in one or not all(isinstance(index, int) for index in indices):
            return []
        shares.append(share_of_best(scores, indices))
    return shares


def _tasks_of(group: str, found: dict[str, Any]) -> list[str]:
    """Return the names of the tasks in a group and in the groups within it, each once."""
    children = found["group_subtasks"].get(group, [])
    names = [name for child in children for name in ([child] if child in found["samples"] else _tasks_of(child, found))]
    return list(dict.fromkeys(names))


def _of_group(name: str, tasks: Sequence[Evaluation], found: dict[str, Any]) -> Evaluation:
    """Return the result of a group, with the metrics that the harness aggregates. Each value is the mean over all items
    or the mean of the tasks' means, whichever equals the harness's value. If neither mean equals it, the value has no
    interval."""
    metrics, figures = {}, found["groups"][name]
    for label in tasks[0].metrics:
        stated = "acc" if label == TIES_SHARED else label
        metric, _, filtered = stated.partition(", ")
        value = figures.get(f"{metric},{filtered or 'none'}")
        if value is None or any(label not in one.metrics for one in tasks):
            continue
        by_task = next((way for way in (True, False) if abs(_mean(_pooled(tasks, stated, way)) - value) < 1e-9), None)
        if by_task is not None:
            metrics[label] = Measured.of("mean", _pooled(tasks, label, by_task))
        elif label == stated:
            metrics[label] = Measured("mean", np.empty((0, 2)), float(value), None, None)
    n_items, fingerprints = sum(one.n_items for one in tasks), [one.fingerprint for one in tasks]
    return _result(name, found, tasks[0].run, tasks[0].step, n_items, metrics, fingerprints)


def _pooled(tasks: Sequence[Evaluation], label: str, by_task: bool) -> Floats:
    """Return the statistics [N, 2] of the items of all tasks. `by_task`: each task weighs the same."""
    of_tasks = [one.metrics[label].statistics for one in tasks]
    return np.concatenate([one / max(1, len(one)) if by_task else one for one in of_tasks])


def _mean(statistics: Floats) -> float:
    total, weight = statistics.sum(0)
    return float(total / weight) if weight else math.nan


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
