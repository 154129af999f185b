"""A folder that runs share, so that only the first of them compiles."""

import uuid
from pathlib import Path

import pytest

from tests.process.running import CONFIG, MARK, marked


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Holds `tiny.toml` and the runs."""
    path = tmp_path_factory.mktemp("train")
    (path / "tiny.toml").write_text(CONFIG)
    return path


@pytest.fixture(scope="session")
def kills(pytestconfig):
    """How often a run is killed, and sent each signal."""
    return pytestconfig.getoption("--kills")


@pytest.fixture
def mark(monkeypatch):
    """Marks the processes of a test, all of which have to be gone at its end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    yield mark
    assert marked(mark) == {}
