"""The support matrix says of every device what the backends would decide on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_fp8.backends import BACKENDS, choose_backend
from megatron_fp8.backends import transformer_engine as engine
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native import fp4, probe
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.recipe import RECIPES
from megatron_fp8.study.support_matrix import (
    GENERATIONS,
    RECIPE_NAMES,
    Generation,
    Trial,
    cpu_product,
    documented_cell,
    matrix,
    this_device,
    torch_refusal,
)
from tests.support.architecture import PACKAGE

CELLS = matrix(None, [])
GPUS = [generation for generation in GENERATIONS if not generation.is_cpu]
CPUS = [generation for generation in GENERATIONS if generation.is_cpu]


def as_if_on(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """torch says that it sees such a device, whose products are those that torch documents."""
    if generation.is_cpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: generation.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: generation.capability)
    properties = SimpleNamespace(gcnArchName=f"{generation.architecture}:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0" if generation.architecture else None)
    monkeypatch.setattr(probe.kernels, "refusal", lambda device: None)
    monkeypatch.setattr(fp4, "cast_reason", lambda recipe, device: None)  # its kernels cast as specified
    monkeypatch.setattr(
        native, "refusals", lambda device, run: torch_refusal(generation.capability or (0, 0))
    )
    return torch.device("cuda")


def by_name(backend: str, generation: Generation) -> dict[str, bool | None]:
    return {c.recipe: c.supported for c in CELLS if (c.backend, c.device) == (backend, generation.key)}


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.key)
def test_cells_are_what_the_backends_decide(generation: Generation, monkeypatch: pytest.MonkeyPatch):
    device = as_if_on(generation, monkeypatch)
    for name, backend in BACKENDS.items():
        decided = {recipe: backend.supports(device, RECIPES[recipe]()) is None for recipe in RECIPE_NAMES}
        assert by_name(name, generation) == decided
    for recipe in RECIPE_NAMES:
        taken = choose_backend("auto", device, RECIPES[recipe]())[0].name
        first = next(name for name in BACKENDS if by_name(name, generation)[recipe])
        assert taken == first, f"auto takes {taken}, the matrix says {first}"
    if generation.architecture is None:
        # Transformer Engine is there, and itself refuses nothing: what is left is this package's own part of the cell.
        monkeypatch.setattr(engine, "unavailable_reason", lambda: None)
        monkeypatch.setattr(engine, "_refusal_of_te", lambda recipe: None)
        for recipe in RECIPE_NAMES:
            if engine.supports(device, RECIPES[recipe]()) is not None:
                assert by_name(engine.name, generation)[recipe] is False


def test_an_unknown_backend_has_unknown_cells():
    for generation in GENERATIONS:
        cell = documented_cell("another", "mxfp8", generation)
        assert cell.supported is None and cell.mark == "?" and "another" in (cell.note or "")


def test_what_everybody_knows_of_gpus():
    """So that a rule that is wrong in the backend is wrong here too, and seen."""
    for generation in GPUS:
        found, capability = by_name("native", generation), generation.capability or (0, 0)
        for recipe in ("mxfp8", "nvfp4"):
            assert found.pop(recipe) is (capability >= (10, 0)), generation.key
        assert set(found.values()) == {capability >= (8, 9)}, generation.key


def test_what_multiplies_blocks_is_named(monkeypatch: pytest.MonkeyPatch):
    for generation in GPUS:
        with monkeypatch.context() as there:
            device = as_if_on(generation, there)
            for recipe in RECIPE_NAMES:
                cell = documented_cell("native", recipe, generation)
                if cell.supported:
                    notes = " ".join(native.notes(device, RECIPES[recipe]()))
                    for ours, doctors in (("block-scaled kernel", "Triton kernel"), ("MX product",) * 2):
                        assert (ours in notes) == (doctors in (cell.note or "")), (recipe, generation.key)
    said = {g.key: documented_cell("native", "blockwise", g).note for g in GPUS}
    assert "Triton kernel" in (said["sm89"] or "") and said["sm90"] is None
    assert "fprop, dgrad, wgrad by torch's MX product" in (said["sm100"] or "")


def test_what_transformer_engine_asks_for_is_what_the_documentation_says():
    said = " ".join((PACKAGE.parent / "docs" / "backends.md").read_text().split())
    assert (
        "asks for capability 8.9 (delayed, tensorwise), 9.0 with CUDA 12.9 (blockwise) and 10.x (mxfp8)"
        in said
    )
    least = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
    for generation in GPUS:
        if (capability := generation.capability) is not None:
            found = by_name(engine.name, generation)
            for recipe, low in least.items():
                expected = capability >= low and not (recipe == "mxfp8" and capability[0] != 10)
                assert found[recipe] is expected, (recipe, generation.key)
            assert found["rowwise"] is False


@pytest.mark.parametrize("generation", CPUS, ids=lambda g: g.key)
def test_the_cpu_s_product_is_the_one_that_is_taken(generation: Generation, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: generation.amx)
    own = (emulation.AVX512,) if generation.avx512_bf16 else ()
    monkeypatch.setattr(emulation, "inner_loops", lambda: own)
    monkeypatch.setattr(emulation, "has_matmul", lambda: bool(own))
    taken = "gemm.c multiplies BF16" if emulation.has_matmul() else "products in float32"
    assert cpu_product(generation).startswith(taken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_device() == generation


def test_every_cell_says_how_it_is_known():
    assert len(CELLS) == 3 * len(RECIPE_NAMES) * len(GENERATIONS)
    for cell in CELLS:
        assert len(cell.mark) <= 4 and cell.known != "tried here"
        assert (cell.known == "documentation") == (cell.source is not None), cell
        assert (cell.supported is False) == (cell.reason is not None) == (cell.remedy is not None), cell
        if cell.source and cell.source.startswith("docs/"):
            assert (PACKAGE.parent / cell.source).is_file()


@pytest.mark.parametrize("generation", GPUS, ids=lambda g: g.key)
def test_a_gpu_finds_its_column(generation: Generation, monkeypatch: pytest.MonkeyPatch):
    as_if_on(generation, monkeypatch)
    assert this_device() == generation
    if generation.capability:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
        assert this_device() is None


def test_what_was_tried_wins():
    device = GENERATIONS[3]
    tried = [
        Trial("native", None, "refused", reason="no Triton"),
        Trial("native", "delayed", "good", 1e-7),
        Trial("native", "rowwise", "wrong", 0.5, "off"),
        Trial("native", "blockwise", "refused", reason="no Triton", remedy="pip install triton"),
    ]
    found = {c.recipe: c for c in matrix(device, tried) if (c.backend, c.device) == ("native", device.key)}
    assert [found[name].mark for name in ("delayed", "rowwise", "blockwise")] == ["yes*", "no*", "no*"]
    assert found["tensorwise"].mark == "yes", "not tried"
    assert (found["blockwise"].reason, found["blockwise"].remedy) == ("no Triton", "pip install triton")
    assert found["rowwise"].remedy == "please report this"
    assert {c.known for c in matrix(device, tried) if c.device != device.key} == {
        "documentation",
        "not known",
    }
