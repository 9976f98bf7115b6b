"""The memory plan against known sizes and tracked tensors; micro-batches; the chunked head."""

import math
import re
from dataclasses import replace

import pytest
import torch
from memory_table import GPUS, MODELS, verdict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from grpo_ba import ChunkedLogprobs, memory_plan, micro_batches, parse, response_logprobs

GIB = 2**30


def preset(model):
    return parse(["--preset", f"{model.lower()}-dapo"])


@pytest.mark.parametrize(
    "model, count", [("Qwen3-1.7B", 1_720_574_976), ("Qwen2.5-Math-7B", 7_615_616_512)]
)
def test_the_plan_knows_the_models_parameters_and_its_states(model, count):
    plan = memory_plan(replace(preset(model), zero=False), MODELS[model], world=8)
    assert plan["parameters"] == plan["gradients"] == plan["optimizer"] / 2 == 4 * count / GIB
    assert plan["vLLM weights"] == 2 * count / GIB
    sharded = memory_plan(replace(preset(model), zero=True), MODELS[model], world=8)
    assert sharded.pop("optimizer") == pytest.approx(plan.pop("optimizer") / 8)
    assert sharded == plan


@pytest.mark.parametrize(
    "model, gpus, expected",
    [
        ("Qwen3-1.7B", "1 x 24 GB", "training states take 28 GiB; use --zero on more GPUs"),
        ("Qwen3-1.7B", "1 x 80 GB", "fits"),
        ("Qwen3-1.7B", "8 x 80 GB", "fits"),
        ("Qwen2.5-Math-7B", "1 x 24 GB", "training states take 115 GiB; use more GPUs"),
        ("Qwen2.5-Math-7B", "1 x 80 GB", "training states take 115 GiB; use more GPUs"),
        ("Qwen2.5-Math-7B", "8 x 80 GB", "fits"),
    ],
)
def test_presets_fit_or_say_why_not(model, gpus, expected):
    assert verdict(preset(model), MODELS[model], *GPUS[gpus]).startswith(expected)


@pytest.mark.parametrize(
    "settings, gpu, expected",
    [
        ({"zero": False}, 79.2, "training states take 115 GiB; use --zero on more GPUs"),
        ({"micro_batch_tokens": 65_536}, 79.2, "update needs .* lower --micro_batch_tokens"),
        ({"gradient_checkpointing": False}, 79.2, "update needs .* add --gradient_checkpointing"),
        ({"vllm_memory": 0.2}, 79.2, "engine needs 17 GiB or more; raise --vllm_memory"),
        ({"vllm_memory": 0.6}, 79.2, "rollout needs 85 GiB in all; lower --vllm_memory"),
    ],
)
def test_the_sentence_names_the_knob_that_helps(settings, gpu, expected):
    config = preset("Qwen2.5-Math-7B")
    said = verdict(replace(config, **settings), MODELS["Qwen2.5-Math-7B"], 8, gpu)
    assert re.match(expected, said), said
    assert verdict(config, MODELS["Qwen2.5-Math-7B"], 8, gpu) == "fits"


def test_without_vllm_the_kv_cache_of_the_rollout_must_fit():
    """Qwen3-1.7B: 28 layers of 8 heads of 128 for keys and values of 4 bytes, 224 KiB a token."""
    config, gpu = replace(preset("Qwen3-1.7B"), rollout_rows=64), GPUS["1 x 80 GB"]
    cache = memory_plan(config, MODELS["Qwen3-1.7B"], 1)["KV cache"]
    assert cache == 64 * (1024 + 8192) * 224 / 2**20
    said = verdict(config, MODELS["Qwen3-1.7B"], *gpu, use_vllm=False)
    assert re.match("rollout needs .* install it, or lower --rollout_rows to 29$", said), said
    config = replace(config, rollout_rows=29)
    assert verdict(config, MODELS["Qwen3-1.7B"], *gpu, use_vllm=False) == "fits"


def tracked_peak(config, model_config, rows):
    """The most that a forward and backward pass holds beside parameters and gradients, in bytes,
    at real widths: no tensor is real, but every one is counted."""
    from transformers import AutoModelForCausalLM

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa").train()
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            ids = torch.zeros(rows, config.micro_batch_tokens // rows, dtype=torch.long)
            # As in update and response_logprobs, but a mask of unknown size cannot be fake.
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                hidden = hidden.flatten(0, 1).clone().to(torch.bfloat16)
                weight = model.get_output_embeddings().weight
                logprobs, _ = ChunkedLogprobs.apply(
                    hidden, weight, ids.flatten(), 1.0, config.logprob_chunk
                )
            logprobs.sum().backward()
    peak = sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())
    return peak - 8 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "model, checkpointing, tokens",
    [
        ("Qwen3-1.7B", True, 32_768),
        ("Qwen3-1.7B", False, 4096),
        ("Qwen2.5-Math-7B", True, 8192),
        ("Qwen2.5-Math-7B", False, 4096),
    ],
)
def test_the_planned_activations_bound_the_tracked_ones(model, checkpointing, tokens):
    sizes = {**MODELS[model].to_dict(), "num_hidden_layers": 2, "layer_types": None}
    model_config = type(MODELS[model])(**sizes)
    config = replace(preset(model), gradient_checkpointing=checkpointing, micro_batch_tokens=tokens)
    planned = memory_plan(config, model_config, world=1)["activations"] * GIB
    assert 0.7 * planned < tracked_peak(config, model_config, rows=4) < planned


def lognormal_lengths(count, seed=0, median=1500, sigma=0.7, prompt=150, limit=8192):
    """Prompt and response tokens of reasoning models' answers: a long tail, cut at the limit."""
    rng = torch.Generator().manual_seed(seed)
    responses = (median * (sigma * torch.randn(count, generator=rng)).exp()).clamp(8, limit)
    prompts = prompt * (0.5 * torch.randn(count, generator=rng)).exp()
    return (responses + prompts).int().tolist()


def test_micro_batches_hold_each_row_once_within_the_budget():
    for seed in range(50):
        lengths = lognormal_lengths(1 + 7 * seed, seed)
        budget = max(lengths) + 500 * seed
        batches = micro_batches(lengths, budget)
        assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
        for batch in batches:
            longest = max(lengths[row] for row in batch)
            assert len(batch) * longest <= budget
            assert sum(lengths[row] for row in batch) >= 0.8 * len(batch) * longest
    assert micro_batches([], 10) == []


@pytest.mark.parametrize("rows, budget", [(256, 32_768), (64, 32_768), (32, 32_768), (32, 16_384)])
def test_little_is_padded(rows, budget):
    """A minibatch of the presets is 256 rows (32 groups of 8), 32 to a rank on 8 GPUs."""
    padding = []
    for seed in range(20):
        lengths = lognormal_lengths(rows, seed)
        computed = sum(
            len(batch) * max(lengths[row] for row in batch)
            for batch in micro_batches(lengths, budget)
        )
        padding.append(1 - sum(lengths) / computed)
    print(f"{rows} rows, {budget} tokens: {sum(padding) / len(padding):.3f} padded")
    assert sum(padding) / len(padding) < 0.10


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("autocast, exact", [(False, 1e-12), (True, 0.02)])
def test_chunks_change_neither_logprobs_nor_entropy_nor_gradients(
    tiny_qwen3, make_responses, chunk, autocast, exact
):
    """In float64 to its precision, under bf16 autocast to bf16's."""
    model = tiny_qwen3(vocab=97, dtype=torch.float32 if autocast else torch.float64)
    responses = make_responses([[5, 11, 3, 20]], vocab=97)
    results = []
    for size in (0, chunk):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            logprobs, entropy = response_logprobs(model, responses, 0.7, size)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((logprobs.detach(), entropy, gradient))
    for plain, chunked in zip(*results):
        assert (chunked - plain).norm() <= exact * plain.norm()
    # The entropy is taken in float32 even so (torch.linalg.vecdot would be cast down to bf16).
    assert (results[0][1] - results[1][1]).norm() <= 1e-6 * results[0][1].norm()
    assert not results[0][1].requires_grad and math.isfinite(results[1][2].sum())
