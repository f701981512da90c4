"""The output folder of a run: what lies there already, and whether this run may go on with it."""

import logging
from pathlib import Path

from filelock import FileLock, Timeout
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME, SAFE_WEIGHTS_NAME

from ..files import check_holds_no_model, file_sha256, read_json, remove_path, weights_sha256, write_json
from .checkpoints import checkpoints
from .faults import RunStopped

logger = logging.getLogger(__name__)
ARGUMENTS_NAME, PHASES_NAME, RESULTS_NAME = "arguments.json", "phases.json", "results.json"
FIDELITY_NAME = "fidelity.json"
LOCK_NAME = ".raptor_hf-lock"
# A Raptor's own files, of those that a run leaves.
SAVED_NAMES = (CONFIG_NAME, IMAGE_PROCESSOR_NAME, SAFE_WEIGHTS_NAME)
WRITTEN_NAMES = (
    *SAVED_NAMES,
    *(ARGUMENTS_NAME, PHASES_NAME, RESULTS_NAME, FIDELITY_NAME, LOCK_NAME, "README.md", "phases.png", "phases.svg"),
    *("fidelity.png", "fidelity.svg", "configuration_raptor.py", "modeling_raptor.py"),
)
# In a run's arguments.json, beside the arguments.
WEIGHTS_KEY = "weights_sha256"


def lock(output_dir: Path) -> FileLock:
    """The folder's lock, taken; it ends with its process. Raises ValueError if another run is at work there."""
    lock = FileLock(output_dir / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"output_dir {output_dir} is where another run is at work: wait for its end, or give another --output_dir."
        ) from error
    return lock


def earlier_results(output_dir: Path, settings: dict) -> dict | None:
    """
    The results of a finished run with the same settings.

    Raises:
        ValueError: if the folder holds a run with other settings.
    """
    path = output_dir / ARGUMENTS_NAME
    if not path.is_file():
        if checkpoints(output_dir):
            raise ValueError(
                f"output_dir {output_dir} holds checkpoints, but no {ARGUMENTS_NAME} to say of which run: give "
                "another --output_dir, or --overwrite_output_dir true."
            )
        check_holds_no_model(output_dir)
        return None
    # Without it nothing says what the checkpoints are of.
    earlier = read_json(path, instead="give another --output_dir, or --overwrite_output_dir true")
    changed = [name for name in settings if earlier.get(name) != settings[name]]
    if changed:
        name = changed[0]
        raise ValueError(
            f"output_dir {output_dir} holds a run with another {name} ({earlier.get(name)}, not {settings[name]}): "
            "give another --output_dir, or --overwrite_output_dir true."
        )
    if not all((output_dir / name).is_file() for name in (RESULTS_NAME, *SAVED_NAMES)):
        return None
    try:
        for name in (CONFIG_NAME, IMAGE_PROCESSOR_NAME):
            read_json(output_dir / name)
    except ValueError:
        logger.warning("%s is damaged: the Raptor is saved again.", name)
        return None
    finished = read_json(output_dir / RESULTS_NAME)
    missing = sorted({"fidelity", "phase_sizes", "weights_sha256"} - set(finished))
    if missing:
        raise ValueError(
            f"{output_dir / RESULTS_NAME} is damaged (it lacks {missing[0]}): delete it, then start the same command "
            "again."
        )
    if file_sha256(output_dir / SAFE_WEIGHTS_NAME) != finished["weights_sha256"]:
        logger.warning("%s are not the weights that were saved: they are made again.", SAFE_WEIGHTS_NAME)
        return None
    logger.warning("%s holds this run, finished: nothing to do.", output_dir)
    return finished


def remove_earlier_run(output_dir: Path):
    for stale in (RESULTS_NAME, FIDELITY_NAME, PHASES_NAME, ARGUMENTS_NAME):
        (output_dir / stale).unlink(missing_ok=True)
    for folder in checkpoints(output_dir):
        remove_path(folder)


def leave_nothing_of_a_refused_run(output_dir: Path, kind, error, traceback):
    """At the end of a context: what failed before anything was saved doesn't stand in the corrected command's way."""
    failed = kind is not None and issubclass(kind, Exception) and not issubclass(kind, RunStopped)
    if failed and not checkpoints(output_dir) and not (output_dir / SAFE_WEIGHTS_NAME).exists():
        remove_earlier_run(output_dir)


def check_same_weights(output_dir: Path, settings: dict, models: dict[str, PreTrainedModel]):
    """Notes the checksums of the weights that a run starts from; ValueError if they are others than at its start."""
    path, found = output_dir / ARGUMENTS_NAME, {name: weights_sha256(model) for name, model in models.items()}
    noted = read_json(path).get(WEIGHTS_KEY) or {}
    if not isinstance(noted, dict):
        raise ValueError(f"{path} is damaged (its {WEIGHTS_KEY} are no names and checksums): give another folder.")
    for name in noted:
        if found.get(name) != noted[name]:
            raise ValueError(
                f"{name} {settings.get(name)} has other weights than when the run in output_dir {output_dir} began: "
                "give another --output_dir, or --overwrite_output_dir true."
            )
    if not noted:
        write_json(path, settings | {WEIGHTS_KEY: found})
