"""Schemas of the custom resources in examples/kubernetes, and how they stand to the published ones.

tests/support/kubernetes has them: of the published CustomResourceDefinitions (JobSet v0.12.0, training operator v1.9.0)
the fields that the samples use and some beside them, trimmed by hand. Every other field is refused. Values are listed
where Kubernetes' reference lists them, though the definition may say no more than "string".

    python -m tests.support.custom_resources jobset jobset.x-k8s.io_jobsets.yaml

says, with a definition that somebody has fetched, what the trimmed schema has otherwise, and what the definition itself
has against the sample, fields unknown to it included. It ends with 1 if there is anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

FOLDER = Path(__file__).with_name("kubernetes")
SAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
POD = "pod.json"

Schema = dict[str, Any]


def sample(name: str) -> Schema:
    """A sample, as a document."""
    found: Schema = yaml.safe_load((SAMPLES / f"{name}.yaml").read_text())
    return found


def schema(name: str) -> Schema:
    """The trimmed schema of a sample's kind."""
    pod = json.loads((FOLDER / POD).read_text())
    found: Schema = json.loads(
        (FOLDER / f"{name}.json").read_text(), object_hook=lambda part: pod if part == {"$ref": POD} else part
    )
    Draft202012Validator.check_schema(found)
    return found


def faults(document: Any, wanted: Schema) -> list[str]:
    """What is wrong with a document, each with its place."""
    return [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(wanted).iter_errors(document)
    ]


def departures(trimmed: Schema, published: Schema, at: str = "$") -> list[str]:
    """What a trimmed schema says that the published one does not; it may list values of a string and require more."""
    if not published.keys() & {"properties", "items", "additionalProperties", "anyOf", "enum"} and (
        published.get("type") == "object"
    ):
        return []  # metadata: Kubernetes' own, which no definition describes
    kinds = published.get("type") or [option["type"] for option in published["anyOf"]]
    found = [] if trimmed["type"] == kinds else [f"{at} is {trimmed['type']}, published {kinds}"]
    if missing := set(published.get("required", ())) - set(trimmed.get("required", ())):
        found.append(f"{at} lacks required {sorted(missing)}")
    if "enum" in published and set(trimmed.get("enum", ())) != set(published["enum"]):
        found.append(f"{at} has values {trimmed.get('enum')}, published {published['enum']}")
    there = published.get("properties", {})
    for name, part in trimmed.get("properties", {}).items():
        found += (
            departures(part, there[name], f"{at}.{name}") if name in there else [f"{at}.{name} is unknown"]
        )
    for each in ("items", "additionalProperties"):
        if part := trimmed.get(each):
            found += departures(part, published[each], f"{at}[]")
    return found


def closed(published: Schema) -> Schema:
    """A published schema under which a field that it does not name is refused."""
    if not isinstance(published, dict):
        return published
    found = {
        key: closed(part) for key, part in published.items() if key not in ("properties", "format", "pattern")
    }
    if "properties" in published:
        found["properties"] = {name: closed(part) for name, part in published["properties"].items()}
        found.setdefault("additionalProperties", False)
    return found


def main(name: str, path: str) -> int:
    """Compare with a CustomResourceDefinition; the exit code."""
    content = sample(name)
    version = content["apiVersion"].partition("/")[2]
    definition = yaml.safe_load(Path(path).read_text())
    (published,) = (
        each["schema"]["openAPIV3Schema"]
        for each in definition["spec"]["versions"]
        if each["name"] == version
    )
    said = [*departures(schema(name), published), *faults(content, closed(published))]
    print("\n".join(said) or f"{name}: nothing departs from {path}, and the sample is valid against it")
    return int(bool(said))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
