"""Everything that a folder's files specify about tokens and templates is followed, or named in a note or a refusal."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers as t
from tokenizers import Tokenizer, processors

import layouts
from gptworks.chat_template import find_chat_template, load_chat_template, read_templates
from gptworks.checkpoint import load_run
from gptworks.choices import SAMPLING
from gptworks.config import FileTokenizer
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.errors import RunError, UserError
from gptworks.infer.defaults import stated_sampling
from gptworks.infer.engine import load
from gptworks.infer.sampling import SamplingSettings
from gptworks.interop.huggingface import export_huggingface, import_huggingface
from gptworks.interop.huggingface.importing import Import
from gptworks.interop.huggingface.keys import (
    GENERATION_KEYS,
    TOKENIZER_CONFIG_KEYS,
    TOKENS_MAP_KEYS,
    Keys,
)
from gptworks.interop.huggingface.verify import quiet
from gptworks.recipe import parse_recipe
from gptworks.special_tokens import by_name, special_tokens, stated_of
from gptworks.tokenizer import (
    document_frame,
    load_tokenizer,
    pack_tokenizer,
    prompt_ids,
    save_tokenizer,
    train_tokenizer,
    unpack_tokenizer,
)
from tiny import recipe_tree

LAYOUT = layouts.LAYOUTS["llama-3-instruct"]
BEGIN, END, PAD, EOT = (
    LAYOUT.tokenizer.token_to_id(f"<|{name}|>")
    for name in ("begin_of_text", "end_of_text", "finetune_right_pad_id", "eot_id")
)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layout") / "theirs"
    layouts.write(folder, LAYOUT)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "theirs"))


def change(folder: Path, file: str, **values: Any) -> None:
    """Set keys of a JSON file, or remove them (`...`)."""
    path = folder / file
    tree = (json.loads(path.read_text()) if path.exists() else {}) | values
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))


def imported(folder: Path) -> tuple[Import, Tokenizer]:
    """Import a folder without transformers; return the import and the run's tokenizer."""
    run = folder.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    found = import_huggingface(folder, run, verify=False)
    return found, load_tokenizer(run / "tokenizer")


# ------------------------------------------------------------------------------------------ which file says what


@pytest.mark.parametrize("value", [10**400, 1e300, 2**31, -1], ids=["10^400", "1e300", "2^31", "-1"])
def test_a_stated_number_that_no_sampler_takes_is_left_out(value: float) -> None:
    given = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), value)
    stated, notes = stated_sampling(given)
    assert stated == {} and [note.split("has ")[1].split("=")[0] for note in notes] == list(given)


def test_generation_config_wins_over_config_and_the_tokenizers_eos_ends_documents(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=BEGIN)
    change(folder, "generation_config.json", eos_token_id=[END, PAD])
    found, tokenizer = imported(folder)
    special = special_tokens(tokenizer)
    assert (special.ends, special.eos, special.end) == ((END, PAD), EOT, END)
    assert document_frame(tokenizer) == ([BEGIN], [EOT])
    assert any("generation ends at `<|end_of_text|>` or `<|finetune" in note and "<|eot_id|>" in note
               for note in found.notes)  # fmt: skip
    assert t.GenerationConfig.from_pretrained(folder).eos_token_id == [END, PAD]


def test_config_counts_without_a_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change(folder, "config.json", eos_token_id=[END, EOT])
    assert special_tokens(imported(folder)[1]).ends == (END, EOT)
    change(folder, "config.json", eos_token_id=None)
    assert special_tokens(imported(folder)[1]).ends == (EOT,), "the tokenizer's, where no id is stated"


def test_the_tokens_map_has_precedence_if_tokenizer_config_lists_no_added_tokens(folder: Path) -> None:
    """As in transformers 5, which then reads the map."""
    for decoder in (..., {str(EOT): {"content": "<|eot_id|>", "special": True}}):
        change(folder, "special_tokens_map.json", eos_token="<|end_of_text|>")
        change(folder, "tokenizer_config.json", eos_token="<|eot_id|>", added_tokens_decoder=decoder)
        theirs = t.AutoTokenizer.from_pretrained(folder).eos_token_id
        assert special_tokens(imported(folder)[1]).eos == theirs == (END if decoder is ... else EOT)


def test_a_token_without_a_role_is_special_too_and_one_that_is_not_there_is_named(folder: Path) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] != "<|python_tag|>"]
    names = dict(tree["model"]["vocab"]) | {"<|python_tag|>": max(token["id"] for token in tree["added_tokens"]) + 1}
    tree["model"]["vocab"] = names  # it is a token of the plain vocabulary now
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    change(folder, "tokenizer_config.json", additional_special_tokens=["<|python_tag|>", "<|nowhere|>"])
    found, tokenizer = imported(folder)
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added["<|python_tag|>"] and "<|nowhere|>" not in added
    assert any("`<|nowhere|>`, and tokenizer.json does not have it" in note for note in found.notes)


def test_the_post_processor_decides_which_tokens_surround_a_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin, end = ("<|begin_of_text|>", BEGIN), ("<|eot_id|>", EOT)
    for single, specials, expected in (
        ("$A", [], ([], [])),
        (f"{begin[0]} $A {end[0]}", [begin, end], ([BEGIN], [EOT])),
        (f"$A {end[0]}", [end], ([], [EOT])),
    ):
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
        tokenizer.save(str(folder / "tokenizer.json"))
        change(folder, "tokenizer_config.json", add_bos_token=True, add_eos_token=False)
        found, ours = imported(folder)
        theirs = t.AutoTokenizer.from_pretrained(folder)
        assert prompt_ids(ours, "Hi there") == theirs("Hi there")["input_ids"]
        special = special_tokens(ours)
        assert (list(special.before), list(special.after)) == expected
        assert ("`add_bos_token`=true" in str(found.notes)) == (expected[0] == [])
        assert ("`add_eos_token`=false" in str(found.notes)) == (expected[1] == [EOT])
        assert ("a prompt is followed by" in str(found.notes)) == bool(expected[1])


# ------------------------------------------------------------------------------------------------------- the keys

LISTS = (TOKENIZER_CONFIG_KEYS, TOKENS_MAP_KEYS, GENERATION_KEYS)
HONOURED: dict[str, Any] = {
    "chat_template": "{{ 'other' }}", "add_bos_token": False, "add_eos_token": True, "eos_token_id": [PAD],
    "added_tokens_decoder": {"3": {"content": "<|nowhere|>"}}, "bos_token_id": END, "pad_token_id": END,
    "additional_special_tokens": ["<|nowhere|>"], "extra_special_tokens": {"x": "<|nowhere|>"},
    "tokenizer_class": "LlamaTokenizer", "do_sample": False, "temperature": 0.3, "top_k": 7, "top_p": 0.5,
    "min_p": 0.1, "repetition_penalty": 1.3,
}  # fmt: skip
"""Values that change what is read."""


def facts(folder: Path) -> tuple[Any, ...]:
    """Return everything read from the files next to config.json."""
    stated = stated_of(load_tokenizer(folder))
    assert stated is not None
    sampling = stated_sampling(stated.generation)
    return stated.names, stated.ends, stated.bos, stated.pad, stated.notes, sampling, read_templates(folder).named


@pytest.mark.parametrize("keys", LISTS, ids=[keys.file for keys in LISTS])
def test_each_key_that_means_something_is_followed_harmless_or_named(keys: Keys, folder: Path) -> None:
    file = folder / keys.file
    if keys is TOKENIZER_CONFIG_KEYS:
        (folder / "special_tokens_map.json").unlink()  # which would win
    before, text = facts(folder), file.read_text()
    for key in keys.honoured:
        role = {"tokenizer_class": {"tokenizer_class": "LlamaTokenizer", "bos_token": ...}}.get(key)
        if key == "tokenizer_class":  # its defaults count for roles that are not stated
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.add_special_tokens(["<s>"])
            tokenizer.save(str(folder / "tokenizer.json"))
        change(folder, keys.file, **role or {key: HONOURED.get(key, "<|end_of_text|>" if key == "bos_token" else None if
                                                               key == "eos_token" else "<|python_tag|>")})  # fmt: skip
        assert facts(folder) != before, key
        file.write_text(text)
    for key in sorted(keys.harmless):
        change(folder, keys.file, **{key: 3})
        assert facts(folder) == before and not list(keys.notes(json.loads(file.read_text()))), key
        file.write_text(text)
    for key in (*sorted(set().union(*keys.noted.values(), set())), "a_key_of_tomorrow"):
        change(folder, keys.file, **{key: True})
        (note,) = keys.notes(json.loads(file.read_text()))
        assert note.startswith(f"{keys.file} has `{key}`=True: ")
        assert note in imported(folder)[0].notes
        file.write_text(text)


def test_each_key_of_tokenizer_json_is_known_and_the_library_refuses_others(folder: Path) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    honoured = {"added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"}
    assert tree.keys() == honoured | {"version", "truncation", "padding"}
    change(folder, "tokenizer.json", a_key_of_tomorrow=1)
    with pytest.raises(UserError, match="not a tokenizer of the Hugging Face"):
        load_tokenizer(folder)


# --------------------------------------------------------------------------------------------------- chat templates


def test_templates_are_read_from_the_files_that_transformers_reads(folder: Path) -> None:
    """Files have precedence over tokenizer_config.json; one template has precedence over a list if its file exists."""

    def both() -> tuple[Any, Any]:
        theirs = t.AutoTokenizer.from_pretrained(folder).chat_template
        named = dict(read_templates(folder).named)
        return theirs, named if isinstance(theirs, dict) else named.get("default")

    listed = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    for setting, files, expected in (
        (None, {}, None), ("text", {}, "text"), (listed, {}, {"default": "one", "tool_use": "two"}),
        (listed, {"chat_template.jinja": "file"}, "file"), ("text", {"chat_template.jinja": "file"}, "file"),
        (listed, {"additional_chat_templates/rag.jinja": "rag"}, {"rag": "rag"}),
        (None, {"chat_template.jinja": "a", "additional_chat_templates/b.jinja": "c"}, {"default": "a", "b": "c"}),
    ):  # fmt: skip
        change(folder, "tokenizer_config.json", chat_template=setting or ...)
        shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        for name, text in files.items():
            (layouts.make((folder / name).parent) / (folder / name).name).write_text(text)
        assert both() == (expected, expected)


def test_a_list_without_a_default_leaves_the_run_without_a_template_and_says_so(folder: Path) -> None:
    change(folder, "tokenizer_config.json", chat_template=[{"name": "rag", "template": "{{ messages }}"}])
    found, tokenizer = imported(folder)
    assert load_chat_template(found.run_dir / "tokenizer", tokenizer) is None
    assert any("rag" in note and "no `default`" in note for note in found.notes)
    out = export_huggingface(found.run_dir, folder.parent / "out", verify=False).folder
    assert t.AutoTokenizer.from_pretrained(out).chat_template == {"rag": "{{ messages }}"}


def test_a_recipe_that_names_a_folder_sees_its_template_and_its_tokens(folder: Path) -> None:
    config = FileTokenizer(type="file", path=folder)
    assert find_chat_template(config) == layouts.HEADERS
    tokenizer = train_tokenizer(config, [])
    assert special_tokens(tokenizer).ends == (END, EOT)
    assert document_frame(tokenizer) == ([BEGIN], [EOT])


def test_a_template_that_does_not_compile_is_left_out_and_named(folder: Path) -> None:
    change(folder, "tokenizer_config.json", chat_template="{% for %}")
    found, _ = imported(folder)
    assert not (found.run_dir / "tokenizer" / "chat_template.jinja").exists()
    assert any("tokenizer_config.json is left out: the chat template does not compile" in note for note in found.notes)


# ------------------------------------------------------------------------------------------------------ kept in runs


def test_documents_of_a_dataset_end_with_the_token_that_the_folder_states(folder: Path, tmp_path: Path) -> None:
    run, _ = imported(folder)
    tree = recipe_tree(tmp_path) | {"tokenizer": {"type": "file", "path": str(run.run_dir / "tokenizer")}}
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"the text {name} ends. " * 40)
    tree["data"] |= {"sources": [{"type": "text", "path": str(tmp_path / "texts")}],
                     "validation": {"fraction": 0.1, "by": "tail"}}  # fmt: skip
    prepared = prepare(parse_recipe(tree))
    shards = [TokenShards(prepared.folder, split) for split in ("train", "validation")]
    ids = [token for one in shards for token in one.read(0, one.n_tokens).tolist()]
    ends = [i for i, token in enumerate(ids) if token == EOT]
    assert len(ends) == 2 and ends[-1] == len(ids) - 1
    assert ids[0] == ids[ends[0] + 1] == BEGIN


def test_a_folder_that_states_another_end_is_another_dataset(folder: Path, tmp_path: Path) -> None:
    tree = recipe_tree(tmp_path) | {"tokenizer": {"type": "file", "path": str(folder)}}
    before = prepare(parse_recipe(tree)).folder
    assert prepare(parse_recipe(tree)).folder == before
    change(folder, "special_tokens_map.json", eos_token="<|end_of_text|>")
    assert prepare(parse_recipe(tree)).folder != before


STATED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05}


def sampled(run: Path) -> dict[str, Any]:
    """The settings with which a run's texts are sampled where nobody gives any, among those that a folder may state."""
    return {name: value for name, value in vars(load(run).defaults).items() if name in (*STATED, "min_p")}


def test_a_model_that_states_how_its_texts_are_sampled_is_sampled_so(folder: Path) -> None:
    """mlx-vlm#1331, mlx-lm#1031, vllm#11861, lm-evaluation-harness#3154: read but for eos_token_id, and dropped."""
    change(folder, "generation_config.json", **STATED)
    found, _ = imported(folder)
    run = folder.parent / "run"
    own = {name: value for name, value in STATED.items() if name != "do_sample"}
    assert sampled(run) == {**own, "min_p": 0.0}
    notes = [note for note in found.notes if "temperature" in note]
    assert len(notes) == 1 and "temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.05" in notes[0]
    engine = load(run)
    alike = engine.generate("a b", seed=3, max_tokens=9)
    assert alike == engine.generate("a b", SamplingSettings(**own, seed=3, max_tokens=9))
    assert alike != engine.generate("a b", SamplingSettings(seed=3, max_tokens=9))


@pytest.mark.parametrize(
    ("stated", "expected", "said"),
    [
        ({"do_sample": False, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}, ("top_p=0.9, temperature=0",)),
        ({"do_sample": ..., "temperature": None, "top_p": ...}, {}, ()),
        ({"temperature": 0.6, "top_p": 3}, {"temperature": 0.6}, ("top_p=3", "temperature=0.6")),
        ({"temperature": True, "top_k": 2.5, "top_p": ...}, {}, ("temperature=True", "top_k=2.5")),
        ({"repetition_penalty": "1.1", "temperature": 1, "top_p": ...}, {"temperature": 1}, ("repetition_penalty=",)),
    ],
)  # fmt: skip
def test_stated_sampling_settings_are_followed_or_said_to_be_left_out(
    stated: dict[str, Any], expected: dict[str, Any], said: tuple[str, ...], folder: Path
) -> None:
    change(folder, "generation_config.json", **stated)
    found, _ = imported(folder)
    table = {name: value for name, value in SAMPLING._asdict().items() if name in (*STATED, "min_p")}
    assert sampled(folder.parent / "run") == table | expected
    for words in said:
        assert any(words in note for note in found.notes), found.notes


def test_what_was_stated_survives_processes_added_tokens_and_a_second_saving(folder: Path, tmp_path: Path) -> None:
    tokenizer = imported(folder)[1]
    again = unpack_tokenizer(pack_tokenizer(tokenizer))
    assert special_tokens(again) == special_tokens(tokenizer)
    again.add_special_tokens(["<|im_end|>"])
    save_tokenizer(again, tmp_path / "saved")
    assert special_tokens(load_tokenizer(tmp_path / "saved")) == special_tokens(tokenizer)


def test_a_folder_that_states_no_token_keeps_its_sampling_settings(folder: Path) -> None:
    """The files name a tokenizer class without default tokens; well-known names give the tokens."""
    for name in ("config.json", "special_tokens_map.json"):
        (folder / name).unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<no>"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')
    tokenizer = load_tokenizer(folder)
    stated = stated_of(tokenizer)
    assert stated is not None and not stated.has_tokens and stated.generation["temperature"] == 0.3
    assert "`<no>`, is not a token of tokenizer.json" in stated.notes[0]
    assert special_tokens(tokenizer) == by_name(tokenizer)


def test_tokenizers_of_earlier_runs_go_by_name_as_before(tmp_path: Path) -> None:
    """Their tokenizer_config.json names the tokens, and only gptworks puts bos before a text."""
    tokenizer = LAYOUT.tokenizer
    tokenizer.post_processor = None
    save_tokenizer(unpack_tokenizer(pack_tokenizer(tokenizer)), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    read = load_tokenizer(tmp_path)
    assert stated_of(read) is None
    assert document_frame(read) == ([BEGIN], [END]) and prompt_ids(read, "") == [BEGIN]


def test_an_export_that_differs_from_the_imported_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    run = imported(folder)[0].run_dir
    kept = run / "tokenizer" / "original.json"
    true = kept.read_text()
    (run / "tokenizer" / "sums.json").unlink()
    for key, value, words in (
        ("ends", [END], "ends at .* and that of the imported folder"),
        ("texts", {"Hi": [1, 2]}, "encodes 'Hi' as"),
        ("names", {"eos_token": "<|end_of_text|>"}, "`eos_token`='<|eot_id|>'"),
        ("template", "0" * 64, "another chat template"),
    ):
        kept.write_text(json.dumps(json.loads(true) | {key: value}))
        with pytest.raises(RunError, match=words):
            export_huggingface(run, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    kept.write_text('{"ends": []}')
    with pytest.raises(UserError, match=r"original\.json is not what an import writes"):
        export_huggingface(run, tmp_path / "out")
    kept.write_text(true)
    export_huggingface(run, tmp_path / "out")


def test_min_tokens_and_ignore_eos_hold_for_every_token_that_ends(folder: Path) -> None:
    run = import_huggingface(folder, folder.parent / "run", verify=False).run_dir
    engine = load(run, backend="torch")
    assert engine.complete(layouts.PROMPT, temperature=0, max_tokens=6)[0].finish_reason == "stop"
    held = engine.complete(layouts.PROMPT, temperature=0, max_tokens=6, min_tokens=6)[0]
    assert held.finish_reason == "length" and not {END, EOT} & set(held.token_ids)
    ignored = engine.complete(layouts.PROMPT, temperature=0, max_tokens=6, ignore_eos=True)[0]
    assert ignored.finish_reason == "length" and ignored.token_ids[0] == EOT
    assert load_run(run).checkpoint.step == 0


# ------------------------------------------------------------------------------------------------------ odd folders


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8") and None


def _change(file: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder, file, **values)


def _inside(folder: Path) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    pieces = tree["post_processor"]["processors"][1]["single"]
    pieces.append({"Sequence": {"id": "A", "type_id": 0}})
    (folder / "tokenizer.json").write_text(json.dumps(tree))


def _foreign_id(folder: Path) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"] = [600]
    (folder / "tokenizer.json").write_text(json.dumps(tree))


def _fifo(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (_change("generation_config.json", eos_token_id="2"), "generation_config.json has `eos_token_id`=2: a token"),
        (_change("generation_config.json", eos_token_id=[True]), "`eos_token_id`"),
        (_change("generation_config.json", eos_token_id=[[3]]), "`eos_token_id`"),
        (_change("generation_config.json", bos_token_id=1.5), "`bos_token_id`=1.5"),
        (_change("generation_config.json", pad_token_id={}), "`pad_token_id`"),
        (_change("tokenizer_config.json", added_tokens_decoder={}, eos_token=7), "`eos_token`=7"),
        (_change("special_tokens_map.json", eos_token={"text": "x"}), "special_tokens_map.json has `eos_token`"),
        (_change("tokenizer_config.json", add_bos_token="yes"), "`add_bos_token`=yes: true or false"),
        (_change("tokenizer_config.json", added_tokens_decoder=[1]), "`added_tokens_decoder` of a wrong type"),
        (_change("tokenizer_config.json", chat_template=5), "`chat_template` of a wrong type, int"),
        (_change("tokenizer_config.json", chat_template=[{"template": "x"}]), "`chat_template` with the entry"),
        (_change("tokenizer_config.json", chat_template=[{"name": "../../x", "template": "x"}]), "with the entry"),
        (_change("tokenizer_config.json", chat_template=[{"name": "a", "template": "x"}] * 2), "two chat templates"),
        (_change("tokenizer_config.json", chat_template=[{"name": "a", "template": "x" * (1 << 21)}]), "more than"),
        (_write("generation_config.json", "[]"), "holds list, not a mapping"),
        (_write("generation_config.json", "\ufeff{}"), "begins with a byte order mark"),
        (_write("config.json", "\ufeff{}"), "begins with a byte order mark"),
        (_write("tokenizer_config.json", '{"eos_token": "a", "eos_token": "b"}'), "'eos_token' is given twice"),
        (_write("config.json", '{"model_type": "llama", "model_type": "gpt2"}'), "'model_type' is given twice"),
        (_write("generation_config.json", '{"eos_token_id": ' + "9" * 5000 + "}"), "not readable JSON"),
        (_write("generation_config.json", "[" * 100_000), "not readable JSON"),
        (_write("generation_config.json", "not json"), "not readable JSON"),
        (_inside, "post_processor TemplateProcessing with `single` of 2 texts"),
        (_foreign_id, "post_processor that adds the id 600"),
        (_fifo, "FIFO"),
    ],
)  # fmt: skip
def test_files_that_state_nonsense_are_refused_by_name(
    breaks: Callable[[Path], None], words: str, folder: Path
) -> None:
    breaks(folder)
    with pytest.raises(UserError, match=words):
        import_huggingface(folder, folder.parent / "run", verify=False)
    assert not (folder.parent / "run").exists()


@pytest.mark.parametrize(
    ("changes", "ends", "words"),
    [
        ({"eos_token_id": [EOT, 10**30]}, (EOT,), "10\\d* is left out|1000\\d+ is left out"),
        ({"eos_token_id": [5000]}, (END,), "generation_config.json has no `eos_token_id`|5000 is left out"),
        ({"eos_token_id": -1}, (END,), "no `eos_token_id`: generation ends at that of config.json"),
        ({"eos_token_id": []}, (END,), "no `eos_token_id`"),
        ({"eos_token_id": [EOT, EOT, END]}, (EOT, END), ""),
        ({"stop_strings": ["User:"]}, (END, EOT), "`stop_strings`.*give `stop` with a request"),
        ({"suppress_tokens": [3]}, (END, EOT), "`suppress_tokens`.*`logit_bias`"),
    ],
)  # fmt: skip
def test_odd_end_tokens_are_noted(changes: dict[str, Any], ends: tuple[int, ...], words: str, folder: Path) -> None:
    change(folder, "generation_config.json", **changes)
    found, tokenizer = imported(folder)
    assert special_tokens(tokenizer).ends == ends
    assert words == "" or any(re.search(words, note) for note in found.notes), found.notes


def test_tokens_that_the_vocabulary_lacks_are_noted_and_left_out(folder: Path) -> None:
    change(folder, "special_tokens_map.json", eos_token="</s>", pad_token="", bos_token=None)
    found, tokenizer = imported(folder)
    special = special_tokens(tokenizer)
    assert "eos_token" not in special.names and special.eos == END, "the first of the ids that end generation"
    assert "bos_token" not in special.names and special.bos == BEGIN
    assert any("`eos_token` of special_tokens_map.json, `</s>`, is not a token" in note for note in found.notes)


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(folder: Path, tmp_path: Path) -> None:
    change(folder, "config.json", transformers_version="5.0")
    (layouts.make(folder / "additional_chat_templates") / "rag.jinja").write_text("rag")
    (folder / "chat_template.jinja").write_text(layouts.HEADERS)
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", layouts.make(tmp_path / "models--a--b/blobs")
    for i, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        shutil.copy(file, blobs / f"{i:040x}")
        link = layouts.make((snapshot / file.relative_to(folder)).parent) / file.name
        link.symlink_to(os.path.relpath(blobs / f"{i:040x}", link.parent))
    import_huggingface(snapshot, tmp_path / "linked", verify=False)
    import_huggingface(folder, tmp_path / "plain", verify=False)
    names = sorted(path.name for path in (tmp_path / "plain" / "tokenizer").iterdir())
    assert "original.json" in names and "chat_template.jinja" in names and "generation_config.json" in names
    for name in names:
        read = [(tmp_path / run / "tokenizer" / name).read_bytes() for run in ("linked", "plain")]
        assert read[0] == read[1], name


def test_a_tuned_run_also_ends_where_its_template_ends_an_answer(folder: Path, tmp_path: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=END)
    run = imported(folder)[0].run_dir
    generated = export_huggingface(run, tmp_path / "import", verify=False).folder / "generation_config.json"
    assert json.loads(generated.read_text())["eos_token_id"] == END, "an import goes out as it came in"
    (run / "tokenizer" / "original.json").unlink()
    (run / "tokenizer" / "sums.json").unlink()
    generated = export_huggingface(run, tmp_path / "tuned").folder / "generation_config.json"
    assert json.loads(generated.read_text())["eos_token_id"] == [EOT, END]


def test_a_note_reports_that_transformers_reads_a_text_differently(tmp_path: Path) -> None:
    """LlamaTokenizer ignores the normalizer of tokenizer.json, which gptworks applies."""
    layouts.write(tmp_path / "theirs", layouts.LAYOUTS["llama-2"])
    notes = import_huggingface(tmp_path / "theirs", tmp_path / "run").notes
    differing = [note for note in notes if "AutoTokenizer of transformers reads ' leading" in note]
    assert differing and "follows tokenizer.json" in differing[0]
    change(tmp_path / "theirs", "tokenizer_config.json", eos_token={"content": "</s>"})  # transformers wants `__type`
    (tmp_path / "theirs" / "special_tokens_map.json").unlink()
    notes = import_huggingface(tmp_path / "theirs", tmp_path / "again").notes
    assert [note for note in notes if "AutoTokenizer of transformers does not load the folder: TypeError" in note]
