"""A long run of which one image in a hundred is bad: its memory must not grow."""

import argparse
import sys
import tempfile
from pathlib import Path

import psutil
from material import make_material
from tiny import tiny_teacher
from transformers import TrainerCallback

from raptor_hf import RaptorModel
from raptor_hf.distillation import DistillationArguments, RaptorTrainer
from raptor_hf.images import PixelValues, RandomResizedCrop, load_image_dataset, load_image_processor

EVERY, IMAGES, BAD = 200, 200, 2


class Memory(TrainerCallback):
    """Resident memory in MiB, by step."""

    def __init__(self):
        self.taken = {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY == 0:
            self.taken[state.global_step] = psutil.Process().memory_info().rss / 2**20
            print(f"step {state.global_step}: {self.taken[state.global_step]:.1f} MiB", flush=True)


def check(folder: Path, steps: int):
    make_material(folder, images=IMAGES, bad=BAD)
    dataset = load_image_dataset(str(folder / "images"))
    crop = RandomResizedCrop(load_image_processor(str(folder / "teacher")), 28)
    teacher, memory = tiny_teacher(), Memory()
    args = DistillationArguments(
        output_dir=str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=8,
        logging_steps=10,
        save_steps=100,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    student = RaptorModel.from_teacher(teacher, [3, 3])
    trainer = RaptorTrainer(student, teacher, args, train_dataset=PixelValues(dataset, crop, replace_bad=True))
    trainer.add_callback(memory)
    trainer.train_from(None)
    first, last = memory.taken[EVERY], memory.taken[max(memory.taken)]
    bad = trainer.faults["bad_images"]
    print(f"{steps} steps of 8 images, {bad} of them bad ({bad / (8 * steps):.1%}) and passed over.")
    print(f"Memory after {EVERY} steps {first:.1f} MiB, at the end {last:.1f} MiB: {last / first - 1:+.1%}.")
    sys.exit(0 if last <= 1.05 * first and bad == BAD * 8 * steps // IMAGES else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        check(Path(name), args.steps)
