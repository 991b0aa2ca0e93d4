"""Trains an ELF.

    python train.py --config=tiny                           a laptop, five minutes, no network
    python train.py --config=tiny_text --data=FILE          the same on your own text
    python train.py --config=tiny --resume                 goes on where a run stopped

Everything a run writes lies in out/NAME/; python sample.py --model=out/NAME makes texts from it.
"""
import dataclasses
import hashlib
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

import elf
import tiny_config
from elf import UserError, key
from sample import generate, load_reference, measure, nearest, override, parse, pick_device, run, seeded

PRESETS = elf.PRESETS | tiny_config.PRESETS


@dataclass(frozen=True)
class Options:
    """Keys of a run, their defaults and meanings."""
    config: str = key("", f"preset: {', '.join(PRESETS)}; every key of the second list changes one value of it")
    out_dir: str = key("", "folder to write to (empty: out/ and the preset's name)")
    resume: bool = key(False, "go on with the run in out_dir, with exactly the weights it would have had")
    device: str = key("auto", "cpu, cuda, mps, or auto for the best there is")


# ------------------------------------------------------------------------------------------ data


def load_data(cfg, device, folder=None):
    """(cfg with its open values filled in, encoder, training ids (N, L), held-out ids (M, L)).

    folder: that of a run to be resumed, which keeps the encoder it trained.
    """
    text = None if cfg.data == "tiny" else tiny_config.read_text(cfg.data)
    source = elf.own_encoder(folder) if folder and cfg.encoder == "scratch" else cfg.encoder
    encoder = None if source == "scratch" else elf.load_encoder(source, device)
    if cfg.data == "tiny":          # short texts: one a row, filled up with EOS, which the model learns to write too
        texts = tiny_config.training_stories()
        tokenizer = encoder.tokenizer if encoder else tiny_config.word_tokenizer(texts)
        train, heldout = (fill(tokenizer, rows, cfg.length) for rows in (texts, tiny_config.heldout_stories()))
    else:                           # a long text: packed, that is cut into blocks; the incomplete last one is left out
        tokenizer = encoder.tokenizer if encoder else tiny_config.byte_tokenizer(text, cfg.vocab)
        ids = torch.tensor(tiny_config.encode(tokenizer, text) + [tokenizer.eos_token_id])
        if len(ids) < 4 * cfg.length:
            raise UserError(f"--data={cfg.data}: {len(ids)} tokens are too few; four blocks of --length={cfg.length} are needed, "
                            "as three are held out")
        blocks = ids[:len(ids) // cfg.length * cfg.length].view(-1, cfg.length)
        n_heldout = max(len(blocks) // 20, 3)
        train, heldout = blocks[:-n_heldout], blocks[-n_heldout:]

    if encoder is None:
        print("training a small encoder on the data, to be frozen ...", flush=True)
        model = tiny_config.train_encoder(train, tokenizer, cfg)
        encoder = elf.Encoder(model.to(device), tokenizer)
    return fit(cfg, encoder, train), encoder, train, heldout


def fill(tokenizer, texts, length):
    """Texts as one tensor of token ids (N, L), each filled up with EOS."""
    rows = tokenizer(texts)["input_ids"]
    if (longest := max(map(len, rows))) >= length:
        raise UserError(f"--length={length}: the longest text has {longest} tokens, and an end must fit behind it")
    return torch.tensor([row + [tokenizer.eos_token_id] * (length - len(row)) for row in rows])


def fit(cfg, encoder, ids):
    """Fills in what cfg leaves open, the vocabulary and the latents' mean and std, and checks what it doesn't."""
    if cfg.encoder == "scratch":                # a tokenizer trained on little text has fewer tokens than it may have
        cfg = dataclasses.replace(cfg, vocab=min(cfg.vocab, len(encoder.tokenizer)))
    vocab, width = len(encoder.tokenizer), encoder.model.config.hidden_size
    for name, value in (("vocab", vocab), ("latent_dim", width)):
        if getattr(cfg, name) not in (0, value):
            raise UserError(f"--{name}={getattr(cfg, name)}: the encoder has {value}")
    cfg = dataclasses.replace(cfg, vocab=vocab)
    if cfg.latent_std == 0:
        raw = dataclasses.replace(cfg, latent_mean=0.0, latent_std=1.0)
        x = torch.cat([encoder.encode(rows.to(encoder.model.device), raw) for rows in ids[:2048].split(64)])
        cfg = dataclasses.replace(cfg, latent_mean=x.mean().item(), latent_std=x.std().item())
    return cfg


@lru_cache(2)
def shuffled(n, epoch, seed):
    return torch.randperm(n, generator=seeded(seed, 2, epoch))


def batch_rows(step, batch, n, seed):
    """Which of the n rows are the batch of a step: a pure function, so there's no position to lose on resume."""
    places = range(step * batch, (step + 1) * batch)
    return torch.stack([shuffled(n, place // n, seed)[place % n] for place in places])


# ------------------------------------------------------------------------------------------ optimiser


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al. 2024): all directions of a matrix move equally fast.

    For 2-D weights only. Weights of one shape are stacked and orthogonalised together.
    """

    def __init__(self, params, lr, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for (fan_out, fan_in), params in shapes.items():
                grads = torch.stack([p.grad for p in params])                   # (n, fan_out, fan_in)
                moments = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
                torch._foreach_lerp_(moments, list(grads), 1 - group["momentum"])
                update = orthogonal(grads.lerp(torch.stack(moments), group["momentum"]))    # Nesterov
                scale = math.sqrt(max(1, fan_out / fan_in))
                torch._foreach_add_(params, list(update), alpha=-group["lr"] * scale)


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


def make_optimizers(model, cfg):
    """Muon on the 2-D weights, Adam on biases, norms and learned tokens; each with its full learning rate."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    adam_lr = cfg.adam_lr or cfg.lr
    return [(Muon(matrices, cfg.lr), cfg.lr), (torch.optim.Adam(others, adam_lr, betas=(0.9, 0.999), eps=1e-8), adam_lr)]


def schedule(step, cfg):
    """Share of the learning rate at a step: up from 0, constant, down to 0."""
    up, down = cfg.warmup * cfg.steps, cfg.cooldown * cfg.steps
    return min(1, (step + 1) / up if up else 1, (cfg.steps - step) / down if down else 1)


def make_average(model, decay):
    """The running average of the weights. Warmed up: early on a long average would still be the initial weights."""
    @torch.no_grad()
    def average(averages, currents, n):
        torch._foreach_lerp_(averages, currents, 1 - min(decay, (1 + n.item()) / (10 + n.item())))
    return AveragedModel(model, multi_avg_fn=average)


# ------------------------------------------------------------------------------------------ checkpoints


class Trainer:
    """All the state of a run, its checkpoints, and its one step."""

    def __init__(self, cfg, encoder, ids, device):
        torch.manual_seed(cfg.seed)
        self.cfg, self.encoder, self.ids, self.device, self.step = cfg, encoder, ids, device, 0
        self.data = fingerprint(ids)
        self.model = elf.ELF(cfg).to(device)
        self.average = make_average(self.model, cfg.ema)
        self.optimizers = make_optimizers(self.model, cfg)

    def state(self):
        return {"step": self.step, "data": self.data, "model": self.model.state_dict(),
                "average": self.average.state_dict(), "optimizers": [o.state_dict() for o, _ in self.optimizers]}

    def save(self, folder):
        """model.safetensors to sample from, state.pt to go on from."""
        elf.save_model(folder, self.average.module.state_dict(), self.cfg)
        elf.write_safely(f"{folder}/state.pt", lambda path: torch.save(self.state(), path))

    def load(self, folder):
        path = f"{folder}/state.pt"
        if not os.path.isfile(path):
            raise UserError(f"{folder}: no state.pt, so nothing to go on from; choose another --out_dir")
        try:
            if not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip(): # what torch.save writes, with sums
                raise RuntimeError
            state = torch.load(path, map_location="cpu", weights_only=True)     # runs no code from the file
        except (RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError):
            raise UserError(f"{path}: refused, as it is damaged or holds more than plain tensors and numbers") from None
        if not isinstance(state, dict) or state.keys() != self.state().keys():
            raise UserError(f"{path}: not a checkpoint of this program")
        if state["data"] != self.data:
            raise UserError(f"{path}: this run was trained on other data; --data={self.cfg.data} has changed since")
        try:
            self.model.load_state_dict(state["model"])
            self.average.load_state_dict(state["average"])
            for (optimizer, _), saved in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(saved)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{path}: does not fit config.json ({elf.one_line(error)})") from None
        self.step = state["step"]

    def train_step(self):
        """One step of the optimisers; returns its figures. The random numbers depend on seed and step alone."""
        cfg = self.cfg
        rows = batch_rows(self.step, cfg.batch, len(self.ids), self.cfg.seed)
        loss, mse, ce = self.loss(self.model, self.ids[rows], seeded(self.cfg.seed, 3, self.step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), cfg.clip)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):        # before it reaches the weights
            raise Stopped(f"step {self.step + 1} has loss {loss.item()} and gradient norm {norm.item()}: not finite. "
                          "The last good checkpoint is kept; start anew with a smaller --lr and another --out_dir")
        for optimizer, lr in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr * schedule(self.step, cfg)
            optimizer.step()
            optimizer.zero_grad()
        self.average.update_parameters(self.model)
        self.step += 1
        return {"loss": loss.item(), "mse": mse.item(), "ce": ce.item(), "grad_norm": norm.item(),
                "lr": cfg.lr * schedule(self.step - 1, cfg)}

    def loss(self, model, ids, generator):
        """flow_loss of a batch of ids (B, L), all positions counted."""
        ids = ids.to(self.device)
        draws = elf.Draws(*(d.to(self.device) for d in elf.draw(self.cfg, len(ids), generator)))
        return elf.flow_loss(model, self.encoder.encode(ids, self.cfg), ids, torch.ones_like(ids, dtype=torch.bool), draws)

    @torch.no_grad()
    def heldout_loss(self, ids):
        """MSE and CE of the averaged weights on up to four batches of held-out ids, with the same draws each time."""
        batches = [rows for rows in ids.split(self.cfg.batch)[:4] if len(rows) >= 3]
        losses = [self.loss(self.average.module, rows, seeded(self.cfg.seed, 4, i)) for i, rows in enumerate(batches)]
        _, mse, ce = torch.tensor(losses).mean(0).tolist()
        return {"heldout_mse": mse, "heldout_ce": ce}


class Stopped(Exception):
    """The run ends before its last step; the programme says why and leaves with 1."""


def fingerprint(ids):
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------ logs


def read(path):
    return Path(path).read_text(encoding="utf-8", errors="replace") if os.path.isfile(path) else ""


def append(path, text):
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


class Log:
    """metrics.jsonl, one line per entry, and samples.txt; a resumed run drops what comes after the step it goes on from."""

    def __init__(self, folder, step):
        self.metrics, self.samples = f"{folder}/metrics.jsonl", f"{folder}/samples.txt"
        entries = re.findall(r'(?m)^({"step": (\d+), .*}\n)', read(self.metrics))
        blocks = re.findall(r"(?ms)^(--- step (\d+)\n.*?)(?=^--- step \d+\n|\Z)", read(self.samples))
        for path, parts in ((self.metrics, entries), (self.samples, blocks)):
            kept = "".join(part for part, at in parts if int(at) <= step)
            elf.write_safely(path, lambda new: Path(new).write_text(kept, encoding="utf-8"))

    def write(self, **entry):
        append(self.metrics, json.dumps(entry) + "\n")

    def show(self, step, figures, texts):
        """Logs held-out figures and some samples, and prints the figures and two samples."""
        self.write(step=step, **figures)
        append(self.samples, f"--- step {step}\n" + "\n".join(texts[:8]) + "\n")
        tqdm.write(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
        tqdm.write("\n".join(f"  | {line}" for text in texts[:2] for line in text.splitlines()))

    def plot(self, path):
        """The losses over the steps as a picture."""
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        entries = [json.loads(line) for line in read(self.metrics).splitlines()]
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        for axis, name, title in zip(axes, ("mse", "ce"), ("velocity MSE (denoise)", "cross-entropy (decode)")):
            for series, label in ((name, "training"), (f"heldout_{name}", "held out, averaged weights")):
                axis.plot(*zip(*[(e["step"], e[series]) for e in entries if series in e]), label=label, lw=1.2)
            axis.set(title=title, xlabel="step", yscale="log")
            axis.legend()
        figure.savefig(path, dpi=110)
        plt.close(figure)


# ------------------------------------------------------------------------------------------ the program


def evaluate(trainer, heldout, reference, n, steps):
    """Held-out losses and n samples of the averaged weights: (figures, texts)."""
    cfg, tokenizer = trainer.cfg, trainer.encoder.tokenizer
    rows = generate(trainer.average.module, n, cfg.seed, 128, steps=steps, sampler="sde", gamma=cfg.gamma, w=cfg.w)
    texts = [elf.to_text(tokenizer, row) for row in rows]
    return trainer.heldout_loss(heldout) | measure(tokenizer, rows.tolist(), texts, reference), texts


def run_training(trainer, heldout, folder, again):
    """The training loop, from the trainer's step to the last one; `again` is the command that resumes it."""
    cfg, log, first, began = trainer.cfg, Log(folder, trainer.step), trainer.step, time.time()
    eval_every = cfg.eval_every or max(cfg.steps // 10, 1)
    reference = load_reference(cfg, trainer.encoder.tokenizer, "", 256)
    bar = tqdm(total=cfg.steps, initial=first, disable=None, unit="step")            # a bar on terminals only
    with Interrupts() as interrupts:
        while trainer.step < cfg.steps:
            figures = trainer.train_step()
            step, rate = trainer.step, (trainer.step - first) / (time.time() - began)       # steps/s
            last, tokens_per_s = step == cfg.steps, round(rate * cfg.batch * cfg.length)
            bar.update()
            bar.set_postfix_str(f"loss {figures['loss']:.3f}, {tokens_per_s:,} tokens/s")
            if step - first == 10:
                tqdm.write(f"about {(cfg.steps - step) / rate / 60:.1f} minutes to go at this pace")
            if step % max(cfg.steps // 50, 1) == 0 or last:
                log.write(step=step, **figures, tokens_per_s=tokens_per_s)
                if bar.disable:
                    print(f"step {step}/{cfg.steps}: mse {figures['mse']:.3f}, ce {figures['ce']:.3f}, {tokens_per_s:,} tokens/s", flush=True)
            if step % eval_every == 0 or last:
                log.show(step, *evaluate(trainer, heldout, reference, *((256, cfg.sample_steps) if last else (32, 16))))
            if step % eval_every == 0 or last or interrupts:
                trainer.save(folder)
            if interrupts and not last:
                raise Stopped(f"stopped at step {step}, which is saved; to go on: {again}")
    bar.close()
    log.plot(f"{folder}/loss.png")


class Interrupts(list):
    """Collects Ctrl-C and SIGTERM, so that the step at hand ends and is saved; a second one ends the program at once."""

    def __enter__(self):
        def handle(number, frame):
            self.append(number)
            signal.signal(number, self.before[number])
        self.before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def settings(argv):
    """(options, Config of the run, its folder, the command that resumes it) from the command line."""
    given = parse(argv, __doc__, Options(), elf.Config())
    mine = {f.name for f in dataclasses.fields(Options)}
    options = override(Options(), {name: value for name, value in given.items() if name in mine})
    changes = {name: value for name, value in given.items() if name not in mine}
    if options.config not in PRESETS:
        raise UserError(f"--config={options.config}: no such preset; {nearest(options.config, PRESETS)}")
    folder = options.out_dir or f"out/{options.config}"
    again = shlex.join(["python", "train.py", f"--config={options.config}", f"--out_dir={folder}", "--resume"])
    if not options.resume:
        if os.path.isfile(folder) or os.path.isdir(folder) and os.listdir(folder):
            raise UserError(f"{folder} exists and is not overwritten: go on with that run ({again}), or choose another --out_dir")
        cfg = override(PRESETS[options.config], changes)
        try:
            os.makedirs(os.path.dirname(os.path.abspath(folder)), exist_ok=True)
        except OSError as error:
            raise UserError(f"--out_dir={folder} cannot be made ({error.strerror})") from None
        return options, cfg, folder, again
    saved = elf.load_config(folder)
    cfg = override(saved, changes)
    for name, value in dataclasses.asdict(cfg).items():
        filled_in = value == 0 or name == "vocab" and cfg.encoder == "scratch"      # by the run, in its config.json
        if value != getattr(saved, name) and not filled_in and name != "data":      # other data are known by their sum
            raise UserError(f"--{name}={value}: the run in {folder} has {getattr(saved, name)}, and --resume changes nothing")
    return options, dataclasses.replace(saved, data=cfg.data), folder, again


def start_folder(folder, encoder, trainer):
    """Puts a new run's folder in place, whole or not at all, unless something has come there in the meantime."""
    fresh = tempfile.mkdtemp(prefix=".new-run-", dir=os.path.dirname(os.path.abspath(folder)))
    try:
        encoder.save(f"{fresh}/encoder")
        trainer.save(fresh)
        os.chmod(fresh, 0o755)
        os.rename(fresh, folder)
    except OSError as error:
        shutil.rmtree(fresh)
        raise UserError(f"{folder} cannot be written ({elf.one_line(error)}); choose another --out_dir") from None


def main(argv):
    options, cfg, folder, again = settings(argv)
    device = pick_device(options.device)
    cfg, encoder, ids, heldout = load_data(cfg, device, folder if options.resume else None)
    if cfg.steps == 0:
        cfg = dataclasses.replace(cfg, steps=max(round(cfg.epochs * len(ids) / cfg.batch), 1))
    trainer = Trainer(cfg, encoder, ids, device)
    if options.resume:
        trainer.load(folder)
    else:
        start_folder(folder, encoder, trainer)
    print(f"{options.config}: {sum(p.numel() for p in trainer.model.parameters()):,} parameters on {device}, "
          f"{ids.numel():,} training tokens in {len(ids):,} rows, {cfg.batch * cfg.length:,} tokens a step, "
          f"steps {trainer.step} to {cfg.steps}", flush=True)
    try:
        run_training(trainer, heldout, folder, again)
    except Stopped as why:
        print(why, file=sys.stderr)
        raise SystemExit(1) from None
    print(f"done; {folder}/ holds the model, loss.png, samples.txt and metrics.jsonl. Now: python sample.py --model={folder}")


if __name__ == "__main__":
    run(main, sys.argv[1:])
