"""A GPT of Megatron-Core, trained in FP8 in a loop of your own: three lines for FP8, the others for Megatron-Core.

    python examples/megatron_gpt.py                        # one process, on a CPU or a GPU
    torchrun --nproc-per-node 2 examples/megatron_gpt.py   # tensor parallel

It learns to count: in each sequence the next token is the one before plus one.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from megatron_fp8 import TransformerConfig, mcore
from megatron_fp8.mcore.iteration import finish_iteration
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

VOCABULARY, LENGTH, STEPS = 128, 32, 20


def main() -> None:
    """Build, print the plan, train."""
    mcore.install()  # 1: before a group or a model is built
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, value)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1234)

    config = TransformerConfig(  # 2: this package's TransformerConfig
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(),
        fp8="hybrid",
        fp8_recipe="tensorwise",
    )
    model = GPTModel(
        config,
        get_gpt_layer_fp8_spec(config),  # 3: layers in FP8
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    )
    model = Float16Module(config, model.to(device))  # weights in BF16
    mcore.print_plan(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = torch.arange(LENGTH, device=device).expand(8, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)  # the same on every tensor-parallel rank
        first = torch.randint(VOCABULARY, (8, 1), generator=generator).to(device)
        tokens = (first + torch.arange(LENGTH + 1, device=device)) % VOCABULARY
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        counts = finish_iteration([model])  # Megatron-Core's schedules do this by themselves
        if not counts.nonfinite:
            optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {counts.fp8_gemms} GEMMs in FP8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
