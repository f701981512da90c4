"""Semantic segmentation by a linear head on frozen patch tokens: mean IoU."""

from functools import partial
from pathlib import Path

import evaluate
from transformers import set_seed

from raptor_hf.images import crop_size
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.plots import save_figure
from raptor_hf.probes.dense import Framing, Maps, plot_maps, predict_maps, shown_rows, train_head, with_map_column
from raptor_hf.probes.segmentation import (
    COLUMNS,
    IGNORED,
    LinearSegmentationHead,
    SegmentationArguments,
    find_num_labels,
    label_colors,
    read_labels,
)
from raptor_hf.summary import table

MEAN_IOU = Path(__file__).parent / "metrics" / "mean_iou"


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(SegmentationArguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        splits = [
            with_map_column(split, args.label_column, COLUMNS) for split in (args.load_train(), args.load_test())
        ]
        model, processor = args.load_model()
        read = partial(read_labels, ignore_index=args.ignore_index, reduce_labels=args.do_reduce_labels)
        num_labels = args.num_labels
        if num_labels is None:
            maps = (read(row["map"]) for split in splits for row in split.select_columns("map"))
            num_labels = find_num_labels(maps, total=sum(map(len, splits)))
        print(f"{num_labels} classes, {'stated' if args.num_labels else 'found in all label maps'}.")
        size = (crop_size(processor), crop_size(processor))
        if args.protocol == "fast":
            framing = Framing(processor, size, cut="square")
            train, test = (Maps(split, read, framing, args.features(model, split, framing)) for split in splits)
        else:
            random = Framing(processor, size, cut="random", scale=tuple(args.crop_scale))
            train = Maps(splits[0], read, random, seed=args.seed)
            test = Maps(splits[1], read, Framing(processor, size), frame_maps=False)
        set_seed(args.seed)
        head = LinearSegmentationHead(model.config.hidden_size, num_labels)
        losses = train_head(head, model, train, args)
        # Before measuring: what a test map may be refused for must not cost the training.
        head.save(
            Path(args.output_dir) / "head",
            model=args.model,
            protocol=args.protocol,
            image_size=size,
            image_mean=list(processor.image_mean),
            image_std=list(processor.image_std),
            do_reduce_labels=args.do_reduce_labels,
        )
        metric = evaluate.load(str(MEAN_IOU))
        shown = []
        for index, (prediction, truth) in enumerate(predict_maps(head, model, test, args)):
            metric.add_batch(predictions=[prediction], references=[truth])
            if index in shown_rows(len(test)):
                shown.append((test.picture(index), label_colors(truth), label_colors(prediction)))
        measured = metric.compute(num_labels=num_labels, ignore_index=IGNORED)
    except ValueError as error:
        parser.error(str(error))
    results = {
        **measured,
        "num_labels": {"value": num_labels, "by": "found" if args.num_labels is None else "stated"},
        "image_size": size,
        "images": {"train": len(train), "test": len(test)},
        "loss": losses,
    }
    path = args.write_results("segmentation", results)
    save_figure(plot_maps(shown), path)
    names = ["mean_iou", "mean_accuracy", "overall_accuracy"]
    print(table([name.replace("_", " ") for name in names], [[f"{measured[name]:.4f}" for name in names]]))


if __name__ == "__main__":
    main()
