"""A run whose records are lost does not end as done: exit code 1 and one line, though its checkpoints are whole.

Disks that fill up in a save: test_checkpoint_app.py; that have room again: tests/unit/files/test_records.py.
"""

from megatron_fp8.files.checkpoint import check_files, latest_checkpoint, read_manifest
from tests.support.command import APP, run

FILES = ("metrics.jsonl", "validation.jsonl", "telemetry.jsonl", "events.jsonl", "tfevents")


def test_lost_records_are_a_failure(folder, config):
    out = folder / "runs" / "full"
    more = ["--checkpoint.save_interval=4", "--telemetry.every=2"]
    done = run(APP, "full", ",".join(FILES), "train", f"--config={config}", f"--run_dir={out}", *more)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: records are lost: ") and "its checkpoints are complete" in said
    assert all(name in said for name in FILES) and "bytes" in said
    assert "done: 4 iterations" in done.stdout
    last = latest_checkpoint(out / "checkpoints")
    assert last is not None and last.name == "iter_0000004"
    check_files(last, read_manifest(last))
