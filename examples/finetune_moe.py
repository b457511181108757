"""Fine-tune a mixture of experts in FP8 with Megatron-Core: import it, train, export it, and read it with transformers.

    python examples/finetune_moe.py                              a small random DeepSeek-V3, about a minute on two cores
    python examples/finetune_moe.py --kind mixtral               a small random Mixtral; or qwen3_moe
    python examples/finetune_moe.py --model Qwen3-30B-A3B        a directory that you have
    python examples/finetune_moe.py --ranks 2                    half of the experts on each of two ranks

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

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "mixtral": {"intermediate_size": 128, "num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 128,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
    },
}


def main() -> None:
    options = parse()
    needed = ("accelerate", "compressed_tensors", "tokenizers", "transformers")
    if missing := [name for name in needed if find_spec(name) is None]:
        print(f"error: {', '.join(missing)} missing: pip install '.[export]'", file=sys.stderr)
        sys.exit(2)
    work = Path(options.out or tempfile.mkdtemp(prefix="finetune_moe-"))
    source = (
        Path(options.model) if options.model else make_model(options.kind, work / f"random-{options.kind}")
    )
    data = options.data or [inspect.getsourcefile(module) for module in (argparse, inspect, textwrap)]

    command("import", source, work / "run")
    command(
        "train",
        f"--config={work}/run/config.yaml",
        "--model.fp8=e4m3",
        f"--model.fp8_recipe={options.recipe}",
        "--model.first_last_layers_bf16=false",
        f"--model.expert_model_parallel_size={options.ranks}",
        "--model.moe_aux_loss_coeff=1e-2",
        f"--train.train_iters={options.iterations}",
        f"--train.seq_length={options.seq_length}",
        "--train.global_batch_size=8",
        f"--train.micro_batch_size={8 // options.ranks}",
        "--train.eval_iters=0",
        "--data.split=1,0,0",
        f"--data.cache_dir={work}/cache",
        f"--optimizer.lr={options.lr}",
        f"--optimizer.lr_warmup_iters={options.iterations // 10}",
        f"--checkpoint.save_interval={options.iterations}",
        "--data",
        *data,
        ranks=options.ranks,
    )
    command("export", work / "run", work / "bf16", f"--like={source}")
    ignored = [f"--ignore=*.{name}" for name in down_projections(source)]
    command("export", work / "run", work / "fp8", f"--like={source}", "--format=fp8-block", *ignored)
    compare(work, Path(data[0]).read_text(encoding="utf-8")[:2000])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", help="a Mixtral, Qwen3-MoE or DeepSeek-V3 directory; default: a small random one"
    )
    parser.add_argument("--kind", default="deepseek_v3", choices=EXPERTS, help="of the random model")
    parser.add_argument("--data", nargs="+", help="text files; default: three of Python's own modules")
    parser.add_argument(
        "--recipe", default="blockwise", help="delayed, tensorwise, rowwise, blockwise or mxfp8"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, choices=(1, 2, 4, 8), help="among which experts are divided"
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="for the random model; 1e-5 suits a trained one"
    )
    parser.add_argument("--out", help="a new folder for everything; default: a temporary one")
    return parser.parse_args()


def down_projections(source: Path) -> list[str]:
    """Of latent attention: of keys and values the rows are no whole blocks, which transformers needs; vLLM fuses it with
    the one of queries, if there is one, and both must be of one precision."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    names = {"kv_a_proj_with_mqa": "kv_lora_rank", "q_a_proj": "q_lora_rank"}
    return [name for name, rank in names.items() if config.get(rank)]


def make_model(kind: str, folder: Path) -> Path:
    """A random model whose tokens are bytes, as save_pretrained writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = tokenizer.token_to_id("<|endoftext|>")

    torch.manual_seed(0)
    sizes = {**SIZES, **EXPERTS[kind], "vocab_size": tokenizer.get_vocab_size()}
    config = AutoConfig.for_model(kind, **sizes, bos_token_id=end, eos_token_id=end)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def command(*arguments: object, ranks: int = 1) -> None:
    """Print and run `megatron-fp8 ...`, launched if it has several ranks; its failure ends the example."""
    words = [*(["launch", "--ranks", str(ranks)] if ranks > 1 else []), *map(str, arguments)]
    print("$ megatron-fp8", shlex.join(words), flush=True)
    done = subprocess.run([sys.executable, "-m", "megatron_fp8", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


@torch.no_grad()
def compare(work: Path, text: str) -> None:
    """Read both exports with transformers; the FP8 one must say nearly the same about a text."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    ids = Tokenizer.from_file(str(work / "fp8" / "tokenizer.json")).encode(text).ids[:256]
    tokens = torch.tensor([ids])
    losses, logits = {}, {}
    for name in ("bf16", "fp8"):
        decoded = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if name == "fp8" else {}
        model = AutoModelForCausalLM.from_pretrained(work / name, **decoded)
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
