# SPDX-License-Identifier: Apache-2.0
"""The model for training: the same function as `glmserve.model`, on padded rows, with gradients.

Attention is dense and unabsorbed, sparsity is a mask, every expert computes every token (cheap at
this size) and the router's weights pick. A test holds it to the served model in fp64. Not its job:
losses (`objective`), checkpoints (`export`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glmserve.model_config import ModelConfig

LATENT_EPS = 1e-5
INDEX_EPS = 1e-6


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x [B, T, ..., d] with pairs turned by rope [B, T, d / 2, 2] = (cos, sin)."""
    if x.dim() == 4:
        rope = rope[:, :, None]
    a, b = x.to(rope.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def rope_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pair = torch.arange(0, config.qk_rope_head_dim, 2, dtype=wide, device=positions.device)
    angle = positions.to(wide)[..., None] / config.rope_theta ** (pair / config.qk_rope_head_dim)
    return torch.stack((angle.cos(), angle.sin()), -1)


def _matrix(out: int, inner: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(out, inner) * gain / math.sqrt(inner))


def _ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


@dataclass
class Scope:
    """What one pass's layers share."""

    rope: Tensor  # [B, T, rope / 2, 2]
    bias: Tensor  # [B, 1, T, T] 0 where a row may look, -inf elsewhere
    sparse: int  # rows [0, sparse) use top-k
    probed: slice  # rows whose attention teaches the indexer


class Indexer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.rope_dim = c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim
        self.wq_b = _matrix(self.heads * self.dim, c.q_lora_rank)
        self.wk = _matrix(self.dim, c.hidden_size)
        self.weights_proj = _matrix(self.heads, c.hidden_size)
        self.k_norm_weight = _ones(self.dim)
        self.k_norm_bias = nn.Parameter(torch.zeros(self.dim))

    def forward(self, x: Tensor, q_latent: Tensor, rope: Tensor) -> Tensor:
        """[B, T, D], [B, T, q_lora], both detached -> scores [B, T, T], without the mask."""
        dtype, n = x.dtype, self.rope_dim
        q = F.linear(q_latent, self.wq_b.to(dtype)).unflatten(-1, (self.heads, self.dim))
        wide = F.linear(x, self.wk.to(dtype))
        wide = wide if dtype == torch.float64 else wide.float()
        k = F.layer_norm(
            wide,
            (self.dim,),
            self.k_norm_weight.to(wide.dtype),
            self.k_norm_bias.to(wide.dtype),
            INDEX_EPS,
        ).to(dtype)
        q = torch.cat((rotate(q[..., :n], rope), q[..., n:]), -1)
        k = torch.cat((rotate(k[..., :n], rope), k[..., n:]), -1)
        w = F.linear(x, self.weights_proj.to(dtype)) * (self.dim * self.heads) ** -0.5
        scores = torch.zeros((), dtype=wide.dtype, device=x.device)
        for head in range(self.heads):  # [B, T, T] at a time: all heads at once would not fit
            dots = torch.bmm(q[:, :, head], k.transpose(1, 2))
            scores = scores + torch.relu(dots).to(wide.dtype) * w[..., head : head + 1]
        return scores


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, full: bool) -> None:
        super().__init__()
        self.c = c
        heads = c.num_attention_heads
        self.q_a_proj = _matrix(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = _ones(c.q_lora_rank)
        self.q_b_proj = _matrix(heads * c.qk_head_dim, c.q_lora_rank)
        self.kv_a_proj_with_mqa = _matrix(c.latent_dim, c.hidden_size)
        self.kv_a_layernorm = _ones(c.kv_lora_rank)
        self.kv_b_proj = _matrix(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        depth = 2 * (c.num_hidden_layers + 1)
        self.o_proj = _matrix(c.hidden_size, heads * c.v_head_dim, depth**-0.5)
        self.indexer = Indexer(c) if full else None

    def queries(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """-> the normed latent [B, T, q_lora] and queries [B, T, H, qk]."""
        c = self.c
        latent = rms(F.linear(x, self.q_a_proj.to(x.dtype)), self.q_a_layernorm, LATENT_EPS)
        q = F.linear(latent, self.q_b_proj.to(x.dtype)).unflatten(-1, (-1, c.qk_head_dim))
        nope = c.qk_nope_head_dim
        return latent, torch.cat((q[..., :nope], rotate(q[..., nope:], rope)), -1)

    def keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """-> keys [B, T, H, qk] and values [B, T, H, v]."""
        c = self.c
        kv = F.linear(x, self.kv_a_proj_with_mqa.to(x.dtype))
        latent = rms(kv[..., : c.kv_lora_rank], self.kv_a_layernorm, LATENT_EPS)
        k_rope = rotate(kv[..., c.kv_lora_rank :], rope)
        up = F.linear(latent, self.kv_b_proj.to(x.dtype))
        up = up.unflatten(-1, (c.num_attention_heads, -1))
        nope, values = up.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        spread = k_rope[:, :, None].expand(-1, -1, c.num_attention_heads, -1)
        return torch.cat((nope, spread), -1), values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """[B, T, H, .] each -> the block's output [B, T, D]."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=self.c.qk_head_dim**-0.5
        )
        return F.linear(out.transpose(1, 2).flatten(2), self.o_proj.to(out.dtype))

    @torch.no_grad()
    def probabilities(self, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        """Mean over heads of the attention [b, T, T], fp32: what the indexer should learn."""
        scores = torch.einsum("bthd,bshd->bhts", q, k).float() * self.c.qk_head_dim**-0.5
        mean: Tensor = (scores + bias.float()).softmax(-1).mean(1)
        return mean


class Mlp(nn.Module):
    """SwiGLU; with `experts` > 1 the inner columns belong to experts in turn."""

    def __init__(self, c: ModelConfig, inner: int, experts: int = 1) -> None:
        super().__init__()
        depth = 2 * (c.num_hidden_layers + 1)
        gain = depth**-0.5
        self.gate = nn.Parameter(torch.randn(experts, inner, c.hidden_size) * c.hidden_size**-0.5)
        self.up = nn.Parameter(torch.randn(experts, inner, c.hidden_size) * c.hidden_size**-0.5)
        self.down = nn.Parameter(torch.randn(experts, c.hidden_size, inner) * gain * inner**-0.5)

    def forward(self, x: Tensor, shares: Tensor | None = None) -> Tensor:
        """x [B, T, D]; shares [B, T, E] weigh the experts' outputs."""
        dtype = x.dtype
        h = F.silu(F.linear(x, self.gate.to(dtype).flatten(0, 1)))
        h = h * F.linear(x, self.up.to(dtype).flatten(0, 1))
        if shares is not None:
            h = h * shares.to(dtype).repeat_interleave(self.gate.shape[1], dim=-1)
        return F.linear(h, self.down.to(dtype).transpose(0, 1).flatten(1))


class Moe(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.router = nn.Parameter(torch.randn(c.n_routed_experts, c.hidden_size) * 0.02)
        self.register_buffer("bias", torch.zeros(c.n_routed_experts))
        self.experts = Mlp(c, c.moe_intermediate_size, c.n_routed_experts)
        self.shared = Mlp(c, c.shared_intermediate_size)
        self.bias: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> output [B, T, D], load [E]: the share of tokens that chose each expert."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            p = F.linear(x.to(wide), self.router.to(wide)).sigmoid()
        choice = p.detach() + self.bias
        least = choice.topk(self.c.num_experts_per_tok, dim=-1).values[..., -1:]
        chosen = choice >= least
        shares = p * chosen
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * self.c.routed_scaling_factor
        load = chosen.to(torch.float32).mean((0, 1))
        return self.experts(x, shares) + self.shared(x), load


class Layer(nn.Module):
    def __init__(self, c: ModelConfig, number: int) -> None:
        super().__init__()
        self.c, self.full, self.sparse_ffn = c, c.is_full(number), c.is_moe(number)
        self.input_layernorm = _ones(c.hidden_size)
        self.post_attention_layernorm = _ones(c.hidden_size)
        self.self_attn = Attention(c, self.full)
        self.mlp: Moe | Mlp = Moe(c) if self.sparse_ffn else Mlp(c, c.intermediate_size)

    def feed(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """The second half: residual [B, T, D] -> residual, load."""
        x = rms(h, self.post_attention_layernorm, self.c.rms_norm_eps)
        if isinstance(self.mlp, Moe):
            out, load = self.mlp(x)
            return h + out, load
        return h + self.mlp(x), None


class Twin(nn.Module):
    """Parameters are fp32 (or fp64); `dtype` is what activations are computed in."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        c = self.config = config
        self.embed_tokens = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size) * 0.5)
        self.layers = nn.ModuleList(
            Layer(c, i) for i in range(c.num_hidden_layers + c.num_mtp_layers)
        )
        self.norm = _ones(c.hidden_size)
        self.lm_head = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size) * 0.02)
        self.enorm, self.hnorm = _ones(c.hidden_size), _ones(c.hidden_size)
        self.eh_proj = _matrix(c.hidden_size, 2 * c.hidden_size)
        self.shared_head_norm = _ones(c.hidden_size)

    @property
    def mtp(self) -> Layer:
        layer = self.layers[self.config.num_hidden_layers]
        assert isinstance(layer, Layer)
        return layer

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.lm_head.to(hidden.dtype))

    def mtp_input(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """[..] following tokens and [.., D] hidden states -> the MTP layer's residual."""
        e = F.embedding(ids, self.embed_tokens).to(hidden.dtype)
        eps = self.config.rms_norm_eps
        joined = torch.cat((rms(e, self.enorm, eps), rms(hidden, self.hnorm, eps)), -1)
        return F.linear(joined, self.eh_proj.to(hidden.dtype))


def causal_bias(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T] -> [B, 1, T, T]: a row sees its own conversation up to itself."""
    width = documents.shape[1]
    seen = documents[:, :, None] == documents[:, None, :]
    seen = seen & torch.ones(width, width, dtype=torch.bool, device=documents.device).tril()
    bias = torch.zeros(seen.shape, dtype=dtype, device=documents.device)
    return bias.masked_fill_(~seen, -torch.inf)[:, None]


@torch.no_grad()
def select(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Scores [b, T, T] and bias [b, 1, T, T] -> the bias that leaves each row its k best, of equals
    those that come first."""
    if scores.shape[-1] <= k:
        return bias
    seen = scores + bias[:, 0].to(scores.dtype)
    least = seen.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = seen > least
    tied = seen == least
    room = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    kept = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
    return bias.masked_fill(~kept[:, None], -torch.inf)
