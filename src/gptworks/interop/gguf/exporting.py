"""Export a run as a GGUF file: write a temporary file, tensor by tensor, then rename it."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import gguf
import numpy as np

from gptworks.chat_template import load_chat_template
from gptworks.checkpoint import Report, load_run
from gptworks.choices import GGUFType
from gptworks.errors import UserError
from gptworks.files import replacing_by_name
from gptworks.interop.gguf.architectures import APPROXIMATE_GELU, add_settings, choose_architecture, file_tensors
from gptworks.interop.gguf.vocabulary import add_sampling, add_vocabulary, read_vocabulary
from gptworks.interop.steps import leave_out_heads
from gptworks.quantize.convert import check_known
from gptworks.special_tokens import stated_of
from gptworks.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Export:
    """The result of exporting a run to a GGUF file."""

    file: Path
    architecture: str
    quantization: str
    bytes: int
    step: int
    tokenizer: str | None
    """llama.cpp's name for the tokenizer; None if the file has no tokenizer."""
    notes: tuple[str, ...]
    """Differences between this file in llama.cpp and the run."""


def export_gguf(
    run: str | Path,
    out: str | Path,
    *,
    quantization: GGUFType = "f16",
    tokenizer: bool = True,
    checkpoint: str = "best",
    report: Report = lambda _: None,
) -> Export:
    """Write a run's model as a file that llama.cpp loads.

    Args:
        quantization: format of the matrices. q8_0 has 8.5 bits per weight. q4_0 has 4.5, with embedding and head in
            q8_0. With both, a matrix whose row length is not a multiple of 32 is stored in f16. Norms, biases,
            position embeddings and routers are always stored in f32.
        tokenizer: also write the tokenizer. Without a tokenizer, the file works only with token ids.

    Raises:
        UserError: the run does not exist or is quantized; `out` exists; llama.cpp lacks the run's architecture or
            tokenizer.
        RunError: the disk is full or fails. No partial file is left.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists: choose another path, or delete it.")
    check_known(quantization, get_args(GGUFType), "quantization")
    loaded = load_run(run, checkpoint, full=True, report=report)
    notes = leave_out_heads(loaded.model)
    config, weights = loaded.model.config, loaded.model.state_dict()
    architecture = choose_architecture(config)
    vocabulary = template = stated = None
    if tokenizer:
        words = load_tokenizer(loaded.tokenizer_folder)
        template = load_chat_template(loaded.tokenizer_folder, words)
        stated = stated_of(words)
        vocabulary = read_vocabulary(words, config.vocab_size, None if template is None else template.written_end())
    notes += [APPROXIMATE_GELU] if config.mlp == "gelu" else []
    notes += vocabulary.notes if vocabulary is not None else ()

    with replacing_by_name(out) as aside, closing(gguf.GGUFWriter(aside, architecture.name)) as writer:
        writer.add_type("model")
        writer.add_name(loaded.recipe.name)
        how_much = "ALL" if quantization == "f32" else "MOSTLY"
        writer.add_file_type(gguf.LlamaFileType[f"{how_much}_{quantization.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_settings(writer, architecture, config)
        add_vocabulary(writer, vocabulary)
        if template is not None:
            writer.add_chat_template(template.source)
        add_sampling(writer, stated)
        kinds = {}
        for name, tensor in file_tensors(architecture, config, {name: x.to("meta") for name, x in weights.items()}):
            kinds[name] = kind = stored_as(name, tuple(tensor.shape), quantization)
            block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            n_bytes = tensor.numel() // block_weights * block_bytes
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in file_tensors(architecture, config, weights):
            writer.write_tensor_data(gguf.quantize(tensor.float().contiguous().numpy(), kinds[name]))
    words_there = (vocabulary.pattern or vocabulary.model) if vocabulary else None
    step, n_bytes = loaded.checkpoint.step, out.stat().st_size
    return Export(out, architecture.name, quantization, n_bytes, step, words_there, tuple(notes))


def stored_as(name: str, shape: tuple[int, ...], quantization: GGUFType) -> gguf.GGMLQuantizationType:
    """Return a tensor's format in the file: llama.cpp's choice, except that q4_0 has embedding and head in q8_0."""
    if len(shape) == 1 or name == "position_embd.weight" or name.endswith("ffn_gate_inp.weight"):
        return gguf.GGMLQuantizationType.F32
    if quantization == "q4_0" and name in ("token_embd.weight", "output.weight"):
        quantization = "q8_0"
    kind = gguf.GGMLQuantizationType[quantization.upper()]
    block_weights, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if shape[-1] % block_weights == 0 else gguf.GGMLQuantizationType.F16
