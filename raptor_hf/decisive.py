"""Which arguments decide what a training run gives: two runs that agree in them are the same run."""

import json
from collections.abc import Iterable
from dataclasses import fields

from transformers import TrainingArguments

# Of those that every Trainer has. How a run is logged, or where it is saved, changes nothing of what it gives.
OF_EVERY_TRAINER = {
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs", "max_steps", "seed", "bf16", "fp16"),
    *("optim", "optim_args", "dataloader_drop_last"),
}


def decisive_arguments(
    args: TrainingArguments, indifferent: Iterable[str], more: Iterable[str], beside: dict | None = None
) -> dict:
    """
    The values that decide a run, as JSON holds them, in order of their names.

    Args:
        args: of a class of its own; all fields that it adds to `TrainingArguments` are decisive.
        indifferent: but for these.
        more: and what is decisive besides, of `TrainingArguments`.
        beside: what decides the run and isn't in `args`; it comes first.
    """
    inherited = {field.name for field in fields(TrainingArguments)}
    own = {field.name for field in fields(args)} - inherited - set(indifferent)
    values = {name: getattr(args, name) for name in sorted(own | OF_EVERY_TRAINER | set(more))}
    return json.loads(json.dumps((beside or {}) | values, default=str))
