"""The judge's campaign: what may be changed, which changes are accepted, what counts, and how it ends."""

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import judging
from gptworks.errors import RunError, UserError
from gptworks.judge import Campaign
from gptworks.judge.ledger import Ledger
from gptworks.judge.page import to_html
from gptworks.judge.records import Tried
from gptworks.recipe import load_recipe
from gptworks.runs.try_results import Try, write_try
from test_html import Reader

GOOD, BAD, SAME = {"train.learning_rate": 0.05}, {"train.learning_rate": 0.2}, {"train.learning_rate": 0.1001}


def created(folder: Path, **settings: Any) -> Campaign:
    recipe = judging.write_recipe(folder)
    return Campaign.create(recipe, folder / "campaign", **{"budget_seconds": 3600, "steps": 20} | settings)


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Campaign]:
    judging.without_training(monkeypatch)
    made = created(tmp_path)
    yield made
    made.close()


def kinds(campaign: Campaign) -> list[str]:
    return [json.loads(line)["kind"] for line in (campaign.folder / "ledger.jsonl").read_text().splitlines()]


def test_a_gain_becomes_the_champion_that_later_tries_change(campaign: Campaign) -> None:
    one = campaign.try_change(GOOD)
    assert one.accepted and 3 <= len(one.gains) <= 6 and one.judgement(0.005).low < 0.05 < one.judgement(0.005).high
    assert one.words(0.005, "nats").startswith("gain: +0.0")
    assert campaign.champion().train.learning_rate == 0.05
    again = campaign.try_change(patch="train: {learning_rate: 0.01}")
    assert again.accepted and again.champion == 1 and campaign.champion().train.learning_rate == 0.01
    worse = campaign.try_change(BAD)
    assert worse.words(0.005, "nats").startswith("harm: -0.1") and campaign.records.champion == 2
    tie = campaign.try_change({"train.learning_rate": 0.0099})
    assert tie.words(0.005, "nats").startswith("tie: any gain is below the 0.005 that matters")
    entries = [kind for kind in kinds(campaign) if kind != "pair"]
    assert entries == ["created", *["begun", "ended"] * 4, "head"]
    assert kinds(campaign).count("pair") == sum(len(one.gains) for one in campaign.records.tries)
    Reader(to_html(campaign.records))


def test_the_same_change_again_continues_its_try_and_costs_nothing_once_it_is_decided(campaign: Campaign) -> None:
    change = {"train.learning_rate": 0.0962}
    first = campaign.try_change(change, pairs=3)
    assert not first.accepted and len(first.gains) == 3 and first.is_open
    assert campaign.try_change(change, pairs=3) == first, "three pairs exist already"
    more = campaign.try_change(patch="train:\n  learning_rate: 9.62e-2", pairs=20)
    assert more.number == 1 and more.gains[:3] == first.gains and len(more.gains) > 3 and not more.is_open
    entries = kinds(campaign)
    assert campaign.try_change(change, pairs=20) == more and kinds(campaign) == entries


def test_slower_steps_are_judged_in_equal_time(campaign: Campaign) -> None:
    """Micro-batches of half the size take twice as long, so half as many steps fit."""
    one = campaign.try_change({"train.micro_batch_size": 2})
    assert one.place == "in equal time" and not one.accepted
    assert one.judgement(0.005).high < 0 and one.step_time == pytest.approx(2)


def test_a_fork_adds_to_the_change_of_an_earlier_try(campaign: Campaign) -> None:
    campaign.try_change(SAME, pairs=3)
    forked = campaign.try_change({"train.learning_rate": 0.06, "model.n_layers": 3}, of_try=1, pairs=3)
    assert forked.changes == ("model.n_layers=3", "train.learning_rate=0.06")
    with pytest.raises(UserError, match="there is no try 7: there are tries 1 to 2"):
        campaign.try_change(GOOD, of_try=7)


def test_seeds_are_secret_and_fresh_in_each_try(campaign: Campaign, tmp_path: Path) -> None:
    for change in (SAME, BAD):
        campaign.try_change(change, pairs=3)
    trees = {path: yaml.safe_load(path.read_text()) for path in campaign.folder.glob("tries/*/pairs/*/recipe.yaml")}
    seeds = {tree["seed"] for tree in trees.values()}
    assert len(seeds) == sum(len(one.gains) for one in campaign.records.tries), "both runs of a pair share one"
    for name in ("key", "sealed.jsonl"):
        assert stat.S_IMODE((campaign.folder / "secret" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((campaign.folder / "secret").stat().st_mode) == 0o700
    ledger = (campaign.folder / "ledger.jsonl").read_text() + (campaign.folder / "judge.html").read_text()
    assert not any(str(seed) in ledger for seed in seeds)


def test_the_sealed_text_is_in_no_try(campaign: Campaign, tmp_path: Path) -> None:
    sealed = json.loads((campaign.folder / "secret" / "sealed.jsonl").read_text())["text"]
    rest = "".join(path.read_text() for path in sorted((campaign.folder / "texts").iterdir()))
    assert len(sealed) > 1000 and rest + sealed == (tmp_path / "text.txt").read_text()


def test_of_many_documents_whole_ones_are_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judging.without_training(monkeypatch)
    texts = tmp_path / "documents.jsonl"
    texts.write_text("".join(json.dumps({"text": f"document {i} " * 40}) + "\n" for i in range(60)))
    recipe = judging.write_recipe(tmp_path)
    overrides = ["data.sources.0.type=jsonl", f"data.sources.0.path={texts}", "data.validation.by=auto"]
    campaign = Campaign.create(recipe, tmp_path / "campaign", budget_seconds=3600, steps=20, overrides=overrides)
    parts = [
        {json.loads(line)["text"] for line in (campaign.folder / name).read_text().splitlines()}
        for name in ("texts/texts.jsonl", "secret/sealed.jsonl")
    ]
    assert [len(part) for part in parts] == [54, 6] and not parts[0] & parts[1]
    campaign.close()


def test_a_campaign_that_cannot_begin_leaves_nothing_and_may_begin_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging.without_training(monkeypatch)
    recipe, folder = judging.write_recipe(tmp_path), tmp_path / "campaign"
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="too little text to seal"):
        Campaign.create(
            recipe, folder, budget_seconds=3600, steps=20, overrides=[f"data.sources.0.path={tmp_path / 'empty.txt'}"]
        )
    assert not folder.exists()
    with pytest.raises(UserError, match="--budget 1 s is too short"):
        Campaign.create(recipe, folder, budget_seconds=1, steps=20)
    assert not folder.exists()
    Campaign.create(recipe, folder, budget_seconds=3600, steps=20).close()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "give either `changes`"),
    ({"changes": GOOD, "patch": "train: {}"}, "give either `changes`"),
    ({"changes": {"train.learning_rate": 0.1}}, "the champion says that already"),
    ({"changes": {"train.optimiser": "adamw"}}, "did you mean `train.optimizer`"),
    ({"changes": {"train.learning_rate": "fast"}}, "it needs a number"),
    ({"changes": {"train.max_steps": 1000}}, "`train.max_steps` may not be changed"),
    ({"changes": {"train.evaluate_sequences": 1}}, "`train.evaluate_sequences` may not be changed"),
    ({"changes": {"train.loggers": ["x.py"]}}, "`train.loggers` may not be changed"),
    ({"changes": {"data.validation.fraction": 0.5}}, "`data.validation.fraction` may not be changed"),
    ({"changes": {"objective.type": "custom"}}, "`objective.type` may not be changed"),
    ({"changes": {"../secret": 1}}, "is no path of a setting"),
    ({"changes": {"seed": 1}}, "is no path of a setting"),
    ({"patch": "run_dir: /tmp/x"}, "the patch is not a mapping of sections"),
    ({"patch": "data: {cache_dir: /tmp}"}, "the patch changes `data`"),
    ({"patch": "model: {n_layers: !!python/object/apply:os.system ['true']}"}, "patch"),
    ({"patch": "model: [" * 2000}, "patch"),
    ({"patch": "x" * 30_000}, "30,000 characters: give at most 20,000"),
    ({"changes": {f"model.x{i}": 1 for i in range(40)}}, "40 settings at once"),
    ({"changes": {"train.optimizer": "a" * 2000}}, "has 2,000 characters"),
    ({"changes": {"model.d_model": 2048}}, "times the FLOPs of the base recipe's"),
    ({"changes": {"model.n_layers": 40, "train.batch_size": 1, "train.micro_batch_size": 1}}, "times the FLOPs"),
    ({"changes": {"train.max_rollbacks": 9}}, "`train.max_rollbacks` may not be changed"),
    ({"changes": {"model.context_length": 64}}, "train.evaluate_sequences=8, each length may be evaluated on other"),
    ({"changes": {"model.n_layers": 10**9}}, "less than or equal to 1000"),
    ({"changes": GOOD, "pairs": 50}, "pairs=50: give 3 to 20"),
]


def test_what_may_not_be_tried_is_refused_before_anything_is_entered(campaign: Campaign) -> None:
    for given, message in REFUSED:
        with pytest.raises(UserError, match=message):
            campaign.try_change(**given)
    assert kinds(campaign) == ["created", "head"] and not list((campaign.folder / "tries").iterdir())


def test_a_failed_run_counts_and_the_next_try_goes_on(campaign: Campaign) -> None:
    with pytest.raises(RunError, match="no space left"):
        campaign.try_change({"train.learning_rate": 0.95})
    assert campaign.tried(1).words(0.005, "nats").startswith("failed: the run failed: no space left")
    assert campaign.try_change(GOOD).number == 2


def test_a_killed_campaign_continues_and_its_abandoned_try_counts(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(recipe: Any, *rest: Any) -> bool:
        if recipe.run_dir.name == "02-before":
            raise Killed
        return judging.train(recipe, *rest)

    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", killed)
    with pytest.raises(Killed):
        campaign.try_change(SAME)
    campaign.close()
    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", judging.train)
    again = Campaign(campaign.folder)
    found = again.records
    assert found.tries[0].state == "abandoned" and len(found.tries[0].gains) == 2
    assert found.tries[0].seconds == pytest.approx(8), "the runs that were trained have used machine time"
    assert again.try_change(GOOD).number == 2 and again.tried(2).level < again.tried(1).level
    with pytest.raises(UserError, match="in use by another judge"):
        Campaign(again.folder)
    again.close()


def test_changed_files_and_tries_without_an_entry_are_noticed(campaign: Campaign) -> None:
    ledger = campaign.folder / "ledger.jsonl"
    old = ledger.read_text()
    one = campaign.try_change(GOOD)
    assert campaign.verify() == 3 + len(one.gains)
    new = ledger.read_text()
    campaign.close()
    ledger.write_text(old)
    with pytest.raises(UserError, match=f"line 2: it has 1 entries, and this judge wrote {3 + len(one.gains)}"):
        Campaign(campaign.folder)
    ledger.write_text(new.replace('"is_open": false', '"is_open": true'))
    with pytest.raises(UserError, match=f"line {3 + len(one.gains)}: it was changed"):
        Campaign(campaign.folder)
    ledger.write_text(new)
    for folder in ("tries/002", "final"):
        (campaign.folder / folder).mkdir()
        with pytest.raises(UserError, match=f"{folder} has no entry"):
            Campaign(campaign.folder)
        (campaign.folder / folder).rmdir()
    for name in ("texts/0000.txt", "champion-001.yaml", "base.yaml", "secret/sealed.jsonl"):
        path = campaign.folder / name
        text = path.read_bytes()
        path.write_bytes(text + b" ")
        with pytest.raises(UserError, match="is not the file that the campaign wrote"):
            Campaign(campaign.folder)
        path.write_bytes(text)
    Campaign(campaign.folder).close()


@pytest.mark.parametrize(
    "forge",
    [
        lambda pairs: [pair | {"loss": pair["loss"] | {"after": 1.0}} for pair in pairs],
        lambda pairs: [*pairs, pairs[-1] | {"number": 3}],
        lambda pairs: pairs[:1],
        lambda pairs: [],
    ],
)
def test_pairs_that_the_judge_did_not_train_are_noticed(campaign: Campaign, forge: Callable[[Any], Any]) -> None:
    campaign.try_change(SAME, pairs=3)
    campaign.close()
    file = campaign.folder / "tries" / "001" / "try.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"pairs": forge(state["pairs"])}))
    with pytest.raises(UserError, match=r"try\.json: pair \d is not as the judge entered it"):
        Campaign(campaign.folder)


@pytest.mark.parametrize("change", [SAME, {"train.micro_batch_size": 2}], ids=["pairs", "third runs"])
def test_a_crash_between_the_ledger_and_the_try_loses_nothing(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """The pair is in the ledger, and `try.json` lacks it. Its runs are there, so it is entered again, and other tries
    may come first."""

    def crashed(found: Try) -> None:
        if len(found.pairs) == 3 and found.arms[-1] in found.pairs[2].loss:
            raise KeyboardInterrupt
        write_try(found)

    monkeypatch.setattr("gptworks.runs.try_run.write_try", crashed)
    with pytest.raises(KeyboardInterrupt):
        campaign.try_change(change, pairs=4)
    campaign.close()
    monkeypatch.setattr("gptworks.runs.try_run.write_try", write_try)
    again = Campaign(campaign.folder)
    again.try_change(BAD, pairs=3)
    one = again.try_change(change, pairs=4)
    assert one.number == 1 and len(one.gains) >= 3 and again.verify() > 0
    again.close()
    Campaign(campaign.folder).close()


@pytest.mark.parametrize("error", [OSError, RunError])
def test_a_pair_that_could_not_be_written_is_trained_again(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def failing(found: Try) -> None:
        if len(found.pairs) == 2:
            raise error("no space left on device")
        write_try(found)

    monkeypatch.setattr("gptworks.runs.try_run.write_try", failing)
    with pytest.raises(error):
        campaign.try_change(SAME, pairs=4)
    monkeypatch.setattr("gptworks.runs.try_run.write_try", write_try)
    used = campaign.records.used_seconds
    campaign.try_change(BAD, pairs=3)
    assert campaign.verify() > 0
    campaign.close()
    again = Campaign(campaign.folder)
    one = again.try_change(SAME, pairs=4)
    assert one.number == 1 and len(one.gains) == 4 and again.verify() > 0 and again.records.used_seconds >= used
    again.close()


def test_what_a_crash_leaves_unfinished_is_finished(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain whose end is not in the ledger; and a final comparison that was killed before its first pair."""
    append = Ledger.append

    def crashed(ledger: Ledger, kind: str, **facts: Any) -> Any:
        if kind == "ended":
            raise KeyboardInterrupt
        return append(ledger, kind, **facts)

    monkeypatch.setattr(Ledger, "append", crashed)
    with pytest.raises(KeyboardInterrupt):
        campaign.try_change(GOOD, pairs=4)
    monkeypatch.setattr(Ledger, "append", append)
    assert campaign.records.champion == 0
    assert campaign.try_change(GOOD, pairs=3).accepted and campaign.records.champion == 1
    (campaign.folder / "final").mkdir()
    for name in (".lock", "before.yaml", "after.yaml"):
        (campaign.folder / "final" / name).touch()
    assert len(campaign.finish()["gains"]) == 5


def test_a_stop_during_a_third_run_leaves_the_try_open(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(recipe: Any, *rest: Any) -> bool:
        return recipe.run_dir.name != "01-in-time" and judging.train(recipe, *rest)

    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", stopped)
    change = {"train.micro_batch_size": 2}
    assert campaign.try_change(change, pairs=3).is_open
    seconds = campaign.records.used_seconds
    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", judging.train)
    ended = campaign.try_change(change, pairs=3)
    assert not ended.is_open and ended.place == "in equal time" and ended.judgement(0.005).answer == "harm"
    assert campaign.records.used_seconds - seconds < 8, "what was trained before the stop counts once"


def test_a_third_run_changes_nothing_of_its_pair(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of runs are not signed: what a pair has of them is not read again."""

    def forging(recipe: Any, *rest: Any) -> bool:
        if recipe.run_dir.name == "00-in-time":
            for file in recipe.run_dir.parent.glob("*-before/metrics.jsonl"):
                file.write_text(file.read_text().replace('"loss": 2', '"loss": 9'))
        return judging.train(recipe, *rest)

    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", forging)
    assert max(campaign.try_change({"train.micro_batch_size": 2}, pairs=3).gains) < 0


def test_a_third_run_that_is_no_valid_recipe_ends_its_try(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptworks.runs.try_run.measured_in_turns", lambda _: [0.01, 0.4])
    with pytest.raises(RunError, match="warmup_steps"):
        campaign.try_change({"train.eps": 1e-7, "train.warmup_steps": 5}, pairs=3)
    assert kinds(campaign)[-2:] == ["ended", "head"]
    monkeypatch.setattr("gptworks.runs.try_run.measured_in_turns", judging.in_turns)
    assert campaign.try_change(GOOD).accepted


def test_a_try_that_trains_shows_its_pairs_so_far(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, float]]()

    def watched(recipe: Any, *rest: Any) -> bool:
        found = campaign.records
        seen.append((len(found.tries[0].gains), campaign.pair_seconds(found)))
        return judging.train(recipe, *rest)

    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", watched)
    campaign.try_change(SAME, pairs=6)
    assert [pairs for pairs, _ in seen] == [run // 2 for run in range(len(seen))] and len(seen) >= 6
    assert {round(seconds) for pairs, seconds in seen if pairs >= 3} == {4}


def test_time_before_a_kill_stays_used(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(recipe: Any, *rest: Any) -> bool:
        if recipe.run_dir.name == "03-after":
            raise KeyboardInterrupt
        return judging.train(recipe, *rest)

    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", killed)
    with pytest.raises(KeyboardInterrupt):
        campaign.try_change(SAME, pairs=20)
    campaign.close()
    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", judging.train)
    again = Campaign(campaign.folder)
    used, per_pair = again.records.used_seconds, again.pair_seconds(again.records)
    one = again.try_change(SAME, pairs=20)
    assert used >= 12 and again.records.used_seconds >= 4 * len(one.gains)
    assert again.pair_seconds(again.records) == pytest.approx(per_pair, rel=0.1) == 4
    again.close()


def test_the_final_comparison_trains_the_champion(campaign: Campaign) -> None:
    """Changes of a section and of its settings follow one another, in each order."""
    changes: list[dict[str, Any]] = [
        {"train.rate_factors.matrices": 2.0, "train.learning_rate": 0.05},
        {"train.rate_factors": {"embeddings": 2.0}, "train.learning_rate": 0.03},
        {"train.rate_factors.matrices": 3.0, "train.learning_rate": 0.01},
    ]
    for change in changes:
        assert campaign.try_change(change).accepted
    champion = campaign.champion().train
    assert (champion.rate_factors.matrices, champion.rate_factors.embeddings) == (3.0, 2.0)
    campaign.finish()
    assert load_recipe(campaign.folder / "final" / "after.yaml").train == champion


def test_a_change_to_a_section_of_an_earlier_try_replaces_what_is_inside_it(campaign: Campaign) -> None:
    campaign.try_change({"train.rate_factors.matrices": 2.0, "train.learning_rate": 0.1001}, pairs=3)
    forked = campaign.try_change({"train.rate_factors": {"embeddings": 2.0}}, of_try=1, pairs=3)
    changed = load_recipe(campaign.folder / "tries" / "002" / "after.yaml").train
    assert changed.rate_factors.matrices == 1.0 and changed.rate_factors.embeddings == 2.0
    assert changed.learning_rate == 0.1001 and len(forked.changes) == 2


def test_the_last_line_says_what_is_not_known_about_the_time(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign.try_change(GOOD)
    ratios = iter([1.5, 1.9, 2.2, 1.6, 2.4])
    monkeypatch.setattr("gptworks.runs.try_run.measured_in_turns", lambda _: [0.1, 0.1 * next(ratios)])
    monkeypatch.setattr("gptworks.runs.try_results.SPEED_ERROR", 1e-6)
    line = campaign.finish()["line"]
    assert "at equal tokens (the same tokens take 1.89 times as long with the change" in line


def test_a_run_is_stopped_when_the_time_for_tries_is_over(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change may make one run very slow; the time for the final comparison is not touched."""
    asked = list[object]()

    def slow(recipe: Any, stop_asked: Callable[[], object], report: Any) -> bool:
        asked.append(stop_asked())
        clock[0] += 4000.0
        asked.append(stop_asked())
        return False

    clock = [0.0]
    monkeypatch.setattr("gptworks.judge.campaign.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", slow)
    one = campaign.try_change(GOOD, pairs=3)
    assert asked == [False, True] and not one.gains and one.is_open and one.seconds == 4000


def test_the_end_compares_on_sealed_text_with_fresh_seeds_and_ends_the_campaign(campaign: Campaign) -> None:
    campaign.try_change(GOOD)
    final = campaign.finish()
    assert len(final["gains"]) == 5 and final["low"] < 0.05 < final["high"]
    assert final["line"].startswith("+0.0") and "over 5 fresh seeds on text that no try has seen" in final["line"]
    assert campaign.finish() == final
    with pytest.raises(UserError, match="the campaign has ended"):
        campaign.try_change(BAD)
    assert "over 5 fresh seeds" in (campaign.folder / "judge.html").read_text()


def test_without_an_accepted_change_the_sealed_text_stays_sealed(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign.try_change(BAD, pairs=3)
    monkeypatch.setattr("gptworks.judge.final.sealed_loss", None)
    assert campaign.finish()["line"] == "no gain survived (1 try, 0 accepted)"


def test_the_budget_ends_tries_but_leaves_time_for_the_final_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging.without_training(monkeypatch)
    recipe = judging.write_recipe(tmp_path)
    with pytest.raises(UserError, match="one try and the final comparison, with runs of 20 steps, take about 192 s"):
        Campaign.create(recipe, tmp_path / "short", budget_seconds=150, steps=20)
    campaign = created(tmp_path, budget_seconds=230)
    clock = [0.0]
    monkeypatch.setattr(
        "gptworks.judge.campaign.time.monotonic", lambda: clock.__setitem__(0, clock[0] + 20) or clock[0]
    )
    one = campaign.try_change(SAME, pairs=20)
    assert len(one.gains) < 8 and one.is_open
    with pytest.raises(UserError, match="of the budget are left for tries"):
        campaign.try_change(GOOD)
    assert campaign.finish()["line"].startswith("no gain survived")
    campaign.close()


def test_a_verdict_waits_for_the_time_of_a_step() -> None:
    """Step times that seem to differ may be noise; until that is known, nothing is decided, not even a harm."""
    one = Tried(1, ("train.learning_rate=0.2",), 0, "", 0.004, state="judged", gains=[-0.2, -0.21, -0.205])
    assert one.words(0.005, "nats").startswith("harm: -0.2050 nats (95%:")
    one.is_time_open = True
    assert one.words(0.005, "nats").startswith("not decided: -0.2050 nats") and not one.decided(0.005)
