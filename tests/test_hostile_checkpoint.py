"""Hostile checkpoints whose manifests have valid checksums: each is refused in one message, or loads unchanged.

The command line runs in this process, so that a crash of the interpreter would end the tests.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

import tiny
from gptworks.checkpoint import Checkpoint, checkpoints, load_run
from gptworks.errors import UserError
from gptworks.files import sealed_json, sha256_file
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.runs.quantized import quantize_run
from gptworks.training.loop import train

FIRST = "blocks.0.mlp.up.weight"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    train(parse_recipe(tiny.recipe_tree(folder, max_steps=4, warmup_steps=0, ema_decay=0.9)))
    return folder / "run"


@pytest.fixture(scope="module")
def int8_dir(run_dir: Path) -> Path:
    out = run_dir.parent / "int8"
    quantize_run(run_dir, out, "int8")
    return out


@pytest.fixture(scope="module")
def int4_dir(run_dir: Path) -> Path:
    out = run_dir.parent / "int4"
    quantize_run(run_dir, out, "int4", rounding="nearest")
    return out


def copied(run_dir: Path, to: Path) -> Checkpoint:
    """Copy the run with only its newest checkpoint, and return the checkpoint."""
    shutil.copytree(run_dir, to / "run")
    newest, *older = checkpoints(to / "run")
    for checkpoint in older:
        shutil.rmtree(checkpoint.folder)
    return newest


def seal(checkpoint: Checkpoint, **changes: Any) -> None:
    """Write a manifest that matches the files as they are."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(checkpoint.folder.iterdir())
        if path.name != "manifest.json" and path.is_file()
    }
    tree = {"format": 2, "step": checkpoint.step, "files": files, **changes}
    (checkpoint.folder / "manifest.json").write_text(sealed_json(tree), encoding="utf-8")


def header(tree: object, data: bytes = b"", n_bytes: int | None = None) -> bytes:
    """Return a handmade safetensors file."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return struct.pack("<Q", len(text) if n_bytes is None else n_bytes) + text + data


ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'

FILES: dict[str, bytes] = {
    "empty": b"",
    "cut within the header's length": b"\1\2",
    "a header longer than the file": header({}, n_bytes=99_000_000),
    "a header longer than memory": header({}, n_bytes=2**63),
    "a header that is no text": header(b"\xff\xfe{"),
    "a header that is no mapping": header([]),
    "a header nested without end": header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a name twice": header(b"{" + ONE + b"," + ONE + b"}", bytes(4)),
    "an offset outside": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(4)),
    "a negative size": header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
    "a size beyond 64 bits": header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, bytes(4)),
    "two in one place": header(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, bytes(4)
    ),
    "no tensors": header({}),
    "an unknown dtype": header({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, bytes(4)),
    "a complex number": header({"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_malformed_weight_file_is_refused_by_name(run_dir: Path, tmp_path: Path, name: str, kind: str) -> None:
    checkpoint = copied(run_dir, tmp_path)
    (checkpoint.folder / f"{name}.safetensors").write_bytes(FILES[kind])
    seal(checkpoint)
    if name == "optimizer" and kind == "no tensors":
        return  # a run may begin with an optimizer that remembers nothing: imported ones do
    with pytest.raises(UserError, match=rf"{name}\.safetensors"):
        use(checkpoint, name)


def use(checkpoint: Checkpoint, name: str) -> None:
    run = checkpoint.folder.parents[1]
    if name == "model":
        load_run(run)
    else:
        train(load_recipe(run, (f"run_dir={run}", "train.max_steps=8")), resume=True, change=["train.max_steps"])


def change(function: Callable[[dict[str, Tensor]], None], file: Path) -> None:
    tensors = load_file(file)
    function(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def with_element(value: float) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return make


WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "NaN": (put(FIRST, with_element(float("nan"))), rf"`{FIRST}` holds nan, and every element must be a finite"),
    "infinity": (put(FIRST, with_element(float("inf"))), rf"`{FIRST}` holds inf"),
    "minus infinity in a norm": (put("norm.weight", with_element(float("-inf"))), "`norm.weight` holds -inf"),
    "float64": (put(FIRST, Tensor.double), rf"`{FIRST}` is float64 \[128, 32\] there and float32 \[128, 32\]"),
    "a norm in bf16": (put("norm.weight", Tensor.bfloat16), "`norm.weight` is bfloat16"),
    "integers": (put("norm.weight", lambda x: x.to(torch.int8)), "`norm.weight` is int8"),
    "booleans": (put(FIRST, Tensor.bool), f"`{FIRST}` is bool"),
    "int8 without a scale": (put(FIRST, lambda x: x.to(torch.int8)), "`blocks.0.mlp.up.scale` is missing"),
    "missing": (lambda tensors: tensors.__delitem__(FIRST), f"`{FIRST}` is missing"),
    "one more": (lambda tensors: tensors.update(more=torch.ones(3)), r"`more` is float32 \[3\] there and absent"),
    "transposed": (put(FIRST, lambda x: x.T.contiguous()), rf"`{FIRST}` is float32 \[32, 128\]"),
    "of no size": (put(FIRST, lambda x: x[:0]), rf"`{FIRST}` is float32 \[0, 32\]"),
    "flat": (put(FIRST, lambda x: x.reshape(-1)), rf"`{FIRST}` is float32 \[4096\]"),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_not_the_models_are_refused(run_dir: Path, tmp_path: Path, kind: str) -> None:
    checkpoint = copied(run_dir, tmp_path)
    function, message = WEIGHTS[kind]
    change(function, checkpoint.folder / "model.safetensors")
    seal(checkpoint)
    with pytest.raises(UserError, match=message):
        load_run(tmp_path / "run")


SCALE = "blocks.0.mlp.up.scale"


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float16", "float64", "float8_e4m3fn", "int32"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_scales_of_another_dtype_never_reach_the_kernels(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, dtype: str
) -> None:
    """The kernels would read them as float32, beyond the end of their memory."""
    if (kind, dtype) == ("int4", "float16"):
        return  # as it should be
    checkpoint = copied(request.getfixturevalue(f"{kind}_dir"), tmp_path)
    change(put(SCALE, lambda x: x.to(getattr(torch, dtype))), checkpoint.folder / "model.safetensors")
    seal(checkpoint)
    due = "float32" if kind == "int8" else "float16"
    with pytest.raises(UserError, match=rf"`{SCALE}` is (?i:{dtype}|f8_e4m3) .* and {due} .* in the recipe's model"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        ("int8", lambda x: x[:-1], "`blocks.0.mlp.up.scale` is float32 .127."),
        ("int4", lambda x: x[:, :0], "`blocks.0.mlp.up.scale` is float16 .128, 0."),
        ("int4", with_element(float("nan")), "`blocks.0.mlp.up.scale` holds nan"),
        ("int8", with_element(float("inf")), "`blocks.0.mlp.up.scale` holds inf"),
    ],
)
def test_scales_of_another_size_or_value_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, make: Callable[[Tensor], Tensor], message: str
) -> None:
    checkpoint = copied(request.getfixturevalue(f"{kind}_dir"), tmp_path)
    change(put(SCALE, make), checkpoint.folder / "model.safetensors")
    seal(checkpoint)
    with pytest.raises(UserError, match=message):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "make", "message"),
    [
        ("exp_avg", lambda x: x[:-1], "is float32"),
        ("exp_avg", with_element(float("nan")), "holds nan"),
        ("exp_avg_sq", with_element(-1.0), "holds -1, and no element may be below 0"),
        ("step", lambda x: -x, "no element may be below 0"),
        ("step", lambda x: x.to(torch.int64), r"is int64 \[\] there and float32 \[\] in the run's optimizer"),
        ("exp_avg_sq", None, "is missing there"),
        ("own", lambda x: x.repeat(2), "is float32"),
    ],
)
def test_an_optimizers_state_that_does_not_fit_is_refused_on_resume(
    run_dir: Path, tmp_path: Path, key: str, make: Callable[[Tensor], Tensor] | None, message: str
) -> None:
    checkpoint = copied(run_dir, tmp_path)
    name = f"norm.weight/{key}"
    change(put(name, make) if make else lambda t: t.__delitem__(name), checkpoint.folder / "optimizer.safetensors")
    seal(checkpoint)
    with pytest.raises(UserError, match=rf"optimizer\.safetensors.*`{name}` .*{message}"):
        use(checkpoint, "optimizer")


def state(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tree: {**tree, **changes}


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no mapping": (lambda _: [1, 2], "no JSON object"),
    "a number": (lambda _: 3, "no JSON object"),
    "a text as step": (state(step="4"), "`step`='4'"),
    "a fraction as step": (state(step=4.5), "`step`=4.5"),
    "a negative step": (state(step=-1), "`step`=-1"),
    "another step": (state(step=3), "`step`=3 in the checkpoint of step 4"),
    "negative tokens": (state(tokens=-5), "`tokens`=-5"),
    "NaN seconds": (state(seconds=float("nan")), "`seconds`=nan"),
    "NaN loss": (state(best_loss=float("nan")), "`best_loss`=nan"),
    "NaN gradient": (state(gradient={"n_steps": 1, "mean": float("nan"), "variance": 0.0}), "`gradient.mean`=nan"),
    "gradient of another type": (state(gradient=3), "`gradient`=3"),
    "gradient with another key": (state(gradient={"steps": 3}), "`gradient"),
    "an unknown key": (state(more=1), "`more`=1"),
    "a list as fingerprint": (state(data_fingerprint=[1]), "`data_fingerprint`"),
    "a list as scaler": (state(scaler=[1]), "`scaler`"),
    "a list as best step": (state(best_step=[1]), "`best_step`"),
    "infinity as best step": (state(best_step=float("inf")), "`best_step`=inf"),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_cannot_be_is_refused_on_resume(run_dir: Path, tmp_path: Path, kind: str) -> None:
    checkpoint = copied(run_dir, tmp_path)
    path = checkpoint.folder / "state.json"
    function, message = STATES[kind]
    path.write_text(json.dumps(function(json.loads(path.read_text("utf-8")))), encoding="utf-8")
    seal(checkpoint)
    with pytest.raises(UserError, match=rf"state\.json is damaged: .*{message}"):
        use(checkpoint, "state")
    load_run(tmp_path / "run")  # its weights are whole


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_state_that_is_not_json_is_refused_on_resume(run_dir: Path, tmp_path: Path, text: bytes) -> None:
    checkpoint = copied(run_dir, tmp_path)
    (checkpoint.folder / "state.json").write_bytes(text)
    seal(checkpoint)
    with pytest.raises(UserError, match=r"state\.json is damaged"):
        use(checkpoint, "state")


ENTRY: dict[str, Any] = {"bytes": 1, "sha256": ""}


def described(entry: object) -> dict[str, object]:
    return dict.fromkeys(("model.safetensors", "optimizer.safetensors", "state.json"), entry)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []},
        {"files": None},
        {"files": {}},
        {"files": {"state.json": ENTRY}},
        {"files": described(3)},
        {"files": described({})},
        {"files": described({**ENTRY, "bytes": "1"})},
        {"files": described({**ENTRY, "sha256": 1})},
        {"files": {"../../recipe.yaml": ENTRY}},
        {"format": "2"},
        {"format": None},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_describe_the_files_is_refused(
    run_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    checkpoint = copied(run_dir, tmp_path)
    seal(checkpoint, **changes)
    assert not checkpoint.is_whole
    with pytest.raises(UserError, match=r"manifest\.json (is damaged|has format)"):
        checkpoint.verify()
    with pytest.raises(UserError, match="every checkpoint of"):
        load_run(tmp_path / "run")


def test_a_folder_in_place_of_the_weights_is_refused(run_dir: Path, tmp_path: Path) -> None:
    checkpoint = copied(run_dir, tmp_path)
    path = checkpoint.folder / "model.safetensors"
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        checkpoint.verify()


def test_nan_weights_generate_no_text(run_dir: Path, tmp_path: Path) -> None:
    """The command prints one line and exits with code 2."""
    checkpoint = copied(run_dir, tmp_path)
    change(put(FIRST, with_element(float("nan"))), checkpoint.folder / "model.safetensors")
    seal(checkpoint)
    result = tiny.gptworks("generate", tmp_path / "run", "line")
    assert result.returncode == 2 and result.stdout == ""
    assert f"`{FIRST}` holds nan" in result.stderr and "Traceback" not in result.stderr


def test_tensors_at_the_ends_of_their_range_are_finite(tmp_path: Path) -> None:
    """With the largest and smallest numbers of each dtype, in sizes around the block that is checked at once."""
    from gptworks.tensors import read_tensors

    path = tmp_path / "x.safetensors"
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        info = torch.finfo(dtype)
        for n in (0, 1, 2**20, 2**20 + 1):
            ends = torch.tensor([info.max, info.min, info.tiny, 0.0], dtype=dtype)
            whole = ends.repeat(-(-n // 4))[:n]
            path.write_bytes(save({"x": whole}))
            assert torch.equal(read_tensors(path, None)["x"], whole)
            if n:
                whole[-1] = float("nan")
                path.write_bytes(save({"x": whole}))
                with pytest.raises(UserError, match="`x` holds nan"):
                    read_tensors(path, None)
