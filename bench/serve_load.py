"""serve.py under load, beside generate.py --file on the same prompts; and under clients that
misbehave.

    python bench/serve_load.py                              # 1, 8 and 64 clients, a minute each; on an idle machine
    python bench/serve_load.py --clients 1 8 --seconds=5    # a first try
    python bench/serve_load.py --faults=1000                # hang-ups, half requests, ten times as many broken bodies
    python bench/serve_load.py --lengths=HumanEval.jsonl.gz --ckpt=out/diffucoder    # what continuous batching gives

Starts serve.py, whose flags are --model, --ckpt and --batch_size. Prints a table; --out writes it
to a file, too.
"""

import asyncio
import contextlib
import dataclasses
import gzip
import heapq
import io
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import typing
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import runs
from runs import Count, Natural

DOCSTRINGS = [
    "Count the words longer than 4 letters.",
    "Return the sum of the even numbers.",
    "Return the largest number.",
    "Reverse the words.",
    "Return the words that start with a vowel.",
    "Return the square of each number.",
    "Count the numbers above 10.",
    "Join the words with a dash.",
]
PROMPTS = [f'def task_{i}(items):\n    """{text}"""\n' for i, text in enumerate(DOCSTRINGS)]
HEADERS = "| clients | requests/s | tokens/s | first text, s: median | 99 % | whole answer, s: median | 99 % |"


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["pythoncoder", "dream"] = "pythoncoder"
    ckpt: str = "weights/pythoncoder"
    batch_size: Count = 8  # rows of serve.py and of generate.py
    clients: tuple[Count, ...] = (1, 8, 64)  # at a time
    seconds: Count = 60  # for each number of clients
    max_new: Count = 48
    faults: Natural = 0  # clients that hang up; 0 measures the load instead
    # HumanEval.jsonl.gz: only simulate steps with its lengths, by the tokenizer of --ckpt
    lengths: str = ""
    out: str = ""  # file for what is printed


def main(cfg):
    lines = []

    def say(line):
        print(line, flush=True)
        lines.append(line)

    if cfg.lengths:
        return simulate(cfg)
    with server(cfg) as (process, url):
        if cfg.faults:
            faults(cfg, process, url, say)
        else:
            say(f"{HEADERS}\n| --- |{' --- |' * 6}")
            for clients in cfg.clients:
                say(row_of(clients, cfg, asyncio.run(load(clients, cfg, url))))
    if not cfg.faults:
        rates = (
            f"{size} texts at once {from_file(cfg, size):.0f}"
            for size in (cfg.batch_size, len(PROMPTS) * 16)
        )
        say(f"\ngenerate.py --file, tokens/s once compiled: {', '.join(rates)}")
    if cfg.out:
        Path(cfg.out).write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def server(cfg):
    """(process, address) of serve.py."""
    flags = f"--model={cfg.model} --ckpt={cfg.ckpt} --batch_size={cfg.batch_size} --port=0 --queue=128 --warm".split()
    with subprocess.Popen(
        [sys.executable, "extra/serve.py", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def load(clients, cfg, url):
    """[(seconds to the first text, to the last, tokens)] of all answers that ended in time."""
    end, answers = time.perf_counter() + cfg.seconds, []

    async def ask(number):
        async with httpx.AsyncClient(timeout=300) as client:
            while time.perf_counter() < end:
                number += clients
                body = {
                    "prompt": PROMPTS[number % len(PROMPTS)],
                    "max_tokens": cfg.max_new,
                    "seed": number,
                }
                body |= {
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "temperature": 0.6,
                }
                began, first = time.perf_counter(), None
                async with client.stream("POST", url + "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        first = first or (time.perf_counter() - began if line else None)
                        if '"usage"' in line:
                            tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                if time.perf_counter() < end:
                    answers.append((first, time.perf_counter() - began, tokens))

    await asyncio.gather(*map(ask, range(clients)))
    return answers


def row_of(clients, cfg, answers):
    first, whole, tokens = zip(*answers, strict=True)
    times = (statistics.median(first), quantile(first), statistics.median(whole), quantile(whole))
    rates = f"{len(answers) / cfg.seconds:.1f} | {sum(tokens) / cfg.seconds:.0f}"
    return f"| {clients} | {rates} | {' | '.join(f'{x:.3f}' for x in times)} |"


def quantile(values):
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def from_file(cfg, size):
    """Tokens a second of generate.py on files of `size` prompts, in 16 rounds of the prompts, once
    all is compiled.
    """
    import generate
    import generate_dream

    settings = {"ckpt": str(ROOT / cfg.ckpt), "max_new": cfg.max_new}
    settings |= {"temperature": 0.6, "json": True}
    requests = [(prompt, "") for prompt in PROMPTS * 16]
    if cfg.model == "dream":
        settings["batch_size"] = cfg.batch_size
        model = generate_dream.Dream(generate_dream.prepare(generate_dream.Config(**settings)))
    else:
        model = generate.PythonCoder(generate.prepare(generate.Config(**settings)), size)
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):
            began = time.perf_counter()
            done = [model.complete(requests[i : i + size]) for i in range(0, len(requests), size)]
            seconds = time.perf_counter() - began
    ends = cfg.model == "pythoncoder"  # its rows count the end token, which serve.py does not
    return (
        sum(
            row["tokens"] - (ends and row["tokens"] < cfg.max_new)
            for rows in done
            for row, _ in rows
        )
        / seconds
    )


def simulate(cfg):
    """Steps for all solutions of HumanEval, a token a step: batches that wait for their longest
    text, and places that are taken at once.
    """
    tokenizer = runs.read_tokenizer(cfg.ckpt)
    with gzip.open(cfg.lengths, "rt") as file:
        lengths = [
            len(tokenizer.encode(json.loads(line)["canonical_solution"]).ids) for line in file
        ]
    for rows in (8, 32):
        waiting, taken = [], []
        for seed in range(100):
            random.Random(seed).shuffle(lengths)
            waiting.append(sum(max(lengths[i : i + rows]) for i in range(0, len(lengths), rows)))
            ends = [0] * rows
            for length in lengths:
                heapq.heapreplace(ends, ends[0] + length)
            taken.append(max(ends))
        ratios = sorted(a / b for a, b in zip(waiting, taken, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[5]:.2f} to {ratios[94]:.2f})"
        print(
            f"{rows} rows: {statistics.median(waiting):.0f} steps or {statistics.median(taken):.0f}: {spread} times"
        )


# ---- clients that misbehave ----------------------------------------------------------------------------------------


def memory_mb(process):
    (kb,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    return int(kb) / 1024


def faults(cfg, process, url, say):
    """Each fault, cfg.faults times; the right answer to a good request before, between and after
    them.
    """
    host, port = url.removeprefix("http://").split(":")
    address, draw = (host, int(port)), random.Random(0)
    canary = {"prompt": PROMPTS[0], "max_tokens": cfg.max_new, "temperature": 0}
    client = httpx.Client(timeout=120)

    def good():
        return client.post(url + "/v1/completions", json=canary).json()["choices"][0]["text"]

    def raw(body, promised=None):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {promised or len(body)}\r\n\r\n"
        connection = socket.create_connection(address, timeout=60)
        connection.sendall(head.encode() + body)
        return connection

    want, body = (
        good(),
        {"prompt": PROMPTS[1], "max_tokens": 400, "stream": True, "temperature": 1.5},
    )

    def hang_up(i):
        with raw(json.dumps(body | {"seed": i}).encode()) as connection:
            connection.recv(draw.choice([1, 100, 1000]))

    for i in range(100):  # what grows at first stays: buffers and the allocator's arenas
        hang_up(i)
        assert good() == want
    before = memory_mb(process)
    for i in range(cfg.faults):
        hang_up(i)
    assert good() == want
    say(f"{cfg.faults} hang-ups in a stream: {memory_mb(process) - before:+.1f} MB")
    for _ in range(cfg.faults):
        raw(b'{"prompt": "def', promised=1000).close()
    assert good() == want
    say(f"{cfg.faults} half requests: {memory_mb(process) - before:+.1f} MB")
    statuses = {}
    for _ in range(10 * cfg.faults):
        answer = client.post(url + draw.choice(PATHS), content=broken(draw))
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code in (400, 404, 413), (answer.status_code, answer.text)
        assert answer.json()["error"]["message"]
    assert good() == want
    counts = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    say(f"{10 * cfg.faults} broken bodies, {counts}: {memory_mb(process) - before:+.1f} MB")
    for i in range(cfg.faults // 10):
        assert (
            client.post(
                url + "/v1/completions", json={"prompt": "x = 1\n" * (1000 + 10 * i)}
            ).status_code
            == 400
        )
    say(f"{cfg.faults // 10} prompts longer than the canvas: {memory_mb(process) - before:+.1f} MB")
    for i in range(cfg.faults // 50):
        command = ["curl", "-sN", url + "/v1/completions", "-d", json.dumps(body | {"seed": i})]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
            victim.stdout.read(10)
            os.kill(victim.pid, signal.SIGKILL)
    assert good() == want
    say(
        f"{cfg.faults // 50} clients killed by signal 9: {memory_mb(process) - before:+.1f} MB of {before:.0f} MB"
    )


PATHS = "/v1/completions", "/v1/chat/completions", "/v1/fim/completions", "/v1/canvas", "/v1/check"
NAMES = "prompt suffix n max_tokens temperature top_p stop seed stream logprobs messages model ids best_of tools x".split()


def value(draw, depth=0):
    """Any JSON value, most of them of no use."""
    kind = draw.randrange(9 if depth < 4 else 7)
    if kind < 3:
        return draw.choice(
            [
                None,
                True,
                False,
                -1,
                0,
                1e308,
                -(10**30),
                10**400,
                float("nan"),
                float("inf"),
                0.5,
                2**63,
            ]
        )
    if kind < 7:
        text = draw.choice(
            [
                "",
                "a",
                "\x00",
                "\ud800",
                "\U0010ffff",
                "<|endoftext|>",
                "[MASK:99999999]",
                "x" * 5000,
                "\u202e",
            ]
        )
        return text * draw.randrange(1, 4)
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {draw.choice(NAMES): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def broken(draw):
    """The bytes of a body that has to be refused."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return b"[" * draw.randrange(1, 100_000)
    if kind == 2:
        return b'{"prompt": "' + b"x" * draw.choice([1, 1 << 18, 1 << 20])
    fields = {draw.choice(NAMES): value(draw) for _ in range(draw.randrange(1, 6))} | {
        draw.choice(["y", "best_of"]): 7
    }
    text = json.dumps(fields).encode()
    return text[: draw.randrange(len(text))] if kind == 3 else text


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
