"""By what compiled code knows a site."""

import pytest

from megatron_fp8.linear.gemm_site import site_by_handle
from tests.support.sites import make_site


def test_sites_are_known_as_long_as_they_live():
    site, other = make_site("tensorwise")[0], make_site("tensorwise")[0]
    handle = site.handle
    assert site_by_handle(handle) is site and site_by_handle(other.handle) is other
    del site
    with pytest.raises(RuntimeError, match="gone"):
        site_by_handle(handle)
    assert site_by_handle(other.handle) is other


def test_sites_of_one_layout_share_compiled_code():
    """Code that was traced for one layout must not be asked to save another."""
    layouts = {
        name: make_site(name)[0].saved_layout for name in ("tensorwise", "delayed", "mxfp8", "no-input")
    }
    assert layouts["tensorwise"] == layouts["delayed"] != layouts["mxfp8"] and layouts["no-input"] == ""
