"""Parameters from and to a Hugging Face folder: every array is accounted for, or the model is not loaded.

Knows `config.json` and safetensors files, single or sharded by an index. Where a folder comes from is for
`trouper.learner.source`; tokenizer files are copied and never looked into.
"""

import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from trouper.channels import ModelError
from trouper.learner.decoder import Decoder
from trouper.learner.model_config import ModelConfig

Shape: TypeAlias = tuple[int, ...]
_Path: TypeAlias = tuple[Any, ...]

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
_MLP = ("gate_proj", "up_proj", "down_proj")
# Old checkpoints store the rotary frequencies, which follow from the configuration.
_COMPUTED = "rotary_emb.inv_freq"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def init_model(
    config: ModelConfig,
    seed: int,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    remat: bool = False,
) -> Decoder:
    """A model with fresh random parameters, a pure function of (config, seed, param_dtype); see `Decoder`."""
    return Decoder(config, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype), remat=remat, rngs=nnx.Rngs(seed))


def array_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every array of this model's Hugging Face checkpoint: its name and shape, projections as [out, in]."""
    return _shapes(nnx.state(nnx.eval_shape(lambda: init_model(config, 0)), nnx.Param))


def read_config(folder: Path) -> ModelConfig:
    """The shape of the model in a Hugging Face folder.

    Raises:
        ModelError: there is no `config.json`, it is no JSON, or it asks for maths that is not computed.
    """
    return ModelConfig.from_hf(_read_json(folder / "config.json"))


def load_model(
    folder: Path,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    tie: bool | None = None,
) -> Decoder:
    """Read a Hugging Face folder.

    Files are memory-mapped and read one array at a time, so little more than the parameters is held.

    Args:
        folder: with `config.json` and safetensors files.
        dtype: what matrices are multiplied in.
        param_dtype: what parameters are stored in.
        remat: recompute each block in the backward pass.
        tie: None follows the file's `tie_word_embeddings`; True makes the embedding the head, whatever head the
            file holds; False asks for a head of its own.

    Returns:
        A decoder whose every parameter comes from the files.

    Raises:
        ModelError: the configuration asks for maths that is not computed; an array is missing, unknown, misshapen
            or no float; index and files disagree; a file is broken; or the model says it is tied and holds a head
            that differs from the embedding. Everything wrong is named.
    """
    config = read_config(folder)
    if tie is not None:
        config = msgspec.structs.replace(config, tie_word_embeddings=tie)
    graph, state = nnx.split(
        nnx.eval_shape(lambda: init_model(config, 0, dtype=dtype, param_dtype=param_dtype, remat=remat))
    )
    checkpoint = _Checkpoint(folder)
    idle_head = config.tie_word_embeddings and _HEAD in checkpoint.shapes
    _check_arrays(folder, _shapes(state), checkpoint, {_HEAD} if idle_head else set())
    if idle_head and tie is None and not np.array_equal(checkpoint.read(_HEAD), checkpoint.read(_EMBEDDING)):
        raise ModelError(
            f"{folder}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}; "
            "pass tie=True to use the embedding, or tie=False to use the head"
        )
    flat = []
    for path, leaf in nnx.to_flat_state(state):
        array = checkpoint.read(_hf_name(path))
        # Cast and laid out by NumPy, then copied by JAX: an alias of a file could never be donated.
        laid_out = np.ascontiguousarray(_oriented(path, array), dtype=leaf.get_value().dtype)
        flat.append((path, leaf.replace(jnp.array(laid_out))))
    decoder: Decoder = nnx.merge(graph, nnx.from_flat_state(flat))
    return decoder


def save_model(
    model: Decoder | tuple[ModelConfig, Any],
    folder: Path,
    *,
    tokenizer_from: Path | None = None,
    dtype: DTypeLike | None = None,
) -> None:
    """Write a Hugging Face folder that transformers opens; it appears whole or not at all.

    A tied model is written without a head, one with a head of its own with it.

    Args:
        model: the decoder, or its configuration and its parameters in the order of `nnx.state(decoder, nnx.Param)`.
        folder: must not exist, or be empty.
        tokenizer_from: a folder whose tokenizer files, chat template, token ids and generation settings belong to
            this model; None writes none.
        dtype: what arrays are stored in; None keeps the parameters' own.

    Raises:
        ModelError: `folder` holds something already, or `config.json` cannot express the model.
    """
    if isinstance(model, tuple):
        config = model[0]
        state = nnx.state(nnx.eval_shape(lambda: init_model(config, 0)), nnx.Param)
        state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(model[1]))
    else:
        config, state = model.config, nnx.state(model, nnx.Param)
    leaves = {_hf_name(path): (path, leaf.get_value()) for path, leaf in nnx.to_flat_state(state)}
    stored = np.dtype(dtype if dtype is not None else leaves[_EMBEDDING][1].dtype)
    settings = {**config.to_hf(), **dict.fromkeys(_TOKEN_IDS), "torch_dtype": stored.name}
    generation: dict[str, Any] = {}
    if tokenizer_from is not None:
        source = _read_json(tokenizer_from / "config.json")
        settings |= {key: source.get(key) for key in _TOKEN_IDS}
        generation = {key: settings[key] for key in _TOKEN_IDS if settings[key] is not None}
        if (tokenizer_from / "generation_config.json").exists():
            generation = _read_json(tokenizer_from / "generation_config.json")
    with new_folder(folder) as new:
        write_json(new / "config.json", settings)
        write_json(new / "generation_config.json", generation)
        write_arrays(new / "model.safetensors", _shapes(state), stored, lambda name: _oriented(*leaves[name]))
        for name in _TOKENIZER_FILES:
            if tokenizer_from is not None and (tokenizer_from / name).exists():
                shutil.copyfile(tokenizer_from / name, new / name)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name beside `folder`, which takes its place when the block ends without an error.

    Raises:
        ModelError: `folder` holds something already. Two processes may race: one wins, the other gets this.
    """
    taken = ModelError(f"{folder} exists and is not empty; choose another folder or remove it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise taken
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        try:
            temporary.rename(folder)
        except OSError as error:
            if folder.exists():
                raise taken from error
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, readable."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_arrays(
    path: Path, shapes: Mapping[str, Shape], dtype: DTypeLike, read: Callable[[str], NDArray[Any] | jax.Array]
) -> None:
    """Write a safetensors file, holding one array at a time (the library's own writer needs all of them).

    Args:
        path: the new file.
        shapes: name and shape of each array.
        dtype: what they are stored in: float32, float16 or bfloat16.
        read: gives the array of a name.

    Raises:
        ModelError: `read` gave another shape, or the format has no such dtype.
    """
    stored = np.dtype(dtype)
    kind = next((name for name, known in _DTYPES.items() if known == stored), None)
    if kind is None:
        raise ModelError(f"cannot store parameters as {stored}; choose float32, float16 or bfloat16")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * stored.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            array = np.ascontiguousarray(read(name), dtype=stored)
            if array.shape != shape:
                raise ModelError(f"{name} has shape {list(array.shape)}; the model needs {list(shape)}")
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


class _Checkpoint:
    """The arrays of a folder, memory-mapped; `shapes` and `dtypes` are known before any is read."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder; give one with config.json and model.safetensors")
        index = folder / _INDEX
        self._files = _files_by_index(folder, index) if index.exists() else _files_by_glob(folder)
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        for name, file in self._files.items():
            part = file.get_slice(name)
            self.shapes[name], self.dtypes[name] = tuple(part.get_shape()), part.get_dtype()

    def read(self, name: str) -> NDArray[Any]:
        array: NDArray[Any] = self._files[name].get_tensor(name)
        return array


def _files_by_index(folder: Path, index: Path) -> dict[str, Any]:
    """The open file of each array, as the index has it; other files in the folder do not count."""
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index} has no weight_map; download it again, or delete it if one file holds everything")
    present = {shard: _open(folder / shard) for shard in sorted(set(names.values())) if (folder / shard).is_file()}
    held = {shard: set(file.keys()) for shard, file in present.items()}
    everywhere = set().union(*held.values())
    absent = sorted(set(names.values()) - present.keys())
    if absent and names.keys() <= everywhere:
        raise ModelError(
            f"{index.name} in {folder} is stale: it names {', '.join(absent)}, which is not there, but the other files "
            "hold every array; delete the index, or write it anew"
        )
    if absent:
        raise ModelError(f"{folder} lacks {', '.join(absent)}, named by {index.name}; download the folder again")
    for name, shard in names.items():
        if name not in held[shard]:
            elsewhere = sorted(other for other, arrays in held.items() if name in arrays)
            found = f"it is in {', '.join(elsewhere)}" if elsewhere else "no file has it"
            raise ModelError(f"{index.name} in {folder} says {name} is in {shard}, but {found}; the index is wrong")
    if unlisted := sorted(everywhere - names.keys()):
        raise ModelError(f"{folder}: {unlisted[0]} is in a shard but not in {index.name}; the index is stale")
    strays = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in present)
    if strays:
        _log.warning("%s: not read, since %s does not name them: %s", folder, index.name, ", ".join(strays))
    return {name: present[shard] for name, shard in names.items()}


def _files_by_glob(folder: Path) -> dict[str, Any]:
    """The open file of each array, of all safetensors files in a folder without an index."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"{folder} holds no .safetensors file; other formats are not read (a .gguf file is given by its own path)"
        )
    files: dict[str, Any] = {}
    origin: dict[str, Path] = {}
    for path in paths:
        opened = _open(path)
        for name in opened.keys():  # noqa: SIM118  # a safetensors file is no mapping
            if name in files:
                raise ModelError(
                    f"{name} is in both {origin[name].name} and {path.name} in {folder}, and no {_INDEX} says which "
                    "counts; remove the file that does not belong"
                )
            files[name], origin[name] = opened, path
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); download it again") from error


def _check_arrays(folder: Path, expected: Mapping[str, Shape], found: _Checkpoint, idle: set[str]) -> None:
    """Compare what the configuration needs with what the files hold."""
    problems = []
    for name, shape in expected.items():
        if name not in found.shapes:
            problems.append(f"{name} {list(shape)} is missing")
        elif found.shapes[name] != shape:
            problems.append(f"{name} has shape {list(found.shapes[name])}, config.json needs {list(shape)}")
        elif found.dtypes[name] not in _DTYPES:
            problems.append(f"{name} has dtype {found.dtypes[name]}; quantized checkpoints are not read")
    for name, shape in found.shapes.items():
        if name not in expected and name not in idle and not name.endswith(_COMPUTED):
            problems.append(f"{name} {list(shape)} is in the files, but this model has no such array")
    if not problems:
        return
    if _HEAD in expected and _HEAD not in found.shapes:
        problems.append(
            "a model whose head is its embedding says tie_word_embeddings = true, or is loaded with tie=True"
        )
    shown = problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])
    raise ModelError(f"{folder} does not hold the model its config.json describes: " + "; ".join(shown))


def _hf_name(path: _Path) -> str:
    """The checkpoint's name of a parameter: (layers, 0, up_proj, kernel) is model.layers.0.mlp.up_proj.weight."""
    *modules, leaf = path
    parts = [str(part) for part in modules]
    if parts[-1] in _MLP:
        parts.insert(-1, "mlp")
    if parts[0] != "lm_head":
        parts.insert(0, "model")
    return ".".join([*parts, _LEAVES[leaf]])


def _shapes(state: nnx.State[Any, Any]) -> dict[str, Shape]:
    """The checkpoint's name and shape of each parameter."""
    flat = ((path, leaf.get_value().shape) for path, leaf in nnx.to_flat_state(state))
    return {_hf_name(path): shape[::-1] if path[-1] == "kernel" else shape for path, shape in flat}


def _oriented(path: _Path, array: NDArray[Any] | jax.Array) -> NDArray[Any]:
    """A parameter as the checkpoint has it, or the other way round: kernels are [in, out] here, [out, in] there."""
    return np.asarray(array).T if path[-1] == "kernel" else np.asarray(array)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is not there; a model folder has config.json and model.safetensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object; download it again")
    return value
