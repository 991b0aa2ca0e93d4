"""Tests: golden figures, the mathematics, the tiny language, the two programs, bad input."""
import collections
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": tempfile.mkdtemp()}      # before the libraries read it

import datasets
import huggingface_hub
import numpy as np
import pytest
import tokenizers as tk
import torch
import transformers
from torch import nn

import elf
import sample
import tiny_config
import train
from elf import ELF, Config
from sample import Setting, seeded
from tiny_config import PRESETS

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What a test leaves in the current folder goes with the test."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


GOLDEN = Config(latent_dim=8, length=6, hidden=24, depth=2, heads=3, bottleneck=4, vocab=11, batch=5)


def released_shapes(cfg):
    """Names and shapes of a released checkpoint (method notes), the two kernels [in, out]."""
    d, h, v, b, n = cfg.latent_dim, cfg.hidden, cfg.vocab, cfg.bottleneck, cfg.prefix
    inner, head = int(4 * h * 2 / 3), h // cfg.heads
    shapes = {"mode_tokens": (1, n, h), "t_emb_tokens": (1, n, h), "self_cond_cfg_tokens": (1, n, h),
              "self_cond_proj.weight": (d, 2 * d), "self_cond_proj.bias": (d,),
              "text_proj.proj1.weight": (b, d), "text_proj.proj2.weight": (h, b), "text_proj.proj2.bias": (h,),
              "final_layer.norm_final.weight": (h,), "final_layer.linear.weight": (d, h), "final_layer.linear.bias": (d,),
              "proj_kernel": (h, d), "proj_bias": (d,), "unembed_kernel": (d, v), "unembed_bias": (v,)}
    for name in ("t_embedder", "self_cond_cfg_embedder"):
        shapes |= {f"{name}.mlp_0.weight": (h, 256), f"{name}.mlp_0.bias": (h,),
                   f"{name}.mlp_2.weight": (h, h), f"{name}.mlp_2.bias": (h,)}
    for i in range(cfg.depth):
        block = {"norm1.weight": (h,), "attn.qkv.weight": (3 * h, h), "attn.qkv.bias": (3 * h,),
                 "attn.q_norm.weight": (head,), "attn.k_norm.weight": (head,),
                 "attn.proj.weight": (h, h), "attn.proj.bias": (h,), "norm2.weight": (h,),
                 "mlp.w12.weight": (2 * inner, h), "mlp.w12.bias": (2 * inner,),
                 "mlp.w3.weight": (h, inner), "mlp.w3.bias": (h,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def golden_state(cfg=GOLDEN):
    state = {}
    for k, (name, shape) in enumerate(sorted(released_shapes(cfg).items())):
        i = torch.arange(math.prod(shape), dtype=torch.float64)
        state[name] = (0.4 * torch.sin(0.7 * i ** 2 + k)).reshape(shape).float()
        if "norm" in name:
            state[name] += 1
    return state


def ar(shape, a):
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(0.3 * i ** 2 + a).reshape(shape).float()


def write_released(path, state, prefix=""):
    """A checkpoint as the released code writes it: the plain weights differ from the averaged ones."""
    named = {prefix + name: value for name, value in state.items()}
    torch.save({"params": {name: value + 1 for name, value in named.items()}, "ema_params1": named, "opt_state": {"mu": torch.zeros(2)},
                "lr_scheduler": None, "step": 7, "epoch": 1, "dropout_rng": torch.zeros(2, dtype=torch.int64), "grad_accum_buffers": None}, path)
    return path


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The model of all golden figures, by way of a released checkpoint and the loader."""
    path = write_released(tmp_path_factory.mktemp("released") / "checkpoint_7", golden_state())
    others = dataclasses.replace(GOLDEN, vocab=0, hidden=32, heads=2, depth=1, latent_dim=3, bottleneck=1, prefix=1)
    model, cfg = elf.load_model(str(path), base=others)
    assert cfg == GOLDEN                                            # every size comes from the shapes, the rest from base
    return model


def near(got, want, rel=1e-4):
    torch.testing.assert_close(got, torch.tensor(want), rtol=rel, atol=2e-5)


# ------------------------------------------------------------------------------- golden figures


def test_parameter_counts():
    for preset, count in (("owt_b", 104_579_940), ("owt_m", 342_540_036), ("owt_l", 652_103_332)):
        with torch.device("meta"):
            model = ELF(elf.PRESETS[preset])
        assert sum(p.numel() for p in model.parameters()) == count


def test_golden_denoise(golden):
    x_hat = golden.denoise(ar((2, 6, 8), 0.3), torch.tensor([0.25, 0.7]), ar((2, 6, 8), 1.1), torch.tensor([1.0, 3.0]))
    near(x_hat[0, 0], [0.359035, -0.805579, -1.843848, -0.380171, 0.729362, -2.303553, -1.176918, -0.694184])
    near(x_hat[1, 5], [0.678404, -3.694395, 0.786689, 1.870395, -1.571954, -1.436741, -0.876137, 0.783895])
    near(x_hat.abs().sum(), 107.687256)


def test_golden_decode(golden):
    logits = golden.decode(ar((2, 6, 8), 0.3), torch.tensor([1.0, 3.0]))
    near(logits[1, 3], [-0.532447, -0.466211, 0.851696, -2.054815, 1.546294, 2.133323, -8.225157,
                        -1.822825, -1.043297, -2.843292, 3.586161])
    near(logits.abs().sum(), 258.172394)


GRID = torch.tensor([0, 0.1, 0.3, 0.6, 1])


def test_golden_ode(golden):
    z = elf.sample(golden, 2 * ar((2, 6, 8), 0.3), GRID, w=3.0)
    near(z[0, 0], [1.402655, 1.158617, -3.034945, -0.187169, -0.460366, -1.903501, -0.071728, -0.680941])
    near(z.abs().sum(), 136.04369)
    assert elf.decode_ids(golden, z, w=3.0).tolist() == [[4, 4, 4, 0, 3, 10], [4, 4, 4, 10, 1, 10]]


@pytest.mark.parametrize("start, row, total", [
    ("released", [1.003245, 0.530870, -0.389135, -1.906891, 1.627491, -1.301507, -0.590421, -2.417725], 126.294998),
    ("paper", [1.082890, 0.815780, -1.968545, -1.498183, 0.378737, -2.790692, -0.330300, -1.005899], 130.426927)])
def test_golden_sde(golden, monkeypatch, start, row, total):
    noises = iter([ar((2, 6, 8), a) for a in (3.1, 4.2, 5.3)])
    monkeypatch.setattr(torch, "randn", lambda *shape, generator=None: next(noises))
    z = elf.sample(golden, 2 * ar((2, 6, 8), 0.3), GRID, "sde", gamma=1.5, w=3.0, sde_start=start)
    near(z[0, 0], row)
    near(z.abs().sum(), total)
    assert next(noises, None) is None       # one draw per SDE step, none for the last, an ODE step


def golden_batch():
    decode = torch.tensor([0, 0, 0, 1, 0]).bool()
    eps = torch.where(decode[:, None, None], ar((5, 6, 8), 2.3), ar((5, 6, 8), 1.7))
    draws = elf.Draws(decode, torch.tensor([1, 0, 1, 0, 1]).bool(), t=torch.tensor([0.1, 0.3, 0.5, 0.8, 0.97]),
                      w=torch.tensor([1.5, 2, 3, 1, 0.5]), p=0.5 + 0.4 * ar((5, 6), 0.9), eps=eps, drop=torch.zeros(5).bool())
    return ar((5, 6, 8), 0.5), (torch.arange(30) % 11).reshape(5, 6), torch.ones(5, 6, dtype=torch.bool), draws


def test_golden_loss_and_gradients(golden):
    golden.zero_grad()
    loss, mse, ce = elf.flow_loss(golden, *golden_batch())
    near(loss, 400.721313)
    near(mse, 500.085114)
    near(ce, 3.266133)
    loss.backward()
    norms = {name: p.grad.double().norm().item() for name, p in golden.named_parameters()}
    assert math.hypot(*norms.values()) == pytest.approx(1938.6922, rel=1e-4)
    want = {"self_cond_proj.weight": 507.6573, "text_proj.proj1.weight": 407.0614, "blocks.0.attn.qkv.weight": 799.4378,
            "blocks.1.mlp.w3.weight": 161.1310, "final_layer.linear.weight": 302.2586, "unembed.weight": 0.864320,
            "mode_tokens": 0.468657, "self_cond_cfg_tokens": 23.7263, "t_emb_tokens": 28.8712}
    assert {name: norms[name] for name in want} == pytest.approx(want, rel=1e-4)


def test_golden_loss_where_some_positions_do_not_count(golden):
    x, ids, counted, draws = golden_batch()
    for example, n in ((0, 4), (3, 5), (4, 3)):
        counted[example, n:] = False
    loss, mse, ce = elf.flow_loss(golden, x, ids, counted, draws)
    near(loss, 218.937683)
    near(mse, 275.721039)
    near(ce, 3.160889)


def test_golden_sampling_with_a_source(golden, monkeypatch):
    sizes, denoise = [], golden.denoise
    monkeypatch.setattr(golden, "denoise", lambda z, *rest: sizes.append(len(z)) or denoise(z, *rest))
    cond, source = ar((2, 6, 8), 2.0), torch.tensor([1, 1, 0, 0, 0, 0]).bool().expand(2, -1)
    z = elf.sample(golden, 2 * ar((2, 6, 8), 0.3), GRID, w=1.0, cond=cond, cond_mask=source, cfg=2.0)
    near(z[1, 4], [0.156458, 2.59792, -2.184119, -0.770581, 0.62511, -1.116229, 0.006764, 0.164135])
    near(z.abs().sum(), 111.778893)
    assert sizes == [4] * 4                 # with and without the source in one call
    for how in (dict(sampler="sde", gamma=1.5, generator=seeded(0), sde_start="released"), dict(cfg=2.0), dict(cfg=1.0)):
        z = elf.sample(golden, 2 * ar((2, 6, 8), 0.3), GRID, cond=cond, cond_mask=source, **how)
        assert torch.equal(z[source], cond[source])
    assert sizes[-4:] == [2] * 4            # no guidance, no second pass


def test_golden_loss_with_a_source(golden):
    x, ids, counted, draws = golden_batch()
    source = torch.tensor([1, 1, 0, 0, 0, 0]).bool().expand(5, -1)
    x[1, :2] = 0                            # dropped
    draws = draws._replace(decode=torch.zeros(5).bool(), eps=ar((5, 6, 8), 1.7))
    near(elf.flow_loss(golden, x, ids, counted & ~source, draws, source=source)[1], 390.588562)


# ------------------------------------------------------------------------------- released checkpoints


def test_the_presets_have_the_papers_values():
    common = dict(data="embedded-language-flows/openwebtext-t5", encoder="google-t5/t5-small", vocab=32100, length=1024, latent_dim=512,
                  latent_mean=0, latent_std=0.2, bottleneck=128, prefix=4, t_mean=-1.5, t_std=0.8, noise_scale=2, t_floor=0.05, decode_share=0.2,
                  p_mean=0.8, p_std=0.8, decode_noise_scale=5, w_min=0.5, w_max=5, batch=512, optimizer="muon", lr=0.002, clip=1, ema=0.9999)
    sizes = {"owt_b": (768, 12, 12, 5), "owt_m": (1056, 24, 16, 4), "owt_l": (1280, 32, 16, 3)}
    assert Config() == elf.PRESETS["owt_b"]
    for name, (hidden, depth, heads, epochs) in sizes.items():
        cfg = elf.PRESETS[name]
        want = common | dict(hidden=hidden, depth=depth, heads=heads, epochs=epochs)
        assert {key: getattr(cfg, key) for key in want} == want
        assert cfg.warmup * cfg.epochs == pytest.approx(0.5)        # half an epoch


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_released_weights_load_from_a_folder_under_any_prefix(tmp_path, golden, capsys, prefix):
    for step in (9, 90, 11):                                        # the last one by number, not by letter
        state = golden_state() if step == 90 else {name: value * 0 for name, value in golden_state().items()}
        write_released(tmp_path / f"checkpoint_{step}", state, prefix)
    (tmp_path / "checkpoint_old").touch()
    model, cfg = elf.load_model(str(tmp_path), base=GOLDEN)
    assert_same(dict(model.state_dict()), dict(golden.state_dict()))
    assert not model.training and "checkpoint_90" in capsys.readouterr().err


def test_a_hub_id_is_downloaded_and_has_its_own_preset(tmp_path, golden, monkeypatch, capsys):
    write_released(tmp_path / "checkpoint_5", golden_state())
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda source, **how: asked.append(source) or str(tmp_path))
    model, cfg = elf.load_model("embedded-language-flows/ELF-L-owt-torch")
    assert asked == ["embedded-language-flows/ELF-L-owt-torch"] and cfg.hidden == 24 and cfg.epochs == elf.PRESETS["owt_l"].epochs
    said = capsys.readouterr().err
    assert all(word in said for word in ("'length': 1024", "'latent_std': 0.2", "'hidden': 24"))


@pytest.mark.parametrize("change, words", [
    (lambda s: s.pop("blocks.1.mlp.w3.bias"), ["Missing", "blocks.1.mlp.w3.bias"]), (lambda s: s.pop("proj_kernel"), ["proj_kernel"]),
    (lambda s: s.update(extra=torch.zeros(2)), ["Unexpected", "extra"]),
    (lambda s: s.update({"norm.weight": s.pop("blocks.0.norm1.weight")}), ["blocks.0.norm1.weight", "norm.weight"]),
    (lambda s: s.update({"blocks.0.attn.qkv.weight": torch.zeros(72, 23)}), ["blocks.0.attn.qkv.weight", "72, 23", "72, 24"]),
    (lambda s: s.update(proj_kernel=s["proj_kernel"].T.contiguous()), ["size mismatch"])])
def test_released_weights_that_do_not_fit_are_listed(tmp_path, capsys, change, words):
    state = golden_state()
    change(state)
    write_released(tmp_path / "checkpoint_1", state)
    line = refused(capsys, sample, f"--model={tmp_path}")
    assert all(word in line for word in words), line


def test_what_is_no_released_checkpoint_is_refused(tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)
    path = tmp_path / "checkpoint_1"
    torch.save({"ema_params1": golden_state(), "bomb": Bomb()}, path)
    assert "more than plain weights" in refused(capsys, sample, f"--model={path}") and not (tmp_path / "exploded").exists()
    torch.save({"params": golden_state()}, path)
    assert "ema_params1" in refused(capsys, sample, f"--model={path}")
    for content in (b"", b"nonsense", write_released(path, golden_state()).read_bytes()[:5000]):
        path.write_bytes(content)
        assert "checkpoint_1" in refused(capsys, sample, f"--model={path}")
    write_released(path, golden_state())
    assert "--encoder=FOLDER" in refused(capsys, sample, f"--model={path}")               # no network, so no T5 tokenizer
    line = refused(capsys, sample, "--model=embedded-language-flows/ELF-B-owt-torch")
    assert "hf download embedded-language-flows/ELF-B-owt-torch" in line and "give FOLDER" in line


# ------------------------------------------------------------------------------- the samplers' mathematics


class Oracle:
    """A denoiser that knows the answer."""

    def __init__(self, x, cfg=GOLDEN):
        self.x, self.cfg = x, cfg

    def denoise(self, z, t, x_prev, w):
        return self.x


SAMPLERS = [("ode", "paper"), ("sde", "paper"), ("sde", "released")]
GRIDS = [[0, 1], [0, 0.95, 1], [0, 0.3, 0.3, 0.31, 0.9, 1], [*torch.linspace(0, 0.95, 20).tolist(), 1]]


@pytest.mark.parametrize("sampler, start", SAMPLERS)
@pytest.mark.parametrize("grid", GRIDS)
def test_oracle_reaches_the_data(sampler, start, grid):
    x, z = ar((2, 6, 8), 0.5), 2 * ar((2, 6, 8), 1.7)
    out = elf.sample(Oracle(x), z, torch.tensor(grid), sampler, gamma=1.3, sde_start=start, generator=seeded(0))
    torch.testing.assert_close(out, x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sampler, start", SAMPLERS)
def test_a_last_step_from_under_the_floor_falls_short(sampler, start):
    x, z = ar((2, 6, 8), 0.5), 2 * ar((2, 6, 8), 1.7)
    *_, (_, before, _), (t, after, _) = elf.trajectory(Oracle(x), z, torch.tensor([0, 0.5, 0.98, 1]), sampler, 1.3, 1.0, start, seeded(0))
    assert t == 1
    torch.testing.assert_close(after, before + 0.02 / 0.05 * (x - before))      # 1 - t = 0.02, divided by 0.05 instead


@pytest.mark.parametrize("start", ["paper", "released"])
def test_sde_without_noise_is_the_ode_bit_for_bit(golden, start):
    z = 2 * ar((2, 6, 8), 0.3)
    ode = elf.sample(golden, z, GRID, "ode", w=2.0)
    assert torch.equal(ode, elf.sample(golden, z, GRID, "sde", gamma=0.0, w=2.0, sde_start=start, generator=seeded(0)))
    assert not torch.equal(ode, elf.sample(golden, z, GRID, "sde", gamma=0.1, w=2.0, sde_start=start, generator=seeded(0)))


def test_sde_of_one_step_is_the_ode(golden):
    z, grid = 2 * ar((2, 6, 8), 0.3), torch.tensor([0.0, 1.0])
    assert torch.equal(elf.sample(golden, z, grid), elf.sample(golden, z, grid, "sde", gamma=2.0, generator=seeded(0)))


def test_a_sample_does_not_depend_on_its_batch(golden):
    z = 2 * ar((2, 6, 8), 0.3)
    both = elf.sample(golden, z, GRID, "sde", gamma=1.0, generator=[seeded(5), seeded(6)])
    alone = elf.sample(golden, z[1:], GRID, "sde", gamma=1.0, generator=[seeded(6)])
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=2e-5)


def test_samplers_refuse_what_they_do_not_know(golden):
    z = ar((2, 6, 8), 0.3)
    for bad in ({"sampler": "heun"}, {"sde_start": "mine"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            elf.sample(golden, z, GRID, **bad)
    with pytest.raises(ValueError, match="grid=cosine"):
        elf.time_grid(GOLDEN, 4, "cosine")


@pytest.mark.parametrize("kind", ["logit_normal", "uniform", "quantile"])
@pytest.mark.parametrize("steps", [1, 2, 33])
def test_time_grids_run_from_0_to_1(kind, steps):
    grid = elf.time_grid(GOLDEN, steps, kind, seeded(0))
    assert len(grid) == steps + 1 and grid[0] == 0 and grid[-1] == 1
    assert (grid.diff() >= 0).all()


def test_time_grids_follow_their_laws():
    median = 1 / (1 + math.exp(1.5))
    assert elf.time_grid(GOLDEN, 2, "quantile")[1] == pytest.approx(median)
    upper = elf.time_grid(GOLDEN, 10_000, "quantile")[8413]             # 84.13 %: one standard deviation up
    assert upper.item() == pytest.approx(1 / (1 + math.exp(1.5 - 0.8)), rel=1e-3)
    drawn = elf.time_grid(GOLDEN, 20_000, "logit_normal", seeded(0))[1:-1].logit()
    assert drawn.mean().item() == pytest.approx(-1.5, abs=0.03) and drawn.std().item() == pytest.approx(0.8, abs=0.03)
    assert elf.time_grid(GOLDEN, 4, "uniform").tolist() == [0, 0.25, 0.5, 0.75, 1]


# ------------------------------------------------------------------------------- the loss's mathematics


def reference_loss(model, x, ids, counted, draws):
    """The training loss from its formulas, one example at a time."""
    cfg, total = model.cfg, 0
    n_decode = int(draws.decode.sum())
    weight_decode = cfg.decode_share * len(x) / n_decode
    weight_denoise = (1 - cfg.decode_share) * len(x) / (len(x) - n_decode)
    for i in range(len(x)):
        xi, eps, w, t, here = x[i:i + 1], draws.eps[i:i + 1], draws.w[i:i + 1], draws.t[i], counted[i]
        if draws.decode[i]:
            p = draws.p[i][None, :, None]
            logits = model.decode(p * xi + (1 - p) * cfg.decode_noise_scale * eps, w)[0]
            ce = -logits.log_softmax(-1)[torch.arange(len(ids[i])), ids[i]]
            total = total + weight_decode * ce[here].sum()
            continue
        z = t * xi + (1 - t) * cfg.noise_scale * eps
        rest = max(1 - t.item(), cfg.t_floor)
        v_target, x_prev = (xi - z) / rest, torch.zeros_like(z)
        if draws.self_cond[i]:
            with torch.no_grad():
                x_no = model.denoise(z, t[None], x_prev, w)
                x_sc = model.denoise(z, t[None], x_no, w)
            v_target = v_target + (1 - 1 / w) * ((x_sc - z) / rest - (x_no - z) / rest)
            x_prev = x_no
        v_hat = (model.denoise(z, t[None], x_prev, w) - z) / rest
        total = total + weight_denoise * (v_hat - v_target).square().mean(-1)[0][here].sum()
    return total / counted.sum()


def random_batch(batch=8, seed=0, cfg=GOLDEN):
    g = seeded(seed)
    x = torch.randn(batch, cfg.length, cfg.latent_dim, generator=g)
    ids = torch.randint(cfg.vocab, (batch, cfg.length), generator=g)
    counted = torch.rand(batch, cfg.length, generator=g) < 0.7
    return x, ids, counted, elf.draw(cfg, batch, g)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("batch", [3, 5, 8])
def test_loss_and_gradients_equal_a_slow_reference(golden, batch):
    """The reference detaches the self-conditioning input and the target: equal gradients say that we do too."""
    data = random_batch(batch, seed=batch)
    loss, want = elf.flow_loss(golden, *data)[0], reference_loss(golden, *data)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    got, expected = gradients(golden, loss), gradients(golden, want)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-3 * expected[name].abs().max().item())


def test_batch_order_does_not_matter(golden):
    x, ids, counted, draws = random_batch(8)
    order = torch.randperm(8, generator=seeded(1))
    shuffled = elf.flow_loss(golden, x[order], ids[order], counted[order], elf.Draws(*(d[order] for d in draws)))
    torch.testing.assert_close(torch.stack(shuffled), torch.stack(elf.flow_loss(golden, x, ids, counted, draws)), rtol=1e-5, atol=0)


def test_guidance_target_by_hand():
    v, v_sc, v_no = (torch.full((3, 1, 1), value) for value in (1.0, 5.0, 3.0))
    target = elf.guidance_target(v, v_sc, v_no, torch.tensor([1.0, 2.0, 0.5]))
    assert target.flatten().tolist() == [1.0, 1 + 0.5 * 2, 1 - 1 * 2]       # w = 1 leaves v as it is


def test_path_velocity_and_euler_fit_together():
    x, noise, t = ar((2, 6, 8), 0.5), 2 * ar((2, 6, 8), 1.7), torch.tensor([0.2, 0.9])
    z = elf.corrupt(x, t[:, None], noise)
    torch.testing.assert_close(elf.velocity(x, z, t, 0.05), x - noise)
    later = elf.euler(z, x, t, t + 0.05, 0.05)
    torch.testing.assert_close(later, elf.corrupt(x, t[:, None] + 0.05, noise))


def test_the_decode_flag_changes_nothing_but_the_mode_tokens(golden):
    model = ELF(GOLDEN)
    model.load_state_dict(golden.state_dict())
    z, x_prev, t, w = ar((2, 6, 8), 0.3), ar((2, 6, 8), 1.1), torch.tensor([0.25, 1.0]), torch.tensor([1.0, 3.0])
    on, off = torch.tensor([True, True]), torch.tensor([False, False])
    assert not torch.allclose(model.trunk(z, t, x_prev, w, on), model.trunk(z, t, x_prev, w, off))
    torch.nn.init.zeros_(model.mode_tokens)
    assert torch.equal(model.trunk(z, t, x_prev, w, on), model.trunk(z, t, x_prev, w, off))


def test_a_mixed_batch_equals_the_two_modes_apart(golden):
    z, x_prev, w = ar((3, 6, 8), 0.3), ar((3, 6, 8), 1.1), torch.tensor([1.0, 3.0, 2.0])
    decode, t = torch.tensor([False, True, False]), torch.tensor([0.25, 1.0, 0.7])
    x_prev[1] = 0
    x_hat, logits = golden(z, t, x_prev, w, decode)
    torch.testing.assert_close(x_hat, golden.denoise(z, t, x_prev, w)[[0, 2]])
    torch.testing.assert_close(logits, golden.decode(z, w)[[1]])


def test_a_config_checks_types_and_values():
    assert Config(lr=1).lr == 1
    for bad in ({"hidden": "24"}, {"hidden": 24.0}, {"heads": 5}, {"data": 3}, {"ema": 1.0}, {"warmup": 0.7, "cooldown": 0.7}, {"w_min": 6.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Config(**bad)


def test_untrained_network_predicts_zero():
    model = ELF(GOLDEN)
    assert (model.denoise(ar((1, 6, 8), 0), torch.ones(1), ar((1, 6, 8), 1), torch.ones(1)) == 0).all()


@pytest.mark.parametrize("batch, n_decode, n_self_cond", [(3, 1, 1), (5, 1, 2), (8, 2, 3), (32, 6, 13), (512, 102, 205)])
def test_fixed_counts_give_each_example_each_role_with_the_right_frequency(batch, n_decode, n_self_cond):
    g, n = seeded(0), 400
    draws = [elf.draw(GOLDEN, batch, g) for _ in range(n)]
    decode, self_cond = (torch.stack([d[i] for d in draws]) for i in (0, 1))        # (n, B)
    assert (decode.sum(1) == n_decode).all() and (self_cond.sum(1) == n_self_cond).all()
    assert not (decode & self_cond).any()
    for role, share in ((decode, n_decode / batch), (self_cond, n_self_cond / batch)):
        spread = math.sqrt(share * (1 - share) / n)
        assert (role.float().mean(0) - share).abs().max() < 5 * spread


def test_rounded_counts_keep_the_expected_loss(golden):
    """Batch 8 has 2 decode examples where 1.6 are due: the weights make up for it."""
    x, ids, counted, draws = random_batch(8)
    counted = torch.ones_like(counted)
    loss, mse, ce = elf.flow_loss(golden, x, ids, counted, draws)
    torch.testing.assert_close(loss, 0.2 * ce + 0.8 * mse)


def test_draws_follow_their_laws():
    cfg = Config(latent_dim=1, length=4)
    draws = elf.draw(cfg, 20_000, seeded(0))
    for value, mean in ((draws.t, -1.5), (draws.p, 0.8)):
        assert value.logit().mean().item() == pytest.approx(mean, abs=0.03)
        assert value.logit().std().item() == pytest.approx(0.8, abs=0.03)
    log_w = (1 + draws.w).log()
    assert 0.5 <= draws.w.min() < 0.51 and 4.9 < draws.w.max() <= 5.0001
    assert log_w.mean().item() == pytest.approx((math.log(1.5) + math.log(6)) / 2, abs=0.01)
    assert log_w.std().item() == pytest.approx(math.log(4) / math.sqrt(12), abs=0.01)
    assert draws.eps.std().item() == pytest.approx(1, abs=0.02)


# ------------------------------------------------------------------------------- the tiny language


def test_the_language_is_large_and_training_sees_little_of_it():
    possible = math.prod(map(len, tiny_config.SLOTS))
    assert possible >= 1e6
    texts = list(tiny_config.made("tiny"))
    assert len(set(texts)) == len(texts) <= 0.05 * possible
    assert not set(texts) & set(tiny_config.made("tiny", heldout=True))


def test_every_story_obeys_the_rules_and_fits_the_tiny_preset():
    """The rules once more, by the places of the words."""
    she, plural = set("mia ana eva zoe ida lea".split()), {"kites", "balls", "books", "rings", "coats", "lamps", "drums", "dolls"}
    for text in list(tiny_config.made("tiny"))[:5000]:
        assert tiny_config.is_story(text), text
        first, second, third, rest = (part.split() for part in text.split("."))
        assert not rest and second[0] == ("she" if first[0] in she else "he") and third[0] == first[0]
        assert (first[2] != "one") == (first[4] in plural) == (second[3] == "them")
        assert third[2] == "the" and third[3:5] == first[3:5]
        assert (second[1], third[1]) == tuple(word.split()[0] for word in tiny_config.MISHAPS[first[1]])
        assert len(text.split()) < PRESETS["tiny"].length           # there is room for an end


def test_each_rule_is_checked():
    good = "mia lost two red kites at the pond . she looked for them all day . mia found the red kites at noon ."
    assert tiny_config.is_story(good)
    assert tiny_config.is_story("tom broke one blue ring at home . he cried over it for weeks . tom mended the blue ring in spring .")
    for old, new, rule in [("two red kites", "two red kite", "thing fits number"), ("she", "he", "she/he fits name"),
                           ("them", "it", "it/them fits number"), ("looked for", "waited for", "middle fits opening"),
                           ("found", "mended", "ending fits opening"), (". mia", ". ana", "name comes back"),
                           ("the red", "the blue", "colour comes back"), ("red kites at noon", "red balls at noon", "thing comes back"),
                           ("red kites at noon", "red kite at noon", "thing comes back")]:
        assert old in good and not tiny_config.is_story(good.replace(old, new)), rule
    for bad in ("", good[:-2], good + " .", good.replace("mia lost", "mia mia lost"), good.replace(" at noon", ""), good.upper(),
                good + "\n", good.replace(" .", "."), good.replace("red kites at noon", "red kites today at noon")):
        assert not tiny_config.is_story(bad), bad


def test_a_changed_word_is_only_valid_where_the_language_has_that_story():
    """The checker against the generator: all one-word changes of a story, compared with the set of all stories near it."""
    choice = ["mia", "lost", "two", "red", "kite", "at the pond", "all day", "at noon"]
    near = {tiny_config.story(*choice[:i], other, *choice[i + 1:]) for i, slot in enumerate(tiny_config.SLOTS) for other in slot}
    words = tiny_config.story(*choice).split()
    vocabulary = {word for text in near for word in text.split()}
    for i in range(len(words)):
        for word in vocabulary:
            text = " ".join(words[:i] + [word] + words[i + 1:])
            assert tiny_config.is_story(text) == (text in near), text


def test_a_trigram_model_writes_few_valid_stories():
    following = defaultdict(list)
    for text in tiny_config.made("tiny"):
        words = ["", "", *text.split(), ""]
        for a, b, c in zip(words, words[1:], words[2:]):
            following[a, b].append(c)
    rng, valid = random.Random(0), 0
    for _ in range(1000):
        words = ["", ""]
        while len(words) < 60 and (word := rng.choice(following[tuple(words[-2:])])):
            words.append(word)
        valid += tiny_config.is_story(" ".join(words[2:]))
    assert valid / 1000 < 0.2


# ------------------------------------------------------------------------------- measures


def test_text_measures_by_hand():
    source = "The cat sat.\nOn the mat, the CAT slept!"
    got = tiny_config.judge_text(["the cat flew", "on the mat the cat slept well", ""], source)
    assert got == {"known_words": pytest.approx(8 / 10), "longest_copy": 6}
    assert tiny_config.judge_text(["hecat satonthe"], source) == {"known_words": 0, "longest_copy": 0}


def test_story_measures():
    old, new = (next(iter(tiny_config.made("tiny", heldout))) for heldout in (False, True))
    assert tiny_config.judge_stories([old, new, "mia", ""]) == {"valid": [1, 1, 0, 0], "novel": 0.5}


# ------------------------------------------------------------------------------- Muon, schedule, average, data order


def plain_muon(weights, grads, lr, momentum):
    """The update of one matrix after a list of gradients, from the formulas in float64."""
    buffer = torch.zeros_like(weights)
    for grad in grads:
        buffer = momentum * buffer + grad
        x = grad + momentum * buffer
        x = x / x.norm()
        transposed = x.shape[0] > x.shape[1]
        x = x.T if transposed else x
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if transposed else x
        weights = weights - lr * max(1, weights.shape[0] / weights.shape[1]) ** 0.5 * x
    return weights


def test_muon_equals_a_plain_computation_matrix_by_matrix():
    shapes = [(8, 8), (12, 4), (4, 12), (12, 4)]                    # square, tall, wide, and one to be stacked
    weights = [nn.Parameter(torch.randn(shape, generator=seeded(1, i))) for i, shape in enumerate(shapes)]
    grads = [[torch.randn(shape, generator=seeded(2, i, step)) for step in range(3)] for i, shape in enumerate(shapes)]
    want = [plain_muon(w.detach().double(), [g.double() for g in gs], 0.1, 0.95) for w, gs in zip(weights, grads)]
    optimizer = train.Muon(weights, lr=0.1)
    for step in range(3):
        for w, gs in zip(weights, grads):
            w.grad = gs[step].clone()
        optimizer.step()
    for w, expected in zip(weights, want):
        torch.testing.assert_close(w.detach().double(), expected, rtol=0, atol=1e-5)


def test_muon_has_the_matrices_and_adam_the_rest():
    model = ELF(GOLDEN)
    muon, adam = train.make_optimizers(model, GOLDEN)
    in_muon, in_adam = ({id(p) for p in o.param_groups[0]["params"]} for o in (muon, adam))
    for name, p in model.named_parameters():
        assert (id(p) in in_muon) == (p.ndim == 2) and (id(p) in in_adam) == (p.ndim != 2), name


def test_the_unembedding_has_the_released_scale():
    """[out, in] like all others, so that Muon's scale is sqrt(V / D), 7.9 for the full size, and not 1."""
    assert ELF(GOLDEN).unembed.weight.shape == (GOLDEN.vocab, GOLDEN.latent_dim)
    grad = torch.randn(GOLDEN.vocab, GOLDEN.latent_dim, generator=seeded(0))
    weight = nn.Parameter(torch.zeros_like(grad))
    weight.grad = grad
    train.Muon([weight], lr=1.0, momentum=0.0).step()
    ratio = weight.detach() / train.orthogonal(grad[None])[0]
    torch.testing.assert_close(ratio, torch.full_like(ratio, -math.sqrt(11 / 8)))


def test_schedule():
    cfg = Config(steps=100, warmup=0.1, cooldown=0.3)
    rates = [train.schedule(step, cfg) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9:71] == [1] * 62 and rates[99] == pytest.approx(1 / 30)
    assert [train.schedule(step, Config(steps=5, warmup=0.0)) for step in range(5)] == [1] * 5


def test_batches_read_ahead_are_the_same():
    """As on a GPU."""
    rows, cfg = torch.arange(40).reshape(20, 2).numpy(), Config(batch=6, steps=7, length=2)
    ahead = [list(train.batches(rows, cfg, 2, rank, 2, gpu=True)) for rank in (0, 1)]
    plain = list(train.batches(rows, cfg, 2))
    assert len(plain) == 5 and torch.equal(torch.stack(plain), torch.cat([torch.stack(part) for part in ahead], dim=1))
    assert torch.equal(plain[0], tiny_config.take(rows, train.batch_rows(2, 6, 20, 0)))


def test_batches_run_through_every_row_once_an_epoch_in_a_new_order():
    rows = torch.cat([train.batch_rows(step, 4, 10, seed=3) for step in range(5)]).tolist()        # two epochs of 10 rows
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10)) and rows[:10] != rows[10:]
    assert train.batch_rows(2, 4, 10, seed=3).tolist() == rows[8:12]
    assert train.batch_rows(0, 4, 10, seed=4).tolist() != rows[:4]


# ------------------------------------------------------------------------------- the programs

SMALL = ["--hidden=32", "--depth=1", "--heads=2", "--latent_dim=16", "--bottleneck=8", "--batch=8", "--steps=40",
         "--encoder_steps=20", "--sample_steps=4", "--eval_every=20", "--device=cpu"]


FEW = """
import tiny_config
few = [dict.fromkeys(list(tiny_config.made("tiny", heldout))[:n]) for heldout, n in ((False, 300), (True, 15))]
def made(name, heldout=False):
    return few[heldout]
"""


@pytest.fixture(scope="module")
def few():
    """The first 300 stories, and 15 to be held out, are enough to test the programs."""
    exec(FEW, names := {})
    return names["made"]


@pytest.fixture
def few_stories(monkeypatch, few):
    monkeypatch.setattr(tiny_config, "made", few)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, few):
    """What a whole run of 40 steps leaves behind."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_config, "made", few)
        train.main(["--config=tiny", f"--out_dir={folder}", *SMALL])
    return folder


def weights_of(folder):
    """The state of a run, but for its log, which has times in it."""
    return torch.load(folder / "state.pt", weights_only=True) | {"log": []}


def assert_same(a, b):
    """Equal bit for bit, all the way down."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_same(a[name], b[name])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for left, right in zip(a, b):
            assert_same(left, right)
    else:
        assert a == b


def trainer_of(folder, options=train.Options(), **changes):
    """A Trainer for the run in a folder, at its first step, on other stories."""
    cfg = dataclasses.replace(elf.load_config(folder), **changes)
    encoder = tiny_config.load_encoder(f"{folder}/encoder")
    stories = datasets.Dataset.from_dict({"output": list(tiny_config.made("tiny", heldout=True))})
    return train.Trainer(cfg, encoder, tiny_config.token_rows(stories, cfg, encoder.tokenizer), torch.device("cpu"), options)


def batch_of(trainer, step):
    return next(iter(train.batches(trainer.rows, trainer.cfg, step)))


def refused(capsys, program, *argv):
    """Runs a program that must refuse its input: exit code 2 and one line, which is returned."""
    with pytest.raises(SystemExit) as stop:
        sample.run(program.main, list(map(str, argv)))
    assert stop.value.code == 2
    notice, line = "the rest is the preset's", capsys.readouterr().err.strip()                # of weights that were loaded before
    line = line.partition("\n")[2] if notice in line.partition("\n")[0] else line
    assert line.startswith("error: ") and "\n" not in line
    return line


def test_a_run_leaves_all_its_files(run_folder):
    for name in ("config.json", "model.safetensors", "state.pt", "metrics.jsonl", "samples.txt", "loss.png", "encoder"):
        assert (run_folder / name).exists(), name
    entries = [json.loads(line) for line in open(run_folder / "metrics.jsonl")]
    assert {"heldout_mse", "heldout_ce", "valid"} <= set().union(*entries)
    held_out = [entry["heldout_ce"] for entry in entries if "heldout_ce" in entry]
    assert len(held_out) == 2 and held_out[1] < held_out[0]         # it learns
    assert not list(run_folder.glob("*.tmp"))


def test_same_seed_same_bits(run_folder, tmp_path, few_stories):
    train.main(["--config=tiny", f"--out_dir={tmp_path / 'again'}", *SMALL])
    assert_same(weights_of(run_folder), weights_of(tmp_path / "again"))
    train.main(["--config=tiny", f"--out_dir={tmp_path / 'other'}", "--seed=1", *SMALL])
    assert not torch.equal(weights_of(run_folder)["model"]["proj.weight"], weights_of(tmp_path / "other")["model"]["proj.weight"])


def test_a_saved_model_is_the_average_and_generates(run_folder, tmp_path, capsys):
    model, cfg = elf.load_model(str(run_folder))
    assert not model.training and cfg.steps == 40
    state = weights_of(run_folder)
    assert torch.equal(model.proj.weight, state["average"]["proj.weight"])
    assert not torch.equal(model.proj.weight, state["model"]["proj.weight"])

    out, table = tmp_path / "texts.jsonl", tmp_path / "table.json"
    sample.main([f"--model={run_folder}", "--n=5", f"--out={out}", f"--json={table}"])
    first = [json.loads(line) for line in open(out)]
    assert [line["id"] for line in first] == list(range(5))
    sample.main([f"--model={run_folder}", "--n=5", "--batch=2", f"--out={out}"])
    assert [json.loads(line) for line in open(out)] == first        # the same seed, another batch
    sample.main([f"--model={run_folder}", "--n=5", "--seed=1", f"--out={out}"])
    assert [json.loads(line) for line in open(out)] != first
    row, = json.load(open(table))
    assert {"sampler", "steps", "gamma", "w", "n", "seconds", "entropy", "data_entropy", "valid", "novel", "distinct"} <= row.keys()


def test_a_model_with_gamma_0_samples_with_it(run_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run_folder, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"gamma": 0.0}))
    sample.main([f"--model={folder}", "--n=1", f"--json={tmp_path}/table.json"])
    assert json.load(open(tmp_path / "table.json"))[0]["gamma"] == 0


def test_a_sweep_ends_in_a_table_and_repeats_nothing(run_folder, tmp_path, capsys):
    table = tmp_path / "table.json"
    sample.main([f"--model={run_folder}", "--n=3", "--sampler=ode,sde", "--steps=1,2", "--gamma=0.5,1", f"--json={table}"])
    rows = json.load(open(table))
    assert [(r["sampler"], r["steps"], r["gamma"]) for r in rows] == [
        ("ode", 1, 0), ("ode", 2, 0), ("sde", 2, 0.5), ("sde", 2, 1)]     # an SDE of one step is the ODE
    assert "sampler" in capsys.readouterr().out.splitlines()[-len(rows) - 1]


def test_trace_shows_each_step_and_marks_changes(run_folder, tmp_path, capsys):
    sample.main([f"--model={run_folder}", "--trace", "--steps=5"])
    lines = capsys.readouterr().out.strip().splitlines()
    sample.main([f"--model={run_folder}", "--trace", f"--plot={tmp_path}/trace.png", "--steps=5"])
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out.strip().splitlines() == lines
    assert len(lines) == 5 and lines[-1].startswith("t=1.000") and "[" not in lines[0]
    assert "[" in "".join(lines[1:])


DYING = FEW + """
import os, signal, sys, train
tiny_config.made = made
whole = train.Trainer.train_step
def step(self, ids):
    if self.step == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, ids)
train.Trainer.train_step = step
train.main(sys.argv[1:])
"""


def test_resume_after_kill_9_is_exact(run_folder, tmp_path, few_stories, capsys):
    folder = tmp_path / "killed"
    killed = subprocess.run([sys.executable, "-c", DYING, "--config=tiny", f"--out_dir={folder}", *SMALL], cwd=HERE)
    assert killed.returncode == -signal.SIGKILL
    assert weights_of(folder)["step"] == 20
    train.main(["--config=tiny", f"--out_dir={folder}", "--resume"])
    assert_same(weights_of(folder), weights_of(run_folder))
    steps = [[json.loads(line)["step"] for line in open(f / "metrics.jsonl")] for f in (folder, run_folder)]
    assert steps[0] == steps[1]                                     # no entry twice, none missing
    assert (folder / "samples.txt").read_text() == (run_folder / "samples.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_save_and_say_how_to_go_on(run_folder, tmp_path, few_stories, monkeypatch, capsys, number):
    folder, whole = tmp_path / "stopped", train.Trainer.train_step

    def step(self, ids):
        if self.step == 6:
            signal.raise_signal(number)
        return whole(self, ids)
    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", step)
        with pytest.raises(SystemExit) as stop:
            train.main(["--config=tiny", f"--out_dir={folder}", *SMALL])
    message = str(stop.value.code)                                  # which Python prints, and leaves with 1
    assert weights_of(folder)["step"] == 7
    assert "step 7" in message and f"--out_dir={folder} --resume" in message
    train.main(["--config=tiny", f"--out_dir={folder}", "--resume"])
    assert_same(weights_of(folder), weights_of(run_folder))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path, few_stories, monkeypatch, capsys):
    folder, whole = tmp_path / "nan", train.Trainer.loss

    def loss(self, *args):
        result = whole(self, *args)
        return (result[0] * float("nan"), *result[1:]) if self.step == 19 else result
    monkeypatch.setattr(train.Trainer, "loss", loss)
    with pytest.raises(SystemExit) as stop:
        train.main(["--config=tiny", f"--out_dir={folder}", *SMALL])
    assert "step 20" in stop.value.code
    assert weights_of(folder)["step"] == 0 and elf.load_model(folder)


def test_a_kill_during_a_checkpoint_write_leaves_the_previous_one(run_folder, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(run_folder, folder)
    before = weights_of(folder)
    trainer = trainer_of(folder)

    def cut_off(state, path):
        with open(path, "wb") as file:
            file.write(b"half a checkpoint")
        raise KeyboardInterrupt                                     # stands for the kill: nothing after it runs
    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(KeyboardInterrupt):
        trainer.save(folder)
    assert_same(weights_of(folder), before)
    assert elf.load_model(folder)


# ------------------------------------------------------------------------------- parts of a batch, processes, precision


def concatenated(parts):
    return elf.Draws(*(torch.cat(values) for values in zip(*parts)))


def test_parts_of_a_batch_add_up_to_the_batch(golden):
    """Losses and gradients, with the number of counted positions in the whole batch, which differs from part to part."""
    parts = [random_batch(4, seed) for seed in range(3)]
    whole = [torch.cat(values) for values in list(zip(*parts))[:3]] + [concatenated([part[3] for part in parts])]
    n = whole[2].sum()
    loss = sum(elf.flow_loss(golden, *part, n)[0] for part in parts)
    want = elf.flow_loss(golden, *whole)[0]
    torch.testing.assert_close(loss, want)
    got, expected = gradients(golden, loss), gradients(golden, want)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5 * expected[name].abs().max().item())


def close(a, b, tolerance=1e-4):
    """Checkpoints that are equal but for rounding."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    elif isinstance(a, (dict, list)):
        assert len(a) == len(b)
        for i in a if isinstance(a, dict) else range(len(a)):
            close(a[i], b[i], tolerance)
    else:
        assert a == b


def test_four_micro_batches_equal_one_batch(run_folder, monkeypatch):
    """5 steps with the same draws: weights, momenta and averages."""
    options = [train.Options(micro_batch=4), train.Options()]
    (four, one), draw = (trainer_of(run_folder, options=o, batch=16) for o in options), elf.draw
    for step in range(5):
        draws = [draw(four.cfg, 4, seeded(9, step, i)) for i in range(4)]
        ids = batch_of(four, step)
        for trainer, handed in ((four, iter(draws)), (one, iter([concatenated(draws)]))):
            monkeypatch.setattr(elf, "draw", lambda *args: next(handed))
            trainer.train_step(ids)
    close({**four.state(), "micro": 0}, {**one.state(), "micro": 0})


@pytest.fixture(scope="module")
def padded_data(tmp_path_factory, run_folder):
    """Arguments for training on ready-made rows of 5 to 25 tokens, the shorter ones to be padded."""
    texts = [text.split()[:5 + i % 18] for i, text in enumerate(list(tiny_config.made("tiny"))[:200])]
    tokenizer = tiny_config.load_tokenizer(f"{run_folder}/encoder")
    folder = tmp_path_factory.mktemp("rows")
    datasets.Dataset.from_dict({"input_ids": [tokenizer.convert_tokens_to_ids(text) for text in texts]}).save_to_disk(folder)
    return ["--config=tiny", f"--data={folder}", f"--encoder={run_folder}/encoder", *SMALL, "--steps=10", "--eval_every=5",
            "--batch=12", "--micro_batch=3"]


def torchrun(code, *argv, timeout=120):
    """Runs train.main on two processes, after some code of the test's; returns the exit code."""
    script = f"import os, signal, sys, torch, train\n{code}\nsample = __import__('sample'); sample.run(train.main, sys.argv[1:])"
    Path("script.py").write_text(script)
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "script.py", *argv],
                          env=os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}, timeout=timeout).returncode


KILLED = """
whole = train.Trainer.train_step
def step(self, ids):
    if self.step == 7 and self.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, ids)
train.Trainer.train_step = step
"""


def test_two_processes_equal_one_and_survive_the_death_of_one(padded_data, tmp_path, capsys):
    two, one, killed, alone = (tmp_path / name for name in ("two", "one", "killed", "alone"))
    assert torchrun("", *padded_data, f"--out_dir={two}") == 0
    train.main([*padded_data, f"--out_dir={one}"])                  # the same four parts, in one process
    close(weights_of(two), weights_of(one))                         # weights, momenta of the gradients, average
    figures = [[json.loads(line) for line in open(folder / "metrics.jsonl")] for folder in (two, one)]
    for a, b in zip(*figures, strict=True):
        for name in {"loss", "mse", "ce", "grad_norm"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-3)

    assert torchrun(KILLED, *padded_data, f"--out_dir={killed}", timeout=60) != 0
    assert weights_of(killed)["step"] == 5 and elf.load_model(str(killed))
    shutil.copytree(killed, alone)
    assert torchrun("", "--config=tiny", f"--out_dir={killed}", "--resume", "--device=cpu", "--micro_batch=3") == 0
    assert_same(weights_of(killed), weights_of(two))
    capsys.readouterr()
    train.main(["--config=tiny", f"--out_dir={alone}", "--resume", "--device=cpu"])
    assert "--micro_batch=3" in capsys.readouterr().out             # one process works too, and says what differs
    assert weights_of(alone)["step"] == 10


@pytest.mark.slow
def test_an_interrupt_of_two_processes_saves(padded_data, tmp_path):
    code = "step = train.Trainer.train_step\ntrain.Trainer.train_step = lambda self, ids: (self.step == 3 and self.rank == 1 and " \
           "[signal.raise_signal(signal.SIGTERM) for _ in range(2)], step(self, ids))[1]"     # torchrun may pass it on once more
    assert torchrun(code, *padded_data, f"--out_dir={tmp_path}/run") != 0
    assert weights_of(tmp_path / "run")["step"] == 4


def test_a_batch_that_cannot_be_shared_out_evenly_is_refused(run_folder, capsys, few_stories, tmp_path):
    for argv in (["--micro_batch=3"], ["--micro_batch=2"], ["--micro_batch=16"]):
        assert "micro_batch" in refused(capsys, train, "--config=tiny", f"--out_dir={tmp_path}/new", *SMALL, *argv)
    assert not (tmp_path / "new").exists()


def test_dry_run_makes_one_step_and_writes_nothing(few_stories, capsys):
    train.main(["--config=tiny", *SMALL, "--dry_run"])
    said = capsys.readouterr().out
    assert all(word in said for word in ("parameters", "7,500 training tokens", "an epoch of 37.5 steps of 200 tokens", "steps 0 to 40", "'mse'"))
    assert not list(Path().rglob("*.safetensors")) and not list(Path().rglob("*.pt"))


def test_snapshots_are_kept_and_load(few_stories, tmp_path):
    train.main(["--config=tiny", f"--out_dir={tmp_path}/run", *SMALL, "--eval_every=10", "--keep=2"])
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*")) == ["step_20", "step_40"]
    sample.main([f"--model={tmp_path}/run/step_20", "--n=1"])
    (last, _), (whole, _), (early, _) = (elf.load_model(f"{tmp_path}/run{name}") for name in ("/step_40", "", "/step_20"))
    assert torch.equal(last.proj.weight, whole.proj.weight) and not torch.equal(early.proj.weight, whole.proj.weight)


def test_training_starts_from_given_weights(run_folder, tmp_path, capsys):
    model, cfg = elf.load_model(str(run_folder))
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(("proj.", "unembed."))}
    for name in ("proj", "unembed"):
        state |= {f"{name}_kernel": getattr(model, name).weight.T, f"{name}_bias": getattr(model, name).bias}
    released = write_released(tmp_path / "checkpoint_3", state)
    for source in (run_folder, released):
        trainer = trainer_of(run_folder, options=train.Options(init=str(source)))
        assert_same(dict(trainer.model.state_dict()), dict(model.state_dict()))
        assert_same(dict(trainer.average.state_dict()), dict(model.state_dict()))
    sample.main([f"--model={released}", f"--encoder={run_folder}/encoder", "--config=tiny", "--n=1", "--steps=2"])
    assert "'length': 25" in capsys.readouterr().err
    for change, word in (({"depth": 2}, "blocks.1"), ({"latent_std": 3.0}, "latent_std")):
        with pytest.raises(elf.UserError, match=word):
            trainer_of(run_folder, options=train.Options(init=str(run_folder)), **change)


def test_average_is_warmed_up(run_folder):
    """After 30 steps a decay of 0.9999 alone would have left 99.7 % of the first weights."""
    trainer = trainer_of(run_folder, ema=0.9999)
    first = want = trainer.model.proj.weight.detach().clone()
    for n in range(30):
        trainer.train_step(batch_of(trainer, n))
        decay = min(0.9999, (1 + n) / (10 + n))
        want = decay * want + (1 - decay) * trainer.model.proj.weight.detach()
    torch.testing.assert_close(trainer.average.proj.weight, want)
    last = trainer.model.proj.weight.detach()
    assert (want - last).norm() < 0.5 * (first - last).norm()


def test_adamw_trains_all_weights(run_folder):
    trainer = trainer_of(run_folder, optimizer="adamw")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    first = [trainer.train_step(batch_of(trainer, i))["ce"] for i in range(10)]
    assert first[-1] < first[0] and not any(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


def test_recomputed_activations_change_nothing(run_folder):
    plain, saving = (trainer_of(run_folder, options=train.Options(checkpoint_activations=on)) for on in (False, True))
    for trainer in (plain, saving):
        trainer.train_step(batch_of(trainer, 0))
    assert_same(plain.state(), saving.state())


def test_bfloat16_is_for_the_blocks_alone(run_folder):
    """Inside the blocks bfloat16; the embeddings, the residual stream, both heads and so the loss in float32."""
    trainer = trainer_of(run_folder, options=train.Options(dtype="bfloat16"))
    model, seen = trainer.model, {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output}))
    ids = batch_of(trainer, 0)
    low = [trainer.train_step(ids)["loss"] for _ in range(5)]
    dtypes = {name: output.dtype for name, output in seen.items() if isinstance(output, torch.Tensor)}
    assert {dtypes[name] for name in ("blocks.0.attn.qkv", "blocks.0.mlp.w12", "blocks.0.mlp.w3")} == {torch.bfloat16}
    for name in ("t_embedder", "self_cond_cfg_embedder", "text_proj", "blocks.0", "blocks.0.norm1", "final_layer", "unembed"):
        assert dtypes[name] == torch.float32, name
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    plain = trainer_of(run_folder)
    high = [plain.train_step(ids)["loss"] for _ in range(5)]
    assert low == pytest.approx(high, rel=0.02) and low != high
    alone = ELF(trainer.cfg)                                         # the averaged model runs its own weights, in float32
    alone.load_state_dict(trainer.average.state_dict())
    z, w = torch.randn(1, 25, 16, generator=seeded(0)), torch.ones(1)
    torch.nn.init.normal_(trainer.model.blocks[0].attn.qkv.weight)
    assert torch.equal(alone.decode(z, w), trainer.average.decode(z, w))


@pytest.mark.slow
def test_compiled_blocks_give_the_same_losses_and_checkpoints(run_folder, tmp_path):
    eager, compiled = (trainer_of(run_folder, options=train.Options(compile=on)) for on in (False, True))
    for step in range(10):
        ids = batch_of(eager, step)
        assert compiled.train_step(ids)["loss"] == pytest.approx(eager.train_step(ids)["loss"], rel=1e-4)
    close(compiled.state(), eager.state(), 1e-3)
    for name, writer, reader in (("a", compiled, eager), ("b", eager, compiled)):
        (tmp_path / name).mkdir()
        writer.save(tmp_path / name)
        reader.load(tmp_path / name)
        assert_same(dict(reader.model.state_dict()), dict(writer.model.state_dict()))
        assert elf.load_model(str(tmp_path / name))
    sample.main([f"--model={run_folder}", "--n=1", "--compile"])
    graphs = torch._dynamo.utils.counters["stats"]                  # recomputing activations must not keep blocks from being compiled
    torch._dynamo.reset()
    before, both = graphs["unique_graphs"], trainer_of(run_folder, options=train.Options(compile=True, checkpoint_activations=True))
    both.train_step(batch_of(both, 0))
    assert graphs["unique_graphs"] > before


# ------------------------------------------------------------------------------- bad input


def test_an_existing_folder_is_not_overwritten(run_folder, capsys):
    before = (run_folder / "state.pt").read_bytes()
    assert "__init__" not in refused(capsys, train, "--config=tiny", f"--out_dir={run_folder}/state.pt/deeper")
    line = refused(capsys, train, "--config=tiny", f"--out_dir={run_folder}")
    assert "--resume" in line and "--out_dir" in line
    assert (run_folder / "state.pt").read_bytes() == before


@pytest.mark.parametrize("argv, words", [
    (["--config=tiny", "--hiden=3"], ["hiden", "hidden"]), (["--config=tinny"], ["tinny", "tiny"]), ([], ["config", "owt_b"]),
    (["--config=tiny", "--hidden=wide"], ["hidden", "wide", "whole number"]), (["--config=tiny", "--lr=nan"], ["lr", "nan"]),
    (["--config=tiny", "--lr"], ["lr", "expected one argument"]), (["--config=tiny", "--resume=maybe"], ["resume", "maybe"]), (["tiny"], ["tiny"]),
    (["--config=tiny", "--heads=5"], ["heads", "5"]), (["--config=tiny", "--batch=2"], ["batch", "2"]),
    (["--config=tiny", "--length=20"], ["--length=20", "example 1 ", "22 tokens"]), (["--config=tiny", "--seed=-1"], ["seed", "-1"]),
    (["--config=tiny", "--lr=1e300"], ["lr", "1e+300"]),
    (["--config=tiny", "--data=/no/such/file"], ["/no/such/file"]), (["--config=tiny", "--device=abacus"], ["abacus"])])
def test_train_refuses_in_one_line(tmp_path, capsys, argv, words):
    line = refused(capsys, train, *argv, f"--out_dir={tmp_path / 'new'}")
    assert all(word in line for word in words), line
    assert not (tmp_path / "new").exists()


def texts_of(source):
    return [row["text"] for row in tiny_config.open_data(source)]


def test_an_address_is_fetched_once_and_no_network_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny_config.urllib.request, "urlopen", lambda address, timeout: io.BytesIO(b"to be or not"))
    assert texts_of("https://one.invalid/a/input.txt") == ["to be or not"]

    def offline(address, timeout):
        raise OSError("no network")
    monkeypatch.setattr(tiny_config.urllib.request, "urlopen", offline)
    assert texts_of("https://one.invalid/a/input.txt") == ["to be or not"]      # kept
    assert "--data=FILE" in refused(capsys, train, "--config=tiny_text", "--data=https://two.invalid/a/input.txt")


@pytest.mark.parametrize("content, word", [
    (b"", "empty"), (b" \n", "rows"), (b"caf\xe9 au lait", "UTF-8"), (b"\x00\x01\x02" * 99, "zero bytes"), (b"too short", "rows")])
def test_bad_text_files_are_refused(tmp_path, capsys, content, word):
    (tmp_path / "text.txt").write_bytes(content)
    line = refused(capsys, train, "--config=tiny_text", f"--data={tmp_path}/text.txt", f"--out_dir={tmp_path / 'new'}")
    assert word in line and "text.txt" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("argv, words", [
    ([], ["--model"]), (["--model=/no/such/folder"], ["/no/such/folder"]), (["--model={}", "--steps=4,x"], ["steps", "x"]),
    (["--model={}", "--steps=0"], ["steps"]), (["--model={}", "--sampler=heun"], ["sampler", "heun", "ode", "sde"]), (["--model={}", "--w=0"], ["w"]),
    (["--model={}", "--n=0"], ["n"]), (["--model={}", "--step=3"], ["step", "steps"]), (["--model={}", "--out=/no/such/x.jsonl"], ["/no/such"]),
    (["--model={}", "--steps=1,2", "--out=x.jsonl"], ["--out"]), (["--model={}", "--seed=-1"], ["seed"]), (["--model={}", "--out={}"], ["--out"]),
    (["--model={}", "--trace", "--json=x.json"], ["--trace", "--json"]), (["--model={}", "--plot=x.abc"], [".png"]),
    (["--model={}", "--out=x", "--json=./x"], ["different files"]), (["--model={}", "--device=nope"], ["nope"]),
    (["--model={}", "--data=/no/such"], ["/no/such"]), (["--model={}", "--data={}/samples.txt"], ["tiny"])])
def test_sample_refuses_in_one_line(run_folder, capsys, argv, words):
    line = refused(capsys, sample, *(arg.format(run_folder) for arg in argv))
    assert all(word in line for word in words), line


def damage(folder, name, change):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(change(data))


@pytest.mark.parametrize("change", [lambda data: data[:len(data) // 2], lambda data: b"", lambda data: b"something else"])
def test_damaged_files_are_refused(run_folder, tmp_path, capsys, few_stories, change):
    for name, program in (("state.pt", train), ("model.safetensors", sample), ("config.json", sample)):
        folder = tmp_path / name
        shutil.copytree(run_folder, folder)
        damage(folder, name, change)
        left = (folder / name).read_bytes()
        argv = ["--config=tiny", f"--out_dir={folder}", "--resume"] if program is train else [f"--model={folder}"]
        assert name in refused(capsys, program, *argv)
        assert (folder / name).read_bytes() == left


def test_missing_and_foreign_checkpoints_are_refused(run_folder, tmp_path, capsys, few_stories):
    folder = tmp_path / "copy"
    shutil.copytree(run_folder, folder)
    argv = ["--config=tiny", f"--out_dir={folder}", "--resume"]
    assert "seed" in refused(capsys, train, *argv, "--seed=7")
    assert "hidden" in refused(capsys, train, *argv, "--hidden=64")
    (folder / "encoder").rename(tmp_path / "moved")
    assert "encoder is missing" in refused(capsys, train, *argv)
    assert "encoder is missing" in refused(capsys, sample, f"--model={folder}")
    (tmp_path / "moved").rename(folder / "encoder")
    damaged = weights_of(folder)
    torch.save(damaged | {"data": "something else"}, folder / "state.pt")
    assert "other data" in refused(capsys, train, *argv)
    torch.save({"step": 3, "weights": torch.zeros(2)}, folder / "state.pt")
    assert "not a whole checkpoint" in refused(capsys, train, *argv)
    (folder / "state.pt").unlink()
    assert "missing" in refused(capsys, train, *argv)
    assert "config.json" in refused(capsys, train, "--config=tiny", f"--out_dir={tmp_path / 'nothing'}", "--resume")


def test_a_checkpoint_with_code_is_refused_and_not_run(run_folder, tmp_path, capsys, few_stories):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)
    folder = tmp_path / "copy"
    shutil.copytree(run_folder, folder)
    torch.save({"step": 0, "bomb": Bomb()}, folder / "state.pt")
    assert "refused" in refused(capsys, train, "--config=tiny", f"--out_dir={folder}", "--resume")
    assert not (tmp_path / "exploded").exists()


def test_weights_that_do_not_fit_say_what_differs(run_folder, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(run_folder, folder)
    settings = json.loads((folder / "config.json").read_text())
    for changes, words in (({"depth": 2}, ["blocks.1.norm1.weight"]), ({"latent_dim": 8}, ["proj.weight", "16", "8"]),
                           ({"hiden": 3}, ["hiden"]), ({"depth": "two"}, ["depth", "two"])):
        (folder / "config.json").write_text(json.dumps(settings | changes))
        line = refused(capsys, sample, f"--model={folder}")
        assert all(word in line for word in words), line
    del settings["heads"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert "heads" in refused(capsys, sample, f"--model={folder}")


@pytest.mark.parametrize("program, groups", [(train, [train.Options(), Config()]), (sample, [sample.Options(), sample.Setting()])])
def test_help_lists_every_key_with_default_and_meaning(capsys, monkeypatch, program, groups):
    monkeypatch.setenv("COLUMNS", "1000")                           # no words are broken
    with pytest.raises(SystemExit) as stop:
        program.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for group in groups:
        for f in dataclasses.fields(group):
            shown = f"[{f.default}]" if f.type is bool else f.default       # which may be left out
            assert " ".join(f"--{f.name} {shown} {f.metadata['help']}".split()) in text


def test_a_text_file_trains_and_generates(tmp_path, capsys):
    rng = random.Random(0)
    text = "\n".join(" ".join(rng.choice(["sun", "moon", "été", "</s>", "<mask>"]) for _ in range(8)) for _ in range(300))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    folder = tmp_path / "run"
    train.main(["--config=tiny_text", f"--data={tmp_path}/text.txt", f"--out_dir={folder}", "--vocab=280", "--length=16", *SMALL])
    sample.main([f"--model={folder}", "--n=2", f"--json={tmp_path}/table.json"])
    row, = json.load(open(tmp_path / "table.json"))
    assert row["data_entropy"] > 0 and {"known_words", "longest_copy"} <= row.keys()
    # the same command goes on, though the run filled in a smaller vocabulary; damaged logs don't stop it
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'garbage\n{"step": 7, "lo\xff')
    train.main(["--config=tiny_text", f"--data={tmp_path}/text.txt", f"--out_dir={folder}", "--vocab=280", "--length=16", *SMALL, "--resume"])
    assert [json.loads(line)["step"] for line in open(folder / "metrics.jsonl")][-1] == 40
    # packing: the blocks, held-out ones included, are the text, but for an incomplete last block
    cfg, encoder, rows, heldout = train.load_data(elf.load_config(folder), "cpu", tiny_config.load_encoder(f"{folder}/encoder"))
    packed = encoder.tokenizer.decode([*rows.flatten(), *heldout.flatten()])
    assert (text + "</s>").startswith(packed) and len(text) - len(packed) < 16 * 5
    assert encoder.tokenizer.eos_token_id not in rows               # "</s>" in a text is text


def test_a_run_that_came_in_between_is_not_overwritten(run_folder, tmp_path, capsys, few_stories, monkeypatch):
    folder, whole = tmp_path / "taken", train.load_data

    def slow(*args):
        shutil.copytree(run_folder, folder)                         # another run gets there first
        return whole(*args)
    monkeypatch.setattr(train, "load_data", slow)
    assert "taken" in refused(capsys, train, "--config=tiny", f"--out_dir={folder}", *SMALL)
    assert_same(weights_of(folder), weights_of(run_folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "taken"]


# ------------------------------------------------------------------------------- pretrained encoders

TEXT = "".join(" ".join(random.Random(i).choices(["sun", "moon", "été", "hill", "</s>", "[SEP]"], k=8)) + "\n" for i in range(150))


def word_pieces(text):
    """A tokenizer like BERT's: it would put [CLS] and [SEP] around a text, and knows no end of sequence."""
    tokenizer = tk.Tokenizer(tk.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = tk.normalizers.BertNormalizer(), tk.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder, special = tk.decoders.WordPiece(), ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tk.trainers.WordPieceTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.post_processor = tk.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {f"{name.strip('[]').lower()}_token": name for name in special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_encoder(kind, folder, **changes):
    """Saves a small random encoder with its tokenizer; its matrix has more rows than the tokenizer has tokens, as T5's has."""
    torch.manual_seed(0)
    if kind == "bert":
        tokenizer, sizes = word_pieces(TEXT), dict(vocab_size=64, hidden_size=16, intermediate_size=32, max_position_embeddings=32)
        model = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2))
    else:
        tokenizer, sizes = tiny_config.byte_tokenizer([TEXT], 280), {"vocab_size": 320, "d_model": 16, "d_kv": 8, "d_ff": 32, **changes}
        whole = transformers.T5ForConditionalGeneration if kind == "whole t5" else transformers.T5EncoderModel
        model = whole(transformers.T5Config(**sizes, num_heads=2, num_layers=2, pad_token_id=0, eos_token_id=1))
    transformers.logging.disable_progress_bar()
    elf.Encoder(model, tokenizer).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """A folder for each kind of encoder."""
    return {kind: make_encoder(kind, tmp_path_factory.mktemp("encoders") / kind) for kind in ("t5", "bert", "whole t5")}


PLAIN = Config(latent_dim=16, latent_std=1.0, length=12)
KINDS = pytest.mark.parametrize("kind", ["t5", "bert"])


@pytest.mark.parametrize("kind, dtype", [("t5", "float32"), ("bert", "bfloat16")])
def test_a_pretrained_encoder_trains_and_then_does_without_its_folder(kind, dtype, tmp_path, monkeypatch, capsys):
    source, folder = make_encoder(kind, tmp_path / "source"), tmp_path / "run"
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    argv = ["--config=tiny_text", f"--data={tmp_path}/text.txt", f"--encoder={source}", f"--out_dir={folder}", "--length=16",
            *SMALL, "--vocab=0", "--latent_std=auto", f"--encoder_dtype={dtype}", "--steps=6", "--eval_every=6"]
    train.main(argv)
    cfg, encoder = elf.load_config(folder), tiny_config.load_encoder(source, dtype=dtype)
    assert json.loads((folder / "encoder/config.json").read_text())["dtype"] == dtype
    assert cfg.vocab == len(encoder.tokenizer) == elf.load_model(folder)[0].unembed.out_features < encoder.model.config.vocab_size
    _, _, rows, heldout = train.load_data(cfg, "cpu", encoder)
    x = torch.cat([encoder.model(input_ids=tiny_config.take(rows, [i])).last_hidden_state.float() for i in range(len(rows))])
    assert (cfg.latent_mean, cfg.latent_std) == pytest.approx((x.mean().item(), x.std().item()), rel=1e-2, abs=1e-3)
    want = (x[:1] - cfg.latent_mean) / cfg.latent_std
    torch.testing.assert_close(encoder.encode(tiny_config.take(rows, [0]), cfg), want, rtol=0, atol=1e-5)
    ids = {*rows.flatten().tolist(), *heldout.flatten().tolist()}
    assert not ids & {*encoder.tokenizer.all_special_ids} - {encoder.tokenizer.unk_token_id}        # none added, none read from the text
    shutil.rmtree(source)
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "__call__", None)     # nothing is tokenised again
    before = weights_of(folder)
    train.main([*argv, "--resume"])
    assert_same(weights_of(folder), before)
    sample.main([f"--model={folder}", "--n=2", f"--json={tmp_path}/table.json"])
    assert json.load(open(tmp_path / "table.json"))[0]["data_entropy"] > 0


@KINDS
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_encoder_masks_leak_nothing(encoders, kind, attention):
    encoder, lengths = tiny_config.load_encoder(encoders[kind]), torch.tensor([7, 1, 12])
    encoder.model.set_attn_implementation(attention)
    ids = torch.randint(5, len(encoder.tokenizer), (3, 12), generator=seeded(0))
    real = torch.arange(12) < lengths[:, None]                          # (B, L)
    x = encoder.encode(ids, PLAIN, real[:, None])
    for i, n in enumerate(lengths):
        torch.testing.assert_close(x[i, :n], encoder.encode(ids[i:i + 1, :n], PLAIN)[0], rtol=0, atol=1e-5)
    assert torch.equal(x[real], encoder.encode(ids.masked_fill(~real, 7), PLAIN, real[:, None])[real])
    # the source, five positions, sees itself alone; the target sees both
    source = torch.arange(12) < 5
    sees = (source | ~source[:, None]) & real[:, None]                  # (B, L, L)
    x, other_target, other_source = (encoder.encode(i, PLAIN, sees) for i in (
        ids, torch.where(source, ids, ids.flip(1)), torch.where(source, ids.flip(1), ids)))
    torch.testing.assert_close(x[2, :5], encoder.encode(ids[2:, :5], PLAIN)[0], rtol=0, atol=1e-5)
    assert torch.equal(x[:, :5], other_target[:, :5])
    for other in (other_target, other_source):
        assert not torch.isclose(x[2, 5:], other[2, 5:]).all(-1).any()


@KINDS
def test_the_encoders_precision_is_the_one_asked_for(encoders, tmp_path, kind):
    full, half = (tiny_config.load_encoder(encoders[kind], dtype=dtype) for dtype in ("float32", "bfloat16"))
    ids = torch.randint(5, len(full.tokenizer), (3, 12), generator=seeded(0))
    real = torch.arange(12) < torch.tensor([7, 1, 12])[:, None]
    x, rounded = full.encode(ids, PLAIN, real[:, None]), half.encode(ids, PLAIN, real[:, None])
    assert rounded.dtype == torch.float32 and 0 < (x - rounded)[real].abs().max() < 0.05 * x.std()
    half.save(tmp_path / "half")
    for dtype in ("float32", "bfloat16"):                               # whatever the file has
        again = tiny_config.load_encoder(tmp_path / "half", dtype=dtype)
        assert again.model.dtype == getattr(torch, dtype)
    assert torch.equal(again.encode(ids, PLAIN), half.encode(ids, PLAIN))


@torch.no_grad()
def test_of_a_whole_t5_only_the_encoder_is_loaded(encoders, tmp_path):
    encoder, ids = tiny_config.load_encoder(encoders["whole t5"]), torch.arange(5, 17)[None]
    assert {name.split(".")[0] for name, _ in encoder.model.named_parameters()} == {"shared", "encoder"}
    whole = transformers.T5ForConditionalGeneration.from_pretrained(encoders["whole t5"]).eval()
    torch.testing.assert_close(encoder.encode(ids, PLAIN), whole.encoder(input_ids=ids).last_hidden_state)
    encoder.save(tmp_path / "again")
    assert torch.equal(encoder.encode(ids, PLAIN), tiny_config.load_encoder(tmp_path / "again").encode(ids, PLAIN))


@pytest.mark.parametrize("kind, changes, lacks, argv, words", [
    ("t5", {}, "", ["--latent_dim=8"], ["--latent_dim=8", "16"]), ("t5", {}, "", ["--vocab=320"], ["--vocab=320", "279"]),
    ("t5", {}, "token*", [], ["tokenizer"]), ("bert", {}, "token*", [], ["tokenizer"]), ("t5", {}, "pad", [], ["tokenizer", "padding"]),
    ("t5", {}, "fast", [], ["tokenizer"]), ("t5", {}, "model*", [], ["model"]), ("bert", {}, "config*", [], ["in it"]),
    ("bert", {}, "", ["--length=33"], ["33 tokens"]), ("t5", {"vocab_size": 278}, "", [], ["278"])])        # one too few
def test_encoders_that_do_not_fit_are_refused(tmp_path, capsys, kind, changes, lacks, argv, words):
    source = make_encoder(kind, tmp_path / "source", **changes)
    for path in (tmp_path / "source").glob(lacks or "none"):
        path.unlink()
    if lacks == "pad":
        path = tmp_path / "source/tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": None}))
    elif lacks == "fast":
        (tmp_path / "source/tokenizer.json").unlink()
        transformers.ByT5Tokenizer().save_pretrained(source)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    line = refused(capsys, train, "--config=tiny_text", f"--data={tmp_path}/text.txt", f"--encoder={source}", f"--out_dir={tmp_path}/run",
                   *SMALL, "--vocab=0", "--length=16", *argv)
    assert all(word in line for word in words) and (source in line or argv) and not (tmp_path / "run").exists(), line


# ------------------------------------------------------------------------------- any data

DOCUMENTS = ["", "a", "</s>", "x</s><pad>y", "été ☃ 日本語 🙂\n", "", "no end of line", "\r\n two\r\n lines ", "long " * 400,
             "ab" * 300, "a\rb\x0cc\x85d\u2028e\n\n", "\ufeffmark", "", TEXT, *TEXT.splitlines(), ""]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_config.byte_tokenizer([TEXT], 280)


def packed(source, tokenizer):
    """All tokens of the texts, an EOS behind each document, in one list."""
    cfg = dataclasses.replace(PLAIN, data=source, length=1)
    return tiny_config.token_rows(tiny_config.open_data(source), cfg, tokenizer).flatten().tolist()


def write_data(kind, folder, name, values):
    """Writes a column of rows as one kind of data; returns what --data would be."""
    data, path = datasets.Dataset.from_dict({name: values}), f"{folder}/data"
    os.makedirs(folder, exist_ok=True)
    if kind == "disk":
        data.save_to_disk(path, num_shards=2)
    elif kind == "dict":
        datasets.DatasetDict(test=data.select([0]), train=data).save_to_disk(path)
    elif kind == "text":
        for i, text in enumerate(values):
            with open(f"{folder}/{i:04}.txt", "w", encoding="utf-8", newline="") as file:
                file.write(text)
        path = f"{folder}/*.txt"
    else:
        path = f"{path}.{kind}"
        data.to_json(path) if kind == "jsonl" else data.to_parquet(path, batch_size=50)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "disk", "dict", "text"])
def test_packing_keeps_every_token(tmp_path, monkeypatch, tokenizer, kind):
    monkeypatch.setattr(tiny_config.read_pieces, "__defaults__", (60,))      # many pieces a file
    documents, eos = [text for text in DOCUMENTS if text or kind != "text"], tokenizer.eos_token_id
    flat = packed(source := write_data(kind, tmp_path, "text", documents), tokenizer)
    assert len(os.listdir("data")) == 1             # nothing else is left behind
    if kind == "text":                              # cut at ends of lines, where tokens may differ, but the text doesn't
        assert tokenizer.decode(flat) == "".join(text.removeprefix("\ufeff") + "</s>" for text in documents)
        assert flat.count(eos) == len(documents)
    else:
        assert flat == [i for text in documents for i in [*tokenizer.encode(text, split_special_tokens=True), eos]]
    rows = tiny_config.token_rows(tiny_config.open_data(source), dataclasses.replace(PLAIN, data=source, length=7), tokenizer)
    assert rows.shape == (len(flat) // 7, 7) and rows.flatten().tolist() == flat[:rows.size]
    assert tiny_config.take(rows, [2, 0]).tolist() == [flat[14:21], flat[:7]]


def test_data_is_tokenised_once_for_each_content_and_tokenizer(tmp_path, tokenizer, monkeypatch):
    sources = [write_data(kind, tmp_path / kind, "text", ["the sun", "the moon"]) for kind in ("jsonl", "disk", "text")]
    sources.append(shutil.copy(sources[0], f"{tmp_path}/same.txt"))      # the same bytes, but one text
    found = [packed(source, tokenizer) for source in sources]
    assert len(os.listdir("data")) == 4 and found[0] == found[1] == found[2] != found[3]
    other = pickle.loads(pickle.dumps(tokenizer))
    other.eos_token = "<mask>"
    assert packed(sources[0], other) == [2 if i == 1 else i for i in found[0]]
    assert packed(sources[0], tiny_config.byte_tokenizer([TEXT], 270)) != found[0]
    (tmp_path / "text/0000.txt").write_text("the son")
    assert packed(sources[2], tokenizer) != found[2] and len(os.listdir("data")) == 7
    tokenizer.save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "__call__", None)     # nothing is tokenised again
    for again in (tokenizer, pickle.loads(pickle.dumps(tokenizer)), tiny_config.load_tokenizer(tmp_path / "saved")):
        assert [packed(sources[i], again) for i in (0, 1, 3)] == [found[0], found[1], found[3]]


@pytest.mark.parametrize("saved, want", [([""], ""), (["sub/set"], "sub/set"), (["dev", "a/train", "train", "test"], "train"),
                                         ([], "org/data")])
def test_a_hub_id_may_hold_either_layout(tmp_path, monkeypatch, saved, want):
    for name in saved:
        datasets.Dataset.from_dict({"text": [name]}).save_to_disk(tmp_path / "snapshot" / name)
    names = [str(path.relative_to(tmp_path / "snapshot")) for path in tmp_path.rglob("snapshot/**/*")]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name, repo_type: names)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, repo_type: str(tmp_path / "snapshot"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": [name]})))
    assert texts_of("org/data") == [want]


@pytest.mark.parametrize("option, kind", [("data", "--repo-type dataset "), ("encoder", "")])
def test_what_the_hub_does_not_give_says_how_to_get_it(tmp_path, capsys, encoders, option, kind):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    argv = {"data": f"{tmp_path}/text.txt", "encoder": encoders["t5"]} | {option: "no-one/nothing"}
    line = refused(capsys, train, "--config=tiny_text", *(f"--{name}={value}" for name, value in argv.items()))
    assert f"hf download {kind}no-one/nothing --local-dir FOLDER" in line and f"--{option}=FOLDER" in line


READY = [[5 + (i + j) % 30 for j in range(1 + i % 16)] for i in range(64)]


@pytest.mark.parametrize("kind", ["parquet", "dict"])
def test_ready_rows_are_used_as_they_are_and_padding_counts_nowhere(tmp_path, monkeypatch, encoders, kind):
    seen, flow_loss, folder = [], elf.flow_loss, tmp_path / "run"
    monkeypatch.setattr(elf, "flow_loss", lambda *args: seen.append(args) or flow_loss(*args))
    argv = ["--config=tiny_text", f"--data={write_data(kind, tmp_path, 'input_ids', READY)}", f"--encoder={encoders['t5']}",
            f"--out_dir={folder}", *SMALL, "--length=16", "--vocab=0", "--steps=1"]
    train.main(argv)
    cfg, encoder, rows, heldout = train.load_data(elf.load_config(folder), "cpu", tiny_config.load_encoder(encoders["t5"]))
    assert [tiny_config.take(part, range(len(part))).tolist() for part in (rows, heldout)] == [
        [row + [0] * (16 - len(row)) for row in part] for part in (READY[:61], READY[61:])]
    x = torch.cat([encoder.model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in READY[:61]])
    assert (cfg.latent_mean, cfg.latent_std) == pytest.approx((x.mean().item(), x.std().item()), rel=1e-4)
    (_, x, ids, counted, _, n, _), *_ = seen
    assert torch.equal(counted, ids != 0) and n == (ids != 0).sum() < ids.numel()
    for i, row in enumerate(ids):
        torch.testing.assert_close(x[i, counted[i]], encoder.encode(row[row != 0][None], cfg)[0], rtol=0, atol=1e-4)
    *_, last = map(json.loads, open(folder / "metrics.jsonl"))
    assert last["data_entropy"] == pytest.approx(sum(sample.entropies(READY[61:])[0]) / 3)
    train.main([*argv, "--resume"])


def lines(name, *values):
    return "".join(json.dumps({name: value}) + "\n" for value in values)


SUN = lines("text", *["the sun"] * 20)
ALL = ["t5", "scratch"]


@pytest.mark.parametrize("encoder, content, words", [(encoder, *case) for encoders, *case in [
    (ALL, SUN + '{"text": "the\n', ["json"]), (ALL, SUN + "the sun\n", ["json"]), (ALL, "", []), (ALL, lines("text", ""), ["rows"]),
    (ALL, lines("body", "sun"), ["columns body;", "text", "input_ids"]), (ALL, lines("text", *range(9)), ["text", "int64"]),
    (ALL, SUN + lines("text", None), ["text", "1 of them null"]), (ALL, lines("input_ids", "5 6"), ["input_ids", "string"]),
    (ALL, lines("input_ids", [0.5]), ["input_ids", "double"]), (ALL, lines("input_ids", *READY, None), ["1 of them null"]),
    (["scratch"], lines("input_ids", *READY), ["--encoder"]),
    *((["t5"], lines("input_ids", *READY, row), words) for row, words in (
        ([5] * 17, ["17", "16"]), ([], ["0 token", "16"]), ([5, 279], ["279"]), ([5, -1], ["-1"]), ([5, None], ["None"])))]
    for encoder in encoders])
def test_wrong_rows_are_refused(tmp_path, capsys, caplog, encoders, encoder, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    line = refused(capsys, train, "--config=tiny_text", f"--data={tmp_path}/a.jsonl", f"--encoder={encoders.get(encoder, encoder)}",
                   *SMALL, "--length=16", "--vocab=0" if encoder == "t5" else "--vocab=280")
    assert all(word in line for word in [f"--data={tmp_path}/a.jsonl", *words]) and not caplog.records, line


def test_wrong_files_and_folders_are_refused(tmp_path, capsys, caplog, encoders):
    for path, content in {"1.parquet": "no", "2.jsonl": SUN, "2.txt": "sun", "3/a.txt": "", "3/b.txt": "", "4/a.unknown": ""}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    data = datasets.Dataset.from_dict({"text": ["the sun"] * 9})
    datasets.DatasetDict(test=data, dev=data).save_to_disk(tmp_path / "5")
    data.save_to_disk(tmp_path / "6")
    next((tmp_path / "6").glob("*.arrow")).unlink()
    for name, words in {"1.parquet": ["parquet"], "2.*": ["json", "text", "one kind"], "3/*.txt": ["empty"], "4": [],
                        "5": ["test, dev", "train"], "6": [], "none.txt": ["no such"]}.items():
        line = refused(capsys, train, "--config=tiny_text", f"--data={tmp_path}/{name}", f"--encoder={encoders['t5']}")
        assert all(word in line for word in [f"--data={tmp_path}/{name}", *words]) and not caplog.records, line
        assert not os.path.exists("out/tiny_text")


def test_a_csv_file_is_a_table(tmp_path):
    (tmp_path / "a.csv").write_text('id,text\n1,"the sun, and\nthe moon"\n2,hill\n')
    assert texts_of(f"{tmp_path}/a.csv") == ["the sun, and\nthe moon", "hill"]


def test_a_mistyped_path_is_not_taken_for_a_hub_id(capsys):
    for argv in (["--data=/no/text.txt"], ["--data=no*.txt"], ["--data=tiny", "--encoder=./no/such/folder"]):
        line = refused(capsys, train, "--config=tiny_text", *argv)
        assert "no such" in line and "hf download" not in line


def test_the_readmes_python_example_runs(run_folder, capsys):
    examples = (HERE / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    example, = [text.split("```")[0] for text in examples if "import torch, elf" in text]
    exec(example.replace("out/tiny", str(run_folder)), {})
    assert capsys.readouterr().out.startswith("['")


# ------------------------------------------------------------------------------- a source: the encoder's mask

SOURCES, TARGETS = (4, 5, 3), (5, 7, 2)     # lengths of three examples in 12 positions: fill, none, much fill


def three_pairs(tokenizer):
    """(token ids (3, 12), source, real, fill (3, 12) bool) of three random examples, stored and unpacked again."""
    words = torch.randint(5, len(tokenizer), (3, 12), generator=seeded(0)).tolist()
    rows = [[-1 - i for i in words[k][:s]] + words[k][s:s + t] + [tokenizer.eos_token_id] * (12 - s - t)
            for k, (s, t) in enumerate(zip(SOURCES, TARGETS))]
    cfg = dataclasses.replace(PLAIN, source_length=5)
    ids, source, counted, real = tiny_config.unpack(torch.tensor(rows), tokenizer, cfg)
    place = torch.arange(12)
    assert torch.equal(source, place < torch.tensor(SOURCES)[:, None]) and torch.equal(counted, ~source)
    assert torch.equal(real, place < torch.tensor([9, 12, 5])[:, None]) and (ids >= 0).all()
    return ids, source, real, ~real


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mask_of_pairs_leaks_nothing(encoders, attention, dtype):
    encoder = tiny_config.load_encoder(encoders["t5"], dtype=dtype)
    encoder.model.set_attn_implementation(attention)
    ids, source, real, fill = three_pairs(encoder.tokenizer)
    target, other = real & ~source, torch.randint(5, len(encoder.tokenizer), (3, 12), generator=seeded(1))
    other = torch.where(other == ids, 4, other)
    swapped = {name: torch.where(places, other, ids) for name, places in (("source", source), ("target", target), ("fill", fill))}

    for drop in (torch.zeros(3).bool(), torch.tensor([True, False, True])):
        sees = elf.who_sees(source, real, drop)
        x, by_source, by_target, by_fill = (encoder.encode(i, PLAIN, sees) for i in (ids, *swapped.values()))
        assert torch.equal(x[source], by_target[source]) and torch.equal(x[source], by_fill[source])
        assert torch.equal(x[real], by_fill[real])                      # what fills up is seen by none
        assert torch.equal(x[drop][~source[drop]], by_source[drop][~source[drop]])      # dropped: not even the fill sees the source
        for places in (target, fill):
            there = places & ~drop[:, None]
            assert not torch.isclose(x[there], by_source[there]).all(-1).any()          # not dropped: each position does
        assert not torch.isclose(x[target], by_target[target]).all(-1).any()
        assert not torch.isclose(x[fill], by_target[fill]).all(-1).any()


def test_a_source_is_encoded_as_if_alone_and_a_dropped_targets_tokens_as_if_it_were_not_there(encoders):
    encoder = tiny_config.load_encoder(encoders["t5"])
    ids, source, real, fill = three_pairs(encoder.tokenizer)
    for drop in (torch.zeros(3).bool(), torch.ones(3).bool()):
        x = encoder.encode(ids, PLAIN, elf.who_sees(source, real, drop))
        for k, (s, t) in enumerate(zip(SOURCES, TARGETS)):
            torch.testing.assert_close(x[k, :s], encoder.encode(ids[k:k + 1, :s], PLAIN)[0], rtol=0, atol=1e-5)
            if drop[k]:                     # T5's positions are relative
                alone = encoder.encode(ids[k:k + 1, s:s + t], PLAIN)[0]
                torch.testing.assert_close(x[k, s:s + t], alone, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------- a source: sampling

PLACES = torch.arange(6) < torch.tensor([2, 3])[:, None]           # a source of two positions, one of three


def spy(monkeypatch, model):
    """A list that gets z, t, x_prev, w, decode of every call of the network."""
    calls, trunk = [], model.trunk
    monkeypatch.setattr(model, "trunk", lambda z, t, x_prev, w, decode: calls.append((z, t, x_prev, w, decode)) or trunk(z, t, x_prev, w, decode))
    return calls


def sampled(model, cond, cfg, sampler="ode", start="paper", source=PLACES):
    return elf.sample(model, 2 * ar((2, 6, 8), 0.3), GRID, sampler, gamma=1.5, w=2.0, sde_start=start, generator=seeded(0),
                      cond=cond, cond_mask=source, cfg=cfg)


@pytest.mark.parametrize("sampler, start", SAMPLERS)
@pytest.mark.parametrize("cfg", [0.0, 1.0, 2.0])
def test_the_source_is_in_every_call_and_stays_as_it_is(golden, monkeypatch, sampler, start, cfg):
    calls, cond = spy(monkeypatch, golden), ar((2, 6, 8), 2.0)
    way = dict(sampler=sampler, gamma=1.5, w=2.0, sde_start=start, generator=seeded(0), cond=cond, cond_mask=PLACES, cfg=cfg)
    for _, z, x_hat in elf.trajectory(golden, 2 * ar((2, 6, 8), 0.3), GRID, **way):
        assert torch.equal(z[PLACES], cond[PLACES]) and torch.equal(x_hat[PLACES], cond[PLACES])
    assert not torch.isclose(z, cond)[~PLACES].any()
    assert len(calls) == 4
    for z_in, _, x_prev, _, mode in calls:
        assert len(z_in) == (2 if cfg == 1 else 4) and not mode.any()
        for a in (z_in, x_prev):
            assert torch.equal(a[-2:][PLACES], cond[PLACES])
            if cfg != 1:
                assert (a[:2][PLACES] == 0).all() and torch.equal(a[:2][~PLACES], a[2:][~PLACES])
    assert (calls[0][2][-2:][~PLACES] == 0).all()                   # no guess yet, but the source
    elf.decode_ids(golden, z, 2.0)
    z_in, t, x_prev, w, mode = calls[-1]
    assert torch.equal(z_in, z) and (t == 1).all() and (x_prev == 0).all() and (w == 2).all() and mode.all()


@pytest.mark.parametrize("sampler, start", SAMPLERS)
def test_without_the_source_means_that_it_does_not_matter(golden, sampler, start):
    """cfg = 0 is the pass without the source alone; at cfg 1 or 2 the source does matter, at every position."""
    one, other = ar((2, 6, 8), 2.0), ar((2, 6, 8), 5.0)
    a, b, nothing = (sampled(golden, cond, cfg, sampler, start) for cond, cfg in ((one, 0.0), (other, 0.0), (0 * one, 1.0)))
    assert torch.equal(a[~PLACES], b[~PLACES])
    torch.testing.assert_close(a[~PLACES], nothing[~PLACES], rtol=0, atol=2e-4)
    for cfg in (1.0, 2.0):
        a, b = (sampled(golden, cond, cfg, sampler, start) for cond in (one, other))
        assert not torch.isclose(a, b)[~PLACES].all(-1).any()


@torch.no_grad()
def test_a_guided_guess_is_two_guesses_combined(golden):
    z, x_prev, cond = ar((2, 6, 8), 0.3), ar((2, 6, 8), 1.1), ar((2, 6, 8), 2.0)
    t, w, at = torch.tensor([0.25, 0.7]), torch.tensor([1.0, 3.0]), PLACES[..., None]
    without, with_it = (golden.denoise(torch.where(at, c, z), t, torch.where(at, c, x_prev), w) for c in (torch.zeros_like(z), cond))
    for cfg in (0.0, 0.5, 1.0, 2.0, 4.0):
        want = torch.where(at, cond, without + cfg * (with_it - without))
        torch.testing.assert_close(elf.guess(golden, z, t, x_prev, w, cond, PLACES, cfg), want, rtol=1e-5, atol=1e-5)
    _, (_, z, x_hat), *_ = elf.trajectory(golden, 2 * z, GRID, w=2.0, cond=cond, cond_mask=PLACES, cfg=2.0)
    (_, z_1, x_1), *_ = elf.trajectory(golden, 2 * ar((2, 6, 8), 0.3), GRID, w=2.0, cond=cond, cond_mask=PLACES, cfg=2.0)
    want = elf.guess(golden, z_1, GRID[1].expand(2), x_1, torch.full((2,), 2.0), cond, PLACES, 2.0)
    torch.testing.assert_close(x_hat, want)                         # the combined guess goes into the next call


# ------------------------------------------------------------------------------- a source: the loss


def loss_with_source(model, x, ids, counted, draws, source):
    """The training loss of examples with a source from its formulas, one example at a time; x is 0 at a dropped source."""
    cfg, total, se, ce = model.cfg, 0, [], []
    n_decode = int(draws.decode.sum())
    for i in range(len(x)):
        at, xi, eps, w, t = source[i, :, None], x[i], draws.eps[i], draws.w[i:i + 1], draws.t[i]
        only = lambda a: torch.where(at, xi, a)[None]               # noqa: E731  the source and a elsewhere
        if draws.decode[i]:
            p = draws.p[i][:, None]
            z = only(p * xi + (1 - p) * cfg.decode_noise_scale * eps)
            logits = model.decode_head(model.trunk(z, torch.ones(1), torch.zeros_like(z), w, torch.ones(1)))[0]
            ce += [logits[j].logsumexp(0) - logits[j, ids[i, j]] for j in range(len(at)) if counted[i, j]]
            continue
        z, rest = only(t * xi + (1 - t) * cfg.noise_scale * eps), max(1 - t.item(), cfg.t_floor)
        x_prev, v = only(torch.zeros_like(xi)), (xi - (t * xi + (1 - t) * cfg.noise_scale * eps)) / rest
        if draws.self_cond[i]:
            with torch.no_grad():
                x_no = model.denoise(z, t[None], x_prev, w)
                x_prev = only(x_no[0])
                x_sc = model.denoise(z, t[None], x_prev, w)
            v = v + (1 - 1 / w) * (x_sc - x_no)[0] / rest
        v_hat = (model.denoise(z, t[None], x_prev, w) - z)[0] / rest
        se += [(v_hat[j] - v[j]).square().sum() / cfg.latent_dim for j in range(len(at)) if counted[i, j]]
    total = cfg.decode_share * len(x) / n_decode * sum(ce) + (1 - cfg.decode_share) * len(x) / (len(x) - n_decode) * sum(se)
    return total / counted.sum(), sum(se) / len(se), sum(ce) / len(ce)


def batch_with_sources(batch, seed):
    """Random examples, each with a source of 1 to 4 positions, a third of them dropped, and all other positions counted."""
    g = seeded(seed)
    source = torch.arange(6) < torch.randint(1, 5, (batch, 1), generator=g)
    draws = elf.draw(dataclasses.replace(GOLDEN, label_drop=1 / 3), batch, g)
    x = torch.randn(batch, 6, 8, generator=g).masked_fill((source & draws.drop[:, None])[..., None], 0)
    return x, torch.randint(11, (batch, 6), generator=g), ~source, draws, source


@pytest.mark.parametrize("batch", [3, 8, 15])
def test_the_loss_with_a_source_equals_a_slow_reference(golden, batch):
    x, ids, counted, draws, source = batch_with_sources(batch, batch)
    got, want = elf.flow_loss(golden, x, ids, counted, draws, source=source), loss_with_source(golden, x, ids, counted, draws, source)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
    got, expected = gradients(golden, got[0]), gradients(golden, want[0])
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-3 * expected[name].abs().max().item())
    ids[source] = (ids[source] + 1) % 11                            # a source's own tokens are not to be guessed
    assert torch.equal(elf.flow_loss(golden, x, ids, counted, draws, source=source)[0], elf.flow_loss(golden, x, ids, counted, draws, None, source)[0])
    torch.testing.assert_close(elf.flow_loss(golden, x, ids, counted, draws, source=source)[2], want[2], rtol=1e-5, atol=0)


def test_in_the_loss_the_source_stays_clean_in_every_call(golden, monkeypatch):
    calls = spy(monkeypatch, golden)
    x, ids, counted, draws, source = batch_with_sources(15, 1)
    elf.flow_loss(golden, x, ids, counted, draws, source=source)
    (z_first, _, x_first, _, mode_first), (z, t, x_prev, _, mode) = calls
    dec, sc, both = draws.decode, draws.self_cond, source & ~draws.decode[:, None]
    assert dec.sum() == 3 and sc.sum() == 6 and draws.drop.any() and torch.equal(mode, dec) and not mode_first.any()
    assert torch.equal(z[source], x[source]) and not torch.isclose(z, x)[~source].all(-1).any()
    assert (x_prev[dec] == 0).all() and (t[dec] == 1).all()         # decode examples: a clean source, but no guess at all
    assert torch.equal(x_prev[both], x[both])
    plain = ~sc & ~dec
    assert (x_prev[plain][~source[plain]] == 0).all() and (x_prev[sc][~source[sc]] != 0).any(-1).all()
    assert torch.equal(z_first, z[sc]) and torch.equal(x_first[source[sc]], x[sc][source[sc]]) and (x_first[~source[sc]] == 0).all()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35])
def test_labels_drop_as_often_as_they_should(share):
    cfg = Config(latent_dim=1, length=1, label_drop=share)
    draws, spread = elf.draw(cfg, 20_000, seeded(3)), math.sqrt(share * (1 - share) / 20_000)
    assert draws.drop.float().mean() == pytest.approx(share, abs=4 * spread)
    for role in (draws.decode, draws.self_cond, draws.t > draws.t.median()):        # whatever else an example's lot is
        assert draws.drop[role].float().mean() == pytest.approx(share, abs=4 * spread / math.sqrt(role.float().mean()))


# ------------------------------------------------------------------------------- measures

VERSES = ["the sun", "", "été moon hill " * 30, "s", "moon moon moon", "hill", "the hill and the moon and the sun " * 2,
          "sun " * 3, "moon\nhill", "🙂 hill", "t", "hill moon sun", "a long day by the sea", "x</s>y", "the moon " * 9, "sun hill"]


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory):
    """A small GPT-2 of strong opinions that sees 48 tokens, with a byte-level tokenizer."""
    torch.manual_seed(0)
    tokenizer, folder = tiny_config.byte_tokenizer([TEXT], 280), tmp_path_factory.mktemp("judge")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=300, n_positions=48, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3, bos_token_id=1, eos_token_id=1))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@functools.cache
def alone(folder):
    return (transformers.AutoTokenizer.from_pretrained(folder),
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@torch.no_grad()
def nats_alone(folder, text, longest=48):
    """The nats of each scored token of a text, computed by itself and without padding."""
    tokenizer, model = alone(folder)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:longest]
    if len(ids) < 2:
        return []
    chances = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [-chances[i, ids[i + 1]].item() for i in range(len(ids) - 1)]


def test_perplexity_does_not_depend_on_batch_or_padding(judge_folder):
    each = [nats_alone(judge_folder, text) for text in VERSES]
    assert max(map(len, each)) == 47 and each[1] == each[3] == []
    total, n = sum(map(sum, each)), sum(map(len, each))
    want, judge = math.exp(total / n), sample.Judge(judge_folder, "cpu")
    assert abs(math.log(want / math.exp(np.mean([np.mean(nats) for nats in each if nats])))) > 1e-3     # the tokens', not the texts' mean
    rows = judge.tokens(VERSES)
    assert [len(row) for row in rows] == [min(len(judge.tokenizer.encode(text)), 48) for text in VERSES]
    for order in (VERSES, VERSES[::-1], sorted(VERSES, key=len)):
        assert judge.perplexity(judge.tokens(order))["gen_ppl"] == pytest.approx(want, rel=1e-5)
    assert sample.measure(VERSES, [[1]] * 16, judge=judge)["gen_ppl"] == pytest.approx(want, rel=1e-5)


def test_the_perplexity_of_hardly_anything(judge_folder):
    judge = sample.Judge(judge_folder, "cpu")
    assert judge.perplexity([[], []]) == {} == judge.perplexity([[], [5]]) == judge.perplexity([])
    found = sample.measure(["", ""], [[], []], judge=judge)
    assert found["empty"] == 1 and found["entropy"] == found["length"] == 0 and "gen_ppl" not in found
    two = judge.tokens(["", "the sun"])
    assert judge.perplexity(two)["gen_ppl"] == pytest.approx(math.exp(np.mean(nats_alone(judge_folder, "the sun"))), rel=1e-5)
    assert judge.perplexity(two)["gen_ppl_se"] == 0                 # one text, no spread


def test_the_standard_error_of_perplexity(judge_folder):
    """Against the formula of a ratio's standard error, and against drawing the texts anew many times."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(["sun", "moon", "été", "hill"], k=rng.randint(1, 12))) for _ in range(240)]
    judge = sample.Judge(judge_folder, "cpu")
    each = [nats_alone(judge_folder, text) for text in texts[:60]]
    nats, n = np.array([sum(e) for e in each]), np.array([len(e) for e in each])
    mean = nats.sum() / n.sum()
    want = math.exp(mean) * math.sqrt(((nats - mean * n) ** 2).sum() / (len(n) - 1) / len(n)) / n.mean()
    assert judge.perplexity(judge.tokens(texts[:60]))["gen_ppl_se"] == pytest.approx(want, rel=1e-4)
    draws = np.random.default_rng(0).integers(len(n), size=(4000, len(n)))
    again = np.exp(nats[draws].sum(1) / n[draws].sum(1))
    assert again.std() == pytest.approx(want, rel=0.1)
    assert judge.perplexity(judge.tokens(texts))["gen_ppl_se"] < 0.75 * want        # four times the texts, half the error


def test_entropies_by_hand():
    each, pooled = sample.entropies([[5, 5, 6, 6], [], [7], [5, 6, 7, 8]])
    assert each == pytest.approx([math.log(2), 0, math.log(4)])     # one of no tokens has none
    shares = [3 / 9, 3 / 9, 2 / 9, 1 / 9]
    assert pooled == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert sample.entropies([[], []]) == ([], 0)


def test_the_measures_by_hand():
    assert [sample.repetition(text) for text in ("", "a", "a a", "a a a b a", "a b\na  a", "aa a")] == [0, 0, 1, 2 / 4, 1 / 3, 0]
    texts, rows = ["a a b", "", "a a b", " "], [[3, 3, 4], [], [3, 3, 4], [9]]
    found = sample.measure(texts, rows)
    one = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert found["distinct"] == 3 / 4 and found["empty"] == 2 / 4 and found["repetition"] == pytest.approx((0.5 + 0 + 0.5 + 0) / 4)
    assert found["length"] == 7 / 4 and found["entropy"] == pytest.approx(2 * one / 3)
    assert found["length_se"] == pytest.approx(math.sqrt(sum((n - 7 / 4) ** 2 for n in (3, 0, 3, 1)) / 3 / 4))
    assert found["repetition_se"] == pytest.approx(math.sqrt(4 * 0.25 ** 2 / 3 / 4))
    assert found["entropy_pooled"] == pytest.approx(sum(n / 7 * math.log(7 / n) for n in (4, 2, 1))) and "degenerate" not in found


class Told:
    """A judge whose verdict is known."""

    def __init__(self, tokens, gen_ppl):
        self.tokens, self.perplexity = lambda texts: [tokens for _ in texts], lambda rows: {"gen_ppl": gen_ppl, "gen_ppl_se": 0.0}


@pytest.mark.parametrize("tokens, gen_ppl, poor", [
    ([*range(200)] * 3, 20.0, False), ([*range(200)] * 3, 301.0, True), ([*range(140)] * 4, 20.0, True),       # ln 200 = 5.3, ln 140 = 4.9
    ([*range(140)] * 3, 20.0, False), ([*range(200)] * 2, 301.0, False)])                              # short: those limits aren't for these
def test_what_only_looks_good_is_marked(tokens, gen_ppl, poor):
    assert sample.measure(["a"], [[1]], judge=Told(tokens, gen_ppl)).get("degenerate", False) == poor


def test_what_is_poorer_than_the_data_is_marked():
    reference = sample.Reference(["a b c d"] * 2, [[1, 2, 3, 4], [5, 6, 7, 8]], lambda texts: {"extra": [1.0] * len(texts)})
    good, poor = ([[1, 2, 3], [4, 5]], [[1, 2, 3, 4], [1, 2, 3, 4]])   # ln 8 - ln 5 = 0.47, ln 8 - ln 4 = 0.69
    assert sample.measure(["a", "b"], poor, reference)["degenerate"] and "degenerate" not in sample.measure(["a", "b"], good, reference)
    found = sample.measure(["a", "b"], good, reference)
    assert found["data_entropy"] == pytest.approx(math.log(4)) and found["data_entropy_pooled"] == pytest.approx(math.log(8))
    assert found["extra"] == 1 and found["extra_se"] == 0


@pytest.mark.parametrize("texts, targets", [
    (["The cats were sitting on the Mat .", "a dog runs", "", "it rains and it rains"],
     ["the cat sat on the mat .", "the Dogs were running", "nothing", "it rained and it rains today"]),
    (["the Cat", "sun"], ["the cat", "moon"])])                    # too short for a 4-gram: the effective order counts
def test_bleu_and_rouge_are_the_libraries(texts, targets):
    import sacrebleu
    from rouge_score import rouge_scorer
    found = sample.against(texts, targets, True)
    assert found["bleu"] == sacrebleu.corpus_bleu(texts, [targets], lowercase=True, use_effective_order=True).score
    assert found["bleu"] > 5
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for name in ("rouge1", "rouge2", "rougeL"):
        assert found[name] == [100 * scorer.score(target, text)[name].fmeasure for text, target in zip(texts, targets)]
    assert found["rouge1"][0] > 50 and max(found["rouge1"]) <= 100


def test_errors_over_seeds_are_those_of_the_seeds_means():
    rows = [{"n": 4, "exact": 0.25, "exact_se": 0.2, "data_entropy": 2.0}, {"n": 4, "exact": 0.75, "exact_se": 0.1, "data_entropy": 2.0},
            {"n": 4, "exact": 0.5, "exact_se": 0.1, "data_entropy": 2.0}]
    found = sample.together(rows)
    assert found["exact"] == 0.5 and found["exact_se"] == pytest.approx(0.25 / math.sqrt(3)) and found["seeds"] == 3 and found["n"] == 4
    assert sample.together(rows[:1]) == rows[0] and "data_entropy_se" not in found


def test_a_mark_of_one_seed_is_kept_in_the_row_of_several():
    marked = [{"n": 4, "gen_ppl": 9.0}, {"n": 4, "gen_ppl": 9.0, "degenerate": True}]
    assert sample.together(marked).get("degenerate") and sample.together(marked[::-1]).get("degenerate")


# ------------------------------------------------------------------------------- the language of pairs


def possible():
    return math.prod(map(len, tiny_config.PAIR_SLOTS))


def test_the_pairs_are_many_and_training_sees_few():
    train_pairs, heldout = tiny_config.made("tiny_pair"), tiny_config.made("tiny_pair", heldout=True)
    assert possible() >= 1e6 and len(train_pairs) <= 0.05 * possible() and len(heldout) >= 512
    assert not {source for source, _ in train_pairs} & {source for source, _ in heldout}
    assert not {target for _, target in train_pairs} & {target for _, target in heldout}
    data = tiny_config.open_data("tiny_pair", pairs=True)          # what is drawn for training is what is trained on
    rows, rest = tiny_config.split(list(zip(data["input"], data["output"])))
    assert rows == list(train_pairs) and rest == list(heldout)
    assert tiny_config.made("tiny_pair") == train_pairs and list(train_pairs)[0] != list(heldout)[0]


def test_a_source_has_one_translation():
    """All choices but for slots whose options are all alike, of which it takes two or three each; none gives another's source."""
    when, who, many, like, does, how_many, which, what, where = tiny_config.PAIR_SLOTS
    slots = [when[::3], who, many, like[:2], does, how_many, ["alt", "rot", "hässlich"], what, where[::3]]
    choices = list(itertools.product(*slots))
    targets = {}
    for choice in choices:
        source, target = tiny_config.pair(*choice)
        assert targets.setdefault(source, target) == target, source
    assert len(targets) == len(choices)                             # so there are as many sources as choices
    both = [*tiny_config.made("tiny_pair"), *tiny_config.made("tiny_pair", heldout=True)]
    assert len({source for source, _ in both}) == len(both)
    choice = ["jetzt", "lehrer", True, "alt", "sehen", "ein", "rot", "decke", "am see"]
    for i, slot in enumerate(tiny_config.PAIR_SLOTS):               # each option says something else, in both languages
        for side in zip(*(tiny_config.pair(*choice[:i], option, *choice[i + 1:]) for option in slot)):
            assert len(set(side)) == len(slot)


def test_pairs_fit_the_preset_with_an_end_behind():
    cfg, pairs = PRESETS["tiny_pair"], tiny_config.made("tiny_pair")
    longest = [max(len(side.split()) for side in sides) for sides in zip(*pairs)]
    assert longest[0] <= cfg.source_length and sum(longest) < cfg.length and longest[1] < cfg.length - cfg.source_length
    some = datasets.Dataset.from_dict(dict(zip(("input", "output"), zip(*list(pairs)[:2000]))))
    tokenizer = tiny_config.word_tokenizer(text for pair in pairs for text in pair)
    rows = torch.from_numpy(tiny_config.Rows(some, cfg, tokenizer)[range(2000)])
    ids, source, counted, real = tiny_config.unpack(rows, tokenizer, cfg)
    assert tokenizer.unk_token_id not in ids and torch.equal(source, rows < 0) and torch.equal(counted, ~source)
    for row, at, here, (german, english) in zip(ids.tolist(), source, real, pairs):
        n, m = len(german.split()), len(english.split())
        assert tokenizer.decode(row[:n]) == german and tokenizer.decode(row[n:n + m]) == english
        assert set(row[n + m:]) == {tokenizer.eos_token_id} and at.sum() == n and here.sum() == n + m and here[:n + m].all()


def in_order(source, target):
    """For each word of a source its translation in this target, in the source's order."""
    a, b = source.split(), target.split()
    verb = [b[3]] if len(a) == 10 else ["", b[3]] if a[1] in ("hat", "haben") else [b[3], b[4]]
    found = [b[-1], verb[0], *b[:3], b[-7], b[-6], b[-5], " ".join(b[-4:-2]), b[-2], *verb[1:]]
    assert len(found) == len(a)
    return list(zip(a, found))


def test_a_dictionary_does_not_translate():
    """Each word's most frequent translation: in the source's order nearly never right, in the right order about every second time."""
    known = collections.defaultdict(Counter)
    for pair in tiny_config.made("tiny_pair"):
        for word, translation in in_order(*pair):
            known[word][translation] += 1
    best, plain, ordered, heldout = {word: n.most_common(1)[0][0] for word, n in known.items()}, 0, 0, tiny_config.made("tiny_pair", True)
    for source, target in heldout:
        words = [best[word] for word in source.split()]
        plain += " ".join(" ".join(words).split()) == target
        right = [*words[2:5], words[1], *words[10:], *words[5:10], words[0]]
        ordered += " ".join(" ".join(right).split()) == target
    print(f"\na dictionary: exact {plain / len(heldout):.3f} in the source's order, {ordered / len(heldout):.3f} in the right order")
    assert plain / len(heldout) < 0.05 and 0.4 < ordered / len(heldout) < 0.7
    assert {word for word, n in known.items() if len(n) > 1 and min(n.values()) > 0.2 * sum(n.values())} >= {
        "lehrer", "mädchen", "schloss", "birne", "strauß", "decke", "ein", "eine", "einen"}       # what context decides


def test_the_rules_of_translation_are_kept_and_occur():
    """The rules once more, by the places of the words."""
    looks = {"saw", "sees", "see", "painted", "paints", "paint", "drew", "draws", "draw"}
    people = {"women", "men", "children", "thieves", "teachers", "neighbours", "girls", "kings"}
    one = ("lock bulb bouquet blanket castle pear ostrich ceiling apple table clock book".split(),
           "locks bulbs bouquets blankets castles pears ostriches ceilings apples tables clocks books".split())
    occurred, n = Counter(), len(tiny_config.made("tiny_pair"))
    for source, target in tiny_config.made("tiny_pair"):
        a, b = source.split(), target.split()
        future, present, plural = b[3] == "will", len(a) == 10, b[2] in people
        verb, article, which, thing = b[4] if future else b[3], *b[-7:-4]
        assert b[0] == b[-3] == "the" and len(b) == 11 + future
        assert (b[-1] in ("yesterday", "recently", "then"), b[-1] in ("now", "today", "always")) == (not present and not future, present)
        assert a[1] == ("werden" if plural else "wird") if future else present or a[1] == ("haben" if plural else "hat"), source
        if present:                                                # agreement, in both languages
            assert verb.endswith("s") != plural and a[1].endswith("t") != plural and (a[2] == "die" or not plural)
        assert article == ("two" if a[5] == "zwei" else "three" if a[5] == "drei" else "an" if which[0] in "aeiou" else "a")
        assert thing in one[article in ("two", "three")], target
        for word, pair in {"schloss": ("lock", "castle"), "birne": ("bulb", "pear"), "strauß": ("bouquet", "ostrich"),
                           "decke": ("blanket", "ceiling")}.items():
            if a[7] == word:
                assert thing == pair[verb in looks]
                occurred[word, thing] += 1
        occurred.update([article, ("present" if present else "future" if future else "past", plural), ("lehrer" in a[4], plural)])
        occurred.update([(article, which)] if article == "an" else [])
    assert len(occurred) >= 8 + 4 + 6 + 2
    assert all(count > 0.005 * n for count in occurred.values()), occurred


# ------------------------------------------------------------------------------- pairs: the programs

KEYS = [*SMALL, "--label_drop=0.4", "--steps=100"]


def few_pairs(name, heldout=False, made=tiny_config.made):
    """300 pairs are enough to test the programs: 285 and 15, just as `split` will have them."""
    return dict(list(made(name, heldout).items())[:15 if heldout else 285])


@pytest.fixture
def small_language(monkeypatch):
    monkeypatch.setattr(tiny_config, "made", few_pairs)


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory):
    """What a whole run of 100 steps on pairs leaves behind."""
    folder = tmp_path_factory.mktemp("runs") / "pairs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_config, "made", few_pairs)
        train.main(["--config=tiny_pair", f"--out_dir={folder}", *KEYS])
    return folder


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory):
    """24 pairs as a .jsonl file."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    pairs = list(tiny_config.made("tiny_pair", heldout=True))[:24]
    path.write_text("".join(json.dumps({"input": source, "output": target}) + "\n" for source, target in pairs))
    return path


def measured(tmp_path, *argv):
    """Runs sample.py; returns its table."""
    sample.main([*map(str, argv), f"--json={tmp_path}/table.json"])
    return json.loads((tmp_path / "table.json").read_text())


def sampled_lines(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]


def test_pairs_train_and_sample(pair_folder, tmp_path, small_language, capsys):
    entries = sampled_lines(pair_folder / "metrics.jsonl")
    held_out = [entry["heldout_ce"] for entry in entries if "heldout_ce" in entry]
    assert len(held_out) == 5 and held_out[1] < held_out[0] and {"exact", "data_entropy"} <= set().union(*entries)
    row, = measured(tmp_path, f"--model={pair_folder}", "--n=100", f"--out={tmp_path}/out.jsonl", "--eval")
    assert row["n"] == 15 and {"exact", "exact_se", "bleu", "rouge1", "rouge2", "rougeL", "length", "empty", "repetition"} <= row.keys()
    assert "gen_ppl" not in row and row["sampler"] == "ode" and (row["steps"], row["cfg"]) == (4, 1)
    found, pairs = sampled_lines(tmp_path / "out.jsonl"), list(few_pairs("tiny_pair", True))
    assert [line["id"] for line in found] == list(range(15)) and [(line["input"], line["target"]) for line in found] == pairs
    assert row["exact"] == np.mean([line["text"] == line["target"] for line in found])
    assert row["bleu"] == sample.against([line["text"] for line in found], [line["target"] for line in found], True)["bleu"]
    again, = measured(tmp_path, f"--eval_file={tmp_path}/out.jsonl")            # its own --out, read back
    assert (again["bleu"], again["rougeL"]) == (row["bleu"], row["rougeL"])


def test_exact_counts_what_is_exact(pair_folder, tmp_path, small_language, monkeypatch):
    """A network that always reads off the right tokens, and one that is wrong about every third example."""
    ids = tiny_config.read_pairs(elf.load_config(pair_folder), tiny_config.load_tokenizer(f"{pair_folder}/encoder"), "", 15)[0]
    right, seen = torch.from_numpy(np.where(ids < 0, ~ids, ids)), []

    def decode_ids(model, z, w):
        begin = len(seen)
        seen.extend(z)
        return right[begin:begin + len(z)]
    monkeypatch.setattr(elf, "decode_ids", decode_ids)
    row, = measured(tmp_path, f"--model={pair_folder}", "--n=15", "--steps=1", f"--out={tmp_path}/out.jsonl")
    assert row["exact"] == 1 and row["distinct"] == 1 and row["length"] == pytest.approx(np.mean([
        len(line["target"].split()) for line in sampled_lines(tmp_path / "out.jsonl")]))
    seen.clear()
    right[::3, -12] = 7                                             # behind a source of 10 or 11 tokens: inside each target
    row, = measured(tmp_path, f"--model={pair_folder}", "--n=15", "--steps=1")
    assert row["exact"] == pytest.approx(10 / 15) and row["exact_se"] == pytest.approx(math.sqrt(10 / 15 * 5 / 15 / 14))


def test_an_output_without_an_end_is_taken_whole(pair_folder, monkeypatch):
    """As many positions as there are behind the longest source, from the first one behind this sample's own."""
    (model, cfg), encoder = elf.load_model(str(pair_folder)), tiny_config.load_encoder(f"{pair_folder}/encoder")
    rows = np.array([[-9] * n + [1] * (cfg.length - n) for n in (1, 7, cfg.source_length)])
    monkeypatch.setattr(elf, "decode_ids", lambda model, z, w: torch.arange(100, 100 + cfg.length).expand(len(z), -1))
    found = sample.generate(model, Setting(sampler="ode", steps=1), 0, [0, 1, 2], 2, encoder, rows)
    assert found == [list(range(100 + n, 100 + n + cfg.length - cfg.source_length)) for n in (1, 7, cfg.source_length)]


def test_a_prompt_and_a_file_of_them_give_a_line_each(pair_folder, tmp_path, capsys):
    sources = [source for source, _ in few_pairs("tiny_pair", True)] + ["jetzt", "frau " * 30]       # short; cut to source_length
    (tmp_path / "in.txt").write_text("\n".join(sources) + "\n")
    capsys.readouterr()
    found = {}
    for batch in (4, 100):
        sample.main([f"--model={pair_folder}", f"--input_file={tmp_path}/in.txt", f"--batch={batch}", f"--out={tmp_path}/out.jsonl"])
        found[batch] = capsys.readouterr().out.split("\n")
        lines = sampled_lines(tmp_path / "out.jsonl")
        assert found[batch] == [line["text"] for line in lines] + [""] and [line["input"] for line in lines] == sources
    assert found[4] == found[100] and len(set(found[4])) > 3
    sample.main([f"--model={pair_folder}", f"--prompt={sources[0]}"])
    assert capsys.readouterr().out == found[4][0] + "\n"
    cfg, long = elf.load_config(pair_folder), []
    monkey = pytest.MonkeyPatch()
    monkey.setattr(sample, "condition", lambda encoder, rows, cfg, f=sample.condition: long.append(rows) or f(encoder, rows, cfg))
    sample.main([f"--model={pair_folder}", f"--prompt={sources[-1]}"])
    monkey.undo()
    assert (long[0] < 0).sum() == cfg.source_length and long[0].shape == (1, cfg.length)


def test_what_does_not_fit_a_prompt_is_refused(pair_folder, tmp_path, capsys):
    model = f"--model={pair_folder}"
    (tmp_path / "in.txt").write_text("jetzt\n\nbald\n")
    assert "line 2 is empty" in refused(capsys, sample, model, f"--input_file={tmp_path}/in.txt")
    (tmp_path / "in.txt").write_text("")
    assert "line 1 is empty" in refused(capsys, sample, model, f"--input_file={tmp_path}/in.txt")
    assert "none.txt" in refused(capsys, sample, model, "--input_file=none.txt")
    assert "--prompt" in refused(capsys, sample, model, "--prompt= ")
    assert "sweep" in refused(capsys, sample, model, "--prompt=jetzt", "--cfg=1,2")
    cfg = dataclasses.replace(elf.load_config(pair_folder), source_length=0)
    (tmp_path / "plain").mkdir()
    elf.save_model(tmp_path / "plain", elf.ELF(cfg).state_dict(), cfg)
    shutil.copytree(pair_folder / "encoder", tmp_path / "plain/encoder")
    assert "model with a source" in refused(capsys, sample, f"--model={tmp_path}/plain", "--prompt=jetzt")


def test_settings_that_change_nothing_are_not_repeated():
    pair_cfg, plain = PRESETS["tiny_pair"], PRESETS["tiny"]

    def made(model, **given):
        given = sample.parse([f"--{name}={value}" for name, value in given.items()], "", Setting())
        return [(s.sampler, s.steps, s.gamma, s.w, s.cfg, s.sde_start) for s in sample.settings(given, model)]
    assert made(plain, cfg="1,2,4") == [("sde", 32, 1.5, 2.0, 1.0, "paper")]
    assert made(pair_cfg, cfg="1,2,4", sampler="ode", gamma="0,1,2") == [("ode", 16, 0.0, 1.0, cfg, "paper") for cfg in (1.0, 2.0, 4.0)]
    assert made(plain, sampler="ode,sde", gamma="0,1", sde_start="paper,released") == [
        ("ode", 32, 0.0, 2.0, 1.0, "paper"), ("sde", 32, 1.0, 2.0, 1.0, "paper"), ("sde", 32, 1.0, 2.0, 1.0, "released")]
    assert made(plain, steps="1,2", gamma="1,2") == [
        ("ode", 1, 0.0, 2.0, 1.0, "paper"), ("sde", 2, 1.0, 2.0, 1.0, "paper"), ("sde", 2, 2.0, 2.0, 1.0, "paper")]
    assert made(plain, w="1,2,1") == [("sde", 32, 1.5, w, 1.0, "paper") for w in (1.0, 2.0)]
    assert len(made(pair_cfg, cfg="1,1.5,2,3,4", w="1,2", steps="8,16")) == 20


@pytest.mark.parametrize("sweep", [["--w=1,2,3"], ["--steps=1,2,4", "--sampler=ode,sde", "--gamma=1"], ["--cfg=1,2,3"], ["--grid=uniform,quantile"],
                                   ["--sampler=ode,sde", "--gamma=1,2", "--seeds=2"]])
def test_sweeps_are_drawn(pair_folder, pairs_file, tmp_path, sweep, monkeypatch):
    drawn, plot = [], sample.plot_sweep
    monkeypatch.setattr(sample, "plot_sweep", lambda lines, path: drawn.append(lines) or plot(lines, path))
    rows = measured(tmp_path, f"--model={pair_folder}", f"--data={pairs_file}", "--n=4", "--steps=2", *sweep, f"--plot={tmp_path}/a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and drawn == [rows] and len(rows) > 1
    settings = [tuple(row[f.name] for f in dataclasses.fields(Setting)) for row in rows]
    assert len(set(settings)) == len(rows)


def test_a_picture_has_the_curves_and_marks_what_is_degenerate(monkeypatch, tmp_path):
    figures, canvas = [], sample.canvas
    monkeypatch.setattr(sample, "canvas", lambda *size: figures.append(canvas(*size)) or figures[-1])
    base = dataclasses.asdict(Setting()) | {"gen_ppl": 30.0, "gen_ppl_se": 1.0, "entropy": 5.2, "entropy_pooled": 7.0}
    rows = [base | {"w": w, "gamma": gamma, "gen_ppl": 60 / w + gamma, "entropy": 5.5 - w / 4} | ({"degenerate": True} if w == 3 else {})
            for gamma in (1.0, 2.0) for w in (3.0, 1.0, 2.0)]
    sample.plot_sweep(rows, f"{tmp_path}/w.png")
    sample.plot_sweep([base | {"steps": n, "sampler": sampler} for n in (8, 16) for sampler in ("ode", "sde")], f"{tmp_path}/steps.png")
    over_w, over_steps = (axis for _, axis in figures)
    curves = [line for line in over_w.lines if line.get_linestyle() == "-"]
    assert [list(line.get_xdata()) for line in curves] == [[5.25, 5.0, 4.75]] * 2
    assert [list(line.get_ydata()) for line in curves] == [[61, 31, 21], [62, 32, 22]]
    hollow = [tuple(map(float, (*line.get_xdata(), *line.get_ydata()))) for line in over_w.lines if line.get_markerfacecolor() == "white"]
    assert sorted(hollow) == [(4.75, 21.0), (4.75, 22.0)]
    assert [text.get_text() for text in over_w.get_legend().get_texts()] == ["gamma 1.0", "gamma 2.0"] and over_w.get_ylabel() == "gen_ppl"
    assert over_steps.get_xlabel() == "steps" and [t.get_text() for t in over_steps.get_legend().get_texts()] == ["sampler ode", "sampler sde"]


def test_a_picture_without_a_sweep_does_not_crash(pair_folder, pairs_file, tmp_path, capsys):
    """One setting with several seeds, or texts made elsewhere: a picture of something, or one line that refuses."""
    (tmp_path / "a.jsonl").write_text('{"text": "a b", "target": "a c"}\n')
    for argv in ([f"--model={pair_folder}", f"--data={pairs_file}", "--n=2", "--steps=1", "--seeds=2"], [f"--eval_file={tmp_path}/a.jsonl"]):
        try:
            sample.run(sample.main, [*argv, f"--plot={tmp_path}/a.png"])
        except SystemExit as stop:
            assert stop.code == 2 and "--plot" in capsys.readouterr().err


def test_errors_over_seeds(pair_folder, pairs_file, tmp_path):
    argv = [f"--model={pair_folder}", f"--data={pairs_file}", "--n=8", "--steps=2", "--eval"]
    alone = [measured(tmp_path, *argv, f"--seed={seed}")[0] for seed in (3, 4, 5)]
    found, = measured(tmp_path, *argv, "--seed=3", "--seeds=3")
    assert found["seeds"] == 3 and found["n"] == 8
    for name in ("bleu", "rouge1", "length", "entropy", "distinct", "exact"):
        values = [row[name] for row in alone]
        assert found[name] == pytest.approx(np.mean(values)) and found[f"{name}_se"] == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))
    assert len({row["rouge1"] for row in alone}) == 3
    assert found["data_entropy"] == alone[0]["data_entropy"]


def test_a_run_on_pairs_resumes_exactly(pair_folder, tmp_path, small_language, monkeypatch, capsys):
    folder, whole = tmp_path / "stopped", train.Trainer.train_step

    def step(self, ids):
        if self.step == 25:
            signal.raise_signal(signal.SIGTERM)
        return whole(self, ids)
    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", step)
        with pytest.raises(SystemExit):
            train.main(["--config=tiny_pair", f"--out_dir={folder}", *KEYS])
    assert weights_of(folder)["step"] == 26
    train.main(["--config=tiny_pair", f"--out_dir={folder}", "--resume"])
    assert_same(weights_of(folder), weights_of(pair_folder))


# ------------------------------------------------------------------------------- pairs: any data


def spied_loss(monkeypatch):
    """A list that gets the arguments of every call of elf.flow_loss."""
    seen, flow_loss = [], elf.flow_loss
    monkeypatch.setattr(elf, "flow_loss", lambda *args: seen.append(args) or flow_loss(*args))
    return seen


def write_pairs(path, columns):
    names = ("condition_input_ids", "input_ids") if isinstance(columns[0][0], list) else ("input", "output")
    path.write_text("".join(json.dumps(dict(zip(names, pair)), ensure_ascii=False) + "\n" for pair in columns), encoding="utf-8")
    return path


IDS = [([5 + (3 * i + j) % 30 for j in range(1 + i % 8)], [40 + (i + j) % 30 for j in range(1 + i % 13)]) for i in range(64)]


def test_ready_pairs_are_cut_filled_and_counted(tmp_path, monkeypatch, encoders):
    """Sources of 1 to 8 tokens, of which 6 may stay, targets of 1 to 13, in 12 positions; EOS fills up and counts."""
    seen, folder = spied_loss(monkeypatch), tmp_path / "run"
    train.main(["--config=tiny_pair", f"--data={write_pairs(tmp_path / 'ids.jsonl', IDS)}", f"--encoder={encoders['t5']}",
                f"--out_dir={folder}", *KEYS, "--length=12", "--source_length=6", "--vocab=0", "--steps=4", "--eval_every=4", "--batch=24"])
    cfg, encoder, rows, heldout = train.load_data(elf.load_config(folder), "cpu", tiny_config.load_encoder(encoders["t5"]))
    want = [([~i for i in a[:6]] + b + [1] * 12)[:12] for a, b in IDS]
    assert [part.tolist() for part in (tiny_config.take(rows, range(61)), tiny_config.take(heldout, range(3)))] == [want[:61], want[61:]]
    x = torch.cat([encoder.model(input_ids=torch.tensor([a[:6] + b])[:, :12]).last_hidden_state[0] for a, b in IDS])
    assert cfg.latent_std == pytest.approx(x.std().item(), rel=0.1)
    dropped = 0
    for _, x, ids, counted, draws, n, source in seen[:4]:
        assert torch.equal(counted, ~source) and n == counted.sum() and (x[source & draws.drop[:, None]] == 0).all()
        for k, (row, at) in enumerate(zip(ids.tolist(), source)):
            s, end = int(at.sum()), (row + [1]).index(1)
            assert [~i for i in row[:s]] + row[s:] in want and at[:s].all()
            alone = encoder.encode(torch.tensor([row[s if draws.drop[k] else 0:end]]), cfg, None if draws.drop[k] else
                                   elf.who_sees(at[None, :end], torch.ones(1, end).bool(), torch.zeros(1).bool()))[0]
            torch.testing.assert_close(x[k, s if draws.drop[k] else 0:end], alone, rtol=0, atol=1e-4)
            dropped += int(draws.drop[k])
    assert 20 < dropped < 60                                        # of 96, 40 % on average
    sample.main([f"--model={folder}", "--n=3", f"--out={tmp_path}/out.jsonl"])
    found = sampled_lines(tmp_path / "out.jsonl")
    assert [line["target"] for line in found] == [encoder.tokenizer.decode(b) for _, b in IDS[61:]]
    assert [line["input"] for line in found] == [encoder.tokenizer.decode(a) for a, _ in IDS[61:]]


def test_latents_are_measured_over_real_positions_with_their_sources(encoders):
    encoder = tiny_config.load_encoder(encoders["t5"])
    data = datasets.Dataset.from_dict(dict(zip(("condition_input_ids", "input_ids"), zip(*IDS))))
    cfg = dataclasses.replace(PLAIN, source_length=6, latent_std=0.0)
    found, latents = tiny_config.measure_latents(cfg, encoder, tiny_config.Rows(data, cfg, encoder.tokenizer)[range(64)]), []
    for a, b in IDS:
        row = torch.tensor([(a[:6] + b)[:12]])
        at = torch.arange(row.shape[1])[None] < len(a[:6])
        mask = torch.where(at[:, :, None] & ~at[:, None], torch.finfo(torch.float32).min, 0.0)[:, None]
        latents.append(encoder.model(input_ids=row, attention_mask=mask).last_hidden_state[0])
    x = torch.cat(latents)
    assert (found.latent_mean, found.latent_std) == pytest.approx((x.mean().item(), x.std().item()), rel=1e-4, abs=1e-6)


def test_pairs_of_ones_own_train_and_sample(tmp_path, monkeypatch, capsys):
    rng = random.Random(0)
    words = {"sun": "soleil", "moon": "lune", "day": "été", "sea": "mer", "</s>": "<pad>"}
    pairs = [(" ".join(some), " ".join(map(words.get, some))) for some in (rng.choices(list(words), k=rng.randint(1, 6)) for _ in range(80))]
    data, folder = write_pairs(tmp_path / "pairs.jsonl", pairs), tmp_path / "run"
    train.main(["--config=tiny_pair", f"--data={data}", f"--out_dir={folder}", *KEYS, "--vocab=300", "--length=40", "--source_length=16"])
    cfg, encoder, rows, heldout = train.load_data(elf.load_config(folder), "cpu", tiny_config.load_encoder(f"{folder}/encoder"))
    tokenizer = encoder.tokenizer
    for row, (source, target) in zip([*rows.tolist(), *heldout.tolist()], pairs, strict=True):
        a, b = (tokenizer.encode(side, split_special_tokens=True) for side in (source, target))
        assert row == ([~i for i in a[:16]] + b + [tokenizer.eos_token_id] * 40)[:40]
    assert len(rows) == 76 and tokenizer.decode(b) == pairs[-1][1]
    row, = measured(tmp_path, f"--model={folder}", "--eval", f"--out={tmp_path}/out.jsonl", "--cfg=2")
    assert row["n"] == 4 and "rougeL" in row
    assert [(line["input"], line["target"]) for line in sampled_lines(tmp_path / "out.jsonl")] == pairs[76:]
    row, = measured(tmp_path, f"--model={folder}", f"--data={data}", "--n=10", "--batch=3", f"--out={tmp_path}/out.jsonl")    # from a path: from the top
    assert row["n"] == 10 and [line["target"] for line in sampled_lines(tmp_path / "out.jsonl")] == [target for _, target in pairs[:10]]


@pytest.mark.parametrize("content, words", [
    ([("sun", "soleil")] * 20 + [("sun", "")] + [("sun", "soleil")] * 20, ["example 21 ", "empty output"]),
    ([("sun", "soleil")] * 20 + [(" ", "soleil")], ["example 21 ", "empty input"]),
    ([("sun", "soleil")] * 70 + [("sun", "")], ["example 71 "]), (IDS + [([5], [])], ["example 65 ", "empty input_ids"]),
    (IDS + [([], [5])], ["example 65 ", "empty condition_input_ids"]), (IDS[:3] + [([5], [6, 9999])] + IDS, ["example 4 ", "9999"]),
    (IDS[:3] + [([-2], [6])] + IDS, ["example 4 ", "-2"]), (IDS[:3] + [([5, None], [6])] + IDS, ["example 4 ", "None"]), ([("sun", "soleil"), ("sun", None)] * 9, ["output", "9 of them null"])])
def test_an_empty_side_names_the_example(tmp_path, capsys, encoders, content, words):
    path = write_pairs(tmp_path / "pairs.jsonl", content)
    line = refused(capsys, train, "--config=tiny_pair", f"--data={path}", f"--encoder={encoders['t5']}", "--length=12", "--source_length=6",
                   "--vocab=0", "--latent_dim=16", f"--out_dir={tmp_path}/new", "--device=cpu")
    assert all(word in line for word in [f"--data={path}", *words]) and not (tmp_path / "new").exists(), line


@pytest.mark.parametrize("config, content, words", [
    ("tiny_pair", '{"input": "sun"}\n' * 9, ["columns input;", "input and output", "condition_input_ids and input_ids"]),
    ("tiny_pair", '{"text": "sun"}\n' * 9, ["columns text;", "input and output"]),
    ("tiny_pair", '{"input_ids": [5, 6]}\n' * 9, ["columns input_ids;", "condition_input_ids"]),
    ("tiny_pair", '{"input": 3, "output": "sun"}\n' * 9, ["input", "int64", "strings"]),
    ("tiny_text", '{"input": "sun", "output": "soleil"}\n' * 9, ["columns input, output;", "text", "tiny_pair"]),
    ("tiny_text", '{"condition_input_ids": [5], "input_ids": [6]}\n' * 9, ["condition_input_ids", "tiny_pair"])])
def test_what_is_no_pairs_says_what_is_needed(tmp_path, capsys, config, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    line = refused(capsys, train, f"--config={config}", f"--data={tmp_path}/a.jsonl", f"--out_dir={tmp_path}/new")
    assert all(word in line for word in [f"--data={tmp_path}/a.jsonl", *words]) and not (tmp_path / "new").exists(), line


@pytest.mark.parametrize("argv", [["--config=tiny_pair", "--data=text.txt"], ["--config=tiny_pair", "--data=tiny"], ["--config=tiny", "--data=tiny_pair"],
                                  ["--config=tiny", "--source_length=9"], ["--config=tiny_pair", "--source_length=0"]])
def test_a_source_without_pairs_and_pairs_without_a_source_are_refused(tmp_path, capsys, argv, small_language):
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    line = refused(capsys, train, *argv, f"--out_dir={tmp_path}/new", *SMALL)
    assert "--data=" in line and not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------- texts made elsewhere


def test_texts_made_elsewhere_are_measured(tmp_path, judge_folder, capsys):
    path, judge = tmp_path / "a.jsonl", [f"--judge={judge_folder}"]
    entries = [{"text": "the sun", "target": "the moon"}, {"generated": "hill moon hill hill", "target": "hill moon"}, {"text": "", "target": "sun"}]
    write = lambda entries: path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))      # noqa: E731
    write(entries)
    texts, targets = ["the sun", "hill moon hill hill", ""], ["the moon", "hill moon", "sun"]
    row, = measured(tmp_path, f"--eval_file={path}")                # with targets: no judge, and no download of one
    want = sample.against(texts, targets, True)
    assert row["bleu"] == want["bleu"] and row["rouge1"] == pytest.approx(np.mean(want["rouge1"])) and "gen_ppl" not in row
    assert row["n"] == 3 and row["empty"] == 1 / 3 and row["repetition"] == pytest.approx(1 / 9)
    assert row["length"] == 2 and row["entropy"] == pytest.approx((math.log(2) + 0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / 2)      # words
    row, = measured(tmp_path, f"--eval_file={path}", "--eval", *judge)
    each = [nats_alone(judge_folder, text) for text in texts]
    assert row["gen_ppl"] == pytest.approx(math.exp(sum(map(sum, each)) / sum(map(len, each))), rel=1e-5) and row["bleu"] == want["bleu"]
    write([{"generated": entry.get("text", entry.get("generated"))} for entry in entries])
    alone, = measured(tmp_path, f"--eval_file={path}", *judge)
    assert alone["gen_ppl"] == row["gen_ppl"] and "bleu" not in alone and alone["length"] == row["length"]
    said = capsys.readouterr().out
    assert "gen_ppl" in said and f"{row['gen_ppl']:.3f} ±{row['gen_ppl_se']:.3f}" in said


@pytest.mark.parametrize("content, words", [
    ('{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', ["line 2 "]), ('{"text": "a"}\n{"text": "b"}\n[3]\n', ["line 3 "]), ("sun\n", ["line 1 "]),
    ('{"text": "a"}\n{"texts": "b", "id": 3}\n', ["line 2 ", "text", "generated", "texts, id"]), ("", ["line 1 ", "empty"]),
    ('{"text": "a"}\n\n{"text": "b"}\n', ["line 2 ", "empty"]), ('{"text": null}\n', ["line 1 "]), ('"text"\n', ["line 1 "])])
def test_broken_lines_are_named(tmp_path, capsys, judge_folder, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    line = refused(capsys, sample, f"--eval_file={tmp_path}/a.jsonl", f"--judge={judge_folder}")
    assert all(word in line for word in [f"--eval_file={tmp_path}/a.jsonl", *words]), line


def test_every_text_that_out_wrote_can_be_read_back(tmp_path):
    texts = ["a\nb", "a\u2028b", "a\x85b\x0cc", "\ufeff", "", "été 🙂", '"\\']
    sample.write_texts(texts, None, tmp_path / "out.jsonl")
    assert sample.read_samples(tmp_path / "out.jsonl") == (texts, None)


def test_a_judge_that_is_not_there_is_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert "hf download no-one/judge" in refused(capsys, sample, f"--eval_file={tmp_path}/a.jsonl", "--judge=no-one/judge")


# ------------------------------------------------------------------------------- several processes

RECORDED = """                                                        # torchrun takes a --n for one of its own keys
import sample
sys.argv.append("--n=23")
train.main, follow, start, found = sample.main, sample.follow, sample.start, {}
def noted(cfg, seed, numbers, device):
    z, generators = start(cfg, seed, numbers, device)
    found.update({("noise", i): a.clone() for i, a in zip(numbers, z)})
    return z, generators
def followed(model, setting, seed, numbers, *rest):
    steps = list(follow(model, setting, seed, numbers, *rest))
    found.update({("z", i): a for i, a in zip(numbers, steps[-1][1])})
    torch.save(found, f"found{os.environ.get('RANK', 0)}.pt")
    return steps
sample.start, sample.follow = noted, followed
"""


def test_samples_depend_neither_on_the_batch_nor_on_the_processes(pair_folder, pairs_file, tmp_path):
    argv = [f"--model={pair_folder}", f"--data={pairs_file}", "--sampler=sde", "--gamma=1", "--cfg=2", "--steps=5", "--device=cpu"]
    assert torchrun(RECORDED, *argv, "--batch=5", f"--out={tmp_path}/two.jsonl", f"--json={tmp_path}/two.json") == 0
    shares = [torch.load(f"found{rank}.pt") for rank in (0, 1)]
    assert [len(share) for share in shares] == [2 * 12, 2 * 11]
    for batch in (5, 64):
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((sample, "start"), (sample, "follow"), (train, "main"), (sys, "argv")):
                patch.setattr(module, name, getattr(module, name))          # put back what the code changes
            sys.argv, space = ["sample.py"], {"train": train, "torch": torch, "os": os, "sys": sys}
            exec(RECORDED, space)
            sample.main([*argv, "--n=23", f"--batch={batch}", f"--out={tmp_path}/one.jsonl", f"--json={tmp_path}/one.json"])
        one, two = space["found"], shares[0] | shares[1]
        assert one.keys() == two.keys() and len(one) == 46
        for (kind, i), a in one.items():
            assert torch.equal(a, two[kind, i]) if kind == "noise" else torch.allclose(a, two[kind, i], rtol=0, atol=1e-4), (kind, i)
        lines = [sampled_lines(tmp_path / name) for name in ("one.jsonl", "two.jsonl")]
        assert [line["id"] for line in lines[1]] == list(range(23)) and len({line["text"] for line in lines[0]}) > 5
        assert [line["input"] for line in lines[0]] == [line["input"] for line in lines[1]]
        assert sum(a == b for a, b in zip(*lines)) >= 0.99 * 23
    tables = [json.loads((tmp_path / name).read_text())[0] for name in ("one.json", "two.json")]
    assert tables[0] | {"seconds": 0} == tables[1] | {"seconds": 0}


# ------------------------------------------------------------------------------- presets with a source


def test_the_presets_with_a_source_have_the_papers_values():
    common = dict(encoder="google-t5/t5-small", vocab=32100, latent_dim=512, latent_mean=0, latent_std=0.2, hidden=768, depth=12, heads=12,
                  bottleneck=128, prefix=4, t_mean=-1.5, t_std=0.8, noise_scale=2, t_floor=0.05, decode_share=0.2, p_mean=0.8, p_std=0.8,
                  decode_noise_scale=1, w_min=0.5, w_max=5, label_drop=0.1, batch=512, optimizer="muon", lr=0.002, clip=1, ema=0.9999,
                  epochs=100, steps=0, warmup=5000, cooldown=0, cfg=2, w=1, sample_steps=64, gamma=0)
    for name, source, length, data in (("wmt14_de_en", 64, 128, "wmt14_de-en_train_t5"), ("xsum", 1024, 1088, "xsum_train_t5")):
        want = common | dict(source_length=source, length=length, data=f"embedded-language-flows/{data}")
        assert {key: getattr(elf.PRESETS[name], key) for key in want} == want
        way, = sample.settings({}, elf.PRESETS[name])
        assert way == Setting(sampler="ode", steps=64, gamma=0.0, w=1.0, cfg=2.0)
        assert train.schedule(0, dataclasses.replace(elf.PRESETS[name], steps=10_000)) == 1 / 5000


@pytest.mark.parametrize("name, preset, words", [
    ("ELF-B-de-en-torch", "wmt14_de_en", ["'length': 128", "'source_length': 64"]),
    ("ELF-B-xsum-torch", "xsum", ["'length': 1088", "'source_length': 1024"])])
def test_hub_ids_with_a_source_have_their_presets(tmp_path, golden, monkeypatch, capsys, name, preset, words):
    write_released(tmp_path / "checkpoint_5", golden_state())
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda source, **how: str(tmp_path))
    cfg = elf.load_model(f"embedded-language-flows/{name}")[1]
    sizes = {key: getattr(GOLDEN, key) for key in ("vocab", "latent_dim", "hidden", "depth", "heads", "bottleneck", "prefix")}
    assert cfg == dataclasses.replace(elf.PRESETS[preset], **sizes)
    said = capsys.readouterr().err
    assert all(word in said for word in [*words, "'decode_noise_scale': 1.0"])


# ------------------------------------------------------------------------------- what the README says, in full (slow)


@pytest.mark.slow
def test_the_laptop_run_learns_the_language(tmp_path):
    """The README's first command, and the quality that it promises, on 512 samples as they come."""
    train.main(["--config=tiny", f"--out_dir={tmp_path / 'tiny'}", "--device=cpu"])
    sample.main([f"--model={tmp_path / 'tiny'}", "--n=512", "--steps=32", f"--json={tmp_path / 'table.json'}"])
    row, = json.load(open(tmp_path / "table.json"))
    assert row["sampler"] == "sde" and row["valid"] >= 0.9 and row["novel"] >= 0.8
    for name in ("entropy", "entropy_pooled"):
        assert abs(row[name] - row[f"data_{name}"]) < 0.1


@pytest.mark.slow
def test_the_laptop_run_learns_to_translate(tmp_path):
    """512 held-out sources, as they come, against their one right translation, at the best guidance of a sweep."""
    train.main(["--config=tiny_pair", f"--out_dir={tmp_path / 'pair'}", "--device=cpu"])
    sample.main([f"--model={tmp_path / 'pair'}", "--n=512", "--cfg=1,1.5,2", f"--json={tmp_path / 'table.json'}"])
    rows = json.load(open(tmp_path / "table.json"))
    assert {(row["sampler"], row["steps"]) for row in rows} == {("ode", 16)} and max(row["exact"] for row in rows) >= 0.95
