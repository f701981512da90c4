"""Errors of depth maps."""

import datasets
import evaluate
import numpy as np

DESCRIPTION = """
Errors of predicted against true depth, each taken over an image's pixels of known depth, then averaged over the
images, as is the custom on NYUv2 (Eigen et al., arXiv 1406.2283).
"""

INPUTS = """
Args:
    predictions: depth maps, (height, width), in metres, above 0. Of different sizes, if need be.
    references: the true depth maps. NaN is an unknown depth; images that have no other pixel are left out.

Returns:
    rmse: root of the mean squared error, in metres.
    abs_rel: mean of |prediction - truth| / truth.
    delta_1_25: share of the pixels where the larger of prediction / truth and truth / prediction is below 1.25.

Raises:
    ValueError: if a depth is not above 0, or there is no image with a known depth.
"""

FEATURES = datasets.Features({name: datasets.Value("float64") for name in ("rmse", "abs_rel", "delta_1_25")})


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, INPUTS)
class DepthError(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION, citation="", inputs_description=INPUTS, features=FEATURES, format="numpy"
        )

    def add_batch(self, *, predictions, references):
        """Adds depth maps: lists of (height, width)."""
        # Only an image's errors are kept: whole maps would fill the memory.
        for prediction, truth in zip(predictions, references, strict=True):
            prediction, truth = (np.asarray(depth, dtype=np.float64) for depth in (prediction, truth))
            known = ~np.isnan(truth)
            if not known.any():
                continue
            prediction, truth = prediction[known], truth[known]
            if not min(prediction.min(), truth.min()) > 0:
                raise ValueError("Depths must be above 0.")
            super().add_batch(
                rmse=[np.sqrt(np.mean((prediction - truth) ** 2))],
                abs_rel=[np.mean(np.abs(prediction - truth) / truth)],
                delta_1_25=[np.mean(np.maximum(prediction / truth, truth / prediction) < 1.25)],
            )

    def compute(self, *, predictions=None, references=None):
        """Of these maps and of all that were added before."""
        if predictions is not None:
            self.add_batch(predictions=predictions, references=references)
        if self.writer is None:
            raise ValueError("There is no image with a known depth.")
        return super().compute()

    def _compute(self, **errors):
        return {name: float(values.mean()) for name, values in errors.items()}
