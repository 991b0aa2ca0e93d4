import math

import pytest
import torch

import elf
from sample import seeded
from elf import ELF, Config

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


@pytest.fixture(scope="module")
def golden():
    model = ELF(GOLDEN)
    model.load_state_dict(elf.from_released(golden_state()))
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
                      w=torch.tensor([1.5, 2, 3, 1, 0.5]), p=0.5 + 0.4 * ar((5, 6), 0.9), eps=eps)
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
