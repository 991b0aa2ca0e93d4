"""What a laptop needs to run ELF offline: tiny languages with exact checkers, and a small encoder.

`tiny` learns a language of short stories that is written down here, so that every sample can be judged exactly: it
obeys all the rules or it doesn't. `tiny_pair` translates from one such language to another, `tiny_text` learns any
text file. All train a small T5 encoder from scratch first and freeze it, as full-size runs freeze a pretrained one.
"""
import functools
import glob
import hashlib
import http.client
import os
import random
import re
import tempfile
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import elf
from elf import Config, UserError, loaded, one_line, write_safely

TINY = Config(
    data="tiny", encoder="scratch", encoder_steps=1500, encoder_lr=0.005, encoder_warmup=0.0135, vocab=0, length=25,
    latent_dim=64, latent_std=0.0, hidden=96, depth=4, heads=3, bottleneck=48, prefix=2, noise_scale=1.0, decode_noise_scale=1.0,
    batch=64, steps=1200, lr=0.01, adam_lr=0.003, warmup=0.03, cooldown=0.33, ema=0.998, gamma=1.5, w=2.0)
TINY_PAIR = replace(TINY, data="tiny_pair", encoder_steps=3000, length=24, source_length=11, hidden=128, heads=4, steps=800,
                    sample_steps=16, gamma=0.0, w=1.0)
PRESETS = elf.PRESETS | {
    "tiny": TINY, "tiny_pair": TINY_PAIR, "tiny_pair_noisy": replace(TINY_PAIR, data="tiny_pair_noisy"), "tiny_text": replace(
        TINY, data="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        encoder_steps=2500, encoder_lr=0.003, encoder_warmup=0.2, vocab=4096, length=64)}

# ------------------------------------------------------------------------------------------ the stories
# A story: someone meets with a mishap, suffers it, and undoes it.
#   mia lost two red kites at the pond . she looked for them all day . mia found the red kites at noon .
# Rules that reach across it: the name comes back; the colour and the thing come back, in the same number; she/he
# fits the name; it/them fits the number; what is done in the end undoes what happened at first.

NAMES = {name: "she" for name in "mia ana eva zoe ida lea".split()} | {
    name: "he" for name in "tom ben max leo sam jim".split()}
MISHAPS = {"lost": ("looked for", "found"), "broke": ("cried over", "mended"), "sold": ("longed for", "rebought"),
           "stained": ("worried about", "washed"), "lent": ("waited for", "reclaimed"), "buried": ("dreamed of", "unearthed")}
NUMBERS = {"one": "it", "two": "them", "three": "them"}
COLOURS = "red blue green white black yellow".split()
THINGS = {"kite": "kites", "ball": "balls", "book": "books", "ring": "rings", "coat": "coats", "lamp": "lamps",
          "drum": "drums", "doll": "dolls"}
PLACES = ["at the pond", "in the barn", "by the gate", "on the hill", "near the mill", "under the oak", "at home", "at school"]
WHILES = ["all day", "all night", "every day", "for weeks", "in secret", "with sighs"]
TIMES = ["at noon", "at last", "in spring", "today"]
SLOTS = [list(NAMES), list(MISHAPS), list(NUMBERS), COLOURS, list(THINGS), PLACES, WHILES, TIMES]

def story(name, mishap, number, colour, thing, place, during, time):
    """The one story for a choice of each slot."""
    suffered, undone = MISHAPS[mishap]
    thing = thing if number == "one" else THINGS[thing]
    return (f"{name} {mishap} {number} {colour} {thing} {place} . {NAMES[name]} {suffered} {NUMBERS[number]} {during} . "
            f"{name} {undone} the {colour} {thing} {time} .")

def is_story(text):
    """Whether a text is a story of the language: what can be read off it for each slot gives this very story."""
    chosen = [[option for option in slot if re.search(rf"\b{option}s?\b", text)] for slot in SLOTS]     # kite or kites
    return all(chosen) and story(*(options[0] for options in chosen)) == text

def judge_stories(texts):
    """Exact measures: whether each text is valid, and of the valid ones the share that training never saw."""
    valid = [is_story(text) for text in texts]
    novel = sum(text not in made("tiny") for text, ok in zip(texts, valid) if ok)
    return {"valid": list(map(float, valid)), "novel": novel / max(sum(valid), 1)}

# ------------------------------------------------------------------------------------------ the pairs
# A sentence of something like German, and its one translation into something like English.
#   gestern haben die armen kinder ein rotes schloss im park gekauft  ->  the poor children bought a red lock in the park yesterday
# A dictionary won't do: the words move; verb and number agree, a or an fits the next word; teacher and girl have one form
# for both numbers; and four nouns mean one thing to who handles them and another to who looks at them.

WHEN = {"gestern": "yesterday", "neulich": "recently", "damals": "then"} | {     # past, present, future by threes
    "jetzt": "now", "heute": "today", "immer": "always"} | {"morgen": "tomorrow", "bald": "soon", "später": "later"}
WHO = {"frau": "die frauen woman women", "mann": "der männer man men", "kind": "das kinder child children",
       "dieb": "der diebe thief thieves", "lehrer": "der lehrer teacher teachers", "nachbarin": "die nachbarinnen neighbour neighbours",
       "mädchen": "das mädchen girl girls", "könig": "der könige king kings"}
LIKE = {"alt": "old", "jung": "young", "klein": "small", "arm": "poor", "reich": "rich", "groß": "tall"}
DOES = {"kaufen": "gekauft kauft bought buys buy", "tragen": "getragen trägt carried carries carry",
        "finden": "gefunden findet found finds find", "sehen": "gesehen sieht saw sees see",
        "malen": "gemalt malt painted paints paint", "zeichnen": "gezeichnet zeichnet drew draws draw"}
LOOKS = ("sehen", "malen", "zeichnen")
HOW_MANY = {"ein": "a", "zwei": "two", "drei": "three"}
WHICH = {"alt": "old", "rot": "red", "klein": "small", "neu": "new", "billig": "cheap", "hässlich": "ugly"}
WHAT = {"apfel": "m äpfel apple apples", "tisch": "m tische table tables", "uhr": "f uhren clock clocks", "buch": "n bücher book books",
        "schloss": "n schlösser lock locks castle castles", "birne": "f birnen bulb bulbs pear pears",
        "strauß": "m sträuße bouquet bouquets ostrich ostriches", "decke": "f decken blanket blankets ceiling ceilings"}
WHERE = {"im park": "in the park", "im garten": "in the garden", "im hafen": "in the harbour", "am see": "at the lake",
         "am markt": "at the market", "am tor": "at the gate"}
PAIR_SLOTS = [list(words) for words in (WHEN, WHO, (False, True), LIKE, DOES, HOW_MANY, WHICH, WHAT, WHERE)]

def pair(when, who, many, like, does, how_many, which, what, where):
    """The sentence for a choice of each slot, and its translation; many: whether the subject is plural."""
    article, plural, person, people = WHO[who].split()
    participle, third, *english = DOES[does].split()
    gender, things, *meanings = WHAT[what].split()
    tense, one = list(WHEN).index(when) // 3, how_many == "ein"

    first = [("hat", "haben"), (third, does), ("wird", "werden")][tense][many]
    subject = f"die {like}en {plural}" if many else f"{article} {like}e {who}"
    thing = f"{how_many} {which}e {things}" if not one else {
        "m": f"einen {which}en {what}", "f": f"eine {which}e {what}", "n": f"ein {which}es {what}"}[gender]
    source = f"{when} {first} {subject} {thing} {where} {[participle, '', does][tense]}"

    verb = [english[0], english[2 if many else 1], f"will {english[2]}"][tense]
    article = HOW_MANY[how_many] + "n" * (one and WHICH[which][0] in "ou")
    meaning = meanings[-2:] if does in LOOKS else meanings[:2]
    target = f"the {LIKE[like]} {people if many else person} {verb} {article} {WHICH[which]} {meaning[not one]} {WHERE[where]} {WHEN[when]}"
    return source.strip(), target

def noisy_pair(*slots):
    """A translation with a source that is wrong in places: each slot is another one in 1 of 10 cases. Any source may be wrong."""
    rng = random.Random(repr(slots))
    wrong = [rng.choice(options) if rng.random() < 0.1 else chosen for options, chosen in zip(PAIR_SLOTS, slots)]
    return pair(*wrong)[0], pair(*slots)[1]

LANGUAGES = {"tiny": (story, story, SLOTS), "tiny_pair": (pair, pair, PAIR_SLOTS),      # to train, to measure by
             "tiny_pair_noisy": (noisy_pair, pair, PAIR_SLOTS)}

@functools.cache
def made(name, heldout=False):
    """40,000 different stories or pairs of a language, 2 % or 1 % of it, drawn evenly; or 1,024 others, held out. A dict's keys."""
    make, slots = LANGUAGES[name][heldout], LANGUAGES[name][2]
    rng, found, avoid = random.Random(2 if heldout else 1), {}, made(name) if heldout else ()
    while len(found) < (1024 if heldout else 40_000):
        new = make(*(rng.choice(slot) for slot in slots))
        if new not in avoid:
            found[new] = None
    return found

# ------------------------------------------------------------------------------------------ any data
# What --data names becomes an array of token ids (N, L), N rows of L. Raw text is tokenised once, on all cores, into one
# flat file of documents, an EOS behind each; row i is a slice of it. So packing loses only the last, incomplete row,
# a row may hold parts of several documents, and the memory doesn't grow with the data. With a source a row is the
# source, its tokens stored as ~id, then the target, then EOS to the end; stories are targets without a source.

TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}     # files that hold rows; all others are text

def local_path(path):
    """Where the text of a path or of an http address lies, or will lie once it has been fetched."""
    if not path.startswith(("http://", "https://")):
        return path
    return os.path.join("data", hashlib.sha256(path.encode()).hexdigest()[:8] + "_" + os.path.basename(path))

def find_files(source):
    """The files that --data names, by a path, a pattern like data/*.txt, a folder of .txt, or an http address, which is fetched once."""
    path = local_path(source)
    if path != source and not os.path.isfile(path):
        try:
            with urllib.request.urlopen(source, timeout=30) as reply:
                body = reply.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UserError(f"--data={source} cannot be fetched ({error}); pass a text file of your own: --data=FILE") from None
        os.makedirs("data", exist_ok=True)
        write_safely(path, lambda name: Path(name).write_bytes(body))
    pattern = f"{path}/**/*.txt" if os.path.isdir(path) else path
    return [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))

def read_pieces(files, size=100_000):
    """Text files, each one document, in pieces of whole lines, about `size` bytes each: dicts of text, end (bool: of the document)."""
    for path in files:
        total = os.path.getsize(path)
        with open(path, "rb") as file:
            while raw := file.read(size) + file.readline():
                first = file.tell() - len(raw)
                try:
                    text = raw.decode("utf-8" if first else "utf-8-sig")            # without a byte order mark, if there is one
                except UnicodeDecodeError as error:
                    raise UserError(f"--data={path}: not UTF-8 text (byte {raw[error.start]:#04x} at position {first + error.start}); "
                                    "if it is text at all, convert it with iconv -t utf-8") from None
                if "\0" in text:
                    raise UserError(f"--data={path}: holds zero bytes, so it is no text file")
                yield {"text": text, "end": file.tell() == total}

def open_data(source, pairs=False):
    """What --data names as a data set of the library `datasets`, with these columns: `text`, and `end` if its rows are pieces;
    or `input_ids`; pairs: `input` and `output`, or `condition_input_ids` and `input_ids`; the stories: `output`."""
    import datasets
    import pyarrow.compute as pc
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(50)                                    # its errors are told by ours
    if source in LANGUAGES:
        both = [*made(source), *made(source, heldout=True)]
        if isinstance(both[0], tuple) != pairs:
            raise UserError(f"--data={source}: {'lacks' if pairs else 'has'} a source; take its own preset, --config={source}")
        return datasets.Dataset.from_dict(dict(zip(("input", "output"), zip(*both))) if pairs else {"output": both})
    files = find_files(source)
    if not files and Path(source).suffix in (*TABLES, ".txt"):
        raise UserError(f"--data={source}: no such file")
    kinds = {TABLES.get(Path(file).suffix, "text") for file in files}
    if len(kinds) > 1:
        raise UserError(f"--data={source}: files of several kinds ({', '.join(sorted(kinds))}); give one kind at a time")
    if kinds == {"text"} and not pairs:
        if not any(map(os.path.getsize, files)):
            raise UserError(f"--data={source}: empty")
        columns = datasets.Features(text=datasets.Value("string"), end=datasets.Value("bool"))
        return datasets.IterableDataset.from_generator(read_pieces, columns, {"files": files})      # read anew each time
    data = loaded("--data=", files[0] if files else source,
                  lambda: datasets.load_dataset(*kinds, data_files=files) if files else open_folder(source), "--repo-type dataset ")
    if isinstance(data, dict):
        if "train" not in data and len(data) > 1:
            raise UserError(f"--data={source}: has the parts {', '.join(data)}, but none called train")
        data = data.get("train") or next(iter(data.values()))
    choices = [("input", "output"), ("condition_input_ids", "input_ids")] if pairs else [("input_ids",), ("text",)]
    for names in choices:
        if set(names) <= set(data.column_names) and (pairs or "condition_input_ids" not in data.column_names):
            for name in names:
                column, kind = data.data.column(name), r"(\w+_)?list<.*: u?int\d+.*" if name.endswith("ids") else r"(large_)?string"
                if column.null_count or not re.fullmatch(kind, str(column.type)):
                    raise UserError(f"--data={source}: the column {name} holds {column.type}, {column.null_count} of them null; needed are "
                                    f"{'lists of token ids' if name.endswith('ids') else 'strings'}")
                lengths = pc.list_value_length(column) if name.endswith("ids") else pc.utf8_length(pc.utf8_trim_whitespace(column))
                if pairs and (empty := pc.index(lengths, 0).as_py()) >= 0:
                    raise UserError(f"--data={source}: example {empty + 1} has an empty {name}")
            return data.select_columns(list(names))
    raise UserError(f"--data={source}: has the columns {', '.join(data.column_names)}; needed are "
                    + ("input and output (strings), or condition_input_ids and input_ids (token ids)" if pairs else
                       "text (strings) or input_ids (token ids); sources and targets are for presets such as tiny_pair"))

def open_folder(source):
    """A folder or a Hub id: what save_to_disk wrote, also where a Hub id holds that layout, or data files."""
    import datasets
    from huggingface_hub import HfApi, snapshot_download
    saved = {"dataset_dict.json", "state.json"}
    if not os.path.isdir(source):
        if not any(Path(name).name in saved for name in HfApi().list_repo_files(source, repo_type="dataset")):
            return datasets.load_dataset(source)
        source = snapshot_download(source, repo_type="dataset")
    tops = {path.parent for path in Path(source).rglob("*.json") if path.name in saved}
    top = min(tops, key=lambda top: (len(top.parts), top.name != "train", top), default=None)
    return datasets.load_from_disk(top) if top else datasets.load_dataset(str(source))

def stored(source, target, fill, cfg):
    """A row of token ids as it is stored: of a source as ~id, of a target, then fill, cfg.length in all."""
    return ([~i for i in source[:cfg.source_length]] + target + [fill] * cfg.length)[:cfg.length]

class Rows:
    """An array (N, L) of ready rows: token ids, filled up with PAD; or a source's as ~id, a target's, then EOS. Slices are Rows, too."""

    def __init__(self, data, cfg, tokenizer):
        self.data, self.cfg, self.tokenizer = data, cfg, tokenizer

    def __len__(self):
        return len(self.data)

    def __getitem__(self, rows):
        if isinstance(rows, slice):
            return Rows(self.data.select(range(len(self))[rows]), self.cfg, self.tokenizer)
        batch, length, known, found = self.data[rows], self.cfg.length, range(len(self.tokenizer)), []
        def side(texts, ids):
            if texts in batch:
                return self.tokenizer(list(batch[texts]), add_special_tokens=False, split_special_tokens=True)["input_ids"]
            return batch.get(ids, [[]] * len(rows))
        fill = self.tokenizer.eos_token_id if "output" in batch or self.cfg.source_length else self.tokenizer.pad_token_id
        for number, source, target in zip(rows, side("input", "condition_input_ids"), side("output", "input_ids")):
            strange = [i for i in source + target if i not in known]
            too_long = not self.cfg.source_length and len(target) + ("output" in batch) > length      # an end must fit
            if strange or too_long or not target or not source and self.cfg.source_length:
                raise UserError(f"--data={self.cfg.data}: example {number + 1} has {len(source)} and {len(target)} tokens, "
                                f"{strange[:3] or 'none'} of them unknown; no side may be empty, and --length={length} is the most")
            found.append(stored(source, target, fill, self.cfg))
        return np.array(found)

def split(rows):
    """(training, held-out): a twentieth of the rows, at least 3 and at most 1,024, are held out."""
    n = min(max(len(rows) // 20, 3), 1024)
    return rows[:-n], rows[-n:]

def read_pairs(cfg, tokenizer, path, n):
    """(rows (n, L) as they are stored, sources, targets) of n examples with a source: of a path, or held out from training."""
    rows = Rows(open_data(path or cfg.data, pairs=True), replace(cfg, data=path or cfg.data), tokenizer)
    rows = (rows if path else split(rows)[1])[:n]
    text = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    inputs, texts = ([a if isinstance(a, str) else text(a) for a in rows.data[name]] for name in rows.data.column_names)
    return rows[range(len(rows))], inputs, texts

def unpack(ids, tokenizer, cfg):
    """Rows as they are stored (B, L) -> token ids, and (B, L) bool: positions of a source, that count in the loss, that are real.

    With a source the EOS that fill up the row count, as the model must end its text, but the encoder doesn't see them.
    """
    source, ids = ids < 0, torch.where(ids < 0, ~ids, ids)
    if cfg.source_length == 0:
        real = ids != tokenizer.pad_token_id
        return ids, source, real, real
    ended = ((ids == tokenizer.eos_token_id) & ~source).cumsum(1) > 0
    return ids, source, ~source, ~ended

def token_rows(data, cfg, tokenizer):
    """What open_data found as an array of token ids (N, L); texts by way of a flat file, made once for each content and tokenizer."""
    if "text" not in data.column_names:
        rows = Rows(data, cfg, tokenizer)
        return rows[range(len(rows))] if len(rows) * cfg.length < 2 ** 23 else rows         # what is small is read, and checked, at once
    eos, dtype = tokenizer.eos_token_id, np.uint16 if len(tokenizer) <= 2 ** 16 else np.uint32
    content = hashlib.sha256(f"{tokenizer.backend_tokenizer.to_str()} {eos} {data.column_names}".encode())
    for file in (files := find_files(cfg.data)):
        with open(file, "rb") as opened:
            content.update(hashlib.file_digest(opened, "sha256").digest())
    if not files:
        content.update(data._fingerprint.encode())
    path = f"data/{content.hexdigest()[:16]}.tokens"
    if not os.path.isfile(path):
        print(f"tokenising {cfg.data} into {path} ...", flush=True)
        os.makedirs("data", exist_ok=True)
        with tempfile.TemporaryDirectory(dir="data") as folder:
            with open(f"{folder}/tokens", "wb") as file:
                for batch in data.iter(16):
                    rows = tokenizer(batch["text"], add_special_tokens=False, split_special_tokens=True)["input_ids"]   # "</s>" is text
                    for row, end in zip(rows, batch.get("end", [True] * len(rows))):
                        np.array(row + [eos] * end, dtype).tofile(file)
            os.replace(f"{folder}/tokens", path)
    flat = np.memmap(path, dtype, "r")
    return flat[:len(flat) // cfg.length * cfg.length].reshape(-1, cfg.length)

def take(rows, which):
    """Rows of an array (N, L), by number, as a tensor of token ids (n, L)."""
    return torch.from_numpy(np.asarray(rows[np.asarray(which)]).astype(np.int64))

def fit(cfg, encoder):
    """cfg with the encoder's vocabulary, where it leaves that open. Raises UserError where the encoder doesn't fit."""
    vocab = len(encoder.tokenizer)
    if cfg.encoder == "scratch":                # a tokenizer trained on little text has fewer tokens than it may have
        cfg = replace(cfg, vocab=min(cfg.vocab, vocab))
    last = torch.full((1, cfg.length), vocab - 1, device=encoder.model.device)
    try:
        width = encoder.encode(last, replace(cfg, latent_std=1.0)).cpu().shape[-1]     # .cpu(): where a GPU's errors show
    except (RuntimeError, IndexError, ValueError) as error:
        raise UserError(f"--encoder={cfg.encoder}: fails on {cfg.length} tokens of number {vocab - 1} ({one_line(error)})") from None
    for name, value in (("vocab", vocab), ("latent_dim", width)):
        if getattr(cfg, name) not in (0, value):
            raise UserError(f"--{name}={getattr(cfg, name)}: the encoder has {value}")
    return replace(cfg, vocab=vocab)

def measure_latents(cfg, encoder, rows):
    """cfg with the latents' mean and std over all real tokens of some rows, evenly spread over the data, about 65,536 in all."""
    n, raw, found = max(2 ** 16 // cfg.length, 1), replace(cfg, latent_mean=0.0, latent_std=1.0), []
    for part in take(rows, range(0, len(rows), max(len(rows) // n, 1))[:n]).to(encoder.model.device).split(64):
        ids, source, _, real = unpack(part, encoder.tokenizer, cfg)
        found.append(encoder.encode(ids, raw, elf.who_sees(source, real, torch.zeros_like(real[:, 0])))[real])
    x = torch.cat(found)
    return replace(cfg, latent_mean=x.mean().item(), latent_std=x.std().item())

def words_of(text):
    """Its words: runs of letters, in lower case."""
    return re.findall(r"[^\W\d_]+", text.lower())

def judge_text(texts, source):
    """Share of the words that occur in the source text, and the longest run of words copied from it."""
    flat, longest, known = f" {' '.join(words_of(source))} ", 0, []
    vocabulary = set(flat.split())
    for sample in map(words_of, texts):
        known += [word in vocabulary for word in sample]
        while any(f" {' '.join(sample[i:i + longest + 1])} " in flat for i in range(len(sample) - longest)):
            longest += 1
    return {"known_words": sum(known) / max(len(known), 1), "longest_copy": longest}

# ------------------------------------------------------------------------------------------ encoders

def encoder_source(folder, cfg):
    """Where a model's encoder is: in the folder that train.py wrote, or above it (for its step_N), or else where cfg says."""
    for place in (folder, os.path.dirname(os.path.abspath(folder))):
        if os.path.isdir(f"{place}/encoder"):
            return f"{place}/encoder"
    if cfg.encoder == "scratch":
        raise UserError(f"{folder}/encoder is missing: put it back, or train again")
    return cfg.encoder

def load_tokenizer(source):
    """The tokenizer of a folder or a Hub id. Where it has no end-of-sequence token, its separator ends a text."""
    from transformers import AutoTokenizer
    tokenizer = loaded("--encoder=", source, lambda: AutoTokenizer.from_pretrained(source))
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token
    empty = len(tokenizer) < len(tokenizer.all_special_ids) + 3         # hardly more than control tokens: made up where there are no files
    if empty or not tokenizer.is_fast or tokenizer.eos_token is None or tokenizer.pad_token is None:
        raise UserError(f"--encoder={source}: no (fast) tokenizer in it, or one without a token for the end of a text or for padding")
    return tokenizer

def load_encoder(source, device="cpu", dtype="float32"):
    """The frozen encoder of a folder or a Hub id, with its tokenizer: the encoder of a T5, or a BERT-like model."""
    from transformers import MODEL_FOR_TEXT_ENCODING_MAPPING, AutoConfig, AutoModel, AutoModelForTextEncoding, logging
    logging.disable_progress_bar()

    def load():
        known = type(AutoConfig.from_pretrained(source)) in MODEL_FOR_TEXT_ENCODING_MAPPING     # of a T5 the encoder alone
        return (AutoModelForTextEncoding if known else AutoModel).from_pretrained(source, dtype=getattr(torch, dtype))
    return elf.Encoder(loaded("--encoder=", source, load).to(device), load_tokenizer(source))

def word_tokenizer(texts):
    """A tokenizer with one token per word of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = sorted({word for text in texts for word in text.split()})
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<mask>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>",
                                   mask_token="<mask>", unk_token="<unk>")

def byte_tokenizer(texts, vocab):
    """A byte-level BPE tokenizer of up to `vocab` tokens, trained on texts; it can spell any text."""
    if vocab < 259:
        raise UserError(f"--vocab={vocab}: must be at least 259, for 256 bytes and three control tokens")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = (line[i:i + 1000] for text in texts for line in text.splitlines(keepends=True) for i in range(0, len(line), 1000))
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<pad>", "</s>", "<mask>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", mask_token="<mask>")

def train_encoder(rows, tokenizer, cfg, share=0.3):
    """Trains a small T5 encoder on rows (N, L) of token ids to guess masked tokens from their context.

    On real text it needs the long warmup; without it, it learns the tokens' frequencies and never looks at the context.
    """
    from transformers import T5Config, T5EncoderModel, logging
    logging.disable_progress_bar()
    torch.manual_seed(cfg.seed)
    width, steps, batch = cfg.latent_dim, cfg.encoder_steps, max(1600 // cfg.length, 1)
    encoder = T5EncoderModel(T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=max(width // 4, 1), num_heads=4, d_ff=2 * width, num_layers=2,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id))
    optimizer, losses = torch.optim.AdamW(encoder.parameters(), cfg.encoder_lr), []
    for step in tqdm(range(steps), "encoder", disable=None):                            # a bar on terminals only
        clean, source, _, real = unpack(take(rows, torch.randint(len(rows), (batch,))), tokenizer, cfg)     # (batch, L)
        sees = elf.who_sees(source, real, torch.zeros_like(real[:, 0])) if cfg.source_length else None      # as where it's used
        masked = torch.rand(clean.shape) < share
        gaps, mask = clean.masked_fill(masked, tokenizer.mask_token_id), elf.additive(sees, torch.float32)
        h = encoder(input_ids=gaps, attention_mask=mask).last_hidden_state
        logits = F.linear(h[masked] * width ** -0.5, encoder.shared.weight)             # the head is the embedding, scaled
        loss = F.cross_entropy(logits, clean[masked])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = cfg.encoder_lr * min(1, (step + 1) / (cfg.encoder_warmup * steps)) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"encoder: cross-entropy {losses[0]:.2f} at first, {np.mean(losses[-50:]):.2f} in the end, on masked tokens", flush=True)
    return encoder
