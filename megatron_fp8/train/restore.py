"""From a checkpoint to a model for inference: the run's config, its tokenizer, its weights in the layout of this launch.

A checkpoint remembers its run, so a folder is all that is needed. The parallel layout is not the run's: as many tensor
parallel ranks as were launched (by default one), one pipeline stage, no sequence parallelism; checkpoints do not depend
on the layout that wrote them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_fp8.checkpoint_files import check_files, find_checkpoint, read_manifest
from megatron_fp8.mcore.checkpoint import load_weights
from megatron_fp8.mcore.sites import check_plan
from megatron_fp8.recipe import check_recipe_name
from megatron_fp8.train import config as run_config
from megatron_fp8.train import parallel
from megatron_fp8.train.config import RunConfig, tokens_of_microbatch
from megatron_fp8.train.model import build_model
from megatron_fp8.train.model_section import padded_vocab_size, transformer_config
from megatron_fp8.train.tokenizers import Tokenizer, load_tokenizer

_ALONE = (
    "--model.pipeline_model_parallel_size=1",
    "--model.virtual_pipeline_model_parallel_size=null",
    "--model.context_parallel_size=1",
    "--model.expert_model_parallel_size=1",
    "--model.sequence_parallel=false",
    "--model.recompute_granularity=null",
    "--model.fp8_param=false",  # prepare_for_inference does what is needed
    "--model.fp8_high_precision_warmup=0.0",
    "--model.fp8_high_precision_healing=0.0",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=1",
)


@dataclass
class Restored:
    """A trained model on the ranks of this launch. ``run`` has this launch's layout; vocab_size is the tokenizer's."""

    model: Any
    run: RunConfig
    tokenizer: Tokenizer
    vocab_size: int
    folder: Path
    iteration: int


def recipe_options(recipe: str | None, fp8: str | None, default: str | None = None) -> list[str]:
    """Options of the model section for `--recipe` and `--fp8`.

    Args:
        recipe: a recipe's name; 'bf16' for no FP8; None for the run's own.
        fp8: 'hybrid' or 'e4m3'; None for the run's own, or hybrid where it has none.
        default: the run's own fp8.
    """
    if recipe == "bf16":
        if fp8 is not None:
            raise ValueError(f"--recipe=bf16 and --fp8={fp8} contradict each other: give one of them")
        return ["--model.fp8=null", "--model.fp8_format=null", "--model.fp8_recipe=null"]
    if recipe is not None:
        check_recipe_name(recipe)
    if recipe is None:
        return [] if fp8 is None else [f"--model.fp8={fp8}"]
    return [
        f"--model.fp8={fp8 or default or 'hybrid'}",
        f"--model.fp8_format={recipe}",
        "--model.fp8_recipe=null",
    ]


def restore(
    checkpoint: str,
    launch: Any,
    options: list[str],
    *,
    config: str | None = None,
    recipe: str | None = None,
    fp8: str | None = None,
) -> Restored:
    """Build and load the model of a checkpoint. Collective over the launch's ranks, which it makes meet.

    Args:
        checkpoint: a checkpoint's folder, a folder of them, or a run's.
        options: of the run config, over the run's own (`--model.NAME=VALUE`).
        config: a run config to use in place of the one that the checkpoint remembers.
        recipe, fp8: as recipe_options.

    Raises ValueError, on every rank: there is no checkpoint, it is damaged or of another model, or an option is wrong.
    """
    folder = find_checkpoint(Path(checkpoint))
    manifest = read_manifest(folder)
    trained = _run_of(folder, manifest.facts.get("run"), config)
    layout = (*_ALONE, f"--model.tensor_model_parallel_size={launch.world_size}")
    wanted = recipe_options(recipe, fp8, trained.model.fp8)
    tokenizer = load_tokenizer(trained.data.tokenizer)
    vocab_size = padded_vocab_size(trained.model, tokenizer.vocab_size)
    with _as_file(trained.to_dict()) as path:
        run = run_config.load(path, *layout, f"--model.vocab_size={vocab_size}", *wanted, *options)
    if vocab_size % launch.world_size:
        raise ValueError(
            f"the vocabulary of {vocab_size} does not divide among {launch.world_size} ranks: launch fewer"
        )
    settings = transformer_config(run.model)
    if settings.fp8_size_filter_tokens is None:
        settings.fp8_size_filter_tokens = tokens_of_microbatch(
            trained
        )  # the same layers in FP8 as in training
    parallel.join(launch, run.model, run.train)
    parallel.on_first_rank(lambda: check_files(folder, manifest))
    model = build_model(settings, run, vocab_size)
    load_weights(folder, model)
    check_plan([model])
    return Restored(model, run, tokenizer, tokenizer.vocab_size, folder, manifest.iteration)


def _run_of(folder: Path, saved: Any, config: str | None) -> RunConfig:
    if config is not None:
        return run_config.load(config)
    if not isinstance(saved, dict) or "model" not in saved:
        raise ValueError(
            f"{str(folder)!r} does not say what run it is of: give its config with --config=FILE"
        )
    with _as_file(saved) as path:
        return run_config.load(path)


@contextmanager
def _as_file(values: dict[str, Any]) -> Iterator[str]:
    """A run's values as a config file, for as long as it is read: parsing checks every key and type."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(values, file)
        file.flush()
        yield file.name


def run_folder_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint's folder belongs to; of a checkpoint elsewhere, its own parent."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
