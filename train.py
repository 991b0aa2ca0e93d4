"""Trains an ELF.

    python train.py --config=tiny                           a laptop, five minutes, no network
    python train.py --config=tiny_text --data=FILE          the same on your own text
    python train.py --config=tiny --resume                 goes on where a run stopped

Everything a run writes lies in out/NAME/; python sample.py --model=out/NAME makes texts from it.
"""
import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import math
import os
import shlex
import signal
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import elf
import tiny_config
from elf import UserError, key
from sample import (Reference, Setting, accelerate, canvas, connect, generate, load_reference, measure, parse, run, seeded,
                    to_text, until_end)

@dataclasses.dataclass(frozen=True)
class Options:
    """Keys of a run, their defaults and meanings."""
    config: str = key("", f"preset: {', '.join(tiny_config.PRESETS)}; every key of the second list changes one value of it",
                      one_of=("", *tiny_config.PRESETS))
    out_dir: str = key("", "folder to write to (empty: out/ and the preset's name)")
    resume: bool = key(False, "go on with the run in out_dir, with exactly the weights it would have had")
    init: str = key("", "start from these weights: whatever sample.py takes as --model")
    dry_run: bool = key(False, "build everything, say how large it is, make one step on real data, save no model")
    keep: int = key(0, "keep the weights of every k-th checkpoint, in out_dir/step_N (0: only the last)", at_least=0)
    micro_batch: int = key(0, "sequences that go through the network at once, in each process (0: its whole share of a batch)", at_least=0)
    device: str = key("auto", "cpu, cuda, mps, or auto for the best there is")
    dtype: str = key("auto", "precision of the network's blocks: float32, bfloat16, or auto", one_of=("auto", "float32", "bfloat16"))
    compile: bool = key(False, "torch.compile: slow to start, then faster")
    checkpoint_activations: bool = key(False, "compute activations twice instead of keeping them: less memory, a third more work")
    __post_init__ = elf.check

# ------------------------------------------------------------------------------------------ data

def load_data(cfg, device, encoder=None):
    """(cfg with vocabulary and latents' mean and std filled in, encoder, training rows, held-out rows); rows are arrays of
    token ids (N, L). Without an encoder a small one is trained on the data."""
    data = tiny_config.open_data(cfg.data, cfg.source_length > 0)
    cfg = tiny_config.fit(cfg, encoder) if encoder else cfg
    if not encoder and "input_ids" in data.column_names:
        raise UserError(f"--data={cfg.data}: holds token ids; name the encoder that they are for, --encoder=...")
    if encoder:
        tokenizer = encoder.tokenizer
    else:
        texts = (text for row in data for name, text in row.items() if name != "end")
        words, pieces = tiny_config.word_tokenizer, tiny_config.byte_tokenizer
        tokenizer = words(texts) if cfg.data in tiny_config.LANGUAGES else pieces(texts, cfg.vocab or 4096)
    rows = tiny_config.token_rows(data, cfg, tokenizer)
    if len(rows) < 4:
        raise UserError(f"--data={cfg.data}: {len(rows)} rows of --length={cfg.length} tokens are too few, it takes four")
    train, heldout = tiny_config.split(rows)
    if encoder is None:
        print("training a small encoder on the data, to be frozen ...", flush=True)
        encoder = elf.Encoder(tiny_config.train_encoder(train, tokenizer, cfg).to(device), tokenizer)
        cfg = tiny_config.fit(cfg, encoder)
    return tiny_config.measure_latents(cfg, encoder, train) if cfg.latent_std == 0 else cfg, encoder, train, heldout

@functools.lru_cache(2)                     # a batch may lie in two epochs
def shuffled(n, epoch, seed):
    return torch.randperm(n, generator=seeded(seed, 2, epoch))

def batch_rows(step, batch, n, seed):
    """Which of the n rows are the batch of a step: a pure function, so there's no position to lose on resume."""
    places = range(step * batch, (step + 1) * batch)
    return torch.stack([shuffled(n, place // n, seed)[place % n] for place in places])

def batches(rows, cfg, first, rank=0, world=1, gpu=False):
    """From step `first` on, what a process gets of each batch: token ids (B / processes, L)."""
    def read(step):
        return tiny_config.take(rows, batch_rows(step, cfg.batch, len(rows), cfg.seed).chunk(world)[rank])
    if not gpu:                                 # on a CPU a second thread would halve the speed of the first
        yield from map(read, range(first, cfg.steps))
        return
    with ThreadPoolExecutor(1) as pool:         # reads one step ahead
        ahead = pool.submit(read, first)
        for step in range(first, cfg.steps):
            ids, ahead = ahead.result(), pool.submit(read, step + 1)
            yield ids

# ------------------------------------------------------------------------------------------ optimiser

class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al. 2024): all directions of a 2-D weight move equally fast."""

    def __init__(self, params, lr, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}                             # weights of one shape are stacked and orthogonalised together
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for (fan_out, fan_in), params in shapes.items():
                grads = torch.stack([p.grad for p in params])                   # (n, fan_out, fan_in)
                moments = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
                torch._foreach_lerp_(moments, list(grads), 1 - group["momentum"])
                update = share_out(orthogonal, grads.lerp(torch.stack(moments), group["momentum"]))     # Nesterov
                torch._foreach_add_(params, list(update), alpha=-group["lr"] * math.sqrt(max(1, fan_out / fan_in)))

def orthogonal(g, steps=5):
    """Pushes the singular values of matrices (n, rows, columns) towards 1, by Newton-Schulz iteration."""
    x = g.bfloat16() if g.is_cuda else g            # bfloat16 is fast on GPUs, and very slow on many CPUs
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).to(g.dtype)

def share_out(function, x):
    """function(x) for x (n, rows, columns), each process computing its part of the n and getting the others'."""
    if not dist.is_initialized() or len(x) < dist.get_world_size():
        return function(x)
    n, world = len(x), dist.get_world_size()
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -n % world))                 # (m, rows, columns), m a multiple of world
    out = torch.empty_like(x)
    dist.all_gather(list(out.chunk(world)), function(x.chunk(world)[dist.get_rank()]).contiguous())
    return out[:n]

def make_optimizers(model, cfg):
    """Muon on the 2-D weights, Adam on biases, norms and learned tokens."""
    if cfg.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), cfg.lr)]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [Muon(matrices, cfg.lr), torch.optim.Adam(others, cfg.adam_lr or cfg.lr, betas=(0.9, 0.999), eps=1e-8)]

def schedule(step, cfg):
    """Share of the learning rate at a step: up from 0, constant, down to 0."""
    up = cfg.warmup if cfg.warmup >= 1 else cfg.warmup * cfg.steps
    down = cfg.cooldown * cfg.steps
    return min(1, (step + 1) / up if up else 1, (cfg.steps - step) / down if down else 1)

# ------------------------------------------------------------------------------------------ checkpoints

class Trainer:
    """All the state of a run, its checkpoints, and its one step."""

    def __init__(self, cfg, encoder, rows, device, options=Options(), rank=0, world=1):
        torch.manual_seed(cfg.seed)
        self.cfg, self.encoder, self.rows, self.device, self.rank, self.world = cfg, encoder, rows, device, rank, world
        self.step, self.log = 0, []                                 # the log: what metrics.jsonl holds, a dict a line
        self.pad, some = encoder.tokenizer.pad_token_id, tiny_config.take(rows, range(0, len(rows), max(len(rows) // 1000, 1)))
        self.data = f"{len(rows)} {hashlib.sha256(some.numpy().tobytes()).hexdigest()}"             # tells data apart, by some rows
        self.micro = options.micro_batch or cfg.batch // world
        if cfg.batch % (self.micro * world) or self.micro < 3:
            raise UserError(f"--batch={cfg.batch}: must be a multiple of {world} processes x --micro_batch={self.micro}, itself at least 3")
        self.model = elf.ELF(cfg).to(device)
        if source := options.init:
            model, other = elf.load_model(source, device, cfg)
            if (other.latent_mean, other.latent_std) != (cfg.latent_mean, cfg.latent_std):
                raise UserError(f"--init={source}: other latents; add --latent_mean={other.latent_mean} --latent_std={other.latent_std}")
            try:
                self.model.load_state_dict(model.state_dict())
            except RuntimeError as error:
                raise UserError(f"--init={source}: of another size than this run ({elf.one_line(error)})") from None
        self.average = copy.deepcopy(self.model).requires_grad_(False)      # copied before accelerate patches the blocks
        accelerate(self.model, device, options.dtype, options.compile, options.checkpoint_activations)
        self.optimizers = make_optimizers(self.model, cfg)
        self.parts = {"model": self.model, "average": self.average} | {type(o).__name__: o for o in self.optimizers}

    def state(self):
        numbers = {"step": self.step, "log": self.log, "data": self.data, "micro": self.micro}
        return numbers | {name: part.state_dict() for name, part in self.parts.items()}

    def save(self, folder):
        """model.safetensors to sample from, state.pt to go on from, and the logs."""
        elf.save_model(folder, self.average.state_dict(), self.cfg)
        elf.write_safely(f"{folder}/state.pt", lambda path: torch.save(self.state(), path))
        self.write_log(folder)

    def write_log(self, folder):
        """metrics.jsonl, a line an entry, and samples.txt, both anew."""
        lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in self.log)
        samples = "".join(f"--- step {entry['step']}\n" + "\n".join(entry["samples"]) + "\n" for entry in self.log if "samples" in entry)
        elf.write_safely(f"{folder}/metrics.jsonl", lambda path: Path(path).write_text(lines, encoding="utf-8"))
        elf.write_safely(f"{folder}/samples.txt", lambda path: Path(path).write_text(samples, encoding="utf-8"))

    def load(self, folder):
        path = f"{folder}/state.pt"
        try:
            if zipfile.ZipFile(path).testzip():                                     # a zip with checksums
                raise ValueError("altered")
            state = torch.load(path, map_location="cpu", weights_only=True)         # runs no code from the file
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.step, self.log, data, micro = state["step"], state["log"], state["data"], state["micro"]
        except Exception as error:                                                  # zipfile and torch raise many kinds
            raise UserError(f"{path}: refused, missing or not a whole checkpoint of this run ({elf.one_line(error)})") from None
        if data != self.data:
            raise UserError(f"{path}: this run was trained on other data; --data={self.cfg.data} has changed since")
        if micro != self.micro and self.rank == 0:
            print(f"note: {self.micro} sequences at once, not {micro}: from now on other random numbers (--micro_batch={micro} keeps them)")

    def total(self, value):
        """The sum of a number or tensor over all processes, as a tensor."""
        value = torch.as_tensor(value, device=self.device)
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def train_step(self, ids):
        """One step of the optimisers on this process's share of the batch, ids (B / processes, L), in parts; returns its figures."""
        cfg, parts = self.cfg, ids.to(self.device).split(self.micro)
        n = self.total(tiny_config.unpack(ids, self.encoder.tokenizer, cfg)[2].sum())  # counted positions of the whole batch
        sums = torch.zeros(3, device=self.device)
        for i, part in enumerate(parts):
            # the random numbers depend on the seed, the step and the part of the whole batch, and on nothing else
            draws = elf.draw(cfg, len(part), seeded(cfg.seed, 3, self.step, self.rank * len(parts) + i, device=self.device))
            losses = self.loss(self.model, part, draws, n)
            losses[0].backward()
            sums += torch.stack(losses).detach()
        for p in self.model.parameters():
            self.total(p.grad)                                      # in place: the gradients of the whole batch, at every process
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), cfg.clip).item()
        loss, mse, ce = self.total(sums).tolist()
        if not math.isfinite(loss) or not math.isfinite(norm):      # before it reaches the weights
            raise SystemExit(f"step {self.step + 1}: loss {loss}, gradient norm {norm}. The last checkpoint is kept; try a smaller --lr")
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * schedule(self.step, cfg)
            optimizer.step()
            optimizer.zero_grad()
        decay = min(cfg.ema, (1 + self.step) / (10 + self.step))    # early on a long average would still be the initial weights
        torch._foreach_lerp_(list(self.average.parameters()), [p.detach() for p in self.model.parameters()], 1 - decay)
        self.step += 1
        parts = self.world * len(parts)
        return {"loss": loss, "mse": mse / parts, "ce": ce / parts, "grad_norm": norm, "lr": cfg.lr * schedule(self.step - 1, cfg)}

    def loss(self, model, ids, draws, n=None):
        """flow_loss of rows (B, L) as they are stored. A dropped source is hidden from the encoder's target, and its latents are zero."""
        ids, source, counted, real = tiny_config.unpack(ids, self.encoder.tokenizer, self.cfg)
        sees = elf.who_sees(source, real, draws.drop) if self.cfg.source_length else None if real.all() else real[:, None]
        x = self.encoder.encode(ids, self.cfg, sees).masked_fill((source & draws.drop[:, None])[..., None], 0)
        return elf.flow_loss(model, x, ids, counted, draws, n, source)

# ------------------------------------------------------------------------------------------ the program

@torch.no_grad()
def evaluate(trainer, heldout, reference, last):
    """Held-out losses and the measures of some samples, of the averaged weights, as an entry of the log; prints them."""
    cfg, model, tokenizer = trainer.cfg, trainer.average, trainer.encoder.tokenizer
    ids = tiny_config.take(heldout, range(min(4 * trainer.micro, len(heldout)))).to(trainer.device)
    parts = [part for part in ids.split(trainer.micro) if len(part) >= 3]
    draws = [elf.draw(cfg, len(part), seeded(cfg.seed, 4, i, device=trainer.device)) for i, part in enumerate(parts)]    # always the same
    _, mse, ce = torch.tensor([trainer.loss(model, *inputs) for inputs in zip(parts, draws)]).mean(0).tolist()
    n, steps = (256, cfg.sample_steps) if last else (32, 16)
    n = n if reference.stored is None else min(n, len(reference.stored))
    how = Setting(steps=steps, gamma=cfg.gamma, w=cfg.w, cfg=cfg.cfg)
    reference = reference._replace(texts=reference.texts[:n], rows=reference.rows[:n])          # as many as samples
    rows = generate(model, how, cfg.seed, list(range(n)), 32, trainer.encoder, reference.stored)
    rows = [until_end(row, tokenizer.eos_token_id) for row in rows]
    texts = [to_text(tokenizer, row) for row in rows]
    figures = {"heldout_mse": mse, "heldout_ce": ce} | measure(texts, rows, reference)
    tqdm.write(f"step {trainer.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if not name.endswith("_se")))
    tqdm.write("\n".join(f"  | {line}" for text in texts[:2] for line in text.splitlines()))
    return {"step": trainer.step} | figures | {"samples": texts[:8]}

def run_training(trainer, heldout, folder, again, keep):
    """The training loop, from the trainer's step to the last one; `again` is the command that resumes it."""
    cfg, first, began, main = trainer.cfg, trainer.step, time.time(), trainer.rank == 0
    log_every, eval_every = min(max(cfg.steps // 50, 1), 100), cfg.eval_every or min(max(cfg.steps // 10, 1), 1000)
    reference = load_reference(cfg, trainer.encoder.tokenizer) or Reference(
        [], [row[row != trainer.pad].tolist() for row in tiny_config.take(heldout, range(min(len(heldout), 256)))], lambda texts: {})
    todo = batches(trainer.rows, cfg, first, trainer.rank, trainer.world, trainer.device.type == "cuda")
    bar = tqdm(todo, total=cfg.steps, initial=first, disable=None if main else True, unit="step")       # a bar on terminals only
    with interrupts() as seen:
        for ids in bar:
            figures = trainer.train_step(ids)
            stop = trainer.total(len(seen)) > 0                     # of any process: all end at the same step
            step, last = trainer.step, trainer.step == cfg.steps
            due = step % eval_every == 0 or last
            if main:
                rate = (step - first) / (time.time() - began)       # steps/s
                figures["tokens_per_s"] = round(rate * cfg.batch * cfg.length)
                line = f"mse {figures['mse']:.3f}, ce {figures['ce']:.3f}, {figures['tokens_per_s']:,} tokens/s"
                bar.set_postfix_str(line)
                if step % log_every == 0 or last:
                    trainer.log.append({"step": step} | figures)
                    trainer.write_log(folder)
                    if bar.disable:
                        print(f"step {step}/{cfg.steps}: {line}, {(cfg.steps - step) / rate / 60:.1f} minutes to go", flush=True)
                if due:
                    trainer.log.append(evaluate(trainer, heldout, reference, last))
                if due or stop:
                    trainer.save(folder)
                if keep and step % (keep * eval_every) == 0:
                    os.makedirs(f"{folder}/step_{step}", exist_ok=True)
                    elf.save_model(f"{folder}/step_{step}", trainer.average.state_dict(), cfg)
            if stop and not last and trainer.total(1).item():       # the others wait for the first, which saves
                raise SystemExit(f"stopped at step {step}, which is saved; to go on: {again}")
    if main:
        trainer.write_log(folder)                                   # again, where a whole run is resumed
        plot_losses(trainer.log, f"{folder}/loss.png")
        print(f"done; {folder}/ holds the model, loss.png, samples.txt and metrics.jsonl. Now: python sample.py --model={folder}")

def plot_losses(entries, path):
    """The losses of a training run over its steps as a picture; entries: the lines of metrics.jsonl, as dicts."""
    figure, axes = canvas(9, 3.2, columns=2)
    for axis, name, title in zip(axes, ("mse", "ce"), ("velocity MSE (denoise)", "cross-entropy (decode)")):
        for series, label in ((name, "training"), (f"heldout_{name}", "held out, averaged weights")):
            axis.plot(*zip(*[(e["step"], e[series]) for e in entries if series in e]), label=label, lw=1.2)
        axis.set(title=title, xlabel="step", yscale="log")
        axis.legend()
    figure.savefig(path, dpi=110)

@contextlib.contextmanager
def interrupts():
    """A list that collects Ctrl-C and SIGTERM, so that the step at hand ends and is saved; a second one ends the program at once."""
    seen = []
    def handle(number, frame):
        if number in seen and "LOCAL_RANK" not in os.environ:       # torchrun may pass one on a second time
            raise KeyboardInterrupt
        seen.append(number)
    with contextlib.ExitStack() as afterwards:                      # which puts the handlers back
        for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
            afterwards.callback(signal.signal, number, signal.signal(number, handle))
        yield seen

def settings(options, changes):
    """(Config of the run, its folder, the command that resumes it) from the command line."""
    if not options.config:
        raise UserError(f"--config=NAME is missing: one of {', '.join(tiny_config.PRESETS)}")
    folder = options.out_dir or f"out/{options.config}"
    processes, same = os.environ.get("LOCAL_WORLD_SIZE"), dataclasses.replace(options, out_dir=folder, resume=True, init="", dry_run=False)
    keys = [f"--{name}={value}".removesuffix("=True") for name, value in vars(same).items() if value != getattr(Options, name)]
    again = shlex.join((["torchrun", f"--nproc_per_node={processes}"] if processes else ["python"]) + ["train.py", *keys])
    if not options.resume:
        if not options.dry_run and (os.path.isfile(folder) or os.path.isdir(folder) and os.listdir(folder)):
            raise UserError(f"{folder} exists and is not overwritten: go on with that run ({again}), or choose another --out_dir")
        os.makedirs(os.path.dirname(os.path.abspath(folder)), exist_ok=True)
        return dataclasses.replace(tiny_config.PRESETS[options.config], **changes), folder, again
    saved = elf.load_config(folder)
    cfg = dataclasses.replace(saved, **changes)
    for name, value in dataclasses.asdict(cfg).items():
        filled_in = value == 0 and name in ("vocab", "steps", "latent_std") or name == "vocab" and cfg.encoder == "scratch"
        if value != getattr(saved, name) and not filled_in and name not in ("data", "encoder"):     # these may have moved
            raise UserError(f"--{name}={value}: the run in {folder} has {getattr(saved, name)}, and --resume changes nothing")
    return dataclasses.replace(saved, data=cfg.data, encoder=cfg.encoder), folder, again

def start_folder(folder, trainer):
    """Puts a new run's folder in place, whole or not at all, unless something has come there in the meantime."""
    try:
        with tempfile.TemporaryDirectory(prefix=".new-run-", dir=os.path.dirname(os.path.abspath(folder))) as fresh:
            os.mkdir(f"{fresh}/run")
            if trainer.cfg.encoder == "scratch" or os.path.isdir(trainer.cfg.encoder):
                trainer.encoder.save(f"{fresh}/run/encoder")
            trainer.save(f"{fresh}/run")
            os.rename(f"{fresh}/run", folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({elf.one_line(error)}); choose another --out_dir") from None

def main(argv):
    given = parse(argv, __doc__, Options(), elf.Config())
    options = Options(**{name: given.pop(name) for name in vars(Options()) if name in given})
    rank, world, device = connect(options.device)
    if rank == 0:                                       # the others wait until the data is tokenised and the encoder trained
        cfg, folder, again = settings(options, given)
        source = tiny_config.encoder_source(folder, cfg) if options.resume else cfg.encoder
        encoder = None if source == "scratch" else tiny_config.load_encoder(source, device, cfg.encoder_dtype)
        cfg, encoder, rows, heldout = load_data(cfg, device, encoder)
        cfg = dataclasses.replace(cfg, steps=cfg.steps or max(round(cfg.epochs * len(rows) / cfg.batch), 1))
    if world > 1:
        shared = [cfg, folder, again, elf.Encoder(encoder.model.cpu(), encoder.tokenizer)] if rank == 0 else [None] * 4
        dist.broadcast_object_list(shared)
        cfg, folder, again, encoder = shared
        encoder.model.to(device)
        cfg, encoder, rows, heldout = load_data(cfg, device, encoder)       # which the first one left tokenised
    trainer = Trainer(cfg, encoder, rows, device, options, rank, world)
    if options.resume:
        trainer.load(folder)
    elif rank == 0 and not options.dry_run:
        start_folder(folder, trainer)
    if rank == 0:
        size, tokens, epoch = sum(p.numel() for p in trainer.model.parameters()), len(rows) * cfg.length, len(rows) / cfg.batch
        print(f"{options.config}: {size:,} parameters on {world} x {device.type}; {tokens:,} training tokens in {len(rows):,} rows, "
              f"an epoch of {epoch:,.1f} steps of {cfg.batch * cfg.length:,} tokens; steps {trainer.step} to {cfg.steps}", flush=True)
    if options.dry_run:
        ids, began = next(iter(batches(rows, cfg, 0, rank, world))), time.time()
        print(f"one step: {trainer.train_step(ids)}, {time.time() - began:.1f} s, at most "
              f"{torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB of GPU memory; no model was written")
    else:
        run_training(trainer, heldout, folder, again, options.keep)
    if world > 1:
        dist.destroy_process_group()

if __name__ == "__main__":
    run(main, sys.argv[1:])
