"""The model card of a Raptor: what it is, what was measured of it, how it was made."""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from markupsafe import Markup
from transformers import PreTrainedModel, TrainingArguments

from .modeling_raptor import RaptorBackbone, RaptorForImageClassification, RaptorModel

TEMPLATE_PATH = Path(__file__).with_name("model_card_template.md")
# Stands in a card for the name of a model that isn't on the Hub yet; `push_to_hub` fills it in.
UNNAMED = "path/to/this-raptor"
AUTO_CLASSES = {
    RaptorForImageClassification: "AutoModelForImageClassification",
    RaptorBackbone: "AutoBackbone",
    RaptorModel: "AutoModel",
}
STAGES = {"before": "Before training", "after_stage1": "After stage 1", "after_stage2": "After stage 2"}
TOKENS = ("cls", "register", "patch")
# Below so many different training images a card warns of it.
FEW_IMAGES = 100_000
# Below this share of its teacher's figure a card names a task among the Raptor's limits.
WEAKER = 0.95
# Of TrainingArguments a card shows those that shape the optimisation, of other arguments all but places and secrets.
OPTIMIZATION_ARGUMENTS = {
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "max_grad_norm"),
    *("lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "bf16", "fp16", "seed"),
}
PRIVATE_ARGUMENT = re.compile(r"^teacher$|(^|_)(dataset|dir|path|folder|files?|config|checkpoint|token|key|hub)(_|$)")
# A slash that follows no name starts a path of this machine.
LOCAL_PATH = re.compile(r"(^|[^\w.])[\\/]")


@dataclass
class Comparison:
    """
    What a card tells of a task: a figure of the Raptor beside the same of its teacher.

    Args:
        task: as readers know it, such as "linear probe".
        dataset, metric: what it was measured on, and by.
        teacher, raptor: the two figures, of a metric that is better the higher it is.
        task_type: the Hub's name for such tasks.
        errors: standard errors of the two figures, where they are known.
    """

    task: str
    dataset: str
    metric: str
    teacher: float
    raptor: float
    task_type: str = "image-classification"
    errors: tuple[float, float] | None = None


def model_card(
    model: PreTrainedModel,
    results: dict | None = None,
    *,
    repo_id: str | None = None,
    license: str | None = None,
    eval_results: list[EvalResult] | None = None,
    comparisons: list[Comparison] | None = None,
    fidelity_at: dict[int, dict] | None = None,
    speed: dict | None = None,
    dynamics: list[dict] | None = None,
    recipes: list[str] | None = None,
    picture: str | None = None,
) -> ModelCard:
    """
    The model card of a Raptor: what it is, what it keeps of its teacher, how it was made, how to use it.

    A figure that isn't given isn't mentioned. Names are escaped, and of a local path only the last part is shown.

    Args:
        model: the Raptor, with or without a head.
        results: any of what `training/distill.py` writes to results.json: `teacher`, `dataset` (a name or a folder),
            `image_size` (pixels), `train_images` (different ones), `arguments`, `wall_time_seconds`, `images_seen`,
            `parameters` and `float16_bytes` (`{"teacher": n, "raptor": n}`), `earlier_training` (`images_seen` and
            `wall_time_seconds` of the Raptor that this one's training went on from), and `fidelity`: for each of
            `before`, `after_stage1`, `after_stage2` what [`raptor_hf.fidelity.LayerFidelity`] computes, lists of L + 1
            numbers, index 0 the embeddings, on images of the argument `validation_dataset` or else of `dataset`.
        repo_id: `user/name`, for the code to use it.
        license: the identifier of the weights' licence on the Hub. Defaults to that of the teacher, where it is one of
            Meta's DINOv2 (Apache-2.0); otherwise none is stated.
        eval_results: further measured figures.
        comparisons: figures with the teacher's own beside them.
        fidelity_at: by image size in pixels, what `fidelity` holds of a stage: of the finished Raptor, in place of
            what `results` holds of its last stage, and shown layer by layer.
        speed: what `benchmarks/inference.py` writes.
        dynamics: `models` of what `eval/dynamics.py` writes, the teacher first and then the Raptor.
        recipes: the files of training/configs that it was trained by, one after the other, each with the flags that
            were given beside it.
        picture: file name, in the card's folder, of a figure of patch features by `eval/patch_components.py`.

    Raises:
        ValueError: if the model is no Raptor, or a recipe no file name and flags.
        huggingface_hub.errors.HFValidationError: if `repo_id` is no name for a repository.
    """
    results = {key: value for key, value in (results or {}).items() if value is not None}
    eval_results, comparisons = eval_results or [], comparisons or []
    if repo_id is not None:
        validate_repo_id(repo_id)
    if any(not re.fullmatch(r"[\w.-]+( --\w+( [\w./-]+)*)*", recipe) for recipe in recipes or []):
        raise ValueError(f"recipes must be names of files in training/configs and plain flags, got {recipes}.")
    teacher, dataset = _source(results.get("teacher")), _source(results.get("dataset"))
    arguments = results.get("arguments", {})
    measured_on = _source(arguments.get("validation_dataset")) or dataset
    fidelity = _fidelity(results, fidelity_at or {})
    title = f"Raptor of {teacher['name']}" if teacher else "Raptor"
    if license is None and teacher and teacher["on_hub"] and teacher["name"].startswith("facebook/dinov2"):
        license = "apache-2.0"
    measured = _fidelity_results(fidelity, measured_on, fidelity_at or {})
    measured += eval_results + [_result(one) for one in comparisons]
    auto_class = next((name for base, name in AUTO_CLASSES.items() if isinstance(model, base)), None)
    if auto_class is None:
        raise ValueError(f"A {type(model).__name__} is no Raptor: this card tells of Raptors only.")
    classifier = auto_class == "AutoModelForImageClassification"
    metadata = ModelCardData(
        license=license,
        base_model=teacher["name"] if teacher and teacher["on_hub"] else None,
        datasets=[dataset["name"]] if dataset and dataset["on_hub"] else None,
        library_name="transformers",
        pipeline_tag="image-classification" if classifier else "image-feature-extraction",
        tags=["raptor", "dinov2", "distillation", "weight-tying", "arxiv:2512.19941"],
        model_name=title if measured else None,
        eval_results=measured or None,
    )
    # What a template puts out is escaped unless it is marked as safe.
    environment = jinja2.Environment(
        finalize=_escape, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))
    return ModelCard(
        template.render(
            metadata=metadata.to_yaml(),
            title=title,
            repo_id=repo_id or UNNAMED,
            model_class=type(model).__name__,
            auto_class=auto_class,
            teacher=teacher,
            measured_on=measured_on,
            num_layers=model.config.num_hidden_layers,
            phases=_phases(model.config),
            sizes=_sizes(results),
            fidelity=_fidelity_rows(fidelity),
            layers=_layers(fidelity, fidelity_at or {}),
            speed=_speed(speed) if speed else None,
            evaluations=eval_results,
            comparisons=[_comparison_row(one) for one in comparisons],
            with_errors=any(one.errors for one in comparisons),
            weaker=_weaker(comparisons),
            claims=_claims(dynamics or []),
            recipes=recipes or [],
            teacher_flag=teacher["name"] if teacher and teacher["on_hub"] else "TEACHER",
            sizes_measured=len(fidelity_at or {}) > 1,
            picture=picture,
            few_images=0 < (results.get("train_images") or 0) < FEW_IMAGES,
            image_size=_trained_at(results),
            training=_training(results, dataset),
            arguments=_arguments(arguments),
        )
    )


def _escape(value):
    """Any value as inline text that neither Markdown nor HTML takes for markup."""
    if isinstance(value, Markup):
        return value
    return re.sub(r"[^\w ,./%+–-]|_", lambda match: f"&#{ord(match[0])};", _one_line(value))


def _one_line(value) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def _source(name) -> dict | None:
    """A teacher or dataset: its name on the Hub, or the last part of its local path."""
    if not name:
        return None
    name = str(name)
    try:
        validate_repo_id(name)
        on_hub = "/" in name and not Path(name).exists()
    except HFValidationError:
        on_hub = False
    return {"name": name if on_hub else _one_line(_last_part(name)), "on_hub": on_hub}


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _figure(value, template: str = "{:.3f}") -> str:
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return template.format(value) if known else "–"


def _phases(config) -> list[dict]:
    phases = []
    for block, size in enumerate(config.phase_sizes):
        layers = [layer for layer, owner in enumerate(config.layer_blocks, start=1) if owner == block]
        contiguous = len(layers) > 2 and layers[-1] - layers[0] == size - 1
        phases.append(
            {
                "layers": f"{layers[0]} to {layers[-1]}" if contiguous else ", ".join(map(str, layers)),
                "applied": (config.phase_iterations or config.phase_sizes)[block],
            }
        )
    return phases


def _sizes(results: dict) -> list[list[str]]:
    rows = []
    for name, label in (("parameters", "Parameters"), ("float16_bytes", "Bytes in float16")):
        counts = [results.get(name, {}).get(side) for side in ("teacher", "raptor")]
        if any(counts):
            share = 100 * counts[1] / counts[0] if all(counts) else None
            rows.append([label, *(_figure(n, "{:,}") for n in counts), _figure(share, "{:.1f} %")])
    return rows


def _summary(metrics: dict) -> dict[str, float]:
    """The figures of one token type that stand for all its layers, without the embeddings."""
    layers = {name: values[1:] for name, values in metrics.items() if values and len(values) > 1}
    summary = {}
    if "cosine" in layers:
        summary |= {"last cosine": layers["cosine"][-1], "lowest cosine": min(layers["cosine"])}
    if "r2" in layers:
        summary["last r2"] = layers["r2"][-1]
    if "relative_error" in layers:
        summary["largest error"] = max(layers["relative_error"])
    return summary


def _fidelity(results: dict, fidelity_at: dict) -> dict[str, dict]:
    """What was measured after each stage and at each image size, by the names that a card gives them."""
    stages = {stage: results.get("fidelity", {}).get(stage) for stage in STAGES}
    stages = {stage: tokens for stage, tokens in stages.items() if tokens}
    named = {}
    for stage, tokens in stages.items():
        # A Raptor that was trained further was no teacher's layers before.
        further = stage == "before" and results.get("earlier_training")
        named["Before this training" if further else STAGES[stage]] = tokens
    if fidelity_at:
        if named:
            named.popitem()
        size = results.get("image_size")
        named = {f"{name}, at {size} pixels" if size else name: tokens for name, tokens in named.items()}
    return named | {_at(size): tokens for size, tokens in fidelity_at.items()}


def _at(size: int) -> str:
    return f"At {size} pixels"


def _fidelity_rows(fidelity: dict) -> list[list[str]]:
    rows = []
    for label, tokens in fidelity.items():
        for name in TOKENS:
            if name in tokens:
                summary = _summary(tokens[name])
                columns = ("last cosine", "lowest cosine", "last r2", "largest error")
                rows.append([label, name, *(_figure(summary.get(column)) for column in columns)])
    return rows


def _layers(fidelity: dict, fidelity_at: dict) -> list[dict]:
    """Tables of cosine, R² and relative error after each layer: at each image size, or else of the last stage."""
    titles = [_at(size) for size in fidelity_at] or list(fidelity)[-1:]
    names = {"cosine": "cosine", "r2": "R²", "relative_error": "relative error"}
    tables = []
    for title in titles:
        tokens = fidelity[title]
        columns = {
            f"{name}, {label}": tokens[name][metric][1:]
            for name in TOKENS
            for metric, label in names.items()
            if name in tokens and tokens[name].get(metric)
        }
        rows = [[layer, *map(_figure, row)] for layer, row in enumerate(zip(*columns.values()), start=1)]
        tables.append({"title": title, "columns": list(columns), "rows": rows})
    return tables


def _speed(speed: dict) -> dict:
    """Images a second of both, and how they compare round by round."""
    rows = []
    for row in speed["results"]:
        pace = (row["batch_size"] / row["median"][side] for side in ("Dinov2Model", "RaptorModel"))
        median, lowest, highest = (_figure(row["ratio"][key], "{:.2f}") for key in ("median", "lowest", "highest"))
        ratio = f"{median}, {lowest} to {highest}"
        setting = [row[name] for name in ("batch_size", "image_size", "dtype", "mode")]
        rows.append([*setting, *(_figure(each, "{:.1f}") for each in pace), ratio])
    return {"machine": speed["machine"], "rows": rows}


def _claims(dynamics: list[dict]) -> list[list[str]]:
    """The verdict of each of the paper's claims, of the teacher and of the Raptor."""
    claims = zip(*(model["claims"] for model in dynamics))
    return [[both[0]["name"], *(claim["verdict"] for claim in both)] for both in claims]


def _fidelity_results(fidelity: dict, dataset: dict | None, fidelity_at: dict) -> list[EvalResult]:
    """The finished Raptor's figures for the model-index, which needs the name of a dataset."""
    if not fidelity or dataset is None:
        return []
    metrics = {
        "last cosine": ("cosine_similarity", "cosine to the teacher, last layer"),
        "lowest cosine": ("cosine_similarity", "cosine to the teacher, lowest of all layers"),
        "last r2": ("r_squared", "R² of the teacher's state, last layer"),
        "largest error": ("relative_error", "relative error to the teacher, largest of all layers"),
    }
    # Without sizes the last stage's, at whatever size that was.
    measured = {f"{size} pixels": fidelity[_at(size)] for size in fidelity_at} or {None: list(fidelity.values())[-1]}
    return [
        EvalResult(
            task_type="image-feature-extraction",
            dataset_type=dataset["name"],
            dataset_name=dataset["name"],
            dataset_config=size,
            metric_type=metrics[key][0],
            metric_name=f"{name}: {metrics[key][1]}",
            metric_value=round(value, 4),
        )
        for size, tokens in measured.items()
        for name in TOKENS
        for key, value in _summary(tokens.get(name, {})).items()
        if math.isfinite(value)
    ]


def _comparison_row(one: Comparison) -> list[str]:
    share = one.raptor / one.teacher if one.teacher else math.nan
    figures = [_figure(value) for value in (one.teacher, one.raptor)]
    if one.errors:
        figures = [f"{figure} ± {_figure(error)}" for figure, error in zip(figures, one.errors)]
    return [one.task, one.dataset, one.metric, *figures, _figure(100 * share, "{:.1f} %")]


def _weaker(comparisons: list[Comparison]) -> list[str]:
    """The tasks in which a Raptor keeps too little of its teacher's figure."""
    shares = [(one, one.raptor / one.teacher) for one in comparisons if one.teacher]
    return [f"{one.task}, {one.dataset}: {100 * share:.1f} %" for one, share in shares if share < WEAKER]


def _result(one: Comparison) -> EvalResult:
    return EvalResult(
        task_type=one.task_type,
        dataset_type=one.dataset,
        dataset_name=one.dataset,
        metric_type=one.metric,
        metric_name=f"{one.task}: {one.metric}",
        metric_value=round(one.raptor, 4),
    )


def _training(results: dict, dataset: dict | None) -> list[tuple[str, str]]:
    rows = {
        "Dataset": dataset and dataset["name"],
        "Image size": _trained_at(results),
        "Different images": results.get("train_images") and _figure(results["train_images"], "{:,}"),
        "Images seen": "images_seen" in results and _figure(results["images_seen"], "{:,}"),
        "Time": _time(results.get("wall_time_seconds")),
    }
    earlier = results.get("earlier_training")
    if earlier:
        images, time = _figure(earlier.get("images_seen"), "{:,}"), _time(earlier.get("wall_time_seconds"))
        rows["Before that"] = f"the training of the Raptor it went on from, {images} images seen in {time}"
    return [(name, value) for name, value in rows.items() if value]


def _trained_at(results: dict) -> str | None:
    if results.get("image_size") is None:
        return None
    arguments = results.get("arguments", {})
    early, share = arguments.get("early_image_size"), arguments.get("early_image_ratio")
    first = f", {early} in the first {100 * share:.0f} % of the steps" if early and share is not None else ""
    return f"{results['image_size']} pixels{first}"


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    for unit, name, template in ((3600, "hours", "{:.1f}"), (60, "minutes", "{:.0f}")):
        if seconds >= unit:
            return f"{_figure(seconds / unit, template)} {name}"
    return _figure(seconds, "{:.0f} seconds")


def _arguments(arguments: dict) -> list[tuple[str, str]]:
    standard = {field.name for field in fields(TrainingArguments)}
    rows = []
    for name, value in arguments.items():
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        if name == "num_train_epochs" and (arguments.get("max_steps") or 0) > 0:
            continue
        shown = name in OPTIMIZATION_ARGUMENTS if name in standard else not PRIVATE_ARGUMENT.search(name)
        if shown and value is not None and text and not LOCAL_PATH.search(text):
            rows.append((name, text))
    return rows
