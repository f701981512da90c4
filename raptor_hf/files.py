"""Files that appear whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

ASIDE = "partial"


def write_json(path: str | Path, content):
    """Writes JSON to one side, then renames it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.write_text(json.dumps(content, indent=2) + "\n")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def written_aside(folder: str | Path) -> Iterator[Path]:
    """
    A folder to write into. At the end what it holds is moved to `folder`, by a rename each, in order of names; after
    an error nothing is. Whatever was left there by a run that was killed is deleted.
    """
    folder = Path(folder)
    aside = folder / ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in sorted(aside.iterdir()):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_whole_safetensors(path: Path) -> bool:
    """Whether a safetensors file is there and not cut short: its header tells its length, so a torn one is refused."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def write_safetensors(path: str | Path, tensors: dict[str, torch.Tensor]):
    """Writes tensors to one side, then renames them. Processes that write the same file don't disturb each other."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside)
    aside.replace(path)
