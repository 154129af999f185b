"""The evaluator: plays held-out tasks beside training, in slots of its own.

It takes no training slot and never holds a weight sync: weights may change under an evaluation, and its metrics say
which ones it spans. The first evaluation is the base rate, the last one the final weights'.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable

import trio

from trouper.actors.barrier import Attested
from trouper.actors.config import Evaluation
from trouper.actors.episode import EpisodeSlots
from trouper.actors.metrics import Recorder
from trouper.actors.sampler import Generate
from trouper.channels import Attempt, Channel, Episode, Latest, Outcome, Sender
from trouper.envs import Tasks


class Evaluator:
    """Evaluates after every `every_steps` steps.

    Args:
        evaluation: the `[evaluation]` section.
        tasks: held-out ones.
        make_slots: makes the slots of one evaluation.
        attested: the newest weights the samplers hold.
        recorder: takes the metrics.
        run_seed: becomes part of every attempt's seed.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        tasks: Tasks,
        make_slots: Callable[[], EpisodeSlots],
        attested: Latest[Attested],
        recorder: Recorder,
        *,
        run_seed: int,
    ) -> None:
        self._evaluation = evaluation
        self._tasks = tasks
        self._make_slots = make_slots
        self._attested = attested
        self._recorder = recorder
        self._run_seed = run_seed

    async def run(self, requests: Sender[Generate]) -> None:
        """Evaluate until the final weights were evaluated."""
        evaluated: int | None = None
        life = self._attested.value.life
        while True:
            seen, newest = self._attested.changes, self._attested.value
            if newest.life > life:  # the steps since its checkpoint are done, and so evaluated, again
                life, evaluated = newest.life, None if evaluated is None else min(evaluated, newest.step)
            due = evaluated is None or newest.step // self._evaluation.every_steps > evaluated // (
                self._evaluation.every_steps
            )
            if due or (newest.final and newest.step != evaluated):
                evaluated = newest.step
                await self._evaluate(newest, requests)
            elif newest.final:
                return
            else:
                await self._attested.wait(seen)

    async def _evaluate(self, weights: Attested, requests: Sender[Generate]) -> None:
        started = trio.current_time()
        evaluation = self._evaluation
        attempts = [
            Attempt(slot=draw, draw=draw, member=member, tries=0, run_seed=self._run_seed, task=task)
            for draw in range(evaluation.count)
            if (task := self._tasks.task(draw)) is not None
            for member in range(evaluation.samples)
        ]
        inbox = Channel[Attempt]("eval tasks", Attempt, len(attempts))
        outbox = Channel[Outcome]("eval episodes", Outcome, len(attempts))
        with inbox.sender() as sender:
            for attempt in attempts:
                await sender.send(attempt)
        inbox.finish()
        with inbox.receiver() as receiver, outbox.sender() as done, outbox.receiver() as outcomes:
            await self._make_slots().run(receiver, done, requests)
            self._report(weights, [outcomes.receive_nowait() for _ in attempts], trio.current_time() - started)
        inbox.close()
        outbox.close()

    def _report(self, weights: Attested, outcomes: list[Outcome], seconds: float) -> None:
        evaluation, episodes = self._evaluation, [each for each in outcomes if isinstance(each, Episode)]
        passed: dict[int, list[bool]] = defaultdict(list)
        for outcome in outcomes:
            if not isinstance(outcome, Episode):
                continue
            reward = outcome.reward
            passed[outcome.attempt.draw].append(reward is not None and reward >= evaluation.pass_reward)
        prefix = f"eval/{evaluation.name}"
        metrics = {f"{prefix}/lost": float(len(outcomes) - len(episodes)), f"{prefix}/seconds": seconds}
        if passed:
            metrics[f"{prefix}/pass@1"] = statistics.fmean(statistics.fmean(each) for each in passed.values())
            if evaluation.samples > 1:
                metrics[f"{prefix}/pass@{evaluation.samples}"] = statistics.fmean(any(e) for e in passed.values())
        if rewards := [episode.reward for episode in episodes if episode.reward is not None]:
            metrics[f"{prefix}/reward"] = statistics.fmean(rewards)
        rows = [row for episode in episodes for row in episode.rows]
        if versions := [version for row in rows for version in row.versions[row.loss_mask].tolist()]:
            metrics[f"{prefix}/oldest_weights"] = float(min(versions))
            metrics[f"{prefix}/newest_weights"] = float(max(versions))
        self._recorder.record(weights.step, metrics, weights.life)
