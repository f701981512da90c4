"""The model: a teacher written as a Raptor is that teacher, and a block is the paper's formula."""

import pytest
import torch
from conftest import make_raptor, make_teacher
from torch import nn
from torch.testing import assert_close

from raptor_hf import RaptorConfig, RaptorModel

ONES = [1, 1, 1, 1]
SIZES = [(56, 56), (57, 56), (70, 42), (42, 98), (61, 103), (14, 28), (15, 14)]


def test_phases_of_one_layer_are_the_teacher_bit_for_bit(teacher, images):
    raptor = RaptorModel.from_teacher(teacher, phase_sizes=ONES)
    for model in (teacher, raptor):
        model.set_attn_implementation("eager")  # the one that returns attention maps
    expected = teacher(images, output_hidden_states=True, output_attentions=True)
    outputs = raptor(images, output_hidden_states=True, output_attentions=True)
    assert type(outputs) is type(expected)
    assert torch.equal(outputs.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(outputs.pooler_output, expected.pooler_output)
    assert len(outputs.hidden_states) == 5 and len(outputs.attentions) == 4
    assert all(torch.equal(*pair) for pair in zip(outputs.hidden_states, expected.hidden_states))
    assert all(torch.equal(*pair) for pair in zip(outputs.attentions, expected.attentions))


def test_phases_of_one_layer_are_a_teacher_with_a_gated_mlp(family, images):
    teacher = make_teacher(family, use_swiglu_ffn=True)
    raptor = RaptorModel.from_teacher(teacher, phase_sizes=ONES)
    assert raptor.config.hidden_act == "swiglu"
    # Gate and up come from one matrix product, which may round another way than two.
    assert_close(raptor(images).last_hidden_state, teacher(images).last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_teacher_at_other_sizes_and_dtypes(teacher, size, dtype):
    teacher = teacher.to(dtype)
    raptor = RaptorModel.from_teacher(teacher, phase_sizes=ONES)
    assert raptor.dtype == dtype
    images = torch.randn(1, 3, *size)  # float32: the model casts, as DINOv2 does
    outputs = raptor(images).last_hidden_state
    assert outputs.dtype == dtype
    assert torch.equal(outputs, teacher(images).last_hidden_state)


def test_masked_patches_equal_the_teacher(teacher, images):
    raptor = RaptorModel.from_teacher(teacher, phase_sizes=ONES)
    mask = torch.rand(2, 16) < 0.5
    expected = teacher(images, bool_masked_pos=mask).last_hidden_state
    assert torch.equal(raptor(images, bool_masked_pos=mask).last_hidden_state, expected)
    assert not torch.equal(raptor(images).last_hidden_state, expected)


def test_attention_mask_hides_tokens(images):
    raptor = make_raptor()
    mask = torch.ones(2, 17, dtype=torch.long)
    assert_close(raptor(images, attention_mask=mask).last_hidden_state, raptor(images).last_hidden_state)
    mask[:, -4:] = 0
    changed = images.clone()
    changed[:, :, 42:] += 1  # the last row of patches
    seen, hidden = raptor(images).pooler_output, raptor(images, attention_mask=mask).pooler_output
    assert not torch.allclose(raptor(changed).pooler_output, seen, atol=1e-3)
    assert_close(raptor(changed, attention_mask=mask).pooler_output, hidden)


def test_position_grid_that_is_not_square():
    raptor = make_raptor(image_size=[28, 56], patch_size=[14, 7])
    assert raptor.embeddings.position_embeddings.shape == (1, 1 + 2 * 8, 32)
    images = torch.randn(1, 3, 28, 56)
    states = raptor(images, output_hidden_states=True).hidden_states
    patches = raptor.embeddings.patch_embeddings(images).flatten(2).transpose(1, 2)
    assert_close(states[0][:, 1:], patches + raptor.embeddings.position_embeddings[:, 1:])
    assert raptor(torch.randn(1, 3, 42, 42)).last_hidden_state.shape == (1, 1 + 3 * 6, 32)


@pytest.mark.parametrize("hidden_act", ["gelu", "swiglu"])
@pytest.mark.parametrize("depth_scaling", [True, False])
def test_block_is_the_formula(hidden_act, depth_scaling):
    raptor = make_raptor(hidden_act=hidden_act, depth_scaling=depth_scaling)
    block, x, step = raptor.blocks[0], torch.randn(2, 5, 32), 3.0
    p = dict(block.named_parameters())

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        std = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return centred / std * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def heads(x):
        return x.reshape(2, 5, 2, 16).transpose(1, 2)

    def attention(x):
        q, k, v = (heads(part) for part in linear("attention.qkv", x).chunk(3, dim=-1))
        weights = (q @ k.transpose(2, 3) / 16**0.5).softmax(-1)
        return linear("attention.o_proj", (weights @ v).transpose(1, 2).reshape(2, 5, 32))

    def mlp(x):
        inner = linear("mlp.fc1", x)
        if hidden_act == "gelu":
            return linear("mlp.fc2", inner * 0.5 * (1 + torch.erf(inner / 2**0.5)))
        gate, up = inner.chunk(2, dim=-1)
        return linear("mlp.fc2", gate * gate.sigmoid() * up)

    t1 = t2 = t3 = torch.ones(32)
    if depth_scaling:
        inner = p["depth_scaling.fc1.weight"][:, 0] * step + p["depth_scaling.fc1.bias"]
        scaling = 1 + p["depth_scaling.fc2.weight"] @ (inner * inner.sigmoid()) + p["depth_scaling.fc2.bias"]
        t1, t2, t3 = scaling[:32], scaling[32:64], scaling[64:]
    u = x + t1 * p["layer_scale1"] * attention(norm("norm1", x))
    out = t3 * (u + t2 * p["layer_scale2"] * mlp(norm("norm2", u)))
    assert_close(block(x, torch.tensor(step)), out, atol=1e-5, rtol=1e-5)


def test_depth_step_per_sample():
    block, x = make_raptor().blocks[0], torch.randn(2, 5, 32)
    both = block(x, torch.tensor([1.0, 7.0]))
    assert_close(both[0], block(x, torch.tensor(1.0))[0])
    assert_close(both[1], block(x, torch.tensor(7.0))[1])
    assert not torch.allclose(both[1], block(x, torch.tensor(1.0))[1], atol=1e-3)


def test_blocks_recur_with_the_layer_numbers(images):
    raptor = make_raptor(phase_sizes=[2, 2], block_assignment=[0, 1, 1, 0], num_register_tokens=2)
    states = raptor(images, output_hidden_states=True).hidden_states
    assert [tuple(state.shape) for state in states] == [(2, 1 + 2 + 16, 32)] * 5
    x = states[0]
    for layer, (block, state) in enumerate(zip([0, 1, 1, 0], states[1:]), start=1):
        x = raptor.blocks[block](x, torch.tensor(float(layer)))
        assert_close(x, state)


def test_phase_iterations_is_a_dial(images):
    raptor = make_raptor()
    trained = raptor(images).last_hidden_state
    assert torch.equal(raptor(images, phase_iterations=[3, 1]).last_hidden_state, trained)

    # Five applications of the first block, their steps spread evenly over layers 1 to 3.
    states = raptor(images, phase_iterations=[5, 2], output_hidden_states=True).hidden_states
    x = raptor.embeddings(images)
    for block, step in [(0, 1.0), (0, 1.5), (0, 2.0), (0, 2.5), (0, 3.0), (1, 4.0), (1, 4.0)]:
        x = raptor.blocks[block](x, torch.tensor(step))
    assert len(states) == 8
    assert_close(states[-1], x)
    assert not torch.allclose(raptor.layernorm(x), trained, atol=1e-3)


def test_phase_iterations_stored_in_the_configuration(images, tmp_path):
    raptor = make_raptor()
    raptor.save_pretrained(tmp_path)
    fewer = RaptorModel.from_pretrained(tmp_path, phase_iterations=[1, 1])
    assert fewer.config.num_hidden_layers == 2
    expected = raptor(images, phase_iterations=[1, 1]).last_hidden_state
    assert_close(fewer(images).last_hidden_state, expected)
    assert_close(fewer(images, phase_iterations=[3, 1]).last_hidden_state, raptor(images).last_hidden_state)
    fewer.save_pretrained(tmp_path / "again")
    assert_close(RaptorModel.from_pretrained(tmp_path / "again")(images).last_hidden_state, expected)


@pytest.mark.parametrize("wrong", [[3], [3, 1, 1], [0, 4], []])
def test_phase_iterations_that_do_not_fit_are_refused(images, wrong):
    with pytest.raises(ValueError, match="phase_iterations must give each of the 2 phases"):
        make_raptor()(images, phase_iterations=wrong)


def test_random_start(images):
    raptor = RaptorModel(RaptorConfig(phase_sizes=[2, 2], hidden_size=256, num_attention_heads=4, image_size=56))
    for block in raptor.blocks:
        for parameter in (block.depth_scaling.fc2.weight, block.depth_scaling.fc2.bias):
            assert 0.5e-4 < parameter.std() < 2e-4
        assert block.depth_scaling.fc1.weight.shape == (16, 1)
        assert torch.equal(block.layer_scale1, torch.full((256,), 1e-5))
        assert torch.equal(block.layer_scale2, torch.full((256,), 1e-5))
        assert 0.015 < block.attention.qkv.weight.std() < 0.025
        assert not block.mlp.fc1.bias.any()
    assert not torch.equal(raptor.blocks[0].mlp.fc1.weight, raptor.blocks[1].mlp.fc1.weight)
    # So the first step starts near the identity.
    states = raptor.eval()(images, output_hidden_states=True).hidden_states
    assert_close(states[-1], states[0], atol=1e-2, rtol=1e-2)


def test_from_teacher_copies_the_middle_layer_or_the_named_one(teacher, images):
    raptor = RaptorModel.from_teacher(teacher, phase_sizes=[3, 1])
    layers = teacher.encoder.layer
    assert torch.equal(raptor.blocks[0].norm1.weight, layers[1].norm1.weight)
    assert torch.equal(raptor.blocks[1].norm1.weight, layers[3].norm1.weight)
    raptor = RaptorModel.from_teacher(teacher, phase_sizes=[3, 1], source_layers=[3, 4])
    assert torch.equal(raptor.blocks[0].norm1.weight, layers[2].norm1.weight)
    # A block is the layer it was copied from, at any depth step.
    x = torch.randn(2, 5, 32)
    assert torch.equal(raptor.blocks[0](x, torch.tensor(9.0)), layers[2](x))


def test_from_teacher_with_random_blocks(teacher, images):
    raptor = RaptorModel.from_teacher(teacher, phase_sizes=[3, 1], init="random", hidden_act="swiglu")
    assert raptor.blocks[0].mlp.fc1.weight.shape == (2 * 4 * 32, 32)
    assert torch.equal(raptor.layernorm.weight, teacher.layernorm.weight)
    assert torch.equal(raptor.blocks[0].layer_scale1, torch.full((32,), 1e-5))
    expected = teacher(images, output_hidden_states=True).hidden_states[0]
    assert torch.equal(raptor(images, output_hidden_states=True).hidden_states[0], expected)


def test_from_teacher_leaves_the_teacher_alone(teacher, images):
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    raptor = RaptorModel.from_teacher(teacher, phase_sizes=ONES)
    with torch.no_grad():
        for parameter in raptor.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"phase_sizes": [2, 1]}, "sum to 3 layers, but the teacher has 4"),
        ({"phase_sizes": [2, 2], "init": "zeros"}, 'init must be "teacher" or "random"'),
        ({"phase_sizes": [2, 2], "hidden_size": 64}, "whose hidden_size is 32, not 64"),
        ({"phase_sizes": [2, 2], "source_layers": [1]}, "source_layers must name a layer from 1 to 4"),
        ({"phase_sizes": [2, 2], "source_layers": [1, 5]}, "source_layers must name a layer from 1 to 4"),
        ({"phase_sizes": [2, 2], "source_layers": [1, 3], "init": "random"}, 'source_layers goes with init="teacher"'),
    ],
)
def test_from_teacher_refuses_what_does_not_fit(teacher, kwargs, message):
    with pytest.raises(ValueError, match=message):
        RaptorModel.from_teacher(teacher, **kwargs)


def test_from_teacher_refuses_another_family():
    with pytest.raises(ValueError, match="must be one of dinov2, dinov2_with_registers, but this model is of type"):
        RaptorModel.from_teacher(make_raptor(), phase_sizes=[3, 1])


def test_save_and_load(images, tmp_path):
    raptor = make_raptor(num_register_tokens=2)
    raptor.save_pretrained(tmp_path)
    loaded, info = RaptorModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.to_diff_dict() == raptor.config.to_diff_dict()
    expected = raptor.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert_close(loaded(images).last_hidden_state, raptor(images).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_full(images, dtype, tmp_path):
    raptor = make_raptor()
    expected = raptor(images).last_hidden_state
    raptor.save_pretrained(tmp_path)
    outputs = RaptorModel.from_pretrained(tmp_path, dtype=dtype)(images, output_hidden_states=True)
    assert {state.dtype for state in outputs.hidden_states} == {dtype}
    assert nn.functional.cosine_similarity(outputs.last_hidden_state.float(), expected, dim=-1).min() > 0.999


def test_autocast_trains(images):
    raptor = make_raptor().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = raptor(images)
        outputs.last_hidden_state.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in raptor.named_parameters() if "mask" not in n)


def test_gradient_checkpointing_gives_the_same_gradients(images):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        raptor = make_raptor(use_mask_token=False).train()
        if checkpointing:
            raptor.activation_checkpointing_enable()
        raptor(images).last_hidden_state.pow(3).mean().backward()
        gradients.append([parameter.grad for parameter in raptor.parameters()])
    assert_close(*gradients)


def test_drop_path_drops_whole_branches_of_single_samples(images):
    raptor = make_raptor(phase_sizes=[1], drop_path_rate=0.5, depth_scaling=False)
    x = torch.randn(64, 5, 32)
    step = torch.tensor(1.0)
    assert torch.equal(raptor.blocks[0](x, step), raptor.eval().blocks[0](x, step))
    dropped = (raptor.train().blocks[0](x, step) == x).flatten(1).all(dim=1)
    assert 4 < dropped.sum() < 30  # both branches, with a probability of 1/4
    mean = torch.stack([raptor.blocks[0].drop_path(torch.ones(64, 1, 1)).mean() for _ in range(50)]).mean()
    assert abs(mean - 1) < 0.1


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="images of 3 channels, got 1"):
        make_raptor()(torch.randn(1, 1, 56, 56))
    with pytest.raises(ValueError, match="use_mask_token=True"):
        make_raptor(use_mask_token=False)(torch.randn(1, 3, 56, 56), bool_masked_pos=torch.ones(1, 16))


def test_three_blocks_store_a_third_of_dinov2_small(dinov2_small, tmp_path):
    raptor = RaptorModel.from_teacher(dinov2_small, phase_sizes=[6, 4, 2])
    sizes = []
    for model in (raptor, dinov2_small):
        model.save_pretrained(tmp_path / model.config.model_type)
        sizes.append((tmp_path / model.config.model_type / "model.safetensors").stat().st_size)
    assert sizes[0] <= 0.35 * sizes[1]


def test_dinov2_small_as_a_raptor_is_itself(dinov2_small):
    raptor = RaptorModel.from_teacher(dinov2_small, phase_sizes=[1] * 12)
    images = torch.randn(1, 3, 98, 140)
    with torch.no_grad():
        assert torch.equal(raptor(images).last_hidden_state, dinov2_small(images).last_hidden_state)


def test_iterations_do_not_count_as_the_teachers_depth():
    teacher = make_teacher("dinov2")
    assert RaptorModel.from_teacher(teacher, [3, 1], phase_iterations=[3, 3]).config.num_hidden_layers == 6
    with pytest.raises(ValueError, match="sum to 2 layers, but the teacher has 4"):
        RaptorModel.from_teacher(teacher, [1, 1], phase_iterations=[2, 2])


@pytest.mark.parametrize(
    "field, value", [("image_size", 28), ("patch_size", 7), ("num_channels", 1), ("hidden_size", 64)]
)
def test_the_embeddings_are_the_teachers(field, value):
    with pytest.raises(ValueError, match=f"whose {field} is"):
        RaptorModel.from_teacher(make_teacher("dinov2"), [3, 1], init="random", **{field: value})


@pytest.mark.parametrize("iterations", [[3.0, 1], ["2", 1], "21", 3, [True, 1], [10**6, 1], [1]])
def test_iterations_of_a_call_are_whole_numbers(images, iterations):
    with pytest.raises(ValueError, match="phase_iterations must"):
        make_raptor()(images, phase_iterations=iterations)


def test_layer_scale_may_be_a_whole_number():
    assert make_raptor(layerscale_value=1).blocks[0].layer_scale1.is_floating_point()
