"""What import and export hold in memory: a few tensors, however large the model is. Counted in a forked process."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from megatron_fp8.commands.main import main
from tests.support.command import run
from tests.support.hf_small import IN_BLOCKS, write, write_family

MEGABYTE = 2**20
DENSE = {
    "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 2048,
}  # fmt: skip
EXPERTS = {
    **DENSE, "num_hidden_layers": 1, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
    **IN_BLOCKS,
}  # fmt: skip
# The largest tensor: 2048 x 1024.
MODELS = {"dense": DENSE, "experts_fp8": EXPERTS}


def anonymous() -> int:
    """Bytes of this process' memory, without the pages of files, which the kernel may drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def more_than_before(arguments: list[str]) -> int:
    """The most bytes that a command has at a time, over what the process had before."""
    before, done = anonymous(), threading.Event()
    most = [before]

    def watch() -> None:
        while not done.wait(0.003):
            most.append(max(most.pop(), anonymous()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert main(arguments) == 0
    done.set()
    watcher.join()
    return most[0] - before


def measure(folder: Path) -> None:
    """Print what import and export take of each; small ones come first, so that modules are loaded."""
    for name in ("tiny", *MODELS):
        model, out = folder / name / "run", folder / name / "out"
        imported = more_than_before(["import", str(folder / name / "hf"), str(model)])
        exported = more_than_before(["export", str(model), str(out), "--max-shard-size=20MB"])
        print("took", name, imported, exported)


def test_memory_holds_a_few_tensors_and_not_the_model(tmp_path):
    write(tmp_path / "tiny" / "hf")
    for name, fields in MODELS.items():
        write_family(tmp_path / name / "hf", fields)
    script = tmp_path / "measure.py"
    script.write_text(f"from {__name__} import *; measure(Path({str(tmp_path)!r}))")
    done = run(script)
    assert done.returncode == 0, done.stderr
    took = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("took")]
    assert len(took) == 1 + len(MODELS)
    for name, imported, exported in took[1:]:
        checkpoint = sum(file.stat().st_size for file in (tmp_path / name / "run").rglob("*.distcp"))
        assert checkpoint > 110 * MEGABYTE
        assert int(imported) < 80 * MEGABYTE and int(exported) < 80 * MEGABYTE, (name, imported, exported)
    for name in MODELS:  # half a gigabyte in all
        shutil.rmtree(tmp_path / name)
