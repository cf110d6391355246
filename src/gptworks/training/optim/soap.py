"""SOAP (Vyas et al., 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321, algorithms 3 and 4):
Adam in the basis of the eigenvectors of Shampoo's two preconditioners, for a matrix with gradient G [rows, columns]:

    left, right               running averages of G Gᵀ and Gᵀ G, decay β2
    left_basis, right_basis   their eigenvectors in columns, updated every few steps
    exp_avg                   running average of G, as in Adam, decay β1
    exp_avg_sq                running average of (left_basisᵀ G right_basis)², by element, decay β2

As in the authors' code, the first gradient only makes the preconditioners; that step leaves the matrix unchanged.
"""

import torch
from torch import Tensor, nn

from gptworks.config import TrainConfig
from gptworks.kernels.dispatch import product
from gptworks.training.optim.base import AdamLike, Group, Mesh, decay

SIDES = ("left", "right")


def build(groups: list[Group], train: TrainConfig, mesh: Mesh) -> torch.optim.Optimizer:
    """A new SOAP."""
    return SOAP(groups, train.betas, train.eps, train.soap_frequency, train.cautious_weight_decay)


class SOAP(AdamLike):
    """SOAP for matrices, in their own dtype; with decoupled weight decay."""

    def __init__(
        self, groups: list[Group], betas: tuple[float, float], eps: float, frequency: int, cautious: bool = False
    ) -> None:
        """
        Args:
            frequency: steps from one refresh of the bases to the next.
        """
        super().__init__(groups, betas, eps, cautious)
        self._frequency = frequency

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        if not self.state[parameter]:
            self.state[parameter] = begun(gradient, group["betas"][1])
            return
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        left, right = (state[f"{side}_basis"] for side in SIDES)
        state["step"] += 1
        n_steps = int(state["step"].item())

        turned = product(left.mT, gradient)
        turned = product(turned, right)
        state["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        del turned
        update = product(left.mT, state["exp_avg"].lerp_(gradient, 1 - beta1))
        update = product(update, right)
        root = (1 - beta2**n_steps) ** 0.5
        update.div_(state["exp_avg_sq"].sqrt().div_(root).add_(group["eps"])).div_(1 - beta1**n_steps)
        update = product(left, update)
        update = product(update, right.mT)
        decay(parameter, update, group["lr"] * group["weight_decay"], self._cautious)
        parameter.add_(update, alpha=-group["lr"])
        del update

        state["left"].lerp_(product(gradient, gradient.mT), 1 - beta2)
        state["right"].lerp_(product(gradient.mT, gradient), 1 - beta2)
        if n_steps % self._frequency == 0:
            for axis, side in enumerate(SIDES):
                refresh(state[side], state[f"{side}_basis"], state["exp_avg_sq"], axis)


def begun(gradient: Tensor, beta: float) -> dict[str, Tensor]:
    """The state after a matrix's first gradient [rows, columns]."""
    state = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
    grams = product(gradient, gradient.mT), product(gradient.mT, gradient)
    for side, gram in zip(SIDES, grams, strict=True):
        state[side] = gram.mul_(1 - beta)
        state[f"{side}_basis"] = torch.linalg.eigh(gram).eigenvectors.flip(1).contiguous()  # the largest first
    return state


def refresh(average: Tensor, basis: Tensor, squares: Tensor, axis: int) -> None:
    """Refresh a basis by one power iteration towards the eigenvectors of `average` [n, n], then QR (algorithm 4).

    Args:
        basis: the eigenvectors of the last refresh, in columns [n, n]; overwritten.
        squares: the second moments in that basis; their rows (axis 0) or columns (axis 1) are reordered with the basis
            vectors, by descending eigenvalue.
    """
    turned = product(average, basis)
    order = (basis * turned).sum(dim=0).argsort(descending=True, stable=True)
    squares.copy_(squares.index_select(axis, order))
    basis.copy_(torch.linalg.qr(turned.index_select(1, order)).Q)
