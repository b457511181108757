"""The Kubernetes samples: every field is one that there is, of its type, and they start what there is to start.

The fields are written down here by hand, those that the samples use and no more. The samples as they are were valid
against the published schemas of JobSet v0.12.0 and of Kubeflow's training operator v1.9.4, unknown fields refused.
"""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fp8.commands.launch import _check, _parser, _program
from megatron_fp8.files.shipped import shipped_configs
from megatron_fp8.train.config import run_config

FOLDER = Path(__file__).parents[3] / "examples" / "kubernetes"
SAMPLES = ["jobset", "pytorchjob"]

POD: dict[str, Any] = {
    "spec": {
        "restartPolicy": ("Never", "OnFailure", "Always"),
        "terminationGracePeriodSeconds": int,
        "containers": [
            {
                "name!": str,
                "image": str,
                "command": [str],
                "env": [{"name!": str, "valueFrom": {"fieldRef": {"fieldPath!": str}}}],
                "resources": {"limits": {"nvidia.com/gpu": int}},
                "volumeMounts": [{"name!": str, "mountPath!": str}],
            }
        ],
        "volumes": [
            {
                "name!": str,
                "persistentVolumeClaim": {"claimName!": str},
                "emptyDir": {"medium": ("", "Memory")},
            }
        ],
    }
}
REPLICAS = {"replicas": int, "restartPolicy": ("Never", "OnFailure", "Always", "ExitCode"), "template": POD}
ON_EXIT = {"containerName": str, "operator!": ("In", "NotIn"), "values!": [int]}
FIELDS: dict[str, dict[str, Any]] = {
    "jobset": {
        "apiVersion!": ("jobset.x-k8s.io/v1alpha2",),
        "kind!": ("JobSet",),
        "metadata!": {"name!": str},
        "spec!": {
            "failurePolicy": {
                "maxRestarts": int,
                "rules": [
                    {
                        "name!": str,
                        "action!": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                        "onJobFailureReasons": [str],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name!": str,
                    "replicas": int,
                    "template!": {
                        "spec": {
                            "completionMode": ("Indexed", "NonIndexed"),
                            "completions": int,
                            "parallelism": int,
                            "backoffLimit": int,
                            "podFailurePolicy": {
                                "rules!": [
                                    {
                                        "action!": ("FailJob", "FailIndex", "Ignore", "Count"),
                                        "onExitCodes": ON_EXIT,
                                    }
                                ]
                            },
                            "template!": POD,
                        }
                    },
                }
            ],
        },
    },
    "pytorchjob": {
        "apiVersion!": ("kubeflow.org/v1",),
        "kind!": ("PyTorchJob",),
        "metadata!": {"name!": str},
        "spec!": {
            "nprocPerNode": str,
            "runPolicy!": {"backoffLimit": int, "cleanPodPolicy": ("All", "Running", "None")},
            "pytorchReplicaSpecs!": {"Master": REPLICAS, "Worker": REPLICAS},
        },
    },
}
"""Names of fields, '!' after one that must be there, and their types; a tuple: its values."""


def faults(content: Any, fields: Any, at: str = "") -> list[str]:
    """What is wrong with a document, each with its place."""
    if isinstance(fields, tuple):
        return [] if content in fields else [f"{at} is {content!r} and not one of {fields}"]
    if isinstance(fields, list):
        items = content if isinstance(content, list) and content else [None]
        return [fault for n, item in enumerate(items) for fault in faults(item, fields[0], f"{at}[{n}]")]
    if isinstance(fields, dict):
        known = {name.rstrip("!"): kind for name, kind in fields.items()}
        if not isinstance(content, dict):
            return [f"{at} has no fields"]
        missing = [
            f"{at}.{name[:-1]} is missing" for name in fields if name[-1] == "!" and name[:-1] not in content
        ]
        unknown = [f"{at}.{name} is unknown" for name in content if name not in known]
        inner = [
            fault for k, v in content.items() if k in known for fault in faults(v, known[k], f"{at}.{k}")
        ]
        return missing + unknown + inner
    return [] if type(content) is fields else [f"{at} is {content!r} and no {fields.__name__}"]


def sample(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return found


def pods(name: str) -> list[dict[str, Any]]:
    """The pods' specifications."""
    spec = sample(name)["spec"]
    if name == "jobset":
        return [job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"]]
    return [replicas["template"]["spec"] for replicas in spec["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_field_is_one_that_there_is(name):
    assert faults(sample(name), FIELDS[name]) == []


@pytest.mark.parametrize("name", SAMPLES)
def test_a_field_that_is_wrong_is_found(name):
    content = sample(name)
    for change in (
        lambda spec: spec.update(replica=1),
        lambda spec: (
            spec.pop("replicatedJobs" if name == "jobset" else "runPolicy") and spec.update(replicatedJobs=3)
        ),
    ):
        wrong = copy.deepcopy(content)
        change(wrong["spec"])
        assert faults(wrong, FIELDS[name])
    assert faults({**content, "kind": "Job"}, FIELDS[name])


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
        assert "--config=llama3_8b" in train and "llama3_8b" in shipped_configs()
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
