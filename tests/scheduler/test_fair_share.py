"""Tenants' shares of an engine."""

from __future__ import annotations

import pytest

from quire.errors import OverloadedError
from quire.scheduler.fair_share import fair_parts
from tests.scheduler.test_scheduler import Loop, check_output, make, own, request


def flood(loop: Loop, tenant: str, count: int, *, prompt: int = 6, output: int = 8) -> None:
    for i in range(count):
        name = f"{tenant}{i}"
        one = request(name, own(i + 100, prompt), output, tenant=tenant, arrival=float(i))
        loop.scheduler.add(one)


def lanes_of(loop: Loop) -> dict[str, int]:
    held: dict[str, int] = {}
    for _, _, one in loop.scheduler._running.entries:
        held[one.tenant] = held.get(one.tenant, 0) + 1
    return held


def test_a_new_tenant_gets_a_lane_from_the_one_that_holds_all() -> None:
    loop = make(fair=True, max_num_seqs=4)
    flood(loop, "flood", 20)
    for _ in range(4):
        loop.step()
    assert lanes_of(loop) == {"flood": 4}
    single = request("single", own(9, 5), tenant="other", arrival=99.0)
    loop.scheduler.add(single)
    while not loop.launch():
        loop.collect()
    assert lanes_of(loop) == {"flood": 3, "other": 1}
    assert single.generating
    assert loop.scheduler.stats().preemptions == 1
    loop.drain()
    assert len(loop.finished) == 21
    check_output(loop, single)


def test_lanes_even_out_between_two_floods() -> None:
    loop = make(fair=True, max_num_seqs=8, max_num_batched_tokens=64)
    flood(loop, "a", 40)
    loop.step()
    assert lanes_of(loop) == {"a": 8}
    flood(loop, "b", 40)
    for _ in range(120):
        loop.step()
        held = lanes_of(loop)
    assert min(held.values()) >= 3
    loop.drain()
    order = [one.tenant for one in loop.finished.values()]
    # Apart from the requests that ran at first, neither tenant ever leads by much.
    lead = [order[:n].count("a") - order[:n].count("b") for n in range(40)]
    assert max(lead) <= 20
    assert min(lead) >= -20


def test_shares_are_proportional_to_weights() -> None:
    loop = make(
        fair=True, max_num_seqs=6, max_num_batched_tokens=512, max_model_len=512, blocks=800
    )
    for i in range(120):
        for name, share in (("one", 1.0), ("three", 3.0)):
            prompt = own(1 + 2 * i + (name == "one"), 100)
            loop.scheduler.add(
                request(f"{name}{i}", prompt, 2, tenant=name, share=share, arrival=float(i))
            )
    while len(loop.finished) < 100:
        loop.step()
    order = [one.tenant for one in loop.finished.values()]
    assert 65 <= order.count("three") <= 85


def test_within_a_tenant_the_policy_holds() -> None:
    loop = make(fair=True, max_num_seqs=1, policy="priority", priority_weight=1000.0)
    for name, tenant, priority in (("a0", "a", 5), ("a1", "a", 1), ("b0", "b", 9), ("b1", "b", 2)):
        loop.scheduler.add(
            request(name, own(ord(name[0]) + int(name[1]), 3), 2, tenant=tenant, priority=priority)
        )
    loop.drain()
    order = list(loop.finished)
    assert order.index("a1") < order.index("a0")
    assert order.index("b1") < order.index("b0")


def test_a_long_prompt_leaves_others_their_part_of_a_step() -> None:
    loop = make(fair=True, max_num_batched_tokens=16)
    loop.scheduler.add(request("long", own(1, 58), 2, tenant="a"))
    loop.step()
    loop.collect()
    loop.scheduler.add(request("short", own(2, 6), 2, tenant="b"))
    loop.step()
    lengths = dict(zip(loop.plans[-1].lanes.tolist(), loop.plans[-1].q_len.tolist(), strict=True))
    assert lengths == {0: 10, 1: 6}
    loop.drain()


def test_a_tenant_with_many_small_requests_does_not_starve_others() -> None:
    """A tenant whose requests all start immediately, so that its queue is empty, still gets only
    one grant per round."""
    loop = make(
        fair=True, max_num_seqs=2, max_num_batched_tokens=2048, max_model_len=2048, blocks=2000
    )
    flood(loop, "patient", 12, prompt=300, output=2)
    for i in range(40):
        loop.scheduler.add(request(f"often{i}", own(i, 300), 2, tenant="often"))
        while f"often{i}" not in loop.finished and len(loop.finished) < 20:
            loop.step()
        if len(loop.finished) >= 20:
            break
    done = [one.tenant for one in loop.finished.values()]
    assert done.count("patient") >= 6
    assert done.count("often") >= 6


def test_an_interactive_tenant_has_a_step_to_itself_and_others_the_next_one() -> None:
    loop = make(fair=True, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128, blocks=400)
    flood(loop, "flood", 30, prompt=20, output=30)
    for _ in range(40):
        loop.step()
    interactive = request("interactive", own(9, 60), 4, tenant="interactive")
    loop.scheduler.add(interactive)
    tenants, before = [], len(loop.plans)
    while "interactive" not in loop.finished:
        loop.step()
        running = {r.lane: r.tenant for _, _, r in loop.scheduler._running.entries}
        if len(loop.plans) > before:
            before = len(loop.plans)
            tenants.append({running.get(lane) for lane in loop.plans[-1].lanes.tolist()})
    assert tenants[0] == {"interactive"}
    assert "flood" in tenants[1]
    assert tenants[2] == {"interactive"}
    loop.drain()
    check_output(loop, interactive)


def test_after_an_interactive_prompt_steps_are_short_for_a_while() -> None:
    loop = make(
        fair=True, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128, blocks=400
    )
    flood(loop, "flood", 60, prompt=100, output=4)
    for _ in range(20):
        loop.step()
    longest = max(int(plan.q_len.max()) for plan in loop.plans)
    loop.scheduler.add(request("interactive", own(9, 10), 1, tenant="interactive"))
    while "interactive" not in loop.finished:
        loop.step()
    began = len(loop.plans)
    for _ in range(20):
        loop.step()
    assert longest == 100
    assert max(int(plan.q_len.max()) for plan in loop.plans[began:]) <= 64
    loop.drain()
    assert len(loop.finished) == 61


def test_a_tenant_with_blocks_to_spare_gives_some_up() -> None:
    loop = make(fair=True, blocks=12, max_num_seqs=8)
    flood(loop, "flood", 4, prompt=8, output=8)
    for _ in range(4):
        loop.step()
    assert lanes_of(loop)["flood"] >= 3
    loop.scheduler.add(request("single", own(9, 5), tenant="other"))
    for _ in range(6):
        loop.step()
        if lanes_of(loop).get("other"):
            break
    assert lanes_of(loop)["other"] == 1
    loop.drain()
    assert len(loop.finished) == 5


def test_alone_a_tenant_has_everything() -> None:
    loop = make(fair=True, max_num_seqs=4)
    flood(loop, "only", 10)
    loop.drain()
    assert loop.scheduler.stats().preemptions == 0
    assert list(loop.finished) == [f"only{i}" for i in range(10)]


def test_the_order_is_the_same_every_time() -> None:
    def order() -> list[str]:
        loop = make(fair=True, max_num_seqs=3)
        for i in range(30):
            loop.scheduler.add(request(f"r{i}", own(i, 1 + i % 7), 3, tenant=f"t{i % 4}"))
        loop.drain()
        return list(loop.finished)

    assert order() == order()


@pytest.mark.parametrize(
    ("wants", "budget", "parts"),
    [
        ({"a": (10, 1.0), "b": (100, 1.0)}, 60, {"a": 10, "b": 50}),
        ({"a": (100, 1.0), "b": (100, 3.0)}, 80, {"a": 20, "b": 60}),
        ({"a": (5, 1.0), "b": (5, 1.0)}, 60, {"a": 5, "b": 5}),
        ({"a": (5, 1.0), "b": (5, 1.0)}, 1, {"a": 1, "b": 1}),
    ],
)
def test_parts_of_a_budget(
    wants: dict[str, tuple[int, float]], budget: int, parts: dict[str, int]
) -> None:
    assert fair_parts(wants, budget) == parts


@pytest.mark.parametrize("caps", [{"max_queue": 8}, {"max_queue_tokens": 40}])
def test_a_full_queue_takes_each_tenants_share(caps: dict[str, int]) -> None:
    """Prompts have five tokens: both caps are eight requests."""
    loop = make(fair=True, max_num_seqs=1, **caps)
    taken: dict[str, int] = {}

    def flood(tenant: str, share: float, first: int = 0) -> None:
        for i in range(first, first + 30):
            one = request(f"{tenant}{i}", own(i, 5), tenant=tenant)
            one.share = share
            try:
                loop.scheduler.add(one)
            except OverloadedError:
                continue
            taken[tenant] = taken.get(tenant, 0) + 1

    flood("runs", 1.0)
    assert 8 <= taken["runs"] <= 9
    flood("other", 1.0)
    assert taken["other"] == 4
    flood("large", 2.0)
    assert taken["large"] == 4
    most = taken["runs"]
    flood("runs", 1.0, 100)
    flood("other", 1.0, 100)
    assert (taken["runs"], taken["other"]) == (most, 4)
    loop.drain()
    assert len(loop.finished) == sum(taken.values())
