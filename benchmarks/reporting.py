"""How benchmarks measure and report: sides in turns, medians with their spread, one table, one JSON record.

Times on a shared machine are noisy; ratios of what ran side by side are not. So the sides of a comparison take turns,
and what is claimed is the median of the ratios of neighbours.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"


def in_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run the sides one after another, `rounds` times, the order reversed each time.

    Args:
        sides: by name; each runs once and returns its figure.
        rounds: how often.

    Returns:
        The figures of each side, in the order of the rounds.
    """
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds):
        for name in sorted(sides, reverse=bool(round_ % 2)):
            figures[name].append(sides[name]())
    return figures


def seconds_of(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of neighbours."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def spread(figures: Sequence[float]) -> str:
    """`median (lowest-highest)`."""
    return f"{statistics.median(figures):.4g} ({min(figures):.4g}-{max(figures):.4g})"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table."""
    cells = [[str(cell) if not isinstance(cell, float) else f"{cell:.4g}" for cell in row] for row in [columns, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def record(name: str, figures: Mapping[str, Any]) -> None:
    """Write the figures, and the machine they were measured on, to `benchmarks/records/NAME.json`."""
    RECORDS.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    text = json.dumps({"machine": machine, "load": os.getloadavg()[0], **figures}, indent=1)
    (RECORDS / f"{name}.json").write_text(text + "\n")
