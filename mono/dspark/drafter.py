"""The DSpark drafter: a block of drafts in one pass, from the target's taps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mono.dspark.drafter_spec import DrafterSpec, DrafterWeights, LayerWeights, check_drafter_weights
from mono.formats import Matrix
from mono.reference.numerics import NATIVE, ROW_TILE, Numerics
from mono.reference.ops.attention import norm_rope, softmax_attention
from mono.reference.ops.rms_norm import gemma_rms_norm
from mono.reference.ops.rope import rope_table
from mono.reference.ops.swiglu import swiglu_oai
from mono.reference.ops.top1 import top1


@dataclass(slots=True)
class ContextCache:
    """The drafter's keys and values for one request's committed positions. It belongs to the request.

    k, v:     [layers, capacity, G, D] bf16 by position, NaN until written.
    written:  positions 0 to written - 1 hold context; what lies behind is stale or was never written, and is
              never read.
    """

    k: Tensor
    v: Tensor
    written: int = 0

    @property
    def capacity(self) -> int:
        """Most positions it can hold."""
        return self.k.shape[1]


@dataclass(frozen=True, slots=True)
class Proposal:
    """drafts: [B, block] int64. logits: [B, block, V] fp32 over the true vocabulary, if asked for."""

    drafts: Tensor
    logits: Tensor | None = None


class Proposer(Protocol):
    """What a decode loop asks of a drafter. `Drafter` is one; a test may bring its own.

    vocab, taps, block: as in `DrafterSpec`.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def block(self) -> int: ...

    def new_context(self, capacity: int) -> Any:
        """An empty context for one request of at most `capacity` positions."""
        ...

    def write_context(self, context: Any, taps: Tensor, start: int) -> None:
        """Take in the taps [n, m x H] of target rows at positions start to start + n - 1."""
        ...

    def propose(self, contexts: Sequence[Any], anchors: Tensor, positions: Tensor) -> Proposal:
        """A block of drafts for each request: anchors [B] int64 stand at positions [B] int64."""
        ...


class Checkpoint(Protocol):
    """Where a drafter's weights come from: names without the target's `language_model.model.dspark.`."""

    @property
    def text_config(self) -> Mapping[str, Any]: ...

    def tensor(self, name: str) -> Tensor: ...

    def matrix(self, prefix: str) -> Matrix: ...


class Drafter:
    """Proposes `block` tokens after an anchor.

        context:  c = norm(fc [tap_1 .. tap_m]);  k = rope(norm(K c)), v = V c in every layer
        block:    x = embed[anchor, noise, .., noise] at positions P .. P + block - 1
                  x = x + O attention(norm(x));  x = x + down swiglu(gate, up of norm(x))
        logits:   U_k = head norm(x_k), slot k predicts position P + k + 1
        serial:   d_k = argmax(U_k + w2 w1[d_{k-1}]), d_0 = the anchor, lowest id on a tie

    The layers' input norm is not applied to context rows. A block row attends to context strictly before P
    and to all rows of the block, both ways, keys older than its window left out.

    Rounding:  the same points as the target's layers. Linears: bf16 input times decoded weight, fp32 sum,
               bf16 result. Norms in fp32 of the unrounded residual sum, then bf16; the residual stream is
               stored in bf16; q and k to bf16 after norm and RoPE; context k and v stay bf16. Attention in
               fp32, its output to bf16. SwiGLU in fp32, then bf16. Logits, Markov term and sum in fp32.
    Order:     products run in tiles of 16 rows and attention request by request, so a request's drafts do not
               depend on its neighbours, nor its context on how a prefill is cut into chunks.
    """

    def __init__(self, spec: DrafterSpec, weights: DrafterWeights, numerics: Numerics = NATIVE) -> None:
        """Keep the weights as they are stored. ValueError naming a weight of another shape."""
        check_drafter_weights(spec, weights)
        self.spec = spec
        self.weights = weights
        self.numerics = numerics

    @property
    def vocab(self) -> int:
        """True tokens, the target's own."""
        return self.spec.vocab

    @property
    def taps(self) -> tuple[int, ...]:
        """Decoder layers of the target that are tapped."""
        return self.spec.taps

    @property
    def block(self) -> int:
        """Drafts per block."""
        return self.spec.block

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.weights.fc.device

    def new_context(self, capacity: int) -> ContextCache:
        """An empty context of at most `capacity` positions for one request."""
        s = self.spec
        shape = (s.layers, capacity, s.kv_heads, s.head_dim)
        k = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self.device)
        return ContextCache(k, k.clone())

    def write_context(self, context: ContextCache, taps: Tensor, start: int) -> None:
        """Keys and values of target rows at positions start to start + n - 1; later ones become stale.

        Shapes:  taps [n, m x H] bf16, of one request's rows in order of position.
        Errors:  ValueError for another shape or dtype, a gap behind what is written, or too small a cache.
        """
        s, w = self.spec, self.weights
        n = taps.shape[0]
        if taps.dtype != torch.bfloat16 or tuple(taps.shape[1:]) != (len(s.taps) * s.hidden,):
            raise ValueError(
                f"drafter: taps: expected bfloat16 [n, {len(s.taps) * s.hidden}],"
                f" got {taps.dtype} {list(taps.shape)}"
            )
        if not 0 <= start <= context.written:
            raise ValueError(
                f"drafter: context: expected rows from at most position {context.written}, got {start}"
            )
        if start + n > min(context.capacity, w.rope.shape[0]):
            raise ValueError(
                f"drafter: context: expected at most {min(context.capacity, w.rope.shape[0])} positions,"
                f" got {start + n}"
            )
        positions = torch.arange(start, start + n, device=taps.device)
        c = self._linear(taps, w.fc.float())  # [n, H]
        c = gemma_rms_norm(c, w.context_norm, s.eps, self.numerics).bfloat16()
        for i, layer in enumerate(w.layers):
            k, v = self._keys_values(layer, c, positions)
            context.k[i, start : start + n] = k
            context.v[i, start : start + n] = v
        context.written = start + n

    def propose(
        self,
        contexts: Sequence[ContextCache],
        anchors: Tensor,
        positions: Tensor,
        keep_logits: bool = False,
    ) -> Proposal:
        """A block of greedy drafts for each of B requests; their contexts are read and not changed.

        Shapes:  anchors [B] int64, positions [B] int64: request b's anchor stands at positions[b], and its
                 context holds every position before that.
        Errors:  ValueError naming the request: an anchor outside the vocabulary, a context that ends before
                 its anchor, positions beyond the RoPE table.
        """
        s, w = self.spec, self.weights
        starts = self._checked(contexts, anchors, positions)
        B = len(contexts)
        at = (positions[:, None] + torch.arange(s.block, device=positions.device)).flatten()  # [B x block]
        ids = anchors.new_full((B, s.block), s.noise_token)
        ids[:, 0] = anchors
        total = w.embed[ids.flatten()].float()  # [B x block, H] fp32, the unrounded residual sum
        for i, layer in enumerate(w.layers):
            x = gemma_rms_norm(total, layer.input_norm, s.eps, self.numerics).bfloat16()
            q = self._linear(x, layer.q.dequantise()).view(-1, s.heads, s.head_dim)
            q = norm_rope(q, layer.q_norm, s.eps, w.rope, at, self.numerics)
            k, v = self._keys_values(layer, x, at)  # [B x block, G, D]
            o = torch.cat(
                [
                    self._attend(context, i, P, *(y[b * s.block : (b + 1) * s.block] for y in (q, k, v)))
                    for b, (context, P) in enumerate(zip(contexts, starts, strict=True))
                ]
            )
            total = total.bfloat16().float() + self._linear(o, layer.o.dequantise()).float()
            x = gemma_rms_norm(total, layer.post_norm, s.eps, self.numerics).bfloat16()
            gate_up = [self._linear(x, m.dequantise()) for m in (layer.gate, layer.up)]
            act = swiglu_oai(torch.cat(gate_up, dim=1), s.alpha, s.beta, s.limit).bfloat16()  # [B x block, F]
            total = total.bfloat16().float() + self._linear(act, layer.down.dequantise()).float()
        h = gemma_rms_norm(total, w.final_norm, s.eps, self.numerics).bfloat16()
        base = self._product(h, w.head[: s.vocab].float()).view(B, s.block, s.vocab)
        return self._serial(anchors, base, keep_logits)

    def _serial(self, anchors: Tensor, base: Tensor, keep_logits: bool) -> Proposal:
        """Choose drafts one after the other, each biased by the one before. base [B, block, V] fp32."""
        w = self.weights
        w2 = w.markov_w2[: self.spec.vocab].float()
        previous, drafts, logits = anchors, [], []
        for k in range(self.spec.block):
            row = base[:, k] + self._product(w.markov_w1[previous], w2)  # [B, V]
            previous = top1(row, self.spec.vocab)
            drafts.append(previous)
            logits.append(row)
        return Proposal(torch.stack(drafts, dim=1), torch.stack(logits, dim=1) if keep_logits else None)

    def _keys_values(self, layer: LayerWeights, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n, G, D] bf16 of rows x [n, H] bf16."""
        s = self.spec
        k = self._linear(x, layer.k.dequantise()).view(-1, s.kv_heads, s.head_dim)
        v = self._linear(x, layer.v.dequantise()).view(-1, s.kv_heads, s.head_dim)
        return norm_rope(k, layer.k_norm, s.eps, self.weights.rope, positions, self.numerics), v

    def _attend(self, context: ContextCache, layer: int, P: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One request's block over its context and itself, by the target's own `softmax_attention`.

        Shapes:  q [block, N, D], k and v [block, G, D] bf16. Returns [block, N x D] bf16.
        """
        s = self.spec
        G, n = s.kv_heads, s.heads // s.kv_heads
        oldest = 0 if s.window is None else max(0, P - (s.window - 1))
        keys = torch.cat([context.k[layer, oldest:P], k]).transpose(0, 1).unsqueeze(0)  # [1, G, t, D]
        values = torch.cat([context.v[layer, oldest:P], v]).transpose(0, 1).unsqueeze(0)
        unit = torch.ones(keys.shape[:3], device=q.device)  # what stays bf16 has no scale
        sees = torch.ones(s.block, keys.shape[2], dtype=torch.bool, device=q.device)
        if s.window is not None:
            at = torch.arange(oldest, P + s.block, device=q.device)  # [t]
            rows = torch.arange(P, P + s.block, device=q.device)  # [block]
            sees = at[None, :] >= rows[:, None] - (s.window - 1)
        queries = q.view(1, s.block, G, n, s.head_dim).permute(0, 2, 3, 1, 4)  # [1, G, n, block, D]
        o = softmax_attention(queries, keys, unit, values, unit, sees.expand(1, 1, 1, -1, -1), self.numerics)
        return o.permute(0, 3, 1, 2, 4).reshape(s.block, s.heads * s.head_dim)

    def _linear(self, x: Tensor, decoded: Tensor) -> Tensor:
        """x W^T for x [n, K] bf16 and a decoded W [N, K] fp32, rounded to bf16."""
        return self._product(x, decoded).bfloat16()

    def _product(self, x: Tensor, decoded: Tensor) -> Tensor:
        """x W^T in fp32, in tiles of 16 rows: a row's sum has one order whatever else is in the batch."""
        return torch.cat([self.numerics.matmul(tile.float(), decoded) for tile in x.split(ROW_TILE)])

    def _checked(self, contexts: Sequence[ContextCache], anchors: Tensor, positions: Tensor) -> list[int]:
        """The anchors' positions on the host, if every request can be drafted for."""
        s, B = self.spec, len(contexts)
        for name, x in (("anchors", anchors), ("positions", positions)):
            if x.dtype != torch.int64 or tuple(x.shape) != (B,):
                raise ValueError(
                    f"drafter: {name}: expected int64 [{B}], one for each context,"
                    f" got {x.dtype} {list(x.shape)}"
                )
        starts: list[int] = positions.tolist()
        for b, (token, P) in enumerate(zip(anchors.tolist(), starts, strict=True)):
            if not 0 <= token < s.vocab:
                raise ValueError(
                    f"drafter: request {b}: expected an anchor from 0 to {s.vocab - 1}, got {token}"
                )
            if not 0 <= P <= contexts[b].written:
                raise ValueError(
                    f"drafter: request {b}: its context holds {contexts[b].written} positions, its anchor"
                    f" stands at {P}"
                )
            if P + s.block > self.weights.rope.shape[0]:
                raise ValueError(
                    f"drafter: request {b}: expected positions below {self.weights.rope.shape[0]},"
                    f" got a block to {P + s.block - 1}"
                )
        return starts


def load_drafter(
    checkpoint: Checkpoint,
    target_embed: Tensor,
    target_head: Tensor,
    device: torch.device | str,
    max_context: int,
    vocab: int | None = None,
    numerics: Numerics = NATIVE,
) -> Drafter:
    """Build the drafter that a checkpoint carries, on the target's own embedding and head.

    checkpoint:   its `dspark/` part; names are those of the release without the common prefix.
    max_context:  positions the RoPE table covers; a block reaches block - 1 past its anchor.
    vocab:        true tokens where the config counts padded rows as well.
    Errors:       ValueError naming a config key or a weight; what the checkpoint raises for a missing tensor.
    """
    spec = DrafterSpec.from_config(checkpoint.text_config, vocab)
    confident = bool(checkpoint.text_config.get("enable_confidence_head", True))

    def tensor(name: str) -> Tensor:
        return checkpoint.tensor(name).to(device)

    def matrix(prefix: str) -> Matrix:
        return checkpoint.matrix(prefix).to(device)

    def layer(i: int) -> LayerWeights:
        at = f"layers.{i}.decoder_layer"
        return LayerWeights(
            input_norm=tensor(f"{at}.input_layernorm.weight"),
            q=matrix(f"{at}.self_attn.q_proj"),
            k=matrix(f"{at}.self_attn.k_proj"),
            v=matrix(f"{at}.self_attn.v_proj"),
            q_norm=tensor(f"{at}.self_attn.q_norm.weight"),
            k_norm=tensor(f"{at}.self_attn.k_norm.weight"),
            o=matrix(f"{at}.self_attn.o_proj"),
            post_norm=tensor(f"{at}.post_attention_layernorm.weight"),
            gate=matrix(f"{at}.mlp.gate_proj"),
            up=matrix(f"{at}.mlp.up_proj"),
            down=matrix(f"{at}.mlp.down_proj"),
        )

    weights = DrafterWeights(
        fc=tensor("fc.weight"),
        context_norm=tensor("hidden_norm.weight"),
        layers=tuple(layer(i) for i in range(spec.layers)),
        final_norm=tensor("final_norm.weight"),
        markov_w1=tensor("markov_head.markov_w1.weight"),
        markov_w2=tensor("markov_head.markov_w2.weight"),
        embed=target_embed.to(device),
        head=target_head.to(device),
        rope=rope_table(max_context, spec.rotary_dim, spec.theta).to(device),
        confidence=tensor("confidence_head.proj.weight") if confident else None,
        confidence_bias=tensor("confidence_head.proj.bias") if confident else None,
    )
    return Drafter(spec, weights, numerics)
