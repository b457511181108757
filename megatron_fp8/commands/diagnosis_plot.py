"""Plots the ranking of a diagnosis."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check_ending(path: Path) -> None:
    """Raise ValueError if the file's suffix is not a supported image format."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--plot {str(path)!r} ends in no kind of picture: give one of .{', .'.join(kinds)}")


def draw(found: Any, path: Path, title: str, most: int = 24) -> None:
    """Bars of the worst findings: their distance in FP8, and marks for rounding alone.

    Raises ValueError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    findings = list(reversed(found.ranking[:most]))
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.28 * len(findings)), layout="constrained")
    positions = range(len(findings))
    colors = ["#c0392b" if finding.stands_out else "#7f8c8d" for finding in findings]
    axes.barh(positions, [finding.distance for finding in findings], color=colors, height=0.7)
    axes.plot(
        [finding.at_best for finding in findings], positions, "k|", markersize=9, label="rounding alone"
    )
    axes.set_yticks(positions, [finding.key for finding in findings], fontsize=8)
    axes.set_xlabel("distance of the gradient from high precision, this alone in FP8 (red: stands out)")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written ({error.strerror}): give another file") from error
    finally:
        plt.close(figure)
