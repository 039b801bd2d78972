"""Coupled-GRPO: reinforcement learning of a Dream model on code rewards, in JAX, on TPUs, GPUs or a
CPU.

    python coupled_grpo.py                                        # weights/dream learns TinyPython; minutes on a CPU
    python coupled_grpo.py --resume=out/grpo                      # goes on where the run stopped
    python rl_tasks.py --difficulty=hard --tokenizer=out/diffucoder/tokenizer.json --out=data/acecode
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode --out=out/7b    # on eight TPUs
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode --lora_rank=16 --out=out/7b_lora

Reads a Dream (a folder of convert_weights.py, or a run of train_dream.py) and tasks (JSON lines,
see rl_tasks.py). Without --ckpt weights/dream learns the tasks beside it, and is evaluated on
`composed`, combinations of operations of which no training function is made, and on `phrased`,
docstrings of other phrasings. Writes --out: config.json, log.jsonl, rounds.jsonl (each
completion with its rewards), checkpoints/<round>/, the tokenizer; with LoRA at the end also the
adapters in peft's form, and merged/, a whole model. Several hosts train all weights, one also LoRA.

A round: --group completions of each of --tasks tasks, their rewards (sandbox.py), and --iterations
updates, each over all of them under fresh masks (see grpo.py). Everything random is a function of
(seed, round, place in a batch of the rollout): a run that was killed, and resumed on as many
devices, equals one that was not.

A rollout fills the positions whose most probable token reaches --threshold, whichever token is
drawn. Choosing by the drawn token's probability, as Fast-dLLM does, sharpens the policy: at a low
temperature all completions of a group become the same, and nothing is learnt (bench/LOG.md). A
Dream trained in blocks generates with its exact cache and is scored block by block, at twice the
cost; in as many passes it learns less.

--preset=7b has the settings of DiffuCoder's code, with these differences. There completions take
256 forward passes (--threshold=0 --block_length=0), most of the compute; ours use cached blocks and
a threshold. It cuts long prompts, we drop them. It computes the KL divergence of groups of equal
rewards, we drop such groups from the update. It rewards text after <|im_end|>, and counts a failed
sandbox as a wrong answer. Its masks repeat after about a hundred draws.

Letters: B sequences, L columns of a canvas, C of them its completion, R rows of a micro-batch, F
reward functions.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import checkpoints
import grpo
import model_dream as md
import runs
import sample_block
import sample_dream
import sandbox
from runs import Count, Natural, NonNegative, Positive, Share, TopP


@dataclasses.dataclass(frozen=True)
class Config:
    preset: typing.Literal["demo", "7b"] = "demo"  # sets the flags whose default is None
    ckpt: str = ""  # folder of the model to train; "" is weights/dream, with tasks of TinyPython
    prompts: str = ""  # tasks to train on: a folder of rl_tasks.py, or a JSONL file
    # JSONL files to evaluate on; default: heldout.jsonl, humaneval.jsonl in --prompts
    heldout: tuple[str, ...] = ()
    out: str = "out/grpo"  # folder of the run
    resume: str = ""  # folder of a run to continue, with its settings; "" starts anew
    rounds: Natural | None = None  # rounds of the whole run; 0: one epoch
    tasks: Count | None = None  # tasks per round
    # completions per task (the group of GRPO)
    group: typing.Annotated[int, (2, 1_000_000)] | None = None
    iterations: Count | None = None  # updates per round
    # completions per backward pass, on all devices together; 0: 5 on each, in the demo 64
    micro_batch: Natural = 0
    # completions generated at a time, on all devices; 0: 10 on each, in the demo 128
    generation_batch: Natural = 0
    max_prompt: Count | None = None  # tokens of a prompt; tasks with longer ones are left out
    max_new: Count | None = None  # tokens of a completion
    temperature: Positive = 1.0  # of the distribution that tokens are drawn from
    # draw from the most probable tokens that together have this probability
    top_p: TopP | None = None
    # generate in blocks, with cached keys and values; 0: whole canvas, no cache
    block_length: Natural | None = None
    # fill all positions whose maximum probability reaches this; 0: one per forward pass
    threshold: Share = 0.9
    # peak learning rate, then a cosine to a tenth of it; 7b: 1e-6, with LoRA 2e-5, a guess
    lr: Positive | None = None
    # weight of the KL divergence from the reference model; 0: no reference model
    beta: NonNegative = 0.01
    epsilon: Share = 0.5  # the ratio of new to old probability is clipped below 1 - epsilon
    # the ratio of new to old probability is clipped above 1 + epsilon_high
    epsilon_high: NonNegative = 0.5
    # updates between moves of the reference model towards the policy; 0: it stays
    sync_every: Natural = 64
    rewards: tuple[str, ...] | None = None  # names in sandbox.py, or your own as file.py:function
    # weight of each of --rewards
    reward_weights: typing.Annotated[tuple[float, ...], (-1e9, 1e9)] | None = None
    # train adapters of this rank beside the layers' matrices; 0 trains all weights
    lora_rank: Natural = 0
    # with --lora_rank: bits of the frozen matrices; 0: those of the computation
    base_bits: typing.Literal[0, 8, 4] = 0
    # with --lora_rank: folder of adapters to start from, in peft's form; "" makes new ones
    init_adapters: str = ""
    # rounds between evaluations on held-out tasks, each saves a checkpoint
    eval_every: Count | None = None
    eval_tasks: Count = 96  # held-out tasks at most, of each file
    # where programs run: this machine, or E2B's cloud
    runner: typing.Literal["local", "e2b"] = "local"
    # host:port of an Open-R1 router that holds the E2B key; with --runner=e2b
    e2b_router_url: str = ""
    allow_unsafe: bool = False  # run programs even where the machine offers no safe sandbox
    wandb: str = ""  # project name; "" logs to files alone
    # "" one host; "auto" on TPU pods, SLURM, MPI; or ADDRESS:PORT,COUNT,INDEX of this process
    hosts: str = ""
    seed: Natural = 0  # of tasks, completions and masks


PRESETS = {
    "demo": {
        "rounds": 10, "tasks": 8, "group": 8, "iterations": 2, "max_prompt": 96, "max_new": 64, "top_p": 1.0,
        "block_length": 0, "lr": 3e-5, "rewards": ("code",), "reward_weights": (1.0,), "eval_every": 5,
    },
    "7b": {
        "rounds": 0, "tasks": 8, "group": 10, "iterations": 2, "max_prompt": 200, "max_new": 256, "top_p": 0.95,
        "block_length": 32, "lr": 1e-6, "rewards": ("code", "code_format"), "reward_weights": (2.0, 0.5),
        "eval_every": 50,
    },
}  # fmt: skip
ON_A_DEVICE = {
    "demo": {"micro_batch": 64, "generation_batch": 128},
    "7b": {"micro_batch": 5, "generation_batch": 10},
}
# AdamW's weight decay, and the norm at which gradients are clipped
OPTIMIZER = {"demo": (0.0, 1.0), "7b": (0.1, 0.2)}
MIXUP = 0.6  # how far the reference model moves towards the policy; with LoRA 1
EVAL_SAMPLES = 2  # completions of each held-out task
DEMO = Path(__file__).parent / "weights/dream"  # a model with tasks of its own

# Settings that may differ between hosts: where things are, and the sandbox, which host 0 alone
# needs.
OF_A_HOST = "ckpt prompts heldout out resume wandb hosts runner e2b_router_url allow_unsafe".split()


# ---- tasks as canvases ---------------------------------------------------------------------------------------------

SYSTEM = "You are a helpful assistant."


def question_of(task):
    """The user's turn of a chat: the question, with its first test, if it has one, unless it holds
    a code block.
    """
    if "\n```\n" in task["question"] or not task["test_cases"]:
        return task["question"]
    return f"{task['question']}\nTest cases: {task['test_cases'][0]}"


def read_tasks(path, tested=True):
    """The tasks of a JSONL file. ValueError names a line that is no task, or has no tests although
    `tested`.
    """
    tasks = []
    for number, line in enumerate(runs.as_path(path).read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            task = {"test_cases": []} | json.loads(line)
            "".join(
                [task["question"] if "question" in task else task["prompt"]] + task["test_cases"]
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            form = '{"question" or "prompt": text, "test_cases": [texts]}'
            raise ValueError(f"{path}, line {number} is no task: {form}") from None
        if tested and not task["test_cases"]:
            raise ValueError(
                f"{path}, line {number} has no tests; only --rewards=file.py:function can do without"
            )
        tasks.append(task)
    return tasks


class Prompts:
    """Tasks as canvases: left-padded token ids of the prompts, max_new columns of MASK after them.

    wrap(user turn, system turn) writes a chat, as prompts.chat_template gives it; tasks with a
    question need it.
    """

    def __init__(self, path, tokenizer, wrap, model_cfg, max_prompt, max_new, tested=True):
        self.path, self.tokenizer, self.model_cfg = path, tokenizer, model_cfg
        self.max_prompt, self.max_new = max_prompt, max_new
        self.tasks, self.ids, self.dropped = [], [], 0  # dropped: tasks whose prompt is too long
        for task in read_tasks(path, tested):
            chat = "question" in task
            if chat and not wrap:
                raise ValueError(
                    f"{path} asks questions, and the model has no chat template (tokenizer_config.json)"
                )
            text = wrap(question_of(task), SYSTEM) if chat else task["prompt"]
            # in a program, the name of a special token is plain text
            tokenizer.encode_special_tokens = not chat
            ids = tokenizer.encode(text, add_special_tokens=False).ids or [model_cfg.bos_id]
            if len(ids) > max_prompt:
                self.dropped += 1
                continue
            self.tasks.append(task)
            self.ids.append(ids)
        if not self.tasks:
            raise ValueError(
                f"{path} has no task within --max_prompt={max_prompt} tokens; {self.dropped} are longer"
            )

    def canvas(self, task_B):
        """(token_BL, see_BL) of the tasks with these numbers; see_BL is False at padding."""
        prompts = [self.ids[i] for i in task_B]
        return sample_dream.canvas(
            prompts, self.max_new, self.model_cfg, self.max_prompt + self.max_new
        )

    def completions(self, task_B, token_BL, counted_BC):
        """Rows for the reward functions, of filled canvases and their completion masks.

        A row is the task with "written", the completion, "tokens", its length, and "text", which is
        rewarded: for a "prompt" the whole program in a code block, the form in which a chat model
        answers. An answer that ends its turn has a newline after it, as in the chat template: the
        reference's code_format asks for one.
        """
        import prompts

        rows, turn_end = [], prompts.turn_end(self.tokenizer)
        for i, ids, counted_C in zip(
            task_B, token_BL[:, self.max_prompt :], counted_BC, strict=True
        ):
            task = self.tasks[i]
            written = self.tokenizer.decode(ids[counted_C].tolist(), skip_special_tokens=True)
            text = written
            if "question" not in task:
                text = f"```python\n{task['prompt']}{written.rstrip()}\n```\n"
            elif (
                ids[counted_C][-1] == turn_end
            ):  # the template's newline was cut off with what follows the turn
                text = written.removesuffix("\n") + "\n"
            rows.append(task | {"tokens": int(counted_C.sum()), "written": written, "text": text})
        return rows


def sandbox_options(cfg):
    """Options of sandbox.run_tests and of the reward functions."""
    return {
        "runner": cfg.runner,
        "e2b_router_url": cfg.e2b_router_url,
        "allow_unsafe": cfg.allow_unsafe,
    }


# ---- the model and its programs ------------------------------------------------------------------------------------


def graphs_of(model_cfg, dtype, on_cpu=False, **how):
    """(graph for training, graph for rollouts): the model without parameters. Training
    rematerialises, not on a CPU.
    """
    run = md.Compute(dtype, 64 if on_cpu else 256, remat="none" if on_cpu else "full", **how)
    return md.graph_of(model_cfg, run), md.graph_of(
        model_cfg, dataclasses.replace(run, remat="none")
    )


def check_memory(cfg, model_cfg, mesh, rollout_mesh, dtype):
    """ValueError, before any weight is read, if a device has less memory than training takes."""
    optimizer = grpo.make_optimizer(cfg.lr)

    def needed(lora_rank, bits):
        """What is trained, with LoRA the base, moments, reference model; and gradients, or the
        weights of rollouts.
        """
        shapes = checkpoints.state_shapes(md, model_cfg, optimizer, mesh, dtype, lora_rank, bits)
        trained, copy = checkpoints.bytes_on_a_device(shapes["params"]), 0
        if rollout_mesh.size > 1:
            base = checkpoints.state_shapes(md, model_cfg, optimizer, rollout_mesh, dtype, 1, bits)[
                "base"
            ]
            copy = checkpoints.bytes_on_a_device(base)
        return (
            checkpoints.bytes_on_a_device(shapes)
            + (trained if cfg.beta else 0)
            + max(trained, copy)
        )

    smaller = {flags: needed(*form) for flags, form in checkpoints.smaller_forms(cfg).items()}
    checkpoints.check_memory(mesh, needed(cfg.lora_rank, cfg.base_bits), smaller)


def rule_of(cfg, vocab, ends):
    """How rollouts are generated, for sample_dream; the first of `ends` fills the rest of a text
    that has ended.
    """
    # Positions are chosen by the maximum of the distribution after top-p, never by the token that
    # is drawn.
    order = {"threshold": cfg.threshold, "score": "distribution", "filtered": True}
    draws = {"temperature": cfg.temperature, "top_p": cfg.top_p, "vocab": vocab, "eos_ids": ends}
    cache = "dual" if cfg.block_length else ""
    return sample_dream.Sampling(block_length=cfg.block_length, cache=cache, **order, **draws)


# ---- the steps of a round ------------------------------------------------------------------------------------------


class Batch(typing.NamedTuple):
    """The completions of a round."""

    token_BL: np.ndarray  # filled canvases
    see_BL: np.ndarray  # False at padding
    counted_BC: np.ndarray  # completion mask: True up to and including the first end token
    rows: list  # the tasks, with "text", "written", "tokens" and, once rewarded, "verdicts"
    passes: float  # forward passes over a canvas that generation took, on average


def micro_batches(row_R, size, devices=1):
    """The rows in the fewest, nearly equal batches of at most `size`; -1 pads each to a multiple of
    `devices`.
    """
    width = math.ceil(size / devices) * devices
    batches = np.array_split(row_R, math.ceil(len(row_R) / size))
    return [np.pad(batch, (0, width - len(batch)), constant_values=-1) for batch in batches]


class Trainer:
    """A Dream in training: weights, reference model, optimizer state, tasks, and the compiled
    programs.
    """

    def __init__(self, cfg, rewards, mesh, scores_of=grpo.coupled_scores):
        import prompts

        self.rewards, self.mesh, on_cpu = rewards, mesh, jax.default_backend() == "cpu"
        # of the computation and a frozen base
        self.dtype = dtype = jnp.dtype("float32" if on_cpu else "bfloat16")
        self.model_cfg = model_cfg = md.read_config(cfg.ckpt)
        # Weights spread over all devices would be gathered in every forward pass of a rollout: it
        # has a copy of them.
        shape = checkpoints.inference_mesh(model_cfg, jax.devices(), 0).devices.shape
        self.rollout_mesh = checkpoints.mesh_of(jax.devices(), shape)
        copied = {"mesh": self.rollout_mesh, "dtype": None if cfg.lora_rank else dtype}
        self.rollout_weights = jax.jit(functools.partial(grpo.rollout_weights, **copied))
        check_memory(cfg, model_cfg, mesh, self.rollout_mesh, dtype)

        # The tasks, and how completions of them are generated. A chat model ends its turn as its
        # template does.
        tokenizer, wrap = (
            sample_dream.load_tokenizer(cfg.ckpt, model_cfg),
            prompts.chat_template(runs.as_path(cfg.ckpt)),
        )
        given = (
            tokenizer,
            wrap,
            model_cfg,
            cfg.max_prompt,
            cfg.max_new,
            sandbox.TESTED & {*rewards.values()},
        )
        self.prompts = Prompts(cfg.prompts, *given)
        self.heldout = [Prompts(path, *given) for path in cfg.heldout]
        chat = any(
            "question" in task for split in (self.prompts, *self.heldout) for task in split.tasks
        )
        turn_end = prompts.turn_end(tokenizer) if chat else None
        ends = dict.fromkeys([turn_end, model_cfg.eos_id, tokenizer.token_to_id("<|dlm_pad|>")])
        ends = tuple(token for token in ends if token is not None)
        self.rule, self.fill = rule_of(cfg, tokenizer.get_vocab_size(), ends), sample_dream.fill
        if model_cfg.block_length:  # its own cache is exact
            self.rule = sample_block.settings_of(dataclasses.replace(self.rule, cache=""))
            self.fill = sample_block.fill
        rounds = cfg.rounds or max(1, len(self.prompts.tasks) // cfg.tasks)
        self.cfg = cfg = dataclasses.replace(cfg, rounds=rounds)

        # All weights are trained, or with LoRA adapters beside a frozen base.
        kind = {"dtype": dtype if cfg.lora_rank else jnp.float32, "bits": cfg.base_bits}
        model, _ = checkpoints.load(md, cfg.ckpt, **kind, mesh=mesh)
        self.base, self.trained = {}, nnx.to_pure_dict(nnx.state(model))
        del model  # it would keep the first weights in memory
        if cfg.lora_rank:
            key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 20)
            self.base, adapters = (
                self.trained,
                md.new_adapters(key, md.param_shapes(model_cfg), cfg.lora_rank),
            )
            adapters = (
                sample_dream.load_adapters(cfg.init_adapters, adapters)
                if cfg.init_adapters
                else adapters
            )
            self.trained = jax.device_put(adapters, md.shardings(mesh, adapters))
        self.ref = jax.tree.map(jnp.copy, self.trained) if cfg.beta else {}  # the reference model's
        self.updates, self.failed = 0, 0  # so far; how many of the last ones had no finite gradient

        # The programs of an update.
        graph, self.rollout_graph = graphs_of(model_cfg, dtype, on_cpu)
        rate = grpo.learning_rate(cfg.lr, cfg.rounds * cfg.iterations)
        optimizer = grpo.make_optimizer(rate, *OPTIMIZER[cfg.preset])
        state = self.trained, jax.eval_shape(optimizer.init, self.trained)
        layouts = tuple(md.shardings(mesh, tree) for tree in state)
        form = grpo.Loss(cfg.beta, cfg.epsilon, cfg.epsilon_high)
        programs = grpo.make_programs(graph, optimizer, model_cfg.mask_id, form, layouts, scores_of)
        self.scores, self.gradients, self.update = programs
        self.opt = jax.jit(optimizer.init, out_shardings=layouts[1])(self.trained)

    def arrays(self):
        """What a checkpoint holds."""
        return {
            "adapters" if self.base else "params": self.trained,
            "ref": self.ref,
            "opt": self.opt,
        }

    def restore(self, store, meta):
        """Go on from the newest checkpoint, and return its round; 0 without one. ValueError if it
        has other arrays.
        """
        if store.newest() is None:
            return 0
        saved, where = store.meta(), f"{store.folder}/checkpoints/{store.newest()}"
        runs.check_resumed(saved, meta, where, ("lora_rank",), "round")
        before, now = (each["train"]["beta"] for each in (saved, meta))
        if (before > 0) != (now > 0):
            raise ValueError(
                f"{where}: --beta {before} there, {now} here: keep it 0 (no reference model), or above 0"
            )
        if saved.get("base") != meta.get("base"):
            raise ValueError(
                f"{self.cfg.ckpt} holds other weights than {store.folder} began with; pass its own --ckpt"
            )
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.arrays()
        )
        # no memory for both
        names, self.trained, self.ref, self.opt = [*self.arrays()], None, None, None
        arrays = store.restore(like)
        self.trained, self.ref, self.opt = map(arrays.get, names)
        self.updates = saved["updates"]
        print(f"resuming {store.folder} after round {saved['round']}", flush=True)
        return saved["round"]

    def policy(self):
        """The model as it is, for generation; on several devices a copy, laid out as in
        generate.py.
        """
        params = md.assemble(self.base, self.trained)
        params = self.rollout_weights(params) if self.rollout_mesh.size > 1 else params
        return nnx.merge(self.rollout_graph, params)

    def rollout(self, prompts, task_B, key):
        """Completions of the tasks with these numbers, by the policy as it is: a Batch."""
        # which is on no device
        policy, key_data = self.policy(), np.asarray(jax.random.key_data(key))
        canvas_BL, see_BL = prompts.canvas(task_B)
        devices, filled, passes = self.rollout_mesh.shape["data"], [], []
        size = math.ceil(self.cfg.generation_batch / devices) * devices  # as many rows on each
        for i in range(0, len(task_B), size):
            # All batches have one shape, for one compiled program: the last repeats rows.
            inputs = [np.resize(x[i : i + size], (size, x.shape[1])) for x in (canvas_BL, see_BL)]
            with jax.set_mesh(self.rollout_mesh):
                batch_key = jax.random.fold_in(jax.random.wrap_key_data(key_data), i)
                token_BL, stats = self.fill(policy, *inputs, self.rule, batch_key)
            filled.append(token_BL[: len(task_B) - i])
            passes.append(sum(stats["windows"]) / canvas_BL.shape[1])
        token_BL = np.concatenate(filled)
        counted_BC = grpo.completion_mask(
            np.isin(token_BL[:, -self.cfg.max_new :], self.rule.eos_ids), True
        )
        rows = prompts.completions(task_B, token_BL, counted_BC)
        return Batch(token_BL, see_BL, counted_BC, rows, np.mean(passes))

    def to_devices(self, batch, row_R, scored):
        """These rows of a batch and of the arrays `scored`, on the devices; of row -1 no token
        counts.
        """
        arrays = {
            "token_BL": batch.token_BL,
            "see_BL": batch.see_BL,
            "counted_BC": batch.counted_BC,
        } | scored
        arrays = {name: x[row_R] for name, x in arrays.items()}
        arrays["counted_BC"] &= (row_R >= 0)[:, None]
        return jax.device_put(arrays, jax.NamedSharding(self.mesh, md.PS(md.BATCH)))

    def score(self, batch, masks):
        """Of each iteration its masks, and under them the scores of the policy as it is and of the
        reference model.
        """
        scored = []
        for i, mask in enumerate(jax.device_get(masks)):
            # before the first update the new score is the old one, see grpo.micro_loss
            models = ({"old_BC": self.trained} if i else {}) | (
                {"ref_BC": self.ref} if self.cfg.beta else {}
            )
            scores = {
                name: np.zeros(batch.counted_BC.shape, np.float32) for name in ("old_BC", "ref_BC")
            }
            for row_R in micro_batches(
                np.arange(len(batch.rows)), self.cfg.micro_batch, self.mesh.size
            ):
                inputs = self.to_devices(batch, row_R, mask)
                for name, trained in models.items():
                    score_RC = np.asarray(self.scores(trained, self.base, inputs))
                    scores[name][row_R[row_R >= 0]] = score_RC[row_R >= 0]
            scored.append(mask | scores)
        return scored

    def learn(self, batch, scored, advantages):
        """The updates of a round: their metrics, {} if there is nothing to learn from."""
        cfg, measured, norms, figures = self.cfg, [], [], {}
        # no unknown reward, no group of equal rewards
        kept_B = advantages.counted_B & ~advantages.constant_B
        if not kept_B.any():
            return {}
        batches = micro_batches(np.flatnonzero(kept_B), cfg.micro_batch, self.mesh.size)
        advantage_B = advantages.advantage_B.astype(np.float32)
        # An update goes through all micro-batches under masks of its own. The reference takes those
        # of (step + 1) mod
        # iterations: with two micro-batches and two iterations it shows a micro-batch the same
        # masks twice.
        for i in range(cfg.iterations):
            total = jax.tree.map(jnp.zeros_like, self.trained)
            for row_R in batches:
                inputs = self.to_devices(batch, row_R, scored[i] | {"advantage_B": advantage_B})
                inputs["first"] = jnp.asarray(i == 0)
                total, metrics = self.gradients(self.trained, self.base, total, inputs)
                measured.append(metrics)
            self.trained, self.opt, norm = self.update(self.trained, self.opt, total, len(batches))
            total = None  # its memory is free before the next update begins
            norms.append(float(norm))
            self.updates += 1
            self.failed = 0 if math.isfinite(norms[-1]) else self.failed + 1
            if self.failed == 5:
                raise RuntimeError(
                    f"no finite gradient in five updates; lower --lr, then --resume={cfg.out}"
                )
            if cfg.beta and cfg.sync_every and self.updates % cfg.sync_every == 0:
                self.ref = grpo.sync_reference(
                    self.ref, self.trained, 1.0 if cfg.lora_rank else MIXUP
                )
        combine = {"ratio_max": max, "tokens": sum}  # the mean of other metrics
        for name in measured[0]:
            figures[name] = float(
                combine.get(name, np.mean)([float(metrics[name]) for metrics in measured])
            )
        # NaN if one of them is: max() may pass over it
        return figures | {"grad_norm": float(np.max(norms))}

    def evaluate(self):
        """Mean of the first reward, and the share of completions where it is 1, of each "split" of
        held-out tasks.
        """
        cfg, figures = self.cfg, {}
        key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 21)  # the same at each evaluation
        for prompts in self.heldout:
            task_B = np.repeat(np.arange(min(cfg.eval_tasks, len(prompts.tasks))), EVAL_SAMPLES)
            rows = self.rollout(prompts, task_B, key).rows
            first = dict([*self.rewards.items()][:1])
            rewards = functools.partial(sandbox.score, rows, first, **sandbox_options(cfg))
            reward_B = grpo.by_host_0(rewards, (len(rows), 1))[:, 0]
            split_B = np.array([row.get("split", Path(prompts.path).stem) for row in rows])
            for split in dict.fromkeys(split_B.tolist()):
                # the sandbox may have failed
                known_B = reward_B[(split_B == split) & ~np.isnan(reward_B)]
                if len(known_B):
                    figures[f"{split}_reward"] = float(known_B.mean())
                    figures[f"{split}_pass"] = float((known_B == 1).mean())
        return figures


# ---- what is logged ------------------------------------------------------------------------------------------------


def summary(cfg, batch, reward_BF, advantages, eos_ids):
    """Rewards and completions of a round as numbers for the log."""
    counted_B, counted_BC = advantages.counted_B, batch.counted_BC
    row = {"reward": float(advantages.reward_B[counted_B].mean()) if counted_B.any() else math.nan}
    for name, reward_B in zip(cfg.rewards, reward_BF.T, strict=True):
        known_B = reward_B[~np.isnan(reward_B)]
        if len(known_B):
            row |= {f"{name}_mean": float(known_B.mean()), f"{name}_std": float(known_B.std())}
    token_BC = batch.token_BL[:, -cfg.max_new :]
    # completions that repeat another of their group: a sign of a policy that collapses
    groups = np.where(counted_BC, token_BC, -1).reshape(-1, cfg.group, cfg.max_new)
    different = sum(len(np.unique(group_NC, axis=0)) for group_NC in groups)
    return row | {
        "constant_groups": float(advantages.constant_B.mean()),
        "no_reward": int((~counted_B).sum()),
        # known to host 0
        "timeouts": sum(task.get("verdicts", []).count("timeout") for task in batch.rows),
        "ended": float(np.isin(token_BC, eos_ids).any(-1).mean()),
        "length": float(counted_BC.sum(-1).mean()),
        "duplicates": 1 - different / len(token_BC),
        "passes": float(batch.passes),
    }


def completion_lines(done, cfg, batch, reward_BF, advantages):
    """The lines of rounds.jsonl: each completion with its rewards; null where a reward is not
    known.
    """
    lines = ""
    for i, task in enumerate(batch.rows):
        row = {
            "round": done,
            "id": task.get("id"),
            "prompt": task.get("prompt", task.get("question")),
        }
        row |= {
            "completion": task["written"],
            "tokens": task["tokens"],
            "verdicts": task["verdicts"],
        }
        values = [None if math.isnan(x) else x for x in reward_BF[i].tolist()]
        row["rewards"] = dict(zip(cfg.rewards, values, strict=True))
        for name, value_B in (
            ("reward", advantages.reward_B),
            ("advantage", advantages.advantage_B),
        ):
            row[name] = float(value_B[i]) if advantages.counted_B[i] else None
        lines += json.dumps(row) + "\n"
    return lines


# ---- the run -------------------------------------------------------------------------------------------------------


def main(cfg, draw=grpo.draw_masks, scores_of=grpo.coupled_scores):
    """Train, or go on training. bench/grpo_run.py replaces draw and scores_of, to compare
    estimators.
    """
    cfg, started = resolve(cfg), time.perf_counter()
    checkpoints.join_hosts(cfg.hosts)
    hosts = {"rank": jax.process_index(), "hosts": jax.process_count()} if cfg.hosts else {}
    with runs.Folder(cfg, unit="round", **hosts) as run:
        settings = dataclasses.asdict(cfg)  # without the demo's tasks, which --resume finds again
        same = {name: value for name, value in settings.items() if name not in OF_A_HOST}
        if cfg.hosts:  # before they wait for one another
            checkpoints.check_hosts(run.out, same)
        rewards = {name: sandbox.find_reward(name) for name in cfg.rewards}
        if sandbox.TESTED & {*rewards.values()}:
            check = functools.partial(sandbox.check, **sandbox_options(cfg))
            grpo.by_host_0(check, ())  # before anything is trained or read
        if not cfg.ckpt:
            heldout = cfg.heldout or (str(DEMO / "composed.jsonl"), str(DEMO / "phrased.jsonl"))
            demo = {"ckpt": str(DEMO), "prompts": str(DEMO / "tasks.jsonl"), "heldout": heldout}
            cfg = dataclasses.replace(cfg, **demo)

        # From here on this process holds the devices, which share weights and rows.
        if idle := checkpoints.idle_accelerator():
            raise ValueError(f"{idle}; or train on the CPU with JAX_PLATFORMS=cpu")
        checkpoints.keep_compiled(os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/unmask"))
        mesh = checkpoints.mesh_of(jax.devices(), (1, -1, 1))
        trainer = Trainer(
            dataclasses.replace(cfg, **batch_sizes(cfg, mesh.size)), rewards, mesh, scores_of
        )
        model, tasks = (
            dataclasses.asdict(trainer.model_cfg),
            [each.ids for each in (trainer.prompts, *trainer.heldout)],
        )
        checkpoints.check_hosts(run.out, {"model": model, "tasks": tasks})
        if not run.rank:
            trained, frozen = (
                sum(x.size for x in jax.tree.leaves(tree))
                for tree in (trainer.trained, trainer.base)
            )
            print(
                f"{mesh.size} x {jax.devices()[0].device_kind}; {trained:,} parameters trained, {frozen:,} frozen"
            )
            for prompts in (trainer.prompts, *trainer.heldout):
                dropped = f"{prompts.dropped:,} left out, longer than --max_prompt={cfg.max_prompt}"
                print(f"{prompts.path}: {len(prompts.tasks):,} tasks, {dropped}", flush=True)

        # A checkpoint names its source, by which generate.py knows a chat model; tokenizer and
        # template lie beside it.
        source = runs.read_json(runs.as_path(cfg.ckpt) / "config.json").get("source", "")
        meta = {"model": model, "train": {"model": "dream"} | settings, "source": source}
        if cfg.lora_rank:  # adapters fit the weights beside which they were trained, and no others
            _, base, base_step = checkpoints.find_weights(runs.as_path(cfg.ckpt))
            meta["base"] = base["sums"]
        store, files = checkpoints.Checkpoints(run.out), checkpoints.companions(cfg.ckpt)
        first = trainer.restore(store, meta) if cfg.resume else 0
        run.begin(first, meta, files)
        with jax.set_mesh(mesh):
            train(run, store, meta, trainer, first, draw)
        store.close()
        folder = run.out
        if cfg.lora_rank:
            sample_dream.save_adapters(
                run.out, trainer.trained, cfg.lora_rank, source, trainer.model_cfg.family
            )
            folder, paths = run.out / "merged", [run.out / name for name in files]
            # memory for the whole model
            given, trainer.base = (cfg.ckpt, base_step, trainer.dtype), None
            checkpoints.save_merged(
                md, trainer.model_cfg, folder, *given, trainer.trained, paths, source
            )
    print(
        f"done in {(time.perf_counter() - started) / 60:.1f} min; python generate_dream.py --ckpt={folder}"
    )


def train(run, store, meta, trainer, first, draw):
    """The rounds after `first`."""
    cfg, count, pool = (
        trainer.cfg,
        len(trainer.prompts.tasks),
        concurrent.futures.ThreadPoolExecutor(1),
    )
    if trainer.heldout and not first:
        run.log({"round": 0} | trainer.evaluate())
    for r in range(first, cfg.rounds):
        done, key = r + 1, jax.random.fold_in(jax.random.key(cfg.seed), r)
        clock = [time.perf_counter()]

        # A group of completions of each task, by the policy as it is. Each task comes once per
        # epoch, in random order.
        slots = range(r * cfg.tasks, done * cfg.tasks)
        tasks = [
            np.random.default_rng([cfg.seed, i // count]).permutation(count)[i % count]
            for i in slots
        ]
        batch = trainer.rollout(trainer.prompts, np.repeat(tasks, cfg.group), key)
        clock.append(time.perf_counter())

        # The sandbox runs them on the CPU while the devices score them: under the masks of the
        # updates, so that new and old scores differ by what was learnt and nothing else.
        scoring = functools.partial(
            sandbox.score, batch.rows, trainer.rewards, **sandbox_options(cfg)
        )
        rewards = None if run.rank else pool.submit(scoring).result
        mask_key, (B, C) = jax.random.fold_in(key, 1), batch.counted_BC.shape
        scored = trainer.score(
            batch, [draw(mask_key, i, B, C, cfg.group) for i in range(cfg.iterations)]
        )
        clock.append(time.perf_counter())
        reward_BF = grpo.by_host_0(rewards, (B, len(trainer.rewards)))
        clock.append(time.perf_counter())

        # A completion that does better than the others of its task becomes likelier, one that does
        # worse less likely.
        advantages = grpo.group_advantages(reward_BF, cfg.reward_weights, cfg.group)
        try:
            metrics = trainer.learn(batch, scored, advantages)
        except RuntimeError:
            store.close()  # with a checkpoint that is being written
            raise
        clock.append(time.perf_counter())

        # log.jsonl has a row per round, rounds.jsonl a row per completion.
        row = (
            {"round": done}
            | summary(cfg, batch, reward_BF, advantages, trainer.rule.eos_ids)
            | metrics
        )
        due = done % cfg.eval_every == 0 or done == cfg.rounds
        if due and trainer.heldout:
            row |= trainer.evaluate()
        if not run.rank:
            run.append("rounds.jsonl", completion_lines(done, cfg, batch, reward_BF, advantages))
        phases = ("generate_s", "score_s", "reward_s", "update_s")
        run.log(row | dict(zip(phases, np.diff(clock).tolist(), strict=True)))

        # Saving goes on in the background. A signal, to any host, asks for one more checkpoint, of
        # a whole round.
        stops = run.signal or store.manager.reached_preemption(done)
        if due or stops:
            store.save(done, trainer.arrays(), meta | {"round": done, "updates": trainer.updates})
        if stops:
            store.close()
            jax.distributed.shutdown()  # waits for the other hosts, until all have saved
            run.leave(done)


def resolve(cfg):
    """The config with the preset's values and the files of --prompts; ValueError for settings that
    cannot be.
    """
    preset = PRESETS[cfg.preset] | ({"lr": 2e-5} if cfg.preset == "7b" and cfg.lora_rank else {})
    # the block length of the model
    trained_in = md.read_config(cfg.ckpt).block_length if cfg.ckpt else 0
    if trained_in and cfg.block_length not in (None, trained_in):
        raise ValueError(
            f"{cfg.ckpt} was trained in blocks of {trained_in}: leave --block_length out"
        )
    preset["block_length"] = trained_in or preset["block_length"]
    cfg = dataclasses.replace(
        cfg, **{name: x for name, x in preset.items() if getattr(cfg, name) is None}
    )

    # What would fail late, or silently.
    if not len(set(cfg.rewards)) == len(cfg.rewards) == len(cfg.reward_weights):
        raise ValueError(
            f"--rewards={' '.join(cfg.rewards)}: each once, with a weight of its own in --reward_weights"
        )
    if bool(cfg.ckpt) != bool(cfg.prompts) or (cfg.preset == "7b" and not cfg.ckpt):
        raise ValueError(
            "--ckpt and --prompts belong together; without both --preset=demo has its own"
        )
    if cfg.hosts and (cfg.lora_rank or not cfg.ckpt):
        raise ValueError(
            "--hosts goes with --ckpt and --prompts, and without --lora_rank, which one host can train"
        )
    if cfg.lora_rank and "://" in cfg.out:
        raise ValueError(f"--lora_rank needs --out on this machine's disk, not {cfg.out}")
    if (cfg.init_adapters or cfg.base_bits) and not cfg.lora_rank:
        raise ValueError("--init_adapters and --base_bits go with --lora_rank")
    if cfg.resume and Path(cfg.resume).resolve() != Path(cfg.out).resolve():
        raise ValueError(
            f"--resume={cfg.resume} goes on in its own folder; leave --out={cfg.out} out"
        )

    folder = runs.as_path(cfg.prompts)
    # of rl_tasks.py: it holds all files; an empty one is as none, but in a bucket
    if cfg.prompts and folder.is_dir():
        found = {
            path.stem: str(path)
            for path in folder.glob("*.jsonl")
            if getattr(path.stat(), "st_size", 1)
        }
        heldout = cfg.heldout or tuple(
            found[name] for name in ("heldout", "humaneval") if name in found
        )
        cfg = dataclasses.replace(cfg, prompts=str(folder / "train.jsonl"), heldout=heldout)
    if len({Path(path).stem for path in cfg.heldout}) < len(cfg.heldout):
        raise ValueError(
            f"--heldout={' '.join(cfg.heldout)}: the log has one column for files of one name"
        )
    return cfg


def batch_sizes(cfg, devices):
    """{"micro_batch", "generation_batch"}: 0 becomes the preset's number for each device, at most
    all of a round.
    """
    most = cfg.tasks * cfg.group
    return {
        name: getattr(cfg, name) or min(size * devices, most)
        for name, size in ON_A_DEVICE[cfg.preset].items()
    }


if __name__ == "__main__":
    gone = {
        "loss": "the mean over a micro-batch's tokens, bnpo, is the only one",
        "delta": "nothing on file measured it",
        "scale_rewards": "nothing on file measured it",
    }
    runs.command(main, Config, __doc__, ("hosts",), gone)
