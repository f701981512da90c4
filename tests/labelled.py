"""A tiny classifier and labelled images, made on the spot, for the controls' scripts."""

import datasets
import torch
from tiny import picture
from transformers import Dinov2Config, Dinov2ForImageClassification

from raptor_hf.images import load_image_processor

CLASSES = ["cat", "dog", "eel"]


def tiny_classifier(layers: int = 4) -> Dinov2ForImageClassification:
    """A random DINOv2 classifier of 3 classes, 16 wide, for 28-pixel images of 4 patches, with layers that differ."""
    torch.manual_seed(0)
    settings = dict(
        hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, image_size=28, patch_size=14, mlp_ratio=2
    )
    names = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
    model = Dinov2ForImageClassification(Dinov2Config(**settings, **names))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def make_material(folder):
    """Fills a folder with `teacher` and `images` (splits train, validation and test); returns the folder."""
    tiny_classifier().save_pretrained(folder / "teacher")
    load_image_processor("no model here", 28).save_pretrained(folder / "teacher")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    (folder / "images").mkdir()
    for split, seeds in {"train": range(12), "validation": range(12, 18), "test": range(18, 30)}.items():
        rows = {"image": [picture(seed) for seed in seeds], "label": [seed % 3 for seed in seeds]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "images" / f"{split}.parquet")
    return folder


def distil_flags(material, output_dir, **changes) -> list[str]:
    """Flags of a control that distils, for runs of one step."""
    settings = {
        "teacher": material / "teacher",
        "dataset": material / "images",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "phase_images": 6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "output_dir": output_dir,
    }
    words = []
    for name, value in (settings | changes).items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
