"""
Transformers' own common model tests on Raptor and, as the yardstick, on Dinov2, without and with registers.

Started by `run.py`, which puts those tests on the path; not collected by a plain `pytest`.
"""

import unittest

from tests.test_backbone_common import BackboneTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, floats_tensor
from torch import nn
from transformers import (
    Dinov2Backbone,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
)
from transformers.models.auto import modeling_auto

from raptor_hf import RaptorBackbone, RaptorConfig, RaptorForImageClassification, RaptorModel

# The common tests look up by name what kind of model a class is: enter Raptor beside Dinov2.
modeling_auto.MODEL_MAPPING_NAMES["raptor"] = "RaptorModel"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["raptor"] = "RaptorForImageClassification"
modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES["raptor"] = "RaptorBackbone"


class TinyModel:
    """What the common tests ask of a `model_tester`: a model of two layers and a batch of images for it."""

    batch_size, image_size, patch_size, hidden_size, num_hidden_layers, num_attention_heads = 5, 20, 4, 32, 2, 4
    is_training = True

    def __init__(self, config_class, **config_kwargs):
        self.config_class, self.config_kwargs = config_class, config_kwargs
        self.mask_length = (self.image_size // self.patch_size) ** 2
        self.num_masks = self.mask_length // 2
        self.seq_length = 1 + config_kwargs.get("num_register_tokens", 0) + self.mask_length

    def get_config(self):
        return self.config_class(
            image_size=self.image_size,
            patch_size=self.patch_size,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            **self.config_kwargs,
        )

    def prepare_config_and_inputs_for_common(self):
        pixel_values = floats_tensor([self.batch_size, 3, self.image_size, self.image_size])
        return self.get_config(), {"pixel_values": pixel_values}


class ModelTests(ModelTesterMixin):
    test_resize_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True  # takes a model's year from its copyright line, if any

    def setUp(self):
        self.model_tester = TinyModel(self.config_class, **self.config_kwargs)

    def test_config(self):
        ConfigTester(self, config_class=self.config_class, has_text_modality=False, hidden_size=36).run_common_tests()

    def test_model_get_set_embeddings(self):
        # The common test wants a table of words.
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            self.assertIsInstance(model.get_input_embeddings(), nn.Module)
            self.assertIsNone(model.get_output_embeddings())


class BackboneTests(BackboneTesterMixin):
    setUp = ModelTests.setUp


class Dinov2(unittest.TestCase):
    # A mask token takes part in masked pre-training only, so the common tests would miss its gradient.
    config_class, config_kwargs = Dinov2Config, {"num_hidden_layers": 2, "use_mask_token": False}


class Dinov2ModelTest(ModelTests, Dinov2):
    all_model_classes = (Dinov2Model, Dinov2ForImageClassification, Dinov2Backbone)


class Dinov2BackboneTest(BackboneTests, Dinov2):
    all_model_classes = (Dinov2Backbone,)


class Dinov2WithRegisters(unittest.TestCase):
    config_class, config_kwargs = Dinov2WithRegistersConfig, {"num_hidden_layers": 2, "num_register_tokens": 3}


class Dinov2WithRegistersModelTest(ModelTests, Dinov2WithRegisters):
    all_model_classes = (
        Dinov2WithRegistersModel,
        Dinov2WithRegistersForImageClassification,
        Dinov2WithRegistersBackbone,
    )


class Dinov2WithRegistersBackboneTest(BackboneTests, Dinov2WithRegisters):
    all_model_classes = (Dinov2WithRegistersBackbone,)


class Raptor(unittest.TestCase):
    config_class, config_kwargs = RaptorConfig, {"phase_sizes": [2], "use_mask_token": False}


class RaptorModelTest(ModelTests, Raptor):
    all_model_classes = (RaptorModel, RaptorForImageClassification, RaptorBackbone)


class RaptorBackboneTest(BackboneTests, Raptor):
    all_model_classes = (RaptorBackbone,)


class RaptorWithRegisters(Raptor):
    config_kwargs = Raptor.config_kwargs | {"num_register_tokens": 3, "hidden_act": "swiglu", "phase_sizes": [1, 1]}


class RaptorWithRegistersModelTest(RaptorModelTest, RaptorWithRegisters):
    pass


class RaptorWithRegistersBackboneTest(RaptorBackboneTest, RaptorWithRegisters):
    pass
