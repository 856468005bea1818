#!/bin/bash
# Process a JSONL file of requests with two replicas of 4 GPUs, in as many runs as the time limit requires:
#
#     sbatch slurm/batch-4gpu.sh in.jsonl out.jsonl --model /path/to/Llama-3.1-70B-Instruct --max-tokens 512
#
# Before the time limit the job stops between two steps and requeues itself; the next run skips the requests whose results
# are in out.jsonl. Slurm requeues it after a preemption or a node failure too. File formats: docs/batch.md.
# Lines to adapt are marked CHANGE; generate-4gpu.sh explains each of them.

#SBATCH --job-name=yalis-batch
##SBATCH --account=my_project    CHANGE
##SBATCH --partition=gpu         CHANGE
# CHANGE: nodes, and GPUs per node (on both lines).
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# Send SIGTERM to the ranks this many seconds before the time limit (Slurm may send it up to a minute earlier).
#SBATCH --signal=TERM@120

# CHANGE: put yalis on the PATH.
export PATH="$PWD/.venv/bin:$PATH"
# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0    CHANGE if nodes have several networks
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

srun yalis batch --tp 4 --dp 2 "$@"
status=$?
if [ $status = 143 ]; then # stopped by SIGTERM; all finished results are in the file
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
