"""An export's other files: config.json, generation config and tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ..train.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_file
from .checkpoint_reader import Source
from .config import hf_config, model_section
from .directory import CONFIG, GENERATION, TOKENIZER_FILES, find_file, read_json, write_json
from .rotary import stretched_length


def describe(
    source: Source, like: Path | None, vocab_size: int | None, positions: int | None
) -> dict[str, Any]:
    """config.json of a checkpoint's model, without its number format.

    Args:
        like: a directory of the same model, from which other fields are copied.
        vocab_size, positions: override those of the directory or the run.

    Raises ValueError: no family computes the same, the directory is of another model, or a size is unknown.
    """
    section = source.section
    fields = read_json(like / CONFIG) if like else {}
    for name in ("quantization_config", "compression_config"):
        fields.pop(name, None)
    fields.pop("auto_map", None)  # its code is not exported
    tokenizer = None if like else run_tokenizer(source)
    vocab_size = vocab_size or fields.get("vocab_size") or section.get("vocab_size")
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    positions = positions or fields.get("max_position_embeddings") or stretched_length(section)
    positions = positions or source.run.get("train", {}).get("seq_length")
    if vocab_size is None or positions is None:
        missing = "--vocab-size" if vocab_size is None else "--max-position-embeddings"
        raise ValueError(f"{str(source.folder)!r} does not have it: give {missing}=NUMBER.")
    family = (fields.get("architectures") or [None])[0]
    ours = hf_config(section, vocab_size, positions, family)
    if like:
        _check_like(ours, fields, like)
        fields.pop("dtype", None)  # new name of torch_dtype
    elif tokenizer is not None:
        # Otherwise readers use their family's default first token, and these documents have none.
        first = tokenizer.start[0] if tokenizer.start else None
        ours |= {"bos_token_id": first, "eos_token_id": tokenizer.eod}
    return {**fields, **ours, "torch_dtype": str(source.dtype).removeprefix("torch.")}


def _check_like(ours: dict[str, Any], like: dict[str, Any], folder: Path) -> None:
    """Raises ValueError if the directory's model computes something else."""
    theirs = hf_config(
        model_section(like), like["vocab_size"], ours["max_position_embeddings"], ours["architectures"][0]
    )
    for name, value in theirs.items():
        if name == "num_nextn_predict_layers":
            continue  # a directory may lack tensors that its config announces
        if ours[name] != value:
            raise ValueError(
                f"--like={str(folder)!r} is of another model: {name} is {value!r} there and {ours[name]!r} in the "
                "checkpoint."
            )


def run_tokenizer(source: Source) -> Tokenizer | None:
    """The run's tokenizer if known; without a file the tokens are bytes. Raises ValueError if the file has changed
    since."""
    if source.run.get("data") is None:
        return None
    tokenizer = load_tokenizer(_tokenizer_file(source))
    if source.tokenizer not in (None, tokenizer.name):
        raise ValueError(
            f"{str(source.folder)!r} was trained with the tokenizer {source.tokenizer}, and its run's tokenizer is now"
            f" {tokenizer.name} ({_tokenizer_file(source)}): put the file back that it was trained with."
        )
    return tokenizer


def _tokenizer_file(source: Source) -> str | None:
    return tokenizer_file(source.run.get("data", {}).get("tokenizer"), source.folder)


def write_aux_files(folder: Path, source: Source, config: dict[str, Any], like: Path | None) -> None:
    """Write config.json, generation config and tokenizer, from the directory `like` or the run."""
    write_json(folder / CONFIG, config)
    tokenizer = _tokenizer_file(source)
    tokenizer_folder = like or (Path(tokenizer).parent if tokenizer else None)
    if like and (defaults := find_file(like, GENERATION)):
        shutil.copyfile(defaults, folder / GENERATION)
    else:
        names = ["bos_token_id", "eos_token_id"]
        special = {name: config[name] for name in names if name in config}
        has_own = tokenizer_folder and find_file(
            tokenizer_folder, GENERATION
        )  # a chat model, which has other end tokens
        own = (
            read_json(tokenizer_folder / GENERATION)
            if tokenizer_folder and has_own
            else {"_from_model_config": True}
        )
        write_json(folder / GENERATION, {**special, **own})
    if tokenizer_folder is None:  # tokens are bytes, without a tokenizer file
        return
    if tokenizer and not like:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    for name in TOKENIZER_FILES:
        if not (folder / name).exists() and (file := find_file(tokenizer_folder, name)):
            shutil.copyfile(file, folder / name)
    if not like and not (folder / "tokenizer_config.json").exists():
        end = _token(folder / "tokenizer.json", config["eos_token_id"])
        known = {} if end is None else {"eos_token": end}
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **known})


def _token(tokenizer: Path, number: int) -> str | None:
    """Text of a token id in a tokenizers file; None if missing."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    return HuggingFaceTokenizer.from_file(str(tokenizer)).id_to_token(number)
