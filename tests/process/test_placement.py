"""Trainer and sampler on devices of their own: the same run as on one device, in a process that has several."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from safetensors.numpy import load_file

from trouper.actors.metrics import read_metrics

STEPS = 6

# A process of its own: the number of CPU devices is fixed when JAX starts.
PROGRAM = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path

    import jax

    from trouper.actors.config_file import parse_config
    from trouper.actors.launch import export, launch
    from trouper.actors.standard import standard_graph
    from trouper.learner.checksum import checksum

    def right(task, messages, text):
        return float(task.payload["answer"] in text) + 0.1 * len(set(text))

    def configured(steps, placement, sections):
        return parse_config({
            "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                                  "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}},
            "tasks": {"source": "tasks.jsonl"},
            "chat": {"format": "plain", "alphabet": "0123456789;", "stop": ";"},
            "reward": {"functions": ["placed:right"]},
            "sampling": {"max_prompt_tokens": 2, "max_response_tokens": 6, "max_context_tokens": 16},
            "engine": {"slots": 4, "chunk": 2, "prefill_rows": 4, "prefill_tokens": 2},
            # One group a step, exactly on-policy: nothing depends on who is done first.
            "rollout": {"num_generations": 4, "max_concurrency": 4, "max_staleness": 0},
            "train": {"max_steps": steps, "groups_per_step": 1},
            "optimizer": {"learning_rate": 1e-2},
            "log": {"episodes_per_step": 100},
            "checkpoint": {"save_interval_steps": 2},
            "placement": placement,
            **sections,
        })

    def run(name, parts, placement, **sections):
        built = []
        for steps in parts:
            def wire(run):
                built.append(run)
                return standard_graph(run)
            config = configured(steps, placement, sections)
            assert launch(config, run_dir=Path(name), resume=steps > parts[0], wire=wire) == 0
        export(Path(name), Path(name) / "model")
        sampler = built[-1].sampler
        return {
            "sampled on": sorted({device.id for array in sampler.weights.params for device in array.devices()}),
            "attested": built[-1].barrier.attested.value.step,
            "held": checksum(sampler.weights.params) == sampler.weights.checksum,
        }

    if __name__ == "__main__":
        print(json.dumps({name: run(name, *given, **sections) for name, *given, sections in json.loads(sys.argv[1])}))
    """
)


def play(folder, devices, *runs):
    (folder / "placed.py").write_text(PROGRAM)
    tasks = [{"prompt": str(digit), "answer": str(digit)} for digit in range(10)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "placed.py", json.dumps(runs)],
        env=environment | {"PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def learned(run):
    """What was sampled, how it was judged, and what became of the parameters."""
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    episodes = sorted((one["step"], one["attempt"], json.dumps(one["messages"]), one["reward"]) for one in lines)
    return episodes, load_file(run / "model" / "model.safetensors")


@pytest.mark.slow
def test_devices_of_their_own_sample_and_train_the_same(tmp_path):
    apart = {"trainer": [1], "sampler": [0]}
    found = play(
        tmp_path,
        2,
        ["together", [STEPS], {}, {}],
        ["apart", [STEPS], apart, {}],
        ["resumed", [STEPS // 2, STEPS], apart, {}],
    )
    assert found["apart"] == found["resumed"] == {"sampled on": [0], "attested": STEPS, "held": True}
    episodes, expected = learned(tmp_path / "together")
    assert len(episodes) == 4 * STEPS
    for name in ("apart", "resumed"):
        sampled, parameters = learned(tmp_path / name)
        assert sampled == episodes
        assert parameters.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(parameters[key], array)
    metrics = read_metrics(tmp_path / "together" / "metrics.jsonl")
    assert min(metrics[step]["grad_norm"] for step in range(1, STEPS + 1)) > 0.01  # it did learn something


@pytest.mark.slow
def test_several_devices_of_each_part_hold_the_model_in_parts(tmp_path):
    apart = {"trainer": [1, 2], "sampler": [3, 0]}
    mesh = {"mesh": {"fsdp": 2}, "rollout": {"num_generations": 4, "max_concurrency": 8, "max_staleness": 1}}
    found = play(tmp_path, 4, ["apart", [3], apart, mesh])
    assert found["apart"] == {"sampled on": [0, 3], "attested": 3, "held": True}
