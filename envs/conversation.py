"""A conversation: the agent's talk with the model, and the owner of the token rows that will be trained.

Rows only grow: prompt and appended ids enter with mask 0, sampled ids with mask 1, their log-probs and versions, all
in one call. Knows chat formats and the sampler's answer; does not know who samples, nor rewards, clocks or weights.
"""

from collections.abc import Iterable
from typing import Literal, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trouper.channels import EpisodeStatus, FinishReason, Message, Row, SamplerError, Sampling, Turn
from trouper.envs.calls import CallParser, ParseError, ToolCall, parse_turn
from trouper.envs.chat import Chat
from trouper.envs.tools import Tool


class ConversationOver(Exception):
    """Raised by `generate` when turns or context are used up: the episode's normal end, not a failure.

    An agent lets it pass; whoever runs the agent catches it and reads `Conversation.status`.
    """


class Sample(Protocol):
    """Asks a sampler for one turn."""

    async def __call__(
        self, tokens: NDArray[np.int32], *, max_tokens: int, stop: tuple[int, ...], sampling: Sampling
    ) -> Turn:
        """One turn after `tokens`, int32 [n], the whole context: at most `max_tokens` ids, ended by any of `stop`."""


class ModelTurn(Struct, frozen=True):
    """What the model said in one turn.

    Attributes:
        text: outside its thinking, end token left out.
        reasoning: its thinking, or None.
        finish: `stop`, or `length` where a limit cut it off.
        calls: to be executed; always empty when cut off.
        errors: calls that could not be read; always empty when cut off.
    """

    text: str
    reasoning: str | None
    finish: FinishReason
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[ParseError, ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it off."""
        return self.finish == "length"


class Conversation:
    """One episode's conversation.

    Args:
        chat: turns messages into ids.
        sample: asks the sampler.
        sampling: the distribution of every row.
        max_context: tokens of a row, prompt and everything after it; the sampler's KV length.
        max_response_tokens: tokens of one turn.
        max_turns: model calls of the episode.
        max_prompt_tokens: tokens of the first prompt; rows begun later are bounded by `max_context` alone.
        on_rewrite: when the template rewrites earlier turns (as those do that drop old thinking): `fork` starts a new
            row with the prompt exactly as rendered; `append` keeps the sampled ids and appends the new messages.

    Attributes:
        metrics: named numbers the agent may set; they become the episode's.
        tools: shown to the model by templates that know tools.
        turns: model calls so far.
        forks: rows begun anew, by the agent or by a rewriting template.
    """

    def __init__(
        self,
        chat: Chat,
        sample: Sample,
        *,
        sampling: Sampling,
        max_context: int,
        max_response_tokens: int,
        max_turns: int,
        max_prompt_tokens: int | None = None,
        on_rewrite: Literal["fork", "append"] = "fork",
    ) -> None:
        self._chat = chat
        self._sample = sample
        self._sampling = sampling
        self._max_context = max_context
        self._max_response_tokens = max_response_tokens
        self._max_turns = max_turns
        self._max_prompt_tokens = max_context if max_prompt_tokens is None else max_prompt_tokens
        self._on_rewrite = on_rewrite
        self._messages: list[Message] = []
        self._rows: list[_GrowingRow] = []
        self._row = _GrowingRow(sampling)
        self._finish: FinishReason = "stop"
        self._over: Literal["max_turns", "context_overflow"] | None = None
        self._speaking = False
        self.metrics: dict[str, float] = {}
        self.tools: tuple[Tool, ...] = ()
        self.turns = 0
        self.forks = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as text; a turn's content is all it said, thinking included."""
        return tuple(self._messages)

    @property
    def status(self) -> EpisodeStatus:
        """How the conversation stands: `max_turns` or `context_overflow` when over, else whether the last turn was cut.

        A turn that was cut leaves `truncated` even when the environment called the episode done after it.
        """
        return self._over or ("truncated" if self._finish == "length" else "done")

    def rows(self) -> tuple[Row, ...]:
        """The token records, oldest first; a row in which nothing was sampled is no record."""
        return tuple(row.row() for row in [*self._rows, self._row] if row.sampled)

    def system(self, text: str) -> None:
        """Append a system message."""
        self._messages.append(Message("system", text))

    def user(self, text: str) -> None:
        """Append a user message."""
        self._messages.append(Message("user", text))

    def tool(self, text: str) -> None:
        """Append a tool's result."""
        self._messages.append(Message("tool", text))

    def assistant(self, text: str) -> None:
        """Append an assistant message that was not sampled, such as a worked example; it is never trained."""
        self._messages.append(Message("assistant", text))

    def extend(self, messages: Iterable[Message]) -> None:
        """Append messages that were not sampled, such as instructions and worked examples."""
        self._messages.extend(messages)

    def fork(self) -> None:
        """Begin a new row whose prompt is the conversation as the template renders it now; the old row is kept."""
        if self._row.sampled:
            self.forks += 1
            self._rows.append(self._row)
            self._row = _GrowingRow(self._sampling)

    def rewrite(self, messages: Iterable[Message]) -> None:
        """Replace the conversation, for instance by a summary of it, in a new row."""
        self.fork()
        self._messages = list(messages)

    async def generate(self, calls: CallParser | None = None, *, calls_in_thinking: bool = False) -> ModelTurn:
        """Let the model speak.

        Args:
            calls: how tool calls are written; None looks for none.
            calls_in_thinking: see `trouper.envs.calls.parse_turn`.

        Raises:
            ConversationOver: no turn or no room in the context is left; nothing was asked of the sampler.
            SamplerError: the sampler's answer breaks the request.
            RuntimeError: another turn is being sampled; a row can go on in one way only.
        """
        if self._speaking:
            raise RuntimeError("generate was called while it runs; a conversation has one turn at a time, so await it")
        if self.turns >= self._max_turns:
            self._end("max_turns", f"all {self._max_turns} turns are used (max_turns)")
        given = self._given()
        used = len(self._row) + len(given)
        if self.turns == 0 and used > self._max_prompt_tokens:
            self._end("context_overflow", f"a prompt of {used} tokens, at most {self._max_prompt_tokens} are allowed")
        if used >= self._max_context:
            self._end("context_overflow", f"{used} tokens leave no room in a context of {self._max_context}")
        # Nothing is appended before the answer is there: a request that is cut short leaves the row as it was.
        tokens = np.concatenate([self._row.tokens, given])
        limit = min(self._max_response_tokens, self._max_context - used)
        self._speaking = True
        try:
            turn = await self._sample(tokens, max_tokens=limit, stop=self._chat.stop_ids, sampling=self._sampling)
        finally:
            self._speaking = False
        _check(turn, limit)
        self._row.grow(tokens, turn, len(self._messages))
        self._finish = turn.finish
        self.turns += 1
        raw = self._chat.text(turn.tokens)
        self._messages.append(Message("assistant", raw))
        opened = self._chat.opens_thinking
        parsed = parse_turn(raw, turn.finish, calls, opened=opened, calls_in_thinking=calls_in_thinking)
        return ModelTurn(parsed.text, parsed.reasoning, turn.finish, parsed.calls, parsed.errors)

    def _given(self) -> NDArray[np.int32]:
        """The ids that stand between the row so far and the model's next token."""
        if not self._row.sampled:
            return self._chat.prompt(self._messages, self.tools)
        turn = self._row.last_message
        if (
            self._on_rewrite == "fork"
            and not self._chat.prefix_preserving
            and self._chat.rewrites(self._messages, turn, self.tools)
        ):
            self.fork()
            return self._chat.prompt(self._messages, self.tools)
        ended = self._row.last_token in self._chat.stop_ids
        return self._chat.continuation(self._messages, turn, self.tools, ended=ended)

    def _end(self, status: Literal["max_turns", "context_overflow"], why: str) -> None:
        self._over = status
        raise ConversationOver(why)


class _GrowingRow:
    """A row under construction: one call appends given and sampled ids to all four arrays."""

    __slots__ = ("_sampling", "_turns", "last_message", "last_token", "sampled", "tokens")

    def __init__(self, sampling: Sampling) -> None:
        self.tokens: NDArray[np.int32] = np.zeros(0, np.int32)
        self.last_message = -1
        self.sampled = False
        self.last_token = -1
        self._sampling = sampling
        self._turns: list[tuple[int, Turn]] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def grow(self, context: NDArray[np.int32], turn: Turn, message: int) -> None:
        """Take `context` (this row's tokens and what was given after them), then the sampled turn."""
        self._turns.append((len(context), turn))
        self.tokens = np.concatenate([context, turn.tokens])
        self.sampled = True
        self.last_message = message
        self.last_token = int(turn.tokens[-1]) if len(turn.tokens) else -1

    def row(self) -> Row:
        """The record."""
        loss_mask = np.zeros(len(self.tokens), np.bool_)
        logprobs = np.zeros(len(self.tokens), np.float32)
        versions = np.full(len(self.tokens), -1, np.int32)
        for start, turn in self._turns:
            here = slice(start, start + len(turn.tokens))
            loss_mask[here], logprobs[here], versions[here] = True, turn.logprobs, turn.versions
        return Row(self.tokens, loss_mask, logprobs, versions, self._sampling)


def _check(turn: Turn, limit: int) -> None:
    count = len(turn.tokens)
    if not count == len(turn.logprobs) == len(turn.versions):
        raise SamplerError(
            f"the sampler answered with {count} tokens, {len(turn.logprobs)} log-probs and {len(turn.versions)} "
            "versions; a turn holds one of each per token"
        )
    if count > limit:
        raise SamplerError(f"the sampler answered with {count} tokens where at most {limit} were asked for")
    if not np.isfinite(turn.logprobs).all():
        raise SamplerError(f"the sampler answered with a log-prob that is not finite: {turn.logprobs.tolist()}")
