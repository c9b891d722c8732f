#!/bin/bash
# A run that goes on after its time limit, a preemption or the loss of a node:
#
#     sbatch slurm.sh fsdp2.py 100000
#
# ckpt lies in the directory of sbatch, which all nodes must share.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# The ranks get SIGTERM three minutes before the time limit. They save the next step, and stop.
#SBATCH --signal=TERM@180

# torchrun passes SIGTERM on, and kills the ranks after so many seconds: less than the three minutes.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150

newest_before=$(dcp-datastates latest ckpt 2>/dev/null)
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node differ

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first_node:$port" "$@"
status=$?
[ $status -eq 0 ] && exit 0

# Stopped, or failed. Without a newer checkpoint it would only fail again.
if [ "$(dcp-datastates latest ckpt)" = "$newest_before" ]; then
    echo "no new checkpoint: not queued again" >&2
    exit $status
fi
scontrol requeue "$SLURM_JOB_ID"
