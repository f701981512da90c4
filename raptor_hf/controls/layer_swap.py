"""Can a teacher's layers stand in for each other, inside a phase and across phases? (arXiv 2512.19941, Figure 15)"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..digits import digits_teacher
from ..images import CenterCrop, PixelValues, load_image_processor
from ..parser import check_at_least_one
from ..phases import find_phases, layer_similarity, random_phases
from ..probes.arguments import EvalArguments
from ..summary import table
from ..teacher_training import teacher_from_recipe
from ..teachers import load_teacher, token_slices, trajectory
from .head import classify, labelled_rows, load_head
from .plots import plot_layer_swap as plot  # noqa: F401
from .statistics import describe, permutation_p_value

OPERATIONS = ("swap", "replace")


@dataclass(kw_only=True)
class Arguments(EvalArguments):
    model: str = field(default="digits", metadata={"help": "The teacher: Hub name or folder, or 'digits'."})
    dataset: str = field(default="digits", metadata={"help": "Images: Hub name, folder, parquet file, or 'digits'."})
    teacher_recipe: str | None = field(
        default=None,
        metadata={"help": "YAML file of train_teacher.py's flags, to train the teacher by where it isn't."},
    )
    operation: str = field(
        default="swap",
        metadata={
            "help": "swap: layers i and j change places. replace: layer j is put in i's place, and stays in its own.",
            "choices": list(OPERATIONS),
        },
    )
    num_phases: int = field(default=3, metadata={"help": "How many phases to find."})
    phase_images: int = field(default=512, metadata={"help": "Training images that the layer similarity is taken of."})
    output_dir: str = field(default="outputs/layer_swap", metadata={"help": "Where the results go."})

    def __post_init__(self):
        super().__post_init__()
        check_at_least_one(self, "num_phases", "phase_images")


def measure(args: Arguments) -> dict:
    """
    Returns:
        `phase_sizes`, the matrices of [`layer_swap`], and for each of them its [`phase_contrast`].

    Raises:
        ValueError: if the teacher, the images, their labels or the phases don't fit.
    """
    name = str(digits_teacher()) if args.model == "digits" else args.model
    if args.teacher_recipe is not None:
        names = ("dataset", "train_split", "test_split", "image_column", "label_column")
        teacher_from_recipe(args.teacher_recipe, output_dir=name, **{n: getattr(args, n) for n in names})
    teacher, head = load_teacher(name, trust_remote_code=args.trust_remote_code), load_head(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher.to(device)
    processor = load_image_processor(name, args.image_size)
    test = args.load_test()
    if head is None:
        rows = PixelValues(test, CenterCrop(processor))
    else:
        head.to(device)
        rows = labelled_rows(test, name, args.label_column, processor)
    images = PixelValues(args.draw_train(args.phase_images), CenterCrop(processor))
    workers = args.dataloader_num_workers
    loader = DataLoader(images, args.batch_size, num_workers=workers)
    similarity = layer_similarity(teacher, loader, progress=True)
    phase_sizes = find_phases(similarity, args.num_phases)
    loader = DataLoader(rows, args.batch_size, num_workers=workers)
    matrices = layer_swap(teacher, loader, head, args.operation, progress=True)
    return {
        "operation": args.operation,
        "phase_sizes": phase_sizes,
        "images": len(rows),
        "matrices": {metric: matrix.tolist() for metric, matrix in matrices.items()},
        "contrast": {metric: phase_contrast(m, phase_sizes, seed=args.seed) for metric, m in matrices.items()},
    }


def summary(results: dict) -> str:
    rows = []
    for metric, found in results["contrast"].items():
        clean = results["matrices"][metric][0][0]
        row = [metric.replace("_", " "), f"{clean:.4f}"]
        if found["difference"] is not None:
            row += [f"{found[part]['mean']:.4f} ± {found[part]['std'] or 0:.4f}" for part in ("intra", "inter")]
            row.append(f"{found['difference']:.4f}")
            row += ["" if found[test] is None else f"{found[test]['p']:.4f}" for test in ("shuffled", "contiguous")]
            distance = found["at_equal_distance"]
            row.append("" if distance is None else f"{distance:+.4f}")
        rows.append(row + [""] * (8 - len(row)))
    header = ["metric", "untouched", "same phase", "different phases", "difference", "p, shuffled", "p, contiguous"]
    sizes = " ".join(map(str, results["phase_sizes"]))
    return f"Phases {sizes}, {results['operation']}\n" + table([*header, "difference at equal distance"], rows)


def layer_order(num_layers: int, i: int, j: int, operation: str = "swap") -> list[int]:
    """
    The order in which layers (0-based) are applied: `"swap"` exchanges layers i and j, `"replace"` puts layer j in
    i's place and leaves it in its own too.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}.")
    order = list(range(num_layers))
    order[i] = j
    if operation == "swap":
        order[j] = i
    return order


@torch.no_grad()
def layer_swap(
    teacher: PreTrainedModel,
    batches: Iterable[dict],
    head: nn.Linear | None = None,
    operation: str = "swap",
    progress: bool = False,
) -> dict[str, np.ndarray]:
    """
    What becomes of a teacher's last state, and of its classes, when layer j is put in layer i's place.

    Args:
        teacher: a DINOv2 model of L layers.
        batches: `pixel_values` (batch, channels, height, width), and `labels` (batch,) where there is a head.
        head: the teacher's linear head on [cls, mean of patches].
        operation: see [`layer_order`].
        progress: whether to show a progress bar.

    Returns:
        `final_cosine`, (L, L): cosine between the last states with and without the change, before the final
        LayerNorm, the mean over images of the cls token's and the patch tokens' mean. `accuracy`, (L, L), if there is
        a head. Row i is the place, column j the layer put there; the diagonal is the teacher as it is.
    """
    layers, slices = teacher.encoder.layer, token_slices(teacher.config)
    num_layers, count = len(layers), 0
    cosine, right = np.zeros((num_layers, num_layers)), np.zeros((num_layers, num_layers))
    pairs = [(i, j) for i in range(num_layers) for j in range(num_layers) if operation == "replace" or i <= j]
    for batch in tqdm(batches, desc="Layer swaps", disable=not progress):
        pixel_values = batch["pixel_values"].to(teacher.device)
        states = trajectory(teacher, pixel_values)
        count += len(pixel_values)
        for i, j in pairs:
            order = layer_order(num_layers, i, j, operation)
            # Up to the first changed layer the states are the teacher's own.
            start = i if operation == "replace" else min(i, j)
            hidden_states = states[:, start] if i != j else states[:, -1]
            for layer in order[start:] if i != j else ():
                hidden_states = layers[layer](hidden_states)
            similar = cosine_similarity(hidden_states, states[:, -1], dim=-1)
            cosine[i, j] += (similar[:, 0] + similar[:, slices["patch"]].mean(dim=1)).sum().item() / 2
            if head is not None:
                classes = classify(head, teacher.layernorm(hidden_states), slices)
                right[i, j] += (classes.cpu() == batch["labels"]).sum().item()
    results = {"final_cosine": cosine / count}
    if head is not None:
        results["accuracy"] = right / count
    if operation == "swap":
        results = {name: matrix + np.triu(matrix, 1).T for name, matrix in results.items()}
    return results


def phase_contrast(matrix: np.ndarray, phase_sizes: Sequence[int], num_shuffles: int = 10_000, seed: int = 0) -> dict:
    """
    Entries of a matrix (L, L) for two layers of one phase against those for two of different phases.

    Returns:
        `intra` and `inter`, their spread, and `difference`, of the means. Its tests, one-sided: `shuffled`, a Mantel
        test, against random assignments of layers to phases of these sizes; `contiguous`, against random contiguous
        segmentations of as many phases, the sharper question, as layers near each other are alike anyway. And
        `at_equal_distance`: the difference among pairs that lie equally far apart, weighted by the intra-phase pairs.
        A part is None where there is nothing to compare.
    """
    matrix = np.asarray(matrix)
    num_layers, k = len(matrix), len(phase_sizes)
    blocks = np.repeat(np.arange(k), phase_sizes)
    # Of a symmetric matrix each pair counts once.
    pairs = ~np.eye(num_layers, dtype=bool)
    if np.array_equal(matrix, matrix.T):
        pairs = np.triu(pairs)

    def difference(assignment) -> float:
        same = assignment[:, None] == assignment[None, :]
        return float(matrix[same & pairs].mean() - matrix[~same & pairs].mean())

    same = blocks[:, None] == blocks[None, :]
    if same.all() or not (same & pairs).any():
        return {"intra": None, "inter": None, "difference": None, "shuffled": None, "contiguous": None} | {
            "at_equal_distance": None
        }
    observed = difference(blocks)
    rng = np.random.default_rng(seed)
    shuffled = [difference(rng.permutation(blocks)) for _ in range(num_shuffles)]
    min_size = min(2, min(phase_sizes))
    contiguous = {tuple(random_phases(num_layers, k, min_size, s)) for s in range(1000)} - {tuple(phase_sizes)}
    contiguous = [difference(np.repeat(np.arange(k), sizes)) for sizes in sorted(contiguous) if max(sizes) > 1]
    return {
        "intra": describe(matrix[same & pairs]),
        "inter": describe(matrix[~same & pairs]),
        "difference": observed,
        "shuffled": {"p": permutation_p_value(observed, shuffled), "n": num_shuffles},
        "contiguous": {"p": permutation_p_value(observed, contiguous), "n": len(contiguous)} if contiguous else None,
        "at_equal_distance": _at_equal_distance(matrix, same),
    }


def _at_equal_distance(matrix: np.ndarray, same: np.ndarray) -> float | None:
    indices = np.arange(len(matrix))
    distance = np.abs(indices[:, None] - indices[None, :])
    differences, weights = [], []
    for d in range(1, len(matrix)):
        intra, inter = matrix[(distance == d) & same], matrix[(distance == d) & ~same]
        if len(intra) and len(inter):
            differences.append(intra.mean() - inter.mean())
            weights.append(len(intra))
    return float(np.average(differences, weights=weights)) if weights else None
