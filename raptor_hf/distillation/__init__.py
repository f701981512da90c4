from .arguments import DataArguments, DistillationArguments, ModelArguments
from .losses import layer_loss
from .module import DistillationModule, LossSettings
from .trainer import RaptorTrainer

__all__ = [
    "DataArguments",
    "DistillationArguments",
    "DistillationModule",
    "LossSettings",
    "ModelArguments",
    "RaptorTrainer",
    "layer_loss",
]
