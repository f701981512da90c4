"""Any input at all to the configuration, to `find_phases` and to the command line: it works, or one clear error."""

import contextlib
import io

import numpy as np
import pytest
import yaml
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raptor_hf import RaptorConfig
from raptor_hf.distillation import DataArguments, DistillationArguments, ModelArguments
from raptor_hf.distillation.arguments import PHASE_FLAGS
from raptor_hf.parser import ConfigArgumentParser
from raptor_hf.phases import find_phases

fuzz = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
numbers = st.one_of(st.integers(-3, 40), st.floats(width=32), st.sampled_from([0, 1, 2, 14, 16, 10**9]))
scalars = st.one_of(numbers, st.none(), st.booleans(), st.text(max_size=8))
values = st.one_of(scalars, st.lists(scalars, max_size=5), st.lists(st.integers(-1, 5), max_size=6))
FIELDS = sorted(name for name in RaptorConfig.__annotations__ if not name.startswith("_") and name != "config")


@fuzz
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_any_configuration_is_made_or_refused_clearly(fields):
    try:
        config = RaptorConfig(**fields)
    except (ValueError, StrictDataclassError) as error:
        assert str(error)
    else:
        assert config.num_hidden_layers == len(config.schedule()) >= 1
        assert RaptorConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


matrices = st.one_of(
    st.integers(0, 9).map(np.eye),
    st.integers(1, 9).flatmap(
        lambda n: st.lists(st.floats(-1, 1, width=32), min_size=n * n, max_size=n * n).map(
            lambda cells: (np.array(cells).reshape(n, n)) * (1 - np.eye(n)) + np.eye(n)
        )
    ),
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=4),
    scalars,
)


@fuzz
@given(matrices, st.integers(-2, 12), st.integers(-2, 6), st.sampled_from(["mean", "cut", "median", ""]))
def test_any_similarity_is_cut_or_refused_clearly(similarity, num_phases, min_size, objective):
    try:
        sizes = find_phases(similarity, num_phases, min_size, objective)
    except ValueError as error:
        assert str(error)
    else:
        assert len(sizes) == num_phases and sum(sizes) == len(similarity) and min(sizes) >= min_size


FLAGS = [
    *("teacher", "num_phases", "phase_sizes", "crop_scale", "flip", "learning_rate"),
    *("max_steps", "stage2_weights", "stage1_ratio", "muon", "optim", "lr_scheduler_type"),
    *("lr_scheduler_kwargs", "image_size", "init", "warmup_steps", "max_eval_samples", "streaming"),
    *("save_strategy", "logging_steps", "seed", "adam_beta1", "bf16", "no_such_flag"),
]
flags = st.sampled_from(FLAGS)
words = st.one_of(st.text(max_size=8), numbers.map(str), st.sampled_from(["--", "-", "=", "--config", "{", "true"]))


def outcome(args: list[str]) -> str | None:
    """The error message of a command line, `None` if it is taken."""
    parser = ConfigArgumentParser(
        (ModelArguments, DataArguments, DistillationArguments), exclusive=(PHASE_FLAGS,), prog="script"
    )
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            parser.parse([*args, "--use_cpu", "true"])
    except SystemExit as stop:
        if stop.code == 0:
            return None
        assert stop.code == 2
        return stderr.getvalue()
    return None


def check(message: str | None):
    if message is not None:
        (line,) = [line for line in message.splitlines() if line.startswith("script: error: ")]
        assert len(line) > len("script: error: ") and "Traceback" not in message


command_words = st.one_of(words, flags.map("--{}".format), st.tuples(flags, words).map("--{0[0]}={0[1]}".format))


@fuzz
@given(st.lists(command_words, max_size=5))
def test_any_command_line_is_taken_or_refused_in_one_line(args):
    check(outcome(args))


contents = st.one_of(values, st.dictionaries(st.text(max_size=3), scalars, max_size=2))


@fuzz
@given(st.dictionaries(st.one_of(flags, scalars), contents, max_size=3))
def test_any_file_is_taken_or_refused_in_one_line(tmp_path, content):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    check(outcome(["--config", str(tmp_path / "config.yaml")]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phase_sizes: 12", None),
        ("layer_norm_eps: 1", None),
        ("flip: false", None),
        ("report_to: none", None),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-6}", None),
        ("flip: 3", "flip in"),
        ("max_steps: [1, 2]", "max_steps in"),
        ("max_steps: 1.5", "must be of type int, got 1.5"),
        ("phase_sizes: [3, x]", "must be of type int, got [3, 'x']"),
        ("phase_sizes: []", "must be one or more values, got []"),
        ("teacher: null", "must be a single value, got None"),
        ("crop_scale: {a: 1}", "must be one or more values, got {'a': 1}"),
    ],
)
def test_a_value_of_a_file_is_typed_as_its_flag_is(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    refused = outcome(["--config", str(tmp_path / "config.yaml")])
    assert refused is None if message is None else message in refused
