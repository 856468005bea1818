#!/bin/bash
# A model spread over 2 nodes of 4 GPUs answers a prompt:
#
#     sbatch slurm/generate-4gpu.sh "The capital of France is" --model /path/to/Llama-3.1-405B --max-tokens 256
#
# What to change is marked CHANGE; any #SBATCH line can also be overridden on sbatch's command line.

#SBATCH --job-name=yalis
# CHANGE: what your site asks for; take one # away.
##SBATCH --account=my_project
##SBATCH --partition=gpu
##SBATCH --constraint=a100
# CHANGE: nodes, and GPUs of a node (on both lines). nodes x GPUs must be what --tp, --pp and --dp multiply to.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
# Not --gpus-per-task: the ranks of a node have to see each other's GPUs to use the links between them.
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

# CHANGE: how yalis gets onto the PATH. This is what `make demo` made, in the folder sbatch was called in.
# module load python cuda
export PATH="$PWD/.venv/bin:$PATH"

# CHANGE where nodes have several networks: the interfaces of the fast one (`ip -br addr` on a compute node lists them).
# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0
# On Slingshot or EFA, NCCL needs the plugin your site offers, or it falls back to TCP. NCCL_DEBUG=INFO says what it uses.
# module load aws-ofi-nccl

# Since Slurm 22.05 srun no longer takes this from the job.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# --tp 8 cuts every layer over all GPUs. --tp 4 --pp 2 keeps that inside a node and hands layers from node to node, which a
# slow network prefers; --tp 4x2 is a grid of 4 rows and 2 columns.
srun yalis generate --tp 8 "$@"
