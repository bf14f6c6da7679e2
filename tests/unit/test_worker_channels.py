"""Hand-overs between threads: what happens at each bound, and that nobody sleeps through a notice."""

import select
import threading

from worker.channels import CommandQueue, Handover, OutputQueue


def test_commands_come_out_in_order_and_wakes_are_not_commands() -> None:
    queue: CommandQueue[int] = CommandQueue(limit=8)
    queue.put(1)
    queue.wake()
    queue.put(2)
    assert queue.drain() == [1, 2]
    assert queue.drain() == []


def test_a_full_command_queue_says_so_and_loses_nothing() -> None:
    queue: CommandQueue[int] = CommandQueue(limit=2)
    for number in range(3):
        queue.put(number)
    assert not queue.has_room
    assert queue.drain() + queue.drain() == [0, 1, 2]
    assert queue.has_room


def test_a_command_ends_the_wait_of_an_idle_reader() -> None:
    queue: CommandQueue[str] = CommandQueue(limit=2)
    timer = threading.Timer(0.01, queue.put, ["now"])
    timer.start()
    assert queue.wait(10.0) == "now"
    timer.join()
    assert queue.wait(0.0) is None


def test_a_reader_that_sleeps_elsewhere_is_told_of_what_others_put() -> None:
    queue: CommandQueue[int] = CommandQueue(limit=8)
    pokes: list[str] = []
    queue.sleep_elsewhere(lambda: pokes.append("poke"))
    queue.put(1)
    assert pokes == [], "it is awake while it puts something itself"
    other = threading.Thread(target=queue.put, args=(2,))
    other.start()
    other.join()
    assert pokes == ["poke"]
    queue.wake()
    assert pokes == ["poke"] * 2, "a signal handler runs on the thread that sleeps"
    queue.sleep_elsewhere(None)
    queue.wake()
    assert pokes == ["poke"] * 2
    assert queue.drain() == [1, 2]


def test_an_output_wakes_a_poll_and_a_cleared_wakeup_sleeps() -> None:
    queue: OutputQueue[int] = OutputQueue(limit=4)
    descriptor = queue.wakeup.fileno()
    assert select.select([descriptor], [], [], 0)[0] == []
    queue.put(1)
    queue.put(2)
    assert select.select([descriptor], [], [], 0)[0] == [descriptor]
    queue.wakeup.clear()
    assert queue.take(10) == [1, 2]
    assert select.select([descriptor], [], [], 0)[0] == []
    queue.put(3)
    assert select.select([descriptor], [], [], 0)[0] == [descriptor], "each notice after a clear is a new one"
    queue.close()
    queue.close()


def test_a_full_output_queue_stops_its_writer_until_it_is_half_empty() -> None:
    queue: OutputQueue[int] = OutputQueue(limit=4)
    for number in range(4):
        queue.put(number)
    assert queue.is_full
    assert queue.take(1) == [0]
    assert queue.is_full
    assert not queue.wait_for_room(0.0)
    assert queue.take(1) == [1]
    assert not queue.is_full
    assert queue.wait_for_room(0.0)
    queue.close()


def test_a_closed_output_queue_takes_notices_in_silence() -> None:
    queue: OutputQueue[int] = OutputQueue(limit=4)
    queue.close()
    queue.put(1)
    assert queue.take(1) == [1]


def test_a_full_handover_refuses_the_newest_and_counts_it() -> None:
    handover: Handover[int] = Handover(limit=2)
    assert [handover.put(number) for number in range(3)] == [True, True, False]
    assert handover.refused == 1
    assert handover.take_all() == [0, 1]
    assert handover.put(4)
