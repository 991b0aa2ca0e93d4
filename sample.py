"""Text from a trained model, and how good it is.

    python sample.py --model=out/tiny                                                  a few texts
    python sample.py --model=out/tiny --n=512 --sampler=ode,sde --steps=4,8,16,32      a table of measures
    python sample.py --model=out/tiny --trace                                          one text taking shape
    python sample.py --model=out/tiny_pair --prompt="bald sieht der alte mann eine rote birne am tor"
    python sample.py --model=embedded-language-flows/ELF-B-owt-torch --n=1000 --eval   released weights, generative perplexity
"""
import argparse
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint

import elf
import tiny_config
from elf import UserError, check, key, loaded, one_line

@dataclass(frozen=True)
class Options:
    """Keys, their defaults and meanings."""
    model: str = key("", "a folder that train.py wrote, or released weights: checkpoint_<step>, a folder with one, or a Hub id")
    config: str = key("", "preset for what released weights don't tell, such as the length (empty: by the Hub id, or owt_b)",
                      one_of=("", *tiny_config.PRESETS))
    encoder: str = key("", "folder or Hub id of the encoder, or of its tokenizer where there is no source (empty: the model's)")
    n: int = key(8, "how many texts", at_least=1)
    seed: int = key(0, "the same seed gives the same texts", at_least=0)
    seeds: int = key(1, "measure with so many seeds, from --seed on; standard errors are then over the seeds", at_least=1)
    batch: int = key(128, "texts made together; the texts don't depend on it", at_least=1)
    prompt: str = key("", "models with a source: the one to translate or to summarise")
    input_file: str = key("", "the same for a file, a source a line; prints a text a line, in order")
    data: str = key("", "what to compare with, and to take sources from (empty: what training held out, if it is there)")
    eval: bool = key(False, "measure generative perplexity too, or BLEU and ROUGE where there is a source")
    judge: str = key("openai-community/gpt2-large", "the causal language model that measures the perplexity: Hub id or folder")
    eval_file: str = key("", "measure these texts instead: .jsonl with `text` (or `generated`) and maybe `target`")
    out: str = key("", "write the texts to this .jsonl file")
    json: str = key("", "write the closing table to this .json file")
    trace: bool = key(False, "show one text taking shape, step by step, changed tokens in [brackets]")
    plot: str = key("", "draw to this .png file: one text taking shape, or the measures of a sweep")
    device: str = key("auto", "cpu, cuda, mps, or auto for the best there is")
    dtype: str = key("float32", "precision of the network's blocks: float32 or bfloat16", one_of=("float32", "bfloat16"))
    compile: bool = key(False, "torch.compile: slow to start, then faster")
    __post_init__ = check

@dataclass(frozen=True)
class Setting:
    """How to sample. Comma lists sweep (--steps=8,16,32). Of steps, gamma, w and cfg the model's own are the real defaults."""
    sampler: str = key("sde", "sde puts some noise back before each step, ode doesn't", one_of=("ode", "sde"))
    steps: int = key(32, "steps from noise to data, not counting the decode call", at_least=1)
    gamma: float = key(1.5, "how much noise an SDE step puts back", at_least=0)
    w: float = key(3.0, "guidance scale of self-conditioning, 1 is none", above=0)
    cfg: float = key(1.0, "guidance scale of the source, where there is one; 1 is none", at_least=0)
    grid: str = key("logit_normal", "the steps' times", one_of=("logit_normal", "uniform", "quantile"))
    sde_start: str = key("paper", "an SDE step starts from the state before (paper) or after (released) noise came back",
                         one_of=("paper", "released"))
    __post_init__ = check

# ------------------------------------------------------------------------------------------ command line

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (--help lists every key)")

def reader(kind, several):
    """How argparse reads a value of a kind (int, float, bool or str), or a comma list of several."""
    def read(text):
        one = json.loads if kind is bool else kind
        text = "0" if kind is float and text == "auto" else text.lower() if kind is bool else text
        return [one(part) for part in text.split(",")] if several else one(text)
    read.__name__ = {int: "whole number", float: "number", bool: "true or false"}.get(kind, "text")       # for its messages
    return read

def parse(argv, about, *groups):
    """The keys that `--key=value` arguments give, fields of the dataclasses. On --help prints all of them and leaves."""
    parser = Parser(description=about, usage="%(prog)s --key=value ...", allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for group in groups:
        part = parser.add_argument_group(group.__doc__.rstrip("."))
        for f in dataclasses.fields(group):
            flag = {"nargs": "?", "const": True} if f.type is bool else {}
            part.add_argument(f"--{f.name}", type=reader(f.type, isinstance(group, Setting)), metavar=str(getattr(group, f.name)),
                              help=f.metadata["help"].replace("%", "%%"), **flag)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [f.name for group in groups for f in dataclasses.fields(group)]
        raise UserError(f"unknown key {unknown[0]}: {nearest(unknown[0].partition('=')[0].strip('-'), names)} (--help lists every key)")
    return vars(given)

def nearest(name, names):
    """What to say of an unknown name."""
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"

USERS_FAULTS = (UserError, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)

def run(main, argv):
    """Runs a program: what the user or the machine got wrong ends as one line, with exit code 2 or 1."""
    try:
        main(argv)
    except BrokenPipeError:                                         # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (UserError, OSError, torch.OutOfMemoryError, KeyboardInterrupt) as fault:
        hint = "; try a smaller --micro_batch or --batch, or --checkpoint_activations" * isinstance(fault, torch.OutOfMemoryError)
        print(f"error: {one_line(fault, 3000) or 'stopped'}{hint}", file=sys.stderr)
        raise SystemExit(2 if isinstance(fault, USERS_FAULTS) else 1) from None

def connect(name):
    """(rank, number of processes, device): where torchrun started several, each has its own GPU and hears the others."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=f"cuda:{os.environ['LOCAL_RANK']}" if world > 1 and name == "cuda" else name).device
    except (RuntimeError, AssertionError) as fault:
        raise UserError(f"--device={name}: takes cpu, cuda, mps or auto, if the machine has it ({one_line(fault, 100)})") from None
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

def start(cfg, seed, numbers, device):
    """Starting noise (B, L, D) of the samples of these numbers, and the generator of each: no sample depends on the others."""
    generators = [seeded(seed, 1, i) for i in numbers]
    shape = torch.empty(len(generators), cfg.length, cfg.latent_dim, device=device)
    return cfg.noise_scale * elf.gaussian(shape, generators), generators

def condition(encoder, rows, cfg):
    """The sources of rows (B, L) as arguments of elf.sample: clean latents (B, L, D), and where they are (B, L)."""
    ids, source, _, _ = tiny_config.unpack(torch.as_tensor(rows, device=encoder.model.device), encoder.tokenizer, cfg)
    latents = [encoder.encode(a, cfg, elf.who_sees(b, b, torch.zeros_like(b[:, 0]))) for a, b in zip(ids.split(16), source.split(16))]
    return {"cond": torch.cat(latents), "cond_mask": source}                # few at a time: masks are L x L each

def follow(model, setting, seed, numbers, encoder=None, rows=None):
    """elf.trajectory of the samples of these numbers; a model with a source takes those of rows (B, L), as the data stores them."""
    how, cfg = asdict(setting), model.cfg
    grid = elf.time_grid(cfg, how.pop("steps"), how.pop("grid"), seeded(seed, 0))
    z, generators = start(cfg, seed, numbers, next(model.parameters()).device)
    sources = condition(encoder, rows, cfg) if cfg.source_length else {}
    return elf.trajectory(model, z, grid, generator=generators, **how, **sources)

def generate(model, setting, seed, numbers, batch, encoder=None, rows=None):
    """The samples of these numbers as lists of token ids, of the whole length, or behind row i's source for sample i."""
    cfg, found = model.cfg, []
    for first in range(0, len(numbers), batch):
        some = numbers[first:first + batch]
        part = None if rows is None else rows[some]
        for _, z, _ in follow(model, setting, seed, some, encoder, part):
            pass
        ids = torch.cat([elf.decode_ids(model, a, setting.w).cpu() for a in z.split(16)])       # few at a time: logits are L x V each
        begin = [0] * len(some) if rows is None else (part < 0).sum(1)                          # a source's ids are stored as ~id
        found += [row[n:n + cfg.length - cfg.source_length] for row, n in zip(ids.tolist(), begin)]
    return found

def trace(model, tokenizer, seed, setting, encoder=None, rows=None):
    """One text taking shape: after each step its time and the tokens that the prediction reads as."""
    begin = 0 if rows is None else (rows[0] < 0).sum()
    for t, z, x_hat in follow(model, setting, seed, [0], encoder, None if rows is None else rows[:1]):
        ids = elf.decode_ids(model, z if t == 1 else x_hat, setting.w)[0, begin:].tolist()
        yield t, ["" if i == tokenizer.eos_token_id else tokenizer.decode([i]).replace("\n", "\\n") for i in ids]

def print_trace(lines):
    """The trace as text; tokens that the last step changed stand in brackets."""
    before = None
    for t, tokens in lines:
        print(f"t={t:.3f} ", " ".join(f"[{new}]" if before and new != old else new for new, old in zip(tokens, before or tokens)).rstrip())
        before = tokens

# ------------------------------------------------------------------------------------------ measures

def until_end(row, eos):
    """The token ids before the first end-of-sequence token."""
    return row[:row.index(eos)] if eos in row else row

def to_text(tokenizer, row):
    """Token ids (a list or a tensor), up to the first end-of-sequence token, as text."""
    ours = tokenizer.mask_token == "<mask>"                                 # of our languages every token shows: nothing is repaired
    row = until_end(torch.as_tensor(row).tolist(), tokenizer.eos_token_id)
    return tokenizer.decode(row, skip_special_tokens=not ours, clean_up_tokenization_spaces=False)

def entropies(rows):
    """(entropy of each row of tokens that isn't empty, entropy of all of them pooled), in nats."""
    def entropy(counts):
        return sum(n / counts.total() * math.log(counts.total() / n) for n in counts.values())
    each = [Counter(row) for row in rows if row]
    return [entropy(counts) for counts in each], entropy(sum(each, Counter()))

def repetition(text):
    """Share of the words that repeat the one before."""
    words = text.split()
    return sum(map(str.__eq__, words, words[1:])) / max(len(words) - 1, 1)

def error(values):
    """The standard error of a mean."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0

class Judge:
    """A causal language model, by which generative perplexity is measured, in float32."""

    def __init__(self, source, device):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        self.tokenizer = loaded("--judge=", source, lambda: AutoTokenizer.from_pretrained(source))
        self.model = loaded("--judge=", source, lambda: AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)).to(device).eval()

    def tokens(self, texts):
        """The texts as the judge's tokens, at most 1,024 of each, or as many as it can see."""
        longest = min(1024, getattr(self.model.config, "max_position_embeddings", 1024))
        return [self.tokenizer.encode(text, add_special_tokens=False)[:longest] for text in texts]

    @torch.no_grad()
    def perplexity(self, rows):
        """exp(mean nats of a token) over rows of tokens, the first of each unscored, and its standard error over the rows.

        Each goes through the judge alone and whole: no padding and no batch that the value could depend on.
        """
        nats, scored, precision = [], [], torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")                               # not TF32, where sampling uses that
        for row in rows:
            if row:
                ids = torch.tensor([row], device=self.model.device)                     # (1, L)
                logits = self.model(input_ids=ids).logits[0, :-1]                       # (L - 1, V)
                nats.append(F.cross_entropy(logits, ids[0, 1:], reduction="sum").item())
                scored.append(len(row) - 1)
        torch.set_float32_matmul_precision(precision)
        if sum(scored) == 0:
            return {}
        mean = sum(nats) / sum(scored)
        spread = error([loss - mean * n for loss, n in zip(nats, scored)]) / np.mean(scored)        # of the mean: a ratio's, linearised
        return {"gen_ppl": math.exp(mean), "gen_ppl_se": math.exp(mean) * float(spread)}

def against(texts, targets, evaluate):
    """Which texts are what they were to be; and evaluate: BLEU and ROUGE, with the paper's settings."""
    exact = {"exact": [float(text == target) for text, target in zip(texts, targets)]}
    if not evaluate:
        return exact
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer
    names = ["rouge1", "rouge2", "rougeL"]
    scores = list(map(RougeScorer(names, use_stemmer=True).score, targets, texts))
    bleu = sacrebleu.BLEU(lowercase=True, effective_order=True).corpus_score(texts, [targets]).score
    return exact | {"bleu": bleu} | {name: [100 * score[name].fmeasure for score in scores] for name in names}

class Reference(NamedTuple):
    """What samples are compared with: texts of the data that training hasn't seen."""
    texts: list
    rows: list                      # the same as token ids
    judge: Callable                 # texts -> measures: numbers, or a list where it is a mean over the texts
    stored: np.ndarray = None       # models with a source: the rows (n, L) that hold it
    inputs: list = None             # the same sources as text

def load_reference(cfg, tokenizer, path="", n=256, evaluate=False):
    """The Reference of n texts, from a path or from what training held out; for a model of text from the first 2 MB. Or None."""
    if cfg.source_length:
        stored, inputs, texts = tiny_config.read_pairs(cfg, tokenizer, path, n)
        rows = [until_end(row[row >= 0].tolist(), tokenizer.eos_token_id) for row in stored]
        return Reference(texts, rows, functools.partial(against, targets=texts, evaluate=evaluate), stored, inputs)
    if cfg.data == "tiny":
        if path:
            raise UserError(f"--data={path}: is for models of text or with a source; a model of the tiny language is judged by its rules")
        texts = list(tiny_config.made("tiny", heldout=True))[:n]
        return Reference(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], tiny_config.judge_stories)
    file = path or tiny_config.local_path(cfg.data)
    if not os.path.isfile(file) or Path(file).suffix in tiny_config.TABLES:
        if path:
            raise UserError(f"--data={path}: no such file, or no text file")
        return None
    text = "".join(row["text"] for row in tiny_config.open_data(file).take(20))
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    rows = [ids[i:i + cfg.length] for i in range(0, len(ids) - cfg.length + 1, cfg.length)]
    rows = rows[::max(len(rows) // n, 1)][:n]
    return Reference([tokenizer.decode(row) for row in rows], rows, functools.partial(tiny_config.judge_text, source=text))

def measure(texts, rows, reference=None, judge=None):
    """The measures of texts, given also as tokens, up to the end; beside each mean over texts its standard error, NAME_se.

    With a judge the tokens are the judge's, and there is its perplexity. What only looks good is marked as degenerate.
    """
    if judge:
        rows, reference = judge.tokens(texts), reference and reference._replace(rows=judge.tokens(reference.texts))
    each, pooled = entropies(rows)
    found = {"entropy": each, "entropy_pooled": pooled, "distinct": len(set(texts)) / len(texts), "length": [len(row) for row in rows],
             "empty": [float(not text.strip()) for text in texts], "repetition": [repetition(text) for text in texts]}
    if reference:
        data_each, data_pooled = entropies(reference.rows)
        found |= {"data_entropy": float(np.mean(data_each or 0.0)), "data_entropy_pooled": data_pooled} | reference.judge(texts)
    out = judge.perplexity(rows) if judge else {}
    for name, values in found.items():
        out |= {name: float(np.mean(values or 0.0)), f"{name}_se": error(values)} if isinstance(values, list) else {name: values}
    if judge and out["length"] >= 512:                  # as long as the paper's samples
        poor = out["entropy"] < 5 or out.get("gen_ppl", 0) > 300
    else:
        poor = pooled < out.get("data_entropy_pooled", 0) - 0.5
    return out | ({"degenerate": True} if poor else {})

def together(found):
    """One row of the table from those of several seeds: means, and their standard errors over the seeds."""
    if len(found) == 1:
        return found[0]
    out = {"seeds": len(found)}
    for name in dict.fromkeys(name for row in found for name in row if not name.endswith("_se")):
        values = [row[name] for row in found if name in row]                    # no perplexity where all texts are empty
        if name in ("n", "tokens", "degenerate"):
            out[name] = values[0]
        else:
            out |= {name: float(np.mean(values))} | ({} if name.startswith(("data_", "seconds")) else {f"{name}_se": error(values)})
    return out

def table(rows):
    """Rows (dicts) as aligned columns, standard errors behind their measures."""
    def cell(row, name):
        value, spread = row.get(name, ""), row.get(f"{name}_se")
        return f"{value:.3f}" + (f" ±{spread:.3f}" if spread is not None else "") if isinstance(value, float) else str(value)
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if not name.endswith("_se")]
    cells = [names] + [[cell(row, name) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells)

# ------------------------------------------------------------------------------------------ pictures

def canvas(width, height, columns=1):
    """A matplotlib figure, for files only, and its axis or axes."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)

def plot_trace(lines, path):
    """The trace as a picture: one row a step, dark where a token is already what it will be."""
    final = lines[-1][1]
    widths = [max(map(len, column)) + 1 for column in zip(*(tokens for _, tokens in lines)) if any(column)]
    places = [sum(widths[:i]) + width / 2 for i, width in enumerate(widths)]
    figure, axis = canvas(0.085 * (sum(widths) + 9), 0.22 * len(lines) + 0.1)
    for row, (t, tokens) in enumerate(lines):
        axis.text(-9, row, f"t = {t:.2f}", fontsize=9, color="0.5", va="center")
        for place, token, last in zip(places, tokens, final):
            axis.text(place, row, token.replace("$", r"\$"), fontsize=9, ha="center", va="center",
                      color="black" if token == last else "tab:orange")
    axis.set(xlim=(-9, sum(widths)), ylim=(len(lines) - 0.5, -0.5))
    axis.axis("off")
    figure.savefig(path, dpi=130)

def plot_sweep(lines, path):
    """The paper's pictures, from the table of a sweep: quality against entropy over w (Figs. 5, 9), or against steps or cfg.

    A curve for each combination of the other settings; hollow points are degenerate.
    """
    quality = next(name for name in ("gen_ppl", "bleu", "valid", "exact", "known_words", "distinct") if any(name in line for line in lines))
    swept = [f.name for f in dataclasses.fields(Setting) if len({line[f.name] for line in lines}) > 1]
    along = next(name for name in ("w", "steps", "cfg", *swept) if name in swept)
    x = along if along != "w" else "entropy" if quality == "gen_ppl" else "entropy_pooled"
    figure, axis = canvas(5.5, 3.8)
    curves = {}
    for line in sorted((line for line in lines if quality in line), key=lambda line: line[along]):
        curves.setdefault(", ".join(f"{name} {line[name]}" for name in swept if name != along), []).append(line)
    for label, curve in curves.items():
        xs, ys = [line[x] for line in curve], [line[quality] for line in curve]
        drawn = axis.errorbar(xs, ys, [line.get(f"{quality}_se", 0) for line in curve], label=label, marker="o", lw=1.2, capsize=2)
        for place in [(a, b) for a, b, line in zip(xs, ys, curve) if line.get("degenerate")]:
            axis.plot(*place, "o", mfc="white", mec=drawn[0].get_color(), zorder=3)
        for line, *place in zip(curve, xs, ys) if along == "w" else ():
            axis.annotate(f"{line['w']:g}", place, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axis.set(xlabel=f"{x}, over w" if along == "w" else x, ylabel=quality)
    if along == "steps":
        axis.set_xscale("log", base=2)
    if len(curves) > 1:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)

# ------------------------------------------------------------------------------------------ the program

def settings(given, cfg):
    """The settings to sample a model with: every combination of the comma lists given, each once; the rest as its Config says.

    An SDE that puts no noise back is the ODE, and is called so.
    """
    base, found = Setting(steps=cfg.sample_steps, gamma=cfg.gamma, w=cfg.w, cfg=cfg.cfg), {}
    if "sde" in given.get("sampler", []) and "gamma" not in given and cfg.gamma == 0:
        raise UserError("--sampler=sde: this model's gamma is 0, which makes it the ODE; add --gamma, such as --gamma=1.5")
    for values in itertools.product(*given.values()):
        setting = replace(base, **dict(zip(given, values)))
        if setting.sampler == "ode" or setting.gamma == 0 or setting.steps == 1:        # nothing puts noise back: all the same
            setting = replace(setting, sampler="ode", gamma=0.0, sde_start="paper")
        found[setting if cfg.source_length else replace(setting, cfg=1.0)] = None
    return list(found)

def read_lines(option, path):
    """The lines of a text file. Raises UserError where one is empty, or all."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")     # splitlines would split at more
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{option}{path}: not to be read as UTF-8 text ({one_line(fault)})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UserError(f"{option}{path}: line {number} is empty")
    return lines

def read_samples(path):
    """(texts made elsewhere, from a .jsonl file; what each was to be, or None where that isn't said)."""
    texts, targets = [], []
    for number, line in enumerate(read_lines("--eval_file=", path), start=1):
        try:
            entry = json.loads(line)
            texts.append(entry["text"] if "text" in entry else entry["generated"])
            targets += [entry["target"]] if "target" in entry else []
            if not isinstance(texts[-1], str) or not all(isinstance(text, str) for text in targets[-1:]):
                raise TypeError("text and target are strings")
        except (ValueError, TypeError) as fault:
            raise UserError(f"--eval_file={path}: line {number} is no JSON object with a text ({one_line(fault)})") from None
        except KeyError:
            raise UserError(f"--eval_file={path}: line {number} lacks the key text (or generated); it has {', '.join(entry)}") from None
        if len(targets) not in (0, number):
            has = "has a" if "target" in entry else "lacks the"
            raise UserError(f"--eval_file={path}: line {number} {has} target, unlike the lines before")
    return texts, targets or None

CLASHES = {"eval_file": "model prompt input_file data out plot trace", "trace": "out json eval",
           "prompt": "input_file data eval json plot", "input_file": "data eval json plot"}

def check_files(options):
    """Refuses what cannot be written, and keys that don't go together, before any work."""
    taken = [os.path.abspath(path) for path in (options.data, options.input_file, options.eval_file) if path]
    for name in ("out", "json", "plot"):
        path = getattr(options, name)
        if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
            raise UserError(f"--{name}={path}: no file can be written there")
        if path and os.path.abspath(path) in taken:
            raise UserError(f"--{name}={path}: what is read and what is written must be different files")
        taken.append(os.path.abspath(path))
    for name, others in CLASHES.items():
        if clash := [other for other in others.split() if getattr(options, name) and getattr(options, other)]:
            raise UserError(f"--{name} and --{clash[0]} don't go together")
    if options.plot and not options.plot.endswith(".png"):
        raise UserError(f"--plot={options.plot}: must end in .png")

def measure_file(options, device):
    """The row of the table for texts made elsewhere: by their targets, if they have any, and by a judge. Tokens are words."""
    texts, targets = read_samples(options.eval_file)
    words = [text.split() for text in targets or []]
    reference = Reference(targets, words, functools.partial(against, targets=targets, evaluate=True)) if targets else None
    judge = Judge(options.judge, device) if options.eval or not targets else None
    found = measure(texts, [text.split() for text in texts], reference, judge)
    return {"file": options.eval_file, "n": len(texts), "tokens": options.judge if judge else "words"} | found

def write_texts(texts, reference, path):
    """Writes texts to a .jsonl file, a line each, with the source and the target that they were made from, if any."""
    if path:
        columns = {"text": texts} | ({"input": reference.inputs, "target": reference.texts} if reference and reference.inputs else {})
        entries = [{"id": i} | {name: column[i] for name, column in columns.items() if column} for i in range(len(texts))]
        Path(path).write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")

def report(lines, options):
    """Prints the table, and writes and draws it where that was asked for."""
    print("\n" + table(lines))
    if options.json:
        Path(options.json).write_text(json.dumps(lines, indent=1))
    if options.plot:
        plot_sweep(lines, options.plot)

def load(options, given, device):
    """(model, settings to sample it with, tokenizer, encoder or None, Reference or None, whether the user gave the sources)."""
    model, cfg = elf.load_model(options.model, device, tiny_config.PRESETS.get(options.config))
    released = not os.path.isfile(f"{options.model}/config.json")
    if released and cfg.source_length and not (options.data or options.prompt or options.input_file):
        raise UserError("--data is missing, pairs that this model wasn't trained on (the README names some); or --prompt, --input_file")
    accelerate(model, device, options.dtype, options.compile)
    source, ways = options.encoder or tiny_config.encoder_source(options.model, cfg), settings(given, cfg)
    inputs = [options.prompt] if options.prompt else read_lines("--input_file=", options.input_file) if options.input_file else None
    if inputs and cfg.source_length == 0:
        raise UserError("--prompt and --input_file are for a model with a source, such as tiny_pair's; this one has none")
    if len(ways) * options.seeds > 1 and (inputs or options.out or options.trace):
        raise UserError("--out, --trace, --prompt and --input_file take one setting and one seed, not a sweep")
    if len(ways) == 1 and options.plot and not options.trace:
        raise UserError("--plot draws a sweep, such as --steps=8,16,32, or with --trace one text taking shape")
    encoder = tiny_config.load_encoder(source, device, cfg.encoder_dtype) if cfg.source_length else None
    tokenizer = encoder.tokenizer if encoder else tiny_config.load_tokenizer(source)
    if len(tokenizer) != cfg.vocab:
        raise UserError(f"the model has {cfg.vocab} tokens, its encoder's tokenizer, {tokenizer.name_or_path}, has {len(tokenizer)}")
    if inputs:
        ids = tokenizer(inputs, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        stored = np.array([tiny_config.stored(row, [], tokenizer.eos_token_id, cfg) for row in ids])
        reference = Reference([], [], None, stored, inputs)
    else:
        reference = load_reference(cfg, tokenizer, options.data, options.n, options.eval)
    return model, ways, tokenizer, encoder, reference, bool(inputs)

def sweep(options, model, ways, tokenizer, encoder, reference, judge, rank, world):
    """Samples with each of the settings and seeds, each process making a share of the texts. Returns the table, which only the
    first process has, and the last setting's texts."""
    lines, stored = [], reference and reference.stored
    n = options.n if stored is None else len(stored)
    mine = np.array_split(range(n), world)[rank].tolist()
    for way in ways:
        found = []
        for seed in range(options.seed, options.seed + options.seeds):
            began = time.time()
            shares = [generate(model, way, seed, mine, options.batch, encoder, stored)] * world
            if world > 1:
                dist.all_gather_object(shares, shares[0])
            rows = [until_end(row, tokenizer.eos_token_id) for share in shares for row in share]
            seconds, texts = time.time() - began, [to_text(tokenizer, row) for row in rows]
            if rank == 0 and (reference is None or reference.judge):
                about = {"n": n, "seconds": seconds, "tokens": options.judge if judge else "the model's"}
                found.append(about | measure(texts, rows, reference, judge))
        if found:
            lines.append(asdict(way) | together(found))
        if found and len(ways) > 1:
            print(f"{len(lines)}/{len(ways)}", ", ".join(f"{k}={v}" for k, v in asdict(way).items()), "|", texts[0][:100], flush=True)
    return lines, texts

def main(argv):
    given = parse(argv, __doc__, Options(), Setting())
    if not given.get("prompt", "-").strip():
        raise UserError("--prompt is empty: give it a source")
    options = Options(**{name: given.pop(name) for name in vars(Options()) if name in given})
    check_files(options)
    if not (options.model or options.eval_file):
        raise UserError("--model=FOLDER is missing: a folder that train.py wrote, such as out/tiny")
    rank, world, device = connect(options.device)
    if options.eval_file:
        return report([measure_file(options, device)], options) if rank == 0 else None
    model, ways, tokenizer, encoder, reference, translate = load(options, given, device)
    if options.trace and rank > 0:
        return
    if options.trace:
        lines = list(trace(model, tokenizer, options.seed, ways[0], encoder, reference and reference.stored))
        print_trace(lines)
        return plot_trace(lines, options.plot) if options.plot else None
    judge = Judge(options.judge, device) if options.eval and not encoder and rank == 0 else None
    lines, texts = sweep(options, model, ways, tokenizer, encoder, reference, judge, rank, world)
    if rank == 0:
        write_texts(texts, reference, options.out)
        if translate:
            print("\n".join(" ".join(text.split()) for text in texts))
        elif len(ways) == 1:
            shown = texts[:16] if not encoder else [
                f"{source}\n-> {text}" + f"\n   (right: {target})" * (text != target)
                for source, text, target in zip(reference.inputs[:16], texts, reference.texts)]
            print("\n\n".join(shown) + (f"\n\n... and {len(texts) - 16} more" if len(texts) > 16 else ""))
        if lines:
            report(lines, options)
    if world > 1:
        dist.destroy_process_group()

if __name__ == "__main__":
    run(main, sys.argv[1:])
