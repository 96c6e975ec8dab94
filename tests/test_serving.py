"""Distilling through completions servers: a fake one on loopback, with faults, and a real vLLM by request."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import random
import socket
import ssl
import subprocess
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import serving_load
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fake_server import END, FAULTS, FakeServer, rule
from helpers import nano_base

from specformer.base import load_base
from specformer.distill import distill
from specformer.engine import Request
from specformer.errors import UserError
from specformer.serving import TRIES, Servers
from specformer.shards import read_rows, read_shards

NEW_TOKENS = 10
OVERFLOWS = {
    "vllm": "This model's maximum context length is 64 tokens. However, you requested 90 tokens",
    "llama.cpp": "the request exceeds the available context size (64 tokens), try increasing it",
    "openai": '{"error": {"code": "context_length_exceeded"}}',
}


@pytest.fixture(scope="module")
def base(tiny_tokenizer):
    return nano_base(tiny_tokenizer, len(tiny_tokenizer), (END, 0))


def requests(count):
    rng = random.Random(0)
    return [Request(f"r{i}", rng.choices(range(3, 300), k=3 + i % 9), NEW_TOKENS) for i in range(count)]


def client(base, *servers, **options):
    options = {"concurrency": 4, "timeout": 5.0, "rest": 0.001} | options
    return Servers(base, [getattr(server, "url", server) for server in servers], **options)


def run(base, folder, server, count=12, **options: Any):
    """`distill` through one server; its counts and its rows."""
    limits = {"max_new_tokens": NEW_TOKENS, "batch_size": 1, "max_length": 64, "prefill_chunk": 8}
    options = limits | {"shard_rows": 4, "concurrency": 4, "servers": [server.url]} | options
    dialogues = list(serving_load.Questions(count))
    found = distill(base, dialogues, folder, **options)
    return found, read_rows(folder, dialogues)


def test_each_prompt_is_stored_once_through_faults_and_a_kill(tmp_path):
    found = serving_load.load(tmp_path, 300, faults=0.05, timeout_s=0.5, here=True)
    assert found["rows"] == 300 and 0 < found["stored_when_killed"] < 300
    assert set(found["faults"]) == set(FAULTS)
    assert found["tries"] >= 300 + sum(found["faults"].values())


def test_prompts_go_out_as_ids_and_exact_ids_come_back(base, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with FakeServer() as server:
        found, rows = run(base, tmp_path, server)
    assert found["rows"] == found["new_rows"] == 12 and not found["dropped"]
    for row in rows:
        assert row["answer_ids"] == rule(row["prompt_ids"], NEW_TOKENS)
        assert row["answer"] == base.tokenizer.decode(row["answer_ids"], skip_special_tokens=True)
        assert row["finish_reason"] == ("stop" if row["answer_ids"][-1] == END else "length")
    assert set(found["finish_reasons"]) == {"stop", "length"}
    assert {tuple(row["prompt_ids"]) for row in rows} == set(server.asked)
    body = server.bodies[-1]
    assert body["temperature"] == 0 and body["max_tokens"] == NEW_TOKENS and body["repetition_penalty"] == 1
    assert body["stop_token_ids"] == [END, 0] and body["model"] == "nano"
    assert server.headers[-1]["Authorization"] == "Bearer sk-secret"


def test_another_backend_or_model_starts_afresh_but_other_urls_do_not(base, tmp_path):
    with FakeServer() as server, FakeServer() as other, FakeServer(model="alias") as alias:
        assert run(base, tmp_path, server)[0]["new_rows"] == 12
        assert run(base, tmp_path, other, concurrency=1, timeout_s=9.0)[0]["new_rows"] == 0
        assert not other.headers and not other.asked
        assert run(base, tmp_path, alias, model="alias")[0]["new_rows"] == 12


def test_requests_are_read_as_slots_get_free(base):
    taken = 0

    def counted():
        nonlocal taken
        for request in requests(60):
            taken += 1
            yield request

    with FakeServer(faults=0.05, slow_s=0.2) as server, FakeServer() as other:
        for done, _ in enumerate(client(base, server, other, concurrency=3).run(counted()), 1):
            assert taken <= done + 2 * 3
    assert taken == 60 and server.most <= 3 and other.most <= 3
    assert min(len(server.asked), len(other.asked)) > 10


def test_a_run_that_is_left_early_ends_at_once(base):
    with FakeServer(slow_s=30.0, faults=0.1) as server:
        begun = time.perf_counter()
        with closing(client(base, server, timeout=30.0).run(requests(40))) as results:
            for _ in results:
                if server.injected["slow"]:
                    break
        assert server.injected["slow"] and time.perf_counter() - begun < 5


def test_the_other_servers_take_over_from_a_dead_one(base):
    with FakeServer() as live, FakeServer(refuse=lambda prompt: (500, "dead") if prompt else None) as dead:
        found = {result.id: result.ids for result in client(base, live, dead).run(requests(60))}
    assert found == {r.id: rule(r.prompt_ids, NEW_TOKENS) for r in requests(60)}
    assert 0 < sum(dead.asked.values()) < 60


def test_a_prompt_that_always_fails_stops_the_run_and_the_next_one_goes_on(base, tmp_path):
    bad = []

    def refuse(prompt):
        bad[:] = bad or [prompt] * bool(prompt)
        return (500, "CUDA error") if prompt and prompt == bad[0] else None

    with FakeServer(refuse=refuse) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("specformer.serving.TRIES", 3)
        with pytest.raises(UserError, match=r"'q\d+' failed 3 times.*500 \(CUDA error\).*run it again"):
            run(base, tmp_path, server, 40, concurrency=2)
        assert server.asked[tuple(bad[0])] == 3
        stored = len(read_shards(tmp_path))
        assert 0 < stored < 40
        server.refuse = lambda prompt: None
        found, rows = run(base, tmp_path, server, 40)
    assert found["new_rows"] == 40 - stored and len(rows) == 40
    assert len(read_shards(tmp_path)) == 40


@pytest.mark.parametrize("words", OVERFLOWS.values(), ids=OVERFLOWS)
def test_a_prompt_too_long_for_the_server_is_dropped_and_not_asked_again(base, tmp_path, words, capsys):
    with FakeServer(refuse=lambda p: (400, words) if p and sum(p) % 3 == 0 else None) as server:
        found, rows = run(base, tmp_path, server)
        dropped = [prompt for prompt in server.asked if sum(prompt) % 3 == 0]
        assert 0 < len(dropped) < 12 and found["dropped"] == {"too_long": len(dropped)}
        assert found["rows"] == len(rows) == 12 - len(dropped) and max(server.asked.values()) == 1
        assert f"dropped, by reason: {{'too_long': {len(dropped)}}}" in capsys.readouterr().out
        assert run(base, tmp_path, server)[0]["new_rows"] == 0
    assert len(read_shards(tmp_path)) == 12
    with FakeServer(refuse=lambda p: (400, words) if p else None) as server:
        with pytest.raises(UserError, match="all prompts were dropped"):
            run(base, tmp_path / "none", server)


def test_without_token_ids_only_text_that_tells_its_ids_is_kept(base, tmp_path, capsys):
    tokenizer = base.tokenizer
    texts = ["The quick brown fox", "A river?", "def add(a, b)"]
    exact = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    split = [i for c in "The fox" for i in tokenizer(c, add_special_tokens=False).input_ids]
    half = tokenizer("é", add_special_tokens=False).input_ids[:1]
    assert len(split) > len(tokenizer("The fox", add_special_tokens=False).input_ids)
    assert tokenizer.decode(half) == "\ufffd"
    answers = [[*exact[0], END], [*exact[1], END], exact[2], split, [*split, END], half]

    def answer(prompt, limit):
        return answers[sum(prompt) % 6]

    with FakeServer(token_ids=False, decode=tokenizer.decode, answer=answer) as server:
        found, rows = run(base, tmp_path, server, 30, max_new_tokens=12)
    kinds = [sum(row["prompt_ids"]) % 6 for row in read_shards(tmp_path)]
    assert set(kinds) == set(range(6))
    assert found["dropped"] == {"inexact": sum(kind > 2 for kind in kinds)}
    assert len(rows) == sum(kind <= 2 for kind in kinds)
    for row in rows:
        assert row["answer_ids"] == answer(row["prompt_ids"], 12)
    assert capsys.readouterr().out.count("returns no token ids") == 1


def test_a_stop_token_that_the_server_cuts_off_is_put_back(base):
    plain = {"token_ids": [7, 8], "finish_reason": "stop"}
    with FakeServer(extra=plain) as server:
        for result in client(base, server).run(requests(3)):
            assert result.ids == [7, 8, END] and result.finish_reason == "stop"


@pytest.mark.parametrize(
    "odd",
    [
        {"finish_reason": "abort"},
        {"token_ids": list(range(3, 14))},
        {"token_ids": [5, 320]},
        {"token_ids": ["5"]},
    ],
    ids=str,
)
def test_odd_answers_count_as_faults(base, odd):
    with FakeServer(extra=odd) as server:
        with pytest.raises(UserError, match=f"failed {TRIES} times; the last time {server.url}"):
            list(client(base, server, rest=0.0).run(requests(1)))
    assert sum(server.asked.values()) == TRIES


def test_a_server_that_changes_the_prompt_is_refused(base):
    with FakeServer(extra={"prompt_token_ids": [1, 5]}) as server:
        with pytest.raises(UserError, match="changed the prompt of request 'r0'"):
            list(client(base, server).run(requests(1)))


def test_an_unreachable_server_is_named(base, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=f"{url}/v1/models .*is a completions server running there"):
        list(client(base, url).run(requests(1)))


def test_all_servers_must_hold_the_model(base):
    with FakeServer() as server, FakeServer(model="other") as other:
        with pytest.raises(UserError, match=f"{other.url} serves 'other', not 'nano'.*distill.model"):
            list(client(base, server, other).run(requests(1)))
        assert not server.asked and not other.asked
        found = list(client(base, other.url + "/v1/", model="other").run(requests(2)))
    assert len(found) == 2


@pytest.mark.parametrize("where", ["models", "completions"])
def test_a_refused_key_stops_at_once_and_is_not_shown(base, tmp_path, monkeypatch, capsys, where):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    refuse = lambda prompt: (401, "bad sk-secret") if prompt or where == "models" else None  # noqa: E731
    with FakeServer(refuse=refuse) as server:
        with pytest.raises(UserError, match="refuses the key in OPENAI_API_KEY") as caught:
            run(base, tmp_path, server)
        assert max(server.asked.values(), default=1) == 1 and len(server.asked) <= 4
        server.refuse = lambda prompt: (404, "no sk-secret here") if prompt else None
        with pytest.raises(UserError, match=r"refuses the request \(status 404\): no \*\*\* here") as second:
            run(base, tmp_path, server)
        server.refuse = lambda prompt: None
        run(base, tmp_path, server)
    said = f"{caught.value}{second.value}{capsys.readouterr()}"
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert "secret" not in said and b"secret" not in stored and b"OPENAI" not in stored


def test_an_unknown_certificate_stops_at_once(base, tmp_path):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fake")])
    now = datetime.datetime.now(datetime.UTC)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(host, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, form = tmp_path / "fake.pem", serialization.PrivateFormat.TraditionalOpenSSL
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    pem.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pem)
    with FakeServer(tls=tls) as server, pytest.raises(UserError, match="no secure connection") as caught:
        list(client(base, server, rest=30.0).run(requests(1)))
    assert server.url in str(caught.value)


@pytest.mark.server
def test_vllm_gives_the_greedy_ids_of_the_local_engine(smollm2_folder, tmp_path):
    """SPECFORMER_VLLM_PYTHON: the python of an environment with vLLM. Both in float32, so that ids agree."""
    python = os.environ.get("SPECFORMER_VLLM_PYTHON")
    assert python, "set SPECFORMER_VLLM_PYTHON to the python of an environment with vLLM"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2"]
    command += ["--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("PYTHONPATH", None)
    log = (tmp_path / "vllm.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert process.poll() is None, Path(log.name).read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                    assert json.load(answer)["data"][0]["id"] == "smollm2"
                break
            except OSError:
                time.sleep(1)
        base = load_base(smollm2_folder, dtype="float32", device="cpu")
        dialogues = list(serving_load.Questions(6))
        options: dict[str, Any] = {"max_new_tokens": 32, "batch_size": 3, "max_length": 256}
        options |= {"prefill_chunk": 64, "shard_rows": 4}
        distill(base, dialogues, tmp_path / "local", **options)
        served: dict[str, Any] = {"servers": [url], "model": "smollm2", "concurrency": 4}
        found = distill(base, dialogues, tmp_path / "served", **options, **served)
        assert found["new_rows"] == found["rows"] == 6
        assert read_rows(tmp_path / "served", dialogues) == read_rows(tmp_path / "local", dialogues)
        too_long = [Request("long", [5] * 600, 32), Request("short", [5] * 6, 4)]
        results = {r.id: r for r in Servers(base, [url], model="smollm2").run(too_long)}
        assert results["long"].finish_reason == "too_long" and len(results["short"].ids) == 4
    finally:
        process.terminate()
        process.wait()
        log.close()
