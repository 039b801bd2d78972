"""Our scripts beside their peers on a CPU, in turns, each peer in an environment of its own.

    python bench/beside.py                           # all rows, an hour of an idle machine
    python bench/beside.py --rows decode sandbox     # some; the page keeps the others in --out

The commands of both sides stand in beside.toml. A round runs ours, then each peer; the first round
warms up and does not count. All figures are times; a ratio is that of medians, peer / ours: above 1
ours is faster. A side that cannot be installed or fails is left out, and the page says why.

What --out holds is used again. Writes bench/results/beside.md, and each ratio into cpu.json.
"""

import concurrent.futures
import dataclasses
import http.client
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
import tomllib
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from record import RESULTS, cpu_name, record

import runs
from runs import Count

TOML = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CASES = TOML["case"]
ABOUT = ("row", "what", "unit")  # what a case has beside its commands
QUESTIONS = [f'def task_{i}(items):\n    """Return item {i}, doubled."""\n' for i in range(8)]


@dataclasses.dataclass(frozen=True)
class Config:
    # those to measure; none: all
    rows: tuple[typing.Literal[tuple({case["row"]: 0 for case in CASES})], ...] = ()
    out: str = "out/beside"  # folder of environments, models and files
    smol: str = ""  # folder with SmolLM2 as qwen2-instruct and dream-instruct; "" makes it
    cores: Count = 1  # of either side
    rounds: Count = 3  # that are timed
    side: tuple[str, ...] = ()  # internal: the function of SIDES to time, and its arguments


def main(cfg):
    if cfg.side:
        print(SIDES[cfg.side[0]](cfg, *cfg.side[1:]))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: cfg.cores])  # of all commands
    kept = Path(cfg.out) / "rows.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(kept.read_text()) if kept.exists() else {}
    for case in CASES:
        if cfg.rows and case["row"] not in cfg.rows:
            continue
        print(f"{case['row']}: {case['what']}", flush=True)
        measured = {name: case[name] for name in ABOUT} | {"sides": alternate(cfg, case)}
        keep(cfg, measured)
        found[case["what"]] = measured
        kept.write_text(json.dumps(found))
        cases = [found[case["what"]] for case in CASES if case["what"] in found]
        (RESULTS / "beside.md").write_text("\n".join([*head(cfg), "", *table(cases), ""]))


# ---- sides --------------------------------------------------------------------------------------


class Failed(Exception):
    """A side cannot run; the text says why."""


def printed(command, **variables):
    """What a shell command prints. Failed with the last line of its errors."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise Failed(lines[-1][:120])
    return done.stdout


def figure(cfg, command, unit):
    """Seconds of a command, or the number that it prints. Makes the environments that it needs."""
    out = Path(cfg.out).absolute()
    smol = str(Path(cfg.smol or out / "smol").absolute())
    variables = {"PYTHON": sys.executable, "OUT": str(out), "SMOL": smol}
    variables |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    for name, calls in TOML["environments"].items():
        if f"${name}" not in command:
            continue
        folder = out / "env" / name
        variables[name] = f"{folder}/bin/python"
        if not (folder / "complete").exists():
            lines = [f"$PYTHON -m venv {folder}"]
            lines += [f"${name} -m pip install --quiet {packages}" for packages in calls]
            printed("\n".join(lines), **variables)
            (folder / "complete").touch()
    started = time.perf_counter()
    text = printed(command, **variables)
    if unit == "s":
        return time.perf_counter() - started
    return float(text.splitlines()[-1])


def alternate(cfg, case):
    """{side: its figures, or why it has none}: ours, peer, ours, peer, .."""
    sides = {name: [] for name in case if name not in ABOUT}
    try:
        figure(cfg, TOML["prepare"].get(case["row"], "true"), "s")
    except Failed as error:
        return dict.fromkeys(sides, str(error))
    for i in range(1 + cfg.rounds):
        for name, figures in sides.items():
            if isinstance(figures, str):
                continue
            try:
                value = figure(cfg, case[name], case["unit"])
            except Failed as error:
                sides[name] = str(error)
                continue
            print(f"    {name}: {value:.4g} {case['unit']}", flush=True)
            if i:  # the first warms up
                figures.append(value)
    return sides


# ---- functions of ours, each in a process of its own --------------------------------------------


def timed(call):
    """Median seconds of three calls after one, divided by the number that a call returns."""
    count = call()
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / count


def complete(cfg, script, ckpt, settings):
    """Milliseconds a token of generate.py or generate_dream.py, of all prompts together."""
    import generate
    import generate_dream

    settings = {"ckpt": ckpt, "temperature": 0.0, "json": True} | json.loads(settings)
    requests = [(prompt, "") for prompt in QUESTIONS]
    if "prompt" in settings:
        requests = [(settings["prompt"], "")]
    if script == "generate.py":
        settings = generate.prepare(generate.Config(**settings))
        model = generate.PythonCoder(settings, len(requests))
    else:
        model = generate_dream.Dream(generate_dream.prepare(generate_dream.Config(**settings)))
    return 1000 * timed(lambda: sum(row["tokens"] for row, _ in model.complete(requests)))


def decode(cfg):
    """Milliseconds a token of PythonCoder's preset small, random weights, without drafts."""
    import jax
    from flax import nnx

    import model_pythoncoder as pc

    preset = pc.CONFIGS["small"]
    model = nnx.merge(pc.graph_of(preset, pc.Compute()), pc.new_params(preset, 0))
    rule = pc.Sampling(temperature=0.8, top_k=200, speculate=False)
    prompt = list(range(16))
    key = jax.random.key(0)
    return 1000 * timed(lambda: pc.generate(model, [prompt], 128, rule, key)[1]["tokens"])


def load(cfg, model, clients):
    """Milliseconds a token of serve.py, asked the questions by so many clients at a time."""
    command = [sys.executable, "extra/serve.py", f"--model={model}", "--port=0", "--warm"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip().removeprefix("http://")

        def ask(question):
            connection = http.client.HTTPConnection(address)
            body = json.dumps({"prompt": question, "max_tokens": 48, "temperature": 0})
            connection.request("POST", "/v1/completions", body)
            return json.load(connection.getresponse())["usage"]["completion_tokens"]

        def call():
            with concurrent.futures.ThreadPoolExecutor(int(clients)) as pool:
                # several clients ask twice as much: the batch is refilled
                return sum(pool.map(ask, QUESTIONS * min(2, int(clients))))

        try:
            return 1000 * timed(call)
        finally:
            process.terminate()


def logged(cfg, folder):
    """Seconds of a step by a trainer's log, of 4,096 tokens if that has no times; without its start."""
    seconds = []
    for row in map(json.loads, (Path(folder) / "log.jsonl").read_text().splitlines()):
        if "step_ms" in row:
            seconds.append(row["step_ms"] / 1000)
        elif "tok_per_s" in row:
            seconds.append(4096 / row["tok_per_s"])
    return statistics.median(seconds[2:])


def dream(cfg, side):
    """Seconds of a text by one side of bench_dream.py."""
    flags = "--max_new=64 --length=96 --repeats=1 --prompts 32 --batches 1".split()
    flags += [f"--side={side},float32", f"--folder={cfg.out}/dream"]
    command = [sys.executable, "bench/bench_dream.py", *flags]
    text = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(text.splitlines()[-1])["generate_s"]["32,1"][0]


SIDES = {function.__name__: function for function in (complete, decode, load, logged, dream)}


# ---- the page -----------------------------------------------------------------------------------


def head(cfg):
    """Command, device and versions."""
    found = {f"{name}=={importlib.metadata.version(name)}" for name in ("jax", "tokenizers")}
    for name, calls in TOML["environments"].items():
        if (Path(cfg.out) / "env" / name / "complete").exists():
            lines = printed(f"{cfg.out}/env/{name}/bin/python -m pip freeze").splitlines()
            found |= {line for line in lines if line.split("==")[0] in " ".join(calls)}
    yield f"`python bench/beside.py --cores={cfg.cores} --rounds={cfg.rounds}`, {cpu_name()}."
    yield f"Median (lowest to highest). {', '.join(sorted(found))}."


def table(cases):
    """The page's lines of measured cases."""
    yield "| row | what | ours | peer | its figure | peer / ours |"
    yield "|---" * 6 + "|"
    for case in cases:
        mine = case["sides"]["ours"]
        for name, peer in case["sides"].items():
            if name == "ours":
                continue
            ratio = ""
            if not isinstance(mine, str) and not isinstance(peer, str):
                ratio = f"{statistics.median(peer) / statistics.median(mine):.2f}"
            shown = (case["row"], case["what"], cell(case, mine), name, cell(case, peer), ratio)
            yield f"| {' | '.join(shown)} |"


def cell(case, figures):
    """The median and the spread of a side, or why it has none."""
    if isinstance(figures, str):
        return f"skipped: {figures}"
    median = statistics.median(figures)
    text = f"{median:.3g} {case['unit']} ({min(figures):.3g} to {max(figures):.3g})"
    if case["unit"] == "ms a token":
        text += f", {1000 / median:.0f} tokens/s"
    return text


def keep(cfg, case):
    """Put the ratios of a case into cpu.json."""
    mine = case["sides"]["ours"]
    for name, peer in case["sides"].items():
        if name == "ours" or isinstance(mine, str) or isinstance(peer, str):
            continue
        record(
            "cpu",
            f"beside, {case['row']}: {case['what']}: {name} / ours",
            statistics.median(peer) / statistics.median(mine),
            "ratio",
            spread=[min(peer) / max(mine), max(peer) / min(mine)],
            figures={"unit": case["unit"], "ours": mine, name: peer},
            cores=cfg.cores,
        )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
