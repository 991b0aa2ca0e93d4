"""ELF, Embedded Language Flows (arXiv 2605.10938), in one file.

A frozen text encoder turns token ids into contextual embeddings, the latents x. A flow carries Gaussian noise to such
latents, for all positions at once: the network sees a noisy z at time t and predicts the clean x_hat, which gives the
velocity to follow. It also sees its own previous guess x_prev (self-conditioning) and a scale w, how strongly to lean
on it (guidance). Only one last call of the same network, switched to "decode" mode, reads tokens off the latents. So a
training batch mixes denoise examples (velocity MSE) and decode examples (noised token by token, cross-entropy).

Time runs from 0 (noise) to 1 (data).
Shapes:  B examples (sequences) of a batch, L positions of a sequence, D latent width (the encoder's), H hidden width
of the network, V vocabulary size; inside the network N = 3 prefix + L tokens, control tokens in front.
Symbols: x clean latents, z noisy ones, x_hat the network's guess of x, x_prev its previous guess, v velocity,
eps noise, w guidance scale of self-conditioning. To translate or to summarise, a source stands in front, clean at every
time (cond: its latents; cfg: guidance scale of it); on a first reading skip who_sees, keep and guess.
"""
import dataclasses
import json
import operator
import os
import pickle
import re
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------ configuration

class UserError(ValueError):
    """Something the user gave is wrong: the programs print it as one line and exit with 2."""

def key(default, meaning, **limits):
    """A setting, with what `--help` says of it, and its limits: at_least, above, below, one_of."""
    return field(default=default, metadata={"help": meaning, **limits})

def check(settings):
    """Raises UserError where a setting is not of its type or not within its limits."""
    rules = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt, "one_of": lambda value, known: value in known}
    for f in dataclasses.fields(settings):
        value, limits = getattr(settings, f.name), f.metadata
        if type(value) not in ((int, float) if f.type is float else (f.type,)):
            raise UserError(f"{f.name}={value}: must be of type {f.type.__name__}")
        if isinstance(value, (int, float)) and not abs(value) < 1e9:            # which nan and inf are not
            raise UserError(f"{f.name}={value}: must be a number below 1e9")
        for limit, holds in rules.items():
            if limit in limits and not holds(value, limits[limit]):
                raise UserError(f"{f.name}={value}: must be {limit.replace('_', ' ')} {limits[limit]}")

@dataclass(frozen=True)
class Config:
    """The method and its training. The defaults are the paper's ELF-B on OpenWebText (tables 6, 7 and 9)."""
    # data and encoder
    data: str = key("embedded-language-flows/openwebtext-t5", "`tiny`, Hub id, folder, address, or files (.txt, .jsonl, .parquet, .csv; *)")
    encoder: str = key("google-t5/t5-small", "frozen encoder: Hub id, folder, or `scratch` to train a small one on the data first")
    encoder_dtype: str = key("float32", "the encoder's precision: float32 or bfloat16", one_of=("float32", "bfloat16"))
    encoder_steps: int = key(400, "how long to train the encoder, where it is `scratch`", at_least=1)
    encoder_lr: float = key(0.003, "largest learning rate of that training", above=0)
    encoder_warmup: float = key(0.2, "share of it in which that rate rises from 0", above=0, below=1)
    vocab: int = key(32100, "V: tokens the tokenizer knows (0: take the tokenizer's), not the encoder's padded matrix", at_least=0)
    length: int = key(1024, "L: positions of a sequence", at_least=1)
    source_length: int = key(0, "translation and the like: most tokens of the source, counted in length (0: no source)", at_least=0)
    latent_dim: int = key(512, "D: width of the encoder's embeddings", at_least=1)
    latent_mean: float = key(0.0, "subtracted from the embeddings")
    latent_std: float = key(0.2, "the embeddings are divided by this (0 or `auto`: measure mean and std on 65,536 tokens)", at_least=0)
    # network
    hidden: int = key(768, "H: width of the network", at_least=1)
    depth: int = key(12, "number of blocks", at_least=1)
    heads: int = key(12, "attention heads", at_least=1)
    bottleneck: int = key(128, "width between the latents and H at the input", at_least=1)
    prefix: int = key(4, "control tokens of each kind: time, guidance scale, mode", at_least=1)
    # path and loss
    t_mean: float = key(-1.5, "t of a denoise example is sigmoid(N(t_mean, t_std^2)); small t is much noise")
    t_std: float = key(0.8, "see t_mean; the sampler's time grid follows the same law", above=0)
    noise_scale: float = key(2.0, "standard deviation of the noise of the flow, in units of the latents", above=0)
    t_floor: float = key(0.05, "least divisor in v = (x_hat - z) / (1 - t)", above=0, below=1)
    decode_share: float = key(0.2, "share of a batch that trains the decode mode", above=0, below=1)
    p_mean: float = key(0.8, "p, how clean a token of a decode example is, is sigmoid(N(p_mean, p_std^2))")
    p_std: float = key(0.8, "see p_mean", above=0)
    decode_noise_scale: float = key(5.0, "standard deviation of the noise that decode examples get", above=0)
    w_min: float = key(0.5, "smallest guidance scale w seen in training; 1 + w is log-uniform", above=0)
    w_max: float = key(5.0, "largest guidance scale w seen in training", above=0)
    label_drop: float = key(0.1, "share of the examples trained with the source hidden, which guidance by it needs", at_least=0, below=1)
    # optimisation
    batch: int = key(512, "sequences per step, of all processes together", at_least=3)
    steps: int = key(0, "training steps (0: as many as `epochs` need)", at_least=0)
    epochs: float = key(5.0, "passes over the data, where `steps` is 0", above=0)
    optimizer: str = key("muon", "muon (Adam on all but the 2-D weights), or adamw for all", one_of=("muon", "adamw"))
    lr: float = key(0.002, "learning rate of Muon (or AdamW); never scaled with the batch", above=0)
    adam_lr: float = key(0.0, "learning rate of Adam beside Muon (0: the same as lr)", at_least=0)
    warmup: float = key(0.1, "share of the steps, or if 1 or more their number, in which the learning rate rises from 0", at_least=0)
    cooldown: float = key(0.0, "share of the steps, at the end, in which it falls back to 0", at_least=0)
    clip: float = key(1.0, "largest norm of the gradient", above=0)
    ema: float = key(0.9999, "decay of the weights' running average (warmed up); samples come from the average", at_least=0, below=1)
    seed: int = key(0, "the same seed gives the same weights", at_least=0)
    eval_every: int = key(0, "steps between held-out measures, samples and checkpoints (0: a tenth of the run, at most 1,000)", at_least=0)
    # sampling
    sample_steps: int = key(32, "default of sample.py: steps from noise to data; the decode call comes on top", at_least=1)
    gamma: float = key(1.5, "default of sample.py: how much noise an SDE step puts back", at_least=0)
    w: float = key(3.0, "default of sample.py: guidance scale of self-conditioning; 1 is no guidance", above=0)
    cfg: float = key(1.0, "default of sample.py: guidance scale of the source; 1 is no guidance, 0 ignores it", at_least=0)

    def __post_init__(self):
        check(self)
        for ok, name, rule in ((self.hidden % (2 * self.heads) == 0, "heads", f"hidden={self.hidden} must be an even multiple of it"),
                               (self.w_min <= self.w_max, "w_min", f"must not be above w_max={self.w_max}"),
                               (self.source_length < self.length, "source_length", f"leaves no room for a target in length={self.length}"),
                               (self.warmup >= 1 or self.warmup + self.cooldown <= 1, "warmup",
                                f"with cooldown={self.cooldown}, more than the whole run")):
            if not ok:
                raise UserError(f"{name}={getattr(self, name)}: {rule}")

WITH_SOURCE = Config(                               # what the two tasks with a source have in common (Sec. 4.3, table 9)
    source_length=64, length=128, decode_noise_scale=1.0, epochs=100.0, warmup=5000.0, sample_steps=64, gamma=0.0, w=1.0, cfg=2.0)
PRESETS = {         # the warmup of the owt presets is half an epoch
    "owt_b": Config(),
    "owt_m": Config(hidden=1056, depth=24, heads=16, epochs=4.0, warmup=0.125),
    "owt_l": Config(hidden=1280, depth=32, heads=16, epochs=3.0, warmup=1 / 6),
    "wmt14_de_en": dataclasses.replace(WITH_SOURCE, data="embedded-language-flows/wmt14_de-en_train_t5"),
    "xsum": dataclasses.replace(WITH_SOURCE, data="embedded-language-flows/xsum_train_t5", source_length=1024, length=1088),
}
RELEASED = {"ELF-M-owt-torch": "owt_m", "ELF-L-owt-torch": "owt_l", "ELF-B-de-en-torch": "wmt14_de_en", "ELF-B-xsum-torch": "xsum"}

# ------------------------------------------------------------------------------------------ the network

class ValueEmbed(nn.Module):
    """A number per example (t or w) -> a vector: 256 sinusoids of the raw value, then a small MLP."""

    def __init__(self, hidden):
        super().__init__()
        self.mlp_0 = nn.Linear(256, hidden)
        self.mlp_2 = nn.Linear(hidden, hidden)

    def forward(self, value):                                                   # (B,)
        frequency = 10000 ** (-torch.arange(128, device=value.device) / 128)    # (128,)
        angle = value.float()[:, None] * frequency                              # (B, 128)
        wave = torch.cat([angle.cos(), angle.sin()], dim=-1)                    # (B, 256)
        return self.mlp_2(F.silu(self.mlp_0(wave)))                             # (B, H)

def rope_table(n_control, length, head_dim, device):
    """cos and sin of rotary position embedding, each (N, head_dim / 2), with angle 0 at the control tokens in front."""
    frequency = 10000 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.arange(length, device=device)[:, None] * frequency            # (L, head_dim / 2)
    angle = F.pad(angle, (0, 0, n_control, 0))                                  # (N, head_dim / 2)
    return angle.cos(), angle.sin()

def rotate(q, rope):
    """Turns each adjacent pair of channels of q, or k, (B, heads, N, head_dim) by the angle of its position."""
    cos, sin = rope
    a, b = q.unflatten(-1, (-1, 2)).unbind(-1)                                  # (B, heads, N, head_dim / 2)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)     # (B, heads, N, head_dim)

class Attention(nn.Module):
    """Bidirectional self-attention without a mask; RMSNorm on queries and keys."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.q_norm = nn.RMSNorm(hidden // heads, eps=1e-6)
        self.k_norm = nn.RMSNorm(hidden // heads, eps=1e-6)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, h, rope):                                                 # (B, N, H)
        q, k, v = rearrange(self.qkv(h), "b n (three heads d) -> three b heads n d", three=3, heads=self.heads)
        q, k = rotate(self.q_norm(q.float()), rope), rotate(self.k_norm(k.float()), rope)   # in float32
        out = F.scaled_dot_product_attention(q, k, v)                           # (B, heads, N, head_dim)
        return self.proj(rearrange(out, "b heads n d -> b n (heads d)"))

class SwiGLU(nn.Module):
    """The feed-forward layer, (B, N, H) -> (B, N, H)."""

    def __init__(self, hidden):
        super().__init__()
        inner = int(4 * hidden * 2 / 3)
        self.w12 = nn.Linear(hidden, 2 * inner)
        self.w3 = nn.Linear(inner, hidden)

    def forward(self, h):
        gate, value = self.w12(h).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)

class Block(nn.Module):
    """One layer of the transformer, (B, N, H) -> (B, N, H)."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden, eps=1e-6)
        self.attn = Attention(hidden, heads)
        self.norm2 = nn.RMSNorm(hidden, eps=1e-6)
        self.mlp = SwiGLU(hidden)

    def forward(self, h, rope):
        h = h + self.attn(self.norm1(h), rope)
        return h + self.mlp(self.norm2(h))

class ELF(nn.Module):
    """The network: a transformer over [time | guidance | mode | sequence] tokens, with two heads. Its parts have the
    names of the released checkpoints, in which self_cond_cfg is the guidance scale w."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.self_cond_proj = nn.Linear(2 * cfg.latent_dim, cfg.latent_dim)
        self.text_proj = nn.Sequential(OrderedDict(             # through a narrow bottleneck
            proj1=nn.Linear(cfg.latent_dim, cfg.bottleneck, bias=False), proj2=nn.Linear(cfg.bottleneck, cfg.hidden)))
        self.t_embedder = ValueEmbed(cfg.hidden)
        self.self_cond_cfg_embedder = ValueEmbed(cfg.hidden)
        self.t_emb_tokens = nn.Parameter(torch.empty(1, cfg.prefix, cfg.hidden))
        self.self_cond_cfg_tokens = nn.Parameter(torch.empty(1, cfg.prefix, cfg.hidden))
        self.mode_tokens = nn.Parameter(torch.empty(1, cfg.prefix, cfg.hidden))
        self.blocks = nn.ModuleList(Block(cfg.hidden, cfg.heads) for _ in range(cfg.depth))
        self.final_layer = nn.Sequential(OrderedDict(           # the denoise head
            norm_final=nn.RMSNorm(cfg.hidden, eps=1e-6), linear=nn.Linear(cfg.hidden, cfg.latent_dim)))
        self.proj = nn.Linear(cfg.hidden, cfg.latent_dim)       # the decode head: proj, gelu, unembed
        self.unembed = nn.Linear(cfg.latent_dim, cfg.vocab)
        self.init_weights()

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for embed in (self.t_embedder, self.self_cond_cfg_embedder):
            nn.init.normal_(embed.mlp_0.weight, std=0.02)
            nn.init.normal_(embed.mlp_2.weight, std=0.02)
        for tokens in (self.t_emb_tokens, self.self_cond_cfg_tokens, self.mode_tokens):
            nn.init.normal_(tokens, std=0.02)
        nn.init.zeros_(self.final_layer.linear.weight)          # so x_hat starts as 0, the mean of the latents

    def trunk(self, z, t, x_prev, w, decode):
        """Everything but the heads: z, x_prev (B, L, D), t, w (B,), decode (B,) 1 or 0 -> (B, L, H)."""
        time = self.t_emb_tokens + self.t_embedder(t)[:, None]                  # (B, prefix, H)
        guidance = self.self_cond_cfg_tokens + self.self_cond_cfg_embedder(w)[:, None]     # (B, prefix, H)
        mode = self.mode_tokens * decode[:, None, None]                         # the mode switch: 0 when denoising
        text = self.text_proj(self.self_cond_proj(torch.cat([z, x_prev], dim=-1)))  # (B, L, H)

        h = torch.cat([time, guidance, mode, text], dim=1)                      # (B, N, H)
        head_dim = self.cfg.hidden // self.cfg.heads
        rope = rope_table(3 * self.cfg.prefix, z.shape[1], head_dim, z.device)
        for block in self.blocks:
            h = block(h, rope)
        return h[:, 3 * self.cfg.prefix:]                                       # (B, L, H)

    def decode_head(self, h):
        return self.unembed(F.gelu(self.proj(h), approximate="tanh"))           # (B, L, V)

    def denoise(self, z, t, x_prev, w):
        """Noisy z (B, L, D) at t (B,), the previous guess x_prev (B, L, D), scale w (B,) -> x_hat (B, L, D)."""
        return self.final_layer(self.trunk(z, t, x_prev, w, decode=torch.zeros_like(t)))

    def decode(self, z, w):
        """(Almost) clean z (B, L, D), w (B,) -> logits (B, L, V). Time is 1, the previous guess zero."""
        one = torch.ones_like(w)
        return self.decode_head(self.trunk(z, one, torch.zeros_like(z), w, decode=one))

    def forward(self, z, t, x_prev, w, decode):
        """Training: one trunk pass over a mixed batch, then each head on its own examples, in batch order.

        decode (B,) bool, n of them true. Returns x_hat (B - n, L, D) of the denoise and logits (n, L, V) of the
        decode examples.
        """
        h = self.trunk(z, t, x_prev, w, decode)
        return self.final_layer(h[~decode]), self.decode_head(h[decode])

# ------------------------------------------------------------------------------------------ the path
# One line each; the loss and both samplers are built from these three.

def corrupt(x, t, noise):
    """The path (Sec. 3.1), z = t x + (1 - t) noise; x, noise (B, L, D), the noise scaled; t (B, L), or (B, 1) by sequence."""
    return t[..., None] * x + (1 - t[..., None]) * noise

def velocity(x_hat, z, t, floor):
    """The x -> v converter, v = (x_hat - z) / max(1 - t, floor); x_hat and z (B, L, D), t (B,).

    With the true x for x_hat this is the true velocity x - noise of Eq. (1), where 1 - t >= floor.
    """
    return (x_hat - z) / (1 - t).clamp(min=floor)[:, None, None]

def euler(z, x_hat, t, t_next, floor):
    """One Euler step (Alg. 5) from t (B,) to t_next (B,), z + (t_next - t) v; z and x_hat (B, L, D)."""
    return z + (t_next - t)[:, None, None] * velocity(x_hat, z, t, floor)

# ------------------------------------------------------------------------------------------ the loss

class Draws(NamedTuple):
    """Every random number of a training step."""
    decode: Tensor      # (B,) bool: these examples train the decode mode, the others denoise
    self_cond: Tensor   # (B,) bool: denoise examples that get a first guess of x as a further input
    t: Tensor           # (B,) time of the denoise examples
    w: Tensor           # (B,) guidance scale
    p: Tensor           # (B, L) how clean each token of a decode example is
    eps: Tensor         # (B, L, D) standard Gaussian noise
    drop: Tensor        # (B,) bool: examples that train without their source, where they have one

def draw(cfg, batch, generator):
    """The Draws of a batch of at least 3 (App. C.1). Counts are fixed, who gets which role is random: decode_share
    of the batch decodes, half of the rest, rounded up, denoises with a first guess, the others without."""
    n_decode = min(max(round(cfg.decode_share * batch), 1), batch - 2)          # leaves one of each kind
    n_self_cond = (batch - n_decode + 1) // 2
    how = {"generator": generator, "device": generator.device}
    rank = torch.randperm(batch, **how)             # by rank: decode | denoise with a first guess | denoise without
    return Draws(
        decode=rank < n_decode,
        self_cond=(rank >= n_decode) & (rank < n_decode + n_self_cond),
        t=torch.sigmoid(cfg.t_mean + cfg.t_std * torch.randn(batch, **how)),
        w=(1 + cfg.w_min) * ((1 + cfg.w_max) / (1 + cfg.w_min)) ** torch.rand(batch, **how) - 1,    # 1 + w is log-uniform
        p=torch.sigmoid(cfg.p_mean + cfg.p_std * torch.randn(batch, cfg.length, **how)),
        eps=torch.randn(batch, cfg.length, cfg.latent_dim, **how),
        drop=torch.rand(batch, **how) < cfg.label_drop)

def guidance_target(v, v_sc, v_no, w):
    """Eq. (5), v + (1 - 1/w) (v_sc - v_no): the network learns the guided velocity, so sampling needs no second pass.

    v is the true velocity, v_sc and v_no the network's with and without self-conditioning, without gradient, all
    (B, L, D); w (B,) is the guidance scale, 1 leaves v as it is.
    """
    return v + (1 - 1 / w)[:, None, None] * (v_sc - v_no)

def who_sees(source, real, drop):
    """Which positions the encoder lets each one see (Sec. 3.3), (B, L, L) bool.

    A source (B, L) bool sees itself alone. All others see what is real (B, L) bool, which is the source and the target
    before its end, but not the source where it is dropped (B,) bool; there the caller sets its latents to zero, too.
    """
    seen = real & ~(source & drop[:, None])                                     # by all positions but the source's
    return torch.where(source[:, :, None], source[:, None], seen[:, None])

def keep(z, x, source):
    """z (B, L, D) with the clean latents x (B, L, D) put back at the source (B, L)."""
    return torch.where(source[..., None], x, z)

def flow_loss(model, x, ids, counted, draws, n=None, source=None):
    """The training loss (Algs. 1 and 3): velocity MSE, Eq. (1), and cross-entropy, Eq. (2), on the two kinds of example.

    x (B, L, D): clean latents of ids (B, L), zeros where draws.drop drops a source; counted (B, L) bool: the positions
    that count, none of the source's; draws: from `draw`, with examples of each kind; source (B, L) bool: positions that
    stay clean. Returns three scalars: the loss, in expectation (1 - decode_share) MSE + decode_share CE, and the plain
    means MSE and CE. n: the number of counted positions of the whole batch, where this is a part of it; the losses of
    the parts then add up to the batch's.
    """
    cfg = model.cfg
    decode, sc, t, w, p, eps, _ = draws             # the last one, drop, is the caller's: see x
    source = torch.zeros_like(counted) if source is None else source
    scale = torch.where(decode, cfg.decode_noise_scale, cfg.noise_scale)[:, None, None]
    level = torch.where(decode[:, None], p, t[:, None])                         # (B, L) by token, or by sequence; 1 is clean
    z = corrupt(x, level.masked_fill(source, 1.0), scale * eps)                 # (B, L, D)
    t = torch.where(decode, 1.0, t)                 # decode examples: noise by p, but the network is told t = 1

    x_prev = keep(torch.zeros_like(x), x, source & ~decode[:, None])    # the self-conditioning input: zero, but for a source,
    with torch.no_grad():                                               # or a first guess, made from that; to decode, all zero
        x_prev[sc] = keep(model.denoise(z[sc], t[sc], x_prev[sc], w[sc]), x[sc], source[sc])
    x_hat, logits = model(z, t, x_prev, w, decode)

    denoise = ~decode                               # M examples; all v are (M, L, D); decode, sc, counted, ids are still of B
    x, z, t, w, x_prev = (a[denoise] for a in (x, z, t, w, x_prev))
    v = velocity(x, z, t, cfg.t_floor)                              # the true velocity
    v_hat = velocity(x_hat, z, t, cfg.t_floor)                      # the network's; where sc, with self-conditioning
    v_no = velocity(x_prev, z, t, cfg.t_floor)                      # the first guess's, without it; used where sc
    guided = guidance_target(v, v_hat.detach(), v_no, w)            # where sc, v_hat is v_sc
    target = torch.where(sc[denoise][:, None, None], guided, v)

    se = (v_hat - target).square().mean(-1)[counted[denoise]]       # one number per counted denoise position
    ce = F.cross_entropy(logits.flatten(0, 1), ids[decode].flatten(), reduction="none")[counted[decode].flatten()]
    share = decode.float().mean()                   # the share after rounding: the weights restore decode_share
    total = cfg.decode_share / share * ce.sum() + (1 - cfg.decode_share) / (1 - share) * se.sum()
    return total / (counted.sum() if n is None else n), se.mean(), ce.mean()

# ------------------------------------------------------------------------------------------ the samplers

def time_grid(cfg, steps, kind="logit_normal", generator=None):
    """A grid (steps + 1,) of times from 0 to 1, steps >= 1. Raises ValueError on an unknown kind.

    kind: `logit_normal` (App. C.2) sorts draws of sigmoid(N(t_mean, t_std^2)), which are dense near 0; `quantile` (not the paper's)
    takes that law's quantiles at i / steps; `uniform` takes i / steps itself.
    """
    even = torch.arange(1, steps) / steps
    if kind == "logit_normal":
        inner = torch.sigmoid(cfg.t_mean + cfg.t_std * torch.randn(steps - 1, generator=generator)).sort().values
    elif kind == "quantile":
        inner = torch.sigmoid(cfg.t_mean + cfg.t_std * torch.special.ndtri(even))
    elif kind == "uniform":
        inner = even
    else:
        raise ValueError(f"grid={kind}: takes logit_normal, quantile or uniform")
    return torch.cat([torch.zeros(1), inner, torch.ones(1)])

def gaussian(like, generator):
    """Standard Gaussian noise of the shape of `like`, from one generator or from a list with one per example."""
    if isinstance(generator, list):
        assert len(generator) == len(like), "one generator for each example"
        return torch.stack([torch.randn(like.shape[1:], generator=g) for g in generator]).to(like.device)
    return torch.randn(like.shape, generator=generator).to(like.device)

def guess(model, z, t, x_prev, w, cond, cond_mask, cfg):
    """x_hat (B, L, D), guided by a source, cond at cond_mask (B, L), if cfg isn't 1: x_no + cfg (x_with - x_no), and so v too.

    x_no sees zeros for the source, in z and in x_prev, x_with sees cond; one call on twice the batch makes both.
    """
    given = [cond] if cfg == 1 else [torch.zeros_like(cond), cond]
    z, x_prev = (torch.cat([keep(a, latents, cond_mask) for latents in given]) for a in (z, x_prev))
    x_hats = model.denoise(z, t.repeat(len(given)), x_prev, w.repeat(len(given))).chunk(len(given))
    return keep(torch.lerp(x_hats[0], x_hats[-1], cfg), cond, cond_mask)        # cfg 1: there is only the one

@torch.no_grad()
def trajectory(model, z, grid, sampler="ode", gamma=0.0, w=1.0, sde_start="paper", generator=None, *, cond=None, cond_mask=None, cfg=1.0):
    """Follows the flow along grid, by Alg. 5 (ODE) or Alg. 6 (inspired by SDEs); the arguments are those of `sample`.

    Yields after each step t (float), z and the x_hat that it followed, both (B, L, D).
    """
    if sampler not in ("ode", "sde"):
        raise ValueError(f"sampler={sampler}: takes ode or sde")
    if sde_start not in ("paper", "released"):
        raise ValueError(f"sde_start={sde_start}: takes paper or released")
    if cond is None:                                                            # no source: nothing to keep, nothing to guide
        cond, cond_mask, cfg = z, z.new_zeros(z.shape[:2], dtype=torch.bool), 1
    times = grid.to(z)[:, None].expand(-1, len(z))                              # (steps + 1, B)
    w = z.new_full((len(z),), w)                                                # (B,)
    x_hat = torch.zeros_like(z)                                                 # no guess yet
    for step, (t, t_next) in enumerate(pairwise(times), start=1):
        z_back, t_back = z, t
        if sampler == "sde" and step < len(grid) - 1:                           # go back a little; not in the last step
            alpha = (1 - gamma * (t_next - t)).clamp(0, 1)                      # (B,); 1: stay here, 0: start anew
            noise = model.cfg.noise_scale * gaussian(z, generator)
            z_back = corrupt(z, alpha[:, None], noise)                          # alpha z + (1 - alpha) noise
            t_back = alpha * t
        x_hat = guess(model, z_back, t_back, x_hat, w, cond, cond_mask, cfg)    # the previous guess goes in, the next comes out
        if sde_start == "released":                                             # steps from (z_back, t_back); the paper's from (z, t)
            z, t = z_back, t_back
        z = keep(euler(z, x_hat, t, t_next, model.cfg.t_floor), cond, cond_mask)
        yield grid[step].item(), z, x_hat

def sample(model, z, grid, sampler="ode", gamma=0.0, w=1.0, sde_start="paper", generator=None, *, cond=None, cond_mask=None, cfg=1.0):
    """Carries z (B, L, D), model.cfg.noise_scale times standard noise, along grid (steps + 1,) to t = 1; returns it there.

    sampler: `ode`, or `sde`, which before every network call but the last mixes in new noise, and so takes t back to
    (1 - gamma dt) t, never below 0; gamma >= 0, at 0 it is the ODE. w: guidance scale of self-conditioning, trained on w_min to
    w_max, 1 is none. sde_start: an SDE step starts from the state before (`paper`, Alg. 6) or after (`released`).
    generator: a CPU torch.Generator, or a list with one per example, so that no sample depends on its batch.
    cond (B, L, D): clean latents of a source at the positions cond_mask (B, L) bool, which stay as they are; cfg: guidance
    scale of that source, 1 is none, any other makes each call twice as large.
    Makes len(grid) - 1 network calls. Raises ValueError on an unknown sampler or sde_start.
    """
    for _, z, _ in trajectory(model, z, grid, sampler, gamma, w, sde_start, generator, cond=cond, cond_mask=cond_mask, cfg=cfg):
        pass
    return z

@torch.no_grad()
def decode_ids(model, z, w=1.0):
    """The last network call: z (B, L, D) at t = 1 -> token ids (B, L), the likeliest at each position."""
    return model.decode(z, z.new_full((len(z),), w)).argmax(-1)

# ------------------------------------------------------------------------------------------ not the method: loading and saving

def one_line(error, limit=300):
    """What an error says, for a message of one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[:limit] + " ..."

def write_safely(path, write):
    """Calls write(temporary path) and renames the result: whoever opens path finds a whole file, new or old."""
    write(f"{path}.{os.getpid()}.tmp")
    os.replace(f"{path}.{os.getpid()}.tmp", path)

def save_model(folder, state, cfg):
    """Writes weights (a state_dict) and settings to a folder that load_model reads."""
    from safetensors.torch import save_file
    write_safely(f"{folder}/config.json", lambda path: Path(path).write_text(json.dumps(dataclasses.asdict(cfg), indent=1)))
    write_safely(f"{folder}/model.safetensors", lambda path: save_file(state, path))

def load_config(folder):
    """The Config in a folder that save_model wrote. Raises UserError where there is none."""
    try:
        return Config(**json.loads(Path(folder, "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder}: no model of ours here, or one without proper settings in config.json ({one_line(error)})") from None

def load_model(source, device="cpu", base=None):
    """(A model in eval mode, its Config).

    source: a folder that train.py wrote (its averaged weights); or weights that the paper's authors released: a file
    `checkpoint_<step>` (its ema_params1), a folder with such files (the last one), or a Hub id. Those tell the network's
    sizes; all else comes from the Config `base`, by default the Hub id's preset or else owt_b: some is printed. Runs no
    code that a file might hold. Raises UserError where there is no model, a damaged one, or one whose weights are
    missing, unknown or misshapen.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    path = find_weights(source)
    try:
        if path.suffix == ".safetensors":
            cfg, state = load_config(path.parent), load_file(path)
        else:
            sizes, state = from_released(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["ema_params1"])
            preset = next((RELEASED[part] for part in Path(source).absolute().parts if part in RELEASED), "owt_b")
            cfg = dataclasses.replace(base or PRESETS[preset], **sizes)
        with torch.device("meta"):                                  # no memory, no initial draw: the weights come from the file
            model = ELF(cfg)
        model.load_state_dict(state, assign=True)
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: missing, damaged, more than plain weights, or no ELF's: {one_line(repr(error), 2000)}") from None
    if path.suffix != ".safetensors":                               # not to stdout, which may hold texts alone
        assumed = {name: getattr(cfg, name) for name in ("length", "source_length", "latent_std", "noise_scale", "decode_noise_scale")}
        print(f"{path}: {sizes}; the rest is the preset's (--config), such as {assumed}", file=sys.stderr)
    return model.to(device).eval(), cfg

def find_weights(source):
    """The file that load_model reads for a source; what is on the Hub is downloaded first."""
    if not os.path.exists(source) and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        from huggingface_hub import snapshot_download
        wanted = ["checkpoint_*", "config.json", "model.safetensors"]
        source = loaded("", source, lambda: snapshot_download(source, allow_patterns=wanted))
    names = [path.name.removeprefix("checkpoint_") for path in Path(source).glob("checkpoint_*")]
    steps = [int(name) for name in names if name.isdecimal()]
    return Path(source) if os.path.isfile(source) else Path(source, f"checkpoint_{max(steps)}" if steps else "model.safetensors")

def loaded(option, source, load, hf_option=""):
    """load() of what lies at a path or on the Hub, failing in one line whatever the library raises."""
    try:
        return load()
    except Exception as error:
        if os.path.exists(source) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):       # no Hub id, by its looks
            raise UserError(f"{option}{source}: no such path, or not to be loaded ({one_line(error.__cause__ or error)})") from None
        raise UserError(f"{option}{source}: no such path, nor to be had from the Hub ({one_line(error, 120)}). Download it where there "
                        f"is a network, `hf download {hf_option}{source} --local-dir FOLDER`, and give {option}FOLDER") from None

def from_released(state):
    """(the network's sizes, told by the shapes; the weights under this file's names) of a released checkpoint's weights."""
    state = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value.float() for name, value in state.items()}
    hidden, dim = state["proj_kernel"].shape
    sizes = {"vocab": len(state["unembed_bias"]), "latent_dim": dim, "hidden": hidden,
             "depth": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
             "heads": hidden // len(state["blocks.0.attn.q_norm.weight"]),
             "bottleneck": len(state["text_proj.proj1.weight"]), "prefix": state["mode_tokens"].shape[1]}
    for name in ("proj", "unembed"):                                # stored [in, out], unlike the rest
        state[f"{name}.weight"] = state.pop(f"{name}_kernel").T.contiguous()
        state[f"{name}.bias"] = state.pop(f"{name}_bias")
    return sizes, state

def additive(sees, dtype):
    """The encoder's mask for sees (B, L or 1, L): additive and 4-D, right under every attention backend, as no other kind is."""
    return None if sees is None else torch.where(sees, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]

class Encoder:
    """A frozen text encoder and its tokenizer: text <-> token ids -> latents."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer

    @torch.no_grad()
    def encode(self, ids, cfg, sees=None):
        """ids (B, L) -> latents (B, L, D), normalised. sees (B, L, L) or (B, 1, L) bool: which positions each may look at (None: all)."""
        x = self.model(input_ids=ids, attention_mask=additive(sees, self.model.dtype)).last_hidden_state
        return (x.float() - cfg.latent_mean) / cfg.latent_std

    def save(self, folder):
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
