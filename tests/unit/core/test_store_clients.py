"""Whom a store's server is told to hang up on."""

from __future__ import annotations

from multiworld._core.client_detection import MAX_UNPROVEN, PATIENCE, AcceptedConnection, ClientCheck


def accepted(fd, received=0, *, answered=False, inode=None):
    return AcceptedConnection(fd, 1000 + fd if inode is None else inode, received, answered)


def test_who_says_nothing_has_a_while():
    clients = ClientCheck(answers=True)
    assert clients.overdue([accepted(5)], 10.0) == ()
    assert clients.overdue([accepted(5)], 10.0 + PATIENCE / 2) == ()
    assert clients.overdue([accepted(5)], 10.0 + PATIENCE) == (accepted(5),)


def test_who_was_answered_is_a_client_for_good():
    clients = ClientCheck(answers=True)
    assert clients.overdue([accepted(5, 40, answered=True)], 0.0) == ()
    assert clients.is_client(5, 1005)
    assert not clients.is_client(5, 1006), "another connection with its number"


def test_many_words_are_no_proof_where_everybody_is_answered():
    clients = ClientCheck(answers=True)
    clients.overdue([accepted(5, 4000)], 0.0)
    assert clients.overdue([accepted(5, 9000)], PATIENCE) == (accepted(5, 9000),)


def test_a_greeting_is_enough_where_clients_wait_for_their_answer():
    clients = ClientCheck(answers=False, patience=1.0)
    clients.overdue([accepted(5, 5), accepted(6, 4)], 0.0)
    assert clients.is_client(5, 1005)
    assert clients.overdue([accepted(6, 4)], 1.0) == (accepted(6, 4),)


def test_a_number_that_is_used_again_begins_anew():
    clients = ClientCheck(answers=True)
    clients.overdue([accepted(5)], 0.0)
    assert clients.overdue([accepted(5, inode=7)], PATIENCE) == ()


def test_the_oldest_make_room():
    clients = ClientCheck(answers=True)
    first = [accepted(fd) for fd in range(3)]
    assert clients.overdue(first, 0.0) == ()
    later = [accepted(fd) for fd in range(3, 3 + MAX_UNPROVEN)]
    assert sorted(each.fd for each in clients.overdue(first + later, 1.0)) == [0, 1, 2]
