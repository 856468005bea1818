#!/bin/bash
# A model cut over 4 ranks of one node without GPUs:
#
#     sbatch slurm/generate-cpu.sh "The capital of France is" --max-tokens 64

#SBATCH --job-name=yalis-cpu
##SBATCH --account=my_project    CHANGE
##SBATCH --partition=cpu         CHANGE
#SBATCH --nodes=1
# CHANGE: one rank for each socket or NUMA domain (`lscpu` on a compute node shows them), and its cores.
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

# CHANGE: how yalis gets onto the PATH.
export PATH="$PWD/.venv/bin:$PATH"
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

srun --cpu-bind=cores yalis generate --device cpu --threads "$SLURM_CPUS_PER_TASK" --tp 4 "$@"
