"""Figures and their style. Each function returns a matplotlib `Figure`; `save_figure` writes it as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.metrics import confusion_matrix

# Okabe and Ito's colours: told apart by colour-blind readers.
COLORS = {"cls": "#D55E00", "register": "#009E73", "patch": "#0072B2"}
NAMES = {"cls": "cls token", "register": "register tokens", "patch": "patch tokens"}
# And by those who see no colours, or a print without them.
MARKERS = {"cls": "o", "register": "s", "patch": "^"}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
# The same figure gives the same file.
STYLE |= {"svg.hashsalt": "raptor"}


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes `path` with the endings .png and .svg, making its folder; returns the PNG's path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        # Laid out once: that is what takes the time.
        engine = figure.get_layout_engine()
        figure.set_layout_engine("none")
        figure.savefig(path.with_suffix(".png"), dpi=160)
        figure.set_layout_engine(engine)
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


def token_style(name: str, label: bool = True) -> dict:
    """How a token type's curve is drawn: keyword arguments of `Axes.plot`."""
    style = {"color": COLORS[name], "marker": MARKERS[name], "ms": 3}
    return style | {"label": NAMES[name]} if label else style


def plot_band(axes, layers: Sequence[float], band: dict, **style):
    """A curve, `band["mean"]`, and its confidence band from `band["low"]` to `band["high"]`, if there is one."""
    if band["low"] is not None:
        axes.fill_between(layers, band["low"], band["high"], color=style["color"], alpha=0.2, lw=0)
    axes.plot(layers, band["mean"], **style)


def layer_axis(axes, phase_sizes: Sequence[int], label: bool = True):
    """An x axis of layers, from 0 (the embeddings), with every second phase shaded."""
    shade_phases(axes, phase_sizes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if label:
        axes.set_xlabel("layer")


def share_limits(figures: Sequence[Figure]):
    """Gives the y axes of figures of one kind, of several models, the same limits."""
    for group in zip(*(figure.axes for figure in figures)):
        low, high = zip(*(axes.get_ylim() for axes in group))
        for axes in group:
            axes.set_ylim(min(low), max(high))


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
            layer_axis(axes, phase_sizes)
            for name, curves in tokens.items():
                axes.plot(range(len(curves[metric])), curves[metric], **token_style(name))
            axes.set_title(moment.replace("_", " ").replace("stage", "stage "))
        if metric != "relative_error":
            lowest = min(min(c[metric]) for tokens in fidelity.values() for c in tokens.values())
            panels[0].set_ylim(max(lowest - 0.05, -1.05), 1.03)
        panels[0].set_ylabel(labels[metric])
        panels[-1].legend(frameon=False, loc="best")
    return figure


def plot_confusion(labels, predictions, class_names: Sequence[str], title: str = "") -> Figure:
    """What images of each class, a row, are taken for, as shares of the class. Labels and predictions: (images,)."""
    shares = confusion_matrix(labels, predictions, labels=range(len(class_names)), normalize="true")
    with mpl.rc_context(STYLE | {"axes.spines.top": True, "axes.spines.right": True}):
        side = 3.0 + 0.16 * min(len(class_names), 40)
        figure = Figure(figsize=(side + 0.9, side), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="viridis", vmin=0.0, vmax=1.0)
        figure.colorbar(image, label="share of the class", shrink=0.8)
        if len(class_names) <= 40:
            # Names are text: a dollar in them begins no formula.
            axes.set_xticks(range(len(class_names)), class_names, rotation=90, parse_math=False)
            axes.set_yticks(range(len(class_names)), class_names, parse_math=False)
        axes.set(xlabel="predicted class", ylabel="class", title=title)
    return figure


def shade_phases(axes, phase_sizes: Sequence[int]):
    """Shades every second phase of an axis that counts layers from 0 (the embeddings)."""
    start = 0.5
    for index, size in enumerate(phase_sizes):
        if index % 2 == 0:
            axes.axvspan(start, start + size, color="0.93", lw=0, zorder=0)
        start += size
