"""The learner through its own door, against a plain forward pass of one unpadded row at a time."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trouper.learner.step as step_module
from trouper.channels import CheckpointError, ConfigError, ModelError, NumericsError
from trouper.learner.advantage import group_advantages
from trouper.learner.batch import BatchConfig
from trouper.learner.checksum import checksum
from trouper.learner.learner import Learner
from trouper.learner.loss import LossConfig, kl_estimate
from trouper.learner.optimizer import OptimizerConfig

PLAIN = OptimizerConfig(name="sgd", learning_rate=1.0, max_grad_norm=0)
"""After a step with this, the parameters have moved by the gradient."""

BATCH = BatchConfig(row_tokens=64, micro_batch_size=2)


def make_learner(decoder, **settings):
    chosen = {"loss": LossConfig(), "optimizer": PLAIN, "batch": BATCH} | settings
    return Learner(decoder, **chosen)


def flat(params):
    return np.concatenate([np.asarray(p, np.float64).reshape(-1) for p in params])


def with_sampler_logprobs(group, decoder, logprobs):
    """The group as if `decoder` had sampled it."""

    graph, state = nnx.split(decoder)

    def score(row):
        values = np.asarray(logprobs(graph, state, row))[: len(row.tokens)] * row.loss_mask
        return msgspec.structs.replace(row, logprobs=values)

    episodes = tuple(msgspec.structs.replace(e, rows=tuple(map(score, e.rows))) for e in group.episodes)
    return msgspec.structs.replace(group, episodes=episodes)


def plain_gradient(decoder, groups, config, row_logprobs, old=None, reference=None):
    """Loss and flat gradient, written out: every episode's rows, one division at the end."""
    graph, state = nnx.split(decoder)
    episodes = [(e, float(a)) for g in groups for e, a in zip(g.episodes, g.advantages, strict=True)]
    episodes = [(e, a) for e, a in episodes if e.reward is not None]
    tokens = sum(e.sampled for e, _ in episodes)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high

    def score(model, row):
        return row_logprobs(*nnx.split(model), row)

    def loss(state):
        total = 0.0
        for episode, advantage in episodes:
            summed = 0.0
            for row in episode.rows:
                current = row_logprobs(graph, state, row)
                mask, sampler = np.zeros((2, len(current)), np.float32)
                mask[: len(row.tokens)], sampler[: len(row.tokens)] = row.loss_mask, row.logprobs
                start = jax.lax.stop_gradient(current) if old is None else score(old, row)
                ratio = jnp.exp(current - start)
                clipped = jnp.clip(ratio, 1 - config.epsilon, 1 + high)
                token = -jnp.minimum(ratio * advantage, clipped * advantage)
                if config.rollout_is == "token":
                    weight = jnp.exp(start - sampler)
                    token *= jnp.minimum(weight, config.rollout_is_threshold)
                if config.beta:
                    token += config.beta * kl_estimate(config, current, score(reference, row))
                summed += (token * mask).sum()
            total += {
                "token-mean": summed / tokens,
                "seq-mean-token-mean": summed / episode.sampled / len(episodes),
                "seq-mean-token-sum": summed / len(episodes),
                "seq-mean-token-sum-norm": summed / (config.max_response_tokens or 1) / len(episodes),
            }[config.loss_agg_mode]
        return total

    value, gradient = jax.value_and_grad(loss)(state)
    return float(value), flat(jax.tree.leaves(gradient))


def gradient_of(learner, cuts):
    """Loss and flat gradient as one plain step shows them."""
    before = flat(learner.copy_params())
    for groups in cuts:
        learner.add(groups)
    metrics = learner.update()
    return metrics["loss"], before - flat(learner.copy_params()), metrics


MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


LAYOUTS = [
    BatchConfig(row_tokens=64, micro_batch_size=1),
    BatchConfig(row_tokens=48, micro_batch_size=2, trained_tokens=20),
    BatchConfig(row_tokens=32, micro_batch_size=8, share_prefix=False),
    BatchConfig(row_tokens=32, micro_batch_size=3, buckets=(24,)),
]


@pytest.mark.parametrize(
    ("mode", "layouts"),
    [(MODES[0], LAYOUTS[1:2]), (MODES[1], LAYOUTS), (MODES[2], LAYOUTS[2:3]), (MODES[3], LAYOUTS[:1])],
)
def test_no_layout_and_no_cut_changes_loss_or_gradient(make_decoder, random_groups, row_logprobs, mode, layouts):
    decoder, reference = make_decoder(0, num_hidden_layers=2), make_decoder(1, num_hidden_layers=2)
    config = LossConfig(loss_agg_mode=mode, beta=0.2, rollout_is="token", max_response_tokens=12)
    groups = random_groups(5)
    expected, gradient = plain_gradient(decoder, groups, config, row_logprobs, reference=reference)
    cuts = [[groups], [[g] for g in groups[::-1]], [groups[:2], groups[2:]], [groups[:1], groups[1:]]]
    for batch, cut in zip(layouts, cuts, strict=False):
        learner = make_learner(decoder, loss=config, batch=batch, reference=jax.tree.leaves(nnx.state(reference)))
        loss, found, _ = gradient_of(learner, cut)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert np.linalg.norm(found - gradient) <= 1e-5 * np.linalg.norm(gradient)


@pytest.fixture
def one_step_of(make_decoder):
    """`one_step_of(layout, mode, cuts)`: loss and gradient of one step, the learners kept compiled."""
    kept = {}

    def step(layout, mode, cuts):
        if (layout, mode) not in kept:
            learner = make_learner(make_decoder(), loss=LossConfig(loss_agg_mode=mode), batch=LAYOUTS[layout])
            kept[layout, mode] = learner, jax.tree.map(np.array, learner.state_tree())
        learner, start = kept[layout, mode]
        learner.load_state_tree(start)
        return gradient_of(learner, cuts)

    return step


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    seed=st.integers(0, 3),
    layout=st.sampled_from([0, 1, 3]),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean"]),
)
def test_random_cuts_and_windows_give_each_step_its_own_gradient(one_step_of, random_groups, data, seed, layout, mode):
    """Four groups in any order, in one step or in two of two: a step divides by what it holds, not by the whole."""
    order = data.draw(st.permutations(random_groups(seed, 4)))
    for window in data.draw(st.sampled_from([[order], [order[:2], order[2:]], [order[:3], order[3:]]])):
        cuts = []
        for group in window:
            if cuts and data.draw(st.booleans()):
                cuts[-1].append(group)
            else:
                cuts.append([group])
        loss, found, _ = one_step_of(layout, mode, cuts)
        expected, gradient, _ = one_step_of(0, mode, [sorted(window, key=lambda group: group.slot)])
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert np.linalg.norm(found - gradient) <= 1e-5 * np.linalg.norm(gradient)


def test_members_of_two_groups_in_any_order_keep_their_own_advantages(make_decoder, make_row, make_group, row_logprobs):
    rewards = {1: [1, 0, 0, 0], 2: [1, 1, 1, 0], 3: [1, 0, 0]}
    groups = []
    for slot, r in rewards.items():
        rows = [[make_row([slot, 5], [slot, member, 3, 4][: 2 + member % 2])] for member in range(len(r))]
        groups.append(make_group(slot, rows, group_advantages(r, scale_rewards="none").tolist(), r))
    decoder = make_decoder()
    _, gradient = plain_gradient(decoder, groups, LossConfig(), row_logprobs)
    for size, order in [(2, [0, 1, 2]), (3, [2, 0, 1])]:
        learner = make_learner(decoder, batch=BatchConfig(row_tokens=16, micro_batch_size=size))
        _, found, _ = gradient_of(learner, [[groups[i]] for i in order])
        assert np.linalg.norm(found - gradient) <= 1e-5 * np.linalg.norm(gradient)


def test_pieces_of_the_vocabulary_head_change_no_gradient_and_no_log_prob(
    make_decoder, random_groups, row_logprobs, monkeypatch
):
    """Pieces of 5 trained tokens: the last overlaps the one before, rows end in different pieces, some are empty."""
    monkeypatch.setattr(step_module, "HEAD_TOKENS", 5)
    monkeypatch.setattr(step_module, "HEAD_ROW_TOKENS", 5)
    for tied in (True, False):
        decoder, reference = (make_decoder(seed, tie_word_embeddings=tied) for seed in (0, 1))
        config, groups = LossConfig(beta=0.2, rollout_is="token"), random_groups(5)
        expected, gradient = plain_gradient(decoder, groups, config, row_logprobs, reference=reference)
        for size in (1, 3):
            batch = BatchConfig(row_tokens=48, micro_batch_size=size, trained_tokens=28)
            learner = make_learner(decoder, loss=config, batch=batch, reference=jax.tree.leaves(nnx.state(reference)))
            loss, found, metrics = gradient_of(learner, [[group] for group in groups])
            assert loss == pytest.approx(expected, rel=1e-5)
            assert np.linalg.norm(found - gradient) <= 1e-5 * np.linalg.norm(gradient)
            assert metrics["entropy"] > 0


def test_shared_padded_and_packed_rows_have_one_gradient_over_several_blocks_of_queries(
    make_decoder, make_row, make_group
):
    """Rows of hundreds of tokens, members of different length, several turns, and one that forks off the prompt."""
    rng = np.random.default_rng(0)

    def ids(count):
        return [int(i) for i in rng.integers(0, 32, count)]

    prompt = ids(150)
    members = [[make_row(prompt, ids(length), ids(9), ids(length // 2))] for length in (31, 60, 5)]
    members.append([make_row(prompt, ids(40)), make_row(prompt[:100] + ids(12), ids(20), ids(3), ids(7))])
    group = make_group(0, members, [0.7, -1.1, 0.4, 0.2])
    gradients = []
    for batch in (
        BatchConfig(row_tokens=260, micro_batch_size=5, share_prefix=False),
        BatchConfig(row_tokens=700, share_prefix=False),
        BatchConfig(row_tokens=700),
    ):
        learner = make_learner(make_decoder(num_hidden_layers=2), batch=batch)
        gradients.append(gradient_of(learner, [[group]])[1])
    padded, *others = gradients
    assert np.linalg.norm(padded) > 0.1
    for found in others:
        assert np.linalg.norm(found - padded) <= 1e-5 * np.linalg.norm(padded)


def test_an_episode_of_three_rows_weighs_as_one_under_sequence_mean(make_decoder, make_row, make_group, row_logprobs):
    rows = [make_row([1, 2], [3, 4]), make_row([1, 5], [6]), make_row([1, 2, 3], [7, 8, 9])]
    group = make_group(0, [rows, [make_row([1, 2], [9, 8])]], [0.5, -0.5])
    decoder = make_decoder()
    for mode in MODES[:2]:
        config = LossConfig(loss_agg_mode=mode)
        learner = make_learner(decoder, loss=config)
        loss, found, metrics = gradient_of(learner, [[group]])
        expected, gradient = plain_gradient(decoder, [group], config, row_logprobs)
        assert np.linalg.norm(found - gradient) <= 1e-5 * np.linalg.norm(gradient)
        assert loss == pytest.approx(expected, abs=1e-7)
        assert metrics["tokens"] == 8
    # Ratio 1 everywhere: under sequence-mean the two episodes' losses -0.5 and +0.5 cancel.
    assert loss == pytest.approx(0, abs=1e-7)


def test_a_member_without_a_reward_feels_neither_policy_nor_kl(make_decoder, make_row, make_group):
    rows = [[make_row([1, 2], [3 + member, 4])] for member in range(3)]
    config = LossConfig(beta=0.3)
    reference = jax.tree.leaves(nnx.state(make_decoder(1)))
    learner = make_learner(make_decoder(), loss=config, reference=reference)
    whole = make_group(0, rows, [1, 0, -1], [1, None, 0])
    _, with_it, metrics = gradient_of(learner, [[whole]])
    assert metrics["tokens"] == 4
    learner = make_learner(make_decoder(), loss=config, reference=reference)
    _, without, _ = gradient_of(learner, [[make_group(0, rows[::2], [1, -1], [1, 0])]])
    np.testing.assert_allclose(with_it, without, atol=1e-6)


def test_without_anything_to_learn_nothing_moves(make_decoder, make_row, make_group):
    moving = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    learner = make_learner(make_decoder(), optimizer=moving)
    rows = [[make_row([1, 2], [3, 4])], [make_row([1, 2], [5])]]
    learner.add([make_group(0, rows, [1, -1])])
    learner.update()  # momentum is there now
    before = jax.tree.map(np.array, learner.state_tree())
    for group in (
        make_group(1, rows, [0, 0], [None, None]),
        make_group(1, rows, [0, 0], [0.3, 0.3]),
        make_group(1, [], []),
        msgspec.structs.replace(make_group(1, rows, [1, -1]), void="lost"),
    ):
        learner.add([group])
        metrics = learner.update()
        assert metrics["loss"] == metrics["grad_norm"] == 0.0
    after = learner.state_tree()
    assert learner.step == 5
    for part in ("params", "optimizer", "optimizer_steps"):
        jax.tree.map(np.testing.assert_array_equal, before[part], after[part])


def test_equal_rewards_still_feel_the_kl_term(make_decoder, make_row, make_group):
    reference = jax.tree.leaves(nnx.state(make_decoder(1)))
    learner = make_learner(make_decoder(), loss=LossConfig(beta=0.1), reference=reference)
    _, gradient, metrics = gradient_of(learner, [[make_group(0, [[make_row([1], [2])]] * 2, [0, 0], [0.3, 0.3])]])
    assert metrics["kl"] > 0
    assert np.abs(gradient).max() > 0


@pytest.mark.parametrize("batch", [BATCH, BatchConfig(row_tokens=24, micro_batch_size=4, share_prefix=False)])
def test_on_policy_the_ratio_to_the_sampler_is_one_at_every_temperature(
    make_decoder, random_groups, row_logprobs, batch
):
    decoder = make_decoder()
    groups = [with_sampler_logprobs(g, decoder, row_logprobs) for g in random_groups(2)]
    assert {r.sampling.temperature for g in groups for e in g.episodes for r in e.rows} == {0.7, 1.0}
    _, _, metrics = gradient_of(make_learner(decoder, batch=batch), [groups])
    assert metrics["mismatch/abs_max"] <= 1e-5
    assert metrics["mismatch/is_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert abs(metrics["mismatch/kl"]) <= 1e-6
    assert metrics["pg_clipfrac"] == 0.0


def test_a_sampler_that_reports_another_temperature_shows_as_mismatch(make_decoder, make_row, make_group, row_logprobs):
    decoder = make_decoder()
    group = make_group(0, [[make_row([1, 2], [3, 4])], [make_row([1, 2], [5])]], [1, -1])
    group = with_sampler_logprobs(group, decoder, row_logprobs)
    cold = [
        msgspec.structs.replace(
            e, rows=tuple(msgspec.structs.replace(r, sampling=type(r.sampling)(temperature=0.6)) for r in e.rows)
        )
        for e in group.episodes
    ]
    _, _, metrics = gradient_of(make_learner(decoder), [[msgspec.structs.replace(group, episodes=tuple(cold))]])
    assert metrics["mismatch/abs_max"] > 0.05


def test_several_iterations_clip_against_the_log_probs_at_step_start(make_decoder, random_groups, row_logprobs):
    config = LossConfig(epsilon=0.02)
    optimizer = msgspec.structs.replace(PLAIN, learning_rate=0.05)
    groups, decoder, start = random_groups(7), make_decoder(), make_decoder()
    learner = make_learner(decoder, loss=config, optimizer=optimizer, num_iterations=3)
    assert not learner.streams
    graph, state = nnx.split(decoder)
    norms = []
    for _ in range(3):
        _, gradient = plain_gradient(nnx.merge(graph, state), groups, config, row_logprobs, old=start)
        norms.append(np.linalg.norm(gradient))
        leaves, structure = jax.tree.flatten(state)
        cuts = np.split(gradient, np.cumsum([leaf.size for leaf in leaves])[:-1])
        moved = [leaf - 0.05 * cut.reshape(leaf.shape) for leaf, cut in zip(leaves, cuts, strict=True)]
        state = jax.tree.unflatten(structure, [jnp.asarray(m, jnp.float32) for m in moved])
    learner.add(groups[:1])
    learner.add(groups[1:])
    metrics = learner.update()
    assert learner.step == 1
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert metrics["pg_clipfrac"] > 0
    np.testing.assert_allclose(flat(learner.copy_params()), flat(jax.tree.leaves(state)), atol=2e-6)


def test_scaling_by_the_step_divides_all_advantages_by_one_number(make_decoder, make_row, make_group):
    rewards = [[1, 0, None], [5, 1]]
    rows = [[make_row([1, 2], [member, 4])] for member in range(3)]
    groups = [
        make_group(slot, rows[: len(r)], group_advantages(r, scale_rewards="batch").tolist(), r)
        for slot, r in enumerate(rewards)
    ]
    plain = make_learner(make_decoder())
    scaled = make_learner(make_decoder(), scale_rewards="batch")
    assert plain.streams
    assert not scaled.streams
    _, gradient, _ = gradient_of(plain, [groups])
    _, divided, _ = gradient_of(scaled, [groups[:1], groups[1:]])
    np.testing.assert_allclose(divided * np.std([0.5, -0.5, 2, -2], ddof=1), gradient, rtol=1e-3, atol=1e-6)


def test_a_broken_sampler_log_prob_is_refused_before_anything_is_taken(make_decoder, make_row, make_group):
    learner = make_learner(make_decoder())
    good = make_group(0, [[make_row([1], [2])], [make_row([1], [3])]], [1, -1])
    bad = make_group(1, [[make_row([1], [2], logprobs=[float("nan")])]], [1])
    with pytest.raises(NumericsError, match=r"slot 1, attempt 1\.0\.0, row 0"):
        learner.add([good, bad])
    assert learner.update()["tokens"] == 0
    with pytest.raises(NumericsError, match="slot 0 has advantages"):
        learner.add([msgspec.structs.replace(good, advantages=np.array([np.nan, 1], np.float32))])


@pytest.mark.parametrize("outside", [-1, 32])
def test_an_id_outside_the_table_is_refused_before_it_reaches_the_device(make_decoder, make_row, make_group, outside):
    learner = make_learner(make_decoder())
    good = make_group(0, [[make_row([1], [2])], [make_row([1], [3])]], [1, -1])
    with pytest.raises(ModelError, match=f"token id {outside} is outside the embedding table of 32 rows"):
        learner.add([good, make_group(1, [[make_row([1, outside], [2])]], [1])])
    assert learner.update()["tokens"] == 0


def test_a_step_that_is_not_finite_is_not_taken(make_decoder, make_row, make_group):
    decoder = make_decoder()
    decoder.norm.scale[...] = decoder.norm.scale[...].at[0].set(jnp.nan)
    learner = make_learner(decoder, optimizer=OptimizerConfig(learning_rate=0.1))
    before = jax.tree.map(np.array, learner.state_tree())
    learner.add([make_group(0, [[make_row([1], [2])], [make_row([1], [3])]], [1, -1])])
    with pytest.raises(NumericsError, match="2 of 2 trained tokens"):
        learner.update()
    jax.tree.map(np.testing.assert_array_equal, before, learner.state_tree())
    assert learner.update()["tokens"] == 0


def test_bfloat16_stays_finite_and_near_the_sampler(make_decoder, random_groups, row_logprobs):
    decoder = make_decoder(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    groups = [with_sampler_logprobs(g, decoder, row_logprobs) for g in random_groups(4)]
    learner = make_learner(decoder, optimizer=OptimizerConfig(learning_rate=1e-3), loss=LossConfig(beta=0.1))
    for _ in range(3):
        learner.add(groups)
        metrics = learner.update()
        assert all(np.isfinite(value) for value in metrics.values())
        if learner.step == 1:
            assert metrics["mismatch/abs_max"] < 0.2
    assert all(p.dtype == jnp.bfloat16 for p in learner.params)
    assert {str(a.dtype) for a in learner.state_tree()["optimizer"].values()} == {"float32", "int32"}


def test_a_copy_outlives_the_steps_that_donate_its_source(make_decoder, random_groups):
    decoder = make_decoder()
    learner = make_learner(decoder)
    copy, half = learner.copy_params(), learner.copy_params(jnp.bfloat16, jax.devices()[0])
    assert all(p.dtype == jnp.bfloat16 for p in half)
    values, sums = flat(copy), (checksum(copy), checksum(half))
    for seed in range(2):
        learner.add(random_groups(seed))
        learner.update()
    np.testing.assert_array_equal(flat(copy), values)
    assert (checksum(copy), checksum(half)) == sums
    assert checksum(learner.copy_params()) != sums[0]
    # The decoder it was made from is untouched, too.
    np.testing.assert_array_equal(flat(jax.tree.leaves(nnx.state(decoder))), values)


def test_a_checksum_sees_one_bit_a_swap_and_a_shape():
    a, b = jnp.arange(6, dtype=jnp.float32), jnp.arange(6, 12, dtype=jnp.float32)
    sums = {
        checksum([a, b]),
        checksum([b, a]),
        checksum([a.reshape(2, 3), b]),
        checksum([a.at[3].set(np.nextafter(np.float32(3), np.float32(4))), b]),
        checksum([a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)]),
    }
    assert len(sums) == 5
    assert checksum([a + 0, b + 0]) == checksum([a, b])


def test_nothing_is_compiled_after_the_warm_up(make_decoder, random_groups):
    batch = BatchConfig(row_tokens=64, buckets=(40,), micro_batch_size=2)
    learner = make_learner(make_decoder(), batch=batch, loss=LossConfig(beta=0.1))
    before = jax.tree.map(np.array, learner.state_tree())
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        learner.warm_up()
        assert compiled
        jax.tree.map(np.testing.assert_array_equal, before, learner.state_tree())
        compiled.clear()
        for seed in range(4):
            learner.add(random_groups(seed, groups=1 + seed))
            learner.update()
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_a_restored_learner_goes_on_as_if_nothing_had_happened(make_decoder, random_groups):
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule="linear", decay_steps=6, weight_decay=0.1)
    straight = make_learner(make_decoder(), optimizer=optimizer)
    for seed in range(4):
        if seed == 2:
            saved = jax.tree.map(np.array, straight.state_tree())
        straight.add(random_groups(seed))
        last = straight.update()
    resumed = make_learner(make_decoder(3), optimizer=optimizer)
    resumed.add(random_groups(9))  # never trained on
    resumed.load_state_tree(saved)
    assert resumed.step == 2
    for seed in (2, 3):
        resumed.add(random_groups(seed))
        again = resumed.update()
    assert again == last
    np.testing.assert_array_equal(flat(resumed.copy_params()), flat(straight.copy_params()))
    with pytest.raises(CheckpointError, match="optimizer"):
        make_learner(make_decoder()).load_state_tree(saved)
    params = {name: p for name, p in saved["params"].items() if name != "norm/scale"}
    with pytest.raises(CheckpointError, match=r"1 arrays.*norm/scale"):
        resumed.load_state_tree(saved | {"params": params})


def test_ids_beyond_the_tokenizer_get_no_gradient(make_decoder, make_row, make_group):
    learner = make_learner(make_decoder(), vocab_limit=20)
    before = {name: np.array(p) for name, p in learner.state_tree()["params"].items()}
    learner.add([make_group(0, [[make_row([1], [2, 3])], [make_row([1], [4])]], [1, -1])])
    learner.update()
    moved = learner.state_tree()["params"]["lm_head/kernel"] - before["lm_head/kernel"]
    assert not moved[:, 20:].any()
    assert moved[:, :20].any()


def test_settings_that_cannot_work_are_refused(make_decoder):
    with pytest.raises(ConfigError, match="num_iterations = 0"):
        make_learner(make_decoder(), num_iterations=0)
