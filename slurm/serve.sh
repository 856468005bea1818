#!/bin/bash
# Serve a model with the API of OpenAI from 2 nodes of 4 GPUs, and write its URL to a file:
#
#     sbatch slurm/serve.sh ~/yalis-url --model /path/to/Llama-3.1-70B --api-key-file ~/yalis-key
#     curl "$(cat ~/yalis-url)/v1/models" -H "Authorization: Bearer $(head -n 1 ~/yalis-key)"
#
# The file exists while the server accepts requests. Before the time limit the server finishes its requests, refuses new
# ones, and the job requeues itself; then the same file has the new URL. Without a key anybody on the cluster's network
# can use the server (docs/serving.md). Lines to adapt are marked CHANGE; generate-4gpu.sh explains each of them.

#SBATCH --job-name=yalis-serve
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
# Send SIGUSR1 to the ranks this many seconds before the time limit (Slurm may send it up to a minute earlier). It should
# be longer than an answer takes.
#SBATCH --signal=USR1@180

# CHANGE: put yalis on the PATH.
export PATH="$PWD/.venv/bin:$PATH"
# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0    CHANGE if nodes have several networks
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# Port 0 is a free one. CHANGE the address if nodes have networks that the server must not listen on.
srun yalis serve --tp 8 --host 0.0.0.0 --port 0 --announce "$@"
status=$?
if [ $status = 138 ]; then # drained after SIGUSR1
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
