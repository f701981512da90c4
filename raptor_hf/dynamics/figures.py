"""Figures of one model's dynamics, each from what [`TrajectoryDynamics.compute`] and its companions measured."""

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ..plots import COLORS, NAMES, STYLE, layer_axis, plot_band, token_style

# Of classes; Okabe and Ito's, as those of the token types.
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
WIDTH = 4.6
FEW_CLASSES = len(CYCLE)


def _figure(height: float, rows: int = 1, columns: int = 1, **kwargs) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def _legend(axes, **kwargs):
    axes.legend(frameon=False, fontsize=8, **kwargs)


def _legend_below(figure: Figure, axes, ncols: int):
    figure.legend(
        *axes.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=ncols, loc="outside lower center"
    )


def _log_axis(axes):
    """A logarithmic y axis with plain numbers at 1, 2, 5, 10, ..."""
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def plot_convergence(result: dict, title: str = "") -> Figure:
    """Cosine of each state to the last one, with what orthogonal steps would give; and the length of the states."""
    with mpl.rc_context(STYLE):
        figure, ((top,), (bottom,)) = _figure(4.8, 2, sharex=True, height_ratios=(3, 2))
        for name, token in result["tokens"].items():
            layers = range(len(token["norm"]["mean"]))
            plot_band(top, layers, token["convergence"], **token_style(name))
            top.plot(layers, token["orthogonal_convergence"]["mean"], color=COLORS[name], ls=":")
            plot_band(bottom, layers, token["norm"], **token_style(name))
        top.plot([], [], color="0.4", ls=":", label="if steps were orthogonal")
        layer_axis(top, result["phase_sizes"], label=False)
        layer_axis(bottom, result["phase_sizes"])
        top.set(ylabel="cosine to the last state", title=title)
        bottom.set_ylabel("length of the state")
        _log_axis(bottom)
        _legend(top)
    return figure


def plot_angular_speed(result: dict, title: str = "") -> Figure:
    """The angle by which each layer turns the tokens."""
    with mpl.rc_context(STYLE):
        figure, ((axes,),) = _figure(2.9)
        for name, token in result["tokens"].items():
            band = {key: None if v is None else np.degrees(v) for key, v in token["angular_speed"].items()}
            plot_band(axes, range(1, len(band["mean"]) + 1), band, **token_style(name))
        layer_axis(axes, result["phase_sizes"])
        axes.set(ylabel="turn by the layer (degrees)", title=title, ylim=(0, None))
        _legend(axes)
    return figure


def plot_coherence(result: dict, title: str = "") -> Figure:
    """Coherence of updates within an image and across images, and the alignment of tokens with their mean."""
    with mpl.rc_context(STYLE):
        figure, ((top,), (bottom,)) = _figure(4.8, 2, sharex=True)
        for name, token in result["tokens"].items():
            across = token["coherence_across_images"]
            layers = range(1, len(across) + 1)
            if "coherence" in token:
                plot_band(top, layers, token["coherence"], **token_style(name))
                top.axhline(token["isotropic_coherence"], color=COLORS[name], ls=":", lw=1)
                plot_band(bottom, range(len(across) + 1), token["mean_field_alignment"], **token_style(name))
            top.plot(layers, across, color=COLORS[name], ls="--", label=f"{NAMES[name]}, across images")
        top.plot([], [], color="0.4", ls=":", label="independent updates")
        layer_axis(top, result["phase_sizes"], label=False)
        layer_axis(bottom, result["phase_sizes"])
        top.set(ylabel="coherence of updates", title=title, ylim=(0, 1.02))
        bottom.set(ylabel="cosine of tokens\nto their mean", ylim=(None, 1.02))
        _legend_below(figure, top, 2)
    return figure


def plot_rank(result: dict, title: str = "") -> Figure:
    """Stable and effective rank of each layer's updates."""
    with mpl.rc_context(STYLE):
        figure, rows = _figure(4.4, 2, sharex=True)
        for (axes,), kind in zip(rows, ("stable", "effective")):
            for name, token in result["tokens"].items():
                values = token[f"{kind}_rank"]
                axes.plot(range(1, len(values) + 1), values, **token_style(name))
            layer_axis(axes, result["phase_sizes"], label=kind == "effective")
            axes.set_ylabel(f"{kind} rank of updates")
            _log_axis(axes)
        rows[0][0].set_title(title)
        _legend(rows[0][0])
    return figure


def plot_spectra(result: dict, title: str = "") -> Figure:
    """Eigenvalues of the best linear maps, of each phase and of all depth, about the unit circle."""
    sizes = result["phase_sizes"]
    ends = np.cumsum(sizes)
    names = [f"layers {end - size + 1}–{end}" for size, end in zip(sizes, ends)] + ["all depth"]
    if len(sizes) == 1:
        names = names[1:]
    rows = (len(names) + 1) // 2
    with mpl.rc_context(STYLE):
        figure, panels = _figure(2.25 * rows + 0.5, rows, min(2, len(names)), sharex=True, sharey=True)
        circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
        for index, (axes, name) in enumerate(zip(panels.flat, names)):
            axes.plot(circle.real, circle.imag, color="0.6", lw=1)
            for token_name, token in result["tokens"].items():
                dmd = token["dmd"]
                each = dmd["depth"] if name == "all depth" else dmd["phases"][index]
                style = token_style(token_name) | {"ls": "", "ms": 4, "mfc": "none"}
                axes.plot(*np.reshape(each["eigenvalues"], (-1, 2)).T, **style)
            axes.set_aspect("equal")
            axes.set_title(name, fontsize=9)
        for axes in list(panels.flat)[len(names) :]:
            axes.set_axis_off()
        figure.suptitle(title, fontsize=10)
        for axes in panels[-1]:
            axes.set_xlabel("real part")
        for axes in panels[:, 0]:
            axes.set_ylabel("imaginary part")
        _legend_below(figure, panels.flat[0], 3)
    return figure


def plot_self_correction(result: dict, title: str = "") -> Figure:
    """The angle to the clean trajectory in units of the push, after pushes at several layers, of several sizes."""
    tokens = result["self_correction"]
    epsilons = sorted({entry["eps"] for entries in tokens.values() for entry in entries})
    dashes = ("-", "--", ":", "-.")
    with mpl.rc_context(STYLE):
        figure, panels = _figure(1.7 * len(tokens) + 0.7, len(tokens), sharex=True, sharey=True)
        for (axes,), (name, entries) in zip(panels, tokens.items()):
            for entry in entries:
                angle = entry["angle"]
                scaled = {key: None if v is None else np.divide(v, angle["mean"][0]) for key, v in angle.items()}
                layers = range(entry["start"], entry["start"] + len(scaled["mean"]))
                style = {"ls": dashes[epsilons.index(entry["eps"]) % len(dashes)], "marker": None}
                plot_band(axes, layers, scaled, **(token_style(name, label=False) | style))
            axes.axhline(1, color="0.4", lw=0.8)
            layer_axis(axes, result["phase_sizes"], label=axes is panels[-1][0])
            axes.set_ylabel(f"{NAMES[name]}:\nangle / push")
            _log_axis(axes)
        # Not by the bands: those of few images span many decades.
        means = [y for (axes,) in panels for line in axes.get_lines() for y in line.get_ydata() if y > 0]
        panels[0][0].set_ylim(min(means) / 2, 2 * max(means))
        panels[0][0].set_title(title)
        handles = [mpl.lines.Line2D([], [], color="0.3", ls=dashes[i % len(dashes)]) for i in range(len(epsilons))]
        labels = [f"push {eps:g}" for eps in epsilons]
        figure.legend(handles, labels, frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return figure


def plot_recurrence(result: dict, title: str = "") -> Figure:
    """How far each application of a phase's block still moves the tokens, past its trained number of applications."""
    orbits, sizes = result["recurrence"], result["phase_sizes"]
    with mpl.rc_context(STYLE):
        figure, panels = _figure(1.7 * len(sizes) + 0.7, len(sizes), sharex=True, sharey=True)
        for orbit in orbits:
            axes = panels[orbit["phase"]][0]
            held = orbit["depth_step"] == "held"
            style = token_style(orbit["token"], label=held) | {"marker": None, "ls": "-" if held else "--"}
            axes.plot(range(1, len(orbit["step_size"]) + 1), orbit["step_size"], **style)
        trained = {orbit["phase"]: orbit["trained_size"] for orbit in orbits}
        for phase, (axes,) in enumerate(panels):
            axes.axvline(trained[phase] + 0.5, color="0.4", lw=0.8, ls=":")
            axes.set(yscale="log", ylabel=f"block {phase + 1}: step / length")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[-1][0].set_xlabel("application of the block (dotted: the trained number)")
        panels[0][0].plot([], [], color="0.4", ls="--", label="depth step moved on")
        panels[0][0].set_title(title)
        _legend(panels[0][0], ncols=2)
    return figure


def plot_basins(result: dict, title: str = "") -> Figure:
    """Angles within and between classes, if there are any; and where trajectories go on the sphere."""
    name = next(iter(result["tokens"]))
    basins = result["tokens"][name]["basins"]
    projection = basins["projection"]
    labelled = basins["within"] is not None and basins["between"] is not None
    with mpl.rc_context(STYLE):
        figure, panels = _figure(6.4 if labelled else 4.0, 1 + labelled, height_ratios=(2, 3)[1 - labelled :])
        if labelled:
            axes = panels[0][0]
            for key, ls in (("within", "-"), ("between", "--")):
                degrees = np.degrees(np.arccos(np.clip(basins[key], -1, 1)))
                axes.plot(range(len(degrees)), degrees, color=COLORS[name], ls=ls, label=f"{key} classes")
            layer_axis(axes, result["phase_sizes"])
            axes.set(ylabel=f"angle between\n{NAMES[name]}s (degrees)".replace("ss ", "s "), ylim=(0, None))
            _legend(axes)
        axes = panels[-1][0]
        few = labelled and len(projection["class_means"]) <= FEW_CLASSES
        colors = {label: CYCLE[i] for i, label in enumerate(sorted(projection["class_means"], key=int))} if few else {}
        for path, label in zip(projection["paths"], projection["labels"]):
            color = colors.get(str(label), COLORS[name])
            axes.plot(*np.transpose(path), color=color, lw=0.6, alpha=0.5)
            axes.plot(*path[-1], color=color, marker="o", ms=3, alpha=0.8)
        if labelled:
            for label, path in projection["class_means"].items():
                axes.plot(*np.transpose(path), color=colors.get(label, "0.2"), lw=1.8 if few else 0.8)
            axes.plot([], [], color="0.2", lw=1.8 if few else 0.8, label="mean of a class")
            for label, color in colors.items():
                axes.plot([], [], color=color, marker="o", ms=3, lw=0.6, label=f"class {label}")
            _legend(axes)
        share = f"{100 * projection['share']:.0f} %"
        axes.set(xlabel=f"first principal direction (both: {share} of the variance)", ylabel="second")
        axes.set_aspect("equal", adjustable="datalim")
        panels[0][0].set_title(title)
    return figure
