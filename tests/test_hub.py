"""`gptworks import ORG/NAME` and `export --push`, against a local substitute for the hub (hub.py)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
import transformers as t
from typer.testing import CliRunner

import chats
import hf
import hub
import tiny
from gptworks.checkpoint import load_run
from gptworks.cli import app
from gptworks.draft import finetuning
from gptworks.errors import RunError, UserError
from gptworks.planning.run import Measured
from gptworks.recipe import load_recipe
from gptworks.training.loop import train

SMALL = {"vocab_size": hf.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "max_position_embeddings": 96}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models by owner and name."""
    folder = tmp_path_factory.mktemp("models")
    plain = folder / "org" / "plain"
    hf.save_theirs(plain, t.LlamaConfig(**SMALL))
    (plain / "README.md").write_text("# A model\n")
    (plain / "onnx").mkdir()
    (plain / "onnx" / "model.safetensors").write_bytes(b"another form")
    hf.save_theirs(folder / "org" / "sharded", t.LlamaConfig(**SMALL), max_shard_size="40KB")
    for name in ("pickled", "gated", "unknown", "untokenized"):
        shutil.copytree(plain, folder / "org" / name)
    (folder / "org" / "pickled" / "model.safetensors").rename(folder / "org" / "pickled" / "pytorch_model.bin")
    (folder / "org" / "unknown" / "config.json").write_text('{"model_type": "mamba"}')
    (folder / "org" / "untokenized" / "tokenizer.json").unlink()
    return folder


@pytest.fixture
def server(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Hub]:
    """The hub that this test's imports and pushes use, with an empty cache and no token."""
    with hub.serving(models) as server:
        server.gated.add("org/gated")
        go_to(server.address, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def go_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the library use another address; it has already read HF_ENDPOINT on import."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def gptworks(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def same(run: Path, other: Path) -> bool:
    ours, theirs = (load_run(folder).model.state_dict() for folder in (run, other))
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_model_of_the_hub_becomes_a_run_that_names_its_commit_and_is_fetched_once(
    server: hub.Hub, models: Path, tmp_path: Path
) -> None:
    made = gptworks("import", "org/plain@v1", tmp_path / "run")
    assert f"org/plain at commit {hub.COMMIT}" in made and "equal in transformers" in made
    assert (
        f"| read from | a `LlamaForCausalLM` of Hugging Face, org/plain at commit {hub.COMMIT} |"
        in (tmp_path / "run" / "model-card.md").read_text()
    )
    assert server.fetched() == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"
    }, "neither the README nor the same weights in other forms"  # fmt: skip
    gptworks("import", models / "org" / "plain", tmp_path / "local", "--no-verify")
    assert same(tmp_path / "run", tmp_path / "local")

    server.requests.clear()
    again = json.loads(gptworks("import", "org/plain", tmp_path / "again", "--no-verify", "--json"))
    assert again["source"] == f"org/plain at commit {hub.COMMIT}" and not server.fetched()
    (tmp_path / "text.txt").write_text("A text of its own, to be evaluated on. " * 8)
    with pytest.raises(UserError, match=r"was imported and has no held-out text.*Give --text FILE"):
        gptworks("evaluate", tmp_path / "run")
    assert "perplexity" in gptworks("evaluate", tmp_path / "run", "--text", tmp_path / "text.txt", "--json")


def test_a_model_in_several_files_is_fetched_whole(server: hub.Hub, models: Path, tmp_path: Path) -> None:
    gptworks("import", "org/sharded", tmp_path / "run", "--no-verify")
    gptworks("import", models / "org" / "sharded", tmp_path / "local", "--no-verify")
    assert len([name for name in server.fetched() if name.endswith(".safetensors")]) > 2
    assert same(tmp_path / "run", tmp_path / "local")


def test_a_model_of_the_hub_is_tuned_by_its_name_and_imported_once(
    server: hub.Hub, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetuning, "measure_speed", lambda *_: Measured(None, None, 1000.0))
    chats.write_jsonl(Path("chats.jsonl"), chats.records(90))
    gptworks("tune", "org/plain@v1", "chats.jsonl")
    recipe = load_recipe("tune.yaml")
    run = recipe.initialize_from
    assert (
        run is not None
        and run.name.startswith("plain-")
        and load_recipe(run).model
        == recipe.model.model_copy(update={"context_length": SMALL["max_position_embeddings"]})
    )
    assert f"org/plain at commit {hub.COMMIT}" in (run / "model-card.md").read_text()
    gptworks("tune", "org/plain", "chats.jsonl", "-o", "again.yaml")
    assert load_recipe("again.yaml").initialize_from == run, "the same commit"
    gptworks("tune", models / "org" / "plain", "chats.jsonl", "-o", "local.yaml")
    local = load_recipe("local.yaml").initialize_from
    assert local is not None and local != run and same(local, run), "a folder of this machine"
    assert train(load_recipe("local.yaml", ["train.max_steps=1", "train.warmup_steps=0"])).step == 1
    for place, words in (
        ("org/absent", "there is no local folder of that name"),
        (tmp_path, "neither a run folder nor a Hugging"),
    ):
        with pytest.raises(UserError, match=words):
            gptworks("tune", place, "chats.jsonl", "-o", "none.yaml")
    Path("adapter").mkdir()
    (Path("adapter") / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter is an adapter: `gptworks import adapter runs/NAME --base FOLDER`"):
        gptworks("tune", "adapter", "chats.jsonl", "-o", "none.yaml")


def test_a_gated_model_is_read_with_the_token_of_an_account_that_may(
    server: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = f"{server.address}/org/gated"
    with pytest.raises(UserError, match=rf"org/gated is gated.* accept it at {page}, and set HF_TOKEN to a token of"):
        gptworks("import", "org/gated", tmp_path / "run")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(UserError, match=rf"account of your token has no access yet: accept the licence at {page}"):
        gptworks("import", "org/gated", tmp_path / "run")
    monkeypatch.setenv("HF_TOKEN", hub.READER)
    gptworks("import", "org/gated", tmp_path / "run", "--no-verify")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "org/absent",
            r"org/absent: there is no local folder of that name, and no model at http.*for a private model set",
        ),
        ("org/plain@v2", r"org/plain@v2: the model is on the hub, but has no branch, tag or commit of that name"),
        (
            "org/pickled",
            r"its weights only in pytorch_model.bin.*org/pickled@refs/pr/1.*save_pretrained\(\"FOLDER\"\)",
        ),
        ("org/unknown", r"model_type `mamba`"),
        ("org/untokenized", r"no tokenizer.json.*AutoTokenizer.from_pretrained"),
        ("org/a--b", r"org/a--b is not a valid name on the hub"),
        ("plain", r"plain: no such folder.*such as HuggingFaceTB/SmolLM2-135M"),
        ("./org/plain", r"./org/plain: no such folder"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_its_weights_are_fetched(
    place: str, message: str, server: hub.Hub, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        gptworks("import", place, tmp_path / "run")
    assert not any("model" in name for name in server.fetched())
    assert not (tmp_path / "run").exists()


def test_no_network_and_no_room_are_named(server: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("gptworks.interop.hub.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(
            RunError, match=r"org/plain needs [\d,]+ bytes, and the disk of the cache .* has 1,000 free"
        ):
            gptworks("import", "org/plain", tmp_path / "run")
    assert "model.safetensors" not in server.fetched()
    gptworks("import", "org/plain", tmp_path / "run", "--no-verify")
    go_to("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(
        RunError, match=r"org/sharded could not be fetched: http://127.0.0.1:9 does not answer.*network"
    ):
        gptworks("import", "org/sharded", tmp_path / "other")
    gptworks("import", "org/plain", tmp_path / "cached", "--no-verify")  # what is in the cache needs no network


def test_the_address_of_the_hub_and_its_cache_are_those_of_the_environment(server: hub.Hub, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "home")}
    made = tiny.gptworks("import", "org/plain", tmp_path / "run", "--no-verify", env=environment)
    assert made.returncode == 0, made.stderr
    assert made.stderr.splitlines() == [
        f"there is no local folder org/plain: looking for it at {server.address}",
        f"fetching 138,952 bytes of org/plain, commit {hub.COMMIT[:12]}",
        "reading a LlamaForCausalLM of 34,208 parameters",
    ], "no progress bars where stderr is no terminal"
    assert (tmp_path / "home" / "hub" / "models--org--plain" / "snapshots" / hub.COMMIT / "config.json").exists()


def test_an_export_is_pushed_whole_once_it_was_verified(
    server: hub.Hub, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gptworks("import", models / "org" / "plain", tmp_path / "run", "--no-verify")
    with pytest.raises(UserError, match=r"--push my/model needs a token with write access: set HF_TOKEN"):
        gptworks("export", tmp_path / "run", tmp_path / "out", "--push", "my/model")
    monkeypatch.setenv("HF_TOKEN", hub.WRITER)
    for options, message in (
        (["--push", "my/model", "--no-verify"], "for a complete and verified model"),
        (["--push", "my/model", "--format", "gguf"], "is for --format=hf"),
        (["--push", "model"], "--push model: give a name on the hub with its owner,"),
    ):
        with pytest.raises(UserError, match=message):
            gptworks("export", tmp_path / "run", tmp_path / "out", *options)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="not equal"):
        patch.setattr("gptworks.interop.huggingface.exporting.verify_folder", _fail)
        gptworks("export", tmp_path / "run", tmp_path / "out", "--push", "my/model")
    assert not server.requests and not (tmp_path / "out").exists()

    (models / "my" / "model").mkdir(parents=True)
    (models / "my" / "model" / "model-00001-of-00002.safetensors").touch()  # of an earlier push
    pushed = gptworks("export", tmp_path / "run", tmp_path / "out", "--push", "my/model")
    assert f"pushed: {server.address}/my/model/commit/{hub.COMMIT}" in pushed
    assert server.created[0]["visibility"] == "private" and server.deleted == ["model-00001-of-00002.safetensors"]
    assert server.received["my/model"] == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    monkeypatch.setenv("HF_TOKEN", hub.READER)
    with pytest.raises(UserError, match=r"your token may not write to http.*/my/model"):
        gptworks("export", tmp_path / "run", tmp_path / "out2", "--push", "my/model")


def _fail(*_: object) -> None:
    raise RunError("not equal")
