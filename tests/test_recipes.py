"""README's recipes for TRL and verl, run as they stand there: the balanced rule inside their loss."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

import grpo_ba as ba

README = Path(__file__).resolve().parents[1] / "README.md"


def recipe(name, what):
    """The names that README's code block with this class or function defines."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    [block] = [block for block in blocks if re.search(rf"(?m)^(class|def) {name}\b", block)]
    names = {}
    exec(compile(block, f"README: {what}", "exec"), names)  # noqa: S102 - our own README
    return names[name]


def test_trl_trains_with_the_balanced_rule(tiny_qwen3, tmp_path):
    """One real optimizer step of TRL's trainer, whose sequences are shuffled into two micro-batches:
    the gradient is the balanced rule's over the groups that were sampled."""
    trl = pytest.importorskip("trl")
    seen = {}

    class Trainer(recipe("BATrainer", "TRL")):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            seen["batch"] = dict(batch)
            seen["start"] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            return batch

    class KeepGradient(TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **__):
            seen["gradient"] = {name: p.grad.clone() for name, p in model.named_parameters()}

    def reward(completion_ids, **_):
        seen["rewards"] = [float(sum(ids) % 2) for ids in completion_ids]
        return seen["rewards"]

    P, G, prompts = 3, 4, ["a1b2?", "a3b1c0?", "a0b4c2d1?"]
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), loss_type="dr_grpo", num_generations=G, beta=0.0, seed=3,
        per_device_train_batch_size=P * G // 2, gradient_accumulation_steps=2, temperature=0.7,
        max_completion_length=40, max_steps=1, max_grad_norm=0.0, report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        model=tiny_qwen3(vocab=31), reward_funcs=reward, args=args, callbacks=[KeepGradient()],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(ba.PRESETS["toy"]["model"]),
    )  # fmt: skip
    trainer.train()

    batch = seen["batch"]
    keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    responses = [
        ba.Response(prompt_ids[prompt_mask.bool()], ids[mask.bool()], None)
        for prompt_ids, prompt_mask, ids, mask in zip(*(batch[key] for key in keys))
    ]
    lengths = torch.tensor([len(r.ids) for r in responses]).view(P, G)
    rewards = torch.tensor(seen["rewards"], dtype=torch.float64).view(P, G)
    A = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)  # TRL's
    unlike = lengths.amax(dim=1) > lengths.amin(dim=1)
    assert ((A.amax(dim=1) > 0) & unlike).sum() >= 2  # else the rules would agree

    model = tiny_qwen3(vocab=31)
    model.load_state_dict(seen["start"], strict=False)
    logprobs = ba.response_logprobs(model, responses, 0.7).split(lengths.flatten().tolist())
    loss = 0.0
    for p in range(P):  # by the formula, with a ratio of 1
        for sign in (1, -1):
            members = [g for g in range(G) if A[p, g] * sign > 0]
            tokens = sum(lengths[p, g].item() for g in members)
            for g in members:
                own = logprobs[p * G + g].sum()
                loss = loss - len(members) / G * A[p, g] * own / tokens / P
    loss.backward()
    size = max(p.grad.abs().max() for p in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            seen["gradient"][name], parameter.grad, rtol=0, atol=1e-5 * size.item()
        )


def test_trls_ranks_share_a_group(monkeypatch):
    """Two ranks of six rows, groups of four: each gets its rows' share of the whole groups' scale."""
    trl, trainer_class = pytest.importorskip("trl"), recipe("BATrainer", "TRL")
    A = torch.tensor([[1.0, -1, 1, -1], [-1, -1, -1, 3], [0, 0, 0, 0]])
    lengths = torch.tensor([[2, 8, 4, 6], [1, 3, 5, 7], [4, 4, 4, 4]])
    mask = (torch.arange(8) < lengths.view(-1, 1)).int()

    def gather(mine):
        return (A if mine.is_floating_point() else lengths).flatten()

    def run(rank, rows):
        trainer = object.__new__(trainer_class)
        trainer.model = SimpleNamespace(training=True)
        trainer.num_generations, trainer.max_completion_length = 4, 8
        trainer.accelerator = SimpleNamespace(gather=gather, process_index=rank)
        batch = {"advantages": A.flatten()[rows].clone(), "completion_mask": mask[rows]}
        monkeypatch.setattr(
            trl.GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: batch
        )
        return trainer._generate_and_score_completions([])["advantages"]

    expected = (A * ba.token_weights("balanced", A, lengths) * 4 * 8).flatten()
    torch.testing.assert_close(run(0, slice(0, 6)), expected[:6])
    torch.testing.assert_close(run(1, slice(6, 12)), expected[6:])


def test_verl_trains_with_the_balanced_rule():
    """Its advantages, its clipped loss and its aggregation, minibatch by minibatch, against ours."""
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.trainer.config import AlgoConfig
    from verl.workers.config import ActorConfig

    recipe("balanced", "verl")
    P, G, T = 4, 6, 9
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, T + 1, (P, G), generator=rng)
    lengths[0, 0] = T  # a row without padding
    rewards = (torch.rand(P, G, generator=rng) < 0.4).double()
    rewards[:, 0], rewards[:, 1] = 1, 0
    mask = (torch.arange(T) < lengths.view(-1, 1)).double()  # [B, T]
    order = torch.randperm(P * G, generator=rng)  # groups lie mixed, as after balancing
    index = torch.arange(P).repeat_interleave(G)[order].numpy().astype(str).astype(object)
    token_rewards = torch.zeros(P * G, T, dtype=torch.float64)
    token_rewards[torch.arange(P * G), lengths.flatten() - 1] = rewards.flatten()
    estimate = core.get_adv_estimator_fn("ba")
    theirs, returns = estimate(
        token_level_rewards=token_rewards[order], response_mask=mask[order], index=index,
        config=AlgoConfig(),
    )  # fmt: skip
    assert torch.equal(theirs, returns)

    logprobs = -torch.rand(P * G, T, generator=rng, dtype=torch.float64)
    old = logprobs + 0.6 * torch.rand(P * G, T, generator=rng, dtype=torch.float64) - 0.3
    config = ActorConfig(
        strategy="fsdp", rollout_n=G, use_dynamic_bsz=True, clip_ratio_low=0.2, clip_ratio_high=0.28
    )
    config.global_batch_info.update(dp_size=1, global_batch_size=P * G)
    loss, total = core.get_policy_loss_fn("vanilla"), 0.0
    for rows in torch.arange(P * G).split(5):  # its micro-batches
        part, _ = loss(
            old[order][rows], logprobs[order][rows], theirs[rows], mask[order][rows],
            loss_agg_mode="seq-mean-token-sum", config=config,
        )  # fmt: skip
        total = total + part

    bessel = ((G - 1) / G) ** 0.5  # verl's standard deviation has ddof 1
    A = ba.group_advantages(rewards) * bessel
    per_row = A.view(-1, 1).expand(-1, T)
    ours, clipped = ba.policy_loss(logprobs, old, per_row, 0.2, 0.28)
    weights = ba.token_weights("balanced", A, lengths).view(-1, 1)
    assert total.item() == pytest.approx((weights * ours * mask).sum().item() / P, rel=1e-4)
    assert 0.05 < (clipped * mask).sum() / mask.sum() < 0.95
