"""What does compact optimizer state cost and save? `python -m benchmarks.adam_state [--write]`

Trains examples/configs/tiny_gpt_cpu.yaml on one rank with Adam's moments in float32 and compact (the first in E4M3, the
second in float16), in BF16 and in FP8 with FP8 parameters: bytes of masters and moments, counted in a small model, and
the validation losses. Runs that are complete in --runs are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import environment, table, write_results
from benchmarks.param_bytes import MODEL, STEP, adam_tensors, inner_optimizers, size
from tests.fp8_gpt import fp8_config
from tests.gpt import build_chunks, build_optimizer, train_step
from tests.ranks import Layout, RankPool, model_parallel

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = {
    "BF16": ["--model.fp8=null", "--model.first_last_layers_bf16=false"],
    "delayed, fp8_param": ["--model.fp8_format=delayed", "--model.fp8_param=true"],
}


def state_bytes(state: str) -> tuple[int, int]:
    """A rank case: (bytes of masters and moments after a step, how many parameters)."""
    from contextlib import nullcontext

    from megatron_fp8.mcore.adam_fp8 import Moment, compact_state
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    with model_parallel():
        config = fp8_config(Layout(), None, **MODEL)
        chunks = build_chunks(
            config, spec=get_gpt_layer_fp8_spec, sequence=STEP["sequence"], vocab=STEP["vocab"]
        )
        with compact_state() if state == "fp8" else nullcontext():
            optimizer = build_optimizer(config, chunks)
        train_step(config, chunks, optimizer, 0, **STEP)
        tensors = [t for inner in inner_optimizers(optimizer) for t in adam_tensors(inner)]
        kept = [part for t in tensors for part in (t.stored_tensors() if isinstance(t, Moment) else [t])]
        return size(kept), sum(p.numel() for p in chunks[0].parameters())


def trained(precision: str, state: str, wanted: argparse.Namespace) -> float:
    """The validation loss of one run, made unless it is there."""
    folder = wanted.runs / f"{precision.split(',')[0]}-{state}"
    if not (folder / "done").exists():
        print(f"training {precision}, state {state} ...", flush=True)
        command = [
            *(
                sys.executable,
                "-m",
                "megatron_fp8",
                "train",
                "--config",
                "examples/configs/tiny_gpt_cpu.yaml",
            ),
            *("--model.tensor_model_parallel_size=1", "--model.sequence_parallel=false", "--resume=never"),
            *(f"--optimizer.state_dtype={state}", f"--run_dir={folder}", *PRECISIONS[precision]),
            *(f"--train.train_iters={wanted.iterations}",),
        ]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (folder / "done").touch()
    lines = (folder / "validation.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["validation_loss"])


def main() -> int:
    """Count, train, tabulate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "adam_state", help="folder of the runs")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/adam_state.*")
    wanted = parser.parse_args()
    pool = RankPool()
    try:
        counts = {state: pool(1).run(state_bytes, state)[0] for state in ("float32", "fp8")}
    finally:
        pool.close()
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    for precision in PRECISIONS:
        losses = {state: trained(precision, state, wanted) for state in counts}
        for state, (total, parameters) in counts.items():
            change = losses[state] / losses["float32"] - 1
            rows.append(
                [
                    f"{precision}, moments {state}",
                    f"{total / parameters:.3f}",
                    f"{losses[state]:.4f}",
                    f"{change:+.2%}" if state != "float32" else "",
                ]
            )
            data.append({"precision": precision, "state": state, "bytes": total, "loss": losses[state]})
    body = table(["", "bytes a parameter, with master", "validation loss", "change"], rows)
    print(body)
    if wanted.write:
        record = {**environment(["megatron-core"]), "measured": f"{wanted.iterations} iterations, one seed"}
        title = "Adam's moments: float32 against E4M3 and float16"
        write_results("adam_state", title, "python -m benchmarks.adam_state --write", record, body, data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
