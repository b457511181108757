"""What the site has beside docs/: README.md is its first page, and what pages link to elsewhere comes along.

So every page is written once, and links that work in a checkout work in the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_RESULTS = "benchmarks/results"
_LINK = re.compile(r"(\]\()([^)#\s:]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add pages of the repository's root, the results of benchmarks, and every file that a page links to."""
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        uri = "index.md" if name == "README.md" else name
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    results = sorted((ROOT / _RESULTS).glob("*.md"))
    listed = "".join(f"* [{path.stem.replace('_', ' ')}]({path.name})\n" for path in results)
    start = "# Results\n\nWhat was measured, on which machine, with which versions.\n\n"
    files.append(File.generated(config, f"{_RESULTS}/index.md", content=start + listed))
    for path in results:
        files.append(File.generated(config, f"{_RESULTS}/{path.name}", abs_src_path=str(path)))
    for file in [file for file in files if file.is_documentation_page()]:
        for _, link in _LINK.findall(file.content_string):
            target = _in_repository(link, file)
            if target.is_file() and not files.get_file_from_path(_in_site(target)):
                files.append(File.generated(config, _in_site(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them."""
    here = Path(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        target = _in_repository(match[2], page.file)
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        return f"{match[1]}{_relative(_in_site(target), here)}"

    return _LINK.sub(moved, markdown)


def _in_repository(link: str, file: File) -> Path:
    """What a link of a page points to in a checkout."""
    from_root = file.src_uri in ("index.md", "CHANGELOG.md", "CONTRIBUTING.md") or file.src_uri.startswith(
        _RESULTS
    )
    page = ROOT / ("" if from_root else "docs") / file.src_uri
    return (page.parent / link).resolve()


def _in_site(target: Path) -> str:
    """Where the site has a file of the repository: pages of docs/ at its top, all else under its own path."""
    path = target.relative_to(ROOT).as_posix()
    if path == "README.md":
        return "index.md"
    if target.is_dir():
        return f"{path}/index.md"
    return path.removeprefix("docs/")


def _relative(path: str, folder: Path) -> str:
    up = "../" * len(folder.parts)
    return f"{up}{path}"
