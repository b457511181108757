"""Several ranks import a directory: each reads a part of it, and together they make what one process makes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.support.ranks import RankPool
from megatron_fp8.commands.main import main
from megatron_fp8.files.checkpoint import find_checkpoint, read_manifest, read_metadata, read_tensor
from megatron_fp8.huggingface import import_plan as sharing_file
from megatron_fp8.huggingface.directory import INDEX, SINGLE, Tensors
from megatron_fp8.huggingface.import_plan import Sharing
from megatron_fp8.huggingface.importer import import_directory
from tests.support.command import launched
from tests.support.hf_small import IN_BLOCKS, write, write_family

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rms_norm_eps": 1e-6,
    "num_key_value_heads": 2, "moe_intermediate_size": 128, "n_routed_experts": 8,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 64, "kv_lora_rank": 96, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_interleave": True, **IN_BLOCKS,
}  # fmt: skip
FILES = 5


def in_files(folder: Path) -> None:
    """Cut model.safetensors into several, as large models are."""
    tensors = load_file(folder / SINGLE)
    names = list(tensors)
    places = {name: f"model-{number * FILES // len(names)}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / SINGLE).unlink()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    """hf: a DeepSeek-V3 in FP8 in several files, with multi-token prediction; one: imported by one process."""
    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(3)
    copies: dict[tuple[int, ...], torch.Tensor] = {}

    def values(shape: list[int]) -> torch.Tensor:
        made = torch.rand(shape) + 0.5
        # the head is the embedding's copy
        return copies.setdefault(tuple(shape), made) if shape[0] == 200 else made

    write_family(folder / "hf", DEEPSEEK, values)
    in_files(folder / "hf")
    assert main(["import", str(folder / "hf"), str(folder / "one")]) == 0
    return folder


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    folder = find_checkpoint(run)
    metadata = read_metadata(folder)
    return {name: read_tensor(folder, metadata, name) for name in metadata.state_dict_metadata}


def imported(source: Path, run: Path, change: str = "") -> tuple[Any, list[str]]:
    """A case for ranks: what it gave, or refused with, and the tensors that this rank read, in their order."""
    read: list[str] = []

    class Watched(Tensors):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().__getitem__(name)

    store = dist.FileStore(str(run) + ".store", dist.get_world_size())
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_fp8.huggingface.importer.Tensors", Watched)
        if change == "hidden" and dist.get_rank() == 1:
            patch.setattr(sharing_file, "files_not_visible", lambda folder, sizes, patience: list(sizes))
        try:
            return import_directory(source, run, lambda names, _: names, sharing=Sharing(store)), read
        except ValueError as error:
            return str(error), read


@pytest.mark.parametrize("size", [2, 4])
def test_the_bits_of_one_process_and_nobody_reads_it_all(ranks: RankPool, deepseek: Path, size: int) -> None:
    run = deepseek / f"of_{size}"
    results = ranks(size).run(imported, deepseek / "hf", run)
    expected, found = tensors_of(deepseek / "one"), tensors_of(run)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert (run / "config.yaml").read_text() == (deepseek / "one" / "config.yaml").read_text().replace(
        str(deepseek / "one"), str(run)
    )
    told = {json.dumps(vars(result)) for result, _ in results}
    assert len(told) == 1, told

    stored = {
        name: tensor
        for file in (deepseek / "hf").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    copies = ("embed_tokens.weight", "head.weight")  # which the first rank compares
    owner: dict[str, int] = {}
    for rank, (_, read) in enumerate(results):
        for name in read:
            if not name.endswith(copies):
                assert owner.setdefault(name, rank) == rank, f"{name} was read by two ranks"
        mine = sum(stored[name].nbytes for name in set(read) if not name.endswith(copies))
        everything = sum(t.nbytes for name, t in stored.items() if not name.endswith(copies))
        assert 0.5 / size < mine / everything < 1.5 / size, (rank, mine / everything)
    assert set(owner) == {name for name in stored if not name.endswith(copies)}


def test_what_one_rank_refuses_all_refuse_and_nothing_stays(ranks: RankPool, tmp_path: Path) -> None:
    weight = torch.ones(128, 256, dtype=torch.bfloat16)
    weight[5, 7] = math.nan
    source = write(tmp_path / "hf", **{"model.layers.1.mlp.down_proj.weight": weight})
    for said, _ in ranks(2).run(imported, source, tmp_path / "run"):
        assert said.startswith("model.layers.1.mlp.down_proj.weight holds NaN or Inf")
    assert {path.name for path in tmp_path.iterdir()} - {"run.store"} == {"hf"}


def test_a_folder_that_another_node_does_not_see(ranks: RankPool, tmp_path: Path) -> None:
    source = write(tmp_path / "hf")
    for said, _ in ranks(2).run(imported, source, tmp_path / "run", "hidden"):
        assert said.startswith("rank 1 does not see") and "all nodes" in said
    assert {path.name for path in tmp_path.iterdir()} - {"run.store"} == {"hf"}


def test_more_ranks_than_tensors(ranks: RankPool, tmp_path: Path) -> None:
    """A rank whose middle falls into nobody's stretch makes nothing, and the others all."""
    source = write_family(
        tmp_path / "hf", {"num_hidden_layers": 1, "vocab_size": 20_000, "tie_word_embeddings": True}
    )
    results = ranks(4).run(imported, source, tmp_path / "run")
    assert [] in [read for _, read in results], "every rank had something: the test shows nothing"
    assert main(["import", str(source), str(tmp_path / "one")]) == 0
    expected, found = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "run")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_launched(tmp_path: Path, forking_python: str) -> None:
    source = write(tmp_path / "hf")
    done = launched("--ranks", "2", "import", source, tmp_path / "run", python=forking_python)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("445,056 parameters") == 1 and done.stdout.count("next: ") == 1
    files = read_manifest(find_checkpoint(tmp_path / "run")).files
    assert {name for name in files if name.endswith(".distcp")} == {"__0_0.distcp", "__1_0.distcp"}

    again = launched("--ranks", "2", "import", source, tmp_path / "run", python=forking_python)
    (line,) = again.stderr.splitlines()
    assert again.returncode == 2 and line.startswith("error: ") and "is there already" in line
