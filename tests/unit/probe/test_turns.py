"""Turns on a device: who has one, what is waited for, and that compilation leaves the device to
others.
"""

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._inductor.fx_passes import pad_mm

from autotune.probe.turns import HELD, LOCK, TIMING_FUNCTIONS, Turns, held_by_others_gib

ARGS = CallbackArgs(CallbackTrigger.DYNAMO, "0/0")


def is_free(folder: Path) -> bool:
    """Whether nobody has a turn."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def take_turn(turns: Turns) -> None:
    with turns.take(compiles=False):
        pass


def test_a_turn_ends_with_its_block_and_not_while_code_runs(tmp_path: Path) -> None:
    given: list[str] = []
    turns = Turns(tmp_path, on_give=lambda: given.append("settled"))
    with turns.take(compiles=False):
        assert not is_free(tmp_path) and not given
    assert is_free(tmp_path) and given == ["settled"]
    with pytest.raises(ValueError, match="it failed"), turns.take(compiles=True):
        raise ValueError("it failed")
    assert is_free(tmp_path)
    turns.close()


def test_the_device_is_left_to_others_while_code_is_compiled(tmp_path: Path) -> None:
    turns, before = Turns(tmp_path), len(callback_handler.start_callbacks)
    with turns.take(compiles=True):
        for _ in range(2):  # forward and backward
            callback_handler.run_start_callbacks(ARGS)
            assert is_free(tmp_path)
            time.sleep(0.05)
            callback_handler.run_end_callbacks(ARGS)
            assert not is_free(tmp_path)
    assert 0.1 <= turns.compile_s < 5 and is_free(tmp_path)
    assert len(callback_handler.start_callbacks) == before
    with turns.take(compiles=True):
        pass
    assert turns.compile_s == 0.0
    turns.close()


def test_who_has_the_device_alone_waits_for_nobody_and_knows_how_long_it_compiled() -> None:
    waits: list[float] = []
    turns = Turns(None, on_wait=lambda begin, end: waits.append(end))
    with turns.take(compiles=True):
        callback_handler.run_start_callbacks(ARGS)
        time.sleep(0.05)
        callback_handler.run_end_callbacks(ARGS)
    turns.close()
    assert not waits and turns.compile_s >= 0.05 and not turns.is_stuck


def test_a_turn_is_waited_for_and_no_longer_than_patience_lasts(tmp_path: Path) -> None:
    other, waits = Turns(tmp_path), [(0.0, 0.0)]
    mine = Turns(tmp_path, patience_s=20.0, on_wait=lambda begin, end: waits.append((begin, end)))
    hasty = Turns(tmp_path, patience_s=0.05)
    with other.take(compiles=False):
        with hasty.take(compiles=False):
            assert hasty.is_stuck  # and goes on
        assert not is_free(tmp_path)
        thread = threading.Thread(target=take_turn, args=(mine,))
        thread.start()
        time.sleep(0.2)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive() and not mine.is_stuck and is_free(tmp_path)
    begin, end = waits[-1]
    assert 0.1 < end - begin < 10
    for turns in (other, hasty, mine):
        turns.close()


def test_the_one_that_probes_has_the_next_turn(tmp_path: Path) -> None:
    """However many others wait, and for however long."""
    holder, others = Turns(tmp_path), [Turns(tmp_path) for _ in range(3)]
    order: list[str] = []
    prober = Turns(tmp_path, patience_s=20.0, on_wait=lambda begin, end: order.append("prober"))
    for other in others:
        other._on_wait = lambda begin, end: order.append("other")
    threads = [threading.Thread(target=take_turn, args=(one,)) for one in (*others, prober)]
    with holder.take(compiles=False):
        for thread in threads:
            thread.start()
            time.sleep(0.1)
    for thread in threads:
        thread.join(10)
    assert order == ["prober", "other", "other", "other"]
    for turns in (holder, *others, prober):
        turns.close()


def test_who_offers_the_device_leaves_it_to_the_one_that_probes_alone(tmp_path: Path) -> None:
    order: list[str] = []
    holder = Turns(tmp_path, on_give=lambda: order.append("given"))
    other = Turns(tmp_path, on_wait=lambda begin, end: order.append("other"))
    prober = Turns(tmp_path, patience_s=20.0, on_wait=lambda begin, end: order.append("prober"))
    threads = [threading.Thread(target=take_turn, args=(one,)) for one in (other, prober)]
    with holder.take(compiles=True):
        threads[0].start()
        time.sleep(0.1)
        holder.offer()  # another waits that compiles ahead too
        assert not order
        threads[1].start()
        time.sleep(0.1)
        holder.offer()
        threads[1].join(10)
        assert order[:2] == ["given", "prober"] and not is_free(tmp_path)
        callback_handler.run_start_callbacks(ARGS)
        holder.offer()  # it has no turn to leave
        callback_handler.run_end_callbacks(ARGS)
    threads[0].join(10)
    assert is_free(tmp_path) and order.count("prober") == order.count("other") == 1
    for turns in (holder, other, prober):
        turns.close()


def test_what_others_hold_is_added_up(tmp_path: Path) -> None:
    assert held_by_others_gib(tmp_path) == 0.0
    (tmp_path / f"17{HELD}").write_text("0.75")
    (tmp_path / f"18{HELD}").write_text("0.5")
    (tmp_path / f"19{HELD}").write_text("")  # is being written
    assert held_by_others_gib(tmp_path) == 1.25


def test_a_product_that_the_compiler_tries_on_the_device_is_tried_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # or nothing would be waited for
    (name,) = (name for name in TIMING_FUNCTIONS if hasattr(pad_mm, name))
    found: list[bool] = []

    def try_product(*args: object) -> bool:
        found.append(is_free(tmp_path))
        time.sleep(0.2)
        return args == (1, 2)

    monkeypatch.setattr(pad_mm, name, try_product)
    turns = Turns(tmp_path)
    with turns.take(compiles=True):
        callback_handler.run_start_callbacks(ARGS)
        assert getattr(pad_mm, name)(1, 2) and is_free(tmp_path)
        callback_handler.run_end_callbacks(ARGS)
        assert not is_free(tmp_path) and turns.compile_s < 0.2
        getattr(pad_mm, name)()  # not while code is compiled: the turn stays
        assert not is_free(tmp_path)
    assert found == [False, False] and getattr(pad_mm, name) is try_product
    turns.close()


def test_without_locks_the_worker_goes_on_and_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    worker, other = Turns(tmp_path, patience_s=1.0), Turns(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with worker.take(compiles=False):
        assert worker.is_stuck
    with pytest.raises(OSError, match="no locks"):
        take_turn(other)
    for turns in (worker, other):
        turns.close()


def test_a_turn_ends_even_if_the_device_fails(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    turns = Turns(tmp_path, on_give=fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        take_turn(turns)
    assert is_free(tmp_path)
    turns.close()
