"""The paper's six benchmarks, scored the way the field scores them.

    python eval.py --model runs/x/checkpoint             the six benchmarks, one table
    python eval.py --model M --data DIR --limit 20       from local files DIR/<benchmark>.jsonl
    torchrun --nproc-per-node 8 eval.py --model M        problems split over eight GPUs
    python eval.py --responses FILE.jsonl                score given responses, sample nothing
    python eval.py --compare runs/sequence runs/token runs/balanced [--metrics]

Prompts, engines and seeds are grpo_ba.py's, verdicts are verify.py's: a checkpoint is measured as
it was trained. Results go to <model or --out>/eval/: samples.jsonl (a line per response),
results.json, results.md. After a crash the same command goes on where it stopped. avg@k is the
mean over problems of the share of right responses, s.e. its standard error over problems, pass@k
the unbiased estimator. Left out: few-shot prompts, majority voting, LiveCodeBench's other tasks.
"""

import argparse
import base64
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import re
import statistics
import zlib
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, MaxNLocator
from tqdm import tqdm

from grpo_ba import (
    Sampling,
    TransformersEngine,
    VLLMEngine,
    arg,
    bad_flag,
    check_engine,
    encode_prompt,
    gold_text,
    hush_libraries,
    leave_distributed,
    load_from_hub,
    load_policy,
    load_tokenizer,
    over_ranks,
    pick_engine,
    print0,
    read_rows,
    sample_seed,
    setup_distributed,
    stop_token_ids,
    toy_problems,
    write_atomic,
)
from verify import RowError, Verifier, extract_answer, fail

# ----------------------------------------------------------------------------------------
# 1. Benchmarks and settings. The revisions are those that public evaluations pin (none was found
#    for Minerva: None is the newest); the row counts are asserted.


@dataclass(frozen=True)
class Benchmark:
    hub_id: str
    config: str
    split: str
    revision: str | None
    question: str  # column of the problem
    answer: str  # column of the gold answer
    rows: int
    samples: int  # per problem: the k of avg@k
    kind: str = "math"


# fmt: off
BENCHMARKS = {
    "math500": Benchmark("HuggingFaceH4/MATH-500", "", "test",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "problem", "answer", 500, 4),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "", "train",
        "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", "problem", "answer", 30, 32),
    "aime25": Benchmark("math-ai/aime25", "", "test",
        "563bb8404243c5f09de6ec262f2db674fe5bce9b", "problem", "answer", 30, 32),
    "olympiadbench": Benchmark("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train",
        "91184b52131e7fc9455fef848035173aea8cc01a", "question", "final_answer", 674, 4),
    "minerva_math": Benchmark("math-ai/minervamath", "", "test",  # 272 from courses, not MATH
        None, "question", "answer", 272, 4),
    "livecodebench": Benchmark("livecodebench/code_generation_lite", "", "test",
        "0fe84c3912ea0c4d4a78037083943e8f0c4dd505", "question_content", "private_test_cases",
        1055, 4, "code"),
}
ALL = BENCHMARKS | {"toy": Benchmark("", "", "", None, "problem", "answer", 256, 4)}  # for tests
PRESETS = {  # sampling, boxed instruction, thinking: as the model cards want it
    "qwen3": (Sampling(32768, 0.6, 0.95, 20), "suffix", True),
    "qwen3-non-thinking": (Sampling(32768, 0.7, 0.8, 20), "suffix", False),
    "qwen2.5-math": (Sampling(3072, 0.6, 0.95), "system", False),
    "other": (Sampling(32768, 0.6, 0.95), "suffix", False),
    "toy": (Sampling(200), "none", False),
}
LCB_ROWS = {f"release_v{i}": n for i, n in enumerate((400, 511, 612, 713, 880, 1055), 1)}
ENGINES = ["auto", "vllm", "transformers"]
# fmt: on


@dataclass
class Options:
    model: str = arg("", "transformers checkpoint to evaluate, folder or hub id")
    responses: str = arg("", "score this .jsonl instead: problem, answer, response in each row")
    compare: list[str] = field(
        default_factory=list, metadata={"help": "evaluated runs or checkpoints to set side by side"}
    )
    metrics: bool = arg(False, "with --compare: best against last accuracy during training too")
    benchmarks: list[str] = field(
        default_factory=lambda: list(BENCHMARKS),
        metadata={"help": f"some of {', '.join(BENCHMARKS)} (default: all)"},
    )
    data: str = arg("", "folder of <benchmark>.jsonl files to read instead of the hub")
    limit: int = arg(0, "only the first so many problems of each benchmark; 0: all")
    out: str = arg("", "results go to OUT/eval/ (default: the model's folder; hub id: runs/NAME)")
    preset: str = arg("auto", "how to ask and sample; auto: by the model", ["auto", *PRESETS])
    samples: int = arg(0, "responses per problem (default: 32 for AIME, else 4)")
    pass_k: list[int] = field(
        default_factory=list, metadata={"help": "the k of pass@k (default: 1, 2, 4 ... samples)"}
    )
    temperature: float | None = arg(None, "sampling temperature (default: the preset's)")
    max_tokens: int = arg(0, "longest response (default: the preset's, as far as context allows)")
    seed: int = arg(0, "every response has its own seed, made from this one")
    engine: str = arg("auto", "who samples; auto: vllm if there is CUDA", ENGINES)
    batch_size: int = arg(256, "responses between two writes; a crash loses at most these")
    lcb_release: str = arg("release_v6", "LiveCodeBench: the files to read", list(LCB_ROWS))
    lcb_start: str = arg("", "LiveCodeBench: only contests from this day on, YYYY-MM-DD")
    lcb_end: str = arg("", "LiveCodeBench: only contests up to this day, YYYY-MM-DD")
    lcb_skip_bad: bool = arg(False, "LiveCodeBench: leave out the problems its ERRATA lists")


def check(options):
    """Refuses what cannot work before anything is loaded."""
    o = options
    o.benchmarks = [name for names in o.benchmarks for name in names.split(",") if name] or [""]
    if sum(map(bool, (o.model, o.responses, o.compare))) != 1:
        fail("give one of --model, --responses and --compare; python eval.py --help explains them")
    check_engine(o.engine)
    for name in o.benchmarks:
        if name not in ALL:
            fail(f"--benchmarks {name}: unknown; choose from {', '.join(BENCHMARKS)}")
    for flag in ("limit", "samples", "max_tokens", "seed", "batch_size"):
        if getattr(o, flag) < (flag == "batch_size"):
            fail(f"--{flag} {getattr(o, flag)}: must be a positive number")
    if o.temperature is not None and not 0 < o.temperature < math.inf:
        fail(f"--temperature {o.temperature}: must be more than 0, as samples are averaged")
    for flag in ("lcb_start", "lcb_end"):
        try:  # 20240201 is a day too, but days are compared as texts
            setattr(o, flag, getattr(o, flag) and date.fromisoformat(getattr(o, flag)).isoformat())
        except ValueError:
            fail(f"--{flag} {getattr(o, flag)}: no such day; write YYYY-MM-DD")
    fewest = min(o.samples or ALL[name].samples for name in o.benchmarks)
    for k in o.pass_k:
        if k < 1 or (o.model and k > fewest):
            fail(f"--pass_k {k}: pass@k needs 1 <= k <= samples, here {fewest}; raise --samples")


# ----------------------------------------------------------------------------------------
# 2. Data: a benchmark becomes problems {"id", "problem", "answer"}. Those of LiveCodeBench have
#    "tests" too, a function that reads them when they are needed (decoded, they fill the memory).


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def training_config(model):
    """config.json of the run that a checkpoint belongs to; {} for any other model."""
    path = Path(model).expanduser().parent / "config.json"
    config = json.loads(path.read_text()) if model and path.is_file() else {}
    return config if "aggregation" in config else {}


def load_benchmark(name, options=None):
    options, benchmark = options or Options(), ALL[name]
    if name == "toy":
        world = training_config(options.model).get("toy_world", "rambler")
        problems = toy_problems(world, benchmark.rows)[1]
        return [{"id": str(i), **problem} for i, problem in enumerate(problems)]
    source = str(Path(options.data, f"{name}.jsonl")) if options.data else benchmark.hub_id
    if options.data and not Path(source).is_file():
        found = sorted(path.name for path in Path(options.data).glob("*.jsonl")) or "no .jsonl file"
        fail(f"--data {options.data}: {name}.jsonl is missing there; found {found}")
    if benchmark.kind == "code":
        return load_livecodebench(source, options)
    if options.data:
        rows, columns = read_rows(source)
    else:
        where = f"{source}:{benchmark.config}".rstrip(":")
        rows, columns = read_rows(where, split=benchmark.split, revision=benchmark.revision)
    question, answer = benchmark.question, benchmark.answer
    if options.data and not {question, answer} <= columns:
        question, answer = "problem", "answer"  # a local file may have either form
    if not {question, answer} <= columns:
        fail(f"{name} from {source}: needs columns {question} and {answer}; has {sorted(columns)}")
    check_count(name, source, len(rows), benchmark.rows, options)
    problems = []
    for i, row in enumerate(rows):
        text, gold = row.get(question), clean_gold(name, row.get(answer))
        if not text or not gold:
            fail(f"{name} from {source}: row {i + 1} has an empty {question} or {answer}")
        if row.get("context"):  # OlympiadBench: what several questions share
            text = f"{row['context']}\n{text}"
        problems.append({"id": str(i), "problem": text, "answer": gold})
    return problems


def check_count(name, source, found, expected, options):
    if found != expected and not options.data:
        fail(f"{name} from {source}: found {found} rows, expected {expected}; use --data to go on")
    if found != expected:
        print0(f"{name} from {source}: {found} rows, where the published set has {expected}")


def clean_gold(name, gold):
    """The gold as verify.py reads it; a list (Minerva's variants) means any of these."""
    gold = gold_text(gold)
    golds = gold if isinstance(gold, list) else [gold]
    if name.startswith("aime"):  # "025" and "336^\\circ" are integers
        return "".join(str(int(number)) for number in re.findall(r"\d+", golds[0])[:1])
    if name == "olympiadbench":  # ["$69$,$84$"] or "$x$.": all of them, in any order
        return ", ".join(one.replace("$", "").strip().rstrip(".").strip() for one in golds)
    return gold


# LiveCodeBench: its raw files, as datasets >= 4 runs no loading script. Release n is the files 1 to
# n, 4.5 GB for release_v6.
LCB_COLUMNS = {"question_id", "question_title", "question_content", "contest_date", "starter_code",
               "public_test_cases", "private_test_cases", "metadata"}  # fmt: skip
LCB_BAD = {  # its ERRATA.md: several right outputs, interactive, or wrong tests; by id or title
    "abc311_c", "abc326_d", "abc327_b", "abc333_e", "abc343_a", "abc343_e", "abc362_c", "arc185_c",
    "abc337_e", "abc355_e", "abc350_c", "arc189_a", "find-words-containing-character",
    "find-the-peaks", "generate-binary-strings-without-adjacent-zeros", "most-frequent-ids",
    "apply-operations-to-make-string-empty",
}  # fmt: skip
MAX_TESTS_BYTES = 2**30  # of one problem, decompressed: a zip bomb ends here
LCB_SYSTEM = (  # the official prompt, word for word, from here to lcb_prompt
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests."
)
LCB_WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your "
    "code within delimiters."
)
LCB_WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
)


def lcb_prompt(row):
    starter = row["starter_code"]
    text = (
        f"### Question:\n{row['question_content']}\n\n"
        f"### Format: {LCB_WITH_STARTER if starter else LCB_WITHOUT_STARTER}\n"
        f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
    return [{"role": "system", "content": LCB_SYSTEM}, {"role": "user", "content": text}]


class PlainUnpickler(pickle._Unpickler):
    """Refuses every class and function. Python's own, since a LONG_BINPUT of five bytes makes the
    C one allocate 64 GB."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; tests are plain text")


def decode_tests(text):
    """JSON, or base64 of zlib of a pickled JSON string -> [{"input", "output", "testtype"}]."""
    if not text.lstrip().startswith("["):
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), MAX_TESTS_BYTES)
        if not inflate.eof:
            raise ValueError(f"cut off, or over {MAX_TESTS_BYTES:,} bytes when decompressed")
        text = PlainUnpickler(io.BytesIO(data)).load()
    tests = json.loads(text)
    if not all({"input", "output", "testtype"} <= test.keys() for test in tests):
        raise ValueError("a test without input, output or testtype")
    return tests


def row_tests(row):
    return decode_tests(row["public_test_cases"]) + decode_tests(row["private_test_cases"])


def read_tests(path, offset):
    with open(path, "rb") as file:
        file.seek(offset)
        return row_tests(json.loads(file.readline()))


def lcb_files(options):
    """test.jsonl, test2.jsonl ... of the release, from the hub's cache."""
    from transformers.utils import cached_file

    benchmark = BENCHMARKS["livecodebench"]
    fetch = partial(cached_file, benchmark.hub_id, repo_type="dataset", revision=benchmark.revision)
    try:
        return [fetch(f"test{i if i > 1 else ''}.jsonl")
                for i in range(1, int(options.lcb_release[-1]) + 1)]  # fmt: skip
    except OSError as error:
        fail(f"livecodebench: {benchmark.hub_id} cannot be reached ({str(error).splitlines()[0]}); "
             "put its rows into DIR/livecodebench.jsonl and give --data DIR")  # fmt: skip


def lcb_rows(paths):
    """(path, offset, row, func_name) of every problem, its tests decoded once to see that they can
    be: better now than after hours of sampling."""
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(file.readline, b""), 1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    row = json.loads(line)
                    if not row.keys() >= LCB_COLUMNS:
                        missing = sorted(LCB_COLUMNS - row.keys())
                        fail(f"{where}: columns {missing} are missing; found {sorted(row)}")
                    func_name = json.loads(row["metadata"]).get("func_name")
                    if not row_tests(row):
                        raise ValueError("no tests")
                except Exception as error:  # noqa: BLE001 - a hostile file may raise anything
                    fail(f"{where}: cannot be decoded ({error}); fetch the file anew")
                yield path, file.tell() - len(line), row, func_name


def load_livecodebench(source, options):
    problems, bad, total = [], [], 0
    for path, offset, row, func_name in lcb_rows([source] if options.data else lcb_files(options)):
        total += 1
        day = row["contest_date"][:10]
        if not (options.lcb_start or day) <= day <= (options.lcb_end or day):
            continue
        if LCB_BAD & {row["question_id"], row["question_title"]}:
            bad.append(row["question_id"])
            if options.lcb_skip_bad:
                continue
        gold = digest([row["public_test_cases"], row["private_test_cases"]])
        problems.append({
            "id": row["question_id"], "problem": lcb_prompt(row), "func_name": func_name,
            "tests": partial(read_tests, path, offset),
            "answer": f"tests {gold}",  # a name for the gold; verify.py reads the tests
        })  # fmt: skip
    check_count("livecodebench", source, total, LCB_ROWS[options.lcb_release], options)
    window = f"{options.lcb_start or 'the first contest'} to {options.lcb_end or 'the last'}"
    print0(f"livecodebench, {window}: {len(problems)} of {total} problems")
    if bad:
        verb = "left out" if options.lcb_skip_bad else "kept (--lcb_skip_bad leaves them out)"
        print0(f"livecodebench: {len(bad)} known-bad problems {verb}: {', '.join(bad)}")
    if not problems:
        fail(f"livecodebench: no contest from {window}; widen --lcb_start and --lcb_end")
    return problems


# ----------------------------------------------------------------------------------------
# 3. Statistics, clustered by problem: responses to one problem are not independent.


def pass_at_k(n, c, k):
    """Probability that one of k responses is right, from n responses of which c are right:
    1 - C(n-c, k) / C(n, k) (Chen et al., 2021). Unbiased, unlike 1 - (1 - c/n)^k."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n, and there are n = {n} responses")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def mean_and_error(values):
    """Mean over problems, and its standard error (the problems are a sample of such problems)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def paired_bootstrap(differences, draws=10_000):
    """(mean, low, high) of the mean over benchmarks of the mean difference over problems, with its
    95% interval. differences: for each benchmark, one difference a problem."""
    generator, total = torch.Generator().manual_seed(0), torch.zeros(draws, dtype=torch.float64)
    for values in differences:
        values = torch.tensor(values, dtype=torch.float64)
        picks = torch.randint(len(values), (draws, len(values)), generator=generator)
        total += values[picks].mean(dim=1) / len(differences)
    low, high = total.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return statistics.fmean(map(statistics.fmean, differences)), low, high


MAX_SANDBOX_ERRORS = 0.01  # neither right nor wrong; with more of them there is no score


def summarise(task, rows, pass_k=()):
    """The figures of one benchmark, from its rows of samples.jsonl."""
    problems = defaultdict(list)
    for row in rows:
        problems[f"{row['id']} {row['problem_hash']}"].append(row)
    fewest = min(map(len, problems.values()))
    if max(pass_k, default=0) > fewest:
        fail(f"--pass_k {max(pass_k)}: {task} has {fewest} responses to one problem; lower it")
    counts = {  # responses with a verdict, right ones
        key: (sum(r["reason"] != "sandbox_error" for r in some), sum(r["reward"] for r in some))
        for key, some in problems.items()
    }
    errors = len(rows) - sum(n for n, _ in counts.values())
    summary = {
        "problems": len(problems),
        "samples": fewest,
        "score": None,
        "error": None,
        "pass": {},
        "tokens": mean(row["tokens"] for row in rows),
        "truncated": mean(r["finish_reason"] and r["finish_reason"] == "length" for r in rows),
        "no_answer": mean(row["reason"] == "no_answer" for row in rows),
        "sandbox_errors": errors / len(rows),
        "per_problem": {key: c / n for key, (n, c) in counts.items() if n},
    }
    if errors <= MAX_SANDBOX_ERRORS * len(rows):
        summary["score"], summary["error"] = mean_and_error(list(summary["per_problem"].values()))
        powers = [2**i for i in range(fewest.bit_length()) if 2**i < fewest]
        for k in pass_k or [*powers, fewest]:
            summary["pass"][k] = mean(pass_at_k(n, int(c), k) for n, c in counts.values() if n >= k)
    return summary


def mean(values):
    """Of those that are known; a replayed file may not say them."""
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if known else None


def average(summaries):
    """Score and standard error, unweighted over the benchmarks as in the paper's table."""
    scores = [summary["score"] for summary in summaries.values()]
    if len(scores) < 2 or None in scores:
        return None
    error = math.hypot(*(summary["error"] or 0 for summary in summaries.values())) / len(scores)
    return {"score": statistics.fmean(scores), "error": error}


def percent(value):
    return "-" if value is None else f"{100 * value:.1f}"


def markdown(header, rows):
    """A table that is aligned, so readable in a terminal too."""
    rows = [header, [""] * len(header), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    rows[1] = ["-" * width for width in widths]
    cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def finish(folder, settings, summaries):
    """results.json, results.md, and the table on the screen."""
    ks, total = sorted({k for s in summaries.values() for k in s["pass"]}), average(summaries)
    header = ["%", "problems", "k", "avg@k", "s.e.", *(f"pass@{k}" for k in ks), "tokens",
              "truncated", "no answer", "sandbox errors"]  # fmt: skip
    rows = [
        [name, str(s["problems"]), str(s["samples"]), percent(s["score"]), percent(s["error"]),
         *(percent(s["pass"].get(k)) for k in ks),
         f"{s['tokens']:.0f}" if s["tokens"] else "-",
         *(percent(s[key]) for key in ("truncated", "no_answer", "sandbox_errors"))]
        for name, s in summaries.items()
    ]  # fmt: skip
    if total:
        blank = [""] * (len(ks) + 4)
        rows.append(["average", "", "", percent(total["score"]), percent(total["error"]), *blank])
    table = markdown(header, rows)
    for name, s in summaries.items():
        if s["score"] is None:
            table += (f"\n{name}: no score, as the sandbox failed on {percent(s['sandbox_errors'])}% "
                      "of the responses; the same command again scores those anew\n")  # fmt: skip
    results = {"settings": settings, "benchmarks": summaries, "average": total}
    write_atomic(folder / "results.json", json.dumps(results, indent=1))
    write_atomic(folder / "results.md", table)
    print(f"\n{table}\n{folder / 'results.json'}")


# ----------------------------------------------------------------------------------------
# 4. Sampling. Every batch is scored and appended to samples.jsonl. A response is a function of
#    weights, settings, prompt and its own seed, so an evaluation that was killed goes on with what
#    is missing, and any number of ranks gives the same table.

PLACE = ("task", "id", "sample", "prompt_hash", "problem_hash")  # tells responses apart


def choose_preset(options, model_config):
    """(sampling, instruction, thinking) for this model; flags override. A checkpoint of ours keeps
    the prompt format that it was trained with."""
    trained, preset = training_config(options.model), options.preset
    if preset == "auto":
        thinks = trained.get("enable_thinking", True)
        is_math = "math" in (trained.get("model") or options.model).lower()
        families = {
            "qwen3": "qwen3" if thinks else "qwen3-non-thinking",
            "qwen2": "qwen2.5-math" if is_math else "other",
        }
        preset = families.get(model_config.model_type, "other")
        preset = "toy" if options.benchmarks == ["toy"] else preset
    sampling, instruction, thinking = PRESETS[preset]
    if options.preset == "auto":
        instruction = trained.get("instruction", instruction)
    context = model_config.max_position_embeddings
    room = max(context - 4096, context * 3 // 4)  # the rest is for the prompt
    max_tokens = options.max_tokens or min(sampling.max_tokens, room)
    temperature = options.temperature or sampling.temperature
    sampling = replace(sampling, max_tokens=max_tokens, temperature=temperature)
    return sampling, instruction, thinking


def list_samples(options, tokenizer, sampling, instruction, thinking, context):
    """{place: problem}, with its prompt_ids, of all the samples that the options ask for."""
    wanted = {}
    for name in options.benchmarks:
        for problem in load_benchmark(name, options)[: options.limit or None]:
            how = "none" if "tests" in problem else instruction
            problem["prompt_ids"] = encode_prompt(tokenizer, problem["problem"], how, thinking)
            length = len(problem["prompt_ids"])
            if length + sampling.max_tokens > context:
                fail(f"--max_tokens {sampling.max_tokens}: problem {problem['id']} of {name} has "
                     f"{length} prompt tokens and the model a context of {context}; lower it"
                )  # fmt: skip
            hashes = digest(problem["prompt_ids"]), digest([problem["problem"], problem["answer"]])
            for sample in range(options.samples or ALL[name].samples):
                wanted[name, problem["id"], sample, *hashes] = problem
    return wanted


def read_lines(path):
    """Rows of a .jsonl file whose last line may be cut off."""
    if path.exists():
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)


def append_lines(path, rows):
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def merge_ranks(folder):
    """Moves what the other ranks wrote into samples.jsonl. To die in between leaves some rows there
    twice, which does no harm."""
    samples = folder / "samples.jsonl"
    if samples.exists():  # or a torn last line would swallow the next one
        os.truncate(samples, samples.read_bytes().rfind(b"\n") + 1)
    for part in sorted(folder.glob("samples.rank*.jsonl")):
        append_lines(samples, read_lines(part))
        part.unlink()


def read_samples(folder, settings_hash):
    """{place: row} of these settings, without the texts: there may be gigabytes of them."""
    rows = (row | {"response": ""} for row in read_lines(folder / "samples.jsonl"))
    rows = (row for row in rows if row.get("settings") == settings_hash)
    return {tuple(row[key] for key in PLACE): row for row in rows}


def make_engine(kind, dtype, max_model_len, tokenizer, device, options):
    stop_ids = stop_token_ids(options.model, tokenizer)
    if kind == "vllm":
        share = 0.9  # of the GPU's memory: no trainer is beside it
        return VLLMEngine(options.model, stop_ids, max_model_len, dtype, share, options.seed)
    return TransformersEngine(load_policy(options.model, device), stop_ids, options.batch_size)


def evaluate(options):
    from transformers import AutoConfig

    rank, world, device = setup_distributed()
    model_config = load_from_hub(AutoConfig, options.model)
    tokenizer = load_tokenizer(options.model)
    sampling, *prompt_format = choose_preset(options, model_config)
    kind, path = pick_engine(options.engine), Path(options.model).expanduser()
    dtype = "bfloat16" if kind == "vllm" and device.type == "cuda" else "float32"
    # A checkpoint that was trained further is another model, one that was moved is not.
    stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in path.glob("*.safetensors")]
    weights = sorted(stamps) or [options.model, model_config._commit_hash]
    settings = asdict(sampling) | {
        "weights": weights, "engine": kind, "dtype": dtype, "seed": options.seed,
        "prompt_format": prompt_format,
    }  # fmt: skip
    context = model_config.max_position_embeddings
    wanted = list_samples(options, tokenizer, sampling, *prompt_format, context)
    folder = Path(options.out or (path if path.is_dir() else Path("runs", path.name)), "eval")
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        merge_ranks(folder)  # what an evaluation that was killed had written
        print0(f"{options.model}: {kind}, {sampling}, {len(wanted)} responses, to {folder}")
    over_ranks(0, device)  # all ranks meet: then each reads the same file,
    done = read_samples(folder, digest(settings))
    over_ranks(0, device)  # and none writes before all have read it
    missing = [p for p in wanted if p not in done or done[p]["reason"] == "sandbox_error"]
    if missing:  # on every rank, even if its share is empty: vLLM's start is a common act
        longest = sampling.max_tokens + max(len(wanted[p]["prompt_ids"]) for p in missing)
        engine = make_engine(kind, dtype, longest, tokenizer, device, options)
        turn = {problem: i for i, problem in enumerate(dict.fromkeys(p[:2] for p in missing))}
        share = [p for p in missing if turn[p[:2]] % world == rank]  # whole problems
        share.sort(key=lambda p: len(wanted[p]["prompt_ids"]))  # batches with little padding
        part = folder / (f"samples.rank{rank}.jsonl" if rank else "samples.jsonl")
        common = {
            "settings": digest(settings),
            "sampling": asdict(sampling),
            "model": options.model,
        }
        sample_and_score({p: wanted[p] for p in share}, engine, tokenizer, sampling, common, part,
                         options, rank)  # fmt: skip
    over_ranks(0, device)
    if rank == 0:
        merge_ranks(folder)
        done = read_samples(folder, digest(settings))
        tasks = {name: [done[p] for p in wanted if p[0] == name] for name in options.benchmarks}
        summaries = {name: summarise(name, rows, options.pass_k) for name, rows in tasks.items()}
        finish(folder, asdict(options) | settings, summaries)


def sample_and_score(todo, engine, tokenizer, sampling, common, path, options, rank):
    """Appends a row to `path` for every {place: problem} of `todo`, a batch at a time."""
    places, right = list(todo), 0.0
    bar = tqdm(total=len(todo), unit="sample", disable=rank > 0)
    with Verifier() as verifier, bar:
        for start in range(0, len(places), options.batch_size):
            batch = places[start : start + options.batch_size]
            prompts = [todo[p]["prompt_ids"] for p in batch]
            seeds = [sample_seed(options.seed, "eval", *p[:3]) for p in batch]
            label = "" if rank else batch[0][0]
            responses = engine.generate(prompts, 1, sampling, seeds, label)
            texts = [tokenizer.decode(r.ids, skip_special_tokens=True) for r in responses]
            verdicts = verifier.score(texts, [with_tests(todo[p]) for p in batch])
            rows = [
                common
                | dict(zip(PLACE, p))
                | verdict_fields(todo[p], text, verdict)
                | {"finish_reason": response.finish_reason, "tokens": len(response.ids)}
                for p, response, text, verdict in zip(batch, responses, texts, verdicts)
            ]
            append_lines(path, rows)
            right += sum(verdict.reward for verdict in verdicts)
            bar.set_postfix_str(f"accuracy {right / (start + len(batch)):.3f}", refresh=False)
            bar.update(len(batch))


def with_tests(problem):
    return problem | {"tests": problem["tests"]()} if "tests" in problem else problem


def verdict_fields(problem, text, verdict):
    """What a row of samples.jsonl says of the score, sampled or replayed."""
    return {
        "response": text,
        "extracted": None if problem.get("tests") else extract_answer(text),
        "gold": problem.get("answer"),
        "reward": verdict.reward,
        "reason": verdict.reason,
    }


def replay(options):
    """Scores the responses of a file: rows of problem, response, and answer or tests (func_name);
    optional are task, tokens, finish_reason and model. Same problem and answer: one problem."""
    path = Path(options.responses)
    if not path.is_file():
        fail(f"--responses {path}: there is no such file")
    rows = [dict(row) for row in read_rows(str(path))[0]]
    if not rows:
        fail(f"--responses {path}: it has no rows")
    for i, row in enumerate(rows, 1):
        if not row.keys() >= {"problem", "response"} or not row.keys() & {"answer", "tests"}:
            fail(f"{path} row {i}: needs problem, response and answer (or tests); has {[*row]}")
        row["answer"] = clean_gold("", row.get("answer"))
    with Verifier() as verifier:
        try:
            verdicts = verifier.score([row["response"] for row in rows], rows, progress=True)
        except RowError as error:  # an empty gold, a response that is no text
            fail(f"{path} row {error.row + 1}: {error.message}")
    tasks, counts = defaultdict(list), defaultdict(int)
    for row, verdict in zip(rows, verdicts):
        task, key = row.get("task", path.stem), digest([row["problem"], row["answer"]])
        place = {"task": task, "id": key, "sample": counts[task, key], "problem_hash": key}
        known = {name: row.get(name) for name in ("tokens", "finish_reason", "model")}
        tasks[task].append(place | verdict_fields(row, row["response"], verdict) | known)
        counts[task, key] += 1
    folder = Path(options.out or path.with_suffix(""), "eval")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for some in tasks.values() for row in some]
    write_atomic(folder / "samples.jsonl", "".join(lines))
    summaries = {task: summarise(task, some, options.pass_k) for task, some in tasks.items()}
    finish(folder, asdict(options), summaries)


# ----------------------------------------------------------------------------------------
# 5. Comparison, paired: on the same problems, so that their difficulty cancels.


def compare(options):
    runs = options.compare
    names = [Path(run.removesuffix("/").removesuffix("/checkpoint")).name for run in runs]
    names = names if len(set(names)) == len(runs) else runs
    if len(set(runs)) < 2:
        fail(f"--compare {' '.join(runs)}: name at least two runs")
    results = {}
    for name, run in zip(names, runs):
        places = [Path(run, *parts) for parts in ((), ("eval",), ("checkpoint", "eval"))]
        found = [place / "results.json" for place in places if (place / "results.json").is_file()]
        if not found:
            fail(f"--compare {run}: no eval/results.json in it; evaluate it first with --model")
        results[name] = json.loads(found[0].read_text())["benchmarks"]
    tasks = [
        task
        for task in results[names[0]]
        if all(task in result and result[task]["score"] is not None for result in results.values())
    ]
    if not tasks:
        fail(f"--compare {' '.join(runs)}: no benchmark has a score in all of them")
    pairs = [(b, a) for a, b in itertools.combinations(names, 2)]
    rows, bars, differences = [], {}, {pair: [] for pair in pairs}

    def interval(values):
        return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in paired_bootstrap(values)))

    for task in tasks:
        of = {name: results[name][task]["per_problem"] for name in names}
        common = [key for key in of[names[0]] if all(key in of[name] for name in names)]
        if not common:
            fail(f"--compare: the runs share no problem of {task}; evaluate them on the same data")
        for a, b in pairs:
            differences[a, b].append([of[a][key] - of[b][key] for key in common])
        bars[task] = {name: mean_and_error([of[name][key] for key in common]) for name in names}
        means = [percent(bars[task][name][0]) for name in names]
        cells = [interval(differences[pair][-1:]) for pair in pairs]
        rows.append([task, str(len(common)), *means, *cells])
    if len(tasks) > 1:
        means = [percent(mean(bar[name][0] for bar in bars.values())) for name in names]
        rows.append(["average", "", *means, *(interval(differences[pair]) for pair in pairs)])
    print(markdown(["%", "problems", *names, *(f"{a} - {b}" for a, b in pairs)], rows))
    print("brackets: 95% interval of the difference, paired bootstrap over problems\n")
    curves = {}
    if options.metrics:
        folders = [Path(run.removesuffix("/").removesuffix("/checkpoint")) for run in runs]
        curves = {name: accuracy_curve(folder) for name, folder in zip(names, folders)}
        for name, (x, y) in curves.items():
            if not x:
                fail(f"--metrics: {name} was not evaluated during training; drop the flag")
        rows = [
            [name, *map(percent, (max(y), y[-1], max(y) - y[-1])), str(x[y.index(max(y))])]
            for name, (x, y) in curves.items()
        ]
        print(markdown(["during training, %", "best", "last", "lost", "best at update"], rows))
    folder = Path(options.out or Path(runs[0]).absolute().parent, "eval")
    print(draw_compare(bars, curves, folder / "compare.png"))


# ----------------------------------------------------------------------------------------
# 6. Pictures. Figure objects, no pyplot: nothing global is left in a trainer's process and no
#    display is needed. Sized for a README, labelled on the lines, safe for colour-blind readers.

# Okabe-Ito palette; a rule has the same colour in every picture.
COLORS = {"sequence": "#0072B2", "token": "#D55E00", "balanced": "#009E73"}
SPARE_COLORS = ["#CC79A7", "#E69F00", "#56B4E9", "#666666"]  # a fork's rules, runs without a rule
INK, GRAY, GRID, BLUE, ORANGE = "#333333", "#888888", "#E4E4E4", "#0072B2", "#D55E00"


def color_of(names: list[str]) -> dict[str, str]:
    """A colour per name: the rule's when the name holds one, else the next spare one."""
    spare = iter(SPARE_COLORS * len(names))
    rules = {name: next((rule for rule in COLORS if rule in name), None) for name in names}
    taken = list(rules.values())
    return {
        name: COLORS[rule] if rule and taken.count(rule) == 1 else next(spare)
        for name, rule in rules.items()
    }


def new_figure(width: float, height: float, rows: int, column_widths: list[float]):
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    grid = {"squeeze": False, "width_ratios": column_widths}
    panels = figure.subplots(rows, len(column_widths), **grid).ravel()
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color=GRID, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.tick_params(colors=INK, labelsize=9)
    return figure, panels


def label_ends(panel, ends: list[tuple[float, float, str, str]], share: float) -> None:
    """Write each (x, y, text, color) at the end of its line; texts nearer to one another than this
    share of the panel's height move apart."""
    low, high = panel.get_ylim()
    gap = share * (high - low)
    ends = sorted((end for end in ends if not math.isnan(end[1])), key=lambda end: end[1])
    heights = [end[1] for end in ends]
    for _ in range(50):  # push neighbours apart by halves until all have room
        for i in range(len(heights) - 1):
            push = max(0.0, gap - (heights[i + 1] - heights[i])) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    for (x, _, text, color), height in zip(ends, heights):
        panel.annotate(text, (x, height), (6, 0), textcoords="offset points", color=color,
                       va="center", fontsize=10, fontweight="bold", annotation_clip=False)  # fmt: skip


def save_figure(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png")
    return part.replace(path)


def read_run(run: Path) -> tuple[dict, list[dict]]:
    """config.json and metrics.jsonl of a training run."""
    metrics, config = Path(run, "metrics.jsonl"), Path(run, "config.json")
    if not metrics.exists():
        fail(f"{run} has no metrics.jsonl: name the folder of a training run")
    return json.loads(config.read_text()) if config.exists() else {}, list(read_lines(metrics))


def accuracy_curve(run: Path) -> tuple[list[int], list[float]]:
    """Held-out accuracy over updates done: 0 is the untrained policy. A step evaluates before its
    update, only the last step of a finished run after it."""
    config, rows = read_run(run)
    last = config.get("steps") or max((row["step"] for row in rows), default=0)
    done = [row for row in rows if row.get("eval_accuracy") is not None]
    x = [row["step"] if row["step"] == last else row["step"] - 1 for row in done]
    return x, [row["eval_accuracy"] for row in done]


def draw_curves(run: Path) -> Path:
    """runs/<name>/curves.png: does it learn, how long are right and wrong responses, is the policy
    healthy, and the two biases as numbers. Works while the run is going on."""
    config, rows = read_run(run)
    figure, panels = new_figure(11, 6.6, 2, [1, 1])
    learning, lengths, health, biases = panels
    half = len(rows) // 50  # long runs get a running mean over the raw line; short ones stay raw

    def plot(panel, key: str, color: str) -> tuple[float, float]:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        x, y = zip(*points) if points else ((), ())
        windows = [y[max(0, i - half) : i + half + 1] for i in range(len(y))]
        if half:
            panel.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
        mean = [sum(window) / len(window) for window in windows]
        panel.plot(x, mean, color=color, linewidth=1.8)
        return (x[-1], mean[-1]) if points else (math.nan, math.nan)

    def plot_two(panel, key_left: str, label_left: str, key_right: str, label_right: str):
        """Two quantities, each with its own axis in the colour of its line."""
        right = panel.twinx()
        right.spines[["top", "left"]].set_visible(False)
        for side, key, label, color in (
            (panel, key_left, label_left, BLUE),
            (right, key_right, label_right, ORANGE),
        ):
            plot(side, key, color)
            side.set_ylabel(label, color=color)
            side.tick_params(axis="y", colors=color, labelsize=9)
        return right

    ends = [(*plot(learning, "reward", ORANGE), "training\nreward", ORANGE)]
    x, y = accuracy_curve(run)
    learning.plot(x, y, color=BLUE, linewidth=1.8, marker="o", markersize=4.5)
    ends += [(x[-1], y[-1], "held-out\naccuracy", BLUE)] if x else []
    learning.set(ylim=(-0.02, 1.02))
    learning.set_title("Does it learn?")
    label_ends(learning, ends, 0.16)

    keys = {"length_pos": ("right", BLUE), "length": ("all", GRAY), "length_neg": ("wrong", ORANGE)}
    ends = [(*plot(lengths, key, color), label, color) for key, (label, color) in keys.items()]
    lengths.set_title("Tokens per response (right: A > 0, wrong: A < 0)")
    lengths.set_ylim(0)
    label_ends(lengths, ends, 0.07)

    health.set_title("Is the policy healthy?")
    plot_two(health, "entropy", "entropy (nats)", "grad_norm", "gradient norm").set_ylim(0)
    health.set_ylim(0)

    biases.set_title("The two biases (0 and 1: none)")
    right = plot_two(biases, "net_advantage", "net advantage", "weight_spread", "weight spread")
    low, high = biases.get_ylim()  # noise of 1e-9 must not fill the panel
    biases.set_ylim(min(low, -0.5), max(high, 0.5))
    right.set_ylim(0, max(4, right.get_ylim()[1]))  # so that 1 is not at the height of 0

    for panel in panels:
        panel.set_xlabel("step", fontsize=9, color=INK)
    rule, steps = config.get("aggregation", "?"), config.get("steps", "?")
    done = "" if rows and rows[-1]["step"] == steps else f", {len(rows)} of {steps} steps so far"
    figure.suptitle(f"{Path(run).name}: {rule} aggregation{done}", fontweight="bold", color=INK)
    return save_figure(figure, Path(run, "curves.png"))


def draw_rules(runs: dict[str, dict[str, list[Path]]], path: Path) -> Path:
    """runs/compare.png: held-out accuracy of {world: {rule: [run of each seed]}}, one panel per
    world. Thick: mean over seeds, where all have been evaluated. Thin: each seed."""
    figure, panels = new_figure(5.6 * len(runs), 4, 1, [1] * len(runs))
    counts = {len(seeds) for rules in runs.values() for seeds in rules.values()}
    for panel, (world, rules) in zip(panels, runs.items()):
        colors, ends = color_of(list(rules)), []
        for rule, seeds in rules.items():
            curves = [dict(zip(*accuracy_curve(run))) for run in seeds]
            x = sorted(set.intersection(*map(set, curves)))
            if not x:
                continue  # not evaluated yet
            mean = [sum(curve[step] for curve in curves) / len(curves) for step in x]
            for curve in curves if len(curves) > 1 else []:
                panel.plot(curve.keys(), curve.values(), color=colors[rule], lw=0.8, alpha=0.35)
            panel.plot(x, mean, color=colors[rule], lw=2.4, marker="o", markersize=4)
            ends.append((x[-1], mean[-1], f"{rule} {mean[-1]:.2f}", colors[rule]))
        panel.set_title(world, fontweight="bold", color=INK)
        panel.set_xlabel("updates", fontsize=9, color=INK)
        panel.set_ylim(0, 1)
        label_ends(panel, ends, 0.07)
    panels[0].set_ylabel("held-out accuracy", color=INK)
    seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    what = f"mean of {seeds} seeds (thin lines: each seed)" if seeds != "1" else "1 seed"
    figure.suptitle(f"Held-out accuracy while training: {what}", color=INK)
    return save_figure(figure, path)


def rules_table(runs: dict[str, dict[str, list[Path]]]) -> str:
    """The same runs as numbers, means over seeds: accuracy (`mean` is over the whole training, by
    the trapezoid rule), then means over steps."""
    header = ["world", "rule", "initial", "best", "last", "mean"]
    header += ["length", "length gap", "abs(net advantage)"]
    table = []
    for world, rules in runs.items():
        for rule, folders in rules.items():
            rows = []
            for folder in folders:
                x, y = accuracy_curve(folder)
                area = sum((b - a) * (c + d) / 2 for a, b, c, d in zip(x, x[1:], y, y[1:]))
                scores = (
                    [y[0], max(y), y[-1], area / (x[-1] - x[0])] if len(x) > 1 else [math.nan] * 4
                )
                steps = read_run(folder)[1]
                gaps = [step["length_gap"] for step in steps]
                net = [abs(step["net_advantage"]) for step in steps]
                lengths = [step["length"] for step in steps]
                rows.append([*scores, mean(lengths), mean(gaps) or 0.0, mean(net)])
            *scores, length, gap, net = map(mean, zip(*rows))
            cells = [f"{score:.3f}" for score in scores] + [
                f"{length:.1f}",
                f"{gap:+.1f}",
                f"{net:.3f}",
            ]
            table.append([world, rule, *cells])
    return markdown(header, table)


def draw_compare(bars, curves, path):
    """compare.png: {task: {run: (score, error)}} as bars with 95% intervals; beside it, where training
    evaluated along the way, best against last accuracy: how stable the run was."""
    names = list(next(iter(bars.values())))
    colors, width = color_of(names), 0.8 / len(names)
    inches = [max(3, 1.7 * len(bars))] + [4] * bool(curves)
    figure, panels = new_figure(sum(inches), 3.8, 1, inches)
    for i, name in enumerate(names):
        scores = [runs[name][0] for runs in bars.values()]
        errors = [1.96 * (runs[name][1] or 0) for runs in bars.values()]
        x = [task + (i - (len(names) - 1) / 2) * width for task in range(len(bars))]
        panels[0].bar(x, scores, 0.92 * width, color=colors[name], label=name)
        panels[0].errorbar(x, scores, errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    panels[0].set_xticks(range(len(bars)), list(bars))
    panels[0].set_ylim(0)
    panels[0].set_title("avg@k with 95% interval over problems", color=INK)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    for i, (name, (x, y)) in enumerate(curves.items()):
        panels[1].plot([max(y), y[-1]], [i, i], color=colors[name], lw=2)
        panels[1].plot(max(y), i, "o", color="white", markeredgecolor=colors[name], ms=9, mew=2)
        panels[1].plot(y[-1], i, "o", color=colors[name], ms=9)
    if curves:
        panels[1].set_yticks(range(len(curves)), list(curves))
        panels[1].set_ylim(len(curves) - 0.4, -0.6)
        panels[1].set_title("during training: best (open), last (full)", color=INK)
        panels[1].grid(axis="x", color=GRID, linewidth=0.7)
        panels[1].xaxis.set_major_locator(AutoLocator())
    return save_figure(figure, path)


# ----------------------------------------------------------------------------------------
# 7. Command line


def parse(argv=None):
    from transformers import HfArgumentParser

    parser = HfArgumentParser(
        Options, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.error = bad_flag
    options = Options(**vars(parser.parse_args(argv)))
    check(options)
    return options


def main():
    options = parse()
    hush_libraries()
    try:
        action = compare if options.compare else replay if options.responses else evaluate
        action(options)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on where it stopped")
    finally:
        leave_distributed()


if __name__ == "__main__":
    main()
