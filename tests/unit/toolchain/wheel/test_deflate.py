import errno
import hashlib
import threading
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.fakewheel import big

from m8d_build.errors import CheckFailed
from m8d_build.wheel import deflate as module
from m8d_build.wheel.deflate import ChunkCache, deflate


def run(blocks, **options):
    out = []
    done = deflate(blocks, out.append, **{"jobs": 2, **options})
    return done, b"".join(out)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64 << 10)


def test_the_stream_is_what_zlib_reads():
    data = big(3_000_000)
    done, out = run([data])
    assert zlib.decompress(out, -15) == data
    assert (done.size, done.compressed_size) == (len(data), len(out))
    assert (done.crc, done.compressed_crc) == (zlib.crc32(data), zlib.crc32(out))
    assert done.sha256 == hashlib.sha256(data).digest()


blocks = st.lists(
    st.binary(max_size=300) | st.integers(0, 90_000).map(lambda n: bytes([n % 7]) * n), max_size=8
)


@settings(deadline=None, max_examples=60)
@given(blocks, st.integers(1, 4), st.integers(0, 9), st.sampled_from([33 << 10, 40_000, 1 << 17]))
def test_any_bytes_in_any_blocks_come_back(pieces, jobs, level, chunk):
    before = module.CHUNK
    module.CHUNK = chunk
    try:
        done, out = run(pieces, jobs=jobs, level=level)
    finally:
        module.CHUNK = before
    engine = zlib.decompressobj(-15)
    assert engine.decompress(out) == b"".join(pieces)
    assert engine.eof
    assert engine.unused_data == b""
    assert done.size == sum(map(len, pieces))


def test_the_same_bytes_give_the_same_stream_however_they_are_cut(small_chunks):
    data = big(1_000_000)
    whole = run([data], jobs=1)
    cut = run([data[i : i + 777] for i in range(0, len(data), 777)], jobs=4)
    assert whole == cut


def test_priming_keeps_the_stream_as_small_as_zlib_alone(small_chunks):
    data = big(2_000_000)
    done, _ = run([data])
    assert done.compressed_size < 1.02 * len(zlib.compress(data, 6))


def test_a_second_run_compresses_nothing(tmp_path, small_chunks, monkeypatch):
    data = big(1_000_000)
    first = run([data], cache=ChunkCache(tmp_path / "c"))
    monkeypatch.setattr(zlib, "compressobj", lambda *a, **k: pytest.fail("compressed again"))
    second = run([data], cache=ChunkCache(tmp_path / "c"))
    assert second[1] == first[1]
    assert (first[0].reused, second[0].reused) == (0, len(data))


def test_a_change_only_recompresses_the_chunks_it_touches(tmp_path, small_chunks):
    data = big(1_000_000)
    run([data], cache=ChunkCache(tmp_path / "c"))
    changed = data[:270_000] + b"!" + data[270_001:]  # not in the 32 KiB that prime the next
    done, out = run([changed], cache=ChunkCache(tmp_path / "c"))
    assert zlib.decompress(out, -15) == changed
    assert done.reused == len(data) - (64 << 10)


def test_a_damaged_or_wrong_cached_chunk_is_made_anew(tmp_path, small_chunks):
    data = big(500_000)
    cache = ChunkCache(tmp_path / "c")
    expected = run([data], cache=cache)[1]
    files = sorted((tmp_path / "c").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"?")
    files[1].write_bytes(b"")
    cache.put(files[2].name, b"not a deflate stream, but under a right checksum")
    done, out = run([data], cache=cache)
    assert out == expected
    assert 0 < done.reused < len(data)
    assert run([data], cache=cache)[0].reused == len(data)


def test_a_level_of_its_own_has_chunks_of_its_own(tmp_path, small_chunks):
    data = big(200_000)
    run([data], cache=ChunkCache(tmp_path / "c"), level=1)
    assert run([data], cache=ChunkCache(tmp_path / "c"), level=9)[0].reused == 0


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, small_chunks):
    (tmp_path / "c").write_text("a file where the folder should be")
    data = big(200_000)
    assert zlib.decompress(run([data], cache=ChunkCache(tmp_path / "c"))[1], -15) == data


def test_a_full_disk_under_the_cache_leaves_nothing_half_made(tmp_path, small_chunks, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.Path, "replace", full)
    data = big(200_000)
    assert zlib.decompress(run([data], cache=ChunkCache(tmp_path / "c"))[1], -15) == data
    assert list((tmp_path / "c").iterdir()) == []


def test_prune_deletes_what_was_not_used_for_longest(tmp_path):
    import os

    cache = ChunkCache(tmp_path, limit=2500)
    for number in range(4):
        cache.put(f"k{number}", bytes(1000))
        os.utime(tmp_path / f"k{number}", (number, number))
    assert cache.get("k0") is not None
    freed = cache.prune()
    assert freed > 1500
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k0", "k3"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_when_writing_fails_the_workers_end(small_chunks, error):
    def write(data):
        raise error

    with pytest.raises(error):
        deflate([big(2_000_000)], write, jobs=2)
    assert not [t for t in threading.enumerate() if t.name.startswith("deflate")]


def test_a_compressor_that_loses_bytes_is_found(monkeypatch):
    honest = zlib.compressobj(wbits=-15)  # zlib.compress takes no wbits before Python 3.11

    class Lossy:
        def compress(self, data):
            return honest.compress(data[:-1]) + honest.flush()

        def flush(self, mode):
            return b""

    monkeypatch.setattr(zlib, "compressobj", lambda *a, **k: Lossy())
    with pytest.raises(CheckFailed, match="do not inflate"):
        run([b"abcdef"])


def test_only_some_chunks_are_held_at_a_time(small_chunks):
    written = 0
    ahead = []

    def source():
        for number in range(60):
            ahead.append(number * (64 << 10) - written_size[0])
            yield bytes([number]) * (64 << 10)

    written_size = [0]

    def write(data):
        nonlocal written
        written_size[0] += 64 << 10

    deflate(source(), write, jobs=2)
    assert max(ahead) <= (2 * 2 + 2) * (64 << 10)
