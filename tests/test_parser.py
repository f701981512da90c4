from dataclasses import dataclass, field

import pytest

from raptor_hf.parser import ConfigArgumentParser


@dataclass
class Arguments:
    learning_rate: float = field(default=1e-3, metadata={"help": "A rate."})
    sizes: list[int] | None = field(default=None, metadata={"help": "Sizes."})
    mode: str = field(default="a", metadata={"help": "A mode.", "choices": ["a", "b"]})
    flip: bool = field(default=True, metadata={"help": "A switch."})

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ValueError("learning_rate must be positive")


def parse(args, tmp_path, text=None):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
        args = ["--config", str(tmp_path / "config.yaml"), *args]
    return ConfigArgumentParser(Arguments, prog="script").parse(args)[0]


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    text = "learning_rate: 1e-2\nsizes: [3, 2]\nflip: false\n"
    assert parse([], tmp_path, text) == Arguments(0.01, [3, 2], "a", False)
    assert parse(["--sizes", "6", "4", "--flip", "true"], tmp_path, text) == Arguments(0.01, [6, 4], "a", True)
    assert parse(["--learning_rate=3e-4"], tmp_path) == Arguments(3e-4)


def test_the_default_config_is_for_a_bare_command(tmp_path):
    (tmp_path / "default.yaml").write_text("mode: b")
    parser = ConfigArgumentParser(Arguments)
    assert parser.parse([], default_config=tmp_path / "default.yaml") == (Arguments(mode="b"),)
    for flag, mode in (("--flip=false", "b"), ("--learning_rate=1", "a")):
        parser = ConfigArgumentParser(Arguments)
        assert parser.parse([flag], tmp_path / "default.yaml", unless=("learning_rate",))[0].mode == mode


def test_the_file_may_give_what_is_required(tmp_path, capsys):
    @dataclass
    class Required:
        model: str

    (tmp_path / "config.yaml").write_text("model: here")
    assert ConfigArgumentParser(Required).parse(["--config", str(tmp_path / "config.yaml")]) == (Required("here"),)
    with pytest.raises(SystemExit):
        ConfigArgumentParser(Required).parse([])
    assert "required: --model" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["sizes: 3", 'sizes: "3"', "sizes: [3]", 'sizes: ["3"]'])
def test_one_value_of_many_needs_no_brackets(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert ConfigArgumentParser(Arguments).parse(["--config", str(tmp_path / "config.yaml")])[0].sizes == [3]


def test_a_flag_overrides_the_files_word_in_its_group(tmp_path):
    (tmp_path / "config.yaml").write_text("sizes: [3]\nflip: false")
    args = ["--config", str(tmp_path / "config.yaml"), "--learning-rate", "2"]
    parser = ConfigArgumentParser(Arguments, exclusive=(("sizes", "learning_rate"),))
    assert parser.parse(args) == (Arguments(2.0, None, "a", False),)


@pytest.mark.parametrize(
    ("args", "text", "message"),
    [
        (["--lerning_rate", "1"], None, "unknown --lerning_rate: did you mean --learning_rate?"),
        (["--learning", "1"], None, "unknown --learning: did you mean --learning_rate?"),
        (["--xyz"], None, "unknown --xyz: see --help"),
        (["stray"], None, "unknown stray: see --help"),
        ([], "lerning_rate: 1", "unknown key lerning_rate in"),
        ([], "lerning_rate: 1", "did you mean learning_rate?"),
        ([], "mode: c", "must be one of a, b, got 'c'"),
        (["--mode", "c"], None, "invalid choice"),
        (["--sizes", "six"], None, "invalid int value: 'six'"),
        ([], "sizes: six", "sizes"),
        (["--learning_rate", "-1"], None, "learning_rate must be positive"),
        ([], "- a\n- b", "must hold `flag: value` lines"),
        ([], "a: [", "can't be read"),
        ([], "sizes: &sizes [1]\nmode: *sizes", "line 2 is an alias of another value: write it out"),
        (["--config", "nothing.yaml"], None, "--config nothing.yaml can't be read"),
    ],
)
def test_refusals_are_one_line_with_exit_code_2(tmp_path, capsys, args, text, message):
    with pytest.raises(SystemExit) as exit_info:
        parse(args, tmp_path, text)
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert error.startswith("script: error: ") and error.count("\n") == 1
    assert message in error


def test_secrets_are_not_repeated(tmp_path, capsys):
    @dataclass
    class WithToken:
        hub_token: str | None = field(default=None, metadata={"help": "A secret."})

    (tmp_path / "config.yaml").write_text("hub_token: [hf_secret]")
    for args in (["--hub_tokn=hf_secret"], ["--config", str(tmp_path / "config.yaml")]):
        with pytest.raises(SystemExit):
            ConfigArgumentParser(WithToken).parse(args)
        message = capsys.readouterr().err
        assert "hub_token" in message and "hf_secret" not in message
