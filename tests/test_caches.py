"""The paged cache: what is stored, what is never touched, and who owns a page."""

import pytest
import torch

from mono.caches import LayerCache, PagePool


def test_only_live_slots_are_written() -> None:
    cache = LayerCache.empty(3, 4, 2, 8, 8)
    before = cache.clone()
    k, v = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 2, 8).bfloat16()
    cache.insert_kv(torch.tensor([5, -1, 2]), k, v)
    cache.insert_index_k(torch.tensor([5, -1, 2]), k[:, 0])
    for now, old in ((cache.k, before.k), (cache.v, before.v), (cache.index_k, before.index_k)):
        changed = (now.view(torch.uint8) != old.view(torch.uint8)).flatten(0, 1).flatten(1).any(dim=1)
        assert changed.nonzero().flatten().tolist() == [2, 5]
    assert cache.k_scale.flatten(0, 1).isfinite().all(dim=1).nonzero().flatten().tolist() == [2, 5]


def test_a_key_comes_back_within_half_a_step_of_e4m3() -> None:
    cache = LayerCache.empty(2, 4, 2, 8, None)
    k = torch.randn(4, 2, 8).bfloat16()
    cache.insert_kv(torch.arange(4), k, 2 * k)
    back = cache.k[0].float() * cache.k_scale[0].unsqueeze(-1)
    # 3 mantissa bits: half a step is 2^-4 of the value, and 2^-10 of amax / 448 x 2^0 among subnormals
    bound = k.float().abs() * 2.0**-4 + cache.k_scale[0].unsqueeze(-1) * 2.0**-10
    assert ((back - k.float()).abs() <= bound).all()


def test_a_zero_vector_has_scale_one() -> None:
    cache = LayerCache.empty(1, 4, 1, 8, None)
    cache.insert_kv(torch.tensor([1]), torch.zeros(1, 1, 8).bfloat16(), torch.ones(1, 1, 8).bfloat16())
    assert cache.k_scale[0, 1, 0] == 1.0
    assert (cache.k[0, 1].float() == 0).all()


def test_a_bf16_cache_keeps_the_values() -> None:
    cache = LayerCache.empty(1, 4, 1, 8, 8, kv_format="bf16")
    k = torch.randn(1, 1, 8).bfloat16()
    cache.insert_kv(torch.tensor([3]), k, -k)
    cache.insert_index_k(torch.tensor([3]), k[:, 0])
    assert torch.equal(cache.k[0, 3], k[0])
    assert torch.equal(cache.v[0, 3], -k[0])
    assert torch.equal(cache.index_k[0, 3], k[0, 0])


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="got 'int8'"):
        LayerCache.empty(1, 4, 1, 8, None, kv_format="int8")


def test_index_keys_need_an_index_cache() -> None:
    with pytest.raises(ValueError, match="no index cache"):
        LayerCache.empty(1, 4, 1, 8, None).insert_index_k(torch.tensor([0]), torch.zeros(1, 8).bfloat16())


def test_a_pool_gives_all_or_nothing() -> None:
    pool = PagePool(4)
    first = pool.take(3)
    assert first == [0, 1, 2]
    with pytest.raises(ValueError, match="2 pages asked for, 1 of 4 are free"):
        pool.take(2)
    assert pool.take(1) == [3]
    pool.give_back(first)
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_the_lowest_free_pages_come_first_whatever_was_given_back() -> None:
    pool = PagePool(6)
    first, second = pool.take(3), pool.take(1)
    pool.give_back(first)
    pool.give_back(second)
    assert (pool.free, pool.take(2), pool.free) == (6, [0, 1], 4)


@pytest.mark.parametrize("wrong", [[0, 0], [0, 3], [4], [-1]])
def test_a_page_has_one_owner(wrong: list[int]) -> None:
    pool = PagePool(4)
    pool.take(3)
    with pytest.raises(ValueError, match="expected pages that are out, each once, got"):
        pool.give_back(wrong)
    assert pool.take(1) == [3]
    with pytest.raises(ValueError, match="-1 pages asked for, 0 of 4 are free"):
        pool.take(-1)
