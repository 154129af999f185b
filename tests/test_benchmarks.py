"""The benchmarks can be started; what they measure is theirs to say."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
COMMANDS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_says_what_it_takes(name):
    done = subprocess.run([sys.executable, BENCHMARKS / name, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, "--quick" in done.stdout) == (0, True), done.stderr
