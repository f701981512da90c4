"""A folder of results as one HTML page and one Markdown table, the paper's published figures beside them."""

import base64
import html
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

TEMPLATE_PATH = Path(__file__).with_name("report.html")
# Folders of a series' members: the series' own JSON tells what they gave.
INNER_FOLDERS = ("runs", "teachers")
MAX_HEADLINES = 20
# Figures that are not called as their script.
FIGURES = {"results": "fidelity*.png", "find_phases": "phases_k*.png", "dynamics": "*.png"}


@dataclass(frozen=True)
class Question:
    """What a script asks, and what the paper (arXiv 2512.19941) answers; `published` is None where it doesn't."""

    title: str
    published: str | None = None


# By the name of the JSON file that answers it.
QUESTIONS = {
    "results": Question("Distillation", "layerwise cosine to the teacher above 0.7 at every depth (DINOv2 ViT-B)"),
    "fidelity": Question(
        "Layerwise fidelity", "layerwise cosine to the teacher above 0.7 at every depth (DINOv2 ViT-B)"
    ),
    "knn": Question("k nearest neighbours on frozen features"),
    "linear_probe": Question(
        "Linear probe on frozen features",
        "ImageNet-1k, DINOv2 ViT-B: teacher 84.6 %, Raptor k = 2 about 81.3 % (96.1 % of it), k = 3 83.0 % (98.2 %)",
    ),
    "patch_components": Question("Principal components of patch features, in colour"),
    "segmentation": Question("Segmentation with a linear head"),
    "depth": Question("Depth with a linear head"),
    "partitions": Question(
        "Max-cut partitions against random ones", "max-cut clearly above random ones (ViT-B on CIFAR-100, Figure 3)"
    ),
    "layer_swap": Question(
        "Layers in each other's place", "inside a phase accuracy is kept, across phases it is destroyed (Figure 15)"
    ),
    "ablations": Question("One change at a time", "teacher forcing alone collapses to about 3 % (Table 2)"),
    "scaling": Question(
        "Accuracy against parameters", "k = 2: 96.1 % of the teacher, k = 3: 98.2 %, k = 4 adds little (Figure 7)"
    ),
    "stochastic_depth": Question(
        "Stochastic depth and phases",
        "rates 0 to 0.6 raise the layer similarity and the Raptor's R², 0.7 and more train badly (Figure 4)",
    ),
    "dynamics": Question("Dynamics through depth", "late updates live in about 6 dimensions"),
    "phase_iterations": Question("Compute as a dial"),
    "find_phases": Question("Phases of the teacher", "(7, 5), (7, 3, 2) and (4, 3, 3, 2) for DINOv2 ViT-B"),
}


@dataclass
class Answer:
    """One JSON file of results, read."""

    script: str
    source: str
    question: Question
    arguments: list[tuple[str, str]] = field(default_factory=list)
    headlines: list[tuple[str, str]] = field(default_factory=list)
    figures: list[list[tuple[str, str]]] = field(default_factory=list)
    values: list[tuple[str, str]] = field(default_factory=list)
    problem: str | None = None


def write_report(run_dir: str | Path, output_dir: str | Path | None = None) -> tuple[Path, Path]:
    """
    Gathers every `<script>.json` below a folder into `report.html` (figures embedded, everything from the data
    escaped) and `report.md` (one table). Questions that nothing there answers are listed as not run.

    Args:
        run_dir: the folder.
        output_dir: where the report goes; by default `run_dir`.

    Returns:
        The paths of the HTML page and of the Markdown file.

    Raises:
        ValueError: if there is no such folder, or no results in it.
    """
    run_dir = Path(run_dir)
    output_dir = Path(output_dir or run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"There is no folder {run_dir}: give one that scripts have written results to.")
    answers = gather(run_dir)
    if not answers:
        raise ValueError(f"{run_dir} holds no results: none of {', '.join(f'{name}.json' for name in QUESTIONS)}.")
    not_run = [question for name, question in QUESTIONS.items() if name not in {answer.script for answer in answers}]
    output_dir.mkdir(parents=True, exist_ok=True)
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE_PATH.read_text())
    paths = output_dir / "report.html", output_dir / "report.md"
    paths[0].write_text(page.render(title=run_dir.resolve().name, answers=answers, not_run=not_run))
    paths[1].write_text(markdown_table(answers, not_run) + "\n")
    return paths


def gather(run_dir: Path) -> list[Answer]:
    """What the scripts' JSON files below a folder say, in the order of `QUESTIONS`."""
    found = []
    for path in sorted(run_dir.rglob("*.json")):
        inner = path.relative_to(run_dir).parts[:-1]
        within = any(part in INNER_FOLDERS or part.startswith("checkpoint-") for part in inner)
        if path.stem in QUESTIONS and not within:
            found.append(read_answer(path, run_dir))
    order = list(QUESTIONS)
    return sorted((answer for answer in found if answer is not None), key=lambda answer: order.index(answer.script))


def read_answer(path: Path, run_dir: Path) -> Answer | None:
    """One file's answer; None of a `fidelity.json` or another that a distillation keeps for itself."""
    answer = Answer(path.stem, str(path.relative_to(run_dir)), QUESTIONS[path.stem])
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it doesn't hold an object")
    except (OSError, ValueError) as error:
        answer.problem = f"can't be read ({error})"
        return answer
    if path.stem == "results":
        if "fidelity" not in content or "phase_sizes" not in content:
            return None
        results = {name: value for name, value in content.items() if name != "arguments"}
    elif "results" in content:
        results = content["results"]
    elif "arguments" in content:
        results = {name: value for name, value in content.items() if name != "arguments"}
    else:
        return None
    answer.arguments = list(flatten(content.get("arguments", {})))
    answer.values = list(flatten(results))
    try:
        answer.headlines = HEADLINES[path.stem](results) if path.stem in HEADLINES else answer.values
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        answer.problem = f"is not as this version writes it ({type(error).__name__}: {error})"
        answer.headlines = answer.values
    left_out = len(answer.headlines) - MAX_HEADLINES
    if left_out > 0:
        answer.headlines = [*answer.headlines[:MAX_HEADLINES], ("and", f"{left_out} more numbers")]
    answer.figures = [
        (figure.stem.replace("_", " "), base64.b64encode(figure.read_bytes()).decode())
        for figure in sorted(path.parent.glob(FIGURES.get(path.stem, f"{path.stem}*.png")))
    ]
    return answer


def flatten(value, name: str = "") -> Iterator[tuple[str, str]]:
    """The scalars of a JSON value, with their path as a name; of lists only short ones of scalars."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{name}, {key}" if name else str(key))
    elif isinstance(value, list):
        if len(value) <= 16 and not any(isinstance(inner, (dict, list)) for inner in value):
            yield name, " ".join(map(number, value))
        elif value and isinstance(value[0], dict) and len(value) <= 32:
            for index, inner in enumerate(value, start=1):
                yield from flatten(inner, f"{name} {index}".strip())
    elif value is not None:
        yield name, number(value)


def number(value) -> str:
    """A scalar as text, floats to four digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _distillation(results: dict) -> list[tuple[str, str]]:
    lines = [("phases", " ".join(map(str, results["phase_sizes"])))]
    for moment, tokens in results["fidelity"].items():
        for token, curves in tokens.items():
            cosine = curves["cosine"]
            text = f"{cosine[-1]:.3f}, lowest {min(cosine):.3f}"
            lines.append((f"{token} cosine at the last layer, {moment.replace('_', ' ')}", text))
    return lines


def _partitions(results: dict) -> list[tuple[str, str]]:
    lines = []
    for metric, groups in results["groups"].items():
        for group, found in groups.items():
            spread = "" if found["std"] is None else f" ± {found['std']:.4f}"
            lines.append((f"{metric.replace('_', ' ')}, {group}", f"{found['mean']:.4f}{spread} (n = {found['n']})"))
        for objective, found in results["max_cut"][metric].items():
            text = ", ".join(f"p = {found[group]['p']:.3f} against {group}" for group in found if group != "mean")
            lines.append((f"{metric.replace('_', ' ')}, best by {objective}", text))
    return lines


def _layer_swap(results: dict) -> list[tuple[str, str]]:
    lines = [("phases", " ".join(map(str, results["phase_sizes"])))]
    for metric, found in results["contrast"].items():
        name = metric.replace("_", " ")
        if found["difference"] is None:
            continue
        for part, label in (("intra", "same phase"), ("inter", "different phases")):
            lines.append((f"{name}, {label}", f"{found[part]['mean']:.4f} (n = {found[part]['n']})"))
        for test in ("shuffled", "contiguous"):
            if found[test] is not None:
                lines.append((f"{name}, p against {test} phases", f"{found[test]['p']:.4f}"))
        if found["at_equal_distance"] is not None:
            lines.append((f"{name}, difference at equal distance", f"{found['at_equal_distance']:+.4f}"))
    return lines


def _ablations(results: dict) -> list[tuple[str, str]]:
    lines = []
    for name, found in results["members"].items():
        text = f"cosine {found['final_cosine']:.4f}"
        lines.append((name.replace("_", " "), f"{share(found['accuracy'])} {text}".strip()))
    return lines


def _scaling(results: dict) -> list[tuple[str, str]]:
    lines = []
    for count, found in results["members"].items():
        text = f"{share(found['accuracy'])} cosine {found['final_cosine']:.4f}, {found['parameters']:,} parameters"
        lines.append((f"k = {count}", text.strip()))
    teacher = results["teacher"]
    lines.append(("teacher", f"{share(teacher['accuracy'])} {teacher['parameters']:,} parameters".strip()))
    return lines


def _stochastic_depth(results: dict) -> list[tuple[str, str]]:
    lines = []
    for m in results["members"].values():
        text = f"similarity {m['mean_similarity']:.4f}, R² {m['r2']:.4f}, teacher {share(m['teacher_accuracy'])}, "
        lines.append((f"rate {m['rate']:g}, seed {m['seed']}", text + f"Raptor {share(m['accuracy'])}"))
    found = results["correlation"]
    if found["r"] is not None:
        text = f"{found['r']:.3f} ({found['low']:.3f} to {found['high']:.3f}, n = {found['n']})"
        lines.append(("correlation, 95 % interval", text))
    return lines


def _dynamics(results: dict) -> list[tuple[str, str]]:
    return [
        (f"{model['name']}, {claim['name']}", f"{claim['verdict']}. {claim['measured']}")
        for model in results["models"]
        for claim in model["claims"]
    ]


HEADLINES: dict[str, Callable[[dict], list[tuple[str, str]]]] = {
    "results": _distillation,
    "partitions": _partitions,
    "layer_swap": _layer_swap,
    "ablations": _ablations,
    "scaling": _scaling,
    "stochastic_depth": _stochastic_depth,
    "dynamics": _dynamics,
}


def markdown_table(answers: list[Answer], not_run: list[Question]) -> str:
    """The headlines as one Markdown table, what was not run said as such."""
    rows = [["question", "file", "measured", "published (arXiv 2512.19941)"], ["---"] * 4]
    for answer in answers:
        measured = [f"{name}: {value}" for name, value in answer.headlines] + [answer.problem or ""]
        cells = [answer.question.title, answer.source, *filter(None, measured)]
        title, source, *measured = map(_cell, cells)
        rows.append([title, source, "<br>".join(measured), _cell(answer.question.published or "")])
    rows += [[_cell(question.title), "", "not run", _cell(question.published or "")] for question in not_run]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(text: str) -> str:
    """Text that can neither end a cell of a Markdown table nor be taken for HTML."""
    return html.escape(" ".join(text.split()), quote=False).replace("\\", "\\\\").replace("|", "\\|")
