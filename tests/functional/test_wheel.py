"""A wheel has all that an installed package needs: it is built, installed into a fresh environment, and trains there."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import megatron_fp8
from tests.support.command import ROOT, empty_cache, environment

EXAMPLES = sorted(path.name for path in (ROOT / "examples" / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built without a network and without a trace in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    steps = f"build -b {folder}/b egg_info -e {folder} bdist_wheel -d {folder}"
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", *steps.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """An environment of its own: the wheel, and this environment's packages behind it."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*command, wheel], check=True, timeout=150)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def test_it_holds_what_is_no_python(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "megatron_fp8"
    data = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert "megatron_fp8/py.typed" in data and "megatron_fp8/kernels/cpu/gemm.c" in data
    assert not data - names
    assert EXAMPLES and {f"megatron_fp8/configs/{name}" for name in EXAMPLES} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]
    assert not (package / "configs").exists(), "the one source is examples/configs"
    metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
    assert f"Version: {megatron_fp8.__version__}\n" in zipfile.ZipFile(wheel).read(metadata).decode()


def test_it_trains_a_shipped_config_by_its_name(site, tmp_path):
    """And ten iterations are less than the config's warm-up, which is said."""
    (tmp_path / "words.txt").write_text("every step of a small model is one line of text\n" * 300)
    small = [
        "--data",
        "words.txt",
        "--data.split=100,0,0",
        "--train.train_iters=10",
        "--train.seq_length=32",
        "--train.eval_iters=0",
    ]
    small += ["--train.micro_batch_size=1", "--train.global_batch_size=1", "--model.num_layers=3"]
    small += ["--model.tensor_model_parallel_size=1", "--model.sequence_parallel=false"]
    small += ["--model.hidden_size=64", "--model.ffn_hidden_size=64", "--model.kv_channels=16"]
    variables = {**environment(), "XDG_CACHE_HOME": empty_cache(tmp_path)}
    variables.pop("PYTHONPATH")
    done = subprocess.run(
        [site / "bin" / "megatron-fp8", "train", "--config", "tiny_gpt_cpu", *small],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "done: 10 iterations" in done.stdout and (tmp_path / "runs/tiny_gpt_cpu/report.json").is_file()
    assert "optimizer.lr_warmup_iters=20 would be all of a run of 10 iterations" in done.stderr
    assert "the learning rate warms up for 1." in done.stderr
    command = [site / "bin" / "python", "-c", "import megatron_fp8; print(megatron_fp8.__file__)"]
    where = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert Path(where.stdout.strip()).is_relative_to(site)
