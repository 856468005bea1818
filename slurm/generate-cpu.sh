#!/bin/bash
# Generate text with a model on 4 ranks of one node without GPUs:
#
#     sbatch slurm/generate-cpu.sh "The capital of France is" --max-tokens 64

#SBATCH --job-name=yalis-cpu
##SBATCH --account=my_project    CHANGE
##SBATCH --partition=cpu         CHANGE
#SBATCH --nodes=1
# CHANGE: one rank per socket or NUMA domain (`lscpu` on a compute node shows them), and its number of cores.
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

# CHANGE: put yalis on the PATH.
export PATH="$PWD/.venv/bin:$PATH"
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

srun --cpu-bind=cores yalis generate --device cpu --threads "$SLURM_CPUS_PER_TASK" --tp 4 "$@"
