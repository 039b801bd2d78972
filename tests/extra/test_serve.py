"""The server: OpenAI's client against it, rows that come and go, faults, its page in a browser."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import batching
import jax
import pytest
import steps
from conftest import AS_A_USER, ROOT, command, refused_by, run, says
from flax import nnx
from test_generate import new_params, new_tokenizer
from test_generate_dream import CODE
from test_prompts import TEMPLATE

import checkpoints
import data_prep
import generate_dream
import model_dream as md
import model_pythoncoder as pc
import prompts
import sample_dream

httpx, openai, uvicorn, _ = (
    pytest.importorskip(name) for name in ("httpx", "openai", "uvicorn", "starlette")
)
serve = importlib.import_module("serve")
pytestmark = pytest.mark.usefixtures("no_compile_cache")
ONE = {"devices": 1, "compile_cache": ""}
PROMPT = """def count_long(words):
    \"""Count the words longer than 4 letters.

    >>> count_long(["apple", "sea"])
    1
    \"""
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A converted Dream with random weights, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("dream")
    special = *data_prep.SPECIAL.values(), "<|im_start|>", "<|im_end|>"
    new_tokenizer(special, CODE).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    ids = {"mask_id": 3, "pad_id": 0, "bos_id": 1, "eos_id": 2}
    cfg = md.DreamConfig(
        320, 32, layers=1, heads=4, kv_heads=2, head_size=8, ffn=40, positions=160, **ids
    )
    model = nnx.merge(md.graph_of(cfg, md.Compute()), new_params(md, cfg, 0.5))
    checkpoints.save(
        md, folder / "tiny", model, [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    )
    return folder / "tiny"


@pytest.fixture(scope="module")
def dream(folder):
    return batching.Dream(str(folder), rows=4, **ONE)


@pytest.fixture(scope="module", params=[False, True], ids=["blocks", "causal"])
def blocks(request, folder, tmp_path_factory):
    """(a Dream of blocks of 4 tokens, its folder); causal: finished tokens attend causally."""
    cfg = dataclasses.replace(md.read_config(folder), block_length=4, causal=request.param)
    model = nnx.merge(md.graph_of(cfg, md.Compute()), new_params(md, cfg, 0.5))
    out = tmp_path_factory.mktemp("blocks") / "b"
    checkpoints.save(md, out, model, [folder / "tokenizer.json"])
    return batching.Dream(str(out), rows=4, **ONE), str(out)


@pytest.fixture(scope="module")
def coder():
    return batching.PythonCoder(str(ROOT / "weights/pythoncoder"), rows=4, **ONE)


@pytest.mark.parametrize("family", [batching.Dream, batching.PythonCoder])
def test_all_ends_that_generation_config_lists_end_a_text(folder, tmp_path, family):
    source = folder if family is batching.Dream else ROOT / "weights/pythoncoder"
    copy = shutil.copytree(source, tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 9, 7]}')
    assert family(str(copy), rows=1, **ONE).ends[:3] == (2, 9, 7)


@contextlib.contextmanager
def served(model, name="tiny", chats=None, **settings):
    """The address of a server in a thread."""
    cfg = serve.Config(**{"queue": 16} | settings)
    loop = batching.Loop(model, cfg.queue)
    model.batches.clear()
    loop.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            serve.app(loop, name, cfg, chats), log_level="error", lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", loop
        finally:
            server.should_exit = True
            thread.join(10)
            loop.close()


@pytest.fixture(scope="module")
def dream_server(dream):
    with served(dream, chats=False) as (url, loop):
        yield url, loop


@pytest.fixture(scope="module")
def coder_server(coder):
    with served(coder, "pythoncoder") as (url, loop):
        yield url, loop


def client_of(url, **settings):
    how = {"api_key": "none", "max_retries": 0, "timeout": 60} | settings
    return openai.OpenAI(base_url=url + "/v1", **how)


def post(url, path, **body):
    return httpx.post(url + path, json=body, timeout=60)


def fill(model, rows, joins):
    """Run rows without a server; row i joins at step joins[i]."""
    step, left = 0, [*zip(joins, rows, strict=True)]
    while not all(len(row.written) == row.ids.count(None) for row in rows):
        for entry in [entry for entry in left if entry[0] <= step]:
            batch, _ = model.batch_of(entry[1]), left.remove(entry)
            i = batch.rows.index(None)
            batch.rows[i] = entry[1]
            batch.join(i, entry[1])
        for batch in model.batches.values():
            for i, row in enumerate(batch.rows):
                if row and len(row.written) == row.ids.count(None):
                    batch.rows[i] = None
            if any(batch.rows):
                batch.step()
        step += 1
    for batch in model.batches.values():
        batch.rows = [None] * len(batch.rows)
    return [row.written for row in rows]


ASK = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "stop": []}


def encode(model, text):
    return model.tokenizer.encode(text, add_special_tokens=False).ids


def row_of(model, text, masks, number=0, **how):
    return batching.Row([*encode(model, text), *[None] * masks], ASK | how, number)


def texts_that_join(model, folder, how, size, joins, capsys):
    """Each row is what it is alone, with rounded log p; the first what generate_dream.py writes."""
    texts = "def area", "x = ", "import os, sys"

    def rows():
        return [row_of(model, text, size, i, **how) for i, text in enumerate(texts)]

    first, *_ = together = rows()
    for written, alone in zip(fill(model, together, joins), rows(), strict=True):
        close = {slot: (token[0], pytest.approx(token[1], 1e-4)) for slot, token in written.items()}
        assert {slot: token[:2] for slot, token in fill(model, [alone], (0,))[0].items()} == close
    drawn = {"temperature": 0.7, "top_p": 0.9, "seed": 5} | how
    settings = {"prompt": texts[0], "max_new": size, "json": True, "devices": 1} | drawn
    generate_dream.main(generate_dream.Config(str(folder), **settings))
    slots, _ = first.completion(model.ends)
    text = model.tokenizer.decode([first.written[slot][0] for slot in slots])
    assert json.loads(capsys.readouterr().out)["completion"] == text
    return together


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.0, "steps": 5},
        pytest.param({"top_p": 1.0, "block_length": 4}, marks=pytest.mark.slow),
        pytest.param({"threshold": 0.05}, marks=pytest.mark.slow),
        {"entropy_bound": 4.0, "block_length": 6},
    ],
    ids=str,
)
def test_a_row_that_joins_a_running_batch_becomes_what_it_is_alone_and_what_generate_writes(
    dream, folder, capsys, how
):
    texts_that_join(dream, folder, how, 12, (0, 3, 4), capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.0, "threshold": 0.05}, {"top_p": 1.0, "entropy_bound": 4.0}],
    ids=str,
)
def test_a_row_of_blocks_that_joins_becomes_what_it_is_alone_and_what_generate_writes(
    blocks, capsys, how
):
    model, folder = blocks
    for i, row in enumerate(texts_that_join(model, folder, how, 21, (0, 1, 3), capsys)):
        alone = batching.Row(row.ids, row.ask, i)
        fill(model, [alone], (0,))
        assert (alone.passes, len(alone.steps)) == (row.passes, len(row.steps))  # not of the batch


def test_a_place_that_is_taken_again_shows_nothing_of_the_text_before(dream):
    """What an end token fills is never drawn: it has probability 1."""
    row = row_of(dream, "x = ", 6)
    fill(dream, [row], (0,))
    batch = dream.batch_of(row)
    assert batch.state.record.logp_BL.any()
    batch.join(0, row)
    logp_BL, (ids_BLN, likely_BLN) = batch.state.record[2:]
    assert not logp_BL[0].any()
    assert (ids_BLN[0] == dream.ends[0]).all()
    assert ((likely_BLN[0] == 0).sum(-1) == 1).all()


@pytest.mark.slow
def test_a_server_warms_up_before_its_first_request(blocks, coder):
    blocks_of = batching.sample_block
    of_blocks = blocks_of.first_pass, blocks_of.other_passes, batching.prefill_blocks
    of_coder = batching.prefill, batching.advance
    for model, programs, how in ((blocks[0], of_blocks, {"threshold": 0.3}), (coder, of_coder, {})):
        model.batches.clear()
        batching.Loop(model, 4, warm=True)
        before = [program._cache_size() for program in programs]
        fill(model, [row_of(model, "x = ", 9, **how) for _ in range(2)], (0, 2))
        assert [program._cache_size() for program in programs] == before


@pytest.mark.slow
def test_a_server_of_blocks_streams_block_by_block_and_refuses_what_stands_behind_a_hole(blocks):
    with served(blocks[0]) as (url, _):
        drawn = {"prompt": "def area", "max_tokens": 13, "temperature": 0.8, "seed": 3}
        body = drawn | {"logprobs": 2, "threshold": 0.2}
        whole = post(url, "/v1/completions", **body).json()["choices"][0]
        assert {len(top) for top in whole["logprobs"]["top_logprobs"]} <= {1, 2}
        complete = client_of(url).completions.create
        pieces = [chunk.choices[0].text for chunk in complete(model="tiny", stream=True, **drawn)]
        assert "".join(pieces) == complete(model="tiny", **drawn).choices[0].text
        settings = httpx.get(url + "/v1/models").json()["data"][0]["settings"]
        assert settings == ["entropy_bound", "threshold"]
        for wrong in ({"suffix": "\n"}, {"steps": 4}):
            assert post(url, "/v1/completions", **body | wrong).status_code == 400


@pytest.mark.slow
def test_rows_of_pythoncoder_come_and_go_and_are_what_generate_writes_with_drafts(coder):
    def rows(**how):
        texts = PROMPT, "import os\n", "def f(x):\n    return"
        return [row_of(coder, text, 20, i, **how) for i, text in enumerate(texts)]

    together = fill(coder, rows(), (0, 3, 4))
    for i, written in enumerate(together):
        (alone,) = fill(coder, [rows()[i]], (0,))  # in a program of one row: log p are rounded
        assert [token for token, *_ in alone.values()] == [token for token, *_ in written.values()]
    key = jax.random.split(jax.random.key(ASK["seed"]))[1]  # that of generate.py
    greedy = fill(coder, sure := rows(temperature=0.0), (0, 1, 2))
    assert sum(row.passes for row in sure) < 50  # of 60 tokens, by drafts
    for temperature, written in ((ASK["temperature"], together), (0.0, greedy)):
        rule = pc.Sampling(temperature, 0, ASK["top_p"], coder.vocab, no_repeat_ngram=6)
        (text,), _ = pc.generate(coder.model, [encode(coder, PROMPT)], 20, rule, key)
        assert [token for token, *_ in written[0].values()] == text


def test_three_programs_fill_all_canvases_of_a_width(dream):
    before = sample_dream.fill_block._cache_size()
    for how in (
        {"temperature": 0.1},
        {"temperature": 0.0, "steps": 3},
        {"top_p": 0.5, "block_length": 3},
        {"threshold": 0.9},
        {"threshold": 0.1, "top_p": 1.0},
        {"entropy_bound": 2.0, "block_length": 7},
    ):
        for length in (3, 40):
            fill(dream, [row_of(dream, "x" * length, 3, **how)], (0,))
    assert sample_dream.fill_block._cache_size() - before <= 3


def test_openais_client_completes_texts_with_a_suffix_stop_strings_log_probabilities_and_usage(
    coder_server,
):
    url, loop = coder_server
    client = client_of(url)
    assert [model.id for model in client.models.list().data] == ["pythoncoder"]

    def complete(prompt=PROMPT, **how):
        settings = {"model": "pythoncoder", "max_tokens": 40, "temperature": 0} | how
        return client.completions.create(prompt=prompt, **settings)

    answer = complete([PROMPT, "import os\n"], n=2, seed=3, logprobs=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    first = answer.choices[0]
    assert first.text == "    return len([n for n in words if len(n) > 4])\n"
    assert first.finish_reason == "stop"
    assert "".join(first.logprobs.tokens) == first.text
    assert first.logprobs.text_offset[1] == len(first.logprobs.tokens[0])
    likeliest = [max(top.values()) for top in first.logprobs.top_logprobs]
    assert likeliest == first.logprobs.token_logprobs  # greedy
    count = sum(len(encode(loop.model, text)) for text in (PROMPT, "import os\n"))
    assert answer.usage.prompt_tokens == count
    assert answer.usage.total_tokens == count + answer.usage.completion_tokens
    cut = complete(stop=[" in words"]).choices[0]
    assert (cut.text, cut.finish_reason) == ("    return len([n for n", "stop")
    assert complete(max_tokens=3).choices[0].finish_reason == "length"
    drawn = [complete("def ", seed=seed, temperature=1.5).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert complete("def area(r):\n    ", suffix="\n    return a").choices[0].text


@pytest.mark.parametrize(
    ("server", "name", "prompt"),
    [("coder_server", "pythoncoder", PROMPT), ("dream_server", "tiny", "def")],
)
def test_a_stream_adds_up_to_the_whole_text_and_never_shows_a_stop_string(
    server, name, prompt, request
):
    complete = client_of(request.getfixturevalue(server)[0]).completions.create
    settings = {"model": name, "prompt": prompt, "max_tokens": 24, "seed": 1}
    settings |= {"n": 3, "temperature": 0.9}
    whole = [choice.text for choice in complete(**settings).choices]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for stop in (None, [whole[0][2:5]]):
        texts, reasons = ["", "", ""], [None, None, None]
        *chunks, last = complete(stop=stop, **streamed, **settings)
        assert last.usage.completion_tokens > 0
        for chunk in chunks:
            (choice,) = chunk.choices
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        assert texts == [prompts.truncate(text, stop or ()) for text in whole]
        assert all(reasons)


def test_a_conversation_takes_the_checkpoints_template(dream_server):
    client, model = client_of(dream_server[0]), dream_server[1].model
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in turns]
    settings = {"model": "tiny", "max_tokens": 8, "seed": 2, "temperature": 0.5}
    settings["messages"] = messages
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **settings)
    # not the template's own system turn
    begun = [{"role": "system", "content": ""}, {"role": "user", "content": "c"}]
    ids = serve.encode_messages(model.tokenizer, model.wrap, begun)
    text = model.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user")
    before = prompts.encode_chat(model.tokenizer, model.wrap, "c", "Be brief.", [("a", "b")])
    assert answer.usage.prompt_tokens == len(before)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert {len(token.top_logprobs) for token in content} <= {2}
    chunks = client.chat.completions.create(stream=True, **settings)
    pieces = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(pieces) == answer.choices[0].message.content
    no_text = [{"role": "user", "content": 3}]
    no_role = [{"role": 3, "content": "a"}]
    for wrong in ([], [{"role": "user"}], no_text, no_role):
        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(**settings | {"messages": wrong})
    # The template decides which order of turns it takes.
    for order in (messages[:3], [*messages[1:], messages[1]], [messages[2], messages[1]]):
        told = client.chat.completions.create(**settings | {"messages": order})
        ids = prompts.encode_chat(model.tokenizer, model.wrap, order)
        assert told.usage.prompt_tokens == len(ids)
        turns = [f"{turn['role']}\n{turn['content']}\n" for turn in order]
        assert model.tokenizer.decode(ids) == "".join([*turns, "assistant\n"])
    tool = [{"role": "tool", "content": "a"}]
    with pytest.raises(openai.BadRequestError, match="fails: no tools here"):
        client.chat.completions.create(**settings | {"messages": tool})
    # OpenAI's helper joins a streamed conversation
    settings |= {"n": 2, "messages": messages[-1:]}
    whole = client.chat.completions.create(**settings)
    with client.chat.completions.stream(**settings) as stream:
        assert [*stream]
        joined = stream.current_completion_snapshot
    said = [(choice.message.role, choice.message.content) for choice in joined.choices]
    assert said == [("assistant", choice.message.content) for choice in whole.choices]


def test_each_token_of_a_character_is_in_the_chunk_that_ends_it(coder_server):
    model, text = coder_server[1].model, "x = 'é → 日'\n"
    ids = model.tokenizer.encode(text).ids
    row = batching.Row([None] * len(ids), {"logprobs": 0, "stop": []})
    row.write({slot: (token, -1.0, (), ()) for slot, token in enumerate(ids)})
    request = httpx.Request("POST", "http://x/v1/chat/completions")
    answer = serve.Answer(request, [row], None, model, "x")
    for size in (1, 2, len(text)):
        ends = [*range(0, len(text), size), len(text)]
        parts = [answer.logprobs(row, *pair)["content"] for pair in itertools.pairwise(ends)]
        assert sum(map(len, parts)) == len(ids)
        assert "".join(token["token"] for part in parts for token in part) == text


def test_a_dream_is_told_once_how_many_tokens_a_step_writes(dream_server):
    for body in ({"threshold": 0.5, "entropy_bound": 1}, {"steps": 4, "threshold": 0.5}):
        answer = post(dream_server[0], "/v1/completions", prompt="x", **body)
        assert (answer.status_code, "do not go together" in answer.text) == (400, True)


def test_fim_is_answered_in_mistrals_form(coder_server):
    url = coder_server[0] + "/v1/fim/completions"
    body = {"prompt": "def f(x):\n    return ", "suffix": "\n", "max_tokens": 6, "random_seed": 1}
    body["temperature"] = 0
    as_continue = {"stop": None, "frequency_penalty": 0, "max_completion_tokens": None}
    answer = httpx.post(url, json=body | as_continue, timeout=60).json()
    text = answer["choices"][0]["message"]["content"]
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream:
        *lines, end = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert end == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"]["content"] for line in lines]
    assert "".join(deltas) == text


BAD = [json.loads(line) for line in (ROOT / "tests/extra/bad_requests.jsonl").open()]
BAD += [  # body or its text, status, a part of the message
    ({"prompt": "x " * 5000}, 400, "do not fit"),
    (b"\xff", 400, "JSON object"),
    ("[" * 100_000, 400, "JSON object"),
    ('{"prompt": "' + "x" * serve.BODY + '"}', 413, "bytes"),
]


def test_what_is_wrong_is_refused_by_name_and_what_is_null_is_absent(coder_server):
    url, complete = coder_server[0], coder_server[0] + "/v1/completions"
    for body, status, part in BAD:
        data = json.dumps(body) if isinstance(body, dict) else body
        answer = httpx.post(complete, content=data)
        found = (answer.status_code, part in answer.json()["error"]["message"])
        assert found == (status, True), (body, answer.text)
    no_such = ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v1/x", 404)
    for method, path, status in no_such:
        answer = httpx.request(method, url + path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert ("allow" in answer.headers) == (status == 405)
    names = "best_of logit_bias suffix stop seed n logprobs temperature tools response_format top_k"
    options = {"stream": True, "stream_options": {"include_usage": None}}
    for extra in (dict.fromkeys(names.split()), options):
        assert post(url, "/v1/completions", prompt="x", max_tokens=2, **extra).status_code == 200
    assert httpx.post(complete, json={}, headers={"Host": "evil.example"}).status_code == 400
    other_site = {"Sec-Fetch-Site": "cross-site"}  # a browser says so of another site's page
    for path in ("/v1/completions", "/v1/check"):
        assert httpx.post(url + path, json={}, headers=other_site).status_code == 403


NEUTRAL = {  # fields with values that ask for what is done anyway, and with others
    "response_format": ([{"type": "text"}], [{"type": "json_object"}, "text"]),
    "tool_choice": (["none"], ["required", {"type": "function", "function": {"name": "f"}}]),
    "tools": ([[]], [[{"type": "function"}]]),
    "parallel_tool_calls": ([True, False], ["yes"]),
    "store": ([False], [True, 0]),
    "metadata": ([{}], [{"a": "b"}, []]),
    "service_tier": (["auto", "default"], ["flex"]),
    "modalities": ([["text"]], [["text", "audio"], []]),
    "logprobs": ([False], ["x"]),
    "top_k": ([0, -1], [5, False, -2]),
    "min_p": ([0, 0.0], [0.1, False]),
    "repetition_penalty": ([1, 1.0], [1.2, True, 0]),
    "presence_penalty": ([0, 0.0], [0.5, False]),
    "logit_bias": ([{}], [{"5": 1}]),
    "best_of": ([1], [2, True]),
    "max_token": ([], [2]),
    "stream_options": (
        [{}, {"include_usage": True}, {"include_usage": None}, {"include_obfuscation": False}],
        [{"include_usag": True}, {"include_usage": 1}, {"include_obfuscation": True}],
    ),
}


@pytest.mark.parametrize("form", ["completions", "chat/completions", "fim/completions"])
def test_a_field_that_asks_for_what_is_done_anyway_is_accepted(coder_server, dream_server, form):
    url, ask = coder_server[0], {"prompt": "x = ", "max_tokens": 1}
    if form.startswith("chat"):
        url, ask = dream_server[0], {"messages": [{"role": "user", "content": "x"}]}
        ask["max_tokens"] = 1
    for field, (neutral, others) in NEUTRAL.items():
        for value in (None, *neutral):
            answer = post(url, "/v1/" + form, **ask, **{field: value})
            assert answer.status_code == 200, (field, value, answer.text)
            assert answer.json()["choices"][0]["logprobs"] is None
        for value in others:
            answer = post(url, "/v1/" + form, **ask, **{field: value})
            assert (answer.status_code, field in answer.text) == (400, True), (field, value)
    everything = {field: neutral[-1] for field, (neutral, _) in NEUTRAL.items() if neutral}
    assert post(url, "/v1/" + form, **ask, **everything).status_code == 200
    if form == "completions":  # the log probability of the token alone, not of none
        answer = post(url, "/v1/completions", **ask, logprobs=0).json()
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 1


def test_a_model_is_told_by_its_name(coder_server):
    url = coder_server[0] + "/v1/models"
    assert httpx.get(url + "/pythoncoder").json() == httpx.get(url).json()["data"][0]
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4', but 'pythoncoder'"):
        client_of(coder_server[0]).models.retrieve("gpt-4")


def test_a_key_is_asked_for_where_one_is_set(coder, monkeypatch):
    monkeypatch.setenv("UNMASK_API_KEY", "secret")
    with served(coder, "pythoncoder") as (url, _):
        with pytest.raises(openai.AuthenticationError):
            client_of(url).models.list()
        with pytest.raises(openai.AuthenticationError):
            client_of(url).completions.create(model="pythoncoder", prompt="x")
        assert client_of(url, api_key="secret").models.list().data
        assert httpx.get(url).status_code == 200  # the page asks for the key itself


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def steps_that_wait():
    """An event, without which no step of PythonCoder ends."""
    hold, step = threading.Event(), batching.Caches.step

    def slow(batch):
        hold.wait(20)
        step(batch)

    batching.Caches.step = slow
    try:
        yield hold
    finally:
        hold.set()
        batching.Caches.step = step


def test_past_the_queue_is_429_and_a_client_that_goes_away_frees_its_row(coder):
    def running():
        return sum(len([*filter(None, batch.rows)]) for batch in coder.batches.values())

    with served(coder, "pythoncoder", queue=4) as (url, loop):
        body = {"prompt": "def", "max_tokens": 100, "n": 4, "temperature": 1.0}

        async def ask_and_leave():
            async with httpx.AsyncClient(timeout=60) as client:
                tasks = []
                for rows in (4, 8):  # running, then waiting
                    asked = client.post(url + "/v1/completions", json=body)
                    tasks.append(asyncio.create_task(asked))
                    async with asyncio.timeout(60):
                        while len(loop.waiting) + running() != rows:
                            await asyncio.sleep(0.02)
                answer = await client.post(url + "/v1/completions", json=body)
                for task in tasks:
                    task.cancel()
                return answer

        complete = client_of(url).completions.create
        with steps_that_wait() as hold:
            answer = asyncio.run(ask_and_leave())
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            wait_until(lambda: loop.waiting and all(row.gone for row in loop.waiting))
            # those who left take nobody's place
            with concurrent.futures.ThreadPoolExecutor() as pool:
                ask = {"model": "pythoncoder", "prompt": "x", "n": 4, "max_tokens": 3}
                later = pool.submit(complete, **ask)
                wait_until(lambda: [row.gone for row in loop.waiting] == [False] * 4)
                hold.set()
                assert len(later.result().choices) == 4
        wait_until(lambda: not loop.waiting and not running())
        assert complete(model="pythoncoder", prompt=PROMPT, max_tokens=3).choices[0].text


def test_a_device_out_of_memory_fails_its_batch_alone(coder, monkeypatch):
    def exhausted(batch):
        raise RuntimeError("RESOURCE_EXHAUSTED: 5 GB")

    with served(coder, "pythoncoder") as (url, _):
        complete = client_of(url).completions.create
        ask = {"model": "pythoncoder", "prompt": PROMPT, "max_tokens": 3}
        with monkeypatch.context() as patch:
            patch.setattr(batching.Caches, "step", exhausted)
            with pytest.raises(openai.InternalServerError) as error:
                complete(**ask)
            assert error.value.status_code == 503
            patch.setattr(coder, "batch_of", exhausted)
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                complete(**ask)
        assert complete(**ask).choices[0].text


def events_of(url, **body):
    """The canvas, the steps and the end that the page gets."""
    with httpx.stream("POST", url + "/v1/canvas", json=body, timeout=60) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    canvas, *steps, end = map(json.loads, lines[:-1])
    return canvas["canvas"], [step for step in steps if "write" in step], end["keep"]


def test_the_page_gets_probabilities_of_a_pythoncoder(coder_server):
    _, steps, _ = events_of(coder_server[0], prompt="import ", max_tokens=6, temperature=0)
    for _, token, text, p, likely in (entry for step in steps for entry in step["write"]):
        assert 0 < p < 1
        assert [text, pytest.approx(p, 1e-4)] in likely, token


def test_the_page_gets_a_canvas_and_its_steps(dream_server):
    url, loop = dream_server
    canvas, steps, keep = events_of(url, prompt="def [MASK:4](x) [MASK:3]", seed=1, threshold=0.01)
    ids = [token and token[0] for token in canvas]
    assert ids.count(None) == 7
    written = {slot: (token, p) for step in steps for slot, token, _, p, _ in step["write"]}
    assert sorted(written) == [slot for slot, token in enumerate(ids) if token is None]
    assert steps[-1]["passes"] <= 7
    kept = {slot for slot, _ in keep}
    assert kept >= {slot for slot, token in enumerate(ids) if token is not None}
    for _, _, _, p, likely in steps[0]["write"]:
        assert len(likely) == 5
        assert p <= likely[0][1]
    for prompt, masks, text in (
        ("x = [MASK:1]", 1, "x =."),
        ("a [MASK] b [MASK:3] c", 8 + 3, "a. b. c"),
        ('def f():\n    """Go."""', 5, 'def f():\n    """Go."""\n.'),
    ):
        canvas, *_ = events_of(url, prompt=prompt, max_tokens=5, threshold=0.01)
        assert canvas.count(None) == masks
        shown = "".join(token[1] if token else "." for token in canvas)
        assert re.sub(r"\.+", ".", shown) == text
    mask = loop.model.model.cfg.mask_id
    for prompt in ("x = [MASK:0]", "x = [MASK:900000000]", ["a", "b"]):
        assert post(url, "/v1/canvas", prompt=prompt).status_code == 400
    assert post(url, "/v1/canvas", ids=[mask, None]).status_code == 400
    canvas, _, keep = events_of(url, prompt='s = "é → 日"[MASK:1]', threshold=0.01)
    assert "".join(token[1] for token in canvas if token) == 's = "é → 日"'
    assert "".join(text for _, text in keep).startswith('s = "é → 日"')
    # two tokens are masked again: the others stay
    again = [written.get(slot, (token,))[0] for slot, token in enumerate(ids)]
    hole = [*again[:1], None, None, *again[3:]]
    canvas, steps, _ = events_of(url, ids=hole, seed=2)
    assert [token and token[0] for token in canvas] == hole
    assert sorted(slot for step in steps for slot, *_ in step["write"]) == [1, 2]


def test_the_page_gets_verdicts_and_spans_to_repair(dream_server, coder_server):
    dream, coder = dream_server[0], coder_server[0]
    right = {"prompt": PROMPT, "text": PROMPT + "    return sum(len(w) > 4 for w in words)\n"}
    said = ["pass: count_long(['apple', 'sea']) gives 1"]
    assert post(coder, "/v1/check", **right).json()["examples"] == said
    assert post(coder, "/v1/check", **right | {"prompt": "x"}).status_code == 400
    for text, line in (("    return (n\n", 7), ("    n = 1\nx = = 1\n", 0), ("no Python\n", 7)):
        found = post(coder, "/v1/check", **right | {"text": PROMPT + text}).json()
        assert found.get("line", 0) == line
        assert found["examples"][0].startswith(f"line {line}: " if line else "fail: ")
    # where a text that fails is to be filled again: two spans of it
    wrong = right | {"text": PROMPT + "    return len(words)\n"}
    found = [post(dream, "/v1/check", open=i, **wrong).json()["ids"] for i in (0, 1)]
    assert found[0] != found[1]
    assert [ids.count(None) for ids in found] == [8, 8]
    for text in (PROMPT, "x = 1\n"):  # nothing behind the prompt, another prompt
        assert post(dream, "/v1/check", open=0, prompt=PROMPT, text=text).status_code == 400
    assert "ids" not in post(coder, "/v1/check", open=0, **wrong).json()


# ---- as a user runs it --------------------------------


@contextlib.contextmanager
def started(*flags):
    """(process, address) of serve.py."""
    env = os.environ | AS_A_USER | {"XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
    line = command("extra/serve.py", "--port=0", "--compile_cache=", *flags)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    with subprocess.Popen(line, **pipes) as process:
        try:
            yield process, process.stdout.readline().split()[0]
        finally:
            process.kill()


@pytest.mark.slow
def test_sigterm_finishes_what_runs_and_refuses_what_comes():
    body = {"prompt": "def", "max_tokens": 120, "temperature": 1.5, "seed": 1, "n": 8}
    body["stream"] = True
    with started() as (process, url):
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [*lines]
        assert rest[-2] == "data: [DONE]"
        assert process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)


@pytest.mark.slow
def test_what_still_runs_when_the_grace_is_over_is_told_so():
    body = {"prompt": "x", "max_tokens": 400, "n": 16, "temperature": 2}
    with (
        started("--grace=1", "--batch_size=1") as (process, url),
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        answers = [pool.submit(post, url, "/v1/completions", **body) for _ in range(3)]
        streamed = pool.submit(post, url, "/v1/completions", stream=True, **body)
        time.sleep(2)  # sixteen texts of four clients take longer
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert {answer.result().status_code for answer in answers} == {503}
        assert "shutting down" in streamed.result().text


@pytest.mark.slow
def test_a_port_in_use_a_folder_without_a_model_and_a_missing_package_are_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = f"--port={port}: Address already in use; --port=0 takes a free one"
        assert said in refused_by(serve, f"--port={port}")
    assert "--port=70000 is not in 0 .. 65535" in refused_by(serve, "--port=70000")
    assert "holds no checkpoint" in refused_by(serve, "--port=0", f"--ckpt={tmp_path}")
    assert "holds an MDLM: python inf" in refused_by(serve, f"--ckpt={ROOT / 'weights/mdlm'}")
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(\"No module named 'uvicorn'\")")
    without = os.environ | AS_A_USER | {"PYTHONPATH": str(tmp_path)}
    says(run("extra/serve.py", env=without), "uvicorn", "pip install -r requirements-serve.txt")


# ---- clients that misbehave --------------------------------

PATHS = [
    f"/v1/{name}" for name in "completions chat/completions fim/completions canvas check".split()
]
NAMES = "prompt suffix n max_tokens temperature top_p stop seed stream logprobs messages model ids"
NAMES = f"{NAMES} best_of tools x".split()
ODD = [None, True, False, -1, 0, 1e308, -(10**30), 10**400, math.nan, math.inf, 0.5, 2**63]
TEXTS = ["", "a", "\0", "\ud800", "\U0010ffff", "<|endoftext|>", "[MASK:99999999]", "x" * 5000]


def value(draw, depth=0):
    """Any JSON value, most of them of no use."""
    kind = draw.randrange(9 if depth < 4 else 7)
    if kind < 3:
        return draw.choice(ODD)
    if kind < 7:
        return draw.choice(TEXTS) * draw.randrange(1, 4)
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
    fields = {draw.choice(NAMES): value(draw) for _ in range(draw.randrange(1, 6))}
    text = json.dumps(fields | {draw.choice(["y", "best_of"]): 7}).encode()
    return text[: draw.randrange(len(text))] if kind == 3 else text


@pytest.mark.slow
def test_clients_that_misbehave_leave_the_server_as_it_was():
    draw = random.Random(0)
    flags = "--model=pythoncoder", "--queue=128", "--warm"
    with started(*flags) as (process, url), httpx.Client(timeout=120) as client:
        host, port = url.removeprefix("http://").split(":")
        body = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "temperature": 1.5}

        def good():
            canary = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
            return client.post(url + "/v1/completions", json=canary).json()["choices"][0]["text"]

        def send(data, promised):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {promised}"
            connection = socket.create_connection((host, int(port)), timeout=60)
            connection.sendall(head.encode() + b"\r\n\r\n" + data)
            return connection

        def hang_up(i, abort=False):
            data = json.dumps(body | {"seed": i}).encode()
            with send(data, len(data)) as connection:
                connection.recv(draw.choice([1, 100, 1000]))
                if abort:  # as of a client that is killed
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

        def stop_halfway(i):
            send(b'{"prompt": "def', 1000).close()

        def send_nonsense(i):
            answer = client.post(url + draw.choice(PATHS), content=broken(draw))
            assert answer.status_code in (400, 404, 413), (answer.status_code, answer.text)
            assert answer.json()["error"]["message"]

        def send_much(i):
            long = {"prompt": "x = 1\n" * (1000 + 10 * i)}
            assert client.post(url + "/v1/completions", json=long).status_code == 400

        def memory_mb():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024

        want = good()
        for i in range(100):  # what grows at first stays: buffers and the allocator's arenas
            hang_up(i)
            assert good() == want
        before = memory_mb()
        killed = functools.partial(hang_up, abort=True)
        faults = (hang_up, 60), (stop_halfway, 60), (send_nonsense, 600), (send_much, 6)
        for fault, times in (*faults, (killed, 6)):
            for i in range(times):
                fault(i)
            assert good() == want
            assert memory_mb() - before < 30, fault


# ---- the page, in a browser --------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@contextlib.contextmanager
def browser_at(url, **settings):
    """A page of a headless Chromium; what its scripts complain of is an error."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("there is no Chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

    def on_console(message):
        if message.type == "error" and "status of 400" not in message.text:
            errors.append(message.text)

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            page, errors = browser.new_page(**settings), []
            page.set_default_timeout(30_000)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", on_console)
            page.goto(url)
            yield page
            assert not errors
        finally:
            browser.close()


def texts_of(page):
    return page.evaluate("tokens.map(token => token.id === null ? null : token.text)")


def generate(page):
    page.click("#generate")
    wait_for_the_end(page)


def wait_for_the_end(page):
    page.wait_for_selector("#stop[disabled]", state="attached")
    page.wait_for_selector("#generate:not([disabled])")


@pytest.mark.slow
def test_on_a_touch_screen_a_tap_masks_a_token_and_a_swipe_scrolls(coder_server):
    small = {"width": 400, "height": 400}
    with browser_at(coder_server[0], viewport=small, has_touch=True) as page:
        page.wait_for_selector("#name:not(:empty)")
        page.fill("#prompt", PROMPT)
        page.fill("#temperature", "0")
        generate(page)
        token = page.locator(f"#canvas span:nth-child({len(texts_of(page)) - 2})")
        token.scroll_into_view_if_needed()
        box, before = token.bounding_box(), page.evaluate("scrollY")
        x, y = box["x"] + 3, box["y"] + 5
        # towards where there is more
        client, step = page.context.new_cdp_session(page), 30 if before == 0 else -30
        touches = [("touchStart", [{"x": x, "y": y}])]
        touches += [("touchMove", [{"x": x, "y": y - i * step}]) for i in range(1, 6)]
        for kind, points in (*touches, ("touchEnd", [])):
            client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.wait_for_function(f"scrollY !== {before}")
        assert None not in texts_of(page)
        token.scroll_into_view_if_needed()
        token.tap()
        assert texts_of(page).count(None) == 1
        token.tap()
        assert None not in texts_of(page)


@pytest.mark.slow
def test_a_reader_of_the_page_watches_masks_fills_and_tests(coder_server):
    with browser_at(coder_server[0], viewport={"width": 900, "height": 860}) as page:
        page.wait_for_selector("#name:not(:empty)")
        bad = ("0", PROMPT, "tokens: 1 to 2048"), ("48", " ", "write a prompt, or take an example")
        for tokens, prompt, said in bad:
            page.fill("#max_tokens", tokens)
            page.fill("#prompt", prompt)
            page.click("#generate")
            assert page.inner_text("#error") == said
        page.click("text=a function")
        count = "seen.push(document.querySelectorAll('.mask').length)"
        page.evaluate(f"window.seen = []; draw = (old => () => {{ old(); {count} }})(draw)")
        generate(page)
        masks = page.evaluate("seen")
        masks = masks[masks.index(max(masks)) :]
        assert len(set(masks)) > 10  # token after token appeared
        assert masks == sorted(masks, reverse=True)
        assert masks[-1] == 0
        first = texts_of(page)
        assert "".join(first) == PROMPT + "    return len([n for n in words if len(n) > 4])\n"
        page.click("#check")
        page.wait_for_selector("#verdicts .pass")
        assert page.inner_text("#verdicts") == "pass: count_long(['apple', 'sea']) gives 1"

        # point at a token: what it is, and what else could stand there
        number = len(first) - 2
        page.hover(f"#canvas span:nth-child({number + 1})")
        about = page.inner_text("#about")
        assert "probability" in about
        assert page.locator("#about tr").count() == 4
        # mask it, then three more by dragging, under which nothing moves; the keyboard opens one
        boxes = [span.bounding_box() for span in page.locator("#canvas span").all()]
        page.click(f"#canvas span:nth-child({number + 1})")
        assert page.inner_text("#fill") == "Fill 1 mask"
        assert not page.inner_text("#verdicts")  # they were of another text
        spans = [boxes[number - i - 1] for i in (0, 2)]
        page.mouse.move(spans[0]["x"] + 3, spans[0]["y"] + 5)
        page.mouse.down()
        page.mouse.move(spans[1]["x"] + 3, spans[1]["y"] + 5, steps=20)
        page.mouse.up()
        assert texts_of(page).count(None) == 4
        assert [span.bounding_box() for span in page.locator("#canvas span").all()] == boxes
        page.keyboard.press("Control+z")
        assert texts_of(page).count(None) == 1
        page.click("#redo")
        assert texts_of(page).count(None) == 4
        page.reload()
        page.wait_for_function("tokens.length")
        assert texts_of(page).count(None) == 4
        page.focus(f"#canvas span:nth-child({number - 2})")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press(" ")
        assert texts_of(page).count(None) == 5
        page.keyboard.press(" ")
        page.click("#more")
        assert page.inner_text("#fill") == "Fill 5 masks"
        page.click("#less")
        holes = [i for i, text in enumerate(texts_of(page)) if text is None]
        kept = texts_of(page)[holes[-1] + 1 :]
        for grows in (True, False):
            size = len(texts_of(page))
            page.set_checked("#grow", grows)
            page.click("#fill")
            wait_for_the_end(page)
            second = texts_of(page)
            assert None not in second
            assert second[: holes[0]] == first[: holes[0]]
            assert second[len(second) - len(kept) :] == kept
            assert len(second) <= size + 16 * grows
            for i in holes[:2] if grows else ():  # mask two of them for the second time
                page.click(f"#canvas span:nth-child({i + 1})")
                kept = second[i + 1 :]
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("#copy")
        assert page.evaluate("navigator.clipboard.readText()") == "".join(texts_of(page))
        page.fill("#slider", "1")  # replay
        assert page.locator("#canvas .mask").count() == page.evaluate("last") - 1
        page.select_option("#colour", "step")
        assert page.is_visible(".step")


@pytest.mark.slow
def test_a_dream_on_the_page_has_controls_and_several_holes(dream_server):
    narrow = {"width": 400, "height": 800}
    with browser_at(dream_server[0], viewport=narrow, color_scheme="dark") as page:
        page.click("#order summary")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.fill("#prompt", "def [MASK:5]: return [MASK:3]")
        page.select_option("#rule", "threshold")
        page.fill("#bound", "0.01")
        generate(page)
        few = page.evaluate("last")
        page.select_option("#rule", "")
        page.fill("#steps", "8")
        generate(page)
        assert 0 < few < page.evaluate("last")
        assert re.match(r"\d+ steps?, \d+ tokens", page.inner_text("#rate"))
        page.fill("#prompt", "x " * 200)
        page.click("#generate")
        page.wait_for_selector("#error:not(:empty)")
        assert "do not fit" in page.inner_text("#error")
        page.check("#chat")
        page.fill("#max_tokens", "8")
        for turns, prompt in ((2, "def"), (4, "def"), (4, "def [MASK:5]")):  # a hole is plain text
            page.fill("#prompt", prompt)
            generate(page)
            assert page.locator("#talk p").count() == turns
            assert "im_start" not in page.inner_text("#canvas")
        assert page.evaluate("past.map(before => before.talk.length)")[-3:] == [0, 2, 4]  # Undo's
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.slow
def test_a_recorded_page_replays_without_a_server(tmp_path):
    tokens = [["a<b ", 0, 1.0], ["x", 2, 0.5], ["\n", 1, 0.9]]
    (tmp_path / "steps.html").write_text(steps.page([tokens, tokens[:1]]))
    with browser_at((tmp_path / "steps.html").as_uri()) as page:
        assert not page.is_visible("#generate")
        assert not page.is_visible("#fill")
        assert page.locator("#canvas span").all_inner_texts()[:2] == ["a<b ", "x"]
        page.fill("#slider", "1")
        assert page.locator("#canvas .mask").count() == 1
        page.fill("#slider", "2")
        page.mouse.move(1, 1)
        page.hover("#canvas span:nth-child(2)")
        assert "step 2 of 2, probability 50.0 %" in page.inner_text("#about")
        page.click("text=text 2")
        assert page.locator("#canvas span").count() == 1


@pytest.mark.slow
def test_the_screenshot_of_the_readme(tmp_path):
    """As serve.py opens. SCREENSHOT=1 writes it into bench/results."""
    model = batching.Dream(str(ROOT / "weights/dream"), rows=4, **ONE)
    path = (ROOT / "bench/results" if os.environ.get("SCREENSHOT") else tmp_path) / "serve.png"
    with (
        served(model, "dream") as (url, _),
        browser_at(url, viewport={"width": 1280, "height": 720}) as page,
    ):
        page.wait_for_selector("#order:not([hidden])")
        generate(page)
        page.click("#check")
        page.wait_for_selector("#verdicts .pass")
        page.click("#canvas span:nth-last-child(6)")  # masked again
        page.hover("#canvas span:nth-last-child(12)")
        assert page.locator("#canvas .mask").count() == 1
        page.screenshot(path=str(path))
    assert path.stat().st_size <= 100_000


@pytest.mark.slow
def test_a_text_that_fails_is_repaired_round_by_round():
    prompt = 'def double(n):\n    """Return n times 2.\n\n    >>> double(2)\n    99\n    """\n'
    model = batching.Dream(str(ROOT / "weights/dream"), rows=4, **ONE)
    with served(model, "dream") as (url, _), browser_at(url) as page:
        page.wait_for_selector("#order:not([hidden])")
        page.fill("#prompt", prompt)
        page.fill("#temperature", "0")
        generate(page)
        assert page.locator("#repair").is_hidden()
        page.click("#check")
        texts = []
        for _ in range(3):
            page.wait_for_selector("#verdicts .fail")
            texts.append("".join(texts_of(page)))
            page.click("#repair")
            page.wait_for_selector("#verdicts:empty", state="attached")
            page.wait_for_selector("#verdicts li")
            assert page.locator("#canvas .changed").count() > 0
        assert len({*texts}) > 1
        assert all(text.startswith(prompt) for text in texts)
        page.fill("#prompt", prompt + "    return n * 3\n")  # a prompt that holds the function
        generate(page)
        page.click("#check")
        page.click("#repair")
        page.wait_for_selector("#canvas .changed")
