import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("channels", "envs", "learner", "actors")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PYTHON = sorted(
    path
    for folder in (*FOLDERS, "examples", "benchmarks", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
TEXTS = sorted(
    path
    for folder in (*FOLDERS, "examples", "benchmarks", "scripts", "tests", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.suffix in {"", ".py", ".toml", ".md", ".jinja", ".json", ".jsonl"}
) + sorted(path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"})


def name(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """Every module that a file imports anywhere, function bodies included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def forbidden(folder):
    """Top-level modules, and folders of trouper, that a folder may not import."""
    above = {
        "channels": {"trouper.envs", "trouper.learner", "trouper.actors"},
        "envs": {"trouper.learner", "trouper.actors"},
        "learner": {"trouper.envs", "trouper.actors"},
        "actors": set(),
    }[folder]
    accelerators = {"jax", "jaxlib", "flax", "optax", "orbax"}
    return (
        above | {"channels": accelerators, "envs": accelerators, "learner": {"trio", "anyio"}, "actors": set()}[folder]
    )


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_point_one_way(path):
    banned = forbidden(path.relative_to(ROOT).parts[0])
    for module in imported(path):
        parts = module.split(".")
        assert not {parts[0], ".".join(parts[:2])} & banned, f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name(path)} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_holds_one_concept(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{name(path)} has {lines} lines"


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_no_file_knows_a_machine(path):
    places = re.compile(r"(?<![\w.~-])/(?:" + "|".join(("work", "home", "root", "tmp", "Users", "mnt")) + r")/\w")
    found = places.search(path.read_text(encoding="utf-8"))
    assert not found, f"{name(path)} names {found.group()}"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_no_file_names_a_folder_without_its_package(path):
    for module in imported(path):
        assert module.split(".")[0] not in FOLDERS, f"{name(path)} imports {module}: a second copy of every class"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "line", "contract"),
    [
        ("channels", "import trouper.envs", "imports point one way: channels <- envs, learner <- actors BROKEN"),
        ("envs", "import trouper.learner.loss", "imports point one way: channels <- envs, learner <- actors BROKEN"),
        (
            "learner",
            "import trouper.actors.config",
            "imports point one way: channels <- envs, learner <- actors BROKEN",
        ),
        ("envs", "import jax.numpy", "no JAX in channels and envs BROKEN"),
        ("learner", "import trio", "no Trio in the learner BROKEN"),
        ("channels", "", "Contracts: 3 kept, 0 broken"),
    ],
)
def test_the_import_contract_breaks_where_it_should(tmp_path, folder, line, contract):
    for each in FOLDERS:
        shutil.copytree(ROOT / each, tmp_path / "trouper" / each, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "trouper" / folder / "intruder.py").write_text(f"{line}\n")
    # Where trouper is installed from says sys.path; the copy has to come first.
    linted = (
        "import sys; sys.path.insert(0, '.'); sys.meta_path = [f for f in sys.meta_path if '__editable__' not in "
        "getattr(f, '__module__', '')]\n"
        "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", linted], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert contract in done.stdout, done.stdout + done.stderr
    assert (done.returncode == 0) == (not line)
    assert ("intruder ->" in done.stdout) == bool(line)
