"""The loss of one layer."""

from collections.abc import Sequence

import torch
from torch.nn.functional import cosine_similarity


def layer_loss(
    states: torch.Tensor,
    target: torch.Tensor,
    slices: dict[str, slice],
    weights: Sequence[float] | None = None,
    normalize: bool = False,
    cosine_weight: float = 0.0,
) -> torch.Tensor:
    """
    w_cls MSE(cls) + w_reg MSE(registers) + w_patch MSE(patches), each MSE a mean over its tokens and features
    (arXiv 2512.19941).

    Args:
        states, target: (batch, tokens, hidden_size).
        slices: token types and where they lie.
        weights: of cls, registers and patches. Without registers their weight is shared out in proportion. `None`
            weighs every token alike: the plain MSE.
        normalize: whether each image's MSE is divided by the mean square of its target, so that layers and token
            types of very different norms count alike.
        cosine_weight: of 1 - cosine, the mean over a token type's tokens, which is added to its MSE.

    Returns:
        One loss for each sample, (batch,), in float32.
    """
    error = (states - target).float().square().mean(dim=-1)
    scale = target.float().square().mean(dim=-1) if normalize else None
    away = 1 - cosine_similarity(states.float(), target.float(), dim=-1) if cosine_weight else None
    if weights is None:
        shares = {name: where.indices(error.shape[1]) for name, where in slices.items()}
        shares = {name: stop - start for name, (start, stop, _) in shares.items()}
    else:
        shares = {name: w for name, w in zip(("cls", "register", "patch"), weights) if name in slices}
    total = sum(shares.values())
    loss = 0.0
    for name, share in shares.items():
        if share:
            mse = error[:, slices[name]].mean(dim=1)
            if scale is not None:
                mse = mse / scale[:, slices[name]].mean(dim=1).clamp_min(1e-12)
            if away is not None:
                mse = mse + cosine_weight * away[:, slices[name]].mean(dim=1)
            loss = loss + share / total * mse
    return loss
