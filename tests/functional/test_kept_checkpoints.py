"""Checkpoints of an earlier version resume to the bits that its own run went on with."""

import pytest

from tests.support.old_checkpoints import KINDS, expected, machine, options, result, train, unpacked


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_checkpoint_resumes_to_the_same_bits(ranks, tmp_path, kind):
    unpacked(kind, tmp_path)
    ranks(KINDS[kind][0]).run(train, tmp_path, options(kind))
    found, wanted = result(tmp_path), expected(kind)
    if wanted["machine"] == machine():
        assert found == wanted
    else:  # other vector instructions, or another torch, add in another order
        assert found["state"] == wanted["state"]
        losses = [[float.fromhex(loss) for loss in each["losses"]] for each in (found, wanted)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-3)
