"""Weighted nearest neighbours on frozen features: what a Raptor keeps without any training on top of it."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import evaluate
import torch

from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.plots import plot_confusion, save_figure
from raptor_hf.probes.classification import FEATURES_FLAG, ClassificationArguments, LabelledImages
from raptor_hf.probes.knn import check_neighbours, knn_predict
from raptor_hf.summary import table

ACCURACY = Path(__file__).parent / "metrics" / "accuracy"


@dataclass(kw_only=True)
class Arguments(ClassificationArguments):
    features: str = field(default="cls", metadata=FEATURES_FLAG)
    k: list[int] = field(default_factory=lambda: [10, 20], metadata={"help": "Numbers of neighbours."})
    temperature: float = field(default=0.07, metadata={"help": "Temperature of the votes."})

    def __post_init__(self):
        super().__post_init__()
        if not self.k or min(self.k) < 1:
            raise ValueError(f"k must be at least 1, got {self.k}.")
        self.k = sorted(set(self.k))
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive, got {self.temperature}.")


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(Arguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        images = LabelledImages.load(args)
        check_neighbours(args.k, min(len(train) for train, _ in images.parts))
        model, processor = args.load_model()
        features = images.features(args, model, processor)
        predictions = {k: torch.full_like(images.labels, -1) for k in args.k}
        for train, test in images.parts:
            predicted = knn_predict(
                features[train],
                images.labels[train],
                features[test],
                len(images.class_names),
                args.k,
                args.temperature,
                progress=True,
            )
            for k in args.k:
                predictions[k][test] = predicted[k]
    except ValueError as error:
        parser.error(str(error))
    metric = evaluate.load(str(ACCURACY))
    results = {k: images.measure(metric, predictions[k]) for k in args.k}
    path = args.write_results("knn", {f"k={k}": result for k, result in results.items()})
    best = max(args.k, key=lambda k: results[k]["accuracy"])
    rows = images.measured
    figure = plot_confusion(
        images.labels[rows], predictions[best][rows], images.class_names, f"{best} nearest neighbours"
    )
    save_figure(figure, path)
    print(table(["k", "accuracy"], [[str(k), f"{result['accuracy']:.4f}"] for k, result in results.items()]))


if __name__ == "__main__":
    main()
