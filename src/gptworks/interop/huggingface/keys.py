"""The known keys in the JSON files of a Hugging Face folder: keys that gptworks reads, ignores, or reports in a note.
Also the reasons why gptworks cannot read some model types, by the types' exact names.

The keys of config.json that gptworks reads are in the clauses of each architecture (architectures.py).
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.json_files import read_json
from gptworks.special_tokens import GENERATION_CONFIG, ROLES, STATED_SAMPLING, TOKENIZER_CONFIG, TOKENS_MAP


@dataclass(frozen=True)
class Keys:
    """The known keys of one JSON file. Each unknown key gets a note."""

    file: str
    honoured: frozenset[str]
    """Keys that gptworks reads."""
    harmless: frozenset[str]
    """Keys without effect in gptworks."""
    noted: Mapping[str, frozenset[str]]
    """Reason → keys that get a note with this reason. A key with the value null, false, 0, [] or {} gets no note."""

    def notes(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a note for each key that is set and neither honoured nor harmless."""
        for key in sorted(values.keys() - self.honoured - self.harmless):
            if values[key] in (None, False, [], {}):
                continue
            reason = next((why for why, keys in self.noted.items() if key in keys), "gptworks does not know it")
            yield f"{self.file} has `{key}`={str(values[key])[:60]}: {reason}"


def _keys(*names: str) -> frozenset[str]:
    return frozenset(name for line in names for name in line.split())


CONFIG_HARMLESS = _keys(
    # names, paths and versions
    "architectures transformers_version name_or_path _name_or_path transformers.js_config tokenizer_class "
    "prefix finetuning_task is_llama_config unsloth_version unsloth_fixed model_name",
    # special tokens, which special_tokens.py reads or which only other kinds of model use
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id mask_token_id "
    "cls_token_id",
    # ways of computing the logits that do not change them
    "dtype torch_dtype use_cache cache_implementation attn_implementation pretraining_tp "
    "_attn_implementation_autoset _attn_implementation torchscript chunk_size_feed_forward "
    "gradient_checkpointing output_hidden_states output_attentions output_router_logits return_dict "
    "use_return_dict use_flash_attn use_bfloat16",
    # used only in training
    "router_aux_loss_coef router_jitter_noise classifier_dropout id2label label2id num_labels _num_labels "
    "problem_type task_specific_params is_decoder tf_legacy_loss loss_type",
    # sampling and length, which each request sets
    "max_length min_length do_sample num_beams temperature top_k top_p repetition_penalty length_penalty "
    "no_repeat_ngram_size num_return_sequences early_stopping num_beam_groups diversity_penalty typical_p "
    "encoder_no_repeat_ngram_size output_scores return_dict_in_generate remove_invalid_values",
)
"""Settings of any `config.json` that do not change logits. An import refuses any other setting that the architecture
neither reads nor lists as harmless: it may belong to a newer model class that computes something else."""

_MEDIA_TOKENS = _keys(
    "image_token audio_token video_token boi_token eoi_token soi_token boa_token eoa_token vision_start_token "
    "vision_end_token image_token_id"
)
"""Keys for image, audio and video tokens, which no model of gptworks reads."""

TOKENIZER_CONFIG_KEYS = Keys(
    TOKENIZER_CONFIG,
    _keys(*ROLES, "chat_template add_bos_token add_eos_token added_tokens_decoder tokenizer_class "
          "additional_special_tokens extra_special_tokens"),
    _keys(
        # names, paths and versions
        "name_or_path tokenizer_file special_tokens_map_file vocab_file merges_file files_loaded auto_map "
        "processor_class transformers_version backend is_local local_files_only _commit_hash trust_remote_code "
        "tokenizer_type model_type fast_tokenizer_files",
        # tokenizer.json already contains the effect of these
        "add_prefix_space legacy sp_model_kwargs errors trim_offsets do_lower_case strip_accents "
        "tokenize_chinese_chars keep_accents remove_space model_specific_special_tokens "
        "spaces_between_special_tokens from_slow use_fast fix_mistral_regex unk_id",
        # limits of length; in gptworks, the model's context and the request set them
        "model_max_length max_length max_len stride truncation truncation_strategy truncation_side",
        # padding, which gptworks does not do
        "padding padding_side pad_to_multiple_of pad_token_type_id pad_token_type",
        # transformers ignores this key for BPE, gptworks for every tokenizer
        "clean_up_tokenization_spaces",
        # defaults of code that gptworks does not run
        "use_default_system_prompt model_input_names verbose init_inputs return_token_type_ids "
        "chat_control_tokens response_schema response_template",
    ) | _MEDIA_TOKENS,
    {
        "special tokens in a text are read as text": _keys("split_special_tokens"),
        "decoded text is not changed": _keys(
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        ),
    },
)  # fmt: skip

TOKENS_MAP_KEYS = Keys(
    TOKENS_MAP,
    _keys(*ROLES, "additional_special_tokens extra_special_tokens"),
    _MEDIA_TOKENS,
    {},
)  # fmt: skip

GENERATION_KEYS = Keys(
    GENERATION_CONFIG,
    _keys("bos_token_id eos_token_id pad_token_id do_sample", *STATED_SAMPLING),
    _keys(
        # names and versions
        "transformers_version _from_model_config _name_or_path model_type trust_remote_code",
        # sampling settings that gptworks lacks (an export writes them again)
        "top_h typical_p epsilon_cutoff eta_cutoff no_repeat_ngram_size num_beams num_beam_groups diversity_penalty "
        "length_penalty early_stopping num_return_sequences penalty_alpha dola_layers renormalize_logits "
        "remove_invalid_values max_time",
        # length limits, which each request sets (an export writes them again)
        "max_length max_new_tokens min_length min_new_tokens max_context_size max_window_size chat_format",
        # computation and outputs of transformers' `generate`
        "use_cache cache_implementation cache_config max_cache_len compile_config disable_compile low_memory "
        "prefill_chunk_size return_dict_in_generate output_attentions output_hidden_states output_scores "
        "output_logits return_legacy_cache continuous_batching_config use_mtp is_assistant num_assistant_tokens "
        "num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit assistant_lookbehind "
        "target_lookbehind assistant_ensemble_weight prompt_lookup_num_tokens max_matching_ngram_size "
        "speculation_type",
        # for models with an encoder
        "decoder_start_token_id encoder_no_repeat_ngram_size encoder_repetition_penalty",
    ),
    {
        "gptworks does not stop there; give `stop` with a request": _keys("stop_strings"),
        "gptworks does not forbid, force or prefer tokens; give `logit_bias` with a request": _keys(
            "suppress_tokens begin_suppress_tokens bad_words_ids sequence_bias forced_bos_token_id forced_eos_token_id "
            "force_words_ids constraints exponential_decay_length_penalty"
        ),
        "gptworks does not compute it": _keys("guidance_scale watermarking_config token_healing"),
    },
)  # fmt: skip


def ignored(folder: Path) -> Iterator[str]:
    """Yield notes on keys in a folder's files, except config.json, that are set and neither honoured nor harmless."""
    for keys in (TOKENIZER_CONFIG_KEYS, TOKENS_MAP_KEYS, GENERATION_KEYS):
        if (folder / keys.file).exists():
            yield from keys.notes(read_json(folder / keys.file))


# --------------------------------------------------------------------------------------------------- model types

_KINDS = {
    "some or all of its layers have a recurrent state, not attention": (
        "mamba mamba2 falcon_mamba rwkv recurrent_gemma xlstm jamba bamba zamba zamba2 falcon_h1 granitemoehybrid "
        "nemotron_h qwen3_next"
    ),
    "it is an encoder, which predicts no next token": (
        "bert roberta albert distilbert electra deberta deberta-v2 xlm-roberta modernbert camembert mpnet ernie"
    ),
    "it has an encoder and a decoder": "t5 mt5 umt5 bart mbart pegasus marian led longt5 switch_transformers t5gemma",
    "it also reads images or sound; a folder of only its language model can be read": (
        "gemma3 gemma3n llava llava_next mllama mistral3 pixtral qwen2_vl qwen2_5_vl qwen3_vl qwen2_audio "
        "idefics2 idefics3 smolvlm paligemma llama4 phi4_multimodal whisper internvl aya_vision voxtral"
    ),
    "it has latent attention (low-rank keys and values)": "deepseek_v2 deepseek_v3 minicpm3",
    "it has positions as attention biases (ALiBi)": "bloom mpt",
    "it has attention sinks": "gpt_oss",
}
REASONS = {kind: reason for reason, names in _KINDS.items() for kind in names.split()}
_ONE_LETTER = 0.85
"""Minimum similarity, by difflib, at which an unknown name counts as a misspelled known name."""


def about(kind: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown model type: a reason, the known type that was probably meant, or "".

    Only a missing letter, or a wrong letter in a long name, counts as a typing error. A different number or an extra
    letter means another model.
    """
    if kind in REASONS:
        return f": {REASONS[kind]}"
    numbers = re.findall(r"\d+", kind)
    alike = [name for name in known if re.findall(r"\d+", name) == numbers and 0 <= len(name) - len(kind) < 2]
    meant = difflib.get_close_matches(kind, alike, n=1, cutoff=_ONE_LETTER)
    return f" (nearest: `{meant[0]}`)" if meant else ""
