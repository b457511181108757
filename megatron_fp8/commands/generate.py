"""`megatron-fp8 generate`: text from a trained checkpoint, token by token, in FP8 or BF16.

Continues a prompt with the model of a checkpoint, streaming to the terminal. Text goes to stdout, facts to stderr.

  megatron-fp8 generate runs/tiny_gpt_cpu --prompt "import " --temperature 0          greedy: always the same
  megatron-fp8 generate runs/tiny_gpt_cpu --prompt "class " --top-k 20 --top-p 0.9
  megatron-fp8 generate runs/tiny_gpt_cpu --prompt "def " --recipe mxfp8              another recipe than the run's
  megatron-fp8 generate runs/tiny_gpt_cpu --prompt "def " --activations static        after `megatron-fp8 calibrate`
  megatron-fp8 launch --ranks 2 generate ...                                          tensor parallel over two ranks

In FP8 every weight is quantized once and its high-precision copy freed. Activations are scaled as in training (dynamic),
or with the scales of a calibration (static). The parallel layout need not be the run's. Options of the run's model may
follow: --model.fp8_pow2_scales=true.

Exit codes: 0 done; 1 failed; 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..files.terminal import printable
from .cli_common import CheckpointParser, run_command, say

if TYPE_CHECKING:
    import torch

    from ..inference import Sampler


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 generate`; returns the exit code."""
    return run_command(_parser(), arguments, _prepare)


def _parser() -> CheckpointParser:
    parser = CheckpointParser("generate", __doc__)
    add = parser.add_argument
    add("--prompt", required=True, help="text to continue ('-': read it from stdin; '': begin a document)")
    add("--max-new-tokens", type=int, metavar="N", help="tokens to add (default: 128, if there is room)")
    add("--temperature", type=float, default=0.8, help="0 is greedy (default %(default)s)")
    add("--top-k", type=int, default=0, help="draw from the K most likely tokens (default: all)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest that sum to P (default: all)")
    add("--seed", type=int, default=1234, help="of the draws (default %(default)s)")
    add("--activations", choices=["dynamic", "static"], default="dynamic", help="default: dynamic")
    add("--calibration", metavar="DIR", help="of --activations static (default: RUN_DIR/calibration)")
    add(
        "--batch-invariant",
        action="store_true",
        help="results do not depend on the batch (CPUs only; slower)",
    )
    return parser


def _prepare(options: argparse.Namespace, run_options: list[str], launch: Any) -> Callable[[], None]:
    from ..inference import Sampler

    Sampler(options.temperature, options.top_k, options.top_p)  # checks the options first
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {options.max_new_tokens} must be at least 1")
    if options.calibration and options.activations != "static":
        raise ValueError("--calibration is for --activations static: add it, or leave --calibration out")
    from_stdin = options.prompt == "-"
    text = b"" if from_stdin else options.prompt.encode()
    from .. import mcore

    mcore.install()
    from ..train.launch.parallel import on_first_rank
    from ..train.resume.checkpoint_compat import check_imported
    from ..train.resume.restore import restore

    restored = restore(
        options.checkpoint, launch, run_options, config=options.config, recipe=options.recipe, fp8=options.fp8
    )
    if from_stdin:  # the ranks share stdin: each would read a part
        text = on_first_rank(sys.stdin.buffer.read)
    check_imported(restored.run, restored.facts)
    prompt = prompt_ids(restored.tokenizer, text)
    room = restored.run.train.seq_length - len(prompt)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the model's context is {restored.run.train.seq_length}:"
            " give a shorter prompt, so that there is room for one more"
        )
    count = options.max_new_tokens or min(128, room)
    if count > room:
        raise ValueError(
            f"--max-new-tokens {count}: after a prompt of {len(prompt)} tokens the context of"
            f" {restored.run.train.seq_length} has room for {room}"
        )
    _prepare_model(options, restored, launch)
    sampler = Sampler(options.temperature, options.top_k, options.top_p, restored.tokenizer.vocab_size)
    return partial(_stream, options.seed, launch, restored, prompt, count, sampler)


def prompt_ids(tokenizer: Any, text: bytes) -> list[int]:
    """Ids of a prompt: the document's start (once, even if the text has it) and the text; never empty."""
    start, ids = list(tokenizer.start), tokenizer.encode(text).tolist()
    return (ids if ids[: len(start)] == start else start + ids) or [tokenizer.eod]


def _prepare_model(options: argparse.Namespace, restored: Any, launch: Any) -> None:
    """Quantize the weights, and print checkpoint and precision."""
    from ..fp8_utils import quantizes
    from ..inference import make_batch_invariant, model_bytes, prepare_for_inference
    from ..inference.calibration import load_calibration
    from ..train.run_record import run_folder_of

    static = options.activations == "static"
    say(f"checkpoint  {restored.folder}, iteration {restored.iteration}", launch)
    for line in restored.lines:
        say(f"            {line}", launch)
    if not quantizes(restored.run.model):
        if static:
            raise ValueError(
                "--activations static needs FP8, and this is BF16: give --recipe tensorwise or rowwise"
            )
        if options.batch_invariant:
            make_batch_invariant(restored.model)
        restored.model.eval()
        say(
            f"precision   {restored.run.model.params_dtype}, model {model_bytes(restored.model):,} bytes",
            launch,
        )
        return
    calibration = None
    if static:
        folder = options.calibration or run_folder_of(restored.folder) / "calibration"
        calibration = load_calibration(folder)
        if calibration.facts.get("iteration") not in (None, restored.iteration):
            say(f"            calibrated at iteration {calibration.facts['iteration']}", launch)
    prepare_for_inference(restored.model, calibration=calibration, batch_invariant=options.batch_invariant)
    for line in str(restored.model.fp8_inference).splitlines():
        say(f"precision   {line}", launch)


def _stream(seed: int, launch: Any, restored: Any, prompt: list[int], count: int, sampler: Sampler) -> None:
    import torch

    from ..mcore.generation import Decoder, generate

    device = next(restored.model.parameters()).device
    decoder = Decoder(restored.model, 1, len(prompt) + count)
    tokens = generate(
        decoder,
        torch.tensor([prompt], device=device, dtype=torch.int64),
        count,
        sampler,
        generator=torch.Generator().manual_seed(seed),
        end=restored.tokenizer.ends,
    )
    # An output encoding with few characters shows the others as escapes.
    getattr(sys.stdout, "reconfigure", lambda **options: None)(errors="backslashreplace")
    # A model's text is untrusted: a terminal gets no control characters, a file or pipe gets every byte.
    as_text = printable if sys.stdout.isatty() else str
    generated: list[int] = []
    start, first = time.perf_counter(), 0.0
    for text in _texts(tokens, prompt, generated, restored.tokenizer):
        first = first or time.perf_counter() - start
        if launch.rank == 0:
            print(as_text(text), end="", flush=True)
    seconds = time.perf_counter() - start
    if launch.rank == 0:
        print(flush=True)
    rate = (len(generated) - 1) / (seconds - first) if len(generated) > 1 else 0.0
    ended = ", end of document" if generated and generated[-1] in restored.tokenizer.ends else ""
    say(
        f"{len(generated)} tokens in {seconds:.2f} s: the first after {first:.2f} s, then {rate:.1f} tokens/s{ended}",
        launch,
    )


def _texts(
    tokens: Iterator[torch.Tensor], prompt: list[int], generated: list[int], tokenizer: Any
) -> Iterator[str]:
    """The prompt with the first token's text, then each token's text, as far as its characters are complete.

    All ids are decoded again each time: a token's text may depend on earlier tokens. An incomplete character appears as
    U+FFFD at the end, and waits for its other bytes.
    """
    printed = 0
    for token in tokens:
        generated.append(int(token))
        text = tokenizer.decode(prompt + generated)
        complete = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        yield text[printed:complete]
        printed = max(printed, complete)
    yield tokenizer.decode(prompt + generated)[printed:]
