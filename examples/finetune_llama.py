"""Fine-tune a Llama in FP8 with Megatron-Core: import it, train, export to FP8, and read the export with transformers.

    python examples/finetune_llama.py                        a small random model, under a minute on two cores
    python examples/finetune_llama.py --model Llama-3.2-1B   a directory that you have
    python examples/finetune_llama.py --recipe mxfp8 --format fp8-block --data my_text.txt --iterations 200

It needs `pip install '.[export]'`. Every command that it runs is printed, and works by itself.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from importlib.util import find_spec
from pathlib import Path

import torch


def main() -> None:
    options = parse()
    needed = ("accelerate", "compressed_tensors", "tokenizers", "transformers")
    if missing := [name for name in needed if find_spec(name) is None]:
        print(f"error: {', '.join(missing)} missing: pip install '.[export]'", file=sys.stderr)
        sys.exit(2)
    work = Path(options.out or tempfile.mkdtemp(prefix="finetune_llama-"))
    source = Path(options.model) if options.model else make_model(work / "random-llama")
    data = options.data or [inspect.getsourcefile(module) for module in (argparse, inspect, textwrap)]

    command("import", source, work / "run")
    command(
        "train",
        f"--config={work}/run/config.yaml",
        "--model.fp8=hybrid",
        f"--model.fp8_recipe={options.recipe}",
        "--model.first_last_layers_bf16=false",
        f"--train.train_iters={options.iterations}",
        f"--train.seq_length={options.seq_length}",
        "--train.global_batch_size=8",
        "--train.micro_batch_size=8",
        "--train.eval_iters=0",
        "--data.split=1,0,0",
        f"--data.cache_dir={work}/cache",
        f"--optimizer.lr={options.lr}",
        f"--optimizer.lr_warmup_iters={options.iterations // 10}",
        f"--checkpoint.save_interval={options.iterations}",
        "--data",
        *data,
    )
    command("export", work / "run", work / "bf16", f"--like={source}")
    command("export", work / "run", work / "fp8", f"--like={source}", f"--format={options.format}")
    compare(work, Path(data[0]).read_text(encoding="utf-8")[:2000])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="a Llama, Qwen2 or Qwen3 directory; default: a small random Llama")
    parser.add_argument("--data", nargs="+", help="text files; default: three of Python's own modules")
    parser.add_argument(
        "--recipe", default="tensorwise", help="delayed, tensorwise, rowwise, blockwise or mxfp8"
    )
    parser.add_argument("--format", default="fp8-channel", help="fp8-tensor, fp8-channel or fp8-block")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="for the random model; 1e-5 suits a trained one"
    )
    parser.add_argument("--out", help="a new folder for everything; default: a temporary one")
    return parser.parse_args()


def make_model(folder: Path) -> Path:
    """A random Llama of 1.6 million parameters whose tokens are bytes, as save_pretrained writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = tokenizer.token_to_id("<|endoftext|>")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=end,
        eos_token_id=end,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def command(*arguments: object) -> None:
    """Print and run `megatron-fp8 ...`; its failure ends the example."""
    words = [str(argument) for argument in arguments]
    print("$ megatron-fp8", shlex.join(words), flush=True)
    done = subprocess.run([sys.executable, "-m", "megatron_fp8", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


@torch.no_grad()
def compare(work: Path, text: str) -> None:
    """Read both exports with transformers; the FP8 one must say nearly the same about a text."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    ids = Tokenizer.from_file(str(work / "fp8" / "tokenizer.json")).encode(text).ids[:256]
    tokens = torch.tensor([ids])
    losses, logits = {}, {}
    for name in ("bf16", "fp8"):
        model = AutoModelForCausalLM.from_pretrained(work / name)
        output = model(tokens, labels=tokens)
        losses[name], logits[name] = float(output.loss), output.logits.float()
    difference = float((logits["fp8"] - logits["bf16"]).norm() / logits["bf16"].norm())
    sizes = {
        name: sum(path.stat().st_size for path in (work / name).glob("*.safetensors")) for name in losses
    }
    report = {
        "loss": {name: round(loss, 4) for name, loss in losses.items()},
        "bytes": sizes,
        "relative difference of logits": round(difference, 4),
    }
    print(json.dumps(report), flush=True)
    if not difference < 0.15:
        sys.exit(f"error: the FP8 export's logits differ by {difference:.3f} of their norm")
    print(f"done: {work}/fp8 is ready for transformers and vLLM")


if __name__ == "__main__":
    main()
