"""Validates objects by the schemas of kubernetes-validate, whose warnings count: an unknown kind is no valid object.

    built_in.py VERSION... < objects.json    prints a JSON list of problems

Runs in the environment of the tools, which has no Tandem.
"""

import json
import sys
import warnings
from typing import Any

import kubernetes_validate


def problems(thing: dict[str, Any], version: str) -> list[str]:
    """What is wrong with one object, at most one thing: validation stops at the first."""
    name = f"{thing['kind']} {thing['metadata']['name']} in Kubernetes {version}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name}: {'/'.join(map(str, error.path))}: {error.message}"]
    except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.InvalidSchemaError, Warning) as error:
        return [f"{name}: {error}"]
    return []


if __name__ == "__main__":
    objects = json.load(sys.stdin)
    print(
        json.dumps([problem for thing in objects for version in sys.argv[1:] for problem in problems(thing, version)])
    )
