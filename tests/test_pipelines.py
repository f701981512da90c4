"""Transformers' pipelines on a saved folder: the one line of a user's script that changes is the name."""

import numpy as np
import pytest
import torch
from conftest import make_raptor
from PIL import Image
from torch.testing import assert_close
from transformers import BitImageProcessorPil, pipeline

from raptor_hf import RaptorForImageClassification, RaptorModel


@pytest.fixture
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 90, 3), dtype=np.uint8))


def save(model, folder):
    """A model and DINOv2's image processor, for 56 x 56 pixels: returns the processor."""
    processor = BitImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56})
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    return processor


def test_image_feature_extraction(image, tmp_path):
    raptor = make_raptor(num_register_tokens=2)
    processor = save(raptor, tmp_path)
    extract = pipeline("image-feature-extraction", model=str(tmp_path))
    assert type(extract.model) is RaptorModel
    outputs = raptor(**processor(image, return_tensors="pt"))
    features = torch.tensor(extract(image))
    assert features.shape == (1, 1 + 2 + 16, 32)
    assert_close(features, outputs.last_hidden_state, atol=1e-5, rtol=1e-5)
    assert_close(torch.tensor(extract(image, pool=True)), outputs.pooler_output, atol=1e-5, rtol=1e-5)
    assert len(extract([image, image], batch_size=2)) == 2


def test_image_classification(image, tmp_path):
    model = make_raptor(RaptorForImageClassification, id2label={0: "cat", 1: "dog", 2: "eel"})
    processor = save(model, tmp_path)
    classify = pipeline("image-classification", model=str(tmp_path))
    assert type(classify.model) is RaptorForImageClassification
    probabilities = model(**processor(image, return_tensors="pt")).logits.softmax(-1)[0]
    results = classify(image)
    assert [result["label"] for result in results] == [
        model.config.id2label[i] for i in probabilities.argsort(descending=True).tolist()
    ]
    assert results[0]["score"] == pytest.approx(probabilities.max().item(), abs=1e-5)
