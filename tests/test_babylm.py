"""BabyLM's recipe on its stand-in, in small: from the files to an exported model and figures of pairs of sentences."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from gptworks.api import evaluate, train
from gptworks.data.sources.choose import choose_source
from gptworks.interop.huggingface import export_huggingface
from gptworks.recipe import load_recipe

BENCH = Path(__file__).parents[1] / "bench"
SHARE = 0.004
SMALLER = (
    "model.context_length=64", "model.n_layers=2", "model.d_model=32", "model.n_heads=2", "tokenizer.vocab_size=400",
    "train.max_steps=6", "train.batch_size=4", "train.evaluate_every=3", "train.sample_tokens=5",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        return importlib.import_module("babylm")


@pytest.fixture(scope="module")
def stand_in(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("babylm")
    bench.write(folder, SHARE, n_pairs=40)
    return folder


def test_the_stand_in_has_the_files_and_the_sizes_of_the_corpus(
    bench: ModuleType, stand_in: Path, tmp_path: Path
) -> None:
    assert sum(kind.n_bytes for kind in bench.FILES.values()) == 54_351_399
    files = sorted((stand_in / "train_10M").iterdir())
    assert [file.name for file in files] == [f"{name}.train" for name in bench.FILES]
    assert [file.stat().st_size for file in files] == [int(kind.n_bytes * SHARE) for kind in bench.FILES.values()]
    n_words = sum(len(file.read_text(encoding="utf-8").split()) for file in files)
    assert n_words / SHARE == pytest.approx(10_000_000, rel=0.03)
    bench.write(tmp_path, SHARE, n_pairs=40)
    for file in [*files, stand_in / "pairs.jsonl"]:
        assert (tmp_path / file.relative_to(stand_in)).read_bytes() == file.read_bytes()


def test_the_sentences_of_a_pair_differ_in_one_word(stand_in: Path) -> None:
    pairs = [json.loads(line) for line in (stand_in / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(pairs) == 40 and len({pair["UID"] for pair in pairs}) == 2
    for pair in pairs:
        good, bad = pair["sentence_good"].split(), pair["sentence_bad"].split()
        assert len(good) == len(bad) and sum(map(str.__ne__, good, bad)) == 1


@pytest.mark.parametrize("ending", [".train", ".train.txt"])
def test_the_recipe_reads_the_files_under_the_names_of_either_year(ending: str, stand_in: Path, tmp_path: Path) -> None:
    for file in (stand_in / "train_10M").iterdir():
        (tmp_path / f"{file.stem}{ending}").write_bytes(file.read_bytes())
    [settings] = load_recipe("babylm", [f"data.sources.0.path={tmp_path}"]).data.sources
    source = choose_source(settings)
    assert len(source.files()) == 6
    texts = [piece.text for piece in source.documents()]
    assert {text.count("\n") for text in texts[:-1]} >= {settings.lines}
    assert "".join(texts) == "".join(file.read_text(encoding="utf-8") for file in sorted(tmp_path.iterdir()))


def test_the_recipe_trains_exports_and_answers_pairs(stand_in: Path, tmp_path: Path) -> None:
    places = (f"data.sources.0.path={stand_in / 'train_10M'}", f"data.cache_dir={tmp_path}", f"run_dir={tmp_path}/run")
    train("babylm", *SMALLER, *places)
    exported = export_huggingface(tmp_path / "run", tmp_path / "hf")  # transformers loads it and computes the same
    assert exported.architecture == "Qwen3ForCausalLM" and exported.verification is not None
    [found] = evaluate(tmp_path / "run", task=stand_in / "pairs.yaml").evaluations
    assert found.n_items == 40 and 0 < found.metrics["accuracy"].value < 1
