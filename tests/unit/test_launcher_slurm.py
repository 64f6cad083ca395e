"""The sbatch scripts, on a stand-in for Slurm that runs every task of a step on this machine.

What only a real cluster can show (allocation, signals of scancel) is not claimed here.
"""

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sbatch"), *LAUNCH.glob("*.sh")])

SCONTROL = """#!/usr/bin/env bash
# scontrol show hostnames a,b
tr , '\\n' <<< "$3"
"""
SRUN = """#!/usr/bin/env bash
nodes=$SLURM_JOB_NODELIST tasks=$SLURM_NTASKS per_node=$SLURM_NTASKS_PER_NODE
while [[ $1 == --* ]]; do
    case $1 in
        --nodelist=*) nodes=${1#*=} ;;
        --ntasks=*) tasks=${1#*=} ;;
        --ntasks-per-node=*) per_node=${1#*=} ;;
    esac
    shift
done
mkdir "$STEPS/lock-${nodes//,/-}"
export SLURM_STEP_NODELIST=$nodes SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_ID=$(($(ls -d "$STEPS"/lock-* | wc -l) - 1))
pids=()
trap 'kill "${pids[@]}"; exit 143' TERM # as the real one does
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % per_node)) "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
DILOCOX = """#!/usr/bin/env bash
if [[ $1 == coordinator ]]; then echo "coordinator $*" >> "$STEPS/seen"; exec sleep 600; fi
if [[ $3 == "$FAILING_ISLAND" ]]; then exit 5; fi
if [[ -n $FAILING_ISLAND ]]; then exec sleep 600; fi
echo "rank $RANK/$WORLD_SIZE local $LOCAL_RANK at $MASTER_ADDR: $*" >> "$STEPS/seen"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch job on a four-node allocation, with the stand-ins on its PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "dilocox": DILOCOX}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "launch").symlink_to(LAUNCH)
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "STEPS": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n0,n1,n2,n3",
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "FAILING_ISLAND": "",
    }


def submit(script: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert "set -euo pipefail" in script.read_text()


def test_two_islands_share_the_nodes_of_an_allocation(slurm: dict[str, str]) -> None:
    done = submit("two_islands.sbatch", slurm, "experiment=7b", "name=a b")
    assert done.returncode == 0, done.stderr
    coordinator, *ranks = sorted(Path(slurm["STEPS"], "seen").read_text().splitlines())
    port = coordinator.split()[-1]
    assert coordinator == f"coordinator coordinator --port {port}"
    assert sorted(ranks) == sorted(
        f"rank {rank}/4 local {rank % 2} at n{2 * island}: "
        f"island --island {island} --islands 2 --rendezvous n0:{port} experiment=7b name=a b"
        for island in range(2)
        for rank in range(4)
    )


def test_a_failing_island_ends_the_job(slurm: dict[str, str]) -> None:
    done = submit("two_islands.sbatch", slurm | {"FAILING_ISLAND": "1"})
    assert done.returncode != 0


def test_nodes_that_cannot_be_shared_out_are_refused(slurm: dict[str, str]) -> None:
    done = submit("two_islands.sbatch", slurm | {"ISLANDS": "3"})
    assert done.returncode == 2
    assert "4 nodes cannot be shared out to 3 islands" in done.stderr


def test_one_island_is_a_job_of_its_own(slurm: dict[str, str]) -> None:
    done = submit("island.sbatch", slurm | {"ISLAND": "1", "ISLANDS": "2", "RENDEZVOUS": "far:29400"}, "steps=7")
    assert done.returncode == 0, done.stderr
    assert sorted(Path(slurm["STEPS"], "seen").read_text().splitlines()) == [
        f"rank {rank}/8 local {rank % 2} at n0: island --island 1 --islands 2 --rendezvous far:29400 steps=7"
        for rank in range(8)
    ]


@pytest.mark.parametrize("missing", ["ISLAND", "ISLANDS", "RENDEZVOUS"])
def test_an_island_must_be_told_its_place(missing: str, slurm: dict[str, str]) -> None:
    place = {"ISLAND": "1", "ISLANDS": "2", "RENDEZVOUS": "far:29400"}
    del place[missing]
    done = submit("island.sbatch", slurm | place)
    assert done.returncode != 0
    assert missing in done.stderr
