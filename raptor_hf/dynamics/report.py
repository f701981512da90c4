"""The report: each figure with a sentence made of its numbers, the paper's claim, and whether it holds here."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from ..plots import plot_similarity, save_figure, share_limits
from ..summary import table
from . import figures

TEMPLATE = Path(__file__).with_name("report_template.html")


@dataclass
class Section:
    """
    A measure: its figure's name, a heading, how to read it, how to draw it, the claim that it bears on, a sentence
    made of its numbers where there is no claim, or more to say, and the result that it needs.
    """

    name: str
    heading: str
    caption: str
    plot: Callable[[dict, str], Figure]
    claim: str | None = None
    sentence: Callable[[dict], str] | None = None
    needs: str | None = None


def _similarity_sentence(result: dict) -> str:
    similarity, sizes = result["similarity"], result["phase_sizes"]
    phase = [i for i, size in enumerate(sizes) for _ in range(size)]
    pairs = [(i, j) for i in range(len(phase)) for j in range(i)]
    inside = [similarity[i][j] for i, j in pairs if phase[i] == phase[j]]
    across = [similarity[i][j] for i, j in pairs if phase[i] != phase[j]]
    means = {where: f"{sum(part) / len(part):.2f}" for where, part in (("inside", inside), ("across", across)) if part}
    spans = ", ".join(f"{end - size + 1}–{end}" for size, end in zip(sizes, accumulate(sizes)))
    if not across:
        return f"A single phase, of layers {spans}." + "".join(
            f" Their mean similarity is {x}." for x in means.values()
        )
    said = " and ".join(f"{mean} {where}" for where, mean in means.items())
    return f"Phases of layers {spans}. The mean similarity of two layers is {said} phases."


def _norm_sentence(result: dict) -> str:
    parts = [
        f"{name} from {token['norm']['mean'][0]:.3g} to {token['norm']['mean'][-1]:.3g}"
        for name, token in result["tokens"].items()
    ]
    return f" The length of the states goes, for {', '.join(parts)}."


def _recurrence_sentence(result: dict) -> str:
    said = []
    for orbit in result["recurrence"]:
        if orbit["token"] == "patch":
            states, directions = (
                ", ".join(f"{kind} for {count}" for kind, count in orbit[what].items())
                for what in ("outcomes", "directions")
            )
            said.append(f"block {orbit['phase'] + 1}, {orbit['depth_step']}, {states} (directions: {directions})")
    number = len(result["recurrence"][0]["step_size"])
    return f"Patch tokens after {number} applications, by the number of images: {'; '.join(said)}."


SECTIONS = (
    Section(
        "similarity",
        "Layer similarity",
        "Cosine between the states of two layers (mean of cls and of the mean patch), frames: phases.",
        lambda result, title: plot_similarity(result["similarity"], result["phase_sizes"], title),
        sentence=_similarity_sentence,
    ),
    Section(
        "convergence",
        "Directional convergence and growth",
        "Above: cosine of each state to the token's last one. Below: length of the states.",
        figures.plot_convergence,
        "directional convergence",
        _norm_sentence,
    ),
    Section(
        "angular_speed",
        "Angular speed",
        "The angle by which each layer turns a token.",
        figures.plot_angular_speed,
        "late cls reorientation",
    ),
    Section(
        "coherence",
        "Coherence",
        "Above: length of the mean of unit updates, 1 if all tokens move the same way. Below: cosine of each token to "
        "the mean direction of its image.",
        figures.plot_coherence,
        "patch coherence",
    ),
    Section(
        "rank",
        "Rank of updates",
        "In how many dimensions a layer's updates live, over all tokens and images.",
        figures.plot_rank,
        "low-rank late updates",
    ),
    Section(
        "spectra",
        "Dynamic mode decomposition",
        "Eigenvalues of the best linear map between consecutive states on their leading modes, the growth of norms "
        "divided out, and the unit circle.",
        figures.plot_spectra,
        "weak contraction",
    ),
    Section(
        "self_correction",
        "Self-correction",
        "Tokens are pushed at right angles to themselves, and the model runs on: their angle to the clean trajectory, "
        "in units of the push. Below 1, the push has shrunk.",
        figures.plot_self_correction,
        "self-correction",
        needs="self_correction",
    ),
    Section(
        "boundaries",
        "Jumps at phase boundaries",
        "The angular speed again, with phases shaded. Cuts that were found on the similarity of these layers are not "
        "independent of their speed.",
        figures.plot_angular_speed,
        "jumps at phase boundaries",
    ),
    Section(
        "basins",
        "Angular basins",
        "Trajectories of images in the two principal directions of where they end; dots: the last layer.",
        figures.plot_basins,
        "class-dependent basins",
    ),
    Section(
        "recurrence",
        "The recurrence run on",
        "A block is applied past its trained number: how far each application still moves the tokens, for a depth "
        "step that is held (solid) or moved on (dashed).",
        figures.plot_recurrence,
        sentence=_recurrence_sentence,
        needs="recurrence",
    ),
)


def draw_figures(models: list[dict], output_dir: str | Path) -> dict[str, dict[str, Path]]:
    """
    Draws every figure of every model, those of one kind to the same scale, as PNG and SVG.

    Args:
        models: results, each with a `name` and a `slug`, which begins its files' names.
        output_dir: the folder.

    Returns:
        Section to slug to the PNG's path.
    """
    paths = {}
    for section in SECTIONS:
        if section.name == "boundaries":
            continue
        shown = [model for model in models if section.needs is None or section.needs in model]
        # Between two dollars matplotlib would read mathematics.
        drawn = {model["slug"]: section.plot(model, model["name"].replace("$", r"\$")) for model in shown}
        if section.name not in ("similarity", "spectra", "basins"):
            share_limits(list(drawn.values()))
        paths[section.name] = {
            slug: save_figure(figure, Path(output_dir) / f"{slug}_{section.name}") for slug, figure in drawn.items()
        }
    # The same figure, read for another question.
    paths["boundaries"] = paths["angular_speed"]
    return paths


def write_report(path: str | Path, results: dict, paths: dict[str, dict[str, Path]]):
    """
    Writes a page of HTML that needs no other file: figures are embedded, and whatever comes from data is escaped.

    Args:
        path: of the page.
        results: what `eval/dynamics.py` measured: `models`, `comparisons` and `arguments`.
        paths: the figures, as [`draw_figures`] gives them.
    """
    sections = []
    for section in SECTIONS:
        shown = []
        for model in results["models"]:
            if model["slug"] not in paths[section.name]:
                continue
            claim = next((each for each in model["claims"] if each["name"] == section.claim), None)
            sentence = (claim["measured"] if claim else "") + (section.sentence(model) if section.sentence else "")
            svg = paths[section.name][model["slug"]].with_suffix(".svg").read_bytes()
            image = "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
            shown.append({"name": model["name"], "image": image, "sentence": sentence, "claim": claim})
        if shown:
            about = {name: getattr(section, name) for name in ("name", "heading", "caption")}
            sections.append(about | {"models": shown})
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        models=results["models"],
        comparisons=results["comparisons"],
        arguments=results["arguments"],
        claims=list(zip(*(model["claims"] for model in results["models"]))),
        sections=sections,
    )
    Path(path).write_text(page, encoding="utf-8")


def claims_table(models: list[dict]) -> str:
    """The claims as a table of text: a row for each, with each model's verdict and the numbers behind it."""
    header = ["claim", *(model["name"] for model in models)]
    rows = []
    for claims in zip(*(model["claims"] for model in models)):
        numbers = [", ".join(f"{part['value']:.2f}" for part in claim["parts"]) for claim in claims]
        cells = [f"{claim['verdict']}" + (f" ({number})" if number else "") for claim, number in zip(claims, numbers)]
        rows.append([claims[0]["name"], *cells])
    return table(header, rows)
