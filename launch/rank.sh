#!/usr/bin/env bash
# One task of an srun step becomes one rank of an island: says in torch's words what Slurm knows, then runs its arguments.
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
export RANK="$SLURM_PROCID"
export LOCAL_RANK="$SLURM_LOCALID"
export WORLD_SIZE="$SLURM_STEP_NUM_TASKS"
export MASTER_ADDR="${nodes[0]}"
# Differs between steps and jobs, and lies below the ports that Linux hands out by itself.
export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + SLURM_STEP_ID) % 12000))
exec "$@"
