#!/bin/bash
# One training, three runs: BF16 on one process, FP8 over two (tensor and sequence parallel), BF16 again over two pipeline
# stages. Each starts from the checkpoint of the one before. A few minutes on two cores; arguments go to all three runs:
#
#   bash examples/reshard.sh
#   ITERATIONS=20 FP8=mxfp8 bash examples/reshard.sh --train.seq_length=128

: "${CONFIG:=examples/configs/tiny_gpt_cpu.yaml}"
: "${RUNS:=runs/reshard}"  # each run's folder is in it
: "${ITERATIONS:=100}"     # of each run
: "${FP8:=delayed}"        # the recipe of the second run
: "${PYTHON:=python}"

set -euo pipefail
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

train() { # processes, run, its last iteration, options
    local processes=$1 run=$2 last=$3
    shift 3
    echo "---- $run, to iteration $last"
    "$PYTHON" -m megatron_fp8 launch --ranks "$processes" train \
        --config="$CONFIG" --run_dir="$RUNS/$run" --train.train_iters="$last" --checkpoint.save_interval=50 \
        --optimizer.lr_decay_iters=$((3 * ITERATIONS)) "$@"
}

one=(--model.tensor_model_parallel_size=1 --model.sequence_parallel=false)
tensor=(--model.tensor_model_parallel_size=2 --model.sequence_parallel=true)
pipeline=("${one[@]}" --model.pipeline_model_parallel_size=2)

train 1 bf16 "$ITERATIONS" "${one[@]}" --model.fp8=null "$@"
train 2 fp8 $((2 * ITERATIONS)) "${tensor[@]}" --model.fp8=hybrid --model.fp8_recipe="$FP8" --resume="$RUNS/bf16" "$@"
train 2 back $((3 * ITERATIONS)) "${pipeline[@]}" --model.fp8=null --resume="$RUNS/fp8" "$@"

for run in bf16 fp8 back; do
    "$PYTHON" -m megatron_fp8 inspect "$RUNS/$run" | sed -n 1,4p
done
