"""The plan of a model's Hugging Face tensors: names, source tensors and casts.

Exports to a directory and weight streams follow the same plan, so their bytes are equal. The plan reads its source's
tensors in forward order, each once where a directory stores it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..fp8_utils import is_first_last_bf16_layer
from ..inference.calibration import Calibration
from ..plan.cast_spec import CastSpecs
from ..plan.overrides import FORMATS, matching_overrides
from ..recipe import Float8CurrentScaling, Recipe
from .architectures import Architecture, Entry, entries, fused_latents, gemms, never_fp8
from .block_scales import has_block_scales, high_precision_linears, original_codes
from .checkpoint_reader import WeightSource
from .formats import WeightFormat, encode, kv_scale, static_input_scale, weight_recipe
from .qkv_layout import heads_of, megatron_shape, split_qkv

Progress = Callable[[Iterable[Any], int], Iterable[Any]]
"""(items, count) -> the same items; shows progress during iteration."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export or a stream.

    Attributes:
        form: format of the layers' linears; None: high precision.
        ignore: globs over Hugging Face names of linears to leave in high precision.
        follow_training: linears that were BF16 in training stay BF16.
        calibration: input ranges; static scales are written, if the format has them.
        kv_cache: write the calibration's scales of keys and values, for an engine's FP8 cache.
        like: a directory from which further config fields, generation config and tokenizer are copied.
        vocab_size, positions: override the run's.
        shard_bytes: size limit of a file.
    """

    form: WeightFormat | None = None
    ignore: tuple[str, ...] = ()
    follow_training: bool = True
    calibration: Calibration | None = None
    kv_cache: bool = False
    like: Path | None = None
    vocab_size: int | None = None
    positions: int | None = None
    shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        if self.kv_cache and (self.form is None or self.calibration is None):
            missing = "a quantized format" if self.form is None else "a calibration"
            raise ValueError(
                f"scales of an FP8 KV cache need {missing}: engines read them beside it. Give one."
            )

    @property
    def static_inputs(self) -> bool:
        """Whether inputs get static scales."""
        return self.calibration is not None and self.form is not None and self.form.input_scale is not None


class WeightPlan:
    """What each Hugging Face tensor of a model is made of.

    Attributes:
        listed: the model's tensors, in forward order.
        sites: Megatron-Core's name of each linear of the layers -> the Hugging Face linears of its GEMM.
        high_precision: Hugging Face linears of the layers that are not quantized.
        came: checkpoint tensors whose codes and scales are those of an imported directory.
        stays: checkpoint tensors in high precision.
        kv_scales: Hugging Face name -> scale of an attention's keys or values.

    Args:
        architecture: the family of `source.section`.
        vocab_size: rows of the vocabulary without padding.
        recipe: quantizes the weights; None: the run's or the format's.

    Raises ValueError: a tensor is missing, unexpected or of another shape, a glob matches nothing, or the calibration is
    of another model.
    """

    def __init__(
        self,
        source: WeightSource,
        wanted: ExportOptions,
        architecture: Architecture,
        vocab_size: int,
        recipe: Recipe | None = None,
    ) -> None:
        self._source, self._wanted, self._vocab_size = source, wanted, vocab_size
        form, section = wanted.form, source.section
        self.listed = list(entries(architecture, section))
        _check_tensors(source, self.listed, vocab_size)
        self.sites = gemms(self.listed)
        self.high_precision = _high_precision_linears(section, self.sites, wanted) if form else set()
        in_blocks = form is not None and form.in_blocks
        if in_blocks and wanted.follow_training:
            self.high_precision |= high_precision_linears(source, self.listed)
        if wanted.calibration is not None:
            _check_calibration(
                wanted.calibration, self.listed, {**section, "vocab_size": vocab_size}, self.high_precision
            )
        self.recipe = recipe or (weight_recipe(form, section) if form else None)
        self.stays = {
            entry.megatron
            for entry in self.listed
            if entry.site is None or _linear(entry) in self.high_precision
        }
        self.came = {
            entry.megatron for entry in self.listed if in_blocks and has_block_scales(source, entry)
        } - self.stays
        self._exact_weights = set() if form is None else source.exact_weights - self.stays
        self.kv_scales = _kv_scales(wanted, self.sites)
        self._floats = self.stays.intersection(source.origin.floats) if in_blocks else set()

    def kept(self) -> list[str]:
        """The linears of ``high_precision``, layer by layer."""
        return sorted(self.high_precision, key=_by_layer)

    def ignored(self) -> list[str]:
        """Names of all linears that are not quantized, for config.json."""
        return ["lm_head", *never_fp8(self.listed), *self.kept()]

    def tensors(self, progress: Progress = lambda items, _: items) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor): of a quantized linear its codes, then its scales.

        Raises ValueError for a tensor with NaN or Inf, or, of a quantized one, without whole blocks.
        """
        parts = self._parts(progress(self.listed, len(self.listed)))
        if self._wanted.form is None:
            return (named for _, tensors in parts for named in tensors.items())
        return self._quantized(parts, self._wanted.form)

    def _parts(self, listed: Iterable[Entry]) -> Iterator[tuple[Entry, dict[str, torch.Tensor]]]:
        """Hugging Face tensors in high precision, entry by entry. Not rounded are those of ``came``, since their codes
        follow from them, those that were float32 or float16, and merged adapters before their cast."""
        source = self._source
        for entry in listed:
            name = entry.megatron
            exact = (
                entry.as_stored or name in self.came or name in self._floats or name in self._exact_weights
            )
            tensor = source.tensor(name, as_stored=exact)
            if name in self._floats:
                tensor = tensor.to(source.origin.dtype(name))
            if not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"{entry.megatron} holds NaN or Inf: training diverged. Export an earlier checkpoint."
                )
            if entry.vocabulary:
                tensor = tensor[: self._vocab_size]
            parts = split_qkv(tensor, heads_of(source.section)) if entry.qkv else (tensor,)
            del tensor  # the consumer's time must not keep it
            yield entry, dict(zip(entry.parts, parts, strict=True))

    def _quantized(
        self, parts: Iterator[tuple[Entry, dict[str, torch.Tensor]]], form: WeightFormat
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, with linears' weights replaced by codes and scales, GEMM by GEMM."""
        assert self.recipe is not None
        calibration, lost = self._wanted.calibration, self._source.origin.lost
        pending: dict[str, torch.Tensor] = {}
        for entry, tensors in parts:
            if entry.megatron in self.stays:
                yield from tensors.items()
                continue
            assert entry.site is not None
            if entry.megatron in self.came:
                yield from original_codes(self._source, entry, tensors).items()
                continue
            pending |= tensors
            names = self.sites[entry.site]
            if not form.in_blocks and len(pending) < len(names):  # wait for the GEMM's other parts
                continue
            encoded = encode(pending, form, self.recipe, lost)
            pending, tensors = {}, {}
            yield from encoded.items()
            if calibration is not None and form.input_scale is not None:
                scale = static_input_scale(calibration.input_amax(entry.site), form)
                yield from ((f"{part}.{form.input_scale}", scale.clone()) for part in names)
        assert not pending, list(pending)
        yield from self.kv_scales.items()


def _kv_scales(wanted: ExportOptions, sites: dict[str, tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """The scales of keys and values, by engines' names. Raises ValueError if the calibration lacks one."""
    if not wanted.kv_cache:
        return {}
    assert wanted.form is not None and wanted.calibration is not None
    found: dict[str, torch.Tensor] = {}
    for site, parts in sites.items():
        before, _, last = site.rpartition(".")
        if not before.endswith("self_attention") or last != "linear_proj":
            continue
        attention = parts[0].rpartition(".")[0]
        for role, letter in (("key", "k"), ("value", "v")):
            scale = wanted.calibration.kv_scale_inv(f"{before}.core_attention", role)
            found |= kv_scale(attention, letter, scale, wanted.form)
    return found


# -------------------------------------------------------------------------------------------------------------- checks


def _check_tensors(source: WeightSource, listed: list[Entry], vocab_size: int) -> None:
    """Raises ValueError unless the checkpoint has exactly the model's tensors, in the config's shapes."""
    stored = source.weights()
    section = {**source.section, "vocab_size": vocab_size}
    expected_shape = {entry.megatron for entry in listed}
    for names, words in (
        (expected_shape - stored, "has no"),
        (stored - expected_shape, "has, and the exported model has not,"),
    ):
        if names:
            raise ValueError(f"{source.label} {words} {sorted(names)[0]}.")
    for entry in listed:
        have, expected = source.shape(entry.megatron), megatron_shape(entry, section)
        padded = entry.vocabulary and have[0] > expected[0] and have[1:] == expected[1:]
        if have != expected and not padded:
            raise ValueError(f"{entry.megatron} is {have} in {source.label}, and its config says {expected}.")


def _check_calibration(
    calibration: Calibration, listed: list[Entry], section: dict[str, Any], high_precision: set[str]
) -> None:
    """Raises ValueError unless the input of every linear to be quantized was calibrated, with the linear's shape."""
    shapes = _site_shapes(listed, section)
    for site, parts in gemms(listed).items():
        if high_precision.issuperset(parts):
            continue
        shape = shapes[site]
        found = calibration.ranges.get(f"{site}.input")
        if found is None or list(found.shape) != shape:
            what = "nothing of it" if found is None else list(found.shape)
            raise ValueError(
                f"the calibration is of another model: {site} is {shape} here, and {what} there. Calibrate the "
                "checkpoint that is exported."
            )


def _site_shapes(listed: list[Entry], section: dict[str, Any]) -> dict[str, list[int]]:
    """Shape of the whole weight of each linear in the layers."""
    shapes: dict[str, list[int]] = {}
    for entry in listed:
        if entry.site is not None:
            rows, cols = megatron_shape(entry, section)
            shapes[entry.site] = [rows + shapes.get(entry.site, [0])[0], cols]
    return shapes


# ------------------------------------------------------------------------------------------- what stays high precision


def _high_precision_linears(
    section: dict[str, Any], sites: dict[str, tuple[str, ...]], wanted: ExportOptions
) -> set[str]:
    """Linears of the layers that stay in high precision: those the user names, and those that were BF16 in
    training.

    Raises ValueError: a glob matches nothing, or only a part of a GEMM that an inference engine fuses.
    """
    excluded: set[str] = set()
    for glob in wanted.ignore:
        found = {part for parts in sites.values() for part in parts if fnmatchcase(part, glob)}
        if not found and not fnmatchcase("lm_head", glob):
            first = next(iter(sites.values()))[0]
            raise ValueError(f"--ignore={glob!r} matches no linear: they have names such as {first}.")
        excluded |= found
    gemm_parts = [*sites.values(), *fused_latents(sites)]
    for parts in gemm_parts:
        rest = [part for part in parts if part not in excluded]
        if rest and len(rest) < len(parts):
            raise ValueError(
                f"--ignore leaves {rest[0]} in FP8 and not {next(p for p in parts if p in excluded)}: inference engines"
                " multiply them as one GEMM, and they must be ignored together."
            )
    if wanted.follow_training and (section.get("fp8") or section.get("fp4")):
        trained = {part for site, parts in sites.items() if trained_in_bf16(site, section) for part in parts}
        for parts in gemm_parts:
            if not trained.isdisjoint(parts):
                excluded.update(parts)
    if len(excluded) == sum(map(len, sites.values())):
        raise ValueError("every linear would stay in high precision: give --format=bf16, or --quantize-all.")
    return excluded


def trained_in_bf16(site: str, section: dict[str, Any]) -> bool:
    """Whether the training forward read a linear's weight in BF16, by its name or because it is in one of the first and
    last layers."""
    # Multi-token prediction layers do not count as first or last.
    layer = int(site.split(".")[2]) if site.startswith("decoder.") else -1
    overrides = {name: section.get(name, default) for name, default in _LAYERS_IN_BF16.items()}
    at_an_end = is_first_last_bf16_layer(
        SimpleNamespace(num_layers=section["num_layers"], **overrides), layer
    )
    some = Float8CurrentScaling()  # any recipe will do: a checkpoint's custom recipe code is not imported
    choices = CastSpecs.of(some, bf16_reason="first_last_layers_bf16" if at_an_end else None)
    for override in matching_overrides(site, section.get("fp8_overrides") or {}):
        choices = choices.after(override, None if override.value in ("bf16", *FORMATS) else some, "")
    return choices.operands()["fprop"]["weight"] is None


_LAYERS_IN_BF16 = {
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}
"""Megatron-Core's defaults, for sections without these fields."""


def _linear(entry: Entry) -> str:
    """The linear whose weight, or first part of a weight, the entry is."""
    return entry.parts[0].removesuffix(".weight")


def _by_layer(name: str) -> tuple[int, str]:
    return int(name.split(".")[2]), name
