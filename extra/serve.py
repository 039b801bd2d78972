"""Serve a model over HTTP in OpenAI's form, with a page that shows the denoising. Asks a model.

    # weights/dream, or weights/pythoncoder; open the address that it prints
    python extra/serve.py
    python extra/serve.py --ckpt=out/diffucoder --int8 --warm

/v1/models, /v1/completions, /v1/chat/completions and Mistral's /v1/fim/completions take what
OpenAI's clients send, for a Dream also steps, threshold, entropy_bound and block_length. Requests
join a running batch, see batching.py. It takes no tools, no images and no logit_bias.
"""

import ast
import asyncio
import builtins
import contextlib
import dataclasses
import json
import logging
import math
import os
import random
import secrets
import signal
import socket
import sys
import time
import tomllib
import typing
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import batching
import repair

import generate_dream
import prompts
import runs
from runs import Count

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import FileResponse, JSONResponse, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install -r requirements-serve.txt") from None

BODY = 1 << 18  # bytes of a request at most
READING_S = 20  # seconds that a client has to send it
LOG = logging.getLogger("unmask")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)


FAMILIES = {"a Dream": batching.Dream, "a PythonCoder": batching.PythonCoder}


@dataclasses.dataclass(frozen=True)
class Config:
    ckpt: str = ""  # folder of a run or of convert_weights.py; "" is that in weights/
    # that of weights/ to serve without --ckpt
    model: typing.Literal["dream", "pythoncoder"] = "dream"
    int8: bool = False  # Dream's matrices in 8 bits, half the memory of bfloat16
    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0 is open to the network
    # 0 takes a free one, printed when the model is read
    port: typing.Annotated[int, (0, 65535)] = 8000
    api_key: str = "UNMASK_API_KEY"  # environment variable with the key that clients have to send
    # texts that are generated together; those of another canvas width are another batch
    batch_size: Count = 8
    queue: Count = 64  # texts that may wait; more are refused with status 429
    warm: bool = False  # compile all programs before the first request
    grace: Count = 30  # seconds for running requests after SIGTERM
    quiet: bool = False  # print no line for each request
    # folder of compiled programs, for later runs; "" keeps none
    compile_cache: str = "~/.cache/unmask"


def main(cfg):
    if cfg.api_key not in ("", Config.api_key) and not os.environ.get(cfg.api_key):
        raise ValueError(
            "--api_key names an environment variable that holds the key, and that one is not set"
        )
    folder = cfg.ckpt or str(ROOT / f"weights/{cfg.model}")
    family, _ = prompts.check_family(folder, *FAMILIES)
    host = cfg.host
    kind = socket.AF_INET
    if ":" in host:
        host = f"[{host}]"
        kind = socket.AF_INET6
    try:  # before the model is read
        listener = socket.create_server((cfg.host, cfg.port), family=kind)
    except OSError as error:
        raise ValueError(
            f"--port={cfg.port}: {os.strerror(error.errno)}; --port=0 takes a free one"
        ) from None
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    LOG.setLevel("WARNING" if cfg.quiet else "INFO")
    model = FAMILIES[family](
        folder,
        cfg.batch_size,
        bits=8 if cfg.int8 else 0,
        compile_cache=cfg.compile_cache,
    )
    name = Path(folder).resolve().name
    # whether a question goes through the chat template, if there is one, as in generate_dream.py
    chats = model.wrap and generate_dream.prepare(generate_dream.Config(ckpt=folder)).chat != "off"
    loop = batching.Loop(model, cfg.queue, cfg.warm)
    loop.start()
    # a step that has ended waits for the interpreter no longer than this
    sys.setswitchinterval(5e-4)
    config = uvicorn.Config(
        app(loop, name, cfg, chats),
        log_level="warning",
        timeout_graceful_shutdown=cfg.grace,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    # uvicorn raises it at its end
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    with listener:
        address = f"http://{host}:{listener.getsockname()[1]}"
        example = '{"prompt": "def is_even(n):", "max_tokens": 32}'
        print(
            f"{address}\na page; {name} answers at {address}/v1, as here:\n"
            f"curl {address}/v1/completions --json '{example}'",
            flush=True,
        )
        server.run(sockets=[listener])
    # it compiles, which nothing can end, and to leave as Python does would abort
    if not loop.close():
        os._exit(0)


FIELDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FORMS = FIELDS["forms"]


class Refusal(Exception):
    """An answer with an error in OpenAI's form."""

    def __init__(self, status, message, param=None, code=None, headers=None):
        kind = "invalid_request_error"
        if status >= 500:
            kind = "server_error"
        elif status == 429:
            kind = "rate_limit_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.status = status
        self.headers = headers


async def read(request):
    """The JSON object in a request, without what is null. Refusal if it is none, or too large, or
    too slow.
    """
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


def no_effect(field, value):
    """Whether a field asks for what is done anyway. False is not 0 here, as in JSON."""
    return json.dumps(value) in map(json.dumps, FIELDS["no_effect"].get(field, []))


def checked(given, path, model, name):
    """The settings of a request. Refusal for a field that is unknown, of another type, or out of
    its limits.
    """
    fields = {}
    chat = "top_logprobs" in FORMS[path]
    for field, value in given.items():
        if no_effect(field, value):
            continue
        if field not in {*FIELDS["common"], *FORMS[path], *model.settings}:
            raise Refusal(400, f"{field} is not supported here", field)
        fields[field] = value
        kind = getattr(builtins, FIELDS["types"].get(field, "object"))
        limits = FIELDS["limits"].get(field)
        if field == "logprobs" and chat:
            kind = bool
            limits = None
        if limits:
            kind = int | type(limits[0])
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right or (limits and not limits[0] <= value <= limits[1]):
            problem = f"{field} has to be of type {getattr(kind, '__name__', kind)}"
            if limits:
                problem += f" from {limits[0]} to {limits[1]}"
            raise Refusal(400, problem, field)
    for option, value in fields.get("stream_options", {}).items():
        option = f"stream_options.{option}"
        if value is not None and not no_effect(option, value):
            raise Refusal(400, f"{option} is not supported here", option)
    stop = fields.get("stop", [])
    if isinstance(stop, str):
        stop = [stop]
    right = isinstance(stop, list) and len(stop) <= 32
    if not right or not all(isinstance(x, str) and 0 < len(x) < 100 for x in stop):
        raise Refusal(
            400, "stop has to be a text of 1 to 99 characters, or a list of at most 32", "stop"
        )
    check_name(fields.get("model"), name)
    if chat:
        fields["logprobs"] = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    defaults = {"n": 1, "logprobs": None, "seed": fields.get("random_seed", random.getrandbits(31))}
    if path == "/v1/canvas":  # the page shows the likeliest tokens of each position
        defaults["logprobs"] = batching.LIKELIEST
    return model.defaults | defaults | fields | {"stop": stop}


def rows_of(ask, path, model, wake):
    """The Rows of a request. Refusal or ValueError for what the model cannot take."""
    page = path == "/v1/canvas"
    # A single run of masks gets max_tokens, or a size of its own.
    sizes = "ids" not in ask and not (page and "[MASK" in str(ask.get("prompt")))
    if "messages" in ask or path == "/v1/chat/completions":
        canvases = [[*encode_messages(model.tokenizer, model.wrap, ask.get("messages")), None]]
    elif "ids" in ask:
        canvases = [ask["ids"]]
        check_ids(ask["ids"], model)
    else:
        canvases = canvases_of(ask, page, model)
    most = model.positions - model.extra
    rows = []
    for ids in canvases:
        if sizes and ids.count(None) == 1:
            masks = getattr(model.model.cfg, "hole_masks", 0) or 128
            size = ask.get("max_tokens", ask.get("max_completion_tokens"))
            size = size or max(1, min(masks, most + 1 - len(ids)))
            i = ids.index(None)
            ids[i : i + 1] = [None] * size
        if len(ids) > most:
            raise Refusal(
                400,
                f"{len(ids)} tokens do not fit in {most}; lower max_tokens or cut the text",
                "max_tokens",
                "context_length_exceeded",
            )
        model.check(ids, ask)
        rows += [batching.Row(ids, ask, number, wake=wake) for number in range(ask["n"])]
    return rows


def check_ids(ids, model):
    """Refusal for what is no canvas of ids and nulls."""
    mask = getattr(model.model.cfg, "mask_id", -1)
    right = all(x is None or (type(x) is int and 0 <= x < model.vocab and x != mask) for x in ids)
    if not right or None not in ids:
        raise Refusal(400, "ids has to hold token ids, and null where the model generates", "ids")


def canvases_of(ask, page, model):
    """Canvases of the prompts of a request, with None for a mask; a text has one after it."""
    asked = ask.get("prompt", "")
    if isinstance(asked, str):
        asked = [asked]
    elif page:
        raise Refusal(400, "prompt has to be a text", "prompt")
    right = isinstance(asked, list) and 1 <= len(asked) <= 16
    if not right or not all(isinstance(x, str) for x in asked):
        raise Refusal(400, "prompt has to be a text or a list of 1 to 16", "prompt")
    # what does not fit is refused later
    texts = prompts.Texts(model.tokenizer, None, model.ends, BODY)
    hole = getattr(model.model.cfg, "hole_masks", 0) or 8
    canvases = []
    for prompt in asked:
        if page:  # that of an editor stays as it is
            prompt = prompts.on_new_line(prompt)
        canvases.append(texts.canvas(prompt, ask.get("suffix", ""), 1, page, hole).ids)
    return canvases


def encode_messages(tokenizer, wrap, messages):
    """Token ids of OpenAI's messages in a chat template, which decides what order it takes.
    ValueError for what it refuses, and for what are no texts.
    """
    if wrap is None:
        raise ValueError("the model has no chat template: use /v1/completions")
    try:
        conversation = []
        for turn in messages:
            role = turn["role"]
            if role == "developer":  # OpenAI's newer name
                role = "system"
            text = turn["content"]
            if not isinstance(text, str):
                text = "".join(part["text"] for part in text)
            "".join((role, text))  # TypeError for what is no text
            conversation.append({"role": role, "content": text})
        if not conversation:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise ValueError("messages have to be texts, each with a role") from None
    return prompts.encode_chat(tokenizer, wrap, conversation)


def check_name(asked, name):
    """Refusal for another model than that of this name."""
    if asked not in (None, name):
        raise Refusal(404, f"there is no model {asked!r}, but {name!r}", "model", "model_not_found")


# ---- what is answered ----------------------------------------------------------------------------


class Answer:
    """The answer to a request for completions, whole or streamed."""

    def __init__(self, request, rows, changed, model, name):
        self.request = request
        self.rows = rows
        self.changed = changed
        self.model = model
        self.ask = rows[0].ask
        self.begun = time.perf_counter()
        self.plain = request.url.path == "/v1/completions"
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "object": "text_completion" if self.plain else "chat.completion",
        }

    async def follow(self):
        """Comes back after each step, until all rows have ended. Rows whose client has gone leave
        the batch.
        """
        ended = False
        try:
            while not ended and not await self.request.is_disconnected():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), 1)
                self.changed.clear()
                ended = all(row.ended for row in self.rows)
                yield
        except asyncio.CancelledError:  # what SIGTERM finds running has --grace seconds
            for row in self.rows:
                row.error = InterruptedError("the server is shutting down")
                row.ended = "error"
            yield
        finally:
            for row in self.rows:
                row.gone = True
            if not self.rows[0].error:  # which is logged as it is answered
                LOG.info(
                    "200 %s: %d tokens in %.2f s",
                    self.request.url.path,
                    self.usage()["completion_tokens"],
                    time.perf_counter() - self.begun,
                )

    def tokens(self, row):
        return [row.written[slot] for slot in row.completion(self.model.ends)[0]]

    def text(self, row, ended):
        """What of a row's text will not change any more; all of it when it has ended."""
        cut = prompts.truncate if ended else prompts.printable
        return cut(
            self.model.tokenizer.decode([token for token, *_ in self.tokens(row)]), row.ask["stop"]
        )

    def choice(self, i, begin, text, ended, name="message"):
        """A choice in OpenAI's form, with the characters of a row's text from `begin` on."""
        # a stream opens with it
        role = {} if name == "delta" and (text or ended) else {"role": "assistant"}
        content = {"text": text} if self.plain else {name: role | {"content": text}}
        return {
            "index": i,
            **content,
            "logprobs": self.logprobs(self.rows[i], begin, begin + len(text)),
            "finish_reason": ended or None,
        }

    def logprobs(self, row, begin, end):
        """Log probabilities, in OpenAI's form, of the tokens that end within the characters begin
        .. end - 1; None if nobody asked.
        """
        if self.ask["logprobs"] is None:
            return None
        tokens = self.tokens(row)
        at = 0
        found = []
        texts = prompts.pieces(self.model.tokenizer, [token for token, *_ in tokens])
        for text, (_, logp, *likely) in zip(texts, tokens, strict=True):
            at += len(text)
            # a part of a character goes with its end
            if begin < at <= end if text else begin <= at < end:
                likely = [
                    (self.model.tokenizer.decode([i]), p) for i, p in zip(*likely, strict=True)
                ]
                found.append((text, logp, likely[: self.ask["logprobs"]], at - len(text)))
        if self.plain:
            names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
            found = [(text, logp, dict(likely), at) for text, logp, likely, at in found]
            return {name: [token[i] for token in found] for i, name in enumerate(names)}

        def spelled(text, logp):
            return {"token": text, "logprob": logp, "bytes": [*text.encode()]}

        return {
            "content": [
                spelled(*x[:2]) | {"top_logprobs": [spelled(*top) for top in x[2]]} for x in found
            ]
        }

    def usage(self):
        prompts = sum(len(row.ids) - row.ids.count(None) for row in self.rows if row.number == 0)
        tokens = sum(len(self.tokens(row)) for row in self.rows)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": tokens,
            "total_tokens": prompts + tokens,
        }

    async def whole(self):
        async for _ in self.follow():
            pass
        for row in self.rows:
            if not row.ended:
                raise ClientDisconnect
            if row.error:
                raise failed(row)
        choices = [
            self.choice(i, 0, self.text(row, row.ended), row.ended)
            for i, row in enumerate(self.rows)
        ]
        return JSONResponse(self.head | {"choices": choices, "usage": self.usage()})

    async def stream(self):
        """Yields chunks: of each row what has been added since the last one."""
        head = self.head
        sent = dict.fromkeys(range(len(self.rows)), 0)
        opening = []
        if not self.plain:
            head = head | {"object": "chat.completion.chunk"}
            opening = [*sent]
        async for _ in self.follow():
            while opening:
                yield head | {"choices": [self.choice(opening.pop(0), 0, "", "", "delta")]}
            for i, begin in [*sent.items()]:
                row = self.rows[i]
                ended = row.ended
                new = self.text(row, ended)[begin:]
                if ended == "error":
                    yield failed(row).body
                elif new or ended:
                    yield head | {"choices": [self.choice(i, begin, new, ended, "delta")]}
                sent[i] += len(new)
                if ended:
                    del sent[i]
        if self.ask.get("stream_options", {}).get("include_usage"):
            yield head | {"choices": [], "usage": self.usage()}

    async def steps(self):
        """Yields the canvas of the page's request, what each step writes, and at the end the slots
        left, with texts.
        """
        (row,) = self.rows
        tokenizer = self.model.tokenizer
        shown = 0
        texts = iter(prompts.pieces(tokenizer, [token for token in row.ids if token is not None]))
        yield {"canvas": [token if token is None else [token, next(texts)] for token in row.ids]}
        async for _ in self.follow():
            if row.compiling:
                row.compiling = False
                yield {"compiling": True}
            for slots in row.steps[shown:]:
                shown += 1
                written = []
                for slot in slots:
                    token, logp, *likely = row.written[slot]
                    others = [
                        (tokenizer.decode([i]), math.exp(p)) for i, p in zip(*likely, strict=True)
                    ]
                    written.append((slot, token, tokenizer.decode([token]), math.exp(logp), others))
                yield {"step": shown, "write": written, "passes": row.passes}
        if row.error:
            yield failed(row).body
        ids = [row.written.get(slot, (token,))[0] for slot, token in enumerate(row.ids)]
        # what an error left without a token ends the text, too
        texts = prompts.Texts(tokenizer, None, {*self.model.ends, None}, 0)
        kept = texts.kept(prompts.Canvas("", "", row.ids, 0, None), ids)
        pieces = prompts.pieces(tokenizer, [ids[slot] for slot in kept])
        yield {"keep": [*zip(kept, pieces, strict=True)]}


def failed(row):
    """What a client is told of a row that ended with an error."""
    status = 503 if isinstance(row.error, MemoryError | InterruptedError) else 500
    return Refusal(status, str(row.error))


async def events(chunks):
    async for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def syntax_error(prompt, text, program):
    """What is no Python in a function with which a text goes on from its prompt, or in a text that
    was filled; None if all is. The program is what is tested of the text.
    """
    behind = text[len(program) :].lstrip("\n")
    added = len(program) > len(prompt.rstrip())
    if not text.startswith(prompt) or (added and not behind[:1].isspace()):
        text = program
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(text)
    except SyntaxError as error:
        return error


# ---- the addresses -------------------------------------------------------------------------------


class Server:
    """What answers at each address, for a batching.Loop."""

    def __init__(self, loop, name, chats, key):
        self.loop = loop
        self.model = loop.model
        self.name = name
        self.chats = chats  # None: the model has no chat template
        self.key = key  # "": everybody may ask
        self.testing = asyncio.Semaphore(2)

    def let_in(self, request):
        """Refusal for who has no key, and for a page of another site."""
        given = request.headers.get("authorization", "")
        if self.key and not secrets.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
            raise Refusal(401, "the API key is missing or wrong", code="invalid_api_key")
        if request.headers.get("sec-fetch-site") == "cross-site":  # a browser says so
            raise Refusal(403, "another site's page may not use this server")

    async def models(self, request):
        """The list of the only model, or that model by its name."""
        self.let_in(request)
        name = request.path_params.get("name")
        check_name(name, self.name)
        about = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "unmask",
            "settings": sorted(self.model.settings),
            "chat": self.chats,
        }
        return JSONResponse(about if name else {"object": "list", "data": [about]})

    async def complete(self, request):
        self.let_in(request)
        path = request.url.path
        changed = asyncio.Event()
        here = asyncio.get_running_loop()

        def wake():
            with contextlib.suppress(RuntimeError):  # the server has ended
                here.call_soon_threadsafe(changed.set)

        ask = checked(await read(request), path, self.model, self.name)
        try:
            rows = rows_of(ask, path, self.model, wake)
            self.loop.submit(rows)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        except OverflowError as error:
            raise Refusal(
                429, str(error), None, "rate_limit_exceeded", {"Retry-After": "1"}
            ) from None
        answer = Answer(request, rows, changed, self.model, self.name)
        if path == "/v1/canvas":
            chunks = answer.steps()
        elif ask.get("stream"):
            chunks = answer.stream()
        else:
            return await answer.whole()
        return StreamingResponse(events(chunks), media_type="text/event-stream")

    async def check(self, request):
        """The verdicts on a text that goes on from a prompt; with open: where to repair it."""
        self.let_in(request)
        body = await read(request)
        prompt = body.get("prompt")
        text = body.get("text")
        for each in (prompt, text):
            if not isinstance(each, str) or len(each) >= 1 << 13:
                raise Refusal(400, "give two texts, prompt and text, of at most 8 KB")
        try:
            async with self.testing:
                if type(body.get("open")) is int and "steps" in self.model.settings:
                    ids = await asyncio.to_thread(
                        repair.opened, self.model, prompt, text, body["open"]
                    )
                    return JSONResponse({"ids": ids})
                program = text if "[MASK" in prompt else prompts.definitions(prompt, text)
                if wrong := syntax_error(prompt, text, program):
                    said = f"line {wrong.lineno}: {wrong.msg}"
                    return JSONResponse({"examples": [said], "line": wrong.lineno})
                said = await asyncio.to_thread(prompts.judged, program, prompts.examples(prompt))
                return JSONResponse({"examples": said})
        # no examples; no sandbox; too deep
        except (ValueError, RuntimeError, MemoryError) as error:
            raise Refusal(400, str(error)) from None


async def refuse(request, error):
    """The answer to what was refused, here or by Starlette."""
    if not isinstance(error, Refusal):  # a client that has gone reads no answer
        said = getattr(error, "detail", "the client has gone")
        error = Refusal(
            getattr(error, "status_code", 499),
            f"{request.method} {request.url.path}: {said}",
            headers=vars(error).get("headers"),
        )
    LOG.info("%d %s: %s", error.status, request.url.path, error.body["error"]["message"])
    return JSONResponse(error.body, error.status, error.headers)


def app(loop, name, cfg, chats):
    """The server of a loop as an ASGI application."""
    server = Server(loop, name, chats, os.environ.get(cfg.api_key, ""))

    async def show(request):
        return FileResponse(
            Path(__file__).with_name("serve.html"), headers={"Content-Security-Policy": POLICY}
        )

    routes = [
        Route("/", show),
        Route("/health", JSONResponse({"status": "ok"})),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        Route("/v1/check", server.check, methods=["POST"]),
    ]
    routes += [Route(path, server.complete, methods=["POST"]) for path in FORMS]
    # A site whose name was made to point at this address sends its own name.
    hosts = ["*"]
    if cfg.host in ("127.0.0.1", "localhost", "::1"):
        hosts = ["127.0.0.1", "localhost", "[::1]"]
    handlers = dict.fromkeys((Refusal, HTTPException, ClientDisconnect), refuse)
    return TrustedHostMiddleware(
        Starlette(routes=routes, exception_handlers=handlers), allowed_hosts=hosts
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
