#!/bin/bash
# Every line of a JSONL file answered by two replicas of 4 GPUs, over as many time limits as it takes:
#
#     sbatch slurm/batch-4gpu.sh in.jsonl out.jsonl --model /path/to/Llama-3.1-70B-Instruct --max-tokens 512
#
# Before its time limit the job stops between two steps and puts itself back into the queue; the next run skips what out.jsonl
# holds. The same happens by itself after a preemption or a broken node. Format of the files: docs/batch.md.
# What to change is marked CHANGE; generate-4gpu.sh says more about each.

#SBATCH --job-name=yalis-batch
##SBATCH --account=my_project    CHANGE
##SBATCH --partition=gpu         CHANGE
# CHANGE: nodes, and GPUs of a node (on both lines).
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGTERM to the ranks this many seconds before the time limit (Slurm may send it a minute earlier).
#SBATCH --signal=TERM@120

# CHANGE: how yalis gets onto the PATH.
export PATH="$PWD/.venv/bin:$PATH"
# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0    CHANGE where nodes have several networks
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

srun yalis batch --tp 4 --dp 2 "$@"
status=$?
if [ $status = 143 ]; then # stopped by SIGTERM, with everything finished so far in the file
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
