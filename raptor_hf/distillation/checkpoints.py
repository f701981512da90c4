"""Checkpoints: which of them are whole, and which of them stay."""

import json
import logging
import shutil
import zipfile
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import is_whole_safetensors, written_aside

logger = logging.getLogger(__name__)
NEEDED = (TRAINER_STATE_NAME, "*model*", "optimizer*", "scheduler.pt", "rng_state*")


def checkpoints(output_dir: Path) -> list[Path]:
    """A run's checkpoints, whole or not, the newest first."""
    folders = [f for f in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if f.name.split("-")[-1].isdigit()]
    return sorted(folders, key=lambda f: int(f.name.split("-")[-1]), reverse=True)


def is_whole(folder: Path) -> bool:
    """Whether nothing of a checkpoint is missing and no file of it is cut short, as far as their formats tell."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text())
        if not all(any(folder.glob(pattern)) for pattern in NEEDED):
            return False
        for path in folder.rglob("*"):
            if path.suffix == ".safetensors" and not is_whole_safetensors(path):
                return False
            if path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
                return False
    except (OSError, ValueError):
        return False
    return True


def last_whole_checkpoint(output_dir: Path) -> str | None:
    """The newest checkpoint of a run that is whole."""
    for folder in checkpoints(output_dir):
        if is_whole(folder):
            return str(folder)
        logger.warning("%s is not whole: passed over.", folder.name)
    return None


def remove_old_checkpoints(output_dir: Path, keep: int | None, best: str | None = None):
    """Leaves the `keep` newest whole checkpoints (all, if `None`) and the best. None is ever there in part."""
    whole = [folder for folder in checkpoints(output_dir) if is_whole(folder)]
    with written_aside(output_dir) as aside:
        for folder in whole[keep:] if keep else []:
            if best is None or folder.name != Path(best).name:
                shutil.rmtree(folder.rename(aside / folder.name))
