"""Real vLLM in the trainer's process (its CPU build will do); skipped where it is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import test_ranks
import torch
from test_ranks import finish, largest_difference, make_folder, metrics, start, weights

import grpo_ba
from grpo_ba import response_logprobs

EXACT = 1e-4  # measured in float32: 1e-5 for the toy, 4e-5 for SmolLM2-135M
PROMPTS = [[2, 15, 3, 17], [2, 14, 3], [2, 16, 3, 17, 4, 18], [2, 15, 24]]


@pytest.fixture(scope="module")
def engine(toy):
    """One engine for all tests in this process; each test pushes the weights it wants."""
    return grpo_ba.VLLMEngine(str(toy), [1], max_model_len=512)


@pytest.fixture
def model(toy, engine):
    model = grpo_ba.load_policy(str(toy), "cpu")
    engine.load_weights(model)
    return model


def sample(engine, n=8, temperature=1.0):
    seeds = list(range(100, 100 + n * len(PROMPTS)))
    return engine.generate(PROMPTS, n, seeds, max_tokens=24, temperature=temperature)


def difference(model, responses, temperature=1.0):
    """The largest between the engine's logprobs of the samples and the trainer's."""
    with torch.no_grad():
        ours = response_logprobs(model, responses, temperature)
    return (ours - torch.cat([r.logprobs for r in responses])).abs().max().item()


def train_one_step(model, responses, lr=1e-2):
    config = grpo_ba.Config(lr=lr, prompts_per_step=len(PROMPTS), minibatches=1)
    rewards = torch.tensor([float(r.ids.sum() % 3 == 0) for r in responses]).view(len(PROMPTS), -1)
    lengths = torch.tensor([len(r.ids) for r in responses]).view_as(rewards)
    advantages = grpo_ba.group_advantages(rewards)
    token_weights = grpo_ba.token_weights("balanced", advantages, lengths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return grpo_ba.update(model, optimizer, responses, advantages, token_weights, config)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_the_trainers(engine, model, temperature):
    responses = sample(engine, temperature=temperature)
    assert difference(model, responses, temperature) < EXACT
    assert difference(model, responses, 1.7 - temperature) > 0.1  # the other one


def test_after_a_step_and_a_push_they_agree_again_and_without_the_push_they_do_not(engine, model):
    train_one_step(model, sample(engine))
    assert difference(model, sample(engine)) > 0.1
    engine.load_weights(model)
    assert difference(model, sample(engine)) < EXACT


def test_a_push_reaches_every_parameter(engine, model):
    """One at a time: a weight that is not taken over shows as a difference."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
        assert difference(model, sample(engine, n=2)) > 10 * EXACT, name
        engine.load_weights(model)
        assert difference(model, sample(engine, n=2)) < EXACT, name


def test_the_prefix_cache_forgets_old_weights(engine, model):
    """vLLM caches whole blocks of a prompt, 128 tokens each on a CPU."""
    prompt, sampling = [2 + i % 28 for i in range(400)], {"max_tokens": 8, "temperature": 1.0}
    engine.generate([prompt], 2, [0, 1], **sampling)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    engine.load_weights(model)
    assert difference(model, engine.generate([prompt], 2, [0, 1], **sampling)) < EXACT


def test_samples_of_a_prompt_differ_and_depend_on_their_seed_alone(engine, model):
    responses = sample(engine)
    for p in range(len(PROMPTS)):
        group = responses[8 * p : 8 * p + 8]
        assert len({tuple(r.ids.tolist()) for r in group}) > 4
        assert all(r.prompt_ids.tolist() == PROMPTS[p] for r in group)
    seeds = [100 + 2 * 8 + 3]
    [alone] = engine.generate([PROMPTS[2]], 1, seeds, max_tokens=24, temperature=1.0)
    assert alone.ids.tolist() == responses[2 * 8 + 3].ids.tolist()


@pytest.mark.parametrize("stop_ids", [[1], [9, 13]])
def test_responses_end_at_a_stop_token_which_is_kept_or_are_cut(engine, model, stop_ids):
    """Qwen3 has two, and vLLM itself knows only the checkpoint's."""
    usual, engine.stop_ids = engine.stop_ids, stop_ids
    try:
        responses = sample(engine, n=32)
    finally:
        engine.stop_ids = usual
    for r in responses:
        stops = [token in {*stop_ids, 1} for token in r.ids.tolist()]
        assert len(r.logprobs) == len(r.ids) and not any(stops[:-1])
        assert stops[-1] or len(r.ids) == 24
    ends = {r.ids[-1].item() for r in responses}
    assert ends >= set(stop_ids) and ends - {*stop_ids, 1}


def test_it_sleeps_and_wakes_with_the_weights_of_the_day(engine, model):
    before = [r.ids.tolist() for r in sample(engine)]
    for _ in range(2):
        engine.sleep()
        assert engine.llm.llm_engine.is_sleeping()
        engine.load_weights(model)
        assert not engine.llm.llm_engine.is_sleeping()
        assert [r.ids.tolist() for r in sample(engine)] == before


def test_perturbed_engine_weights_raise_the_mismatch_metrics(engine, model, toy):
    right = train_one_step(model, sample(engine), lr=0.0)
    assert right["mismatch_max"] < EXACT and abs(right["mismatch_kl"]) < 1e-6
    assert right["tis_truncated"] == 0
    perturbed = grpo_ba.load_policy(str(toy), "cpu")
    with torch.no_grad():
        for parameter in perturbed.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
    engine.load_weights(perturbed)
    wrong = train_one_step(model, sample(engine), lr=0.0)
    assert wrong["mismatch_max"] > 0.5 and wrong["mismatch_kl"] > 0.01
    assert wrong["tis_truncated"] > 0


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains in processes of their own, a rank each; returns metrics and parameters."""
    folder = make_folder(tmp_path_factory.mktemp("vllm"))

    def run(ranks, name, flags=""):
        process = start(folder, ranks, test_ranks.__file__, f"--engine vllm --name {name} {flags}")
        finish(folder, process, timeout=400)
        assert len(metrics(folder, name)) == 3
        for line in metrics(
            folder, name
        ):  # in step 2 and 3 only if the weights of step 1 and 2 were pushed
            assert line["grad_norm"] > 0 and line["mismatch_max"] < EXACT
        return weights(folder, name)

    return run


def test_two_ranks_each_with_its_engine_train_as_one_does(train):
    assert largest_difference(train(1, "one"), train(2, "two")) < 1e-5


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The folder in SMOLLM2, or one made by the tool beside the checkout."""
    if os.environ.get("SMOLLM2"):
        return os.environ["SMOLLM2"]
    tool = Path(__file__).resolve().parents[2] / "shared/tools/make_smollm2.py"
    if not tool.exists():
        pytest.skip("no SmolLM2-135M: set SMOLLM2 to the folder of its checkpoint")
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, tool, folder]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"SmolLM2-135M could not be made: {made.stderr[-300:]}")
    return str(folder)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_three_steps_of_smollm2(smollm2, train, tmp_path, temperature):
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = f"--lr 1e-5 --prompts_per_step 2 --max_response_tokens 16 --temperature {temperature}"
    data = f"--train_data {tmp_path}/data.jsonl --eval_data="
    train(1, f"smol-{temperature}", f"--model {smollm2} {data} {sizes}")
