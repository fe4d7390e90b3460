"""Tests the use of file descriptors: the ports' shares, the limit that a provider's process raises, and the spare
descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from provider.net.descriptors import (
    FILES_PER_STREAM,
    MOST_RPC_CONNECTIONS,
    MOST_STREAMS,
    RESERVED_FILES,
    Shares,
    SpareDescriptor,
    shares,
)
from tests.support.files import exhausted
from tests.support.waiting import WAIT_S


@pytest.mark.parametrize("num_files", [64, 256, 512, 1024, 4096, 65536])
@pytest.mark.parametrize("num_ports", [0, 1, 2])
def test_the_ports_leave_a_reserve(num_files: int, num_ports: int) -> None:
    share = shares(num_files, num_ports)
    taken = share.rpc_connections + FILES_PER_STREAM * share.streams * num_ports
    assert taken <= num_files - min(RESERVED_FILES, num_files // 2)
    assert share.rpc_connections >= 1
    assert (share.streams >= 1) is (num_ports > 0)
    assert share.rpc_connections <= MOST_RPC_CONNECTIONS
    assert share.streams <= MOST_STREAMS


def test_the_usual_limits() -> None:
    assert shares(1024, 1) == Shares(384, 256)
    assert shares(1024, 2) == Shares(360, 134)
    assert shares(1024, 0) == Shares(896, 0)
    assert shares(65536, 2) == Shares(MOST_RPC_CONNECTIONS, MOST_STREAMS)


@pytest.mark.parametrize(("soft", "hard", "after"), [(64, 128, 128), (200, 200, 200), (64, 8000, 8000)])
def test_the_soft_limit_is_raised_and_one_line_says_where_it_stays_low(soft: int, hard: int, after: int) -> None:
    code = f"""
import logging, resource
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from provider.net.descriptors import file_limit, raise_file_limit
assert file_limit() == {soft}  # nothing happens at import
raise_file_limit()
print(file_limit())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == after
    lines = done.stderr.splitlines()
    assert len(lines) == (after < 4000)
    if lines:
        assert f"at most {after} files" in lines[0]
        assert "ulimit -Hn" in lines[0]


def test_the_spare_opens_one_file_when_no_other_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"there")
    spare = SpareDescriptor()
    with exhausted():
        with pytest.raises(OSError):
            (tmp_path / "file").read_bytes()
        for _ in range(3):  # the descriptor is taken back each time
            with spare.lent():
                assert (tmp_path / "file").read_bytes() == b"there"
        with pytest.raises(OSError):
            (tmp_path / "file").read_bytes()
    spare.close()


def test_a_spare_that_another_thread_took_comes_back(tmp_path: Path) -> None:
    spare = SpareDescriptor()
    with exhausted() as taken:
        with spare.lent():
            taken.append(os.dup(taken[0]))  # a connection takes the descriptor at this moment
        spare.take_back()
        with pytest.raises(OSError), spare.lent():
            os.open(os.devnull, os.O_RDONLY)
        os.close(taken.pop())
        spare.take_back()
        with spare.lent():
            os.close(os.open(os.devnull, os.O_RDONLY))
    spare.close()


def test_threads_borrow_it_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"there")
    spare, failures = SpareDescriptor(), []

    def borrow() -> None:
        try:
            for _ in range(200):
                with spare.lent():
                    (tmp_path / "file").read_bytes()
        except OSError as exc:
            failures.append(exc)

    threads = [threading.Thread(target=borrow) for _ in range(4)]
    with exhausted():
        for one in threads:
            one.start()
        for one in threads:
            one.join(WAIT_S)
    spare.close()
    assert failures == []
