"""Where a model comes from: one string becomes a Hugging Face folder on this machine.

A local folder is used as it is; a `.gguf` file, given by path or as part of an installed package, is converted once
into the user's cache; anything else is a repository of the hub. Knows paths and errors, not what is in the files.
"""

import hashlib
import importlib.util
import os
import re
from functools import cache
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from trouper.channels import ModelError
from trouper.learner.gguf import convert, read_shape
from trouper.learner.model_config import ModelConfig
from trouper.learner.weights import read_config

_PACKAGE = "package://"
# Grows when a conversion would come out differently, so that old folders in the cache are left alone.
_CONVERSION = 1
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(source: str, *, cache_dir: Path | None = None) -> Path:
    """The Hugging Face folder that `source` names.

    Args:
        source: a folder; a `.gguf` file; `package://<package>/<file>.gguf` inside an installed Python package; or a
            hub id such as `Qwen/Qwen2.5-0.5B-Instruct`.
        cache_dir: where converted files are kept; None is `$XDG_CACHE_HOME/trouper/models`, or
            `~/.cache/trouper/models`. The hub has its own cache (`HF_HOME`).

    Returns:
        A folder with `config.json`, safetensors files and a tokenizer.

    Raises:
        ModelError: nothing is there, it cannot be converted, or the hub did not give it; with what to do.
    """
    file = gguf_file(source)
    if file is not None:
        return _converted(file, cache_dir)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json; give a model folder in Hugging Face format")
        return path
    if path.exists() or not _HUB_ID.fullmatch(source):
        raise ModelError(
            f"model {source!r} is no folder, no .gguf file and no hub id; give a path, package://<package>/<file>.gguf "
            "or <owner>/<name>"
        )
    return _from_hub(source)


def gguf_file(source: str) -> Path | None:
    """The `.gguf` file that `source` names, by path or inside a package; None when it names something else.

    Raises:
        ModelError: it names one that is not there.
    """
    if source.startswith(_PACKAGE):
        return _file_in_package(source)
    path = Path(source).expanduser()
    if path.suffix != ".gguf" or path.is_dir():
        return None
    if not path.is_file():
        raise ModelError(f"{path} is not there")
    return path


def model_shape(source: str) -> ModelConfig | None:
    """The shape of the model that `source` names; None for one that would have to be fetched first."""
    file = gguf_file(source)
    if file is not None:  # the file itself takes seconds to read: its tokenizer comes before anything else
        converted = _cached(file, None)
        return read_config(converted) if converted.is_dir() else read_shape(file)
    folder = Path(source).expanduser()
    return read_config(folder) if (folder / "config.json").is_file() else None


def _file_in_package(source: str) -> Path:
    name, _, file = source.removeprefix(_PACKAGE).partition("/")
    if not name.isidentifier() or not file.endswith(".gguf"):
        raise ModelError(f"model {source!r} is not of the form {_PACKAGE}<package>/<file>.gguf")
    spec = importlib.util.find_spec(name)  # finds the package without running its code
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    if not folders:
        raise ModelError(f"model {source!r}: no package {name} is installed; pip install {name.replace('_', '-')}")
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    held = sorted(str(path.relative_to(folder)) for folder in folders for path in folder.rglob("*.gguf"))
    raise ModelError(f"package {name} holds no {file}; its .gguf files: {', '.join(held) or 'none'}")


def _converted(file: Path, cache_dir: Path | None) -> Path:
    """The cached folder of a `.gguf` file, made if it is not there."""
    folder = _cached(file, cache_dir)
    if not folder.is_dir():
        try:
            convert(file, folder)
        except ModelError:
            # Another process may have been faster; its folder came from the same bytes.
            if not folder.is_dir():
                raise
    return folder


def _cached(file: Path, cache_dir: Path | None) -> Path:
    """Where the folder of a `.gguf` file is kept, whether it was made or not."""
    if cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME")
        cache_dir = (Path(home) if home else Path.home() / ".cache") / "trouper" / "models"
    stat = file.stat()
    return cache_dir / f"{file.stem}-{_digest(file.resolve(), stat.st_size, stat.st_mtime_ns)}"


@cache
def _digest(file: Path, size: int, modified: int) -> str:
    """Of what is in a file that has this size and was modified then: a start asks more than once."""
    digest = hashlib.blake2b(str(_CONVERSION).encode(), digest_size=8)
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _from_hub(repository: str) -> Path:
    instead = "or give the path of a local model folder"
    try:
        return Path(
            snapshot_download(repository, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])  # originals lie deeper
        )
    except GatedRepoError as error:
        raise ModelError(
            f"hub model {repository} is gated: accept its terms on the hub and set HF_TOKEN, {instead}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repository} that you may see: check the name, set HF_TOKEN, {instead}"
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"hub model {repository} is not in the local cache and the hub cannot be reached (HF_HUB_OFFLINE is "
            f"{os.environ.get('HF_HUB_OFFLINE', 'not set')}): download it once with a connection, {instead}"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"model {repository!r} is no local path and no hub id: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"the hub did not give {repository} ({error}); try again, {instead}") from error
