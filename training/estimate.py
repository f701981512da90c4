"""What a distillation run will take, told before anything is started. Takes the flags of training/distill.py too."""

import math
from dataclasses import asdict
from pathlib import Path

from raptor_hf.distillation import DataArguments, DistillationArguments, ModelArguments
from raptor_hf.distillation.arguments import PHASE_FLAGS
from raptor_hf.distillation.estimate import EstimateArguments, estimate_run
from raptor_hf.distillation.run import use_every_core
from raptor_hf.distillation.student import student_config
from raptor_hf.files import write_json
from raptor_hf.images import crop_size, load_image_dataset, load_image_processor
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.summary import table
from raptor_hf.teachers import load_teacher_config


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(
        (EstimateArguments, ModelArguments, DataArguments, DistillationArguments),
        exclusive=(PHASE_FLAGS,),
        description=__doc__,
    )
    devices, model_args, data_args, args = parser.parse(argv)
    use_every_core(args)
    try:
        if "digits" in (model_args.teacher, data_args.dataset):
            raise ValueError("Give --teacher and --dataset: the embedded digits take minutes.")
        teacher_config = load_teacher_config(model_args.teacher, model_args.trust_remote_code)
        image_size = crop_size(load_image_processor(model_args.teacher, data_args.image_size))
        # The cost doesn't depend on where the cuts are, but for the number of blocks.
        phase_sizes = model_args.phase_sizes
        if model_args.phases_to_find:
            short, extra = divmod(teacher_config.num_hidden_layers, model_args.phases_to_find)
            phase_sizes = [short + (index < extra) for index in range(model_args.phases_to_find)]
        config = student_config(model_args, teacher_config, phase_sizes)
        max_steps = args.max_steps
        if max_steps <= 0:
            num_images = devices.num_images or len(load_image_dataset(data_args.dataset, data_args.train_split))
            num_images = min(num_images, data_args.max_train_samples or num_images)
            global_batch = args.train_batch_size * args.gradient_accumulation_steps * devices.num_devices
            max_steps = math.ceil(args.num_train_epochs * (num_images // global_batch))
        results = estimate_run(teacher_config, config, args, devices, max_steps, image_size)
    except ValueError as error:
        parser.error(str(error))
    rows = [
        ["steps", f"{results['steps']:,}"],
        ["images", f"{results['images']:,}"],
        ["FLOPs", f"{results['flops']:.2e}"],
        ["hours", f"{results['hours']:.2f}"],
        ["device hours", f"{results['device_hours']:.2f}"],
        ["memory of a device, GB", f"{results['memory_bytes'] / 1e9:.1f}"],
        ["disk, GB", f"{results['disk_bytes'] / 1e9:.2f}"],
        ["disk that stored states would take, GB", f"{results['stored_states_bytes'] / 1e9:,.0f}"],
    ]
    print(table([f"{devices.num_devices} x {devices.device_kind}", "estimate"], rows))
    write_json(Path(args.output_dir) / "estimate.json", {"devices": asdict(devices), "estimate": results})


if __name__ == "__main__":
    main()
