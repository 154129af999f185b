"""Groups of episodes as micro-batches of a few fixed shapes. Pure NumPy; knows token ids, not models or losses.

A packed row holds segments one after another. A token sees itself, earlier tokens of its own segment, and those of the
one segment its own continues. So the members of a group that start with the same prompt are laid out as
`[prompt | c1 | ... | cG]`: the prompt runs through the model once. Prompts, rows and groups share a packed row as long
as they fit. Lengths and masks travel with the data; no id is ever compared with a padding id.

The last sampled token of a row, and what stands after it, predict nothing that is trained: they are not laid out.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trouper.channels import ConfigError, NumericsError, Row

BUCKET_STEP = 128
"""Bucket widths chosen here are multiples of this: the lanes of a TPU, and so few tokens that a narrower call would
mostly add up gradients."""


class BatchConfig(Struct, frozen=True, kw_only=True):
    """The shapes that are compiled. None of this changes a gradient.

    Attributes:
        row_tokens: width of the widest packed row in tokens. It must hold the longest row of an episode; to run a
            shared prompt through the model once it must hold the prompt and every member's completion.
        micro_batch_size: packed rows in one device call.
        buckets: narrower widths, each compiled too; a call takes the narrowest that holds its rows. None means a half
            and three quarters of `row_tokens`, rounded up to a multiple of `BUCKET_STEP`.
        trained_tokens: most trained tokens in a packed row, which bounds the memory of the logits; None means
            `row_tokens`.
        share_prefix: whether equal prompts of a group are laid out once.
    """

    row_tokens: int
    micro_batch_size: int = 1
    buckets: tuple[int, ...] | None = None
    trained_tokens: int | None = None
    share_prefix: bool = True

    def __post_init__(self) -> None:
        if self.row_tokens < 1:
            raise ValueError(f"row_tokens = {self.row_tokens}; it must be 1 or more")
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size = {self.micro_batch_size}; it must be 1 or more")
        if self.trained_tokens is not None and self.trained_tokens < 1:
            raise ValueError(f"trained_tokens = {self.trained_tokens}; it must be 1 or more, or left out")
        wrong = [width for width in self.buckets or () if not 1 <= width < self.row_tokens]
        if wrong:
            raise ValueError(f"buckets {wrong} must lie between 1 and row_tokens = {self.row_tokens}, which is added")

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (tokens, trained tokens) of a packed row that can be compiled, narrowest first."""
        limit = self.row_tokens if self.trained_tokens is None else self.trained_tokens
        buckets = self.buckets
        if buckets is None:
            rounded = (-(-self.row_tokens * quarters // (4 * BUCKET_STEP)) * BUCKET_STEP for quarters in (2, 3))
            buckets = tuple(width for width in rounded if width < self.row_tokens)
        return tuple((width, min(width, limit)) for width in sorted({*buckets, self.row_tokens}))


class MicroBatch(NamedTuple):
    """One device call's packed rows: `B` rows, `T` tokens, `N` trained tokens, the vocabulary head's only inputs.

    Attributes:
        tokens: int32 [B, T].
        positions: int32 [B, T], each token's place in its own row.
        segments: int32 [B, T], -1 at padding.
        prefixes: int32 [B, T], the segment that this one continues, -1 for none.
        sources: int32 [B, N], the index on `T` whose hidden state predicts the trained token.
        targets: int32 [B, N], the trained tokens.
        mask: bool [B, N], false at padding.
        sampler: float32 [B, N], the sampler's log-probs.
        advantages: float32 [B, N].
        weights: float32 [B, N], what each token's loss is multiplied by.
        temperatures: float32 [B, N], 1 at padding.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    segments: NDArray[np.int32]
    prefixes: NDArray[np.int32]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    mask: NDArray[np.bool_]
    sampler: NDArray[np.float32]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    temperatures: NDArray[np.float32]


def empty_micro_batch(rows: int, tokens: int, trained: int) -> MicroBatch:
    """Padding only: its loss and gradient are 0."""
    return MicroBatch(
        tokens=np.zeros((rows, tokens), np.int32),
        positions=np.zeros((rows, tokens), np.int32),
        segments=np.full((rows, tokens), -1, np.int32),
        prefixes=np.full((rows, tokens), -1, np.int32),
        sources=np.zeros((rows, trained), np.int32),
        targets=np.zeros((rows, trained), np.int32),
        mask=np.zeros((rows, trained), np.bool_),
        sampler=np.zeros((rows, trained), np.float32),
        advantages=np.zeros((rows, trained), np.float32),
        weights=np.zeros((rows, trained), np.float32),
        temperatures=np.ones((rows, trained), np.float32),
    )


class Sample(NamedTuple):
    """One row of an episode, with what the loss must know about it.

    Attributes:
        row: the token record; has at least one sampled token.
        advantage: of its episode.
        weight: what each of its token losses is multiplied by.
    """

    row: Row
    advantage: float
    weight: float

    @property
    def prompt(self) -> int:
        """Number of tokens before the first sampled one."""
        return int(self.row.loss_mask.argmax())

    @property
    def inputs(self) -> int:
        """Number of tokens that the model must see: all before the last sampled one."""
        return len(self.row.tokens) - 1 - int(self.row.loss_mask[::-1].argmax())


def check_row(config: BatchConfig, row: Row, name: str) -> None:
    """Refuse a row that cannot be trained.

    Args:
        config: the shapes it must fit.
        row: has at least one sampled token.
        name: what the error calls it.

    Raises:
        ConfigError: it is longer than a packed row may be, or its tokens were drawn from a distribution that the
            trainer cannot recompute.
        NumericsError: a sampler's log-prob at a trained position is not a log-prob.
    """
    sampling = row.sampling
    if not sampling.temperature > 0:
        raise ConfigError(
            f"{name} was sampled at temperature {sampling.temperature}; greedy tokens have no log-prob to train on: "
            "train at a temperature above 0 and keep 0 for evaluation"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ConfigError(
            f"{name} was sampled with top_p = {sampling.top_p}, top_k = {sampling.top_k}; the trainer cannot recompute "
            "that support: train with top_p = 1 and top_k = 0"
        )
    if row.loss_mask[0]:
        raise ConfigError(f"{name} begins with a sampled token, which nothing predicts; give it a prompt of 1 or more")
    width, trained = config.shapes[-1]
    if Sample(row, 0.0, 0.0).inputs > width or row.sampled > trained:
        raise ConfigError(
            f"{name} has {len(row.tokens)} tokens, {row.sampled} of them sampled, and does not fit a packed row of "
            f"row_tokens = {width} and trained_tokens = {trained}; raise those, or lower max_prompt_tokens or "
            "max_response_tokens"
        )
    logprobs = row.logprobs[row.loss_mask]
    bad = ~np.isfinite(logprobs)
    if bad.any():
        raise NumericsError(
            f"{name} has {int(bad.sum())} of {len(logprobs)} sampled tokens whose sampler log-prob is not finite "
            f"(the first is {logprobs[bad][0]}); a sampler that reports those computes in too low a precision or with "
            "broken weights"
        )


class _Piece(NamedTuple):
    """What must stay in one packed row: a prompt and the rows that continue it; `prompt` is 0 when none is shared."""

    prompt: int
    samples: tuple[Sample, ...]

    @property
    def width(self) -> int:
        return self.prompt + sum(sample.inputs - self.prompt for sample in self.samples)

    @property
    def trained(self) -> int:
        return sum(sample.row.sampled for sample in self.samples)


def _common_prompt(samples: Sequence[Sample]) -> int:
    """Length of the longest common prefix of the samples' prompts."""
    shortest = min(sample.prompt for sample in samples)
    prompts = np.stack([sample.row.tokens[:shortest] for sample in samples])
    same = (prompts == prompts[0]).all(axis=0)
    return shortest if same.all() else int(same.argmin())


def _clusters(samples: Sequence[Sample]) -> Iterator[tuple[int, list[Sample]]]:
    """Samples that share a prompt, with its length. Equal prompts first; what is left shares how it begins."""
    by_prompt: dict[bytes, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.row.tokens[: sample.prompt].tobytes(), []).append(sample)
    alone = [found[0] for found in by_prompt.values() if len(found) == 1]
    for found in by_prompt.values():
        if len(found) > 1:
            yield found[0].prompt, found
    if alone:
        yield (_common_prompt(alone) if len(alone) > 1 else 0), alone


class Packer:
    """Collects samples and hands out full micro-batches, and at the end the rest.

    Args:
        config: shapes.

    Attributes:
        tokens: laid out so far.
        slots: places for tokens handed out so far, padding included.
    """

    def __init__(self, config: BatchConfig) -> None:
        self._config = config
        self._pending: list[_Piece] = []
        self.tokens = 0
        self.slots = 0

    def add(self, samples: Sequence[Sample]) -> None:
        """Take one group's samples, each of which `check_row` accepts; those that begin alike are laid out together."""
        width, trained = self._config.shapes[-1]
        if self._config.share_prefix:
            for prompt, cluster in _clusters(samples):
                self._pending += self._split(prompt, cluster, width, trained)
        else:
            self._pending += [_Piece(0, (sample,)) for sample in samples]

    def full(self) -> Iterator[MicroBatch]:
        """Micro-batches that are complete now. The fullest rows go first; the last, open ones stay."""
        rows = _pack(self._pending, self._config.shapes[-1])
        size = self._config.micro_batch_size
        while len(rows) > size:
            yield self._assemble(rows[:size])
            rows = rows[size:]
        self._pending = [piece for row in rows for piece in row]

    def rest(self) -> Iterator[MicroBatch]:
        """Micro-batches of all that is left, the last one padded with empty rows."""
        size = self._config.micro_batch_size
        layouts = []
        for shape in self._config.shapes:
            if all(piece.width <= shape[0] and piece.trained <= shape[1] for piece in self._pending):
                rows = _pack(self._pending, shape)
                layouts.append([rows[start : start + size] for start in range(0, len(rows), size)])
        # Least padding; among equals the fewest calls, as each adds a gradient as large as the model.
        for rows in min(layouts, key=lambda calls: (sum(self._shape(rows)[0] for rows in calls), len(calls))):
            yield self._assemble(rows)
        self._pending = []

    @staticmethod
    def _split(prompt: int, cluster: Sequence[Sample], width: int, trained: int) -> Iterator[_Piece]:
        """One piece if it fits, else several that each carry the prompt; without a shared prompt one each."""
        if prompt == 0:
            yield from (_Piece(0, (sample,)) for sample in cluster)
            return
        open_piece = _Piece(prompt, ())
        for sample in cluster:
            grown = _Piece(prompt, (*open_piece.samples, sample))
            if grown.width > width or grown.trained > trained:
                yield open_piece
                grown = _Piece(prompt, (sample,))
            open_piece = grown
        yield open_piece

    def _shape(self, rows: Sequence[Sequence[_Piece]]) -> tuple[int, int]:
        """The narrowest that holds these rows."""
        width = max(sum(piece.width for piece in row) for row in rows)
        trained = max(sum(piece.trained for piece in row) for row in rows)
        return next(shape for shape in self._config.shapes if width <= shape[0] and trained <= shape[1])

    def _assemble(self, rows: Sequence[Sequence[_Piece]]) -> MicroBatch:
        batch = empty_micro_batch(self._config.micro_batch_size, *self._shape(rows))
        self.slots += batch.tokens.size
        for index, pieces in enumerate(rows):
            at = trained_at = segment = 0
            for piece in pieces:
                at, trained_at, segment = _lay_out(batch, index, piece, at, trained_at, segment)
            self.tokens += at
        return batch


def _pack(pieces: Sequence[_Piece], shape: tuple[int, int]) -> list[list[_Piece]]:
    """Pieces in packed rows of a shape that holds each of them, fullest rows first."""
    # First fit, longest first: at most 11/9 of the rows that the best packing takes.
    rows: list[list[_Piece]] = []
    left: list[tuple[int, int]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.width):
        width, trained = piece.width, piece.trained
        fitting = (i for i, room in enumerate(left) if width <= room[0] and trained <= room[1])
        index = next(fitting, len(rows))
        if index == len(rows):
            rows.append([])
            left.append(shape)
        rows[index].append(piece)
        left[index] = (left[index][0] - width, left[index][1] - trained)
    order = sorted(range(len(rows)), key=lambda index: left[index])
    return [rows[index] for index in order]


def _lay_out(
    batch: MicroBatch, row: int, piece: _Piece, at: int, trained_at: int, segment: int
) -> tuple[int, int, int]:
    """Write a piece into a packed row from token `at`, trained token `trained_at`, segment number `segment` on."""
    shared, prompt_at, prefix = piece.prompt, at, -1
    if shared:
        tokens = piece.samples[0].row.tokens[:shared]
        at = _write_segment(batch, row, tokens, at, first_position=0, segment=segment, prefix=-1)
        prefix, segment = segment, segment + 1
    for sample in piece.samples:
        record = sample.row
        tokens = record.tokens[shared : sample.inputs]
        targets = np.flatnonzero(record.loss_mask)
        predictors = targets - 1
        end = trained_at + len(targets)
        # A predictor inside the shared prompt lies where the prompt was written, the others in the segment written now.
        batch.sources[row, trained_at:end] = np.where(
            predictors < shared, prompt_at + predictors, at + predictors - shared
        )
        batch.targets[row, trained_at:end] = record.tokens[targets]
        batch.mask[row, trained_at:end] = True
        batch.sampler[row, trained_at:end] = record.logprobs[targets]
        batch.advantages[row, trained_at:end] = sample.advantage
        batch.weights[row, trained_at:end] = sample.weight
        batch.temperatures[row, trained_at:end] = record.sampling.temperature
        at = _write_segment(batch, row, tokens, at, first_position=shared, segment=segment, prefix=prefix)
        trained_at, segment = end, segment + 1
    return at, trained_at, segment


def _write_segment(
    batch: MicroBatch, row: int, tokens: NDArray[np.int32], at: int, *, first_position: int, segment: int, prefix: int
) -> int:
    end = at + len(tokens)
    batch.tokens[row, at:end] = tokens
    batch.positions[row, at:end] = np.arange(first_position, first_position + len(tokens))
    batch.segments[row, at:end] = segment
    batch.prefixes[row, at:end] = prefix
    return end
