"""From the command to the first optimizer step of examples/guess.toml, without and with JAX's compilation cache.

    python benchmarks/startup.py [--rounds 3] [--quick]

The baseline is the first start on a machine: every program is compiled.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import reporting

ENTRY = "import sys; from trouper.actors.cli import main; sys.exit(main())"
CONFIG = Path(__file__).parent.parent / "examples" / "guess.toml"


def first_step(cache: Path) -> float:
    """Seconds until the first step stands in metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, "-c", ENTRY, "train", str(CONFIG), "--run-dir", f"{folder}/run"]
        started = time.perf_counter()
        with subprocess.Popen(
            command,
            env=os.environ | {"XDG_CACHE_HOME": str(cache)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            while not metrics.exists() or not metrics.read_text():
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {process.returncode} before its first step")
                time.sleep(0.01)
            taken = time.perf_counter() - started
            process.kill()
    return taken


def main() -> int:
    """Start cold once a round, then warm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    given = parser.parse_args()
    cold, warm = [], []
    for _ in range(1 if given.quick else given.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(first_step(Path(cache)))
            warm.append(first_step(Path(cache)))
    rows = [["cold", reporting.spread(cold)], ["warm", reporting.spread(warm)]]
    reporting.show("seconds from the command to the first optimizer step of guess", ["start", "seconds"], rows)
    print(f"\nwarm / cold {reporting.median_ratio(warm, cold):.2f}")
    if not given.quick:
        reporting.record("startup", {"cold": cold, "warm": warm})
    return 0


if __name__ == "__main__":
    sys.exit(main())
