"""Serve a model over HTTP: completions in OpenAI's form, filling in the middle, and a page that shows the denoising.

    python serve.py                                # weights/dream, or weights/pythoncoder; open the address it prints
    python serve.py --model=dream --ckpt=out/diffucoder --int8 --warm
    curl 127.0.0.1:8000/v1/completions -d '{"prompt": "def area(r):\\n    ", "suffix": "\\n    return a"}'

/v1/models, /v1/completions, /v1/chat/completions and Mistral's /v1/fim/completions take what OpenAI's clients send, and
of a Dream also steps, threshold, entropy_bound and block_length. /v1/canvas and /v1/check serve the page. One loop owns
the device; requests join its running batch, see sample_rows.py. Where the environment variable of --api_key is set,
clients have to send its value. SIGTERM refuses what comes and finishes what runs.

Read from the top: main; Engine, the loop; what a request asks; what is answered.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import typing
from pathlib import Path

import canvas
import inference
import runs
import sample_rows
from runs import Count, Natural

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install -r requirements-serve.txt") from None

BODY, READING_S = 1 << 18, 20  # bytes of a request at most, seconds that a client has to send it
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


@dataclasses.dataclass(frozen=True)
class Config:
    model: typing.Literal["", "pythoncoder", "dream"] = ""  # family; "" is Dream if weights/dream exists
    ckpt: str = ""  # folder of a run or of convert_weights.py; "" is that in weights/
    int8: bool = False  # Dream's matrices in 8 bits, half the memory of bfloat16
    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0 is open to the network
    port: Natural = 8000
    api_key: str = "UNMASK_API_KEY"  # environment variable with the key that clients have to send
    batch_size: Count = 8  # texts that are generated together
    queue: Count = 64  # texts that may wait; more are refused with status 429
    warm: bool = False  # compile all programs before the first request
    grace: Count = 30  # seconds that SIGTERM leaves running requests
    devices: Natural = 0  # number of the machine's devices to use; 0 takes all
    compile_cache: str = "~/.cache/unmask"  # folder of compiled programs, for later runs; "" keeps none


def main(cfg):
    family = cfg.model or ("dream" if (inference.WEIGHTS / "dream").is_dir() else "pythoncoder")
    folder = cfg.ckpt or str(inference.WEIGHTS / family)
    with socket.socket(socket.AF_INET6 if ":" in cfg.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((cfg.host, cfg.port))
        except (OSError, OverflowError) as error:
            raise OSError(f"cannot listen at {cfg.host}, port {cfg.port} ({error}); choose another --port") from None
        how = {"rows": cfg.batch_size, "devices": cfg.devices, "compile_cache": cfg.compile_cache}
        read = sample_rows.Dream if family == "dream" else sample_rows.PythonCoder
        engine = Engine(read(folder, bits=8 if cfg.int8 else 0, **how), Path(folder).resolve().name, cfg)
        print(f"http://{cfg.host}:{listener.getsockname()[1]}", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more when it has finished
        settings = {"log_level": "warning", "timeout_graceful_shutdown": cfg.grace, "lifespan": "off"}
        uvicorn.Server(uvicorn.Config(app(engine), **settings)).run(sockets=[listener])
        engine.close()


@dataclasses.dataclass(eq=False)
class Row(sample_rows.Row):
    """A text of a request."""

    wake: asyncio.Event | None = None  # set after each step
    ended: str = ""  # stop, length or error
    error: tuple = ()  # status and message
    gone: bool = False  # nobody waits for it any more


class Engine(threading.Thread):
    """The loop that owns the device."""

    def __init__(self, model, name, cfg):
        super().__init__(daemon=True)
        self.model, self.name, self.cfg, self.waiting = model, name, cfg, collections.deque()
        self.changed, self.closing, self.loop = threading.Condition(), False, None
        if cfg.warm:
            print("compiling", file=sys.stderr)
            with inference.mesh_context(model.mesh):
                for width in model.widths:
                    for order in model.ORDERS:
                        model.batch(width, order).warm()
        self.start()

    def submit(self, rows):
        self.loop = asyncio.get_running_loop()
        with self.changed:
            if len(self.waiting) + len(rows) > self.cfg.queue:
                message = f"{len(self.waiting)} texts are waiting, and at most {self.cfg.queue} may; try again later"
                raise Refusal(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
            self.waiting += rows
            self.changed.notify()

    def close(self):
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.join(5)

    def run(self):
        with inference.mesh_context(self.model.mesh):
            while not self.closing:
                with self.changed:
                    self.changed.wait_for(lambda: self.waiting or self.closing or self.running())
                    waiting = [row for row in self.waiting if not row.gone]
                    self.waiting.clear()
                late = [row for row in waiting if not self.admitted(row)]
                with self.changed:
                    self.waiting.extendleft(reversed(late))
                for batch in self.running():
                    self.attempt(batch, batch.step)

    def running(self):
        """The batches that have rows, when those that have ended or lost their client have left."""
        for batch in self.model.batches.values():
            batch.rows = [None if row and (row.gone or row.ended) else row for row in batch.rows]
        return [batch for batch in self.model.batches.values() if any(batch.rows)]

    def admitted(self, row):
        """Whether a waiting row found a place in its batch."""
        batch = self.model.batch_of(row)
        if None in batch.rows:
            row.begun = time.perf_counter()
            self.attempt(batch, functools.partial(batch.join, batch.rows.index(None), row), row)
        return row in batch.rows or bool(row.ended)

    def attempt(self, batch, work, *new):
        """Do work on the device. What fails ends the rows of the batch, and the next ones get a new batch."""
        try:
            work()
            for row in filter(None, batch.rows):
                self.end_if_complete(row)
        except Exception as error:
            memory = any(words in str(error).lower() for words in ("resource_exhausted", "out of memory"))
            print("out of memory" if memory else traceback.format_exc(), file=sys.stderr)
            del self.model.batches[batch.width, batch.order]
            for row in filter(None, [*batch.rows, *new]):
                row.error = (503, "out of memory: ask for less, or again") if memory else (500, "the server failed")
                row.ended = "error"
        with contextlib.suppress(RuntimeError):  # the server has ended
            for wake in {row.wake for row in [*batch.rows, *new] if row}:
                self.loop.call_soon_threadsafe(wake.set)

    def end_if_complete(self, row):
        slots, ended = row.completion(self.model.ends)
        if row.ask["stop"]:
            text = self.model.tokenizer.decode([row.written[slot][0] for slot in slots])
            ended = ended or canvas.truncate(text, row.ask["stop"]) != text
        if len(row.written) == row.ids.count(None) or (ended and not row.ask["whole"]):
            row.ended = "stop" if ended else "length"


# ---- what a request asks -------------------------------------------------------------------------------------------

# fmt: off
NUMBERS = {  # lowest and highest; a field whose limits are of type int is one
    "max_tokens": (1, 2048), "n": (1, 16), "seed": (-(1 << 63), (1 << 63) - 1), "logprobs": (0, sample_rows.LIKELIEST),
    "top_logprobs": (0, sample_rows.LIKELIEST), "steps": (1, 2048), "block_length": (1, 2048),
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "threshold": (0.0, 1.0), "entropy_bound": (0.0, 1e6),
}
TYPES = {"model": str, "user": str, "suffix": str, "stream": bool, "stream_options": dict, "messages": list, "ids": list}
COMMON = {"model", "user", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"}
FORMS = {  # fields beside COMMON and those of the family
    "completions": {"prompt", "suffix", "n", "logprobs"},
    "chat": {"messages", "n", "logprobs", "top_logprobs", "max_completion_tokens"},
    "fim": {"prompt", "suffix", "random_seed"},
    "canvas": {"prompt", "suffix", "ids"},
    "check": {"prompt", "text"},
}
NO_EFFECT = {"best_of": 1, "echo": False, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "tools": []}
ALIASES = {"max_completion_tokens": "max_tokens", "random_seed": "seed"}
# fmt: on


class Refusal(Exception):
    def __init__(self, status, message, param=None, code=None, headers=None):
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.status, self.headers = status, headers


async def read(request):
    """The JSON object in a request, without what is null. Refusal if it is none, or too large, or too slow."""
    data = b""
    try:
        async with asyncio.timeout(READING_S):
            async for part in request.stream():
                data += part
                if len(data) > BODY:
                    raise Refusal(413, f"a request has at most {BODY:,} bytes")
        body = json.loads(data.decode())
        json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return {name: value for name, value in body.items() if value is not None}
    except TimeoutError:
        raise Refusal(408, f"the request did not arrive within {READING_S} s") from None
    except (ValueError, AttributeError, RecursionError):
        raise Refusal(400, "the request is not a JSON object in UTF-8") from None


def checked(body, form, engine):
    """The settings of a request. Refusal for a field that is unknown, of another type, or out of its limits."""
    fields, model = {}, engine.model
    for name, value in body.items():
        if name in NO_EFFECT and value == NO_EFFECT[name]:
            continue
        if name not in FORMS[form] | COMMON | model.settings:
            raise Refusal(400, f"{name} is not supported here", name)
        kind, limits = TYPES.get(name, object), NUMBERS.get(ALIASES.get(name, name))
        if (form, name) == ("chat", "logprobs"):
            kind, limits = bool, None
        kind = kind if limits is None else int if type(limits[0]) is int else (int, float)
        if not isinstance(value, kind) or (limits and (type(value) is bool or not limits[0] <= value <= limits[1])):
            named = "a number" if isinstance(kind, tuple) else kind.__name__
            raise Refusal(400, f"{name} is not {named}" + (" from {} to {}".format(*limits) if limits else ""), name)
        fields[ALIASES.get(name, name)] = value
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 8 or not all(isinstance(text, str) and text for text in stop):
        raise Refusal(400, "stop is neither a text nor a list of at most 8", "stop")
    if fields.get("model", engine.name) != engine.name:
        raise Refusal(404, f"there is no model {fields['model']!r} but {engine.name!r}", "model", "model_not_found")
    if form == "chat":
        fields["logprobs"] = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    defaults = model.defaults | {"seed": random.getrandbits(31), "n": 1, "logprobs": None, "whole": form == "canvas"}
    return defaults | fields | {"stop": stop}


def rows_of(ask, form, engine):
    """The Rows of a request. Refusal for what the model cannot take."""
    model, wake, rows = engine.model, asyncio.Event(), []
    if form == "chat":
        canvases = [[*conversation(ask.get("messages"), model), None]]
    elif "ids" in ask:
        canvases = [ask["ids"]]
        if not all(token is None or (type(token) is int and 0 <= token < model.vocab) for token in ask["ids"]):
            raise Refusal(400, "ids are token ids, null where the model writes", "ids")
    else:
        prompts = ask.get("prompt", "")
        prompts = prompts if isinstance(prompts, list) else [prompts]
        if not 1 <= len(prompts) <= 16 or not all(isinstance(prompt, str) for prompt in prompts):
            raise Refusal(400, "prompt is neither a text nor a list of 1 to 16", "prompt")
        texts = canvas.Texts(model.tokenizer, None, model.ends, 1 << 30)
        make = functools.partial(texts.canvas, suffix=ask.get("suffix", ""), max_new=1, infill=form == "canvas")
        canvases = [make(prompt, measure=lambda *_: [8]).ids for prompt in prompts]
    for ids in canvases:
        room = model.positions - model.extra - len(ids)
        if ids.count(None) == 1 and "ids" not in ask:
            i, size = ids.index(None), ask.get("max_tokens", max(1, min(128, room + 1)))
            ids, room = [*ids[:i], *[None] * size, *ids[i + 1 :]], room + 1 - size
        if room < 0:
            message = f"{len(ids)} tokens do not fit the {model.positions - model.extra} of the model"
            raise Refusal(400, message, "max_tokens", "context_length_exceeded")
        if None not in ids:
            raise Refusal(400, "there is nothing to write: no null in ids", "ids")
        model.check(ids)
        rows += [Row(ids, ask, number, wake=wake) for number in range(ask["n"])]
    return rows


def conversation(messages, model):
    """The token ids of a conversation in the model's template."""
    if model.wrap is None:
        raise Refusal(400, "the model has no chat template: use /v1/completions", "messages")
    try:
        turns = [(turn["role"], turn["content"]) for turn in messages]
        texts = [text if isinstance(text, str) else "".join(part["text"] for part in text) for _, text in turns]
        system = texts.pop(0) if turns[0][0] in ("system", "developer") else ""
        roles = [role for role, _ in turns[len(turns) - len(texts) :]]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            raise ValueError
        before = list(zip(texts[:-1:2], texts[1::2], strict=True))
        return canvas.encode_chat(model.tokenizer, model.wrap, texts[-1], system, before)
    except (TypeError, KeyError, IndexError, ValueError):
        raise Refusal(400, "messages are texts of user and assistant in turn, the last of user", "messages") from None


# ---- what is answered ----------------------------------------------------------------------------------------------


async def follow(request, rows):
    """Comes back after each step, until all rows have ended. Rows whose client has gone leave the batch."""
    ended = False
    try:
        while not ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(rows[0].wake.wait(), 1)
            rows[0].wake.clear()
            if await request.is_disconnected():
                return
            ended = all(row.ended for row in rows)
            yield
    finally:
        for row in rows:
            row.gone = True


class Answer:
    """The answer to a request for completions, whole or streamed."""

    def __init__(self, request, form, rows, engine):
        self.request, self.form, self.rows, self.model, self.ask = request, form, rows, engine.model, rows[0].ask
        self.object = "text_completion" if form == "completions" else "chat.completion"
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": engine.name}

    def text(self, row, ended):
        """What of a row's text will not change any more; all of it when it has ended."""
        slots, _ = row.completion(self.model.ends)
        cut = canvas.truncate if ended else canvas.printable
        return cut(self.model.tokenizer.decode([row.written[slot][0] for slot in slots]), row.ask["stop"])

    def choice(self, i, begin, text, ended, name="message"):
        """A choice in OpenAI's form, with the characters of a row's text from `begin` on."""
        logprobs = None
        if self.ask["logprobs"] is not None:
            logprobs = self.logprobs(self.rows[i], begin, begin + len(text), ended)
        content = {"text": text} if self.form == "completions" else {name: {"role": "assistant", "content": text}}
        return {"index": i} | content | {"logprobs": logprobs, "finish_reason": ended or None}

    def logprobs(self, row, begin, end, ended):
        """The log p of the tokens that end with the characters begin .. end - 1 of a text."""
        slots, at, found = row.completion(self.model.ends)[0], 0, []
        pieces = canvas.pieces(self.model.tokenizer, [row.written[slot][0] for slot in slots])
        for text, slot in zip(pieces, slots, strict=True):
            at += len(text)
            if begin < at <= end:
                _, logp, *likely = row.written[slot]
                top = [(self.model.tokenizer.decode([token]), p) for token, p in zip(*likely, strict=True)]
                found.append((text, max(logp, -9999), top[: self.ask["logprobs"]], at - len(text)))
        if self.form == "completions":
            lists = [[*column] for column in zip(*found, strict=True)] or [[]] * 4
            lists[2] = [{text: max(p, -9999) for text, p in top} for top in lists[2]]
            return dict(zip(("tokens", "token_logprobs", "top_logprobs", "text_offset"), lists, strict=True))

        def token(text, logp):
            return {"token": text, "logprob": max(logp, -9999), "bytes": [*text.encode()]}

        return {"content": [token(*pair) | {"top_logprobs": [token(*x) for x in top]} for *pair, top, _ in found]}

    def usage(self):
        prompts = sum(len(row.ids) - row.ids.count(None) for row in self.rows if row.number == 0)
        tokens = sum(len(row.completion(self.model.ends)[0]) for row in self.rows)
        return {"prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens}

    async def whole(self):
        async for _ in follow(self.request, self.rows):
            pass
        if not all(row.ended for row in self.rows):
            raise ClientDisconnect
        for row in self.rows:
            if row.error:
                raise Refusal(*row.error)
        choices = [self.choice(i, 0, self.text(row, row.ended), row.ended) for i, row in enumerate(self.rows)]
        return JSONResponse(self.head | {"object": self.object, "choices": choices, "usage": self.usage()})

    async def stream(self):
        """Yields chunks: of each row what has been added since the last one."""
        head = self.head | {"object": self.object + (".chunk" if self.form != "completions" else "")}
        sent, running = [0] * len(self.rows), set(range(len(self.rows)))
        async for _ in follow(self.request, self.rows):
            for i in sorted(running):
                row, ended = self.rows[i], self.rows[i].ended
                new = self.text(row, ended)[sent[i] :]
                if row.error:
                    yield Refusal(*row.error).body
                elif new or ended:
                    yield head | {"choices": [self.choice(i, sent[i], new, ended, "delta")]}
                sent[i] += len(new)
                running -= {i} if ended else set()
        if self.ask.get("stream_options", {}).get("include_usage"):
            yield head | {"choices": [], "usage": self.usage()}

    async def steps(self):
        """Yields the canvas of the page's request, what each step writes, and which slots are left at the end."""
        row, model, shown = self.rows[0], self.model, 0
        spell = functools.lru_cache(lambda token: model.tokenizer.decode([token]))
        yield {"canvas": [token if token is None else [token, spell(token)] for token in row.ids]}
        async for _ in follow(self.request, self.rows):
            if row.error:
                yield Refusal(*row.error).body
            for slots in row.steps[shown:]:
                shown += 1
                found = [(slot, *row.written[slot]) for slot in slots]
                written = [
                    (
                        slot,
                        token,
                        spell(token),
                        math.exp(p),
                        [(spell(i), math.exp(p)) for i, p in zip(*top, strict=True)],
                    )
                    for slot, token, p, *top in found
                ]
                yield {"step": shown, "write": written, "passes": row.passes, "seconds": row.seconds}
        blank = canvas.Canvas("", "", row.ids, 0, None)
        end = next(iter(model.ends), -1)
        ids = [row.written.get(slot, (end,))[0] if token is None else token for slot, token in enumerate(row.ids)]
        yield {"keep": canvas.Texts(None, None, {*model.ends, -1}, 0).kept(blank, ids)}


def app(engine):
    key, testing = os.environ.get(engine.cfg.api_key, ""), asyncio.Semaphore(2)

    def let_in(request):
        given = request.headers.get("authorization", "")
        if key and not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise Refusal(401, "the API key is missing or wrong", code="invalid_api_key")

    async def models(request):
        let_in(request)
        about = {"object": "model", "created": 0, "owned_by": "unmask", "settings": sorted(engine.model.settings)}
        return JSONResponse({"object": "list", "data": [{"id": engine.name} | about]})

    async def page(request):
        return FileResponse(Path(__file__).with_name("serve.html"), headers={"Content-Security-Policy": POLICY})

    async def events(chunks):
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def post(request):
        let_in(request)
        form = request.url.path.split("/")[2]
        body = await read(request)
        try:
            rows = rows_of(checked(body, form, engine), form, engine)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        engine.submit(rows)
        answer = Answer(request, form, rows, engine)
        if form == "canvas" or rows[0].ask.get("stream"):
            chunks = answer.steps() if form == "canvas" else answer.stream()
            return StreamingResponse(events(chunks), media_type="text/event-stream")
        return await answer.whole()

    async def check(request):
        """The verdicts of the sandbox on the examples in a prompt."""
        let_in(request)
        body = await read(request)
        prompt, text = body.get("prompt"), body.get("text")
        if not (isinstance(prompt, str) and isinstance(text, str)):
            raise Refusal(400, "give the texts prompt and text")
        try:
            tests = canvas.examples(prompt)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        async with testing:
            said = await asyncio.to_thread(canvas.verdicts, canvas.definitions(prompt, text), tests)
        return JSONResponse({"examples": said})

    async def refuse(request, error):
        if isinstance(error, HTTPException):
            error = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(error.body, error.status, error.headers)

    routes = [Route("/", page), Route("/v1/models", models), Route("/v1/check", check, methods=["POST"])]
    paths = "/v1/completions", "/v1/chat/completions", "/v1/fim/completions", "/v1/canvas"
    routes += [Route(path, post, methods=["POST"]) for path in paths]
    # a page elsewhere whose name was pointed at this address sends its own name as host
    local = engine.cfg.host in ("127.0.0.1", "localhost", "::1")
    hosts = ["127.0.0.1", "localhost", "[::1]"] if local else ["*"]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    gone = lambda request, error: Response(status_code=499)  # noqa: E731
    handlers = {Refusal: refuse, HTTPException: refuse, ClientDisconnect: gone}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
