"""Files that appear whole or not at all."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

CHECKSUM = "sha256"
# No name that a user's own folder would have: what is left of it is deleted.
ASIDE = ".raptor_hf-partial"


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


def read_json(path: str | Path, kind: type = dict, instead: str = "delete it, or give another folder") -> dict | list:
    """
    The object, or whatever `kind` says, that a JSON file holds. An error says what to do `instead`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds anything else.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): {instead}.") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} is damaged (it holds no {kind.__name__}): {instead}.")
    return content


def check_writable(folder: str | Path, files: Iterable[str] = ()):
    """
    Raises ValueError if a folder, or the nearest one above it that is there, can't be written to, or if a folder lies
    there under the name of one of the files to be written.
    """
    if not str(folder):
        raise ValueError("output_dir is empty: name a folder.")
    folder = Path(folder).absolute()
    try:
        # A link that leads nowhere is there, too: no folder can be made in its place.
        nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(f"output_dir {folder} is no folder that can be written to: give another --output_dir.")
    for name in files:
        if (folder / name).is_dir():
            raise ValueError(f"{folder / name} is a folder, where a file is to be written: give another --output_dir.")


def check_apart(output_dir: str | Path, sources: dict[str, str | None]):
    """Raises ValueError if an output folder lies in the folder of one of the named sources, where that is a folder."""
    for name, source in sources.items():
        if source and Path(source).is_dir() and Path(output_dir).resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(f"output_dir {output_dir} is in the {name}'s own folder: give another --output_dir.")


def check_holds_no_model(folder: str | Path):
    """Raises ValueError if a folder holds the weights of a model, whole or in shards, of safetensors or pickled."""
    patterns = ("*.safetensors", "*.safetensors.index*.json", "pytorch_model*.bin*")
    if any(path for pattern in patterns for path in Path(folder).glob(pattern)):
        raise ValueError(
            f"output_dir {folder} holds another model: give another --output_dir, or --overwrite_output_dir true."
        )


def remove_path(path: Path):
    """Removes a folder or file, if it is there; of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def written_aside(folder: str | Path) -> Iterator[Path]:
    """
    A folder to write into. At the end what it holds is moved to `folder`, by a rename each, in order of names; after
    an error nothing is. Whatever was left there by a run that was killed is deleted.
    """
    folder = Path(folder)
    aside = folder / ASIDE
    remove_path(aside)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in sorted(aside.iterdir()):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_whole_safetensors(path: Path) -> bool:
    """
    Whether a safetensors file is there and not cut short (its header tells its length, so a torn one is refused) and,
    if [`write_safetensors`] wrote it, no bit of it has changed since.
    """
    try:
        with safe_open(path, framework="pt") as file:
            noted = (file.metadata() or {}).get(CHECKSUM)
            return noted is None or noted == _checksum({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def write_safetensors(path: str | Path, tensors: dict[str, torch.Tensor]):
    """
    Writes tensors with their SHA-256 to one side, then renames them. Processes that write the same file don't disturb
    each other.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, aside, metadata={"format": "pt", CHECKSUM: _checksum(tensors)})
    aside.replace(path)


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 of a model's weights and their names, in hexadecimal."""
    return _checksum(model.state_dict())


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
