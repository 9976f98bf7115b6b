"""GRPO with Balanced Aggregation (Zeng et al., arXiv:2605.04077), in one file.

GRPO samples G responses per prompt, scores them with a verifier, normalises the rewards within the
group into advantages, and averages the clipped token losses. HOW it averages them is the paper's
subject. For one group, with l[i,t] the loss of token t of response i, |o_i| its length, and k the
number of responses with a positive advantage:

    sequence (GRPO)   1/G * sum_i 1/|o_i| * sum_t l[i,t]        every response weighs the same
    token    (DAPO)   1/sum_i |o_i| * sum_i sum_t l[i,t]        every token weighs the same
    balanced (BA)     k/G * mean of l over the tokens of positive responses
                      + (G-k)/G * mean of l over the tokens of negative responses

    python grpo_ba.py                         # a laptop: toy policy; a GPU: Qwen3-1.7B
    torchrun --nproc-per-node 8 grpo_ba.py    # eight GPUs

Left out on purpose: KL penalty, reward models, dynamic sampling, overlong penalties, LoRA, FSDP,
tensor parallelism, asynchronous rollouts, several nodes, heads with a bias or scaled logits.
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
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
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
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's

# ---------- 1. Config. Sizes: P prompts, G responses per prompt, B = P*G responses, T tokens, V vocabulary.


def arg(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    preset: str = arg("", "toy, qwen3-1.7b-dapo ... (default: by hardware)")
    name: str = arg("", "the run's folder is runs/NAME")
    resume: str = arg("", "folder of a run to go on with")
    seed: int = arg(0, "of data order, sampling and evaluation")
    wandb: bool = arg(False, "log to Weights & Biases too")
    model: str = arg("", "transformers checkpoint, folder or hub id")
    train_data: str = arg("", "problems: .jsonl, .parquet or hub id[:config]")
    eval_data: str = arg("", "likewise, with commas: the first is evaluated, none is trained on")
    instruction: Literal["suffix", "system", "none"] = arg("suffix", "where to ask for a box")
    enable_thinking: bool = arg(False, "let Qwen3 open a <think> block")
    unsafe_code: bool = arg(False, "run programs without the sandbox")
    max_prompt_tokens: int = arg(1024, "longer prompts are dropped")
    max_response_tokens: int = arg(200, "longer responses are cut")
    aggregation: Literal["sequence", "token", "balanced", "all"] = arg("balanced", "all: in turn")
    prompts_per_step: int = arg(8, "P, prompts per rollout")
    group_size: int = arg(8, "G, responses per prompt")
    minibatches: int = arg(1, "optimizer steps per rollout")
    normalize_std: bool = arg(True, "divide advantages by the group's std")
    clip_low: float = arg(0.2, "the ratio is clipped to 1 - clip_low")
    clip_high: float = arg(0.28, "and 1 + clip_high (DAPO's clip-higher)")
    tis_cap: float = arg(2.0, "truncated importance sampling; 0: off")
    temperature: float = arg(1.0, "of sampling and of all logprobs")
    steps: int = arg(100, "rollouts to train on")
    lr: float = arg(1e-6, "AdamW learning rate")
    lr_warmup_steps: int = arg(0, "steps of linear warm-up")
    weight_decay: float = arg(0.0, "of AdamW")
    max_grad_norm: float = arg(1.0, "gradients are clipped to this norm")
    eval_every: int = arg(10, "evaluate every so many steps")
    eval_problems: int = arg(256, "held-out problems, one response each")
    save_every: int = arg(10, "checkpoint every so many steps")
    engine: Literal["vllm", "transformers"] = arg("vllm" if CUDA else "transformers", "who samples")
    vllm_memory: float = arg(0.4, "share of the GPU that vLLM may take")
    micro_batch_tokens: int = arg(4096, "padded tokens per forward pass")
    gradient_checkpointing: bool = arg(False, "recompute activations in the backward pass")
    zero: bool = arg(False, "shard the optimizer state over the ranks (ZeRO-1)")


def toy(world):
    """A 0.3 M-parameter Qwen3 that adds digits modulo 5; made by tests/make_toy.py."""
    folder = f"{Path(__file__).resolve().parent}/.assets/{world}"
    return {
        "model": folder, "train_data": f"{folder}/train.jsonl", "eval_data": f"{folder}/eval.jsonl",
        "instruction": "none", "minibatches": 2, "steps": 40, "lr": 2e-4, "eval_every": 4,
        "max_prompt_tokens": 64, "micro_batch_tokens": 1024,
    }  # fmt: skip


# The paper's batch and length settings are not public to us: README says what is whose.
GPU = {
    "prompts_per_step": 128, "minibatches": 4, "steps": 400, "gradient_checkpointing": True,
    "eval_data": "HuggingFaceH4/MATH-500,HuggingFaceH4/aime_2024,math-ai/aime25,"
    "math-ai/minervamath,Hothan/OlympiadBench:OE_TO_maths_en_COMP",
}  # fmt: skip
QWEN3 = {"model": "Qwen/Qwen3-1.7B", "max_response_tokens": 8192, "micro_batch_tokens": 32768}
QWEN25 = {
    "model": "Qwen/Qwen2.5-Math-7B", "max_response_tokens": 3072, "micro_batch_tokens": 8192,
    "instruction": "system", "zero": True,
}  # fmt: skip
DAPO = {"train_data": "open-r1/DAPO-Math-17k-Processed:all"}
POLARIS = {"train_data": "POLARIS-Project/Polaris-Dataset-53K"}
PRESETS = {  # fields of Config; the flags given override them
    "toy": toy("toy-rambler"),  # right answers are short and rare, wrong ones ramble on
    "toy-guesser": toy("toy-guesser"),  # a short guess is right half the time
    "qwen3-1.7b-dapo": GPU | QWEN3 | DAPO,
    "qwen3-1.7b-polaris": GPU | QWEN3 | POLARIS,
    "qwen2.5-math-7b-dapo": GPU | QWEN25 | DAPO,
    "qwen2.5-math-7b-polaris": GPU | QWEN25 | POLARIS,
}


def parse_flags(cls, doc, argv=None, **defaults):
    """Command line -> cls: its own defaults, then these, then the flags given."""
    parser = hf.HfArgumentParser(cls, description=doc.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: fail(f"{message}; --help explains every flag")
    parser.set_defaults(**defaults)
    return cls(**vars(parser.parse_args(argv)))


def parse(argv=None):
    """Command line -> Config. Refuses what cannot work before anything is loaded."""
    given = parse_flags(Config, __doc__, argv)
    by_hardware = "" if given.model or given.train_data else "qwen3-1.7b-dapo" if CUDA else "toy"
    preset = given.preset or by_hardware
    if preset not in ("", *PRESETS):
        fail(f"--preset {preset}: unknown; choose one of {', '.join(PRESETS)}")
    defaults = {"preset": preset} | PRESETS.get(preset, {})
    if given.resume:
        defaults = json.loads(Path(given.resume, "config.json").read_text())
    c = parse_flags(Config, __doc__, argv, **defaults)
    for name, value in asdict(c).items():
        may_be_zero = name in ("seed", "lr", "lr_warmup_steps", "weight_decay", "tis_cap")
        if type(value) in (int, float) and not (value > 0 or may_be_zero and value == 0):
            fail(f"--{name} {value}: must be more than 0")
    if not (c.model and c.train_data):
        fail("--model and --train_data belong together: give both, or neither")
    if c.prompts_per_step % (c.minibatches * WORLD):
        fail(f"--prompts_per_step {c.prompts_per_step}: must be a multiple of minibatches x ranks")
    if c.micro_batch_tokens < c.max_prompt_tokens + c.max_response_tokens:
        fail(f"--micro_batch_tokens {c.micro_batch_tokens}: less than a prompt and a response take")
    if c.aggregation == "all" and (WORLD > 1 or c.resume):
        fail("--aggregation all: runs in one process; leave out torchrun and --resume")
    return c


def print0(text):
    if RANK == 0:
        tqdm.write(text)  # above any progress bar


# ---------- 2. Prompts: data sets become problems {"problem", "answer"} or, for code, {"problem",
# "tests", "func_name"}; a chat template turns a problem into token ids, once.

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."  # Qwen's words


def read_rows(source, split="train", revision=None):
    """Rows of a file, or of a hub data set: of this split, or of its first."""
    if source.endswith(".jsonl"):  # not through arrow, which refuses answers of mixed types
        with open(source, encoding="utf-8-sig") as file:
            lines = [line for line in file if line.strip()]
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            fail(f"data {source}: not a JSON object a line ({error})")
    if source.endswith(".parquet"):
        return load_dataset("parquet", data_files=source, split="train")
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
        text, golds = problem_text(row), gold_texts(row.get("answer", row.get("solution")))
        scored_by = {"answer": golds}  # any of these is right
        if row.get("tests"):
            scored_by = {"tests": row["tests"], "func_name": row.get("func_name")}
        if not text or scored_by == {"answer": []}:
            dropped["without a verifiable answer"] += 1
        elif text in excluded:
            dropped["in an evaluation set"] += 1
        elif found.setdefault(text, scored_by) != scored_by:
            found[text] = None  # two answers to one problem: neither is to be trusted
    problems = [{"problem": text} | by for text, by in found.items() if by]
    dropped["repeated or in conflict"] = len(rows) - len(problems) - dropped.total()
    counts = ", ".join(f"{n:,} {what}" for what, n in dropped.items())
    print0(f"{source}: {len(rows):,} rows, {len(problems):,} problems ({counts})")
    if not problems:
        fail(f"data {source}: no usable row; needed are problem and answer, or prompt and solution")
    return problems


def encode_prompt(tokenizer, problem, instruction="suffix", enable_thinking=False):
    """Token ids of one prompt, in training and in eval.py. A problem is text, or chat messages."""
    messages = problem
    if isinstance(problem, str):
        text = f"{problem}\n{BOXED}" if instruction == "suffix" else problem
        messages = [{"role": "user", "content": text}]
        if instruction == "system":
            messages.insert(0, {"role": "system", "content": BOXED})
    # Without thinking, Qwen3's template pre-fills an empty think block (transformers#37949).
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=enable_thinking, return_dict=False
    )


def load_task(config, tokenizer):
    """[problems to train on, held-out problems], with their prompt_ids."""
    names, limit = [n for n in config.eval_data.split(",") if n], config.max_prompt_tokens
    held_out = load_problems(names[0], "test") if names else []
    random.Random(0).shuffle(held_out)
    excluded = {problem_text(row) for name in names for row in read_rows(name, "test")}
    task = [load_problems(config.train_data, "train", excluded), held_out[: config.eval_problems]]
    for i, problems in enumerate(task):
        for p in problems:
            how = "none" if "tests" in p else config.instruction
            p["prompt_ids"] = encode_prompt(tokenizer, p["problem"], how, config.enable_thinking)
        task[i] = [p for p in problems if len(p["prompt_ids"]) <= limit]
        print0(f"{len(problems) - len(task[i]):,} prompts of over {limit} tokens dropped")
        if problems and not task[i]:
            fail(f"--max_prompt_tokens {limit}: no prompt is that short; raise it")
    if any("tests" in p for p in task[0]):
        require_sandbox(config.unsafe_code)
    return task


# ---------- 3. Rollout: two engines with one interface. Prompts go in as token ids and the sampled
# ids are kept: no text is tokenised twice. Every sampling field is explicit, so no checkpoint's
# generation_config can change the policy (trl#6789).


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0  # training must keep 1 and -1: else the logprobs are another policy's
    top_k: int = -1


@dataclass
class Response:
    prompt_ids: torch.Tensor  # [prompt tokens]
    ids: torch.Tensor  # [|o|], the stop token included: it is a token like any other
    logprobs: torch.Tensor  # [|o|], under the distribution it was sampled from
    finish_reason: str  # "stop", or "length" when cut at max_tokens


def sample_seed(*key):
    """From what is sampled (seed, step, prompt, response), not from where: any number of ranks
    samples the same, and so does a resumed run."""
    return random.Random(repr(key)).getrandbits(31)


def stop_token_ids(tokenizer):
    """Qwen3 ends responses with two tokens, and its tokenizer names only one."""
    names = {tokenizer.eos_token, "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>"}
    return sorted(id for token, id in tokenizer.get_vocab().items() if token in names)


class TransformersEngine:
    """Samples from the trained model itself: batched, with a KV cache, finished rows dropped."""

    def __init__(self, model, stop_ids, rows=256):
        self.model, self.stop_ids, self.rows = model, stop_ids, rows

    def load_weights(self, model):
        """Nothing to push."""

    def sleep(self):
        """Nothing to release."""

    @torch.no_grad()
    def generate(self, prompts, n, sampling, seeds):
        """n responses to each prompt, prompt by prompt. prompts: lists of token ids; seeds: one per
        response, which depends on it, its prompt and the weights, not on its neighbours."""
        some = max(1, self.rows // n)
        if len(prompts) > some:
            first = self.generate(prompts[:some], n, sampling, seeds[: some * n])
            return first + self.generate(prompts[some:], n, sampling, seeds[some * n :])
        self.model.eval()
        device, limit, B = self.model.device, sampling.max_tokens, len(seeds)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniforms = torch.stack([torch.rand(limit, generator=g) for g in generators]).to(device)
        prompts = [torch.tensor(prompt) for prompt in prompts]
        mask = pad_sequence([torch.ones_like(p) for p in prompts], True, 0, "left").to(device)
        token = pad_sequence(prompts, True, 0, "left").to(device)  # any id will do: it is masked
        ids = torch.full((B, limit), -1, device=device)  # -1: not sampled
        logprobs = torch.zeros(B, limit, device=device)
        rows = torch.arange(B, device=device)  # those still being written
        stops, cache = torch.tensor(self.stop_ids, device=device), None
        for t in range(limit):
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -token.shape[1] :]
            output = self.model(
                input_ids=token, attention_mask=mask, position_ids=positions,
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            cache, logits = output.past_key_values, output.logits[:, -1] / sampling.temperature
            if t == 0:  # each prompt was read once, for all its n responses
                cache.batch_repeat_interleave(n)
                mask, logits = (x.repeat_interleave(n, dim=0) for x in (mask, logits))
            if sampling.top_k > 0:
                logits = hf.TopKLogitsWarper(sampling.top_k)(None, logits)
            if sampling.top_p < 1:
                logits = hf.TopPLogitsWarper(sampling.top_p)(None, logits)
            logp = logits.log_softmax(dim=-1)  # [rows, V]
            # Inverse CDF: the first token at which the cumulative probability passes u.
            cdf = logp.double().exp().cumsum(dim=-1)
            u = uniforms[rows, t].double()[:, None] * cdf[:, -1:]
            token = torch.searchsorted(cdf, u, right=True).clamp(max=cdf.shape[1] - 1)  # [rows, 1]
            ids[rows, t], logprobs[rows, t] = token[:, 0], logp.gather(1, token)[:, 0].float()
            going_on = ~torch.isin(token[:, 0], stops)
            if not going_on.all():
                rows, token, mask = rows[going_on], token[going_on], mask[going_on]
                if len(rows) == 0:
                    break
                cache.batch_select_indices(going_on.nonzero()[:, 0])
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        responses = []
        for i, length in enumerate((ids >= 0).sum(dim=1)):
            own = ids[i, :length].cpu(), logprobs[i, :length].cpu()
            reason = "stop" if own[0][-1] in self.stop_ids else "length"
            responses.append(Response(prompts[i // n], *own, reason))
        return responses


class VLLMEngine:
    """vLLM in this very process and on this very GPU: asleep while the trainer works."""

    def __init__(self, path, stop_ids, max_model_len, memory_share=0.4, seed=0):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process: weights are handed over
        import vllm

        self.vllm, self.stop_ids = vllm, stop_ids
        self.llm = vllm.LLM(
            path, seed=seed, max_model_len=max_model_len, gpu_memory_utilization=memory_share,
            dtype="bfloat16" if CUDA else "float32", enable_sleep_mode=CUDA, enforce_eager=not CUDA,
            enable_chunked_prefill=CUDA,  # on a CPU each chunk would use up a random number
            generation_config="vllm",  # not the checkpoint's sampling defaults
            logprobs_mode="processed_logprobs",  # after temperature: of the policy that samples
            distributed_executor_backend="external_launcher" if WORLD > 1 else None,
        )  # fmt: skip

    def load_weights(self, model):
        """Takes over the trainer's weights, in memory. The KV cache wakes last, or both models and
        the cache would be there at once (vllm#15254)."""
        self.llm.wake_up(tags=["weights"])
        weights = iter(model.state_dict().items())  # a tied head under both its names
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()  # it belongs to the old weights

    def sleep(self):
        """Drops weights and KV cache."""
        self.llm.sleep(level=2)

    def generate(self, prompts, n, sampling, seeds):
        """As TransformersEngine.generate."""
        repeated = [prompt for prompt in prompts for _ in range(n)]  # prefix caching shares them
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in repeated],
            [
                self.vllm.SamplingParams(
                    seed=seed, **asdict(sampling), stop_token_ids=self.stop_ids, detokenize=False,
                    logprobs=0, flat_logprobs=True,
                )
                for seed in seeds
            ],
            use_tqdm=partial(tqdm, leave=False, delay=2) if RANK == 0 else False,
        )  # fmt: skip
        responses = []
        for prompt, output in zip(repeated, outputs):
            o = output.outputs[0]
            parts = (torch.tensor(x) for x in (prompt, o.token_ids, o.logprobs.logprobs))
            responses.append(Response(*parts, o.finish_reason))
        return responses


def rollout(engine, problems, n, config, *key):
    """n responses to each problem. The ranks share a step's problems in turn: number i here is
    number RANK + i * WORLD of the step."""
    places = [(RANK + i * WORLD, g) for i in range(len(problems)) for g in range(n)]
    seeds = [sample_seed(config.seed, *key, *place) for place in places]
    sampling = Sampling(config.max_response_tokens, config.temperature)
    prompts = [p["prompt_ids"] for p in problems]  # none, on a rank with nothing to evaluate
    return engine.generate(prompts, n, sampling, seeds) if prompts else []


# ---------- 4. Reward: verify.py's workers say 1 or 0 for each response.


def response_text(tokenizer, response):
    """What the scorer reads. Where the template ends the prompt with <think>, the response begins
    inside the reasoning, where no answer counts."""
    opened = tokenizer.decode(response.prompt_ids[-8:]).rstrip().endswith("<think>")
    return "<think>" * opened + tokenizer.decode(response.ids, skip_special_tokens=True)


def score(verifier, tokenizer, responses, problems):
    """responses [B], prompt by prompt; problems [P] -> rewards [P, G], NaN where the scorer itself
    failed, and the texts [B]."""
    G = len(responses) // max(1, len(problems))
    texts = [response_text(tokenizer, response) for response in responses]
    verdicts = verifier.score(texts, [problem for problem in problems for _ in range(G)])
    rewards = [math.nan if v.reason == "sandbox_error" else v.reward for v in verdicts]
    return torch.tensor(rewards).view(len(problems), G), texts


# ---------- 5. Advantage: how much better than its group a response did. One number per response.


def group_advantages(rewards, normalize_std=True, eps=1e-6):
    """rewards [P, G] -> advantages [P, G]: (r - mean) / (std + eps) within each group.

    The std is the population's; TRL's and verl's (ddof 1) scales all groups of size G alike. A group
    without spread gets exactly 0, as does a reward that is its group's mean: a rounding error of
    the mean must not be blown up by a tiny std (NeMo-RL#4161) nor have a sign. A group with an
    unknown reward (NaN) gets 0 too.
    """
    deviations = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.amax(dim=1, keepdim=True) - rewards.amin(dim=1, keepdim=True)
    std = rewards.std(dim=1, correction=0, keepdim=True)
    advantages = deviations / (std + eps) if normalize_std else deviations
    return torch.where((spread > 0) & (deviations.abs() > 1e-5 * spread), advantages, 0.0)


# ---------- 6. Aggregation: the paper. A rule is one number per response, the weight of each of its
# tokens: group loss = sum_i w_i * sum_t l[i,t], batch loss = mean over groups. The weights are
# computed once, over whole groups, and nothing below may rescale them. To try your own rule, add
# a function to AGGREGATIONS and its name to Config.aggregation.


def sequence(advantages, lengths):
    """GRPO:  1/G * sum_i 1/|o_i| * sum_t l[i,t]"""
    G = lengths.shape[1]
    return 1 / (G * lengths.clamp(min=1))  # a response without tokens has nothing to weigh


def token(advantages, lengths):
    """DAPO, over the group as its formula says:  1/sum_i |o_i| * sum_i sum_t l[i,t]"""
    T = lengths.sum(dim=1, keepdim=True)
    return (1 / T.clamp(min=1)).expand_as(lengths)


def balanced(advantages, lengths):
    """BA:  k/G * mean of l over positive tokens + (G-k)/G * mean of l over negative tokens

    A response with A = 0, which binary rewards never give in a group with spread, counts for G
    alone: k and the tokens are those of one strict sign.
    """
    G = lengths.shape[1]
    weights = torch.zeros_like(lengths)
    for one_sign in (advantages > 0, advantages < 0):  # [P, G] each; A = 0 is in neither
        k = one_sign.sum(dim=1, keepdim=True, dtype=lengths.dtype)
        T = (lengths * one_sign).sum(dim=1, keepdim=True)  # tokens of this sign only
        weights = weights + one_sign * (k / G) / T.clamp(min=1)
    return weights


AGGREGATIONS = {"sequence": sequence, "token": token, "balanced": balanced}


def token_weights(rule, advantages, lengths):
    """advantages [P, G], lengths [P, G] in tokens -> weights [P, G], of each token in its group.

    At G = 2 `sequence` and `balanced` agree; where all responses are equally long, all three do.
    """
    return AGGREGATIONS[rule](advantages, lengths.to(advantages.dtype))


# ---------- 7. Loss: PPO's clipped objective with separate bounds, per token, and nothing else.


def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    """All of one shape, [T] or [B, T]. Returns (loss, is_clipped), per token. A clipped token's
    gradient is zero: its ratio has moved beyond the bound in the direction its advantage asks for.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = ratio * advantages > clipped * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages), is_clipped


# ---------- 8. Update: minibatches of whole groups (one optimizer step each), cut into micro-batches
# (one forward pass each) by a token budget. Gradients are only ever added, since the weights of
# section 6 hold every denominator: no batching, sorting or sharding can change them. torchrun
# starts one process a GPU, each with a model, an engine and a share of the groups.


def setup_distributed():
    """This process's device. Joins torchrun's process group where there is one."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else "cpu"
    if CUDA:
        torch.cuda.set_device(device)
    if WORLD > 1 and not dist.is_initialized():
        # Ranks wait for the longest rollout; one that dies is torchrun's to notice, not ours.
        dist.init_process_group("nccl" if CUDA else "gloo", timeout=timedelta(hours=2))
    return device


def all_ranks(value):
    """A list of every rank's value; they wait for one another here."""
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values


def head_logprobs(hidden, weight, targets, temperature):
    """hidden [t, H], weight [V, H], targets [t] -> log-probabilities [t] of the targets."""
    logits = F.linear(hidden / temperature, weight).to(weight.dtype)  # [t, V], back in float32
    return -F.cross_entropy(logits, targets, reduction="none")


def response_logprobs(model, responses, temperature, chunk=2048):
    """Log-probabilities [T] of all T response tokens of one micro-batch, response by response.

    Padding is on the right, where no real token sees it: no mask is needed. Which positions count
    follows from the lengths, never from token ids: many models pad with their EOS token, and EOS
    must be trained (trl#4970). With Qwen3's V = 151,936 the logits of 4,096 tokens take 2.5 GB: so
    `chunk` tokens pass the head at a time, and once more in the backward pass.
    """
    device, weight = model.device, model.get_output_embeddings().weight
    rows = [torch.cat([r.prompt_ids, r.ids]) for r in responses]
    padded = pad_sequence(rows, batch_first=True).to(device)  # [rows, longest row]
    targets = torch.cat([r.ids for r in responses]).to(device)  # [T]
    # No autocast cache: it would keep a bf16 copy of every weight, which one pass uses once.
    with torch.autocast(device.type, torch.bfloat16, CUDA, cache_enabled=False):
        hidden = model.base_model(input_ids=padded, use_cache=False).last_hidden_state
        # The token at position t is predicted at t - 1: from the prompt's last token on.
        spans = [(len(r.prompt_ids) - 1, len(r.ids)) for r in responses]
        hidden = torch.cat([row[i : i + n] for row, (i, n) in zip(hidden, spans)])  # [T, H]
        parts = [
            checkpoint(head_logprobs, h, weight, t, temperature, use_reentrant=False)
            for h, t in zip(hidden.split(chunk), targets.split(chunk))
        ]
    return torch.cat(parts)


def micro_batches(rows, lengths, budget):
    """The rows, longest first, cut so that rows * longest row <= budget tokens. A row under 0.8 of
    the longest starts a new batch: filling up would pad up to 27%."""
    batches = []
    for row in sorted(rows, key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if lengths[row] >= 0.8 * longest > 0 and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def update(model, optimizer, responses, advantages, weights, config):
    """Trains on this rank's share of the responses [B], advantages [P, G] and weights [P, G].
    Returns metrics, the same on every rank: means over the trained tokens of all ranks."""
    model.train()
    advantages, weights = advantages.flatten(), weights.flatten()  # [B], as the responses
    counts = torch.tensor([len(r.ids) for r in responses])  # [B]
    lengths = [len(r.prompt_ids) + len(r.ids) for r in responses]
    # A response with A = 0 (or without tokens) adds nothing to any gradient: it is not computed.
    trained = ((advantages != 0) & (counts > 0)).nonzero()[:, 0].tolist()
    size = len(responses) // config.minibatches  # whole groups
    groups_per_minibatch = config.prompts_per_step // config.minibatches  # of all ranks together
    sums, mismatch_max, norms = Counter(), 0.0, []

    def passes(rows):
        """Forward passes: (some of the rows, their logprobs, one tensor each)."""
        for batch in micro_batches(rows, lengths, config.micro_batch_tokens):
            some = [responses[i] for i in batch]
            logprobs = response_logprobs(model, some, config.temperature)
            yield batch, logprobs.split(counts[batch].tolist())

    # Old logprobs are the trainer's, with the weights that sampled. The first minibatch meets those
    # weights in its own forward pass; the others need one more, before the first step.
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
            # The engine's kernels make a slightly different policy: truncated importance sampling
            # reweighs by trainer over engine, at most tis_cap.
            mismatch = old - torch.cat([responses[i].logprobs for i in rows]).to(old)
            if config.tis_cap:
                loss = loss * mismatch.exp().clamp(max=config.tis_cap)
            loss = (w * loss).sum() / groups_per_minibatch  # they add up to the mean over groups
            loss.backward()
            log_ratio = logprobs.detach() - old
            sums.update(
                tokens=len(A),
                approx_kl=(log_ratio.exp() - 1 - log_ratio).sum().item(),
                clip_low=(is_clipped & (A < 0)).sum().item(),
                clip_high=(is_clipped & (A > 0)).sum().item(),
                mismatch_kl=(mismatch.exp() - 1 - mismatch).sum().item(),
                tis_truncated=(mismatch.exp() > (config.tis_cap or math.inf)).sum().item(),
                computed=len(rows) * lengths[rows[0]],
                needed=sum(lengths[i] for i in rows),
            )
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
    names = ("approx_kl", "clip_low", "clip_high", "mismatch_kl", "tis_truncated")
    return {
        **{name: sums[name] / sums["tokens"] if sums else None for name in names},
        "mismatch_max": max(all_ranks(mismatch_max)) if sums else None,
        "grad_norm": sum(norms) / max(1, len(norms)),
        "skipped": config.minibatches - len(norms),
        "padding": 1 - sums["needed"] / max(1, sums["computed"]),
    }


# ---------- 9. The run's folder: config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoint/.
# A killed run goes on from it as if nothing had been. No random state is kept: nothing draws from
# torch's own generator.


def write_atomic(path, text):
    """The file is there whole or not at all."""
    Path(f"{path}.tmp").write_text(text, encoding="utf-8")
    os.replace(f"{path}.tmp", path)


def append_jsonl(path, rows):
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_jsonl(path):
    """Its rows, without a last line that a crash cut off."""
    if Path(path).exists():
        with open(path, encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


def open_run(config, done):
    """The run's folder. A resumed one loses the log lines of steps that will be done again."""
    name = config.name or f"{config.preset or Path(config.model).name}-{config.aggregation}"
    run = Path(config.resume or f"runs/{name}")
    if run.exists() and not config.resume:
        run = Path(f"{run}-{time.strftime('%m%d-%H%M%S')}")
    run.mkdir(parents=True, exist_ok=True)
    write_atomic(run / "config.json", json.dumps(asdict(config), indent=2))
    for path in (run / "metrics.jsonl", run / "samples.jsonl"):
        rows = [row for row in read_jsonl(path) if row["step"] <= done]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return run


def save(run, step, model, tokenizer, optimizer):
    """A folder cannot be replaced in one stroke: the old checkpoint steps aside until the new one
    has its name."""
    folder, new, old = (run / f"checkpoint{end}" for end in ("", ".new", ".old"))
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, new / "trainer.pt")
    if folder.exists():  # else a crash came between the two renames, and the old one is all
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def draw_curves(run):
    from matplotlib.figure import Figure  # not needed by who only imports token_weights

    rows = list(read_jsonl(run / "metrics.jsonl"))
    figure = Figure(figsize=(11, 6.5), dpi=130, layout="constrained")
    figure.suptitle(run.name)
    pairs = ("eval_accuracy reward", "length_pos length_neg", "entropy grad_norm",
             "net_advantage weight_spread")  # fmt: skip
    for axes, pair in zip(figure.subplots(2, 2).flat, pairs):
        for key in pair.split():
            step = "eval_step" if key == "eval_accuracy" else "step"
            known = [row for row in rows if row[key] is not None]
            axes.plot([row[step] for row in known], [row[key] for row in known], label=key)
        axes.set_xlabel("step")
        axes.legend()
    figure.savefig(run / "curves.png")


def load_policy(path, device):
    """Master weights are float32 (AdamW at 1e-6 rounds to nothing in bf16). Dropout is off: it would
    give one policy two different logprobs."""
    return hf.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", attention_dropout=0.0
    ).to(device)


def load_trainer(config, device):
    """(model, optimizer, steps done): of the start, or of the resumed run's last checkpoint."""
    folders = [Path(config.resume, "checkpoint"), Path(config.resume, "checkpoint.old")]
    saved = [folder for folder in folders if config.resume and (folder / "trainer.pt").exists()]
    model = load_policy(saved[0] if saved else config.model, device)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    make = torch.optim.AdamW
    if config.zero and WORLD > 1:
        make = partial(ZeroRedundancyOptimizer, optimizer_class=make)
    optimizer = make(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    if not saved:
        return model, optimizer, 0
    state = torch.load(saved[0] / "trainer.pt", map_location="cpu")
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, state["step"]


# ---------- 10. Training loop: rollout, score, advantages, weights, update, log.


def step_problems(problems, config, step):
    """The P problems of one step, from an endless stream, shuffled anew in each pass. They depend
    on (seed, step) alone, so a resumed run needs no data cursor."""
    batch, P, N = [], config.prompts_per_step, len(problems)
    for i in range((step - 1) * P, step * P):
        shuffle = torch.Generator().manual_seed(sample_seed(config.seed, "order", i // N))
        batch.append(problems[torch.randperm(N, generator=shuffle)[i % N]])
    return batch


def group_metrics(rewards, advantages, weights, lengths, truncated, surprise):
    """All [P, G]; surprise is minus the sum of a response's logprobs. A mean that needs both signs is
    over groups with spread, and null where there is none."""
    signs = advantages > 0, advantages < 0  # [P, G] each
    length_pos, length_neg = ((lengths * sign).sum(dim=1) / sign.sum(dim=1) for sign in signs)
    largest_over_smallest = [
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
        "entropy": surprise.sum() / lengths.sum(),  # in nats, an unbiased estimate
        # The two biases of the paper as numbers. `token`: the sign with the longer responses
        # outweighs the other; `sequence`: tokens of one sign differ in weight as lengths do.
        "net_advantage": (weights * lengths * advantages).sum(dim=1),
        "weight_spread": torch.maximum(*largest_over_smallest),
    }
    means = {name: x.double().nanmean().item() for name, x in means.items()}
    means = {name: None if math.isnan(mean) else mean for name, mean in means.items()}
    return means | {"tokens": int(lengths.sum())}


def train(config, verifier):
    """The whole run. Returns its folder (on rank 0)."""
    device, G = setup_distributed(), config.group_size
    tokenizer = hf.AutoTokenizer.from_pretrained(config.model)
    problems, eval_problems = load_task(config, tokenizer)
    stop_ids, engine = stop_token_ids(tokenizer), None
    if config.engine == "vllm":  # before the trainer, while the GPU is empty
        longest = config.max_prompt_tokens + config.max_response_tokens
        engine = VLLMEngine(config.model, stop_ids, longest, config.vllm_memory, config.seed)
        engine.sleep()
    model, optimizer, done = load_trainer(config, device)
    engine = engine or TransformersEngine(model, stop_ids)
    run, interrupted = open_run(config, done) if RANK == 0 else None, []
    if run and config.wandb:
        import wandb

        wandb.init(project="grpo_ba", name=run.name, config=asdict(config))

    def on_interrupt(*_):  # the first Ctrl-C lets the step end, the second does not
        interrupted.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def lap(part):
        clock.append(time.perf_counter())
        metrics[f"seconds_{part}"] += clock[-1] - clock[-2]

    def evaluate(updates):
        """Share of held-out problems solved, with the same random numbers each time."""
        mine = eval_problems[RANK::WORLD]
        responses = rollout(engine, mine, 1, config, "evaluation")
        rewards, _ = score(verifier, tokenizer, responses, mine)
        solved = sum(all_ranks((rewards == 1).sum().item()))
        metrics.update(eval_accuracy=solved / len(eval_problems), eval_step=updates)
        lap("eval")

    signal.signal(signal.SIGINT, on_interrupt)
    bar = tqdm(total=config.steps, initial=done, desc=run and run.name, disable=RANK > 0)
    for step in range(done + 1, config.steps + 1):
        last, clock = step == config.steps, [time.perf_counter()]
        metrics = {"step": step, "eval_accuracy": None, "eval_step": None}
        metrics |= {f"seconds_{part}": 0.0 for part in ("rollout", "score", "update", "eval")}
        # 1. The engine takes the weights over. They are evaluated before every eval_every-th step,
        #    and after the last, so that a run ends with a score of the policy that it saved.
        engine.load_weights(model)
        lap("rollout")
        if eval_problems and (step - 1) % config.eval_every == 0 and not last:
            evaluate(step - 1)
        # 2. Rollout: G responses to each of this rank's P/WORLD prompts.
        batch = step_problems(problems, config, step)[RANK::WORLD]
        responses = rollout(engine, batch, G, config, "rollout", step)
        engine.sleep()
        lap("rollout")
        # 3. Score: rewards [P, G].
        rewards, texts = score(verifier, tokenizer, responses, batch)
        lap("score")
        # 4. Advantages [P, G], and the weight of each response's tokens [P, G].
        facts = [(len(r.ids), r.finish_reason == "length", -r.logprobs.sum()) for r in responses]
        lengths, truncated, surprise = torch.tensor(facts).T.reshape(3, -1, G)  # [P, G] each
        advantages = group_advantages(rewards, config.normalize_std)
        weights = token_weights(config.aggregation, advantages, lengths)
        # 5. Update.
        metrics["lr"] = config.lr * min(1, step / max(1, config.lr_warmup_steps))
        for group in optimizer.param_groups:
            group.update(lr=metrics["lr"], weight_decay=config.weight_decay)
        metrics |= update(model, optimizer, responses, advantages, weights, config)
        lap("update")
        # 6. Log and save.
        if eval_problems and last:
            engine.load_weights(model)
            evaluate(step)
            engine.sleep()
        groups = all_ranks([rewards, advantages, weights, lengths, truncated, surprise])
        metrics |= group_metrics(*map(torch.cat, zip(*groups)))
        stop = last or any(all_ranks(len(interrupted)))
        if run:
            shown = {"step": step, "problem": batch[0]["problem"], "answer": batch[0].get("answer")}
            shown = [
                shown | {"text": t, "reward": r}
                for t, r in zip(texts, rewards[0].nan_to_num(-1).tolist())
            ]
            append_jsonl(run / "metrics.jsonl", [metrics])
            append_jsonl(run / "samples.jsonl", shown)
            if config.wandb:
                wandb.log(metrics)
        if stop or step % config.save_every == 0:
            if config.zero and WORLD > 1:
                optimizer.consolidate_state_dict()  # from all ranks, on rank 0
            if run:
                save(run, step, model, tokenizer, optimizer)
        bar.update()
        bar.set_postfix_str(f"reward {metrics['reward'] or 0:.3f}, length {metrics['length']:.0f}")
        if stop:
            break
    bar.close()
    if run:
        draw_curves(run)
        print0(f"picture: {run}/curves.png   checkpoint: {run}/checkpoint")
    if interrupted:
        fail(f"interrupted after a whole step; go on with --resume {run}")
    return run


# ---------- 11. Command line.


def main():
    """`--aggregation all` trains every rule from the same start, with the same random numbers."""
    config, runs = parse(), {}
    rules = list(AGGREGATIONS) if config.aggregation == "all" else [config.aggregation]
    with Verifier(unsafe_code=config.unsafe_code) as verifier:
        for rule in rules:
            runs[rule] = train(replace(config, aggregation=rule), verifier)
    if len(rules) > 1:
        for rule, run in runs.items():
            scores = [row["eval_accuracy"] or 0 for row in read_jsonl(run / "metrics.jsonl")]
            print(f"{rule:10} accuracy: best {max(scores):.3f}, last {scores[-1]:.3f}")
        print("picture: python eval.py --compare", *runs.values())


def run_main(main):
    """Runs it; what a user can mend ends in one sentence."""
    hf.utils.logging.disable_progress_bar()
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; --resume goes on with a run whose folder is there")
    except torch.OutOfMemoryError:
        fail("the GPU is full; lower --micro_batch_tokens, --max_response_tokens or --vllm_memory, "
             "or add --gradient_checkpointing or --zero")  # fmt: skip
    except (OSError, ImportError) as error:  # a model, a file or a package that is not there
        fail(str(error).splitlines()[0])
    finally:
        if dist.is_initialized() and "vllm" not in sys.modules:  # vLLM's own exit ends its groups
            dist.destroy_process_group()


if __name__ == "__main__":
    run_main(main)
