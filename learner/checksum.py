"""A checksum over a set of parameters, to prove that a sampler holds the weights it was given.

It is the same wherever the arrays lie: over zero-copy views on CPU, in one compiled pass on accelerators. It covers
bits, so dtype and layout count: it is taken over the sampler's own copy. Each array gives the sum of its words modulo
2^32, the one reduction that every backend can do across devices. Not a defence against malice.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# FNV-1a, 64 bit; folds the per-array words in order, so that two arrays cannot be swapped unseen.
_OFFSET, _PRIME, _MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@jax.jit
def _device_words(params: list[jax.Array]) -> list[jax.Array]:
    words = []
    for array in params:
        word = _WORDS[array.dtype.itemsize]
        bits = lax.bitcast_convert_type(array, word)
        words.append(bits.sum(dtype=jnp.uint32))
    return words


def _on_one_cpu(array: jax.Array) -> bool:
    devices = array.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def checksum(params: Sequence[jax.Array]) -> int:
    """64-bit checksum of arrays in their order.

    On CPU it looks at the buffers through NumPy views, which keeps JAX from donating them later: give it a copy, not
    parameters that an optimizer step will consume.

    Args:
        params: arrays of 1, 2 or 4 bytes an element.
    """
    words: list[int]
    if all(_on_one_cpu(array) for array in params):
        words = [
            int(np.asarray(array).reshape(-1).view(_WORDS[array.dtype.itemsize]).sum(dtype=np.uint32))
            for array in params
        ]
    else:
        words = [int(word) for word in jax.device_get(_device_words(list(params)))]
    folded = _OFFSET
    for word, array in zip(words, params, strict=True):
        for part in (word, *array.shape):
            folded = ((folded ^ part) * _PRIME) & _MASK
    return folded
