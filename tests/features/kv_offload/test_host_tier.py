"""The index of the host's pool, hashes of contents, and estimated costs of copies."""

from __future__ import annotations

import random

from quire.cache.block_hash import next_hash, root_hash
from quire.cache.host_tier import HashList, HostTier, StateTier
from quire.features.kv_offload.costs import CostModel, Rates


def key(n: int) -> bytes:
    return n.to_bytes(16, "little")


def filled(slots: int) -> HostTier:
    tier = HostTier(slots)
    for n in range(slots):
        assert tier.expect(key(n)) is not None
        tier.arrived(key(n), True)
    return tier


def test_the_least_recently_used_gives_up_its_slot() -> None:
    tier = filled(3)
    tier.touch(key(0))
    slot = tier.expect(key(3))
    assert slot is not None
    assert key(1) not in tier
    assert not tier.holds(key(3))
    assert key(3) in tier
    tier.arrived(key(3), True)
    assert tier.pin(key(3)) == slot
    assert tier.evictions == 1


def test_a_slot_that_is_copied_is_left_alone() -> None:
    tier = filled(2)
    slot = tier.pin(key(0))
    assert tier.pin(key(0)) == slot
    assert tier.expect(key(2)) is not None
    assert tier.expect(key(3)) is None
    tier.unpin(key(0))
    assert tier.expect(key(3)) is None
    tier.unpin(key(0))
    assert tier.expect(key(3)) == slot


def test_a_failed_transfer_leaves_its_slot_free() -> None:
    tier = HostTier(1)
    tier.expect(key(0))
    tier.arrived(key(0), False)
    assert (key(0) in tier, tier.num_free) == (False, 1)
    tier.expect(key(1))
    tier.arrived(key(1), True)
    tier.pin(key(1))
    tier.unpin(key(1), good=False)
    assert (key(1) in tier, tier.num_free) == (False, 1)


def test_clearing_keeps_blocks_being_copied() -> None:
    tier = filled(3)
    tier.pin(key(1))
    tier.clear()
    assert list(tier.hashes()) == [key(1)]
    assert tier.num_free == 2


def test_no_slot_is_lost_or_given_twice() -> None:
    draw, tier = random.Random(0), HostTier(5)
    arriving: dict[bytes, int] = {}
    pinned: dict[bytes, int] = {}
    for n in range(3000):
        choice = draw.randrange(4)
        if choice == 0 and key(n % 40) not in tier:
            slot = tier.expect(key(n % 40))
            if slot is not None:
                assert slot not in {*arriving.values(), *pinned.values()}
                arriving[key(n % 40)] = slot
        elif choice == 1 and arriving:
            name, _ = arriving.popitem()
            tier.arrived(name, draw.random() < 0.8)
        elif choice == 2 and tier.oldest(1):
            name = tier.oldest(1)[0]
            pinned[name] = tier.pin(name)
        elif pinned:
            name, _ = pinned.popitem()
            tier.unpin(name, draw.random() < 0.8)
        assert len(tier) + tier.num_free == 5


def test_keys_believed_to_be_in_files_are_bounded() -> None:
    keys = HashList(2, [key(0), key(1)])
    keys.add(key(0))
    keys.add(key(2))
    assert (key(0) in keys, key(1) in keys, len(keys)) == (True, False, 2)
    keys.discard(key(5))
    keys.discard(key(0))
    assert len(keys) == 1


def test_names_follow_tokens_and_namespace() -> None:
    roots = {root_hash((0, "")), root_hash((1, "")), root_hash((0, "a"))}
    assert len(roots) == 3
    root = root_hash((0, ""))
    assert next_hash(next_hash(root, b"ab"), b"c") != next_hash(next_hash(root, b"a"), b"bc")
    assert next_hash(root, b"a") == next_hash(root, b"a")


def test_copies_pay_from_some_length_on() -> None:
    """1000 tokens/s against 100 kB per token over 1 GB/s: a copy costs a tenth, and 10 ms."""
    costs = CostModel(Rates(prefill=1e3, out=1e9, into=1e9, latency=0.01), token_bytes=1e5)
    assert costs.worth_keeping
    assert not costs.fetch_pays(11, 11 * 10**5)
    assert costs.fetch_pays(12, 12 * 10**5)
    assert not costs.swap_pays(24)
    assert costs.swap_pays(26)
    slow = CostModel(Rates(prefill=1e5, out=1e9, into=1e9, latency=0.01), token_bytes=1e5)
    assert not slow.worth_keeping


def test_slow_files_are_computed_instead_until_that_is_forgotten() -> None:
    costs = CostModel(Rates(prefill=1e3, out=1e9, into=1e9, latency=0.0), token_bytes=1e5)
    assert costs.fetch_pays(100, 10**7, of_files=10**7)
    for _ in range(60):
        costs.observe_load(10**5, 1.0)
    assert not costs.fetch_pays(100, 10**7, of_files=10**7)
    assert costs.fetch_pays(100, 10**7)
    assert any(costs.fetch_pays(100, 10**7, of_files=10**7) for _ in range(1000))


def test_states_are_kept_where_they_spare_enough() -> None:
    """1000 tokens/s against a state of 100 MB over 1 GB/s: a tenth of a second, or 100 tokens."""
    rates = Rates(prefill=1e3, out=1e9, into=1e9, latency=0.01)
    costs = CostModel(rates, token_bytes=1e5, state_bytes=1e8)
    assert not costs.state_worth_keeping(100)
    assert costs.state_worth_keeping(101)
    # A swap also moves the state, both ways.
    assert not costs.swap_pays(274)
    assert costs.swap_pays(276)


def test_the_least_useful_state_is_evicted() -> None:
    tier = StateTier(3)
    for n, saves in enumerate((50, 10, 30)):
        tier.note(key(n), saves)
        assert tier.expect(key(n)) is not None
        tier.arrived(key(n), True)
    assert tier.oldest(3) == [key(1), key(2), key(0)]
    tier.note(key(3), 15)
    assert tier.expect(key(3)) is not None
    assert key(1) not in tier
    tier.arrived(key(3), True)
    # An eviction raises the value of later uses, but 15 + 10 is still less than 30.
    assert tier.oldest(1) == [key(3)]
    tier.touch(key(3))
    for n in range(4, 8):
        tier.note(key(n), 15)
        tier.expect(key(n))
        tier.arrived(key(n), True)
    assert key(0) in tier
    assert key(2) not in tier
    assert len(tier._credits) <= 6
