#!/bin/bash
# Check a new installation on 2 nodes of 4 GPUs, and write a page and an archive about it (docs/cluster.md):
#
#     sbatch slurm/accept.sh                 # tunes too: plan half an hour
#     sbatch slurm/accept.sh --quick         # minutes, no tuning table
#
# Lines to adapt are marked CHANGE; generate-4gpu.sh explains each of them.

#SBATCH --job-name=yalis-accept
##SBATCH --account=my_project    CHANGE
##SBATCH --partition=gpu         CHANGE
# CHANGE: nodes, and GPUs per node (on both lines). Two nodes are enough; use as many GPUs of a node as jobs will.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:45:00
#SBATCH --output=%x-%j.out
# Send SIGTERM a minute before the time limit, so that the page has what was done.
#SBATCH --signal=TERM@60

# CHANGE: put yalis on the PATH, and nvcc, which builds nvrar on first use.
# module load python cuda
export PATH="$PWD/.venv/bin:$PATH"
# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0    CHANGE if nodes have several networks
# module load aws-ofi-nccl                                  CHANGE on Slingshot, for NCCL
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# Each rank is examined first: the table names the ranks that differ.
srun yalis doctor
srun yalis accept --out "acceptance-$SLURM_JOB_ID" "$@"
