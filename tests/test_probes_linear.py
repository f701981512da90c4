import copy

import datasets
import pytest
import torch
from conftest import make_raptor, make_teacher
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tiny import picture
from transformers import AutoModel, DeiTConfig, ViTConfig

from raptor_hf.images import load_image_processor
from raptor_hf.probes.classification import stratified_folds
from raptor_hf.probes.features import forward_features
from raptor_hf.probes.linear import LinearProbe, LinearProbeArguments, fit_logistic, to_classifier, train_augmented


def clouds(classes, per_class: int = 30):
    """Features of uneven scale in which classes can be told apart, and their labels."""
    labels = torch.tensor(classes).repeat_interleave(per_class)
    features = torch.randn(len(labels), 8)
    features[:, :4] += 2 * torch.nn.functional.one_hot(labels % 4, 4)
    return 10 * features * torch.logspace(-2, 2, 8) + 5, labels


def regression(strength):
    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))


@pytest.mark.parametrize("classes, num_classes", [([0, 1, 2], 3), ([0, 1], 2), ([1, 3], 5)])
def test_the_head_is_scikit_learns_regression_on_features_as_they_are(classes, num_classes):
    features, labels = clouds(classes)
    head, choice = fit_logistic(features, labels, num_classes)
    assert head.weight.shape == (num_classes, 8)
    reference = regression(choice["strength"]).fit(features.numpy(), labels.numpy())
    others = clouds(classes)[0]
    predicted = head(others)
    assert predicted.argmax(dim=1).tolist() == reference.predict(others.numpy()).tolist()
    torch.testing.assert_close(
        predicted[:, classes].softmax(dim=1), torch.tensor(reference.predict_proba(others.numpy())).float()
    )


def test_the_regularisation_is_chosen_on_images_that_are_held_out_and_the_same_each_time():
    features, labels = clouds([0, 1, 2])
    strengths = [1.0, 1e-3, 1e-6]
    head, choice = fit_logistic(features, labels, 3, strengths, seed=3)
    x, y = features.numpy(), labels.numpy()
    fit, held_out = stratified_folds(labels, 5, seed=3)[0]
    assert len(fit) == 72 and len(held_out) == 18
    scores = {c: regression(c).fit(x[fit], y[fit]).score(x[held_out], y[held_out]) for c in strengths}
    assert choice == {"strength": max(sorted(scores), key=scores.get), "validation_accuracy": scores}
    again, _ = fit_logistic(features, labels, 3, strengths[::-1], seed=3)
    assert torch.equal(head.weight, again.weight)


def test_needs_two_classes():
    with pytest.raises(ValueError, match="at least two classes"):
        fit_logistic(torch.randn(5, 3), torch.zeros(5, dtype=torch.long), 2)


def test_folds_are_stratified_as_far_as_counts_allow():
    labels = [0] * 10 + [1] * 5 + [2] * 2
    folds = stratified_folds(labels, 5, seed=0)
    assert sorted(row for _, test in folds for row in test) == list(range(17))
    for train, test in folds:
        assert not set(train) & set(test) and len(train) + len(test) == 17
        assert [sum(labels[row] == label for row in test) for label in (0, 1)] == [2, 1]
    assert [test.tolist() for _, test in stratified_folds(labels, 5, 0)] == [test.tolist() for _, test in folds]
    with pytest.raises(ValueError, match="No class has 11 images"):
        stratified_folds(labels, 11, seed=0)


@pytest.mark.parametrize("features", ["cls", "mean", "cls_mean"])
@pytest.mark.parametrize("family", ["raptor", "dinov2", "dinov2_with_registers"])
def test_the_classifier_gives_the_heads_outputs(family, features, images):
    backbone = make_raptor(num_register_tokens=1) if family == "raptor" else make_teacher(family)
    probe = LinearProbe(backbone, features, 3)
    classifier = to_classifier(backbone, probe.head, features, ["cat", "dog", "cow"])
    with torch.no_grad():
        torch.testing.assert_close(classifier(images).logits, probe(images)["logits"])
    assert classifier.config.id2label == {0: "cat", 1: "dog", 2: "cow"}


@pytest.mark.parametrize(
    "config, architecture", [(ViTConfig, None), (DeiTConfig, "DeiTForImageClassificationWithTeacher")]
)
def test_the_classifier_of_other_families_takes_cls_alone(config, architecture, images):
    settings = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    backbone = AutoModel.from_config(config(image_size=56, patch_size=14, **settings)).eval()
    backbone.config.architectures = architecture and [architecture]
    probe = LinearProbe(backbone, "cls", 3)
    classifier = to_classifier(backbone, probe.head, "cls", list("abc"))
    with torch.no_grad():
        torch.testing.assert_close(classifier(images).logits, probe(images)["logits"])
    assert to_classifier(backbone, LinearProbe(backbone, "cls_mean", 3).head, "cls_mean", list("abc")) is None


def test_augmented_epochs_train_the_head_alone_and_start_from_a_given_one(tmp_path):
    backbone = make_raptor(drop_path_rate=0.5)
    before = copy.deepcopy(backbone.state_dict())
    columns = datasets.Features({"image": datasets.Image()})
    train = datasets.Dataset.from_dict({"image": [picture(seed) for seed in range(6)]}, features=columns)
    settings = {"model": "", "dataset": "", "protocol": "paper", "output_dir": str(tmp_path), "warmup_steps": 0}
    settings |= {"train_batch_size": 3, "learning_rate": 1e-2}
    processor, labels = load_image_processor("none", 56), [0, 1, 2] * 2

    def train_head(**changes):
        return train_augmented(backbone, processor, train, labels, 3, LinearProbeArguments(**settings | changes))

    head = train_head(num_train_epochs=1)
    again = train_head(num_train_epochs=1)
    assert torch.equal(head.weight, again.weight) and not torch.equal(head.weight, torch.zeros_like(head.weight))
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    to_classifier(backbone, head, "cls_mean", list("abc")).save_pretrained(tmp_path / "start")
    near = train_head(head=str(tmp_path / "start"), num_train_epochs=1, learning_rate=1e-6)
    torch.testing.assert_close(near.weight, head.weight, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"head of .* is \(3, 64\), but the probe's is \(3, 32\)"):
        train_head(head=str(tmp_path / "start"), features="cls")


def test_backbones_stay_in_evaluation_mode():
    probe = LinearProbe(make_raptor(), "cls_mean", 2).train()
    assert probe.training and not probe.backbone.training
    assert [name for name, parameter in probe.named_parameters() if parameter.requires_grad] == [
        "head.weight",
        "head.bias",
    ]
    assert forward_features(probe.backbone, torch.randn(1, 3, 28, 28))["cls"].shape == (1, 32)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"folds": 1}, "folds must be at least 2"),
        ({"protocol": "paper", "folds": 5}, "folds goes with"),
        ({"head": "x"}, "head goes with"),
        ({"strengths": [0.0]}, "strengths must be positive"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_arguments_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        LinearProbeArguments(model="m", dataset="d", **settings)
