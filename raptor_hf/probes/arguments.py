"""What every script in eval/ can be told. Each script adds its own flags in a subclass."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import BaseImageProcessor, PreTrainedModel

from ..files import write_json
from ..images import (
    count_bad_images,
    crop_size,
    draw_images,
    load_image_dataset,
    load_image_processor,
    without_bad_images,
)
from ..parser import check_at_least_one
from ..teachers import load_vision_model
from ..vision_models import read_config
from .features import check_image_size


@dataclass(kw_only=True)
class EvalArguments:
    """The model, the data, and where results go. Fields are keyword-only, so that a subclass may add required ones."""

    model: str = field(metadata={"help": "The Raptor, its teacher or another vision model: Hub name or folder."})
    token_layout: list[str] | None = field(
        default=None, metadata={"help": "Token types in order, of a family that is not known: cls register=4 patch."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code that comes with the model may be run."}
    )
    dataset: str = field(
        metadata={
            "help": "Hub name, folder of images or parquet files, parquet file, or save_to_disk folder. "
            "'digits' is embedded."
        }
    )
    train_split: str = field(default="train", metadata={"help": "Split that is learnt from."})
    test_split: str = field(default="test", metadata={"help": "Split that is measured on."})
    test_dataset: str | None = field(default=None, metadata={"help": "Data set of the test split, if another one."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    max_samples: int | None = field(
        default=None, metadata={"help": "Use at most so many images of each split, drawn at random."}
    )
    image_size: int | None = field(
        default=None, metadata={"help": "Pixels, a multiple of the patch. Default: the image processor's."}
    )
    batch_size: int = field(default=32, metadata={"help": "Images a forward pass."})
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that decode images."})
    seed: int = field(default=0, metadata={"help": "Seed of whatever is drawn at random."})
    output_dir: str = field(default="outputs/eval", metadata={"help": "Where the results go, as <script>.json."})
    feature_cache: str | None = field(
        default=None,
        metadata={"help": "Folder where features are kept. Default: raptor_hf/features in the Hugging Face cache."},
    )

    def __post_init__(self):
        check_at_least_one(self, "max_samples", "image_size", "batch_size")
        if self.dataloader_num_workers < 0:
            raise ValueError(f"dataloader_num_workers must not be negative, got {self.dataloader_num_workers}.")
        self._bad_images = {}

    def load_model(self) -> tuple[PreTrainedModel, BaseImageProcessor]:
        """
        The frozen model, on the GPU if there is one, and its image processor at the image size.

        Raises:
            ValueError: if the model can't be loaded, or the image size doesn't divide into its patches.
        """
        config = read_config(self.model, self.trust_remote_code)
        processor = load_image_processor(self.model, self.image_size)
        # Before the weights are read.
        check_image_size(getattr(config, "vision_config", config), crop_size(processor))
        model = load_vision_model(self.model, trust_remote_code=self.trust_remote_code, token_layout=self.token_layout)
        return model.to("cuda" if torch.cuda.is_available() else "cpu"), processor

    def load_train(self) -> datasets.Dataset:
        """The train split, its image column named `image`; see [`load_image_dataset`] for what it raises."""
        return self._load("train", self.dataset, self.train_split)

    def draw_train(self, count: int) -> datasets.Dataset:
        """So many images of the train split, drawn at random by the seed."""
        dataset = load_image_dataset(self.dataset, self.train_split, image_column=self.image_column)
        dataset, self._bad_images["train"] = draw_images(dataset, count, self.seed)
        return dataset

    def load_test(self) -> datasets.Dataset:
        """The test split, of `test_dataset` if that is given."""
        return self._load("test", self.test_dataset or self.dataset, self.test_split)

    def _load(self, part: str, name: str, split: str) -> datasets.Dataset:
        dataset = load_image_dataset(name, split, image_column=self.image_column)
        if self.max_samples is not None and self.max_samples < len(dataset):
            # At random, as the rows of many data sets stand class by class.
            rows = np.random.default_rng(self.seed).choice(len(dataset), self.max_samples, replace=False)
            dataset = dataset.select(np.sort(rows))
        dataset, self._bad_images[part] = without_bad_images(dataset)
        return dataset

    def write_results(self, script: str, results) -> Path:
        """
        Writes `<output_dir>/<script>.json`, `{"arguments": ..., "bad_images": ..., "results": ...}`, and returns its
        path. Bad images are those that can't be read: they were left out, see [`count_bad_images`].
        """
        path = Path(self.output_dir) / f"{script}.json"
        write_json(
            path, {"arguments": asdict(self), "bad_images": count_bad_images(self._bad_images)} | {"results": results}
        )
        return path
