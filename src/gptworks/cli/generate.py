"""Commands that use a run: generate, chat."""

import itertools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from gptworks.choices import SAMPLING
from gptworks.cli import options
from gptworks.cli.printing import notice, print_json, working
from gptworks.errors import RunError, UserError, refuse_unused

if TYPE_CHECKING:
    from gptworks.infer.engine import Engine
    from gptworks.infer.request import Prompt
    from gptworks.infer.sampling import SamplingSettings
    from gptworks.infer.speculate import Drafter


_SETTING = re.compile(r"(model|tokenizer|data|train)\.[a-z0-9_.]+=\S*")
"""Matches an argument that is a setting, not a prompt. A prompt of this form can be read from standard input."""


def generate(
    run: options.RunFolder,
    prompt: Annotated[str, Argument(metavar="PROMPT", help="The text to continue; -: standard input.")] = "",
    overrides: options.Overrides = None,
    max_tokens: options.MaxTokens = SAMPLING.max_tokens,
    *,
    sampling: options.SamplingOptions,
    stop: options.Stop = None,
    min_tokens: Annotated[int, Option(help="Fewest tokens before a text may end.")] = SAMPLING.min_tokens,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="The end-of-text token ends nothing.")] = False,
    heal: Annotated[bool, Option(help="Draw the prompt's last token again, as a longer one may fit better.")] = True,
    logprobs: Annotated[int | None, Option(help="With --json: log-probabilities of each token and N others.")] = None,
    json_schema: Annotated[Path | None, Option(metavar="FILE", help="Write JSON that this schema allows.")] = None,
    regex: Annotated[str | None, Option(help="Write a text that matches this regular expression.")] = None,
    chat: Annotated[bool, Option("--chat", help="Ask with the run's chat template; print the answer.")] = False,
    samples: Annotated[int, Option(help="Number of continuations.")] = 1,
    held_out: Annotated[
        int | None, Option(min=1, max=100, metavar="N", help="Continue N beginnings of the run's held-out data.")
    ] = None,
    slide: options.Slide = False,
    input_file: Annotated[
        Path | None, Option("--input", metavar="FILE", help="Continue a .jsonl file's prompts.")
    ] = None,
    output_file: Annotated[
        Path | None, Option("--output", metavar="FILE", help="The results; prompts with a result there are skipped.")
    ] = None,
    slots: Annotated[int | None, Option(min=1, help="Texts generated at once. Default: up to 32.")] = None,
    speculative: options.Speculative = 0,
    draft_model: Annotated[
        Path | None,
        Option(
            metavar="RUN",
            help="With --speculative: a smaller model that drafts. Default: the run's own heads, or prompt lookup.",
        ),
    ] = None,
    loading: options.EngineOptions,
    as_json: options.AsJSON = False,
) -> None:
    """Continue a prompt, or every prompt of a file. The text of a single continuation is streamed."""
    from gptworks.files import read_given
    from gptworks.infer.sampling import SamplingSettings

    if _SETTING.fullmatch(prompt):
        prompt, overrides = "", [prompt, *(overrides or [])]
    schema = None if json_schema is None else read_given(json_schema, 1 << 24)
    wanted = _given(
        **sampling, max_tokens=max_tokens, stop=tuple(stop or ()), min_tokens=min_tokens, ignore_eos=ignore_eos,
        heal=heal, logprobs=logprobs, json_schema=schema, regex=regex,
    )  # fmt: skip
    SamplingSettings(**wanted)  # refuse invalid settings before the model is loaded
    if not speculative:
        refuse_unused("is for --speculative N: add it, or", draft_model=draft_model)
    if held_out is not None:
        if prompt or chat or input_file is not None:
            raise UserError(
                "--held-out takes its prompts from the run's data: leave out the prompt, --chat and --input."
            )
        refuse_unused("does nothing with --held-out, which prints one text of each", samples=samples > 1, slots=slots)
    if (input_file is None) != (output_file is None) or (input_file is not None and prompt):
        raise UserError("--input and --output belong together, without a prompt.")
    if chat and input_file is None and not prompt:
        raise UserError("--chat without a prompt: give the question, or - to read it from standard input.")
    if input_file is not None:
        refuse_unused(
            "does nothing with --input, whose results are JSON lines in --output", json=as_json, logprobs=logprobs
        )
    else:
        if not as_json:
            refuse_unused("is for --json: add it, or", logprobs=logprobs)
        if samples == 1:
            refuse_unused("is for several texts: give --samples or --input, or", slots=slots)
    drafter = drafter_of(run, speculative, draft_model, loading)
    engine = load_engine(run, loading, overrides, n_slots=slots, drafter=drafter)
    settings = SamplingSettings.of(engine.defaults, **wanted)
    if held_out is not None:
        _generate_held_out(engine, run, held_out, settings, as_json)
        return
    encode: Callable[[str], Prompt] = str
    ends: tuple[int, ...] = ()
    if chat:
        encode, ends = _asking(engine)
    elif engine.chat_template is not None:
        notice("the prompt is continued as plain text; --chat asks it by the run's chat template.")
    overflow: Any = "slide" if slide else "error"
    if input_file is not None and output_file is not None:
        _generate_file(
            engine, input_file, output_file, settings, n_samples=samples, overflow=overflow, encode=encode, ends=ends
        )
        return
    settings = settings.ending_at(ends)
    prompt = sys.stdin.read() if prompt == "-" else prompt
    shown = "" if chat else prompt
    if as_json or samples > 1:
        with working("generating"):
            completions = engine.complete(encode(prompt), settings, n_samples=samples, overflow=overflow)
        if as_json:
            found = [{name: value for name, value in vars(one).items() if value is not None} for one in completions]
            print_json({"prompt": prompt, "completions": found})
            return
        for i, completion in enumerate(completions):
            sys.stdout.write(f"--- {i + 1} of {samples}\n{shown}{completion.text}\n")
        return
    reason = None
    pieces = engine.pieces(encode(prompt), settings, overflow=overflow)
    with working("reading the prompt"):
        first = list(itertools.islice(pieces, 1))
    sys.stdout.write(shown)
    for piece in itertools.chain(first, pieces):
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        reason = piece.finish_reason
    sys.stdout.write("\n")
    if reason == "context":
        notice("stopped: the context is full. With --slide it continues from the context's last half.")
    if (rate := engine.statistics().acceptance_rate) is not None:
        notice(f"{rate:.0%} of the draft tokens were accepted.")


def _generate_held_out(engine: "Engine", run: Path, n: int, settings: "SamplingSettings", as_json: bool) -> None:
    """Print continuations of `n` beginnings in the run's held-out data, and the rule that chose the beginnings."""
    from gptworks.data.beginnings import beginnings, rule
    from gptworks.data.shards import TokenShards
    from gptworks.recipe import load_recipe
    from gptworks.runs.data import data_of

    shards = TokenShards(data_of(run).prepared.folder, "validation")
    most = load_recipe(run).train.held_out_tokens(engine.model.config.context_length)
    found = beginnings(shards, engine.tokenizer, n, most, settings.max_tokens)
    if engine.chat_template is not None:
        settings = settings.ending_at(engine.chat_template.end_token_ids)
    with working("generating"):
        requests = [engine.submit(one.prompt, settings, overflow="slide") for one in found]
        texts = [completion.text for (completion,) in engine.finish(requests)]
    if as_json:
        rows = [
            {"prompt": one.text, "text": text, "follows": one.follows} for one, text in zip(found, texts, strict=True)
        ]
        print_json({"rule": rule(shards, n, most), "completions": rows})
        return
    notice(f"{rule(shards, n, most)}. The model continues after ▸")
    for i, (one, text) in enumerate(zip(found, texts, strict=True)):
        sys.stdout.write(f"--- {i + 1} of {len(found)}\n{one.text}▸{text}\n")


def _given(**settings: Any) -> dict[str, Any]:
    """Return the sampling settings that the command line gives: those that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def _asking(engine: "Engine") -> "tuple[Callable[[str], Prompt], tuple[int, ...]]":
    """Return a function from a question to a prompt, and the tokens that end an answer."""
    template = engine.require_chat_template("Ask it without --chat.")

    def encode(text: str) -> "Prompt":
        return template.encode([{"role": "user", "content": text}], add_generation_prompt=True)

    return encode, tuple(template.end_token_ids)


def drafter_of(run: Path, n_tokens: int, drafts: Path | None, loading: Mapping[str, Any]) -> "Drafter | None":
    """Return a drafter of up to `n_tokens` tokens at a time; None if `n_tokens` is 0. It drafts with the draft model
    `drafts`, loaded with the options `loading`, else with the run's own multi-token heads, else by prompt lookup.

    The option `weights` does not apply to a quantized draft model. No draft model changes the generated text.
    """
    from gptworks.checkpoint import choose_checkpoint
    from gptworks.files import fetched_path
    from gptworks.infer.engine import load
    from gptworks.infer.speculate import DraftModel, HeadsDraft, PromptLookup
    from gptworks.recipe import load_recipe

    if not n_tokens:
        return None
    if drafts is None:
        n_heads = load_recipe(run).model.n_future_tokens - 1
        if 0 < n_heads < n_tokens:
            notice(f"the run's heads draft {n_heads} of {n_tokens} tokens at a time (model.n_future_tokens).")
        return HeadsDraft(n_tokens) if n_heads else PromptLookup(n_tokens)
    folder, weights = fetched_path(drafts), loading["weights"]
    if weights != "auto" and choose_checkpoint(folder).is_quantized:
        weights = "auto"
    draft = load(folder, device=loading["device"], weights=weights, report=notice).model
    return DraftModel(draft, n_tokens, backend=loading["backend"])


def _generate_file(engine: "Engine", source: Path, target: Path, settings: "SamplingSettings", **options: Any) -> None:
    """Continue each prompt in a file, with a progress bar."""
    from gptworks.infer.batch import BatchReport, generate_file

    with working(f"continuing {source}") as show:

        def shown(report: BatchReport) -> None:
            show(report.skipped + report.done + report.failed, report.total)

        report = generate_file(engine, source, target, settings, report=shown, **options)
    skipped = f", {report.skipped} were there already" if report.skipped else ""
    notice(f"{target}: {report.done} of {report.total} prompts continued{skipped}.")
    for error in report.errors:
        notice(f"error: {error}")
    if report.failed:
        raise RunError(f"{report.failed} of {report.total} prompts could not be continued; their lines say why.")


def chat(
    run: options.RunFolder,
    max_tokens: options.MaxTokens = SAMPLING.max_tokens,
    *,
    sampling: options.SamplingOptions,
    stop: options.Stop = None,
    system: Annotated[str, Option(help="System message; needs a chat template.")] = "",
    loading: options.EngineOptions,
) -> None:
    """Chat with a model. A base model has no turns: it continues the whole text."""
    from gptworks.cli.chat_terminal import Talk, Terminal
    from gptworks.infer.chat import chat_session

    engine = load_engine(run, loading, reuse="all")
    given = _given(**sampling, max_tokens=max_tokens, stop=tuple(stop or ()))
    session = chat_session(engine, system=system, **given)
    kind = "an assistant: it answers" if engine.chat_template else "a base model: it continues"
    notice(f"This is {kind} what you write. /help lists what you can do; Ctrl-C stops an answer, Ctrl-D ends.")
    with Terminal() as terminal:
        Talk(session, terminal).run()


def load_engine(run: Path, loading: Mapping[str, Any], overrides: list[str] | None = None, **more: Any) -> "Engine":
    """Load a run's engine with the options `loading` and further arguments `more` of `gptworks.infer.engine.load`."""
    with working(f"loading {run}"):
        import torch

        from gptworks.infer.engine import load

        given = dict(loading)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}.get(given.pop("cache"))
        which = given.pop("checkpoint")
        return load(run, which, overrides=overrides or [], report=notice, cache_dtype=dtype, **given, **more)
