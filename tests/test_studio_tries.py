"""Tries in the studio: their verdicts and runs, and no files from elsewhere."""

from pathlib import Path
from shutil import copyfile

from browser import open_studio
from gptworks.recipe import load_recipe
from gptworks.runs.try_page import try_lines, write_try_page
from gptworks.runs.try_results import TRY_FILE, Design, Pair, Try, read_try, write_try
from histories import curve, write_run


def make_try(folder: Path) -> None:
    """Write a try of three pairs whose change helps."""
    pairs = []
    for number, (without, with_it) in enumerate([(2.0, 1.9), (2.1, 2.0), (2.2, 2.11)]):
        for arm, loss in (("before", without), ("after", with_it)):
            write_run(folder / "pairs" / f"{number:02d}-{arm}", curve([3.0, loss]), seed=number)
        times = {"before": 0.1, "after": 0.1}
        pairs.append(Pair(number, number, {"before": without, "after": with_it}, {**times}, {**times}, 0.8))
    for side in ("before", "after"):
        copyfile(folder / "pairs" / "00-before" / "recipe.yaml", folder / f"{side}.yaml")
    recipe = load_recipe(folder / "before.yaml")
    found = Try(folder, recipe, recipe, Design(("seed=<b>",), 5, 0.005, 5, 30, 1.0), tuple(pairs))
    write_try(found)
    write_try_page(found)


def test_tries_are_listed_with_their_verdicts_and_runs_and_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name in ("good", "damaged", "linked", "partial"):
        make_try(root / name)
    write_run(root / "alone", curve([3.0, 2.0]))
    (root / "damaged" / TRY_FILE).write_text("{")
    (root / "linked" / TRY_FILE).rename(tmp_path / "secret")
    (root / "linked" / TRY_FILE).symlink_to(tmp_path / "secret")
    log = root / "partial" / "pairs" / "00-after" / "metrics.jsonl"
    log.rename(tmp_path / "log")
    log.symlink_to(tmp_path / "log")
    with open_studio(root) as studio, studio.http() as http:
        answer = http.get("/studio/tries")
        assert answer.status_code == 200, answer.text
        tries = {one["id"]: one for one in answer.json()["tries"]}
        assert tries.keys() == {"good", "damaged", "linked", "partial"}
        good = tries["good"]
        assert (good["state"], good["problem"], good["changes"]) == ("decided", None, ["seed=<b>"])
        assert good["lines"] == list(try_lines(read_try(root / "good"))) and "helps: the loss is" in good["lines"][0]
        assert good["runs"] == [f"good/pairs/{n:02d}-{arm}" for n in range(3) for arm in ("after", "before")]
        assert good["page"] == str(root / "good" / "try.html")
        problems = {"damaged": "is damaged", "linked": "leads out of", "partial": "the runs of its first pair"}
        for name, problem in problems.items():
            assert problem in tries[name]["problem"] and "lines" not in tries[name]

        copyfile(tmp_path / "secret", root / "damaged" / TRY_FILE)
        (root / "good" / "before.yaml").write_text("seed: [")
        (root / "linked" / TRY_FILE).unlink()
        copyfile(tmp_path / "secret", root / "linked" / TRY_FILE)
        (root / "linked" / "try.html").unlink()
        changed = {one["id"]: one for one in http.get("/studio/tries").json()["tries"]}
        assert changed["damaged"]["state"] == "decided" and changed["damaged"]["lines"] == good["lines"]
        assert "before.yaml" in changed["good"]["problem"] and "lines" not in changed["good"]
        assert changed["linked"]["problem"] is None and changed["linked"]["page"] is None
