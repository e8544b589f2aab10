"""One contract per layer type: what goes in, what comes out, which weights."""

from mono.layers import dense_attention, dense_mlp, embed, head, moe, sparse_attention

LAYER_TYPES = {
    layer_type.name: layer_type
    for layer_type in (
        embed.TYPE,
        dense_attention.TYPE,
        sparse_attention.TYPE,
        dense_mlp.TYPE,
        moe.TYPE,
        head.TYPE,
    )
}

AnySpec = embed.Spec | dense_attention.Spec | sparse_attention.Spec | dense_mlp.Spec | moe.Spec | head.Spec
AnyWeights = (
    embed.Weights
    | dense_attention.Weights
    | sparse_attention.Weights
    | dense_mlp.Weights
    | moe.Weights
    | head.Weights
)

__all__ = ["LAYER_TYPES", "AnySpec", "AnyWeights"]
