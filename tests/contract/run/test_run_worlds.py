"""``m8d-run --worlds FILE``: from the file to worlds that break alone and heal, with nothing but the command."""

from __future__ import annotations

import logging
import os
import signal

import pytest
from kits.contract.runkit import launched

log = logging.getLogger("measured")

FILE = """
[roles]
hub = 1
worker = {workers}

[worlds."w{{i}}"]
for = "worker"
members = ["hub:0", "worker:{{i}}"]
timeout = 60
hang_timeout = 30
"""

SCRIPT = """
import os
import torch, multiworld as mw

def stopped():
    return os.path.exists(os.environ["M8D_RUNKIT_TOLD"] + ".go")

began = time.monotonic()
worlds = mw.join_all()
tell("joined", took=time.monotonic() - began, role=os.environ["ROLE_NAME"], role_rank=os.environ["ROLE_RANK"],
     worlds={name: [w.rank, w.world_size, w.generation] for name, w in worlds.items()})
news = torch.zeros(1)
if os.environ["ROLE_NAME"] == "hub":
    served = dict.fromkeys(worlds, 0)
    last = False
    while not last:
        last = stopped()
        for name, w in worlds.items():
            if last:
                w.wait_active(60)
            if w.state == "active":
                try:
                    w.broadcast(news.fill_(last), src=0)
                    served[name] += 1
                except mw.BrokenWorldException as broken:
                    tell("broken", world=name, cause=str(broken.cause), generation=broken.generation)
        time.sleep(0.01)
    tell("served", served=served, generations={name: w.generation for name, w in worlds.items()})
    hold("bye")  # who leaves breaks the worlds: not before everybody has the news
else:
    (w,) = worlds.values()
    while not news.item():
        w.broadcast(news, src=0)
    tell("news")
"""


@pytest.mark.timeout(300)
def test_a_killed_worker_is_back_in_its_world_and_nobody_else_notices(tmp_path):
    (tmp_path / "worlds.toml").write_text(FILE.format(workers=3))
    with launched(
        tmp_path, SCRIPT, options=["--worlds", str(tmp_path / "worlds.toml"), "--max-restarts", "3"]
    ) as run:
        first = {told.rank: told for told in run.wait_told("joined", 4)}
        assert {rank: (told.role, told.role_rank, told.worlds) for rank, told in first.items()} == {
            0: ("hub", "0", {"w0": [0, 2, 1], "w1": [0, 2, 1], "w2": [0, 2, 1]}),
            1: ("worker", "0", {"w0": [1, 2, 1]}),
            2: ("worker", "1", {"w1": [1, 2, 1]}),
            3: ("worker", "2", {"w2": [1, 2, 1]}),
        }
        for attempt in (1, 2):
            last = run.told("joined", rank=2)[-1]
            os.kill(last.pid, signal.SIGKILL)
            back = run.wait_told("joined", rank=2, attempt=attempt)[0]
            assert back.pid != last.pid
            assert back.worlds["w1"][2] > last.worlds["w1"][2]
            log.info("back in its world: from join_all to active %.0f ms", 1e3 * back.took)
        run.say()
        (served,) = run.wait_told("served")
        run.wait_told("news", 3)
        run.say("bye")
        assert run.ended() == 0
        assert {told.rank for told in run.told("news")} == {1, 2, 3}
        assert (served.generations["w0"], served.generations["w2"]) == (1, 1)
        assert served.generations["w1"] == back.worlds["w1"][2]
        assert min(served.served.values()) > 0
        assert {told.world for told in run.told("broken")} <= {"w1"}
        assert [told.attempt for told in run.told("joined")].count(
            0
        ) == 4  # the hub and the others began once
        assert len(run.told("joined")) == 6
        assert run.leftovers() == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[roles]\nhub = 1\n[worlds.w]\nmembers = ['hub:0', 'hbu:1']\n", ":4: world 'w': member 'hbu:1'"),
        ("[roles]\nw = 2\n[worlds.w]\nmembers = ['w:*']\nbackend = 'glooo'\n", "this torch has no 'glooo'"),
        ("[roles]\nw = 2\n[worlds.w]\nmembers = ['w:*']\nstore = 'file:///no/where'\n", "cannot be written"),
    ],
)
def test_a_wrong_file_starts_nothing(tmp_path, text, found):
    path = tmp_path / "worlds.toml"
    path.write_text(text)
    with launched(tmp_path, "tell('began')\n", options=["--worlds", str(path)]) as run:
        assert run.ended() == 2
        assert f"{path}:" in run.text("err")
        assert found in run.text("err")
        assert "Traceback" not in run.text()
        assert run.told() == []
