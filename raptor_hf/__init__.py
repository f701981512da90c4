"""Block-recurrent Vision Transformers for the Hugging Face ecosystem (arXiv 2512.19941)."""

from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification

from .configuration_raptor import RaptorConfig
from .modeling_raptor import RaptorBackbone, RaptorForImageClassification, RaptorModel, RaptorPreTrainedModel

__version__ = "0.1.0"

AutoConfig.register("raptor", RaptorConfig, exist_ok=True)
RaptorConfig.register_for_auto_class()
for auto_class, model_class in (
    (AutoModel, RaptorModel),
    (AutoBackbone, RaptorBackbone),
    (AutoModelForImageClassification, RaptorForImageClassification),
):
    auto_class.register(RaptorConfig, model_class, exist_ok=True)

__all__ = [
    "RaptorBackbone",
    "RaptorConfig",
    "RaptorForImageClassification",
    "RaptorModel",
    "RaptorPreTrainedModel",
]
