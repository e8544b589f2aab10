"""The embedded models in the form they are trained in, and the same weights in the arithmetic they are stored
for.

Training form: fp32 weights, bf16 products, whole sequences, every expert computed and weighted by its route.
Stored form (`stored`): weights and activations pass through the formats of the checkpoint and of the default
deployment, at the rounding points of `mono.reference`, with fp32 products. It serves whole sequences and,
with a cache, decode steps of any number of rows. It is what the drafter is trained on and what the README's
figures are measured with; the library's own reference arm is the judge of the stored checkpoint.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from audit.tiny import rounding
from audit.tiny.tokens import NOISE, ROWS, TOKENS


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of one target and its drafter; all of them end up in the two `config.json`."""

    full_attention_layers: (
        int  # 0: M3.1, every layer sparse. 3: M3, a prefix of full attention without indexer
    )
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    rotary: int = 32
    theta: float = 1e4
    eps: float = 1e-6
    kv_block: int = 16
    kv_blocks: int = 4
    dense_layers: int = 3
    dense_width: int = 256
    experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 128
    routed_factor: float = 2.0
    alpha: float = 1.702
    limit: float = 7.0
    max_positions: int = 2048
    taps: tuple[int, ...] = (1, 3, 4, 6, 7)
    draft_layers: int = 1
    draft_len: int = 7
    draft_width: int = 256
    markov_rank: int = 32
    window: int = 256

    def sparse(self, layer: int) -> bool:
        return layer >= self.full_attention_layers


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight) over the last axis, fp32, not rounded."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


def turns(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin of every rotary angle, in float64, rounded once to fp32.

    [B, T] -> two of [B, T, 1, rotary/2].
    """
    half = shape.rotary // 2
    rate = shape.theta ** (-torch.arange(half, device=positions.device, dtype=torch.float64) / half)
    angle = positions.double()[..., None, None] * rate
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Half-split rotation of the first lanes, as many as `turn` has angles for. x [B, T, heads, D] fp32."""
    cos, sin = turn
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def swiglu(gate: Tensor, up: Tensor, shape: Shape) -> Tensor:
    """SwiGLU-OAI in fp32: g * sigmoid(alpha g) * (u + 1), g clamped above, u on both sides."""
    gate = gate.float().clamp(max=shape.limit)
    up = up.float().clamp(-shape.limit, shape.limit)
    return gate * torch.sigmoid(shape.alpha * gate) * (up + 1.0)


class Linear(nn.Module):
    """y = x W^T. Trained in bf16; stored as MXFP8 and served as PTPC FP8 (`ptpc`) or as it is (`mxfp8`)."""

    scale: Tensor

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)
        self.served: str | None = None

    def store(self, served: str | None) -> None:
        self.weight.requires_grad_(False)
        self.served = served
        if served is None:
            return
        self.weight.copy_(rounding.mxfp8(self.weight))
        if served == "ptpc":
            codes, scale = rounding.per_row_fp8(self.weight)
            self.weight.copy_(codes)
            self.register_buffer("scale", scale.squeeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        if self.served == "ptpc":
            codes, scale = rounding.per_row_fp8(x)
            return (F.linear(codes, self.weight) * scale * self.scale).bfloat16()
        return F.linear(x.bfloat16(), self.weight.bfloat16())


def norm_weight(size: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size))


@dataclass
class Cache:
    """What decode keeps of one layer: values as they leave the FP8 cache, fp32."""

    k: Tensor  # [B, G, S, D]
    v: Tensor  # [B, G, S, D]
    index_k: Tensor  # [B, S, D]

    @staticmethod
    def empty(shape: Shape, batch: int, capacity: int, device: torch.device) -> "list[Cache]":
        kv = (batch, shape.kv_heads, capacity, shape.head_dim)
        return [
            Cache(*(torch.zeros(size, device=device) for size in (kv, kv, (batch, capacity, shape.head_dim))))
            for _ in range(shape.layers)
        ]


class Attention(nn.Module):
    """Grouped-query attention, full or over the KV blocks that an indexer selects for each KV head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, h = shape.head_dim, shape.hidden
        self.shape = shape
        self.q_proj = Linear(h, shape.heads * d)
        self.k_proj = Linear(h, shape.kv_heads * d)
        self.v_proj = Linear(h, shape.kv_heads * d)
        self.o_proj = Linear(shape.heads * d, h, 0.005)
        self.index_q_proj = Linear(h, shape.kv_heads * d)
        self.index_k_proj = Linear(h, d)
        self.q_norm, self.k_norm = norm_weight(d), norm_weight(d)
        self.index_q_norm, self.index_k_norm = norm_weight(d), norm_weight(d)

    def head(self, x: Tensor, weight: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Split, normalise and rotate heads. [B, T, heads * D] -> [B, heads, T, D] bf16."""
        x = x.unflatten(-1, (-1, self.shape.head_dim))
        return rope(gemma(x, weight, self.shape.eps), turn).bfloat16().transpose(1, 2)

    def block_scores(self, index_q: Tensor, index_k: Tensor, rows: Tensor) -> Tensor:
        """Largest q .

        k of each KV block, -inf where no key is visible. [B, G, Q, D], [B, S, D], [B, Q] -> [B, G, Q,
        S/16].
        """
        dots = index_q.float() @ index_k.float().transpose(-1, -2)[:, None]
        keys = torch.arange(index_k.shape[1], device=dots.device)
        dots = dots.masked_fill(keys > rows[:, None, :, None], float("-inf"))
        scores: Tensor = dots.unflatten(-1, (-1, self.shape.kv_block)).amax(-1)
        return scores

    def select(self, scores: Tensor, rows: Tensor) -> Tensor:
        """Which KV blocks a row attends to:

        its own and the best others. [B, G, Q, S/16] -> bool of that shape.
        """
        blocks = torch.arange(scores.shape[-1], device=scores.device)
        own = (rows // self.shape.kv_block)[:, None, :, None]
        scores = scores.masked_fill(blocks == own, float("inf"))
        best = scores.topk(min(self.shape.kv_blocks, scores.shape[-1]), dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)

    def recent(self, scores: Tensor, rows: Tensor) -> Tensor:
        """The control: the most recent blocks, whatever their score."""
        blocks = torch.arange(scores.shape[-1], device=scores.device)
        age = (rows // self.shape.kv_block)[:, None, :, None] - blocks
        return ((age >= 0) & (age < self.shape.kv_blocks)).expand_as(scores)

    def indexer_loss(self, q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, rows: Tensor) -> Tensor:
        """Cross-entropy of the indexer's block weights with full attention's, own block left out, on `rows`
        [R].
        """
        batch, _, length, d = q.shape
        groups, size = self.shape.kv_heads, self.shape.kv_block
        at = rows.expand(batch, -1)
        blocks = torch.arange(length // size, device=q.device)
        remote = blocks < (rows // size)[:, None]  # [R, S/16]
        with torch.no_grad():
            wide = q[:, :, rows].unflatten(1, (groups, -1)).float()  # [B, G, N/G, R, D]
            dots = wide @ k.float().transpose(-1, -2)[:, :, None] * d**-0.5
            dots = dots.masked_fill(torch.arange(length, device=q.device) > rows[:, None], float("-inf"))
            mass = dots.softmax(-1).mean(2).unflatten(-1, (-1, size)).sum(-1) * remote
        scores = self.block_scores(index_q[:, :, rows], index_k[:, 0], at) * d**-0.5
        student = scores.masked_fill(~remote, -1e9).log_softmax(-1)
        loss: Tensor = -(mass * student).sum(-1).mean()
        return loss

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        turn: tuple[Tensor, Tensor],
        sparse: bool,
        index_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Training form. x [B, T, H], positions [B, T] = 0..T-1. Returns output and the indexer's loss."""
        q = self.head(self.q_proj(x), self.q_norm, turn)
        k = self.head(self.k_proj(x), self.k_norm, turn)
        v = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        repeat = self.shape.heads // self.shape.kv_heads
        loss = torch.zeros((), device=x.device)
        mask = None
        if index_rows is not None or sparse:
            seen = x.detach()  # the indexer learns from attention, not the other way round
            index_q = self.head(self.index_q_proj(seen), self.index_q_norm, turn)
            index_k = self.head(self.index_k_proj(seen), self.index_k_norm, turn)
            if index_rows is not None:
                loss = self.indexer_loss(q.detach(), k.detach(), index_q, index_k, index_rows)
            if sparse:
                with torch.no_grad():
                    scores = self.block_scores(index_q, index_k[:, 0], positions)
                    chosen = self.select(scores, positions)
                    keys = torch.arange(x.shape[1], device=x.device)
                    mask = chosen.repeat_interleave(self.shape.kv_block, -1)
                    mask = mask & (keys <= positions[:, None, :, None])
                    mask = mask.repeat_interleave(repeat, 1)
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2)), loss

    def decode(self, x: Tensor, positions: Tensor, sparse: bool, cache: Cache | None, recent: bool) -> Tensor:
        """Stored form. x [B, Q, H] fp32, positions [B, Q]; without a cache the rows are the whole context."""
        groups, d = self.shape.kv_heads, self.shape.head_dim
        turn = turns(positions, self.shape)
        q = self.head(self.q_proj(x), self.q_norm, turn).float()
        k = rounding.heads_fp8(self.head(self.k_proj(x), self.k_norm, turn))
        v = rounding.heads_fp8(self.v_proj(x).unflatten(-1, (-1, d)).transpose(1, 2))
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        if cache is not None:
            cache.k[batch, :, positions] = k.transpose(1, 2)
            cache.v[batch, :, positions] = v.transpose(1, 2)
            k, v = cache.k, cache.v
        keys = torch.arange(k.shape[2], device=x.device)
        mask = keys <= positions[:, None, :, None]  # [B, 1, Q, S]
        if sparse:
            index_q = self.head(self.index_q_proj(x), self.index_q_norm, turn)
            index_k = rounding.e4m3(self.head(self.index_k_proj(x), self.index_k_norm, turn)[:, 0].float())
            if cache is not None:
                cache.index_k[batch, positions] = index_k
                index_k = cache.index_k
            scores = self.block_scores(index_q, index_k, positions)
            chosen = self.recent(scores, positions) if recent else self.select(scores, positions)
            mask = mask & chosen.repeat_interleave(self.shape.kv_block, -1)  # [B, G, Q, S]
        dots = q.unflatten(1, (groups, -1)).flatten(2, 3) @ k.transpose(-1, -2) * d**-0.5
        dots = dots.unflatten(2, (-1, x.shape[1])).masked_fill(~mask[:, :, None], float("-inf"))
        out = (dots.softmax(-1).flatten(2, 3) @ v).unflatten(2, (-1, x.shape[1]))  # [B, G, N/G, Q, D]
        projected: Tensor = self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2).bfloat16())
        return projected


class DenseMlp(nn.Module):
    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.gate_proj, self.up_proj = Linear(shape.hidden, width), Linear(shape.hidden, width)
        self.down_proj = Linear(width, shape.hidden, 0.005)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self.shape).bfloat16())
        return down


class Experts(nn.Module):
    """Routed experts 0..E-1 and the shared one, number E, always chosen with weight 1."""

    bias: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        count, width, hidden = shape.experts + 1, shape.expert_width, shape.hidden
        self.gate = nn.Parameter(torch.randn(shape.experts, hidden) * 0.02)
        self.register_buffer("bias", torch.zeros(shape.experts))
        self.w1 = nn.Parameter(torch.randn(count, width, hidden) * 0.02)
        self.w3 = nn.Parameter(torch.randn(count, width, hidden) * 0.02)
        self.w2 = nn.Parameter(torch.randn(count, hidden, width) * 0.005)
        self.stored = False

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weight of every expert, 0 where not chosen, and the load. [T, H] bf16 -> [T, E + 1] fp32, [E]."""
        if self.stored:  # an fp32 product; float64 keeps reduced-precision matrix units out of it
            score = F.linear(x.double(), self.gate.double()).float().sigmoid()
        else:
            score = F.linear(x.float(), self.gate).sigmoid()
        chosen = (score.detach() + self.bias).topk(self.shape.experts_per_token, -1).indices
        picked = torch.zeros_like(score).scatter(-1, chosen, 1.0)
        kept = score * picked
        weight = kept / kept.sum(-1, keepdim=True).clamp_min(1e-20) * self.shape.routed_factor
        return torch.cat([weight, torch.ones_like(weight[:, :1])], -1), picked.mean(0)

    def store(self) -> None:
        """Routed experts through MXFP4; the shared one through its stored MXFP8, then MXFP4 to join them."""
        self.stored = True
        for weight in (self.w1, self.w2, self.w3):
            weight.requires_grad_(False)
            weight[-1].copy_(rounding.mxfp8(weight[-1]))
            weight.copy_(rounding.mxfp4(weight))
        self.gate.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, -2).bfloat16()
        weight, load = self.route(flat)
        if self.stored:
            flat32 = rounding.mxfp8(flat)
            gate, up = F.linear(flat32, self.w1.flatten(0, 1)), F.linear(flat32, self.w3.flatten(0, 1))
            middle = rounding.mxfp8(swiglu(gate, up, self.shape).bfloat16()).unflatten(
                -1, (*weight.shape[-1:], -1)
            )
            down = torch.bmm(middle.transpose(0, 1), self.w2.transpose(-1, -2))  # [E + 1, T, H]
            out = (down * weight.T[..., None]).sum(0).bfloat16()
            return out.view_as(x), load
        gate = F.linear(flat, self.w1.flatten(0, 1).bfloat16())
        up = F.linear(flat, self.w3.flatten(0, 1).bfloat16())
        middle = swiglu(gate, up, self.shape).unflatten(-1, (weight.shape[-1], -1)) * weight[..., None]
        down = self.w2.transpose(0, 1).flatten(1).bfloat16()  # [H, (E + 1) F]
        return F.linear(middle.flatten(-2).bfloat16(), down).view_as(x), load


class DecoderLayer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.dense = layer < shape.dense_layers
        self.input_layernorm = norm_weight(shape.hidden)
        self.post_attention_layernorm = norm_weight(shape.hidden)
        self.self_attn = Attention(shape)
        self.mlp: DenseMlp | Experts
        self.mlp = DenseMlp(shape, shape.dense_width) if self.dense else Experts(shape)

    def ffn(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """The feed-forward half on the unrounded stream;

        returns the stream after it, bf16, and expert loads.
        """
        x = gemma(total, self.post_attention_layernorm, self.shape.eps)
        load = torch.zeros(self.shape.experts, device=x.device)
        if self.dense:
            out = self.mlp(x)
        else:
            out, load = self.mlp(x.bfloat16())
        return total.bfloat16().float() + out.float(), load

    def forward(
        self,
        total: Tensor,
        positions: Tensor,
        turn: tuple[Tensor, Tensor],
        sparse: bool,
        index_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Training form.

        `total` [B, T, H] is residual + partial in fp32, the residual part rounded to bf16.
        """
        x = gemma(total, self.input_layernorm, self.shape.eps)
        out, loss = self.self_attn(x, positions, turn, sparse, index_rows)
        total, load = self.ffn(total.bfloat16().float() + out.float())
        return total, loss, load

    def decode(
        self, total: Tensor, positions: Tensor, sparse: bool, cache: Cache | None, recent: bool
    ) -> Tensor:
        x = gemma(total, self.input_layernorm, self.shape.eps)
        out = self.self_attn.decode(x, positions, sparse, cache, recent)
        return self.ffn(total.bfloat16().float() + out.float())[0]


@dataclass
class Trained:
    """What one training pass of the target gives."""

    logits: Tensor  # [B, T, ROWS] fp32
    indexer_loss: Tensor
    loads: list[Tensor] = field(default_factory=list)  # [E] per MoE layer


class Target(nn.Module):
    layers: Sequence[DecoderLayer]  # a ModuleList

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.randn(ROWS, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(DecoderLayer(shape, layer) for layer in range(shape.layers))  # type: ignore[assignment]
        self.norm = norm_weight(shape.hidden)
        self.head = nn.Parameter(torch.randn(ROWS, shape.hidden) * 0.02)

    def logits(self, total: Tensor) -> Tensor:
        """fp32 logits [..., ROWS] of the stream after the last layer; columns that are no token are -inf."""
        x = gemma(total, self.norm, self.shape.eps).bfloat16()
        if self.training:
            logits = F.linear(x, self.head.bfloat16()).float()
        else:
            logits = F.linear(x.float(), self.head.float())
        no_token = torch.arange(ROWS, device=x.device) >= TOKENS
        return logits.masked_fill(no_token, float("-inf"))

    def forward(self, ids: Tensor, sparse: bool, index_rows: Tensor) -> Trained:
        """Training form:

        ids [B, T]; `sparse` False is the dense phase, in which every layer's indexer learns.
        """
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        turn = turns(positions, self.shape)
        total = F.embedding(ids, self.embed).bfloat16().float()
        indexer, loads = torch.zeros((), device=ids.device), []
        for number, layer in enumerate(self.layers):
            use = sparse and self.shape.sparse(number)
            rows = index_rows if use or not sparse else None
            total, loss, load = layer(total, positions, turn, use, rows)
            indexer = indexer + loss
            if not layer.dense:
                loads.append(load)
        return Trained(self.logits(total), indexer, loads)

    @torch.no_grad()
    def decode(
        self, ids: Tensor, positions: Tensor, caches: list[Cache] | None, recent: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Stored form:

        ids and positions [B, Q]. Returns the last stream [B, Q, H] fp32 and taps [B, Q, taps * H] bf16.
        """
        total = F.embedding(ids, self.embed).float()
        taps = []
        for number, layer in enumerate(self.layers):
            cache = None if caches is None else caches[number]
            total = layer.decode(total, positions, self.shape.sparse(number), cache, recent)
            if number in self.shape.taps:
                taps.append(total.bfloat16())
        return total, torch.cat(taps, -1)


M = TypeVar("M", bound=nn.Module)


def rounded_to_storage(model: M) -> M:
    """A copy whose weights are what a checkpoint would hold before quantisation: bf16, the router fp32."""
    made = copy.deepcopy(model).requires_grad_(False)
    for name, value in made.named_parameters():
        if not name.endswith("mlp.gate"):
            value.copy_(value.bfloat16().float())
    return made


def stored(target: Target) -> Target:
    """A copy of `target` in the arithmetic of the stored checkpoint under the default deployment."""
    made = rounded_to_storage(target).eval()
    for module in made.modules():
        if isinstance(module, Linear):
            module.store("ptpc")
        elif isinstance(module, Experts):
            module.store()
    return made


# Drafter


class DrafterLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, h = shape.head_dim, shape.hidden
        self.shape = shape
        self.input_layernorm, self.post_attention_layernorm = norm_weight(h), norm_weight(h)
        self.q_proj = Linear(h, shape.heads * d)
        self.k_proj = Linear(h, shape.kv_heads * d)
        self.v_proj = Linear(h, shape.kv_heads * d)
        self.o_proj = Linear(shape.heads * d, h, 0.005)
        self.q_norm, self.k_norm = norm_weight(d), norm_weight(d)
        self.mlp = DenseMlp(shape, shape.draft_width)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, H], [B, T] -> k, v [B, T, G, D] bf16."""
        k = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        k = rope(gemma(k, self.k_norm, self.shape.eps), turns(positions, self.shape)).bfloat16()
        return k, self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))

    def forward(self, x: Tensor, anchors: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """x [B, A, 7, H] bf16, anchors [B, A] positions, context k and v [B, S, G, D] at positions 0..S-1."""
        shape = self.shape
        _, count, length, _ = x.shape
        groups, d = shape.kv_heads, shape.head_dim
        rows = anchors[..., None] + torch.arange(length, device=x.device)  # [B, A, 7]
        normed = gemma(x, self.input_layernorm, shape.eps).flatten(1, 2)
        q = self.q_proj(normed).unflatten(-1, (-1, d))
        q = rope(
            gemma(q, self.q_norm, shape.eps), turns(rows.flatten(1), shape)
        ).bfloat16()  # [B, A * 7, N, D]
        own_k, own_v = self.keys_values(normed, rows.flatten(1))  # [B, A * 7, G, D]

        q = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B, G, N/G, A * 7, D]
        far = (q.flatten(2, 3) @ k.permute(0, 2, 3, 1)).float()  # [B, G, N/G * A * 7, S]
        far = far.unflatten(2, (-1, count, length))
        keys = torch.arange(k.shape[1], device=x.device)
        visible = (keys < anchors[:, :, None, None]) & (keys > rows[..., None] - shape.window)  # [B, A, 7, S]
        far = far.masked_fill(~visible[:, None, None], float("-inf"))
        block_q = q.unflatten(3, (count, length))  # [B, G, N/G, A, 7, D]
        block_k = own_k.unflatten(1, (count, length)).permute(0, 3, 1, 2, 4)[:, :, None]  # [B, G, 1, A, 7, D]
        block_v = own_v.unflatten(1, (count, length)).permute(0, 3, 1, 2, 4)[:, :, None]
        near = (block_q @ block_k.transpose(-1, -2)).float()  # [B, G, N/G, A, 7, 7]
        p = (torch.cat([far, near], -1) * d**-0.5).softmax(-1).to(v.dtype)
        far, near = p[..., : k.shape[1]], p[..., k.shape[1] :]
        out = (far.flatten(2, 4) @ v.transpose(1, 2)).unflatten(2, (-1, count, length)) + near @ block_v
        out = out.permute(0, 3, 4, 1, 2, 5).flatten(3)  # [B, A, 7, N * D]

        total = x.float() + self.o_proj(out).float()
        normed = gemma(total, self.post_attention_layernorm, shape.eps)
        made: Tensor = (total.bfloat16().float() + self.mlp(normed).float()).bfloat16()
        return made


class Drafter(nn.Module):
    """Proposes 7 tokens after an anchor from the target's taps; embedding and head are the target's."""

    layers: Sequence[DrafterLayer]  # a ModuleList

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        h, r = shape.hidden, shape.markov_rank
        self.fc = nn.Parameter(torch.randn(h, len(shape.taps) * h) * 0.02)
        self.hidden_norm, self.final_norm = norm_weight(h), norm_weight(h)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.draft_layers))  # type: ignore[assignment]
        self.markov_w1 = nn.Parameter(torch.randn(ROWS, r) * 0.1)
        self.markov_w2 = nn.Parameter(torch.randn(ROWS, r) * 0.02)
        self.confidence = nn.Parameter(torch.zeros(1, h + r))
        self.confidence_bias = nn.Parameter(torch.zeros(1))

    def context(self, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer for rows of the target.

        [B, T, taps * H] bf16 -> [B, T, G, D] bf16 each.
        """
        x = gemma(F.linear(taps, self.fc.bfloat16()), self.hidden_norm, self.shape.eps)
        return [layer.keys_values(x, positions) for layer in self.layers]

    def block(
        self, target: Target, tokens: Tensor, anchors: Tensor, context: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows [B, A, 7, H] bf16 and base logits [B, A, 7, ROWS] fp32 for anchor `tokens` [B, A] at
        `anchors`.
        """
        ids = torch.full((*tokens.shape, self.shape.draft_len), NOISE, device=tokens.device)
        ids[..., 0] = tokens
        x = F.embedding(ids, target.embed).bfloat16()
        for layer, (k, v) in zip(self.layers, context, strict=True):
            x = layer(x, anchors, k, v)
        x = gemma(x, self.final_norm, self.shape.eps).bfloat16()
        logits = F.linear(x, target.head.bfloat16()).float()
        return x, logits.masked_fill(torch.arange(ROWS, device=x.device) >= TOKENS, float("-inf"))

    def step(self, hidden: Tensor, base: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., ROWS] and the logit of the confidence [...] given the token before.

        hidden [..., H], base [..., ROWS].
        """
        e = F.embedding(previous, self.markov_w1).bfloat16()
        logits = base + F.linear(e, self.markov_w2.bfloat16()).float()
        features = torch.cat([hidden, e], -1).float()
        return logits, (features @ self.confidence.T).squeeze(-1) + self.confidence_bias

    @torch.no_grad()
    def propose(
        self, target: Target, tokens: Tensor, anchors: Tensor, context: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Seven greedy drafts for each of B anchors. tokens, anchors [B] -> [B, 7]."""
        hidden, base = self.block(target, tokens[:, None], anchors[:, None], context)
        drafts, previous = [], tokens
        for slot in range(self.shape.draft_len):
            previous = self.step(hidden[:, 0, slot], base[:, 0, slot], previous)[0].argmax(-1)
            drafts.append(previous)
        return torch.stack(drafts, 1)


def stored_drafter(drafter: Drafter) -> Drafter:
    """A copy whose linears went through MXFP8 and all else through bf16."""
    made = rounded_to_storage(drafter).eval()
    for module in made.modules():
        if isinstance(module, Linear):
            module.store("mxfp8")
    return made
