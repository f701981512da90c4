"""The embedded default: scikit-learn's handwritten digits, as a labelled image data set. No download."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
from accelerate import PartialState
from huggingface_hub.constants import HF_HOME
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

IMAGE_SIZE = 32
TEACHER = Path(HF_HOME) / "raptor_hf" / "digits-teacher-1"


def load_digits_dataset(split: str) -> datasets.Dataset:
    """
    1,797 grey digits in 10 classes, enlarged from 8 to 32 pixels: `train` (1,437) and `test` or `validation` (360).

    Returns:
        A data set with columns `image` and `label`.

    Raises:
        KeyError: on another split.
    """
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    rows = {"train": parts[0], "test": parts[1], "validation": parts[1]}[split]
    pictures = [
        Image.fromarray((image.reshape(8, 8) * (255 / 16)).astype(np.uint8)).resize(
            (IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC
        )
        for image in images[rows]
    ]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    return datasets.Dataset.from_dict({"image": pictures, "label": labels[rows]}, features=features)


def digits_teacher() -> Path:
    """
    Folder of a `Dinov2ForImageClassification` for the digits: 12 layers, 64 wide. Trained on first use, in about two
    minutes on two slow CPU cores, then found again in the Hugging Face cache.

    Raises:
        RuntimeError: if its training fails.
    """
    with PartialState().local_main_process_first():
        if not (TEACHER / "results.json").is_file():
            aside = TEACHER.with_name(f"{TEACHER.name}.{os.getpid()}")
            # In a process of its own, which knows nothing of the launcher's processes and threads.
            launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
            if {"RANK", "ACCELERATE_MIXED_PRECISION"} & set(os.environ):
                launcher.add("OMP_NUM_THREADS")
            env = {key: value for key, value in os.environ.items() if key not in launcher}
            command = [sys.executable, "-m", "raptor_hf.teacher_training", "--output_dir", str(aside)]
            print("Training the digits teacher, once; it is then kept in the cache.", flush=True)
            try:
                if subprocess.run(command, env=env).returncode != 0:
                    raise RuntimeError("Training the digits teacher failed; its own message stands above.")
                # Unless another run, started at the same time, has made it meanwhile.
                if not (TEACHER / "results.json").is_file():
                    shutil.rmtree(TEACHER, ignore_errors=True)
                    aside.rename(TEACHER)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return TEACHER
