"""Packaging of megatron_fp8: dependencies, extras and the command line entry point."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PACKAGE = "megatron_fp8"

# torch is a range: on a GPU machine keep the build that matches its driver; the Makefile takes 2.13.0.
RUNTIME = [
    "torch>=2.8",
    # It has wheels for these alone; elsewhere megatron_fp8.nn works without it, and the extra builds it from source.
    "megatron-core==0.16.1; platform_system == 'Linux' and python_version < '3.14'",
    "einops>=0.8",
    "numpy>=1.26",
    "safetensors>=0.4",
    "psutil>=5.9",
    "filelock>=4.0",
    "tensorboard>=2.16",
    "matplotlib>=3.8",
    "bokeh>=3.9",
    "Jinja2>=3.1",
    "rich>=13",
    "docstring-parser>=0.16",
    "PyYAML>=6",
]

EXTRAS = {
    "te": ["transformer-engine[pytorch]>=2.9"],
    "gpu": ["triton>=3.4"],
    "megatron": ["megatron-core==0.16.1"],
    "optim": ["torchao>=0.18"],
    # Writing needs safetensors alone, which is always here; these read what was written.
    "export": ["accelerate>=1.0", "compressed-tensors>=0.15", "tokenizers>=0.20", "transformers>=5.0"],
    # JSONL and CSV need none of them; chats need transformers, Parquet, Arrow and JSON datasets.
    "data": ["datasets>=4.0", "tokenizers>=0.20", "transformers>=5.0"],
    "examples": ["scikit-learn>=1.4"],
    "lab": ["ipykernel>=6.29", "scikit-learn>=1.4"],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings-python>=2.0"],
    "test": [
        "accelerate>=1.0",
        "compressed-tensors>=0.15",
        "datasets>=4.0",
        "gfloat",
        "hypothesis",
        "ipykernel>=6.29",
        "jsonschema>=4",
        "ml_dtypes>=0.5",
        "mypy",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "peft>=0.17",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "pytorch-lightning>=2.5",
        "ruff",
        "scikit-learn>=1.4",
        "selenium>=4.30",
        "tokenizers>=0.20",
        "torchao>=0.18",
        "transformers>=5.0",
        "triton>=3.4",
        "types-psutil",
        "types-PyYAML",
    ],
}


def text(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def version() -> str:
    """As the package itself says it, without importing torch."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', text(f"{PACKAGE}/__init__.py"), re.M)
    return found


class BuildWithConfigs(build_py):
    """Wheels have a copy of examples/configs in the package, where files/user_paths.py finds it."""

    def run(self) -> None:
        """setuptools' own, then the copies; an editable installation reads them where they are."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / PACKAGE / "configs"
            folder.mkdir(parents=True, exist_ok=True)
            for config in sorted((ROOT / "examples" / "configs").glob("*.yaml")):
                self.copy_file(str(config), str(folder / config.name))


setup(
    name=PACKAGE,
    version=version(),
    description="FP8 training for Megatron-Core models, from a CPU laptop to a GPU cluster",
    long_description=text("README.md"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    classifiers=[
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),  # what tests ran with
        "Typing :: Typed",
    ],
    packages=find_packages(include=[PACKAGE, f"{PACKAGE}.*"]),
    package_data={
        PACKAGE: ["py.typed"],
        f"{PACKAGE}.kernels.cpu": ["*.c", "*.h"],
        f"{PACKAGE}.conformance": ["golden.safetensors"],
        f"{PACKAGE}.report": ["templates/*"],
        f"{PACKAGE}.estimate": ["devices.yaml", "calibration.yaml"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    install_requires=RUNTIME,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-fp8=megatron_fp8.commands.main:main"]},
)
