"""`holdfast up` on devices that a person named."""

from __future__ import annotations

import json
import urllib.request

import pytest
from up_rig import START_S, Place

from holdfast.cli.models import named
from holdfast.supervise.records import launch_path

SHAPE = ("--engine", "torch", "--model", "tiny", "--torch-threads", "1")


def test_a_random_shape_is_no_path() -> None:
    """`random:8b` is handed on as it is, and is the model's name too."""
    assert named("torch", "random:8b", "") == ("random:8b", "random:8b")
    assert named("torch", "random:8b", "big") == ("random:8b", "big")


@pytest.mark.processes
@pytest.mark.long
def test_a_tiny_model_on_the_cpu(place: Place) -> None:
    """`up --engine torch --device cpu --model tiny` answers, and its engines have what was asked for."""
    wanted = ("--device", "cpu", "--context", "256", "--streams-max", "3")
    done = place.run("up", "--detach", "--port", str(place.port), *place.shape, *wanted)
    assert done.returncode == 0, done.stderr
    assert "--device auto" not in done.stdout
    assert list(place.ps()) == [
        "store",
        "vault-1",
        "vault-1-keeper",
        "vault-1-server",
        "worker-1a",
        "worker-1b",
        "frontend",
    ]
    launch = json.loads(launch_path(place.state_dir, "worker-1a").read_bytes())
    assert (launch["place"]["device"], launch["standbys"], launch["place"]["more_vaults"]) == ("host-1", 1, [])
    assert (launch["torch"]["context_tokens_max"], launch["torch"]["concurrency"]) == (256, 3)
    body = {"model": "tiny", "prompt": "as ever", "max_tokens": 5, "ignore_eos": True}
    url = f"http://127.0.0.1:{place.port}/v1/completions"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    answer = urllib.request.urlopen(asked, timeout=START_S)
    assert json.load(answer)["usage"]["completion_tokens"] == 5


@pytest.mark.processes
def test_auto_says_what_it_took(place: Place) -> None:
    """Where a person leaves the device to us, the first line says which it is."""
    done = place.run("up", "--detach", "--port", str(place.port), *place.shape, "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--device auto: ")
