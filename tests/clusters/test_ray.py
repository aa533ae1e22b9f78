"""Worlds of Ray's actors, with Ray itself: actors killed and started again, nodes lost, beside Train and Serve."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from raykit import (
    PATIENCE,
    ROOT,
    Async,
    Elastic,
    Engine,
    Member,
    Replica,
    back,
    end,
    environment,
    nodes,
    ray,
    train_loop,
    until,
)

import multiworld as mw
from multiworld import weights
from multiworld.integrations.ray import _kept, serve_store

pytestmark = [pytest.mark.everyday, pytest.mark.filterwarnings("ignore")]  # Ray's own, and its packages'


@pytest.fixture(scope="module")
def cluster():
    with nodes() as made:
        yield made


@pytest.fixture(scope="module")
def store(cluster):
    return serve_store()


@pytest.fixture
def actors(store):
    """Starts members: `actors({"w": 0}, {"w": 1})`; all end with the test."""
    made = []

    def start(*ranks, **options):
        kind = ray.remote(num_cpus=0.1, max_restarts=-1)(Member).options(**options)
        new = [kind.remote(store, each) for each in ranks]
        made.extend(new)
        return new

    yield start
    for each in made:
        ray.kill(each)


def get(*refs):
    found = ray.get(list(refs), timeout=PATIENCE)
    return found[0] if len(refs) == 1 else found


def test_a_killed_actor_comes_back_into_its_world_and_the_other_world_goes_on(actors):
    hub, one, two = actors({"one": 0, "two": 0}, {"one": 1}, {"two": 1}, max_concurrency=2)
    assert get(hub.add.remote("one"), one.add.remote("one")) == [(2, 1), (2, 1)]
    pid, _ = get(one.where.remote())
    waiting = hub.receive.remote("one")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(mw.BrokenWorldException) as caught:
        get(waiting)
    # Ray's error is one of multiworld's too; its `cause` is the error as it was raised.
    assert isinstance(caught.value, ray.exceptions.RayTaskError)
    assert (caught.value.cause.cause, caught.value.cause.ranks) == (mw.Cause.CRASHED, (1,))
    assert get(hub.add.remote("two"), two.add.remote("two")) == [(2, 1), (2, 1)]
    back(one, pid)
    assert get(hub.add.remote("one"), one.add.remote("one")) == [(2, 2), (2, 2)]
    assert get(hub.add.remote("two"), two.add.remote("two")) == [(2, 1), (2, 1)]


def test_member_and_store_are_lost_together(actors, store):
    first, second = actors({"w": 0}, {"w": 1})
    assert get(first.add.remote("w"), second.add.remote("w")) == [(2, 1), (2, 1)]
    where, (pid, _) = store.address(), get(second.where.remote())
    ray.kill(ray.get_actor(store.name), no_restart=False)
    ray.kill(second, no_restart=False)
    back(second, pid)
    (total, number), same = get(first.add.remote("w"), second.add.remote("w"))
    assert (total, number) == same
    assert total == 2
    assert number > 1
    assert store.address() != where


def test_an_async_actor_joins_in_a_thread(actors, store):
    (other,) = actors({"async": 0})
    member = ray.remote(num_cpus=0.1)(Async).remote()
    get(member.join.remote(store, "async"))
    assert get(member.add.remote(), other.add.remote("async")) == [2, (2, 1)]


@pytest.mark.parametrize("how", ["exit", "handle"])
def test_an_actor_that_ends_in_good_order_has_left(actors, store, how):
    (stays,) = actors({how: 0})
    goes = ray.remote(num_cpus=0.1)(Member).remote(store, {how: 1})
    get(goes.where.remote())
    waiting = stays.receive.remote(how)
    if how == "exit":
        goes.__ray_terminate__.remote()
    del goes  # its last handle
    with pytest.raises(mw.BrokenWorldException) as caught:
        get(waiting)
    assert caught.value.cause.cause == mw.Cause.LEFT


def test_a_join_in_init_outlasts_members_that_come_late(actors, store):
    # Ray does not restart an actor whose __init__ raises, so a join must not raise because another one is late.
    kind = ray.remote(num_cpus=0.1, max_restarts=-1)(Member)
    gives_up = kind.remote(store, {"missed": 0}, timeout=0.5, patience=0)
    with pytest.raises(ray.exceptions.ActorDiedError, match="JoinTimeoutError"):
        get(gives_up.where.remote())
    waits = kind.remote(store, {"late": 0}, timeout=0.5)
    began = time.monotonic()
    seen = waits.where.remote()
    assert not ray.wait([seen], timeout=1.5)[0]
    (late,) = actors({"late": 1})
    (total, number), same = get(waits.add.remote("late"), late.add.remote("late"))
    assert (total, number) == same  # of whichever try met the other
    assert total == 2
    assert time.monotonic() - began > 1.0
    ray.kill(waits)


def test_a_node_is_lost_and_its_bundle_and_actor_go_to_another(actors, cluster):
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    first, second = (cluster.add(num_cpus=1, resources={"seat": 1}) for _ in range(2))
    group = placement_group([{"CPU": 1, "seat": 1}] * 2, strategy="STRICT_SPREAD")
    assert group.wait(PATIENCE)
    members = []
    for rank in range(2):
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        members += actors({"spread": rank}, num_cpus=1, scheduling_strategy=bundle)
    assert get(*(each.add.remote("spread") for each in members)) == [(2, 1), (2, 1)]
    places = get(*(each.where.remote() for each in members))
    assert {node for _, node in places} == {first.node_id, second.node_id}
    spare = cluster.add(num_cpus=1, resources={"seat": 1})
    lost = next(rank for rank, (_, node) in enumerate(places) if node == first.node_id)
    waiting = members[1 - lost].receive.remote("spread")
    cluster.cluster.remove_node(first, allow_graceful=False)
    with pytest.raises(mw.BrokenWorldException) as caught:
        get(waiting)
    assert caught.value.cause.ranks == (lost,)
    assert back(members[lost], places[lost][0])[1] == spare.node_id
    assert get(*(each.add.remote("spread") for each in members)) == [(2, 2), (2, 2)]
    assert get(members[1 - lost].where.remote()) == places[1 - lost]
    for each in members:
        ray.kill(each)
    remove_placement_group(group)


def test_a_store_outlives_its_node_and_a_detached_one_its_handle(cluster):
    two = [cluster.add(resources={"shelf": 1}) for _ in range(2)]
    options = {"namespace": "kept", "lifetime": "detached", "resources": {"shelf": 1}}
    kept = serve_store("kept", **options)
    first = kept.address(PATIENCE)
    _kept.pop(kept)  # as where the process that called `serve_store` has ended
    assert serve_store("kept", get_if_exists=True, **options) == kept
    lost, stays = sorted(two, key=lambda node: node.node_ip_address not in first)
    cluster.cluster.remove_node(lost, allow_graceful=False)
    assert until(lambda: stays.node_ip_address in kept.address(PATIENCE))
    kept.end()
    kept.end()
    with pytest.raises(mw.StoreUnreachableError):
        kept.address(5)


def test_a_world_of_a_range_shrinks_and_lets_the_restarted_actor_in(store):
    kind = ray.remote(num_cpus=0.1, max_restarts=-1, max_task_retries=-1)(Elastic)
    stays, goes = (kind.remote(store, seat) for seat in ("stays", "goes"))
    steps = [each.work.remote(2) for each in (stays, goes)]
    assert get(*steps) == [2, 2]
    members = get(stays.members.remote())
    os.kill(members["goes"], signal.SIGKILL)
    assert until(lambda: len(get(stays.members.remote())) == 1)
    steps = [each.work.remote(2) for each in (stays, goes)]  # the second is called again in the new process
    assert get(*steps) == [2, 2]
    after = get(stays.members.remote())
    assert after["stays"] == members["stays"]
    assert after["goes"] != members["goes"]


def test_weights_come_to_a_restarted_engine(cluster, store):
    net = torch.nn.Linear(2, 1)
    publisher = weights.Publisher("policy", net, store.address, hang_timeout=3)
    try:
        engine = ray.remote(num_cpus=0.1, max_restarts=-1)(Engine).remote(store)
        for version in range(2):
            torch.nn.init.constant_(net.weight, version)
            publisher.publish(version)
            assert get(engine.weights.remote(version)) == [[version, version]]
        pid, _ = get(engine.where.remote())
        where = store.address()
        ray.kill(ray.get_actor(store.name, namespace=store.namespace), no_restart=False)
        os.kill(pid, signal.SIGKILL)
        back(engine, pid)
        assert store.address() != where
        assert get(engine.weights.remote(1)) == [[1, 1]]
    finally:
        publisher.close()


def test_beside_train_its_default_group_works_as_ever(actors, store, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    (outside,) = actors({"train-0": 0})
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"store": store, "outside": outside},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    assert trainer.fit().error is None


def test_beside_serve_a_replica_is_replaced_and_requests_go_on(cluster, store):
    from ray import serve

    options = {"num_replicas": 2, "health_check_period_s": 1, "ray_actor_options": {"num_cpus": 0.1}}
    handle = serve.run(serve.deployment(**options)(Replica).bind(store), route_prefix=None)
    answers, failures = [], []

    def ask():
        try:
            answers.append(handle.remote().result(timeout_s=PATIENCE))
        except Exception as error:  # noqa: BLE001  (a request that was inside the replica, or on its way there)
            failures.append(error)
        return answers

    try:
        assert until(lambda: len({pid for pid, *_ in ask()}) == 2)
        assert {state for *_, state in answers} == {("active", 1)}
        pid = answers[0][0]
        os.kill(pid, signal.SIGKILL)
        answers.clear()
        assert until(lambda: len({each for each, _, state in ask() if state == ("active", 2)}) == 2)
    finally:
        serve.shutdown()
    while_broken = [each for each, _, (state, _) in answers if state != "active"]
    assert while_broken
    assert pid not in {each for each, *_ in answers}
    assert {each for _, each, state in answers if state == ("active", 2)} == {0, 1}
    assert len(failures) <= 2, failures


def program(folder, *arguments):
    """The output of a program that starts a Ray of its own, of which nothing is left."""
    mark, temporary = secrets.token_hex(8), tempfile.mkdtemp(prefix="m8d-ray-")
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **environment(mark, temporary)}, cwd=folder,
            capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
        )  # fmt: skip
    finally:
        end(mark, temporary)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_ends_as_it_says(tmp_path):
    told = program(tmp_path, ROOT / "examples" / "ray_actors.py")
    assert re.search(r"world 'green' broke: rank 1 .* closed by its kernel\n", told)
    assert "world 'green' is active again, generation 2" in told
    assert told.endswith("as it should be\n")


def test_the_page_has_a_program_and_what_it_prints(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.cluster.address)
    page = (ROOT / "docs" / "ray.md").read_text()
    source, output = re.search(
        r"ray -->\n```python\n(.*?)```\n.*ray -->\n```text\n(.*?)```", page, re.DOTALL
    ).groups()
    (tmp_path / "program.py").write_text(source)
    told = program(tmp_path, "program.py")
    assert [line for line in told.splitlines() if line.startswith("[")] == output.splitlines()
