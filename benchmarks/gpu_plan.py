"""What a GPU run consists of, and in which order: groups of checks, each for a process of its own, with its time.

Names only: nothing that opens a GPU, or that fails to import where something is missing, is loaded here. Each module has
``checks()``, the functions by these names.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_environment import CARRY, installed

FIVE = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
SIX = (*FIVE[:4], "blockwise-fp32", "mxfp8")
SEVEN = (*SIX, "nvfp4")
BLOCKS = ("blockwise", "blockwise-fp32")


class NotRun(Exception):
    """A check does not apply here; its text says why."""


@dataclass(frozen=True)
class Group:
    """Checks that share a process. seconds: for all of them; each: for one. megatron: they train with Megatron-Core."""

    name: str
    module: str
    checks: tuple[str, ...]
    seconds: float
    each: float
    megatron: bool = False


def of(what: str, module: str, recipes: tuple[str, ...], seconds: float, each: float, **more: bool) -> Group:
    """A check for each recipe."""
    return Group(
        what, f"benchmarks.{module}", tuple(f"{what} {name}" for name in recipes), seconds, each, **more
    )


def bench(section: str, seconds: float, *, megatron: bool = False, cases: tuple[str, ...] = ()) -> Group:
    """A section of the benchmark."""
    names = tuple(f"bench {section} {case}" for case in cases) or (f"bench {section}",)
    return Group(f"bench {section}", "benchmarks.gpu_sections", names, seconds, seconds, megatron)


VARIANTS = Group("variants", "benchmarks.gpu_variants", ("variants",), 200, 200)
ROOFLINE, GEMM, CASTS = bench("roofline", 60), bench("gemm", 90), bench("quantise", 90)

# What decides most comes first: are the bits right, is it fast at all? What takes long, or needs other packages, is last.
CHECK = (
    VARIANTS,
    Group("digests", "benchmarks.gpu_checks", ("digests",), 120, 120),
    of("codes", "gpu_checks", SEVEN, 150, 60),
    of("gemm", "gpu_checks", SEVEN, 120, 60),
    Group("added products", "benchmarks.gpu_checks", ("added products",), 30, 30),
    of("own product", "gpu_checks", BLOCKS, 60, 30),
    of("mx scales", "gpu_checks", ("blockwise", "mxfp8", "nvfp4"), 60, 30),
    of("no waiting", "gpu_checks", SEVEN, 60, 30),
    ROOFLINE,
    GEMM,
    CASTS,
    of("gradients", "gpu_checks", SEVEN, 90, 45),
    of("experts", "gpu_checks", SEVEN, 60, 30),
    of("grouped product", "gpu_grouped", ("rowwise", "mxfp8"), 40, 20),
    of("graph", "gpu_checks", SIX, 60, 30),
    of("captured step", "gpu_graph", FIVE, 90, 45),
    Group("update", "benchmarks.gpu_fused", ("update",), 45, 45),
    of("masters", "gpu_fused", ("delayed", "tensorwise", "blockwise"), 60, 30),
    of("attention", "gpu_attention", ("flash", "cudnn"), 40, 20),
    of("training", "gpu_training", FIVE, 240, 90, megatron=True),
    of("graph training", "gpu_training", ("delayed", "tensorwise", "blockwise"), 90, 45, megatron=True),
    of("fused", "gpu_fused", FIVE, 180, 60, megatron=True),
    of("compiled", "gpu_graph", FIVE, 300, 120),
    of("te linear", "gpu_te", ("delayed", "tensorwise", "tensorwise-pow2", "blockwise", "mxfp8"), 60, 30),
    of("training te", "gpu_te", ("delayed", "tensorwise", "blockwise", "mxfp8"), 180, 60, megatron=True),
    Group("sanitiser", "benchmarks.gpu_sanitiser", ("sanitiser",), 240, 240),
)
BENCH = (
    VARIANTS,
    ROOFLINE,
    GEMM,
    CASTS,
    bench("fused", 90),
    bench("linear", 150),
    bench("experts", 120),
    bench("expert products", 60),
    bench("layer", 240, cases=("4096", "8192")),
    bench("step", 150, megatron=True),
)


def obstacle(group: Group) -> str | None:
    """Why a group need not be started here; None if nothing is known against it."""
    if not group.megatron or installed("megatron.core"):
        return None
    distribution = next(name for module, name, _ in CARRY if module == "megatron.core")
    return f"{distribution} is not installed (make gpu-wheels, on a machine with network, downloads it)"
