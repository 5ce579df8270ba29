#!/bin/bash
# A job of four nodes with eight GPUs each, under Slurm:
#
#     sbatch examples/slurm.sh train.py --its --options
#
# One torchrun starts on each node and eight ranks of it. They find each other at the first node of
# the job. A node that dies ends the job's step; with --requeue Slurm starts the job again, and a
# script that calls paradyse.load_checkpoint at its start goes on where the newest checkpoint ends.
#SBATCH --job-name=paradyse
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # one a line; a pipe into head could break
export PYTORCH_ALLOC_CONF=expandable_segments:True # lengths that vary fragment memory otherwise
export PARADYSE_COLLECTIVE_TIMEOUT_S=600           # ranks that compare calls wait so long, and fail by name

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${nodes%%$'\n'*}:${MASTER_PORT:-29500}" \
    "$@"
