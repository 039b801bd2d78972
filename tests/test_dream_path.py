"""From a folder of the Hub to a fine-tuned one that transformers loads, by README's commands
alone.
"""

import json
import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from conftest import run

import checkpoints
import convert_weights
import model_dream as md
import runs

CHAT = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ADDED = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>", "<|dlm_pad|>"
CONFIGURATION = """
from transformers import PretrainedConfig


class DreamConfig(PretrainedConfig):
    model_type = "Dream"
"""
# Dream's is Qwen2's of transformers 4, in Python: it reads vocab.json and merges.txt, and knows of
# no tokenizer.json.
TOKENIZATION = """
import json

import tokenizers
from transformers import PreTrainedTokenizer


class DreamTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "vocab.json", "merges_file": "merges.txt"}

    def __init__(self, vocab_file, merges_file, **options):
        self.encoder = json.load(open(vocab_file))
        self.decoder = {i: token for token, i in self.encoder.items()}
        self.bpe = tokenizers.models.BPE.from_file(vocab_file, merges_file)
        self.words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.encoder)

    def get_vocab(self):
        return dict(self.encoder, **self.added_tokens_encoder)

    def _tokenize(self, text):
        return [token.value for word, _ in self.words.pre_tokenize_str(text) for token in self.bpe.tokenize(word)]

    def _convert_token_to_id(self, token):
        return self.encoder.get(token)

    def _convert_id_to_token(self, index):
        return self.decoder.get(index)
"""
LOAD = """
import json, sys
from transformers import AutoConfig, AutoTokenizer
config, tokenizer = (auto.from_pretrained(sys.argv[1], trust_remote_code=True) for auto in (AutoConfig, AutoTokenizer))
chat = tokenizer.apply_chat_template([{"role": "user", "content": "add 1 and 2"}], tokenize=False)
ids = tokenizer("def add(a, b): return a<|im_end|>", add_special_tokens=False)["input_ids"]
print(json.dumps([type(config).__name__, config.mask_token_id, type(tokenizer).__name__, chat, ids]))
"""


def write_hub(folder):
    """A Dream with random weights, in the files that Dream-org and apple publish."""
    folder.mkdir(parents=True)
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    words.train_from_iterator(
        ["def add(a, b):\n    return a + b\n# add numbers, and sort a list of words"] * 3, trainer
    )
    words.model.save(str(folder))  # vocab.json, merges.txt
    ids = {token: words.get_vocab_size() + i for i, token in enumerate(ADDED)}
    names = {
        "mask_id": "<|mask|>",
        "pad_id": "<|endoftext|>",
        "bos_id": "<|endoftext|>",
        "eos_id": "<|endoftext|>",
    }
    sizes = {
        "vocab": 512,
        "width": 32,
        "layers": 2,
        "heads": 8,
        "kv_heads": 4,
        "head_size": 8,
        "ffn": 64,
    }
    cfg = md.DreamConfig(
        **sizes, positions=512, **{name: ids[token] for name, token in names.items()}
    )

    rng, shards = np.random.default_rng(0), 3
    tensors = {
        convert_weights.hf_name(name): (0.2 * rng.standard_normal(leaf.shape)).astype(
            ml_dtypes.bfloat16
        )
        for name, leaf in checkpoints.flatten(md.param_shapes(cfg)).items()
    }
    parts = {
        f"model-{i + 1:05}-of-{shards:05}.safetensors": sorted(tensors)[i::shards]
        for i in range(shards)
    }
    for file, part in parts.items():
        safetensors.numpy.save_file(
            {name: tensors[name] for name in part}, folder / file, {"format": "pt"}
        )
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}}
    index["weight_map"] = {name: file for file, part in parts.items() for name in part}

    decoder = {
        str(i): {"content": token, "special": True, "normalized": False} for token, i in ids.items()
    }
    tokenizer = {
        "tokenizer_class": "DreamTokenizer",
        "chat_template": CHAT,
        "added_tokens_decoder": decoder,
    }
    tokenizer |= {"auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}}
    tokenizer |= {
        "pad_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
    }
    files = {
        "config.json": md.config_to_hf(cfg)
        | {"use_mrope": False, "transformers_version": "4.46.2"},
        "model.safetensors.index.json": index,
        "added_tokens.json": ids,
        "tokenizer_config.json": tokenizer,
        "special_tokens_map.json": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        "generation_config.json": {"mask_token_id": cfg.mask_id, "_from_model_config": True},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "configuration_dream.py").write_text(CONFIGURATION)
    (folder / "tokenization_dream.py").write_text(TOKENIZATION)
    (folder / "modeling_dream.py").write_text("class DreamModel:\n    pass\n")
    return cfg


@pytest.mark.slow
def test_from_the_hub_to_a_fine_tuned_model_that_transformers_loads(tmp_path):
    cfg = write_hub(tmp_path / "DiffuCoder-7B-Instruct")

    def do(command, devices=1):
        script, *flags = command
        result = run(script, *flags, devices=devices, cwd=tmp_path)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        return result

    def generate(*flags, ckpt="out/diffucoder", devices=1):
        common = f"--ckpt={ckpt}", "--max_new=32", "--compile_cache=cache"
        return do(["generate_dream.py", *common, *flags], devices)

    do(
        [
            "convert_weights.py",
            "--source=DiffuCoder-7B-Instruct",
            "--out=out/diffucoder",
            "--verify",
        ]
    )

    # Chat, whose steps are shown; then prompts and a text with holes, in one batch on eight
    # devices.
    shown = generate("--chat=on", "--prompt=Sort a list of words by length.", "--show_steps")
    assert "chat template" in shown.stderr
    assert shown.stdout.count("step ") > 3
    prompts = (
        {"prompt": "def add(a, b):"},
        {"prompt": "def [MASK:4](a, b): return[MASK:4] b"},
        {"prompt": "# sort"},
    )
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    )
    batch = generate("--file=prompts.jsonl", "--json", "--chat=off", "--batch_size=4", devices=8)
    assert "8 x cpu; mesh data 2, fsdp 1, tensor 4" in batch.stderr
    texts = [json.loads(line)["text"] for line in batch.stdout.splitlines()]
    assert [text[:3] for text in texts] == ["def", "def", "# s"]
    assert texts[1].endswith(" b")

    # Blocks with a cache, and weights in 8 and 4 bits.
    fast = "--block_length=32", "--cache=dual", "--threshold=0.9", "--prompt=add"
    for bits, devices in (("--int8", 1), ("--int4", 8)):
        assert f"{bits[2:]} and " in generate(*fast, bits, devices=devices).stderr

    # Fine-tuning on chats: the loss of the answers falls.
    pairs = [
        {"prompt": f"add {a} and {b}", "response": str(a + b)} for a in range(12) for b in range(12)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tokenizer = "--tokenizer=out/diffucoder/tokenizer.json"
    settings = tokenizer, "--out=data/chat", "--heldout=0.2", "--seq_len=64"
    do(["data_prep.py", "pairs", "pairs.jsonl", "--chat", *settings])
    train = (
        "--init=out/diffucoder",
        "--data=data/chat",
        "--lora_rank=16",
        "--out=out/chat",
        "--compile_cache=cache",
    )
    tuned = do(["train_dream.py", *train, "--epochs=3", "--batch_size=4", "--lr=0.02"])
    assert "LoRA rank 16" in tuned.stdout
    assert "--ckpt=out/chat/merged" in tuned.stdout.splitlines()[-1]

    def nats(ckpt):
        said = do(
            ["train_dream.py", f"--eval_only={ckpt}", "--data=data/chat", "--compile_cache=cache"]
        ).stdout
        return float(said.split("heldout_nats ")[1].split()[0])

    assert nats("out/chat/merged") < nats("out/diffucoder") - 0.1
    assert "chat template" in generate("--prompt=add 1 and 2", ckpt="out/chat/merged").stderr

    # And back: what transformers loads is what we read.
    do(["convert_weights.py", "--source=out/chat/merged", "--out=out/back", "--verify"])
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    load = [sys.executable, "-c", LOAD, str(tmp_path / "out/back")]
    done = subprocess.run(load, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    config, mask_id, tokenizer, chat, ids = json.loads(done.stdout.splitlines()[-1])
    assert (config, mask_id, tokenizer) == ("DreamConfig", cfg.mask_id, "DreamTokenizer")
    assert chat == "<|im_start|>user\nadd 1 and 2<|im_end|>\n"
    ours = runs.read_tokenizer(tmp_path / "out/back")
    assert ids == ours.encode("def add(a, b): return a<|im_end|>", add_special_tokens=False).ids


@pytest.mark.slow
def test_from_a_qwen2_to_a_model_of_blocks_and_back(tmp_path):
    folder = tmp_path / "Qwen2.5-Coder-0.5B"
    cfg = write_hub(folder)

    # A Qwen2 of the Hub: no MASK, no code, no padding id.
    def change(name, drop, **new):
        content = {
            key: value
            for key, value in json.loads((folder / name).read_text()).items()
            if key not in drop
        }
        (folder / name).write_text(json.dumps(content | new))

    change("config.json", ("mask_token_id", "pad_token_id", "auto_map"), model_type="qwen2")
    change("added_tokens.json", ("<|mask|>", "<|beginoftext|>", "<|dlm_pad|>"))
    change(
        "tokenizer_config.json",
        ("auto_map", "mask_token", "added_tokens_decoder"),
        tokenizer_class="Qwen2Tokenizer",
    )
    for path in folder.glob("*.py"):
        path.unlink()
    (tmp_path / "src").mkdir()
    for i in range(12):
        text = "".join(
            f"def add_{i}_{k}(a, b):\n    return a + {k} * b - {i}\n\n\n" for k in range(20)
        )
        (tmp_path / "src" / f"{i}.py").write_text(text)

    def do(script, *flags):
        result = run(script, *flags, cwd=tmp_path)
        assert result.returncode == 0, f"{script} {flags}\n{result.stderr}"
        return result.stdout + result.stderr

    assert "MASK is" in do(
        "convert_weights.py", f"--source={folder}", "--to=dream", "--out=out/start"
    )
    rows = "--tokenizer=out/start/tokenizer.json", "--seq_len=64", "--heldout=0.2", "--benchmarks"
    do("data_prep.py", "python", "--roots", "src", "--out=data/qwen", *rows)
    train = (
        "--init=out/start",
        "--data=data/qwen",
        "--block_length=4",
        "--block_warmup=10",
        "--compile_cache=cache",
    )
    said = do(
        "train_dream.py", *train, "--out=out/blocks", "--steps=60", "--batch_size=4", "--lr=0.01"
    )
    losses = [float(line.split()[3]) for line in said.splitlines() if line.startswith("step 10/")]
    scores = [
        json.loads(line) for line in (tmp_path / "out/blocks/log.jsonl").read_text().splitlines()
    ]
    held = [row["heldout_nats"] for row in scores if "heldout_nats" in row]
    assert held[-1] < losses[0] - 1  # nats per token
    write = (
        "--max_new=12",
        "--threshold=0.9",
        "--prompt=def add",
        "--compile_cache=cache",
        "--json",
    )
    assert re.search('"completion": "[^"]', do("generate_dream.py", "--ckpt=out/blocks", *write))
    do("convert_weights.py", "--source=out/blocks", "--out=out/hub", "--verify")
    keys = json.loads((tmp_path / "out/hub/config.json").read_text())
    assert (keys["bd_size"], keys["vocab_size"]) == (4, cfg.vocab)
    do("convert_weights.py", "--source=out/hub", "--out=out/again")
    assert re.search('"completion": "[^"]', do("generate_dream.py", "--ckpt=out/again", *write))
