"""Muon for weight matrices, AdamW for everything else, as one optimizer."""

import torch


class MuonAdamW(torch.optim.AdamW):
    """
    AdamW, except for parameter groups that carry `muon=True`. Those hold matrices, whose Nesterov momentum is
    orthogonalised by a Newton-Schulz iteration (Muon) and scaled to the root mean square of an AdamW update
    (arXiv 2502.16982), so that one learning rate serves both. A group's `parts` says how many projections each of its
    matrices stacks (3 for a fused qkv): they are orthogonalised one by one.

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
        update = parameter.grad.add(momentum, alpha=self.momentum)
        parts = [orthogonalize(part) * max(part.shape) ** 0.5 for part in update.chunk(group.get("parts", 1))]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(torch.cat(parts), alpha=-group["lr"] * self.update_rms)


def parameter_groups(module: torch.nn.Module) -> list[dict]:
    """The groups of [`MuonAdamW`] for what a module trains: Muon for weight matrices, no weight decay for the rest."""
    groups = {"qkv": [], "matrices": [], "rest": []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim == 2 and ".depth_scaling." not in name
            groups["qkv" if ".qkv.weight" in name else "matrices" if matrix else "rest"].append(parameter)
    return [
        {"params": groups["qkv"], "muon": True, "parts": 3},
        {"params": groups["matrices"], "muon": True},
        {"params": groups["rest"], "weight_decay": 0.0},
    ]


def orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearly the orthogonal factor of (m, n): all singular values are brought to about 1 by a quintic iteration."""
    x = matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)
