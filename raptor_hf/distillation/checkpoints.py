"""Checkpoints: which of them are whole, and which of them stay."""

import logging
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import file_sha256, read_json, remove_path, write_json, written_aside

logger = logging.getLogger(__name__)
CHECKSUMS_NAME = "checksums.json"


def checkpoints(output_dir: Path) -> list[Path]:
    """A run's checkpoints, whole or not, the newest first."""
    folders = [
        f for f in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if f.is_dir() and f.name.split("-")[-1].isdecimal()
    ]
    return sorted(folders, key=lambda f: int(f.name.split("-")[-1]), reverse=True)


def write_checksums(folder: Path):
    """Notes the SHA-256 of every file of a checkpoint in the checkpoint, for [`is_whole`]."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    write_json(folder / CHECKSUMS_NAME, {path.relative_to(folder).as_posix(): file_sha256(path) for path in files})


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint has all files that were saved, unchanged to the bit; others may lie beside them."""
    try:
        noted = read_json(folder / CHECKSUMS_NAME)
        saved = len(noted) > 1 and TRAINER_STATE_NAME in noted
        return saved and all(file_sha256(folder / name) == checksum for name, checksum in noted.items())
    except (OSError, ValueError):
        return False


def last_whole_checkpoint(output_dir: Path) -> str | None:
    """The newest checkpoint of a run that is whole."""
    for folder in checkpoints(output_dir):
        if is_whole(folder):
            return str(folder)
        logger.warning("%s is not whole: passed over.", folder.name)
    return None


def remove_old_checkpoints(output_dir: Path, keep: int | None, best: str | None = None):
    """Leaves the `keep` newest whole checkpoints (all, if `None`) and the best. None is ever there in part."""
    if keep is None:
        return
    whole = [folder for folder in checkpoints(output_dir) if is_whole(folder)]
    with written_aside(output_dir) as aside:
        for folder in whole[keep:]:
            if best is None or folder.name != Path(best).name:
                remove_path(folder.rename(aside / folder.name))
