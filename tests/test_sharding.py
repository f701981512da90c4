"""Weights divided among processes (FSDP2), and the launch files for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).parents[1]


def test_a_divided_raptor_steps_as_a_whole_one():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "sharded_step.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # Both write to the same stream, so that their lines can run into one.
    assert all(f"process {rank} of 2: equal" in done.stdout for rank in range(2))


@pytest.mark.parametrize("path", sorted((ROOT / "training" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_are_accelerates(path):
    config = load_config_from_file(str(path))
    assert config.distributed_type.value == ("FSDP" if path.stem == "fsdp2" else "MULTI_GPU")
    assert config.num_processes > 1 and not config.use_cpu
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "RaptorBlock"
