"""The recurrence run on: a Raptor's block applied more often than its phase is long."""

from collections import Counter

import torch
from torch.nn.functional import normalize

from ..modeling_raptor import RaptorPreTrainedModel
from .moments import precise

DEPTH_STEPS = ("held", "moved")
FIXED_POINT, PERIOD, DIVERGENCE, UNDECIDED = "fixed point", "period", "divergence", "undecided"


@torch.no_grad()
def iterate(
    model: RaptorPreTrainedModel, states: torch.Tensor, phase: int, num_iterations: int, depth_step: str = "held"
) -> torch.Tensor:
    """
    Applies the block of a phase again and again.

    Args:
        model: a Raptor of contiguous phases.
        states: the states before the phase, (B, T, D).
        phase: its index, from 0.
        num_iterations: applications N in all; the first ones, as many as the phase has layers, are the trained ones.
        depth_step: of the applications after them: `"held"` at the phase's last, or `"moved"` on by one each time.

    Returns:
        The orbit, (B, N + 1, T, D); index 0 holds `states`.

    Raises:
        ValueError: if the model is no Raptor of contiguous phases, or has no such phase.
    """
    if model.config.model_type != "raptor" or model.config.block_assignment is not None:
        raise ValueError("Only the phases of a Raptor, without a block_assignment, can be iterated.")
    if depth_step not in DEPTH_STEPS:
        raise ValueError(f"depth_step must be one of {', '.join(DEPTH_STEPS)}, got {depth_step!r}.")
    blocks = model.base_model.blocks
    if not 0 <= phase < len(blocks):
        raise ValueError(f"The Raptor has phases 0 to {len(blocks) - 1}, got {phase}.")
    # Unless the configuration changes it, layers start + 1 to end.
    trained = [step for block, step in model.config.schedule() if block == phase]
    orbit = [states]
    for i in range(num_iterations):
        beyond = max(0, i - len(trained) + 1) if depth_step == "moved" else 0
        step = trained[min(i, len(trained) - 1)] + beyond
        orbit.append(blocks[phase](orbit[-1], torch.tensor(step, device=states.device)))
    return torch.stack(orbit, dim=1)


def step_sizes(orbit: torch.Tensor) -> torch.Tensor:
    """|x_n - x_(n-1)| / |x_n|, of all of an image's tokens together: (B, N + 1, T, D) -> (B, N)."""
    x = precise(orbit).flatten(2)
    return x.diff(dim=1).norm(dim=-1) / x[:, 1:].norm(dim=-1).clamp_min(torch.finfo(x.dtype).tiny)


def classify_orbit(
    orbit: torch.Tensor, tolerance: float = 1e-3, max_period: int = 8, growth: float = 1.5
) -> list[tuple[str, int | None]]:
    """
    What each image's orbit does in its last third, all its tokens taken together.

    Distances are relative to the orbit's largest length. An orbit is at a fixed point if all its last third is within
    `tolerance` of its end. It has the period p, the smallest, if there each state is so near to the one p before, and
    the last one also to the one as many whole periods before as there are. It diverges if it isn't finite or grows by
    more than `growth` in its second half (a stream to which the same is added for ever doubles there). Otherwise it is
    undecided: still moving, slow, or chaotic.

    Args:
        orbit: (B, N + 1, T, D), with N at least 6 times `max_period` for all periods to be seen.

    Returns:
        For each image, (`"fixed point"`, 1), (`"period"`, p), (`"divergence"`, None) or (`"undecided"`, None).
    """
    x = precise(orbit).flatten(2)
    return [_classify(image, tolerance, max_period, growth) for image in x]


def _classify(x: torch.Tensor, tolerance: float, max_period: int, growth: float) -> tuple[str, int | None]:
    length = x.norm(dim=-1)
    if not torch.isfinite(length).all() or length[-1] > growth * length[(len(x) - 1) // 2]:
        return DIVERGENCE, None
    tail = x[-max(2, len(x) // 3) :]
    limit = tolerance * length.max()
    if ((tail - tail[-1]).norm(dim=-1) <= limit).all():
        return FIXED_POINT, 1
    # What moves by less than that at each step drifts: it is neither at rest nor going round.
    if (tail.diff(dim=0).norm(dim=-1) <= limit).all():
        return UNDECIDED, None
    for period in range(2, min(max_period, len(tail) // 2) + 1):
        whole = (len(tail) - 1) // period * period
        near = (tail[period:] - tail[:-period]).norm(dim=-1) <= limit
        if near.all() and (tail[-1] - tail[-1 - whole]).norm() <= limit:
            return PERIOD, period
    return UNDECIDED, None


class Recurrence:
    """
    Streaming orbits of each phase of a Raptor, from the states that its own trajectory brings there.

    Args:
        model: a Raptor of contiguous phases.
        slices: token types, as [`raptor_hf.vision_models.token_slices`] gives them.
        num_iterations: applications of each block.
    """

    def __init__(self, model: RaptorPreTrainedModel, slices: dict[str, slice], num_iterations: int):
        self.model, self.slices, self.num_iterations = model, slices, num_iterations
        config = model.config
        sizes = config.phase_iterations or config.phase_sizes
        self._starts = [sum(sizes[:phase]) for phase in range(len(sizes))]
        self._sums, self._counts, self.num_images = {}, {}, 0

    def update(self, states: torch.Tensor):
        """Adds images by their trajectory, (B, L + 1, T, D)."""
        self.num_images += len(states)
        for phase, start in enumerate(self._starts):
            for depth_step in DEPTH_STEPS:
                orbit = iterate(self.model, states[:, start], phase, self.num_iterations, depth_step)
                for name, where in self.slices.items():
                    key = (phase, depth_step, name)
                    tokens = orbit[:, :, where]
                    self._sums[key] = self._sums.get(key, 0) + step_sizes(tokens).sum(0)
                    for what, x in (("outcomes", tokens), ("directions", normalize(precise(tokens), dim=-1))):
                        kinds = [_words(kind, period) for kind, period in classify_orbit(x)]
                        self._counts.setdefault((*key, what), Counter()).update(kinds)

    def compute(self) -> list[dict]:
        """
        For each phase, depth step and token type: `trained_size` (applications that the block was trained for, or
        that its configuration's `phase_iterations` sets),
        `step_size` (mean over images of |x_n - x_(n-1)| / |x_n|, n from 1),
        `outcomes`, how many images' orbits ended how, and `directions`, the same of their tokens' directions, which
        may come to rest while lengths grow.

        Raises:
            ValueError: if no images were added.
        """
        if self.num_images == 0:
            raise ValueError("A recurrence needs at least one image.")
        return [
            {
                "phase": phase,
                "depth_step": depth_step,
                "token": name,
                "trained_size": (self.model.config.phase_iterations or self.model.config.phase_sizes)[phase],
                "step_size": (self._sums[phase, depth_step, name] / self.num_images).tolist(),
                **{
                    what: dict(self._counts[phase, depth_step, name, what].most_common())
                    for what in ("outcomes", "directions")
                },
            }
            for phase, depth_step, name in self._sums
        ]


def _words(kind: str, period: int | None) -> str:
    return f"period {period}" if kind == PERIOD else kind
