"""GRPO with Balanced Aggregation (Zeng et al., arXiv:2605.04077), in one file.

GRPO samples G responses per prompt, scores them, normalises the rewards within the group into
advantages, and averages the clipped token losses. HOW it averages them is the paper's subject.
For one group, with l[i,t] the loss of token t of response i, |o_i| its length, and k the number of
responses with a positive advantage:

    sequence (GRPO)   1/G * sum_i 1/|o_i| * sum_t l[i,t]    every response weighs the same
    token    (DAPO)   1/sum_i |o_i| * sum_i sum_t l[i,t]    every token weighs the same
    balanced (BA)     k/G * mean of l over the tokens of positive responses
                      + (G-k)/G * mean of l over the tokens of negative responses

    python grpo_ba.py                       # a laptop: toy policy; a GPU: Qwen3-1.7B
    torchrun --nproc-per-node 8 grpo_ba.py  # eight GPUs

Left out on purpose: KL penalty, reward models, dynamic sampling, overlong penalties, LoRA, FSDP,
tensor parallelism, asynchronous rollouts, several nodes.
"""

import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from datasets import load_dataset
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from verify import Verifier, fail, gold_texts, require_sandbox

CUDA = torch.cuda.is_available()
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
print0 = print if RANK == 0 else lambda *_: None

# ---- 1. Config. Sizes: P prompts, G responses per prompt, B = P*G, T tokens, V vocabulary.


def toy(world):
    """A 0.3 M-parameter Qwen3 that adds digits modulo 5, from tests/make_toy.py."""
    folder = f"{Path(__file__).resolve().parent}/.assets/{world}"
    return {
        "model": folder, "train_data": f"{folder}/train.jsonl", "eval_data": f"{folder}/eval.jsonl",
        "instruction": "none", "max_prompt_tokens": 64, "max_response_tokens": 200, "lr": 2e-4,
        "prompts_per_step": 8, "minibatches": 2, "steps": 40, "eval_every": 4,
        "micro_batch_tokens": 1024, "gradient_checkpointing": False,
    }  # fmt: skip


POLARIS = {"train_data": "POLARIS-Project/Polaris-Dataset-53K"}
QWEN25 = {
    "model": "Qwen/Qwen2.5-Math-7B", "instruction": "system", "max_response_tokens": 3072,
    "micro_batch_tokens": 8192, "zero": True,
}  # fmt: skip
PRESETS = {  # fields of Config, where they differ from its defaults
    "toy": toy("toy-rambler"),  # right answers are short and rare, wrong ones ramble on
    "toy-guesser": toy("toy-guesser"),  # a short guess is right half the time
    "qwen3-1.7b-dapo": {},
    "qwen3-1.7b-polaris": POLARIS,
    "qwen2.5-math-7b-dapo": QWEN25,
    "qwen2.5-math-7b-polaris": QWEN25 | POLARIS,
}

BENCHMARKS = (
    "HuggingFaceH4/MATH-500,HuggingFaceH4/aime_2024,math-ai/aime25,math-ai/minervamath,"
    "Hothan/OlympiadBench:OE_TO_maths_en_COMP"
)


def arg(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class Config:  # defaults: Qwen3-1.7B on DAPO-Math-17k, with one GPU or more
    preset: Literal["", *PRESETS] = arg("", "whose settings to take; without a GPU toy's")
    name: str = arg("", "the run's folder is runs/NAME")
    resume: str = arg("", "folder of a run to go on with")
    seed: int = arg(0, "of data order, sampling and evaluation")
    wandb: bool = arg(False, "log to Weights & Biases")
    model: str = arg("Qwen/Qwen3-1.7B", "checkpoint: folder or hub id")
    train_data: str = arg(
        "open-r1/DAPO-Math-17k-Processed:all", ".jsonl, folder or hub id[:config]"
    )
    eval_data: str = arg(BENCHMARKS, "with commas; the first is evaluated")
    instruction: Literal["suffix", "system", "none"] = arg("suffix", "where to ask for a box")
    enable_thinking: bool = arg(False, "let Qwen3 open a <think> block")
    unsafe_code: bool = arg(False, "run programs without the sandbox")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped")
    max_response_tokens: int = arg(8192, "longer responses are cut")
    aggregation: Literal["sequence", "token", "balanced", "all"] = arg("balanced", "all: in turn")
    prompts_per_step: int = arg(128, "P, prompts per rollout")
    group_size: int = arg(8, "G, responses per prompt")
    minibatches: int = arg(4, "optimizer steps per rollout")
    normalize_std: bool = arg(True, "divide advantages by the group's std")
    clip_low: float = arg(0.2, "the ratio is clipped to 1 - this")
    clip_high: float = arg(0.28, "and 1 + this (DAPO's clip-higher)")
    tis_cap: float = arg(2.0, "of importance sampling; 0: off")
    temperature: float = arg(1.0, "of sampling and of all logprobs")
    steps: int = arg(400, "rollouts to train on")
    lr: float = arg(1e-6, "AdamW learning rate")
    max_grad_norm: float = arg(1.0, "gradients are clipped to it")
    eval_every: int = arg(10, "steps between evaluations")
    eval_problems: int = arg(256, "held-out problems to evaluate")
    save_every: int = arg(10, "steps between checkpoints")
    engine: Literal["vllm", "transformers"] = arg("vllm" if CUDA else "transformers", "who samples")
    vllm_memory: float = arg(0.4, "share of the GPU for vLLM")
    micro_batch_tokens: int = arg(32768, "padded tokens per forward pass")
    gradient_checkpointing: bool = arg(True, "recompute activations")
    zero: bool = arg(False, "shard the optimizer (ZeRO-1)")


def parse_flags(cls, doc, argv=None, **defaults):
    """Command line -> cls. Flags beat `defaults`, which beat those of cls."""
    parser = hf.HfArgumentParser(cls, description=doc.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: fail(f"{message}; --help explains every flag")
    parser.set_defaults(**defaults)
    return cls(**vars(parser.parse_args(argv)))


def parse(argv=None):
    """Command line -> Config. Refuses what cannot work before anything is loaded."""
    given = parse_flags(Config, __doc__, argv)
    preset = given.preset or ("" if CUDA or given.model != Config.model else "toy")
    defaults = {"preset": preset} | PRESETS.get(preset, {})
    if given.resume:
        defaults = json.loads(Path(given.resume, "config.json").read_text())
    c = parse_flags(Config, __doc__, argv, **defaults)
    may_be_zero = ("seed", "lr", "tis_cap")
    for name, value in vars(c).items():
        if type(value) in (int, float) and not (value > 0 or value == 0 and name in may_be_zero):
            fail(f"--{name} {value}: must be a positive number")
    if c.prompts_per_step % (c.minibatches * WORLD):
        fail(f"--prompts_per_step {c.prompts_per_step}: must be a multiple of minibatches x ranks")
    if c.aggregation == "all" and c.resume:
        fail("--aggregation all: starts new runs; leave --resume out")
    return c


# ---- 2. Prompts: rows of data become problems, {"problem", "answer"} or, for programs,
# {"problem", "tests", "func_name"}, and a chat template makes token ids of them.

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."  # Qwen's words


def read_rows(source, split="train", revision=None):
    """Rows of a file, or of a data set: of this split, or of its first."""
    if source.endswith(".jsonl"):  # not through arrow, which refuses answers of mixed types
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n")
        try:
            return [dict(json.loads(line)) for line in lines if line.strip()]
        except (ValueError, TypeError) as error:
            fail(f"data {source}: not a JSON object a line ({error})")
    hub_id, _, name = source.partition(":")
    splits = load_dataset(hub_id, name or None, revision=revision)
    return splits[split if split in splits else next(iter(splits))]


def problem_text(row):
    """`prompt` in DAPO-Math-17k-Processed, `question` in OlympiadBench and Minerva."""
    text = row.get("problem") or row.get("prompt") or row.get("question")
    return text.strip() if isinstance(text, str) else ""


def load_problems(source, split="train", excluded=()):
    """Each text once, with one verifiable answer, in file order."""
    rows, found, dropped = read_rows(source, split), {}, Counter()
    for row in rows:
        text = problem_text(row)
        golds = row.get("answer", row.get("final_answer", row.get("solution")))
        scored_by = {"answer": gold_texts(golds)}
        if row.get("tests"):
            scored_by = {"tests": row["tests"], "func_name": row.get("func_name")}
        if not text or scored_by == {"answer": []}:
            dropped["without a verifiable answer"] += 1
        elif text in excluded:
            dropped["in an evaluation set"] += 1
        elif found.setdefault(text, scored_by) != scored_by:
            found[text] = None  # two answers: neither is to be trusted
    problems = [{"problem": text} | by for text, by in found.items() if by]
    dropped["repeated or in conflict"] = len(rows) - len(problems) - dropped.total()
    print0(f"{source}: {len(problems):,} of {len(rows):,} rows, dropped {dict(dropped)}")
    if not problems:
        fail(f"data {source}: no row with problem and answer, or prompt and solution, is usable")
    return problems


def encode_prompt(tokenizer, problem, instruction="suffix", enable_thinking=False):
    """Token ids of a problem, which is text or chat messages."""
    if isinstance(problem, str):
        system = [{"role": "system", "content": BOXED}] * (instruction == "system")
        suffix = f"\n{BOXED}" * (instruction == "suffix")
        problem = [*system, {"role": "user", "content": problem + suffix}]
    return tokenizer.apply_chat_template(
        problem, add_generation_prompt=True, enable_thinking=enable_thinking, return_dict=False
    )


def load_task(config, tokenizer):
    """[problems to train on, held-out problems], with their prompt_ids."""
    sources = [source for source in config.eval_data.split(",") if source]
    held_out = load_problems(sources[0], "test") if sources else []
    random.Random(0).shuffle(held_out)
    excluded = {problem_text(row) for source in sources for row in read_rows(source, "test")}
    task = [load_problems(config.train_data, "train", excluded), held_out[: config.eval_problems]]
    for problems in task:
        for p in problems:
            how = "none" if "tests" in p else config.instruction
            p["prompt_ids"] = encode_prompt(tokenizer, p["problem"], how, config.enable_thinking)
        problems[:] = [p for p in problems if len(p["prompt_ids"]) <= config.max_prompt_tokens]
    print0(f"prompts: {len(task[0]):,} to train on, {len(task[1]):,} to evaluate")
    if any("tests" in p for p in task[0]):
        require_sandbox(config.unsafe_code)
    return task


# ---- 3. Rollout: two engines with one interface. No text is tokenised twice. All sampling is
# explicit: a checkpoint's generation_config would change the policy (trl#6789).


@dataclass
class Response:
    prompt_ids: torch.Tensor  # [prompt tokens]
    ids: torch.Tensor  # [|o|], the stop token included
    logprobs: torch.Tensor  # [|o|], under the distribution it was sampled from


def sample_seed(*key):
    """Of (seed, step, prompt, response): resuming or adding ranks changes no sample."""
    return random.Random(repr(key)).getrandbits(31)


def stop_token_ids(tokenizer):
    """Qwen3 ends responses with two tokens, and its tokenizer names only one."""
    names = {tokenizer.eos_token, "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>"}
    return sorted(id for token, id in tokenizer.get_vocab().items() if token in names)


@dataclass
class TransformersEngine:
    """Samples from the trained model itself, with a KV cache, and drops finished rows."""

    model: torch.nn.Module
    stop_ids: list
    rows: int = 256  # at most, at a time

    load_weights = sleep = lambda *_: None  # nothing to push or release

    @torch.no_grad()
    def generate(self, prompts, n, seeds, max_tokens, temperature, top_p=1.0, top_k=-1):
        """n responses to each prompt (token ids), prompt by prompt. Each has a seed of its own, and
        does not depend on its neighbours."""
        self.model.eval()
        device, B = self.model.device, len(seeds)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniforms = torch.stack([torch.rand(max_tokens, generator=g) for g in generators]).to(device)
        prompts = [torch.tensor(prompt) for prompt in prompts]
        mask = pad_sequence([torch.ones_like(p) for p in prompts], True, 0, "left").to(device)
        token = pad_sequence(prompts, True, 0, "left").to(device)  # [prompts, longest prompt]
        ids = torch.full((B, max_tokens), -1, device=device)  # -1: not sampled
        logprobs = torch.zeros(B, max_tokens, device=device)
        rows = torch.arange(B, device=device)  # those still being written
        stops, cache = torch.tensor(self.stop_ids, device=device), None
        for t in range(max_tokens):
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -token.shape[1] :]
            output = self.model(token, mask, positions, cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.past_key_values, output.logits[:, -1] / temperature
            if t == 0:  # each prompt was read once for n responses
                cache.batch_repeat_interleave(n)
                mask, logits = (x.repeat_interleave(n, dim=0) for x in (mask, logits))
            if top_k > 0:
                logits = hf.TopKLogitsWarper(top_k)(None, logits)
            if top_p < 1:
                logits = hf.TopPLogitsWarper(top_p)(None, logits)
            logp = logits.log_softmax(dim=-1)  # [rows, V]
            # The first token at which the cumulative probability passes u.
            cdf = logp.double().exp().cumsum(dim=-1)
            u = uniforms[rows, t].double()[:, None] * cdf[:, -1:]
            token = torch.searchsorted(cdf, u, right=True)  # [rows, 1]
            ids[rows, t], logprobs[rows, t] = token[:, 0], logp.gather(1, token)[:, 0].float()
            going_on = ~torch.isin(token[:, 0], stops)
            if not going_on.all():
                rows, token, mask = rows[going_on], token[going_on], mask[going_on]
                if len(rows) == 0:
                    break
                cache.batch_select_indices(going_on.nonzero()[:, 0])
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return [
            Response(prompts[i // n], ids[i, :length].cpu(), logprobs[i, :length].cpu())
            for i, length in enumerate((ids >= 0).sum(dim=1))
        ]


class VLLMEngine:
    """vLLM in this process, asleep while the trainer works."""

    rows = 10**6

    def __init__(self, path, stop_ids, max_model_len, memory_share=0.4):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        self.vllm, self.stop_ids = vllm, stop_ids
        self.llm = vllm.LLM(
            path, max_model_len=max_model_len, gpu_memory_utilization=memory_share,
            dtype="bfloat16" if CUDA else "float32", enable_sleep_mode=CUDA, enforce_eager=not CUDA,
            enable_chunked_prefill=CUDA,  # on a CPU each chunk uses up a random number
            generation_config="vllm",  # not the checkpoint's
            logprobs_mode="processed_logprobs",  # after temperature
            distributed_executor_backend="external_launcher" if WORLD > 1 else None,
        )  # fmt: skip

    def load_weights(self, model):
        """Takes the trainer's over, in memory. The KV cache wakes last (vllm#15254)."""
        self.llm.wake_up(tags=["weights"])
        weights = iter(model.state_dict().items())  # a tied head under both its names
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()  # it belongs to the old weights

    def sleep(self):
        """Drops weights and KV cache."""
        self.llm.sleep(level=2)

    def generate(self, prompts, n, seeds, **sampling):
        """As TransformersEngine.generate."""
        prompts = [prompt for prompt in prompts for _ in range(n)]
        sampling |= {"stop_token_ids": self.stop_ids, "logprobs": 0, "flat_logprobs": True}
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self.vllm.SamplingParams(**sampling, seed=s, detokenize=False) for s in seeds],
            use_tqdm=False,
        )
        return [
            Response(*map(torch.tensor, (prompt, o.token_ids, o.logprobs.logprobs)))
            for prompt, [o] in zip(prompts, (output.outputs for output in outputs))
        ]


def rollout(engine, problems, n, config, *key):
    """n responses to each problem. The ranks take the problems in turn."""
    responses, some = [], max(1, engine.rows // n)  # problems at a time
    sampling = {"max_tokens": config.max_response_tokens, "temperature": config.temperature}
    for i in range(0, len(problems), some):
        prompts = [p["prompt_ids"] for p in problems[i : i + some]]
        places = [(RANK + (i + j) * WORLD, g) for j in range(len(prompts)) for g in range(n)]
        seeds = [sample_seed(config.seed, *key, *place) for place in places]
        responses += engine.generate(prompts, n, seeds, **sampling, top_p=1.0, top_k=-1)
    return responses


# ---- 4. Reward: verify.py says 1 or 0 for each response.


def response_text(tokenizer, response):
    """What the scorer reads. After a prompt that ends with <think> it is reasoning at first."""
    opened = tokenizer.decode(response.prompt_ids[-8:]).rstrip().endswith("<think>")
    return "<think>" * opened + tokenizer.decode(response.ids, skip_special_tokens=True)


def score(verifier, tokenizer, responses, problems):
    """responses [B], problems [P] -> rewards [P, G], NaN where the scorer failed, and texts [B]."""
    G = len(responses) // max(1, len(problems))
    texts = [response_text(tokenizer, response) for response in responses]
    verdicts = verifier.score(texts, [problem for problem in problems for _ in range(G)])
    rewards = [math.nan if v.reason == "sandbox_error" else v.reward for v in verdicts]
    return torch.tensor(rewards).view(len(problems), G), texts


# ---- 5. Advantage: how much better than its group a response did.


def group_advantages(rewards, normalize_std=True, eps=1e-6):
    """rewards [P, G] -> advantages [P, G]: (r - mean) / (std + eps) within each group. Exactly 0 in
    groups without spread or with an unknown reward (NaN), and for the mean itself: a tiny std would
    blow up rounding errors (NeMo-RL#4161)."""
    deviations = rewards - rewards.mean(dim=1, keepdim=True)
    low, high = rewards.aminmax(dim=1, keepdim=True)
    std = rewards.std(dim=1, correction=0, keepdim=True)  # TRL and verl divide by G - 1
    advantages = deviations / (std + eps) if normalize_std else deviations
    return torch.where((high > low) & (deviations.abs() > 1e-5 * (high - low)), advantages, 0.0)


# ---- 6. Aggregation: the paper. A rule is one number per response, the weight of each of its
# tokens: group loss = sum_i w_i * sum_t l[i,t], batch loss = mean over groups. They are computed
# once, over whole groups, and nothing below rescales them. A new rule also needs its name in Config.


def sequence(advantages, lengths):
    """GRPO:  1/G * sum_i 1/|o_i| * sum_t l[i,t]"""
    G = lengths.shape[1]
    return 1 / (G * lengths.clamp(min=1))  # a response may have no token


def token(advantages, lengths):
    """DAPO, over the group as its formula says:  1/sum_i |o_i| * sum_i sum_t l[i,t]"""
    T = lengths.sum(dim=1, keepdim=True)
    return (1 / T.clamp(min=1)).expand_as(lengths)


def balanced(advantages, lengths):
    """BA:  k/G * mean of l over positive tokens + (G-k)/G * mean of l over negative tokens"""
    weights = torch.zeros_like(lengths)
    for sign in (advantages > 0, advantages < 0):  # [P, G] each; A = 0 counts in G only
        share = sign.to(lengths).mean(dim=1, keepdim=True)  # this sign's share of G
        T = (lengths * sign).sum(dim=1, keepdim=True)  # tokens of this sign only
        weights += sign * share / T.clamp(min=1)
    return weights


AGGREGATIONS = {"sequence": sequence, "token": token, "balanced": balanced}


def token_weights(rule, advantages, lengths):
    """advantages [P, G], lengths [P, G] in tokens -> weights [P, G], of each token in its group."""
    return AGGREGATIONS[rule](advantages, lengths.to(advantages.dtype))


# ---- 7. Loss: PPO's clipped objective with separate bounds, per token.


def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    """All [T]. Returns (loss, is_clipped). A clipped token has no gradient: its ratio is beyond the
    bound in the direction that its advantage asks for."""
    ratio = torch.exp(logprobs - old_logprobs)
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, clipped), free > clipped


# ---- 8. Update: minibatches of whole groups (one optimizer step each) in micro-batches (one
# forward pass each). The weights of section 6 hold every denominator, so gradients are only ever
# added: no batching, sorting or sharding can change them.


def setup_distributed():
    """This process's device, once it is in torchrun's group."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if CUDA else "cpu"
    if CUDA:
        torch.cuda.set_device(device)
    if WORLD > 1 and not dist.is_initialized():  # rollouts take long
        dist.init_process_group("nccl" if CUDA else "gloo", timeout=timedelta(hours=2))
    return device


def all_ranks(value):
    """A list of every rank's value."""
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values


def response_logprobs(model, responses, temperature, chunk=2048):
    """Log-probabilities [T] of all T response tokens of a micro-batch, response by response.

    Padding is on the right, where no real token sees it. Positions follow from lengths, not from
    token ids: many models pad with EOS, which must be trained (trl#4970). Logits exist for `chunk`
    tokens at a time, and anew in the backward pass: those of 2,048 take 1.2 GB (Qwen3).
    """
    device, weight = model.device, model.get_output_embeddings().weight  # [V, H]
    rows = [torch.cat([r.prompt_ids, r.ids]) for r in responses]
    padded = pad_sequence(rows, batch_first=True).to(device)  # [rows, longest row]
    targets = torch.cat([r.ids for r in responses]).to(device)  # [T]

    def head(hidden, targets):
        logits = F.linear(hidden / temperature, weight).to(weight.dtype)  # [chunk, V], to float32
        return -F.cross_entropy(logits, targets, reduction="none")

    # An autocast cache would keep every weight in bf16 too.
    with torch.autocast(device.type, torch.bfloat16, CUDA, cache_enabled=False):
        hidden = model.base_model(input_ids=padded, use_cache=False).last_hidden_state
        # The token at position t is predicted at t - 1: from the prompt's last token on.
        hidden = [h[len(r.prompt_ids) - 1 :][: len(r.ids)] for h, r in zip(hidden, responses)]
        hidden = torch.cat(hidden)  # [T, H]
        chunks = zip(hidden.split(chunk), targets.split(chunk))
        return torch.cat([checkpoint(head, h, t, use_reentrant=False) for h, t in chunks])


def micro_batches(rows, lengths, budget):
    """The rows, longest first; rows * longest <= budget tokens, none under 0.8 * longest."""
    batches = []
    for row in sorted(rows, key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if lengths[row] >= 0.8 * longest > 0 and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def update(model, optimizer, responses, advantages, weights, config):
    """Trains on this rank's responses [B], with advantages and weights [P, G]. Returns metrics, the
    same on all ranks: means over the tokens trained on."""
    model.train()
    advantages, weights = advantages.flatten(), weights.flatten()  # [B], as the responses
    counts = torch.tensor([len(r.ids) for r in responses])  # [B]
    lengths = [len(r.prompt_ids) + len(r.ids) for r in responses]
    # A response with A = 0 (or without tokens) has no gradient: it is not computed.
    trained = ((advantages != 0) & (counts > 0)).nonzero()[:, 0].tolist()
    size = len(responses) // config.minibatches  # whole groups
    groups = config.prompts_per_step // config.minibatches  # in a minibatch, of all ranks
    sums, mismatch_max, norms = Counter(), 0.0, []
    names = ("approx_kl", "clip_low", "clip_high", "mismatch_kl", "tis_truncated")

    def passes(rows):  # some of the rows at a time, with their logprobs, [|o|] each
        for batch in micro_batches(rows, lengths, config.micro_batch_tokens):
            some = [responses[i] for i in batch]
            logprobs = response_logprobs(model, some, config.temperature)
            yield batch, logprobs.split(counts[batch].tolist())

    # Old logprobs are the trainer's, of the weights that sampled. The first minibatch has them from
    # its own forward pass; the others need one more, before the first step.
    old_logprobs = {}  # row -> [|o|]
    with torch.no_grad():
        for rows, logprobs in passes([i for i in trained if i >= size]):
            old_logprobs.update(zip(rows, logprobs))

    for m in range(config.minibatches):
        for rows, logprobs in passes([i for i in trained if i // size == m]):
            old = [old_logprobs.get(i, own.detach()) for i, own in zip(rows, logprobs)]
            logprobs, old = torch.cat(logprobs), torch.cat(old)  # [T]
            # From one number per response to one per token, [T] each.
            A, w = (x[rows].repeat_interleave(counts[rows]).to(old) for x in (advantages, weights))
            loss, is_clipped = policy_loss(logprobs, old, A, config.clip_low, config.clip_high)
            # Truncated importance sampling: the engine's policy is slightly different.
            mismatch = old - torch.cat([responses[i].logprobs for i in rows]).to(old)
            if config.tis_cap:
                loss = loss * mismatch.exp().clamp(max=config.tis_cap)
            loss = (w * loss).sum() / groups  # they add up to the mean over groups
            loss.backward()
            log_ratio = logprobs.detach() - old
            values = (
                log_ratio.exp() - 1 - log_ratio,  # Schulman's k3
                is_clipped & (A < 0),
                is_clipped & (A > 0),
                mismatch.exp() - 1 - mismatch,
                mismatch.exp() > (config.tis_cap or math.inf),
            )
            sums.update({name: x.sum().item() for name, x in zip(names, values)})
            sums.update(tokens=len(A), computed=len(rows) * lengths[rows[0]])
            sums.update(needed=sum(lengths[i] for i in rows))
            mismatch_max = max(mismatch_max, mismatch.abs().max().item())
        if WORLD > 1:
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # none on this rank
            for work in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:
                work.wait()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
        if 0 < norm < math.inf:  # without a gradient AdamW's momentum would still move the weights
            optimizer.step()
            norms.append(norm)
        optimizer.zero_grad()
    sums = sum(all_ranks(sums), Counter())
    return {
        **{name: sums[name] / sums["tokens"] if sums else None for name in names},
        "mismatch_max": max(all_ranks(mismatch_max)) if sums else None,
        "grad_norm": sum(norms) / max(1, len(norms)),
        "skipped": config.minibatches - len(norms),
        "padding": 1 - sums["needed"] / max(1, sums["computed"]),
    }


# ---- 9. The run's folder: config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoint/.
# It holds no random state: nothing draws from torch's own generator.


def write_atomic(path, text):
    """The file is there whole or not at all."""
    Path(f"{path}.tmp").write_text(text, encoding="utf-8")
    os.replace(f"{path}.tmp", path)


def append_jsonl(path, rows):
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_jsonl(path):
    """Its rows, without a last line that a crash cut off."""
    if Path(path).exists():
        with open(path) as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


def open_run(config, done):
    """The run's folder. A resumed one loses the log of steps that will be done again."""
    name = config.name or f"{config.preset or Path(config.model).name}-{config.aggregation}"
    run = Path(config.resume or f"runs/{name}")
    if run.exists() and not config.resume:
        run = Path(f"{run}-{time.strftime('%m%d-%H%M%S')}")
    run.mkdir(parents=True, exist_ok=True)
    write_atomic(run / "config.json", json.dumps(vars(config), indent=2))
    for path in (run / "metrics.jsonl", run / "samples.jsonl"):
        rows = [row for row in read_jsonl(path) if row["step"] <= done]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return run


def save(run, step, model, tokenizer, optimizer):
    """`checkpoint` is a link to checkpoint-STEP: a link can be replaced in one go."""
    folder = run / f"checkpoint-{step}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, folder / "trainer.pt")
    link = run / "checkpoint.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    os.replace(link, run / "checkpoint")
    for older in {*run.glob("checkpoint-*")} - {folder}:
        shutil.rmtree(older)


def draw_curves(run):
    from matplotlib.figure import Figure  # slow, and only needed here

    rows, figure = list(read_jsonl(run / "metrics.jsonl")), Figure((11, 7), layout="constrained")
    panels = ("eval_accuracy reward", "length_pos length_neg", "entropy grad_norm",
              "net_advantage weight_spread")  # fmt: skip
    for axes, keys in zip(figure.subplots(2, 2).flat, panels):
        for key in keys.split():
            points = [(row["step"], row[key]) for row in rows if row[key] is not None]
            axes.plot(*zip(*points), label=key)
        axes.legend()
    figure.suptitle(f"{run.name}, by step")
    figure.savefig(run / "curves.png", dpi=130)


def load_policy(path, device):
    """In float32: steps of 1e-6 round to nothing in bf16. Dropout would make ratios noise."""
    settings = {"dtype": torch.float32, "attention_dropout": 0.0}
    return hf.AutoModelForCausalLM.from_pretrained(path, **settings).to(device)


def load_trainer(config, device):
    """(model, optimizer, steps done), from the resumed run's checkpoint if there is one."""
    saved = Path(config.resume, "checkpoint")
    resumed = config.resume and saved.exists()
    model = load_policy(saved if resumed else config.model, device)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = {"lr": config.lr, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    if config.zero and WORLD > 1:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    state = torch.load(saved / "trainer.pt", map_location="cpu") if resumed else {"step": 0}
    if resumed:
        optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, state["step"]


# ---- 10. The training loop.


def step_problems(problems, config, step):
    """P problems, from a stream shuffled anew in each pass: a function of (seed, step)."""
    batch, P, N = [], config.prompts_per_step, len(problems)
    for i in range((step - 1) * P, step * P):
        shuffle = torch.Generator().manual_seed(sample_seed(config.seed, "order", i // N))
        batch.append(problems[torch.randperm(N, generator=shuffle)[i % N]])
    return batch


def group_metrics(rewards, advantages, weights, lengths, truncated, surprise):
    """All [P, G]; surprise: minus the sum of a response's logprobs. Means, null where unknown."""
    signs = advantages > 0, advantages < 0  # [P, G] each
    length_pos, length_neg = ((lengths * sign).sum(dim=1) / sign.sum(dim=1) for sign in signs)
    spreads = [
        weights.where(sign, -math.inf).amax(dim=1) / weights.where(sign, math.inf).amin(dim=1)
        for sign in signs
    ]
    means = {
        "reward": rewards,
        "unscored": rewards.isnan(),
        "zero_spread": ~signs[0].any(dim=1),
        "length": lengths,
        "length_pos": length_pos,
        "length_neg": length_neg,
        "length_gap": length_neg - length_pos,
        "length_cv": lengths.std(dim=1, correction=0) / lengths.mean(dim=1),
        "truncated": truncated,
        "entropy": surprise.sum() / lengths.sum(),  # in nats, unbiased
        # The paper's two biases: `balanced` has 0 and 1, `token` not 0, `sequence` not 1.
        "net_advantage": (weights * lengths * advantages).sum(dim=1),
        "weight_spread": torch.maximum(*spreads),
    }
    means = {name: x.double().nanmean().item() for name, x in means.items()}
    known = {name: None if math.isnan(mean) else mean for name, mean in means.items()}
    return known | {"tokens": int(lengths.sum())}


def train(config, verifier):
    """Returns the run's folder, on rank 0."""
    device, G = setup_distributed(), config.group_size
    tokenizer = hf.AutoTokenizer.from_pretrained(config.model)
    problems, eval_problems = load_task(config, tokenizer)
    stop_ids, engine = stop_token_ids(tokenizer), None
    if config.engine == "vllm":  # before the trainer, while the GPU is empty
        longest = config.max_prompt_tokens + config.max_response_tokens
        engine = VLLMEngine(config.model, stop_ids, longest, config.vllm_memory)
        engine.sleep()
    model, optimizer, done = load_trainer(config, device)
    engine = engine or TransformersEngine(model, stop_ids)
    run, interrupted = open_run(config, done) if RANK == 0 else None, []
    if run and config.wandb:
        import wandb

        wandb.init(project="grpo_ba", name=run.name, config=vars(config))

    def on_interrupt(*_):  # the first Ctrl-C lets the step end
        interrupted.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def lap(part):
        clock.append(time.perf_counter())
        metrics[f"seconds_{part}"] += clock[-1] - clock[-2]

    def evaluate(updates):
        mine = eval_problems[RANK::WORLD]
        responses = rollout(engine, mine, 1, config, "evaluation")  # always from the same seeds
        rewards, _ = score(verifier, tokenizer, responses, mine)
        solved = sum(all_ranks((rewards == 1).sum().item()))
        metrics.update(eval_accuracy=solved / len(eval_problems), eval_step=updates)
        lap("eval")

    signal.signal(signal.SIGINT, on_interrupt)
    bar = tqdm(range(done + 1, config.steps + 1), run and run.name, disable=RANK > 0)
    for step in bar:
        last, clock = step == config.steps, [time.perf_counter()]
        metrics = {"step": step, "lr": config.lr, "eval_accuracy": None, "eval_step": None}
        metrics |= {f"seconds_{part}": 0.0 for part in ("rollout", "score", "update", "eval")}
        # 1. The engine takes the weights over; at times they are evaluated first.
        engine.load_weights(model)
        lap("rollout")
        if eval_problems and (step - 1) % config.eval_every == 0 and not last:
            evaluate(step - 1)
        # 2. Rollout: G responses to each of this rank's prompts.
        batch = step_problems(problems, config, step)[RANK::WORLD]
        responses = rollout(engine, batch, G, config, "rollout", step)
        engine.sleep()
        lap("rollout")
        # 3. Score: rewards [P, G].
        rewards, texts = score(verifier, tokenizer, responses, batch)
        lap("score")
        # 4. Advantages [P, G], and the weights of tokens [P, G].
        facts = [(len(r.ids), r.ids[-1] not in stop_ids, -r.logprobs.sum()) for r in responses]
        lengths, truncated, surprise = torch.tensor(facts).T.reshape(3, -1, G)  # [P, G] each
        advantages = group_advantages(rewards, config.normalize_std)
        weights = token_weights(config.aggregation, advantages, lengths)
        # 5. Update.
        for group in optimizer.param_groups:
            group["lr"] = config.lr  # not that of a checkpoint
        metrics |= update(model, optimizer, responses, advantages, weights, config)
        lap("update")
        # 6. Log and save.
        if eval_problems and last:  # a score of the policy that is saved
            engine.load_weights(model)
            evaluate(step)
            engine.sleep()
        groups = all_ranks([rewards, advantages, weights, lengths, truncated, surprise])
        metrics |= group_metrics(*map(torch.cat, zip(*groups)))
        stop = last or any(all_ranks(len(interrupted)))
        if run:
            append_jsonl(run / "metrics.jsonl", [metrics])
            shown = {"step": step} | {key: batch[0].get(key) for key in ("problem", "answer")}
            first_group = zip(texts, rewards[0].nan_to_num(-1).tolist())
            shown = [shown | {"text": t, "reward": r} for t, r in first_group]
            append_jsonl(run / "samples.jsonl", shown)
            if config.wandb:
                wandb.log(metrics)
        if stop or step % config.save_every == 0:
            if config.zero and WORLD > 1:
                optimizer.consolidate_state_dict()  # from all ranks, on rank 0
            if run:
                save(run, step, model, tokenizer, optimizer)
        bar.set_postfix(reward=metrics["reward"], length=metrics["length"])
        if stop:
            break
    if run:
        draw_curves(run)
        print(f"picture: {run}/curves.png   checkpoint: {run}/checkpoint")
        if config.wandb:
            wandb.finish()
        if interrupted:
            fail(f"interrupted after a whole step; go on with --resume {run}")
    return run


# ---- 11. Command line.


def main():
    """`--aggregation all`: each rule from the same start, with the same seeds."""
    config = parse()
    rules = list(AGGREGATIONS) if config.aggregation == "all" else [config.aggregation]
    with Verifier(unsafe_code=config.unsafe_code) as verifier:
        runs = [train(replace(config, aggregation=rule), verifier) for rule in rules]
    if len(runs) > 1 and RANK == 0:
        for run in runs:
            scores = [row["eval_accuracy"] or 0 for row in read_jsonl(run / "metrics.jsonl")]
            print(f"{run.name:24} accuracy: best {max(scores):.3f}, last {scores[-1]:.3f}")
        print("picture: python eval.py --compare", *runs)


def run_main(main):
    """What a user can mend ends in one sentence."""
    hf.utils.logging.disable_progress_bar()
    try:
        main()
    except torch.OutOfMemoryError:
        fail("the GPU is full; lower --micro_batch_tokens or --vllm_memory, or add --zero")
    except (OSError, ImportError) as error:  # something is not there
        fail(str(error).splitlines()[0])
    finally:
        if dist.is_initialized() and "vllm" not in sys.modules:  # vLLM ends its own
            dist.destroy_process_group()


if __name__ == "__main__":
    run_main(main)
