"""Compiled, exported, quantised and adapted Raptors compute what the eager model computes."""

from collections import Counter

import numpy as np
import pytest
import torch
from conftest import make_raptor
from torch.testing import assert_close

from raptor_hf import RaptorBackbone, RaptorForImageClassification, RaptorModel

SIZES = [(2, 3, 56, 56), (3, 3, 70, 42), (1, 3, 61, 103), (1, 3, 28, 28)]


@pytest.mark.parametrize("model_class", [RaptorModel, RaptorBackbone])
def test_compiles_without_graph_breaks(model_class):
    model = make_raptor(model_class, phase_sizes=[2], num_register_tokens=2, interpolate_antialias=True)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")  # traced in full; kernels are not built
    for size in SIZES[:2]:
        images = torch.randn(size)
        assert_close(compiled(images)[0], model(images)[0])


def test_compiles_for_training(images):
    model = make_raptor(RaptorForImageClassification, phase_sizes=[2], use_mask_token=False, num_labels=3).train()
    labels = torch.tensor([2, 0])
    model(images, labels=labels).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.compiler.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(images, labels=labels).loss.backward()
    assert_close([parameter.grad for parameter in model.parameters()], expected)


DYNAMIC = {"pixel_values": {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}}


@pytest.mark.parametrize("interpolate_antialias", [False, True])
def test_torch_export_with_dynamic_batch_and_size(interpolate_antialias, images, tmp_path):
    # The example's grid is the stored one, which must not be frozen into the program.
    model = make_raptor(phase_sizes=[2], interpolate_antialias=interpolate_antialias, num_register_tokens=2)
    program = torch.export.export(model, (), {"pixel_values": images}, dynamic_shapes=DYNAMIC)
    torch.export.save(program, tmp_path / "raptor.pt2")
    exported = torch.export.load(tmp_path / "raptor.pt2").module()
    for size in SIZES:
        images = torch.randn(size)
        assert_close(exported(pixel_values=images).last_hidden_state, model(images).last_hidden_state)


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    """A Raptor of one block for two layers, and its ONNX file with a dynamic batch and image size."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"ONNX export is checked with {name}")
    torch.manual_seed(0)
    model = make_raptor(phase_sizes=[2], hidden_size=96, num_register_tokens=2, interpolate_antialias=True)
    path = tmp_path_factory.mktemp("onnx") / "raptor.onnx"
    torch.onnx.export(
        model,
        kwargs={"pixel_values": torch.randn(2, 3, 56, 56)},
        f=path,
        dynamo=True,
        dynamic_shapes=DYNAMIC,
        input_names=["pixel_values"],
        output_names=["last_hidden_state", "pooler_output"],
        external_data=False,
        verbose=False,
    )
    return model, path


def run_onnx(path, images):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return [torch.from_numpy(output) for output in session.run(None, {"pixel_values": images.numpy()})]


@pytest.mark.parametrize("size", SIZES)
def test_onnx_equals_eager_at_any_batch_and_size(onnx_file, size):
    model, path = onnx_file
    images = torch.randn(size)
    with torch.no_grad():
        expected = model(images)
    last_hidden_state, pooler_output = run_onnx(path, images)
    assert_close(last_hidden_state, expected.last_hidden_state, atol=1e-4, rtol=1e-4)
    assert_close(pooler_output, expected.pooler_output, atol=1e-4, rtol=1e-4)


def test_onnx_holds_each_blocks_weights_once(onnx_file):
    import onnx

    model, path = onnx_file
    stored = Counter()
    for initializer in onnx.load(path).graph.initializer:
        array = onnx.numpy_helper.to_array(initializer)
        stored[np.sort(array, axis=None).tobytes()] += 1  # sorted, as a matrix may be stored transposed
    for name, parameter in model.blocks[0].named_parameters():
        if parameter.ndim == 2 and parameter.numel() >= 96 * 96:
            assert stored[np.sort(parameter.detach().numpy(), axis=None).tobytes()] == 1, name
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert path.stat().st_size < weights + 300_000  # the graph itself


def test_int8_onnx(onnx_file, tmp_path):
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model, path = onnx_file
    # Preparation merges the applications' transposed copies of a matrix, which then is quantised once.
    quant_pre_process(path, tmp_path / "prepared.onnx", skip_symbolic_shape=True)
    quantize_dynamic(tmp_path / "prepared.onnx", tmp_path / "int8.onnx", weight_type=QuantType.QInt8)
    assert (tmp_path / "int8.onnx").stat().st_size < 0.5 * path.stat().st_size
    images = torch.randn(3, 3, 70, 42)
    expected = model(images).last_hidden_state
    error = (run_onnx(tmp_path / "int8.onnx", images)[0] - expected).norm() / expected.norm()
    assert 0 < error < 0.05


def test_lora_on_the_shared_blocks(images, tmp_path):
    peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
    torch.manual_seed(0)
    base = make_raptor(RaptorForImageClassification, num_labels=3)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["qkv", "o_proj"], modules_to_save=["classifier"])
    model = peft.get_peft_model(base, config)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or "classifier" in name for name in trainable)
    # Two blocks, two projections, two matrices each: the block of three layers has one adapter.
    assert sum("lora_" in name for name in trainable) == 2 * 2 * 2

    before = model(images).logits
    labels = torch.tensor([0, 2])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        loss = model(pixel_values=images, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    adapted = model.eval()(images).logits
    assert not torch.allclose(adapted, before, atol=1e-2)

    model.save_pretrained(tmp_path / "adapter")
    fresh = RaptorForImageClassification.from_pretrained(tmp_path / "base", num_labels=3)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert_close(loaded(images).logits, adapted, atol=1e-5, rtol=1e-5)
    merged = loaded.merge_and_unload()
    assert type(merged) is RaptorForImageClassification
    assert_close(merged(images).logits, adapted, atol=1e-4, rtol=1e-4)


def test_every_linear_layer_can_be_quantised(images):
    model = make_raptor()
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    cosine = torch.cosine_similarity(quantised(images).last_hidden_state, model(images).last_hidden_state, dim=-1)
    assert cosine.min() > 0.95
