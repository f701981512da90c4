"""Muon for weight matrices, AdamW for everything else, as one optimizer."""

import torch

from .sharding import divided_like, whole_tensor


class MuonAdamW(torch.optim.AdamW):
    """
    AdamW, except for parameter groups that carry `muon=True`. Those hold matrices, whose Nesterov momentum is
    orthogonalised by a Newton-Schulz iteration (Muon) and scaled to the root mean square of an AdamW update
    (arXiv 2502.16982), so that one learning rate serves both. A group's `parts` says how many matrices each of its own
    holds side by side along dimension `dim`: they are orthogonalised one by one.

    `torch.optim.Muon` takes matrices only and iterates in bfloat16, which CPUs without bfloat16 units do some fifty
    times slower than float32; hence this one.
    """

    momentum = 0.95
    update_rms = 0.2

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group.get("muon"):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._muon_step(parameter, group)
                        # AdamW passes over parameters without a gradient.
                        parameter.grad = None
        super().step()
        return loss

    def _muon_step(self, parameter: torch.Tensor, group: dict):
        state = self.state[parameter]
        if not state:
            # AdamW looks for a step in every state that it loads.
            state["step"], state["momentum"] = torch.tensor(0.0), torch.zeros_like(parameter)
        state["step"] += 1
        momentum = state["momentum"].mul_(self.momentum).add_(parameter.grad)
        # Of a divided parameter each process orthogonalises the whole, and applies its own part.
        update = whole_tensor(parameter.grad.add(momentum, alpha=self.momentum))
        parts, dim = group.get("parts", 1), group.get("dim", 0)
        parts = orthogonalize(torch.stack(update.chunk(parts, dim)))
        update = torch.cat(parts.unbind(), dim) * max(parts.shape[-2:]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(divided_like(update, parameter), alpha=-group["lr"] * self.update_rms)


def parameter_groups(module: torch.nn.Module, num_heads: int) -> list[dict]:
    """
    The groups of [`MuonAdamW`] for what a module trains: Muon for weight matrices, those of attention head by head,
    and no weight decay for the rest.
    """
    groups = {"qkv": [], "o_proj": [], "mlp": [], "rest": []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            kind = next((kind for kind in groups if f".{kind}." in name and parameter.ndim == 2), "rest")
            groups[kind].append(parameter)
    return [
        {"params": groups["qkv"], "muon": True, "parts": 3 * num_heads},
        {"params": groups["o_proj"], "muon": True, "parts": num_heads, "dim": 1},
        {"params": groups["mlp"], "muon": True},
        {"params": groups["rest"], "weight_decay": 0.0},
    ]


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """
    Nearly the orthogonal factors of (..., m, n): all singular values are brought to about 1 by a quintic iteration, on
    the Gram matrix of the smaller side.
    """
    x = matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    gram = x @ x.mT
    identity = torch.eye(gram.shape[-1], device=gram.device)

    def polynomial(gram: torch.Tensor) -> torch.Tensor:
        return a * identity + b * gram + c * gram @ gram

    factor = last = polynomial(gram)
    for _ in range(steps - 1):
        gram = last @ gram @ last
        last = polynomial(gram)
        factor = last @ factor
    x = factor @ x
    return (x.mT if tall else x).to(matrices.dtype)
