"""Models, sampling and learning on JAX: sees token ids only, and knows no Trio.

Import from its modules, so that only what is used is loaded: `model_config` and `decoder` (the model), `weights`,
`gguf` and `source` (files), `engine` (generation), `advantage`, `loss`, `batch`, `step` and `learner` (learning),
`checkpoint` (saving).
"""
