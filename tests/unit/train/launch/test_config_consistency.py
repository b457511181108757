"""What ranks compare: everything that decides a run, and no path, host or device."""

from types import SimpleNamespace

import pytest

from megatron_fp8.files.checkpoint import MANIFEST
from megatron_fp8.train.config.run_config import load
from megatron_fp8.train.data.tokenizers import ByteTokenizer
from megatron_fp8.train.launch import config_consistency

TINY = "examples/configs/tiny_gpt_cpu.yaml"


def of(*options, environ=None, world_size=2):
    return config_consistency.run_facts(load(TINY, *options), ByteTokenizer(), world_size, environ or {})


def test_local_paths_may_differ():
    assert (
        of("--run_dir=/elsewhere", "--checkpoint.folder=/elsewhere", "--data.cache_dir=/elsewhere", "--debug")
        == of()
    )


def test_data_under_another_mount_may_and_other_data_may_not():
    here, there, other = (of(f"--data.paths=['{path}']") for path in ("/a/x", "/b/x", "/a/y"))
    assert here == there != other


def test_every_other_option_counts():
    options = [
        "optimizer.lr=0.5",
        "model.fp8_recipe=mxfp8",
        "checkpoint.save_interval=3",
        "resume=some/path",
        "dry_run=true",
    ]
    before, after = of(), of(*(f"--{option}" for option in options))
    changed = {key for key in {**before, **after} if before.get(key) != after.get(key)}
    assert changed >= {option.partition("=")[0] for option in options}


def test_where_files_go_and_what_is_printed_may_differ():
    """A cache for each rank, on its node's own disk; one rank that is told to talk."""
    local = {"TORCHINDUCTOR_CACHE_DIR": "/scratch/3", "ONEDNN_VERBOSE": "1", "NVTE_DEBUG_LEVEL": "2"}
    assert of(environ=local) == of()
    assert of(environ={"MKL_DEBUG_CPU_TYPE": "5"}) == {**of(), "MKL_DEBUG_CPU_TYPE": "5"}


def test_launch_packages_and_environment_count():
    assert of(world_size=4) != of()
    assert of(environ={"NVTE_FLASH_ATTN": "0", "HOSTNAME": "a"}) == {**of(), "NVTE_FLASH_ATTN": "0"}
    found = of()
    names = ("python", "torch", "megatron-core", "megatron_fp8")
    assert all(found[f"the version of {name}"] for name in names) and found["the source of megatron_fp8"]


def test_one_changed_byte_of_the_package_is_another_source(monkeypatch, tmp_path):
    found = []
    for name, content in (("one", "x = 1"), ("same", "x = 1"), ("other", "x = 2")):
        (tmp_path / name / "train" / "launch").mkdir(parents=True)
        (tmp_path / name / "cast.py").write_text(content)
        monkeypatch.setattr(
            config_consistency, "__file__", str(tmp_path / name / "train" / "launch" / "x.py")
        )
        found.append(config_consistency._source_digest())
    assert found[0] == found[1] != found[2]


def test_inputs_count_by_content(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.bin").write_bytes(bytes(10_000))
        (tmp_path / name / "x.idx").write_bytes(b"index")
    here, there = (
        config_consistency.input_facts([str(tmp_path / name / "x")], None, True) for name in ("a", "b")
    )
    assert here == there
    (tmp_path / "b" / "x.bin").write_bytes(bytes(9_999) + b"1")
    there = config_consistency.input_facts([str(tmp_path / "b" / "x")], None, True)
    assert [key for key in here if here[key] != there[key]] == [
        "the sampled SHA-256 of the .bin of the data set x"
    ]
    (tmp_path / "b" / "x.idx").unlink()
    assert (
        config_consistency.input_facts([str(tmp_path / "b" / "x")], None, True)[
            "the SHA-256 of the .idx of the data set x"
        ]
        is None
    )


def test_every_rank_of_a_node_looks_at_what_is_read_in_no_time(tmp_path, monkeypatch):
    """In a container of its own a rank may see other files under the same path."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.bin").write_bytes(bytes(10_000))
        (tmp_path / name / "x.idx").write_bytes(b"index")
        (tmp_path / name / MANIFEST).write_text(name)
    prefixes = [str(tmp_path / name / "x") for name in ("a", "b")]
    first = config_consistency.input_facts(
        prefixes, (tmp_path / "a", SimpleNamespace(files={"state": 1})), True
    )
    fingerprint = config_consistency.corpus.fingerprint

    def quick(prefix, *, whole_index=True):
        assert not whole_index, "a whole index is read"
        return fingerprint(prefix, whole_index=False)

    monkeypatch.setattr(config_consistency.corpus, "fingerprint", quick)
    monkeypatch.setattr(
        config_consistency, "_size", lambda _: pytest.fail("every file of a checkpoint is looked up")
    )
    other = config_consistency.input_facts(
        prefixes, (tmp_path / "a", SimpleNamespace(files={"state": 1})), False
    )
    assert set(other) < set(first) and all(first[key] == value for key, value in other.items())
    assert "the SHA-256 of manifest.json of the checkpoint a" in other
    (tmp_path / "b" / "x.bin").write_bytes(b"1" + bytes(9_999))
    (tmp_path / "b" / "x.idx").write_bytes(b"Index")
    found = config_consistency.input_facts(prefixes, None, False)
    assert [key for key in found if found[key] != first[key]] == [
        f"the sampled SHA-256 of the .{ending} of the data set x (2 of 2)" for ending in ("idx", "bin")
    ]


def test_all_ranks_of_a_node_are_asked_for_the_same_inputs(tmp_path):
    """The first one for all of them, the others for what is read in no time."""
    (tmp_path / MANIFEST).write_text("{}")
    chosen = tmp_path, SimpleNamespace(files={"state": {}})
    asked = []

    def agree(what, found, timeout_s, partial):
        asked.append((what, len(found), timeout_s, partial))

    for local_rank in (0, 1):
        launch = SimpleNamespace(local_rank=local_rank, barrier=SimpleNamespace(agree=agree))
        config_consistency.agree_on_inputs("checkpoint", launch, [], chosen, 60.0)
    assert asked == [("checkpoint", 2, 60.0, False), ("checkpoint", 1, 60.0, True)]
