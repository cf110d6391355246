"""`gptworks export --format html`: one page in which the model computes what the engine computes."""

import errno
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import chats
import tiny
from browser import HOSTILE
from gptworks.chat_template import BUILT_IN
from gptworks.checkpoint import load_run
from gptworks.cli import app
from gptworks.errors import RunError, UserError
from gptworks.infer.backends import native
from gptworks.infer.fitting import ContextExceeded, fit_conversation
from gptworks.infer.sampling import SamplingSettings, filter_whole
from gptworks.interop.html_file import browser, export_html, exporting
from gptworks.interop.html_file.shown import how_made
from gptworks.interop.html_file.words import as_javascript, words_of
from gptworks.kernels import wasm
from gptworks.kernels.build import Unavailable
from gptworks.kernels.wasm import build
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.metrics import LOG, MetricsLog
from histories import validation

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
needs_clang = pytest.mark.skipif(
    shutil.which("clang") is None or shutil.which("wasm-ld") is None, reason="needs clang and lld"
)
JS = Path(exporting.__file__).with_name("js")


@pytest.fixture(autouse=True)
def _node_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check in Node, which starts faster than a browser; test_browser_html_check.py has the browser."""
    monkeypatch.setenv(browser.BROWSER, "")


def make_run(folder: Path, tokenizer: dict[str, Any] | None = None, **model: Any) -> Path:
    """Return a run of a few steps; settings of the model differ from `tiny`'s."""
    folder.mkdir(exist_ok=True, parents=True)
    tree = tiny.recipe_tree(folder, max_steps=4, evaluate_every=4, checkpoint_every=4)
    tree["model"] |= {"dropout_residual": 0.0, "dropout_attention": 0.0, "context_length": 128} | model
    tree["tokenizer"] = tokenizer or {"type": "bpe", "vocab_size": 300}
    train(parse_recipe(tree))
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("html"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuned run whose card, template and texts hold markup; its tokens spell markup too."""
    folder = tmp_path_factory.mktemp("hostile")
    markup = f"</script><script>alert(1)</script> <!-- {HOSTILE} & more\n"
    (folder / "text.txt").write_text(markup * 800, encoding="utf-8")
    learns = {"max_steps": 20, "evaluate_every": 20, "checkpoint_every": 20, "learning_rate": 0.01}
    base = chats.base_tree(folder, **learns)
    base["tokenizer"] |= {"vocab_size": 280}
    train(parse_recipe(base))
    template = folder / "template.jinja"
    template.write_text(BUILT_IN["chatml"] + "{# </script><script>alert(1)</script> #}", encoding="utf-8")
    tree = chats.tune_tree(folder, **learns, sample_prompts=[markup[:60]])
    tree["tokenizer"]["chat_template"] = str(template)
    train(parse_recipe(tree))
    run = folder / "tuned"
    private = f"{run} `/home/alice/texts`, C:\\Users\\alice\\texts\\, https://alice:secret@example.org/texts"
    (run / "model-card.md").write_text(
        f"# {HOSTILE}\n{markup}{private} \u202e\x1b[31m" + "x" * 1_000_000, encoding="utf-8"
    )
    outcome = json.loads((run / "outcome.json").read_text())
    outcome["training"] |= {HOSTILE: markup, "licence": "[ours](javascript:alert(1)) \u202e\x1b[31m <!--"}
    (run / "outcome.json").write_text(json.dumps(outcome))
    return run


def in_node(folder: Path, code: str, given: Any) -> Any:
    """Return what a module prints as JSON; `given` is there as JSON."""
    (folder / "given.json").write_text(json.dumps(given), encoding="utf-8")
    script = folder / "code.mjs"
    script.write_text(
        f'import {{ readFileSync }} from "node:fs";\n'
        f"const given = JSON.parse(readFileSync({json.dumps(str(folder / 'given.json'))}));\n{code}",
        encoding="utf-8",
    )
    done = subprocess.run(["node", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------------------ the module


def test_the_module_is_built_of_the_sources_that_are_here() -> None:
    assert wasm.SUMS.read_text(encoding="utf-8").strip() == build.sum_of_sources(), (
        "the kernels changed: run python -m gptworks.kernels.wasm.build"
    )


@needs_clang
@needs_node
def test_a_module_that_is_built_here_computes_the_same(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.build()
    assert len(made) < 200_000
    monkeypatch.setattr(exporting, "module", lambda: made)
    found = export_html(run, tmp_path / "model.html").check
    assert found is not None
    assert found.greedy_tokens == 64


# -------------------------------------------------------------------------------------------------------- the file


@needs_node
@pytest.mark.parametrize("weights", ["int8", "int4", "bf16", "fp32"])
def test_a_file_computes_what_the_engine_computes(run: Path, tmp_path: Path, weights: Any) -> None:
    said: list[str] = []
    made = export_html(run, tmp_path / "model.html", weights=weights, report=said.append)
    assert made.check is not None
    assert made.check.greedy_tokens == 64
    assert made.check.texts > 500
    assert "tokens a second" in said[0]
    assert made.bytes < 1.25 * made.weight_bytes + 900_000


@needs_node
@pytest.mark.parametrize(
    "settings",
    [
        {"position": "learned", "norm": "layernorm", "norm_bias": True, "attention_bias": True, "mlp_bias": True,
         "mlp": "gelu", "qk_norm": False},
        {"n_heads": 4, "n_kv_heads": 2, "d_head": 16, "window": 16, "window_pattern": ["window", "full"]},
        {"n_future_tokens": 2, "parallel_residual": True, "mlp": "geglu", "tie_embeddings": False, "position": "none"},
        {"bigram_vocab_size": 300},
        {"rope_fraction": 0.5, "logit_divisor": 2.0, "embedding_scale": 3.0, "residual_scale": 0.5},
    ],
    ids=["like-gpt2", "groups-and-windows", "parallel", "pairs", "scales"],
)  # fmt: skip
def test_architectures(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = export_html(make_run(tmp_path, **settings), tmp_path / "model.html").check
    assert found is not None
    assert found.greedy_tokens == 64


@needs_node
@pytest.mark.parametrize(
    "tokenizer",
    [
        {"type": "char"},
        {"type": "word", "vocab_size": 200},
        {"type": "bpe", "vocab_size": 300, "pattern": "gpt2"},
        {"type": "bpe", "vocab_size": 300, "pattern": "llama3"},
        {"type": "bpe", "vocab_size": 300, "added_tokens": ["<|one|>"]},
    ],
    ids=["char", "word", "gpt2", "llama3", "added"],
)
def test_tokenizers(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    assert export_html(make_run(tmp_path, tokenizer), tmp_path / "model.html").check is not None


@needs_node
def test_a_quantized_run_keeps_its_weights(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["quantize", str(run), str(tmp_path / "four"), "--weights", "int4"])
    assert done.exit_code == 0, done.output
    made = export_html(tmp_path / "four", tmp_path / "model.html")
    assert made.weights == "int4, int8"
    assert made.check is not None


@needs_node
def test_conversations_have_the_ids_of_the_run_s_template(hostile: Path, tmp_path: Path) -> None:
    found = export_html(hostile, tmp_path / "model.html").check
    assert found is not None
    assert found.chats == 3


@needs_node
def test_a_conversation_that_is_too_long_is_refused_in_python_s_words(tmp_path: Path) -> None:
    class Longer:
        def encode(self, messages: list[Any], **_: Any) -> list[int]:
            return [0] * (1000 * len(messages))

    system, user, answer = ({"role": role, "content": "x"} for role in ("system", "user", "assistant"))
    conversations = [[user], [system, user], [user, answer, user], [system, user, answer, user], [system]]
    said = []
    for messages in conversations:
        with pytest.raises(ContextExceeded) as refused:
            fit_conversation(Longer(), messages, 900, 10)  # type: ignore[arg-type]
        said.append(str(refused.value))
    code = f"""
import {{ ChatTemplate }} from "{JS / "conversation.js"}";
const fits = {{ encode: (messages) => Array(1000 * messages.length).fill(0) }};
const said = given.map((messages) => {{
  try {{
    ChatTemplate.prototype.fit.call(fits, messages, 900, 10);
  }} catch (error) {{
    return error.message;
  }}
}});
console.log(JSON.stringify(said));
"""
    assert in_node(tmp_path, code, conversations) == [one[0].upper() + one[1:] for one in said]


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3]
)
def test_a_template_that_renders_nothing_is_left_out(hostile: Path, tmp_path: Path, source: str) -> None:
    run = shutil.copytree(hostile, tmp_path / "run")
    (run / "tokenizer" / "sums.json").unlink()
    (run / "tokenizer" / "chat_template.jinja").write_text(source, encoding="utf-8")
    found = export_html(run, tmp_path / "model.html", verify=False)
    assert "the page has no conversations" in " ".join(found.notes)
    assert '"chat":null' in found.file.read_text(encoding="utf-8")


def test_without_browser_and_node_a_file_is_unchecked_and_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "model.html"), "--format", "html"])
    assert done.exit_code == 0, done.output
    assert "unchecked: there is no Chromium, Chrome or Edge here" in done.output


def test_without_the_engine_a_file_is_unchecked_and_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library() -> None:
        raise Unavailable("there is no C++ compiler (g++ or clang++)")

    monkeypatch.setattr(native, "library", library)
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "model.html"), "--format", "html"])
    assert done.exit_code == 0, done.output
    assert "unchecked: there is no C++ compiler" in done.output
    assert (tmp_path / "model.html").exists()


def browser_that(does: str, folder: Path) -> str:
    program = folder / "browser"
    program.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    program.chmod(0o755)
    return str(program)


@needs_node
def test_where_a_browser_does_not_start_node_computes_and_the_report_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(browser.BROWSER, browser_that("exit 1", tmp_path))
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "model.html"), "--format", "html"])
    assert done.exit_code == 0, done.output
    assert "equal in Node" in done.output
    assert "the page itself is unchecked: the browser ended" in done.output


def test_a_browser_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(browser.BROWSER, browser_that("sleep 60", tmp_path))
    monkeypatch.setattr(browser, "START_SECONDS", 0.3)
    with pytest.raises(browser.Unavailable, match="does not answer"), browser.opened(tmp_path / "page.html", 1):
        pass


def test_a_browser_that_is_named_must_be_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(browser.BROWSER, "netscape")
    refused(run, tmp_path / "model.html", "GPTWORKS_BROWSER=netscape: there is no such program")


@needs_node
def test_a_file_that_differs_is_not_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shuffled(tokenizer: Any) -> dict[str, Any]:
        words = words_of(tokenizer)
        return words | {"names": words["names"][:5] + words["names"][6:] + words["names"][5:6]}

    monkeypatch.setattr(exporting, "words_of", shuffled)
    with pytest.raises(RunError, match=r"token ids of .* and not the tokenizer's"):
        export_html(run, tmp_path / "model.html")
    assert not (tmp_path / "model.html").exists()


@pytest.mark.parametrize("split", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_nothing_half_written_is_left(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: bool, fault: BaseException
) -> None:
    def some(content: Any) -> Any:
        yield b"weights"
        raise fault

    monkeypatch.setattr(exporting, "blocks", some)
    with pytest.raises((RunError, KeyboardInterrupt)):
        export_html(run, tmp_path / "out.html", split=split)
    assert list(tmp_path.iterdir()) == []


@needs_node
def test_a_folder_for_a_host_computes_what_the_engine_computes(run: Path, tmp_path: Path) -> None:
    made = export_html(run, tmp_path / "out", split=True)
    assert made.check is not None
    assert made.check.greedy_tokens == 64
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert [name.partition("-")[0] for name in names] == ["_headers", "index.html", "kernels", "weights"]
    assert made.bytes < made.weight_bytes + 900_000


def test_a_page_names_no_place_of_the_machine_and_says_how_the_model_was_made(hostile: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.html"
    export_html(hostile, file, verify=False)
    text = file.read_text(encoding="utf-8")
    assert [word for word in (str(hostile.parent), "alice", "secret") if word in text] == []
    shown = text.partition('id="page">')[2].partition("</script>")[0]
    assert [code for code in ("\\u202e", "\\u001b") if code in shown] == []
    how = json.loads(shown)["page"]["how"]
    assert how["began"] == "base"
    assert how["losses"][-1][0] == how["steps"] == 20
    assert how["rows"]["ended"] == "finished, step 20"
    assert how["data"]["documents"] > 0


@pytest.mark.parametrize(("n", "kept"), [(150, 150), (200, 200), (1000, 168)])
def test_a_page_has_all_held_out_losses_that_fit(n: int, kept: int, run: Path, tmp_path: Path) -> None:
    one = Path(shutil.copytree(run, tmp_path / "run"))
    (one / LOG).unlink()
    log = MetricsLog(one / LOG, 0)
    for step in range(1, n + 1):
        log.write(validation(step, 2.0))
    log.close()
    losses = how_made(load_run(one))["losses"]
    assert len(losses) == kept and losses[-1] == (n, None, 2.0)


# ---------------------------------------------------------------------------------------------------- what is refused


def refused(run: Path, out: Path, match: str, **options: Any) -> None:
    with pytest.raises(UserError, match=match):
        export_html(run, out, **options)
    assert not out.exists() or out.stat().st_size == 0


def test_refusals_name_what_is_missing(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there.html"
    there.touch()
    refused(run, there, "exists")
    refused(run, tmp_path / "model.txt", "a name that ends in .html")
    refused(run, tmp_path / "model.html", "it must be one of int8, int4, bf16, fp32", weights="int3")
    refused(make_run(tmp_path / "experts", n_experts=4), tmp_path / "model.html", "it has no mixture of experts")
    refused(make_run(tmp_path / "odd", d_head=12), tmp_path / "model.html", "d_head=12 is not a multiple of 16")
    monkeypatch.setattr(exporting, "MOST_PARAMETERS", 1000)
    refused(run, tmp_path / "model.html", "a page holds 1,000")


@pytest.mark.parametrize("pattern", [r"a++", r"(?>a)", r"[a&&b]", r"^a", r"\Aa", r"[[:alpha:]]"])
def test_a_pattern_that_is_not_translated_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="which the page does not read"):
        as_javascript(pattern)


# ---------------------------------------------------------------------------------------------------- sampling


@needs_node
def test_filters_keep_the_engine_s_tokens(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    settings = [
        {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    ]  # fmt: skip
    rows = (3 * torch.randn(8, 200, generator=generator)).round(decimals=1)  # some are tied
    cases = [(row, SamplingSettings(**one)) for one in settings for row in rows]
    kept = [
        (filter_whole(row[None] / one.temperature, one)[0] > -torch.inf).nonzero()[:, 0].tolist() for row, one in cases
    ]
    code = f"""
import {{ Sampler }} from "{JS / "sampling.js"}";
const kept = given.map(([logits, settings]) => {{
  const sampler = new Sampler({{ seed: 1, repetition_penalty: 1, ...settings }}, [], []);
  return [...sampler.filtered(Float32Array.from(logits, (x) => x / settings.temperature))].sort((a, b) => a - b);
}});
console.log(JSON.stringify(kept));
"""
    given = [
        (row.tolist(), {name: getattr(one, name) for name in ("temperature", "top_k", "top_p", "min_p")})
        for row, one in cases
    ]
    assert in_node(tmp_path, code, given) == kept


@needs_node
def test_a_text_ends_before_its_stop_and_a_seed_repeats_it(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "model.html"
    export_html(run, page, verify=False)
    code = f"""
import {{ runInThisContext }} from "node:vm";
const text = readFileSync({json.dumps(str(page))}, "utf8");
const found = [...text.matchAll(/<script[^>]*id="([^"]+)"[^>]*>([^]*?)<\\/script>/g)];
const blocks = new Map(found.map((one) => [one[1], one[2]]));
globalThis.navigator ??= {{ platform: "" }};
runInThisContext([...text.matchAll(/<script>([^]*?)<\\/script>/g)].at(-1)[1]);
const model = await globalThis.gptworks.load((id) => blocks.get(id));
const settings = {{
  temperature: 0.8, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, frequency_penalty: 0, presence_penalty: 0,
  max_tokens: 40, min_tokens: 0, stop: [], ignore_eos: true, logit_bias: {{}}, seed: 5,
}};
const write = async (changes, request = {{ prompt: "line 1" }}) => {{
  const events = [];
  for await (const event of model.generate({{ ...request, settings: {{ ...settings, ...changes }}, n_top: 3 }}))
    events.push(event);
  return events;
}};
const said = (events) => events.map((one) => (one.type === "start" ? "" : one.text)).join("");
const refused = [];
for (let i = 0; i < 2; i++)
  try {{
    model.engine.room(2 ** 32 - 64);
  }} catch (error) {{
    refused.push(error.message);
  }}
const whole = await write({{}});
const again = await write({{}});
const stop = said(whole).slice(10, 13);
const greedy = await write({{ temperature: 0 }});
const stopped = await write({{ stop: [stop] }});
const scored = await write({{ max_tokens: 1 }}, {{ prompt: "line 1", score_prompt: true }});
const ended = stopped.at(-1).reason;
console.log(JSON.stringify({{
  refused, whole: said(whole), again: said(again), stop, stopped: said(stopped), ended,
  greedy: greedy.filter((one) => one.type === "token").map((one) => one.rank), tokens: greedy.at(-1).generated,
  prompt: scored[0].tokens.map((one) => one.logprob),
}}));
"""
    found = in_node(tmp_path, code, None)
    assert found["refused"] == ["the browser grants no more memory"] * 2, "and the page computes on"
    assert found["again"] == found["whole"]
    assert found["stopped"] == found["whole"][: found["whole"].index(found["stop"])]
    assert found["ended"] == "stop"
    assert found["greedy"] == [1] * 40
    first, *rest = found["prompt"]
    assert first is None
    assert all(logprob < 0 for logprob in rest)
