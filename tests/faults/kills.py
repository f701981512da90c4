"""Kills a small run at random moments, goes on with the same command each time, and compares the ends bit for bit."""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from material import arguments, finished, main, make_material, start, wait
from safetensors.torch import load_file

from raptor_hf.distillation.checkpoints import checkpoints, is_whole
from raptor_hf.files import ASIDE


def last_step(output_dir: Path) -> int:
    return max((int(folder.name.split("-")[1]) for folder in checkpoints(output_dir)), default=0)


def writing(output_dir: Path) -> int | None:
    """Tells apart the folders in which a checkpoint, or the result, is being written."""
    aside = output_dir / ASIDE
    return aside.stat().st_ctime_ns if aside.is_dir() else None


def moment(output_dir: Path, left_over: int | None) -> str:
    """What a run was at when it was killed, as far as its folder tells."""
    if (output_dir / "results.json").is_file():
        return "after the end"
    if writing(output_dir) not in (None, left_over):
        return "while a checkpoint or the result was written"
    return "in or between steps" if checkpoints(output_dir) else "before the first checkpoint"


class Run:
    """A run of the command in a process of its own."""

    def __init__(self, command: list[str], log: Path):
        self.pid, self.code = start(main, command, log=log), None

    def going(self) -> bool:
        if self.code is None:
            self.code = finished(self.pid)
        return self.code is None

    def kill(self):
        if self.going():
            os.kill(self.pid, signal.SIGKILL)
            self.code = wait(self.pid)


def run_and_kill(command: list[str], output_dir: Path, log: Path, rng: random.Random) -> bool:
    """Starts the command and kills it at a random moment. False if it had finished by then."""
    run, before = Run(command, log), last_step(output_dir)
    target, begun = before + rng.randint(0, 8), time.perf_counter()
    while last_step(output_dir) < target and run.going():
        time.sleep(0.001)
    # Within a few steps' time of then, or, without a step to wait for, within the time that starting takes.
    took = (time.perf_counter() - begun) / max(1, target - before)
    end = time.perf_counter() + rng.uniform(0, took if target > before else 2.0)
    while time.perf_counter() < end and run.going():
        time.sleep(0.001)
    run.kill()
    if run.code not in (0, -signal.SIGKILL):
        sys.exit(f"The run ended with exit code {run.code}:\n{log.read_text()[-2000:]}")
    return run.code != 0


def check(folder: Path, kills: int, seed: int):
    material, whole, log = folder / "material", folder / "whole", folder / "log"
    if wait(start(make_material, material, log=log)) or wait(start(main, arguments(material, whole), log=log)):
        sys.exit(f"The uninterrupted run failed:\n{log.read_text()[-2000:]}")
    expected = load_file(whole / "model.safetensors")
    rng, moments, lost, runs, different = random.Random(seed), Counter(), 0, 0, 0
    output_dir = folder / "killed"
    command = arguments(material, output_dir)
    done, killed = 0, True
    # Also the run that the last kill ended goes on to its end.
    while done < kills or killed:
        before, left_over = last_step(output_dir), writing(output_dir)
        if done < kills:
            killed = run_and_kill(command, output_dir, log, rng)
        else:
            killed = False
            if wait(start(main, command, log=log)):
                sys.exit(f"The resumed run failed:\n{log.read_text()[-2000:]}")
        if killed:
            done += 1
            where = moment(output_dir, left_over)
            moments[where] += 1
            torn = [f.name for f in checkpoints(output_dir) if not is_whole(f)]
            lost += len(torn) + (last_step(output_dir) < before)
            print(f"kill {done:2}: {where}, last checkpoint {last_step(output_dir)}", flush=True)
            continue
        runs += 1
        weights = load_file(output_dir / "model.safetensors")
        same = weights.keys() == expected.keys() and all(torch.equal(weights[k], expected[k]) for k in expected)
        different += not same
        print(f"run {runs} finished: weights {'equal' if same else 'DIFFER FROM'} the uninterrupted run's", flush=True)
        if done < kills:
            shutil.rmtree(output_dir)
    for where, count in moments.items():
        print(f"{count} killed {where}")
    print(f"{done} kills, {lost} checkpoints lost or torn, {runs} runs finished, {different} ended otherwise.")
    sys.exit(1 if lost or different else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        check(Path(name), args.kills, args.seed)
