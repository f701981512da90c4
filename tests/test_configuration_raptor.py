"""The configuration: the recurrence it describes, and the contradictions it refuses."""

import pytest

from raptor_hf import RaptorConfig


def test_depth_and_stages_follow_the_phases():
    config = RaptorConfig(phase_sizes=[7, 3, 2])
    assert config.num_hidden_layers == 12
    assert config.stage_names == ["stem"] + [f"stage{i}" for i in range(1, 13)]
    assert config.out_features == ["stage12"]
    assert config.intermediate_size == 4 * config.hidden_size


def test_schedule_is_the_recurrence_written_out():
    config = RaptorConfig(phase_sizes=[2, 1])
    assert config.schedule() == [(0, 1.0), (0, 2.0), (1, 3.0)]
    assert config.schedule([2, 1]) == config.schedule()
    assert config.schedule([3, 2]) == [(0, 1.0), (0, 1.5), (0, 2.0), (1, 3.0), (1, 3.0)]
    assert config.schedule([1, 1]) == [(0, 1.5), (1, 3.0)]


def test_block_assignment_need_not_be_contiguous():
    config = RaptorConfig(block_assignment=[0, 1, 0, 1, 1])
    assert config.phase_sizes == [2, 3] and config.num_hidden_layers == 5
    assert config.schedule() == [(0, 1.0), (1, 2.0), (0, 3.0), (1, 4.0), (1, 5.0)]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"phase_sizes": [2, 1]},
        {"phase_sizes": (2, 1), "phase_iterations": (4, 1)},
        {"block_assignment": [0, 1, 0]},
        {"phase_sizes": [2, 1], "out_features": ["stem", "stage2"]},
        {"image_size": [28, 56], "patch_size": [14, 7], "hidden_act": "swiglu", "intermediate_size": 8},
    ],
)
def test_survives_a_file(kwargs, tmp_path):
    config = RaptorConfig(**kwargs)
    config.save_pretrained(tmp_path)
    loaded = RaptorConfig.from_pretrained(tmp_path)
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert loaded.schedule() == config.schedule()
    assert loaded.out_features == config.out_features and loaded.out_indices == config.out_indices


def test_overrides_while_loading_are_checked_and_moved_along(tmp_path):
    RaptorConfig(phase_sizes=[2, 1]).save_pretrained(tmp_path)
    config = RaptorConfig.from_pretrained(tmp_path, phase_iterations=[4, 3])
    assert config.num_hidden_layers == 7 and config.out_features == ["stage7"]
    assert RaptorConfig.from_pretrained(tmp_path, phase_iterations=[1, 1]).out_features == ["stage2"]
    assert RaptorConfig.from_pretrained(tmp_path, out_indices=[1, 2]).out_features == ["stage1", "stage2"]
    config, unused = RaptorConfig.from_pretrained(
        tmp_path, out_indices=[6], phase_iterations=[4, 3], nonsense=1, return_unused_kwargs=True
    )
    assert config.out_features == ["stage6"] and unused == {"nonsense": 1}
    with pytest.raises(ValueError, match="phase_iterations must give each of the 2 phases"):
        RaptorConfig.from_pretrained(tmp_path, phase_iterations=[1])


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"phase_sizes": []}, "phase_sizes must be one or more sizes"),
        ({"phase_sizes": [3, 0]}, "phase_sizes must be one or more sizes"),
        ({"phase_sizes": [2, 2], "block_assignment": [0, 0, 0, 1]}, "block_assignment .* must name block j"),
        ({"block_assignment": [0, 2]}, "phase_sizes must be one or more sizes"),
        ({"block_assignment": []}, "phase_sizes must be one or more sizes"),
        ({"phase_sizes": [2, 2], "phase_iterations": [2]}, "phase_iterations must give each of the 2 phases"),
        ({"phase_sizes": [2, 2], "phase_iterations": [0, 2]}, "at least 1 application"),
        ({"block_assignment": [0, 1, 0], "phase_iterations": [1, 1]}, "phase_iterations needs contiguous phases"),
        ({"hidden_size": 100, "num_attention_heads": 12}, "num_attention_heads must divide hidden_size"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1"),
        ({"num_register_tokens": -1}, "num_register_tokens must be at least 0"),
        ({"drop_path_rate": 1.0}, "drop_path_rate is a probability below 1"),
        ({"hidden_dropout_prob": -0.1}, "hidden_dropout_prob is a probability below 1"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps must be positive"),
        ({"image_size": 7}, "must be at least patch_size"),
        ({"image_size": [14, 14, 14]}, "image_size must be one positive number or two"),
        ({"phase_sizes": [2, 1], "out_features": ["stage4"]}, "out_features must be a subset of stage_names"),
    ],
)
def test_contradictions_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RaptorConfig(**kwargs)


def test_depth_cannot_be_set_beside_the_phases():
    assert RaptorConfig(phase_sizes=[2, 1], num_hidden_layers=3).num_hidden_layers == 3
    with pytest.raises(ValueError, match="set phase_sizes instead"):
        RaptorConfig(phase_sizes=[2, 1], num_hidden_layers=4)
    with pytest.raises(NotImplementedError, match="set phase_sizes instead"):
        RaptorConfig(phase_sizes=[2, 1]).num_hidden_layers = 4


def test_what_transformers_leaves_in_a_configuration_is_not_unknown(monkeypatch):
    warnings = []
    monkeypatch.setattr("raptor_hf.configuration_raptor.logger.warning", warnings.append)
    fields = RaptorConfig(phase_sizes=[2, 1]).to_dict()
    RaptorConfig.from_dict(fields | {"use_cache": False, "quantization_config": {}})
    assert not warnings
    RaptorConfig.from_dict(fields | {"from_the_future": 1})
    assert "from_the_future" in warnings[0]
