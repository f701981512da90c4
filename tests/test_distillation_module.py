import copy

import pytest
import torch
from tiny import tiny_teacher

from raptor_hf import RaptorModel
from raptor_hf.distillation import DistillationModule, LossSettings, layer_loss
from raptor_hf.teachers import token_slices, trajectory

SLICES = {"cls": slice(0, 1), "register": slice(1, 3), "patch": slice(3, None)}


def test_plain_loss_is_the_mse():
    x, a = torch.randn(2, 4, 7, 8)
    torch.testing.assert_close(layer_loss(x, a, SLICES).mean(), torch.nn.functional.mse_loss(x, a))


def test_weighted_loss_is_its_definition():
    x, a = torch.randn(2, 4, 7, 8)
    mse = [(x[:, where] - a[:, where]).square().mean() for where in SLICES.values()]
    expected = 0.45 * mse[0] + 0.10 * mse[1] + 0.45 * mse[2]
    torch.testing.assert_close(layer_loss(x, a, SLICES, [0.45, 0.10, 0.45]).mean(), expected)
    without = {"cls": SLICES["cls"], "patch": slice(1, None)}
    mse = [(x[:, where] - a[:, where]).square().mean() for where in without.values()]
    torch.testing.assert_close(
        layer_loss(x, a, without, [0.34, 0.33, 0.33]).mean(), (0.34 * mse[0] + 0.33 * mse[1]) / 0.67
    )


def test_cosine_is_added_per_token_type():
    x, a = torch.randn(2, 4, 7, 8)
    away = [1 - torch.cosine_similarity(x[:, w], a[:, w], dim=-1).mean(1) for w in SLICES.values()]
    added = layer_loss(x, a, SLICES, [2, 1, 1], cosine_weight=3.0) - layer_loss(x, a, SLICES, [2, 1, 1])
    torch.testing.assert_close(added, 3 * (0.5 * away[0] + 0.25 * away[1] + 0.25 * away[2]))


def test_normalized_loss_does_not_depend_on_the_scale_or_on_the_other_images():
    x, a = torch.randn(2, 4, 7, 8)
    loss = layer_loss(x, a, SLICES, [1, 1, 1], normalize=True)
    torch.testing.assert_close(loss, layer_loss(50 * x, 50 * a, SLICES, [1, 1, 1], normalize=True))
    torch.testing.assert_close(loss[1:2], layer_loss(x[1:2], a[1:2], SLICES, [1, 1, 1], normalize=True))
    torch.testing.assert_close(layer_loss(0 * a, a, SLICES, [1, 1, 1], normalize=True), torch.ones(4))


def modules(registers=0, phase_sizes=(3, 1, 2), settings=None, **kwargs):
    teacher = tiny_teacher(registers)
    kwargs = {"init": "random", "layerscale_value": 0.5} | kwargs
    student = RaptorModel.from_teacher(teacher, list(phase_sizes) if phase_sizes else None, **kwargs)
    states = trajectory(teacher, torch.randn(3, 3, 28, 28))
    return DistillationModule(student, settings or LossSettings()), states


def plain_stage1(module, states, teacher_forcing, weights=lambda block: None):
    """Stage 1 of the paper, written out layer by layer."""
    total, end = 0.0, 0
    for index, size in enumerate(module.student.config.phase_sizes):
        block, start, end = module.student.blocks[index], end, end + size
        forced, free, x = 0.0, 0.0, states[:, start]
        for layer in range(start + 1, end + 1):
            step, target = torch.tensor(float(layer)), states[:, layer]
            x = block(x, step)
            free += layer_loss(x, target, module.slices, weights(index)).mean() / size
            forced += (
                layer_loss(block(states[:, layer - 1], step), target, module.slices, weights(index)).mean() / size
            )
        total += teacher_forcing * forced + (1 - teacher_forcing) * free
    return total


@pytest.mark.parametrize("teacher_forcing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("registers", [0, 4])
def test_stage_1_is_its_definition(teacher_forcing, registers):
    module, states = modules(registers)
    outputs = module(states, stage=1, teacher_forcing=teacher_forcing)
    torch.testing.assert_close(outputs["loss"], plain_stage1(module, states, teacher_forcing))
    assert outputs["layer_losses"].shape == (6,)


def test_stage_1_weighs_the_last_phase_by_itself():
    settings = LossSettings(last_phase_weights=[0.34, 0.33, 0.33])
    module, states = modules(4, settings=settings)
    expected = plain_stage1(module, states, 0.5, lambda block: [0.34, 0.33, 0.33] if block == 2 else None)
    torch.testing.assert_close(module(states, stage=1, teacher_forcing=0.5)["loss"], expected)


def test_gradients_of_the_phases_do_not_mix():
    module, states = modules()
    module(states, stage=1, teacher_forcing=0.5)["loss"].backward()
    whole = [block.mlp.fc1.weight.grad.clone() for block in module.student.blocks]
    alone = copy.deepcopy(module)
    alone.zero_grad()
    with torch.no_grad():
        for block in (alone.student.blocks[0], alone.student.blocks[2]):
            block.mlp.fc1.weight.normal_()
    alone(states, stage=1, teacher_forcing=0.5)["loss"].backward()
    torch.testing.assert_close(alone.student.blocks[1].mlp.fc1.weight.grad, whole[1])


def test_stage_2_is_the_models_own_closed_loop():
    module, states = modules(4, settings=LossSettings(stage2_weights=[0.45, 0.10, 0.45]))
    teacher = tiny_teacher(4)
    torch.manual_seed(1)
    images = torch.randn(3, 3, 28, 28)
    states, own = trajectory(teacher, images), trajectory(module.student, images)
    expected = torch.stack(
        [layer_loss(own[:, i], states[:, i], module.slices, [0.45, 0.10, 0.45]).mean() for i in range(1, 7)]
    )
    outputs = module(states, stage=2)
    torch.testing.assert_close(outputs["loss"], expected.mean())
    torch.testing.assert_close(outputs["layer_losses"], expected)


def test_output_only_sees_the_last_layer_alone():
    module, states = modules(settings=LossSettings(output_only=True))
    plain, _ = modules()
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(states)["loss"], plain(states)["layer_losses"][-1])
    changed = states.clone()
    changed[:, 1:-1] = 0
    torch.testing.assert_close(module(changed)["loss"], module(states)["loss"])


def test_a_shuffled_assignment_restarts_where_the_block_changes():
    module, states = modules(phase_sizes=None, block_assignment=[0, 1, 0, 0, 1, 1])
    blocks, expected = module.student.blocks, 0.0
    for run in ([1], [2], [3, 4], [5, 6]):
        x = states[:, run[0] - 1]
        for layer in run:
            x = blocks[[0, 1, 0, 0, 1, 1][layer - 1]](x, torch.tensor(float(layer)))
            expected += layer_loss(x, states[:, layer], module.slices).mean() / 3
    torch.testing.assert_close(module(states, stage=1)["loss"], expected)


def test_embeddings_and_final_norm_stay_the_teachers():
    module, _ = modules()
    trained = {name.split(".")[1] for name, p in module.named_parameters() if p.requires_grad}
    assert trained == {"blocks"}


def test_an_identical_start_has_no_loss():
    teacher = tiny_teacher(4)
    student = RaptorModel.from_teacher(teacher, [1] * 6)
    module = DistillationModule(student, LossSettings(normalize=True))
    states = trajectory(teacher, torch.randn(2, 3, 28, 28))
    for stage in (1, 2):
        assert module(states, stage=stage, teacher_forcing=0.5)["loss"] < 1e-10
    assert list(module.slices) == list(token_slices(teacher.config))
