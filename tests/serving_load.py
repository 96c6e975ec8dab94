"""Distil many prompts through faulty servers, with a kill -9 in the middle; run by hand:

    python tests/serving_load.py --prompts 10000

Prints what came of it as JSON, the client's peak memory too. `--client` is the process that is killed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from fake_server import END, FakeServer, rule
from helpers import make_tokenizer, nano_base

from specformer.distill import distill
from specformer.shards import iter_shards

NEW_TOKENS = 24


class Questions(Collection):
    """Dialogues that are made as they are read, so that they take no memory."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __contains__(self, row: object) -> bool:
        return any(row == mine for mine in self)

    def __iter__(self) -> Iterator[dict]:
        for n in range(self.count):
            yield {"id": f"q{n}", "messages": [{"role": "user", "content": f"Tell me about {n}."}]}


def client(folder: Path, prompts: int, timeout_s: float, urls: list[str]) -> dict:
    tokenizer = make_tokenizer()
    base = nano_base(tokenizer, len(tokenizer), (END, 0))
    before = peak_mib()
    found = distill(
        base,
        Questions(prompts),
        folder,
        max_new_tokens=NEW_TOKENS,
        batch_size=1,
        max_length=128,
        prefill_chunk=64,
        shard_rows=64,
        servers=urls,
        concurrency=16,
        timeout_s=timeout_s,
    )
    return found | {"peak_mib": peak_mib(), "peak_mib_before": before}


def peak_mib() -> float:
    """The most memory that this process has held; not getrusage's, which a parent's memory enters."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def start(folder: Path, prompts: int, timeout_s: float, urls: list[str]) -> subprocess.Popen:
    command = [sys.executable, __file__, "--client", str(folder), "--prompts", str(prompts)]
    return subprocess.Popen([*command, "--timeout", str(timeout_s), *urls], stdout=subprocess.PIPE, text=True)


def load(
    folder: Path, prompts: int, *, faults: float, timeout_s: float, kill: bool = True, here: bool = False
) -> dict:
    """Two servers, one client that is killed when half is asked for, and one, in this process if `here`, that
    goes on. Raises AssertionError unless every prompt is stored once, with its own answer."""
    began = time.perf_counter()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(FakeServer(faults=faults, seed=seed, slow_s=4 * timeout_s)) for seed in (1, 2)
        ]
        work = folder, prompts, timeout_s, [server.url for server in servers]
        stored = 0
        if kill:
            process = start(*work)
            while sum(len(server.asked) for server in servers) < prompts / 2:
                assert process.poll() is None
                time.sleep(0.02)
            process.kill()
            process.communicate()
            stored = sum(1 for _ in iter_shards(folder))
        if here:
            found = client(*work)
        else:
            process = start(*work)
            said, _ = process.communicate()
            assert process.returncode == 0, said
            found = json.loads(said.splitlines()[-1])
    names = Counter()
    for row in iter_shards(folder):
        names[row["id"]] += 1
        assert row["answer_ids"] == rule(row["prompt_ids"], NEW_TOKENS), row
    assert names == Counter(f"q{n}" for n in range(prompts))
    assert found["new_rows"] == prompts - stored
    return {
        "prompts": prompts,
        "rows": sum(names.values()),
        "stored_when_killed": stored,
        "tries": sum(sum(server.asked.values()) for server in servers),
        "faults": dict(sum((server.injected for server in servers), Counter())),
        "seconds": round(time.perf_counter() - began, 1),
        "client_peak_mib": round(found["peak_mib"], 1),
        "client_peak_mib_before": round(found["peak_mib_before"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--faults", type=float, default=0.05, help="share of the tries, for each kind")
    parser.add_argument("--timeout", type=float, default=2.0)
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--client", type=Path)
    parser.add_argument("urls", nargs="*")
    options = parser.parse_args()
    if options.client:
        print(json.dumps(client(options.client, options.prompts, options.timeout, options.urls)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = load(
            Path(folder),
            options.prompts,
            faults=options.faults,
            timeout_s=options.timeout,
            kill=not options.no_kill,
        )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
