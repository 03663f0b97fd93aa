"""The Slurm script, with a Slurm that only says what it was asked to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def submit(tmp_path):
    if shutil.which("bash") is None or not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("needs bash and the project's .venv (make setup)")
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS: $*"\nexit ${SRUN_EXIT:-0}\n')
    srun.chmod(0o755)

    def run(task, **environment):
        environment = {
            **{name: value for name, value in os.environ.items() if name != "SUITE"},  # from `make test`
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_PER_TASK": "32",
            **environment,
        }
        script = ["bash", str(ROOT / "scripts" / "paper.slurm")]
        return subprocess.run(script, env=environment, capture_output=True, text=True)

    return run


def test_each_task_of_the_array_is_a_run_of_the_suite(submit):
    done = submit(35, SRUN_EXIT="3")
    assert done.returncode == 3  # as the run's
    assert done.stdout.startswith("8: --cpus-per-task=32 .venv/bin/python -m torch.dist")
    assert "--nproc-per-node 4 -m -- acp_repro.train --suite paper --run " in done.stdout
    done = submit(36)
    assert done.returncode == 2 and "36 runs, so --array goes from 0 to 35" in done.stderr
    assert "#SBATCH --array=0-35\n" in (ROOT / "scripts" / "paper.slurm").read_text()
