"""What import and export hold in memory: a few tensors, however large the model is. Counted in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_fp8.commands.main import main
from megatron_fp8.huggingface.architectures import entries
from megatron_fp8.huggingface.config import architecture_of, model_section
from megatron_fp8.huggingface.shapes import part_shapes
from tests.support.hf_small import CONFIG, write

MEGABYTE = 2**20
DENSE = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 2048,
}  # fmt: skip
EXPERTS = {
    **DENSE, "num_hidden_layers": 1, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
MODELS = {"dense": DENSE, "experts_fp8": EXPERTS}


def directory(folder: Path, fields: dict[str, Any]) -> Path:
    """A directory of ones; largest tensor: 2048 x 1024."""
    folder.mkdir(parents=True)
    config = {**CONFIG, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    section = model_section(config)
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries(architecture_of(config), section):
        for name, shape in part_shapes(entry, section).items():
            in_fp8 = entry.site is not None and "quantization_config" in config
            tensors[name] = torch.ones(shape, dtype=torch.float8_e4m3fn if in_fp8 else torch.bfloat16)
            if in_fp8:
                tensors[f"{name}_scale_inv"] = torch.ones([size // 128 for size in shape])
    save_file(tensors, folder / "model.safetensors")
    return folder


def anonymous() -> int:
    """Bytes of this process' memory, without the pages of files, which the kernel may drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def more_than_before(arguments: list[str]) -> int:
    """The most bytes that a command has at a time, over what the process had before."""
    before, done = anonymous(), threading.Event()
    most = [before]

    def watch() -> None:
        while not done.wait(0.001):
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
        run, out = folder / name / "run", folder / name / "out"
        imported = more_than_before(["import", str(folder / name / "hf"), str(run)])
        exported = more_than_before(["export", str(run), str(out), "--max-shard-size=20MB"])
        print("took", name, imported, exported)


def test_memory_holds_a_few_tensors_and_not_the_model(tmp_path):
    write(tmp_path / "tiny" / "hf")
    for name, fields in MODELS.items():
        directory(tmp_path / name / "hf", fields)
    code = f"from {__name__} import *; measure(Path({str(tmp_path)!r}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    took = [line.split()[1:] for line in said.splitlines() if line.startswith("took")]
    for name, imported, exported in took[1:]:
        checkpoint = sum(file.stat().st_size for file in (tmp_path / name / "run").rglob("*.distcp"))
        assert checkpoint > 200 * MEGABYTE
        assert int(imported) < 80 * MEGABYTE and int(exported) < 80 * MEGABYTE, (name, imported, exported)
    for name in MODELS:  # a gigabyte in all
        shutil.rmtree(tmp_path / name)
