"""Monocular depth by a linear head over depth bins on frozen tokens: RMSE, relative error and delta < 1.25."""

from functools import partial
from pathlib import Path

import evaluate
import numpy as np
from transformers import set_seed

from raptor_hf.configuration_raptor import as_pair
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.plots import save_figure
from raptor_hf.probes.dense import Framing, Maps, plot_maps, predict_maps, shown_rows, train_head, with_map_column
from raptor_hf.probes.depth import (
    COLUMNS,
    MIN_DEPTH,
    DepthArguments,
    DepthBinsHead,
    common_size,
    eigen_crop,
    find_depth_unit,
    read_depth,
    sample_rows,
)
from raptor_hf.summary import table
from raptor_hf.teachers import token_slices

DEPTH_ERROR = Path(__file__).parent / "metrics" / "depth_error"


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(DepthArguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        splits = [
            with_map_column(split, args.label_column, COLUMNS) for split in (args.load_train(), args.load_test())
        ]
        samples = [sample_rows(split) for split in splits]
        size = common_size([sample.image_size for sample in samples], args.image_size)
        stated = (args.depth_unit, args.test_depth_unit or args.depth_unit)
        units = [find_depth_unit(sample.maps, unit, args.max_depth) for sample, unit in zip(samples, stated)]
        for split, unit in zip((args.train_split, args.test_split), units):
            print(
                f"Depth of {split} in {unit['unit']}, {unit['by']}: {unit['dtype']} numbers, "
                f"around {unit['median']:.4g}, up to {unit['maximum']:.4g}."
            )
        if args.eval_crop == "eigen":
            eigen_crop(*samples[1].maps[0].shape)
        model, processor = args.load_model()
        patch = as_pair(model.config.patch_size)
        framing = Framing(processor, size, multiple_of=patch)
        train, test = (
            Maps(
                split,
                partial(read_depth, unit=unit["unit"], max_depth=args.max_depth),
                framing,
                args.features(model, split, framing) if args.protocol == "fast" else None,
                frame_maps=split is splits[0],
            )
            for split, unit in zip(splits, units)
        )
        set_seed(args.seed)
        head = DepthBinsHead(
            model.config.hidden_size,
            args.num_bins,
            args.max_depth,
            use_cls="cls" in token_slices(model.config),
            image_size=size,
            multiple_of=patch,
        )
        losses = train_head(head, model, train, args)
        # Before measuring: what a test map may be refused for must not cost the training.
        head.save(
            Path(args.output_dir) / "head",
            model=args.model,
            image_mean=list(processor.image_mean),
            image_std=list(processor.image_std),
        )
        metric = evaluate.load(str(DEPTH_ERROR))
        shown = []
        for index, (prediction, truth) in enumerate(predict_maps(head, model, test, args)):
            crop = eigen_crop(*truth.shape) if args.eval_crop == "eigen" else (slice(None), slice(None))
            metric.add_batch(predictions=[prediction[crop]], references=[truth[crop]])
            if index in shown_rows(len(test)):
                shown.append((test.picture(index), truth, prediction))
        measured = metric.compute()
    except ValueError as error:
        parser.error(str(error))
    rows, columns = (part.indices(side)[:2] for part, side in zip(crop, truth.shape))
    results = {
        **measured,
        "depth_unit": dict(zip(("train", "test"), units)),
        "min_depth": MIN_DEPTH,
        "measured_part": {"rows": rows, "columns": columns, "of": truth.shape},
        "image_size": size,
        "images": {"train": len(train), "test": len(test)},
        "loss": losses,
    }
    path = args.write_results("depth", results)
    known = np.concatenate([truth[~np.isnan(truth)] for _, truth, _ in shown])
    limits = (known.min(), known.max()) if known.size else None
    save_figure(plot_maps(shown, "depth, m", limits), path)
    names = {"rmse": "RMSE, m", "abs_rel": "relative error", "delta_1_25": "delta < 1.25"}
    print(table(list(names.values()), [[f"{measured[name]:.4f}" for name in names]]))


if __name__ == "__main__":
    main()
