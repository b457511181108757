"""What a replay reads of its run beside the checkpoint."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from megatron_fp8.train.replay import _sites_of_report


def test_a_damaged_report_is_named_and_a_missing_one_is_none(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _sites_of_report(tmp_path) == []
        report.write_text(json.dumps({"sites": [{"name": "fc1"}, {"name": "fc2"}]}))
        assert _sites_of_report(tmp_path) == ["fc1", "fc2"]
    for content in ("{", "[]", "{}", '{"sites": [{}]}'):
        report.write_text(content)
        with pytest.warns(UserWarning, match=re.escape(f"'{report}' does not say which sites")):
            assert _sites_of_report(tmp_path) == []
