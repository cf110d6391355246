"""Ask a model the items of a task, and score its answers. task.py describes the files."""

import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gptworks.confined.expressions import find
from gptworks.confined.sandbox import Sandbox
from gptworks.errors import UserError
from gptworks.evaluation.metrics import check_libraries, means, pass_at_k, share_of_best, text_statistics
from gptworks.evaluation.results import Evaluation, Measured
from gptworks.evaluation.scoring import Progress, Scored, complete_all, encode_pair, score_pairs
from gptworks.evaluation.task import Code, ExactMatch, Generation, Item, MultipleChoice, Sampled, Task
from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.tokenizer import encode_text

Found = tuple[dict[str, Measured], list[dict[str, Any]]]


def run_task(
    engine: Engine,
    task: Task,
    *,
    run: str = "",
    step: int = 0,
    sandbox: Sandbox | None = None,
    chat: bool = False,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Ask a model the items of a task, and score its answers.

    An item gets fewer shots if not all shots fit in the context, or if too many other items equal the item. Notes in
    the result count such items.

    Args:
        run, step: the run's name and the checkpoint's step, for the result.
        sandbox: runs the programs of a code task; None forbids such tasks.
        chat: ask items as conversations in the run's chat template.

    Raises:
        UserError: an item is too long even without shots, a library is missing, a code task has no sandbox, the run has
            no template for `chat`, or the regular expression `extract` takes too long.
        RunError: the model's scores are not numbers.
    """
    settings = task.settings
    asked = Asked(engine, task, chat)
    if isinstance(settings, MultipleChoice):
        metrics, items = _multiple_choice(asked, progress)
    elif isinstance(settings, ExactMatch):
        metrics, items = _exact_match(asked, settings, progress)
    elif isinstance(settings, Generation):
        check_libraries(settings.metrics)
        metrics, items = _generation(asked, settings, progress)
    else:
        if sandbox is None:
            raise UserError(
                f"{task.origin} runs programs that the model writes, closed off from the machine by Linux's "
                f"namespaces. Where you accept that, add --run-generated-code."
            )
        metrics, items = _code(asked, settings, sandbox, progress)
    name = f"{settings.name}-{settings.shots}-shot" if settings.shots else settings.name
    return Evaluation(
        name=name, kind=settings.type, run=run, step=step, n_items=len(items), metrics=metrics, shots=settings.shots,
        fingerprint=task.fingerprint + (" chat" if chat else ""), settings=settings.model_dump(mode="json"),
        notes=asked.notes(), items=tuple(items),
    )  # fmt: skip


class Asked:
    """The items of a task, as prompts and tokens for a model."""

    def __init__(self, engine: Engine, task: Task, chat: bool) -> None:
        self.engine, self.task, self.items = engine, task, task.items_asked
        self.template = engine.require_chat_template("Ask it without --chat.") if chat else None
        self._n_short = self._n_equal = 0

    def context(self, item: Item, room: int) -> tuple[str, list[int]]:
        """Return the text ("" with a chat template) and the tokens before an answer, with as many shots as fit in the
        context together with `room` more tokens. The last of these tokens may lie beyond the context, because the model
        does not read it. Raise a UserError if the item does not fit even without shots."""
        n_shots = len(self.task.shots_for(item))
        self._n_equal += n_shots < self.task.settings.shots
        for n in range(n_shots, -1, -1):
            text, ids = self._encode(item, n)
            if len(ids) + room <= self.engine.context + 1:
                self._n_short += n < n_shots
                return text, ids
        raise UserError(
            f"{self.task.origin}: item {self.task.items.index(item) + 1} has {len(ids)} tokens without shots, its "
            f"answer {room}, and the model's context is {self.engine.context}. Shorten it, or ask for fewer max_tokens."
        )

    def _encode(self, item: Item, n_shots: int) -> tuple[str, list[int]]:
        if self.template is None:
            text = self.task.prompt(item, n_shots)
            return text, self.engine.encode_prompt(text)
        messages = [{"role": "system", "content": self.task.settings.description}]
        for prompt, answer in self.task.turns(item, n_shots):
            messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        messages = messages[not self.task.settings.description : -1]
        return "", self.template.encode(messages, add_generation_prompt=True)

    def pairs(self, item: Item, choices: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return (context, continuation) as token ids for each choice. All contexts have the same shots."""
        longest = max(len(encode_text(self.engine.tokenizer, choice)) for choice in choices)
        text, ids = self.context(item, longest + 1)  # encoding both texts together may add one token
        if self.template is not None:
            return [(ids, encode_text(self.engine.tokenizer, choice)) for choice in choices]
        rest, delimiter = partial(encode_text, self.engine.tokenizer), self.task.settings.delimiter
        return [encode_pair(self.engine.encode_prompt, text, delimiter + choice, rest) for choice in choices]

    def write(self, settings: Sampled, n_samples: int, progress: Progress) -> list[list[str]]:
        """Generate `n_samples` continuations of each item, and return their texts."""
        prompts = [self.context(item, settings.max_tokens)[1] for item in self.items]
        ends = () if self.template is None else self.template.end_token_ids
        sampling = [
            SamplingSettings(
                temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_tokens,
                stop=settings.stop, seed=self.task.settings.seed * 1_000_003 + i, stop_token_ids=ends,
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        made = complete_all(self.engine, prompts, sampling, n_samples, progress)
        return [[completion.text for completion in of_one] for of_one in made]

    def notes(self) -> tuple[str, ...]:
        reasons = (
            (self._n_short, f"because the context is {self.engine.context:,} tokens"),
            (self._n_equal, "because the other items equal them"),
        )
        return tuple(
            f"{n:,} of {len(self.items):,} items had fewer than {self.task.settings.shots} shots, {why}"
            for n, why in reasons
            if n
        )


def _multiple_choice(asked: Asked, progress: Progress) -> Found:
    choices = [asked.task.choices(item) for item in asked.items]
    right = [asked.task.right_choice(item) for item in asked.items]
    pairs = [asked.pairs(item, of_one) for item, of_one in zip(asked.items, choices, strict=True)]
    scored = iter(score_pairs(asked.engine, [pair for of_one in pairs for pair in of_one], progress))
    measures: dict[str, Callable[[Scored, str], float]] = {
        "accuracy": lambda one, choice: one.logprob,
        "accuracy by token": lambda one, choice: one.logprob / one.n_tokens,
        "accuracy by byte": lambda one, choice: one.logprob / len(choice.encode("utf-8")),
    }
    hits: dict[str, list[float]] = {name: [] for name in measures}
    answered = []
    for of_one, wanted in zip(choices, right, strict=True):
        scores = [next(scored) for _ in of_one]
        chosen = {}
        for name, measure in measures.items():
            values = [measure(one, choice) for one, choice in zip(scores, of_one, strict=True)]
            chosen[name] = values.index(max(values))
            hits[name].append(share_of_best(values, [wanted]))
        answered.append({"right": wanted, "chosen": chosen["accuracy"], "logprobs": [one.logprob for one in scores]})
    return {name: Measured.of("mean", means(of_one)) for name, of_one in hits.items()}, answered


def _exact_match(asked: Asked, settings: ExactMatch, progress: Progress) -> Found:
    answers = [asked.task.texts(item, "answer") for item in asked.items]
    written = [texts[0] for texts in asked.write(settings.generation, 1, progress)]
    answered, hits = [], []
    extracted = _extracted(written, settings, asked.task)
    for text, found, right in zip(written, extracted, answers, strict=True):
        hit = _plain(found, settings) in {_plain(one, settings) for one in right}
        hits.append(float(hit))
        answered.append({"right": right, "written": text, "hit": hit})
    return {"exact match": Measured.of("mean", means(hits))}, answered


def _extracted(texts: list[str], settings: ExactMatch, task: Task) -> list[str]:
    """Return the first group of `extract` in each text ("" without a match), or the texts if `extract` is None. Raise a
    UserError if the regular expression takes too long on a text."""
    if settings.extract is None:
        return texts
    try:
        return ["" if found is None else found[1] for found in find(settings.extract, texts)]
    except UserError as error:
        raise UserError(f"{task.origin}: `extract`: {error} Use a simpler one.") from None


def _plain(text: str, settings: ExactMatch) -> str:
    if settings.ignore_case:
        text = text.lower()
    if settings.ignore_punctuation:
        text = text.translate(str.maketrans("", "", string.punctuation))
    return text.strip()


def _generation(asked: Asked, settings: Generation, progress: Progress) -> Found:
    references = [asked.task.texts(item, "references") for item in asked.items]
    written = [texts[0].strip() for texts in asked.write(settings.generation, 1, progress)]
    metrics = {str(name): Measured.of(*text_statistics(name, written, references)) for name in settings.metrics}
    pairs = zip(references, written, strict=True)
    return metrics, [{"references": given, "written": text} for given, text in pairs]


def _code(asked: Asked, settings: Code, sandbox: Sandbox, progress: Progress) -> Found:
    task = asked.task
    written = asked.write(settings.generation, settings.samples, progress)
    programs = []
    for item, texts in zip(asked.items, written, strict=True):
        begun = task.text(item, "prompt") if settings.prompt_is_code else ""
        tests = task.text(item, "tests")
        programs += [f"{begun}{text}\n\n{tests}\n" for text in texts]
    outcomes = sandbox.run_all(programs, settings.timeout_seconds, settings.memory_mib, progress)
    answered, passed, n = [], [], settings.samples
    for i, texts in enumerate(written):
        of_one = outcomes[i * n : (i + 1) * n]
        samples = [{"written": text, "outcome": outcome} for text, outcome in zip(texts, of_one, strict=True)]
        passed.append(of_one.count("passed"))
        answered.append({"passed": passed[-1], "samples": samples})
    return {f"pass@{k}": Measured.of("mean", means([pass_at_k(n, c, k) for c in passed])) for k in settings.k}, answered
