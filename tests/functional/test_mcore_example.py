"""examples/megatron_gpt.py on two ranks under torchrun, as its first lines say (in one process: test_blocks.py)."""

import re

from tests.support.command import ROOT, torchrun


def test_the_example_learns_on_two_ranks(forking_python):
    done = torchrun(ROOT / "examples" / "megatron_gpt.py", python=forking_python)
    assert done.returncode == 0, done.stderr[-4000:]
    said = re.findall(r"^step (\d+): loss ([\d.]+), (\d+) GEMMs in FP8$", done.stdout, re.M)
    assert [step for step, _, _ in said] == ["5", "10", "15", "20"], "one rank tells"
    losses = [float(loss) for _, loss, _ in said]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert {gemms for _, _, gemms in said} == {"24"}, "two layers, four linears, three products, on each rank"
    assert done.stdout.count("2 x decoder.layers.#.mlp.linear_fc1") == 1, "so does the plan"
