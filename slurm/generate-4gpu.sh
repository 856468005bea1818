#!/bin/bash
# Generate text with a model on 2 nodes of 4 GPUs:
#
#     sbatch slurm/generate-4gpu.sh "The capital of France is" --model /path/to/Llama-3.1-70B --max-tokens 256
#
# `yalis plan --model M --tp 8 --gpu-memory 80` shows whether a model fits; a 405B in bfloat16 needs --tp 16 on 80 GB GPUs.
# Lines to adapt are marked CHANGE; any #SBATCH line can also be overridden on sbatch's command line.

#SBATCH --job-name=yalis
# CHANGE: what your site requires; remove one # to enable a line.
##SBATCH --account=my_project
##SBATCH --partition=gpu
##SBATCH --constraint=a100
# CHANGE: nodes, and GPUs per node (on both lines). nodes x GPUs must equal tp x pp x dp.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
# Not --gpus-per-task: the ranks of a node must see each other's GPUs to use NVLink between them.
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

# CHANGE: put yalis on the PATH. This is the environment of `make demo`, if sbatch runs in the repository.
# module load python cuda
export PATH="$PWD/.venv/bin:$PATH"

# CHANGE if nodes have several networks: the interfaces of the fast one (`ip -br addr` on a compute node lists them).
# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0
# On Slingshot or EFA, NCCL needs your site's plugin, or it falls back to TCP. NCCL_DEBUG=INFO logs what it uses.
# module load aws-ofi-nccl

# CHANGE if the nodes have neither MUNGE nor a shared home directory (docs/splitting.md): the ranks' common secret.
# export YALIS_SECRET=$(openssl rand -hex 16)

# Since Slurm 22.05 srun does not inherit --cpus-per-task from the job.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# --tp 8 splits every layer over all GPUs. --tp 4 --pp 2 keeps tensor parallelism inside a node and sends only activations
# between nodes, which suits a slow network. --tp 4x2 is a grid of 4 rows and 2 columns.
srun yalis generate --tp 8 "$@"
