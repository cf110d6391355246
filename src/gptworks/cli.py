"""The command line: one function a command, each importing what it needs when it runs."""

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptworks import __version__
from gptworks.errors import RunError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from gptworks.config import ModelConfig, Recipe
    from gptworks.data.prepare import Prepared
    from gptworks.infer.engine import Engine
    from gptworks.infer.request import Completion
    from gptworks.infer.sampling import SamplingSettings
    from gptworks.infer.speculate import Drafter
    from gptworks.plan.devices import Device as PlannedDevice

app = typer.Typer(
    name="gptworks",
    help="Design, plan, train, evaluate and run your own GPT-family language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, or a run folder.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the file's, such as train.max_steps=200."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/demo.")]
WhichCheckpoint = Annotated[str, typer.Option("--checkpoint", help="best, last, or a step.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Slide = Annotated[bool, typer.Option("--slide", help="When the context is full, go on from its last half.")]

# How to sample; shared by `generate` and `chat`.
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token (greedy).")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens. 0: all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this much probability.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens already there become less likely.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this string; may be given several times.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Taken from a token's logit each time it was generated.")]
PresencePenalty = Annotated[float, typer.Option(help="Taken from a token's logit once it was generated.")]
Backend = Annotated[str, typer.Option(help="auto, torch or native (C++, on a CPU).")]


def main() -> None:
    """Run a command; a mistake of the user or a failure of the work is one clear message and an exit code."""
    warnings.showwarning = lambda message, *_: _notice(f"warning: {message}")
    try:
        app()
    except (UserError, RunError) as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'input/output'}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


# ------------------------------------------------------------------------------------------------ looking


@app.command()
def presets(as_json: AsJSON = False) -> None:
    """List the named architectures."""
    from rich.table import Table

    from gptworks.plan.params import count_parameters
    from gptworks.presets import PRESETS

    rows = {name: (make(), count_parameters(make()).total) for name, make in PRESETS.items()}
    if as_json:
        _print_json(
            {name: {"parameters": {"total": total}, "model": c.model_dump()} for name, (c, total) in rows.items()}
        )
        return
    table = Table("preset", box=None, header_style="bold", pad_edge=False)
    for column in ("parameters", "layers", "width", "heads", "context", "vocabulary"):
        table.add_column(column, justify="right")
    table.add_column("position, norm, MLP")
    for name, (c, total) in rows.items():
        figures = (total, c.n_layers, c.d_model, c.n_heads, c.context_length, c.vocab_size)
        table.add_row(name, *(f"{figure:,}" for figure in figures), f"{c.position}, {c.norm}, {c.mlp}")
    _console().print(table)


@app.command()
def describe(
    target: Annotated[str, typer.Argument(metavar="PRESET|RECIPE|RUN")],
    overrides: Overrides = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the figure.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Draw an architecture: data flow with shapes, every parameter group, exact totals beside published ones."""
    from gptworks.plan.sheet import describe as describe_model

    config, name = _architecture(target, overrides or [])
    sheet = describe_model(config, name)
    if html is not None:
        from gptworks.plan.html import write_html

        write_html(sheet, html)
        _notice(f"wrote {html}")
    if as_json:
        _print_json(sheet.to_json())
    elif markdown:
        typer.echo(sheet.to_markdown())
    elif html is None:
        _console().print(sheet)


@app.command()
def plan(
    target: Annotated[str, typer.Argument(metavar="PRESET|RECIPE|RUN")],
    overrides: Overrides = None,
    device: Annotated[
        str | None, typer.Option(help="h100, rtx-4090, m2-ultra...; this: measured. Default: this machine's CPU.")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a GPU that is not listed.")] = None,
    flops: Annotated[float | None, typer.Option(help="Its dense FLOP/s in the precision trained in.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Its bytes/s.")] = None,
    world_size: Annotated[int, typer.Option(help="How many devices.")] = 1,
    sharding: Annotated[str, typer.Option(help="none, zero2 or fsdp; auto: as little as fits.")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share each matrix.")] = 1,
    utilization: Annotated[float, typer.Option(help="Share of the device's FLOP/s that training reaches.")] = 0.4,
    trace: Annotated[bool, typer.Option("--trace", help="Count a step's memory on fake tensors too.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Take two real steps on this machine too.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Say what a training run comes to, before data or weights exist: FLOPs, memory, what fits, time, disk."""
    from dataclasses import replace

    from gptworks.plan.arrange import check_figures, choose_layout, plan_preset
    from gptworks.plan.run import plan as plan_recipe
    from gptworks.presets import PRESETS, preset
    from gptworks.recipe import load_recipe

    check_figures(memory_gib=memory_gib, flops=flops, bandwidth=bandwidth, utilization=utilization)
    recipe, n_train_tokens = None, None
    if target not in PRESETS:
        if not (Path(target).exists() or target.endswith((".yaml", ".yml"))):
            preset(target)  # says which preset is nearest
        recipe, n_train_tokens = _with_what_is_prepared(load_recipe(target, overrides or []))
    place = _planned_device(device, memory_gib, flops, bandwidth, recipe)
    if recipe is None:
        recipe, layout = plan_preset(target, overrides or [], place, world_size, tensor_parallel, sharding)
    else:
        layout = choose_layout(recipe, place, world_size, tensor_parallel, sharding)
    sheet = plan_recipe(recipe, n_train_tokens, device=place, layout=layout, utilization=utilization)
    if (trace or measure) and layout.world_size > 1:
        raise UserError("--trace and --measure follow one device's step: leave --world-size out.")
    if trace:
        from gptworks.train.trace import trace_step

        traced = trace_step(recipe.model, sheet.one_step, place.kind, sheet.setting.precision)
        sheet = replace(sheet, traced_bytes=traced.peak_bytes)
    if measure:
        from gptworks.device import choose_device
        from gptworks.train.measure import measure_step

        here = choose_device(place.kind)
        sheet = replace(sheet, measured=measure_step(recipe.model, sheet.one_step, here.type, sheet.setting.precision))
    if as_json:
        _print_json(sheet.to_json())
    else:
        _console().print(sheet)


def _planned_device(
    name: str | None, memory_gib: float | None, flops: float | None, bandwidth: float | None, recipe: "Recipe | None"
) -> "PlannedDevice":
    """The device that the options describe; this machine's CPU, unmeasured, where they are silent."""
    from gptworks.plan.devices import custom_device, find_device, this_cpu

    if memory_gib is not None:
        if name is not None:
            raise UserError(f"--device {name} and --memory-gib {memory_gib:g} both describe the device: give one.")
        return custom_device(memory_gib, flops, bandwidth)
    if flops is not None or bandwidth is not None:
        raise UserError("--flops or --bandwidth without --memory-gib: give the device's memory too, or its name.")
    if name is None:
        return this_cpu()
    if name != "this":
        return find_device(name)
    from gptworks.device import choose_device, measured_device

    return measured_device(choose_device(recipe.train.device if recipe is not None else "auto"))


@app.command()
def schema() -> None:
    """Print the JSON schema of recipe files, for editors."""
    from gptworks.recipe import recipe_schema

    _print_json(recipe_schema())


def _architecture(target: str, overrides: list[str]) -> tuple["ModelConfig", str]:
    """The model that a preset's name, a recipe file or a run folder stands for."""
    from gptworks.presets import PRESETS
    from gptworks.recipe import apply_overrides, load_recipe, parse_model

    if target in PRESETS:
        tree = apply_overrides({"model": {"preset": target}}, overrides)
        return parse_model(tree["model"], target), target
    if Path(target).exists() or target.endswith((".yaml", ".yml")):
        recipe, _ = _with_what_is_prepared(load_recipe(target, overrides))
        return recipe.model, recipe.name
    return parse_model({"preset": target}), target  # says which preset is nearest


def _with_what_is_prepared(recipe: "Recipe") -> tuple["Recipe", int | None]:
    """The recipe with the vocabulary of its prepared data, and the number of training tokens, where there is data."""
    from gptworks.data.prepare import find_prepared
    from gptworks.recipe import with_vocab_size

    prepared = find_prepared(recipe)
    if prepared is None:
        return recipe, None
    manifest = prepared.manifest
    return with_vocab_size(recipe, manifest.vocab_size), manifest.splits["train"].tokens


# ------------------------------------------------------------------------------------------------- making


@app.command()
def prepare(recipe: RecipeFile, overrides: Overrides = None, as_json: AsJSON = False) -> None:
    """Turn the recipe's text into a tokenizer and token shards."""
    from gptworks.recipe import load_recipe

    prepared = _prepare(load_recipe(recipe, overrides or []))
    if as_json:
        _print_json({"folder": str(prepared.folder), "reused": prepared.reused, **prepared.manifest.model_dump()})
        return
    for split, files in prepared.manifest.splits.items():
        per_token = f", {files.text_bytes / files.tokens:.2f} bytes a token" if files.tokens else ""
        typer.echo(f"{split:<10} {files.tokens:>13,} tokens  {files.documents:>9,} documents{per_token}")


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Try also what should not fit in memory.")] = False,
) -> None:
    """Train the recipe's model; everything it leaves is in the run folder (run_dir=...).

    Started by torchrun or `gptworks launch`, several processes train it together.
    """
    from gptworks.recipe import load_recipe

    settings = load_recipe(recipe, overrides or [])
    from gptworks.device import choose_device, choose_precision
    from gptworks.train.loop import check_train
    from gptworks.train.loop import train as train_model
    from gptworks.train.parallel import run_layout
    from gptworks.train.preflight import check_memory
    from gptworks.train.ranks import join

    device = choose_device(settings.train.device)
    precision = choose_precision(settings.train.precision, device)  # refused before preparing
    with join(settings.train.parallel.timeout_seconds, device) as ranks:

        def check_and_prepare() -> None:
            check_train(settings, resume, ranks.size)
            layout = run_layout(settings, ranks, device, precision)
            check_memory(settings, device, precision, force, layout, ranks.local_size)
            _prepare(settings)

        ranks.first(check_and_prepare)
        train_model(settings, resume=resume, force=force, ranks=ranks)


@app.command()
def launch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes; one for each GPU.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Try also what should not fit in memory.")] = False,
) -> None:
    """Train the recipe's model in several processes of this machine, as train.parallel says."""
    from gptworks.recipe import load_recipe
    from gptworks.train.launch import launch as start
    from gptworks.train.loop import check_train

    check_train(load_recipe(recipe, overrides or []), resume, nproc)
    options = [name for name, given in (("--resume", resume), ("--force", force)) if given]
    sys.exit(start(nproc, ["train", str(recipe), *(overrides or []), *options]))


def _prepare(recipe: "Recipe") -> "Prepared":
    """Prepare with a progress bar that shows MB/s."""
    from rich.progress import BarColumn, Progress, TextColumn, TransferSpeedColumn

    from gptworks.data.prepare import prepare as prepare_data

    names = {"waiting": "waiting for another prepare", "tokenizer": "training the tokenizer", "shards": "encoding"}
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TransferSpeedColumn())
    console = _console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done_bytes: int, total_bytes: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(names.get(stage, stage), total=total_bytes)
            progress.update(tasks[stage], completed=done_bytes, total=total_bytes)

        prepared = prepare_data(recipe, report=report)
    tokens = prepared.manifest.splits["train"].tokens
    said = "nothing has changed, using" if prepared.reused else "prepared"
    typer.echo(f"{said} {prepared.folder}: {tokens:,} training tokens", err=True)
    return prepared


# ------------------------------------------------------------------------------------------------- using


@app.command()
def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    checkpoint: WhichCheckpoint = "best",
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows; below the context, each sees more.")
    ] = None,
    by_position: Annotated[bool, typer.Option("--by-position", help="Also in each eighth of the context.")] = False,
    compressors: Annotated[bool, typer.Option("--compressors", help="Beside gzip and xz on the same text.")] = False,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16. Default: the run's own.")] = None,
    device: Device = "auto",
    as_json: AsJSON = False,
) -> None:
    """Measure loss, perplexity and bits per byte over the whole validation split.

    KEY=VALUE settings win over the run's: model.context_length=1024 model.rope_scaling.type=yarn, for example.
    """
    import torch

    from gptworks.checkpoint import load_run
    from gptworks.data.batches import evaluation_windows
    from gptworks.data.prepare import held_out_text
    from gptworks.data.shards import TokenShards
    from gptworks.device import choose_device, choose_precision
    from gptworks.evaluate.loss import compressor_bits_per_byte, evaluate_by_position, evaluate_loss
    from gptworks.tokenizer import token_bytes

    place = choose_device(device)
    loaded = load_run(run, checkpoint, overrides=overrides or [], device=place, report=_notice)
    autocast = choose_precision(precision or loaded.recipe.train.precision, place)
    prepared = _prepare(loaded.recipe)
    shards = TokenShards(prepared.folder, "validation")
    windows = evaluation_windows(shards, loaded.recipe.model.context_length, stride=stride)
    text_bytes = shards.text_bytes if prepared.manifest.round_trips else None
    report = evaluate_loss(loaded.model, windows, text_bytes=text_bytes, autocast=autocast.autocast)
    result: dict[str, Any] = {
        "loss": report.loss,
        "perplexity": report.perplexity,
        "bits_per_byte": report.bits_per_byte,
        "tokens": report.n_tokens,
        "text_bytes": text_bytes,
        "precision": autocast.name,
        "step": loaded.checkpoint.step,
    }
    if by_position:
        windows = evaluation_windows(shards, loaded.recipe.model.context_length)
        sizes = token_bytes(prepared.tokenizer) if prepared.manifest.round_trips else None
        parts = evaluate_by_position(
            loaded.model,
            windows,
            token_bytes=None if sizes is None else torch.tensor(sizes),
            autocast=autocast.autocast,
        )
        result["positions"] = [
            {"first": p.first, "last": p.last, "loss": p.report.loss, "bits_per_byte": p.report.bits_per_byte}
            for p in parts
        ]
    if compressors:
        result["compressors"] = compressor_bits_per_byte(b"".join(held_out_text(prepared)))
    if as_json:
        _print_json(result)
        return
    typer.echo(
        f"validation loss  {report.loss:.4f} nats per token, {report.n_tokens:,} tokens, step {result['step']:,}"
    )
    typer.echo(f"perplexity       {report.perplexity:.3f}")
    if report.bits_per_byte is None:
        typer.echo("bits per byte    undefined: this tokenizer does not keep the whole text")
    else:
        typer.echo(f"bits per byte    {report.bits_per_byte:.4f} over {text_bytes:,} bytes")
    for part in result.get("positions", []):
        bits = part["bits_per_byte"]
        note = "" if bits is None else f"  {bits:.4f} bits per byte"
        typer.echo(f"tokens {part['first']:>6,} to {part['last']:>6,}  {part['loss']:.4f} nats per token{note}")
    for name, bits in result.get("compressors", {}).items():
        typer.echo(f"{name:<16} {bits:.4f}")


@app.command()
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")] = "",
    overrides: Overrides = None,
    max_tokens: MaxTokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    min_tokens: Annotated[int, typer.Option(help="Do not end a text before so many tokens.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="The end-of-text token ends nothing.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: each token's log-probability, and so many alternatives.")
    ] = None,
    beams: Annotated[int, typer.Option(help="Beam search: the most probable text that so many beams find.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Beam search: above 0 favours longer texts.")] = 1.0,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JSON that this schema allows.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Write a text that matches this regular expression.")] = None,
    samples: Annotated[int, typer.Option(help="How many continuations.")] = 1,
    slide: Slide = False,
    input_file: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="Continue each prompt of a .jsonl file.")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to; what it holds already is not redone.")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Texts generated at once. Default: up to 32.")] = None,
    guess: Annotated[int, typer.Option(min=0, help="Guess so many tokens at a time; the text stays the same.")] = 0,
    draft: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="With --guess: a smaller model that guesses. Default: repetition."),
    ] = None,
    backend: Backend = "auto",
    checkpoint: WhichCheckpoint = "best",
    device: Device = "auto",
    as_json: AsJSON = False,
) -> None:
    """Continue a prompt, the text streaming as it comes; or every prompt of a file."""
    from gptworks.infer.sampling import SamplingSettings

    schema = None if json_schema is None else json_schema.read_text(encoding="utf-8")
    settings = SamplingSettings(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, seed=seed, max_tokens=max_tokens,
        stop=tuple(stop or ()), min_tokens=min_tokens, ignore_eos=ignore_eos, logprobs=logprobs, num_beams=beams,
        length_penalty=length_penalty, json_schema=schema, regex=regex,
    )  # fmt: skip
    if draft is not None and not guess:
        raise UserError("--draft without --guess: say how many tokens it guesses at a time, such as --guess 4.")
    if (input_file is None) != (output_file is None) or (input_file is not None and prompt):
        raise UserError("--input and --output belong together, without a prompt beside them.")
    drafter = _drafter(guess, draft, device, backend)
    engine = _engine(run, checkpoint, device, overrides, n_slots=slots, drafter=drafter, backend=backend)
    overflow: Any = "slide" if slide else "error"
    if input_file is not None and output_file is not None:
        _generate_file(engine, input_file, output_file, settings, n_samples=samples, overflow=overflow)
        return
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if as_json or samples > 1:
        completions = engine.complete(prompt, settings, n_samples=samples, overflow=overflow)
        if as_json:
            _print_json({"prompt": prompt, "completions": [_completion_json(one) for one in completions]})
            return
        for i, completion in enumerate(completions):
            typer.echo(f"--- {i + 1} of {samples}\n{prompt}{completion.text}")
        return
    reason = None
    pieces = engine.pieces(prompt, settings, overflow=overflow)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        reason = piece.finish_reason
    sys.stdout.write("\n")
    if reason == "context":
        _notice("stopped: the context is full. With --slide it goes on from the context's last half.")
    if (rate := engine.statistics().acceptance_rate) is not None:
        _notice(f"{rate:.0%} of the guessed tokens were right.")


def _completion_json(completion: "Completion") -> dict[str, Any]:
    tree = asdict(completion)
    if completion.logprobs is None:
        del tree["logprobs"]
    return tree


def _drafter(guess: int, draft: Path | None, device: str, backend: str) -> "Drafter | None":
    """What guesses tokens ahead, where that is asked for."""
    from gptworks.infer.engine import load
    from gptworks.infer.speculate import DraftModel, PromptLookup

    if not guess:
        return None
    if draft is None:
        return PromptLookup(guess)
    name: Any = backend
    return DraftModel(load(draft, device=device, report=_notice).model, guess, backend=name)


def _generate_file(engine: "Engine", source: Path, target: Path, settings: "SamplingSettings", **options: Any) -> None:
    """Continue a file of prompts with a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from gptworks.infer.batch import BatchReport, generate_file

    columns = (TextColumn("prompts"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    console = _console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("")

        def show(report: BatchReport) -> None:
            progress.update(bar, total=report.total, completed=report.skipped + report.done + report.failed)

        report = generate_file(engine, source, target, settings, report=show, **options)
    skipped = f", {report.skipped} were there already" if report.skipped else ""
    _notice(f"{target}: {report.done} of {report.total} prompts continued{skipped}.")
    for error in report.errors:
        _notice(f"error: {error}")
    if report.failed:
        raise RunError(f"{report.failed} of {report.total} prompts could not be continued; their lines say why.")


@app.command()
def chat(
    run: RunFolder,
    max_tokens: MaxTokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    backend: Backend = "auto",
    checkpoint: WhichCheckpoint = "best",
    device: Device = "auto",
) -> None:
    """Talk with a model. A base model has no turns: it continues the growing text."""
    from gptworks.infer.chat import ChatSession

    session = ChatSession(
        _engine(run, checkpoint, device, backend=backend, reuse="all"), temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty, seed=seed, max_tokens=max_tokens, stop=tuple(stop or ()),
    )  # fmt: skip
    _notice(
        "This is a base model: it continues what you write. /reset forgets the text, /quit ends. Ctrl-C stops a reply."
    )
    forgotten_said = False
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if text.strip() in ("/quit", "/exit"):
            return
        if text.strip() == "/reset":
            session.reset()
            forgotten_said = False
            continue
        try:
            for part in session.send(text):
                sys.stdout.write(part)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        except UserError as error:
            _notice(f"error: {error}")
        typer.echo()
        if session.n_forgotten_tokens and not forgotten_said:
            _notice("(The context is full: the oldest text falls out as the conversation grows.)")
            forgotten_said = True


def _engine(run: Path, checkpoint: str, device: str, overrides: list[str] | None = None, **options: Any) -> "Engine":
    from gptworks.infer.engine import load

    if options.get("backend", "auto") not in ("auto", "torch", "native"):
        raise UserError(f"--backend {options['backend']}: it must be auto, torch or native.")
    return load(run, checkpoint, overrides=overrides or [], device=device, report=_notice, **options)


# --------------------------------------------------------------------------------------- seeing, comparing


@app.command()
def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: RUN/report.html.")] = None,
) -> None:
    """Write a run as a page: curves, evaluations, samples, architecture. It may be going on, or have crashed."""
    from gptworks.runs.history import read_history
    from gptworks.runs.report import write_report

    path = out or run / "report.html"
    write_report(read_history(run), path)
    typer.echo(f"wrote {path}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    against: Annotated[
        Path | None, typer.Option("--against", metavar="BAND", help="Hold the runs against this band's file.")
    ] = None,
    make_band: Annotated[
        Path | None, typer.Option("--make-band", metavar="FILE", help="Make a band of the runs, each of another seed.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a page with the curves.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Set runs side by side, and tell differences from noise; or hold a run against the band of its recipe."""
    from gptworks.runs import bands
    from gptworks.runs.compare import compare as compare_runs
    from gptworks.runs.compare import write_comparison
    from gptworks.runs.history import read_history

    histories = [read_history(run) for run in runs]
    if make_band is not None:
        band = bands.make_band(histories)
        bands.write_band(band, make_band)
        typer.echo(f"wrote {make_band}: {len(band.points)} evaluations of {band.name}, {len(band.seeds)} seeds")
        return
    given = None if against is None else bands.read_band(against)
    comparison = compare_runs(histories, [given or bands.find_band(history) for history in histories])
    if out is not None:
        write_comparison(comparison, out)
        _notice(f"wrote {out}")
    if as_json:
        _print_json(comparison.to_json())
    elif out is None:
        _console().print(comparison)


@app.command()
def sweep(
    recipe: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in the folder, if there is one.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Search for better settings: many trials of a recipe, by its `sweep` section."""
    from gptworks.runs.sweep import load_sweep, run_sweep

    _prepare(load_sweep(recipe, overrides or [], resume))
    done = run_sweep(recipe, overrides or [], resume=resume, report=_notice)
    if as_json:
        _print_json(done.to_json())
    else:
        from gptworks.runs.sweep_page import sweep_table

        _console().print(sweep_table(done))
    folder, ended = done.recipe.run_dir, len(done.trials) - done.count("running")
    if done.best is not None:
        _notice(f"the best settings are in {folder / 'best.yaml'}, figures in {folder / 'sweep.html'}")
    if ended < done.settings.n_trials:
        _notice(f"stopped after {ended} of {done.settings.n_trials} trials. Go on with --resume.")


# ------------------------------------------------------------------------------------------ other programs


EXPORT_FORMATS = {
    "hf": ("--dtype", ("fp32", "bf16", "fp16")),
    "gguf": ("--type", ("f16", "f32", "bf16", "q8_0", "q4_0")),
}
"""Each format's option for how numbers are kept, and its choices, the default first."""


@app.command("export")
def export_run(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="hf: a new folder. gguf: a new file.")],
    form: Annotated[str, typer.Option("--format", help="hf (Hugging Face transformers) or gguf (llama.cpp).")] = "hf",
    dtype: Annotated[str | None, typer.Option(help="hf: fp32, bf16 or fp16. Default: fp32.")] = None,
    kind: Annotated[
        str | None, typer.Option("--type", help="gguf: f32, f16, bf16, q8_0 or q4_0. Default: f16.")
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="hf: compare with the run in transformers, and keep only what is equal.")
    ] = True,
    tokenizer: Annotated[
        bool, typer.Option(help="gguf: write the tokenizer too. Without, the file knows token ids alone.")
    ] = True,
    checkpoint: WhichCheckpoint = "best",
    as_json: AsJSON = False,
) -> None:
    """Write the model for other programs: a Hugging Face folder, or a GGUF file."""
    if form not in EXPORT_FORMATS:
        raise UserError(f"--format={form}: it must be one of {', '.join(EXPORT_FORMATS)}.")
    option, known = EXPORT_FORMATS[form]
    given = {"--dtype": dtype, "--type": kind}
    chosen = given.pop(option) or known[0]
    if chosen not in known:
        raise UserError(f"{option}={chosen}: it must be one of {', '.join(known)}.")
    for other, value in given.items():
        if value is not None:
            raise UserError(f"{other}={value} with --format={form}: that format has {option}.")
    if form == "hf" and not tokenizer:
        raise UserError("--no-tokenizer with --format=hf: such a folder always has its tokenizer; drop the option.")
    if form == "gguf":
        from gptworks.interop.gguf import export_gguf

        quantization: Any = chosen
        file = export_gguf(
            run, out, quantization=quantization, tokenizer=tokenizer, checkpoint=checkpoint, report=_notice
        )
        if as_json:
            _print_json(asdict(file))
            return
        typer.echo(
            f"wrote {out}: {file.architecture} of llama.cpp, {file.quantization}, {file.bytes:,} bytes, "
            f"tokenizer {file.tokenizer or 'none'}"
        )
        for note in file.notes:
            typer.echo(f"note: {note}")
        return
    from gptworks.interop.huggingface import export_huggingface

    precision: Any = chosen
    export = export_huggingface(run, out, checkpoint=checkpoint, precision=precision, verify=verify, report=_notice)
    if as_json:
        _print_json(asdict(export))
        return
    typer.echo(f"wrote {out}: {export.architecture}, {export.parameters:,} parameters, {export.precision}")
    if (found := export.verification) is not None:
        typer.echo(
            f"equal in transformers {found.transformers_version}: logits of {found.tokens:,} tokens within "
            f"{found.logit_difference:.2e}, {found.greedy_tokens} greedy tokens, token ids of {found.texts} texts"
        )
    for note in export.notes:
        typer.echo(f"note: {note}")


@app.command()
def quantize(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The run folder to make.")],
    weights: Annotated[str, typer.Option("--weights", help="bf16, fp16, int8 or int4.")],
    rounding: Annotated[
        str | None, typer.Option(help="nearest, or gptq: int4 calibrated on training text. Default for int4: gptq.")
    ] = None,
    calibrate: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="gptq: tokens of training text. Default: 32,768.")
    ] = None,
    checkpoint: WhichCheckpoint = "best",
    device: Device = "auto",
    as_json: AsJSON = False,
) -> None:
    """Write a run with smaller weights, and say what that costs on held-out text."""
    from gptworks.device import choose_device
    from gptworks.quantize.run import quantize_run

    kind: Any = weights
    way: Any = rounding
    made = quantize_run(
        run, out, kind, rounding=way, calibration_tokens=calibrate, checkpoint=checkpoint,
        device=choose_device(device), prepare=_prepare, report=_notice,
    )  # fmt: skip
    if as_json:
        _print_json(made.to_json())
    else:
        _console().print(made)
    _notice(f"wrote {out}")


@app.command("import")
def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Hugging Face folder with safetensors.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder to make, such as runs/gpt2.")],
    as_json: AsJSON = False,
) -> None:
    """Make a run folder of a Hugging Face folder."""
    from gptworks.interop.huggingface import import_huggingface

    imported = import_huggingface(folder, run, report=_notice)
    if as_json:
        _print_json({**asdict(imported), "model": imported.model.model_dump(mode="json")})
        return
    typer.echo(f"made {run} of a {imported.architecture}: {imported.parameters:,} parameters")
    for note in imported.notes:
        typer.echo(f"note: {note}")


# ------------------------------------------------------------------------------------------------ output


def _notice(text: str) -> None:
    typer.echo(text, err=True)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _console(stderr: bool = False) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=100)
