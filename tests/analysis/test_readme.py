"""The numbers of README's main results, computed from the records once more."""

from pathlib import Path

import pandas as pd
import pytest

from acp_repro.common.statistics import over_draws

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def record(name: str, **wanted) -> pd.DataFrame:
    """The rows of ``results/NAME.csv``, or of that packed, that have these values."""
    table = pd.read_csv(next(RESULTS.glob(f"{name}.csv*")))
    for column, value in wanted.items():
        table = table[table[column] == value]
    assert len(table), (name, wanted)
    return table


def pruned(run: str) -> float:
    blocks = record(f"{run}/pruned_ratio")
    return 100 * blocks["pruned_blocks"].sum() / blocks["causal_blocks"].sum()


def two(quantity: str, size: str, length: str) -> list[float]:
    """With ACP and exact, of one model."""
    table = record(f"h200-sizes/pro-{size}-{length}-acp/{quantity}").set_index("method")
    columns = {"attention_time": ["forward_ms", "backward_ms"], "throughput": ["throughput_tokens_per_s"]}[
        quantity
    ]
    return [table.loc[method, columns].sum() for method in ("acp", "exact")]


LENGTHS = ("4k", "8k", "16k")


def safe() -> str:
    lost = [
        (pd.read_csv(path)["largest_pruned_mass"].max(), path.parent.name)
        for path in RESULTS.glob("*/*/pruned_mass.csv")
    ]
    most, run = max(lost)
    assert run == "pro-760m-4k-acp"
    return f"no query loses more than {most:.1e} of its weight."


def skipped() -> str:
    one, other, last = (round(pruned(f"h200-sizes/pro-125m-{length}-acp")) for length in LENGTHS)
    arm = pruned("h200-arms/pro-125m-lr2e-3-50k-4k-acp")
    ours = f"**{one}, {other} and {last} % of the blocks** at 4k, 8k and 16k|one training skips {arm:.1f} %"
    for size in ("360m", "760m"):
        larger = [round(pruned(f"h200-sizes/pro-{size}-{length}-acp")) for length in LENGTHS]
        assert all(abs(a - b) <= 1 for a, b in zip(larger, (one, other, last), strict=True))
    return f"{ours}|and within one point of that at 360M and at 760M"


def saved() -> str:
    each = []
    for size in ("125m", "360m", "760m"):
        times = [two("attention_time", size, length) for length in LENGTHS]
        less = [str(round(100 * (1 - acp / exact))) for acp, exact in times]
        rates = [two("throughput", size, length) for length in LENGTHS]
        more = [str(round(100 * (acp / exact - 1))) for acp, exact in rates]
        words = ("{}, {} and {}".format(*numbers) for numbers in (less, more))
        each.append([f"{number} % {end}" for number, end in zip(words, ("less time", "faster"), strict=True)])
    steps = record("h200-speed/benchmark/training_step", size="760M", implementation="triton")
    rate = steps.set_index(["context_length_tokens", "method"])["throughput_tokens_per_s"]
    more = [round(100 * (rate[n, "acp"] / rate[n, "exact"] - 1)) for n in (4096, 16384)]
    drawn = "(760M: {} and {} %)".format(*more)
    larger = "; ".join(
        f"{size}: {', '.join(found)}" for size, found in zip(("360M", "760M"), each[1:], strict=True)
    )
    return f"{each[0][0]}|{each[0][1]}|{larger}|{drawn}"


def retrieval() -> str:
    tables = {
        (method, seed): record(
            f"h200-needle/pro-125m-4k-{method}-needles75-seed{seed}/needle_facts", method=method
        )
        for method in ("acp", "exact")
        for seed in (1, 2, 3)
    }
    found = [100 * table["answer_recall"].mean() for table in tables.values()]
    three = "{:.1f}, {:.1f} and {:.1f} %"
    words = f"pairs find {three} of the words with ACP, {three} without".format(*found)
    lost = 100 * record("h200-needle/pro-125m-4k-exact-needles75-seed2/needle")["answer_recall"].mean()
    return f"an exact run of another seed finds {lost:.1f} %|{words}"


def change() -> str:
    """The pairs of one code that are counted, and with those that are trained for retrieval."""
    counted = [
        *(("h100", "125m-16k", ""), ("h200-long", "125m-16k", "-seed1")),
        *(("h200-sizes", shape, "") for shape in ("360m-4k", "360m-16k", "760m-4k")),
        *(("h200-sizes", f"125m-{length}", "") for length in LENGTHS),
        *(("h200-llama", f"125m-{length}", "") for length in ("4k", "16k")),
    ]
    needles = [("h200-needle", "125m-4k", f"-needles75-seed{seed}") for seed in (1, 2, 3)]

    def difference(suite: str, shape: str, end: str) -> float:
        kind = "llama" if suite == "h200-llama" else "pro"
        paths = (f"{suite}/{kind}-{shape}-{method}{end}/loss" for method in ("acp", "exact"))
        acp, exact = (record(path)["loss_nats"].iloc[0] for path in paths)
        return acp - exact

    few, more = ([difference(*pair) for pair in pairs] for pairs in (counted, needles))
    ends = (
        "Ten pairs of models were trained, one with ACP and one without (*exact*). The held-out loss with "
        "ACP minus that without is {:+.4f} nats on average (90 % interval {:+.4f} to {:+.4f}). Six of these "
        "ten pairs"
    )
    assert sum(gap == 0 for gap in few) == 6
    rest = "the mean of thirteen is {:+.4f} ({:+.4f} to {:+.4f})"
    both = (over_draws(gaps).interval(0.1) for gaps in (few, few + more))
    words = [form.format(*found) for form, found in zip((ends, rest), both, strict=True)]
    apart = "({:+.4f}, {:.4f} and {:.4f})".format(*more)
    return "|".join((words[0], f"{apart} {words[1]}"))


def kernel() -> str:
    table = record("h100/benchmark/kernel_time", length_tokens=16384).set_index(["implementation", "method"])
    ms = table["forward_backward_ms"]
    ours = f"**{ms['triton', 'acp']:.2f} ms with ACP, {ms['triton', 'exact']:.1f} ms without"
    theirs = f"takes {ms['official', 'acp']:.1f} and {ms['official', 'exact']:.1f} ms"
    table = record("h200-speed/benchmark/kernel_time", method="acp")
    ms_of = table.set_index(["length_tokens", "implementation"])["forward_backward_ms"]
    times = [ms_of[length, "official"] / ms_of[length, "triton"] for length in (4096, 16384)]
    paper = "{:.1f} and {:.1f} times as fast as theirs at 4k and 16k".format(*times)
    cudnn, fa4 = (ms[name, "no gates"] for name in ("cudnn", "fa4"))
    return f"{ours}|{theirs}|without gates takes {cudnn:.1f} ms (cuDNN) and {fa4:.1f} ms (Flash|{paper}"


def step() -> str:
    table = record("h100/benchmark/training_step", size="125M", method="acp", ranks=1, vocab_size=50257)
    rate = table.set_index(["context_length_tokens", "implementation"])["throughput_tokens_per_s"]
    short, long = (rate[n, "triton"] / rate[n, "official"] for n in (4096, 16384))
    table = record("h100/benchmark/training_step", size="760M", method="acp", ranks=1)
    rate = table.set_index(["context_length_tokens", "implementation"])["throughput_tokens_per_s"]
    larger = " and ".join(f"{rate[n, 'triton'] / rate[n, 'official']:.2f}" for n in (4096, 16384))
    table = record("h200-speed/benchmark/training_step", method="acp")
    rate = table.set_index(["size", "context_length_tokens", "implementation"])["throughput_tokens_per_s"]
    shapes = [("125M-recomputed", 4096), ("125M-recomputed", 16384), ("760M-recomputed", 4096)]
    again = [rate[(*shape, "triton")] / rate[(*shape, "official")] for shape in shapes]
    recomputed = "share: {:.2f} and {:.2f} times at 125M, {:.2f} at 760M and 4k".format(*again)
    return f"**{short:.2f} and {long:.2f} times as fast**|at 760M {larger} times|{recomputed}"


def generation() -> str:
    table = record("h100/benchmark/decode_time", scope="model", batch=64, length_tokens=16384)
    acp, exact = (table[table["method"] == method].iloc[0] for method in ("acp", "exact"))
    faster = exact["step_ms"] / acp["step_ms"]
    gib = [one["allocated_bytes"] / 2**30 for one in (acp, exact)]
    times = f"{acp['step_ms']:.2f} ms a step instead of {exact['step_ms']:.2f}"
    return f"**{faster:.1f} times as fast|{times}|{gib[0]:.1f} GiB instead of {gib[1]:.2f}"


def retention() -> str:
    def score(task: str, *runs: str, split: str = "test") -> float:
        tables = [record(f"retention-h200/{task}-base-{run}/score", split=split) for run in runs]
        return sum(table["score_percent"].iloc[0] for table in tables) / len(tables)

    tasks = ("imdb", "sst2", "facts", "haystack")
    full, pruned, random = (
        [f"{method}{seed}" for seed in ("", "-seed1", "-seed2")]
        for method in ("dense", "ar-30-input", "random-30-input")
    )
    dense, ours = ([score(task, *runs) for task in tasks] for runs in (full, pruned))
    drawn = [score(task, *(random if task == "haystack" else random[:1])) for task in tasks]
    each = [f"{a:.1f} of {b:.1f}" for a, b in zip(ours, dense, strict=True)]
    shares = [100 * a / b for a, b in zip(ours, dense, strict=True)]
    kept = f"keep {min(shares):.0f} to {max(shares):.0f} % of the test score"
    at_random = "Random tokens: {:.1f}, {:.1f}, {:.1f} and {:.1f}.".format(*drawn)
    phrases = 100 * score("sst2", *pruned, split="dev") / score("sst2", *full, split="dev")
    after = score("sst2", *(f"ar-30-afterblocks{seed}" for seed in ("", "-seed1", "-seed2")))
    rest = f"SST-2 ({score('sst2', 'random-30-afterblocks'):.1f}, ours {after:.1f})"
    words = [
        record(f"retention-h200/{task}-base-dense/bag_of_words", split="test")["score_percent"].max()
        for task in tasks[:2]
    ]
    bag = "IMDb ({:.1f}) and SST-2 ({:.1f})".format(*words)
    return "|".join((*each, kept, at_random, rest, f"dev phrases {phrases:.0f} % is kept", bag))


def lap() -> str:
    def score(run: str, decoding: str, name: str) -> float:
        return record(f"lap-h200/{run}/reconstruction", decoding=decoding)[name].iloc[0]

    seeds = ("", "-seed1", "-seed2")
    soft = [f"soft-{lam}{seed}" for lam in (1, 3, 5) for seed in seeds]
    lost = [{f"{score(run, how, 'token_accuracy'):.3f}" for run in soft} for how in ("soft", "removed")]
    assert all(len(values) == 1 for values in lost)
    kept, accuracy = (100 * score("exact-10", "removed", name) for name in ("kept_ratio", "token_accuracy"))
    whole = sorted(100 * score(f"ungated{seed}", "free", "exact_match") for seed in seeds)
    free = f"{100 * score('exact-10', 'free', 'exact_match'):.0f} % of texts come back whole"
    falls = "falls from {} to {}".format(*(values.pop() for values in lost))
    ours = f"keep {accuracy:.1f} % with {kept:.0f} % of the tokens"
    return f"{falls}|{ours}|{free} ({whole[0]:.0f} to {whole[-1]:.0f} % without gates)"


@pytest.mark.parametrize(
    "row", [safe, skipped, saved, change, retrieval, kernel, step, generation, retention, lap]
)
def test_a_row_of_the_main_results_is_what_the_records_give(row):
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert [part for part in row().split("|") if part not in text] == []


def test_the_gates_that_are_drawn_prune_what_is_said():
    kernels = record("h100/benchmark/kernel_time", implementation="triton", method="acp")
    steps = record("h100/benchmark/training_step", implementation="triton", method="acp")
    shares = pd.concat([kernels["pruned_ratio"], steps["pruned_ratio"]])
    low, high = round(100 * shares.min()), round(100 * shares.max())
    assert f"{low} to {high} % of the blocks are pruned" in (ROOT / "README.md").read_text(encoding="utf-8")
