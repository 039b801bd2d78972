"""Serve a model over HTTP: completions in OpenAI's form, filling in the middle, and a page that
shows the denoising.

    python extra/serve.py                                # weights/dream, or weights/pythoncoder; open the address it prints
    python extra/serve.py --model=dream --ckpt=out/diffucoder --int8 --warm

/v1/models, /v1/completions, /v1/chat/completions and Mistral's /v1/fim/completions take what
OpenAI's clients send, for a Dream also steps, threshold, entropy_bound and block_length. Requests
join a running batch, see batching.py.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import secrets
import signal
import socket
import sys
import time
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import batching

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

BODY, READING_S = 1 << 18, 20  # bytes of a request at most, seconds that a client has to send it
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)


@dataclasses.dataclass(frozen=True)
class Config:
    # family; "" is Dream if weights/dream exists
    model: typing.Literal["", "pythoncoder", "dream"] = ""
    ckpt: str = ""  # folder of a run or of convert_weights.py; "" is that in weights/
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
    # folder of compiled programs, for later runs; "" keeps none
    compile_cache: str = "~/.cache/unmask"


def main(cfg):
    if cfg.api_key not in ("", Config.api_key) and not os.environ.get(cfg.api_key):
        raise ValueError(
            "--api_key names an environment variable that holds the key, and that one is not set"
        )
    weights = (
        Path(__file__).parents[1] / "weights"
    )  # small trained models, a folder for each family
    family = cfg.model or ("dream" if (weights / "dream").is_dir() else "pythoncoder")
    folder = cfg.ckpt or str(weights / family)
    host, kind = (
        (f"[{cfg.host}]", socket.AF_INET6) if ":" in cfg.host else (cfg.host, socket.AF_INET)
    )
    # a port in use is told before the model is read
    socket.create_server((cfg.host, cfg.port), family=kind).close()
    read = batching.Dream if family == "dream" else batching.PythonCoder
    model = read(folder, cfg.batch_size, bits=8 if cfg.int8 else 0, compile_cache=cfg.compile_cache)
    (loop := batching.Loop(model, cfg.queue, cfg.warm)).start()
    # a step that has ended waits for the interpreter no longer than this
    sys.setswitchinterval(5e-4)
    how = {"log_level": "warning", "timeout_graceful_shutdown": cfg.grace, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app(loop, Path(folder).resolve().name, cfg), **how))
    # uvicorn raises it at its end
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    with socket.create_server((cfg.host, cfg.port), family=kind) as listener:
        print(f"http://{host}:{listener.getsockname()[1]}", flush=True)
        server.run(sockets=[listener])
    # it compiles, which nothing can end, and to leave as Python does would abort
    if not loop.close():
        os._exit(0)


MOST, TOP, SEEDS = (1, batching.WIDTHS[-1]), (0, batching.LIKELIEST), (-(1 << 63), (1 << 63) - 1)
# fmt: off
NUMBERS = {  # lowest and highest; a field whose limits are of type int is one
    "max_tokens": MOST, "max_completion_tokens": MOST, "steps": MOST, "block_length": MOST, "n": (1, 16),
    "logprobs": TOP, "top_logprobs": TOP, "seed": SEEDS, "random_seed": SEEDS, "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0), "threshold": (0.0, 1.0), "entropy_bound": (0.0, 1e6),
}
TYPES = {"model": str, "user": str, "suffix": str, "messages": list, "ids": list}
TYPES |= {"stream": bool, "stream_options": dict}
# fmt: on
COMMON = {
    "model",
    "user",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stream",
}
FORMS = {  # the fields of each path, beside COMMON and those of the model
    "/v1/completions": {"prompt", "suffix", "n", "logprobs", "stream_options"},
    "/v1/chat/completions": {"messages", "n", "logprobs", "top_logprobs", "stream_options"},
    "/v1/fim/completions": {"prompt", "suffix", "random_seed", "stream_options"},
    "/v1/canvas": {"prompt", "suffix", "ids"},
}
NO_EFFECT = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
}


class Refusal(Exception):
    def __init__(self, status, message, param=None, code=None, headers=None):
        kind = (
            "server_error"
            if status >= 500
            else "rate_limit_error"
            if status == 429
            else "invalid_request_error"
        )
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.status, self.headers = status, headers


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


def checked(fields, path, model, name):
    """The settings of a request. Refusal for a field that is unknown, of another type, or out of
    its limits.
    """
    fields = {
        field: value for field, value in fields.items() if NO_EFFECT.get(field, object) != value
    }
    for field, value in fields.items():
        if field not in FORMS[path] | COMMON | model.settings:
            raise Refusal(400, f"{field} is not supported here", field)
        kind, limits = TYPES.get(field, object), NUMBERS.get(field)
        if field == "logprobs" and "top_logprobs" in FORMS[path]:
            kind, limits = bool, None
        kind = kind if limits is None else int if isinstance(limits[0], int) else int | float
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right or (limits and not limits[0] <= value <= limits[1]):
            span = " from {} to {}".format(*limits) if limits else ""
            raise Refusal(
                400, f"{field} has to be of type {getattr(kind, '__name__', kind)}{span}", field
            )
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stop, list)
        or len(stop) > 32
        or not all(isinstance(x, str) and 0 < len(x) < 100 for x in stop)
    ):
        raise Refusal(
            400, "stop has to be a text of 1 to 99 characters, or a list of at most 32", "stop"
        )
    if fields.get("model", name) != name:
        raise Refusal(
            404, f"there is no model {fields['model']!r}, but {name!r}", "model", "model_not_found"
        )
    if "top_logprobs" in FORMS[path]:
        fields["logprobs"] = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    defaults = {"n": 1, "logprobs": None, "seed": fields.get("random_seed", random.getrandbits(31))}
    return model.defaults | defaults | fields | {"stop": stop}


def rows_of(ask, path, model, wake):
    """The Rows of a request. Refusal or ValueError for what the model cannot take."""
    rows, size = [], ask.get("max_tokens", ask.get("max_completion_tokens"))
    most, masks = model.positions - model.extra, getattr(model.model.cfg, "hole_masks", 0)
    page, mask = path == "/v1/canvas", getattr(model.model.cfg, "mask_id", -1)
    if "messages" in FORMS[path]:
        canvases = [[*encode_messages(model.tokenizer, model.wrap, ask.get("messages")), None]]
    elif "ids" in ask:
        canvases = [ids := ask["ids"]]
        right = (x is None or (type(x) is int and 0 <= x < model.vocab and x != mask) for x in ids)
        if None not in ids or not all(right):
            raise Refusal(
                400, "ids has to hold token ids, and null where the model generates", "ids"
            )
    else:
        asked = given if isinstance(given := ask.get("prompt", ""), list) else [given]
        if (
            not 1 <= len(asked) <= 16
            or not all(isinstance(x, str) for x in asked)
            or (page and asked is given)
        ):
            raise Refusal(
                400, f"prompt has to be a text{'' if page else ' or a list of 1 to 16'}", "prompt"
            )
        # what does not fit is refused below
        texts = prompts.Texts(model.tokenizer, None, model.ends, BODY)
        how = {
            "suffix": ask.get("suffix", ""),
            "infill": page,
            "hole": masks or 8,
        }
        asked = map(prompts.on_new_line, asked) if page else asked  # of an editor: as it is
        canvases = [texts.canvas(prompt, max_new=1, **how).ids for prompt in asked]
    for ids in canvases:
        room = most - len(ids)
        if (
            "ids" not in ask
            and not (page and "[MASK" in str(ask.get("prompt")))
            and ids.count(None) == 1
        ):
            i, n = ids.index(None), size or max(1, min(masks or 128, room + 1))
            ids, room = [*ids[:i], *[None] * n, *ids[i + 1 :]], room + 1 - n
        if room < 0:
            raise Refusal(
                400,
                f"{len(ids)} tokens do not fit in {most}",
                "max_tokens",
                "context_length_exceeded",
            )
        model.check(ids, ask)
        rows += [batching.Row(ids, ask, number, wake=wake) for number in range(ask["n"])]
    return rows


def encode_messages(tokenizer, wrap, messages):
    """Token ids of OpenAI's messages in a chat template. ValueError for those that are no
    conversation.
    """
    if wrap is None:
        raise ValueError("the model has no chat template: use /v1/completions")
    try:
        roles, texts = zip(*((turn["role"], turn["content"]) for turn in messages), strict=True)
        texts = [
            text if isinstance(text, str) else "".join(part["text"] for part in text)
            for text in texts
        ]
        system = texts.pop(0) if roles[0] in ("system", "developer") else None
        if roles[-len(texts) :] != (("user", "assistant") * len(texts))[: len(texts) | 1]:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            "messages have to be texts of user and assistant in turn, the last of user"
        ) from None
    before = list(zip(texts[:-1:2], texts[1::2], strict=True))
    return prompts.encode_chat(tokenizer, wrap, texts[-1], system, before)


def judged(prompt, text):
    """The verdicts on a text that goes on from a prompt, by the examples in the prompt."""
    program = text if "[MASK" in prompt else prompts.definitions(prompt, text)
    return prompts.judged(program, prompts.examples(prompt))


# ---- what is answered ----------------------------------------------------------------------------------------------


class Answer:
    """The answer to a request for completions, whole or streamed."""

    def __init__(self, request, rows, changed, model, name):
        self.request, self.rows, self.changed, self.model, self.ask = (
            request,
            rows,
            changed,
            model,
            rows[0].ask,
        )
        self.plain = request.url.path == "/v1/completions"
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }
        self.head["object"] = "text_completion" if self.plain else "chat.completion"

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
                row.error, row.ended = InterruptedError("the server is shutting down"), "error"
            yield
        finally:
            for row in self.rows:
                row.gone = True

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
        logprobs = (
            self.logprobs(self.rows[i], begin, begin + len(text))
            if self.ask["logprobs"] is not None
            else None
        )
        # a stream opens with it
        role = {} if name == "delta" and (text or ended) else {"role": "assistant"}
        content = {"text": text} if self.plain else {name: role | {"content": text}}
        return {"index": i} | content | {"logprobs": logprobs, "finish_reason": ended or None}

    def logprobs(self, row, begin, end):
        """Log probabilities, in OpenAI's form, of the tokens that end within the characters begin
        .. end - 1.
        """
        tokens, at, found = self.tokens(row), 0, []
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
            if not row.ended or row.error:
                raise failed(row) if row.error else ClientDisconnect
        choices = [
            self.choice(i, 0, self.text(row, row.ended), row.ended)
            for i, row in enumerate(self.rows)
        ]
        return JSONResponse(self.head | {"choices": choices, "usage": self.usage()})

    async def stream(self):
        """Yields chunks: of each row what has been added since the last one."""
        head = self.head | ({} if self.plain else {"object": "chat.completion.chunk"})
        sent = dict.fromkeys(range(len(self.rows)), 0)
        opening = [] if self.plain else [*sent]
        async for _ in self.follow():
            while opening:
                yield head | {"choices": [self.choice(opening.pop(0), 0, "", "", "delta")]}
            for i, begin in [*sent.items()]:
                ended = self.rows[i].ended
                new = self.text(self.rows[i], ended)[begin:]
                if ended == "error":
                    yield failed(self.rows[i]).body
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
        (row,), tokenizer, shown = self.rows, self.model.tokenizer, 0
        texts = iter(prompts.pieces(tokenizer, [token for token in row.ids if token is not None]))
        yield {"canvas": [token if token is None else [token, next(texts)] for token in row.ids]}
        async for _ in self.follow():
            for slots in row.steps[shown:]:
                shown, written = shown + 1, []
                for slot in slots:
                    token, logp, *likely = row.written[slot]
                    others = [
                        (tokenizer.decode([i]), math.exp(p)) for i, p in zip(*likely, strict=True)
                    ]
                    written.append((slot, token, tokenizer.decode([token]), math.exp(logp), others))
                yield {
                    "step": shown,
                    "write": written,
                    "passes": row.passes,
                    "seconds": row.seconds,
                }
        if row.error:
            yield failed(row).body
        ids = [
            row.written.get(slot, (-1,))[0] if token is None else token
            for slot, token in enumerate(row.ids)
        ]
        kept = prompts.Texts(None, None, {*self.model.ends, -1}, 0).kept(
            prompts.Canvas("", "", row.ids, 0, None), ids
        )
        yield {
            "keep": [
                *zip(kept, prompts.pieces(tokenizer, [ids[slot] for slot in kept]), strict=True)
            ]
        }


def failed(row):
    return Refusal(
        503 if isinstance(row.error, MemoryError | InterruptedError) else 500, str(row.error)
    )


async def events(chunks):
    async for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def app(loop, name, cfg):
    key, model, testing = os.environ.get(cfg.api_key, "").encode(), loop.model, asyncio.Semaphore(2)

    def let_in(request):
        if key and not secrets.compare_digest(
            request.headers.get("authorization", "").encode(), b"Bearer " + key
        ):
            raise Refusal(401, "the API key is missing or wrong", code="invalid_api_key")
        # a browser's word for a page of somebody else
        if request.headers.get("sec-fetch-site") == "cross-site":
            raise Refusal(403, "another site's page may not use this server")

    async def models(request):
        let_in(request)
        about = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "unmask",
            "settings": sorted(model.settings),
        }
        return JSONResponse({"object": "list", "data": [about]})

    async def complete(request):
        let_in(request)
        path, changed, here = request.url.path, asyncio.Event(), asyncio.get_running_loop()

        def wake():
            with contextlib.suppress(RuntimeError):  # the server has ended
                here.call_soon_threadsafe(changed.set)

        ask = checked(await read(request), path, model, name)
        try:
            loop.submit(rows := rows_of(ask, path, model, wake))
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        except OverflowError as error:
            raise Refusal(
                429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"}
            ) from None
        answer = Answer(request, rows, changed, model, name)
        if ask.get("stream") or path == "/v1/canvas":
            chunks = answer.steps() if path == "/v1/canvas" else answer.stream()
            return StreamingResponse(events(chunks), media_type="text/event-stream")
        return await answer.whole()

    async def check(request):
        let_in(request)
        # open: where to repair the text
        *texts, opening = map((await read(request)).get, ("prompt", "text", "open"))
        if not all(isinstance(text, str) and len(text) < 1 << 13 for text in texts):
            raise Refusal(400, "give two texts, prompt and text, of at most 8 KB")
        try:
            async with testing:
                if type(opening) is int and "steps" in model.settings:
                    import repair

                    return JSONResponse(
                        {"ids": await asyncio.to_thread(repair.opened, model, *texts, opening)}
                    )
                return JSONResponse({"examples": await asyncio.to_thread(judged, *texts)})
        except (
            ValueError,
            RuntimeError,
            MemoryError,
        ) as error:  # no examples; too deep; no sandbox
            raise Refusal(400, str(error)) from None

    async def refuse(request, error):
        if not isinstance(error, Refusal):  # a client that has gone reads no answer
            status, said = (
                getattr(error, "status_code", 499),
                getattr(error, "detail", "the client has gone"),
            )
            error = Refusal(
                status,
                f"{request.method} {request.url.path}: {said}",
                headers=vars(error).get("headers"),
            )
        return JSONResponse(error.body, error.status, error.headers)

    page, headers = Path(__file__).with_name("serve.html"), {"Content-Security-Policy": POLICY}
    routes = [
        Route("/", lambda _: FileResponse(page, headers=headers)),
        Route("/v1/models", models),
    ]
    routes += [
        Route(path, complete if path in FORMS else check, methods=["POST"])
        for path in ("/v1/check", *FORMS)
    ]
    # A site whose name was made to point at this address sends its own name.
    hosts = (
        ["127.0.0.1", "localhost", "[::1]"]
        if cfg.host in ("127.0.0.1", "localhost", "::1")
        else ["*"]
    )
    handlers = dict.fromkeys((Refusal, HTTPException, ClientDisconnect), refuse)
    return TrustedHostMiddleware(
        Starlette(routes=routes, exception_handlers=handlers), allowed_hosts=hosts
    )


if __name__ == "__main__":
    runs.command(main, Config, __doc__)
