"""GRPO in FP8: Megatron-Core trains, transformers' generate answers, and each step's weights are streamed to it.

    python examples/grpo.py                                     four runs and a picture, eight minutes on a free core
    python examples/grpo.py --run mxfp8:mxfp8 --steps 20        one run, a minute
    python examples/grpo.py --run blockwise:fp8-block --run bf16:fp8-block

A small Llama learns to sort six digits. In each step the engine writes 16 answers to each of 32 prompts, and training
makes the right ones more probable. Its loss divides an answer's probability in training by the engine's. Where the two
compute with different numbers, the policy that learns is not the policy that answered.

--run TRAINING:ENGINE chooses both: a recipe, and a format of weights with the rule for inputs that belongs to it.

    mxfp8:mxfp8        the engine has training's codes and scales, and quantizes its inputs as training does
    mxfp8:mxfp8+norm   the same with transformers' own RMSNorm, which rounds to BF16 once more than training's
    bf16:mxfp8         training in BF16, the engine in FP8: weights are quantized for it after each step
    bf16:nvfp4         training in BF16, the engine's weights in four bits, its inputs in BF16

All runs start from the same weights, after 25 supervised steps, and see the same prompts. The same seed gives the same
numbers, to the bit, on the same machine with the same number of threads. It needs `pip install '.[export]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp8 import mcore, quantize  # before Megatron-Core, whose import would warn

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from megatron_fp8 import TransformerConfig
from megatron_fp8.backends.emulated import gemm
from megatron_fp8.huggingface.formats import FORMATS
from megatron_fp8.huggingface.weight_decoder import decode_fp4, fp8_side
from megatron_fp8.mcore.iteration import finish_iteration
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from megatron_fp8.serve import weight_stream

DIGITS, VOCABULARY, SEPARATOR = 6, 16, 10
HIDDEN, FFN, LAYERS, HEADS, EPSILON = 128, 256, 2, 4, 1e-5
CLIP = 0.2
COLOURS = ("#009e73", "#0072b2", "#d55e00", "#cc79a7", "#e69f00", "#404040")
TRAINING = ("bf16", "tensorwise", "rowwise", "blockwise", "mxfp8")
ENGINES = ("bf16", "fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "nvfp4")
RUNS = ("mxfp8:mxfp8", "mxfp8:mxfp8+norm", "bf16:mxfp8", "bf16:nvfp4")


# ------------------------------------------------------------------------------------------------------------- the task


def draw_prompts(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts, int64 [count, DIGITS + 1], which end with a separator, and their right answers [count, DIGITS]."""
    digits = torch.randint(10, (count, DIGITS), generator=generator)
    prompts = torch.cat([digits, torch.full((count, 1), SEPARATOR)], 1)
    return prompts, digits.sort(1).values


# ----------------------------------------------------------------------------------------------------------- the policy


class Policy:
    """A GPT of Megatron-Core and its optimizer.

    Args:
        recipe: of the layers' linears, or 'bf16'.
    """

    def __init__(self, recipe: str, lr: float) -> None:
        fp8 = {} if recipe == "bf16" else {"fp8": "e4m3", "fp8_recipe": recipe}
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            ffn_hidden_size=FFN,
            num_attention_heads=HEADS,
            normalization="RMSNorm",
            layernorm_epsilon=EPSILON,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            **fp8,
        )
        model = GPTModel(
            config,
            get_gpt_layer_fp8_spec(config),
            vocab_size=VOCABULARY,
            max_sequence_length=2 * DIGITS + 1,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, ddp, Float16Module(config, model))
        settings = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            adam_beta2=0.95,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])  # float32 masters

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Of the answers' tokens, float32 [batch, DIGITS]; ``tokens``: prompts and answers, [batch, 2 * DIGITS + 1]."""
        positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
        logits = self.model(tokens[:, :-1], positions, None)[:, DIGITS:]
        return logits.log_softmax(-1).gather(-1, tokens[:, DIGITS + 1 :, None])[..., 0]

    def step(self, loss: Tensor) -> None:
        """Backward, and a step of the optimizer."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss.backward()
        self.model.finish_grad_sync()
        finish_iteration([self.model])
        self.optimizer.step()

    def copy_weights(self, other: Policy) -> None:
        """Takes another policy's weights."""
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                mine.copy_(theirs)
        self.optimizer.reload_model_params()


def warm_start(steps: int, seed: int) -> Policy:
    """A policy in BF16 after some supervised steps on 256 sorted sequences each: it is right now and then."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    policy, generator = Policy("bf16", 3e-3), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        policy.step(-policy.log_probs(torch.cat(draw_prompts(256, generator), 1)).mean())
    return policy


# ----------------------------------------------------------------------------------------------------------- the engine


class EngineLinear(nn.Module):
    """A linear [N, K] of an inference engine: it has codes and scales as streamed, and quantizes its own inputs.

    Args:
        tensors: the last parts of their names -> codes and scales, which become buffers of these names.
    """

    def __init__(self, form: str, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.form = FORMATS[form]
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.empty_like(tensor))

    def prepare(self) -> None:
        """After a load. Weights of four bits are decoded: their engines multiply them by inputs in BF16."""
        codes, scale = getattr(self, self.form.codes), getattr(self, self.form.scale)
        if self.form.tensor_scale is None:
            self.weight_side = fp8_side(self.form.codes, codes, scale)
        else:
            factor = 1 / getattr(self, self.form.tensor_scale)
            packed = codes.view(torch.float4_e2m1fn_x2)
            self.decoded = decode_fp4(self.form.codes, packed, scale, factor).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if self.form.tensor_scale is not None:
            return nn.functional.linear(x, self.decoded)
        inputs = quantize(x.flatten(0, -2), self.form.recipe, "input").rowwise
        return gemm(inputs, self.weight_side, out_dtype=x.dtype).unflatten(0, x.shape[:-1])


class Engine:
    """A Llama of transformers with an inference engine's linears.

    Args:
        form: of its weights, a format of ``weight_stream``; with '+norm' it keeps transformers' RMSNorm.
        model: whose weights it gets first.
    """

    def __init__(self, form: str, model: Any) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        self.form, _, norm = form.partition("+")
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            rms_norm_eps=EPSILON,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        tensors = dict(weight_stream(model, self.form))
        for name, module in list(self.model.named_modules()):
            parts = {
                key.rpartition(".")[2]: tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            if isinstance(module, nn.Linear) and len(parts) > 1:  # codes and scales
                self.model.set_submodule(name, EngineLinear(self.form, parts))
            elif type(module).__name__ == "LlamaRMSNorm" and not norm:
                self.model.set_submodule(name, nn.RMSNorm(HIDDEN, EPSILON, dtype=torch.bfloat16))
        self.load(model)

    def load(self, model: Any) -> None:
        """Takes the weights of a step: every tensor of the engine must be in the stream, and no other."""
        self.model.load_state_dict(dict(weight_stream(model, self.form)))
        for module in self.model.modules():
            if isinstance(module, EngineLinear):
                module.prepare()

    @torch.no_grad()
    def answer(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts with an answer each, int64 [batch, 2 * DIGITS + 1], and the answers' log-probabilities, float32
        [batch, DIGITS]."""
        made = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=DIGITS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(made.logits, 1).float()
        answers = made.sequences[:, DIGITS + 1 :, None]
        return made.sequences, logits.log_softmax(-1).gather(-1, answers)[..., 0]


# ----------------------------------------------------------------------------------------------------------------- GRPO


def advantages(rewards: Tensor) -> Tensor:
    """Of each answer, over its group: [groups, group] -> the same; 0 where all of a group have one reward."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-6)


def grpo_loss(log_probs: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """The clipped objective, float32 []; ``log_probs`` and ``old`` [batch, DIGITS], ``advantage`` [batch]."""
    ratio, advantage = (log_probs - old).exp(), advantage[:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


class Run:
    """A policy, its engine and their prompts.

    Args:
        name: TRAINING:ENGINE.
        start: a policy with the weights to start from.
        options: seed, prompts, group and lr of the command line.
    """

    def __init__(self, name: str, start: Policy, options: argparse.Namespace) -> None:
        self.name, self.options, self.steps = name, options, 0
        training, form = name.split(":")
        self.policy = Policy(training, options.lr)
        self.policy.copy_weights(start)
        self.engine = Engine(form, self.policy.model)
        self._prompts = torch.Generator().manual_seed(options.seed + 1)

    def step(self) -> dict[str, Any]:
        """Answers, rewards, an update, new weights for the engine. Returns the step's record."""
        self.steps += 1
        prompts, right = draw_prompts(self.options.prompts, self._prompts)
        torch.manual_seed(self.options.seed + self.steps)  # of the answers
        tokens, old = self.engine.answer(prompts.repeat_interleave(self.options.group, 0))
        answers = tokens[:, DIGITS + 1 :].unflatten(0, (-1, self.options.group))
        rewards = (answers == right[:, None]).all(-1).float()  # [prompts, group]
        with torch.no_grad():
            in_training = self.policy.log_probs(torch.cat([prompts, right], 1)).sum(1).exp()  # [prompts]
        log_probs = self.policy.log_probs(tokens)
        self.policy.step(grpo_loss(log_probs, old, advantages(rewards).flatten()))
        self.engine.load(self.policy.model)

        difference = log_probs.detach() - old
        return {
            "run": self.name,
            "step": self.steps,
            "reward": float(rewards.mean()),
            "in_training": float(in_training.mean()),  # the reward to expect if training's policy answered
            "k3": float((difference.expm1() - difference).mean()),  # of KL(engine || training), a token
            "difference": float(difference.square().mean().sqrt()),  # of log-probabilities, root mean square
            "clipped": float(difference.expm1().abs().gt(CLIP).float().mean()),
        }


# ------------------------------------------------------------------------------------------------------ the command line


def main() -> None:
    """Makes the runs, their records and their picture."""
    options = parse()
    warnings.filterwarnings("ignore", module="megatron")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    plan = f"{options.warm_start} supervised steps, then {len(options.run)} runs of {options.steps} steps"
    print(plan, file=sys.stderr, flush=True)
    connect()
    options.out.mkdir(parents=True, exist_ok=True)
    start = warm_start(options.warm_start, options.seed)
    with (options.out / "grpo.jsonl").open("x", encoding="utf-8") as file:
        runs = {name: train(Run(name, start, options), options.steps, file) for name in options.run}
    draw(runs, options.out / "grpo.png")
    print(table(runs))
    print(f"{options.out / 'grpo.jsonl'} has every step, {options.out / 'grpo.png'} the curves")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--run",
        action="append",
        metavar="TRAINING:ENGINE",
        help=f"may be repeated; default: {', '.join(RUNS)}. TRAINING: {', '.join(TRAINING)}. ENGINE:"
        f" {', '.join(ENGINES)}, also with +norm",
    )
    for name, default, words in (
        ("steps", 200, "updates of the weights, with new answers each"),
        ("prompts", 32, "of a step"),
        ("group", 16, "answers to each prompt, whose rewards are compared"),
        ("warm-start", 25, "supervised steps before all runs"),
        ("seed", 1, "of weights, prompts and answers"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{words} (default: {default})"
        )
    parser.add_argument("--lr", type=float, default=1e-4, help="of Adam (default: 1e-4)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/grpo"), help="folder of the results (default: runs/grpo)"
    )
    options = parser.parse_args()
    options.run = list(dict.fromkeys(options.run or RUNS))
    for run in options.run:
        training, _, engine = run.partition(":")
        if training not in TRAINING or engine.removesuffix("+norm") not in ENGINES:
            parser.error(
                f"--run={run}: give one of {', '.join(TRAINING)}, a colon, and one of {', '.join(ENGINES)}"
            )
    for name, least in (("steps", 1), ("prompts", 1), ("group", 2), ("warm_start", 0), ("seed", 0)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')}={value}: at least {least} is needed")
    if not 0 < options.lr < 1:
        parser.error(f"--lr={options.lr}: a number between 0 and 1 is needed")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out={options.out} is a file: give a folder")
    if (options.out / "grpo.jsonl").exists():
        parser.error(f"--out={options.out} has grpo.jsonl: give another folder, or remove this one")
    if find_spec("transformers") is None:
        parser.error("transformers is missing: pip install '.[export]'")
    return options


def connect() -> None:
    """Megatron-Core's groups, of this process alone."""
    mcore.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def train(run: Run, steps: int, file: Any) -> list[dict[str, Any]]:
    """Records of all steps, also in the file. Shows a bar on a terminal, and a line every tenth step."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    records = []
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(run.name, total=steps)
        for step in range(1, steps + 1):
            records.append(record := run.step())
            file.write(json.dumps(record) + "\n")
            file.flush()
            bar.advance(task)
            if step in (1, steps) or step % 10 == 0:
                words = f"{run.name:<21} step {step:>4}  reward {record['reward']:.3f}  k3 {record['k3']:.1e}"
                console.out(words, highlight=False)
    return records


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Rewards at both ends, and how far engine and training are apart, as a table of Markdown."""
    few = min(20, *map(len, runs.values()))
    lines = [
        f"| run | reward, first {few} steps | last {few} | last {few}, in training | k3: median, largest | difference |"
        " beyond the clip |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, records in runs.items():
        values = {name: [record[name] for record in records] for name in records[0]}
        rewards, in_training, k3 = values["reward"], values["in_training"], values["k3"]
        lines.append(
            f"| `{run}` | {mean(rewards[:few]):.3f} | {mean(rewards[-few:]):.3f} | {mean(in_training[-few:]):.3f} |"
            f" {median(k3):.1e}, {max(k3):.1e} | {mean(values['difference']):.4f} | {mean(values['clipped']):.2%} |"
        )
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Two panels by step: reward, pale and as the mean of ten steps; k3."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    reward, k3 = figure.subplots(1, 2)
    for index, (run, records) in enumerate(runs.items()):
        steps, rewards = [r["step"] for r in records], [r["reward"] for r in records]
        means = [mean(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
        reward.plot(steps, rewards, color=COLOURS[index % len(COLOURS)], alpha=0.25, lw=0.8)
        reward.plot(steps, means, color=COLOURS[index % len(COLOURS)], label=run)
        k3.plot(steps, [r["k3"] for r in records], color=COLOURS[index % len(COLOURS)], label=run)
    reward.set(xlabel="step", ylabel="share of answers that are right", title="Reward", ylim=(0, 1))
    k3.set_yscale("symlog", linthresh=1e-5)
    k3.set(
        xlabel="step", ylabel="k3, nats a token", title="KL divergence of engine and training", ylim=(0, None)
    )
    k3.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
