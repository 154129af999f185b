"""Write golden logits of tiny models with transformers on CPU torch: `python scripts/make_golden.py`.

Needs the extra `reference`. The weights come from the rule in `tests/learner/golden_weights.py`; only the logits are
written, and only they are committed. Run it again when a tiny model is added there.
"""

import importlib.util
import json
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

TESTS = Path(__file__).resolve().parent.parent / "tests" / "learner"


def rule() -> ModuleType:
    """The module with the tiny models and their weights; tests are no package, so it is loaded by path."""
    spec = importlib.util.spec_from_file_location("golden_weights", TESTS / "golden_weights.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def main() -> None:
    """Fill each model by the rule and write all logits into one file."""
    golden = rule()
    logits = {}
    for name, settings in golden.CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(settings))
            config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(golden.weight(parameter_name, tuple(parameter.shape))))
        logits[name] = model(torch.from_numpy(golden.TOKENS.astype(np.int64))).logits[:, ::3].numpy()
    np.savez_compressed(TESTS / "goldens" / "decoder_logits.npz", **logits)


if __name__ == "__main__":
    main()
