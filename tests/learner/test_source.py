import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from tokenizers import pre_tokenizers

from trouper.channels import ModelError
from trouper.learner import source as door
from trouper.learner.model_config import ModelConfig
from trouper.learner.source import model_shape, resolve_model
from trouper.learner.weights import init_model, load_model, read_config, save_model

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=4,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    intermediate_size=6,
    attention_bias=True,
    tie_word_embeddings=True,
    model_type="qwen2",
)
BLOCK = {
    "attn_norm.weight": (4,),
    "ffn_norm.weight": (4,),
    "attn_q.weight": (4, 4),
    "attn_q.bias": (4,),
    "attn_k.weight": (2, 4),
    "attn_k.bias": (2,),
    "attn_v.weight": (2, 4),
    "attn_v.bias": (2,),
    "attn_output.weight": (4, 4),
    "ffn_gate.weight": (6, 4),
    "ffn_up.weight": (6, 4),
    "ffn_down.weight": (4, 6),
}


def write_gguf(path, fill=0.5):
    gguf = pytest.importorskip("gguf")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(32)
    writer.add_embedding_length(4)
    writer.add_block_count(1)
    writer.add_feed_forward_length(6)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet())[:-1], "ab"])
    writer.add_token_types([1] * 256)
    writer.add_token_merges(["a b"])
    for name, shape in {"token_embd.weight": (256, 4), "output_norm.weight": (4,)}.items():
        writer.add_tensor(name, np.full(shape, fill, np.float32))
    for name, shape in BLOCK.items():
        writer.add_tensor(f"blk.0.{name}", np.full(shape, fill, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package with a model in it, whose code must not run."""
    folder = tmp_path / "site" / "tiny_model_package"
    write_gguf(folder / "tiny.gguf")
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return "tiny_model_package"


def test_a_local_folder_is_used_as_it_is(tmp_path, monkeypatch):
    save_model(init_model(CONFIG, 0), tmp_path / "model")
    assert resolve_model(str(tmp_path / "model")) == tmp_path / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == Path("model")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_gguf_file_is_converted_once(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(file), cache_dir=tmp_path / "cache")
    assert load_model(folder).config.model_type == "qwen2"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(file), cache_dir=tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_another_file_of_the_same_name_gets_a_folder_of_its_own(tmp_path):
    first = resolve_model(str(write_gguf(tmp_path / "a" / "tiny.gguf")), cache_dir=tmp_path / "cache")
    copy = resolve_model(str(write_gguf(tmp_path / "b" / "tiny.gguf")), cache_dir=tmp_path / "cache")
    other = resolve_model(str(write_gguf(tmp_path / "c" / "tiny.gguf", fill=0.25)), cache_dir=tmp_path / "cache")
    assert copy == first
    assert other != first
    assert other.name.startswith("tiny-")


def test_conversions_are_kept_in_the_users_cache(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_model(str(file)).parent == tmp_path / "xdg" / "trouper" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_model(str(file)).parent == tmp_path / "home" / ".cache" / "trouper" / "models"


def test_the_shape_is_the_same_before_and_after_the_conversion(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    file = write_gguf(tmp_path / "tiny.gguf")
    before = model_shape(str(file))
    folder = resolve_model(str(file))
    assert model_shape(str(file)) == before == read_config(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 7}))
    assert model_shape(str(file)).num_hidden_layers == 7  # it is the folder that is read


def test_a_failed_conversion_leaves_nothing_and_can_be_tried_again(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    file.write_bytes(whole[:-64])
    with pytest.raises(ModelError, match="not a whole"):
        resolve_model(str(file), cache_dir=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))
    file.write_bytes(whole)
    load_model(resolve_model(str(file), cache_dir=tmp_path / "cache"))


@pytest.mark.slow
def test_two_processes_at_once_get_the_same_whole_folder(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    program = (
        "import sys; from pathlib import Path; from trouper.learner.source import resolve_model; "
        "print('ready', flush=True); input(); print(resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(file), str(tmp_path / "cache")]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], answers
    folders = {folder.strip() for folder, _ in answers}
    assert len(folders) == 1
    load_model(Path(folders.pop()))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_loser_of_a_race_takes_the_winners_folder(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    convert = door.convert

    def overtaken(source, folder):
        convert(source, folder)  # by the other process
        convert(source, folder)

    monkeypatch.setattr(door, "convert", overtaken)
    load_model(resolve_model(str(file), cache_dir=tmp_path / "cache"))


def test_a_file_inside_a_package_is_found_without_running_its_code(package, tmp_path):
    folder = resolve_model(f"package://{package}/tiny.gguf", cache_dir=tmp_path / "cache")
    assert load_model(folder).config.vocab_size == 256
    assert package not in sys.modules


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(ModelError, match="pip install no-such-models"):
        resolve_model("package://no_such_models/a.gguf")


def test_a_file_a_package_does_not_hold_is_answered_with_those_it_holds(package):
    with pytest.raises(ModelError, match=r"holds no other\.gguf; its \.gguf files: tiny\.gguf"):
        resolve_model(f"package://{package}/other.gguf")


@pytest.mark.parametrize("source", ["package://", "package://a", "package://a/b.bin", "package://a.b/c.gguf"])
def test_a_malformed_package_source_is_refused(source):
    with pytest.raises(ModelError, match="is not of the form package://"):
        resolve_model(source)


@pytest.mark.parametrize("source", ["", "./not/there", "/not/there", "a/b/c", "C:\\models", "https://hub/a/b"])
def test_what_is_neither_a_path_nor_a_hub_id_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no hub id|no config"):
        resolve_model(source)


def test_a_gguf_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"none\.gguf is not there"):
        resolve_model(str(tmp_path / "none.gguf"))


def test_a_hub_model_asks_only_for_the_files_that_are_used(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repository, **kwargs):
        asked.update(kwargs, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(door, "snapshot_download", snapshot_download)
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct") == tmp_path
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    unused = ["pytorch_model.bin", "README.md", "original/consolidated.safetensors", "onnx/config.json"]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*files, *unused], allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files


def test_a_hub_model_without_a_connection_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"nobody/nothing is not in the local cache.*HF_HUB_OFFLINE.*local model folder"
    ):
        resolve_model("nobody/nothing")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: errors.HFValidationError("bad"), "no hub id"),
        (lambda: OSError("disk full"), "disk full"),
        (lambda: errors.LocalEntryNotFoundError("no net"), "cannot be reached"),
    ],
)
def test_what_the_hub_raises_becomes_a_model_error(error, said, monkeypatch):
    def fail(*args, **kwargs):
        raise error()

    monkeypatch.setattr(door, "snapshot_download", fail)
    with pytest.raises(ModelError, match=said):
        resolve_model("some/model")
