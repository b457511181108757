"""Compiling ahead without a GPU, in a process that does not interpret kernels: prints JSON for test_gpu_variants.py."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks import gpu_groups, gpu_variants
from benchmarks.gpu_common import NotRun, open_machine
from benchmarks.gpu_variants import Variant


def stand_in(name: str, run: Any) -> Variant:
    """Of a kernel whose compiler does something else."""
    return Variant(SimpleNamespace(__name__=name, run=run), (), {"E4M3": True})


def wrong(**kwargs: Any) -> None:
    raise TypeError("type mismatch")


def main() -> None:
    found = gpu_variants.launched(90)
    real = [v for v in found if v.kernel.__name__ == "_row_rstd"]
    others = {"raises": wrong, "aborts": lambda **kwargs: os.abort()}
    hangs = stand_in("hangs", lambda **kwargs: time.sleep(60))
    with mock.patch.object(gpu_variants, "COMPILE_SECONDS", 1.0):
        ((_, _, late),) = gpu_variants.compiling([hangs], 90, 2, launchers=False)
    told: list[dict[str, Any]] = []
    problem = ""
    try:
        some = [stand_in(name, run) for name, run in others.items()]
        gpu_variants.compiled_all([*some, *real], 90, lambda result: told.append(result), launchers=False)
    except AssertionError as error:
        problem = str(error)
    compiled = gpu_groups.kernels()
    said = gpu_variants.compiled_all(real, 90, lambda result: told.append(result), launchers=False)
    after = gpu_groups.kernels()
    grouped = next(v for v in found if v.kernel.__name__ == "_grouped_block_matmul")
    ((_, _, blackwell),) = gpu_variants.compiling([grouped], 100, 1, launchers=False)
    try:
        with mock.patch.object(gpu_variants, "launched", lambda architecture: found):
            dry = gpu_variants.variants(open_machine(dry=True))
    except NotRun as reason:
        dry = str(reason)
    print(
        json.dumps(
            {
                "names": sorted({v.kernel.__name__ for v in found}),
                "count": len(found),
                "real": len(real),
                "kernels": len({v.kernel.__name__ for v in real}),
                "told": told,
                "late": late,
                "problem": problem,
                "compiled": compiled,
                "after": after,
                "blackwell": blackwell,
                "said": said,
                "dry": dry,
            }
        )
    )


if __name__ == "__main__":
    main()
