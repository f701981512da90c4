"""Dynamic mode decomposition: the best linear map between consecutive states (Schmid, 2010)."""

from dataclasses import dataclass

import torch

from .moments import SecondMoments, precise


@dataclass
class LinearMap:
    """
    The best linear map of the leading modes.

    Attributes:
        eigenvalues: complex, (r,), largest modulus first.
        energy: the share of the earlier states' squared length that the modes hold.
        explained: the share of the later states' squared length, within the modes, that the map predicts.
        by_one_factor: the share of it that the best multiple of the identity predicts, as it does of a random walk.
    """

    eigenvalues: torch.Tensor
    energy: float
    explained: float
    by_one_factor: float


def dmd(x: torch.Tensor, y: torch.Tensor, num_modes: int) -> LinearMap:
    """
    The linear map A with y = A x, in the least squares, on the leading modes of x.

    Args:
        x, y: states before and after, (n, D): a row for each token.
        num_modes: modes kept, r; fewer where x has a lower rank, and none where it is 0.

    Raises:
        ValueError: if `num_modes` is below 1.
    """
    x, y = precise(x), precise(y)
    return dmd_of_products(x.T @ x, y.T @ x, y.T @ y, num_modes)


def dmd_of_products(xx: torch.Tensor, yx: torch.Tensor, yy: torch.Tensor, num_modes: int) -> LinearMap:
    """[`dmd`] from the sums of outer products of x with x, of y with x, and of y with y, each (D, D)."""
    if num_modes < 1:
        raise ValueError(f"num_modes must be at least 1, got {num_modes}.")
    energies, modes = torch.linalg.eigh(precise(xx).cpu())
    # Beyond float64's digits of the largest there is no mode but rounding.
    rank = min(num_modes, int((energies > 1e-12 * energies[-1]).sum()))
    if rank == 0:
        return LinearMap(torch.zeros(0, dtype=torch.complex128), 0.0, 0.0, 0.0)
    energies, modes = energies.flip(0), modes.flip(1)[:, :rank]
    cross = modes.T @ precise(yx).cpu() @ modes
    reduced = cross / energies[:rank]
    after = ((modes.T @ precise(yy).cpu()) * modes.T).sum()
    # For the least squares solution, |y - A x|^2 = |y|^2 - tr(A x y').
    after = after.clamp_min(torch.finfo(after.dtype).tiny)
    explained = (reduced * cross).sum() / after
    by_one_factor = cross.trace().square() / energies[:rank].sum() / after
    eigenvalues = torch.linalg.eigvals(reduced)
    order = eigenvalues.abs().argsort(descending=True, stable=True)
    energy = energies[:rank].sum() / energies.sum()
    return LinearMap(eigenvalues[order], float(energy), float(explained), float(by_one_factor))


def dmd_of_depth(
    moments: SecondMoments, start: int, end: int, num_modes: int, remove_growth: bool = False
) -> LinearMap:
    """
    [`dmd`] over the layers start + 1..end of a model, one map for all of them.

    Args:
        moments: of a token type's states.
        start, end: the state that the first layer reads and the one that the last layer writes, 0 <= start < end <= L.
        num_modes: modes kept.
        remove_growth: whether each layer's states are divided by their root mean square length first, so that the
            moduli tell of directions and not of a residual stream that grows.

    Raises:
        ValueError: if there is no such span of layers, or `num_modes` is below 1.
    """
    if not 0 <= start < end < len(moments.states):
        raise ValueError(f"Layers {start + 1}..{end} are not among the {len(moments.states) - 1} layers.")
    states, pairs = moments.states[start : end + 1], moments.pairs[start:end]
    if remove_growth:
        length = states.diagonal(dim1=1, dim2=2).sum(-1).sqrt()
        # Register tokens may start as 0, which nothing divides.
        length = length.where(length > 0, 1.0)
        states = states / length.square().view(-1, 1, 1)
        pairs = pairs / (length[1:] * length[:-1]).view(-1, 1, 1)
    return dmd_of_products(states[:-1].sum(0), pairs.sum(0), states[1:].sum(0), num_modes)
