"""The optimizer, rate and decay of each parameter; the arithmetic against torch; and saving and restoring the state."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gptworks.config.optimizers import LEAST_IN_8_BITS, MUON_TOGETHER, OPTIMIZERS
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.planning.layout import divided
from gptworks.planning.params import count_parameters, everything
from gptworks.planning.state import trained_state_bytes
from gptworks.tensors import read_tensors
from gptworks.training.distributed.shards import Owners, divided_among_owners
from gptworks.training.optim import adamw_int8, base, muon
from gptworks.training.optim.muon import POLAR_EXPRESS, Muon, orthogonalized, polynomials
from gptworks.training.optim.optimizer import Optimizer, parameter_groups
from gptworks.training.optim.soap import SOAP, begun
from tiny import plain_model, plain_training

CONFIG = plain_model(
    vocab_size=30, context_length=16, n_layers=2, d_model=16, n_heads=2, position="learned", attention_bias=True,
    mlp_bias=True, tie_embeddings=False,
)  # fmt: skip
WIDER = plain_model(vocab_size=30, context_length=16, n_layers=1, d_model=64, n_heads=2, tie_embeddings=False)
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


def model_with_gradients(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_decay_falls_on_matrices_alone_and_every_parameter_is_in_one_group() -> None:
    model = GPT(CONFIG)
    (groups,) = parameter_groups(dict(model.named_parameters()), plain_training(max_steps=1, weight_decay=0.3)).values()
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    for group in groups:
        assert {shapes[name] >= 2 for name in group["names"]} == {group["weight_decay"] == 0.3}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_kind_of_parameter_has_the_rate_of_its_factor(optimizer: str) -> None:
    """Two steps, compared with runs that train each kind at that rate. A factor of 0 changes nothing."""
    factors = {"embeddings": 0.5, "head": 2.0, "matrices": 0.25, "vectors": 0.0}

    def trained(times: float, **given: Any) -> dict[str, torch.Tensor]:
        train = plain_training(
            max_steps=1, optimizer=optimizer, learning_rate=0.01 * times, muon_learning_rate=0.02 * times,
            weight_decay=0, **given,
        )  # fmt: skip
        model = model_with_gradients()
        made = Optimizer(model, train)
        for _ in range(2):
            made.set_rate(0.5)
            made.step(NO_SCALER)
        return model.state_dict()

    found, start = trained(1.0, rate_factors=factors), model_with_gradients().state_dict()
    alone = {kind: trained(factor) for kind, factor in factors.items() if factor}
    kinds = set()
    for name, tensor in found.items():
        table = "head" if name == "untied_head.weight" else "embeddings"
        kind = "vectors" if tensor.ndim < 2 else "matrices" if name.startswith("blocks.") else table
        assert torch.equal(tensor, alone[kind][name] if kind in alone else start[name]), name
        kinds.add(kind)
    assert kinds == factors.keys()


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else() -> None:
    train = plain_training(max_steps=1, optimizer="muon", learning_rate=0.003, muon_learning_rate=0.02)
    (muon,) = parameter_groups(dict(GPT(CONFIG).named_parameters()), train)["muon"]
    assert muon["lr"] == muon["peak_lr"] == 0.02
    assert len(muon["names"]) == CONFIG.n_layers * 6
    assert all(name.startswith("blocks.") and name.endswith("weight") for name in muon["names"])
    assert not any("embedding" in name or "head" in name or "norm" in name for name in muon["names"])


def test_adamw_step_equals_torch_step_by_step() -> None:
    train = plain_training(max_steps=1, learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    ours, theirs = model_with_gradients(), model_with_gradients()
    optimizer = Optimizer(ours, train)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.2},
            {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.005, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False,
    )  # fmt: skip
    optimizer.set_rate(0.5)
    for _ in range(3):
        optimizer.step(NO_SCALER)
        reference.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon", "soap", "int8"])
def test_a_cautious_decay_leaves_weights_alone_that_their_update_takes_away_from_zero(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chen et al. (2025), algorithm 1, in float64, from the updates of the same steps without decay. Scratch memory is
    smaller than a matrix."""
    monkeypatch.setattr(base, "CPU_AT_ONCE", 256 if optimizer == "int8" else 100)  # a multiple of its blocks
    monkeypatch.setattr("gptworks.training.optim.optimizer.LEAST_IN_8_BITS", 200)
    settings = {"optimizer": "adamw", "optimizer_state": "int8"} if optimizer == "int8" else {"optimizer": optimizer}
    rate, decay, n_decayed, n_whole = 0.05, 0.6, 0, 0
    plain, careful = (
        plain_training(max_steps=1, learning_rate=rate, muon_learning_rate=rate, betas=(0.8, 0.9), weight_decay=amount,
                       cautious_weight_decay=True, **settings)
        for amount in (0.0, decay)
    )  # fmt: skip
    models = model_with_gradients(), model_with_gradients()
    optimizers = Optimizer(models[0], plain), Optimizer(models[1], careful)
    for step in range(4):
        before = {name: p.detach().clone() for name, p in models[0].named_parameters()}
        models[1].load_state_dict(before)
        torch.manual_seed(step)
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for one in optimizers:
            one.step(NO_SCALER)
        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            old = before[name].double()
            update = (old - a) / rate
            certain = update.abs() > 1e-4  # of which the difference shows the sign
            decayed = (update * old >= 0) & (torch.tensor(a.ndim) >= 2)
            expected = old - rate * (update + decay * decayed * old)
            torch.testing.assert_close(b[certain].double(), expected[certain], rtol=0, atol=1e-6, msg=name)
            n_decayed, n_whole = n_decayed + decayed.sum().item(), n_whole + a.numel() * (a.ndim >= 2)
    assert 0.2 < n_decayed / n_whole < 0.8


def test_where_all_signs_agree_a_cautious_decay_is_torchs() -> None:
    """Without decay, the bits are the same for any signs."""
    for amount in (0.3, 0.0):
        ends = []
        for careful in (False, True):
            model = model_with_gradients()
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone() if amount else parameter.grad
            train = plain_training(max_steps=1, weight_decay=amount, cautious_weight_decay=careful)
            Optimizer(model, train).step(NO_SCALER)
            ends.append(model.state_dict())
        for key, tensor in ends[0].items():
            torch.testing.assert_close(ends[1][key], tensor, rtol=0, atol=2e-7 if amount else 0)


def test_moments_in_8_bits_are_near_what_they_stand_for() -> None:
    """Over ten decades; a block of zeros stays zero, and a short last block has its own scale."""
    generator = torch.Generator().manual_seed(0)
    values = (
        torch.randn(1000, generator=generator) * torch.logspace(-10, 0, 1000)[torch.randperm(1000, generator=generator)]
    )
    values[256:512] = 0
    codes, scale = torch.zeros(1000, dtype=torch.int8), torch.zeros(adamw_int8.n_scales((1000,)))
    adamw_int8.pack_signed(values.clone(), codes, scale)
    found = adamw_int8.unpack_signed(codes, scale)
    assert scale.tolist() == [part.abs().max().item() for part in values.split(256)] and scale[1] == 0
    large = scale.repeat_interleave(256)[:1000]
    assert ((found - values).abs() <= 0.5 / 127 * (2 * (values.abs() * large).sqrt() + large / 254)).all()
    assert (found * values >= 0).all() and (found[256:512] == 0).all()

    squares, codes = values.square(), torch.zeros(1000, dtype=torch.uint8)
    adamw_int8.pack_unsigned(squares.clone(), codes, scale)
    found = adamw_int8.unpack_unsigned(codes, scale)
    large = scale.repeat_interleave(256)[:1000]
    root = (squares / large).nan_to_num().sqrt().sqrt()
    assert ((found / large).nan_to_num().sqrt().sqrt() - root).abs().max() <= 1.001 / 255
    assert (codes >= 1).all(), "a step divides by the root of what this stands for"


def learned(n_steps: int, **settings: Any) -> tuple[list[float], Optimizer]:
    """Return the losses of a model that learns a text of ten repeating digits, and its optimizer."""
    torch.manual_seed(0)
    model = GPT(WIDER)
    optimizer = Optimizer(model, plain_training(max_steps=n_steps, optimizer="adamw", learning_rate=0.003, **settings))
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(n_steps):
        first, by = torch.randint(10, (8, 1), generator=generator), torch.randint(1, 4, (8, 1), generator=generator)
        rows = (first + by * torch.arange(17)) % 10 + 10 * (torch.rand(8, 17, generator=generator) < 0.1).long()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(NO_SCALER)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def test_a_model_learns_with_moments_in_8_bits_as_with_torchs() -> None:
    """Losses agree within 1% over the last fifty of 120 steps, in which the loss falls to less than a third."""
    whole, small = (learned(120, betas=(0.9, 0.95), optimizer_state=kind) for kind in ("fp32", "int8"))
    ends = [sum(losses[-50:]) / 50 for losses, _ in (whole, small)]
    assert ends[0] < whole[0][0] / 3
    assert abs(ends[1] / ends[0] - 1) < 0.01

    tensors = small[1].state_tensors()
    kept = {key.rpartition("/")[0] for key, x in tensors.items() if x.dtype == torch.int8}
    assert kept == {
        name for name, p in small[1].parameters.items()
        if name.startswith("blocks.") and p.ndim == 2 and p.numel() >= LEAST_IN_8_BITS
    }  # fmt: skip
    count = count_parameters(WIDER)
    planned = trained_state_bytes(count, "adamw", everything(count), "int8")
    assert planned == sum(x.nbytes for key, x in tensors.items() if not key.endswith("/step"))


def test_muon_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the C++ library, whose updates tests/test_native_optimizer.py compares with these."""
    monkeypatch.setattr("gptworks.training.optim.muon.muon_library", lambda tensors: None)
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64)] * 3 + [(96, 64), (64, 96)] * 2 + [(96, 64), (MUON_TOGETHER // 250 + 1, 250)]
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    optimizers = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        if a.numel() < 10**6:
            assert torch.equal(a, b), a.shape
        else:  # one large matrix: products of another kernel, rounded to bfloat16
            torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * 0.02)


def test_gathered_directions_are_freed_before_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are float32, twice the size of the products' operands."""
    monkeypatch.setattr(muon, "muon_library", lambda tensors: None)
    gathered: list[weakref.ref[Tensor]] = []
    make, orthogonalize = muon.directions, muon.orthogonalized

    def noted(gradients: list[Tensor], averages: list[Tensor], momentum: float) -> Tensor:
        gathered.extend(map(weakref.ref, gradients))
        return make(gradients, averages, momentum)

    def checked(x: Tensor, *arguments: Any) -> Tensor:
        assert len(gathered) == 1 and gathered[0]() is None
        return orthogonalize(x, *arguments)

    class Gathers(Owners):
        def _exchange(self, sent: list[list[Tensor]], sizes: list[int], like: Tensor) -> list[Tensor]:
            return [torch.ones(size, dtype=like.dtype) for size in sizes]

    monkeypatch.setattr(muon, "directions", noted)
    monkeypatch.setattr(muon, "orthogonalized", checked)
    owners, parameter = Gathers(), nn.Parameter(torch.ones(8, 4))
    owners.n_parts, owners.ranks, parameter.grad = 2, [0, 1], torch.ones_like(parameter)
    optimizer = Muon([parameter])
    optimizer._updates([[parameter], ()], owners, optimizer.param_groups[0])
    assert gathered


@pytest.mark.parametrize("row_beta", [None, 0.9])
def test_a_rank_that_owns_no_matrix_exchanges_tensors_on_the_parameters_device(row_beta: float | None) -> None:
    """The tensors' device chooses the backend of the exchange, even if they are empty."""
    exchanged: list[Tensor] = []

    class TwoParts(Owners):
        def _exchange(self, sent: list[list[Tensor]], sizes: list[int], like: Tensor) -> list[Tensor]:
            exchanged.extend([like, *(tensor for tensors in sent for tensor in tensors)])
            return [like.new_empty(size) for size in sizes]

    owners, parameter = TwoParts(), nn.Parameter(torch.empty(8, 4, device="meta"))
    owners.n_parts, parameter.grad = 2, torch.empty_like(parameter)
    optimizer = Muon([parameter], row_beta=row_beta)
    optimizer._updates([(), [parameter]], owners, optimizer.param_groups[0])
    assert {tensor.device.type for tensor in exchanged} == {"meta"}


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize(("kind", "n_iterations"), [("jordan", 5), ("polar_express", 3), ("polar_express", 10)])
def test_an_update_has_the_polynomials_of_the_singular_values(
    kind: Any, n_iterations: int, shape: tuple[int, int]
) -> None:
    """In float64, by a singular value decomposition: the singular vectors stay the same."""
    x = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    values = values / values.square().sum(dim=1, keepdim=True).sqrt()
    for a, b, c in polynomials(kind, n_iterations):
        values = a * values + b * values**3 + c * values**5
    found = orthogonalized(x.clone(), polynomials(kind, n_iterations), 1e-7)
    torch.testing.assert_close(found, left @ torch.diag_embed(values) @ right, rtol=0, atol=1e-12)


def test_polar_express_is_the_papers_sequence_and_ends_at_the_polar_factor() -> None:
    """Amsel et al. (2025): on the image of [0.001, 1] under the polynomials before it, each printed polynomial has
    equal errors below and above 1. With the factor for rounding, 5 iterations end within 0.2 of 1, and 10 at 1."""
    values = torch.linspace(0.001, 1, 200_001, dtype=torch.float64)
    made = values
    for a, b, c in POLAR_EXPRESS:
        low, high = made.min(), made.max()
        made = torch.linspace(low, high, 200_001, dtype=torch.float64)
        made = a * made + b * made**3 + c * made**5
        assert made.min() + made.max() == pytest.approx(2, abs=1e-8)

    def after(kind: Any, n_iterations: int) -> torch.Tensor:
        made = values
        for a, b, c in polynomials(kind, n_iterations):
            made = a * made + b * made**3 + c * made**5
        return (made - 1).abs().max()

    assert after("polar_express", 5) < 0.2 < after("jordan", 5)
    assert after("polar_express", 10) < 1e-12
    assert polynomials("polar_express", 2)[1] == pytest.approx((4.107059111542203 / 1.01, -2.9478499167379106 / 1.01**3,
                                                                0.5448431082926601 / 1.01**5))  # fmt: skip


@pytest.mark.parametrize("settings", [{"muon_coefficients": "polar_express"}, {"muon_iterations": 7}])
def test_the_settings_of_muons_iterations_reach_it(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From zero momentum, one step changes each matrix of the blocks by the rate times the update that the recipe
    sets."""
    monkeypatch.setattr("gptworks.training.optim.muon.muon_library", lambda tensors: None)
    train = plain_training(max_steps=1, optimizer="muon", weight_decay=0, muon_learning_rate=0.5, **settings)
    model = model_with_gradients()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    Optimizer(model, train).step(NO_SCALER)
    quintics = polynomials(train.muon_coefficients, train.muon_iterations)
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.ndim == 2:
            assert parameter.grad is not None
            update = orthogonalized(parameter.grad[None].double(), quintics, 1e-7)[0]
            rate = 0.5 * max(1, parameter.size(0) / parameter.size(1)) ** 0.5
            torch.testing.assert_close(parameter - before[name], (-rate * update).float(), rtol=0, atol=0.03)


@pytest.mark.parametrize("native", [False, True])
def test_normuon_gives_each_row_its_own_rate(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Li et al. (2025), algorithm 1, in float64, from Muon's orthogonal updates for the same gradients; an update keeps
    its norm. Rows with larger gradients get no larger steps."""
    if not native:
        monkeypatch.setattr("gptworks.training.optim.muon.muon_library", lambda tensors: None)
    generator = torch.Generator().manual_seed(0)
    shapes, rate, decay = [(24, 16), (24, 16), (16, 40)], 0.05, 0.3
    mine, plain = ([nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    settings: dict[str, Any] = {"lr": rate, "weight_decay": decay, "momentum": 0.8}
    normuon, muon = Muon(mine, **settings, row_beta=0.6), Muon(plain, **settings)
    averages = [torch.zeros(shape[0], dtype=torch.float64) for shape in shapes]
    for _ in range(4):
        before = [parameter.detach().double() for parameter in mine]
        for a, b in zip(mine, plain, strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=generator) * torch.logspace(-2, 2, a.size(0))[:, None]
            b.data.zero_()
        for optimizer in (normuon, muon):
            optimizer.step()
        for i, parameter in enumerate(mine):
            scale = rate * max(1, parameter.size(0) / parameter.size(1)) ** 0.5
            orthogonal = -plain[i].detach().double() / scale
            averages[i] = 0.6 * averages[i] + 0.4 * orthogonal.square().mean(dim=1)
            update = orthogonal / averages[i].sqrt()[:, None]
            update *= orthogonal.norm() / update.norm()
            expected = before[i] * (1 - rate * decay) - scale * update
            torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6)


def soap_twin(state: dict[str, Any], weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Compute SOAP's updates (Vyas et al., 2024, algorithms 3 and 4), with bases refreshed every second step, rate 0.1,
    decay 0.2."""
    left, right, q, p = (state[name].clone() for name in ("left", "right", "left_basis", "right_basis"))
    first, second = (torch.zeros_like(weight) for _ in range(2))
    for step, g in enumerate(gradients, 1):
        first = 0.8 * first + 0.2 * g
        second = 0.9 * second + 0.1 * (q.T @ g @ p) ** 2
        made = (q.T @ first @ p / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
        weight = (1 - 0.1 * 0.2) * weight - 0.1 * q @ made @ p.T
        left, right = 0.9 * left + 0.1 * g @ g.T, 0.9 * right + 0.1 * g.T @ g
        if step % 2 == 0:
            rows, columns = ((x.T @ y @ x).diagonal().sort(descending=True).indices for x, y in ((q, left), (p, right)))
            q, p = torch.linalg.qr(left @ q[:, rows])[0], torch.linalg.qr(right @ p[:, columns])[0]
            second = second[rows][:, columns]
    return weight


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7)])
def test_soap_is_adam_in_the_eigenvectors_of_its_preconditioners(shape: tuple[int, int]) -> None:
    """Five steps in float64, compared with a plain implementation."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    matrix, gradients = nn.Parameter(normal(*shape)), [normal(*shape) for _ in range(5)]
    optimizer = SOAP([{"params": [matrix], "lr": 0.1, "weight_decay": 0.2}], (0.8, 0.9), 1e-8, 2, False, None)
    state = begun(torch.zeros(shape, dtype=torch.float64), 0.9)
    for side, size in zip(("left", "right"), shape, strict=True):
        root = normal(size, 2 * size)
        state[side] = root @ root.T
        state[f"{side}_basis"] = torch.linalg.eigh(state[side]).eigenvectors
    expected = soap_twin(state, matrix.detach().clone(), gradients)
    optimizer.state[matrix] = state
    for gradient in gradients:
        matrix.grad = gradient
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), expected, rtol=0, atol=1e-9)


def test_soaps_first_gradient_makes_its_preconditioners_and_no_step() -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(6, 4))
    before, matrix.grad = matrix.detach().clone(), torch.randn(6, 4)
    optimizer = SOAP([{"params": [matrix], "lr": 0.1, "weight_decay": 0.2}], (0.8, 0.9), 1e-8, 2, False, None)
    optimizer.step()
    assert torch.equal(matrix, before)
    state = optimizer.state[matrix]
    for side, product in (("left", matrix.grad @ matrix.grad.T), ("right", matrix.grad.T @ matrix.grad)):
        torch.testing.assert_close(state[side], 0.1 * product)
        basis = state[f"{side}_basis"]
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), rtol=0, atol=1e-5)
        values = basis.T @ state[side] @ basis
        torch.testing.assert_close(values, values.diagonal().sort(descending=True).values.diag(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon", "soap"])
def test_the_plan_counts_the_bytes_of_the_state(optimizer: str) -> None:
    train = plain_training(max_steps=1, optimizer=optimizer)
    made, count = Optimizer(model_with_gradients(), train), count_parameters(CONFIG)
    made.step(NO_SCALER)
    kept = sum(x.nbytes for key, x in made.state_tensors().items() if not key.endswith("/step"))
    assert trained_state_bytes(count, optimizer, everything(count)) == kept


def test_matrices_of_one_shape_go_together_up_to_a_limit() -> None:
    many = [nn.Parameter(torch.empty(1024, 1024)) for _ in range(6)]
    other, large = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(4096, 2048))
    assert [len(batch) for batch in Muon.batches([*many, other, large])] == [4, 2, 1, 1]


@pytest.mark.parametrize("kind", ["muon", "soap"])
def test_each_rank_gets_about_the_same_work_and_no_matrix_goes_twice(kind: str) -> None:
    """Muon's work is that of an iteration, 4 s²l + 2 s³ for shorter side s and longer side l; SOAP's is r³ + c³ for the
    bases of r rows and c columns, plus products."""
    shapes = [(768, 768), (192, 768), (192, 768), (768, 768), (2048, 768), (2048, 768), (768, 2048)] * 12

    def cost(matrix: Tensor) -> int:
        short, long = sorted(matrix.shape)
        work = 4 * short**2 * long + 2 * short**3
        return work if kind == "muon" else short**3 + long**3 + 3 * short * long * (short + long)

    ownership = OPTIMIZERS[kind].ownership
    assert ownership is not None
    for n_ranks in (1, 2, 3, 8):
        costs = [ownership.work(shape) for shape in shapes]
        shares = divided(costs, n_ranks)
        assert sorted(index for share in shares for index in share) == list(range(len(shapes)))
        assert [costs[share[0]] for share in shares] == [max(costs)] * n_ranks, "the costliest come first"
        work = [sum(cost(torch.empty(shapes[index], device="meta")) for index in share) for share in shares]
        assert max(work) < 1.1 * sum(work) / n_ranks, n_ranks
    assert divided([5], 2) == [[0], []]
    assert divided([1, 4, 2, 1], 2) == [[1], [2, 0, 3]]


def test_a_single_rank_owns_all_matrices() -> None:
    matrices = [nn.Parameter(torch.empty(shape)) for shape in ((4, 4), (8, 4))]
    ((owners, shares),) = divided_among_owners(matrices, None, sum)
    assert (owners.ranks, owners.number) == ([0], 0)
    assert [[id(matrix) for matrix in share] for share in shares] == [[id(matrices[1]), id(matrices[0])]]


@pytest.mark.parametrize(
    ("slot", "make", "message"),
    [
        ("exp_avg", torch.Tensor.float, r"is float32 \[64, 64\] there and int8 \[64, 64\] in the run's optimizer"),
        ("exp_avg_sq", lambda x: x.to(torch.int8), r"is int8 \[64, 64\] there and uint8"),
        ("exp_avg", lambda x: x[:1], r"is int8 \[1, 64\] there"),
        ("exp_avg_scale", lambda x: x[1:], r"is float32 \[15\] there and float32 \[16\]"),
        ("exp_avg_sq_scale", lambda x: -x, "no element may be below 0"),
        ("exp_avg_sq_scale", lambda x: x / 0, "every element must be a finite number"),
        ("exp_avg_scale", lambda x: None, "is missing there"),
    ],
)
def test_moments_in_8_bits_that_do_not_fit_are_refused(
    tmp_path: Path, slot: str, make: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    _, optimizer = learned(1, optimizer_state="int8")
    tensors = {key: x.contiguous() for key, x in optimizer.state_tensors().items()}
    path, key = tmp_path / "optimizer.safetensors", f"blocks.0.attention.query.weight/{slot}"
    save_file(tensors, path)
    assert read_tensors(path, optimizer.expected_tensors, owner="the run's optimizer").keys() == tensors.keys()
    changed = make(tensors.pop(key))
    save_file(tensors | ({} if changed is None else {key: changed.contiguous()}), path)
    with pytest.raises(UserError, match=message):
        read_tensors(path, optimizer.expected_tensors, owner="the run's optimizer")


@pytest.mark.parametrize("settings", [{"optimizer": "muon"}, {"optimizer": "normuon"},
                                      {"optimizer": "soap", "soap_frequency": 2},
                                      {"optimizer": "adamw", "optimizer_state": "int8"},
                                      {"optimizer": "adamw", "cautious_weight_decay": True}])  # fmt: skip
def test_state_round_trips_and_the_next_step_is_identical(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptworks.training.optim.optimizer.LEAST_IN_8_BITS", 200)
    train = plain_training(max_steps=1, **settings)
    first = model_with_gradients()
    optimizer = Optimizer(first, train)
    for _ in range(3):
        optimizer.step(NO_SCALER)
    second = model_with_gradients(seed=1)
    second.load_state_dict(first.state_dict())
    restored = Optimizer(second, train)
    saved = {key: value.clone() for key, value in optimizer.state_tensors().items()}
    expected = restored.expected_tensors(saved)
    assert {key: (one.shape, one.dtype) for key, one in expected.items()} == {
        key: (tuple(tensor.shape), tensor.dtype) for key, tensor in saved.items()
    }
    restored.load_state_tensors(saved)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        b.grad = a.grad
    optimizer.step(NO_SCALER)
    restored.step(NO_SCALER)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = optimizer.state_tensors(), restored.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    restored.load_state_tensors({})  # of a checkpoint before the first step
    assert restored.state_tensors() == {}
