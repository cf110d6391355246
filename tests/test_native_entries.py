"""Every argument of the kernels' functions is checked, and no failure in one of them ends the process.

A function that is added to `entries.ENTRIES` is tested here as soon as kernel_calls.py has a right call of it.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernel_calls
from commands import run as run_python
from gptworks.kernels import entries, passes
from gptworks.kernels.build import SOURCES, Unavailable
from gptworks.kernels.entries import ENTRIES, INTEGER, POINTER
from gptworks.kernels.library import library
from kernel_calls import Call

REFUSED = (ValueError, IndexError)

FREE = {("muon_updates", "polynomials", 0), ("cross_entropy", "logits", 1)}
"""Dimensions of tensors that are bound to nothing else: the iterations, and columns, which targets bound."""

NUMBERS_OUT_OF_BOUNDS = (-1, -(2**63), 2**40 + 1, 2**63 - 1)


@pytest.fixture(scope="module", autouse=True)
def there() -> None:
    try:
        library()
    except Unavailable as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture(scope="module")
def calls() -> Iterator[list[Call]]:
    with_models = kernel_calls.of_models()
    yield [call for _, call in with_models] + kernel_calls.without_models()
    del with_models


def names(kind: str) -> list[tuple[str, str]]:
    """Return every function with each of its tensors, or with each of its integer arguments."""
    if kind == "tensors":
        return [(name, tensor.rstrip("?")) for name, entry in ENTRIES.items() for tensor in entry.tensors]
    return [(name, n) for name, entry in ENTRIES.items() for n, type_of in entry.numbers if type_of is INTEGER]


def refuses(call: Call, because: str) -> None:
    with pytest.raises(REFUSED) as error:
        call()
        pytest.fail(f"{call.name} took {because}")
    assert re.match(rf"{call.name.replace('_', ' ')}: .{{9,}}", str(error.value)), "it says what"


def of(calls: list[Call], name: str) -> list[Call]:
    found = [call for call in calls if call.name == name]
    assert found, f"kernel_calls.py has no right call of {name}"
    return found


def test_right_calls_succeed(calls: list[Call]) -> None:
    for call in calls:
        call()
    assert {call.name for call in calls} == set(ENTRIES)
    for name, entry in ENTRIES.items():
        given = set.intersection(*({*call.tensors, *call.numbers, "n_threads"} for call in of(calls, name)))
        assert given == {tensor.rstrip("?") for tensor in entry.tensors} | {number for number, _ in entry.numbers}


# ------------------------------------------------------------------------------------------------------- arguments


def wrong(x: Tensor, name: str, tensor: str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that differ from x in one property."""
    for dimension in range(x.dim()):
        if (name, tensor, dimension) not in FREE:
            yield f"one less in dimension {dimension}", x.narrow(dimension, 0, x.size(dimension) - 1).contiguous()
            yield f"one more in dimension {dimension}", torch.cat((x, x.narrow(dimension, 0, 1)), dimension)
    yield "a dimension more", x[None].contiguous()
    yield "a dimension less", x.flatten() if x.dim() > 1 else x[0].clone()
    for dtype in (torch.float16, torch.int8, torch.int64):
        if dtype != x.dtype:
            yield f"{dtype}", x.to(dtype)
    if x.size(-1) > 1:
        yield "every second element", torch.stack((x, x), -1)[..., 0]


@pytest.mark.parametrize(("name", "tensor"), names("tensors"))
def test_a_tensor_of_another_shape_dtype_or_layout_is_refused(calls: list[Call], name: str, tensor: str) -> None:
    for call in of(calls, name):
        x = call.tensors[tensor]
        for because, changed in wrong(x[-1] if isinstance(x, list) else x, name, tensor):
            given = [*x[:-1], changed] if isinstance(x, list) else changed
            refuses(call.with_tensor(tensor, given), f"{tensor} with {because}")


@pytest.mark.parametrize(("name", "tensor"), names("tensors"))
def test_a_descriptor_that_no_tensor_has_is_refused(calls: list[Call], name: str, tensor: str) -> None:
    """Lengths below 0 or beyond all memory, null addresses and ones inside an element, unknown dtypes."""
    for call in of(calls, name):
        x = call.tensors[tensor]
        for change in (
            {"data": None}, {"data": "amid"}, {"kind": -1}, {"kind": 6}, {"kind": 2**62}, {"n_dimensions": -1},
            {"n_dimensions": 6}, {"n_dimensions": 2**62}, {"sizes": -1}, {"sizes": 2**62}, {"sizes": 2**41},
            {"strides": -1}, {"strides": 2**62},
        ):  # fmt: skip
            described = kernel_calls.descriptors(x)
            one = described[len(x) - 1] if isinstance(x, list) else described
            [(part, value)] = change.items()
            if part in ("sizes", "strides"):
                getattr(one, part)[0] = value
            elif value != "amid":
                setattr(one, part, value)
            elif entries.KINDS[one.kind] not in ("int8", "uint8"):
                one.data += 1
            if part == "strides" and one.sizes[0] == 1 and value > 0:
                continue
            refuses(call.with_tensor(tensor, described), f"{tensor} with {change}")


@pytest.mark.parametrize("name", ENTRIES)
def test_a_missing_tensor_is_refused_where_it_is_required(calls: list[Call], name: str) -> None:
    for call in of(calls, name):
        for tensor in ENTRIES[name].tensors:
            if not tensor.endswith("?"):
                refuses(call.with_tensor(tensor, None), f"no {tensor}")
        if ENTRIES[name].has_model:
            refuses(Call(name, call.tensors, call.numbers), "no model")


@pytest.mark.parametrize(("name", "number"), names("numbers"))
def test_a_number_out_of_bounds_is_refused(calls: list[Call], name: str, number: str) -> None:
    for call, value in product(of(calls, name), (*NUMBERS_OUT_OF_BOUNDS, *([0] if number == "n_threads" else []))):
        refuses(call.with_number(number, value), f"{number}={value}")


@pytest.mark.parametrize(
    ("name", "number", "value"),
    [
        ("attention", "dropout", 1.0), ("attention", "dropout", -0.1), ("attention", "dropout", float("nan")),
        ("attention_backward", "softcap", -1.0), ("attention_backward", "softcap", float("nan")),
        ("rotate", "direction", 0.5), ("rotate", "direction", float("nan")),
    ],
)  # fmt: skip
def test_a_setting_that_means_nothing_is_refused(calls: list[Call], name: str, number: str, value: float) -> None:
    for call in of(calls, name):
        refuses(call.with_number(number, value), f"{number}={value}")


@pytest.mark.parametrize(
    ("tensor", "values", "error"),
    [
        ("tokens", -1, IndexError), ("tokens", 77, IndexError), ("tokens", 2**62, IndexError),
        ("slots", 3, IndexError), ("slots", -1, IndexError), ("positions", 64, IndexError),
        ("positions", -(2**63), IndexError), ("wanted", 37, IndexError), ("wanted", -1, IndexError),
        ("slots", 2, ValueError), ("positions", 5, ValueError),
    ],
)  # fmt: skip
def test_rows_that_a_step_cannot_have_are_refused(
    calls: list[Call], tensor: str, values: int, error: type[Exception]
) -> None:
    """Tokens, slots and positions out of range, and rows of a text that are not consecutive."""
    for call in of(calls, "step"):
        x = call.tensors[tensor].clone()
        x[-1] = values
        with pytest.raises(error, match="step: "):
            call.with_tensor(tensor, x)()


def test_a_table_of_other_positions_is_refused_by_name() -> None:
    """A table for one text when there are two, and one that ends too early."""
    x = torch.randn(2, 3, 7, 16)
    for shape in ((1, 1, 7, 8), (2, 1, 6, 8), (6, 8), (7, 9), (2, 2, 7, 8)):
        table = torch.ones(shape)
        assert not passes.rotates(x, table, table) or shape[:2] != (1, 1)
        with pytest.raises(ValueError, match=rf"cos .*\[{', '.join(map(str, shape))}\]"):
            passes.Rotation.apply(x, table, table)


@pytest.mark.parametrize("shape", [(0, 4, 5, 24), (2, 4, 0, 24)])
def test_nothing_is_computed_of_nothing(shape: tuple[int, ...]) -> None:
    """With empty batches and empty texts."""
    x, table = torch.empty(shape), torch.empty(shape[2], 12)
    assert passes.Rotation.apply(x, table, table).shape == shape
    assert passes.Activation.apply(x, None, "gelu").shape == shape
    assert passes.Add.apply(x, x, 1.0).shape == shape
    assert passes.Norm.apply(x, torch.ones(24), None, 1e-5, torch.float32, False, None, 1.0)[1].shape == shape
    assert passes.cross_entropy(torch.empty(0, 7), torch.empty(0, dtype=torch.int64), gradient=True).shape == (0,)


# ------------------------------------------------------------------------------------------------------- the model


def fields(structure: Any, where: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """Yield every integer and address in a structure: its path, the structure that holds it, its name, its type."""
    for name, kind in structure._fields_:
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
            yield from fields(getattr(structure, name), f"{where}{name}.")
        elif kind in (INTEGER, POINTER):
            yield f"{where}{name}", structure, name, kind


MAY_MISS = {
    "bias", "position", "query_norm.weight", "key_norm.weight", "embedding.bias_bytes", "head.bias_bytes",
    "pairs.weight", "pairs.bias_bytes", "norm1_after.weight", "norm2_after.weight",
}  # fmt: skip


def test_every_field_of_a_model_is_checked(calls: list[Call]) -> None:
    """A wrong number or a null address is refused by at least one of the models that have the part."""
    found: dict[str, bool] = {}
    for call in of(calls, "step"):
        model = call.model
        layer = ctypes.cast(model.layers, ctypes.POINTER(entries.Layer))[1]
        for where, structure, name, kind in [*fields(model), *fields(layer, "layers.")]:
            if name in MAY_MISS or where.removeprefix("layers.") in MAY_MISS:
                continue
            before = getattr(structure, name)
            values = (-1, -(2**63)) if name.endswith("_bytes") else (-1, -(2**63), 2**62)  # more memory does no harm
            for value in (None,) if kind is POINTER else values:
                setattr(structure, name, value)
                try:
                    call()
                    refused = False
                except REFUSED:
                    refused = True
                finally:
                    setattr(structure, name, before)
                found[f"{where}={value}"] = found.get(f"{where}={value}", False) or refused
        call()
    assert len(found) > 250 and [where for where, refused in found.items() if not refused] == []


@pytest.mark.parametrize(
    "name",
    ["weight_bytes", "scale_bytes", "bias_bytes", "position_bytes", "rotary_bytes", "history_bytes", "cache_bytes"],
)
def test_memory_one_byte_too_short_is_refused(calls: list[Call], name: str) -> None:
    n_refused = 0
    for call in of(calls, "step"):
        layer = ctypes.cast(call.model.layers, ctypes.POINTER(entries.Layer))[0]
        for where, structure, field, _ in [*fields(call.model), *fields(layer, "layers.")]:
            if field == name and (before := getattr(structure, field)):
                whole = before if "scale" not in name else before - before % 2
                setattr(structure, field, whole - 1)
                refuses(call, f"{where} of {before - 1}")
                setattr(structure, field, before)
                n_refused += 1
    assert n_refused


# ------------------------------------------------------------------------------------------------------- failures


def test_every_exported_function_throws_nothing_and_is_in_the_list() -> None:
    """Checked in the source and in the built library."""
    text = "".join(source.read_text(encoding="utf-8") for source in SOURCES)
    written = re.findall(
        r'extern "C" (\S+(?: \S+)?) \*?gptworks_(\w+)\(([^)]*)\)( noexcept)? \{\s*(return guarded\()?', text
    )
    assert all(noexcept for *_, noexcept, _ in written)
    assert {name for _, name, _, _, guarded in written if guarded} == set(ENTRIES)
    others = {name for _, name, _, _, guarded in written if not guarded}
    assert others == {"error", "layout", "take_amx", "built_with", "widest_panel"}, "these neither allocate nor read"
    for _, name, parameters, _, _ in written:
        if name in ENTRIES:
            kinds = [
                POINTER if "*" in one else INTEGER if "int64_t" in one else entries.REAL
                for one in parameters.split(",")
            ]
            assert kinds == ENTRIES[name].types, name
    found = set(re.findall(rb"\0gptworks_(\w+)(?=\0)", Path(library().functions._name).read_bytes()))
    assert {name.decode() for name in found} == set(ENTRIES) | others


@pytest.fixture(scope="module")
def failing_new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes the kernels' allocations fail, one after the other."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ under Linux")
    built = tmp_path_factory.mktemp("failing") / "failing_new.so"
    source = Path(__file__).with_name("failing_new.cpp")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", built, "-ldl"], check=True)
    return built


FAIL = """
import ctypes, sys, torch
import kernel_calls
from gptworks.errors import RunError
from gptworks.kernels.library import library

shim = ctypes.CDLL(sys.argv[1])
kept = kernel_calls.of_models()
calls = [call for _, call in kept] + kernel_calls.without_models()
total = 0
for call in calls:
    for n_threads in (1, 2):
        call = call.with_number("n_threads", n_threads)
        torch.manual_seed(0)
        call()
        for n in range(1000):
            shim.fail_after(n)
            try:
                call()
            except RunError as error:
                assert "not enough memory" in str(error), error
            else:
                break
            finally:
                failed = shim.fail_after(-1)
        assert n < 1000, call.name
        call()
        total += n
print("failures", total)
"""


def test_an_allocation_that_fails_is_an_error_and_never_the_end(
    failing_new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each allocation of each function fails in turn, with one thread and two: nothing hangs, and the next call
    works."""
    monkeypatch.setenv("LD_PRELOAD", str(failing_new))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    done = run_python("-c", FAIL, failing_new)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 100
