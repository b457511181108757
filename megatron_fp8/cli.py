"""The command line: `megatron-fp8 COMMAND`, `python -m megatron_fp8 COMMAND`. Commands load on use."""

from __future__ import annotations

import os
import sys

USAGE = """\
usage: megatron-fp8 COMMAND ...

FP8 training for Megatron-Core models.

  train      train a GPT on real text: megatron-fp8 train --config examples/configs/tiny_gpt_cpu.yaml
  report     show what a run ran, layer by layer, and how it went: megatron-fp8 report runs/tiny_gpt_cpu
  inspect    show what is in a checkpoint: megatron-fp8 inspect runs/tiny_gpt_cpu
  calibrate  measure a trained model's activations, for static scales: megatron-fp8 calibrate runs/tiny_gpt_cpu
  generate   continue a prompt: megatron-fp8 generate runs/tiny_gpt_cpu --prompt "def "
  export     write a checkpoint for transformers and vLLM: megatron-fp8 export runs/mine out --format=fp8-channel
  import     make a run of a Llama, Qwen2 or Qwen3 directory: megatron-fp8 import Llama-3.2-1B runs/llama
  bench      time FP8 against BF16 here; --tune writes the table of GEMMs for which FP8 pays
  doctor     say what this machine can run and what is missing, and run an FP8 GEMM on each backend

`megatron-fp8 COMMAND --help` says more. Under torchrun: torchrun --nproc-per-node 2 -m megatron_fp8 train ...
"""

COMMANDS = ("train", "report", "inspect", "calibrate", "generate", "export", "import", "bench", "doctor")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 1 failed, 2 bad input)."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command == "train":
        from megatron_fp8.train.app import main as train

        return train(rest)
    if command == "report":
        from megatron_fp8.train.show import main as report

        return report(rest)
    if command == "inspect":
        from megatron_fp8.inspector import main as inspect

        return inspect(rest)
    if command == "calibrate":
        from megatron_fp8.train.calibrate import main as calibrate

        return calibrate(rest)
    if command == "generate":
        from megatron_fp8.train.generate import main as generate

        return generate(rest)
    if command == "export":
        from megatron_fp8.huggingface.commands import export_main

        return export_main(rest)
    if command == "import":
        from megatron_fp8.huggingface.commands import import_main

        return import_main(rest)
    if command == "bench":
        from megatron_fp8.bench_command import main as bench

        return bench(rest)
    if command == "doctor":
        from megatron_fp8.doctor import main as doctor

        return doctor(rest)
    import difflib

    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    print(f"error: {command!r} is not a command: they are {', '.join(COMMANDS)}.{hint}", file=sys.stderr)
    return 2
