"""Real vLLM in the trainer's process (its CPU build will do); skipped where it is not installed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from test_ranks import make_folder, metrics, processes, start, weights

import grpo_ba
from grpo_ba import Sampling, response_logprobs

EXACT = 1e-4  # measured in float32: 1e-5 for the tiny model, 4e-5 for SmolLM2-135M
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17], [5, 6, 20]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def engine(folder):
    """One engine for all tests in this process; each test pushes the weights it wants."""
    path = str(folder / "model")
    stop_ids = grpo_ba.stop_token_ids(path, grpo_ba.load_tokenizer(path))
    return grpo_ba.VLLMEngine(path, stop_ids, max_model_len=512, dtype="float32")


@pytest.fixture
def model(folder, engine):
    model = grpo_ba.load_policy(str(folder / "model"), "cpu")
    engine.load_weights(model)
    return model


def sample(engine, n=8, temperature=1.0, max_tokens=24):
    sampling = Sampling(max_tokens, temperature)
    return engine.generate(PROMPTS, n, sampling, list(range(100, 100 + n * len(PROMPTS))))


def largest_difference(model, responses, temperature=1.0):
    """Between the engine's logprobs of the sampled tokens and the trainer's."""
    with torch.no_grad():
        ours, _ = response_logprobs(model, responses, temperature, chunk=0)
    return (ours - torch.cat([r.logprobs for r in responses])).abs().max().item()


def train_one_step(model, responses, config=None):
    config = config or grpo_ba.Config(lr=1e-2, prompts_per_step=len(PROMPTS), group_size=8)
    rewards = torch.tensor([float(r.ids.sum() % 3 == 0) for r in responses]).view(len(PROMPTS), -1)
    lengths = torch.tensor([len(r.ids) for r in responses]).view_as(rewards)
    advantages = grpo_ba.group_advantages(rewards)
    token_weights = grpo_ba.token_weights("balanced", advantages, lengths)
    optimizer = grpo_ba.make_optimizer(model, config)
    return grpo_ba.update(model, optimizer, responses, advantages, token_weights, config)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_the_trainers(engine, model, temperature):
    responses = sample(engine, temperature=temperature)
    assert largest_difference(model, responses, temperature) < EXACT
    other_temperature = 1.7 - temperature  # the agreement is not one of two flat distributions
    assert largest_difference(model, responses, other_temperature) > 0.1


def test_after_a_step_and_a_push_they_agree_again_and_without_the_push_they_do_not(engine, model):
    train_one_step(model, sample(engine))
    assert largest_difference(model, sample(engine)) > 0.1
    engine.load_weights(model)
    assert largest_difference(model, sample(engine)) < EXACT


def test_a_push_reaches_every_parameter(engine, model):
    """One at a time: a weight that is not taken over shows as a difference."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
        assert largest_difference(model, sample(engine, n=2)) > 10 * EXACT, name
        engine.load_weights(model)
        assert largest_difference(model, sample(engine, n=2)) < EXACT, name


def test_the_prefix_cache_forgets_old_weights(engine, model):
    """vLLM caches whole blocks of a prompt, 128 tokens each on a CPU."""
    prompt, sampling = [5 + i % 40 for i in range(400)], Sampling(max_tokens=8)
    engine.generate([prompt], 2, sampling, [0, 1])
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    engine.load_weights(model)
    assert largest_difference(model, engine.generate([prompt], 2, sampling, [0, 1])) < EXACT


def test_samples_of_a_prompt_differ_and_depend_on_their_seed_alone(engine, model):
    responses = sample(engine)
    for p in range(len(PROMPTS)):
        assert len({tuple(r.ids.tolist()) for r in responses[8 * p : 8 * p + 8]}) > 6
        assert all(r.prompt_ids.tolist() == PROMPTS[p] for r in responses[8 * p : 8 * p + 8])
    alone = engine.generate([PROMPTS[2]], 1, Sampling(24), [100 + 2 * 8 + 3])[0]
    assert alone.ids.tolist() == responses[2 * 8 + 3].ids.tolist()


def test_responses_end_at_a_stop_token_which_is_kept_or_are_cut(engine, model):
    responses = sample(engine, n=32)
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    for r in responses:
        stops = [token in engine.stop_ids for token in r.ids.tolist()]
        assert len(r.logprobs) == len(r.ids) and not any(stops[:-1])
        assert stops[-1] if r.finish_reason == "stop" else len(r.ids) == 24


def test_every_stop_token_ends_a_response(engine, model):
    """Qwen3 has two, and vLLM itself knows only the checkpoint's."""
    usual, engine.stop_ids = engine.stop_ids, [7, 21]
    try:
        ends = {r.ids[-1].item() for r in sample(engine, n=32) if r.finish_reason == "stop"}
    finally:
        engine.stop_ids = usual
    assert {7, 21} <= ends


def test_it_sleeps_and_wakes_with_the_weights_of_the_day(engine, model):
    before = sample(engine)
    for _ in range(2):
        engine.sleep()
        assert engine.llm.llm_engine.is_sleeping()
        engine.load_weights(model)
        assert not engine.llm.llm_engine.is_sleeping()
        assert [r.ids.tolist() for r in sample(engine)] == [r.ids.tolist() for r in before]


def test_perturbed_engine_weights_raise_the_mismatch_metrics(engine, model, folder):
    config = grpo_ba.Config(lr=0.0, prompts_per_step=len(PROMPTS), group_size=8)
    right = train_one_step(model, sample(engine), config)
    assert right["mismatch_max"] < EXACT and abs(right["mismatch_kl"]) < 1e-6
    assert right["tis_truncated"] == 0
    perturbed = grpo_ba.load_policy(str(folder / "model"), "cpu")
    with torch.no_grad():
        for parameter in perturbed.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
    engine.load_weights(perturbed)
    wrong = train_one_step(model, sample(engine), config)
    assert wrong["mismatch_max"] > 0.5 and wrong["mismatch_kl"] > 0.01
    assert wrong["tis_truncated"] > 0


def run(folder, ranks, *jobs):
    process = start(folder, ranks, *jobs)
    try:
        _, errors = process.communicate(timeout=400)
    finally:
        for pid in processes(folder):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]


@pytest.fixture(scope="module")
def one_rank(folder):
    run(folder, 1, {"name": "one", "steps": 3, "engine": "vllm"})
    return folder


def check_three_steps(folder, name):
    lines = metrics(folder, name)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:  # in step 2 and 3 only if the weights of step 1 and 2 were pushed
        assert line["skipped"] == 0 and line["grad_norm"] > 0
        assert line["mismatch_max"] < EXACT


def test_three_steps_end_to_end(one_rank):
    check_three_steps(one_rank, "one")


def test_two_ranks_each_with_its_engine_train_as_one(one_rank):
    run(one_rank, 2, {"name": "two", "steps": 3, "engine": "vllm"})
    check_three_steps(one_rank, "two")
    alone, together = weights(one_rank, "one"), weights(one_rank, "two")
    assert max((alone[key] - together[key]).abs().max() for key in alone) < 1e-5


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
def test_three_steps_of_smollm2(smollm2, tmp_path, temperature):
    problems = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)]
    folder = make_folder(tmp_path)
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    job = {"name": "smol", "model": smollm2, "engine": "vllm", "steps": 3, "prompts_per_step": 2,
           "minibatches": 1, "max_response_tokens": 16, "lr": 1e-5, "temperature": temperature}  # fmt: skip
    run(folder, 1, job)
    check_three_steps(folder, "smol")
