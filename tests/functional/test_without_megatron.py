"""Where megatron-core is not installed (it has no wheels for macOS and Windows): what works, and what is said."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HIDDEN = """
import sys

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden)
from importlib import metadata, util
find, version = util.find_spec, metadata.version

def missing(name):
    raise metadata.PackageNotFoundError(name)

util.find_spec = lambda name, package=None: None if name.startswith("megatron.") else find(name, package)
metadata.version = lambda name: missing(name) if name == "megatron-core" else version(name)
"""


COMMANDS = (
    ["train", "--config", "examples/configs/tiny_gpt_cpu.yaml"],
    ["calibrate", "runs/x"],
    ["inspect", "runs/x"],
)
CODE = f"""
import contextlib, io, json
import torch
from megatron_fp8 import convert_to_fp8, fp8_matmul, register_fp8_step
model = convert_to_fp8(torch.nn.Sequential(torch.nn.Linear(64, 64)), skip=())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
register_fp8_step(optimizer, model)
for _ in range(2):
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
fp8_matmul(torch.ones(32, 32), torch.ones(32, 32), "mxfp8")
import megatron_fp8.nn.trainer, megatron_fp8.inference.calibration, megatron_fp8.commands.bench
assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
found = dict()
try:
    from megatron_fp8 import TransformerConfig
except RuntimeError as error:
    found["TransformerConfig"] = [2, f"error: {{error}}\\n"]
from megatron_fp8.commands.main import main
for arguments in {COMMANDS!r}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(arguments)
    found[arguments[0]] = [code, said.getvalue()]
print(json.dumps(found))
"""
"""Any PyTorch model trains; then what needs Megatron-Core, one after the other in one process."""


def test_any_model_trains_and_what_needs_megatron_says_how_to_get_it():
    command = [sys.executable, "-c", HIDDEN + CODE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["TransformerConfig", *(command for command, *_ in COMMANDS)]
    assert "Linux" in found["TransformerConfig"][1]
    for name, (code, said) in found.items():
        assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, (name, said)
        if name != "inspect":  # it reads files without Megatron, and there is no such folder
            assert "pip install megatron-core==0.16.1" in said, (name, said)
