import os
import subprocess
import sys
import textwrap

import jax
import pytest

from trouper.channels import ConfigError
from trouper.learner.batch import BatchConfig
from trouper.learner.learner import Learner
from trouper.learner.loss import LossConfig
from trouper.learner.mesh import MeshConfig, make_mesh, param_sharding
from trouper.learner.optimizer import OptimizerConfig

# A process of its own: the number of CPU devices is fixed when JAX starts.
EIGHT_DEVICES = textwrap.dedent(
    """
    import jax, numpy as np
    from flax import nnx
    from trouper.channels import Attempt, Episode, Group, Row, Task
    from trouper.learner.batch import BatchConfig
    from trouper.learner.checksum import checksum
    from trouper.learner.decoder import Decoder
    from trouper.learner.learner import Learner
    from trouper.learner.loss import LossConfig
    from trouper.learner.mesh import MeshConfig
    from trouper.learner.model_config import ModelConfig
    from trouper.learner.optimizer import OptimizerConfig

    shape = ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=8, intermediate_size=24, attention_bias=True)
    rng = np.random.default_rng(0)

    def episode(slot, member, prompt):
        tokens = np.r_[prompt, rng.integers(0, 32, 3 + member)].astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        row = Row(tokens, mask, np.where(mask, -2, 0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32))
        return Episode(Attempt(slot, slot, member, 0, 0, Task("t")), (row,), float(member), "done", 1)

    steps = [[Group(s, s, tuple(episode(s, m, rng.integers(0, 32, 4)) for m in range(3)),
                    np.array([-1, 0.25, 0.75], np.float32)) for s in range(3)] for _ in range(2)]
    results = {}
    for axes in [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]:
        config = MeshConfig(data=axes[0], fsdp=axes[1], tensor=axes[2])
        learner = Learner(Decoder(shape, rngs=nnx.Rngs(0)), loss=LossConfig(beta=0.1),
                          optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-4), mesh=config,
                          batch=BatchConfig(row_tokens=24, micro_batch_size=8))
        for groups in steps:
            learner.add(groups)
            metrics = learner.update()
        assert {len(p.sharding.device_set) for p in learner.params} == {config.devices}
        kernel = learner.state_tree()["params"]["layers/0/gate_proj/kernel"]
        assert kernel.addressable_shards[0].data.shape == (16 // axes[1], 24 // axes[2])
        moment = next(a for a in learner.state_tree()["optimizer"].values() if a.shape == kernel.shape)
        assert moment.sharding == kernel.sharding
        spread, gathered = learner.copy_params(), learner.copy_params(device=jax.devices()[5])
        assert {d.id for p in gathered for d in p.devices()} == {5}
        assert checksum(spread) == checksum(gathered)
        results[axes] = metrics, np.concatenate([np.asarray(p).reshape(-1) for p in gathered])
    metrics, params = results.pop((1, 1, 1))
    for axes, (others, found) in results.items():
        for name, value in metrics.items():
            assert abs(others[name] - value) <= 1e-5 * max(1, abs(value)), (axes, name, value, others[name])
        assert np.abs(found - params).max() <= 2e-5, (axes, np.abs(found - params).max())
    print("same on", sorted(results))
    """
)


@pytest.mark.slow
def test_eight_devices_take_the_same_steps_as_one():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("same on")


def test_one_device_is_the_smallest_mesh():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}


def test_too_few_devices_are_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match="data=2 x fsdp=3 x tensor=4 takes 24 devices and there are 1"):
        make_mesh(MeshConfig(data=2, fsdp=3, tensor=4), jax.devices()[:1])


def test_rows_that_cannot_be_shared_out_are_refused(make_decoder):
    with pytest.raises(ConfigError, match="micro_batch_size = 3"):
        Learner(
            make_decoder(),
            loss=LossConfig(),
            optimizer=OptimizerConfig(),
            mesh=MeshConfig(data=2),
            batch=BatchConfig(row_tokens=8, micro_batch_size=3),
        )


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("embed_tokens/embedding", ("tensor", "fsdp")),
        ("layers/0/self_attn/q_proj/kernel", ("fsdp", "tensor")),
        ("layers/0/self_attn/q_proj/bias", ("tensor",)),
        ("layers/11/down_proj/kernel", ("tensor", "fsdp")),
        ("norm/scale", ()),
        ("something/new", ()),
    ],
)
def test_parameters_are_placed_by_name(name, spec):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert tuple(param_sharding(mesh, name, (8, 8)[: max(len(spec), 1)]).spec) == spec
