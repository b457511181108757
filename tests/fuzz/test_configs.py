"""Run configs: two iterations are trained, or one line refuses before training starts; never anything else.

Values are those that a rule admits, at its edges and beyond, and nonsense; several keys at once, since what
two rules admit may not go together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.train.config.run_config import known_keys, rule_of
from tests.support.draws import draws
from tests.support.file_edits import byte_edits, edited
from tests.support.fuzz_targets import CONFIG, FIXTURES, fresh
from tests.support.invalid_values import NONSENSE, WRITTEN, edges
from tests.support.run_in_process import Heard, done_or_refused

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
LIKELY: dict[str, tuple[Any, ...]] = {
    "model.fp8": ("hybrid", "e4m3", None),
    "model.fp8_recipe": RECIPES,
    "model.fp8_overrides": ({"*.linear_fc2": "bf16"}, {"*": "mxfp8"}, {"*.linear_fc1": {"wgrad": "bf16"}}),
    "model.num_layers": (1, 2, 3),
    "model.hidden_size": (16, 32, 48, 96),
    "model.ffn_hidden_size": (16, 33, 64),
    "model.num_attention_heads": (1, 2, 3, 4),
    "model.num_query_groups": (1, 2),
    "model.kv_channels": (8, 16, 6),
    "model.normalization": ("LayerNorm", "RMSNorm"),
    "model.activation_func": ("gelu", "silu", "relu", "squared_relu"),
    "model.position_embedding_type": ("rope", "learned_absolute", "none"),
    "model.num_moe_experts": (1, 2, 4),
    "model.moe_router_topk": (1, 2),
    "model.moe_grouped_gemm": (True, False),
    "model.recompute_granularity": ("full", "selective"),
    "model.recompute_method": ("uniform", "block"),
    "model.recompute_num_layers": (1, 2),
    "model.params_dtype": ("bfloat16", "float32"),
    "model.multi_latent_attention": (True,),
    "model.mtp_num_layers": (1,),
    "model.fp8_param": (True,),
    "model.fp16": (True,),
    "train.train_iters": (1, 2),
    "train.micro_batch_size": (1, 2),
    "train.global_batch_size": (1, 2, 3),
    "train.seq_length": (1, 8, 16, 32, 33),
    "train.eval_iters": (0, 1),
    "optimizer.use_distributed_optimizer": (True,),
    "optimizer.state_dtype": ("fp8", "float32"),
    "optimizer.lr": (1e-3, 1e30, 1e-30),
    "telemetry.every": (0, 1, 2),
    "telemetry.what_if": (["mxfp8"], ["rowwise", "delayed"]),
    "checkpoint.save_interval": (0, 1, "never"),
    "checkpoint.async_save": (True,),
    "data.split": ("1,0,0", "50,50,0"),
}
NOT_HERE = {
    "debug",  # shows tracebacks
    "run_dir",  # somewhere else
    "checkpoint.folder",
    "data.cache_dir",
    "model.config_logger_dir",
    "telemetry.wandb",  # would look for a network
    "train.threads",  # of this process
    "train.train_iters",  # beyond LIKELY it takes long
    "train.distributed_timeout_minutes",
}
KEYS = [key for key in known_keys() if key not in NOT_HERE]


def values(key: str) -> st.SearchStrategy[Any]:
    """Of one key: often one that can be meant."""
    if key in NOT_HERE:
        return st.sampled_from(LIKELY[key])
    rule = rule_of(key)
    at_edges = [] if rule is None else edges(rule)
    wild = st.sampled_from([*at_edges, *(value for value in NONSENSE if not isinstance(value, bytes))])
    return st.sampled_from(LIKELY[key]) | wild if key in LIKELY else wild


def settings(keys: list[str], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Values of a few keys."""
    return st.lists(st.sampled_from(keys), min_size=1, max_size=most, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({key: values(key) for key in chosen})
    )


def write(path: Path, changed: dict[str, Any]) -> Path:
    """The config of two tiny layers, with some keys changed."""
    content: dict[str, Any] = {section: dict(keys) for section, keys in CONFIG.items()}
    for key, value in changed.items():
        section, _, name = key.rpartition(".")
        (content.setdefault(section, {}) if section else content)[name] = value
    path.write_text(yaml.safe_dump(content, allow_unicode=True))
    return path


def train(config: Path, *options: str) -> Heard:
    """Two iterations at most."""
    return done_or_refused("train", "--config", config, "--run_dir=again", *options)


def train_or_build(place: Path, changed: dict[str, Any]) -> Heard:
    """What is admitted and would take days, as a batch of 16 million sequences, is built alone."""
    long = any(isinstance(value, int) and value > 99 for value in changed.values())
    return train(write(place / "drawn.yaml", changed), *(["--dry-run"] if long else []))


@draws(3, often=2, suppress_health_check=[FIXTURES])
@given(settings(list(LIKELY), 8))
def test_settings_that_can_be_meant(originals, place, changed):
    fresh(place, originals, "corpus.txt", "cache")
    train_or_build(place, changed)


@draws(3, often=2, suppress_health_check=[FIXTURES])
@given(settings(KEYS, 2), settings(list(LIKELY), 3))
def test_any_setting_among_those(originals, place, changed, more):
    fresh(place, originals, "corpus.txt", "cache", "run")
    train_or_build(place, {**more, **changed})


@draws(6, often=2, suppress_health_check=[FIXTURES])
@given(
    settings(KEYS, 2),
    settings(list(LIKELY), 3),
    st.sampled_from(("estimate", "doctor", "bench --only quantise --shape 16x16x1")),
)
def test_any_setting_where_nothing_trains(originals, place, changed, more, command):
    fresh(place, originals, "corpus.txt", "cache", "run")
    done_or_refused(*command.split(), "--config", write(place / "drawn.yaml", {**more, **changed}))


@draws(2, often=2, suppress_health_check=[FIXTURES])
@given(byte_edits())
def test_other_bytes_in_a_config(originals, place, edits):
    path = fresh(place, originals, "corpus.txt", "cache", "config.yaml") / "config.yaml"
    path.write_bytes(edited(path.read_bytes(), edits))
    short = ("--train.train_iters=1", "--train.global_batch_size=1", "--train.eval_iters=0")
    train(path, "--data.cache_dir=cache", "--checkpoint.folder=kept", *short)


@draws(5, often=2, suppress_health_check=[FIXTURES])
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(WRITTEN)), min_size=1, max_size=3))
def test_overrides(originals, place, options):
    fresh(place, originals, "corpus.txt", "cache", "config.yaml")
    train(place / "config.yaml", *(f"--{key}={text}" for key, text in options), "--dry-run")


def test_what_nobody_changed_trains(originals, place):
    """Else these tests would show nothing."""
    fresh(place, originals, "corpus.txt", "cache")
    assert train(write(place / "drawn.yaml", {})).code == 0
