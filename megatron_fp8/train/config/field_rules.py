"""Rules for every option of a run, and for combinations, as data.

Rules of Megatron-Core's own model fields are in mcore/config/fields.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ...mcore.config.rules import (
    FLAG,
    FLOAT32,
    LEAST,
    NOT_NEGATIVE,
    POSITIVE,
    Relation,
    Rule,
    check,
    check_relation,
    integer,
    list_of,
    number,
    one_of,
    optional,
    text,
)
from ...telemetry.stat_registry import TENSORS

_ITERATIONS = integer(1, 2**31 - 1, "iterations")
_ITERATIONS_OR_0 = integer(0, 2**31 - 1, "iterations")
_PATH = Rule("a path, as text", lambda v: isinstance(v, str))  # user_paths.py checks the path
_ROWS = integer(1, 2**24, "rows")


def _is_split(value: Any) -> bool:
    """Whether a split has plain decimal numbers: Megatron-Core reads only digits and points as its weights."""
    if not isinstance(value, str) or not re.fullmatch(
        r" *\d+(\.\d+)? *(, *\d+(\.\d+)? *){2}", value, re.ASCII
    ):
        return False
    weights = [float(part) for part in value.split(",")]
    return weights[0] > 0 and math.isfinite(sum(weights)) and weights[0] / sum(weights) > 1e-9


_SPLIT = Rule("three decimal weights, of which the first is not 0, such as '96,4,0'", _is_split)


def _is_watchdog(value: Any) -> bool:
    """Whether the value is 0 or at least 1 s: on a busy machine a shorter limit would often be exceeded."""
    return type(value) in (int, float) and (value == 0 or 1 <= value <= 10**6)


TRAIN: dict[str, Rule] = {
    "train_iters": _ITERATIONS,
    "micro_batch_size": integer(1, 2**16, "sequences"),
    "global_batch_size": integer(1, 2**24, "sequences"),
    "seq_length": integer(1, 2**24, "tokens"),
    "seed": integer(0, 2**32 - 1),  # as NumPy's seeds
    "max_skipped_steps": integer(0, 2**31 - 1, "steps"),
    "check_replicas_every": _ITERATIONS_OR_0,
    "rewind_on_spike": integer(0, 2**31 - 1, "rewinds"),
    "eval_interval": _ITERATIONS_OR_0,
    "eval_iters": integer(0, 2**24, "global batches"),
    "log_interval": _ITERATIONS,
    "deterministic": optional(FLAG),
    "threads": integer(0, 1024, "threads"),
    "distributed_timeout_minutes": integer(1, 10**6, "minutes"),
    "watchdog": Rule("0, or a number of seconds from 1 to 1e6", _is_watchdog, edges=(1, 10**6)),
    "count_saved": FLAG,
    "cuda_graphs": FLAG,
}
OPTIMIZER: dict[str, Rule] = {
    "lr": number(0, FLOAT32, without=[0]),
    "min_lr": NOT_NEGATIVE,
    "lr_warmup_iters": _ITERATIONS_OR_0,
    "lr_decay_iters": optional(_ITERATIONS),
    "lr_decay_style": one_of("cosine", "linear", "constant", "inverse-square-root"),
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": number(0, 1, without=[1]),
    "adam_beta2": number(0, 1, without=[1]),
    "adam_eps": number(LEAST, 1),
    "clip_grad": NOT_NEGATIVE,
    "state_dtype": one_of("float32", "fp8"),
    "loss_scale": optional(POSITIVE),
    "initial_loss_scale": POSITIVE,
    "min_loss_scale": POSITIVE,
    "max_loss_scale": POSITIVE,
    "loss_scale_window": integer(1, 2**31 - 1, "steps"),
    "hysteresis": integer(1, 2**31 - 1, "overflows"),
    "use_distributed_optimizer": FLAG,
    "overlap_grad_reduce": FLAG,
    "overlap_param_gather": FLAG,
    "reuse_grad_buf_for_mxfp8_param_ag": optional(FLAG),
}
DATA: dict[str, Rule] = {
    "paths": list_of(_PATH),
    "column": optional(text("the name of a column")),
    "loss": one_of("all", "assistant"),
    "tokenizer": optional(_PATH),
    "split": _SPLIT,
    "cache_dir": optional(_PATH),
}
CHECKPOINT: dict[str, Rule] = {
    "save_interval": Rule(
        f"{_ITERATIONS_OR_0.words}, or 'never'",
        lambda v: v == "never" or _ITERATIONS_OR_0.holds(v),
        edges=_ITERATIONS_OR_0.edges,
    ),
    "keep_last": integer(0, 2**31 - 1, "checkpoints"),
    "async_save": FLAG,
    "folder": optional(_PATH),
    "accept": list_of(text("the name of a setting")),
}
TELEMETRY: dict[str, Rule] = {
    "every": _ITERATIONS_OR_0,
    "windows": list_of(list_of(optional(_ITERATIONS_OR_0), 2)),
    "sites": list_of(text("a glob, or 're:' and a regular expression")),
    "tensors": list_of(one_of(*TENSORS)),
    "statistics": list_of(text("the name of a statistic")),
    "what_if": list_of(text("the name of a recipe")),
    "te_config": optional(_PATH),
    "wandb": FLAG,
}
POSITION_RULES: dict[str, Rule] = {
    "position_embedding_type": one_of("rope", "learned_absolute", "none"),
    "rotary_percent": number(0, 1, without=[0]),
    "rotary_base": integer(2, 2**53),
    "rope_scaling": FLAG,
    "rope_scaling_factor": number(1, 1e6),
}
"""The model section's position fields: GPTModel's, not its config's."""
MODEL: dict[str, Rule] = {
    "vocab_size": optional(_ROWS),
    "make_vocab_size_divisible_by": _ROWS,
    "padded_vocab_size": optional(_ROWS),
    **POSITION_RULES,
    "share_embeddings_and_output_weights": FLAG,
}
"""The model's options outside its TransformerConfig."""
TOP: dict[str, Rule] = {
    "run_dir": _PATH,
    "resume": Rule(
        "'auto', 'never' or the path of a checkpoint", lambda v: isinstance(v, str) and bool(v.strip())
    ),
    "dry_run": FLAG,
    "debug": FLAG,
}
RULES: dict[str, dict[str, Rule]] = {
    "train": TRAIN,
    "optimizer": OPTIMIZER,
    "data": DATA,
    "checkpoint": CHECKPOINT,
    "telemetry": TELEMETRY,
    "model": MODEL,
    "": TOP,
}
"""Section ('' for options outside of sections) -> option -> rule."""


def _few_sequences(iterations: str) -> Relation:
    return Relation(
        (iterations, "global_batch_size"),
        "together they are at most 2,147,483,647 sequences",
        lambda s: getattr(s, iterations) * s.global_batch_size < 2**31,
    )


RELATIONS: dict[str, tuple[Relation, ...]] = {
    "train": (_few_sequences("train_iters"), _few_sequences("eval_iters")),
    "optimizer": (
        Relation(
            ("min_lr", "lr"),
            "the learning rate falls to min_lr, which is at most lr",
            lambda s: s.min_lr <= s.lr,
        ),
        Relation(
            ("lr", "adam_beta1"),
            "Adam's first step has the size lr / (1 - adam_beta1), which must be below 3.4e38, as float32 is",
            lambda s: s.lr < FLOAT32 * (1 - s.adam_beta1),
        ),
        Relation(
            ("lr", "weight_decay"),
            "a step takes their product off each weight, which must be below 3.4e38, as float32 is",
            lambda s: s.lr * s.weight_decay < FLOAT32,
        ),
        Relation(
            ("min_loss_scale", "initial_loss_scale", "max_loss_scale"),
            "they must be in this order",
            lambda s: s.min_loss_scale <= s.initial_loss_scale <= s.max_loss_scale,
        ),
        Relation(
            ("overlap_param_gather", "use_distributed_optimizer", "overlap_grad_reduce"),
            "overlap_param_gather needs the other two",
            lambda s: not s.overlap_param_gather or (s.use_distributed_optimizer and s.overlap_grad_reduce),
        ),
    ),
}


def check_rules(section: str, values: Any) -> None:
    """Raise ValueError if an option of `section` (or '') breaks its rule, or several break a relation."""
    prefix = f"{section}." if section else ""
    for name, rule in RULES[section].items():
        check(f"{prefix}{name}", getattr(values, name), rule)
    for relation in RELATIONS.get(section, ()):
        check_relation(values, relation, prefix)
