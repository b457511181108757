"""Trainings by other libraries' loops on the ranks of torchrun: an uninterrupted one, and one resumed in its middle.

    torchrun ... -m tests.support.integrations_app FOLDER CASE ...

CASE: LIBRARY,ddp|fsdp2[,bf16][,accumulate][,recompute]. Each rank compares weights, optimizer and FP8 state to the bit,
and prints a line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megatron_fp8.nn import convert_to_fp8, fp8_state_dict
from megatron_fp8.recipe import DelayedScaling

STEPS, STOP = 4, 2
DELAYED = DelayedScaling(amax_history_len=3)
ROWS = torch.arange(16 * 16).view(16, 16) % 31 + 1


def llama() -> Any:
    """Small, with two decoder layers to be sharded one by one."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return convert_to_fp8(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)), DELAYED)


@contextmanager
def shards_on_cpu() -> Iterator[None]:
    """accelerate shards on GPUs alone: it takes these ranks for some, which fully_shard itself does not mind."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    initialise = PartialState.__init__

    def as_gpus(self: PartialState, *arguments: Any, **options: Any) -> None:
        initialise(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    with mock.patch.object(PartialState, "__init__", as_gpus):
        yield


def state_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """This rank's part of everything that training goes on from."""
    state = {**model.state_dict(), **fp8_state_dict(model)}
    for number, moments in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{number}.{name}": value for name, value in moments.items()}
    return {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}


def rows_of(batch: int) -> torch.Tensor:
    """This rank's two rows of a batch: other ones in each of four batches, and on each rank."""
    return ROWS[2 * (batch % 4) + dist.get_rank() :: 8]


def by_transformers(folder: Path, way: str, options: list[str], resume: bool) -> dict[str, torch.Tensor]:
    import transformers

    from megatron_fp8.integrations.transformers import Fp8Callback

    more: dict[str, Any] = {}
    if way == "fsdp2":
        more = {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }
    arguments = transformers.TrainingArguments(
        folder / ("resumed" if resume else "whole"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 if "accumulate" in options else 1,
        activation_checkpointing="recompute" in options,
        bf16="bf16" in options,
        use_cpu=True,
        report_to=[],
        save_steps=STOP,
        logging_steps=1,
        disable_tqdm=True,
        learning_rate=1e-2,
        **more,
    )
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = transformers.Trainer(llama(), arguments, train_dataset=rows, callbacks=[Fp8Callback()])
    trainer.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{STOP}") if resume else None)
    return state_of(trainer.model, trainer.optimizer)


def by_accelerate(folder: Path, way: str, options: list[str], resume: bool) -> dict[str, torch.Tensor]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from megatron_fp8.integrations.accelerate import register_fp8

    plugin = None
    if way == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            activation_checkpointing="recompute" in options,
        )
    parts = 2 if "accumulate" in options else 1
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=parts,
        mixed_precision="bf16" if "bf16" in options else "no",
    )
    model = llama()
    if "recompute" in options and way == "ddp":
        model.gradient_checkpointing_enable()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    register_fp8(accelerator, model, optimizer)
    if resume:
        accelerator.load_state(folder / "whole")
    for step in range(STOP if resume else 0, STEPS):
        for part in range(parts):
            rows = rows_of(parts * step + part)
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=rows, labels=rows).loss)
                optimizer.step()
                optimizer.zero_grad()
        if step + 1 == STOP and not resume:
            accelerator.save_state(folder / "whole")
    return state_of(model, optimizer)


def by_lightning(folder: Path, way: str, options: list[str], resume: bool) -> dict[str, torch.Tensor]:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from megatron_fp8.integrations.lightning import Fp8Callback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            if "recompute" in options:
                self.model.gradient_checkpointing_enable()

        def configure_model(self) -> None:
            if way == "fsdp2":
                for layer in self.model.model.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, _: torch.Tensor, index: int) -> torch.Tensor:
            rows = rows_of(index)  # resumed, Lightning does not find its place in the loader
            return self.model(input_ids=rows, labels=rows).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=2 if "accumulate" in options else 1,
        precision="bf16-mixed" if "bf16" in options and way == "ddp" else "32-true",
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy() if way == "ddp" else ModelParallelStrategy(2, 1),
        logger=False,
        callbacks=[
            Fp8Callback(),
            ModelCheckpoint(
                folder / ("resumed" if resume else "whole"), "{step}", every_n_train_steps=STOP, save_top_k=-1
            ),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.utils.data.DataLoader(torch.zeros(100), batch_size=1)
    trainer.fit(module, rows, ckpt_path=folder / "whole" / f"step={STOP}.ckpt" if resume else None)
    return state_of(module, trainer.optimizers[0])


def compare(folder: Path, library: str, way: str, options: list[str]) -> None:
    """One case: both trainings, compared on this rank."""
    from accelerate.state import AcceleratorState

    train = {"transformers": by_transformers, "accelerate": by_accelerate, "lightning": by_lightning}[library]
    with shards_on_cpu() if way == "fsdp2" else nullcontext():
        AcceleratorState._reset_state(reset_partial_state=True)
        whole, resumed = (train(folder, way, options, resume) for resume in (False, True))
    differ = [name for name in whole if not torch.equal(whole[name], resumed[name])]
    assert whole.keys() == resumed.keys() and not differ, (
        f"{len(differ)} of {len(whole)} differ: {differ[:3]}"
    )
    weight = next(value for name, value in whole.items() if name.endswith("q_proj.weight"))
    case = ",".join([library, way, *options])
    print(
        f"{case}: rank {dist.get_rank()} has the same {len(whole)} tensors, {len(weight)} rows of 32",
        flush=True,
    )


def main() -> None:
    folder, *cases = sys.argv[1:]
    for number, case in enumerate(cases):
        library, way, *options = case.split(",")
        compare(Path(folder) / str(number), library, way, options)


if __name__ == "__main__":
    main()
