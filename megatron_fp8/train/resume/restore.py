"""A checkpoint as a model for inference, in this launch's layout.

A checkpoint stores its run's config, so its folder is enough. The parallel layout is not the run's: it has as many
tensor-parallel ranks as were launched (by default one), one pipeline stage and no sequence parallelism. Checkpoints do
not depend on the layout that wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.atomic_io import as_value_error
from ...files.checkpoint import find_checkpoint, missing_checksum_note, read_manifest
from ...files.manifest import Manifest
from ...fp8_utils import quantizes, recipe_name_of, switch_of
from ...mcore.checkpoint.loader import load_weights
from ...mcore.sites import check_plan
from ...plan.settings import DEFAULT_RECIPE
from ...recipe import check_recipe_name
from ...state.guard import as_overrides
from ..config import run_config
from ..config.model_fields import IMPORT_PATHS
from ..config.model_section import padded_vocab_size, transformer_config
from ..config.run_config import RunConfig, tokens_of_microbatch
from ..data.tokenizers import Tokenizer, load_tokenizer, tokenizer_file
from ..launch import parallel
from ..launch.config_consistency import agree_on_inputs, run_facts
from ..model import EXCLUDED_WEIGHTS, build_model
from ..run_record import later_training_note
from . import checkpoint_compat
from .checkpoints import check_together

ONE_STAGE: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
}
"""Settings of a model section for a layout of one stage whose ranks split nothing but weights."""
# Settings of a run's model section that concern training and not the model.
_FOR_INFERENCE: dict[str, Any] = {
    **ONE_STAGE,
    "recompute_granularity": None,
    "moe_fp8_dispatch": False,  # the experts read the same codes in either case
    "fp8_guard": False,
    "fp8_param": False,  # prepare_for_inference sets it
    "fp4_param": False,
    "fp8_high_precision_warmup": 0.0,
    "fp8_high_precision_healing": 0.0,
    "fp8_high_precision_healing_parts": None,
}


@dataclass
class RestoredModel:
    """A trained model on the ranks of this launch. ``run`` has this launch's layout; vocab_size is padded.

    ``lines``: notes about the checkpoint for the user; ``facts``: from its manifest.
    """

    model: Any
    run: RunConfig
    tokenizer: Tokenizer
    vocab_size: int
    folder: Path
    iteration: int
    lines: list[str]
    facts: dict[str, Any]


def choose_recipe(section: Any, recipe: str | None, fp8: str | None) -> None:
    """Apply `--recipe` and `--fp8` to a model section, in place.

    Args:
        recipe: name of a recipe; 'bf16': no FP8 and no FP4; None: the run's own.
        fp8: 'hybrid' or 'e4m3'; None: the run's own, or hybrid if it has none.

    Raises ValueError if the recipe is unknown, or if the two contradict each other.
    """
    if recipe in ("bf16", "nvfp4"):
        if fp8 is not None:
            raise ValueError(f"--recipe {recipe} and --fp8 {fp8} contradict each other: give one of them")
        section.fp8 = section.fp8_recipe = None
        section.fp4 = None if recipe == "bf16" else "e2m1"
        return
    if recipe is not None:
        section.fp8_recipe = check_recipe_name(recipe)
        section.fp8 = section.fp8 or "hybrid"
    if fp8 or recipe:
        section.fp4 = None
    section.fp8 = fp8 or section.fp8
    if section.fp8:
        section.fp8_recipe = section.fp8_recipe or DEFAULT_RECIPE


def keep_layers(run: RunConfig, manifest: Manifest) -> None:
    """Keep the same layers in FP8 as in training, by changes to a run's config in place.

    They are sites that the guard had moved when the checkpoint was saved, and the number of tokens for fp8_size_filter.
    Explicit settings of the config take precedence.
    """
    moved_sites = as_overrides(manifest.state) if run.model.fp8_guard else {}
    run.model.fp8_overrides = {**moved_sites, **run.model.fp8_overrides}
    if run.model.fp8_size_filter_tokens is None:
        run.model.fp8_size_filter_tokens = tokens_of_microbatch(run)


def restore(
    checkpoint: str,
    launch: Any,
    options: list[str],
    *,
    config: str | None = None,
    recipe: str | None = None,
    fp8: str | None = None,
) -> RestoredModel:
    """Build and load the model of a checkpoint. Collective over the launch's ranks, whose start-up checks it runs.

    Args:
        checkpoint: a checkpoint's folder, a folder of checkpoints, or a run's folder.
        options: options of the run config, over the run's own (`--model.NAME=VALUE`).
        config: a run config to use in place of the checkpoint's.
        recipe, fp8: as in choose_recipe.

    Raises ValueError on every rank if there is no checkpoint, if it is damaged or of another model, or if an option is
    wrong.
    """
    folder = find_checkpoint(Path(checkpoint))
    manifest = read_manifest(folder)
    saved = checkpoint_compat.run_of_manifest(manifest)
    run, tokenizer, lines = read_run(folder, manifest, saved, options, config=config, recipe=recipe, fp8=fp8)
    vocab_size = padded_vocab_size(run.model, tokenizer.vocab_size)
    if vocab_size % launch.world_size:
        raise ValueError(
            f"the vocabulary of {vocab_size} does not divide among {launch.world_size} ranks"
            f" ({', '.join(launch.variables[1:])}): launch fewer"
        )
    for name, value in _FOR_INFERENCE.items():
        setattr(run.model, name, value)
    run.model.tensor_model_parallel_size = launch.world_size
    run.train.micro_batch_size = run.train.global_batch_size = 1
    settings = transformer_config(run.model)
    join(folder, manifest, run, tokenizer, launch)
    model = build_model(settings, run, vocab_size)
    bad = load_weights(folder, model, left_out=EXCLUDED_WEIGHTS)
    check_plan([model])
    lines += later_training_note(Path(checkpoint), folder)
    if bad:
        lines.append(f"{bad} holds NaN or Inf: this model's output is only useful to find the cause")
    return RestoredModel(model, run, tokenizer, vocab_size, folder, manifest.iteration, lines, manifest.facts)


def read_run(
    folder: Path,
    manifest: Manifest,
    saved: dict[str, Any],
    options: list[str],
    *,
    config: str | None,
    recipe: str | None,
    fp8: str | None,
) -> tuple[RunConfig, Tokenizer, list[str]]:
    """The config of a checkpoint's run, its tokenizer, and notes for the user.

    Args:
        saved: the run's sections.
        options, config, recipe, fp8: as in ``restore``.

    Raises ValueError if the checkpoint is of another model, or if an option is wrong.
    """
    run = run_of(folder, saved, config, options)
    tokenizer = load_tokenizer(tokenizer_file(run.data.tokenizer, folder))
    accepted = checkpoint_compat.check(run, folder, manifest, tokenizer)
    keep_layers(run, manifest)
    choose_recipe(run.model, recipe, fp8)
    if config is None:
        refuse_its_code(folder, saved["model"], run.model)
    lines = missing_checksum_note(manifest)
    if accepted:
        lines.append(f"accepted, it computes something else: {', '.join(map(str, accepted))}")
    return run, tokenizer, lines


def join(folder: Path, manifest: Manifest, run: RunConfig, tokenizer: Tokenizer, launch: Any) -> None:
    """Connect the ranks; all have the same settings and the same undamaged checkpoint. Raises ValueError."""
    launch.barrier.agree("settings", run_facts(run, tokenizer, launch.world_size))
    agree_on_inputs("checkpoint", launch, [], (folder, manifest))
    parallel.join(launch, run.model, run.train)
    check_together(folder, manifest)


def run_of(folder: Path, saved: dict[str, Any] | None, config: str | None, options: list[str]) -> RunConfig:
    """The config of a checkpoint's run, with ``options`` applied.

    ``saved``: the run's sections in its manifest; ``config``: a file used in place of them. Raises ValueError if there
    is neither, or if the run cannot be built here.
    """
    if config is not None:
        return run_config.load(config, *options)
    if not saved or "model" not in saved:
        raise ValueError(f"{str(folder)!r} has no config of its run: give it with --config=FILE")
    sections = {name: dict(values) for name, values in saved.items() if isinstance(values, dict)}
    for section, name in _NOT_FROM_A_CHECKPOINT:
        sections.get(section, {}).pop(name, None)
    with as_value_error(f"the run of the checkpoint {str(folder)!r} cannot be built here", errors=ValueError):
        return run_config.parse(options, base=sections)


# Code to import, output paths and accepted changes count only from the user's own config or command line.
_NOT_FROM_A_CHECKPOINT = (
    *(("model", name) for name in (*IMPORT_PATHS, "config_logger_dir")),
    ("checkpoint", "accept"),
    ("telemetry", "te_config"),
    ("telemetry", "wandb"),
)


def refuse_its_code(folder: Path, saved: dict[str, Any], section: Any) -> None:
    """Raise ValueError if only the checkpoint names code that the model needs: such code is never imported."""
    name = f"{switch_of(section)}_quantizer_factory"
    path, recipes = saved.get(name), {recipe_name_of(section), *section.fp8_overrides.values()}
    if path is not None and quantizes(section) and "custom" in recipes and getattr(section, name) is None:
        raise ValueError(
            f"the checkpoint {str(folder)!r} names code, {name}={path!r}, and code that a checkpoint names"
            f" is not imported: if you know it, add --model.{name}={path}; or choose a recipe"
            " with --recipe."
        )
