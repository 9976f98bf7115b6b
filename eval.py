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
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
import transformers as hf
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, MaxNLocator
from tqdm import tqdm

from grpo_ba import (  # isort: skip
    Sampling, TransformersEngine, VLLMEngine, append_lines, arg, bad_flag, check_engine,
    encode_prompt, gold_text, hush_libraries, leave_distributed, load_from_hub, load_policy,
    load_tokenizer, over_ranks, pick_engine, print0, read_rows, sample_seed, setup_distributed,
    stop_token_ids, toy_problems, write_atomic,
)  # fmt: skip
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
NAMES = ", ".join(BENCHMARKS)
PRESETS = {  # sampling, boxed instruction, thinking: as the model cards want it
    "qwen3": (Sampling(32768, 0.6, 0.95, 20), "suffix", True),
    "qwen3-non-thinking": (Sampling(32768, 0.7, 0.8, 20), "suffix", False),
    "qwen2.5-math": (Sampling(3072, 0.6, 0.95), "system", False),
    "other": (Sampling(32768, 0.6, 0.95), "suffix", False),
    "toy": (Sampling(200), "none", False),
}
LCB_ROWS = {f"release_v{i}": n for i, n in enumerate((400, 511, 612, 713, 880, 1055), 1)}
# fmt: on


@dataclass
class Options:
    model: str = arg("", "transformers checkpoint to evaluate, folder or hub id")
    responses: str = arg("", "score this .jsonl instead: problem, answer, response in each row")
    compare: list[str] = field(default_factory=list, metadata={"help": "runs to set side by side"})
    metrics: bool = arg(False, "with --compare: best against last accuracy during training too")
    benchmarks: list[str] = field(default_factory=list, metadata={"help": f"of {NAMES}"})
    data: str = arg("", "folder of <benchmark>.jsonl files to read instead of the hub")
    limit: int = arg(0, "only the first so many problems of each benchmark; 0: all")
    out: str = arg("", "results go to OUT/eval/; empty: the model's folder, hub id: runs/NAME")
    preset: str = arg("auto", "how to ask and sample; auto: by the model", ["auto", *PRESETS])
    samples: int = arg(0, "responses per problem; 0: 32 for AIME, else 4")
    pass_k: list[int] = field(default_factory=list, metadata={"help": "none: 1, 2, 4 ... samples"})
    temperature: float | None = arg(None, "sampling temperature; none: the preset's")
    max_tokens: int = arg(0, "longest response; 0: the preset's, as far as context allows")
    seed: int = arg(0, "every response has its own seed, made from this one")
    engine: str = arg("auto", "who samples; auto: vllm with CUDA", ["auto", "vllm", "transformers"])
    batch_size: int = arg(256, "responses between two writes; a crash loses at most these")
    lcb_release: str = arg("release_v6", "LiveCodeBench: the files to read", list(LCB_ROWS))
    lcb_start: str = arg("", "LiveCodeBench: only contests from this day on, YYYY-MM-DD")
    lcb_end: str = arg("", "LiveCodeBench: only contests up to this day, YYYY-MM-DD")
    lcb_skip_bad: bool = arg(False, "LiveCodeBench: leave out the problems its ERRATA lists")


def check(o):
    """Refuses what cannot work before anything is loaded."""
    o.benchmarks = [name for names in o.benchmarks for name in names.split(",")] or [*BENCHMARKS]
    if sum(map(bool, (o.model, o.responses, o.compare))) != 1:
        fail("give one of --model, --responses and --compare; python eval.py --help explains them")
    check_engine(o.engine)
    for name in o.benchmarks:
        if name not in ALL:
            fail(f"--benchmarks {name}: unknown; choose from {NAMES}")
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


def run_config(run):
    """config.json of a training run; {} for any other folder."""
    path = Path(run, "config.json")
    return json.loads(path.read_text()) if path.is_file() else {}


def load_benchmark(name, options=None):
    options, benchmark = options or Options(), ALL[name]
    if name == "toy":
        world = run_config(Path(options.model).expanduser().parent).get("toy_world", "rambler")
        return [{"id": str(i), **p} for i, p in enumerate(toy_problems(world, benchmark.rows)[1])]
    source, question, answer = benchmark.hub_id, benchmark.question, benchmark.answer
    if options.data:
        path = Path(options.data, f"{name}.jsonl")
        source = str(path)
        if not path.is_file():
            found = sorted(file.name for file in path.parent.glob("*.jsonl")) or "no .jsonl file"
            fail(f"--data {options.data}: {name}.jsonl is missing there; found {found}")
    if benchmark.kind == "code":
        return load_livecodebench(source, options)
    if options.data:
        rows, columns = read_rows(source)
        if not {question, answer} <= columns:
            question, answer = "problem", "answer"  # a local file may have either form
    else:
        config = f":{benchmark.config}" if benchmark.config else ""
        rows, columns = read_rows(source + config, benchmark.split, benchmark.revision)
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
    said = f"{name} from {source}: found {found} rows, expected {expected}"
    if found != expected:
        print0(said) if options.data else fail(f"{said}; use --data to go on")


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


def read_tests(path, start):
    """The tests of the row that begins at this byte."""
    with open(path, "rb") as file:
        file.seek(start)
        row = json.loads(file.readline())
    return decode_tests(row["public_test_cases"]) + decode_tests(row["private_test_cases"])


def lcb_problems(path):
    """(problem, its row) of each line. The tests are decoded once to see that they can be: better
    now than after hours of sampling."""
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            tests, end = partial(read_tests, path, end), end + len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if missing := sorted(LCB_COLUMNS - row.keys()):
                    fail(f"{path} line {number}: columns {missing} are missing; has {sorted(row)}")
                func_name = json.loads(row["metadata"]).get("func_name")
                if not tests():
                    raise ValueError("no tests")
            except Exception as error:  # noqa: BLE001 - a hostile file may raise anything
                fail(f"{path} line {number}: cannot be decoded ({error}); fetch the file anew")
            gold = digest([row["public_test_cases"], row["private_test_cases"]])  # a name for them
            yield {"id": row["question_id"], "problem": lcb_prompt(row), "answer": f"tests {gold}",
                   "tests": tests, "func_name": func_name}, row  # fmt: skip


def lcb_files(release):
    """test.jsonl, test2.jsonl ... from the hub's cache."""
    from transformers.utils import cached_file

    lcb, names = BENCHMARKS["livecodebench"], [f"test{i}.jsonl" for i in ("", 2, 3, 4, 5, 6)]
    try:
        return [cached_file(lcb.hub_id, name, repo_type="dataset", revision=lcb.revision)
                for name in names[: int(release[-1])]]  # fmt: skip
    except OSError as error:
        fail(f"livecodebench: {lcb.hub_id} cannot be reached ({str(error).splitlines()[0]}); "
             "put its rows into DIR/livecodebench.jsonl and give --data DIR")  # fmt: skip


def load_livecodebench(source, options):
    problems, bad, total = [], [], 0
    files = [source] if options.data else lcb_files(options.lcb_release)
    for problem, row in itertools.chain.from_iterable(map(lcb_problems, files)):
        total += 1
        day = row["contest_date"][:10]
        if (options.lcb_start or day) <= day <= (options.lcb_end or day):
            is_bad = LCB_BAD & {row["question_id"], row["question_title"]}
            if is_bad:
                bad.append(problem["id"])
            if not (is_bad and options.lcb_skip_bad):
                problems.append(problem)
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


def mean(values):
    """Of those that are known; a replayed file may not say them."""
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if known else None


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
    problems = defaultdict(list)  # {problem: rewards of its responses}
    sizes = Counter(f"{row['id']} {row['problem_hash']}" for row in rows)
    for row in rows:
        if row["reason"] != "sandbox_error":
            problems[f"{row['id']} {row['problem_hash']}"].append(int(row["reward"]))
    fewest, errors = min(sizes.values()), len(rows) - sum(map(len, problems.values()))
    if max(pass_k, default=0) > fewest:
        fail(f"--pass_k {max(pass_k)}: {task} has {fewest} responses to one problem; lower it")
    per_problem = {key: statistics.fmean(rewards) for key, rewards in problems.items()}
    score, error, passes = None, None, {}
    if errors <= MAX_SANDBOX_ERRORS * len(rows):
        score, error = mean_and_error(list(per_problem.values()))
        for k in pass_k or sorted({*(2**i for i in range(fewest.bit_length())), fewest}):
            enough = [(len(some), sum(some)) for some in problems.values() if len(some) >= k]
            passes[k] = mean(pass_at_k(n, c, k) for n, c in enough)
    return {
        "problems": len(sizes), "samples": fewest, "score": score, "error": error, "pass": passes,
        "tokens": mean(row["tokens"] for row in rows),
        "truncated": mean(r["finish_reason"] and r["finish_reason"] == "length" for r in rows),
        "no_answer": mean(row["reason"] == "no_answer" for row in rows),
        "sandbox_errors": errors / len(rows), "per_problem": per_problem,
    }  # fmt: skip


def percent(value):
    return "-" if value is None else f"{100 * value:.1f}"


def markdown(header, rows):
    """A table that is aligned, so readable in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    rows = [header, ["-" * width for width in widths], *rows]
    cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def finish(folder, settings, tasks, pass_k=()):
    """{task: rows} -> results.json, results.md, and the table on the screen."""
    summaries = {task: summarise(task, rows, pass_k) for task, rows in tasks.items()}
    ks = sorted({k for s in summaries.values() for k in s["pass"]})
    header = ["%", "problems", "k", "avg@k", "s.e.", *(f"pass@{k}" for k in ks), "tokens",
              "truncated", "no answer", "sandbox errors"]  # fmt: skip
    table, notes, average = [], "", None
    for task, s in summaries.items():
        scores = map(percent, (s["score"], s["error"], *map(s["pass"].get, ks)))
        tokens = "-" if s["tokens"] is None else f"{s['tokens']:.0f}"
        shares = [percent(s[key]) for key in ("truncated", "no_answer", "sandbox_errors")]
        table.append([task, str(s["problems"]), str(s["samples"]), *scores, tokens, *shares])
        if s["score"] is None:
            notes += (f"\n{task}: no score, as the sandbox failed on {shares[-1]}% of the responses; "
                      "the same command again scores those anew\n")  # fmt: skip
    if len(summaries) > 1 and not notes:  # unweighted, as in the paper's table
        error = math.hypot(*(s["error"] or 0 for s in summaries.values())) / len(summaries)
        average = {"score": mean(s["score"] for s in summaries.values()), "error": error}
        row = ["average", "", "", *map(percent, average.values())]
        table.append(row + [""] * (len(header) - len(row)))
    table = markdown(header, table) + notes
    results = {"settings": settings, "benchmarks": summaries, "average": average}
    write_atomic(folder / "results.json", json.dumps(results, indent=1))
    write_atomic(folder / "results.md", table)
    print(f"\n{table}\n{folder / 'results.json'}")


# ----------------------------------------------------------------------------------------
# 4. Sampling. Every batch is scored and appended to samples.jsonl. A response is a function of
#    weights, settings, prompt and its own seed (but for rounding on a GPU, which depends on the
#    batch), so an evaluation that was killed goes on with what is missing, and any number of ranks
#    gives the same table.

PLACE = ("task", "id", "sample", "prompt_hash", "problem_hash")  # tells responses apart


def choose_preset(options, model_config):
    """(sampling, instruction, thinking) for this model; flags override. A checkpoint of ours keeps
    the prompt format that it was trained with."""
    trained = run_config(Path(options.model).expanduser().parent)
    preset, family = options.preset, model_config.model_type
    if preset == "auto":
        is_math = "math" in Path(trained.get("model") or options.model).name.lower()
        preset = "qwen2.5-math" if family == "qwen2" and is_math else "other"
        if family == "qwen3":
            preset = "qwen3" if trained.get("enable_thinking", True) else "qwen3-non-thinking"
        if options.benchmarks == ["toy"]:
            preset = "toy"
    sampling, instruction, thinking = PRESETS[preset]
    if options.preset == "auto":
        instruction = trained.get("instruction", instruction)
    context = model_config.max_position_embeddings
    room = max(context - 4096, context * 3 // 4)  # the rest is for the prompt
    max_tokens = options.max_tokens or min(sampling.max_tokens, room)
    temperature = options.temperature or sampling.temperature
    return replace(sampling, max_tokens=max_tokens, temperature=temperature), instruction, thinking


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
                     f"{length} prompt tokens and the model a context of {context}; lower it")  # fmt: skip
            hashes = digest(problem["prompt_ids"]), digest([problem["problem"], problem["answer"]])
            for sample in range(options.samples or ALL[name].samples):
                wanted[name, problem["id"], sample, *hashes] = problem
    return wanted


def read_lines(path):
    """Rows of a .jsonl file whose last line may be cut off."""
    if path.exists():
        with open(path, encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


def merge_ranks(folder):
    """Moves what the other ranks wrote into samples.jsonl. A row that is there twice is no harm."""
    samples = folder / "samples.jsonl"
    if samples.exists():  # or a torn last line would swallow the next one
        os.truncate(samples, samples.read_bytes().rfind(b"\n") + 1)
    for part in sorted(folder.glob("samples.rank*.jsonl")):
        append_lines(samples, read_lines(part))
        part.unlink()


def read_samples(folder, settings_hash):
    """{place: row} of these settings, without the texts: there may be gigabytes of them."""
    rows = (row | {"response": ""} for row in read_lines(folder / "samples.jsonl"))
    rows = (row for row in rows if row["settings"] == settings_hash)
    return {tuple(row[key] for key in PLACE): row for row in rows}


def evaluate(options):
    rank, world, device = setup_distributed()
    model_config = load_from_hub(hf.AutoConfig, options.model)
    tokenizer = load_tokenizer(options.model)
    sampling, *prompt_format = choose_preset(options, model_config)
    kind, path = pick_engine(options.engine), Path(options.model).expanduser()
    dtype = "bfloat16" if kind == "vllm" and device.type == "cuda" else "float32"
    # A checkpoint that was trained further is another model, one that was moved is not.
    stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in path.glob("*.safetensors")]
    settings = asdict(sampling) | {
        "weights": sorted(stamps) or [options.model, model_config._commit_hash],
        "engine": kind, "dtype": dtype, "seed": options.seed, "prompt_format": prompt_format,
    }  # fmt: skip
    context = model_config.max_position_embeddings
    wanted = list_samples(options, tokenizer, sampling, *prompt_format, context)
    folder = Path(options.out or (path if path.is_dir() else Path("runs", path.name)), "eval")
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        merge_ranks(folder)  # what an evaluation that was killed had written
        print0(f"{options.model}: {kind}, {sampling}, {len(wanted)} responses, to {folder}")
    over_ranks(0, device)  # the ranks meet, so that all read the same file
    done = read_samples(folder, digest(settings))
    over_ranks(0, device)  # before any of them writes
    missing = [p for p in wanted if p not in done or done[p]["reason"] == "sandbox_error"]
    if missing:  # on every rank, even if its share is empty: vLLM's start is a common act
        stop_ids = stop_token_ids(options.model, tokenizer)
        if kind == "vllm":  # it may have 0.9 of the GPU's memory: no trainer is beside it
            longest = sampling.max_tokens + max(len(wanted[p]["prompt_ids"]) for p in missing)
            engine = VLLMEngine(options.model, stop_ids, longest, dtype, 0.9, options.seed)
        else:
            policy = load_policy(options.model, device)
            engine = TransformersEngine(policy, stop_ids, options.batch_size)
        turn = {problem: i for i, problem in enumerate(dict.fromkeys(p[:2] for p in missing))}
        share = [p for p in missing if turn[p[:2]] % world == rank]  # whole problems
        share.sort(key=lambda p: len(wanted[p]["prompt_ids"]))  # batches with little padding
        same = {"settings": digest(settings), "sampling": asdict(sampling), "model": options.model}
        todo = {p: wanted[p] for p in share}
        sample_and_score(todo, engine, tokenizer, sampling, same, folder, options, rank)
    over_ranks(0, device)
    if rank == 0:
        merge_ranks(folder)
        done = read_samples(folder, digest(settings))
        tasks = {name: [done[p] for p in wanted if p[0] == name] for name in options.benchmarks}
        finish(folder, asdict(options) | settings, tasks, options.pass_k)


def sample_and_score(todo, engine, tokenizer, sampling, same, folder, options, rank):
    """Appends a row, with what is the `same` in all of them, for each {place: problem} of `todo`."""
    path = folder / (f"samples.rank{rank}.jsonl" if rank else "samples.jsonl")
    right, bar = 0.0, tqdm(total=len(todo), unit="sample", disable=rank > 0)
    with Verifier() as verifier, bar:
        for start in range(0, len(todo), options.batch_size):
            places = list(todo)[start : start + options.batch_size]
            problems = [todo[p] for p in places]
            seeds = [sample_seed(options.seed, "eval", *p[:3]) for p in places]
            prompts = [problem["prompt_ids"] for problem in problems]
            label = "" if rank else places[0][0]
            responses = engine.generate(prompts, 1, sampling, seeds, label)
            texts = [tokenizer.decode(r.ids, skip_special_tokens=True) for r in responses]
            ready = [p | {"tests": p["tests"]()} if "tests" in p else p for p in problems]
            verdicts, rows = verifier.score(texts, ready), []
            for p, response, text, verdict in zip(places, responses, texts, verdicts):
                cost = {"finish_reason": response.finish_reason, "tokens": len(response.ids)}
                score = verdict_fields(todo[p], text, verdict)
                rows.append(same | dict(zip(PLACE, p)) | score | cost)
            append_lines(path, rows)
            right += sum(row["reward"] for row in rows)
            bar.set_postfix_str(f"accuracy {right / (start + len(rows)):.3f}", refresh=False)
            bar.update(len(rows))


def verdict_fields(problem, text, verdict):
    """What a row of samples.jsonl says of the score, sampled or replayed."""
    return {
        "response": text, "extracted": None if problem.get("tests") else extract_answer(text),
        "gold": problem.get("answer"), "reward": verdict.reward, "reason": verdict.reason,
    }  # fmt: skip


def replay(options):
    """Scores the responses of a file: rows of problem, response, and answer or tests (func_name);
    optional are task, tokens, finish_reason and model. Same problem and answer: one problem."""
    path = Path(options.responses)
    rows = [dict(row) for row in read_rows(str(path))[0]] if path.is_file() else []
    if not rows:
        fail(f"--responses {path}: there is no such file, or it has no rows")
    for i, row in enumerate(rows, 1):
        if not row.keys() >= {"problem", "response"} or not row.keys() & {"answer", "tests"}:
            fail(f"{path} row {i}: needs problem, response and answer (or tests); has {[*row]}")
        if not isinstance(row.get("tokens") or 0, int | float):
            fail(f"{path} row {i}: tokens is {row['tokens']!r}; make it a number, or leave it out")
        row["answer"] = gold_text(row.get("answer"))
    try:
        with Verifier() as verifier:
            verdicts = verifier.score([row["response"] for row in rows], rows, progress=True)
    except RowError as error:  # an empty gold, a response that is no text
        fail(f"{path} row {error.row + 1}: {error.message}")
    tasks, counts = defaultdict(list), Counter()
    for row, verdict in zip(rows, verdicts):
        task, key = str(row.get("task") or path.stem), digest([row["problem"], row["answer"]])
        place = {"task": task, "id": key, "sample": counts[task, key], "problem_hash": key}
        known = {name: row.get(name) for name in ("tokens", "finish_reason", "model")}
        tasks[task].append(place | verdict_fields(row, row["response"], verdict) | known)
        counts[task, key] += 1
    folder = Path(options.out or path.with_suffix(""), "eval")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for some in tasks.values() for row in some]
    write_atomic(folder / "samples.jsonl", "".join(lines))
    finish(folder, asdict(options), tasks, options.pass_k)


# ----------------------------------------------------------------------------------------
# 5. Comparison, paired: on the same problems, so that their difficulty cancels.


def compare(options):
    runs = [run.rstrip("/") for run in options.compare]
    if len(set(runs)) < max(2, len(runs)):
        fail(f"--compare {' '.join(runs)}: name two runs or more, each once")
    names = [Path(run.removesuffix("/checkpoint")).name for run in runs]
    names = names if len(set(names)) == len(runs) else runs
    results = {}  # {run: {benchmark with a score: {problem: score}}}
    for name, run in zip(names, runs):
        places = [Path(run, place, "results.json") for place in ("", "eval", "checkpoint/eval")]
        found = [place for place in places if place.is_file()]
        if not found:
            fail(f"--compare {run}: no eval/results.json in it; evaluate it first with --model")
        tasks = json.loads(found[0].read_text())["benchmarks"].items()
        results[name] = {task: s["per_problem"] for task, s in tasks if s["score"] is not None}
    scores = {}  # {benchmark: {run: scores of the problems that all runs have}}
    for task in results[names[0]]:
        tables = [result.get(task, {}) for result in results.values()]
        if keys := [key for key in tables[0] if all(key in table for table in tables)]:
            scores[task] = {n: [t[key] for key in keys] for n, t in zip(names, tables)}
    if not scores:
        fail(f"--compare {' '.join(runs)}: no problem has a score in all of them")
    if left_out := sorted(set().union(*results.values()) - scores.keys()):
        print(f"left out, as not all runs have a score on common problems: {', '.join(left_out)}")
    pairs = [(b, a) for a, b in itertools.combinations(names, 2)]

    def row(label, count, tasks):
        cells = [percent(mean(statistics.fmean(some[name]) for some in tasks)) for name in names]
        for a, b in pairs:
            differences = [[x - y for x, y in zip(some[a], some[b])] for some in tasks]
            interval = [100 * x for x in paired_bootstrap(differences)]
            cells.append("{:+.1f} [{:+.1f}, {:+.1f}]".format(*interval))
        return [label, count, *cells]

    rows = [row(task, str(len(some[names[0]])), [some]) for task, some in scores.items()]
    if len(rows) > 1:
        rows.append(row("average", "", list(scores.values())))
    print(markdown(["%", "problems", *names, *(f"{a} - {b}" for a, b in pairs)], rows))
    print("brackets: 95% interval of the difference, paired bootstrap over problems\n")
    curves, rows = {}, []
    for name, run in zip(names, runs) if options.metrics else []:
        x, y = accuracy_curve(Path(run.removesuffix("/checkpoint")))
        if not x:
            fail(f"--metrics: {name} was not evaluated during training; drop the flag")
        best, last = curves[name] = max(y), y[-1]
        rows.append([name, *map(percent, (best, last, best - last)), str(x[y.index(best)])])
    if rows:
        print(markdown(["during training, %", "best", "last", "lost", "best at update"], rows))
    folder = Path(options.out or Path(runs[0]).absolute().parent, "eval")
    folder.mkdir(parents=True, exist_ok=True)
    print(draw_compare(scores, curves, folder / "compare.png"))


# ----------------------------------------------------------------------------------------
# 6. Pictures. Figure objects, no pyplot: nothing global is left in a trainer's process and no
#    display is needed. Sized for a README, labelled on the lines, safe for colour-blind readers.

# Okabe-Ito palette; a rule has the same colour in every picture.
COLORS = {"sequence": "#0072B2", "token": "#D55E00", "balanced": "#009E73"}
SPARE_COLORS = ["#CC79A7", "#E69F00", "#56B4E9", "#666666"]  # a fork's rules, runs without a rule
INK, GRAY, GRID, BLUE, ORANGE = "#333333", "#888888", "#E4E4E4", "#0072B2", "#D55E00"


def color_of(names):
    """{name: colour}: of the rule in its name, for the first name that has it, or a spare one."""
    free, spare, colors = dict(COLORS), itertools.cycle(SPARE_COLORS), {}
    for name in names:
        rule = next((rule for rule in free if rule in name), None)
        colors[name] = free.pop(rule) if rule else next(spare)
    return colors


def new_figure(widths, height, rows=1, margin=0):
    """A figure and its panels, row by row; widths of the columns, height and right margin in
    inches."""
    size, grid = (sum(widths) + margin, height), {"squeeze": False, "width_ratios": widths}
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    panels = figure.subplots(rows, len(widths), **grid).ravel()
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color=GRID, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.tick_params(colors=INK, labelsize=9)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set(color=INK, fontsize=11 if text is panel.title else 9)
    return figure, panels


def label_ends(panel, ends, share):
    """Write each ([height], text, color) at the right edge, beside the end of its line ([]: it has
    none); texts nearer to one another than this share of the panel's height move apart."""
    low, high = panel.get_ylim()
    ends = sorted(end for end in ends if end[0])
    heights = [height for (height,), _, _ in ends]
    for _ in range(50):  # push neighbours apart by halves until all have room
        for i in range(len(heights) - 1):
            push = max(0.0, share * (high - low) - (heights[i + 1] - heights[i])) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    for (_, text, color), y in zip(ends, heights):
        panel.annotate(text, (1, y), (4, 0), ("axes fraction", "data"), "offset points", color=color,
                       va="center", fontsize=10, fontweight="bold", annotation_clip=False)  # fmt: skip


def read_run(run):
    """config.json and the rows of metrics.jsonl of a training run."""
    if not (metrics := Path(run, "metrics.jsonl")).exists():
        fail(f"{run} has no metrics.jsonl: name the folder of a training run")
    return run_config(run), list(read_lines(metrics))


def accuracy_curve(run):
    """Held-out accuracy over updates done: 0 is the untrained policy."""
    rows = [row for row in read_run(run)[1] if row.get("eval_accuracy") is not None]
    return [row["eval_step"] for row in rows], [row["eval_accuracy"] for row in rows]


def draw_curves(run):
    """runs/<name>/curves.png: does it learn, how long are right and wrong responses, is the policy
    healthy, and the two biases as numbers. Works while the run is going on."""
    config, rows = read_run(run)
    figure, (learning, lengths, health, biases) = new_figure([5.5, 5.5], 6.6, rows=2)
    half = len(rows) // 50  # long runs get a running mean over the raw line; short ones stay raw

    def plot(panel, key, color, label=""):
        """Returns what label_ends needs."""
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        x, y = zip(*points) if points else ((), ())
        means = [mean(y[max(0, i - half) : i + half + 1]) for i in range(len(y))]
        if half:
            panel.plot(x, y, color=color, lw=0.7, alpha=0.3)
        panel.plot(x, means, color=color, lw=1.8, marker="." if len(x) == 1 else None)
        return means[-1:], label, color

    learning.set(title="Does it learn?", ylim=(-0.02, 1.02))
    x, y = accuracy_curve(run)
    learning.plot(x, y, color=BLUE, lw=1.8, marker="o", markersize=4.5)
    reward = plot(learning, "reward", ORANGE, "training\nreward")
    label_ends(learning, [reward, (y[-1:], "held-out\naccuracy", BLUE)], 0.16)

    lengths.set_title("Tokens per response (right: A > 0, wrong: A < 0)")
    lines = ("length_pos", BLUE, "right"), ("length", GRAY, "all"), ("length_neg", ORANGE, "wrong")
    ends = [plot(lengths, *line) for line in lines]
    lengths.set_ylim(0)
    label_ends(lengths, ends, 0.07)

    health.set_title("Is the policy healthy?")
    biases.set_title("The two biases (0 and 1: none)")
    spread = biases.twinx()
    for side, key, label, color in (
        (health, "entropy", "entropy (nats)", BLUE),
        (health.twinx(), "grad_norm", "gradient norm", ORANGE),
        (biases, "net_advantage", "net advantage", BLUE),
        (spread, "weight_spread", "weight spread", ORANGE),
    ):
        plot(side, key, color)
        side.set_ylabel(label, color=color, fontsize=9)
        side.tick_params(axis="y", colors=color, labelsize=9)  # each axis is in its line's colour
        side.spines["top"].set_visible(False)
        if side is not biases:
            side.set_ylim(0)
    low, high = biases.get_ylim()  # noise of 1e-9 must not fill the panel
    biases.set_ylim(min(low, -0.5), max(high, 0.5))
    spread.set_ylim(0, max(4, spread.get_ylim()[1]))  # so that 1 is not at the height of 0

    last = rows[-1]["step"] if rows else 1
    for panel in (learning, lengths, health, biases):
        panel.set(xlabel="step", xlim=(-0.02 * last, 1.02 * last))
    rule, steps = config.get("aggregation", "?"), config.get("steps", "?")
    so_far = "" if last == steps else f", {len(rows)} of {steps} steps so far"
    figure.suptitle(f"{Path(run).name}: {rule} aggregation{so_far}", fontweight="bold", color=INK)
    path = Path(run, "curves.png")
    figure.savefig(path)
    return path


def draw_rules(runs, path):
    """runs/compare.png: held-out accuracy of {world: {rule: [run of each seed]}}, one panel per
    world. Thick: mean over seeds, where all have been evaluated. Thin: each seed."""
    figure, panels = new_figure([5.6] * len(runs), 4)
    for panel, (world, rules) in zip(panels, runs.items()):
        colors, ends = color_of(rules), []
        for rule, seeds in rules.items():
            curves = [dict(zip(*accuracy_curve(run))) for run in seeds]
            x = sorted(set.intersection(*map(set, curves)))
            means = [mean(curve[step] for curve in curves) for step in x]
            for curve in curves:
                panel.plot(curve.keys(), curve.values(), color=colors[rule], lw=0.8, alpha=0.35)
            panel.plot(x, means, color=colors[rule], lw=2.4, marker="o", markersize=4)
            ends += [([y], f"{rule} {y:.2f}", colors[rule]) for y in means[-1:]]
        panel.set(title=world, xlabel="updates", ylim=(0, 1))
        label_ends(panel, ends, 0.07)
    panels[0].set_ylabel("held-out accuracy")
    n = max(len(seeds) for rules in runs.values() for seeds in rules.values())
    what = f"mean of {n} seeds (thin: each seed)" if n > 1 else "one seed"
    figure.suptitle(f"Held-out accuracy: {what}", fontweight="bold", color=INK)
    figure.savefig(path)
    return path


def rules_table(runs):
    """The same runs as numbers, means over seeds: accuracy (`mean` is over the whole training, by
    the trapezoid rule), then means over steps; last, by how much `balanced` beats the rule in `mean`:
    the mean over seeds of the difference, its standard error, and the seeds where it is above 0."""
    formats = {"initial": "{:.3f}", "best": "{:.3f}", "last": "{:.3f}", "mean": "{:.3f}",
               "length": "{:.1f}", "length gap": "{:+.1f}", "abs(net advantage)": "{:.3f}"}  # fmt: skip

    def numbers(run):
        (x, y), (_, steps) = accuracy_curve(run), read_run(run)
        area = sum((b - a) * (c + d) / 2 for a, b, c, d in zip(x, x[1:], y, y[1:]))
        initial = y[0] if x[:1] == [0] else None  # a run of one step is only scored at its end
        scores = [initial, max(y, default=None), y[-1] if y else None]
        scores.append(area / (x[-1] - x[0]) if len(x) > 1 else None)
        gap = mean(step["length_gap"] for step in steps)
        net = mean(abs(step["net_advantage"]) for step in steps)
        return [*scores, mean(step["length"] for step in steps), gap, net]

    def lead(ours, theirs):
        pairs = [(a[3], b[3]) for a, b in zip(ours, theirs)]
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        if ours is theirs or not differences:
            return "-"
        value, error = mean_and_error(differences)
        wins = f"{sum(d > 0 for d in differences)} of {len(differences)}"
        return f"{value:+.3f}" + (f" ± {error:.3f}" if error is not None else "") + f", {wins}"

    table = []
    for world, rules in runs.items():
        rows = {rule: list(map(numbers, seeds)) for rule, seeds in rules.items()}
        for rule, seeds in rows.items():
            means = zip(formats.values(), map(mean, zip(*seeds)))
            cells = ["-" if value is None else form.format(value) for form, value in means]
            table.append([world, rule, *cells, lead(rows.get("balanced", seeds), seeds)])
    return markdown(["world", "rule", *formats, "balanced leads"], table)


def draw_compare(scores, curves, path):
    """compare.png: {task: {run: scores of its problems}} as bars with 95% intervals; beside it,
    {run: (best, last)} accuracy while it trained: how stable the run was."""
    names = list(next(iter(scores.values())))
    colors, width = color_of(names), 0.8 / len(names)
    widths = [max(4, 1.4 * len(scores))] + [4] * bool(curves)
    figure, panels = new_figure(widths, 3.8, margin=0.6 + 0.09 * max(map(len, names)))
    for i, name in enumerate(names):
        means, errors = zip(*(mean_and_error(runs[name]) for runs in scores.values()))
        x = [task + (i - (len(names) - 1) / 2) * width for task in range(len(scores))]
        intervals = [1.96 * (error or 0) for error in errors]
        panels[0].bar(x, means, 0.92 * width, yerr=intervals, color=colors[name], label=name,
                      ecolor=INK, capsize=2)  # fmt: skip
    panels[0].set_xticks(range(len(scores)), list(scores))
    panels[0].set(title="avg@k with 95% interval over problems", ylim=(0, None))
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    for i, (name, (best, last)) in enumerate(curves.items()):
        panels[1].plot([best, last], [i, i], "o-", color=colors[name], lw=2, ms=10)
        panels[1].plot(best, i, "o", color="white", ms=7)
        panels[1].plot(last, i, "o", color=colors[name], ms=4)  # shows where it is the best too
    if curves:
        panels[1].set(title="during training: best (open), last (full)", yticks=[])
        panels[1].set_ylim(len(curves) - 0.4, -0.6)
        panels[1].grid(axis="x", color=GRID, linewidth=0.7)
        panels[1].xaxis.set_major_locator(AutoLocator())
    figure.savefig(path)
    return path


# ----------------------------------------------------------------------------------------
# 7. Command line


def parse(argv=None):
    parser = hf.HfArgumentParser(Options, description=__doc__.split("\n")[0], allow_abbrev=False)
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
