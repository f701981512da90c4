"""The layers of a model one by one, so that it can be run on from a state at any depth."""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..vision_models import trajectory


class RecordedLayers:
    """
    One forward pass, recorded so that its layers can be applied again, from any depth, to other states of its images.

    Each layer, or each application of a Raptor's block, is called with what the model itself gave it besides the
    states: depth step, mask, positions. So it works for every model whose layers are one list of modules that are
    called in turn on the states.

    Args:
        model: a teacher, a Raptor or another Vision Transformer, in evaluation mode.
        pixel_values: (batch, channels, height, width).

    Attributes:
        states: the trajectory, (batch, L + 1, tokens, hidden_size).

    Raises:
        ValueError: if the model's hidden states aren't what its layers read and write, so that it can't be run on.
    """

    def __init__(self, model: PreTrainedModel, pixel_values: torch.Tensor):
        self._calls = []
        layers = _layers(model)
        hooks = [layer.register_forward_pre_hook(self._record, with_kwargs=True) for layer in layers]
        try:
            self.states = trajectory(model, pixel_values)
        finally:
            for hook in hooks:
                hook.remove()
        depth = self.states.shape[1] - 1
        read = [call[1] for call in self._calls]
        if len(read) != depth or not all(torch.equal(x, self.states[:, layer]) for layer, x in enumerate(read)):
            raise ValueError(
                f"A {model.config.model_type} model can't be run on from a layer: its {depth + 1} hidden states are "
                "not what its layers read."
            )
        self._calls = [(layer, *arguments) for layer, _, *arguments in self._calls]

    def _record(self, layer: nn.Module, args: tuple, kwargs: dict):
        if args:
            self._calls.append((layer, args[0], args[1:], kwargs))
        else:
            others = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            self._calls.append((layer, kwargs["hidden_states"], (), others))

    @torch.no_grad()
    def __call__(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """
        Runs on from the states after layer `start`.

        Args:
            states: (batch, tokens, hidden_size), of the recorded images.
            start: from 0, the embeddings, to L.

        Returns:
            (batch, L + 1 - start, tokens, hidden_size); index 0 holds `states`.
        """
        results = [states]
        for layer, args, kwargs in self._calls[start:]:
            states = layer(states, *args, **kwargs)
            states = states[0] if isinstance(states, tuple) else states
            results.append(states)
        return torch.stack(results, dim=1)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    if model.config.model_type == "raptor":
        return list(model.base_model.blocks)
    depth = model.config.num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    if len(lists) != 1:
        raise ValueError(
            f"A {model.config.model_type} model can't be run on from a layer: {len(lists)} of its module lists have "
            f"as many members as it has layers ({depth})."
        )
    return list(lists[0])
