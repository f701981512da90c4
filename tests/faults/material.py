"""What the long fault checks run on: a tiny teacher, pictures, and the distillation script as a process of its own."""

import io
import os
import runpy
import sys
import traceback
from pathlib import Path

import datasets

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from tiny import picture, tiny_teacher  # noqa: E402

from raptor_hf.images import load_image_processor  # noqa: E402

SCRIPT = ROOT / "training" / "distill.py"
# Imported once, here: a run is a fork of this process, and spends its time on training.
main = runpy.run_path(str(SCRIPT))["main"]


def make_material(folder: Path, images: int = 40, bad: int = 0):
    """`teacher`, and `images` with the splits train (the first `bad` of them cut short) and validation."""
    tiny_teacher().save_pretrained(folder / "teacher")
    load_image_processor("no model here", 28).save_pretrained(folder / "teacher")
    (folder / "images").mkdir(parents=True)
    features = datasets.Features({"image": datasets.Image()})
    for split, seeds in {"train": range(images), "validation": range(images, images + 8)}.items():
        values = []
        for seed in seeds:
            buffer = io.BytesIO()
            picture(seed).save(buffer, "PNG")
            values.append({"bytes": buffer.getvalue()[: -60 if seed < bad else None], "path": f"{seed}.png"})
        rows = datasets.Dataset.from_dict({"image": values}, features=features)
        rows.to_parquet(folder / "images" / f"{split}.parquet")


def arguments(material: Path, output_dir: Path, **changes) -> list[str]:
    """The script's command line."""
    settings = {
        "teacher": material / "teacher",
        "dataset": material / "images",
        "num_phases": 2,
        "drop_path_rate": 0.1,
        "max_steps": 60,
        "per_device_train_batch_size": 8,
        "save_steps": 1,
        "logging_steps": 1,
        "output_dir": output_dir,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return [word for name, value in (settings | changes).items() for word in (f"--{name}", str(value))]


def start(function, *args, log: Path) -> int:
    """Calls a function in a fork of this process; gives its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1), os.dup2(output, 2)
        function(*args)
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def finished(pid: int) -> int | None:
    """The exit code of a process (negative: the signal that ended it), `None` while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
