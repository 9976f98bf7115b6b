"""Speed and memory of one training step at real size: `python tests/bench_gpu.py [engine]`.

Qwen3-1.7B with random weights, 64 responses of 4,096 and of 8,192 tokens (a random policy all but
never stops), random rewards. Printed for each: tokens per second and model FLOPs utilisation of the
update, its peak memory beside the 16 bytes a parameter of weights, gradients and AdamW's moments,
the seconds of the weight push, and the shares of a step. With the transformers engine the rollout's
share says nothing; without a GPU all sizes are toys and only show that the script runs.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import grpo_ba
from grpo_ba import CUDA

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
    """Random weights, drawn where that is fast; the toy's tokenizer is only there to be found."""
    config = hf.Qwen3Config(vocab_size=151_936, tie_word_embeddings=True, bos_token_id=None,
                            eos_token_id=1, max_position_embeddings=40_960, **SIZES)  # fmt: skip
    with torch.device("cuda" if CUDA else "cpu"):
        model = hf.Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(grpo_ba.PRESETS["toy"]["model"])
    tokenizer.save_pretrained(folder)
    return grpo_ba.stop_token_ids(tokenizer)


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
    problems = [{"prompt_ids": prompt} for prompt in prompts]
    for step in range(2):
        _, push = timed(engine.load_weights, model)
        responses, rollout = timed(
            grpo_ba.rollout, engine, problems, config.group_size, config, step
        )
        engine.sleep()
        rewards = torch.rand(PROMPTS, config.group_size, generator=rng).round()
        advantages = grpo_ba.group_advantages(rewards)
        lengths = torch.tensor([len(r.ids) for r in responses]).view_as(rewards)
        weights = grpo_ba.token_weights("balanced", advantages, lengths)
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        metrics, update = timed(
            grpo_ba.update, model, optimizer, responses, advantages, weights, config
        )
    trained = (PROMPT_TOKENS + lengths)[advantages != 0].tolist()
    step = push + rollout + update
    print(f"responses of {config.max_response_tokens:,} tokens, {len(trained)} trained rows")
    print(f"  update   {sum(trained) / update:12,.0f} tokens/s   {metrics['padding']:.1%} padding")
    if CUDA:
        for gpu, peak in PEAK_FLOPS.items():
            if gpu in torch.cuda.get_device_name():
                mfu = flops(model, trained) / update / peak
                print(f"  MFU      {mfu:12.1%} of {peak / 1e12:.0f} TFLOP/s")
        used = (torch.cuda.max_memory_allocated() - idle) / 2**30
        states = 16 * sum(p.numel() for p in model.parameters()) / 2**30
        print(f"  memory   {used:12.1f} GiB at most, {states:.1f} of them states")
    print(f"  mismatch {metrics['mismatch_kl']:12.2e} KL, {metrics['mismatch_max']:.2e} at most")
    print(f"  push     {push:12.2f} s")
    print(f"  step     {step:12.1f} s: rollout {rollout / step:.0%}, push {push / step:.0%}, "
          f"update {update / step:.0%}")  # fmt: skip


def main():
    kind = sys.argv[1] if len(sys.argv) > 1 else grpo_ba.Config.engine
    where = torch.cuda.get_device_name() if CUDA else "CPU: toy sizes, no figure means anything"
    print(f"{where}; sampling with {kind}")
    with tempfile.TemporaryDirectory() as folder:
        stop_ids = make_checkpoint(folder)
        preset = grpo_ba.PRESETS["qwen3-1.7b-dapo"]
        config = grpo_ba.Config(**preset | {"model": folder, "minibatches": 1})
        config.prompts_per_step = PROMPTS
        if kind == "vllm":
            longest = PROMPT_TOKENS + max(LENGTHS)
            engine = grpo_ba.VLLMEngine(folder, stop_ids, longest, config.vllm_memory)
            engine.sleep()
        idle = torch.cuda.memory_allocated() if CUDA else 0  # torch counts what vLLM put to sleep
        model, optimizer, _ = grpo_ba.load_trainer(config, "cuda" if CUDA else "cpu")
        if kind == "transformers":
            engine = grpo_ba.TransformersEngine(model, stop_ids)
        for config.max_response_tokens in LENGTHS:
            bench(engine, model, optimizer, config, idle)


if __name__ == "__main__":
    main()
