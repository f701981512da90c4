"""Figures. Each function returns a matplotlib `Figure`; `save_figure` writes it as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours: told apart by colour-blind readers.
COLORS = {"cls": "#D55E00", "register": "#009E73", "patch": "#0072B2"}
NAMES = {"cls": "cls token", "register": "register tokens", "patch": "patch tokens"}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes `path` with the endings .png and .svg, making its folder; returns the PNG's path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.savefig(path.with_suffix(".svg"))
        figure.savefig(path.with_suffix(".png"), dpi=160)
    return path.with_suffix(".png")


def plot_similarity(similarity, phase_sizes: Sequence[int] = (), title: str = "") -> Figure:
    """Layer similarity, (L, L), as a matrix of cosines, with a frame round each phase."""
    similarity = np.asarray(similarity)
    num_layers = len(similarity)
    with mpl.rc_context(STYLE | {"axes.spines.top": True, "axes.spines.right": True}):
        figure = Figure(figsize=(4.4, 3.7), layout="constrained")
        axes = figure.subplots()
        extent = (0.5, num_layers + 0.5, num_layers + 0.5, 0.5)
        image = axes.imshow(similarity, cmap="viridis", vmax=1.0, extent=extent)
        figure.colorbar(image, label="cosine similarity")
        start = 0.5
        for size in phase_sizes:
            axes.add_patch(mpl.patches.Rectangle((start, start), size, size, fill=False, edgecolor="white", lw=2))
            start += size
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="layer", ylabel="layer", title=title)
    return figure


def plot_fidelity(fidelity: dict[str, dict], phase_sizes: Sequence[int], metric: str = "cosine") -> Figure:
    """
    Layerwise fidelity of a Raptor to its teacher, one panel for each moment of training.

    Args:
        fidelity: moment (`"before"`, `"after_stage1"`, ...) to what [`LayerFidelity.compute`] gives.
        phase_sizes: shaded in turn.
        metric: `"cosine"`, `"r2"` or `"relative_error"`.
    """
    labels = {"cosine": "cosine to the teacher", "r2": "R²", "relative_error": "relative error"}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.6 * len(fidelity) + 0.6, 2.8), layout="constrained")
        panels = figure.subplots(1, len(fidelity), sharey=True, squeeze=False)[0]
        for axes, (moment, tokens) in zip(panels, fidelity.items()):
            shade_phases(axes, phase_sizes)
            for name, curves in tokens.items():
                values = curves[metric]
                axes.plot(range(len(values)), values, marker="o", ms=3, color=COLORS[name], label=NAMES[name])
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="layer", title=moment.replace("_", " ").replace("stage", "stage "))
        if metric != "relative_error":
            lowest = min(min(c[metric]) for tokens in fidelity.values() for c in tokens.values())
            panels[0].set_ylim(max(lowest - 0.05, -1.05), 1.03)
        panels[0].set_ylabel(labels[metric])
        panels[-1].legend(frameon=False, loc="lower left")
    return figure


def shade_phases(axes, phase_sizes: Sequence[int]):
    """Shades every second phase of an axis that counts layers from 0 (the embeddings)."""
    start = 0.5
    for index, size in enumerate(phase_sizes):
        if index % 2 == 0:
            axes.axvspan(start, start + size, color="0.93", lw=0, zorder=0)
        start += size
