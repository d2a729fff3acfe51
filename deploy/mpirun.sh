#!/usr/bin/env bash
# Fine-tunes on the machines of a hostfile with OpenMPI's mpirun: deploy/mpirun.sh hostfile
# The hostfile has a line per machine: gpu01 slots=4.
# Adapt the three paths. --output must be on a file system that all machines mount.
set -euo pipefail
hostfile=${1:?usage: deploy/mpirun.sh HOSTFILE}

# The token, which only the ranks of this job know. mpirun passes it in the environment, never on a command line.
TESSERA_JOB_TOKEN=$(head -c 24 /dev/urandom | base64)
# The ranks meet on the first machine.
MASTER_ADDR=$(sed 's/#.*//' "$hostfile" | awk 'NF { print $1; exit }')
MASTER_PORT=${MASTER_PORT:-29500}
export TESSERA_JOB_TOKEN MASTER_ADDR MASTER_PORT

exec mpirun --hostfile "$hostfile" --map-by slot --bind-to none \
  -x TESSERA_JOB_TOKEN -x MASTER_ADDR -x MASTER_PORT launcher \
  --model /shared/MiniCPM-V-2_6 \
  --data /shared/train.json \
  --output /shared/runs/tessera \
  --zero 3 \
  --offload cpu
