"""Command lines: dataclasses as flags, `--config FILE.yaml` under them, and refusals of one line."""

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import get_type_hints

import yaml
from transformers import HfArgumentParser

from .files import check_writable


def check_at_least_one(arguments, *names: str):
    """Raises ValueError if one of the named fields is a number below 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


class _FlagsLoader(yaml.SafeLoader):
    """YAML without aliases: no list of flags needs them, and few lines of them can stand for any amount of text."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise ValueError(f"line {line} is an alias of another value: write it out")
        return super().compose_node(parent, index)


class ConfigArgumentParser(HfArgumentParser):
    """
    An `HfArgumentParser` whose defaults can come from a YAML file. Flags override the file. Unknown flags, unknown
    keys and values that the dataclasses refuse end the program with exit code 2 and one line that says what to do.

    Args:
        exclusive: groups of flags that say the same thing in different ways.
    """

    def __init__(self, dataclass_types, exclusive: tuple[tuple[str, ...], ...] = (), **kwargs):
        self.exclusive = exclusive
        types = dataclass_types if isinstance(dataclass_types, (list, tuple)) else [dataclass_types]
        hints = {name: hint for dataclass_type in types for name, hint in get_type_hints(dataclass_type).items()}
        self._mappings = {name for name, hint in hints.items() if "dict" in str(hint)}
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        self.add_argument("--config", metavar="FILE.yaml", help="YAML file of the flags below; flags override it.")

    def parse(self, args: list[str] | None = None, default_config: Path | None = None, unless: tuple = ()) -> tuple:
        """
        The dataclasses, from `args` (by default the command line's).

        Args:
            args: the command line.
            default_config: the file to read where no `--config` is given, nor one of the flags that `unless` names.
        """
        args = sys.argv[1:] if args is None else args
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config.add_argument("--config")
        config.error = self.error
        given = {word.lstrip("-").split("=")[0].replace("-", "_") for word in args if word.startswith("--")}
        path = config.parse_known_args(args)[0].config
        if path is None and not given & set(unless):
            path = default_config
        if path is not None:
            self._read_config(Path(path), given)
        try:
            namespace, unknown = self.parse_known_args(args)
            if unknown:
                # Without its value, which may be a secret.
                flag = unknown[0].split("=")[0]
                self._refuse_unknown(flag, flag.lstrip("-"), "--")
            values = {key: value for key, value in vars(namespace).items() if key != "config"}
            parsed = self.parse_dict(values)
            for arguments in parsed:
                if getattr(arguments, "output_dir", None) is not None:
                    check_writable(arguments.output_dir)
            return parsed
        except json.JSONDecodeError as error:
            self.error(f"{error.doc!r} should be JSON, but isn't ({error.msg}).")
        # TrainingArguments also raise what the libraries raise that its flags ask for.
        except (ValueError, TypeError, OSError, ImportError) as error:
            self.error(str(error))

    def _read_config(self, path: Path, given: set[str]):
        try:
            values = yaml.load(path.read_text(), _FlagsLoader)
        # YAML also raises what Python does on values that can't be, such as a date of a thirteenth month.
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            self.error(f"--config {path} can't be read ({str(error).splitlines()[0]}): give a YAML file.")
        if not isinstance(values, dict):
            self.error(f"--config {path} must hold `flag: value` lines.")
        # Of a switch and its `--no_` form, the switch.
        actions = {action.dest: action for action in reversed(self._actions)}
        for key, value in values.items():
            if key not in actions or key in ("help", "config"):
                self._refuse_unknown(f"key {key} in {path}", str(key), "")
            actions[key].required = False
            choices = actions[key].choices
            if choices and value not in choices:
                self.error(f"{key} in {path} must be one of {', '.join(map(str, choices))}, got {value!r}.")
            values[key] = self._typed(actions[key], value, f"{key} in {path}")
        # A flag overrides the whole of what the file says in the flag's group.
        overridden = {name for group in self.exclusive if given & set(group) for name in group}
        self.set_defaults(**{key: value for key, value in values.items() if key not in overridden})

    def _typed(self, action: argparse.Action, value, name: str):
        """A value of a file as the flag would have given it. A single value's string argparse converts itself."""
        if (value is None and action.default is None) or (isinstance(value, dict) and action.dest in self._mappings):
            return value
        many = action.nargs == "+"
        if value is None or isinstance(value, dict) or (isinstance(value, list) and not (many and value)):
            given = "" if action.dest.endswith("token") else f", got {value!r}"
            self.error(f"{name} must be {'one or more values' if many else 'a single value'}{given}.")
        if (isinstance(value, str) and not many) or not callable(action.type):
            return [value] if many and isinstance(value, str) else value
        try:
            typed = [action.type(str(item)) for item in (value if isinstance(value, list) else [value])]
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            self.error(f"{name} must be of type {action.type.__name__.split('_')[-1]}, got {value!r}.")
        return typed if many else typed[0]

    def _refuse_unknown(self, what: str, name: str, prefix: str):
        names = [action.dest for action in self._actions]
        near = difflib.get_close_matches(name, names, n=1)
        self.error(f"unknown {what}: " + (f"did you mean {prefix}{near[0]}?" if near else "see --help for all flags."))

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")
