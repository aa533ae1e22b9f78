"""Whether the rendezvous store answers, and when it is polled."""

from __future__ import annotations

from multiworld.run.nodes.store_health import StoreHealth


def test_one_that_answers_is_no_news():
    health = StoreHealth()
    assert health.answers
    assert health.answered(1.0) is None
    assert health.answers
    assert not health.gone


def test_silence_is_news_once_and_has_a_length():
    health = StoreHealth()
    assert health.silent(10.0, gone=False)
    assert not health.answers
    assert not health.silent(11.0, gone=False)
    assert health.answered(13.5) == 3.5
    assert health.answers
    assert health.answered(14.0) is None
    assert health.silent(20.0, gone=False)


def test_its_end_is_news_once_also_after_silence():
    health = StoreHealth()
    assert health.silent(1.0, gone=True)
    assert health.gone
    assert not health.silent(2.0, gone=True)
    health = StoreHealth()
    assert health.silent(1.0, gone=False)
    assert health.silent(2.0, gone=True)
    assert not health.silent(3.0, gone=True)
    assert not health.silent(4.0, gone=False)
    assert health.gone
    assert health.answered(5.0) == 4.0


def test_it_is_polled_when_it_is_due_and_not_once_it_is_gone():
    health = StoreHealth()
    assert health.due(0.0)
    health.next_poll = 2.0
    assert not health.due(1.9)
    assert health.due(2.0)
    health.silent(2.0, gone=False)
    assert health.due(2.0)
    health.silent(2.0, gone=True)
    assert not health.due(2.0)
