import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from raptor_hf.probes import knn
from raptor_hf.probes.knn import knn_predict


def clouds(per_class: int, seed: int, classes: int = 4, width: int = 6):
    """Overlapping classes of points, with their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    points = centres[labels] + 1.2 * rng.normal(size=(len(labels), width))
    return torch.tensor(points, dtype=torch.float32), torch.tensor(labels)


def test_is_scikit_learns_weighted_vote_by_cosine_in_batches_of_any_size(monkeypatch):
    (train, labels), (test, truth) = clouds(25, 0), clouds(20, 1)
    monkeypatch.setattr(knn, "BUDGET", 7 * len(train))
    predicted = knn_predict(train, labels, test, 4, k=[1, 10, 20])
    for k in (1, 10, 20):
        votes = lambda distance: np.exp((1 - distance) / 0.07)  # noqa: E731
        reference = KNeighborsClassifier(k, metric="cosine", weights=votes).fit(train.numpy(), labels.numpy())
        assert predicted[k].tolist() == reference.predict(test.numpy()).tolist()
    assert (predicted[20] != predicted[1]).any() and 0.5 < (predicted[20] == truth).float().mean() < 1


def test_a_near_neighbour_outvotes_two_farther_ones():
    # Cosines to the test point: 1 for class 0, 0.8 twice for class 1. exp(0.2 / 0.07) = 17.4 > 2.
    train = torch.tensor([[5.0, 0.0], [0.8, 0.6], [0.8, -0.6]])
    labels, test = torch.tensor([0, 1, 1]), torch.tensor([[2.0, 0.0]])
    assert knn_predict(train, labels, test, 2, k=[3])[3].tolist() == [0]
    # exp(0.2 / 0.5) = 1.5 < 2.
    assert knn_predict(train, labels, test, 2, k=[3], temperature=0.5)[3].tolist() == [1]
    assert knn_predict(train, labels, test, 2, k=[3], temperature=1e-4)[3].tolist() == [0]


@pytest.mark.parametrize(
    "settings, message",
    [({"k": [10, 20]}, "from 1 to 3, .* got"), ({"k": [0]}, "k must"), ({"k": [1], "temperature": 0}, "temperature")],
)
def test_refuses_what_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        knn_predict(torch.eye(3), torch.arange(3), torch.eye(3), 3, **settings)
