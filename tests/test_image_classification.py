"""RaptorForImageClassification: Dinov2's head and losses, and training with the plain Trainer."""

import pytest
import torch
from conftest import make_raptor, make_teacher
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from raptor_hf import RaptorConfig, RaptorForImageClassification, RaptorModel


def test_takes_the_teachers_head(family, images):
    labels = {0: "cat", 1: "dog", 2: "eel"}
    teacher = make_teacher(family, classifier=True, id2label=labels, label2id={"cat": 0, "dog": 1, "eel": 2})
    raptor = RaptorForImageClassification.from_teacher(teacher, phase_sizes=[1, 1, 1, 1])
    target = torch.tensor([2, 0])
    expected, outputs = teacher(images, labels=target), raptor(images, labels=target)
    assert type(outputs) is type(expected)
    assert outputs.logits.shape == (2, 3)
    assert torch.equal(outputs.logits, expected.logits)
    assert torch.equal(outputs.loss, expected.loss)
    assert raptor.config.id2label == labels and raptor.config.label2id["eel"] == 2
    # A backbone has no head to take: this one is new.
    bare = RaptorForImageClassification.from_teacher(teacher.base_model, phase_sizes=[2, 2])
    assert not torch.equal(bare.classifier.weight, teacher.classifier.weight)
    assert torch.equal(bare.raptor.blocks[0].norm1.weight, teacher.base_model.encoder.layer[1].norm1.weight)


def test_head_sees_cls_and_the_mean_of_the_patches(images):
    model = make_raptor(RaptorForImageClassification, num_register_tokens=2, num_labels=3)
    tokens = model.raptor(images).last_hidden_state
    features = torch.cat([tokens[:, 0], tokens[:, 3:].mean(1)], dim=1)
    assert_close(model(images).logits, features @ model.classifier.weight.T + model.classifier.bias)


@pytest.mark.parametrize(
    "problem, target",
    [
        ("regression", torch.tensor([[0.5, 1.0, 2.0], [0.0, 1.0, -2.0]])),
        ("single_label_classification", torch.tensor([0, 2])),
        ("multi_label_classification", torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])),
    ],
)
def test_losses(images, problem, target):
    model = make_raptor(RaptorForImageClassification, num_labels=3, problem_type=problem)
    outputs = model(images, labels=target)
    expected = {
        "regression": torch.nn.functional.mse_loss,
        "single_label_classification": torch.nn.functional.cross_entropy,
        "multi_label_classification": torch.nn.functional.binary_cross_entropy_with_logits,
    }[problem](outputs.logits, target)
    assert_close(outputs.loss, expected)
    assert model(images).loss is None


def test_a_distilled_raptor_starts_a_classifier(images, tmp_path):
    raptor = make_raptor()
    raptor.save_pretrained(tmp_path)
    model, info = RaptorForImageClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"} and not info["unexpected_keys"]
    assert_close(model.raptor(images).last_hidden_state, raptor(images).last_hidden_state)
    # And the other way round: the backbone of a classifier.
    model.save_pretrained(tmp_path / "classifier")
    back, info = RaptorModel.from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert not info["missing_keys"]
    assert_close(back(images).last_hidden_state, raptor(images).last_hidden_state)


class Stripes(torch.utils.data.Dataset):
    """Images of horizontal (class 0) or vertical (class 1) stripes, 2 pixels wide, in noise."""

    def __init__(self, size: int):
        stripes = torch.arange(28).div(2, rounding_mode="floor").remainder(2).mul(2.0).sub(1).expand(3, 28, 28)
        self.labels = torch.arange(size) % 2
        noise = 0.5 * torch.randn(size, 3, 28, 28)
        self.images = torch.stack([stripes if label else stripes.mT for label in self.labels]) + noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


@pytest.mark.parametrize("start", ["random", "raptor"])
def test_plain_trainer(start, tmp_path):
    if start == "random":
        # A natively recurrent ViT, with a LayerScale for training from scratch.
        fields = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "num_labels": 2}
        model = RaptorForImageClassification(RaptorConfig(phase_sizes=[2, 1], layerscale_value=1.0, **fields))
    else:
        make_raptor().save_pretrained(tmp_path / "raptor")
        model = RaptorForImageClassification.from_pretrained(tmp_path / "raptor", num_labels=2)
    arguments = TrainingArguments(
        output_dir=tmp_path / "run",
        max_steps=30,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=30,
        save_steps=15,
        load_best_model_at_end=False,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Stripes(128),
        eval_dataset=Stripes(64),
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean().item()},
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.9
    loaded = RaptorForImageClassification.from_pretrained(tmp_path / "run" / "checkpoint-30")
    images = Stripes(4).images
    assert_close(loaded(images).logits, trainer.model.eval()(images).logits)
    # Resumes from the middle.
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-15"))
    assert trainer.state.global_step == 30


def test_the_teachers_head_goes_with_its_labels():
    teacher = make_teacher("dinov2", classifier=True, num_labels=3, problem_type="regression")
    same = RaptorForImageClassification.from_teacher(teacher, [3, 1], num_labels=3)
    assert torch.equal(same.classifier.weight, teacher.classifier.weight)
    assert same.config.problem_type == "regression"
    other = RaptorForImageClassification.from_teacher(teacher, [3, 1], num_labels=5)
    assert other.classifier.out_features == 5 and other.config.id2label[4] == "LABEL_4"
