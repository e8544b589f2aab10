"""Paged caches: keys, values and index keys of every decoder layer, and who owns which page."""

from mono.caches.paged import LayerCache, PagePool

__all__ = ["LayerCache", "PagePool"]
