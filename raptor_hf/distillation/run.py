"""One distillation run, from names and numbers to a saved Raptor and its results."""

import dataclasses
import logging
import os
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import psutil
import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader
from transformers import set_seed
from transformers.utils import SAFE_WEIGHTS_NAME

from ..configuration_raptor import as_pair
from ..decisive import decisive_arguments
from ..digits import digits_teacher
from ..files import (
    check_apart,
    check_writable,
    file_sha256,
    read_json,
    write_json,
    written_aside,
)
from ..hub import push_to_hub, save_with_card
from ..images import (
    NAMED_IMAGES,
    CenterCrop,
    PixelValues,
    RandomResizedCrop,
    StreamedPixelValues,
    count_bad_images,
    crop_size,
    draw_images,
    load_image_dataset,
    load_image_processor,
    split_names,
    take_images,
    without_bad_images,
)
from ..phases import check_partition, find_phases, layer_similarity
from ..plots import plot_fidelity, plot_similarity, save_figure
from ..teachers import load_teacher, load_teacher_config, trajectory
from .arguments import DataArguments, DistillationArguments, ModelArguments
from .checkpoints import last_whole_checkpoint
from .faults import RunStopped, told_in_one_line
from .run_folder import (
    ARGUMENTS_NAME,
    PHASES_NAME,
    RESULTS_NAME,
    WRITTEN_NAMES,
    check_same_weights,
    earlier_results,
    leave_nothing_of_a_refused_run,
    lock,
    remove_earlier_run,
)
from .sharding import whole_model
from .student import earlier_training, load_student, student_config
from .trainer import RaptorTrainer

logger = logging.getLogger(__name__)
HELD_OUT, MIN_PHASE_SIZE = 256, 2


def distill(model_args: ModelArguments, data_args: DataArguments, args: DistillationArguments) -> dict:
    """
    Distils a teacher into a Raptor, or goes on with the run that `args.output_dir` holds.

    Writes to `args.output_dir`: the Raptor and its image processor, `phases.json` and the similarity figure,
    `results.json` and the fidelity figure, and Trainer's checkpoints.

    Returns:
        What `results.json` holds.

    Raises:
        ValueError: if what is asked for doesn't fit together, or the folder holds a run with other arguments.
        RunStopped: if too many images are bad or steps not finite, or memory or disk don't suffice.
        RunInterrupted: after SIGTERM, when a checkpoint was saved.
    """
    output_dir = Path(args.output_dir)
    check_writable(output_dir, WRITTEN_NAMES)
    settings = run_settings(model_args, data_args, args)
    sources = {"teacher": model_args.teacher, "init": model_args.init_raptor, "dataset": data_args.dataset}
    check_apart(output_dir, sources | {"validation_dataset": data_args.validation_dataset})
    with args.main_process_first(local=False):
        finished = None if args.overwrite_output_dir else earlier_results(output_dir, settings)
    if finished is not None:
        _push(output_dir, args)
        return finished
    with told_in_one_line(), ExitStack() as held:
        trainer, known = _prepare(model_args, data_args, args, settings, held)
        return _train_and_save(trainer, settings, known)


def _prepare(
    model_args: ModelArguments, data_args: DataArguments, args: DistillationArguments, settings: dict, held: ExitStack
) -> tuple[RaptorTrainer, dict]:
    """
    Everything but the training; and what is known by then for the results: `earlier_training`, and
    `bad_validation_images`, by name and fault. From when something is written, the output folder's lock is among what
    is `held`.
    """
    output_dir = Path(args.output_dir)
    if model_args.teacher == "digits":
        model_args = dataclasses.replace(model_args, teacher=str(digits_teacher()))
    teacher_config = load_teacher_config(model_args.teacher, model_args.trust_remote_code)
    processor = load_image_processor(model_args.teacher, data_args.image_size)
    image_size = crop_size(processor)
    for name, size in (("image_size", image_size), ("early_image_size", args.early_image_size or image_size)):
        patch_size = as_pair(teacher_config.patch_size)
        if any(size % side for side in patch_size):
            shown = patch_size[0] if len(set(patch_size)) == 1 else patch_size
            raise ValueError(f"{name} {size} is not a multiple of the teacher's patch size {shown}.")
    asked = (args.metric_for_best_model or "").removeprefix("eval_")
    if asked.startswith("register_") and not getattr(teacher_config, "num_register_tokens", 0):
        raise ValueError(f"metric_for_best_model {asked} is of registers, and the teacher has none.")
    if (args.early_image_size or 0) > image_size:
        raise ValueError(f"early_image_size {args.early_image_size} is larger than image_size {image_size}.")
    phase_sizes = model_args.phase_sizes
    if model_args.phases_to_find:
        check_partition(teacher_config.num_hidden_layers, model_args.phases_to_find, MIN_PHASE_SIZE)
    # Refuses what doesn't fit before anything large is loaded; the sizes to be found are stood in for.
    stand_in = [1] * teacher_config.num_hidden_layers if model_args.phases_to_find else phase_sizes
    student_config(model_args, teacher_config, stand_in)
    cost_before = earlier_training(model_args.init_raptor)
    train, validation, bad_validation_images = _load_images(data_args, args)
    centre = CenterCrop(processor)
    crop = centre
    if data_args.crop == "random":
        crop = RandomResizedCrop(
            processor, image_size, tuple(data_args.crop_scale), data_args.flip, data_args.augment_ratio
        )
    if data_args.streaming:
        rows = StreamedPixelValues(train, crop, args.seed)
    else:
        rows = PixelValues(train, crop, args.seed, replace_bad=True)
        # Where no image can be read, this says so before anything large is loaded.
        rows[0]

    teacher = load_teacher(model_args.teacher, trust_remote_code=model_args.trust_remote_code)
    teacher.to(args.device)
    pixel_values = PixelValues(validation, centre)[0]["pixel_values"]
    if not trajectory(teacher, pixel_values[None].to(args.device)).isfinite().all():
        raise ValueError(f"The states of teacher {model_args.teacher} are not finite: give a sound one.")
    if args.process_index == 0:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"output_dir {output_dir} can't be made ({error}): give another --output_dir.") from error
        held.callback(lock(output_dir).release)
        # Not before: a command that is refused costs nothing.
        if args.overwrite_output_dir:
            remove_earlier_run(output_dir)
        if not (output_dir / ARGUMENTS_NAME).is_file():
            (output_dir / PHASES_NAME).unlink(missing_ok=True)
            write_json(output_dir / ARGUMENTS_NAME, settings)
        held.push(partial(leave_nothing_of_a_refused_run, output_dir))
    if model_args.phases_to_find:
        phase_sizes = _find_phases(teacher, train, centre, model_args, args, output_dir)

    set_seed(args.seed)
    student = load_student(model_args, teacher, phase_sizes)
    if args.process_index == 0:
        started_from = {"teacher": teacher, "init": student} if model_args.init_raptor else {"teacher": teacher}
        check_same_weights(output_dir, settings, started_from)
    trainer = RaptorTrainer(
        student,
        teacher,
        args,
        train_dataset=rows,
        eval_dataset=PixelValues(validation, centre),
        processing_class=processor,
    )
    return trainer, {"earlier_training": cost_before, "bad_validation_images": bad_validation_images}


def _train_and_save(trainer: RaptorTrainer, settings: dict, known: dict) -> dict:
    args, output_dir = trainer.args, Path(trainer.args.output_dir)
    trainer.train_from(broadcast_object_list([last_whole_checkpoint(output_dir)])[0])
    last_stage = 1 if trainer.stage1_steps == trainer.state.max_steps else 2
    fidelity = trainer.record_fidelity(f"after_stage{last_stage}")
    student = whole_model(trainer.student)
    cosines = [curves["cosine"] for curves in fidelity[f"after_stage{last_stage}"].values()]
    if not np.isfinite(cosines).all() or not all(weight.isfinite().all() for weight in student.parameters()):
        raise RunStopped(
            "The Raptor's weights or states are not finite after training, so it is not saved. Lower --learning_rate, "
            "or train in float32, with --overwrite_output_dir true."
        )

    processor, faults, bad_validation_images = trainer.processing_class, trainer.faults, known["bad_validation_images"]
    results = {
        "teacher": settings["teacher"],
        "dataset": settings["dataset"],
        "phase_sizes": student.config.phase_sizes,
        "image_size": crop_size(processor),
        "arguments": settings,
        "wall_time_seconds": trainer.elapsed_seconds,
        "train_images": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
        "images_seen": trainer.state.global_step * settings["batch_size"],
        "earlier_training": known["earlier_training"],
        "bad_images": {
            "train": faults["bad_images"],
            "validation": len(bad_validation_images),
            "first": faults["bad_image_names"] + bad_validation_images[:NAMED_IMAGES],
        },
        "nonfinite_steps": faults["nonfinite_steps"],
        "parameters": {"teacher": trainer.teacher.num_parameters(), "raptor": student.num_parameters()},
        "fidelity": fidelity,
        "during_training": [entry for entry in trainer.state.log_history if "eval_train_seconds" in entry],
    }
    if trainer.is_world_process_zero():
        with written_aside(output_dir) as aside:
            save_with_card(student, processor, results, aside)
            save_figure(plot_fidelity(fidelity, student.config.phase_sizes), aside / "fidelity")
            results["weights_sha256"] = file_sha256(aside / SAFE_WEIGHTS_NAME)
        write_json(output_dir / RESULTS_NAME, results)
        _push(output_dir, args)
    trainer.accelerator.wait_for_everyone()
    return results


def _push(output_dir: Path, args: DistillationArguments):
    if args.push_to_hub and args.process_index == 0:
        where = {"token": args.hub_token, "private": args.hub_private_repo, "revision": args.hub_revision}
        try:
            push_to_hub(output_dir, args.repo_id, **where)
        # Whatever the Hub's client raises: no network, no login, no such right.
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RunStopped(
                f"The Raptor is saved in {output_dir}, but can't be pushed to {args.repo_id} ({reason}): the same "
                "command tries that again, without training."
            ) from error


def _load_images(data_args: DataArguments, args: DistillationArguments):
    """The training split, perhaps streamed, the images to measure on, and those of them that can't be read."""

    def load(name, split):
        return load_image_dataset(name, split, data_args.streaming, data_args.image_column)

    train = load(data_args.dataset, data_args.train_split)
    name = data_args.validation_dataset or data_args.dataset
    split = data_args.validation_split or "validation"
    if data_args.validation_split or data_args.validation_dataset or "validation" in split_names(name):
        validation = load(name, split)
    elif data_args.streaming:
        raise ValueError(
            f"{name} has no validation split, and --streaming holds none out: name --validation_split or "
            "--validation_dataset."
        )
    else:
        parts = train.train_test_split(test_size=min(HELD_OUT, max(1, len(train) // 10)), seed=args.seed)
        train, validation = parts["train"], parts["test"]
        logger.warning("%s has no validation split: %s images are held out of training.", name, len(validation))
    if data_args.streaming:
        validation = take_images(validation, data_args.max_eval_samples)
        train = train.take(data_args.max_train_samples) if data_args.max_train_samples else train
    else:
        validation = validation.select(range(min(len(validation), data_args.max_eval_samples)))
        if data_args.max_train_samples:
            train = train.select(range(min(len(train), data_args.max_train_samples)))
        if len(train) < args.global_batch_size and args.dataloader_drop_last:
            raise ValueError(
                f"{len(train)} training images don't fill one batch of {args.global_batch_size}: lower "
                "--per_device_train_batch_size."
            )
    validation, bad = without_bad_images(validation)
    for image in bad[:NAMED_IMAGES]:
        logger.warning("A validation image can't be read, and is not measured on: %s.", image)
    if len(validation) < args.world_size:
        raise ValueError(f"{len(validation)} validation images are fewer than the {args.world_size} processes.")
    return train, validation, bad


def _find_phases(teacher, train, centre, model_args: ModelArguments, args, output_dir: Path) -> list[int]:
    """Phases of the teacher on training images, found once by the first process and kept in `phases.json`."""
    path = output_dir / PHASES_NAME
    sizes = [None]
    if args.process_index == 0:
        if path.is_file():
            found = read_json(path).get("phase_sizes")
            depth = teacher.config.num_hidden_layers
            if not isinstance(found, list) or not all(type(n) is int for n in found) or sum(found) != depth:
                raise ValueError(f"{path} is damaged (it holds no phase sizes of {depth} layers): delete it.")
            sizes = [found]
        else:
            if isinstance(train, datasets.IterableDataset):
                images, bad = without_bad_images(take_images(train, model_args.phase_images))
            else:
                images, bad = draw_images(train, model_args.phase_images, args.seed)
            loader = DataLoader(PixelValues(images, centre), args.per_device_eval_batch_size)
            similarity = layer_similarity(teacher, loader, progress=not args.disable_tqdm)
            phases = find_phases(similarity, model_args.phases_to_find, MIN_PHASE_SIZE, model_args.phase_objective)
            with written_aside(output_dir) as aside:
                figure = plot_similarity(similarity, phases, "Layer similarity of the teacher")
                save_figure(figure, aside / "phases")
            found = {"phase_sizes": phases, "similarity": similarity.tolist(), "images": len(images)}
            write_json(path, found | {"bad_images": count_bad_images({"train": bad})})
            sizes = [phases]
    return broadcast_object_list(sizes)[0]


def use_every_core(args: DistillationArguments):
    """
    On a CPU: undoes that `accelerate launch` and `torchrun` leave each process one thread, whatever is there; unless
    the launcher itself was started with `OMP_NUM_THREADS`.
    """
    launched = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & set(os.environ)
    if args.device.type != "cpu" or not launched or os.environ.get("OMP_NUM_THREADS") != "1":
        return
    with suppress(psutil.Error):
        if "OMP_NUM_THREADS" not in psutil.Process(os.getppid()).environ():
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def run_settings(model_args: ModelArguments, data_args: DataArguments, args: DistillationArguments) -> dict:
    """The arguments that decide a run's outcome: two runs that agree in them are the same run."""
    streamed = ("dataloader_num_workers",) if data_args.streaming else ()
    settings = decisive_arguments(
        args,
        indifferent=("overwrite_output_dir", "max_bad_image_share", "max_nonfinite_steps"),
        more=streamed,
        beside=dataclasses.asdict(model_args) | dataclasses.asdict(data_args),
    )
    return settings | {"batch_size": args.global_batch_size}
