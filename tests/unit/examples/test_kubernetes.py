"""The Kubernetes samples: every field is one that there is, of its type, and they start what there is to start."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_fp8.commands.launch import _check, _parser, _program
from megatron_fp8.files.user_paths import example_configs
from megatron_fp8.train.config import run_config
from tests.support.custom_resources import faults, sample, schema

SAMPLES = ["jobset", "pytorchjob"]


def pods(name: str) -> list[dict[str, Any]]:
    """The pods' specifications."""
    spec = sample(name)["spec"]
    if name == "jobset":
        return [job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"]]
    return [replicas["template"]["spec"] for replicas in spec["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_field_is_one_that_there_is(name):
    assert faults(sample(name), schema(name)) == []


def changed(node: Any) -> Iterator[Any]:
    """The document with one field that does not exist, or one value of another type, at each of its places in turn."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield {**{k: v for k, v in node.items() if k != key}, f"{key}s": value}
            yield from ({**node, key: other} for other in changed(value))
    elif isinstance(node, list):
        for place, value in enumerate(node):
            yield from ([*node[:place], other, *node[place + 1 :]] for other in changed(value))
    else:
        yield None
        yield [node]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_field_or_a_value_that_is_wrong_is_found_at_each_place(name):
    """But for the name of a resource, which a cluster's plugins give it."""
    wrong = [other for other in changed(sample(name)) if "nvidia.com/gpus" not in str(other)]
    assert len(wrong) > 100
    published = schema(name)
    assert [other for other in wrong if not faults(other, published)] == []


VARIABLES = {"NODE_RANK": "1", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"}
VARIABLES |= {"MASTER_ADDR": "megatron-fp8-master-0", "MASTER_PORT": "23456"}


def told(container: dict[str, Any]) -> Namespace:
    """What the launcher of a pod is told, with the variables of pod 1."""
    words = [re.sub(r"\$\((\w+)\)", lambda found: VARIABLES[found[1]], word) for word in container["command"]]
    assert words[:2] == ["megatron-fp8", "launch"]
    return _parser().parse_args(words[2:])


@pytest.mark.parametrize("name", SAMPLES)
def test_pods_start_what_there_is(name):
    """The launcher takes the command line, and so does the training; all that it names is mounted."""
    for pod in pods(name):
        (container,) = pod["containers"]
        options = told(container)
        _check(options)
        assert _program(options.command) and options.nodes == 2 and options.stopped_code == 143
        train = options.command[1:]
        assert "--config=llama3_8b" in train and "llama3_8b" in example_configs()
        run_config.parse(train)
        assert options.ranks == container["resources"]["limits"]["nvidia.com/gpu"]
        mounted = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == mounted
        places = [mount["mountPath"] for mount in container["volumeMounts"]]
        for path in re.findall(r"(?:=|\[')(/\w+)", " ".join(container["command"])):
            assert path in places


def test_the_address_of_pod_0_is_as_jobset_names_it():
    content = sample("jobset")
    (job,) = content["spec"]["replicatedJobs"]
    name, spec = content["metadata"]["name"], job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    options = told(container)
    assert options.master == f"{name}-{job['name']}-0-0.{name}:29500"
    assert spec["completions"] == spec["parallelism"] == options.nodes
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]


def test_pytorchjob_says_the_ranks_of_a_pod_once():
    spec = sample("pytorchjob")["spec"]
    assert spec["nprocPerNode"] == VARIABLES["PET_NPROC_PER_NODE"]
    assert [pod["containers"][0]["name"] for pod in pods("pytorchjob")] == ["pytorch", "pytorch"]
