import pytest
import torch
from sklearn.metrics import r2_score

from raptor_hf.fidelity import LayerFidelity

SLICES = {"cls": slice(0, 1), "patch": slice(1, None)}


def test_equals_the_plain_definitions_over_all_images_at_once():
    torch.manual_seed(0)
    target = torch.randn(7, 3, 5, 8) + 2
    states = target + 0.3 * torch.randn_like(target)
    fidelity = LayerFidelity(SLICES)
    for part in (slice(0, 3), slice(3, 7)):
        fidelity.update(states[part], target[part])
    result = fidelity.compute()
    for name, where in SLICES.items():
        for layer in range(3):
            x, a = (s[:, layer, where].flatten(0, 1) for s in (states, target))
            cosine = torch.cosine_similarity(x, a, dim=-1).mean().item()
            error = ((x - a).norm(dim=-1) / a.norm(dim=-1)).mean().item()
            r2 = r2_score(a.numpy(), x.numpy(), multioutput="variance_weighted")
            assert result[name]["cosine"][layer] == pytest.approx(cosine, abs=1e-6)
            assert result[name]["relative_error"][layer] == pytest.approx(error, abs=1e-6)
            assert result[name]["r2"][layer] == pytest.approx(r2, abs=1e-5)


def test_states_that_do_not_vary():
    target = torch.ones(4, 1, 3, 8)
    fidelity = LayerFidelity(SLICES)
    fidelity.update(target, target)
    assert fidelity.compute()["cls"] == {"cosine": [pytest.approx(1.0)], "r2": [1.0], "relative_error": [0.0]}


def test_needs_images():
    with pytest.raises(ValueError, match="at least one image"):
        LayerFidelity(SLICES).compute()
