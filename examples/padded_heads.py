"""What docs/diagnose.md trains on: a text of repeated syllables, and a Llama directory with attention heads added.

    python examples/padded_heads.py text runs/text.txt
    python examples/padded_heads.py pad runs/hf runs/hf-padded --heads 4

An added head has keys, values and output weights of zero: it gives nothing, and none of its gradients is ever anything
but zero. What its queries are does not matter then, and tools that pad heads, so that more ranks can share them, may
leave there what the memory held. Here they are large numbers, the same each time.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGE = 2.0**24


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    written = commands.add_parser("text", help="write a text whose lines are a syllable, twelve times")
    written.add_argument("file", type=Path)
    padded = commands.add_parser("pad", help="add heads to a Llama whose heads all have keys of their own")
    padded.add_argument("source", type=Path)
    padded.add_argument("target", type=Path, help="a new directory")
    padded.add_argument("--heads", type=int, required=True, help="how many there will be")
    padded.add_argument("--clean", action="store_true", help="with queries of zero too")
    options = parser.parse_args()
    if options.command == "text":
        text(options.file)
    else:
        pad(options.source, options.target, options.heads, options.clean)


def text(file: Path) -> None:
    """Lines such as 'kokokokokokokokokokokoko': who attends to the letter before the last one knows the next."""
    draw = random.Random(0)
    drawn = ("".join(draw.choices(string.ascii_lowercase, k=2)) for _ in range(12_000))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{12 * syllable}\n" for syllable in drawn), encoding="utf-8")


def pad(source: Path, target: Path, heads: int, clean: bool) -> None:
    """The directory with more heads, which computes the same."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    now = config["num_attention_heads"]
    if config["num_key_value_heads"] != now or heads <= now:
        raise SystemExit(f"error: {now} heads, each with its own keys, can be padded to more than {now}")
    rows = (heads - now) * config["head_dim"]
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if ".self_attn." not in name:
            continue
        axis = (
            1 if "o_proj" in name else 0
        )  # [hidden, heads * head_dim], the others [heads * head_dim, hidden]
        shape = list(weight.shape)
        shape[axis] = rows
        added = torch.zeros(shape, dtype=weight.dtype, device="cpu")
        if not clean and "q_proj" in name:
            added.uniform_(-LARGE, LARGE, generator=generator)
        tensors[name] = torch.cat([weight, added], axis)
    shutil.copytree(source, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{target}: {now} heads and {heads - now} more")


if __name__ == "__main__":
    main()
