"""Text from a trained model, and how good it is.

    python sample.py --model=out/tiny                                                  a few texts
    python sample.py --model=out/tiny --n=512 --sampler=ode,sde --steps=4,8,16,32      a table of measures
    python sample.py --model=out/tiny --trace                                          one text taking shape
    python sample.py --model=embedded-language-flows/ELF-B-owt-torch --sde_start=released       released weights
"""
import dataclasses
import datetime
import difflib
import functools
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint

import elf
import tiny_config
from elf import UserError, key

@dataclass(frozen=True)
class Options:
    """Keys, their defaults and meanings; steps, sampler, gamma, w, grid and sde_start take comma lists, to sweep."""
    model: str = key("", "a folder that train.py wrote, or released weights: checkpoint_<step>, a folder with one, or a Hub id")
    config: str = key("", "preset for what released weights don't tell, such as the length (empty: by the Hub id, or owt_b)")
    encoder: str = key("", "folder or Hub id of the encoder, for its tokenizer (empty: the model's)")
    n: int = key(8, "how many texts", at_least=1)
    steps: str = key("", "steps from noise to data, not counting the decode call (empty: the model's sample_steps)")
    sampler: str = key("sde", "sde puts some noise back before each step, ode doesn't")
    gamma: str = key("", "how much noise an SDE step puts back (empty: the model's gamma)")
    w: str = key("", "guidance scale of self-conditioning, 1 is none (empty: the model's w)")
    grid: str = key("logit_normal", "the steps' times: logit_normal, uniform or quantile")
    sde_start: str = key("paper", "an SDE step starts from the state before (paper) or after (released) noise came back")
    seed: int = key(0, "the same seed gives the same texts", at_least=0)
    batch: int = key(128, "texts made together; the texts don't depend on it", at_least=1)
    out: str = key("", "write the texts to this .jsonl file")
    json: str = key("", "write the closing table to this .json file")
    data: str = key("", "a text file to compare the words with (empty: what the model was trained on, if it is there)")
    trace: bool = key(False, "show one text taking shape, step by step, changed tokens in [brackets]")
    plot: str = key("", "draw that as a picture, to this .png file")
    device: str = key("auto", "cpu, cuda, mps, or auto for the best there is")
    dtype: str = key("float32", "precision of the network's blocks: float32 or bfloat16", one_of=("float32", "bfloat16"))
    compile: bool = key(False, "torch.compile: slow to start, then faster")

SWEEPS = {"sampler": str, "steps": int, "gamma": float, "w": float, "grid": str, "sde_start": str}   # take comma lists

# ------------------------------------------------------------------------------------------ command line

def parse(argv, about, *groups):
    """`--key=value` arguments as a dict of texts. On --help prints all keys of the dataclasses and leaves."""
    kinds = {f.name: f.type for group in groups for f in dataclasses.fields(group)}
    if {"-h", "--help"} & set(argv):
        print(about.strip())
        for group in groups:
            print("\n" + group.__doc__)
            for f in dataclasses.fields(group):
                print(f"  --{f.name}={getattr(group, f.name)}".ljust(34), f.metadata["help"])
        raise SystemExit(0)
    values = {}
    for arg in argv:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in kinds:
            raise UserError(f"unknown key {arg}: {nearest(name, kinds)} (--help lists every key)")
        if not equals and kinds[name] is not bool:
            raise UserError(f"--{name} needs a value: --{name}=...")
        values[name] = value if equals else "true"
    return values

def nearest(name, names):
    """What to say of an unknown name."""
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"

def read_value(name, text, kind):
    """The text of a setting as `kind`: int, float, bool or str."""
    text = "0" if name == "latent_std" and text == "auto" else text
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        if kind in (bool, str) or abs(value) < 1e9:                     # which nan and inf are not
            return value
    except (ValueError, KeyError):
        pass
    takes = {int: "a whole number below 1e9", float: "a number below 1e9", bool: "true or false"}[kind]
    raise UserError(f"{name}={text}: takes {takes}")

def override(cfg, values):
    """A copy of a Config (or of another dataclass of settings) with new values, given as texts by name."""
    kinds = {f.name: f.type for f in dataclasses.fields(cfg)}
    if unknown := [name for name in values if name not in kinds]:
        raise UserError(f"unknown key {unknown[0]}: {nearest(unknown[0], kinds)}")
    changed = dataclasses.replace(cfg, **{name: read_value(name, str(value), kinds[name]) for name, value in values.items()})
    elf.check(changed)
    return changed

def run(main, argv):
    """Runs a program: a user's error ends as one line and exit code 2."""
    try:
        main(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except torch.OutOfMemoryError as error:
        print(f"error: {elf.one_line(error)}; try a smaller --micro_batch (or --batch), or --checkpoint_activations", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:                                         # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:                                        # such as a full disk
        print(f"error: {elf.one_line(error)}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, (FileExistsError, NotADirectoryError, PermissionError)) else 1) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(1) from None

def pick_device(name):
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"--device={name}: takes cpu, cuda, mps or auto")
    try:
        return torch.zeros(1, device=best if name == "auto" else name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device={name}: not to be had on this machine ({elf.one_line(error)})") from None

def connect(name):
    """(rank, number of processes, device): where torchrun started several, each has its own GPU and hears the others."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    own_gpu = world > 1 and torch.cuda.is_available() and name in ("auto", "cuda")
    device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}" if own_gpu else name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:                                                       # the others wait while the first tokenises: hours
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(hours=6))
    return rank, world, device

def accelerate(model, device, dtype, compile=False, checkpoint=False):
    """Lets the model's blocks run compiled, in bfloat16, or with their activations recomputed instead of kept.

    All else, the embeddings of t and w, the heads, the loss, stays in float32, and so do the weights, under the same names.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")                      # TF32
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    for block in model.blocks:
        if compile:
            block.forward = torch.compile(block.forward, dynamic=False)
        if dtype == "bfloat16":
            block.forward = torch.autocast(device.type, torch.bfloat16)(block.forward)
        if checkpoint:
            block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)

# ------------------------------------------------------------------------------------------ generation

def seeded(*numbers, device="cpu"):
    """A generator of its own for each tuple of whole numbers: seed, use (0 grid, 1 samples, 2 order, 3 training, 4 held out), ..."""
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))

def start(cfg, seed, ids, device):
    """Starting noise (B, L, D) of the samples `ids`, and the generator of each: no sample depends on the others."""
    generators = [seeded(seed, 1, i) for i in ids]
    shape = torch.empty(len(generators), cfg.length, cfg.latent_dim, device=device)
    return cfg.noise_scale * elf.gaussian(shape, generators), generators

def generate(model, n, seed, batch, grid="logit_normal", steps=32, w=1.0, **how):
    """n samples as token ids (n, L). `how` are further keyword arguments of elf.sample."""
    cfg, device = model.cfg, next(model.parameters()).device
    times = elf.time_grid(cfg, steps, grid, seeded(seed, 0))
    ids = []
    for first in range(0, n, batch):
        z, generators = start(cfg, seed, range(first, min(first + batch, n)), device)
        z = elf.sample(model, z, times, w=w, generator=generators, **how)
        ids += [elf.decode_ids(model, part, w).cpu() for part in z.split(16)]       # few at a time: logits are L x V each
    return torch.cat(ids)

def trace(model, tokenizer, seed, grid, steps, w, **how):
    """One text taking shape: after each step its time and the tokens that the prediction reads as."""
    z, generators = start(model.cfg, seed, [0], next(model.parameters()).device)
    times = elf.time_grid(model.cfg, steps, grid, seeded(seed, 0))
    for t, z, x_hat in elf.trajectory(model, z, times, w=w, generator=generators, **how):
        ids = elf.decode_ids(model, z if t == 1 else x_hat, w)[0].tolist()
        yield t, ["" if i == tokenizer.eos_token_id else tokenizer.decode([i]).replace("\n", "\\n") for i in ids]

def print_trace(lines):
    """The trace as text; tokens that the last step changed stand in brackets."""
    before = None
    for t, tokens in lines:
        print(f"t={t:.3f} ", " ".join(f"[{new}]" if before and new != old else new for new, old in zip(tokens, before or tokens)).rstrip())
        before = tokens

def plot_trace(lines, path):
    """The trace as a picture: one row a step, dark where a token is already what it will be."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    final = lines[-1][1]
    widths = [max(map(len, column)) + 1 for column in zip(*(tokens for _, tokens in lines)) if any(column)]
    places = [sum(widths[:i]) + width / 2 for i, width in enumerate(widths)]
    figure, axis = plt.subplots(figsize=(0.085 * (sum(widths) + 9), 0.22 * len(lines) + 0.1), layout="constrained")
    for row, (t, tokens) in enumerate(lines):
        axis.text(-9, row, f"t = {t:.2f}", fontsize=9, color="0.5", va="center")
        for place, token, last in zip(places, tokens, final):
            axis.text(place, row, token.replace("$", r"\$"), fontsize=9, ha="center", va="center",
                      color="black" if token == last else "tab:orange")
    axis.set(xlim=(-9, sum(widths)), ylim=(len(lines) - 0.5, -0.5))
    axis.axis("off")
    figure.savefig(path, dpi=130)
    plt.close(figure)

def plot_losses(entries, path):
    """The losses of a training run over its steps as a picture; entries: the lines of metrics.jsonl, as dicts."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, name, title in zip(axes, ("mse", "ce"), ("velocity MSE (denoise)", "cross-entropy (decode)")):
        for series, label in ((name, "training"), (f"heldout_{name}", "held out, averaged weights")):
            axis.plot(*zip(*[(e["step"], e[series]) for e in entries if series in e]), label=label, lw=1.2)
        axis.set(title=title, xlabel="step", yscale="log")
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)

# ------------------------------------------------------------------------------------------ measures

def to_text(tokenizer, ids):
    """Token ids (L,) -> text, cut at the first end-of-sequence token."""
    ids = ids.tolist()
    if tokenizer.eos_token_id in ids:
        ids = ids[:ids.index(tokenizer.eos_token_id)]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

def entropy(counts):
    """Entropy in nats of a Counter of tokens."""
    total = sum(counts.values())
    return sum(n / total * math.log(total / n) for n in counts.values())

def token_entropies(rows, eos):
    """(mean entropy per sample, entropy of all samples pooled) over tokens up to the first EOS, in nats."""
    rows = [row[:row.index(eos)] if eos in row else row for row in rows]
    each = [Counter(row) for row in rows if row]
    if not each:
        return 0.0, 0.0
    return sum(map(entropy, each)) / len(each), entropy(sum(each, Counter()))

def measure(tokenizer, rows, texts, reference):
    """The measures of one setting, as the entries of its table row. rows: token ids, texts: the same as text."""
    out = dict(zip(("entropy", "entropy_pooled"), token_entropies(rows, tokenizer.eos_token_id)))
    out["distinct"] = len(set(texts)) / len(texts)
    if reference is not None:
        data_rows, judge = reference
        data = token_entropies(data_rows, tokenizer.eos_token_id)
        out |= dict(zip(("data_entropy", "data_entropy_pooled"), data)) | judge(texts)
    return out

def load_reference(cfg, tokenizer, path, n):
    """What samples are compared with: n texts of the data as token ids, and a function texts -> measures.

    For a model of text it is the file's first 2 MB; None where there is no such file.
    """
    if cfg.data == "tiny":
        texts = tiny_config.heldout_stories()[:n]
        return tokenizer(texts, add_special_tokens=False)["input_ids"], tiny_config.judge_stories
    path = path or tiny_config.local_path(cfg.data)
    if not os.path.isfile(path) or Path(path).suffix in tiny_config.TABLES:
        return None
    text = "".join(itertools.islice(tiny_config.texts(tiny_config.open_data(path)), 20))
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    rows = [ids[i:i + cfg.length] for i in range(0, len(ids) - cfg.length + 1, cfg.length)]
    return rows[::max(len(rows) // n, 1)][:n], lambda texts: tiny_config.judge_text(texts, text)

def table(rows):
    """Rows (dicts) as aligned columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[f"{row[n]:.3f}" if isinstance(row.get(n), float) else str(row.get(n, "")) for n in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells)

# ------------------------------------------------------------------------------------------ the program

def settings(options, cfg):
    """The settings to sample with: every combination of the comma lists, each once."""
    lists = []
    for name, kind in SWEEPS.items():
        default = {"steps": cfg.sample_steps, "gamma": cfg.gamma, "w": cfg.w}.get(name)
        given = getattr(options, name) or str(getattr(Options, name) if default is None else default)
        lists.append([read_value(f"--{name}", value, kind) for value in given.split(",")])
    found = []
    for combination in itertools.product(*lists):
        how = dict(zip(SWEEPS, combination))
        for name, ok, takes in (
                ("steps", how["steps"] >= 1, "1 or more"), ("gamma", how["gamma"] >= 0, "0 or more"), ("w", how["w"] > 0, "more than 0"),
                ("sampler", how["sampler"] in ("ode", "sde"), "ode or sde"),
                ("sde_start", how["sde_start"] in ("paper", "released"), "paper or released"),
                ("grid", how["grid"] in ("logit_normal", "uniform", "quantile"), "logit_normal, uniform or quantile")):
            if not ok:
                raise UserError(f"--{name}={how[name]}: takes {takes}")
        if how["sampler"] == "ode":                         # which has no noise: don't sample the same thing twice
            how |= {"gamma": 0.0, "sde_start": "paper"}
        if how not in found:
            found.append(how)
    return found

def main(argv):
    options = override(Options(), parse(argv, __doc__, Options()))
    if not options.model:
        raise UserError("--model=FOLDER is missing: a folder that train.py wrote, such as out/tiny")
    paths = [os.path.abspath(path) for path in (options.out, options.json, options.plot, options.data) if path]
    if len(set(paths)) < len(paths):
        raise UserError("--out, --json, --plot and --data must be different files")
    for name in ("out", "json", "plot"):
        path = getattr(options, name)
        if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
            raise UserError(f"--{name}={path}: no file can be written there")
    if options.plot and not options.plot.endswith(".png"):
        raise UserError(f"--plot={options.plot}: must end in .png")
    if (options.trace or options.plot) and (options.out or options.json):
        raise UserError("--trace and --plot show one text; --out and --json write many: use one or the other")
    if options.data and not os.path.isfile(options.data):
        raise UserError(f"--data={options.data}: no such file")
    if options.config and options.config not in tiny_config.PRESETS:
        raise UserError(f"--config={options.config}: no such preset; {nearest(options.config, tiny_config.PRESETS)}")
    device = pick_device(options.device)
    model, cfg = elf.load_model(options.model, device, tiny_config.PRESETS.get(options.config))
    accelerate(model, device, options.dtype, options.compile)
    if options.data and cfg.data == "tiny":
        raise UserError("--data is for models of text; a model of the tiny language is judged by its rules")
    sweep = settings(options, cfg)
    if len(sweep) > 1 and (options.out or options.trace or options.plot):
        raise UserError("--out, --trace and --plot take one setting, not a sweep")
    tokenizer = elf.load_tokenizer(options.encoder or elf.encoder_source(options.model, cfg))
    if len(tokenizer) != cfg.vocab:
        raise UserError(f"the model has {cfg.vocab} tokens, its encoder's tokenizer, {tokenizer.name_or_path}, has {len(tokenizer)}")
    if options.trace or options.plot:
        lines = list(trace(model, tokenizer, options.seed, **sweep[0]))
        print_trace(lines)
        return plot_trace(lines, options.plot) if options.plot else None

    reference, lines = load_reference(cfg, tokenizer, options.data, options.n), []
    for how in sweep:
        began = time.time()
        rows = generate(model, options.n, options.seed, options.batch, **how)
        seconds = time.time() - began
        texts = [to_text(tokenizer, row) for row in rows]
        lines.append(how | {"n": options.n, "seconds": seconds} | measure(tokenizer, rows.tolist(), texts, reference))
        if len(sweep) > 1:
            print(f"{len(lines)}/{len(sweep)}", ", ".join(f"{k}={v}" for k, v in how.items()), "|", texts[0][:100], flush=True)
    if len(sweep) == 1:
        print("\n\n".join(texts[:16]) + (f"\n\n... and {len(texts) - 16} more" if len(texts) > 16 else ""))
    print("\n" + table(lines))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            for i, text in enumerate(texts):
                file.write(json.dumps({"id": i, "text": text}, ensure_ascii=False) + "\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(lines, file, indent=1)

if __name__ == "__main__":
    run(main, sys.argv[1:])
