"""The training scripts on a tiny teacher and few images, some of them bad: the material, and ways to call them."""

import runpy
from functools import cache
from pathlib import Path

import datasets
import pytest
from test_faults_images import dataset_with_bad_rows
from tiny import tiny_teacher
from transformers import ViTConfig, ViTModel

from raptor_hf.images import load_image_processor

TRAINING = Path(__file__).parents[1] / "training"
SMALL = {
    "teacher": "MATERIAL/teacher",
    "dataset": "MATERIAL/images",
    "phase_sizes": [3, 3],
    "max_steps": 3,
    "per_device_train_batch_size": 8,
    "use_cpu": True,
    "disable_tqdm": True,
}


def make_material(folder: Path) -> Path:
    """Fills a folder with `teacher`, `vit`, `images` (splits train and validation) and `no_images.parquet`."""
    tiny_teacher().save_pretrained(folder / "teacher")
    load_image_processor("no model here", 28).save_pretrained(folder / "teacher")
    other = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=28)
    ViTModel(other).save_pretrained(folder / "vit")
    (folder / "images").mkdir()
    for split, bad in (("train", (2, 5)), ("validation", (0,))):
        dataset_with_bad_rows(bad, length=24).to_parquet(folder / "images" / f"{split}.parquet")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(folder / "no_images.parquet")
    return folder


@cache
def main_of(script: str):
    return runpy.run_path(str(TRAINING / f"{script}.py"))["main"]


def run(script: str, arguments: dict, material: Path, output_dir: Path):
    """Calls a script's `main`; MATERIAL in an argument stands for that folder."""
    words = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [value]
        values = [str(item).replace("MATERIAL", str(material)) for item in values]
        words += [f"--{name}", *values]
    return main_of(script)(["--output_dir", str(output_dir), *words])


def refusal(capsys, code, *call) -> str:
    """The last line that such a call writes, which must end with this exit code."""
    with pytest.raises(SystemExit) as info:
        run(*call)
    assert info.value.code == code
    return capsys.readouterr().err.splitlines()[-1]
