"""The SLURM scripts hand on every word as it was given: blanks, globs and what a shell would run are text to them.

A stand-in for srun starts the task as srun does, without a cluster, and one for Python writes down its arguments.
"""

import os
import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "examples" / "slurm"
SCRIPTS = ("one_node.sbatch", "several_nodes.sbatch", "task_per_rank.sbatch")
EVIL = "a b;touch ran $(touch ran) `touch ran` '\"* ~ \\ \n-x"
STANDINS = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do printf "%s\\0" "$1" >>"$NOTED.srun"; shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/bash\necho 'JobState=RUNNING NodeAddr=10.0.0.1 Reason=None'\n",
    "a python": '#!/bin/bash\nprintf "%s\\0" "$@" >"$NOTED"\n',
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_word_is_split_or_run(tmp_path, script):
    tools, work = tmp_path / "a tools folder", tmp_path / "work"
    for folder in (tools, work, work / "examples"):
        folder.mkdir()
    for name, text in STANDINS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    noted, run_dir = tmp_path / "noted", f"runs of {EVIL}"
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}", "NOTED": str(noted), "PYTHON": str(tools / "a python"),
        "SCRIPTS": str(SLURM),
        "CONFIG": EVIL, "RUN_DIR": run_dir, "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": EVIL, "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": EVIL,
    }  # fmt: skip
    words = [f"--data={EVIL}", "*", "", "--", EVIL]
    done = subprocess.run(
        ["bash", str(SLURM / script), *words],
        cwd=work,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    given = noted.read_text().split("\0")[:-1]
    start = given.index("train")
    assert given[start + 1 :] == [f"--config={EVIL}", f"--run_dir={run_dir}", "--resume=auto", *words]
    assert not list(tmp_path.rglob("ran"))
    assert (work / run_dir / "logs").is_dir()
    assert f"--output={run_dir}/logs/attempt0" in Path(f"{noted}.srun").read_text()
