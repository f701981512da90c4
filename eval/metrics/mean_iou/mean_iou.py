"""Mean intersection over union of label maps."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import confusion_matrix

DESCRIPTION = """
Intersection over union of each class, over the pixels of all images together, and its mean over the classes that
occur in the truth or in the prediction.
"""

INPUTS = """
Args:
    predictions: label maps, (height, width), of 0..num_labels - 1. Of different sizes, if need be.
    references: the true label maps.
    num_labels: how many classes there are.
    ignore_index: true label of the pixels that take no part.

Returns:
    mean_iou, mean_accuracy: means over classes, from 0 to 1.
    overall_accuracy: share of the pixels that are right.
    per_category_iou, per_category_accuracy: lists of num_labels numbers; None for a class that does not occur.

Raises:
    ValueError: if a label lies outside 0..num_labels - 1, or all pixels are ignored.
"""

FEATURES = datasets.Features({name: datasets.Value("int64") for name in ("prediction", "reference", "pixels")})


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, INPUTS)
class MeanIoU(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION, citation="", inputs_description=INPUTS, features=FEATURES, format="numpy"
        )

    def add_batch(self, *, predictions, references):
        """Adds label maps: lists of (height, width)."""
        # Only how often each pair of labels occurs is kept: whole maps would fill the memory.
        for prediction, truth in zip(predictions, references, strict=True):
            # Each pair as one number, which sorts many times faster than a row of two.
            pairs = np.stack([np.ravel(prediction), np.ravel(truth)], axis=-1).astype(np.int32)
            pairs, pixels = np.unique(pairs.view(np.int64), return_counts=True)
            prediction, truth = pairs.view(np.int32).reshape(-1, 2).T
            super().add_batch(prediction=prediction, reference=truth, pixels=pixels)

    def compute(self, *, predictions=None, references=None, **kwargs):
        """Of these maps and of all that were added before."""
        if predictions is not None:
            self.add_batch(predictions=predictions, references=references)
        return super().compute(**kwargs)

    def _compute(self, prediction, reference, pixels, num_labels: int, ignore_index: int = 255):
        known = reference != ignore_index
        if not known.any():
            raise ValueError("All pixels are ignored: mean IoU needs some that have a true label.")
        prediction, reference, pixels = prediction[known], reference[known], pixels[known]
        for labels in (prediction, reference):
            if not 0 <= labels.min() <= labels.max() < num_labels:
                raise ValueError(f"Labels must be 0..{num_labels - 1}, got {labels.min()}..{labels.max()}.")
        confusion = confusion_matrix(reference, prediction, labels=range(num_labels), sample_weight=pixels)
        right, true, predicted = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
        with np.errstate(invalid="ignore"):
            iou, accuracy = right / (true + predicted - right), right / true
        return {
            "mean_iou": float(np.nanmean(iou)),
            "mean_accuracy": float(np.nanmean(accuracy)),
            "overall_accuracy": float(right.sum() / confusion.sum()),
            "per_category_iou": [None if np.isnan(value) else float(value) for value in iou],
            "per_category_accuracy": [None if np.isnan(value) else float(value) for value in accuracy],
        }
