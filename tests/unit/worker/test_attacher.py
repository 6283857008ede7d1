"""Small pure parts of the attachment: order, ids, fingerprints, silence, stalls."""

from __future__ import annotations

from collections import Counter

from services.worker.attacher import rendezvous_order
from services.worker.executor import StepTimes
from services.worker.identity import kv_fingerprint, new_engine_id
from services.worker.peer_watch import DEAD_AFTER_S, GRACE_S, PeerWatch
from services.worker.step_clock import STALL_AFTER_S, StepClock


def test_every_worker_has_its_own_fixed_order_of_schedulers() -> None:
    addresses = [f"s{i}:1" for i in range(4)]
    assert rendezvous_order("w", addresses) == rendezvous_order("w", reversed(addresses))
    firsts = Counter(rendezvous_order(f"w{i}", addresses)[0] for i in range(400))
    assert set(firsts) == set(addresses)
    assert max(firsts.values()) < 160


def test_a_lost_scheduler_moves_only_its_own_workers() -> None:
    addresses = [f"s{i}:1" for i in range(4)]
    for i in range(100):
        order = rendezvous_order(f"w{i}", addresses)
        assert rendezvous_order(f"w{i}", order[1:]) == order[1:]


def test_engine_ids_rise_even_if_the_clock_is_set_back() -> None:
    first = new_engine_id()
    assert new_engine_id(after=first) > first
    ahead = first + (10**9 << 20)
    assert new_engine_id(after=ahead) == ahead + 1


def test_the_kv_fingerprint_depends_on_each_of_its_parts() -> None:
    values = {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16", "layout": "NHD"}
    base = kv_fingerprint("r", **values)
    others = [
        kv_fingerprint("r2", **values),
        *(kv_fingerprint("r", **{**values, name: "x"}) for name in values),
    ]
    assert len({base, *others}) == 5


def watched(until: float, *, period: float = 0.4) -> tuple[PeerWatch, float]:
    """A watch that was asked on time until a moment, the peer silent since 0."""
    watch = PeerWatch(period_s=period, now=0.0)
    now = 0.0
    while now + period <= until:
        now += period
        assert not watch.is_dead(now)
    return watch, now


def test_a_peer_that_is_silent_for_too_long_is_dead() -> None:
    watch, now = watched(DEAD_AFTER_S)
    watch.heard(now)
    assert not watch.is_dead(now + 0.4)
    silent, now = watched(DEAD_AFTER_S)
    assert silent.is_dead(now + 0.4)


def test_a_late_loop_reads_for_a_heartbeat_before_it_judges() -> None:
    watch, now = watched(2.0)
    woken = now + 60.0
    assert not watch.is_dead(woken)
    assert not watch.is_dead(woken + 0.4)
    assert watch.is_dead(woken + GRACE_S + 0.3)
    # A frame that had been waiting in the socket acquits the peer.
    watch, now = watched(2.0)
    woken = now + 60.0
    assert not watch.is_dead(woken)
    watch.heard(woken + 0.1)
    assert not watch.is_dead(woken + 0.8)


def test_a_step_is_stalled_after_ten_seconds_or_twenty_usual_steps() -> None:
    clock = StepClock()
    assert not clock.is_stalled(STALL_AFTER_S)
    assert clock.is_stalled(STALL_AFTER_S + 0.1)
    for _ in range(10):
        clock.on_step(StepTimes(2.0, 1.9, 0.0, 10, 1, False))
    assert not clock.is_stalled(39.0)
    assert clock.is_stalled(41.0)
