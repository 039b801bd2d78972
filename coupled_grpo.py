"""Coupled-GRPO: reinforcement learning of a Dream on code that runs in a sandbox. Prints.

    # weights/dream learns from the tasks beside it, and says what it gained; four minutes of a CPU
    python coupled_grpo.py
    # goes on where the run stopped
    python coupled_grpo.py --resume=out/grpo
    # DiffuCoder on AceCode's tasks
    python data_prep.py acecode --tokenizer=out/diffucoder/tokenizer.json
    python coupled_grpo.py --preset=7b --ckpt=out/diffucoder --prompts=data/acecode --out=out/7b

Reads a Dream (a folder of convert_weights.py, or a run of train_dream.py) and tasks: JSON lines of
a "question" or a "prompt", and "test_cases". Writes --out: config.json, log.jsonl, rounds.jsonl
(each completion with its rewards), checkpoints/<round>/, the tokenizer; with LoRA at the end also
the adapters in peft's form, and merged/, a whole model. LoRA trains on one host alone.

A round: --group completions of each of --tasks tasks, their rewards (sandbox.py), and --iterations
updates, each over all of them under fresh masks (grpo.py). Random numbers are functions of (seed,
round, row): a run that was killed and resumed on as many devices equals one that was not.

--score=coupled, DiffuCoder's, takes a token's log-probability under random masks; --score=path on
the canvases on which the sampler drew it, in eight groups of steps: on a CPU an update takes 2.8
times as long. In twelve seeds of the demo the reward of held-out tasks rises by 0.108 with path
scores, by 0.071 with coupled ones, and falls by 0.074 with path scores whose advantages are
shuffled (bench/results/grpo_seeds.md).

A forward pass of a rollout writes one token, with --steps an equal share, with --threshold all
positions whose largest probability reaches it. Learning makes the policy surer, so that by a
threshold it writes more tokens at once, drawn independently: by 0.9 the demo hardly gains. Over the
whole canvas it loses. A Dream trained in blocks is scored block by block, at twice the cost.

A line shows a round's mean reward, length and forward passes, the shares of completions that ended
and that repeat one of their group, and of groups with equal rewards, which teach nothing.

--preset=7b has the settings of DiffuCoder's code, but for blocks of 32 and a threshold of 0.9. It
is not known whether a threshold harms 7B parameters as it does the demo: if "passes" in the log
fall while the reward does not rise, give --threshold=0.
DiffuCoder's own rollouts are --steps=256 --block_length=0. Its scores see the padding on the left,
ours do not. It draws a mask rate for a micro-batch, we one for a group. It cuts long prompts, we
drop them. It computes the KL divergence of groups of equal rewards, we drop such groups. It rewards
text after <|im_end|>, and takes a failed sandbox for a wrong answer. Its masks repeat in the end.

Letters: B sequences, L columns, C of them a completion, R rows of a micro-batch, F rewards.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import typing
from pathlib import Path
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import checkpoints
import grpo
import model_dream as md
import prompts
import runs
import sample_block
import sample_dream
import sandbox
from runs import Count, Natural, NonNegative, Positive, Share

DEMO = checkpoints.WEIGHTS / "dream"  # a small model, with tasks of its own

# ---- flags ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    preset: typing.Literal["demo", "7b"] = "demo"  # sets the flags whose default is None
    ckpt: str = str(DEMO)  # folder of the model to train
    prompts: str = str(DEMO / "tasks")  # tasks: a JSONL file, or a folder with train.jsonl
    out: str = "out/grpo"  # folder of the run
    resume: str = ""  # folder of a run to go on with, by its settings; "" starts anew
    rounds: Natural | None = None  # rounds of the whole run; 0: one epoch
    # ---- generation
    max_new: Count | None = None  # tokens of a completion
    max_prompt: Count | None = None  # prompt tokens; tasks with longer prompts are left out
    temperature: Positive = 1.0  # sampling temperature
    block_length: Natural | None = None  # block size of cached generation; 0: whole canvas
    # fill each position whose largest probability reaches it; 0: one position a forward pass
    threshold: Share | None = None
    steps: Natural = 0  # forward passes of a completion, equally many tokens each; 0: --threshold
    generation_batch: Natural = 0  # completions generated at a time; 0: the preset's
    # ---- training
    tasks: Count | None = None  # tasks per round
    # completions per task, GRPO's group
    group: typing.Annotated[int, (2, 1_000_000)] | None = None
    iterations: Count | None = None  # updates per round
    micro_batch: Natural = 0  # completions per backward pass, all devices together; 0: the preset's
    # a token's log-probability under coupled masks, or on the canvases of the sampler's path
    score: typing.Literal["coupled", "path"] | None = None
    lr: Positive | None = None  # peak learning rate, then a cosine to a tenth of it
    beta: NonNegative | None = None  # weight of the KL divergence; 0: no reference model
    rewards: tuple[str, ...] | None = None  # names in sandbox.py, or your own file.py:function
    # weight of each of --rewards
    reward_weights: typing.Annotated[tuple[float, ...], (-1e9, 1e9)] | None = None
    lora_rank: Natural = 0  # rank of LoRA adapters; 0 trains all weights
    base_bits: typing.Literal[0, 8, 4] = 0  # with LoRA: bits of frozen matrices; 0: not quantised
    seed: Natural = 0  # of tasks, completions and masks
    # ---- evaluation and logs
    eval_tasks: Count = 96  # held-out tasks of each file
    eval_every: Count | None = None  # rounds between evaluations; each saves a checkpoint
    heldout: tuple[str, ...] = ()  # JSONL files to evaluate on; default: the others in the folder
    wandb: str = ""  # project name; "" logs to files alone
    # ---- the machine
    hosts: str = ""  # "": one host; auto: TPU pods, SLURM, MPI; or ADDRESS:PORT,COUNT,INDEX
    runner: str = "local"  # sandbox: this machine; e2b: E2B's cloud; HOST:PORT: an Open-R1 router
    allow_unsafe: bool = False  # run programs even where the machine offers no safe sandbox


PRESETS = {  # of each flag whose default is None: its value in demo, and in 7b
    "rounds": (20, 0),
    "tasks": (16, 8),
    "group": (8, 10),
    "iterations": (1, 2),
    "max_prompt": (64, 200),
    "max_new": (40, 256),
    "block_length": (8, 32),
    "threshold": (0.0, 0.9),
    "score": ("path", "coupled"),
    "lr": (1e-4, 1e-6),
    "beta": (0.0, 0.01),
    "rewards": (("code",), ("code", "code_format")),
    "reward_weights": ((1.0,), (2.0, 0.5)),
    "eval_every": (10, 50),
}
ON_A_DEVICE = {  # of each flag whose default is 0: rows of a device in demo, and in 7b
    "micro_batch": (8, 5),
    "generation_batch": (128, 10),
}
TOP_P = {"demo": 1.0, "7b": 0.95}
OPTIMIZER = {"demo": (0.0, 1.0), "7b": (0.1, 0.2)}  # weight decay, clip of the gradient's norm
SYNC_EVERY = 64  # updates between moves of the reference model towards the policy
MIXUP = 0.6  # how far it moves; with LoRA 1
COMBINED = {"ratio_max": max, "tokens": sum}  # how micro-batches' metrics are; others: the mean
EVAL_SAMPLES = 2  # completions of each held-out task
SYSTEM = "You are a helpful assistant."

# Settings that may differ between hosts: where things are, and the sandbox, which host 0 alone
# needs.
OF_A_HOST = "ckpt prompts heldout out resume wandb hosts runner allow_unsafe".split()

# ---- what is prepared ----------------------------------------------------------------------------


def settle(cfg, devices, block_length=0, files=()):
    """The settings of a run on so many devices, complete. Pure. ValueError for what cannot be.

    block_length is the model's; files are the JSONL files in the folder --prompts.
    """
    large = cfg.preset == "7b"
    values = {name: pair[large] for name, pair in PRESETS.items()}
    if large and cfg.lora_rank:
        values["lr"] = 2e-5  # a guess
    if block_length:
        values["block_length"] = block_length
    if cfg.steps:
        values["threshold"] = 0.0
    unset = {name: value for name, value in values.items() if getattr(cfg, name) is None}
    cfg = dataclasses.replace(cfg, **unset)

    # What would fail late, or silently.
    sandbox.Options(runner=cfg.runner)
    if large and (cfg.ckpt == Config.ckpt or cfg.prompts == Config.prompts):
        raise ValueError("--preset=7b is for a model and tasks of your own: --ckpt, --prompts")
    if block_length not in (0, cfg.block_length):
        raise ValueError(
            f"{cfg.ckpt} was trained in blocks of {block_length}: leave --block_length out"
        )
    if cfg.steps and cfg.threshold:
        raise ValueError("--steps and --threshold are two ways to fill a canvas: leave one out")
    if not cfg.block_length and not cfg.steps:
        raise ValueError(
            "over the whole canvas the demo gets worse (bench/LOG.md): --block_length=8, or --steps"
        )
    if cfg.steps and not block_length:  # refuses what does not divide over the blocks
        sample_dream.layout(rule_of(cfg, 0, ()), np.ones((1, cfg.max_new), bool))
    if not len(set(cfg.rewards)) == len(cfg.rewards) == len(cfg.reward_weights):
        raise ValueError(
            f"--rewards={' '.join(cfg.rewards)}: each once, with a weight of its own in "
            "--reward_weights"
        )
    if cfg.lora_rank and "://" in cfg.out:
        raise ValueError(f"--lora_rank needs --out on this machine's disk, not {cfg.out}")
    if cfg.base_bits and not cfg.lora_rank:
        raise ValueError("--base_bits goes with --lora_rank")
    if cfg.resume and Path(cfg.resume).resolve() != Path(cfg.out).resolve():
        raise ValueError(
            f"--resume={cfg.resume} goes on in its own folder; leave --out={cfg.out} out"
        )

    # A folder's train.jsonl is learnt from, its other files are held out.
    if files:
        heldout = tuple(path for path in files if Path(path).stem != "train")
        cfg = dataclasses.replace(
            cfg, prompts=f"{cfg.prompts}/train.jsonl", heldout=cfg.heldout or heldout
        )
    if len({Path(path).stem for path in cfg.heldout}) < len(cfg.heldout):
        raise ValueError(f"--heldout={' '.join(cfg.heldout)}: the log needs files of other names")

    # Batches grow with the devices, up to a round.
    for name, pair in ON_A_DEVICE.items():
        size = getattr(cfg, name) or min(pair[large] * devices, cfg.tasks * cfg.group)
        cfg = dataclasses.replace(cfg, **{name: size})
    return cfg


@runs.enough_memory("a smaller --micro_batch or --generation_batch, or --lora_rank=16")
def main(flags):
    started = perf_counter()
    if flags.hosts and flags.lora_rank:
        raise ValueError("--hosts goes without --lora_rank, which one host trains")
    model_cfg = md.read_config(flags.ckpt)
    found = runs.as_path(flags.prompts).glob("*.jsonl")
    files = sorted(str(path) for path in found if path.read_bytes())
    checkpoints.join_hosts(flags.hosts)
    cfg = settle(flags, jax.device_count(), model_cfg.block_length, files)

    with runs.Folder(cfg, "round", jax.process_index(), jax.process_count()) as run:
        if idle := checkpoints.idle_accelerator():
            raise ValueError(f"{idle}; or train on the CPU with JAX_PLATFORMS=cpu")
        checkpoints.keep_compiled(os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/unmask"))

        # The tasks, as ids, and their rewards. All hosts need the same ones.
        tokenizer = sample_dream.load_tokenizer(cfg.ckpt, model_cfg)
        rewards = {name: sandbox.find_reward(name) for name in cfg.rewards}
        tested = not sandbox.TESTED.isdisjoint(rewards.values())
        paths = (cfg.prompts, *cfg.heldout)
        files = [Tasks(cfg, model_cfg, tokenizer, path, tested) for path in paths]
        settings = dataclasses.asdict(cfg)
        model = dataclasses.asdict(model_cfg)
        same = settings | dict.fromkeys(OF_A_HOST) | {"model": model}
        checkpoints.check_hosts(run.out, same | {"ids": [tasks.ids for tasks in files]})
        options = {"runner": cfg.runner, "allow_unsafe": cfg.allow_unsafe}
        if tested:  # before weights are read
            checkpoints.by_host_0((), functools.partial(sandbox.check, **options))

        # The model and its programs.
        reward = functools.partial(sandbox.score, rewards=rewards, **options)
        trainer = Trainer(cfg, model_cfg, tokenizer, files, reward)
        if run.rank == 0:
            trained = sum(map(np.size, jax.tree.leaves(trainer.trained)))
            devices = f"{trainer.mesh.size} x {jax.devices()[0].device_kind}"
            print(f"{devices}; {trained:,} parameters trained")
            for tasks in files:
                dropped = f"{tasks.dropped:,} longer than --max_prompt={cfg.max_prompt} left out"
                print(f"{tasks.path}: {len(tasks.rows):,} tasks, {dropped}")

        # A checkpoint names its source, by which generate_dream.py knows a chat model; tokenizer
        # and template lie beside it. Sizes of batches are settled anew where a run goes on.
        ckpt = runs.as_path(cfg.ckpt)
        config = runs.read_json(ckpt / "config.json")
        source = config.get("source", "")
        settings["model"] = "dream"
        settings |= {name: getattr(flags, name) for name in ON_A_DEVICE}
        meta = {"model": model, "train": settings, "source": source}
        if cfg.lora_rank:  # adapters fit the weights beside which they were trained, and no others
            _, base, step = checkpoints.find_weights(ckpt)
            meta["base"] = base["sums"]
        companions = checkpoints.companions(cfg.ckpt)
        store = checkpoints.Checkpoints(run.out)
        first = trainer.restore(store, meta)
        run.begin(first, meta, companions)
        with jax.set_mesh(trainer.mesh):
            train(run, store, meta, trainer, first)
        store.close()
        folder = run.out
        if cfg.lora_rank:
            adapters = trainer.trained
            sample_dream.save_adapters(folder, adapters, cfg.lora_rank, source, model_cfg.family)
            trainer.base = None  # memory for the whole model
            folder = checkpoints.save_merged(
                md,
                model_cfg,
                folder,
                cfg.ckpt,
                step,
                trainer.dtype,
                adapters,
            )
    minutes = (perf_counter() - started) / 60
    print(f"done in {minutes:.1f} min; python generate_dream.py --ckpt={folder}")


# ---- the loop ------------------------------------------------------------------------------------


def train(run, store, meta, trainer, first):
    """The rounds after `first`."""
    cfg = trainer.cfg
    count = len(trainer.tasks.rows)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    if trainer.heldout and not first:
        run.log({"round": 0} | trainer.evaluate())
    for r in range(first, trainer.rounds):
        done = r + 1
        key = jax.random.fold_in(jax.random.key(cfg.seed), r)
        clock = [perf_counter()]

        # A group of completions of each task, by the policy as it is. Each task comes once per
        # epoch, in random order.
        task_B = []
        for i in range(r * cfg.tasks, done * cfg.tasks):
            order = np.random.default_rng([cfg.seed, i // count]).permutation(count)
            task_B += [order[i % count]] * cfg.group
        batch = trainer.rollout(trainer.tasks, task_B, key)
        clock.append(perf_counter())

        # The sandbox runs them on the CPU while the devices score them: under the masks of the
        # updates, so that new and old scores differ by what was learnt and nothing else.
        rewards = None
        if run.rank == 0:
            rewards = pool.submit(trainer.reward, batch.rows).result
        views = trainer.score(batch, jax.random.fold_in(key, 1))
        clock.append(perf_counter())
        reward_BF = checkpoints.by_host_0((len(batch.rows), len(cfg.rewards)), rewards)
        clock.append(perf_counter())

        # A completion that does better than the others of its task becomes likelier, one that does
        # worse less likely.
        try:
            advantages, metrics = trainer.learn(batch, views, reward_BF)
        except RuntimeError:
            store.close()  # with a checkpoint that is being written
            raise
        clock.append(perf_counter())

        # log.jsonl has a row per round, rounds.jsonl a row per completion.
        row = {"round": done}
        if not metrics and run.rank == 0:
            print(f"round {done}: no group has completions of different rewards; nothing is learnt")
        due = done % cfg.eval_every == 0 or done == trainer.rounds
        if due:
            row |= trainer.evaluate()
        row |= summary(trainer, batch, reward_BF, advantages) | metrics
        if run.rank == 0:
            run.append("rounds.jsonl", completion_lines(done, cfg, batch, reward_BF, advantages))
        phases = "generate_s", "score_s", "reward_s", "update_s"
        run.log(row | dict(zip(phases, np.diff(clock), strict=True)))

        # Saving goes on in the background. A signal, to any host, asks for one more checkpoint, of
        # a whole round.
        stops = run.signal or store.manager.reached_preemption(done)
        if due or stops:
            store.save(done, trainer.arrays(), meta | {"round": done, "updates": trainer.updates})
        if stops:
            store.close()
            jax.distributed.shutdown()  # waits for the other hosts, until all have saved
            run.leave(done)
    if run.rank == 0:
        for line in gains(cfg, (run.out / "log.jsonl").read_text()):
            print(line)


# ---- the steps of a round ------------------------------------------------------------------------


class Batch(typing.NamedTuple):
    """The completions of a round."""

    # token_BL, filled canvases; see_BL, False at padding; counted_BC, the completion mask: True up
    # to and including the first end token
    arrays: dict
    rows: list  # the tasks, with "text", "written", "tokens" and, once rewarded, "verdicts"
    passes: float  # forward passes that a text took on average, of the canvas or a window


class Trainer:
    """A Dream in training: weights, reference model, optimizer state, tasks, compiled programs."""

    def __init__(self, cfg, model_cfg, tokenizer, files, reward):
        self.cfg = cfg
        self.tasks, *self.heldout = files
        self.reward = reward
        self.rounds = cfg.rounds or max(1, len(self.tasks.rows) // cfg.tasks)
        on_cpu = jax.default_backend() == "cpu"
        self.dtype = jnp.dtype("float32" if on_cpu else "bfloat16")  # also of a frozen base

        # Weights spread over all devices would be gathered in every forward pass of a rollout: it
        # has a copy of them.
        devices = jax.devices()
        self.mesh = checkpoints.mesh_of(devices, (1, -1, 1))
        shape = checkpoints.inference_mesh(model_cfg, devices, 0).devices.shape
        self.rollout_mesh = checkpoints.mesh_of(devices, shape)
        check_memory(cfg, model_cfg, self.mesh, self.rollout_mesh, self.dtype)

        # How completions are generated. A chat model ends its turn as its template does.
        ends = [*model_cfg.eos_ids, tokenizer.token_to_id("<|dlm_pad|>")]
        if any(tasks.chat for tasks in files):
            ends.insert(0, prompts.turn_end(tokenizer))
        ends = tuple(token for token in ends if token is not None)
        self.rule = rule_of(cfg, tokenizer.get_vocab_size(), ends)
        # One CPU fills at most 16 rows at a time: texts that have ended leave the batch.
        rows = min(16, cfg.generation_batch) if on_cpu and len(devices) == 1 else 0
        self.fill = functools.partial(sample_dream.fill, rows=rows)
        if model_cfg.block_length:  # its own cache is exact
            self.rule = sample_block.settings_of(dataclasses.replace(self.rule, cache=""))
            self.fill = sample_block.fill

        # All weights are trained, or with LoRA adapters beside a frozen base.
        dtype = self.dtype if cfg.lora_rank else jnp.float32
        model, _ = checkpoints.load(md, cfg.ckpt, dtype=dtype, bits=cfg.base_bits, mesh=self.mesh)
        self.base = {}
        self.trained = nnx.to_pure_dict(nnx.state(model))
        del model  # it would keep the first weights in memory
        if cfg.lora_rank:
            self.base = self.trained
            key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 20)
            adapters = md.new_adapters(key, md.param_shapes(model_cfg), cfg.lora_rank)
            self.trained = jax.device_put(adapters, md.shardings(self.mesh, adapters))
        self.ref = {}  # the reference model
        if cfg.beta:
            self.ref = jax.tree.map(jnp.copy, self.trained)

        # The optimizer, and the programs of an update and of a rollout.
        rate = grpo.learning_rate(cfg.lr, self.rounds * cfg.iterations)
        optimizer = grpo.make_optimizer(rate, *OPTIMIZER[cfg.preset])
        state = (self.trained, jax.eval_shape(optimizer.init, self.trained))
        layouts = md.shardings(self.mesh, state)
        self.opt = jax.jit(optimizer.init, out_shardings=layouts[1])(self.trained)
        self.updates = 0  # so far
        self.failed = 0  # how many of the last ones had no finite gradient
        graph, self.rollout_graph = grpo.graphs_of(model_cfg, self.dtype, on_cpu)
        self.scores, self.gradients, self.update = grpo.make_programs(
            graph,
            optimizer,
            model_cfg.mask_id,
            grpo.Loss(cfg.beta),
            layouts,
        )

    def arrays(self):
        """What a checkpoint holds."""
        name = "adapters" if self.base else "params"
        return {name: self.trained, "ref": self.ref, "opt": self.opt}

    def restore(self, store, meta):
        """Go on from the newest checkpoint, and return its round; 0 without one."""
        if store.newest() is None:
            return 0

        def shape_of(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        like = jax.tree.map(shape_of, self.arrays())
        self.trained = self.ref = self.opt = None  # no memory for both
        state, saved = store.resume(store.folder, meta, like, "round")
        self.trained = state["adapters" if self.base else "params"]
        self.ref = state["ref"]
        self.opt = state["opt"]
        self.updates = saved["updates"]
        return saved["round"]

    def policy(self):
        """The model as it is, for generation; on several devices a copy, laid out for that."""
        params = md.assemble(self.base, self.trained)
        if self.rollout_mesh.size > 1:
            dtype = None if self.base else self.dtype
            params = grpo.rollout_weights(params, self.rollout_mesh, dtype)
        return nnx.merge(self.rollout_graph, params)

    def rollout(self, tasks, task_B, key):
        """Completions of the tasks with these numbers, by the policy as it is: a Batch."""
        policy = self.policy()
        key_data = np.asarray(jax.random.key_data(key))  # which is on no device
        devices = self.rollout_mesh.shape["data"]
        size = math.ceil(self.cfg.generation_batch / devices) * devices  # as many rows on each
        filled = []
        groups = []
        passes = []
        for i in range(0, len(task_B), size):
            # All batches have one shape, for one compiled program: the last repeats rows.
            canvas = tasks.canvas(np.resize(task_B[i : i + size], size))
            with jax.set_mesh(self.rollout_mesh):
                batch_key = jax.random.fold_in(jax.random.wrap_key_data(key_data), i)
                token_BL, stats = self.fill(policy, *canvas, self.rule, batch_key)
            if self.cfg.score == "path":
                token_BL, group_BL = grpo.path_of(
                    stats["record"], token_BL, tasks.model_cfg.mask_id
                )
                groups.append(group_BL[:, -self.cfg.max_new :])
            filled.append(token_BL)
            passes.append(stats["passes"])
        token_BL = np.concatenate(filled)[: len(task_B)]
        counted_BC = grpo.completion_mask(token_BL[:, -self.cfg.max_new :], self.rule.eos_ids)
        arrays = {"token_BL": token_BL, "see_BL": tasks.canvas(task_B)[1], "counted_BC": counted_BC}
        if groups:
            arrays["group_BC"] = np.concatenate(groups)[: len(task_B)]
        rows = tasks.completions(task_B, token_BL, counted_BC)
        return Batch(arrays, rows, np.mean(passes))

    def to_devices(self, batch, row_R, view):
        """Rows of a batch and of the arrays in view, on the devices; of row -1 no token counts."""
        arrays = batch.arrays | view
        inputs = {name: x[row_R] for name, x in arrays.items()}
        inputs["counted_BC"] &= (row_R >= 0)[:, None]
        return jax.device_put(inputs, jax.NamedSharding(self.mesh, md.PS(md.BATCH)))

    def score(self, batch, key):
        """Of each update its masks, and under them the scores of the policy as it is and of the
        reference model.
        """
        cfg = self.cfg
        B, C = batch.arrays["counted_BC"].shape
        views = []
        for i in range(cfg.iterations):
            mask = {}
            if cfg.score == "coupled":
                mask = jax.device_get(grpo.draw_masks(key, i, B, C, cfg.group))
            # the last row of each takes what is padding
            old_BC, ref_BC = np.zeros((2, B + 1, C), np.float32)
            for row_R in grpo.micro_batches(np.arange(B), cfg.micro_batch, self.mesh.size):
                inputs = self.to_devices(batch, row_R, mask)
                if i > 0:  # at first the new score is the old one, see grpo.micro_loss
                    old_BC[row_R] = self.scores(self.trained, self.base, inputs)
                if cfg.beta:
                    ref_BC[row_R] = self.scores(self.ref, self.base, inputs)
            views.append(mask | {"old_BC": old_BC[:B], "ref_BC": ref_BC[:B]})
        return views

    def learn(self, batch, views, reward_BF):
        """(advantages, metrics) of a round's updates; no metrics: there was nothing to learn."""
        cfg = self.cfg
        advantages = grpo.group_advantages(reward_BF, cfg.reward_weights, cfg.group)
        # no unknown reward, no group of equal rewards
        kept_B = advantages.counted_B & ~advantages.constant_B
        if not kept_B.any():
            return advantages, {}
        batches = grpo.micro_batches(np.flatnonzero(kept_B), cfg.micro_batch, self.mesh.size)
        advantage_B = advantages.advantage_B.astype(np.float32)
        measured = []
        norms = []
        # An update goes through all micro-batches under masks of its own. The reference takes those
        # of (step + 1) mod iterations: with two micro-batches and two iterations it shows a
        # micro-batch the same masks twice.
        for i, view in enumerate(views):
            total = jax.tree.map(jnp.zeros_like, self.trained)
            for row_R in batches:
                inputs = self.to_devices(batch, row_R, view | {"advantage_B": advantage_B})
                inputs["first"] = i == 0
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
            if cfg.beta and self.updates % SYNC_EVERY == 0:
                mixup = 1.0 if cfg.lora_rank else MIXUP
                self.ref = grpo.sync_reference(self.ref, self.trained, mixup)

        metrics = {}
        for name in measured[0]:
            values = [float(each[name]) for each in measured]
            metrics[name] = COMBINED.get(name, np.mean)(values)
        metrics["grad_norm"] = np.max(norms)  # NaN if one of them is
        return advantages, metrics

    def evaluate(self):
        """Mean of the first reward, and the share of completions where it is 1, of each file of
        held-out tasks.
        """
        cfg = self.cfg
        key = jax.random.fold_in(jax.random.key(cfg.seed), 1 << 21)  # the same at each evaluation
        figures = {}
        for tasks in self.heldout:
            numbers = np.arange(len(tasks.rows))[: cfg.eval_tasks]
            task_B = np.repeat(numbers, EVAL_SAMPLES)
            rows = self.rollout(tasks, task_B, key).rows
            reward_BF = checkpoints.by_host_0((len(rows), len(cfg.rewards)), self.reward, rows)
            reward_B = reward_BF[:, 0]
            known = reward_B[~np.isnan(reward_B)]  # the sandbox may have failed
            if len(known):
                name = Path(tasks.path).stem
                figures[f"{name}_reward"] = known.mean()
                figures[f"{name}_pass"] = (known == 1).mean()
        return figures


def check_memory(cfg, model_cfg, mesh, rollout_mesh, dtype):
    """ValueError, before any weight is read, if a device has less memory than training takes."""
    optimizer = grpo.make_optimizer(cfg.lr)
    size_of = checkpoints.bytes_on_a_device
    needed = {}
    forms = {"": (cfg.lora_rank, cfg.base_bits)} | checkpoints.smaller_forms(cfg)
    for flags, (rank, bits) in forms.items():
        shapes = checkpoints.state_shapes(md, model_cfg, optimizer, mesh, dtype, rank, bits)
        trained = size_of(shapes["params"])
        spare = trained  # gradients
        if rollout_mesh.size > 1:  # or the weights of rollouts
            state = (md, model_cfg, optimizer, rollout_mesh, dtype, 1, bits)
            spare = max(trained, size_of(checkpoints.state_shapes(*state)["base"]))
        if cfg.beta:  # the reference model
            spare += trained
        needed[flags] = size_of(shapes) + spare
    checkpoints.check_memory(mesh, needed.pop(""), needed)


def rule_of(cfg, vocab, ends):
    """How rollouts are generated; the first of `ends` fills the rest of a text that has ended."""
    return sample_dream.Sampling(
        block_length=cfg.block_length,
        cache="dual" if cfg.block_length else "",
        temperature=cfg.temperature,
        top_p=TOP_P[cfg.preset],
        history=cfg.score == "path",
        vocab=vocab,
        eos_ids=ends,
        # Positions are chosen by the maximum of the distribution after top-p, never by the token
        # that is drawn.
        threshold=cfg.threshold,
        steps=cfg.steps,
        score="distribution",
        filtered=True,
    )


# ---- tasks as canvases ---------------------------------------------------------------------------


def question_of(task):
    """The user's turn of a chat: the question, with its first test unless it holds a code block."""
    if "\n```\n" in task["question"] or not task["test_cases"]:
        return task["question"]
    return f"{task['question']}\nTest cases: {task['test_cases'][0]}"


class Tasks:
    """Tasks as canvases: left-padded token ids of the prompts, max_new columns of MASK after."""

    def __init__(self, cfg, model_cfg, tokenizer, path, tested=True):
        self.cfg = cfg
        self.model_cfg = model_cfg
        self.tokenizer = tokenizer
        self.path = path
        self.rows = []
        self.ids = []
        self.dropped = 0  # tasks whose prompt is too long
        self.chat = False
        wrap = prompts.chat_template(runs.as_path(cfg.ckpt))
        for task in prompts.read_tasks(path, tested):
            chat = "question" in task
            if chat and not wrap:
                raise ValueError(
                    f"{path} asks questions, and the model has no chat template "
                    "(tokenizer_config.json)"
                )
            if chat:
                ids = prompts.encode_chat(tokenizer, wrap, question_of(task), SYSTEM)
            else:
                ids = prompts.ids_of(tokenizer, task["prompt"]) or [model_cfg.bos_id]
            self.chat |= chat
            if len(ids) > cfg.max_prompt:
                self.dropped += 1
                continue
            self.rows.append(task)
            self.ids.append(ids)
        if not self.rows:
            raise ValueError(
                f"{path} holds no task of at most --max_prompt={cfg.max_prompt} tokens; "
                f"{self.dropped} are longer"
            )

    def canvas(self, task_B):
        """(token_BL, see_BL) of the tasks with these numbers; see_BL is False at padding."""
        ids = [self.ids[i] for i in task_B]
        columns = self.cfg.max_prompt + self.cfg.max_new
        return sample_dream.canvas(ids, self.cfg.max_new, self.model_cfg, columns)

    def completions(self, task_B, token_BL, counted_BC):
        """Rows for the reward functions, of filled canvases and their completion masks.

        A row is the task with "written", the completion, "tokens", its length, and "text", which is
        rewarded: for a "prompt" the whole program in a code block, the form in which a chat model
        answers. An answer that ends its turn has a newline after it, as in the chat template: the
        reference's code_format asks for one.
        """
        rows = []
        turn_end = prompts.turn_end(self.tokenizer)
        for i, token_L, counted_C in zip(task_B, token_BL, counted_BC, strict=True):
            task = self.rows[i]
            ids = token_L[-len(counted_C) :][counted_C].tolist()
            written = self.tokenizer.decode(ids, skip_special_tokens=True)
            text = written
            if "question" not in task:
                text = f"```python\n{task['prompt']}{written.rstrip()}\n```\n"
            elif ids[-1] == turn_end:  # the template's newline was cut off with what follows
                text = written.removesuffix("\n") + "\n"
            rows.append(task | {"tokens": len(ids), "written": written, "text": text})
        return rows


# ---- what is logged ------------------------------------------------------------------------------


def summary(trainer, batch, reward_BF, advantages):
    """Rewards and completions of a round as numbers for the log; host 0 alone knows timeouts."""
    cfg = trainer.cfg
    counted_B = advantages.counted_B
    token_BC = batch.arrays["token_BL"][:, -cfg.max_new :]
    counted_BC = batch.arrays["counted_BC"]
    # completions that repeat another of their group: a sign of a policy that collapses
    text_BC = np.where(counted_BC, token_BC, -1)
    groups_GNC = text_BC.reshape(-1, cfg.group, cfg.max_new)
    different = sum(len(np.unique(group_NC, axis=0)) for group_NC in groups_GNC)
    row = {
        "reward": np.mean(advantages.reward_B[counted_B]),
        "length": counted_BC.sum(-1).mean(),
        "passes": batch.passes,
        "ended": np.isin(token_BC, trainer.rule.eos_ids).any(-1).mean(),
        "duplicates": 1 - different / len(token_BC),
        "constant_groups": advantages.constant_B.mean(),
        "no_reward": int((~counted_B).sum()),
        "timeouts": sum(task.get("verdicts", []).count("timeout") for task in batch.rows),
    }
    for name, reward_B in zip(cfg.rewards, reward_BF.T, strict=True):
        row[f"{name}_mean"] = np.nanmean(reward_B)
        row[f"{name}_std"] = np.nanstd(reward_B)
    return row


def gains(cfg, log):
    """What a run has learnt, in lines: the reward of held-out tasks at the first and the last
    evaluation, and a warning if that of its rounds fell. log: the text of log.jsonl.
    """
    rows = [json.loads(line) for line in log.splitlines()]
    lines = []
    for path in cfg.heldout:
        stem = Path(path).stem
        values = [row[f"{stem}_reward"] for row in rows if f"{stem}_reward" in row]
        if values:
            lines.append(f"held-out reward of {stem}: {values[0]:.3f} -> {values[-1]:.3f}")
    # Tasks come in random order, so that those of the first and of the last quarter are of one
    # difficulty, within two standard errors.
    reward_R = np.array([row["reward"] for row in rows if "reward" in row])
    quarter = len(reward_R) // 4
    if quarter > 1:
        first_R = reward_R[:quarter]
        last_R = reward_R[-quarter:]
        error = np.hypot(first_R.std(ddof=1), last_R.std(ddof=1)) / quarter**0.5
        if first_R.mean() - last_R.mean() > 2 * error:
            advice = "lower --lr"
            if cfg.threshold:
                advice += ", or give --threshold=0"
            lines.append(
                f"warning: its rounds were rewarded by {first_R.mean():.3f} in the first quarter "
                f"and {last_R.mean():.3f} in the last; {advice}"
            )
    return lines


def completion_lines(done, cfg, batch, reward_BF, advantages):
    """The lines of rounds.jsonl: each completion with its rewards, null where one is not known."""
    lines = ""
    for i, task in enumerate(batch.rows):
        values = [None if math.isnan(x) else x for x in reward_BF[i].tolist()]
        row = {
            "round": done,
            "id": task.get("id"),
            "prompt": task.get("prompt", task.get("question")),
            "completion": task["written"],
            "tokens": task["tokens"],
            "verdicts": task.get("verdicts", []),
            "rewards": dict(zip(cfg.rewards, values, strict=True)),
            "reward": None,
            "advantage": None,
        }
        if advantages.counted_B[i]:
            row["reward"] = advantages.reward_B[i]
            row["advantage"] = advantages.advantage_B[i]
        lines += json.dumps(row) + "\n"
    return lines


if __name__ == "__main__":
    moved = {
        "e2b_router_url": "--runner=HOST:PORT",
        "loss": "bnpo is the only form",
        "delta": "nothing on file measured it",
        "scale_rewards": "nothing on file measured it",
        "top_p": "TOP_P in coupled_grpo.py",
        "epsilon": "0.5, in grpo.py's Loss",
        "epsilon_high": "0.5, in grpo.py's Loss",
        "sync_every": "SYNC_EVERY in coupled_grpo.py",
        "init_adapters": "merge them first, and train the merged model: --ckpt=RUN/merged",
    }
    runs.command(main, Config, __doc__, ("hosts",), moved)
