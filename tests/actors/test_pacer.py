"""The admission rule, alone and in a simulated run: sources, episode slots, grouper, trainer and weight sync."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from trio.testing import MockClock

from trouper.actors.pacer import Pacer
from trouper.channels import ConfigError


def pacer(**options: Any) -> Pacer:
    values = {"groups_per_step": 2, "max_staleness": 0, "max_steps": None, "max_redraws": 1, "weight_sync_steps": 1}
    return Pacer(**{**values, **options})


async def acquire(slots: Pacer) -> int | str | None:
    """What `acquire` returns, or "waits"."""
    with trio.move_on_after(1.0):
        return await slots.acquire()
    return "waits"


# Alone ---------------------------------------------------------------------------------------------------------


async def test_admits_a_step_ahead_for_each_step_of_staleness(autojump_clock: MockClock) -> None:
    slots = pacer(max_staleness=1)
    assert [await acquire(slots) for _ in range(5)] == [0, 1, 2, 3, "waits"]
    slots.attest(1)
    assert [await acquire(slots) for _ in range(3)] == [4, 5, "waits"]


async def test_an_older_attestation_changes_nothing(autojump_clock: MockClock) -> None:
    slots = pacer()
    slots.attest(2)
    slots.attest(1)
    assert slots.version == 2
    assert [await acquire(slots) for _ in range(7)] == [0, 1, 2, 3, 4, 5, "waits"]


async def test_a_waiting_source_is_woken(autojump_clock: MockClock) -> None:
    slots = pacer(groups_per_step=1)
    got = []

    async def take() -> None:
        got.append(await slots.acquire())

    for wake in (lambda: slots.attest(1), lambda: slots.reopen(0), slots.stop):
        async with trio.open_nursery() as nursery:
            if not got:
                await take()
            nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
            wake()
    assert got == [0, 1, 0, None]


async def test_reopened_slots_come_first_and_lowest_first(autojump_clock: MockClock) -> None:
    slots = pacer(groups_per_step=4)
    for _ in range(3):
        await slots.acquire()
    assert slots.reopen(2)
    assert slots.reopen(0)
    assert [await acquire(slots) for _ in range(3)] == [0, 2, 3]
    assert slots.redraws(2) == 1


async def test_redraws_are_bounded(autojump_clock: MockClock) -> None:
    slots = pacer(max_redraws=2)
    await slots.acquire()
    for _ in range(2):
        assert slots.reopen(0)
        assert await acquire(slots) == 0
    assert not slots.reopen(0)
    slots.close(0)
    assert slots.redraws(0) == 0


async def test_a_late_group_uses_up_no_redraw(autojump_clock: MockClock) -> None:
    slots = pacer(max_redraws=0)
    await slots.acquire()
    for _ in range(3):
        assert slots.reopen(0, late=True)
        assert await acquire(slots) == 0
    assert slots.redraws(0) == 0
    assert not slots.reopen(0)
    slots.seal(None)
    assert not slots.reopen(0, late=True)


async def test_says_what_is_fresh_enough_for_which_slot() -> None:
    slots = pacer(groups_per_step=2, max_staleness=1)
    assert [slots.allows(slot, 3) for slot in (0, 7, 9, 10)] == [True, True, True, False]


async def test_the_first_open_slot(autojump_clock: MockClock) -> None:
    slots = pacer(groups_per_step=4)
    for _ in range(3):
        await slots.acquire()
    slots.close(1)
    assert slots.first_open == 0
    slots.close(0)
    assert slots.first_open == 2


async def test_ends_when_all_slots_are_closed(autojump_clock: MockClock) -> None:
    slots = pacer(max_steps=1)
    assert [await acquire(slots) for _ in range(3)] == [0, 1, "waits"]
    slots.close(1)
    assert await acquire(slots) == "waits"
    slots.close(0)
    assert await acquire(slots) is None
    assert slots.closed == slots.total == 2


async def test_sealing_takes_back_the_unused_slot(autojump_clock: MockClock) -> None:
    slots = pacer(groups_per_step=3)
    assert [await acquire(slots) for _ in range(2)] == [0, 1]
    assert slots.seal(unused=1)
    assert slots.total == 1
    assert [slots.size(step) for step in range(2)] == [1, 0]
    slots.close(0)
    assert await acquire(slots) is None


async def test_sealing_keeps_a_reopened_slot_to_be_sent_on_as_void(autojump_clock: MockClock) -> None:
    slots = pacer(groups_per_step=3)
    assert [await acquire(slots) for _ in range(2)] == [0, 1]
    slots.reopen(1)
    slots.reopen(0)
    assert await acquire(slots) == 0
    assert not slots.seal(unused=0)
    assert await acquire(slots) == 1
    assert not slots.seal(unused=1)
    assert not slots.reopen(0)
    slots.close(0)
    slots.close(1)
    assert await acquire(slots) is None
    assert slots.total == 2


async def test_sealing_without_a_slot_in_hand(autojump_clock: MockClock) -> None:
    slots = pacer()
    await slots.acquire()
    assert not slots.seal(None)
    assert slots.total == 1


async def test_stop_admits_nothing_more_and_leaves_slots_open(autojump_clock: MockClock) -> None:
    slots = pacer()
    await slots.acquire()
    slots.stop()
    assert slots.stopped
    assert slots.reopen(0)
    assert await acquire(slots) is None
    assert slots.closed == 0


async def test_resumes_at_a_step(autojump_clock: MockClock) -> None:
    slots = pacer(first_step=3, max_steps=4, max_redraws=2)
    slots.restore({6: 2, 7: 0})
    assert slots.closed == 6
    assert [await acquire(slots) for _ in range(3)] == [6, 7, "waits"]
    assert not slots.reopen(6)
    assert slots.reopen(7)
    assert await acquire(slots) == 7
    with pytest.raises(ValueError, match="slot 5 cannot be restored: slots below 8"):
        slots.restore({5: 1})
    slots.close(6)
    slots.close(7)
    assert await acquire(slots) is None


async def test_a_run_that_is_complete_admits_nothing(autojump_clock: MockClock) -> None:
    assert await acquire(pacer(first_step=5, max_steps=4)) is None
    assert await acquire(pacer(max_steps=0)) is None


@pytest.mark.parametrize(("slot", "message"), [(0, "has ended before"), (1, "was never admitted")])
async def test_a_slot_ends_exactly_once(slot: int, message: str) -> None:
    slots = pacer()
    await slots.acquire()
    slots.close(0)
    with pytest.raises(ValueError, match=f"slot {slot} {message}"):
        slots.close(slot)
    with pytest.raises(ValueError, match=f"slot {slot} {message}"):
        slots.reopen(slot)


async def test_a_reopened_slot_is_nobodys_until_it_is_acquired_again() -> None:
    slots = pacer()
    await slots.acquire()
    slots.reopen(0)
    for end in (slots.close, slots.reopen):
        with pytest.raises(ValueError, match="slot 0 was reopened and not acquired again"):
            end(0)


def test_refuses_weights_that_come_too_seldom_with_the_arithmetic() -> None:
    with pytest.raises(
        ConfigError, match=r"weight_sync_steps = 4 needs max_staleness >= 3, and it is 2: .* 4 - 1"
    ) as e:
        pacer(weight_sync_steps=4, max_staleness=2)
    assert "Set weight_sync_steps = 3 or max_staleness = 3" in str(e.value)
    pacer(weight_sync_steps=4, max_staleness=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups_per_step": 0},
        {"max_staleness": -1},
        {"max_steps": -1},
        {"max_redraws": -1},
        {"weight_sync_steps": 0},
        {"first_step": -1},
    ],
)
def test_refuses_impossible_numbers(wrong: dict[str, int]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} = {value}; it must be"):
        pacer(**wrong)


@settings(deadline=None)
@given(order=st.permutations(range(40)), first_step=st.integers(0, 3))
def test_the_record_of_closed_slots_does_not_grow(order: list[int], first_step: int) -> None:
    async def main() -> None:
        slots = pacer(max_staleness=1000, first_step=first_step)
        for _ in order:
            await slots.acquire()
        for closed, slot in enumerate(order, start=1):
            slots.close(slot + 2 * first_step)
            assert slots.closed == closed + 2 * first_step
        assert not slots._closed_above

    trio.run(main)


# In a run ------------------------------------------------------------------------------------------------------


class Setting(Struct, frozen=True, kw_only=True):
    """One simulated run."""

    seed: int
    groups_per_step: int
    num_generations: int
    max_staleness: int
    max_steps: int | None
    tasks: int | None
    slots: int
    engine: int
    capacity: int
    p_lost: float
    p_no_signal: float
    max_redraws: int
    keep_no_signal: bool
    latency: str
    p_straggler: float
    sync: str
    weight_sync_steps: int
    p_sync_fails: float
    train: float


def draw_setting(seed: int) -> Setting:
    rng = random.Random(10**6 + seed)
    staleness = rng.choice([0, 0, 1, 2, 5])
    bounded_by = rng.choice(["tasks", "steps", "both"])
    return Setting(
        seed=seed,
        groups_per_step=rng.choice([1, 3, 4]),
        num_generations=rng.choice([1, 2, 4]),
        max_staleness=staleness,
        max_steps=None if bounded_by == "tasks" else rng.randint(1, 8),
        tasks=None if bounded_by == "steps" else rng.randint(0, 30),
        slots=rng.choice([1, 2, 7, 64]),
        engine=rng.choice([1, 4, 64]),
        capacity=rng.choice([0, 1, 8]),
        p_lost=rng.choice([0.0, 0.1, 0.6, 1.0]),
        p_no_signal=rng.choice([0.0, 0.3, 0.9, 1.0]),
        max_redraws=rng.choice([0, 1, 5]),
        keep_no_signal=rng.random() < 0.5,
        latency=rng.choice(["constant", "exponential", "lognormal", "bimodal"]),
        p_straggler=rng.choice([0.0, 0.01, 0.2]),
        sync=rng.choice(["in_flight", "drain"]),
        weight_sync_steps=rng.randint(1, staleness + 1),
        p_sync_fails=rng.choice([0.0, 0.5]),
        train=rng.choice([0.01, 1.0, 30.0]),
    )


class Sampler:
    """Stamps every chunk with the weights it has; holds new generations while it is drained."""

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        self.version = 0
        self._setting = setting
        self._rng = rng
        self._limit = trio.Semaphore(setting.engine)
        self._holding = False
        self._busy = 0
        self._changed = trio.lowlevel.ParkingLot()

    async def generate(self) -> list[int]:
        while self._holding:
            await self._changed.park()
        async with self._limit:
            self._busy += 1
            versions = []
            for _ in range(2):
                await trio.sleep(self._rng.uniform(0.05, 0.15))
                versions.append(self.version)
            self._busy -= 1
            self._changed.unpark_all()
        return versions

    async def load(self, version: int) -> None:
        if self._setting.sync == "drain":
            self._holding = True
            while self._busy:
                await self._changed.park()
        failures = 0
        while self._rng.random() < self._setting.p_sync_fails:
            failures += 1
        await trio.sleep(0.05 + 0.1 * failures)
        self.version = version
        self._holding = False
        self._changed.unpark_all()


class Simulation:
    """The actors around a pacer, in the smallest form that still blocks where the real ones do."""

    def __init__(self, setting: Setting, slots: Pacer) -> None:
        self.setting = setting
        self.pacer = slots
        self.rng = random.Random(setting.seed)
        self.sampler = Sampler(setting, self.rng)
        self.trained: list[tuple[int, int, int]] = []  # step, slot, oldest version
        self.void = 0
        self.step_sizes: list[int] = []

    async def run(self) -> None:
        capacity = self.setting.capacity
        tasks_in, tasks = trio.open_memory_channel[tuple[int, int]](capacity)
        episodes_in, episodes = trio.open_memory_channel[tuple[int, list[int] | None, bool]](capacity)
        groups_in, groups = trio.open_memory_channel[tuple[int, int | None]](capacity)
        weights_in, weights = trio.open_memory_channel[int](1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.source, tasks_in, episodes_in.clone())
            for _ in range(self.setting.slots):
                nursery.start_soon(self.episode_slot, tasks.clone(), episodes_in.clone())
            tasks.close()
            episodes_in.close()
            nursery.start_soon(self.grouper, episodes, groups_in)
            nursery.start_soon(self.trainer, groups, weights_in)
            nursery.start_soon(self.barrier, weights)

    async def source(self, tasks: Any, episodes: Any) -> None:
        left = self.setting.tasks
        async with tasks, episodes:
            while (slot := await self.pacer.acquire()) is not None:
                if left == 0:
                    if not self.pacer.seal(unused=slot):
                        await episodes.send((slot, None, True))
                    continue
                if left is not None:
                    left -= 1
                for _ in range(self.setting.num_generations):
                    await tasks.send(slot)

    async def episode_slot(self, tasks: Any, episodes: Any) -> None:
        async with tasks, episodes:
            async for slot in tasks:
                versions = []
                for _ in range(2):
                    versions += await self.sampler.generate()
                    await trio.sleep(self.latency())
                lost = self.rng.random() < self.setting.p_lost
                await episodes.send((slot, None if lost else versions, False))

    def latency(self) -> float:
        if self.rng.random() < self.setting.p_straggler:
            return 1000.0
        match self.setting.latency:
            case "constant":
                return 1.0
            case "exponential":
                return self.rng.expovariate(1.0)
            case "lognormal":
                return self.rng.lognormvariate(-1.125, 1.5)
            case _:
                return 20.0 if self.rng.random() < 0.05 else 0.0

    async def grouper(self, episodes: Any, groups: Any) -> None:
        members: dict[int, list[list[int] | None]] = {}
        ready: dict[int, list[tuple[int, int | None]]] = {}
        step = sent = 0
        async with groups:
            async for slot, versions, end_of_data in episodes:
                if end_of_data:
                    oldest = None
                else:
                    members.setdefault(slot, []).append(versions)
                    if len(members[slot]) < self.setting.num_generations:
                        continue
                    arrived = [member for member in members.pop(slot) if member is not None]
                    whole = len(arrived) == self.setting.num_generations
                    signal = self.rng.random() >= self.setting.p_no_signal
                    oldest = min(min(member) for member in arrived) if whole else None
                    if not (whole and signal):
                        if self.pacer.reopen(slot):
                            continue
                        if not self.setting.keep_no_signal:
                            oldest = None
                ready.setdefault(slot // self.setting.groups_per_step, []).append((slot, oldest))
                self.pacer.close(slot)
                while True:
                    while ready.get(step):
                        sent += 1
                        await groups.send(ready[step].pop(0))
                    if not sent or sent < self.pacer.size(step):
                        break
                    step, sent = step + 1, 0

    async def trainer(self, groups: Any, weights: Any) -> None:
        step = 0
        hand: list[tuple[int, int | None]] = []
        async with weights:
            async for group in groups:
                hand.append(group)
                if len(hand) == self.pacer.size(step):
                    await self.train(step, hand, weights)
                    step, hand = step + 1, []
            if hand:
                await self.train(step, hand, weights)

    async def train(self, step: int, groups: list[tuple[int, int | None]], weights: Any) -> None:
        self.step_sizes.append(len(groups))
        kept = [(slot, oldest) for slot, oldest in groups if oldest is not None]
        self.void += len(groups) - len(kept)
        if kept:
            await trio.sleep(self.setting.train * self.rng.uniform(0.9, 1.1))
        self.trained += [(step, slot, oldest) for slot, oldest in kept]
        if (step + 1) % self.setting.weight_sync_steps == 0:
            await weights.send(step + 1)

    async def barrier(self, weights: Any) -> None:
        async for version in weights:
            await self.sampler.load(version)
            self.pacer.attest(version)


class Broken(AssertionError):
    """A promise of the admission rule that a simulated run broke."""


def prove(setting: Setting, make: Callable[..., Pacer] = Pacer) -> Counter[str]:
    """Run one setting; raises Broken when a promise does not hold."""

    async def main() -> Simulation:
        run = Simulation(
            setting,
            make(
                setting.groups_per_step,
                setting.max_staleness,
                setting.max_steps,
                setting.max_redraws,
                setting.weight_sync_steps,
            ),
        )
        with trio.move_on_after(1e7) as scope:
            await run.run()
        if scope.cancelled_caught:
            raise Broken(f"wedged: {setting}")
        return run

    run = trio.run(main, clock=MockClock(autojump_threshold=0))
    groups_per_step = setting.groups_per_step
    slots = [slot for _, slot, _ in run.trained]
    for step, slot, oldest in run.trained:
        if step != slot // groups_per_step:
            raise Broken(f"slot {slot} was trained at step {step}: {setting}")
        if step - oldest > setting.max_staleness:
            raise Broken(f"slot {slot}, step {step}, was sampled under {oldest}: {setting}")
    if len(set(slots)) < len(slots):
        raise Broken(f"a slot was trained twice: {setting}")
    total = run.pacer.total
    if not len(slots) + run.void == total == run.pacer.closed:
        raise Broken(f"trained {len(slots)} + void {run.void}, total {total}, closed {run.pacer.closed}: {setting}")
    if not (setting.p_lost or setting.p_no_signal):
        due = min(groups_per_step * steps if (steps := setting.max_steps) else 10**9, setting.tasks or 0)
        if len(slots) != (due if setting.tasks is not None else groups_per_step * (setting.max_steps or 0)):
            raise Broken(f"nothing failed, yet {len(slots)} slots were trained: {setting}")
    return Counter(
        trained=len(slots), void=run.void, steps=len(run.step_sizes), stale=sum(t - v for t, _, v in run.trained)
    )


def test_random_runs_end_in_bound_and_balanced() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        seen += prove(draw_setting(seed))
    assert all(seen[name] > 100 for name in ("trained", "void", "steps", "stale")), seen


@pytest.mark.slow
def test_two_thousand_random_runs_end_in_bound_and_balanced() -> None:
    for seed in range(150, 2150):
        prove(draw_setting(seed))


class ByDraw(Pacer):
    """Admits by the number of draws instead of the place in the training order: a redraw uses up a later place."""

    def reopen(self, slot: int) -> bool:
        again = super().reopen(slot)
        if again:
            self._next += 1
        return again


class OneTooMany(Pacer):
    """Admits a step too early."""

    def _may_admit(self) -> bool:
        return (self.total is None or self._next < self.total) and (
            self._next // self.groups_per_step <= self.version + self._max_staleness + 1
        )


class Forgetful(Pacer):
    """Does not wake the source when a slot is reopened or closed."""

    def reopen(self, slot: int) -> bool:
        woken, self._waiting = self._waiting, trio.lowlevel.ParkingLot()
        again = super().reopen(slot)
        self._waiting = woken
        return again


class Keeps(Pacer):
    """Does not take the unused slot back when the data ends."""

    def seal(self, unused: int | None) -> bool:
        super().seal(None)
        return True


@pytest.mark.parametrize("mutant", [ByDraw, OneTooMany, Forgetful, Keeps])
def test_the_simulation_catches_other_rules(mutant: type[Pacer]) -> None:
    def prove_all() -> None:
        for seed in range(150):
            prove(draw_setting(seed), mutant)

    with pytest.raises(Broken):
        prove_all()


def test_exact_on_policy_flows() -> None:
    setting = draw_setting(0)
    on_policy = {"max_staleness": 0, "weight_sync_steps": 1, "tasks": None, "max_steps": 6, "p_lost": 0.0}
    values = {name: getattr(setting, name) for name in setting.__struct_fields__}
    assert prove(Setting(**{**values, **on_policy, "p_no_signal": 0.0}))["stale"] == 0


# Slots that an earlier life had completed ----------------------------------------------------------------------


async def acquired(pacer: Pacer) -> list[int]:
    """All slots it hands out now."""
    slots: list[int] = []
    with trio.move_on_after(1):
        while (slot := await pacer.acquire()) is not None:
            slots.append(slot)
    return slots


async def test_slots_that_have_ended_are_not_handed_out_again(autojump_clock: MockClock) -> None:
    pacer = Pacer(2, 2, 4, 1, 1, first_step=1)
    pacer.restore({3: 1, 4: 1}, {2, 3, 5, 7})
    assert [pacer.has_ended(slot) for slot in range(2, 8)] == [True, True, False, True, False, True]
    assert (pacer.redraws(3), pacer.redraws(4)) == (0, 1)
    assert await acquired(pacer) == [4, 6]
    pacer.close(4)
    pacer.close(6)
    assert (pacer.closed, await pacer.acquire()) == (8, None)
    with pytest.raises(ValueError, match="slot 5 has ended before"):
        pacer.close(5)


async def test_nothing_is_admitted_before_the_first_weights_are_attested(autojump_clock: MockClock) -> None:
    pacer = Pacer(2, 1, None, 1, 1, first_step=3, attested=False)
    assert await acquired(pacer) == []
    pacer.attest(3)
    assert await acquired(pacer) == [6, 7, 8, 9]


async def test_the_data_may_end_before_slots_that_have_ended(autojump_clock: MockClock) -> None:
    pacer = Pacer(2, 9, None, 1, 1)
    pacer.restore({}, {3})
    assert await pacer.acquire() == 0
    assert not pacer.seal(0)  # slot 3 lies beyond: this one ends as void, and so do those in between
    assert pacer.total == 4
    assert await acquired(pacer) == [1, 2]


async def test_the_data_may_end_before_slots_that_are_open_have_come_up_again(autojump_clock: MockClock) -> None:
    pacer = Pacer(2, 9, None, 1, 1)
    pacer.restore({0: 1, 1: 0, 2: 0}, ())
    assert await pacer.acquire() == 0
    assert not pacer.seal(0)  # it had lost its task, and there is none for it: it is void, the others are played
    assert pacer.total == 3
    assert await acquired(pacer) == [1, 2]
