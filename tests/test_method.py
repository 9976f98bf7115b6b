"""The method: advantages, the three rules, the loss, the update, and the sampling.

References are written here a second time, as plain sums over responses and tokens, in float64.
"""

import copy
import math
import random
import statistics
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

import grpo_ba as ba

RULES = list(ba.AGGREGATIONS)
TOY = ba.PRESETS["toy"]["model"]


def random_groups(binary=True, P=5, shortest=1):
    """20 batches: rewards [P, G], at least one right and one wrong in a group, lengths, advantages."""
    for seed in range(20):
        rng, shape = torch.Generator().manual_seed(seed), (P, 2 + seed % 8)
        rewards = torch.rand(shape, generator=rng, dtype=torch.float64)
        if binary:
            rewards = (rewards < 0.4).double()
            rewards[:, 0], rewards[:, 1] = 1, 0
        lengths = torch.randint(shortest, 60, shape, generator=rng)
        yield rewards, lengths, ba.group_advantages(rewards, eps=0)


def loss_by_definition(rule, A, losses):
    """The docstring's formulas for one group, term by term. losses[i][t], A[i]."""
    G = len(A)
    if rule == "sequence":  # every response weighs the same
        return sum(sum(tokens) / len(tokens) for tokens in losses if len(tokens)) / G
    if rule == "token":  # every token weighs the same
        return sum(chain(*losses)) / sum(map(len, losses))
    total = 0.0  # balanced: a mean over the tokens of each sign, weighed by its share of responses
    for sign in (1, -1):
        members = [i for i in range(G) if A[i] * sign > 0]
        tokens = [loss for i in members for loss in losses[i]]
        total = total + len(members) / G * sum(tokens) / max(1, len(tokens))
    return total


# ---------- Advantages, rules, loss


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_are_the_standardised_rewards_of_the_group(normalize_std):
    for rewards, *_ in chain(random_groups(), random_groups(binary=False)):
        ours = ba.group_advantages(rewards, normalize_std, eps=1e-6).tolist()
        for row, advantages in zip(rewards.tolist(), ours, strict=True):
            mean = statistics.fmean(row)
            scale = statistics.pstdev(row) + 1e-6 if normalize_std else 1
            assert advantages == pytest.approx([(r - mean) / scale for r in row], abs=1e-12)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("rewards", [[0.0] * 7, [1.0] * 7, [0.1] * 7, [math.nan] + [1.0, 0.0] * 3])
def test_without_spread_or_with_an_unknown_reward_a_group_gets_exactly_zero(rewards, normalize_std):
    # The float32 mean of 7 times 0.1 is not 0.1: a tiny spread would blow that residue up.
    advantages = ba.group_advantages(torch.tensor([rewards, [1.0] + [0.0] * 6]), normalize_std)
    assert advantages[0].tolist() == [0.0] * 7
    assert advantages[1].abs().min() > 0.1  # the other group keeps its own


def test_a_reward_that_is_its_groups_mean_has_no_sign():
    """0.1 + 0.2 + ... has a rounding error, which must not make k = 3 of k = 2."""
    for seed in range(200):
        low, high = sorted(random.Random(seed).sample(range(1, 60), 2))
        rewards = torch.tensor([[low, high, (low + high) / 2, (low + high) / 2]]) / 10
        assert ba.group_advantages(rewards).sign().tolist() == [[-1, 1, 0, 0]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("binary, shortest", [(True, 1), (True, 0), (False, 0)])
def test_weights_give_the_loss_of_the_defining_formula(rule, binary, shortest):
    rng = random.Random(0)
    for _, lengths, A in random_groups(binary, shortest=shortest):
        weights = ba.token_weights(rule, A, lengths)
        for a, w, n in zip(A.tolist(), weights.tolist(), lengths.tolist()):
            losses = [[rng.random() for _ in range(length)] for length in n]
            ours = sum(w[i] * sum(losses[i]) for i in range(len(a)))
            assert ours == pytest.approx(loss_by_definition(rule, a, losses), abs=1e-12)


def metrics_of(rule, rewards, lengths, truncated=0.0, surprise=0.0):
    A, lengths = ba.group_advantages(rewards, eps=0), lengths.double()
    truncated, surprise = (torch.as_tensor(x).expand_as(A) for x in (truncated, surprise))
    weights = ba.token_weights(rule, A, lengths)
    return ba.group_metrics(rewards, A, weights, lengths, truncated, surprise)


@pytest.mark.parametrize(
    "rule, weights, net_advantage, weight_spread",
    [
        ("sequence", [1 / 8, 1 / 32, 1 / 16, 1 / 24], 0, 3),
        ("token", [1 / 20, 1 / 20, 1 / 20, 1 / 20], -0.2, 1),
        ("balanced", [1 / 16, 1 / 24, 1 / 24, 1 / 16], 0, 1),
    ],
)
def test_the_worked_example_of_the_readme(rule, weights, net_advantage, weight_spread):
    """Four responses: right with 2 tokens, wrong with 8, wrong with 4, right with 6."""
    rewards, lengths = torch.tensor([[1.0, 0, 0, 1]]).double(), torch.tensor([[2, 8, 4, 6]])
    A = torch.tensor([[1.0, -1, -1, 1]]).double()
    assert ba.token_weights(rule, A, lengths)[0].tolist() == pytest.approx(weights, abs=1e-15)
    metrics = metrics_of(rule, rewards, lengths)
    assert metrics["net_advantage"] == pytest.approx(net_advantage, abs=1e-15)
    assert metrics["weight_spread"] == pytest.approx(weight_spread)


def test_equal_lengths_make_the_rules_equal_and_one_response_per_sign_two_of_them():
    for _, lengths, A in random_groups():
        G, same = A.shape[1], lengths[:, :1].expand_as(lengths)
        for rule in RULES:
            torch.testing.assert_close(ba.token_weights(rule, A, same), 1 / (G * same.double()))
        A = A * (torch.arange(G) < 2)  # G = 2, and groups whose other responses have A = 0
        sequence, _, balanced = (ba.token_weights(rule, A, lengths)[:, :2] for rule in RULES)
        torch.testing.assert_close(balanced, sequence)


def test_sums_of_weights():
    """Under sequence 1/G for each response; under token its share of the tokens; under balanced
    k/G for the positive tokens and (G-k)/G for the negative ones."""
    for rewards, lengths, A in random_groups():
        sequence, token, balanced = (ba.token_weights(rule, A, lengths) * lengths for rule in RULES)
        torch.testing.assert_close(sequence, torch.full_like(A, 1 / A.shape[1]))
        torch.testing.assert_close(token, lengths / lengths.sum(dim=1, keepdim=True).double())
        torch.testing.assert_close((balanced * (A > 0)).sum(dim=1), rewards.mean(dim=1))
        torch.testing.assert_close((balanced * (A < 0)).sum(dim=1), 1 - rewards.mean(dim=1))


@pytest.mark.parametrize(
    "rule, A, lengths, mass",  # mass: weight times length
    [
        ("balanced", [2, 0, -1, -1], [5, 3, 2, 10], [1 / 4, 0, 1 / 12, 5 / 12]),
        ("balanced", [1, 0, 1, 1], [5, 3, 2, 10], [15 / 68, 0, 6 / 68, 30 / 68]),
        ("balanced", [1, -1, 1], [0, 4, 0], [0, 1 / 3, 0]),
        ("sequence", [1, -1, 1], [0, 4, 0], [0, 1 / 3, 0]),
        ("token", [1, -1, 1], [0, 4, 0], [0, 1, 0]),
        *((rule, [1, -1, 0], [0, 0, 0], [0, 0, 0]) for rule in RULES),
    ],
)
def test_signs_are_strict_and_responses_without_tokens_weigh_nothing(rule, A, lengths, mass):
    lengths = torch.tensor([lengths])
    weights = ba.token_weights(rule, torch.tensor([A]).double(), lengths)
    assert (weights * lengths)[0].tolist() == pytest.approx(mass)


def test_balanced_is_the_token_rule_with_the_share_of_right_tokens_as_baseline():
    """sum_i w_i A_i S_i = c T^2 / (T+ T-) * [1/T sum_i (r_i - T+/T) S_i], c = sqrt(k (G-k)) / G,
    for any numbers S_i: there the gradient of response i's summed log-probability."""
    for rewards, lengths, A in random_groups():
        S, G, k = torch.randn_like(A), A.shape[1], rewards.sum(dim=1, keepdim=True)
        T = lengths.sum(dim=1, keepdim=True).double()
        T_right = (lengths * rewards).sum(dim=1, keepdim=True)
        ours = (ba.token_weights("balanced", A, lengths) * A * S).sum(dim=1, keepdim=True)
        token_rule = ((rewards - T_right / T) * S).sum(dim=1, keepdim=True) / T
        scale = (k * (G - k)).sqrt() / G * T**2 / (T_right * (T - T_right))
        torch.testing.assert_close(ours, scale * token_rule, rtol=1e-9, atol=1e-12)


def test_net_advantage_and_weight_spread_are_the_two_biases():
    """net_advantage is 0 unless tokens are averaged, and then opposes the length gap; weight_spread
    is the ratio of lengths within a sign under sequence, and 1 elsewhere."""
    for rewards, lengths, _ in random_groups(P=1):
        sequence, token, balanced = (metrics_of(rule, rewards, lengths) for rule in RULES)
        assert abs(sequence["net_advantage"]) < 1e-12 > abs(balanced["net_advantage"])
        assert token["net_advantage"] * token["length_gap"] < 0 or token["length_gap"] == 0
        sides = [lengths[rewards == side].tolist() for side in (0, 1)]
        ratio = max(max(side) / min(side) for side in sides)
        assert sequence["weight_spread"] == pytest.approx(ratio)
        assert token["weight_spread"] == balanced["weight_spread"] == 1


def test_group_metrics_say_what_their_names_say():
    rewards = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, math.nan]]).double()
    lengths = torch.tensor([[2, 8, 4, 6], [10, 10, 10, 30], [10, 10, 10, 10]])
    known = {
        "reward": 4 / 11, "unscored": 1 / 12, "zero_spread": 2 / 3, "truncated": 1 / 4,
        "tokens": 120, "length": 10, "length_pos": 4, "length_neg": 6, "length_gap": 2,
        "length_cv": (math.sqrt(5) / 5 + math.sqrt(75) / 15) / 3, "net_advantage": -0.2 / 3,
        "weight_spread": 1, "entropy": 12 * 7 / 120,
    }  # fmt: skip
    truncated = torch.arange(12).view(3, 4) >= 9
    assert metrics_of("token", rewards, lengths, truncated, surprise=7.0) == pytest.approx(known)
    without_spread = metrics_of("sequence", rewards[1:], lengths[1:])
    null = {"length_pos", "length_neg", "length_gap", "weight_spread"}
    assert null == {name for name, value in without_spread.items() if value is None}


@pytest.mark.parametrize(
    "ratio, A, loss, clipped",
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.56, True),  # good and already likelier by 28%: no further
        (1.5, -2.0, 3.0, False),  # bad and likelier: push down with all its weight
        (0.5, -2.0, 1.6, True),  # bad and already rarer by 20%: no further
        (0.5, 2.0, -1.0, False),  # good and rarer: push up
        (1.5, 0.0, 0.0, False),
    ],
)
def test_the_loss_is_clipped_on_the_side_that_the_advantage_asks_for(ratio, A, loss, clipped):
    old = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    value, is_clipped = ba.policy_loss(logprobs, old, torch.tensor([A]).double(), 0.2, 0.28)
    value.sum().backward()
    assert (value.item(), is_clipped.item()) == (pytest.approx(loss), clipped)
    # d ratio / d logprob = ratio: the plain policy gradient at ratio 1.
    assert logprobs.grad.item() == pytest.approx(0 if clipped else -A * ratio)


# ---------- Update


LENGTHS = torch.tensor([[3, 9, 1, 6], [12, 0, 5, 4], [2, 8, 7, 7]])  # one response has no token
REWARDS = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0], [1, 1, 1, 1]]).double()  # the last: no spread
A = ba.group_advantages(REWARDS)


def update_config(**changes):
    """No gradient clipping and no importance correction, unless a test asks for them."""
    settings = {"prompts_per_step": 3, "minibatches": 1, "tis_cap": 0.0, "max_grad_norm": 1e30}
    return ba.Config(**settings | {"temperature": 0.7} | changes)


def logprobs_alone(model, response):
    """[|o|], from a forward pass over this response alone, at temperature 0.7."""
    ids, first = torch.cat([response.prompt_ids, response.ids])[None], len(response.prompt_ids) - 1
    logp = (model(ids).logits[0, first:-1] / 0.7).log_softmax(dim=-1)
    return logp.gather(1, response.ids[:, None])[:, 0]


def train_by_definition(model, responses, rule, config, lr):
    """update() in plain words, with SGD: minibatches of whole groups, the loss of each token against
    the policy that sampled, the mean over groups; and its metrics."""
    old, parameters = [logprobs_alone(model, r).detach() for r in responses], [*model.parameters()]
    per_token, norms, size = [], [], len(A) // config.minibatches
    for first in range(0, len(A), size):
        total = 0.0
        for p in range(first, first + size):
            losses = []
            for a, r, before in zip(A[p], responses[4 * p :], old[4 * p :]):
                ratio = (logprobs_alone(model, r) - before).exp()
                trust = (before - r.logprobs).exp()
                loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
                losses.append(loss * trust.clamp(max=config.tis_cap) if config.tis_cap else loss)
                if a:  # a response without advantage is in no metric
                    per_token.append({
                        "approx_kl": ratio - 1 - ratio.log(), "mismatch_kl": trust - 1 - trust.log(),
                        "clip_low": (a < 0) & (ratio < 0.8), "clip_high": (a > 0) & (ratio > 1.28),
                        "tis_truncated": trust > (config.tis_cap or math.inf),
                        "mismatch_max": trust.log().abs(),
                    })  # fmt: skip
            total = total + loss_by_definition(rule, A[p].tolist(), losses) / size
        if A[first : first + size].any():  # else no step is made
            gradient = torch.autograd.grad(total, parameters)
            norms.append(torch.cat([g.flatten() for g in gradient]).norm().item())
            for parameter, g in zip(parameters, gradient):
                parameter.data -= lr * g * min(1, config.max_grad_norm / (norms[-1] + 1e-6))
    tokens = {name: torch.cat([row[name] for row in per_token]).double() for name in per_token[0]}
    return {name: values.mean().item() for name, values in tokens.items()} | {
        "mismatch_max": tokens["mismatch_max"].max().item(),
        "grad_norm": statistics.fmean(norms),
        "skipped": config.minibatches - len(norms),
    }


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


CASES = {
    "one_pass": {},
    "a_row_at_a_time": {"micro_batch_tokens": 1},
    "micro_batches": {"micro_batch_tokens": 40},
    "minibatches": {"minibatches": 3, "micro_batch_tokens": 22},
    "tis_cap": {"tis_cap": 0.5, "micro_batch_tokens": 40},
    "max_grad_norm": {"max_grad_norm": 0.1},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tied", [True, False])
def test_update_trains_as_defined(tiny_qwen3, make_responses, monkeypatch, rule, case, tied):
    """For any micro-batches, padding, chunks of logits and order of responses within a group. A
    group without spread adds nothing, but counts in the mean."""
    config, lr, start = update_config(**CASES[case]), 0.1, tiny_qwen3(tied=tied)
    ours, theirs, responses = copy.deepcopy(start), copy.deepcopy(start), make_responses(LENGTHS)
    expected = train_by_definition(theirs, responses, rule, config, lr)

    monkeypatch.setattr(ba, "response_logprobs", partial(ba.response_logprobs, chunk=5))
    order = torch.tensor([[2, 0, 3, 1], [4, 7, 6, 5], [11, 10, 9, 8]])
    a, optimizer = A.flatten()[order], torch.optim.SGD(ours.parameters(), lr)
    weights = ba.token_weights(rule, a, LENGTHS.flatten()[order])
    shuffled = [responses[i] for i in order.flatten()]
    metrics = ba.update(ours, optimizer, shuffled, a, weights, config)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=1e-9)
    assert (flat(ours) - flat(start)).abs().max() > 1e-3
    assert (metrics.pop("padding") == 0) == (case == "a_row_at_a_time")
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-12)
    if case == "minibatches":  # the second meets moved weights, the third has no spread
        assert metrics["clip_low"] > 0 and metrics["clip_high"] > 0 and metrics["skipped"] == 1


def test_without_spread_no_optimizer_step_is_made(tiny_qwen3, make_responses):
    """Weight decay and the momentum of an earlier step would move the weights."""
    model, responses = tiny_qwen3(), make_responses(LENGTHS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    weights, start = ba.token_weights("token", A, LENGTHS), flat(model)
    assert ba.update(model, optimizer, responses, A, weights, update_config())["skipped"] == 0
    moved = flat(model)
    metrics = ba.update(model, optimizer, responses, 0 * A, weights, update_config())
    assert torch.equal(flat(model), moved) and not torch.equal(start, moved)
    assert (metrics["skipped"], metrics["grad_norm"], metrics["mismatch_max"]) == (1, 0, None)


@pytest.mark.parametrize("fault", [math.nan, -50.0])
def test_a_norm_that_is_not_finite_skips_the_step_and_is_counted(tiny_qwen3, make_responses, fault):
    """A logprob of the engine makes the second minibatch's loss NaN, or its squared norm infinite."""
    model, responses = tiny_qwen3(dtype=torch.float32), make_responses(LENGTHS)
    responses[4].logprobs[0] = fault
    weights, optimizer = ba.token_weights("token", A, LENGTHS), torch.optim.SGD(model.parameters())
    config, start = update_config(minibatches=3, tis_cap=1e30), flat(model)
    metrics = ba.update(model, optimizer, responses, A, weights, config)
    assert metrics["skipped"] == 2  # the third has no spread
    assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    assert flat(model).isfinite().all() and not torch.equal(flat(model), start)


@pytest.mark.parametrize("rule", RULES)
def test_eos_is_trained_also_where_it_is_the_padding_token(tiny_qwen3, rule):
    """The right response stops, the wrong one does not; EOS = 0 also pads the shorter row."""
    model, prompt, a = tiny_qwen3(), torch.tensor([4, 7, 2]), torch.tensor([[1.0, -1.0]])
    right = ba.Response(prompt, torch.tensor([3, 0]), torch.zeros(2))
    wrong = ba.Response(prompt, torch.tensor([3, 5, 6]), torch.zeros(3))
    before, lengths = logprobs_alone(model, right), torch.tensor([[2, 3]])
    weights, config = ba.token_weights(rule, a, lengths), update_config(prompts_per_step=1)
    ba.update(model, torch.optim.SGD(model.parameters(), 0.05), [right, wrong], a, weights, config)
    assert logprobs_alone(model, right)[1] > before[1] + 0.01
    assert len(ba.response_logprobs(model, [right, wrong], 0.7)) == 5  # EOS counts, padding not


@pytest.mark.parametrize("rows, budget", [(256, 32_768), (64, 32_768), (32, 32_768), (32, 16_384)])
def test_micro_batches_hold_each_row_once_within_the_budget_with_little_padding(rows, budget):
    """A minibatch of the presets is 256 rows (32 groups of 8), 32 to a rank on 8 GPUs; lengths are
    lognormal, as reasoning models' are, and cut at a limit."""
    rng, computed, real = random.Random(0), 0, 0
    for _ in range(20):
        lengths = [min(9216, 150 + int(rng.lognormvariate(7.3, 0.7))) for _ in range(rows)]
        some = rng.sample(range(rows), rows - 1)
        batches = ba.micro_batches(some, lengths, budget)
        assert sorted(chain(*batches)) == sorted(some)
        sizes = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
        assert max(sizes) <= budget
        computed, real = computed + sum(sizes), real + sum(lengths[i] for i in some)
    assert 1 - real / computed < 0.10


# ---------- TRL 1.16: its own trainer object computes advantages and loss of the same batch


@pytest.mark.parametrize("rule, loss_type", [("sequence", "grpo"), ("token", "dapo")])
def test_trl_computes_the_same_advantages_and_gradient(
    tiny_qwen3, make_responses, tmp_path, rule, loss_type
):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    # dapo divides by the tokens of the batch: equal to ours where groups have as many tokens.
    rewards, lengths = REWARDS[:2], torch.tensor([[3, 9, 1, 6], [5, 5, 8, 1]])
    prompts = [{"prompt": prompt} for prompt in ("a1b2?", "a3b1c0?") for _ in range(4)]
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), loss_type=loss_type, num_generations=4, beta=0.0,
        per_device_train_batch_size=8, gradient_accumulation_steps=1, temperature=0.7,
        epsilon=0.2, epsilon_high=0.28, max_completion_length=12, report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=tiny_qwen3(vocab=31), args=args, train_dataset=datasets.Dataset.from_list(prompts),
        reward_funcs=lambda completions, **_: rewards.flatten().tolist(),
        processing_class=AutoTokenizer.from_pretrained(TOY),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # set by its training loop
    model = trainer.model.train()
    theirs = trainer._generate_and_score_completions(prompts)["advantages"].view(2, 4)
    std, bessel_std = (rewards.std(dim=1, correction=c, keepdim=True) for c in (0, 1))
    a = theirs * (bessel_std + 1e-4) / (std + 1e-6)  # sqrt(G / (G-1)), but for the two eps
    torch.testing.assert_close(a, A[:2], rtol=1e-5, atol=0, check_dtype=False)

    responses = make_responses(lengths, vocab=31)
    logprobs = ba.response_logprobs(model, responses, 0.7)
    # Old logprobs that lie off by up to 0.5, so that a good part is clipped.
    old = logprobs.detach() + torch.linspace(-0.5, 0.5, len(logprobs))
    prompts, ids = zip(*((r.prompt_ids, r.ids) for r in responses))
    pad = partial(pad_sequence, batch_first=True)
    trainer.compute_loss(model, {
        "prompt_ids": pad(prompts, padding_side="left"), "completion_ids": pad(ids),
        "prompt_mask": pad([torch.ones_like(p) for p in prompts], padding_side="left"),
        "completion_mask": pad([torch.ones_like(x) for x in ids]), "advantages": A[:2].flatten(),
        "old_per_token_logps": pad(old.split(lengths.flatten().tolist())),
        "num_items_in_batch": lengths.sum(),
    }).backward()  # fmt: skip
    expected = [p.grad.clone() for p in model.parameters()]
    weights = ba.token_weights(rule, A[:2], lengths)
    a, w = (x.flatten().repeat_interleave(lengths.flatten()) for x in (A[:2], weights))
    loss, is_clipped = ba.policy_loss(logprobs, old, a, 0.2, 0.28)
    assert 0.1 < is_clipped.double().mean() < 0.9
    ours = torch.autograd.grad((w * loss).sum() / 2, [*model.parameters()])
    for gradient, other in zip(ours, expected, strict=True):  # TRL's head works in float32
        assert (gradient - other).norm() <= 1e-5 * other.norm() + 1e-6


# ---------- Rollout and score


PROMPTS = [[4, 7, 2], [3], [9, 1, 1, 6, 5], [8, 2]]


def sample(model, prompts=PROMPTS, n=4, stops=(0,), seeds=None, **settings):
    seeds = seeds or [ba.sample_seed(0, i, g) for i in range(len(prompts)) for g in range(n)]
    settings = {"max_tokens": 12, "temperature": 0.7} | settings
    return ba.TransformersEngine(model, list(stops)).generate(prompts, n, seeds, **settings)


def test_sampled_logprobs_equal_a_fresh_forward_pass_and_the_trainers(tiny_qwen3):
    """So the trainer meets the engine's policy with ratio one."""
    model = tiny_qwen3()
    responses = sample(model)
    assert [r.prompt_ids.tolist() for r in responses] == [p for p in PROMPTS for _ in range(4)]
    assert len({len(r.ids) for r in responses}) > 2  # rows finish at different times
    fresh = torch.cat([logprobs_alone(model, r) for r in responses])
    sampled = torch.cat([r.logprobs for r in responses]).double()
    torch.testing.assert_close(sampled, fresh, rtol=0, atol=1e-6)
    torch.testing.assert_close(ba.response_logprobs(model, responses, 0.7), fresh)


def test_a_response_depends_on_its_seed_and_not_on_its_neighbours_in_the_batch(tiny_qwen3):
    model, config = tiny_qwen3(), ba.Config(max_response_tokens=12, temperature=0.7)
    together, problems = sample(model), [{"prompt_ids": prompt} for prompt in PROMPTS]
    for rows in (1, 8, 256):  # at a time
        responses = ba.rollout(ba.TransformersEngine(model, [0], rows), problems, 4, config)
        for one, other in zip(together, responses, strict=True):
            assert torch.equal(one.ids, other.ids)
    for i, prompt in enumerate(PROMPTS):
        [alone] = sample(model, [prompt], n=1, seeds=[ba.sample_seed(0, i, 2)])
        assert torch.equal(alone.ids, together[4 * i + 2].ids)
    assert len({tuple(r.ids.tolist()) for r in sample(model, [PROMPTS[0]], n=32)}) > 16
    assert len({tuple(r.ids.tolist()) for r in sample(model, n=2, seeds=[7] * 8)[:2]}) == 1


def test_a_response_ends_at_its_first_stop_token_or_is_cut(tiny_qwen3):
    seen = set()
    for r in sample(tiny_qwen3(), n=64, stops=(0, 3), max_tokens=4):
        assert not torch.isin(r.ids[:-1], torch.tensor([0, 3])).any()
        seen.add((len(r.ids) == 4, r.ids[-1].item() in (0, 3)))
    assert seen == {(True, True), (True, False), (False, True)}


def test_every_stop_token_of_a_tokenizer_ends_a_response():
    """Qwen3 has two, and its tokenizer names only one."""
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    assert ba.stop_token_ids(tokenizer) == [tokenizer.eos_token_id]
    tokenizer.add_tokens(["<|im_end|>", "<|endoftext|>", "<|im_start|>"])
    added = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert ba.stop_token_ids(tokenizer) == [tokenizer.eos_token_id, *added]


@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (-1, 0.8), (4, 0.7)])
def test_filters_keep_the_tokens_that_their_definition_keeps(tiny_qwen3, top_k, top_p):
    """The k best, then the fewest best whose share reaches top_p, at their probability's share."""
    model = tiny_qwen3(seed=3)
    p = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(dim=-1).tolist()
    best = sorted(range(11), key=lambda i: -p[i])[: top_k if top_k > 0 else 11]
    total, allowed = sum(p[i] for i in best), []
    while sum(p[i] for i in allowed) / total < top_p - 1e-12:
        allowed.append(best[len(allowed)])
    share = sum(p[i] for i in allowed)
    responses = sample(model, [PROMPTS[0]], n=3000, max_tokens=1, top_k=top_k, top_p=top_p)
    seen = {r.ids.item(): r.logprobs.item() for r in responses}
    assert {*allowed} >= seen.keys() >= {i for i in allowed if p[i] / share > 0.005}
    for i, logprob in seen.items():
        assert math.exp(logprob) == pytest.approx(p[i] / share, rel=1e-4)


def test_samples_follow_the_policy(tiny_qwen3):
    """Chi-square over the 36 pairs of first and second token, 35 degrees of freedom."""
    model, n = tiny_qwen3(vocab=6), 6000
    responses = sample(model, [[4, 2]], n=n, stops=(99,), max_tokens=2)
    pairs = torch.stack([r.ids for r in responses])
    counts = torch.bincount(pairs[:, 0] * 6 + pairs[:, 1], minlength=36).view(6, 6)
    logits = model(torch.tensor([[4, 2, i] for i in range(6)])).logits[:, 1:]
    p = (logits / 0.7).softmax(dim=-1)  # [6, 2, 6]
    expected = n * p[0, 0, :, None] * p[:, 1]
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert 10 < chi_square < 75  # both ends have a probability of about 1e-4


def test_the_scorer_reads_whether_the_prompt_opened_a_think_block(ascii_tokenizer):
    """And where the scorer itself fails, the reward is unknown: never where the answer does."""
    tokenizer, reasons = ascii_tokenizer(""), ["correct", "sandbox_error", "timeout", "correct"]

    def score(texts, problems):
        assert problems == ["p", "p", "q", "q"]
        return [SimpleNamespace(reward=float(r == "correct"), reason=r) for r in reasons]

    prompts = ["1?\n<think>\n", "1?\n<think>", "2?<think>\n\n</think>\n\n", "What is <think>?"]
    ids = torch.tensor(tokenizer("so 5<eos>").input_ids)
    prompts = map(torch.tensor, tokenizer(prompts).input_ids)
    responses = [ba.Response(prompt, ids, None) for prompt in prompts]
    rewards, texts = ba.score(SimpleNamespace(score=score), tokenizer, responses, ["p", "q"])
    assert texts == ["<think>so 5", "<think>so 5", "so 5", "so 5"]
    assert rewards[0, 1].isnan() and rewards.nan_to_num(9).tolist() == [[1, 9], [0, 1]]
