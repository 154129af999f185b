import importlib.util
import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from trouper.channels import ModelError
from trouper.learner.model_config import ModelConfig
from trouper.learner.weights import array_shapes, init_model, load_model, new_folder, save_model, write_arrays

_spec = importlib.util.spec_from_file_location("golden_weights", Path(__file__).with_name("golden_weights.py"))
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TINY = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def arrays_of(settings):
    shapes = array_shapes(ModelConfig.from_hf(settings))
    return {name: golden.weight(name, shape) for name, shape in shapes.items()}


@pytest.fixture
def write(tmp_path):
    """Write a model folder: settings and one file of arrays, by default the right ones."""

    def write(settings=TINY, arrays=None, name="model"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings))
        save_file(arrays_of(settings) if arrays is None else arrays, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def sharded(write):
    """A folder of two shards and an index."""
    folder = write()
    (folder / "model.safetensors").unlink()
    arrays = arrays_of(TINY)
    names = sorted(arrays)
    halves = {"model-00001-of-00002.safetensors": names[:6], "model-00002-of-00002.safetensors": names[6:]}
    for file, held in halves.items():
        save_file({name: arrays[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in halves.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def reindex(folder, **changes):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def holds(model, arrays):
    """Whether every parameter of a model is the array of its name."""
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert all(isinstance(leaf.get_value(), jax.Array) for _, leaf in params)
    first = model.layers[0]
    return (
        np.array_equal(model.embed_tokens.embedding[...], arrays[EMBEDDING])
        and np.array_equal(first.self_attn.q_proj.kernel[...], arrays["model.layers.0.self_attn.q_proj.weight"].T)
        and np.array_equal(first.down_proj.kernel[...], arrays["model.layers.0.mlp.down_proj.weight"].T)
        and np.array_equal(model.norm.scale[...], arrays["model.norm.weight"])
    )


def head_logits(head, hidden):
    return hidden @ head.T


HIDDEN = np.random.RandomState(0).standard_normal((3, 4)).astype(np.float32)
TIED = {**TINY, "tie_word_embeddings": True}


def test_a_tied_model_without_a_head_in_the_file(write):
    arrays = arrays_of(TIED)
    assert HEAD not in arrays
    model = load_model(write(TIED))
    np.testing.assert_allclose(model.logits(jnp.array(HIDDEN)), head_logits(arrays[EMBEDDING], HIDDEN), atol=1e-5)


def test_a_tied_model_whose_file_repeats_the_embedding_as_head(write):
    arrays = arrays_of(TIED)
    model = load_model(write(TIED, {**arrays, HEAD: arrays[EMBEDDING]}))
    assert not hasattr(model, "lm_head")
    np.testing.assert_allclose(model.logits(jnp.array(HIDDEN)), head_logits(arrays[EMBEDDING], HIDDEN), atol=1e-5)


def test_a_tied_model_with_another_head_in_the_file_needs_a_decision(write):
    arrays = arrays_of(TIED) | {HEAD: golden.weight(HEAD, (8, 4))}
    folder = write(TIED, arrays)
    with pytest.raises(
        ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie=True.*tie=False"
    ):
        load_model(folder)
    for tie, name in ((True, EMBEDDING), (False, HEAD)):
        logits = load_model(folder, tie=tie).logits(jnp.array(HIDDEN))
        np.testing.assert_allclose(logits, head_logits(arrays[name], HIDDEN), atol=1e-5)


@pytest.mark.parametrize("flag", [{}, {"tie_word_embeddings": False}])
def test_an_untied_model_needs_its_head(write, flag):
    arrays = arrays_of(TINY)
    whole = load_model(write({**TINY, **flag}, name="whole"))
    np.testing.assert_allclose(whole.logits(jnp.array(HIDDEN)), head_logits(arrays[HEAD], HIDDEN), atol=1e-5)
    del arrays[HEAD]
    with pytest.raises(ModelError, match=r"lm_head\.weight \[8, 4\] is missing"):
        load_model(write({**TINY, **flag}, arrays, name="headless"))


@pytest.mark.parametrize("tied", [True, False])
def test_saving_keeps_the_form_that_was_loaded(write, tmp_path, tied):
    model = load_model(write({**TINY, "tie_word_embeddings": tied}))
    save_model(model, tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert (HEAD in file.keys()) is not tied  # noqa: SIM118  # a safetensors file is no mapping
    again = load_model(tmp_path / "saved")
    assert again.config == model.config
    assert holds(again, arrays_of(model.config.to_hf()))


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_every_kind_of_model_is_saved_as_it_was_loaded(write, tmp_path, name):
    folder = write(golden.CONFIGS[name])
    save_model(load_model(folder), tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(after[key], array)
    assert ModelConfig.from_hf(json.loads((tmp_path / "saved" / "config.json").read_text())) == ModelConfig.from_hf(
        golden.CONFIGS[name]
    )


def test_parameters_without_a_module_are_saved_too(write, tmp_path):
    model = load_model(write())
    save_model((model.config, jax.tree.leaves(nnx.state(model, nnx.Param))), tmp_path / "saved", dtype=jnp.bfloat16)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {array.dtype for array in saved.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    expected = arrays_of(TINY)[HEAD].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(saved[HEAD], expected)


def test_tokenizer_files_and_token_ids_travel_with_the_model(write, tmp_path):
    folder = write({**TINY, "bos_token_id": 3, "eos_token_id": [4, 5]})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5], "temperature": 0.6}')
    (folder / "notes.txt").write_text("not a part of the model")
    save_model(load_model(folder), tmp_path / "saved", tokenizer_from=folder)
    saved = tmp_path / "saved"
    assert sorted(path.name for path in saved.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((saved / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (3, [4, 5], None)
    assert json.loads((saved / "generation_config.json").read_text())["temperature"] == 0.6


def test_saving_never_overwrites(write, tmp_path):
    model = load_model(write())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("precious")
    with pytest.raises(ModelError, match="taken exists and is not empty"):
        save_model(model, tmp_path / "taken")
    (tmp_path / "empty").mkdir()
    save_model(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_folder_whose_writing_fails_leaves_nothing(tmp_path):
    def fail():
        with new_folder(tmp_path / "model") as new:
            (new / "half").write_text("done")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_writers_of_a_folder_loses(tmp_path):
    def second():
        with new_folder(tmp_path / "model") as slow:
            (slow / "who").write_text("slow")
            with new_folder(tmp_path / "model") as quick:
                (quick / "who").write_text("quick")

    with pytest.raises(ModelError, match="exists"):
        second()
    assert (tmp_path / "model" / "who").read_text() == "quick"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_array_of_the_wrong_shape_is_never_written(tmp_path):
    with pytest.raises(ModelError, match=r"a has shape \[2\]; the model needs \[3\]"):
        write_arrays(tmp_path / "f", {"a": (3,)}, np.float32, lambda _: np.zeros(2))
    with pytest.raises(ModelError, match="int8"):
        write_arrays(tmp_path / "f", {"a": (3,)}, np.int8, lambda _: np.zeros(3))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_get_the_dtype_that_was_asked_for(write, stored, param_dtype):
    arrays = {name: array.astype(stored) for name, array in arrays_of(TINY).items()}
    model = load_model(write(TINY, arrays), param_dtype=param_dtype, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(param_dtype)}
    np.testing.assert_array_equal(model.lm_head.kernel[...], arrays[HEAD].T.astype(param_dtype))
    assert model.embed_tokens(jnp.array([1])).dtype == jnp.bfloat16


def test_loaded_parameters_can_be_donated(write):
    state = nnx.state(load_model(write()), nnx.Param)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_old_rotary_buffers_are_known_and_dropped(write):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32)}
    assert holds(load_model(write(TINY, arrays_of(TINY) | buffer)), arrays_of(TINY))


def test_missing_unknown_and_misshapen_arrays_are_all_named(write):
    arrays = arrays_of(TINY)
    del arrays["model.norm.weight"]
    arrays["model.layers.1.mlp.up_proj.weight"] = np.zeros((6, 4), np.float32)
    arrays["model.layers.0.self_attn.q_proj.weight"] = np.zeros((2, 4), np.float32)
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((2, 4), np.int8)
    with pytest.raises(ModelError) as caught:
        load_model(write(TINY, arrays))
    message = str(caught.value)
    assert "model.norm.weight [4] is missing" in message
    assert "model.layers.1.mlp.up_proj.weight [6, 4] is in the files" in message
    assert "model.layers.0.self_attn.q_proj.weight has shape [2, 4], config.json needs [4, 4]" in message
    assert "model.layers.0.self_attn.k_proj.weight has dtype I8" in message


def test_an_assumed_head_width_is_an_error_with_both_shapes(write):
    settings = {**TINY, "head_dim": 8}
    with pytest.raises(ModelError, match=r"q_proj\.weight has shape \[4, 4\], config\.json needs \[16, 4\]"):
        load_model(write(settings, arrays_of(TINY)))


def test_shards_are_read_by_their_index(sharded):
    assert holds(load_model(sharded), arrays_of(TINY))


def test_a_lost_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_model(sharded)


def test_a_stray_file_beside_an_index_is_ignored_and_said_once(sharded, caplog):
    save_file({name: array + 1 for name, array in arrays_of(TINY).items()}, sharded / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert holds(load_model(sharded), arrays_of(TINY))
    assert [record.getMessage().count("model.safetensors") for record in caplog.records] == [2]  # and the index


def test_an_index_of_more_files_than_are_needed_is_stale(sharded):
    reindex(sharded, **{"model.norm.weight": "model-00003-of-00003.safetensors"})
    with pytest.raises(ModelError, match=r"stale.*model-00003-of-00003\.safetensors.*delete the index"):
        load_model(sharded)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded):
    reindex(sharded, **{HEAD: "model-00002-of-00002.safetensors"})
    with pytest.raises(ModelError, match=r"lm_head\.weight is in model-00002-of-00002.*it is in model-00001-of-00002"):
        load_model(sharded)


def test_an_array_the_index_does_not_know_is_refused(sharded):
    path = sharded / "model-00001-of-00002.safetensors"
    save_file(load_file(path) | {"more": np.zeros(1, np.float32)}, path)
    with pytest.raises(ModelError, match="more is in a shard but not in"):
        load_model(sharded)


def test_two_files_without_an_index_are_joined_unless_they_clash(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert holds(load_model(sharded), arrays_of(TINY))
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "copy.safetensors")
    with pytest.raises(ModelError, match=r"is in both copy\.safetensors and model-00001-of-00002\.safetensors"):
        load_model(sharded)


@pytest.mark.parametrize("keep", [0, 5, 200, -3])
def test_a_truncated_file_is_named(sharded, keep):
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is not a whole"):
        load_model(sharded)


def test_a_folder_that_is_no_model_is_refused_with_what_is_missing(write, tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is not there"):
        load_model(tmp_path)
    folder = write()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is no JSON"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        load_model(folder)


def test_a_fresh_model_survives_saving(tmp_path):
    model = init_model(ModelConfig.from_hf(golden.CONFIGS["qwen3"]), 0)
    save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    before, after = (nnx.state(m, nnx.Param) for m in (model, again))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
