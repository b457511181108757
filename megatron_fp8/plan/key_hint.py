"""Suggestions for unknown config keys: typos, wrong sections, other programs' names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .settings import NOT_A_KEY

OTHER_WORDS = {
    "train.train_iters": "iters iterations steps max_steps num_steps epochs num_epochs num_train_epochs",
    "train.micro_batch_size": "batch_size local_batch_size per_device_train_batch_size",
    "train.global_batch_size": "gradient_accumulation_steps",
    "train.seq_length": "seq_len sequence_length max_seq_len max_length context_length block_size",
    "optimizer.lr": "learning_rate",
    "optimizer.lr_warmup_iters": "warmup warmup_steps warmup_iters",
    "optimizer.clip_grad": "max_grad_norm max_norm",
    "model.fp8_recipe": "recipe",
    "model.num_layers": "n_layers layers num_hidden_layers",
    "model.tensor_model_parallel_size": "tp tp_size tensor_parallel_size tensor_parallel_degree",
    "model.pipeline_model_parallel_size": "pp pp_size pipeline_parallel_size pipeline_parallel_degree",
    "data.paths": "dataset dataset_path train_data",
    "data.tokenizer": "tokenizer_path tokenizer_model",
    "checkpoint.save_interval": "save_steps save_every",
    "run_dir": "output_dir out_dir save save_dir",
    "resume": "load resume_from_checkpoint",
    "megatron-fp8 launch --ranks N train": "ranks nproc_per_node nproc num_processes",
}
"""Key or command -> its names (last parts) in transformers' Trainer, torchtitan and Megatron-LM's scripts."""
_KEY_OF_WORD = {word: key for key, words in OTHER_WORDS.items() for word in words.split()}


def nearest_key(given: str, known: Iterable[str]) -> str | None:
    """Returns the known dotted key most similar to ``given``, in any section; None if none is similar."""
    keys = (*known, "model.fp8_format")

    def likeness(key: str) -> tuple[bool, float]:
        """Returns whether the last parts are equal, and the similarity of the names, with or without sections."""
        section, _, last = key.rpartition(".")
        names = {f"{section}_{last}", last}
        return last == own_last, max(_ratio(one, name) for one in own_names for name in names)

    own_last = given.rpartition(".")[2]
    own_names = {given.replace(".", "_"), own_last}
    nearest = max(keys, key=likeness)
    same, ratio = likeness(nearest)
    if not same and ratio < 1 and own_last in _KEY_OF_WORD:
        nearest, ratio = _KEY_OF_WORD[own_last], 1
    if nearest == "model.fp8_format":
        nearest = NOT_A_KEY
    return nearest if same or ratio >= 0.6 else None


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
