"""Parts of `mono.fast.interpreter`: number formats, memory checks, operations, reductions."""
