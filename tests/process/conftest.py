"""A folder that runs share, so that only the first of them compiles."""

import pytest

from tests.process.running import CONFIG


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Holds `tiny.toml` and the runs."""
    path = tmp_path_factory.mktemp("train")
    (path / "tiny.toml").write_text(CONFIG)
    return path
