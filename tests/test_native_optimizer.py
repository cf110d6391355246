"""Muon's updates in C++ against the torch code and float64, for any shape, number of threads and non-finite gradients;
and a run that switches between the two."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gptworks.kernels import optimizer as native
from gptworks.kernels.library import Library, forget, training_library
from gptworks.training.optim.muon import Muon, directions, orthogonalized, polynomials

MOMENTUM, EPS = 0.95, 1e-7
SEQUENCES = [("jordan", 5), ("polar_express", 5), ("polar_express", 9)]
SHAPES = [(32, 32), (64, 96), (96, 64), (17, 33), (33, 17), (45, 130), (1, 40), (40, 1), (1, 1)]


@pytest.fixture(autouse=True)
def found() -> Iterator[Library]:
    forget()
    if (library := training_library()) is None:
        pytest.skip("there is no library with wide vectors here")
    yield library
    forget()


def gradients(shape: tuple[int, int], n: int, scale: float = 1.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for _ in range(n)]


def natively(given: list[Tensor], momenta: list[Tensor], sequence: Any = SEQUENCES[0]) -> Tensor:
    library = training_library()
    assert library is not None
    return native.muon_updates(library, given, momenta, MOMENTUM, polynomials(*sequence), EPS)


def by_torch(given: list[Tensor], momenta: list[Tensor], sequence: Any) -> Tensor:
    return orthogonalized(directions(given, momenta, MOMENTUM), polynomials(*sequence), EPS)


def exact(given: Tensor, momentum: Tensor, sequence: Any) -> Tensor:
    """Return the update of one matrix in float64."""
    x = given.double().lerp(momentum.double(), MOMENTUM)
    x /= x.norm().clamp(min=EPS)
    for a, b, c in polynomials(*sequence):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
def test_updates_are_as_exact_as_torchs(shape: tuple[int, int], scale: float, sequence: tuple[str, int]) -> None:
    """Both round to bfloat16 at the same points, so they differ only by the order of sums."""
    given, momenta = gradients(shape, 3, scale), gradients(shape, 3, scale / 10, seed=1)
    ours, theirs = natively(given, momenta, sequence), by_torch(given, momenta, sequence)
    truth = torch.stack([exact(*pair, sequence) for pair in zip(given, momenta, strict=True)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.01)
    errors = [((made - truth).norm() / truth.norm()).item() for made in (ours, theirs)]
    assert errors[0] < 1.1 * errors[1] + 1e-3


def test_a_matrix_of_zeros_and_one_without_numbers_are_left_as_they_are() -> None:
    given, momenta = gradients((40, 24), 4), gradients((40, 24), 4, seed=1)
    expected = natively(given, momenta)
    for tensors in (given, momenta):
        tensors[1].zero_()
    given[2][3, 5], given[3][0, 0] = float("nan"), float("inf")
    found = natively(given, momenta)
    assert torch.equal(found[0], expected[0])
    assert not found[1].any()
    assert found[2].isnan().all() and found[3].isnan().any()


@pytest.mark.parametrize(("shape", "n"), [((64, 96), 1), ((96, 70), 3), ((32, 32), 9)])
def test_the_bits_do_not_depend_on_the_number_of_threads(shape: tuple[int, int], n: int) -> None:
    """Whether each thread has its own matrices, or several share one."""
    given, momenta = gradients(shape, n), gradients(shape, n, seed=1)
    before, found = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 3, 5):
            torch.set_num_threads(n_threads)
            found.append(natively(given, momenta))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(other, found[0]) for other in found[1:])


def steps(optimizer: Muon, matrices: list[nn.Parameter], n: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()


def test_a_run_resumes_with_either_and_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps in torch then ten in C++ from the saved state, against twenty in torch."""
    start = gradients((48, 32), 2) + gradients((32, 32), 3)

    def fresh() -> tuple[Muon, list[nn.Parameter]]:
        matrices = [nn.Parameter(x.clone()) for x in start]
        return Muon(matrices, lr=0.02, weight_decay=0.1), matrices

    called: list[int] = []
    make = native.muon_updates
    monkeypatch.setattr(
        "gptworks.training.optim.muon.muon_updates", lambda *arguments: called.append(1) or make(*arguments)
    )
    monkeypatch.setattr("gptworks.kernels.optimizer.cpu_flags", lambda: {"amx_bf16"})  # which leaves all to torch
    before, matrices = fresh()
    steps(before, matrices, 10)
    saved = before.state_dict()
    states = {index: {key: x.clone() for key, x in state.items()} for index, state in saved["state"].items()}
    kept = [matrix.detach().clone() for matrix in matrices]
    steps(before, matrices, 10, seed=1)
    assert not called

    monkeypatch.setattr("gptworks.kernels.optimizer.cpu_flags", set)
    after, others = fresh()
    after.load_state_dict({"state": states, "param_groups": saved["param_groups"]})
    for matrix, value in zip(others, kept, strict=True):
        matrix.data.copy_(value)
    steps(after, others, 10, seed=1)
    assert len(called) == 2 * 10
    for ours, theirs in zip(others, matrices, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * 0.02 * 0.01)


def test_what_it_does_not_know_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptworks.kernels.optimizer.cpu_flags", set)
    plain = torch.ones(4, 6)
    assert native.muon_library([plain, plain]) is not None
    for other in (plain.double(), plain.mT, plain.bfloat16(), plain.to("meta"), nn.Parameter(plain)):
        assert native.muon_library([plain, other]) is None
    monkeypatch.setenv("GPTWORKS_NATIVE", "0")
    forget()
    assert native.muon_library([plain]) is None
