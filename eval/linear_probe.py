"""A linear probe of frozen features: fast on stored ones, or the paper's augmented epochs."""

from pathlib import Path

import evaluate
import torch

from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.plots import plot_confusion, save_figure
from raptor_hf.probes.classification import LabelledImages, split_features
from raptor_hf.probes.linear import (
    LinearProbeArguments,
    fit_logistic,
    save_classifier,
    to_classifier,
    train_augmented,
)
from raptor_hf.summary import table

ACCURACY = Path(__file__).parent / "metrics" / "accuracy"


def main(argv: list[str] | None = None):
    parser = ConfigArgumentParser(LinearProbeArguments, description=__doc__)
    (args,) = parser.parse(argv)
    try:
        images = LabelledImages.load(args)
        model, processor = args.load_model()
        num_classes, labels = len(images.class_names), images.labels
        predictions, choices = torch.full_like(labels, -1), []
        if args.protocol == "fast":
            features = images.features(args, model, processor)
            for train, test in images.parts:
                head, choice = fit_logistic(
                    features[train], labels[train], num_classes, args.strengths, args.seed, progress=True
                )
                predictions[test] = head(features[test]).argmax(dim=1)
                choices.append(choice)
        else:
            train, test = images.splits
            head = train_augmented(model, processor, train, labels[: len(train)].tolist(), num_classes, args)
            predictions[len(train) :] = head(split_features(test, args, model, processor)).argmax(dim=1)
    except ValueError as error:
        parser.error(str(error))
    results = images.measure(evaluate.load(str(ACCURACY)), predictions) | {"choices": choices, "classifier": None}
    if args.save_model and args.folds is None:
        classifier = to_classifier(model.cpu(), head, args.features, images.class_names)
        if classifier is None:
            print(f"Not saved: {model.config.model_type} has no classifier on features {args.features}.")
        else:
            results["classifier"] = str(Path(args.output_dir) / "classifier")
            save_classifier(classifier, processor, results["classifier"])
    path = args.write_results("linear_probe", results)
    rows = images.measured
    title = f"linear probe, {results['accuracy']:.1%}"
    save_figure(plot_confusion(labels[rows], predictions[rows], images.class_names, title), path)
    print(table(["images", "accuracy"], [[str(results["images"]), f"{results['accuracy']:.4f}"]]))


if __name__ == "__main__":
    main()
