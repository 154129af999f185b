"""The grouper, over outcomes in any order."""

from itertools import chain, zip_longest
from random import Random
from typing import Any

import numpy as np
import pytest
import trio

from trouper.actors.grouper import Grouper
from trouper.actors.ledger import Ledger
from trouper.actors.pacer import Pacer
from trouper.actors.quarantine import Quarantine
from trouper.actors.simulation import SimulatedAccelerator
from trouper.channels import Channel, Group, Lost, Outcome, Void

DISK = SimulatedAccelerator("ledger")
P1, P2 = [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]
CENTRED = {0: [0.75, -0.25, -0.25, -0.25], 1: [0.25, 0.25, 0.25, -0.75]}


async def grouped(
    ledger: Ledger,
    outcomes: list[Any],
    *,
    slots: int,
    members: int = 4,
    per_step: int = 2,
    redraws: int = 0,
    **options: Any,
) -> tuple[list[Group], Grouper, Pacer]:
    """What the grouper makes of outcomes that come one after another."""
    pacer = Pacer(per_step, 1000, None, redraws, 1)
    for _ in range(slots):
        await pacer.acquire()
    given = {"estimator": "dr_grpo", "scale_rewards": "none", **options}
    grouper = Grouper(pacer, ledger, DISK, Quarantine(0, {}, print), num_generations=members, **given)
    inbox, outbox = Channel[Outcome]("episodes", Outcome, 0), Channel[Group]("groups", Group, 100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(grouper.run, inbox.receiver(), outbox.sender())
        with inbox.sender() as sender:
            inbox.finish()
            for outcome in outcomes:
                if outcome == "seal":
                    pacer.seal(None)
                elif outcome == "acquire":
                    await pacer.acquire()
                else:
                    await sender.send(outcome)
    receiver = outbox.receiver()
    return [receiver.receive_nowait() for _ in range(outbox.statistics().depth)], grouper, pacer


def lost(episode: Any) -> Lost:
    return Lost(episode.attempt, "env_error", "env 42")


@pytest.mark.parametrize("order", ["grouped", "interleaved", *range(10)])
async def test_groups_are_made_by_slot_in_whatever_order_members_arrive(autojump_clock, ledger, episode, order) -> None:
    first = [episode(0, member, reward) for member, reward in enumerate(P1)]
    second = [episode(1, member, reward) for member, reward in enumerate(P2)]
    arrivals = [*first, *second] if order == "grouped" else list(chain(*zip_longest(first, second)))
    if isinstance(order, int):
        Random(order).shuffle(arrivals)
    groups, grouper, _ = await grouped(ledger, arrivals, slots=2)
    assert {group.slot: group.advantages.tolist() for group in groups} == CENTRED
    assert all([each.attempt.member for each in group.episodes] == [0, 1, 2, 3] for group in groups)
    assert grouper.open_groups == 0


async def test_steps_come_in_order_and_groups_of_a_step_as_they_are_complete(autojump_clock, ledger, episode) -> None:
    slots = [3, 5, 1, 4, 0, 2]
    groups, _, pacer = await grouped(ledger, [episode(slot, 0, 1.0) for slot in slots], slots=6, members=1)
    assert [group.slot for group in groups] == [1, 0, 3, 2, 5, 4]
    assert pacer.closed == 6


async def test_a_last_step_that_becomes_short_is_released(autojump_clock, ledger, episode) -> None:
    groups, _, _ = await grouped(
        ledger, [episode(0, 0, 1.0), episode(2, 0, 1.0), episode(1, 0, 1.0), "seal"], slots=3, members=1
    )
    assert [group.slot for group in groups] == [0, 1, 2]


async def test_a_duplicate_is_refused_and_counted(autojump_clock, ledger, episode) -> None:
    first = episode(0, 0, 1.0)
    groups, grouper, _ = await grouped(
        ledger, [first, episode(0, 0, 0.0), lost(episode(0, 0, 0.0)), episode(0, 1, 0.0)], slots=1, members=2
    )
    assert groups[0].episodes[0] is first
    assert grouper.counts == {"duplicates": 2}


async def test_a_duplicate_that_comes_after_its_group_is_refused_too(autojump_clock, ledger, episode) -> None:
    def group(draw: int, *rewards: float) -> list[Any]:
        return [episode(0, member, reward, draw=draw) for member, reward in enumerate(rewards)]

    first, second = group(0, 1.0, 1.0), group(1, 1.0, 0.0)
    arrivals = [*first, first[0], "acquire", first[1], second[0], first[0], second[1], second[1]]
    groups, grouper, _ = await grouped(ledger, arrivals, slots=1, members=2, redraws=1, dynamic_sampling=True)
    assert [group.episodes for group in groups] == [tuple(second)]
    assert grouper.counts == {"dropped/no_signal": 1, "duplicates": 4}
    assert grouper.open_groups == 0


async def test_a_group_shrinks_and_the_lost_member_counts_for_nothing(autojump_clock, ledger, episode) -> None:
    members = [episode(0, 0, 1.0), lost(episode(0, 1, None)), episode(0, 2, 0.0), episode(0, 3, 1.0)]
    (group,), grouper, _ = await grouped(ledger, members, slots=1, lost_members="shrink", min_members=3)
    assert group.advantages == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert (group.lost, group.void) == (1, None)
    assert grouper.counts == {}


@pytest.mark.parametrize("options", [{"lost_members": "drop"}, {"lost_members": "shrink", "min_members": 4}])
@pytest.mark.parametrize("redraws", [0, 1])
async def test_a_group_that_is_not_enough_reopens_its_slot_or_is_void(
    autojump_clock, ledger, episode, options, redraws
) -> None:
    members = [episode(0, 0, 1.0), lost(episode(0, 1, None)), episode(0, 2, 0.0), episode(0, 3, 1.0)]
    groups, grouper, pacer = await grouped(ledger, members, slots=1, redraws=redraws, **options)
    assert [(group.void, group.lost, len(group.episodes)) for group in groups] == ([] if redraws else [("lost", 1, 0)])
    assert grouper.counts == {"dropped/lost": 1}
    assert pacer.closed == 1 - redraws


@pytest.mark.parametrize("rewards", [[0.5, 0.5], [None, None], [None, 1.0]])
async def test_a_group_without_signal_is_replaced_while_the_slot_has_redraws(
    autojump_clock, ledger, episode, rewards
) -> None:
    def members(draw: int) -> list[Any]:
        return [episode(0, member, reward, draw=draw) for member, reward in enumerate(rewards)]

    pacer = Pacer(1, 0, 1, 1, 1)
    await pacer.acquire()
    grouper = Grouper(
        pacer,
        ledger,
        DISK,
        Quarantine(0, {}, print),
        num_generations=2,
        estimator="grpo",
        scale_rewards="group",
        dynamic_sampling=True,
    )
    inbox, outbox = Channel[Outcome]("episodes", Outcome, 0), Channel[Group]("groups", Group, 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(grouper.run, inbox.receiver(), outbox.sender())
        with inbox.sender() as sender:
            inbox.finish()
            for draw in range(2):
                for member in members(draw):
                    await sender.send(member)
                if draw == 0:
                    assert await pacer.acquire() == 0
    group = outbox.receiver().receive_nowait()
    assert (group.draw, group.void, group.advantages.tolist()) == (1, None, [0.0, 0.0])
    assert outbox.statistics().depth == 0
    assert grouper.counts == {"dropped/no_signal": 1}


async def test_a_member_without_a_reward_has_advantage_zero(autojump_clock, ledger, episode) -> None:
    members = [episode(0, member, reward) for member, reward in enumerate([1.0, None, 0.0, 1.0])]
    (group,), _, _ = await grouped(ledger, members, slots=1)
    assert group.advantages == pytest.approx(np.array([1 / 3, 0, -2 / 3, 1 / 3]))


async def test_void_slots_pass_through_in_their_place(autojump_clock, ledger, episode) -> None:
    groups, _, pacer = await grouped(
        ledger, [Void(1, "end_of_data"), episode(2, 0, 1.0), episode(0, 0, 1.0), "seal"], slots=3, members=1
    )
    assert [(group.slot, group.void) for group in groups] == [(1, "end_of_data"), (0, None), (2, None)]
    assert pacer.closed == 3


@pytest.mark.parametrize(
    ("rewards", "rows", "advantages"),
    [([1.0, 0.0], [3, 1], [0.5, -0.5]), ([1.0, 0.0, 0.0, 1.0], [3, 1, 1, 2], [0.5, -0.5, -0.5, 0.5])],
)
async def test_an_episode_of_several_rows_counts_once(
    autojump_clock, ledger, episode, rewards, rows, advantages
) -> None:
    members = [
        episode(0, member, reward, rows=episode(0, member, reward).rows * count)
        for member, (reward, count) in enumerate(zip(rewards, rows, strict=True))
    ]
    (group,), _, _ = await grouped(ledger, members, slots=1, members=len(rewards))
    assert group.advantages.tolist() == advantages
