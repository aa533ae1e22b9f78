"""Whom a store's server is told to hang up on."""

from __future__ import annotations

from multiworld._core.store_clients import MOST, PATIENCE, Visit, Visitors


def visit(fd, received=0, *, answered=False, inode=None):
    return Visit(fd, 1000 + fd if inode is None else inode, received, answered)


def test_who_says_nothing_has_a_while():
    visitors = Visitors(answers=True)
    assert visitors.look([visit(5)], 10.0) == ()
    assert visitors.look([visit(5)], 10.0 + PATIENCE / 2) == ()
    assert visitors.look([visit(5)], 10.0 + PATIENCE) == (visit(5),)


def test_who_was_answered_is_a_client_for_good():
    visitors = Visitors(answers=True)
    assert visitors.look([visit(5, 40, answered=True)], 0.0) == ()
    assert visitors.known(5, 1005)
    assert not visitors.known(5, 1006), "another connection with its number"


def test_many_words_are_no_proof_where_everybody_is_answered():
    visitors = Visitors(answers=True)
    visitors.look([visit(5, 4000)], 0.0)
    assert visitors.look([visit(5, 9000)], PATIENCE) == (visit(5, 9000),)


def test_a_greeting_is_enough_where_clients_wait_for_their_answer():
    visitors = Visitors(answers=False, patience=1.0)
    visitors.look([visit(5, 5), visit(6, 4)], 0.0)
    assert visitors.known(5, 1005)
    assert visitors.look([visit(6, 4)], 1.0) == (visit(6, 4),)


def test_a_number_that_is_used_again_begins_anew():
    visitors = Visitors(answers=True)
    visitors.look([visit(5)], 0.0)
    assert visitors.look([visit(5, inode=7)], PATIENCE) == ()


def test_the_oldest_make_room():
    visitors = Visitors(answers=True)
    first = [visit(fd) for fd in range(3)]
    assert visitors.look(first, 0.0) == ()
    later = [visit(fd) for fd in range(3, 3 + MOST)]
    assert sorted(each.fd for each in visitors.look(first + later, 1.0)) == [0, 1, 2]
