"""The documentation as a site, as `make docs` builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT


def build_site(folder: Path) -> None:
    """AssertionError with what mkdocs said, if it warned or asked for a network. Skips where its tools are too old."""
    if sys.version_info < (3, 11):
        pytest.skip("the site is built with Python 3.11 or newer (docs/installation.md)")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        environment[name] = "http://127.0.0.1:9"  # whatever asked for a network would fail
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
