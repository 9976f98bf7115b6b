"""The README's memory table: what one GPU holds in GiB, and which knob to turn where it does not
fit.

python tests/memory_table.py
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo_ba import PRESETS, Config

MODELS = {  # as in the hub's config.json
    "Qwen3-1.7B": Qwen3Config(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Qwen2.5-Math-7B": Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
}  # fmt: skip
GPUS = {"1 x 24 GB": (1, 23.6), "1 x 80 GB": (1, 79.2), "8 x 80 GB": (8, 79.2)}  # count, GiB each
CHUNK = 2048  # tokens that pass the head at a time, response_logprobs' default
OTHER = 2  # GiB: CUDA context, fragments, what a sleeping engine keeps


def preset(model):
    return Config(**PRESETS[f"{model.lower()}-dapo"])


def memory_plan(config, model_config, world):
    """GiB of the update on one of `world` GPUs, by part. The activations are an upper bound
    (test_memory.py tracks every tensor of such a pass)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    N = sum(p.numel() for p in model.parameters())
    H, V, layers = model_config.hidden_size, model_config.vocab_size, model_config.num_hidden_layers
    # Bytes per token: the residual stream and the norms are float32, what enters a product is bf16.
    layer, stream = 40 * H + 8 * model_config.intermediate_size, 4 * H
    kept = layers * (stream if config.gradient_checkpointing else layer) + 6 * stream
    bf16_weights = 0 if config.gradient_checkpointing else 2 * N  # kept for the backward pass
    head = 12 * CHUNK * V + 8 * H * V  # float32: three chunks of logits, two gradients of the head
    T = config.micro_batch_tokens
    parts = {
        "parameters": 4 * N,  # float32
        "gradients": 4 * N,
        "optimizer": 8 * N // (world if config.zero else 1),  # two AdamW moments
        "activations": T * kept + bf16_weights + max(1.5 * T * layer, head),
    }
    return {name: size / 2**30 for name, size in parts.items()}


def verdict(config, plan, gpu_gib):
    """'fits', or what is too large and the knob that helps."""
    update = sum(plan.values()) + OTHER
    states = update - plan["activations"]
    vllm_needs = 1.2 * plan["parameters"] / 2  # bf16 weights, and some KV cache
    vllm_gets = config.vllm_memory * gpu_gib
    rollout = plan["parameters"] + plan["optimizer"] + OTHER + vllm_gets
    if states > 0.95 * gpu_gib:
        knob = "more GPUs" if config.zero else "--zero on more GPUs"
        return f"training states take {states:.0f} GiB; use {knob}, or a smaller model"
    if update > gpu_gib:
        knob = "lower --micro_batch_tokens (and --max_response_tokens, if that is the limit)"
        knob = knob if config.gradient_checkpointing else "add --gradient_checkpointing"
        return f"update needs {update:.0f} GiB; {knob}"
    if vllm_needs > vllm_gets:
        return f"engine needs {vllm_needs:.0f} GiB or more; raise --vllm_memory"
    if rollout > gpu_gib:
        return f"rollout needs {rollout:.0f} GiB in all; lower --vllm_memory"
    return "fits"


if __name__ == "__main__":
    columns = "parameters | gradients | optimizer | activations | update | vLLM's share"
    print(f"| model | GPUs | {columns} | |\n{'|---' * 9}|")
    for name, model_config in MODELS.items():
        config = preset(name)
        for gpus, (world, gpu_gib) in GPUS.items():
            plan = memory_plan(config, model_config, world)
            sizes = [*plan.values(), sum(plan.values()) + OTHER, config.vllm_memory * gpu_gib]
            numbers = " | ".join(f"{size:.1f}" for size in sizes)
            print(f"| {name} | {gpus} | {numbers} | {verdict(config, plan, gpu_gib)} |")
