"""What the engine is asked and what it answers, and which requests it refuses. No arrays on a device."""

from collections.abc import Hashable
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from trouper.channels import SamplerError, Sampling, Turn

Version: TypeAlias = tuple[int, int]
"""(life, step) of a set of weights."""

MAX_STOPS = 8
"""How many stop ids a request may name."""

# Below and above these the scaled logits lose their meaning in float32; who wants certainty asks for 0.
_COLDEST, _HOTTEST = 1e-3, 1e6

_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)


class Request(msgspec.Struct, frozen=True, eq=False):
    """One model call.

    Attributes:
        id: names the call; unique among those that run or wait.
        conversation: the key under which keys and values are kept when the call ends, until `release`.
        tokens: int32 [n], the whole context so far.
        max_tokens: at most this many are sampled.
        sampling: the distribution to draw from.
        stop: ids that end the turn; the one that was sampled is part of the turn.
        seed: in [0, 2**32); with the absolute position it decides every draw.
    """

    id: int
    conversation: Hashable
    tokens: NDArray[np.int32]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[int, ...] = ()
    seed: int = 0


class Finished(msgspec.Struct, frozen=True, eq=False):
    """An answered request."""

    id: int
    turn: Turn


def rest(request: Request, so_far: Turn) -> Request | None:
    """What is left to ask of a request that was aborted.

    A token depends on the seed and its absolute position, so the rest gives what the request would have given.

    Args:
        request: as it was asked first.
        so_far: all that was sampled of it.

    Returns:
        None when nothing is left: a stop id was sampled, or all of `max_tokens`.
    """
    sampled = len(so_far.tokens)
    if sampled >= request.max_tokens or int(so_far.tokens[-1]) in request.stop:
        return None
    return msgspec.structs.replace(
        request,
        tokens=np.concatenate([request.tokens, so_far.tokens]),
        max_tokens=request.max_tokens - sampled,
    )


def joined(first: Turn, last: Turn) -> Turn:
    """One turn of two parts, the second sampled by the `rest` of the first.

    Its `kv_version` is the first part's: what a conversation attends to is made again or kept, but never grows older.
    """
    return Turn(
        tokens=np.concatenate([first.tokens, last.tokens]),
        logprobs=np.concatenate([first.logprobs, last.logprobs]),
        versions=np.concatenate([first.versions, last.versions]),
        finish=last.finish,
        kv_version=first.kv_version,
    )


def check(request: Request, *, length: int, vocabulary: int) -> None:
    """Refuse a request that can never be served.

    Args:
        request: what is asked.
        length: tokens that a conversation may have.
        vocabulary: rows of the embedding table.

    Raises:
        SamplerError: names the limit.
    """
    tokens, sampling = request.tokens, request.sampling
    if not isinstance(tokens, np.ndarray) or tokens.dtype != _INT32 or tokens.ndim != 1 or not tokens.size:
        given = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise SamplerError(f"Request.tokens is {given}; give the whole context as int32 [n], n >= 1")
    if request.max_tokens < 1:
        raise SamplerError(f"Request.max_tokens is {request.max_tokens}; ask for at least 1")
    if tokens.size + request.max_tokens > length:
        raise SamplerError(
            f"{tokens.size} context tokens and max_tokens {request.max_tokens} make "
            f"{tokens.size + request.max_tokens}, beyond the engine's length of {length}; "
            f"ask for {max(0, length - tokens.size)} or make the engine longer"
        )
    # As unsigned numbers negative ids are the largest: one look at the largest finds both kinds. By its place, as NumPy
    # takes four times as long to reduce an array to a number.
    unsigned = tokens.view(_UINT32)
    largest = unsigned.argmax()
    if unsigned.item(largest) >= vocabulary:
        raise SamplerError(
            f"token id {tokens[largest]} is outside the embedding table of {vocabulary} rows; "
            "does the tokenizer belong to this model?"
        )
    if len(request.stop) > MAX_STOPS:
        raise SamplerError(f"{len(request.stop)} stop ids are given; at most {MAX_STOPS} are looked for")
    for stop in request.stop:
        if not 0 <= stop < vocabulary:
            raise SamplerError(f"stop ids {request.stop} are not all in the embedding table of {vocabulary} rows")
    if not (sampling.temperature == 0 or _COLDEST <= sampling.temperature <= _HOTTEST):
        raise SamplerError(
            f"temperature is {sampling.temperature}; give 0 for greedy, or one from {_COLDEST} to {_HOTTEST:.0f}"
        )
    if not 0 < sampling.top_p <= 1:
        raise SamplerError(f"top_p is {sampling.top_p}; it lies in (0, 1], and 1 keeps everything")
    if not 0 <= sampling.top_k < 2**31:
        raise SamplerError(f"top_k is {sampling.top_k}; give 0 to keep everything, or how many ids to keep")
    if not 0 <= request.seed < 2**32:
        raise SamplerError(f"seed is {request.seed}; give one in [0, 2**32)")
