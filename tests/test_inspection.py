"""Faults planted in conversations, templates and recipes: each stops a run with its name, and can be allowed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import chats
from gptworks.chat_template import BUILT_IN
from gptworks.cli.inspect import inspect
from gptworks.config.objective import ObjectiveSettings, RewardObjective
from gptworks.data.conversations.inspection import (
    check_records,
    inspect_conversations,
    inspect_pairs,
    inspect_records,
    refuse_faults,
)
from gptworks.data.conversations.reading import is_held_out
from gptworks.data.prepare import prepare
from gptworks.errors import UserError
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.training.loop import train

Tree = dict[str, Any]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A recipe without faults; its base run has only the files that the checks read."""
    (tmp_path / "base" / "tokenizer").mkdir(parents=True)
    save_recipe(parse_recipe(chats.base_tree(tmp_path)), tmp_path / "base" / "recipe.yaml")
    tree = chats.tune_tree(tmp_path)
    tree["tokenizer"] = {
        "type": "bpe", "vocab_size": 280, "added_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": "chatml",
    }  # fmt: skip
    return tree


def given(tree: Tree, rows: list[Any]) -> None:
    chats.write_jsonl(Path(tree["data"]["sources"][0]["path"]), rows)


def template(tree: Tree, source: str) -> None:
    file = Path(tree["run_dir"]).parent / "template.jinja"
    file.write_text(source)
    tree["tokenizer"]["chat_template"] = str(file)


def some(change: Callable[[dict[str, str]], Any], every: int = 3) -> list[Any]:
    return [change(row) if i % every == 0 else row for i, row in enumerate(chats.records())]


def all_labels_masked(tree: Tree) -> None:
    tree["model"]["context_length"] = 8  # the answers begin later


def long_questions(tree: Tree) -> None:
    given(tree, some(lambda row: row | {"instruction": row["instruction"] * 40}))


def long_answers(tree: Tree) -> None:
    given(tree, some(lambda row: row | {"output": row["output"] * 40}))


def hardly_an_answer(tree: Tree) -> None:
    tree["model"]["context_length"] = 2048
    given(tree, [row | {"instruction": row["instruction"] * 200, "output": "y"} for row in chats.records()])


def prompts_trained_on(tree: Tree) -> None:
    tree["objective"] = {"type": "next_token"}


def no_answers(tree: Tree) -> None:
    turns = [[{"role": "user", "content": row["instruction"]}] for row in chats.records()]
    full = [[*turn, {"role": "assistant", "content": "yes, " + turn[0]["content"]}] for turn in turns]
    given(
        tree,
        [{"messages": turn if i % 9 == 0 else whole} for i, (turn, whole) in enumerate(zip(turns, full, strict=True))],
    )


def roles_exchanged(tree: Tree) -> None:
    rows = [(row["output"], row["instruction"]) for row in chats.records()]
    given(tree, [{"conversations": [{"from": "gpt", "value": a}, {"from": "human", "value": q}]} for a, q in rows])


def template_without_an_end(tree: Tree) -> None:
    template(tree, BUILT_IN["chatml"].replace(" + '<|im_end|>' + '\\n'", " + '\\n\\n'"))


def template_that_adds(tree: Tree) -> None:
    template(tree, BUILT_IN["chatml"].replace(" + '<|im_end|>'", " + ' -- END' + '<|im_end|>'"))


def tokens_left_out(tree: Tree) -> None:
    tree["tokenizer"]["added_tokens"] = []


def template_changed(tree: Tree) -> None:
    (Path(tree["initialize_from"]) / "tokenizer" / "chat_template.jinja").write_text(BUILT_IN["alpaca"])


def no_base(tree: Tree) -> None:
    del tree["initialize_from"]


def repeated(tree: Tree) -> None:
    given(tree, chats.records() * 2)


def held_out_ones_trained_on(tree: Tree) -> None:
    shouted = [row | {"instruction": f" {row['instruction'].upper()} "} for row in chats.records()]
    given(tree, [*chats.records(), *shouted])


def one_answer(tree: Tree) -> None:
    given(tree, [row | {"output": "I cannot help."} for row in chats.records()])


def unknown_words(tree: Tree) -> None:
    tree["tokenizer"] |= {"type": "word", "vocab_size": 12}


FAULTS = {
    "nothing-learned": all_labels_masked,
    "little-learned": hardly_an_answer,
    "prompts-learned": prompts_trained_on,
    "unanswered": no_answers,
    "empty-answers": lambda tree: given(tree, some(lambda row: row | {"output": " "})),
    "swapped-roles": roles_exchanged,
    "answers-altered": template_that_adds,
    "answers-cut-away": long_questions,
    "answers-cut-short": long_answers,
    "no-end-token": template_without_an_end,
    "tokens-not-special": tokens_left_out,
    "template-changed": template_changed,
    "no-base-run": no_base,
    "duplicates": repeated,
    "validation-overlap": held_out_ones_trained_on,
    "one-answer": one_answer,
    "unknown-tokens": unknown_words,
    "keys-not-read": lambda tree: given(tree, some(lambda row: row | {"tools": '[{"name": "f"}]'})),
}


def names(tree: Tree) -> list[str]:
    recipe = parse_recipe(tree)
    return [finding.name for finding in inspect_records(recipe, prepare(recipe)).findings]


def assert_stops(tree: Tree, fault: str) -> list[str]:
    """Check that the run stops before it begins and names the fault; return all findings."""
    found = names(tree)
    assert fault in found
    with pytest.raises(UserError, match=rf"  {fault}: .*\n(.*\n)*.*objective\.allow=\[.*{fault}"):
        train(parse_recipe(tree))
    assert not Path(tree["run_dir"]).exists()
    return found


def test_keys_that_are_not_read_are_named_with_their_records_until_they_are_allowed(tree: Tree) -> None:
    turn = {"role": "assistant", "content": "yes", "tool_calls": [{"id": "1"}], "reasoning_content": "so"}
    rows = [{"messages": [{"role": "user", "content": row["instruction"]}, turn | {"content": row["output"]}]}
            for row in chats.records()]  # fmt: skip
    given(tree, [*rows[:-1], rows[-1] | {"tools": [{"name": "f"}]}])
    recipe = parse_recipe(tree)
    (finding,) = inspect_records(recipe, prepare(recipe)).findings
    for shown in (
        r"`tool_calls` of a turn: calls of tools.* \(60 records, first .*, record 1\)",
        r"`reasoning_content` of a turn: the model's reasoning",
        r"`tools`: .* \(1 record, first .*record 60\)",
    ):
        assert re.search(shown, finding.text), finding.text
    lines: list[str] = []
    tree["objective"] = {"type": "instruction", "allow": ["keys-not-read"]}
    check_records(parse_recipe(tree), prepare(recipe), lines.append)
    assert any(line.startswith("allowed: keys-not-read: ") for line in lines)


def test_an_answer_that_is_switched_off_is_shown_as_read_only(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": [{"role": "user", "content": row["instruction"]},
                          {"role": "assistant", "content": "a bad answer", "weight": 0},
                          {"role": "user", "content": "again"}, {"role": "assistant", "content": row["output"]}]}
            for row in chats.records()]  # fmt: skip
    given(tree, rows)
    assert names(tree) == []
    save_recipe(parse_recipe(tree), Path(tree["run_dir"]).parent / "recipe.yaml")
    inspect(Path(tree["run_dir"]).parent / "recipe.yaml", examples=1)
    shown = "".join(capsys.readouterr().out.split())
    assert "assistantabadanswer<|im_end|>" in shown and "⟦abadanswer" not in shown and "⟦the" in shown


def test_nothing_is_found_where_there_is_no_fault(tree: Tree) -> None:
    assert names(tree) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_stops_the_run_by_its_name(tree: Tree, fault: str) -> None:
    FAULTS[fault](tree)
    found = assert_stops(tree, fault)
    tree["objective"] = tree["objective"] | {"allow": found}
    recipe, reported = parse_recipe(tree), []
    check_records(recipe, prepare(recipe), reported.append)
    assert any(line.startswith(f"allowed: {fault}: ") for line in reported)


@pytest.mark.parametrize("pairs", [False, True])
def test_held_out_answers_beyond_the_context_stop_the_run(tree: Tree, pairs: bool) -> None:
    """Otherwise, the run would end at its first evaluation, or report a loss of 0."""

    def row(question: str) -> Tree:
        given = {"chosen": f"so {question[-2:]}", "rejected": "no"} if pairs else {"output": f"so {question[-2:]}"}
        return {"instruction": question, **given}

    def held_out(question: str) -> bool:
        return is_held_out([{"role": "user", "content": question}], 0.3)

    questions = [f"{'long ' * length}question {i}" for length in (0, 100) for i in range(40)]
    given(tree, [row(one) for one in questions if held_out(one) == one.startswith("long ")])
    tree["data"]["validation"] = {"fraction": 0.3}
    tree["tokenizer"]["vocab_size"] = 262
    if pairs:
        tree["data"]["sources"][0]["type"] = "preferences"
        tree["objective"] = {"type": "preference"}
    recipe = parse_recipe(tree)
    texts = [one.text for one in inspect_records(recipe, prepare(recipe)).findings if one.name == "nothing-learned"]
    assert len(texts) == 1 and f"held-out {'pairs' if pairs else 'examples'} has its answer within" in texts[0]


def test_tokens_that_are_not_special_hide_the_faults_that_they_cause_and_do_not_allow_them(tree: Tree) -> None:
    tokens_left_out(tree)
    recipe = parse_recipe(tree)
    found = inspect_records(recipe, prepare(recipe)).findings
    assert {"no-end-token", "answers-altered"} < {finding.name for finding in found}, "as `inspect` shows them"
    with pytest.raises(UserError) as refusal:
        refuse_faults(found, ())
    explained = [line.strip().partition(":")[0] for line in str(refusal.value).splitlines() if line.startswith("  ")]
    assert explained == ["tokens-not-special"]
    assert 'Set tokenizer.added_tokens=["<|im_start|>", "<|im_end|>"]' in str(refusal.value)
    with pytest.raises(UserError, match=r"  no-end-token: .*\n  answers-altered: "):
        refuse_faults(found, ["tokens-not-special"])
    tree["tokenizer"]["added_tokens"] = ["<|im_start|>", "<|im_end|>"]
    assert names(tree) == []


# ------------------------------------------------------------------------------------------------- pairs of answers


def pair(row: dict[str, str]) -> dict[str, str]:
    return {"prompt": row["instruction"], "chosen": row["output"], "rejected": "no."}


@pytest.fixture
def pairs(tree: Tree) -> Tree:
    """The same recipe on preference pairs."""
    given(tree, [pair(row) for row in chats.records()])
    tree["data"]["sources"] = [{"type": "preferences", "path": tree["data"]["sources"][0]["path"]}]
    return tree | {"objective": {"type": "preference"}}


PAIR_FAULTS = {
    "answers-alike": lambda tree: given(tree, [pair(row) | {"rejected": row["output"]} for row in chats.records()]),
    "answers-cut-away": lambda tree: given(
        tree,
        [
            pair(row | {"instruction": row["instruction"] * (40 if i % 3 == 0 else 1)})
            for i, row in enumerate(chats.records())
        ],
    ),
    "no-end-token": template_without_an_end,
    "tokens-not-special": tokens_left_out,
    "template-changed": template_changed,
    "no-base-run": no_base,
    "unknown-tokens": unknown_words,
}


def test_pairs_without_a_fault(pairs: Tree) -> None:
    assert names(pairs) == []
    recipe = parse_recipe(pairs)
    figures = inspect_pairs(recipe, prepare(recipe)).figures
    assert figures["n_pairs"] + figures["n_validation"] == 60
    assert figures["n_chosen_longer"] == figures["n_pairs"] and figures["median_chosen"] > figures["median_rejected"]
    assert (figures["n_cut"], figures["n_alike"]) == (0, 0)


@pytest.mark.parametrize("fault", PAIR_FAULTS)
def test_a_fault_planted_in_pairs_stops_the_run_by_its_name(pairs: Tree, fault: str) -> None:
    PAIR_FAULTS[fault](pairs)
    assert_stops(pairs, fault)


def test_inspect_shows_both_answers(pairs: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(pairs["run_dir"]).parent / "pairs.yaml"
    save_recipe(parse_recipe(pairs), path)
    inspect(path, examples=2)
    shown = " ".join(capsys.readouterr().out.split())  # whatever the width of the terminal
    assert shown.count(", chosen: ") == shown.count(", rejected: ") == 2
    assert "⟦no.<|im_end|>⟧" in shown and "the chosen one is longer in 100%" in shown


# ---------------------------------------------------------------------------------------------------- conversations


def test_a_fault_says_where(tree: Tree) -> None:
    given(tree, some(lambda row: row | {"output": ""}, every=30))
    recipe = parse_recipe(tree)
    [finding] = inspect_conversations(recipe, prepare(recipe)).findings
    assert finding.name == "empty-answers" and "chats.jsonl, record 31" in finding.text


def test_figures_are_counted(tree: Tree) -> None:
    recipe = parse_recipe(tree)
    prepared = prepare(recipe)
    figures = inspect_conversations(recipe, prepared).figures
    assert figures["n_examples"] + figures["n_validation"] == 60
    train_split = prepared.manifest.splits["train"]
    assert figures["n_tokens"] == train_split.tokens - train_split.documents
    assert prepared.chat_template is not None
    answers = [row["output"] for row in chats.records()]
    lengths = [len(prepared.tokenizer.encode(answer, add_special_tokens=False).ids) + 1 for answer in answers]
    assert min(lengths) * figures["n_examples"] <= figures["n_learned"] <= max(lengths) * figures["n_examples"]


class EveryToken(ObjectiveSettings):
    """An objective that the package does not contain."""

    learns_prompts = True
    type: Literal["every_token"] = "every_token"


def test_an_objective_says_itself_whether_prompts_are_learned_and_rows_are_shared(tree: Tree) -> None:
    recipe = parse_recipe(tree)
    prepared = prepare(recipe)
    packed = inspect_conversations(recipe, prepared)
    assert packed.findings == [] and packed.figures["n_rows"] < packed.figures["n_examples"]
    for objective in (EveryToken(), RewardObjective(type="reward", reward="r.py:f")):
        found = inspect_conversations(recipe.model_copy(update={"objective": objective}), prepared)
        assert [one.name for one in found.findings] == ["prompts-learned"] * objective.learns_prompts
        assert found.figures["n_rows"] == found.figures["n_examples"]


def test_unknown_faults_are_refused(tree: Tree) -> None:
    tree["objective"]["allow"] = ["no-end-tokn"]
    with pytest.raises(UserError, match="no-end-token"):
        parse_recipe(tree)


def test_conversations_need_a_template(tree: Tree) -> None:
    tree["tokenizer"]["chat_template"] = None
    with pytest.raises(UserError, match=r"no chat template .* tokenizer\.chat_template"):
        prepare(parse_recipe(tree))
    tree["tokenizer"]["chat_template"] = "chatlm"
    with pytest.raises(UserError, match="did you mean `chatml`"):
        prepare(parse_recipe(tree))


def test_answers_need_conversations(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective\.type=instruction and data.sources are text"):
        parse_recipe(chats.base_tree(tmp_path) | {"objective": {"type": "instruction"}})
