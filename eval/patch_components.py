"""What patch features tell apart: their first three principal components as colours, beside the teacher's."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from raptor_hf.images import PixelValues, crop_size, to_rgb
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.plots import save_figure
from raptor_hf.probes import EvalArguments
from raptor_hf.probes.components import ComponentColors
from raptor_hf.probes.dense import Framing, plot_maps
from raptor_hf.probes.features import forward_features
from raptor_hf.vision_models import load_vision_model


@dataclass(kw_only=True)
class Arguments(EvalArguments):
    teacher: str | None = field(
        default=None,
        metadata={"help": "The Raptor's teacher: Hub name or folder. The components are then those of its features."},
    )
    dataset: str = field(
        default="photographs",
        metadata={
            "help": "Images: Hub name, folder, or parquet file. 'photographs' are the few that come with scikit-learn "
            "and scikit-image."
        },
    )
    max_samples: int | None = field(default=6, metadata={"help": "Draw at most so many images."})


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        model, processor = args.load_model()
        models = {"model": model}
        if args.teacher is not None:
            teacher = load_vision_model(args.teacher, trust_remote_code=args.trust_remote_code)
            models = {"teacher": teacher.to(model.device)} | models
        size = crop_size(processor)
        framing = Framing(processor, (size, size), cut="square")
        images = args.load_test()
        loader = DataLoader(PixelValues(images, framing), args.batch_size, num_workers=args.dataloader_num_workers)
        features = {name: [] for name in models}
        for batch in tqdm(loader, desc="Features"):
            for name, parts in features.items():
                pixel_values = batch["pixel_values"].to(model.device)
                parts.append(forward_features(models[name], pixel_values, "dense")["patch"])
        features = {name: torch.cat(parts) for name, parts in features.items()}
        shapes = {tuple(parts.shape) for parts in features.values()}
        if len(shapes) > 1:
            raise ValueError(
                f"Model and teacher have patch features of other shapes, {sorted(shapes)}: they must agree."
            )
        colors = ComponentColors(next(iter(features.values())))
    except ValueError as error:
        parser.error(str(error))
    results = {"images": len(images), "image_size": size, "explained_variance": colors.explained.tolist()}
    if args.teacher is not None:
        results["cosine"] = cosine_similarity(features["teacher"], features["model"], dim=-1).mean().item()
    path = args.write_results("patch_components", results)
    pictures = [framing.frame(*image.size, np.random.default_rng())(to_rgb(image)) for image in images["image"]]
    maps = [colors(parts) for parts in features.values()]
    titles = ["picture", "teacher", "Raptor"] if args.teacher else ["picture", "patch features"]
    save_figure(plot_maps(list(zip(pictures, *maps)), titles=titles), path)
    print(f"Variance explained: {', '.join(f'{share:.1%}' for share in colors.explained)}.")
    if args.teacher is not None:
        print(f"Mean cosine of the patches to the teacher's, after the final LayerNorm: {results['cosine']:.4f}.")
    print(f"Saved to {args.output_dir}")


if __name__ == "__main__":
    main()
