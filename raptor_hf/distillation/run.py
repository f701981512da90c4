"""One distillation run, from names and numbers to a saved Raptor and its results."""

import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader
from transformers import TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..digits import digits_teacher
from ..files import write_json
from ..hub import push_to_hub, save_with_card
from ..images import (
    CenterCrop,
    PixelValues,
    RandomResizedCrop,
    StreamedPixelValues,
    crop_size,
    load_image_dataset,
    load_image_processor,
    split_names,
    take_images,
)
from ..modeling_raptor import RaptorModel, raptor_config_of_teacher
from ..phases import check_partition, find_phases, layer_similarity
from ..plots import plot_fidelity, plot_similarity, save_figure
from ..teachers import load_teacher, load_teacher_config
from .arguments import DataArguments, DistillationArguments, ModelArguments
from .trainer import FIDELITY_NAME, RaptorTrainer

logger = logging.getLogger(__name__)
ARGUMENTS_NAME, PHASES_NAME, RESULTS_NAME = "arguments.json", "phases.json", "results.json"
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
    """
    output_dir = Path(args.output_dir)
    settings = _settings(model_args, data_args, args)
    with args.main_process_first(local=False):
        finished = _earlier_results(output_dir, settings, args.overwrite_output_dir)
    if finished is not None:
        _push(output_dir, args)
        return finished
    if model_args.teacher == "digits":
        model_args = dataclasses.replace(model_args, teacher=str(digits_teacher()))
    teacher_config = load_teacher_config(model_args.teacher, model_args.trust_remote_code)
    processor = load_image_processor(model_args.teacher, data_args.image_size)
    image_size = crop_size(processor)
    for name, size in (("image_size", image_size), ("early_image_size", args.early_image_size or image_size)):
        if size % teacher_config.patch_size:
            raise ValueError(
                f"{name} {size} is not a multiple of the teacher's patch size {teacher_config.patch_size}."
            )
    phase_sizes = model_args.phase_sizes
    find = phase_sizes is None and model_args.block_assignment is None
    if find:
        check_partition(teacher_config.num_hidden_layers, model_args.num_phases or 3, MIN_PHASE_SIZE)
    # Refuses what doesn't fit before anything large is loaded; the sizes to be found are stood in for.
    raptor_config_of_teacher(
        teacher_config,
        init=model_args.init,
        phase_sizes=[1] * teacher_config.num_hidden_layers if find else phase_sizes,
        **model_args.block_settings(),
    )
    train, validation = _load_images(data_args, args)

    teacher = load_teacher(model_args.teacher, trust_remote_code=model_args.trust_remote_code)
    teacher.to(args.device)
    if args.process_index == 0:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_json(output_dir / ARGUMENTS_NAME, settings)
    centre = CenterCrop(processor)
    if find:
        phase_sizes = _find_phases(teacher, train, centre, model_args, args, output_dir)

    set_seed(args.seed)
    student = RaptorModel.from_teacher(
        teacher,
        phase_sizes,
        init=model_args.init,
        source_layers=model_args.source_layers,
        **model_args.block_settings(),
    )
    if data_args.crop == "random":
        crop = RandomResizedCrop(processor, image_size, scale=tuple(data_args.crop_scale), flip=data_args.flip)
    else:
        crop = centre
    rows = StreamedPixelValues if data_args.streaming else PixelValues
    trainer = RaptorTrainer(
        student,
        teacher,
        args,
        train_dataset=rows(train, crop, args.seed),
        eval_dataset=PixelValues(validation, centre),
        processing_class=processor,
    )
    trainer.train_from(last_whole_checkpoint(output_dir))
    last_stage = 1 if trainer.stage1_steps == trainer.state.max_steps else 2
    fidelity = trainer.record_fidelity(f"after_stage{last_stage}")

    results = {
        "teacher": settings["teacher"],
        "dataset": data_args.dataset,
        "phase_sizes": student.config.phase_sizes,
        "image_size": image_size,
        "arguments": settings,
        "wall_time_seconds": trainer.elapsed_seconds,
        "images_seen": trainer.state.global_step * settings["batch_size"],
        "parameters": {"teacher": teacher.num_parameters(), "raptor": student.num_parameters()},
        "fidelity": fidelity,
    }
    if trainer.is_world_process_zero():
        save_with_card(trainer.student, processor, results, output_dir)
        save_figure(plot_fidelity(fidelity, student.config.phase_sizes), output_dir / "fidelity")
        write_json(output_dir / RESULTS_NAME, results)
        _push(output_dir, args)
    trainer.accelerator.wait_for_everyone()
    return results


def _push(output_dir: Path, args: DistillationArguments):
    if args.push_to_hub and args.process_index == 0:
        repo_id = args.hub_model_id or output_dir.resolve().name
        push_to_hub(
            output_dir, repo_id, token=args.hub_token, private=args.hub_private_repo, revision=args.hub_revision
        )


def _load_images(data_args: DataArguments, args: DistillationArguments):
    """The training split, perhaps streamed, and the images to measure on."""

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
    if len(validation) < args.world_size:
        raise ValueError(f"{len(validation)} validation images are fewer than the {args.world_size} processes.")
    return train, validation


def _find_phases(teacher, train, centre, model_args: ModelArguments, args, output_dir: Path) -> list[int]:
    """Phases of the teacher on training images, found once by the first process and kept in `phases.json`."""
    path = output_dir / PHASES_NAME
    sizes = [None]
    if args.process_index == 0:
        if path.is_file():
            sizes = [json.loads(path.read_text())["phase_sizes"]]
        else:
            if isinstance(train, datasets.IterableDataset):
                images = take_images(train, model_args.phase_images)
            else:
                order = np.random.default_rng(args.seed).permutation(len(train))
                images = train.select(order[: model_args.phase_images])
            loader = DataLoader(PixelValues(images, centre), args.per_device_eval_batch_size)
            similarity = layer_similarity(teacher, loader, progress=not args.disable_tqdm)
            sizes = [find_phases(similarity, model_args.num_phases or 3, MIN_PHASE_SIZE, model_args.phase_objective)]
            write_json(path, {"phase_sizes": sizes[0], "similarity": similarity.tolist(), "images": len(images)})
            save_figure(
                plot_similarity(similarity, sizes[0], "Layer similarity of the teacher"), output_dir / "phases"
            )
    return broadcast_object_list(sizes)[0]


def use_every_core(args: DistillationArguments):
    """On a CPU: undoes that `accelerate launch` and `torchrun` leave each process one thread, whatever is there."""
    launched = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & set(os.environ)
    if args.device.type == "cpu" and launched and os.environ.get("OMP_NUM_THREADS") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def last_whole_checkpoint(output_dir: Path) -> str | None:
    """The newest checkpoint whose trainer state, the last file to be written, is there and readable."""
    folders = [f for f in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if f.name.split("-")[-1].isdigit()]
    for folder in sorted(folders, key=lambda f: int(f.name.split("-")[-1]), reverse=True):
        try:
            json.loads((folder / TRAINER_STATE_NAME).read_text())
            return str(folder)
        except (OSError, ValueError):
            logger.warning("%s is not whole: passed over.", folder.name)
    return None


def _settings(model_args, data_args, args) -> dict:
    """The arguments that decide a run's outcome: two runs that agree in them are the same run."""
    own = {field.name for field in dataclasses.fields(DistillationArguments)} - {"output_dir", "overwrite_output_dir"}
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    decisive = "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 "
    decisive += "adam_epsilon max_grad_norm num_train_epochs max_steps seed bf16 fp16 optim optim_args "
    decisive += "dataloader_drop_last " + ("dataloader_num_workers" if data_args.streaming else "")
    names = sorted((own - inherited) | set(decisive.split()))
    settings = dataclasses.asdict(model_args) | dataclasses.asdict(data_args)
    settings |= {name: getattr(args, name) for name in names} | {"batch_size": args.global_batch_size}
    return json.loads(json.dumps(settings, default=str))


def _earlier_results(output_dir: Path, settings: dict, overwrite: bool) -> dict | None:
    """
    The results of a finished run with the same settings.

    Raises:
        ValueError: if the folder holds a run with other settings.
    """
    path = output_dir / ARGUMENTS_NAME
    if overwrite:
        for stale in (RESULTS_NAME, PHASES_NAME, FIDELITY_NAME):
            (output_dir / stale).unlink(missing_ok=True)
        for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(folder)
    if overwrite or not path.is_file():
        return None
    earlier = json.loads(path.read_text())
    changed = [name for name in settings if earlier.get(name) != settings[name]]
    if changed:
        name = changed[0]
        raise ValueError(
            f"output_dir {output_dir} holds a run with another {name} ({earlier.get(name)}, not {settings[name]}): "
            "give another --output_dir, or --overwrite_output_dir true."
        )
    results = output_dir / RESULTS_NAME
    if results.is_file():
        logger.warning("%s holds this run, finished: nothing to do.", output_dir)
        return json.loads(results.read_text())
    return None
