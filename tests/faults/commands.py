"""The command as a scheduler meets it: SIGTERM, two processes, a full disk; it goes on, and ends as it would have."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from material import SCRIPT, arguments, main, make_material, start, wait
from safetensors.torch import load_file

from raptor_hf.distillation.checkpoints import checkpoints, is_whole
from raptor_hf.files import ASIDE

ALONE = [sys.executable, str(SCRIPT)]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
BAD = {"max_bad_image_share": 0.1}


def equal(one: Path, other: Path) -> bool:
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    return all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0] | weights[1])


def run(command: list[str], expected: int = 0) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode != expected:
        sys.exit(f"{command} ended with {done.returncode}, not {expected}:\n{done.stderr[-3000:]}")
    return done.stderr


def terminated(launch: list[str], words: list[str], output_dir: Path) -> int:
    """The exit code of a run that gets SIGTERM when it has trained for a few steps."""
    with (output_dir.parent / f"{output_dir.name}.log").open("w+") as log:
        process = subprocess.Popen([*launch, *words], env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None and Path(log.name).read_text().count("'loss'") < 5:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.wait()
        print(
            next((line for line in Path(log.name).read_text().splitlines() if "Stopped by SIGTERM" in line), "nothing")
        )
    return process.returncode


def check_sigterm(material: Path, folder: Path):
    for name, launch, code, share in (("one process", ALONE, 75, 8), ("two processes", TWO, None, 4)):
        settings = BAD | {"save_steps": 1000, "max_steps": 200, "per_device_train_batch_size": share}
        whole, stopped = folder / f"whole_{share}", folder / f"stopped_{share}"
        run([*launch, *arguments(material, whole, **settings)])
        words = arguments(material, stopped, **settings)
        got = terminated(launch, words, stopped)
        saved = [checkpoint.name for checkpoint in checkpoints(stopped) if is_whole(checkpoint)]
        if not saved or (code is not None and got != code):
            sys.exit(f"SIGTERM, {name}: exit code {got}, checkpoints {saved}")
        run([*launch, *words])
        counts = [json.loads((f / "results.json").read_text())["bad_images"]["train"] for f in (whole, stopped)]
        print(f"SIGTERM, {name}: exit code {got}, {saved[0]}; resumed, weights equal: {equal(whole, stopped)}; "
              f"bad images passed over: {counts[0]} and {counts[1]}")  # fmt: skip
        if not equal(whole, stopped) or counts[0] != counts[1]:
            sys.exit("The resumed run ended otherwise.")


def check_full_disk(material: Path, folder: Path):
    """Inside a mount namespace of its own: a disk of some 100 KiB that is full after a few checkpoints."""
    disk, whole, log = folder / "disk", folder / "whole", folder / "log"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(disk)], check=True)
    settings = BAD | {"max_steps": 40, "save_total_limit": 100}
    if wait(start(main, arguments(material, whole, **settings), log=log)):
        sys.exit(log.read_text()[-2000:])
    log.unlink()
    code = wait(start(main, arguments(material, disk / "run", **settings), log=log))
    said = log.read_text().splitlines()[-1]
    kept = checkpoints(disk / "run")
    print(f"Full disk: exit code {code}, {len(kept)} checkpoints kept, all whole: {all(map(is_whole, kept))}")
    print(f"    {said}")
    if code != 3 or not kept or not all(map(is_whole, kept)) or (disk / "run" / ASIDE).exists():
        sys.exit("The full disk wasn't met as it should be.")
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    if wait(start(main, arguments(material, disk / "run", **settings), log=log)):
        sys.exit(log.read_text()[-2000:])
    print(f"Full disk: with room again it went on, weights equal: {equal(whole, disk / 'run')}")
    sys.exit(0 if equal(whole, disk / "run") else 1)


if __name__ == "__main__":
    if sys.argv[1:]:
        check_full_disk(*map(Path, sys.argv[1:]))
    with tempfile.TemporaryDirectory() as name:
        material, folder = Path(name) / "material", Path(name)
        if wait(start(make_material, material, 40, 2, log=folder / "log")):
            sys.exit((folder / "log").read_text())
        (folder / "full").mkdir()
        own = ["unshare", "-Ur", "-m"]
        if shutil.which("unshare") and subprocess.run([*own, "true"]).returncode == 0:
            subprocess.run([*own, sys.executable, __file__, str(material), str(folder / "full")], check=True)
        else:
            print("Full disk: not tried, since mounting needs rights that are missing here.")
        check_sigterm(material, folder)
