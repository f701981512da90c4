"""Figures of the controls."""

import matplotlib as mpl
import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from ..plots import COLORS, STYLE

TEACHER, RAPTOR, SECOND, BASELINE = "0.25", COLORS["patch"], COLORS["cls"], "0.6"
LABELS = {"accuracy": "accuracy of the teacher's head", "final_cosine": "cosine at the last layer"}


def _metrics(members) -> list[str]:
    """The metrics that were measured: accuracy not of a teacher without a head."""
    return [name for name in LABELS if all(member[name] is not None for member in members)]


def plot_partitions(results: dict) -> Figure:
    """Each Raptor a dot, by kind of partition, with the means and the best partitions' level."""
    members = results["members"].values()
    names = {
        "mean": "best by\nmean",
        "cut": "best by\ncut",
        "random": "random\ncontiguous",
        "shuffled": "shuffled\nlayers",
    }
    groups = [group for group in names if any(member["group"] == group for member in members)]
    if len({found["trained_as"] for found in results["best"].values()}) == 1:
        names["mean"] = "best by\nmean and cut"
    metrics = _metrics(members)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.6 * len(metrics), 3.0), layout="constrained")
        for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics):
            for x, group in enumerate(groups):
                values = np.array([member[metric] for member in members if member["group"] == group])
                offsets = np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else np.zeros(1)
                color = BASELINE if group in ("random", "shuffled") else RAPTOR
                axes.plot(x + offsets, values, "o", ms=4, color=color, alpha=0.8)
                axes.hlines(values.mean(), x - 0.3, x + 0.3, color="black", lw=1.2)
                if group not in ("random", "shuffled"):
                    axes.axhline(values.mean(), color=color, lw=0.8, ls=":")
            axes.set_xticks(range(len(groups)), [names[group] for group in groups])
            axes.set(ylabel=LABELS[metric])
            if metric == "accuracy":
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def plot_layer_swap(results: dict) -> Figure:
    """The matrices of a layer swap, with a frame round each phase."""
    matrices = {name: np.array(results["matrices"][name]) for name in LABELS if name in results["matrices"]}
    with mpl.rc_context(STYLE | {"axes.spines.top": True, "axes.spines.right": True}):
        figure = Figure(figsize=(4.2 * len(matrices), 3.6), layout="constrained")
        for axes, (name, matrix) in zip(figure.subplots(1, len(matrices), squeeze=False)[0], matrices.items()):
            num_layers = len(matrix)
            extent = (0.5, num_layers + 0.5, num_layers + 0.5, 0.5)
            image = axes.imshow(matrix, cmap="viridis", vmax=1.0, vmin=min(0.0, matrix.min()), extent=extent)
            figure.colorbar(image, label=LABELS[name])
            start = 0.5
            for size in results["phase_sizes"]:
                frame = mpl.patches.Rectangle((start, start), size, size, fill=False, edgecolor="white", lw=2)
                axes.add_patch(frame)
                start += size
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            swapped = results["operation"] == "swap"
            labels = ("layer", "exchanged with layer") if swapped else ("place", "layer put there")
            axes.set(ylabel=labels[0], xlabel=labels[1])
    return figure


def plot_ablations(results: dict) -> Figure:
    """Each run a bar, with the level of the base run; beside them, where it was measured, fidelity against time."""
    members = results["members"]
    metrics = _metrics(members.values())
    names = list(members)
    curves = {name: found["curve"] for name, found in members.items() if len(found["curve"]) > 1}
    with mpl.rc_context(STYLE):
        size = 2.4 + 2.6 * len(metrics) + 3.6 * bool(curves), max(2.6 * bool(curves), 0.8 + 0.24 * len(names))
        figure = Figure(figsize=size, layout="constrained")
        bars, beside = figure.subfigures(1, 2, width_ratios=(len(metrics), 0.8)) if curves else (figure, None)
        for axes, metric in zip(bars.subplots(1, len(metrics), sharey=True, squeeze=False)[0], metrics):
            values = [members[name][metric] for name in names]
            colors = [TEACHER if name == "base" else RAPTOR for name in names]
            axes.barh(range(len(names)), values, color=colors, height=0.65)
            axes.axvline(values[0], color=TEACHER, lw=0.8, ls=":")
            labels = [
                name.replace("_", " ") + (" (as base)" if members[name]["same_as_base"] else "") for name in names
            ]
            axes.set_yticks(range(len(names)), labels)
            axes.set(xlabel=LABELS[metric])
            if metric == "accuracy":
                axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.invert_yaxis()
        if curves:
            _plot_curves(beside.subplots(), curves)
    return figure


def _plot_curves(axes, curves: dict):
    shown = {"base": TEACHER, "authors": SECOND}
    for name, entries in curves.items():
        points = [entry["seconds"] for entry in entries], [entry["final_cosine"] for entry in entries]
        label = name if name in shown else None
        axes.plot(*points, marker="o", ms=3, lw=1.4 if label else 0.8, color=shown.get(name, BASELINE), label=label)
    if set(curves) - set(shown):
        axes.plot([], [], lw=0.8, color=BASELINE, label="the others")
    axes.set(xlabel="seconds of training", ylabel=LABELS["final_cosine"])
    axes.legend(frameon=False, loc="lower right")


def plot_scaling(results: dict) -> Figure:
    """Accuracy, or the final cosine, against parameters; the teacher as reference."""
    members, teacher = results["members"], results["teacher"]
    metric = _metrics(members.values())[0]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 3.0), layout="constrained")
        axes = figure.subplots()
        x = [member["parameters"] for member in members.values()]
        y = [member[metric] for member in members.values()]
        axes.plot(x, y, marker="o", ms=5, color=RAPTOR, label="Raptor")
        for count, *point in zip(members, x, y):
            axes.annotate(f"k = {count}", point, xytext=(5, -11), textcoords="offset points")
        if metric == "accuracy":
            axes.plot(teacher["parameters"], teacher["accuracy"], "*", ms=11, color=TEACHER, label="teacher")
            axes.axhline(teacher["accuracy"], color=TEACHER, lw=0.8, ls=":")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlabel="parameters", ylabel=LABELS[metric], xlim=(0, 1.12 * max(*x, teacher["parameters"])))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.margins(y=0.15)
        axes.legend(frameon=False, loc="lower right")
    return figure


def plot_stochastic_depth(results: dict) -> Figure:
    """Above, the teachers' similarity matrices by rate; below, similarity against R², accuracies, and emergence."""
    members = list(results["members"].values())
    first_seed = [m for m in members if m["seed"] == members[0]["seed"]]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(8.5, 2.1 * len(first_seed)), 5.4), layout="constrained")
        above, below = figure.subfigures(2, 1, height_ratios=(1, 1.25))
        lowest = min(np.min(m["similarity"]) for m in first_seed)
        panels = above.subplots(1, len(first_seed), sharey=True, squeeze=False)[0]
        for axes, member in zip(panels, first_seed):
            num_layers = len(member["similarity"])
            extent = (0.5, num_layers + 0.5, num_layers + 0.5, 0.5)
            image = axes.imshow(member["similarity"], cmap="viridis", vmin=lowest, vmax=1.0, extent=extent)
            axes.set(title=f"rate {member['rate']:g}", xlabel="layer")
        panels[0].set_ylabel("layer")
        above.colorbar(image, ax=panels, label="layer similarity")

        fit, accuracies, emergence = below.subplots(1, 3)
        fit.plot([m["mean_similarity"] for m in members], [m["r2"] for m in members], "o", ms=5, color=RAPTOR)
        for m in members:
            fit.annotate(f"{m['rate']:g}", (m["mean_similarity"], m["r2"]), xytext=(4, 4), textcoords="offset points")
        found = results["correlation"]
        if found["r"] is not None:
            fit.set_title(f"r = {found['r']:.2f} ({found['low']:.2f} to {found['high']:.2f}), n = {found['n']}")
        fit.set(xlabel="mean layer similarity", ylabel="Raptor's R² to the teacher")
        fit.margins(0.15)

        for key, color, label in (("teacher_accuracy", TEACHER, "teacher"), ("accuracy", RAPTOR, "Raptor")):
            points = [m["rate"] for m in members], [m[key] for m in members]
            accuracies.plot(*points, "o", ms=5, color=color, label=label)
            rates = sorted({m["rate"] for m in members})
            means = [np.mean([m[key] for m in members if m["rate"] == rate]) for rate in rates]
            accuracies.plot(rates, means, lw=1, color=color)
        accuracies.yaxis.set_major_formatter(PercentFormatter(1.0))
        accuracies.set(xlabel="stochastic depth rate", ylabel="accuracy")
        accuracies.legend(frameon=False)

        shades = mpl.colormaps["viridis"](np.linspace(0.1, 0.85, len(first_seed)))
        for member, shade in zip(first_seed, shades):
            steps = [entry["step"] for entry in member["during_training"]]
            gap = [entry["phase_objective"] - entry["random_objective"] for entry in member["during_training"]]
            emergence.plot(steps, gap, marker="o", ms=3, color=shade)
            if steps:
                place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
                emergence.annotate(f"rate {member['rate']:g}", (steps[-1], gap[-1]), color=shade, **place)
        emergence.set(xlabel="step of the teacher's training", ylabel="phases above random ones")
        emergence.margins(x=0.28)
        emergence.set_visible(any(member["during_training"] for member in first_seed))
    return figure
