"""The model itself: one readable PyTorch file per layer type."""

from mono.reference import dense_attention, dense_mlp, embed, head, moe, sparse_attention

ARMS = {
    "embed": embed,
    "dense_attention": dense_attention,
    "sparse_attention": sparse_attention,
    "dense_mlp": dense_mlp,
    "moe": moe,
    "head": head,
}
