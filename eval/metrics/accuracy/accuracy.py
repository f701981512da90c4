"""Accuracy, as an `evaluate` module that needs no Hub."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score, recall_score

DESCRIPTION = """
Share of predictions that equal their reference, and its mean over the classes that occur, each counting the same.
"""
INPUTS = """
Args:
    predictions (list of int): predicted classes.
    references (list of int): true classes.

Returns:
    accuracy: from 0 to 1.
    balanced_accuracy: mean of the classes' recalls, from 0 to 1.
"""


class Accuracy(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            inputs_description=INPUTS,
            citation="",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        recall = recall_score(references, predictions, labels=sorted(set(references)), average="macro")
        return {"accuracy": float(accuracy_score(references, predictions)), "balanced_accuracy": float(recall)}
