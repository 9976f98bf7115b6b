"""The method: advantages, the three rules, the loss, the update's gradient, and the sampling.

References are written here a second time, as plain sums over responses and tokens, in float64.
"""

import math
import random
import statistics
from collections import Counter
from itertools import chain, product

import pytest
import torch

import grpo_ba
from grpo_ba import (
    AGGREGATIONS,
    Config,
    Response,
    Sampling,
    TransformersEngine,
    group_advantages,
    group_metrics,
    micro_batches,
    policy_loss,
    response_logprobs,
    sample_seed,
    token_weights,
    update,
)

RULES = list(AGGREGATIONS)


def random_groups(seed, P=5, binary=True, shortest=1):
    """Rewards [P, G] and lengths [P, G], with at least one right and one wrong in each group."""
    rng = torch.Generator().manual_seed(seed)
    G = int(torch.randint(2, 10, (), generator=rng))
    rewards = torch.rand(P, G, generator=rng, dtype=torch.float64)
    if binary:
        rewards = (rewards < 0.4).double()
        rewards[:, 0], rewards[:, 1] = 1, 0
    order = torch.stack([torch.randperm(G, generator=rng) for _ in range(P)])
    rewards = rewards.gather(1, order)
    return rewards, torch.randint(shortest, 60, (P, G), generator=rng)


def loss_by_definition(rule, A, losses):
    """The docstring's formulas for one group, term by term. losses[i][t], A[i]."""
    G = len(A)
    if rule == "sequence":  # every response weighs the same
        return sum(sum(tokens) / len(tokens) for tokens in losses if len(tokens)) / G
    if rule == "token":  # every token weighs the same
        every = [loss for tokens in losses for loss in tokens]
        return sum(every) / max(1, len(every))
    total = 0.0  # balanced: a mean over the tokens of each sign, weighed by its share of responses
    for sign in (1, -1):
        members = [i for i in range(G) if A[i] * sign > 0]
        every = [loss for i in members for loss in losses[i]]
        if every:
            total = total + len(members) / G * (sum(every) / len(every))
    return total


# ----------------------------------------------------------------------------------------
# Advantages


def test_advantages_are_the_standardised_rewards_of_the_group():
    for seed in range(20):
        rewards, _ = random_groups(seed, binary=seed % 2 == 0)
        standardised = group_advantages(rewards, eps=1e-6).tolist()
        centred = group_advantages(rewards, normalize_std=False).tolist()
        for p, row in enumerate(rewards.tolist()):
            mean, std = statistics.fmean(row), statistics.pstdev(row)
            expected = [(r - mean) / (std + 1e-6) for r in row]
            assert standardised[p] == pytest.approx(expected, abs=1e-12)
            assert centred[p] == pytest.approx([r - mean for r in row], abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_without_spread_gets_exactly_zero(value, normalize_std):
    # The float32 mean of G times 0.1 is not 0.1: a tiny spread would blow that residue up.
    rewards = torch.tensor([[value] * 7, [1.0] + [0.0] * 6])
    advantages = group_advantages(rewards, normalize_std)
    assert advantages[0].tolist() == [0.0] * 7
    assert advantages[1].abs().min() > 0


def test_a_reward_that_is_its_groups_mean_has_no_sign():
    """0.1 + 0.2 + ... has a rounding error, which must not make k = 3 of k = 2."""
    for seed in range(200):
        rng = random.Random(seed)
        low, high = rng.sample(range(1, 60), 2)
        rewards = torch.tensor([[low, high, (low + high) / 2, (low + high) / 2]]) / 10
        advantages = group_advantages(rewards)
        assert (advantages[0, 2:] == 0).all() and (advantages[0, :2] != 0).all(), rewards


def test_advantages_ignore_the_scale_of_rewards_and_other_groups():
    rewards, _ = random_groups(3, binary=False)
    advantages = group_advantages(rewards, eps=0)
    torch.testing.assert_close(group_advantages(5 * rewards - 2, eps=0), advantages)
    for p in range(len(rewards)):
        torch.testing.assert_close(group_advantages(rewards[p : p + 1], eps=0)[0], advantages[p])


# ----------------------------------------------------------------------------------------
# Rules


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("binary", [True, False])
def test_weights_give_the_loss_of_the_defining_formula(rule, binary):
    for seed in range(60):
        rewards, lengths = random_groups(seed, binary=binary, shortest=seed % 2)
        A = group_advantages(rewards)
        if not binary:
            A[:, -1] = 0  # belongs to neither sign
        rng = torch.Generator().manual_seed(seed)
        weights = token_weights(rule, A, lengths)
        assert weights.shape == lengths.shape and weights.dtype == torch.float64
        for p in range(len(A)):
            losses = [
                (-A[p, i] * (0.5 + torch.rand(n, generator=rng))).tolist()
                for i, n in enumerate(lengths[p].tolist())
            ]
            ours = sum(w * sum(tokens) for w, tokens in zip(weights[p].tolist(), losses))
            assert ours == pytest.approx(loss_by_definition(rule, A[p].tolist(), losses), abs=1e-12)


def test_the_worked_example_of_the_readme():
    """Four responses: right with 2 tokens, wrong with 8, wrong with 4, right with 6."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    lengths = torch.tensor([[2, 8, 4, 6]])
    A = group_advantages(rewards, eps=0)
    assert A.tolist() == [[1, -1, -1, 1]]
    expected = {  # weight of each token; net_advantage; weight_spread
        "sequence": ([1 / 8, 1 / 32, 1 / 16, 1 / 24], 0.0, 3.0),
        "token": ([1 / 20, 1 / 20, 1 / 20, 1 / 20], -0.2, 1.0),
        "balanced": ([1 / 16, 1 / 24, 1 / 24, 1 / 16], 0.0, 1.0),
    }
    for rule, (weights, net_advantage, weight_spread) in expected.items():
        ours = token_weights(rule, A, lengths)
        assert ours[0].tolist() == pytest.approx(weights, abs=1e-15)
        metrics = group_metrics(rewards, A, lengths, ours, torch.zeros(1, 4, dtype=torch.bool))
        assert metrics["net_advantage"] == pytest.approx(net_advantage, abs=1e-15)
        assert metrics["weight_spread"] == pytest.approx(weight_spread, abs=1e-12)
        assert (metrics["length_pos"], metrics["length_neg"], metrics["length_gap"]) == (4, 6, 2)


def test_equal_lengths_make_the_rules_equal():
    for seed in range(20):
        rewards, lengths = random_groups(seed)
        lengths = lengths[:, :1].expand_as(lengths)  # G responses of one length L: all 1 / (G L)
        for rule in RULES:
            weights = token_weights(rule, group_advantages(rewards), lengths)
            torch.testing.assert_close(weights, 1 / (lengths.shape[1] * lengths.double()))


def test_one_response_per_sign_makes_balanced_equal_sequence():
    for seed in range(20):
        _, lengths = random_groups(seed)
        A = torch.zeros(lengths.shape, dtype=torch.float64)
        A[:, 0], A[:, 1] = 1.3, -0.4  # G = 2, and larger groups whose other responses have A = 0
        balanced, sequence = (token_weights(r, A, lengths)[:, :2] for r in ("balanced", "sequence"))
        torch.testing.assert_close(balanced, sequence, rtol=1e-14, atol=0)


def test_a_lone_right_response_weighs_as_under_sequence():
    A = group_advantages(torch.tensor([[0.0, 0, 1, 0, 0]]).double())
    lengths = torch.tensor([[9, 4, 7, 30, 1]])
    assert token_weights("balanced", A, lengths)[0, 2] == pytest.approx(1 / (5 * 7))


def test_sums_of_weights():
    """Over all tokens of a group 1; under sequence 1/G for each response; under balanced k/G for
    the positive tokens, the mean over G responses of what belongs to them."""
    for seed in range(20):
        rewards, lengths = random_groups(seed)
        A, G = group_advantages(rewards), lengths.shape[1]
        ones = torch.ones(len(A), dtype=torch.float64)
        mass = {rule: token_weights(rule, A, lengths) * lengths for rule in RULES}
        for rule in RULES:
            torch.testing.assert_close(mass[rule].sum(dim=1), ones)
        torch.testing.assert_close(mass["sequence"], torch.full_like(A, 1 / G))
        share = lengths / lengths.sum(dim=1, keepdim=True).double()
        torch.testing.assert_close(mass["token"], share)
        k = rewards.sum(dim=1)
        torch.testing.assert_close((mass["balanced"] * (A > 0)).sum(dim=1), k / G)
        torch.testing.assert_close((mass["balanced"] * (A < 0)).sum(dim=1), 1 - k / G)


@pytest.mark.parametrize("rule", RULES)
def test_permuting_responses_permutes_weights_and_groups_do_not_mix(rule):
    rewards, lengths = random_groups(8)
    A = group_advantages(rewards)
    weights = token_weights(rule, A, lengths)
    order = torch.randperm(A.shape[1], generator=torch.Generator().manual_seed(0))
    permuted = token_weights(rule, A[:, order], lengths[:, order])
    torch.testing.assert_close(permuted, weights[:, order], rtol=1e-14, atol=0)
    for p in range(len(A)):
        assert torch.equal(token_weights(rule, A[p : p + 1], lengths[p : p + 1])[0], weights[p])


def test_signs_are_strict_and_an_empty_sign_leaves_the_other_its_weight():
    lengths = torch.tensor([[5, 3, 2, 10]])
    A = torch.tensor([[2.0, 0.0, -1.0, -1.0]], dtype=torch.float64)  # the zero is in neither
    balanced = token_weights("balanced", A, lengths)[0].tolist()
    assert balanced == pytest.approx([1 / 4 / 5, 0, 2 / 4 / 12, 2 / 4 / 12])
    A = torch.tensor([[1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)  # no negative response
    balanced = token_weights("balanced", A, lengths)[0].tolist()
    assert balanced == pytest.approx([3 / 4 / 17, 0, 3 / 4 / 17, 3 / 4 / 17])


@pytest.mark.parametrize("rule", RULES)
def test_responses_without_tokens_never_divide_by_zero(rule):
    A = torch.tensor([[1.0, -1.0, 1.0], [1.0, -1.0, -1.0], [0.0, 0.0, 0.0]])
    lengths = torch.tensor([[0, 4, 0], [0, 0, 0], [0, 0, 0]])
    weights = token_weights(rule, A, lengths)
    assert weights.isfinite().all()
    # The only tokens there are have the weight that the formula gives them.
    expected = {"sequence": 1 / 12, "token": 1 / 4, "balanced": 1 / 12}
    assert weights[0, 1].item() == pytest.approx(expected[rule])


def test_balanced_is_the_token_rule_with_the_share_of_right_tokens_as_baseline():
    """sum_i w_i A_i S_i = c T^2 / (T+ T-) * [1/T sum_i (r_i - T+/T) S_i], c = sqrt(k (G-k)) / G,
    for any vectors S_i: there the gradient of response i's summed log-probability."""
    for seed in range(50):
        rewards, lengths = random_groups(seed)
        A, G = group_advantages(rewards, eps=0), lengths.shape[1]
        weights = token_weights("balanced", A, lengths)
        S = torch.randn(*A.shape, 7, generator=torch.Generator().manual_seed(seed)).double()
        ours = torch.einsum("pg,pg,pgd->pd", weights, A, S)
        T = lengths.sum(dim=1, keepdim=True).double()
        T_right = (lengths * rewards).sum(dim=1, keepdim=True)
        k = rewards.sum(dim=1, keepdim=True)
        c = (k * (G - k)).sqrt() / G
        token_rule = ((rewards - T_right / T)[..., None] * S).sum(dim=1) / T
        scale = c * T**2 / (T_right * (T - T_right))
        torch.testing.assert_close(ours, scale * token_rule, rtol=1e-11, atol=1e-12)


def metrics_of(rule, rewards, lengths):
    A = group_advantages(rewards)
    truncated = torch.zeros(A.shape, dtype=torch.bool)
    return group_metrics(rewards, A, lengths, token_weights(rule, A, lengths), truncated)


def test_net_advantage_is_zero_unless_tokens_are_averaged_and_then_opposes_the_length_gap():
    for seed in range(50):
        rewards, lengths = random_groups(seed, P=1)
        for rule in ("sequence", "balanced"):
            assert abs(metrics_of(rule, rewards, lengths)["net_advantage"]) < 1e-12
        metrics = metrics_of("token", rewards, lengths)
        assert metrics["net_advantage"] * metrics["length_gap"] < 0 or metrics["length_gap"] == 0


def test_weight_spread_is_the_ratio_of_lengths_under_sequence_and_one_elsewhere():
    for seed in range(50):
        rewards, lengths = random_groups(seed)
        ratios = []
        for row, right in zip(lengths.tolist(), rewards.bool().tolist()):
            sides = [[n for n, r in zip(row, right) if r == side] for side in (True, False)]
            ratios.append(max(max(side) / min(side) for side in sides))
        spread = {rule: metrics_of(rule, rewards, lengths)["weight_spread"] for rule in RULES}
        assert spread["sequence"] == pytest.approx(statistics.fmean(ratios))
        assert spread["token"] == spread["balanced"] == 1


def test_group_metrics_say_what_their_names_say():
    rewards = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.float64)
    lengths = torch.tensor([[2, 8, 4, 6], [10, 10, 10, 30]])
    A = group_advantages(rewards)
    cut = torch.tensor([[False] * 4, [False, False, True, True]])
    metrics = group_metrics(rewards, A, lengths, token_weights("token", A, lengths), cut)
    cv = [statistics.pstdev(row) / statistics.fmean(row) for row in lengths.tolist()]
    assert metrics["reward"] == 0.25
    assert metrics["length"] == 10
    assert metrics["length_cv"] == pytest.approx(statistics.fmean(cv))
    assert metrics["zero_spread"] == 0.5
    assert metrics["truncated"] == 0.25
    assert metrics["tokens"] == 80
    assert metrics["net_advantage"] == pytest.approx(-0.1, abs=1e-6)  # 0 in the second group
    assert (metrics["length_pos"], metrics["length_neg"]) == (4, 6)  # of groups with spread
    rewards = torch.zeros_like(rewards)
    metrics = metrics_of("sequence", rewards, lengths)
    assert metrics["zero_spread"] == 1 and metrics["net_advantage"] == 0
    assert metrics["length_gap"] is metrics["weight_spread"] is metrics["length_pos"] is None


# ----------------------------------------------------------------------------------------
# Loss


@pytest.mark.parametrize(
    "ratio, A, loss, clipped",
    [
        (1.0, 2.0, -2.0, False),
        (1.0, -2.0, 2.0, False),
        (1.27, 2.0, -2.54, False),
        (1.5, 2.0, -2.56, True),  # good and already likelier by 28%: no further
        (1.5, -2.0, 3.0, False),  # bad and likelier: push down with all its weight
        (0.81, -2.0, 1.62, False),
        (0.5, -2.0, 1.6, True),  # bad and already rarer by 20%: no further
        (0.5, 2.0, -1.0, False),  # good and rarer: push up
        (1.5, 0.0, 0.0, False),
    ],
)
def test_the_loss_is_clipped_on_the_side_that_the_advantage_asks_for(ratio, A, loss, clipped):
    old = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    value, is_clipped = policy_loss(logprobs, old, torch.tensor([A]).double(), 0.2, 0.28)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert is_clipped.item() == clipped
    # d ratio / d logprob = ratio: the plain policy gradient at ratio 1.
    assert logprobs.grad.item() == pytest.approx(0 if clipped else -A * ratio)


# ----------------------------------------------------------------------------------------
# Update


class Recorder:
    """An optimizer that keeps the gradients of each step, and moves the weights by `move`."""

    def __init__(self, model, move=0.0):
        self.model, self.move, self.gradients = model, move, []

    def step(self):
        self.gradients.append({n: p.grad.clone() for n, p in self.model.named_parameters()})
        with torch.no_grad():
            for i, parameter in enumerate(self.model.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
                parameter += self.move * noise

    def zero_grad(self, set_to_none):
        for parameter in self.model.parameters():
            parameter.grad = None


def update_config(P, **changes):
    """No gradient clipping and no importance correction, unless a test asks for them."""
    settings = {"prompts_per_step": P, "tis_cap": 0.0, "max_grad_norm": 1e30, "temperature": 0.7}
    return Config(**settings | {"micro_batch_tokens": 10_000, "logprob_chunk": 0} | changes)


def gradients(model, responses, A, weights, move=0.0, **changes):
    """The gradient of each optimizer step of update(), and its metrics."""
    recorder = Recorder(model, move)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    metrics = update(model, recorder, responses, A, weights, update_config(len(A), **changes))
    model.load_state_dict(start)
    return recorder.gradients, metrics


def logprobs_padded_left(model, responses, temperature):
    """One list of logprobs per response; padding on the left, attention mask, position ids."""
    width = max(len(r.prompt_ids) + len(r.ids) for r in responses)
    ids = torch.full((len(responses), width), 5)  # any token: it is masked
    mask = torch.zeros_like(ids)
    for i, r in enumerate(responses):
        row = torch.cat([r.prompt_ids, r.ids])
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits / temperature
    logp = logits.log_softmax(dim=-1)
    return [
        [logp[i, width - len(r.ids) + t - 1, r.ids[t]] for t in range(len(r.ids))]
        for i, r in enumerate(responses)
    ]


def reference_gradient(model, responses, A, rule, old=None, tis_cap=0.0, temperature=0.7):
    """The batch loss by its definition, over left-padded logprobs; old: lists of logprobs."""
    P, G = A.shape
    new = logprobs_padded_left(model, responses, temperature)
    old = old or [[x.detach() for x in row] for row in new]
    total = torch.zeros((), dtype=torch.float64)
    for p in range(P):
        losses = []
        for g in range(G):
            i, a = p * G + g, A[p, g].item()
            losses.append([])
            for t, logprob in enumerate(new[i]):
                ratio = (logprob - old[i][t]).exp()
                loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
                if tis_cap:
                    loss = loss * min(tis_cap, (old[i][t] - responses[i].logprobs[t]).exp().item())
                losses[-1].append(loss)
        total = total + loss_by_definition(rule, A[p].tolist(), losses) / P
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), gradients, strict=True))


def assert_same_gradient(ours, theirs, atol=1e-10):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=atol)
    assert max(gradient.abs().max() for gradient in ours.values()) > 1e-3


LENGTHS = [[3, 9, 1, 6], [12, 2, 5, 4]]
REWARDS = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]], dtype=torch.float64)


@pytest.fixture
def batch(tiny_qwen3, make_responses):
    """(model, responses, A, lengths): two groups of four, all with spread."""
    return tiny_qwen3(), make_responses(LENGTHS), group_advantages(REWARDS), torch.tensor(LENGTHS)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "batches",
    [
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[4, 5, 6, 7], [0, 1, 2, 3]],
        [[6], [1, 3], [0, 7, 2], [5, 4]],
        [[7], [6], [5], [4], [3], [2], [1], [0]],
    ],
)
def test_micro_batches_do_not_change_the_gradient(batch, rule, batches, monkeypatch):
    """However the rows are batched and ordered."""
    model, responses, A, lengths = batch
    monkeypatch.setattr(grpo_ba, "micro_batches", lambda rows, budget: batches if rows else [])
    weights = token_weights(rule, A, lengths)
    [ours], metrics = gradients(model, responses, A, weights)
    assert_same_gradient(ours, reference_gradient(model, responses, A, rule))
    assert metrics["skipped"] == 0 and metrics["clip_low"] == metrics["clip_high"] == 0
    norm = sum(g.square().sum() for g in ours.values()).sqrt().item()
    assert metrics["grad_norm"] == pytest.approx(norm)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_responses_and_groups_does_not_change_the_gradient(batch, rule):
    model, responses, A, lengths = batch
    expected = reference_gradient(model, responses, A, rule)
    for seed in range(3):
        rng = random.Random(seed)
        order = [[4 * p + g for g in rng.sample(range(4), 4)] for p in rng.sample(range(2), 2)]
        flat = torch.tensor(order)
        shuffled = [responses[i] for group in order for i in group]
        A_, lengths_ = A.flatten()[flat], lengths.flatten()[flat]
        weights = token_weights(rule, A_, lengths_)
        [ours], _ = gradients(model, shuffled, A_, weights, micro_batch_tokens=[16, 22, 64][seed])
        assert_same_gradient(ours, expected)


@pytest.mark.parametrize("rule", RULES)
def test_padding_left_or_right_gives_the_same_logprobs(batch, rule):
    model, responses, *_ = batch
    with torch.no_grad():
        ours, _ = response_logprobs(model, responses, 0.7, chunk=0)
        theirs = torch.stack([*chain(*logprobs_padded_left(model, responses, 0.7))])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_chunks_of_logits_do_not_change_the_gradient(tiny_qwen3, batch, rule, tied, chunk):
    _, responses, A, lengths = batch
    model, weights = tiny_qwen3(tied=tied), token_weights(rule, A, lengths)
    [ours], metrics = gradients(model, responses, A, weights, logprob_chunk=chunk)
    [plain], plain_metrics = gradients(model, responses, A, weights, logprob_chunk=0)
    assert_same_gradient(ours, plain)
    assert_same_gradient(ours, reference_gradient(model, responses, A, rule))
    assert metrics["entropy"] == pytest.approx(plain_metrics["entropy"], abs=1e-12)


def test_entropy_is_that_of_the_distribution_sampled_from(batch):
    model, responses, *_ = batch
    for chunk in (0, 4):
        _, entropy = response_logprobs(model, responses[:1], 0.7, chunk)
        ids = torch.cat([responses[0].prompt_ids, responses[0].ids])[None]
        p = (model(ids).logits[0, len(responses[0].prompt_ids) - 1 : -1] / 0.7).softmax(dim=-1)
        torch.testing.assert_close(entropy, -(p * p.log()).sum(dim=-1))


@pytest.mark.parametrize("rule", RULES)
def test_minibatches_and_epochs_compare_with_the_policy_that_sampled(tiny_qwen3, batch, rule):
    """The weights move after each optimizer step; old logprobs stay those of the first ones."""
    model, responses, A, lengths = batch
    weights = token_weights(rule, A, lengths)
    settings = {"minibatches": 2, "epochs": 2, "move": 0.02, "micro_batch_tokens": 22}
    ours, metrics = gradients(model, responses, A, weights, **settings)
    old = [[x.detach() for x in row] for row in logprobs_padded_left(model, responses, 0.7)]
    assert len(ours) == 4
    follower = Recorder(model, move=0.02)
    for step, p in enumerate([0, 1, 0, 1]):  # minibatches are whole groups, in order
        some = slice(4 * p, 4 * p + 4)
        expected = reference_gradient(model, responses[some], A[p : p + 1], rule, old[some])
        assert_same_gradient(ours[step], expected)
        for name, parameter in model.named_parameters():
            parameter.grad = expected[name]
        follower.step()
    assert metrics["clip_low"] > 0 and metrics["clip_high"] > 0  # the clip was put to the test
    assert metrics["approx_kl"] > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tis_cap", [0.5, 2.0])
def test_importance_sampling_is_truncated(batch, rule, tis_cap):
    model, responses, A, lengths = batch
    weights = token_weights(rule, A, lengths)
    [ours], metrics = gradients(model, responses, A, weights, tis_cap=tis_cap)
    assert_same_gradient(ours, reference_gradient(model, responses, A, rule, tis_cap=tis_cap))
    old = torch.stack([*chain(*logprobs_padded_left(model, responses, 0.7))]).detach()
    mismatch = old - torch.cat([r.logprobs for r in responses])
    share = (mismatch.exp() > tis_cap).double().mean().item()
    assert metrics["tis_truncated"] == pytest.approx(share) and share > 0
    assert metrics["mismatch_max"] == pytest.approx(mismatch.abs().max().item())


@pytest.mark.parametrize("rule", RULES)
def test_a_group_without_spread_adds_nothing_but_counts_in_the_mean_over_groups(batch, rule):
    model, responses, _, lengths = batch
    A = group_advantages(torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.float64))
    weights = token_weights(rule, A, lengths)
    [ours], _ = gradients(model, responses, A, weights)
    alone = reference_gradient(model, responses[:4], A[:1], rule)
    assert_same_gradient(ours, {name: gradient / 2 for name, gradient in alone.items()})


@pytest.mark.parametrize("rule", RULES)
def test_responses_without_tokens_train_nothing(tiny_qwen3, make_responses, rule):
    lengths = [[3, 0, 4, 6]]
    model, responses, A = tiny_qwen3(), make_responses(lengths), group_advantages(REWARDS[:1])
    weights = token_weights(rule, A, torch.tensor(lengths))
    [ours], _ = gradients(model, responses, A, weights)
    assert_same_gradient(ours, reference_gradient(model, responses, A, rule))


def test_gradients_are_clipped_to_max_grad_norm(batch):
    model, responses, A, lengths = batch
    weights = token_weights("balanced", A, lengths)
    [whole], metrics = gradients(model, responses, A, weights)
    norm = metrics["grad_norm"]
    [clipped], metrics = gradients(model, responses, A, weights, max_grad_norm=norm / 4)
    assert metrics["grad_norm"] == pytest.approx(norm)  # logged before clipping
    assert_same_gradient(clipped, {n: g / 4 for n, g in whole.items()}, atol=1e-5)


def test_without_spread_no_optimizer_step_is_made(batch):
    model, responses, _, lengths = batch
    A = torch.zeros(2, 4, dtype=torch.float64)
    steps, metrics = gradients(model, responses, A, token_weights("token", A, lengths))
    assert steps == [] and metrics["skipped"] == 1 and metrics["grad_norm"] == 0


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_skips_the_step_and_is_counted(
    batch, monkeypatch, fault
):
    model, responses, A, lengths = batch

    def faulty_loss(logprobs, *others):
        loss, is_clipped = policy_loss(logprobs, *others)
        if loss.numel() != sum(LENGTHS[0]):  # the second minibatch only
            return loss, is_clipped
        if fault == "loss":
            return loss * math.nan, is_clipped
        return loss + (0 * logprobs).sqrt(), is_clipped  # adds 0, with the derivative 0 * inf

    monkeypatch.setattr(grpo_ba, "micro_batches", lambda rows, budget: [list(range(len(rows)))])
    monkeypatch.setattr(grpo_ba, "policy_loss", faulty_loss)
    weights = token_weights("balanced", A, lengths)
    steps, metrics = gradients(model, responses, A, weights, minibatches=2)
    assert metrics["skipped"] == 1 and len(steps) == 1
    assert all(gradient.isfinite().all() for gradient in steps[0].values())
    assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [0, 3])
def test_eos_is_trained_also_where_it_is_the_padding_token(tiny_qwen3, rule, chunk):
    """Two responses that differ in one thing: the right one stops. EOS = padding = 0 here, and
    the shorter row is padded with it."""
    model, prompt = tiny_qwen3(dtype=torch.float32), torch.tensor([4, 7, 2])
    right = Response(prompt, torch.tensor([3, 0]), torch.zeros(2), "stop")
    wrong = Response(prompt, torch.tensor([3, 5, 6]), torch.zeros(3), "length")
    ids = torch.cat([prompt, torch.tensor([3])])[None]

    def p_stop():
        with torch.no_grad():
            return model(ids).logits[0, -1].softmax(dim=-1)[0].item()

    before = p_stop()
    A = torch.tensor([[1.0, -1.0]])
    weights = token_weights(rule, A, torch.tensor([[2, 3]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    update(model, optimizer, [right, wrong], A, weights, update_config(1, logprob_chunk=chunk))
    assert p_stop() > before + 0.01
    logprobs, _ = response_logprobs(model, [right, wrong], 0.7, chunk)
    assert len(logprobs) == 5  # EOS counts as a token, padding does not


def test_micro_batches_hold_every_row_once_and_stay_within_the_budget():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randint(1, 50) for _ in range(rng.randint(0, 30))]
        budget = rng.randint(50, 400)
        batches = micro_batches(lengths, budget)
        assert sorted(chain(*batches)) == list(range(len(lengths)))
        assert all(len(b) * max(lengths[i] for i in b) <= budget for b in batches)


# ----------------------------------------------------------------------------------------
# TRL 1.16: its own trainer object computes advantages and loss of the same batch


@pytest.fixture
def make_trainer(tiny_qwen3, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    def make(loss_type, rewards, prompts=("a1b2?", "a3b1c0?")):
        P, G = rewards.shape
        args = trl.GRPOConfig(
            output_dir=str(tmp_path), loss_type=loss_type, num_generations=G, beta=0.0,
            per_device_train_batch_size=P * G, gradient_accumulation_steps=1, temperature=0.7,
            epsilon=0.2, epsilon_high=0.28, max_completion_length=12, report_to="none",
            use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=tiny_qwen3(vocab=48),
            reward_funcs=lambda completions, **_: rewards.flatten().tolist(),
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=grpo_ba.toy_tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = 1  # set by its training loop
        trainer.model.train()
        return trainer

    return make


def trl_batch(responses, A, old=None):
    """Our batch in TRL's form: prompts padded on the left, completions on the right."""
    widths = max(len(r.prompt_ids) for r in responses), max(len(r.ids) for r in responses)
    shape = {"prompt": (len(responses), widths[0]), "completion": (len(responses), widths[1])}
    tensors = {f"{part}_ids": torch.zeros(shape[part], dtype=torch.long) for part in shape}
    tensors |= {f"{part}_mask": torch.zeros(shape[part], dtype=torch.long) for part in shape}
    tensors["old_per_token_logps"] = torch.zeros(shape["completion"])
    for i, r in enumerate(responses):
        tensors["prompt_ids"][i, widths[0] - len(r.prompt_ids) :] = r.prompt_ids
        tensors["prompt_mask"][i, widths[0] - len(r.prompt_ids) :] = 1
        tensors["completion_ids"][i, : len(r.ids)] = r.ids
        tensors["completion_mask"][i, : len(r.ids)] = 1
        if old is not None:
            tensors["old_per_token_logps"][i, : len(r.ids)] = old[i]
    if old is None:
        del tensors["old_per_token_logps"]
    tokens = torch.tensor(sum(len(r.ids) for r in responses))
    return tensors | {"advantages": A.flatten(), "num_items_in_batch": tokens}


def test_trl_computes_the_same_advantages_up_to_the_bessel_correction(make_trainer):
    rewards = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]], dtype=torch.float64)
    trainer = make_trainer("grpo", rewards)
    inputs = [{"prompt": prompt} for prompt in ("a1b2?", "a3b1c0?") for _ in range(4)]
    theirs = trainer._generate_and_score_completions(inputs)["advantages"].view(2, 4)
    std, bessel_std = (rewards.std(dim=1, correction=c, keepdim=True) for c in (0, 1))
    constant = (bessel_std + 1e-4) / (std + 1e-6)  # sqrt(G / (G-1)), but for the two eps
    torch.testing.assert_close(
        group_advantages(rewards), theirs * constant, rtol=1e-5, atol=0, check_dtype=False
    )


@pytest.mark.parametrize(
    "rule, loss_type, lengths",
    [
        ("sequence", "grpo", [[3, 9, 1, 6], [12, 2, 5, 4]]),
        # dapo divides by the tokens of the batch: equal to ours where groups have as many tokens.
        ("token", "dapo", [[3, 9, 1, 6], [5, 5, 8, 1]]),
    ],
)
@pytest.mark.parametrize("on_policy", [True, False])
def test_trl_computes_the_same_loss_and_gradient(
    make_trainer, make_responses, rule, loss_type, lengths, on_policy
):
    A = group_advantages(REWARDS)
    trainer, responses = make_trainer(loss_type, REWARDS), make_responses(lengths, vocab=48)
    model, old = trainer.model, None
    logprobs, _ = response_logprobs(model, responses, 0.7, chunk=0)
    counts = [len(r.ids) for r in responses]
    if not on_policy:  # old logprobs that lie off by up to 0.5, so that a good part is clipped
        noise = torch.rand(len(logprobs), generator=torch.Generator().manual_seed(1)) - 0.5
        old = (logprobs.detach() + noise).split(counts)
    theirs = trainer.compute_loss(model, trl_batch(responses, A, old))
    theirs.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    weights = token_weights(rule, A, torch.tensor(lengths))
    if on_policy:
        [ours], _ = gradients(model, responses, A, weights)
    else:
        A_, w = (x.flatten().repeat_interleave(torch.tensor(counts)) for x in (A, weights))
        loss, is_clipped = policy_loss(logprobs, torch.cat(old), A_, 0.2, 0.28)
        loss = (w * loss).sum() / len(lengths)
        assert loss.item() == pytest.approx(theirs.item(), rel=1e-4)
        assert 0.1 < is_clipped.double().mean() < 0.9
        loss.backward()
        ours = {name: p.grad for name, p in model.named_parameters()}
    size = max(gradient.abs().max().item() for gradient in ours.values())
    assert_same_gradient(ours, expected, atol=1e-5 * size)  # TRL's head works in float32


# ----------------------------------------------------------------------------------------
# Rollout


PROMPTS = [[4, 7, 2], [3], [9, 1, 1, 6, 5], [8, 2]]


def sample(model, prompts=PROMPTS, n=4, rows=256, stops=(0,), seeds=None, **settings):
    seeds = seeds or [sample_seed(0, i, g) for i in range(len(prompts)) for g in range(n)]
    sampling = Sampling(**{"max_tokens": 12, "temperature": 0.7} | settings)
    return TransformersEngine(model, list(stops), rows).generate(prompts, n, sampling, seeds)


def test_sampled_logprobs_equal_a_fresh_forward_pass(tiny_qwen3):
    model = tiny_qwen3()
    responses = sample(model)
    assert [r.prompt_ids.tolist() for r in responses] == [p for p in PROMPTS for _ in range(4)]
    assert len({len(r.ids) for r in responses}) > 3  # rows finish at different times
    for r in responses:
        ids = torch.cat([r.prompt_ids, r.ids])[None]
        logp = (model(ids).logits[0, len(r.prompt_ids) - 1 : -1] / 0.7).log_softmax(dim=-1)
        expected = logp.gather(1, r.ids[:, None])[:, 0].float()
        torch.testing.assert_close(r.logprobs, expected, rtol=0, atol=1e-6)


def test_the_trainer_meets_the_engines_policy_with_ratio_one(tiny_qwen3):
    model = tiny_qwen3(dtype=torch.float32)
    responses = sample(model, n=2)
    A = torch.tensor([[1.0, -1.0]] * 4)
    weights = token_weights("sequence", A, torch.ones(4, 2))
    _, metrics = gradients(model, responses, A, weights, tis_cap=2.0)
    assert metrics["mismatch_max"] < 1e-4
    assert metrics["tis_truncated"] == 0 and metrics["mismatch_kl"] < 1e-8


def test_a_response_does_not_depend_on_its_neighbours_in_the_batch(tiny_qwen3):
    model = tiny_qwen3()
    together = sample(model)
    for rows in (1, 8):
        for one, other in zip(together, sample(model, rows=rows), strict=True):
            assert torch.equal(one.ids, other.ids)
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-6)
    for i, prompt in enumerate(PROMPTS):
        alone = sample(model, [prompt], n=1, seeds=[sample_seed(0, i, 2)])[0]
        assert torch.equal(alone.ids, together[4 * i + 2].ids)


def test_seeds_decide_the_response(tiny_qwen3):
    model = tiny_qwen3()
    texts = [r.ids.tolist() for r in sample(model, [PROMPTS[0]], n=32)]
    assert texts == [r.ids.tolist() for r in sample(model, [PROMPTS[0]], n=32)]
    assert len(set(map(tuple, texts))) > 16
    others = sample(model, [PROMPTS[0]], n=32, seeds=list(range(32)))
    assert texts != [r.ids.tolist() for r in others]


def test_every_seed_step_prompt_and_response_has_its_own_seed():
    keys = list(product(range(3), range(8), range(16), range(8)))
    assert len({sample_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= sample_seed(*key) < 2**31 for key in keys)  # vLLM's and torch's range


def test_the_finish_reason_tells_a_stop_in_the_last_place_from_a_cut(tiny_qwen3):
    seen = Counter()
    for r in sample(tiny_qwen3(), n=64, stops=(0, 3), max_tokens=4):
        stopped = r.ids[-1].item() in (0, 3)
        assert r.finish_reason == ("stop" if stopped else "length")
        assert not torch.isin(r.ids[:-1], torch.tensor([0, 3])).any()
        assert len(r.ids) == 4 or stopped
        seen[len(r.ids) == 4, r.finish_reason] += 1
    assert seen[True, "stop"] > 0 and seen[True, "length"] > 0 and seen[False, "stop"] > 0


def allowed_tokens(p, top_k=-1, top_p=1.0, min_p=0.0):
    """By definition, from probabilities p [V]: min-p, then the k best, then the fewest best whose
    share reaches top_p."""
    order = p.argsort(descending=True).tolist()
    kept = [i for i in order if p[i] >= min_p * p.max()]
    kept = kept[:top_k] if top_k > 0 else kept
    total, nucleus = sum(p[i] for i in kept), []
    while sum(p[i] for i in nucleus) / total < top_p - 1e-12:
        nucleus.append(kept[len(nucleus)])
    return set(nucleus)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.7, "min_p": 0.01}, {}],
)
def test_filters_keep_the_tokens_that_their_definition_keeps(tiny_qwen3, settings):
    model = tiny_qwen3(seed=3)
    p = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(dim=-1).detach()
    allowed = allowed_tokens(p, **settings)
    assert len(allowed) < 11 or not settings
    share = sum(p[i] for i in allowed)
    seen = {}
    for r in sample(model, [PROMPTS[0]], n=3000, max_tokens=1, **settings):
        seen[r.ids.item()] = r.logprobs.item()
    assert seen.keys() <= allowed
    rare = {i for i in allowed if p[i] / share < 0.005}
    assert seen.keys() >= allowed - rare
    for i, logprob in seen.items():  # the logprob of the filtered distribution
        assert math.exp(logprob) == pytest.approx((p[i] / share).item(), rel=1e-4)


def test_samples_follow_the_policy(tiny_qwen3):
    """Chi-square over the 36 pairs of first and second token, 35 degrees of freedom."""
    model, n = tiny_qwen3(vocab=6), 6000
    responses = sample(model, [[4, 2]], n=n, stops=(99,), max_tokens=2, rows=n)
    seen = Counter(tuple(r.ids.tolist()) for r in responses)
    first = (model(torch.tensor([[4, 2]])).logits[0, -1] / 0.7).softmax(dim=-1)
    chi_square = 0
    for i in range(6):
        second = (model(torch.tensor([[4, 2, i]])).logits[0, -1] / 0.7).softmax(dim=-1)
        for j in range(6):
            expected = n * (first[i] * second[j]).item()
            chi_square += (seen[i, j] - expected) ** 2 / expected
    assert sum(seen.values()) == n
    assert 10 < chi_square < 75  # both ends have a probability of about 1e-4


def test_every_stop_token_of_a_checkpoint_ends_a_response(tmp_path):
    """Qwen3 has two, and its tokenizer names one; generation_config.json need not be there."""
    tokenizer = grpo_ba.toy_tokenizer()
    assert grpo_ba.stop_token_ids(str(tmp_path), tokenizer) == [tokenizer.eos_token_id]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert grpo_ba.stop_token_ids(str(tmp_path), tokenizer) == [tokenizer.eos_token_id, 7, 9]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "top_p": 0.8}')
    tokenizer.add_tokens(["<|im_end|>", "<|endoftext|>"])
    added = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert grpo_ba.stop_token_ids(str(tmp_path), tokenizer) == [tokenizer.eos_token_id, 7, *added]
