#!/bin/bash
# Two nodes of eight GPUs under Slurm: sbatch examples/configs/slurm.sh --model Qwen/Qwen3-8B --dataset chats.jsonl
# The output folder must be on a disk that both nodes see. Slurm sends SIGTERM 120 s before the time
# is up: the step in progress is saved, and the job, started again, goes on from there.
#SBATCH --job-name=sft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # seconds from SIGTERM to SIGKILL
srun --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file examples/configs/two_nodes_fsdp2.yaml \
        --machine_rank "$SLURM_NODEID" --main_process_ip '"$first"' \
        examples/sft.py --checkpoint-every 500 --resume auto "$@"' sft "$@"
