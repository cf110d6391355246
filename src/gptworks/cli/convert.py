"""Commands to and from other formats: export, quantize, import."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gptworks.choices import ExportFormat, ExportPrecision, GGUFType, HeadWeights, HTMLWeights, Rounding, Weights
from gptworks.cli import options
from gptworks.cli.printing import notice, prepare_with_progress, show, show_lines, working
from gptworks.errors import UserError, refuse_unused


def export(
    run: options.RunFolder,
    out: Annotated[Path, Argument(metavar="OUT", help="hf: a new folder. gguf, html: a new file.")],
    form: Annotated[ExportFormat, Option("--format", help="hf: transformers. gguf: llama.cpp. html: a page.")] = "hf",
    dtype: Annotated[ExportPrecision | None, Option(help="hf: format of the weights. Default: fp32.")] = None,
    kind: Annotated[GGUFType | None, Option("--type", help="gguf: format of the matrices. Default: f16.")] = None,
    weights: Annotated[
        HTMLWeights | None, Option(help="html: format of the matrices. Default: int8, or a quantized run's.")
    ] = None,
    split: Annotated[bool, Option("--split", help="html: a folder for a web host, in files below 25 MB.")] = False,
    verify: Annotated[bool, Option(help="hf, html: compare the export with the run; keep it if equal.")] = True,
    tokenizer: Annotated[bool, Option(help="gguf: write the tokenizer too; else the file takes token ids.")] = True,
    adapter: Annotated[bool, Option("--adapter", help="hf: keep the LoRA adapter apart, for PEFT.")] = False,
    base: Annotated[str | None, Option(metavar="FOLDER", help="With --adapter: the base's folder.")] = None,
    push: Annotated[str | None, Option(metavar="ORG/NAME", help="hf: upload it to the hub; needs HF_TOKEN.")] = None,
    checkpoint: options.WhichCheckpoint = "best",
    as_json: options.AsJSON = False,
) -> None:
    """Export a run: a Hugging Face folder, a GGUF or HTML file.

    An adapter is merged into the weights, or, with --adapter, exported by itself.
    """
    if form != "gguf":
        refuse_unused(f"is for --format gguf; {form} has --{'dtype' if form == 'hf' else 'weights'}", type=kind)
        refuse_unused(f"is for --format gguf, since {form} always has its tokenizer", no_tokenizer=not tokenizer)
    else:
        refuse_unused("does nothing with --format gguf, which is not verified", no_verify=not verify)
    if form != "hf":
        refuse_unused(f"is for --format hf; {form} has --{'type' if form == 'gguf' else 'weights'}", dtype=dtype)
    if form != "html":
        refuse_unused("is for --format html", weights=weights, split=split)
    if adapter and (form != "hf" or dtype is not None):
        raise UserError("--adapter is for --format=hf, in fp32: leave the other option out.")
    if base is not None and not adapter:
        raise UserError(f"--base {base} without --adapter: it says what an adapter belongs to.")
    if push is not None:
        from gptworks.interop.hub import check_push

        if form != "hf" or adapter or not verify:
            raise UserError(
                f"--push {push} is for --format=hf, for a complete and verified model: leave the other option out."
            )
        check_push(push)
    if adapter:
        _export_adapter(run, out, base, checkpoint, verify, as_json)
        return
    if form == "html":
        _export_html(run, out, weights, checkpoint, verify, split, as_json)
        return
    if form == "gguf":
        from gptworks.interop.gguf import export_gguf

        with working(f"exporting {run}"):
            file = export_gguf(
                run, out, quantization=kind or "f16", tokenizer=tokenizer, checkpoint=checkpoint, report=notice
            )
        show_lines(
            file, as_json, f"wrote {out}: {file.architecture} of llama.cpp, {file.quantization}, "
            f"{file.bytes:,} bytes, tokenizer {file.tokenizer or 'none'}", *_notes(file.notes),
        )  # fmt: skip
        return
    from gptworks.interop.huggingface import export_huggingface

    with working(f"exporting {run}"):
        export = export_huggingface(
            run, out, checkpoint=checkpoint, precision=dtype or "fp32", verify=verify, report=notice
        )
    lines = [f"wrote {out}: {export.architecture}, {export.parameters:,} parameters, {export.precision}"]
    if (found := export.verification) is not None:
        lines.append(
            f"equal in transformers {found.transformers_version}: logits of {found.tokens:,} tokens within "
            f"{found.logit_difference:.2e}, {found.greedy_tokens} greedy tokens, token ids of {found.texts} texts"
        )
    tree = dict(vars(export))
    if push is not None:
        from gptworks.interop.hub import push_folder

        tree["pushed"] = push_folder(out, push, report=notice)
        lines.append(f"pushed: {tree['pushed']}")
    show_lines(tree, as_json, *lines, *_notes(export.notes))


def _notes(notes: Iterable[str]) -> list[str]:
    return [f"note: {note}" for note in notes]


def _equal(library: str, difference: float | None) -> list[str]:
    return [] if difference is None else [f"equal in {library}: logits within {difference:.2e}"]


def _export_html(
    run: Path, out: Path, weights: HTMLWeights | None, checkpoint: str, verify: bool, split: bool, as_json: bool
) -> None:
    from gptworks.interop.html_file import export_html

    with working(f"exporting {run}"):
        made = export_html(run, out, weights=weights, checkpoint=checkpoint, verify=verify, split=split, report=notice)
    then = f"serve it: python -m http.server -d {shlex.quote(str(out))}" if split else "open it in a browser"
    lines = [f"wrote {out}: {made.parameters:,} parameters, {made.weights}, {made.bytes:,} bytes; {then}"]
    if (found := made.check) is None:
        lines.append(f"unchecked: {made.unchecked}")
    else:
        lines.append(
            f"equal in {found.program}: logits (to {found.logit_difference:.1e} of the largest), the loss of "
            f"{found.loss:.4f} (to {found.loss_difference:.1e}), {found.greedy_tokens} greedy tokens, token ids of "
            f"{found.texts} texts" + (f", {found.chats} conversations" if found.chats else "")
        )
        if found.no_browser:
            lines.append(f"the page itself is unchecked: {found.no_browser}")
        if found.tokens_per_second is not None:
            lines.append(f"writes {found.tokens_per_second:,.0f} tokens a second in {found.program} here")
    tree = dict(vars(made)) | {"check": found and vars(found)}
    show_lines(tree, as_json, *lines, *_notes(made.notes))


def _export_adapter(run: Path, out: Path, base: str | None, checkpoint: str, verify: bool, as_json: bool) -> None:
    from gptworks.interop.peft import export_adapter

    with working(f"exporting {run}"):
        made = export_adapter(run, out, base=base, checkpoint=checkpoint, verify=verify, report=notice)
    what = f"wrote {out}: LoRA on {made.modules} modules, {made.parameters:,} parameters, for {made.base}"
    show_lines(made, as_json, what, *_equal("peft", made.logit_difference))


def quantize(
    run: options.RunFolder,
    out: Annotated[Path, Argument(metavar="OUT", help="The run folder to make.")],
    weights: Annotated[Weights, Option(help="Format of the matrices.")],
    rounding: Annotated[
        Rounding | None, Option(help="nearest, or gptq: calibrated on training text. Default: gptq for int4.")
    ] = None,
    head: Annotated[HeadWeights, Option(help="With --weights int4: format of the head; int4 is less exact.")] = "int8",
    calibrate: Annotated[
        int | None, Option(metavar="TOKENS", help="gptq: training tokens to read. Default: 32,768.")
    ] = None,
    text: options.Texts = None,
    checkpoint: options.WhichCheckpoint = "best",
    device: options.Device = "auto",
    as_json: options.AsJSON = False,
) -> None:
    """Write a quantized copy of a run.

    Prints how the copy's predictions on held-out text differ from the run's.
    """
    from gptworks.device import choose_device
    from gptworks.runs.quantized import quantize_run

    with working(f"quantizing {run}") as show_progress:
        made = quantize_run(
            run, out, weights, rounding=rounding, head=head, calibration_tokens=calibrate, texts=text or (),
            checkpoint=checkpoint, device=choose_device(device), prepare=prepare_with_progress, report=notice,
            progress=show_progress,
        )  # fmt: skip
    show(made, as_json)
    notice(f"wrote {out}")


def import_(
    place: Annotated[str, Argument(metavar="MODEL", help="A Hugging Face or PEFT folder, or ORG/NAME[@revision].")],
    run: Annotated[Path, Argument(metavar="RUN", help="The run folder to make, such as runs/gpt2.")],
    base: Annotated[Path | None, Option(metavar="FOLDER", help="For an adapter: its base, a run or folder.")] = None,
    verify: Annotated[bool, Option(help="Compare with transformers or peft if installed.")] = True,
    as_json: options.AsJSON = False,
) -> None:
    """Make a run from a Hugging Face model or a PEFT adapter.

    An adapter also needs --base.
    """
    from gptworks.files import check_free
    from gptworks.interop.hub import find_model

    check_free(run)
    found = find_model(place, report=notice)
    folder = found.folder
    is_adapter = (folder / "adapter_config.json").exists()
    if is_adapter != (base is not None):
        raise UserError(
            f"{place} is {'an adapter: name its base with --base' if is_adapter else 'not an adapter: drop --base'}."
        )
    if base is not None:
        from gptworks.interop.peft import import_adapter

        with working(f"importing {folder}"):
            made = import_adapter(folder, run, base, verify=verify, report=notice)
        what = f"made {run}: LoRA of rank {made.adapter.rank}, {made.parameters:,} parameters, on {base}"
        show_lines(made, as_json, what, *_equal("peft", made.logit_difference))
        return
    from gptworks.interop.huggingface import import_huggingface

    with working(f"importing {place}"):
        imported = import_huggingface(folder, run, source=found.source, verify=verify, report=notice)
    of = f", {found.source}" if found.source else ""
    what = f"made {run} of a {imported.architecture}: {imported.parameters:,} parameters{of}"
    show_lines(imported, as_json, what, *_equal("transformers", imported.logit_difference), *_notes(imported.notes))
