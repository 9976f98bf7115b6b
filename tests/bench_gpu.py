"""Speed and memory of one training step at real size: `python tests/bench_gpu.py [engine]`.

Qwen3-1.7B with random weights, responses of 4,096 and 8,192 tokens (a random policy all but never
stops), random rewards. Printed for each: tokens per second and model FLOPs utilisation of the
update, its peak memory against grpo_ba.memory_plan, seconds of the weight push, and the shares of
a step. Without vLLM transformers samples, which says nothing of a real rollout's share; without a
GPU all sizes are toys and only show that the script runs.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import grpo_ba
from grpo_ba import Sampling

CUDA = torch.cuda.is_available()
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "4090": 165e12}  # dense bf16
if CUDA:
    SIZES = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128,
             "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
    LENGTHS, PROMPT_TOKENS, PROMPTS = (4096, 8192), 200, 8
else:
    SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    LENGTHS, PROMPT_TOKENS, PROMPTS = (32, 64), 8, 2


def make_checkpoint(folder):
    """Random weights, drawn where that is fast; the tokenizer is only there to be found."""
    config = Qwen3Config(vocab_size=151_936, tie_word_embeddings=True, bos_token_id=None,
                         eos_token_id=1, max_position_embeddings=40_960, **SIZES)  # fmt: skip
    with torch.device("cuda" if CUDA else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    grpo_ba.toy_tokenizer().save_pretrained(folder)
    return config


def timed(function, *args):
    start = time.perf_counter()
    result = function(*args)
    if CUDA:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def flops(model, lengths):
    """Forward and backward of these rows: 6 per parameter and token, and causal attention's
    12 * layers * (heads * head_dim) * length / 2 per token. Recomputation is not counted."""
    c = model.config
    attention = 6 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
    weights = sum(p.numel() for p in model.parameters())
    return sum(6 * weights * n + attention * n * n for n in lengths)


def bench(engine, model, optimizer, config, idle):
    """A warm-up step, then the step that counts."""
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 48, (PROMPTS, PROMPT_TOKENS), generator=rng).tolist()
    G = config.group_size
    for step in range(2):
        _, push = timed(engine.load_weights, model)
        seeds = [grpo_ba.sample_seed(step, i) for i in range(PROMPTS * G)]
        sampling = Sampling(config.max_response_tokens)
        responses, rollout = timed(engine.generate, prompts, G, sampling, seeds)
        engine.sleep()
        rewards = torch.rand(PROMPTS, G, generator=rng).round()
        advantages = grpo_ba.group_advantages(rewards)
        lengths = torch.tensor([len(r.ids) for r in responses]).view_as(rewards)
        weights = grpo_ba.token_weights("balanced", advantages, lengths)
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        metrics, update = timed(
            grpo_ba.update, model, optimizer, responses, advantages, weights, config
        )
    rows = [
        PROMPT_TOKENS + n for n, a in zip(lengths.flatten().tolist(), advantages.flatten()) if a
    ]
    step = push + rollout + update
    print(f"responses of {config.max_response_tokens:,} tokens, {len(rows)} trained rows")
    print(f"  update   {sum(rows) / update:12,.0f} tokens/s   {metrics['padding']:.1%} padding")
    peak_flops = [
        f for gpu, f in PEAK_FLOPS.items() if CUDA and gpu in torch.cuda.get_device_name()
    ]
    for peak in peak_flops:
        print(f"  MFU      {flops(model, rows) / update / peak:12.1%} of {peak / 1e12:.0f} TFLOP/s")
    plan = grpo_ba.memory_plan(config, model.config, world=1)
    planned = sum(plan.values()) - plan["vLLM weights"]
    if CUDA:
        used = (torch.cuda.max_memory_allocated() - idle) / 2**30
        print(f"  memory   {used:12.1f} GiB at most, {planned:.1f} planned")
    print(f"  mismatch {metrics['mismatch_kl']:12.2e} KL, {metrics['mismatch_max']:.2e} at most")
    print(f"  push     {push:12.2f} s")
    print(f"  step     {step:12.1f} s: rollout {rollout / step:.0%}, push {push / step:.0%}, "
          f"update {update / step:.0%}")  # fmt: skip


def main():
    kind = grpo_ba.pick_engine(sys.argv[1] if len(sys.argv) > 1 else "auto")
    where = torch.cuda.get_device_name() if CUDA else "CPU: toy sizes, no figure means anything"
    print(f"{where}; sampling with {kind}")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder)
        stop_ids = grpo_ba.stop_token_ids(folder, grpo_ba.load_tokenizer(folder))
        longest = PROMPT_TOKENS + max(LENGTHS)
        if kind == "vllm":
            dtype = "bfloat16" if CUDA else "float32"
            engine = grpo_ba.VLLMEngine(folder, stop_ids, longest, dtype)
            engine.sleep()
        idle = torch.cuda.memory_allocated() if CUDA else 0  # torch counts what vLLM put to sleep
        model = grpo_ba.load_policy(folder, "cuda" if CUDA else "cpu", gradient_checkpointing=True)
        if kind == "transformers":
            engine = grpo_ba.TransformersEngine(model, stop_ids)
        for length in LENGTHS:
            config = grpo_ba.parse(["--preset", "qwen3-1.7b-dapo", "--minibatches", "1"])
            config.max_response_tokens, config.prompts_per_step = length, PROMPTS
            optimizer = grpo_ba.make_optimizer(model, config)
            bench(engine, model, optimizer, config, idle)
            del optimizer


if __name__ == "__main__":
    main()
