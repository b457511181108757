"""`megatron-fp8 tokenizer`: trains a tokenizer on the user's text.

Trains a byte-level BPE tokenizer on text and writes it as a Hugging Face tokenizers file, tokenizer.json. A model that is
imported has its own; this is for a model that is trained from the beginning.

  megatron-fp8 tokenizer --out tokenizer.json                       on the Python standard library's source
  megatron-fp8 tokenizer --data my_corpus --out tokenizer.json      files of text, records or chats, or folders of them
  megatron-fp8 train --config one_gpu --data my_corpus --data.tokenizer=tokenizer.json

model.vocab_size of the run must be at least as large; 32768 suits the configs that come with the package.
Of more than 256 MB of text a sample is read, spread over all of it. The same text gives the same file.

Exit codes: 0 done; 2 bad input.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from ..files.terminal import printable
from .cli_common import CommandParser, check_output, run, write_output


def main(arguments: list[str]) -> int:
    """Train a tokenizer and write it; return the exit code."""
    parser = CommandParser("tokenizer", __doc__)
    add = parser.add_argument
    add("--data", nargs="+", default=[], metavar="FILE", help="text (default: Python's own source)")
    add("--column", help="of records: the column to learn (default: text)")
    add("--vocab-size", type=int, default=32768, metavar="N", help="ids, at most (default %(default)s)")
    add("--out", required=True, metavar="FILE", help="where the tokenizer goes, such as tokenizer.json")
    return run(parser, arguments, _tokenizer)


def _tokenizer(options: Namespace) -> None:
    out = check_output("--out", options.out)
    if out.exists():
        raise ValueError(f"--out={options.out} is there already: give another file, or remove it.")
    from .. import mcore

    mcore.install()
    from ..train.data import bpe, corpus
    from ..train.data.documents import files_of

    files = [file for path in options.data for file in files_of(Path(path))]
    files = files or corpus.standard_library_files()
    size = sum(path.stat().st_size for path in files if path.is_file())
    if options.data and not size and all(path.is_file() for path in files):
        raise ValueError(f"--data has no text: {files[0]} is empty.")
    try:
        tokenizer = bpe.train_bpe(files, options.vocab_size, options.column, progress=sys.stderr.isatty())
    except ImportError as error:
        raise ValueError("the package tokenizers is not installed: pip install tokenizers") from error
    write_output("--out", out, tokenizer.to_str(pretty=True) + "\n")
    print(printable(f"wrote       {out}: {tokenizer.get_vocab_size():,} ids, from {size:,} bytes of text"))
    data = "".join(f"{word} " for word in ("--data", *options.data)) if options.data else ""
    print(printable(f"use it      megatron-fp8 train --config one_gpu {data}--data.tokenizer={out}"))
