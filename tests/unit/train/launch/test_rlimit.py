"""As many files as connections to all ranks take may be open, or it is said before anything waits for them."""

import resource
import subprocess
import sys

import pytest

from megatron_fp8.train.launch.rlimit import check_limit

RAISED = """\
import resource
from megatron_fp8.train.launch.rlimit import raise_limit
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_shells_limit_is_raised_as_far_as_it_may_be():
    def low():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))

    done = subprocess.run(
        [sys.executable, "-c", RAISED], preexec_fn=low, capture_output=True, text=True, check=True
    )
    assert done.stdout == "512 (512, 512)\n"


def test_more_ranks_than_files_are_refused_in_words():
    check_limit(1024, 512, keeps_store=False, over_gloo=False)
    check_limit(20, 1, keeps_store=True, over_gloo=True)  # nobody to be connected to
    check_limit(2**62, 16_384, keeps_store=True, over_gloo=True)
    for ranks, keeps_store, over_gloo, needed in (
        (1024, False, False, 1152),
        (1024, True, False, 3200),
        (512, False, True, 1152),
    ):
        said = rf"may open 1024 files \(`ulimit -Hn`\), and {ranks} ranks need at least {needed}, .*raise the limit"
        with pytest.raises(ValueError, match=said):
            check_limit(1024, ranks, keeps_store=keeps_store, over_gloo=over_gloo)
