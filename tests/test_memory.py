"""The plan behind README's memory table against tracked tensors, at the widths of real models."""

from dataclasses import replace

import pytest
import torch
from memory_table import CHUNK, MODELS, memory_plan, preset, verdict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, Qwen3Config

import grpo_ba


def test_the_table_says_what_is_too_large_and_names_the_knob():
    for settings, sentence in [
        ({}, "fits"),
        ({"zero": False}, "training states take 115 GiB"),
        ({"micro_batch_tokens": 65_536}, "update needs 123 GiB; lower --micro_batch_tokens"),
        ({"vllm_memory": 0.2}, "engine needs 17 GiB or more; raise --vllm_memory"),
    ]:
        config = replace(preset("Qwen2.5-Math-7B"), **settings)
        plan = memory_plan(config, MODELS["Qwen2.5-Math-7B"], world=8)
        assert verdict(config, plan, gpu_gib=79.2).startswith(sentence)


def tracked_peak(monkeypatch, model_config, tokens, chunk, checkpointing=False):
    """Bytes of a bf16 pass beside parameters and gradients: no tensor is real, all are counted."""
    monkeypatch.setattr(grpo_ba, "CUDA", True)  # turns autocast on
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids, tracker = torch.zeros(tokens // 4, dtype=torch.long), MemTracker()
        tracker.track_external(model)
        with tracker:
            rows = [grpo_ba.Response(ids[:1], ids, None)] * 4
            grpo_ba.response_logprobs(model, rows, 1.0, chunk).sum().backward()
    peak = sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())
    return peak - 8 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tokens, checkpointing", [(16_384, True), (4096, False)])
@pytest.mark.parametrize("model", MODELS)
def test_the_planned_activations_bound_the_tracked_ones(monkeypatch, model, tokens, checkpointing):
    sizes = {**MODELS[model].to_dict(), "num_hidden_layers": 2, "layer_types": None}
    two_layers = type(MODELS[model])(**sizes)
    settings = {"micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing}
    planned = memory_plan(replace(preset(model), **settings), two_layers, world=1)["activations"]
    tracked = tracked_peak(monkeypatch, two_layers, tokens, CHUNK, checkpointing) / 2**30
    assert 0.7 * planned < tracked < planned


def test_the_head_holds_at_most_four_chunks_of_logits_for_any_number_of_tokens(monkeypatch):
    tiny = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(**tiny, num_attention_heads=1, num_key_value_heads=1)
    for tokens in (128, 1024):
        assert 2 < tracked_peak(monkeypatch, config, tokens, 64) / (4 * 64 * config.vocab_size) < 4
