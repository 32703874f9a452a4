"""Processes that answer questions over pipes."""

from __future__ import annotations

import pickle
import subprocess
import sys

# Answers a question only when stdin has a second one, so that the test can close the pipe of answers first.
SERVER = """
import pickle, sys
from hydragraph.cluster.module_process import serve
serve(lambda: lambda question: pickle.load(sys.stdin.buffer))
"""


def test_a_server_whose_asker_has_ended_ends_without_a_traceback() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, stderr=pipe) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stderr is not None
        server.stdout.close()
        server.stdin.write(pickle.dumps("question") + pickle.dumps("answer"))
        server.stdin.close()
        assert server.stderr.read() == b""
        assert server.wait() == 1
